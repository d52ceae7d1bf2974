"""`zero.Init`: modules built inside it are born sharded, one module at a time.

A module's parameters are cut as soon as it is attached to its parent, so the peak is the shards
plus the largest module. Whatever touches a parameter afterwards (an initialisation that the parent
runs, a copy) sees its real values: an operation's arguments are looked at before it runs.
`initialize` takes the values over, in the dtype they were given in, and lays them out anew.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.utils.weak import WeakIdKeyDictionary

from hadal.comm import Ranks, init_distributed
from hadal.comm.collectives import broadcast_
from hadal.device import current_device
from hadal.errors import NotBuiltYetError
from hadal.zero import access
from hadal.zero.bucket import Bucket, Weights
from hadal.zero.grouping import BucketPlan, Member, is_foreign
from hadal.zero.hooks import ReadWatcher
from hadal.zero.policy import Partition, Precision

_CUT_WEIGHTS = Partition(weights=True)

# Buckets that stay gathered behind the latest touch: an initialisation touches one module after the
# other, and a value it still holds must not be freed under it.
_STAY_WHOLE = 8


class _Nursery:
    """The parameters that were born sharded and that no engine has taken over yet."""

    def __init__(self) -> None:
        self.bucket_of: MutableMapping[nn.Parameter, Bucket] = WeakIdKeyDictionary()
        self._touched: OrderedDict[Bucket, None] = OrderedDict()
        self._moves = False

    def bear(self, parameters: Iterable[nn.Parameter], name: str, ranks: Ranks) -> None:
        """Cut the values of new parameters over the ranks."""
        by_dtype: dict[torch.dtype, list[Member]] = {}
        for parameter in dict.fromkeys(parameters):
            known = parameter in self.bucket_of or is_foreign(parameter)
            if not known and parameter.numel() > 1 and parameter.device.type != "meta":
                member = Member(f"{name}[{len(by_dtype)}]", parameter, -1)
                by_dtype.setdefault(parameter.dtype, []).append(member)
        device = current_device()
        for dtype, members in by_dtype.items():
            plan = BucketPlan(name, _CUT_WEIGHTS, members, [])
            bucket = Bucket(plan, Precision(dtype, dtype, dtype, dtype), ranks, device)
            bucket.reshard()
            for parameter in bucket.parameters:
                self.bucket_of[parameter] = bucket
            access.register(self, bucket.parameters)

    def on_read(self, parameter: nn.Parameter) -> None:
        """A parameter is about to be read or written by an operation."""
        bucket = None if self._moves else self.bucket_of.get(parameter)
        if bucket is None:
            return
        self._moves = True
        try:
            bucket.unshard()
            self._touched[bucket] = None
            self._touched.move_to_end(bucket)
            if len(self._touched) > _STAY_WHOLE:
                self._cut_again(self._touched.popitem(last=False)[0])
        finally:
            self._moves = False

    def settle(self) -> None:
        """Cut everything again that was touched."""
        self._moves = True
        try:
            while self._touched:
                self._cut_again(self._touched.popitem(last=False)[0])
        finally:
            self._moves = False

    def _cut_again(self, bucket: Bucket) -> None:
        """Keep what was written, by way of `.data` too, and free the full values."""
        if bucket.state is Weights.FULL:
            bucket.take_back()
            broadcast_(bucket.full, 0, bucket.ranks, f"rank 0's first values of {bucket.name}")
            bucket.shard.copy_(bucket.full[bucket.span[0] : bucket.span[1]])
            bucket.reshard()

    @contextmanager
    def whole(self, buckets: Iterable[Bucket]) -> Iterator[None]:
        """Keep buckets readable for a while (`GatheredParameters` before `initialize`)."""
        cut = [b for b in dict.fromkeys(buckets) if b.state is not Weights.FULL]
        for bucket in cut:
            bucket.unshard()
        try:
            yield
        finally:
            for bucket in cut:
                bucket.reshard()

    @contextmanager
    def taking_over(self, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
        """Show whole values to whoever moves these parameters into memory of its own."""
        born = [p for p in parameters if p in self.bucket_of]
        buckets = dict.fromkeys(self.bucket_of[p] for p in born)
        for bucket in buckets:
            bucket.unshard()
        yield
        for parameter in born:
            del self.bucket_of[parameter]


_nursery = _Nursery()
taking_over = _nursery.taking_over


def born_over(parameter: nn.Parameter) -> Ranks | None:
    """The ranks over which a parameter was born sharded; None where it was not."""
    bucket = _nursery.bucket_of.get(parameter)
    return None if bucket is None else bucket.ranks


class Init:
    """A context in which modules are born sharded. All ranks must build the same modules in it.

    The values are those that building outside would have given on rank 0, bit for bit.

    Args:
        module: a module that exists already, to be cut at once.
        data_parallel_group: the ranks to cut over, where not all hold the same model; by default
            all ranks. `initialize(mpu=...)` must be given the same.
        mem_efficient_linear: accepted for DeepSpeed's signature; no layer keeps extra references.
        remote_device: "none" or None; other tiers are not built yet.
        pin_memory: means something for other tiers only.
        config_dict_or_path: accepted; nothing in it changes how modules are born, because the cast
            to the training dtype is made by `initialize`, from the values as they were given.
        config: as `config_dict_or_path`.
        enabled: False makes it a no-op.
        dtype: cast floating-point parameters to this dtype as they are born.
        mpu: gives the data-parallel group, by its `get_data_parallel_group()`.

    Raises:
        NotBuiltYetError: an argument whose work is not done yet.
    """

    _active: ClassVar[ExitStack | None] = None

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
    ) -> None:
        if remote_device not in (None, "none"):
            raise NotBuiltYetError(
                f"zero.Init(remote_device={remote_device!r}) is not built yet; leave it out"
            )
        if mpu is not None and data_parallel_group is None:
            data_parallel_group = mpu.get_data_parallel_group()
        self._group = data_parallel_group
        self._enabled = enabled
        self._dtype = dtype
        self._owns_context = False
        self._begun: list[weakref.ref[nn.Module]] = []
        if module is not None and enabled:
            init_distributed()
            self._bear_all(module)

    def __enter__(self) -> Init:
        # An inner context changes nothing: the outer one cuts what is built in it.
        if self._enabled and Init._active is None:
            init_distributed()
            stack = ExitStack()
            stack.enter_context(ReadWatcher(_nursery.on_read))
            for handle in (
                register_module_module_registration_hook(self._on_attach),
                register_module_parameter_registration_hook(self._on_parameter),
            ):
                stack.callback(handle.remove)
            Init._active = stack
            self._owns_context = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._owns_context or Init._active is None:
            return
        Init._active.close()
        Init._active = None
        self._owns_context = False
        if kind is None:
            # What was attached to nothing: the outermost modules' own parameters.
            for reference in self._begun:
                module = reference()
                if module is not None:
                    self._bear_all(module)
            _nursery.settle()

    def _on_attach(self, parent: nn.Module, name: str, child: nn.Module | None) -> None:
        """A module has been built and becomes part of another one."""
        if child is not None:
            _nursery.settle()
            self._bear_all(child)

    def _on_parameter(self, module: nn.Module, name: str, parameter: Tensor | None) -> None:
        if parameter is not None:
            self._begun.append(weakref.ref(module))

    def _bear_all(self, module: nn.Module) -> None:
        fresh = [p for p in module.parameters() if p not in _nursery.bucket_of]
        for parameter in fresh:
            if self._dtype is not None and parameter.is_floating_point():
                parameter.data = parameter.data.to(self._dtype)
        ranks = Ranks.world() if self._group is None else Ranks.of(self._group)
        _nursery.bear(fresh, type(module).__name__, ranks)
