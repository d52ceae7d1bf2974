"""Small functions over nested tensors, memory and random numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import IntEnum
from functools import reduce, wraps
from itertools import pairwise
from math import isqrt
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from packaging.version import Version
from torch import Tensor, nn

from hadal.comm import Ranks
from hadal.comm.adjoint import gathered
from hadal.comm.collectives import max_, sum_
from hadal.comm.mpu import model_group_of
from hadal.compat.accelerator import get_accelerator
from hadal.compat.groups import get_data_parallel_group
from hadal.compat.log import log_dist
from hadal.device import current_device, memory_use, widest_float
from hadal.device.autograd import is_in_backward, will_collect
from hadal.errors import UsageError
from hadal.plugins.pipeline.module import seed_all
from hadal.plugins.pipeline.partition import partition_uniform
from hadal.zero.sharing import is_model_part


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """Copy nested tensors so that each owns exactly its memory: a view would save its bucket.

    Values that are not lists, tuples or dicts are returned unchanged.
    """
    return _mapped(item, lambda tensor: tensor.detach().to(device, copy=True))


def move_to_device(
    item: Any, device: torch.device | str, criterion_func: Callable[[Any], bool] | None = None
) -> Any:
    """Move nested tensors to a device, or only those for which `criterion_func` is true."""
    if criterion_func is None:
        return _mapped(item, lambda tensor: tensor.to(device))
    return _mapped(item, lambda tensor: tensor.to(device) if criterion_func(tensor) else tensor)


def _mapped(item: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(item, Tensor):
        return change(item)
    if isinstance(item, Mapping):
        made = {key: _mapped(value, change) for key, value in item.items()}
        return made if type(item) is dict else type(item)(made)  # type: ignore[call-arg]
    if isinstance(item, (list, tuple)):
        parts = [_mapped(value, change) for value in item]
        return type(item)(*parts) if hasattr(item, "_fields") else type(item)(parts)
    return item


def copy_to_device(
    item: Any, device: torch.device | str, criterion_func: Callable[[Any], bool]
) -> Any:
    """Copy the nested tensors for which `criterion_func` is true; return others unchanged."""
    return _mapped(
        item, lambda tensor: tensor.to(device, copy=True) if criterion_func(tensor) else tensor
    )


def see_memory_usage(message: str, force: bool = False) -> None:
    """Log the memory in use, with a message; only if `force` is true."""
    if force:
        log_dist(f"{message}: {memory_use(current_device())}")


def required_torch_version(
    min_version: float | str | None = None, max_version: float | str | None = None
) -> bool:
    """Return whether torch is at least one version, or at most another."""
    found = Version(torch.__version__).release
    if min_version is not None:
        return found >= Version(str(min_version)).release
    return max_version is None or found[:2] <= Version(str(max_version)).release


def instrument_w_nvtx(func: Callable[..., Any]) -> Callable[..., Any]:
    """Show a function's calls as ranges in torch's profile."""

    @wraps(func)
    def named(*args: Any, **kwargs: Any) -> Any:
        with torch.profiler.record_function(func.__qualname__):
            return func(*args, **kwargs)

    return named


def recursive_getattr(model: Any, module_name: str) -> Any:
    """Return the object with a full name such as `blocks.3.mlp`."""
    return reduce(lambda owner, name: getattr(owner, name), module_name.split("."), model)


def recursive_setattr(model: Any, module_name: str, module: Any) -> None:
    """Replace the object with a full name."""
    owner, _, name = module_name.rpartition(".")
    setattr(recursive_getattr(model, owner) if owner else model, name, module)


def convert_conv1d_to_linear(model: nn.Module, convert_type: type[nn.Module]) -> nn.Module:
    """Replace modules that hold a transposed weight (GPT-2's) by `nn.Linear`."""
    for name, module in list(model.named_modules()):
        if isinstance(module, convert_type):
            weight: Tensor = module.weight  # type: ignore[assignment]
            into, out = weight.shape
            linear = nn.Linear(into, out, bias=module.bias is not None)
            linear.weight = nn.Parameter(weight.detach().t().contiguous())
            linear.bias = module.bias  # type: ignore[assignment]
            recursive_setattr(model, name, linear)
    return model


def clip_grad_norm_(
    parameters: Any, max_norm: float, norm_type: float = 2, mpu: Any = None
) -> Tensor:
    """Clip the gradients of parameters that no engine trains; return their norm.

    It is averaged over the ranks that see different samples: with experts it differs, and ranks
    that clipped by norms of their own would no longer have equal weights. With `mpu` it is the norm
    over all parts of the model: parameters marked as split count on every model-parallel rank, the
    others on the first. All ranks must call it.

    Raises:
        UsageError: an engine trains one of them, and its configuration does not clip.
    """
    given: list[Any] = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    gradients = [(p, p.grad) for p in given if p.grad is not None]
    if mpu is None:
        total = nn.utils.get_total_norm([gradient for _, gradient in gradients], norm_type)
    else:
        total = _norm_over_parts(gradients, float(norm_type), Ranks.of(model_group_of(mpu)))
    if dist.is_initialized():
        ranks = Ranks.of(get_data_parallel_group())
        total = total.to(current_device(), torch.float32) / ranks.size
        sum_(total, ranks, "the mean norm of gradients over ranks")
    nn.utils.clip_grads_with_norm_(given, max_norm, total)
    return total


def get_weight_norm(parameters: Any, norm_type: float = 2, mpu: Any = None) -> float:
    """Return the norm of parameters; with `mpu`, over all parts of the model.

    All ranks that hold the parts must call it.
    """
    given: list[Any] = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    if mpu is None:
        return float(nn.utils.get_total_norm([p.detach() for p in given], norm_type))
    weights = [(p, p.detach()) for p in given]
    return float(_norm_over_parts(weights, float(norm_type), Ranks.of(model_group_of(mpu))))


def _norm_over_parts(
    values: Sequence[tuple[Any, Tensor]], norm_type: float, ranks: Ranks
) -> Tensor:
    """Return the norm of values of parameters over the parts of a model."""
    counted = [value for p, value in values if ranks.rank == 0 or is_model_part(p)]
    norm = nn.utils.get_total_norm(counted, norm_type)
    total = norm.to(current_device(), widest_float(current_device()))
    if math.isinf(norm_type):
        max_(total, ranks, "the norm of gradients over the model's parts")
        return total.float()
    total = total**norm_type
    sum_(total, ranks, "the norm of gradients over the model's parts")
    return (total ** (1 / norm_type)).float()


def get_global_norm(norm_list: Sequence[float]) -> float:
    """Return the L2 norm of values with these L2 norms."""
    return math.sqrt(sum(norm**2 for norm in norm_list))


def bwc_tensor_model_parallel_rank(mpu: Any = None) -> int:
    """Return this rank's index among a model's parts, by any of its names; 0 without an mpu."""
    return int(
        _from_mpu(mpu, "tensor_model_parallel_rank slice_parallel_rank model_parallel_rank", 0)
    )


def bwc_pipeline_parallel_world_size(mpu: Any = None) -> int:
    """Return the number of pipeline stages according to the mpu; 1 without."""
    return int(_from_mpu(mpu, "pipeline_model_parallel_world_size pipe_parallel_world_size", 1))


def bwc_pipeline_parallel_group(mpu: Any = None) -> Any:
    """Return the ranks of these stages; None without an mpu."""
    return _from_mpu(mpu, "pipeline_model_parallel_group pipe_parallel_group", None)


def _from_mpu(mpu: Any, names: str, otherwise: Any) -> Any:
    for name in names.split():
        if hasattr(mpu, f"get_{name}"):
            return getattr(mpu, f"get_{name}")()
    return otherwise


class ActivationFuncType(IntEnum):
    """Activation functions by number."""

    UNKNOWN = 0
    GELU = 1
    ReLU = 2
    GATED_GELU = 3
    GATED_SILU = 4


class NormType(IntEnum):
    """Norms by number."""

    UNKNOWN = 0
    LayerNorm = 1
    GroupNorm = 2
    RMSNorm = 3


class SparseTensor:
    """The rows of a matrix that are not zero, from a sparse gradient of an embedding.

    Args:
        dense_tensor: a sparse tensor of torch, or a dense one.
    """

    def __init__(self, dense_tensor: Tensor | None = None) -> None:
        self.orig_dense_tensor = dense_tensor
        self.indices: Any = None
        self.values: Any = None
        self.dense_size: list[int] = []
        if dense_tensor is None:
            return
        rows = (dense_tensor if dense_tensor.is_sparse else dense_tensor.to_sparse(1)).coalesce()
        self.is_sparse, self.dtype = dense_tensor.is_sparse, rows.dtype
        self.indices, self.values = rows.indices().flatten(), rows.values()
        self.dense_size = list(rows.shape)

    def to_coo_tensor(self) -> Tensor:
        """Return the sparse tensor of torch; rows that occur twice are added."""
        where, size = self.indices[None], self.dense_size
        return torch.sparse_coo_tensor(where, self.values, size, check_invariants=True)

    def to_dense(self) -> Tensor:
        """Return the matrix."""
        return self.to_coo_tensor().to_dense()

    @staticmethod
    def type() -> str:
        """Return the name that DeepSpeed gives it."""
        return "deepspeed.SparseTensor"

    def sparse_size(self) -> tuple[int, int]:
        """Return the numbers of elements that are stored, and of the matrix."""
        return self.indices.numel() + self.values.numel(), math.prod(self.dense_size)

    def add(self, b: SparseTensor) -> None:
        """Add the rows of another tensor of the same size.

        Raises:
            UsageError: it has another size.
        """
        if self.dense_size != b.dense_size:
            raise UsageError(f"rows of {b.dense_size} cannot be added to {self.dense_size}")
        self.indices = torch.cat([self.indices, b.indices])
        self.values = torch.cat([self.values, b.values])


class CheckOverflow:
    """Looks for gradients that are not finite, in parameters that no engine trains.

    Args:
        param_groups: the groups that `check` looks at.
        mpu: gives the ranks that hold the parts of the model.
    """

    def __init__(
        self,
        param_groups: Sequence[Any] | None = None,
        mpu: Any = None,
        zero_reduce_scatter: bool = False,
        deepspeed: Any = None,
    ) -> None:
        self.mpu = mpu
        self.params = [p for group in param_groups or () for p in _parameters_of(group)]

    def check(self, param_groups: Sequence[Any] | None = None) -> bool:
        """Return whether a gradient is not finite on any rank. All ranks must call it."""
        groups = param_groups or ()
        return self.has_overflow([p for group in groups for p in group] or self.params)

    def has_overflow(self, params: Sequence[Any], has_moe_params: bool | None = None) -> bool:
        """Return whether one of their gradients is not finite on any rank."""
        found = torch.tensor(float(self.has_overflow_serial(params)), device=current_device())
        if dist.is_initialized():
            group = None if self.mpu is None else model_group_of(self.mpu)
            max_(found, Ranks.world() if group is None else Ranks.of(group), "overflows")
        return bool(found)

    @staticmethod
    def has_overflow_serial(params: Sequence[Any]) -> bool:
        """Return whether one of their gradients is not finite here."""
        return any(p.grad is not None and not p.grad.isfinite().all() for p in params)


def _parameters_of(group: Any) -> Sequence[Any]:
    found: Sequence[Any] = group["params"] if isinstance(group, Mapping) else group
    return found


GATED_ACTIVATION_TYPES = [ActivationFuncType.GATED_GELU, ActivationFuncType.GATED_SILU]


class PartitionedTensor:
    """A tensor of which each rank of a group keeps an even slice of the elements.

    Args:
        tensor: the whole tensor, the same on all ranks.
        group: the ranks.
    """

    def __init__(self, tensor: Tensor, group: Any, partition_meta: Any = None) -> None:
        self._ranks = Ranks.of(group)
        self.group, self.num_parts, self.rank = group, self._ranks.size, self._ranks.rank
        self.orig_size, self.orig_device = list(tensor.shape), tensor.device
        self.partition = partition_uniform(tensor.numel(), self.num_parts)
        start, stop = self.partition[self.rank : self.rank + 2]
        self.local_data = tensor.detach().reshape(-1)[start:stop].clone()

    @classmethod
    def from_meta(
        cls, meta: Tensor, local_part: Tensor, group: Any, device: Any = None
    ) -> PartitionedTensor:
        """Return the tensor that `to_meta` describes, from this rank's slice."""
        dims, *rest = meta.tolist()
        size, (parts, rank, *partition) = rest[:dims], rest[dims:]
        made = cls(local_part.new_empty(0), group)
        if (parts, rank) != (made.num_parts, made.rank):
            raise UsageError(
                f"from_meta: the tensor is in {parts} slices and this one is number {rank}, but the"
                f" group has {made.num_parts} ranks and this one is {made.rank}; pass the group"
                " that it was made with"
            )
        made.orig_size, made.partition = size, partition
        made.orig_device = local_part.device if device is None else torch.device(device)
        made.local_data = local_part.detach()
        return made

    def to_meta(self) -> Tensor:
        """Return the shape and the slices as integers, for `from_meta` on this rank."""
        place = [self.num_parts, self.rank, *self.partition]
        return torch.tensor([len(self.orig_size), *self.orig_size, *place], device=self.orig_device)

    def full(self, device: Any = None) -> Tensor:
        """Return the whole tensor. All ranks of the group must call it."""
        sizes = [stop - start for start, stop in pairwise(self.partition)]
        whole = gathered(self.local_data, 0, sizes, self._ranks, "the slices of a tensor")
        return whole.view(self.orig_size).to(self.orig_device if device is None else device)

    def data(self) -> Tensor:
        """Return this rank's slice."""
        return self.local_data

    def local_size(self) -> torch.Size:
        """Return the shape of this rank's slice."""
        return self.local_data.shape

    def full_size(self) -> list[int]:
        """Return the shape of the whole tensor."""
        return self.orig_size


def get_only_unique_item(items: Sequence[Any]) -> Any:
    """Return the one value that all items have.

    Raises:
        RuntimeError: they differ, or there are none.
    """
    different = set(items)
    if len(different) != 1:
        raise RuntimeError(f"expected equal items, found {sorted(different)}")
    return different.pop()


def noop_decorator(func: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function unchanged."""
    return func


def ensure_directory_exists(filename: str) -> None:
    """Create the parent directory of a file."""
    Path(filename).parent.mkdir(parents=True, exist_ok=True)


def empty_cache() -> None:
    """Release the device's cached memory."""
    get_accelerator().empty_cache()


def get_val_by_key(d: Mapping[str, Any], k: str) -> Any:
    """Return the value of a key at any depth of a configuration; None if it has none."""
    if k in d:
        return d[k]
    found = (get_val_by_key(below, k) for below in d.values() if isinstance(below, Mapping))
    return next((value for value in found if value is not None), None)


set_random_seed = seed_all


def set_val_by_key(d: dict[str, Any], k: str, vv: Any) -> None:
    """Set a key wherever a configuration has it, at any depth."""
    if k in d:
        d[k] = vv
    for below in d.values():
        if isinstance(below, dict):
            set_val_by_key(below, k, vv)


def call_to_str(base: str, *args: Any, **kwargs: Any) -> str:
    """Format a call: `f(1, x=2)`."""
    given = [repr(value) for value in args]
    given += [f"{name}={value!r}" for name, value in kwargs.items()]
    return f"{base}({', '.join(given)})"


def parse_range_list(range_str: str) -> list[int]:
    """Return the numbers of an ascending list of ranges: `0,2-4` is 0, 2, 3, 4.

    Raises:
        ValueError: the text is not such a list.
    """
    numbers: list[int] = []
    for part in range_str.split(","):
        first, _, last = part.partition("-")
        start, stop = int(first), int(last or first)
        if stop < start or (numbers and start <= numbers[-1]):
            raise ValueError(f"{part.strip()!r} in {range_str!r} is not ascending; sort the ranges")
        numbers += range(start, stop + 1)
    return numbers


# ---- backward ------------------------------------------------------------------------------------


def count_used_parameters_in_backward(parameters: Iterable[Tensor]) -> int:
    """Return how many of these parameters the running backward gives a gradient.

    Raises:
        UsageError: no backward is running.
    """
    if not is_in_backward():
        raise UsageError(
            "count_used_parameters_in_backward() counts those of a running backward; call it in a"
            " hook of a gradient"
        )
    trained = {one for one in parameters if isinstance(one, Tensor) and one.requires_grad}
    return sum(map(will_collect, trained))


def register_output_backward_hooks(
    outputs: Any,
    preprocess_once_fn: Callable[[], Any],
    preprocess_per_tensor_fn: Callable[[Tensor], Tensor] | None = None,
) -> None:
    """Call one function when backward reaches the first of nested outputs, one for each gradient.

    The second returns the gradient that replaces its argument.
    """
    waits = [True]

    def arrived(gradient: Tensor) -> Tensor | None:
        if waits:
            waits.clear()
            preprocess_once_fn()
        return preprocess_per_tensor_fn(gradient) if preprocess_per_tensor_fn else None

    def watch(tensor: Tensor) -> Tensor:
        if tensor.grad_fn is not None:
            tensor.register_hook(arrived)
        return tensor

    _mapped(outputs, watch)


def prime_factors(number: int) -> list[int]:
    """Return the primes whose product is a number, in ascending order.

    Raises:
        ValueError: it is not positive.
    """
    if number < 1:
        raise ValueError(f"{number} has no prime factors; expected a positive number")
    least = next((one for one in range(2, isqrt(number) + 1) if number % one == 0), number)
    return [] if number == 1 else [least, *prime_factors(number // least)]
