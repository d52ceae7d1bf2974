"""Eigenvalues of blocks during training (`eigenvalue`)."""

from __future__ import annotations

import copy
import logging
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from hadal.comm.collectives import sum_
from hadal.comm.faults import raised_on_all
from hadal.config.compression import Eigenvalue
from hadal.errors import UsageError
from hadal.listener import Forward, Listener, Setting, Update
from hadal.plugins.compression.training import (
    CompressionTechniques,
    PowerIteration,
    blocks_of,
    dominant_eigenvalue,
    relative,
)

_log = logging.getLogger(__name__)
_LABEL = "the sum of the eigenvalues of blocks"
LossOf = Callable[[Any], Tensor]
"""Returns the loss of a forward's output."""


class BlockEigenvalues(Listener):
    """Computes the dominant eigenvalue of each block's Hessian before some of the updates.

    It runs the last micro-batch through a copy of the model that shares the weights but has none
    of the engine's hooks, so gradients and the training graph do not change. At stage 3 all
    weights are gathered for it.
    """

    name = "eigenvalue"

    def __init__(self, section: Eigenvalue | None, setting: Setting) -> None:
        """Find the blocks that the section names, or that of `quantize_training`.

        The latter computes only before updates after which a weight has fewer bits.

        Raises:
            UsageError: the model has no such blocks, or is split over several ranks.
        """
        path, old = self.name, setting.config.quantize_training
        if old is not None and old.enabled and old.eigenvalue.enabled:
            section, path = old.eigenvalue, "quantize_training.eigenvalue"
        assert section is not None  # one of the two is on
        if setting.is_split:
            raise UsageError(
                f"{path}: a block's second derivatives are not built yet for a model, or sequences,"
                f" that are split over several ranks; switch {path} off"
            )
        self._section = section
        self._path = path
        self._setting = setting
        self._rule = PowerIteration(section.max_iter, section.tol, section.stability)
        blocks_of(setting.model, section.layer_name, section.layer_num, f"{path}.")
        self._engine: weakref.ref[Any] | None = None
        self._batch: Forward | None = None
        self._is_fresh = False
        self.loss_of: LossOf | None = None
        """Returns the loss of a forward's output; None: the output is the loss, or has it."""
        self.values: list[float] = []
        """Each block's last eigenvalue, the mean over the ranks."""

    @property
    def relative(self) -> list[float]:
        """The magnitude of each block's last eigenvalue relative to the largest."""
        return relative(self.values)

    def relative_of(self, name: str) -> float | None:
        """Return the relative value of the block that has, or is, a module; None: there is none."""
        for number, value in enumerate(self.relative):
            if f"{name}.".startswith(f"{self._section.layer_name}.{number}."):
                return value
        return None

    def on_attach(self, engine: Any) -> None:
        """Keep the engine for its model."""
        self._engine = weakref.ref(engine)

    def before_forward(self, forward: Forward) -> None:
        """Keep the batch if its update is due."""
        engine = None if self._engine is None else self._engine()
        if forward.is_training and engine is not None and self._is_due(engine):
            self._batch = forward

    def _is_due(self, engine: Any) -> bool:
        if (engine.global_steps + 1) % self._section.gas_boundary_resolution:
            return False
        if self._path == self.name:
            return True
        found = [one for one in engine.listeners if isinstance(one, CompressionTechniques)]
        return any(one.loses_bits_next for one in found)

    def before_update(self, gradients: Mapping[str, Tensor]) -> None:
        """Compute the eigenvalues if the update is due."""
        del gradients
        batch, self._batch = self._batch, None
        engine = None if self._engine is None else self._engine()
        if engine is None or not self._is_due(engine):
            return
        setting, ranks = self._setting, self._setting.data_parallel
        with (
            torch.enable_grad(),
            setting.gathered(setting.model.parameters()),
            raised_on_all(ranks, "eigenvalue", UsageError),
        ):
            values = self._computed(batch)
        total = torch.tensor(values, dtype=torch.float64)
        sum_(total, ranks, _LABEL)
        self.values = (total / ranks.size).tolist()
        self._is_fresh = True
        if self._section.verbose and ranks.rank == 0:
            for number, value in enumerate(self.values):
                _log.info("update %d: block %d: %.6g", engine.global_steps + 1, number, value)

    def _computed(self, batch: Forward | None) -> list[float]:
        if batch is None:
            raise UsageError(
                "eigenvalue: the update had no forward in training mode; call engine.train() before"
                " it"
            )
        section, setting = self._section, self._setting
        model = _without_hooks(setting.model)
        # Attention's fused kernels have no second derivative.
        device = setting.device
        devices = [] if device.type == "cpu" else [device]
        kept = torch.random.fork_rng(devices, device_type=device.type)
        with kept, sdpa_kernel(SDPBackend.MATH):
            output = setting.forward(model, batch.args, batch.kwargs)
            loss = _loss_of(output) if self.loss_of is None else self.loss_of(output)
            blocks = blocks_of(model, section.layer_name, section.layer_num)
            parameters = [[p for p in block.parameters() if p.requires_grad] for block in blocks]
            _expect_trained(parameters, f"{self._path}.layer_name", section.layer_name)
            flat = [p for own in parameters for p in own]
            try:
                found = torch.autograd.grad(loss, flat, create_graph=True, allow_unused=True)
                grads = {p: g for p, g in zip(flat, found, strict=True) if g is not None}
                _expect_gradients(parameters, grads, section.layer_name)
                return [self._value({p: grads[p] for p in own if p in grads}) for own in parameters]
            except RuntimeError as error:
                raise UsageError(
                    f"eigenvalue: a part of {type(setting.model).__name__} has no second"
                    f" derivative ({error}); use plain torch operations there, no reentrant"
                    " recomputation, or switch eigenvalue off"
                ) from error

    def _value(self, gradients: dict[nn.Parameter, Tensor]) -> float:
        curved = {p: g for p, g in gradients.items() if g.requires_grad}
        return dominant_eigenvalue([*curved], [*curved.values()], self._rule) if curved else 0.0

    def after_update(self, update: Update) -> None:
        """Write the eigenvalues to the monitors."""
        if not self._is_fresh:
            return
        self._is_fresh = False
        if self._setting.write_events is not None:
            self._setting.write_events(
                [
                    (f"Train/Eigenvalues/ModelBlockParam_{number}", value, update.total_samples)
                    for number, value in enumerate(self.relative)
                ]
            )

    def on_error(self, error: BaseException) -> None:
        """Forget the batch."""
        self._batch = None

    def state_dict(self) -> Mapping[str, Any]:
        """Return the last eigenvalues."""
        return {"values": self.values}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Show those of a checkpoint."""
        self.values = [float(value) for value in state["values"]]


def _without_hooks(model: nn.Module) -> nn.Module:
    """Return a copy that shares the parameters' memory, without the engine's hooks.

    Raises:
        UsageError: something in the model cannot be copied.
    """
    memo: dict[int, Any] = {
        id(p): nn.Parameter(p.detach(), p.requires_grad) for p in model.parameters()
    }
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:
        raise UsageError(
            f"eigenvalue computes on a copy of {type(model).__name__}, which cannot be copied"
            f" ({error}); move that attribute out of the module, or disable eigenvalue"
        ) from error


def _expect_trained(parameters: list[list[nn.Parameter]], path: str, name: str) -> None:
    if not any(parameters):
        raise UsageError(
            f"{path}: no parameter of the blocks of {name} requires gradients; unfreeze a block,"
            " name another list, or switch eigenvalue off"
        )


def _expect_gradients(
    parameters: list[list[nn.Parameter]], gradients: Mapping[nn.Parameter, Tensor], name: str
) -> None:
    for number, own in enumerate(parameters):
        if own and not any(parameter in gradients for parameter in own):
            raise UsageError(
                f"eigenvalue: no second derivative for {name}.{number}: the loss does not depend on"
                " it, or an operation in between cannot be differentiated twice; recompute with"
                " use_reentrant=False, let no layer be skipped, or switch eigenvalue off"
            )


def _loss_of(output: Any) -> Tensor:
    found = getattr(output, "loss", output)
    if isinstance(found, Mapping):
        found = found.get("loss")
    if isinstance(found, tuple | list) and found:
        found = found[0]
    if not isinstance(found, Tensor) or found.numel() != 1 or not found.requires_grad:
        raise UsageError(
            "eigenvalue needs the loss, and the model's forward returned"
            f" {type(output).__name__}; return the loss (or first, or as .loss), or set"
            " engine.eigenvalues.loss_of to a function of the output"
        )
    return found.reshape(())
