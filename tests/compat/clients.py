"""Prepares the ranks of a pool to run programs written for DeepSpeed."""

from __future__ import annotations

import importlib
import os
import warnings
from typing import Any


def load(name: str) -> Any:
    """Import a module of this directory, for whose libraries Hadal is DeepSpeed.

    Only in the ranks' processes: what is installed stays.
    """
    import hadal

    # Read by transformers when it is imported.
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")
    # What libraries tell each other of their next releases is not ours to mend.
    for told in (DeprecationWarning, FutureWarning):
        warnings.simplefilter("ignore", told)
    hadal.install_as_deepspeed()
    return importlib.import_module(name)
