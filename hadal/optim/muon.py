"""Muon (Jordan 2024) for hidden matrices, with Adam for all other parameters.

For a matrix W with the mean gradient G and the momentum M,

    M <- momentum * M + (1 - momentum) * G
    U  = orthogonalized((1 - momentum) * G + momentum * M)          (Nesterov)
    W <- (1 - lr * weight_decay) * W - lr * sqrt(max(1, rows / columns)) * U

A parameter of more than two dimensions is a matrix of its first dimension by all others. Adam is
that of Kingma & Ba (2015), with decoupled weight decay (Loshchilov & Hutter 2019).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hadal.config.optimizer import MUON_RATES
from hadal.errors import OptimizerError, expect_one_of
from hadal.optim.elementwise import Block, Group, OwnOptimizer, Scaling, begin_adam, count_up
from hadal.optim.step import OptimizerStepper, as_one_step
from hadal.optim.workspace import Multiplier, block_numel, scale_
from hadal.zero.gradients import Gradients

# Parameters with one of these words in their names are looked up by row, or produce logits: they
# do not map hidden states to hidden states.
_NO_HIDDEN_MATRIX = ("embed", "lm_head")
# The odd polynomial a x + b x^3 + c x^5, chosen by Jordan (2024) to be steep at 0: applied five
# times, it brings every singular value above about 0.002 to between 0.7 and 1.2.
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_STEPS = 5
_TINY = 1e-7
METHODS = ("gram", "standard")


class Muon(OwnOptimizer):
    """Muon over whole parameters, in groups with `use_muon`: True for matrices, False for Adam.

    `muon_groups` builds such groups from a model's names. State of a matrix: `momentum_buffer`; of
    any other tensor: `exp_avg`, `exp_avg_sq` (its shape and dtype) and `step`.

    Args:
        params: param groups; one without its own learning rate uses the first given of `muon_lr`
            (or `adam_lr`), `lr` and 0.02 (or 3e-4).
        lr: see `params`.
        momentum: the momentum of matrices.
        weight_decay: decoupled weight decay, for both kinds.
        muon_lr: see `params`.
        adam_lr: see `params`.
        betas: decay of Adam's moments.
        eps: added to Adam's denominator.
        ns_method: "standard" iterates on the matrix, in bfloat16 on an accelerator; "gram" on its
            smaller Gram matrix, in float32; None: "gram" on CPUs, "standard" on accelerators.

    Raises:
        OptimizerError: a group without `use_muon`, or with it for a vector; an unknown `ns_method`.
    """

    def __init__(  # noqa: PLR0913 - one argument for each key of its section
        self,
        params: Any,
        lr: float | None = None,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        muon_lr: float | None = None,
        adam_lr: float | None = None,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-10,
        ns_method: str | None = None,
    ) -> None:
        expect_one_of((None, *METHODS), "Muon's ns_method", ns_method, OptimizerError)
        self._rates = {
            True: _first_of(muon_lr, lr, MUON_RATES["muon_lr"]),
            False: _first_of(adam_lr, lr, MUON_RATES["adam_lr"]),
        }
        defaults = {
            "momentum": momentum,
            "weight_decay": weight_decay,
            "betas": tuple(betas),
            "eps": eps,
            "ns_method": ns_method,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, which must have `use_muon`."""
        use_muon = param_group.get("use_muon")
        if not isinstance(use_muon, bool):
            raise OptimizerError(
                f"a param group of Muon has use_muon {use_muon!r}: use True for matrices, which"
                " Muon steps, or False for parameters that Adam steps"
            )
        if param_group.get("lr") is None:
            param_group["lr"] = self._rates[use_muon]
        super().add_param_group(param_group)
        shapes = [tuple(p.shape) for p in param_group["params"] if use_muon and p.dim() < 2]
        if shapes:
            self.param_groups.pop()
            raise OptimizerError(
                f"a param group with use_muon True holds a parameter of shape {shapes[0]}; Muon"
                " steps matrices: put it into a group with use_muon False"
            )

    def step_parameter(self, parameter: nn.Parameter, gradient: Tensor, group: Group) -> None:
        """Make one update of a whole parameter."""
        if group["use_muon"]:
            self.step_matrix(parameter, gradient, group)
        else:
            self.step_flat(parameter, gradient, 1.0, group)

    def step_matrix(self, parameter: nn.Parameter, gradient: Tensor, group: Group) -> None:
        """Make one update of a whole matrix."""
        values = parameter.detach()
        if not values.numel():
            return
        state, momentum = self.state[parameter], group["momentum"]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(values)
        update, scale = direction_of(
            gradient, state["momentum_buffer"], momentum, group["ns_method"]
        )
        values.mul_(1 - group["lr"] * group["weight_decay"])
        values.add_(update, alpha=-group["lr"] * scale)

    def step_flat(
        self, parameter: nn.Parameter, mean: Tensor, multiplier: Multiplier, group: Group
    ) -> None:
        """Make one update with Adam from `mean` times `multiplier`, in blocks."""
        values, state = parameter.detach(), self.state[parameter]
        plain = {**group, "amsgrad": False, "maximize": False}
        update = begin_adam(plain, state, lambda: torch.zeros_like(values), decoupled=True)
        count_up([update])
        runs = [mean, values, *update.state]
        if not all(run.is_contiguous() for run in runs):
            blocks = [runs]  # a whole parameter of other strides
        else:
            cuts = (run.view(-1).split(block_numel(values.device)) for run in runs)
            blocks = [[*each] for each in zip(*cuts, strict=True)]
        for given, block, *owned in blocks:
            gradient = scale_(given.to(values.dtype, copy=True), multiplier)
            update.apply([Block(block, gradient, owned, update.number)], Scaling())


def _first_of(*rates: float | None) -> float:
    return next(rate for rate in rates if rate is not None)


def direction_of(
    gradient: Tensor, remembered: Tensor, momentum: float, method: str | None
) -> tuple[Tensor, float]:
    """Add a matrix's gradient to its momentum; return the update's direction and its scale."""
    ahead = gradient.lerp(remembered.lerp_(gradient, 1 - momentum), momentum).flatten(1)
    rows, columns = ahead.shape
    return orthogonalized(ahead, method).view(gradient.shape), max(1.0, rows / columns) ** 0.5


def orthogonalized(matrix: Tensor, method: str | None) -> Tensor:
    """Bring the singular values of a 2-D matrix near 1 by five Newton-Schulz steps (Jordan 2024).

    "standard" iterates on the matrix: X <- a X + b (X X') X + c (X X')^2 X. "gram" iterates on
    G = X X' of the smaller side, and applies the product of all steps once: mathematically the
    same, with fewer products if the matrix is far from square. Returns the matrix's dtype.
    """
    method = method or ("gram" if matrix.device.type == "cpu" else "standard")
    wide = matrix.mT if matrix.size(0) > matrix.size(1) else matrix
    work = wide.to(_work_dtype(wide, method))
    work = work / (work.norm() + _TINY)
    result = (_iterate_gram if method == "gram" else _iterate)(work).to(matrix.dtype)
    return result.mT if matrix.size(0) > matrix.size(1) else result


def _work_dtype(matrix: Tensor, method: str) -> torch.dtype:
    # On an accelerator the standard iteration runs in bfloat16, as published. A Gram matrix holds
    # squares of singular values, which need float32. On a CPU 16 bits save no time.
    if matrix.device.type == "cpu" or method == "gram":
        return torch.promote_types(matrix.dtype, torch.float32)
    return torch.bfloat16


def _iterate(work: Tensor) -> Tensor:
    a, b, c = _COEFFICIENTS
    for _ in range(_STEPS):
        gram = work @ work.mT
        work = torch.addmm(work, torch.addmm(gram, gram, gram, beta=b, alpha=c), work, beta=a)
    return work


def _iterate_gram(work: Tensor) -> Tensor:
    a, b, c = _COEFFICIENTS
    gram = work @ work.mT
    product: Tensor | None = None
    for number in range(_STEPS):
        factor = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        factor.diagonal().add_(a)
        product = factor if product is None else factor @ product
        if number < _STEPS - 1:
            # All of these are polynomials of one matrix, so their order does not matter.
            gram = factor @ gram @ factor
    assert product is not None  # there is at least one step
    return product @ work


def muon_groups(chosen: Iterable[Any], names: Mapping[nn.Parameter, str]) -> list[dict[str, Any]]:
    """Build param groups for `Muon` from parameters, or param groups, of a model.

    A group is divided if it holds both hidden matrices (two or more dimensions, and neither
    "embed" nor "lm_head" in the lower-cased full name) and other parameters; a group with its own
    `use_muon` is left unchanged.

    Args:
        chosen: parameters, (name, parameter) pairs, or param groups of these.
        names: the full name of each of the model's parameters.
    """
    given = list(chosen)
    groups = given if given and isinstance(given[0], dict) else [{"params": given}]
    made: list[dict[str, Any]] = []
    for group in groups:
        if "use_muon" in group:
            made.append(group)
            continue
        members = group["params"]
        members = [members] if isinstance(members, Tensor) else list(members)
        for use_muon in (True, False):
            mine = [one for one in members if _is_hidden_matrix(one, names) == use_muon]
            if mine:
                made.append({**group, "params": mine, "use_muon": use_muon})
    return made


def _is_hidden_matrix(member: Any, names: Mapping[nn.Parameter, str]) -> bool:
    parameter = member[1] if isinstance(member, tuple) else member
    name = names.get(parameter, "").lower()
    return parameter.dim() >= 2 and not any(word in name for word in _NO_HIDDEN_MATRIX)


class MuonStepper(OptimizerStepper):
    """A stepper of Muon: each matrix whole on one rank, other parameters as slices on all ranks."""

    _optimizer: Muon

    def _is_whole(self, group: int) -> bool:
        return bool(self._optimizer.param_groups[group]["use_muon"])

    def step(self, multiplier: Multiplier) -> None:
        """Make one update with the mean gradients times `multiplier`.

        Raises:
            OffloadError: the disk failed on some rank; nothing has changed on any rank.
        """

        def step(gradients: Sequence[Gradients]) -> None:
            for one in gradients:
                for piece in self._wholes.pieces(one):
                    gradient = piece.values.grad
                    assert gradient is not None  # `to_owners` has put it there
                    self._optimizer.step_matrix(piece.values, gradient, self._group(piece))
                for piece in self._pieces[one]:
                    mean = one.mean[piece.start : piece.stop]
                    self._optimizer.step_flat(piece.values, mean, multiplier, self._group(piece))

        with as_one_step(self._optimizer):
            self._step_whole_buckets(multiplier, step, at_once=False)
