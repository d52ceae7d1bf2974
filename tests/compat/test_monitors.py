"""`deepspeed.monitor`: the names, arguments and members that programs use."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from engine.toys import config_of, model_of, train
from ranks import RankPools

from hadal.comm import get_rank
from hadal.compat.engine import initialize
from hadal.compat.install import alias
from hadal.errors import ConfigError, UsageError

ds = {name: alias(f"deepspeed.monitor.{name}") for name in ("monitor", "config", "utils")}
tensorboard, csv_monitor = (
    alias("deepspeed.monitor.tensorboard"),
    alias("deepspeed.monitor.csv_monitor"),
)
wandb, comet = alias("deepspeed.monitor.wandb"), alias("deepspeed.monitor.comet")


def files(folder: str | Path) -> dict[str, Any]:
    return {"enabled": True, "output_path": str(folder), "job_name": "job"}


def test_the_configuration_of_monitors() -> None:
    off = ds["config"].get_monitor_config({"train_batch_size": 8, "fp16": {"enabled": True}})
    assert not off.enabled and not off.wandb.enabled and off.comet.samples_log_interval == 100
    told = ds["config"].get_monitor_config({"csv_monitor": {"enabled": True, "output_path": None}})
    assert told.enabled and told.csv_monitor.output_path == ""
    with pytest.raises(ConfigError, match=r"wandb\.grup"):
        ds["config"].get_monitor_config({"wandb": {"grup": "x"}})
    assert ds["config"].CSVConfig(job_name="x").job_name == "x"


def test_a_master_that_is_off_writes_nothing(tmp_path: Path) -> None:
    master = ds["monitor"].MonitorMaster(ds["config"].get_monitor_config({}))
    assert not master.enabled and master.tb_monitor is master.comet_monitor is None
    master.write_events([("a", 1, 1)])


def follow(folder: str) -> None:
    config = config_of(1, csv_monitor=files(folder), tensorboard=files(folder))
    engine, _, _, _ = initialize(model=model_of(), config=config)
    master = engine.monitor
    assert isinstance(master, ds["monitor"].MonitorMaster) and master.enabled
    assert engine._config.monitor_config.enabled
    train(engine, range(1))
    if master.enabled:
        master.write_events([("Mine/x", 0.5, engine.global_samples)])
    assert master.wandb_monitor is master.comet_monitor is None
    if get_rank() == 0:
        assert isinstance(master.tb_monitor, tensorboard.TensorBoardMonitor)
        assert isinstance(master.csv_monitor, csv_monitor.csvMonitor)
        assert master.csv_monitor.log_dir == master.csv_monitor.setup_log_dir() == f"{folder}/job"
        assert master.csv_monitor.output_path == folder
        assert f"{folder}/job/Mine_x.csv" in master.csv_monitor.filenames
        master.csv_monitor.write_events([("Mine/x", 0.75, 8)])
        master.tb_monitor.summary_writer.add_scalar("Mine/y", 1.0, 8)
        master.tb_monitor.flush()
    else:
        assert master.tb_monitor is master.csv_monitor is None
    engine.destroy()


def test_the_engine_has_a_master(ranks: RankPools, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    ranks(2).run(follow, str(tmp_path))
    text = (tmp_path / "job/Mine_x.csv").read_bytes()
    assert text == b"step,x\r\n6,0.5\r\n8,0.75\r\n"
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (path,) = (tmp_path / "job").glob("events.out.tfevents.*")
    tags = EventAccumulator(str(path)).Reload().Tags()["scalars"]
    assert {"Train/Samples/lr", "Mine/x", "Mine/y"} <= set(tags)


def test_monitors_alone(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    one = csv_monitor.csvMonitor(ds["config"].CSVConfig(**files(tmp_path)))
    assert isinstance(one, ds["monitor"].Monitor) and one.enabled and one.filenames == []
    one.write_events([("a b/c", 1.5, 3)])
    assert Path(one.filenames[0]).read_bytes() == b"step,c\r\n3,1.5\r\n"
    with pytest.raises(UsageError):
        one.write_events([("a", 1)])
    board = tensorboard.TensorBoardMonitor(ds["config"].TensorBoardConfig(**files(tmp_path)))
    assert board.get_summary_writer() is board.summary_writer
    board.write_events([("a", 1.5, 3)], flush=False)
    board.summary_writer.close()
    off = csv_monitor.csvMonitor(ds["config"].CSVConfig())
    assert (off.enabled, off.log_dir, off.filenames) == (False, None, [])
    assert (off.output_path, off.job_name) == ("", "DeepSpeedJobName")
    off.write_events([("a", 1, 1)])
    master = ds["monitor"].MonitorMaster(
        ds["config"].get_monitor_config({"csv_monitor": files(tmp_path)})
    )
    master.write_events([("a b/c", 2, 4)])
    assert Path(one.filenames[0]).read_bytes() == b"step,c\r\n3,1.5\r\n4,2\r\n"


class Service(ModuleType):
    """Stands for wandb and comet_ml: keeps what is called."""

    run = None

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.calls: list[Any] = []
        self.errors = self

    AuthenticationError = CommError = KeyError

    def init(self, **wishes: Any) -> Service:
        return self

    def start(self, **wishes: Any) -> Service:
        return self

    def log(self, data: dict[str, Any], step: int, commit: bool | None) -> None:
        self.calls.append((data, step, commit))

    def log_metrics(self, data: dict[str, Any], step: int) -> None:
        self.calls.append((data, step))


def test_services(monkeypatch: pytest.MonkeyPatch) -> None:
    runs, experiments = Service("wandb"), Service("comet_ml")
    monkeypatch.setitem(sys.modules, "wandb", runs)
    monkeypatch.setitem(sys.modules, "comet_ml", experiments)
    one = wandb.WandbMonitor(ds["config"].WandbConfig(enabled=True))
    one.log({"a": 1}, step=3, commit=False)
    one.write_events([("b", 2, 4)])
    assert runs.calls == [({"a": 1}, 3, False), ({"b": 2}, 4, None)]
    section = ds["config"].CometConfig(enabled=True, samples_log_interval=10)
    other = comet.CometMonitor(section)
    assert other.experiment is experiments and other.samples_log_interval == 10
    other.write_events([("a", 1, 1), ("a", 2, 10), ("a", 3, 11)])
    assert experiments.calls == [({"a": 1}, 1), ({"a": 3}, 11)]
    assert comet.EventsLogScheduler(5).needs_logging("a", 0)
    off = wandb.WandbMonitor(ds["config"].WandbConfig())
    off.log({"a": 1})
    assert (off.group, off.team, off.project) == (None, None, "deepspeed")
    silent = comet.CometMonitor(ds["config"].CometConfig())
    assert (silent.experiment, silent.samples_log_interval) == (None, 100)


def test_packages_are_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, check in (
        ("tensorboard", ds["utils"].check_tb_availability),
        ("wandb", ds["utils"].check_wandb_availability),
        ("comet_ml", ds["utils"].check_comet_availability),
    ):
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(ImportError, match=f"pip install {name}"):
            check()
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
        check()


class Own(ds["monitor"].Monitor):  # type: ignore[misc,name-defined]
    """A program's own."""

    def __init__(self, monitor_config: Any) -> None:
        super().__init__(monitor_config)

    def write_events(self, event_list: Any) -> None:
        self.events = list(event_list)


def test_programs_derive_their_own() -> None:
    own = Own({"a": 1})
    own.write_events([("a", 1, 1)])
    assert own.monitor_config == {"a": 1} and own.events == [("a", 1, 1)]
    with pytest.raises(TypeError):
        ds["monitor"].Monitor({})
