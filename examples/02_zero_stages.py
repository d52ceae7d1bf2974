"""ZeRO stages: the stage decides what is sharded, and the losses are the same at all four.

    hadal run --num_accelerators 2 examples/02_zero_stages.py
    torchrun --standalone --nproc_per_node=2 examples/02_zero_stages.py     # works too

Stage 0 keeps everything whole on every rank; stage 1 shards the optimizer's state, stage 2 also the
gradients, stage 3 also the weights.
"""

import torch
from torch import nn
from torch.nn import functional as F

import hadal

STEPS = 8


def train(stage: int) -> list[float]:
    """Train the same model on the same data at one stage; return the loss of every step."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(8, 32), nn.GELU(), *(nn.Linear(32, 32) for _ in range(3)), nn.Linear(32, 4)
    )
    zero = {"stage": stage}
    if stage == 3:
        zero["stage3_param_persistence_threshold"] = 0  # shard small weights too
    engine, _, _, _ = hadal.initialize(
        model=model,
        model_parameters=model.parameters(),
        config={
            "train_micro_batch_size_per_gpu": 4,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}},
            "zero_optimization": zero,
        },
    )
    data = torch.Generator().manual_seed(hadal.comm.get_rank())  # each rank has its own data
    x = torch.randn(4, 8, generator=data).to(engine.device)
    wanted = torch.randint(4, (4,), generator=data).to(engine.device)
    losses = []
    for _ in range(STEPS):
        loss = F.cross_entropy(engine(x), wanted)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.destroy()
    return losses


def main() -> None:
    """Train four times and compare."""
    hadal.init_distributed()
    curves = [train(stage) for stage in range(4)]
    if hadal.comm.get_rank() == 0:
        for stage, losses in enumerate(curves):
            print(f"stage {stage}: " + " ".join(f"{loss:.5f}" for loss in losses))
    for losses in curves[1:]:
        torch.testing.assert_close(losses, curves[0], rtol=1e-5, atol=1e-6)
    assert curves[0][-1] < curves[0][0]


if __name__ == "__main__":
    main()
