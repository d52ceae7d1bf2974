"""The tensors whose memory a bucket's parameters use, and checks that they still use it.

Parameters are views of the full buffer while it is gathered, and placeholders while it is freed. A
parameter that was given other memory has left its bucket, and a write to a placeholder is lost.
Both are errors that give the parameter's name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from hadal.device import number_of_users, unwatched
from hadal.errors import ModelError, ShardedAccessError
from hadal.zero.layout import Layout, Slot
from hadal.zero.watched import expect_values, have_values, kind_of, take_touched, watched_kind_of


class Views:
    """The parameters of one bucket and the tensors they view, at first the full buffer."""

    def __init__(
        self, parameters: Sequence[nn.Parameter], layout: Layout, full: Tensor, rank: int
    ) -> None:
        self.layout = layout
        self._parameters = parameters
        self._full = full
        self._rank = rank
        self._into_full = views_of(full, layout)
        # One element each, so that a write to one freed parameter does not change another.
        self._nans = torch.full((len(parameters),), torch.nan, dtype=full.dtype).to(full.device)
        self._placeholders = [
            self._nans[index].expand(slot.shape) for index, slot in enumerate(layout.slots)
        ]
        self._versions = [0] * len(parameters)
        self._kinds = [kind_of(parameter) for parameter in parameters]
        self._watched_kinds = [watched_kind_of(parameter) for parameter in parameters]
        self._full_users = 0
        self.look_into_full()

    def look_into_full(self) -> None:
        """Point the parameters at the full buffer."""
        self.look_at(self._into_full)

    def look_at_placeholders(self, placeholders: Sequence[Tensor] | None = None) -> None:
        """Point the parameters at placeholders, which have no values; reads are announced."""
        self.look_at(placeholders or self._placeholders)
        for parameter, kind in zip(self._parameters, self._watched_kinds, strict=True):
            parameter.__class__ = kind

    def look_at(self, values: Sequence[Tensor]) -> None:
        """Point the parameters at these values, one for each."""
        is_full = values is self._into_full
        self._full_users = 1 + len(self._into_full) * (2 if is_full else 1)
        for index, (parameter, value) in enumerate(zip(self._parameters, values, strict=True)):
            parameter.__class__ = self._kinds[index]
            parameter.data = value
            self._versions[index] = parameter._version

    def release(self) -> None:
        """Give every parameter its own memory, with its current (whole) values."""
        for parameter in self._parameters:
            parameter.data = parameter.detach().clone()

    def expect_values(self, arrive: Callable[[], object]) -> None:
        """Call `arrive` before each read, because the full buffer is still being filled."""
        for parameter in self._parameters:
            expect_values(parameter, arrive)

    def have_values(self) -> None:
        """Undo `expect_values`: the full buffer is filled."""
        for parameter in self._parameters:
            have_values(parameter)

    # ---- checks ----------------------------------------------------------------------------------

    def have_others(self, own: int) -> bool:
        """Return True if more tensors than the parameters and `own` others use the full buffer."""
        return number_of_users(self._full) > self._full_users + own

    @property
    def were_written(self) -> bool:
        """True if torch has counted a write to a parameter since it was pointed here."""
        with unwatched():
            pairs = zip(self._parameters, self._versions, strict=True)
            return any(parameter._version != version for parameter, version in pairs)

    def note_versions(self) -> None:
        """Mark all writes so far as seen."""
        self._versions = [parameter._version for parameter in self._parameters]

    def check_placeholders(self) -> None:
        """Raise an error if a freed parameter was written to, because the write is lost.

        Raises:
            ModelError: a parameter uses other memory.
            ShardedAccessError: a parameter was written to.
        """
        with unwatched():
            self.check_links(is_full=False)
            for index, parameter in enumerate(self._parameters):
                if parameter._version != self._versions[index]:
                    raise ShardedAccessError(self._lost_write(index))
            if self._may_be_written and not bool(self._nans.isnan().all()):
                raise ShardedAccessError(self._lost_write(int(self._nans.isnan().int().argmin())))

    @property
    def _may_be_written(self) -> bool:
        """True if the program got, or still has, a view of a placeholder (`parameter.data`).

        Only then are the values read, which means waiting for the device.
        """
        was_given = [take_touched(parameter) for parameter in self._parameters]
        return any(was_given) or number_of_users(self._nans) > 1 + 2 * len(self._parameters)

    def _lost_write(self, index: int) -> str:
        return (
            f"rank {self._rank}: parameter {self.layout.slots[index].name} was written to"
            " while its values were sharded over the ranks, so the write is lost. Write"
            " inside `with hadal.zero.GatheredParameters([parameter], modifier_rank=0):`."
        )

    def check_links(self, *, is_full: bool) -> None:
        """Raise `ModelError` for a parameter that is not where this bucket has pointed it."""
        with unwatched():
            for index, expected in enumerate(self._into_full if is_full else self._placeholders):
                self._check_link(index, expected)

    def _check_link(self, index: int, expected: Tensor) -> None:
        parameter = self._parameters[index]
        moved = parameter.data_ptr() != expected.data_ptr() and expected.numel() > 0
        if moved or parameter.dtype != expected.dtype:
            raise ModelError(
                f"rank {self._rank}: parameter {self.layout.slots[index].name} left its"
                f" bucket: it is now {parameter.dtype} on {parameter.device} in other memory"
                f" (expected {expected.dtype} on {expected.device}). Call .to(), .float() and"
                " similar methods before hadal.initialize, and change weights only in place."
            )


def views_of(flat: Tensor, layout: Layout) -> list[Tensor]:
    """Return a view of `flat`, 1-D in this layout, for each parameter in its shape and strides."""
    return [shaped(flat[slot.offset : slot.stop], slot) for slot in layout.slots]


def shaped(flat: Tensor, slot: Slot) -> Tensor:
    """Return a view of one parameter's elements, 1-D in memory order, in its shape and strides."""
    return flat.as_strided(slot.shape, slot.strides) if slot.order else flat.view(slot.shape)


def flattened(values: Tensor, slot: Slot) -> Tensor:
    """Return the elements of a tensor of a parameter's shape, 1-D in the parameter's memory order.

    The result is a view if they are in that order, otherwise a copy.
    """
    return (values.permute(slot.order) if slot.order else values).reshape(-1)
