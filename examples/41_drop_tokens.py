"""Random token dropping: the middle layers see a subset of the tokens, and later all of them.

python examples/41_drop_tokens.py
"""

import torch
from torch import nn

import hadal
from hadal.data_efficiency.token_drop import convert_to_random_ltd

LENGTH, LAYERS, UPDATES = 32, 4, 60
config = {
    "train_micro_batch_size_per_gpu": 16,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.005}},
    "data_efficiency": {
        "data_routing": {
            "random_ltd": {
                "enabled": True,
                "total_layer_num": LAYERS,
                "random_ltd_layer_num": 2,
                "random_ltd_layer_id": [1, 2],
                "model_type": "encoder",
                "hidden_state_order": "batch_seq_dim",
                "random_ltd_schedule": {
                    "min_value": 8,
                    "max_value": LENGTH,
                    "schedule_type": "fixed_linear",
                    "schedule_config": {"require_steps": 40, "seq_per_step": 4},
                },
            }
        }
    },
}


class Model(nn.Module):
    """Predicts the sum of a sequence's first two tokens, at every position."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 32)
        self.positions = nn.Parameter(torch.randn(LENGTH, 32) / 4)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
            for _ in range(LAYERS)
        )
        self.head = nn.Linear(32, 15)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens) + self.positions
        for layer in self.layers:
            hidden = layer(hidden)
        answers = tokens[:, :2].sum(1, keepdim=True).expand_as(tokens)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), answers.flatten())


def main() -> None:
    torch.manual_seed(0)
    engine, *_ = hadal.initialize(model=Model(), config=config)
    convert_to_random_ltd(engine, nn.TransformerEncoderLayer)
    losses, kept = [], []
    for _ in range(UPDATES):
        loss = engine(torch.randint(8, (16, LENGTH), device=engine.device))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        kept.append(engine.token_drop.kept)
    assert kept[0] == 8
    assert kept[-1] == LENGTH
    assert losses[-1] < losses[0]
    share = engine.token_drop.layer_tokens / (16 * LENGTH * LAYERS * UPDATES)
    print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}; layers saw {share:.0%} of the tokens")
    engine.destroy()


main()
