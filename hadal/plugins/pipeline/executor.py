"""The work of one stage: its instructions in order, its buffers, and its messages to neighbours.

A stage sends its outputs as soon as they are computed, and receives its next inputs while it
computes. So communication overlaps with computation, regardless of the order of instructions.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from hadal.comm import Ranks
from hadal.comm.ranks import once
from hadal.errors import CommunicationError, PipelineError, UsageError
from hadal.plugins.pipeline.later_weights import GradientEntry, Later, root_of
from hadal.plugins.pipeline.schedule import (
    BackwardPass,
    BackwardWeights,
    CommitP2P,
    ForwardPass,
    LoadMicroBatch,
    OptimizerStep,
    PipeInstruction,
    RecvActivation,
    RecvGrad,
    ReduceGrads,
    ReduceTiedGrads,
    SendActivation,
    SendGrad,
)
from hadal.plugins.pipeline.wires import (
    Coming,
    DataEndedError,
    MessageSubject,
    Sent,
    TensorForm,
    ValueLayout,
    Wire,
    put_together,
    taken_apart,
)


class Computation(Protocol):
    """The computation of one stage, which the executor calls in the order of its instructions."""

    def load(self) -> tuple[Any, Any]:
        """Read a micro-batch: its inputs on the first stage, its labels on the last."""

    def forward(self, chunk: int, value: Any) -> Any:
        """Return a chunk's output."""

    def loss(self, outputs: Any, labels: Any) -> Any:
        """Return the loss of the last chunk's output, or the output without a loss function."""

    def backward(self, root: Tensor | None, loss: Tensor | None, *, is_last: bool) -> None:
        """Run the backward of a scalar; None runs nothing.

        `loss`: the micro-batch's loss, if it is the root; `is_last`: no other backward follows.
        """

    def put_off(self) -> list[Later]:
        """Return the gradients of weights that the last backward has deferred."""

    def place(self, chunk: int) -> str:
        """Return the current layer of a chunk's forward, for errors."""


@dataclass(slots=True)
class _Slot:
    """One micro-batch between its forward and its backward."""

    subject: MessageSubject
    value: Any = None
    """The input, until its forward."""
    received: list[Tensor] = field(default_factory=list)
    """The tensors of the input that take a gradient."""
    labels: Any = None
    root: Tensor | None = None
    loss: Tensor | None = None
    forms: tuple[TensorForm, ...] | None = None
    """Layout of the output's gradients; None before the forward."""
    gradients: list[Tensor] = field(default_factory=list)
    """Gradients of the output; the root's backward passes them on."""
    sent: list[Sent] = field(default_factory=list)
    later: list[Later] = field(default_factory=list)
    """Gradients of weights that are not computed yet."""


@dataclass(slots=True)
class Chunk:
    """Consecutive layers of a stage, and the wires to the chunks before and after."""

    name: str
    """The stage and its layers, for messages."""
    activations_in: Wire | None = None
    activations_out: Wire | None = None
    gradients_in: Wire | None = None
    gradients_out: Wire | None = None
    inputs: dict[bool, ValueLayout] = field(default_factory=dict)
    """The layout of inputs that the previous chunk has announced, by training mode."""
    outputs: dict[bool, ValueLayout] = field(default_factory=dict)
    """The layout of outputs that was announced to the next chunk."""
    done: Counter[type[PipeInstruction]] = field(default_factory=Counter)
    """The micro-batches of this batch so far, by instruction."""

    @property
    def wires(self) -> list[Wire]:
        """The wires of this chunk."""
        ends = self.activations_in, self.activations_out, self.gradients_in, self.gradients_out
        return [wire for wire in ends if wire is not None]

    def forget(self, *, is_training: bool) -> None:
        """Announce layouts again."""
        self.inputs.pop(is_training, None)
        self.outputs.pop(is_training, None)


# Number of pipelines per group of ranks: messages left by a failure belong to one of them.
_serials: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()


def chunks_of(
    pipe: Ranks,
    names: Sequence[str],
    device: torch.device,
    slices: tuple[Ranks | None, Ranks | None] = (None, None),
) -> list[Chunk]:
    """Return this rank's chunks; rank r has chunks r, r + ranks, and so on. All must call it.

    Args:
        pipe: the ranks of the pipeline, in order.
        names: of all chunks of the model.
        device: where tensors are.
        slices: ranks that share what they send of activations, and of gradients.
    """
    groups = _direction_groups(pipe, device, is_ring=len(names) > pipe.size)
    numbers, found = pipe.numbers, []
    serial = _serials[pipe.group] = _serials.get(pipe.group, -1) + 1

    def wire(what: str, source: int, target: int, of: Ranks | None) -> Wire:
        ends = [f"{names[end]} (rank {numbers[end % pipe.size]})" for end in (source, target)]
        number = 2 * max(source, target) + (source > target)
        other = source if target % pipe.size == pipe.rank else target
        ranks = groups.get((what, source % pipe.size), pipe)
        place = ranks.numbers.index(numbers[other % pipe.size])
        name = f"the {what} from {ends[0]} to {ends[1]}"
        return Wire(ranks, place, number, device, name, of, serial)

    for number in range(pipe.rank, len(names), pipe.size):
        chunk = Chunk(names[number])
        if number > 0:
            chunk.activations_in = wire("activation", number - 1, number, slices[0])
            chunk.gradients_out = wire("gradient", number, number - 1, slices[1])
        if number + 1 < len(names):
            chunk.activations_out = wire("activation", number, number + 1, slices[0])
            chunk.gradients_in = wire("gradient", number + 1, number, slices[1])
        found.append(chunk)
    return found


def _direction_groups(
    pipe: Ranks, device: torch.device, *, is_ring: bool
) -> dict[tuple[str, int], Ranks]:
    """Return a communicator for each direction between neighbours, by content and sending rank.

    An accelerator's backend runs all calls of a communicator in their order. A receive that is
    started before an earlier send of the same rank would delay that send; if the other rank waits
    for it, both wait forever. On the host, messages have tags instead. All ranks must call it.
    """
    if device.type == "cpu" or pipe.size == 1:
        return {}
    groups = {}
    # In one order on all ranks: to create a communicator is to wait for the other rank.
    for first in range(pipe.size if is_ring else pipe.size - 1):
        pair = first, (first + 1) % pipe.size
        for what, source in zip(("activation", "gradient"), pair, strict=True):
            if pipe.rank in pair:
                members = [pipe.numbers[each] for each in sorted(pair)]
                groups[what, source] = once(
                    pipe.group, (what, pair), functools.partial(pipe.some, members)
                )
    return groups


_OF_THE_CALLER = (CommitP2P, OptimizerStep, ReduceGrads, ReduceTiedGrads)
_Place = tuple[int, int]
"""A chunk's index on this stage, and a buffer."""


class Executor:
    """A stage's buffers, and the execution of its instructions.

    Args:
        work: this stage's computation.
        chunks: its layers, in order; more than one if the schedule interleaves.
        keeps_layout: True if every micro-batch has the same layout, so that only the first one is
            announced.
    """

    def __init__(
        self, work: Computation, chunks: Sequence[Chunk], *, keeps_layout: bool = True
    ) -> None:
        self._work = work
        self._chunks = list(chunks)
        self._keeps_layout = keeps_layout
        self._slots: dict[_Place, _Slot] = {}
        self._coming: dict[tuple[type[PipeInstruction], _Place], Coming] = {}
        self._told: list[Sent] = []
        self._batch, self._trains, self._backwards = 0, True, 0
        self._results: list[Any] = []
        self._doing = _Doing(work, chunks)
        self._acts: Mapping[
            type[PipeInstruction], Callable[[Chunk, _Place, MessageSubject], None]
        ] = {
            LoadMicroBatch: self._load,
            ForwardPass: self._forward,
            BackwardPass: self._backward,
            BackwardWeights: self._backward_weights,
            RecvActivation: self._receive_activation,
            RecvGrad: self._receive_gradient,
            # Their sends were started as soon as the values were computed.
            SendActivation: lambda *_: None,
            SendGrad: lambda *_: None,
        }

    def forget_layouts(self) -> None:
        """Announce layouts again. All ranks must call it."""
        for chunk in self._chunks:
            chunk.forget(is_training=True)

    def run(
        self,
        steps: Iterable[Sequence[PipeInstruction]],
        *,
        trains: bool,
        own: Mapping[type[PipeInstruction], Callable[..., Any]] | None = None,
    ) -> list[Any]:
        """Execute the instructions of one batch; return the last stage's losses or outputs.

        Instructions that are not about a micro-batch are left to the caller. If it raises, `end`
        must follow, on all ranks.

        Args:
            steps: the schedule.
            trains: False runs forwards only.
            own: the program's functions for kinds of instructions, called with their arguments
                in place of the executor's action, which `act` does.

        Raises:
            PipelineError: another stage has failed; the text is its error. Or an instruction is of
                an unknown kind.
            DataEndedError: another stage's data has ended.
        """
        own = own or {}
        self._batch += 1
        self._trains, self._results = trains, []
        for chunk in self._chunks:
            chunk.done.clear()
            if not trains:
                chunk.forget(is_training=False)
        self._doing = doing = _Doing(self._work, self._chunks)
        try:
            todo = self._known(steps, own)
            self._backwards = sum(isinstance(one, BackwardPass | BackwardWeights) for one in todo)
            self._post_ahead(todo)
            for place, one in enumerate(todo):
                if isinstance(one, ForwardPass | BackwardPass):
                    self._post_ahead(todo[place + 1 :])
                if type(one) in own:
                    own[type(one)](**one.kwargs)
                else:
                    self.act(one)
            for slot in self._slots.values():
                _wait(slot.sent)
        except BaseException as error:
            self._tell(error, doing)
            raise
        self._slots.clear()
        return self._results

    def act(self, one: PipeInstruction) -> None:
        """Execute an instruction of the current batch."""
        where = _place_of(one)
        chunk = self._chunks[where[0]]
        subject = MessageSubject(self._batch, self._trains, chunk.done[type(one)])
        self._doing.now = one, where[0], subject
        self._acts[type(one)](chunk, where, subject)
        chunk.done[type(one)] += 1

    def _known(
        self,
        steps: Iterable[Sequence[PipeInstruction]],
        own: Mapping[type[PipeInstruction], Callable[..., Any]],
    ) -> list[PipeInstruction]:
        """Return the instructions to execute here, in order."""
        todo = []
        for one in (one for step in steps for one in step):
            if type(one) in self._acts or type(one) in own:
                todo.append(one)
            elif type(one) not in _OF_THE_CALLER:
                raise PipelineError(
                    f"the schedule has {one!r}, of a kind that this engine does not know; expected"
                    f" {', '.join(kind.__name__ for kind in (*self._acts, *_OF_THE_CALLER))}, or a"
                    " kind with a function of the program's own (_INSTRUCTION_MAP)"
                )
        return todo

    def end(self) -> None:
        """Drop everything in progress after a failure. All ranks of the pipeline must call it."""
        self._slots.clear()
        self._coming.clear()
        self._told.clear()
        for chunk in self._chunks:
            chunk.forget(is_training=True)
            for wire in chunk.wires:
                wire.begin_anew()

    def _tell(self, error: BaseException, doing: _Doing) -> None:
        """Send the neighbours, which may wait for this stage, the reason why it stops."""
        is_end = isinstance(error, StopIteration | DataEndedError)
        text = doing.told(error)
        for chunk in self._chunks:
            for wire in (chunk.activations_out, chunk.gradients_out):
                if wire is not None:
                    # A neighbour that has exited receives nothing.
                    with suppress(CommunicationError):
                        self._told.append(wire.tell(doing.subject, text, is_end=is_end))

    # ---- receiving -------------------------------------------------------------------------------

    def _post_ahead(self, todo: Sequence[PipeInstruction]) -> None:
        """Start to receive everything that the next computation needs."""
        for one in todo:
            if isinstance(one, ForwardPass | BackwardPass):
                return
            if isinstance(one, RecvActivation | RecvGrad):
                self._post(one)

    def _post(self, one: RecvActivation | RecvGrad) -> None:
        kind, place = type(one), _place_of(one)
        chunk = self._chunks[place[0]]
        ahead = sum(other is kind and at[0] == place[0] for other, at in self._coming)
        subject = MessageSubject(self._batch, self._trains, chunk.done[kind] + ahead)
        if kind is RecvActivation:
            wire, layout = chunk.activations_in, chunk.inputs.get(self._trains)
            forms = layout.tensors if layout is not None and self._keeps_layout else None
        else:
            wire, slot = chunk.gradients_in, self._slots.get(place)
            forms = slot.forms if slot is not None and slot.subject == subject else None
        if wire is None:
            raise UsageError(f"{chunk.name}: {one} has no neighbour to receive from")
        self._coming[kind, place] = wire.expect(subject, forms)

    def _receive_activation(self, chunk: Chunk, place: _Place, subject: MessageSubject) -> None:
        tensors, announced = self._coming.pop((RecvActivation, place)).take()
        if announced is not None:
            chunk.inputs[self._trains] = announced
        layout, slot = chunk.inputs[self._trains], self._slot(place, subject)
        for tensor, form in zip(tensors, layout.tensors, strict=True):
            if form.takes_gradient and self._trains:
                slot.received.append(tensor.requires_grad_())
        slot.value = put_together(layout.frame, tensors)

    def _receive_gradient(self, chunk: Chunk, place: _Place, subject: MessageSubject) -> None:
        slot = self._slots[place]
        slot.gradients[:], _ = self._coming.pop((RecvGrad, place)).take(slot.forms)

    def _slot(self, place: _Place, subject: MessageSubject) -> _Slot:
        """Return the slot of a new micro-batch."""
        slot = self._slots.get(place)
        if slot is None or slot.subject != subject:
            if slot is not None:
                _wait(slot.sent)
            slot = self._slots[place] = _Slot(subject)
        return slot

    # ---- computing -------------------------------------------------------------------------------

    def _load(self, chunk: Chunk, place: _Place, subject: MessageSubject) -> None:
        inputs, labels = self._work.load()
        slot = self._slot(place, subject)
        slot.labels = labels
        if chunk.activations_in is None:
            slot.value = inputs

    def _forward(self, chunk: Chunk, place: _Place, subject: MessageSubject) -> None:
        slot = self._slots[place]
        outputs = self._work.forward(place[0], slot.value)
        slot.value = None
        if chunk.activations_out is None:
            self._end_forward(slot, outputs)
        else:
            self._send_output(chunk, place[0], slot, outputs, chunk.activations_out)

    def _end_forward(self, slot: _Slot, outputs: Any) -> None:
        found = self._work.loss(outputs, slot.labels)
        slot.labels = None
        if self._trains:
            slot.root = slot.loss = found
            found = found.detach() if isinstance(found, Tensor) else found
        self._results.append(found)

    def _send_output(self, chunk: Chunk, index: int, slot: _Slot, outputs: Any, wire: Wire) -> None:
        where = f"{chunk.name}, {self._work.place(index)},"
        tensors, layout = taken_apart(outputs, where)
        known = chunk.outputs.get(self._trains)
        if self._keeps_layout and known is not None and known != layout:
            raise UsageError(
                f"{where} returned {layout} for {slot.subject}, but {known} for those before: the"
                " next stage expects the same for every micro-batch. Call reset_activation_shape()"
                " on all ranks between two batches, or pass PipelineModule dynamic_shape=True"
            )
        announced = None if self._keeps_layout and known is not None else layout
        chunk.outputs[self._trains] = layout
        slot.sent.append(wire.send(slot.subject, tensors, announced))
        slot.forms = layout.gradients
        if self._trains and slot.forms:
            takers = [tensor for tensor in tensors if tensor.requires_grad]
            root: Tensor = GradientEntry.apply(slot.gradients, *takers)  # type: ignore[no-untyped-call]
            slot.root = root

    def _backward(self, chunk: Chunk, place: _Place, subject: MessageSubject) -> None:
        slot = self._slots[place]
        self._run_backward(slot.root, slot.loss)
        slot.root = slot.loss = None
        slot.later = self._work.put_off()
        slot.gradients.clear()
        if chunk.gradients_out is not None:
            given = [
                torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
                for tensor in slot.received
            ]
            slot.sent.append(chunk.gradients_out.send(subject, given))
            slot.received.clear()

    def _backward_weights(self, chunk: Chunk, place: _Place, subject: MessageSubject) -> None:
        self._run_backward(root_of(self._slots[place].later), None)

    def _run_backward(self, root: Tensor | None, loss: Tensor | None) -> None:
        self._backwards -= 1
        self._work.backward(root, loss, is_last=not self._backwards)


class _Doing:
    """The current instruction of a stage, for the text of an error."""

    def __init__(self, work: Computation, chunks: Sequence[Chunk]) -> None:
        self._work = work
        self._chunks = chunks
        self.now: tuple[PipeInstruction, int, MessageSubject] | None = None

    @property
    def subject(self) -> MessageSubject:
        """The micro-batch."""
        return MessageSubject(0, False, 0) if self.now is None else self.now[2]

    def told(self, error: BaseException) -> str:
        """Return the text for the other stages."""
        if self.now is None or isinstance(error, PipelineError | DataEndedError):
            return str(error)
        one, index, subject = self.now
        where = self._chunks[index].name
        if isinstance(one, ForwardPass):
            where += f", {self._work.place(index)}"
        what = _DEEDS.get(type(one), one.name)
        return f"{where} stopped in {what} of {subject}: {type(error).__name__}: {error}"


_DEEDS: Mapping[type[PipeInstruction], str] = {
    LoadMicroBatch: "reading",
    ForwardPass: "the forward",
    BackwardPass: "the backward",
    BackwardWeights: "the backward of weights",
    RecvActivation: "receiving the activation",
    RecvGrad: "receiving the gradient",
}


def _place_of(one: PipeInstruction) -> _Place:
    return one.kwargs.get("chunk", 0), one.kwargs["buffer_id"]


def _wait(sent: list[Sent]) -> None:
    for one in sent:
        one.wait()
    sent.clear()
