"""`hadal run [FLAG ...] script.py [ARGUMENT ...]`: start a program on one machine or on many."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from shutil import which
from typing import TYPE_CHECKING, Any

from hadal.cli.flags import GROUPS, CommandOutput, choices_of, divided
from hadal.cli.parser import Parser, add_command, add_group
from hadal.cli.terminal import MISUSED, fail
from hadal.errors import HadalError, LaunchError, nearest

if TYPE_CHECKING:
    from hadal.launcher.choices import LaunchPlan

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
            group.add_argument(*flag.names, help=flag.help, **flag.keywords)
    parser.set_defaults(run=run)


def start(words: Sequence[str]) -> int:
    """Run `hadal run` with these arguments, for other commands that need ranks."""
    own, program = divided(words)
    parser = Parser(prog="hadal")
    add_to(add_group(parser, "command"))
    return run(parser.parse_args(["run", *own], argparse.Namespace(own=own, program=program)))


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
    try:
        choices = choices_of(parsed)
        plan = planned(choices, {**_screen(), **os.environ}, Path.cwd())
        _check_program(plan)
    except (HadalError, OSError) as error:
        fail(str(error))
        return MISUSED
    from hadal.launcher.front import Front, printer_for
    from hadal.launcher.rounds import ElasticFront

    for note in plan.notes:
        said.note(note)
    if parsed.dry_run:
        from hadal.cli.dry_run import show_plan

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
