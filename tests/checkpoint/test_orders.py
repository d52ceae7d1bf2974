"""Parameters in channels_last or transposed: stepped, saved and loaded like contiguous ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from cases import every
from engine.toys import TINY, Leaves, assert_equal, engine_of, given_gradients
from ranks import RankPools
from safetensors.torch import load_file
from torch import Tensor, nn

from hadal import comm
from hadal.checkpoint.export import state_dict_of
from hadal.checkpoint.index import read_index
from hadal.checkpoint.opening import open_source
from hadal.comm.collectives import gather_objects
from hadal.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from hadal.zero.place import place_of

SHAPES = ((6, 4, 3, 3), (5, 7), (4, 1, 3, 3), (3, 2, 1, 1), (9,), (5, 3, 2))
BF16 = {"bf16": {"enabled": True}}


class Adafactor(torch.optim.Adafactor):
    """An optimizer with a matrix's rows and columns as state, which have other shapes."""


class WholeAdam(torch.optim.AdamW):
    """Adam under a name not known to be elementwise, so it steps whole parameters."""


def leaves(*, strided: bool, seed: float = 0.0) -> Leaves:
    model = Leaves(SHAPES)
    with torch.no_grad():
        for leaf in model.leaves:
            leaf.add_(seed)
            if strided and leaf.dim() == 4:
                leaf.data = leaf.contiguous(memory_format=torch.channels_last)
            elif strided:
                turned = leaf.permute(*reversed(range(leaf.dim()))).contiguous()
                leaf.data = turned.permute(*reversed(range(leaf.dim())))
    return model


def engine(stage: int, optimizer: Any, model: nn.Module, offload: Any = None, **more: Any) -> Any:
    zero = {"stage": stage, **TINY, **({"offload_optimizer": offload} if offload else {})}
    if isinstance(optimizer, dict):
        return engine_of(stage, model, zero_optimization=zero, optimizer=optimizer, **more)
    wishes = {"optimizer": lambda group: optimizer(group, lr=0.01)}
    return engine_of(stage, model, wishes, zero_optimization=zero, optimizer=None, **more)


def train(engine: Any, steps: range) -> None:
    dtype = next(engine.module.parameters()).dtype
    for step in steps:
        given = given_gradients(SHAPES, step, 0)  # the same on all ranks
        engine.backward(engine([gradient.to(dtype) for gradient in given]))
        engine.step()


def values_of(engine: Any) -> dict[str, Tensor]:
    """Return weights, masters and state by name, whole, in their shapes."""
    found = {name: value.clone() for name, value in engine.state_dict().items()}
    for name, parameter in engine.module.named_parameters():
        found[f"{name}.master"] = safe_get_full_fp32_param(parameter)
        place = place_of(parameter)
        with place.present(writes=False):
            state = place.state_slice()
        keys = [] if state is None else list(state.state)
        of_all = gather_objects(keys, comm.Ranks.world())
        for key in sorted({key for own in of_all for key in own}):
            value = safe_get_full_optimizer_state(parameter, key)
            if isinstance(value, Tensor):
                found[f"{name}.{key}"] = value.clone()
    return found


def same(found: dict[str, Tensor], expected: dict[str, Tensor], *, exact: bool) -> None:
    if exact:
        assert_equal(found, expected)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6, msg=name)


def in_both_orders(stage: int, optimizer: Any, exact: bool, folder: str | None) -> None:
    offload = folder and {"device": "nvme", "nvme_path": folder}
    found = []
    for strided in (False, True):
        trained = engine(stage, optimizer, leaves(strided=strided), offload)
        train(trained, range(4))
        found.append(values_of(trained))
        trained.destroy()
    same(found[1], found[0], exact=exact)


OPTIMIZERS: dict[str, tuple[Any, bool]] = {
    "adam": ({"type": "AdamW", "params": {"lr": 0.01}}, True),
    "lion": ({"type": "Lion", "params": {"lr": 0.01}}, True),
    "lamb": ({"type": "Lamb", "params": {"lr": 0.01}}, False),
    "muon": ({"type": "Muon", "params": {"lr": 0.01}}, False),
    "whole": (WholeAdam, True),
    "adafactor": (Adafactor, False),
}


@pytest.mark.fast_cells("muon-3")
@every(name=list(OPTIMIZERS), stage=range(4))
def test_updates_are_those_of_contiguous_parameters(
    name: str, stage: int, ranks: RankPools
) -> None:
    ranks(2).run(in_both_orders, stage, *OPTIMIZERS[name], None)


@pytest.mark.fast_cells("ZeroOneAdam")
@pytest.mark.parametrize("kind", ["OneBitAdam", "OneBitLamb", "ZeroOneAdam"])
def test_optimizers_that_send_signs(kind: str, ranks: RankPools) -> None:
    """Before they send signs: in another order, other elements share the scale of a block."""
    late = {"var_freeze_step": 100} if kind == "ZeroOneAdam" else {"freeze_step": 100}
    optimizer = {"type": kind, "params": {"lr": 0.01, **late}}
    ranks(2).run(in_both_orders, 0, optimizer, kind != "OneBitLamb", None)


@pytest.mark.fast_cells("muon")
@pytest.mark.parametrize("name", ["adam", "muon", "whole"])
def test_updates_on_a_disk(name: str, tmp_path: Path, ranks: RankPools) -> None:
    ranks(2).run(in_both_orders, 2, *OPTIMIZERS[name], str(tmp_path))


# ---- saved and loaded ----------------------------------------------------------------------------


def save(folder: str, optimizer: Any, settings: dict[str, Any], stages: tuple[int, ...]) -> None:
    for stage in stages:
        for strided in (False, True):
            name = f"s{stage}w{comm.get_world_size()}{'t' * strided}"
            saved = engine(stage, optimizer, leaves(strided=strided), **settings)
            train(saved, range(3))
            saved.save_checkpoint(folder, name)
            whole = [values_of(saved)]
            state = saved._consolidated_16bit_state_dict()
            saved.save_16bit_model(folder, f"{name}.safetensors")
            train(saved, range(3, 5))
            whole.append(values_of(saved))
            if comm.get_rank() == 0:
                torch.save([*whole, state], Path(folder, f"{name}.pt"))
            saved.destroy()


def load(
    folder: str, optimizer: Any, settings: dict[str, Any], stages: tuple[int, ...], exact: bool
) -> None:
    names = sorted(path.stem for path in Path(folder).glob("*.pt"))
    for stage in stages:
        for strided in (False, True):
            loaded = engine(stage, optimizer, leaves(strided=strided, seed=1.0), **settings)
            for name in names:
                before, after, _ = torch.load(Path(folder, f"{name}.pt"))
                loaded.load_checkpoint(folder, name)
                same(values_of(loaded), before, exact=True)
                train(loaded, range(3, 5))
                same(values_of(loaded), after, exact=exact)
            loaded.destroy()


KEPT = {
    "flat": (OPTIMIZERS["adam"][0], {}, (0, 3), True),
    "signs": ({"type": "OneBitLamb", "params": {"lr": 0.01, "freeze_step": 99}}, {}, (0,), False),
    "bf16": (OPTIMIZERS["adam"][0], BF16, (3,), True),
    "whole": (WholeAdam, {}, (2,), True),
    "muon": (OPTIMIZERS["muon"][0], BF16, (2,), False),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", KEPT)
def test_any_order_loads_into_any_other(name: str, tmp_path: Path, ranks: RankPools) -> None:
    optimizer, settings, stages, exact = KEPT[name]
    ranks(2).run(save, str(tmp_path), optimizer, settings, stages)
    ranks(2).run(load, str(tmp_path), optimizer, settings, stages, exact)
    ranks(3).run(load, str(tmp_path), optimizer, settings, stages[-1:], exact)
    for path in tmp_path.glob("*.pt"):
        values, _, whole = torch.load(path)
        weights = {name: value for name, value in values.items() if name in whole}
        assert_equal(dict(whole), weights)
        tag = tmp_path / path.stem
        index = read_index(tag)
        orders = [slot[4:] for b in index["parts"][0]["buckets"] for slot in b["slots"]]
        assert any(orders) == path.stem.endswith("t")
        exported = state_dict_of(open_source(tag), torch.float32)
        masters = {name: values[f"{name}.master"] for name in weights}
        assert_equal(dict(exported), masters)
        file = tmp_path / f"{path.stem}.safetensors"
        if file.exists():  # not at stage 3
            for key, value in load_file(file).items():
                assert torch.equal(value, whole[key])
