"""sequence_parallel_size alone: one process's losses, norms and weights, with any factors."""

from __future__ import annotations

import logging
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import RankPools, on_ranks
from torch import Tensor, nn

import hadal
from hadal import comm
from hadal.errors import SequenceError
from hadal.plugins.sequence import DistributedAttention
from hadal.plugins.sparse_attention import use_sparse_attention
from sequence.models import WORDS, llama, tokens

pytestmark = pytest.mark.skipif(
    find_spec("transformers") is None, reason="transformers is not installed"
)

UPDATES, CLIP, RATE = 3, 0.5, 0.2


def batch(step: int, reader: int, length: int = 12) -> dict[str, Any]:
    return tokens(10 * step + reader, length=length)


def alone(readers: int, accumulation: int, length: int = 12) -> tuple[list[float], list[float]]:
    """One process on whole sequences: the losses of the first reader, and the norms."""
    model = llama()
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    losses, norms = [], []
    for update in range(UPDATES):
        optimizer.zero_grad()
        for micro in range(accumulation):
            for reader in range(readers):
                loss = model(**batch(accumulation * update + micro, reader, length)).loss
                (loss / (accumulation * readers)).backward()
                if not reader:
                    losses.append(loss.item())
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
    return losses, norms


def config_of(shared: int, stage: int, accumulation: int, **keys: Any) -> dict[str, Any]:
    return {
        "sequence_parallel_size": shared,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": CLIP,
        "optimizer": {"type": "SGD", "params": {"lr": RATE}},
        "zero_optimization": {
            "stage": stage,
            **({"stage3_param_persistence_threshold": 0} if stage == 3 else {}),
        },
        **keys,
    }


def trained(
    shared: int, stage: int, accumulation: int, length: int = 12, **keys: Any
) -> tuple[list[float], list[float]]:
    """The key alone: every rank of a sequence gives the engine the same whole batch."""
    reader = comm.get_rank() // shared
    engine = hadal.initialize(model=llama(), config=config_of(shared, stage, accumulation, **keys))[
        0
    ]
    losses, norms = [], []
    for step in range(UPDATES * accumulation):
        loss = engine(**batch(step, reader, length)).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        if step % accumulation == accumulation - 1:
            norms.append(engine.get_global_grad_norm())
    engine.destroy()
    return losses, norms


# Ranks that share a sequence, of how many; micro-steps; the first loss scale's power (fp16).
FACTORS = [
    (1, 1, 1, None),
    (2, 2, 1, None),
    (2, 2, 4, None),
    (4, 4, 1, None),
    (4, 4, 4, None),
    (4, 2, 1, None),
    (4, 2, 4, None),
    (2, 2, 1, 4),
    (2, 2, 4, 10),
    (4, 4, 4, 10),
]


@pytest.mark.fast_cells("2-2-4-10")
@pytest.mark.claims("sequence_parallel_size")
@pytest.mark.parametrize(("world", "shared", "accumulation", "power"), FACTORS)
def test_the_table_of_factors(
    world: int, shared: int, accumulation: int, power: int | None, ranks: RankPools
) -> None:
    keys = {"fp16": {"enabled": True, "initial_scale_power": power}} if power else {}
    losses, norms = alone(world // shared, accumulation)
    for rank, found in enumerate(
        ranks(world).run(_trained_with, shared, 1, accumulation, keys, timeout=120)
    ):
        near = {"rel": 2e-2} if power else {"rel": 2e-5}
        if rank < shared:
            assert found[0] == pytest.approx(losses, rel=5e-3 if power else 1e-5)
        assert found[1] == pytest.approx(norms, **near)
    assert max(norms) > CLIP


def _trained_with(shared: int, stage: int, accumulation: int, keys: Any) -> Any:
    return trained(shared, stage, accumulation, **keys)


@pytest.mark.fast_cells("3")
@pytest.mark.claims("sequence_parallel_size")
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_every_stage(stage: int, ranks: RankPools) -> None:
    losses, norms = alone(1, 2, 11)  # a length that two ranks do not divide
    for found in ranks(2).run(trained, 2, stage, 2, 11):
        assert found[0] == pytest.approx(losses, rel=1e-5)
        assert found[1] == pytest.approx(norms, rel=2e-5)


def alone_with(accumulation: int, length: int, packed: bool, **kind: Any) -> Any:
    model = llama(**kind)
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    losses, norms = [], []
    for update in range(UPDATES):
        optimizer.zero_grad()
        for micro in range(accumulation):
            given = batch_of(accumulation * update + micro, length, packed)
            loss = model(**given, use_cache=False).loss
            (loss / accumulation).backward()
            losses.append(loss.item())
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
    return losses, norms


def batch_of(step: int, length: int, packed: bool) -> dict[str, Any]:
    found = batch(step, 0, length)
    if packed:
        half = length // 3
        found["position_ids"] = torch.cat([torch.arange(half), torch.arange(length - half)])
        found["position_ids"] = found["position_ids"].expand(2, -1).contiguous()
    return found


def _in_a_ring(stage: int, accumulation: int, length: int, packed: bool, kind: Any) -> Any:
    shared = comm.get_world_size()
    engine = hadal.initialize(model=llama(**kind), config=config_of(shared, stage, accumulation))[0]
    losses, norms = [], []
    for step in range(UPDATES * accumulation):
        loss = engine(**batch_of(step, length, packed)).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        if step % accumulation == accumulation - 1:
            norms.append(engine.get_global_grad_norm())
    engine.destroy()
    return losses, norms


RINGS = [
    (2, 1, 1, 12, False, {"heads": 1, "key_heads": 1}),
    (4, 1, 2, 11, False, {"heads": 2, "key_heads": 1}),  # padded to 12: an odd slice each
    (4, 3, 1, 16, True, {"heads": 3, "key_heads": 3}),
]


@pytest.mark.fast_cells("4-3-1-16-True-kind2")
@pytest.mark.claims("sequence_parallel_size")
@pytest.mark.parametrize(("world", "stage", "accumulation", "length", "packed", "kind"), RINGS)
def test_more_ranks_than_heads(
    world: int,
    stage: int,
    accumulation: int,
    length: int,
    packed: bool,
    kind: dict[str, int],
    ranks: RankPools,
) -> None:
    losses, norms = alone_with(accumulation, length, packed, **kind)
    for found in ranks(world).run(_in_a_ring, stage, accumulation, length, packed, kind):
        assert found[0] == pytest.approx(losses, rel=1e-5)
        assert found[1] == pytest.approx(norms, rel=2e-5)


@on_ranks(2)
def test_evaluation_and_other_models_are_whole() -> None:
    engine = hadal.initialize(model=llama(), config=config_of(2, 2, 1))[0]
    own, given = llama(), batch(0, 0)
    engine.eval()
    with torch.no_grad():
        found, expected = engine(**given), own.eval()(**given)
    torch.testing.assert_close(found.logits, expected.logits)
    torch.testing.assert_close(found.loss, expected.loss)
    # Another model of the same class keeps its attention.
    torch.testing.assert_close(own.train()(**given).loss, expected.loss)
    engine.train()
    del given["position_ids"]  # numbered from the slice's place
    positional = engine(given["input_ids"], labels=given["labels"])
    torch.testing.assert_close(positional.loss, expected.loss)
    assert positional.logits.shape[1] == 6
    as_mapping, as_tuple = engine(given), engine(**given, return_dict=False)
    torch.testing.assert_close(as_mapping.loss, expected.loss)
    torch.testing.assert_close(as_tuple[0], expected.loss)
    given["labels"][:] = -100
    assert engine(**given).loss == 0
    module = engine.module
    engine.destroy()
    module.train()
    torch.testing.assert_close(module(**batch(0, 0)).loss, expected.loss)


def _of_another_class(name: str) -> tuple[float, float]:
    """The loss of whole sequences, and of slices: of GPT-2, and over a pattern of each head's."""
    given = batch(0, 0)
    if name == "gpt2":
        from transformers import GPT2Config, GPT2LMHeadModel

        torch.manual_seed(0)
        sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "attn_pdrop": 0.0, "n_positions": 32}
        model = GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, **sizes, attn_implementation="sdpa"))
        model.eval()  # no dropout
    else:
        own = {"different_layout_per_head": True, "num_different_global_patterns": 4}
        model = use_sparse_attention(llama(), {"mode": "fixed", "block": 1, **own})
    expected = model(**given).loss.item()
    engine = hadal.initialize(model=model.train(), config=config_of(2, 2, 1))[0]
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    found = engine(**given).loss.item()
    engine.destroy()
    assert model.loss_function.__name__ == "ForCausalLMLoss"
    return found, expected


@pytest.mark.parametrize("name", ["gpt2", "patterns"])
def test_losses_of_other_models(name: str, ranks: RankPools) -> None:
    for found, expected in ranks(2).run(_of_another_class, name):
        assert found == pytest.approx(expected, rel=1e-5)


def _own_loss(model: Any) -> None:
    """Let a model compute its loss itself, from labels that it shifts."""
    forward = model.forward

    def shifted(input_ids: Tensor, labels: Tensor, **_: Any) -> Any:
        found = forward(input_ids)
        logits = found.logits[:, :-1].flatten(0, 1)
        found["loss"] = nn.functional.cross_entropy(logits, labels[:, 1:].flatten())
        return found

    model.forward = shifted


def _change(model: Any, kind: str) -> None:
    if kind == "ring":
        use_sparse_attention(model, {"mode": "fixed"})
    if kind == "own loss":
        _own_loss(model)
    if kind == "dropout":
        model.model.layers[0].self_attn.attention_dropout = 0.1
    if kind == "eager":
        model.set_attn_implementation("eager")
    if kind == "loss":
        model.loss_type = "ForMaskedLM"
    if kind == "both ways":
        model.model.layers[0].self_attn.is_causal = False


def _refused(kind: str) -> None:
    model = llama(heads=1, key_heads=1) if kind in ("dropout", "ring") else llama()
    _change(model, kind)
    engine = hadal.initialize(model=model, config=config_of(2, 1, 1))[0]
    given = batch(0, 0, 11)
    if kind == "mask":
        given["attention_mask"] = torch.ones(2, 1, 11, 11)
    if kind == "left":
        given.pop("position_ids", None)
        given["attention_mask"] = torch.ones(2, 11, dtype=torch.long)
        given["attention_mask"][1, :3] = 0
    if kind == "nothing":
        del given["input_ids"]
    if kind in ("other", "longer"):
        given = batch(0, comm.get_rank(), 11 + (comm.get_rank() if kind == "longer" else 0))
    if kind == "lengths":
        given["labels"] = given["labels"][:, 1:]
    engine(**given)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("dropout", r"attends with dropout, which is not built for more ranks than heads"),
        ("eager", "the attention 'eager' cannot be distributed"),
        ("loss", r"LlamaForCausalLM \(ForMaskedLM\) is not built.*sequence_loss"),
        ("own loss", r"\(computed by itself, not by its loss_function\) is not built"),
        (
            "ring",
            r"over a pattern \(hadal_sparse\) needs a head on each .* 1 or less",
        ),
        ("both ways", "attends in both directions"),
        ("mask", r"attention_mask has the shape \(2, 1, 11, 11\); expected \[batch, length\]"),
        ("left", r"attention_mask of sample 1 masks .* before .*padding_side = 'right'"),
        ("nothing", "got no input_ids or inputs_embeds"),
        ("other", r"ranks 0 and 1 share sequences but got different ones .*ParallelismConfig"),
        ("longer", r"different ones \(of shapes \(2, 11\) and \(2, 12\)\)"),
        ("lengths", r"shift_labels has the shape \(2, 10\)"),
    ],
)
def test_batches_that_cannot_be_split_are_an_error(
    kind: str, message: str, ranks: RankPools
) -> None:
    for error in ranks(2).raises(_refused, kind):
        assert isinstance(error, SequenceError), error
        with pytest.raises(SequenceError, match=message):
            raise error


def _told(model: nn.Module) -> list[str]:
    lines: list[str] = []

    class Heard(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    handler = Heard(logging.WARNING)
    logging.getLogger("hadal").addHandler(handler)
    try:
        hadal.initialize(model=model, config=config_of(2, 1, 1))[0].destroy()
    finally:
        logging.getLogger("hadal").removeHandler(handler)
    return [line for line in lines if "sequence_parallel_size" in line]


@on_ranks(2)
def test_a_model_whose_sequences_only_the_program_can_split_is_refused() -> None:
    found = _told(nn.Linear(2, 2))
    if comm.get_rank() == 0:
        assert len(found) == 1
        assert "Linear has no config._attn_implementation" in found[0]
        assert "hadal.sequence.DistributedAttention" in found[0]
    own = nn.Sequential(nn.Linear(2, 2), DistributedAttention(torch.add, dist.group.WORLD))
    assert _told(own) == []


@on_ranks(2)
def test_padding_at_the_beginning_needs_positions() -> None:
    given = batch(0, 0, 11)
    mask = torch.ones(2, 11, dtype=torch.long)
    mask[1, :3] = 0
    given["labels"] = given["labels"].masked_fill(mask == 0, -100)
    places = torch.arange(11).repeat(2, 1)
    places[1] = torch.cat([torch.arange(3), torch.arange(8)])
    given |= {"attention_mask": mask, "position_ids": places}
    expected = llama()(**given, use_cache=False).loss
    engine = hadal.initialize(model=llama(), config=config_of(2, 1, 1))[0]
    torch.testing.assert_close(engine(**given).loss, expected)
    engine.destroy()
