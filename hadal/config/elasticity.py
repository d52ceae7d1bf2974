"""`elasticity`: one batch size that suits many numbers of ranks.

A micro-batch *fits* a number of ranks if the two together divide the batch.
"""

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, ClassVar, NamedTuple

from annotated_types import Ge

from hadal.config.general import Sizes
from hadal.config.section import Switched, key, rule
from hadal.config.values import Boolean, Integer, Number
from hadal.errors import Fault


class Elasticity(Switched):
    """Chooses the batch size and the numbers of ranks that can train it."""

    renamed: ClassVar[Mapping[str, str]] = {"prefer_large_batch": "prefer_larger_batch"}

    enabled: Boolean = key(False, "Choose the batch sizes.")
    max_train_batch_size: Integer = key(2000, "Largest batch, in samples. Required.", gt=0)
    micro_batch_sizes: tuple[Annotated[Integer, Ge(1)], ...] = key(
        (2, 4, 6), "Micro-batches to choose from, in samples. Required."
    )
    min_gpus: Integer = key(1, "Minimum number of ranks.", ge=1)
    max_gpus: Integer = key(10000, "Maximum number of ranks.", ge=1)
    min_time: Integer = key(
        0,
        "Minutes of training before `hadal run --elastic_training` restarts the ranks to admit "
        "new hosts.",
        ge=0,
    )
    prefer_larger_batch: Boolean = key(True, "Choose the larger batch among equals.")
    ignore_non_elastic_batch_info: Boolean = key(
        False, "Override batch sizes given elsewhere rather than refuse them."
    )
    version: Number = key(0.2, "Version of the algorithm: 0.1 or 0.2.")
    num_gpus_per_node: Integer = key(1, "Ranks per node (0.2).", ge=1)
    model_parallel_size: Integer = key(1, "Ranks that share one copy of the model (0.2).", ge=1)

    @rule()
    def _while_on(self) -> Iterator[Fault]:
        if self.enabled:
            yield from self.contradictions()

    def contradictions(self) -> Iterator[Fault]:
        """Yield the reasons why no batch can be chosen, whether the section is on or not."""
        for name in ("max_train_batch_size", "micro_batch_sizes"):
            if name not in self.model_fields_set:
                yield Fault(name, "required while the section is on; add it")
        largest = max(self.micro_batch_sizes, default=0)
        if largest > self.max_train_batch_size:
            yield Fault(
                "micro_batch_sizes",
                f"{largest} is more than max_train_batch_size {self.max_train_batch_size}; remove"
                " it or raise that",
            )
        if self.max_gpus < self.min_gpus:
            yield Fault("max_gpus", f"{self.max_gpus} is less than min_gpus {self.min_gpus}")
        if self.version not in (0.1, 0.2):
            yield Fault("version", f"expected 0.1 or 0.2, got {self.version}")
        shared, each = self.model_parallel_size, self.num_gpus_per_node
        if shared > 1 and self.version == 0.1:
            yield Fault("model_parallel_size", f"{shared} needs version 0.2")
        elif each % shared:
            yield Fault(
                "num_gpus_per_node", f"{each} is not a multiple of model_parallel_size {shared}"
            )


# Highly composite numbers: each has more divisors than all below it, and so fits more ranks.
_COMPOSITE = (
    *(1, 2, 4, 6, 12, 24, 36, 48, 60, 120, 180, 240, 360, 720, 840, 1260, 1680, 2520, 5040, 7560),
    *(10080, 15120, 20160, 25200, 27720, 45360, 50400, 55440, 83160, 110880, 166320, 221760),
    *(277200, 332640, 498960, 554400, 665280, 720720),
)

_SHOWN = 12
"""Maximum number of rank counts listed in an error."""


class Wish(NamedTuple):
    """The configured batch limits, and the ranks that may train it."""

    cap: int
    """The largest batch, in samples."""
    micros: tuple[int, ...]
    least: int = 1
    most: int = 0
    """0 means no limit."""
    larger: bool = True
    """Among batches that fit equally many numbers of ranks, choose the larger."""


class Nodes(NamedTuple):
    """The layout of ranks (version 0.2): ranks per node, and how many of them share a model."""

    ranks: int = 1
    shared: int = 1

    @property
    def replicas(self) -> int:
        """The number of ranks on a node that see different samples."""
        return self.ranks // self.shared


class Choice(NamedTuple):
    """A batch, and the numbers of data-parallel ranks that can train it, ascending."""

    train: int
    ranks: tuple[int, ...]


def candidates(wish: Wish) -> set[int]:
    """Return candidate batches: multiples of the micro-batches with many divisors."""
    bases = {*wish.micros, math.lcm(*wish.micros)}
    # Each base times the largest highly composite number within the cap.
    return {
        base * _COMPOSITE[bisect_right(_COMPOSITE, wish.cap // base) - 1]
        for base in bases
        if base <= wish.cap
    }


def ranks_for(train: int, wish: Wish) -> tuple[int, ...]:
    """Return the numbers of ranks, within bounds, that some micro-batch fits."""
    most = wish.most or wish.cap // min(wish.micros)
    found = {
        divisor
        for micro in wish.micros
        if train % micro == 0
        for divisor in _divisors(train // micro)
        if max(1, wish.least) <= divisor <= most
    }
    return tuple(sorted(found))


def _divisors(number: int) -> Iterable[int]:
    for small in range(1, math.isqrt(number) + 1):
        if number % small == 0:
            yield small
            yield number // small


def chosen(wish: Wish) -> Choice:
    """Return, for version 0.1, the candidate that the most numbers of ranks can train.

    If none can be trained, the batch is the smallest micro-batch, or the largest candidate.
    """
    best = Choice(min(wish.micros), ())
    for train in sorted(candidates(wish), reverse=wish.larger):
        tried = Choice(train, ranks_for(train, wish))
        is_better = train > best.train if wish.larger else train < best.train
        if (len(tried.ranks), is_better) > (len(best.ranks), False):
            best = tried
    return best


def chosen_on_nodes(wish: Wish, nodes: Nodes, ranks: int) -> Choice:
    """Return, for version 0.2, a batch for whole nodes, or for `ranks` if these form none."""
    found = by_nodes(wish, nodes)
    return found if ranks // nodes.shared in found.ranks else for_these(wish, nodes, ranks)


def by_nodes(wish: Wish, nodes: Nodes) -> Choice:
    """Return the batch that the most numbers of whole nodes can train."""
    each = nodes.replicas
    per_node = wish._replace(
        cap=wish.cap // each, least=wish.least // nodes.ranks, most=wish.most // nodes.ranks
    )
    train, counts = chosen(per_node)
    return Choice(train * each, tuple(count * each for count in counts))


def for_these(wish: Wish, nodes: Nodes, ranks: int) -> Choice:
    """Return the batch for `ranks` alone: the largest (or smallest) of each micro-batch's best."""
    now = ranks / nodes.ranks * nodes.replicas
    multiples = [math.floor(wish.cap / (micro * now)) * micro * now for micro in wish.micros]
    return Choice(int(max(multiples) if wish.larger else min(multiples)), (int(now),))


def micro_for(train: int, ranks: int, micros: Sequence[int], *, larger: bool = True) -> int | None:
    """Return the micro-batch for `ranks`: the largest that fits, or the first of the list."""
    fitting = [micro for micro in micros if train // ranks % micro == 0]
    if not fitting:
        return None
    return max(fitting) if larger else fitting[0]


# ---- for the section -----------------------------------------------------------------------------


def elastic_faults(section: Elasticity) -> tuple[Fault, ...]:
    """Return the reasons why elasticity cannot choose a batch."""
    return tuple(Fault(f"elasticity.{one.path}", one.message) for one in section.contradictions())


def choice_of(section: Elasticity, world_size: int) -> Choice:
    """Return the choice for a valid section; version 0.2 depends on the number of ranks."""
    if section.version < 0.2:
        return list_of(section)
    return chosen_on_nodes(_wish(section), _nodes(section), world_size)


def list_of(section: Elasticity) -> Choice:
    """Return the batch that many numbers of ranks can train, and these numbers."""
    if section.version < 0.2:
        return chosen(_wish(section))
    return by_nodes(_wish(section), _nodes(section))


def _wish(section: Elasticity) -> Wish:
    return Wish(
        section.max_train_batch_size,
        section.micro_batch_sizes,
        section.min_gpus,
        section.max_gpus,
        section.prefer_larger_batch,
    )


def _nodes(section: Elasticity) -> Nodes:
    return Nodes(section.num_gpus_per_node, section.model_parallel_size)


def sizes_of(section: Elasticity, world_size: int, replicas: int) -> Sizes | Fault:
    """Return the sizes for `world_size` ranks, of which `replicas` see different samples."""
    shared = section.model_parallel_size
    if shared * replicas != world_size:
        return Fault(
            "elasticity.model_parallel_size",
            f"{shared}, but {world_size // replicas} of the {world_size} ranks share each model;"
            " set that number",
        )
    choice = choice_of(section, world_size)
    if replicas not in choice.ranks:
        return Fault("elasticity", _refusal(choice, replicas))
    micro = micro_for(choice.train, replicas, section.micro_batch_sizes)
    if micro is None or choice.train % (micro * replicas):
        return Fault(
            "elasticity.micro_batch_sizes",
            f"none of {list(section.micro_batch_sizes)} divides the {choice.train // replicas}"
            f" samples of each of {replicas} ranks; add one that does",
        )
    return Sizes(choice.train, micro, choice.train // (micro * replicas))


def _refusal(choice: Choice, replicas: int) -> str:
    if not choice.ranks:
        return "no number of ranks fits; widen min_gpus and max_gpus, or raise max_train_batch_size"
    near = sorted(choice.ranks, key=lambda count: abs(count - replicas))[:_SHOWN]
    listed = ", ".join(map(str, sorted(near)))
    some = "" if len(near) == len(choice.ranks) else f"; nearest of {len(choice.ranks)}"
    return f"{replicas} ranks cannot train a batch of {choice.train}; use one of {listed}{some}"
