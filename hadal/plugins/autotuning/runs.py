"""Experiments run as real jobs: the user's command with another configuration."""

from __future__ import annotations

import base64
import json
import os
import shlex
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hadal.config import load_config
from hadal.errors import HadalError
from hadal.launcher.choices import Choices, planned
from hadal.launcher.front import Front, printer_for
from hadal.plugins.autotuning.files import read_json, write_json
from hadal.plugins.autotuning.words import config_flag, mapped, with_value

CMD, CONFIG, DESCRIPTION, METRICS, MODEL_INFO = (
    "cmd.txt",
    "ds_config.json",
    "exp.json",
    "metrics.json",
    "model_info.json",
)
_OUT, _ERROR, _CANDIDATES = "stdout.log", "stderr.log", "candidates.json"
_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


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

    @property
    def failure(self) -> str:
        """The reason for the failure and the log file."""
        return f"{self.reason} (see {self.log})" if self.log else self.reason


@dataclass(frozen=True, slots=True)
class Runner:
    """A runner of experiments with one command, one at a time."""

    choices: Choices
    """The command's parsed flags, and the program's words."""
    flags: tuple[str, ...]
    """The flags as words, without `--autotuning`."""
    variables: Mapping[str, str]
    folder: Path
    """The working directory of the command."""
    results: Path
    experiments: Path
    mappings: Mapping[str, str]
    world_size: int
    readers: int
    """The ranks that see different samples: one for each copy of the model."""
    hosts: int
    limit_s: float | None = None
    """The seconds that an experiment may take."""
    _numbers: dict[str, int] = field(default_factory=dict)

    def words_with(self, config: Mapping[str, Any], file: Path) -> tuple[str, ...]:
        """Return the program's words with `config` in place of the user's configuration.

        On one host the words name its file; on several they contain the configuration itself, as
        other hosts may not see the file.
        """
        words = self.choices.words
        value = str(file)
        if self.hosts > 1:
            value = base64.urlsafe_b64encode(json.dumps(config).encode()).decode()
        return mapped(with_value(words, config_flag(words), value), self.mappings, config)

    def command(self, words: tuple[str, ...]) -> str:
        """Return the whole command, quoted for a shell."""
        return shlex.join(["hadal", "run", *self.flags, *words])

    def run(
        self,
        name: str,
        config: Mapping[str, Any],
        section: Mapping[str, Any],
        answer: str,
        candidates: Sequence[Mapping[str, Any]] = (),
        to_beat: float | None = None,
    ) -> Outcome:
        """Run an experiment, or reuse the outcome of the same one in an earlier search.

        Args:
            name: the name of the experiment and its files.
            config: the configuration without the autotuning section.
            section: the experiment's autotuning section.
            answer: the file that the experiment must write, METRICS or MODEL_INFO.
            candidates: what else it plans, as the keys that differ from `config`.
            to_beat: the best value so far; one with another is the same experiment.

        Raises:
            Stopped: a signal stopped the search; the experiment's processes have ended.
        """
        folder = self.results / name
        path_key = "metric_path" if answer == METRICS else "model_info_path"
        section = {**section, path_key: str(folder / answer)}
        if candidates:
            info = {**section.get("model_info", {}), "candidates": str(folder / _CANDIDATES)}
            section = {**section, "model_info": info}
        config = {**config, "autotuning": section}
        words = self.words_with(config, folder / CONFIG)
        description = {
            "name": name,
            "ds_config": config,
            "num_gpus": self.world_size // self.hosts,
            "num_nodes": self.hosts,
            "hostfile": self.choices.hostfile,
        }
        write_json(self.experiments / f"{name}.json", description)
        description |= {"result_dir": str(folder), "command": list(words)}
        if candidates:
            description["candidates"] = list(candidates)
        earlier = read_json(folder / DESCRIPTION)
        number = self._numbers.setdefault(name, len(self._numbers))
        if (
            earlier is not None
            and {k: v for k, v in earlier.items() if k != "exp_id"} == description
        ):
            found = read_json(folder / answer)
            if found is not None:
                return Outcome(name, found, is_new=False)
        for file in (METRICS, MODEL_INFO, _OUT, _ERROR):
            (folder / file).unlink(missing_ok=True)
        write_json(folder / DESCRIPTION, {**description, "exp_id": number})
        if to_beat is not None:
            config = {**config, "autotuning": {**section, "value_to_beat": to_beat}}
            words = self.words_with(config, folder / CONFIG)
        if candidates:
            (folder / _CANDIDATES).write_text(json.dumps(candidates), encoding="utf-8")
        write_json(folder / CONFIG, config)
        (folder / CMD).write_text(self.command(words) + "\n", encoding="utf-8")
        try:
            load_config(config, world_size=self.world_size, data_parallel_size=self.readers)
        except HadalError as error:
            return Outcome(name, None, " ".join(str(error).split()))
        return self._launched(name, words, folder, answer)

    def _launched(self, name: str, words: tuple[str, ...], folder: Path, answer: str) -> Outcome:
        plan = planned(replace(self.choices, words=words), self.variables, self.folder)
        out, error = folder / _OUT, folder / _ERROR
        began = time.monotonic()
        with out.open("wb") as said, error.open("wb") as complained, _own_signals():

            def tell(text: str) -> None:
                complained.write(f"hadal run: {text}\n".encode())

            printer = printer_for(plan.job, plan.names_hosts, said, complained)
            waits = not self.choices.no_ssh_check
            front = Front(
                plan.job,
                plan.start_commands,
                printer,
                tell,
                address=plan.address,
                waits_for_all=waits,
            )
            front.limit_s = self.limit_s
            code = front.run()
        if front.interrupted_by is not None:
            raise Stopped(front.interrupted_by)
        seconds = time.monotonic() - began
        if code != 0:
            return Outcome(name, None, front.reason or f"exit code {code}", str(error), seconds)
        found = read_json(folder / answer)
        if found is None:
            reason = (
                f"it ended without an error but did not write {answer}: the program trains fewer"
                " updates than end_profile_step, or does not use this configuration, or rank 0's"
                f" host does not see {folder}"
            )
            return Outcome(name, None, reason, str(out), seconds)
        return Outcome(name, found, seconds=seconds)


def forget(results: Path, experiments: Path, *also: str) -> None:
    """Remove the files of earlier searches from their folders; `also` names further files."""
    for description in results.glob(f"*/{DESCRIPTION}"):
        for name in (CMD, CONFIG, METRICS, MODEL_INFO, _OUT, _ERROR, _CANDIDATES, DESCRIPTION):
            description.with_name(name).unlink(missing_ok=True)
        if not any(description.parent.iterdir()):
            description.parent.rmdir()
    for name in also:
        (results / name).unlink(missing_ok=True)
    for path in experiments.glob("*.json"):
        if (read_json(path) or {}).get("name") == path.stem:
            path.unlink()


@contextmanager
def stoppable() -> Iterator[None]:
    """Raise `Stopped` in the block if a signal asks the process to end."""

    def stop(number: int, _: object) -> None:
        raise Stopped(signal.Signals(number))

    with _restored_signals():
        for each in _STOPPING:
            if signal.getsignal(each) is not signal.SIG_IGN:
                signal.signal(each, stop)
        yield


@contextmanager
def _restored_signals() -> Iterator[None]:
    before: dict[signal.Signals, Callable[..., Any] | int | None] = {
        each: signal.getsignal(each) for each in _STOPPING
    }
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


_own_signals = _restored_signals
"""The launcher handles signals itself while a job runs; this restores the handlers after it."""


def absolute(folder: Path, path: str) -> Path:
    """Return a path relative to `folder` as an absolute one, with `~` expanded."""
    return Path(os.path.abspath(folder / Path(path).expanduser()))
