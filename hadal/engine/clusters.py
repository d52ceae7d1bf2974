"""The speeds that devices, hosts and networks of a cluster reach, for plans of a step's time.

Figures of a named cluster are its makers' peaks times an efficiency; `hadal bench cluster` measures
those of a machine and writes them as JSON. A cluster says of each figure where it comes from.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from hadal.errors import ConfigError, nearest
from hadal.units import shown_nbytes

if TYPE_CHECKING:
    import torch
    from pydantic_core import ErrorDetails

_EXACT = ConfigDict(extra="forbid")
_Rate = Annotated[float, Field(gt=0)]
_Count = Annotated[int, Field(gt=0)]


@dataclass(frozen=True, slots=True)
class Link:
    """The speed of one collective between ranks."""

    __pydantic_config__ = _EXACT
    latency: _Rate
    """Seconds between two ranks, however small the message; in proportion to log2 of more."""
    bandwidth: _Rate
    """Bytes per second that each rank sends (the bus bandwidth)."""


@dataclass(frozen=True, slots=True)
class Links:
    """The speed of each collective of training."""

    __pydantic_config__ = _EXACT
    all_gather: Link
    reduce_scatter: Link
    all_reduce: Link
    all_to_all: Link


@dataclass(frozen=True, slots=True)
class ProductSpeed:
    """The speed of products of one kind: each starts, moves its values and multiplies."""

    __pydantic_config__ = _EXACT
    start: _Rate
    """Seconds."""
    bandwidth: _Rate
    """Bytes per second that they read and write."""
    flops: _Rate
    """Floating-point operations per second, counted as if each output were computed by itself."""

    def shared(self, share: float) -> ProductSpeed:
        """Return the speed with another share of the cores."""
        return ProductSpeed(self.start, self.bandwidth * share, self.flops * share)


@dataclass(frozen=True, slots=True)
class Speeds:
    """The speeds of one rank's device in one dtype."""

    __pydantic_config__ = _EXACT
    matrices: ProductSpeed
    convolution: ProductSpeed
    attention: ProductSpeed
    peak_flops: _Rate
    """The datasheet's figure or, if measured, the most that was reached."""
    bandwidth: _Rate
    """Bytes per second that all other operations read and write."""
    update: _Rate
    """Elements of this dtype per second that AdamW steps in the device's memory."""
    launch: _Rate
    """Seconds to start any other operation."""

    def shared(self, share: float) -> Speeds:
        """Return the speeds with another share of the cores."""
        return Speeds(
            self.matrices.shared(share),
            self.convolution.shared(share),
            self.attention.shared(share),
            self.peak_flops * share,
            self.bandwidth * share,
            self.update * share,
            self.launch,
        )


@dataclass(frozen=True, slots=True)
class ComputeCluster:
    """The speeds of each rank's device, and of what the ranks of a node share."""

    __pydantic_config__ = _EXACT
    name: str
    devices_per_node: _Count
    computes_on_host: bool
    """True: the ranks of a node share its cores, also for what they send."""
    device_nbytes: _Count
    host_nbytes: _Count
    """Memory of a node's host."""
    speeds: Mapping[str, Speeds]
    """Speeds by dtype: fp32, bf16, fp16."""
    host_update: _Rate
    """Elements per second that AdamW steps in a host's memory, for all ranks of a node together."""
    micro_step_start: _Rate
    """Seconds of a forward and backward, however little they compute."""
    update_start: _Rate
    """Seconds of an update, however few elements it steps."""
    inside: Mapping[str, Links]
    """Between the ranks of a node, by dtype; those without figures are as fast as fp32."""
    between: Mapping[str, Links]
    """Between ranks of several nodes, each with its share of its node's network."""
    host_link: _Rate
    """Bytes per second between a device and its host, in each direction."""
    disk_read: _Rate
    """Bytes per second from a node's disk, for all its ranks together."""
    disk_write: _Rate
    sources: Mapping[str, str]
    """For each of these names, whether it is assumed or measured, and from what or when."""

    def speeds_of(self, dtype: str) -> Speeds:
        """Return the speeds in a dtype; those without figures run as fp32."""
        return self.speeds.get(dtype, self.speeds["fp32"])

    def links_of(self, dtype: str, joined: int = 0) -> Links:
        """Return the links inside a node; or between nodes, if so many ranks of each take part.

        Each byte enters a node once, through the share of the network of one of them.
        """
        inside, between = (links.get(dtype, links["fp32"]) for links in (self.inside, self.between))
        found = {}
        for kind in Links.__slots__ if joined else ():
            own, near = getattr(between, kind), getattr(inside, kind)
            found[kind] = Link(own.latency, min(own.bandwidth * joined, near.bandwidth))
        return Links(**found) if joined else inside

    def with_ranks(self, ranks: int) -> ComputeCluster:
        """Return what each of `ranks` on a node reaches: on a host they have its cores in parts."""
        if not self.computes_on_host or ranks == self.devices_per_node:
            return self
        share = self.devices_per_node / ranks
        return replace(
            self,
            devices_per_node=ranks,
            speeds={dtype: speeds.shared(share) for dtype, speeds in self.speeds.items()},
        )

    def written(self) -> str:
        """Return it as JSON, as `read_cluster` reads it."""
        return json.dumps(asdict(self), indent=2) + "\n"


# ---- named clusters ------------------------------------------------------------------------------

_PRODUCTS, _MEMORY, _LINKS = 0.6, 0.8, 0.8
_LAUNCH_S, _MICRO_STEP_S, _UPDATE_S = 5e-6, 1e-3, 1e-3
_INSIDE_S, _BETWEEN_S = 10e-6, 15e-6
# AdamW in mixed precision: gradient, master and two moments are read in float32, these three and
# a 16-bit weight are written.
_UPDATE_NBYTES = 7 * 4 + 2
_DISK_READ, _DISK_WRITE = 7e9, 5e9


class _Kind(NamedTuple):
    """A device and the usual node around it, in GB and GB/s of public datasheets."""

    usual: int
    memory: float
    bandwidth: float
    links: float
    """To the other devices of a node, in each direction."""
    network: float
    """A node's speed in each direction."""
    host_link: float
    host: float
    host_bandwidth: float
    sheet: str
    """Its name; `device.inventory` has its peaks."""


_KINDS = {
    "b200": _Kind(8, 180, 8000, 900, 400, 64, 2048, 717, "NVIDIA DGX B200"),
    "h200": _Kind(8, 141, 4800, 450, 400, 64, 2048, 614, "NVIDIA H200 SXM"),
    "h100": _Kind(8, 80, 3350, 450, 400, 64, 2048, 614, "NVIDIA H100 SXM"),
    "a100-80g": _Kind(8, 80, 2039, 300, 200, 32, 2048, 410, "NVIDIA A100 80GB SXM"),
    "a100-40g": _Kind(8, 40, 1555, 300, 200, 32, 1024, 410, "NVIDIA A100 40GB SXM"),
    "v100": _Kind(8, 32, 900, 150, 50, 16, 512, 256, "NVIDIA V100 SXM2 32GB"),
    "l40s": _Kind(8, 48, 864, 32, 50, 32, 1024, 614, "NVIDIA L40S"),
    "l4": _Kind(1, 24, 300, 32, 12.5, 32, 64, 100, "NVIDIA L4"),
    "a10g": _Kind(1, 24, 600, 32, 12.5, 32, 64, 100, "NVIDIA A10G"),
    "t4": _Kind(1, 16, 320, 16, 12.5, 16, 64, 100, "NVIDIA T4"),
    "rtx4090": _Kind(1, 24, 1008, 32, 1.25, 32, 64, 80, "NVIDIA RTX 4090"),
    "rtx3090": _Kind(1, 24, 936, 32, 1.25, 32, 64, 50, "NVIDIA RTX 3090"),
    "mi300x": _Kind(8, 192, 5300, 448, 400, 64, 2048, 614, "AMD MI300X"),
}
_WITHOUT_BF16 = ("v100", "t4")

NAMES = tuple(f"{kind}x{row.usual}" for kind, row in _KINDS.items())
"""The usual clusters; another number of devices per node may stand in the name."""


def cluster_of(given: str | ComputeCluster, devices_per_node: int | None = None) -> ComputeCluster:
    """Return a cluster by its name or its file, of whose nodes so many devices are used.

    Raises:
        ConfigError: there is no such cluster, or its file cannot be read.
    """
    if isinstance(given, str):
        given = read_cluster(Path(given)) if given.endswith(".json") else cluster_named(given)
    devices = devices_per_node or given.devices_per_node
    return replace(given.with_ranks(devices), devices_per_node=devices)


def cluster_named(name: str) -> ComputeCluster:
    """Return a cluster by the name of its devices and their number in a node, as `h200x8`.

    Raises:
        ConfigError: no such cluster.
    """
    found = re.fullmatch(r"(.+)x([1-9]\d?)", name)
    if found is None or found[1] not in _KINDS:
        near = nearest(name, NAMES)
        meant = f"did you mean {near}? " if near else ""
        raise ConfigError(
            f"no cluster {name!r}; {meant}known are {', '.join(NAMES)}, with any number of devices"
            " in a node; or name a file that `hadal bench cluster --output FILE` has written"
        )
    from hadal.device.inventory import peak_of_name  # only now: it imports torch

    kind, devices = _KINDS[found[1]], int(found[2])
    peak, fp32 = peak_of_name(kind.sheet)
    assert peak is not None and fp32 is not None
    moved = kind.bandwidth * 1e9 * _MEMORY
    speeds = {}
    for dtype, flops in {"bf16": peak, "fp16": peak, "fp32": fp32}.items():
        products = ProductSpeed(_LAUNCH_S, moved, flops * _PRODUCTS)
        kinds = products, products, products
        if dtype != "bf16" or found[1] not in _WITHOUT_BF16:
            speeds[dtype] = Speeds(*kinds, flops, moved, moved / _UPDATE_NBYTES, _LAUNCH_S)
    inside = Link(_INSIDE_S, kind.links * 1e9 * _LINKS)
    between = Link(_BETWEEN_S, kind.network * 1e9 / devices * _LINKS)
    sheet = f"assumed: {kind.sheet}"
    return ComputeCluster(
        name=name,
        devices_per_node=devices,
        computes_on_host=False,
        device_nbytes=int(kind.memory * 1e9),
        host_nbytes=int(kind.host * 1e9),
        speeds=speeds,
        micro_step_start=_MICRO_STEP_S,
        update_start=_UPDATE_S,
        host_update=kind.host_bandwidth * 1e9 * _MEMORY / _UPDATE_NBYTES,
        inside={"fp32": Links(*[inside] * 4)},
        between={"fp32": Links(*[between] * 4)},
        host_link=kind.host_link * 1e9 * _LINKS,
        disk_read=_DISK_READ * _MEMORY,
        disk_write=_DISK_WRITE * _MEMORY,
        sources={
            "device_nbytes": sheet,
            "host_nbytes": f"assumed: the usual host, {shown_nbytes(int(kind.host * 1e9))}",
            "speeds": f"{sheet}, {_PRODUCTS:.0%} of its dense products and {_MEMORY:.0%} of"
            f" {kind.bandwidth:g} GB/s; torch starts an operation in 5 μs",
            "micro_step_start": "assumed: 1 ms",
            "update_start": "assumed: 1 ms",
            "host_update": f"assumed: AdamW moves {_UPDATE_NBYTES} bytes per element, at"
            f" {_MEMORY:.0%} of {kind.host_bandwidth:g} GB/s",
            "inside": f"{sheet}, {_LINKS:.0%} of {kind.links:g} GB/s; 10 μs between two ranks",
            "between": f"assumed: {_LINKS:.0%} of a node's {kind.network:g} GB/s; 15 μs",
            "host_link": f"{sheet}, {_LINKS:.0%} of {kind.host_link:g} GB/s",
            "disk_read": f"assumed: one NVMe disk, {_MEMORY:.0%} of 7 GB/s",
            "disk_write": f"assumed: one NVMe disk, {_MEMORY:.0%} of 5 GB/s",
        },
    )


# A core with vectors of 256 bits, and what ranks of one host reach through its memory.
_CORE_PRODUCTS = ProductSpeed(start=5e-6, bandwidth=5e9, flops=5e10)
_CORE = Speeds(
    matrices=_CORE_PRODUCTS,
    convolution=_CORE_PRODUCTS,
    attention=_CORE_PRODUCTS,
    peak_flops=8e10,
    bandwidth=5e9,
    update=2e8,
    launch=5e-6,
)
_CORE_LINKS = {"fp32": Links(*[Link(1e-4, 2e9)] * 4)}


def cluster_here(device: torch.device, ranks: int) -> ComputeCluster:
    """Return the assumed speeds of this machine with `ranks`: those of its devices, or cores.

    Unknown devices are taken for an H100. Use it where only the ranking of plans matters.
    """
    # A wrong name is an error before these are imported.
    import torch

    from hadal.device import is_host_memory, total_memory
    from hadal.device.inventory import peak_flops

    host, nbytes = total_memory(torch.device("cpu")).total, total_memory(device).total
    sources = dict.fromkeys(("device_nbytes", "host_nbytes"), "measured: of this machine")
    if not is_host_memory(device):
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
        name = re.sub(r"[^a-z0-9]", "", name.lower())
        alike = [kind for kind in _KINDS if kind.split("-")[0] in name]
        alike.sort(key=lambda k: (-len(k.split("-")[0]), abs(_KINDS[k].memory * 1e9 - nbytes)))
        found = cluster_named(f"{alike[0] if alike else 'h100'}x{ranks}")
        sources = {**found.sources, **sources}
        return replace(found, device_nbytes=nbytes, host_nbytes=host, sources=sources)
    peak = peak_flops(device, torch.float32) or _CORE.peak_flops
    core = _CORE.shared(peak / _CORE.peak_flops)
    found = cluster_named(f"l4x{ranks}")
    sources |= dict.fromkeys(("speeds", "host_update", "inside", "between"), "assumed: a host")
    return replace(
        found,
        name="this host",
        computes_on_host=True,
        device_nbytes=host // ranks,
        host_nbytes=host,
        speeds={"fp32": core},
        host_update=core.update * ranks,
        inside=_CORE_LINKS,
        between=_CORE_LINKS,
        sources={**found.sources, **sources},
    )


# ---- clusters that were measured -----------------------------------------------------------------


def read_cluster(path: Path) -> ComputeCluster:
    """Return the cluster that a JSON file describes.

    Raises:
        ConfigError: the file cannot be read, or a key is missing, unknown or of another type.
    """
    try:
        found = TypeAdapter(ComputeCluster).validate_json(path.read_bytes(), strict=True)
        for name in ("speeds", "inside", "between"):
            getattr(found, name)["fp32"]
    except ValidationError as error:
        faults = [_fault(one) for one in error.errors()]
        more = [f"and {len(faults) - 4} more"] * (len(faults) > 4)
        raise _no_cluster(path, ", ".join(faults[:4] + more)) from None
    except KeyError:
        raise _no_cluster(path, f"{name}.fp32 is missing") from None
    except OSError as error:
        raise _no_cluster(path, str(error)) from error
    return found


def _fault(error: ErrorDetails) -> str:
    path = ".".join(map(str, error["loc"])) or "the file"
    if error["type"] in ("missing", "unexpected_keyword_argument"):
        return f"{path} is {'missing' if error['type'] == 'missing' else 'unknown'}"
    return f"{path} is {error['input']!r}: {error['msg']}"


def _no_cluster(path: Path, why: str) -> ConfigError:
    return ConfigError(
        f"{path} is no description of a cluster: {why}; write one with"
        " `hadal bench cluster --output FILE`"
    )
