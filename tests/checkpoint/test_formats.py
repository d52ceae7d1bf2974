"""Checkpoints of other versions: other formats, and counters that one version does not know."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from engine.logs import logged
from engine.toys import assert_equal, engine_of, model_of, train
from ranks import RankPools, on_ranks
from torch import Tensor, nn

from hadal import comm
from hadal.checkpoint import index
from hadal.checkpoint.contents import WEIGHT
from hadal.checkpoint.files import is_file
from hadal.checkpoint.formats import registry
from hadal.checkpoint.formats.registry import Format
from hadal.checkpoint.index import FORMAT, INDEX, read_index, write_index
from hadal.checkpoint.inspection import inspected
from hadal.checkpoint.source import Entry, Source
from hadal.errors import CheckpointError


@pytest.mark.parametrize("head", [{"format": 9}, {"format": "1"}, {"checksum": "crc32"}], ids=str)
@on_ranks(1)
def test_another_version_is_an_error_with_its_remedy(tmp_path: Path, head: dict[str, Any]) -> None:
    engine = engine_of(1)
    engine.save_checkpoint(tmp_path, "other")
    home = Path(tmp_path, "other")
    content = {**read_index(home), **head}
    (home / INDEX).unlink()
    with patch.object(index, "_HEAD", {}), patch.object(index, "read_index"):
        write_index(home, content)
    told = f"has format {head.get('format', FORMAT)!r}.*reads format {FORMAT}; load it with the ver"
    if "format" not in head:
        told = "is damaged"
    with pytest.raises(CheckpointError, match=told):
        engine.load_checkpoint(tmp_path)
    (report,) = inspected(tmp_path)
    assert re.search(told, report.faults[0])
    engine.destroy()


def test_the_first_release_writes_format_1() -> None:
    assert FORMAT == 1


# ---- formats of others ---------------------------------------------------------------------------


class TextSource(Source):
    """A format that Hadal does not have: a file of numbers for each weight."""

    writer = "a text editor"

    def __init__(self, folder: Path, part: int = 0, names: Any = None) -> None:
        self.path, self.mark = folder, ""
        self.entries = {
            (path.stem, WEIGHT): Entry(shape_of(model_of())[path.stem], torch.float32)
            for path in folder.glob("*.txt")
        }

    def read(self, name: str, kind: str, start: int, stop: int) -> Tensor:
        numbers = (self.path / f"{name}.txt").read_text().split()
        return torch.tensor([float(number) for number in numbers[start:stop]])


def shape_of(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in model.state_dict().items()}


def load_text(folder: str) -> None:
    row = Format("text", lambda place: is_file(place / "names"), f"{__name__}:TextSource", False)
    with patch.object(registry, "FORMATS", (*registry.FORMATS, row)):
        engine = engine_of(3)
        engine.load_checkpoint(folder, load_module_only=True)
        expected = model_of(7).state_dict()
        assert_equal(engine.state_dict(), expected)
        (report,) = inspected(folder)
        assert report.writer == "a text editor" and not report.faults
        engine.destroy()


def test_a_format_is_added_by_one_row(ranks: RankPools, tmp_path: Path) -> None:
    (tmp_path / "names").touch()
    for name, value in model_of(7).state_dict().items():
        text = " ".join(map(repr, value.flatten().tolist()))
        (tmp_path / f"{name}.txt").write_text(text)
    ranks(2).run(load_text, str(tmp_path))


# ---- counters ------------------------------------------------------------------------------------


def change_scalars(folder: str, **changes: Any) -> None:
    """Rewrite the engine's numbers in an index as another version of Hadal writes them."""
    home = Path(folder, "global_step2")
    comm.barrier()
    if comm.get_rank() == 0:
        content = read_index(home)
        (home / "index.json").unlink()
        content["scalars"] = {"dict": list(changes.items())}
        write_index(home, content)
    comm.barrier()


@on_ranks(2)
def test_counters_of_other_versions(tmp_path: Path) -> None:
    engine = engine_of(1, fp16={"enabled": True, "initial_scale_power": 4})
    train(engine, range(2))
    engine.save_checkpoint(tmp_path)
    counters = [["global_steps", 2], ["global_samples", 12], ["evaluations", 5]]
    change_scalars(tmp_path, counters={"dict": counters}, scale=[8.0, 2])
    other = engine_of(1, fp16={"enabled": True, "initial_scale_power": 4})
    with logged() as lines:
        other.load_checkpoint(tmp_path)
    assert (other.global_steps, other.global_samples, other.micro_steps) == (2, 12, 0)
    if comm.get_rank() == 0:
        text = "\n".join(lines)
        assert (
            "the counter micro_steps, the counter skipped_steps: these start at their defaults"
            in text
        )
        assert "has the counter evaluations, which this version of Hadal does not know" in text
    change_scalars(tmp_path, counters={"dict": counters[:1]}, scale=[1.0] * 9, news=[1, 2])
    other.load_checkpoint(tmp_path)
    assert (other.global_steps, other.global_samples) == (2, 0)
    change_scalars(tmp_path, counters={"dict": []}, scale=[])
    other.load_checkpoint(tmp_path)
    assert other.global_steps == 0
    change_scalars(tmp_path, counters={"dict": [["global_steps", "many"]]}, scale=[])
    with pytest.raises(CheckpointError, match=r"index\.json is damaged.*counters are"):
        other.load_checkpoint(tmp_path)
