"""Your own accumulation boundary: any number of backward passes, then one step.

    python examples/11_own_boundary.py

With `managed_gradient_accumulation` false, the engine does not count micro-steps. If you do not
know their number in advance, divide the loss yourself and pass `scale_wrt_gas=False`.
"""

import torch
from torch import nn

import hadal


def main() -> None:
    torch.manual_seed(0)
    engine, _, _, _ = hadal.initialize(
        model=nn.Linear(4, 2),
        config={
            "train_micro_batch_size_per_gpu": 3,
            "managed_gradient_accumulation": False,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.05}},
            "zero_optimization": {"stage": 1},
        },
    )
    data = torch.Generator().manual_seed(hadal.comm.get_rank())
    for requests in (2, 5, 1):
        for _ in range(requests):
            x = torch.randn(3, 4, generator=data).to(engine.device)
            loss = (engine(x) - x[:, :2]).square().mean()
            engine.backward(loss / requests, scale_wrt_gas=False)
        engine.step()
        if hadal.comm.get_rank() == 0:
            print(
                f"update {engine.global_steps}: {requests} backwards,"
                f" {engine.global_samples} samples so far, loss {loss.item():.3f}"
            )
    assert engine.global_steps == 3
    assert engine.micro_steps == 8


if __name__ == "__main__":
    main()
