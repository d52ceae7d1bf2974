"""The files and commands of pages that teach work as pasted."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoint.deepspeed_cases import unpack

from hadal.utils import get_fp32_state_dict_from_zero_checkpoint

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
    "scaling": ("compare.py",),
    "tutorials/continue_from_deepspeed": ("go_on.py",),
    "tutorials/large_models": ("ds_config.json", "load.py"),
    "tutorials/lightning": ("fit.py", "loop.py"),
    "tutorials/notebook": ("first.py", "train.py", "again.py", "function.py", "launch.py"),
    "tutorials/sft": ("trainer_config.json", "sft.py", "ask.py"),
    "tutorials/streaming": ("make_data.py", "stream.py"),
    "tutorials/trainer": ("make_data.py", "trainer_config.json", "train_texts.py"),
    "tutorials/vision": ("vision.py",),
    "tutorials/wandb": ("tracked.py",),
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


# Put before Lightning's programs: its strategy looks for CUDA.
ON_CPUS = """
import lightning.fabric.strategies.deepspeed as of_fabric
import lightning.pytorch.strategies.deepspeed as of_trainer

for module in (of_fabric, of_trainer):
    kind = module.DeepSpeedStrategy
    module._validate_device_index_selection = lambda devices: None
    kind.setup_environment = super(kind, kind).setup_environment
    kind._get_process_group_backend = lambda self: "gloo"
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


def test_a_transformers_model_is_fine_tuned_exported_and_adapted(tmp_path: Path) -> None:
    for package in ("peft", "trl"):
        pytest.importorskip(package)
    make, tune, export, adapt, prefer = pasted(tmp_path, "transformers")
    run(tmp_path, make)
    tuned = run(tmp_path, tune)
    run(tmp_path, export)
    (answer,) = re.findall(r"\[rank 0\] ('Return.*)", tuned)
    assert run(tmp_path, "python use.py").strip() == answer.strip(), "the export is the model"
    adapted = run(tmp_path, adapt)
    assert_shown("transformers", tuned + adapted)
    assert float(re.findall(r"epoch 3: loss (\S+) on", tuned)[0]) < 3.9
    assert float(re.findall(r"updates (\d\.\d+)", adapted)[0]) < 2.6
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


# ---- tutorials -----------------------------------------------------------------------------------


def follow(folder: Path, name: str) -> str:
    """Do what a tutorial says; check that its programs print what it shows, but for numbers."""
    page = f"tutorials/{name}"
    commands = pasted(folder, page)
    if "python make_model.py" in commands:
        (folder / "make_model.py").write_text(programs_of("transformers")[0])
    said = "".join(run(folder, command) for command in commands)
    assert_shown(page, said)
    return said


def assert_shown(page: str, said: str) -> None:
    text = (ROOT / f"docs/{page}.md").read_text()
    blocks = re.findall(r"```text\n(.*?)```", text, re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    assert lines
    for line in lines:
        pattern = r"[-\d.]+".join(map(re.escape, re.split(r"\d+\.\d+", line)))
        assert re.search(pattern, said), f"{page} shows {line!r}, and its programs say\n{said}"


def test_one_process_and_two_print_the_same_losses(tmp_path: Path) -> None:
    one, two = (run(tmp_path, line).strip() for line in pasted(tmp_path, "scaling"))
    assert two.replace("[rank 0] ", "") == one
    (shown,) = re.findall(r"```text\n(.*?)```", (ROOT / "docs/scaling.md").read_text(), re.DOTALL)
    losses, expected = (re.findall(r"\d+\.\d+", text) for text in (one, shown))
    assert [*map(float, losses)] == pytest.approx([*map(float, expected)], rel=1e-3)


def test_the_trainer_reads_a_data_set(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    pytest.importorskip("accelerate")
    said = follow(tmp_path, "trainer")
    assert float(re.findall(r"loss (\S+) on held-out text", said)[-1]) < 4.5
    assert (tmp_path / "finetuned" / "model.safetensors").exists()


def test_prompts_are_answered_after_fine_tuning_with_trl(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    assert "'2 plus 3 is 5'" in follow(tmp_path, "sft")


def test_a_model_is_loaded_in_shards(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    follow(tmp_path, "large_models")
    assert (tmp_path / "trained" / "model.safetensors").exists()


def test_a_stream_goes_on_where_it_was(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    follow(tmp_path, "streaming")
    (tmp_path / "checkpoints").rename(tmp_path / "resumed")
    run(tmp_path, pasted(tmp_path, "tutorials/streaming")[-1])
    resumed, whole = (
        get_fp32_state_dict_from_zero_checkpoint(str(tmp_path / name))
        for name in ("resumed", "checkpoints")
    )
    assert all(torch.equal(resumed[name], weight) for name, weight in whole.items())


def test_pictures_are_told_apart(tmp_path: Path) -> None:
    shares = [float(share) for share in re.findall(r"(\S+)% right", follow(tmp_path, "vision"))]
    assert len(shares) == 6 and shares[-1] > 85 > shares[0]


def test_lightning_and_fabric(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    commands = pasted(tmp_path, "tutorials/lightning")
    for name in FILES["tutorials/lightning"]:
        (tmp_path / name).write_text(ON_CPUS + (tmp_path / name).read_text())
    said = "".join(run(tmp_path, command) for command in commands)
    assert_shown("tutorials/lightning", said)
    assert all(float(loss) < 1 for loss in re.findall(r"loss (\d+\.\d+)", said))
    run(tmp_path, "hadal checkpoint to-fp32 lightning_checkpoint weights")


def test_cells_of_a_notebook(tmp_path: Path) -> None:
    """Cells share names; some run again, in another order."""
    pytest.importorskip("accelerate")
    pasted(tmp_path, "tutorials/notebook")
    first, train, again, function, launch = (
        (tmp_path / name).read_text() for name in FILES["tutorials/notebook"]
    )
    (tmp_path / "cells.py").write_text("\n".join([first, train, train, again, train, first, train]))
    losses = re.findall(r"loss (\S+) after (\d+) updates", run(tmp_path, "python cells.py"))
    assert [count for _, count in losses] == ["32", "64", "32", "32"]
    assert losses[0] == losses[-1], "the first cell starts anew"
    assert float(losses[1][0]) < float(losses[0][0])
    (tmp_path / "cells.py").write_text(f"{function}\n{launch}")
    assert re.search(r"loss \S+ after 64 updates on 2 ranks", run(tmp_path, "python cells.py"))


def test_a_run_is_tracked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    text = (ROOT / "docs/tutorials/wandb.md").read_text()
    pasted(tmp_path, "tutorials/wandb")
    (line,) = re.findall(r"^WANDB_MODE=offline (hadal run .*)", text, re.MULTILINE)
    run(tmp_path, line)
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    for block in re.findall(r"```text\n(.*?)```", text, re.DOTALL):
        assert all(name.encode() in file.read_bytes() for name in block.split())


def test_a_run_of_deepspeed_goes_on(tmp_path: Path) -> None:
    unpack("stage2_bf16_world2", tmp_path / "their_checkpoints")
    shutil.copy(ROOT / "tests/data/deepspeed/toy.py", tmp_path / "my_model.py")
    follow(tmp_path, "continue_from_deepspeed")
    assert (tmp_path / "checkpoints" / "global_step20").is_dir()
