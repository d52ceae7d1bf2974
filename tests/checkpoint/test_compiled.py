"""Models compiled before `initialize` are saved under the same names as uncompiled ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine.toys import assert_equal, engine_of, train
from ranks import RankPools
from safetensors import safe_open
from torch import nn

from hadal.checkpoint.export import state_dict_of
from hadal.checkpoint.opening import opened


class Model(nn.Module):
    """A model with a tied parameter, a buffer and extra state."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(6, 9)
        self.norm = nn.BatchNorm1d(9)
        self.second = nn.Linear(9, 4)
        self.tied = self.second
        self.seed = seed

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.tied(self.norm(self.first(inputs)).tanh())

    def get_extra_state(self) -> dict[str, int]:
        return {"seed": self.seed}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.seed = state["seed"]


def model_as(kind: str, seed: int) -> tuple[nn.Module, Model]:
    """Return the module to pass to `initialize`, and the model in it."""
    model = Model(seed)
    if kind == "whole":
        return torch.compile(model, backend="eager"), model
    if kind == "within":
        model.first = torch.compile(model.first, backend="eager")
    return model, model


def plain(state: dict[str, Any]) -> dict[str, Any]:
    values = {name.replace("_orig_mod.", ""): value for name, value in state.items()}
    return {
        name: value.clone() for name, value in values.items() if isinstance(value, torch.Tensor)
    }


def save_and_load(stage: int, saved: str, loaded: str, folder: str) -> None:
    changes = {"bf16": {"enabled": True}}
    changes["zero_optimization"] = {
        "stage": stage,
        "stage3_gather_16bit_weights_on_model_save": True,
    }
    given, model = model_as(saved, 3)
    engine = engine_of(stage, given, **changes)
    train(engine, range(2))
    engine.save_checkpoint(folder, "x")
    assert engine.save_16bit_model(folder + "/out")
    again, other = model_as(loaded, 5)
    second = engine_of(stage, again, **changes)
    second.load_checkpoint(folder, "x")
    assert other.seed == model.seed == 3
    expected = plain(engine.module_state_dict())
    assert_equal(plain(second.module_state_dict()), expected)
    losses = torch.stack(train(engine, range(2, 4)))
    assert torch.equal(torch.stack(train(second, range(2, 4))), losses)

    def put(src: dict[str, Any], dst: nn.Module) -> None:
        assert not dst.load_state_dict(src, strict=False).unexpected_keys

    second.load_checkpoint(folder, "x", custom_load_fn=put)
    assert_equal(plain(second.module_state_dict()), expected)
    second.destroy()
    engine.destroy()


@pytest.mark.fast_cells("3-within-whole")
@pytest.mark.parametrize(
    ("stage", "saved", "loaded"), [(3, "whole", "not"), (1, "not", "whole"), (3, "within", "whole")]
)
def test_compiled_and_not_read_each_other(
    stage: int, saved: str, loaded: str, ranks: RankPools, tmp_path: Path
) -> None:
    ranks(2).run(save_and_load, stage, saved, loaded, str(tmp_path))
    names = set(Model(3).state_dict()) - {"_extra_state"}
    assert set(state_dict_of(opened(tmp_path, "x"), None)) == names
    assert "_orig_mod" not in (tmp_path / "x" / "index.json").read_text()
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        written = set(file.keys())
        aliases = {alias for alias in file.metadata() if alias in names}
    assert written | aliases == names
