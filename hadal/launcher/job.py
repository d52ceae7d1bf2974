"""What is to run: a program, on which slots of which hosts. Frozen values that travel as JSON."""

from __future__ import annotations

import base64
import json
import sys
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from hadal.launcher.hosts import Pool

GRACE_S, LOST_S, JOIN_S = 5.0, 30.0, 600.0
_WORD = 100_000
# What an agent of an elastic job is told: a round, or that the one under way is over.
ROUND, CHANGE = "ROUND", "CHANGE"


class Kind(str, Enum):
    """How a program is started."""

    SCRIPT = "script"
    MODULE = "module"
    BARE = "bare"
    """Not by Python."""


@dataclass(frozen=True, slots=True)
class Program:
    """The program of each rank, and what surrounds it."""

    words: tuple[str, ...]
    """Its name and arguments, untouched."""
    folder: str
    """Where it runs."""
    kind: Kind = Kind.SCRIPT
    as_deepspeed: bool = False
    tells_local_rank: bool = True
    """`--local_rank=N` is its first argument."""
    binds: bool = False
    """Each rank has cores of its own."""
    cores: tuple[int, ...] | None = None
    """Which cores there are to share out; None: all."""
    logs: str = ""
    """The folder for a file of each rank's output."""
    grace_s: float = GRACE_S
    """How long a rank may take to end once it was asked to, before it is killed."""
    slots: tuple[tuple[int, ...], ...] = ()
    """Those of each host, where no process on the host can tell its ranks; empty: all."""
    lost_s: float = LOST_S
    """How long hosts may be without a sign of each other before they give up."""

    def command(self, local_rank: int, python: str = sys.executable) -> list[str]:
        """The words that start one rank."""
        name, *arguments = self.words
        if self.tells_local_rank:
            arguments = [f"--local_rank={local_rank}", *arguments]
        if self.kind is Kind.BARE:
            return [name, *arguments]
        start = ["-m", name] if self.kind is Kind.MODULE else [name]
        alias = ["-m", "hadal.compat"] if self.as_deepspeed else []
        return [python, "-u", *alias, *start, *arguments]


@dataclass(frozen=True, slots=True)
class Elastic:
    """How a job goes on when hosts are lost or come back."""

    least: int
    """With fewer hosts it waits."""
    most: int
    """More hosts stand by."""
    restarts: int
    """How often its ranks may fail of themselves, and are started again."""
    join_s: float
    """How long it waits for hosts."""
    world_sizes: tuple[int, ...] = ()
    """The numbers of ranks that can train the batch; empty: any."""
    pause_s: float = 0.0
    """How long a round lasts at least, where it could go on."""


@dataclass(frozen=True, slots=True)
class Job:
    """A program on the slots of hosts."""

    program: Program
    pool: Pool
    variables: dict[str, str] = field(default_factory=dict)
    """Set for every rank, over what its host has."""
    shows_slots: bool = True
    """Each rank sees its host's slots alone, by the accelerators' own variables."""
    port: int = 29500
    """Where ranks meet; 0: the agent of the only host, or of each, takes a free one."""
    elastic: Elastic | None = None

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return sum(len(slots) for slots in self.pool.values())

    def ranks_of(self, host: str) -> range:
        """The ranks of a host: hosts come in their order, and their slots too."""
        first = 0
        for name, slots in self.pool.items():
            if name == host:
                return range(first, first + len(slots))
            first += len(slots)
        raise KeyError(host)

    def host_of(self, rank: int) -> str:
        """The host that a rank runs on."""
        return next(host for host in self.pool if rank in self.ranks_of(host))


@dataclass(frozen=True, slots=True)
class Share:
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
    """Its name in the job."""
    is_elastic: bool = False
    """Which rank is where is told round by round."""


@dataclass(frozen=True, slots=True)
class Round:
    """What a host is told of a round: the ranks of an elastic job, from one start to the next."""

    number: int
    node_rank: int
    nodes: int
    address: str
    port: int
    """Where its first host's agent listens."""


def share_of(job: Job, host: str, address: str) -> Share:
    """What one host is told."""
    return Share(
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


def packed(value: Program | Share | Job | Round) -> str:
    """A value as one word of letters, digits, `-` and `_`."""
    return base64.urlsafe_b64encode(json.dumps(asdict(value)).encode()).decode().rstrip("=")


def program_in(word: str) -> Program:
    """The program that was packed."""
    return _program(_unpacked(word))


def share_in(word: str) -> Share:
    """The share that was packed."""
    told = _unpacked(word)
    told.update(program=_program(told["program"]), slots=tuple(told["slots"]))
    return Share(**told)


def round_in(word: str) -> Round:
    """The round that was packed."""
    return Round(**_unpacked(word))


def job_in(word: str) -> Job:
    """The job that was packed. An elastic one never travels whole."""
    told = _unpacked(word)
    pool = {host: tuple(slots) for host, slots in told["pool"].items()}
    told.update(program=_program(told["program"]), pool=pool)
    return Job(**told)


def _unpacked(word: str) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(base64.urlsafe_b64decode(word + "=" * (-len(word) % 4)))
    return told


def _program(told: dict[str, Any]) -> Program:
    cores = told["cores"]
    told.update(
        words=tuple(told["words"]),
        kind=Kind(told["kind"]),
        cores=None if cores is None else tuple(cores),
        slots=tuple(map(tuple, told["slots"])),
    )
    return Program(**told)


def rank_command(program: Program, python: str = sys.executable) -> list[str]:
    """The words that start the process beside a rank."""
    return [python, "-u", "-m", "hadal.launcher.rank", *cut(packed(program))]


def cut(word: str) -> list[str]:
    """One word as several: Linux takes none above 128 KiB, and arguments may be long."""
    return [word[start : start + _WORD] for start in range(0, len(word), _WORD)]


def where_hadal_is() -> str:
    """The folder that holds the package: processes that are started must find the same one."""
    return str(Path(__file__).parents[2])
