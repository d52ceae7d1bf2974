"""`hadal.engine.clusters`: named clusters, and files that describe one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hadal.engine.clusters import NAMES, cluster_named, read_cluster
from hadal.errors import ConfigError


@pytest.mark.parametrize("name", NAMES)
def test_each_named_cluster_says_where_its_figures_come_from(name: str) -> None:
    cluster = cluster_named(name)
    assert cluster.name == name and cluster.links_of("fp32", 1).all_gather.bandwidth > 0
    unnamed = {"name", "devices_per_node", "computes_on_host", "sources"}
    assert set(cluster.sources) == set(json.loads(cluster.written())) - unnamed
    assert all(source.startswith("assumed") for source in cluster.sources.values())
    speeds = cluster.speeds["fp32"]
    assert speeds.matrices.flops == pytest.approx(0.6 * speeds.peak_flops)


def test_any_number_of_devices_may_be_in_a_node() -> None:
    eight, four = cluster_named("h100x8"), cluster_named("h100x4")
    assert four.devices_per_node == 4 and four.speeds == eight.speeds
    # Fewer devices share a node's network.
    few, many = (one.links_of("fp32", 1).all_gather.bandwidth for one in (four, eight))
    assert few == 2 * many
    assert four.with_ranks(2) == four  # a device has its own cores


@pytest.mark.parametrize("name", ["h20x8", "H200", "h200x0", "h200"])
def test_an_unknown_cluster_lists_the_known_ones(name: str) -> None:
    with pytest.raises(ConfigError, match=r"known are b200x8, h200x8.*mi300xx8.*bench cluster"):
        cluster_named(name)
    with pytest.raises(ConfigError, match="did you mean h200x8"):
        cluster_named("h20x8")


def test_dtypes_without_a_figure_run_as_float32() -> None:
    old = cluster_named("v100x8")
    assert old.speeds_of("bf16") == old.speeds["fp32"] != old.speeds_of("fp16")


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    file = tmp_path / "cluster.json"
    file.write_text(cluster_named("a100-40gx8").written())
    assert read_cluster(file) == cluster_named("a100-40gx8")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lunch": 1.0}, r"lunch is unknown"),
        ({"update_start": None}, r"update_start is missing"),
        ({"update_start": 0}, r"update_start is 0"),
        ({"update_start": "fast"}, r"update_start is 'fast'"),
        ({"devices_per_node": True}, r"devices_per_node is True"),
        ({"devices_per_node": 2.5}, r"devices_per_node is 2.5"),
        ({"speeds": {}}, r"speeds.fp32 is missing"),
        ({"speeds": {"fp32": {"launch": -1.0}}}, r"speeds.fp32.matrices is missing"),
        ({"inside": {"fp32": {"all_gather": {}}}}, r"inside.fp32.reduce_scatter is missing"),
        ({"sources": []}, r"sources is \[\]"),
    ],
)
def test_a_fault_of_a_file_is_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    file = tmp_path / "cluster.json"
    raw = json.loads(cluster_named("h100x8").written()) | change
    file.write_text(json.dumps({key: value for key, value in raw.items() if value is not None}))
    with pytest.raises(ConfigError, match=message):
        read_cluster(file)


def test_a_file_of_another_version_is_refused_with_the_remedy(tmp_path: Path) -> None:
    file = tmp_path / "cluster.json"
    raw = json.loads(cluster_named("h100x8").written())
    for speeds in raw["speeds"].values():
        speeds["products"] = speeds.pop("matrices")["flops"]
    file.write_text(json.dumps(raw))
    with pytest.raises(ConfigError, match=r"bf16.matrices is missing.* and 2 more; .*--output"):
        read_cluster(file)


def test_a_file_that_is_no_cluster_is_refused(tmp_path: Path) -> None:
    for text in ("{", "[]", "{}"):
        (tmp_path / "cluster.json").write_text(text)
        with pytest.raises(ConfigError, match=r"cluster\.json"):
            read_cluster(tmp_path / "cluster.json")
    with pytest.raises(ConfigError, match="bench cluster --output"):
        read_cluster(tmp_path / "other.json")
