"""Sparse gradients: embeddings send only the rows that a batch used.

    hadal run --num_accelerators 2 examples/08_gradients_in_rows.py

Each rank uses 8 of a table's 5000 rows per step. `sparse_gradients` sends these rows and their
indices instead of the table: the same losses with fewer bytes. The example counts the bytes
in torch's own call, and therefore disables reads of other ranks' memory.
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import hadal

ROWS, STEPS = 5000, 4


def train(sparse: bool) -> tuple[list[float], int]:
    """Train a small model; return the loss of every step and the bytes that this rank sent."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(ROWS, 32), nn.Linear(32, 4))
    engine, _, _, _ = hadal.initialize(
        model=model,
        model_parameters=model.parameters(),
        config={
            "train_micro_batch_size_per_gpu": 8,
            "sparse_gradients": sparse,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
            "zero_optimization": {"stage": 2},
        },
    )
    data = torch.Generator().manual_seed(hadal.comm.get_rank())  # each rank has its own data
    tokens = torch.randint(ROWS, (8,), generator=data)
    wanted = torch.randint(4, (8,), generator=data)
    losses, sent = [], 0
    send = dist.isend

    def count(tensor, *arguments, **rest):
        nonlocal sent
        sent += tensor.nbytes
        return send(tensor, *arguments, **rest)

    for _ in range(STEPS):
        loss = F.cross_entropy(engine(tokens), wanted)
        dist.isend = count
        engine.backward(loss)
        dist.isend = send
        engine.step()
        losses.append(loss.item())
    engine.destroy()
    return losses, sent


def main() -> None:
    """Train with whole gradients, then with rows, and compare."""
    os.environ["HADAL_CROSS_MEMORY"] = "0"
    hadal.init_distributed(dist_backend="gloo")
    whole, whole_nbytes = train(sparse=False)
    rows, rows_nbytes = train(sparse=True)
    if hadal.comm.get_rank() == 0:
        print("losses: " + " ".join(f"{loss:.5f}" for loss in rows))
        print(f"sent by rank 0: {whole_nbytes:,} bytes whole, {rows_nbytes:,} in rows")
    assert rows == whole
    assert rows_nbytes < whole_nbytes / 50 or hadal.comm.get_world_size() == 1


if __name__ == "__main__":
    main()
