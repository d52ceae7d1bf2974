"""`hadal plan`: the answer for a folder, a function and a program, as table, JSON and picture."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import hadal
from hadal.cli.main import main
from hadal.engine import assemble

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW"},
    "zero_optimization": {"stage": 0},
}
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    (tmp_path / "ds_config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return ["plan", "--model", str(tmp_path), "--config", str(tmp_path / "ds_config.json")]


def planned(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    code = main([*words, "--json"])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("head", "shapes"),
    [
        ("BertModel", [[2, 16]]),
        ("BertForMaskedLM", [[2, 16]]),
        ("BertForSequenceClassification", [[2, 16], [2]]),
    ],
)
def test_a_head_gets_the_labels_that_it_takes(
    head: str, shapes: list[list[int]], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 64}
    bert = {"architectures": [head], "model_type": "bert", "num_attention_heads": 2, **sizes}
    (Path(words[2]) / "config.json").write_text(json.dumps(bert))
    code, found = planned([*words, "--sequence-length", "16"], capsys)
    assert code == 0 and found["micro_batch"] == shapes


def test_a_folder_fits_or_is_told_what_to_change(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    code, roomy = planned([*words, "--cluster", "h200x8"], capsys)
    assert code == 0 and roomy["fits"] and roomy["changes"] == []
    assert roomy["kinds"]["activations"]["device"] > 0 and roomy["time"]["samples_per_second"] > 0
    assert roomy["micro_batch"] == [[2, 4096]] and roomy["stage"] == 0
    assert roomy["kinds"]["logits"]["device"] > 2 * 4096 * 128256 * 4
    assert [unit["kind"] for unit in roomy["units"]] == ["LlamaDecoderLayer"] * 4
    code, tight = planned([*words, "--cluster", "l4x8"], capsys)
    assert code == 1 and tight["lacks"]["device"] > 0
    assert tight["changes"][0]["patch"]["zero_optimization"]["stage"] > 0
    assert tight["changes"][-1]["fits"]
    # The patches make it fit.
    path = Path(words[-1])
    raw: dict[str, Any] = dict(CONFIG)
    for change in tight["changes"]:
        for key, value in change["patch"].items():
            raw[key] = {**raw.get(key, {}), **value} if isinstance(value, dict) else value
    path.write_text(json.dumps(raw))
    assert planned([*words, "--cluster", "l4x8"], capsys)[0] == 0


def test_stages_are_told_with_their_waits(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    keys = {"gradient_accumulation_steps": 4, "tensor_parallel": {"autotp_size": 2}}
    raw = CONFIG | keys | {"pipeline": {"auto": True, "stages": 2}}
    Path(words[-1]).write_text(json.dumps(raw))
    assert main([*words, "--cluster", "h200x8"]) == 0
    told = capsys.readouterr().out
    stages = re.search(r"This is stage ([12]) of 2, which need ([\d.]+), ([\d.]+) GB\.", told)
    assert stages is not None
    totals = [float(stages[2]), float(stages[3])]
    assert totals.index(max(totals)) == int(stages[1]) - 1
    assert all(re.search(rf"^{row} +[\d.]+", told, re.M) for row in ("slices", "bubble"))


def test_the_table_and_the_picture(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "memory.svg"
    assert main([*words, "--cluster", "l4x8", "--output", str(picture)]) == 1
    told = capsys.readouterr().out
    assert "LlamaForCausalLM, 1.9 B parameters, on 1 x 8 devices of l4x8, stage 0" in told
    assert "does not fit: " in told and "What would make it fit, in the order of its cost:" in told
    assert "4 x LlamaDecoderLayer  1.71 GB each until backward, with recomputation 0.07 GB" in told
    assert "The peak is in" in told and "samples per second" in told
    assert "<svg" in picture.read_text()


KEYS: list[dict[str, Any]] = [
    {},
    {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}},
    {
        "tensor_parallel": {"autotp_size": 2},
        "pipeline": {"auto": True, "stages": 2},
        "gradient_accumulation_steps": 4,
    },
]


@pytest.mark.parametrize("keys", [None, *KEYS])
def test_no_line_is_wider_than_a_page(
    keys: dict[str, Any] | None, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    if keys is None:
        words = words[:3]
    else:
        Path(words[-1]).write_text(json.dumps(CONFIG | keys))
    assert main([*words, "--cluster", "l4x8", "--nodes", "2"]) in (0, 1)
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 100


def test_keys_that_do_nothing_are_told(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    Path(words[-1]).write_text(json.dumps(CONFIG | {"aio": {"block_size": 4096}}))
    said = 'aio.block_size: has no effect without an offload device "nvme"'
    assert main(words) == 0
    assert f"keys that do nothing here: {said}" in capsys.readouterr().err
    assert planned(words, capsys)[1]["notes"] == [said]


def test_more_tokens_take_more_activations(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    held = [
        planned([*words, "--sequence-length", str(n), "--cluster", "h200x8"], capsys)[1]
        for n in (1024, 2048)
    ]
    one, two = (
        max(sum(m["held"].get(kind, 0) for kind in ("activations", "logits")) for m in moments)
        for moments in (found["moments"] for found in held)
    )
    assert 1.8 < two / one < 2.1


def test_stages_are_compared_with_activations(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    code, stages = planned([*words[:3], "--memory", "30GB", "--sequence-length", "1024"], capsys)
    assert code == 0 and [found["stage"] for found in stages[:4]] == [0, 1, 2, 3]
    assert not stages[0]["fits"] and stages[3]["fits"]
    alone = planned(["estimate", *words[1:3], "--devices-per-node", "8"], capsys)[1]
    for found, other in zip(stages, alone, strict=True):
        assert found["states"] == other["states"] and "activations" not in other["kinds"]
        assert found["kinds"]["activations"]["device"] > 0 and found["micro_batch"] == [[1, 1024]]


def test_a_misspelt_cluster_is_an_error_at_once(words: list[str]) -> None:
    program = (
        "import sys\n"
        "from hadal.cli.main import main\n"
        "code = main(sys.argv[1:])\n"
        "assert 'torch' not in sys.modules\n"
        "sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *words, "--cluster", "h10x8"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1 and "did you mean h100x8?" in done.stderr, done.stderr


def test_a_function_may_return_a_batch(
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "planned_models.py").write_text(
        "import torch\n"
        "def build():\n"
        "    return torch.nn.Linear(64, 64), torch.ones(8, 64, dtype=torch.bfloat16)\n"
        "def exact():\n"
        "    return torch.nn.Linear(64, 64), torch.ones(8, 64)\n"
        "def alone():\n"
        "    return torch.nn.Linear(64, 64)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    words[2] = "planned_models:exact"
    assert main(words[:3]) == 0  # stages are compared in bf16
    words[2] = "planned_models:build"
    assert main(words) == 0
    assert "micro-batch has 8 rows, but train_micro_batch_size" in capsys.readouterr().err
    assert "moments" in planned(words, capsys)[1]
    words[2] = "planned_models:alone"
    assert "moments" not in planned(words, capsys)[1]
    words[2] = "planned_models:build"
    (one, *_) = planned([*words[:3], "--devices-per-node", "2"], capsys)[1]
    assert one["time"]["samples_per_second"] * one["time"]["seconds"] == pytest.approx(2 * 8)
    words[2] = "planned_models:alone"
    assert main(words) == 0
    assert "Without a batch, activations and time are left out." in capsys.readouterr().out


def test_values_are_computed_with_what_a_function_makes(
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "routed_models.py").write_text(
        "import torch\n"
        "class Routed(torch.nn.Linear):\n"
        "    def forward(self, values):\n"
        "        return super().forward(values[values.sum(1).nonzero()[:, 0]])\n"
        "def build():\n"
        "    return Routed(64, 64), torch.ones(8, 64, dtype=torch.bfloat16)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    words[2] = "routed_models:build"
    assert main(words) == 1
    assert "hadal plan --with-values" in capsys.readouterr().err
    assert "moments" in planned([*words, "--with-values"], capsys)[1]


def test_a_function_may_return_stages(
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "planned_stages.py").write_text(
        "import torch\n"
        "from hadal.pipeline import LayerSpec, PipelineModule\n"
        "def build():\n"
        "    layers = [LayerSpec(torch.nn.Linear, 64, 64) for _ in range(6)]\n"
        "    loss_of = torch.nn.functional.mse_loss\n"
        "    module = PipelineModule(layers, num_stages=3, loss_fn=loss_of)\n"
        "    return module, (torch.ones(2, 64), torch.ones(2, 64))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    words[2] = "planned_stages:build"
    (tmp_path / "ds_config.json").write_text(json.dumps({"train_micro_batch_size_per_gpu": 2}))
    assert main([*words, "--cluster", "h100x6"]) == 0
    told = capsys.readouterr().out
    assert "PipelineModule, 25.0 K parameters" in told and "of 3, which need" in told
    assert main([*words, "--cluster", "h100x4"]) == 1
    assert "must divide the number of ranks, 4" in capsys.readouterr().err


PROGRAM = """
import sys
import torch
from torch import nn
import hadal
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
rows = [(torch.ones(64),) for _ in range(8)]
engine, _, loader, _ = hadal.initialize(model=model, config=sys.argv[1], training_data=rows)
assert engine.train_micro_batch_size_per_gpu() == 2
assert engine.gradient_accumulation_steps() == 1 and engine.train_batch_size() == 8
for (row,) in loader:
    engine.backward(engine(row.bfloat16()).float().sum())
    raise SystemExit("trained")
"""


@pytest.mark.slow
@pytest.mark.parametrize("ends", [False, True])
def test_a_program_is_planned_up_to_its_first_forward(ends: bool, tmp_path: Path) -> None:
    program = PROGRAM.replace("for (row,) in loader:", "for (row,) in []:") if ends else PROGRAM
    (tmp_path / "train.py").write_text(program)
    (tmp_path / "ds_config.json").write_text(json.dumps(CONFIG))
    words = ["plan", "--cluster", "h100x4", "--json", "train.py", "ds_config.json"]
    done = subprocess.run(
        [sys.executable, "-m", "hadal", *words],
        cwd=tmp_path,
        env={**os.environ, "NO_COLOR": "1"},
        capture_output=True,
        text=True,
    )
    if ends:
        assert done.returncode == 1 and "ended without a forward of an engine" in done.stderr
    else:
        found = json.loads(done.stdout)
        assert done.returncode == 0 and found["peak"]["phase"] == "backward"
        assert found["time"]["samples_per_second"] > 0


@pytest.fixture
def in_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A directory in which programs are planned by this process, which is restored."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delattr(hadal, "initialize")  # is resolved anew, and restored afterwards
    monkeypatch.setattr(assemble, "initialize", assemble.initialize)
    monkeypatch.setattr(hadal.zero.Init, "__init__", hadal.zero.Init.__init__)
    monkeypatch.setattr(dist, "init_process_group", dist.init_process_group)
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(os, "environ", {**os.environ})
    return tmp_path


@pytest.mark.parametrize(
    ("program", "said", "frames"),
    [
        (
            "def build():\n    return 1 / 0\n\nbuild()\n",
            'Traceback (most recent call last):\n  File "wrong.py", line 4, in <module>\n',
            2,
        ),
        ("def build(:\n", '  File "wrong.py", line 1\n', 1),
        (
            "import hadal\n\nhadal.initialize(config={})\n",
            "note: wrong.py, line 3: hadal.initialize(config={})\nerror: initialize was given no",
            0,
        ),
    ],
)
def test_an_error_of_a_program_begins_with_its_own_line(
    program: str, said: str, frames: int, in_place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (in_place / "wrong.py").write_text(program)
    try:
        code = main(["plan", "wrong.py"])
    except SystemExit as end:
        code = end.code  # type: ignore[assignment]
    told = capsys.readouterr().err
    assert code == 1 and told.startswith(said) and told.count('File "') == frames


def test_bad_words_are_told(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words, "--cluster", "h100"]) == 1
    assert "no cluster 'h100'; did you mean h100x8?" in capsys.readouterr().err
    assert main(["plan"]) == 1
    assert "expected --model or --params, or a program" in capsys.readouterr().err
    assert main([*words, "train.py"]) == 1
    assert "a program has its own model and configuration" in capsys.readouterr().err
    assert main(["plan", "nothing.py"]) == 1
    assert "nothing.py is no file" in capsys.readouterr().err
