"""Which variables ranks get besides those of their host: env files, and prefixes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from hadal.errors import LaunchError

DEEPSPEED_ENV, HADAL_ENV = ".deepspeed_env", ".hadal_env"
_PREFIXES = ("MLFLOW", "PYTHON", "MV2", "UCX", "NCCL", "GLOO", "TORCH", "HADAL")
# What accelerators are seen is told to CUDA and ROCm, Intel's and Huawei's drivers.
_SHOWN_BY = ("CUDA_VISIBLE_DEVICES", "ZE_AFFINITY_MASK", "ASCEND_RT_VISIBLE_DEVICES")


def showing(slots: Sequence[int]) -> dict[str, str]:
    """The variables by which a process sees these accelerators alone."""
    return dict.fromkeys(_SHOWN_BY, ",".join(map(str, slots)))


def read_env_file(text: str, name: str) -> dict[str, str]:
    """Read `KEY=VALUE` lines; the value is all that follows the first `=`, as it stands.

    Raises:
        LaunchError: a line that is neither blank nor a comment has no `=`.
    """
    told: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        key, equals, value = line.partition("=")
        if not equals or not key.strip():
            raise LaunchError(f"{name}, line {number}: expected KEY=VALUE, found {line!r}")
        told[key.strip()] = value
    return told


def of_env_files(folders: Sequence[Path], names: Sequence[str]) -> dict[str, str]:
    """What the env files of these folders tell; the later of two wins."""
    told: dict[str, str] = {}
    for path in (folder / name for folder in folders for name in names):
        if path.is_file():
            told.update(read_env_file(text_of(path), str(path)))
    return told


def text_of(path: Path) -> str:
    """A file's text.

    Raises:
        LaunchError: it is none.
    """
    try:
        return path.read_text("utf-8-sig")
    except IsADirectoryError:
        raise LaunchError(f"{path} is a folder; expected a file") from None
    except UnicodeDecodeError as error:
        raise LaunchError(f"{path} is no text in UTF-8: {error}") from None


def passed_on(variables: Mapping[str, str]) -> dict[str, str]:
    """The variables of this process that ranks on other hosts get too."""
    return {key: value for key, value in variables.items() if key.startswith(_PREFIXES)}
