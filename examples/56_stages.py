"""A model in pipeline stages: two halves of a language model, with one embedding for both ends.

    hadal run --num_accelerators 2 examples/56_stages.py

Each rank builds its own layers. `train_batch` trains on one batch, of four micro-batches here, and
the losses are those of one process.
"""

import torch
from torch import Tensor, nn

import hadal
from hadal.pipeline import LayerSpec, PipelineModule, TiedLayerSpec

WORDS, WIDTH, LENGTH, MICRO, STEPS = 50, 16, 8, 4, 5
CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": MICRO,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.0}},
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 1},
    "pipeline": {"activation_checkpoint_interval": 1},
}


def head(embedding: nn.Module, hidden: Tensor) -> Tensor:
    return hidden @ embedding.weight.T


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def layers() -> list[object]:
    embedding = ("words", nn.Embedding, WORDS, WIDTH)
    blocks = [LayerSpec(nn.TransformerEncoderLayer, WIDTH, 2, 32, 0.0) for _ in range(4)]
    return [TiedLayerSpec(*embedding), *blocks, TiedLayerSpec(*embedding, forward_fn=head)]


def batch(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    words = torch.randint(WORDS, (2, LENGTH), generator=generator)
    return words, words


def train(stages: int) -> list[float]:
    module = PipelineModule(layers(), num_stages=stages, loss_fn=loss_of, seed_layers=True)
    engine, _, _, _ = hadal.initialize(model=module, config=CONFIG)
    data = (batch(number) for number in range(STEPS * MICRO))
    found = [engine.train_batch(data).item() for _ in range(STEPS)]
    engine.destroy()
    return found


def train_alone() -> list[float]:
    module = PipelineModule(layers(), num_stages=1, loss_fn=loss_of, seed_layers=True)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01, weight_decay=0.0)
    found = []
    for step in range(STEPS):
        pairs = [batch(step * MICRO + number) for number in range(MICRO)]
        loss = sum(loss_of(module(words), labels) for words, labels in pairs) / MICRO
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


if __name__ == "__main__":
    hadal.init_distributed()
    losses = train(stages=hadal.comm.get_world_size())
    torch.testing.assert_close(losses, train_alone(), rtol=1e-4, atol=1e-4)
    if hadal.comm.get_rank() == 0:
        print(f"2 stages: losses {losses[0]:.4f} to {losses[-1]:.4f}")
