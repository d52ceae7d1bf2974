"""Tensor parallelism: two ranks compute slices of the same layers; saved weights are whole.

    hadal run --num_accelerators 2 examples/54_tensor_parallel.py

A transformers model needs only `autotp_size`. This model is the program's own, so rules define the
cuts: the first layer of a block by its outputs, the second by its inputs.
"""

import shutil
from pathlib import Path

import torch
from torch import nn

import hadal
from hadal import comm

CONFIG = {
    "train_micro_batch_size_per_gpu": 8,
    "zero_optimization": {"stage": 1},
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
    "tensor_parallel": {
        "autotp_size": 2,
        "partition_config": {
            "layer_specs": [
                {"patterns": [r".*\.up\.weight"], "partition_type": "column"},
                {"patterns": [r".*\.down\.weight"], "partition_type": "row"},
            ]
        },
    },
}


class Block(nn.Module):
    """A feed-forward block."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


def main() -> None:
    hadal.init_distributed()
    torch.manual_seed(comm.get_rank())  # the first rank's weights are used
    model = nn.Sequential(nn.Linear(4, 16), Block(), nn.Linear(16, 1))
    engine, *_ = hadal.initialize(model=model, config=CONFIG)
    assert model[1].up.weight.shape == (32, 16)  # half of its 64 outputs
    draw = torch.Generator().manual_seed(0)  # both ranks read the same samples
    for _ in range(50):
        x = torch.rand(8, 4, generator=draw).to(engine.device)
        loss = (engine(x).squeeze(-1) - x.prod(-1)).square().mean()
        engine.backward(loss)
        engine.step()
    folder = Path("hadal_weights")
    engine.save_16bit_model(folder)
    if comm.get_rank() == 0:
        from safetensors.torch import load_file

        whole = load_file(folder / "model.safetensors")
        print(f"loss {loss.item():.4f}; saved {tuple(whole['1.up.weight'].shape)}")
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
