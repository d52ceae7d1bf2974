"""DeepSpeed's analysers of data: shells around `hadal.data_efficiency`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hadal import comm
from hadal.comm.faults import raised_on_all
from hadal.errors import UsageError
from hadal.plugins.data_efficiency.chunks import (
    KeptChunks,
    Span,
    compute_all,
    compute_kept,
    joined,
    spans_of,
    split_span,
)
from hadal.plugins.data_efficiency.indexed import IndexedRows, bin_path
from hadal.plugins.data_efficiency.measures import (
    IDS,
    BatchMeasures,
    Measure,
    added_up,
    measures_of,
)
from hadal.plugins.data_efficiency.metric_files import (
    Origin,
    write_accumulated,
    write_origin,
    write_row,
    write_single,
    write_values,
)

_UNFINISHED = ".unfinished"
_MAPPED, _ADDED, _IDS = "sample_to_metric", "metric_value", "sample_ids"

Values = npt.NDArray[Any]


class _Mapped(NamedTuple):
    """A range of samples, its chunks, and the location of their results."""

    spans: list[Span]
    kept: KeptChunks

    def values(self, measure: Measure) -> Values:
        """Return a metric's values, or their sum."""
        if not measure.accumulates:
            return joined(self.kept, self.spans, measure.key)
        found = [self.kept.load(span)[measure.key] for span in self.spans]
        return added_up(measure.name, found)

    def ids(self) -> Values | None:
        """Return the samples' ids; None: they are the samples' places."""
        if not self.spans or IDS not in self.kept.load(self.spans[0]):
            return None
        return joined(self.kept, self.spans, IDS)


class _Analysis:
    """The arguments that both analysers have."""

    def __init__(
        self,
        work: BatchMeasures,
        save_path: str | Path,
        num_workers: int,
        worker_id: int,
        num_threads: int,
    ) -> None:
        self.num_workers = num_workers
        self.worker_id = worker_id
        self.num_threads = num_threads
        self.dataset = work.dataset
        self.save_path = str(save_path)
        self._work = work
        self._folder = Path(save_path)
        sizes = {"num_workers": num_workers, "num_threads": num_threads}
        for name, size in {**sizes, "batch_size": work.batch_size}.items():
            if size < 1:
                raise UsageError(f"{name} is {size}; expected 1 or more")
        if not (hasattr(work.dataset, "__len__") and hasattr(work.dataset, "__getitem__")):
            raise UsageError(
                "samples are analyzed by index, and"
                f" {type(work.dataset).__name__} has none; give a data set with a length and items"
            )
        if not len(work.dataset):
            raise UsageError("the data set has no samples; there is nothing to measure")
        if not 0 <= worker_id < num_workers:
            raise UsageError(
                f"worker_id is {worker_id}, and num_workers {num_workers}; expected an id from 0 to"
                f" {num_workers - 1}"
            )

    def _own_span(self) -> Span:
        whole = Span(0, len(self._work.dataset))
        return split_span(whole, self.num_workers)[self.worker_id]

    def _write(
        self, measure: Measure, parts: Sequence[Values], ids: Sequence[Values] = (), **layout: Any
    ) -> None:
        """Write the files of a metric from its parts, in the order of the samples."""
        if measure.accumulates:
            write_accumulated(self._folder, measure.name, added_up(measure.name, parts))
            return
        joined_ids = np.concatenate(ids) if ids else None
        write_single(self._folder, measure.name, np.concatenate(parts), joined_ids, **layout)
        write_origin(self._folder, measure.name, Origin.of(self.dataset))

    def _mapped(self, thread: int, span: Span) -> _Mapped:
        identity = {"span": list(span), **self._work.identity()}
        # No folder above is shared with other workers, whose analysis may end at any time.
        folder = self._folder / f"{_UNFINISHED}_worker{self.worker_id}_thread{thread}"
        return _Mapped(spans_of(span, self._work.chunk), KeptChunks(folder, identity))


class DataAnalyzer(_Analysis):
    """Measures every sample of a data set, and writes files from which a curriculum chooses.

    A map writes `<save_path>/<metric>/worker<w>_thread<t>/`, a reduce merges them. The threads of a
    map are processes. A map that was killed resumes when it is run again.

    Args:
        dataset: a data set with a length and items.
        num_workers: maps that share the data set; each writes to the same `save_path`.
        worker_id: this one's number.
        num_threads: processes of a map.
        num_threads_reduce: only divides files into documents, as DeepSpeed does.
        specific_threads: the parts of this worker's samples to map; empty: all.
        batch_size: samples of a batch.
        metric_names: the metrics.
        metric_functions: the function of a batch of each.
        metric_types: `single_value_per_sample` or `accumulate_value_over_samples`.
        metric_dtypes: the types of the results, of numpy or torch.
        save_path: the folder to write to.
        collate_fn: makes a batch of a list of samples.
        custom_map_init: with the next two, replaces the map.
        custom_map_update: called with each batch.
        custom_map_finalize: called at the end.
        custom_reduce: replaces the reduce.
        sample_indices: the id of each sample; a batch's own "index" comes first.

    Raises:
        UsageError: the lists do not fit each other, or a type or dtype is unknown.
    """

    def __init__(  # noqa: PLR0913 - the signature is DeepSpeed's
        self,
        dataset: Any,
        num_workers: int = 1,
        worker_id: int = 0,
        num_threads: int = 1,
        num_threads_reduce: int = 1,
        specific_threads: Sequence[int] = (),
        batch_size: int = 1,
        metric_names: Sequence[str] = (),
        metric_functions: Sequence[Callable[[Any], Any]] = (),
        metric_types: Sequence[str] = (),
        metric_dtypes: Sequence[Any] = (),
        save_path: str = "./",
        collate_fn: Callable[[Any], Any] | None = None,
        custom_map_init: Callable[..., Any] | None = None,
        custom_map_update: Callable[..., Any] | None = None,
        custom_map_finalize: Callable[..., Any] | None = None,
        custom_reduce: Callable[..., Any] | None = None,
        sample_indices: Sequence[int] | None = None,
    ) -> None:
        custom = (custom_map_init, custom_map_update, custom_map_finalize)
        if any(custom) and not all(custom):
            raise UsageError(
                "custom_map_init, custom_map_update and custom_map_finalize replace the map"
                " together; give all three"
            )
        self._custom = custom if all(custom) else None
        self._custom_reduce = custom_reduce
        self._types, self._dtypes = list(metric_types), list(metric_dtypes)
        measures = (
            []
            if self._custom
            else measures_of(metric_names, metric_functions, metric_types, metric_dtypes)
        )
        self._names, self._functions = list(metric_names), list(metric_functions)
        work = BatchMeasures(dataset, measures, batch_size, collate_fn, sample_indices)
        super().__init__(work, save_path, num_workers, worker_id, num_threads)
        self.num_threads_reduce = num_threads_reduce
        self.specific_threads = list(specific_threads)
        unknown = [thread for thread in specific_threads if not 0 <= thread < num_threads]
        if unknown:
            raise UsageError(
                f"specific_threads has {unknown[0]}, and there are {num_threads} threads, from 0"
            )

    def run_map(self) -> None:
        """Measure this worker's samples, and write a folder for each thread.

        Raises:
            UsageError: a function returned a value that its metric does not accept.
        """
        _remove(self._map())

    def _map(self) -> list[_Mapped]:
        parts = split_span(self._own_span(), self.num_threads)
        threads = self.specific_threads or range(self.num_threads)
        if self._custom is not None:
            work = [(thread, *parts[thread]) for thread in threads]
            with compute_all(self._map_custom, work, len(work)) as found:
                list(found)
            return []
        mapped = {thread: self._mapped(thread, parts[thread]) for thread in threads}
        rest = [(thread, span) for thread, each in mapped.items() for span in each.spans]
        rest = [(thread, span) for thread, span in rest if span not in mapped[thread].kept]
        with compute_all(self._work, [span for _, span in rest], len(mapped)) as arrays:
            for (thread, span), each in zip(rest, arrays, strict=True):
                mapped[thread].kept.save(span, each)
        for thread, one in mapped.items():
            self._write_map(thread, one)
        return list(mapped.values())

    def _write_map(self, thread: int, mapped: _Mapped) -> None:
        if not mapped.spans:
            return
        for measure in self._work.measures:
            values = mapped.values(measure)
            if measure.accumulates:
                prefix = self._prefix(measure, _ADDED, self.worker_id, thread)
                write_row(prefix, values, measure.dtype)
                continue
            prefix = self._prefix(measure, _MAPPED, self.worker_id, thread)
            write_values(prefix, values, measure.dtype)
            prefix = self._prefix(measure, _IDS, self.worker_id, thread)
            ids = mapped.ids()
            for suffix in ("bin", "idx"):
                Path(f"{prefix}.{suffix}").unlink(missing_ok=True)
            if ids is not None:
                write_values(prefix, ids)

    def _prefix(self, measure: Measure, kind: str, worker: int, thread: int) -> Path:
        folder = f"worker{worker}_thread{thread}"
        return self._folder / measure.name / folder / f"{measure.name}_{kind}"

    def _map_custom(self, thread: int, start: int, stop: int) -> None:
        assert self._custom is not None
        init, update, finalize = self._custom
        assert init is not None
        assert update is not None
        assert finalize is not None
        common = (self._types, self._dtypes)
        results = init(thread, self._names, *common, self.save_path, self.worker_id)
        for span in spans_of(Span(start, stop), self._work.batch_size):
            update(self._work.batch(span), *common, self._functions, results, span.start)
        finalize(*common, results)

    def run_reduce(self) -> None:
        """Merge the folders of all workers and threads into the files of each metric.

        Raises:
            UsageError: a folder is missing, or they are of other samples than the data set's.
        """
        if self._custom_reduce is not None:
            self._custom_reduce(
                *(self.dataset, self._names, self._types, self.save_path),
                *(self.num_workers, self.num_threads, self.num_threads_reduce),
            )
            return
        for measure in self._work.measures:
            if measure.accumulates:
                wide = np.uint64 if measure.dtype == np.uint64 else np.int64
                sums = [rows.numbers.astype(wide) for rows in self._all(measure, _ADDED)]
                self._write(measure, sums)
            else:
                self._reduce(measure)

    def _reduce(self, measure: Measure) -> None:
        rows = self._all(measure, _MAPPED)
        values = [each.numbers for each in rows]
        mapped, count = sum(map(len, values)), len(self.dataset)
        if mapped != count:
            raise UsageError(
                f"metric {measure.name}: the maps in {self._folder / measure.name} are of"
                f" {mapped} samples, and the data set has {count}; reduce with num_workers"
                " and num_threads as they were mapped, and with the same data set"
            )
        has_ids = bin_path(rows[0].prefix.with_name(f"{measure.name}_{_IDS}")).exists()
        ids = [each.numbers for each in self._all(measure, _IDS)] if has_ids else []
        self._write(measure, values, ids, reducers=max(1, self.num_threads_reduce))

    def _all(self, measure: Measure, kind: str) -> list[IndexedRows]:
        """Return the files of all workers and threads that have samples."""
        whole = Span(0, len(self.dataset))
        threads = [
            (worker, thread)
            for worker, own in enumerate(split_span(whole, self.num_workers))
            for thread, span in enumerate(split_span(own, self.num_threads))
            if span.stop > span.start
        ]
        try:
            return [
                IndexedRows(self._prefix(measure, kind, *each), is_whole=True) for each in threads
            ]
        except UsageError as error:
            raise UsageError(
                f"metric {measure.name}: {error}; run_map has to be complete on every worker, with"
                " the same num_workers and num_threads"
            ) from error

    def run_map_reduce(self, comm_group: Any = None) -> None:
        """Map, wait for the other workers, and let worker 0 reduce.

        Args:
            comm_group: the process group of the workers; None: all ranks.

        Raises:
            UsageError: there are several workers, and no process group.
        """
        if self.num_workers > 1 and not comm.is_initialized():
            raise UsageError(
                f"{self.num_workers} workers wait for each other in run_map_reduce, and there is no"
                " process group; call init_distributed, or run_map and run_reduce yourself"
            )
        with _raised_together(comm_group):
            mapped = self._map()
        with _raised_together(comm_group):
            if self.worker_id == 0:
                self.run_reduce()
        _remove(mapped)


def _remove(mapped: Sequence[_Mapped]) -> None:
    """Remove the intermediate files of a restart."""
    for each in mapped:
        each.kept.remove()


def _raised_together(group: Any) -> AbstractContextManager[None]:
    """Return a context in which a failure of one rank, if there are ranks, is raised on all."""
    if not comm.is_initialized():
        return nullcontext()
    ranks = comm.Ranks.world() if group is None else comm.Ranks.of(group)
    return raised_on_all(ranks, "the analysis", UsageError)


class DistributedDataAnalyzer(_Analysis):
    """Measures a data set on all ranks of a group, and writes the same files as `DataAnalyzer`.

    Samples of one value are ordered by id. A rank that was killed resumes when the analysis is run
    again, if `save_path` still exists.

    Args:
        dataset: a data set with a length and items, the same on every rank.
        num_workers: the ranks of the group.
        num_threads: processes of each rank.
        worker_id: this rank's number.
        batch_size: samples of a batch.
        metric_names: the metrics.
        metric_functions: the function of a batch of each; results are integers.
        metric_types: `single_value_per_sample` or `accumulate_value_over_samples`.
        save_path: the folder that rank 0 writes to.
        collate_fn: makes a batch of a list of samples.
        device: has no effect; results are sent on the group's device.
        comm_group: the process group; None: all ranks.
        sample_indices: the id of each sample; a batch's own "index" comes first.

    Raises:
        UsageError: the lists do not fit each other, a type is unknown, or the group has another
            number of ranks.
    """

    def __init__(  # noqa: PLR0913 - the signature is DeepSpeed's
        self,
        dataset: Any,
        num_workers: int = 1,
        num_threads: int = 1,
        worker_id: int = 0,
        batch_size: int = 1,
        metric_names: Sequence[str] = (),
        metric_functions: Sequence[Callable[[Any], Any]] = (),
        metric_types: Sequence[str] = (),
        save_path: str = "./",
        collate_fn: Callable[[Any], Any] | None = None,
        device: str = "cuda",
        comm_group: Any = None,
        sample_indices: Sequence[int] | None = None,
    ) -> None:
        measures = measures_of(metric_names, metric_functions, metric_types)
        work = BatchMeasures(dataset, measures, batch_size, collate_fn, sample_indices)
        super().__init__(work, save_path, num_workers, worker_id, num_threads)
        if not comm.is_initialized():
            comm.init_distributed()
        self.comm_group = comm_group
        ranks = comm.get_world_size(comm_group)
        if ranks != num_workers:
            raise UsageError(
                f"num_workers is {num_workers}, but the process group has {ranks} ranks; set one"
                " worker per rank"
            )

    def run_map_reduce(self) -> None:
        """Measure this rank's samples; rank 0 gathers the measures and writes the files.

        Raises:
            UsageError: on some rank, a function returned a value that its metric does not accept.
        """
        with _raised_together(self.comm_group):
            mapped = self._mapped(0, self._own_span())
            compute_kept(self._work, mapped.spans, mapped.kept, self.num_threads)
        for measure in self._work.measures:
            with _raised_together(self.comm_group):
                self._reduce(measure, mapped)
        _remove([mapped])

    def _reduce(self, measure: Measure, mapped: _Mapped) -> None:
        own = (mapped.values(measure), mapped.ids()) if mapped.spans else None
        found: list[Any] | None = [None] * self.num_workers if self.worker_id == 0 else None
        first = comm.get_global_rank(self.comm_group, 0) if self.comm_group is not None else 0
        comm.gather_object(own, found, dst=first, group=self.comm_group)
        if found is None:
            return
        values, ids = zip(*(part for part in found if part is not None), strict=True)
        self._write(measure, values, ids if ids[0] is not None else (), by_id=True)
