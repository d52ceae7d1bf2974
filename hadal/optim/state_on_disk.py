"""Masters and optimizer state on a disk, bucket by bucket."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from hadal.errors import OptimizerError
from hadal.offload.buffers import aligned
from hadal.offload.store import DiskStore
from hadal.offload.tensors import DiskTensor, Stop, StoredSlice, one_update
from hadal.optim.elementwise import Beginner, SliceUpdate
from hadal.optim.pieces import HeldTensor, Piece
from hadal.zero.bucket import Bucket

Memory = list[dict[str, Any]]


class StateKind(NamedTuple):
    """One kind of state: that of all flat pieces of a bucket, or of all whole ones."""

    key: str
    """The optimizer's name for it."""
    is_whole: bool


class DiskState:
    """The masters and the optimizer state of one bucket, on a disk.

    `pieces` are flat slices of the master, or whole parameters that this rank owns, laid end to
    end. Per-element state is on the disk, one tensor for each kind; step counts, and state of other
    shapes, stay in memory. Between uses the optimizer has placeholders of the right shape, which
    hold NaN, for the values too; inside `present` it has its state, and the values of flat slices.
    Whole values are sent to their owner only for an update.
    """

    def __init__(
        self, optimizer: Optimizer, bucket: Bucket, pieces: Sequence[Piece], disk: DiskStore
    ) -> None:
        self.optimizer = optimizer
        self.bucket = bucket
        self._pieces = [*pieces]
        self._flat = [piece for piece in pieces if not piece.is_whole]
        self._disk = disk
        self._tensors: dict[StateKind, DiskTensor] = {}
        self._is_shown = False
        with one_update(self._tensors.values):
            self.write_all()

    # ---- tensors ---------------------------------------------------------------------------------

    @property
    def tensors(self) -> list[DiskTensor]:
        """The master, and the existing kinds of state."""
        master = self.bucket.stored_master
        assert master is not None and master.on_disk is not None  # it is trained, on a disk
        return [master.on_disk, *self._tensors.values()]

    def stop(self, written: slice = slice(None)) -> Stop:
        """Return the whole span as a stop of a walk that writes `tensors[written]`."""
        tensors = tuple(self.tensors)
        return Stop(tensors, 0, tensors[0].numel, tensors[written])

    def _numel(self, is_whole: bool) -> int:
        """Return the elements of a kind, including gaps between the pieces."""
        if is_whole:
            return max(piece.stop for piece in self._pieces if piece.is_whole)
        return self.bucket.span[1] - self.bucket.span[0]

    def _state(self, piece: Piece) -> dict[str, Any]:
        state: dict[str, Any] = self.optimizer.state.get(piece.values, {})
        return state

    def _elementwise(self, piece: Piece) -> list[str]:
        """Return the keys of a piece's per-element state."""
        shape = piece.values.shape
        return [
            key
            for key, value in self._state(piece).items()
            if isinstance(value, Tensor) and value.shape == shape and key != "step"
        ]

    def _by_kind(self) -> dict[StateKind, list[Piece]]:
        """Return, for each kind of state, the pieces that have it."""
        found: dict[StateKind, list[Piece]] = {}
        for piece in self._pieces:
            for key in self._elementwise(piece):
                found.setdefault(StateKind(key, piece.is_whole), []).append(piece)
        return found

    def slices(self, held: HeldTensor) -> dict[str, StoredSlice]:
        """Return the stored state, by key, of a tensor in the optimizer's param groups."""
        for piece in self._pieces:
            if piece.values is held.values:
                keys = self._elementwise(piece)
                tensors = {key: self._tensors[StateKind(key, piece.is_whole)] for key in keys}
                span = piece.start, piece.stop
                return {key: StoredSlice(one, *span) for key, one in tensors.items()}
        return {}

    def _tensor_of(self, kind: StateKind, dtype: torch.dtype, fill: float = 0.0) -> DiskTensor:
        """Return the tensor of one kind of state, created if there is none of that dtype."""
        found = self._tensors.get(kind)
        if found is None or found.dtype != dtype:
            if found is not None:
                found.free()
            name = f"the {kind.key} of {self.bucket.name}"
            numel = self._numel(kind.is_whole)
            found = self._tensors[kind] = DiskTensor(self._disk, name, numel, dtype, fill)
        return found

    def drop_unused(self) -> None:
        """Free the tensors of kinds that no piece has any more."""
        used = self._by_kind()
        for kind in [kind for kind in self._tensors if kind not in used]:
            self._tensors.pop(kind).free()

    # ---- temporarily in memory -------------------------------------------------------------------

    @contextmanager
    def present(self, *, writes: bool = True) -> Iterator[None]:
        """Hold masters and state in memory in a block; changes are kept.

        Nothing is kept if the block raises. An outer `present` decides for nested ones.
        """
        if self._is_shown:
            yield
            return
        before = self.memory()
        try:
            # Written state takes effect once the masters are written, too.
            with one_update(self._tensors.values), self.bucket.present(writes=writes):
                master = self.bucket.master
                assert master is not None  # it is trained, and present
                self.show([master, *(one.read() for one in self._tensors.values())])
                self._is_shown = True
                yield
                if writes:
                    self.write_all()
                else:
                    for kind, pieces in self._by_kind().items():
                        self._hide_state(kind.key, pieces)
                    self._hide_values()
            if writes:
                self.drop_unused()
        except BaseException:
            self.take_back(before)
            raise
        finally:
            self._is_shown = False

    def show(self, values: Sequence[Tensor]) -> None:
        """Give the optimizer the values of `tensors`: the master, and all kinds of state."""
        for piece in self._flat:
            piece.values.data = values[0][piece.start : piece.stop]
        known = dict(zip(self._tensors, values[1:], strict=True))
        for kind, pieces in self._by_kind().items():
            for piece in pieces:
                state = known[kind][piece.start : piece.stop]
                self._state(piece)[kind.key] = piece.shaped(state)

    def _hide_values(self) -> None:
        for piece in self._pieces:
            piece.values.data = placeholder(piece, piece.values.dtype)

    def _hide_state(self, key: str, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            state = self._state(piece)
            state[key] = placeholder(piece, state[key].dtype)

    def write_all(self, *, except_in: Mapping[StateKind, Tensor] | None = None) -> None:
        """Write the state in memory, one kind after another, and leave placeholders.

        It takes effect once the tensors are committed. Kinds in `except_in` are only copied there,
        for the caller to write.
        """
        for kind, pieces in self._by_kind().items():
            out = None if except_in is None else except_in.get(kind)
            if out is None:
                # Zeros for pieces without this state.
                dtype, numel = self._state(pieces[0])[kind.key].dtype, self._numel(kind.is_whole)
                out = aligned(max(numel, 1) * dtype.itemsize).view(dtype)[:numel].zero_()
                self._gather(kind.key, pieces, out)
                self._tensor_of(kind, dtype).write_next(out)
            else:
                self._gather(kind.key, pieces, out)
            self._hide_state(kind.key, pieces)
        self._hide_values()

    def _gather(self, key: str, pieces: Sequence[Piece], out: Tensor) -> None:
        for piece in pieces:
            value = self._state(piece)[key]
            if value.dtype != out.dtype:
                raise OptimizerError(
                    f"{type(self.optimizer).__name__} changed the dtype of its state {key!r} of"
                    f" {self.bucket.name} from {out.dtype} to {value.dtype}, but state on the disk"
                    ' cannot; set zero_optimization.offload_optimizer.device to "cpu"'
                )
            place = out[piece.start : piece.stop]
            if value.data_ptr() != place.data_ptr():
                place.copy_(piece.flattened(value.detach()))

    def read_each(self) -> Iterator[tuple[Piece, str, Tensor]]:
        """Yield copies of all state, with its piece and key, reading one kind after another."""
        by_kind = self._by_kind()
        for kind, tensor in self._tensors.items():
            values = tensor.read()
            for piece in by_kind.get(kind, ()):
                yield piece, kind.key, piece.shaped(values[piece.start : piece.stop]).clone()

    # ---- updates ---------------------------------------------------------------------------------

    def memory(self) -> Memory:
        """Return a copy of each piece's state in memory: counts and placeholders."""
        return [self._copied(piece) for piece in self._pieces]

    def _copied(self, piece: Piece) -> dict[str, Any]:
        on_disk = self._elementwise(piece)
        return {
            key: value if key in on_disk else _copied(value)
            for key, value in self._state(piece).items()
        }

    def take_back(self, memory: Memory) -> None:
        """Restore the state that `memory` returned before a failure."""
        for piece, state in zip(self._pieces, memory, strict=True):
            if state:
                self.optimizer.state[piece.values] = state
            else:
                self.optimizer.state.pop(piece.values, None)
        self._hide_values()

    def collect(self, values: Sequence[Tensor], *, lays_out: bool) -> None:
        """Copy the state in memory into the values read from `tensors`, for the caller to write.

        New kinds of state are written here; with `lays_out` their tensors are zeroed first.
        """
        buffers = dict(zip(self._tensors, values[1:], strict=True))
        if lays_out:
            for kind, pieces in self._by_kind().items():
                if kind not in self._tensors:
                    self._tensor_of(kind, self._state(pieces[0])[kind.key].dtype).lay_out()
        self.write_all(except_in=buffers)

    def begin(self, begin: Beginner) -> list[tuple[Piece, SliceUpdate, list[DiskTensor]]]:
        """Begin an update of every flat piece; return each with its state's tensors, in order."""
        self.drop_unused()
        begun, to_fill = [], []
        for piece in self._flat:
            state = self.optimizer.state[piece.values]
            known = set(self._elementwise(piece))
            zero = partial(torch.zeros, 1, dtype=self.bucket.precision.state_dtype)
            update = begin(self.optimizer.param_groups[piece.group], state, zero)
            keys = [next(k for k, v in state.items() if v is own) for own in update.state]
            tensors = []
            for key in keys:
                kind = StateKind(key, is_whole=False)
                fill = 0.0 if key in known else float(state[key])
                if key not in known and kind in self._tensors and not self._tensors[kind].is_blank:
                    to_fill.append((piece, key, fill))
                tensors.append(self._tensor_of(kind, state[key].dtype, fill))
                state[key] = placeholder(piece, state[key].dtype)
            begun.append((piece, update, tensors))
        if to_fill:
            # The tensors hold other pieces' values there.
            with self.present():
                for piece, key, fill in to_fill:
                    self._state(piece)[key].fill_(fill)
        return begun


class DiskStates:
    """The buckets of an optimizer whose masters and state are on a disk.

    The optimizer's `state_dict` reads them into host memory, one bucket after another, and
    `load_state_dict` writes them; both are local to each rank, as for state in memory.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._states: dict[Bucket, DiskState] = {}
        self._take_back: Callable[[], None] | None = None

    def put(self, bucket: Bucket, pieces: Sequence[Piece]) -> None:
        """Move the optimizer's state of a bucket to the disk, if it is offloaded there."""
        disk = bucket.offload.disk_of_state
        if disk is None:
            return
        if not self._states:
            self._optimizer.register_state_dict_post_hook(self._read_into)
            self._optimizer.register_load_state_dict_pre_hook(self._remember)
            self._optimizer.register_load_state_dict_post_hook(self._write_loaded)
        self._states[bucket] = DiskState(self._optimizer, bucket, pieces, disk)

    def of(self, bucket: Bucket) -> DiskState | None:
        """Return the state of a bucket on the disk; None if it is in memory."""
        return self._states.get(bucket)

    # ---- torch's state_dict ----------------------------------------------------------------------

    def _read_into(self, optimizer: Optimizer, found: dict[str, Any]) -> None:
        """Replace placeholders by the state on the disk."""
        numbers: dict[int, int] = {}
        for values in chain.from_iterable(group["params"] for group in optimizer.param_groups):
            numbers.setdefault(id(values), len(numbers))
        for state in self._states.values():
            for piece, key, values in state.read_each():
                number = numbers[id(piece.values)]
                # A new dict: torch's is the one that the optimizer uses.
                found["state"][number] = {**found["state"][number], key: values}

    def _remember(self, _: Optimizer, __: dict[str, Any]) -> None:
        self._take_back = backup_of([*self._states.values()])

    def _write_loaded(self, _: Optimizer) -> None:
        assert self._take_back is not None  # torch has called the hook before
        take_back, self._take_back = self._take_back, None
        states = [*self._states.values()]
        try:
            with one_update(lambda: chain.from_iterable(s.tensors[1:] for s in states)):
                for state in states:
                    state.write_all()
        except BaseException:
            take_back()
            raise
        for state in states:
            state.drop_unused()


def backup_of(states: Sequence[DiskState]) -> Callable[[], None]:
    """Copy an optimizer's state in memory; return a function that restores it after a failure."""
    optimizer, memories = states[0].optimizer, [state.memory() for state in states]
    options = [
        {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]

    def take_back() -> None:
        for state, memory in zip(states, memories, strict=True):
            state.take_back(memory)
        for group, given in zip(optimizer.param_groups, options, strict=True):
            group.update(given)

    return take_back


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else copy.deepcopy(value)


def placeholder(piece: Piece, dtype: torch.dtype) -> Tensor:
    """Return NaN in the shape of a piece, with the memory of one element."""
    return torch.full((), torch.nan).to(dtype).expand(piece.values.shape)
