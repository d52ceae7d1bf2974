"""Experiments as real jobs: the user's command with another configuration, and its files."""

from __future__ import annotations

import base64
import json
import os
import shlex
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hadal.autotuning.files import read_json, write_json
from hadal.autotuning.words import config_flag, mapped, with_value
from hadal.config import load_config
from hadal.errors import HadalError
from hadal.launcher.choices import Choices, planned
from hadal.launcher.front import Front, printer_for

CMD, CONFIG, DESCRIPTION, METRICS, MODEL_INFO = (
    "cmd.txt",
    "ds_config.json",
    "exp.json",
    "metrics.json",
    "model_info.json",
)
_OUT, _ERROR = "stdout.log", "stderr.log"
_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopped(KeyboardInterrupt):
    """The search was asked to end."""

    def __init__(self, sent: signal.Signals) -> None:
        super().__init__(f"stopped by {sent.name}")
        self.sent = sent


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of an experiment."""

    name: str
    found: dict[str, Any] | None
    """What it wrote down; None where it failed."""
    reason: str = ""
    """Why it failed: the first failing rank's own last words."""
    log: str = ""
    """The file that holds all of them."""
    seconds: float = 0.0
    is_new: bool = True
    """It was run now, and not taken from an earlier search."""

    @property
    def told(self) -> str:
        """The failure, with its place."""
        return f"{self.reason} (see {self.log})" if self.log else self.reason


@dataclass(frozen=True, slots=True)
class Runner:
    """Runs experiments of one command, one after the other."""

    choices: Choices
    """The command's flags; its words name the program."""
    flags: tuple[str, ...]
    """The same flags as words, without `--autotuning`."""
    variables: Mapping[str, str]
    folder: Path
    """Where the command runs."""
    results: Path
    experiments: Path
    mappings: Mapping[str, str]
    world_size: int
    hosts: int
    _numbers: dict[str, int] = field(default_factory=dict)

    def words_with(self, config: Mapping[str, Any], file: Path) -> tuple[str, ...]:
        """The program's words, with a configuration in place of the user's.

        On one host it is named by its file; on many it travels in the words, as other hosts may
        not see the file.
        """
        words = self.choices.words
        told = str(file)
        if self.hosts > 1:
            told = base64.urlsafe_b64encode(json.dumps(config).encode()).decode()
        return mapped(with_value(words, config_flag(words), told), self.mappings, config)

    def command(self, words: tuple[str, ...]) -> str:
        """The whole command, for a shell."""
        return shlex.join(["hadal", "run", *self.flags, *words])

    def run(
        self, name: str, config: Mapping[str, Any], section: Mapping[str, Any], answer: str
    ) -> Outcome:
        """Run an experiment, or take over what an earlier search has found of the same.

        Args:
            name: of the experiment, and of its files.
            config: without the autotuning section.
            section: what of that section the experiment is given.
            answer: the file that it is to write, METRICS or MODEL_INFO.

        Raises:
            Stopped: a signal asked all to end; nothing of the experiment runs any more.
        """
        folder = self.results / name
        path_key = "metric_path" if answer == METRICS else "model_info_path"
        config = {**config, "autotuning": {**section, path_key: str(folder / answer)}}
        words = self.words_with(config, folder / CONFIG)
        told = {
            "name": name,
            "ds_config": config,
            "num_gpus": self.world_size // self.hosts,
            "num_nodes": self.hosts,
            "hostfile": self.choices.hostfile,
        }
        write_json(self.experiments / f"{name}.json", told)
        told |= {"result_dir": str(folder), "command": list(words)}
        earlier = read_json(folder / DESCRIPTION)
        number = self._numbers.setdefault(name, len(self._numbers))
        if earlier is not None and {k: v for k, v in earlier.items() if k != "exp_id"} == told:
            found = read_json(folder / answer)
            if found is not None:
                return Outcome(name, found, is_new=False)
        for file in (METRICS, MODEL_INFO, _OUT, _ERROR):
            (folder / file).unlink(missing_ok=True)
        write_json(folder / DESCRIPTION, {**told, "exp_id": number})
        write_json(folder / CONFIG, config)
        (folder / CMD).write_text(self.command(words) + "\n", encoding="utf-8")
        try:
            load_config(config, world_size=self.world_size)
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
                plan.job, plan.ways, printer, tell, address=plan.address, waits_for_all=waits
            )
            code = front.run()
        if front.interrupted_by is not None:
            raise Stopped(front.interrupted_by)
        seconds = time.monotonic() - began
        if code != 0:
            return Outcome(name, None, front.reason or f"exit code {code}", str(error), seconds)
        found = read_json(folder / answer)
        if found is None:
            reason = (
                f"it ended without an error, and without {answer}: the program trains fewer updates"
                " than end_profile_step, or does not take this configuration, or rank 0's host does"
                f" not see {folder}"
            )
            return Outcome(name, None, reason, str(out), seconds)
        return Outcome(name, found, seconds=seconds)


def forget(results: Path, experiments: Path, *also: str) -> None:
    """Remove what searches have left in their folders, and nothing else; `also` are file names."""
    for description in results.glob(f"*/{DESCRIPTION}"):
        for name in (CMD, CONFIG, METRICS, MODEL_INFO, _OUT, _ERROR, DESCRIPTION):
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
    """Let signals that ask to end raise `Stopped` inside."""

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
"""The job's own process takes the signals over while it runs."""


def absolute(folder: Path, path: str) -> Path:
    """A path as seen from a folder, with the home for `~`."""
    return Path(os.path.abspath(folder / Path(path).expanduser()))
