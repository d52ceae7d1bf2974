"""The files and commands of pages that teach work as pasted."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
FILES = {
    "getting_started": ("ds_config.json", "train.py", "trainer_config.json", "finetune.py"),
    "transformers": (
        "make_model.py",
        "ds_config.json",
        "finetune.py",
        "use.py",
        "lora.py",
        "merge.py",
        "trainer_config.json",
        "prefer.py",
    ),
}
LIMIT_S = 300.0
# Put before the Trainer's program: writes what each rank trains on.
RECORDING = """
import json, os
from transformers import Trainer

samples, training_step = [], Trainer.training_step


def recording(self, model, inputs, *rest):
    samples.extend(inputs["input_ids"].tolist())
    with open(f"seen{os.environ['RANK']}.json", "w") as file:
        json.dump({"world_size": self.args.world_size, "samples": samples}, file)
    return training_step(self, model, inputs, *rest)


Trainer.training_step = recording
"""


def programs_of(page: str) -> list[str]:
    text = (ROOT / f"docs/{page}.md").read_text()
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def pasted(folder: Path, page: str = "getting_started") -> list[str]:
    """Save a page's files in a folder; return its commands."""
    text = (ROOT / f"docs/{page}.md").read_text()
    files = re.findall(r"```(json|python)\n(.*?)```", text, re.DOTALL)
    for name, (language, content) in zip(FILES[page], files, strict=True):
        assert name.endswith({"json": "json", "python": "py"}[language])
        (folder / name).write_text(content)
    return re.findall(r"^(?:python|hadal) [^#\n]*", text, re.MULTILINE)


def run(folder: Path, command: str) -> str:
    words = command.replace("hadal ", "-m hadal ", 1).removeprefix("python ").split()
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)]))
    environment = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, *words],
        env=os.environ | environment | {"HF_HUB_OFFLINE": "1"},
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    return done.stdout


def test_the_loop_trains_resumes_and_exports(tmp_path: Path) -> None:
    commands = pasted(tmp_path)
    (two,) = [line for line in commands if line.endswith("2 train.py")]
    losses = re.findall(r"epoch (\d): loss (\S+) after (\d+) updates", run(tmp_path, two))
    assert [(epoch, count) for epoch, _, count in losses] == [
        (str(epoch), str(2048 // (16 * 2 * 2) * (epoch + 1))) for epoch in range(4)
    ]
    assert float(losses[-1][1]) < 1.0 < float(losses[0][1])
    program = (tmp_path / "train.py").read_text()
    (tmp_path / "train.py").write_text(program.replace("EPOCHS = 4", "EPOCHS = 5"))
    assert "python train.py" in commands
    assert "epoch 4: loss" in run(tmp_path, "python train.py")
    exports = [line.strip() for line in commands if line.startswith("hadal checkpoint")]
    assert len(exports) == 2
    for line in exports:
        run(tmp_path, line)
    assert (tmp_path / "exported" / "model.safetensors").exists()


def test_the_trainer_finds_hadal(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    (line,) = [line for line in pasted(tmp_path) if "finetune.py" in line]
    program = tmp_path / "finetune.py"
    program.write_text(RECORDING + program.read_text())
    run(tmp_path, line)
    assert (tmp_path / "finetuned" / "model.safetensors").exists()
    ranks = [json.loads(file.read_text()) for file in sorted(tmp_path.glob("seen*.json"))]
    assert [rank["world_size"] for rank in ranks] == [2, 2]
    first, second = ({tuple(row) for row in rank["samples"]} for rank in ranks)
    assert len(first) == len(second) == 10 * 4, "10 updates of 4 samples on each rank"
    assert not first & second, "both ranks train on the same samples"


def test_a_transformers_model_is_fine_tuned_and_exported(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    make, tune, export, *_ = pasted(tmp_path, "transformers")
    run(tmp_path, make)
    said = run(tmp_path, tune)
    losses = [float(loss) for loss in re.findall(r"epoch \d: loss (\S+) on held-out", said)]
    assert len(losses) == 4
    assert losses[-1] < 0.7 * losses[0]
    run(tmp_path, export)
    (answer,) = re.findall(r"\[rank 0\] ('Return.*)", said)
    assert run(tmp_path, "python use.py").strip() == answer.strip(), "the export is the model"


def test_adapters_and_preferences_of_a_transformers_model(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    pytest.importorskip("trl")
    make, _, _, adapt, prefer = pasted(tmp_path, "transformers")
    run(tmp_path, make)
    assert "8192 trained parameters" in run(tmp_path, adapt)
    run(tmp_path, "python merge.py")
    run(tmp_path, prefer)
    for folder in ("merged", "preferred"):
        assert (tmp_path / folder / "model.safetensors").exists()


@pytest.mark.parametrize(("library", "at"), [("torch", 0), ("torch", 2), ("accelerate", 4)])
def test_a_program_prints_the_same_loss_after_as_before(
    library: str, at: int, tmp_path: Path
) -> None:
    pytest.importorskip(library)
    launchers = (
        "python -m torch.distributed.run --standalone --nproc_per_node 2",
        f"hadal run {'--as-deepspeed ' * (library == 'accelerate')}--num_accelerators 2",
    )
    losses = []
    for program, launcher in zip(programs_of("from_pytorch")[at : at + 2], launchers, strict=True):
        (tmp_path / "program.py").write_text(program)
        losses += re.findall(r"loss (\d+\.\d+)", run(tmp_path, f"{launcher} program.py"))
    before, after = map(float, losses)
    assert after == pytest.approx(before, rel=1e-4)
