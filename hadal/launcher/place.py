"""The rank of this process, from the variables of torch's agent, Slurm or MPI."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class RankPlace:
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
