"""A pickle read as data: known names become inert stand-ins, any other is refused.

torch's restricted unpickler builds tensors and plain containers. What else DeepSpeed's files name
is the table `STAND_INS`: nothing of DeepSpeed, of the file or of the caller is imported or run.
"""

from __future__ import annotations

import argparse
import os
import pickle
import re
import warnings
import zipfile
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from hadal.checkpoint.files import check_inside, naming, open_regular
from hadal.errors import CheckpointError

_UNKNOWN = re.compile(r"GLOBAL (\S+)")


class Attributes:
    """What is left of an object: its attributes."""

    def __repr__(self) -> str:
        return f"Attributes({vars(self)})"


def _path_text(*parts: str) -> str:
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
        "pathlib.PosixPath": _path_text,
        "pathlib.WindowsPath": _path_text,
        "pathlib.PurePosixPath": _path_text,
        "pathlib._local.PosixPath": _path_text,
        "numpy.ndarray": np.ndarray,
        "numpy.dtype": np.dtype,
        "numpy.core.multiarray._reconstruct": _ARRAY,
        "numpy._core.multiarray._reconstruct": _ARRAY,
        "numpy.core.multiarray.scalar": _SCALAR,
        "numpy._core.multiarray.scalar": _SCALAR,
        **{f"{kind.__module__}.{kind.__name__}": kind for kind in _NUMBERS},
    }
)
"""By the name that stands in a file: what is made in its place."""


def read_pickle(path: Path, root: Path) -> Any:
    """The contents of a file that `torch.save` has written; tensors are mapped, not read.

    Raises:
        CheckpointError: it lies outside `root`, cannot be read, is damaged, or names something
            that is not known to be harmless.
    """
    check_inside(path, root)
    with open_regular(path):
        pass
    allowed: list[Any] = [(stand_in, name) for name, stand_in in STAND_INS.items()]
    try:
        with torch.serialization.safe_globals(allowed), warnings.catch_warnings():
            # A dtype of numpy that is not listed is refused with a warning beside.
            warnings.simplefilter("ignore")
            return torch.load(str(path), map_location="cpu", mmap=True, weights_only=True)
    except pickle.UnpicklingError as error:
        if found := _UNKNOWN.search(str(error)):
            raise CheckpointError(
                f"{path} names {found[1]}, which is not among the plain values that Hadal reads;"
                " nothing of it was run. If it is in your own client_state, save the checkpoint"
                " without it; if you do not know it, do not trust the file"
            ) from error
        raise CheckpointError(f"{path} is damaged, or no checkpoint: {_short(error)}") from error
    except Exception as error:  # of whatever kind: bytes that are not what was written
        raise CheckpointError(f"{path} is damaged: {_short(error)}") from error


def check_pickle(path: Path, root: Path) -> None:
    """Compare every byte of such a file with the checksums that it carries.

    Raises:
        CheckpointError: it is missing or damaged.
    """
    check_inside(path, root)
    with open_regular(path), naming(path, "read"):
        try:
            with zipfile.ZipFile(path) as archive:
                damaged = archive.testzip()
        except (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError) as error:
            raise CheckpointError(f"{path} is damaged: {_short(error)}") from error
    if damaged is not None:
        raise CheckpointError(
            f"{path} is damaged: the checksum of {damaged} in it is not that of its contents; take"
            " another checkpoint"
        )


def _short(error: BaseException) -> str:
    text = str(error).strip().split("\n")[0]
    return f"{type(error).__name__}: {text[:300]}"
