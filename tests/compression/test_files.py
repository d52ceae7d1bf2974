"""Packed models in folders."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from compression.toys import TOKENS, Bert, config, inputs, weights
from hadal.compression import init_compression, load_packed, pack_weights, redundancy_clean
from hadal.compression import save_packed as save
from hadal.compression.packed import packed_modules
from hadal.errors import ModelError, UsageError

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


def test_tied_weights_are_written_once(tmp_path: Path):
    model = Bert()
    model.head = torch.nn.Linear(16, 12, bias=False)
    model.head.weight = model.bert.embeddings["word_embeddings"].weight
    path = save(model, tmp_path)
    fresh = Bert()
    fresh.head = torch.nn.Linear(16, 12, bias=False)
    load_packed(fresh, path)
    assert torch.equal(fresh.head.weight, model.head.weight)
