"""Ring attention: each sequence is split over more ranks than the model has heads.

    hadal run --num_accelerators 4 examples/50_ring_attention.py

The key is the same as for Ulysses. With fewer heads than ranks, keys and values are passed around
the ranks instead. The losses are those of one process, here with two documents in each row.
"""

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import hadal

WORDS, LENGTH, FIRST, STEPS = 100, 33, 12, 4
CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "sequence_parallel_size": 4,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    "gradient_clipping": 0.0,
    "zero_optimization": {"stage": 2},
}


def make_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=WORDS,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            attn_implementation="sdpa",
        )
    )


def batch(step: int) -> dict[str, Tensor]:
    tokens = torch.randint(WORDS, (2, LENGTH), generator=torch.Generator().manual_seed(step))
    positions = torch.cat([torch.arange(FIRST), torch.arange(LENGTH - FIRST)])
    return {"input_ids": tokens, "labels": tokens, "position_ids": positions.expand(2, -1)}


def main() -> None:
    hadal.init_distributed()
    engine, _, _, _ = hadal.initialize(model=make_model(), config=CONFIG)
    found = []
    for step in range(STEPS):
        loss = engine(**batch(step)).loss
        engine.backward(loss)
        engine.step()
        found.append(loss.item())

    alone, expected = make_model(), []
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for step in range(STEPS):
        loss = alone(**batch(step), use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    if hadal.comm.get_rank() == 0:
        print(f"4 ranks, 2 heads, {LENGTH} tokens: losses {found[0]:.4f} to {found[-1]:.4f}")
    engine.destroy()


if __name__ == "__main__":
    main()
