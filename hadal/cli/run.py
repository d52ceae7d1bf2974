"""`hadal run [FLAG ...] script.py [ARGUMENT ...]`: start a program on one machine or on many."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from shutil import which
from typing import TYPE_CHECKING, Any, NamedTuple

from hadal.cli.parser import Parser, add_command, add_group, integer, port, spelled, underscored
from hadal.cli.terminal import MISUSED, aligned, heading, key, note, say, show
from hadal.errors import LaunchError, nearest

if TYPE_CHECKING:
    from hadal.cli.explain import Bounds
    from hadal.launcher.choices import Choices, LaunchPlan
    from hadal.launcher.start_commands import StartCommand


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
    chosen.update(words=tuple(parsed.program), launcher_args=_words(parsed.launcher_args))
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


UNREAD = 141  # a shell's exit code for a process that SIGPIPE has ended


def add_to(group: Any) -> None:
    """Add the subcommand."""
    parser = add_command(
        group,
        "run",
        help="Start a program on one machine, or on many over ssh, Slurm or MPI",
        description="Start a program on all slots of one machine, or on many machines over ssh,"
        " Slurm or MPI. The flags are those of the `deepspeed` command; arguments after the"
        " program's name are passed to it unchanged.",
        examples=(
            "hadal run train.py --lr 1e-3",
            "hadal run --num_gpus 2 train.py",
            "hadal run --hostfile hosts --num_nodes 2 train.py",
        ),
        words="SCRIPT [ARGUMENT ...]",
    )
    for title, flags in GROUPS.items():
        group = parser.add_argument_group(title)
        for flag in flags:
            group.add_argument(*flag.names, **flag.keywords)
    parser.set_defaults(run=run)


def start(words: Sequence[str]) -> int:
    """Run `hadal run` with these arguments, for other commands that need ranks."""
    return run(parsed_words(words))


def parsed_words(words: Sequence[str]) -> argparse.Namespace:
    """Return the parsed arguments of `hadal run`."""
    own, program = divided(words)
    parser = Parser(prog="hadal")
    add_to(add_group(parser, "command"))
    return parser.parse_args(["run", *own], argparse.Namespace(own=own, program=program))


def run(parsed: argparse.Namespace) -> int:
    """Run the program, or search first; return the exit code of the rank that ended worst."""
    with pid_file(os.getpid() if parsed.save_pid else None) as path:
        if path is not None:
            CommandOutput(parsed).note(f"the number of this process is in {path}")
        if parsed.autotuning:
            from hadal.cli.tuning import tune

            code, best = tune(parsed)
            if code or parsed.autotuning == "tune":
                return code
            parsed.program = best
        return _train(parsed)


def _train(parsed: argparse.Namespace) -> int:
    from hadal.launcher.choices import planned

    said = CommandOutput(parsed)
    choices = choices_of(parsed)
    plan = planned(choices, {**_screen(), **os.environ}, Path.cwd())
    _check_program(plan)
    from hadal.launcher.front import Front, printer_for
    from hadal.launcher.rounds import ElasticFront

    for text in plan.notes:
        said.note(text)
    if parsed.dry_run:
        from hadal.cli.run import show_plan

        show_plan(plan, os.environ)
        return 0
    for host, start_command in plan.start_commands.items():
        said.detail(
            f"{host} {list(plan.job.pool.get(host, ()))}: {shlex.join(start_command.words)}"
        )
    missing = sorted(
        {
            start_command.words[0]
            for start_command in plan.start_commands.values()
            if not which(start_command.words[0])
        }
    )
    if missing:
        said.report(
            f"{missing[0]}: no such program is found; install it, or take another --launcher"
        )
        return MISUSED
    front = (Front if plan.job.elastic is None else ElasticFront)(
        plan.job,
        plan.start_commands,
        printer_for(plan.job, plan.names_hosts),
        said.report,
        note=said.note,
        address=plan.address,
        waits_for_all=not choices.no_ssh_check,
        full_tracebacks=said.is_detailed or os.environ.get("HADAL_TRACEBACK") == "full",
    )
    try:
        return front.run()
    except BrokenPipeError:  # the reader of the output is gone: without this process the ranks end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return UNREAD


def _screen() -> dict[str, str]:
    """Return the size of the terminal, by which programs without one fit their bars and tables."""
    for stream in (sys.stderr, sys.stdout):
        if stream.isatty():
            columns, lines = os.get_terminal_size(stream.fileno())
            return {"COLUMNS": str(columns), "LINES": str(lines)} if columns else {}
    return {}


def _check_program(plan: LaunchPlan) -> None:
    """Raise `LaunchError` if this machine is to start a program that it does not have."""
    from hadal.launcher.job import ProgramKind
    from hadal.launcher.start_commands import Reach

    program = plan.job.program
    name = program.words[0]
    path = Path(program.folder, name)
    if all(start_command.reach is not Reach.HERE for start_command in plan.start_commands.values()):
        return
    if program.kind is ProgramKind.SCRIPT and not path.exists():
        there = [each.name for each in path.parent.glob("*.py")]
        near = nearest(path.name, there)
        hint = f"; did you mean {Path(name).with_name(near)}?" if near else ""
        raise LaunchError(f"{name}: there is no such file ({path}){hint}")
    if program.kind is ProgramKind.BARE and not which(str(path) if "/" in name else name):
        raise LaunchError(f"{name}: no such program is found")


@contextmanager
def pid_file(name: int | None) -> Iterator[Path | None]:
    """Write a file, inside the block, by which programs that start this one find its number.

    Raises:
        LaunchError: the file belongs to another user, or cannot be created.
    """
    if name is None:
        yield None
        return
    path = Path(tempfile.gettempdir(), f"{name}.ds")
    try:
        if path.lstat().st_uid == os.geteuid():
            path.unlink()  # of a process that was killed
    except FileNotFoundError:
        pass
    try:
        # Others may write to the directory: a link of theirs must not lead this to another file.
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise LaunchError(
            f"--save_pid cannot create {path} ({error.strerror}): remove it if it is yours, or let"
            " TMPDIR name a directory of your own"
        ) from None
    with open(file, "w") as opened:
        opened.write(str(os.getpid()))
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


# ---- the dry run ---------------------------------------------------------------------------------


_LONG = 120
_LATER, _FREE = "(rank 0's host)", "(a free one)"


def show_plan(plan: LaunchPlan, variables: Mapping[str, str]) -> None:
    """Print each host with its ranks, their command and variables, and how it is started."""
    job, hosts = plan.job, len(plan.job.pool)
    ranks = f"{job.world_size} rank{'s' * (job.world_size > 1)}"
    where = f"{hosts} host{'s' * (hosts > 1)}"
    show(heading(f"{ranks} on {where}; nothing is started"))
    for host in job.pool:
        start_command = plan.start_commands.get(host)
        if start_command is None and set(plan.start_commands) <= set(job.pool):
            continue  # with --no_ssh each host starts its own
        rows = [(key(name), text) for name, text in _rows(plan, host, start_command, variables)]
        show("", key(host), aligned(rows, indent=2))
    for name, start_command in plan.start_commands.items():
        if name not in job.pool:  # one program starts all hosts
            show(
                "",
                key(name),
                aligned([(key("started by"), _joined(start_command.words))], indent=2),
            )
    if job.elastic is not None:
        least, most = job.elastic.least, job.elastic.most
        show("", f"elastic: continues with {least} to {most} hosts; ranks are renumbered")


def _rows(
    plan: LaunchPlan, host: str, start_command: StartCommand | None, variables: Mapping[str, str]
) -> list[tuple[str, str]]:
    from hadal.launcher.ending import runs

    job = plan.job
    slots = ", ".join(map(str, job.pool[host]))
    # The command of every rank, with N in place of its local rank
    words = job.program.command(0)
    if job.program.passes_local_rank:
        words[words.index("--local_rank=0")] = "--local_rank=N"
    rows = [
        ("ranks", f"{runs(job.ranks_of(host))}, on slots {slots}"),
        ("command", _joined(words)),
        ("directory", job.program.folder),
        ("variables", _variables(plan, host, start_command, variables)),
    ]
    if job.program.logs:
        rows.append(("logs", f"{job.program.logs}/rankN.log"))
    if start_command is not None:
        rows.append(("started by", _joined(start_command.words)))
    return rows


def _variables(
    plan: LaunchPlan, host: str, start_command: StartCommand | None, variables: Mapping[str, str]
) -> str:
    job = plan.job
    ranks, size = job.ranks_of(host), len(job.pool[host])
    found = {
        "RANK": _range(ranks),
        "WORLD_SIZE": str(job.world_size),
        "LOCAL_RANK": _range(range(size)),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": plan.address or _LATER,
        "MASTER_PORT": str(job.port) if job.port else _FREE,
        **_own_variables(plan, host, start_command, variables),
    }
    return " ".join(
        f"{name}={value if value in (_LATER, _FREE) else shlex.quote(value)}"
        for name, value in found.items()
    )


def _own_variables(
    plan: LaunchPlan, host: str, start_command: StartCommand | None, variables: Mapping[str, str]
) -> dict[str, str]:
    """Return the variables that Hadal sets for the ranks of a host, besides their place."""
    from hadal.launcher.job import share_of
    from hadal.launcher.node import variables_of
    from hadal.launcher.start_commands import Reach
    from hadal.launcher.variables import expanded, showing

    job, is_here = plan.job, start_command is not None and start_command.reach is Reach.HERE
    starters = [each for name, each in plan.start_commands.items() if name not in job.pool]
    if starters and "pdsh" not in plan.start_commands:  # Slurm or MPI starts each rank
        slots = showing(job.pool[host]) if job.program.slots else {}
        return {**slots, **dict(starters[0].variables)}
    share = share_of(job, host, plan.address)
    values = variables_of(share, variables, len(os.sched_getaffinity(0)))
    if is_here:
        return values
    values.pop("OMP_NUM_THREADS", None)  # by the cores of that host
    return {**values, **expanded(share.variables)}


def _range(numbers: range) -> str:
    """Return consecutive numbers, one for each rank."""
    first, last = numbers[0], numbers[-1]
    return str(first) if first == last else f"{first}..{last}"


def _joined(words: tuple[str, ...] | list[str]) -> str:
    """Return words as a shell reads them; a job that travels packed in one word is shortened."""
    return shlex.join(word if len(word) <= _LONG else f"{word[:20]}..." for word in words)
