"""Four experts on two ranks: each token goes to two of them, on any rank.

    hadal run --num_accelerators 2 examples/55_experts.py

The layer and its arguments are DeepSpeed's (`deepspeed.moe.layer.MoE`). A transformers model
needs only `{"expert_parallel": {"enabled": true, "autoep_size": 2}}` in its configuration.
"""

import shutil
from pathlib import Path

import torch
from torch import nn

import hadal
from hadal import comm
from hadal.moe import MoE

CONFIG = {
    "train_micro_batch_size_per_gpu": 16,
    "zero_optimization": {"stage": 2},
    "optimizer": {"type": "AdamW", "params": {"lr": 0.003}},
}


class Classifier(nn.Module):
    """A dense layer, four experts, and a head."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(8, 16), nn.Linear(16, 4)
        expert = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
        self.experts = MoE(16, expert, num_experts=4, ep_size=ranks, k=2, min_capacity=0)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.first(x).relu()
        mixed, balance_loss, _ = self.experts(hidden)
        return self.head(hidden + mixed), balance_loss


def main() -> None:
    hadal.init_distributed()
    torch.manual_seed(0)
    model = Classifier(comm.get_world_size())
    engine, *_ = hadal.initialize(model=model, config=CONFIG)
    draw = torch.Generator().manual_seed(comm.get_rank())  # each rank has its own samples
    for _ in range(200):
        x = torch.randn(16, 8, generator=draw)
        target = x[:, :4].argmax(1).to(engine.device)
        outputs, balance_loss = engine(x.to(engine.device))
        loss = nn.functional.cross_entropy(outputs, target) + 0.01 * balance_loss
        engine.backward(loss)
        engine.step()
    folder = Path("hadal_checkpoints")
    engine.save_checkpoint(folder)  # any number of ranks loads it
    if comm.get_rank() == 0:
        from hadal.utils import get_fp32_state_dict_from_zero_checkpoint

        names = get_fp32_state_dict_from_zero_checkpoint(folder)
        experts = {name.split(".")[4] for name in names if ".deepspeed_experts." in name}
        print(f"loss {loss.item():.2f}; the checkpoint has experts {', '.join(sorted(experts))}")
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
