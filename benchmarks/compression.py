"""Accuracy, bytes and speed of a BERT before and after compression.

A BERT classifies excerpts of Python's standard library by package. Test excerpts come from files
that training has not seen. Each seed determines the samples and the dropout of all trainings that
start from the same model, so their accuracies are compared in pairs. See
`docs/compression.md`.

    python benchmarks/compression.py quantize --seeds 5
    python benchmarks/compression.py prune --seeds 5
    python benchmarks/compression.py shorten --seeds 5
    python benchmarks/compression.py speed --width 768
"""

from __future__ import annotations

import argparse
import copy
import json
import re
import statistics
import sysconfig
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification

import hadal
from hadal.plugins.compression import (
    compute_in_integers,
    distillation_loss,
    hidden_state_loss,
    init_compression,
    pack_weights,
    redundancy_clean,
)

PACKAGES = ("asyncio", "email", "idlelib", "importlib", "multiprocessing", "tkinter", "unittest")
WORDS, LENGTH, BATCH = 4096, 32, 32
MOST_PIECES = 2000  # of a package


class Texts:
    """Excerpts of source code as word ids, and their packages."""

    def __init__(self) -> None:
        words: dict[bool, list[list[list[str]]]] = {True: [], False: []}
        for package in PACKAGES:
            split: dict[bool, list[list[str]]] = {True: [], False: []}
            folder = Path(sysconfig.get_paths()["stdlib"]) / package
            files = [
                file for file in sorted(folder.rglob("*.py")) if "test" not in str(file.parent)
            ]
            for index, file in enumerate(files):
                found = re.findall(r"\w+|[^\w\s]", file.read_text("utf-8", errors="replace"))
                starts = range(0, len(found) - LENGTH + 1, LENGTH - 1)
                split[index % 4 != 0] += [found[at : at + LENGTH - 1] for at in starts]
            for is_train, pieces in split.items():
                words[is_train].append(pieces[:: max(1, len(pieces) // MOST_PIECES)])
        counts = Counter(word for pieces in words[True] for piece in pieces for word in piece)
        known = [word for word, _ in counts.most_common(WORDS - 2)]
        numbers = {word: number for number, word in enumerate(known, 2)}
        self.train, self.test = (self._tensors(words[which], numbers) for which in (True, False))

    @staticmethod
    def _tensors(pieces: list[list[list[str]]], numbers: dict[str, int]) -> tuple[Tensor, Tensor]:
        rows = [[0, *(numbers.get(word, 1) for word in one)] for each in pieces for one in each]
        labels = [label for label, each in enumerate(pieces) for _ in each]
        return torch.tensor(rows), torch.tensor(labels)


def bert(layers: int, width: int) -> BertForSequenceClassification:
    shape = BertConfig(
        vocab_size=WORDS,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=8,
        intermediate_size=4 * width,
        max_position_embeddings=LENGTH,
        num_labels=len(PACKAGES),
    )
    return BertForSequenceClassification(shape)


def train(
    model: nn.Module,
    texts: Texts,
    updates: int,
    techniques: dict[str, Any] | None = None,
    teacher: nn.Module | None = None,
    rate: float = 5e-4,
    seed: int = 1,
) -> Any:
    torch.manual_seed(seed)
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "optimizer": {"type": "AdamW", "params": {"lr": rate, "weight_decay": 0.01}},
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {"total_num_steps": updates, "warmup_num_steps": updates // 10},
        },
        "gradient_clipping": 1.0,
        **({"compression_training": techniques} if techniques else {}),
    }
    engine, *_ = hadal.initialize(model=model, config=config)
    engine.train()
    x, y = texts.train
    drawn = torch.Generator().manual_seed(seed)
    begin = time.monotonic()
    for step in range(updates):
        rows = torch.randint(len(y), (BATCH,), generator=drawn)
        found = engine(input_ids=x[rows], labels=y[rows], output_hidden_states=teacher is not None)
        loss = found.loss
        if teacher is not None:
            with torch.no_grad():
                known = teacher(input_ids=x[rows], output_hidden_states=True)
            loss = loss + distillation_loss(found.logits, known.logits, temperature=2.0)
            loss = loss + hidden_state_loss(found.hidden_states, known.hidden_states)
        engine.backward(loss)
        engine.step()
        if step % 50 == 0:
            print(f"  {step} {loss.item():.3f} {time.monotonic() - begin:.0f} s", flush=True)
    return engine


@torch.no_grad()
def accuracy(model: nn.Module, texts: Texts) -> float:
    model.eval()
    x, y = texts.test
    found = torch.cat([model(input_ids=part).logits.argmax(1) for part in x.split(256)])
    return 100 * (found == y).float().mean().item()


def nbytes(model: nn.Module) -> int:
    held = {value.data_ptr(): value.nbytes for value in model.state_dict().values()}
    return sum(held.values())


@torch.no_grad()
def seconds(models: list[nn.Module], texts: Texts, rounds: int = 30) -> list[float]:
    """The shortest forward of each, measured in alternating order."""
    x, best = texts.test[0][:8], [float("inf")] * len(models)
    for _ in range(rounds):
        for index, model in enumerate(models):
            begin = time.perf_counter()
            model.eval()(input_ids=x)
            best[index] = min(best[index], time.perf_counter() - begin)
    return best


def bits(technique: str, params: dict[str, Any], **shared: Any) -> dict[str, Any]:
    groups = {"all": {"params": params, "modules": ["*"]}}
    return {
        technique: {"shared_parameters": {"enabled": True, **shared}, "different_groups": groups}
    }


def quantized(
    of: nn.Module, texts: Texts, updates: int, weight: int, activation: int, seed: int = 1
) -> nn.Module:
    techniques = {
        **bits(
            "weight_quantization",
            {"start_bits": weight, "target_bits": weight},
            quantize_weight_in_forward=True,
            quantize_groups=1,
        ),
        **bits("activation_quantization", {"bits": activation}, schedule_offset=0),
    }
    config = {"compression_training": techniques}
    model = init_compression(copy.deepcopy(of), config)
    if updates:
        train(model, texts, updates, techniques, rate=3e-4, seed=seed).destroy()
    redundancy_clean(model, config)
    left = pack_weights(model)
    assert not left, left
    return model


HALF = {"dense_ratio": 0.5}
LAYER = r"encoder\.layer\.\d+"
PRUNING = {
    "head_pruning": {
        "shared_parameters": {"enabled": True, "num_heads": 8, "schedule_offset": 0},
        "different_groups": {
            "heads": {
                "params": HALF,
                "modules": [rf"{LAYER}\.attention\.output\.dense"],
                "related_modules": [
                    [rf"{LAYER}\.attention\.self\.{name}" for name in ("query", "key", "value")]
                ],
            }
        },
    },
    "row_pruning": {
        "shared_parameters": {"enabled": True, "method": "topk", "schedule_offset": 0},
        "different_groups": {
            "ffn": {
                "params": HALF,
                "modules": [rf"{LAYER}\.intermediate\.dense"],
                "related_modules": [[rf"{LAYER}\.output\.dense"]],
            }
        },
    },
}


def pruned(of: nn.Module, texts: Texts, updates: int, seed: int) -> nn.Module:
    config = {"compression_training": PRUNING}
    model = init_compression(copy.deepcopy(of), config)
    train(model, texts, updates, PRUNING, teacher=of, seed=seed).destroy()
    return redundancy_clean(model, config)


def shortened(of: nn.Module, texts: Texts, updates: int, width: int, seed: int) -> nn.Module:
    section = {
        "enabled": True,
        "keep_number_layer": 6,
        "module_name_prefix": "bert.encoder.layer",
        "teacher_layer": [1, 3, 5, 7, 9, 11],
        "other_module_name": ["bert.embeddings", "bert.pooler", "classifier"],
    }
    techniques = {"layer_reduction": section}
    student = init_compression(bert(6, width), {"compression_training": techniques}, of)
    train(student, texts, updates, techniques, teacher=of, seed=seed).destroy()
    return student


def plain(arguments: argparse.Namespace, texts: Texts, layers: int) -> nn.Module:
    """A trained model, loaded from the directory if it exists."""
    torch.manual_seed(0)
    model = bert(layers, arguments.width)
    path = arguments.folder / f"plain_{layers}_{arguments.width}_{arguments.updates}.pt"
    if path.exists():
        model.load_state_dict(torch.load(path))
        return model
    engine = train(model, texts, arguments.updates)
    engine.destroy()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), path)
    return model


def in_integers(model: nn.Module) -> nn.Module:
    model = copy.deepcopy(model)
    left = compute_in_integers(model)
    assert not left, left
    return model


def show_speed(texts: Texts, width: int) -> None:
    """The forwards of models that were never trained."""
    models = {"dense": bert(4, width)}
    for weight in (8, 4):
        name = f"{weight}-bit weights, 8-bit inputs"
        models[name] = quantized(models["dense"], texts, 0, weight, 8)
        models[f"{name}, as integers"] = in_integers(models[name])
    times = seconds(list(models.values()), texts)
    for (name, each), took in zip(models.items(), times, strict=True):
        row = {"model": name, "nbytes": nbytes(each), "forward_ms": round(1000 * took, 2)}
        print(json.dumps({**row, "faster": round(times[0] / took, 2)}), flush=True)


def compressed(
    goal: str, model: nn.Module, texts: Texts, more: int, width: int, seed: int
) -> dict[str, nn.Module]:
    """Models trained further with one seed: first without compression, then with it."""
    longer = copy.deepcopy(model)
    train(longer, texts, more, rate=3e-4, seed=seed).destroy()
    models = {"dense, trained as long": longer}
    if goal == "quantize":
        packed = quantized(longer, texts, 0, 8, 8)
        models["8-bit weights, 8-bit inputs, not trained on"] = packed
        models["the same, multiplied as integers"] = in_integers(packed)
        for weight in (8, 4, 2):
            name = f"{weight}-bit weights, 8-bit inputs"
            models[name] = quantized(model, texts, more, weight, 8, seed)
    elif goal == "prune":
        models["half the heads and FFN rows"] = pruned(model, texts, more, seed)
    else:
        torch.manual_seed(seed)
        models["6 layers"] = shortened(model, texts, more, width, seed)
    return models


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("goal", choices=["quantize", "prune", "shorten", "speed"])
    parser.add_argument("--updates", type=int, default=600)
    parser.add_argument("--more", type=int, default=200, help="updates with compression")
    parser.add_argument("--seeds", type=int, default=1, help="trainings of each kind")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--folder", type=Path, default=Path("compression_benchmark"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    texts = Texts()
    print(f"{len(texts.train[1])} pieces to train, {len(texts.test[1])} to test")
    if arguments.goal == "speed":
        show_speed(texts, arguments.width)
        return
    model = plain(arguments, texts, 12 if arguments.goal == "shorten" else 4)
    print(f"before: {accuracy(model, texts):.2f} %", flush=True)
    found: dict[str, list[float]] = {}
    for seed in range(1, arguments.seeds + 1):
        models = compressed(arguments.goal, model, texts, arguments.more, arguments.width, seed)
        for name, each in models.items():
            found.setdefault(name, []).append(round(accuracy(each, texts), 2))
            print(f"seed {seed}: {name}: {found[name][-1]:.2f} %", flush=True)
    times = seconds(list(models.values()), texts)
    dense = next(iter(found.values()))
    for (name, each), took in zip(models.items(), times, strict=True):
        lost = [before - after for before, after in zip(dense, found[name], strict=True)]
        row = {
            "model": name,
            "accuracy": round(statistics.mean(found[name]), 2),
            "points_lost": round(statistics.mean(lost), 2),
            "of_each_seed": [round(one, 2) for one in lost],
            "nbytes": nbytes(each),
            "forward_ms": round(1000 * took, 2),
            "faster": round(times[0] / took, 2),
        }
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
