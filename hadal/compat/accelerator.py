"""`get_accelerator()`: the present device under the methods that programs call."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from hadal.comm.start import obey_chosen_device
from hadal.compat.builders import builder_of
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

# By which variable each vendor's software is told which devices a process may see.
_VISIBLE = {
    "cuda": ["CUDA_VISIBLE_DEVICES"],
    "xpu": ["ZE_AFFINITY_MASK"],
    "npu": ["ASCEND_RT_VISIBLE_DEVICES"],
}
# How the variables begin that launchers hand on to other hosts for it.
_HANDED_ON = {"cuda": ["NCCL"], "xpu": ["CCL", "ZE"], "npu": ["ASCEND", "HCCL"]}


class Accelerator:
    """The device that this process computes on."""

    # ---- which one -------------------------------------------------------------------------------

    @property
    def _name(self) -> str:
        """Its kind, as programs ask for it that tell one kind from another."""
        return current_device().type

    def is_available(self) -> bool:
        """Whether it can be used; a CPU can."""
        return True

    def device_name(self, device_index: int | str | None = None) -> str:
        """Its kind, or with an index the name of one device of that kind."""
        kind = current_device().type
        return kind if device_index is None or kind == "cpu" else f"{kind}:{device_index}"

    def current_device(self) -> int:
        """The number of this process's device; 0 on a CPU."""
        return current_device().index or 0

    def current_device_name(self) -> str:
        """The name of this process's device: `cuda:0`, `cpu`."""
        return str(current_device())

    def device(self, device_index: int | None = None) -> torch.device:
        """A device of this kind; by default this process's own."""
        return (
            current_device()
            if device_index is None
            else torch.device(self.device_name(device_index))
        )

    def set_device(self, device_index: int) -> None:
        """Choose this process's device."""
        if self._is_there():
            torch.accelerator.set_device_index(device_index)

    def device_count(self) -> int:
        """How many devices there are; the CPUs of a host are one."""
        return torch.accelerator.device_count() if self._is_there() else 1

    def on_accelerator(self, tensor: Tensor) -> bool:
        """Whether a tensor is on a device of this kind."""
        return tensor.device.type == current_device().type

    def communication_backend_name(self) -> str:
        """The process-group backend for tensors on this device."""
        return collective_backend().rpartition(":")[2]

    # ---- what it can -----------------------------------------------------------------------------

    def supported_dtypes(self) -> list[torch.dtype]:
        """The dtypes that models may be trained in."""
        dtypes = [torch.float32]
        dtypes += [torch.half] if self.is_fp16_supported() else []
        return dtypes + ([torch.bfloat16] if self.is_bf16_supported() else [])

    def is_bf16_supported(self) -> bool:
        """Whether it computes in bf16; every CPU does."""
        asked = getattr(self._module(), "is_bf16_supported", None)
        return True if asked is None else bool(asked())

    def is_fp16_supported(self) -> bool:
        """Whether it computes in fp16; everything that torch 2.11 runs on does."""
        return True

    def is_fp64_supported(self) -> bool:
        """Whether it computes in fp64; some of Intel's do not."""
        return widest_float(current_device()) == torch.float64

    def is_triton_supported(self) -> bool:
        """Whether triton's kernels run on it: it is no CPU, and triton is installed."""
        return self._is_there() and importlib.util.find_spec("triton") is not None

    def get_compile_backend(self) -> str:
        """What `engine.compile` takes by default."""
        return "inductor"

    @property
    def FloatTensor(self) -> Any:
        """What makes a tensor of fp32 here."""
        return self._maker("FloatTensor", torch.float32)

    @property
    def HalfTensor(self) -> Any:
        """What makes a tensor of fp16 here."""
        return self._maker("HalfTensor", torch.float16)

    @property
    def BFloat16Tensor(self) -> Any:
        """What makes a tensor of bf16 here."""
        return self._maker("BFloat16Tensor", torch.bfloat16)

    @property
    def DoubleTensor(self) -> Any:
        """What makes a tensor of fp64 here."""
        return self._maker("DoubleTensor", torch.float64)

    @property
    def IntTensor(self) -> Any:
        """What makes a tensor of int32 here."""
        return self._maker("IntTensor", torch.int32)

    @property
    def LongTensor(self) -> Any:
        """What makes a tensor of int64 here."""
        return self._maker("LongTensor", torch.int64)

    @property
    def ByteTensor(self) -> Any:
        """What makes a tensor of uint8 here."""
        return self._maker("ByteTensor", torch.uint8)

    def _maker(self, name: str, dtype: torch.dtype) -> Any:
        """torch's class of that name, or what makes the same where a device has no such class."""
        home = self._module() if self._is_there() else torch
        made = partial(torch.tensor, dtype=dtype, device=current_device())
        return getattr(home, name, made)

    # ---- work that is queued ---------------------------------------------------------------------

    def synchronize(self, device_index: int | None = None) -> None:
        """Wait for all work queued on a device."""
        synchronize(self.device(device_index))

    def is_synchronized_device(self) -> bool:
        """Whether calls return when their work is done, as on a CPU."""
        return not self._is_there()

    # Programs ask these of a device whose work is queued: none of them of a CPU.
    use_host_timers = resolves_data_dependency = is_synchronized_device
    handles_memory_backpressure = is_synchronized_device

    @property
    def Stream(self) -> Any:
        """The class of queues of work; None on a CPU, which has none."""
        return getattr(self._module(), "Stream", None)

    @property
    def Event(self) -> Any:
        """The class of marks in such a queue; None on a CPU."""
        return getattr(self._module(), "Event", None)

    def stream(self, stream: Any) -> AbstractContextManager[Any]:
        """A context in which work goes to a queue; on a CPU, one that does nothing."""
        module = self._module()
        context: AbstractContextManager[Any]
        context = nullcontext() if module is None else module.stream(stream)
        return context

    def current_stream(self, device_index: int | None = None) -> Any:
        """The queue in use; None on a CPU."""
        if not self._is_there():
            return None
        found = getattr(self._module(), "current_stream", torch.accelerator.current_stream)
        return found(self.device(device_index))

    def default_stream(self, device_index: int | None = None) -> Any:
        """The queue that a device begins with; None where it has none, as a CPU."""
        found = getattr(self._module(), "default_stream", None)
        return None if found is None else found(self.device(device_index))

    def range_push(self, msg: str, domain: Any = None, category: Any = None) -> None:
        """Begin a named stretch in the device's profiler; nothing on a CPU."""
        tool = getattr(self._module(), "nvtx", None)
        if tool is not None:
            tool.range_push(msg)

    def range_pop(self, domain: Any = None) -> None:
        """End it."""
        tool = getattr(self._module(), "nvtx", None)
        if tool is not None:
            tool.range_pop()

    # ---- random numbers --------------------------------------------------------------------------

    def random(self) -> ModuleType:
        """torch's module of the host's generator."""
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
        """The seed of the device's generator."""
        return int(getattr(self._module(), "initial_seed", torch.initial_seed)())

    def default_generator(self, device_index: int) -> torch.Generator:
        """A device's generator; on a CPU, the host's."""
        found = getattr(self._module(), "default_generators", None)
        generator: torch.Generator
        generator = torch.default_generator if found is None else found[device_index]
        return generator

    def get_rng_state(self, device_index: int | None = None) -> Tensor:
        """Where the device's generator stands."""
        state = random_state(self.device(device_index))
        return torch.get_rng_state() if state is None else state

    def set_rng_state(self, new_state: Tensor, device_index: int | None = None) -> None:
        """Let it go on from there."""
        if self._is_there():
            set_random_state(new_state, self.device(device_index))
        else:
            torch.set_rng_state(new_state)

    # ---- memory ----------------------------------------------------------------------------------

    def empty_cache(self) -> None:
        """Give back memory that nobody uses."""
        if self._is_there():
            torch.accelerator.empty_cache()

    def memory_allocated(self, device_index: int | None = None) -> int:
        """Bytes that torch's tensors hold on a device; on a CPU, those of this process."""
        used = memory_use(self.device(device_index))
        return used.device if self._is_there() else used.host

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        """The most that `memory_allocated` has been on an accelerator; on a CPU, what it is now."""
        used = memory_use(self.device(device_index))
        return used.device_peak if self._is_there() else used.host

    def memory_reserved(self, device_index: int | None = None) -> int:
        """Bytes that torch's allocator holds of a device; on a CPU, those of this process."""
        if not self._is_there():
            return self.memory_allocated()
        return int(torch.accelerator.memory_reserved(self.device(device_index)))

    def max_memory_reserved(self, device_index: int | None = None) -> int:
        """The most that `memory_reserved` has been; on a CPU, what it is now."""
        if not self._is_there():
            return self.memory_allocated()
        return int(torch.accelerator.max_memory_reserved(self.device(device_index)))

    # Their names in older releases.
    memory_cached, max_memory_cached = memory_reserved, max_memory_reserved

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        """Count the peak from here; a CPU has none."""
        reset_peak_memory(self.device(device_index))

    reset_max_memory_allocated = reset_max_memory_cached = reset_peak_memory_stats

    def memory_stats(self, device_index: int | None = None) -> dict[str, Any]:
        """torch's figures of the device's allocator; empty on a CPU."""
        if not self._is_there():
            return {}
        stats: dict[str, Any] = torch.accelerator.memory_stats(self.device(device_index))
        return stats

    def total_memory(self, device_index: int | None = None) -> int:
        """Bytes that the device has; on a CPU, the host's."""
        return total_memory(self.device(device_index)).total

    def available_memory(self, device_index: int | None = None) -> int:
        """Bytes of them that are free."""
        return total_memory(self.device(device_index)).free

    def pin_memory(
        self,
        tensor: Tensor,
        make_copy: bool = True,
        match_shape: bool = True,
        align_bytes: int = 1,
    ) -> Tensor:
        """A copy that the device reads without the host's help; on a CPU, the tensor itself.

        torch copies shape and values and aligns by itself, whatever the other arguments ask.
        """
        return tensor.pin_memory() if self._is_there() else tensor

    def is_pinned(self, tensor: Tensor) -> bool:
        """Whether a tensor is one; on a CPU nothing has to be."""
        return tensor.is_pinned() if self._is_there() else True

    # ---- launchers and builders ------------------------------------------------------------------

    def export_envs(self) -> list[str]:
        """How the variables begin that belong to the device's software."""
        return _HANDED_ON.get(current_device().type, [])

    def visible_devices_envs(self) -> list[str]:
        """Which variables say what devices a process may see."""
        return _VISIBLE.get(current_device().type, [])

    def set_visible_devices_envs(
        self, current_env: dict[str, str], local_accelerator_ids: Sequence[int]
    ) -> None:
        """Write into a process's variables that it may see these devices."""
        told = ",".join(map(str, local_accelerator_ids))
        current_env.update(dict.fromkeys(self.visible_devices_envs(), told))

    def lazy_call(self, callback: Callable[[], Any]) -> None:
        """Call something once the device is used, which it is by now."""
        callback()

    def get_op_builder(self, class_name: str) -> Any:
        """The class of this name in `deepspeed.ops.op_builder`; None where there is none."""
        return builder_of(class_name)

    def create_op_builder(self, class_name: str) -> Any:
        """An object of that class."""
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
    """The one object; DS_ACCELERATOR may say that it is the CPU."""
    obey_chosen_device()
    return _present()


def set_accelerator(accel_obj: object) -> None:
    """Take the object that `get_accelerator` returned; another one cannot stand in for it.

    Raises:
        UsageError: it is another one.
    """
    if accel_obj is not _present():
        raise UsageError(
            f"set_accelerator got a {type(accel_obj).__name__}: the device is torch's own here"
            " (torch.accelerator); a device of another kind comes in by torch's PrivateUse1"
        )


def is_current_accelerator_supported() -> bool:
    """Whether Hadal knows the device: all that torch.accelerator does."""
    return True
