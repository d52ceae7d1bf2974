"""`optimizer.params`: the arguments of each built-in optimizer."""

from collections.abc import Mapping
from typing import Annotated, Literal, TypeAlias

from annotated_types import Ge, Lt
from pydantic import BeforeValidator, ConfigDict

from hadal.config.section import NO_EFFECT, Section, key
from hadal.config.values import Boolean, Integer, Number, lowered

_Decay: TypeAlias = Annotated[Number, Ge(0), Lt(1)]
Betas: TypeAlias = tuple[_Decay, _Decay]

LR = "Learning rate."
BETAS = "Decay rates of the first and second moment, per update."
EPS = "Added to the denominator."
MUON_RATES = {"muon_lr": 0.02, "adam_lr": 3e-4}
"""Default learning rates of Muon's two kinds of param groups, in the order of these groups."""
_SIGNS_DECAY = "Weight decay, decoupled."
_FP32_STATES = (
    "Keep optimizer state in fp32 even if the masters have 16 bits; false keeps it in the "
    "masters' dtype. With fp32 masters it is fp32 either way. `bf16.bf16_optimizer_states` "
    "takes precedence."
)
_SET_GRAD_NONE = (
    "Drop gradients after the update instead of zeroing them. Hadal takes them out of "
    "`.grad` as backward produces them, so there are none to zero."
)


class AdamParams(Section):
    """Adam and AdamW."""

    lr: Number = key(1e-3, LR, ge=0)
    betas: Betas = key((0.9, 0.999), BETAS)
    eps: Number = key(1e-8, EPS + " Outside the square root.", gt=0)
    weight_decay: Number = key(
        0.0, "Weight decay: decoupled, or an L2 term if `adam_w_mode` is false.", ge=0
    )
    bias_correction: Boolean = key(
        True,
        "Correct the moments for their start at zero (divide by 1 - beta^t). torch's own "
        "classes always do, so false is refused with `torch_adam`.",
    )
    torch_adam: Boolean = key(
        False,
        "Follow torch's classes: AdamW decays by 0.01 if `weight_decay` is absent, and torch's "
        "keywords are accepted. The results are the same either way.",
    )
    adam_w_mode: Boolean = key(
        True,
        "Decouple the weight decay. Type Adam behaves as AdamW unless this is false; type AdamW "
        "always decouples.",
    )
    amsgrad: Boolean = key(False, "Divide by the largest second moment so far.")
    set_grad_none: Boolean = key(True, _SET_GRAD_NONE, mark=NO_EFFECT)
    fp32_optimizer_states: Boolean = key(True, _FP32_STATES)
    foreach: Boolean | None = key(
        None,
        "torch's keyword; requires `torch_adam`. true uses torch's foreach implementation, on "
        "all tensors of a rank at once, instead of its fused one, block by block.",
    )
    fused: Boolean | None = key(
        None,
        "torch's keyword; requires `torch_adam`. false uses a torch implementation that is not "
        "fused, on all tensors of a rank at once; otherwise the fused one is used.",
    )
    maximize: Boolean = key(
        False,
        "torch's keyword; requires `torch_adam`. Maximize the objective instead of minimizing it.",
    )
    capturable: Boolean = key(
        False,
        "torch's keyword; requires `torch_adam`. Use torch's implementation that an accelerator "
        "can record in a graph; refused when training on a CPU.",
    )
    differentiable: Boolean = key(
        False,
        "torch's keyword; requires `torch_adam`. true is refused: an engine's update cannot be "
        "differentiated.",
    )


class AdagradParams(Section):
    """Adagrad."""

    lr: Number = key(0.01, LR, ge=0)
    eps: Number = key(1e-10, EPS, gt=0)
    weight_decay: Number = key(0, "Weight decay, an L2 term.", ge=0)
    amsgrad: Boolean = key(
        False,
        "Accepted so that Adam's configurations can be reused; Adagrad has no such variant.",
        mark=NO_EFFECT,
    )
    lr_decay: Number = key(0, "Update number t uses lr / (1 + (t - 1) * lr_decay).", ge=0)
    initial_accumulator_value: Number = key(0, "Initial value of the sums of squares.", ge=0)
    fp32_optimizer_states: Boolean = key(True, _FP32_STATES)


class LambParams(Section):
    """Lamb: Adam whose step for each parameter is scaled by ||weight|| / ||update||."""

    lr: Number = key(1e-3, LR, ge=0)
    betas: Betas = key((0.9, 0.999), BETAS)
    eps: Number = key(1e-8, EPS + " Outside the square root.", gt=0)
    eps_inside_sqrt: Boolean = key(False, "Add eps under the square root instead.")
    weight_decay: Number = key(
        0.0, "Weight decay, added to the update before its norm is taken.", ge=0
    )
    bias_correction: Boolean = key(True, "Correct for the moments' start at zero.")
    bias_correction_in: Literal["rate", "moments"] = key(
        "rate",
        "Place of this correction. rate: the learning rate, which is multiplied by "
        "sqrt(1 - beta2^t) / (1 - beta1^t) in update t, as DeepSpeed does; with the default "
        "`betas` the first steps are a third to a sixth as long. moments: both moments, before "
        "the trust ratio, as in the paper; the ratio then gives all steps their full length.",
    )
    amsgrad: Literal[False] = key(False, "Not part of Lamb; true is refused.")
    max_coeff: Number = key(
        10.0, "Upper bound of the trust ratio. The ratio is 1 if either norm is 0.", gt=0
    )
    min_coeff: Number = key(0.01, "Lower bound of the trust ratio.", gt=0)


class LionParams(Section):
    """Lion."""

    lr: Number = key(1e-3, LR, ge=0)
    betas: Betas = key(
        (0.9, 0.999), "Interpolation factor of the update, and decay rate of the momentum."
    )
    weight_decay: Number = key(0.0, "Weight decay, decoupled.", ge=0)
    set_grad_none: Boolean = key(True, _SET_GRAD_NONE, mark=NO_EFFECT)
    fp32_optimizer_states: Boolean = key(True, _FP32_STATES)


class MuonParams(Section):
    """Muon for hidden matrices: parameters with two or more dimensions whose lower-case full name
    contains neither "embed" nor "lm_head". Adam updates everything else.
    """

    lr: Number = key(
        0.02,
        "Learning rate of both kinds unless they have their own; if omitted, 0.02 for Muon and "
        "0.0003 for Adam.",
        ge=0,
    )
    momentum: Number = key(0.95, "Nesterov momentum of the matrices.", ge=0, lt=1)
    weight_decay: Number = key(0.0, "Weight decay of both kinds, decoupled.", ge=0)
    muon_lr: Number | None = key(
        None, "Learning rate of the matrices; takes precedence over `lr`.", ge=0
    )
    adam_lr: Number | None = key(
        None, "Learning rate of everything else; takes precedence over `lr`.", ge=0
    )
    betas: Betas = key((0.9, 0.95), "Decay rates of Adam's first and second moment, per update.")
    eps: Number = key(1e-10, "Added to Adam's denominator.", gt=0)
    ns_method: Literal["gram", "standard"] | None = key(
        None,
        "Method for orthogonalizing a matrix: five quintic Newton-Schulz steps on the matrix "
        "itself (standard, in bfloat16 on an accelerator), or on its smaller Gram matrix, which "
        "is then applied once (gram, always in float32). gram needs fewer products if the "
        "matrix is far from square, but on an accelerator each is many times slower. null: gram "
        "on CPUs, standard on accelerators.",
    )


class _OneBitParams(Section):
    """Arguments common to the optimizers that send signs."""

    lr: Number = key(1e-3, LR, ge=0)
    betas: Betas = key((0.9, 0.999), BETAS)
    eps: Number = key(1e-8, EPS + " Outside the square root.", gt=0)
    eps_inside_sqrt: Boolean = key(False, "Add eps under the square root instead.")
    weight_decay: Number = key(0.0, _SIGNS_DECAY, ge=0)
    bias_correction: Boolean = key(
        True, "Accepted; moments are never corrected for their start at zero.", mark=NO_EFFECT
    )
    amsgrad: Literal[False] = key(False, "Not part of these optimizers; true is refused.")
    cuda_aware: Boolean = key(
        False,
        "Whether the MPI library can send device buffers. Hadal uses torch.distributed.",
        mark=NO_EFFECT,
    )
    comm_backend_name: Annotated[
        Literal["nccl", "mpi", "hccl", "compressed"], BeforeValidator(lowered)
    ] = key(
        "nccl",
        "Library that sends signs. Hadal uses the backend of torch.distributed, whichever it is.",
        mark=NO_EFFECT,
    )


class OneBitAdamParams(_OneBitParams):
    """1-bit Adam: Adam without bias correction whose momentum is sent as signs once its variance
    is frozen. A param group may have an `exp_avg_mask`. Requires ZeRO stage 0.

    Each message then has one bit per element in each direction, and one float32 per 1024 elements.
    Each rank keeps the rounding error of the signs in float32 (for all elements, and again for its
    own slice) and adds it to the next message. Gradients stay on their ranks: their norm, for
    `gradient_clipping`, is the root mean square of all ranks' norms. Elements that have never had a
    gradient have no variance and do not change.
    """

    freeze_step: Integer = key(
        100000,
        "Updates in which gradients are averaged exactly and the variance is learned; at least "
        "one. Published runs use 15 to 20 percent of all updates.",
        ge=0,
    )


class OneBitLambParams(OneBitAdamParams):
    """1-bit Lamb: Lamb without bias correction whose momentum is sent as signs once its variance
    is frozen; see OneBitAdam. From then on a parameter's trust ratio is its running average times a
    factor: the largest ratio by which the square root of a variance has decreased since, estimated
    from momenta. Requires a dynamic loss scale (`fp16.loss_scale` 0), as Lamb does.
    """

    weight_decay: Number = key(
        0.0, "Weight decay, added to the update before its norm is taken.", ge=0
    )
    max_coeff: Number = key(
        10.0, "Upper bound of the trust ratio. The ratio is 1 if either norm is 0.", gt=0
    )
    min_coeff: Number = key(0.01, "Lower bound of the trust ratio.", gt=0)
    coeff_beta: Number = key(
        0.9, "Decay rate of the trust ratio's running average in the first updates.", ge=0, lt=1
    )
    factor_max: Number = key(4.0, "Upper bound of the factor.", gt=0)
    factor_min: Number = key(0.5, "Lower bound of the factor.", gt=0)
    factor_threshold: Number = key(
        0.1, "Largest relative change of the factor in one update.", ge=0
    )


class ZeroOneAdamParams(_OneBitParams):
    """0/1 Adam: Adam without bias correction that learns its variance less and less often, and
    then exchanges less and less often; see OneBitAdam for the messages.

    Between two exchanges the ranks' weights differ. An early exchange makes them equal before a
    checkpoint is saved, at `engine.eval()`, and before Hadal's functions read or set weights,
    moments or state: all ranks must call these. Anything that a program writes into weights in
    another way in the meantime is lost at the next exchange.
    """

    var_freeze_step: Integer = key(
        100000, "Last update at which the variance may be learned; at least the first.", ge=0
    )
    var_update_scaler: Integer = key(
        16,
        "Number of updates that learn the variance before the interval between them doubles. At "
        "the updates in between, gradients are sent as signs, and the momentum is computed from "
        "these.",
        ge=1,
    )
    local_step_scaler: Integer = key(
        32678,
        "Updates after `var_freeze_step` at which the interval between exchanges doubles; it "
        "starts at 1.",
        ge=1,
    )
    local_step_clipper: Integer = key(
        16, "Longest interval between exchanges; 1 keeps weights equal on all ranks.", ge=1
    )


class MuParams(Section):
    """Arguments passed to the function of the same name in the mup package, which derives each
    parameter's learning rate from its width. The package must be installed (pip install mup), and
    the model must have its base shapes.
    """

    model_config = ConfigDict(extra="allow")


PARAMS: Mapping[str, type[Section]] = {
    "Adam": AdamParams,
    "AdamW": AdamParams,
    "Adagrad": AdagradParams,
    "Lamb": LambParams,
    "Lion": LionParams,
    "Muon": MuonParams,
    "OneBitAdam": OneBitAdamParams,
    "ZeroOneAdam": ZeroOneAdamParams,
    "OneBitLamb": OneBitLambParams,
    "MuAdam": MuParams,
    "MuAdamW": MuParams,
    "MuSGD": MuParams,
}
BUILT_IN = tuple(PARAMS)
