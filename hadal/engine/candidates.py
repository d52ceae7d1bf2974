"""Plans of one model under many configurations: usual stages, a search, changes that help."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from enum import Enum
from functools import reduce
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_map_only

from hadal.config import Config
from hadal.config.optimizer import KINDS
from hadal.config.section import leaves
from hadal.engine.activations import tensors_in
from hadal.engine.clusters import ComputeCluster
from hadal.engine.foresight import LIBRARIES, Foresight, Planner
from hadal.engine.listeners import GivenArguments
from hadal.engine.policies import dtype_named
from hadal.engine.precision import cast_floats
from hadal.errors import HadalError, ModelError, NotBuiltYetError
from hadal.zero.estimate import PLANS, MemoryPlan, TierBytes

_log = logging.getLogger(__name__)

# The fraction of a device's memory that is for all but activations, if these are not planned.
_ROOM = 0.8


def plan_stages(
    planner: Planner, batch: Any = None, precision: str = "bf16"
) -> dict[MemoryPlan, Foresight]:
    """Plan a model under each of `PLANS`, with Adam and default keys; `batch` as in `plan`.

    Floating-point inputs are planned in the precision, which a program would cast them to.
    """
    found, batch = {}, cast_floats(batch, dtype_named(precision) or torch.float32)
    rows = next((len(tensor) for tensor in tensors_in(batch) if tensor.dim()), 1)
    for chosen in PLANS:
        raw: dict[str, Any] = {"train_micro_batch_size_per_gpu": rows}
        raw["zero_optimization"] = chosen.section("/")
        raw |= {} if precision == "fp32" else {precision: {"enabled": True}}
        found[chosen] = planner.plan(raw, batch)
    return found


class MemoryFit(Enum):
    """A classification of how a rank's memory fits into its device."""

    GOOD = "fits"
    TIGHT = "tight"
    """Less than a fifth of the device is left for activations that are not planned."""
    NONE = "does not fit"

    @classmethod
    def of(cls, found: Foresight) -> MemoryFit:
        """Return how a plan fits."""
        if not found.fits:
            return cls.NONE
        room = (1 if found.moments else _ROOM) * found.cluster.device_nbytes
        return cls.GOOD if found.total.device <= room else cls.TIGHT


def best_plan(found: Mapping[MemoryPlan, Foresight]) -> MemoryPlan | None:
    """Return the first plan that fits, else the first that fits tightly, or None."""
    fits = {chosen: MemoryFit.of(plan) for chosen, plan in found.items()}
    best = min(fits, key=lambda chosen: [*MemoryFit].index(fits[chosen]))
    return None if fits[best] is MemoryFit.NONE else best


# ---- the candidates of a search ------------------------------------------------------------------


class CandidatePlanner:
    """Plans of a model under changed configurations, with batches of other sizes."""

    def __init__(
        self, given: GivenArguments, config: Config, cluster: ComputeCluster, nodes: int
    ) -> None:
        assert given.model is not None  # a search has it copied
        self._config = config
        name = type(given.optimizer).__name__ if config.optimizer is None else ""
        self._own = {"optimizer": {"type": name}} if name in KINDS else {}
        self._computes_on_host = cluster.computes_on_host
        self._planner = Planner(given.model, cluster, nodes, requested=given.ranks)

    def plan(self, batch: Any, patches: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return bytes, seconds and samples of an update under each patch; or `failure`.

        A model that cannot run without values has bytes alone, without activations. Once a patch
        does not fit, the same with a larger micro-batch is not planned, and has nothing; nor has
        offloading from a host that computes, unless this configuration sets it.

        Args:
            batch: a micro-batch of this configuration; dimension 0 of its tensors counts samples.
            patches: keys to merge into the configuration, micro-batches among them.
        """
        steps = self._config.gradient_accumulation_steps
        raw = _as_given(self._config) | {_ACCUMULATION: steps} | self._own
        may_offload = _leaves_device(raw) or not self._computes_on_host
        try:
            self._planner.plan({k: v for k, v in raw.items() if k != _TRAIN}, batch)
        except NotBuiltYetError:
            pass  # of these ranks; others may be
        except ModelError as error:
            _log.warning("autotuning: neither times nor activations are planned: %s", error)
            batch = None
        found: list[dict[str, Any]] = [{} for _ in patches]
        too_large = []
        for number, patch in sorted(enumerate(patches), key=lambda each: each[1][_MICRO]):
            others = {k: v for k, v in patch.items() if k not in (_MICRO, _ACCUMULATION, _TRAIN)}
            if others in too_large or (_leaves_device(patch) and not may_offload):
                continue
            given = _resized(batch, self._config.train_micro_batch_size_per_gpu, patch[_MICRO])
            # Its train_batch_size follows from the rest, for ranks that only the program knows.
            changed = merged(raw, patch)
            changed.pop(_TRAIN, None)
            found[number], fits = self._planned(changed, given)
            if "memory" in found[number] and not fits:
                too_large.append(others)
        return found

    def _planned(self, raw: dict[str, Any], batch: Any) -> tuple[dict[str, Any], bool]:
        try:
            try:
                made = self._planner.plan(raw, batch)
            except NotBuiltYetError:
                made = self._planner.plan(raw, None)
        except HadalError as error:
            return {"failure": " ".join(str(error).split())}, False
        total, time = made.total, made.time
        told: dict[str, Any] = {"memory": total.device + made.cluster.computes_on_host * total.host}
        if time is not None:
            told |= {"seconds": time.seconds, "samples": time.samples}
        return told, made.fits


def _as_given(config: Config) -> dict[str, Any]:
    """Return the keys of a configuration that its user, or a program, has set."""
    found: dict[str, Any] = {}
    for path, value in leaves(config.as_dict()):
        if config.origins.get(path) in ("you", "auto"):
            *sections, key = path.split(".")
            reduce(lambda inner, name: inner.setdefault(name, {}), sections, found)[key] = value
    return found


def _resized(batch: Any, size: int, new: int) -> Any:
    """Return a batch without values, with `new` samples where there are `size`."""

    def made(tensor: torch.Tensor) -> torch.Tensor:
        rows = [new] if tensor.dim() and len(tensor) == size else list(tensor.shape[:1])
        return torch.empty([*rows, *tensor.shape[1:]], dtype=tensor.dtype, device="meta")

    return tree_map_only(torch.Tensor, made, batch)


# ---- what to change ------------------------------------------------------------------------------


class Change(NamedTuple):
    """A change of the configuration that saves memory."""

    what: str
    patch: Mapping[str, Any]
    """Keys to merge into the configuration."""
    after: Foresight
    """The plan with this change and those before it."""
    saved: TierBytes
    """Bytes saved; negative where memory moves."""


def _zero(**keys: Any) -> dict[str, Any]:
    return {"zero_optimization": keys}


_OFFLOADED = {"device": "cpu", "pin_memory": True}
_ON_DISK = {"device": "nvme", "nvme_path": "/local_nvme", "pin_memory": True}
_SMALL_BUCKETS = {
    "reduce_bucket_size": 50_000_000,
    "allgather_bucket_size": 50_000_000,
    "stage3_prefetch_bucket_size": 50_000_000,
    "stage3_max_live_parameters": 200_000_000,
    "stage3_max_reuse_distance": 200_000_000,
}
_CHANGES: tuple[tuple[str, Mapping[str, Any]], ...] = (
    ("shard the optimizer's state", _zero(stage=1)),
    ("shard gradients too", _zero(stage=2)),
    ("shard weights too", _zero(stage=3)),
    ("smaller buckets, fewer weights at a time", _zero(**_SMALL_BUCKETS)),
    ("recompute every block in backward", {"activation_checkpointing": {"modules": "units"}}),
    ("keep the optimizer's state on the host", _zero(offload_optimizer=_OFFLOADED)),
    ("keep weights on the host", _zero(stage=3, offload_param=_OFFLOADED)),
    ("keep the optimizer's state on a disk", _zero(stage=1, offload_optimizer=_ON_DISK)),
    ("keep the optimizer's state on a disk", _zero(offload_optimizer=_ON_DISK)),  # stages 2 and 3
)
"""In order of what they usually cost in time."""
_TRAIN, _MICRO = "train_batch_size", "train_micro_batch_size_per_gpu"
_ACCUMULATION = "gradient_accumulation_steps"
_WORTH = 0.01


def advise(found: Foresight) -> list[Change]:
    """Return the changes that make a plan fit, in order of their cost; all that help if none does.

    Each change that saves at least 1 % of the memory that lacks, the device's before the host's, is
    kept and the next is tried on top of it. Micro-batches are halved, with twice the micro-steps,
    before anything leaves the device, and again when something has left it. In the end, those
    without which it fits as well and is not slower are left out.
    """
    planner = found.planner.on(found.cluster)
    kept: list[_Trial] = []
    now, may_halve = found, True
    steps = [_Trial(*change) for change in _CHANGES]
    while not now.fits:
        is_next = not steps or _leaves_device(steps[0].patch)
        half = _halved(now) if is_next and may_halve else None
        if half is None and not steps:
            break
        step = half or steps.pop(0)
        if not _is_new(now, step.patch):
            continue
        try:
            after = planner.plan(merged(now.raw, step.patch), step.batch_of(now.batch))
        except HadalError:  # it does not fit this model, as one without repeated blocks
            may_halve = may_halve and step is not half
            continue
        fixed = sum(need.held.device for need in now.kinds if need.kind in LIBRARIES)
        if now.lacks.device or now.cluster.computes_on_host:
            saved, held = now.total.device - after.total.device, now.total.device - fixed
        else:
            saved, held = now.total.host - after.total.host, now.total.host
        if saved >= _WORTH * held:
            kept.append(step)
            now, may_halve = after, True  # the peak may be another kind's
        elif step is half:
            may_halve = False
    for step in kept[-2::-1] if now.fits else ():
        others = [one for one in kept if one is not step]
        without = _applied(found, others, planner)[-1]
        if without.fits and _seconds(without) <= _seconds(now):
            kept, now = others, without
    plans = [found, *_applied(found, kept, planner)]
    return [
        Change(step.what, step.patch, after, _difference(before.total, after.total))
        for step, (before, after) in zip(kept, pairwise(plans), strict=True)
    ]


def _seconds(found: Foresight) -> float:
    return 0.0 if found.time is None else found.time.seconds


class _Trial(NamedTuple):
    what: str
    patch: Mapping[str, Any]
    halves: bool = False
    """True: it halves the batch."""

    def batch_of(self, batch: Any) -> Any:
        if not self.halves:
            return batch
        return tree_map_only(torch.Tensor, lambda t: t[: len(t) // 2] if t.dim() else t, batch)


def _applied(found: Foresight, steps: Sequence[_Trial], planner: Planner) -> list[Foresight]:
    plans, raw, batch = [], found.raw, found.batch
    for step in steps:
        raw, batch = merged(raw, step.patch), step.batch_of(batch)
        plans.append(planner.plan(raw, batch))
    return plans


def _difference(one: TierBytes, other: TierBytes) -> TierBytes:
    return TierBytes(*(a - b for a, b in zip(one, other, strict=True)))


def _leaves_device(patch: Mapping[str, Any]) -> bool:
    return any("offload" in key for key in patch.get("zero_optimization", ()))


def _is_new(now: Foresight, patch: Mapping[str, Any]) -> bool:
    """Return whether a patch changes anything, and lowers no stage."""
    if now.cluster.computes_on_host and _leaves_device(patch):
        return False
    if patch.get("zero_optimization", {}).get("stage", 4) < now.memory.stage:
        return False
    if "activation_checkpointing" in patch:
        return not now.rank.planned.modules.recomputed
    return merged(now.raw, patch) != now.raw


def _halved(now: Foresight) -> _Trial | None:
    config = now.rank.config
    micro, accumulation = config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps
    if micro % 2 or now.batch is None:
        return None
    patch = {_MICRO: micro // 2, _ACCUMULATION: 2 * accumulation}
    return _Trial(f"micro-batches of {micro // 2}, twice as many", patch, halves=True)


def merged(raw: Mapping[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration with a patch: sections are merged, other values replaced."""
    found = dict(raw)
    for key, value in patch.items():
        old = found.get(key)
        found[key] = (
            merged(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
        )
    return found
