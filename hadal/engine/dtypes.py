"""The dtypes that a configuration names, as torch's."""

from __future__ import annotations

import torch

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def dtype_named(name: str | None) -> torch.dtype | None:
    """Return the dtype of this name; None for None."""
    return None if name is None else _DTYPES[name]
