"""Experiments run as real jobs: the user's command with another configuration."""

from __future__ import annotations

import base64
import json
import math
import os
import re
import shlex
import signal
import subprocess
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
from hadal.launcher.choices import Choices, LaunchPlan, devices_here, planned, planned_on
from hadal.launcher.front import STOPPING, Front, handle_signals, printer_for
from hadal.launcher.hosts import Pool
from hadal.launcher.processes import PASSED_ON
from hadal.plugins.autotuning.files import read_json, write_json
from hadal.plugins.autotuning.words import config_flag, mapped, with_value

OFFLOADED = "offload_optimizer", "offload_param"
CONFIG, _CMD, _DESCRIPTION = "ds_config.json", "cmd.txt", "exp.json"
_RESULTS = _METRICS, _MODEL_INFO, _OUT, _ERROR = (
    *("metrics.json", "model_info.json"),
    *("stdout.log", "stderr.log"),
)
CANDIDATES = "candidates.json"
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
    is_alone: bool = False
    """True if it computes on its hosts too, where other experiments would disturb it."""
    outcome: Future[Outcome] = field(default_factory=Future)
    pool: Pool = field(default_factory=dict)
    """The hosts and slots that it runs on; none if it has ended already, or waits for some."""
    ended_at: float = math.inf
    """The time at which it ended in an earlier search."""
    failed_on: Pool | None = None
    """The hosts and slots on which it has failed, if it is repeated on others."""


@dataclass
class Runner:
    """A runner of experiments with one command: side by side, on hosts or devices that are free."""

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
    say: Callable[[str], None] = lambda text: None

    def __post_init__(self) -> None:
        self.results = self._absolute(self.section.results_dir)
        self.experiments = self._absolute(self.section.exps_dir)
        self.world_size = sum(map(len, self.pool.values()))
        self._places = self._usable_places()
        """The usable hosts, each with the slots that an experiment takes there, in order."""
        self._running: list[ExperimentRun] = []
        self._fronts: list[Front] = []
        self._sent: list[signal.Signals] = []
        self._numbers: dict[str, int] = {}
        self._threads = ThreadPoolExecutor(max(1, self.lanes))

    def _absolute(self, path: str) -> Path:
        return Path(os.path.abspath(self.folder / Path(path).expanduser()))

    def _usable_places(self) -> list[tuple[str, tuple[int, ...]]]:
        """Return the hosts and slots of an experiment, and others like them.

        A host whose slots are devices has room for several experiments of one host. Where they are
        processes of a host that computes, each experiment would slow down the others.
        """
        own, choices = list(self.pool.items()), self.choices
        nodes, count, sizes = choices.num_nodes, choices.num_slots, {*map(len, self.pool.values())}
        if len(sizes) > 1 or (nodes is None and count is None):
            return own
        (size,) = sizes
        if choices.launcher == "slurm" and not (self.folder / choices.hostfile).exists():
            is_free = nodes and not (choices.include or choices.exclude)
            names = _nodes_of(self.variables.get("SLURM_JOB_NODELIST", "")) if is_free else []
            return [(name, own[0][1]) for name in names] or own
        choices = replace(choices, num_nodes=None, num_slots=None)
        job = planned(choices, self.variables, self.folder).job
        is_numbered = job.shows_slots or not self.variables.get("CUDA_VISIBLE_DEVICES")
        is_shared = choices.launcher == "ssh" and len(own) == 1 and is_numbered and devices_here()
        blocks = [
            (host, slots[first : first + size])
            for host, slots in job.pool.items()
            for first in range(0, len(slots) - size + 1, size)
            if (is_shared or (nodes and first == 0)) and (count or len(slots) == size)
        ]
        return list(dict.fromkeys([*own, *blocks]))

    @property
    def lanes(self) -> int:
        """The number of experiments that may run side by side."""
        return len(self._places) // len(self.pool)

    @property
    def has_room(self) -> bool:
        """True if there is room for another experiment."""
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
        readers: int,
        candidates: Sequence[Mapping[str, Any]] = (),
        to_beat: float | None = None,
    ) -> None:
        """Start an experiment on free slots; one that was measured before has ended at once.

        Args:
            name: its name, and that of its folder.
            config: the configuration, without an autotuning section.
            section: the autotuning section.
            readers: the ranks that see different samples.
            candidates: configurations that a profile plans, as patches of its own.
            to_beat: the best value so far; one with another is the same experiment.
        """
        folder = self.results / name
        profiles = "model_info" in section
        answer = folder / (_MODEL_INFO if profiles else _METRICS)
        section = {**section, "model_info_path" if profiles else "metric_path": str(answer)}
        if candidates:
            path = str(folder / CANDIDATES)
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
        tiers = [config["zero_optimization"].get(key) or {} for key in OFFLOADED]
        is_alone = any(tier.get("device", "none") != "none" for tier in tiers)
        experiment = ExperimentRun(name, words, answer, is_alone)
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
            (folder / CANDIDATES).write_text(json.dumps(candidates), encoding="utf-8")
        write_json(folder / CONFIG, asked)
        (folder / _CMD).write_text(self.command(experiment.words) + "\n", encoding="utf-8")
        try:
            load_config(asked, world_size=self.world_size, data_parallel_size=readers)
        except HadalError as error:
            experiment.outcome.set_result(Outcome(name, None, " ".join(str(error).split())))
        self._begin()

    def _begin(self) -> None:
        """Begin the experiments for which there are slots now, in order."""
        for each in self._running:
            if each.pool or each.outcome.done():
                continue
            each.pool = self._free_for(each)
            if not each.pool:
                break  # later ones would always be ahead of one that needs a whole host
            each.outcome = self._submit(each)

    def _free_for(self, experiment: ExperimentRun) -> Pool:
        """Return hosts and slots on which an experiment may begin; none if it has to wait."""
        busy = [place for each in self._running for place in each.pool.items()]
        closed = {host for each in self._running if each.is_alone for host in each.pool}
        if experiment.is_alone:
            closed |= {host for host, _ in busy}
        free = [place for place in self._places if place not in busy and place[0] not in closed]
        free = [place for place in free if place not in (experiment.failed_on or {}).items()]
        if len(free) < len(self.pool) and not busy:  # hosts were lost: where it failed is left
            free = self._places
        return dict(free[: len(self.pool)]) if len(free) >= len(self.pool) else {}

    def _submit(self, experiment: ExperimentRun) -> Future[Outcome]:
        return self._threads.submit(self._launched, experiment)

    def finished(self) -> Outcome:
        """Wait for the next experiment that ends; those of an earlier search come as they did then.

        One that loses a host, or fails as a broken one would, starts once more, on others.

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
        is_lost = self._leave_out(one, outcome)
        if not self.lanes:
            raise LaunchError(
                f"an experiment takes {len(self.pool)} hosts, and {len(self._places)} are left;"
                " repeat the command when there are more: it goes on from here"
            )
        is_suspect = outcome.found is None and is_of_place(outcome.reason)
        has_others = len(self._places) >= 2 * len(self.pool)
        is_repeated = one.failed_on is None and (is_lost or (is_suspect and has_others))
        if is_repeated:
            where = {} if is_lost else one.pool
            self._running.append(replace(one, outcome=Future(), pool={}, failed_on=where))
        if is_repeated and not is_lost:
            why = "is repeated on others, as devices or hosts may be the reason"
            self.say(f"{one.name} failed on {_shown(one.pool)} and {why}: {outcome.reason}")
        self._begin()
        return self.finished() if is_repeated else outcome

    def _leave_out(self, experiment: ExperimentRun, outcome: Outcome) -> bool:
        """Leave out lost hosts, and slots where one failed that runs on others; tell of them.

        Return whether any host was lost.
        """
        lost = {host for host, _ in self._places} & {*outcome.lost_hosts}
        for host in lost:
            self.say(f"{host} is left out from now on: {outcome.reason}")
        failed = experiment.failed_on or {}
        broken = {*failed.items()} & {*self._places} if outcome.found is not None else set()
        if broken:
            where, name = f"{_shown(failed)}, where it failed,", experiment.name
            self.say(f"{name} runs on {_shown(experiment.pool)}; {where} is left out from now on")
        self._places = [p for p in self._places if p[0] not in lost and p not in broken]
        return bool(lost)

    def _launched(self, experiment: ExperimentRun) -> Outcome:
        """Run an experiment to its end, in a thread of its own."""
        name, folder = experiment.name, experiment.answer.parent
        plan = self._planned_on(experiment.pool, experiment.words)
        out, error = folder / _OUT, folder / _ERROR
        began = time.monotonic()
        with out.open("wb") as said, error.open("wb") as complained:

            def tell(text: str) -> None:
                complained.write(f"hadal run: {text}\n".encode())
                complained.flush()

            front = Front(
                plan.job,
                plan.start_commands,
                printer_for(plan.job, plan.names_hosts, said, complained),
                tell,
                address=plan.address,
                waits_for_all=not self.choices.no_ssh_check,
            )
            tell(f"{name} runs on {_shown(experiment.pool)}")
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

    def _planned_on(self, pool: Pool, words: tuple[str, ...]) -> LaunchPlan:
        """Return the command's job on other hosts and slots."""
        choices = replace(self.choices, words=words)
        if choices.launcher == "slurm" and pool != self.pool:
            choices = replace(choices, include="@".join(pool))
        elif pool != self.pool:
            plan = planned_on(pool, choices, self.variables, {}, self.folder)
            is_free = choices.launcher == "ssh" and len(pool) == 1  # to choose its port
            return replace(plan, job=replace(plan.job, port=0)) if is_free else plan
        return planned(choices, self.variables, self.folder)

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


def is_exhausted(reason: str) -> bool:
    """Return whether a failed experiment's message means that it ran out of memory."""
    text = reason.lower()
    words = ("out of memory", "outofmemory", "can't allocate memory", "memoryerror", "sigkill")
    return any(word in text for word in words)


_OF_PLACE = re.compile(
    r"CUDA|cuda|HIP error|NCCL|nccl|Accelerator|Dist\w*Error|CommunicationError|OSError|BrokenPipe"
    r"|Connection|Permission|FileNotFound|ModuleNotFound|ImportError|exit code"
    r"|SIG(BUS|SEGV|ABRT|ILL)"
)


def is_of_place(reason: str) -> bool:
    """Return whether a failed experiment's message may mean that a device or host is broken."""
    return bool(_OF_PLACE.search(reason)) and not is_exhausted(reason)


def _nodes_of(nodes: str) -> list[str]:
    """Return the names in a node list of Slurm; none without its commands."""
    try:
        told = subprocess.run(
            ["scontrol", "show", "hostnames", nodes], capture_output=True, text=True
        )
    except OSError:
        return []
    return told.stdout.split()


def _shown(pool: Pool) -> str:
    return ", ".join(f"{host}:{','.join(map(str, slots))}" for host, slots in pool.items())


def forget(results: Path, experiments: Path, *also: str) -> None:
    """Remove the files of earlier searches from their folders; `also` names further files."""
    for description in results.glob(f"*/{_DESCRIPTION}"):
        for name in (*_RESULTS, CONFIG, _CMD, CANDIDATES, _DESCRIPTION):
            description.with_name(name).unlink(missing_ok=True)
        if not any(description.parent.iterdir()):
            description.parent.rmdir()
    for name in also:
        (results / name).unlink(missing_ok=True)
    for path in experiments.glob("*.json"):
        if (read_json(path) or {}).get("name") == path.stem:
            path.unlink()
