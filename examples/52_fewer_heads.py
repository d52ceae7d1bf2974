"""Fewer heads and rows: half of a BERT's attention heads and half of its inner rows are removed.

    python examples/52_fewer_heads.py

Scores are trained along with the weights. At the end the matrices are smaller, and transformers
loads them like any model.
"""

import tempfile

import torch
from transformers import BertConfig, BertForSequenceClassification

import hadal
from hadal.compression import init_compression, redundancy_clean, register_with_transformers


def pruning(modules: str, related: list[str], **shared: object) -> dict[str, object]:
    group = {"params": {"dense_ratio": 0.5}, "modules": [modules], "related_modules": [related]}
    return {
        "shared_parameters": {"enabled": True, "schedule_offset": 20, **shared},
        "different_groups": {"half": group},
    }


config = {
    "train_micro_batch_size_per_gpu": 32,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.003}},
    "compression_training": {
        "head_pruning": pruning(
            "attention.output.dense", ["self.query", "self.key", "self.value"], num_heads=4
        ),
        "row_pruning": pruning("intermediate.dense", [r"layer\.\d+\.output.dense"], method="topk"),
    },
}


def main() -> None:
    torch.manual_seed(0)
    shape = BertConfig(
        vocab_size=20,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
    )
    model = init_compression(BertForSequenceClassification(shape), config)
    engine, *_ = hadal.initialize(model=model, config=config)
    for _ in range(60):
        tokens = torch.randint(20, (32, 8), device=engine.device)
        labels = (tokens[:, 1] > 9).long()
        loss = engine(input_ids=tokens, labels=labels).loss
        engine.backward(loss)
        engine.step()
    engine.eval()
    expected, before = engine(input_ids=tokens).logits, sum(p.numel() for p in model.parameters())
    redundancy_clean(engine, config)
    found = model(input_ids=tokens).logits
    assert torch.allclose(found, expected, atol=1e-5)
    after = sum(p.numel() for p in model.parameters())
    assert model.bert.encoder.layer[0].attention.self.query.out_features == 16
    assert model.config.intermediate_size == 32

    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        register_with_transformers()
        again = BertForSequenceClassification.from_pretrained(folder).to(engine.device)
    assert torch.equal(again(input_ids=tokens).logits, found)
    right = (found.argmax(1) == labels).float().mean().item()
    print(f"{before:,} -> {after:,} parameters; {right:.0%} right")


if __name__ == "__main__":
    main()
