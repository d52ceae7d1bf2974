"""Loading: from a source that anybody has written, at any number of ranks, into what runs here.

First all is looked up, checked and tried on every rank; only then is anything changed on one.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from hadal.checkpoint import folders, randomness
from hadal.checkpoint.contents import BUFFER, MASTER, WEIGHT
from hadal.checkpoint.deepspeed.source import DeepSpeedSource
from hadal.checkpoint.files import understanding
from hadal.checkpoint.fitting import Fit, GroupFit, exact_kind, fit_groups, fit_names
from hadal.checkpoint.live import COUNTERS, LISTENERS, Live, plain_name
from hadal.checkpoint.moments import MemoryPlan, plan_memory
from hadal.checkpoint.opening import open_source
from hadal.checkpoint.source import Own, Source
from hadal.checkpoint.stored import StoredSource
from hadal.checkpoint.together import together
from hadal.checkpoint.weights import Reading, plan_bucket
from hadal.comm import Ranks, get_local_world_size
from hadal.comm.collectives import gather_objects
from hadal.device.memory import free_host_nbytes
from hadal.errors import CheckpointError, few
from hadal.zero.bucket import Bucket

_log = logging.getLogger(__name__)
# One part in so many of the host's free memory is used to read files only once.
_SPARED = 4

CustomLoad = Callable[..., Any]


class Wanted(NamedTuple):
    """What of a checkpoint is to be loaded."""

    strict: bool = True
    optimizer: bool = True
    """Moments, the options of param groups, and the loss scale."""
    schedule: bool = True
    module_only: bool = False
    """Weights, masters and buffers alone."""
    custom: CustomLoad | None = None
    """Puts weights and buffers into the module in place of us."""


class Loaded(NamedTuple):
    """What is left for the engine to take over."""

    scalars: Any
    """None where there are none, or none are wanted."""
    client_state: dict[str, Any]


@dataclass(slots=True)
class _Plan:
    """What will be changed on this rank."""

    fit: Fit
    readings: list[Reading] = field(default_factory=list)
    loaded_on_use: list[Bucket] = field(default_factory=list)
    """Buckets on the disk: what to read into them is found again when they are in memory."""
    wholes: list[tuple[Tensor, str, str]] = field(default_factory=list)
    """Tensors outside of buckets, and the name and kind that each is read from."""
    groups: list[GroupFit] = field(default_factory=list)
    memory: MemoryPlan = field(default_factory=MemoryPlan)
    own: Own | None = None
    client_state: dict[str, Any] = field(default_factory=dict)


def find(load_dir: Path, tag: str | None, ranks: Ranks) -> Path | None:
    """The folder of the checkpoint `tag`, or of the latest one; None where there is none.

    Raises:
        CheckpointError: a tag was asked for that is not there, `latest` names a missing folder, or
            the ranks find different ones.
    """
    folder: Path | None = None
    with together(ranks, f"no checkpoint was loaded from {load_dir}"):
        folder = folders.find(load_dir, tag)
    found = gather_objects(None if folder is None else folder.name, ranks)
    if len(set(found)) > 1:
        raise CheckpointError(
            f"the ranks find different checkpoints in {load_dir}: {found}; all of them must see the"
            " same one: name it, load_checkpoint(folder, tag)"
        )
    return folder


def load(folder: Path, live: Live, wanted: Wanted) -> Loaded:
    """Put a checkpoint's values where `live` points. All ranks must call it.

    Raises:
        CheckpointError: on every rank, with the file and the reason; nothing has changed, unless a
            file went or changed after it had been verified, which is told.
    """
    live.runtime.reshard_all()
    world, what = live.world, f"checkpoint {folder} was not loaded"
    with ExitStack() as stack:
        with together(world, what):
            names = live.group_names() if _wants_optimizer(wanted) else None
            source = open_source(folder, live.part, names)
            stack.callback(source.close)
        marks = set(gather_objects(source.mark, world))
        with together(world, what):
            if len(marks) > 1:
                raise CheckpointError(f"the ranks see different checkpoints under {folder}")
            is_local = live.rules.is_node_local
            if live.rules.verifies and isinstance(source, DeepSpeedSource):
                source.verify(*((0, 1) if is_local else (world.rank, world.size)))
        verify = None
        if live.rules.verifies and isinstance(source, StoredSource) and not is_local:
            verify = partial(source.verify, world.rank, world.size, room=_room(world))
        return load_from(source, live, wanted, what, verify)


def _room(world: Ranks) -> int:
    """Host memory that this rank may take for a while, so that files are read once."""
    return free_host_nbytes() // (_SPARED * (get_local_world_size() or world.size))


def load_from(
    source: Source,
    live: Live,
    wanted: Wanted,
    what: str,
    verify: Callable[[], None] | None = None,
) -> Loaded:
    """As `load`, from any source whose files have been looked at, or are by `verify`."""
    undo: list[Callable[[], None]] = []
    plan: _Plan | None = None
    try:
        with together(live.world, what):
            plan = _plan_while(verify, partial(_plan, source, live, wanted))
            if (
                live.rules.verifies
                and live.rules.is_node_local
                and isinstance(source, StoredSource)
            ):
                source.verify(spread=False, room=_room(live.world))
            _try_schedule(source, live, wanted, undo)
            _try_loader(source, plan, live, wanted, undo)
            _try_extra_state(source, plan, live, wanted, undo)
            _try_listeners(source, live, wanted, undo)
    except CheckpointError:
        for act in reversed(undo):
            act()
        raise
    assert plan is not None  # else it would have raised
    _tell(source, plan, live, wanted)
    _change(source, plan, live, wanted)
    scalars = None if wanted.module_only else source.scalars
    return Loaded(scalars, plan.client_state)


# ---- looking ahead -------------------------------------------------------------------------------


def _plan_while(verify: Callable[[], None] | None, plan: Callable[[], _Plan]) -> _Plan:
    """Plan while a thread verifies: the disk is what that waits for.

    Files that are damaged are told as that, whatever else could not be planned because of it.
    """
    if verify is None:
        return plan()
    with ThreadPoolExecutor(1, "hadal-verifier") as pool:
        verified = pool.submit(verify)
        try:
            return plan()
        finally:
            verified.result()


def _plan(source: Source, live: Live, wanted: Wanted) -> _Plan:
    with understanding(f"{source.path / folders.INDEX} is damaged"):
        return _planned(source, live, wanted)


def _planned(source: Source, live: Live, wanted: Wanted) -> _Plan:
    if source.parts != live.parts:
        raise CheckpointError(
            f"{source.path} holds a model that was cut in {source.parts} model-parallel parts, and"
            f" this one is cut in {live.parts}; load it with the model-parallel size that saved it"
        )
    if source.scalars is not None and not _are_known(source.scalars, live.scalars):
        raise ValueError(f"the engine's counters are {source.scalars}")
    plan = _Plan(_fit(source, live))
    if wanted.custom is None:
        plan.fit.refuse(source, strict=wanted.strict)
        _plan_weights(source, plan, live)
    groups = live.group_names()
    plan.groups = fit_groups(groups, source.groups, plan.fit.found)
    if live.optimizer is not None and live.stepper is not None and _wants_optimizer(wanted):
        plan.memory = plan_memory(live.optimizer, live.stepper.held(), plan.fit.found, source)
    plan.client_state = source.client_state()
    plan.own = source.own(live.ranks.rank % _ranks_of(source))
    if not wanted.module_only and plan.own is not None:
        try:
            randomness.check(plan.own.random)
        except (ValueError, TypeError, KeyError, RuntimeError) as error:
            raise CheckpointError(
                f"{source.path}: the random generators of rank {live.ranks.rank} cannot be"
                f" restored: {error!r}"
            ) from error
    return plan


def _wants_optimizer(wanted: Wanted) -> bool:
    return wanted.optimizer and not wanted.module_only


def _ranks_of(source: Source) -> int:
    """The ranks that had saved one part."""
    return source.world_size // source.parts


def _fit(source: Source, live: Live) -> Fit:
    names = live.names()
    wanted = [
        (aliases, tuple(parameter.shape), WEIGHT)
        for parameter, aliases in names.items()
        if parameter not in live.runtime.bucket_of
    ]
    for bucket in live.runtime.buckets:
        for slot, parameter in zip(bucket.layout.slots, bucket.parameters, strict=True):
            wanted.append((names.get(parameter, [plain_name(slot.name)]), slot.shape, WEIGHT))
    wanted += [([name], tuple(buffer.shape), BUFFER) for name, buffer in live.buffers()]
    return fit_names(wanted, source)


def _plan_weights(source: Source, plan: _Plan, live: Live) -> None:
    found = plan.fit.found
    for bucket in live.runtime.buckets:
        uses_masters = live.rules.uses_masters
        readings = plan_bucket(bucket, found, source, uses_masters=uses_masters)
        if bucket.loads_on_use:
            deque(readings, maxlen=0)  # it raises what is to be raised
            plan.loaded_on_use.append(bucket)
        else:
            plan.readings += readings
    values = [(BUFFER, name, buffer) for name, buffer in live.buffers()]
    values += [(WEIGHT, name, parameter.detach()) for name, parameter in live.unmanaged()]
    for kind, name, value in values:
        if name not in found:
            continue
        saved = found[name]
        if kind == WEIGHT and source.entries[saved, kind].dtype != value.dtype:
            raise CheckpointError(
                f"{source.path}: {name} is {source.entries[saved, kind].dtype} in the checkpoint,"
                f" and {value.dtype} in the model; it lies in no bucket, and is not converted"
            )
        source.expect(saved, kind, 0, value.numel())
        plan.wholes.append((value, saved, kind))


def _try_schedule(
    source: Source, live: Live, wanted: Wanted, undo: list[Callable[[], None]]
) -> None:
    """Load the schedule's state while all can still be taken back."""
    if not _wants_schedule(source, live, wanted):
        return
    schedule, optimizer = live.schedule, live.optimizer
    before = deepcopy(schedule.state_dict())
    groups = [] if optimizer is None else optimizer.param_groups
    options = [{k: _copied(v) for k, v in group.items() if k != "params"} for group in groups]

    def take_back() -> None:
        schedule.load_state_dict(before)
        for group, values in zip(groups, options, strict=True):
            _restore_group(group, values)

    undo.append(take_back)
    _load_schedule(source, live)


def _wants_schedule(source: Source, live: Live, wanted: Wanted) -> bool:
    is_wanted = wanted.schedule and not wanted.module_only
    return is_wanted and live.schedule is not None and source.schedule is not None


def _load_schedule(source: Source, live: Live) -> None:
    try:
        live.schedule.load_state_dict(deepcopy(source.schedule))
    except Exception as error:  # whoever's schedule it is
        raise CheckpointError(
            f"{source.path}: the state of the schedule does not fit {type(live.schedule).__name__}"
            f" ({error!r}); give load_lr_scheduler_states=False"
        ) from error
    # torch's schedules keep a rate for each group, and take any number of them.
    rates = getattr(live.schedule, "base_lrs", None)
    groups = 0 if live.optimizer is None else len(live.optimizer.param_groups)
    if isinstance(rates, list) and len(rates) != groups:
        raise CheckpointError(
            f"{source.path}: the schedule was that of {len(rates)} param groups, and there are"
            f" {groups}; give load_lr_scheduler_states=False"
        )


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _try_loader(
    source: Source, plan: _Plan, live: Live, wanted: Wanted, undo: list[Callable[[], None]]
) -> None:
    """Load the place in the data while all can still be taken back."""
    if wanted.module_only or plan.own is None or plan.own.loader is None or live.loader is None:
        return
    state = dict(plan.own.loader)
    if _ranks_of(source) != live.ranks.size:
        # What one replica's stream remembers says nothing of another number of replicas.
        state.pop("stream", None)
        state.pop("sampler", None)
    before = deepcopy(live.loader.state_dict())
    undo.append(lambda: live.loader.load_state_dict(before))
    live.loader.load_state_dict(state)


def _try_extra_state(
    source: Source, plan: _Plan, live: Live, wanted: Wanted, undo: list[Callable[[], None]]
) -> None:
    """Load what modules keep beside tensors, while all can still be taken back."""
    if plan.own is None or wanted.custom is not None:
        return
    for path, module in live.with_extra_state():
        if path not in plan.own.extra:
            if wanted.strict:
                raise CheckpointError(
                    f"{source.path} lacks the extra state of {path or 'the model'}; give"
                    " load_module_strict=False to load the rest"
                )
            continue
        before = deepcopy(module.get_extra_state())
        undo.append(partial(module.set_extra_state, before))
        module.set_extra_state(plan.own.extra[path])


def _try_listeners(
    source: Source, live: Live, wanted: Wanted, undo: list[Callable[[], None]]
) -> None:
    """Load the state of listeners while all can still be taken back."""
    for name, saved in _of_listeners(source, wanted).items():
        listener = live.listeners.get(name)
        if listener is None:
            continue
        before = deepcopy(listener.state_dict())
        if before is not None:
            undo.append(partial(listener.load_state_dict, before))
        try:
            listener.load_state_dict(deepcopy(saved))
        except Exception as error:  # whoever's listener it is
            raise CheckpointError(
                f"{source.path}: the state of listener {name!r} does not fit"
                f" {type(listener).__name__}: {error!r}; to load the rest, add the listener after"
                " load_checkpoint"
            ) from error


def _of_listeners(source: Source, wanted: Wanted) -> Mapping[str, Any]:
    """The saved state of listeners by name."""
    if wanted.module_only or source.scalars is None:
        return {}
    return source.scalars.get(LISTENERS) or {}


# ---- changing ------------------------------------------------------------------------------------


def _change(source: Source, plan: _Plan, live: Live, wanted: Wanted) -> None:
    if wanted.custom is not None:
        _load_by(wanted.custom, source, plan, live)
    # Nobody goes on before all have read: what follows waits for others, and may remove the files.
    with together(live.world, f"{source.path} was loaded in part only; load it again, or another"):
        _read(source, plan, live, wanted)
    live.runtime.after_load()
    if _wants_optimizer(wanted) and _fits_exchange(source, plan.own, live):
        assert live.runtime.exchange is not None and plan.own is not None  # it fits
        live.runtime.exchange.remember(plan.own.exchange)
    if _wants_schedule(source, live, wanted):
        _load_schedule(source, live)
    if plan.own is not None and not wanted.module_only:
        randomness.restore(plan.own.random, live.ranks.rank // _ranks_of(source))


def _read(source: Source, plan: _Plan, live: Live, wanted: Wanted) -> None:
    """Read what files hold into its place."""
    for reading in plan.readings:
        reading.run(source)
    for bucket in plan.loaded_on_use:
        with live.present(bucket):
            found, uses_masters = plan.fit.found, live.rules.uses_masters
            for reading in plan_bucket(bucket, found, source, uses_masters=uses_masters):
                reading.run(source)
    for value, name, kind in plan.wholes:
        value.copy_(source.read_own(name, kind, live.ranks.rank % _ranks_of(source)))
    if live.optimizer is not None and _wants_optimizer(wanted):
        _restore_optimizer(live, live.optimizer, source, plan)


def _fits_exchange(source: Source, own: Own | None, live: Live) -> bool:
    """Whether each rank goes on with what its own optimizer had still to send."""
    if live.runtime.exchange is None or own is None or own.exchange is None:
        return False
    return _ranks_of(source) == live.ranks.size and live.runtime.exchange.fits(own.exchange)


def _restore_optimizer(live: Live, optimizer: Optimizer, source: Source, plan: _Plan) -> None:
    for group, fit in zip(optimizer.param_groups, plan.groups, strict=True):
        _restore_group(group, fit.options)
    restored = {memory.values for memory in plan.memory.memories}
    for values in [*optimizer.state]:
        if values not in restored:
            del optimizer.state[values]
    bucket_of = {held.values: held.bucket for held in live.stepper.held()} if live.stepper else {}
    # In the order of the buckets: each is read from the disk once, if it is there.
    for bucket, memories in groupby(plan.memory.memories, lambda one: bucket_of[one.values]):
        with live.present(bucket):
            for memory in memories:
                memory.restore(optimizer, source)


def _load_by(custom: CustomLoad, source: Source, plan: _Plan, live: Live) -> None:
    """Let the caller put whole values into the module."""
    state = {}
    # It finds the names that the module has for them.
    values = (*live.module.named_parameters(), *live.module.named_buffers())
    called = {plain_name(name): name for name, _ in values}
    for name, saved in plan.fit.found.items():
        kind = BUFFER if (saved, BUFFER) in source.entries else WEIGHT
        if kind == WEIGHT:
            kind = exact_kind(saved, source, uses_masters=live.rules.uses_masters)
        value = source.read_own(saved, kind, live.ranks.rank % _ranks_of(source))
        state[called.get(name, name)] = value.clone()
    with live.runtime.whole(live.runtime.buckets):
        custom(src=state, dst=live.module)
    live.runtime.reshard_all()


def _restore_group(group: dict[str, Any], saved: Mapping[str, Any]) -> None:
    for key, value in saved.items():
        if isinstance(group.get(key), Tensor):
            group[key].fill_(value)
        else:
            group[key] = value


# ---- what is told --------------------------------------------------------------------------------


def _tell(source: Source, plan: _Plan, live: Live, wanted: Wanted) -> None:
    """Say what differs from going on as before; rank 0 does."""
    if live.ranks.rank == 0 and live.part == 0:
        engine = [] if wanted.module_only else _differences_of_engine(source, live)
        for line in (*_differences(source, plan, live, wanted), *engine):
            _log.warning("%s: %s", source.path, line)


def _differences(source: Source, plan: _Plan, live: Live, wanted: Wanted) -> list[str]:
    told = []
    if wanted.custom is None and not wanted.strict:
        if plan.fit.missing:
            told.append(f"it lacks {few(plan.fit.missing)}, which keep their values")
        if plan.fit.unexpected:
            told.append(f"{few(plan.fit.unexpected)} is not in the model, and is left out")
    if plan.memory.forgotten:
        told.append(
            f"it holds no optimizer state of {few(plan.memory.forgotten)}: it begins with zeros"
        )
    disputed = {key for fit in plan.groups for key in fit.disputed}
    if disputed and _wants_optimizer(wanted):
        told.append(
            "the param groups are other ones; where those of one group here differed in"
            f" {', '.join(sorted(disputed))}, these stay as they are"
        )
    has_masters = any(kind == MASTER for _, kind in source.entries)
    wants_masters = any(b.trainable and b.precision.keeps_master for b in live.runtime.buckets)
    if wants_masters and (not has_masters or not live.rules.uses_masters):
        told.append("masters are taken from the saved weights")
    if isinstance(source, DeepSpeedSource) and not wanted.module_only:
        told += source.notes
    if plan.own is not None and not wanted.module_only:
        told += _differences_of_place(source, plan.own, live)
    own = plan.own if live.runtime.exchange is not None and _wants_optimizer(wanted) else None
    owes = own is not None and own.exchange is not None
    if owes and not _fits_exchange(source, own, live):
        told.append(
            "it was saved by other ranks, or from other buckets: what the signs of each rank had"
            " lost (error feedback) fits none of these, and begins at zero"
        )
    return told


def _differences_of_place(source: Source, own: Own, live: Live) -> list[str]:
    told = []
    if (own.loader is None) != (live.loader is None):
        holder, lacks = ("engine", "checkpoint") if own.loader is None else ("checkpoint", "engine")
        told.append(
            f"the {holder} has a training loader and the {lacks} has none; the place in the data is"
            " not restored (make the loader before load_checkpoint)"
        )
    saved, here = _ranks_of(source), live.ranks.size
    if saved != here:
        told.append(
            f"saved by {saved} ranks and loaded by {here}: ranks have the random generators of the"
            " saved ranks of their numbers, further ranks new ones made of these"
        )
    return told


def _differences_of_engine(source: Source, live: Live) -> Iterator[str]:
    saved: Mapping[str, Any] = source.scalars or {}
    counters, known = set(saved.get(COUNTERS, {})), set(live.scalars[COUNTERS])
    if counters and counters != known:
        yield (
            f"it lacks the counters {sorted(known - counters)}, which begin at zero, and has"
            f" {sorted(counters - known)}, which are left out"
        )
    states = set(saved.get(LISTENERS, {}))
    stateful = {name for name, one in live.listeners.items() if one.state_dict() is not None}
    if states - set(live.listeners):
        yield (
            f"it holds the state of listeners {few(sorted(states - set(live.listeners)))}, which"
            " the engine does not have; add them before load_checkpoint"
        )
    if stateful - states:
        yield f"it lacks the state of listeners {few(sorted(stateful - states))}: they begin anew"


def _are_known(found: Any, wanted: Mapping[str, Any]) -> bool:
    """Whether the engine's numbers are there, and the state of listeners, if any, by name."""
    if not isinstance(found, dict) or not isinstance(found.get(LISTENERS, {}), dict):
        return False
    return wanted.keys() <= found.keys() and _is_like(found, wanted)


def _is_like(found: Any, wanted: Any) -> bool:
    """Whether both are built alike, as far as both have the same keys: lists, finite numbers."""
    if isinstance(wanted, dict):
        return isinstance(found, dict) and all(
            _is_like(found[key], value) for key, value in wanted.items() if key in found
        )
    if isinstance(wanted, list):
        return (
            isinstance(found, list)
            and len(found) == len(wanted)
            and all(map(_is_like, found, wanted))
        )
    is_number = isinstance(found, (int, float)) and not isinstance(found, bool)
    return is_number and math.isfinite(found)
