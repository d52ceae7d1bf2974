"""One model in five precisions: only the configuration changes.

    hadal run --num_accelerators 2 examples/05_precision.py

Weights are fp32, bf16 or fp16 with fp32 masters, bf16 without masters, or fp32 under autocast. In
step 3 of fp16 the loss is made infinite: that update is skipped, the log names the parameter, and
the loss scale is halved. So step 4 has the same loss as step 3.
"""

import logging

import torch
from torch import nn
from torch.nn import functional as F

import hadal

STEPS = 8
PRECISIONS = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "bf16 without masters": {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}},
    "fp16": {
        "fp16": {"enabled": True, "auto_cast": True, "initial_scale_power": 8, "hysteresis": 1}
    },
    "autocast": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
}


def train(name: str) -> list[float]:
    """Train the same model on the same data in one precision; return the loss of every step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4))
    engine, _, _, _ = hadal.initialize(
        model=model,
        model_parameters=model.parameters(),
        config={
            "train_micro_batch_size_per_gpu": 4,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
            "zero_optimization": {"stage": 2},
            **PRECISIONS[name],
        },
    )
    data = torch.Generator().manual_seed(hadal.comm.get_rank())  # each rank has its own data
    x = torch.randn(4, 8, generator=data).to(engine.device)
    wanted = torch.randint(4, (4,), generator=data).to(engine.device)
    if "bf16" in PRECISIONS[name]:
        x = x.bfloat16()  # fp16.auto_cast does this for fp16; autocast casts by itself
    losses = []
    for step in range(STEPS):
        loss = F.cross_entropy(engine(x).float(), wanted)
        overflows = name == "fp16" and step == 3
        engine.backward(loss * float("inf") if overflows else loss)
        engine.step()
        assert engine.overflow == overflows
        losses.append(loss.item())
    assert engine.loss_scale == (128 if name == "fp16" else 1)
    engine.destroy()
    return losses


def main() -> None:
    """Train in each precision and compare."""
    logging.basicConfig(format="%(message)s")
    hadal.init_distributed()
    curves = {name: train(name) for name in PRECISIONS}
    if hadal.comm.get_rank() == 0:
        for name, losses in curves.items():
            print(f"{name:>20}: " + " ".join(f"{loss:.4f}" for loss in losses))
        print("fp16 repeats a loss: the update before it overflowed and was skipped")
    for name, losses in curves.items():
        assert losses[-1] < losses[0], name
        torch.testing.assert_close(losses[:3], curves["fp32"][:3], rtol=0.05, atol=0.01)


if __name__ == "__main__":
    main()
