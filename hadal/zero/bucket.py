"""One flat buffer of weights: the parameters that view it, my shard of it, and its master."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from enum import Enum, auto
from functools import partial

import torch
from torch import Tensor, nn

from hadal.comm import Ranks
from hadal.comm.collectives import (
    slice_of,
    start_all_gather,
    start_broadcast,
    start_gather_in_pieces,
)
from hadal.comm.pending import Pending, UnreadSends, finished
from hadal.device import has_streams, keep_for_current, look_at
from hadal.errors import few
from hadal.offload.crossing import Crossing
from hadal.offload.tensors import DiskTensor, StoredSlice
from hadal.zero.grouping import BucketPlan, Fetch
from hadal.zero.layout import Layout, Slot, lay_out, order_of
from hadal.zero.offload import Offload, Stored
from hadal.zero.policy import Partition, Precision, Transport
from hadal.zero.sharing import Sharing
from hadal.zero.views import (
    Refresh,
    Views,
    absorb_into,
    digest,
    same_bits,
    shaped,
    shard_with_edits,
    views_of,
)


class NodeCopy:
    """My slice of the copy that the ranks of `node` hold together; with None there is no copy.

    A gather over all shards creates the copy: each rank keeps its slice when the buffer is freed.
    From then on, until the weights change, full buffers are gathered inside the node.
    """

    def __init__(self, node: Ranks | None) -> None:
        self._node = node
        self.is_current = False
        """True if it holds the current weights; the same on all ranks at each gather."""
        self.kept: Tensor | None = None
        """My slice of the last full buffer."""

    def keep(self, full: Tensor) -> None:
        """Keep my slice of a full buffer."""
        mine = self._cut_of(full)
        if self.kept is None:
            self.kept = mine.clone()
        else:
            self.kept.copy_(mine)

    def start_gather(self, full: Tensor, source: Tensor | None, label: str) -> Pending:
        """Begin to fill `full` from the node.

        `source` is a full buffer that holds the weights already; None: use my kept slice.
        """
        mine = self.kept if source is None else self._cut_of(source)
        assert self._node is not None and mine is not None  # the copy is current
        self._cut_of(full).copy_(mine)
        return start_all_gather(full, self._node, label)

    def _cut_of(self, full: Tensor) -> Tensor:
        assert self._node is not None  # the copy is sharded over it
        return slice_of(full, self._node.rank, self._node)


_log = logging.getLogger(__name__)
_ON_DEVICE = Offload()
_UNCODED = Transport()


class Weights(Enum):
    """The state of a bucket's weights."""

    SHARDED = auto()
    """Only my shard exists; the parameters hold placeholders."""
    ARRIVING = auto()
    """The full buffer is being gathered and is not readable yet."""
    FULL = auto()
    """The parameters are views of the full buffer."""


class Bucket:
    """The weights of a few parameters, end to end.

    Owns `full` (1-D, compute dtype; its storage is empty while SHARDED), `shard` (my slice of it: a
    view of `full` unless weights are partitioned) and, if trained, `master` (the values that the
    optimizer updates, for elements `span` of the bucket; these are the weights themselves if they
    have the master's dtype and are stored where updates are made). If a node keeps a second copy of
    the weights, it also owns my slice of that copy (`node_copy`).

    If weights are gathered coded, `full` holds the decoded values, the same on every rank, and the
    shard keeps the original ones. An `exact` gather sends the shards uncoded.

    `offload` says where shard and master are stored. A shard or master that is on the disk or
    encoded is a tensor only inside `present`; gathers read it from there.
    """

    earlier_views: int | None = None
    """If there are more `other_views` when weights are freed, these views keep the values."""

    def __init__(
        self,
        plan: BucketPlan,
        precision: Precision,
        sharing: Sharing,
        device: torch.device,
        offload: Offload = _ON_DEVICE,
        transport: Transport = _UNCODED,
        sends: UnreadSends | None = None,
        *,
        detects_data_writes: bool = True,
    ) -> None:
        self.name = plan.name
        self.offload = offload
        self.transport = transport
        is_frozen = not plan.trainable and transport.frozen is not None
        self._codec = transport.frozen if is_frozen else transport.gather
        self.partition: Partition = plan.partition
        self.precision = precision
        self.sharing = sharing
        self.ranks = sharing.ranks
        self.trainable = plan.trainable
        self.row_numel = plan.row_numel
        self.device = device
        self.parameters: Sequence[nn.Parameter]
        members = sorted(plan.members, key=lambda member: member.group)
        self.parameters = tuple(member.parameter for member in members)
        itemsize = min(precision.compute.itemsize, precision.master.itemsize)
        self.layout: Layout = lay_out(
            [
                (m.name, tuple(m.parameter.shape), m.group, order_of(p.shape, p.stride()) or ())
                for m, p in zip(members, self.parameters, strict=True)
            ],
            sharing.shards.size,
            itemsize,
            plan.row_numel or 1,
            sharing.copies,
        )
        others = f" and {len(members) - 1} more" if len(members) > 1 else ""
        self._gather_label = f"the gather of {self.name} ({members[0].name}{others})"
        cut = plan.partition.optimizer or plan.partition.weights
        self.span = self.layout.span(sharing.shards.rank) if cut else (0, self.layout.numel)
        self.state = Weights.SHARDED if plan.partition.weights else Weights.FULL
        self.on_gather: Callable[[Tensor, range], None] | None = None
        """Called after each gather with the full buffer and the ranks that took part."""
        self._steps_off = offload.lands_off(device)
        self.detects_data_writes = detects_data_writes
        """True: an accelerator looks for writes that torch does not count. A CPU always does."""
        # The digest of the weights after the last update; or as gathered, if the shard is in other
        # memory.
        self._digest: Tensor | None = None
        self._is_suspect = True
        self._is_new = True
        """True until the first update or load: the program may initialize weights in any way."""
        # torch does not resize memory that it shares with a numpy array.
        self._is_kept_for_numpy = False
        # On an accelerator: True if weights had changed while in use, and have been freed since.
        self._is_lost: Tensor | None = None
        self._pending: Pending | None = None
        self._places = range(0)
        # My slice of the decoded values, as gathered; None if `full` holds the shards uncoded.
        self._arrived: Tensor | None = None
        self.node_copy = NodeCopy(sharing.node)
        self._is_exact = False
        self._adopt(sends or UnreadSends(0), plan.fetch)

    def divided(self, plan: BucketPlan) -> Bucket:
        """Return a bucket like this one, which takes over the parameters of `plan` from it."""
        return Bucket(
            plan,
            self.precision,
            self.sharing,
            self.device,
            self.offload.when_trained() if plan.trainable else self.offload,
            self.transport,
            detects_data_writes=self.detects_data_writes,
        )

    def rename(self, names: Sequence[str]) -> None:
        """Set the parameters' full names, in their order."""
        pairs = zip(self.layout.slots, names, strict=True)
        slots = tuple(slot._replace(name=name) for slot, name in pairs)
        self.layout = self._views.layout = dataclasses.replace(self.layout, slots=slots)

    # ---- creation --------------------------------------------------------------------------------

    def _adopt(self, sends: UnreadSends, fetch: Fetch | None) -> None:
        """Take over the values of the parameters, or my slice of them if sharded.

        They are those of rank 0, unless `fetch` gets them. Masters are made from them before any
        cast, unless the precision says otherwise.
        """
        is_cut, compute = self.partition.weights, self.precision.compute
        if fetch is None:
            given, sending = self._from_rank_0()
        else:
            given = fetch(self.parameters, self.layout, is_cut)
            sending = finished("")
        for parameter in self.parameters:
            parameter.grad = None
        numel, device = self.layout.numel, self.device
        self._full = (
            torch.empty(numel, dtype=compute, device=device) if is_cut else given.to(compute)
        )
        is_mine = is_cut and fetch is not None
        mine = given if is_mine else given[self.span[0] : self.span[1]]
        is_free = is_mine or not (is_cut or mine.numel() < numel or given is self._full)
        with self.offload.as_one(self.ranks, f"creating {self.name}"):
            self._store(mine, is_free=is_free)
        self._views = Views(self.parameters, self.layout, self._full, self.ranks.rank)
        self._refresh = Refresh(self._full, self._views)
        # The number of views of the full buffer that are neither the parameters' nor the user's.
        self._own_views = 0 if is_cut or not self._shard.is_present else 1
        if is_cut:
            self._views.look_at_placeholders()
            self._full.untyped_storage().resize_(0)
        sends.add(sending, given.nbytes)

    def _from_rank_0(self) -> tuple[Tensor, Pending]:
        """Return rank 0's values in the layout (at least my shard), and the sends that use them.

        Their memory is freed after the sends if the weights are partitioned.
        """
        label = f"the broadcast of rank 0's weights of {self.name}"
        is_cut = self.partition.weights
        if is_cut and self._is_one_whole():
            given = self.parameters[0].detach().view(-1)
            return given, self.sharing.start_cutting(given, label)
        given = self._end_to_end()
        if is_cut:
            sending = self.sharing.start_cutting(given, label)
            return given, sending.then(partial(given.untyped_storage().resize_, 0))
        sending = start_broadcast(given, 0, self.ranks, label)
        if self.ranks.rank != 0:
            sending.wait()
        return given, sending

    def _is_one_whole(self) -> bool:
        """Return True if the bucket is one parameter whose memory already has its layout."""
        parameter = self.parameters[0]
        return (
            parameter.device == self.device
            and parameter.is_contiguous()
            and parameter.numel() == self.layout.numel
            and parameter.nbytes == parameter.untyped_storage().nbytes()
        )

    def _end_to_end(self) -> Tensor:
        """Return the parameters' values in the layout on rank 0, and free their own memory."""
        given = torch.empty(self.layout.numel, dtype=self.parameters[0].dtype, device=self.device)
        for start, stop in self.layout.gaps:
            given[start:stop].zero_()
        for slot, parameter in zip(self.layout.slots, self.parameters, strict=True):
            place = shaped(given[slot.offset : slot.stop], slot)
            if self.ranks.rank == 0:
                place.copy_(parameter.detach())
            # Free the old memory one parameter at a time: there is never a second copy of all.
            look_at(parameter, place)
        return given

    def _store(self, mine: Tensor, *, is_free: bool) -> None:
        """Store my slice of the given values; if it `is_free`, its memory may be kept."""
        is_cut, is_apart = self.partition.weights, self.has_own_master
        weights = self._full[self.span[0] : self.span[1]]
        if is_cut:
            weights = mine.to(self.precision.compute, copy=is_apart or not is_free)
        self._shard = self.offload.store_weights(
            f"the weights of {self.name}",
            weights,
            is_cut=is_cut,
            encodes=None if self.trainable else self.transport.frozen,
        )
        self._master: Stored | None = None
        if self.trainable:
            self._master = self._shard
            if is_apart:
                first = weights if self.precision.rounds_early else mine
                values = first.to(self.precision.master, copy=not (is_free and first is mine))
                self._master = self.offload.store_master(f"the masters of {self.name}", values)

    # ---- storage ---------------------------------------------------------------------------------

    @property
    def has_own_master(self) -> bool:
        """Return True if the master is separate from the weights."""
        apart = self.offload.parts_master(self.device, is_cut=self.partition.weights)
        return self.trainable and (self.precision.keeps_master or apart)

    @property
    def full(self) -> Tensor:
        """All weights: 1-D, compute dtype; empty while SHARDED, not readable while ARRIVING."""
        self._refresh.wait()
        return self._full

    @property
    def shard(self) -> Tensor:
        """My slice of the weights: 1-D, compute dtype, for the elements of `span`."""
        self._refresh.wait()
        return self._shard.values

    @property
    def master(self) -> Tensor | None:
        """The values that the optimizer updates, for the elements of `span`."""
        self._refresh.wait()
        return None if self._master is None else self._master.values

    @property
    def stored_master(self) -> Stored | None:
        """The master as it is stored."""
        return self._master

    @property
    def disk_weights(self) -> DiskTensor | None:
        """My slice of the weights on the disk; None if it is stored elsewhere."""
        return self._shard.on_disk

    @property
    def shard_source(self) -> Tensor | StoredSlice:
        """My slice of the weights in memory, or an object that reads it in parts."""
        self._refresh.wait()
        return self._shard.source

    @property
    def master_source(self) -> Tensor | StoredSlice | None:
        """The master in memory, or an object that reads it in parts."""
        self._refresh.wait()
        return None if self._master is None else self._master.source

    def settle(self) -> None:
        """Put the user's edits into a master on the disk now, not in the next update."""
        if self._master is None or self._master.is_present or self.partition.weights:
            return
        with self._master.present(writes=False) as master:
            is_changed = absorb_into(master, self.full[self.span[0] : self.span[1]])
        if is_changed:
            with self.present():
                pass

    @property
    def loads_on_use(self) -> bool:
        """Return True if shard or master is in memory only inside `present`."""
        loads = self._master is not None and self._master.loads_on_use
        return loads or self._shard.loads_on_use

    @property
    def steps_on(self) -> torch.device:
        """The device that updates this bucket."""
        return self.offload.steps_on(self.device)

    @contextmanager
    def present(self, *, writes: bool = True) -> Iterator[None]:
        """Load shard and master, with the user's edits; writes in the block are kept."""
        self._refresh.wait()
        with ExitStack() as stack:
            stack.enter_context(self._shard.present(writes=writes))
            was_away = self._master is not None and not self._master.is_present
            if self._master is not None and self._master is not self._shard:
                stack.enter_context(self._master.present(writes=writes))
            if was_away:
                self.absorb_edits()
            yield

    def holds(self, values: Tensor) -> bool:
        """Return True if my shard equals these values bit for bit; may read a disk."""
        return self._shard.holds(values)

    @contextmanager
    def rewriting(self) -> Iterator[None]:
        """Make the block an update that gives every element of the shard a new value.

        Writes to the disk take effect when the update is committed.
        """
        with self._shard.present(reads=False, commits=False):
            yield

    def restore_weights(self) -> None:
        """Restore weights in memory from the master on the disk, after an update that failed.

        The user's edits since the last update are lost.
        """
        if self._master is not None and self._shard.is_present:
            with self._master.present(writes=False) as master:
                self.put_weights(0, master)

    def read_ahead(self) -> None:
        """Begin to read the disk for the next gather, if a buffer is free."""
        if self.state is Weights.SHARDED and not self.node_copy.is_current:
            self._shard.read_ahead()

    def forget_ahead(self) -> None:
        """Drop data that was read ahead."""
        self._shard.forget_ahead()

    def count_views(self, count: int) -> None:
        """Register `count` views of `master` that are not the user's."""
        if not (self.has_own_master or self.partition.weights):
            self._own_views += count

    def free_disk(self) -> None:
        """Free the space on the disk; the bucket is not used any more."""
        self._shard.free()
        if self._master is not None and self._master is not self._shard:
            self._master.free()

    def index_of(self, parameter: nn.Parameter) -> int:
        """Return the number of one of the bucket's parameters."""
        return next(i for i, known in enumerate(self.parameters) if known is parameter)

    def slot_of(self, parameter: nn.Parameter) -> Slot:
        """Return the place of one of the bucket's parameters."""
        return self.layout.slots[self.index_of(parameter)]

    def views_of(self, flat: Tensor) -> list[Tensor]:
        """Return a view of `flat` (1-D, this bucket's layout) for each parameter, in its shape."""
        return views_of(flat, self.layout)

    def show(self, values: Sequence[Tensor]) -> None:
        """Point the parameters at values outside this bucket, while SHARDED."""
        self._refresh.end()
        self._views.look_at(values)

    def hide(self, placeholders: Sequence[Tensor] | None = None) -> None:
        """Make the parameters hold placeholders, to undo `show` or before memory is freed."""
        self._refresh.end()
        self._views.look_at_placeholders(placeholders)

    def reveal(self) -> None:
        """Undo `hide`: point the parameters at the full buffer again, if it is gathered."""
        if self.state is Weights.FULL:
            self._views.look_into_full()

    def tensors_of_weights(self) -> Iterator[Tensor]:
        """Yield the tensors that hold weights: my slice, and everything that is gathered."""
        if self.state is Weights.FULL:
            yield self.full
        yield from self._shard.memory
        if self.node_copy.kept is not None:
            yield self.node_copy.kept
        if self._arrived is not None:
            yield self._arrived

    # ---- moving between SHARDED and FULL ---------------------------------------------------------

    @property
    def rounds(self) -> bool:
        """Return True if only an exact gather gives the values of the shards."""
        return self.partition.weights and self._codec is not None

    @property
    def is_rounded(self) -> bool:
        """Return True if the full buffer holds other values than the shards."""
        return self._arrived is not None

    def start_unshard(self, *, exact: bool = False) -> None:
        """Begin to gather the full buffer: SHARDED to ARRIVING."""
        if self.state is not Weights.SHARDED:
            return
        self._views.check_placeholders()
        # Views that autograd saved use this storage: it is resized, never replaced.
        self._resize_full(self.full.numel() * self.full.itemsize)
        self._places = self.gatherers_of(exact=exact)
        self._is_exact = exact
        self._pending = self._start_gather(self.full, exact=exact)
        self.state = Weights.ARRIVING

    def _resize_full(self, nbytes: int) -> None:
        storage = self.full.untyped_storage()
        if storage.resizable():
            storage.resize_(nbytes)
        elif not self._is_kept_for_numpy:
            self._is_kept_for_numpy = True
            _log.warning(
                "weights of %s (%s) stay whole in memory: a numpy array shares it; copy them"
                " instead, with weight.detach().clone().numpy()",
                self.name,
                few(slot.name for slot in self.layout.slots),
            )

    def wait_unshard(self) -> None:
        """Wait for the gather and point the parameters at the full buffer: ARRIVING to FULL."""
        if self.state is not Weights.ARRIVING:
            return
        assert self._pending is not None  # ARRIVING means that a gather was started
        self._pending.wait()
        is_rounded = self.rounds and not self._is_exact
        self._arrived = self.full[self.span[0] : self.span[1]].clone() if is_rounded else None
        if not is_rounded and self._records_data_writes and not self._has_shard_here:
            self._digest = digest(self.full[self.span[0] : self.span[1]])
        if self.on_gather is not None and self._places:
            self.on_gather(self.full, self._places)
        self._views.look_into_full()
        # Last, so that an interrupt before it leaves a gather that can be waited for again.
        self.state, self._pending = Weights.FULL, None

    def unshard(self, *, exact: bool = False) -> None:
        """Gather the full buffer and wait for it."""
        self.start_unshard(exact=exact)
        self.wait_unshard()

    def reshard(self, *, in_use: bool = False) -> bool:
        """Free the full buffer: FULL to SHARDED. Edits by the user are kept first.

        Returns `free_unviewed`. `in_use`: inside forward or backward. There, if comparing values
        would require waiting for the device or reading the disk, only writes that torch has counted
        are kept; for others an accelerator records that there were some (`absorb_unread`).
        """
        if not self.partition.weights or self.state is not Weights.FULL:
            return True
        is_cheap = self.device.type == "cpu" and (self.is_rounded or self._shard.is_present)
        if not in_use or is_cheap or self._views.were_written:
            self.absorb_edits()
        elif self._records_data_writes:
            is_lost = self._differs_from_arrived()
            self._is_lost = is_lost if self._is_lost is None else self._is_lost.logical_or_(is_lost)
        if self.node_copy.is_current and self._holds_used_values:
            self.node_copy.keep(self.full)
        try:
            self._views.look_at_placeholders()
            self.state = Weights.SHARDED
        except BaseException:  # an interrupt
            self._views.look_into_full()
            self.state = Weights.FULL
            raise
        self.keep_for_current()
        self._arrived = None
        if self.earlier_views is not None and self.other_views > self.earlier_views:
            self._views.leave_full()
        return self.free_unviewed()

    def free_unviewed(self) -> bool:
        """Free the memory of freed weights, unless somebody may read a view of them.

        Such a view keeps the values of the last gather, and the next one fills it again. A thread
        of a collective that has just ended may have one for a moment, too.

        Returns:
            False if the memory is still there and has to be freed later.
        """
        if self.state is not Weights.SHARDED:
            return True
        if self.has_other_views:
            return False
        self._resize_full(0)
        return True

    def keep_for_current(self) -> None:
        """Keep memory of weights, when it is freed, for what the current stream does with it."""
        if self.partition.weights:
            keep_for_current(self.full)
            if self._arrived is not None:
                keep_for_current(self._arrived)

    @property
    def _records_data_writes(self) -> bool:
        return self.detects_data_writes and self.device.type != "cpu"

    @property
    def _has_shard_here(self) -> bool:
        return self._shard.is_present and not self._shard.is_offloaded

    def _differs_from_arrived(self) -> Tensor:
        """Return, without waiting, whether my slice of the full buffer changed after its gather."""
        mine = self.full[self.span[0] : self.span[1]]
        if self._arrived is None and not self._has_shard_here:
            now = digest(mine)
            return now.ne(now if self._digest is None else self._digest)
        arrived = self.shard if self._arrived is None else self._arrived
        return mine.view(torch.int64).ne(arrived.view(torch.int64)).any()

    @property
    def other_views(self) -> int:
        """The number of views of the gathered weights besides the parameters."""
        return self._views.others

    @property
    def has_other_views(self) -> bool:
        """Return True if the user has kept a view of the gathered weights, such as `weight.t()`."""
        return self.other_views > self._own_views

    def serve(self, *, exact: bool = False) -> None:
        """Send my shard to ranks that gather this bucket while this rank does not use it."""
        was_current, places = self.node_copy.is_current, self.gatherers_of(exact=exact)
        scratch = torch.empty(self.layout.numel, dtype=self.full.dtype, device=self.device)
        self._start_gather(scratch, exact=exact).wait()
        if self.on_gather is not None:
            self.on_gather(scratch, places)
        is_new = self.node_copy.is_current and not was_current
        if is_new and not self._holds_used_values:
            self.node_copy.keep(scratch)

    def gatherers_of(self, *, exact: bool = False) -> range:
        """Return the positions, among all ranks, of those that take part in my next gather."""
        is_near = self.node_copy.is_current and not (exact and self.rounds)
        return self.sharing.places_of_node if is_near else self.sharing.places

    @property
    def _holds_used_values(self) -> bool:
        """Return True if the full buffer has the values that forward and backward use."""
        return self.state is not Weights.SHARDED and not (self.rounds and self._is_exact)

    def _start_gather(self, full: Tensor, *, exact: bool) -> Pending:
        """Begin to fill `full` from the node if its copy is current, else from all shards."""
        is_apart = exact and self.rounds
        if is_apart:
            # The node's copy is for forward and backward, and may be stale after this.
            self.node_copy.is_current = False
        elif self.node_copy.is_current:
            if self._holds_used_values and self._pending is not None:
                self._pending.wait()
            source = self.full if self._holds_used_values else None
            return self.node_copy.start_gather(full, source, self._gather_label)
        else:
            self.node_copy.is_current = self.sharing.node is not None
        place, codec = full[self.span[0] : self.span[1]], None if is_apart else self._codec
        gather = partial(self.sharing.start_gather, full, codec, self._gather_label)
        return self._shard.fill(place, gather)

    def outdate(self) -> None:
        """Mark the node's copy stale: the shards have new values. All ranks must call it."""
        self.node_copy.is_current = False

    # ---- master and weights ----------------------------------------------------------------------

    def write_back(
        self, start: int = 0, stop: int | None = None, sending: Crossing | None = None
    ) -> None:
        """Write elements [start, stop) of the stepped master, or all, into the weights, cast."""
        if self.has_own_master and self.master is not None:
            self.put_weights(start, self.master[start:stop], sending)

    @property
    def lands_weights(self) -> bool:
        """Return True if updates are made in other memory than the shard's."""
        return self._steps_off != self._shard.is_offloaded

    def put_weights(self, start: int, values: Tensor, sending: Crossing | None = None) -> None:
        """Write new master values into the weights, for elements from `start` of my span on.

        `sending` comes from `start_sending`, which is called after all of the device's reads of
        these weights are queued.
        """
        self._refresh.wait()
        if not self.lands_weights:
            self.shard[start : start + values.numel()].copy_(values)
        elif self._steps_off:
            way = sending or self.start_sending()
            assert way is not None  # updates are made in other memory than the device's
            way.send(values, self.shard[start : start + values.numel()])
        else:
            self._shard.land(start, values)

    def start_sending(self) -> Crossing | None:
        """Prepare to send new weights to the device; None if updates are made there."""
        crossing = self.offload.crossing(self.device) if self._steps_off else None
        if crossing is not None:
            crossing.begin_sending()
        return crossing

    @property
    def refreshes_late(self) -> bool:
        """Return True if a refresh may still be under way when forward begins."""
        is_cut = self.partition.optimizer and not self.partition.weights
        is_beside = has_streams(self.device) and self.sharing.shards.size > 1
        return is_cut and is_beside and self.transport.refreshes_late

    def refresh_in_step(self) -> None:
        """Finish refreshes within the step from now on: some reads of weights cannot be seen."""
        self.transport = self.transport._replace(refreshes_late=False)

    def start_refresh(self) -> None:
        """Begin to gather whole weights that were stepped or loaded in shards.

        `overlap_refresh` follows, after the refreshes of all buckets have begun.
        """
        self.outdate()
        self._is_new = False
        self.note_weights()
        if not self.partition.optimizer or self.partition.weights:
            return
        numel = self.transport.refresh_numel
        # Reads of views that the user kept are not announced. Pieces are gathered in turn.
        is_free = self.refreshes_late and self.layout.numel <= numel
        gather = partial(
            start_gather_in_pieces,
            self._full,
            self.sharing.shards,
            f"the refresh of {self.name}",
            numel,
        )
        self._refresh.start(gather, may_last=is_free and not self.has_other_views)

    def note_weights(self) -> None:
        """Note whole weights that are now their masters' values: later edits differ from these."""
        is_compared = self._steps_off or self._records_data_writes
        if is_compared and self.has_own_master and not self.partition.weights:
            # Masters are compared only if this digest changes: they are in other memory, or on an
            # accelerator, which nothing may wait for.
            self._digest = digest(self.full[self.span[0] : self.span[1]])

    def overlap_refresh(self) -> None:
        """Let a refresh overlap with the device's next work, until the weights are read."""
        self._refresh.leave()

    def wait_refresh(self) -> None:
        """Make the device's later work wait for refreshed weights; the host does not wait."""
        self._refresh.enter()

    def absorb_edits(self, *, update_looks: bool = False) -> bool:
        """Put weights that the user changed since the last check into shard and master.

        `update_looks`: an update on a CPU follows, which calls `absorb_edits_into` for each block
        of masters that it reads.

        The values themselves are compared, because a write through `parameter.data` leaves no other
        trace. If weights are whole and masters are on the disk, the next update compares them, as
        it reads the masters anyway.

        Returns:
            True if the weights were compared with the master, and each is its rounding, bit for
            bit.

        Raises:
            ModelError: a parameter is no longer a view of this bucket.
        """
        if self.state is not Weights.FULL:
            return False
        self.check_links()
        mine = self.full[self.span[0] : self.span[1]]
        if self.partition.weights:
            if self._arrived is not None:
                if same_bits(self._arrived, mine):
                    return False
                with self._shard.present(writes=False) as shard:
                    mine = shard_with_edits(shard, self._arrived, mine)
            if self._shard.holds(mine):
                return False
        else:
            self._is_suspect = self._digest is None or not torch.equal(self._digest, digest(mine))
            is_away = self._master is not None and not self._master.is_present
            if is_away or not self._is_suspect or update_looks:
                return False
        is_rounding = False
        if self._master is not None and self.has_own_master:
            with self._master.present() as master:
                is_rounding = not absorb_into(master, mine)
        if self.partition.weights:
            self._shard.replace(mine)
        return is_rounding

    def absorb_unread(self) -> Tensor | None:
        """Absorb edits before an update on an accelerator, without waiting for the device.

        Writes that torch counts are put into shard and master, as are all writes before the first
        update.

        Returns:
            A 0-dim bool tensor on the device. True: weights that are whole, or were freed since the
            last update, have changed through a write that torch does not count (through
            `parameter.data`). None: nothing is known, or there is no separate master that such a
            write would have to reach.
        """
        self._refresh.wait()
        is_lost, self._is_lost = self._is_lost, None
        if self.state is not Weights.FULL:
            return is_lost
        self.check_links()
        if self.partition.weights:
            if self._views.were_written:
                self.absorb_edits()
            return is_lost
        if not self.has_own_master:
            return None
        mine = self.full[self.span[0] : self.span[1]]
        self._is_suspect = self._is_new or self._views.were_written
        if not self._is_suspect:
            return None if self._digest is None else digest(mine).ne(self._digest)
        assert self._master is not None  # has_own_master
        if self._master.is_present:
            absorb_into(self._master.values, mine, looks=False)
        self._views.note_versions()
        return None

    def absorb_edits_into(self, values: Tensor, start: int) -> None:
        """Put the user's edits of whole weights into the masters from `start` of my span on."""
        is_whole = self.state is Weights.FULL and not self.partition.weights
        if is_whole and self._is_suspect and self.has_own_master:
            first = self.span[0] + start
            absorb_into(values, self.full[first : first + values.numel()])

    def check_links(self) -> None:
        """Raise `ModelError` for a parameter that no longer uses this bucket's memory."""
        if self.state is not Weights.ARRIVING:
            self._views.check_links(is_full=self.state is Weights.FULL)

    def check_freed(self) -> None:
        """Raise `ShardedAccessError` for a freed parameter that was written to."""
        if self.state is Weights.SHARDED:
            self._views.check_placeholders()

    def release(self) -> None:
        """Give every parameter its own memory again, with its current (whole) values.

        The full buffer is freed, unless it has the optimizer's masters, or the program views it.
        """
        self._refresh.end()
        is_apart = self.partition.weights or self.has_own_master or not self.trainable
        is_free = is_apart and not self.has_other_views
        self._views.release()
        if is_free:
            self.keep_for_current()
            self._resize_full(0)


def write_back_all(cuts: Iterable[tuple[Bucket, int, int]]) -> None:
    """Write back [start, stop) of several buckets, in one call if all is in the same memory."""
    places: list[Tensor] = []
    masters: list[Tensor] = []
    for bucket, start, stop in cuts:
        if bucket.lands_weights:
            bucket.write_back(start, stop)
        elif bucket.has_own_master and bucket.master is not None:
            places.append(bucket.shard[start:stop])
            masters.append(bucket.master[start:stop])
    if places:
        torch._foreach_copy_(places, masters)


def refresh_all(buckets: Iterable[Bucket]) -> None:
    """Refresh buckets, all at the same time."""
    begun = list(buckets)
    for bucket in begun:
        bucket.start_refresh()
    for bucket in begun:
        bucket.overlap_refresh()
