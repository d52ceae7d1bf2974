"""Transformers models that are cut over ranks compute the same as in one process."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from ranks import RankPools

from hadal.comm import Ranks
from hadal.config import load_config
from hadal.plugins.sequence.cross_entropy import vocab_parallel_cross_entropy
from hadal.plugins.tensor_parallel.apply import cut_model, share_values
from hadal.plugins.tensor_parallel.plan import plan_cuts
from tensor_parallel.models import WORDS, batch_of, model_of

pytestmark = pytest.mark.skipif(
    find_spec("transformers") is None, reason="transformers is not installed"
)


def section_of(size: int, **keys: Any) -> Any:
    config = {"train_batch_size": size, "tensor_parallel": {"autotp_size": size, **keys}}
    return load_config(config, world_size=size, allow_unbuilt=True).tensor_parallel


def alike(kind: str, keys: dict[str, Any]) -> None:
    ranks = Ranks.world()
    whole, model = model_of(kind), model_of(kind, seed=ranks.rank)
    section = section_of(ranks.size, **keys)
    share_values(model, ranks)
    plan = plan_cuts(model, section, ranks.size)
    sliced = cut_model(model, plan, section, ranks, vocab_parallel_cross_entropy)
    batch = batch_of(0, length=8 if section.sequence_parallel else 7)
    expected, found = whole.train()(**batch), model.train()(**batch)
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-5, atol=1e-6)
    logits = expected.logits
    if section.vocab_parallel_lm_head:
        logits = logits.split(next(one.cut.sizes for one in sliced if one.shape[0] == WORDS), -1)[
            ranks.rank
        ]
    torch.testing.assert_close(found.logits, logits, rtol=1e-4, atol=1e-5)
    expected.loss.backward()
    found.loss.backward()
    cut_of = {one.name: one.cut for one in sliced}
    assert cut_of
    for name, parameter in model.named_parameters():
        gradient = whole.get_parameter(name).grad
        if name in cut_of:
            gradient = cut_of[name].take(gradient, ranks.rank)
        # T5's decoder sums the gradients of the encoder's states over its blocks, in another order.
        unit = 3e-5 if kind == "t5" else 1e-5
        told, limit = f"{name}: {{}}".format, unit * float(gradient.abs().max()) + 1e-7
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-5, atol=limit, msg=told)


@pytest.mark.slow_cells(
    "phi3-2-keys5",
    "gptneox-4-keys6",
    "phi-2-keys7",
    "opt-2-keys8",
    "bloom-2-keys9",
    "bert-4-keys10",
    "t5-2-keys11",
    "gptj-2-keys12",
    "gptneox-2-keys16",
)
@pytest.mark.parametrize(
    ("kind", "world", "keys"),
    [
        ("llama", 2, {}),
        ("tied llama", 2, {}),
        ("uneven llama", 2, {"tp_overlap_comm": True}),
        ("qwen2", 2, {}),
        ("qwen3", 2, {}),
        ("phi3", 2, {}),
        ("gptneox", 4, {}),
        ("phi", 2, {}),
        ("opt", 2, {}),
        ("bloom", 2, {}),
        ("bert", 4, {}),
        ("t5", 2, {}),
        ("gptj", 2, {}),
        ("falcon", 2, {}),
        ("llama", 2, {"sequence_parallel": True}),
        ("qwen2", 2, {"sequence_parallel": True, "tp_overlap_comm": True}),
        ("gptneox", 2, {"sequence_parallel": True}),
        ("llama", 2, {"vocab_parallel_lm_head": True}),
        ("tied llama", 2, {"vocab_parallel_lm_head": True, "sequence_parallel": True}),
        ("tied llama", 2, {"vocab_parallel_lm_head": False}),
        ("phi3", 2, {"preset_model": "phi3"}),
    ],
)
@pytest.mark.claims(
    "tensor_parallel.preset_model",
    "tensor_parallel.tp_overlap_comm",
    "tensor_parallel.vocab_parallel_lm_head",
)
def test_slices_compute_the_same_as_one_process(
    kind: str, world: int, keys: dict[str, Any], ranks: RankPools
) -> None:
    ranks(world).run(alike, kind, keys)
