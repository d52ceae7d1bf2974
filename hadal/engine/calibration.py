"""The measurement of a machine's speeds, as `clusters` describes them. All ranks take part.

Ranks measure at the same time, as they share memory, cores and links in training too, and the
slowest counts. Computation is measured as passes of small transformers, and each speed is the one
that fits all of them best: alone, an operation finds its values in the caches.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from functools import partial, reduce
from itertools import combinations, pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hadal.comm import Ranks
from hadal.comm.benchmark import Trial, measure
from hadal.comm.collectives import max_
from hadal.comm.comms_log import bus_factor
from hadal.comm.functions import barrier
from hadal.config.offload import Aio
from hadal.device import current_device, host_empty, is_host_memory, synchronize
from hadal.engine.activations import Features, Products, Segment, trace
from hadal.engine.assemble import initialize
from hadal.engine.clusters import ComputeCluster, Link, Links, ProductSpeed, Speeds, cluster_here
from hadal.engine.engine import Engine
from hadal.engine.precision import Casting
from hadal.offload.speed import measurer

# A speed that no measurement shows is this much time per unit.
_LEAST = 1e-15
_CHAIN, _LEAST_CALLS, _MOST_CALLS = 100, 4, 100
_PRODUCTS = ("matrices", "convolution", "attention")
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Shape(NamedTuple):
    """A small transformer and its batch."""

    width: int
    vocabulary: int
    samples: int
    length: int
    is_composed: bool = False
    """True: norms and activations are written in many operations, as models often do."""


class CalibrationSizes(NamedTuple):
    """The sizes of all measurements."""

    shapes: Sequence[Shape]
    convolutions: Sequence[tuple[int, int, int]]
    """Channels of the first convolution, samples, and pixels of a side."""
    attention: Sequence[tuple[int, int]]
    """Heads, and the length of a sequence."""
    numels: tuple[int, int]
    """Elements of messages and of updates: few, and many."""
    seconds: float
    """The time of one measurement."""


_OF_CORES = CalibrationSizes(
    [
        Shape(256, 1024, 4, 128),
        Shape(256, 1024, 2, 128, is_composed=True),
        Shape(512, 1024, 1, 64),
        Shape(512, 2048, 4, 128),
        Shape(512, 2048, 2, 128, is_composed=True),
        Shape(768, 8192, 1, 64),
        Shape(768, 8192, 4, 64),
    ],
    [(24, 8, 96), (48, 8, 96)],
    [(8, 64), (8, 128), (8, 512)],
    (1 << 12, 1 << 22),
    0.3,
)
_OF_DEVICES = CalibrationSizes(
    [
        Shape(1024, 32768, 8, 1024),
        Shape(1024, 32768, 8, 1024, is_composed=True),
        Shape(2048, 32768, 2, 1024),
        Shape(2048, 32768, 4, 2048),
        Shape(4096, 32768, 2, 2048),
    ],
    [(64, 32, 224), (128, 32, 112)],
    [(64, 512), (32, 2048), (32, 4096)],
    (1 << 12, 1 << 26),
    0.2,
)


def measure_cluster(
    name: str, folder: Path | None = None, sizes: CalibrationSizes | None = None
) -> str:
    """Measure this machine with all ranks, which are on it; return a cluster as JSON.

    Args:
        name: the cluster's.
        folder: where its disk is measured; None: the disk is assumed.
        sizes: of the measurements, if others than the device's.

    Raises:
        OffloadError: the disk is full or has a fault.
    """
    usual = _OF_CORES if is_host_memory(current_device()) else _OF_DEVICES
    return _Measurement(sizes or usual).cluster(name, folder).written()


class _Measurement:
    """One measurement after the other."""

    def __init__(self, sizes: CalibrationSizes) -> None:
        self._sizes = sizes
        self._ranks = Ranks.world()
        self._device = current_device()
        self._on_host = is_host_memory(self._device)
        self._dtypes = ["fp32", "bf16"] if self._on_host else list(_DTYPES)
        when = datetime.now(timezone.utc).date().isoformat()
        self._source = f"measured: {when}, {self._ranks.size} ranks on {self._device.type}"

    def cluster(self, name: str, folder: Path | None) -> ComputeCluster:
        measured = self._links() | self._computation() | self._host_link() | self._disk(folder)
        assumed = cluster_here(self._device, self._ranks.size)
        sources = {**assumed.sources, **dict.fromkeys(measured, self._source)}
        if "between" in measured:
            sources["between"] = "assumed: as between the ranks of this node"
        return replace(assumed, name=name, sources=sources, **measured)

    def _slowest(self, seconds: Sequence[float]) -> list[float]:
        found = torch.tensor(seconds, dtype=torch.float64)
        max_(found, self._ranks, "the slowest rank")
        return list(found.tolist())

    def _times(self, *acts: Callable[[], object]) -> list[float]:
        """Return how long each act takes; they are called in turn, as often on every rank."""
        warm = sum(self._slowest(self._called(acts)))
        spent = []
        barrier(self._ranks.group)
        for _ in range(min(_MOST_CALLS, max(_LEAST_CALLS, round(self._sizes.seconds / warm)))):
            spent.append(self._called(acts))
        return self._slowest([median(each) for each in zip(*spent, strict=True)])

    def _called(self, acts: Sequence[Callable[[], object]]) -> list[float]:
        found = []
        for act in acts:
            start = time.perf_counter()
            act()
            synchronize(self._device)
            found.append(time.perf_counter() - start)
        return found

    # ---- computation -----------------------------------------------------------------------------

    def _computation(self) -> dict[str, Any]:
        speeds = {dtype: self._speeds_in(_DTYPES[dtype]) for dtype in self._dtypes}
        micro_step, update, on_host = self._update({"stage": 0}, torch.float32)
        if not self._on_host:
            offload = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
            on_host = self._update(offload, torch.bfloat16)[-1]
        return {
            "speeds": speeds,
            "micro_step_start": micro_step,
            "update_start": update,
            "host_update": on_host * self._ranks.size,
        }

    def _speeds_in(self, dtype: torch.dtype) -> Speeds:
        # A backward makes two of each operation, and adds.
        launch = self._chain(16, torch.mul, dtype) / 4
        start = max(_LEAST, (self._chain(32, torch.matmul, dtype) - launch) / 3)
        passes = [
            one for model, batch in self._models() for one in self._passes(model, batch, dtype)
        ]
        rows = [_work(segment, products_read=self._on_host) for segment, _ in passes]
        seconds = [each for _, each in passes]
        rest = seconds
        if self._on_host:  # an accelerator computes while its host starts the next operations
            rest = [
                each - launch * one.kernels - start * sum(p.calls for p in one.products.values())
                for one, each in passes
            ]
        other, *rates = (1 / each for each in _fitted(rows, rest, seconds))
        reads = rates[3:] or [other] * 3
        matrices, convolution, attention = map(ProductSpeed, [start] * 3, reads, rates)
        peak = max(one.flops / each for one, each in passes)
        update = self._update({"stage": 0}, dtype)[-1]
        peak = max(peak, matrices.flops)
        return Speeds(matrices, convolution, attention, peak, other, update, launch)

    def _chain(
        self, size: int, operation: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype
    ) -> float:
        """Return the time of an operation on a few values, forward and backward."""
        values = torch.zeros(size, size, dtype=dtype, device=self._device, requires_grad=True)
        chains: list[Tensor] = []

        def forward() -> None:
            chains.append(reduce(lambda chain, _: operation(chain, values), range(_CHAIN), values))

        return sum(self._times(forward, lambda: chains.pop().sum().backward())) / _CHAIN

    def _models(self) -> Iterator[tuple[nn.Module, Tensor]]:
        for shape in self._sizes.shapes:
            yield _Transformer(shape), torch.zeros(shape.samples, shape.length).long()
        for width, samples, side in self._sizes.convolutions:
            yield _Convolutions(width), torch.zeros(samples, 3, side, side)
        for heads, length in self._sizes.attention:
            yield _Attention(), torch.zeros(1, heads, length, 64)

    def _passes(
        self, model: nn.Module, batch: Tensor, dtype: torch.dtype
    ) -> list[tuple[Segment, float]]:
        """Return the work and the time of a forward, and of a backward."""
        model = model.to(self._device, dtype)
        batch = batch.to(self._device, dtype if batch.is_floating_point() else None)
        dtypes = dict.fromkeys(model.parameters(), dtype)
        traced = trace(model, [], batch, Casting(), dtypes, Features())
        losses: list[Tensor] = []

        def backward() -> None:
            losses.pop().backward()
            model.zero_grad()

        spent = self._times(lambda: losses.append(model(batch)), backward)
        return list(zip((*traced.forward, *traced.backward), spent, strict=True))

    # ---- updates ---------------------------------------------------------------------------------

    def _update(self, zero: dict[str, Any], dtype: torch.dtype) -> tuple[float, float, float]:
        """Return the times of a small micro-step and update, and elements stepped per second."""
        few, many = (self._engine(numel, zero, dtype) for numel in self._sizes.numels)
        micro_step, small, _, large = self._times(
            partial(_backward, few), few.step, partial(_backward, many), many.step
        )
        for engine in (few, many):
            engine.destroy()
        first, last = self._sizes.numels
        return micro_step, small, (last - first) / max(large - small, _LEAST)

    def _engine(self, numel: int, zero: dict[str, Any], dtype: torch.dtype) -> Engine:
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.0}},
            "zero_optimization": zero,
        }
        if dtype != torch.float32:
            # Updates of fp16 take as long, but for the loss scale.
            config["bf16"] = {"enabled": True}
        return initialize(model=_OneParameter(numel), config=config)[0]

    # ---- links and the disk ----------------------------------------------------------------------

    def _links(self) -> dict[str, Any]:
        if self._ranks.size == 1:
            return {}
        found = {dtype: Links(*self._links_in(_DTYPES[dtype])) for dtype in self._dtypes}
        return dict.fromkeys(("inside", "between"), found)

    def _links_in(self, dtype: torch.dtype) -> Iterator[Link]:
        ranks, trial = self._ranks.size, Trial(dtype, trials=10, warmups=2, way="training")
        for kind in Links.__slots__:
            few, many = (
                measure(kind, numel // ranks * ranks, trial, self._ranks)
                for numel in self._sizes.numels
            )
            sent = (many.nbytes - few.nbytes) * bus_factor(kind, ranks)
            hops = (ranks - 1).bit_length()
            yield Link(few.seconds / hops, sent / max(many.seconds - few.seconds, _LEAST))

    def _host_link(self) -> dict[str, float]:
        if self._on_host:
            return {}
        there = torch.empty(self._sizes.numels[1], device=self._device)
        here = host_empty(there.numel(), there.dtype, pinned=True)
        spent = self._times(
            lambda: there.copy_(here, non_blocking=True),
            lambda: here.copy_(there, non_blocking=True),
        )
        return {"host_link": there.nbytes / max(spent)}

    def _disk(self, folder: Path | None) -> dict[str, float]:
        if folder is None:
            return {}
        found = measurer(folder, 1 << 30, 4.0, 1)(Aio())
        times = [one.seconds / one.nbytes for one in (found.read, found.write)]
        read, write = self._slowest(times)
        return {"disk_read": self._ranks.size / read, "disk_write": self._ranks.size / write}


# ---- what is measured ----------------------------------------------------------------------------


def _work(segment: Segment, *, products_read: bool) -> list[int]:
    """Return bytes moved, flops of each kind, and if products read first, their bytes."""
    products = [segment.products.get(kind, Products()) for kind in _PRODUCTS]
    read = [one.nbytes for one in products] if products_read else []
    return [segment.moved, *(one.flops for one in products), *read]


def _fitted(
    rows: Sequence[Sequence[int]], rest: Sequence[float], seconds: Sequence[float]
) -> list[float]:
    """Return the seconds of each unit of work, none below 0, with the least relative errors.

    Args:
        rows: the work of each pass.
        rest: its time, without what operations take to start.
        seconds: its time.
    """
    times = torch.tensor(seconds).double()[:, None]
    scaled = torch.tensor(rows).double() / times
    wanted = torch.tensor(rest).double()[:, None] / times
    units = scaled.amax(dim=0).clamp(min=_LEAST)
    scaled = scaled / units
    numbers = range(len(units))
    best, least = [_LEAST] * len(units), float("inf")
    for some in (s for count in numbers for s in combinations(numbers, count + 1)):
        columns = scaled[:, list(some)]
        found = torch.linalg.lstsq(columns, wanted, driver="gelsd").solution
        error = float((columns @ found - wanted).square().sum())
        if bool((found >= 0).all()) and error < least:
            known = dict(zip(some, (found.view(-1) / units[list(some)]).tolist(), strict=True))
            best, least = [max(_LEAST, known.get(n, 0.0)) for n in numbers], error
    return best


class _ComposedNorm(nn.Module):
    """A norm in many operations."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, hidden: Tensor) -> Tensor:
        exact = hidden.float()
        exact = exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * exact.to(hidden.dtype)


def _composed_gelu(hidden: Tensor) -> Tensor:
    inner = 0.8 * (hidden + 0.04 * torch.pow(hidden, 3.0))
    whole: Tensor = F.dropout(0.5 * hidden * (1.0 + torch.tanh(inner)), 0.1)
    return whole


class _Block(nn.Module):
    """A block with attention and a perceptron."""

    def __init__(self, width: int, is_composed: bool) -> None:
        super().__init__()
        self.heads = max(1, width // 64)
        norm = _ComposedNorm if is_composed else nn.LayerNorm
        self.activation = _composed_gelu if is_composed else F.gelu
        self.norm, self.attention = norm(width), nn.Linear(width, 3 * width)
        self.projection, self.last_norm = nn.Linear(width, width), norm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        samples, length, width = hidden.shape
        parts = self.attention(self.norm(hidden)).view(samples, length, 3, self.heads, -1)
        query, key, value = parts.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.projection(mixed.transpose(1, 2).reshape(samples, length, width))
        down: Tensor = self.down(self.activation(self.up(self.last_norm(hidden))))
        return hidden + down


class _Transformer(nn.Module):
    """Two blocks between an embedding and a head; it returns its loss."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.Sequential(*(_Block(shape.width, shape.is_composed) for _ in range(2)))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.head(self.norm(self.blocks(self.embedding(tokens))))
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())


class _Convolutions(nn.Sequential):
    """Convolutions of smaller and smaller images with more and more channels; it returns a loss."""

    def __init__(self, width: int) -> None:
        super().__init__()
        for few, many in pairwise([3, *(width << level for level in range(4))]):
            self.append(nn.Conv2d(few, many, 3, stride=2, padding=1))
            self.append(nn.Conv2d(many, many, 3, padding=1))

    def forward(self, images: Tensor) -> Tensor:
        for layer in self:
            images = layer(images)
        return images.mean()


class _Attention(nn.Module):
    """Causal attention alone; it returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.Parameter(torch.ones(3))

    def forward(self, values: Tensor) -> Tensor:
        query, key, value = (values * scale for scale in self.scales)
        return F.scaled_dot_product_attention(query, key, value, is_causal=True).mean()


class _OneParameter(nn.Module):
    """One parameter."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.zeros(numel))

    def forward(self) -> Tensor:
        return self.values.sum()


def _backward(engine: Engine) -> None:
    engine.backward(engine())
