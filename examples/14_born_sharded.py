"""A model too large for one device: `zero.Init` shards each module as it is built.

    hadal run --num_accelerators 2 examples/14_born_sharded.py

The weights are bit for bit those that rank 0 would have built outside the context, regardless of
how they are initialized: by constructors, parents, or a function passed to `model.apply` later.
"""

import torch
from torch import nn

import hadal

CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}


def build() -> nn.Sequential:
    """Return a stack of layers."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(8)))


def start(module: nn.Module) -> None:
    """Initialize a module by its class, for `apply`."""
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.02)
        nn.init.zeros_(module.bias)


def main() -> None:
    """Build inside and outside the context, and compare the masters."""
    hadal.init_distributed()
    hadal.zero.estimate_zero3_model_states_mem_needs_all_live(build(), num_gpus_per_node=2)
    with hadal.zero.Init(config_dict_or_path=CONFIG):
        model = build()
    torch.manual_seed(1)
    model.apply(start)
    assert model[0][0].weight.dtype == torch.bfloat16

    outside = build()
    torch.manual_seed(1)
    outside.apply(start)
    engine, _, _, _ = hadal.initialize(
        model=model, model_parameters=model.parameters(), config=CONFIG
    )
    for mine, plain in zip(model.parameters(), outside.parameters(), strict=True):
        master = hadal.utils.safe_get_full_fp32_param(mine)
        assert torch.equal(master.cpu(), plain.detach())

    inputs = torch.randn(4, 64, device=engine.device, dtype=torch.bfloat16)
    engine.backward(engine(inputs).float().square().mean())
    engine.step()
    if hadal.comm.get_rank() == 0:
        print("created sharded, with the same bits, and trained")
    engine.destroy()


if __name__ == "__main__":
    main()
