"""States that leave the device between two updates, and come back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
from ranks import RankPools, on_ranks
from torch.testing._internal.two_tensor import TwoTensor

import hadal
from hadal import utils
from hadal.compat.install import alias
from hadal.compat.optimizer import DeepSpeedOptimizer
from hadal.engine import graph_passes, state_offload
from hadal.errors import NotBuiltYetError, UsageError
from hadal.offload.crossing import Crossing

from .toys import assert_equal, backward, batch_of, engine_of, loss_of, model_of, train

STATES = [state.value for state in state_offload.MovableState]


def held_nbytes(engine: Any) -> int:
    """Bytes of everything that the engine keeps between updates."""
    parts = engine._parts
    tensors = [p.data for p in engine.module.parameters()]
    for bucket in parts.runtime.buckets:
        tensors += [bucket.full, bucket.shard, *([] if bucket.master is None else [bucket.master])]
    for gradients in parts.runtime.gradients:
        tensors += [one for one in gradients.tensors()]
    for state in engine.optimizer.state.values():
        tensors += [v for v in state.values() if isinstance(v, torch.Tensor) and v.dim()]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def move_and_go_on(stage: int, dtype: str, optimizer: str, includes: Sequence[Any]) -> None:
    plain, state_offload.is_host_memory = state_offload.is_host_memory, lambda device: False
    changes = {
        "optimizer": {"type": optimizer, "params": {"lr": 0.01}},
        **({dtype: {"enabled": True}} if dtype != "fp32" else {}),
    }
    try:
        engine = engine_of(stage, **changes)
        for number, include in enumerate(includes):
            train(engine, range(2 * number, 2 * number + 2))
            before = held_nbytes(engine)
            engine.offload_states(include=include)
            after = held_nbytes(engine)
            assert after < before / 8 if include is None else after < before, include
            for use in (
                lambda: engine(batch_of(0)[0]),
                engine.step,
                engine.offload_states,
                engine.state_dict,
                lambda: engine.save_checkpoint("nowhere"),
                lambda: utils.safe_get_full_fp32_param(engine.module[0].weight),
                lambda: hadal.zero.GatheredParameters([engine.module[0].weight]).__enter__(),
            ):
                with pytest.raises(UsageError, match="reload_states"):
                    use()
            engine.reload_states()
            engine.reload_states()
            assert held_nbytes(engine) == before
        train(engine, range(2 * len(includes), 2 * len(includes) + 2))
        found = engine.state_dict()
        engine.destroy()
    finally:
        state_offload.is_host_memory = plain
    untouched = engine_of(stage, **changes)
    train(untouched, range(2 * len(includes) + 2))
    assert_equal(found, untouched.state_dict())
    untouched.destroy()


@pytest.mark.fast_cells("3")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_states_leave_the_device_and_come_back(stage: int, ranks: RankPools) -> None:
    includes = [None, ["optim_states"], ["lp_params", "hp_params"], ["lp_grads"]]
    ranks(2).run(move_and_go_on, stage, "bf16", "AdamW", includes)
    ranks(2).run(move_and_go_on, stage, "fp32", "Adafactor" if stage else "Lamb", [None])


@on_ranks(2)
def test_parameters_that_cannot_move_are_refused() -> None:
    engine = engine_of(3)
    with pytest.raises(UsageError, match=r"include=\['weights'\].*expected some of optim_states"):
        engine.offload_states(include=["weights"])
    with pytest.raises(UsageError, match='expected "cpu"'):
        engine.offload_states(device="nvme")
    inputs, targets = batch_of(0)
    loss = loss_of(engine(inputs), targets)
    engine.backward(loss)
    engine.offload_states()  # between micro-steps, or before a step: gradients go along
    engine.reload_states()
    engine.step()
    with (
        hadal.zero.GatheredParameters(list(engine.module.parameters())),
        pytest.raises(UsageError, match="inside forward, backward or GatheredParameters"),
    ):
        engine.offload_states()
    engine.offload_states()
    engine.destroy()  # whatever was away is back
    for mine, given in zip(engine.module.parameters(), model_of().parameters(), strict=True):
        assert mine.shape == given.shape and bool(mine.isfinite().all())


@on_ranks(1)
def test_states_inside_of_other_tensors_move() -> None:
    """As those of optimizers with 8-bit states."""
    engine = engine_of(2)
    train(engine, range(1))
    first = next(iter(engine.optimizer.state.values()))
    moment = first["exp_avg"]
    first["exp_avg"] = TwoTensor(moment.clone(), moment.clone())
    first["rows"] = moment.to_sparse()
    with patch.object(state_offload, "is_host_memory", lambda device: False):
        engine.offload_states(["optim_states"])
        assert not first["exp_avg"].b.untyped_storage().nbytes()
        engine.reload_states()
    assert torch.equal(first["exp_avg"].b, moment) and first["rows"].values().any()
    engine.destroy()


# ---- graph passes, which ask for it --------------------------------------------------------------


def test_a_schedule_of_deepspeeds_passes_is_followed() -> None:
    passes = "deepspeed.compile.passes"
    gather = alias(f"{passes}.zero3_compile").add_z3_gather_release
    prefetch, states = alias(f"{passes}.prefetch"), alias(f"{passes}.offload_adam_states")
    assert prefetch.NAME == "prefetch"
    engine = engine_of(3)
    engine.compile(
        backend="eager",
        schedule=[
            (0, [states.offload_adam_states_for_init, gather, states.move_opt_states_sync]),
            (2, (gather, prefetch.schedule_prefetch, "selective_gather")),
            (5, [gather, states.move_opt_states]),
        ],
    )
    moved = [graph_passes.moves_states(engine._state.moves, update) for update in range(7)]
    assert moved == [True, True, False, False, False, True, True]
    with pytest.raises(UsageError, match=r"engine\.compile\(schedule="):
        gather(None, 0, [], None, None, 0, None, False)


def _state_of(engine: Any) -> list[torch.Tensor]:
    given = engine.optimizer.state_dict()["state"].values()
    return [value for one in given for value in one.values() if isinstance(value, torch.Tensor)]


ADAM: dict[str, Any] = {"type": "AdamW", "params": {"lr": 0.01}}
LOCAL = {"lr": 0.01, "var_freeze_step": 2, "local_step_scaler": 1, "local_step_clipper": 4}
LOOKS: dict[str, tuple[dict[str, Any], Callable[[Any], Any]]] = {
    "its state_dict": (ADAM, _state_of),
    "its state": (ADAM, lambda engine: DeepSpeedOptimizer(engine.optimizer, engine, stage=0).state),
    "eval": ({"type": "ZeroOneAdam", "params": LOCAL}, lambda engine: engine.eval().train()),
}


@pytest.mark.parametrize("look", LOOKS)
@on_ranks(2)
def test_a_look_in_a_pass_brings_the_state_back(look: str) -> None:
    optimizer, act = LOOKS[look]
    weights = []
    with patch.object(state_offload, "is_host_memory", lambda device: False):
        for moves in (False, True):
            section = {"deepcompile": moves, "offload_opt_states": moves}
            engine = engine_of(0, optimizer=optimizer, compile=section)
            train(engine, range(4))
            backward(engine, 4)
            engine.step()  # ranks' weights differ now, with ZeroOneAdam
            backward(engine, 5)
            assert bool(engine._state.moved) == moves
            act(engine)
            assert not engine._state.moved
            assert all(v.untyped_storage().nbytes() for v in _state_of(engine))
            engine.step()
            weights.append(engine.state_dict())
            engine.destroy()
    assert_equal(*weights)


@on_ranks(1)
def test_states_without_room_on_the_device_come_back_later() -> None:
    """A program may catch the error, free what it holds, and train on."""
    given = iter([False, True])  # of each update's two tensors, the second has no room
    bring = Crossing.bring

    def crowded(*args: Any, **kwargs: Any) -> Any:
        if next(given, False):
            raise torch.OutOfMemoryError("full")
        return bring(*args, **kwargs)

    section = {"deepcompile": True, "offload_opt_states": True}
    engine, plain = engine_of(2, compile=section), engine_of(2)
    with patch.object(state_offload, "is_host_memory", lambda device: False):
        train(engine, range(2))
        backward(engine, 2)
        with patch.object(Crossing, "bring", crowded), pytest.raises(torch.OutOfMemoryError):
            engine.step()
        assert engine._state.moved
        engine.zero_grad()
        train(engine, range(3, 5))
    train(plain, range(2))
    train(plain, range(3, 5))
    assert_equal(engine.state_dict(), plain.state_dict())
    engine.destroy()
    plain.destroy()


@pytest.mark.parametrize(
    ("schedule", "error", "text"),
    [
        ([(0, ["zero3_compile"])], UsageError, "zero3_compile of stage 3 at"),
        ([(0, ["prefetching"])], UsageError, "'prefetching', expected some of zero1_compile"),
        ([(0, [print])], UsageError, r"engine\.compile\(backend=function\)"),
        ([(3, []), (3, [])], UsageError, "update 3 after 3"),
        ([(0, "prefetch")], UsageError, r"\(0, 'prefetch'\), expected pairs"),
        (["prefetch"], UsageError, "'prefetch', expected pairs"),
        ([("0", [])], UsageError, r"\('0', \[\]\), expected pairs"),
        ([(0, ["offload_parameters"])], NotBuiltYetError, "offload_param keeps"),
    ],
)
def test_a_schedule_that_cannot_be_followed_is_refused(
    schedule: Any, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        graph_passes.moves_of(schedule, 2)


def test_inputs_of_autosp_are_the_same_tensors_of_any_length() -> None:
    prepare = alias("deepspeed.compile.passes.sp_compile").prepare_autosp_inputs
    tokens, labels = torch.zeros(2, 8, dtype=torch.long), torch.zeros(2, 8, dtype=torch.long)
    found = prepare(tokens, label_id=labels)
    assert found[0] is tokens and found[1] is labels and found[2:] == (None, None)
    assert tokens._dynamo_dynamic_indices == {1}  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match=r"position_id has the shape \(8,\)"):
        prepare(tokens, labels, torch.zeros(8))
