"""`hadal estimate` and `hadal plan` for a number of parameters, a model and a configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hadal.cli.main import main

MODEL = """
from torch import nn

def build():
    model = nn.Sequential(nn.Linear(10_000, 10_000), nn.Linear(10_000, 10_000))
    model[1].requires_grad_(False)
    return model

def nothing():
    return 3
"""


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[tuple[str, ...], list[str]]:
    """Return the cells of device, host and disk by kind, or by stage, tiers and model states."""
    assert main(["estimate", *arguments]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    stages = {tuple(line[:4]): line[4:7] for line in lines if len(line) > 7}
    return {tuple(line[:1]): line[1:4] for line in lines if len(line) > 3} | stages


@pytest.fixture
def written(tmp_path: Path) -> Any:
    def write(**config: Any) -> str:
        path = tmp_path / "ds_config.json"
        path.write_text(json.dumps({"train_micro_batch_size_per_gpu": 1, **config}))
        return str(path)

    return write


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "estimated_model.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*__import__("sys").path])
    return "estimated_model"


def test_all_stages_of_a_number(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.get_num_threads", lambda: 1)
    table = told(capsys, "--params", "7.5B", "--devices-per-node", "8", "--nodes", "8")
    # Beside the states: the context, communicators, and layers on their way (in fp32, too).
    assert table["0", "none", "none", "120.00"] == ["121.86", "-", "-"]
    assert table["2", "none", "none", "16.64"] == ["19.42", "-", "-"]
    assert table["3", "none", "none", "1.88"] == ["6.77", "-", "-"]
    assert table["2", "cpu", "none", "15.00"] == ["17.77", "1.64", "-"]
    assert table["3", "nvme", "nvme", "-"] == ["4.89", "0.73", "2.81"]


def test_plans_that_fit_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--params", "7.5B", "--largest-layer", "100M", "--devices-per-node", "8"]
    assert main(["estimate", *words, "--memory", "40GB"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(
        "7.5 B parameters, on 1 x 8 devices of h100x8 with 40.0 GB, bf16 or fp16 with Adam"
    )
    fits = {
        tuple(line.split()[:3]): line.split("  ")[-1].strip()
        for line in shown.splitlines()
        if line[:1].isdigit()
    }
    assert fits["1", "none", "none"] == "a device lacks 2.59 GB"  # 41.25
    best = "fits, 10.16 GB left, best"
    assert fits["2", "none", "none"] == best
    assert fits["3", "none", "none"] == "fits, 21.59 GB left"
    assert [text for text in fits.values() if "best" in text] == [best]
    assert "stage 2 with Adam (none is named)" in shown  # by kind
    assert main(["estimate", *words, "--memory", "30GB"]) == 0
    shown = capsys.readouterr().out
    assert "tight, 0.16 GB left" in shown
    assert "fits, 11.59 GB left, best" in shown
    assert main(["estimate", *words, "--memory", "100MB"]) == 0
    assert "best" not in capsys.readouterr().out
    assert main(["plan", *words, "--memory", "100MB"]) == 1
    assert "What would help, though it does not suffice" in capsys.readouterr().out


def test_the_host_of_a_node_is_judged(capsys: pytest.CaptureFixture[str], written: Any) -> None:
    words = ["--params", "70B", "--devices-per-node", "8"]
    assert main(["estimate", *words, "--memory", "40GB", "--host-memory", "1TB"]) == 0
    shown = capsys.readouterr().out.splitlines()
    (row,) = (line.split() for line in shown if line.startswith("3      cpu        none"))
    assert row[3:8] == ["17.50", "26.18", "122.50", "-", "980.00"]
    assert " ".join(row[8:]) == "fits, 13.82 GB left, best"
    assert "of 40.00 GB," in shown[2] and shown[3].endswith("a node  host 1.0 TB")
    assert main(["estimate", *words, "--memory", "40GB", "--host-memory", "512GB"]) == 0
    shown = capsys.readouterr().out.splitlines()
    (row,) = (line for line in shown if line.startswith("3      cpu        none"))
    assert row.endswith("  a node's host lacks 468.00 GB")
    (row,) = (line for line in shown if line.endswith("best"))
    assert row.split()[:3] == ["3", "nvme", "none"]
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu"}}
    config = written(bf16={"enabled": True}, zero_optimization=zero)
    assert main(["estimate", *words, "--config", config, "--host-memory", "512GB"]) == 0
    assert "does not fit: a node's host lacks 468.00 GB" in capsys.readouterr().out


def test_a_configuration_and_a_model(
    written: Any,
    module: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.get_num_threads", lambda: 1)
    config = written(
        bf16={"enabled": True},
        optimizer={"type": "AdamW", "params": {}},
        zero_optimization={
            "stage": 3,
            "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme"},
            "offload_param": {"device": "cpu"},
        },
    )
    table = told(
        capsys, "--model", f"{module}:build", "--config", config, "--devices-per-node", "2"
    )
    # 10,000 x 10,000 trained, as many frozen; the biases stay whole.
    assert table["weights",] == ["<0.01", "0.20", "-"]
    assert table["gradients",] == ["-", "0.10", "-"]
    assert table["optimizer",] == ["-", "-", "1.20"]
    assert table["buffers",] == ["-", "0.26", "-"]
    # Both layers are gathered at a time; one has a gradient, which is collected and sent.
    assert table["gathers",] == ["0.40", "-", "-"]
    assert table["reductions",] == ["0.70", "-", "-"]
    assert table["communicators",] == ["0.60", "-", "-"]
    assert table["context",] == ["0.50", "-", "-"]
    assert table["total",] == ["2.20", "0.56", "1.20"]
    words = ["--model", f"{module}:build", "--config", config, "--devices-per-node", "2"]
    assert main(["estimate", *words, "--memory", "4GB"]) == 0
    shown = capsys.readouterr().out
    assert "Sequential, 200.0 M parameters (100.0 M frozen), on 1 x 2 devices of h100x8" in shown
    assert "fits, 1.80 of 4.00 GB left" in shown and "a node's host holds 1.60 GB" in shown
    assert main(["estimate", *words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["stage"], found["optimizer"]) == (3, "AdamW")
    assert found["kinds"]["context"]["device"] == 500_000_000
    assert found["kinds"]["communicators"]["how"].endswith("of all ranks, reductions")
    sums = {tier: sum(kind[tier] for kind in found["kinds"].values()) for tier in found["total"]}
    assert sums == found["total"]


def test_every_stage_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", "--params", "7e9", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [plan["stage"] for plan in found[:4]] == [0, 1, 2, 3]
    assert found[4]["offload_optimizer"] == "cpu" and found[4]["offload_param"] == "none"
    assert found[0]["states"]["device"] == 16 * 7_000_000_000
    assert found[0]["kinds"]["communicators"]["device"] == 0  # there is one rank
    assert not found[0]["fits"] and found[3]["micro_batch"] == []


@pytest.mark.parametrize(
    ("keys", "optimizer"),
    [
        ({"bf16": {"enabled": True}}, "12.00"),
        ({"bf16": {"enabled": True}, "optimizer": {"type": "Lion", "params": {}}}, "8.00"),
        ({"bf16": {"enabled": True}, "optimizer": {"type": "SGD", "params": {"lr": 1}}}, "4.00"),
        ({"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}, "8.00"),
        ({}, "8.00"),
        ({"optimizer": {"type": "Muon", "params": {"lr": 1}}}, "4.00"),
    ],
)
def test_dtypes_and_optimizers(
    keys: dict[str, Any], optimizer: str, written: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    zero = {"zero_optimization": {"stage": 1}}
    table = told(capsys, "--params", "2B", "--config", written(**keys, **zero), "--nodes", "2")
    assert table["optimizer",][0] == optimizer


def test_faults_are_reported(module: str, written: Any, capsys: pytest.CaptureFixture[str]) -> None:
    for function, reason in (
        ("absent", "has no attribute"),
        ("nothing", "returned a int, expected a model"),
    ):
        assert main(["estimate", "--model", f"{module}:{function}"]) == 1
        assert reason in capsys.readouterr().err
    assert main(["estimate", "--model", module]) == 1
    assert 'or "package.module:function"; the function' in capsys.readouterr().err
    assert main(["estimate", "--model", "7B"]) == 1
    assert "use --params 7B" in capsys.readouterr().err
    assert main(["estimate", "--params", "1M", "--config", written(bf16={"enabled": 3})]) == 1
    assert capsys.readouterr().err.startswith("error: 1 fault in ds_config.json")
    for wrong in (["--params", "many"], ["--params", "1M", "--model", "a:b"], []):
        with pytest.raises(SystemExit):
            main(["estimate", *wrong])
        capsys.readouterr()


def test_the_folder_of_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """70 billion parameters, none of which is read."""
    made = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "num_hidden_layers": 80,
        "vocab_size": 128256,
        "tie_word_embeddings": False,
    }
    (tmp_path / "config.json").write_text(json.dumps(made))
    words = ["--devices-per-node", "8", "--nodes", "8"]
    assert main(["estimate", "--model", str(tmp_path), *words, "--json"]) == 0
    plans = json.loads(capsys.readouterr().out)
    numel = 70_553_706_496
    assert plans[0]["states"]["device"] == 16 * numel
    assert numel / 4 <= plans[3]["states"]["device"] <= 1.01 * numel / 4
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert main(["estimate", "--model", str(tmp_path)]) == 1
    assert "`architectures` names a class of transformers" in capsys.readouterr().err
