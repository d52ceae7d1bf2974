"""Names in a pickle: which globals it would import and call, found without running it.

A pickle is a program for a stack machine. This walks through its opcodes with a stack that holds
text, the globals that were looked up, and placeholders for everything else.
"""

from __future__ import annotations

import pickletools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, BinaryIO, NamedTuple

COMPUTED = "(computed)"
"""The name of a global that the pickle computes, so that it cannot be known without running it."""


class Global(NamedTuple):
    """A name that a pickle looks up, as `module.name`."""

    name: str


@dataclass(slots=True)
class Names:
    """The globals of one pickle, in the order of their first use."""

    imported: dict[str, None] = field(default_factory=dict)
    called: dict[str, None] = field(default_factory=dict)
    """Those that are called, or of which an object is made or filled."""
    fault: str = ""
    """Why the rest of the pickle could not be read; what comes before would still run."""
    is_whole: bool = False


class _Mark:
    """The opcode MARK on the stack."""


_MARK, _OTHER = _Mark(), object()
_TEXTS = (
    *("STRING", "BINSTRING", "SHORT_BINSTRING"),
    *("UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"),
)
_MEMO_PUTS = ("PUT", "BINPUT", "LONG_BINPUT")
_MEMO_GETS = ("GET", "BINGET", "LONG_BINGET")
# These call the value at this depth below the top of the stack.
_CALLS = {"REDUCE": 2, "NEWOBJ": 2, "NEWOBJ_EX": 3}


class _Machine:
    def __init__(self) -> None:
        self.names = Names()
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def step(self, opcode: Any, argument: Any) -> None:
        """Go through one opcode.

        Raises:
            IndexError, KeyError: the stack or the memo lacks what it needs.
        """
        name = opcode.name
        if name == "MARK":
            self._stack.append(_MARK)
        elif name in _TEXTS:
            self._stack.append(argument)
        elif name in _MEMO_PUTS:
            self._memo[int(argument)] = self._stack[-1]
        elif name == "MEMOIZE":
            self._memo[len(self._memo)] = self._stack[-1]
        elif name in _MEMO_GETS:
            self._stack.append(self._memo[int(argument)])
        elif name == "DUP":
            self._stack.append(self._stack[-1])
        else:
            self._act(opcode, name, argument)

    def _act(self, opcode: Any, name: str, argument: Any) -> None:
        if name in ("GLOBAL", "INST"):
            found = self._look_up(*argument.split(" ", 1))
            if name == "INST":
                self._pop_mark()
                self._call(found)
            self._stack.append(found if name == "GLOBAL" else _OTHER)
        elif name == "STACK_GLOBAL":
            attribute, module = self._stack.pop(), self._stack.pop()
            self._stack.append(self._look_up(module, attribute))
        elif name.startswith("EXT"):
            self._stack.append(self._look_up("copyreg extension", str(argument)))
        elif name in _CALLS:
            self._call(self._stack[-_CALLS[name]])
            del self._stack[-_CALLS[name] :]
            self._stack.append(_OTHER)
        elif name == "OBJ":
            self._call(self._pop_mark()[0])
            self._stack.append(_OTHER)
        elif name == "BUILD":
            self._stack.pop()  # the object stays, filled by its class
            if isinstance(self._stack[-1], Global):
                self._call(self._stack[-1])  # a class or module whose attributes are set
        else:
            self._move(opcode)

    def _look_up(self, module: Any, name: Any) -> Global:
        known = isinstance(module, str) and isinstance(name, str)
        found = Global(f"{module}.{name}" if known else COMPUTED)
        self.names.imported.setdefault(found.name)
        return found

    def _call(self, found: Any) -> None:
        name = found.name if isinstance(found, Global) else COMPUTED
        self.names.called.setdefault(name)

    def _pop_mark(self) -> list[Any]:
        """Remove and return what is above the last mark, and the mark."""
        place = len(self._stack) - 1 - self._stack[::-1].index(_MARK)
        above = self._stack[place + 1 :]
        del self._stack[place:]
        return above

    def _move(self, opcode: Any) -> None:
        """Do to the stack what any other opcode does: nothing is looked up or called."""
        before = [one.name for one in opcode.stack_before]
        if "mark" in before:
            self._pop_mark()
            before = before[: before.index("mark")]
        for _ in before:
            self._stack.pop()
        self._stack += [_OTHER] * len(opcode.stack_after)


def names_in(stream: BinaryIO) -> Names:
    """Return the names in the pickle that begins at the position of a file; it ends behind it."""
    machine = _Machine()
    try:
        for opcode, argument, _ in pickletools.genops(stream):
            machine.step(opcode, argument)
        machine.names.is_whole = True
    except Exception as error:  # damaged bytes may raise any kind
        machine.names.fault = f"{type(error).__name__}: {error}"
    return machine.names


def pickles_in(stream: BinaryIO, most: int = 1000) -> Iterator[Names]:
    """Yield the names in pickles that follow each other, up to other data or a fault."""
    for number in range(most):
        place = stream.tell()
        first = stream.read(1)
        stream.seek(place)
        if not first or (number and first != b"\x80"):
            return  # the end, or data behind the pickles
        names = names_in(stream)
        yield names
        if not names.is_whole:
            return
