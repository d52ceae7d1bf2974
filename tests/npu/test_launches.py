"""The number of kernel launches of an update: equal work is batched."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from ranks import RankPools
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import hadal
import npu
from hadal.optim import workspace
from hadal.zero import gradients

from . import runs


class Calls(TorchDispatchMode):
    """Counts operations by their names; of those that it keeps, also the arguments."""

    def __init__(self, kept: str = "") -> None:
        super().__init__()
        self.names: Counter[str] = Counter()
        self.kept: list[tuple[Any, Any]] = []
        self._kept = kept

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.name().removeprefix("aten::")
        self.names[name] += 1
        if name == self._kept:
            self.kept.append((args, kwargs))
        return func(*args, **(kwargs or {}))


def _update(config: dict[str, Any], waiting: int) -> dict[str, Counter[str]]:
    """The calls of a backward and of the step behind it, after a few updates."""
    before, gradients.WAITING_NBYTES = gradients.WAITING_NBYTES, waiting
    with npu.with_float64():
        engine = runs.built({**config, "gradient_accumulation_steps": 1})
        try:
            for number, tokens in enumerate(runs.batches(torch.distributed.get_rank(), 2)):
                tokens = tokens.to(engine.device)
                outputs = engine(tokens[:, :-1])
                loss = F.cross_entropy(outputs.float().flatten(0, 1), tokens[:, 1:].flatten())
                with Calls() as backward:
                    engine.backward(loss)
                with Calls() as step:
                    engine.step()
                if number == 2:
                    break
        finally:
            gradients.WAITING_NBYTES = before
        engine.destroy()
    return {"backward": backward.names, "step": step.names}


ALL = 1 << 25


@pytest.mark.fast_cells("3")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradients_enter_their_bucket_together(stage: int, npus: RankPools) -> None:
    """20 parameters in 8 buckets, or 9 where those that stay whole have one of their own."""
    for found in npus(2).run(_update, runs.config(stage, "bf16"), ALL):
        calls = found["backward"]
        assert calls["_foreach_copy_"] == (9 if stage == 3 else 8)
        assert calls["copy_"] < 20


def test_gradients_do_not_wait_beyond_a_limit(npus: RankPools) -> None:
    for found in npus(2).run(_update, runs.config(1, "bf16"), 1):
        assert found["backward"]["_foreach_copy_"] == 20


@pytest.mark.fast_cells("fp32-3")
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_small_buckets_are_updated_together(stage: int, precision: str, npus: RankPools) -> None:
    for found in npus(2).run(_update, runs.config(stage, precision), ALL):
        calls = found["step"]
        assert calls["_fused_adamw_"] == 1
        assert calls["_foreach_add_.Scalar"] == 1
        # Gradients to the masters' dtype, and masters to that of the weights.
        assert calls["_foreach_copy_"] == (2 if precision == "bf16" else 0)


def _in_two_groups(numel: int) -> list[Tensor]:
    """Weights of two groups with several rates each; so many elements are updated together."""
    torch.manual_seed(3)
    model = runs.Model()
    wide = [one for one in model.parameters() if one.dim() > 1]
    rest = [one for one in model.parameters() if one.dim() < 2]
    groups = [{"params": wide, "weight_decay": 0.1}, {"params": rest, "lr": 0.02}]
    optimizer = torch.optim.AdamW(groups, lr=0.01, amsgrad=True)
    config = runs.config(2, "bf16")
    del config["optimizer"]
    before, workspace._ACCELERATOR_BLOCK_NUMEL = workspace._ACCELERATOR_BLOCK_NUMEL, numel
    try:
        with npu.asynchronous(), npu.with_float64():
            engine, *_ = hadal.initialize(model=model, optimizer=optimizer, config=config)
            runs.advanced(engine, 3)
            found = [*runs.weights(engine).values()]
            engine.destroy()
    finally:
        workspace._ACCELERATOR_BLOCK_NUMEL = before
    return found


@pytest.mark.slow
def test_groups_keep_their_own_rates(npus: RankPools) -> None:
    together, some, alone = (npus(2).run(_in_two_groups, numel) for numel in (ALL, 1024, 1))
    for one, *others in zip(together, some, alone, strict=True):
        assert all(all(map(torch.equal, one, other)) for other in others)
