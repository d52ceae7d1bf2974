"""Commands that start each host's process: here, over OpenSSH, or all with one launcher."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto

from hadal.errors import LaunchError
from hadal.launcher.hosts import Pool
from hadal.launcher.job import Job, Program, packed, rank_command, where_hadal_is
from hadal.launcher.variables import expanded

CONNECT_S = 10
ALIVE_TIMES = 3
"""A host that misses this many heartbeats is lost."""


class Reach(Enum):
    """The control over a started process."""

    HERE = auto()
    SSH = auto()
    ALL = auto()
    """One process starts all hosts: it gets everything at once, and a signal ends it."""


@dataclass(frozen=True, slots=True)
class StartCommand:
    """A command that starts hosts' processes."""

    words: tuple[str, ...]
    reach: Reach
    variables: tuple[tuple[str, str], ...] = ()
    """Environment variables to set for it."""

    @property
    def is_ssh(self) -> bool:
        """True if it starts a process on another host through its own connection."""
        return self.reach is Reach.SSH


def here() -> StartCommand:
    """Return the command that starts a process on this machine."""
    words = (sys.executable, "-u", "-m", "hadal.launcher.node", "--may-fall-silent")
    return StartCommand(words, Reach.HERE)


def by_ssh(
    host: str,
    *,
    port: int | None = None,
    arguments: Sequence[str] = (),
    venv_script: str = "",
    lost_s: float = 30.0,
) -> StartCommand:
    """Return the command that starts a process on another host.

    The command line does not depend on the job, which is sent on its standard input.
    """
    words = ssh_to(host, port=port, arguments=arguments, lost_s=lost_s)
    return StartCommand((*words, there(venv_script)), Reach.SSH)


def ssh_to(
    host: str, *, port: int | None = None, arguments: Sequence[str] = (), lost_s: float = 30.0
) -> list[str]:
    """Return the words before a command on another host. No prompts: keys must be set up."""
    options = {
        "BatchMode": "yes",
        "ConnectTimeout": CONNECT_S,
        "ServerAliveInterval": max(1, int(lost_s / ALIVE_TIMES)),
        "ServerAliveCountMax": ALIVE_TIMES,
    }
    words = ["ssh", "-T", *arguments]  # the first of two settings wins
    for key, value in options.items():
        words += ["-o", f"{key}={value}"]
    if port is not None:
        words += ["-p", str(port)]
    return [*words, host]


def there(venv_script: str = "", words: str = "") -> str:
    """Return the shell line that starts the process on another host.

    With a script that sets up an environment, Python is that environment's.
    """
    python = "python" if venv_script else shlex.quote(sys.executable)
    path = f'PYTHONPATH={shlex.quote(where_hadal_is())}"${{PYTHONPATH:+:$PYTHONPATH}}"'
    node = f"cd / && {path} exec {python} -u -m hadal.launcher.node{words}"
    return f". {shlex.quote(venv_script)} && {node}" if venv_script else node


# ---- programs that start all hosts' processes ------------------------------------------------


def by_pdsh(
    job: Job, address: str, arguments: Sequence[str], venv_script: str = ""
) -> StartCommand:
    """Return the command that starts all hosts with one pdsh, over ssh."""
    environment = (
        f" --job {packed(job)} --address {shlex.quote(address)} --node-rank %n --may-fall-silent"
    )
    words = ("pdsh", "-S", "-N", "-f", "1024", "-w", ",".join(job.pool), *arguments)
    over_ssh = (("PDSH_RCMD_TYPE", "ssh"),)
    return StartCommand((*words, there(venv_script, environment)), Reach.ALL, over_ssh)


def by_slurm(job: Job, arguments: Sequence[str], nodes: Sequence[str] = ()) -> StartCommand:
    """Return the command that starts one srun task per rank, in this allocation or its own one.

    `nodes` are srun's arguments that select nodes.
    """
    size = _even(job.pool, "slurm")
    counts = (f"--nodes={len(job.pool)}", f"--ntasks={job.world_size}", f"--ntasks-per-node={size}")
    words = ("srun", *counts, *nodes, "--kill-on-bad-exit=1", "--export=ALL", *arguments)
    return StartCommand((*words, *rank_command(job.program)), Reach.ALL, _variables(job))


def by_openmpi(job: Job, address: str, arguments: Sequence[str]) -> StartCommand:
    """Return the command that starts one process per rank with Open MPI's mpirun."""
    variables = _variables(job, address)
    hosts = ",".join(f"{host}:{len(slots)}" for host, slots in job.pool.items())
    words = ["mpirun", "-n", str(job.world_size), "--host", hosts]
    for key, _ in variables:
        words += ["-x", key]
    return StartCommand((*words, *arguments, *rank_command(_with_slots(job))), Reach.ALL, variables)


def by_hydra(job: Job, address: str, arguments: Sequence[str], name: str) -> StartCommand:
    """Return the command that starts each rank with mpirun of MPICH, MVAPICH or Intel MPI."""
    variables = _variables(job, address)
    size = _even(job.pool, name)
    words = ("mpirun", "-n", str(job.world_size), "-ppn", str(size), "-hosts", ",".join(job.pool))
    listed = ("-genvlist", ",".join(key for key, _ in variables))
    return StartCommand(
        (*words, *listed, *arguments, *rank_command(_with_slots(job))), Reach.ALL, variables
    )


FanOut = Callable[[Job, str, Sequence[str]], StartCommand]
MPI: dict[str, FanOut] = {
    "openmpi": by_openmpi,
    "mpich": lambda job, address, words: by_hydra(job, address, words, "mpich"),
    "mvapich": lambda job, address, words: by_hydra(job, address, words, "mvapich"),
    "impi": lambda job, address, words: by_hydra(job, address, words, "impi"),
}


def _variables(job: Job, address: str = "") -> tuple[tuple[str, str], ...]:
    """Return the variables of ranks that no process of ours on their host can set."""
    variables = expanded(job.variables, os.environ)
    paths = filter(None, (variables.get("PYTHONPATH"), where_hadal_is()))
    environment = {**variables, "MASTER_PORT": str(job.port), "PYTHONPATH": ":".join(paths)}
    if address:
        environment["MASTER_ADDR"] = address
    return tuple(sorted(environment.items()))


def _even(pool: Pool, launcher: str) -> int:
    sizes = {len(slots) for slots in pool.values()}
    if len(sizes) > 1:
        raise LaunchError(
            f"--launcher {launcher} needs as many slots on each host, found"
            f" {', '.join(f'{host}: {len(slots)}' for host, slots in pool.items())}; take"
            " --num_gpus N, or --launcher ssh"
        )
    return sizes.pop()


def _with_slots(job: Job) -> Program:
    """Return the ranks' program, with the hosts' slots unless these are the first ones."""
    slots = tuple(job.pool.values())
    is_whole = all(own == tuple(range(len(own))) for own in slots)
    return job.program if is_whole else replace(job.program, slots=slots)
