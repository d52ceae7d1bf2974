"""Pipeline stages with another kind of parallelism: one process's losses, norms and weights."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import costs
import pytest
import torch
from cases import rarely
from ranks import RankPools
from torch import Tensor, nn

import hadal
from engine.test_degrees import (
    ADAM,
    BF16,
    CLIP,
    LENGTH,
    MICROS,
    OFFLOADED,
    ROWS,
    UPDATES,
    WORDS,
    Found,
    alone,
    batch_of,
    imported,
    mixtral,
)
from hadal import comm
from hadal.checkpoint.export import load_state_dict_from_zero_checkpoint
from hadal.engine.parallel import tp_model_init
from hadal.engine.pipeline import PipelineEngine
from hadal.errors import HadalError
from hadal.plugins.moe import MoE
from hadal.plugins.pipeline import LayerSpec, PipelineModule, ProcessTopology
from hadal.plugins.sequence import sequence_loss

pytestmark = pytest.mark.skipif(
    find_spec("transformers") is None, reason="transformers is not installed"
)
TENSOR: Found = {"tensor_parallel": {"autotp_size": 2}}
SLICED_HEAD: Found = {"tensor_parallel": {"autotp_size": 2, "vocab_parallel_lm_head": True}}
EXPERTS: Found = {"expert_parallel": {"enabled": True, "autoep_size": 2}}
SEQUENCE: Found = {"sequence_parallel_size": 2}
CHUNKS: Found = {"chunks": 2, "schedule": "interleaved", "partition": "uniform"}
LAYOUTS: dict[str, Found] = {
    "data": {},
    "tensor": TENSOR,
    "tensor, sliced head": SLICED_HEAD,
    "experts": EXPERTS,
    "sequence": SEQUENCE,
}


@pytest.fixture(scope="module", autouse=True)
def _imported(ranks: RankPools) -> None:
    with costs.aside():
        mixtral()
        ranks(4).run(imported)


def engine_in(
    layout: str, zero: Found, keys: Found, *, tied: bool = False, seed: int = 0, stages: int = 2
) -> PipelineEngine:
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": MICROS,
        "gradient_clipping": CLIP,
        "optimizer": {"type": "AdamW", "params": ADAM},
        "zero_optimization": zero,
        **LAYOUTS[layout],
        **keys,
        "pipeline": {"auto": True, "stages": stages, **keys.get("pipeline", {})},
    }
    engine, *_ = hadal.initialize(model=mixtral(seed, tied=tied), config=config)
    assert isinstance(engine, PipelineEngine)
    return engine


def parts_of(engine: PipelineEngine) -> Found:
    """The number of parameters that are parts, and of positions that blocks see in training."""
    parameters = list(engine.module.parameters())
    seen: Found = {
        "tensor": sum(getattr(p, "tensor_model_parallel", False) for p in parameters),
        "experts": sum(not getattr(p, "allreduce", True) for p in parameters),
    }

    def look(block: nn.Module, args: tuple[Tensor, ...], _: Tensor) -> None:
        if block.training:
            seen["length"] = args[0].shape[1]

    for name, block in engine.module.named_modules():
        if name.endswith("input_layernorm"):
            block.register_forward_hook(look)
    return seen


def train(engine: PipelineEngine, first: int = 0, updates: int = UPDATES) -> Found:
    """Mean losses and norms of updates."""
    reader, losses, norms = engine.topology.data_parallel.rank, [], []
    for update in range(first, first + updates):
        micros = range(update * MICROS, (update + 1) * MICROS)
        losses.append(float(engine.train_batch(iter([batch_of(n, reader) for n in micros]))))
        norms.append(float(engine.get_global_grad_norm()))
    return {"losses": losses, "norms": norms, "readers": engine.topology.data_parallel.size}


def trained(layout: str, zero: Found, keys: Found, folder: str, tied: bool = False) -> Found:
    engine = engine_in(layout, zero, keys, tied=tied)
    seen = parts_of(engine)
    found = train(engine)
    found["eval"] = float(engine.eval_batch(iter([batch_of(n, 0) for n in range(MICROS)])))
    engine.save_checkpoint(folder)
    engine.destroy()
    return found | seen


def weights_of(folder: str, tied: bool) -> Found:
    """The whole weights of a checkpoint, in a model without an engine."""
    model = mixtral(7, tied=tied)
    load_state_dict_from_zero_checkpoint(model, folder)
    return dict(model.state_dict())


@pytest.mark.fast_cells("tensor-zero0-keys0-False")
@pytest.mark.parametrize(
    ("layout", "zero", "keys", "tied"),
    [
        ("tensor", {"stage": 1}, {}, False),
        ("tensor, sliced head", {"stage": 2} | OFFLOADED, {}, True),
        ("experts", {"stage": 2}, {}, False),
        ("sequence", {"stage": 1}, {}, False),
        ("data", {"stage": 2}, {}, True),
        ("tensor", {"stage": 0}, {"pipeline": CHUNKS}, True),
        ("tensor", {"stage": 2}, {"pipeline": {"schedule": "zero_bubble"}}, False),
        ("tensor", {"stage": 1}, BF16, False),
        ("experts", {"stage": 0}, {}, True),
        ("experts", {"stage": 1} | OFFLOADED, {"pipeline": CHUNKS}, False),
        ("experts", {"stage": 1}, BF16, False),
        ("sequence", {"stage": 2} | OFFLOADED, {}, True),
        ("sequence", {"stage": 0}, {"pipeline": CHUNKS}, False),
        ("sequence", {"stage": 1}, BF16, False),
        ("data", {"stage": 1}, BF16, False),
    ],
)
def test_stages_with_another_kind_train_as_one_process(
    layout: str, zero: Found, keys: Found, tied: bool, tmp_path: Path, ranks: RankPools
) -> None:
    found = ranks(4).run(trained, layout, zero, keys, str(tmp_path), tied)
    readers = found[0]["readers"]
    expected = alone(readers, tied)
    coarse = 2e-2 if "bf16" in keys else 1e-6
    assert max(expected["norms"]) > CLIP
    losses = expected["losses"]
    means = [sum(losses[n : n + MICROS]) / MICROS for n in range(0, len(losses), MICROS)]
    assert [one["length"] for one in found] == 4 * [LENGTH // (2 if layout == "sequence" else 1)]
    for kind in ("tensor", "experts"):
        assert all(one[kind] for one in found) == (kind in layout)
    for one in found:
        assert one["losses"] == pytest.approx(means, rel=coarse)
        assert one["norms"] == pytest.approx(expected["norms"], rel=10 * coarse)
    model = mixtral(tied=tied)
    model.load_state_dict(expected["weights"])
    with torch.no_grad():
        evaluated = sum(float(model.eval()(**batch_of(n, 0)).loss) for n in range(MICROS)) / MICROS
    assert [one["eval"] for one in found] == pytest.approx(4 * [evaluated], rel=coarse)
    weights, wanted = weights_of(str(tmp_path), tied), expected["weights"]
    start = mixtral(tied=tied).state_dict()
    assert weights.keys() == wanted.keys()
    error = sum(float((weights[n].float() - wanted[n].float()).square().sum()) for n in wanted)
    moved = sum(float((wanted[n].float() - start[n]).square().sum()) for n in wanted)
    assert error**0.5 <= (0.15 if "bf16" in keys else 1e-5) * moved**0.5


def went_on(folder: str, here: str, there: str, keys: Found) -> list[Found]:
    engine = engine_in(here, {"stage": 1}, keys)
    train(engine, updates=1)
    engine.save_checkpoint(folder)
    first = train(engine, 1)
    engine.destroy()
    engine = engine_in(there, {"stage": 2}, {}, seed=7)
    assert engine.load_checkpoint(folder)[0] is not None
    second = train(engine, 1)
    engine.destroy()
    return [first, second]


@pytest.mark.parametrize(
    ("here", "there", "keys"),
    [
        ("tensor", "experts", {}),
        rarely("experts", "tensor, sliced head", {"pipeline": CHUNKS}),
        rarely("sequence", "tensor", {}),
        rarely("data", "experts", {}),
    ],
)
def test_a_checkpoint_of_stages_resumes_with_another_kind(
    here: str, there: str, keys: Found, tmp_path: Path, ranks: RankPools
) -> None:
    for first, second in ranks(4).run(went_on, str(tmp_path), here, there, keys):
        if first["readers"] == second["readers"]:
            assert second["losses"] == pytest.approx(first["losses"], rel=1e-6)
            assert second["norms"] == pytest.approx(first["norms"], rel=1e-5)


# ---- a program's own stages ----------------------------------------------------------------------


def own_layers() -> list[LayerSpec]:
    return [
        LayerSpec(nn.Embedding, WORDS, 8),
        LayerSpec(nn.Linear, 8, 8),
        LayerSpec(nn.ReLU),
        LayerSpec(nn.Linear, 8, WORDS),
    ]


def in_own_stages(axes: dict[str, int]) -> Found:
    topology = ProcessTopology(list(axes), list(axes.values()))
    module = PipelineModule(own_layers(), topology=topology, seed_layers=True)
    sequence = module.mpu().sequence
    module.loss_fn = partial(sequence_loss, group=sequence.group)
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": MICROS,
        "optimizer": {"type": "AdamW", "params": ADAM},
        "zero_optimization": {"stage": 2},
    }
    engine, *_ = hadal.initialize(model=module, config=config)
    micros = [batch_of(n, engine.topology.data_parallel.rank) for n in range(UPDATES * MICROS)]
    pairs = [(one["input_ids"], one["labels"].roll(-1, 1)) for one in micros]
    data = iter([tuple(t.chunk(sequence.size, 1)[sequence.rank] for t in pair) for pair in pairs])
    found = {
        "losses": [float(engine.train_batch(data)) for _ in range(UPDATES)],
        "weights": {name: p.detach().clone() for name, p in module.named_parameters()},
        "readers": engine.topology.data_parallel.size,
    }
    engine.destroy()
    return found


def test_own_stages_train_on_slices_of_sequences(ranks: RankPools) -> None:
    whole = ranks(1).run(in_own_stages, {"pipe": 1, "data": 1})[0]
    for found in ranks(4).run(in_own_stages, {"pipe": 2, "data": 1, "sequence": 2}):
        assert found["readers"] == 1
        assert found["losses"] == pytest.approx(whole["losses"], rel=1e-6)
        for name, value in found["weights"].items():
            torch.testing.assert_close(value, whole["weights"][name], rtol=1e-6, atol=2e-6)


class Experts(nn.Module):
    """One of four experts for each token; an expert has the same weights wherever it is."""

    def __init__(self, ranks: int, rank: int) -> None:
        super().__init__()
        self.moe = MoE(8, nn.Linear(8, 8), num_experts=4, ep_size=ranks, k=1, drop_tokens=False)
        torch.manual_seed(0)
        nn.init.normal_(self.moe.deepspeed_moe.gate.wg.weight)
        for number, expert in enumerate(self.moe.deepspeed_moe.experts.deepspeed_experts):
            torch.manual_seed(1 + number + rank * 4 // ranks)
            nn.init.normal_(expert.weight)
            nn.init.zeros_(expert.bias)

    def forward(self, value: Tensor) -> Tensor:
        return value + self.moe(value)[0]


def mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def in_stages_with_experts(stages: int, zero: int) -> Found:
    """All samples are read once by two ranks, or twice as many by one."""
    readers = comm.get_world_size() // stages
    first, _, *rest = own_layers()
    rank = comm.get_rank() % readers
    layers = [
        first,
        LayerSpec(Experts, readers, rank),
        *rest[:1],
        LayerSpec(Experts, readers, rank),
    ]
    module = PipelineModule(
        [*layers, *rest[1:]],
        num_stages=stages,
        loss_fn=mean_loss,
        seed_layers=True,
        partition_method="uniform",
    )
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": MICROS * 2 // readers,
        "gradient_clipping": CLIP,
        "optimizer": {"type": "AdamW", "params": ADAM},
        "zero_optimization": {"stage": zero},
    }
    engine, *_ = hadal.initialize(model=module, config=config)
    micros = [batch_of(n, 0)["input_ids"] for n in range(rank, 2 * UPDATES * MICROS, readers)]
    data = iter([(words, words) for words in micros])
    losses, norms = [], []
    for _ in range(UPDATES):
        losses.append(float(engine.train_batch(data)))
        norms.append(float(engine.get_global_grad_norm()))
    engine.destroy()
    return {"losses": losses, "norms": norms}


@pytest.mark.parametrize("zero", [2, rarely(0), rarely(1)])
def test_own_stages_with_experts_over_ranks(zero: int, ranks: RankPools) -> None:
    whole = ranks(1).run(in_stages_with_experts, 1, 0)[0]
    assert max(whole["norms"]) > CLIP
    for found in ranks(4).run(in_stages_with_experts, 2, zero):
        assert found["losses"] == pytest.approx(whole["losses"], rel=1e-6)
        assert found["norms"] == pytest.approx(whole["norms"], rel=1e-5)


# ---- refusals ------------------------------------------------------------------------------------


def refusal(keys: Found, prepare: Callable[[Any], Any] | None = None) -> str:
    model = mixtral()
    with pytest.raises(HadalError) as caught:
        config = {
            "train_micro_batch_size_per_gpu": ROWS,
            "optimizer": {"type": "AdamW"},
            "pipeline": {"auto": True, "stages": 2},
            **keys,
        }
        hadal.initialize(model=prepare(model) if prepare else model, config=config)
    return f"{type(caught.value).__name__}: {caught.value}"


def asked_for(model: Any) -> Any:
    return tp_model_init(model, 2, torch.float32)


def own_stages(_: Any) -> Any:
    layers = [nn.Linear(4, 4) for _ in range(2)]
    return PipelineModule(layers, num_stages=2, loss_fn=nn.functional.mse_loss)


SLICED: Found = {"tensor_parallel": {"autotp_size": 2, "sequence_parallel": True}}
UNEVEN: Found = {"sequence_parallel_size": 2, "tensor_parallel": {"autotp_size": 2}}


@pytest.mark.parametrize(
    ("keys", "prepare", "told"),
    [
        (
            UNEVEN,
            None,
            "pipeline.stages.*2 stages x 2 of sequence_parallel_size x 2 of"
            r" tensor_parallel.autotp_size need a multiple of 8 ranks, and there are 4",
        ),
        (SLICED, None, r"NotBuiltYetError: tensor_parallel.sequence_parallel.*leave the key out"),
        (TENSOR, asked_for, "UsageError: .*tp_model_init.*set tensor_parallel.autotp_size"),
        (
            {"expert_parallel": {"enabled": True, "autoep_size": 4}},
            None,
            r"expert_parallel.autoep_size.*4 does not divide the 2 ranks \(of 4\)",
        ),
        (EXPERTS, own_stages, "NotBuiltYetError: expert_parallel.*hadal.moe.MoE"),
        (
            SEQUENCE,
            own_stages,
            "sequence_parallel_size.*2 differs from 1, which the program passes",
        ),
        (TENSOR, own_stages, "tensor_parallel.autotp_size: 2, and the mpu"),
    ],
)
def test_degrees_that_do_not_fit(keys: Found, prepare: Any, told: str, ranks: RankPools) -> None:
    for found in ranks(4).run(refusal, keys, prepare):
        assert re.search(told, found, re.DOTALL), found
