"""Records torch's raw calls: their names and bytes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from hadal.comm import Ranks, collectives, functions, rows
from hadal.comm.local import pairs

# The tags of messages that carry no values: codes, and counts of rows.
_OF_NUMBERS = (collectives.CODE, collectives.SMALL, rows._TO_OWNERS[0], rows._FROM_OWNERS[0])
_CALLS = {
    "isend": (pairs, "_start"),
    "broadcast": (dist, "broadcast"),
    "reduce": (dist, "reduce"),
    "reduce_scatter": (dist, functions.reduce_scatter_tensor.__name__),
    "all_gather": (dist, functions.all_gather_into_tensor.__name__),
}


@dataclass
class Traffic:
    """(call, bytes of its input) in order; codes and counts are left out."""

    calls: list[tuple[str, int]] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return sum(nbytes for _, nbytes in self.calls)

    def of(self, name: str) -> list[int]:
        return [nbytes for call, nbytes in self.calls if call == name]


@contextmanager
def counted() -> Iterator[Traffic]:
    """Count this rank's calls."""
    traffic = Traffic()
    with ExitStack() as stack:
        for name, (module, attribute) in _CALLS.items():
            given = 1 if name in ("isend", "reduce_scatter", "all_gather") else 0
            call = getattr(module, attribute)

            def note(
                *args: Any, _call: Any = call, _name: str = name, _at: int = given, **rest: Any
            ):
                tensor: torch.Tensor = args[_at]
                is_receive = args[0] is False
                if not is_receive and rest.get("tag") not in _OF_NUMBERS:
                    traffic.calls.append((_name, tensor.nbytes))
                return _call(*args, **rest)

            stack.enter_context(patch.object(module, attribute, note))
        yield traffic


@contextmanager
def by_collectives() -> Iterator[None]:
    """Let tensors on the CPU travel as those of an accelerator do."""
    with patch.object(Ranks, "exchanges_in_pairs", lambda *_: False):
        yield
