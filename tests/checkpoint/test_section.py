"""The `checkpoint` section: node-local folders, tags, and settings for writing files."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.logs import logged
from engine.toys import assert_equal, engine_of
from ranks import RankPools
from safetensors import safe_open
from safetensors.torch import load_file

from checkpoint.listing import home_of as home_of_tag, names_in
from checkpoint.test_reshard import Odd, trained
from hadal import comm
from hadal.checkpoint import shards
from hadal.checkpoint.files import Chunk, Seal, write_file
from hadal.checkpoint.rules import Writing
from hadal.checkpoint.shards import write_tensors
from hadal.config import load_config
from hadal.errors import CheckpointError, UnbuiltConfigError

LOCAL = {"checkpoint": {"use_node_local_storage": True}}
MINIMAL = {"train_micro_batch_size_per_gpu": 1}


def home_of(folder: str, nodes: tuple[int, ...]) -> Path:
    """Return this rank's node-local folder; `nodes` lists the node of each rank."""
    return Path(folder, f"node{nodes[comm.get_rank()]}")


def save_on_nodes(folder: str, nodes: tuple[int, ...], stage: int, also_async: bool) -> None:
    """Save twice: each node's folder has its own ranks' files, and none of the others."""
    section = {**LOCAL["checkpoint"], "async_save": also_async}
    engine = engine_of(stage, Odd(), checkpoint=section)
    home = home_of(folder, nodes)
    for tag in ("one", "two"):
        trained(engine, range(2))
        engine.save_checkpoint(home, tag, client_state={"x": torch.ones(2)})
    engine.wait_for_checkpoint()
    saved = engine.state_dict()
    mine = nodes[comm.get_rank()]
    here = {f"rank_{rank:05d}.safetensors" for rank, node in enumerate(nodes) if node == mine}
    assert {path.name for path in (home / "two").iterdir()} == {
        "index.json",
        home_of_tag(home / "two").name,
    }
    names = {path.name for path in home_of_tag(home / "two").iterdir()}
    assert names == {"client_state.safetensors", *here}
    assert set(names_in(home)) == {"one", "two", "latest"}
    trained(engine, range(3, 5))
    later = engine.state_dict()
    other = engine_of(stage, Odd(5), **LOCAL)
    path, client_state = other.load_checkpoint(home)
    assert path == str(home / "two")
    assert torch.equal(client_state["x"], torch.ones(2))
    assert_equal(other.state_dict(), saved)
    trained(other, range(3, 5))
    assert_equal(other.state_dict(), later)
    engine.destroy(), other.destroy()
    if comm.get_rank() == 0:
        torch.save(saved, Path(folder, "saved.pt"))


@pytest.mark.fast_cells("nodes3-0-True")
@pytest.mark.claims("checkpoint.use_node_local_storage")
@pytest.mark.parametrize(
    ("nodes", "stage", "also_async"),
    [((0, 1), 0, False), ((0, 1), 1, True), ((0, 1), 3, False), ((0, 0, 1), 0, True)],
)
def test_each_node_saves_into_a_folder_of_its_own(
    nodes: tuple[int, ...], stage: int, also_async: bool, ranks: RankPools, tmp_path: Path
) -> None:
    ranks(len(nodes)).run(save_on_nodes, str(tmp_path), nodes, stage, also_async)


def load_one_node(folder: str) -> None:
    engine_of(1, Odd(5), **LOCAL).load_checkpoint(Path(folder, "node0"))


def load_joined(folder: str) -> None:
    engine = engine_of(2, Odd(5))
    engine.load_checkpoint(Path(folder, "node0"))
    assert_equal(engine.state_dict(), torch.load(Path(folder, "saved.pt")))
    engine.destroy()


def test_other_ranks_need_the_folders_of_all_nodes(ranks: RankPools, tmp_path: Path) -> None:
    ranks(2).run(save_on_nodes, str(tmp_path), (0, 1), 3, False)
    for error in ranks(1).raises(load_one_node, str(tmp_path)):
        assert isinstance(error, CheckpointError), repr(error)
        assert "rank_00001.safetensors" in str(error)
        assert "copy all nodes' files into one folder" in str(error)
    shutil.copy(
        home_of_tag(tmp_path / "node1/two") / "rank_00001.safetensors",
        home_of_tag(tmp_path / "node0/two"),
    )
    ranks(3).run(load_joined, str(tmp_path))


def save_apart(folder: str) -> None:
    engine = engine_of(3, Odd(5), **LOCAL)
    trained(engine, range(2))
    engine.save_checkpoint(Path(folder, f"node{comm.get_rank()}"), "two")
    saved = engine.state_dict()
    if comm.get_rank() == 0:
        torch.save(saved, Path(folder, "saved.pt"))
    engine.destroy()


def test_files_of_separate_folders_can_be_merged(ranks: RankPools, tmp_path: Path) -> None:
    ranks(2).run(save_apart, str(tmp_path))
    assert not (home_of_tag(tmp_path / "node0/two") / "rank_00001.safetensors").exists()
    shutil.copytree(tmp_path / "node1", tmp_path / "node0", dirs_exist_ok=True)
    ranks(2).run(load_joined, str(tmp_path))
    ranks(3).run(load_joined, str(tmp_path))


def save_copies(folder: str, nodes: tuple[int, ...]) -> None:
    """Two copies of the model states, of two ranks each."""
    zero = {"stage": 3, "mics_shard_size": 2}
    engine = engine_of(3, Odd(), zero_optimization=zero, **LOCAL)
    trained(engine, range(2))
    engine.save_checkpoint(home_of(folder, nodes), "x")
    saved = engine.state_dict()
    other = engine_of(3, Odd(5), zero_optimization=zero, **LOCAL)
    other.load_checkpoint(home_of(folder, nodes))
    assert_equal(other.state_dict(), saved)
    engine.destroy(), other.destroy()


def test_a_nodes_folder_holds_a_whole_copy(ranks: RankPools, tmp_path: Path) -> None:
    ranks(4).run(save_copies, str(tmp_path / "blocks"), (0, 0, 1, 1))
    for error in ranks(4).raises(save_copies, str(tmp_path / "across"), (0, 1, 0, 1)):
        assert isinstance(error, CheckpointError), repr(error)
        assert "holds 1 of the 2 shards of a copy (zero_optimization.mics_shard_size)" in str(error)
        assert "remove checkpoint.use_node_local_storage" in str(error)
    assert not [name for node in (0, 1) for name in names_in(tmp_path / "across" / f"node{node}")]


# ---- folders and tags that differ between ranks --------------------------------------------------


def save_into_two_folders(folder: str, also_async: bool) -> list[str]:
    """Each rank has a folder name of its own, such as a time stamp, and uses it for everything."""
    gathers = {"stage3_gather_16bit_weights_on_model_save": True}
    checkpoint = {"async_save": also_async}
    engine = engine_of(3, Odd(), zero_optimization=gathers, checkpoint=checkpoint)
    trained(engine, range(2))
    home = Path(folder, f"run-{comm.get_rank()}")
    with logged() as told:
        assert engine.save_checkpoint(home, "one")
        engine.wait_for_checkpoint()
        assert engine.save_16bit_model(home / "model")
        other = engine_of(3, Odd(5), zero_optimization=gathers)
        assert other.load_checkpoint(home)[0] == str(Path(folder, "run-0/one"))
    assert_equal(other.state_dict(), engine.state_dict())
    engine.destroy(), other.destroy()
    return [line for line in told if "folder" in line]


@pytest.mark.parametrize("also_async", [False, True])
def test_ranks_with_folders_of_their_own_use_rank_0s(
    also_async: bool, ranks: RankPools, tmp_path: Path
) -> None:
    told, others = ranks(2).run(save_into_two_folders, str(tmp_path), also_async)
    assert len(told) == 3 and not others
    for line in told:
        assert f"rank 0 passed the folder {tmp_path}/run-0" in line
        assert f"and rank 1 {tmp_path}/run-1" in line
        assert "rank 0's is used" in line
    assert names_in(tmp_path) == ["run-0"]


def save_in_two_working_directories(folder: str) -> None:
    """A relative path that leads to another folder on each rank."""
    engine, before = engine_of(1, Odd()), Path.cwd()
    mine = Path(folder, str(comm.get_rank()))
    mine.mkdir()
    os.chdir(mine)
    try:
        engine.save_checkpoint("run", "one")
        assert engine.load_checkpoint("run")[0] == str(Path(folder, "0/run/one"))
    finally:
        os.chdir(before)
    engine.destroy()


def test_a_relative_folder_is_rank_0s(ranks: RankPools, tmp_path: Path) -> None:
    ranks(2).run(save_in_two_working_directories, str(tmp_path))
    assert not list((tmp_path / "1").iterdir())


def save_under_two_tags(folder: str, validation: str) -> list[str]:
    engine = engine_of(1, checkpoint={"tag_validation": validation})
    with logged() as told:
        engine.save_checkpoint(folder, f"tag{comm.get_rank()}")
    engine.load_checkpoint(folder)
    engine.destroy()
    return list(told)


@pytest.mark.claims("checkpoint", "checkpoint.tag_validation")
def test_tags_are_compared_between_ranks(ranks: RankPools, tmp_path: Path) -> None:
    for error in ranks(2).raises(save_under_two_tags, str(tmp_path), "Fail"):
        assert isinstance(error, CheckpointError), repr(error)
        assert "different tags: ['tag0', 'tag1']" in str(error)
    assert not list(tmp_path.iterdir())
    for validation, is_told in (("warn", True), ("IGNORE", False)):
        told, _ = ranks(2).run(save_under_two_tags, str(tmp_path), validation)
        assert any("different tags" in line for line in told) == is_told
        assert set(names_in(tmp_path)) == {"tag0", "latest"}


# ---- how files are written -----------------------------------------------------------------------


@pytest.mark.claims("checkpoint.writer.io_buffer_size", "checkpoint.writer.io_buffer_double")
@pytest.mark.parametrize("doubled", [False, True])
def test_a_buffer_is_written_at_a_time(
    doubled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    ways: list[bool] = []

    def watched(path: Path, chunks: Any, *, doubled: bool) -> Seal:
        def seen(chunk: Chunk) -> Chunk:
            sizes.append(len(chunk))
            return chunk

        ways.append(doubled)
        return write_file(path, map(seen, chunks), doubled=doubled)

    monkeypatch.setattr(shards, "write_file", watched)
    tensors = {
        "a": torch.arange(100.0).view(10, 10).t(),
        "b": torch.arange(7, dtype=torch.int8),
        "c": torch.tensor(2.5),
        "d": torch.zeros(0, 3),
    }
    write_tensors(tmp_path / "x", tensors, {"text": "t"}, Writing(64, doubled))
    assert sizes[1:] == [64] * 6 + [16, 4, 7]
    assert ways == [doubled]
    assert_equal(dict(sorted(load_file(tmp_path / "x").items())), tensors)
    with safe_open(tmp_path / "x", "pt") as file:
        assert file.metadata() == {"text": "t"}


def write_as_asked(folder: str) -> list[str]:
    section = {"io_buffer_size": 512, "io_buffer_double": False, "show_statistics": True}
    engine = engine_of(2, Odd(), checkpoint={"writer": section}, log_level="info")
    assert engine._parts.saving.writing == Writing(512, False, True)
    with logged(logging.INFO) as told:
        engine.save_checkpoint(folder)
    saved = engine.state_dict()
    other = engine_of(2, Odd(5))
    other.load_checkpoint(folder)
    assert_equal(other.state_dict(), saved)
    engine.destroy(), other.destroy()
    return [line for line in told if "GB/s" in line]


@pytest.mark.claims("checkpoint.writer", "checkpoint.writer.show_statistics")
def test_write_speeds_are_logged(ranks: RankPools, tmp_path: Path) -> None:
    lines = ranks(2).run(write_as_asked, str(tmp_path))
    assert "global_step0: 2 ranks wrote 0.00" in lines[0][0]
    assert not lines[1]


@pytest.mark.claims("checkpoint.writer.type")
def test_a_writer_that_writes_nothing_is_refused() -> None:
    for kind in ("fast", "PYTHON"):
        load_config({**MINIMAL, "checkpoint": {"writer": {"type": kind}}}, world_size=1)
    with pytest.raises(UnbuiltConfigError, match=r"checkpoint\.writer\.type .*mock"):
        load_config({**MINIMAL, "checkpoint": {"writer": {"type": "mock"}}}, world_size=1)


@pytest.mark.claims(
    "checkpoint.checkpoint_serialization",
    "checkpoint.writer.data_parallel",
    "checkpoint.writer.io_multiplier",
    "datastates_ckpt.host_cache_size",
)
@pytest.mark.parametrize(
    ("source", "note"),
    [
        (
            {"checkpoint": {"checkpoint_serialization": False}},
            "checkpoint.checkpoint_serialization: false",
        ),
        (
            {"checkpoint": {"writer": {"data_parallel": "replica"}}},
            'checkpoint.writer.data_parallel: "replica"',
        ),
        ({"checkpoint": {"writer": {"io_multiplier": 2}}}, "checkpoint.writer.io_multiplier: 2"),
        ({"datastates_ckpt": {"host_cache_size": 8}}, "datastates_ckpt.host_cache_size: 8"),
    ],
)
def test_keys_without_effect_are_reported(source: dict[str, Any], note: str) -> None:
    notes = load_config({**MINIMAL, **source}, world_size=1).notes
    assert f"{note} has no effect" in notes


def sizes_of_files(folder: str, stage: int, keys: dict[str, Any]) -> None:
    engine = engine_of(stage, torch.nn.Linear(64, 64), checkpoint=keys)
    trained_linear(engine)
    engine.save_checkpoint(folder)
    # What each rank has for itself, its random generators, is of other dtypes.
    nbytes = [
        sum(t.nbytes for t in load_file(path).values() if t.dtype == torch.float32)
        for path in Path(folder, "global_step1").glob("*/rank*.safetensors")
    ]
    values = 3 * 4 * 65 * 64  # weights and two moments
    assert sum(nbytes) == values
    assert max(nbytes) < 0.51 * values
    engine.destroy()


def trained_linear(engine: Any) -> None:
    engine.backward(engine(torch.ones(2, 64)).square().mean())
    engine.step()


@pytest.mark.fast_cells("keys0")
@pytest.mark.claims("checkpoint.parallel_write", "checkpoint.parallel_write.pipeline_stage")
@pytest.mark.parametrize("keys", [{}, {"parallel_write": {"pipeline_stage": True}}])
def test_replicated_values_are_written_once(
    keys: dict[str, Any], ranks: RankPools, tmp_path: Path
) -> None:
    for stage in (0, 1, 2, 3):
        ranks(2).run(sizes_of_files, str(tmp_path / str(stage)), stage, keys)
