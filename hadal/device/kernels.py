"""torch's fused kernels that have no public name yet, each behind one tested function.

Of optimizers: all lists of a call have the same length. The tensors at the same index are 1-D, of
the same length and dtype, on one device. `divisor` is a float32 scalar tensor on it; the kernel
divides gradients by it and overwrites them with the quotients. `overflowed` is also such a scalar:
if it is 1, nothing changes. A step is a float32 scalar tensor that already counts this update and
is not changed, so that an update can run in several blocks. For tensors of 16 bits the arithmetic
is in float32.

An element gets the same bits at any position in a call. On CPUs torch computes the elements after
the last full vector one by one, and rounds them differently (without fused multiply-adds), so they
are copied to a full vector.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

Tensors = Sequence[Tensor]

# The longest vectors of any CPU (AVX-512), a multiple of the shorter ones.
_VECTOR_NBYTES = 64


# The lists of tensors that each kernel takes: parameters, gradients and all kinds of state.
_LISTS = {"adam": 5, "adamw": 5, "adagrad": 3, "sgd": 3}


def has_fused_kernels(device: torch.device) -> bool:
    """Return True if torch has the kernels below for this kind of device."""
    return device.type in _get_fused_kernels_supported_devices()


def fused_step_(
    kernel: str,
    numbers: Mapping[str, float],
    lists: Sequence[Tensors],
    steps: Tensors,
    divisor: Tensor | None = None,
    overflowed: Tensor | None = None,
) -> None:
    """Make one update in one kernel.

    Args:
        kernel: adam (Kingma & Ba 2015), adamw (Loshchilov & Hutter 2019), adagrad (Duchi et al.
            2011), or sgd, with the momentum of Sutskever 2013 if it has one. sgd does not support
            tensors of 16 bits: torch 2.13's CPU kernel skips some of their elements and reads
            beyond the end.
        numbers: those of the update, by the kernel's own names for them.
        lists: parameters, gradients, and the state of each kind that there is.
        steps: for each parameter; sgd has none. An infinite step disables Adam's bias correction:
            b^inf is 0, so 1 - b^inf is exactly 1.
        divisor: of the gradients.
        overflowed: whether to change nothing.
    """
    step = getattr(torch, f"_fused_{kernel}_")
    absent: list[Tensors] = [[]] * (_LISTS[kernel] - len(lists))
    with _whole_vectors(lists) as (pieces, places):
        counts = [[steps[place] for place in places]] if steps else []
        step(*pieces, *absent, *counts, **numbers, grad_scale=divisor, found_inf=overflowed)


@contextmanager
def _whole_vectors(lists: Sequence[Tensors]) -> Iterator[tuple[list[list[Tensor]], list[int]]]:
    """Split the tensors of lists of equal length into parts that are full vectors on a CPU.

    Changes are written back to the tensors. Yields the parts of each list and their list indices.
    """
    pieces: list[list[Tensor]] = [[] for _ in lists]
    numbers: list[int] = []
    ends: list[Tensor] = []
    padded: list[Tensor] = []
    for number, row in enumerate(zip(*lists, strict=True)):
        flat = [one.view(-1) for one in row] if all(o.is_contiguous() for o in row) else row
        first = flat[0]
        vector = _VECTOR_NBYTES // first.itemsize
        is_flat = first.dim() == 1 and first.device.type == "cpu"
        rest = first.numel() % vector if is_flat else 0
        if not rest or rest < first.numel():
            numbers.append(number)
            for found, one in zip(pieces, flat, strict=True):
                found.append(one[:-rest] if rest else one)
        if rest:
            numbers.append(number)
            rows = first.new_zeros(len(flat), vector).unbind()
            for found, one, padding in zip(pieces, flat, rows, strict=True):
                found.append(padding)
                ends.append(one[-rest:])
                padded.append(padding[:rest])
    if ends:
        torch._foreach_copy_(padded, ends)
    yield pieces, numbers
    if ends:
        torch._foreach_copy_(ends, padded)


# ---- attention -----------------------------------------------------------------------------------


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
