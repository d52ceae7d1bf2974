"""Which stepper an optimizer gets: flat cuts where it looks at single elements only."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.optim import Optimizer

from hadal.errors import OptimizerError
from hadal.optim.build import is_elementwise, refuse_unusable
from hadal.optim.lamb import Lamb, LambStepper
from hadal.optim.muon import Muon, MuonStepper
from hadal.optim.step import FlatStepper, Stepper, refuse_other_state_dtype
from hadal.optim.whole import WholeStepper
from hadal.zero.gradients import Gradients


def build_stepper(
    optimizer: Optimizer,
    gradients: Sequence[Gradients],
    parameters: Sequence[Sequence[nn.Parameter]],
) -> Stepper:
    """Put the buckets under a user's optimizer.

    The optimizer object and its group dicts stay; only `group["params"]` is replaced. `parameters`
    holds, per param group, the model's own parameters in their order.

    State that the optimizer holds already goes along with its parameters.

    Raises:
        OptimizerError: the optimizer cannot work with reduced gradients, or its state does not fit.
    """
    refuse_unusable(type(optimizer))
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise OptimizerError(
            f"{type(optimizer).__name__}(differentiable=True) cannot be used: nothing can be"
            " differentiated through the update of an engine; leave it out"
        )
    if is_elementwise(optimizer):
        return FlatStepper(optimizer, gradients)
    refuse_other_state_dtype(optimizer, gradients)
    if type(optimizer) is Lamb:
        return LambStepper(optimizer, gradients)
    if type(optimizer) is Muon:
        return MuonStepper(optimizer, gradients, parameters)
    return WholeStepper(optimizer, gradients, parameters)
