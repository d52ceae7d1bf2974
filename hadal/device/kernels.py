"""torch's own fused kernels that have no public name yet, each behind one function with a test.

All tensors of a call are 1-D, of one dtype and length, on one device. `divisor` is a float32 scalar
tensor there by which the gradient is divided first; the gradient is then overwritten with the
quotient. `overflowed` is such a scalar too: if it is 1, nothing changes. A `step` is a float32
scalar tensor that already counts this update and is not changed, so that one update can be made in
several blocks. The arithmetic is done in float32 where the tensors have 16 bits.

An element gets the same bits wherever it lies in a call. On CPUs torch computes the elements behind
the last whole vector one by one, with other roundings (without fused multiply-adds) than those in
vectors; so they are copied to a vector of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

# Of the longest vectors of any CPU (AVX-512); shorter ones divide them.
_VECTOR_NBYTES = 64


class AdamRule(NamedTuple):
    """The numbers of one Adam update, as torch.optim's param groups hold them."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool
    maximize: bool = False


class SgdRule(NamedTuple):
    """The numbers of one SGD update, as torch.optim's param groups hold them."""

    lr: float
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False
    maximize: bool = False


class AdagradRule(NamedTuple):
    """The numbers of one Adagrad update, as torch.optim's param groups hold them."""

    lr: float
    lr_decay: float
    eps: float
    weight_decay: float
    maximize: bool = False


def has_fused_kernels(device: torch.device) -> bool:
    """Whether torch has the kernels below for this kind of device."""
    return device.type in _get_fused_kernels_supported_devices()


def fused_adam_(
    parameter: Tensor,
    gradient: Tensor,
    moments: tuple[Tensor, Tensor],
    max_second_moment: Tensor | None,
    step: Tensor,
    rule: AdamRule,
    divisor: Tensor | None = None,
    overflowed: Tensor | None = None,
) -> None:
    """One Adam (Kingma & Ba 2015) or AdamW (Loshchilov & Hutter 2019) update in place, one kernel.

    With an infinite `step` the moments are not corrected: b^inf is 0, so 1 - b^inf is exactly 1.
    """
    kernel = torch._fused_adamw_ if rule.decoupled else torch._fused_adam_
    largest = [] if max_second_moment is None else [max_second_moment]
    with _whole_vectors([parameter, gradient, *moments, *largest]) as pieces:
        kernel(
            pieces[0],
            pieces[1],
            pieces[2],
            pieces[3],
            pieces[4] if largest else [],
            [step] * len(pieces[0]),
            lr=rule.lr,
            beta1=rule.beta1,
            beta2=rule.beta2,
            weight_decay=rule.weight_decay,
            eps=rule.eps,
            amsgrad=bool(largest),
            maximize=rule.maximize,
            grad_scale=divisor,
            found_inf=overflowed,
        )


def fused_sgd_(
    parameter: Tensor,
    gradient: Tensor,
    momentum: Tensor | None,
    rule: SgdRule,
    is_first: bool,
    divisor: Tensor | None = None,
    overflowed: Tensor | None = None,
) -> None:
    """One SGD update in place, with momentum (Sutskever 2013) where there is some, one kernel.

    In the first update the momentum becomes the gradient, whatever it held. Not for tensors of 16
    bits: there the kernel for CPUs of torch 2.13 skips elements, and reads beyond the end.
    """
    owned = [] if momentum is None else [momentum]
    with _whole_vectors([parameter, gradient, *owned]) as pieces:
        torch._fused_sgd_(
            pieces[0],
            pieces[1],
            pieces[2] if owned else [],
            weight_decay=rule.weight_decay,
            momentum=rule.momentum,
            lr=rule.lr,
            dampening=rule.dampening,
            nesterov=rule.nesterov,
            maximize=rule.maximize,
            is_first_step=is_first,
            grad_scale=divisor,
            found_inf=overflowed,
        )


def fused_adagrad_(
    parameter: Tensor,
    gradient: Tensor,
    square_sum: Tensor,
    step: Tensor,
    rule: AdagradRule,
    divisor: Tensor | None = None,
    overflowed: Tensor | None = None,
) -> None:
    """One Adagrad (Duchi 2011) update in place, one kernel."""
    with _whole_vectors([parameter, gradient, square_sum]) as pieces:
        torch._fused_adagrad_(
            pieces[0],
            pieces[1],
            pieces[2],
            [step] * len(pieces[0]),
            lr=rule.lr,
            lr_decay=rule.lr_decay,
            weight_decay=rule.weight_decay,
            eps=rule.eps,
            maximize=rule.maximize,
            grad_scale=divisor,
            found_inf=overflowed,
        )


@contextmanager
def _whole_vectors(tensors: Sequence[Tensor]) -> Iterator[list[list[Tensor]]]:
    """Each of equally long tensors as pieces that are whole vectors on a CPU; changes reach it."""
    if all(one.is_contiguous() for one in tensors):
        tensors = [one.view(-1) for one in tensors]
    first = tensors[0]
    vector = _VECTOR_NBYTES // first.itemsize
    is_flat = first.dim() == 1 and first.device.type == "cpu"
    rest = first.numel() % vector if is_flat else 0
    if not rest:
        yield [[one] for one in tensors]
        return
    ends = [one[-rest:] for one in tensors]
    padded = first.new_zeros(len(tensors), vector)
    filled = padded[:, :rest].unbind()
    torch._foreach_copy_(filled, ends)
    if rest < first.numel():
        yield [[one[:-rest], row] for one, row in zip(tensors, padded, strict=True)]
    else:
        yield [[row] for row in padded]
    torch._foreach_copy_(ends, filled)
