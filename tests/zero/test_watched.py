"""Freed parameters say who reads them; whole ones have their own class, and views are not lost."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.toys import ROWS, TINY, assert_close, engine_of
from ranks import RankPools
from torch import Tensor, nn
from torch.nn import functional as F

import hadal
from hadal import comm
from hadal.device import unwatched
from hadal.errors import CheckpointError, ShardedAccessError
from hadal.zero.bucket import Weights
from hadal.zero.watched import ReadListener, kind_of, watched_kind_of

WIDTH = 6
_buckets = logging.getLogger("hadal.zero.bucket")


class Records(logging.Handler):
    """Collect the log."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.told.append(record.getMessage())


def watch(parameter: nn.Parameter) -> None:
    parameter.__class__ = watched_kind_of(parameter)


def unwatch(parameter: nn.Parameter) -> None:
    parameter.__class__ = kind_of(parameter)


class Named(nn.Parameter):
    """A program's own."""


def announced(parameter: nn.Parameter, act: Callable[[], object]) -> int:
    """Count the announced reads of a watched parameter that gets its values back at the first."""
    heard: list[nn.Parameter] = []

    def hear(one: nn.Parameter) -> None:
        heard.append(one)
        unwatch(one)

    listener = ReadListener(hear)
    watch(parameter)
    listener.start()
    try:
        act()
    finally:
        listener.stop()
        unwatch(parameter)
    assert all(one is parameter for one in heard)
    return len(heard)


def test_each_read_is_announced_and_no_question_is() -> None:
    one = nn.Parameter(torch.ones(2, 2))
    reads: list[Callable[[], object]] = [
        lambda: F.linear(torch.ones(1, 2), one),
        lambda: F.linear(input=torch.ones(1, 2), weight=one),
        lambda: torch.stack([torch.ones(2, 2), one]),
        lambda: torch.zeros(2, 2) + one,
        lambda: F.layer_norm(torch.ones(1, 2), (2,), weight=one[0]),
        lambda: one.data,
        lambda: one.t(),
        lambda: torch._foreach_add([one], 1.0),
    ]
    assert [announced(one, read) for read in reads] == [1] * len(reads)

    def ask() -> None:
        assert (one.shape, one.dtype, one.device.type) == ((2, 2), torch.float32, "cpu")
        assert (one.ndim, one.dim(), one.size(0), one.numel()) == (2, 2, 2, 4)
        assert one.requires_grad
        one.grad = None
        assert one.grad is None

    assert announced(one, ask) == 0
    assert type(one) is nn.Parameter


def test_a_watched_parameter_passes_for_what_it_is() -> None:
    for kind in (nn.Parameter, Named):
        one = kind(torch.ones(2))
        watch(one)
        assert isinstance(one, kind)
        assert repr(type(one)) == repr(kind)
        assert kind_of(one) is kind
        assert type(type(one)(torch.ones(1), requires_grad=False)) is kind
        module = nn.Module()
        module.one = one
        assert [*module.parameters()] == [one]
        torch.optim.SGD([one], lr=0.1)
        # Nobody listens: operations take it as it is.
        assert torch.equal(one + 1, torch.full((2,), 2.0))
        unwatch(one)
        assert type(one) is kind


def test_other_threads_are_not_listened_to() -> None:
    one = nn.Parameter(torch.ones(2))

    def act() -> None:
        thread = threading.Thread(target=lambda: one + 1)
        thread.start()
        thread.join()

    assert announced(one, act) == 0


# ---- in an engine -------------------------------------------------------------------------------


class First(nn.Linear):
    def forward(self, inputs: Tensor, gives: bool) -> tuple[Tensor, Tensor | None]:  # type: ignore
        return super().forward(inputs), self.weight.t() if gives else None


class Borrows(nn.Module):
    """The first layer gives a view of its weight away, if it is told to."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.first = First(WIDTH, WIDTH)
        self.second, self.third = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: Tensor, gives: bool) -> Tensor:
        values, view = self.first(inputs, gives)
        values = torch.tanh(self.second(values))
        outputs: Tensor = self.third(values if view is None else values @ view)
        return outputs


def borrow(rows: list[bool]) -> list[bool]:
    """In which forwards every operation was watched."""
    plain, model = Borrows(), Borrows()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    engine = engine_of(3, model, optimizer={"type": "SGD", "params": {"lr": 0.1}})
    gathering = engine._parts.runtime.gathering
    inputs = torch.linspace(-1, 1, ROWS * WIDTH).reshape(ROWS, WIDTH)
    found = []
    for gives in rows:
        optimizer.zero_grad()
        plain(inputs, gives).square().mean().backward()
        optimizer.step()
        loss = engine(inputs, gives).square().mean()
        found.append(gathering.escapes.are_watched)
        engine.backward(loss)
        engine.step()
        assert not [b for b in gathering._buckets if b.state is not Weights.SHARDED]
    assert_close(engine.state_dict(), dict(plain.state_dict()))
    engine.destroy()
    return found


def test_views_of_freed_weights_are_found_whenever_they_come(ranks: RankPools) -> None:
    rows = [False] * 2 + [True] * 2 + [False] * 5
    for found in ranks(2).run(borrow, rows):
        # The first one keeps its weight whole; behind it reads are watched, for a while.
        assert found == [False] * 3 + [True] * 4 + [False] * 2


def write_past_torch(keeps: bool) -> str:
    """As a collective does, to a freed parameter, at once or by way of what was kept of it."""
    engine: Any = engine_of(3, zero_optimization={"stage": 3, **TINY})
    inputs = torch.ones(ROWS, WIDTH, device=engine.device)
    weight = engine.module[3].weight
    kept = weight.data
    if keeps:
        engine(inputs)
    with unwatched():
        kept.fill_(1.0)
    with pytest.raises(ShardedAccessError) as caught:
        engine(inputs)
    return str(caught.value)


@pytest.mark.parametrize("keeps", [False, True])
def test_a_write_that_is_not_seen_is_told_by_the_next_forward(
    keeps: bool, ranks: RankPools
) -> None:
    for rank, told in enumerate(ranks(2).run(write_past_torch, keeps)):
        assert f"rank {rank}: parameter 3.weight was written to while its values were" in told


def save_what_was_written(folder: str) -> str:
    engine: Any = engine_of(3, zero_optimization={"stage": 3, **TINY})
    assert engine.module[3].weight.data.shape == (4, 9)  # a look is no write
    engine.save_checkpoint(folder)
    if comm.get_rank() == 1:
        values = engine.module[3].weight.data
        with unwatched():
            values.fill_(1.0)
        del values
    mine = ShardedAccessError if comm.get_rank() == 1 else CheckpointError
    with pytest.raises(mine) as caught:
        engine.save_checkpoint(folder)
    return str(caught.value)


def test_a_write_to_a_freed_parameter_is_told_by_the_next_save(
    ranks: RankPools, tmp_path: Path
) -> None:
    for told in ranks(2).run(save_what_was_written, str(tmp_path)):
        assert "rank 1: parameter 3.weight was written to while its values were sharded" in told


def _without_gradients(write: Callable[[], object]) -> Callable[[], object]:
    return torch.no_grad()(write)


def refuse_writes_and_reads() -> tuple[list[str], list[str]]:
    engine: Any = engine_of(3, zero_optimization={"stage": 3, **TINY})
    weight = engine.module[3].weight
    alike = torch.ones(4, 9, device=engine.device)
    average = torch.zeros(4, 9, device=engine.device)
    view = weight.data

    def set_a_row() -> None:
        view[0] = 1.0

    def scale() -> None:
        view.__imul__(2.0)

    writes: list[Callable[[], object]] = [
        lambda: weight.data.zero_(),
        lambda: weight.data.copy_(alike),
        lambda: weight.detach().fill_(1.0),
        lambda: weight.data.t()[0].add_(1.0),
        lambda: torch.add(alike, alike, out=weight.data),
        lambda: torch._foreach_mul_([weight.data], 2.0),
        _without_gradients(lambda: weight.copy_(alike)),
        _without_gradients(lambda: weight.add_(alike)),
        lambda: nn.init.normal_(weight),
        lambda: nn.init.xavier_uniform_(weight),
        lambda: nn.init.zeros_(weight),
        engine.module[3].reset_parameters,
        set_a_row,
        scale,
    ]
    reads: list[Callable[[], object]] = [
        lambda: weight.sum(),
        lambda: weight.data.norm(),
        lambda: weight[0, 0].item(),
        lambda: weight.tolist(),
        lambda: weight.detach().cpu().numpy(),
        lambda: bool(weight.isnan().any()),
        lambda: torch.equal(weight, alike),
        lambda: F.linear(alike, weight),
        lambda: average.lerp_(weight.data, 0.1),
        lambda: torch.cat([weight.flatten(), weight.flatten()]),
        lambda: nn.utils.parameters_to_vector([weight]),
        lambda: weight.double(),
    ]

    def told(act: Callable[[], object]) -> str:
        with pytest.raises(ShardedAccessError) as caught:
            act()
        return str(caught.value)

    found = [told(write) for write in writes], [told(read) for read in reads]
    assert not average.any()  # nothing has reached it
    # Questions, and what a view alone answers.
    assert weight.data_ptr() and weight.data.numel() == weight.t().numel() == 36
    assert torch.zeros_like(weight).sum() == 0
    assert weight.to(weight.device) is weight
    assert "sharded over the ranks" in repr(weight.data)
    engine.destroy()
    return found


def test_operations_on_a_freed_weight_name_it_and_the_remedy(ranks: RankPools) -> None:
    for rank, (writes, reads) in enumerate(ranks(2).run(refuse_writes_and_reads)):
        for told in writes:
            assert f"rank {rank}: parameter 3.weight was written to while" in told
            assert "hadal.zero.GatheredParameters([parameter], modifier_rank=0)" in told
        for told in reads:
            assert f"rank {rank}: parameter 3.weight was read (" in told
            assert "hadal.zero.GatheredParameters([parameter])" in told
        assert "before hadal.initialize" in reads[-1]


def share_with_numpy() -> list[str]:
    engine: Any = engine_of(3, zero_optimization={"stage": 3, **TINY})
    inputs, weight = torch.ones(ROWS, WIDTH), engine.module[3].weight
    records = Records()
    _buckets.addHandler(records)
    for _ in range(2):
        with hadal.zero.GatheredParameters([weight]):
            array = weight.detach().numpy()
            assert bool((torch.from_numpy(array) == weight).all())
        engine.backward(engine(inputs).sum())
        engine.step()
    _buckets.removeHandler(records)
    with hadal.zero.GatheredParameters([weight]):
        assert bool((engine.state_dict()["3.weight"] == weight).all())
    engine.destroy()
    return records.told


def test_weights_that_numpy_shares_stay_in_memory(ranks: RankPools) -> None:
    (line,), others = ranks(2).run(share_with_numpy)
    assert "3.weight" in line and ".clone().numpy()" in line
    assert not others  # rank 0 warns for all


def print_freed_weights() -> tuple[str, str]:
    engine: Any = engine_of(3, zero_optimization={"stage": 3, **TINY})
    weight = engine.module[3].weight
    with hadal.zero.GatheredParameters([weight]):
        whole = repr(weight)
    freed = repr(weight)
    engine.destroy()
    return whole, freed


def test_a_freed_weight_is_printed_without_values(ranks: RankPools) -> None:
    for whole, freed in ranks(2).run(print_freed_weights):
        assert whole.startswith("Parameter containing:\ntensor([[")
        assert freed.startswith("Parameter(shape=(")
        assert "sharded over the ranks" in freed
        assert "hadal.zero.GatheredParameters([parameter])" in freed
        assert "nan" not in freed
