"""Updates of state on a disk, which is read, updated in memory and written part by part."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from hadal.comm import Ranks
from hadal.comm.faults import raised_on_all
from hadal.errors import CommunicationError, OffloadError
from hadal.offload.buffers import BufferPool, LooseBuffers
from hadal.offload.direct import cut
from hadal.offload.tensors import UNIT_NUMEL, DiskOverlap, DiskTensor, Stop, one_update, walk
from hadal.optim.elementwise import Beginner, SliceUpdate, count_up
from hadal.optim.pieces import Piece
from hadal.optim.state_on_disk import DiskState, backup_of
from hadal.optim.workspace import Item, Workspace, block_numel
from hadal.zero.bucket import Bucket
from hadal.zero.gradients import Gradients

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class DiskSteps:
    """Settings for updates of state on the disk."""

    numel: int = 1 << 24
    """The most elements of one kind of state that are updated at a time (a sub-group)."""
    buffer_count: int = 4
    """The number of sub-groups, in float32, that fit in all buffers."""
    overlap: DiskOverlap = field(default_factory=DiskOverlap)
    pins: bool = False
    """True if the buffers are pinned."""
    clears_first: bool = False
    """True if new state is written to the disk before the first update reads it."""

    def part_numel(self, runs: int, block: int) -> int:
        """Return the elements to read at a time, with `runs` values each, in whole blocks."""
        room = self.buffer_count * self.numel // (runs * self.overlap.parts)
        return max(1, min(room, self.numel) // block) * block


KeptPool = Callable[..., BufferPool]
"""A maker of pools for reading parts, which returns its last one if the arguments are the same.

In new memory each page is cleared and mapped first, which takes a considerable part of the disk's
time.
"""


@contextmanager
def update_on_disk(
    states: Sequence[DiskState], model_parallel: Ranks | None = None
) -> Iterator[None]:
    """Guard an update of these buckets. All ranks must reach its end, even after a failure.

    Args:
        states: their masters and state on the disk.
        model_parallel: the ranks that hold the model's other parts, if they share sums.

    Raises:
        OffloadError: the disk failed on some rank; nothing has changed on any rank.
    """
    take_back = backup_of(states)
    parts = nullcontext() if model_parallel is None else _raised_on_all(model_parallel)
    try:
        with (
            one_update(lambda: _runs_of(states)),
            parts,
            _raised_on_all(states[0].bucket.sharing.everyone),
        ):
            yield
    except BaseException as error:
        # Also on an interrupt by the user: an emergency checkpoint may follow.
        take_back()
        _restore_weights(states, error)
        raise
    for state in states:
        state.drop_unused()


def _raised_on_all(ranks: Ranks) -> AbstractContextManager[None]:
    return raised_on_all(ranks, "an update", OffloadError)


class Deferred:
    """The first fault of this rank in an update that all ranks must complete.

    A rank whose disk has failed takes part in the remaining exchanges with arbitrary values: the
    update is rolled back on all ranks in the end.
    """

    def __init__(self) -> None:
        self._fault: Exception | None = None

    def run(self, work: Callable[[], Result]) -> Result | None:
        """Return the result of `work`, which must not communicate; None once there is a fault."""
        if self._fault is None:
            try:
                return work()
            except Exception as fault:
                self._fault = fault
        return None

    def tell(self) -> None:
        """Raise the fault if there is one."""
        if self._fault is not None:
            raise self._fault


def step_on_disk(
    on_disk: Mapping[Gradients, DiskState],
    begin: Beginner,
    workspace: Workspace,
    steps: DiskSteps,
    pool_of: KeptPool,
) -> None:
    """Make one update of these buckets, part by part. All ranks must call it.

    Raises:
        OffloadError: the disk failed on some rank; nothing has changed on any rank.
    """
    numel = block_numel(torch.device("cpu"))
    with update_on_disk([*on_disk.values()]), rewriting_in_turn() as rewriting:
        begun = begin_on_disk(on_disk, begin, steps)
        count_up(update for pieces in begun.values() for _, update, _ in pieces)
        whole = {one: state.stop() for one, state in on_disk.items()}
        for one, stop, values in walk_parts(whole, numel, steps, pool_of):
            rewriting(one.bucket)
            one.bucket.absorb_edits_into(values[0], stop.start)
            for piece, update, runs in begun[one]:
                start, owned = of_piece(stop, values, piece, runs)
                for low, high in cut(start, start + owned[0].numel(), numel):
                    block = [run[low - start : high - start] for run in owned]
                    workspace.apply([Item(update, one.mean[low:high], block)])
                    one.bucket.put_weights(low, block[0], workspace.sending)


def _runs_of(states: Iterable[DiskState]) -> Iterator[DiskTensor]:
    for state in states:
        yield from state.tensors
        yield from _disk_weights(state.bucket)


def _disk_weights(bucket: Bucket) -> list[DiskTensor]:
    return [] if bucket.disk_weights is None else [bucket.disk_weights]


def begin_on_disk(
    on_disk: Mapping[Gradients, DiskState], begin: Beginner, steps: DiskSteps
) -> dict[Gradients, list[tuple[Piece, SliceUpdate, list[DiskTensor]]]]:
    """Begin an update of the flat pieces of these buckets (see `DiskState.begin`)."""
    begun = {one: state.begin(begin) for one, state in on_disk.items()}
    if steps.clears_first:
        for run in (run for pieces in begun.values() for *_, runs in pieces for run in runs):
            run.lay_out()
    return begun


def walk_parts(
    whole: Mapping[Gradients, Stop], block: int, steps: DiskSteps, pool_of: KeptPool
) -> Iterator[tuple[Gradients, Stop, Sequence[Tensor]]]:
    """Walk the stops in `whole`, one per bucket's span, in parts of whole blocks with values.

    A bucket's tensors have the length of its span.
    """
    if not whole:
        return
    widest = max(len(stop.tensors) for stop in whole.values())
    numel = steps.part_numel(widest, block)
    stops = [
        (one, stop._replace(start=start, numel=min(numel, stop.numel - start)))
        for one, stop in whole.items()
        for start in range(0, stop.numel, numel)
    ]
    if not stops:
        return  # parameters without elements
    # Whole pages per byte of an element.
    pages = -(-max(stop.numel for _, stop in stops) // UNIT_NUMEL)
    itemsize = max(run.dtype.itemsize for stop in whole.values() for run in stop.tensors)
    nbytes = pages * UNIT_NUMEL * itemsize
    pool = pool_of(widest * steps.overlap.parts, nbytes, pinned=steps.pins)
    owners = iter(stops)
    for stop, values in walk([stop for _, stop in stops], pool, steps.overlap):
        yield next(owners)[0], stop, values


def of_piece(
    stop: Stop, values: Sequence[Tensor], piece: Piece, runs: Sequence[DiskTensor]
) -> tuple[int, list[Tensor]]:
    """Return the masters and state of a piece that are in a part, which may be empty.

    Returns:
        Their start in the span, and the values of the part's first tensor and of `runs`.
    """
    last = stop.start + stop.numel
    low = min(max(stop.start, piece.start), last)
    high = max(low, min(last, piece.stop))
    parts = dict(zip(stop.tensors, values, strict=True))
    owned = (parts[run] for run in (stop.tensors[0], *runs))
    return low, [run[low - stop.start : high - stop.start] for run in owned]


@contextmanager
def rewriting_in_turn() -> Iterator[Callable[[Bucket], None]]:
    """Yield a function that starts rewriting a bucket's weights during an update.

    Each call stores the weights of the previous bucket.
    """
    with ExitStack() as stack:
        present: list[Bucket] = []

        def begin(bucket: Bucket) -> None:
            if bucket not in present:
                stack.close()
                stack.enter_context(bucket.rewriting())
                present[:] = [bucket]

        yield begin


def walk_whole(
    batches: Sequence[Sequence[DiskState]], steps: DiskSteps
) -> Generator[list[Tensor], None, None]:
    """Load masters and optimizer state of one batch of buckets after another.

    Yields the masters of each batch, 1-D with the length of the buckets' spans, while the optimizer
    has its state and the values of flat slices. Their contents are written when the next batch is
    requested.
    """
    stops = []
    for batch in batches:
        runs = tuple(run for state in batch for run in state.tensors)
        stops.append(Stop(runs, 0, max(run.numel for run in runs), runs))
    ways = iter(batches)
    for stop, values in walk(stops, LooseBuffers(pinned=steps.pins), steps.overlap):
        batch, read, first = next(ways), [], 0
        for state in batch:
            read.append(values[first : first + len(state.tensors)])
            first += len(read[-1])
        assert first == len(stop.tensors)  # runs are laid in `collect` alone
        for state, own in zip(batch, read, strict=True):
            state.show(own)
        yield [own[0] for own in read]
        for state, own in zip(batch, read, strict=True):
            state.collect(own, lays_out=steps.clears_first)


def _restore_weights(states: Iterable[DiskState], error: BaseException) -> None:
    """Round weights in memory again from the unchanged masters."""
    try:
        for state in states:
            state.bucket.restore_weights()
    except OffloadError as second:
        raise OffloadError(
            f"{_text_of(error)}; the weights cannot be read back either ({second}), so they belong"
            " to different updates: load a checkpoint before continuing"
        ) from error


def _text_of(error: BaseException) -> str:
    return str(error) or type(error).__name__


def bring_weights_to_disk(
    gradients: Sequence[Gradients], step: Callable[[Gradients], None]
) -> None:
    """Update buckets whose masters are in memory and whose weights may be on the disk.

    Raises:
        OffloadError: it failed on some rank, after masters had changed.
    """
    runs = [run for one in gradients for run in _disk_weights(one.bucket)]
    if not runs:
        for one in gradients:
            step(one)
        return
    try:
        with (
            one_update(lambda: runs),
            raised_on_all(gradients[0].bucket.sharing.everyone, "an update", OffloadError),
        ):
            for one in gradients:
                with one.bucket.rewriting():
                    step(one)
    except CommunicationError:
        raise
    except BaseException as error:
        # An interrupt too: the state that it leaves must be neither trained nor saved.
        raise OffloadError(
            f"{_text_of(error)}; masters in memory belong to the new update, but weights on the"
            " disk to the last one: load a checkpoint before continuing"
        ) from error
