"""Dynamic batching in training: exact means, scaled rates, ranks, resuming, lengths and faults."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine.toys import engine_of
from ranks import RankPools
from torch import Tensor, nn
from torch.utils.data import Dataset

import hadal
from hadal import comm
from hadal.config import load_config
from hadal.data.reading import Sharding
from hadal.errors import ConfigError, UsageError
from hadal.plugins.data_efficiency.batching import PackedOrder
from hadal.plugins.data_efficiency.lengths import length_of, lengths_of, path_of

KEYS = "data_efficiency.data_sampling.dynamic_batching"
LENGTHS = [int(n) for n in np.random.default_rng(5).integers(1, 12, 60)]


class Sequences(Dataset[Tensor]):
    """Rows of numbers: sample i has LENGTHS[i] tokens, all i."""

    def __len__(self) -> int:
        return len(LENGTHS)

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((LENGTHS[index],), float(index))


class Given(Sequences):
    """The same, with lengths that it knows; no sample may be read for them."""

    lengths = LENGTHS

    def __getitem__(self, index: int) -> Tensor:
        raise AssertionError(index)


def joined(samples: list[Tensor]) -> Tensor:
    """Make a batch of one token per row."""
    return torch.cat(samples)[:, None]


def section_of(**changes: Any) -> dict[str, Any]:
    names = ("num_epochs", "num_workers", "pin_memory")
    outer = {key: changes.pop(key) for key in names if key in changes}
    batching = {"enabled": True, "max_tokens": 24, **changes}
    return {"seed": 3, "data_sampling": {**outer, "dynamic_batching": batching}}


def engine_with(accumulation: int = 2, **changes: Any) -> Any:
    rate = {"type": "SGD", "params": {"lr": 0.001}}
    wishes = {"training_data": changes.pop("data", Sequences()), "collate_fn": joined}
    wishes |= changes.pop("wishes", {})
    keys = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": accumulation}
    keys |= {name: changes.pop(name) for name in ("scheduler",) if name in changes}
    torch.manual_seed(0)
    section = section_of(**changes)
    model = nn.Linear(1, 1)
    return engine_of(0, model, wishes, **keys, optimizer=rate, data_efficiency=section)


def order_of(replicas: int = 1, replica: int = 0, **changes: Any) -> PackedOrder:
    section = load_config({"train_batch_size": 4, "data_efficiency": section_of(**changes)})
    sharding = Sharding(1, replicas, replica)
    return PackedOrder(section.data_efficiency, np.array(LENGTHS), sharding, 4 // replicas)


def batches_of(engine: Any) -> Any:
    """Return the engine's one iterator: a second one would begin the next epoch."""
    if "batches" not in vars(engine):
        vars(engine)["batches"] = hadal.RepeatingLoader(engine.training_dataloader)
    return engine.batches


def train(engine: Any, micro_steps: int) -> list[list[int]]:
    """Return the samples of each batch."""
    found = []
    for _ in range(micro_steps):
        batch = next(batches_of(engine))
        engine.backward(engine(batch / 60).square().mean())
        engine.step()
        found.append(batch.flatten().int().unique(sorted=False).tolist())
    return found


def weights_of(engine: Any) -> list[float]:
    return [round(float(value), 9) for value in engine.state_dict().values()]


@pytest.mark.claims(
    KEYS,
    f"{KEYS}.enabled",
    f"{KEYS}.max_tokens",
    f"{KEYS}.sequence_picking_order",
    f"{KEYS}.min_batch_size",
    f"{KEYS}.max_batch_size",
)
@pytest.mark.parametrize("picking", ["dataloader", "random", "seqlen"])
def test_an_epoch_has_each_sample_once_on_any_number_of_ranks(picking: str) -> None:
    whole = [picked.indices for picked in order_of(sequence_picking_order=picking).batches(1, 0)]
    assert sorted(one for samples in whole for one in samples) == list(range(60))
    assert len(whole) % 4 == 0
    assert all(sum(LENGTHS[one] for one in samples) <= 24 for samples in whole)
    for replicas in (2, 4):
        orders = [
            order_of(replicas, replica, sequence_picking_order=picking)
            for replica in range(replicas)
        ]
        turns = zip(*(order.batches(1, 4) for order in orders), strict=True)
        assert [picked.indices for turn in turns for picked in turn] == whole[4:]
    order = order_of(sequence_picking_order=picking, num_epochs=1)
    again = [picked.indices for picked in order_of(sequence_picking_order=picking).batches(0, 0)]
    assert again != whole
    assert list(order.batches(1, 0)) == []
    bounded = order_of(min_batch_size=2, max_batch_size=3).packs(0)
    assert {len(samples) for samples in bounded} == {2, 3}


@pytest.mark.parametrize("weighting", ["tokens", "samples", "none"])
def test_the_mean_gradient_is_that_of_the_whole_batch(weighting: str) -> None:
    engine = engine_with(4, loss_weighting=weighting, lr_scaling_method="none")
    before = {name: value.clone() for name, value in engine.module.named_parameters()}
    loader = iter(engine.training_dataloader)
    batches = [next(loader) / 60 for _ in range(4)]  # read ahead: the weights keep their order
    for batch in batches:
        engine.backward(engine(batch).square().mean())
        engine.step()
    counts = {
        "tokens": [len(batch) for batch in batches],
        "samples": [len(batch.unique()) for batch in batches],
        "none": [1] * 4,
    }[weighting]
    model = nn.Linear(1, 1)
    model.load_state_dict(before)
    losses = [model(batch).square().mean() * n for batch, n in zip(batches, counts, strict=True)]
    (torch.stack(losses).sum() / sum(counts)).backward()
    for name, parameter in model.named_parameters():
        step = before[name] - engine.module.get_parameter(name)
        torch.testing.assert_close(step, 0.001 * parameter.grad, rtol=1e-4, atol=1e-8)
    engine.destroy()


@pytest.mark.claims(f"{KEYS}.lr_scaling_method")
@pytest.mark.parametrize("method", ["linear", "sqrt", "none"])
def test_the_learning_rate_follows_the_batch(method: str) -> None:
    schedule = {"type": "WarmupLR", "params": {"warmup_num_steps": 3, "warmup_type": "linear"}}
    schedule["params"] |= {"warmup_min_lr": 0.0, "warmup_max_lr": 0.003}
    used: list[float] = []
    engine = engine_with(lr_scaling_method=method, base_batch_size=8, scheduler=schedule)

    class Watch(hadal.Listener):
        def before_update(self, gradients: Any) -> None:
            used.append(engine.get_lr()[0])

    engine.add_listener(Watch())
    found = train(engine, 10)
    sizes = [len(a) + len(b) for a, b in zip(found[::2], found[1::2], strict=True)]
    assert len(set(sizes)) > 2
    factor = {"linear": lambda n: n / 8, "sqrt": lambda n: (n / 8) ** 0.5, "none": lambda n: 1}
    plain = [0.0, 0.0, 0.001, 0.002, 0.003]
    expected = [rate * factor[method](n) for rate, n in zip(plain, sizes, strict=True)]
    assert used == pytest.approx(expected, rel=1e-12)
    assert engine.dynamic_batching.samples == sum(sizes)
    assert engine.dynamic_batching.tokens == sum(LENGTHS[one] for row in found for one in row)
    engine.destroy()


def test_the_mean_rate_is_the_configured_one() -> None:
    engine = engine_with()
    updates = len(engine.training_dataloader) // 2
    rates: list[float] = []
    for _ in range(updates):
        train(engine, 2)
        rates.append(engine.dynamic_batching.factor)
    assert sum(rates) / updates == pytest.approx(1.0)
    engine.destroy()


@pytest.mark.parametrize("workers", [0, 2])
def test_training_resumes_exactly(tmp_path: Path, workers: int) -> None:
    keys = {"sequence_picking_order": "random", "num_workers": workers}
    schedule = {"type": "WarmupLR", "params": {"warmup_num_steps": 9, "warmup_max_lr": 0.01}}
    engine = engine_with(**keys, scheduler=schedule)
    epoch = len(engine.training_dataloader)
    train(engine, epoch - 4)
    engine.save_checkpoint(tmp_path)
    expected = train(engine, 8), weights_of(engine), engine.get_lr()
    engine.destroy()
    engine = engine_with(**keys, scheduler=schedule)
    engine.load_checkpoint(tmp_path)
    assert (train(engine, 8), weights_of(engine), engine.get_lr()) == expected
    engine.destroy()


def test_two_ranks_train_as_one_and_resume_as_one(ranks: RankPools, tmp_path: Path) -> None:
    mine, theirs = ranks(2).run(train_and_save, tmp_path)
    engine = engine_with()
    found = train(engine, 8)
    assert [row for pair in zip(mine[0], theirs[0], strict=True) for row in pair] == found
    assert mine[1] == pytest.approx(weights_of(engine), abs=1e-6)
    expected = train(engine, 6)
    engine.destroy()
    engine = engine_with()
    engine.load_checkpoint(tmp_path)
    assert train(engine, 6) == expected
    engine.destroy()


def train_and_save(folder: Path) -> tuple[list[list[int]], list[float]]:
    engine = engine_with(2 // comm.get_world_size())
    found = train(engine, 4)
    engine.save_checkpoint(folder)
    made = found, weights_of(engine)
    engine.destroy()
    return made


@pytest.mark.claims(f"{KEYS}.verbose")
def test_updates_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    engine = engine_with(verbose=True)
    with caplog.at_level(logging.INFO, "hadal.plugins.data_efficiency.batching"):
        train(engine, 2)
    assert "update 1: " in caplog.text
    assert "learning rate x" in caplog.text
    engine.destroy()


def test_omitted_samples_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    too_long = sum(n > 7 for n in LENGTHS)
    with caplog.at_level(logging.WARNING, "hadal.plugins.data_efficiency.batching"):
        order_of(max_tokens=7, max_batch_size=1)
    assert f"{too_long} of 60 samples are longer than max_tokens (7)" in caplog.text
    left = (60 - too_long) % 4
    assert left
    assert too_long
    assert f"{left} of 60 samples are left out of the first epoch" in caplog.text


# ---- lengths -------------------------------------------------------------------------------------


def test_lengths_of_samples() -> None:
    ids = torch.arange(5)
    assert length_of(ids) == 5
    assert length_of([1, 2]) == 2
    assert length_of((torch.zeros(()), ids, ids[:2])) == 5
    assert length_of({"label": 1, "text": [1, 2, 3]}) == 3
    assert length_of({"text": [1, 2, 3], "input_ids": ids}) == 5
    with pytest.raises(UsageError, match=r"of a sample, which is int; give .* `lengths`"):
        length_of(7)


@pytest.mark.claims(f"{KEYS}.metrics_path")
def test_lengths_are_measured_once(tmp_path: Path) -> None:
    folder = str(tmp_path / "metrics")
    assert lengths_of(Given(), None, writes=True).tolist() == LENGTHS
    engine_with(metrics_path=folder).destroy()
    assert path_of(folder).with_suffix(".idx").exists()

    class Unread(Sequences):
        def __getitem__(self, index: int) -> Tensor:
            raise AssertionError(index)

    assert lengths_of(Unread(), folder, writes=False).tolist() == LENGTHS

    class Short(Unread):
        def __len__(self) -> int:
            return 9

    with pytest.raises(UsageError, match=r"metrics_path: .* has 60 lengths, .* 9 samples"):
        lengths_of(Short(), folder, writes=False)


# ---- faults --------------------------------------------------------------------------------------


def test_faults_are_reported(tmp_path: Path) -> None:
    for keys, path in (
        ({"max_tokens": None}, f"{KEYS}.max_tokens"),
        ({"min_batch_size": 3, "max_batch_size": 2}, f"{KEYS}.max_batch_size"),
    ):
        with pytest.raises(ConfigError) as caught:
            order_of(**keys)
        assert path in {fault.path for fault in caught.value.faults}
    section = section_of()
    section["data_sampling"]["curriculum_learning"] = {"enabled": True, "curriculum_metrics": {}}
    with pytest.raises(ConfigError, match="chooses the samples of each batch, too; switch one"):
        load_config({"train_batch_size": 4, "data_efficiency": section})
    none = r"60 samples make no update of train_batch_size 4 packs; "
    with pytest.raises(UsageError, match=none + r".*max_tokens \(1000\).*min_batch_size \(20\)"):
        order_of(max_tokens=1000, min_batch_size=20)
    section = load_config({"train_batch_size": 4, "data_efficiency": section_of()})
    longer = r"all 3 samples are longer than max_tokens \(24\), the shortest has 30; raise"
    with pytest.raises(UsageError, match=longer):
        PackedOrder(section.data_efficiency, np.array([40, 30, 50]), Sharding(1), 4)


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([3] * 59, r"of Texts has 59 lengths, but the data set 60 samples"),
        ([-3] * 60, r"of Texts has -3 for sample 0; expected integers, 0 or more"),
        ([3.0] * 59 + [2.5], r"of Texts has 2\.5 for sample 59; expected integers"),
        (["a"] * 60, r"of Texts has 'a' for sample 0; expected integers"),
    ],
)
def test_invalid_lengths_are_refused(lengths: list[Any], message: str) -> None:
    class Texts(list[Any]):
        pass

    data = Texts([None] * 60)
    data.lengths = lengths  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match=rf"^{KEYS}: the attribute lengths {message}"):
        lengths_of(data, None, writes=False)


def test_a_directory_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    folder = str(tmp_path / "file")
    with pytest.raises(
        UsageError, match=rf"^{KEYS}\.metrics_path: {folder}/seqlen cannot be created"
    ):
        lengths_of([[1, 2]] * 3, folder, writes=True)


@pytest.mark.fast_cells("0")
@pytest.mark.parametrize("workers", [0, 1])
def test_packs_that_cannot_be_stacked_are_reported(workers: int) -> None:
    engine = engine_with(wishes={"collate_fn": None}, num_workers=workers)
    with pytest.raises(UsageError, match=rf"{KEYS}: .* stacked \(.*; pass initialize a collate_fn"):
        list(engine.training_dataloader)
    engine.destroy()


def test_packs_do_not_count_as_a_wrong_batch_size(caplog: pytest.LogCaptureFixture) -> None:
    engine = engine_with()
    train(engine, 1)
    engine.destroy()
    assert "train_micro_batch_size_per_gpu is" not in caplog.text


def test_mistakes_in_training_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plateau = {"lr_scheduler": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o)}
    with pytest.raises(UsageError, match="cannot scale the rates of ReduceLROnPlateau"):
        engine_with(wishes=plateau)
    engine = engine_with()
    loader = iter(engine.training_dataloader)
    with pytest.raises(UsageError, match="leaves out the weight of this micro-batch; call"):
        engine(next(loader) / 60).square().mean().backward()
    engine.zero_grad()
    with pytest.raises(UsageError, match="dynamic_batching makes packs for the train_batch_size"):
        engine.set_train_batch_size(4)
    for _ in range(8):
        next(loader)
    assert "batches were read that had no backward" in caplog.text
    train(engine, 2)
    engine.save_checkpoint(tmp_path)
    engine.destroy()
    engine = engine_with(max_tokens=12)
    engine.load_checkpoint(tmp_path)
    with pytest.raises(UsageError, match=r"began with .* resume with the max_tokens"):
        next(iter(engine.training_dataloader))
    engine.destroy()
    with pytest.raises(
        UsageError, match=r"saved in the middle of an update, after 1 packs, .* 2 ranks"
    ):
        next(order_of(2).batches(0, 1))
