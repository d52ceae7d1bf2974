"""Curriculum over samples: DeepSpeed's streams, resuming, several ranks, files and faults."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine.toys import engine_of
from ranks import RankPools
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

import hadal
from hadal import comm
from hadal.compat.efficiency import DeepSpeedDataSampler
from hadal.config import load_config
from hadal.config.data_efficiency import DataEfficiency
from hadal.data.reading import Sharding
from hadal.errors import ConfigError, UsageError
from hadal.plugins.data_efficiency.analysis import analyze
from hadal.plugins.data_efficiency.indexed import IndexedRows, RowsBuilder
from hadal.plugins.data_efficiency.metric_files import Origin, read_rows, write_row
from hadal.plugins.data_efficiency.ordered import CurriculumOrder, set_custom_schedules

COUNT = 120
MEASURES = {
    "ma": np.array([(7 * i + 3) % 20 + 1 for i in range(COUNT)]),
    "mb": np.array([i // 4 % 10 + 1 for i in range(COUNT)]),
}
FALLING = {
    "schedule_type": "fixed_discrete",
    "schedule_config": {"difficulty": [9, 2, 3], "max_step": [2, 4]},
}
STREAMS = json.loads((Path(__file__).parents[1] / "data/curriculum_streams.json").read_text())
KEYS = "data_efficiency.data_sampling.curriculum_learning"
METRIC = "data_efficiency.data_sampling.curriculum_learning.curriculum_metrics.<metric>"


def write_rows(path: Path, rows: list[np.ndarray], code: int, kind: type) -> None:
    """Write a file as DeepSpeed's analyser does."""
    sizes = np.array([len(row) for row in rows], np.int32)
    offsets = np.concatenate([[0], np.cumsum(sizes[:-1], dtype=np.int64)]) * kind().itemsize
    head = b"MMIDIDX\0\0" + np.uint64(1).tobytes() + np.uint8(code).tobytes()
    marks = np.array([0, len(rows)], np.int64)
    counts = np.array([len(rows), len(marks)], np.uint64)
    parts = [head, counts.tobytes(), sizes.tobytes(), offsets.astype(np.int64).tobytes()]
    path.with_suffix(".idx").write_bytes(b"".join(parts) + marks.tobytes())
    path.with_suffix(".bin").write_bytes(np.concatenate(rows).astype(kind).tobytes())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_measures(tmp_path)
    return tmp_path


def write_measures(folder: Path) -> None:
    for name, values in MEASURES.items():
        found = np.unique(values)
        samples = [np.flatnonzero(values == value) for value in found]
        write_rows(folder / f"{name}_index_to_sample", samples, 1, np.uint8)
        write_rows(folder / f"{name}_index_to_metric", list(found[:, None]), 7, np.uint32)


def metrics_of(folder: Path, case: str) -> dict[str, Any]:
    found = {}
    for name, metric in STREAMS[case]["metrics"].items():
        told = {key: value for key, value in metric.items() if key != "measure"}
        for kind in ("sample", "metric"):
            told[f"index_to_{kind}_path"] = str(folder / f"{metric['measure']}_index_to_{kind}")
        found[name] = told
    return found


def section_of(folder: Path, case: str, **changes: Any) -> dict[str, Any]:
    curriculum = {"enabled": True, "curriculum_metrics": metrics_of(folder, case)}
    curriculum |= changes.pop("curriculum", {})
    sampling = {"enabled": True, "curriculum_learning": curriculum, **changes}
    return {"enabled": True, "seed": STREAMS[case]["seed"], "data_sampling": sampling}


def order_of(
    folder: Path, case: str, replicas: int = 1, replica: int = 0, **changes: Any
) -> CurriculumOrder:
    source = {"train_batch_size": 4, "data_efficiency": section_of(folder, case, **changes)}
    section: DataEfficiency = load_config(source).data_efficiency
    micro, accumulation = (2, 2) if replicas == 1 else (1, 4 // replicas)
    return CurriculumOrder(section, Origin(COUNT), Sharding(micro, replicas, replica), accumulation)


def first(order: CurriculumOrder, count: int, done: int = 0) -> list[Any]:
    found, batches = [], order.batches(0, done)
    for _ in range(count):
        found.append(next(batches))
    return found


@pytest.mark.parametrize("case", STREAMS)
@pytest.mark.claims(
    METRIC,
    *(f"{METRIC}.{name}_difficulty" for name in ("min", "max")),
    f"{METRIC}.difficulty_type",
    f"{METRIC}.clustering_type",
    f"{METRIC}.index_to_sample_path",
    f"{METRIC}.index_to_metric_path",
    f"{METRIC}.schedule_type",
    f"{METRIC}.schedule_config",
    f"{KEYS}.curriculum_metrics",
    f"{KEYS}.data_cluster_path",
    "data_efficiency.seed",
)
def test_streams_are_those_of_deepspeed(folder: Path, case: str) -> None:
    written = folder / "clusters"
    order = order_of(folder, case, curriculum={"data_cluster_path": str(written)})
    expected = STREAMS[case]
    found = first(order, len(expected["batches"]))
    assert [picked.indices for picked in found] == expected["batches"]
    told = [picked.state["current_difficulties"] for picked in found]
    assert told == expected["difficulties"]
    for name, row in expected["clusters"].items():
        assert read_rows(str(written / name), "x").numbers.tolist() == row
    assert len(order) == 60


@pytest.mark.parametrize("case", STREAMS)
def test_a_program_s_own_sampler_draws_these_streams(folder: Path, case: str) -> None:
    expected = STREAMS[case]["batches"]

    def sampler() -> Any:
        section = section_of(folder, case)
        return DeepSpeedDataSampler(section, COUNT, 2, 0, 1, None, 2, global_rank=0)

    made = sampler()
    batches = iter(made)
    assert [next(batches) for _ in range(3)] == expected[:3]
    assert made.consumed_samples == 6
    resumed = sampler()
    resumed.load_state_dict(made.state_dict())
    batches = iter(resumed)
    assert [next(batches) for _ in expected[3:]] == expected[3:]
    section = load_config({"train_batch_size": 4, "data_efficiency": section_of(folder, case)})
    assert len(resumed) == COUNT * section.data_efficiency.data_sampling.num_epochs


@pytest.mark.parametrize(
    ("kind", "pace", "expected"),
    [
        ("fixed_linear", {"total_curriculum_step": 4, "difficulty_step": 5}, [5, 10, 15, 20, 20]),
        (
            "fixed_root",
            {"total_curriculum_step": 4, "difficulty_step": 2, "root_degree": 2},
            [10, 14, 16, 20, 20],
        ),
        ("fixed_discrete", {"difficulty": [3, 7, 20, 9], "max_step": [1, 3, 4]}, [3, 7, 7, 20, 20]),
    ],
)
@pytest.mark.claims(
    f"{METRIC}.schedule_config.total_curriculum_step",
    f"{METRIC}.schedule_config.difficulty_step",
    f"{METRIC}.schedule_config.root_degree",
    f"{METRIC}.schedule_config.difficulty",
    f"{METRIC}.schedule_config.max_step",
)
def test_each_schedule_admits_by_its_own_keys(
    folder: Path, kind: str, pace: dict[str, Any], expected: list[int]
) -> None:
    metrics = metrics_of(folder, "value")
    metrics["ma"] |= {"schedule_type": kind, "schedule_config": pace}
    metrics["ma"] |= {"min_difficulty": 1, "max_difficulty": 20}
    order = order_of(folder, "value", curriculum={"curriculum_metrics": metrics})
    told = [(each.indices, each.state["current_difficulties"]["ma"]) for each in first(order, 10)]
    assert [difficulty for _, difficulty in told[::2]] == expected
    for indices, difficulty in told:
        assert MEASURES["ma"][indices].max() <= difficulty


@pytest.mark.parametrize("case", ["value", "two_metrics", "single_cluster"])
@pytest.mark.parametrize("after", [1, 2, 7])
def test_a_stream_resumes_on_any_number_of_ranks(folder: Path, case: str, after: int) -> None:
    batches = STREAMS[case]["batches"]
    state = json.loads(json.dumps(first(order_of(folder, case), after)[-1].state))
    rest = [sample for batch in batches[after:] for sample in batch]
    for replicas in (1, 2, 4):
        orders = [order_of(folder, case, replicas, replica) for replica in range(replicas)]
        for order in orders:
            order.load_state_dict(state)
        mine = [first(order, 4, 2 * after) for order in orders]
        stream = [
            sample
            for turn in zip(*mine, strict=True)
            for picked in turn
            for sample in picked.indices
        ]
        assert stream[: len(rest)] == rest[: len(stream)]


def test_batches_that_were_only_read_ahead_are_repeated(folder: Path) -> None:
    order = order_of(folder, "value")
    states = first(order, 9)
    order.load_state_dict(states[3].state)
    assert [picked.indices for picked in first(order, 5, 8)] == STREAMS["value"]["batches"][4:9]


@pytest.mark.claims("data_efficiency.data_sampling.num_epochs")
def test_an_epoch_has_as_many_samples_as_the_data_set(folder: Path) -> None:
    order = order_of(folder, "value", num_epochs=2)
    for epoch, batches in ((0, 60), (1, 60), (2, 0)):
        found = list(order.batches(epoch, 0))
        assert len(found) == batches
        assert not found or order.load_state_dict(found[-1].state) is None


def test_a_cluster_smaller_than_its_share_is_used_again_and_again(tmp_path: Path) -> None:
    write_rows(tmp_path / "s", [np.array([2, 0, 1])], 1, np.uint8)
    write_rows(tmp_path / "m", [np.array([4])], 1, np.uint8)
    metric = {
        **STREAMS["value"]["metrics"]["ma"],
        "index_to_sample_path": str(tmp_path / "s"),
        "index_to_metric_path": str(tmp_path / "m"),
    }
    metric.pop("measure")
    curriculum = {"enabled": True, "curriculum_metrics": {"x": metric}}
    keys = {"data_sampling": {"curriculum_learning": curriculum}}
    section = load_config({"train_batch_size": 8, "data_efficiency": keys}).data_efficiency
    order = CurriculumOrder(section, Origin(3), Sharding(8), 1)
    (picked,) = order.batches(0, 0)
    assert sorted(set(picked.indices)) == [0, 1, 2]
    assert len(picked.indices) == 8


# ---- in training ---------------------------------------------------------------------------------


class Numbers(Dataset[Tensor]):
    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([float(index)])


def engine_with(folder: Path, case: str = "value", data: Any = None, **changes: Any) -> Any:
    sizes = {"train_micro_batch_size_per_gpu": 2 // comm.get_world_size()}
    sizes["gradient_accumulation_steps"] = 2
    section = section_of(folder, case, **changes.pop("sampling", {}))
    wishes = {"training_data": Numbers() if data is None else data}
    return engine_of(0, nn.Linear(1, 1), wishes, data_efficiency=section, **sizes, **changes)


def read(engine: Any, count: int) -> list[list[int]]:
    found, loader = [], hadal.RepeatingLoader(engine.training_dataloader)
    for _ in range(count):
        batch = next(loader)
        engine.backward(engine(batch).square().mean())
        engine.step()
        found.append(batch.flatten().int().tolist())
    return found


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.claims(
    f"{KEYS}",
    f"{KEYS}.enabled",
    "data_efficiency.data_sampling",
    "data_efficiency.data_sampling.enabled",
    "data_efficiency.data_sampling.num_workers",
    "data_efficiency.data_sampling.pin_memory",
)
def test_training_follows_the_stream_and_resumes(folder: Path, workers: int) -> None:
    sampling = {"num_workers": workers, "pin_memory": True}
    expected = STREAMS["value"]
    engine = engine_with(folder, sampling=sampling)
    assert engine.training_dataloader.num_workers == workers
    told: list[Any] = []
    engine.training_dataloader.set_post_process(
        lambda batch, state: told.append(state["current_difficulties"]) or batch
    )
    assert read(engine, 6) == expected["batches"][:6]
    assert told == expected["difficulties"][:6]
    engine.save_checkpoint(folder / "saved")
    engine.destroy()
    engine = engine_with(folder, sampling=sampling)
    engine.load_checkpoint(folder / "saved")
    assert read(engine, 6) == expected["batches"][6:12]
    engine.destroy()


def test_ranks_share_the_stream(ranks: RankPools, tmp_path: Path) -> None:
    write_measures(tmp_path)
    mine, theirs = ranks(2).run(read_on_ranks, tmp_path)
    both = [first + second for first, second in zip(mine, theirs, strict=True)]
    assert both == STREAMS["value"]["batches"][:8]


def read_on_ranks(folder: Path) -> list[list[int]]:
    engine = engine_with(folder)
    found = read(engine, 8)
    engine.destroy()
    return found


def test_a_custom_schedule_of_a_metric(folder: Path) -> None:
    metrics = metrics_of(folder, "value")
    metrics["ma"]["schedule_type"] = "custom"
    engine = engine_with(folder, sampling={"curriculum": {"curriculum_metrics": metrics}})
    set_custom_schedules(engine, {"ma": lambda step: (3 * step + 5) // 5 * 5})
    assert read(engine, 6) == STREAMS["value"]["batches"][:6]
    engine.destroy()


# ---- faults --------------------------------------------------------------------------------------


def test_files_of_another_data_set_are_refused(folder: Path) -> None:
    class Short(Numbers):
        def __len__(self) -> int:
            return 100

    path = r"curriculum_metrics\.ma\.index_to_sample_path"
    with pytest.raises(UsageError, match=rf"{path}: .* has 120 samples.* the data set has 100"):
        engine_with(folder, data=Short())
    (folder / "ma_index_to_sample.bin").write_bytes(b"123")
    with pytest.raises(UsageError, match=rf"{path}: .*has 3 bytes, but .* describes 120"):
        engine_with(folder)
    (folder / "ma_index_to_sample.bin").unlink()
    with pytest.raises(UsageError, match=rf"{path}: .*ma_index_to_sample\.bin does not exist"):
        engine_with(folder)


def test_files_of_a_data_set_with_as_many_samples_are_refused(tmp_path: Path) -> None:
    for name, shift in (("one", 0), ("other", 1)):
        with RowsBuilder(tmp_path / name, np.uint16) as builder:
            builder.add_all([[number + shift] * (1 + number % 3) for number in range(COUNT)])
    analyze(tmp_path / "one", tmp_path / "a", ["length"])
    paths = {
        f"index_to_{kind}_path": str(tmp_path / f"a/length/length_index_to_{kind}")
        for kind in ("sample", "metric")
    }
    metric = {**STREAMS["value"]["metrics"]["ma"], **paths, "min_difficulty": 1}
    metric.pop("measure")
    changes = {"curriculum": {"curriculum_metrics": {"length": metric}}}
    engine_with(tmp_path, data=IndexedRows(tmp_path / "one"), sampling=changes).destroy()
    expected = (
        r"metrics\.length\.index_to_sample_path: .* belongs to another data set \(120 samples of"
    )
    with pytest.raises(UsageError, match=expected + r" uint16.*length_origin\.json\)"):
        engine_with(tmp_path, data=IndexedRows(tmp_path / "other"), sampling=changes)
    (tmp_path / "a/length/length_origin.json").write_text("{")
    with pytest.raises(UsageError, match=r"index_to_sample_path: .*origin\.json is damaged"):
        engine_with(tmp_path, data=IndexedRows(tmp_path / "one"), sampling=changes)


def test_an_analysis_of_many_samples_is_not_ambiguous(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_rows(tmp_path / "s", [np.array([70000, 1])], 7, np.uint32)
    assert read_rows(str(tmp_path / "s"), "x").dtype == np.uint32
    assert not caplog.text


@pytest.mark.parametrize("kind", ["sample_to_metric", "index_to_metric"])
def test_numbers_that_are_not_samples_are_refused(folder: Path, kind: str) -> None:
    values = MEASURES["ma"] if kind == "sample_to_metric" else np.arange(COUNT) // 2
    write_row(folder / f"ma_{kind}", values)
    metrics = metrics_of(folder, "value")
    metrics["ma"]["index_to_sample_path"] = str(folder / f"ma_{kind}")
    expected = rf"metrics\.ma\.index_to_sample_path: .*ma_{kind} does not have each of the 120 sam"
    with pytest.raises(UsageError, match=expected + r".* give .*_index_to_sample or "):
        engine_with(folder, sampling={"curriculum": {"curriculum_metrics": metrics}})


@pytest.mark.parametrize("ending", [".bin", ".idx"])
def test_a_suffix_in_a_path_is_reported(folder: Path, ending: str) -> None:
    metrics = metrics_of(folder, "value")
    metrics["ma"]["index_to_sample_path"] += ending
    expected = (
        rf"metrics\.ma\.index_to_sample_path: .*\{ending}\.idx does not exist.* leave {ending}"
    )
    with pytest.raises(UsageError, match=expected):
        engine_with(folder, sampling={"curriculum": {"curriculum_metrics": metrics}})
    metrics["ma"]["index_to_sample_path"] = str(folder / "none")
    with pytest.raises(UsageError, match=r"none\.idx does not exist.* `hadal data analyze` writes"):
        engine_with(folder, sampling={"curriculum": {"curriculum_metrics": metrics}})


def test_a_cluster_path_that_cannot_be_written_is_reported(folder: Path) -> None:
    (folder / "file").write_text("")
    order = order_of(folder, "value", curriculum={"data_cluster_path": str(folder / "file")})
    with pytest.raises(
        UsageError, match=rf"{KEYS}\.data_cluster_path: .*file/cluster_ma.* cannot be"
    ):
        first(order, 1)


def test_a_falling_difficulty_is_refused(folder: Path) -> None:
    metrics = metrics_of(folder, "value")
    metrics["ma"] |= {"schedule_type": "custom", "max_difficulty": 20}
    engine = engine_with(folder, sampling={"curriculum": {"curriculum_metrics": metrics}})
    set_custom_schedules(engine, {"ma": lambda step: [8, 9, 5][step - 1]})
    batches = iter(engine.training_dataloader)
    with pytest.raises(UsageError, match=r"metrics\.ma: .* falls from 9 to 5 in step 3"):
        for _ in range(12):
            next(batches)
    engine.destroy()


def test_values_need_a_row_each(folder: Path) -> None:
    metrics = metrics_of(folder, "value")
    metrics["ma"]["index_to_metric_path"] = str(folder / "mb_index_to_metric")
    with pytest.raises(UsageError, match=r"index_to_metric_path: .* has 10 values, .* 20 rows"):
        engine_with(folder, sampling={"curriculum": {"curriculum_metrics": metrics}})


def test_no_admitted_sample_is_reported(folder: Path) -> None:
    metrics = metrics_of(folder, "value")
    metrics["ma"] |= {"min_difficulty": 0, "max_difficulty": 1}
    metrics["ma"]["schedule_config"] = {"total_curriculum_step": 10, "difficulty_step": 1}
    engine = engine_with(folder, sampling={"curriculum": {"curriculum_metrics": metrics}})
    with pytest.raises(UsageError, match=r"no sample of 120 is admitted .* step 1 \(ma 0\); raise"):
        next(iter(engine.training_dataloader))
    engine.destroy()


def test_a_stream_has_no_indices(folder: Path) -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Any:
            return iter(range(4))

    with pytest.raises(UsageError, match=r"Stream has none. Give a data set with a length"):
        engine_with(folder, data=Stream())


def test_batches_are_changed_without_a_curriculum_too() -> None:
    engine = engine_of(0, nn.Linear(1, 1), {"training_data": Numbers()})
    engine.training_dataloader.set_post_process(lambda batch, state: (batch * 0, dict(state)))
    assert next(iter(engine.training_dataloader))[0].sum() == 0
    engine.training_dataloader.set_post_process(lambda batch, state: None)
    with pytest.raises(UsageError, match=r"given to set_post_process returned None, not a batch"):
        next(iter(engine.training_dataloader))
    with pytest.raises(UsageError, match=r"expected a function of the batch .*, got Tensor"):
        engine.training_dataloader.set_post_process(torch.zeros(2))
    engine.destroy()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("difficulty_type", None),
        ("difficulty_type", "median"),
        ("clustering_type", None),
        ("clustering_type", "many"),
        ("index_to_sample_path", None),
        ("index_to_metric_path", None),
        ("min_difficulty", None),
        ("schedule_type", None),
        ("schedule_config.difficulty_step", 1000),
        ("max_difficulty", 0),
    ],
)
def test_faults_are_reported_by_path(folder: Path, name: str, value: Any) -> None:
    section = section_of(folder, "value")
    metric = section["data_sampling"]["curriculum_learning"]["curriculum_metrics"]["ma"]
    if name == "max_difficulty":
        metric |= {"difficulty_type": "percentile", "min_difficulty": 0}
    *outer, last = name.split(".")
    (metric[outer[0]] if outer else metric)[last] = value
    with pytest.raises(ConfigError) as caught:
        load_config({"train_batch_size": 1, "data_efficiency": section})
    assert f"{KEYS}.curriculum_metrics.ma.{name}" in {fault.path for fault in caught.value.faults}


def test_a_curriculum_needs_metrics_and_levels_that_rise(folder: Path) -> None:
    for changes, path, message in (
        ({"curriculum_metrics": {}}, f"{KEYS}.curriculum_metrics", "set at least one metric"),
        (
            {"curriculum_metrics": {"ma": {**metrics_of(folder, "value")["ma"], **FALLING}}},
            f"{KEYS}.curriculum_metrics.ma.schedule_config.difficulty",
            "expected levels that do not fall, got [9, 2, 3]",
        ),
    ):
        with pytest.raises(ConfigError) as caught:
            order_of(folder, "value", curriculum=changes)
        told = {fault.path: fault.message for fault in caught.value.faults}
        assert message in told[path]
    section = {**section_of(folder, "value"), "seed": -1}
    with pytest.raises(ConfigError, match=r"data_efficiency\.seed .* >= 0, got -1"):
        load_config({"train_batch_size": 1, "data_efficiency": section})


@pytest.mark.parametrize("values", [[3, 1, 2], [70000, 1], [256]])
def test_a_row_is_read_unchanged(tmp_path: Path, values: list[int]) -> None:
    write_row(tmp_path / "deep" / "row", np.array(values))
    rows = read_rows(str(tmp_path / "deep" / "row"), "x")
    assert rows.numbers.tolist() == values
    assert (rows.start(0), rows.start(1)) == (0, len(values))
    assert sorted(path.name for path in (tmp_path / "deep").iterdir()) == ["row.bin", "row.idx"]
