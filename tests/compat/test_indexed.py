"""Indexed data sets as programs written for DeepSpeed make and read them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hadal.compat.install import alias
from hadal.errors import UsageError

GOLDEN = json.loads((Path(__file__).parents[1] / "data/mmap.json").read_text())
MODULE = alias("deepspeed.runtime.data_pipeline.data_sampling.indexed_dataset")
UTILS = alias("deepspeed.runtime.data_pipeline.data_sampling.utils")


@pytest.mark.parametrize("entry", GOLDEN["mmap"], ids=lambda entry: entry["dtype"])
def test_a_program_writes_and_reads(entry: dict[str, Any], tmp_path: Path) -> None:
    prefix = str(tmp_path / "p")
    dtype = getattr(torch, entry["dtype"])
    builder = UTILS.create_mmap_dataset_builder(prefix, dtype)
    for number, row in enumerate(entry["items"]):
        builder.add_item(torch.tensor(row, dtype=dtype))
        if number in entry["end_document_after"]:
            builder.end_document()
    UTILS.close_mmap_dataset_builder(builder, prefix)
    for suffix, path in (
        ("bin", MODULE.data_file_path(prefix)),
        ("idx", MODULE.index_file_path(prefix)),
    ):
        assert Path(path).read_bytes().hex() == entry[suffix]
    assert MODULE.MMapIndexedDataset.exists(prefix)
    rows = MODULE.MMapIndexedDataset(prefix, skip_warmup=True)
    assert [row.tolist() for row in rows[:]] == entry["read"]
    assert rows.get_doc_idx().tolist() == entry["doc_idx"] and not rows.supports_prefetch


def test_builders_are_chosen_by_the_vocabulary(tmp_path: Path) -> None:
    for size, name in ((1000, "uint16"), (70000, "int32"), (None, "int32")):
        prefix = tmp_path / str(size)
        builder = MODULE.make_builder(f"{prefix}.bin", "mmap", vocab_size=size)
        builder.add_items([[1, 2], [3]])
        builder.finalize(f"{prefix}.idx")
        rows = MODULE.make_dataset(str(prefix), "infer")
        assert str(rows.dtype) == name and rows.sizes.tolist() == [2, 1]


def test_the_older_format(tmp_path: Path) -> None:
    golden = GOLDEN["old_format"]
    prefix = str(tmp_path / "old")
    builder = MODULE.make_builder(f"{prefix}.bin", "cached")
    for row in golden["read"]:
        builder.add_item(torch.tensor(row))
    builder.end_document()
    builder.finalize(f"{prefix}.idx")
    for suffix in ("bin", "idx"):
        assert Path(f"{prefix}.{suffix}").read_bytes().hex() == golden[suffix]
    rows = MODULE.IndexedDataset(prefix)
    assert [row.tolist() for row in rows[:]] == golden["read"]
    assert MODULE.infer_dataset_impl(prefix) == "cached"
    with pytest.raises(UsageError, match="the older format has no code for torch"):
        MODULE.IndexedDatasetBuilder(f"{prefix}.bin", dtype=torch.uint32)


def test_small_helpers(tmp_path: Path) -> None:
    assert MODULE.infer_dataset_impl(str(tmp_path / "no")) is None
    prefix = str(tmp_path / "new")
    MODULE.MMapIndexedDatasetBuilder(f"{prefix}.bin").finalize(f"{prefix}.idx")
    assert MODULE.infer_dataset_impl(prefix) == "mmap" and MODULE.dataset_exists(prefix, "mmap")
    assert MODULE.create_doc_idx([2, 0, 3, 0]) == [0, 2, 4]
    assert [MODULE.code(dtype) for dtype in (torch.int64, "uint16")] == [5, 6]
    workers, threads = UTILS.split_dataset(range(10), 3, 2, 2)
    assert (workers, threads) == ([(0, 3), (3, 6), (6, 10)], [(6, 8), (8, 10)])


@pytest.mark.parametrize(("start", "stop", "count", "parts"), GOLDEN["split_index"])
def test_ranges_are_split_as_there(start: int, stop: int, count: int, parts: Any) -> None:
    assert [list(part) for part in UTILS.split_index(start, stop, count)] == parts


@pytest.mark.parametrize(("low", "high", "name"), GOLDEN["find_fit_int_dtype"])
def test_the_dtype_that_fits(low: int, high: int, name: str) -> None:
    assert str(UTILS.find_fit_int_dtype(low, high)) == name
