"""Experts as modules, and products with the weights of many experts at once."""

from __future__ import annotations

import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from hadal.plugins.moe.experts import Experts, can_group, grouped_linear, is_moe_param


def products(rows: Tensor, weight: Tensor, counts: list[int]) -> Tensor:
    return torch.cat([F.linear(one, w) for one, w in zip(rows.split(counts), weight, strict=True)])


@settings(deadline=None, max_examples=25)
@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=4),
    st.sampled_from([(8, 4), (3, 5), (4, 12)]),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_grouped_products_are_those_of_each_expert(
    counts: list[int], sizes: tuple[int, int], dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(sum(counts))
    rows = torch.randn(sum(counts), sizes[0], generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(len(counts), *sizes[::-1], generator=generator).to(dtype).requires_grad_()
    found, expected = grouped_linear(rows, weight, counts), products(rows, weight, counts)
    atol = 1e-5 if dtype == torch.float32 else 0.1
    assert torch.allclose(found, expected, atol=atol)
    for mine, theirs in zip(
        torch.autograd.grad(found.sum(), [rows, weight]),
        torch.autograd.grad(expected.sum(), [rows, weight]),
        strict=True,
    ):
        assert torch.allclose(mine, theirs, atol=atol)
        assert mine.dtype == dtype


def test_sizes_that_torch_does_not_group_are_looped_over() -> None:
    assert can_group(torch.zeros(2, 8), torch.zeros(3, 4, 8))
    assert not can_group(torch.zeros(2, 6), torch.zeros(3, 4, 6))
    with torch.autocast("cpu", torch.bfloat16):
        assert not can_group(torch.zeros(2, 8), torch.zeros(3, 4, 8))


class WithBias(nn.Module):
    """An expert that returns its output and its bias, like Megatron's."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, bias=False)

    def forward(self, rows: Tensor) -> tuple[Tensor, None]:
        return self.linear(rows), None


def test_experts_are_marked_copies() -> None:
    one = WithBias()
    experts = Experts(one, 3, "ep_size_2")
    assert not is_moe_param(one.linear.weight)
    for parameter in experts.parameters():
        assert is_moe_param(parameter)
        assert parameter.group_name == "ep_size_2"  # type: ignore[attr-defined]
        assert torch.equal(parameter, one.linear.weight)
    inputs = torch.randn(2, 3, 5, 4)
    assert torch.allclose(experts(inputs), one.linear(inputs))
    rows = torch.randn(5, 4)
    assert torch.allclose(experts.of_rows(rows, [2, 0, 3]), one.linear(rows))


def test_an_expert_without_rows_has_a_gradient_of_zero() -> None:
    experts = Experts(nn.Linear(4, 4), 2)
    experts.of_rows(torch.randn(3, 4), [3, 0]).sum().backward()
    idle = experts.deepspeed_experts[1]
    for parameter in idle.parameters():
        assert parameter.grad is not None
        assert not parameter.grad.any()
