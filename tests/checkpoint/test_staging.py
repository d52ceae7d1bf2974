"""`checkpoint.staging`: where an asynchronous save keeps the state until it is uploaded."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import forks
import pytest
from engine.logs import logged
from engine.toys import assert_equal, engine_of, train
from ranks import on_ranks

from hadal import comm
from hadal.checkpoint import remote, saving
from hadal.errors import CheckpointError, ConfigError

pytest.importorskip("fsspec")

from .disks import SCHEME, FaultyDisk, nothing
from .test_async import SCRIPT


def engine_staging(stage: int, **staging: Any) -> Any:
    return engine_of(stage, checkpoint={"async_save": True, "staging": staging})


class Gate:
    """Holds back what the threads of saves do with URLs, until it is opened."""

    def __init__(self, patch: pytest.MonkeyPatch, name: str) -> None:
        self.opened = threading.Event()
        real = getattr(saving, name)

        def wait(*args: Any) -> Any:
            assert threading.current_thread() is not threading.main_thread()
            assert self.opened.wait(30)
            return real(*args)

        patch.setattr(saving, name, wait)


def upload_behind(place: str, stage: int, **staging: Any) -> None:
    """Train on while the upload is held back; what was saved is the state of the call."""
    url, is_on_disk = f"{SCHEME}://{place}/run", "folder" in staging
    engine = engine_staging(stage, **staging)
    train(engine, range(2))
    saved = engine.state_dict()
    with pytest.MonkeyPatch.context() as patch:
        gate = Gate(patch, "copy_file" if is_on_disk else "write_tensors")
        engine.save_checkpoint(url, client_state={"step": 2})
        losses = train(engine, range(2, 4))
        if is_on_disk:
            name = f"rank_{comm.get_rank():05d}.safetensors"
            assert len(list(Path(staging["folder"]).glob(f"hadal-*/{name}"))) == 1
        assert not Path(place, "run", "latest").exists()
        gate.opened.set()
        engine.wait_for_checkpoint()
    other = engine_staging(stage, **staging)
    assert other.load_checkpoint(url)[1] == {"step": 2}
    assert_equal(other.state_dict(), saved)
    assert train(other, range(2, 4)) == losses
    engine.destroy(), other.destroy()
    comm.barrier()
    if is_on_disk:
        assert os.listdir(staging["folder"]) == []


@pytest.mark.parametrize("stage", [1, pytest.param(3, marks=pytest.mark.slow)])
@on_ranks(2)
def test_training_goes_on_once_the_state_is_on_a_local_disk(tmp_path: Path, stage: int) -> None:
    upload_behind(tmp_path, stage, folder=f"{tmp_path}/staging", size="4GB")


@on_ranks(2)
def test_training_goes_on_once_the_state_is_in_memory(tmp_path: Path) -> None:
    upload_behind(tmp_path, 2, size=100_000)


@on_ranks(2)
def test_a_state_that_does_not_fit_is_written_at_once(tmp_path: Path) -> None:
    """Bytes that do not fit are written before the save returns, on all ranks."""
    for staging in ({"size": "1kB"}, {"size": 1000, "folder": f"{tmp_path}/staging"}):
        engine = engine_staging(1, **staging)
        with logged() as told:
            for step in range(2):
                train(engine, range(step, step + 1))
                engine.save_checkpoint(f"{SCHEME}://{tmp_path}/run")
                assert (
                    Path(tmp_path, "run", "latest").read_text().strip() == f"global_step{step + 1}"
                )
        said = [text for text in told if "checkpoint.staging.size is 1,000" in text]
        assert len(said) == (comm.get_rank() == 0)
        engine.destroy()


@on_ranks(1)
def test_a_failed_upload_leaves_nothing_behind(tmp_path: Path) -> None:
    """A failed upload is told, leaves no files behind, and the next save works."""

    def refuse(operation: str, path: str) -> None:
        if operation == "write":
            raise OSError("no such bucket")

    url, staging = f"{SCHEME}://{tmp_path}/run", f"{tmp_path}/staging"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(remote, "PAUSES_S", (0.0, 0.0))
        engine = engine_staging(1, folder=staging)
        FaultyDisk.before = staticmethod(refuse)
        engine.save_checkpoint(url)
        with pytest.raises(CheckpointError, match=r"was not saved.*no such bucket"):
            engine.wait_for_checkpoint()
        FaultyDisk.before = staticmethod(nothing)
        assert os.listdir(staging) == []
        engine.save_checkpoint(url)
        engine.wait_for_checkpoint()
    assert Path(tmp_path, "run", "latest").read_text().strip() == "global_step0"
    Path(staging).rmdir()
    Path(staging).write_text("in the way")
    with pytest.raises(CheckpointError, match=r"checkpoint\.staging\.folder"):
        engine.save_checkpoint(url)
    engine.destroy()


@pytest.mark.slow
def test_the_end_of_the_program_uploads_what_is_staged(tmp_path: Path) -> None:
    section = f'"async_save": True, "staging": {{"folder": "{tmp_path}/staging"}}'
    script = SCRIPT.replace('"async_save": True', section).replace("write_tensors", "copy_file")
    done = forks.run(["-c", script, str(tmp_path / "saved")], env=os.environ, timeout=300)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "saved" / "latest").read_text() == "global_step0"
    assert os.listdir(tmp_path / "staging") == []


def test_a_directory_that_cannot_be_used_is_told_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder, reason in ((tmp_path / "file", "cannot hold"), ("memory://x", "is a URL")):
        with pytest.raises(ConfigError, match=f"checkpoint.staging.folder .*{reason}"):
            engine_staging(0, folder=str(folder))
    with logged() as told:
        engine_of(0, checkpoint={"staging": {"size": "1GB"}}).destroy()
    assert "checkpoint.staging.size: has no effect without async_save" in "\n".join(told)
