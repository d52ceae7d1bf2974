"""The flops profiler: operations per module, and how close an update comes to the device's peak.

    python examples/33_flops_profiler.py

The profiler counts one update and times the next. Backward is counted as it runs: the block below
uses activation checkpointing, so its forward runs twice.
"""

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hadal
from hadal.profiling import get_model_profile

CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.001}},
    "flops_profiler": {"enabled": True, "profile_step": 2},
}


class Model(nn.Module):
    """A block that is recomputed in backward, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.block, x, use_reentrant=False))


def main() -> None:
    """Train a few updates; print the report of the third."""
    model = Model()
    flops, macs, params = get_model_profile(model, (4, 64), print_profile=False)
    print(f"alone: {flops}flops, {macs}, {params} parameters")
    model.train()
    engine, _, _, _ = hadal.initialize(model=model, config=CONFIG)
    for _ in range(4):
        loss = engine(torch.randn(4, 64, device=engine.device)).square().mean()
        engine.backward(loss)
        engine.step()
    if engine.flops_profiler is not None:
        profile = engine.flops_profiler.profile
        assert profile.recomputed.macs > 0
        print(f"{profile.recomputed.flops:,} of {profile.backward.flops:,} were recomputed")
    engine.destroy()


if __name__ == "__main__":
    main()
