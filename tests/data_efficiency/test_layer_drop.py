"""Progressive layer drop: the probability, and layers that Hadal skips."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from engine.toys import engine_of
from ranks import RankPools
from torch import Tensor, nn

from hadal import comm
from hadal.config import load_config
from hadal.errors import ConfigError, UsageError
from hadal.plugins.data_efficiency.layer_drop import drop_layers, keeps_of, theta_at

SECTION = {"enabled": True, "theta": 0.5, "gamma": 0.1}
ALWAYS = {"enabled": True, "theta": 0.25, "gamma": 50.0}  # from the third update on
# DeepSpeed's, with two micro-steps.
THETAS = [1.0, 1.0, 1.0, 1.0, *[0.9524187090179798] * 2, *[0.9093653765389909] * 2]


class Told(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.given: list[dict] = []

    def forward(self, x: Tensor, **kwargs) -> Tensor:
        self.given.append(kwargs)
        return self.linear(x).square().mean()


class Block(nn.Module):
    """Counts its uses."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.uses = 0

    def forward(self, x: Tensor) -> Tensor:
        self.uses += 1
        return x + torch.tanh(self.linear(x))


class Pairing(Block):
    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return super().forward(x), None


class Blocks(nn.Module):
    def __init__(self, kind: type[Block] = Block) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(kind() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            found = block(x)
            x = found[0] if isinstance(found, tuple) else found
        return x.square().mean()

    @property
    def uses(self) -> list[int]:
        return [block.uses for block in self.blocks]


def train(engine, updates: int) -> list[Tensor]:
    losses = []
    for step in range(updates * engine.gradient_accumulation_steps()):
        generator = torch.Generator().manual_seed(step)
        losses.append(engine(torch.randn(2, 4, generator=generator)))
        engine.backward(losses[-1])
        engine.step()
    return [loss.detach() for loss in losses]


def engine_with(model: nn.Module, section: dict = SECTION, **changes):
    return engine_of(changes.pop("stage", 0), model, progressive_layer_drop=section, **changes)


@pytest.mark.claims(
    "progressive_layer_drop",
    "progressive_layer_drop.enabled",
    "progressive_layer_drop.theta",
    "progressive_layer_drop.gamma",
)
def test_the_model_gets_the_probability(tmp_path: Path):
    engine = engine_with(Told(), gradient_accumulation_steps=2)
    train(engine, 4)
    engine.eval()
    engine(torch.ones(2, 4))
    engine.train()
    given = engine.module.given
    assert given.pop() == {}
    assert [each["pld_theta"] for each in given] == pytest.approx(THETAS, abs=0)
    assert all(each["progressive_layer_drop"] is True for each in given)
    assert engine.layer_drop.theta == theta_at(0.5, 0.1, 4) == pytest.approx(0.8704091103408589)
    assert theta_at(0.0, 0.001, 11) == np.exp(-0.01)  # to the last bit, as in DeepSpeed
    engine.save_checkpoint(tmp_path)
    engine.destroy()

    engine = engine_with(Told(), gradient_accumulation_steps=2)
    engine.load_checkpoint(tmp_path)
    assert engine.layer_drop.theta == theta_at(0.5, 0.1, 4)
    train(engine, 1)
    assert [each["pld_theta"] for each in engine.module.given] == [theta_at(0.5, 0.1, 4)] * 2
    engine.destroy()


def test_the_first_layer_is_always_kept():
    assert keeps_of(4, 0.5) == [1.0, 0.875, 0.75, 0.625]
    assert keeps_of(3, 1.0) == [1.0] * 3


@pytest.mark.fast_cells("Block")
@pytest.mark.parametrize("kind", [Block, Pairing])
def test_layers_are_skipped(kind):
    engine = engine_with(drop_layers(Blocks(kind), kind), ALWAYS)
    train(engine, 2)
    assert engine.module.uses == [2] * 4  # the probability is still 1
    train(engine, 200)
    uses = [(used - 2) / 200 for used in engine.module.uses]
    assert uses[0] == 1.0
    assert uses == pytest.approx(keeps_of(4, 0.25), abs=0.12)
    before = engine.module.uses
    engine.eval()
    engine(torch.ones(2, 4))
    assert engine.module.uses == [used + 1 for used in before]
    engine.destroy()


def test_the_mean_of_a_layer_is_its_output():
    torch.manual_seed(0)
    (block,) = drop_layers(nn.Sequential(Block()), Block)
    x = torch.randn(2, 4)
    whole = block(x)
    block.drop_turn = (True, 0.25)
    kept = block(x)
    block.drop_turn = (False, 0.25)
    assert block(x) is x
    assert torch.allclose(0.25 * kept + 0.75 * x, whole)


@pytest.mark.fast_cells("3")
@pytest.mark.parametrize("stage", [0, 3])
def test_ranks_skip_the_same_layers(ranks: RankPools, stage):
    (uses, losses), other = ranks(2).run(skip, stage)
    assert (uses, losses) == other
    assert 0 < uses[3] < 12


def skip(stage: int) -> tuple[list[int], list[float]]:
    torch.manual_seed(comm.get_rank())
    engine = engine_with(drop_layers(Blocks(), Block), ALWAYS, stage=stage)
    losses = train(engine, 12)
    uses = engine.module.uses
    engine.destroy()
    return uses, [loss.item() for loss in losses]


def test_a_run_resumes_with_the_same_layers(tmp_path: Path):
    torch.manual_seed(0)
    engine = engine_with(drop_layers(Blocks(), Block), ALWAYS)
    train(engine, 3)
    engine.save_checkpoint(tmp_path)
    before = engine.module.uses
    losses = train(engine, 5)
    uses = [after - start for after, start in zip(engine.module.uses, before, strict=True)]
    engine.destroy()
    engine = engine_with(drop_layers(Blocks(), Block), ALWAYS)
    engine.load_checkpoint(tmp_path)
    assert train(engine, 5) == losses
    assert engine.module.uses == uses
    engine.destroy()


@pytest.mark.parametrize("make", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_changed_layers_can_be_copied_and_keep_names(make):
    model = Blocks()
    names = list(model.state_dict())
    drop_layers(drop_layers(model, Block), Block)
    copied = make(model)
    assert list(copied.state_dict()) == names
    assert all(type(block) is type(model.blocks[0]) for block in copied.blocks)
    assert isinstance(model.blocks[0], Block)
    assert type(model.blocks[0]).__name__ == "Block"


def test_layers_that_nothing_drops_are_reported(caplog):
    engine = engine_of(0, drop_layers(Blocks(), Block))
    engine.destroy()
    assert "progressive_layer_drop.enabled is not true" in caplog.text


def test_a_model_that_cannot_drop_is_refused():
    with pytest.raises(UsageError, match=r"Blocks.forward takes no progressive_layer_drop and no"):
        engine_with(Blocks())
    with pytest.raises(UsageError, match="drop_layers: Blocks has no Told; pass the class"):
        drop_layers(Blocks(), Told)
    with pytest.raises(UsageError, match="expected the class of the layers, got 3"):
        drop_layers(Blocks(), 3)


@pytest.mark.parametrize("name", ["theta", "gamma"])
def test_both_numbers_are_required(name):
    section = {key: value for key, value in SECTION.items() if key != name}
    with pytest.raises(ConfigError, match=rf"progressive_layer_drop.{name}"):
        load_config({"train_batch_size": 1, "progressive_layer_drop": section})


def test_the_probability_may_fall_to_zero():
    section = {"enabled": True, "theta": 0, "gamma": 0.1}
    assert load_config({"train_batch_size": 1, "progressive_layer_drop": section})
    assert keeps_of(2, theta_at(0, 1e3, 9)) == [1.0, 0.5]


@pytest.mark.runs("transformers")
def test_a_model_of_transformers_skips_layers():
    from transformers import GPT2Config, GPT2LMHeadModel
    from transformers.models.gpt2.modeling_gpt2 import GPT2Block

    config = GPT2Config(n_layer=3, n_head=2, n_embd=8, vocab_size=50, n_positions=16)
    with pytest.raises(UsageError, match=r"GPT2LMHeadModel\.forward takes no progressive_layer"):
        engine_with(GPT2LMHeadModel(config))
    model = drop_layers(GPT2LMHeadModel(config), GPT2Block)
    model.loss_type = "ForCausalLM"
    engine = engine_with(model, ALWAYS)
    for _ in range(6):
        ids = torch.arange(24).view(2, 12)
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
    assert engine.layer_drop.theta == pytest.approx(0.25)
    engine.destroy()
