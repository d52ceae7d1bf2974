"""Parameters that `zero.Init` created sharded, until `initialize` takes them over.

Their buckets hold the values in the dtype they were given in, whichever dtype they are shown in, so
a later initialisation and `initialize` find the exact values. If the program casts a parameter or
changes its strides (channels_last), the values follow.
"""

from __future__ import annotations

import itertools
import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from hadal.comm.collectives import gather_codes, start_all_gather, start_exchange_in_pieces
from hadal.comm.pending import Pending, UnreadSends
from hadal.device import current_device, modules_running, unwatched
from hadal.errors import MismatchError, ModelError
from hadal.zero import access
from hadal.zero.bucket import Bucket
from hadal.zero.grouping import BucketPlan, Fetch, Member
from hadal.zero.layout import Layout, Slot, order_of, shared, strides_of
from hadal.zero.offload import Offload
from hadal.zero.parameters import Attached, ReadListener, is_foreign
from hadal.zero.policy import Partition, Precision
from hadal.zero.sharing import Sharing

_log = logging.getLogger(__name__)
_CUT_WEIGHTS = Partition(weights=True)

# The number of buckets that stay gathered after their last use: an initialisation works on one
# module after the other.
_STAY_WHOLE = 8

# Parameters of this many elements or more get their own buckets, which rank 0 shards in place.
_ALONE_NUMEL = 1 << 16

# The bytes that rank 0 keeps at most until other ranks have received them.
UNREAD_NBYTES = 1 << 25


class InitBucket(Bucket):
    """Parameters of one dtype that were created sharded together.

    Between uses they hold placeholders of the dtypes and strides that the program expects.
    """

    def __init__(
        self,
        plan: BucketPlan,
        sharing: Sharing,
        offload: Offload,
        sends: UnreadSends,
        number: int,
        required: tuple[str, ...],
    ) -> None:
        given = plan.members[0].parameter.dtype
        precision = Precision(given, given, given, given)
        super().__init__(plan, precision, sharing, current_device(), offload, sends=sends)
        self.number = number
        """The same on all ranks."""
        self.required = required
        """The keys of `zero_optimization` that must be enabled to train the parameters."""
        self.shown = given
        """The dtype of the parameters, except of those that the program has cast."""
        self.given: Tensor | None = None
        """The gathered values, which the parameters view now; None: they hold placeholders."""
        self.unread: set[nn.Parameter] | None = None
        """The parameters that nothing has read yet, if `given` was made without gathering."""
        self.casts: dict[nn.Parameter, torch.dtype] = {}
        """The dtypes that the program has cast parameters to."""
        self.orders: dict[nn.Parameter, tuple[int, ...]] = {}
        """The memory orders of the dimensions of parameters, as the program has changed them."""

    def owns(self, parameter: nn.Parameter) -> bool:
        """Return True if no engine has taken over this parameter."""
        return _bucket_of.get(parameter) is self

    def new_full(self) -> Tensor:
        """Return memory for all values as given, in the bucket's layout."""
        return torch.empty(self.layout.numel, dtype=self.precision.master, device=self.device)

    def start_gather(self, given: Tensor) -> Pending:
        """Begin to gather the values as given into `given`, 1-D in the bucket's layout."""
        reading = self.offload.as_one(self.ranks, f"reading {self.name}")
        with reading, self.present(writes=False):
            given[self.span[0] : self.span[1]].copy_(self.shard)
        return start_all_gather(given, self.ranks, f"the gather of {self.name}")

    def shard_on_device(self) -> Tensor:
        """Return this rank's shard on the device, from wherever it is stored."""
        reading = self.offload.as_one(self.ranks, f"reading {self.name}")
        with reading, self.present(writes=False):
            return self.shard.to(self.device, copy=self.loads_on_use)

    def show_given(self, given: Tensor, dtype: torch.dtype) -> None:
        """Point the parameters at their values in a dtype, cast and reordered as expected."""
        shown = []
        for parameter, view in zip(self.parameters, self.views_of(given), strict=True):
            values = view.to(dtype)
            values = values.to(self.casts.get(parameter, dtype))
            order = self.orders.get(parameter)
            if order is not None and any(values.stride()):
                strides = strides_of(values.shape, order)
                if values.stride() != strides:
                    values = values.new_empty_strided(values.shape, strides).copy_(values)
            shown.append(values if self.owns(parameter) else parameter.data)
        self.show(shown)
        self.given = given

    def gather_unread(self) -> None:
        """Gather the values of parameters that were shown without them."""
        unread, self.unread = self.unread or set(), None
        given = self.new_full()
        self.start_gather(given).wait()
        for parameter, values in zip(self.parameters, self.views_of(given), strict=True):
            if parameter in unread:
                parameter.detach().copy_(values)

    def hide_values(self) -> None:
        """Point the parameters at placeholders of the dtypes that the program expects."""
        nan = torch.full((), torch.nan, dtype=self.shown, device=self.device)
        pairs = zip(self.parameters, self.layout.slots, strict=True)
        self.hide([nan.to(self.casts.get(p, self.shown)).expand(slot.shape) for p, slot in pairs])

    def link(self) -> None:
        """Point the parameters at the bucket again if the program has moved or cast them.

        Raises:
            ModelError: a parameter was given other values.
        """
        for slot, parameter in zip(self.layout.slots, self.parameters, strict=True):
            if not self.owns(parameter):
                continue
            values = parameter.data
            one = values[(slice(0, 1),) * values.dim()] if not any(values.stride()) else values
            if not bool(one.isnan().all()):
                raise ModelError(
                    f"rank {self.ranks.rank}: parameter {slot.name} was created in zero.Init and"
                    " was given other values while its own were sharded over the ranks."
                    " Assign them inside `with hadal.zero.GatheredParameters([parameter],"
                    " modifier_rank=0):`, or in place inside the zero.Init context."
                )
            self._note_form(parameter, self.shown)
        self.hide()

    def _note_form(self, parameter: nn.Parameter, dtype: torch.dtype) -> None:
        """Keep the strides of a parameter, and its dtype, if the program has changed `dtype`."""
        order = order_of(parameter.shape, parameter.stride())
        if order is not None:  # otherwise it is a placeholder
            self.orders[parameter] = order
        if parameter.dtype == self.shown:
            self.casts.pop(parameter, None)
        elif parameter.dtype != dtype:
            self.casts[parameter] = parameter.dtype

    def shard_again(self, sends: UnreadSends | None = None) -> None:
        """Keep the program's writes, including those through `.data`, and hide the full values.

        With `sends` rank 0's writes are sent to all ranks. The memory of the full values is not
        reused: a new parameter may share it, as in `weight_norm`.
        """
        given, unread = self.given, self.unread or set()
        assert given is not None  # they were shown
        self.given = self.unread = None
        for parameter in self.parameters:
            self._note_form(parameter, self.shown if sends is None else given.dtype)
        slots = zip(self.parameters, self.layout.slots, self.views_of(given), strict=True)
        written = []
        for parameter, slot, view in slots:
            if parameter not in unread:
                written.append((slot.offset, slot.stop))
                _take_edits(parameter, view)
        if sends is not None:
            label = f"the broadcast of rank 0's first values of {self.name}"
            sends.add(self.sharing.start_cutting(given, label), given.nbytes)
        low, high = self.span
        with self.offload.as_one(self.ranks, f"writing {self.name}"):
            if sends is not None or not self.holds(given[low:high]):
                with self.present():
                    for start, stop in written if unread else [self.span]:
                        first, last = max(start, low), max(min(stop, high), low)
                        self.shard[first - low : last - low].copy_(given[first:last])
        self.hide_values()


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


_bucket_of: Attached[InitBucket] = Attached("init")


class ShardedInit:
    """The keeper of all parameters that were created sharded and that no engine has taken over."""

    def __init__(self) -> None:
        self.bucket_of = _bucket_of
        self.gathered = access.RecentBuckets(self._bucket_to_gather, _STAY_WHOLE)
        self.sends = UnreadSends(UNREAD_NBYTES)
        # The buckets that a module's call outside of the contexts has gathered, by the module's id;
        # None: they are needed until `initialize`.
        self._called: WeakKeyDictionary[InitBucket, int | None] = WeakKeyDictionary()
        self._has_warned = False
        self._count = itertools.count()
        self.listener = ReadListener(self._on_call)

    def shard(
        self,
        parameters: Iterable[nn.Parameter],
        name: str,
        sharing: Sharing,
        offload: Offload,
        required: tuple[str, ...] = (),
    ) -> list[InitBucket]:
        """Shard the values of new parameters over the ranks."""
        alike: dict[tuple[torch.dtype, nn.Parameter | None], list[nn.Parameter]] = {}
        for parameter in dict.fromkeys(parameters):
            known = access.keeper_of(parameter) is not None or is_foreign(parameter)
            if not known and parameter.numel() > 1 and parameter.device.type != "meta":
                alone = parameter if parameter.numel() >= _ALONE_NUMEL else None
                alike.setdefault((parameter.dtype, alone), []).append(parameter)
        buckets = []
        for number, members in enumerate(alike.values()):
            described = [Member(f"{name}[{number}]", parameter, -1) for parameter in members]
            plan = BucketPlan(name, _CUT_WEIGHTS, described, [])
            bucket = InitBucket(plan, sharing, offload, self.sends, next(self._count), required)
            for parameter in bucket.parameters:
                _bucket_of[parameter] = bucket
            access.register(self, bucket.parameters)
            buckets.append(bucket)
        return buckets

    # ---- inside the contexts ---------------------------------------------------------------------

    def _bucket_to_gather(self, parameter: nn.Parameter) -> InitBucket | None:
        """Return the bucket of a parameter that an operation is about to read or write."""
        bucket = _bucket_of.get(parameter)
        if bucket is None or (bucket.given is not None and bucket not in self.gathered):
            return None  # not held here, or already whole for a caller that will free it
        return bucket

    def on_read(self, parameter: nn.Parameter) -> None:
        """Gather the bucket of a parameter that an operation is about to read or change."""
        bucket = _bucket_of.get(parameter)
        if bucket is not None and parameter in (bucket.unread or ()):
            with unwatched():
                bucket.gather_unread()
        self.gathered.on_read(parameter)

    def on_fill(self, parameter: nn.Parameter) -> None:
        """Prepare a parameter for new values without gathering the current ones."""
        bucket = self._bucket_to_gather(parameter)
        if bucket is not None and bucket not in self.gathered:
            bucket.unread = set(bucket.parameters)
        self.gathered.on_read(parameter)
        if bucket is not None and bucket.unread:
            bucket.unread.discard(parameter)

    def _reveal(self, buckets: Iterable[InitBucket], *, as_given: bool) -> None:
        """Point parameters at their values, as given or in the dtype they are shown in."""
        arriving: list[tuple[InitBucket, Tensor, Pending | None]] = []
        for bucket in buckets:
            bucket.link()
            given = bucket.new_full()
            pending = bucket.start_gather(given) if bucket.unread is None else None
            arriving.append((bucket, given, pending))
        for bucket, given, pending in arriving:
            if pending is not None:
                pending.wait()
            bucket.show_given(given, given.dtype if as_given else bucket.shown)

    @contextmanager
    def editing(self, bucket: Bucket) -> Iterator[None]:
        """Show a bucket's values as given inside the block; rank 0's are kept."""
        assert isinstance(bucket, InitBucket)  # `bucket_of` has no other
        self.end_calls()
        if bucket.given is not None:
            yield  # an outer context keeps what is written
            return
        self._reveal([bucket], as_given=True)
        try:
            yield
        finally:
            if bucket.given is not None:  # not taken over in the block
                bucket.shard_again(self.sends)

    # ---- before `initialize` ---------------------------------------------------------------------

    @contextmanager
    def whole(self, buckets: Iterable[Bucket]) -> Iterator[None]:
        """Keep buckets readable inside the block (`GatheredParameters` before `initialize`)."""
        with unwatched():
            self.settle()  # later operations would free those that are gathered now
            known = [bucket for bucket in dict.fromkeys(buckets) if isinstance(bucket, InitBucket)]
            cut = [bucket for bucket in known if bucket.given is None]
            self._reveal(cut, as_given=False)
        try:
            yield
        finally:
            with unwatched():
                for bucket in cut:
                    if bucket.given is not None:  # not taken over in the block
                        bucket.shard_again()

    def _on_call(self, parameter: nn.Parameter) -> None:
        """Gather the bucket of a parameter that a module reads before `initialize`.

        It stays whole at least until the module's call ends, or for a backward until `initialize`.
        A read outside of any call is an error (`parameters.guard`).

        Raises:
            MismatchError: another rank reads other parameters.
        """
        bucket, modules = _bucket_of.get(parameter), modules_running()
        if bucket is None or bucket.given is not None or not modules:
            return
        with unwatched():
            self.end_calls(modules)
            _expect_alike(bucket, type(modules[0]).__name__)
            self._reveal([bucket], as_given=False)
        needs_backward = torch.is_grad_enabled() and any(p.requires_grad for p in bucket.parameters)
        self._called[bucket] = None if needs_backward else id(modules[0])
        if needs_backward and not self._has_warned:
            self._has_warned = True
            _log.warning(
                "%s is called before initialize with gradients enabled: the weights that it gathers"
                " stay in memory until initialize; call it under torch.no_grad()",
                type(modules[-1]).__name__,
            )

    def end_calls(self, running: Iterable[nn.Module] | None = None) -> None:
        """Hide the values gathered for calls of modules that are not running; None: for all."""
        known = None if running is None else {None, *map(id, running)}
        for bucket in [b for b, call in self._called.items() if known is None or call not in known]:
            del self._called[bucket]
            bucket.shard_again()

    def settle(self) -> None:
        """Hide all values but those that `GatheredParameters` shows."""
        self.gathered.keep(0)
        with unwatched():
            self.end_calls()

    def moved(self, parameter: nn.Parameter, fn: Callable[[Tensor], Tensor]) -> Tensor | None:
        """Apply `fn` to a placeholder; return None if the result has values."""
        bucket = _bucket_of[parameter]
        # Two elements in each dimension are enough to see the resulting strides.
        shape = (2,) * parameter.dim()
        strides = strides_of(shape, bucket.orders.get(parameter, bucket.slot_of(parameter).order))
        few = parameter.new_empty_strided(shape, strides)
        found = fn(few.fill_(torch.nan))
        order = order_of(found.shape, found.stride())
        if order is None or not bool(found.isnan().all()):
            return None
        bucket.orders[parameter] = order
        return found.new_full((), torch.nan).expand(parameter.shape)


def _expect_alike(bucket: InitBucket, reader: str) -> None:
    label = f"the agreement to gather {bucket.name}"
    known = gather_codes(bucket.number, bucket.ranks, label)
    other = next((rank for rank, code in enumerate(known) if code != bucket.number), None)
    if other is not None:
        raise MismatchError(
            f"rank {bucket.ranks.rank}: {reader} reads {bucket.name} before initialize, but"
            f" rank {other} reads another parameter. Ranks whose forwards differ must run them"
            " inside `with hadal.zero.GatheredParameters(model.parameters()):`"
        )


keeper = ShardedInit()


# ---- for `initialize` ----------------------------------------------------------------------------


def sharing_at_init(parameter: nn.Parameter) -> Sharing | None:
    """Return the ranks over which a parameter was created sharded; None if it was not."""
    bucket = _bucket_of.get(parameter)
    return None if bucket is None else bucket.sharing


def required_keys(parameter: nn.Parameter) -> tuple[str, ...]:
    """Return the keys of `zero_optimization` that must be enabled to train a parameter."""
    bucket = _bucket_of.get(parameter)
    return () if bucket is None else bucket.required


def show_as_given(named: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Show parameters in the dtype they were given in, or cast to, for `initialize` to read.

    Raises:
        ModelError: a parameter was given other values.
    """
    keeper.settle()
    names = {parameter: name for name, parameter in named if parameter in _bucket_of}
    for bucket in dict.fromkeys(_bucket_of[parameter] for parameter in names):
        slots = zip(bucket.parameters, bucket.layout.slots, strict=True)
        bucket.rename([names.get(parameter, slot.name) for parameter, slot in slots])
        if bucket.given is None:
            with unwatched():
                bucket.link()
                bucket.shown = bucket.precision.master
                bucket.hide_values()


@contextmanager
def taking_over(parameters: Sequence[nn.Parameter], sharing: Sharing) -> Iterator[Fetch | None]:
    """Give the values of these parameters to a caller that moves them into its own memory.

    Yields a function that fetches them, if all were created here over the ranks of `sharing`;
    otherwise None, and the parameters created here hold their whole values.
    """
    mine = [parameter for parameter in parameters if parameter in _bucket_of]
    buckets = dict.fromkeys(_bucket_of[parameter] for parameter in mine)
    fetches = len(mine) == len(parameters) and _can_fetch(buckets, mine, sharing)
    if not fetches:
        with unwatched():
            keeper._reveal([b for b in buckets if b.given is None], as_given=True)
    yield _fetch if fetches else None
    for parameter in mine:
        _bucket_of.pop(parameter)
    for bucket in buckets:
        if not any(map(bucket.owns, bucket.parameters)):
            bucket.given = None
            bucket.free_disk()


def _can_fetch(
    buckets: Collection[InitBucket], parameters: Collection[nn.Parameter], sharing: Sharing
) -> bool:
    """Return True if `_fetch` can lay out these parameters again without their whole values.

    The buckets must hold no other parameters: those would be taken over later.
    """
    return (
        len({(bucket.device, bucket.precision.master) for bucket in buckets}) == 1
        and all(bucket.ranks.numbers == sharing.ranks.numbers for bucket in buckets)
        and sum(len(bucket.parameters) for bucket in buckets) == len(parameters)
        and all(bucket.given is None and not any(bucket.orders.values()) for bucket in buckets)
        and not any(slot.order for bucket in buckets for slot in bucket.layout.slots)
    )


def _fetch(parameters: Sequence[nn.Parameter], layout: Layout, is_cut: bool) -> Tensor:
    """Return the values of parameters as given, 1-D in `layout`.

    If `is_cut`, only my shard: each rank sends every other rank the elements that the other one
    needs, and no more. Otherwise all are gathered.
    """
    bucket = _bucket_of[parameters[0]]
    shard = layout.span(bucket.ranks.rank % layout.world_size)
    start, stop = shard if is_cut else (0, layout.numel)
    found = torch.empty(stop - start, dtype=bucket.precision.master, device=bucket.device)
    for low, high in layout.gaps:
        found[max(low - start, 0) : max(high - start, 0)].zero_()
    places = dict(zip(parameters, layout.slots, strict=True))
    exchange = _start_exchange(places, layout, found) if is_cut else None
    for pending in _start_gathers(places, found) if exchange is None else [exchange]:
        pending.wait()
    for parameter, slot in places.items():
        cast = _bucket_of[parameter].casts.get(parameter)
        if cast is not None:
            values = found[max(slot.offset - start, 0) : max(slot.stop - start, 0)]
            values.copy_(values.to(cast))
    return found


def _start_gathers(places: Mapping[nn.Parameter, Slot], found: Tensor) -> list[Pending]:
    """Begin to fill `found`, in which each parameter has a slot, bucket by bucket."""
    arriving = []
    for bucket in dict.fromkeys(map(_bucket_of.__getitem__, places)):
        slots = [places[parameter] for parameter in bucket.parameters]
        if slots[0].numel == bucket.layout.numel:
            arriving.append(bucket.start_gather(found[slots[0].offset : slots[0].stop]))
            continue
        given = bucket.new_full()
        arriving.append(bucket.start_gather(given))
        for slot, old in zip(slots, bucket.layout.slots, strict=True):
            place = found[slot.offset : slot.stop]
            arriving[-1].then(partial(place.copy_, given[old.offset : old.stop]))
    return arriving


def _start_exchange(places: Mapping[nn.Parameter, Slot], layout: Layout, found: Tensor) -> Pending:
    """Begin to fill `found`, my shard of `layout`, in which each parameter has a slot."""
    outgoing: dict[int, list[Tensor]] = defaultdict(list)
    incoming: dict[int, list[Tensor]] = defaultdict(list)
    shards: dict[Bucket, Tensor] = {}
    ranks = _bucket_of[next(iter(places))].ranks
    mine = layout.span(ranks.rank % layout.world_size)
    for parameter, slot in places.items():
        bucket = _bucket_of[parameter]
        if bucket not in shards:
            shards[bucket] = bucket.shard_on_device()
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
