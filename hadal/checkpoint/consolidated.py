"""Full weights of a model under training on one rank, gathered bucket by bucket.

All ranks gather each bucket in turn; rank 0 copies what it needs before the next one. The other
ranks need memory for one bucket, rank 0 for what it keeps. If a program's own model is in
model-parallel parts, the first rank of each part does what rank 0 does; slices of layers that Hadal
cut are joined, and experts come from all ranks that share them.

Tests: tests/engine/test_giving.py
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hadal.checkpoint.huggingface import Value, write_model
from hadal.checkpoint.live import Live, plain_name, plain_slots
from hadal.checkpoint.spread import Spread, spread_experts
from hadal.checkpoint.storage import Location
from hadal.checkpoint.together import together
from hadal.zero.bucket import Bucket
from hadal.zero.sharing import slice_of

_PIECE_NUMEL = 1 << 22


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """A model's parameters and persistent buffers, in order of decreasing element size."""

    live: Live
    holders: list[Bucket | tuple[str, Tensor]]
    """Buckets, and the tensors that are in no bucket with their names."""
    aliases: dict[str, str]
    """Other names of tied parameters, mapped to their names in `values`."""
    excluded: set[nn.Parameter]
    """Parameters of these buckets to leave out."""
    spread: dict[Tensor, Spread]
    """Parameters of experts that are on several ranks."""

    def values(self) -> Iterator[Value]:
        """Yield name, shape and dtype of each value, in the order of `cuts`."""
        for holder in self.holders:
            for name, tensor in self._members(holder):
                if tensor in self.spread:
                    yield from self.spread[tensor].values(tensor.dtype)
                    continue
                cut = slice_of(tensor)
                yield Value(name, tuple(tensor.shape if cut is None else cut.shape), tensor.dtype)

    def cuts(self) -> Iterator[Tensor]:
        """Yield each value that has elements; it is valid until the next one is requested.

        A collective: every rank must iterate to the end.
        """
        for holder in self.holders:
            gathered = [holder] if isinstance(holder, Bucket) else []
            with self.live.runtime.whole(gathered):
                for _, tensor in self._members(holder):
                    if tensor.numel() and tensor in self.spread:
                        yield from self.spread[tensor].wholes(tensor)
                    elif tensor.numel():
                        cut = slice_of(tensor)
                        yield tensor.detach() if cut is None else cut.whole(tensor)

    def _members(self, holder: Bucket | tuple[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        if not isinstance(holder, Bucket):
            yield holder
            return
        for slot, parameter in zip(
            plain_slots(holder.layout.slots), holder.parameters, strict=True
        ):
            if parameter not in self.excluded:
                yield slot.name, parameter


def weights_of(live: Live, *, exclude_frozen: bool = False) -> ModelWeights:
    """Return a model's weights and buffers; no weights are gathered yet. A collective.

    Raises:
        ModelError: ranks have different experts, which are not marked.
    """
    runtime = live.runtime
    frozen = {p for p in live.names() if exclude_frozen and not live.is_trained(p)}
    loose = [(name, p) for name, p in live.unmanaged() if p not in frozen]
    buckets = [b for b in runtime.buckets if any(p not in frozen for p in b.parameters)]
    holders: list[Bucket | tuple[str, Tensor]] = [*live.buffers(), *loose, *buckets]
    first = {
        parameter: slot.name
        for bucket in runtime.buckets
        for slot, parameter in zip(plain_slots(bucket.layout.slots), bucket.parameters, strict=True)
    }
    aliases: dict[str, str] = {}
    for parameter, names in live.names().items():
        kept = first.get(parameter, names[0])
        if parameter not in frozen:
            aliases |= {name: kept for name in names if name != kept}
    holders.sort(key=_itemsize, reverse=True)
    return ModelWeights(live, holders, aliases, frozen, spread_experts(live))


def _itemsize(holder: Bucket | tuple[str, Tensor]) -> int:
    tensor = holder.parameters[0] if isinstance(holder, Bucket) else holder[1]
    return tensor.element_size()


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
