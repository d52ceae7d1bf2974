"""New weights that are on their way when a step returns, and are waited for where they are read."""

from __future__ import annotations

import copy
import importlib
import pickle
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from ranks import RankPools
from torch import Tensor, nn
from torch.nn import functional as F

import hadal
import npu
from hadal.zero import views
from hadal.zero.views import Refresh

from . import runs

Values = dict[str, Tensor]
STAGES_AND_PRECISIONS = [(1, "fp32"), (1, "bf16"), (2, "bf16"), (3, "fp32")]
EAGER = {"overlap_comm": False}


@contextmanager
def late() -> Iterator[None]:
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()  # where anything was compiled, nothing is left on its way
    with npu.asynchronous(), npu.with_float64():
        yield


def under_way(engine: Any) -> list[str]:
    """The parameters whose values are on their way."""
    named = engine.module.named_parameters()
    return [name for name, one in named if type(one) is not nn.Parameter]


def on_host(values: Any) -> Any:
    if isinstance(values, dict):
        return {name: on_host(one) for name, one in values.items()}
    return values.detach().cpu().clone() if isinstance(values, Tensor) else values


# ---- where it is waited for ----------------------------------------------------------------------


def _waited_for(stage: int, precision: str) -> tuple[list[int], list[list[str]], list[str]]:
    """Count the parameters on their way after each micro-step, and the buckets that are waited for
    before each block of the next forward; all buckets that are refreshed.
    """
    with late():
        engine = runs.built(runs.config(stage, precision))
        counts = []
        for tokens in runs.batches(torch.distributed.get_rank(), 1):
            runs_backward(engine, tokens)
            engine.step()
            counts.append(len(under_way(engine)))
        refreshed = {b._refresh: b.name for b in engine._parts.runtime.buckets if b.refreshes_late}
        waited: list[str] = []
        before, seen = Refresh.wait, []

        def wait(refresh: Refresh) -> None:
            if refresh._event is not None:
                waited.append(refreshed[refresh])
            before(refresh)

        for block in engine.module.blocks:
            block.register_forward_pre_hook(lambda *_: seen.append(list(dict.fromkeys(waited))))
        Refresh.wait = wait  # type: ignore[method-assign]
        try:
            runs_backward(engine, runs.batches(torch.distributed.get_rank(), 1, 1)[0])
        finally:
            Refresh.wait = before  # type: ignore[method-assign]
        engine.destroy()
    return counts, seen, [*refreshed.values()]


def runs_backward(engine: Any, tokens: Tensor) -> None:
    tokens = tokens.to(engine.device)
    outputs = engine(tokens[:, :-1])
    engine.backward(F.cross_entropy(outputs.float().flatten(0, 1), tokens[:, 1:].flatten()))


@pytest.mark.fast_cells("2-fp16")
@pytest.mark.parametrize(("stage", "precision"), [(1, "bf16"), (2, "fp32"), (2, "fp16")])
def test_each_bucket_is_waited_for_at_its_first_use(
    stage: int, precision: str, npus: RankPools
) -> None:
    for counts, seen, names in npus(2).run(_waited_for, stage, precision):
        assert counts == [0, 20]
        assert len(names) == 8 and len(seen) == 3
        for number, waited in enumerate(seen):
            used = ["tokens", *(f"blocks.{block}[" for block in range(number + 1))]
            assert waited == [name for name in names if name.startswith(tuple(used))]


# ---- who sees the new values ---------------------------------------------------------------------


def _kernel(engine: Any) -> Values:
    """The values that a kernel unknown to torch reads, in a unit's forward."""
    found: Values = {}

    def read(module: nn.Module, *_: Any) -> None:
        with torch._C.DisableTorchFunction():
            found.update({name: one.clone() for name, one in module.named_parameters()})

    block = engine.module.blocks[1]
    handle = block.register_forward_pre_hook(read)
    block(torch.zeros(1, runs.WIDTH, device=engine.device, dtype=block.wide.weight.dtype))
    handle.remove()
    return {f"blocks.1.{name}": one for name, one in found.items()}


def _beside(engine: Any) -> Values:
    """Copies that are made in a stream of its own, which knows nothing of the others' reads."""
    stream = torch.Stream(engine.device)
    stream.wait_stream(torch.accelerator.current_stream())
    for one in engine.module.parameters():
        one.sum()
    with stream:
        found = {name: one.detach().clone() for name, one in _named(engine).items()}
    torch.accelerator.current_stream().wait_stream(stream)
    return found


def _saved(engine: Any) -> Values:
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/of rank {torch.distributed.get_rank()}"
        torch.save(engine.module.state_dict(), path)
        return dict(torch.load(path))


def _gathered(engine: Any) -> Values:
    gathered = hadal.zero.GatheredParameters(list(engine.module.parameters()))
    with gathered, torch._C.DisableTorchFunction():
        return {name: one.detach().clone() for name, one in _named(engine).items()}


def _evaluated(engine: Any) -> Values:
    """The result with all weights present."""
    tokens = torch.arange(6, device=engine.device).view(1, 6)
    with torch.no_grad():
        found = engine.module(tokens).clone()
        torch.accelerator.synchronize()
        assert torch.equal(engine.module(tokens), found)
    return {}


def _named(engine: Any) -> dict[str, nn.Parameter]:
    return dict(engine.module.named_parameters())


READS: dict[str, Callable[[Any], Values]] = {
    "data": lambda engine: {n: p.data.clone() for n, p in _named(engine).items()},
    "arithmetic": lambda engine: {n: p * 1 for n, p in _named(engine).items()},
    "lists": lambda engine: dict(
        zip(_named(engine), torch._foreach_mul([*_named(engine).values()], 1), strict=True)
    ),
    "the module's state": lambda engine: engine.module.state_dict(),
    "the engine's state": lambda engine: engine.state_dict(),
    "a file": _saved,
    "a copy": lambda engine: copy.deepcopy(engine.module).state_dict(),
    "a pickle": lambda engine: pickle.loads(pickle.dumps(engine.module)).state_dict(),
    "gathered": _gathered,
    "a forward": _evaluated,
    "a kernel": _kernel,
    "another stream": _beside,
}


def _read(stage: int, precision: str) -> list[str]:
    """The reads that found anything but the new values, or none of them on its way."""
    wrong = []
    with late():
        engine = runs.built(runs.config(stage, precision))
        for number, (name, read) in enumerate(READS.items()):
            if stage == 3 and name not in ("the engine's state", "gathered"):
                continue
            runs.advanced(engine, 1, first=number)
            expected = 11 if stage == 3 else 20
            if len(under_way(engine)) < expected:
                wrong.append(f"{name}: {len(under_way(engine))} on their way")
            found = on_host(read(engine))
            torch.accelerator.synchronize()
            wanted = runs.weights(engine)
            wrong += [f"{name}: {n}" for n, one in found.items() if not one.equal(wanted[n])]
        engine.destroy()
    return wrong


@pytest.mark.fast_cells("3-fp32")
@pytest.mark.parametrize(("stage", "precision"), STAGES_AND_PRECISIONS)
def test_whoever_reads_sees_the_new_values(stage: int, precision: str, npus: RankPools) -> None:
    assert npus(2).run(_read, stage, precision) == [[], []]


def _written(overlap: bool) -> Values:
    """Weights that are written to on every rank while they are on their way."""
    with late():
        engine = runs.built(runs.config(1, "bf16", {"overlap_comm": overlap}))
        for update in range(3):
            runs.advanced(engine, 1, first=update)
            assert bool(under_way(engine)) == overlap
            with torch.no_grad():
                engine.module.blocks[1].wide.weight.mul_(0.5)
                torch._foreach_add_([*engine.module.blocks[2].parameters()], 0.25)
        found = runs.weights(engine)
        engine.destroy()
    return found


def test_writes_meanwhile_are_kept(npus: RankPools) -> None:
    for there, here in zip(*(npus(2).run(_written, o) for o in (False, True)), strict=True):
        assert all(there[name].equal(here[name]) for name in there)


def _through_a_view() -> tuple[list[str], bool]:
    with late():
        engine = runs.built(runs.config(1))
        kept = engine.module.blocks[1].wide.weight.data
        runs.advanced(engine, 1)
        waiting, found = under_way(engine), kept.clone().cpu()
        torch.accelerator.synchronize()
        is_new = found.equal(kept.cpu())
        engine.destroy()
    return waiting, is_new


def test_a_view_that_was_kept_is_as_good_as_ever(npus: RankPools) -> None:
    """Nobody sees its reads: its bucket is waited for in the step."""
    for waiting, is_new in npus(2).run(_through_a_view):
        assert is_new and len(waiting) == 16
        assert "blocks.1.wide.weight" not in waiting


def _failing() -> Values:
    """Forwards and backwards that raise between updates, and a destroy behind the last one."""
    with late():
        engine = runs.built(runs.config(2, "bf16"))
        for update in range(3):
            runs.advanced(engine, 1, first=update)
            assert under_way(engine)
            with pytest.raises(RuntimeError, match=r"scalar type|embedding"):
                engine(torch.ones(1, 2, device=engine.device))
            assert under_way(engine)
        module = engine.module
        engine.destroy()
        assert {type(one) for one in module.parameters()} == {nn.Parameter}
        found = on_host(dict(module.named_parameters()))
    return dict(found)


def _eager() -> Values:
    with late():
        engine = runs.built(runs.config(2, "bf16", EAGER))
        for update in range(3):
            runs.advanced(engine, 1, first=update)
            assert not under_way(engine)
        return runs.weights(engine)


def test_nothing_is_lost_between_step_and_forward(npus: RankPools) -> None:
    for there, here in zip(npus(2).run(_eager), npus(2).run(_failing), strict=True):
        assert all(there[name].equal(here[name]) for name in there)


def _made_by(graph: str, model: nn.Module) -> Callable[[Tensor], Tensor]:
    """The model with something of it compiled."""
    how: dict[str, Any] = {"backend": "eager", "fullgraph": True}
    if graph == "model":
        return torch.compile(model, **how)
    if graph == "step":
        return torch.compile(lambda tokens: model(tokens) + 0, **how)
    if graph == "in place":
        model.compile(**how)
    for block in model.blocks if graph == "blocks" else ():
        block.compile(**how)
    for block in model.blocks if graph == "kernel" else ():
        doubled = torch.compile(lambda weight: weight * 2, **how)
        block.norm.register_forward_hook(lambda norm, _, x, f=doubled: x * f(norm.weight))
    return model


def _compiled(graph: str) -> tuple[list[int], list[int], list[int], bool]:
    """After each update: the weights on their way, those left behind a block, the frames compiled
    so far; whether all results are those of a model that was never compiled.
    """
    importlib.import_module("torch._dynamo")
    with late(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"The \.grad attribute of a Tensor")  # asked by torch
        engine = runs.built(runs.config(1))
        called, plain = _made_by(graph, engine.module), runs.Model()
        _made_by(graph if graph == "kernel" else "", plain)
        tokens, counts, left, frames, is_same = torch.arange(6).view(1, 6), [], [], [], True
        values = torch.ones(1, 6, runs.WIDTH)
        for update in range(4):
            runs.advanced(engine, 1, first=update)
            counts.append(len(under_way(engine)))
            with torch.no_grad():
                found = [engine.module.blocks[0](values.to(engine.device))]
                left.append(len(under_way(engine)))
                found.append(called(tokens.to(engine.device)))
                plain.load_state_dict(runs.weights(engine))
                wanted = plain.blocks[0](values), plain(tokens)
            frames.append(torch._dynamo.convert_frame.FRAME_COUNTER)
            is_same &= all(a.cpu().equal(b) for a, b in zip(found, wanted, strict=True))
        engine.destroy()
        torch._dynamo.reset()
        views._is_read_unseen = False
    return counts, left, frames, is_same


@pytest.mark.slow
@pytest.mark.parametrize("graph", ["model", "in place", "blocks", "step", "kernel"])
def test_compiled_code_is_entered_with_its_own_weights_there(graph: str, npus: RankPools) -> None:
    for counts, left, frames, is_same in npus(2).run(_compiled, graph):
        assert is_same
        assert frames[1:] == frames[:1] * 3, "code was compiled anew for weights on their way"
        if graph == "step":  # nothing is known to be outside of it
            assert (counts, left[1:]) == ([20, 0, 0, 0], [0, 0, 0])
        else:
            assert (counts, left[1:]) == ([20] * 4, [14] * 3)


def _left_of_unheard(module: str, name: str) -> tuple[int, int]:
    """The weights on their way if torch does not tell what it compiles, and if it does again."""
    importlib.import_module("torch._dynamo")
    with late():
        engine = runs.built(runs.config(1))
        with pytest.MonkeyPatch.context() as patch:
            patch.delattr(sys.modules[module], name)
            runs.advanced(engine, 1)
            without = len(under_way(engine))
        runs.advanced(engine, 1, first=1)
        counts = without, len(under_way(engine))
        engine.destroy()
    return counts


HEARD = [
    ("torch._dynamo.callback", "callback_handler"),
    ("torch._dynamo.convert_frame", "FRAME_COUNTER"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("module", "name"), HEARD)
def test_without_word_of_the_compiler_steps_wait(module: str, name: str, npus: RankPools) -> None:
    assert npus(2).run(_left_of_unheard, module, name) == [(0, 20)] * 2
