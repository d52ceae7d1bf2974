"""What the optimizer remembers of one bucket, where it rests on the disk beside the masters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from hadal.comm.faults import told_to_all
from hadal.errors import CommunicationError, OffloadError
from hadal.offload.buffers import BufferPool, aligned
from hadal.offload.crossing import Sending
from hadal.offload.runs import UNIT_NUMEL, DiskRun, RunCut, one_update
from hadal.offload.store import DiskStore
from hadal.offload.walk import Pace, Stop, walk
from hadal.optim.desk import Desk, Desks, blocks
from hadal.optim.elementwise import Beginner, Update
from hadal.optim.pieces import Piece
from hadal.zero.bucket import Bucket
from hadal.zero.gradients import Gradients


class StateOnDisk:
    """The masters and the optimizer's memory of one bucket's pieces.

    Owns a run for each kind of state, as long as the bucket's span. At rest the optimizer finds
    placeholders of the right shape, which hold NaN; inside `present` it finds the values.
    """

    def __init__(
        self, optimizer: Optimizer, bucket: Bucket, pieces: Sequence[Piece], disk: DiskStore
    ) -> None:
        self._optimizer = optimizer
        self.bucket = bucket
        self._pieces = pieces
        self._disk = disk
        self.numel = bucket.span[1] - bucket.span[0]
        """Elements of the bucket's span."""
        self._runs: dict[str, DiskRun] = {}
        self._is_shown = False
        with one_update(self._runs.values):
            self._put_away()

    # ---- outside of updates ----------------------------------------------------------------------

    @contextmanager
    def present(self, *, writes: bool = True) -> Iterator[None]:
        """Have masters and state in memory; what is written into them is kept.

        Where the body raises nothing is. Inside another `present`, that one decides.
        """
        if self._is_shown:
            yield
            return
        before = self.memory()
        try:
            # What was written counts once the masters are written, too.
            with one_update(self._runs.values), self.bucket.present(writes=writes):
                self._show()
                self._is_shown = True
                yield
                self._put_away(writes=writes)
        except BaseException:
            self.take_back(before)
            self._put_away(writes=False)
            raise
        finally:
            self._is_shown = False

    def _show(self) -> None:
        master = self.bucket.master
        assert master is not None  # it is trained, and present
        known = {key: run.read() for key, run in self._runs.items()}
        for piece in self._pieces:
            piece.values.data = master[piece.start : piece.stop]
            state = self._state(piece)
            for key in self._elementwise(piece):
                state[key] = known[key][piece.start : piece.stop]

    def _put_away(self, *, writes: bool = True) -> None:
        """Write what is elementwise, one kind after the other, and leave placeholders."""
        pieces = [(piece, self._elementwise(piece)) for piece in self._pieces]
        for key in dict.fromkeys(chain.from_iterable(keys for _, keys in pieces)):
            holders = [piece for piece, keys in pieces if key in keys]
            if writes:
                self._write(key, holders)
            for piece in holders:
                state = self._state(piece)
                state[key] = _placeholder(piece, state[key].dtype)
        if writes:
            self._drop_unused()
        for piece in self._pieces:
            piece.values.data = _placeholder(piece, piece.values.dtype)

    def _write(self, key: str, holders: Sequence[Piece]) -> None:
        """Write one kind of state; zeros where a piece has none."""
        values = [self._state(piece)[key] for piece in holders]
        dtype = values[0].dtype
        whole = aligned(max(self.numel, 1) * dtype.itemsize).view(dtype)[: self.numel].zero_()
        for piece, value in zip(holders, values, strict=True):
            whole[piece.start : piece.stop].copy_(value)
        self._run_of(key, dtype, 0.0).write_next(whole)

    def _state(self, piece: Piece) -> dict[str, Any]:
        state: dict[str, Any] = self._optimizer.state.get(piece.values, {})
        return state

    def _elementwise(self, piece: Piece) -> list[str]:
        shape = piece.values.shape
        return [
            key
            for key, value in self._state(piece).items()
            if isinstance(value, Tensor) and value.shape == shape and key != "step"
        ]

    def _run_of(self, key: str, dtype: torch.dtype, fill: float) -> DiskRun:
        run = self._runs.get(key)
        if run is None or run.dtype != dtype:
            if run is not None:
                run.free()
            name = f"the {key} of {self.bucket.name}"
            run = self._runs[key] = DiskRun(self._disk, name, self.numel, dtype, fill)
        return run

    def cuts(self, piece: Piece) -> dict[str, RunCut]:
        """Where each kind of state of a piece rests."""
        keys = self._elementwise(piece)
        return {key: RunCut(self._runs[key], piece.start, piece.stop) for key in keys}

    # ---- in an update ----------------------------------------------------------------------------

    @property
    def runs(self) -> list[DiskRun]:
        """The master's run, and those of the state so far."""
        master = self.bucket.resting_master
        assert master is not None and master.run is not None  # its home is the disk
        return [master.run, *self._runs.values()]

    def memory(self) -> list[dict[str, Any]]:
        """What the optimizer has of each piece in memory: counts, and placeholders."""
        return [self._counts(piece) for piece in self._pieces]

    def _counts(self, piece: Piece) -> dict[str, Any]:
        state = self._state(piece)
        return {
            key: value.clone() if isinstance(value, Tensor) and not value.dim() else value
            for key, value in state.items()
        }

    def take_back(self, memory: Sequence[dict[str, Any]]) -> None:
        """After an update that failed: as `memory` was before it."""
        for piece, state in zip(self._pieces, memory, strict=True):
            if state:
                self._optimizer.state[piece.values] = state
            else:
                self._optimizer.state.pop(piece.values, None)

    def begin(self, begin: Beginner) -> list[tuple[Piece, Update, list[DiskRun]]]:
        """Begin an update of every piece; each with the runs of its state, in its order."""
        begun = []
        self._drop_unused()
        to_fill: list[tuple[Piece, str, float]] = []
        for piece in self._pieces:
            state = self._optimizer.state[piece.values]
            dtype = self.bucket.precision.state_dtype

            def one_element(dtype: torch.dtype = dtype) -> Tensor:
                return torch.zeros(1, dtype=dtype)

            known = set(self._elementwise(piece))
            update = begin(self._optimizer.param_groups[piece.group], state, one_element)
            keys = [next(k for k, v in state.items() if v is own) for own in update.state]
            runs = []
            for key in keys:
                fill = 0.0 if key in known else float(state[key])
                if key not in known and key in self._runs and not self._runs[key].is_blank:
                    to_fill.append((piece, key, fill))
                runs.append(self._run_of(key, state[key].dtype, fill))
                state[key] = _placeholder(piece, state[key].dtype)
            begun.append((piece, update, runs))
        if to_fill:
            # Other pieces have left values there.
            with self.present():
                for piece, key, fill in to_fill:
                    self._state(piece)[key].fill_(fill)
        return begun

    def _drop_unused(self) -> None:
        """Free the runs of what the optimizer remembers of no piece any more."""
        used = {key for piece in self._pieces for key in self._elementwise(piece)}
        for key in [key for key in self._runs if key not in used]:
            self._runs.pop(key).free()

    def stops(self, numel: int) -> list[Stop]:
        """The bucket's span in parts of `numel` elements; each with the master's run first."""
        runs = tuple(self.runs)
        return [Stop(runs, at, min(numel, self.numel - at)) for at in range(0, self.numel, numel)]


@dataclass(frozen=True, slots=True)
class DiskSteps:
    """How updates go through what rests on the disk."""

    numel: int = 1 << 24
    """Elements of one kind of state that are updated at a time, at most (a sub-group)."""
    buffer_count: int = 4
    """How many sub-groups, in float32, the buffers hold together."""
    pace: Pace = field(default_factory=Pace)
    pins: bool = False
    """Whether the buffers are page-locked."""
    clears_first: bool = False
    """Whether new state is written as it begins, before the first update reads it."""

    def part_numel(self, runs: int, block: int) -> int:
        """Elements that are read at a time, where each has `runs` values: whole blocks."""
        room = self.buffer_count * self.numel // (runs * self.pace.parts)
        return max(1, min(room, self.numel) // block) * block


class PartBuffers:
    """The buffers that parts are read into, kept from one update to the next.

    In fresh memory every page is cleared and mapped first, which takes a good part of the time that
    the disk does.
    """

    def __init__(self) -> None:
        self._pool: BufferPool | None = None

    def pool(self, count: int, nbytes: int, *, pinned: bool) -> BufferPool:
        """So many buffers of this length: the last ones, where they are alike."""
        pool = self._pool
        if pool is None or (pool.count, pool.nbytes) != (count, nbytes):
            pool = self._pool = BufferPool(count, nbytes, pinned=pinned)
        return pool


def step_on_disk(
    on_disk: Mapping[Gradients, StateOnDisk],
    begin: Beginner,
    desks: Desks,
    steps: DiskSteps,
    buffers: PartBuffers,
) -> None:
    """Make one update of these buckets, part by part. All ranks must call it.

    Raises:
        OffloadError: the disk failed on some rank; on every rank everything is as it was.
    """
    states = list(on_disk.values())
    before = [state.memory() for state in states]
    ranks = states[0].bucket.ranks
    try:
        with (
            one_update(lambda: _runs_of(states)),
            told_to_all(ranks, "an update", OffloadError),
        ):
            _walk(on_disk, begin, desks, steps, buffers)
    except BaseException as error:
        # Also when the user interrupts it: an emergency checkpoint may follow.
        for state, memory in zip(states, before, strict=True):
            state.take_back(memory)
        _restore_weights(states, error)
        raise


def _runs_of(states: Iterable[StateOnDisk]) -> Iterator[DiskRun]:
    for state in states:
        yield from state.runs
        yield from state.bucket.runs_of_weights


def _walk(
    on_disk: Mapping[Gradients, StateOnDisk],
    begin: Beginner,
    desks: Desks,
    steps: DiskSteps,
    buffers: PartBuffers,
) -> None:
    begun = {one: state.begin(begin) for one, state in on_disk.items()}
    desk = desks.on(torch.device("cpu"))
    if steps.clears_first:
        for run in (run for pieces in begun.values() for *_, runs in pieces for run in runs):
            run.lay_out()
    widest = max(len(state.runs) for state in on_disk.values())
    numel = steps.part_numel(widest, desk.numel)
    stops = [(one, stop) for one, state in on_disk.items() for stop in state.stops(numel)]
    if not stops:
        return  # parameters without elements
    pool = buffers.pool(
        widest * steps.pace.parts, _largest_nbytes(stop for _, stop in stops), pinned=steps.pins
    )
    owners = iter(stops)
    with ExitStack() as rewriting:
        present: Gradients | None = None
        for stop, values in walk([stop for _, stop in stops], pool, steps.pace):
            one, _ = next(owners)
            if one is not present:
                rewriting.close()
                rewriting.enter_context(one.bucket.rewriting())
                present = one
            parts = dict(zip(stop.runs, values, strict=True))
            _step_part(one, stop, parts, begun[one], desk, desks.sending)


def _largest_nbytes(stops: Iterable[Stop]) -> int:
    """Bytes of the longest stretch of a run, in whole pages for each of their bytes."""
    return max(
        -(-stop.numel // UNIT_NUMEL) * UNIT_NUMEL * run.dtype.itemsize
        for stop in stops
        for run in stop.runs
    )


def _step_part(
    one: Gradients,
    stop: Stop,
    values: Mapping[DiskRun, Tensor],
    begun: Sequence[tuple[Piece, Update, list[DiskRun]]],
    desk: Desk,
    sending: Sending | None,
) -> None:
    bucket, master = one.bucket, values[stop.runs[0]]
    bucket.absorb_edits_into(master, stop.start)
    first, last = stop.start, stop.start + stop.numel
    for piece, update, runs in begun:
        inside = max(first, piece.start), min(last, piece.stop)
        for low, high in blocks(*inside, desk.numel):
            cut = slice(low - first, high - first)
            owned = [master[cut], *(values[run][cut] for run in runs)]
            desk.apply(update, one.mean[low:high], owned)
            bucket.put_weights(low, master[cut], sending)


def _restore_weights(states: Iterable[StateOnDisk], error: BaseException) -> None:
    """Round weights in memory once more from the masters as they were."""
    try:
        for state in states:
            state.bucket.restore_weights()
    except OffloadError as second:
        raise OffloadError(
            f"{_text_of(error)}; and the weights cannot be read back ({second}), so that they are"
            " of different updates: load a checkpoint before going on"
        ) from error


def _text_of(error: BaseException) -> str:
    return str(error) or type(error).__name__


def bring_weights_to_disk(
    gradients: Sequence[Gradients], step: Callable[[Gradients], None]
) -> None:
    """Make an update of buckets whose masters are in memory, and whose weights may be on the disk.

    Raises:
        OffloadError: it did not come to its end, on some rank; masters have changed already.
    """
    runs = [run for one in gradients for run in one.bucket.runs_of_weights]
    if not runs:
        for one in gradients:
            step(one)
        return
    try:
        with (
            one_update(lambda: runs),
            told_to_all(gradients[0].bucket.ranks, "an update", OffloadError),
        ):
            for one in gradients:
                with one.bucket.rewriting():
                    step(one)
    except CommunicationError:
        raise
    except BaseException as error:
        # An interrupt too: what it leaves must be neither trained on nor saved.
        raise OffloadError(
            f"{_text_of(error)}; masters in memory are of the new update, and weights on the disk"
            " of the last one: load a checkpoint before going on"
        ) from error


def _placeholder(piece: Piece, dtype: torch.dtype) -> Tensor:
    """NaN in the shape of a piece, in the memory of one element."""
    return torch.full((1,), torch.nan).to(dtype).expand(piece.stop - piece.start)
