"""Packed models in folders."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from compression.toys import TOKENS, Bert, config, inputs, weights
from hadal.errors import ModelError, UsageError
from hadal.plugins.compression import (
    init_compression,
    load_packed,
    pack_weights,
    redundancy_clean,
    save_packed as save,
)
from hadal.plugins.compression.packed import packed_modules

NOW = {"quantize_weight_in_forward": True}


@pytest.mark.parametrize("calibration", ["dynamic", "static"])
def test_a_saved_model_computes_the_same_elsewhere(tmp_path: Path, calibration):
    wishes = config(
        weights(4, 4, modules=["*"], **NOW),
        inputs(8, ["attention"], range_calibration=calibration),
    )
    model = init_compression(Bert(), wishes)
    model(TOKENS)
    redundancy_clean(model.eval(), wishes)
    dense = tmp_path / "dense.safetensors"
    save_file(model.state_dict(), dense)
    pack_weights(model)
    path = save(model, tmp_path / "packed")
    for source in (path, path.parent):
        fresh = load_packed(Bert().eval(), source)
        assert torch.equal(fresh(TOKENS), model(TOKENS))
    assert len(list(packed_modules(fresh))) == 14
    assert path.stat().st_size < 0.6 * dense.stat().st_size  # mostly names, in this toy
    with pytest.raises(UsageError, match="has no hadal_compression in its metadata"):
        load_packed(Bert(), dense)
    with pytest.raises(UsageError, match="does not exist; pass the folder"):
        load_packed(Bert(), tmp_path / "nope")
    with pytest.raises(ModelError, match="quantizes its inputs, but Bert has no module"):
        load_packed(Bert(layers=1), path)


def test_inputs_that_were_not_quantized_yet_are_not_elsewhere_either(tmp_path: Path):
    wishes = config(inputs(8, ["attention"], schedule_offset=5))
    model = redundancy_clean(init_compression(Bert().eval(), wishes), wishes)
    save(model, tmp_path)
    assert torch.equal(load_packed(Bert().eval(), tmp_path)(TOKENS), model(TOKENS))


def test_tied_weights_are_written_once(tmp_path: Path):
    model = Bert()
    model.head = torch.nn.Linear(16, 12, bias=False)
    model.head.weight = model.bert.embeddings["word_embeddings"].weight
    path = save(model, tmp_path)
    fresh = Bert()
    fresh.head = torch.nn.Linear(16, 12, bias=False)
    load_packed(fresh, path)
    assert torch.equal(fresh.head.weight, model.head.weight)


@pytest.mark.parametrize(("bits", "share"), [(None, 0.54), (8, 0.63), (4, 0.76), (2, 1.01)])
def test_two_of_four_weights_are_written_without_their_zeros(tmp_path: Path, bits, share):
    model, full = mixed(), mixed()
    halve_at_random(model[0], model[1])
    if bits is not None:
        wishes = config(weights(bits, bits, modules=["0", "1"], quantize_groups=16, **NOW))
        for each in (model, full):
            redundancy_clean(init_compression(each, wishes), wishes)
            assert pack_weights(each) == []
    sizes = []
    for each in (model, full):
        path = save(each, tmp_path)
        with safe_open(path, framework="pt") as file:
            parts = {name: file.get_tensor(name).nbytes for name in file.keys()}  # noqa: SIM118
        wanted = ("weight", "weight_codes", "values", "places")
        assert "2.weight" in parts
        sizes.append(sum(n for name, n in parts.items() if name.rpartition(".")[2] in wanted))
    rest = mixed()[2].weight.nbytes
    assert sizes[0] - rest <= share * (sizes[1] - rest)
    save(model, tmp_path)
    fresh = load_packed(mixed(), tmp_path)
    assert fresh.state_dict().keys() == model.state_dict().keys()
    for name, value in model.state_dict().items():
        assert torch.equal(fresh.state_dict()[name], value)
        assert fresh.state_dict()[name].dtype == value.dtype


def mixed() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(64, 96), nn.Conv2d(8, 16, 3), nn.Linear(64, 6, bias=False))


def halve_at_random(*modules: nn.Module) -> None:
    """Set 2 of every 4 inputs of each output to zero."""
    for module in modules:
        weight = module.weight.data.movedim(1, -1)
        groups = weight.reshape(-1, 4)
        groups = groups * (torch.rand(groups.shape).argsort(1) < 2)
        module.weight.data = groups.view(weight.shape).movedim(-1, 1).contiguous()
