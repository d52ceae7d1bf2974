"""`deepspeed.zero`: importing it adds the attributes of sharded parameters to all parameters."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hadal.compat.parameters import watch_parameters
from hadal.device import accelerator_kind
from hadal.zero import (
    GatheredParameters,
    Init,
    MiCS_Init,
    register_external_parameter,
    unregister_external_parameter,
)

__all__ = [
    "GatheredParameters",
    "Init",
    "MiCS_Init",
    "OnDevice",
    "register_external_parameter",
    "unregister_external_parameter",
    "unwrap_model_for_generation",
    "zero_wrapper_for_fp_tensor_constructor",
]

watch_parameters()


def zero_wrapper_for_fp_tensor_constructor(
    fn: Callable[..., Tensor], target_fp_dtype: torch.dtype, target_device: torch.device
) -> Callable[..., Tensor]:
    """Wrap a tensor constructor so that floating-point tensors have a given dtype and device.

    Programs replace this name while `Init` is entered. Nothing here calls it: `Init` leaves torch's
    functions unchanged, so that, for example, the positions of a rotary embedding keep their dtype.
    """

    def made(*args: object, **kwargs: object) -> Tensor:
        if kwargs.get("device") is None:
            kwargs["device"] = target_device
        tensor = fn(*args, **kwargs)
        return tensor.to(target_fp_dtype) if tensor.is_floating_point() else tensor

    return made


@contextmanager
def unwrap_model_for_generation(model: nn.Module) -> Iterator[nn.Module]:
    """Gather a model's weights inside the block, so that generation needs no gathers."""
    with GatheredParameters(model.parameters()):
        yield model


class LinearFunctionForZeroStage3:
    """A linear function in the form of an autograd function; torch's own keeps no weight copies."""

    @staticmethod
    def apply(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return `torch.nn.functional.linear` of the arguments."""
        return nn.functional.linear(input, weight, bias)


autocast_custom_fwd = partial(torch.amp.custom_fwd, device_type=accelerator_kind() or "cpu")
autocast_custom_bwd = partial(torch.amp.custom_bwd, device_type=accelerator_kind() or "cpu")


class ZeROOrderedDict(OrderedDict[str, Any]):
    """A module's parameters. Weights that are freed gather themselves when they are used."""

    def __init__(self, parent_module: nn.Module, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._parent_module, self._in_forward = parent_module, False

    def __reduce__(self) -> Any:
        found: tuple[Any, ...] = super().__reduce__()  # type: ignore[assignment]
        return found[0], (self._parent_module,), *found[2:]


def ensure_zero_ordered_dict(module: nn.Module) -> None:
    """Keep a module's parameters in such a dict, and the one before as `_original_parameters`."""
    own = getattr(module, "_parameters", None)
    if isinstance(own, dict) and not isinstance(own, ZeROOrderedDict):
        vars(module).setdefault("_original_parameters", own)
        module._parameters = ZeROOrderedDict(module, own)


class MultipleAllGatherHandles:
    """Several gathers under way."""

    def __init__(self, handles: Sequence[Any]) -> None:
        self.handles = handles

    def wait(self, handle_dependency: bool = True) -> None:
        """Wait for all of them."""
        for handle in self.handles:
            handle.wait(handle_dependency=handle_dependency)


class OnDevice:
    """A context in which modules are created on a device and in a dtype, such as `meta` for a big
    model.

        Args:
            dtype: the dtype of parameters that do not request another.
            device: the device.
            enabled: False makes it a no-op.
    """

    def __init__(
        self, dtype: torch.dtype, device: str | torch.device = "meta", enabled: bool = True
    ) -> None:
        self._enabled, self._dtype, self._device = enabled, dtype, torch.device(device)
        self._before: list[torch.dtype] = []

    def __enter__(self) -> None:
        if self._enabled:
            self._before.append(torch.get_default_dtype())
            torch.set_default_dtype(self._dtype)
            self._device.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self._enabled:
            self._device.__exit__(*error)
            torch.set_default_dtype(self._before.pop())
