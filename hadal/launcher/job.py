"""Descriptions of a job: a program, and the hosts' slots to run it on. Frozen, sent as JSON."""

from __future__ import annotations

import base64
import json
import sys
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

    def host_of(self, rank: int) -> str:
        """Return the host that a rank runs on."""
        return next(host for host in self.pool if rank in self.ranks_of(host))


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


def rank_command(program: Program, python: str = sys.executable) -> list[str]:
    """Return the command that starts a rank's wrapper process."""
    return [python, "-u", "-m", "hadal.launcher.rank", *cut(packed(program))]


def cut(word: str) -> list[str]:
    """Split a long word: Linux accepts none above 128 KiB."""
    return [word[start : start + _WORD] for start in range(0, len(word), _WORD)]


def where_hadal_is() -> str:
    """Return the folder that holds the package, so that started processes use the same one."""
    return str(Path(__file__).parents[2])
