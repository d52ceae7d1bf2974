"""Keeping torch's compiler out of the way of those who do not compile."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from torch.optim import Optimizer


@contextmanager
def spared_import() -> Iterator[None]:
    """Make an optimizer inside it without importing torch's compiler, which takes about a second.

    `Optimizer.add_param_group` is kept out of compiled graphs by a wrapper that imports the
    compiler at its first call, unless it finds the attribute set here. Nothing is compiled while
    an optimizer is made. Where torch does it otherwise, this changes nothing.
    """
    plain = inspect.unwrap(Optimizer.add_param_group)
    if "torch._dynamo" in sys.modules or hasattr(plain, "__dynamo_disable"):
        yield
        return
    plain.__dynamo_disable = plain
    try:
        yield
    finally:
        del plain.__dynamo_disable
