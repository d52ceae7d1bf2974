"""Checkpoints written by a real DeepSpeed, value by value, and files that are refused."""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from checkpoint.deepspeed_cases import CASES, group_names, unpack
from checkpoint.listing import link_files
from hadal.checkpoint.deepspeed import layouts
from hadal.checkpoint.deepspeed.pickles import check_pickle, read_pickle
from hadal.checkpoint.deepspeed.source import DeepSpeedSource
from hadal.checkpoint.formats.registry import format_of
from hadal.errors import CheckpointError, NotBuiltYetError


def whole(source: DeepSpeedSource, name: str, *kinds: str) -> Tensor:
    """Return a value, of the first of the kinds that exists."""
    name = source.aliases.get(name, name)
    kind = next(kind for kind in kinds if (name, kind) in source.entries)
    entry = source.entries[name, kind]
    return source.read(name, kind, 0, entry.numel).view(entry.shape)


@pytest.mark.parametrize("case", CASES)
def test_every_value_is_the_one_that_was_saved(case: str, tmp_path: Path) -> None:
    saved = unpack(case, tmp_path)
    source = DeepSpeedSource(saved.checkpoint, group_names())
    source.verify()
    seen = set()
    moments = {"momentum_buffer"} if case.startswith("momentum") else {"exp_avg", "exp_avg_sq"}
    for key, expected in saved.tensors.items():
        kind, name = key.split(".", 1)
        if case.startswith("trained") and name == "fixed.weight":
            assert (name, "weight") not in source.entries  # it was not to be saved
            continue
        if kind == "fp32":
            found = whole(source, name, "master", "weight")
        elif kind in moments:
            found = whole(source, name, f"state.{kind}")
        elif kind == "module":
            found = whole(source, name, "weight", "buffer")
        elif kind == "to_fp32":  # what is frozen DeepSpeed leaves in 16 bits
            found, expected = whole(source, name, "master", "weight", "buffer"), expected.float()
            found = found.float()
        else:
            continue
        seen.add(kind)
        assert found.dtype == expected.dtype and torch.equal(found, expected), key
    assert {"fp32", "module"} <= seen
    # What DeepSpeed tells of moments there are other parameters'.
    assert case.startswith("robin") or moments <= seen


@pytest.mark.parametrize("case", CASES)
def test_values_that_are_no_tensors_are_read_too(case: str, tmp_path: Path) -> None:
    saved = unpack(case, tmp_path)
    source = DeepSpeedSource(saved.checkpoint, group_names())
    stage, dtype, world = case.split("_")
    found = format_of(saved.checkpoint)
    assert found is not None and found.name == "deepspeed"
    assert (source.stage, source.world_size) == (int(stage[-1]), int(world[-1]))
    assert source.writer.endswith(" universal") == case.startswith("universal")
    assert source.client_state() == {
        "epoch": 2,
        "best": 0.25,
        "history": [3, 2, 1],
        "note": {"who": "a caller"},
    }
    found = [sorted(group.names) for group in source.groups]
    assert found == [sorted(names) for names in group_names()]
    assert source.aliases == {"head.weight": "words.weight"}
    assert source.schedule == {"last_batch_iteration": 2}
    assert source.scalars["scale"][0] == saved.facts["scale"]
    counters = {key: saved.facts[key] for key in ("global_steps", "global_samples")}
    assert source.scalars["counters"] == {**counters, "micro_steps": 3, "skipped_steps": 0}
    # At stage 0 DeepSpeed's wrapper of 16-bit weights counts an update before the first.
    count = 4.0 if source.stage == 0 and dtype != "fp32" else 3.0
    counts = {float(state["step"]) for state in source.state.values() if "step" in state}
    assert counts == (set() if case.startswith("momentum") else {count})
    # Moments of fp16 at stage 0 are of gradients that were not divided by the loss scale.
    assert len(source.notes) == 1 + (source.stage == 0 and dtype == "fp16")


def test_stage_0_values_are_matched_to_names(tmp_path: Path) -> None:
    saved = unpack("stage0_bf16_world2", tmp_path)
    first, second = group_names()
    turned = DeepSpeedSource(saved.checkpoint, [first[::-1], second[::-1]])
    assert [list(group.names) for group in turned.groups] == group_names()
    with pytest.raises(
        CheckpointError, match=r"unexpected (master|elements) of .*load_optimizer_states"
    ):
        DeepSpeedSource(saved.checkpoint, [second, first])
    with pytest.raises(CheckpointError, match=r"unexpected param groups: 2, here \[8\]"):
        DeepSpeedSource(saved.checkpoint, [first + second])
    unnamed = DeepSpeedSource(saved.checkpoint)
    assert {kind for _, kind in unnamed.entries} == {"weight", "buffer"}


@pytest.mark.parametrize("data_first", [False, True])
def test_slices_of_experts_are_joined_for_each_set_of_ranks(data_first: bool) -> None:
    """Two sets of two ranks; every rank counts its experts from 0."""
    prefix, values = "m.deepspeed_experts", torch.arange(10.0).view(2, 5)

    def of_rank(rank: int) -> dict[str, Any]:
        place, part = divmod(rank, 2) if data_first else (rank % 2, rank // 2)
        flat = torch.nn.functional.pad(values[place], (0, 1)).view(2, 3)[part]
        group = {"params": [0], "moe": True, "name": "ep_size_2", "lr": 0.1}
        base = {"state": {0: {"step": 1}}, "param_groups": [group]}
        return {"base_optimizer_state": base, "single_partition_of_fp32_groups": [flat]}

    ranks, shapes = (
        [of_rank(rank) for rank in range(4)],
        [{f"{prefix}.0": (3,), f"{prefix}.1": (2,)}],
    )
    found = layouts.cut_evenly(ranks, shapes, data_first=data_first)
    joined = [torch.cat(found.masters[f"{prefix}.{number}"]).tolist() for number in range(4)]
    assert joined == [[0, 1, 2], [3, 4], [5, 6, 7], [8, 9]]
    assert found.options == [{"lr": 0.1}] and found.names == [list(found.masters)]


@given(st.data())
def test_cuts_of_every_parameter_join_again(data: st.DataObject) -> None:
    ranks = data.draw(st.integers(1, 4))
    rows = data.draw(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=3), max_size=3))
    shapes = [{f"{i}.{j}": (numel,) for j, numel in enumerate(row)} for i, row in enumerate(rows)]
    values = {name: torch.rand(shape) for named in shapes for name, shape in named.items()}
    optimizers = []
    for rank in range(ranks):
        flats = []
        for named in shapes:
            cuts = []
            for name, (numel,) in named.items():
                each = -(-numel // ranks)
                padded = torch.cat([values[name], torch.full((each * ranks - numel,), 7.0)])
                cuts.append(padded[rank * each : (rank + 1) * each])
            flats.append(torch.cat(cuts))
        state = {i: {"step": 3, "exp_avg": 2 * flat} for i, flat in enumerate(flats)}
        group = {"params": list(range(len(flats))), "lr": 0.1}
        optimizers.append(
            {
                "optimizer_state_dict": {"state": state, "param_groups": [group]},
                "fp32_flat_groups": flats,
            }
        )
    found = layouts.cut_by_parameter(optimizers, shapes)
    assert found.names == [list(values)]
    for name, value in values.items():
        assert torch.equal(torch.cat(found.masters[name])[: value.numel()], value)
        if value.numel():
            moment = torch.cat(found.state[name, "exp_avg"])[: value.numel()]
            assert torch.equal(moment, 2 * value)


@given(st.data())
def test_even_cuts_of_whole_groups_join_again(data: st.DataObject) -> None:
    ranks = data.draw(st.integers(1, 4))
    rows = data.draw(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=3), max_size=3))
    shapes = [{f"{i}.{j}": (n,) for j, n in enumerate(row)} for i, row in enumerate(rows)]
    gaps = [data.draw(st.lists(st.integers(0, 3), min_size=len(r), max_size=len(r))) for r in rows]
    values = {name: torch.rand(shape) for named in shapes for name, shape in named.items()}
    cuts: list[list[Tensor]] = []
    for named, between in zip(shapes, gaps, strict=True):
        pieces = [
            torch.cat([values[n], torch.zeros(g)]) for n, g in zip(named, between, strict=True)
        ]
        flat = torch.cat(pieces)
        each = -(-flat.numel() // ranks)
        cuts.append([flat[rank * each : (rank + 1) * each] for rank in range(ranks)])
    optimizers = []
    for rank in range(ranks):
        mine = [cut[rank] for cut in cuts]
        state = {i: {"exp_avg": torch.cat([2 * cut, torch.ones(2)])} for i, cut in enumerate(mine)}
        groups = [{"params": [i], "lr": 0.1} for i in range(len(mine))]
        optimizers.append(
            {
                "base_optimizer_state": {"state": state, "param_groups": groups},
                "single_partition_of_fp32_groups": mine,
                "param_alignment_paddings": gaps,
            }
        )
    found = layouts.cut_evenly(optimizers, shapes)
    assert found.names == [list(named) for named in shapes]
    for name, value in values.items():
        assert torch.equal(torch.cat(found.masters[name]), value)
        if value.numel():
            assert torch.equal(torch.cat(found.state[name, "exp_avg"]), 2 * value)


# ---- what must be refused ------------------------------------------------------------------------


class Shell:
    """A pickle that would run a command."""

    def __init__(self, witness: str) -> None:
        self.witness = witness

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, (f"touch {self.witness}",)


@pytest.mark.parametrize(
    "name", ["mp_rank_00_model_states.pt", "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"]
)
def test_a_pickle_that_would_run_something_is_refused(name: str, tmp_path: Path) -> None:
    saved = unpack("stage2_bf16_world2", tmp_path)
    witness = tmp_path / "ran"
    path = saved.checkpoint / name
    content = {"optimizer_state_dict": {}, "epoch": [{"deep": Shell(str(witness))}]}
    torch.save(content, path)
    with pytest.raises(CheckpointError, match=f"{name} names .*system.*none of its code was run"):
        DeepSpeedSource(saved.checkpoint)
    assert not witness.exists()


class Unknown:
    """A class of the caller."""


def test_plain_values_of_other_libraries_pass_and_classes_do_not(tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    plain = {"array": np.arange(3), "number": np.float64(2.5), "place": Path("a/b")}
    torch.save(plain, path)
    found = read_pickle(path)
    assert np.array_equal(found["array"], plain["array"])
    assert (found["number"], found["place"]) == (2.5, "a/b")
    torch.save({"mine": Unknown()}, path)
    with pytest.raises(CheckpointError, match=r"test_deepspeed\.Unknown, which is not among"):
        read_pickle(path)
    path.write_bytes(pickle.dumps({"old": 1}))
    with pytest.raises(CheckpointError, match=r"file\.pt is damaged"):
        read_pickle(path)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    saved = unpack("stage3_bf16_world2", tmp_path)
    generator = torch.Generator().manual_seed(5)
    for path in sorted(saved.checkpoint.glob("*.pt")):
        good = path.read_bytes()
        path.unlink()  # what is mapped already must not change under its reader
        for _ in range(12):
            draw = int(torch.randint(len(good), (), generator=generator))
            path.write_bytes(good[:draw])
            with pytest.raises(CheckpointError, match=path.name):
                DeepSpeedSource(saved.checkpoint)
            flipped = bytearray(good)
            flipped[draw] ^= 1 << draw % 8
            path.write_bytes(flipped)
            # Nothing but an error of ours, and none where the byte says nothing.
            with suppress(CheckpointError, NotBuiltYetError):
                source = DeepSpeedSource(saved.checkpoint)
                for (parameter, kind), entry in source.entries.items():
                    source.read(parameter, kind, 0, entry.numel)
            path.unlink()
        with zipfile.ZipFile(io.BytesIO(good)) as archive:
            largest = max(archive.infolist(), key=lambda entry: entry.file_size)
            middle = good.index(archive.read(largest)) + largest.file_size // 2
        path.write_bytes(good[:middle] + bytes([good[middle] ^ 16]) + good[middle + 1 :])
        with pytest.raises(CheckpointError, match=path.name):
            check_pickle(path)
        path.write_bytes(good)
        check_pickle(path)


def test_a_tensor_without_values_is_refused_before_the_load(tmp_path: Path) -> None:
    saved = unpack("stage0_fp32_world2", tmp_path)
    (path,) = saved.checkpoint.glob("*model_states.pt")
    content = torch.load(path, weights_only=False)
    path.unlink()
    name = next(iter(content["module"]))
    content["module"][name] = content["module"][name].to("meta")
    torch.save(content, path)
    with pytest.raises(CheckpointError, match=f"of {name} was saved from the device meta"):
        DeepSpeedSource(saved.checkpoint)


def test_missing_files_and_other_formats_are_reported(tmp_path: Path) -> None:
    saved = unpack("stage3_bf16_world2", tmp_path)
    second = saved.checkpoint / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    content = second.read_bytes()
    second.unlink()
    with pytest.raises(CheckpointError, match="saved by 2 ranks and has the optimizer states of 1"):
        DeepSpeedSource(saved.checkpoint)
    second.with_name(second.name.replace("rank_1", "rank_2")).write_bytes(content)
    with pytest.raises(CheckpointError, match="no optim states of rank 1"):
        DeepSpeedSource(saved.checkpoint)
    (saved.checkpoint / "layer_00-model_01-model_states.pt").touch()
    with pytest.raises(NotBuiltYetError, match="one of several tensor-parallel parts"):
        DeepSpeedSource(saved.checkpoint)


@pytest.mark.parametrize("case", ["stage2_bf16_world2", "universal2_bf16_world2"])
def test_links_are_followed(case: str, tmp_path: Path) -> None:
    saved = unpack(case, tmp_path / "a")
    link_files(tmp_path / "a", tmp_path / "blobs")
    assert any(path.is_symlink() for path in saved.checkpoint.rglob("*.pt"))
    source = DeepSpeedSource(saved.checkpoint, group_names())
    source.verify()
    for key, expected in saved.tensors.items():
        kind, name = key.split(".", 1)
        if kind == "fp32":
            assert torch.equal(whole(source, name, "master", "weight"), expected)


@pytest.mark.parametrize("name", ["../x", "/x", "a/../../x", "x\0"])
def test_a_name_of_a_parameter_that_leads_out_is_refused(name: str, tmp_path: Path) -> None:
    saved = unpack("universal2_bf16_world2", tmp_path)
    path = next(saved.checkpoint.glob("*model_states.pt"))
    content = torch.load(path, weights_only=False)
    content["param_shapes"][0][name] = torch.Size([1])
    path.unlink()
    torch.save(content, path)
    with pytest.raises(CheckpointError, match="leads out of the checkpoint's folder"):
        DeepSpeedSource(saved.checkpoint, group_names())
