"""Model parallelism: two ranks hold two parts of one model.

    hadal run --num_accelerators 2 examples/12_parts_of_a_model.py

ZeRO works over the ranks that hold the same part. `mpu` is any object with Megatron's methods. A
parameter that is split over the parts has `tensor_model_parallel` set; the others are on every rank
and count once in the gradient norm.
"""

import torch
import torch.distributed as dist
from torch import nn

import hadal
from hadal import comm


class Groups:
    """All ranks hold parts of one model, so each part has one data-parallel rank."""

    def __init__(self) -> None:
        alone = [dist.new_group([rank]) for rank in range(comm.get_world_size())]
        self._groups = {"model_parallel": dist.group.WORLD, "data_parallel": alone[comm.get_rank()]}
        for kind, group in self._groups.items():
            setattr(self, f"get_{kind}_group", lambda group=group: group)
            setattr(self, f"get_{kind}_rank", lambda group=group: dist.get_rank(group))
            setattr(self, f"get_{kind}_world_size", lambda group=group: dist.get_world_size(group))


class SumOverParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values):
        values = values.clone()
        dist.all_reduce(values)
        return values

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class RowParallel(nn.Module):
    """A linear layer whose inputs are split over the ranks."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        part = inputs // comm.get_world_size()
        self.cut = slice(comm.get_rank() * part, (comm.get_rank() + 1) * part)
        whole = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(0)) / inputs
        self.weight = nn.Parameter(whole[:, self.cut].clone())
        self.weight.tensor_model_parallel = True
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return SumOverParts.apply(x[:, self.cut] @ self.weight.t()) + self.bias


def main() -> None:
    hadal.init_distributed()
    engine, _, _, _ = hadal.initialize(
        model=RowParallel(8, 4),
        mpu=Groups(),
        config={
            "train_micro_batch_size_per_gpu": 5,
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        },
    )
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(1)).to(engine.device)
    for _ in range(3):
        engine.backward((engine(x) - x[:, :4]).square().mean())
        engine.step()
    print(f"rank {comm.get_rank()}: gradient norm {engine.get_global_grad_norm():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
