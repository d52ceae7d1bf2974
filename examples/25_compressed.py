"""ZeRO++ for slow networks: int8 weights and int4 gradients on the wire.

    hadal run --num_accelerators 4 examples/25_compressed.py

All ranks compute with the same rounded weights; masters, checkpoints and values you read stay
exact. `benchmarks/codecs.py` measures on which networks this pays off.
"""

import torch
from torch import nn

import hadal

CONFIG = {
    "train_micro_batch_size_per_gpu": 8,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 0.003}},
    "zero_optimization": {
        "stage": 3,
        "stage3_param_persistence_threshold": 100,
        "zero_quantized_weights": True,
        "zero_quantized_gradients": True,
        # A gradient's quantization error is added to the next one (LoCo).
        "zeropp_loco_param": {"err_beta": 0.8, "reset_T": 1024},
        # On several nodes also "zero_hpz_partition_size": the ranks of a node.
    },
}


def main() -> None:
    """Train a few steps, and read a weight inside and outside forward."""
    hadal.init_distributed()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 1))
    engine, _, _, _ = hadal.initialize(
        model=model, model_parameters=model.parameters(), config=CONFIG
    )
    used = []
    model[0].register_forward_hook(lambda layer, *_: used.append(layer.weight.detach().clone()))
    generator = torch.Generator().manual_seed(hadal.comm.get_rank())
    for _ in range(30):
        x = torch.randn(8, 64, generator=generator).bfloat16().to(engine.device)
        loss = (engine(x)[:, 0] - x[:, :8].sum(1)).float().square().mean()
        engine.backward(loss)
        engine.step()
    with torch.no_grad():
        engine(x)
    exact = engine.state_dict()["0.weight"]
    if hadal.comm.get_rank() == 0:
        off = (used[-1].float() - exact.float()).abs().max() / exact.float().abs().max()
        print(f"loss {loss.item():.3f}; forward's weights are off by {off:.1%} of the largest")
    engine.destroy()


if __name__ == "__main__":
    main()
