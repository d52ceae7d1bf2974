"""Access to one parameter's fp32 value, gradient and optimizer state.

"full" is the whole tensor on every rank; "local" is this rank's fragment of it as a flat tensor in
the parameter's memory order, which is row-major unless its strides say otherwise. All ranks must
call these functions together, for the same parameters in the same order, outside of forward and
backward. They return copies, or None for a parameter that no engine holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hadal.comm.collectives import broadcast_, gather_objects, sum_
from hadal.errors import UsageError
from hadal.zero.bucket import Weights
from hadal.zero.place import Place, StateSlice, exact, held_place, place_of
from hadal.zero.views import flattened

# ---- the fp32 value ------------------------------------------------------------------------------


@torch.no_grad()
def safe_get_full_fp32_param(param: nn.Parameter) -> Tensor | None:
    """Return the master of a parameter in its shape, or the weight of a frozen one, in fp32."""
    place = place_of(param)
    if place is None:
        return None
    with place.present(writes=False):
        return place.shaped(place.on_device(exact(place.joined(place.cut(place.master())))))


@torch.no_grad()
def safe_get_local_fp32_param(param: nn.Parameter) -> Tensor | None:
    """Return this rank's fragment of the master, 1-D; empty if it holds none."""
    place = place_of(param)
    if place is None:
        return None
    with place.present(writes=False):
        return place.on_device(exact(place.cut(place.master()).clone()))


@torch.no_grad()
def safe_set_full_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Set a parameter's values (rank 0's count) in its master and weight on all ranks.

    Raises:
        UsageError: `value` has another shape, or no engine holds the parameter.
    """
    place = held_place(param, "safe_set_full_fp32_param")
    _put_master(place, place.spread(value, "safe_set_full_fp32_param"))


@torch.no_grad()
def safe_set_local_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Set this rank's fragment to the values of a 1-D tensor, empty on a rank that holds none.

    If masters are whole on every rank (stage 0), rank 0's values count.

    Raises:
        UsageError: `value` has another length, or no engine holds the parameter.
    """
    place = held_place(param, "safe_set_local_fp32_param")
    with place.present():
        cut = place.cut(place.master())
        mine = place.own(value, (cut.numel(),), "safe_set_local_fp32_param").to(cut.dtype)
        _put_master(place, place.alike(place.joined(mine)))


def _put_master(place: Place, full: Tensor) -> None:
    """Put this rank's part of `full`, the same on all ranks, into the master."""
    with place.present():
        bucket, master = place.bucket, place.master()
        bucket.outdate()
        cut = place.cut(master)
        cut.copy_(place.fragment_of(full))
        if bucket.trainable and cut.numel():
            start = (cut.data_ptr() - master.data_ptr()) // master.itemsize
            bucket.write_back(start, start + cut.numel())
        if bucket.state is Weights.FULL:
            # Through the master's dtype, as in a step: rounding twice may differ from once.
            bucket.full[place.slot.offset : place.slot.stop].copy_(full.to(master.dtype))
            bucket.note_weights()


# ---- the gradient --------------------------------------------------------------------------------


@torch.no_grad()
def safe_get_full_grad(param: nn.Parameter) -> Tensor | None:
    """Return the gradient that the next update would use, in fp32 and in the parameter's shape.

    It is accumulated since the last update and averaged over all ranks (or added, if configured);
    each micro-step counts 1 / gradient_accumulation_steps. It is without the loss scale and before
    clipping. It is zero for a parameter that was not used, and None before the first backward of an
    update and for untrained parameters.
    """
    found = _gradient(param)
    return None if found is None else found[0].shaped(found[1])


@torch.no_grad()
def safe_get_local_grad(param: nn.Parameter) -> Tensor | None:
    """Return this rank's fragment of `safe_get_full_grad`: 1-D, empty if it holds none."""
    found = _gradient(param)
    return None if found is None else found[0].fragment_of(found[1]).clone()


@torch.no_grad()
def safe_set_full_grad(param: nn.Parameter, value: Tensor) -> None:
    """Replace the gradient that `safe_get_full_grad` returns (rank 0's values count).

    Raises:
        UsageError: `value` has another shape, or there is no gradient to replace.
    """
    place = held_place(param, "safe_set_full_grad")
    _put_gradient(place, place.spread(value, "safe_set_full_grad"))


@torch.no_grad()
def safe_set_local_grad(param: nn.Parameter, value: Tensor) -> None:
    """Replace this rank's fragment of the gradient: a 1-D tensor, empty if it holds none.

    Raises:
        UsageError: `value` has another length, or there is no gradient to replace.
    """
    place = held_place(param, "safe_set_local_grad")
    numel = place.fragment_of(torch.empty(place.slot.numel)).numel()
    mine = place.own(value, (numel,), "safe_set_local_grad").float()
    _put_gradient(place, place.alike(place.joined(mine)))


@torch.no_grad()
def safe_update_full_grad_vectorized(
    param_list: Iterable[nn.Parameter], update_func: Callable[[Tensor, nn.Parameter], Tensor]
) -> None:
    """Replace each gradient that exists by `update_func(gradient, parameter)`."""
    for param in param_list:
        gradient = safe_get_full_grad(param)
        if gradient is not None:
            safe_set_full_grad(param, update_func(gradient, param))


def _gradient(param: nn.Parameter) -> tuple[Place, Tensor] | None:
    """Return the mean gradient of all ranks, unscaled, 1-D in memory order, on every rank."""
    place = place_of(param)
    gradients = None if place is None else place.gradients()
    if place is None or gradients is None:
        return None
    begun, uncollected = place.agree_on(gradients)
    if not begun:
        return None
    numel, device = place.slot.numel, place.bucket.device
    total = torch.zeros(numel, dtype=torch.float32, device=device)
    reduced = gradients.reduced
    if reduced is not None and gradients.reduction.stays:
        total += exact(place.cut(reduced))
        sum_(total, place.ranks, f"the mean of the gradient of {place.slot.name}")
        total /= place.ranks.size
    elif reduced is not None:
        total = place.on_device(exact(place.joined(place.cut(reduced))))
        replicas = place.bucket.sharing.replicas
        if replicas is not None and gradients.is_of_copy:
            sum_(total, replicas, f"the mean of the gradient of {place.slot.name} over its copies")
            total /= replicas.size
    if uncollected:
        local = gradients.collected(place.index)
        part = torch.zeros_like(total) if local is None else local.to(total.dtype, copy=True)
        sum_(part, place.ranks, f"the sum of the gradients of {place.slot.name}")
        total += part * gradients.share
    return place, total / place.gradient_factor


def _put_gradient(place: Place, full: Tensor) -> None:
    gradients = place.gradients()
    begun, uncollected = (False, False) if gradients is None else place.agree_on(gradients)
    if gradients is None or not begun:
        raise UsageError(
            f"rank {place.ranks.rank}: {place.slot.name} has no gradient to replace; replace it"
            " between engine.backward(loss) and engine.step(), and only for trained parameters"
        )
    gradients.replace(place.index, full * place.gradient_factor, is_local=uncollected)


# ---- optimizer state -----------------------------------------------------------------------------


@torch.no_grad()
def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Any:
    """Return the optimizer state of a parameter under a key (`exp_avg`), in its shape, in fp32.

    State that is not elementwise (a count of steps, a factored moment) is returned unchanged. None
    before the first update and for untrained parameters.

    Raises:
        UsageError: the optimizer has no state under that key.
    """
    place = place_of(param)
    if place is None or place.trainer is None:
        return None
    with place.present(writes=False):
        return _full_state(place, optim_state_key)


def _full_state(place: Place, optim_state_key: str) -> Any:
    part = place.state_slice()
    held = gather_objects(_announced(part, optim_state_key), place.shards)
    _expect_key(place, held, optim_state_key)
    plain = [one for one in held if isinstance(one, _Plain)]
    if plain:
        return plain[0].value
    cuts = [(rank, one) for rank, one in enumerate(held) if isinstance(one, _Elements)]
    if not cuts:
        return None
    full = torch.empty(place.slot.numel, dtype=cuts[0][1].dtype, device=place.bucket.steps_on)
    covered = 0
    for rank, one in sorted(cuts, key=lambda cut: cut[1].start):
        if one.start + one.numel <= covered:
            continue
        piece = full[one.start : one.start + one.numel]
        if rank == place.shards.rank and part is not None:
            piece.copy_(part.elements(optim_state_key))
        broadcast_(
            piece,
            rank,
            place.shards,
            f"the broadcast of the {optim_state_key} of {place.slot.name}",
        )
        covered = one.start + one.numel
    return place.shaped(place.on_device(exact(full)))


@torch.no_grad()
def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Any:
    """Return this rank's fragment of that state, 1-D and possibly empty; other ranks need not call.

    If whole parameters are stepped (Muon, Adafactor), all of it is on the rank that owns the
    parameter.
    """
    place = place_of(param)
    if place is None or place.trainer is None or place.trainer.optimizer is None:
        return None
    with place.present(writes=False):
        return _local_state(place, optim_state_key)


def _local_state(place: Place, optim_state_key: str) -> Any:
    part = place.state_slice()
    if part is None:
        return torch.empty(0, device=place.bucket.device) if place.gradients() else None
    if not part.state:
        return None
    _expect_key(place, [_announced(part, optim_state_key)], optim_state_key)
    if part.is_elementwise(optim_state_key):
        return place.on_device(exact(part.elements(optim_state_key).clone()))
    return _copied(part.state[optim_state_key])


@torch.no_grad()
def safe_set_full_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    """Replace the optimizer state of a parameter under a key (rank 0's values count).

    Raises:
        UsageError: `value` has another shape, there is no such key, there is no state yet (before
            the first update), or parameters share the value, such as a count of steps.
    """
    name = "safe_set_full_optimizer_state"
    place = held_place(param, name)
    with place.present():
        part = _replaceable_slice(place, optim_state_key)
        full = place.spread(value, name)
        if part is not None:
            part.replace(optim_state_key, full[part.start : part.start + part.numel])


@torch.no_grad()
def safe_set_local_optimizer_state(
    param: nn.Parameter, value: Tensor, optim_state_key: str
) -> None:
    """Replace this rank's fragment of the state by a 1-D tensor, empty if it has none.

    If the state is whole on every rank (stage 0), all ranks must pass the same values; if there are
    several copies of it, those of the first copy count.

    Raises:
        UsageError: as in `safe_set_full_optimizer_state`.
    """
    name = "safe_set_local_optimizer_state"
    place = held_place(param, name)
    with place.present():
        part = _replaceable_slice(place, optim_state_key)
        numel = 0 if part is None else part.numel
        mine = place.alike(place.own(value, (numel,), name).clone())
        if part is not None:
            part.replace(optim_state_key, mine)


def _replaceable_slice(place: Place, key: str) -> StateSlice | None:
    """Return the slice stepped here of state that every rank may replace under this key."""
    part = place.state_slice()
    held = gather_objects(_announced(part, key), place.ranks)
    _expect_key(place, held, key)
    kinds = {type(one) for one in held if one is not None}
    if not kinds:
        raise UsageError(
            f"rank {place.ranks.rank}: the optimizer has no state for {place.slot.name} yet;"
            " set it after the first update"
        )
    if _Plain in kinds:
        raise UsageError(
            f"rank {place.ranks.rank}: {key!r} of {place.slot.name} is not elementwise, and other"
            " parameters may share it; change it in engine.optimizer.state"
        )
    return part


class _Elements(NamedTuple):
    """A rank's answer that it holds these elements of the state."""

    start: int
    numel: int
    dtype: torch.dtype


class _Plain(NamedTuple):
    """A rank's answer that the value is not elementwise."""

    value: Any


class _Missing(NamedTuple):
    """A rank's answer that the optimizer has state only under other keys."""

    keys: tuple[str, ...]


def _announced(part: StateSlice | None, key: str) -> object:
    if part is None or not part.state:
        return None
    if key not in part.state:
        return _Missing(tuple(sorted(part.state)))
    if part.is_elementwise(key):
        return _Elements(part.start, part.numel, part.state[key].dtype)
    return _Plain(_copied(part.state[key]))


def _expect_key(place: Place, held: Iterable[object], key: str) -> None:
    missing = [one for one in held if isinstance(one, _Missing)]
    if missing:
        raise UsageError(
            f"rank {place.ranks.rank}: the optimizer has no {key!r} for {place.slot.name}; it"
            f" has {', '.join(missing[0].keys)}"
        )


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


# ---- for features that do not know the sharding --------------------------------------------------


class ParameterValues:
    """Access to whole parameters of a model in an engine, at every stage."""

    def read(self, parameter: nn.Parameter) -> Tensor:
        """Return a whole parameter, in fp32. All ranks must call it, in the same order."""
        found = safe_get_full_fp32_param(parameter)
        return parameter.detach().float() if found is None else found

    def cut(self, parameter: nn.Parameter, whole: Tensor) -> Tensor:
        """Return this rank's part of new values, 1-D."""
        place = held_place(parameter, "pruning")
        return place.fragment_of(flattened(whole, place.slot)).clone()

    def put(self, parameter: nn.Parameter, part: Tensor) -> None:
        """Replace this rank's part of a parameter. All ranks must call it, in the same order."""
        safe_set_local_fp32_param(parameter, part)
