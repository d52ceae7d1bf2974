"""Stepping optimizers that must see whole parameters: each on one rank, in its true shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hadal.comm.collectives import Pending, broadcast_, start_all_gather
from hadal.optim.step import append, wait_all
from hadal.zero.bucket import Bucket
from hadal.zero.gradients import Gradients
from hadal.zero.layout import share_out


class _Whole(NamedTuple):
    """One whole parameter that an optimizer sees uncut, on the rank that owns it."""

    slot: int
    owner: int
    values: nn.Parameter | None
    """None on the ranks that do not own it."""


class WholeStepper:
    """Steps optimizers that must see whole parameters of their true shape (Muon, Adafactor, ...).

    Each parameter is stepped on one rank. Flat masters stay what they are; per update an owner
    receives its parameters' gradients and gives back their new values. Where optimizer state is
    not partitioned every rank steps everything and nothing travels.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        gradients: Sequence[Gradients],
        parameters: Sequence[Sequence[nn.Parameter]],
    ) -> None:
        self._optimizer = optimizer
        self._gradients = list(gradients)
        self._ranks = gradients[0].bucket.ranks
        self._alone = not gradients[0].bucket.partition.optimizer
        flat = [(one, slot) for one in gradients for slot in range(len(one.bucket.parameters))]
        numels = [one.bucket.layout.slots[slot].numel for one, slot in flat]
        owners = share_out(numels, self._ranks.size).owners
        self._wholes: dict[Gradients, list[_Whole]] = {one: [] for one in gradients}
        owned: dict[nn.Parameter, nn.Parameter] = {}
        for (one, slot), owner in zip(flat, owners, strict=True):
            values = None
            if self._alone or owner == self._ranks.rank:
                values = self._make_values(one, slot)
                owned[one.bucket.parameters[slot]] = values
            self._wholes[one].append(_Whole(slot, owner, values))
        for group, members in zip(optimizer.param_groups, parameters, strict=True):
            group["params"] = [owned[member] for member in members if member in owned]
            for member in members:
                state = optimizer.state.pop(member, None)
                if state and member in owned:
                    optimizer.state[owned[member]] = state

    def _make_values(self, one: Gradients, slot: int) -> nn.Parameter:
        bucket = one.bucket
        master = bucket.master
        assert master is not None  # every bucket with gradients is trained
        place = bucket.layout.slots[slot]
        if self._alone:
            return nn.Parameter(master[place.offset : place.stop].view(place.shape))
        return nn.Parameter(torch.empty(place.shape, dtype=master.dtype, device=master.device))

    def step(self, multiplier: float) -> None:
        """Make one update with the mean gradients times `multiplier`."""
        for one in self._gradients:
            self._fetch(one, multiplier)
        self._optimizer.step()
        refreshing: list[Pending] = []
        for one in self._gradients:
            self._put(one)
            bucket = one.bucket
            bucket.write_back(0, bucket.span[1] - bucket.span[0])
            append(refreshing, bucket.start_refresh())
        wait_all(refreshing)

    def _fetch(self, one: Gradients, multiplier: float) -> None:
        """Give the owners the present values and the gradients of their parameters."""
        gradients = self._gathered(one.bucket, one.mean)
        master = one.bucket.master
        assert master is not None  # every bucket with gradients is trained
        values = None if self._alone else self._gathered(one.bucket, master)
        for whole in self._wholes[one]:
            if whole.values is None:
                continue
            place = one.bucket.layout.slots[whole.slot]
            part = gradients[place.offset : place.stop].view(place.shape)
            whole.values.grad = part.to(whole.values.dtype, copy=True).mul_(multiplier)
            if values is not None:
                kept = values[place.offset : place.stop].view(place.shape)
                whole.values.detach().copy_(kept)

    def _gathered(self, bucket: Bucket, cut: Tensor) -> Tensor:
        if self._alone:
            return cut
        full = torch.empty(bucket.layout.numel, dtype=cut.dtype, device=cut.device)
        full[bucket.span[0] : bucket.span[1]].copy_(cut)
        start_all_gather(full, self._ranks, f"the gather of {bucket.name} for its owners").wait()
        return full

    def _put(self, one: Gradients) -> None:
        """Bring the owners' new values back into every rank's flat master."""
        for whole in self._wholes[one]:
            if whole.values is not None:
                whole.values.grad = None
        if self._alone:
            return
        bucket = one.bucket
        master = bucket.master
        assert master is not None  # every bucket with gradients is trained
        full = torch.zeros(bucket.layout.numel, dtype=master.dtype, device=master.device)
        for owner in sorted({whole.owner for whole in self._wholes[one]}):
            mine = [whole for whole in self._wholes[one] if whole.owner == owner]
            places = [bucket.layout.slots[whole.slot] for whole in mine]
            packed = torch.empty(
                sum(place.numel for place in places), dtype=master.dtype, device=master.device
            )
            parts = packed.split([place.numel for place in places])
            for whole, part in zip(mine, parts, strict=True):
                if whole.values is not None:
                    part.copy_(whole.values.detach().reshape(-1))
            broadcast_(packed, owner, self._ranks, f"the new values of {bucket.name}")
            for place, part in zip(places, parts, strict=True):
                full[place.offset : place.stop].copy_(part)
        master.copy_(full[bucket.span[0] : bucket.span[1]])
