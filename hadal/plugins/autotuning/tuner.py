"""The search: profile the model, then try stage by stage, micro-batch by micro-batch."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from hadal.errors import TuningError
from hadal.plugins.autotuning.files import write_json
from hadal.plugins.autotuning.runs import METRICS, MODEL_INFO, Outcome, Runner, forget
from hadal.plugins.autotuning.search import (
    Need,
    fitted_need,
    has_gained,
    is_exhausted,
    is_over,
    largest_that_fits,
    next_trial,
    predicted_need,
    score,
)
from hadal.plugins.autotuning.space import (
    ModelSizes,
    Others,
    SearchRequest,
    TuningTrial,
    combinations,
    config_of,
    distinct,
)
from hadal.plugins.autotuning.summary import (
    BEST_COMMAND,
    BEST_CONFIG,
    SUMMARY,
    UNITS,
    Findings,
    Result,
    value_in,
)

PROFILE = "profile_model_info"
_GB = 1e9


@dataclass(frozen=True, slots=True)
class ModelProfile:
    """The profile of the model, and a rank's memory."""

    num_params: int
    trainable: int
    unit_numel: int
    """Elements of the largest module that is gathered at once; if unknown, of all."""
    activation_nbytes: int = 0
    """The activations of one forward with the first micro-batch."""
    memory_nbytes: int | None = None


StatesNbytes = Callable[[Mapping[str, Any], ModelProfile], int]
"""A function that returns the bytes of a rank's model states under a configuration."""


class Tuner:
    """A search. Its findings are valid at any time, even after it was stopped."""

    def __init__(
        self,
        wish: SearchRequest,
        runner: Runner,
        states_nbytes: StatesNbytes,
        say: Callable[[str], None],
    ) -> None:
        self.findings = Findings(wish.section.metric, [], {})
        self._wish = wish
        self.runner = runner
        self._states_nbytes = states_nbytes
        self._say = say
        self._began = time.monotonic()
        self._look = ModelProfile(0, 0, 0)
        self._scores: dict[TuningTrial, float | None] = {}

    def run(self) -> Result:
        """Search, write the findings, and return the best result.

        Raises:
            TuningError: no configuration runs.
            Stopped: a signal stopped the search. In any case the measurements are written.
        """
        if self._wish.section.overwrite:
            files = (SUMMARY, BEST_CONFIG, BEST_COMMAND)
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
            raise TuningError(f"no configuration runs:\n{reasons}")
        return best

    def _search(self) -> None:
        wish = self._wish
        self._say(
            f"experiments run one after the other, each on all {self.runner.world_size} ranks of"
            " the command"
        )
        self._look = self._look_at_model()
        before: Result | None = None
        start = wish.start
        for stage in self._stages():
            start = self._search_stage(stage, start)
            now = self.findings.best(stage)
            if now is None:
                continue
            if before is not None and not wish.are_chosen and not self._is_better(now, before):
                return
            before = now

    def _stages(self) -> tuple[int, ...]:
        """Return the stages to try: a single rank has nothing to shard."""
        wish = self._wish
        if wish.are_chosen or self.runner.world_size > 1:
            return wish.stages
        self._say("1 rank: nothing to shard, so only stage 0 is tried; list other stages to try")
        return wish.stages[:1]

    def _is_better(self, one: Result, other: Result) -> bool:
        metric = self.findings.metric
        return score(metric, one.value or 0.0) > score(metric, other.value or 0.0)

    # ---- the model's profile --------------------------------------------------------------------

    def _look_at_model(self) -> ModelProfile:
        """Measure one forward, unless the configuration gives the model's size.

        It uses the stage that shards most, which is the most likely to fit.
        """
        wish, info = self._wish, self._wish.section.model_info
        if info is not None and info.num_params is not None:
            num_params = info.num_params // wish.section.mp_size
            return ModelProfile(num_params, num_params, num_params)
        trial = TuningTrial(max(self._stages()), self._first_micro_batch())
        section: dict[str, Any] = {"profile": True}
        if info is not None:
            section |= {"hidden_size": info.hidden_size, "num_layers": info.num_layers}
        self._say(f"{PROFILE}: one forward of {trial.micro_batch} samples")
        section = {"enabled": True, "model_info": section}
        outcome = self.runner.run(PROFILE, config_of(wish, trial), section, MODEL_INFO)
        if outcome.found is None:
            self.findings.left_out[PROFILE] = outcome.failure
            raise TuningError(f"the model cannot be profiled: {outcome.failure}")
        found = outcome.found
        look = ModelProfile(
            found["num_params"],
            found["trainable_num_params"],
            found.get("largest_unit_num_params", found["num_params"]),
            found["activation_mem_per_gpu"],
            found["memory_per_gpu"],
        )
        self._say(
            f"{PROFILE}: {look.num_params:,} parameters per rank,"
            f" {look.activation_nbytes / _GB:.3g} GB of activations,"
            f" {(look.memory_nbytes or 0) / _GB:.3g} GB of memory, {outcome.seconds:.1f} s"
        )
        return look

    def _first_micro_batch(self) -> int:
        wish = self._wish
        return min(wish.micro_batches or (self._within(wish.start),))

    def _within(self, micro_batch: int) -> int:
        return max(self._wish.smallest, min(micro_batch, self._wish.largest))

    # ---- a stage -------------------------------------------------------------------------------

    def _search_stage(self, stage: int, start: int) -> int:
        """Search a stage; return the micro-batch at which the next one starts."""
        wish, section = self._wish, self._wish.section
        others = self._settings(stage)
        if wish.micro_batches:
            sizes = [m for m in wish.micro_batches if self._is_admitted(stage, m)]
        else:
            self._climb(stage, self._within(start), others[0])
            sizes = self._fastest(stage)
        space = [TuningTrial(stage, size, settings) for settings in others for size in sizes]
        while True:
            scores = [self._scores[r.trial] for r in self.findings.of(stage)]
            done = is_over(scores, section.tuner_early_stopping, section.tuner_num_trials)
            trial = None if done else next_trial(section.tuner_type, space, self._scores)
            if trial is None:
                break
            self._try(trial)
        self._confirm(stage, others[0])
        best = self.findings.best(stage)
        return start if best is None else best.trial.micro_batch

    def _settings(self, stage: int) -> list[Others]:
        """Return the other settings to try; the first are the user's own."""
        every, look = combinations(self._wish, stage), self._look
        sizes = ModelSizes(look.num_params, look.unit_numel)
        kept = distinct(every, sizes, self._wish.ranges.keys())
        if len(kept) < len(every):
            name = f"z{stage} with {len(every) - len(kept)} of {len(every)} other settings"
            why = (
                "they do the same as the ones that are tried: the largest module of this model has"
                f" {look.unit_numel:,} elements, all have {look.num_params:,}"
            )
            self.findings.left_out[name] = why
            self._say(f"{name} is left out: {why}")
        return kept

    def _confirm(self, stage: int, own: Others) -> None:
        """Measure settings that seem better than the user's own once more, and these as well.

        The best of many measurements is partly luck. Repeated ones count by their mean, so others
        may be the best then.
        """
        while True:
            best = self.findings.best(stage)
            if best is None or best.trial.others == own or best.runs > 1:
                return
            usual = replace(best.trial, others=own)
            for result in self.findings.of(stage):
                if result.trial in (best.trial, usual) and result.value is not None:
                    self._repeat(result)

    def _is_admitted(self, stage: int, micro_batch: int) -> bool:
        """Return whether to try a micro-batch of the user's list; if not, record the reason."""
        wish = self._wish
        why = ""
        if not wish.smallest <= micro_batch <= wish.largest:
            why = f"the limits allow micro-batches from {wish.smallest} to {wish.largest}"
        else:
            why = self._lack(TuningTrial(stage, micro_batch))
        if why:
            name = self._name(TuningTrial(stage, micro_batch))
            self.findings.left_out[name] = why
            self._say(f"{name} is left out: {why}")
        return not why

    def _fastest(self, stage: int) -> list[int]:
        """Return the fastest micro-batches, with which to try a stage's other settings."""
        metric = self.findings.metric
        known = [r for r in self.findings.of(stage) if r.value is not None]
        known.sort(key=lambda r: score(metric, r.value or 0.0), reverse=True)
        return [
            r.trial.micro_batch for r in known[: self._wish.section.num_tuning_micro_batch_sizes]
        ]

    # ---- the micro-batch -----------------------------------------------------------------------

    def _climb(self, stage: int, start: int, others: Others) -> None:
        """Double the micro-batch while the metric improves and it fits in memory.

        If the first one does not fit, halve it instead.
        """
        size, before, peaks = start, None, list[tuple[int, int]]()
        least_failed = self._wish.largest + 1
        for _ in range(self._wish.section.tuner_num_trials):
            result = self._try_if_it_fits(TuningTrial(stage, size, others), fitted_need(peaks))
            if result is None or result.value is None:
                is_short = result is None or is_exhausted(result.outcome.reason)
                if not is_short:
                    return
                least_failed = size
                size = (max(r[0] for r in peaks) + size) // 2 if peaks else size // 2
                if size < self._wish.smallest or any(size == tried for tried, _ in peaks):
                    return
                continue
            now = score(self.findings.metric, result.value)
            if before is not None and not has_gained(now, before):
                return
            before = now
            peaks.append((size, int((result.outcome.found or {}).get("peak_memory_per_gpu", 0))))
            size = self._next_size(size, least_failed, fitted_need(peaks))
            if any(size == tried for tried, _ in peaks):
                return

    def _next_size(self, size: int, least_failed: int, need: Need | None) -> int:
        most = min(2 * size, least_failed - 1)
        if need is not None and self._look.memory_nbytes is not None:
            fits = largest_that_fits(need, self._look.memory_nbytes)
            most = most if fits is None else min(most, fits)
        return max(size, most)

    # ---- one experiment ------------------------------------------------------------------------

    def _try_if_it_fits(self, trial: TuningTrial, need: Need | None) -> Result | None:
        why = self._lack(trial, need)
        if not why:
            return self._try(trial)
        name = self._name(trial)
        self.findings.left_out[name] = why
        self._say(f"{name} is left out: {why}")
        return None

    def _lack(self, trial: TuningTrial, need: Need | None = None) -> str:
        """Describe the memory or samples that a trial lacks; empty if it fits, or if unknown."""
        look, batch = self._look, self._wish.batch_of(trial.micro_batch)
        least = self._wish.section.min_train_batch_size
        if batch < least:
            return f"its update has {batch} samples, fewer than min_train_batch_size {least}"
        if look.memory_nbytes is None:
            return ""
        if need is None:
            states = self._states_nbytes(config_of(self._wish, trial), look)
            need = predicted_need(states, look.activation_nbytes, self._first_micro_batch())
        fits = largest_that_fits(need, look.memory_nbytes)
        if fits is None or fits >= trial.micro_batch:
            return ""
        wanted = need.at(trial.micro_batch) / _GB
        return f"it needs {wanted:.3g} GB, but a rank has {look.memory_nbytes / _GB:.3g} GB"

    def _name(self, trial: TuningTrial) -> str:
        return trial.name(self._wish.accumulation_of(trial.micro_batch) or 1)

    def _try(self, trial: TuningTrial) -> Result:
        section = self._wish.section
        outcome, value = self._measure(trial, self._name(trial))
        result = Result(trial, outcome, value)
        self.findings.results.append(result)
        self._scores[trial] = None if value is None else score(section.metric, value)
        if self._look.memory_nbytes is None and outcome.found is not None:
            known = outcome.found.get("memory_per_gpu")
            self._look = replace(self._look, memory_nbytes=known)
        self._say(self._summary_of(outcome, value))
        return result

    def _repeat(self, result: Result) -> None:
        """Measure a trial once more; its value is the mean from then on."""
        name = f"{self._name(result.trial)}_again"
        outcome, value = self._measure(result.trial, name)
        known = [each for each in (result.value, value) if each is not None]
        repeated = replace(result, value=sum(known) / len(known), runs=result.runs + 1)
        self.findings.results[self.findings.results.index(result)] = repeated
        self._say(self._summary_of(outcome, value))

    def _measure(self, trial: TuningTrial, name: str) -> tuple[Outcome, float | None]:
        section = self._wish.section
        self._say(f"experiment {self.findings.runs + 1}: {name}")
        experiment = {
            "enabled": True,
            "metric": section.metric,
            "start_profile_step": section.start_profile_step,
            "end_profile_step": section.end_profile_step,
        }
        outcome = self.runner.run(name, config_of(self._wish, trial), experiment, METRICS)
        return outcome, value_in(outcome.found, section.metric)

    def _summary_of(self, outcome: Outcome, value: float | None) -> str:
        metric = self.findings.metric
        took = f"{outcome.seconds:.1f} s" if outcome.is_new else "measured earlier"
        if value is None:
            return f"{outcome.name} failed ({took}): {outcome.failure}"
        best = self.findings.best()
        assert best is not None  # this one at least
        so_far = f"{time.monotonic() - self._began:.0f} s so far"
        return (
            f"{outcome.name}: {metric} {value:.6g} {UNITS[metric]} ({took});"
            f" best: {best.outcome.name} with {best.value:.6g}, {so_far}"
        )

    # ---- the end -------------------------------------------------------------------------------

    def _write(self, *, is_whole: bool) -> None:
        runner = self.runner
        runner.results.mkdir(parents=True, exist_ok=True)
        text = self.findings.text(time.monotonic() - self._began, is_whole=is_whole)
        (runner.results / SUMMARY).write_text(text, encoding="utf-8")
        best = self.findings.best()
        if best is None:  # an earlier search's files would be mistaken for the best of this one
            for name in (BEST_CONFIG, BEST_COMMAND):
                (runner.results / name).unlink(missing_ok=True)
            return
        config = config_of(self._wish, best.trial)
        file = runner.results / BEST_CONFIG
        write_json(file, config)
        command = runner.command(runner.words_with(config, file))
        (runner.results / BEST_COMMAND).write_text(command + "\n", encoding="utf-8")

    def best_words(self) -> tuple[str, ...]:
        """Return the program's words with the best configuration."""
        best = self.findings.best()
        assert best is not None  # otherwise the search has raised
        config = config_of(self._wish, best.trial)
        return self.runner.words_with(config, self.runner.results / BEST_CONFIG)
