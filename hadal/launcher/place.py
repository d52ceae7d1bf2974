"""The place of a process: its rank, by variables of torch's agent, Slurm or MPI; its cores."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from hadal.errors import CommunicationError, LaunchError

# (rank, world size, local rank, local size): the first row with its rank and world size set wins.
_LAUNCHER_VARIABLES = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", ""),
    (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", ""),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)


class RankPlace(NamedTuple):
    """A rank's position in the world and on its host."""

    rank: int
    world_size: int
    local_rank: int
    local_size: int

    def variables(self) -> dict[str, str]:
        """Return the variables from which programs read their position."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_size),
            "LOCAL_SIZE": str(self.local_size),
        }


def slots_of(place: RankPlace, hosts: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return the slots of this process's host, if ranks fill the hosts' slots in order.

    Raises:
        LaunchError: the launcher placed the ranks in another way.
    """
    first = 0
    for slots in hosts:
        if place.rank < first + len(slots):
            if (place.local_rank, place.local_size) == (place.rank - first, len(slots)):
                return tuple(slots)
            break
        first += len(slots)
    raise LaunchError(
        f"rank {place.rank} is number {place.local_rank} of {place.local_size} on its host, but the"
        f" slots {list(map(list, hosts))} were to be filled host by host; leave out the words of"
        " --launcher_args that place ranks, or take whole hosts"
    )


def find_place(variables: Mapping[str, str]) -> RankPlace:
    """Read the position of this process from the launcher's variables.

    Raises:
        LaunchError: no launcher has set them.
    """
    for rank, world, local, size in _LAUNCHER_VARIABLES:
        if rank in variables and world in variables:
            own = int(variables.get(local, variables[rank]))
            size_text = variables.get(size) or _slurm_size(variables) or variables[world]
            return RankPlace(int(variables[rank]), int(variables[world]), own, int(size_text))
    raise LaunchError(
        "this process has no rank: expected the variables of torchrun, Slurm or MPI"
        f" ({', '.join(row[0] for row in _LAUNCHER_VARIABLES)})"
    )


def group_of(variables: Mapping[str, str]) -> dict[str, str]:
    """Return this host's index and the number of hosts, in DeepSpeed's variables."""
    names = {"CROSS_RANK": "GROUP_RANK", "CROSS_SIZE": "GROUP_WORLD_SIZE"}
    return {own: variables[name] for own, name in names.items() if name in variables}


def meeting_host(variables: Mapping[str, str]) -> dict[str, str]:
    """Return MASTER_ADDR under Slurm: the first host of this step."""
    nodes = variables.get("SLURM_STEP_NODELIST") or variables.get("SLURM_JOB_NODELIST")
    return {"MASTER_ADDR": first_slurm_host(nodes)} if nodes else {}


def _slurm_size(variables: Mapping[str, str]) -> str:
    """Return this node's ranks from Slurm's list, such as `4(x2),2`; empty if unknown."""
    size_text = variables.get("SLURM_STEP_TASKS_PER_NODE", "")
    sizes = [
        size
        for size, _, times in re.findall(r"(\d+)(\(x(\d+)\))?", size_text)
        for _ in range(int(times or 1))
    ]
    node = int(variables.get("SLURM_NODEID", 0))
    return sizes[node] if node < len(sizes) else ""


def first_slurm_host(nodes: str) -> str:
    """Return the first host of a Slurm node list: `node03` for `node[03-05,9],gpu1`."""
    first = re.match(r"[^\[,](?:[^\[,]|\[[^\]]*\])*", nodes)
    if first is None:
        raise CommunicationError(f"cannot read the Slurm node list {nodes!r}; set MASTER_ADDR")
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first[0])


def read_cores(text: str) -> tuple[int, ...]:
    """Read a list of cores: `0-3,8` is 0, 1, 2, 3, 8.

    Raises:
        LaunchError: the text is not such a list, or names a core twice.
    """
    cores: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise LaunchError(
                f"--bind_core_list {text!r}: cannot read {part!r}; expected numbers and ranges,"
                " such as 0-3,8"
            )
        cores.extend(range(int(first), int(last if dash else first) + 1))
    if not cores or len(set(cores)) < len(cores):
        raise LaunchError(f"--bind_core_list {text!r}: expected each core once, in rising ranges")
    return tuple(cores)


def cores_of(local_rank: int, local_size: int, cores: Iterable[int]) -> tuple[int, ...]:
    """Return one rank's cores: equal consecutive ranges; the remainder stays unused.

    Raises:
        LaunchError: there are fewer cores than ranks.
    """
    own = sorted(cores)
    share = len(own) // local_size
    if share == 0:
        raise LaunchError(
            f"{local_size} ranks cannot be bound to {len(own)} cores ({own}); start fewer ranks, or"
            " leave out --bind_cores_to_rank"
        )
    return tuple(own[local_rank * share : (local_rank + 1) * share])


class Near(NamedTuple):
    """A rank's cores beside its device."""

    cores: tuple[int, ...]
    node: int
    """The NUMA node of both."""
    device: str
    """The device's PCI address."""


def near_devices(
    local_size: int, visible: str | None, usable: Iterable[int], root: Path = Path("/")
) -> list[Near] | str:
    """Return the cores of each local rank, on the NUMA node of its NVIDIA device.

    Memory is on the node of the core that first writes it, so this places pinned memory too. No
    driver is called. Ranks whose devices share a node have equal parts of its cores.

    Args:
        local_size: ranks on this host; each uses the visible device of its own number.
        visible: CUDA_VISIBLE_DEVICES; None: all devices.
        usable: cores that may be used.
        root: the folder of `proc` and `sys`.

    Returns:
        A row for each rank; or why there are none.
    """
    listed = root / "proc/driver/nvidia/gpus"
    found = {one.name: _text(one / "information") for one in sorted(listed.glob("*"))}
    devices = [*found]
    if visible is not None:
        words = [word.strip() for word in visible.split(",") if word.strip()]
        devices = [device for word in words for device in _named(word, found)]
    if len(devices) < local_size:
        return f"{listed} lists {len(devices)} visible devices for {local_size} ranks"
    nodes = [_text(root / f"sys/bus/pci/devices/{one}/numa_node") for one in devices[:local_size]]
    if len([*(root / "sys/devices/system/node").glob("node[0-9]*")]) < 2:
        return "there is one NUMA node"
    if not all(node.isdecimal() for node in nodes):
        return f"the NUMA nodes of devices are {', '.join(node or 'not known' for node in nodes)}"
    rows, allowed = [], set(usable)
    for rank, (device, node) in enumerate(zip(devices, nodes, strict=False)):
        listing = _text(root / f"sys/devices/system/node/node{node}/cpulist")
        cores = allowed.intersection(read_cores(listing)) if listing else set()
        if len(cores) < nodes.count(node):
            return (
                f"{len(cores)} cores of NUMA node {node} may be used by {nodes.count(node)} ranks"
            )
        own = cores_of(nodes[:rank].count(node), nodes.count(node), cores)
        rows.append(Near(own, int(node), device))
    return rows


def _named(word: str, found: Mapping[str, str]) -> list[str]:
    """Return the PCI address of a device that CUDA_VISIBLE_DEVICES names; none if it is unknown."""
    if word.isdecimal():
        return [*found][int(word) : int(word) + 1]
    return [device for device, text in found.items() if word in text][:1]


def _text(path: Path) -> str:
    """Return a file's text; empty if it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
