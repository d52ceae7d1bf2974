"""Indexed data sets: byte for byte as DeepSpeed's and Megatron's."""

from __future__ import annotations

import json
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from hadal.errors import UsageError
from hadal.plugins.data_efficiency.indexed import (
    IndexedRows,
    RowsBuilder,
    bin_path,
    idx_path,
    index_of,
    smallest_dtype,
)

GOLDEN = json.loads((Path(__file__).parents[1] / "data/mmap.json").read_text())


def build(prefix: Path, rows: list[Any], dtype: Any, ends: list[int] | None = None) -> Path:
    with RowsBuilder(prefix, dtype) as builder:
        for number, row in enumerate(rows):
            builder.add(row)
            if ends and number in ends:
                builder.end_document()
    return prefix


def put(prefix: Path, entry: dict[str, str]) -> Path:
    bin_path(prefix).write_bytes(bytes.fromhex(entry["bin"]))
    idx_path(prefix).write_bytes(bytes.fromhex(entry["idx"]))
    return prefix


@pytest.mark.parametrize("entry", GOLDEN["mmap"], ids=lambda entry: entry["dtype"])
def test_files_are_deepspeeds(entry: dict[str, Any], tmp_path: Path) -> None:
    prefix = tmp_path / "p"
    with RowsBuilder(prefix, entry["dtype"]) as builder:
        for number, row in enumerate(entry["items"]):
            builder.add(torch.tensor(row, dtype=getattr(torch, entry["dtype"])))
            if number in entry["end_document_after"]:
                builder.end_document()
        builder.end_document()
    assert bin_path(prefix).read_bytes().hex() == entry["bin"]
    assert idx_path(prefix).read_bytes().hex() == entry["idx"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["p.bin", "p.idx"]
    rows = IndexedRows(put(tmp_path / "theirs", entry))
    assert [row.tolist() for row in rows[:]] == entry["read"]
    assert rows.sizes.tolist() == entry["sizes"] and rows.doc_idx.tolist() == entry["doc_idx"]
    assert rows.dtype == np.dtype(entry["dtype"]) and len(rows) == entry["len"]
    assert all(row.dtype == rows.dtype and not row.flags.writeable for row in rows[:])
    if entry["get_1"] is not None:
        assert rows.get(0, 1, 1).tolist() == entry["get_1"]


def test_an_empty_row_and_two_dimensions(tmp_path: Path) -> None:
    first = put(tmp_path / "first", GOLDEN["empty_row"])
    assert [row.tolist() for row in IndexedRows(first)[:]] == [[], [9]]
    second = build(tmp_path / "second", [np.array([[1, 2], [3, 4]])], np.int32, [0])
    assert bin_path(second).read_bytes().hex() == GOLDEN["two_d"]["bin"]
    assert idx_path(second).read_bytes().hex() == GOLDEN["two_d"]["idx"]


def test_data_sets_are_merged(tmp_path: Path) -> None:
    golden = GOLDEN["merge"]
    m1 = build(tmp_path / "m1", golden["m1"], np.int32, [0, 1])
    assert IndexedRows(m1).doc_idx.tolist() == golden["m1_docs"]
    m2 = build(tmp_path / "m2", golden["m2"], np.int32, [0])
    with RowsBuilder(tmp_path / "all", np.int32) as builder:
        builder.add(golden["first_item"])
        builder.merge(m1)
        builder.merge(m2)
        builder.end_document()
    found = IndexedRows(tmp_path / "all")
    assert bin_path(tmp_path / "all").read_bytes().hex() == golden["bin"]
    assert found.sizes.tolist() == golden["sizes"]
    assert found.doc_idx.tolist() == golden["doc_idx"]
    assert idx_path(tmp_path / "all").read_bytes().hex() == golden["idx"]
    wide = build(tmp_path / "wide", [[1]], np.int64)
    with pytest.raises(UsageError, match="is of int64, but"), RowsBuilder(m1, np.int32) as builder:
        builder.merge(wide)
    assert [row.tolist() for row in IndexedRows(m1)[:]] == golden["m1"]


def test_the_old_format_is_read(tmp_path: Path) -> None:
    rows = IndexedRows(put(tmp_path / "old", GOLDEN["old_format"]))
    assert [row.tolist() for row in rows[:]] == GOLDEN["old_format"]["read"]


@pytest.mark.parametrize(
    ("code", "dtype"),
    [(6, "float64"), (8, "uint16"), (9, "uint32"), (10, "uint64"), (7, "float64"), (6, "uint16")],
)
def test_codes_of_megatron_are_distinguished_by_width(
    code: int, dtype: str, tmp_path: Path
) -> None:
    values = np.array([3, 1, 2], dtype)
    bin_path(tmp_path / "p").write_bytes(values.tobytes())
    raw = bytearray(index_of([2, 1], [0, 2], np.dtype(np.uint64)))
    raw[17] = code
    raw[42:58] = struct.pack("<2q", 0, 2 * values.itemsize)
    idx_path(tmp_path / "p").write_bytes(raw)
    rows = IndexedRows(tmp_path / "p")
    assert rows.dtype == np.dtype(dtype)
    assert [row.tolist() for row in rows[:]] == [[3, 1], [2]]


def test_an_ambiguous_code_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    prefix = build(tmp_path / "p", [[1, 2]], np.uint32)
    assert IndexedRows(prefix).dtype == np.uint32
    assert "uint32 (DeepSpeed) or float32 (Megatron-LM)" in caplog.text
    assert IndexedRows(prefix, dtype=np.float32)[0].dtype == np.float32
    with pytest.raises(UsageError, match="numbers of 4 bytes, not of dtype float64"):
        IndexedRows(prefix, dtype=np.float64)


def test_rows_are_found_like_in_a_list(tmp_path: Path) -> None:
    rows = IndexedRows(build(tmp_path / "p", [[0], [1, 2], [3], [4, 5, 6]], np.int32))
    assert rows[-1].tolist() == [4, 5, 6] and rows[np.int64(1)].tolist() == [1, 2]
    assert [row.tolist() for row in rows[1:3]] == [[1, 2], [3]] and rows.size(1) == 2
    with pytest.raises(IndexError, match=r"row 99 of .*, which has 4 rows"):
        rows[99]
    with pytest.raises(IndexError, match="numbers 1 to 5 of row 1, which has 2"):
        rows.get(1, 1, 4)
    with pytest.raises(ValueError, match="steps of 1"):
        rows[::2]
    kept = rows[3]
    again = pickle.loads(pickle.dumps(rows))
    del rows
    assert kept.tolist() == [4, 5, 6] == again[3].tolist()


def test_an_empty_data_set_opens(tmp_path: Path) -> None:
    rows = IndexedRows(build(tmp_path / "p", [], np.uint16))
    assert len(rows) == 0 and rows[:] == [] and rows.dtype == np.uint16


def test_bad_files_are_refused_with_their_names(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no\.idx does not exist"):
        IndexedRows(tmp_path / "no")
    prefix = build(tmp_path / "p", [[1, 2], [3]], np.int32)
    other = build(tmp_path / "q", [[1, 2], [3, 4]], np.int32)
    bin_path(prefix).write_bytes(bin_path(other).read_bytes())
    with pytest.raises(UsageError, match=r"has 16 bytes, but .* describes 12"):
        IndexedRows(prefix)
    idx_path(prefix).write_bytes(idx_path(other).read_bytes()[:40])
    with pytest.raises(UsageError, match=r"p\.idx is damaged"):
        IndexedRows(prefix)
    idx_path(prefix).write_bytes(b"something else")
    with pytest.raises(UsageError, match=r"p\.idx is not the index of a data set"):
        IndexedRows(prefix)


def test_numbers_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(UsageError, match="300 in row 1 does not fit uint8"),
        RowsBuilder(tmp_path / "p", np.uint8) as builder,
    ):
        builder.add([1])
        builder.add([300])
    assert not list(tmp_path.iterdir())
    with pytest.raises(UsageError, match="float32 is not a dtype of indexed data sets"):
        RowsBuilder(tmp_path / "p", torch.float32)
    with RowsBuilder(tmp_path / "p", torch.uint8) as builder:
        builder.add(torch.tensor([1.0, 2.0]))
    assert IndexedRows(tmp_path / "p")[0].tolist() == [1, 2]


@settings(max_examples=25)
@given(st.lists(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=5), max_size=8))
def test_written_values_are_read(tmp_path_factory: Any, rows: list[list[int]]) -> None:
    prefix = build(tmp_path_factory.mktemp("rows") / "p", rows, np.int32)
    assert [row.tolist() for row in IndexedRows(prefix)[:]] == rows


@pytest.mark.parametrize(("low", "high", "name"), GOLDEN["find_fit_int_dtype"])
def test_the_smallest_dtype_is_deepspeeds(low: int, high: int, name: str) -> None:
    assert smallest_dtype(low, high) == np.dtype(name)
