"""`activation_checkpointing.modules`: modules of any model are recomputed, with the same losses."""

from __future__ import annotations

import copy
import logging
import pickle
import warnings
from typing import Any

import pytest
import torch
from engine.parts import Megatron
from ranks import RankPools, on_ranks
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError, checkpoint

import hadal
from hadal import comm
from hadal.errors import ConfigError, UsageError
from hadal.plugins.activation_checkpointing.listener import Recomputed
from hadal.zero.grouping import repeated_blocks

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Block(nn.Module):
    """A residual layer with dropout that counts its forwards."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(0.3)
        self.forwards = 0

    def forward(self, hidden: Tensor, *, scale: float = 1.0) -> Tensor:
        self.forwards += 1
        return hidden + scale * self.down(self.dropout(torch.relu(self.up(hidden))))


class Model(nn.Module):
    """Blocks between two layers."""

    def __init__(self, blocks: type[Block] = Block) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 12)
        self.blocks = nn.ModuleList(blocks() for _ in range(3))
        self.last = nn.Linear(12, 4)
        self.recomputes = False

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        for block in self.blocks:
            if self.recomputes:
                hidden = checkpoint(block, hidden, use_reentrant=False)
            else:
                hidden = block(hidden, scale=0.5)
        return self.last(hidden)


def engine_of(
    section: dict[str, Any] | None,
    stage: int = 0,
    mpu: Any = None,
    blocks: type[Block] = Block,
    **keys: Any,
) -> Any:
    zero = {"stage": stage, "reduce_bucket_size": 200}
    if stage == 3:
        zero["stage3_param_persistence_threshold"] = 0
    config = {
        "train_micro_batch_size_per_gpu": 5,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": zero,
        **({} if section is None else {"activation_checkpointing": section}),
        **keys,
    }
    engine, _, _, _ = hadal.initialize(model=Model(blocks), config=config, mpu=mpu)
    return engine


def losses_of(
    engine: Any, updates: int = 3, dtype: torch.dtype = torch.float32, seed: int | None = None
) -> list[float]:
    torch.manual_seed(comm.get_rank() if seed is None else seed)
    found = []
    for _ in range(2 * updates):
        loss = engine(torch.randn(5, 6, dtype=dtype).to(engine.device)).float().square().mean()
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    return found


def _same_losses(stage: int, name: str, sections: list[dict[str, Any]], zero: Any = None) -> None:
    keys: dict[str, Any] = {"bf16": {"enabled": True}} if name == "bf16" else {}
    if zero is not None:
        keys["zero_optimization"] = {"stage": stage, **zero}
    plain = engine_of(None, stage, **keys)
    expected = losses_of(plain, dtype=DTYPES[name])
    weights = plain.state_dict()
    plain.destroy()
    for section in sections:
        engine = engine_of(section, stage, **keys)
        assert losses_of(engine, dtype=DTYPES[name]) == expected
        assert [block.forwards for block in engine.module.blocks] == [12] * 3
        for key, value in engine.state_dict().items():
            assert torch.equal(value, weights[key])
        engine.destroy()


SECTIONS: list[dict[str, Any]] = [
    {"modules": "units"},
    {"modules": ["Block"], "cpu_checkpointing": True, "synchronize_checkpoint_boundary": True},
    {"modules": ["blocks.*"], "profile": True},
]


@pytest.mark.fast_cells("2-bf16")
@pytest.mark.parametrize("name", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.claims("activation_checkpointing")
def test_losses_are_the_same_to_the_bit(ranks: RankPools, stage: int, name: str) -> None:
    ranks(2).run(_same_losses, stage, name, SECTIONS)


def test_with_everything_offloaded(ranks: RankPools) -> None:
    zero = {name: {"device": "cpu"} for name in ("offload_param", "offload_optimizer")}
    ranks(2).run(_same_losses, 3, "bf16", SECTIONS[:1], zero)


@pytest.mark.fast_cells("3")
@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(2)
def test_inputs_sharded_over_the_parts_of_a_model(stage: int) -> None:
    model, data = comm.Ranks.world().in_blocks(2)
    mpu, found = Megatron(data, model), []
    section = {"modules": "units", "partition_activations": True, "cpu_checkpointing": True}
    more = {"contiguous_memory_optimization": True, "number_checkpoints": 3}
    for each in (None, section, {**section, **more}):
        engine = engine_of(each, stage, mpu)
        found.append(losses_of(engine, seed=0))
        engine.destroy()
    assert found[0] == found[1] == found[2]
    engine = engine_of({**section, **more, "number_checkpoints": 2}, stage, mpu)
    with pytest.raises(UsageError, match="number_checkpoints is 2, but 3 recomputed blocks"):
        engine(torch.randn(5, 6))
    engine.destroy()


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_compiled_models(ranks: RankPools, stage: int) -> None:
    ranks(1).run(_compiled, stage)


def _compiled(stage: int) -> None:
    # The compiler looks at `.grad` of a block's input, of which torch warns.
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
    torch._dynamo.reset()
    found = []
    for section in (None, {"modules": "units", "cpu_checkpointing": True}):
        engine = engine_of(section, stage)
        engine.module.eval()  # a compiler draws other numbers
        engine.compile(backend="aot_eager")
        found.append(losses_of(engine))
        engine.destroy()
    assert found[0] == pytest.approx(found[1], rel=1e-6)
    torch._dynamo.reset()


def test_the_model_is_as_before_after_destroy() -> None:
    engine = engine_of({"modules": "units"})
    block = engine.module.blocks[0]
    assert isinstance(block.forward, Recomputed)
    for copied in (copy.deepcopy(engine.module), pickle.loads(pickle.dumps(engine.module))):
        assert copied.blocks[0].forward.__self__ is copied.blocks[0]
    with torch.no_grad():
        engine(torch.randn(5, 6))
    assert block.forwards == 1
    engine.destroy()
    assert "forward" not in vars(block)


def test_units_are_the_outermost_repeated_blocks() -> None:
    inner = nn.ModuleList(Model() for _ in range(2))
    assert repeated_blocks(Model()) == ["blocks.0", "blocks.1", "blocks.2"]
    assert repeated_blocks(nn.Sequential(nn.Linear(2, 2), inner)) == ["1.0", "1.1"]
    assert repeated_blocks(nn.Sequential(nn.Linear(2, 2), nn.ReLU())) == []


MISTAKES = [
    (["block.*"], "'block.*' matches no module's name or class; did you mean 'blocks"),
    (["Decoder"], "names here are 'blocks'"),
    (["blocks"], "blocks is a ModuleList, which is never called; give 'blocks.*'"),
    ([], 'an empty list recomputes nothing; give "units" or patterns, or leave the key out'),
    ([""], "'' matches no module's name or class"),
    (["Block", "blocks.1.up"], "blocks.1.up would be recomputed twice: blocks.1"),
]


@pytest.mark.parametrize(("patterns", "message"), MISTAKES)
@pytest.mark.claims("activation_checkpointing")
def test_patterns_that_cannot_be_meant(patterns: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=r"activation_checkpointing\.modules") as caught:
        engine_of({"modules": patterns})
    assert message in str(caught.value)


class Fickle(Block):
    """Another computation at every second call, as with a cache or a counter."""

    def forward(self, hidden: Tensor, *, scale: float = 1.0) -> Tensor:
        if self.forwards % 2 == 0:
            return super().forward(hidden, scale=scale)
        self.forwards += 1
        return hidden * scale


def test_a_module_that_computes_something_else_again_is_named() -> None:
    engine = engine_of({"modules": "units"}, blocks=Fickle)
    loss = engine(torch.randn(5, 6)).sum()
    with pytest.raises(CheckpointError, match=r"blocks\.2 computed something else .* leave it out"):
        engine.backward(loss)
    engine.destroy()


def test_slices_that_no_ranks_share_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "hadal"):
        engine_of({"modules": "units", "partition_activations": True}).destroy()
    assert "partition_activations has no effect: one rank holds the whole model" in caplog.text


def test_a_model_without_blocks() -> None:
    config = {"train_micro_batch_size_per_gpu": 1, "activation_checkpointing": {"modules": "units"}}
    with pytest.raises(ConfigError, match='"units" finds no repeated blocks'):
        hadal.initialize(model=nn.Linear(2, 2), config=config)


def test_a_model_that_recomputes_itself() -> None:
    engine = engine_of({"modules": "units"})
    engine.module.recomputes = True
    with pytest.raises(UsageError, match=r"blocks\.0 is recomputed twice: .* torch.utils.checkpoi"):
        engine(torch.randn(5, 6))
    engine.destroy()


def test_a_reentrant_recomputation_around(caplog: pytest.LogCaptureFixture) -> None:
    engine = engine_of({"modules": "units"})
    block, x = engine.module.blocks[0], torch.randn(5, 12, requires_grad=True)
    with caplog.at_level(logging.WARNING, "hadal"):
        for _ in range(2):
            checkpoint(block, x, use_reentrant=True).sum().backward()
    assert caplog.text.count("blocks.0 is called during a backward") == 1
    engine.destroy()


def test_a_section_without_modules_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "hadal"):
        engine_of({"cpu_checkpointing": True}).destroy()
    assert 'applies only to calls of deepspeed.checkpointing.checkpoint; "modules"' in caplog.text


def switch_on(model: Any) -> None:
    """Turn on the switch of transformers, under its name before or after 5.23."""
    name = "activation_checkpointing_enable"
    getattr(model, name if hasattr(model, name) else "gradient_checkpointing_enable")()


@pytest.mark.fast_cells("1")
@pytest.mark.parametrize("stage", [1, 3])
def test_a_model_of_transformers(stage: int) -> None:
    """Its cache is off in training, or recomputation would add to it again."""
    pytest.importorskip("transformers")
    from transformers import LlamaConfig, LlamaForCausalLM

    def losses(section: dict[str, Any] | None, switched: bool = False) -> list[float]:
        torch.manual_seed(0)
        sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "attention_dropout": 0.1}
        model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, num_hidden_layers=2)).train()
        if switched:
            switch_on(model)
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "zero_optimization": {"stage": stage},
            "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
            **({} if section is None else {"activation_checkpointing": section}),
        }
        engine, _, _, _ = hadal.initialize(model=model, config=config)
        torch.manual_seed(1)
        found = []
        for _ in range(3):
            tokens = torch.randint(32, (2, 6))
            loss = engine(input_ids=tokens, labels=tokens).loss
            engine.backward(loss)
            engine.step()
            found.append(loss.item())
        switch_on(model)
        if section is not None:
            engine._state.listeners._all[0]._is_checked = False
            with pytest.raises(UsageError, match="would be recomputed twice: gradient_checkp"):
                engine(input_ids=tokens, labels=tokens)
        engine.destroy()
        return found

    assert losses({"modules": "units"}) == losses(None)
    assert losses({"modules": ["LlamaDecoderLayer"]}) == losses(None)
    with pytest.raises(ConfigError, match="gradient_checkpointing of transformers is on"):
        losses({"modules": "units"}, switched=True)
