"""Analysers of data as programs written for DeepSpeed use them: the files are DeepSpeed's."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks import RankPools, RanksFailed
from torch import Tensor
from torch.utils.data import Dataset

from hadal import comm
from hadal.compat.install import alias
from hadal.errors import UsageError
from hadal.plugins.data_efficiency.indexed import IndexedRows

GOLDEN = json.loads((Path(__file__).parents[1] / "data/analyzer.json").read_text())
MODULE = alias("deepspeed.runtime.data_pipeline.data_sampling.data_analyzer")
COUNT = 23
LISTS = ("metric_names", "metric_functions", "metric_types", "metric_dtypes")
SINGLE, ACCUMULATED = "single_value_per_sample", "accumulate_value_over_samples"


class Numbers(Dataset[Tensor]):
    def __init__(self, shift: int = 0) -> None:
        self.shift = shift

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor((7 * index + 3) % 11 - self.shift)


def value(batch: Tensor) -> Tensor:
    return batch


def frequencies(batch: Tensor) -> Tensor:
    return torch.bincount(batch, minlength=11)


METRICS: dict[str, Any] = {
    "metric_names": ["val", "freq"],
    "metric_functions": [value, frequencies],
    "metric_types": [SINGLE, ACCUMULATED],
}
DTYPES: dict[str, Any] = {"metric_dtypes": [torch.int64, torch.int64]}


def files_of(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def check(folder: Path, case: str) -> None:
    """The files of `folder` are those of DeepSpeed, byte for byte, and no others."""
    for name, expected in GOLDEN[case].items():
        if isinstance(expected, str):
            assert (folder / name).read_bytes().hex() == expected, name
            continue
        rows = IndexedRows(folder / name.removesuffix(".idx"))
        assert [row.tolist() for row in rows[:]] == expected["rows"], name
        assert rows.doc_idx.tolist() == expected["doc_idx"], name
        assert str(rows.dtype) == expected["dtype"], name
    prefixes = {name.rpartition(".")[0] for name in GOLDEN[case]}
    expected = {f"{name}.{end}" for name in prefixes for end in ("bin", "idx")}
    found = {name for name in files_of(folder) if "_sample_ids." not in name}
    if not any("worker" in name for name in expected):
        found = {name for name in found if "worker" not in name}
    assert found == expected


def test_one_worker(tmp_path: Path) -> None:
    analyzer = MODULE.DataAnalyzer(
        Numbers(), batch_size=4, save_path=str(tmp_path), **METRICS, **DTYPES
    )
    analyzer.run_map_reduce()
    check(tmp_path, "da_w1_t1")


def test_workers_with_threads(tmp_path: Path) -> None:
    sizes = {"num_workers": 2, "num_threads": 2, "num_threads_reduce": 2, "batch_size": 2}
    analyzers = [
        MODULE.DataAnalyzer(
            Numbers(), worker_id=worker, save_path=str(tmp_path), **sizes, **METRICS, **DTYPES
        )
        for worker in (1, 0)
    ]
    analyzers[0].run_map()
    with pytest.raises(
        UsageError, match=r"metric val: .*worker0_thread0.* does not exist; .*run_map"
    ):
        analyzers[1].run_reduce()
    # Each part may be mapped by itself.
    analyzers[1].specific_threads = [1]
    analyzers[1].run_map()
    analyzers[1].specific_threads = [0]
    analyzers[1].run_map()
    analyzers[1].run_reduce()
    check(tmp_path, "da_w2_t2_r2")


def test_ids_are_given(tmp_path: Path) -> None:
    given = {"metric_names": ["val"], "metric_functions": [value], "metric_types": [SINGLE]}
    analyzer = MODULE.DataAnalyzer(
        Numbers(),
        save_path=str(tmp_path),
        sample_indices=GOLDEN["perm"],
        metric_dtypes=[torch.int64],
        **given,
    )
    analyzer.run_map_reduce()
    check(tmp_path, "da_perm")


class Fields(Numbers):
    """Samples of three fields, which know their own ids."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:  # type: ignore[override]
        found = super().__getitem__(index)
        return {"x": found, "y": found, "index": torch.tensor([GOLDEN["perm"][index]])}


@pytest.mark.parametrize("batch_size", [1, 5])
def test_batches_with_fields_and_ids(tmp_path: Path, batch_size: int) -> None:
    analyzer = MODULE.DataAnalyzer(
        Fields(),
        batch_size=batch_size,
        save_path=str(tmp_path),
        metric_names=["val"],
        metric_functions=[lambda batch: batch["x"].numpy()],
        metric_types=[SINGLE],
        metric_dtypes=[np.int64],
    )
    analyzer.run_map_reduce()
    check(tmp_path, "da_perm")


def test_negative_values(tmp_path: Path) -> None:
    analyzer = MODULE.DataAnalyzer(
        Numbers(5),
        save_path=str(tmp_path),
        metric_names=["val"],
        metric_functions=[value],
        metric_types=[SINGLE],
        metric_dtypes=[torch.int64],
    )
    analyzer.run_map_reduce()
    for name, expected in GOLDEN["da_negative"].items():
        if isinstance(expected, str):
            assert (tmp_path / name).read_bytes().hex() == expected, name


# ---- several ranks -------------------------------------------------------------------------------


def analyze(folder: Path, threads: int = 1, function: Callable[[Any], Any] = value) -> None:
    metrics = {**METRICS, "metric_functions": [function, frequencies]}
    MODULE.DistributedDataAnalyzer(
        Numbers(),
        num_workers=comm.get_world_size(),
        worker_id=comm.get_rank(),
        num_threads=threads,
        batch_size=4,
        save_path=str(folder),
        **metrics,
    ).run_map_reduce()


def broken(batch: Tensor) -> Any:
    return batch if comm.get_rank() == 0 else batch.float()


@pytest.mark.parametrize(("world", "threads"), [(1, 1), (2, 1), (2, 2)])
def test_all_ranks_analyze(ranks: RankPools, tmp_path: Path, world: int, threads: int) -> None:
    ranks(world).run(analyze, tmp_path, threads)
    check(tmp_path, "dda_w1_t1")


def test_a_fault_on_one_rank_ends_all(ranks: RankPools, tmp_path: Path) -> None:
    with pytest.raises(RanksFailed) as caught:
        ranks(2).run(analyze, tmp_path, 1, broken)
    assert "the analysis stopped on rank 1" in str(caught.value.errors[0])
    assert "metric val returned float32; difficulties are integers" in str(caught.value.errors[1])


def map_and_reduce(folder: Path) -> None:
    MODULE.DataAnalyzer(
        Numbers(),
        num_workers=2,
        worker_id=comm.get_rank(),
        num_threads=2,
        num_threads_reduce=2,
        save_path=str(folder),
        **METRICS,
        **DTYPES,
    ).run_map_reduce()


def test_ranks_map_and_the_first_reduces(ranks: RankPools, tmp_path: Path) -> None:
    ranks(2).run(map_and_reduce, tmp_path)
    check(tmp_path, "da_w2_t2_r2")


# ---- restarts ------------------------------------------------------------------------------------


class Many(Numbers):
    def __len__(self) -> int:
        return 20_000


def deadly(folder: Path, killed: Path) -> Callable[[Tensor], Tensor]:
    """Return a function that kills its process once, in its second chunk, when one is kept."""

    def function(batch: Tensor) -> Tensor:
        seen.append(len(batch))
        if len(seen) > 5 and not killed.exists():
            while not kept_in(folder):
                time.sleep(0.01)
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return batch

    seen: list[int] = []
    return function


def kept_in(folder: Path) -> list[str]:
    return sorted(str(path) for path in folder.rglob("*.npz"))


def test_a_killed_map_does_only_the_rest(tmp_path: Path) -> None:
    def analyzer(folder: Path) -> Any:
        return MODULE.DataAnalyzer(
            Many(),
            num_threads=2,
            batch_size=1000,
            metric_names=["val"],
            metric_types=[SINGLE],
            metric_dtypes=[torch.int64],
            metric_functions=[deadly(folder, tmp_path / "killed")],
            save_path=str(folder),
        )

    with pytest.raises(UsageError, match=r"a worker process was killed.*run it again"):
        analyzer(tmp_path / "a").run_map()
    kept = {path: os.stat(path).st_mtime_ns for path in kept_in(tmp_path / "a")}
    assert 1 <= len(kept) < 4
    again = analyzer(tmp_path / "a")
    assert again._map()
    assert len(kept_in(tmp_path / "a")) == 4
    assert all(os.stat(path).st_mtime_ns == changed for path, changed in kept.items())
    again.run_map_reduce()
    analyzer(tmp_path / "b").run_map_reduce()
    assert files_of(tmp_path / "a") == files_of(tmp_path / "b")
    for name in files_of(tmp_path / "a"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_results_of_other_functions_are_not_reused(tmp_path: Path) -> None:
    given = {"metric_names": ["val"], "metric_types": [SINGLE], "metric_dtypes": [torch.int64]}
    for function, largest in ((lambda batch: batch, 10), (lambda batch: batch * 2, 20)):
        analyzer = MODULE.DataAnalyzer(
            Numbers(), metric_functions=[function], save_path=str(tmp_path), **given
        )
        analyzer._map()  # as if it were killed before the reduce
        rows = IndexedRows(tmp_path / "val/worker0_thread0/val_sample_to_metric")
        assert rows.numbers.max() == largest


# ---- faults --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"metric_dtypes": [torch.float32]}, "metric_dtypes of metric val: torch.float32 is no"),
        ({"metric_functions": [lambda batch: batch.int()]}, "returned int32, .* dtype is int64"),
        ({"metric_functions": [lambda batch: batch.tolist()]}, "returned list; expected a tensor"),
        ({"metric_functions": [lambda batch: batch[:1]]}, "one for each"),
        ({"metric_types": ["mean"]}, 'type "mean"; expected "single_value_per_sample" or'),
        ({"metric_types": []}, "metric_names has 1, .* metric_types has 0"),
        ({"specific_threads": [1]}, "specific_threads has 1, and there are 1 threads"),
        ({"worker_id": 1}, "worker_id is 1, and num_workers 1"),
        ({"num_workers": 2}, "there is no process group; call init_distributed"),
        ({"custom_map_init": print}, "give all three"),
        ({"metric_functions": [5]}, "metric val: expected a function of a batch, got int"),
        ({"metric_names": ["a/b"]}, 'metric_names has "a/b"; expected directory names'),
        ({name: [] for name in LISTS}, "no metric is given"),
        ({"batch_size": 0}, "batch_size is 0; expected 1 or more"),
        ({"num_threads": 0}, "num_threads is 0; expected 1 or more"),
        ({"num_workers": 0}, "num_workers is 0; expected 1 or more"),
        ({"save_path": "/proc/none"}, r"/proc/none/\.unfinished_worker0_thread0 cannot be created"),
        ({"dataset": []}, "the data set has no samples; there is nothing to measure"),
        ({"dataset": iter([1])}, "analyzed by index, and list_iterator has none; give a data set"),
    ],
)
def test_faults(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    given: dict[str, Any] = {
        "dataset": Numbers(),
        "metric_names": ["val"],
        "metric_functions": [value],
        "metric_types": [SINGLE],
        "metric_dtypes": [torch.int64],
        "batch_size": 4,
        "save_path": str(tmp_path),
    }
    with pytest.raises(UsageError, match=message):
        MODULE.DataAnalyzer(**{**given, **changes}).run_map_reduce()


def test_metrics_need_names_of_their_own_and_sums_of_one_shape(tmp_path: Path) -> None:
    def pieces(batch: Tensor) -> Tensor:
        return torch.ones(len(batch), dtype=torch.int64)

    given: dict[str, Any] = {"metric_functions": [value, pieces], "batch_size": 3}
    given |= {"save_path": str(tmp_path), "metric_dtypes": [torch.int64] * 2}
    with pytest.raises(UsageError, match="metric_names has val twice"):
        MODULE.DataAnalyzer(
            Numbers(), metric_names=["val", "val"], metric_types=[SINGLE] * 2, **given
        )
    with pytest.raises(UsageError, match=r"metric sum .* shapes \[3\] and \[[12]\].* summed"):
        MODULE.DataAnalyzer(
            Numbers(), metric_names=["val", "sum"], metric_types=[SINGLE, ACCUMULATED], **given
        ).run_map_reduce()


def test_custom_functions_replace_the_map_and_the_reduce(tmp_path: Path) -> None:
    told: list[Any] = []

    def update(
        batch: Tensor, types: Any, dtypes: Any, functions: Any, results: Any, start: int
    ) -> None:
        results.append((start, functions[0](batch).sum().item()))

    def finalize(types: Any, dtypes: Any, results: Any) -> None:
        (tmp_path / "found.json").write_text(json.dumps(results))

    analyzer = MODULE.DataAnalyzer(
        Numbers(),
        batch_size=10,
        metric_names=["val"],
        metric_functions=[value],
        metric_types=["anything"],
        save_path=str(tmp_path),
        custom_map_init=lambda thread, names, types, dtypes, path, worker: [],
        custom_map_update=update,
        custom_map_finalize=finalize,
        custom_reduce=lambda *args: told.append(args[1:]),
    )
    analyzer.run_map_reduce()
    assert json.loads((tmp_path / "found.json").read_text()) == [[0, 48], [10, 55], [20, 10]]
    assert told == [(["val"], ["anything"], str(tmp_path), 1, 1, 1)]
