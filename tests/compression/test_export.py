"""Packed models for other libraries, and the command that writes them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from compression.test_files import halve_at_random
from compression.test_shrinking import heads
from compression.toys import Bert, config, weights
from hadal.cli.main import main
from hadal.errors import UsageError
from hadal.plugins.compression import init_compression, load_packed, pack_weights, redundancy_clean
from hadal.plugins.compression.export import _parts, export_packed, is_half_zero

NOW = {"quantize_weight_in_forward": True}
EIGHT = (weights(8, 8, modules=["encoder"], **NOW),)
QUERIES = [["self.query", "self.key", "self.value"]]
TOKENS = torch.arange(20).view(2, 10)


def tiny():
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    shape = BertConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=16,
        num_labels=3,
    )
    return BertForSequenceClassification(shape).eval()


def packed(model, wishes):
    redundancy_clean(init_compression(model, wishes), wishes)
    assert pack_weights(model) == []
    return model


def test_unsupported_exports_are_refused(tmp_path: Path, monkeypatch):
    model = packed(Bert(), config(weights(8, 8, modules=["attention"], **NOW)))
    with pytest.raises(UsageError, match="layout is 'gguf'; expected one of 'hadal', "):
        export_packed(model, tmp_path, "gguf")
    with pytest.raises(UsageError, match="Bert has no packed weights; call redundancy_clean"):
        export_packed(Bert(), tmp_path)
    monkeypatch.setitem(sys.modules, "compressed_tensors.compressors", None)
    with pytest.raises(UsageError, match="needs the package compressed_tensors, which cannot be"):
        export_packed(model, tmp_path, "compressed-tensors")
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    with pytest.raises(UsageError, match="torchao needs the package torchao, which cannot be"):
        export_packed(model, tmp_path, "torchao")


@pytest.mark.slow_cells("8-1-0.6")
@pytest.mark.parametrize(("bits", "groups", "most"), [(8, 1, 0.6), (4, 64, 0.6), (2, 32, 0.6)])
def test_transformers_loads_the_same_values(tmp_path: Path, bits, groups, most):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("compressed_tensors")
    modules = ["encoder", "word_embeddings"]
    model = tiny()
    size = sum(value.nbytes for value in model.state_dict().values())
    packed(model, config(weights(bits, bits, modules=modules, quantize_groups=groups, **NOW)))
    left = export_packed(model, tmp_path, "compressed-tensors")
    assert left == ["bert.embeddings.word_embeddings"]
    assert (tmp_path / "model.safetensors").stat().st_size < most * size + 8000
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    assert torch.equal(loaded(input_ids=TOKENS).logits, model(input_ids=TOKENS).logits)


@pytest.mark.parametrize(("bits", "groups"), [(8, 1), (4, 64)])
def test_torchao_loads_the_same_values(tmp_path: Path, bits, groups):
    transformers = pytest.importorskip("transformers")
    torchao = pytest.importorskip("torchao.quantization")
    modules = ["encoder", "word_embeddings"]
    model = packed(
        tiny(), config(weights(bits, bits, modules=modules, quantize_groups=groups, **NOW))
    )
    left = export_packed(model, tmp_path, "torchao")
    assert left == ["bert.embeddings.word_embeddings"]
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    assert torch.equal(loaded(input_ids=TOKENS).logits, model(input_ids=TOKENS).logits)
    weight = loaded.bert.encoder.layer[0].output.dense.weight
    assert isinstance(weight, torchao.IntxUnpackedToInt8Tensor)


@pytest.mark.parametrize("layout", ["compressed-tensors", "torchao"])
def test_weights_of_which_half_are_zero_stay_so(tmp_path: Path, layout):
    """The form that a GPU's sparse kernels take (2:4)."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip(layout.replace("-", "_"))
    model = tiny()
    for part in model.bert.encoder.modules():
        if isinstance(part, torch.nn.Linear):
            halve_at_random(part)
    packed(model, config(*EIGHT))
    assert export_packed(model, tmp_path, layout) == []
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    assert torch.equal(loaded(input_ids=TOKENS).logits, model(input_ids=TOKENS).logits)
    weight = loaded.bert.encoder.layer[0].output.dense.weight
    weight = weight.dequantize() if layout == "torchao" else weight
    assert is_half_zero(weight.detach())


def test_a_pruned_model_is_packed_and_keeps_its_shapes(tmp_path: Path):
    pytest.importorskip("transformers")
    wishes = config(heads(modules=["attention.output.dense"], related=QUERIES), *EIGHT)
    model = packed(tiny(), wishes)
    export_packed(model, tmp_path)
    loaded = load_packed(tiny(), tmp_path)
    assert torch.equal(loaded(input_ids=TOKENS).logits, model(input_ids=TOKENS).logits)
    with pytest.raises(
        UsageError, match=r"already has a quantization_config.*use the layout hadal"
    ):
        _parts(model, "torchao")


def test_the_command_quantizes_and_compares(tmp_path: Path, capsys, monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "export_checks.py").write_text("def accuracy(model):\n    return 91.25\n")
    model = tiny()
    model.save_pretrained(tmp_path / "dense")
    wishes = config(weights(8, 4, modules=["encoder"], quantize_groups=4))
    (tmp_path / "config.json").write_text(json.dumps({"train_batch_size": 1, **wishes}))
    command = ["compress", "export", "dense", "small"]
    assert main([*command, "--config", "config.json", "--eval", "export_checks:accuracy"]) == 0
    told = capsys.readouterr().out
    assert "wrote small" in told
    assert "91.25" in told
    assert "forward on this machine" in told
    assert (
        "not quantized: 3 Embedding (2.6 K elements): no group of the configuration names them"
        in told
    )
    loaded = load_packed(tiny(), tmp_path / "small")
    expected = packed(model, wishes)
    assert torch.equal(loaded(input_ids=TOKENS).logits, expected(input_ids=TOKENS).logits)
    assert main([*command, "--bits", "8"]) == 0
    assert main([*command, "--bits", "8", "--eval", "nope:nope"]) == 1
    assert main(["compress", "export", "dense", "./dense", "--bits", "8"]) == 1
    assert "holds the model itself" in capsys.readouterr().err
    assert main(["compress", "export", "nope", "small", "--bits", "8"]) == 1
    assert "nope has no config.json" in capsys.readouterr().err
    (tmp_path / "config.json").write_text('{"train_batch_size": 1}')
    assert main([*command, "--config", "config.json"]) == 1
    assert "weight_quantization is not on" in capsys.readouterr().err


def test_modules_of_other_classes_are_named(tmp_path: Path, capsys, monkeypatch):
    """GPT-2's linear layers are a class of transformers, with the transposed weight."""
    transformers = pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    shape = transformers.GPT2Config(
        vocab_size=64,
        n_positions=16,
        n_embd=32,
        n_layer=2,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
    )
    transformers.GPT2LMHeadModel(shape).save_pretrained(tmp_path / "dense")
    assert main(["compress", "export", "dense", "small", "--bits", "8"]) == 0
    told = capsys.readouterr().out.splitlines()
    (line,) = (line for line in told if line.startswith("not quantized: "))
    assert line.startswith("not quantized: 8 Conv1D (24.6 K elements): only torch's Linear,")
