"""The plan of a rank's memory in training: at out-of-memory, and beside what is measured.

After the first update the states alone are compared, which takes a millisecond. Whole updates
follow the engine's model and its latest forward, of which only shapes and dtypes are kept; the plan
runs a copy of the model without values, which needs no memory of the device.
"""

from __future__ import annotations

import json
import logging
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from hadal.comm import get_local_world_size
from hadal.config.optimizer import KINDS
from hadal.device import memory_use, total_memory
from hadal.engine.activations import copied, tensors_in
from hadal.engine.candidates import advise
from hadal.engine.clusters import cluster_named
from hadal.engine.foresight import LIBRARIES, Foresight, Moment, plan
from hadal.engine.listeners import EngineSetting
from hadal.engine.memory import job_of, optimizer_of, section_of, shard_tiers
from hadal.engine.plan import RankCounts
from hadal.listener import Forward, Listener, Update
from hadal.units import shown_nbytes
from hadal.zero.estimate import portions_of, states_of_portions

_log = logging.getLogger(__name__)

_HOST = torch.device("cpu")
_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device)
# From the second update on, the optimizer's state exists in every phase.
_COMPARED = 2
_DIFFERS = 0.05
# What libraries allocate among tensors, as cuBLAS does 32 MiB for each stream, and small batches.
_SMALL = 128 << 20


class PlannedMemory(Listener):
    """Adds the plan to errors about the device's memory, and compares it with what is measured."""

    name = "_planned_memory"

    def __init__(self, compares: bool, setting: EngineSetting) -> None:
        """Watch an engine; `compares`: log where the plan and the measured peak differ."""
        self._setting = setting
        self._compares = compares
        self._checks = setting.world.rank == 0 and not compares
        self._passing: list[weakref.ref[Tensor]] = []
        """Inputs and outputs of the latest forward."""
        self._engine: Callable[[], Any] = lambda: None
        self._forward: Forward | None = None
        """The latest forward in training, on meta; None if it cannot be kept, or was none."""

    def on_attach(self, engine: Any) -> None:
        """Keep the engine, which knows the optimizer."""
        self._engine = weakref.ref(engine)

    def before_forward(self, forward: Forward) -> None:
        """Keep the shapes and dtypes of a forward."""
        self._forward = None
        self._passing = _seen((forward.args, forward.kwargs)) if self._checks else []
        if forward.is_training and torch.is_grad_enabled():
            try:
                args, kwargs = _on_meta((forward.args, forward.kwargs))
            except Exception:  # any class of the program may be among the arguments
                _log.debug("this forward cannot be planned", exc_info=True)
            else:
                self._forward = forward._replace(args=args, kwargs=kwargs)

    def after_forward(self, output: Any) -> None:
        """Keep sight of the output, which the program may hold until after the update."""
        if self._checks:
            self._passing += _seen(output)

    def on_error(self, error: BaseException) -> None:
        """Add what the plan says to an error about the device's memory."""
        if not isinstance(error, torch.OutOfMemoryError):
            return
        try:
            note = "\n".join(self._note())
        except Exception:  # the plan runs code of the program: the error counts more
            _log.debug("no plan of the memory", exc_info=True)
            return
        if note and sys.version_info >= (3, 11):
            error.add_note(note)
        elif note:
            error.args = (f"{error}\n{note}",)

    def after_update(self, update: Update) -> None:
        """Compare the plan with the states after the first update, or the peaks of the second."""
        if self._checks and not update.skipped:  # in fp16, this waits for the device
            self._checks = False
            line = self._states_difference()
            if line:
                _log.info("memory after update %d is not as planned: %s", update.number, line)
        if not self._compares or update.number < _COMPARED:
            return
        self._compares = False
        if self._setting.world.rank != 0:
            return
        try:
            line = self._differences()
        except Exception as error:  # the plan runs code of the program
            _log.warning("memory_breakdown: the memory was not planned: %s", error)
            return
        if line:
            _log.info("memory of update %d is not as planned: %s", update.number, line)

    # ---- the plan --------------------------------------------------------------------------------

    def _planned(self) -> Foresight | None:
        """Return the plan of this rank on its device; None for a part of a model.

        Forwards of parts, and those with experts, exchange tensors with other ranks.
        """
        setting, forward = self._setting, self._forward
        buckets = setting.plan.buckets
        has_experts = any(bucket.holders.experts is not None for bucket in buckets)
        if forward is None or setting.is_split or has_experts:
            return None
        ranks, here = setting.world.size, get_local_world_size()
        on_node = here if here and ranks % here == 0 else ranks
        there = total_memory(setting.device)
        cluster = replace(
            cluster_named("h100x8"),
            devices_per_node=on_node,
            device_nbytes=there.total,
            host_nbytes=total_memory(_HOST).total,
        )
        model = copied(setting.model, torch.device("meta"))
        found = plan(model, self._raw(), forward, cluster=cluster, nodes=ranks // on_node)
        # What other processes and this one's libraries hold is known here; the plan assumes it.
        room = min(there.total, there.free + torch.accelerator.memory_reserved(setting.device))
        libraries = found.total.device - _needed(found).total
        return replace(found, cluster=replace(cluster, device_nbytes=room + libraries))

    def _raw(self) -> dict[str, Any]:
        """Return the configuration, with the program's own optimizer if its name is known."""
        config = self._setting.config
        raw = config.as_dict()
        if config.origins.get("zero_optimization.overlap_comm") == "inferred":
            raw["zero_optimization"]["overlap_comm"] = None  # another stage infers another value
        if raw["optimizer"] is None:
            raw["optimizer"] = section_of(getattr(self._engine(), "optimizer", None))
        return raw

    # ---- out of memory ---------------------------------------------------------------------------

    def _note(self) -> Iterator[str]:
        found = self._planned()
        if found is None:
            return
        peak = _needed(found)
        room = found.cluster.device_nbytes - found.total.device + peak.total
        where = f"{peak.phase} of {peak.unit}" if peak.unit else peak.phase
        yield (
            f"rank {self._setting.world.rank}: the plan of this batch needs"
            f" {shown_nbytes(peak.total)} of the device at its peak, in {where}:"
            f" {_listed(peak)}. {_shown_room(self._setting.device, room)}"
        )
        if found.fits:
            yield (
                "It would fit. The rest is in tensors that the program keeps (losses, outputs), or"
                " outside of the model (a loss from logits)"
            )
            return
        changes = advise(found)
        if not changes:
            yield "No change of ds_config.json that is known helps"
            return
        enough = "it fits" if changes[-1].after.fits else "it needs less, and still does not fit"
        yield f"With these changes of ds_config.json, each on top of those before, {enough}:"
        for change in changes:
            left = shown_nbytes(_needed(change.after).total)
            yield (
                f"  {change.what}: {json.dumps(change.patch)} saves"
                f" {shown_nbytes(change.saved.device)}, and {left} are needed"
            )

    # ---- beside what was measured ----------------------------------------------------------------

    def _states_difference(self) -> str:
        """Return the states' memory, measured and planned, between updates; "" if it is as planned.

        Buffers of the model, and tensors that passed the forward and are still there, are known.
        """
        setting, config, moments = self._setting, self._setting.config, self._moments()
        if moments is None:
            return ""
        counts = RankCounts.of(config, setting.sharding.size)
        portions = portions_of(setting.plan.buckets, counts.shards_of, moments)
        second = job_of(config, setting.world.size, 1).second_copy_devices
        states = states_of_portions(portions, shard_tiers(config, moments), second)._asdict()
        del states["gradients"]  # freed after each update
        others = [*setting.model.buffers(), *(seen() for seen in self._passing)]
        here = [one for one in others if one is not None and one.device == setting.device]
        storages = [one.untyped_storage() for one in here]
        held = {kind: nbytes.device for kind, nbytes in states.items()}
        held["tensors"] = sum({s.data_ptr(): s.nbytes() for s in storages}.values())
        planned = Moment("", "", held)
        measured = memory_use(setting.device).device
        if abs(measured - planned.total) <= max(_SMALL, _DIFFERS * planned.total):
            return ""
        return (
            f"{shown_nbytes(measured)} of the device, planned {shown_nbytes(planned.total)}"
            f" ({_listed(planned)}). Other tensors of the program count; memory_breakdown compares"
            " a whole update"
        )

    def _moments(self) -> int | None:
        """Return how many values the optimizer keeps for an element; None if that is not known."""
        if self._setting.config.optimizer is not None:
            return optimizer_of(self._setting.config)[1]
        optimizer: Any = getattr(self._engine(), "optimizer", None)
        kind = KINDS.get(type(optimizer).__name__)
        state = None if kind is None else kind.state_with(optimizer.defaults)
        return None if state is None else len(state)

    def _differences(self) -> str:
        """Return the phases in which the measured peak is not as planned; "" if there is none."""
        planned = self._planned()
        if planned is None:
            return ""
        gauges, moments = self._setting.clocks.memory, planned.moments
        inputs = sum(tensor.nbytes for tensor in tensors_in(self._forward))
        first = moments[0]
        states = first._replace(held={**first.held, "activations": inputs, "gathers": 0})
        compared = [("before forward", gauges["forward"].before.device, states)]
        for phase, gauge in gauges.items():
            here = (moment for moment in moments if moment.phase == phase)
            peak = max(here, key=lambda moment: moment.total)
            compared.append((phase, gauge.after.device_peak, peak))
        found = []
        for where, measured, moment in compared:
            said = _without(moment, *LIBRARIES, "fragments")
            if abs(said.total - measured) > _DIFFERS * measured:
                shown = f"{where} {shown_nbytes(measured)}, planned {shown_nbytes(said.total)}"
                found.append(f"{shown} ({_listed(said)})")
        return "; ".join(found)


def _seen(value: Any) -> list[weakref.ref[Tensor]]:
    return [*map(weakref.ref, tensors_in(value))]


def _needed(found: Foresight) -> Moment:
    """Return the peak without what libraries hold, of which only the plan has to assume it."""
    assert found.peak is not None  # there is a batch
    return _without(found.peak, *LIBRARIES)


def _without(moment: Moment, *kinds: str) -> Moment:
    return moment._replace(held={k: n for k, n in moment.held.items() if k not in kinds})


def _listed(moment: Moment) -> str:
    kinds = sorted(moment.held.items(), key=lambda pair: -pair[1])
    return ", ".join(f"{kind} {shown_nbytes(nbytes)}" for kind, nbytes in kinds if nbytes)


def _shown_room(device: torch.device, room: int) -> str:
    total, used = total_memory(device).total, memory_use(device).device
    return (
        f"Of its {shown_nbytes(total)}, {shown_nbytes(room)} are for tensors, which held"
        f" {shown_nbytes(used)} when the error was caught"
    )


def _on_meta(value: Any) -> Any:
    """Return arguments with meta tensors; nothing of the program's is kept alive.

    Raises:
        TypeError: they contain an object that may hold tensors.
    """

    def bare(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return torch.empty(leaf.shape, dtype=leaf.dtype, device="meta")
        if isinstance(leaf, Mapping):
            return {key: _on_meta(item) for key, item in leaf.items()}
        if isinstance(leaf, _PLAIN):
            return leaf
        raise TypeError(f"a {type(leaf).__name__} among the arguments of a forward")

    return tree_map(bare, value)
