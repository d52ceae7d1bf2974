"""Fewer channels: half of a convolution's channels are removed, with the weights that read them.

python examples/53_fewer_channels.py
"""

import torch
from torch import nn

import hadal
from hadal.compression import compression_report, init_compression, redundancy_clean

config = {
    "train_micro_batch_size_per_gpu": 32,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
    "compression_training": {
        "channel_pruning": {
            "shared_parameters": {"enabled": True, "method": "topk", "schedule_offset": 20},
            "different_groups": {
                "first": {
                    "params": {"dense_ratio": 0.5},
                    "modules": ["0"],
                    "related_modules": [["2"]],
                }
            },
        }
    },
}


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 1),
    )
    init_compression(model, config)
    engine, *_ = hadal.initialize(model=model, config=config)
    losses = []
    for _ in range(80):
        images = torch.randn(32, 1, 8, 8, device=engine.device)
        brightness = images.abs().mean((1, 2, 3)).unsqueeze(1)
        loss = (engine(images) - brightness).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    assert losses[-1] < 0.1 * losses[0]
    engine.eval()
    expected = engine(images)
    redundancy_clean(engine, config)
    assert torch.allclose(model(images), expected, atol=1e-5)
    assert (model[0].out_channels, model[2].in_channels) == (8, 8)
    print(compression_report(model))


if __name__ == "__main__":
    main()
