"""Whole parameters with flat shards: the traffic to their owners, and cached values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine.toys import ByNorm, Leaves, engine_of, given_gradients, mean_gradients
from hypothesis import given, settings, strategies as st
from ranks import RankPools

from hadal import comm
from hadal.comm import collectives
from hadal.optim import whole
from hadal.zero import GatheredParameters

SHAPES = ((5, 3), (), (7,), (0, 2), (1,), (2, 3, 4), (33,))


def edit(leaves: Any) -> None:
    for leaf in leaves:
        leaf.mul_(0.5)


def train_with_edits(stage: int, precision: str, shapes: tuple[tuple[int, ...], ...]) -> None:
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    plain, model = Leaves(shapes), Leaves(shapes)
    reference = ByNorm(plain.parameters(), lr=0.25)
    optimizer = ByNorm(model.parameters(), lr=0.25)
    extra = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
    changes = {**extra, "communication_data_type": "fp32"} if precision == "bf16" else {}
    engine = engine_of(stage, model, {"optimizer": optimizer}, optimizer=None, **changes)
    for step in range(5):
        if step == 2:
            parameters = list(model.parameters())
            with torch.no_grad(), GatheredParameters(parameters, modifier_rank=0):
                edit(model.leaves)
            with torch.no_grad():
                for leaf in plain.leaves:
                    # The optimizer continues from values edited in 16 bits.
                    leaf.copy_((leaf.to(dtype) * 0.5).to(leaf.dtype))
        for leaf, mean in zip(plain.leaves, mean_gradients(shapes, step), strict=True):
            leaf.grad = mean
        reference.step()
        given = given_gradients(shapes, step, comm.get_rank())
        engine.backward(engine([one.to(dtype) for one in given]))
        engine.step()
    engine.destroy()
    for found, leaf in zip(model.leaves, plain.leaves, strict=True):
        assert torch.equal(found, leaf.to(dtype)), (stage, precision)


@pytest.mark.fast_cells("3-fp32")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_owners_notice_edits(world: int, precision: str, ranks: RankPools) -> None:
    """An edit of a weight between updates reaches the owner, which has cached older values."""
    for stage in range(4):
        ranks(world).run(train_with_edits, stage, precision, SHAPES)


def masters_after_a_load(stage: int, folder: str) -> None:
    made = []
    for _ in range(2):
        model = Leaves(SHAPES)
        optimizer = ByNorm(model.parameters(), lr=0.25)
        made.append((engine_of(stage, model, {"optimizer": optimizer}, optimizer=None), optimizer))
    (trained, first), (again, second) = made
    trained.backward(trained(given_gradients(SHAPES, 0, comm.get_rank())))
    trained.step()
    trained.save_checkpoint(folder)
    again.load_checkpoint(folder)
    for found, master in zip(masters(second), masters(first), strict=True):
        assert torch.equal(found, master)
    trained.destroy()
    again.destroy()


def masters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [values.detach() for group in optimizer.param_groups for values in group["params"]]


@pytest.mark.parametrize("stage", [1, 3])
def test_the_optimizer_shows_loaded_masters_before_an_update(
    stage: int, ranks: RankPools, tmp_path: Path
) -> None:
    ranks(2).run(masters_after_a_load, stage, str(tmp_path))


def count_traffic(stage: int, precision: str) -> tuple[list[int], int]:
    """Return the elements that this rank sends to owners and shards per update, and steps."""
    sent: list[int] = []

    def counting(outgoing: Any, incoming: Any, ranks: Any, label: str) -> Any:
        sent[-1] += sum(one.numel() for r, one in enumerate(outgoing) if r != ranks.rank)
        return collectives.start_exchange(outgoing, incoming, ranks, label)

    shapes = ((64, 32), (32, 64), (96, 16), (40, 40))
    model = Leaves(shapes)
    changes = {"bf16": {"enabled": True}} if precision == "bf16" else {}
    engine = engine_of(
        stage,
        model,
        {"optimizer": ByNorm(model.parameters(), lr=0.25)},
        optimizer=None,
        **changes,
    )
    dtype = next(model.parameters()).dtype
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(whole, "start_exchange", counting)
        for step in range(3):
            sent.append(0)
            given = given_gradients(shapes, step, comm.get_rank())
            engine.backward(engine([one.to(dtype) for one in given]))
            engine.step()
    engine.destroy()
    return sent, sum(leaf.numel() for leaf in model.leaves)


@pytest.mark.parametrize(("stage", "precision"), [(1, "fp32"), (2, "bf16"), (3, "fp32")])
def test_each_fragment_is_sent_once_in_each_direction(
    stage: int, precision: str, ranks: RankPools
) -> None:
    """Gradients go to owners, new values to shards; masters have been sent by `initialize`."""
    results = ranks(2).run(count_traffic, stage, precision)
    total = results[0][1]
    updates = [sum(update) for update in zip(*(sent for sent, _ in results), strict=True)]
    # What its owner holds in its own shard does not travel; the rest does, there and back.
    assert len(set(updates)) == 1
    assert 0 < updates[0] <= 2 * total


def train_odd(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(0, 9, (6, 2), generator=generator).tolist()
    shapes = (*((rows, columns) for rows, columns in sizes if rows * columns != 1), (2, 2))
    train_with_edits(seed % 4, "fp32", shapes)


@pytest.mark.slow
@settings(max_examples=8)
@given(st.integers(0, 10_000))
def test_any_shapes_are_sent_to_their_owners_and_back(ranks: RankPools, seed: int) -> None:
    ranks(3).run(train_odd, seed)
