"""Whole weights from an engine under training: to files, and as a state dict on rank 0."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.deepspeed_cases import toy
from ranks import RankPools, on_ranks
from safetensors.torch import load_file

import hadal
from engine.logs import logged
from hadal import comm
from hadal.checkpoint import huggingface
from hadal.errors import CheckpointError, UsageError

GATHERS = "stage3_gather_16bit_weights_on_model_save"


def engine_of(stage: int, dtype: str = "bf16", **zero: Any) -> Any:
    config = toy.config_of(stage, dtype)
    config["zero_optimization"] = {"stage": stage, "reduce_bucket_size": 100, **zero}
    config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    model = toy.Toy()
    engine, *_ = hadal.initialize(model=model, model_parameters=toy.groups_of(model), config=config)
    tokens = toy.batch_of(0, comm.get_rank())
    engine.backward(toy.loss_of(engine(tokens), tokens))
    engine.step()
    return engine


@pytest.mark.claims(
    f"zero_optimization.{GATHERS}",
    "zero_optimization.stage3_gather_fp16_weights_on_model_save",
    "zero_optimization.gather_16bit_weights_on_model_save",
)
@pytest.mark.parametrize(("stage", "dtype"), [(0, "fp32"), (2, "bf16"), (3, "bf16"), (3, "fp16")])
@on_ranks(2)
def test_the_model_is_saved_alone(stage: int, dtype: str, tmp_path: Path) -> None:
    engine = engine_of(stage, dtype, **{GATHERS: True})
    assert engine.zero_gather_16bit_weights_on_model_save() is True
    whole = engine.state_dict()
    target = Path(tmp_path)
    assert engine.save_16bit_model(tmp_path, max_shard_size="700B") is True
    assert engine.save_fp16_model(tmp_path, "other.safetensors") is True
    assert engine.save_16bit_model(tmp_path, "pytorch_model.bin") is True
    comm.barrier()
    many = {}
    for path in sorted(target.glob("model-*-of-*.safetensors")):
        many |= load_file(path)
    for found in (many, load_file(target / "other.safetensors")):
        assert whole.keys() - found.keys() == {"head.weight"}
        assert all(torch.equal(value, whole[name]) for name, value in found.items())
        assert all(value.dtype == whole[name].dtype for name, value in found.items())
    state = torch.load(target / "pytorch_model.bin", weights_only=True)
    assert state.keys() == whole.keys()
    assert state["head.weight"].data_ptr() == state["words.weight"].data_ptr()
    engine.save_16bit_model(tmp_path, "trained.safetensors", exclude_frozen_parameters=True)
    comm.barrier()
    trained = load_file(target / "trained.safetensors")
    assert whole.keys() - trained.keys() == {"head.weight", "fixed.weight"}
    comm.barrier()


def does_not_save(folder: str) -> list[str]:
    engine = engine_of(3)
    assert engine.zero_gather_16bit_weights_on_model_save() is False
    with logged() as told:
        assert engine.save_16bit_model(folder) is False
    comm.barrier()
    other = engine_of(2)
    assert other.save_16bit_model(folder, "stage2.safetensors") is True
    comm.barrier()
    return list(told)


def test_partitioned_weights_are_gathered_only_if_wanted(ranks: RankPools, tmp_path: Path) -> None:
    first, second = ranks(2).run(does_not_save, str(tmp_path))
    assert GATHERS in first[0] and "hadal checkpoint export" in first[0] and second == []
    assert [path.name for path in tmp_path.iterdir()] == ["stage2.safetensors"]


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(2)
def test_rank_0_is_given_the_whole_state(stage: int) -> None:
    engine = engine_of(stage, "bf16", **{GATHERS: True})
    whole = engine.state_dict()
    for method in (
        engine._zero3_consolidated_16bit_state_dict,
        engine._consolidated_16bit_state_dict,
    ):
        state, trained = method(), method(exclude_frozen_parameters=True)
        if comm.get_rank() != 0:
            assert state is None and trained is None
            continue
        assert list(state) == list(whole)
        assert all(torch.equal(value, whole[name]) for name, value in state.items())
        assert state["head.weight"] is state["words.weight"]
        assert state.keys() - trained.keys() == {"fixed.weight"}
    on_all = engine.module_state_dict(prefix="model.", exclude_frozen_parameters=True)
    assert {f"model.{name}" for name in whole} - on_all.keys() == {"model.fixed.weight"}
    filled: dict[str, Any] = {"old": 1}
    assert engine.module_state_dict(filled) is filled and len(filled) == len(whole) + 1
    # Training continues.
    tokens = toy.batch_of(1, comm.get_rank())
    engine.backward(toy.loss_of(engine(tokens), tokens))
    engine.step()
    engine.destroy()
    with pytest.raises(UsageError, match="destroyed"):
        engine.save_16bit_model("nowhere")
    comm.barrier()


def holds_one_bucket() -> tuple[int, int, int]:
    """Elements that are gathered at once while rank 0 is given the state, of all, of a bucket."""
    engine = engine_of(3, "bf16", **{GATHERS: True})
    engine._parts.runtime.reshard_all()
    buckets, most = engine._parts.runtime.buckets, 0
    freed = [bucket for bucket in buckets if not bucket.full.untyped_storage().nbytes()]
    whole = engine._parts.runtime.gathering.whole

    @contextmanager
    def watched(held: Any) -> Iterator[None]:
        nonlocal most
        with whole(held):
            full = [b.layout.numel for b in freed if b.full.untyped_storage().nbytes()]
            most = max(most, sum(full))
            yield

    engine._parts.runtime.gathering.whole = watched
    engine._zero3_consolidated_16bit_state_dict()
    comm.barrier()
    numels = [bucket.layout.numel for bucket in buckets]
    return most, sum(numels), max(numels)


def test_other_ranks_hold_a_bucket_at_a_time(ranks: RankPools) -> None:
    for most, of_all, largest in ranks(2).run(holds_one_bucket):
        assert most == largest < of_all / 2


def fails(folder: str) -> list[str]:
    engine = engine_of(3, "bf16", **{GATHERS: True})
    write, calls = huggingface.write_file, []

    def full_disk(path: Path, chunks: Any) -> Any:
        calls.append(path)
        if len(calls) == 2:
            next(iter(chunks))
            raise CheckpointError(f"{path} cannot be written") from OSError(errno.ENOSPC, "full")
        return write(path, chunks)

    huggingface.write_file = full_disk
    try:
        with pytest.raises(CheckpointError, match=r"was not written.*rank 0.*cannot be written"):
            engine.save_16bit_model(folder, max_shard_size="700B")
    finally:
        huggingface.write_file = write
    assert not list(Path(folder).iterdir())
    comm.barrier()
    assert engine.save_16bit_model(folder) is True
    comm.barrier()
    return [path.name for path in Path(folder).iterdir()]


def test_a_full_disk_is_reported_on_all_ranks_and_leaves_no_file(
    ranks: RankPools, tmp_path: Path
) -> None:
    assert ranks(2).run(fails, str(tmp_path)) == [["model.safetensors"]] * 2
