"""One flat buffer of weights: the parameters that look into it, my shard of it, and its master."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from enum import Enum, auto

import torch
from torch import Tensor, nn

from hadal.comm.collectives import (
    broadcast_,
    slice_of,
    start_all_gather,
    start_broadcasts,
    start_gather_by_sum,
    start_gather_in_hops,
    start_gather_in_pieces,
)
from hadal.comm.pending import Pending
from hadal.errors import ModelError, ShardedAccessError
from hadal.offload.runs import DiskRun, RunCut
from hadal.zero.grouping import BucketPlan
from hadal.zero.layout import Layout, lay_out
from hadal.zero.policy import Partition, Precision, Refresh
from hadal.zero.resting import Home, Resting
from hadal.zero.sharing import Sharing

# Elements compared at a time on a CPU: what is cast for it stays in the cache.
_CPU_BLOCK_NUMEL = 1 << 18

_REFRESH = Refresh()
_ON_DEVICE = Home()


class Weights(Enum):
    """Where a bucket's weights stand."""

    SHARDED = auto()
    """Only my shard exists; the parameters hold placeholders."""
    ARRIVING = auto()
    """The full buffer is being gathered: not readable yet."""
    FULL = auto()
    """The parameters look into the full buffer."""


class Bucket:
    """The weights of a few parameters, end to end.

    Owns `full` (1-D, compute dtype; its storage is empty while SHARDED), `shard` (my cut of it: a
    view of `full` unless weights are partitioned) and, for what is trained, `master` (the values
    that the optimizer updates, for elements `span` of the bucket; the weights themselves where
    they already have the master's dtype, and lie where updates are made). Where a node keeps a
    second copy of weights, my cut of that one too, left behind when `full` is freed: from then on,
    until weights change, `full` is gathered from the node alone.

    `home` says where shard and master rest. What rests on the disk is a tensor only inside
    `present`; gathers read it by themselves.
    """

    def __init__(
        self,
        plan: BucketPlan,
        precision: Precision,
        sharing: Sharing,
        device: torch.device,
        refresh: Refresh = _REFRESH,
        home: Home = _ON_DEVICE,
        *,
        gathers_by_sum: bool = False,
    ) -> None:
        self.name = plan.name
        self.home = home
        self._gathers_by_sum = gathers_by_sum
        self.partition: Partition = plan.partition
        self.precision = precision
        self.sharing = sharing
        self.ranks = sharing.ranks
        self.trainable = plan.trainable
        self.row_numel = plan.row_numel
        self._refresh = refresh
        self.device = device
        self.parameters: Sequence[nn.Parameter]
        members = sorted(plan.members, key=lambda member: member.group)
        self.parameters = tuple(member.parameter for member in members)
        itemsize = min(precision.compute.itemsize, precision.master.itemsize)
        self.layout: Layout = lay_out(
            [(m.name, tuple(m.parameter.shape), m.group) for m in members],
            sharing.shards.size,
            itemsize,
            plan.row_numel or 1,
            sharing.copies,
        )
        others = f" and {len(members) - 1} more" if len(members) > 1 else ""
        self._gather_label = f"the gather of {self.name} ({members[0].name}{others})"
        cut = plan.partition.optimizer or plan.partition.weights
        self.span = self.layout.span(sharing.shards.rank) if cut else (0, self.layout.numel)
        self.state = Weights.FULL
        self.on_gather: Callable[[Tensor, range], None] | None = None
        """Is shown what was gathered, for this rank's use or for the others', and by whom."""
        self._pending: Pending | None = None
        self._places = range(0)
        self._secondary: Tensor | None = None
        # Whether the node's copy is of the present weights: the same on all ranks at each gather.
        self._is_near = False
        self._adopt()

    def divided(self, plan: BucketPlan) -> Bucket:
        """A bucket like this one, which takes over the parameters of `plan` from it."""
        return Bucket(
            plan,
            self.precision,
            self.sharing,
            self.device,
            self._refresh,
            self.home,
            gathers_by_sum=self._gathers_by_sum,
        )

    def rename(self, names: Sequence[str]) -> None:
        """Call the parameters by other full names, in their order."""
        pairs = zip(self.layout.slots, names, strict=True)
        slots = tuple(dataclasses.replace(slot, name=name) for slot, name in pairs)
        self.layout = dataclasses.replace(self.layout, slots=slots)

    # ---- laying down -----------------------------------------------------------------------------

    def _adopt(self) -> None:
        """Take over the parameters' values, rank 0's on every rank.

        Masters are made of them before any cast, but where the precision says otherwise.
        """
        given = torch.zeros(self.layout.numel, dtype=self.parameters[0].dtype, device=self.device)
        for slot, parameter in zip(self.layout.slots, self.parameters, strict=True):
            place = given[slot.offset : slot.stop]
            place.copy_(parameter.detach().reshape(-1))
            parameter.grad = None
            # One parameter's old memory after the other: never a second copy of all of them.
            parameter.data = place.view(slot.shape)
        broadcast_(given, 0, self.ranks, f"the broadcast of rank 0's weights of {self.name}")
        start, stop = self.span
        self.full: Tensor = given.to(self.precision.compute)
        self._shard = self.home.rest_weights(
            f"the weights of {self.name}", self.full[start:stop], is_cut=self.partition.weights
        )
        self._master: Resting | None = None
        if self.trainable:
            self._master = self._shard
            if self.has_own_master:
                first = self.full if self.precision.rounds_early else given
                values = first[start:stop].to(self.precision.master, copy=True)
                self._master = self.home.rest_master(f"the masters of {self.name}", values)
        self._views = self.views_of(self.full)
        # One element each, so that a write to one freed parameter cannot reach another.
        nans = torch.full((len(self.parameters),), torch.nan, dtype=self.full.dtype).to(self.device)
        self._placeholders = [
            nans[index].expand(slot.shape) for index, slot in enumerate(self.layout.slots)
        ]
        self._nans = nans
        self._versions = [0] * len(self.parameters)
        self._point_at(self._views)

    # ---- where it rests --------------------------------------------------------------------------

    @property
    def has_own_master(self) -> bool:
        """Whether there is a master beside the weights."""
        apart = self.home.parts_master(self.device, is_cut=self.partition.weights)
        return self.trainable and (self.precision.keeps_master or apart)

    @property
    def shard(self) -> Tensor:
        """My cut of the weights: 1-D, compute dtype, for the elements of `span`."""
        return self._shard.values

    @property
    def master(self) -> Tensor | None:
        """The values that the optimizer updates, for the elements of `span`."""
        return None if self._master is None else self._master.values

    @property
    def resting_master(self) -> Resting | None:
        """The master where it rests."""
        return self._master

    @property
    def weights_on_disk(self) -> bool:
        """Whether my cut of the weights rests in a file."""
        return self._shard.is_on_disk

    @property
    def shard_at_rest(self) -> Tensor | RunCut:
        """My cut of the weights where it rests."""
        return self._shard.at_rest

    @property
    def master_at_rest(self) -> Tensor | RunCut | None:
        """The master where it rests."""
        return None if self._master is None else self._master.at_rest

    def settle(self) -> None:
        """Put the user's edits into a master on the disk too, which else the next update does."""
        if self._master is None or not self._master.is_away or self.partition.weights:
            return
        with self._master.present(writes=False) as master:
            is_changed = self._absorb_into(master, self.full[self.span[0] : self.span[1]])
        if is_changed:
            with self.present():
                pass

    @property
    def rests_on_disk(self) -> bool:
        """Whether anything of this bucket rests in a file."""
        on_disk = self._master is not None and self._master.is_on_disk
        return on_disk or self._shard.is_on_disk

    @property
    def runs_of_weights(self) -> list[DiskRun]:
        """My cut of the weights on the disk, if it rests there."""
        return [] if self._shard.run is None else [self._shard.run]

    @property
    def steps_on(self) -> torch.device:
        """Where updates of this bucket are made."""
        return self.home.steps_on(self.device)

    @contextmanager
    def present(self, *, writes: bool = True) -> Iterator[None]:
        """Have shard and master in memory, with the user's edits; what is written is kept."""
        with ExitStack() as stack:
            stack.enter_context(self._shard.present(writes=writes))
            was_away = self._master is not None and self._master.is_away
            if self._master is not None and self._master is not self._shard:
                stack.enter_context(self._master.present(writes=writes))
            if was_away:
                self.absorb_edits()
            yield

    @contextmanager
    def rewriting(self) -> Iterator[None]:
        """Around an update, which gives every element of the shard a new value.

        What rests on the disk counts only when the update is committed.
        """
        with self._shard.present(reads=False, commits=False):
            yield

    def restore_weights(self) -> None:
        """Round weights in memory from the master on the disk, after an update that failed.

        What the user has written into them since the last update is lost.
        """
        if self._master is not None and not self._shard.is_away:
            with self._master.present(writes=False) as master:
                self.put_weights(0, master)

    def read_ahead(self) -> None:
        """Begin to read what the next gather needs of the disk, if there is room to."""
        if self.state is Weights.SHARDED and not self._is_near:
            self._shard.start_reading()

    def leave_disk(self) -> None:
        """Give room on the disk back: the bucket is not used any more."""
        self._shard.free()
        if self._master is not None and self._master is not self._shard:
            self._master.free()

    def views_of(self, flat: Tensor) -> list[Tensor]:
        """A view of `flat` (1-D, laid out like this bucket) for each parameter, in its shape."""
        return [flat[slot.offset : slot.stop].view(slot.shape) for slot in self.layout.slots]

    def _point_at(self, values: Sequence[Tensor]) -> None:
        for index, (parameter, value) in enumerate(zip(self.parameters, values, strict=True)):
            parameter.data = value
            self._versions[index] = parameter._version

    def show(self, values: Sequence[Tensor]) -> None:
        """Make the parameters look at values that are not this bucket's own, while SHARDED."""
        self._point_at(values)

    def hide(self) -> None:
        """The parameters hold placeholders: undoes `show`, or goes before memory is given back."""
        self._point_at(self._placeholders)

    def reveal(self) -> None:
        """After `hide`: the parameters look into the full buffer again, where it is there."""
        if self.state is Weights.FULL:
            self._point_at(self._views)

    def tensors_of_weights(self) -> Iterator[Tensor]:
        """What weights take of memory: my cut of them, and all that is gathered."""
        if self.state is Weights.FULL:
            yield self.full
        if not self._shard.is_away:
            yield self.shard
        if self._secondary is not None:
            yield self._secondary

    # ---- moving between SHARDED and FULL ---------------------------------------------------------

    def start_unshard(self) -> None:
        """Begin to gather the full buffer: SHARDED to ARRIVING (to FULL at once when alone)."""
        if self.state is not Weights.SHARDED:
            return
        self._check_placeholders()
        # Views that autograd saved look into this storage. It is resized, never replaced.
        self.full.untyped_storage().resize_(self.full.numel() * self.full.itemsize)
        self._places = self.gatherers
        self._pending = self._start_gather(self.full)
        self.state = Weights.ARRIVING

    def wait_unshard(self) -> None:
        """Make the parameters look into the gathered buffer: ARRIVING to FULL."""
        if self.state is not Weights.ARRIVING:
            return
        assert self._pending is not None  # ARRIVING means that a gather was started
        self._pending.wait()
        self._pending = None
        if self.on_gather is not None:
            self.on_gather(self.full, self._places)
        self._point_at(self._views)
        self.state = Weights.FULL

    def unshard(self) -> None:
        """Gather the full buffer and wait for it."""
        self.start_unshard()
        self.wait_unshard()

    def reshard(self, *, in_use: bool = False) -> None:
        """Drop the full buffer: FULL to SHARDED. Edits by the user are kept first.

        `in_use`: inside forward or backward. Where comparing values would take a wait for the
        device or a read of the disk, there only writes that torch has counted are looked for.
        """
        if not self.partition.weights or self.state is not Weights.FULL:
            return
        if not in_use or self._compares_for_nothing or self._was_written:
            self.absorb_edits()
        if self._is_near:
            self._leave_secondary(self.full)
        self._point_at(self._placeholders)
        self.full.untyped_storage().resize_(0)
        self.state = Weights.SHARDED

    @property
    def _compares_for_nothing(self) -> bool:
        return self.device.type == "cpu" and not self._shard.is_away

    @property
    def _was_written(self) -> bool:
        pairs = zip(self.parameters, self._versions, strict=True)
        return any(parameter._version != version for parameter, version in pairs)

    def serve(self) -> None:
        """Give my shard to ranks that gather this bucket while I do not use it."""
        was_near, places = self._is_near, self.gatherers
        scratch = torch.empty(self.layout.numel, dtype=self.full.dtype, device=self.device)
        self._start_gather(scratch).wait()
        if self.on_gather is not None:
            self.on_gather(scratch, places)
        if self._is_near and not was_near and self.state is Weights.SHARDED:
            self._leave_secondary(scratch)

    @property
    def gatherers(self) -> range:
        """The places, among all ranks, of those that take part in my next gather."""
        return self.sharing.places_of_node if self._is_near else self.sharing.places

    def _start_gather(self, full: Tensor) -> Pending:
        """Begin to fill `full`: from the node, where its copy holds, else from all shards."""
        gather = start_gather_by_sum if self._gathers_by_sum else start_all_gather
        sharing, node = self.sharing, self.sharing.node
        if node is not None and self._is_near:
            slice_of(full, node.rank, node).copy_(self._near_shard())
            return gather(full, node, self._gather_label)
        self._shard.copy_to(full[self.span[0] : self.span[1]])
        # What is gathered now leaves the node's copy behind.
        self._is_near = node is not None
        if sharing.hops is not None:
            return start_gather_in_hops(full, *sharing.hops, self._gather_label)
        return gather(full, sharing.shards, self._gather_label)

    def _near_shard(self) -> Tensor:
        """My cut of the node's copy of the weights."""
        if self.state is Weights.SHARDED:
            assert self._secondary is not None  # what was gathered has left it behind
            return self._secondary
        if self._pending is not None:
            self._pending.wait()
        assert self.sharing.node is not None  # the copy is cut over it
        return slice_of(self.full, self.sharing.node.rank, self.sharing.node)

    def _leave_secondary(self, full: Tensor) -> None:
        assert self.sharing.node is not None  # the copy is cut over it
        near = slice_of(full, self.sharing.node.rank, self.sharing.node)
        if self._secondary is None:
            self._secondary = near.clone()
        else:
            self._secondary.copy_(near)

    def outdate(self) -> None:
        """The shards have new values: the next gather is over all of them. All ranks call it."""
        self._is_near = False

    def _check_placeholders(self) -> None:
        """Refuse to go on where a freed parameter was written to: the write would be lost."""
        self.check_links()
        for index, parameter in enumerate(self.parameters):
            if parameter._version != self._versions[index]:
                raise ShardedAccessError(self._lost_write(index))
        if self.device.type == "cpu" and not bool(self._nans.isnan().all()):
            raise ShardedAccessError(self._lost_write(int(self._nans.isnan().int().argmin())))

    def _lost_write(self, index: int) -> str:
        return (
            f"rank {self.ranks.rank}: parameter {self.layout.slots[index].name} was written to"
            " while its values were spread over the ranks, so the write reached nothing. Write"
            " inside `with hadal.zero.GatheredParameters([parameter], modifier_rank=0):`."
        )

    # ---- master and weights ----------------------------------------------------------------------

    def write_back(self, start: int, stop: int) -> None:
        """Put elements [start, stop) of the stepped master into the weights, cast."""
        if self.has_own_master and self.master is not None:
            self.put_weights(start, self.master[start:stop])

    def put_weights(self, start: int, values: Tensor) -> None:
        """Put new master values, of the elements from `start` of my span on, into the weights."""
        self.shard[start : start + values.numel()].copy_(values)

    def start_refresh(self) -> Pending | None:
        """Gather the weights where they are whole, but were stepped or loaded in shards."""
        self.outdate()
        if not self.partition.optimizer or self.partition.weights:
            return None
        label = f"the refresh of {self.name}"
        if self._refresh.broadcasts:
            return start_broadcasts(self.full, self.sharing.shards, label)
        return start_gather_in_pieces(self.full, self.sharing.shards, label, self._refresh.numel)

    def absorb_edits(self) -> None:
        """Put weights that the user changed since the last look into shard and master.

        The values themselves are compared, because a write through `parameter.data` leaves no other
        trace. Where weights are whole and masters are on the disk, the next update looks, as it
        reads these anyway.

        Raises:
            ModelError: a parameter no longer looks into this bucket.
        """
        if self.state is not Weights.FULL:
            return
        self.check_links()
        mine = self.full[self.span[0] : self.span[1]]
        if self.partition.weights:
            if self._shard.holds(mine):
                return
        elif self._master is not None and self._master.is_away:
            return
        if self._master is not None and self.has_own_master:
            with self._master.present() as master:
                self._absorb_into(master, mine)
        if self.partition.weights:
            self._shard.replace(mine)

    def absorb_edits_into(self, values: Tensor, start: int) -> None:
        """Put the user's edits of whole weights into a stretch of the master that begins there."""
        if self.state is Weights.FULL and not self.partition.weights:
            first = self.span[0] + start
            self._absorb_into(values, self.full[first : first + values.numel()])

    @staticmethod
    def _absorb_into(master: Tensor, weights: Tensor) -> bool:
        """Put edited weights into a master; tell whether there were any."""
        is_changed = False
        block = _CPU_BLOCK_NUMEL if master.device.type == "cpu" else weights.numel()
        buffer = torch.empty(min(block, weights.numel()), dtype=weights.dtype, device=master.device)
        for start in range(0, weights.numel(), max(block, 1)):
            present = weights[start : start + block].to(master.device)
            values = master[start : start + block]
            cast = buffer[: present.numel()].copy_(values)
            if not _same_bits(cast, present):
                # Elements that the user left alone keep the master's full precision.
                edited = present.to(values.dtype)
                values.copy_(torch.where(cast == present, values, edited))
                is_changed = True
        return is_changed

    def take_back(self) -> None:
        """Copy values that were assigned (`parameter.data = tensor`) into their place here."""
        for parameter, view in zip(self.parameters, self._views, strict=True):
            if parameter.data_ptr() != view.data_ptr() and parameter.shape == view.shape:
                view.copy_(parameter.detach())
        self._point_at(self._views)

    def check_links(self) -> None:
        """Raise `ModelError` for a parameter that no longer looks where this bucket put it."""
        if self.state is not Weights.ARRIVING:
            for index in range(len(self.parameters)):
                self._check_link(index)

    def _check_link(self, index: int) -> None:
        parameter = self.parameters[index]
        expected = (self._views if self.state is Weights.FULL else self._placeholders)[index]
        moved = parameter.data_ptr() != expected.data_ptr() and expected.numel() > 0
        if moved or parameter.dtype != expected.dtype:
            raise ModelError(
                f"rank {self.ranks.rank}: parameter {self.layout.slots[index].name} left its"
                f" bucket: it is now {parameter.dtype} on {parameter.device} in memory of its own"
                f" (expected {expected.dtype} on {expected.device}). Call .to(), .float() and the"
                " like before hadal.initialize, and change weights in place only."
            )

    def release(self) -> None:
        """Give every parameter memory of its own again, with its present (whole) values."""
        for parameter in self.parameters:
            parameter.data = parameter.detach().clone()


def _same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two 1-D tensors of one dtype, of a multiple of 8 bytes, hold the same bits."""
    # Compared as words: 16-bit floats are compared one by one, four times as slow.
    return torch.equal(one.view(torch.int64), other.view(torch.int64))
