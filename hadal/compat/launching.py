"""The launcher's functions that programs call: hostfiles, filters, and the world info."""

from __future__ import annotations

import base64
import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path

from hadal.compat.log import logger
from hadal.launcher.hosts import filtered, narrowed, read_hostfile
from hadal.launcher.variables import text_of


def fetch_hostfile(hostfile_path: str) -> OrderedDict[str, int] | None:
    """Return the slots of each host; None if there is no such file.

    Raises:
        LaunchError: a line cannot be read, or no host is named.
    """
    path = Path(hostfile_path)
    if not path.is_file():
        logger.warning("there is no hostfile %s: the job runs on this host alone", path)
        return None
    return parse_hostfile(text_of(path).splitlines())


def parse_hostfile(hostfile_lines: Sequence[str]) -> OrderedDict[str, int]:
    """Return the slots of each host in a hostfile's lines.

    Raises:
        LaunchError: a line cannot be read, or no host is named.
    """
    pool = read_hostfile("\n".join(line.rstrip("\n") for line in hostfile_lines))
    return OrderedDict((host, len(slots)) for host, slots in pool.items())


def parse_resource_filter(
    host_info: Mapping[str, Sequence[int]], include_str: str = "", exclude_str: str = ""
) -> Mapping[str, Sequence[int]]:
    """Return the slots that `--include` names or `--exclude` leaves; without a filter, the same.

    Raises:
        LaunchError: both filters are given, or one names an unknown host or slot.
    """
    if not include_str and not exclude_str:
        return host_info
    left = filtered(host_info, include_str, exclude_str, least=0)
    return OrderedDict((host, list(slots)) for host, slots in left.items())


def parse_inclusion_exclusion(
    resource_pool: Mapping[str, int], inclusion: str, exclusion: str
) -> Mapping[str, Sequence[int]]:
    """Return the slots of each host, from their number, that the filters leave.

    Raises:
        LaunchError: as `parse_resource_filter`.
    """
    slots = OrderedDict((host, list(range(count))) for host, count in resource_pool.items())
    return parse_resource_filter(slots, inclusion, exclusion)


def apply_num_nodes_and_gpus(
    active_resources: Mapping[str, Sequence[int]], num_nodes: int, num_gpus: int
) -> Mapping[str, Sequence[int]]:
    """Return the first `num_nodes` hosts, each with `num_gpus` slots; 0 or less keeps all.

    Raises:
        LaunchError: there are fewer hosts.
    """
    pool = {host: tuple(slots) for host, slots in active_resources.items()}
    kept = narrowed(pool, num_nodes if num_nodes > 0 else None, num_gpus if num_gpus > 0 else None)
    return OrderedDict((host, list(slots)) for host, slots in kept.items())


def encode_world_info(world_info: Mapping[str, Sequence[int]]) -> str:
    """Return the hosts' slots in the form in which `deepspeed.launcher.launch` reads them."""
    return base64.urlsafe_b64encode(json.dumps(world_info).encode()).decode()
