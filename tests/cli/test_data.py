"""`hadal data`: from texts to the files of a curriculum."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hadal.cli import data
from hadal.cli.main import main
from hadal.plugins.data_efficiency.indexed import IndexedRows
from hadal.plugins.data_efficiency.metric_files import Distribution


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    lines = ["a line " * (1 + number % 5) for number in range(40)]
    (tmp_path / "corpus.jsonl").write_text("\n".join(json.dumps({"body": each}) for each in lines))
    (tmp_path / "corpus.txt").write_text("\n".join(lines))
    return tmp_path


def test_index_and_analyze(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prefix = str(corpus / "p")
    words = ["data", "index", str(corpus / "corpus.jsonl"), "--output", prefix, "--workers", "0"]
    assert main([*words, "--field", "body", "--end", "--length", "16"]) == 0
    told = capsys.readouterr().out
    assert "documents  40\n" in told and "of uint16" in told and f"{prefix}.bin" in told
    rows = IndexedRows(prefix)
    assert len(rows.doc_idx) == 41 and rows.sizes.max() == 16 and rows.numbers.max() == 256
    pytest.importorskip("matplotlib")
    assert main(["data", "analyze", prefix, "-o", str(corpus / "a"), "--workers", "0"]) == 0
    told = capsys.readouterr().out
    assert f"{len(rows)} samples" in told and "length" in told and "rarity" in told
    for name in ("length", "rarity"):
        for suffix in ("_index_to_sample.bin", "_index_to_metric.bin", "_distribution.png"):
            path = corpus / "a" / name / f"{name}{suffix}"
            assert path.stat().st_size and (suffix[-3:] == "bin" or str(path) in told)


def test_json(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prefix = str(corpus / "p")
    assert main(["data", "index", str(corpus / "corpus.txt"), "-o", prefix, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["documents"], told["rows"], told["dtype"]) == (40, 40, "uint8")
    words = ["data", "analyze", prefix, "-o", str(corpus / "a"), "--metrics", "length"]
    assert main([*words, "--no-picture", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    files = str(corpus / "a/length/length_")
    assert told == {
        "samples": 40,
        "metrics": {
            "length": {
                "distinct": 5,
                "min": 7,
                "p5": 7,
                "median": 21,
                "p95": 35,
                "max": 35,
                "files": files,
            }
        },
        "pictures": [],
    }


def test_without_matplotlib_nothing_is_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.backend_bases", None)
    assert data._draw(tmp_path, {"length": Distribution(np.arange(2), np.ones(2))}) == []
    assert "no picture: a picture needs the package matplotlib" in capsys.readouterr().err


def test_faults_are_reported(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prefix = str(corpus / "p")
    (corpus / "empty.txt").write_text("\n\n")
    for words, message in (
        (["index", str(corpus / "no.txt"), "-o", prefix], "no.txt is not a file"),
        (["index", str(corpus / "corpus.jsonl"), "-o", prefix], 'no field "text"; it has body'),
        (["index", str(corpus / "empty.txt"), "-o", prefix], "no document has text"),
        (["index", "a", "b", "--format", "dataset", "-o", prefix], "one at a time"),
        (["analyze", str(corpus / "no"), "-o", str(corpus / "a")], "no.idx does not exist"),
    ):
        assert main(["data", *words, *(["--workers", "0"] if "b" not in words else [])]) == 1
        assert message in capsys.readouterr().err
    assert not (corpus / "p.bin").exists()
    main(["data", "index", str(corpus / "corpus.txt"), "-o", prefix])
    capsys.readouterr()
    for words, message in (
        (["--metrics", "loss"], "the metric loss needs a model"),
        (["--metrics", "lenght"], "unknown metric lenght; expected length, rarity, loss"),
        (["--metrics", ","], "no metric is given; expected some of length, rarity, loss"),
        (
            ["-o", str(corpus / "corpus.txt")],
            "unfinished_length cannot be created: Not a directory",
        ),
    ):
        assert main(["data", "analyze", prefix, "-o", str(corpus / "a"), *words]) == 1
        assert message in capsys.readouterr().err


def test_a_long_tail_leaves_room_for_the_others() -> None:
    pytest.importorskip("matplotlib")
    values = np.array([0, *range(10, 60), 100_000])
    figure: Any = data.figure_of("length", values, np.ones(len(values), np.int64))
    upper, lower = figure.axes
    heights = [bar.get_height() for bar in upper.patches]
    assert sum(heights) == len(values) and max(heights) <= 8
    assert upper.get_xscale() == "symlog" and lower.get_xlabel() == "length (logarithmic)"


def test_the_picture_has_every_sample() -> None:
    pytest.importorskip("matplotlib")
    values, counts = np.array([-3, 2, 900]), np.array([5, 10, 1])
    figure: Any = data.figure_of("length", values, counts)
    upper, lower = figure.axes
    assert sum(bar.get_height() for bar in upper.patches) == 16
    assert lower.lines[0].get_ydata()[-1] == 1.0
    assert figure.get_suptitle() == "length of 16 samples"
    assert "median: 2" in upper.get_title()
