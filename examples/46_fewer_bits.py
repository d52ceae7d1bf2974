"""Fewer bits: weights fall from 8 to 4 bits during training, and inputs have 8.

    python examples/46_fewer_bits.py

The model keeps its classes and the names in its state dict. At the end its weights are quantized
and stored as integers, which the layer with quantized inputs multiplies.
"""

import torch
from torch import nn

import hadal
from hadal.compression import (
    compute_in_integers,
    init_compression,
    pack_weights,
    redundancy_clean,
)

config = {
    "train_micro_batch_size_per_gpu": 64,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
    "compression_training": {
        "weight_quantization": {
            "shared_parameters": {"enabled": True, "quantize_groups": 16},
            "different_groups": {
                "hidden": {
                    "params": {"start_bits": 8, "target_bits": 4, "quantization_period": 5},
                    "modules": ["0", "2"],
                }
            },
        },
        "activation_quantization": {
            "shared_parameters": {"enabled": True, "schedule_offset": 20},
            "different_groups": {"hidden": {"params": {"bits": 8}, "modules": ["2"]}},
        },
    },
}


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)
    )
    init_compression(model, config)
    engine, *_ = hadal.initialize(model=model, config=config)
    losses, bits = [], []
    for _ in range(80):
        x = torch.randn(64, 8, device=engine.device)
        loss = (engine(x) - x.square().sum(1, keepdim=True).sqrt()).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        bits.append(model[0].compression.bits.bits)
    assert (bits[0], bits[-1]) == (8, 4)
    assert losses[-1] < 0.1 * losses[0]

    engine.eval()
    expected = engine(x)
    redundancy_clean(engine, config)
    assert torch.equal(model(x), expected)
    values = model[2].weight.unique().numel()
    assert values <= 16 * 2**4

    assert pack_weights(model) == []
    assert compute_in_integers(model) == ["0"]  # its inputs are not quantized
    with torch.no_grad():
        torch.testing.assert_close(model(x), expected)
    print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}; 4,096 weights have {values} values")


if __name__ == "__main__":
    main()
