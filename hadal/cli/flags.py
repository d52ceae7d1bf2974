"""The flags of `hadal run`, and what they say: of the job to start, and of what is told of it."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hadal.cli.arguments import positive
from hadal.errors import LaunchError

if TYPE_CHECKING:
    from hadal.cli.elastic import Bounds
    from hadal.launcher.choices import Choices

_LEVELS = ("trace", "debug", "info", "warning", "error", "critical")
_LAUNCHERS = ("ssh", "pdsh", "openmpi", "mpich", "mvapich", "impi", "slurm")


class Flag(NamedTuple):
    """One flag of the command."""

    names: tuple[str, ...]
    help: str
    keywords: dict[str, Any]

    @property
    def takes_value(self) -> bool:
        """Whether the next word belongs to it."""
        return self.keywords.get("action") != "store_true"


def _flag(names: str, told: str, **keywords: Any) -> Flag:
    return Flag(tuple(names.split()), told, keywords)


def _switch(names: str, told: str) -> Flag:
    return _flag(names, told, action="store_true")


def _count(text: str) -> int | None:
    """Read a number of hosts or slots; -1 leaves it open."""
    return None if text == "-1" else positive(text)


def _counts(text: str) -> int | tuple[int, int] | None:
    """Read a number of hosts, or the least and the most."""
    least, colon, most = text.partition(":")
    return (positive(least), positive(most)) if colon else _count(text)


def _port(text: str) -> int:
    """Read the number of a port."""
    value = positive(text)
    if value >= 1 << 16:
        raise argparse.ArgumentTypeError(f"expected a port, 1 to 65535, got {text}")
    return value


def _number(text: str) -> int | None:
    """Read a host's number; -1 leaves it open."""
    return None if text == "-1" else int(text)


_WHERE = (
    _flag("-H --hostfile", "lines `NAME slots=N` (%(default)s)", default="/job/hostfile"),
    _flag("-i --include", "take these alone: NAME[:SLOT,SLOT][@NAME...]", default=""),
    _flag("-e --exclude", "take all but these", default=""),
    _flag(
        "--num_nodes",
        "take the first N hosts; with --elastic_training also MIN:MAX, at least and at most",
        type=_counts,
        metavar="N",
    ),
    _flag(
        "--num_gpus --num_accelerators",
        "start N ranks on each host (default: one for each accelerator)",
        dest="num_slots",
        type=_count,
        metavar="N",
    ),
)
_MEETING = (
    _flag("--master_addr", "address of rank 0's host", default=""),
    _flag(
        "--master_port", "port of rank 0's host (default 29500; on one host a free one)", type=_port
    ),
    _flag("--launcher", f"how other hosts are started: {', '.join(_LAUNCHERS)}", default="ssh"),
    _flag("--launcher_args", "more words for that program, in quotes", default=""),
    _flag("--ssh_port", "port of sshd on the other hosts", type=_port),
    _switch("--no_ssh", "start this host's ranks alone; each host runs this command itself"),
    _flag("--node_rank", "with --no_ssh: which host of the hostfile this is", type=_number),
    _switch("--no_ssh_check", "start ranks without waiting for every host to answer"),
    _switch("--force_multi", "take ssh even for this machine"),
    _flag("--venv_script", "sourced on other hosts before Python is started", default=""),
)
_PROGRAM = (
    _switch("--module", "the program is a module: python -m"),
    _switch("--no_python", "the program is not started by Python"),
    _switch("--no_local_rank", "do not give --local_rank=N as first argument"),
    _switch("--as-deepspeed", "`import deepspeed` finds Hadal, in every rank"),
    _switch("--bind_cores_to_rank", "give each rank cores of its own"),
    _flag("--bind_core_list", "which cores, such as 0-3,8", default=""),
    _flag(
        "--enable_each_rank_log",
        "write each rank's output to DIR/rankN.log",
        metavar="DIR",
        default="",
    ),
    _switch("--save_pid", "write this process's number to a file in the temporary folder"),
    _flag("--log_level", f"how much this command says: {', '.join(_LEVELS)}", default="info"),
    _switch("-q --quiet", "say nothing but what has failed"),
)
_ELASTIC = (
    _switch("--elastic_training", "go on without hosts that are lost, and with those that come"),
    _flag(
        "--min_elastic_nodes",
        "with fewer hosts the job waits (default 1)",
        type=_count,
        metavar="N",
    ),
    _flag(
        "--max_elastic_nodes",
        "more hosts stand by (default: all that there are)",
        type=_count,
        metavar="N",
    ),
    _flag(
        "--max_restarts",
        "how often ranks that fail are started again (default 3)",
        type=_number,
        metavar="N",
    ),
)
_SEARCH = (
    _flag(
        "--autotuning",
        "search for the fastest configuration (tune), then train with it (run)",
        choices=("tune", "run"),
        default="",
    ),
)
KNOWN = {"--launcher": _LAUNCHERS, "--log_level": _LEVELS}
"""What these flags may say."""
GROUPS = {
    "where": _WHERE,
    "how hosts are reached": _MEETING,
    "the program": _PROGRAM,
    "hosts that come and go": _ELASTIC,
    "a search before training": _SEARCH,
}


def divided(words: Sequence[str], *valued: str) -> tuple[list[str], list[str]]:
    """The words of `hadal run` up to the program's name, and the program's own.

    `valued` are more flags to which the next word belongs.
    """
    takes = {
        name: flag.takes_value for flags in GROUPS.values() for flag in flags for name in flag.names
    }
    takes |= dict.fromkeys(valued, True)
    at = 0
    while at < len(words) and words[at].startswith("-"):
        if words[at] == "--":
            return list(words[:at]), list(words[at + 1 :])
        at += 1 + takes.get(words[at], False)
    return list(words[:at]), list(words[at:])


def choices_of(parsed: argparse.Namespace) -> Choices:
    """What the flags say.

    Raises:
        LaunchError: they cannot be read, or contradict each other.
    """
    from hadal.launcher.choices import Choices

    if not parsed.program:
        raise LaunchError("no program: expected hadal run [FLAG ...] script.py [ARGUMENT ...]")
    if parsed.log_level not in _LEVELS:
        raise LaunchError(f"--log_level {parsed.log_level}: expected one of {', '.join(_LEVELS)}")
    if parsed.launcher.lower() not in _LAUNCHERS:
        raise LaunchError(f"--launcher {parsed.launcher}: expected one of {', '.join(_LAUNCHERS)}")
    told = {key: value for key, value in vars(parsed).items() if key in Choices.__slots__}
    if isinstance(parsed.num_nodes, tuple):
        told.update(_bounds(parsed))
    if parsed.elastic_training:
        told.update(elastic_bounds(parsed.program)._asdict())
    told.update(
        words=tuple(parsed.program),
        launcher=parsed.launcher.lower(),
        launcher_args=_words(parsed.launcher_args),
    )
    return Choices(**told)


def _words(text: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise LaunchError(f"--launcher_args {text!r} cannot be read: {error}") from None


def _bounds(parsed: argparse.Namespace) -> dict[str, Any]:
    """What `--num_nodes MIN:MAX` says."""
    if not parsed.elastic_training:
        raise LaunchError(
            f"--num_nodes {':'.join(map(str, parsed.num_nodes))}: a range is for"
            " --elastic_training; give one number"
        )
    if parsed.min_elastic_nodes or parsed.max_elastic_nodes:
        raise LaunchError(
            "--num_nodes MIN:MAX says what --min_elastic_nodes and --max_elastic_nodes say too;"
            " give one of both"
        )
    least, most = parsed.num_nodes
    return {"num_nodes": None, "min_elastic_nodes": least, "max_elastic_nodes": most}


def elastic_bounds(program: Sequence[str]) -> Bounds:
    """What the program's own configuration says of how many ranks there may be.

    That is the file after `--deepspeed_config` or `--deepspeed`, as programs commonly take it.
    Nothing is said where there is none, or none with `elasticity`.
    """
    from hadal.cli.elastic import Bounds, bounds_of

    for flag in ("--deepspeed_config", "--deepspeed"):
        for at, word in enumerate(program):
            given, equals, value = word.partition("=")
            if not equals:
                value = program[at + 1] if at + 1 < len(program) else ""
            if given == flag and value and Path(value).is_file():
                return bounds_of(value)
    return Bounds()


class Said:
    """What this command says itself, on the standard error."""

    def __init__(self, parsed: argparse.Namespace) -> None:
        self._is_detailed = parsed.log_level in ("trace", "debug") and not parsed.quiet
        self._is_quiet = parsed.quiet or parsed.log_level in ("warning", "error", "critical")

    def note(self, text: str) -> None:
        """Tell what people may want to know."""
        if not self._is_quiet:
            self.report(text)

    def detail(self, text: str) -> None:
        """Tell what they want to know who look for something."""
        if self._is_detailed:
            self.report(text)

    def report(self, text: str) -> None:
        """Tell what has failed."""
        print(f"hadal run: {text}", file=sys.stderr, flush=True)
