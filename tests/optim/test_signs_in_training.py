"""Optimizers that send signs, in an engine: everything except the values of their updates."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from comm.traffic import counted
from engine.logs import logged
from engine.parts import PARTS, Part as ModelPart, engine_over, megatron
from engine.toys import Leaves, assert_equal, engine_of, train
from ranks import RankPools, on_ranks
from torch import Tensor, nn

import hadal
from hadal import comm
from hadal.comm import collectives
from hadal.config import load_config
from hadal.errors import ConfigError, NotBuiltYetError, OptimizerError
from hadal.optim.build import build_optimizer
from hadal.optim.one_bit import OneBitAdam, OneBitLamb, ZeroOneAdam
from hadal.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
)
from optim.test_signs import (
    KINDS,
    PRECISIONS,
    SHAPES,
    SOONER,
    engine_with,
    gradients_of,
    papers_of,
    step_together,
)

BASE = {"train_batch_size": 1}
LATE = {
    "OneBitAdam": {"freeze_step": 1000},
    "OneBitLamb": {"freeze_step": 1000},
    "ZeroOneAdam": {"var_freeze_step": 1000, "var_update_scaler": 1000},
}
PLAIN = {"OneBitAdam": "Adam", "OneBitLamb": "Lamb", "ZeroOneAdam": "Adam"}
LOCAL = {"var_freeze_step": 2, "local_step_scaler": 1, "local_step_clipper": 4}


def optimizer_of(kind: str, **params: Any) -> dict[str, Any]:
    return {"type": kind, "params": {"lr": 0.01, **params}}


def weights_of(engine: Any) -> dict[str, Tensor]:
    return {name: one.detach().clone() for name, one in engine.module.named_parameters()}


# ---- the updates before -------------------------------------------------------------------------


@pytest.mark.fast_cells("OneBitLamb-fp16", "ZeroOneAdam-fp32", "ZeroOneAdam-fp16")
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2)
def test_the_warm_up_is_the_plain_optimizer_without_correction(kind: str, precision: str) -> None:
    changes = {**PRECISIONS[precision], "gradient_accumulation_steps": 2, "gradient_clipping": 0.3}
    options = {"weight_decay": 0.1, "betas": [0.8, 0.99]}
    found = engine_of(0, optimizer=optimizer_of(kind, **options, **LATE[kind]), **changes)
    plain = {**options, "bias_correction": False}
    known = engine_of(0, optimizer=optimizer_of(PLAIN[kind], **plain), **changes)
    with counted() as traffic:
        losses = train(found, range(8))
    with counted() as plain_traffic:
        plain_losses = train(known, range(8))
    assert traffic.calls == plain_traffic.calls
    assert torch.allclose(torch.stack(losses), torch.stack(plain_losses), rtol=1e-5)
    assert found.get_global_grad_norm() == pytest.approx(known.get_global_grad_norm(), rel=1e-5)
    for mine, theirs in zip(found.module.parameters(), known.module.parameters(), strict=True):
        exact, master = safe_get_full_fp32_param(mine), safe_get_full_fp32_param(theirs)
        assert exact is not None and torch.allclose(exact, master, rtol=1e-5, atol=1e-6)


# ---- bytes ---------------------------------------------------------------------------------------


def wide() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 200), nn.Tanh(), nn.Linear(200, 200), nn.Linear(200, 4))


def bytes_of_updates(kind: str, options: dict[str, Any], updates: int) -> list[int]:
    zero = {"stage": 0}
    engine = engine_of(0, wide(), optimizer=optimizer_of(kind, **options), zero_optimization=zero)
    found = []
    for step in range(updates):
        with counted() as traffic:
            train(engine, range(step, step + 1))
        found.append(traffic.nbytes)
    return found


@pytest.mark.fast_cells("2")
@pytest.mark.parametrize("world", [2, 4])
def test_an_update_sends_a_fourteenth_of_the_bytes_of_bf16(ranks: RankPools, world: int):
    numel = sum(parameter.numel() for parameter in wide().parameters())
    in_bf16 = 2 * (world - 1) / world * numel * torch.bfloat16.itemsize
    for kind in ("OneBitAdam", "OneBitLamb"):
        for found in ranks(world).run(bytes_of_updates, kind, {"freeze_step": 2}, 5):
            assert all(nbytes > in_bf16 for nbytes in found[:2])
            assert all(0 < nbytes <= in_bf16 / 14 for nbytes in found[2:]), found
    for found in ranks(world).run(bytes_of_updates, "ZeroOneAdam", LOCAL, 14):
        # Intervals of 1, 2, 4, 4, 4 at the updates after the second.
        assert [nbytes > 0 for nbytes in found[2:]] == [n in (1, 2, 4, 8, 12) for n in range(1, 13)]
        assert sum(found[2:]) / 12 <= in_bf16 / 14 / 2


# ---- what gradients are like ---------------------------------------------------------------------


@pytest.mark.slow_cells("OneBitAdam")
@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2)
def test_clipping_uses_the_mean_square_of_all_norms(kind: str) -> None:
    options: dict[str, Any] = {"freeze_step": 1} if kind == "OneBitAdam" else {}
    engine = engine_with(kind, options, gradient_clipping=2.0, gradient_accumulation_steps=1)
    papers = papers_of(engine, kind, options)
    for update in range(5):
        of_ranks = [gradients_of(update, rank) for rank in range(comm.get_world_size())]
        stays = next(iter(engine._parts.runtime.gradients)).reduction.stays
        if stays:
            squares = [sum(float(one.square().sum()) for one in mine) for mine in of_ranks]
            norm = math.sqrt(sum(squares) / len(squares))
        else:
            mean = [torch.stack(one).mean(0) for one in zip(*of_ranks, strict=True)]
            norm = math.sqrt(sum(float(one.square().sum()) for one in mean))
        step_together(engine, papers, update, clips=2.0 / (norm + 1e-6))
        assert engine.get_global_grad_norm() == pytest.approx(norm, rel=1e-5)
    assert stays


@pytest.mark.fast_cells("OneBitLamb")
@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2)
def test_an_overflow_in_any_phase_skips_the_update(kind: str) -> None:
    """An update that overflows on one rank is skipped on all, without side effects."""
    engine = engine_with(kind, {}, **PRECISIONS["fp16"])
    papers = papers_of(engine, kind, {})
    for update in range(7):
        if update in (1, 4, 6):
            before, scale = weights_of(engine), engine.loss_scale
            given = [one.half() for one in gradients_of(update, comm.get_rank())]
            if comm.get_rank() == 1:
                given[2][3] = float("inf")
            engine.backward(engine(given))
            engine.step()
            assert engine.overflow and engine.loss_scale == scale / 2
            assert_equal(weights_of(engine), before)
        step_together(engine, papers, update)
        assert not engine.overflow


@on_ranks(2)
def test_micro_steps_add_up() -> None:
    engine = engine_with("OneBitAdam", {}, gradient_accumulation_steps=2)
    known = engine_with("OneBitAdam", {}, gradient_accumulation_steps=1)
    for update in range(6):
        mine = gradients_of(update, comm.get_rank())
        for part in (0.5, 1.5):
            engine.backward(engine([one * part for one in mine]))
            engine.step()
        known.backward(known(mine))
        known.step()
    assert_equal(weights_of(engine), weights_of(known))


@on_ranks(3)
def test_gradients_are_read_as_their_mean() -> None:
    """The gradient that a program sees is the mean, wherever it is stored."""
    engine = engine_with("OneBitAdam", {"freeze_step": 1})
    leaf = engine.module.leaves[0]
    for update in range(3):
        of_ranks = [gradients_of(update, rank)[0] for rank in range(comm.get_world_size())]
        engine.backward(engine(gradients_of(update, comm.get_rank())))
        mean = torch.stack(of_ranks).mean(0)
        found = safe_get_full_grad(leaf)
        assert found is not None and torch.allclose(found, mean, atol=1e-6)
        safe_set_full_grad(leaf, mean * 2)
        found = safe_get_full_grad(leaf)
        assert found is not None and torch.allclose(found, mean * 2, atol=1e-6)
        engine.step()


# ---- what does not move --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (OneBitAdam, {"freeze_step": 2}),
        (OneBitLamb, {"freeze_step": 2}),
        (ZeroOneAdam, {"var_freeze_step": 2}),
    ],
)
@on_ranks(2)
def test_a_mask_keeps_momenta_at_zero(kind: type[Any], options: dict[str, Any]) -> None:
    model = Leaves(((6, 4), (5,), (3, 3)))
    mask = torch.ones(6, 4)
    mask[2:] = 0
    leaves = list(model.leaves)
    groups = [{"params": leaves[1:]}, {"params": leaves[:1], "exp_avg_mask": mask}]
    optimizer = kind(groups, lr=0.02, **options)
    engine = engine_of(0, model, {"optimizer": optimizer}, optimizer=None)
    began = weights_of(engine)["leaves.0"]
    for update in range(8):
        generator = torch.Generator().manual_seed(10 * update + comm.get_rank())
        given = [torch.randn(leaf.shape, generator=generator) for leaf in leaves]
        # A variance that is there, and then no gradient any more.
        given[0][2:] *= float(update == 0) * 1e-3
        engine.backward(engine(given))
        engine.step()
        if update == 3:
            began = weights_of(engine)["leaves.0"]
    engine.eval()
    state = safe_get_full_optimizer_state(leaves[0], "exp_avg")
    assert bool((state[2:] == 0).all()) and bool((state[:2] != 0).all())
    assert torch.equal(weights_of(engine)["leaves.0"][2:], began[2:])
    assert not torch.equal(weights_of(engine)["leaves.0"][:2], began[:2])


def wrongly_masked() -> None:
    model = Leaves(((6, 4), (5,)))
    groups = [{"params": list(model.leaves), "exp_avg_mask": torch.ones(6, 4)}]
    optimizer = OneBitAdam(groups, freeze_step=1)
    engine = engine_of(0, model, {"optimizer": optimizer}, optimizer=None)
    for _ in range(2):
        engine.backward(engine([torch.ones(6, 4), torch.ones(5)]))
        engine.step()


def test_a_mask_that_does_not_fit_is_refused():
    with pytest.raises(
        OptimizerError, match=r"leaves.1 in that group has \(5,\); put the parameters"
    ):
        wrongly_masked()


def without_variance(kind: str) -> str:
    """A row that gets its first gradient too late does not change, which is logged once."""
    params = {"lr": 0.02, **SOONER[kind]}
    with logged() as told:
        engine = engine_of(0, Leaves(((4, 5), (3,))), optimizer={"type": kind, "params": params})
        began = weights_of(engine)["leaves.0"]
        for update in range(8):
            given = [torch.full((4, 5), 1.0 + update + comm.get_rank()), torch.ones(3)]
            if update < 5:
                given[0][1] = 0
            engine.backward(engine(given))
            engine.step()
        engine.eval()
    after = weights_of(engine)["leaves.0"]
    assert torch.equal(after[1], began[1]) and bool((after[0] != began[0]).all())
    return "\n".join(told)


@pytest.mark.parametrize("kind", KINDS)
def test_elements_without_variance_do_not_change_and_are_logged(ranks: RankPools, kind: str):
    first, second = ranks(2).run(without_variance, kind)
    assert first.count("5 elements (first in leaves.0) have had no gradient") == 1
    assert second == ""


# ---- weights that differ meanwhile ---------------------------------------------------------------


def local_engine(**changes: Any) -> Any:
    return engine_of(0, optimizer=optimizer_of("ZeroOneAdam", eps=1e-2, **LOCAL), **changes)


def apart(engine: Any) -> bool:
    """Return whether ranks' weights differ now."""
    flat = torch.cat([parameter.detach().flatten() for parameter in engine.module.parameters()])
    bounds = torch.stack([flat.double(), -flat.double()])
    collectives.max_(bounds, comm.Ranks.world(), "a test")
    return not torch.equal(bounds[0], -bounds[1])


READERS = {
    "eval": lambda engine, folder: engine.eval(),
    "state_dict": lambda engine, folder: engine.state_dict(),
    "a checkpoint": lambda engine, folder: engine.save_checkpoint(folder),
    "the model alone": lambda engine, folder: engine.save_16bit_model(folder),
    "a master": lambda engine, folder: safe_get_full_fp32_param(engine.module[0].weight),
    "its state": lambda engine, folder: safe_get_full_optimizer_state(
        engine.module[0].weight, "exp_avg"
    ),
    "gathered": lambda engine, folder: hadal.zero.GatheredParameters(
        engine.module[0].weight
    ).__enter__(),
    "the end": lambda engine, folder: engine.destroy(),
}


def met(name: str, precision: str, folder: str) -> None:
    engine = local_engine(**PRECISIONS[precision])
    train(engine, range(4))
    assert not apart(engine)
    train(engine, range(4, 5))
    assert apart(engine)
    READERS[name](engine, folder)
    assert not apart(engine)
    if name != "the end":
        engine.train()
        train(engine, range(5, 7))
        assert not apart(engine) if engine.global_steps == 6 else True


@pytest.mark.parametrize("name", READERS)
def test_ranks_exchange_before_weights_are_read(ranks: RankPools, name: str, tmp_path: Path):
    ranks(2).run(met, name, "bf16" if name == "a master" else "fp32", str(tmp_path))


@on_ranks(2)
def test_weights_set_by_hand_are_kept() -> None:
    engine = engine_of(0, optimizer=optimizer_of("ZeroOneAdam", **LOCAL, eps=1e-2, lr=1e-4))
    train(engine, range(5))
    assert apart(engine)
    weight = engine.module[0].weight
    safe_set_full_fp32_param(weight, torch.full_like(weight, 0.25))
    assert bool((weight == 0.25).all()) and not apart(engine)
    train(engine, range(5, 6))
    engine.eval()
    assert bool(((weight - 0.25).abs() < 0.01).all()) and not bool((weight == 0.25).all())


@on_ranks(2)
def test_parameters_frozen_later_are_equal_on_all_ranks() -> None:
    engine = local_engine()
    train(engine, range(5))
    still = engine.module[0].weight
    still.requires_grad_(False)
    train(engine, range(5, 6))
    before = still.detach().clone()
    train(engine, range(6, 9))
    assert torch.equal(still, before)
    engine.eval()
    assert not apart(engine)


@on_ranks(2)
def test_a_learning_rate_of_zero_does_not_divide_by_zero() -> None:
    engine = local_engine()
    train(engine, range(4))
    for group in engine.optimizer.param_groups:
        group["lr"] = 0.0
    train(engine, range(4, 10))
    moments = torch.cat([s["exp_avg"] for s in engine.optimizer.state.values()])
    assert bool(moments.isfinite().all())
    of_ranks = collectives.gather_objects(float(moments.sum()), comm.Ranks.world())
    assert len(set(of_ranks)) == 1
    for group in engine.optimizer.param_groups:
        group["lr"] = 0.01
    train(engine, range(10, 14))
    assert not apart(engine)


@pytest.mark.parametrize("slow", [0.0, 1e-6])
@on_ranks(2)
def test_groups_with_other_rates_do_not_affect_each_other(slow: float) -> None:
    """A group's updates follow its own rate, whichever groups share its blocks."""
    model = Leaves(((8, 4), (5,)))
    fast, slowly = model.leaves
    groups = [{"params": [fast]}, {"params": [slowly], "lr": slow}]
    optimizer = ZeroOneAdam(groups, lr=0.1, eps=1e-2, **LOCAL)
    engine = engine_of(0, model, {"optimizer": optimizer}, optimizer=None)
    assert len({id(one.bucket) for one in engine._parts.runtime.gradients}) == 1
    for update in range(14):
        if update == LOCAL["var_freeze_step"]:
            began = weights_of(engine)
        generator = torch.Generator().manual_seed(10 * update + comm.get_rank())
        engine.backward(
            engine([torch.randn(leaf.shape, generator=generator) for leaf in model.leaves])
        )
        engine.step()
    engine.eval()
    moved = {name: (one - began[name]).abs().max() for name, one in weights_of(engine).items()}
    assert float(moved["leaves.0"]) > 0.1
    assert (slow > 0) == (float(moved["leaves.1"]) > 0)
    assert float(moved["leaves.1"]) <= 200 * slow
    momentum = safe_get_full_optimizer_state(slowly, "exp_avg")
    assert 0 < float(momentum.abs().max()) < 3


# ---- checkpoints ---------------------------------------------------------------------------------


@pytest.mark.fast_cells("OneBitLamb-bf16")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2)
def test_training_resumes_bit_for_bit(kind: str, precision: str, tmp_path: Path) -> None:
    changes = {**PRECISIONS[precision], "optimizer": optimizer_of(kind, **SOONER[kind])}
    engine = engine_of(0, **changes)
    train(engine, range(9))
    engine.save_checkpoint(tmp_path)
    known = train(engine, range(9, 15))
    again = engine_of(0, **changes)
    train(again, range(20, 22))
    again.load_checkpoint(tmp_path)
    found = train(again, range(9, 15))
    assert torch.equal(torch.stack(found), torch.stack(known))
    assert_equal(again.state_dict(), engine.state_dict())


def zero_one_until(last_of_variance: int) -> Any:
    params = {"eps": 1e-2, **LOCAL, "var_freeze_step": last_of_variance, "var_update_scaler": 2}
    return engine_of(0, optimizer=optimizer_of("ZeroOneAdam", **params))


@pytest.mark.fast_cells("3-100")
@pytest.mark.parametrize(("before", "after"), [(100, 3), (3, 100)])
@on_ranks(2)
def test_error_feedback_is_restored_in_its_own_phase(
    before: int, after: int, tmp_path: Path
) -> None:
    """Error feedback of gradients does not carry over to updates, 100 times smaller, or back."""
    engine = zero_one_until(before)
    train(engine, range(8))
    engine.save_checkpoint(tmp_path)
    again = zero_one_until(after)
    again.load_checkpoint(tmp_path)
    assert again._parts.runtime.exchange.memory() is None
    same = zero_one_until(before)
    same.load_checkpoint(tmp_path)
    assert same._parts.runtime.exchange.memory() is not None


def test_a_variance_can_be_learnt_again():
    """A run resumes with a later `freeze_step`: the factor starts at 1 from the new one."""
    leaf = nn.Parameter(torch.ones(4))
    optimizer = OneBitLamb([leaf], lr=0.01, freeze_step=2)

    def step(magnitude: float) -> dict[str, Tensor]:
        leaf.grad = torch.full((4,), magnitude)
        optimizer.step()
        return optimizer.state[leaf]

    for _ in range(6):
        before = step(1.0)
    assert float(before["last_factor"]) < 1
    optimizer.freeze_step = 9
    for _ in range(3):
        again = step(30.0)
    assert "last_factor" not in again
    kept = again["exp_avg_sq"].clone()
    after = step(30.0)
    assert torch.allclose(after["exp_avg_sq_fresh"], 0.999 * kept + 0.001 * 30.0**2)
    assert float(after["last_factor"]) == pytest.approx(0.9)


def engine_of_sixteenths(kind: str) -> Any:
    """Return an engine whose buckets have equal length on one and two ranks."""
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4, bias=False))
    section = optimizer_of(kind, **SOONER[kind])
    return engine_of(0, model, optimizer=section, zero_optimization={"stage": 0})


def saved(kind: str, folder: str) -> dict[str, Tensor]:
    engine = engine_of_sixteenths(kind)
    train(engine, range(9))
    engine.save_checkpoint(folder)
    return engine.state_dict()


def loaded_elsewhere(kind: str, folder: str) -> tuple[dict[str, Tensor], str]:
    engine = engine_of_sixteenths(kind)
    with logged() as told:
        engine.load_checkpoint(folder)
    assert engine._parts.runtime.exchange.memory() is None
    weights = engine.state_dict()
    if kind == "OneBitLamb":
        ratio = safe_get_full_optimizer_state(engine.module[0].weight, "lamb_coeff_freeze")
        assert float(ratio) > 0
    for loss in train(engine, range(9, 14)):
        assert bool(loss.isfinite())
    assert not apart(engine) or kind == "ZeroOneAdam"
    return weights, "\n".join(told)


@pytest.mark.fast_cells("OneBitLamb-3")
@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_other_ranks_resume_without_error_feedback(
    ranks: RankPools, kind: str, world: int, tmp_path: Path
):
    weights = ranks(2).run(saved, kind, str(tmp_path))[0]
    results = ranks(world).run(loaded_elsewhere, kind, str(tmp_path))
    for found, _ in results:
        assert_equal(found, weights)
    assert [told.count("error feedback") for _, told in results] == [1] + [0] * (world - 1)


# ---- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [OneBitAdam, OneBitLamb, ZeroOneAdam])
def test_amsgrad_is_refused(kind: type[Any]):
    with pytest.raises(OptimizerError, match="does not support amsgrad"):
        kind([nn.Parameter(torch.ones(2))], amsgrad=True)


@pytest.mark.parametrize("stage", [1, 2, 3])
@on_ranks(2)
def test_partitioned_state_is_refused(stage: int) -> None:
    model = Leaves(SHAPES)
    with pytest.raises(OptimizerError, match="OneBitAdam needs zero_optimization"):
        engine_of(stage, model, {"optimizer": OneBitAdam(model.parameters())}, optimizer=None)


@on_ranks(4)
def test_model_parallel_models_are_refused() -> None:
    wishes = {"mpu": megatron(), "optimizer": lambda given: ZeroOneAdam(given)}
    with pytest.raises(
        NotBuiltYetError, match="ZeroOneAdam is not built yet for model-parallel models"
    ):
        engine_over(0, ModelPart(comm.get_rank() % PARTS), wishes=wishes)


def refused_in_16_bits() -> None:
    model = Leaves(SHAPES)
    masters = {"amp": {"enabled": True, "opt_level": "O3", "loss_scale": 1.0}}
    wishes = {"optimizer": OneBitLamb(model.parameters())}
    with pytest.raises(OptimizerError, match="OneBitLamb keeps its state in the dtype of the mas"):
        engine_of(0, model, wishes, optimizer=None, **masters)


def test_masters_in_16_bits_are_refused():
    refused_in_16_bits()


def refused_later() -> None:
    model = Leaves(((4, 2), (3,)))
    first = [{"params": [model.leaves[0]]}]
    engine = engine_of(0, model, {"optimizer": OneBitAdam(first, freeze_step=2)}, optimizer=None)
    for _ in range(2):
        engine.backward(engine([torch.ones(4, 2), torch.ones(3)]))
        engine.step()
    with pytest.raises(OptimizerError, match="added after update 2"):
        engine.optimizer.add_param_group({"params": [model.leaves[1]]})


def test_a_group_without_a_variance_is_refused():
    refused_later()


@pytest.mark.claims(
    "optimizer.params{type=OneBitAdam|ZeroOneAdam|OneBitLamb}.max_grad_norm",
    "optimizer.params{type=OneBitAdam|ZeroOneAdam|OneBitLamb}.amsgrad",
)
@pytest.mark.parametrize("kind", KINDS)
def test_unsupported_params_are_refused_with_their_path(kind: str):
    for key, given, remedy in (("max_grad_norm", 1.0, "gradient_clipping"), ("amsgrad", True, "")):
        with pytest.raises(ConfigError) as caught:
            load_config({**BASE, "optimizer": optimizer_of(kind, **{key: given})})
        (fault,) = caught.value.faults
        assert fault.path == f"optimizer.params.{key}" and remedy in fault.message


def as_if_left_out(kind: str) -> None:
    more = {"bias_correction": False, "cuda_aware": True, "comm_backend_name": "compressed"}
    found = engine_of(0, optimizer=optimizer_of(kind, **SOONER[kind], **more))
    known = engine_of(0, optimizer=optimizer_of(kind, **SOONER[kind]))
    assert torch.equal(torch.stack(train(found, range(8))), torch.stack(train(known, range(8))))


@pytest.mark.fast_cells("OneBitAdam")
@pytest.mark.claims(
    "optimizer.params{type=OneBitAdam|ZeroOneAdam|OneBitLamb}.bias_correction",
    "optimizer.params{type=OneBitAdam|ZeroOneAdam|OneBitLamb}.cuda_aware",
    "optimizer.params{type=OneBitAdam|ZeroOneAdam|OneBitLamb}.comm_backend_name",
)
@pytest.mark.parametrize("kind", KINDS)
def test_params_without_effect_are_reported(ranks: RankPools, kind: str):
    more = {"bias_correction": False, "cuda_aware": True, "comm_backend_name": "MPI"}
    notes = load_config({**BASE, "optimizer": optimizer_of(kind, **more)}).notes
    for key in more:
        assert any(f"optimizer.params.{key}" in note and "no effect" in note for note in notes)
    ranks(2).run(as_if_left_out, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_steps_without_an_engine_equal_those_of_an_engine(kind: str):
    options = {"lr": 0.02, **SOONER[kind]}
    model = Leaves(SHAPES)
    leaves = list(model.leaves)
    optimizer = build_optimizer(kind, options, leaves)
    engine = engine_with(kind, {"eps": 1e-8})
    for update in range(8):
        given = gradients_of(update, 0)
        engine.backward(engine(given))
        engine.step()
        for leaf, gradient in zip(leaves, given, strict=True):
            leaf.grad = gradient
        optimizer.step()
    engine.eval()
    for found, known in zip(leaves, engine.module.leaves, strict=True):
        assert torch.allclose(found, known, rtol=1e-4, atol=1e-5)
