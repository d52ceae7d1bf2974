"""What the optimizer remembers of one bucket, where it rests on the disk beside the masters."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from hadal.errors import OptimizerError
from hadal.offload.buffers import aligned
from hadal.offload.runs import DiskRun, RunCut, one_update
from hadal.offload.store import DiskStore
from hadal.optim.elementwise import Zeros
from hadal.optim.own import Group, State
from hadal.optim.pieces import Held, Piece
from hadal.zero.bucket import Bucket

Memory = list[dict[str, Any]]


class Begun(Protocol):
    """An update of one tensor that was begun."""

    @property
    def state(self) -> tuple[Tensor, ...]:
        """What the optimizer remembers, each as long as the tensor."""


BegunT = TypeVar("BegunT", bound=Begun)


class StateRuns:
    """What the optimizer remembers of a few tensors, laid end to end: a run for each kind of state.

    Only what is kept for each element rests on the disk: its shape is that of the tensor. Counts of
    steps, and whatever has another shape, stay in memory. At rest the optimizer finds placeholders
    of the right shape, which hold NaN.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        bucket: Bucket,
        pieces: Sequence[Piece],
        numel: int,
        disk: DiskStore,
    ) -> None:
        self.pieces = pieces
        self.numel = numel
        """Elements from the start of the first piece to the end of the last, gaps included."""
        self._optimizer = optimizer
        self._bucket = bucket
        self._disk = disk
        self._runs: dict[str, DiskRun] = {}

    @property
    def runs(self) -> list[DiskRun]:
        """Those of the state so far."""
        return [*self._runs.values()]

    def by_kind(self) -> Iterator[tuple[str, DiskRun]]:
        """Which kind of state each run holds, in the order of `runs`."""
        yield from self._runs.items()

    def state(self, piece: Piece) -> dict[str, Any]:
        """What the optimizer has of a piece."""
        state: dict[str, Any] = self._optimizer.state.get(piece.values, {})
        return state

    def elementwise(self, piece: Piece) -> list[str]:
        """The kinds of state that are kept for each element of a piece."""
        shape = piece.values.shape
        return [
            key
            for key, value in self.state(piece).items()
            if isinstance(value, Tensor) and value.shape == shape and key != "step"
        ]

    def cuts(self, piece: Piece) -> dict[str, RunCut]:
        """Where each kind of state of a piece rests."""
        keys = self.elementwise(piece)
        return {key: RunCut(self._runs[key], piece.start, piece.stop) for key in keys}

    # ---- in memory for a while -------------------------------------------------------------------

    def read(self) -> dict[str, Tensor]:
        """All of it, in host memory: 1-D, by kind."""
        return {key: run.read() for key, run in self._runs.items()}

    def show(self, known: Mapping[str, Tensor]) -> None:
        """Let the optimizer find these values, by kind."""
        for piece in self.pieces:
            state = self.state(piece)
            for key in self.elementwise(piece):
                state[key] = known[key][piece.start : piece.stop].view(piece.values.shape)

    def hide(self) -> None:
        """Leave placeholders."""
        for piece in self.pieces:
            state = self.state(piece)
            for key in self.elementwise(piece):
                state[key] = placeholder(piece, state[key].dtype)

    def write(self, *, except_in: Mapping[str, Tensor] | None = None) -> None:
        """Write what the optimizer has, one kind after the other, each leaving a placeholder.

        It counts when the runs are committed. What belongs to a kind of `except_in` is put there
        instead, for who writes that.
        """
        pieces = [(piece, self.elementwise(piece)) for piece in self.pieces]
        for key in dict.fromkeys(chain.from_iterable(keys for _, keys in pieces)):
            holders = [piece for piece, keys in pieces if key in keys]
            if except_in is not None and key in except_in:
                self._gather(key, holders, except_in[key])
            else:
                self._write(key, holders)
            for piece in holders:
                state = self.state(piece)
                state[key] = placeholder(piece, state[key].dtype)

    def _write(self, key: str, holders: Sequence[Piece]) -> None:
        """Write one kind of state; zeros where a piece has none."""
        dtype = self.state(holders[0])[key].dtype
        memory = aligned(max(self.numel, 1) * dtype.itemsize).view(dtype)[: self.numel].zero_()
        self._gather(key, holders, memory)
        self.run_of(key, dtype, 0.0).write_next(memory)

    def _gather(self, key: str, holders: Sequence[Piece], memory: Tensor) -> None:
        for piece in holders:
            value = self.state(piece)[key]
            if value.dtype != memory.dtype:
                raise OptimizerError(
                    f"{type(self._optimizer).__name__} changed the dtype of its state {key!r} of"
                    f" {self._bucket.name} from {memory.dtype} to {value.dtype}: state on the disk"
                    ' keeps its dtype; give zero_optimization.offload_optimizer.device "cpu"'
                )
            place = memory[piece.start : piece.stop]
            if value.data_ptr() != place.data_ptr():
                place.copy_(value.detach().reshape(-1))

    def run_of(self, key: str, dtype: torch.dtype, fill: float) -> DiskRun:
        """The run of one kind of state, made where there is none of that dtype."""
        run = self._runs.get(key)
        if run is None or run.dtype != dtype:
            if run is not None:
                run.free()
            name = f"the {key} of {self._bucket.name}"
            run = self._runs[key] = DiskRun(self._disk, name, self.numel, dtype, fill)
        return run

    def lay_out_new(self) -> None:
        """Write zeros for what the optimizer remembers for the first time."""
        for piece in self.pieces:
            for key in self.elementwise(piece):
                if key not in self._runs:
                    self.run_of(key, self.state(piece)[key].dtype, 0.0).lay_out()

    def is_written(self, key: str) -> bool:
        """Whether values of this kind lie on the disk."""
        return key in self._runs and not self._runs[key].is_blank

    def drop_unused(self) -> None:
        """Free the runs of what the optimizer remembers of no piece any more."""
        used = {key for piece in self.pieces for key in self.elementwise(piece)}
        for key in [key for key in self._runs if key not in used]:
            self._runs.pop(key).free()

    # ---- taking back -----------------------------------------------------------------------------

    def memory(self) -> Memory:
        """What the optimizer has of each piece in memory, as it is at rest: a copy."""
        return [self._copied(piece) for piece in self.pieces]

    def _copied(self, piece: Piece) -> dict[str, Any]:
        rests = self.elementwise(piece)
        return {
            key: value if key in rests else _copied(value)
            for key, value in self.state(piece).items()
        }

    def take_back(self, memory: Memory) -> None:
        """Let the optimizer have what it had."""
        for piece, state in zip(self.pieces, memory, strict=True):
            if state:
                self._optimizer.state[piece.values] = state
            else:
                self._optimizer.state.pop(piece.values, None)


class StateOnDisk:
    """The masters and the optimizer's memory of one bucket.

    `pieces` are flat cuts of the master, `wholes` are whole parameters that this rank owns, laid
    end to end. At rest the optimizer finds placeholders, of the values too; inside `present` it
    finds its memory, and the values of flat cuts. Whole values are brought to their owner for an
    update alone.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        bucket: Bucket,
        pieces: Sequence[Piece],
        disk: DiskStore,
        wholes: Sequence[Piece] = (),
    ) -> None:
        self.optimizer = optimizer
        self.bucket = bucket
        self.numel = bucket.span[1] - bucket.span[0]
        """Elements of the bucket's span."""
        self.flat = StateRuns(optimizer, bucket, pieces, self.numel, disk)
        self.whole = StateRuns(optimizer, bucket, wholes, wholes[-1].stop if wholes else 0, disk)
        self._is_shown = False
        with one_update(lambda: self.runs_of_state):
            self.write_all()

    @property
    def _parts(self) -> tuple[StateRuns, StateRuns]:
        return self.flat, self.whole

    @property
    def runs_of_state(self) -> list[DiskRun]:
        """The runs of the state so far."""
        return [run for part in self._parts for run in part.runs]

    @property
    def runs(self) -> list[DiskRun]:
        """The master's run, and those of the state so far."""
        master = self.bucket.resting_master
        assert master is not None and master.run is not None  # its home is the disk
        return [master.run, *self.runs_of_state]

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
            with one_update(lambda: self.runs_of_state), self.bucket.present(writes=writes):
                master = self.bucket.master
                assert master is not None  # it is trained, and present
                self._show_values(master)
                for part in self._parts:
                    part.show(part.read())
                self._is_shown = True
                yield
                if writes:
                    self.write_all()
                else:
                    self._hide()
            if writes:
                self.drop_unused()
        except BaseException:
            self.take_back(before)
            raise
        finally:
            self._is_shown = False

    def _show_values(self, master: Tensor) -> None:
        for piece in self.flat.pieces:
            piece.values.data = master[piece.start : piece.stop]

    def _hide_values(self) -> None:
        for piece in chain(self.flat.pieces, self.whole.pieces):
            piece.values.data = placeholder(piece, piece.values.dtype)

    def write_all(self) -> None:
        """Write what the optimizer has in memory, and leave placeholders.

        It counts when the runs are committed.
        """
        for part in self._parts:
            part.write()
        self._hide_values()

    def _hide(self) -> None:
        for part in self._parts:
            part.hide()
        self._hide_values()

    def cuts(self, held: Held) -> dict[str, RunCut]:
        """Where each kind of state rests of what the optimizer has in its param groups."""
        for part in self._parts:
            for piece in part.pieces:
                if piece.values is held.values:
                    return part.cuts(piece)
        return {}

    def read_each(self) -> Iterator[tuple[Piece, dict[str, Tensor]]]:
        """Each piece, and copies of what rests of it, one kind in memory after the other."""
        for part in self._parts:
            found: dict[int, dict[str, Tensor]] = {}
            for key, run in part.by_kind():
                values = run.read()
                for place, piece in enumerate(part.pieces):
                    if key in part.elementwise(piece):
                        own = values[piece.start : piece.stop].view(piece.values.shape).clone()
                        found.setdefault(place, {})[key] = own
            for place, kinds in found.items():
                yield part.pieces[place], kinds

    # ---- in an update ----------------------------------------------------------------------------

    def memory(self) -> Memory:
        """What the optimizer has of each piece in memory: counts, and placeholders."""
        return [state for part in self._parts for state in part.memory()]

    def take_back(self, memory: Memory) -> None:
        """After what failed: as `memory` was before it, at rest."""
        count = len(self.flat.pieces)
        self.flat.take_back(memory[:count])
        self.whole.take_back(memory[count:])
        self._hide_values()

    def show_all(self, values: Sequence[Tensor]) -> Tensor:
        """Let the optimizer find what was read of `runs`; returns the master."""
        master, *rest = values
        known = iter(rest)
        for part in self._parts:
            part.show({key: next(known) for key, _ in part.by_kind()})
        self._show_values(master)
        return master

    def collect(self, values: Sequence[Tensor], *, lays_out: bool) -> None:
        """Put what the optimizer has into what was read of `runs`, for who writes that.

        New kinds of state get runs and are written; `lays_out`: as zeros before that.
        """
        known = iter(values[1:])
        for part in self._parts:
            buffers = {key: next(known) for key, _ in part.by_kind()}
            if lays_out:
                part.lay_out_new()
            part.write(except_in=buffers)
        self._hide_values()

    def drop_unused(self) -> None:
        """Free the runs of what the optimizer remembers of no piece any more."""
        for part in self._parts:
            part.drop_unused()

    def begin(
        self, begin: Callable[[Group, State, Zeros], BegunT]
    ) -> list[tuple[Piece, BegunT, list[DiskRun]]]:
        """Begin an update of every flat piece; each with the runs of its state, in its order."""
        flat, begun = self.flat, []
        flat.drop_unused()
        to_fill: list[tuple[Piece, str, float]] = []
        for piece in flat.pieces:
            state = self.optimizer.state[piece.values]
            known = set(flat.elementwise(piece))
            zero = partial(torch.zeros, 1, dtype=self.bucket.precision.state_dtype)
            update = begin(self.optimizer.param_groups[piece.group], state, zero)
            keys = [next(k for k, v in state.items() if v is own) for own in update.state]
            runs = []
            for key in keys:
                fill = 0.0 if key in known else float(state[key])
                if key not in known and flat.is_written(key):
                    to_fill.append((piece, key, fill))
                runs.append(flat.run_of(key, state[key].dtype, fill))
                state[key] = placeholder(piece, state[key].dtype)
            begun.append((piece, update, runs))
        if to_fill:
            # Other pieces have left values there.
            with self.present():
                for piece, key, fill in to_fill:
                    flat.state(piece)[key].fill_(fill)
        return begun


class RestingStates:
    """What of an optimizer's memory rests on the disk, bucket by bucket.

    `state_dict` of the optimizer reads it into host memory, one bucket after the other, and
    `load_state_dict` writes it; both are each rank's own, as those of state in memory.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._states: dict[Bucket, StateOnDisk] = {}
        self._before: tuple[list[Memory], list[dict[str, Any]]] | None = None

    def __bool__(self) -> bool:
        return bool(self._states)

    def put(
        self, bucket: Bucket, pieces: Sequence[Piece] = (), wholes: Sequence[Piece] = ()
    ) -> None:
        """Let rest what the optimizer remembers of a bucket, where its home is the disk."""
        disk = bucket.home.disk_of_state
        if disk is None:
            return
        if not self._states:
            self._optimizer.register_state_dict_post_hook(self._read_into)
            self._optimizer.register_load_state_dict_pre_hook(self._remember)
            self._optimizer.register_load_state_dict_post_hook(self._write_loaded)
        self._states[bucket] = StateOnDisk(self._optimizer, bucket, pieces, disk, wholes)

    def of(self, bucket: Bucket) -> StateOnDisk | None:
        """What rests of a bucket; None where it is in memory."""
        return self._states.get(bucket)

    @contextmanager
    def present(self, bucket: Bucket, *, writes: bool = True) -> Iterator[None]:
        """Have a bucket's masters and state in memory; what is written into them is kept."""
        state = self.of(bucket)
        with bucket.present(writes=writes) if state is None else state.present(writes=writes):
            yield

    def at_rest(self, held: Held) -> Mapping[str, RunCut]:
        """Where state rests of what the optimizer has in its param groups, by key."""
        state = self.of(held.bucket)
        return {} if state is None else state.cuts(held)

    # ---- torch's own way to save and load --------------------------------------------------------

    def _read_into(self, optimizer: Optimizer, found: dict[str, Any]) -> None:
        """Put what rests on the disk in the place of placeholders."""
        numbers: dict[int, int] = {}
        for values in chain.from_iterable(group["params"] for group in optimizer.param_groups):
            numbers.setdefault(id(values), len(numbers))
        for state in self._states.values():
            for piece, values in state.read_each():
                number = numbers[id(piece.values)]
                # Another dict: torch's is the one that the optimizer works with.
                found["state"][number] = {**found["state"][number], **values}

    def _remember(self, optimizer: Optimizer, _: dict[str, Any]) -> None:
        groups = [{k: v for k, v in one.items() if k != "params"} for one in optimizer.param_groups]
        self._before = [state.memory() for state in self._states.values()], groups

    def _write_loaded(self, optimizer: Optimizer) -> None:
        assert self._before is not None  # torch has called the hook before
        (memories, groups), self._before = self._before, None
        states = [*self._states.values()]
        try:
            with one_update(lambda: chain.from_iterable(s.runs_of_state for s in states)):
                for state in states:
                    state.write_all()
        except BaseException:
            for state, memory in zip(states, memories, strict=True):
                state.take_back(memory)
            for group, options in zip(optimizer.param_groups, groups, strict=True):
                group.update(options)
            raise
        for state in states:
            state.drop_unused()


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else copy.deepcopy(value)


def placeholder(piece: Piece, dtype: torch.dtype) -> Tensor:
    """NaN in the shape of a piece, in the memory of one element."""
    return torch.full((), torch.nan).to(dtype).expand(piece.values.shape)
