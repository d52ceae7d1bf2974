"""Memory known before the run: a rank holds the states of its stage, byte for byte.

With Psi trainable parameters, 16-bit compute, fp32 masters and two moments on N ranks:

    stage 0   2 Psi weights + 2 Psi gradients + 12 Psi optimizer
    stage 1   2 Psi         + 2 Psi           + 12 Psi / N
    stage 2   2 Psi         + 2 Psi / N       + 12 Psi / N
    stage 3   2 Psi / N     + 2 Psi / N       + 12 Psi / N

In fp32 the weights are their own masters: 4 Psi, 4 Psi and 8 Psi in their place. Without masters
the optimizer holds two fp32 moments beside 16-bit weights, 8 Psi, or two of 16 bit, 4 Psi.

To this come at most 1 % of padding, a little for scalars, and the buckets in flight, whose size the
bucket keys bound.

A rank counts the storages of all tensors that Python can reach. What only C++ holds (saved by a
graph) is not at rest at any of the moments counted at, except inside a block's own turn.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from cases import every
from ranks import RankPools
from torch import Tensor, nn
from torch.nn import functional as F

import hadal

WIDTH = 96
BLOCKS = 8
ROWS, TIME = 2, 3
PADDING = 0.01
SCALARS = 16 * 1024  # bytes for norms, flags, step counters, one NaN per freed weight
IN_FLIGHT = 3  # buckets: one in use, one on its way in, one on its way out
ACTIVATIONS = 4 * ROWS * TIME * WIDTH * 32  # bytes, of one block
KEYS = [40_000, 80_000]  # elements; the largest tensor has 36,864
NO_MASTERS = {"enabled": True, "bf16_master_weights_and_grads": True}
SECTIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "bf16 without masters": {"bf16": NO_MASTERS},
    "bf16 moments": {"bf16": {**NO_MASTERS, "bf16_optimizer_states": True}},
    "fp16 without masters": {
        "fp16": {"enabled": True, "loss_scale": 8, "fp16_master_weights_and_grads": True}
    },
}
# Bytes per trainable element: of weights and of gradients each, and of what the optimizer holds.
NBYTES = {
    "fp32": (4, 8),
    "bf16": (2, 12),
    "bf16 without masters": (2, 8),
    "bf16 moments": (2, 4),
    "fp16 without masters": (2, 8),
}


class Block(nn.Module):
    """A transformer block with one head, which counts in its own turn if requested."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.LayerNorm(WIDTH)
        self.into = nn.Linear(WIDTH, 3 * WIDTH)
        self.out_of = nn.Linear(WIDTH, WIDTH)
        self.between = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.counts = False
        self.held_in_forward = self.held_in_backward = 0

    def forward(self, values: Tensor) -> Tensor:
        query, key, value = self.into(self.before(values)).chunk(3, dim=-1)
        values = values + self.out_of(F.scaled_dot_product_attention(query, key, value))
        values = values + self.down(F.gelu(self.up(self.between(values))))
        if self.counts:
            self.held_in_forward = held_nbytes()
            values.register_hook(self.count_in_backward)
        return values

    def count_in_backward(self, _: Tensor) -> None:
        self.held_in_backward = held_nbytes()


@dataclass
class Held:
    """Bytes of tensors on one rank, without those that were there before the model."""

    numel: int  # trainable elements: Psi
    block_numel: int
    after_initialize: int
    before_step: int  # of the second update, when the moments exist
    at_rest: int  # after that step
    in_forward: int  # while a block in the middle runs, in the third update
    in_backward: int


def held_nbytes() -> int:
    """The bytes of all storages that a Python object reaches."""
    storages = {}
    # Out of sight of torch-function modes: one that records what a step uses would record this.
    with torch._C.DisableTorchFunction():
        for found in gc.get_objects():
            if issubclass(type(found), Tensor):  # isinstance would wake what is deprecated
                for tensor in (found, found.grad if found.is_leaf else None):
                    if tensor is None or tensor.layout is not torch.strided:
                        continue
                    # What a compiler traced with says cpu, and its storage is on meta.
                    storage = tensor.untyped_storage()
                    if storage.device.type != "meta" and _has_memory(storage):
                        storages[storage.data_ptr()] = storage.nbytes()
    storages.pop(0, None)
    return sum(storages.values())


def _has_memory(storage: torch.UntypedStorage) -> bool:
    """True if it owns memory: a wrapper of other tensors, such as a DTensor, does not."""
    try:
        storage.data_ptr()
    except RuntimeError:
        return False
    return True


def memory_of_a_rank(stage: int, precision: str, key: int) -> Held:
    """Train three updates and count at each moment."""
    gc.collect()
    already = held_nbytes()
    model = nn.Sequential(*(Block() for _ in range(BLOCKS)))
    numel = sum(p.numel() for p in model.parameters())
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": ROWS,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": key,
            "allgather_bucket_size": key,
            "stage3_prefetch_bucket_size": key,
            "stage3_max_live_parameters": 0,
            "stage3_max_reuse_distance": 0,
            "stage3_param_persistence_threshold": 0,
        },
    }
    config |= SECTIONS[precision]
    engine, _, _, _ = hadal.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    after_initialize = now(already)
    dtype = next(model.parameters()).dtype
    inputs = torch.linspace(-1, 1, ROWS * TIME * WIDTH).reshape(ROWS, TIME, WIDTH).to(dtype)
    middle = model[BLOCKS // 2]
    before_step = at_rest = 0
    for update in range(3):
        middle.counts = update == 2
        engine.backward(engine(inputs).float().square().mean())
        if update == 1:
            before_step = now(already)
        engine.step()
        if update == 1:
            at_rest = now(already)
    held = Held(
        numel=numel,
        block_numel=numel // BLOCKS,
        after_initialize=after_initialize,
        before_step=before_step,
        at_rest=at_rest,
        in_forward=middle.held_in_forward - already,
        in_backward=middle.held_in_backward - already,
    )
    engine.destroy()
    return held


def now(already: int) -> int:
    """The storages that are held now but were not before."""
    gc.collect()
    return held_nbytes() - already


@dataclass(frozen=True)
class Promise:
    """Bytes per kind of state on one rank."""

    weights: float
    gradients: float
    optimizer: float

    def __iter__(self) -> Any:
        return iter((self.weights, self.gradients, self.optimizer))


def promise_of(stage: int, precision: str, numel: int, world_size: int) -> Promise:
    """The table in the module's docstring."""
    weight, optimizer = NBYTES[precision]
    cuts = [world_size if stage >= first else 1 for first in (3, 2, 1)]
    return Promise(weight * numel / cuts[0], weight * numel / cuts[1], optimizer * numel / cuts[2])


def most(promised: float) -> float:
    """A promise with its padding and its scalars."""
    return promised * (1 + PADDING) + SCALARS


@pytest.mark.fast_cells("0-1-bf16-40000", "1-1-fp32-40000", "2-3-bf16-40000", "3-1-fp32-80000")
@every(stage=range(4), world_size=[1, 2, 3], precision=["bf16", "fp32"], key=KEYS)
def test_a_rank_holds_the_states_of_its_stage(
    stage: int, world_size: int, precision: str, key: int, ranks: RankPools
) -> None:
    """At rest, when the gradients of an update are complete, and in a block's own turn."""
    check_promise(stage, world_size, precision, key, ranks)


@pytest.mark.fast_cells(
    "3-2-bf16 moments", "3-1-bf16 without masters", "3-1-bf16 moments", "3-1-fp16 without masters"
)
@pytest.mark.claims(
    "bf16.bf16_master_weights_and_grads",
    "bf16.bf16_optimizer_states",
    "fp16.fp16_master_weights_and_grads",
)
@pytest.mark.parametrize(
    "precision", ["bf16 without masters", "bf16 moments", "fp16 without masters"]
)
@pytest.mark.parametrize(("stage", "world_size"), [(1, 2), (2, 2), (3, 2), (3, 1)])
def test_weights_that_are_their_own_masters_cost_no_more(
    stage: int, world_size: int, precision: str, ranks: RankPools
) -> None:
    """Without masters, and with moments of 16 bit, in the same moments."""
    check_promise(stage, world_size, precision, KEYS[0], ranks)


def check_promise(stage: int, world_size: int, precision: str, key: int, ranks: RankPools) -> None:
    nbytes, _ = NBYTES[precision]
    for held in ranks(world_size).run(memory_of_a_rank, stage, precision, key):
        assert held.numel > 200_000
        weights, gradients, optimizer = promise_of(stage, precision, held.numel, world_size)
        everything = weights + gradients + optimizer
        assert everything <= held.before_step <= most(everything)
        assert weights + optimizer <= held.at_rest <= most(everything)
        assert weights + optimizer <= min(held.in_forward, held.in_backward)
        # The weights as they were given, in fp32, are gone.
        assert weights <= held.after_initialize <= most(everything)
        # A block in its turn is whole, in backward with its gradient, while buckets travel.
        block = held.block_numel * nbytes
        in_turn = most(everything) + IN_FLIGHT * key * nbytes + ACTIVATIONS
        assert held.in_forward <= in_turn + block * (stage == 3)
        assert held.in_backward <= in_turn + block * (stage >= 2) + block * (stage == 3)


def test_a_count_sees_views_once_and_gradients_too() -> None:
    """The count itself: shared storages count once, a gradient counts, a freed storage does not."""
    gc.collect()
    before = held_nbytes()
    flat = torch.zeros(1000)
    views = [flat[:500], flat[500:]]
    assert held_nbytes() - before == 4000
    parameter = nn.Parameter(torch.zeros(100))
    parameter.sum().backward()
    assert held_nbytes() - before == 4800
    flat.untyped_storage().resize_(0)
    assert held_nbytes() - before == 800
    del views
