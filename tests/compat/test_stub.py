"""The distribution called deepspeed: programs find Hadal under that name, and nothing is hidden."""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import forks
import pytest
import torch
from test_install import _FOUND, _LOOK, ROOT, forked, python, told
from torch import nn

from hadal.compat.surface import VERSION

STUB = ROOT / "compat" / "deepspeed-stub"

# A build as pip makes one; what is installed is looked for under the given folder.
_BUILD = """
import sys, sysconfig
sys.path.insert(0, sys.argv[1])
sysconfig.get_path = lambda name: sys.argv[2]
import stub
print(stub.build_wheel(sys.argv[3]))
"""


def build(installed: Path, wheels: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", _BUILD, str(STUB), str(installed), str(wheels)],
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder with what the wheel installs."""
    done = build(tmp_path, tmp_path)
    assert done.returncode == 0, done.stderr
    site = tmp_path / "site"
    with zipfile.ZipFile(tmp_path / done.stdout.strip()) as wheel:
        assert wheel.testzip() is None
        wheel.extractall(site)
    return site


@pytest.mark.slow
def test_import_deepspeed_finds_hadal_where_it_is_installed(site: Path) -> None:
    # Nobody has called `install_as_deepspeed`: the program is as it was.
    assert told(_LOOK, path=(site,)) == _FOUND


def test_a_submodule_may_be_the_first_import(site: Path) -> None:
    code = "import deepspeed.comm, sys; print(sys.modules['deepspeed'].zero.Init.__module__)"
    done = forked("-c", code, path=(site,))
    assert (done.stdout, done.stderr) == ("hadal.zero.init\n", "")


_FIRST_USE = """
import deepspeed, sys
deepspeed.initialize
loaded = {name: vars(module) for name, module in sys.modules.items() if name.startswith("hadal.")}
made = {one for names in loaded.values() for one in names.values() if isinstance(one, type)}
print(sum("__dataclass_fields__" in vars(one) for one in made), *loaded)
"""


def test_the_first_use_loads_what_the_first_call_needs(site: Path) -> None:
    # A program waits for it; what saves and loads comes with the first of them.
    dataclasses, *loaded = forked("-c", _FIRST_USE, path=(site,)).stdout.split()
    later = ["saving", "loading", "live", "folders", "formats", "consolidated", "huggingface"]
    assert not {f"hadal.checkpoint.{name}" for name in later} & set(loaded)
    assert 100 < len(loaded) <= 170
    assert 0 < int(dataclasses) <= 60  # each takes 0.4 ms, a named tuple 0.1


def test_it_combines_with_a_call(site: Path) -> None:
    code = "import hadal; hadal.install_as_deepspeed(); import deepspeed; print(deepspeed.__file__)"
    assert told(code, path=(site,)) == [str(ROOT / "hadal/compat/install.py")]


def test_it_refuses_to_take_the_place_of_deepspeed(tmp_path: Path) -> None:
    real = tmp_path / "deepspeed"
    real.mkdir()
    (real / "__init__.py").touch()
    done = build(tmp_path, tmp_path)
    assert done.returncode == 1
    assert f"DeepSpeed itself is installed in {real}" in done.stderr
    assert not list(tmp_path.glob("*.whl"))


def test_its_version_is_the_one_that_hadal_tells() -> None:
    assert re.search(r'version = "(.+)"', (STUB / "pyproject.toml").read_text())[1] == VERSION


@pytest.mark.slow
def test_a_module_of_it_runs_as_a_program(site: Path) -> None:
    words = (str(site), str(site / "out"))
    done = forked("-m", "deepspeed.utils.zero_to_fp32", *words, path=(site,))
    assert done.returncode == 1
    assert done.stderr.startswith("error: ") and "is not a checkpoint" in done.stderr
    words = ("--input_folder", str(site), "--output_folder", str(site / "out"))
    done = forked("-m", "deepspeed.checkpoint.ds_to_universal", *words, path=(site,))
    assert done.returncode == 1
    assert done.stderr.startswith("error: ") and "is not a checkpoint" in done.stderr
    done = forked("-m", "deepspeed.comm", path=(site,))
    assert done.returncode == 1
    assert "python -m deepspeed.comm is not built yet" in done.stderr


@pytest.mark.slow
@pytest.mark.runs("accelerate")
@pytest.mark.parametrize("says", ["flags", "configuration"])
def test_accelerate_launch_starts_a_program_that_knows_nothing(
    site: Path, tmp_path: Path, says: str
) -> None:
    program = str(ROOT / "tests/compat/programs/launched.py")
    always = ["--use_deepspeed", "--num_processes=2"]
    flags = [*always, "--zero_stage=2", "--gradient_clipping=1.0"]
    if says == "configuration":
        auto = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
        warm_up = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps")
        config = {
            **dict.fromkeys(auto, "auto"),
            "gradient_clipping": 1.0,
            "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
            "scheduler": {"type": "WarmupLR", "params": dict.fromkeys(warm_up, "auto")},
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 1},
        }
        (tmp_path / "ds_config.json").write_text(json.dumps(config))
        flags = [*always, "--deepspeed_config_file", "ds_config.json"]
    path = os.pathsep.join((str(site), str(ROOT)))
    done = subprocess.run(
        [sys.executable, "-m", "accelerate.commands.launch", *flags, program],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    told = next(line for line in done.stdout.splitlines() if line.endswith("]"))
    stage, processes, losses = told.split(" ", 2)
    assert (stage, processes) == (("2", "2") if says == "flags" else ("3", "2"))
    if says == "flags":
        # What torch's own data parallel gives.
        expected = [6.127239, 2.747085, 4.759770, 2.448286]
        assert json.loads(losses) == pytest.approx(expected, abs=1e-5)
    else:
        # A warm-up of none counts as one of two updates, whose rates are 0 by its logarithm: the
        # third is the first that moves the weights.
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        x = torch.randn(32, 4)
        *still, last = (model(x).squeeze(-1) - x.sum(1)).square().view(4, 8).mean(1).tolist()
        *mine, moved = json.loads(losses)
        assert mine == pytest.approx(still, abs=1e-5)
        assert moved < last - 0.01


@pytest.mark.slow
def test_the_commands_of_deepspeed_come_with_it(site: Path, tmp_path: Path) -> None:
    """Each is called as pip's own script would call it."""
    (found,) = site.glob("*.dist-info/entry_points.txt")
    commands = dict(line.split(" = ") for line in found.read_text().splitlines()[1:])
    job = tmp_path / "job.py"
    job.write_text("import sys, deepspeed; print('ran', deepspeed.__name__, sys.argv[1:])\n")
    expected = {
        "deepspeed": (f"{str(job)!r}, '--x'", 0, "ran deepspeed ['--local_rank=0', '--x']"),
        "ds_report": ("'--hide_operator_status'", 0, "leads to Hadal, as 0.19.8"),
        "ds_ssh": ("'-f', '/no/such', 'uptime'", 2, "--hostfile /no/such: there is no such file"),
        "ds_io": (f"'--nvme_dir', {str(job)!r}, '--size', '1MB'", 1, str(job)),
        "ds_bench": (
            "'--scan', '--all-reduce', '--maxsize', '2', '--raw'",
            0,
            "all_reduce\t16\t4\t",
        ),
    }
    programs = []
    for name, (words, *_) in expected.items():
        module, function = commands[name].split(":")
        call = f"sys.argv = ['/bin/{name}', {words}]; sys.exit({module}.{function}())"
        programs.append(["-c", f"import sys, {module}; {call}"])
    env = {**os.environ, "PYTHONPATH": os.pathsep.join((str(site), str(ROOT)))}
    ended = forks.run_ranks(programs, envs=[env] * len(programs), timeout=300, grace=300)
    for done, (_, code, said) in zip(ended, expected.values(), strict=True):
        assert (done.returncode, said in done.stdout + done.stderr) == (code, True), done.stderr
    assert {commands[name] for name in ("ds", "deepspeed.pt")} == {commands["deepspeed"]}
    assert commands["dsr"] == commands["ds_report"]


@pytest.mark.slow
def test_the_launchers_modules_are_programs(site: Path, tmp_path: Path) -> None:
    job = tmp_path / "job.py"
    job.write_text(
        "import os, sys\n"
        "print(os.environ['RANK'], os.environ['CUDA_VISIBLE_DEVICES'], sys.argv[1:])\n"
    )
    world = base64.urlsafe_b64encode(b'{"localhost": [1, 3]}').decode()
    words = ["--world_info", world, "--save_pid", "7", "--no_local_rank", str(job), "--x", "a b"]
    done = python("-m", "deepspeed.launcher.launch", *words, path=(site,))
    assert sorted(done.stdout.splitlines()) == [
        f"[rank {rank}] {rank} 1,3 ['--x', 'a b']" for rank in (0, 1)
    ], done.stderr
    done = python("-m", "deepspeed.launcher.runner", "--autotuning", "run", "t.py", path=(site,))
    assert (done.returncode, "t.py is called without this flag" in done.stderr) == (2, True), (
        done.stderr
    )
    done = python("-m", "deepspeed.comm", path=(site,))
    assert "python -m deepspeed.comm is not built yet" in done.stderr
