"""Names that users import from `hadal.utils`; each is resolved on first use (PEP 562)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hadal.lazy import importer_of

if TYPE_CHECKING:
    from hadal.checkpoint.fp32 import (
        convert_zero_checkpoint_to_fp32_state_dict,
        convert_zero_checkpoint_to_state_dict,
        get_fp32_state_dict_from_zero_checkpoint,
        load_state_dict_from_zero_checkpoint,
    )
    from hadal.zero.state import (
        safe_get_full_fp32_param,
        safe_get_full_grad,
        safe_get_full_optimizer_state,
        safe_get_local_fp32_param,
        safe_get_local_grad,
        safe_get_local_optimizer_state,
        safe_set_full_fp32_param,
        safe_set_full_grad,
        safe_set_full_optimizer_state,
        safe_set_local_fp32_param,
        safe_set_local_grad,
        safe_set_local_optimizer_state,
        safe_update_full_grad_vectorized,
    )

__all__ = [
    "convert_zero_checkpoint_to_fp32_state_dict",
    "convert_zero_checkpoint_to_state_dict",
    "get_fp32_state_dict_from_zero_checkpoint",
    "load_state_dict_from_zero_checkpoint",
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_get_local_fp32_param",
    "safe_get_local_grad",
    "safe_get_local_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
    "safe_set_local_fp32_param",
    "safe_set_local_grad",
    "safe_set_local_optimizer_state",
    "safe_update_full_grad_vectorized",
]
_CHECKPOINT_SUFFIXES = ("_zero_checkpoint", "_state_dict")

__getattr__ = importer_of(
    __name__,
    {
        name: "hadal.checkpoint.fp32" if name.endswith(_CHECKPOINT_SUFFIXES) else "hadal.zero.state"
        for name in __all__
    },
)


def __dir__() -> list[str]:
    return __all__
