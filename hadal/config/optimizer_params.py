"""`optimizer.params`: what each built-in optimizer takes."""

from collections.abc import Mapping
from typing import Annotated, Literal, TypeAlias

from annotated_types import Ge, Lt
from pydantic import BeforeValidator, ConfigDict

from hadal.config.section import NO_EFFECT, Section, key
from hadal.config.values import Boolean, Integer, Number, lowered

_Decay: TypeAlias = Annotated[Number, Ge(0), Lt(1)]
Betas: TypeAlias = tuple[_Decay, _Decay]

LR = "Learning rate."
BETAS = "Decay of the first and of the second moment, per update."
EPS = "Added to the denominator."
_SIGNS_DECAY = "Weight decay, decoupled."
_FP32_STATES = (
    "Where masters have 16 bits, keep what the optimizer remembers in fp32 all the same; false: in "
    "the masters' dtype. Beside fp32 masters it is fp32 either way. `bf16.bf16_optimizer_states` "
    "goes before this key."
)
_SET_GRAD_NONE = (
    "Whether gradients are dropped after the update or filled with zeros. They are taken out of "
    "`.grad` as backward brings them, so none are left to be filled."
)


class AdamParams(Section):
    """Adam and AdamW."""

    lr: Number = key(1e-3, LR, ge=0)
    betas: Betas = key((0.9, 0.999), BETAS)
    eps: Number = key(1e-8, EPS + " It stands outside the square root.", gt=0)
    weight_decay: Number = key(
        0.0, "Weight decay: decoupled, or an L2 term where `adam_w_mode` is false.", ge=0
    )
    bias_correction: Boolean = key(
        True,
        "Divide the moments by what they lack in early updates (1 - beta^t). torch's own classes "
        "always do, so false is refused beside `torch_adam`.",
    )
    torch_adam: Boolean = key(
        False,
        "Speak to torch's class as torch does: AdamW decays by 0.01 where `weight_decay` is "
        "absent, and torch's keywords are taken. The numbers are the same either way.",
    )
    adam_w_mode: Boolean = key(
        True,
        "Decouple the weight decay. Type Adam is AdamW unless this is false; type AdamW always "
        "decouples.",
    )
    amsgrad: Boolean = key(False, "Divide by the largest second moment seen so far.")
    set_grad_none: Boolean = key(True, _SET_GRAD_NONE, mark=NO_EFFECT)
    fp32_optimizer_states: Boolean = key(True, _FP32_STATES)
    foreach: Boolean | None = key(
        None,
        "torch's keyword; needs `torch_adam`. True steps with torch's foreach implementation, "
        "all tensors of a rank at once, instead of its fused one, block by block.",
    )
    fused: Boolean | None = key(
        None,
        "torch's keyword; needs `torch_adam`. False steps with an implementation of torch's that "
        "is not fused, all tensors of a rank at once; the fused one is used otherwise.",
    )
    maximize: Boolean = key(
        False, "torch's keyword; needs `torch_adam`. Go up the gradient instead of down."
    )
    capturable: Boolean = key(
        False,
        "torch's keyword; needs `torch_adam`. Step with torch's own implementation that an "
        "accelerator can record; refused where the process computes on a CPU.",
    )
    differentiable: Boolean = key(
        False,
        "torch's keyword; needs `torch_adam`. True is refused: nothing can be differentiated "
        "through the update of an engine.",
    )


class AdagradParams(Section):
    """Adagrad."""

    lr: Number = key(0.01, LR, ge=0)
    eps: Number = key(1e-10, EPS, gt=0)
    weight_decay: Number = key(0, "Weight decay, an L2 term.", ge=0)
    amsgrad: Boolean = key(
        False,
        "Taken where configurations of Adam are reused; Adagrad has no such thing.",
        mark=NO_EFFECT,
    )
    lr_decay: Number = key(0, "Update number t steps by lr / (1 + (t - 1) * lr_decay).", ge=0)
    initial_accumulator_value: Number = key(0, "Where the sums of squares start.", ge=0)
    fp32_optimizer_states: Boolean = key(True, _FP32_STATES)


class LambParams(Section):
    """Lamb: Adam whose step for each parameter is scaled by ||weight|| / ||update||."""

    lr: Number = key(1e-3, LR, ge=0)
    betas: Betas = key((0.9, 0.999), BETAS)
    eps: Number = key(1e-8, EPS + " It stands outside the square root.", gt=0)
    eps_inside_sqrt: Boolean = key(False, "Add eps under the square root instead.")
    weight_decay: Number = key(
        0.0, "Weight decay: added to the update before its norm is taken.", ge=0
    )
    bias_correction: Boolean = key(True, "Divide the moments by what they lack in early updates.")
    amsgrad: Literal[False] = key(False, "Not part of Lamb; true is refused.")
    max_coeff: Number = key(
        10.0, "Upper bound of the trust ratio. It is 1 where either norm is 0.", gt=0
    )
    min_coeff: Number = key(0.01, "Lower bound of the trust ratio.", gt=0)


class LionParams(Section):
    """Lion."""

    lr: Number = key(1e-3, LR, ge=0)
    betas: Betas = key((0.9, 0.999), "Interpolation of the update, and decay of the momentum.")
    weight_decay: Number = key(0.0, "Weight decay, decoupled.", ge=0)
    set_grad_none: Boolean = key(True, _SET_GRAD_NONE, mark=NO_EFFECT)
    fp32_optimizer_states: Boolean = key(True, _FP32_STATES)


class MuonParams(Section):
    """Muon for hidden matrices: parameters of two or more dimensions whose lower-cased full name
    has neither "embed" nor "lm_head" in it. Adam steps everything else.
    """

    lr: Number = key(
        0.02,
        "Learning rate of both kinds where they have none of their own; left out, 0.02 for Muon and"
        " 0.0003 for Adam.",
        ge=0,
    )
    momentum: Number = key(0.95, "Nesterov momentum of the matrices.", ge=0, lt=1)
    weight_decay: Number = key(0.0, "Weight decay of both kinds, decoupled.", ge=0)
    muon_lr: Number | None = key(None, "Learning rate of the matrices, before `lr`.", ge=0)
    adam_lr: Number | None = key(None, "Learning rate of everything else, before `lr`.", ge=0)
    betas: Betas = key((0.9, 0.95), "Decay of Adam's first and second moment, per update.")
    eps: Number = key(1e-10, "Added to Adam's denominator.", gt=0)
    ns_method: Literal["gram", "standard"] | None = key(
        None,
        "How a matrix is orthogonalized: by five quintic Newton-Schulz steps on the matrix"
        " (standard, in bfloat16 on an accelerator), or on its smaller Gram matrix and then once on"
        " it (gram, always in float32): fewer products if it is far from square, but on an"
        " accelerator each is many times slower. null: gram on CPUs, standard on accelerators.",
    )


class _OneBitParams(Section):
    """What the optimizers that send signs have in common."""

    lr: Number = key(1e-3, LR, ge=0)
    betas: Betas = key((0.9, 0.999), BETAS)
    eps: Number = key(1e-8, EPS + " It stands outside the square root.", gt=0)
    eps_inside_sqrt: Boolean = key(False, "Add eps under the square root instead.")
    weight_decay: Number = key(0.0, _SIGNS_DECAY, ge=0)
    bias_correction: Boolean = key(
        True, "Taken; moments are never corrected for their start at zero.", mark=NO_EFFECT
    )
    amsgrad: Literal[False] = key(False, "Not part of these optimizers; true is refused.")
    cuda_aware: Boolean = key(
        False,
        "Whether the MPI library can send device buffers. torch.distributed sends them here.",
        mark=NO_EFFECT,
    )
    comm_backend_name: Annotated[
        Literal["nccl", "mpi", "hccl", "compressed"], BeforeValidator(lowered)
    ] = key(
        "nccl",
        "Library that carries signs. That is the backend of torch.distributed, whichever it is.",
        mark=NO_EFFECT,
    )


class OneBitAdamParams(_OneBitParams):
    """1-bit Adam: Adam without bias correction, whose momentum travels as signs once its variance
    stands still. A param group may hold an `exp_avg_mask`. Needs ZeRO stage 0.

    What travels then is one bit for each element each way, and a float32 for each 1024 of them.
    What signs lose is remembered on each rank, in float32 (for all elements, and once more for the
    rank's share of them), and sent later. Gradients stay on their ranks: their norm, for
    `gradient_clipping`, is the root of the mean square of all ranks' norms. Elements that got no
    gradient before have no variance, and stay as they are.
    """

    freeze_step: Integer = key(
        100000,
        "Updates in which gradients are averaged exactly and the variance is learnt: at least one. "
        "Published runs take 15 to 20 in 100 of all updates.",
        ge=0,
    )


class OneBitLambParams(OneBitAdamParams):
    """1-bit Lamb: Lamb without bias correction, whose momentum travels as signs once its variance
    stands still; see OneBitAdam. A parameter's trust ratio is its running average then, times a
    factor: the largest share by which the square root of a variance has sunk since, as momenta tell
    it. A dynamic loss scale is asked for (`fp16.loss_scale` 0), as for Lamb.
    """

    weight_decay: Number = key(
        0.0, "Weight decay: added to the update before its norm is taken.", ge=0
    )
    max_coeff: Number = key(
        10.0, "Upper bound of the trust ratio. It is 1 where either norm is 0.", gt=0
    )
    min_coeff: Number = key(0.01, "Lower bound of the trust ratio.", gt=0)
    coeff_beta: Number = key(
        0.9, "Decay of the trust ratio's running average in the first updates.", ge=0, lt=1
    )
    factor_max: Number = key(4.0, "Ceiling of the factor.", gt=0)
    factor_min: Number = key(0.5, "Floor of the factor.", gt=0)
    factor_threshold: Number = key(
        0.1, "By which share of itself the factor changes at most in one update.", ge=0
    )


class ZeroOneAdamParams(_OneBitParams):
    """0/1 Adam: Adam without bias correction that learns its variance ever more rarely, and then
    exchanges ever more rarely; see OneBitAdam for what travels.

    Between two exchanges the ranks' weights differ. They are made the same, by an exchange ahead of
    its time, before a checkpoint is saved, at `engine.eval()`, and before weights, moments or state
    are read or set by Hadal's functions: all ranks must call these. What a program writes into
    weights in another way meanwhile is lost at the next exchange.
    """

    var_freeze_step: Integer = key(
        100000, "Last update at which the variance may be learnt: at least the first.", ge=0
    )
    var_update_scaler: Integer = key(
        16,
        "How many updates learn the variance before the interval between them doubles. At the "
        "updates between them gradients travel as signs, and the momentum is made of these.",
        ge=1,
    )
    local_step_scaler: Integer = key(
        32678,
        "Updates after `var_freeze_step` at which the interval between exchanges doubles; it is 1 "
        "at first.",
        ge=1,
    )
    local_step_clipper: Integer = key(
        16, "Longest interval between exchanges: 1 keeps weights the same on all ranks.", ge=1
    )


class MuParams(Section):
    """Arguments that are handed to the function of the same name in the mup package, which gives
    each parameter a rate after its width. It must be installed (pip install mup), and the model
    have its base shapes.
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
