"""`deepspeed.linear`: linear layers with a frozen weight and a trained low-rank update (LoRA)."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from inspect import signature
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from hadal.compat.surface import unbuilt
from hadal.errors import UsageError

_log = logging.getLogger(__name__)


@dataclass
class LoRAConfig:
    """The rank and the scale of the update, and the layers of a model that have one."""

    lora_r: int = 64
    lora_alpha: float = 16.0
    base_weight_sharding: int = 1
    offload: bool = False
    offload_ratio: float = 0.0
    delay_lora_init: bool = False
    target_mods: list[str] = field(
        default_factory=lambda: [
            *("q_proj", "k_proj", "v_proj", "o_proj"),
            *("gate_proj", "up_proj", "down_proj"),
        ]
    )


@dataclass
class QuantizationConfig:
    """The format of a quantized frozen weight; there are no layers of it here."""

    q_bits: int = 8
    mantissa_bits: int = 3
    group_size: int = 512
    q_dtype: torch.dtype = torch.uint8


class LoRAOptimizedLinear(nn.Module):
    """A frozen weight, and the trained product of two thin matrices beside it."""

    def __init__(
        self,
        input_dim: int,
        output_dim: int,
        bias: bool = False,
        lora_config: LoRAConfig | None = None,
        quantization_config: QuantizationConfig | None = None,
        device: Any = None,
        dtype: torch.dtype = torch.bfloat16,
        linear_cls: Callable[..., Any] = nn.Linear,
    ) -> None:
        super().__init__()
        if bias or lora_config is None:
            raise UsageError(
                f"LoRAOptimizedLinear(bias={bias}, lora_config={lora_config}): expected bias=False"
                " and a LoRAConfig"
            )
        if quantization_config is not None:
            raise unbuilt(
                "LoRAOptimizedLinear(quantization_config=)",
                "Leave it out and set zero_optimization.zero_quantized_nontrainable_weights",
            )
        if lora_config.base_weight_sharding > 1 or lora_config.offload:
            _log.warning(
                "LoRAConfig.base_weight_sharding and .offload have no effect: stage 3 shards frozen"
                " weights, and zero_optimization.offload_param offloads them"
            )
        self.input_dim, self.output_dim, self.bias = input_dim, output_dim, False
        self.lora_config, self.linear_cls = lora_config, linear_cls
        self.device, self.dtype, self.disabled = device, dtype, False
        weight = torch.empty(output_dim, input_dim, dtype=dtype, device=device)
        self.weight = nn.Parameter(nn.init.xavier_uniform_(weight), requires_grad=False)
        if not lora_config.delay_lora_init:
            self.init_lora()

    def disable(self) -> None:
        """Make this a layer without an update; call it before `init_lora`."""
        self.disabled = True

    def init_lora(self) -> None:
        """Create the update, which begins as zero."""
        if self.disabled:
            return
        rank, options = self.lora_config.lora_r, {"device": self.device, "dtype": self.dtype}
        self.lora_scaling_factor = self.lora_config.lora_alpha / rank
        self.lora_weight_1 = self.linear_cls(self.input_dim, rank, bias=False, **options)
        self.lora_weight_2 = self.linear_cls(rank, self.output_dim, bias=False, **options)
        nn.init.kaiming_uniform_(self.lora_weight_1.weight, a=math.sqrt(5))
        nn.init.zeros_(self.lora_weight_2.weight)

    def full_weight(self) -> Tensor:
        """Return the frozen weight."""
        return self.weight

    def forward(self, input_tensor: Tensor) -> Tensor:
        """Return the frozen layer's outputs plus the scaled update's.

        Raises:
            UsageError: `init_lora` was not called.
        """
        frozen = nn.functional.linear(input_tensor, self.weight)
        if self.disabled:
            return frozen
        if not hasattr(self, "lora_weight_1"):
            raise UsageError("init_lora() was not called; call it on the model before training")
        update: Tensor = self.lora_weight_2(self.lora_weight_1(input_tensor))
        return frozen + self.lora_scaling_factor * update


class OptimizedLinear(nn.Module):
    """A layer of the kind that the arguments need: torch's own, or one with an update."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Return the layer; see `LoRAOptimizedLinear` for the arguments."""
        bound = signature(LoRAOptimizedLinear).bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        if given["lora_config"] is not None:
            return LoRAOptimizedLinear(**given)
        if given["quantization_config"] is not None:
            raise unbuilt(
                "OptimizedLinear(quantization_config=)", "Use the section compression_training"
            )
        names = ("bias", "dtype", "device")
        sizes = given["input_dim"], given["output_dim"]
        return given["linear_cls"](*sizes, **{name: given[name] for name in names})


@contextmanager
def Init(
    lora_config: LoRAConfig | None = None, quant_config: QuantizationConfig | None = None
) -> Iterator[None]:
    """Let `torch.nn.Linear` make such layers inside, without biases.

    `AutoModelForCausalLM` creates their updates as well; for other models call `init_lora`.
    """
    real, chosen = nn.Linear, {"lora_config": lora_config, "quantization_config": quant_config}
    if lora_config is not None:
        lora_config.delay_lora_init = True

    class Linear:
        def __new__(
            cls, in_features: int, out_features: int, bias: bool = False, **kwargs: Any
        ) -> Any:
            return OptimizedLinear(
                in_features, out_features, bias, **kwargs, **chosen, linear_cls=real
            )

    def with_updates(make: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
        def made(*args: Any, **kwargs: Any) -> nn.Module:
            model = make(*args, **kwargs)
            if lora_config is not None:
                init_lora(model)
            return model

        return made

    with ExitStack() as stack:
        stack.enter_context(patch.object(nn, "Linear", Linear))
        if find_spec("transformers") is not None:
            from transformers import AutoModelForCausalLM as models

            for name in ("from_pretrained", "from_config"):
                new = with_updates(getattr(models, name))
                stack.enter_context(patch.object(models, name, new))
        yield


def init_lora(model: nn.Module) -> None:
    """Create the updates of a model's layers, and train nothing else."""
    model.requires_grad_(False)
    for module in model.modules():
        if isinstance(module, LoRAOptimizedLinear):
            module.init_lora()
