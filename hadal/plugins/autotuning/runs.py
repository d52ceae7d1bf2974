"""Experiments run as real jobs: the user's command with another configuration."""

from __future__ import annotations

import base64
import json
import math
import os
import shlex
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hadal.config import load_config
from hadal.config.autotuning import Autotuning
from hadal.errors import HadalError, LaunchError
from hadal.launcher.choices import Choices, planned
from hadal.launcher.front import STOPPING, Front, handle_signals, printer_for
from hadal.launcher.hosts import Pool
from hadal.launcher.processes import PASSED_ON
from hadal.plugins.autotuning.files import read_json, write_json
from hadal.plugins.autotuning.words import config_flag, mapped, with_value

CONFIG, _CMD, _DESCRIPTION, _HOSTFILE = "ds_config.json", "cmd.txt", "exp.json", "hostfile"
_RESULTS = _METRICS, _MODEL_INFO, _OUT, _ERROR = (
    *("metrics.json", "model_info.json"),
    *("stdout.log", "stderr.log"),
)
_CANDIDATES = "candidates.json"
_LOOK_S = 0.2
# Experiments are no part of the user's runs, whose files they would share.
_MONITORS = {"tensorboard", "csv_monitor", "jsonl_monitor", "wandb", "comet"}


class Stopped(KeyboardInterrupt):
    """A signal stopped the search."""

    def __init__(self, sent: signal.Signals) -> None:
        super().__init__(f"stopped by {sent.name}")
        self.sent = sent


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of an experiment."""

    name: str
    found: dict[str, Any] | None
    """The results that it wrote; None if it failed."""
    reason: str = ""
    """The reason for the failure: the last message of the rank that failed first."""
    log: str = ""
    """The file with the full messages."""
    seconds: float = 0.0
    is_new: bool = True
    """True if it was run now; False if its outcome comes from an earlier search."""
    lost_hosts: tuple[str, ...] = ()
    """Hosts that were lost, or did not answer."""

    @property
    def failure(self) -> str:
        """The reason for the failure and the log file."""
        return f"{self.reason} (see {self.log})" if self.log else self.reason


@dataclass(slots=True)
class ExperimentRun:
    """A job under way, or one whose outcome is known."""

    name: str
    words: tuple[str, ...]
    answer: Path
    """The file that it writes."""
    outcome: Future[Outcome] = field(default_factory=Future)
    hosts: tuple[str, ...] = ()
    """The hosts that it runs on; () if it has ended already, or waits for some."""
    ended_at: float = math.inf
    """The time at which it ended in an earlier search."""
    is_repeated: bool = False
    """True if it has lost a host once."""


@dataclass
class Runner:
    """A runner of experiments with one command: side by side, on hosts that are free."""

    choices: Choices
    """The command's parsed flags, and the program's words."""
    flags: tuple[str, ...]
    """The flags as words, without `--autotuning`."""
    variables: Mapping[str, str]
    folder: Path
    """The working directory of the command."""
    section: Autotuning
    pool: Pool
    """The hosts and slots of one experiment; others of the hostfile may stand in for these."""
    readers: int | None = None
    """The ranks that see different samples, if the configuration does not tell (`mp_size`)."""
    say: Callable[[str], None] = lambda text: None

    def __post_init__(self) -> None:
        self.results = self._absolute(self.section.results_dir)
        self.experiments = self._absolute(self.section.exps_dir)
        self.world_size = sum(map(len, self.pool.values()))
        self._hosts = self._usable_hosts()
        """The usable hosts, in order."""
        self._running: list[ExperimentRun] = []
        self._fronts: list[Front] = []
        self._sent: list[signal.Signals] = []
        self._numbers: dict[str, int] = {}
        self._threads = ThreadPoolExecutor(max(1, self.lanes))

    def _absolute(self, path: str) -> Path:
        return Path(os.path.abspath(self.folder / Path(path).expanduser()))

    def _usable_hosts(self) -> dict[str, int]:
        """Return the hosts with as many slots as each of an experiment's, and these numbers."""
        own = {host: len(slots) for host, slots in self.pool.items()}
        if self.choices.num_nodes is None or not (self.folder / self.choices.hostfile).exists():
            return own
        choices = replace(self.choices, num_nodes=None)
        whole = planned(choices, self.variables, self.folder).job.pool
        alike = {
            host: len(slots) for host, slots in whole.items() if {len(slots)} == {*own.values()}
        }
        return own | alike

    @property
    def lanes(self) -> int:
        """The number of experiments that may run side by side."""
        return len(self._hosts) // len(self.pool)

    @property
    def has_room(self) -> bool:
        """True if there are free hosts for another experiment."""
        return len(self._running) < self.lanes

    def words_with(self, config: Mapping[str, Any], file: Path) -> tuple[str, ...]:
        """Return the program's words with `config` in place of the user's configuration.

        On one host the words name its file; on several they contain the configuration itself, as
        other hosts may not see the file.
        """
        words = self.choices.words
        value = str(file)
        if len(self.pool) > 1:
            value = base64.urlsafe_b64encode(json.dumps(config).encode()).decode()
        mappings = self.section.arg_mappings or {}
        return mapped(with_value(words, config_flag(words), value), mappings, config)

    def command(self, words: tuple[str, ...]) -> str:
        """Return the whole command, quoted for a shell."""
        return shlex.join(["hadal", "run", *self.flags, *words])

    def start(
        self,
        name: str,
        config: Mapping[str, Any],
        section: Mapping[str, Any],
        candidates: Sequence[Mapping[str, Any]] = (),
        to_beat: float | None = None,
    ) -> None:
        """Start an experiment on free hosts; one that was measured before has ended at once.

        Args:
            name: its name, and that of its folder.
            config: the configuration, without an autotuning section.
            section: the autotuning section.
            candidates: configurations that a profile plans, as patches of its own.
            to_beat: the best value so far; one with another is the same experiment.
        """
        folder = self.results / name
        profiles = "model_info" in section
        answer = folder / (_MODEL_INFO if profiles else _METRICS)
        section = {**section, "model_info_path" if profiles else "metric_path": str(answer)}
        if candidates:
            path = str(folder / _CANDIDATES)
            section["model_info"] = {**section["model_info"], "candidates": path}
        asked = {key: value for key, value in config.items() if key not in _MONITORS}
        asked["autotuning"] = section
        words = self.words_with(asked, folder / CONFIG)
        description: dict[str, Any] = {
            "name": name,
            "ds_config": asked,
            "num_gpus": self.world_size // len(self.pool),
            "num_nodes": len(self.pool),
            "hostfile": self.choices.hostfile,
        }
        write_json(self.experiments / f"{name}.json", description)
        description |= {"result_dir": str(folder), "command": list(words)}
        description |= {"candidates": list(candidates)} if candidates else {}
        description["exp_id"] = self._numbers.setdefault(name, len(self._numbers))
        experiment = ExperimentRun(name, words, answer)
        self._running.append(experiment)
        known, earlier = read_json(answer), read_json(folder / _DESCRIPTION) or {}
        if known is not None and earlier | {"exp_id": description["exp_id"]} == description:
            experiment.ended_at = answer.stat().st_mtime
            experiment.outcome.set_result(Outcome(name, known, is_new=False))
            return
        for file in _RESULTS:
            (folder / file).unlink(missing_ok=True)
        write_json(folder / _DESCRIPTION, description)
        if to_beat is not None:
            asked["autotuning"] = {**section, "value_to_beat": to_beat}
            experiment.words = self.words_with(asked, folder / CONFIG)
        if candidates:
            (folder / _CANDIDATES).write_text(json.dumps(candidates), encoding="utf-8")
        write_json(folder / CONFIG, asked)
        (folder / _CMD).write_text(self.command(experiment.words) + "\n", encoding="utf-8")
        try:
            load_config(asked, world_size=self.world_size, data_parallel_size=self.readers)
        except HadalError as error:
            experiment.outcome.set_result(Outcome(name, None, " ".join(str(error).split())))
        self._begin()

    def _begin(self) -> None:
        """Begin the experiments for which there are hosts now."""
        for each in self._running:
            busy = {host for other in self._running for host in other.hosts}
            hosts = [host for host in self._hosts if host not in busy][: len(self.pool)]
            if not each.hosts and not each.outcome.done() and len(hosts) == len(self.pool):
                each.hosts = tuple(hosts)
                each.outcome = self._submit(each)

    def _submit(self, experiment: ExperimentRun) -> Future[Outcome]:
        return self._threads.submit(self._launched, experiment)

    def finished(self) -> Outcome:
        """Wait for the next experiment that ends; those of an earlier search come as they did then.

        One that loses a host starts once more, on others.

        Raises:
            Stopped: a signal stopped the search.
            LaunchError: too few hosts are left.
        """
        while not (over := [each for each in self._running if each.outcome.done()]):
            outcomes = [each.outcome for each in self._running]
            wait(outcomes, _LOOK_S, FIRST_COMPLETED)  # signals are handled in between
        one = min(over, key=lambda each: each.ended_at)
        self._running.remove(one)
        outcome = one.outcome.result()
        lost = self._hosts.keys() & {*outcome.lost_hosts}
        for host in lost:
            del self._hosts[host]
            self.say(f"{host} is left out from now on: {outcome.reason}")
        if not self.lanes:
            raise LaunchError(
                f"an experiment takes {len(self.pool)} hosts, and {len(self._hosts)} are left;"
                " repeat the command when there are more: it goes on from here"
            )
        if lost and not one.is_repeated:
            self._running.append(replace(one, outcome=Future(), hosts=(), is_repeated=True))
        self._begin()
        return self.finished() if lost and not one.is_repeated else outcome

    def _launched(self, experiment: ExperimentRun) -> Outcome:
        """Run an experiment to its end, in a thread of its own."""
        name, folder = experiment.name, experiment.answer.parent
        choices = replace(self.choices, words=experiment.words)
        if experiment.hosts != tuple(self.pool):
            lines = (f"{host} slots={self._hosts[host]}\n" for host in experiment.hosts)
            (folder / _HOSTFILE).write_text("".join(lines), encoding="utf-8")
            choices = replace(choices, hostfile=str(folder / _HOSTFILE))
        plan = planned(choices, self.variables, self.folder)
        out, error = folder / _OUT, folder / _ERROR
        began = time.monotonic()
        with out.open("wb") as said, error.open("wb") as complained:

            def tell(text: str) -> None:
                complained.write(f"hadal run: {text}\n".encode())

            front = Front(
                plan.job,
                plan.start_commands,
                printer_for(plan.job, plan.names_hosts, said, complained),
                tell,
                address=plan.address,
                waits_for_all=not choices.no_ssh_check,
            )
            front.limit_s = self.section.experiment_timeout
            self._fronts.append(front)
            for sent in self._sent:  # while it was started
                front.hear(sent)
            code = front.watch()
            self._fronts.remove(front)
        if front.interrupted_by is not None:
            raise Stopped(front.interrupted_by)
        seconds, lost = time.monotonic() - began, tuple(front.lost_hosts)
        if code != 0:
            reason = front.reason or f"exit code {code}"
            return Outcome(name, None, reason, str(error), seconds, lost_hosts=lost)
        found = read_json(experiment.answer)
        if found is None:
            reason = (
                f"it ended without an error but did not write {experiment.answer.name}: the program"
                " trains fewer updates than end_profile_step, or does not use this configuration,"
                f" or rank 0's host does not see {folder}"
            )
            return Outcome(name, None, reason, str(out), seconds)
        return Outcome(name, found, seconds=seconds)

    @contextmanager
    def stoppable(self) -> Iterator[None]:
        """End experiments at a signal, or at the block's end; without any, raise `Stopped`."""
        before: dict[signal.Signals, Callable[..., Any] | int | None] = {
            each: signal.getsignal(each) for each in (*STOPPING, *PASSED_ON)
        }

        def hear(sent: signal.Signals) -> None:
            for front in self._fronts:
                front.hear(sent)
            if sent not in PASSED_ON:
                self._sent.append(sent)
                if not self._fronts:
                    raise Stopped(sent)

        handle_signals(hear)
        try:
            yield
        finally:
            if self._fronts and not self._sent:
                hear(signal.SIGTERM)
            self._threads.shutdown()
            for each, handler in before.items():
                signal.signal(each, handler)


def forget(results: Path, experiments: Path, *also: str) -> None:
    """Remove the files of earlier searches from their folders; `also` names further files."""
    for description in results.glob(f"*/{_DESCRIPTION}"):
        for name in (*_RESULTS, CONFIG, _CMD, _CANDIDATES, _HOSTFILE, _DESCRIPTION):
            description.with_name(name).unlink(missing_ok=True)
        if not any(description.parent.iterdir()):
            description.parent.rmdir()
    for name in also:
        (results / name).unlink(missing_ok=True)
    for path in experiments.glob("*.json"):
        if (read_json(path) or {}).get("name") == path.stem:
            path.unlink()
