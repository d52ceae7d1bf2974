"""Block-sparse attention: a decoder whose attention grows with the length, not with its square.

    python examples/45_sparse_attention.py

The JSON selects the blocks of the attention matrix to compute; the model reads it. For transformers
models, one line does the same: `use_sparse_attention(model, CONFIG)`.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hadal
from hadal.sparse_attention import SparseSelfAttention, from_config

WIDTH, HEADS, WORDS, LENGTH = 32, 4, 50, 256
CONFIG = {
    "train_batch_size": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
    "sparse_attention": {
        "mode": "bigbird",
        "attention": "unidirectional",
        "num_random_blocks": 1,
        "num_sliding_window_blocks": 3,
    },
}


class Block(nn.Module):
    def __init__(self, pattern) -> None:
        super().__init__()
        self.inputs = nn.Linear(WIDTH, 3 * WIDTH)
        # A unidirectional pattern without a mask is causal, token by token.
        self.attention = SparseSelfAttention(pattern, max_seq_length=LENGTH)

    def forward(self, hidden: Tensor) -> Tensor:
        heads = self.inputs(hidden).unflatten(-1, (3, HEADS, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        return hidden + self.attention(query, key, value).transpose(1, 2).flatten(2)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        pattern = from_config(CONFIG, num_heads=HEADS)
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.Sequential(Block(pattern), Block(pattern))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks(self.words(tokens)))


def main() -> None:
    torch.manual_seed(0)
    engine, _, _, _ = hadal.initialize(model=Model(), config=CONFIG)
    tokens = torch.randint(WORDS, (2, LENGTH + 1)).to(engine.device)
    losses = []
    for _ in range(5):
        logits = engine(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]

    changed = tokens[:, :-1].clone()
    changed[:, 100] = (changed[:, 100] + 1) % WORDS
    seen = (engine(changed) != engine(tokens[:, :-1])).any(-1)
    assert not seen[:, :100].any()  # no token sees a later one

    layout = engine.module.blocks[0].attention.get_layout(LENGTH)[0]
    print("\n".join("".join(" #"[block] for block in row) for row in layout.tolist()))
    print(f"{layout.float().mean():.0%} of the blocks; losses {losses[0]:.3f} to {losses[-1]:.3f}")


if __name__ == "__main__":
    main()
