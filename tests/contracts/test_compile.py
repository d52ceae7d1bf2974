"""A compiled model trains to the same numbers: hooks stay outside of graphs."""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import forks
import pytest
import torch
from ranks import RankPools
from torch import Tensor, nn

import hadal

UPDATES = 3
BLOCKS = 4


class Block(nn.Module):
    """Two units in one graph: what a trace must not take in."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.widen = nn.Linear(width, 2 * width)
        self.narrow = nn.Linear(2 * width, width)

    def forward(self, values: Tensor) -> Tensor:
        inner: Tensor = self.narrow(torch.tanh(self.widen(self.norm(values))))
        return values + inner


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's own, about itself
        yield


def train_compiled(stage: int, how: str) -> float:
    """The largest distance of a weight from plain torch's, after a few updates."""
    with _quiet():
        torch.manual_seed(0)
        model = nn.Sequential(Block(8), Block(8))
        plain = copy.deepcopy(model)
        if how == "model":
            model.compile(backend="aot_eager")
        for index, block in enumerate(model if how != "model" else ()):
            if how == "blocks":
                block.compile(backend="aot_eager")
            else:
                model[index] = torch.compile(block, backend="aot_eager")
        config = {
            "train_micro_batch_size_per_gpu": 4,
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
            "gradient_clipping": 0,
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        }
        engine, _, _, _ = hadal.initialize(model=model, config=config)
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
        inputs = torch.linspace(-1, 1, 32).reshape(4, 8)
        for _ in range(UPDATES):
            engine.backward(engine(inputs).square().mean())
            engine.step()
            optimizer.zero_grad()
            plain(inputs).square().mean().backward()
            optimizer.step()
        got = engine.state_dict()
        engine.destroy()
        torch.compiler.reset()
    pairs = zip(got.values(), plain.state_dict().values(), strict=True)
    return max(float((mine - value).abs().max()) for mine, value in pairs)


@pytest.mark.fast_cells(
    "0-replaced blocks", "1-replaced blocks", "2-replaced blocks", "3-model", "3-replaced blocks"
)
@pytest.mark.parametrize("how", ["model", "blocks", "replaced blocks"])
@pytest.mark.parametrize("stage", range(4))
def test_a_compiled_model_trains_as_a_plain_one(stage: int, how: str, ranks: RankPools) -> None:
    """At every stage, compiled as a whole or block by block."""
    for distance in ranks(2).run(train_compiled, stage, how):
        assert distance < 1e-6


class Model(nn.Module):
    """Blocks that a forward of its own runs, a head and a parameter of a single element."""

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, width)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, values: Tensor) -> Tensor:
        for block in self.blocks:
            values = block(values)
        scaled: Tensor = self.head(values) * self.scale
        return scaled


def _make(stage: int) -> hadal.Engine:
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "gradient_clipping": 0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    return hadal.initialize(model=Model(8, BLOCKS), config=config)[0]


@_quiet()
def train_by_engine(stage: int, where: str) -> tuple[float, list[tuple[int, int]]]:
    """The distance from plain torch, and (graphs, breaks of graphs) after each update."""
    from torch._dynamo.utils import counters

    torch.compiler.reset()
    counters.clear()
    engine = _make(stage)
    plain = copy.deepcopy(engine.module) if stage < 3 else Model(8, BLOCKS)
    plain.load_state_dict(engine.state_dict())
    if where == "engine":
        engine.compile(backend="aot_eager")
    else:
        for block in engine.module.blocks:
            block.compile(backend="aot_eager")
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    inputs = torch.linspace(-1, 1, 32).reshape(4, 8)
    found = []
    for _ in range(UPDATES):
        engine.backward(engine(inputs).square().mean())
        engine.step()
        found.append((counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())))
        optimizer.zero_grad()
        plain(inputs).square().mean().backward()
        optimizer.step()
    got = engine.state_dict()
    engine.destroy()
    torch.compiler.reset()
    distances = (got[name] - value for name, value in plain.state_dict().items())
    return max(float(distance.abs().max()) for distance in distances), found


@pytest.mark.fast_cells("3-4")
@pytest.mark.parametrize(("stage", "graphs"), [(0, 1), (1, 1), (2, 1), (3, 4)])
def test_engine_compile_compiles_the_module_in_few_graphs(
    stage: int, graphs: int, ranks: RankPools
) -> None:
    """One graph where weights are whole. At stage 3 one for each place between two gathers.

    There, blocks share two: the first one's input asks for no gradient, the others' does. Nothing
    is compiled anew in later updates, and no read of a weight breaks a graph.
    """
    for distance, found in ranks(2).run(train_by_engine, stage, "engine"):
        assert distance < 1e-6
        assert found == [(graphs, 0)] * UPDATES


@pytest.mark.fast_cells("3")
@pytest.mark.parametrize("stage", range(4))
def test_blocks_compiled_after_initialize_are_whole_graphs(stage: int, ranks: RankPools) -> None:
    """Hooks stand around a block's graph: without ZeRO there are as many."""
    for distance, found in ranks(2).run(train_by_engine, stage, "blocks"):
        assert distance < 1e-6
        assert found == [(2, 0)] * UPDATES


def compile_wrongly(kwargs: dict[str, Any]) -> tuple[str, str, bool]:
    engine = _make(3)
    try:
        engine.compile(**kwargs)
    except hadal.HadalError as error:
        return type(error).__name__, str(error), engine.is_compiled
    finally:
        engine.destroy()
    return "", "", engine.is_compiled


@pytest.mark.parametrize(
    ("kwargs", "kind", "told"),
    [
        ({"schedule": [(0, ["prefetching"])]}, "UsageError", "'prefetching', expected some of"),
        ({"compiled_autograd_enabled": True}, "NotBuiltYetError", "not built yet; leave it out"),
        ({"compile_kwargs": {"mood": 1}}, "UsageError", "got 'mood', expected some of disable,"),
        ({"compile_kwargs": {"backend": "eager"}}, "UsageError", "got 'backend'"),
        ({"compile_kwargs": {"mode": "reduce-overhead"}}, "UsageError", "use the default mode"),
        (
            {"compile_kwargs": {"options": {"triton.cudagraphs": True}}},
            "UsageError",
            "in new memory at each use",
        ),
    ],
)
def test_unsupported_compile_options_are_refused(
    kwargs: dict[str, Any], kind: str, told: str, ranks: RankPools
) -> None:
    """Before anything is compiled."""
    found, message, is_compiled = ranks(2).run(compile_wrongly, kwargs)[0]
    assert found == kind
    assert told in message
    assert not is_compiled


@_quiet()
def compile_for_graphs(how: str) -> str:
    """What a program's own compilation for CUDA graphs is told at the first forward."""
    engine = _make(3)
    called, options = engine.module, {"mode": "reduce-overhead"}
    if how == "a block":
        engine.module.blocks[1].compile(**options)
    elif how == "a replaced block":
        engine.module.blocks[1] = torch.compile(engine.module.blocks[1], **options)
    elif how == "the model":
        engine.module.compile(options={"triton.cudagraphs": True})
    elif how == "around the model":
        called = torch.compile(engine.module, **options)
    try:
        called(torch.linspace(-1, 1, 32).reshape(4, 8))
    except hadal.UsageError as error:
        return str(error)
    finally:
        engine.destroy()
        torch.compiler.reset()
    return ""


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("a block", "blocks.1 is compiled"),
        ("a replaced block", "blocks.1 is compiled"),
        ("the model", "the model is compiled"),
        ("around the model", "the model is compiled"),
        ("nothing", ""),
    ],
)
def test_cuda_graphs_of_the_program_are_refused(how: str, told: str, ranks: RankPools) -> None:
    found = ranks(2).run(compile_for_graphs, how)
    assert all(told in one and bool(one) == bool(told) for one in found)


@_quiet()
def compile_with(options: dict[str, Any]) -> tuple[bool, bool, list[str]]:
    """The engine's compiled flag, before and after, and the graphs that the backend received."""
    engine, given = _make(3), []

    def backend(graph: Any, inputs: Any, **told: Any) -> Any:
        given.append(repr(told.get("options")))
        return graph.forward

    before = engine.is_compiled
    engine.compile(backend, options)
    engine.module.eval()
    with torch.no_grad():
        engine(torch.ones(4, 8))
    after = engine.is_compiled
    engine.destroy()
    torch.compiler.reset()
    return before, after, given


def test_compile_hands_its_arguments_on(ranks: RankPools) -> None:
    """A backend of the caller's own gets the graphs, and its options."""
    for before, after, given in ranks(2).run(compile_with, {"options": {"level": 3}}):
        assert not before
        assert after
        assert set(given) == {"{'level': 3}"}


_LATE = """
import sys, warnings
import torch, torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from contracts.test_compile import _make
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
engine = _make(3)
def update():
    engine.backward(engine(torch.ones(4, 8)).square().mean())
    engine.step()
update()
assert "torch._dynamo" not in sys.modules, "the compiler was imported for nothing"
warnings.simplefilter("ignore")
for block in engine.module.blocks:
    block.compile(backend="eager")
from torch._dynamo.utils import counters
for _ in range(2):
    update()
print(counters["stats"]["unique_graphs"], sum(counters["graph_break"].values()))
"""


@pytest.mark.slow
def test_hooks_stay_outside_of_graphs_of_a_compiler_that_comes_late() -> None:
    """Whoever does not compile does not import the compiler; who does later finds hooks shielded.

    In a process of its own, where torch alone is imported: here the compiler is there already.
    """
    tests = Path(__file__).parents[1]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tests.parent), str(tests)])}
    done = forks.run(["-c", _LATE], env=variables, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["2", "0"]
