"""Loading: from a source of any writer and any number of ranks into the running program.

Every rank first looks up, checks and tries everything; only then does any rank change anything.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from hadal.checkpoint import folders, randomness
from hadal.checkpoint.contents import BUFFER, MASTER, WEIGHT
from hadal.checkpoint.files import parsing_errors
from hadal.checkpoint.formats.registry import open_source
from hadal.checkpoint.index import INDEX
from hadal.checkpoint.live import COUNTERS, LISTENERS, Live, plain_name
from hadal.checkpoint.opening import Asked, joined
from hadal.checkpoint.reads import (
    Fit,
    GroupFit,
    Reading,
    StatePlan,
    exact_kind,
    fit_groups,
    fit_names,
    plan_bucket,
    plan_state,
)
from hadal.checkpoint.source import RankState, Source
from hadal.checkpoint.storage import Location
from hadal.checkpoint.together import together
from hadal.comm import Ranks, get_local_world_size
from hadal.comm.collectives import gather_objects
from hadal.device.memory import free_host_nbytes
from hadal.errors import CheckpointError, few
from hadal.optim.schedules import restorer
from hadal.zero.bucket import Bucket

_log = logging.getLogger(__name__)
# This fraction (1/n) of the host's free memory may be used to avoid reading files twice.
_SPARED = 4

CustomLoad = Callable[..., Any]


class Wanted(NamedTuple):
    """The parts of a checkpoint to load."""

    strict: bool = True
    optimizer: bool = True
    """Optimizer state, the options of param groups, and the loss scale."""
    schedule: bool = True
    module_only: bool = False
    """Load only weights, masters and buffers."""
    custom: CustomLoad | None = None
    """A function that loads weights and buffers into the module instead of Hadal."""

    @property
    def with_optimizer(self) -> bool:
        """True if the optimizer's state is loaded."""
        return self.optimizer and not self.module_only


class Loaded(NamedTuple):
    """The loaded values that the engine has to apply."""

    scalars: Any
    """None if the checkpoint has none, or they are not wanted."""
    client_state: dict[str, Any]
    jobs: tuple[str, ...] = ()
    """The jobs of the run that saved it; see `keep.JOBS`."""


@dataclass(slots=True)
class _LoadPlan:
    """The changes to make on this rank."""

    fit: Fit
    readings: list[Reading] = field(default_factory=list)
    loaded_on_use: list[Bucket] = field(default_factory=list)
    """Buckets on disk: their reads are planned again once they are in memory."""
    wholes: list[tuple[Tensor, str, str]] = field(default_factory=list)
    """Tensors outside buckets, with the saved name and kind of each."""
    groups: list[GroupFit] = field(default_factory=list)
    memory: StatePlan = field(default_factory=StatePlan)
    own: RankState | None = None
    client_state: dict[str, Any] = field(default_factory=dict)


def find(
    load_dir: Location, tag: str | None, ranks: Ranks, *, prefers_universal: bool = False
) -> Location | None:
    """Return the folder of the checkpoint `tag`, or of the latest; None if there is none.

    With `prefers_universal` the latest is the one that `latest_universal` names, if it is there.

    Raises:
        CheckpointError: the checkpoint that `tag` or `latest` names does not exist, or the ranks
            find different ones.
    """
    folder: Location | None = None
    with together(ranks, f"no checkpoint was loaded from {load_dir}"):
        if tag is None and prefers_universal:
            tag = folders.universal_tag(load_dir)
        folder = folders.find(load_dir, tag)
    found = gather_objects(None if folder is None else folder.name, ranks)
    if len(set(found)) > 1:
        raise CheckpointError(
            f"the ranks find different checkpoints in {load_dir}: {found}; they must all see the"
            " same one: pass its tag, load_checkpoint(folder, tag)"
        )
    return folder


def load(folder: Location, live: Live, wanted: Wanted) -> Loaded:
    """Load a checkpoint into `live`. All ranks must call it.

    Raises:
        CheckpointError: on every rank, with the file and the reason. Nothing has changed, unless
            a file was removed or changed after it had been verified, which the message says.
    """
    live.runtime.reshard_all()
    world, what = live.world, f"checkpoint {folder} was not loaded"
    with ExitStack() as stack:
        with together(world, what):
            names = live.group_names() if wanted.with_optimizer else None
            opened = open_source(folder, names=names)
            stack.callback(opened.close)
            aliases = {first: others for first, *others in live.names().values()}
            asked = Asked(live.placements(), aliases, frozenset(), live.part, live.parts)
        # One rank of each part sends the names that it asks for, if there may be other parts.
        sends = live.has_experts or live.ranks.rank == 0
        sends &= live.parts > 1 or opened.parts > 1 or live.has_experts
        sent = {box.name for one in asked.placements.values() for box in one.boxes if sends}
        found = gather_objects((opened.mark, sent), world)
        verify = None
        with together(world, what):
            if len({mark for mark, _ in found}) > 1:
                raise CheckpointError(f"the ranks see different checkpoints under {folder}")
            elsewhere = frozenset(name for _, names in found for name in names)
            source = _fitted(opened, replace(asked, elsewhere=elsewhere), live)
            stack.callback(source.close)
            if live.rules.verifies and not live.rules.is_node_local:
                verify = partial(source.verify, world.rank, world.size, room=_room(world))
        return load_from(source, live, wanted, what, verify)


def _fitted(source: Source, asked: Asked, live: Live) -> Source:
    """Return the saved part that is this rank's, or what this rank asks of all parts.

    Raises:
        CheckpointError: the checkpoint is in other parts, and nothing says what each of them is.
    """
    if source.parts == live.parts and not live.has_experts:
        own = source.of_part(live.part)
        boxes = {name: one for name, one in asked.placements.items() if not one.is_plain(name)}
        saved = {name for name, kind in own.entries if kind in (WEIGHT, MASTER, BUFFER)}
        has_names = live.parts == 1 or saved == asked.placements.keys()
        # Parts of which nothing says what they are fit each other alone.
        if (own.placements == boxes and has_names) or own.unknown or live.unknown_places():
            return own
    if unknown := live.unknown_places():
        raise CheckpointError(
            f"{source.path} holds a model in {source.parts} model-parallel parts, but this one has"
            f" {live.parts}, and nothing says which part of the whole model {few(sorted(unknown))}"
            " is here: set parameter.hadal_box (hadal.zero.boxes) before initialize, or load it"
            " with the model-parallel size that saved it"
        )
    return joined(source, asked)


def _room(world: Ranks) -> int:
    """Return the host memory that this rank may use temporarily to read files only once."""
    return free_host_nbytes() // (_SPARED * (get_local_world_size() or world.size))


def load_from(
    source: Source, live: Live, wanted: Wanted, what: str, verify: Callable[[], None] | None = None
) -> Loaded:
    """Load as `load` does, from any source; `verify` checks its files while the load is planned."""
    undo: list[Callable[[], None]] = []
    plan: _LoadPlan | None = None
    try:
        with together(live.world, what):
            plan = _plan_while(verify, partial(_plan, source, live, wanted))
            if live.rules.verifies and live.rules.is_node_local:
                source.verify(spread=False, room=_room(live.world))
            _try_schedule(source, live, wanted)
            _try_loader(source, plan, live, wanted, undo)
            _try_extra_state(source, plan, live, wanted, undo)
            _try_listeners(source, live, wanted, undo)
    except CheckpointError:
        for act in reversed(undo):
            act()
        raise
    assert plan is not None  # else it would have raised
    if live.ranks.rank == 0 and live.part == 0:
        for line in _differences(source, plan, live, wanted):
            _log.warning("%s: %s", source.path, line)
    _change(source, plan, live, wanted)
    scalars = None if wanted.module_only else source.scalars
    return Loaded(scalars, plan.client_state, source.jobs)


# ---- looking ahead -------------------------------------------------------------------------------


def _plan_while(verify: Callable[[], None] | None, plan: Callable[[], _LoadPlan]) -> _LoadPlan:
    """Plan while a thread verifies, which mostly waits for the disk.

    Damage found by `verify` is raised in preference to a planning error that it causes.
    """
    if verify is None:
        return plan()
    with ThreadPoolExecutor(1, "hadal-verifier") as pool:
        verified = pool.submit(verify)
        try:
            return plan()
        finally:
            verified.result()


def _plan(source: Source, live: Live, wanted: Wanted) -> _LoadPlan:
    with parsing_errors(f"{source.path / INDEX} is damaged"):
        return _planned(source, live, wanted)


def _planned(source: Source, live: Live, wanted: Wanted) -> _LoadPlan:
    if source.scalars is not None and not _is_usable(source.scalars, live.scalars):
        raise ValueError(f"the engine's counters are {source.scalars}")
    plan = _LoadPlan(_fit(source, live))
    if wanted.custom is None:
        plan.fit.refuse(source, strict=wanted.strict)
        _plan_weights(source, plan, live)
    groups = live.group_names()
    plan.groups = fit_groups(groups, source.groups, plan.fit.found)
    if live.optimizer is not None and live.stepper is not None and wanted.with_optimizer:
        plan.memory = plan_state(live.optimizer, live.stepper.held(), plan.fit.found, source)
    plan.client_state = source.client_state()
    plan.own = source.own(live.ranks.rank % source.ranks_of_part)
    if not wanted.module_only and plan.own is not None:
        try:
            randomness.check(plan.own.random)
        except (ValueError, TypeError, KeyError, RuntimeError) as error:
            raise CheckpointError(
                f"{source.path}: the random generators of rank {live.ranks.rank} cannot be"
                f" restored: {error!r}"
            ) from error
    return plan


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


def _plan_weights(source: Source, plan: _LoadPlan, live: Live) -> None:
    found = plan.fit.found
    for bucket in live.runtime.buckets:
        uses_masters = live.rules.uses_masters
        readings = plan_bucket(bucket, found, source, uses_masters=uses_masters)
        if bucket.loads_on_use:
            deque(readings, maxlen=0)  # only for the errors it raises
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
                f" but {value.dtype} in the model; it is in no bucket and is not converted"
            )
        source.expect(saved, kind, 0, value.numel())
        plan.wholes.append((value, saved, kind))


def _try_schedule(source: Source, live: Live, wanted: Wanted) -> None:
    """Check that the schedule's state fits: load it, and take that back."""
    if not _wants_schedule(source, live, wanted):
        return
    restore = restorer(live.schedule, deepcopy(live.schedule.state_dict()))
    groups = [] if live.optimizer is None else live.optimizer.param_groups
    options = [
        {k: v.clone() if isinstance(v, Tensor) else v for k, v in group.items() if k != "params"}
        for group in groups
    ]
    try:
        _load_schedule(source, live)
    finally:
        restore()
        for group, values in zip(groups, options, strict=True):
            _restore_group(group, values)


def _wants_schedule(source: Source, live: Live, wanted: Wanted) -> bool:
    is_wanted = wanted.schedule and not wanted.module_only
    return is_wanted and live.schedule is not None and source.schedule is not None


def _load_schedule(source: Source, live: Live) -> None:
    try:
        live.schedule.load_state_dict(deepcopy(source.schedule))
    except Exception as error:  # the schedule may be the user's own code
        raise CheckpointError(
            f"{source.path}: the state of the schedule does not fit {type(live.schedule).__name__}"
            f" ({error!r}); pass load_lr_scheduler_states=False"
        ) from error
    # torch's schedules keep a rate per group and accept any number of them.
    rates = getattr(live.schedule, "base_lrs", None)
    groups = 0 if live.optimizer is None else len(live.optimizer.param_groups)
    if isinstance(rates, list) and len(rates) != groups:
        raise CheckpointError(
            f"{source.path}: the saved schedule has {len(rates)} param groups, but there are"
            f" {groups}; pass load_lr_scheduler_states=False"
        )


def _try_loader(
    source: Source, plan: _LoadPlan, live: Live, wanted: Wanted, undo: list[Callable[[], None]]
) -> None:
    """Load the position in the data while everything can still be undone."""
    if wanted.module_only or plan.own is None or plan.own.loader is None or live.loader is None:
        return
    state = dict(plan.own.loader)
    if source.ranks_of_part != live.ranks.size:
        # One replica's stream state is meaningless with another number of replicas.
        state.pop("stream", None)
        state.pop("sampler", None)
    undo.append(partial(live.loader.load_state_dict, deepcopy(live.loader.state_dict())))
    live.loader.load_state_dict(state)


def _try_extra_state(
    source: Source, plan: _LoadPlan, live: Live, wanted: Wanted, undo: list[Callable[[], None]]
) -> None:
    """Load the modules' extra state while everything can still be undone."""
    if plan.own is None or wanted.custom is not None:
        return
    for path, module in live.with_extra_state():
        if path not in plan.own.extra:
            if wanted.strict:
                raise CheckpointError(
                    f"{source.path} lacks the extra state of {path or 'the model'}; pass"
                    " load_module_strict=False to load the rest"
                )
            continue
        undo.append(partial(module.set_extra_state, deepcopy(module.get_extra_state())))
        module.set_extra_state(plan.own.extra[path])


def _try_listeners(
    source: Source, live: Live, wanted: Wanted, undo: list[Callable[[], None]]
) -> None:
    """Load the state of listeners while everything can still be undone."""
    if wanted.module_only or source.scalars is None:
        return
    for name, saved in (source.scalars.get(LISTENERS) or {}).items():
        listener = live.listeners.get(name)
        if listener is None:
            continue
        before = deepcopy(listener.state_dict())
        if before is not None:
            undo.append(partial(listener.load_state_dict, before))
        try:
            listener.load_state_dict(deepcopy(saved))
        except Exception as error:  # the listener may be the user's own code
            raise CheckpointError(
                f"{source.path}: the state of listener {name!r} does not fit"
                f" {type(listener).__name__}: {error!r}; to load the rest, add the listener after"
                " load_checkpoint"
            ) from error


# ---- changing ------------------------------------------------------------------------------------


def _change(source: Source, plan: _LoadPlan, live: Live, wanted: Wanted) -> None:
    if wanted.custom is not None:
        _load_by(wanted.custom, source, plan, live)
    # No rank goes on before all have read: later steps wait for other ranks and may remove files.
    with together(live.world, f"{source.path} was only partly loaded; load it again, or another"):
        _read(source, plan, live, wanted)
    live.runtime.after_load()
    if wanted.with_optimizer and _fits_exchange(source, plan.own, live):
        assert live.runtime.exchange is not None and plan.own is not None  # it fits
        live.runtime.exchange.remember(plan.own.exchange)
    if _wants_schedule(source, live, wanted):
        _load_schedule(source, live)
    if plan.own is not None and not wanted.module_only:
        randomness.restore(plan.own.random, live.ranks.rank // source.ranks_of_part)


def _read(source: Source, plan: _LoadPlan, live: Live, wanted: Wanted) -> None:
    """Read all planned values into their targets."""
    for reading in plan.readings:
        reading()
    for bucket in plan.loaded_on_use:
        with live.present(bucket):
            found, uses_masters = plan.fit.found, live.rules.uses_masters
            for reading in plan_bucket(bucket, found, source, uses_masters=uses_masters):
                reading()
    for value, name, kind in plan.wholes:
        value.copy_(source.read_own(name, kind, live.ranks.rank % source.ranks_of_part))
    if live.optimizer is not None and wanted.with_optimizer:
        _restore_optimizer(live, live.optimizer, source, plan)


def _fits_exchange(source: Source, own: RankState | None, live: Live) -> bool:
    """Return whether each rank can continue with its own optimizer's unsent updates."""
    if live.runtime.exchange is None or own is None or own.exchange is None:
        return False
    return source.ranks_of_part == live.ranks.size and live.runtime.exchange.fits(own.exchange)


def _restore_optimizer(live: Live, optimizer: Optimizer, source: Source, plan: _LoadPlan) -> None:
    # As torch's, new dicts: those that the program has kept tell their former options.
    groups = optimizer.param_groups[:] = [dict(group) for group in optimizer.param_groups]
    for group, fit in zip(groups, plan.groups, strict=True):
        _restore_group(group, fit.options)
    restored = {memory.values for memory in plan.memory.states}
    for values in [*optimizer.state]:
        if values not in restored:
            del optimizer.state[values]
    bucket_of = {held.values: held.bucket for held in live.stepper.held()} if live.stepper else {}
    # In the order of the buckets: a bucket on disk is then loaded once.
    for bucket, states in groupby(plan.memory.states, lambda one: bucket_of[one.values]):
        with live.present(bucket):
            for memory in states:
                memory.restore(optimizer, source)


def _load_by(custom: CustomLoad, source: Source, plan: _LoadPlan, live: Live) -> None:
    """Let the caller's function load whole values into the module."""
    state = {}
    # The function gets the module's own names.
    values = (*live.module.named_parameters(), *live.module.named_buffers())
    called = {plain_name(name): name for name, _ in values}
    for name, saved in plan.fit.found.items():
        kind = BUFFER if (saved, BUFFER) in source.entries else WEIGHT
        if kind == WEIGHT:
            kind = exact_kind(saved, source, uses_masters=live.rules.uses_masters)
        value = source.read_own(saved, kind, live.ranks.rank % source.ranks_of_part)
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


# ---- reporting -----------------------------------------------------------------------------------


def _differences(source: Source, plan: _LoadPlan, live: Live, wanted: Wanted) -> Iterator[str]:
    if wanted.custom is None and not wanted.strict:
        if plan.fit.missing:
            yield f"it lacks {few(plan.fit.missing)}: these keep their values"
        if plan.fit.unexpected:
            yield f"not in the model and ignored: {few(plan.fit.unexpected)}"
    if plan.memory.forgotten:
        yield f"it holds no optimizer state of {few(plan.memory.forgotten)}: this starts at zero"
    disputed = {key for fit in plan.groups for key in fit.disputed}
    if disputed and wanted.with_optimizer:
        yield (
            "the param groups have changed; options on which the saved groups of one group"
            f" disagree keep their values here: {', '.join(sorted(disputed))}"
        )
    has_masters = any(kind == MASTER for _, kind in source.entries)
    wants_masters = any(b.trainable and b.precision.keeps_master for b in live.runtime.buckets)
    if wants_masters and (not has_masters or not live.rules.uses_masters):
        yield "masters are initialized from the saved weights"
    if not wanted.module_only:
        yield from source.notes
        yield from _differences_of_place(source, plan.own, live)
    own = plan.own if live.runtime.exchange is not None and wanted.with_optimizer else None
    owes = own is not None and own.exchange is not None
    if owes and not _fits_exchange(source, own, live):
        yield (
            "it was saved by other ranks or from other buckets: the saved error feedback does not"
            " fit, and starts at zero"
        )
    if not wanted.module_only:
        yield from _differences_of_engine(source, live)


def _differences_of_place(source: Source, own: RankState | None, live: Live) -> Iterator[str]:
    if own is None:
        return
    if (own.loader is None) != (live.loader is None):
        holder, lacks = ("engine", "checkpoint") if own.loader is None else ("checkpoint", "engine")
        yield (
            f"the {holder} has a training loader but the {lacks} has none; the position in the data"
            " is not restored (create the loader before load_checkpoint)"
        )
    saved, here = source.ranks_of_part, live.ranks.size
    if saved != here:
        yield (
            f"saved by {saved} ranks and loaded by {here}: each rank restores the random generators"
            " of the saved rank of its number; additional ranks get new ones derived from these"
        )


def _differences_of_engine(source: Source, live: Live) -> Iterator[str]:
    saved: Mapping[str, Any] = source.scalars or {}
    if saved:
        found, known = set(_numbers_of(saved)), set(_numbers_of(live.scalars))
        if known - found:
            yield f"it lacks {few(sorted(known - found))}: these start at their defaults"
        if found - known:
            yield (
                f"it has {few(sorted(found - known))}, which this version of Hadal does not know:"
                " these are ignored"
            )
    states = set(saved.get(LISTENERS, {}))
    stateful = {name for name, one in live.listeners.items() if one.state_dict() is not None}
    if states - set(live.listeners):
        yield (
            f"it holds the state of listeners {few(sorted(states - set(live.listeners)))}, which"
            " the engine lacks; add them, or switch on their sections, before load_checkpoint"
        )
    if stateful - states:
        yield f"it lacks the state of listeners {few(sorted(stateful - states))}: they start anew"


def _numbers_of(scalars: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of an engine's saved numbers."""
    for section, values in scalars.items():
        if section == COUNTERS:
            yield from (f"the counter {name}" for name in values)
        elif section != LISTENERS:
            count = len(values) if isinstance(values, list) else 0
            yield from (f"number {number} of the {section}" for number in range(count))


def _is_usable(found: Any, wanted: Mapping[str, Any]) -> bool:
    """Return whether the engine's numbers are there and finite, and listeners' state is by name.

    Single numbers may be missing, or unknown: versions of Hadal differ in what they count.
    """
    if not isinstance(found, dict) or not isinstance(found.get(LISTENERS, {}), dict):
        return False
    return wanted.keys() <= found.keys() and _is_like(found, wanted)


def _is_like(found: Any, wanted: Any) -> bool:
    """Return whether what both have has the same structure, of finite numbers."""
    if isinstance(wanted, dict):
        return isinstance(found, dict) and all(
            _is_like(found[key], value) for key, value in wanted.items() if key in found
        )
    if isinstance(wanted, list):
        pairs = zip(found, wanted, strict=False) if isinstance(found, list) else None
        return pairs is not None and all(_is_like(*pair) for pair in pairs)
    is_number = isinstance(found, (int, float)) and not isinstance(found, bool)
    return is_number and math.isfinite(found)
