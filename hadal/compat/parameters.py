"""The attributes of stage 3 parameters that programs look for: `ds_id`, `ds_shape`, `ds_status`,
...

They are read from the bucket on access. A parameter has them while its weights are sharded at stage
3 (or were created sharded); otherwise `hasattr` is False, as programs expect. Parameters trained at
stages 1 and 2 have `param_idx_in_group` only.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum, IntEnum
from itertools import count
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from hadal.compat.surface import ROOT
from hadal.zero.access import GatheredParameters, keeper_of
from hadal.zero.bucket import Bucket, Weights
from hadal.zero.grouping import external_parameters, is_leaf
from hadal.zero.leaves import leaf_parameters, set_z3_leaf_modules, unset_z3_leaf_modules
from hadal.zero.parameters import gather_to_copy
from hadal.zero.place import place_of
from hadal.zero.runtime import ZeroRuntime
from hadal.zero.sharded_init import InitBucket, sharing_at_init

NO_GIT = "unknown"
LAMB_OPTIMIZER = "lamb"
ONEBIT_LAMB_OPTIMIZER = "onebitlamb"
VALID_LR_SCHEDULES = ["LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"]


class ZeroParamStatus(Enum):
    """Availability of a parameter's values (`parameter.ds_status`)."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


class ZeroParamType(Enum):
    """Storage of a parameter between uses (`parameter.ds_param_type`)."""

    NORMAL = 1
    PARTITIONED = 2
    REMOTE = 3


class ZeroStageEnum(IntEnum):
    """The ZeRO stages."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3


class OffloadDeviceEnum(str, Enum):
    """A tier, as spelled in the configuration."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(str, Enum):
    """A kind of state that may be moved to another tier."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"


@dataclass
class fragment_address:
    """The position of a parameter's fragment in a flat buffer."""

    numel: int
    start: int


_STATUS = {
    Weights.FULL: ZeroParamStatus.AVAILABLE,
    Weights.SHARDED: ZeroParamStatus.NOT_AVAILABLE,
    Weights.ARRIVING: ZeroParamStatus.INFLIGHT,
}
_numbers: WeakIdKeyDictionary = WeakIdKeyDictionary()
_next = count()
# Persistent parameters, and all of them with one rank, look like any others; an engine knows.
_of_stage_3: WeakIdKeyDictionary = WeakIdKeyDictionary()
_place_in_group: WeakIdKeyDictionary = WeakIdKeyDictionary()
_held: WeakIdKeyDictionary = WeakIdKeyDictionary()
_runtimes: WeakSet[ZeroRuntime] = WeakSet()


def is_zero_param(parameter: Any) -> bool:
    """Return whether an object is a parameter whose weights are sharded."""
    return isinstance(parameter, Tensor) and hasattr(parameter, "ds_id")


class _Read:
    """A property that a program may set: its own value then wins for that parameter."""

    def __init__(self, read: Callable[[Any], Any]) -> None:
        self.read = read

    def __get__(self, parameter: Tensor | None, owner: type[Tensor]) -> Any:
        return self if parameter is None else self.read(parameter)


def watch_parameters() -> None:
    """Add these attributes to `nn.Parameter`."""
    for name, read in _ATTRIBUTES.items():
        setattr(nn.Parameter, name, _Read(_reader(name, read)))
    nn.Parameter.param_idx_in_group = _Read(_index_in_group)  # type: ignore[attr-defined]
    # peft copies modules that it trains as a whole, on every rank. It gathers them only if it
    # sees parameters without elements, but here they keep their shapes.
    if ROOT in sys.modules:
        gather_to_copy(GatheredParameters)
    # Programs that run part of a model several times in one backward set it to False until the
    # last time. Hadal ignores it: it learns how often gradients arrive, and adds late ones.
    nn.Parameter.ds_grad_is_ready = True  # type: ignore[attr-defined]
    nn.Module.ds_external_parameters = _external_parameters  # type: ignore[attr-defined]
    # A parameter saved by autograd comes back in backward as a plain tensor.
    # torch lists the attributes of its own class, and compiles none that cannot be set.
    Tensor.ds_status = property(_status_of_saved, _set_status)  # type: ignore[attr-defined]


def mark_stage_1_or_2(runtime: ZeroRuntime) -> None:
    """Record that an engine trains the parameters of `runtime` with sharded optimizer states."""
    numbers: Counter[int] = Counter()
    for gradients in runtime.gradients:
        bucket = gradients.bucket
        for parameter, slot in zip(bucket.parameters, bucket.layout.slots, strict=True):
            _place_in_group[parameter] = numbers[slot.group]
            numbers[slot.group] += 1


def mark_stage_3(runtime: ZeroRuntime) -> None:
    """Record that an engine trains the parameters of `runtime` at stage 3."""
    _runtimes.add(runtime)
    for parameter in runtime.bucket_of:
        _of_stage_3[parameter] = True


def unmark(runtime: ZeroRuntime) -> None:
    """Undo both."""
    _runtimes.discard(runtime)
    for parameter in runtime.bucket_of:
        _of_stage_3.pop(parameter, None)
        _place_in_group.pop(parameter, None)


def _index_in_group(parameter: nn.Parameter) -> int:
    found: int | None = _place_in_group.get(parameter)
    if found is None:
        raise AttributeError(
            "this parameter has no param_idx_in_group: it is not trained at stage 1 or 2"
        )
    return found


def _external_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Return the parameters of other modules registered for this one, keyed by name."""
    return ((str(number), each) for number, each in enumerate(external_parameters(module)))


def _status_of(bucket: Bucket) -> ZeroParamStatus:
    if isinstance(bucket, InitBucket) and bucket.given is not None:
        return ZeroParamStatus.AVAILABLE
    return _STATUS[bucket.state]


def _set_status(tensor: Tensor, status: Any) -> None:
    vars(tensor)["ds_status"] = status


def _status_of_saved(tensor: Tensor) -> Any:
    if "ds_status" in vars(tensor):
        return vars(tensor)["ds_status"]
    place = tensor.untyped_storage().data_ptr()
    for bucket in (bucket for runtime in _runtimes for bucket in runtime.buckets):
        if place and place == bucket.full.untyped_storage().data_ptr():
            return _STATUS[bucket.state]
    raise AttributeError("this tensor has no ds_status: it is not part of sharded weights")


def _reader(name: str, read: Callable[[nn.Parameter, Bucket], Any]) -> Callable[[Any], Any]:
    def attribute(parameter: nn.Parameter) -> Any:
        keeper = keeper_of(parameter)
        is_sharded = parameter in _of_stage_3 or sharing_at_init(parameter) is not None
        if keeper is None or not is_sharded:
            raise AttributeError(f"this parameter has no {name}: its weights are not sharded")
        return read(parameter, keeper.bucket_of[parameter])

    return attribute


def _number(parameter: nn.Parameter, bucket: Bucket) -> int:
    if parameter not in _numbers:
        _numbers[parameter] = next(_next)
    number: int = _numbers[parameter]
    return number


def _fragment(parameter: nn.Parameter, bucket: Bucket) -> Tensor:
    """Return a copy of this rank's fragment of a parameter, 1-D, with the attributes programs
    expect.
    """
    place = place_of(parameter)
    assert place is not None  # the parameter is in this bucket
    with torch.no_grad(), bucket.present(writes=False):
        fragment: Any = place.cut(bucket.shard).clone()
    fragment.ds_numel = fragment.numel()
    fragment.status = _status_of(bucket)
    fragment.final_location = None  # not offloaded
    return fragment  # type: ignore[no-any-return]


def _gather(parameter: nn.Parameter, bucket: Bucket) -> Callable[..., None]:
    def all_gather(
        param_list: Iterable[nn.Parameter] | None = None, async_op: bool = False, hierarchy: int = 0
    ) -> None:
        """Make parameters whole until `partition`; all ranks must call it."""
        for each in [parameter] if param_list is None else param_list:
            if each not in _held:
                _held[each] = GatheredParameters(each)
                _held[each].__enter__()

    return all_gather


def _release(parameter: nn.Parameter, bucket: Bucket) -> Callable[..., None]:
    def partition(
        param_list: Iterable[nn.Parameter] | None = None,
        hierarchy: int = 0,
        has_been_updated: bool = False,
        free_data: bool = True,
    ) -> None:
        """Undo `all_gather`. Each rank keeps its shard of the written values."""
        for each in [parameter] if param_list is None else param_list:
            if each in _held:
                _held.pop(each).__exit__(None, None, None)

    return partition


def _aligned(parameter: nn.Parameter, bucket: Bucket) -> Callable[[], int]:
    """Return the elements of a parameter with the padding to an even share of each rank."""
    size = bucket.ranks.size
    return lambda: -(-parameter.numel() // size) * size


def _padding(parameter: nn.Parameter, bucket: Bucket) -> Callable[[], int]:
    return lambda: _aligned(parameter, bucket)() - parameter.numel()


def _summary(parameter: nn.Parameter, bucket: Bucket) -> Callable[..., dict[str, Any]]:
    def ds_summary(slice_shape: bool = False, use_debug_name: bool = False) -> dict[str, Any]:
        """Return what is known of a parameter, for messages."""
        return {
            "id": _number(parameter, bucket),
            "status": _status_of(bucket).name,
            "numel": parameter.numel(),
            "shape": tuple(parameter.shape),
            "requires_grad": parameter.requires_grad,
            "grad_shape": None if parameter.grad is None else tuple(parameter.grad.shape),
            "persist": not bucket.partition.weights,
        }

    return ds_summary


def _kind(parameter: nn.Parameter, bucket: Bucket) -> ZeroParamType:
    return ZeroParamType.PARTITIONED if bucket.partition.weights else ZeroParamType.NORMAL


def _count(parameter: nn.Parameter, bucket: Bucket) -> Callable[[], int]:
    return lambda: _fragment(parameter, bucket).numel()


_ATTRIBUTES: dict[str, Callable[[nn.Parameter, Bucket], Any]] = {
    "ds_id": _number,
    "ds_shape": lambda parameter, bucket: parameter.shape,
    "ds_numel": lambda parameter, bucket: parameter.numel(),
    "ds_status": lambda parameter, bucket: _status_of(bucket),
    "ds_tensor": _fragment,
    "ds_persist": lambda parameter, bucket: not bucket.partition.weights,
    "ds_active_sub_modules": lambda parameter, bucket: set(),
    "ds_param_type": _kind,
    "ds_process_group": lambda parameter, bucket: bucket.ranks.group,
    "ds_zero_partition_rank": lambda parameter, bucket: bucket.ranks.rank,
    "ds_zero_partition_world_size": lambda parameter, bucket: bucket.ranks.size,
    "all_gather": _gather,
    "partition": _release,
    "partition_numel": _count,
    "aligned_size": _aligned,
    "padding_size": _padding,
    "ds_summary": _summary,
    "all_gather_coalesced": _gather,
}


# ---- leaf modules --------------------------------------------------------------------------------


def z3_leaf_module(model: nn.Module) -> bool:
    """Return whether a module is marked as a leaf module."""
    return is_leaf(model)


def z3_leaf_parameter(parameter: nn.Parameter) -> bool:
    """Return whether a parameter is gathered with a leaf module."""
    return leaf_parameters.get(parameter) or False


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """Return the leaf modules of a model."""
    return [module for module in model.modules() if is_leaf(module)]


def set_z3_leaf_modules_by_name(
    model: nn.Module,
    module_names: Iterable[str],
    flag: bool = True,
    raise_if_not_found: bool = True,
) -> tuple[list[nn.Module], list[str]]:
    """Mark modules by full name; return them and the names that were not found."""
    known = dict(model.named_modules())
    names = list(module_names)
    return _changed(model, names, [n for n in names if n in known], flag, raise_if_not_found)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module,
    module_name_suffixes: Iterable[str],
    flag: bool = True,
    raise_if_not_found: bool = True,
) -> tuple[list[nn.Module], list[str]]:
    """Mark modules by suffix; return them and the suffixes that were not found."""
    ends = list(module_name_suffixes)
    known = [name for name, _ in model.named_modules()]
    ending = {end: [name for name in known if name.endswith(end)] for end in ends}
    found = [name for names in ending.values() for name in names]
    marked, _ = _changed(model, found or ends, found, flag, raise_if_not_found)
    return marked, [end for end, names in ending.items() if not names]


def _changed(
    model: nn.Module, asked: list[str], found: list[str], flag: bool, raises: bool
) -> tuple[list[nn.Module], list[str]]:
    change = set_z3_leaf_modules if flag else unset_z3_leaf_modules
    missing = [name for name in asked if name not in found]
    # `set_z3_leaf_modules` raises with suggestions if none of them exists.
    return change(model, found or asked, raises), missing
