"""Counts of floating-point operations: forward by module, backward, and recomputation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from hadal.device import is_in_backward

_aten = torch.ops.aten
Formula = Callable[..., "int | Count"]
"""Called with an operation's arguments and, as `out_val`, its result."""


@dataclass(frozen=True, slots=True)
class Count:
    """Floating-point operations."""

    products: int = 0
    """Matrix products, convolutions and attention: two operations per multiply-accumulate."""
    others: int = 0
    """Norms, activation functions, softmax, pooling, and convolutions' biases."""

    @property
    def flops(self) -> int:
        """All operations."""
        return self.products + self.others

    @property
    def macs(self) -> int:
        """Multiply-accumulates."""
        return self.products // 2

    def __add__(self, other: Count | int) -> Count:
        # torch's counter starts from 0.
        if isinstance(other, int):
            return Count(self.products + other, self.others)
        return Count(self.products + other.products, self.others + other.others)

    __radd__ = __add__

    # torch's counter takes the larger branch of a condition.
    def __lt__(self, other: Count | int) -> bool:
        return self.flops < (other if isinstance(other, int) else other.flops)

    def __gt__(self, other: Count | int) -> bool:
        return self.flops > (other if isinstance(other, int) else other.flops)


class Counter:
    """Counter of the operations between `start` and `stop`, on any device, compiled or not.

    It is torch's `FlopCounterMode`, with formulas that torch lacks: attention on CPUs and with
    grouped keys, recurrent layers, grouped products, and small costs of elementwise layers.
    """

    def __init__(self) -> None:
        self.forward = Count()
        """The operations outside backward."""
        self.backward = Count()
        """The operations of backward, recomputation included."""
        self.recomputed = Count()
        """The operations of the forward that backward repeated (activation checkpointing)."""
        self._by_name: dict[str, Count] = {}
        self._mode: FlopCounterMode | None = None

    @property
    def flops(self) -> int:
        """All operations counted so far."""
        return self.forward.flops + self.backward.flops

    @property
    def is_counting(self) -> bool:
        """True if it has been started and not stopped."""
        return self._mode is not None

    def start(self) -> None:
        """Start counting, on top of earlier counts. Slows each operation down."""
        mapping = {target: _raw(self, formula) for target, formula in FORMULAS.items()}
        self._mode = FlopCounterMode(display=False, custom_mapping=mapping)
        self._mode.flop_registry = _WithoutParts(self._mode.flop_registry)
        self._mode.__enter__()

    def stop(self) -> None:
        """Stop counting."""
        if self._mode is None:
            return
        mode, self._mode = self._mode, None
        mode.__exit__(None, None, None)
        for name, counts in mode.get_flop_counts().items():
            for count in counts.values():
                self._by_name[name] = self._by_name.get(name, Count()) + count

    def forward_of(self, root: nn.Module) -> Mapping[str, Count]:
        """Return the operations of each module's forward by its name below `root` ('')."""
        top = type(root).__name__
        found = {}
        for name, count in self._by_name.items():
            if name == top or name.startswith(f"{top}."):
                found[name[len(top) + 1 :]] = count
        return found

    def count(self, formula: Formula, *args: Any, **kwargs: Any) -> Count:
        """Add an operation to its phase; return its count in forward, else an empty count."""
        found = formula(*args, **kwargs)
        count = found if isinstance(found, Count) else Count(int(found))
        if not is_in_backward():
            self.forward += count
            return count
        self.backward += count
        if torch.is_grad_enabled():  # backward's own operations build no graph
            self.recomputed += count
        return Count()


def prepare_counting() -> None:
    """Count something small, so that the first counted update does not pay for imports.

    torch imports about a second's worth of modules when it counts for the first time.
    """
    counter = Counter()
    counter.start()
    try:
        _aten.mm(torch.ones(1, 1), torch.ones(1, 1))
    finally:
        counter.stop()


class _WithoutParts(dict[Any, Formula]):
    """Formulas by operation; operations with a kernel of their own count as known.

    torch's counter composes an operation that it does not know of others, if it can, even if the
    device has a kernel for it: SiLU's gradient, for one. That rounds otherwise, and a profiled
    update would change a run.
    """

    def __contains__(self, operation: object) -> bool:
        return super().__contains__(operation) or (
            isinstance(operation, torch._ops.OpOverload) and _has_kernel(operation.name())
        )


@cache
def _has_kernel(name: str) -> bool:
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return any(has_kernel(name, key) for key in ("CPU", "CUDA", "XPU", "MPS", "PrivateUse1"))


def _raw(counter: Counter, formula: Formula) -> Formula:
    counted = partial(counter.count, formula)
    # With this mark torch passes tensors instead of their shapes.
    counted._get_raw = True  # type: ignore[attr-defined]
    return counted


# ---- formulas that torch lacks -------------------------------------------------------------------


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    width = query.shape[-1]
    pairs = query.numel() // width * key.shape[-2]
    return 2 * pairs * (width + value.shape[-1])


def _attention_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any
) -> int:
    # Recomputed scores, their gradient, and those of the three inputs: five products.
    width = query.shape[-1]
    pairs = query.numel() // width * key.shape[-2]
    return 2 * pairs * (3 * width + 2 * value.shape[-1])


def _convolution(formula: Formula) -> Formula:
    def count(image: Tensor, weight: Tensor, bias: Tensor | None, *args: Any, **kw: Any) -> Count:
        found = formula(image, weight, bias, *args, **kw)
        out: Tensor = kw["out_val"]
        return Count(int(found), 0 if bias is None else out.numel())  # type: ignore[arg-type]

    return count


def _recurrent(inputs: Tensor, *weights: Any, **_: Any) -> int:
    """Count each step's products of input and state: every matrix once per token."""
    given = weights[0] if isinstance(weights[0], (list, tuple)) else weights[:2]
    tokens = prod(inputs.shape[:-1])
    return 2 * tokens * sum(int(each.numel()) for each in given if each.dim() == 2)


def _grouped(left: Tensor, right: Tensor, *_: Any, out_val: Tensor, **__: Any) -> int:
    if left.dim() == right.dim() == 2:  # groups of the inner dimension
        return 2 * left.shape[0] * left.shape[1] * right.shape[1]
    return 2 * out_val.numel() * left.shape[-1]


def _per_input(inputs: Tensor, *_: Any, **__: Any) -> Count:
    return Count(0, inputs.numel())


def _norm(operations: int, weight_at: int) -> Formula:
    """Count so many operations for each element, and one more with a weight."""
    return lambda *args, **_: Count(
        0, args[0].numel() * (operations + (args[weight_at] is not None))
    )


def _batch_norm(*args: Any, **_: Any) -> int | Count:
    is_training = next((each for each in args if isinstance(each, bool)), True)
    return _norm(4 if is_training else 1, 1)(*args)


_BY_NAMES: tuple[tuple[Formula, str], ...] = (
    (
        _attention,
        "_scaled_dot_product_flash_attention _scaled_dot_product_efficient_attention"
        " _scaled_dot_product_cudnn_attention _scaled_dot_product_flash_attention_for_cpu"
        " _scaled_dot_product_fused_attention_overrideable",
    ),
    (
        _attention_backward,
        "_scaled_dot_product_flash_attention_backward"
        " _scaled_dot_product_efficient_attention_backward"
        " _scaled_dot_product_cudnn_attention_backward"
        " _scaled_dot_product_flash_attention_for_cpu_backward"
        " _scaled_dot_product_fused_attention_overrideable_backward",
    ),
    (_recurrent, "mkldnn_rnn_layer _cudnn_rnn miopen_rnn"),
    (_grouped, "_grouped_mm"),
    (_norm(4, 2), "native_layer_norm"),
    (_norm(4, 1), "native_group_norm"),
    (_norm(3, 2), "_fused_rms_norm"),
    (
        _batch_norm,
        "native_batch_norm cudnn_batch_norm miopen_batch_norm _native_batch_norm_legit"
        " _native_batch_norm_legit_functional _batch_norm_with_update",
    ),
    (_norm(1, 1), "_native_batch_norm_legit_no_training _batch_norm_no_update"),
    (
        _per_input,
        "relu relu_ gelu gelu_ silu silu_ elu elu_ leaky_relu leaky_relu_ hardtanh hardtanh_"
        " _prelu_kernel _softmax max_pool2d_with_indices max_pool3d_with_indices avg_pool2d"
        " avg_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d adaptive_max_pool2d"
        " adaptive_max_pool3d",
    ),
)
FORMULAS: Mapping[Any, Formula] = {
    **flop_registry,
    **{
        getattr(_aten, name): formula
        for formula, names in _BY_NAMES
        for name in names.split()
        if hasattr(_aten, name)
    },
    **{
        target: _convolution(flop_registry[target])
        for target in (_aten.convolution, _aten._convolution, _aten.convolution_overrideable)
        if target in flop_registry
    },
}
"""The formula of each operation that is counted; it takes tensors, and the result as `out_val`."""
