"""Selection of the device that this process computes on, its threads and its random state."""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Callable
from functools import cache

import torch
import torch.distributed
from torch import Tensor

from hadal.errors import UsageError

_log = logging.getLogger(__name__)

# A mode of CUDA's and HIP's StreamCaptureMode: only captures of the thread itself restrict it.
_THREAD_LOCAL = 1
# The kind of device that the user has chosen, if any.
_chosen: list[str] = []


def accelerator_kind() -> str | None:
    """Return the kind of the accelerator in use: `cuda`, `xpu`, ...; None on CPUs."""
    if _chosen[-1:] == ["cpu"] or not torch.accelerator.is_available():
        return None
    found = torch.accelerator.current_accelerator()
    assert found is not None  # an available accelerator has a kind
    return found.type


def choose_kind(kind: str) -> None:
    """Choose the kind of device: "cpu" despite an accelerator, or the accelerator's kind.

    Raises:
        UsageError: torch finds no accelerator of this kind.
    """
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    there = ["cpu"] if found is None else ["cpu", found.type]
    if kind not in there:
        raise UsageError(
            f"the chosen device is {kind!r}, but torch finds {' and '.join(there)} here; choose one"
            f" of these, or install the torch build for {kind}"
        )
    _chosen[:] = [kind]


def current_device() -> torch.device:
    """Return the device of this process's tensors."""
    kind = accelerator_kind()
    if kind is None:
        return torch.device("cpu")
    return torch.device(kind, torch.accelerator.current_device_index())


def rank_device(local_rank: int) -> torch.device:
    """Make accelerator number `local_rank` of this host the current one, and return it.

    If there are fewer accelerators than local ranks, the ranks share them, round robin.
    """
    if accelerator_kind() is not None:
        torch.accelerator.set_device_index(local_rank % torch.accelerator.device_count())
    return current_device()


def device_thread(
    target: Callable[..., object], *args: object, name: str, daemon: bool
) -> threading.Thread:
    """Return a thread, not yet started, that computes on this thread's device.

    Another thread's first use of an accelerator would otherwise be of number 0, where it would
    occupy memory for each rank of the host. While the program captures a graph, the thread may ask
    for events.
    """
    kind = accelerator_kind()
    if kind is None:
        return threading.Thread(target=target, args=args, name=name, daemon=daemon)
    index = torch.accelerator.current_device_index()

    def run() -> None:
        torch.accelerator.set_device_index(index)
        if kind == "cuda":
            _ignore_captures_of_others()
        target(*args)

    return threading.Thread(target=run, name=name, daemon=daemon)


def _ignore_captures_of_others() -> None:
    """Exempt this thread from the rule that a graph capture imposes on all threads.

    By default (cudaStreamCaptureModeGlobal), a query of an event by any thread is an error that
    also ends the capture. torch exempts its own threads in the same way.
    """
    is_amd = torch.version.hip is not None
    mode = ctypes.c_int(_THREAD_LOCAL)
    try:
        # Both are loaded already.
        driver = ctypes.CDLL("libamdhip64.so" if is_amd else "libcuda.so.1")
        name = (
            "hipThreadExchangeStreamCaptureMode" if is_amd else "cuThreadExchangeStreamCaptureMode"
        )
        code = getattr(driver, name)(ctypes.byref(mode))
    except (OSError, AttributeError) as error:
        code = error
    if code:
        _log.warning(
            "this thread cannot be exempted from graph captures (%s): it may end a capture of the"
            ' program unless that has capture_error_mode="thread_local"',
            code,
        )


def collective_backend() -> str:
    """Return the process-group backend for the current device: its own, or gloo on a CPU."""
    kind = current_device().type
    if kind == "cpu":
        return "gloo"
    own = torch.distributed.get_default_backend_for_device(kind)
    # Ranks also exchange host tensors, which only gloo supports.
    return f"cpu:gloo,{kind}:{own}"


def device_identity(device: torch.device) -> str:
    """Return a name for an accelerator that is the same in all processes of its host, or "".

    An index is not, because each process may see different devices (CUDA_VISIBLE_DEVICES).
    """
    if device.type == "cpu":
        return ""
    properties = torch.get_device_module(device).get_device_properties(device)
    return str(getattr(properties, "uuid", ""))


@cache
def widest_float(device: torch.device) -> torch.dtype:
    """Return the dtype for long sums on a device: float64, or float32 if it lacks float64.

    Apple's GPUs and some of Intel's lack it; Ascend's NPUs support few operations in it.
    """
    try:
        torch.ones(2, dtype=torch.float64, device=device).sqrt().sum().item()
    except (RuntimeError, TypeError):
        return torch.float32
    return torch.float64


@cache
def emulates(dtype: torch.dtype, device: torch.device) -> bool:
    """Return True if a device has no instructions that multiply matrices of a 16-bit dtype.

    CPUs without AVX-512 have none for bfloat16, and most CPUs none for float16: a product takes ten
    times as long as in float32, or more.
    """
    if device.type != "cpu" or dtype not in (torch.bfloat16, torch.float16):
        return False
    name = "bf16" if dtype is torch.bfloat16 else "fp16"
    is_supported = getattr(torch.ops.mkldnn, f"_is_mkldnn_{name}_supported", None)
    return is_supported is not None and not is_supported()


def random_state(device: torch.device) -> Tensor | None:
    """Return the state of the device's default generator (uint8, on the host); None on a CPU."""
    if device.type == "cpu":
        return None
    state: Tensor = torch.get_device_module(device).get_rng_state(device)
    return state


def set_random_state(state: Tensor, device: torch.device) -> None:
    """Set the state of the device's default generator; do nothing on a CPU."""
    if device.type != "cpu":
        torch.get_device_module(device).set_rng_state(state, device)
