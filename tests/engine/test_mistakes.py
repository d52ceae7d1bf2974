"""Errors of torch and Python that a mistake with an engine causes name the mistake."""

from __future__ import annotations

import traceback
from typing import Any

import pytest
import torch
from ranks import RankPools, on_ranks
from torch import nn

from engine.toys import ByNorm, engine_of, model_of, train
from hadal.engine.mistakes import missing_attribute, mixed_dtypes
from hadal.errors import CheckpointError, MissingAttributeError, OptimizerError, UsageError
from hadal.optim.muon import Muon


class WithProperty(nn.Linear):
    """A module whose property fails."""

    @property
    def broken(self) -> Any:
        raise AttributeError("the inner reason")


@on_ranks(1)
def test_a_missing_attribute_is_the_engines() -> None:
    engine = engine_of(1, WithProperty(6, 4))
    assert engine.in_features == 6
    with pytest.raises(AttributeError, match=r"neither the engine nor its module \(WithProperty\)"):
        engine.save_chekpoint("somewhere")
    with pytest.raises(MissingAttributeError, match=r"pipeline engines, .* With this model call"):
        engine.train_batch()
    assert getattr(engine, "train_batch", None) is None
    try:
        engine.train_batch()
    except AttributeError:
        assert "Did you mean" not in traceback.format_exc()
    with pytest.raises(AttributeError, match=r"^'WithProperty' object has no"):
        _ = engine.broken
    assert not hasattr(engine, "nothing")
    try:
        engine.save_chekpoint  # noqa: B018
    except AttributeError as error:
        # Python's traceback looks for a similar name in it.
        assert (error.name, error.obj) == ("save_chekpoint", engine)
    engine.destroy()


@on_ranks(1)
def test_inputs_of_another_dtype_are_named() -> None:
    engine = engine_of(1, model_of(), bf16={"enabled": True})
    with pytest.raises(UsageError, match=r"bfloat16 and its inputs float32 .*x.to\(torch.bfloat16"):
        engine(torch.ones(3, 6))
    engine.destroy()
    engine = engine_of(1, model_of())
    with pytest.raises(UsageError, match=r"float32 and its inputs float64 .*x.to\(torch.float32"):
        engine(torch.ones(3, 6, dtype=torch.float64))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
        engine(torch.ones(3, 7))
    assert not isinstance(caught.value, UsageError)
    engine.destroy()


def test_an_error_inside_the_model_is_left_alone() -> None:
    told = "expected m1 and m2 to have the same dtype"
    model, half = model_of(), torch.ones(2, dtype=torch.float16)
    assert mixed_dtypes(told, (torch.ones(2),), {}, model) is None
    assert mixed_dtypes("no memory", (half,), {}, model) is None
    assert mixed_dtypes(told, (torch.ones(2, dtype=torch.int64),), {}, model) is None
    found = mixed_dtypes(told, (), {"inputs": [half]}, model.half().float())
    assert found is not None
    assert "its inputs float16" in found
    assert "torch_autocast" not in found


def test_a_method_of_another_engine_names_its_substitute() -> None:
    error = missing_attribute("eval_batch", model_of(), model_of())
    assert "torch.no_grad()" in str(error)


def go_back_twice(stage: int) -> str:
    engine = engine_of(stage, model_of())
    loss = engine(torch.ones(3, 6)).sum()
    engine.backward(loss)
    with pytest.raises(UsageError) as caught:
        engine.backward(loss)
    with pytest.raises(UsageError, match="has no gradients"):
        engine.step()  # a backward that raises drops them
    loss = engine(torch.ones(3, 6)).sum()
    engine.backward(loss, retain_graph=True)
    engine.backward(loss)
    engine.step()
    engine.destroy()
    return str(caught.value)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_second_backward_of_a_loss_is_told(stage: int, ranks: RankPools) -> None:
    for rank, told in enumerate(ranks(2).run(go_back_twice, stage)):
        assert told.startswith(f"rank {rank}: the graph of this loss was used up")
        assert "retain_graph=True" in told and "detach()" in told


@pytest.mark.fast_cells("3")
@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(2)
def test_edited_param_groups_are_an_error(stage: int) -> None:
    kinds: list[Any] = [torch.optim.AdamW, torch.optim.SGD, Muon, ByNorm]
    for kind in kinds:
        model = model_of()
        group: dict[str, Any] = {"params": [p for p in model.parameters() if p.dim() == 2]}
        optimizer = kind([group | ({"use_muon": True} if kind is Muon else {})], lr=0.01)
        engine = engine_of(stage, model, {"optimizer": optimizer}, optimizer=None)
        groups = engine.optimizer.param_groups
        train(engine, range(1))

        def expect_error(found: str, engine: Any = engine) -> None:
            engine.backward(engine(torch.ones(3, 6)).sum())
            with pytest.raises(OptimizerError, match=found):
                engine.step()

        stranger = nn.Parameter(torch.ones(2, 2))
        groups.append({**groups[0], "params": [stranger]})
        expect_error("has 2 param groups, expected 1")
        del groups[1:]
        groups[0]["params"].append(stranger)
        expect_error(r'other tensors in param_groups\[0\]\["params"\].*add_param_group')
        groups[0]["params"].pop()
        kept = groups[:]
        groups.clear()
        expect_error("has 0 param groups, expected 1")
        groups.extend(kept)
        groups[0]["lr"] = 0.005
        engine.optimizer.load_state_dict(engine.optimizer.state_dict())
        train(engine, range(1, 3))
        engine.destroy()


@on_ranks(1)
def test_a_checkpoint_needs_a_directory() -> None:
    engine = engine_of(1, model_of())
    for place in ("", None, 3):
        with pytest.raises(CheckpointError, match=rf"directory is {place!r}, expected a path"):
            engine.save_checkpoint(place)
        with pytest.raises(CheckpointError, match=rf"directory is {place!r}, expected a path"):
            engine.load_checkpoint(place)
    engine.destroy()
