"""Reads the files that wandb and comet_ml write when they are offline."""

from __future__ import annotations

import json
import struct
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_BLOCK, _HEADER, _MAGIC = 32768, 7, b":W&B"
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


def _records(path: Path) -> Iterator[bytes]:
    """The records of a log in LevelDB's format, behind wandb's own seven bytes."""
    data = path.read_bytes()
    assert data[:4] == _MAGIC
    at, held = _HEADER, b""
    while at + _HEADER <= len(data):
        if _BLOCK - at % _BLOCK < _HEADER:
            at += _BLOCK - at % _BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        found = data[at + _HEADER : at + _HEADER + length]
        at += _HEADER + length
        held = found if kind in (_FULL, _FIRST) else held + found
        if kind in (_FULL, _LAST):
            yield held


class WandbRun:
    """An offline run."""

    def __init__(self, folder: Path) -> None:
        from wandb.proto import wandb_internal_pb2

        (path,) = folder.glob("wandb/offline-run-*/run-*.wandb")
        self.project = self.group = self.team = ""
        self.config: dict[str, Any] = {}
        self.history: list[dict[str, Any]] = []
        for data in _records(path):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.HasField("run"):
                run = record.run
                self.project, self.group, self.team = run.project, run.run_group, run.entity
                self._configure(run.config.update)
            elif record.HasField("config"):
                self._configure(record.config.update)
            elif record.HasField("history"):
                items = record.history.item
                named = {item.key or "/".join(item.nested_key): item.value_json for item in items}
                self.history.append({name: json.loads(text) for name, text in named.items()})

    def _configure(self, updates: Any) -> None:
        for item in updates:
            self.config[item.key or "/".join(item.nested_key)] = json.loads(item.value_json)


class CometExperiment:
    """An offline experiment: (name, value, step) of each metric, and everything else as text."""

    def __init__(self, folder: Path) -> None:
        (path,) = folder.glob("*.zip")
        self.metrics: list[tuple[str, float, int]] = []
        with zipfile.ZipFile(path) as archive:
            self.text = archive.read("messages.json").decode()
            self.about = json.loads(archive.read("experiment.json"))
            self.assets = [
                archive.read(name).decode(errors="replace")
                for name in archive.namelist()
                if name not in ("messages.json", "experiment.json")
            ]
        for line in self.text.splitlines():
            message = json.loads(line)
            if message["type"] == "metric_msg":
                metric = message["payload"]["metric"]
                value = float(metric["metricValue"])
                self.metrics.append((metric["metricName"], value, metric["step"]))
