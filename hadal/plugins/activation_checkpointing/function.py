"""`checkpoint`: a call that is recomputed in backward, its inputs stored as the options say."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint as _checkpoint

from hadal.comm import Ranks
from hadal.config.activation_checkpointing import ActivationCheckpointing
from hadal.plugins.activation_checkpointing.boundaries import BlockBoundaries, Boundaries
from hadal.plugins.activation_checkpointing.keeping import InputKeeper
from hadal.plugins.activation_checkpointing.random_states import TRACKER, recomputing_from

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
