"""Sequence parallelism: two ranks share every sequence, and each computes half of the tokens.

    hadal run --num_accelerators 2 examples/10_shared_sequences.py

Ranks of one sequence read the same samples and count as one in the batch. Each passes its part of
the loss to `engine.backward`; the parts add up to the loss of the whole sequence.
"""

import torch
from torch import nn

import hadal

TOKENS, WIDTH, STEPS = 6, 8, 5


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH))


def main() -> None:
    hadal.init_distributed()
    rank, world = hadal.comm.get_rank(), hadal.comm.get_world_size()
    engine, _, _, _ = hadal.initialize(
        model=make_model(),
        config={
            "train_micro_batch_size_per_gpu": 2,
            "sequence_parallel_size": world,
            "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
            "zero_optimization": {"stage": 2},
        },
    )
    assert engine.train_batch_size() == 2  # all ranks work on the same two sequences

    sequences = torch.randn(2, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1))
    wanted = sequences.flip(-1)
    mine = slice(rank * TOKENS // world, (rank + 1) * TOKENS // world)
    for _ in range(STEPS):
        outputs = engine(sequences[:, mine].to(engine.device))
        difference = outputs - wanted[:, mine].to(engine.device)
        engine.backward(difference.square().sum() / wanted.numel())  # this rank's part of the mean
        engine.step()

    alone = make_model()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.5)
    for _ in range(STEPS):
        optimizer.zero_grad()
        (alone(sequences) - wanted).square().mean().backward()
        nn.utils.clip_grad_norm_(alone.parameters(), 1.0)  # Hadal's default
        optimizer.step()
    for name, value in engine.state_dict().items():
        torch.testing.assert_close(value.cpu(), alone.state_dict()[name], rtol=1e-5, atol=1e-6)
    if rank == 0:
        print(f"{world} ranks on halves of the sequences: the weights of one process on whole ones")


if __name__ == "__main__":
    main()
