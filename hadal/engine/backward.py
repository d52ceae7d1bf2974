"""Backward passes of an engine: those that it runs, and those that the caller starts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from hadal.engine.mistakes import used_up_graph
from hadal.engine.state import State
from hadal.engine.training import expect_training
from hadal.errors import HadalError, LossError, UsageError
from hadal.plugins.sequence.loss import as_parts


class Backwards:
    """Runner of backward passes: checks a loss on all ranks and calls listeners."""

    def __init__(self, state: State) -> None:
        self._state = state

    def run(self, loss: Tensor, retain_graph: bool, *, divides: bool) -> None:
        """Compute gradients of a loss; `divides`: by the micro-steps of an update."""
        state, hooks = self._state, self._state.parts.hooks
        with state.listeners:
            boundary = self._expect(
                lambda: self._check_loss(loss),
                "engine.backward(loss) was refused or not called on another rank, whose error says"
                " why; no rank has computed gradients",
            )
            sequence = state.parts.topology.sequence_parallel
            if sequence is not None:
                loss = as_parts(loss, sequence.group)
            factor = state.scale.scale
            self._count_factor(factor)
            if divides:
                factor /= state.batches.accumulation
            factor *= self._weight()
            exact = torch.promote_types(loss.dtype, torch.float32)
            scaled = loss if factor == 1.0 else loss.to(exact) * factor
            with self._around(boundary, loss.detach()):
                hooks.backward(scaled, retain_graph)

    def _weight(self) -> float:
        return math.prod(listener.loss_weight() for listener in self._state.listeners)

    @contextmanager
    def direct(self) -> Iterator[None]:
        """Wrap a backward that the caller has started on a tensor."""
        state = self._state
        where = f"rank {state.parts.ranks.rank}: loss.backward()"
        scaled, state.scaled = state.scaled, None
        scale = state.scale.scale

        def check() -> None:
            if not state.backwards:
                state.parts.sharded.check_late(where)
            if scale != 1.0 and scaled is None:
                raise UsageError(
                    f"{where} leaves out the loss scale ({scale}), without which fp16 gradients"
                    " vanish; call engine.scale(loss).backward(), or engine.backward(loss)"
                )
            if self._weight() != 1.0:
                raise UsageError(
                    f"{where} leaves out the weight of this micro-batch; call"
                    " engine.backward(loss), or set data_efficiency.data_sampling.dynamic_batching"
                    '.loss_weighting to "none"'
                )
            # The update divides by the micro-steps; only `run` divides the loss itself.
            self._count_factor(scale * state.batches.accumulation)

        with state.listeners:
            elsewhere = f"{where} was refused on another rank, whose error says why"
            with self._around(self._expect(check, elsewhere), scaled):
                yield

    @contextmanager
    def _around(self, boundary: bool, loss: Tensor | None) -> Iterator[None]:
        """Wrap a backward of `loss` (detached; None if unknown), and count it at the end."""
        state = self._state
        if state.training is None:
            expect_training(state)
        for listener in state.listeners:
            listener.before_backward()
        try:
            with state.parts.runtime.backward(boundary=boundary):
                yield
        except BaseException as error:
            state.forget_backwards()  # their gradients are dropped
            used_up = used_up_graph(str(error)) if isinstance(error, RuntimeError) else None
            if used_up is None:
                raise
            raise UsageError(f"rank {state.parts.ranks.rank}: {used_up}") from error
        state.backwards += 1
        state.collected += 1
        if loss is not None:
            state.losses.append(loss)
        for listener in state.listeners:
            listener.after_backward(loss)

    def _expect(self, check: Callable[[], None], elsewhere: str) -> bool:
        """Raise on every rank if `check` raises on one, so that no rank waits for it.

        Returns whether the backward is the last of an update, as far as that is known.
        """
        boundary = self._state.is_boundary and not self._state.unsynchronized
        fault: HadalError | None = None
        try:
            check()
        except HadalError as error:
            fault = error
        gathering = self._state.parts.runtime.gathering
        if gathering.any_fault(fault is not None, boundary=boundary):
            raise fault or LossError(elsewhere)
        return boundary

    def _count_factor(self, factor: float) -> None:
        """Note the factor that this backward's gradients carry."""
        state = self._state
        known = state.factor
        if known is not None and known != factor:
            raise UsageError(
                f"rank {state.parts.ranks.rank}: gradients of one update came from"
                " engine.backward(loss), which divides by the micro-steps, and from"
                " loss.backward(), which does not; use one of the two for all of its micro-steps"
            )
        state.factor = factor

    def _check_loss(self, loss: object) -> None:
        state = self._state
        where = f"rank {state.parts.ranks.rank}: engine.backward(loss)"
        if not state.parts.runtime.gradients:
            raise UsageError(
                f"{where} has nothing to train: no parameter of the model in the optimizer requires"
                " a gradient"
            )
        if not state.backwards:
            state.parts.sharded.check_late(where)
        if not isinstance(loss, Tensor):
            raise LossError(
                f"{where} expects a tensor, got {type(loss).__name__}; pass the loss itself, for"
                " example outputs.loss or outputs[0]"
            )
        if loss.numel() != 1:
            raise LossError(
                f"{where} expects a scalar, got a tensor of shape {tuple(loss.shape)}; reduce it"
                " first, for example loss.mean()"
            )
        if not loss.requires_grad:
            raise LossError(
                f"{where}: the loss does not depend on any trainable parameter; was it computed"
                " under torch.no_grad(), or detached?"
            )
