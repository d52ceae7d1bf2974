"""hpZ: each node keeps a second copy of the weights, so that backward gathers inside the node.

    hadal run --num_accelerators 4 examples/18_several_nodes.py

Here every two ranks simulate a node. With `"mics_shard_size": 2` instead, each node would also
hold a copy of gradients and optimizer state: less traffic between nodes, more memory.
"""

import torch
from torch import nn

import hadal

RANKS_OF_A_NODE = 2


def main() -> None:
    """Train a few steps."""
    hadal.init_distributed()
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            "zero_hpz_partition_size": RANKS_OF_A_NODE,
        },
    }
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)), nn.Linear(8, 1))
    engine, _, _, _ = hadal.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    generator = torch.Generator().manual_seed(hadal.comm.get_rank())
    for _ in range(10):
        x = torch.randn(2, 8, generator=generator).to(engine.device)
        loss = engine(x).square().mean()
        engine.backward(loss)
        engine.step()
    if hadal.comm.get_rank() == 0:
        print(f"{engine.global_steps} updates; loss {loss.item():.3f}")
    engine.destroy()


if __name__ == "__main__":
    main()
