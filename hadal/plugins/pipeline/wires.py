"""Messages between neighbouring stages: a header on the host, then tensors on their device.

The header names the micro-batch. It precedes the tensors, so a failed stage can send its error
instead, and stages that run different instructions detect it. Tensors have the layout of the
previous ones, unless the header announces another one.
"""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hadal.comm import Ranks
from hadal.comm.collectives import slice_of, start_all_gather, start_receive, start_send
from hadal.comm.pending import Pending
from hadal.errors import MismatchError, PipelineError, UsageError

_FIRST_TAG, _TAGS = 64, 3
# Tags change after a failure, so that no earlier message is mistaken for a later one.
# Every pipeline has tags of its own, for this many failures.
_FAILURES, _GENERATIONS, _TAGS_IN_ONE = 16, 1 << 14, 1 << 16
_HEAD_NUMEL = 8


class MessageKind(IntEnum):
    """The content of a message, according to its header."""

    TENSORS = 0
    ANNOUNCED = 1
    """A layout, then tensors."""
    FAULT = 2
    """The text of an error that stopped the sender."""
    END = 3
    """The same, when its data has ended."""


class MessageSubject(NamedTuple):
    """The subject of a message; both ends must agree on it."""

    batch: int
    """The number of the batch."""
    is_training: bool
    micro_batch: int

    def __str__(self) -> str:
        of = f"batch {self.batch}" if self.is_training else f"evaluation {self.batch}"
        return f"micro-batch {self.micro_batch} of {of}"


class DataEndedError(Exception):
    """The data of another stage has ended."""


@dataclass(slots=True)
class Sent:
    """A message in flight."""

    works: list[Pending]
    tensors: list[Tensor]
    """Kept until the other rank has them."""

    def wait(self) -> None:
        """Wait until the other rank has received it."""
        for work in self.works:
            work.wait()


class Wire:
    """One direction between this rank and another, for activations or for their gradients.

    Args:
        ranks: the ranks of the pipeline; on an accelerator, with a communicator for this direction.
        other: the rank at the other end, among them.
        number: the number of this direction, the same at both ends.
        device: where tensors are.
        name: both ends and the content, for messages.
        slices: ranks that have the same tensors here, each of which sends a slice of the first
            one; None: each sends all.
        serial: the number of this pipeline among all that these ranks have created.
    """

    def __init__(
        self,
        ranks: Ranks,
        other: int,
        number: int,
        device: torch.device,
        name: str,
        slices: Ranks | None = None,
        serial: int = 0,
    ) -> None:
        self._ranks = ranks
        self._other = other
        self._number = number
        self._device = device
        self.name = name
        self._slices = slices
        self._generation = serial * _FAILURES

    def begin_anew(self) -> None:
        """Ignore everything sent so far. Both ends must call it."""
        self._generation += 1

    def label(self, subject: MessageSubject) -> str:
        """Return the name of a message in errors and for the watchdog."""
        return f"{self.name}, {subject}"

    def _tag(self, part: int) -> int:
        inside = _FIRST_TAG + self._number * _TAGS + part
        return self._generation % _GENERATIONS * _TAGS_IN_ONE + inside

    # ---- sending ---------------------------------------------------------------------------------

    def send(
        self,
        subject: MessageSubject,
        tensors: Iterable[Tensor],
        announced: ValueLayout | None = None,
    ) -> Sent:
        """Send tensors, and their layout unless the other end knows it."""
        text = b"" if announced is None else pickle.dumps(announced)
        kind = MessageKind.TENSORS if announced is None else MessageKind.ANNOUNCED
        sent = self._send_head(kind, subject, text)
        label = self.label(subject)
        for number, tensor in enumerate(tensors):
            if not tensor.numel():
                continue
            whole = tensor.detach().contiguous()
            mine = self._mine(whole.view(-1), number)
            sent.tensors.append(mine)
            sent.works.append(start_send(mine, self._other, self._ranks, self._tag(2), label))
        return sent

    def tell(self, subject: MessageSubject, text: str, *, is_end: bool) -> Sent:
        """Send the text of a failure instead of the expected message."""
        return self._send_head(
            MessageKind.END if is_end else MessageKind.FAULT, subject, text.encode()
        )

    def _send_head(self, kind: MessageKind, subject: MessageSubject, text: bytes) -> Sent:
        values = [kind, *subject, len(text)]
        head = torch.tensor(values + [0] * (_HEAD_NUMEL - len(values)), dtype=torch.int64)
        label, to = self.label(subject), (self._other, self._ranks)
        works, tensors = [start_send(head, *to, self._tag(0), label)], [head]
        if text:
            body = torch.frombuffer(bytearray(text), dtype=torch.uint8)
            tensors.append(body)
            works.append(start_send(body, *to, self._tag(1), label))
        return Sent(works, tensors)

    # ---- receiving -------------------------------------------------------------------------------

    def expect(self, subject: MessageSubject, forms: Sequence[TensorForm] | None) -> Coming:
        """Start to receive a message; `forms`: of its tensors, if they are known already."""
        return Coming(self, subject, forms)

    def receive_text(self, length: int, label: str) -> bytes:
        """Receive the text that a header announces."""
        body = torch.empty(length, dtype=torch.uint8)
        start_receive(body, self._other, self._ranks, self._tag(1), label).wait()
        return body.numpy().tobytes()

    def start_head(self, label: str) -> tuple[Tensor, Pending]:
        """Start to receive a header."""
        head = torch.empty(_HEAD_NUMEL, dtype=torch.int64)
        return head, start_receive(head, self._other, self._ranks, self._tag(0), label)

    def start_tensors(self, forms: Sequence[TensorForm], label: str) -> tuple[list[Tensor], Any]:
        """Start to receive tensors; wait for the works in order."""
        tensors, works = [], []
        for number, form in enumerate(forms):
            tensor = form.empty(self._device)
            tensors.append(tensor)
            if tensor.numel():
                whole = tensor.view(-1)
                mine = self._mine(whole, number)
                work = start_receive(mine, self._other, self._ranks, self._tag(2), label)
                if mine is not whole:
                    work.then(self._joining(whole, label))
                works.append(work)
        return tensors, works

    def _mine(self, flat: Tensor, number: int) -> Tensor:
        """Return the part of a tensor that this rank sends or receives: all of it, or a slice."""
        slices = self._slices
        if slices is None or number or flat.numel() % slices.size or not flat.is_floating_point():
            return flat
        return slice_of(flat, slices.rank, slices)

    def _joining(self, flat: Tensor, label: str) -> Any:
        slices = self._slices
        assert slices is not None  # or there is no slice

        def join() -> Pending:
            # Its label is not a purpose: it names the ranks at the ends of this one's slice.
            pending = start_all_gather(flat, slices, "the slices of a tensor between stages")
            pending.label = f"the slices of {label}"
            return pending

        return join


class Coming:
    """A message to be received, parts of which may be in flight."""

    def __init__(
        self, wire: Wire, subject: MessageSubject, forms: Sequence[TensorForm] | None
    ) -> None:
        self._wire = wire
        self._subject = subject
        self._label = wire.label(subject)
        self._head, self._begun = wire.start_head(self._label)
        self._tensors: list[Tensor] | None = None
        self._works: list[Pending] = []
        if forms is not None:
            self._tensors, self._works = wire.start_tensors(forms, self._label)

    def take(
        self, forms: Sequence[TensorForm] | None = None
    ) -> tuple[list[Tensor], ValueLayout | None]:
        """Wait for the message; return its tensors, and its layout if it was announced.

        `forms`: of its tensors, if they are known by now.

        Raises:
            PipelineError: the other stage has failed.
            DataEndedError: its data has ended.
            MismatchError: its subject differs, or its layout is not known.
            CommunicationError: the other rank has exited.
        """
        self._begun.wait()
        kind, batch, is_training, micro_batch, length, *_ = self._head.tolist()
        if kind in (MessageKind.FAULT, MessageKind.END):
            text = self._wire.receive_text(length, self._label).decode()
            raise PipelineError(text) if kind == MessageKind.FAULT else DataEndedError(text)
        found = MessageSubject(batch, bool(is_training), micro_batch)
        if found != self._subject:
            raise MismatchError(
                f"{self._wire.name}: got {found}, expected {self._subject}: the ranks' programs"
                " differ. Call train_batch and eval_batch equally often on every rank,"
                " with the same number of micro-batches"
            )
        layout = None
        if kind == MessageKind.ANNOUNCED:
            forms = None
            layout = pickle.loads(self._wire.receive_text(length, self._label))
            self._tensors, self._works = self._wire.start_tensors(layout.tensors, self._label)
        if self._tensors is None and forms is not None:
            self._tensors, self._works = self._wire.start_tensors(forms, self._label)
        if self._tensors is None:
            raise MismatchError(
                f"{self._label}: the sender announced its layout earlier, but this rank does not"
                " have it; call reset_activation_shape() on all ranks"
            )
        for work in self._works:
            work.wait()
        return self._tensors, layout


# ---- values --------------------------------------------------------------------------------------

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.Size)


class TensorForm(NamedTuple):
    """Shape, dtype and role of one tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    takes_gradient: bool
    """True if a gradient of it is sent back."""

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"

    def empty(self, device: torch.device) -> Tensor:
        """Return a tensor to receive into."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)


class ValueLayout(NamedTuple):
    """The structure of a value, and the form of each tensor in it, for the receiver."""

    frame: Any
    """Nested tuples: a kind, its type or keys, and the frames inside; tensors have none."""
    tensors: tuple[TensorForm, ...]

    def __str__(self) -> str:
        return ", ".join(map(str, self.tensors)) or "no tensors"

    @property
    def gradients(self) -> tuple[TensorForm, ...]:
        """The tensors whose gradients are sent back."""
        return tuple(form for form in self.tensors if form.takes_gradient)


_TENSOR = ("tensor",)


def taken_apart(value: Any, where: str) -> tuple[list[Tensor], ValueLayout]:
    """Return the tensors in a value, in order, and its layout.

    A value is a tensor, a plain Python value, or a tuple, list, mapping or dataclass of values.
    Tensors that require a gradient get one.

    Raises:
        UsageError: it holds anything else; `where` names the layer.
    """
    tensors: list[Tensor] = []
    frame = _frame_of(value, tensors, where)
    forms = tuple(TensorForm(tuple(t.shape), t.dtype, t.requires_grad) for t in tensors)
    return tensors, ValueLayout(frame, forms)


# Not inside: a function that calls itself by a variable is a cycle, which would keep the tensors.
def _frame_of(one: Any, tensors: list[Tensor], where: str) -> Any:
    if isinstance(one, Tensor):
        tensors.append(one)
        return _TENSOR
    if isinstance(one, _PLAIN):
        return ("plain", one)
    inside: Callable[[Any], Any] = partial(_frame_of, tensors=tensors, where=where)
    if isinstance(one, list | tuple):
        return ("items", type(one), tuple(map(inside, one)))
    if isinstance(one, Mapping):
        return ("mapping", type(one), tuple(one), tuple(map(inside, one.values())))
    if dataclasses.is_dataclass(one) and not isinstance(one, type):
        values = {field.name: getattr(one, field.name) for field in dataclasses.fields(one)}
        return ("fields", type(one), tuple(values), tuple(map(inside, values.values())))
    raise UsageError(
        f"{where} returned a {type(one).__name__}, which cannot be sent to the next stage;"
        " return a tensor, or a tuple, list, dict or dataclass of tensors and plain values"
    )


def put_together(frame: Any, tensors: Iterable[Tensor]) -> Any:
    """Return the value with this frame, of new tensors."""
    return _value_of(frame, iter(tensors))


def _value_of(one: Any, left: Iterator[Tensor]) -> Any:
    kind, *rest = one
    if kind == "tensor":
        return next(left)
    if kind == "plain":
        return rest[0]
    make, *names, inside = rest
    values = [_value_of(each, left) for each in inside]
    return _MAKERS[kind](make, *names, values)


def _items(make: Any, values: list[Any]) -> Any:
    return make(*values) if hasattr(make, "_fields") else make(values)


def _mapping(make: Any, keys: Sequence[Any], values: list[Any]) -> Any:
    named = dict(zip(keys, values, strict=True))
    if make is dict:
        return named
    # Outputs of transformers are mappings whose fields are their constructor's arguments.
    has_fields = bool(dataclasses.is_dataclass(make))
    return make(**named) if has_fields else make(named)


def _fields(make: Any, names: Sequence[str], values: list[Any]) -> Any:
    made = object.__new__(make)
    for name, value in zip(names, values, strict=True):
        object.__setattr__(
            made, name, value
        )  # also for frozen ones, and fields that are not arguments
    return made


_MAKERS: dict[str, Callable[..., Any]] = {"items": _items, "mapping": _mapping, "fields": _fields}
