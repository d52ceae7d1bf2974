"""A transformers model in pipeline stages, split between its blocks by the configuration.

    hadal run --num_accelerators 2 examples/57_decoder_in_stages.py

Each stage keeps its own blocks. Losses are those of the whole model in one process.
"""

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import hadal

MICRO, STEPS = 4, 4
CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": MICRO,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.0}},
    "zero_optimization": {"stage": 1},
    "pipeline": {"auto": True, "stages": 2, "schedule": "zero_bubble"},
}


def make_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=50, num_attention_heads=2, **sizes))


def batch(number: int) -> dict[str, Any]:
    words = torch.randint(50, (2, 8), generator=torch.Generator().manual_seed(number))
    return {"input_ids": words, "labels": words}


def train_alone() -> list[float]:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
    found = []
    for step in range(STEPS):
        batches = [batch(step * MICRO + number) for number in range(MICRO)]
        loss = sum(model(**one).loss for one in batches) / MICRO
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


if __name__ == "__main__":
    engine, *_ = hadal.initialize(model=make_model(), config=CONFIG)
    data = (batch(number) for number in range(STEPS * MICRO))
    losses = [engine.train_batch(data).item() for _ in range(STEPS)]
    torch.testing.assert_close(losses, train_alone(), rtol=1e-4, atol=1e-4)
    if hadal.comm.get_rank() == 0:
        print(f"2 stages: losses {losses[0]:.4f} to {losses[-1]:.4f}")
