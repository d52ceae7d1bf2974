"""Checkpoints loaded into another configuration: dtypes, param groups, optimizers, names."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.logs import logged
from engine.parts import Part, engine_over, megatron
from engine.toys import TINY, assert_close, assert_equal, engine_of, train
from ranks import RankPools, on_ranks
from torch import Tensor, nn

import hadal
from checkpoint.test_reshard import Odd, trained
from hadal import comm
from hadal.checkpoint.stored import StoredSource
from hadal.errors import CheckpointError
from hadal.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

BF16 = {"bf16": {"enabled": True}}
NO_MASTER = {
    "bf16": {
        "enabled": True,
        "bf16_master_weights_and_grads": True,
        "bf16_optimizer_states": True,
    }
}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 4}}


def on_rank_0(act: Any) -> None:
    if comm.get_rank() == 0:
        act()
    comm.barrier()


def masters_of(engine: Any) -> dict[str, Tensor]:
    return {n: safe_get_full_fp32_param(p) for n, p in engine.module.named_parameters()}


def odd(seed: int, settings: dict[str, Any]) -> Odd:
    model = Odd(seed)
    # torch's Adafactor divides by the number of elements.
    has_empty = settings.get("optimizer", {}).get("type") != "Adafactor"
    model.nothing.requires_grad_(has_empty)
    return model


def save(folder: str, stage: int, settings: dict[str, Any], tag: str = "one") -> None:
    """Save, and return the masters, the weights, and the weights three steps later."""
    engine = engine_of(stage, odd(3, settings), **settings)
    trained(engine, range(3))
    engine.save_checkpoint(folder, tag)
    values = [masters_of(engine), engine.state_dict()]
    trained(engine, range(3, 6))
    values.append(engine.state_dict())
    on_rank_0(lambda: torch.save(values, Path(folder, f"{tag}.pt")))
    engine.destroy()


# ---- dtypes --------------------------------------------------------------------------------------


def load_in_other_dtypes(folder: str, stage: int) -> None:
    for tag, saved in (("bf16", True), ("fp32", True), ("none", False)):
        masters, weights, _ = torch.load(Path(folder, f"{tag}.pt"))
        for settings, keeps in ((BF16, True), ({}, True), (NO_MASTER, False), (FP16, True)):
            engine = engine_of(stage, Odd(5), **settings)
            engine.load_checkpoint(folder, tag)
            for name, found in masters_of(engine).items():
                is_trained = "frozen.bias" not in name
                exact = masters if saved and is_trained else weights
                wanted = exact[name].float()
                if not (keeps and is_trained):
                    wanted = wanted.to(engine.module.scale.dtype).float()
                assert torch.equal(found, wanted), (tag, settings, name)
            for name, found in engine.state_dict().items():
                if name in masters and engine.module.scale.dtype == weights[name].dtype:
                    assert torch.equal(found, weights[name]), (tag, settings, name)
                elif name in masters:
                    assert torch.equal(found, masters[name].to(found.dtype)), (tag, name)
            trained(engine, range(1))
            engine.destroy()


@pytest.mark.slow
def test_weights_and_masters_of_any_dtype_load_in_any_other(
    ranks: RankPools, tmp_path: Path
) -> None:
    for tag, settings in (("bf16", BF16), ("fp32", {}), ("none", NO_MASTER)):
        ranks(1).run(save, str(tmp_path), 1, settings, tag)
    ranks(2).run(load_in_other_dtypes, str(tmp_path), 3)


def masters_from_weights(folder: str) -> None:
    masters, weights, _ = torch.load(Path(folder, "one.pt"))
    for zero, wanted in (({}, masters), ({"load_from_fp32_weights": False}, weights)):
        engine = engine_of(2, Odd(5), **BF16, zero_optimization={"stage": 2, **zero})
        with logged() as told:
            engine.load_checkpoint(folder)
        told_of_it = any("masters are initialized from the saved weights" in line for line in told)
        assert told_of_it == (bool(zero) and comm.get_rank() == 0)
        for name, found in masters_of(engine).items():
            assert torch.equal(found, wanted[name].float()), name
        engine.destroy()


@pytest.mark.claims("zero_optimization.load_from_fp32_weights")
def test_masters_come_from_masters_or_from_weights(ranks: RankPools, tmp_path: Path) -> None:
    ranks(2).run(save, str(tmp_path), 2, BF16)
    ranks(2).run(masters_from_weights, str(tmp_path))


# ---- optimizers ----------------------------------------------------------------------------------

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "Lamb": {"optimizer": {"type": "Lamb", "params": {"lr": 0.01}}},
    "Muon": {"optimizer": {"type": "Muon", "params": {"lr": 0.01}}},
    "Adafactor": {"optimizer": {"type": "Adafactor", "params": {"lr": 0.1}}},
    "NAdam": {"optimizer": {"type": "NAdam", "params": {"lr": 0.01}}},
    "sparse": {"sparse_gradients": True},
}


def go_on(folder: str, stage: int, settings: dict[str, Any], tag: str) -> None:
    masters, _, later = torch.load(Path(folder, f"{tag}.pt"))
    engine = engine_of(stage, odd(5, settings), **settings)
    engine.load_checkpoint(folder, tag)
    assert_equal(masters_of(engine), masters)
    trained(engine, range(3, 6))
    found = engine.state_dict()
    # Muon brings small singular values near 1, and their rounding errors along.
    near = 2e-4 if settings.get("optimizer", {}).get("type") == "Muon" else 1e-6
    for name, value in later.items():
        assert torch.allclose(found[name], value, rtol=10 * near, atol=near), (
            name,
            (found[name] - value).abs().max(),
        )
    engine.destroy()


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_loads_into_every_kind_of_stepper(
    name: str, ranks: RankPools, tmp_path: Path
) -> None:
    settings, folder = OPTIMIZERS[name], str(tmp_path)
    for world, stage in ((2, 3), (2, 0), (1, 0), (3, 1)):
        ranks(world).run(save, folder, stage, settings, f"{world}.{stage}")
    for world, stage, tag in ((1, 0, "2.3"), (3, 3, "2.0"), (2, 2, "1.0"), (2, 0, "3.1")):
        ranks(world).run(go_on, folder, stage, settings, tag)


def load_with_another_optimizer(folder: str) -> None:
    engine = engine_of(1, Odd(5), optimizer={"type": "SGD", "params": {"lr": 0.1}})
    before = engine.state_dict()
    with pytest.raises(CheckpointError, match=r"of AdamW.*here is SGD.*load_optimizer_states"):
        engine.load_checkpoint(folder)
    assert_equal(engine.state_dict(), before)
    engine.load_checkpoint(folder, load_optimizer_states=False)
    assert_equal(masters_of(engine), torch.load(Path(folder, "one.pt"))[0])
    assert engine.get_lr() == [0.1]
    assert engine.global_steps == 3
    engine.destroy()


def test_another_optimizers_state_is_refused(ranks: RankPools, tmp_path: Path) -> None:
    ranks(2).run(save, str(tmp_path), 1, {})
    ranks(2).run(load_with_another_optimizer, str(tmp_path))


# ---- param groups --------------------------------------------------------------------------------


def grouped(seed: int, *groups: tuple[list[str], float]) -> Any:
    model = Odd(seed)
    named = dict(model.named_parameters())
    given = [
        {"params": [named[name] for name in names], "lr": rate, "weight_decay": rate / 10}
        for names, rate in groups
    ]
    wishes = {"optimizer": torch.optim.AdamW(given)}
    return engine_of(1, model, wishes, optimizer=None)


EDGE = ["first.weight", "first.bias", "last.weight"]
CORE = ["second.weight", "frozen.weight"]


@on_ranks(2)
def test_groups_are_matched_by_parameter_names(tmp_path: Path) -> None:
    through = grouped(3, (EDGE, 0.01), (CORE, 0.002))
    trained(through, range(3))
    through.save_checkpoint(tmp_path)
    masters = masters_of(through)
    moments = {
        name: safe_get_full_optimizer_state(p, "exp_avg")
        for name, p in through.module.named_parameters()
        if name in EDGE + CORE
    }
    # Turned round, and one parameter in a group of its own; its options are as it had them.
    other = grouped(5, (CORE, 0.5), (EDGE[1:], 0.5), (EDGE[:1], 0.5))
    other.load_checkpoint(tmp_path, load_module_strict=False)
    assert other.get_lr() == [0.002, 0.01, 0.01]
    assert [group["weight_decay"] for group in other.optimizer.param_groups] == [2e-4, 1e-3, 1e-3]
    for name, parameter in other.module.named_parameters():
        if name in moments:
            found = safe_get_full_optimizer_state(parameter, "exp_avg")
            assert torch.equal(found, moments[name]), name
            assert torch.equal(safe_get_full_fp32_param(parameter), masters[name])
    trained(through, range(3, 6))
    trained(other, range(3, 6))
    found, wanted = other.state_dict(), through.state_dict()
    assert_close({n: found[n] for n in EDGE + CORE}, {n: wanted[n] for n in EDGE + CORE})
    # All in one: what the groups differ in stays as it is, and is told.
    joined = grouped(5, (EDGE + CORE, 0.5))
    with logged() as told:
        joined.load_checkpoint(tmp_path)
    assert joined.get_lr() == [0.5]
    assert any("disagree keep their values here: lr, weight_decay" in line for line in told) == (
        comm.get_rank() == 0
    )
    # One that was not trained: it begins with zeros, and that is told.
    more = grouped(5, ([*EDGE, "last.bias"], 0.5), (CORE, 0.5))
    with logged() as told:
        more.load_checkpoint(tmp_path)
    is_told = any("no optimizer state of last.bias" in line for line in told)
    assert is_told == (comm.get_rank() == 0)
    assert more.get_lr() == [0.01, 0.002]
    trained(more, range(1))
    for engine in (through, other, joined, more):
        engine.destroy()


# ---- names ---------------------------------------------------------------------------------------


class Renamed(Odd):
    """A model with one parameter fewer, one more, and a tied one under its other name."""

    def __init__(self) -> None:
        super().__init__(5)
        del self.scale
        self.extra = nn.Parameter(torch.full((3,), 7.0))
        tied = self.tied
        del self.second, self.tied
        self.tied = tied
        self.register_buffer("passing", torch.zeros(2), persistent=False)

    @property
    def scale(self) -> Tensor:
        return self.extra.sum() / 21

    @property
    def second(self) -> nn.Module:
        return self.tied


def fit_names(folder: str) -> None:
    masters, weights, _ = torch.load(Path(folder, "one.pt"))
    engine = engine_of(3, Renamed())
    before = engine.state_dict()
    with pytest.raises(CheckpointError, match=r"lacks extra\. the model lacks scale\. Pass"):
        engine.load_checkpoint(folder)
    assert_equal(engine.state_dict(), before)
    with logged() as told:
        engine.load_checkpoint(folder, load_module_strict=False)
    if comm.get_rank() == 0:
        assert any("lacks extra: these keep" in line for line in told), told
        assert any("not in the model and ignored: scale" in line for line in told), told
    found = engine.state_dict()
    for name, value in found.items():
        saved = {"extra": before["extra"], "tied.weight": masters["second.weight"]}
        assert torch.equal(value, saved.get(name, weights.get(name))), name
    engine.destroy()


def test_names_are_strict_by_default(ranks: RankPools, tmp_path: Path) -> None:
    ranks(2).run(save, str(tmp_path), 2, {})
    ranks(2).run(fit_names, str(tmp_path))


class Wrapped(nn.Module):
    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base

    def forward(self, inputs: Tensor) -> Tensor:
        return self.base(inputs)


@on_ranks(2)
def test_names_are_those_of_the_current_model(tmp_path: Path) -> None:
    """Names are those of the current model; parameters removed from it are not missing."""
    engine = engine_of(2, Odd())
    trained(engine, range(2))
    engine.module.last = Wrapped(engine.module.last)
    kept = engine.state_dict()
    engine.save_checkpoint(tmp_path)
    other = engine_of(2, Odd(5))
    other.module.last = Wrapped(other.module.last)
    other.load_checkpoint(tmp_path)
    assert_equal(other.state_dict(), kept)
    scale = engine.module.scale
    engine.module.last = nn.Identity()
    engine.save_checkpoint(tmp_path, "less")
    trained_weight = scale.detach().clone()
    engine.load_checkpoint(tmp_path, "less")
    assert torch.equal(scale, trained_weight)
    other.module.last = nn.Identity()
    other.load_checkpoint(tmp_path, "less")
    engine.destroy(), other.destroy()


@pytest.mark.fast_cells("3")
@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(2)
def test_frozen_parameters_can_be_left_out(tmp_path: Path, stage: int) -> None:
    engine = engine_of(stage, Odd())
    trained(engine, range(2))
    engine.save_checkpoint(tmp_path, exclude_frozen_parameters=True)
    kept = engine.state_dict()
    with pytest.raises(CheckpointError, match=r"lacks frozen\.bias\. Pass load_module_strict"):
        engine.load_checkpoint(tmp_path)
    other = engine_of(stage, Odd(5))
    bias = other.state_dict()["frozen.bias"]
    path, _ = other.load_checkpoint(tmp_path, load_module_strict=False)
    assert_equal(other.state_dict(), {**kept, "frozen.bias": bias})
    names = {name for name, _ in StoredSource(Path(path)).entries}
    assert "frozen.weight" in names
    assert "frozen.bias" not in names
    engine.destroy(), other.destroy()


def load_parts(folder: str, stage: int) -> None:
    """Load some parts of a checkpoint; the rest of the engine's state does not change."""
    masters, weights, _ = torch.load(Path(folder, "one.pt"))
    schedule = {"type": "WarmupLR", "params": {"warmup_num_steps": 50, "warmup_max_lr": 0.1}}
    engine = engine_of(stage, Odd(5), scheduler=schedule)
    trained(engine, range(5))
    rates, steps = engine.get_lr(), engine.global_steps
    moment = safe_get_full_optimizer_state(engine.module.first.weight, "exp_avg")
    engine.load_checkpoint(folder, load_module_only=True)
    assert_equal(engine.state_dict(), weights)
    assert_equal(masters_of(engine), masters)
    assert (engine.get_lr(), engine.global_steps) == (rates, steps)
    found = safe_get_full_optimizer_state(engine.module.first.weight, "exp_avg")
    assert torch.equal(found, moment)

    def double(src: dict[str, Tensor], dst: nn.Module) -> None:
        assert src.keys() == dict(dst.state_dict()).keys() - {"tied.weight"}
        with torch.no_grad():
            for name, parameter in dst.named_parameters():
                parameter.copy_(2 * src[name])

    engine.load_checkpoint(folder, custom_load_fn=double)
    assert_equal(masters_of(engine), {name: 2 * value for name, value in masters.items()})
    assert engine.global_steps == 3
    trained(engine, range(1))
    engine.destroy()


@pytest.mark.fast_cells("3")
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_parts_of_a_checkpoint_load_alone(stage: int, ranks: RankPools, tmp_path: Path) -> None:
    ranks(2).run(save, str(tmp_path), 1, {})
    ranks(2).run(load_parts, str(tmp_path), stage)


class Counted(nn.Linear):
    """A module with a count as extra state."""

    def __init__(self) -> None:
        super().__init__(6, 4)
        self.calls = {"forward": 0}

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls["forward"] += 1
        return super().forward(inputs)

    def get_extra_state(self) -> dict[str, int]:
        return self.calls

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = dict(state)


@on_ranks(2)
def test_extra_state_of_modules_is_saved_and_loaded(tmp_path: Path) -> None:
    engine = engine_of(1, nn.Sequential(Counted()))
    train(engine, range(3))
    engine.save_checkpoint(tmp_path)
    other = engine_of(1, nn.Sequential(Counted()))
    other.load_checkpoint(tmp_path)
    assert other.module[0].calls == {"forward": 3}
    plain = engine_of(1, nn.Sequential(nn.Linear(6, 4)))
    plain.save_checkpoint(tmp_path, "plain")
    with pytest.raises(CheckpointError, match=r"lacks the extra state of 0; pass load_module_str"):
        other.load_checkpoint(tmp_path, "plain")
    assert other.module[0].calls == {"forward": 3}
    other.load_checkpoint(tmp_path, "plain", load_module_strict=False)
    assert other.module[0].calls == {"forward": 3}
    for one in (engine, other, plain):
        one.destroy()


class Stubborn(torch.optim.lr_scheduler.LambdaLR):
    """A schedule that accepts only its own initial state."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer, lambda _: 1.0)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["last_epoch"]:
            raise KeyError("not mine")
        super().load_state_dict(state)


@on_ranks(2)
def test_a_schedule_that_does_not_fit_is_refused_before_any_change(tmp_path: Path) -> None:
    engine = engine_of(1, Odd(), {"lr_scheduler": Stubborn})
    trained(engine, range(2))
    engine.save_checkpoint(tmp_path)
    other = engine_of(1, Odd(5), {"lr_scheduler": Stubborn})
    before = other.state_dict()
    with pytest.raises(CheckpointError, match=r"not mine.*pass load_lr_scheduler_states=False"):
        other.load_checkpoint(tmp_path)
    assert_equal(other.state_dict(), before)
    assert (other.global_steps, other.lr_scheduler.last_epoch) == (0, 0)
    other.load_checkpoint(tmp_path, load_lr_scheduler_states=False)
    assert_equal(other.state_dict(), engine.state_dict())
    engine.destroy(), other.destroy()


@on_ranks(2)
def test_a_schedule_of_other_groups_is_refused(tmp_path: Path) -> None:
    def scheduled(*groups: tuple[list[str], float]) -> Any:
        model = Odd()
        named = dict(model.named_parameters())
        optimizer = torch.optim.AdamW(
            [{"params": [named[name] for name in names], "lr": lr} for names, lr in groups]
        )
        given = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        wishes = {"optimizer": optimizer, "lr_scheduler": given}
        return engine_of(1, model, wishes, optimizer=None)

    one = scheduled((EDGE, 0.01), (CORE, 0.002))
    one.save_checkpoint(tmp_path)
    other = scheduled((EDGE + CORE, 0.5))
    before = dict(other.lr_scheduler.state_dict())
    with pytest.raises(CheckpointError, match=r"saved schedule has 2 param groups, but there ar"):
        other.load_checkpoint(tmp_path)
    assert other.lr_scheduler.state_dict() == before
    one.destroy(), other.destroy()


# ---- parts of a model, and shared sequences ------------------------------------------------------


def train_part(engine: Any, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        inputs = torch.randn(2, 5, 6, generator=generator)
        engine.backward((engine(inputs) - 1.0).square().mean())
        engine.step()


def part_engine(stage: int, **zero: Any) -> Any:
    model = Part(megatron().get_model_parallel_rank())
    settings = {"stage": stage, **TINY, **zero}
    return engine_over(stage, model, train_batch_size=None, zero_optimization=settings)


def save_parts(folder: str) -> None:
    engine = part_engine(3)
    train_part(engine, range(2))
    engine.save_checkpoint(folder, "one", client_state={"x": torch.ones(2)})
    values = [masters_of(engine)]
    train_part(engine, range(2, 4))
    values.append(engine.state_dict())
    if comm.get_rank() < 2:
        torch.save(values, Path(folder, f"part{comm.get_rank()}.pt"))
    comm.barrier()
    engine.destroy()


def go_on_in_parts(folder: str) -> None:
    part = megatron().get_model_parallel_rank()
    masters, later = torch.load(Path(folder, f"part{part}.pt"))
    engine = part_engine(2)
    _, client_state = engine.load_checkpoint(folder)
    assert torch.equal(client_state["x"], torch.ones(2))
    assert_equal(masters_of(engine), masters)
    train_part(engine, range(2, 4))
    assert_close(engine.state_dict(), later)
    engine.destroy()


def load_without_parts(folder: str) -> None:
    engine_of(1, Part(0)).load_checkpoint(folder)


@pytest.mark.slow
def test_parts_of_a_model_load_at_another_number_of_replicas(
    ranks: RankPools, tmp_path: Path
) -> None:
    ranks(4).run(save_parts, str(tmp_path))
    for world in (4, 2):
        ranks(world).run(go_on_in_parts, str(tmp_path))
    for error in ranks(2).raises(load_without_parts, str(tmp_path)):
        assert isinstance(error, CheckpointError), repr(error)
        assert "in 2 model-parallel parts, but this one has 1" in str(error)


def share_sequences(folder: str) -> None:
    """Ranks of one sequence share the model states with all other ranks."""
    masters, _, _ = torch.load(Path(folder, "one.pt"))
    engine = engine_of(2, Odd(5), {"mesh_param": (1, 2)})
    engine.load_checkpoint(folder)
    assert_equal(masters_of(engine), masters)
    engine.save_checkpoint(folder, "two")
    engine.load_checkpoint(folder)
    assert_equal(masters_of(engine), masters)
    engine.destroy()


@pytest.mark.slow
def test_ranks_of_one_sequence_load_too(ranks: RankPools, tmp_path: Path) -> None:
    ranks(3).run(save, str(tmp_path), 3, {})
    ranks(2).run(share_sequences, str(tmp_path))


# ---- data and random numbers ---------------------------------------------------------------------


def read(folder: str, batches: int, saves: bool) -> list[int]:
    engine = engine_of(1, nn.Linear(2, 2), {"training_data": range(24)})
    if not saves:
        engine.load_checkpoint(folder)
    seen: list[int] = []
    for number, batch in enumerate(engine.training_dataloader):
        seen += batch.tolist()
        if saves and number + 1 == batches:
            engine.save_checkpoint(folder)
            break
    engine.destroy()
    return seen


@pytest.mark.slow
def test_the_rest_of_the_epoch_is_redistributed(ranks: RankPools, tmp_path: Path) -> None:
    before = ranks(2).run(read, str(tmp_path), 2, True)
    first = [n for seen in before for n in seen]
    for world in (1, 2, 4):
        after = ranks(world).run(read, str(tmp_path), 0, False)
        rest = [n for seen in after for n in seen]
        assert len({len(seen) for seen in after}) == 1
        assert sorted(first + rest) == list(range(24))


def draw(folder: str, saves: bool) -> tuple[float, list[str]]:
    engine = engine_of(1, nn.Linear(2, 2))
    if saves:
        torch.manual_seed(10 + comm.get_rank())
        engine.save_checkpoint(folder)
    with logged() as told:
        if not saves:
            engine.load_checkpoint(folder)
    engine.destroy()
    return torch.rand(1).item(), list(told)


@pytest.mark.slow
def test_additional_ranks_draw_numbers_of_their_own(ranks: RankPools, tmp_path: Path) -> None:
    saved = [number for number, _ in ranks(2).run(draw, str(tmp_path), True)]
    found = {world: ranks(world).run(draw, str(tmp_path), False) for world in (1, 2, 4)}
    assert [number for number, _ in found[1]] == saved[:1]
    assert [number for number, _ in found[2]] == saved
    assert [number for number, _ in found[4][:2]] == saved
    assert len({number for number, _ in found[4]}) == 4
    again = ranks(4).run(draw, str(tmp_path), False)
    assert [number for number, _ in again] == [number for number, _ in found[4]]
    assert not found[2][0][1]
    assert any("saved by 2 ranks and loaded by 4" in line for line in found[4][0][1])
    assert not any(told for _, told in found[4][1:])


@pytest.mark.claims("zero_optimization.elastic_checkpoint")
def test_resharding_needs_no_key(ranks: RankPools, tmp_path: Path) -> None:
    """Every checkpoint loads at another number of ranks, whether the key is true or false."""
    ranks(2).run(save, str(tmp_path), 3, {})
    for keys in (
        {"checkpoint": {"load_universal": True}},
        {"zero_optimization": {"stage": 1, "elastic_checkpoint": True}},
        {},
    ):
        ranks(1).run(go_on, str(tmp_path), 1, keys, "one")


def test_the_methods_have_the_names_and_arguments_that_programs_use() -> None:
    save = inspect.signature(hadal.Engine.save_checkpoint).parameters
    assert list(save)[1:] == [
        *("save_dir", "tag", "client_state", "save_latest", "exclude_frozen_parameters")
    ]
    assert [one.default for one in save.values()][2:] == [None, {}, True, False]
    load = inspect.signature(hadal.Engine.load_checkpoint).parameters
    assert {name: one.default for name, one in list(load.items())[2:]} == {
        "tag": None,
        "load_module_strict": True,
        "load_optimizer_states": True,
        "load_lr_scheduler_states": True,
        "load_module_only": False,
        "custom_load_fn": None,
    }
    assert hadal.Engine.store_checkpoint is hadal.Engine.save_checkpoint
