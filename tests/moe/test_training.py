"""Training with experts on several ranks: the numbers do not depend on who has which."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import rarely
from engine.toys import engine_of, tiny_at
from ranks import RankPools
from torch import Tensor, nn

from hadal import comm
from hadal.plugins.moe import MoE
from moe.models import EXPERTS, WIDTH, an_expert, filled

UPDATES, MICROS, CLIP = 3, 2, 0.3
Found = dict[str, Any]


class Mixture(nn.Module):
    """A dense layer, a layer of experts with a residual, one with drops, and a head."""

    def __init__(self, ep_size: int) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        options: dict[str, Any] = {"num_experts": EXPERTS, "ep_size": ep_size, "min_capacity": 0}
        self.dropless = MoE(
            WIDTH,
            an_expert(),
            k=2,
            drop_tokens=False,
            use_residual=True,
            top2_2nd_expert_sampling=False,
            **options,
        )
        self.dropping = MoE(WIDTH, an_expert(), k=1, use_rts=False, **options)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        tokens = torch.tanh(self.first(tokens))
        more, first, _ = self.dropless(tokens)
        more, second, _ = self.dropping(tokens + more)
        return self.head(tokens + more), first + second


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * step + comm.get_rank())
    return (
        torch.randn(2, 5, WIDTH, generator=generator),
        torch.randint(0, 3, (2, 5), generator=generator),
    )


def global_name(name: str, place: int, local: int) -> str:
    head, mark, tail = name.partition(".deepspeed_experts.")
    if not mark:
        return name
    number, _, rest = tail.partition(".")
    return f"{head}{mark}{place * local + int(number)}.{rest}"


def train(ep_size: int, stage: int, changes: Found, data_first: bool = False) -> Found:
    """Losses, norms and weights of this rank, by global names."""
    size = comm.get_world_size()
    copies = size // ep_size
    place = comm.get_rank() // copies if data_first else comm.get_rank() % ep_size
    model = filled(Mixture(ep_size), place)
    zero = {"stage": stage, **tiny_at(stage), **changes.pop("zero", {})}
    engine = engine_of(stage, model, zero_optimization=zero, **changes)
    micros = changes.get("gradient_accumulation_steps", 1)
    losses, norms = [], []
    for step in range(UPDATES * micros):
        inputs, targets = batch_of(step)
        logits, balance = engine(inputs.to(next(model.parameters()).dtype))
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
        engine.backward(loss + 0.1 * balance)
        losses.append(loss.item())
        engine.step()
        if (step + 1) % micros == 0:
            norms.append(engine.get_global_grad_norm())
    weights = {
        global_name(name, place, EXPERTS // ep_size): value.float()
        for name, value in engine.state_dict().items()
    }
    engine.destroy()
    return {"losses": losses, "norms": norms, "weights": weights}


CELLS = [
    pytest.param(0, {}, id="0"),
    pytest.param(1, {"gradient_accumulation_steps": MICROS, "gradient_clipping": CLIP}, id="1"),
    pytest.param(2, {"gradient_accumulation_steps": MICROS, "gradient_clipping": CLIP}, id="2"),
    pytest.param(3, {"gradient_accumulation_steps": MICROS, "gradient_clipping": CLIP}, id="3"),
    pytest.param(
        3,
        {
            "gradient_clipping": CLIP,
            "zero": {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
        },
        id="3, offloaded",
    ),
    rarely(0, {"gradient_clipping": CLIP, "gradient_accumulation_steps": MICROS}, id="0, clipped"),
    rarely(2, {"zero": {"offload_optimizer": {"device": "cpu"}}}, id="2, offloaded"),
    rarely(1, {"zero": {"offload_optimizer": {"device": "cpu"}}}, id="1, offloaded"),
]


def check(alone: list[Found], shared: list[Found]) -> None:
    everything = alone[0]["weights"]
    for mine, theirs in zip(alone, shared, strict=True):
        assert theirs["losses"] == pytest.approx(mine["losses"], rel=1e-5)
        assert theirs["norms"] == pytest.approx(mine["norms"], rel=1e-5)
        for name, value in theirs["weights"].items():
            assert torch.allclose(value, everything[name], atol=2e-5), name
    assert {name for one in shared for name in one["weights"]} == set(everything)


@pytest.mark.fast_cells("3, offloaded", "0, clipped", "2, offloaded", "1, offloaded")
@pytest.mark.parametrize(("stage", "changes"), CELLS)
def test_two_ranks_that_share_experts_train_the_same(
    stage: int, changes: Found, ranks: RankPools
) -> None:
    check(*(ranks(2).run(train, size, stage, dict(changes)) for size in (1, 2)))


@pytest.mark.parametrize(
    ("stage", "ep_size", "data_first"),
    [(2, 2, True), rarely(3, 2, False), rarely(0, 4, False), rarely(1, 2, True)],
)
@pytest.mark.claims("use_data_before_expert_parallelism")
def test_on_four_ranks_copies_of_experts_are_averaged(
    stage: int, ep_size: int, data_first: bool, ranks: RankPools
) -> None:
    changes = {"gradient_clipping": CLIP, "use_data_before_expert_parallelism": data_first}
    alone = ranks(4).run(train, 1, stage, dict(changes))
    check(alone, ranks(4).run(train, ep_size, stage, dict(changes), data_first))
