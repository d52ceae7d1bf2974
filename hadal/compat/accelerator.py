"""`get_accelerator()`: the current device with the methods that programs call."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from hadal.comm.start import get_local_world_size, obey_chosen_device
from hadal.compat.builders import builder_of
from hadal.compat.log import logger
from hadal.device import (
    accelerator_kind,
    collective_backend,
    current_device,
    memory_use,
    random_state,
    reset_peak_memory,
    set_random_state,
    synchronize,
    total_memory,
    widest_float,
)
from hadal.errors import UsageError
from hadal.units import shown_binary

# The variable that restricts which devices a process sees, per vendor.
_VISIBLE = {
    "cuda": ["CUDA_VISIBLE_DEVICES"],
    "xpu": ["ZE_AFFINITY_MASK"],
    "npu": ["ASCEND_RT_VISIBLE_DEVICES"],
}
# Prefixes of the variables that launchers pass on to other hosts.
_HANDED_ON = {"cuda": ["NCCL"], "xpu": ["CCL", "ZE"], "npu": ["ASCEND", "HCCL"]}


class Accelerator:
    """The device that this process computes on."""

    # ---- the device ------------------------------------------------------------------------------

    @property
    def _name(self) -> str:
        """The kind of device, for programs that distinguish kinds."""
        return current_device().type

    def is_available(self) -> bool:
        """Return whether the device can be used; a CPU always can."""
        return True

    def device_name(self, device_index: int | str | None = None) -> str:
        """Return the kind of device or, with an index, the name of one device of that kind."""
        kind = current_device().type
        return kind if device_index is None or kind == "cpu" else f"{kind}:{device_index}"

    def current_device(self) -> int:
        """Return the index of this process's device; 0 on a CPU."""
        return current_device().index or 0

    def current_device_name(self) -> str:
        """Return the name of this process's device: `cuda:0`, `cpu`."""
        return str(current_device())

    def device(self, device_index: int | None = None) -> torch.device:
        """Return a device of this kind; by default this process's own."""
        return (
            current_device()
            if device_index is None
            else torch.device(self.device_name(device_index))
        )

    def set_device(self, device_index: int) -> None:
        """Select this process's device."""
        if self._is_there():
            torch.accelerator.set_device_index(device_index)

    def device_count(self) -> int:
        """Return the number of devices; the CPUs of a host count as one for each of its ranks."""
        if self._is_there():
            return torch.accelerator.device_count()
        return get_local_world_size() or 1

    def on_accelerator(self, tensor: Tensor) -> bool:
        """Return whether a tensor is on a device of this kind."""
        return tensor.device.type == current_device().type

    def communication_backend_name(self) -> str:
        """Return the process-group backend for tensors on this device."""
        return collective_backend().rpartition(":")[2]

    # ---- capabilities ----------------------------------------------------------------------------

    def supported_dtypes(self) -> list[torch.dtype]:
        """Return the dtypes in which models can be trained."""
        dtypes = [torch.float32]
        dtypes += [torch.half] if self.is_fp16_supported() else []
        return dtypes + ([torch.bfloat16] if self.is_bf16_supported() else [])

    def is_bf16_supported(self) -> bool:
        """Return whether the device computes in bf16; every CPU does."""
        asked = getattr(self._module(), "is_bf16_supported", None)
        return True if asked is None else bool(asked())

    def is_fp16_supported(self) -> bool:
        """Return whether the device computes in fp16; every device of torch 2.11 does."""
        return True

    def is_fp64_supported(self) -> bool:
        """Return whether the device computes in fp64; some of Intel's do not."""
        return widest_float(current_device()) == torch.float64

    def is_triton_supported(self) -> bool:
        """Return whether triton kernels run: not on a CPU, and only if triton is installed."""
        return self._is_there() and importlib.util.find_spec("triton") is not None

    def get_compile_backend(self) -> str:
        """Return the default backend of `engine.compile`."""
        return "inductor"

    FloatTensor = property(lambda self: self._maker("FloatTensor", torch.float32))
    """The constructor of fp32 tensors on this device."""
    HalfTensor = property(lambda self: self._maker("HalfTensor", torch.float16))
    """The constructor of fp16 tensors on this device."""
    BFloat16Tensor = property(lambda self: self._maker("BFloat16Tensor", torch.bfloat16))
    """The constructor of bf16 tensors on this device."""
    DoubleTensor = property(lambda self: self._maker("DoubleTensor", torch.float64))
    """The constructor of fp64 tensors on this device."""
    IntTensor = property(lambda self: self._maker("IntTensor", torch.int32))
    """The constructor of int32 tensors on this device."""
    LongTensor = property(lambda self: self._maker("LongTensor", torch.int64))
    """The constructor of int64 tensors on this device."""
    ByteTensor = property(lambda self: self._maker("ByteTensor", torch.uint8))
    """The constructor of uint8 tensors on this device."""

    def _maker(self, name: str, dtype: torch.dtype) -> Any:
        """Return torch's class of that name, or an equivalent function if the device has none."""
        home = self._module() if self._is_there() else torch
        made = partial(torch.tensor, dtype=dtype, device=current_device())
        return getattr(home, name, made)

    # ---- streams and events ----------------------------------------------------------------------

    def synchronize(self, device_index: int | None = None) -> None:
        """Wait for all work queued on a device."""
        synchronize(self.device(device_index))

    def is_synchronized_device(self) -> bool:
        """Return whether calls return only when their work is done, as on a CPU."""
        return not self._is_there()

    # For devices with queued work; programs do not use them on a CPU.
    use_host_timers = resolves_data_dependency = is_synchronized_device
    handles_memory_backpressure = is_synchronized_device

    Stream = property(lambda self: getattr(self._module(), "Stream", None))
    """The stream class; None on a CPU."""
    Event = property(lambda self: getattr(self._module(), "Event", None))
    """The event class; None on a CPU."""

    def stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Return a context that queues work on a stream; it does nothing on a CPU."""
        module = self._module()
        context: AbstractContextManager[Any]
        context = nullcontext() if module is None else module.stream(stream)
        return context

    def current_stream(self, device_index: int | None = None) -> Any:
        """Return the current stream; None on a CPU."""
        if not self._is_there():
            return None
        found = getattr(self._module(), "current_stream", torch.accelerator.current_stream)
        return found(self.device(device_index))

    def default_stream(self, device_index: int | None = None) -> Any:
        """Return the default stream; None if the device has none, as a CPU."""
        found = getattr(self._module(), "default_stream", None)
        return None if found is None else found(self.device(device_index))

    def range_push(self, msg: str, domain: Any = None, category: Any = None) -> None:
        """Begin a named range in the device's profiler; does nothing on a CPU."""
        tool = getattr(self._module(), "nvtx", None)
        if tool is not None:
            tool.range_push(msg)

    def range_pop(self, domain: Any = None) -> None:
        """End the range."""
        tool = getattr(self._module(), "nvtx", None)
        if tool is not None:
            tool.range_pop()

    # ---- random numbers --------------------------------------------------------------------------

    def random(self) -> ModuleType:
        """Return torch's module for the host's generator."""
        return torch.random

    def manual_seed(self, seed: int) -> None:
        """Seed this process's device; on a CPU, the host's generator."""
        (self._module() or torch).manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        """Seed all devices; on a CPU, the host's generator."""
        module = self._module()
        if module is None:
            torch.manual_seed(seed)
        else:
            module.manual_seed_all(seed)

    def initial_seed(self) -> int:
        """Return the seed of the device's generator."""
        return int(getattr(self._module(), "initial_seed", torch.initial_seed)())

    def default_generator(self, device_index: int) -> torch.Generator:
        """Return a device's generator; on a CPU, the host's."""
        found = getattr(self._module(), "default_generators", None)
        generator: torch.Generator
        generator = torch.default_generator if found is None else found[device_index]
        return generator

    def get_rng_state(self, device_index: int | None = None) -> Tensor:
        """Return the state of the device's generator."""
        state = random_state(self.device(device_index))
        return torch.get_rng_state() if state is None else state

    def set_rng_state(self, new_state: Tensor, device_index: int | None = None) -> None:
        """Restore the state of the device's generator."""
        if self._is_there():
            set_random_state(new_state, self.device(device_index))
        else:
            torch.set_rng_state(new_state)

    # ---- memory ----------------------------------------------------------------------------------

    def empty_cache(self) -> None:
        """Release cached memory that nothing uses."""
        if self._is_there():
            torch.accelerator.empty_cache()

    def memory_allocated(self, device_index: int | None = None) -> int:
        """Return the bytes that torch's tensors take on a device; on a CPU, this process's."""
        used = memory_use(self.device(device_index))
        return used.device if self._is_there() else used.host

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        """Return the peak of `memory_allocated`; on a CPU, its current value."""
        used = memory_use(self.device(device_index))
        return used.device_peak if self._is_there() else used.host

    def memory_reserved(self, device_index: int | None = None) -> int:
        """Return the bytes that torch's allocator holds; on a CPU, this process's."""
        if not self._is_there():
            return self.memory_allocated()
        return int(torch.accelerator.memory_reserved(self.device(device_index)))

    def max_memory_reserved(self, device_index: int | None = None) -> int:
        """Return the peak of `memory_reserved`; on a CPU, its current value."""
        if not self._is_there():
            return self.memory_allocated()
        return int(torch.accelerator.max_memory_reserved(self.device(device_index)))

    # The same under older names.
    memory_cached, max_memory_cached = memory_reserved, max_memory_reserved

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        """Reset the peak; a CPU has none."""
        reset_peak_memory(self.device(device_index))

    reset_max_memory_allocated = reset_max_memory_cached = reset_peak_memory_stats

    def memory_stats(self, device_index: int | None = None) -> dict[str, Any]:
        """Return the allocator's statistics; empty on a CPU."""
        if not self._is_there():
            return {}
        stats: dict[str, Any] = torch.accelerator.memory_stats(self.device(device_index))
        return stats

    def total_memory(self, device_index: int | None = None) -> int:
        """Return the bytes of the device's memory; on a CPU, the host's."""
        return total_memory(self.device(device_index)).total

    def available_memory(self, device_index: int | None = None) -> int:
        """Return the free bytes of the device's memory."""
        return total_memory(self.device(device_index)).free

    def pin_memory(
        self, tensor: Tensor, make_copy: bool = True, match_shape: bool = True, align_bytes: int = 1
    ) -> Tensor:
        """Return a pinned copy of a tensor; on a CPU, the tensor itself.

        torch chooses shape, strides and alignment itself; the other arguments are ignored.
        """
        if not self._is_there():
            return tensor
        track_pinned_memory(tensor.nbytes)
        return tensor.pin_memory()

    def is_pinned(self, tensor: Tensor) -> bool:
        """Return whether a tensor is pinned; on a CPU always True."""
        return tensor.is_pinned() if self._is_there() else True

    # ---- launchers and builders ------------------------------------------------------------------

    def export_envs(self) -> list[str]:
        """Return the prefixes of variables that belong to the device's software."""
        return _HANDED_ON.get(current_device().type, [])

    def visible_devices_envs(self) -> list[str]:
        """Return the variables that restrict which devices a process sees."""
        return _VISIBLE.get(current_device().type, [])

    def set_visible_devices_envs(
        self, current_env: dict[str, str], local_accelerator_ids: Sequence[int]
    ) -> None:
        """Set the variables of a process so that it sees only these devices."""
        visible = ",".join(map(str, local_accelerator_ids))
        current_env.update(dict.fromkeys(self.visible_devices_envs(), visible))

    def lazy_call(self, callback: Callable[[], Any]) -> None:
        """Call a function once the device is initialized, which it already is."""
        callback()

    def get_op_builder(self, class_name: str) -> Any:
        """Return the class of this name in `deepspeed.ops.op_builder`, or None."""
        return builder_of(class_name)

    def create_op_builder(self, class_name: str) -> Any:
        """Return an instance of that class."""
        found = builder_of(class_name)
        return None if found is None else found()

    def _is_there(self) -> bool:
        return accelerator_kind() is not None

    def _module(self) -> ModuleType | None:
        kind = accelerator_kind()
        return None if kind is None else torch.get_device_module(kind)


@cache
def _present() -> Accelerator:
    return Accelerator()


def get_accelerator() -> Accelerator:
    """Return the one accelerator object; DS_ACCELERATOR can make it the CPU."""
    obey_chosen_device()
    return _present()


def set_accelerator(accel_obj: object) -> None:
    """Accept the object that `get_accelerator` returned; another one cannot replace it.

    Raises:
        UsageError: it is another object.
    """
    if accel_obj is not _present():
        raise UsageError(
            f"set_accelerator got a {type(accel_obj).__name__}: the device is always torch's own"
            " (torch.accelerator); add another kind of device through torch's PrivateUse1"
        )


def is_current_accelerator_supported() -> bool:
    """Return whether Hadal supports the device: all of torch.accelerator's are."""
    return True


class _Kind(type):
    """A class of accelerators by name: `get_accelerator()` is one of the device's kind."""

    kind: str

    def __instancecheck__(cls, thing: Any) -> bool:
        """Return whether an accelerator is of this kind."""
        return isinstance(thing, Accelerator) and thing.device_name() == cls.kind

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """Return the accelerator, which must be of this kind.

        Raises:
            UsageError: it is of another.
        """
        if not isinstance(get_accelerator(), cls):
            raise UsageError(
                f"{cls.__name__}() was called, but the device is {get_accelerator().device_name()};"
                " use get_accelerator(), and DS_ACCELERATOR=cpu to choose the CPU"
            )
        return get_accelerator()


for _kind in ("cpu", "cuda", "mps", "npu", "xpu"):
    _name = f"{_kind.upper()}_Accelerator"
    _doc = f"The accelerator of a job on devices of torch's kind {_kind!r}."
    _contents = {"__module__": __name__, "__doc__": _doc, "kind": _kind}
    globals()[_name] = _Kind(_name, (), _contents)


# ---- the memory that programs pin ----------------------------------------------------------------

_FIRST_MARK = 32 * 2**30


class PinnedMemory:
    """The count of pinned memory, which is logged each time that it has doubled."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Begin again."""
        self._bytes, self._calls, self._next_checkpoint = 0, 0, _FIRST_MARK

    def track(self, num_bytes: int) -> None:
        """Count memory that `pin_memory` of an accelerator, or the program itself, has pinned."""
        self._calls += 1
        self._bytes += num_bytes
        while self._bytes >= self._next_checkpoint:
            self.log_summary(f"reached {shown_binary(self._next_checkpoint)}")
            self._next_checkpoint *= 2

    def log_summary(self, tag: str = "") -> None:
        """Log the count."""
        amount = shown_binary(self._bytes)
        logger.info(f"pinned memory {tag}: {amount} by {self._calls} calls of pin_memory")


pinned = PinnedMemory()
track_pinned_memory, pinned_memory_summary = pinned.track, pinned.log_summary
