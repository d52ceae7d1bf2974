"""`optimizer`: the optimizer that the engine builds, and the table of all that it can name.

A row names classes by path, so that the configuration is read without torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from annotated_types import Ge, Lt
from pydantic import BeforeValidator, ConfigDict

from hadal.config.section import NO_EFFECT, Params, Section, Typed, key
from hadal.config.values import Boolean, Integer, Number, Text, lowered

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


class _Moments(Section):
    """Arguments common to the optimizers with two moments."""

    lr: Number = key(1e-3, LR, ge=0)
    betas: Betas = key((0.9, 0.999), BETAS)
    eps: Number = key(1e-8, EPS + " Outside the square root.", gt=0)


class AdamParams(_Moments):
    """Adam and AdamW."""

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


class LambParams(_Moments):
    """Lamb: Adam whose step for each parameter is scaled by ||weight|| / ||update||."""

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


class _OneBitParams(_Moments):
    """Arguments common to the optimizers that send signs."""

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


@dataclass(frozen=True, slots=True)
class OptimizerKind:
    """An optimizer that `optimizer.type` can name, and everything that Hadal knows about it."""

    name: str
    made_by: str
    """Path of the class, or of a function with its arguments; imported on first use."""
    params: type[Section] | None = None
    """The keys of `optimizer.params`; None: a class of torch, which takes its own arguments."""
    steps: Literal["blocks", "slices", "whole"] = "whole"
    """The tensors that it can step. whole: parameters in their shapes. slices: flat slices of many
    parameters, since the update of an element depends on that element's gradient and state only.
    blocks: slices in blocks, with state on a disk or in another dtype than the masters."""
    state: tuple[str, ...] | None = None
    """The state with a value for each element, in the state's dtype; None: found by an update."""
    optional_state: Mapping[str, str] = field(default_factory=dict)
    """The further state that a key of `params` adds if it is true."""
    classes: tuple[str, ...] = ()
    """Paths of the classes of its objects, which read each other's state, the name of the first
    being that of saved state; (): `made_by`."""
    stepper: str = ""
    """Path of its stepper; "": the one that `steps` requires."""
    groups: str = ""
    """Path of the function that makes its param groups from parameters and their names."""
    rates: Mapping[str, float] = field(default_factory=dict)
    """The keys of its learning rates, and their defaults, in the order of these groups."""
    max_stage: int = 3
    """The highest ZeRO stage at which it trains."""
    needs_dynamic_scale: bool = False
    """True if its updates are skipped by a dynamic loss scale only."""
    remedy: str = ""
    """The end of the error if it rejects its arguments."""
    refused: str = ""
    """The reason if an engine cannot step it."""

    @property
    def class_names(self) -> dict[str, str]:
        """Return the paths of the classes of its objects by their names."""
        return {path.rpartition(":")[2]: path for path in self.classes or (self.made_by,)}

    @property
    def is_elementwise(self) -> bool:
        """True if it steps flat slices of several parameters as one tensor."""
        return self.steps != "whole"

    def state_with(self, params: Mapping[str, Any]) -> tuple[str, ...] | None:
        """Return the state with a value for each element, with these `params`."""
        more = (name for key, name in self.optional_state.items() if params.get(key))
        return None if self.state is None else (*self.state, *more)


_MOMENTS = ("exp_avg", "exp_avg_sq")
_MAX = {"amsgrad": "max_exp_avg_sq"}
_SHAPES = ". Call mup.set_base_shapes on the model before hadal.initialize."


def _adam(name: str, other: str) -> OptimizerKind:
    classes = (
        f"torch.optim:{name}",
        f"torch.optim:{other}",
        "hadal.optim.elementwise:UncorrectedAdam",
    )
    made_by = f"hadal.optim.elementwise:{name.lower()}"
    return OptimizerKind(name, made_by, AdamParams, "blocks", _MOMENTS, _MAX, classes)


def _signs(name: str, params: type[Section], stepper: str, **more: Any) -> OptimizerKind:
    made_by = f"hadal.optim.one_bit:{name}"
    found = OptimizerKind(name, made_by, params, state=_MOMENTS, stepper=stepper, max_stage=0)
    return replace(found, **more)


def _mup(name: str, made: OptimizerKind) -> OptimizerKind:
    return replace(made, name=name, made_by=f"mup:{name}", params=MuParams, remedy=_SHAPES)


def _torch(name: str, steps: Literal["slices", "whole"], refused: str = "") -> OptimizerKind:
    return OptimizerKind(name, f"torch.optim:{name}", None, steps, refused=refused)


_ADAM = _adam("Adam", "AdamW")
_ADAMW = _adam("AdamW", "Adam")
_SGD = OptimizerKind(
    *("SGD", "torch.optim:SGD", None, "blocks", ()), optional_state={"momentum": "momentum_buffer"}
)
KINDS: Mapping[str, OptimizerKind] = {
    kind.name: kind
    for kind in (
        _ADAM,
        _ADAMW,
        OptimizerKind("Adagrad", "torch.optim:Adagrad", AdagradParams, "blocks", ("sum",)),
        OptimizerKind(
            *("Lamb", "hadal.optim.lamb:Lamb", LambParams),
            state=_MOMENTS,
            stepper="hadal.optim.lamb:LambStepper",
            needs_dynamic_scale=True,
        ),
        OptimizerKind("Lion", "hadal.optim.lion:Lion", LionParams, "blocks", ("exp_avg",)),
        OptimizerKind(
            *("Muon", "hadal.optim.muon:Muon", MuonParams),
            # Of matrices; its Adam keeps two values of the other elements.
            state=("momentum_buffer",),
            stepper="hadal.optim.muon:MuonStepper",
            groups="hadal.optim.muon:muon_groups",
            rates=MUON_RATES,
        ),
        _signs("OneBitAdam", OneBitAdamParams, "hadal.optim.exchanging:ExchangingStepper"),
        _signs("ZeroOneAdam", ZeroOneAdamParams, "hadal.optim.exchanging:ZeroOneAdamStepper"),
        _signs(
            *("OneBitLamb", OneBitLambParams, "hadal.optim.exchanging:OneBitLambStepper"),
            needs_dynamic_scale=True,
        ),
        _mup("MuAdam", _ADAM),
        _mup("MuAdamW", _ADAMW),
        _mup("MuSGD", replace(_SGD, classes=("torch.optim:SGD",))),
        _SGD,
        *(_torch(name, "slices") for name in ("ASGD", "Adadelta", "Adamax", "NAdam", "RAdam")),
        *(_torch(name, "slices") for name in ("RMSprop", "Rprop")),
        _torch("Adafactor", "whole"),
        _torch(
            *("LBFGS", "whole"),
            "it calls the loss several times in one step, which an engine's step cannot",
        ),
        _torch(
            *("SparseAdam", "whole"),
            "it updates only the rows of sparse gradients, and gradients here are dense",
        ),
    )
}
"""The optimizers by the name of their type. Newer releases of torch may have more classes."""


def built_in() -> dict[str, type[Section]]:
    """Return the types that are spelled in any case, with the keys of their params."""
    return {name: kind.params for name, kind in KINDS.items() if kind.params is not None}


def in_blocks(last: str) -> str:
    """Return the list of the optimizers with state in any dtype and tier, `last` before its end."""
    *names, end = (
        name for name, k in KINDS.items() if k.steps == "blocks" and k.made_by[:4] != "mup:"
    )
    return f"{', '.join(names)} {last} {end}"


def canonical_type(name: Any) -> Any:
    """Return a built-in optimizer's canonical spelling; other names are unchanged."""
    if not isinstance(name, str):
        return name
    return next((known for known in built_in() if known.lower() == name.lower()), name)


class Optimizer(Typed):
    """The optimizer and its arguments. Not used if the program passes its own optimizer."""

    types = built_in()
    torch_types = tuple(KINDS)
    home = "torch.optim"
    leftovers: ClassVar[Mapping[str, str]] = {
        "adam_w_mode": 'ignored here, also by DeepSpeed: it acts in "params"'
    }

    type: Annotated[Text, BeforeValidator(canonical_type)] = key(
        None,
        f"One of {', '.join(built_in())} in any case, or the exact name of a class in torch.optim.",
    )
    params: dict[str, Any] = key({}, "Arguments of the optimizer; see the table for its type.")
    legacy_fusion: Boolean = key(
        False, "Use an older fused kernel. There is only one kernel.", mark=NO_EFFECT
    )

    @classmethod
    def params_of(cls, raw: Mapping[str, Any]) -> Params:
        """Return the section of params for the type, spelled in any case."""
        return super().params_of({"type": canonical_type(raw.get("type"))})

    @property
    def rates(self) -> list[float]:
        """Return the learning rates of this section: one for each param group, or the given one."""
        params = self.params
        kind = KINDS.get(self.type)
        if kind is not None and kind.rates:
            return [params.get(key, params.get("lr", rate)) for key, rate in kind.rates.items()]
        return [rate for rate in (params.get("lr"),) if isinstance(rate, (int, float))]
