"""The memory, messages and start-up work of one rank, as the number of ranks grows to 1024.

The real mechanism (`hadal.initialize`, forward, backward, step) runs as one rank of many on torch's
fake process group, in which every other rank mirrors this one: it returns the values sent to it.
Nothing is transferred, so one process is enough. The trained values are meaningless; bytes held,
calls and bytes on the wire are those of a real rank.

See ``benchmarks/README.md``.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from copy import copy
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import hadal
from hadal.comm import Ranks, collectives, functions

_MIB = 2**20
# Steps until the state is steady: optimizer state exists, and the paths have repeated.
_STEPS_BEFORE = 4
_WORLDS = (1, 2, 8, 64, 256, 1024)
_ITEMSIZE = {"bf16": 2, "fp32": 4}
# Other keys of `zero_optimization`, by name; a number is the ranks of a node.
_ROUTES: dict[str, Callable[[int], dict[str, Any]]] = {
    "plain": lambda node: {},
    "hpz": lambda node: {"zero_hpz_partition_size": node},
    "mics": lambda node: {"mics_shard_size": node},
    "hops": lambda node: {"mics_hierarchical_params_gather": True},
}


class Block(nn.Module):
    """A feed-forward block: two matrices, and small parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.widen = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, values: Tensor) -> Tensor:
        inner: Tensor = self.narrow(torch.tanh(self.widen(self.norm(values))))
        return values + inner


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    world: int
    stage: int
    dtype: str
    pairs: bool
    route: str = "plain"
    node: int = 8
    """Ranks of a node."""


@dataclass
class Traffic:
    """Traffic of this rank in torch's raw calls."""

    collectives: int = 0
    """Calls of collectives of values: gathers, reductions."""
    messages: int = 0
    """Sends of values to single ranks."""
    nbytes: int = 0
    """Bytes of values that leave this rank: in messages, or as a ring's share of a collective."""
    across: int = 0
    """Bytes that leave its node; for a ring, a rank's share of them."""
    rendezvous: int = 0
    """Exchanges of a few numbers for which every rank waits, such as the norm. They are not
    counted above."""
    is_small = False  # whether the current exchange is one of these

    def clear(self) -> None:
        """Reset the counts."""
        self.__init__()

    @contextmanager
    def meeting(self) -> Iterator[None]:
        """Count one rendezvous."""
        self.rendezvous += 1
        self.is_small = True
        try:
            yield
        finally:
            self.is_small = False

    def add_message(self, nbytes: int, *, leaves_node: bool) -> None:
        """Count one message to one rank."""
        if not self.is_small:
            self.messages += 1
            self.nbytes += nbytes
            self.across += nbytes * leaves_node

    def add_ring(self, nodes: Sequence[int], nbytes: int) -> None:
        """Count a collective around the ring, from each rank to the next; ranks by their nodes."""
        if self.is_small:
            return
        nbytes = nbytes * (len(nodes) - 1) // len(nodes)
        borders = sum(node != nodes[place - 1] for place, node in enumerate(nodes))
        self.collectives += 1
        self.nbytes += nbytes
        self.across += nbytes * borders // len(nodes)


@dataclass
class Found:
    """The figures of one rank in one case."""

    parameters: int
    start_s: float
    start_calls: int
    held: dict[str, int]
    traffic: Traffic
    """Traffic of a micro-step and its update."""
    in_micro_step: int
    """Rendezvous in forward and backward, in the steady state."""
    in_update: int
    peak: int

    @property
    def state(self) -> int:
        return sum(self.held.values())


class _Mirror:
    """The other ranks: each sends back the values sent to it."""

    def __init__(self) -> None:
        self._sent: dict[tuple[Any, int, int], list[Tensor]] = {}

    def keep(self, tensor: Tensor, group: Any, group_dst: int, tag: int) -> None:
        self._sent.setdefault((group, group_dst, tag), []).append(tensor)

    def give(self, tensor: Tensor, group: Any, group_src: int, tag: int) -> None:
        sent = self._sent[group, group_src, tag].pop(0)
        if sent.numel() == tensor.numel():
            tensor.copy_(sent)


@contextmanager
def _counted(case: Case) -> Iterator[Traffic]:
    """Count the raw calls, and send tensors in pairs or by collectives."""
    traffic, mirror = Traffic(), _Mirror()
    originals = {name: getattr(dist, name) for name in ("isend", "irecv")}

    def nodes_of(group: Any) -> list[int]:
        return [number // case.node for number in dist.get_process_group_ranks(group)]

    def isend(tensor: Tensor, **rest: Any) -> Any:
        mirror.keep(tensor, rest["group"], rest["group_dst"], rest["tag"])
        nodes = nodes_of(rest["group"])
        leaves = nodes[rest["group_dst"]] != nodes[dist.get_rank(rest["group"])]
        traffic.add_message(tensor.nbytes, leaves_node=leaves)
        return originals["isend"](tensor, **rest)

    def irecv(tensor: Tensor, **rest: Any) -> Any:
        mirror.give(tensor, rest["group"], rest["group_src"], rest["tag"])
        return originals["irecv"](tensor, **rest)

    def note(name: str, full_at: int, group_at: int, rounds: int = 1) -> Any:
        call = getattr(functions, name)

        def noted(*args: Any, **rest: Any) -> Any:
            traffic.add_ring(nodes_of(args[group_at]), rounds * args[full_at].nbytes)
            return call(*args, **rest)

        return patch.object(functions, name, noted)

    small_reduction, all_gather = collectives._small_reduction, collectives.start_all_gather

    def note_small(tensor: Tensor, operation: Any, ranks: Ranks, *names: Any) -> None:
        with traffic.meeting() if ranks.size > 1 else nullcontext():
            small_reduction(tensor, operation, ranks, *names)

    def note_codes(full: Tensor, ranks: Ranks, label: str, tag: int = collectives.GATHER) -> Any:
        with traffic.meeting() if tag == collectives.CODE else nullcontext():
            return all_gather(full, ranks, label, tag)

    with ExitStack() as stack:
        stack.enter_context(patch.object(collectives, "_small_reduction", note_small))
        stack.enter_context(patch.object(collectives, "start_all_gather", note_codes))
        for patched in (isend, irecv):
            stack.enter_context(patch.object(dist, patched.__name__, patched))
        stack.enter_context(note("all_reduce", 0, 2, rounds=2))
        stack.enter_context(note("reduce_scatter_tensor", 1, 3))
        stack.enter_context(note("all_gather_into_tensor", 0, 2))
        stack.enter_context(patch.object(Ranks, "exchanges_in_pairs", lambda *_: case.pairs))
        yield traffic


@contextmanager
def _world(size: int, rank: int, node: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        with patch.dict(os.environ, {"LOCAL_WORLD_SIZE": str(node)}):
            yield
    finally:
        dist.destroy_process_group()


def held_nbytes(found: Sequence[Tensor | None]) -> int:
    """The bytes of the storages under tensors, each counted once."""
    storages = {
        storage.data_ptr(): storage.nbytes()
        for storage in (t.untyped_storage() for t in found if t is not None)
    }
    storages.pop(0, None)
    return sum(storages.values())


def _model(options: argparse.Namespace) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(options.width) for _ in range(options.blocks)))


def _configuration(case: Case, block_numel: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "bf16": {"enabled": case.dtype == "bf16"},
        "zero_optimization": {
            "stage": case.stage,
            # A bucket for each block, and at stage 3 each is freed after its use.
            "reduce_bucket_size": block_numel,
            "allgather_bucket_size": 2 * block_numel,  # with room for the padding
            "stage3_param_persistence_threshold": 0,
            "stage3_max_live_parameters": 0,
            "stage3_max_reuse_distance": 0,
            **_ROUTES[case.route](case.node),
        },
    }


@contextmanager
def _calls() -> Iterator[list[int]]:
    """The number of function calls: a deterministic measure of work."""
    count = [0]

    def see(_: Any, event: str, __: Any) -> None:
        count[0] += event in ("call", "c_call")

    sys.setprofile(see)
    try:
        yield count
    finally:
        sys.setprofile(None)


def _start(case: Case, options: argparse.Namespace) -> tuple[hadal.Engine, float]:
    model = _model(options)
    block_numel = sum(p.numel() for p in model[0].parameters())
    began = time.perf_counter()
    engine = hadal.initialize(model=model, config=_configuration(case, block_numel))[0]
    return engine, time.perf_counter() - began


def _held(engine: hadal.Engine) -> dict[str, int]:
    """The bytes of model state on this rank at the end of a backward, by kind."""
    runtime = engine._parts.runtime
    weights = [t for b in runtime.buckets for t in (b.full, b.shard, b.node_copy.kept)]
    masters = [b.master for b in runtime.buckets]
    gradients = [t for g in runtime.gradients for t in (g.full, g.reduced)]
    state = engine.optimizer.state.values()
    moments = [v for one in state for v in one.values() if isinstance(v, Tensor) and v.dim()]
    found, before = {}, 0
    kinds = {"weights": weights, "master": masters, "moments": moments, "gradients": gradients}
    so_far: list[Tensor | None] = []
    for kind, tensors in kinds.items():
        so_far += tensors
        now = held_nbytes(so_far)
        found[kind], before = now - before, now
    return found


def _reached_nbytes() -> int:
    """The bytes of all storages that a Python object reaches."""
    # Hidden from torch-function modes, which watch the operations of a step.
    with torch._C.DisableTorchFunction():
        tensors = [t for t in gc.get_objects() if issubclass(type(t), Tensor)]
        gradients = [t.grad for t in tensors if t.is_leaf]
        return held_nbytes(
            [t for t in tensors + gradients if t is not None and t.layout is torch.strided]
        )


def measure(case: Case, options: argparse.Namespace) -> Found:
    """One rank's start, and a step of its steady state."""
    place = _world(case.world, options.rank % case.world, case.node)
    with place, _counted(case) as traffic:
        seconds = []
        for _ in range(options.repeat):
            engine, took = _start(case, options)
            seconds.append(took)
            engine.destroy()
        with _calls() as calls:
            engine, _ = _start(case, options)
        inputs = torch.ones(1, options.width, dtype=next(engine.module.parameters()).dtype)
        for _ in range(_STEPS_BEFORE):
            engine.backward(engine(inputs).float().square().mean())
            engine.step()
        rests = peak = _reached_nbytes()

        def look(*_: Any) -> None:
            nonlocal peak
            peak = max(peak, _reached_nbytes())

        for block in engine.module:
            block.register_forward_hook(look)
        for parameter in engine.module.parameters():
            parameter.register_post_accumulate_grad_hook(look)
        traffic.clear()
        engine.backward(engine(inputs).float().square().mean())
        held, in_micro_step = _held(engine), traffic.rendezvous
        engine.step()
        sent, numel = copy(traffic), sum(p.numel() for p in engine.module.parameters())
        in_update = sent.rendezvous - in_micro_step
        start = min(seconds, default=math.nan), calls[0]
        found = Found(numel, *start, held, sent, in_micro_step, in_update, peak - rests)
        engine.destroy()
    return found


def passes(case: Case, found: Found) -> float:
    """Wire bytes of a step in ring passes over all parameters: 2, 2, 2 and 3 at stages 0 to 3."""
    if case.world == 1:
        return 0.0
    one = found.parameters * _ITEMSIZE[case.dtype] * (case.world - 1) / case.world
    return found.traffic.nbytes / one


_HEADER = (
    "way         | route | dtype | stage | ranks | weights  master moments   grads |   all MiB |"
    " calls messages | rendezvous: micro-step update | wire MiB passes across MiB | peak MiB |"
    " start: calls      s"
)


def _line(case: Case, found: Found) -> str:
    held, traffic = found.held, found.traffic
    kinds = " ".join(f"{held[kind] / _MIB:7.3f}" for kind in held)
    return (
        f"{'pairs' if case.pairs else 'collectives':11} | {case.route:5} | {case.dtype:5} |"
        f" {case.stage:5} |"
        f" {case.world:5} | {kinds} | {found.state / _MIB:9.3f} | {traffic.collectives:5}"
        f" {traffic.messages:8} | {found.in_micro_step:22} {found.in_update:6} |"
        f" {traffic.nbytes / _MIB:8.3f} {passes(case, found):6.3f}"
        f" {traffic.across / _MIB:10.3f} | {found.peak / _MIB:8.3f} |"
        f" {found.start_calls:12,} {found.start_s:6.3f}"
    )


def _draw(results: dict[Case, Found], file: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    held, wire = figure.subplots(1, 2)
    chosen = {case: found for case, found in results.items() if not case.pairs}
    dtype = next(iter(chosen or results)).dtype
    for stage in sorted({case.stage for case in results}):
        mine = [
            (case, found)
            for case, found in (chosen or results).items()
            if (case.stage, case.dtype, case.route) == (stage, dtype, "plain")
        ]
        worlds = [case.world for case, _ in mine]
        held.plot(worlds, [f.state / _MIB for _, f in mine], marker="o", label=f"stage {stage}")
        wire.plot(worlds, [passes(c, f) for c, f in mine], marker="o", label=f"stage {stage}")
    held.set(xscale="log", yscale="log", xlabel="ranks", ylabel=f"MiB held per rank ({dtype})")
    wire.set(xscale="log", xlabel="ranks", ylabel="wire bytes per rank and step, ring passes")
    held.legend()
    figure.savefig(file)


def _show_degrees(plot: Path | None) -> None:
    from degrees import Job
    from degrees_table import compute, draw, lines

    job = Job()
    found = compute(job)
    print("\n".join(lines(found, job)))
    if plot:
        draw(found, job, plot)


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def main(arguments: Sequence[str] | None = None) -> dict[Case, Found]:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--worlds", type=_numbers, default=list(_WORLDS), help="numbers of ranks, as 1,8,64")
    add("--stages", type=_numbers, default=[0, 1, 2, 3], help="ZeRO stages, as 0,1,2,3")
    add("--dtypes", type=lambda text: text.split(","), default=list(_ITEMSIZE), help="bf16,fp32")
    add("--ways", type=lambda text: text.split(","), default=["collectives"])
    add("--routes", type=lambda text: text.split(","), default=["plain"], help=",".join(_ROUTES))
    add("--node", type=int, default=8, help="ranks of a node")
    add("--blocks", type=int, default=4)
    add("--width", type=int, default=256)
    add("--rank", type=int, default=0, help="the measured rank, modulo their number")
    add("--repeat", type=int, default=3, help="timed starts; the fastest is shown")
    add("--json", type=Path, metavar="FILE", help="write every measurement as JSON")
    add("--plot", type=Path, metavar="FILE", help="draw bytes held and sent (PNG)")
    add(
        "--degrees",
        action="store_true",
        help="the calculated cost of degrees of parallelism",
    )
    options = parser.parse_args(arguments)
    if options.degrees:
        _show_degrees(options.plot)
        return {}
    torch.set_num_threads(1)
    cases = [
        Case(world, stage, dtype, way == "pairs", route, options.node)
        for way in options.ways
        for dtype in options.dtypes
        for stage in options.stages
        for world in options.worlds
        for route in options.routes
        if route == "plain" or (stage == 3 and world % options.node == 0 and world > options.node)
    ]
    measure(cases[0], options)  # imports at first use do not count in any case
    gc.collect()
    gc.freeze()  # existing objects hold no tensor of a step, so the search can skip them
    results = {}
    for case in cases:
        results[case] = measure(case, options)
        if len(results) == 1:
            print(f"{results[case].parameters:,} parameters in {options.blocks} blocks, AdamW\n")
            print(_HEADER)
        print(_line(case, results[case]), flush=True)
    if options.json:
        rows = [{**asdict(case), **asdict(found)} for case, found in results.items()]
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    if options.plot:
        _draw(results, options.plot)
    return results


if __name__ == "__main__":
    main()
