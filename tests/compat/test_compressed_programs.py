"""Programs that compress models in the manner of DeepSpeed's examples run as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from clients import load
from ranks import RankPool


def _run(name: str, told: tuple[str, ...], *arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = load("programs_runs").run(name, told, *arguments)
    return found


@pytest.mark.slow
def test_a_bert_learns_from_its_teacher_and_gets_smaller(clients: RankPool, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    told = ("losses", "before", "after", "shapes")
    for found in clients.run(_run, "compressed_bert", told, f"--folder={tmp_path}"):
        assert torch.allclose(found["before"], found["after"], atol=1e-5)
        assert len(found["losses"]) == 4
        layer = "bert.encoder.layer.1"
        assert found["shapes"][f"{layer}.attention.self.query.weight"] == (8, 16)
        assert found["shapes"][f"{layer}.attention.output.dense.weight"] == (16, 8)
        assert found["shapes"][f"{layer}.intermediate.dense.weight"] == (16, 16)
        assert not any("layer.2" in name or "scores" in name for name in found["shapes"])


def test_a_gpt2_is_quantized_without_training(clients: RankPool) -> None:
    pytest.importorskip("transformers")
    told = ("plain", "converted", "quantized", "values", "tied")
    for found in clients.run(_run, "compressed_gpt2", told):
        assert torch.allclose(found["converted"], found["plain"], atol=1e-6)
        assert torch.allclose(found["quantized"], found["plain"], atol=0.02)
        assert not torch.equal(found["quantized"], found["plain"])
        assert found["values"] <= 16 * 256
        assert found["tied"]


def test_a_residual_network_loses_channels(clients: RankPool) -> None:
    told = ("losses", "shapes", "outputs")
    plain, *others = (
        clients.run(_run, "compressed_resnet", told, f"--stage={stage}") for stage in (0, 2, 3)
    )
    for ranks in others:
        for found, expected in zip(ranks, plain, strict=True):
            assert found["losses"] == pytest.approx(expected["losses"], abs=1e-5)
            assert found["shapes"] == expected["shapes"]
            assert torch.allclose(found["outputs"], expected["outputs"], atol=1e-4)
    shapes = plain[0]["shapes"]
    assert shapes["layer1.0.conv1.weight"] == (4, 8, 3, 3)
    assert shapes["layer1.0.bn1.running_var"] == (4,)
    assert shapes["layer1.0.conv2.weight"] == (8, 4, 3, 3)
    assert shapes["conv1.weight"] == (8, 3, 3, 3)
