"""Fewer layers: a student takes over every other layer of its teacher, and learns from it.

    python examples/49_fewer_layers.py

Then its weights are stored in 8 bits, in a file that is loaded again.
"""

import tempfile

import torch
from torch import Tensor, nn

import hadal
from hadal import compression as hc

TECHNIQUES = {
    "layer_reduction": {
        "enabled": True,
        "module_name_prefix": "layers",
        "teacher_layer": [1, 3],
        "other_module_name": ["first", "last"],
    },
    "weight_quantization": {
        "shared_parameters": {"enabled": True},
        "different_groups": {"all": {"params": {"start_bits": 8, "target_bits": 8}}},
    },
}


class Net(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 64), nn.Linear(64, 5)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(layers))

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        states = [self.first(x)]
        for layer in self.layers:
            states.append(states[-1] + torch.relu(layer(states[-1])))
        return self.last(states[-1]), states


def main() -> None:
    torch.manual_seed(0)
    teacher, student = Net(4), Net(2)
    config = {
        "train_micro_batch_size_per_gpu": 64,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.005}},
        "compression_training": TECHNIQUES,
    }
    hc.init_compression(student, config, teacher)
    assert torch.equal(student.layers[1].weight, teacher.layers[3].weight)
    engine, *_ = hadal.initialize(model=student, config=config)
    losses = []
    for _ in range(60):
        x = torch.randn(64, 8, device=engine.device)
        known, known_states = teacher.to(engine.device)(x)
        logits, states = engine(x)
        loss = hc.distillation_loss(logits, known) + hc.hidden_state_loss(states, known_states)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    engine.destroy()

    hc.redundancy_clean(student, config)
    expected, dense = student(x)[0], sum(value.nbytes for value in student.state_dict().values())
    assert hc.pack_weights(student) == []
    with tempfile.TemporaryDirectory() as folder:
        hc.save_packed(student, folder)
        loaded = hc.load_packed(Net(2).to(x.device), folder)
    assert torch.equal(loaded(x)[0], expected)
    small = sum(value.nbytes for value in loaded.state_dict().values())
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; {dense:,} bytes -> {small:,}")
    assert small < 0.35 * dense


if __name__ == "__main__":
    main()
