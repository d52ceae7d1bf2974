"""Built-in metrics of indexed data sets: values, files, processes, restarts, faults."""

from __future__ import annotations

import math
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hadal.errors import UsageError
from hadal.plugins.data_efficiency import analysis, chunks
from hadal.plugins.data_efficiency.analysis import analyze, chunks_of, passes
from hadal.plugins.data_efficiency.chunks import KeptChunks, Span, compute_all, compute_kept
from hadal.plugins.data_efficiency.indexed import IndexedRows, RowsBuilder

ROWS = [
    [int(n) for n in np.random.default_rng(row).geometric(0.3, 1 + row % 7)] for row in range(90)
]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    with RowsBuilder(tmp_path / "data", np.uint16) as builder:
        builder.add_all([*ROWS, []])
    return tmp_path / "data"


def values_of(folder: Path, metric: str) -> list[int]:
    return IndexedRows(folder / metric / f"{metric}_sample_to_metric").numbers.tolist()


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize("workers", [0, 2])
def test_length_and_rarity(
    data: Path, tmp_path: Path, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(analysis, "_NUMBERS", 40)
    monkeypatch.setattr(analysis, "_ROWS", 30)
    told: list[int] = []
    found = analyze(data, tmp_path / "a", workers=workers, progress=told.append)
    assert sum(told) == 91 * passes(["length", "rarity"]) and len(told) > 20
    assert values_of(tmp_path / "a", "length") == [*map(len, ROWS), 0]
    words = [word for row in ROWS for word in row]
    counts = np.bincount(words)
    words_file = IndexedRows(tmp_path / "a/vocabulary/vocabulary_metric_value")
    assert words_file[0].tolist() == counts.tolist()
    costs = [
        -math.log(counts[word] / len(words)) if counts[word] else 0.0 for word in range(len(counts))
    ]
    expected = [round(sum(costs[word] for word in row)) for row in ROWS]
    assert values_of(tmp_path / "a", "rarity") == [*expected, 0]
    for name, values in (("length", [*map(len, ROWS), 0]), ("rarity", [*expected, 0])):
        distinct, sizes = np.unique(values, return_counts=True)
        assert found[name].values.tolist() == distinct.tolist()
        assert found[name].counts.tolist() == sizes.tolist()
        rows = IndexedRows(tmp_path / f"a/{name}/{name}_index_to_sample")
        kept = IndexedRows(tmp_path / f"a/{name}/{name}_index_to_metric")
        assert kept.numbers.tolist() == distinct.tolist()
        assert [row.tolist() for row in rows[:]] == [
            np.flatnonzero(np.array(values) == value).tolist() for value in distinct
        ]
    # The files do not depend on the chunks.
    monkeypatch.undo()
    analyze(data, tmp_path / "b")
    assert files_of(tmp_path / "a") == files_of(tmp_path / "b")


class Bigrams(nn.Module):
    """Predicts a word from the one before it."""

    def __init__(self, words: int) -> None:
        super().__init__()
        self.table = nn.Embedding(words, words)

    def forward(self, ids: Tensor) -> Tensor:
        return self.table(ids)


def test_the_loss_of_a_model(data: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Bigrams(64).train()
    analyze(data, tmp_path / "a", ["loss"], model=model)
    expected = []
    for row in [*ROWS, []]:
        ids = torch.tensor(row, dtype=torch.int64)
        loss = nn.functional.cross_entropy(model.table(ids[:-1]), ids[1:]) if len(ids) > 1 else 0.0
        expected.append(round(1000 * torch.as_tensor(loss).item()))
    assert values_of(tmp_path / "a", "loss") == expected and model.training


@pytest.mark.runs("transformers")
def test_the_loss_of_a_model_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 8}
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads)).eval()
    rows = [[3, 9, 4], [5] * 12, [7, 1]]
    with RowsBuilder(tmp_path / "data", np.uint16) as builder:
        builder.add_all(rows)
    analyze(tmp_path / "data", tmp_path / "a", ["loss"], model=model)
    for row, value in zip(rows, values_of(tmp_path / "a", "loss"), strict=True):
        ids = torch.tensor([row[:8]])
        assert abs(value - 1000 * model(ids, labels=ids).loss.item()) <= 1


def test_faults(data: Path, tmp_path: Path) -> None:
    for metrics, message in (
        (["size"], "unknown metric size; expected length, rarity, loss"),
        (["loss"], "the metric loss needs a model"),
    ):
        with pytest.raises(UsageError, match=message):
            analyze(data, tmp_path / "a", metrics)
    for name, rows, dtype, message in (
        ("none", [], np.uint8, "has no rows"),
        ("negative", [[-3, 1]], np.int32, "has numbers from -3 to 1; the rarity needs words"),
        ("huge", [[2**30]], np.int64, "the rarity needs words from 0 to"),
    ):
        with RowsBuilder(tmp_path / name, dtype) as builder:
            builder.add_all(rows)
        with pytest.raises(UsageError, match=message):
            analyze(tmp_path / name, tmp_path / "a", ["rarity"])
    assert not (tmp_path / "a/rarity").exists()
    (tmp_path / "file").write_text("")
    for folder, message in (
        (tmp_path / "file", "file/.unfinished_length cannot be created: Not a directory"),
        (tmp_path / "a", "no metric is given; expected some of length, rarity, loss"),
    ):
        with pytest.raises(UsageError, match=message):
            analyze(data, folder, ["length"] if folder.name == "file" else [])
    small = nn.Sequential(nn.Embedding(3, 4), nn.Linear(4, 3))
    with pytest.raises(
        UsageError, match=r"the model Sequential of the loss failed on rows of .*ind"
    ):
        analyze(data, tmp_path / "a", ["loss"], model=small)


def test_chunks_hold_all_rows(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = IndexedRows(data)
    for numbers, most in ((1, 100), (10, 3), (10**6, 10**6)):
        monkeypatch.setattr(analysis, "_NUMBERS", numbers)
        monkeypatch.setattr(analysis, "_ROWS", most)
        spans = chunks_of(rows)
        assert [row for span in spans for row in range(*span)] == list(range(len(rows)))
        assert all(0 < span.stop - span.start <= most for span in spans)


# ---- chunks --------------------------------------------------------------------------------------


def squares(start: int, stop: int) -> dict[str, Any]:
    if start == 4:
        raise UsageError("four")
    return {"found": np.arange(start, stop) ** 2}


@pytest.mark.parametrize("workers", [0, 2])
def test_a_restart_does_only_the_rest(tmp_path: Path, workers: int) -> None:
    spans = chunks.spans_of(Span(0, 9), 2)
    done: list[int] = []
    with pytest.raises(UsageError, match=r"^four$"):
        compute_kept(squares, spans, KeptChunks(tmp_path / "k", {"a": 1}), workers, done.append)
    assert done == [2, 2]

    def rest(start: int, stop: int) -> dict[str, Any]:
        return {"found": -np.arange(start, stop)}

    kept = KeptChunks(tmp_path / "k", {"a": 1})
    compute_kept(rest, spans, kept, workers, done.append)
    assert done == [2, 2, 4, 2, 2, 1]
    assert chunks.joined(kept, spans, "found").tolist() == [0, 1, 4, 9, -4, -5, -6, -7, -8]
    # Other work does not take it.
    other = KeptChunks(tmp_path / "k", {"a": 2})
    assert not any(span in other for span in spans)
    other.remove()
    assert not (tmp_path / "k").exists()


def test_processes_leave_the_random_numbers_alone() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    with compute_all(squares, [(0, 3), (3, 4)], 2) as found:
        assert [len(each["found"]) for each in found] == [3, 1]
    assert torch.equal(torch.get_rng_state(), before)


def deadly(start: int, stop: int) -> dict[str, Any]:
    if start == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    return squares(start, stop)


def test_a_killed_worker_is_named_wherever_the_result_is_used(tmp_path: Path) -> None:
    """torch raises in the main thread when a worker dies, at whatever that does at the time."""
    kept = KeptChunks(tmp_path / "k", {})

    def busy(done: int) -> None:
        time.sleep(20)  # until the handler raises; no limit that passes counts

    with pytest.raises(UsageError, match=r"a worker process was killed.*run it again"):
        compute_kept(deadly, [Span(0, 2), Span(4, 6)], kept, 2, busy)
