"""How an optimizer is stepped; elementwise ones on flat cuts, each byte read and written once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hadal.comm.pending import Pending
from hadal.device import has_fused_kernels
from hadal.errors import OptimizerError
from hadal.optim.elementwise import Beginner, ElementwiseOptimizer
from hadal.optim.fused import BEGINNERS
from hadal.optim.pieces import Held, Piece, held_pieces, lay_pieces
from hadal.zero.bucket import Bucket
from hadal.zero.gradients import Gradients

# Elements that are cast, scaled, stepped and written back together: on a CPU so few that a gradient
# in float32 stays in the cache between these, on an accelerator enough to keep it busy.
_CPU_BLOCK_NUMEL = 1 << 19
_ACCELERATOR_BLOCK_NUMEL = 1 << 25


def block_numel(device: torch.device) -> int:
    """How many elements are worked on at a time."""
    return _CPU_BLOCK_NUMEL if device.type == "cpu" else _ACCELERATOR_BLOCK_NUMEL


class Stepper(Protocol):
    """Steps an optimizer once per update and leaves the new weights in the buckets."""

    def step(self, multiplier: float) -> None:
        """Make one update with the mean gradients times `multiplier`."""

    def add(self, gradients: Sequence[Gradients], members: Sequence[nn.Parameter]) -> None:
        """Take up the buckets of the newest param group, whose parameters are `members`."""

    def values_of(self, parameter: nn.Parameter) -> nn.Parameter | None:
        """The whole values that stand for a parameter in the optimizer, if this rank owns them."""

    def held(self) -> Iterator[Held]:
        """All that the optimizer has in its param groups on this rank."""


class FlatStepper:
    """Steps elementwise optimizers on flat cuts of the master: one tensor per group and bucket."""

    def __init__(self, optimizer: Optimizer, gradients: Sequence[Gradients]) -> None:
        self._optimizer = optimizer
        self._gradients = list(gradients)
        for group in optimizer.param_groups:
            group["params"] = []
        self._pieces = {one: lay_pieces(optimizer, one) for one in gradients}

    def add(self, gradients: Sequence[Gradients], members: Sequence[nn.Parameter]) -> None:
        """Take up the buckets of the newest param group."""
        self._optimizer.param_groups[-1]["params"] = []
        self._gradients += gradients
        self._pieces |= {one: lay_pieces(self._optimizer, one) for one in gradients}

    def step(self, multiplier: float) -> None:
        """Make one update with the mean gradients times `multiplier`."""
        begin = _beginner_of(self._optimizer, self._gradients)
        if begin is None:
            refuse_other_state_dtype(self._optimizer, self._gradients)
            self._step_at_once(multiplier)
        else:
            self._step_in_blocks(begin, multiplier)

    def values_of(self, parameter: nn.Parameter) -> nn.Parameter | None:
        """None: the optimizer has flat cuts of the masters, and no parameter for itself."""
        return None

    def held(self) -> Iterator[Held]:
        """The flat cuts."""
        for one, pieces in self._pieces.items():
            yield from held_pieces(one.bucket, pieces)

    def _step_in_blocks(self, begin: Beginner, multiplier: float) -> None:
        """Cast, scale, step and write back a cache-sized block at a time."""
        refreshing: list[Pending | None] = []
        desk = _Desk(self._gradients[0].bucket.device, multiplier)
        for one in self._gradients:
            for piece in self._pieces[one]:
                self._step_piece(one, piece, begin, desk)
            refreshing.append(one.bucket.start_refresh())
        # A scheduler that was made by torch asks whether the optimizer has stepped.
        self._optimizer._opt_called = True  # type: ignore[attr-defined]
        wait_all(refreshing)

    def _step_piece(self, one: Gradients, piece: Piece, begin: Beginner, desk: _Desk) -> None:
        values, bucket = piece.values.detach(), one.bucket

        def zeros() -> Tensor:
            return torch.zeros_like(values, dtype=bucket.precision.state_dtype)

        group = self._optimizer.param_groups[piece.group]
        update = begin(group, self._optimizer.state[piece.values], zeros)
        runs = (one.mean[piece.start : piece.stop], values, *update.state)
        exact = reduce(torch.promote_types, [run.dtype for run in runs])
        if update.in_float32:
            exact = torch.promote_types(exact, torch.float32)
        start = piece.start
        for given, *owned in zip(*(run.split(desk.numel) for run in runs), strict=True):
            gradient, divisor = desk.lay_gradient(given, exact)
            work = [desk.lay(place, block, exact) for place, block in enumerate(owned)]
            update.apply(work[0], gradient, work[1:], divisor)
            for block, laid in zip(owned, work, strict=True):
                if laid is not block:
                    block.copy_(laid)
            bucket.write_back(start, start + given.numel())
            start += given.numel()

    def _step_at_once(self, multiplier: float) -> None:
        """Whatever does not step in blocks: its own `step`, once, on all pieces."""
        for one in self._gradients:
            for piece in self._pieces[one]:
                gradient = one.mean[piece.start : piece.stop].to(piece.values.dtype)
                # The mean itself may be scaled: it is not read again.
                piece.values.grad = gradient if multiplier == 1.0 else gradient.mul_(multiplier)
        self._optimizer.step()
        for piece in chain.from_iterable(self._pieces.values()):
            piece.values.grad = None
        refresh(one.bucket for one in self._gradients)


class _Desk:
    """Where the blocks of one update are worked on: a buffer for each that must be cast."""

    def __init__(self, device: torch.device, multiplier: float) -> None:
        self.numel = block_numel(device)
        self._device = device
        self._multiplier = multiplier
        # 0 stands for a gradient that is infinite: x / inf is what x * 0 is.
        inverse = 1 / multiplier if multiplier else float("inf")
        self._divisor = torch.full((), inverse, dtype=torch.float32, device=device)
        self._buffers: dict[tuple[int, torch.dtype], Tensor] = {}

    def lay(self, place: int, block: Tensor, dtype: torch.dtype) -> Tensor:
        """The block in `dtype`: itself, or a copy that lasts until the next of this place."""
        if block.dtype == dtype:
            return block
        buffer = self._buffers.get((place, dtype))
        if buffer is None or buffer.numel() < block.numel():
            buffer = torch.empty(block.numel(), dtype=dtype, device=self._device)
            self._buffers[place, dtype] = buffer
        return buffer[: block.numel()].copy_(block)

    def lay_gradient(self, block: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """A gradient in `dtype`, and what it is still to be divided by."""
        laid = self.lay(-1, block, dtype)
        if self._multiplier == 1.0:
            return laid, None
        if dtype == torch.float64:
            # A divisor of float32 would be too coarse.
            return laid.mul_(self._multiplier), None
        return laid, self._divisor


def refuse_other_state_dtype(optimizer: Optimizer, gradients: Sequence[Gradients]) -> None:
    """Raise `OptimizerError` where state should not be kept in the master's dtype, but must be."""
    for one in gradients:
        precision = one.bucket.precision
        if precision.state_dtype != precision.master:
            raise OptimizerError(
                f"{type(optimizer).__name__} keeps its state in the dtype of the master"
                f" ({precision.master}), and the configuration asks for {precision.state_dtype};"
                " choose Adam, AdamW, Lion, Adagrad or SGD (without step hooks, and without"
                " foreach or capturable), or one dtype for both"
            )


def _beginner_of(optimizer: Optimizer, gradients: Sequence[Gradients]) -> Beginner | None:
    """What steps this optimizer in blocks, if that does exactly what its own step would do."""
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return None
    if isinstance(optimizer, ElementwiseOptimizer):
        return optimizer.begin
    begin = BEGINNERS.get(type(optimizer))
    fits = all(_is_fused(group) for group in optimizer.param_groups)
    has_kernels = all(has_fused_kernels(one.bucket.device) for one in gradients)
    return begin if fits and has_kernels else None


def _is_fused(group: dict[str, Any]) -> bool:
    """Whether a group asks for no other implementation than torch's fused one."""
    if group.get("capturable"):
        return False
    return bool(group.get("fused")) or (group.get("fused") is None and not group.get("foreach"))


def refresh(buckets: Iterable[Bucket]) -> None:
    """Put masters that were stepped anywhere into the weights, and gather these where asked."""
    refreshing: list[Pending | None] = []
    for bucket in buckets:
        bucket.write_back(0, bucket.span[1] - bucket.span[0])
        refreshing.append(bucket.start_refresh())
    wait_all(refreshing)


def wait_all(pendings: Iterable[Pending | None]) -> None:
    """Wait for every collective that was started; None stands for one that was not needed."""
    for pending in pendings:
        if pending is not None:
            pending.wait()


@contextmanager
def as_one_step(optimizer: Optimizer) -> Iterator[None]:
    """Around an update that is not made by the optimizer's own `step`: whoever watches that hears.

    The user's step hooks are called, and a scheduler of torch's learns that there was a step.
    """
    for before in [*optimizer._optimizer_step_pre_hooks.values()]:
        before(optimizer, (), {})
    yield
    optimizer._opt_called = True  # type: ignore[attr-defined]
    for after in [*optimizer._optimizer_step_post_hooks.values()]:
        after(optimizer, (), {})
