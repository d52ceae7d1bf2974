"""`hadal checkpoint` and exports, from URLs and to URLs."""

from __future__ import annotations

import io
import json
import tempfile
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from engine.toys import assert_equal
from ranks import RankPools
from safetensors.torch import load
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

from checkpoint.deepspeed_cases import toy, unpack
from hadal.checkpoint.files import copy_folder, items_of, location_of, read_small, storage_of
from hadal.checkpoint.formats.drafts import drafted_folder
from hadal.checkpoint.remote import FsspecStorage
from hadal.checkpoint.storage import RemotePath
from hadal.cli.deepspeed import zero_to_fp32
from hadal.cli.main import main
from hadal.utils import get_fp32_state_dict_from_zero_checkpoint

from . import s3
from .test_dcp import engine_of, state_of, train
from .test_from_deepspeed import assert_holds, engine_of as theirs_of

pytest.importorskip("fsspec")
_LIMIT = 1 << 30


def told(*arguments: str) -> tuple[int, str]:
    """Run a command; return its exit code and what it printed."""
    with redirect_stdout(io.StringIO()) as out:
        code = main(["checkpoint", *arguments])
    return code, out.getvalue()


def names_at(url: str) -> list[str]:
    return [item.name for item in items_of(location_of(url))]


def tensors_at(url: str) -> dict[str, torch.Tensor]:
    return load(read_small(location_of(url), _LIMIT))


def in_order(found: dict[str, Any]) -> dict[str, Any]:
    return dict(sorted(found.items()))


def through_urls(root: str, folder: str) -> None:
    """Save, look, export and load, all by URL."""
    engine = engine_of(1, "bf16")
    for step in range(2):
        train(engine, range(step, step + 1))
        engine.save_checkpoint(f"{root}/run", client_state={"epoch": step})
    exact = state_of(engine)
    code, text = told("inspect", f"{root}/run", "--json")
    reports = json.loads(text)
    assert code == 0
    assert [(one["tag"], one["faults"], one["checked"]) for one in reports] == [
        ("global_step1", [], True),
        ("global_step2", [], True),
    ]
    assert reports[1]["is_latest"] and reports[1]["file_nbytes"] > 0
    code, text = told("verify", f"{root}/run")
    assert code == 0 and text.count("whole") == 2
    to_hugging_face(root, engine, exact)
    to_dcp(root, folder, exact)
    to_universal(root, folder, exact)
    from_deepspeed(root, folder)
    damaged(root)
    engine.destroy()


def to_hugging_face(root: str, engine: Any, exact: dict[str, torch.Tensor]) -> None:
    out = f"{root}/hf"
    # Several files, which one replaces.
    assert told("export", f"{root}/run", out, "--max-shard-size", "400B")[0] == 0
    assert "model.safetensors.index.json" in names_at(out) and len(names_at(out)) > 2
    assert told("export", f"{root}/run", out)[0] == 0
    assert names_at(out) == ["model.safetensors"]
    assert told("to-fp32", f"{root}/run", f"{root}/fp32")[0] == 0
    found = tensors_at(f"{root}/fp32/model.safetensors")
    assert all(torch.equal(found[name], exact[name]) for name in found if name in exact)
    assert zero_to_fp32([f"{root}/run", f"{root}/bin"]) == 0
    content = read_small(location_of(f"{root}/bin/pytorch_model.bin"), _LIMIT)
    assert_equal(
        in_order(torch.load(io.BytesIO(content))),
        in_order(get_fp32_state_dict_from_zero_checkpoint(f"{root}/run")),
    )
    assert engine.save_16bit_model(f"{root}/weights")
    assert_equal(
        in_order(tensors_at(f"{root}/weights/model.safetensors")),
        in_order(tensors_at(f"{out}/model.safetensors")),
    )


def to_dcp(root: str, folder: str, exact: dict[str, torch.Tensor]) -> None:
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

    out = f"{root}/dcp"
    for _ in range(2):  # the second replaces the first
        assert told("export", f"{root}/run", out, "--format", "dcp")[0] == 0
    assert names_at(out) == [".metadata", "__0_0.distcp"]
    model = toy.Toy()
    state = {"model": get_model_state_dict(model)}
    dcp.load(state, storage_reader=FsspecReader(out))
    set_model_state_dict(model, state["model"])
    for name, parameter in model.named_parameters():
        assert name not in exact or torch.equal(parameter, exact[name]), name
    # The way back: as a checkpoint, and into another format.
    other = engine_of(1, "bf16")
    assert other.load_checkpoint(out)[1] == {"epoch": 1}
    assert_equal(state_of(other), exact)
    other.destroy()
    code, text = told("verify", out)
    assert code == 0 and "whole" in text
    assert told("to-fp32", out, f"{folder}/fp32")[0] == 0
    assert told("export", f"{root}/run", f"{root}/hf", "--format", "dcp")[0] == 1  # not empty


def to_universal(root: str, folder: str, exact: dict[str, torch.Tensor]) -> None:
    out = f"{root}/universal"
    assert told("export", f"{root}/run", out, "--format", "deepspeed-universal")[0] == 0
    assert names_at(out) == ["global_step2_universal", "latest_universal"]
    assert read_small(location_of(f"{out}/latest_universal"), 99) == b"global_step2_universal"
    place = f"{out}/global_step2_universal/zero"
    assert "optimizer_state.pt" in names_at(place)
    for name in ("inner.weight", "inner.bias"):
        content = read_small(location_of(f"{place}/{name}/fp32.pt"), _LIMIT)
        assert torch.equal(torch.load(io.BytesIO(content))["param"], exact[name])
    # The way back: `latest_universal` names it.
    other = engine_of(2, "bf16")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", folder)
        assert other.load_checkpoint(out)[1] == {"epoch": 1}
        assert told("verify", f"{out}/global_step2_universal")[0] == 0
    assert list(Path(folder).glob("hadal-*")) == []  # the copies are removed
    assert_equal(state_of(other), exact)
    other.destroy()


def from_deepspeed(root: str, folder: str) -> None:
    """A checkpoint of DeepSpeed behind a URL is one as in a directory."""
    case, url = "stage2_bf16_world2", f"{root}/theirs"
    saved = unpack(case, Path(folder, case))
    copy_folder(saved.folder, location_of(url))
    code, text = told("inspect", url, "--json")
    (report,) = json.loads(text)
    assert (code, report["tag"], report["faults"]) == (0, saved.tag, [])
    assert report["writer"].startswith("DeepSpeed") and report["file_count"] == 3
    engine = theirs_of(case, 3)
    assert engine.load_checkpoint(url)[1] == toy.client_state()
    assert_holds(engine, saved)
    engine.destroy()
    out = ("export", url, f"{root}/turned", "--format", "deepspeed-universal")
    assert told(*out)[0] == 0
    assert names_at(f"{root}/turned") == [f"{saved.tag}_universal", "latest_universal"]
    part = location_of(f"{url}/{saved.tag}/mp_rank_00_model_states.pt")
    storage_of(part).replace(part, read_small(part, _LIMIT)[:-1000])
    code, text = told("verify", url)
    assert code == 1 and "mp_rank_00_model_states.pt is damaged" in text.replace("\n", " ")


def damaged(root: str) -> None:
    """One bit of a file behind a URL is found."""
    tag = location_of(f"{root}/run/global_step1")
    home = next(item.name for item in items_of(tag) if item.is_folder)
    place = tag / home / "rank_00000.safetensors"
    content = bytearray(read_small(place, _LIMIT))
    content[-1] ^= 1
    storage_of(place).replace(place, bytes(content))
    for command in ("verify", "inspect"):
        code, text = told(command, f"{root}/run")
        assert code == 1 and "rank_00000.safetensors is damaged" in text.replace("\n", " ")


def test_commands_take_urls_of_memory(ranks: RankPools, tmp_path: Path) -> None:
    ranks(1).run(through_urls, f"memory://urls/{tmp_path.name}", str(tmp_path))


def on_s3(address: str, folder: str) -> None:
    through_urls(s3.use(address, "exports"), folder)


@pytest.mark.slow
@s3.needed
def test_commands_take_urls_of_s3(ranks: RankPools, tmp_path: Path) -> None:
    with s3.server("none") as address:
        ranks(1).run(on_s3, address, str(tmp_path), timeout=300)


def export_files(target: RemotePath, *names: str) -> None:
    with drafted_folder(target, "index") as draft:
        for name in names:
            (draft / name).parent.mkdir(parents=True, exist_ok=True)
            (draft / name).write_text(name)


def test_an_earlier_export_loses_only_what_the_new_one_has_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target, removed, remove = RemotePath("memory://earlier/export"), [], FsspecStorage.remove
    export_files(target, "index", "a/b/one", "a/two", "old/x", "three")

    def noted(self: FsspecStorage, path: RemotePath) -> None:
        removed.append(str(path))
        remove(self, path)

    monkeypatch.setattr(FsspecStorage, "remove", noted)
    export_files(target, "index", "a/two", "three", "y")
    # A removal that comes late removes no file of the new export.
    assert sorted(removed) == [f"{target}/a/b", f"{target}/index", f"{target}/old"]
    assert [item.name for item in items_of(target)] == ["a", "index", "three", "y"]
    assert [item.name for item in items_of(target / "a")] == ["two"]
