"""Inputs of recomputed calls between forward and backward: whole, in slices, or on the host.

A call's inputs are the only tensors that autograd saves for it. `InputKeeper.around` is one pair of
`saved_tensors_hooks` around the call, so the caller's own tensors are never changed.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from hadal.comm import Ranks
from hadal.comm.collectives import start_all_gather
from hadal.comm.pending import Pending
from hadal.config.activation_checkpointing import ActivationCheckpointing
from hadal.device import (
    Event,
    StreamPurpose,
    Upload,
    host_empty,
    is_host_memory,
    saved_tensors_hooks_here,
    side_stream,
)
from hadal.errors import UsageError

_log = logging.getLogger(__name__)

_LABEL = "the gather of a recomputed block's inputs"


def tell_unshared(options: ActivationCheckpointing, ranks: Ranks | None) -> None:
    """Log that inputs will not be sharded, if the options ask for it but no ranks share them."""
    if options.partition_activations and (ranks is None or ranks.size == 1):
        _log.warning(
            "activation_checkpointing.partition_activations has no effect: one rank holds the whole"
            " model. Pass the object that knows the tensor-parallel ranks (an mpu) to configure or"
            " to initialize, or leave the key out"
        )


class HostLimits(NamedTuple):
    """Limits for inputs that are offloaded to the host."""

    copies: int | None = None
    """Copies in flight; the host waits for the oldest before it starts another."""
    buffers: int | None = None
    """Free buffers that are kept for reuse."""
    newest: int = 0
    """Number of the newest inputs that stay on the device."""


class InputKeeper:
    """Stores the inputs of recomputed calls as the options say, until their backward."""

    def __init__(
        self,
        options: ActivationCheckpointing,
        ranks: Ranks | None,
        limits: HostLimits = HostLimits(),  # noqa: B008 - it is frozen
    ) -> None:
        """Set the options.

        Args:
            options: the section, or the same from a program.
            ranks: the tensor-parallel ranks; None if there is one only.
            limits: for inputs that are offloaded to the host.
        """
        self.on_host = options.cpu_checkpointing
        self.ranks = ranks if options.partition_activations and ranks and ranks.size > 1 else None
        number = options.number_checkpoints if options.contiguous_memory_optimization else None
        self.slots = None if number is None else Slots(number)
        self.limits = limits
        self.host = HostMemory(limits.buffers)
        self._staying: deque[weakref.ref[KeptInput]] = deque()
        self._leaving: deque[Event] = deque()
        self.newest: weakref.ref[RecomputedCall] | None = None

    def around(self, tensors: Sequence[Tensor]) -> AbstractContextManager[object]:
        """Return a context around a recomputed call with these inputs.

        Only floating-point tensors with at least one element per rank, and without a true attribute
        `no_checkpointing`, are stored differently.
        """
        least = self.ranks.size if self.ranks else 1
        wanted = {
            _identity(tensor)
            for tensor in tensors
            if tensor.is_floating_point()
            and tensor.numel() >= least
            and not getattr(tensor, "no_checkpointing", False)
            and self._moves(tensor)
            and _is_dense(tensor)
        }
        if not wanted:
            return nullcontext()
        call = RecomputedCall(self)
        # torch calls only the innermost hooks, so the outer ones (for weights) are called first.
        first, last = saved_tensors_hooks_here() or (_same, _same)

        def pack(tensor: Tensor) -> Any:
            packed = first(tensor)
            is_mine = packed is tensor and _identity(tensor) in wanted
            return call.keep(tensor) if is_mine else packed

        def unpack(saved: Any) -> Tensor:
            return last(saved.restored() if isinstance(saved, KeptInput) else saved)

        return saved_tensors_hooks(pack, unpack)

    def _moves(self, tensor: Tensor) -> bool:
        """Return whether a tensor is sharded or offloaded, rather than stored as it is."""
        leaves = self.on_host and not is_host_memory(tensor.device)
        return leaves or self.ranks is not None or self.slots is not None

    def stay(self, kept: KeptInput) -> None:
        """Keep an input on the device; if there are too many, offload the oldest."""
        self._staying.append(weakref.ref(kept))
        while len(self._staying) > self.limits.newest:
            oldest = self._staying.popleft()()
            if oldest is not None:
                oldest.leave()

    def left(self, event: Event) -> None:
        """Count a copy to the host; if there are too many, wait for the oldest."""
        if self.limits.copies is None:
            return
        self._leaving.append(event)
        while len(self._leaving) > self.limits.copies:
            self._leaving.popleft().wait_on_host()

    def reset(self) -> None:
        """Free all memory that stores no input."""
        self.newest = None
        self.host.clear()
        if self.slots is not None:
            self.slots.clear()


class RecomputedCall:
    """The inputs of one recomputed call, which are restored together."""

    def __init__(self, keeper: InputKeeper) -> None:
        self.keeper = keeper
        # Weak, as the graph's saved tensors, which refer to this, must die with the graph at once.
        self._inputs: list[weakref.ref[KeptInput]] = []
        self._older = keeper.newest
        keeper.newest = weakref.ref(self)

    def keep(self, tensor: Tensor) -> KeptInput:
        """Store an input."""
        kept = KeptInput(self, tensor, len(self._inputs))
        self._inputs.append(weakref.ref(kept))
        return kept

    def begin_upload(self) -> None:
        """Start the copies of inputs that are on the host."""
        for kept in self._alive():
            if not kept.is_coming:
                kept.begin_upload()

    def bring(self) -> None:
        """Start transfers of these inputs, and the copies of the cwhose backward is next."""
        coming = [kept for kept in self._alive() if not kept.is_coming]
        for kept in coming:
            kept.begin_upload()
        for kept in coming:
            kept.begin_gather()
        older = None if self._older is None else self._older()
        if older is not None:
            older.begin_upload()

    def _alive(self) -> list[KeptInput]:
        return [kept for kept in (each() for each in self._inputs) if kept is not None]


class KeptInput:
    """One input as it is stored: this rank's slice or all of it, on the device or on the host."""

    def __init__(self, call: RecomputedCall, tensor: Tensor, position: int) -> None:
        self._call = call
        self._size, self._stride = tensor.size(), tensor.stride()
        self._numel, self._device = tensor.numel(), tensor.device
        self.is_coming = False
        """True if its transfers have started and it has not been restored since."""
        self._loan: LentMemory | None = None
        self._arriving: Upload | None = None
        self._full: tuple[Pending, Tensor] | None = None
        keeper = call.keeper
        flat = tensor.detach().as_strided((self._numel,), (1,))
        self._position, self._version = position, tensor._version
        if keeper.limits.newest:
            self._part = flat
            keeper.stay(self)
            return
        part = flat if keeper.ranks is None else _slice(flat, keeper.ranks)
        self._part = self._stored(part, keeper, position)

    def leave(self) -> None:
        """Move to the host, unless backward has come in the meantime."""
        if not self.is_coming:
            self._check_version()
            self._part = self._stored(self._part, self._call.keeper, self._position)
            self._version = self._part._version

    def _check_version(self) -> None:
        if self._part._version != self._version:
            raise UsageError(
                f"the input of a recomputed layer, of size {tuple(self._size)}, was changed in"
                " place before its backward; change a copy, or offload every input at once"
                " (keep_last_count=0)"
            )

    def _stored(self, part: Tensor, keeper: InputKeeper, position: int) -> Tensor:
        leaves = keeper.on_host and not is_host_memory(part.device)
        if keeper.slots is not None:
            home = torch.device("cpu") if leaves else part.device
            kind = SlotKind(position, part.numel(), part.dtype, home)
            loan = self._loan = keeper.slots.borrow(kind)
        elif leaves:
            loan = self._loan = keeper.host.borrow(part.numel(), part.dtype)
        else:
            return part.clone()  # a copy of the slice; a view would keep the whole alive
        weakref.finalize(self, loan.take_back, loan).atexit = False
        if not leaves:
            return loan.memory.copy_(part)
        out = side_stream(StreamPurpose.INPUTS_LEAVING, self._device)
        out.follow_device()
        out.follow(loan.free_after)
        out.copy(loan.memory, part)
        out.keep(part)
        loan.free_after = out.event()
        keeper.left(loan.free_after)
        return loan.memory

    def begin_upload(self) -> None:
        """Start the copy from the host to the device."""
        if self._part.device == self._device or self._arriving is not None:
            return
        assert self._loan is not None  # memory on the host is a loan
        there = torch.empty_like(self._part, device=self._device)
        back = side_stream(StreamPurpose.INPUTS_COMING, self._device)
        back.follow_device()
        back.follow(self._loan.free_after)
        back.copy(there, self._part)
        self._arriving = Upload(back, self._part, there)
        self._loan.free_after = self._arriving.event

    def begin_gather(self) -> None:
        """Start gathering the slices of all ranks, if it is a slice."""
        self.is_coming = True
        ranks = self._call.keeper.ranks
        if ranks is None:
            return
        part = self._here()
        full = torch.empty(part.numel() * ranks.size, dtype=part.dtype, device=part.device)
        full.view(ranks.size, -1)[ranks.rank].copy_(part)
        self._full = start_all_gather(full, ranks, _LABEL), full

    def _here(self) -> Tensor:
        """Return this rank's part, on the device."""
        if self._arriving is None:
            return self._part
        return self._arriving.wait()

    def restored(self) -> Tensor:
        """Return the input with its values, size and strides; this may be called again."""
        if not self.is_coming:
            self._call.bring()
        if self._full is None:
            if self._call.keeper.limits.newest:
                self._check_version()
            values = self._here()
        else:
            pending, values = self._full
            pending.wait()
        self._arriving = self._full = None
        self.is_coming = False
        return values.as_strided(self._size, self._stride)


def _slice(flat: Tensor, ranks: Ranks) -> Tensor:
    """Return this rank's even slice; the last ones are padded with zeros."""
    numel = -(-flat.numel() // ranks.size)
    part = flat[min(ranks.rank * numel, flat.numel()) :][:numel]
    missing = numel - part.numel()
    return torch.nn.functional.pad(part, (0, missing)) if missing else part


def _identity(tensor: Tensor) -> tuple[Any, ...]:
    """Return a key that is equal for two tensor objects with the same storage and layout."""
    return tensor.data_ptr(), tensor.dtype, tensor.size(), tensor.stride()


def _is_dense(tensor: Tensor) -> bool:
    """Return whether the elements fill their memory in some order, without gaps or repeats.

    Other tensors are stored as they are: in another layout, kernels might round differently.
    """
    if tensor.layout != torch.strided or tensor.is_conj() or tensor.is_neg():
        return False
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _same(value: Any) -> Any:
    return value


# ---- memory --------------------------------------------------------------------------------------

_SMALLEST_NBYTES, _GROWTH = 1 << 12, 1.25


@dataclass(slots=True, eq=False)
class LentMemory:
    """Memory lent until the object that stores something in it dies."""

    memory: Tensor
    """1-D, of the dtype that was requested."""
    take_back: Callable[[LentMemory], None]
    free_after: Event = field(default_factory=Event)
    """The last copy to it or from it; the next writer must follow that."""


class HostMemory:
    """Pinned host memory. Buffers fit any shape, so that batches of all lengths share them."""

    def __init__(self, most: int | None = None) -> None:
        """Set how many free buffers are kept for reuse; None keeps all."""
        self._most = most
        self._free: list[tuple[Tensor, Event]] = []

    def borrow(self, numel: int, dtype: torch.dtype) -> LentMemory:
        """Return 1-D memory: the smallest free buffer that is large enough, or a new one."""
        nbytes = numel * dtype.itemsize
        fitting = [place for place, (each, _) in enumerate(self._free) if each.nbytes >= nbytes]
        if fitting:
            best = min(fitting, key=lambda place: self._free[place][0].nbytes)
            buffer, event = self._free.pop(best)
        else:
            if self._free:
                # All are too small: the new buffer replaces one of them.
                self._free.pop()[1].wait_on_host()
            buffer, event = host_empty(_rounded_up(nbytes), torch.uint8, pinned=True), Event()

        def take_back(loan: LentMemory) -> None:
            if self._most is None or len(self._free) < self._most:
                self._free.append((buffer, loan.free_after))
            else:
                loan.free_after.wait_on_host()

        return LentMemory(buffer[:nbytes].view(dtype), take_back, event)

    def clear(self) -> None:
        """Free all that is not lent."""
        for _, event in self._free:
            event.wait_on_host()
        self._free.clear()


def _rounded_up(nbytes: int) -> int:
    """Return the next size of buffers, each a quarter larger than the one before.

    Pinned memory is expensive to make, and longer batches come one after the other.
    """
    steps = math.ceil(math.log(max(nbytes / _SMALLEST_NBYTES, 1), _GROWTH))
    return max(nbytes, math.ceil(_SMALLEST_NBYTES * _GROWTH**steps))


class SlotKind(NamedTuple):
    """The inputs that share one contiguous buffer."""

    position: int
    """The input's position among those of its call."""
    numel: int
    dtype: torch.dtype
    device: torch.device


class Slots:
    """Contiguous buffers, each with room for the same input of `number` calls."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._free: dict[SlotKind, list[LentMemory]] = {}

    def borrow(self, kind: SlotKind) -> LentMemory:
        """Return a slot of `kind`; the first call allocates all of them.

        Raises:
            UsageError: all slots store inputs that backward has not used yet.
        """
        if kind not in self._free:
            for other in [k for k, free in self._free.items() if len(free) == self._number]:
                if other.position == kind.position:
                    del self._free[other]
            self._free[kind] = self._allocated(kind)
        free = self._free[kind]
        if not free:
            raise UsageError(
                f"activation_checkpointing.number_checkpoints is {self._number}, but"
                f" {self._number + 1} recomputed blocks ran before the backward of any; set it"
                " (num_checkpoints of deepspeed.checkpointing.configure) to the number of"
                " recomputed blocks in all forwards that precede a backward"
            )
        return free.pop()

    def _allocated(self, kind: SlotKind) -> list[LentMemory]:
        numel = self._number * kind.numel
        if kind.device.type == "cpu":
            whole = host_empty(numel, kind.dtype, pinned=True)
        else:
            whole = torch.empty(numel, dtype=kind.dtype, device=kind.device)
        free: list[LentMemory] = []
        free += [LentMemory(slot, free.append) for slot in reversed(whole.split(kind.numel))]
        return free

    def clear(self) -> None:
        """Drop all slots; the memory of those in use is freed with their inputs."""
        self._free.clear()
