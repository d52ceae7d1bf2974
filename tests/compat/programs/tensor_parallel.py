"""Megatron's way: layers cut over two ranks each, groups of the program's own, an overflow."""

import argparse

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--stage", type=int)
parser.add_argument("--folder")
parser.add_argument("--parts", type=int, default=2)
parser.add_argument("--resume", action="store_true")
args = parser.parse_args()
deepspeed.init_distributed()
world, rank = dist.get_world_size(), dist.get_rank()


class ParallelState:
    """Consecutive ranks hold the parts of one model."""

    def __init__(self, parts: int) -> None:
        for first in range(0, world, parts):
            group = dist.new_group(range(first, first + parts))
            if rank in range(first, first + parts):
                self.model = group
        for first in range(parts):
            group = dist.new_group(range(first, world, parts))
            if rank % parts == first:
                self.data = group

    def get_model_parallel_rank(self):
        return dist.get_rank(self.model)

    def get_model_parallel_world_size(self):
        return dist.get_world_size(self.model)

    def get_model_parallel_group(self):
        return self.model

    def get_data_parallel_rank(self):
        return dist.get_rank(self.data)

    def get_data_parallel_world_size(self):
        return dist.get_world_size(self.data)

    def get_data_parallel_group(self):
        return self.data


mpu = ParallelState(args.parts)


class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        deepspeed.comm.all_reduce(gradient, group=mpu.get_model_parallel_group())
        return gradient


class Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        deepspeed.comm.all_reduce(x, group=mpu.get_model_parallel_group())
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def cut(whole, dim):
    part = nn.Parameter(whole.chunk(args.parts, dim)[mpu.get_model_parallel_rank()].clone())
    part.model_parallel = True
    assert deepspeed.runtime.utils.is_model_parallel_parameter(part)
    return part


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = cut(torch.randn(4 * width, width) / width, 0)
        self.down = cut(torch.randn(width, 4 * width) / width, 1)
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x):
        hidden = nn.functional.gelu(nn.functional.linear(Copy.apply(self.norm(x)), self.up))
        return x + Reduce.apply(nn.functional.linear(hidden, self.down)) + self.bias


torch.manual_seed(3)
model = nn.Sequential(*(Block(8) for _ in range(3)))
engine, optimizer, loader, _ = deepspeed.initialize(
    args=args,
    model=model,
    model_parameters=model.parameters(),
    training_data=torch.randn(48, 8, generator=torch.Generator().manual_seed(5)),
    mpu=mpu,
    config={
        "train_batch_size": 8,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": args.stage, "stage3_param_persistence_threshold": 0},
    },
)
assert engine.get_data_parallel_rank() == mpu.get_data_parallel_rank()
assert engine.get_model_parallel_rank() == mpu.get_model_parallel_rank()
assert deepspeed.utils.groups.get_tensor_model_parallel_world_size() == args.parts
if args.resume:
    engine.load_checkpoint(args.folder)
losses, norms = [], []
for number, batch in enumerate(loader):
    loss = (engine(batch) - batch.roll(1, -1)).square().mean()
    engine.backward(loss)
    engine.step()
    total = loss.detach().clone()
    deepspeed.comm.all_reduce(total, group=mpu.get_data_parallel_group())
    losses.append(total.item() / mpu.get_data_parallel_world_size())
    norms.append(float(engine.get_global_grad_norm()))
    if args.folder and number == 2 and not args.resume:
        engine.save_checkpoint(args.folder)
