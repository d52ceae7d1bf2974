"""Gates: DeepSpeed's routes, and invariants for any logits."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from hadal.plugins.moe.gate import (
    Routing,
    capacity_of,
    dense,
    jittered,
    largest,
    route_to_many,
    route_to_one,
    route_to_two,
    z_loss,
)

GIVEN = json.loads((Path(__file__).parents[1] / "data/experts.json").read_text())
LOGITS = torch.tensor(GIVEN["logits"])


def routed(case: str) -> tuple[Routing, int]:
    """The gate of a case in the data, with its capacity."""
    sizes = {key: float(value) for key, value in re.findall(r"(cf|min|k)=([\d.]+)", case)}
    k = int(sizes.get("k", case[3] if case[3].isdigit() else 1))
    minimum = int(sizes.get("min", 1))
    capacity = capacity_of(*LOGITS.shape, k, sizes.get("cf", 1.0), minimum)
    limit = None if "drop=False" in case else capacity
    if "seed123" in case:
        torch.manual_seed(123)
    if case.startswith("topk"):
        found = route_to_many(
            LOGITS, k, limit, policy="position" if "position" in case else "probs"
        )
    elif case.startswith("top2"):
        sampled = "sampling=True" in case
        found = route_to_two(LOGITS, limit, samples_second=sampled)
    else:
        used = re.search("used_token=([01]+)", case)
        found = route_to_one(
            LOGITS,
            limit,
            used=torch.tensor([float(one) for one in used[1]]) if used else None,
            is_noisy="RSample" in case,
            keeps_at_random="rts=True" in case,
        )
    return found, largest(found.counts) if limit is None else capacity


def routes_of(routing: Routing) -> list[tuple[int, int, int, float]]:
    """Kept choices as token, expert, slot and weight."""
    kept = routing.kept.nonzero().tolist()
    found = [
        (
            token,
            int(routing.experts[token, choice]),
            int(routing.slots[token, choice]),
            float(routing.weights[token, choice]),
        )
        for token, choice in kept
    ]
    return sorted(found)


def check(routing: Routing, told: dict[str, Any], capacity: int) -> None:
    assert capacity == told["capacity"]
    assert routing.counts.tolist() == told["counts"]
    assert float(routing.balance_loss) == pytest.approx(told["l_aux"], abs=1e-6)
    found, expected = routes_of(routing), sorted(map(tuple, told["routes"]))
    assert [one[:3] for one in found] == [one[:3] for one in expected]
    assert [one[3] for one in found] == pytest.approx([one[3] for one in expected], abs=1e-6)


@pytest.mark.parametrize("case", GIVEN["gates"])
def test_routes_are_deepspeed_s(case: str) -> None:
    before = LOGITS.clone()
    routing, capacity = routed(case)
    check(routing, GIVEN["gates"][case], capacity)
    assert torch.equal(LOGITS, before)


@pytest.mark.parametrize("told", GIVEN["small"], ids=lambda told: told["case"])
def test_routes_of_small_logits_are_deepspeed_s(told: dict[str, Any]) -> None:
    logits, args = torch.tensor(told["logits"]), told["args"]
    k, drops = args.get("k", 1), args.get("drop_tokens", True)
    capacity = capacity_of(*logits.shape, k, args["capacity_factor"], args["min_capacity"])
    limit = capacity if drops else None
    if "use_rts" in args:
        routing = route_to_one(logits, limit, keeps_at_random=args["use_rts"])
    else:
        routing = route_to_many(logits, k, limit, policy=args.get("drop_policy", "probs"))
    check(routing, told, capacity if drops else largest(routing.counts))


def test_jitter_is_deepspeed_s() -> None:
    torch.manual_seed(123)
    found = jittered(torch.ones(4))
    assert found.tolist() == pytest.approx(GIVEN["jitter"], abs=1e-6)


# ---- any logits ----------------------------------------------------------------------------------

shapes = st.tuples(st.integers(0, 9), st.integers(1, 6), st.integers(0, 2**31))


def logits_of(tokens: int, experts: int, seed: int) -> Tensor:
    return torch.randn(tokens, experts, generator=torch.Generator().manual_seed(seed))


def some_routing(k: int, logits: Tensor, capacity: int | None, used: Tensor | None) -> Routing:
    if k == 1:
        return route_to_one(logits, capacity, used=used)
    if k == 2:
        return route_to_two(logits, capacity, used=used)
    return route_to_many(logits, k, capacity, used=used)


@given(shapes, st.integers(1, 4), st.none() | st.integers(0, 4), st.booleans())
def test_slots_are_numbered_and_within_the_capacity(
    shape: tuple[int, int, int], k: int, capacity: int | None, some_used: bool
) -> None:
    logits = logits_of(*shape)
    tokens, experts = logits.shape
    k = min(k, experts)
    used = torch.arange(tokens) % 2 if some_used else None
    routing = some_routing(k, logits, capacity, used)
    valid = torch.ones(tokens, dtype=torch.bool) if used is None else used.bool()
    assert int(routing.counts.sum()) == k * int(valid.sum())
    assert not routing.kept[~valid].any()
    assert torch.equal(routing.weights[~routing.kept], torch.zeros(int((~routing.kept).sum())))
    for expert in range(experts):
        slots = routing.slots[(routing.experts == expert) & routing.kept]
        count = int(routing.counts[expert])
        assert sorted(slots.tolist()) == list(
            range(count if capacity is None else min(count, capacity))
        )
    # No token has an expert twice.
    assert all(len(set(row)) == k for row in routing.experts.tolist())


@given(shapes, st.integers(1, 4))
def test_the_dense_form_has_the_same_weights(shape: tuple[int, int, int], k: int) -> None:
    logits = logits_of(*shape)
    routing = some_routing(min(k, logits.shape[1]), logits, 2, None)
    found = dense(routing, 2)
    expected = torch.zeros(*logits.shape, 2)
    for token, expert, slot, weight in routes_of(routing):
        expected[token, expert, slot] = weight
    assert torch.equal(found, expected)


@given(st.integers(1, 6), st.integers(1, 4))
def test_the_balance_loss_of_equal_loads_is_one(experts: int, times: int) -> None:
    logits = (torch.eye(experts) * 3).repeat(times, 1)
    for k in range(1, experts + 1):
        loss = route_to_many(logits, k, None).balance_loss
        assert float(loss) == pytest.approx(1.0, abs=1e-5)


def test_gradients_reach_the_logits_through_weights_and_losses() -> None:
    logits = logits_of(6, 4, 1).requires_grad_()
    for k in (1, 2, 3):
        routing = some_routing(k, logits, 2, None)
        (of_weights,) = torch.autograd.grad(
            routing.weights.square().sum(), logits, retain_graph=True
        )
        (of_loss,) = torch.autograd.grad(routing.balance_loss, logits)
        assert of_weights.abs().sum() > 0
        assert of_loss.abs().sum() > 0


def test_the_z_loss_is_the_mean_square_of_log_sum_exp() -> None:
    assert float(z_loss(torch.zeros(5, 4))) == pytest.approx(torch.tensor(4.0).log().item() ** 2)
