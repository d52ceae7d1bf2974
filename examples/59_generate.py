"""Generation between updates at stage 3: each call gathers the weights once, for all its tokens.

    hadal run --num_accelerators 2 examples/59_generate.py

An actor writes numbers, is rewarded for even ones, and learns from its own texts (REINFORCE). With
`hybrid_engine`, ranks may write texts of different lengths: until `generate` returns, no rank needs
another one. Here the limit of gathered weights is so low that each token would gather them again.
"""

import torch
from torch import Tensor, nn

import hadal

WORDS, UPDATES = 12, 40
CONFIG = {
    "train_micro_batch_size_per_gpu": 16,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.02}},
    "zero_optimization": {
        "stage": 3,
        "stage3_param_persistence_threshold": 0,
        "stage3_max_live_parameters": 0,
    },
    "hybrid_engine": {"enabled": True},
}


class Actor(nn.Module):
    """Predicts the next number from the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 16)
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, WORDS))

    def forward(self, words: Tensor) -> Tensor:
        return self.layers(self.embedding(words)).log_softmax(-1)

    @torch.no_grad()
    def generate(self, words: Tensor, length: int) -> Tensor:
        while words.shape[1] < length:
            drawn = torch.multinomial(self(words[:, -1]).exp(), 1)
            words = torch.cat([words, drawn], dim=1)
        return words


def main() -> None:
    hadal.init_distributed()
    rank = hadal.comm.get_rank()
    torch.manual_seed(rank)
    engine = hadal.initialize(model=Actor(), config=CONFIG)[0]
    shares = []
    for _ in range(UPDATES):
        first = torch.zeros(16, 1, dtype=torch.long, device=engine.device)
        words = engine.generate(first, 6 + 4 * rank)
        written = words[:, 1:]
        reward = 1.0 - 2.0 * (written % 2)
        chances = engine(words[:, :-1]).gather(-1, written[..., None])[..., 0]
        engine.backward(-((reward - reward.mean()) * chances).mean())
        engine.step()
        shares.append(float((written % 2 == 0).float().mean()))
    assert shares[-1] > 0.9 > shares[0], shares
    print(f"rank {rank}: even numbers {shares[0]:.2f} -> {shares[-1]:.2f}")
    engine.destroy()


if __name__ == "__main__":
    main()
