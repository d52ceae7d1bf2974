"""Two replicas of a model in two parts on four ranks: saved, loaded and exported.

    hadal run --num_accelerators 4 examples/28_model_parts.py

Ranks 0 and 1 hold the parts of one replica, ranks 2 and 3 those of the other. A checkpoint loads
with any number of replicas (2 processes: one), but only with the same number of parts.
"""

import shutil
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn

import hadal
from hadal import comm

PARTS = 2
CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "zero_optimization": {"stage": 2},
    "optimizer": {"type": "AdamW", "params": {"lr": 0.05}},
}


def parallel_state() -> SimpleNamespace:
    """Return the interface of Megatron-Core's module of this name, which can be passed as mpu."""
    found = SimpleNamespace()
    model, data = comm.Ranks.world().in_blocks(PARTS)
    for kind, group in (("tensor_model_parallel", model.group), ("data_parallel", data.group)):
        setattr(found, f"get_{kind}_group", lambda group=group: group)
        setattr(found, f"get_{kind}_rank", lambda group=group: dist.get_rank(group))
        setattr(found, f"get_{kind}_world_size", lambda group=group: dist.get_world_size(group))
    return found


class Embedding(nn.Module):
    """Some columns of an embedding, and the matching columns of the head."""

    def __init__(self, state: SimpleNamespace) -> None:
        super().__init__()
        self.group = state.get_tensor_model_parallel_group()
        part = state.get_tensor_model_parallel_rank()
        whole = torch.randn(2, 16, 8, generator=torch.Generator().manual_seed(0)) / 8
        self.words = nn.Parameter(whole[0].chunk(PARTS, 1)[part].clone())
        self.head = nn.Parameter(whole[1].chunk(PARTS, 1)[part].clone())
        self.words.tensor_model_parallel = self.head.tensor_model_parallel = True

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = self.words[tokens] @ self.head.t()
        dist.all_reduce(whole := logits.detach().clone(), group=self.group)
        return whole + (
            logits - logits.detach()
        )  # the sum of the parts; each part gets its gradient


def main() -> None:
    hadal.init_distributed()
    folder = Path("hadal_example")
    state, replica = parallel_state(), comm.get_rank() // PARTS
    engine, *_ = hadal.initialize(model=Embedding(state), mpu=state, config=CONFIG)
    tokens = torch.arange(4 * replica, 4 * replica + 4, device=engine.device)
    for _ in range(20):
        engine.backward(loss := nn.functional.cross_entropy(engine(tokens), (tokens + 1) % 16))
        engine.step()
    engine.save_checkpoint(folder)
    engine.save_16bit_model(folder / "weights")
    again, *_ = hadal.initialize(model=Embedding(state), mpu=state, config=CONFIG)
    again.load_checkpoint(folder)
    assert torch.equal(again.module.words, engine.module.words)
    if comm.get_rank() == 0:
        print(f"loss {loss.item():.3f};", *sorted(p.name for p in (folder / "weights").iterdir()))
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
