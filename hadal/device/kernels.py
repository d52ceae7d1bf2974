"""torch's own fused kernels that have no public name yet, each behind one function with a test."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class AdamRule(NamedTuple):
    """The numbers of one Adam update, as torch.optim's param groups hold them."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool
    maximize: bool = False


def fused_adam_(
    parameter: Tensor,
    gradient: Tensor,
    moments: tuple[Tensor, Tensor],
    max_second_moment: Tensor | None,
    step: Tensor,
    rule: AdamRule,
) -> None:
    """One Adam (Kingma & Ba 2015) or AdamW (Loshchilov & Hutter 2019) update in place, one kernel.

    All tensors are 1-D, of one dtype and length, on one device. `step` is a float32 scalar tensor
    that already counts this update. It is not changed here, so that one update can be made in
    several blocks.
    """
    kernel = torch._fused_adamw_ if rule.decoupled else torch._fused_adam_
    kernel(
        [parameter],
        [gradient],
        [moments[0]],
        [moments[1]],
        [] if max_second_moment is None else [max_second_moment],
        [step],
        lr=rule.lr,
        beta1=rule.beta1,
        beta2=rule.beta2,
        weight_decay=rule.weight_decay,
        eps=rule.eps,
        amsgrad=max_second_moment is not None,
        maximize=rule.maximize,
    )
