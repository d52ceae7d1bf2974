"""torch's fused attention for CPUs that returns the log-sum-exp; it has no public name yet."""

from __future__ import annotations

import torch
from torch import Tensor


def has_fused_attention(device: torch.device) -> bool:
    """Return True if torch has the two kernels below for this kind of device."""
    ops = torch.ops.aten
    names = "_scaled_dot_product_flash_attention_for_cpu"
    return device.type == "cpu" and hasattr(ops, names) and hasattr(ops, f"{names}_backward")


def has_flex_attention(device: torch.device) -> bool:
    """Return True if torch's FlexAttention has a backward for this kind of device."""
    return device.type in ("cuda", "xpu")


def gathered_numel(device: torch.device) -> int:
    """Return the elements of the largest tensor to gather for one call of an attention.

    Larger ones leave a processor's cache; an accelerator is faster with few large calls.
    """
    return 1 << (19 if device.type == "cpu" else 26)


def fused_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    scale: float,
    *,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return softmax(query key^T scale + bias) value, and the log-sum-exp of each row.

    A row whose bias is -inf everywhere gives 0, with a log-sum-exp of 0.

    Args:
        query: [batch, heads, rows, D] on a CPU, of any floating dtype.
        key, value: [batch, heads, columns, D].
        bias: broadcastable to [batch, heads, rows, columns], of the same dtype.
        scale: factor of the scores.
        is_causal: row i uses only columns 0 to i, and there is no bias.

    Returns:
        [batch, heads, rows, D] in the same dtype, and [batch, heads, rows] in fp32 (fp64 for fp64).
    """
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, is_causal, attn_mask=bias, scale=scale
    )
    return out, lse


def fused_attention_backward(
    gradient: Tensor,
    operands: tuple[Tensor, Tensor, Tensor],
    result: tuple[Tensor, Tensor],
    bias: Tensor | None,
    scale: float,
    *,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value.

    `result` may belong to an attention over more columns than these: the gradients are then the
    contributions of these columns.

    Args:
        gradient: of the output, [batch, heads, rows, D].
        operands: query, key and value as in `fused_attention`.
        result: the output and the log-sum-exp.
        bias: as in `fused_attention`; it gets no gradient.
        scale: factor of the scores.
        is_causal: as in `fused_attention`.
    """
    query, key, value = operands
    out, lse = result
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(  # type: ignore[no-any-return]
        gradient, query, key, value, out, lse, 0.0, is_causal, attn_mask=bias, scale=scale
    )
