"""One bucket's gradients: their buffer during backward, and their mean over the ranks."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum, auto
from functools import cache

import torch
from torch import Tensor

from hadal.comm import Ranks
from hadal.comm.coded import Messages, start_coded_reduce_scatter
from hadal.comm.collectives import (
    Factors,
    slice_of,
    start_all_reduce,
    start_reduce_scatter,
    sum_into,
)
from hadal.comm.pending import Pending
from hadal.comm.rows import RowWire, start_rows_all_reduce, start_rows_reduce_scatter
from hadal.device import Event, Upload, is_host_memory, keep_for_current, read_on_host, unwatched
from hadal.offload.crossing import Crossing
from hadal.zero.bucket import Bucket
from hadal.zero.offload import Offload
from hadal.zero.policy import Reduction
from hadal.zero.views import flattened, shaped

_PLAIN = Reduction()
# Gradients up to so many bytes are batched on an accelerator: longer copies gain nothing.
WAITING_NBYTES = 1 << 25


class Arrival(Enum):
    """The state of a bucket's gradients between two updates."""

    EMPTY = auto()
    """Nothing has arrived since the last update."""
    LOCAL = auto()
    """This rank's own gradients are being collected in the full buffer."""
    REDUCING = auto()
    """A reduction is under way, and the full buffer must not be touched."""
    MEAN = auto()
    """`mean` holds the mean over all ranks (or their sum, if configured); if gradients stay on
    their ranks, this rank's contribution to it."""


class Copies:
    """Copies into the buffers of one accelerator's buckets: one kernel copies many tensors.

    They must be made before a buffer is read or sent. Gradients may arrive in several streams, if
    parts of the model ran in them: each of these follows the one before.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.Stream | None = None
        self._waiting: list[tuple[Tensor, Tensor]] = []
        self._nbytes = 0

    def add(self, place: Tensor, values: Tensor) -> None:
        """Queue a copy of `values`, which do not change any more, to a place of equal strides."""
        self.follow()
        self._waiting.append((place, values))
        self._nbytes += values.nbytes
        if self._nbytes >= WAITING_NBYTES:
            self.make()

    def follow(self) -> None:
        """Let the current stream follow that of the last gradients, and copy those there."""
        here, before = torch.accelerator.current_stream(self._device), self._stream
        if here == before:
            return
        self._stream = here
        if before is not None:
            with before:
                self._start()
            here.wait_stream(before)

    def make(self) -> None:
        """Start all queued copies."""
        self.follow()
        self._start()

    def _start(self) -> None:
        waiting, self._waiting, self._nbytes = self._waiting, [], 0
        alike: dict[tuple[torch.dtype, torch.dtype], list[tuple[Tensor, Tensor]]] = {}
        for place, values in waiting:
            alike.setdefault((place.dtype, values.dtype), []).append((place, values))
        for pairs in alike.values():
            places, found = zip(*pairs, strict=True)
            torch._foreach_copy_(list(places), list(found))


@cache
def _copies_of(device: torch.device) -> Copies | None:
    """Return a device's copies; None on a CPU, where new gradients are still in the cache."""
    return None if is_host_memory(device) else Copies(device)


class HostMean:
    """Host memory for a mean gradient that leaves the device, and the copies under way."""

    def __init__(self, offload: Offload, crossing: Crossing) -> None:
        self.values: Tensor | None = None
        """The last mean that left the device, valid once `wait` has returned."""
        self._offload = offload
        self._crossing = crossing
        self._under_way: Event | None = None
        self._coming: Upload | None = None

    @classmethod
    def of(cls, bucket: Bucket) -> HostMean | None:
        """Return the host memory of a bucket; None if updates are made in the device's memory."""
        offload, device = bucket.offload, bucket.device
        crossing = offload.crossing(device) if offload.lands_off(device) else None
        return None if crossing is None else cls(offload, crossing)

    def land(self, mean: Tensor) -> Tensor:
        """Begin to copy `mean` to the host; return its destination."""
        if self.values is None:
            self.values = self._offload.gradient_memory(mean.numel(), mean.dtype)
        self._under_way = self._crossing.land(mean, self.values, after=self._under_way)
        return self.values

    def wait(self) -> None:
        """Wait until the mean has arrived, so that the host may read and write it."""
        if self._under_way is not None:
            self._under_way.wait_on_host()
            self._under_way = None

    def bring_into(self, out: Tensor) -> None:
        """Begin to copy the mean back to the device."""
        assert self.values is not None  # it has landed before
        self._coming = self._crossing.bring(self.values, out, after=self._under_way)
        self._under_way = self._coming.event

    def let_device_wait(self) -> None:
        """Make the device's next work wait for the mean that is copied back."""
        if self._coming is not None:
            self._coming.wait()
            self._coming = None


class Gradients:
    """The gradients of one bucket.

    Owns `full`, the flat 1-D buffer that gradients are collected in. If gradients are partitioned,
    it exists only while they are collected, in the compute dtype, and the mean is added to a
    separate shard; otherwise it stays until the update, in the accumulation dtype, and receives the
    mean in place.

    If there are several copies of the model states, a reduction has two hops: first within a copy,
    to its shards, and then between the ranks that hold the same shard. The second hop is made only
    in the last reduction of an update; before it, the mean is that of this copy's ranks.

    If gradients are sent coded, the codec's errors may be kept and added to the next ones. They are
    dropped after a number of updates, and at each checkpoint.

    If updates are made on the host and the device has its own memory, the mean is copied to host
    memory during backward: in the last reduction of an update, or after each one if there is no
    room on the device, to which it is then copied back to be added to.
    """

    def __init__(self, bucket: Bucket, reduction: Reduction = _PLAIN) -> None:
        self.bucket = bucket
        self.reduction = reduction
        """The way in which the next update's gradients are reduced; updates may differ."""
        self.is_of_copy = False
        """True: the mean is that of one copy, and the second hop is still to be made."""
        self.partitioned = bucket.partition.gradients
        self.messages = self._make_messages()
        """The encoders of gradients; None if they are sent uncoded."""
        self.state = Arrival.EMPTY
        self.full: Tensor | None = None
        precision = bucket.precision
        self._dtype = precision.compute if self.partitioned else precision.accumulate
        self._views: list[Tensor] = []
        self._copies = _copies_of(bucket.device)
        self._filled = bytearray(len(bucket.parameters))
        self.arrivals = [0] * len(bucket.parameters)
        """The number of this rank's gradients for each parameter since the last update."""
        self._host = HostMean.of(bucket)
        self._mean: Tensor | None = None
        self._mean_holds = False
        self._kept: Tensor | None = None
        self._late: dict[int, Tensor] = {}
        self._pending: Pending | None = None

    def _make_messages(self) -> Messages | None:
        transport = self.bucket.transport
        if transport.reduce is None or not self.partitioned:
            return None
        feedback = transport.feedback
        if feedback is None:
            return Messages(transport.reduce)
        return Messages(transport.reduce, feedback.decay, feedback.updates)

    @property
    def mean(self) -> Tensor:
        """The mean gradient of the elements that this rank steps (the bucket's `span`)."""
        mean = self._read()
        assert mean is not None  # asked for only after a reduction
        return mean

    def _read(self) -> Tensor | None:
        """Return the mean, in the memory of the updates."""
        self.land()
        if self._host is not None:
            self._host.wait()
        return self._mean

    @property
    def waits(self) -> bool:
        """Return True if some gradients have not been reduced."""
        return self.state is Arrival.LOCAL or bool(self._late)

    @property
    def _factors(self) -> Factors:
        return self.reduction.factors(self.bucket.sharing.everyone.size)

    @property
    def share(self) -> float:
        """The factor of the sum of all ranks' gradients: 1 / ranks for a mean."""
        return self._factors.before * self._factors.after

    @property
    def reduced(self) -> Tensor | None:
        """The mean of all reductions since the last update, over the bucket's `span`."""
        if self.state is Arrival.MEAN:
            return self._read()
        if self._kept is not None:
            return self._kept
        return self._read() if self.partitioned and self._mean_holds else None

    def collected(self, index: int) -> Tensor | None:
        """Return this rank's own gradient of parameter `index` that has not been reduced yet.

        It is 1-D, in memory order; None if there is none.
        """
        slot = self.bucket.layout.slots[index]
        self._make_copies()
        found = [self._late[index].to(self.bucket.device)] if index in self._late else []
        if self.state is Arrival.LOCAL and self._filled[index]:
            found.append(self._views[index])
        return flattened(sum(found[1:], found[0]), slot) if found else None

    def replace(self, index: int, values: Tensor, *, is_local: bool) -> None:
        """Replace a parameter's mean gradient by `values`, the same on all ranks.

        They are 1-D, in the order of its memory. With `is_local` they are put where this rank's
        gradients wait for a reduction, as those of some rank do.
        """
        slot = self.bucket.layout.slots[index]
        self._make_copies()
        if is_local:
            self._open()
            self._late.pop(index, None)
            of_all = self.bucket.ranks.size * self.share
            self._views[index].copy_(shaped(values / of_all, slot))
            self._filled[index] = 1
            values = torch.zeros_like(values)
        elif self.state is Arrival.EMPTY:
            self.count_as_zero()
            self._mean_holds = True
        reduced = self.reduced
        if reduced is not None:
            low, high = self.bucket.span
            start, stop = max(low, slot.offset), min(high, slot.stop)
            if start < stop:
                part = values[start - slot.offset : stop - slot.offset]
                reduced[start - low : stop - low].copy_(part)

    def tensors(self) -> Iterator[Tensor]:
        """Yield the tensors that hold gradients between micro-steps."""
        late = self._late.values()
        for tensor in (self.full, self._mean, self._kept, *late, *self.residuals):
            if tensor is not None:
                yield tensor

    def place_views(self) -> None:
        """Let autograd add to the collected gradients in place, if that saves a copy."""
        if self.state is Arrival.LOCAL and self._dtype == self.bucket.precision.compute:
            for index, parameter in enumerate(self.bucket.parameters):
                if self._filled[index]:
                    parameter.grad = self._views[index]

    def take(self, index: int) -> None:
        """Collect the gradient that autograd just put on parameter number `index`."""
        parameter = self.bucket.parameters[index]
        gradient = parameter.grad
        self.arrivals[index] += 1
        if gradient is None:
            return
        gradient = gradient.detach()
        if gradient.layout != torch.strided:
            gradient = gradient.to_dense()
        if self.state is Arrival.REDUCING:
            # It is late, and is collected once every rank has reached the end of backward: to wait
            # for the reduction here could be to wait for a rank that waits for this one.
            self._add_late(index, gradient)
        else:
            self._open()
            self._collect(index, gradient)
        parameter.grad = None

    def send_late_to_host(self) -> None:
        """Move gradients that no reduction of this backward includes to host memory.

        So a rank that left its plan needs no additional memory on an accelerator.
        """
        if is_host_memory(self.bucket.device) or not self.partitioned:
            return
        if self.state is Arrival.LOCAL and self._mean_holds:
            self._make_copies()
            for index, view in enumerate(self._views):
                if self._filled[index]:
                    self._add_late(index, view)
            self._filled[:] = bytes(len(self._filled))
            self._free_full()
            self.state = Arrival.MEAN
        what = f"late gradients of {self.bucket.name}"
        self._late = {index: read_on_host(late, what) for index, late in self._late.items()}

    def _add_late(self, index: int, gradient: Tensor) -> None:
        known = self._late.get(index)
        self._late[index] = gradient if known is None else known.to(gradient.device) + gradient

    def _collect(self, index: int, gradient: Tensor) -> None:
        view = self._views[index]
        if self._copies is not None:
            self._copies.follow()
        if gradient.data_ptr() != view.data_ptr():
            if self._filled[index]:
                self._make_copies()
                view.add_(gradient)
            elif self._copies is not None and gradient.stride() == view.stride():
                self._copies.add(view, gradient)
            else:
                view.copy_(gradient)
        self._filled[index] = 1

    def _make_copies(self) -> None:
        """Make the pending copies, so that the full buffer has all collected gradients."""
        if self._copies is not None:
            self._copies.make()

    def _open(self) -> None:
        """Make the full buffer ready to collect local gradients."""
        if self.state is Arrival.LOCAL:
            return
        if self.full is None:
            layout = self.bucket.layout
            full = torch.empty(layout.numel, dtype=self._dtype, device=self.bucket.device)
            for start, stop in layout.gaps:
                full[start:stop].zero_()
            self._views = self.bucket.views_of(full)
            self.full = full
        elif self.state is Arrival.MEAN:
            # The mean of the next backward before the step is added to this one.
            self._kept = self.mean.clone()
            self.full.zero_()
        # If a mean is still being copied from this buffer to the host, it will not be used: the
        # next one replaces it there.
        self.state = Arrival.LOCAL

    def start_reduce(self, *, last: bool = True) -> None:
        """Begin to average the collected gradients; missing ones count as zero.

        Every rank must call this for the same buckets in the same order. `last`: it is the update's
        last reduction, as far as is known.
        """
        self.finish_reduce()
        self._open()
        # Gradients that arrive from now on are late: they must not be added while this is sent.
        self.remove_views()
        assert self.full is not None
        for index, gradient in self._late.items():
            self._collect(index, gradient.to(self.bucket.device))
            keep_for_current(gradient)
        self._late.clear()
        self._make_copies()
        for index, view in enumerate(self._views):
            if not self._filled[index]:
                view.zero_()
        if self.messages is not None and not self._mean_holds:
            self.messages.begin_update()
        if self.bucket.partition.optimizer:
            self._pending = self._start_cut(self.full)
        else:
            self._mean = self.full
            self._pending = self._start_whole(self.full, self.bucket.ranks, self._factors)
        if self.messages is not None:
            self._free_full()  # its encoded form is sent
        self.is_of_copy = self.bucket.sharing.replicas is not None
        self.state = Arrival.REDUCING
        if last and self.is_of_copy:
            self._pending.then(self._start_second_hop)
        if last or not (self.partitioned and self.bucket.offload.sums_on_device):
            self._pending.then(self.land)

    @property
    def residuals(self) -> list[Tensor]:
        """The residuals of coded gradients, which are added to the next ones."""
        return [] if self.messages is None else self.messages.residuals

    def start_second_hop(self) -> None:
        """Begin to average the mean of this copy over all copies."""
        if self._host is not None:
            self._host.wait()
        self._pending = self._start_second_hop().then(self.land)
        self.state = Arrival.REDUCING

    def _start_second_hop(self) -> Pending:
        self._free_full()
        self.is_of_copy = False
        replicas = self.bucket.sharing.replicas
        assert replicas is not None and self._mean is not None  # there is more than one copy
        return self._start_whole(self._mean, replicas, Factors.of_mean(replicas.size))

    @property
    def _label(self) -> str:
        return f"the reduction of {self.bucket.name}"

    def _start_whole(self, full: Tensor, ranks: Ranks, factors: Factors) -> Pending:
        """Start a reduction that gives each of `ranks` the whole result."""
        wire, row_numel = self.bucket.precision.reduce, self.bucket.row_numel
        if self.reduction.stays:
            # Scaled as if all ranks had contributed: their mean is the same.
            scale = self.share * ranks.size
            return Pending(self._label, act=lambda: sum_into(full, [full], scale, False))
        if row_numel:
            return start_rows_all_reduce(
                full, ranks, RowWire(wire, factors, row_numel), self._label
            )
        return start_all_reduce(full, ranks, wire, self._label, factors)

    def _start_cut(self, full: Tensor) -> Pending:
        """Start a reduction that gives each rank a shard; rows are sent to their owners."""
        bucket, wire, label = self.bucket, self.bucket.precision.reduce, self._label
        shards, accumulate = bucket.sharing.reducers, self.partitioned and self._mean_holds
        if not self.partitioned:
            self._mean = slice_of(full, shards.rank, shards)
        elif self._mean is None or self._has_landed:
            numel, dtype = bucket.layout.shard_numel, bucket.precision.accumulate
            self._mean = torch.empty(numel, dtype=dtype, device=bucket.device)
            if self._host is not None and self._mean_holds:
                self._host.bring_into(self._mean)
        out = mean = self._mean
        if accumulate and bucket.precision.rounds_early:
            # The mean is rounded to the dtype of the sum before it is added.
            out, accumulate = torch.empty_like(mean), False
        factors = self._factors.among(bucket.sharing.copies)
        if bucket.row_numel:
            rows = RowWire(wire, factors, bucket.row_numel)
            pending = start_rows_reduce_scatter(full, out, shards, rows, accumulate, label)
        elif self.messages is not None:
            nodes = bucket.sharing.coded_hops
            hops = (shards,) if nodes is None else (nodes.inside, nodes.across)
            factor = factors.before * factors.after
            pending = start_coded_reduce_scatter(
                full, out, hops, self.messages, factor, accumulate, label
            )
        else:
            pending = start_reduce_scatter(full, out, shards, wire, accumulate, label, factors)
        return pending if out is mean else pending.then(lambda: mean.add_(out))

    def advance(self, *, through: bool = False) -> None:
        """Advance the current reduction by one phase, or `through` all of them."""
        while self._pending is not None:
            self._await_brought()
            self._pending.advance()
            if self._pending.done:
                self.finish_reduce()
            if not through:
                break

    def advance_first_hop(self) -> None:
        """Wait for the first phase of the current reduction, unless that was done before."""
        if self._pending is not None and not self._pending.phases:
            self.advance()

    def finish_reduce(self) -> None:
        """Wait for the current reduction: REDUCING to MEAN."""
        if self._pending is None:
            return
        self._await_brought()
        self._pending.wait()
        self._filled[:] = bytes(len(self._filled))
        self._free_full()
        self._mean_holds = True
        # Before `_pending`, so that an interrupt leaves no reduction that nobody waits for.
        self.state = Arrival.MEAN
        self._pending = None
        if self._kept is not None:
            self.mean.add_(self._kept)
            keep_for_current(self._kept)
            self._kept = None

    def _await_brought(self) -> None:
        """Make the device wait for a sum that is copied back, before it is added to."""
        if self._host is not None:
            self._host.let_device_wait()

    @property
    def _has_landed(self) -> bool:
        return self._host is not None and self._mean is self._host.values

    def land(self) -> None:
        """Start the mean's copy to the host if updates are made there, without waiting."""
        if self._host is not None and self._mean is not None and not self._has_landed:
            self._mean = self._host.land(self._mean)

    def _free_full(self) -> None:
        if self.partitioned and self.full is not None:
            keep_for_current(self.full)
            self.full, self._views = None, []

    def count_as_zero(self) -> None:
        """Set the mean to zero, because no rank has a gradient for any parameter of the bucket."""
        self._open()
        assert self.full is not None
        start, stop = self.bucket.span
        if self.partitioned:
            self._mean = self.full.new_zeros(stop - start, dtype=self.bucket.precision.accumulate)
            self._free_full()
        else:
            self.full.zero_()
            self._mean = self.full[start:stop]
        self.land()
        self.state = Arrival.MEAN

    def remove_views(self) -> None:
        """Remove the gradients that `place_views` put on parameters; no copy is pending then."""
        self._make_copies()
        with unwatched():
            for parameter in self.bucket.parameters:
                parameter.grad = None

    def clear(self) -> None:
        """Drop everything collected since the last update.

        On an accelerator the buffers are freed for the next forward's activations. Host memory is
        kept, because the system would have to clear and map it again.
        """
        self._make_copies()
        self.finish_reduce()
        self.state = Arrival.EMPTY
        for tensor in self.tensors():
            keep_for_current(tensor)
        self._mean_holds = self.is_of_copy = False
        self._kept = None
        self._late.clear()
        self._filled[:] = bytes(len(self._filled))
        self.arrivals = [0] * len(self._filled)
        if not is_host_memory(self.bucket.device):
            self.full, self._views = None, []
            self._mean = self._mean if self._has_landed else None
