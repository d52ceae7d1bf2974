"""`torch.npu`: what programs call of an accelerator's module, by torch's general functions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

Event = torch.Event
_initialized = True  # asked by torch.utils.checkpoint
native: Any = None  # set by `npu.join`


class Stream(torch.Stream):
    """A queue of work; by default of the current device."""

    def __new__(cls, device: Any = None, priority: int = 0) -> Stream:
        return super().__new__(cls, device=_device(device), priority=priority)


def _device(device: Any = None) -> torch.device:
    if isinstance(device, torch.device | str):
        device = torch.device(device).index
    return torch.device("npu", current_device() if device is None else device)


def __getattr__(name: str) -> Any:
    if name == "default_generators":
        return tuple(_generator(index) for index in range(device_count()))
    raise AttributeError(name)


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def _is_in_bad_fork() -> bool:
    return False


def _lazy_init() -> None:
    pass


def device_count() -> int:
    return 2


def current_device() -> int:
    return torch.accelerator.current_device_index()


def set_device(device: Any) -> None:
    torch.accelerator.set_device_index(_device(device))


@contextmanager
def device(device: Any) -> Iterator[None]:
    before = current_device()
    set_device(device)
    try:
        yield
    finally:
        set_device(before)


def get_device_name(device: Any = None) -> str:
    return "test device"


def get_device_properties(device: Any = None) -> SimpleNamespace:
    return SimpleNamespace(
        name=get_device_name(), total_memory=mem_get_info(device)[1], has_fp64=False
    )


def get_device_capability(device: Any = None) -> None:
    return None


def synchronize(device: Any = None) -> None:
    torch.accelerator.synchronize(_device(device))


def current_stream(device: Any = None) -> torch.Stream:
    return torch.accelerator.current_stream(_device(device))


def default_stream(device: Any = None) -> torch.Stream:
    place = _device(device)
    return torch.Stream(stream_id=0, device_index=place.index, device_type=20)


def stream(stream: torch.Stream) -> AbstractContextManager[Any]:
    return stream


def set_stream(stream: torch.Stream) -> None:
    torch.accelerator.set_stream(stream)


def is_bf16_supported() -> bool:
    return True


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16, torch.float32]


# ---- random numbers ------------------------------------------------------------------------------


def _generator(device: Any) -> torch.Generator:
    found: torch.Generator = native.default_generator(_device(device).index)
    return found


def manual_seed(seed: int) -> None:
    _generator(None).manual_seed(int(seed))


def manual_seed_all(seed: int) -> None:
    for index in range(device_count()):
        _generator(index).manual_seed(int(seed))


def seed() -> int:
    return _generator(None).seed()


def initial_seed() -> int:
    return _generator(None).initial_seed()


def get_rng_state(device: Any = None) -> Tensor:
    return _generator(device).get_state()


def set_rng_state(new_state: Tensor, device: Any = None) -> None:
    _generator(device).set_state(new_state)


def get_rng_state_all() -> list[Tensor]:
    return [get_rng_state(index) for index in range(device_count())]


def set_rng_state_all(new_states: list[Tensor]) -> None:
    for index, state in enumerate(new_states):
        set_rng_state(state, index)


# ---- memory --------------------------------------------------------------------------------------


def mem_get_info(device: Any = None) -> tuple[int, int]:
    return torch.accelerator.get_memory_info(_device(device))


def memory_allocated(device: Any = None) -> int:
    return torch.accelerator.memory_allocated(_device(device))


def max_memory_allocated(device: Any = None) -> int:
    return torch.accelerator.max_memory_allocated(_device(device))


def memory_reserved(device: Any = None) -> int:
    return torch.accelerator.memory_reserved(_device(device))


def max_memory_reserved(device: Any = None) -> int:
    return torch.accelerator.max_memory_reserved(_device(device))


def memory_stats(device: Any = None) -> dict[str, Any]:
    return torch.accelerator.memory_stats(_device(device))


def reset_peak_memory_stats(device: Any = None) -> None:
    torch.accelerator.reset_peak_memory_stats(_device(device))


def empty_cache() -> None:
    torch.accelerator.empty_cache()
