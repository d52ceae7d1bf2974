"""A data loader whose batches of whole sequences become slices for the ranks of a sequence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from hadal.comm import Ranks
from hadal.comm.functions import all_gather_object, all_to_all_single, labelled
from hadal.errors import SequenceError
from hadal.plugins.sequence.tiles import IGNORED

_TOKENS = ("input_ids", "inputs_embeds")


def length_of(batch: Mapping[str, Any]) -> int | None:
    """Return the length of a batch's sequences; None if it has none."""
    tokens = tokens_of(batch)
    return None if tokens is None else tokens.shape[1]


def tokens_of(batch: Mapping[str, Any]) -> Tensor | None:
    """Return a batch's sequences, [batch, length, ...]; None if it has none."""
    for name in _TOKENS:
        tokens = batch.get(name)
        if isinstance(tokens, Tensor) and tokens.dim() >= 2:
            return tokens
    return None


def padded(batch: Mapping[str, Any], size: int) -> dict[str, Any]:
    """Return a batch of whole sequences with shifted labels and a length that `size` divides.

    `labels` [batch, length] become `shift_labels`, each position's next token; the last position
    has none. Padding at the end has no targets, is masked, and continues the positions.

    Raises:
        SequenceError: there are no sequences, or a tensor has another length.
    """
    length = length_of(batch)
    if length is None:
        raise SequenceError(
            f"a batch with {_shown(batch)} has neither input_ids nor inputs_embeds [batch, length,"
            " ...]; sequences cannot be split over ranks without"
        )
    found = dict(batch)
    if isinstance(labels := found.pop("labels", None), Tensor):
        found["shift_labels"] = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
    missing = -length % size
    for name, value in found.items():
        if is_cut(value):
            if value.shape[1] != length:
                raise SequenceError(
                    f"{name} has the shape {tuple(value.shape)}, but the batch's sequences"
                    f" {length} positions; expected [batch, {length}, ...]"
                )
            found[name] = _extended(name, value, missing) if missing else value
    return found


def check_padding(mask: Tensor) -> None:
    """Raise an error if a mask [batch, length] masks positions before others that count.

    Slices attend causally, without the mask, so only positions at the end stay unseen.
    """
    begins = (mask[:, :-1] == 0) & (mask[:, 1:] != 0)
    if bool(begins.any()):
        sample = int(begins.any(1).nonzero()[0])
        raise SequenceError(
            f"attention_mask of sample {sample} masks positions before others; sequences that ranks"
            " share are padded at the end: set the tokenizer's padding_side = 'right', or give"
            " position_ids that begin at 0 after the padding"
        )


def is_cut(value: Any) -> bool:
    """Return True if a batch's value is split along the sequence."""
    return isinstance(value, Tensor) and value.dim() >= 2


def slice_of_rank(value: Tensor, rank: int, size: int) -> Tensor:
    """Return a rank's slice of a tensor [batch, length, ...] whose length `size` divides."""
    length = value.shape[1] // size
    return value[:, rank * length : (rank + 1) * length].contiguous()


def _extended(name: str, value: Tensor, missing: int) -> Tensor:
    if name == "position_ids":
        more = torch.arange(1, missing + 1, dtype=value.dtype, device=value.device)
        return torch.cat([value, value[:, -1:] + more], dim=1)
    fill = IGNORED if "labels" in name else 0
    return F.pad(value, (*(0, 0) * (value.dim() - 2), 0, missing), value=fill)


def _shown(batch: Mapping[str, Any]) -> str:
    return ", ".join(map(str, batch)) or "nothing"


_END = "end_of_dataloader"
_LABEL = "the exchange of batches between the ranks that share sequences"


class UlyssesSPDataLoaderAdapter:
    """A loader of whole sequences as a loader of this rank's slices of them.

    Each rank reads its own batches. In each round the ranks work on each other's batches in turn,
    so one batch of each rank yields as many slices as there are ranks. Labels are shifted before
    sequences are split, and named `shift_labels`. A length that the ranks do not divide is padded
    at the end, without targets, masked, with continued positions. Ranks may have different numbers
    of batches.

    Args:
        dl: yields mappings with `input_ids`, `position_ids` and usually `labels`, each [batch,
            length], and other values; tensors [batch, length, ...] are split.
        sp_rank: this rank's index in the sequence; the group has it.
        sp_group: the ranks that share each sequence.
        sp_world_size: their number.
        device: accepted but not needed; batches are in host memory.

    Raises:
        SequenceError: while iterating, on all ranks: a batch is not a mapping, has no positions, or
            has tensors of different lengths.
    """

    def __init__(
        self, dl: Any, sp_rank: int, sp_group: dist.ProcessGroup, sp_world_size: int, device: Any
    ) -> None:
        self.dl = dl
        self._ranks = Ranks.of(sp_group)
        if sp_world_size != self._ranks.size:
            raise SequenceError(
                f"sp_world_size is {sp_world_size}, but sp_group has {self._ranks.size} ranks"
            )
        self.sp_rank, self.sp_group = self._ranks.rank, sp_group
        self.sp_world_size, self.device = sp_world_size, device
        self._batches: Iterator[dict[str, Any]] | None = None

    def __len__(self) -> int:
        return len(self.dl) * self.sp_world_size

    def __iter__(self) -> UlyssesSPDataLoaderAdapter:
        self._batches = self._rounds()
        return self

    def __next__(self) -> dict[str, Any]:
        if self._batches is None:
            self._batches = self._rounds()
        return next(self._batches)

    def __getattr__(self, name: str) -> Any:
        if name == "dl":  # before __init__: a copy or an unpickled object
            raise AttributeError(name)
        return getattr(self.dl, name)

    def _rounds(self) -> Iterator[dict[str, Any]]:
        source = iter(self.dl)
        # Accelerate's loaders announce, with their last batch, that gradients are due.
        tells_end = hasattr(self.dl, _END)
        while True:
            batch = next(source, None)
            found, is_last = self._round(batch, batch is None or getattr(self.dl, _END, False))
            if not found:
                return
            for left, one in zip(reversed(range(len(found))), found, strict=True):
                if tells_end:
                    setattr(self.dl, _END, is_last and not left)
                yield one

    def _round(self, batch: Any, ends: bool) -> tuple[list[dict[str, Any]], bool]:
        """Send each rank its slices of all ranks' batches; none if no rank has one.

        Also return whether this is the last round of all loaders.
        """
        whole, fault = _prepared(batch, self.sp_world_size)
        tensors = {name: value for name, value in whole.items() if is_cut(value)}
        rest = {name: value for name, value in whole.items() if name not in tensors}
        told = {name: (value.dtype, tuple(value.shape)) for name, value in tensors.items()}
        found: list[Any] = [None] * self._ranks.size
        message = (batch is not None, fault, told, rest, ends)
        labelled(_LABEL, all_gather_object, found, message, group=self._ranks.host_group)
        for number, (_, error, *_) in zip(self._ranks.numbers, found, strict=True):
            if error:
                raise SequenceError(f"rank {number}: {error}")
        slices = self._exchanged(list(tensors.values()), [one[2] for one in found])
        batches = [
            {**given, **mine}
            for (has_batch, _, _, given, _), mine in zip(found, slices, strict=True)
            if has_batch
        ]
        return batches, all(one[4] for one in found)

    def _exchanged(
        self, tensors: list[Tensor], told: list[dict[str, Any]]
    ) -> list[dict[str, Tensor]]:
        """Send each rank its slices of my tensors, and receive mine, in one message."""
        size = self._ranks.size
        sent = [
            torch.cat([_as_bytes(slice_of_rank(one.cpu(), rank, size)) for one in tensors])
            if tensors
            else torch.empty(0, dtype=torch.uint8)
            for rank in range(size)
        ]
        lengths = [
            sum(_nbytes(dtype, shape) // size for dtype, shape in one.values()) for one in told
        ]
        arrived = torch.empty(sum(lengths), dtype=torch.uint8)
        labelled(
            _LABEL,
            all_to_all_single,
            arrived,
            torch.cat(sent),
            lengths,
            [one.numel() for one in sent],
            group=self._ranks.host_group,
        )
        return [
            _read(part, one, size) for part, one in zip(arrived.split(lengths), told, strict=True)
        ]


def _prepared(batch: Any, size: int) -> tuple[dict[str, Any], str]:
    """Return a batch ready to be split, and its fault, which all ranks must raise."""
    if batch is None:
        return {}, ""
    if not isinstance(batch, Mapping):
        return {}, (
            f"a batch is a {type(batch).__name__}; expected a mapping with input_ids and"
            " position_ids, as transformers' collators make"
        )
    if not isinstance(batch.get("position_ids"), Tensor):
        return {}, (
            f"a batch with {', '.join(map(str, batch))} has no position_ids, without which a rank"
            " does not know where its slice begins; let the collator add them"
            " (torch.arange(length).expand(batch, -1), from 0 for each packed document)"
        )
    try:
        return padded(batch, size), ""
    except SequenceError as error:
        return {}, str(error)


def _as_bytes(values: Tensor) -> Tensor:
    return values.contiguous().flatten().view(torch.uint8)


def _nbytes(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel() * dtype.itemsize


def _read(data: Tensor, told: dict[str, Any], size: int) -> dict[str, Tensor]:
    found, start = {}, 0
    for name, (dtype, (rows, length, *others)) in told.items():
        shape = (rows, length // size, *others)
        stop = start + _nbytes(dtype, shape)
        # Cloned: a slice need not begin where its dtype may.
        found[name] = data[start:stop].clone().view(dtype).view(shape)
        start = stop
    return found
