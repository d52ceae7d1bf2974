"""The flags of `hadal run`, and their translation into a job and its output."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hadal.cli.parser import integer, port, spelled, underscored
from hadal.cli.terminal import note, say
from hadal.errors import LaunchError

if TYPE_CHECKING:
    from hadal.cli.explain import Bounds
    from hadal.launcher.choices import Choices

_LEVELS = ("trace", "debug", "info", "warning", "error", "critical")
_LABEL = "hadal run"
_LAUNCHERS = ("ssh", "pdsh", "openmpi", "mpich", "mvapich", "impi", "slurm")


class Flag(NamedTuple):
    """One flag of the command."""

    names: list[str]
    keywords: dict[str, Any]

    @property
    def takes_value(self) -> bool:
        """Return True if the next word belongs to it."""
        return "action" not in self.keywords


def _flag(words: str, help: str, type: Any = None, default: Any = None, **keywords: Any) -> Flag:
    return Flag(*spelled(words, help, type, default, **keywords))


_count = integer(ge=1)


def _count_or_open(text: str) -> int | None:
    """Read a number of hosts or slots; -1 leaves it open."""
    return None if text == "-1" else _count(text)


def _counts(text: str) -> int | tuple[int, int] | None:
    """Read a number of hosts, or the least and the most."""
    least, colon, most = text.partition(":")
    return (_count(least), _count(most)) if colon else _count_or_open(text)


def _number(text: str) -> int | None:
    """Read a number that may be 0; -1 leaves it open."""
    return None if text == "-1" else integer(ge=0)(text)


_HOSTS = (
    _flag(
        "-H --hostfile FILE",
        "Lines `NAME slots=N` (default: %(default)s, if it exists)",
        default="/job/hostfile",
    ),
    _flag("-i --include SLOTS", "Use only these slots: NAME[:SLOT,SLOT][@NAME...]", default=""),
    _flag("-e --exclude SLOTS", "Use all slots except these", default=""),
    _flag("--num_nodes N", "Use the first N hosts; with --elastic_training also MIN:MAX", _counts),
    _flag(
        "--num_gpus --num_accelerators N",
        "Start N ranks on each host (default: one for each accelerator)",
        _count_or_open,
        dest="num_slots",
    ),
)
_REACHING = (
    _flag("--master_addr HOST", "Address of rank 0's host", default=""),
    _flag(
        "--master_port PORT",
        "Port of rank 0's host (default: 29500; a free one if there is one host)",
        port,
    ),
    _flag(
        "--launcher NAME",
        f"How other hosts are started: {', '.join(_LAUNCHERS)} (default: ssh)",
        str.lower,
        "ssh",
        choices=_LAUNCHERS,
    ),
    _flag("--launcher_args WORDS", "More arguments for that program, in quotes", default=""),
    _flag("--ssh_port PORT", "Port of sshd on the other hosts", port),
    _flag("--no_ssh", "Start this host's ranks only; each host runs this command itself"),
    _flag("--node_rank N", "With --no_ssh: which host of the hostfile this is, from 0", _number),
    _flag("--no_ssh_check", "Start ranks without waiting for every host to answer"),
    _flag("--force_multi", "Use ssh even for this machine"),
    _flag("--venv_script FILE", "Sourced on other hosts before Python is started", default=""),
)
_PROGRAM = (
    _flag("--module", "The program is a module, as after python -m"),
    _flag("--no_python", "The program is not started by Python"),
    _flag("--as-deepspeed", "`import deepspeed` finds Hadal in every rank; adds --local_rank"),
    _flag(
        "--local_rank",
        "Give --local_rank=N as the first argument; LOCAL_RANK is set in any case",
        action="store_const",
        const=True,
    ),
    _flag(
        "--no_local_rank",
        "Never pass it, even with --as-deepspeed",
        action="store_const",
        const=False,
        dest="local_rank",
    ),
    _flag("--bind_cores_to_rank", "Bind each rank to its own cores"),
    _flag("--bind_core_list CORES", "Which cores, such as 0-3,8", default=""),
    _flag("--enable_each_rank_log DIR", "Write each rank's output to DIR/rankN.log", default=""),
    _flag("--save_pid", "Write this process's number to a file in the temporary directory"),
    _flag(
        "--log_level LEVEL",
        f"How much this command reports: {', '.join(_LEVELS)} (default: info)",
        default="info",
        choices=_LEVELS,
    ),
    _flag("-q --quiet", "Report failures only"),
    _flag("--dry-run", "Print the commands of each host, and start nothing"),
)
_ELASTIC = (
    _flag("--elastic_training", "Go on without hosts that are lost, and with those that come"),
    _flag("--min_elastic_nodes N", "Wait while there are fewer hosts (default: 1)", _count_or_open),
    _flag(
        "--max_elastic_nodes N",
        "Maximum hosts; others stand by (default: all hosts)",
        _count_or_open,
    ),
    _flag("--max_restarts N", "How often ranks that fail are started again (default: 3)", _number),
)
_SEARCH = (
    _flag(
        "--autotuning",
        "Search for the fastest configuration (tune), then train with it (run)",
        default="",
        choices=("tune", "run"),
    ),
)
GROUPS = {
    "Hosts and slots": _HOSTS,
    "Reaching other hosts": _REACHING,
    "Program": _PROGRAM,
    "Elastic training": _ELASTIC,
    "Autotuning": _SEARCH,
}


def divided(words: Sequence[str], *valued: str) -> tuple[list[str], list[str]]:
    """Return the words of `hadal run` up to the program's name, and the program's own.

    `valued` are more flags to which the next word belongs. The beginning of one flag's name alone
    stands for it, as for DeepSpeed's command.
    """
    every = [flag for flags in GROUPS.values() for flag in flags]
    takes = {underscored(name) for flag in every if flag.takes_value for name in flag.names}
    takes |= set(valued)
    known = takes | {underscored(name) for flag in every for name in flag.names}
    words, at = list(words), 0
    while at < len(words) and words[at].startswith("-"):
        if words[at] == "--":
            return words[:at], words[at + 1 :]
        name, equals, value = words[at].partition("=")
        meant = [flag for flag in known if flag.startswith(underscored(name))]
        if len(meant) == 1 and underscored(name) not in known:
            words[at] = meant[0] + equals + value
        at += 1 + (underscored(words[at]) in takes)
    return words[:at], words[at:]


def choices_of(parsed: argparse.Namespace) -> Choices:
    """Return the parsed flags.

    Raises:
        LaunchError: they cannot be read, or contradict each other.
    """
    from hadal.launcher.choices import Choices

    if not parsed.program:
        raise LaunchError("no program: expected hadal run [OPTIONS] SCRIPT [ARGUMENT ...]")
    chosen = {key: value for key, value in vars(parsed).items() if key in Choices.__slots__}
    if isinstance(parsed.num_nodes, tuple):
        chosen.update(_bounds(parsed))
    if parsed.elastic_training:
        chosen.update(elastic_bounds(parsed.program)._asdict())
    chosen.update(
        words=tuple(parsed.program),
        launcher_args=_words(parsed.launcher_args),
    )
    return Choices(**chosen)


def _words(text: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise LaunchError(f"--launcher_args {text!r} cannot be read: {error}") from None


def _bounds(parsed: argparse.Namespace) -> dict[str, Any]:
    """Return the range of nodes of `--num_nodes MIN:MAX`."""
    if not parsed.elastic_training:
        raise LaunchError(
            f"--num_nodes {':'.join(map(str, parsed.num_nodes))}: a range needs"
            " --elastic_training; pass one number"
        )
    if parsed.min_elastic_nodes or parsed.max_elastic_nodes:
        raise LaunchError(
            "--num_nodes MIN:MAX sets the same as --min_elastic_nodes and --max_elastic_nodes;"
            " give only one of them"
        )
    least, most = parsed.num_nodes
    return {"num_nodes": None, "min_elastic_nodes": least, "max_elastic_nodes": most}


def elastic_bounds(program: Sequence[str]) -> Bounds:
    """Return the numbers of ranks that the program's own configuration allows.

    That is the file after `--deepspeed_config` or `--deepspeed`, as programs commonly accept it.
    Without such a file, or without `elasticity` in it, the result has no limits.
    """
    from hadal.cli.explain import Bounds, bounds_of

    for flag in ("--deepspeed_config", "--deepspeed"):
        for at, word in enumerate(program):
            given, equals, value = word.partition("=")
            if not equals:
                value = program[at + 1] if at + 1 < len(program) else ""
            if given == flag and value and Path(value).is_file():
                return bounds_of(value)
    return Bounds()


class CommandOutput:
    """Write a line of this command itself to the standard error."""

    def __init__(self, parsed: argparse.Namespace) -> None:
        self.is_detailed = parsed.log_level in ("trace", "debug") and not parsed.quiet
        self._is_quiet = parsed.quiet or parsed.log_level in ("warning", "error", "critical")

    def note(self, text: str) -> None:
        """Print a note."""
        if not self._is_quiet:
            note(text, label=_LABEL)

    def detail(self, text: str) -> None:
        """Print details for those who look for something."""
        if self.is_detailed:
            note(text, label=_LABEL)

    def report(self, text: str) -> None:
        """Print an error."""
        style = "hint" if text.startswith("hint: ") else "error"
        say(_LABEL, text, "faint" if text.startswith("  ") else style)
