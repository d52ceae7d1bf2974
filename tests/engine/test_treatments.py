"""Parameters with ranks, or a ZeRO stage, of their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import RankPools, on_ranks
from torch import Tensor, nn

from engine.toys import TINY, assert_close, batch_of, engine_of, loss_of, model_of
from hadal import comm
from hadal.comm.ranks import make_expert_groups
from hadal.errors import ConfigError, NotBuiltYetError, UsageError
from hadal.zero.policy import STAGES

CLIP, MICROS, UPDATES = 0.05, 2, 3

# ---- modules with a stage of their own -----------------------------------------------------------


def deep_model() -> nn.Sequential:
    torch.manual_seed(3)
    blocks = [nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.LayerNorm(6)) for _ in range(3)]
    return nn.Sequential(*blocks, nn.Linear(6, 4))


def train_micros(engine: Any, *further: Any) -> list[float]:
    norms = []
    for step in range(MICROS * UPDATES):
        inputs, targets = batch_of(step)
        engine.backward(loss_of(engine(inputs, *further), targets))
        engine.step()
        if (step + 1) % MICROS == 0:
            norms.append(engine.get_global_grad_norm())
    return norms


@pytest.mark.fast_cells("3-1-False", "2-1-True", "1-0-False")
@pytest.mark.parametrize(
    ("stage", "lower", "offload"),
    [(3, 0, False), (3, 1, False), (3, 2, True), (2, 0, False), (2, 1, True), (1, 0, False)],
)
@on_ranks(2)
def test_modules_may_have_a_lower_stage(stage: int, lower: int, offload: bool) -> None:
    keys: dict[str, Any] = {
        "gradient_clipping": CLIP,
        "gradient_accumulation_steps": MICROS,
    }
    plain = engine_of(0, deep_model(), **keys)
    norms = train_micros(plain)
    limits = {k: v for k, v in TINY.items() if stage == 3 or "stage3" not in k}
    groups = [{"modules": ["1", "LayerNorm"], "stage": lower}]
    zero: dict[str, Any] = {"stage": stage, **limits, "groups": groups}
    if offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    mixed = engine_of(stage, deep_model(), zero_optimization=zero, **keys)
    found = {
        slot.name: bucket.partition
        for bucket in mixed._parts.runtime.buckets
        for slot in bucket.layout.slots
    }
    own = {name for name in found if name.startswith("1.") or name.split(".")[1] == "2"}
    assert {name for name, partition in found.items() if partition == STAGES[lower]} == own
    assert {found[name] for name in found.keys() - own} == {STAGES[stage]}
    assert train_micros(mixed) == pytest.approx(norms, rel=1e-6)
    assert_close(mixed.state_dict(), plain.state_dict())


def of_groups(*groups: dict[str, Any], stage: int = 2, **zero: Any) -> None:
    engine_of(stage, zero_optimization={"stage": stage, "groups": list(groups), **zero})


@pytest.mark.parametrize(
    ("stage", "group", "zero", "told"),
    [
        (2, {"modules": "9", "stage": 1}, {}, "groups[0].modules '9' matches"),
        (2, {"modules": "0", "stage": 3}, {}, "groups[0].stage 3 is above"),
        (2, {"stage": 1}, {}, "names no modules"),
        (3, {"modules": "0", "stage": 1}, {"mics_shard_size": 1}, "not built yet with"),
    ],
)
def test_groups_that_cannot_be(
    stage: int, group: dict[str, Any], zero: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        of_groups(group, stage=stage, **zero)
    assert told in " ".join(str(caught.value).split())


# ---- experts -------------------------------------------------------------------------------------


class TwoExperts(nn.Module):
    """A dense model, and one or all of the experts that are distributed over ranks.

    Each rank's samples go through one expert, so that its mean is over all ranks.
    """

    def __init__(self, size: int, place: int | None) -> None:
        super().__init__()
        self.dense = model_of()
        experts = [model_of(10 + number) for number in range(size)]
        mine = experts if place is None else [experts[place]]
        self.experts = nn.ModuleList(mine)
        if place is not None:
            for parameter in self.experts.parameters():
                parameter.allreduce = False  # type: ignore[attr-defined]
                parameter.group_name = f"ep_size_{size}"  # type: ignore[attr-defined]

    def forward(self, inputs: Tensor, number: int = 0) -> Tensor:
        result: Tensor = self.dense(inputs) + self.experts[number](inputs)
        return result


def train_experts_alone(size: int, optimizer: str) -> tuple[nn.Module, list[float]]:
    """One process that has all experts and sees all ranks' samples."""
    model, world = TwoExperts(size, None), comm.get_world_size()
    kinds = {"SGD": lambda p: torch.optim.SGD(p, 0.5), "AdamW": _adamw}
    stepping, norms = kinds[optimizer](model.parameters()), []
    for update in range(UPDATES):
        stepping.zero_grad()
        for micro in range(MICROS):
            for rank in range(world):
                inputs, targets = batch_of(MICROS * update + micro, rank)
                loss = loss_of(model(inputs, rank % size), targets)
                (loss / (world * MICROS)).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        stepping.step()
    return model, norms


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 0.01, weight_decay=0.0)


def experts_over(size: int, stage: int, optimizer: str, zero: dict[str, Any]) -> None:
    groups = make_expert_groups(size, comm.Ranks.world())
    params = {"lr": 0.5} if optimizer == "SGD" else {"lr": 0.01, "weight_decay": 0.0}
    engine = engine_of(
        stage,
        TwoExperts(size, groups.parallel.rank),
        gradient_clipping=CLIP,
        gradient_accumulation_steps=MICROS,
        optimizer={"type": optimizer, "params": params},
        zero_optimization={
            "stage": stage,
            **{k: v for k, v in TINY.items() if stage == 3 or "stage3" not in k},
            **zero,
        },
    )
    for bucket in engine._parts.runtime.buckets:
        is_expert = bucket.layout.slots[0].name.startswith("experts")
        assert bucket.ranks.size == comm.get_world_size() // (size if is_expert else 1)
    norms = train_micros(engine)
    plain, expected = train_experts_alone(size, optimizer)
    assert expected[0] > CLIP
    assert norms == pytest.approx(expected, rel=1e-5)
    numbers = {f"experts.{groups.parallel.rank}.": "experts.0."}
    whole = {
        name.replace(mine, local): value
        for mine, local in numbers.items()
        for name, value in plain.state_dict().items()
        if not name.startswith("experts") or name.startswith(mine)
    }
    assert_close(engine.state_dict(), whole)


@pytest.mark.fast_cells("Muon-3")
@pytest.mark.parametrize(("kind", "stage"), [("Lamb", 2), ("Muon", 3)])
@on_ranks(4)
def test_experts_are_whole_parameters_of_their_own(kind: str, stage: int) -> None:
    """Against an engine whose ranks all have all experts."""
    keys = {"optimizer": {"type": kind, "params": {"lr": 0.01}}, "gradient_clipping": CLIP}
    keys["gradient_accumulation_steps"] = MICROS
    groups = make_expert_groups(2, comm.Ranks.world())
    everywhere = engine_of(0, TwoExperts(2, None), **keys)
    norms = train_micros(everywhere, groups.parallel.rank)
    apart = engine_of(stage, TwoExperts(2, groups.parallel.rank), **keys)
    assert train_micros(apart) == pytest.approx(norms, rel=1e-5)
    expected, mine = everywhere.state_dict(), f"experts.{groups.parallel.rank}."
    for name, value in apart.state_dict().items():
        there = name.replace("experts.0.", mine)
        assert torch.allclose(value, expected[there], rtol=1e-5, atol=1e-6), name


OFFLOAD = {"offload_optimizer": {"device": "cpu"}}


@pytest.mark.slow_cells("3")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_experts_are_averaged_over_all_samples(stage: int, ranks: RankPools) -> None:
    ranks(2).run(experts_over, 2, stage, "SGD", {})


@pytest.mark.fast_cells("3-SGD-zero4")
@pytest.mark.parametrize(
    ("stage", "optimizer", "zero"),
    [
        (0, "AdamW", {}),
        (1, "AdamW", OFFLOAD),
        (2, "SGD", {}),
        (3, "AdamW", {}),
        (3, "SGD", OFFLOAD),
    ],
)
def test_copies_of_experts_share_their_states(
    stage: int, optimizer: str, zero: dict[str, Any], ranks: RankPools
) -> None:
    ranks(4).run(experts_over, 2, stage, optimizer, zero)


def of_experts(optimizer: str = "AdamW", **zero: Any) -> None:
    place = make_expert_groups(2, comm.Ranks.world()).parallel.rank
    of = {"type": optimizer, "params": {"lr": 0.1}}
    engine = engine_of(0, TwoExperts(2, place), optimizer=of, zero_optimization=zero)
    train_micros(engine)


def of_unknown_experts() -> None:
    model = TwoExperts(2, 0)
    for parameter in model.experts.parameters():
        parameter.group_name = "mine"  # type: ignore[attr-defined]
    engine_of(0, model)


def of_too_many_ranks() -> None:
    engine_of(0, TwoExperts(7, 0))


def test_experts_that_cannot_be(ranks: RankPools) -> None:
    for error in ranks(2).raises(of_unknown_experts):
        assert isinstance(error, UsageError)
        assert "'mine'" in str(error)
    for error in ranks(2).raises(of_too_many_ranks):
        assert isinstance(error, UsageError)
        assert "experts over 7 ranks" in str(error)
    for error in ranks(4).raises(of_second_copies):
        assert isinstance(error, ConfigError)
        assert "zero_hpz_partition_size  not built yet for experts over 2" in str(error)
    for error in ranks(2).raises(of_signs):
        assert isinstance(error, NotBuiltYetError)
        assert "optimizer.type: OneBitAdam is not built yet for experts" in str(error)


def of_second_copies() -> None:
    of_experts(stage=3, zero_hpz_partition_size=2)


def of_signs() -> None:
    of_experts("OneBitAdam", stage=0)
