"""`import deepspeed` finds Hadal where it was asked to, and never hides DeepSpeed itself."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import forks
import pytest

from hadal.compat.install import alias

ROOT = Path(__file__).parents[2]


def forked(*arguments: str, path: tuple[Path, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Run Python where torch alone is imported, and this repository is found, and `path` before."""
    found = os.pathsep.join(str(each) for each in (*path, ROOT))
    return forks.run(arguments, env={**os.environ, "PYTHONPATH": found}, timeout=300)


def python(*arguments: str, path: tuple[Path, ...] = ()) -> subprocess.CompletedProcess[str]:
    """The same in a fresh interpreter."""
    found = os.pathsep.join(str(each) for each in (*path, ROOT))
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": found},
        capture_output=True,
        text=True,
        timeout=300,
    )


def told(code: str, path: tuple[Path, ...] = ()) -> list[str]:
    done = python("-c", code, path=path)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_modules_are_sent_to_workers_by_name() -> None:
    # Ray sends a function with the modules that it names.
    for name in ("deepspeed", "deepspeed.runtime.zero"):
        assert pickle.loads(pickle.dumps(alias(name))) is alias(name)


_LOOK = """
import importlib.metadata as metadata, importlib.util as util, sys
spec = util.find_spec("deepspeed")
print(spec is not None and spec.name)
print(metadata.version("deepspeed"), metadata.metadata("deepspeed")["Name"])
print("deepspeed" in metadata.packages_distributions())
print("torch" in sys.modules)
import deepspeed, deepspeed.comm
print(sys.modules["deepspeed"].__spec__.name, deepspeed.__version__, deepspeed.__file__)
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
print(deepspeed.zero.Init.__module__, ZeroParamStatus.AVAILABLE)
print(util.find_spec("deepspeed") is not None)
print(deepspeed.comm is sys.modules["deepspeed.comm"], deepspeed.utils.logger.name)
try:
    import deepspeed.nothing_of_that_name
except ModuleNotFoundError as error:
    print(error)
"""
_FOUND = [
    "deepspeed",
    "0.19.8 deepspeed",
    "True",
    "False",
    f"deepspeed 0.19.8 {ROOT / 'hadal/compat/install.py'}",
    "hadal.zero.init ZeroParamStatus.AVAILABLE",
    "True",
    "True DeepSpeed",
    "No module named 'deepspeed.nothing_of_that_name'",
]


@pytest.mark.slow
def test_import_deepspeed_finds_hadal_where_it_was_installed() -> None:
    twice = "import hadal; hadal.install_as_deepspeed(); hadal.install_as_deepspeed()"
    assert told(twice + _LOOK) == _FOUND


def test_without_it_there_is_no_deepspeed() -> None:
    done = python("-c", "import hadal, hadal.compat.install, deepspeed")
    assert "No module named 'deepspeed'" in done.stderr


def test_deepspeed_itself_is_never_hidden(tmp_path: Path) -> None:
    real = tmp_path / "deepspeed"
    real.mkdir()
    (real / "__init__.py").write_text("__version__ = '0.18.0'\n")
    for before in ("", "import deepspeed; "):
        code = before + "import hadal; hadal.install_as_deepspeed()"
        done = python("-c", code, path=(tmp_path,))
        assert done.returncode == 1
        assert "UsageError" in done.stderr
        assert str(real / "__init__.py") in done.stderr


def test_a_program_runs_unchanged(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(
        "import sys, deepspeed, beside\n"
        "print(__name__, sys.argv[1:], deepspeed.comm.get_world_size(), beside.x)\n"
    )
    (tmp_path / "beside.py").write_text("x = 3\n")
    done = forked("-m", "hadal.compat", str(program), "--deepspeed", "ds.json")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "__main__ ['--deepspeed', 'ds.json'] 1 3\n"


def test_a_module_runs_unchanged(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text("import sys, deepspeed; print(__name__, sys.argv[1:])\n")
    done = forked("-m", "hadal.compat", "-m", "job", "--x", path=(tmp_path,))
    assert done.returncode == 0, done.stderr
    assert done.stdout == "__main__ ['--x']\n"


def test_no_program_is_a_usage_error() -> None:
    done = python("-m", "hadal.compat")
    assert done.returncode == 1
    assert "usage: python -m hadal.compat" in done.stderr
