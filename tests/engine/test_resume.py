"""A checkpoint in the middle of an epoch: the rest of the samples, and training bit for bit."""

from __future__ import annotations

import logging
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import RankPools, on_ranks
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

import hadal
from engine.logs import logged
from engine.toys import ROWS, engine_of, loss_of, model_of
from hadal import comm
from hadal.errors import CheckpointError, MismatchError, UsageError

SAMPLES = 20
ADAM = {"type": "AdamW", "params": {"lr": 0.02}}
CYCLE = {
    "type": "OneCycle",
    "params": {"cycle_min_lr": 1e-3, "cycle_max_lr": 2e-2, "cycle_first_step_size": 3},
}


class Noisy(Dataset):
    """Inputs with noise from the process's generator: an augmentation."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, Tensor, Tensor]:
        made = torch.Generator().manual_seed(index)
        inputs = torch.randn(6, generator=made) + 0.1 * torch.randn(6)
        return index, inputs, torch.randn(4, generator=made)


class Endless(IterableDataset):
    """Each rank's own samples, with a state."""

    def __init__(self) -> None:
        self.next = 1000 * comm.get_rank()

    def __iter__(self) -> Any:
        while True:
            self.next += 1
            yield Noisy()[self.next]

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


def made(stage: int, workers: int, data: Dataset[Any]) -> Any:
    wishes = {"training_data": data} if workers == 0 else {}
    engine = engine_of(
        stage, wishes=wishes, optimizer=ADAM, scheduler=CYCLE, dataloader_shard_iterable=False
    )
    if workers:
        loader = engine.deepspeed_io(data, num_local_io_workers=workers)
        assert engine.training_dataloader is loader
    return engine


def trained(
    engine: Any, micro_steps: int, save_after: int = -1, folder: str = ""
) -> list[tuple[list[int], float, float, tuple[float, ...]]]:
    """Train on batches of as many epochs as it takes: samples, loss, rate and betas of each."""
    seen, batches = [], hadal.RepeatingLoader(engine.training_dataloader)
    for number in range(micro_steps):
        indices, inputs, targets = next(batches)
        loss = loss_of(engine(inputs), targets)
        engine.backward(loss)
        engine.step()
        group = engine.optimizer.param_groups[0]
        seen.append((indices.tolist(), loss.item(), group["lr"], group["betas"]))
        if number == save_after:
            engine.save_checkpoint(folder)
    return seen


def unbroken(stage: int, workers: int, folder: str, save_after: int, steps: int) -> Any:
    engine = made(stage, workers, Noisy())
    seen = trained(engine, steps, save_after, folder)
    state = engine.state_dict()
    engine.destroy()
    return seen, state


def resumed(stage: int, workers: int, folder: str, done: int, steps: int) -> Any:
    torch.manual_seed(77)
    engine = made(stage, workers, Noisy())
    trained(engine, 1)  # its own beginning must not matter
    engine.load_checkpoint(folder)
    seen = trained(engine, steps - done)
    state = engine.state_dict()
    engine.destroy()
    return seen, state


@pytest.mark.fast_cells("1-0-0-3")
@pytest.mark.parametrize(
    ("world", "stage", "workers", "done"),
    [(1, 0, 0, 3), (1, 0, 2, 3), (2, 2, 0, 2), (2, 3, 2, 2), (2, 0, 0, 4), (2, 1, 2, 5)],
)
def test_training_resumes_in_the_middle_of_an_epoch(
    world: int, stage: int, workers: int, done: int, ranks: RankPools, tmp_path: Path
) -> None:
    steps = 2 * -(-SAMPLES // (ROWS * world))  # two epochs
    before = ranks(world).run(unbroken, stage, workers, str(tmp_path), done - 1, steps)
    after = ranks(world).run(resumed, stage, workers, str(tmp_path), done, steps)
    for (whole, state), (rest, again) in zip(before, after, strict=True):
        assert whole[done:] == rest
        assert all(torch.equal(again[name], state[name]) for name in state)
        assert whole[0][2:] != whole[1][2:]  # rate and betas do move


def test_training_resumes_in_a_new_process(ranks: RankPools, fresh_ranks: Any, tmp_path) -> None:
    before = ranks(2).run(unbroken, 2, 0, str(tmp_path), 1, 6)
    after = fresh_ranks(2).run(resumed, 2, 0, str(tmp_path), 2, 6)
    assert [seen[2:] for seen, _ in before] == [seen for seen, _ in after]


def resumed_by_itself(stage: int, folder: str) -> Any:
    """Train in three starts of one program, which saves after each update."""
    seen, told = [], []
    for _ in range(3):
        with logged() as messages:
            engine = engine_of(
                stage,
                wishes={"training_data": Noisy()},
                optimizer=ADAM,
                scheduler=CYCLE,
                checkpoint={"resume": folder},
            )
        told += messages
        began = engine.global_steps
        seen.append(trained(engine, 1))
        engine.save_checkpoint(folder, client_state={"began": began})
        told.append(engine.resumed)
        engine.destroy()
    return seen, told


@pytest.mark.parametrize("stage", [0, 3])
def test_a_restarted_program_resumes_by_itself(
    stage: int, ranks: RankPools, tmp_path: Path
) -> None:
    whole = ranks(2).run(unbroken, stage, 0, str(tmp_path / "whole"), 0, 3)
    parts = ranks(2).run(resumed_by_itself, stage, str(tmp_path / "parts"))
    for rank in range(2):
        assert list(chain(*parts[rank][0])) == whole[rank][0]
    folder = tmp_path / "parts"
    started, nothing, first, loaded, second, again = parts[0][1]
    assert "training starts from scratch" in started
    assert nothing == (None, None)
    assert first == f"resumed from {folder}/global_step1 at update 1 (checkpoint.resume)"
    assert loaded == (f"{folder}/global_step1", {"began": 0})
    assert second == f"resumed from {folder}/global_step2 at update 2 (checkpoint.resume)"
    assert again == (f"{folder}/global_step2", {"began": 1})


def streams(folder: str) -> tuple[Any, Any]:
    """Each rank's stream has a state of its own."""
    engine = made(1, 0, Endless())
    seen = trained(engine, 5, 1, folder)
    other = made(1, 0, Endless())
    other.load_checkpoint(folder)
    again = trained(other, 3)
    engine.destroy(), other.destroy()
    return seen[2:], again


def test_a_streams_state_is_each_ranks_own(ranks: RankPools, tmp_path: Path) -> None:
    found = ranks(2).run(streams, str(tmp_path))
    for seen, again in found:
        assert seen == again
    assert found[0][0][0][0] != found[1][0][0][0]


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def without_a_loader(folder: str) -> list[str]:
    """A checkpoint without a place in the data loads all the same, and says so; and the reverse."""
    heard = Lines()
    logging.getLogger("hadal.checkpoint").addHandler(heard)
    with_one, without = made(1, 0, Noisy()), engine_of(1, scheduler=CYCLE)
    trained(with_one, 2, 1, folder)
    without.load_checkpoint(folder)
    without.save_checkpoint(folder, tag="none")
    with_one.load_checkpoint(folder, tag="none")
    assert len(trained(with_one, 2)) == 2
    logging.getLogger("hadal.checkpoint").removeHandler(heard)
    return heard.lines


def test_a_checkpoint_without_a_loader_is_reported(ranks: RankPools, tmp_path: Path) -> None:
    (first, second), silent = ranks(2).run(without_a_loader, str(tmp_path))
    assert "the engine has none" in first
    assert "the checkpoint has none" in second
    assert silent == []


class Broken(Endless):
    def state_dict(self) -> dict[str, Any]:
        if comm.get_rank() == 1:
            raise KeyError("no such shard")
        return {"next": self.next}


class Unsavable(Endless):
    def state_dict(self) -> dict[str, Any]:
        return {"next": object()}


def save_broken(folder: str, kind: type[Endless]) -> None:
    made(1, 0, kind()).save_checkpoint(folder)


@pytest.mark.parametrize(
    ("kind", "told"),
    [(Broken, "rank 1.*no such shard"), (Unsavable, r"training loader\['stream'\].*type object")],
)
def test_a_position_that_cannot_be_saved_is_reported_on_all_ranks(
    kind, told, ranks, tmp_path
) -> None:
    for error in ranks(2).raises(save_broken, str(tmp_path), kind):
        assert isinstance(error, CheckpointError), repr(error)
        with pytest.raises(CheckpointError, match=told):
            raise error


def unlike_data() -> None:
    engine_of(1, wishes={"training_data": range(10 + comm.get_rank())})


def test_ranks_must_have_the_same_samples(ranks: RankPools) -> None:
    """Else one would have a batch more, and wait for the others."""
    for error in ranks(2).raises(unlike_data):
        assert isinstance(error, MismatchError), repr(error)
        assert "samples of training_data" in str(error)


# ---- engine.deepspeed_io ----------------------------------------------------------------------


def more_loaders() -> dict[str, Any]:
    engine = engine_of(1, dataloader_drop_last=True, wishes={"collate_fn": list})
    data = list(range(13))
    evaluated = engine.deepspeed_io(data, route="eval")
    assert engine.training_dataloader is None
    first = engine.deepspeed_io(data, batch_size=2)
    second = engine.deepspeed_io(data, collate_fn=sum)
    assert engine.training_dataloader is first
    assert (first.pin_memory, first.num_workers) == (torch.accelerator.is_available(), 0)
    mine = engine.deepspeed_io(data, data_sampler=[5, 6, 7, 8], batch_size=4)
    with pytest.raises(UsageError, match="route is 'test'"):
        engine.deepspeed_io(data, route="test")
    return {
        "eval": [list(evaluated), list(evaluated)],
        "train": list(first),
        "sum": list(second),
        "mine": list(mine),
    }


def test_an_engine_makes_more_loaders(ranks: RankPools) -> None:
    one, other = ranks(2).run(more_loaders)
    assert one["eval"] == [[[0, 2, 4], [6, 8, 10]]] * 2
    assert other["eval"] == [[[1, 3, 5], [7, 9, 11]]] * 2
    assert [len(batch) for batch in one["train"]] == [2, 2, 2]
    mine, theirs = ({n for batch in found["train"] for n in batch} for found in (one, other))
    assert not mine & theirs
    assert all(isinstance(batch, int) for batch in one["sum"])
    assert one["mine"] == other["mine"] == [[5, 6, 7, 8]]


@on_ranks(1)
def test_a_stream_without_a_length_trains_by_default() -> None:
    """The default optimizer's schedule asks how long the training is."""
    wishes = {"training_data": Endless()}
    engine = engine_of(0, model_of(), wishes, optimizer=None, dataloader_shard_iterable=False)
    trained_loss = loss_of(engine(torch.ones(3, 6)), torch.ones(3, 4))
    engine.backward(trained_loss)
    engine.step()
    assert engine.lr_scheduler is not None
