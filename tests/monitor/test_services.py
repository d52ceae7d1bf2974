"""Every writer with its real package, offline; calls to services; missing packages."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from engine.logs import logged
from engine.toys import engine_of, train
from ranks import RankPools

from hadal.config.monitors import Comet, Wandb
from hadal.errors import ConfigError, HadalError, MissingPackageError, MonitorError
from hadal.plugins.monitor.files import read_lines
from hadal.plugins.monitor.opening import CometWriter, ThinnedEvents, WandbWriter, open_writers
from hadal.plugins.monitor.record import ScalarRecord
from monitor.services import CometExperiment, WandbRun

HERE = Path(__file__).parent
SECRET = "a1b2c3secret"
ROWS, UPDATES, MICRO_STEPS = 3, 4, 2
SAMPLES = [ROWS * MICRO_STEPS * (1 + number) for number in range(UPDATES)]
ALWAYS = {"lr", "train_loss", "grad_norm", "skipped_steps", "peak_memory_bytes"}


class Ran:
    """The files of a program with every monitor enabled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        done = subprocess.run(
            [sys.executable, str(HERE / "all_writers.py"), str(folder)],
            env={**os.environ, "API_KEY": SECRET},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr[-8000:]
        self.told = done.stdout + done.stderr
        losses = json.loads(done.stdout.splitlines()[-1])["losses"]
        pairs = zip(losses[::2], losses[1::2], strict=True)
        self.losses = [(one + other) / 2 for one, other in pairs]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    for name in ("tensorboard", "wandb", "comet_ml"):
        pytest.importorskip(name)
    return Ran(tmp_path_factory.mktemp("ran"))


@pytest.mark.slow
@pytest.mark.claims(
    "tensorboard", "tensorboard.enabled", "tensorboard.output_path", "tensorboard.job_name"
)
def test_tensorboard_reads_its_file(ran: Ran) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (path,) = (ran.folder / "job").glob("events.out.tfevents.*")
    found = EventAccumulator(str(path)).Reload()
    scalars = {tag: found.Scalars(tag) for tag in found.Tags()["scalars"]}
    assert scalars.keys() == {
        "Mine/score",
        "Train/Samples/samples_per_sec",
        *(f"Train/Samples/{name}" for name in ALWAYS),
    }
    losses = scalars["Train/Samples/train_loss"]
    assert [one.step for one in losses] == SAMPLES
    assert [one.value for one in losses] == pytest.approx(ran.losses, rel=1e-6)
    rates = [one.value for one in scalars["Train/Samples/lr"]]
    assert rates == pytest.approx([0.0, 0.001, 0.002, 0.003])
    assert [(one.step, one.value) for one in scalars["Mine/score"]] == [(SAMPLES[-1], 0.25)]
    assert found.Tags()["tensors"] == ["run/text_summary"]
    (text,) = found.Tensors("run/text_summary")
    assert '"gradient_accumulation_steps": 2' in text.tensor_proto.string_val[0].decode()


@pytest.mark.slow
@pytest.mark.claims("wandb", "wandb.enabled", "wandb.project", "wandb.group", "wandb.team")
def test_wandb_has_the_run(ran: Ran) -> None:
    run = WandbRun(ran.folder)
    assert (run.project, run.group, run.team) == ("deep sea", "trenches", "us")
    assert run.config["hadal"]["config"]["gradient_accumulation_steps"] == 2
    assert run.config["hadal"]["world_size"] == 1
    assert [row["_step"] for row in run.history] == SAMPLES
    losses = [row["Train/Samples/train_loss"] for row in run.history]
    assert losses == pytest.approx(ran.losses)
    assert run.history[-1]["Mine/score"] == 0.25


@pytest.mark.claims("comet", "comet.enabled", "comet.samples_log_interval", "comet.online")
@pytest.mark.claims("comet.project", "comet.experiment_name")
def test_comet_has_the_experiment(ran: Ran) -> None:
    found = CometExperiment(ran.folder / "comet")
    assert found.about["project_name"] == "sea" and "first dive" in found.text
    losses = [
        (value, step) for name, value, step in found.metrics if name == "Train/Samples/train_loss"
    ]
    assert [step for _, step in losses] == SAMPLES[::2]  # 12 samples apart
    assert [value for value, _ in losses] == pytest.approx(ran.losses[::2])
    assert ("Mine/score", 0.25, SAMPLES[-1]) in found.metrics
    (run,) = [asset for asset in found.assets if asset.startswith('{"format"')]
    assert json.loads(run)["config"]["gradient_accumulation_steps"] == 2


@pytest.mark.claims("csv_monitor", "csv_monitor.enabled")
def test_files_have_the_same(ran: Ran) -> None:
    text = (ran.folder / "job/Train_Samples_lr.csv").read_bytes()
    assert text == b"step,lr\r\n6,0.0\r\n12,0.001\r\n18,0.002\r\n24,0.003\r\n"
    rows = (ran.folder / "job/Train_Samples_train_loss.csv").read_text().splitlines()[1:]
    assert [int(row.split(",")[0]) for row in rows] == SAMPLES
    assert [float(row.split(",")[1]) for row in rows] == pytest.approx(ran.losses)
    head, *updates, mine, end = read_lines(ran.folder / "job/events.jsonl")
    assert head["kind"] == "run" and end["kind"] == "end"
    assert head["model"] == {
        "class": "Sequential",
        "tensors": 6,
        "parameters": 121,
        "trained": 121,
    }
    assert head["origins"]["gradient_accumulation_steps"] == "you"
    assert [(one["step"], one["samples"]) for one in updates] == [*enumerate(SAMPLES, 1)]
    assert [one["Train/Samples/train_loss"] for one in updates] == pytest.approx(ran.losses)
    assert mine["kind"] == "events" and mine["Mine/score"] == 0.25


@pytest.mark.claims("comet.api_key")
def test_secrets_are_written_nowhere(ran: Ran) -> None:
    own = [path for path in ran.folder.rglob("*") if path.is_file()]
    assert len(own) > 10
    assert [path for path in own if SECRET.encode() in path.read_bytes()] == []
    # The experiment is packed.
    comet = CometExperiment(ran.folder / "comet")
    assert not any(SECRET in text for text in (comet.text, *comet.assets))
    assert SECRET not in ran.told


# ---- what services are asked for ---------------------------------------------------------------


class FakeRun:
    def __init__(self) -> None:
        self.calls: list[Any] = []

    def log(self, data: dict[str, Any], step: int, commit: bool | None) -> None:
        self.calls.append((data, step))

    def finish(self) -> None:
        self.calls.append("finish")


class FakeWandb(ModuleType):
    """wandb, whose `init` raises what is in `faults` first."""

    def __init__(self, *faults: Exception, run: FakeRun | None = None) -> None:
        super().__init__("wandb")
        self.errors = SimpleNamespace(CommError=CommError, AuthenticationError=WrongKey)
        self.run, self.faults, self.wishes = run, list(faults), {}

    def init(self, **wishes: Any) -> FakeRun:
        if self.faults:
            raise self.faults.pop(0)
        self.wishes = wishes
        self.run = self.run or FakeRun()
        return self.run


class CommError(Exception):
    """Replaces wandb's."""


class WrongKey(CommError):
    """Replaces wandb's."""


def wandb_writer(monkeypatch: pytest.MonkeyPatch, fake: FakeWandb) -> WandbWriter:
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return WandbWriter(Wandb(enabled=True, group="g", team="t", project="p"), {"format": 1})


def test_calls_to_wandb(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeWandb()
    writer = wandb_writer(monkeypatch, fake)
    assert fake.wishes == {
        "project": "p",
        "group": "g",
        "entity": "t",
        "config": {"hadal": {"format": 1}},
        "resume": "allow",
    }
    writer.write(ScalarRecord(8, {"a": 1.5}, 0.0))
    writer.flush()
    writer.close()
    assert fake.run is not None and fake.run.calls == [({"a": 1.5}, 8), "finish"]


def test_a_run_of_the_program_s_own_is_left_open(monkeypatch: pytest.MonkeyPatch) -> None:
    own = FakeRun()
    wandb_writer(monkeypatch, FakeWandb(run=own)).close()
    assert own.calls == []


def test_a_run_is_written_to_the_disk_where_the_network_is_dead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake = FakeWandb(CommError("no route to host"))
    with logged() as lines:
        wandb_writer(monkeypatch, fake)
    assert fake.wishes["mode"] == "offline"
    assert len(lines) == 1 and "cannot be reached (no route to host)" in lines[0]


def test_a_wrong_key_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from hadal.config import load_config

    monkeypatch.setitem(sys.modules, "wandb", FakeWandb(WrongKey("invalid key")))
    config = load_config({"train_batch_size": 1, "wandb": {"enabled": True}})
    with pytest.raises(MonitorError, match="wandb cannot be started: WrongKey: invalid key"):
        open_writers(config, {})


class FakeComet(ModuleType):
    def __init__(self) -> None:
        super().__init__("comet_ml")
        self.calls: list[Any] = []

    def start(self, **wishes: Any) -> FakeComet:
        self.wishes = wishes
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: self.calls.append((name, args, kwargs))


@pytest.mark.claims("comet.workspace", "comet.mode", "comet.experiment_key", "comet.online")
@pytest.mark.claims("comet.api_key", "comet.project")
def test_calls_to_comet(monkeypatch: pytest.MonkeyPatch) -> None:
    fake, key = FakeComet(), "k" * 40
    monkeypatch.setitem(sys.modules, "comet_ml", fake)
    told = {"workspace": "w", "mode": "get", "online": True, "api_key": "s", "project": "p"}
    writer = CometWriter(Comet(enabled=True, experiment_key=key, **told), {})
    assert fake.wishes == {
        "api_key": "s",
        "workspace": "w",
        "project_name": "p",
        "experiment_key": key,
        "mode": "get",
        "online": True,
    }
    for samples in (50, 100, 149, 150, 260):
        writer.write(ScalarRecord(samples, {"a": samples}, 0.0))
    writer.close()
    sent = [args[0]["a"] for name, args, _ in fake.calls if name == "log_metrics"]
    assert sent == [50, 150, 260]
    assert fake.calls[0] == ("log_metrics", ({"a": 50},), {"step": 50})
    assert fake.calls[-1][0] == "end"


def test_values_are_thinned_by_name() -> None:
    thinned = ThinnedEvents(10)
    asked = [("a", 5), ("b", 9), ("a", 14), ("a", 15), ("b", 19), ("b", 20), ("a", 300)]
    sent = [thinned.needs_logging(name, samples) for name, samples in asked]
    assert sent == [True, True, False, True, True, False, True]


# ---- what may be missing -----------------------------------------------------------------------

NEEDED = {"tensorboard": "tensorboard", "wandb": "wandb", "comet": "comet_ml"}


def start_without(section: str) -> str:
    name = NEEDED[section]
    before = {each: sys.modules[each] for each in list(sys.modules) if each.split(".")[0] == name}
    for each in before:
        del sys.modules[each]
    sys.modules[name] = None  # type: ignore[assignment]
    try:
        with pytest.raises(HadalError) as caught:
            engine_of(1, **{section: {"enabled": True}})
    finally:
        del sys.modules[name]
        sys.modules.update(before)
    # No engine owns the parameters: another try is not refused.
    engine = engine_of(1)
    train(engine, range(1))
    engine.destroy()
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize("section", NEEDED)
def test_a_missing_package_is_an_error_on_all_ranks(section: str, ranks: RankPools) -> None:
    first, second = ranks(2).run(start_without, section)
    remedy = f"pip install {NEEDED[section]}, or set {section}.enabled to false"
    for told in (first, second):
        assert "MissingPackageError" in told and f"{section}.enabled is true" in told
        assert remedy in told
    assert first.startswith("MissingPackageError")
    assert issubclass(MissingPackageError, ImportError)


def start_at(folder: str) -> str:
    with pytest.raises(MonitorError) as caught:
        engine_of(1, csv_monitor={"enabled": True, "output_path": folder})
    return str(caught.value)


def test_a_folder_that_cannot_be_written_is_an_error_on_all_ranks(
    ranks: RankPools, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    for told in ranks(2).run(start_at, str(tmp_path / "file")):
        assert "csv_monitor cannot write: [Errno" in told and "csv_monitor.output_path" in told


@pytest.mark.parametrize("section", ["tensorboard", "csv_monitor", "jsonl_monitor"])
@pytest.mark.parametrize("name", ["../elsewhere", "/tmp/elsewhere", "a/../../b"])
def test_a_job_name_stays_in_its_folder(section: str, name: str) -> None:
    from hadal.config import load_config

    with pytest.raises(ConfigError, match=rf"{section}\.job_name .*leads out of output_path"):
        load_config({"train_batch_size": 1, section: {"enabled": True, "job_name": name}})
    load_config({"train_batch_size": 1, section: {"enabled": True, "job_name": "a/b..c"}})
