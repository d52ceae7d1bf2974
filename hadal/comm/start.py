"""Start-up: rank, world size, rank 0's address. The only file here that reads the environment."""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import logging
import math
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Mapping
from datetime import timedelta
from functools import cache
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.distributed import (  # type: ignore[attr-defined]
    PrefixStore,
    Store,
    distributed_c10d,
)
from torch.distributed.rendezvous import rendezvous

from hadal.device import (
    accelerator_kind,
    choose_kind,
    collective_backend,
    current_device,
    device_identity,
    rank_device,
)
from hadal.errors import CommunicationError
from hadal.launcher.place import first_slurm_host

DEFAULT_PORT = 29500
DEFAULT_TIMEOUT = timedelta(minutes=30)
DEFAULT_WATCHDOG_S = 300.0
# Without the interpreter's lock, which gloo's threads wait for: microseconds of work.
_GIVING_BACK_S = 0.1
# How long a backend may take to end its process group.
_ENDING_S = 10.0
# How long rank 0 waits for the others to read why it ends.
_LAST_WORD_S = 10.0
# Between rank 0's looks for ranks that join it.
_MEETING_PAUSE_S = 0.01


class WorldPlace(NamedTuple):
    """One process's place in the job."""

    rank: int
    world_size: int
    local_rank: int
    address: str
    port: int
    set_by: str


ALONE = WorldPlace(0, 1, 0, "127.0.0.1", DEFAULT_PORT, "no launcher")

# How long to wait for other ranks in the library's own messages; the last entry counts.
_timeout = [DEFAULT_TIMEOUT]

_with_own_devices: WeakSet[dist.ProcessGroup] = WeakSet()
"""Groups of the program whose ranks have their devices."""

# (launcher, rank, world size, local rank): the first whose rank and world size are both set wins.
# SLURM_STEP_NUM_TASKS, unlike SLURM_NTASKS, is set only for processes that srun itself started.
_LAUNCHERS = (
    ("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK"),
    ("Slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
    ("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("MVAPICH", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK"),
    ("MPI", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
)


def init_distributed(
    dist_backend: str | None = None,
    distributed_port: int = DEFAULT_PORT,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Start the process group, unless one already runs.

    This process computes on the accelerator of its local rank. In a group that the program has
    started itself, a device that the program has chosen stays.

    The place of this process comes from the arguments, else from the variables of torchrun, Slurm
    or an MPI (Open MPI, MVAPICH, MPICH, Intel's), else it is alone. The address of rank 0 comes
    from MASTER_ADDR, else from Slurm, Azure or SageMaker, else from MPI by way of mpi4py.

    Args:
        dist_backend: torch's backend name; by default the one of the current device.
        distributed_port: rank 0's port if neither MASTER_PORT nor `init_method` names one.
        timeout: how long to wait for the other ranks, at start and in every collective; by default
            DEEPSPEED_TIMEOUT minutes, or 30.
        init_method: torch's URL (`tcp://host:port`, `file:///path`), in place of variables.
        rank: this process's number, with `init_method`.
        world_size: how many processes there are, with `init_method`.

    Raises:
        CommunicationError: the variables contradict each other, or the ranks cannot meet.
    """
    obey_chosen_device()
    _end_with_program()
    if dist.is_initialized():
        _take_own_device()
        return
    timeout = env_timeout(os.environ) if timeout is None else timeout
    _timeout.append(timeout)
    place = find_place(os.environ, distributed_port, has_init_method=init_method is not None)
    device = rank_device(place.local_rank)
    backend = dist_backend or collective_backend()
    if init_method is not None:
        known = rank >= 0 and world_size > 0
        place = place._replace(
            rank=rank if known else place.rank,
            world_size=world_size if known else place.world_size,
            set_by=f"init_method {init_method}",
        )
    try:
        _start(backend, place, init_method, timeout, device)
    except CommunicationError:
        raise  # its message is complete
    except (dist.DistError, RuntimeError, ValueError, OSError) as error:
        where = init_method or f"{place.address}:{place.port}"
        raise CommunicationError(
            f"rank {place.rank} of {place.world_size} (set by {place.set_by}) could not meet the"
            f" others at {where} within {timeout.total_seconds():g} s: {error}. Check that rank 0"
            " runs, that MASTER_ADDR and MASTER_PORT are the same on all ranks and that no firewall"
            " blocks them."
        ) from error


def _take_own_device() -> None:
    """Compute on the accelerator of the local rank, unless the program has chosen another one."""
    launch, world = _from_launcher(os.environ), dist.group.WORLD
    assert world is not None  # the group runs
    if accelerator_kind() is None or launch is None or world in _with_own_devices:
        return
    _with_own_devices.add(world)
    device = current_device()
    if device.index == 0 and world.bound_device_id is None:
        device = rank_device(launch.local_rank)
    if "nccl" in str(dist.get_backend_config(world)):
        store = distributed_c10d._get_default_store()
        refuse_shared_devices(store, dist.get_rank(), dist.get_world_size(), device)


def obey_chosen_device() -> None:
    """Compute on the kind of device that the user has chosen (DS_ACCELERATOR: cpu, cuda, ...)."""
    text = os.environ.get("DS_ACCELERATOR", "")
    if text:
        choose_kind(text)


def env_timeout(variables: Mapping[str, str]) -> timedelta:
    """Return how long to wait for other ranks (DEEPSPEED_TIMEOUT, in minutes; 30).

    Raises:
        CommunicationError: the variable does not hold such a number.
    """
    usual = DEFAULT_TIMEOUT / timedelta(minutes=1)
    minutes = _number(variables, "DEEPSPEED_TIMEOUT", usual, "a number of minutes above 0")
    return timedelta(minutes=minutes)


@cache
def _end_with_program() -> None:
    """End the process group when the program ends, whoever started it: see `_end`.

    From Python 3.12 on, a program that ends starts no threads: this one waits until then.
    """
    is_over = threading.Event()
    ending = threading.Thread(target=_destroy_after, args=(is_over,), name="hadal-end", daemon=True)
    ending.start()
    atexit.register(_end, is_over, ending)


def _destroy_after(is_over: threading.Event) -> None:
    is_over.wait()
    dist.destroy_process_group()


def _end(is_over: threading.Event, ending: threading.Thread) -> None:
    """End the process group, and let gloo's threads free the tensors of the last collective.

    That takes the interpreter's lock. An interpreter that shuts down kills a thread that requests
    the lock, which aborts the process after a successful run. After an error the backend of an
    accelerator may wait for ranks that are gone, so its group is left to the system.
    """
    has_failed = hasattr(sys, "last_value")
    if dist.is_initialized() and not (has_failed and dist.get_backend() != "gloo"):
        is_over.set()
        ending.join(_ENDING_S)  # a program may also end in its middle, by sys.exit
    time.sleep(_GIVING_BACK_S)


def _start(
    backend: str,
    place: WorldPlace,
    init_method: str | None,
    timeout: timedelta,
    device: torch.device,
) -> None:
    rank, world_size, bound = 0, 1, None
    if place.world_size == 1 and init_method is None:
        # A single rank opens no port, so that many such runs share a host.
        store: Store = dist.HashStore()  # type: ignore[attr-defined]
    else:
        url = init_method or _url(place)
        meeting = rendezvous(url, place.rank, place.world_size, timeout=timeout)
        met, rank, world_size = next(meeting)
        met.set_timeout(timeout)
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            # torchrun's agent keeps one store for all attempts, with the addresses of the dead.
            met = PrefixStore(f"attempt {agreed_attempt(met, rank, world_size, timeout)}", met)
        if "nccl" in backend:
            refuse_shared_devices(met, rank, world_size, device)
        store, bound = PrefixStore("default_pg", met), device if _carries(backend, device) else None
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world_size, timeout=timeout, device_id=bound
    )


def agreed_attempt(store: Store, rank: int, world_size: int, timeout: timedelta) -> int:
    """Return the number of this start of the ranks, from a store that outlives them.

    TORCHELASTIC_RESTART_COUNT may differ between hosts: it counts the failures on each. So each
    rank takes a ticket, which rank 0 of the same attempt answers; those of dead ranks are answered
    too, and not read.

    Raises:
        TimeoutError: on rank 0, not all ranks have come.
    """
    own = PrefixStore("hadal/attempts", store)
    if rank > 0:
        attempt = int(own.get(f"ticket {own.add('tickets', 1)}"))
        own.add(f"attempt {attempt}", 1)
        return attempt
    attempt, deadline = own.add("attempts", 1), time.monotonic() + timeout.total_seconds()
    while (came := own.add(f"attempt {attempt}", 0) + 1) < world_size:
        for _ in range(own.add("tickets", 0) - own.add("answered", 0)):
            own.set(f"ticket {own.add('answered', 1)}", str(attempt))
        if time.monotonic() > deadline:
            raise TimeoutError(f"{came} of {world_size} ranks have come")
        time.sleep(_MEETING_PAUSE_S)
    return attempt


def _carries(backend: str, device: torch.device) -> bool:
    """Return True if `backend` has the device's own, which then connects its ranks at once."""
    if device.type == "cpu":
        return False
    return dist.get_default_backend_for_device(device) in backend


def refuse_shared_devices(store: Store, rank: int, world_size: int, device: torch.device) -> None:
    """Refuse two ranks on one accelerator, on all ranks, with a few requests to the store.

    Raises:
        CommunicationError: two ranks share a device, for which NCCL would fail later.
    """
    own = PrefixStore("hadal/devices", store)
    identity = device_identity(device)
    place = f"{socket.gethostname()}/{identity or rank}"
    own.set(f"{place}/{own.add(place, 1)}", str(rank))
    count = own.add(place, 0)
    if count > 1:
        ranks = sorted({int(own.get(f"{place}/{number}")) for number in range(1, count + 1)})
        own.set(
            "fault",
            f"ranks {', '.join(map(str, ranks))} would share {device} ({identity}) of the host"
            f" {socket.gethostname()}, and NCCL connects one rank to each device. Start at most as"
            " many ranks on a host as it has devices (--num_gpus, --nproc_per_node), or let"
            " CUDA_VISIBLE_DEVICES name a device of its own for each rank.",
        )
    if own.add("looked", 1) == world_size:
        own.set("found", own.get("fault").decode() if own.check(["fault"]) else "")
    fault = own.get("found").decode()
    if not fault:
        return
    own.add("read", 1)
    patience = time.monotonic() + _LAST_WORD_S
    while rank == 0 and own.add("read", 0) < world_size and time.monotonic() < patience:
        time.sleep(0.01)  # the store ends with this process
    raise CommunicationError(fault)


def _url(place: WorldPlace) -> str:
    address = f"[{place.address}]" if ":" in place.address else place.address  # of IPv6
    return f"tcp://{address}:{place.port}"


def _from_launcher(variables: Mapping[str, str]) -> WorldPlace | None:
    """Read a launcher's variables; rank 0's address is not among them."""
    for launcher, rank_key, world_key, local_key in _LAUNCHERS:
        if rank_key in variables and world_key in variables:
            rank = _whole_number(variables, rank_key)
            local = _whole_number(variables, local_key) if local_key in variables else rank
            world_size = _whole_number(variables, world_key)
            return WorldPlace(rank, world_size, local, "", DEFAULT_PORT, launcher)
    return None


def find_place(
    variables: Mapping[str, str], port: int = DEFAULT_PORT, *, has_init_method: bool = False
) -> WorldPlace:
    """Read this process's place from a launcher's variables; `ALONE` if there are none.

    With `has_init_method` the caller passes the rendezvous itself, and no address is needed.
    """
    launch = _from_launcher(variables)
    if launch is None:
        return ALONE
    if not 0 <= launch.rank < launch.world_size:
        rank_key, world_key = next(keys for name, *keys, _ in _LAUNCHERS if name == launch.set_by)
        raise CommunicationError(
            f"{rank_key}={launch.rank} is not one of 0..{launch.world_size - 1}, as"
            f" {world_key}={launch.world_size} requires; {launch.set_by} set one of them, or an"
            " older run left it in the environment"
        )
    port = _whole_number(variables, "MASTER_PORT") if "MASTER_PORT" in variables else port
    address = variables.get("MASTER_ADDR", "")
    if not address and not has_init_method:
        address = _first_host(variables, launch)
    return launch._replace(address=address, port=port)


def export_place(distributed_port: int = DEFAULT_PORT, verbose: bool = True) -> None:
    """Set torchrun's variables from those of Slurm or an MPI, for programs that read them.

    Raises:
        CommunicationError: the variables contradict each other, or rank 0's address is unknown.
    """
    place = find_place(os.environ, distributed_port)
    os.environ |= {
        "RANK": str(place.rank),
        "WORLD_SIZE": str(place.world_size),
        "LOCAL_RANK": str(place.local_rank),
        "MASTER_ADDR": place.address,
        "MASTER_PORT": str(place.port),
    }
    if verbose:
        logging.getLogger(__name__).info("this process's place, set by %s: %s", place.set_by, place)


def get_rank(group: dist.ProcessGroup | None = None) -> int:
    """Return this process's rank in a group, by default in the world; 0 if no group runs."""
    return dist.get_rank(group) if dist.is_initialized() else 0


def get_world_size(group: dist.ProcessGroup | None = None) -> int:
    """Return how many processes a group has, by default the world; 1 if no group runs."""
    return dist.get_world_size(group) if dist.is_initialized() else 1


def get_local_rank() -> int:
    """Return this process's rank on its host, from its launcher; 0 without a launcher."""
    launch = _from_launcher(os.environ)
    return launch.local_rank if launch else 0


def env_world_size() -> int | None:
    """Return the number of ranks, from the launcher; None without one."""
    launch = _from_launcher(os.environ)
    if launch is not None:
        return launch.world_size
    return _whole_number(os.environ, "WORLD_SIZE") if "WORLD_SIZE" in os.environ else None


def env_elasticity() -> str | None:
    """Return the `elasticity` section that a scheduler of elastic jobs was given, as JSON."""
    return os.environ.get("DEEPSPEED_ELASTICITY_CONFIG")


def collective_timeout_s() -> float:
    """Return the seconds to wait for another rank, as given to `init_distributed`."""
    return _timeout[-1].total_seconds()


# Launchers' variables for the number of processes on this host; Slurm's reads `4(x2),2`.
_LOCAL_SIZES = (
    "LOCAL_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MV2_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
    "LOCAL_SIZE",
)
_SLURM_LOCAL_SIZES = "SLURM_STEP_TASKS_PER_NODE"


def get_local_world_size() -> int | None:
    """Return the launcher's number of processes on each host; None if it sets none.

    Also None if Slurm reports different numbers for the hosts.
    """
    size = _env_local_size(os.environ)
    if size is not None:
        return size
    slurm = re.fullmatch(r"(\d+)(\(x\d+\))?", os.environ.get(_SLURM_LOCAL_SIZES, ""))
    return int(slurm[1]) if slurm else None


def _env_local_size(variables: Mapping[str, str]) -> int | None:
    return next((_whole_number(variables, k) for k in _LOCAL_SIZES if k in variables), None)


def watchdog_limit() -> float:
    """Return the seconds after which a wait for a rank is reported (HADAL_WATCHDOG_S; 0: never).

    Raises:
        CommunicationError: the variable does not hold such a number.
    """
    expected = "a number of seconds, or 0"
    return _number(os.environ, "HADAL_WATCHDOG_S", DEFAULT_WATCHDOG_S, expected, is_zero_fine=True)


def memory_is_tuned() -> bool:
    """Return True if the user has configured the C library's handling of freed memory."""
    keys = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_")
    return any(key in os.environ for key in keys) or "malloc" in os.environ.get(
        "GLIBC_TUNABLES", ""
    )


def kernels_share_one_queue() -> bool:
    """Return True if CUDA starts all kernels through one queue (CUDA_DEVICE_MAX_CONNECTIONS=1)."""
    return os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1"


def may_read_memory() -> bool:
    """Return True if ranks of one host may read each other's memory (HADAL_CROSS_MEMORY; yes).

    Raises:
        CommunicationError: the variable is neither 0 nor 1.
    """
    text = os.environ.get("HADAL_CROSS_MEMORY", "") or "1"
    if text not in ("0", "1"):
        raise CommunicationError(f"the variable HADAL_CROSS_MEMORY must be 0 or 1, found {text!r}")
    return text == "1"


def _number(
    variables: Mapping[str, str],
    key: str,
    usual: float,
    expected: str,
    *,
    is_zero_fine: bool = False,
) -> float:
    """Return a finite number above 0, or 0; `usual` if the variable is not set."""
    text = variables.get(key, "")
    try:
        number = float(text or usual)
    except ValueError:
        number = math.nan
    if not (0 < number < math.inf or (is_zero_fine and number == 0)):
        raise CommunicationError(f"the variable {key} must be {expected}, found {text!r}")
    return number


def _whole_number(variables: Mapping[str, str], key: str) -> int:
    try:
        return int(variables[key])
    except ValueError:
        raise CommunicationError(
            f"the variable {key} must be a whole number, found {variables[key]!r}"
        ) from None


# Azure's variables for the first node's address: for a job on several nodes `10.0.0.4:6000`.
_AZURE = ("AZ_BATCH_MASTER_NODE", "AZ_BATCHAI_MPI_MASTER_NODE")
_MPI = ("Open MPI", "MVAPICH", "MPI")


def _first_host(variables: Mapping[str, str], launch: WorldPlace) -> str:
    nodes = variables.get("SLURM_STEP_NODELIST") or variables.get("SLURM_JOB_NODELIST")
    if nodes:
        return first_slurm_host(nodes)
    if launch.world_size == 1 or _env_local_size(variables) == launch.world_size:
        return "127.0.0.1"
    found = _azure_host(variables) or _sagemaker_host(variables)
    if not found and launch.set_by in _MPI:
        found = _host_by_mpi()
    if found:
        return found
    raise CommunicationError(
        f"{launch.world_size} ranks, but MASTER_ADDR does not say on which host rank 0 runs; set it"
        " to that host's name for all ranks, or with an MPI install mpi4py"
    )


def _azure_host(variables: Mapping[str, str]) -> str:
    address = next((variables[name] for name in _AZURE if variables.get(name)), "")
    return address.partition(":")[0]


def _sagemaker_host(variables: Mapping[str, str]) -> str:
    """Return the first of SageMaker's hosts, which it lists in the order of their ranks."""
    if not variables.get("SM_HOSTS"):
        return ""
    try:
        hosts = json.loads(variables["SM_HOSTS"])
        return str(hosts[0])
    except (ValueError, LookupError, TypeError):
        raise CommunicationError(
            "the variable SM_HOSTS must be a JSON list of hosts, found"
            f" {variables['SM_HOSTS']!r}; set MASTER_ADDR"
        ) from None


def _host_by_mpi() -> str:
    """Return rank 0's address, which MPI broadcasts; empty without mpi4py."""
    try:
        mpi: Any = importlib.import_module("mpi4py").MPI
    except ImportError:
        return ""
    return str(mpi.COMM_WORLD.bcast(_own_address(), 0))


def _own_address() -> str:
    """Return the address at which other hosts reach this one; its name if that is unknown."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("10.255.255.255", 1))  # sends nothing: it only chooses a way out
        return str(probe.getsockname()[0])
    return socket.gethostname()
