"""Short sequences first: the length of the sequences grows during training.

    python examples/40_short_sequences_first.py

The model is unchanged: Hadal truncates its inputs.
"""

import torch
from torch import nn

import hadal

config = {
    "train_micro_batch_size_per_gpu": 8,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
    "curriculum_learning": {
        "enabled": True,
        "curriculum_type": "seqlen",
        "min_difficulty": 8,
        "max_difficulty": 64,
        "schedule_type": "fixed_linear",
        "schedule_config": {"total_curriculum_step": 40, "difficulty_step": 8},
    },
}


class Model(nn.Module):
    """Predicts the next token from the tokens so far."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 32)
        self.memory = nn.GRU(32, 32, batch_first=True)
        self.head = nn.Linear(32, 32)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.memory(self.embedding(tokens))[0])
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def main() -> None:
    torch.manual_seed(0)
    engine, *_ = hadal.initialize(model=Model(), config=config)
    losses, lengths = [], []
    for _ in range(60):
        starts = torch.randint(32, (8, 1))
        tokens = (starts + 5 * torch.arange(65)) % 32  # each token is the last one plus 5
        loss = engine(tokens[:, :-1].to(engine.device), tokens[:, 1:].to(engine.device))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        lengths.append(engine.length_curriculum.length)
    assert lengths[0] == 8
    assert lengths[-1] == 64
    assert losses[-1] < 0.1 * losses[0]
    tokens = engine.length_curriculum.tokens
    assert tokens == 8 * sum(lengths) < 8 * 60 * 64
    print(
        f"loss {losses[0]:.2f} -> {losses[-1]:.2f} with {tokens / (8 * 60 * 64):.0%} of the tokens"
    )
    engine.destroy()


main()
