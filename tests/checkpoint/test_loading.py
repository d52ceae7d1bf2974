"""Saving and loading: training resumes bit for bit, and other models are refused."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import every
from engine.logs import logged
from engine.toys import (
    alone,
    assert_close,
    assert_equal,
    backward,
    engine_of,
    model_of,
    tiny_at,
    train,
)
from ranks import RankPools, on_ranks
from torch import nn

from checkpoint.listing import home_of
from hadal import comm
from hadal.checkpoint import loading
from hadal.checkpoint.stored import StoredSource
from hadal.engine import state_offload
from hadal.errors import CheckpointError, MismatchError
from hadal.offload import direct

SETTINGS: dict[str, dict[str, Any]] = {
    "fp32": {"gradient_accumulation_steps": 2},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {
        "fp16": {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 2},
        "gradient_clipping": 0.5,
    },
    "schedule": {
        "scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 1e-3, "cycle_max_lr": 1e-2}}
    },
    "momentum": {"optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}},
    "whole": {"optimizer": {"type": "Adafactor", "params": {"lr": 0.1}}},
    "torch schedule": {
        "scheduler": {"type": "CosineAnnealingLR", "params": {"T_max": 20}},
    },
}
FIRST, SECOND = range(4), range(4, 8)


class WithBuffers(nn.Module):
    """A model with running statistics and a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = model_of()
        self.layers[3].bias.requires_grad_(False)
        self.norm = nn.BatchNorm1d(6)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layers(self.norm(inputs))


def fresh(stage: int, name: str, seed: int = 3, **more: Any) -> Any:
    torch.manual_seed(seed)
    model = WithBuffers()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(seed - 3)
    return engine_of(stage, model, **SETTINGS[name], **more)


def summary(engine: Any) -> dict[str, Any]:
    return {
        "counters": (
            engine.micro_steps,
            engine.global_steps,
            engine.global_samples,
            engine.skipped_steps,
        ),
        "scale": engine.loss_scale,
        "rates": engine.get_lr(),
        "batch": engine.train_batch_size(),
    }


@pytest.mark.fast_cells("schedule-3")
@every(name=list(SETTINGS), stage=[0, 1, 2, 3])
@on_ranks(2)
def test_training_goes_on_bit_for_bit(stage: int, name: str, tmp_path: Path) -> None:
    through = fresh(stage, name)
    losses = train(through, FIRST)
    saved = through.state_dict()
    assert through.save_checkpoint(tmp_path, client_state={"epoch": 3, "names": ["a", None]})
    losses = train(through, SECOND)
    expected, told = through.state_dict(), summary(through)
    through.destroy()

    again = fresh(stage, name, seed=5)  # its own start must not matter
    path, client_state = again.load_checkpoint(tmp_path)
    assert Path(path).parent == tmp_path
    assert client_state == {"epoch": 3, "names": ["a", None]}
    assert_equal(again.state_dict(), saved)
    assert torch.equal(torch.stack(train(again, SECOND)), torch.stack(losses))
    assert_equal(again.state_dict(), expected)
    assert summary(again) == told
    # An engine that has trained elsewhere goes back as well.
    again.load_checkpoint(tmp_path)
    assert_equal(again.state_dict(), saved)
    assert torch.equal(torch.stack(train(again, SECOND)), torch.stack(losses))
    again.destroy()


@pytest.mark.claims("zero_optimization.pipeline_loading_checkpoint")
@pytest.mark.fast_cells("momentum-3")
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("name", ["bf16", "momentum"])
@on_ranks(2)
def test_moments_keep_the_memory_they_were_read_into(stage: int, name: str, tmp_path: Path) -> None:
    """Uncached files are read once; moments keep the memory they were read into."""
    through = fresh(stage, name)
    train(through, FIRST)
    through.save_checkpoint(tmp_path)
    losses, whole = train(through, SECOND), through.state_dict()
    through.destroy()
    given: list[torch.Tensor] = []
    real = StoredSource.take_slice

    def take_slice(*arguments: Any) -> torch.Tensor | None:
        found = real(*arguments)
        given.extend([] if found is None else [found])
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(os, "RWF_NOWAIT", raising=False)
        patch.setattr(direct, "_DIRECT_NBYTES", 0)
        patch.setattr(direct, "BLOCK_NBYTES", 8192)
        patch.setattr(direct, "_TRIED_BLOCKS", sys.maxsize)
        patch.setattr(direct, "_free", [])
        patch.setattr(StoredSource, "take_slice", take_slice)
        section = {"stage": stage, **tiny_at(stage), "pipeline_loading_checkpoint": True}
        again = fresh(stage, name, seed=5, zero_optimization=section)
        again.load_checkpoint(tmp_path)
        again.load_checkpoint(tmp_path)
    held = {t.data_ptr() for state in again.optimizer.state.values() for t in tensors_in(state)}
    assert held, "the optimizer remembers something"
    assert held <= {tensor.data_ptr() for tensor in given}
    plain, state_offload.is_host_memory = state_offload.is_host_memory, lambda device: False
    try:
        again.offload_states()
        again.reload_states()
    finally:
        state_offload.is_host_memory = plain
    assert torch.equal(torch.stack(train(again, SECOND)), torch.stack(losses))
    assert_equal(again.state_dict(), whole)
    again.destroy()


def tensors_in(state: dict[str, Any]) -> list[torch.Tensor]:
    return [one for one in state.values() if isinstance(one, torch.Tensor) and one.dim()]


class WithMore(WithBuffers):
    """A model with parameters that the other model's checkpoints lack."""

    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Linear(6, 5)


@pytest.mark.fast_cells("True-0", "True-2", "False-3")
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("is_alike", [True, False])
@on_ranks(2)
def test_moments_are_read_into_any_memory(stage: int, is_alike: bool, tmp_path: Path) -> None:
    """Padding and new values start at zero, whatever the memory held before."""
    saved = fresh(stage, "bf16")
    train(saved, FIRST)
    saved.save_checkpoint(tmp_path)
    real = torch.empty

    def used(*shape: Any, **options: Any) -> torch.Tensor:
        return real(*shape, **options).fill_(7)

    settings = SETTINGS["bf16"] | {"checkpoint": {"verify_checksums": False}}
    if is_alike:
        again = engine_of(stage, WithBuffers(), **settings)
    else:  # all in one bucket
        again = engine_of(stage, WithMore(), zero_optimization={"stage": stage}, **settings)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", used)
        again.load_checkpoint(tmp_path, load_module_strict=False)
    found = torch.cat(remembered(again))
    assert found.any()
    assert not (found == 7).any()
    again.destroy()
    saved.destroy()


def remembered(engine: Any) -> list[torch.Tensor]:
    """Return the moments, in the order of the optimizer's parameters."""
    state = engine.optimizer.state
    order = [values for group in engine.optimizer.param_groups for values in group["params"]]
    return [moment.view(-1) for values in order for moment in tensors_in(state[values])]


def load_unmapped(stage: int, name: str, folder: str) -> None:
    """A page of a mapped file would make the system read megabytes ahead."""
    saved = fresh(stage, name)
    train(saved, FIRST)
    saved.save_checkpoint(folder, client_state={"epoch": 3})
    again = fresh(stage, name, seed=5)

    closed = StoredSource.close

    def close(source: StoredSource) -> None:
        assert folder not in Path("/proc/self/maps").read_text()
        closed(source)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StoredSource, "close", close)
        again.load_checkpoint(folder)
    assert_equal(again.state_dict(), saved.state_dict())
    again.destroy()
    saved.destroy()


@pytest.mark.fast_cells("3")
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux")
@pytest.mark.parametrize("stage", [0, 3])
def test_files_are_not_mapped(stage: int, ranks: RankPools, tmp_path: Path) -> None:
    ranks(2).run(load_unmapped, stage, "bf16", str(tmp_path))


@on_ranks(2)
def test_an_interrupted_accumulation_starts_over(tmp_path: Path) -> None:
    """Gradients are not saved: a load starts a new update, whatever was accumulated before."""
    first = engine_of(2, gradient_accumulation_steps=2)
    with logged() as silence:
        train(first, range(6))
        first.save_checkpoint(tmp_path, tag="whole")
    assert not silence
    backward(first, 6)
    with logged() as told:
        first.save_checkpoint(tmp_path, tag="before the step")
    first.step()
    with logged() as told_again:
        first.save_checkpoint(tmp_path, tag="middle")
    count = 1 if comm.get_rank() == 0 else 0
    assert len(told) == len(told_again) == count
    assert all("in the middle of an update" in message for message in (*told, *told_again))
    first.destroy()

    half, all_of_it = [range(2), range(2, 4), range(4, 6)], range(6, 10)
    for tag in ("whole", "before the step", "middle"):
        for accumulation in (2, 4):
            again = engine_of(2, model_of(9), gradient_accumulation_steps=accumulation)
            again.load_checkpoint(tmp_path, tag)
            train(again, all_of_it)
            rest = [all_of_it] if accumulation == 4 else [range(6, 8), range(8, 10)]
            assert again.global_steps == 3 + len(rest)
            assert_close(again.state_dict(), alone(model_of(), [*half, *rest]))
            again.destroy()


def save_on_one_rank(stage: int, folder: str) -> None:
    engine = engine_of(stage)
    train(engine, range(1))
    with pytest.raises(MismatchError, match=r"rank 0: engine.save_checkpoint or load_checkpoint"):
        if comm.get_rank() == 0:
            engine.save_checkpoint(folder)
        else:
            train(engine, range(1, 2))
    engine.destroy()


@pytest.mark.parametrize("stage", [1, 3])
def test_a_rank_that_saves_alone_raises(stage: int, ranks: RankPools, tmp_path: Path) -> None:
    ranks(2).run(save_on_one_rank, stage, str(tmp_path))
    assert not list(tmp_path.iterdir())


class Counting(torch.optim.Optimizer):
    """An optimizer that steps whole parameters and keeps plain numbers for each."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["steps"] = state.get("steps", 0) + 1
                state["shape"] = tuple(parameter.shape)
                parameter.sub_(parameter.grad, alpha=group["lr"] / state["steps"])


@pytest.mark.slow_cells("1")
@pytest.mark.parametrize("stage", [0, 1, 3])
@on_ranks(2)
def test_plain_state_is_of_the_parameters_that_a_rank_steps(stage: int, tmp_path: Path) -> None:
    """Ranks step different parameters, and different numbers of them."""

    def engine_with_counts() -> Any:
        model = nn.Sequential(nn.Linear(6, 9), nn.Linear(9, 4, bias=False))
        model.load_state_dict(start)
        wishes = {"optimizer": Counting(model.parameters())}
        return engine_of(stage, model, wishes, optimizer=None)

    torch.manual_seed(1)
    start = nn.Sequential(nn.Linear(6, 9), nn.Linear(9, 4, bias=False)).state_dict()
    through = engine_with_counts()
    train(through, FIRST)
    through.save_checkpoint(tmp_path)
    train(through, SECOND)
    again = engine_with_counts()
    again.load_checkpoint(tmp_path)
    for parameter in again.optimizer.param_groups[0]["params"]:
        state = again.optimizer.state[parameter]
        assert state == {"steps": len(FIRST), "shape": tuple(parameter.shape)}
    train(again, SECOND)
    assert_equal(again.state_dict(), through.state_dict())
    again.destroy()
    through.destroy()


@on_ranks(2)
def test_a_late_optimizer_resumes_too(tmp_path: Path) -> None:
    engine = engine_of(2, optimizer=None)
    train(engine, FIRST)
    engine.save_checkpoint(tmp_path)
    train(engine, SECOND)
    again = engine_of(2, model_of(9), optimizer=None)
    again.load_checkpoint(tmp_path)
    train(again, SECOND)
    assert_equal(again.state_dict(), engine.state_dict())


@on_ranks(2)
def test_tags(tmp_path: Path) -> None:
    engine = engine_of(3)
    with logged() as told:
        assert engine.load_checkpoint(tmp_path) == (None, None)
        assert engine.load_checkpoint(f"{tmp_path}/chekpoints") == (None, None)
    if comm.get_rank() == 0:
        empty, missing = told
        assert all("nothing is loaded, so training starts from scratch: " in one for one in told)
        assert empty.endswith(f"{tmp_path} has no file 'latest'; it has no complete checkpoint")
        assert missing.endswith(f"no directory {tmp_path}/chekpoints")
    with pytest.raises(CheckpointError, match=r"no complete .* 'a' .*; there is no such directory"):
        engine.load_checkpoint(f"{tmp_path}/chekpoints", "a")
    train(engine, range(1))
    engine.save_checkpoint(tmp_path)
    one = engine.state_dict()
    train(engine, range(1, 2))
    engine.save_checkpoint(tmp_path, tag="best", save_latest=False)
    best = engine.state_dict()
    assert Path(tmp_path, "latest").read_text() == "global_step1"
    for tag, expected in ((None, one), ("best", best), ("global_step1", one)):
        other = engine_of(3, model_of(9))
        path, client_state = other.load_checkpoint(tmp_path, tag)
        assert path == str(Path(tmp_path, tag or "global_step1"))
        assert client_state == {}
        assert_equal(other.state_dict(), expected)
        other.destroy()
    with pytest.raises(CheckpointError, match=r"complete checkpoints there: best, global_step1"):
        engine.load_checkpoint(tmp_path, "missing")
    with logged() as told:
        assert engine.load_checkpoint(Path(tmp_path, "best")) == (None, None)
    if comm.get_rank() == 0:
        (line,) = told
        assert line.endswith(
            "best is itself a checkpoint; to load it, call"
            f" load_checkpoint({str(tmp_path)!r}, 'best')"
        )
    comm.barrier()
    if comm.get_rank() == 0:
        Path(tmp_path, "latest").unlink()
    comm.barrier()
    with logged() as told:
        assert engine.load_checkpoint(tmp_path) == (None, None)
    if comm.get_rank() == 0:
        (line,) = told
        assert line.endswith("'latest'; complete checkpoints there: best, global_step1")
    for tag in ("missing", "../best"):
        with pytest.raises(CheckpointError, match=r"no complete checkpoint"):
            engine.load_checkpoint(tmp_path, tag)
    with pytest.raises(CheckpointError, match="cannot be written: File name too long") as caught:
        engine.save_checkpoint(Path(tmp_path, 300 * "a"))
    assert "OSError" not in str(caught.value)
    with pytest.raises(CheckpointError, match="plain folder name"):
        engine.save_checkpoint(tmp_path, tag="a/b")
    engine.destroy()


def save(stage: int, folder: str, width: int = 9) -> None:
    engine = engine_of(stage, widened(width))
    train(engine, range(1))
    engine.save_checkpoint(folder)
    engine.destroy()


def widened(width: int) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 4))


def load(stage: int, folder: str, width: int = 9) -> None:
    """A refused load leaves the engine as it was."""
    engine = engine_of(stage, widened(width))
    before = engine.state_dict()
    try:
        engine.load_checkpoint(folder)
    finally:
        assert_equal(engine.state_dict(), before)
        train(engine, range(1))
        engine.destroy()


@pytest.mark.parametrize(
    ("world", "stage", "width", "told"),
    [
        (1, 1, 8, ":\n  0.weight is (8, 6), but (9, 6) in the checkpoint\n  0.bias is"),
        (2, 2, 8, "shapes differ"),
    ],
    ids=["one", "two"],
)
def test_another_model_is_refused(world, stage, width, told, ranks: RankPools, tmp_path):
    ranks(2).run(save, 1, str(tmp_path))
    ranks(2).run(load_fitting, 1, str(tmp_path))
    for error in ranks(world).raises(load, stage, str(tmp_path), width):
        assert isinstance(error, CheckpointError), repr(error)
        assert told in str(error)


def load_fitting(stage: int, folder: str) -> None:
    engine = engine_of(stage, widened(9))
    engine.load_checkpoint(folder)
    engine.destroy()


def cut_short(folder: Path) -> None:
    shard = home_of(folder) / "rank_00001.safetensors"
    shard.write_bytes(shard.read_bytes()[:-9])


def remove_a_shard(folder: Path) -> None:
    os.remove(home_of(folder) / "rank_00000.safetensors")


def scribble(folder: Path) -> None:
    (folder / "index.json").write_text("{", encoding="utf-8")


def empty_the_index(folder: Path) -> None:
    (folder / "index.json").write_text("{}", encoding="utf-8")


def lose_a_group(folder: Path) -> None:
    index = json.loads((folder / "index.json").read_text())
    index["param_groups"] = []
    (folder / "index.json").write_text(json.dumps(index))


def list_as_index(folder: Path) -> None:
    (folder / "index.json").write_text("[]", encoding="utf-8")


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize(
    "damage", [cut_short, remove_a_shard, scribble, empty_the_index, lose_a_group, list_as_index]
)
def test_damage_raises_on_all_ranks_without_a_hang(
    damage: Callable[[Path], None], stage: int, ranks: RankPools, tmp_path: Path
) -> None:
    ranks(2).run(save, stage, str(tmp_path))
    damage(tmp_path / "global_step1")
    errors = ranks(2).raises(load_only, stage, str(tmp_path))
    for error in errors:
        assert isinstance(error, CheckpointError), repr(errors)


def load_only(stage: int, folder: str) -> None:
    engine_of(stage, widened(9)).load_checkpoint(folder)


def lose_a_file_while_loading(stage: int, folder: str) -> str:
    """Rank 1's file is removed after it was verified; another checkpoint still loads."""
    engine = engine_of(stage)
    backward(engine, 0)
    engine.step()
    for tag in ("goes", "stays"):
        engine.save_checkpoint(folder, tag)
    read, saved, again = loading._read, engine.state_dict(), engine_of(stage)

    def removed(*args: Any) -> None:
        if comm.get_rank() == 1:
            os.remove(home_of(Path(folder, "goes")) / "rank_00001.safetensors")
            read(*args)

    loading._read = removed
    try:
        again.load_checkpoint(folder, "goes")
    except CheckpointError as error:
        told = str(error)
    finally:
        loading._read = read
    again.load_checkpoint(folder, "stays")
    assert_equal(again.state_dict(), saved)
    return told


@pytest.mark.parametrize("stage", [0, 2])
def test_a_file_removed_during_a_load_raises_on_every_rank(
    stage: int, ranks: RankPools, tmp_path: Path
) -> None:
    for told in ranks(2).run(lose_a_file_while_loading, stage, str(tmp_path)):
        assert "only partly loaded" in told
        assert "rank 1" in told
        assert "rank_00001.safetensors" in told


def save_what_json_cannot_hold(folder: str) -> None:
    engine = engine_of(1)
    engine.save_checkpoint(folder, client_state={"model": object()})


def save_into_a_file(folder: str) -> None:
    Path(folder, "file").write_text("in the way")
    engine_of(1).save_checkpoint(str(Path(folder, "file")))


def save_below_a_file(folder: str) -> None:
    Path(folder, "file").write_text("in the way")
    engine_of(1, checkpoint={"async_save": True}).save_checkpoint(str(Path(folder, "file", "x")))


FILE = "save_dir must be a directory or not exist yet, but {}/file is a file"


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (save_what_json_cannot_hold, "every rank: "),
        (save_into_a_file, f"every rank: {FILE}; pass another path to save_checkpoint"),
        (save_below_a_file, f"every rank: {FILE}, so that {{}}/file/x cannot be created; pass "),
    ],
)
def test_unsavable_state_raises_on_every_rank(
    mistake: Callable[[str], None], message: str, ranks: RankPools, tmp_path: Path
) -> None:
    for error in ranks(2).raises(mistake, str(tmp_path)):
        assert isinstance(error, CheckpointError), repr(error)
        assert message.format(tmp_path, tmp_path) in str(error)
    assert not (tmp_path / "latest").exists()


@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(2)
def test_saving_does_not_affect_training(stage: int, tmp_path: Path) -> None:
    """Saving between two micro-steps has no effect on training."""
    states = []
    for saves in (True, False):
        engine = engine_of(stage, gradient_accumulation_steps=2)
        for step in range(4):
            backward(engine, step)
            engine.step()
            if saves and step == 2:
                engine.save_checkpoint(tmp_path)
        states.append(engine.state_dict())
        engine.destroy()
    assert_equal(*states)
