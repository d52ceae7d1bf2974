"""`zero.Init`: modules built inside it are created sharded, one module at a time.

A module's parameters are sharded as soon as it is attached to its parent, so the peak is the shards
plus the largest module; rank 0 keeps up to 32 MiB more until the others have received it. Any later
operation on a parameter (an initialisation that the parent runs, a copy) sees its real values,
because arguments are checked before it runs. A parameter that is about to be filled with new values
is not gathered. `initialize` takes over the values in the dtype they were given in, and lays them
out again: a rank receives the elements of its new shards that it does not hold yet.
"""

from __future__ import annotations

import itertools
import logging
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, ClassVar, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from hadal.comm import Ranks, init_distributed
from hadal.comm.collectives import gather_codes, start_all_gather, start_exchange_in_pieces
from hadal.comm.mpu import sharing_group_of
from hadal.comm.pending import Leaving, Pending, finished
from hadal.comm.start import memory_is_tuned
from hadal.device import current_device, keep_freed_memory, modules_running, unwatched
from hadal.errors import MismatchError, ModelError, NotBuiltYetError, UsageError
from hadal.offload import DiskStore
from hadal.zero import access
from hadal.zero.birth import Birth, birth_of, tier_of
from hadal.zero.bucket import Bucket
from hadal.zero.grouping import BucketPlan, Fetch, Member
from hadal.zero.hooks import ReadWatcher
from hadal.zero.layout import Layout, Slot, order_of, shared, strides_of
from hadal.zero.offload import Offload
from hadal.zero.parameters import Attached, ReadListener, is_foreign
from hadal.zero.policy import Partition, Precision, Tier
from hadal.zero.sharing import Sharing

_log = logging.getLogger(__name__)
_CUT_WEIGHTS = Partition(weights=True)

# The number of buckets that stay gathered after their last use: an initialisation works on one
# module after the other.
_STAY_WHOLE = 8

# Parameters of this many elements or more get their own buckets, which rank 0 shards in place.
_ALONE_NUMEL = 1 << 16

# The bytes that rank 0 keeps at most until other ranks have received them.
LEAVING_NBYTES = 1 << 25


class _Nursery:
    """The parameters that were created sharded and that no engine has taken over yet.

    Owns their buckets, which hold the values in the dtype they were given in, whichever dtype they
    are shown in: a later initialisation and `initialize` find the exact values. If the program
    casts a parameter or changes its strides (channels_last), the values follow.
    """

    def __init__(self) -> None:
        self.bucket_of: Attached[Bucket] = Attached("birth")
        self.asked: Attached[tuple[str, ...]] = Attached("asked")
        """The keys of the configuration that `initialize` must find enabled."""
        self.touched = access.Touched(self._bucket_to_gather, _STAY_WHOLE)
        # The parameters of shown buckets that nothing has read yet: their values are not gathered.
        self._unread: dict[Bucket, set[nn.Parameter]] = {}
        self.leaving = Leaving(LEAVING_NBYTES)
        self._casts: Attached[torch.dtype] = Attached("cast")
        """The dtype that the program has cast a parameter to."""
        self._orders: Attached[tuple[int, ...]] = Attached("order")
        """The order of its dimensions in memory, if the program has changed it."""
        # The gathered values that parameters view instead of their bucket's buffer.
        self._given: WeakKeyDictionary[Bucket, Tensor] = WeakKeyDictionary()
        # The dtype in which a bucket's parameters are shown once their context has ended.
        self._shown: WeakKeyDictionary[Bucket, torch.dtype] = WeakKeyDictionary()
        # The buckets that a module's call outside of the contexts has gathered, by the module's id;
        # None: they are needed until `initialize`.
        self._called: WeakKeyDictionary[Bucket, int | None] = WeakKeyDictionary()
        self._has_warned = False
        self._numbers: WeakKeyDictionary[Bucket, int] = WeakKeyDictionary()
        self._count = itertools.count()
        self.listener = ReadListener(self._on_call)

    def bear(
        self, parameters: Iterable[nn.Parameter], name: str, sharing: Sharing, offload: Offload
    ) -> list[Bucket]:
        """Shard the values of new parameters over the ranks."""
        alike: dict[tuple[torch.dtype, nn.Parameter | None], list[nn.Parameter]] = {}
        for parameter in dict.fromkeys(parameters):
            known = parameter in self.bucket_of or is_foreign(parameter)
            if not known and parameter.numel() > 1 and parameter.device.type != "meta":
                alone = parameter if parameter.numel() >= _ALONE_NUMEL else None
                alike.setdefault((parameter.dtype, alone), []).append(parameter)
        buckets = []
        for number, ((given, _), members) in enumerate(alike.items()):
            described = [Member(f"{name}[{number}]", parameter, -1) for parameter in members]
            plan = BucketPlan(name, _CUT_WEIGHTS, described, [])
            precision = Precision(given, given, given, given)
            device = current_device()
            bucket = Bucket(plan, precision, sharing, device, offload, leaving=self.leaving)
            for parameter in bucket.parameters:
                self.bucket_of[parameter] = bucket
            self._numbers[bucket] = next(self._count)
            access.register(self, bucket.parameters)
            bucket.hide()
            buckets.append(bucket)
        return buckets

    def show(self, buckets: Iterable[Bucket], dtype: torch.dtype) -> None:
        """Show parameters in the dtype of their context, which has ended."""
        for bucket in buckets:
            self._shown[bucket] = dtype
            if all(self.bucket_of.get(p) is bucket for p in bucket.parameters):
                self._hide(bucket)

    # ---- values as given -------------------------------------------------------------------------

    def _bucket_to_gather(self, parameter: nn.Parameter) -> Bucket | None:
        """Return the bucket of a parameter that an operation is about to read or write."""
        bucket = self.bucket_of.get(parameter)
        if bucket is None or (bucket in self._given and bucket not in self.touched):
            return None  # not held here, or already whole for a caller that will free it
        return bucket

    def on_read(self, parameter: nn.Parameter) -> None:
        """Gather the bucket of a parameter that an operation is about to read or change."""
        bucket = self.bucket_of.get(parameter)
        if bucket is not None and parameter in self._unread.get(bucket, ()):
            with unwatched():
                self._gather_unread(bucket)
        self.touched.on_read(parameter)

    def on_fill(self, parameter: nn.Parameter) -> None:
        """Prepare a parameter for new values without gathering the current ones."""
        bucket = self._bucket_to_gather(parameter)
        if bucket is not None and bucket not in self.touched:
            self._unread[bucket] = set(bucket.parameters)
        self.touched.on_read(parameter)
        if bucket in self._unread:
            self._unread[bucket].discard(parameter)

    def _on_call(self, parameter: nn.Parameter) -> None:
        """Gather the bucket of a parameter that a module reads before `initialize`.

        It stays whole at least until the module's call ends, or for a backward until `initialize`.
        A read outside of any call is an error (`watched.guard`).

        Raises:
            MismatchError: another rank reads other parameters.
        """
        bucket, modules = self.bucket_of.get(parameter), modules_running()
        if bucket is None or bucket in self._given or not modules:
            return
        with unwatched():
            self.end_calls(modules)
            self._check_alike(bucket, type(modules[0]).__name__)
            self._reveal([bucket], as_shown=True)
        needs_backward = torch.is_grad_enabled() and any(p.requires_grad for p in bucket.parameters)
        self._called[bucket] = None if needs_backward else id(modules[0])
        if needs_backward and not self._has_warned:
            self._has_warned = True
            _log.warning(
                "%s is called before initialize with gradients enabled: the weights that it gathers"
                " stay in memory until initialize; call it under torch.no_grad()",
                type(modules[-1]).__name__,
            )

    def _check_alike(self, bucket: Bucket, reader: str) -> None:
        number = self._numbers[bucket]
        known = gather_codes(number, bucket.ranks, f"the agreement to gather {bucket.name}")
        other = next((rank for rank, code in enumerate(known) if code != number), None)
        if other is not None:
            raise MismatchError(
                f"rank {bucket.ranks.rank}: {reader} reads {bucket.name} before initialize, but"
                f" rank {other} reads another parameter. Ranks whose forwards differ must run them"
                " inside `with hadal.zero.GatheredParameters(model.parameters()):`"
            )

    def end_calls(self, running: Iterable[nn.Module] | None = None) -> None:
        """Hide the values gathered for calls of modules that are not running; None: for all."""
        known = None if running is None else {None, *map(id, running)}
        for bucket in [b for b, call in self._called.items() if known is None or call not in known]:
            del self._called[bucket]
            self._cut_again(bucket, from_rank_0=False)

    def _reveal(self, buckets: Iterable[Bucket], *, as_shown: bool = False) -> None:
        """Point parameters at their values, as given or in the dtype they are shown in."""
        arriving: list[tuple[Bucket, Tensor, Pending]] = []
        for bucket in buckets:
            self._link(bucket)
            given, pending = _room_for(bucket), finished("")
            if bucket not in self._unread:
                pending = self._start_gather(bucket, given)
            arriving.append((bucket, given, pending))
        for bucket, given, pending in arriving:
            pending.wait()
            dtype = self._dtype_of(bucket) if as_shown else given.dtype
            self._show(bucket, [view.to(dtype) for view in bucket.views_of(given)])
            self._given[bucket] = given

    def _start_gather(self, bucket: Bucket, given: Tensor) -> Pending:
        """Begin to gather values as given into `given`, 1-D in the layout of the bucket."""
        reading = bucket.offload.as_one(bucket.ranks, f"reading {bucket.name}")
        with reading, bucket.present(writes=False):
            given[bucket.span[0] : bucket.span[1]].copy_(bucket.shard)
        return start_all_gather(given, bucket.ranks, f"the gather of {bucket.name}")

    def _gather_unread(self, bucket: Bucket) -> None:
        """Gather the values of a bucket that was shown without them."""
        unread = self._unread.pop(bucket)
        given = _room_for(bucket)
        self._start_gather(bucket, given).wait()
        views = zip(bucket.parameters, bucket.views_of(given), strict=True)
        for parameter, values in views:
            if parameter in unread:
                parameter.detach().copy_(values)

    def _show(self, bucket: Bucket, values: Sequence[Tensor]) -> None:
        """Point a bucket's parameters, if not taken over, at `values`, cast or reordered."""
        pairs = zip(bucket.parameters, values, strict=True)
        bucket.show(
            [
                self._as_asked(p, value) if self.bucket_of.get(p) is bucket else p.data
                for p, value in pairs
            ]
        )

    def _as_asked(self, parameter: nn.Parameter, values: Tensor) -> Tensor:
        """Return values in the dtype and strides that the program has given the parameter."""
        cast = values.to(self._casts.get(parameter) or values.dtype)
        order = self._orders.get(parameter)
        if order is None or not any(cast.stride()):
            return cast
        strides = strides_of(cast.shape, order)
        if cast.stride() == strides:
            return cast
        return cast.new_empty_strided(cast.shape, strides).copy_(cast)

    def _dtype_of(self, bucket: Bucket) -> torch.dtype:
        return self._shown.get(bucket, bucket.precision.master)

    def _hide(self, bucket: Bucket) -> None:
        """Point parameters at placeholders of the dtypes that the program expects."""
        dtype = self._dtype_of(bucket)
        nan = torch.full((), torch.nan, dtype=dtype, device=bucket.device)
        pairs = zip(bucket.parameters, bucket.layout.slots, strict=True)
        bucket.hide([nan.to(self._casts.get(p) or dtype).expand(slot.shape) for p, slot in pairs])

    def _link(self, bucket: Bucket) -> None:
        """Point parameters at the bucket again if the program has moved or cast them.

        Raises:
            ModelError: a parameter was given other values.
        """
        for slot, parameter in zip(bucket.layout.slots, bucket.parameters, strict=True):
            if self.bucket_of.get(parameter) is not bucket:
                continue
            if not _is_placeholder(parameter):
                raise ModelError(
                    f"rank {bucket.ranks.rank}: parameter {slot.name} was created in zero.Init and"
                    " was given other values while its own were sharded over the ranks."
                    " Assign them inside `with hadal.zero.GatheredParameters([parameter],"
                    " modifier_rank=0):`, or in place inside the zero.Init context."
                )
            self._note_form(bucket, parameter, self._dtype_of(bucket))
        bucket.hide()

    def _order_of(self, parameter: nn.Parameter) -> tuple[int, ...]:
        known = self._orders.get(parameter)
        return self.bucket_of[parameter].slot_of(parameter).order if known is None else known

    def moved(self, parameter: nn.Parameter, fn: Callable[[Tensor], Tensor]) -> Tensor | None:
        """Apply `fn` to a placeholder; return None if the result has values."""
        # Two elements in each dimension are enough to see the resulting strides.
        shape = (2,) * parameter.dim()
        strides = strides_of(shape, self._order_of(parameter))
        few = parameter.new_empty_strided(shape, strides)
        found = fn(few.fill_(torch.nan))
        order = order_of(found.shape, found.stride())
        if order is None or not bool(found.isnan().all()):
            return None
        self._orders[parameter] = order
        return found.new_full((), torch.nan).expand(parameter.shape)

    def _note_form(self, bucket: Bucket, parameter: nn.Parameter, shown: torch.dtype) -> None:
        """Keep the strides and the dtype of a parameter, if the program has changed them."""
        order = order_of(parameter.shape, parameter.stride())
        if order is not None:  # otherwise it is a placeholder
            self._orders[parameter] = order
        if parameter.dtype == self._dtype_of(bucket):
            self._casts.pop(parameter)
        elif parameter.dtype != shown:
            self._casts[parameter] = parameter.dtype

    def _cut_again(self, bucket: Bucket, *, from_rank_0: bool) -> None:
        """Keep the program's writes, including those through `.data`, and hide the full values.

        Their memory is not reused: a new parameter may share it, as in `weight_norm`.
        """
        given, unread = self._given.pop(bucket), self._unread.pop(bucket, set())
        shown = given.dtype if from_rank_0 else self._dtype_of(bucket)
        for parameter in bucket.parameters:
            self._note_form(bucket, parameter, shown)
        slots = zip(bucket.parameters, bucket.layout.slots, bucket.views_of(given), strict=True)
        written = []
        for parameter, slot, view in slots:
            if parameter not in unread:
                written.append((slot.offset, slot.stop))
                _take_edits(parameter, view)
        if from_rank_0:
            label = f"the broadcast of rank 0's first values of {bucket.name}"
            cutting = bucket.sharing.start_cutting(given, label)
            self.leaving.add(cutting, given.nbytes)
        low, high = bucket.span
        with bucket.offload.as_one(bucket.ranks, f"writing {bucket.name}"):
            if from_rank_0 or not bucket.holds(given[low:high]):
                with bucket.present():
                    for start, stop in written if unread else [bucket.span]:
                        first, last = max(start, low), max(min(stop, high), low)
                        bucket.shard[first - low : last - low].copy_(given[first:last])
        self._hide(bucket)

    def settle(self) -> None:
        """Hide all values but those that `GatheredParameters` shows."""
        self.touched.keep(0)
        with unwatched():
            self.end_calls()

    @contextmanager
    def editing(self, bucket: Bucket) -> Iterator[None]:
        """Show a bucket's values as given inside the block; rank 0's are kept."""
        self.end_calls()
        if bucket in self._given:
            yield  # an outer context keeps what is written
            return
        self._reveal([bucket])
        try:
            yield
        finally:
            self._cut_again(bucket, from_rank_0=True)

    @contextmanager
    def whole(self, buckets: Iterable[Bucket]) -> Iterator[None]:
        """Keep buckets readable inside the block (`GatheredParameters` before `initialize`)."""
        with unwatched():
            self.settle()  # later operations would free those that are gathered now
            cut = [bucket for bucket in dict.fromkeys(buckets) if bucket not in self._given]
            self._reveal(cut, as_shown=True)
        try:
            yield
        finally:
            with unwatched():
                for bucket in cut:
                    if bucket in self._given:  # not taken over in the block
                        self._cut_again(bucket, from_rank_0=False)

    # ---- taking over -----------------------------------------------------------------------------

    def show_as_given(self, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Show parameters in the dtype they were given in, or cast to, for `initialize` to read.

        Raises:
            ModelError: a parameter was given other values.
        """
        self.settle()
        names = {parameter: name for name, parameter in named if parameter in self.bucket_of}
        for bucket in dict.fromkeys(self.bucket_of[parameter] for parameter in names):
            slots = zip(bucket.parameters, bucket.layout.slots, strict=True)
            bucket.rename([names.get(parameter, slot.name) for parameter, slot in slots])
            if bucket not in self._given:
                with unwatched():
                    self._link(bucket)
                    self._shown.pop(bucket, None)
                    self._hide(bucket)

    @contextmanager
    def taking_over(
        self, parameters: Sequence[nn.Parameter], sharing: Sharing
    ) -> Iterator[Fetch | None]:
        """Give the values of these parameters to a caller that moves them into its own memory.

        Yields a function that fetches them, if all were created here over the ranks of `sharing`;
        otherwise None, and the parameters created here hold their whole values.
        """
        born = [p for p in parameters if p in self.bucket_of]
        buckets = dict.fromkeys(self.bucket_of[p] for p in born)
        fetches = len(born) == len(parameters) and self._can_fetch(buckets, born, sharing)
        if not fetches:
            with unwatched():
                self._reveal(bucket for bucket in buckets if bucket not in self._given)
        yield self._fetch if fetches else None
        for parameter in born:
            self.bucket_of.pop(parameter)
            self._casts.pop(parameter)
            self._orders.pop(parameter)
        for bucket in buckets:
            if all(self.bucket_of.get(parameter) is not bucket for parameter in bucket.parameters):
                self._given.pop(bucket, None)
                self._shown.pop(bucket, None)
                bucket.leave_disk()

    def _can_fetch(
        self, buckets: Collection[Bucket], parameters: Collection[nn.Parameter], sharing: Sharing
    ) -> bool:
        """Return True if `_fetch` can lay out these parameters again without their whole values.

        The buckets must hold no other parameters: those would be taken over later.
        """
        return (
            len({(bucket.device, bucket.precision.master) for bucket in buckets}) == 1
            and all(bucket.ranks.numbers == sharing.ranks.numbers for bucket in buckets)
            and sum(len(bucket.parameters) for bucket in buckets) == len(parameters)
            and not any(bucket in self._given for bucket in buckets)
            and not any(self._order_of(p) or self.bucket_of[p].slot_of(p).order for p in parameters)
        )

    def _fetch(
        self,
        parameters: Sequence[nn.Parameter],
        layout: Layout,
        is_cut: bool,
    ) -> Tensor:
        """Return the values of parameters as given, 1-D in `layout`.

        If `is_cut`, only my shard: each rank sends every other rank the elements that the other one
        needs, and no more. Otherwise all are gathered.
        """
        bucket = self.bucket_of[parameters[0]]
        shard = layout.span(bucket.ranks.rank % layout.world_size)
        start, stop = shard if is_cut else (0, layout.numel)
        found = torch.empty(stop - start, dtype=bucket.precision.master, device=bucket.device)
        for low, high in layout.gaps:
            found[max(low - start, 0) : max(high - start, 0)].zero_()
        places = dict(zip(parameters, layout.slots, strict=True))
        if is_cut:
            arriving = [self._start_exchange(places, layout, found)]
        else:
            arriving = self._start_gathers(places, found)
        for pending in arriving:
            pending.wait()
        for parameter, slot in places.items():
            cast = self._casts.get(parameter)
            if cast is not None:
                values = found[max(slot.offset - start, 0) : max(slot.stop - start, 0)]
                values.copy_(values.to(cast))
        return found

    def _start_gathers(self, places: Mapping[nn.Parameter, Slot], found: Tensor) -> list[Pending]:
        """Begin to fill `found`, in which each parameter has a slot, bucket by bucket."""
        arriving = []
        for bucket in dict.fromkeys(map(self.bucket_of.__getitem__, places)):
            slots = [places[parameter] for parameter in bucket.parameters]
            if slots[0].numel == bucket.layout.numel:
                arriving.append(self._start_gather(bucket, found[slots[0].offset : slots[0].stop]))
                continue
            given = _room_for(bucket)
            arriving.append(self._start_gather(bucket, given))
            for slot, old in zip(slots, bucket.layout.slots, strict=True):
                place = found[slot.offset : slot.stop]
                arriving[-1].then(partial(place.copy_, given[old.offset : old.stop]))
        return arriving

    def _start_exchange(
        self, places: Mapping[nn.Parameter, Slot], layout: Layout, found: Tensor
    ) -> Pending:
        """Begin to fill `found`, my shard of `layout`, in which each parameter has a slot."""
        outgoing: dict[int, list[Tensor]] = defaultdict(list)
        incoming: dict[int, list[Tensor]] = defaultdict(list)
        shards: dict[Bucket, Tensor] = {}
        ranks = self.bucket_of[next(iter(places))].ranks
        mine = layout.span(ranks.rank % layout.world_size)
        for parameter, slot in places.items():
            bucket = self.bucket_of[parameter]
            if bucket not in shards:
                shards[bucket] = _shard_in_memory(bucket)
            old, first = bucket.slot_of(parameter), bucket.span[0]
            for number, (low, high) in shared(old, bucket.span, slot, layout):
                piece = shards[bucket][old.offset + low - first : old.offset + high - first]
                # Copies of a shard are held by consecutive blocks of ranks.
                for rank in range(number, ranks.size, layout.world_size):
                    outgoing[rank].append(piece)
            for rank, (low, high) in shared(slot, mine, old, bucket.layout):
                piece = found[slot.offset + low - mine[0] : slot.offset + high - mine[0]]
                incoming[rank].append(piece)
        label = f"the exchange of {layout.slots[0].name} and others for a new layout"
        return start_exchange_in_pieces(outgoing, incoming, found, ranks, label)


def _shard_in_memory(bucket: Bucket) -> Tensor:
    """Return this rank's shard on the device, from wherever it is stored."""
    reading = bucket.offload.as_one(bucket.ranks, f"reading {bucket.name}")
    with reading, bucket.present(writes=False):
        return bucket.shard.to(bucket.device, copy=bucket.loads_on_use)


def _room_for(bucket: Bucket) -> Tensor:
    """Return room for a bucket's values as given, in its layout."""
    numel, dtype = bucket.layout.numel, bucket.precision.master
    return torch.empty(numel, dtype=dtype, device=bucket.device)


def _take_edits(parameter: nn.Parameter, given: Tensor) -> None:
    """Copy a parameter's values, which the program may have changed, into `given`.

    Elements that were only cast keep their precision.
    """
    values = parameter.detach()
    if values.data_ptr() == given.data_ptr() or values.shape != given.shape:
        return
    if values.dtype != given.dtype:
        values = torch.where(given.to(values.dtype) == values, given, values.to(given.dtype))
    given.copy_(values)


def _is_placeholder(parameter: nn.Parameter) -> bool:
    """Return True if a parameter was never given values, even if it was moved."""
    values = parameter.data
    one = values[(slice(0, 1),) * values.dim()] if not any(values.stride()) else values
    return bool(one.isnan().all())


_M = TypeVar("_M", bound=nn.Module)
_plain_move = nn.Module._apply


def _moving(self: _M, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> _M:
    """Move or cast a placeholder (`.to`, `.half` and similar) without giving it full memory."""

    def move(tensor: Tensor) -> Tensor:
        moved = None
        if isinstance(tensor, nn.Parameter) and tensor in _nursery.bucket_of:
            moved = None if any(tensor.stride()) else _nursery.moved(tensor, fn)
        return fn(tensor) if moved is None else moved

    moved: _M = _plain_move(self, fn if Init._contexts else move, recurse)  # type: ignore[no-untyped-call]
    return moved


_nursery = _Nursery()
taking_over = _nursery.taking_over
show_as_given = _nursery.show_as_given


def born_among(parameter: nn.Parameter) -> Sharing | None:
    """Return the ranks over which a parameter was created sharded; None if it was not."""
    bucket = _nursery.bucket_of.get(parameter)
    return None if bucket is None else bucket.sharing


def asked_at_birth(parameter: nn.Parameter) -> tuple[str, ...]:
    """Return the keys of `zero_optimization` that must be enabled to train a parameter."""
    return _nursery.asked.get(parameter) or ()


class Init:
    """A context in which modules are created sharded; all ranks must build the same modules in it.

    The values are bit for bit those that rank 0 would get outside of it. Contexts may be nested: a
    module belongs to the innermost one that is enabled. Creating the object starts
    `torch.distributed`, unless it is running.

    Modules built on `meta` stay there until they are given memory; modules materialised inside are
    sharded when the context ends, and `Init(module=block)` shards one block at once. Parameters
    with a single element, of integers, or of a class that replaces methods of tensors stay whole.

    Args:
        module: an existing module, to be sharded at once.
        data_parallel_group: the ranks to shard over, if not all hold the same model; by default
            all ranks. Pass the same group to `initialize(mpu=...)`.
        mem_efficient_linear: accepted for DeepSpeed's signature; no layer keeps extra references.
        remote_device: where shards are stored until `initialize` lays them out again: "none" is the
            device that computes, "cpu" is host memory (the same if a CPU computes), "nvme" is the
            disk at the configuration's `zero_optimization.offload_param.nvme_path`. The default is
            `offload_param.device`, or "none".
        pin_memory: pin that host memory if there is an accelerator.
        config_dict_or_path: a configuration. Its precision gives the default of `dtype`,
            `zero_optimization.override_module_apply` decides if functions passed to `apply` see
            values, and `offload_param` and `aio` say where shards are stored and how the disk is
            used; nothing else is read before `initialize`, which lays out blocks and copies.
        config: as `config_dict_or_path`.
        enabled: False makes it a no-op.
        dtype: the dtype in which floating-point parameters are shown once the context ends; by
            default that of the configuration's fp16 or bf16. Values are also kept as given, until
            `initialize` makes masters from them.
        mpu: the object passed to `initialize`; it gives the ranks that hold the same model.
        zero_param_parallel_group: the consecutive ranks of a node that share a second copy of
            weights from creation on. It must agree with
            `zero_optimization.zero_hpz_partition_size`, which is sufficient by itself.
        zero_quantized_weights: require this key of `zero_optimization` to be enabled in
            `initialize`, where it takes effect; the key is sufficient by itself.
        zero_quantized_nontrainable_weights: likewise.
        sequence_data_parallel_group: a synonym of `data_parallel_group`, the ranks that hold the
            same model.
        param_swapper: not built yet.

    Raises:
        NotBuiltYetError: the feature of an argument is not built yet.
        UsageError: arguments contradict each other.
        ConfigError: the configuration's precision or `zero_optimization` section is invalid.
    """

    _contexts: ClassVar[list[Init]] = []
    _watching: ClassVar[ExitStack] = ExitStack()

    def __init__(  # noqa: PLR0913 - the signature is DeepSpeed's
        self,
        module: nn.Module | None = None,
        data_parallel_group: Any = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: Any = None,
        config: Any = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
        zero_param_parallel_group: Any = None,
        zero_quantized_weights: bool = False,
        zero_quantized_nontrainable_weights: bool = False,
        sequence_data_parallel_group: Any = None,
        param_swapper: Any = None,
    ) -> None:
        self._enabled = enabled
        if not enabled:
            return
        if param_swapper is not None:
            raise NotBuiltYetError(
                f"zero.Init(param_swapper={param_swapper!r}) is not built yet; leave it out"
            )
        asked = {
            "zero_quantized_weights": zero_quantized_weights,
            "zero_quantized_nontrainable_weights": zero_quantized_nontrainable_weights,
        }
        self._asked = tuple(name for name, is_asked in asked.items() if is_asked)
        if mpu is not None and data_parallel_group is None:
            data_parallel_group = sharing_group_of(mpu)
        group = _one_of(
            data_parallel_group=data_parallel_group,
            sequence_data_parallel_group=sequence_data_parallel_group,
        )
        birth = birth_of(_one_of(config_dict_or_path=config_dict_or_path, config=config))
        self._birth = birth if dtype is None else replace(birth, dtype=dtype)
        self._offload = _offload_of(
            birth, tier_of(birth, remote_device), pins=pin_memory or birth.pins
        )
        self._born: list[Bucket] = []
        self._begun: list[weakref.ref[nn.Module]] = []
        init_distributed()
        _nursery.listener.start()
        if not memory_is_tuned():
            keep_freed_memory(current_device())
        self._sharing = _sharing_of(group, zero_param_parallel_group)
        access.watch_apply()
        nn.Module._apply = _moving  # type: ignore[method-assign]
        if module is not None:
            self._bear_all(module)
            self._show()

    def __enter__(self) -> Init:
        if self._enabled:
            if not Init._contexts:
                _nursery.settle()
                stack = Init._watching
                stack.enter_context(access.attended())
                stack.enter_context(ReadWatcher(_nursery.on_read, on_fill=_nursery.on_fill))
                for handle in (
                    register_module_module_registration_hook(_on_attach),
                    register_module_parameter_registration_hook(_on_parameter),
                ):
                    stack.callback(handle.remove)
            Init._contexts.append(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._enabled:
            return
        Init._contexts.remove(self)
        if not Init._contexts:
            Init._watching.close()
        begun, self._begun = self._begun, []
        if kind is None:
            # Modules that were not attached to a parent: the outermost ones.
            for reference in begun:
                module = reference()
                if module is not None:
                    self._bear_all(module)
            _nursery.touched.keep(0)
            _nursery.leaving.wait()
            self._show()

    def _bear_all(self, module: nn.Module) -> None:
        fresh = [p for p in module.parameters() if p not in _nursery.bucket_of]
        name = type(module).__name__
        with unwatched():
            self._born += _nursery.bear(fresh, name, self._sharing, self._offload)
        for parameter in fresh if self._asked else ():
            _nursery.asked[parameter] = self._asked
        if not self._birth.gathers_in_apply:
            access.leave_alone(fresh)

    def _show(self) -> None:
        """Show the parameters created here in the chosen dtype, after all initialisations."""
        born, self._born = self._born, []
        if self._birth.dtype is not None:
            with unwatched():
                _nursery.show(born, self._birth.dtype)


def MiCS_Init(  # noqa: PLR0913 - the name and the signature are DeepSpeed's
    module: nn.Module | None = None,
    data_parallel_group: Any = None,
    sequence_data_parallel_group: Any = None,
    mem_efficient_linear: bool = True,
    remote_device: str | None = None,
    pin_memory: bool = False,
    config_dict_or_path: Any = None,
    config: Any = None,
    enabled: bool = True,
    dtype: torch.dtype | None = None,
    mpu: Any = None,
) -> Init:
    """Return an `Init`; an older name. `zero_optimization.mics_shard_size` works with both.

    Until `initialize` lays out the blocks, parameters are sharded over all ranks, which takes the
    least memory.
    """
    return Init(**locals())  # the same names, in another order


def _sharing_of(group: Any, near_group: Any) -> Sharing:
    ranks = Ranks.world() if group is None else Ranks.of(group)
    if near_group is None:
        return Sharing.over(ranks)
    near = Ranks.of(near_group)
    start = ranks.rank // near.size * near.size
    if ranks.size % near.size or near.numbers != ranks.numbers[start : start + near.size]:
        raise UsageError(
            f"zero.Init(zero_param_parallel_group=...): rank {ranks.numbers[ranks.rank]} is in a"
            f" group of ranks {near.numbers}; expected a block of consecutive ranks of"
            f" {ranks.numbers} whose size divides their number"
        )
    return Sharing(ranks, ranks, node=near if 1 < near.size < ranks.size else None)


def _on_attach(parent: nn.Module, name: str, child: nn.Module | None) -> None:
    """Shard a module that has been built and becomes part of another one."""
    if child is not None:
        _nursery.touched.keep(0)
        Init._contexts[-1]._bear_all(child)


def _on_parameter(module: nn.Module, name: str, parameter: Tensor | None) -> None:
    """Note a module that has been given a parameter of its own."""
    if parameter is not None:
        Init._contexts[-1]._begun.append(weakref.ref(module))


# Stores of parameters that no engine owns yet; they are removed when the program ends.
_disks: dict[str, DiskStore] = {}


def _offload_of(birth: Birth, tier: Tier, *, pins: bool) -> Offload:
    """Return where shards, and values as given, are stored until `initialize`."""
    if tier is not Tier.DISK:
        return Offload(tier, tier, pins, pins)
    assert birth.nvme_path is not None  # `tier_of` has checked it
    if birth.nvme_path not in _disks:
        _disks[birth.nvme_path] = DiskStore(birth.nvme_path, birth.io)
    disk = _disks[birth.nvme_path]
    return Offload(tier, tier, pins, pins, weights_disk=disk, optimizer_disk=disk)


def _one_of(**given: Any) -> Any:
    """Return the one given argument of several synonyms."""
    found = {name: value for name, value in given.items() if value is not None}
    if len(found) > 1:
        raise UsageError(f"zero.Init got {' and '.join(found)}, which are synonyms; pass one")
    return next(iter(found.values()), None)
