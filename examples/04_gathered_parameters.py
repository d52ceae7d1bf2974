"""Reading and changing sharded weights at stage 3 with `GatheredParameters`.

    hadal run --num_accelerators 2 examples/04_gathered_parameters.py

To read, every rank enters the context. To write, one rank, `modifier_rank`, changes the weights;
when the context ends, every rank has the new values, in the weights and in the fp32 masters.
`hadal.utils` reads and writes the master, gradient and optimizer state of one parameter.
"""

import torch
from torch import nn

import hadal

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}


def main() -> None:
    """Read a weight, change it on rank 0, and see the change in every rank's output."""
    hadal.init_distributed()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))
    start = model[0].weight.detach().clone()
    engine, _, _, _ = hadal.initialize(
        model=model, model_parameters=model.parameters(), config=CONFIG
    )
    rank, weight = hadal.comm.get_rank(), model[0].weight
    assert weight.shape == (12, 6)  # the shape stays visible while the values are sharded

    with hadal.zero.GatheredParameters([weight]):
        torch.testing.assert_close(weight.detach().cpu(), start)

    with hadal.zero.GatheredParameters([weight], modifier_rank=0):
        if rank == 0:
            with torch.no_grad():
                weight.zero_()

    with hadal.zero.GatheredParameters([weight]):
        assert int(weight.count_nonzero()) == 0

    x = torch.randn(2, 6, device=engine.device)
    first = engine(x)
    torch.testing.assert_close(first[0], first[1])  # the input no longer matters
    engine.backward(first.square().mean())
    gradient = hadal.utils.safe_get_full_grad(weight)
    assert gradient.shape == (12, 6)  # the mean of all ranks, in fp32
    engine.step()
    assert hadal.utils.safe_get_full_optimizer_state(weight, "exp_avg").shape == (12, 6)
    assert not torch.equal(engine(x), first)
    if rank == 0:
        print(f"rank 0 wrote zeros into {tuple(weight.shape)}, and both ranks continued from there")
    engine.destroy()


if __name__ == "__main__":
    main()
