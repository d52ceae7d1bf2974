"""The installed distribution: its names and contents."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from hadal import __version__

ROOT = Path(__file__).parents[1]


def build(source: Path, folder: Path, umask: int = 0o022) -> None:
    """Build an sdist, and a wheel from it, as `make wheel` does."""
    command = [
        sys.executable,
        "-m",
        "build",
        "--no-isolation",
        "--outdir",
        str(folder),
        str(source),
    ]
    environment = {**os.environ, "SOURCE_DATE_EPOCH": "1700000000"}
    run = subprocess.run(command, capture_output=True, text=True, env=environment, umask=umask)
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the sdist, built from the repository."""
    folder = tmp_path_factory.mktemp("built")
    build(ROOT, folder)
    return folder


@pytest.mark.slow
def test_it_has_a_name_of_its_own(built: Path) -> None:
    """`hadal` on the public index is somebody else's."""
    assert {path.name for path in built.iterdir()} == {
        f"hadal_train-{__version__}.tar.gz",
        f"hadal_train-{__version__}-py3-none-any.whl",
    }


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


@pytest.mark.slow
def test_the_same_files_give_the_same_bytes(built: Path, tmp_path: Path) -> None:
    """Elsewhere, with other times and permissions of files and folders."""

    def copied(path: str, to: str) -> None:
        shutil.copyfile(path, to)
        os.chmod(to, os.stat(path).st_mode & 0o700)

    source, other = tmp_path / "elsewhere", tmp_path / "built"
    source.mkdir(mode=0o700)
    kept = "hadal compat tests examples docs README.md CHANGELOG.md SECURITY.md LICENSE"
    for name in (*kept.split(), "pyproject.toml", ".gitignore"):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, copy_function=copied)
        else:
            copied(str(ROOT / name), str(source / name))
    build(source, other, umask=0o077)
    assert digests(other) == digests(built)


def test_the_changelog_begins_with_this_version() -> None:
    headings = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0].split()[0] == __version__


def test_the_sdist_is_enough_to_test_and_to_read(built: Path) -> None:
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    wanted = "README.md LICENSE pyproject.toml hadal/__init__.py tests/ranks.py docs/design.md"
    assert set(wanted.split()) <= names
    assert not [name for name in names if name.endswith(".pyc")]


def test_the_wheel_runs_where_nothing_else_of_the_repository_is(
    built: Path, tmp_path: Path
) -> None:
    (path,) = built.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        tops = {name.split("/")[0] for name in archive.namelist()}
        assert tops == {"hadal", f"hadal_train-{__version__}.dist-info"}
        assert "hadal/py.typed" in archive.namelist()
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    target = tmp_path / "installed"
    subprocess.run([*install, "--target", str(target), str(path)], check=True)
    program = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import hadal, importlib.metadata as metadata\n"
        "print(hadal.__file__); print(metadata.version('hadal-train'))"
    )
    command = [sys.executable, "-I", "-c", program, str(target)]
    run = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert run.stdout.split() == [str(target / "hadal" / "__init__.py"), __version__]
    script = target / "bin" / "hadal"
    told = subprocess.run(
        [sys.executable, str(script), "--version"],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": str(target)},
    )
    assert told.stdout == f"hadal {__version__}\n"
