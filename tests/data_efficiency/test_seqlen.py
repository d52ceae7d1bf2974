"""Curriculum by sequence length: the model's inputs, and the saved state."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from engine.logs import logged
from engine.toys import engine_of
from ranks import RankPools
from torch import Tensor, nn

from hadal import comm
from hadal.config import load_config
from hadal.errors import ConfigError, UsageError
from hadal.plugins.data_efficiency.ordered import set_custom_schedules

SECTION = {
    "enabled": True,
    "curriculum_type": "seqlen",
    "min_difficulty": 8,
    "max_difficulty": 64,
    "schedule_type": "fixed_linear",
    "schedule_config": {"total_curriculum_step": 5, "difficulty_step": 8},
}
QUIET = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
CUSTOM = {**SECTION, "schedule_type": "custom"}
# With two micro-steps and an evaluation after the third forward: DeepSpeed's.
LENGTHS = [16, 16, 24, None, 24, 40, 40, 48, 48, 64, 64, 64]


class Model(nn.Module):
    """Keeps what its forward is given."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 4)
        self.given: list[int | None] = []
        self.lengths: list[int] = []

    def body(self, x: Tensor, length: int | None) -> Tensor:
        self.given.append(length)
        self.lengths.append(x.shape[1])
        return self.embedding(x[:, :length]).square().mean()


class Told(Model):
    def forward(self, x: Tensor, curriculum_seqlen: int | None = None) -> Tensor:
        return self.body(x, curriculum_seqlen)


class Untold(Model):
    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        assert y is None or y.shape[:2] == x.shape
        return self.body(x, None)


class Anything(Model):
    def forward(self, x: Tensor, **kwargs: int) -> Tensor:
        return self.body(x, kwargs.get("curriculum_seqlen"))


def engine_with(model: nn.Module, section: dict = SECTION, steps: int = 2, **changes):
    return engine_of(
        changes.pop("stage", 0),
        model,
        curriculum_learning=section,
        gradient_accumulation_steps=steps,
        **changes,
    )


def ids(rows: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(comm.get_rank())
    return torch.randint(50, (rows, 64), generator=generator)


def train(engine, updates: int, *more: Tensor) -> None:
    for _ in range(updates * engine.gradient_accumulation_steps()):
        engine.backward(engine(ids(), *more))
        engine.step()


@pytest.mark.parametrize("kind", [Told, Anything])
@pytest.mark.claims(
    "curriculum_learning",
    "curriculum_learning.enabled",
    "curriculum_learning.curriculum_type",
    "curriculum_learning.min_difficulty",
    "curriculum_learning.max_difficulty",
    "curriculum_learning.schedule_type",
    "curriculum_learning.schedule_config",
)
def test_the_model_gets_the_length(kind):
    engine = engine_with(kind())
    for step in range(len(LENGTHS) - 1):
        engine.backward(engine(ids()))
        engine.step()
        if step == 2:
            engine.eval()
            engine(ids())
            engine.train()
    assert engine.module.given == LENGTHS
    assert set(engine.module.lengths) == {64}
    assert engine.length_curriculum.length == 64
    # An evaluation counts no tokens.
    assert engine.length_curriculum.tokens == 3 * sum(filter(None, LENGTHS))
    engine.destroy()


def test_a_model_that_knows_nothing_of_it_gets_shorter_inputs():
    with logged(logging.INFO) as messages:
        engine = engine_with(Untold(), log_level="info")
    assert "curriculum_learning: the inputs of Untold.forward are truncated" in messages
    train(engine, 3, ids())
    engine.eval()
    engine(ids())
    assert engine.module.lengths == [16, 16, 24, 24, 40, 40, 64]
    assert engine.module.given == [None] * 7
    assert engine.length_curriculum.tokens == 3 * sum(engine.module.lengths[:-1])
    engine.destroy()


def test_a_wrapper_around_a_model_that_takes_it_passes_it_on():
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Told()

        def forward(self, *args, **kwargs):
            return self.inner(*args, **kwargs)

    engine = engine_with(Wrapper())
    train(engine, 1)
    assert engine.module.inner.given == [16, 16]
    engine.destroy()


def test_the_configuration_chooses_who_truncates():
    engine = engine_with(Told(), {**SECTION, "truncate": True})
    train(engine, 1)
    assert (engine.module.given, engine.module.lengths) == ([None] * 2, [16] * 2)
    engine.destroy()
    with pytest.raises(
        UsageError, match=r"truncate is false, but Untold\.forward takes no curricu"
    ):
        engine_with(Untold(), {**SECTION, "truncate": False})


@pytest.mark.parametrize("by_name", [False, True])
def test_a_custom_schedule(by_name):
    engine = engine_with(Told(), CUSTOM, steps=1)
    with pytest.raises(UsageError, match=r"curriculum_learning.schedule_type is \"custom\""):
        engine(ids())

    def eights(step: int) -> int:
        return 8 * step

    set_custom_schedules(engine, {"seqlen": eights} if by_name else eights)
    train(engine, 3)
    assert engine.module.given == [8, 16, 24]
    with pytest.raises(UsageError, match="for loss; the configuration has seqlen"):
        set_custom_schedules(engine, {"loss": eights})
    engine.destroy()


def test_a_custom_schedule_without_a_curriculum_is_an_error():
    engine = engine_of(0)
    with pytest.raises(UsageError, match="no curriculum; switch on curriculum_learning"):
        set_custom_schedules(engine, lambda step: step)
    engine.destroy()


@pytest.mark.parametrize("section", [SECTION, CUSTOM])
def test_training_resumes_with_the_length_and_the_tokens(tmp_path: Path, section):
    def started():
        engine = engine_with(Told(), section)
        if section is CUSTOM:
            set_custom_schedules(engine, lambda step: 16 * step)
        return engine

    engine = started()
    train(engine, 2)
    engine.save_checkpoint(tmp_path)
    train(engine, 2)
    whole, tokens = engine.module.given, engine.length_curriculum.tokens
    engine.destroy()

    engine = started()
    engine.load_checkpoint(tmp_path)
    assert engine.length_curriculum.length == whole[3]
    train(engine, 2)
    assert engine.module.given == whole[4:]
    assert engine.length_curriculum.tokens == tokens
    engine.destroy()


@pytest.mark.parametrize("stage", [0, 3])
def test_all_ranks_count(ranks: RankPools, stage):
    assert ranks(2).run(count_tokens, stage) == [2 * 3 * (16 + 16 + 24 + 24)] * 2


def count_tokens(stage: int) -> int:
    engine = engine_with(Untold(), stage=stage)
    train(engine, 2)
    assert engine.module.lengths == [16, 16, 24, 24]
    tokens = engine.length_curriculum.tokens
    engine.destroy()
    return tokens


def test_the_monitors_write_length_and_tokens(tmp_path: Path):
    folder = {"enabled": True, "output_path": str(tmp_path), "job_name": "x"}
    engine = engine_with(Told(), csv_monitor=folder, monitor={"extra": True})
    train(engine, 2)
    engine.destroy()
    lengths = (tmp_path / "x" / "Train_Samples_curriculum_seqlen.csv").read_text().split()
    assert [line.split(",")[1] for line in lengths[1:]] == ["16", "24"]
    assert (tmp_path / "x" / "Train_Samples_consumed_tokens.csv").exists()


@pytest.mark.runs("transformers")
def test_models_of_transformers_are_trained_on_short_sequences():
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=50, n_positions=64, **QUIET)
    model = GPT2LMHeadModel(config)
    lengths = []
    model.transformer.wte.register_forward_hook(
        lambda module, args, output: lengths.append(output.shape[1])
    )
    model.loss_type = "ForCausalLM"
    engine = engine_with(model, optimizer={"type": "SGD", "params": {"lr": 0.0}})
    batch = {"input_ids": ids(), "labels": ids(), "attention_mask": torch.ones_like(ids())}
    loss = engine(**batch).loss
    # As Hugging Face's Trainer does: it counts the labels of both micro-steps, whole.
    counted = engine(**batch, num_items_in_batch=torch.tensor(3 * 63 * 2)).loss
    alone = model.eval()(**{name: value[:, :16] for name, value in batch.items()}).loss
    assert lengths == [16, 16, 16]
    assert torch.allclose(loss, alone)
    assert torch.allclose(counted * 2, alone)
    engine.destroy()


FAULTS: list = [
    ({"curriculum_type": None}, "curriculum_learning.curriculum_type", "add it"),
    ({"curriculum_type": "rarity"}, "curriculum_learning.curriculum_type", "seqlen"),
    ({"min_difficulty": 0}, "curriculum_learning.min_difficulty", ">= 1"),
    ({"max_difficulty": 4}, "curriculum_learning.max_difficulty", "less than min_difficulty 8"),
    ({"schedule_config": {}}, "curriculum_learning.schedule_config.difficulty_step", "add it"),
    (
        {"schedule_config": {"total_curriculum_step": 5, "difficulty_step": 1000}},
        "curriculum_learning.schedule_config.difficulty_step",
        "1000 is more than max_difficulty",
    ),
    (
        {
            "schedule_type": "fixed_discrete",
            "schedule_config": {"difficulty": [8, 16, 64], "max_step": [5, 5]},
        },
        "curriculum_learning.schedule_config.max_step",
        "expected ascending steps, got [5, 5]",
    ),
]


@pytest.mark.parametrize(("changes", "path", "message"), FAULTS)
def test_faults_are_reported_by_path(changes, path, message):
    with pytest.raises(ConfigError) as caught:
        load_config({"train_batch_size": 1, "curriculum_learning": {**SECTION, **changes}})
    assert {fault.path: fault.message for fault in caught.value.faults}[path].find(message) >= 0
