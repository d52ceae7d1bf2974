"""Checkpoints whose files or folders are symbolic links."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
from engine.toys import assert_equal, engine_of, train
from ranks import on_ranks

from checkpoint.listing import link_files, names_in
from hadal import comm
from hadal.checkpoint.export import export
from hadal.checkpoint.inspection import inspected
from hadal.checkpoint.opening import opened
from hadal.checkpoint.rules import NAME
from hadal.errors import CheckpointError


def move_folder(home: Path) -> None:
    """Leave a link in place of a checkpoint's folder, and of `latest`."""
    for name in ("one", "latest"):
        moved = home.parent / f"moved {name}"
        shutil.move(home / name, moved)
        (home / name).symlink_to(moved)


@pytest.mark.fast_cells("folder")
@pytest.mark.parametrize("way", ["files", "folder"])
@on_ranks(2)
def test_links_are_followed(tmp_path: Path, way: str) -> None:
    home = Path(tmp_path, "home")
    engine = engine_of(2)
    train(engine, range(1))
    engine.save_checkpoint(home, "one", client_state={"ema": torch.ones(2)})
    saved = engine.state_dict()
    if comm.get_rank() == 0:
        if way == "files":
            link_files(home, Path(tmp_path, "blobs"))
        else:
            move_folder(home)
    comm.barrier()
    other = engine_of(2)
    path, client_state = other.load_checkpoint(home)
    assert_equal(other.state_dict(), saved)
    assert path == str(home / "one")
    assert torch.equal(client_state["ema"], torch.ones(2))
    with pytest.raises(CheckpointError, match="complete checkpoints there: one"):
        other.load_checkpoint(home, "two")
    report = inspected(home)[0]
    assert report.faults == []
    assert report.is_latest
    if comm.get_rank() == 0:
        export(opened(home), Path(tmp_path, "out"), NAME, dtype=None, max_shard_nbytes=1 << 20)
    other.save_checkpoint(home, "two")  # `latest` becomes a file again
    assert not (home / "latest").is_symlink()
    assert engine.load_checkpoint(home)[0] == str(home / "two")


@on_ranks(2)
def test_saves_leave_links_alone(tmp_path: Path) -> None:
    """The target of a link is neither overwritten nor removed."""
    home = Path(tmp_path, "home")
    engine = engine_of(1, checkpoint={"keep_last": 1})
    engine.save_checkpoint(home, "one")
    if comm.get_rank() == 0:
        move_folder(home)
    comm.barrier()
    before = sorted(os.listdir(Path(tmp_path, "moved one")))
    with pytest.raises(CheckpointError, match="one cannot be written: it exists and is not a dir"):
        engine.save_checkpoint(home, "one")
    engine.save_checkpoint(home, "two")
    engine.save_checkpoint(home, "three")
    assert names_in(home) == ["latest", "one", "three"]
    assert sorted(os.listdir(Path(tmp_path, "moved one"))) == before
