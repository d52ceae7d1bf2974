"""From texts to indexed data sets: formats, tokenizers, processes, faults."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from hadal.errors import UsageError
from hadal.plugins.data_efficiency import indexing as texts
from hadal.plugins.data_efficiency.indexed import IndexedRows
from hadal.plugins.data_efficiency.indexing import (
    ByteTokenizer,
    DatasetTexts,
    Indexing,
    JsonTexts,
    PlainTexts,
    dtype_for,
    index_texts,
    source_of,
    tokenizer_of,
)

WORDS = ["ein Text", "größer 語 🙂", "x", "and a longer line of words"] * 50


def read(source: Any) -> list[str]:
    return [text for piece in source.ranges() for text in source.documents(piece)]


def rows_of(prefix: Path) -> list[bytes]:
    return [bytes(row.astype(np.uint8)) for row in IndexedRows(prefix)[:]]


@pytest.mark.parametrize("piece", [1, 7, 64, 1 << 20])
def test_no_piece_loses_or_repeats_a_document(
    tmp_path: Path, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(texts, "RANGE_NBYTES", piece)
    monkeypatch.setattr(texts, "_LOOKED_AT", 5)
    lines = tmp_path / "a.txt"
    lines.write_text("\n".join(WORDS[:20]) + "\n\n \nlast", "utf-8")
    assert read(source_of([lines], None, "text", "line")) == [*WORDS[:20], "last"]
    paragraphs = tmp_path / "b.txt"
    paragraphs.write_text("one\ntwo\n\nthree\n \t\n\n\r\nfour\nfive\n", "utf-8")
    found = read(PlainTexts([paragraphs], "paragraph"))
    assert found == ["one\ntwo", "three", "four\nfive"]
    assert len(read(PlainTexts([lines, paragraphs], "file"))) == 2
    objects = tmp_path / "c.jsonl"
    objects.write_text("\n".join(json.dumps({"text": w, "n": 1}) for w in [*WORDS[:9], ""]))
    assert read(source_of([objects], None, "text", "line")) == WORDS[:9]


@pytest.mark.parametrize("workers", [0, 2])
def test_rows_are_the_documents_in_order(
    tmp_path: Path, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(texts, "RANGE_NBYTES", 300)
    (tmp_path / "a.txt").write_text("\n".join(WORDS), "utf-8")
    told: list[int] = []
    source = PlainTexts([tmp_path / "a.txt"])
    found = index_texts(source, Indexing(ByteTokenizer()), tmp_path / "p", workers, told.append)
    assert rows_of(tmp_path / "p") == [word.encode() for word in WORDS]
    rows = IndexedRows(tmp_path / "p")
    assert rows.dtype == np.uint8 and rows.doc_idx.tolist() == list(range(len(WORDS) + 1))
    assert (found.documents, found.rows, found.tokens) == (200, 200, len(rows.numbers))
    assert found.characters == sum(map(len, WORDS))
    assert len(told) > 5 and sum(told) == (tmp_path / "a.txt").stat().st_size


@settings(max_examples=30)
@given(st.lists(st.text(max_size=9)), st.integers(1, 5), st.booleans())
def test_long_documents_are_several_rows(documents: list[str], length: int, end: bool) -> None:
    made = Indexing(ByteTokenizer(), end, length).rows(documents)
    numbers, row, start = made.numbers.tolist(), 0, 0
    assert len(made.ends) == len(documents)
    for document, stop in zip(documents, made.ends, strict=True):
        expected = [*document.encode(), *([256] if end else [])]
        sizes = made.sizes[row:stop].tolist()
        assert sum(sizes) == len(expected) and all(0 < size <= length for size in sizes)
        assert all(size == length for size in sizes[:-1])
        assert numbers[start : start + sum(sizes)] == expected
        row, start = int(stop), start + sum(sizes)
    assert row == len(made.sizes) and start == len(numbers)


def test_the_dtype_follows_from_the_vocabulary(tmp_path: Path) -> None:
    assert [str(dtype_for(n)) for n in (256, 257, 65536, 65537)] == [
        "uint8",
        "uint16",
        "uint16",
        "int32",
    ]
    assert Indexing(ByteTokenizer(), end=True).dtype == np.uint16


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<u>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, special_tokens=["<u>", "<end>"])
    made.train_from_iterator(WORDS, trainer)
    made.enable_truncation(2)
    made.enable_padding(length=8)
    folder = tmp_path_factory.mktemp("tokenizer")
    made.save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.runs("tokenizers")
def test_a_tokenizer_from_a_file_neither_cuts_nor_fills_up(trained: Path) -> None:
    made = tokenizer_of(str(trained / "tokenizer.json"))
    numbers, sizes = made.encode(WORDS[:4])
    assert sizes.min() < 8 and sizes.max() > 2 and sizes.sum() == len(numbers)
    assert numbers.max() < made.words and made.end is None


@pytest.mark.runs("transformers")
def test_a_tokenizer_of_transformers(trained: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    file = str(trained / "tokenizer.json")
    fast = transformers.PreTrainedTokenizerFast(tokenizer_file=file, eos_token="<end>")
    fast.save_pretrained(tmp_path / "fast")
    (tmp_path / "a.txt").write_text("\n".join(WORDS), "utf-8")
    indexing = Indexing(tokenizer_of(str(tmp_path / "fast")), end=True)
    index_texts(PlainTexts([tmp_path / "a.txt"]), indexing, tmp_path / "p", 2)
    expected = fast(WORDS, padding=False, truncation=False, add_special_tokens=False)["input_ids"]
    found = [row.tolist() for row in IndexedRows(tmp_path / "p")[:]]
    assert found == [[*ids, fast.eos_token_id] for ids in expected]


# ---- faults --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content", "field", "message"),
    [
        (
            "a.jsonl",
            b'{"text": "x"}\n{"txt": "y"}',
            "text",
            r'byte 14: no field "text"; did you me',
        ),
        ("a.jsonl", b'{"text": 3}', "text", 'field "text" is int, expected a text'),
        ("a.jsonl", b'{"text"', "text", "the line at byte 0: not JSON"),
        ("a.jsonl", b"[1]", "text", "expected an object, got list"),
        ("a.txt", b"good\nbad \xff", "text", r"byte 9 is not UTF-8 .*; convert"),
        ("a.gz", b"", "text", "decompress it first"),
    ],
)
@pytest.mark.parametrize("workers", [0, 2])
def test_bad_files_are_reported_with_the_position(
    tmp_path: Path, name: str, content: bytes, field: str, message: str, workers: int
) -> None:
    for number in range(3):
        (tmp_path / f"{number}{name}").write_bytes(content)
    files = [tmp_path / f"{number}{name}" for number in range(3)]
    with pytest.raises(UsageError, match=message) as caught:
        index_texts(
            source_of(files, None, field, "line"),
            Indexing(ByteTokenizer()),
            tmp_path / "p",
            workers,
        )
    assert str(caught.value).startswith(str(files[0]))
    assert not list(tmp_path.glob("p.*"))


def test_missing_items_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.parquet").touch()
    (tmp_path / "a.txt").touch()
    for package in ("pyarrow", "pyarrow.parquet", "datasets", "transformers", "tokenizers"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UsageError, match="pip install pyarrow"):
        source_of([tmp_path / "a.parquet"], None, "text", "line")
    with pytest.raises(UsageError, match="pip install datasets"):
        DatasetTexts.load("name", "train")
    with pytest.raises(UsageError, match='pip install transformers, or name it "bytes"'):
        tokenizer_of("gpt2")
    with pytest.raises(UsageError, match="pip install tokenizers"):
        tokenizer_of("tokenizer.json")
    with pytest.raises(UsageError, match="nope is not a file"):
        source_of([tmp_path / "nope"], None, "text", "line")
    with pytest.raises(UsageError, match=r"several formats \(parquet, text\)"):
        source_of([tmp_path / "a.parquet", tmp_path / "a.txt"], None, "text", "line")

    class Endless(ByteTokenizer):
        end = None  # type: ignore[assignment]

    with pytest.raises(UsageError, match="no end-of-document token"):
        index_texts(JsonTexts([]), Indexing(Endless(), end=True), tmp_path / "p")


def test_a_data_set_is_read_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    class Columns:
        column_names = ("text", "id")

        def __len__(self) -> int:
            return 2500

        def __getitem__(self, part: slice) -> dict[str, list[str]]:
            return {"text": [str(n) if n % 5 else "" for n in range(2500)[part]]}

    told: list[Any] = []

    def load(name: str, split: str) -> Any:
        told.append((name, split))
        return Columns()

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load))
    found = read(DatasetTexts.load("name", "train"))
    assert found == [str(n) for n in range(2500) if n % 5]
    assert told == [("name", "train")]
    with pytest.raises(UsageError, match='data set name: no field "txt"; did you mean "text"'):
        DatasetTexts.load("name", "train", "txt")


@pytest.mark.runs("pyarrow")
def test_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table({"text": [*WORDS, None, ""], "id": list(range(len(WORDS) + 2))})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=30)
    source = source_of([tmp_path / "a.parquet"], None, "text", "line")
    assert len(source.ranges()) == 7 and read(source) == WORDS
    with pytest.raises(UsageError, match=r'a\.parquet: no field "txt"; did you mean "text"'):
        read(source_of([tmp_path / "a.parquet"], None, "txt", "line"))
    with pytest.raises(UsageError, match='column "id" is int64, expected texts'):
        read(source_of([tmp_path / "a.parquet"], None, "id", "line"))
    (tmp_path / "b.parquet").write_text("no table")
    with pytest.raises(
        UsageError, match=r"b\.parquet is not a Parquet file, or is damaged: .* magic"
    ):
        read(source_of([tmp_path / "b.parquet"], None, "text", "line"))


@pytest.mark.runs("datasets")
def test_data_sets_on_the_disk(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    whole = datasets.Dataset.from_dict({"text": WORDS})
    whole.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"valid": whole}).save_to_disk(tmp_path / "several")
    assert read(DatasetTexts.load(str(tmp_path / "one"), "train")) == WORDS
    assert read(DatasetTexts.load(str(tmp_path / "several"), "valid")) == WORDS
    with pytest.raises(UsageError, match=r"several, split train: .* no such split; expected valid"):
        DatasetTexts.load(str(tmp_path / "several"), "train")
