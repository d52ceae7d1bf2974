"""`hadal run --dry-run`: the processes that each host would start."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING

from hadal.cli.terminal import aligned, heading, key, show

if TYPE_CHECKING:
    from hadal.launcher.choices import LaunchPlan
    from hadal.launcher.job import Job
    from hadal.launcher.start_commands import StartCommand

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
    rows = [
        ("ranks", f"{runs(job.ranks_of(host))}, on slots {slots}"),
        ("command", _command(job)),
        ("directory", job.program.folder),
        ("variables", _variables(plan, host, start_command, variables)),
    ]
    if job.program.logs:
        rows.append(("logs", f"{job.program.logs}/rankN.log"))
    if start_command is not None:
        rows.append(("started by", _joined(start_command.words)))
    return rows


def _command(job: Job) -> str:
    """Return the command of every rank, with N in place of its local rank."""
    words = job.program.command(0)
    if job.program.passes_local_rank:
        words[words.index("--local_rank=0")] = "--local_rank=N"
    return _joined(words)


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
