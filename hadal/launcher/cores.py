"""Assignment of a host's cores to its ranks: equal parts, near their devices if that is known."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from hadal.errors import LaunchError


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
