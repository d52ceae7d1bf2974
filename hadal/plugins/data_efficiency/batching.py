"""Batches with about the same number of tokens (`data_sampling.dynamic_batching`)."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import default_collate

from hadal.config.data_efficiency import DataEfficiency, DynamicBatching
from hadal.data.reading import Sharding
from hadal.errors import UsageError
from hadal.listener import Listener, Setting, Update
from hadal.order import Picked
from hadal.plugins.data_efficiency.lengths import (
    Ids,
    PackLimits,
    Packs,
    evened,
    pack,
    picked,
    scale_of,
    shuffled,
)

_log = logging.getLogger(__name__)
PATH = "data_efficiency.data_sampling.dynamic_batching"


class BatchShare(NamedTuple):
    """One replica's batch, as part of an update."""

    weight: float
    """Its fraction of the update, times the update's batches: 1.0 if all are equal."""
    samples: int
    """Samples of the update, over all replicas and micro-steps."""
    tokens: int
    """Tokens of the update, likewise."""


class PackedOrder:
    """Packs of samples in the configured order, the same number for each replica.

    An update takes `train_batch_size` packs. An epoch is a whole number of updates: the largest
    packs are halved to make it one. Positions count packs.
    """

    is_own = False

    def __init__(
        self, section: DataEfficiency, lengths: Ids, sharding: Sharding, accumulation: int
    ) -> None:
        """Create the order; an update has `accumulation` batches of each replica."""
        sampling = section.data_sampling
        self._section = sampling.dynamic_batching
        self._epochs = sampling.num_epochs
        self._seed = section.seed
        self._lengths = lengths
        self._sharding = sharding
        self._update = sharding.stride * accumulation
        self._made: tuple[int, Packs] | None = None
        self._expected: Mapping[str, Any] | None = None
        first = self.packs(0)
        if not len(first):
            raise UsageError(f"{PATH}: {self._why_none(first)}")
        _tell_left_out(first, len(lengths), self._section)
        self._batches = len(first) // sharding.stride
        base = self._section.base_batch_size
        self.base: float = base or len(first.ids) / (len(first) // self._update)
        """The samples of an update with the configured learning rate."""

    def _why_none(self, packs: Packs) -> str:
        section, lengths = self._section, self._lengths
        if len(lengths) and len(packs.too_long) == len(lengths):
            return (
                f"all {len(lengths)} samples are longer than max_tokens ({section.max_tokens}), the"
                f" shortest has {lengths.min()}; raise max_tokens"
            )
        least = section.min_batch_size
        smaller = f", or min_batch_size ({least})" if least > 1 else ""
        return (
            f"{len(lengths)} samples make no update of train_batch_size {self._update} packs; lower"
            f" train_batch_size, which counts packs, or max_tokens ({section.max_tokens}){smaller}"
        )

    def packs(self, epoch: int) -> Packs:
        """Return the packs of an epoch, in order."""
        if self._made is None or self._made[0] != epoch:
            self._made = (epoch, self._packed(epoch))
        return self._made[1]

    def _packed(self, epoch: int) -> Packs:
        section = self._section
        assert section.max_tokens is not None  # the rules of the configuration check it
        least = section.min_batch_size
        limits = PackLimits(section.max_tokens, least, section.max_batch_size)
        order = picked(self._lengths, section.sequence_picking_order, self._seed + epoch)
        packs = pack(self._lengths, order, limits)
        made = evened(packs, self._update, least, may_split=not self._sharding.drop_last)
        is_new = epoch == 0 or section.sequence_picking_order == "random"
        return made if is_new else shuffled(made, self._seed, epoch)

    def __len__(self) -> int:
        """Return this replica's batches in the first epoch."""
        return self._batches

    def batches(self, epoch: int, done: int) -> Iterator[Picked]:
        """Yield this replica's batches after the first `done` packs; none after `num_epochs`.

        Raises:
            UsageError: the epoch began with different packs.
        """
        if epoch >= self._epochs:
            return
        packs, sharding = self.packs(epoch), self._sharding
        self._check(epoch, len(packs), done)
        tokens = packs.tokens(self._lengths)
        state = {"packs": len(packs), "epoch": epoch}
        for first in range(done, len(packs), sharding.stride):
            begin = first + sharding.replica * sharding.batch_size
            places = packs.starts[[begin, begin + sharding.batch_size]]
            mine = packs.ids[slice(*places)]
            share = self._share(packs, tokens, first, begin)
            yield Picked(mine.tolist(), sharding.stride, state, share)

    def _check(self, epoch: int, count: int, done: int) -> None:
        before = self._expected
        if before is not None and before.get("epoch") == epoch and before.get("packs") != count:
            raise UsageError(
                f"{PATH}: epoch {epoch} began with {before['packs']} packs, but has {count}"
                " now; resume with the max_tokens, train_batch_size and data set of the checkpoint"
            )
        if (count - done) % self._sharding.stride:
            raise UsageError(
                f"{PATH}: the checkpoint was saved in the middle of an update, after {done} packs,"
                f" which {self._sharding.replicas} ranks do not divide; resume with as many ranks"
                " as saved it"
            )

    def _share(self, packs: Packs, tokens: Ids, first: int, begin: int) -> BatchShare:
        """Return the fraction of its update that the batch of a pack makes up."""
        start = first - first % self._update
        update = slice(start, start + self._update)
        mine = slice(begin, begin + self._sharding.batch_size)
        weighs = {"tokens": tokens, "samples": packs.sizes}.get(self._section.loss_weighting)
        weight = 1.0
        if weighs is not None:
            batches = self._update // self._sharding.batch_size
            weight = float(weighs[mine].sum()) * batches / max(1, int(weighs[update].sum()))
        return BatchShare(weight, int(packs.sizes[update].sum()), int(tokens[update].sum()))

    def load_state_dict(self, state: Any) -> None:
        """Record the checkpoint's packs, which this run must match."""
        self._expected = state


def stacked(samples: list[Any]) -> Any:
    """Return torch's default batch of a pack.

    Raises:
        UsageError: the samples differ in length.
    """
    try:
        return default_collate(samples)
    except RuntimeError as error:
        raise UsageError(
            f"{PATH}: the samples of a pack cannot be stacked ({error}); pass initialize a"
            " collate_fn that pads or joins samples of different lengths"
        ) from error


def _tell_left_out(packs: Packs, count: int, section: DynamicBatching) -> None:
    if len(packs.too_long):
        _log.warning(
            "%s: %d of %d samples are longer than max_tokens (%d), and are left out; the first"
            " is sample %d",
            PATH,
            len(packs.too_long),
            count,
            section.max_tokens,
            packs.too_long.min(),
        )
    if len(packs.left_over):
        _log.warning(
            "%s: %d of %d samples are left out of the first epoch, because they do not fill a pack"
            " of min_batch_size (%d) samples or a whole update",
            PATH,
            len(packs.left_over),
            count,
            section.min_batch_size,
        )


class BatchingByTokens(Listener):
    """Weighs the loss of each micro-batch, and scales the learning rate of each update.

    The loader reports each batch that it returns; each has one backward, in the same order.
    """

    name = "dynamic_batching"

    def __init__(self, section: DynamicBatching, setting: Setting) -> None:
        self._section = section
        # A program may read ahead: all batches of an update, and one more.
        self._ahead = 2 * setting.config.gradient_accumulation_steps + 2
        self._write = setting.write
        self._handed: deque[BatchShare] = deque()
        self._rates: ScaledRates | None = None
        self.order: PackedOrder | None = None
        """The order of the training data; None until there is a loader."""
        self.current: BatchShare | None = None
        """The batch of the last backward."""
        self.samples = 0
        """Samples of all updates so far, over all ranks."""
        self.tokens = 0
        """Their tokens."""

    def note(self, share: BatchShare | None) -> None:
        """Record a batch that the loader returns; None begins an iteration."""
        if share is None:
            self._handed.clear()
            return
        self._handed.append(share)
        if len(self._handed) > self._ahead:
            self._ahead *= 10
            _log.warning(
                "%s: %d batches were read that had no backward; the weights of losses and learning"
                " rates belong to batches in the order of reading. Begin a new iteration of the"
                " loader after batches that are skipped",
                PATH,
                len(self._handed),
            )

    def scaled(self, schedule: Any, optimizer: Optimizer) -> Any:
        """Return the schedule whose rates are scaled by the size of the batch.

        Raises:
            UsageError: the schedule takes a metric.
        """
        if self._section.lr_scaling_method == "none":
            return schedule
        if type(schedule).__name__ == "ReduceLROnPlateau":
            raise UsageError(
                f"{PATH}.lr_scaling_method cannot scale the rates of ReduceLROnPlateau, which"
                ' follow a metric; set it to "none", or use another schedule'
            )
        self._rates = ScaledRates(optimizer, schedule)
        return self._rates

    @property
    def factor(self) -> float:
        """The factor of the learning rate in the last update."""
        return 1.0 if self._rates is None else self._rates.factor

    def loss_weight(self) -> float:
        """Return the weight of the oldest batch without a backward."""
        return self._handed[0].weight if self._handed else 1.0

    def after_backward(self, loss: Any) -> None:
        """Advance to the next batch."""
        del loss
        self.current = self._handed.popleft() if self._handed else None

    def before_update(self, gradients: Any) -> None:
        """Scale the learning rate by the samples of this update."""
        del gradients
        if self.current is None or self.order is None:
            return
        method = self._section.lr_scaling_method
        if self._rates is not None:
            self._rates.scale(scale_of(self.order.base, self.current.samples, method))

    def after_update(self, update: Update) -> None:
        """Count, and write the size of the batch to the log and the monitors."""
        done, self.current = self.current, None
        if done is None:
            return
        self.samples += done.samples
        self.tokens += done.tokens
        if self._section.verbose:
            _log.info(
                "update %d: %d samples with %d tokens, learning rate x %.4g",
                update.number,
                done.samples,
                done.tokens,
                self.factor,
            )
        if self._write is not None:
            found = {"batch_samples": done.samples, "batch_tokens": done.tokens}
            events = [(f"Train/Samples/{name}", value) for name, value in found.items()]
            self._write([(*event, update.total_samples) for event in events])

    def state_dict(self) -> Mapping[str, Any]:
        """Return the samples and tokens so far."""
        return {"samples": self.samples, "tokens": self.tokens}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume; batches returned before do not count."""
        self.samples, self.tokens = int(state["samples"]), int(state["tokens"])
        self._handed.clear()


# ---- learning rates ------------------------------------------------------------------------------

_KEY = "batch_scaling"


class ScaledRates:
    """Schedule whose learning rates are multiplied by a factor that changes with each batch.

    The inner schedule sees only its own rates. Attributes that this one lacks are looked up there.
    """

    def __init__(self, optimizer: Optimizer, schedule: Any = None) -> None:
        self.optimizer = optimizer
        self.schedule = schedule
        """The schedule of the rates before the factor; None if they are constant."""
        self.factor = 1.0
        self.plain: list[float] = []
        """The rate of each param group before the factor."""
        self._read()

    def scale(self, factor: float) -> None:
        """Multiply the rates by `factor`, which replaces the last one."""
        self.factor = factor
        groups = self.optimizer.param_groups
        # Groups added since then have their own rates.
        self.plain += [float(group["lr"]) for group in groups[len(self.plain) :]]
        self._write(factor)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step the inner schedule; the factor stays."""
        if self.schedule is not None:
            self._write(1.0)
            self.schedule.step(*args, **kwargs)
            self._read()
        self.scale(self.factor)

    def _read(self) -> None:
        self.plain = [float(group["lr"]) for group in self.optimizer.param_groups]

    def _write(self, factor: float) -> None:
        for group, rate in zip(self.optimizer.param_groups, self.plain, strict=False):
            # A rate in a tensor is updated in place, as captured steps read it there.
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate * factor)
            else:
                group["lr"] = rate * factor

    def get_last_lr(self) -> list[float]:
        """Return the last rates."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """Return the inner schedule's state, the rates and the factor."""
        inner = {} if self.schedule is None else self.schedule.state_dict()
        return {**inner, _KEY: {"plain": list(self.plain), "factor": self.factor}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state of this schedule, or of only the inner one."""
        inner = {name: value for name, value in state.items() if name != _KEY}
        if self.schedule is not None:
            self.schedule.load_state_dict(inner)
        if _KEY in state:
            self.plain = [float(rate) for rate in state[_KEY]["plain"]]
            self.scale(float(state[_KEY]["factor"]))
        else:
            self._read()

    def __getattr__(self, name: str) -> Any:
        """Look the attribute up in the inner schedule."""
        if name in ("schedule", "optimizer") or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.schedule, name)
