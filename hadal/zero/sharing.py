"""The groups of ranks around a bucket: those that average, shard, hold copies, or are near."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple, Protocol

from torch import Tensor, nn

from hadal.comm import Ranks
from hadal.comm.codecs import Codec
from hadal.comm.coded import start_coded_gather
from hadal.comm.collectives import (
    broadcast_,
    start_all_gather,
    start_gather_in_hops,
    start_scatter,
    sum_,
)
from hadal.comm.pending import Pending, finished


class Hops(NamedTuple):
    """The two groups of a gather over several nodes that sends each byte to each node once."""

    across: Ranks
    """The ranks with my position in their nodes."""
    inside: Ranks
    """The ranks of my node."""


class Tied(NamedTuple):
    """Copies of the same parameters on several pipeline stages, whose gradients are added."""

    key: str
    """The name that the copies share; copies of one name are in buckets of one layout."""
    ranks: Ranks
    """One rank of each stage that has a copy."""


class HolderGroups(NamedTuple):
    """The ranks that hold a parameter, by name: their groups need not exist."""

    experts: str | None = None
    """The name of an expert's groups; None: the parameter is dense."""
    tied: Tied | None = None
    """Pipeline stages with copies of the parameter; None: no other stage has it."""


def holders_of(parameter: nn.Parameter) -> HolderGroups:
    """Return the ranks that hold a parameter; DeepSpeed's marks tell experts."""
    tied: Tied | None = getattr(parameter, "hadal_tied", None)
    if tied is not None or getattr(parameter, "allreduce", True):
        return HolderGroups(tied=tied)
    return HolderGroups(experts=getattr(parameter, "group_name", None))


@dataclass(frozen=True)
class Sharing:
    """The ranks that share a bucket, by role."""

    ranks: Ranks
    """All ranks that hold the same parameters; their gradients are reduced to one."""
    shards: Ranks
    """Consecutive ranks of `ranks`, over which one copy of the model states is sharded."""
    replicas: Ranks | None = None
    """The ranks that hold the same shard, one from each copy; None: there is one copy."""
    node: Ranks | None = None
    """Consecutive ranks of `shards` that share a second copy of the weights; None: no such copy."""
    hops: Hops | None = None
    """Weights are gathered over `shards` in two hops; None: in one."""
    coded_hops: Hops | None = None
    """Coded gradients are reduced over `reducers` in two hops; None: in one."""
    twins: Ranks | None = None
    """The ranks of `shards` with a communicator only for reductions; None: there is none."""
    averaged_over: Ranks | None = None
    """The ranks over whose samples gradients are averaged; None: `ranks`. Experts see the samples
    of all data-parallel ranks, but fewer ranks hold each of them."""
    tied: Tied | None = None
    """Pipeline stages with copies of the same parameters; None: no other stage has them."""

    @classmethod
    def over(cls, ranks: Ranks) -> Sharing:
        """Return the sharing of one copy, sharded over all of `ranks`."""
        return cls(ranks, ranks)

    @classmethod
    def cut(
        cls,
        ranks: Ranks,
        shard_size: int,
        secondary_size: int = 1,
        node_size: int | None = None,
        coded_node_size: int | None = None,
        *,
        gathers_on_use: bool = True,
    ) -> Sharing:
        """Shard each copy over `shard_size` ranks, and a second copy of weights over fewer.

        `shard_size` divides the number of ranks, and the other sizes divide it. All ranks must call
        this with the same arguments.

        Args:
            ranks: all ranks that hold the same parameters.
            shard_size: the ranks of one copy.
            secondary_size: the ranks of a second copy of the weights; 1: there is none.
            node_size: the number of consecutive ranks that are near each other, if weights are
                gathered in two hops.
            coded_node_size: the same, if coded gradients are reduced in two hops.
            gathers_on_use: gathers overlap with reductions, so that their order differs between
                ranks.
        """
        shards, replicas = ranks, None
        if shard_size < ranks.size:
            shards, replicas = ranks.in_blocks(shard_size)
        node = None
        # Sharded over all of them, the second copy would equal the first.
        if 1 < secondary_size < shards.size:
            node, _ = shards.in_blocks(secondary_size)
        twins = shards.twin() if gathers_on_use else None
        hops, coded_hops = _hops(shards, node_size), _hops(twins or shards, coded_node_size)
        return cls(ranks, shards, replicas, node, hops, coded_hops, twins)

    @property
    def everyone(self) -> Ranks:
        """The ranks over whose samples gradients are averaged; they make each update together."""
        return self.averaged_over or self.ranks

    @property
    def reducers(self) -> Ranks:
        """The ranks of `shards`, for reductions."""
        return self.twins or self.shards

    @property
    def copies(self) -> int:
        """The number of copies of the model states."""
        return 1 if self.replicas is None else self.replicas.size

    @cached_property
    def places(self) -> range:
        """The positions of `shards` in `ranks`."""
        return self._places_of(self.shards)

    @cached_property
    def places_of_node(self) -> range:
        """The positions of `node`, or of `shards` if there is none, in `ranks`."""
        return self._places_of(self.node or self.shards)

    def _places_of(self, some: Ranks) -> range:
        first = self.ranks.numbers.index(some.numbers[0])
        return range(first, first + some.size)

    def start_gather(self, full: Tensor, codec: Codec | None, label: str) -> Pending:
        """Fill 1-D `full`, where my slice is in place, from all ranks that share one copy."""
        if codec is not None:
            gather = partial(self.start_gather, codec=None, label=label)
            return start_coded_gather(full, self.shards, codec, gather)
        if self.hops is not None:
            return start_gather_in_hops(full, *self.hops, label)
        return start_all_gather(full, self.shards, label)

    def start_cutting(self, full: Tensor, label: str) -> Pending:
        """Fill my slice of 1-D `full` with rank 0's values; the rest of `full` is undefined.

        The slice is filled on return. `full` must be kept until the wait is over, because other
        ranks copy from it.
        """
        if self.replicas is not None:
            broadcast_(full, 0, self.ranks, label)
            return finished(label)
        pending = start_scatter(full, 0, self.ranks, label)
        if self.ranks.rank != 0:
            pending.wait()
        return pending

    def sum_(self, tensor: Tensor, label: str) -> None:
        """Sum a small tensor, to which each shard contributes, over one copy, in place.

        The bits are the same on all ranks, so that values computed from it do not differ between
        copies.
        """
        sum_(tensor, self.shards, label)
        if self.replicas is not None:
            broadcast_(tensor, 0, self.replicas, label)


class ModelParts(NamedTuple):
    """The ranks that hold different parts of one copy of the model: stages and slices of layers.

    A value that they compute together, such as the gradient norm, includes each parameter once.
    """

    ranks: Ranks
    """All of them: pipeline stages times tensor-parallel ranks."""
    slices: Ranks | None = None
    """The ranks with slices of the same layers (tensor parallel); None: layers are whole."""

    def counts(self, parameter: nn.Parameter) -> bool:
        """Return True if this rank counts a parameter.

        Each rank counts its slices of split parameters. The first of `slices` counts those that all
        of them hold whole, and the first stage with a tied weight counts that weight.
        """
        if getattr(parameter, "hadal_tied_copy", False) is True:
            return False
        return self.slices is None or self.slices.rank == 0 or is_model_part(parameter)


def is_model_part(parameter: nn.Parameter) -> bool:
    """Return True if a parameter is split over model-parallel ranks, by Megatron's marks."""
    marks = ("model_parallel", "tensor_model_parallel")
    return any(getattr(parameter, mark, False) is True for mark in marks)


class SliceOf(Protocol):
    """The whole of a parameter that is cut over tensor-parallel ranks."""

    shape: tuple[int, ...]
    """The shape of the whole."""

    def whole(self, mine: Tensor) -> Tensor:
        """Return the whole from all ranks' slices; the ranks must call it together."""


def slice_of(parameter: Tensor) -> SliceOf | None:
    """Return the whole that a parameter is a slice of; None if it is whole or not known."""
    found: SliceOf | None = getattr(parameter, "hadal_slice", None)
    return found


def _hops(shards: Ranks, node_size: int | None) -> Hops | None:
    if node_size is None or not 1 < node_size < shards.size:
        return None
    inside, across = shards.in_blocks(node_size)
    return Hops(across, inside)
