"""Descriptions of a job, sent to its processes as JSON, and their messages back: frames.

A frame is one line among other output: a mark, then JSON. Several processes may share a pipe or
connection, so a frame is short enough to be written atomically (POSIX: 4096 bytes).
"""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from hadal.launcher.hosts import Pool

GRACE_S, LOST_S, JOIN_S = 30.0, 30.0, 600.0
_WORD = 100_000
# Messages to an agent of an elastic job: a round, or the end of the current one.
ROUND, CHANGE = "ROUND", "CHANGE"


class ProgramKind(str, Enum):
    """The kind of a program, which decides how it is started."""

    SCRIPT = "script"
    MODULE = "module"
    BARE = "bare"
    """Started without Python."""


@dataclass(frozen=True, slots=True)
class Program:
    """The program of each rank, and how it runs."""

    words: tuple[str, ...]
    """The program's name and arguments, unchanged."""
    folder: str
    """The working directory."""
    kind: ProgramKind = ProgramKind.SCRIPT
    as_deepspeed: bool = False
    passes_local_rank: bool = False
    """True if `--local_rank=N` becomes its first argument."""
    binds: bool = False
    """True if each rank is bound to its own cores."""
    cores: tuple[int, ...] | None = None
    """The cores to divide among ranks; None: all."""
    logs: str = ""
    """The folder for files with each rank's output."""
    grace_s: float = GRACE_S
    """The seconds that a rank has to end before it is killed."""
    slots: tuple[tuple[int, ...], ...] = ()
    """Each host's slots, if no process on the host can set them for its ranks; empty: all."""
    lost_s: float = LOST_S
    """The seconds without a heartbeat after which a host counts as lost."""

    def command(self, local_rank: int, python: str = sys.executable) -> list[str]:
        """Return the command that starts one rank."""
        name, *arguments = self.words
        if self.passes_local_rank:
            arguments = [f"--local_rank={local_rank}", *arguments]
        if self.kind is ProgramKind.BARE:
            return [name, *arguments]
        start = ["-m", name] if self.kind is ProgramKind.MODULE else [name]
        alias = ["-m", "hadal.compat"] if self.as_deepspeed else []
        return [python, "-u", *alias, *start, *arguments]


@dataclass(frozen=True, slots=True)
class Elastic:
    """The limits of an elastic job, which continues when hosts are lost or come back."""

    least: int
    """The fewest hosts; with fewer it waits."""
    most: int
    """The most hosts; others stand by."""
    restarts: int
    """The number of failures of its ranks after which they are restarted."""
    join_s: float
    """The seconds to wait for hosts."""
    world_sizes: tuple[int, ...] = ()
    """The numbers of ranks that can train the batch; empty: any."""
    pause_s: float = 0.0
    """The least seconds of a round before more hosts are taken in."""


@dataclass(frozen=True, slots=True)
class Job:
    """A program on the slots of hosts."""

    program: Program
    pool: Pool
    variables: dict[str, str] = field(default_factory=dict)
    """Variables set for every rank, over those of its host, which they may name (`expanded`)."""
    shows_slots: bool = True
    """True if each rank sees only its host's slots, through the accelerators' own variables."""
    port: int = 29500
    """The rendezvous port; 0: the agent of the only host, or of each, takes a free one."""
    elastic: Elastic | None = None

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return sum(len(slots) for slots in self.pool.values())

    def ranks_of(self, host: str) -> range:
        """Return the ranks of a host, which follow the order of hosts and slots."""
        first = 0
        for name, slots in self.pool.items():
            if name == host:
                return range(first, first + len(slots))
            first += len(slots)
        raise KeyError(host)


@dataclass(frozen=True, slots=True)
class HostShare:
    """One host's share of a job."""

    program: Program
    slots: tuple[int, ...]
    node_rank: int
    nodes: int
    address: str
    port: int
    variables: dict[str, str]
    shows_slots: bool
    host: str
    """The host's name in the job."""
    is_elastic: bool = False
    """True if each round assigns the ranks anew."""


@dataclass(frozen=True, slots=True)
class Round:
    """A host's part in a round: the ranks of an elastic job, from one start to the next."""

    number: int
    node_rank: int
    nodes: int
    address: str
    port: int
    """The port on which the first host's agent listens."""


def share_of(job: Job, host: str, address: str) -> HostShare:
    """Return one host's share of a job."""
    return HostShare(
        program=job.program,
        slots=job.pool[host],
        node_rank=list(job.pool).index(host),
        nodes=len(job.pool),
        address=address,
        port=job.port,
        variables=job.variables,
        shows_slots=job.shows_slots,
        host=host,
        is_elastic=job.elastic is not None,
    )


def packed(value: Program | HostShare | Job | Round) -> str:
    """Encode a value as one word of letters, digits, `-` and `_`."""
    return base64.urlsafe_b64encode(json.dumps(asdict(value)).encode()).decode().rstrip("=")


def program_in(word: str) -> Program:
    """Decode a packed program."""
    return _program(_unpacked(word))


def share_in(word: str) -> HostShare:
    """Decode a packed share."""
    unpacked = _unpacked(word)
    unpacked.update(program=_program(unpacked["program"]), slots=tuple(unpacked["slots"]))
    return HostShare(**unpacked)


def round_in(word: str) -> Round:
    """Decode a packed round."""
    return Round(**_unpacked(word))


def job_in(word: str) -> Job:
    """Decode a packed job. An elastic job is never sent whole."""
    unpacked = _unpacked(word)
    pool = {host: tuple(slots) for host, slots in unpacked["pool"].items()}
    unpacked.update(program=_program(unpacked["program"]), pool=pool)
    return Job(**unpacked)


def _unpacked(word: str) -> dict[str, Any]:
    unpacked: dict[str, Any] = json.loads(base64.urlsafe_b64decode(word + "=" * (-len(word) % 4)))
    return unpacked


def _program(unpacked: dict[str, Any]) -> Program:
    cores = unpacked["cores"]
    unpacked.update(
        words=tuple(unpacked["words"]),
        kind=ProgramKind(unpacked["kind"]),
        cores=None if cores is None else tuple(cores),
        slots=tuple(map(tuple, unpacked["slots"])),
    )
    return Program(**unpacked)


def rank_command(program: Program) -> list[str]:
    """Return the command that starts a rank's wrapper process."""
    return [sys.executable, "-u", "-m", "hadal.launcher.rank", *cut(packed(program))]


def cut(word: str) -> list[str]:
    """Split a long word: Linux accepts none above 128 KiB."""
    return [word[start : start + _WORD] for start in range(0, len(word), _WORD)]


def where_hadal_is() -> str:
    """Return the folder that holds the package, so that started processes use the same one."""
    return str(Path(__file__).parents[2])


# ---- messages ------------------------------------------------------------------------------------


_MARK = b"\x1ehadal "
PIECE_NBYTES = 2700
"""The most output in one frame: base64 makes 3600 bytes of it."""


@dataclass(frozen=True, slots=True)
class Hello:
    """A message that a host is reached and ready to start ranks."""

    addresses: tuple[str, ...]
    reached_at: str
    """The address at which ssh reached it; empty if ssh did not start it."""


@dataclass(frozen=True, slots=True)
class RankStarted:
    """A message that a rank's process has started."""

    rank: int
    host: str
    pid: int
    cores: str = ""
    """The cores that it is bound to, and why these; empty if it is not."""


@dataclass(frozen=True, slots=True)
class RankOutput:
    """Some of a rank's output."""

    rank: int
    is_error: bool
    text: bytes


@dataclass(frozen=True, slots=True)
class RankEnded:
    """A message that a rank's process has ended; a negative `code` is the signal that ended it."""

    rank: int
    code: int
    was_stopped: bool
    """True if it had been requested to end."""


@dataclass(frozen=True, slots=True)
class HostEnded:
    """A message that all of a host's processes have ended."""

    code: int
    notes: str = field(default="")
    """The last lines that torch's agent wrote."""


@dataclass(frozen=True, slots=True)
class RoundRequest:
    """A request for a round, from a host of an elastic job on which no rank runs."""

    port: int
    """The port on which its agent listens for the others, if it becomes the first host."""


Frame = Hello | RankStarted | RankOutput | RankEnded | HostEnded | RoundRequest
_KINDS = {
    kind.__name__: kind
    for kind in (Hello, RankStarted, RankOutput, RankEnded, HostEnded, RoundRequest)
}


def encoded(frame: Frame) -> bytes:
    """Encode a frame as a line."""
    values = asdict(frame)
    if isinstance(frame, RankOutput):
        values["text"] = base64.b64encode(frame.text).decode()
    return _MARK + json.dumps([type(frame).__name__, values]).encode() + b"\n"


def said(rank: int, is_error: bool, text: bytes) -> Iterator[bytes]:
    """Yield the frames for a rank's output."""
    for start in range(0, len(text), PIECE_NBYTES):
        yield encoded(RankOutput(rank, is_error, text[start : start + PIECE_NBYTES]))


def decoded(line: bytes) -> Frame | None:
    """Return the frame in a line, or None.

    Some launchers put a label before each line: text before the mark is skipped.
    """
    _, mark, values = line.partition(_MARK)
    if not mark:
        return None
    try:
        name, fields = json.loads(values)
        if name == "RankOutput":
            fields["text"] = base64.b64decode(fields["text"])
        elif name == "Hello":
            fields["addresses"] = tuple(fields["addresses"])
        frame: Frame = _KINDS[name](**fields)
    except (ValueError, TypeError, KeyError):
        return None
    return frame


class Lines:
    """A splitter of a stream into lines; a carriage return ends one too, as in progress bars."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self.rest_nbytes = 0

    @property
    def rest(self) -> bytes:
        """The incomplete last line."""
        return b"".join(self._parts)

    def feed(self, piece: bytes) -> list[bytes]:
        """Add text; return the lines that are complete now, each with its end."""
        # A \r at the very end may be one half of \r\n.
        is_open = bool(self._parts) and self._parts[-1].endswith(b"\r")
        if not is_open and b"\n" not in piece and b"\r" not in piece:
            self._keep(piece)  # a long line is not searched again for each text that is added
            return []
        lines = (self.take() + piece).splitlines(keepends=True)
        if lines and not lines[-1].endswith(b"\n"):
            self._keep(lines.pop())
        return lines

    def take(self) -> bytes:
        """Return the incomplete line and clear it."""
        rest, self._parts, self.rest_nbytes = self.rest, [], 0
        return rest

    def _keep(self, piece: bytes) -> None:
        self._parts.append(piece)
        self.rest_nbytes += len(piece)
