"""Reading pickles as data: known names become inert stand-ins, all others are refused.

torch's restricted unpickler builds tensors and plain containers. The other names in DeepSpeed's
files are in the table `STAND_INS`: no code of DeepSpeed, the file or the caller is imported or run.
"""

from __future__ import annotations

import argparse
import os
import pickle
import re
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

import numpy as np
import torch

from hadal.checkpoint.files import open_file, system_errors
from hadal.errors import CheckpointError

_UNKNOWN = re.compile(r"GLOBAL (\S+)")


class Attributes:
    """A stand-in for an object: only its attributes."""

    def __repr__(self) -> str:
        return f"Attributes({vars(self)})"


def path_text(*parts: str) -> str:
    """Return a path in a file as text."""
    return os.path.join(*parts) if parts else "."


_ARRAY: Any = np.array(0.0).__reduce__()[0]
_SCALAR: Any = np.float64(0.0).__reduce__()[0]
_NUMBERS = {type(np.dtype(code)) for code in "?bhilqBHILQefdFD"}

STAND_INS = MappingProxyType(
    {
        "deepspeed.runtime.fp16.loss_scaler.LossScaler": Attributes,
        "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler": Attributes,
        "deepspeed.runtime.zero.config.ZeroStageEnum": int,
        "deepspeed.utils.tensor_fragment.fragment_address": Attributes,
        "argparse.Namespace": argparse.Namespace,
        "pathlib.PosixPath": path_text,
        "pathlib.WindowsPath": path_text,
        "pathlib.PurePosixPath": path_text,
        "pathlib._local.PosixPath": path_text,
        "numpy.ndarray": np.ndarray,
        "numpy.dtype": np.dtype,
        "numpy.core.multiarray._reconstruct": _ARRAY,
        "numpy._core.multiarray._reconstruct": _ARRAY,
        "numpy.core.multiarray.scalar": _SCALAR,
        "numpy._core.multiarray.scalar": _SCALAR,
        **{f"{kind.__module__}.{kind.__name__}": kind for kind in _NUMBERS},
    }
)
"""Stand-ins by the name in a file."""


def read_pickle(path: Path, stand_ins: Mapping[str, Any] = STAND_INS) -> Any:
    """Return the contents of a file that `torch.save` wrote; tensors are mapped, not read.

    `stand_ins` replace the classes and functions that a file may name.

    Raises:
        CheckpointError: it cannot be read, is damaged, or names something that is not known to be
            harmless.
    """
    open_file(path)
    allowed: list[Any] = [(stand_in, name) for name, stand_in in stand_ins.items()]
    try:
        with torch.serialization.safe_globals(allowed), warnings.catch_warnings():
            # torch warns as well when it refuses a numpy dtype that is not listed.
            warnings.simplefilter("ignore")
            return torch.load(str(path), map_location="cpu", mmap=True, weights_only=True)
    except pickle.UnpicklingError as error:
        if found := _UNKNOWN.search(str(error)):
            raise CheckpointError(
                f"{path} names {found[1]}, which is not among the plain values that Hadal reads;"
                " none of its code was run. If it is in your own client_state, save the checkpoint"
                " without it; if you do not recognize it, do not trust the file"
            ) from error
        raise CheckpointError(f"{path} is damaged, or not a checkpoint: {short(error)}") from error
    except Exception as error:  # damaged bytes may raise any kind
        raise CheckpointError(f"{path} is damaged: {short(error)}") from error


def check_pickle(path: Path) -> None:
    """Compare every byte of a file that `torch.save` wrote with the checksums in it.

    Raises:
        CheckpointError: it is missing or damaged.
    """
    open_file(path)
    with system_errors(path, "read"), open(path, "rb") as file:
        check_archive(file, f"{path} is damaged")


def check_archive(file: BinaryIO, what: str) -> None:
    """Compare every byte of what `torch.save` wrote with the checksums in it.

    Raises:
        CheckpointError: they differ; the message begins with `what`.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            damaged = archive.testzip()
    except (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError) as error:
        raise CheckpointError(f"{what}: {short(error)}") from error
    if damaged is not None:
        raise CheckpointError(
            f"{what}: the checksum of {damaged} in it does not match its contents; use another"
            " checkpoint"
        )


def short(error: BaseException) -> str:
    """Return an error as a short line."""
    text = str(error).strip().split("\n")[0]
    return f"{type(error).__name__}: {text[:300]}"
