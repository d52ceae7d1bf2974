"""The optimizer classes of `deepspeed.ops`: calling one makes the house's own.

What is made is an object of torch's or of Hadal's class: those are stepped in flat cuts.
"""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from hadal.errors import OptimizerError
from hadal.optim.build import build_optimizer


class _Maker(type):
    """A class that is called and makes an optimizer of another one."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make it."""
        return cls.make(*args, **kwargs)  # type: ignore[attr-defined]


class FusedAdam(metaclass=_Maker):
    """Adam, or AdamW, in torch's fused kernels."""

    @staticmethod
    def make(  # noqa: PLR0913 - the signature is DeepSpeed's
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> Optimizer:
        """Make it; gradients are always set to None."""
        _refuse_amsgrad("FusedAdam", amsgrad)
        return build_optimizer(
            "Adam",
            {
                "lr": lr,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
                "adam_w_mode": adam_w_mode,
                "bias_correction": bias_correction,
            },
            list(params),
        )


class DeepSpeedCPUAdam(metaclass=_Maker):
    """Adam, or AdamW, on the host: torch's fused kernels too."""

    @staticmethod
    def make(  # noqa: PLR0913 - the signature is DeepSpeed's
        model_params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> Optimizer:
        """Make it. State has the dtype of the master, whatever `fp32_optimizer_states` says."""
        return FusedAdam.make(
            model_params,
            lr=lr,
            bias_correction=bias_correction,
            betas=betas,
            eps=eps,
            adam_w_mode=adamw_mode,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
        )


class DeepSpeedCPUAdagrad(metaclass=_Maker):
    """Adagrad on the host."""

    @staticmethod
    def make(
        model_params: Any,
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
    ) -> Optimizer:
        """Make it."""
        _refuse_amsgrad("DeepSpeedCPUAdagrad", amsgrad)
        options = {"lr": lr, "eps": eps, "weight_decay": weight_decay}
        return build_optimizer("Adagrad", options, list(model_params))


class FusedLion(metaclass=_Maker):
    """Lion."""

    @staticmethod
    def make(
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
    ) -> Optimizer:
        """Make it; gradients are always set to None."""
        options = {"lr": lr, "betas": betas, "weight_decay": weight_decay}
        return build_optimizer("Lion", options, list(params))


class DeepSpeedCPULion(metaclass=_Maker):
    """Lion on the host."""

    @staticmethod
    def make(
        model_params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        fp32_optimizer_states: bool = True,
    ) -> Optimizer:
        """Make it."""
        options = {"lr": lr, "betas": betas, "weight_decay": weight_decay}
        return build_optimizer("Lion", options, list(model_params))


class FusedLamb(metaclass=_Maker):
    """Lamb."""

    @staticmethod
    def make(  # noqa: PLR0913 - the signature is DeepSpeed's
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        amsgrad: bool = False,
    ) -> Optimizer:
        """Make it."""
        _refuse_amsgrad("FusedLamb", amsgrad)
        if max_grad_norm:
            raise OptimizerError(
                "FusedLamb(max_grad_norm=...): give gradient_clipping in the configuration, which"
                " clips the gradients of all parameters together"
            )
        options = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "eps_inside_sqrt": eps_inside_sqrt,
            "weight_decay": weight_decay,
            "max_coeff": max_coeff,
            "min_coeff": min_coeff,
        }
        return build_optimizer("Lamb", options, list(params))


def _refuse_amsgrad(name: str, amsgrad: bool) -> None:
    if amsgrad:
        raise OptimizerError(
            f"{name}(amsgrad=True): DeepSpeed refuses or ignores it; take"
            " torch.optim.AdamW(amsgrad=True), which trains here"
        )
