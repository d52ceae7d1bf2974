"""Interrupts (Ctrl-C) that several ranks catch: where training goes on, and where it is refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from engine.toys import assert_close, engine_of
from ranks import RankPool, on_ranks
from torch import nn

from hadal import comm
from hadal.comm.local import pairs
from hadal.comm.pending import Pending
from hadal.errors import CommunicationError
from hadal.zero.bucket import Bucket
from hadal.zero.gradients import Gradients
from hadal.zero.views import Views

SHARDED = {"stage3_param_persistence_threshold": 0, "reduce_bucket_size": 100}


def model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)])


def one_backward(engine: Any, step: int) -> None:
    torch.manual_seed(10 * step + comm.get_rank())
    engine.backward(engine(torch.randn(3, 6)).square().mean())


def one_step(engine: Any, step: int) -> None:
    one_backward(engine, step)
    engine.step()


@contextmanager
def interrupted_after(owner: Any, name: str, calls: int) -> Iterator[None]:
    """Interrupt at the end of a function's call number `calls`, where Python looks for signals."""
    act, left = getattr(owner, name), [calls]

    def call(*args: Any, **kwargs: Any) -> Any:
        found = act(*args, **kwargs)
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt
        return found

    with patch.object(owner, name, call):
        yield


WAITS: dict[str, tuple[Any, str]] = {
    "a wait": (Pending, "wait"),
    "the end of a gather": (Views, "look_into_full"),
    "the end of a use": (Views, "look_at_placeholders"),
    "collecting gradients": (Gradients, "_open"),
    "the end of a reduction": (Gradients, "_free_full"),
}


@pytest.mark.parametrize(
    ("stage", "place", "calls"),
    [
        (2, "a wait", 2),
        (2, "collecting gradients", 2),
        (2, "the end of a reduction", 2),
        (3, "a wait", 4),
        (3, "the end of a gather", 2),
        (3, "the end of a use", 2),
        (3, "the end of a reduction", 1),
    ],
)
@on_ranks(2)
def test_ranks_save_and_train_on_after_an_interrupt_outside_an_exchange(
    stage: int, place: str, calls: int, tmp_path: Path
) -> None:
    """Interrupt a backward on all ranks, save in the handler, drop the gradients and train on."""
    plain = engine_of(0, model())
    engine = engine_of(stage, model(), zero_optimization={"stage": stage, **SHARDED})
    for step in range(6):
        if step == 4:
            with pytest.raises(KeyboardInterrupt), interrupted_after(*WAITS[place], calls):
                one_backward(engine, 99)
            engine.save_checkpoint(tmp_path)
            engine.zero_grad()
        one_step(engine, step)
        one_step(plain, step)
    assert_close(engine.state_dict(), plain.state_dict())
    engine.destroy(), plain.destroy()


EXCHANGES: dict[str, tuple[Any, str]] = {
    "between two sends": (pairs, "_begun"),
    "between a gather and its record": (Bucket, "start_unshard"),
    "before a send": (pairs, "as_bytes"),
}


def refused(stage: int, place: str, calls: int, folder: str) -> list[str]:
    """Interrupt a backward between two messages; return what the next calls raise."""
    engine = engine_of(stage, model(), zero_optimization={"stage": stage, **SHARDED})
    for step in range(4):
        one_step(engine, step)
    with pytest.raises(KeyboardInterrupt), interrupted_after(*EXCHANGES[place], calls):
        one_backward(engine, 99)
    engine.zero_grad()
    told = []
    for act in (
        lambda: engine.save_checkpoint(folder),
        lambda: engine(torch.randn(3, 6)),
        lambda: engine.module(torch.randn(3, 6)) if stage == 3 else engine.step(),
        lambda: engine_of(0, model()),
    ):
        with pytest.raises(CommunicationError) as caught:
            act()
        told.append(str(caught.value))
    return told


@pytest.mark.parametrize(
    ("stage", "place", "calls"),
    [
        (2, "between two sends", 1),
        (3, "between a gather and its record", 2),
        (3, "before a send", 2),
    ],
)
def test_an_interrupt_in_an_exchange_is_named_by_every_later_call(
    stage: int, place: str, calls: int, tmp_path: Path
) -> None:
    pool = RankPool(2)
    try:
        for rank, told in enumerate(pool.run(refused, stage, place, calls, str(tmp_path))):
            for line in told:
                assert f"rank {rank} cannot train or save any more: KeyboardInterrupt" in line
                assert "resume from the last checkpoint" in line
    finally:
        pool.close()
    assert not list(tmp_path.iterdir())
