"""Ranks that run different parts of a model train like one process, bit for bit, at every stage.

    hadal run --num_accelerators 2 examples/31_ranks_that_differ.py

A vision-language model: only one rank at a time has pictures, so only that rank runs the
vision tower. A mixture of experts: each token runs through one expert, and some experts get no
token. One process trains on both ranks' batches for comparison.

The bits are equal because halving a gradient is exact, the order of two summands does not matter,
and a missing gradient counts as zero. The learning rate is a power of two: an update rounds once.
"""

from copy import deepcopy

import torch
from torch import Tensor, nn

import hadal

WIDTH, UPDATES, RATE = 8, 6, 2**-2
ZERO = [*({"stage": n} for n in range(3)), {"stage": 3, "stage3_param_persistence_threshold": 0}]


class Model(nn.Module):
    """Words, preceded by a picture if there is one; a router chooses each token's expert."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.tower = nn.Sequential(nn.Linear(12, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.words, self.router = nn.Embedding(16, WIDTH), nn.Linear(WIDTH, experts)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, 16) for _ in range(experts))

    def forward(self, words: Tensor, picture: Tensor | None) -> tuple[Tensor, list[int]]:
        seen = self.words(words)
        if picture is not None:
            seen = torch.cat([self.tower(picture), seen])
        weight, chosen = self.router(seen).softmax(1).max(1)
        used = chosen.unique().tolist()
        given = [weight[chosen == k, None] * self.experts[k](seen[chosen == k]) for k in used]
        return torch.cat(given).square().mean(), used


def batch_of(rank: int, update: int, with_pictures: bool, device: torch.device) -> tuple:
    data = torch.Generator().manual_seed(10 * update + rank)
    words, picture = torch.randint(16, (3,), generator=data), torch.randn(1, 12, generator=data)
    return words.to(device), picture.to(device) if with_pictures and rank == update % 2 else None


def train(stage: int, experts: int, with_pictures: bool) -> list[tuple[list[int], ...]]:
    torch.manual_seed(0)
    rank, found, model = hadal.comm.get_rank(), [], Model(experts)
    alone = deepcopy(model)
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": ZERO[stage]}
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    engine = hadal.initialize(model=model, optimizer=optimizer, config=config)[0]
    own_optimizer = torch.optim.SGD(alone.to(engine.device).parameters(), lr=RATE)
    for update in range(UPDATES):
        batches = [batch_of(each, update, with_pictures, engine.device) for each in range(2)]
        engine.backward(loss := engine(*batches[rank])[0])
        engine.step()
        losses, used = zip(*(alone(*batch) for batch in batches), strict=True)
        (sum(losses) / 2).backward()
        own_optimizer.step()
        own_optimizer.zero_grad()
        assert torch.equal(loss, losses[rank])
        found.append(used)
    trained = engine.state_dict()
    assert all(torch.equal(trained[name], value) for name, value in alone.state_dict().items())
    engine.destroy()
    return found


if __name__ == "__main__":
    hadal.init_distributed()
    for number in range(4):
        train(number, experts=1, with_pictures=True)
        used = train(number, experts=4, with_pictures=False)
        if hadal.comm.get_rank() == 0:
            print(f"stage {number}: as one process; experts of each rank and update: {used}")
