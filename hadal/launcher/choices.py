"""Translation of the command line into a job: hosts, slots, and the commands that start them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from hadal.errors import LaunchError
from hadal.launcher.hosts import Pool, filtered, is_here, narrowed, read_hostfile
from hadal.launcher.job import GRACE_S, JOIN_S, LOST_S, Elastic, Job, Program, ProgramKind
from hadal.launcher.place import read_cores
from hadal.launcher.start_commands import MPI, StartCommand, by_pdsh, by_slurm, by_ssh, here
from hadal.launcher.variables import (
    DEEPSPEED_ENV,
    HADAL_ENV,
    as_it_is,
    of_env_files,
    passed_on,
    screen_of,
    text_of,
)

DEFAULT_PORT = 29500
DEFAULT_HOSTFILE = "/job/hostfile"
LOCALHOST = "localhost"
RESTARTS = 3
"""The default number of restarts of an elastic job's ranks."""
_VISIBLE = "CUDA_VISIBLE_DEVICES"
# Without any of these there is no accelerator, and torch (2 seconds) need not be imported.
_DEVICE_FILES = ("nvidia0", "nvidiactl", "kfd", "dri", "davinci0", "accel", "hl0", "dxg")
_COUNT = "import torch; print(torch.accelerator.device_count())"


@dataclass(frozen=True, slots=True)
class Choices:
    """The values of the command line's flags."""

    words: tuple[str, ...]
    hostfile: str = DEFAULT_HOSTFILE
    include: str = ""
    exclude: str = ""
    num_nodes: int | None = None
    num_slots: int | None = None
    master_addr: str = ""
    master_port: int | None = None
    node_rank: int | None = None
    launcher: str = "ssh"
    launcher_args: tuple[str, ...] = ()
    module: bool = False
    no_python: bool = False
    local_rank: bool | None = None
    """True to pass `--local_rank=N` as the first argument; None: as DeepSpeed's command does."""
    no_ssh: bool = False
    no_ssh_check: bool = False
    ssh_port: int | None = None
    enable_each_rank_log: str = ""
    force_multi: bool = False
    bind_cores_to_rank: bool = False
    bind_core_list: str = ""
    venv_script: str = ""
    elastic_training: bool = False
    min_elastic_nodes: int | None = None
    max_elastic_nodes: int | None = None
    max_restarts: int | None = None
    as_deepspeed: bool = False
    world_sizes: tuple[int, ...] = ()
    """The world sizes that the program's configuration allows; empty: any."""
    pause_s: float = 0.0
    """The seconds that ranks train before new hosts are admitted."""


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """A job, and the commands that start its hosts."""

    job: Job
    start_commands: dict[str, StartCommand]
    address: str
    notes: tuple[str, ...]
    """Notes for the user on choices made for them."""

    @property
    def names_hosts(self) -> bool:
        """True if each host has its own process, so that output needs host names."""
        return len(self.start_commands) > 1


def planned(choices: Choices, variables: Mapping[str, str], folder: Path) -> LaunchPlan:
    """Plan a job from the choices.

    Raises:
        LaunchError: the choices contradict each other, or the available hosts.
    """
    _refuse(choices)
    if choices.elastic_training:
        _refuse_elastic(choices)
    hostfile = _hostfile(choices, folder)
    if choices.launcher == "slurm":
        return _by_slurm(choices, variables, folder, hostfile)
    if hostfile is None:
        pool, notes, shows = _here(choices, variables)
    else:
        pool, notes, shows = _narrowed(choices, hostfile), (), True
    if choices.num_nodes is not None and hostfile is None and choices.num_nodes > 1:
        raise LaunchError(
            f"--num_nodes {choices.num_nodes}, but there is no hostfile at {choices.hostfile};"
            " write one with a line `NAME slots=N` for each host, and pass it with --hostfile"
        )
    is_one = _is_one(choices, pool, has_hostfile=hostfile is not None)
    idle = _without_effect(choices, is_one)
    if idle:
        notes = (*notes, f"{', '.join(idle)}: no effect here")
    job = _job(choices, variables, folder, pool, is_one=is_one, shows_slots=shows)
    address = choices.master_addr or ("127.0.0.1" if is_one else "")
    return LaunchPlan(job, _start_commands(choices, job, is_one), address, notes)


def planned_on(
    pool: Pool,
    choices: Choices,
    variables: Mapping[str, str],
    exports: Mapping[str, str],
    folder: Path,
) -> LaunchPlan:
    """Plan a job on known slots, with the launcher of the choices and more variables of ranks."""
    job = _job(choices, variables, folder, pool, is_one=False, shows_slots=True)
    job = replace(job, variables={**job.variables, **exports})
    if choices.launcher == "slurm":
        return LaunchPlan(job, {"srun": by_slurm(job, choices.launcher_args)}, "", ())
    return LaunchPlan(job, _start_commands(choices, job, is_one=False), choices.master_addr, ())


def _job(
    choices: Choices,
    variables: Mapping[str, str],
    folder: Path,
    pool: Pool,
    *,
    is_one: bool,
    shows_slots: bool,
) -> Job:
    passed = {} if is_one else _passed_on(variables, folder)
    passed |= screen_of(variables, pool)
    elastic = _elastic(choices, variables, pool) if choices.elastic_training else None
    any_port = 0 if elastic or is_one else DEFAULT_PORT
    names = (variables.get("DS_ENV_FILE") or DEEPSPEED_ENV, HADAL_ENV)
    return Job(
        program=_program(choices, folder, variables),
        pool=pool,
        variables=of_env_files((Path.home(), folder), names, passed),
        shows_slots=shows_slots,
        port=choices.master_port or any_port,
        elastic=elastic,
    )


# ---- refusals ------------------------------------------------------------------------------------


def _refuse(choices: Choices) -> None:
    if choices.as_deepspeed and choices.no_python:
        raise LaunchError("--as-deepspeed needs Python to run the program; leave out --no_python")
    if choices.module and choices.no_python:
        raise LaunchError("--module and --no_python contradict each other; pass one")
    counts = choices.num_nodes or choices.num_slots
    if (choices.include or choices.exclude) and counts and choices.launcher != "slurm":
        raise LaunchError(
            "--include and --exclude select the slots: leave out --num_nodes, --num_gpus and"
            " --num_accelerators"
        )
    if choices.no_ssh and choices.node_rank is None:
        raise LaunchError(
            "--no_ssh starts this host's ranks alone: set its index in the hostfile with"
            " --node_rank (0 for the first)"
        )
    if choices.node_rank is not None and not choices.no_ssh:
        raise LaunchError(
            "--node_rank is this host's index, for --no_ssh only; without --no_ssh this command"
            " starts every host"
        )


def _refuse_elastic(choices: Choices) -> None:
    if choices.launcher != "ssh":
        raise LaunchError(
            f"--elastic_training restarts single hosts, which --launcher"
            f" {choices.launcher} cannot do; leave that out, and name the hosts in a hostfile"
        )
    if choices.no_ssh:
        raise LaunchError(
            "--elastic_training needs one command that sees all hosts: leave out --no_ssh, or start"
            " each host by `torchrun --nnodes MIN:MAX --rdzv-backend c10d --rdzv-endpoint ADDRESS`"
        )


def _elastic(choices: Choices, variables: Mapping[str, str], pool: Pool) -> Elastic:
    least = choices.min_elastic_nodes or 1
    most = choices.max_elastic_nodes or len(pool)
    if least > len(pool):
        raise LaunchError(
            f"--min_elastic_nodes {least}, but there are {len(pool)} hosts: {', '.join(pool)}"
        )
    if least > most:
        raise LaunchError(f"--min_elastic_nodes {least} is more than --max_elastic_nodes {most}")
    restarts = RESTARTS if choices.max_restarts is None else choices.max_restarts
    join_s = _seconds(variables, "HADAL_JOIN_S", JOIN_S)
    return Elastic(least, most, restarts, join_s, choices.world_sizes, choices.pause_s)


def _without_effect(choices: Choices, is_one: bool) -> list[str]:
    """Return the given flags that have no effect on this job."""
    by_ssh = choices.launcher == "ssh" and not choices.no_ssh and not is_one
    idle = {
        "--launcher": is_one and choices.launcher != "ssh",
        "--launcher_args": choices.launcher_args and (is_one or choices.no_ssh),
        "--ssh_port": choices.ssh_port and not by_ssh,
        "--venv_script": choices.venv_script and not (by_ssh or choices.launcher == "pdsh"),
        "--no_ssh_check": choices.no_ssh_check and not by_ssh,
        "--min_elastic_nodes": choices.min_elastic_nodes and not choices.elastic_training,
        "--max_elastic_nodes": choices.max_elastic_nodes and not choices.elastic_training,
        "--max_restarts": choices.max_restarts is not None and not choices.elastic_training,
    }
    return [flag for flag, is_idle in idle.items() if is_idle]


# ---- slots ---------------------------------------------------------------------------------------


def _hostfile(choices: Choices, folder: Path) -> Pool | None:
    path = folder / choices.hostfile
    if choices.hostfile == DEFAULT_HOSTFILE and not path.exists():
        return None
    return hostfile_at(path)


def hostfile_at(path: Path) -> Pool:
    """Read a hostfile.

    Raises:
        LaunchError: there is none, or it cannot be read.
    """
    if not path.exists():
        raise LaunchError(
            f"--hostfile {path}: there is no such file; give the path of one with a line"
            " `NAME slots=N` for each host"
        )
    return read_hostfile(text_of(path), str(path))


def _narrowed(choices: Choices, pool: Pool) -> Pool:
    return narrowed(
        filtered(pool, choices.include, choices.exclude), choices.num_nodes, choices.num_slots
    )


def _here(choices: Choices, variables: Mapping[str, str]) -> tuple[Pool, tuple[str, ...], bool]:
    """Return this machine's slots, notes on them, and whether to set the ranks' visible devices."""
    shown = variables.get(_VISIBLE, "").strip()
    filters = choices.include or choices.exclude
    if filters:
        notes = (f"--include and --exclude override {_VISIBLE}={shown}",) if shown else ()
        named = [LOCALHOST, *[part.partition(":")[0].strip() for part in filters.split("@")]]
        strange = [host for host in named if host != LOCALHOST and not is_here(host)]
        if strange:
            raise LaunchError(
                f"--include or --exclude names {strange[0]!r}, but there is no hostfile at"
                f" {choices.hostfile}: only {LOCALHOST} is known"
            )
        pool = {LOCALHOST: tuple(range(_highest(choices)))}
        return _localised(pool, choices), notes, True
    if shown:
        entries = [entry.strip() for entry in shown.split(",")]
        count = choices.num_slots or len(entries)
        if all(entry.isdecimal() for entry in entries) and count <= len(entries):
            return {LOCALHOST: tuple(int(entry) for entry in entries[:count])}, (), True
        return {LOCALHOST: tuple(range(count))}, (), False
    if choices.num_slots is not None:
        return {LOCALHOST: tuple(range(choices.num_slots))}, (), False
    count = devices_here()
    if count:
        return {LOCALHOST: tuple(range(count))}, (), False
    note = "no accelerator here: 1 process; --num_accelerators N starts N"
    return {LOCALHOST: (0,)}, (note,), False


def _highest(choices: Choices) -> int:
    """Return the number of this machine's slots: its accelerators, or on CPUs the named slots."""
    count = devices_here()
    if count:
        return count
    slots = [
        int(slot)
        for part in (choices.include or choices.exclude).split("@")
        for slot in part.partition(":")[2].split(",")
        if slot.strip().isdecimal()
    ]
    return max(slots, default=0) + 1


def _localised(pool: Pool, choices: Choices) -> Pool:
    """Filter this machine's slots; all its names mean `localhost`."""

    def renamed(text: str) -> str:
        parts = (part.partition(":") for part in text.split("@"))
        return "@".join(f"{LOCALHOST}{colon}{slots}" for _, colon, slots in parts)

    return filtered(
        pool,
        renamed(choices.include) if choices.include else "",
        renamed(choices.exclude) if choices.exclude else "",
    )


@cache
def devices_here() -> int:
    """Return the number of accelerators that torch sees on this machine."""
    if not any(Path("/dev", name).exists() for name in _DEVICE_FILES):
        return 0
    asked = subprocess.run([sys.executable, "-c", _COUNT], capture_output=True, text=True, cwd="/")
    return int(asked.stdout) if asked.stdout.strip().isdecimal() else 0


# ---- commands that start hosts -------------------------------------------------------------------


def _is_one(choices: Choices, pool: Pool, *, has_hostfile: bool) -> bool:
    if len(pool) > 1 or choices.force_multi:
        return False
    return not has_hostfile or is_here(next(iter(pool)))


def _start_commands(choices: Choices, job: Job, is_one: bool) -> dict[str, StartCommand]:
    if is_one:
        return dict.fromkeys(job.pool, here())
    if choices.no_ssh:
        # The host of the hostfile that --node_rank selects for this machine
        if not choices.master_addr:
            raise LaunchError("--no_ssh: set the address of rank 0's host with --master_addr")
        rank = choices.node_rank
        if rank is None or not 0 <= rank < len(job.pool):
            raise LaunchError(f"--node_rank {rank}, but there are hosts 0 to {len(job.pool) - 1}")
        return {list(job.pool)[rank]: here()}
    first = choices.master_addr or next(iter(job.pool))
    if choices.launcher == "pdsh":
        return {"pdsh": by_pdsh(job, first, choices.launcher_args, choices.venv_script)}
    if choices.launcher in MPI:
        return {"mpirun": MPI[choices.launcher](job, first, choices.launcher_args)}
    return {
        host: here()
        if is_here(host) and not choices.force_multi
        else by_ssh(
            host,
            port=choices.ssh_port,
            arguments=choices.launcher_args,
            venv_script=choices.venv_script,
            lost_s=job.program.lost_s,
        )
        for host in job.pool
    }


# ---- Slurm ---------------------------------------------------------------------------------------


def _by_slurm(
    choices: Choices, variables: Mapping[str, str], folder: Path, hostfile: Pool | None
) -> LaunchPlan:
    """Plan a job for Slurm, which knows the hosts: it needs only numbers, not a hostfile."""
    if hostfile is not None:
        pool = _narrowed(choices, hostfile)
        nodes: tuple[str, ...] = (f"--nodelist={','.join(pool)}",)
    else:
        count = choices.num_nodes or _number(variables, "SLURM_JOB_NUM_NODES", "SLURM_NNODES") or 1
        size = choices.num_slots or _number(
            variables, "SLURM_GPUS_ON_NODE", "SLURM_NTASKS_PER_NODE"
        )
        if size is None:
            raise LaunchError(
                "--launcher slurm: set the number of ranks per node with --num_gpus N (neither"
                " SLURM_GPUS_ON_NODE nor SLURM_NTASKS_PER_NODE is set)"
            )
        pool = {f"node {number}": tuple(range(size)) for number in range(count)}
        nodes = _slurm_nodes("--nodelist", choices.include) + _slurm_nodes(
            "--exclude", choices.exclude
        )
    job = _job(choices, variables, folder, pool, is_one=False, shows_slots=False)
    idle = _without_effect(choices, is_one=False)
    notes = (f"{', '.join(idle)}: no effect with Slurm",) if idle else ()
    return LaunchPlan(job, {"srun": by_slurm(job, choices.launcher_args, nodes)}, "", notes)


def _slurm_nodes(flag: str, text: str) -> tuple[str, ...]:
    if ":" in text:
        raise LaunchError(
            f"--launcher slurm: {text!r} names slots, but Slurm assigns devices itself; name"
            " whole nodes, and set the number of ranks with --num_gpus"
        )
    return (f"{flag}={text.replace('@', ',')}",) if text else ()


def _number(variables: Mapping[str, str], *keys: str) -> int | None:
    found = (variables[key] for key in keys if variables.get(key, "").isdecimal())
    return next((int(number) for number in found), None)


# ---- programs ------------------------------------------------------------------------------------


def _program(choices: Choices, folder: Path, variables: Mapping[str, str]) -> Program:
    kind = (
        ProgramKind.BARE
        if choices.no_python
        else ProgramKind.MODULE
        if choices.module
        else ProgramKind.SCRIPT
    )
    cores = choices.bind_core_list
    logs = choices.enable_each_rank_log
    return Program(
        words=choices.words,
        folder=str(folder),
        kind=kind,
        as_deepspeed=choices.as_deepspeed,
        passes_local_rank=choices.as_deepspeed
        if choices.local_rank is None
        else choices.local_rank,
        binds=choices.bind_cores_to_rank or bool(cores),
        cores=read_cores(cores) if cores else None,
        logs=str(folder / logs) if logs else "",
        grace_s=_seconds(variables, "HADAL_GRACE_S", GRACE_S),
        lost_s=_seconds(variables, "HADAL_LOST_S", LOST_S),
    )


def _seconds(variables: Mapping[str, str], key: str, default: float) -> float:
    passed = variables.get(key, "") or str(default)
    try:
        seconds = float(passed)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise LaunchError(f"the variable {key} must be a number of seconds, or 0, found {passed!r}")
    return seconds


def _passed_on(variables: Mapping[str, str], folder: Path) -> dict[str, str]:
    """Return the variables to pass on to other hosts, with the job's folder first on PYTHONPATH."""
    passed = passed_on(variables)
    paths = filter(None, (as_it_is(str(folder)), passed.get("PYTHONPATH", "")))
    return {**passed, "PYTHONPATH": ":".join(paths)}
