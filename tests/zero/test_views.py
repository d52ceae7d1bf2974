"""A sum over all bits tells whether values have changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hadal.zero import views as module
from hadal.zero.views import digest

ROW = module._ADDENDS


class Largest(TorchDispatchMode):
    """Records the bytes of each result that has memory of its own."""

    def __init__(self, nbytes: list[int]) -> None:
        super().__init__()
        self.nbytes = nbytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.nbytes.append(result.nbytes)
        return result


def values(numel: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(numel)).to(dtype)


@given(st.integers(1, 3 * ROW), st.data())
def test_one_changed_bit_is_seen(words: int, data: st.DataObject) -> None:
    before = values(4 * words)
    after = before.clone()
    assert torch.equal(digest(before), digest(after))
    place, bit = data.draw(st.integers(0, words - 1)), data.draw(st.integers(0, 63))
    after.view(torch.int64)[place] ^= -(1 << 63) if bit == 63 else 1 << bit
    assert not torch.equal(digest(before), digest(after))


@pytest.mark.parametrize("numel", [4, 4 * ROW, 4 * (2 * ROW + 3)])
@pytest.mark.parametrize(
    "edit",
    [
        lambda v: v.neg_(),
        lambda v: v.mul_(2),
        lambda v: v.zero_(),
        lambda v: v.copy_(v.flip(0)),
        lambda v: v[3::4].neg_(),  # the highest bit of each word
        lambda v: v.copy_(v.view(-1, 4).roll(1, 1).reshape(-1)),
        lambda v: (
            v.copy_(v.view(torch.int64).roll(1).view(v.dtype)) if v.numel() > 4 else v.add_(1)
        ),
    ],
)
def test_edits_of_many_values_are_seen(numel: int, edit: object) -> None:
    before = values(numel)
    after = before.clone()
    edit(after)  # type: ignore[operator]
    assert not torch.equal(digest(before), digest(after))


def test_each_byte_is_read_once() -> None:
    """The largest temporary is a hundredth of the values."""
    before = values(4 * 2 * ROW * ROW)
    allocated: list[int] = []
    with Largest(allocated):
        digest(before)
    assert max(allocated) <= before.nbytes // 100


def test_nothing_has_a_sum_too() -> None:
    assert int(digest(torch.empty(0))) == 0
