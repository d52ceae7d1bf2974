"""Megatron's habits: groups of the program's own, recomputation, and the boundary by hand."""

import argparse

import deepspeed
import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--stage", type=int)
parser.add_argument("--local_rank", type=int, default=-1)
parser = deepspeed.add_config_arguments(parser)
args = parser.parse_args()
deepspeed.init_distributed()
mine = [deepspeed.comm.new_group([rank]) for rank in range(deepspeed.comm.get_world_size())]


class ParallelState:
    """Every rank holds the whole model, and sees samples of its own."""

    def get_model_parallel_rank(self) -> int:
        return 0

    def get_model_parallel_world_size(self) -> int:
        return 1

    def get_model_parallel_group(self):
        return mine[deepspeed.comm.get_rank()]

    def get_data_parallel_rank(self) -> int:
        return deepspeed.comm.get_rank()

    def get_data_parallel_world_size(self) -> int:
        return deepspeed.comm.get_world_size()

    def get_data_parallel_group(self):
        return deepspeed.comm.get_world_group()


mpu = ParallelState()
deepspeed.checkpointing.configure(
    mpu, partition_activations=False, checkpoint_in_cpu=False, num_checkpoints=2
)
assert deepspeed.checkpointing.is_configured()


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(3)
        )

    def forward(self, x):
        for layer in self.layers:
            x = x + deepspeed.checkpointing.checkpoint(layer, x)
        return x


torch.manual_seed(11)
model = Layers()
config = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "prescale_gradients": args.stage < 2,
    "zero_optimization": {"stage": args.stage},
}
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
engine, optimizer, _, _ = deepspeed.initialize(
    args=args, model=model, optimizer=optimizer, config=config, mpu=mpu, dist_init_required=False
)
generator = torch.Generator().manual_seed(deepspeed.comm.get_rank())
losses, boundaries = [], []
for iteration in range(6):
    for group in optimizer.param_groups:
        group["lr"] = 1e-2 * (1 + iteration // 2)
    loss = engine(torch.randn(2, 8, generator=generator)).square().mean()
    engine.backward(loss)
    boundaries.append(engine.is_gradient_accumulation_boundary())
    engine.step()
    losses.append(loss.item())
told = (engine.global_steps, engine.train_batch_size(), engine.get_lr())
norm = float(engine.get_global_grad_norm())
