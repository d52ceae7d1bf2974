"""Two engines trained by one loss, with plain `loss.backward()`.

    python examples/29_a_common_loss.py

A backward of any tensor computed by an engine's forward counts as the engine's own: gradients are
averaged over the ranks, and `step` updates. In fp16 call `engine.scale(loss).backward()`.
"""

import torch
from torch import nn

import hadal


def engine_for(model: nn.Module) -> hadal.Engine:
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.05}},
        "zero_optimization": {"stage": 3},
    }
    return hadal.initialize(model=model, config=config)[0]


def main() -> None:
    torch.manual_seed(0)
    encoder, decoder = engine_for(nn.Linear(4, 2)), engine_for(nn.Linear(2, 4))
    data = torch.Generator().manual_seed(hadal.comm.get_rank())
    losses = []
    for _ in range(30):
        x = torch.randn(8, 1, generator=data).expand(8, 4).to(encoder.device)
        loss = (decoder(encoder(x)) - x).square().mean()
        loss.backward()
        encoder.step()
        decoder.step()
        losses.append(loss.item())
    if hadal.comm.get_rank() == 0:
        print(f"loss {losses[0]:.3f} at first, {losses[-1]:.3f} after {encoder.global_steps} steps")
    assert losses[-1] < losses[0] / 4


if __name__ == "__main__":
    main()
