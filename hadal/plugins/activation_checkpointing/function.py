"""`checkpoint`: a call that is recomputed in backward, its inputs stored as the options say."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint as _checkpoint
from torch.utils.hooks import RemovableHandle

from hadal.comm import Ranks
from hadal.config.activation_checkpointing import ActivationCheckpointing
from hadal.device import Stamp, at_end_of_backward, graph_task, synchronize
from hadal.plugins.activation_checkpointing.keeping import InputKeeper
from hadal.plugins.activation_checkpointing.random_states import TRACKER, recomputing_from

_log = logging.getLogger(__name__)


class Boundaries:
    """Calls before and after the forward and backward of each recomputed block."""

    def __init__(self, *, synchronizes: bool, profiles: bool) -> None:
        self._synchronizes = synchronizes
        self._profiles = profiles
        self._blocks: weakref.WeakSet[BlockBoundaries] = weakref.WeakSet()
        self._spans: list[tuple[str, int, Stamp, Stamp]] = []
        self._number = 0
        self._task = -1

    def block(self, inputs: list[Tensor]) -> BlockBoundaries | None:
        """Return the boundaries of another block, or None if nothing happens at them."""
        if not (self._synchronizes or self._profiles) or not inputs:
            return None
        self._number += 1
        return BlockBoundaries(self, self._number, inputs[0].device)

    def reach(self, device: torch.device) -> Stamp:
        """Pass a boundary; return its time."""
        if self._synchronizes:
            synchronize(device, "the boundary of a recomputed block")
        return Stamp(device)

    def add(self, name: str, number: int, begun: Stamp, ended: Stamp) -> None:
        """Record the time of a block's forward or backward, if times are logged."""
        if self._profiles:
            self._spans.append((name, number, begun, ended))

    def report_at_end(self) -> None:
        """Log the times at the end of the running backward."""
        if self._profiles and self._task != graph_task():
            self._task = graph_task()
            at_end_of_backward(self.report)

    def report(self) -> None:
        """Log the times so far; waits for the device."""
        spans, self._spans = self._spans, []
        self._number, self._task = 0, -1
        for name, number, begun, ended in spans:
            if not ended.is_reached:
                synchronize(torch.accelerator.current_accelerator() or torch.device("cpu"))
            milliseconds = ended.seconds_since(begun) * 1000
            _log.info("recomputed block %d: %s %.3f ms", number, name, milliseconds)


class BlockBoundaries:
    """The boundaries of one recomputed block."""

    def __init__(self, home: Boundaries, number: int, device: torch.device) -> None:
        self._home = home
        self._number = number
        self._device = device
        self._begun: Stamp | None = None
        self._hooks: list[RemovableHandle] = []

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Wrap the block's forward."""
        begun = self._home.reach(self._device)
        yield
        self._home.add("fwd", self._number, begun, self._home.reach(self._device))

    def begin_backward(self) -> None:
        """Begin the block's backward, whose first part is the recomputation."""
        self._begun = self._home.reach(self._device)
        self._home.report_at_end()

    def end_at(self, inputs: Sequence[Tensor]) -> None:
        """Let the first complete gradient of an input end the block's backward.

        A node of the graph would do so too, but gradients of an input that other blocks use as well
        would then be summed in another order.
        """
        for tensor in inputs:
            if tensor.requires_grad:
                hook = tensor.register_hook(self._end)
                if tensor.is_leaf:  # it outlives the graph
                    self._hooks.append(hook)

    def _end(self, _: Tensor) -> None:
        begun, self._begun = self._begun, None
        if begun is not None:
            self._home.add("backward", self._number, begun, self._home.reach(self._device))
        while self._hooks:
            self._hooks.pop().remove()


Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
"""Around a call's forward, and around its recomputation."""


class Recomputation:
    """Recomputed calls with one set of options; each call's random numbers are drawn again."""

    def __init__(
        self, options: ActivationCheckpointing | None = None, ranks: Ranks | None = None
    ) -> None:
        """Set the options.

        Args:
            options: the section `activation_checkpointing`; None stores inputs as they are.
            ranks: the tensor-parallel ranks, which share inputs if `partition_activations`.
        """
        self.options = options or ActivationCheckpointing()
        self._keeper = InputKeeper(self.options, ranks)
        self._boundaries = Boundaries(
            synchronizes=self.options.synchronize_checkpoint_boundary,
            profiles=self.options.profile,
        )

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return `function(*args, **kwargs)`, and recompute it in backward; see `run`."""
        return self.run(function, args, kwargs)

    def run(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        around: Callable[[list[Tensor]], Contexts] | None = None,
    ) -> Any:
        """Return `function(*args, **kwargs)`, and recompute it in backward.

        `around` returns contexts of the forward and of its recomputation, from the tensors stored.

        Tensors among `args`, and those in `kwargs` that require gradients, are stored as the
        options say; what is inside lists, tuples and dicts stays as it is.

        Raises:
            UsageError: more calls precede a backward than `number_checkpoints`.
        """
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        if torch.compiler.is_compiling():
            return call_compiled(function, *args, **kwargs)
        names = [name for name, value in kwargs.items() if _is_stored(value)]
        others = {name: value for name, value in kwargs.items() if name not in names}
        given = [*args, *(kwargs[name] for name in names)]
        count = len(args)
        tensors = [value for value in given if isinstance(value, Tensor)]
        block = self._boundaries.block(tensors)
        if block is not None:
            block.end_at(tensors)
        outer, inner = (None, None) if around is None else around(tensors)

        # Holds no stored tensor: only autograd does.
        def run(*values: Any) -> Any:
            named = dict(zip(names, values[count:], strict=True))
            return function(*values[:count], **others, **named)

        def contexts() -> Contexts:
            return _both(outer, None if block is None else block.forward()), _Again(block, inner)

        with self._keeper.around(tensors):
            return _checkpoint(run, *given, use_reentrant=False, context_fn=contexts)

    def reset(self) -> None:
        """Free the memory of inputs whose backward will not run, and the buffers kept for reuse."""
        self._keeper.reset()
        self._boundaries.report()


@contextmanager
def _both(
    outer: AbstractContextManager[Any] | None, inner: AbstractContextManager[Any] | None
) -> Iterator[None]:
    with outer or nullcontext(), inner or nullcontext():
        yield


def call_compiled(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return `function(*args, **kwargs)` in a graph that is being compiled.

    The compiler recomputes inside its graphs, and stores their inputs itself, as they are.
    """
    return _checkpoint(function, *args, use_reentrant=False, **kwargs)


def _is_stored(value: Any) -> bool:
    """Return whether a keyword argument is an activation; others are often shared by all blocks."""
    return isinstance(value, Tensor) and value.requires_grad


class _Again:
    """Context of a recomputation, which uses the forward's named random states.

    It may be entered again, if the graph is retained.
    """

    def __init__(
        self, block: BlockBoundaries | None, context: AbstractContextManager[Any] | None
    ) -> None:
        self._states = TRACKER.get_states()
        self._block = block
        self._context = context
        self._inside = ExitStack()

    def __enter__(self) -> None:
        if self._block is not None:
            self._block.begin_backward()
        self._inside = ExitStack()
        if self._context is not None:
            self._inside.enter_context(self._context)
        if self._states:
            self._inside.enter_context(recomputing_from(self._states))

    def __exit__(self, *raised: Any) -> None:
        self._inside.__exit__(*raised)
