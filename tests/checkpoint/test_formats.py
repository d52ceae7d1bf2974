"""Checkpoints of other versions: older formats, and counters that one version does not know."""

from __future__ import annotations

import importlib.util
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.logs import logged
from engine.toys import engine_of, train
from ranks import RankPools
from safetensors.torch import load_file

from hadal import comm
from hadal.checkpoint.index import FORMAT, read_index, write_index
from hadal.checkpoint.inspection import inspected
from hadal.errors import CheckpointError

DATA = Path(__file__).parents[1] / "data" / "checkpoints"
SAVED = sorted(path.name.removesuffix(".tar.xz") for path in DATA.glob("*.tar.xz"))


def maker() -> Any:
    """The script that wrote the old checkpoints."""
    spec = importlib.util.spec_from_file_location("make_old_checkpoints", DATA / "make.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def load_old(folder: str) -> None:
    make = maker()
    engine, loader = make.engine_of()
    facts = json.loads(Path(folder, f"facts_{comm.get_rank()}.json").read_text())
    _, client_state = engine.load_checkpoint(folder)
    found_facts = make.facts_of(engine, iter(loader))
    assert found_facts == facts, (found_facts, facts)
    found, expected = make.values_of(engine), load_file(Path(folder, f"expected_{comm.get_rank()}"))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name], value), name
    assert torch.equal(client_state.pop("ema"), make.CLIENT["ema"])
    assert client_state == {key: value for key, value in make.CLIENT.items() if key != "ema"}
    engine.destroy()
    alone = engine_of(1, make.model_of())  # other buckets, dtype, stage
    alone.load_checkpoint(folder, load_module_only=True)
    for name, parameter in alone.module.named_parameters():
        assert torch.equal(parameter.detach(), expected[f"master.{name}"])
    alone.destroy()


@pytest.mark.fast_cells("format4")
@pytest.mark.parametrize("name", SAVED)
def test_an_older_format_loads_bit_for_bit(name: str, ranks: RankPools, tmp_path: Path) -> None:
    with tarfile.open(DATA / f"{name}.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    assert [report.faults for report in inspected(tmp_path)] == [[]]
    ranks(2).run(load_old, str(tmp_path))


def test_there_is_a_checkpoint_of_each_older_format(tmp_path: Path) -> None:
    formats = set()
    for name in SAVED:
        with tarfile.open(DATA / f"{name}.tar.xz") as archive:
            (index,) = (one for one in archive.getnames() if one.endswith("index.json"))
            content = archive.extractfile(index)
            assert content is not None
            formats.add(json.load(content)["format"])
    assert formats == set(range(4, max(FORMAT, 8)))


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


def load_other_counters(folder: str) -> None:
    engine = engine_of(1, fp16={"enabled": True, "initial_scale_power": 4})
    train(engine, range(2))
    engine.save_checkpoint(folder)
    counters = [["global_steps", 2], ["global_samples", 12], ["evaluations", 5]]
    change_scalars(folder, counters={"dict": counters}, scale=[8.0, 2])
    other = engine_of(1, fp16={"enabled": True, "initial_scale_power": 4})
    with logged() as lines:
        other.load_checkpoint(folder)
    assert (other.global_steps, other.global_samples, other.micro_steps) == (2, 12, 0)
    if comm.get_rank() == 0:
        text = "\n".join(lines)
        assert (
            "the counter micro_steps, the counter skipped_steps: these start at their defaults"
            in text
        )
        assert "has the counter evaluations, which this version of Hadal does not know" in text
    change_scalars(folder, counters={"dict": counters[:1]}, scale=[1.0] * 9, news=[1, 2])
    other.load_checkpoint(folder)
    assert (other.global_steps, other.global_samples) == (2, 0)
    change_scalars(folder, counters={"dict": []}, scale=[])
    other.load_checkpoint(folder)
    assert other.global_steps == 0
    change_scalars(folder, counters={"dict": [["global_steps", "many"]]}, scale=[])
    with pytest.raises(CheckpointError, match=r"index\.json is damaged.*counters are"):
        other.load_checkpoint(folder)


def test_counters_of_other_versions(ranks: RankPools, tmp_path: Path) -> None:
    ranks(2).run(load_other_counters, str(tmp_path))
