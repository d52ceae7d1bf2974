"""State of a model under training for other programs: full weights on a rank, or shards.

All ranks gather each bucket in turn; rank 0 copies what it needs before the next one. The other
ranks need memory for one bucket, rank 0 for what it keeps. If a program's own model is in
model-parallel parts, the first rank of each part does what rank 0 does; slices of layers that Hadal
cut are joined, and experts come from all ranks that share them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor, nn

from hadal.checkpoint.contents import BUFFER, WEIGHT
from hadal.checkpoint.huggingface import Value, write_model
from hadal.checkpoint.live import Live, plain_name, plain_slots
from hadal.checkpoint.source import Entry, Source
from hadal.checkpoint.storage import Location
from hadal.checkpoint.together import together
from hadal.comm import Ranks
from hadal.comm.collectives import broadcast_, gather_objects
from hadal.comm.ranks import expert_group_names, expert_groups
from hadal.errors import CheckpointError, ModelError, few
from hadal.zero.boxes import ATTRIBUTE, Box, boxes_between
from hadal.zero.bucket import Bucket
from hadal.zero.sharing import slice_of

_PIECE_NUMEL = 1 << 22
_Group = tuple[list[Bucket], list[tuple[str, Tensor]]]
"""A bucket, and its tensors by name; or no bucket, and one tensor that is in none."""


@dataclass(frozen=True, slots=True)
class Spread:
    """A parameter of experts, of which each of several ranks holds one or some."""

    ranks: Ranks
    boxes: tuple[Box, ...]
    """The box of each rank, in their order; all have the same size."""

    @property
    def _is_stacked(self) -> bool:
        return not self.boxes[0].is_whole

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the whole tensors that the ranks hold together."""
        return tuple(dict.fromkeys(box.name for box in self.boxes))

    def values(self, dtype: torch.dtype) -> Iterator[Value]:
        """Yield the whole tensors, in the order of `wholes`."""
        for name, shape in {box.name: box.shape for box in self.boxes}.items():
            yield Value(name, shape, dtype)

    def wholes(self, mine: Tensor) -> Iterator[Tensor]:
        """Yield the whole tensors, which are complete on the first rank only.

        A collective. Each tensor is valid until the next one is requested.
        """
        whole = None
        if self._is_stacked and self.ranks.rank == 0:
            whole = mine.new_empty(self.boxes[0].shape)
        piece = mine.new_empty(mine.shape)
        for number, box in enumerate(self.boxes):
            if number == self.ranks.rank:
                piece.copy_(mine.detach())
            broadcast_(piece, number, self.ranks, f"the broadcast of the experts of {box.name}")
            if not self._is_stacked:
                yield piece
            elif whole is not None:
                whole[box.index] = piece
        if self._is_stacked:
            yield piece if whole is None else whole


def _spread_experts(live: Live) -> dict[Tensor, Spread]:
    """Return the parameters that are distributed over ranks, with each rank's box. A collective.

    Raises:
        ModelError: the experts of a rank are not marked.
    """
    found: dict[Ranks, dict[nn.Parameter, str]] = {}
    for parameter, names in live.names().items() if live.has_experts else ():
        ranks = _sharers_of(parameter)
        if ranks is not None:
            found.setdefault(ranks, {})[parameter] = names[0]
    unknown = [name for some in found.values() for p, name in some.items() if _box_of(p) is None]
    if unknown:
        raise ModelError(
            f"each rank has other experts, and nothing says which are in {few(unknown)}: set"
            " parameter.hadal_box (hadal.zero.boxes) before initialize"
        )
    spread: dict[Tensor, Spread] = {}
    for ranks, members in found.items():
        rows = gather_objects([_box_of(parameter) for parameter in members], ranks)
        for parameter, boxes in zip(members, zip(*rows, strict=True), strict=True):
            spread[parameter] = Spread(ranks, boxes)
    return spread


def _box_of(parameter: nn.Parameter) -> Box | None:
    found = getattr(parameter, ATTRIBUTE, None)
    return found if isinstance(found, Box) else None


def _sharers_of(parameter: nn.Parameter) -> Ranks | None:
    """Return the ranks over which an expert's parameter is distributed; None for any other."""
    name = getattr(parameter, "group_name", None)
    if getattr(parameter, "allreduce", True) or name not in expert_group_names():
        return None
    ranks = expert_groups(name).parallel
    return ranks if ranks.size > 1 else None


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """A model's parameters and persistent buffers, in order of decreasing element size."""

    live: Live
    groups: list[_Group]
    aliases: dict[str, str]
    """Other names of tied parameters, mapped to their names in `values`."""
    spread: dict[Tensor, Spread]
    """Parameters of experts that are on several ranks."""

    def values(self) -> Iterator[Value]:
        """Yield name, shape and dtype of each value, in the order of `cuts`."""
        for _, members in self.groups:
            for name, tensor in members:
                if tensor in self.spread:
                    yield from self.spread[tensor].values(tensor.dtype)
                    continue
                cut = slice_of(tensor)
                yield Value(name, tuple(tensor.shape if cut is None else cut.shape), tensor.dtype)

    def cuts(self) -> Iterator[Tensor]:
        """Yield each value that has elements; it is valid until the next one is requested.

        A collective: every rank must iterate to the end.
        """
        for buckets, members in self.groups:
            with self.live.runtime.whole(buckets):
                for _, tensor in members:
                    if tensor.numel() and tensor in self.spread:
                        yield from self.spread[tensor].wholes(tensor)
                    elif tensor.numel():
                        cut = slice_of(tensor)
                        yield tensor.detach() if cut is None else cut.whole(tensor)


def weights_of(live: Live, *, exclude_frozen: bool = False) -> ModelWeights:
    """Return a model's weights and buffers; no weights are gathered yet. A collective.

    Raises:
        ModelError: ranks have different experts, which are not marked.
    """
    frozen = {p for p in live.names() if exclude_frozen and not live.is_trained(p)}
    loose = [(name, p) for name, p in live.unmanaged() if p not in frozen]
    groups: list[_Group] = [([], [one]) for one in (*live.buffers(), *loose)]
    for bucket in live.runtime.buckets:
        named = zip(plain_slots(bucket.layout.slots), bucket.parameters, strict=True)
        members: list[tuple[str, Tensor]] = [(slot.name, p) for slot, p in named if p not in frozen]
        if members:
            groups.append(([bucket], members))
    groups.sort(key=lambda group: group[1][0][1].element_size(), reverse=True)
    first = {tensor: name for _, members in groups for name, tensor in members}
    aliases: dict[str, str] = {}
    for parameter, names in live.names().items():
        kept = first.get(parameter, names[0])
        if parameter not in frozen:
            aliases |= {name: kept for name in names if name != kept}
    return ModelWeights(live, groups, aliases, _spread_experts(live))


@torch.no_grad()
def consolidated(live: Live, *, exclude_frozen: bool = False) -> OrderedDict[str, Tensor] | None:
    """Return the full state, on the host, on a part's first rank; None on the others. A collective.

    Tied parameters are one tensor under several names; the order is that of `state_dict`.
    """
    weights = weights_of(live, exclude_frozen=exclude_frozen)
    kept: dict[str, Tensor] = {}
    values = list(weights.values())
    named = (value.name for value in values if value.numel)
    for name, tensor in zip(named, weights.cuts(), strict=True):
        if _is_writer(live):
            kept[name] = tensor.to("cpu", copy=True)
    if not _is_writer(live):
        return None
    for value in values:
        if not value.numel:
            kept[value.name] = torch.empty(value.shape, dtype=value.dtype)
    kept |= {alias: kept[name] for alias, name in weights.aliases.items()}
    wholes = {live.names()[p][0]: one.names for p, one in weights.spread.items()}  # type: ignore[index]
    order = (whole for name in _in_model(live.module) for whole in wholes.get(name, (name,)))
    return OrderedDict((name, kept[name]) for name in order if name in kept)


def _is_joined(live: Live) -> bool:
    """Return whether the parts of a model are slices that Hadal can join."""
    return any(slice_of(parameter) is not None for parameter in live.names())


def _is_writer(live: Live) -> bool:
    """Return whether this rank gets the weights: the first of its part, or of all parts."""
    return live.ranks.rank == 0 and (live.part == 0 or not _is_joined(live))


def _in_model(module: nn.Module) -> Iterator[str]:
    """Yield every name of the state, in the order of `state_dict`."""
    for path, owner in module.named_modules(remove_duplicate=False):
        for key in [*owner._parameters, *owner._buffers]:
            yield plain_name(f"{path}.{key}" if path else key)


@torch.no_grad()
def write_consolidated(
    live: Live,
    folder: Location,
    filename: str,
    max_shard_nbytes: int,
    *,
    exclude_frozen: bool = False,
) -> None:
    """Write the full model in the Hugging Face layout. All ranks must call it.

    If a program's own model is in model-parallel parts, each part is written into its own folder
    `mp_rank_NN`: only the program knows how the parts fit together.

    Raises:
        CheckpointError: on every rank: it cannot be written.
    """
    if live.parts > 1 and not _is_joined(live):
        folder = folder / f"mp_rank_{live.part:02d}"
    weights = weights_of(live, exclude_frozen=exclude_frozen)
    cuts = weights.cuts()
    with together(live.world, f"{folder / filename} was not written"):
        try:
            if _is_writer(live):
                values = list(weights.values())
                copies = _copies(cuts)
                write_model(folder, filename, values, copies, weights.aliases, max_shard_nbytes)
        finally:
            # Gathers are collectives: the other ranks run them even if this rank failed.
            for _ in cuts:
                pass


def _copies(cuts: Iterator[Tensor]) -> Iterator[Tensor]:
    """Yield small copies on the host.

    They are never views of a bucket: memory that numpy has seen can no longer be resized, and so
    not be freed.
    """
    for cut in cuts:
        for piece in cut.reshape(-1).split(_PIECE_NUMEL):
            yield piece.to("cpu", copy=True)


# ---- shards for torch's checkpoints --------------------------------------------------------------

# From torch 2.14 on a plain tensor may say which parts of a larger one it holds: `global_shape`,
# `global_offsets`, `local_offsets` and `local_sizes` (torch.distributed.checkpoint's
# `CheckpointableTensor`). A flat slice of a parameter begins and ends within rows, so that a tensor
# here is a copy of all rows that the slice touches, with one entry for each box of the slice.

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
