"""The distribution called deepspeed: programs find Hadal under that name, and nothing is hidden."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from test_install import _FOUND, _LOOK, ROOT, told

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


def test_import_deepspeed_finds_hadal_where_it_is_installed(site: Path) -> None:
    # Nobody has called `install_as_deepspeed`: the program is as it was.
    assert told(_LOOK, path=(site,)) == _FOUND


def test_a_submodule_may_be_the_first_import(site: Path) -> None:
    code = "import deepspeed.comm, sys; print(sys.modules['deepspeed'].zero.Init.__module__)"
    assert told(code, path=(site,)) == ["hadal.zero.init"]


def test_it_goes_together_with_a_call(site: Path) -> None:
    code = "import hadal; hadal.install_as_deepspeed(); import deepspeed; print(deepspeed.__file__)"
    assert told(code, path=(site,)) == [str(ROOT / "hadal/compat/alias.py")]


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
