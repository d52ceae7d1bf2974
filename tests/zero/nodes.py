"""Four ranks that stand for two nodes of two, and what they send to each other."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from engine.toys import engine_of
from torch import Tensor, nn

from hadal import comm
from hadal.comm import Ranks, collectives
from hadal.comm.local import pairs
from hadal.zero.gathering import Phase

from .test_gathering import CUT, DROPS, PADDED, blocks

HPZ = {"zero_hpz_partition_size": 2}
MICS = {"mics_shard_size": 2}
HOPS = {"mics_hierarchical_params_gather": True}
ITEMSIZE = 4
SHARD = PADDED // 4 * ITEMSIZE  # bytes of one rank's cut of a bucket over all ranks

# Agreements between ranks: numbers, not values.
WORDS = (collectives.CODE, collectives.SMALL)
# (what, to whom): bytes. "Weights" is every gather, "gradients" every reduction.
Sent = Counter[tuple[str, str]]


def what_is(label: str) -> str:
    for start, name in (("the gather of", "weights"), ("the reduction of", "gradients")):
        if label.startswith(start):
            return name
    return label


@contextmanager
def sending(engine: Any) -> Iterator[dict[Phase, Sent]]:
    """Count the bytes that this rank sends in a block, by phase of the model."""
    sent: dict[Phase, Sent] = {phase: Counter() for phase in Phase}
    gathering = engine._parts.runtime.gathering
    original = pairs._begun

    def begun(
        sends: bool,
        tensor: Tensor,
        other: int,
        ranks: Ranks,
        matched: tuple[int, int],
        label: str,
        ended: Any,
    ) -> Any:
        is_near = ranks.numbers[other] // 2 == comm.get_rank() // 2
        if sends and matched[0] not in WORDS:
            where = "inside" if is_near else "across"
            sent[gathering.phase][what_is(label), where] += tensor.nbytes
        return original(sends, tensor, other, ranks, matched, label, ended)

    pairs._begun = begun
    try:
        yield sent
    finally:
        pairs._begun = original


@contextmanager
def nodes_of(size: int | None) -> Iterator[None]:
    """Set what the launcher tells the ranks of a node."""
    before = os.environ.pop("LOCAL_WORLD_SIZE")
    if size is not None:
        os.environ["LOCAL_WORLD_SIZE"] = str(size)
    try:
        yield
    finally:
        os.environ["LOCAL_WORLD_SIZE"] = before


def node_engine(model: nn.Module | None = None, **settings: Any) -> Any:
    zero = {**CUT, **DROPS, **settings}
    with nodes_of(2):
        return engine_of(
            3, model or blocks(), zero_optimization=zero, gradient_accumulation_steps=2
        )
