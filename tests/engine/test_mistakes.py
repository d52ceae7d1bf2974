"""Errors of torch and Python that a mistake with an engine causes name the mistake."""

from __future__ import annotations

import traceback
from typing import Any

import pytest
import torch
from ranks import RankPools
from torch import nn

from engine.toys import engine_of, model_of
from hadal.engine.mistakes import missing_attribute, mixed_dtypes
from hadal.errors import MissingAttributeError, UsageError


class WithProperty(nn.Linear):
    """A module whose property fails."""

    @property
    def broken(self) -> Any:
        raise AttributeError("the inner reason")


def look_for_attributes() -> None:
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


def test_a_missing_attribute_is_the_engines(ranks: RankPools) -> None:
    ranks(1).run(look_for_attributes)


def give_other_dtypes() -> None:
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


def test_inputs_of_another_dtype_are_named(ranks: RankPools) -> None:
    ranks(1).run(give_other_dtypes)


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
    engine.step()
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
