"""The search: profile and plan the model, then run what may be the best by its plan."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from hadal.errors import TuningError
from hadal.plugins.autotuning.files import write_json
from hadal.plugins.autotuning.runs import OFFLOADED, Runner, forget, is_exhausted
from hadal.plugins.autotuning.search import (
    TRUST,
    corrected,
    corrected_nbytes,
    is_over,
    next_upwards,
    shuffled,
)
from hadal.plugins.autotuning.space import (
    NO_GAIN,
    ON_HOST,
    SearchRequest,
    TuningTrial,
    combinations,
    config_of,
    patch_of,
)
from hadal.plugins.autotuning.summary import (
    BEST_COMMAND,
    BEST_CONFIG,
    PICTURE,
    SUMMARY,
    UNITS,
    Findings,
)
from hadal.plugins.autotuning.words import found_at

PROFILE = "profile_model_info"
_GB = 1e9
_USABLE = 0.95
"""The usable fraction of the memory; fragmentation takes the rest."""
_RUNS, _RUNS_IF_SLOW = 3, 8
"""The measured experiments in which ranking by plans must find the best."""


class Tuner:
    """A search. Its findings are valid at any time, even after it was stopped."""

    def __init__(self, wish: SearchRequest, runner: Runner) -> None:
        self.findings = Findings(wish.section.metric, [], {})
        self._wish = wish
        self.runner = runner
        self._say = runner.say
        self._began = time.monotonic()
        self._look: dict[str, Any] = {}
        """Findings of the profile; empty without one."""
        self._space: list[TuningTrial] = []
        self._is_planned = False
        """True if the space has plans of time."""
        self._running: dict[str, TuningTrial] = {}
        """The trials of experiments under way, by name."""

    def run(self) -> TuningTrial:
        """Search, write the findings, and return the best result.

        Raises:
            TuningError: no configuration runs.
            Stopped: a signal stopped the search. In any case the measurements are written.
        """
        if self._wish.section.overwrite:
            files = (SUMMARY, BEST_CONFIG, BEST_COMMAND, PICTURE)
            forget(self.runner.results, self.runner.experiments, *files)
        is_whole = False
        try:
            self._search()
            is_whole = True
        finally:
            self._write(is_whole=is_whole)
        best = self.findings.best()
        if best is None:
            reasons = "\n".join(f"  {line}" for line in self.findings.failures())
            is_small = self._wish.section.fast and any(map(self._lack, self._space))
            hint = "; recomputation and offloading are tried if fast is false" * is_small
            raise TuningError(f"no configuration runs{hint}:\n{reasons}")
        return best

    def _search(self) -> None:
        runner = self.runner
        how = "one after the other" if runner.lanes == 1 else f"{runner.lanes} side by side"
        self._say(
            f"experiments run {how}, each on {_count(runner.world_size, 'rank')} of"
            f" {_count(len(runner.pool), 'host')}"
        )
        self._space = [
            TuningTrial(stage, size, others)
            for stage in self._stages
            for others in combinations(self._wish, stage)
            for size in self._wish.at(others).sizes
        ]
        self._look_at_model()
        self._plan()
        self._leave_out()
        while True:
            while runner.has_room and self._may_try and (trial := self._next()) is not None:
                self._start(trial, self._name(trial))
            if not self._running and (winner := self._unconfirmed()) is not None:
                self._start(winner, f"{self._name(winner)}_again")
            if not self._running:
                break
            self._finish()
        self._tell_rest()

    @cached_property
    def _stages(self) -> tuple[int, ...]:
        """Return the stages to try: a single rank has nothing to shard."""
        wish = self._wish
        if wish.are_chosen or self.runner.world_size > 1:
            return wish.stages
        self._say("1 rank: nothing to shard, so only stage 0 is tried; list other stages to try")
        return wish.stages[:1]

    # ---- the model's profile --------------------------------------------------------------------

    def _look_at_model(self) -> None:
        """Measure one forward and plan the candidates, unless the model's size is given.

        It uses the stage that shards most, which is the most likely to fit.
        """
        wish, info = self._wish, self._wish.section.model_info
        if info is not None and info.num_params is not None:
            return
        stage = max(self._stages)
        if found_at(wish.raw, "pipeline.auto"):  # whose ranks hold their weights whole
            stage = min(stage, 2)
        trial = TuningTrial(stage, self._first_micro_batch, wish.own)
        section: dict[str, Any] = {"profile": True}
        if info is not None:
            section |= {"hidden_size": info.hidden_size, "num_layers": info.num_layers}
        self._say(f"{PROFILE}: one forward of {trial.micro_batch} samples")
        section = {"enabled": True, "model_info": section}
        config, patches = config_of(wish, trial), [patch_of(wish, each) for each in self._space]
        self.runner.start(PROFILE, config, section, wish.ranks, patches)
        outcome = self.runner.finished()
        zero, offloaded = config["zero_optimization"], OFFLOADED[: 2 if stage == 3 else 1]
        if is_exhausted(outcome.reason) and not zero.keys() & {*OFFLOADED}:
            self._say(f"{PROFILE} ran out of memory: once more with {' and '.join(offloaded)}")
            config["zero_optimization"] = zero | dict.fromkeys(offloaded, ON_HOST)
            for patch in patches:
                patch["zero_optimization"] = dict.fromkeys(offloaded) | patch["zero_optimization"]
            self.runner.start(f"{PROFILE}_offloaded", config, section, wish.ranks, patches)
            outcome = self.runner.finished()
        if outcome.found is None:
            self.findings.left_out[PROFILE] = outcome.failure
            raise TuningError(f"the model cannot be profiled: {outcome.failure}")
        look = self._look = outcome.found
        self._say(
            f"{PROFILE}: {look['num_params']:,} parameters per rank,"
            f" {look['activation_mem_per_gpu'] / _GB:.3g} GB of activations,"
            f" {look['memory_per_gpu'] / _GB:.3g} GB of memory, {outcome.seconds:.1f} s"
        )

    @property
    def _first_micro_batch(self) -> int:
        sizes = {trial.micro_batch for trial in self._space}
        return max((size for size in sizes if size <= self._wish.start), default=min(sizes))

    # ---- plans of the candidates ---------------------------------------------------------------

    def _plan(self) -> None:
        """Read the plans; those without activations get the measured ones, in proportion."""
        refused: dict[str, str] = {}
        for trial, plan in zip(self._space, self._look.get("plans", ()), strict=False):
            if "seconds" in plan:
                seconds = plan["seconds"]
                found = {"latency": seconds * 1000, "throughput": plan["samples"] / seconds}
                # A planned update has the same operations at any speed.
                found["FLOPS_per_gpu"] = found["throughput"]
                trial.planned, trial.nbytes = self.findings.gain_of(found), plan["memory"]
            elif "memory" in plan:
                per_sample = self._look["activation_mem_per_gpu"] / self._first_micro_batch
                trial.nbytes = plan["memory"] + per_sample * trial.micro_batch
            elif "failure" in plan:
                refused.setdefault(plan["failure"], self._name(trial))
        if any(trial.nbytes for trial in self._space):
            self.findings.left_out |= {name: why for why, name in refused.items()}
            self._space = [trial for trial in self._space if trial.nbytes]
        self._is_planned = any(trial.planned > NO_GAIN for trial in self._space)
        if self._is_planned:
            self._space = self._distinct()
        elif self._wish.section.tuner_type == "model_based":
            self._say("no plan of this model: micro-batches are tried upwards, stage by stage")

    def _distinct(self) -> list[TuningTrial]:
        """Return the planned trials, without those of added settings that have the same plan.

        Settings that the user lists are all kept: a plan does not know all that they do.
        """
        first: dict[Any, TuningTrial] = {}
        planned = [trial for trial in self._space if trial.planned > NO_GAIN]
        for t in planned:
            listed = tuple(pair for pair in t.others if pair[0] in self._wish.ranges)
            first.setdefault((t.stage, t.micro_batch, listed, t.planned, t.nbytes), t)
        if left := len(planned) - len(first):
            why = "its plan is that of another one"
            self.findings.left_out[f"each of {left} more of {len(planned)}"] = why
        return list(first.values())

    def _leave_out(self) -> None:
        """Leave out what lacks memory or samples; the smallest of each row is told."""
        lacking = [(trial, why) for trial in self._space if (why := self._lack(trial))]
        for trial, why in {trial.row: (trial, why) for trial, why in reversed(lacking)}.values():
            self.findings.left_out[self._name(trial)] = why
            self._say(f"{self._name(trial)} is left out: {why}")
        for size in sorted({*self._wish.micro_batches} - {*self._wish.sizes}):
            self.findings.left_out[f"micro-batch {size}"] = "it is beyond the limits"

    def _lack(self, trial: TuningTrial) -> str:
        """Describe the memory or samples that a trial lacks; empty if it fits, or if unknown."""
        batch = self._wish.at(trial.others).batch_of(trial.micro_batch)
        least = self._wish.section.min_train_batch_size
        if batch < least:
            return f"its update has {batch} samples, fewer than min_train_batch_size {least}"
        memory = self._look.get("memory_per_gpu")
        wanted = trial.nbytes and corrected_nbytes(trial, self.findings.measured)
        if memory is None or wanted <= _USABLE * memory:
            return ""
        return f"it needs {wanted / _GB:.3g} GB, but a rank has {memory / _GB:.3g} GB"

    # ---- the next trial ------------------------------------------------------------------------

    @property
    def _most(self) -> int | None:
        """The measured experiments of a search by plans; None: its order has other limits."""
        section = self._wish.section
        if not self._is_planned or section.tuner_type != "model_based":
            return None
        return (_RUNS if section.fast else _RUNS_IF_SLOW) * self.runner.lanes

    @property
    def _may_try(self) -> bool:
        """Return whether another trial may run: one run is kept to confirm an unexpected winner."""
        if not self.findings.measured:
            failed = [trial.outcome.reason for trial in self.findings.results]
            broken = [reason for reason in failed if not is_exhausted(reason)]
            return len(broken) + len(self._running) < self._wish.section.tuner_early_stopping
        kept = self._unconfirmed() is not None
        return self._most is None or self._measured + len(self._running) + kept < self._most

    @property
    def _measured(self) -> int:
        return sum(trial.runs for trial in self.findings.measured)

    def _next(self) -> TuningTrial | None:
        """Return the trial that is the most promising, or the next in order; None at the end."""
        left = self._left()
        kind = self._wish.section.tuner_type
        if kind != "model_based":
            order = shuffled(self._space) if kind == "random" else self._space
            return next((trial for trial in order if trial in left), None)
        if not self._is_planned:
            return self._next_unplanned(left)
        trial, best = max(left, key=self._promise, default=None), self.findings.best()
        if trial is None or best is None:
            return trial
        return trial if self._promise(trial) > best.gain - TRUST * abs(best.gain) else None

    def _promise(self, trial: TuningTrial) -> float:
        """Return a trial's gain by its plan, corrected by what was measured."""
        return corrected(trial, self.findings.measured)

    def _left(self) -> list[TuningTrial]:
        """Return the trials that may still run."""
        section, left = self._wish.section, []
        for stage in self._stages:
            gains = [trial.gain for trial in self.findings.results if trial.stage == stage]
            most = section.tuner_num_trials - sum(t.stage == stage for t in self._running.values())
            if not is_over(gains, section.tuner_early_stopping, most):
                left += [t for t in self._space if t.stage == stage and not t.number]
        left = [trial for trial in left if not self._lack(trial) and not self._has_failed(trial)]
        return [
            t for t in left if t.others == self._wish.own or t.micro_batch in self._fastest(t, left)
        ]

    def _has_failed(self, trial: TuningTrial) -> bool:
        """Return whether one failed that needs no more memory by plan, or is alike and smaller.

        Only memory counts where the user has asked for all: a small batch may fail alone.
        """
        is_ranked = self._wish.section.tuner_type == "model_based"
        return any(
            (is_ranked and failed.row == trial.row and failed.micro_batch <= trial.micro_batch)
            or (is_exhausted(failed.outcome.reason) and trial.nbytes >= failed.nbytes > 0)
            for failed in self.findings.results
            if failed.gain == NO_GAIN
        )

    def _fastest(self, trial: TuningTrial, left: Sequence[TuningTrial]) -> list[int]:
        """Return the fastest micro-batches with a trial's settings; measured ones without plans."""
        if self._is_planned:
            known = sorted((t for t in left if t.row == trial.row), key=self._promise)
        else:
            known = [t for t in self.findings.measured if t.stage == trial.stage]
            known.sort(key=lambda t: t.gain)
        sizes = dict.fromkeys(t.micro_batch for t in reversed(known))
        return [*sizes][: self._wish.section.num_tuning_micro_batch_sizes]

    def _next_unplanned(self, left: Sequence[TuningTrial]) -> TuningTrial | None:
        """Return the next trial, stage by stage, until one is no better than the one before it."""
        before: TuningTrial | None = None
        for stage in self._stages:
            row = [t for t in self._space if t.row == (stage, self._wish.own)]
            row = [t for t in row if t in left or t.number]
            start = self._first_micro_batch if before is None else before.micro_batch
            if self._wish.micro_batches:
                found = next((trial for trial in row if not trial.number), None)
            else:
                found = next_upwards(row, start)
            running = [trial for trial in self._running.values() if trial.stage == stage]
            if found is None and not any(trial in row for trial in running):
                found = next(
                    (t for t in left if t.stage == stage and t.others != self._wish.own), None
                )
            if found is not None or running:
                return found
            now = self.findings.best(stage)
            if now is None:
                continue
            has_gained = before is None or now.gain > before.gain
            if not has_gained and not self._wish.are_chosen:
                return None
            before = now
        return None

    def _unconfirmed(self) -> TuningTrial | None:
        """Return a winner that is not what was expected: with little measured it may be luck."""
        best = self.findings.best()
        if best is None or best.runs > 1 or self._measured == self._most:
            return None
        first = min(self.findings.measured, key=lambda trial: trial.number)
        is_expected = best is first if self._most else best.others == first.others
        return None if is_expected else best

    def _tell_rest(self) -> None:
        """Say how many trials were left, and what the best of them promises."""
        rest = self._left()
        if rest and self._is_planned:
            best = max(rest, key=self._promise)
            value = abs(self._promise(best))
            why = f"the best by plan is {self._name(best)} with {value:.6g}"
            self.findings.left_out[f"each of {len(rest)} others"] = why

    # ---- one experiment ------------------------------------------------------------------------

    def _name(self, trial: TuningTrial) -> str:
        return trial.name(self._wish.at(trial.others).accumulation_of(trial.micro_batch) or 1)

    def _start(self, trial: TuningTrial, name: str) -> None:
        section, best = self._wish.section, self.findings.best()
        number = self.findings.runs + len(self._running) + 1
        self._say(f"experiment {number}: {name}")
        self._running[name], trial.number = trial, trial.number or number
        experiment = {
            "enabled": True,
            "metric": section.metric,
            "start_profile_step": section.start_profile_step,
            "end_profile_step": section.end_profile_step,
        }
        to_beat = None if best is None else abs(best.gain)
        readers = self._wish.at(trial.others).ranks
        self.runner.start(name, config_of(self._wish, trial), experiment, readers, to_beat=to_beat)

    def _finish(self) -> None:
        """Wait for an experiment, and record it; of one that is repeated, the mean counts."""
        outcome, findings = self.runner.finished(), self.findings
        trial, gain = self._running.pop(outcome.name), findings.gain_of(outcome.found)
        if not trial.runs:
            trial.outcome, trial.gain = outcome, gain
            findings.results.append(trial)
        elif gain > NO_GAIN:
            trial.gain = (trial.gain + gain) / 2
        trial.runs += 1
        took = f"{outcome.seconds:.1f} s" if outcome.is_new else "measured earlier"
        best = findings.best()
        if gain == NO_GAIN or best is None:
            self._say(f"{outcome.name} failed ({took}): {outcome.failure}")
            return
        self._say(
            f"{outcome.name}: {findings.metric} {abs(gain):.6g} {UNITS[findings.metric]} ({took});"
            f" best: {best.outcome.name} with {abs(best.gain):.6g},"
            f" {time.monotonic() - self._began:.0f} s so far"
        )

    # ---- the end -------------------------------------------------------------------------------

    def _write(self, *, is_whole: bool) -> None:
        runner = self.runner
        runner.results.mkdir(parents=True, exist_ok=True)
        text = self.findings.text(time.monotonic() - self._began, is_whole=is_whole)
        (runner.results / SUMMARY).write_text(text, encoding="utf-8")
        best = self.findings.best()
        if best is None:  # an earlier search's files would be mistaken for the best of this one
            for name in (BEST_CONFIG, BEST_COMMAND, PICTURE):
                (runner.results / name).unlink(missing_ok=True)
            return
        write_json(runner.results / BEST_CONFIG, config_of(self._wish, best))
        command = runner.command(self.best_words())
        (runner.results / BEST_COMMAND).write_text(command + "\n", encoding="utf-8")

    def best_words(self) -> tuple[str, ...]:
        """Return the program's words with the best configuration."""
        best = self.findings.best()
        assert best is not None  # otherwise the search has raised
        config = config_of(self._wish, best)
        return self.runner.words_with(config, self.runner.results / BEST_CONFIG)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + "s" * (number != 1)
