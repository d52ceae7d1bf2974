"""A rank's shards as tensors that `torch.distributed.checkpoint` saves and loads without a gather.

From torch 2.14 on a plain tensor may say which parts of a larger one it holds: `global_shape`,
`global_offsets`, `local_offsets` and `local_sizes` (torch.distributed.checkpoint's
`CheckpointableTensor`). A flat slice of a parameter begins and ends within rows, so that a tensor
here is a copy of all rows that the slice touches, with one entry for each box of the slice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from hadal.checkpoint.contents import BUFFER, WEIGHT
from hadal.checkpoint.live import Live
from hadal.checkpoint.source import Entry, Source
from hadal.errors import CheckpointError
from hadal.zero.boxes import Box, boxes_between
from hadal.zero.bucket import Bucket

FIELDS = ("global_shape", "global_offsets", "local_offsets", "local_sizes")
_SINCE = (2, 14)


def cut_out(name: str, shape: tuple[int, ...], start: int, values: Tensor) -> Tensor:
    """Return a copy of the rows that a flat slice touches, with the four attributes.

    Args:
        name: the parameter's full name, for errors.
        shape: its whole shape.
        start: the first element of the slice, in row-major order.
        values: the slice, 1-D. Elements of its rows that are not in it are 0.
    """
    boxes = list(boxes_between(name, shape, start, start + values.numel()))
    first, step = _first_row(shape, start)
    rows = -(-(start + values.numel()) // step) - first if boxes else 0
    local = values.new_zeros((rows, *shape[1:]) if shape else ())
    begin = start - first * step
    local.view(-1)[begin : begin + values.numel()] = values
    attributes = (
        shape,
        tuple(box.offsets for box in boxes),
        tuple((box.offsets[0] - first, *box.offsets[1:]) if shape else () for box in boxes),
        tuple(box.sizes for box in boxes),
    )
    for field, value in zip(FIELDS, attributes, strict=True):
        setattr(local, field, value)
    return local


def _first_row(shape: tuple[int, ...], start: int) -> tuple[int, int]:
    """Return the row that holds an element, and the number of elements of a row."""
    step = max(prod(shape[1:]), 1)
    return start // step, step


def shards_of(live: Live) -> dict[str, Tensor]:
    """Return this rank's shards of all weights, by full name, and the whole buffers.

    Weights have the masters' values where there are masters. Tied weights have their first name.

    Raises:
        CheckpointError: torch is too old, or the model is divided in another way too.
    """
    _expect_plain(live)
    shards: dict[str, Tensor] = {}
    for bucket in live.runtime.buckets:
        with live.present(bucket):
            values = bucket.master if bucket.precision.keeps_master else None
            shards |= _of_bucket(live, bucket, bucket.shard if values is None else values)
    for name, value in (*live.unmanaged(), *live.buffers()):
        shards[name] = value.detach().clone()
    return shards


def _of_bucket(live: Live, bucket: Bucket, values: Tensor) -> Iterator[tuple[str, Tensor]]:
    names = live.names()
    cut = {one.slot: one for one in bucket.layout.fragments(*bucket.span)}
    for number, (slot, parameter) in enumerate(
        zip(bucket.layout.slots, bucket.parameters, strict=True)
    ):
        name = names[parameter][0]
        if slot.is_reordered:
            raise CheckpointError(
                f"{name} is stored in another memory order than its shape's (channels_last, for"
                " example), and torch.distributed.checkpoint cannot be told so; use `hadal"
                " checkpoint export --format dcp`"
            )
        one = cut.get(number)
        start = one.start if one else 0
        found = values[one.offset : one.offset + one.numel] if one else values[:0]
        yield name, cut_out(name, slot.shape, start, found)


def _expect_plain(live: Live) -> None:
    release = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if release < _SINCE:
        raise CheckpointError(
            f"torch {torch.__version__} cannot save shards of plain tensors, which it can from"
            f" {'.'.join(map(str, _SINCE))} on; use engine.save_checkpoint and `hadal checkpoint"
            " export --format dcp`"
        )
    divided = [name for name, one in live.placements().items() if not one.is_plain(name)]
    if live.parts > 1 or live.has_experts or divided:
        raise CheckpointError(
            "shards for torch.distributed.checkpoint are not built yet for models that tensor,"
            " pipeline or expert parallelism divides; use engine.save_checkpoint and `hadal"
            " checkpoint export --format dcp`"
        )


class ShardSource(Source):
    """Shards that `torch.distributed.checkpoint.load` has filled, as a source of their ranges."""

    def __init__(self, shards: Mapping[str, Tensor], live: Live) -> None:
        self.path = Path("the sharded state_dict")
        buffers = {name for name, _ in live.buffers()}
        self._shards = shards
        self.entries = {
            (name, BUFFER if name in buffers else WEIGHT): Entry(_shape_of(value), value.dtype)
            for name, value in shards.items()
        }

    def expect(self, name: str, kind: str, start: int, stop: int) -> None:
        """Check that the shard holds these elements.

        Raises:
            CheckpointError: it holds others: it is another rank's, or another engine's.
        """
        super().expect(name, kind, start, stop)
        self._begin(name, start, stop)

    def read(self, name: str, kind: str, start: int, stop: int) -> Tensor:
        """Return elements [start, stop) in row-major order."""
        self.expect(name, kind, start, stop)
        begin = self._begin(name, start, stop)
        return self._shards[name].reshape(-1)[begin : begin + stop - start]

    def _begin(self, name: str, start: int, stop: int) -> int:
        """Return the index of element `start` in the shard's own elements."""
        shard = self._shards[name]
        if not hasattr(shard, FIELDS[0]) or start == stop:
            return start
        shape, offsets, _, sizes = (getattr(shard, field) for field in FIELDS)
        boxes = [Box(name, shape, *one) for one in zip(offsets, sizes, strict=True)]
        if not boxes or start < boxes[0].start or stop > boxes[-1].start + boxes[-1].hull:
            raise CheckpointError(
                f"the shard of {name} does not hold its elements {start} to {stop}; call"
                " engine.sharded_state_dict() on this engine, fill its tensors by"
                " torch.distributed.checkpoint.load, and pass them on the same rank"
            )
        first, step = _first_row(shape, boxes[0].start)
        return start - first * step


def _shape_of(value: Tensor) -> tuple[int, ...]:
    return tuple(getattr(value, FIELDS[0], value.shape))
