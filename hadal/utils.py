"""Names that users import from `hadal.utils`; each is resolved on first use (PEP 562)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hadal.lazy import lazy_names

if TYPE_CHECKING:
    from hadal.checkpoint.export import (
        convert_zero_checkpoint_to_fp32_state_dict as convert_zero_checkpoint_to_fp32_state_dict,
        convert_zero_checkpoint_to_state_dict as convert_zero_checkpoint_to_state_dict,
        get_fp32_state_dict_from_zero_checkpoint as get_fp32_state_dict_from_zero_checkpoint,
        load_state_dict_from_zero_checkpoint as load_state_dict_from_zero_checkpoint,
    )
    from hadal.zero.state import (
        safe_get_full_fp32_param as safe_get_full_fp32_param,
        safe_get_full_grad as safe_get_full_grad,
        safe_get_full_optimizer_state as safe_get_full_optimizer_state,
        safe_get_local_fp32_param as safe_get_local_fp32_param,
        safe_get_local_grad as safe_get_local_grad,
        safe_get_local_optimizer_state as safe_get_local_optimizer_state,
        safe_set_full_fp32_param as safe_set_full_fp32_param,
        safe_set_full_grad as safe_set_full_grad,
        safe_set_full_optimizer_state as safe_set_full_optimizer_state,
        safe_set_local_fp32_param as safe_set_local_fp32_param,
        safe_set_local_grad as safe_set_local_grad,
        safe_set_local_optimizer_state as safe_set_local_optimizer_state,
        safe_update_full_grad_vectorized as safe_update_full_grad_vectorized,
    )

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "hadal.checkpoint.export": (
            "convert_zero_checkpoint_to_fp32_state_dict convert_zero_checkpoint_to_state_dict "
            "get_fp32_state_dict_from_zero_checkpoint load_state_dict_from_zero_checkpoint"
        ),
        "hadal.zero.state": (
            "safe_get_full_fp32_param safe_get_full_grad safe_get_full_optimizer_state "
            "safe_get_local_fp32_param safe_get_local_grad safe_get_local_optimizer_state "
            "safe_set_full_fp32_param safe_set_full_grad safe_set_full_optimizer_state "
            "safe_set_local_fp32_param safe_set_local_grad safe_set_local_optimizer_state "
            "safe_update_full_grad_vectorized"
        ),
    },
)
