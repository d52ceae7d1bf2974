"""Batches by tokens: short sequences are batched together, long ones separately.

    hadal run --num_accelerators 2 examples/43_batches_by_tokens.py

Each micro-batch has at most 64 tokens. Its loss is weighted by its tokens, and the learning
rate of each update follows its number of samples.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset

import hadal

config = {
    "train_micro_batch_size_per_gpu": 1,  # packs of samples in a micro-batch
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
    "data_efficiency": {
        "data_sampling": {
            "dynamic_batching": {
                "enabled": True,
                "max_tokens": 64,
                "sequence_picking_order": "random",
                "lr_scaling_method": "sqrt",
            }
        }
    },
}


class Sentences(Dataset[torch.Tensor]):
    """Sequences of 2 to 32 tokens, each token the last one plus 3."""

    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> torch.Tensor:
        return (index + 3 * torch.arange(2 + index * 7 % 31)) % 16


class Model(nn.Module):
    """Predicts the next token; the mean over tokens leaves padding out."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(17, 24), nn.Linear(24, 16)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.embedding(tokens[:, :-1]))
        targets = tokens[:, 1:].flatten()
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets, ignore_index=16)


def padded(samples: list[torch.Tensor]) -> torch.Tensor:
    return nn.utils.rnn.pad_sequence(samples, batch_first=True, padding_value=16)


def main() -> None:
    torch.manual_seed(0)
    engine, _, loader, _ = hadal.initialize(
        model=Model(), training_data=Sentences(), collate_fn=padded, config=config
    )
    for tokens in loader:
        loss = engine(tokens.to(engine.device))
        engine.backward(loss)
        engine.step()
        assert (tokens != 16).sum() <= 64
    batching = engine.dynamic_batching
    assert batching.samples == 400  # each one once, on any rank
    assert loss.item() < 1.0
    if dist.get_rank() == 0:
        print(f"{engine.global_steps} updates of {batching.samples / engine.global_steps:.0f}")
        print(f"samples; the last one had {batching.factor:.2f} times the learning rate")
    engine.destroy()


main()
