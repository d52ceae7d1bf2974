"""`checkpoint`: a call that is recomputed in backward, its inputs stored as the options say.

Named random states of the device (Megatron's) let the parts of a model draw differently.
"""

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
from hadal.device import (
    Stamp,
    at_end_of_backward,
    current_device,
    graph_task,
    random_state,
    set_random_state,
    synchronize,
)
from hadal.errors import UsageError
from hadal.plugins.activation_checkpointing.keeping import InputKeeper

MODEL_PARALLEL = "model-parallel-rng"
"""The name of the state that differs between the parts of a model."""
_OFFSET = 2718  # Megatron's offset, so that seeds of parts differ from nearby seeds of programs


class CudaRNGStatesTracker:
    """Named random states; `fork` draws from one of them temporarily."""

    def __init__(self) -> None:
        self.states_: dict[str, Tensor] = {}
        self.seeds_: set[int] = set()

    def reset(self) -> None:
        """Remove all states."""
        self.states_ = {}
        self.seeds_ = set()

    def get_states(self) -> dict[str, Tensor]:
        """Return a copy of the table from name to state."""
        return dict(self.states_)

    def set_states(self, states: dict[str, Tensor]) -> None:
        """Restore such a table."""
        self.states_ = dict(states)

    def add(self, name: str, seed: int) -> None:
        """Create a state from a seed; the device's generator does not change.

        Raises:
            UsageError: the name or the seed is already in use.
        """
        if seed in self.seeds_ or name in self.states_:
            raise UsageError(
                f"add({name!r}, {seed}): the name or the seed is already used by one of"
                f" {sorted(self.states_)}; call reset() before creating states again"
            )
        before = _state()
        _seed(seed)
        self.states_[name] = _state()
        self.seeds_.add(seed)
        _set_state(before)

    @contextmanager
    def fork(self, name: str = MODEL_PARALLEL) -> Iterator[None]:
        """Draw from a named state inside the context; afterwards the generator is as before.

        Raises:
            UsageError: there is no state of that name.
        """
        if name not in self.states_:
            raise UsageError(
                f"fork({name!r}): no such random state, only {sorted(self.states_)};"
                " call model_parallel_cuda_manual_seed(seed) or add(name, seed) before"
            )
        before = _state()
        _set_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = _state()
            _set_state(before)


TRACKER = CudaRNGStatesTracker()
"""The one table of this process."""


def get_cuda_rng_tracker() -> CudaRNGStatesTracker:
    """Return this process's tracker."""
    return TRACKER


def seed_parts(seed: int, part: int) -> None:
    """Seed the generator equally on all parts of the model, and one named state per part."""
    TRACKER.reset()
    torch.manual_seed(seed)
    TRACKER.add(MODEL_PARALLEL, seed + _OFFSET + part)


def reseed_parts(seed: int, part: int) -> None:
    """Recreate this part's named state from a seed; every other state is unchanged."""
    states, seeds = TRACKER.get_states(), set(TRACKER.seeds_)
    states.pop(MODEL_PARALLEL, None)
    TRACKER.reset()
    TRACKER.add(MODEL_PARALLEL, seed + _OFFSET + part)
    TRACKER.set_states({**states, **TRACKER.get_states()})
    TRACKER.seeds_ |= seeds


@contextmanager
def recomputing_from(states: dict[str, Tensor]) -> Iterator[None]:
    """Draw the same numbers from these states again inside the context; then restore them."""
    before = TRACKER.get_states()
    TRACKER.set_states(states)
    try:
        yield
    finally:
        TRACKER.set_states(before)


def _state() -> Tensor:
    """Return the state of the device's generator; on a CPU, of the host's."""
    state = random_state(current_device())
    return torch.get_rng_state() if state is None else state


def _set_state(state: Tensor) -> None:
    if random_state(current_device()) is None:
        torch.set_rng_state(state)
    else:
        set_random_state(state, current_device())


def _seed(seed: int) -> None:
    """Seed the device's generator; on a CPU, the host's."""
    device = current_device()
    (torch if device.type == "cpu" else torch.get_device_module(device)).manual_seed(seed)


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
            synchronizes=self.options.synchronize_checkpoint_boundary, profiles=self.options.profile
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
            for tensor in tensors:
                if tensor.requires_grad:
                    hook = tensor.register_hook(block._end)
                    if tensor.is_leaf:  # it outlives the graph
                        block._hooks.append(hook)
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
            self._block._begun = self._block._home.reach(self._block._device)
            self._block._home.report_at_end()
        self._inside = ExitStack()
        if self._context is not None:
            self._inside.enter_context(self._context)
        if self._states:
            self._inside.enter_context(recomputing_from(self._states))

    def __exit__(self, *raised: Any) -> None:
        self._inside.__exit__(*raised)
