"""Environment variables for ranks beyond their host's own: from env files, and by prefix.

Tests: tests/launcher/test_parts.py
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from hadal.errors import LaunchError

DEEPSPEED_ENV, HADAL_ENV = ".deepspeed_env", ".hadal_env"
_PREFIXES = ("MLFLOW", "PYTHON", "MV2", "UCX", "NCCL", "GLOO", "TORCH", "HADAL")
# The variables that limit visible accelerators: CUDA and ROCm, Intel, Huawei.
_SHOWN_BY = ("CUDA_VISIBLE_DEVICES", "ZE_AFFINITY_MASK", "ASCEND_RT_VISIBLE_DEVICES")


def showing(slots: Sequence[int]) -> dict[str, str]:
    """Return the variables that make only these accelerators visible to a process."""
    return dict.fromkeys(_SHOWN_BY, ",".join(map(str, slots)))


def read_env_file(text: str, name: str) -> dict[str, str]:
    """Read `KEY=VALUE` lines; the value is everything after the first `=`, verbatim.

    Raises:
        LaunchError: a line that is neither blank nor a comment has no `=`.
    """
    values: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        key, equals, value = line.partition("=")
        if not equals or not key.strip():
            raise LaunchError(f"{name}, line {number}: expected KEY=VALUE, found {line!r}")
        values[key.strip()] = value
    return values


def of_env_files(folders: Sequence[Path], names: Sequence[str]) -> dict[str, str]:
    """Return the variables of the env files in these folders; a later file wins."""
    values: dict[str, str] = {}
    for path in (folder / name for folder in folders for name in names):
        if path.is_file():
            values.update(read_env_file(text_of(path), str(path)))
    return values


def text_of(path: Path) -> str:
    """Return a file's text.

    Raises:
        LaunchError: it is not a text file.
    """
    try:
        return path.read_text("utf-8-sig")
    except IsADirectoryError:
        raise LaunchError(f"{path} is a folder; expected a file") from None
    except UnicodeDecodeError as error:
        raise LaunchError(f"{path} is not UTF-8 text: {error}") from None


def passed_on(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of this process to pass on to ranks on other hosts."""
    return {key: value for key, value in variables.items() if key.startswith(_PREFIXES)}
