"""`deepspeed.io` and checkpoint engines: files that programs write themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hadal.compat.install import alias

STATE = {"weight": torch.arange(6.0).view(2, 3), "step": 4}


def test_torch_saves_into_the_writers(tmp_path: Path) -> None:
    io = alias("deepspeed.io")
    options = io.FastFileWriterConfig(dnvme_handle=None, pinned_tensor=torch.zeros(8))
    makers = {
        "python": io.PyFileWriter,
        "fast": lambda file_path: io.FastFileWriter(file_path, options),
    }
    for name, make in makers.items():
        writer = make(file_path=tmp_path / name)
        torch.save(STATE, writer, _use_new_zipfile_serialization=False)
        writer.close()
        read = torch.load(tmp_path / name)
        assert torch.equal(read["weight"], STATE["weight"]) and read["step"] == 4
        assert writer._stats["bytes"] == (tmp_path / name).stat().st_size
        assert writer.file_path() == str(tmp_path / name)
    mock = io.MockFileWriter(tmp_path / "none")
    assert mock.write(b"abc") == 3 and mock._stats["bytes"] == 3
    assert not (tmp_path / "none").exists()


def test_a_program_subclasses_a_checkpoint_engine(tmp_path: Path) -> None:
    engines = alias("deepspeed.runtime.checkpoint_engine.checkpoint_engine")
    torch_engine = alias("deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine")
    info = engines.CheckpointCommitInfo(tag="t", save_dir=str(tmp_path), save_latest=True)

    class Own(engines.CheckpointEngine):  # type: ignore[misc, name-defined]
        def create(self, info: Any) -> None:
            self.kept: dict[str, Any] = {}

        def save(self, state_dict: Any, path: str) -> None:
            self.kept[path] = state_dict

        def load(self, path: str, map_location: Any = None) -> Any:
            return self.kept[path]

        def commit(self, info: Any) -> bool:
            return True

    for engine in (torch_engine.TorchCheckpointEngine(), Own()):
        engine.create(info)
        engine.makedirs(str(tmp_path / "folder"), exist_ok=True)
        engine.save(STATE, str(tmp_path / "folder" / "state.pt"))
        assert engine.commit(info)
        read = engine.load(str(tmp_path / "folder" / "state.pt"), map_location="cpu")
        assert torch.equal(read["weight"], STATE["weight"])
        assert engine.is_data_parallel_writer(0) and not engine.is_decoupled()
    with pytest.raises(TypeError, match="abstract"):
        engines.CheckpointEngine()
