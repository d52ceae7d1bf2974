"""The memory that a bucket's parameters use, the user's edits of it, and refreshes that fill it.

Parameters are views of the full buffer while it is gathered, and placeholders while it is freed. A
parameter that was given other memory has left its bucket, and a write to a placeholder is lost.
Both are errors that give the parameter's name. Edits of gathered weights are put into the masters.
A write through `parameter.data` leaves no trace but the values themselves, so these are compared.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from hadal.comm.pending import Pending
from hadal.device import (
    Event,
    StreamPurpose,
    before_compiling,
    frames_compiled,
    is_capturing,
    is_host_memory,
    modules_running,
    number_of_users,
    same_bytes,
    side_stream,
    tells_of_compiling,
    unwatched,
)
from hadal.errors import ModelError, ShardedAccessError
from hadal.zero.layout import Layout, Slot
from hadal.zero.parameters import expect_values, have_values, kind_of, take_touched, watched_kind_of


class Views:
    """The parameters of one bucket and the tensors they view, at first the full buffer."""

    def __init__(
        self, parameters: Sequence[nn.Parameter], layout: Layout, full: Tensor, rank: int
    ) -> None:
        self.layout = layout
        self._parameters = parameters
        self._full = full
        self._rank = rank
        self._into_full = views_of(full, layout)
        # One element each, so that a write to one freed parameter does not change another.
        self._nans = torch.full((len(parameters),), torch.nan, dtype=full.dtype).to(full.device)
        self._placeholders = [
            self._nans[index].expand(slot.shape) for index, slot in enumerate(layout.slots)
        ]
        self._versions = [0] * len(parameters)
        self._kinds = [kind_of(parameter) for parameter in parameters]
        self._watched_kinds = [watched_kind_of(parameter) for parameter in parameters]
        self._full_users = 0
        self.look_into_full()

    def look_into_full(self) -> None:
        """Point the parameters at the full buffer."""
        self.look_at(self._into_full)

    def look_at_placeholders(self, placeholders: Sequence[Tensor] | None = None) -> None:
        """Point the parameters at placeholders, which have no values; reads are announced."""
        self.look_at(placeholders or self._placeholders)
        for parameter, kind in zip(self._parameters, self._watched_kinds, strict=True):
            parameter.__class__ = kind

    def leave_full(self) -> None:
        """Leave the full buffer's memory to the program's views of it, and take an empty one."""
        self._full.data = torch.empty_like(self._full)
        self._into_full[:] = views_of(self._full, self.layout)
        self._full.untyped_storage().resize_(0)

    def look_at(self, values: Sequence[Tensor]) -> None:
        """Point the parameters at these values, one for each."""
        is_full = values is self._into_full
        self._full_users = 1 + len(self._into_full) * (2 if is_full else 1)
        for index, (parameter, value) in enumerate(zip(self._parameters, values, strict=True)):
            parameter.__class__ = self._kinds[index]
            parameter.data = value
            self._versions[index] = parameter._version

    def release(self) -> None:
        """Give every parameter its own memory, with its current (whole) values."""
        for parameter in self._parameters:
            parameter.data = parameter.detach().clone()

    def expect_values(self, arrive: Callable[[], object]) -> None:
        """Call `arrive` before each read, because the full buffer is still being filled."""
        for parameter in self._parameters:
            expect_values(parameter, arrive)

    def have_values(self) -> None:
        """Undo `expect_values`: the full buffer is filled."""
        for parameter in self._parameters:
            have_values(parameter)

    # ---- checks ----------------------------------------------------------------------------------

    @property
    def others(self) -> int:
        """The number of tensors, besides the parameters, that use the full buffer."""
        return number_of_users(self._full) - self._full_users

    @property
    def were_written(self) -> bool:
        """True if torch has counted a write to a parameter since it was pointed here."""
        with unwatched():
            pairs = zip(self._parameters, self._versions, strict=True)
            return any(parameter._version != version for parameter, version in pairs)

    def note_versions(self) -> None:
        """Mark all writes so far as seen."""
        self._versions = [parameter._version for parameter in self._parameters]

    def check_placeholders(self) -> None:
        """Raise an error if a freed parameter was written to, because the write is lost.

        Raises:
            ModelError: a parameter uses other memory.
            ShardedAccessError: a parameter was written to.
        """
        with unwatched():
            self.check_links(is_full=False)
            for index, parameter in enumerate(self._parameters):
                if parameter._version != self._versions[index]:
                    raise ShardedAccessError(self._lost_write(index))
            if self._may_be_written and not bool(self._nans.isnan().all()):
                raise ShardedAccessError(self._lost_write(int(self._nans.isnan().int().argmin())))

    @property
    def _may_be_written(self) -> bool:
        """True if the program got, or still has, a view of a placeholder (`parameter.data`).

        Only then are the values read, which means waiting for the device.
        """
        was_given = [take_touched(parameter) for parameter in self._parameters]
        return any(was_given) or number_of_users(self._nans) > 1 + 2 * len(self._parameters)

    def _lost_write(self, index: int) -> str:
        return (
            f"rank {self._rank}: parameter {self.layout.slots[index].name} was written to"
            " while its values were sharded over the ranks, so the write is lost. Write"
            " inside `with hadal.zero.GatheredParameters([parameter], modifier_rank=0):`."
        )

    def check_links(self, *, is_full: bool) -> None:
        """Raise `ModelError` for a parameter that is not where this bucket has pointed it."""
        with unwatched():
            for index, expected in enumerate(self._into_full if is_full else self._placeholders):
                self._check_link(index, expected)

    def _check_link(self, index: int, expected: Tensor) -> None:
        parameter = self._parameters[index]
        moved = parameter.data_ptr() != expected.data_ptr() and expected.numel() > 0
        if moved or parameter.dtype != expected.dtype:
            raise ModelError(
                f"rank {self._rank}: parameter {self.layout.slots[index].name} left its"
                f" bucket: it is now {parameter.dtype} on {parameter.device} in other memory"
                f" (expected {expected.dtype} on {expected.device}). Call .to(), .float() and"
                " similar methods before hadal.initialize, and change weights only in place."
            )


def views_of(flat: Tensor, layout: Layout) -> list[Tensor]:
    """Return a view of `flat`, 1-D in this layout, for each parameter in its shape and strides."""
    return [shaped(flat[slot.offset : slot.stop], slot) for slot in layout.slots]


def shaped(flat: Tensor, slot: Slot) -> Tensor:
    """Return a view of one parameter's elements, 1-D in memory order, in its shape and strides."""
    return flat.as_strided(slot.shape, slot.strides) if slot.order else flat.view(slot.shape)


def flattened(values: Tensor, slot: Slot) -> Tensor:
    """Return the elements of a tensor of a parameter's shape, 1-D in the parameter's memory order.

    The result is a view if they are in that order, otherwise a copy.
    """
    return (values.permute(slot.order) if slot.order else values).reshape(-1)


# ---- the user's edits ----------------------------------------------------------------------------

# Elements compared at a time on a CPU: their cast copy stays in the cache.
_CPU_BLOCK_NUMEL = 1 << 18
# Odd: if the highest bit of every word changes, as signs do, the changes do not cancel out.
_ADDENDS = 255
_FACTOR = 0x9E3779B97F4A7C15 - (1 << 64)  # odd, its bits without a pattern
_LOW_HALF = (1 << 32) - 1


def digest(values: Tensor) -> Tensor:
    """Return a 0-dim int64 sum over all 8-byte words of a 1-D tensor, weighted by place.

    One changed word always changes it; of other changes about one in 2^64 goes unnoticed. In a long
    tensor, words that are a multiple of `numel / 255` apart are added before, so that exchanging
    them goes unnoticed, too: each byte is read once, without temporaries of the tensor's size. It
    never waits for the device.
    """
    sums = values.view(torch.int64)
    if sums.numel() > _ADDENDS**2:
        whole = sums.numel() // _ADDENDS * _ADDENDS
        sums = torch.cat([sums[:whole].view(_ADDENDS, -1).sum(0), sums[whole:]])
    # An odd factor leaves the highest bit where it is, so two changes of it would cancel out.
    mixed = sums ^ ((sums >> 32) & _LOW_HALF)
    odd = torch.arange(sums.numel(), device=sums.device).mul_(2).add_(1).mul_(_FACTOR)
    return (mixed * odd).sum()


def absorb_into(master: Tensor, weights: Tensor, *, looks: bool = True) -> bool:
    """Put edited weights into a master, both 1-D; return whether there were any.

    Without `looks` the host does not wait for the device, and True means there may be some.
    """
    is_changed = False
    block = _CPU_BLOCK_NUMEL if master.device.type == "cpu" else weights.numel()
    buffer = torch.empty(min(block, weights.numel()), dtype=weights.dtype, device=master.device)
    for start in range(0, weights.numel(), max(block, 1)):
        present = weights[start : start + block].to(master.device)
        values = master[start : start + block]
        cast = buffer[: present.numel()].copy_(values)
        if not looks or not same_bits(cast, present):
            # Elements that the user left alone keep the master's full precision.
            edited = present.to(values.dtype)
            values.copy_(torch.where(cast == present, values, edited))
            is_changed = True
    return is_changed


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Return True if two 1-D tensors of one dtype, of a multiple of 8 bytes, have the same bits."""
    if is_host_memory(one.device):
        return same_bytes(one, other)
    # Compared as words: 16-bit floats are compared one by one, four times as slow.
    return torch.equal(one.view(torch.int64), other.view(torch.int64))


def shard_with_edits(shard: Tensor, arrived: Tensor, present: Tensor) -> Tensor:
    """Return the shard with the user's edits: current values that differ from the `arrived` ones.

    `arrived` is overwritten with the current values.
    """
    is_same = (present == arrived) | (present.isnan() & arrived.isnan())
    arrived.copy_(present)
    return torch.where(is_same, shard.to(present.device), present)


# ---- refreshes -----------------------------------------------------------------------------------

_HOST = torch.device("cpu")


class Refresh:
    """The gather of one bucket's new weights, which ends when they are read.

    While it is under way, the bucket's parameters are watched: a read makes its stream wait for the
    refresh, and the host goes on. Every read does so until the device is known to have finished it,
    because each may be in another stream. A CPU receives only while it waits: there `leave` waits
    for the refresh.
    """

    def __init__(self, full: Tensor, views: Views) -> None:
        self._full = full
        self._views = views
        self._beside = side_stream(StreamPurpose.REFRESH, _HOST)
        self._pending: Pending | None = None
        self._event: Event | None = None
        self._is_watched = False

    def start(self, gather: Callable[[], Pending], *, may_last: bool) -> None:
        """Begin it after all work that is queued on the device.

        `may_last`: it may overlap with the device's later work.
        """
        self.end()
        self._is_watched = may_last and not _is_read_unseen and tells_of_compiling()
        device = self._full.device if self._is_watched else _HOST
        self._beside = side_stream(StreamPurpose.REFRESH, device)
        self._beside.follow_device()
        with self._beside.current():
            self._pending = gather()

    def leave(self) -> None:
        """Let it overlap with the device's work if it may; otherwise make later work wait."""
        if self._pending is None:
            return
        with self._beside.current():
            self._pending.wait()
        self._pending = None
        if not self._is_watched:
            return
        self._event = self._beside.event()
        # Even if the bucket is freed, its memory is not reused before the gather is over.
        self._beside.keep(self._full)
        _left.add(self)
        before_compiling(_end_before_compiling)
        self._views.expect_values(self.wait)

    def enter(self) -> None:
        """Wait like `wait`, before a unit's forward, which may be compiled or call such code."""
        self.wait()
        if frames_compiled() and self._event is not None:
            self._forget()

    def wait(self) -> None:
        """Make work that this thread queues from now on wait for the new weights."""
        self.leave()
        event = self._event
        if event is None or is_capturing(self._full.device):
            return
        event.wait_on_device()
        if event.is_over:
            self._forget()

    def end(self) -> None:
        """Wait like `wait`, and stop watching the parameters."""
        self.wait()
        if self._event is not None:
            self._forget()

    def _forget(self) -> None:
        self._event = None
        _left.discard(self)
        self._views.have_values()


_left: weakref.WeakSet[Refresh] = weakref.WeakSet()


# True if code that is compiled, and that no unit's hook precedes, may read weights.
_is_read_unseen = False


def is_any_under_way() -> bool:
    """Return True if the refresh of any bucket is under way."""
    return bool(_left)


def _end_before_compiling() -> None:
    # Compiled code distinguishes a watched class from the one it was compiled for, so a refresh is
    # over before. In a module, hooks have seen to that; a function around the model, as a whole
    # compiled step, has none, and would be compiled anew after each update.
    global _is_read_unseen
    _is_read_unseen |= bool(_left) and not modules_running()
    for refresh in [*_left]:
        refresh.end()
