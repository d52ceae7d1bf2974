"""Resuming runs that began under DeepSpeed: at every stage, on one rank or two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine.logs import logged
from engine.toys import assert_equal
from ranks import RankPools

import hadal
from checkpoint.deepspeed_cases import CASES, Unpacked, make, toy, unpack
from hadal import comm
from hadal.errors import CheckpointError
from hadal.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state


def engine_of(case: str, stage: int, **changes: Any) -> Any:
    """Return an engine like the one that saved, at another stage, on the available ranks."""
    kind, dtype, world = case.split("_")
    config = toy.config_of(stage, dtype)
    optimizer = make.CHANGES.get(kind[:-1], {}).get("optimizer")
    if optimizer:
        config["optimizer"] = optimizer
    # As many rows in an update, on however many ranks.
    rows = toy.ROWS * int(world[-1])
    config["train_batch_size"] = rows
    config["train_micro_batch_size_per_gpu"] = rows // 2
    config["zero_optimization"] = {"stage": stage, "stage3_param_persistence_threshold": 8}
    model = toy.Toy()
    engine, *_ = hadal.initialize(
        model=model, model_parameters=toy.groups_of(model), config={**config, **changes}
    )
    return engine


def update(engine: Any, step: int, saved_by: int, divided: float = 1.0) -> None:
    """Do one update over the rows that all ranks of the saved run would have seen."""
    rows = torch.cat([toy.batch_of(step, rank) for rank in range(saved_by)])
    micro, mine = engine.train_micro_batch_size_per_gpu(), comm.get_rank()
    for number in range(engine.gradient_accumulation_steps()):
        start = (number * comm.get_world_size() + mine) * micro
        tokens = rows[start : start + micro]
        loss = toy.loss_of(engine(tokens), tokens)
        engine.backward(loss / divided)
        engine.step()


def assert_holds(engine: Any, saved: Unpacked) -> None:
    """Check that weights, masters and moments are bit for bit those that DeepSpeed reported."""
    whole = engine.state_dict()
    for key, expected in saved.tensors.items():
        kind, name = key.split(".", 1)
        if kind == "module":
            found = whole[name]
            if name == "shift":  # here buffers have the weights' dtype, unless told otherwise
                expected = expected.to(found.dtype)
        elif kind in ("fp32", "exp_avg", "exp_avg_sq", "momentum_buffer"):
            parameter = dict(engine.module.named_parameters())[name]
            found = (
                safe_get_full_fp32_param(parameter)
                if kind == "fp32"
                else safe_get_full_optimizer_state(parameter, kind)
            )
        else:
            continue
        assert torch.equal(found, expected), (key, (found - expected).abs().max())


def goes_on(case: str, stage: int, folder: str) -> dict[str, float]:
    """Do one update; return the values that differ from DeepSpeed's, and by how much."""
    saved = Unpacked.read(case, Path(folder))
    facts = saved.facts
    engine = engine_of(case, stage)
    is_part = case.startswith("trained")  # saved without what is frozen
    if is_part:
        with pytest.raises(CheckpointError, match=r"lacks fixed\.weight"):
            engine.load_checkpoint(folder)
        comm.barrier()
    with logged() as told:
        path, client_state = engine.load_checkpoint(folder, load_module_strict=not is_part)
    warned = any("by the loss scale once more" in message for message in told)
    assert warned == (divides_twice(case) and comm.get_rank() == 0)
    assert path == str(saved.checkpoint)
    assert client_state == toy.client_state()
    assert_holds(engine, saved)
    assert engine.get_lr() == facts["lr"]
    assert engine.loss_scale == facts["scale"]
    for key in ("global_steps", "global_samples", "skipped_steps"):
        assert getattr(engine, key) == facts[key]
    groups = engine.optimizer.param_groups
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]

    divided = facts["scale"] if divides_twice(case) else 1.0
    update(engine, toy.TRAINED, int(case[-1]), divided)
    after = facts["next"]
    assert engine.get_lr() == pytest.approx(after["lr"])
    assert engine.loss_scale == after["scale"]
    assert engine.global_steps == after["global_steps"]
    if after["norm"]:
        # Of the two optimizers that it has there, one tells the norm of what it steps by.
        told = after["norm"] / (divided if case.startswith("torch0") else 1.0)
        assert engine.get_global_grad_norm() == pytest.approx(told, rel=1e-2)
    errors = {}
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad:
            moment = "momentum_buffer" if case.startswith("momentum") else "exp_avg"
            for kind in ("fp32", moment)[: 1 if case.startswith("robin") else 2]:
                found = (
                    safe_get_full_fp32_param(parameter)
                    if kind == "fp32"
                    else safe_get_full_optimizer_state(parameter, kind)
                )
                error = (found - saved.tensors[f"next.{kind}.{name}"]).abs().max()
                errors[f"{kind} of {name}"] = float(error)
    engine.destroy()
    return errors


def divides_twice(case: str) -> bool:
    """Return whether a case is stage 0 in fp16, where DeepSpeed divides by the loss scale twice.

    Its next update is that of a loss so much smaller; it is told at the load.
    """
    kind, dtype, _ = case.split("_")
    return kind in ("stage0", "torch0") and dtype == "fp16"


LEARNING_RATE = 0.006
"""The rough size of a parameter's change in the update that is compared."""
# A few roundings of a gradient, as a part of what an update moves; one rounding is 1/256 in bf16.
ALLOWED = {"fp32": 1e-4, "fp16": 5e-3, "bf16": 4e-2}
EVERYWHERE = ("stage0_fp32_world2", "stage2_bf16_world2", "stage3_fp16_world2")
WITH_EVERY_STAGE = [
    (case, stage, world_size)
    for number, case in enumerate(CASES)
    for stage in range(4)
    for world_size in (1, 2)
    if case in EVERYWHERE or ((stage + number) % 4 == 0 and world_size == 1 + number % 2)
]


@pytest.mark.slow_cells(
    "aligned1_fp32_world2-3-2",
    "stage0_fp16_world2-3-2",
    "stage1_fp16_world2-3-2",
    "stage2_bf16_world2-3-2",
    "stage2_fp16_world2-3-2",
    "stage3_fp16_world2-0-2",
    "stage3_fp16_world2-1-2",
    "stage3_fp16_world2-3-2",
    "subgroups3_bf16_world2-1-2",
    "torch1_fp32_world2-3-2",
    "trained3_bf16_world2-1-2",
    "universal2_bf16_world2-3-2",
)
@pytest.mark.parametrize(("case", "stage", "world_size"), WITH_EVERY_STAGE)
def test_a_run_resumes_as_under_deepspeed(
    case: str, stage: int, world_size: int, ranks: RankPools, tmp_path: Path
) -> None:
    unpack(case, tmp_path)
    (errors, *_) = ranks(world_size).run(goes_on, case, stage, str(tmp_path))
    allowed = ALLOWED[case.split("_")[1]] * LEARNING_RATE
    assert max(errors.values()) < allowed, errors


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("case", CASES)
def test_all_runs_resume_as_under_deepspeed(
    case: str, stage: int, world_size: int, ranks: RankPools, tmp_path: Path
) -> None:
    test_a_run_resumes_as_under_deepspeed(case, stage, world_size, ranks, tmp_path)


def partly(folder: str) -> None:
    case = "stage2_bf16_world2"
    saved = Unpacked.read(case, Path(folder))
    engine = engine_of(case, 3)
    engine.load_checkpoint(folder, load_module_only=True)
    assert (engine.global_steps, len(engine.optimizer.state)) == (0, 0)
    weights = engine.state_dict()
    assert torch.equal(weights["gain"], saved.tensors["module.gain"])
    other = engine_of("stage2_fp32_world2", 1)
    _, client_state = other.load_checkpoint(folder, load_optimizer_states=False)
    assert client_state == toy.client_state()
    assert torch.equal(other.state_dict()["gain"], saved.tensors["fp32.gain"])
    comm.barrier()


def test_parts_of_it_load_and_the_dtype_may_change(ranks: RankPools, tmp_path: Path) -> None:
    unpack("stage2_bf16_world2", tmp_path)
    ranks(2).run(partly, str(tmp_path))


def refuses(folder: str, name: str) -> list[str]:
    engine = engine_of("stage2_bf16_world2", 2)
    before = engine.state_dict()
    with pytest.raises(CheckpointError) as caught:
        engine.load_checkpoint(folder)
    assert name in str(caught.value)
    assert_equal(engine.state_dict(), before)
    assert engine.global_steps == 0
    comm.barrier()
    return [str(caught.value)]


def test_a_damaged_checkpoint_is_refused_by_all_ranks(ranks: RankPools, tmp_path: Path) -> None:
    saved = unpack("stage2_bf16_world2", tmp_path)
    name = "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    path = saved.checkpoint / name
    good = path.read_bytes()
    values = saved.tensors["exp_avg.outer.weight"].numpy().tobytes()[-16:]
    path.write_bytes(good.replace(values, bytes(16)))
    for told in ranks(2).run(refuses, str(tmp_path), name):
        assert "checksum" in told[0]
    path.write_bytes(good[:-40])
    ranks(2).run(refuses, str(tmp_path), name)


def tells(folder: str) -> list[str]:
    engine = engine_of("stage2_bf16_world2", 0)
    with logged() as told:
        engine.load_checkpoint(folder)
    comm.barrier()
    return list(told)


def test_state_that_is_not_restored_is_reported_once(ranks: RankPools, tmp_path: Path) -> None:
    unpack("stage2_bf16_world2", tmp_path)
    first, second = ranks(2).run(tells, str(tmp_path))
    assert len(first) == 1 and second == []
    assert "random generators" in first[0]


def refuses_another_optimizer(folder: str) -> None:
    optimizer = {"type": "Lion", "params": {"lr": 0.01}}
    engine = engine_of("stage2_bf16_world2", 1, optimizer=optimizer)
    with pytest.raises(CheckpointError, match=r"holds the state of AdamW, but .* is Lion"):
        engine.load_checkpoint(folder)
    assert engine.global_steps == 0
    comm.barrier()
    engine.load_checkpoint(folder, load_optimizer_states=False)
    assert engine.global_steps == 3
    comm.barrier()


def test_the_state_of_another_optimizer_is_refused(ranks: RankPools, tmp_path: Path) -> None:
    unpack("stage2_bf16_world2", tmp_path)
    ranks(2).run(refuses_another_optimizer, str(tmp_path))


def keeps_its_scale(first: str, second: str) -> None:
    wide = engine_of("stage2_fp16_world2", 1)
    wide.load_checkpoint(first)
    assert wide.loss_scale == 2.0**8  # its own: there was none in bf16
    narrow = engine_of("stage2_bf16_world2", 1)
    narrow.load_checkpoint(second)
    assert narrow.loss_scale == 1.0
    comm.barrier()


def test_a_loss_scale_is_restored_only_if_one_was_saved(ranks: RankPools, tmp_path: Path) -> None:
    folders = [tmp_path / "bf16", tmp_path / "fp16"]
    for folder in folders:
        unpack(f"stage1_{folder.name}_world2", folder)
    ranks(2).run(keeps_its_scale, *map(str, folders))


def loads_without_names(folder: str) -> None:
    engine = engine_of("stage0_bf16_world2", 2)
    saved = Unpacked.read("stage0_bf16_world2", Path(folder))
    engine.load_checkpoint(folder, load_optimizer_states=False)
    assert torch.equal(engine.state_dict()["gain"], saved.tensors["module.gain"])
    comm.barrier()


def test_stage_0_loads_without_its_optimizer(ranks: RankPools, tmp_path: Path) -> None:
    unpack("stage0_bf16_world2", tmp_path)
    ranks(2).run(loads_without_names, str(tmp_path))
