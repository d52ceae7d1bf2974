"""Dynamic batching under DeepSpeed's names: adapters of `hadal.data_efficiency`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, DistributedSampler, default_collate

from hadal.engine.engine import Engine
from hadal.errors import UsageError, expect_one_of
from hadal.plugins.data_efficiency.batching import PATH, ScaledRates
from hadal.plugins.data_efficiency.lengths import (
    PackLimits,
    evened,
    is_measured,
    measured,
    pack,
    pack_alike,
    picked,
    read_lengths,
    scale_of,
    write_lengths,
)

_log = logging.getLogger(__name__)

Collate = Callable[[list[Any]], Any]
Numbered = tuple[int, list[int]]
"""The number of a batch, and the samples of one of its packs."""


def scale_lr(
    base_batch_size: float, batch_size: float, base_lr: float = 1, method: str | None = "linear"
) -> float:
    """Return the learning rate for a batch of another size."""
    return base_lr * scale_of(base_batch_size, batch_size, method)


def batch_by_seqlens(  # noqa: PLR0913 - the signature is DeepSpeed's
    seqlens: Iterable[int],
    max_tokens: int,
    sequence_ids_per_mb: Iterable[int] | None = None,
    min_batch_size: int = 1,
    max_batch_size: int | None = None,
    sequence_picking_order: str = "dataloader",
    effective_batch_size: int = 1,
    required_microbatches_of_same_size: bool = False,
    verbose: bool = False,
    seed: int | None = None,
) -> tuple[list[Numbered], list[int], list[int]]:
    """Return packs of samples, and each batch's samples and longest sample.

    A batch takes `effective_batch_size` packs; what is left over is logged. In contrast to
    DeepSpeed, the last sample is packed, and positions that cannot start a pack are skipped.

    Raises:
        UsageError: the samples make no batch, or the order is unknown.
    """
    orders, what = ("dataloader", "random", "seqlen"), "batch_by_seqlens: sequence_picking_order"
    expect_one_of(orders, what, sequence_picking_order)
    lengths = np.asarray(list(seqlens), np.int64)
    ids = None if sequence_ids_per_mb is None else np.asarray(list(sequence_ids_per_mb), np.int64)
    order = picked(lengths, sequence_picking_order, seed, ids)  # type: ignore[arg-type]
    limits, count = PackLimits(max_tokens, min_batch_size, max_batch_size), effective_batch_size
    if required_microbatches_of_same_size:
        made = pack_alike(lengths, order, limits, count)
    else:
        made = pack(lengths, order, limits)
    made = evened(made, count, min_batch_size, may_split=False)
    if not len(made):
        raise UsageError(
            f"batch_by_seqlens: {len(order)} samples make no batch of effective_batch_size"
            f" {count} packs; lower it, or min_batch_size"
        )
    for left, why in ((made.too_long, "longer than max_tokens"), (made.left_over, "left over")):
        if len(left):
            _log.warning("batch_by_seqlens: %d of %d samples are %s", len(left), len(order), why)
    numbered = [(number // count, samples.tolist()) for number, samples in enumerate(made)]
    sizes = made.sizes.reshape(-1, count).sum(1).tolist()
    longest = np.array([lengths[samples].max() for samples in made]).reshape(-1, count).max(1)
    if verbose:
        for number, samples in numbered:
            _log.info("batch %d: samples %s, %d tokens", number, samples, lengths[samples].sum())
    return numbered, sizes, longest.tolist()


@dataclass(eq=False)
class _Packs(Dataset[Any]):
    """Packs as samples: each item is the samples of one pack."""

    dataset: Any
    packs: Sequence[Numbered]
    longest: Sequence[int] | None
    pad: Any

    def __len__(self) -> int:
        return len(self.packs)

    def __getitem__(self, index: int) -> list[Any]:
        number, samples = self.packs[index]
        found = [self.dataset[sample] for sample in samples]
        if self.longest is not None:
            found = [self.pad(sample, self.longest[number]) for sample in found]
        return found


def _joined(collate: Collate, packs: list[list[Any]]) -> Any:
    """Return a batch of several packs."""
    return collate([sample for samples in packs for sample in samples])


def dataloader_for_variable_batch_size(  # noqa: PLR0913 - the signature is DeepSpeed's
    dataset: Any,
    microbatch_ids: Sequence[Numbered],
    batch_max_seqlens: Sequence[int],
    dataloader_rank: int = 0,
    dataloader_batch_size: int = 1,
    dataloader_num_replicas: int = 1,
    dataloader_collate_fn: Collate | None = None,
    dataloader_num_workers: int = 2,
    dataloader_pin_memory: bool = False,
    required_microbatches_of_same_seqlen: bool = False,
    sample_padding_fn: Callable[[Any, int], Any] | None = None,
) -> tuple[DataLoader[Any], dict[str, Any]]:
    """Return a loader of packs in order, and the arguments for `deepspeed_io` that make it.

    A micro-batch joins `dataloader_batch_size` packs. If all must have the same length,
    `sample_padding_fn(sample, length)` pads to the longest sample of the batch.
    """
    if required_microbatches_of_same_seqlen and sample_padding_fn is None:
        raise UsageError(
            "required_microbatches_of_same_seqlen needs sample_padding_fn(sample, length); give it"
        )
    longest = batch_max_seqlens if required_microbatches_of_same_seqlen else None
    packs = _Packs(dataset, microbatch_ids, longest, sample_padding_fn)
    sampler: DistributedSampler[Any] = DistributedSampler(
        packs, dataloader_num_replicas, dataloader_rank, shuffle=False
    )
    shared: dict[str, Any] = {
        "dataset": packs,
        "batch_size": dataloader_batch_size,
        "pin_memory": dataloader_pin_memory,
        "collate_fn": partial(_joined, dataloader_collate_fn or default_collate),
    }
    loader: DataLoader[Any] = DataLoader(
        **shared, sampler=sampler, num_workers=dataloader_num_workers
    )
    arguments = {"data_sampler": sampler, "num_local_io_workers": dataloader_num_workers}
    return loader, {**shared, **arguments}


class VariableBatchSizeLR(LRScheduler):
    """Schedule that scales another one, or an optimizer's constant rates, by each batch's size.

    `step` goes on to the next batch; after the last one the first comes again.
    """

    def __init__(
        self,
        lr_scheduler_or_optimizer: Any,
        base_batch_size: float,
        batch_sizes: Sequence[int],
        dataloader: Any = None,
        lr_scaling_method: str | None = "linear",
        verbose: bool = False,
    ) -> None:
        given = lr_scheduler_or_optimizer
        is_optimizer = isinstance(given, Optimizer)
        if not is_optimizer and not (hasattr(given, "step") and hasattr(given, "optimizer")):
            raise ValueError(f"Unknown type for lr_scheduler_or_optimizer: {type(given)}")
        self.optimizer: Optimizer = given if is_optimizer else given.optimizer
        self.base_lr_scheduler = None if is_optimizer else given
        self.base_batch_size = base_batch_size
        self.batch_sizes = list(batch_sizes)
        self.dataloader = dataloader
        self.lr_scaling_method = lr_scaling_method
        self.verbose = verbose
        self.last_epoch = 0
        self._rates = ScaledRates(self.optimizer, self.base_lr_scheduler)
        self.base_lrs = [*self._rates.plain]
        self.step(0)

    def get_last_lr(self) -> list[float | Tensor]:
        """Return the current learning rates."""
        return [*self._rates.get_last_lr()]

    def get_lr(self) -> list[float | Tensor]:
        """Return the rates that were written last."""
        return [*self._rates.get_last_lr()]

    def step(self, epoch: int | None = None) -> None:
        """Go on to the next batch, or to batch number `epoch`."""
        if epoch is None:
            self._rates.step()
        elif self.base_lr_scheduler is not None:
            self._rates.step(epoch)
        self.last_epoch = self.last_epoch + 1 if epoch is None else epoch
        size = self.batch_sizes[self.last_epoch % len(self.batch_sizes)]
        self._rates.scale(scale_of(self.base_batch_size, size, self.lr_scaling_method))
        if self.verbose:
            _log.info("batch %d: %d samples, rates %s", self.last_epoch, size, self.get_last_lr())

    def state_dict(self) -> dict[str, Any]:
        """Return the state for `load_state_dict`."""
        base = self.base_lr_scheduler
        return {
            "base_lr_scheduler": None if base is None else base.state_dict(),
            "base_batch_size": self.base_batch_size,
            "lr_scaling_method": self.lr_scaling_method,
            "batch_sizes": self.batch_sizes,
            "base_lrs": list(self._rates.plain),
            "last_epoch": self.last_epoch,
            "verbose": self.verbose,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
        names = ("base_batch_size", "lr_scaling_method", "batch_sizes", "last_epoch", "verbose")
        for name in names:
            setattr(self, name, state_dict[name])
        if self.base_lr_scheduler is not None:
            self.base_lr_scheduler.load_state_dict(state_dict["base_lr_scheduler"])
        self._rates.plain = list(state_dict["base_lrs"])
        self.base_lrs = [*self._rates.plain]
        size = self.batch_sizes[self.last_epoch % len(self.batch_sizes)]
        self._rates.scale(scale_of(self.base_batch_size, size, self.lr_scaling_method))


def lr_scheduler_for_variable_batch_size(
    base_batch_size: float,
    batch_sizes: Sequence[int],
    dataloader: Any,
    lr_scheduler_or_optimizer: Any,
    lr_scaling_method: str | None = "linear",
    verbose: bool = False,
) -> VariableBatchSizeLR:
    """Return a schedule that scales another one, or constant rates, by each batch's size.

    Raises:
        ValueError: neither a schedule nor an optimizer is given.
    """
    given, method = lr_scheduler_or_optimizer, lr_scaling_method
    return VariableBatchSizeLR(given, base_batch_size, batch_sizes, dataloader, method, verbose)


def get_dataloader_and_lr_scheduler_for_variable_batch_size(  # noqa: PLR0913 - DeepSpeed's
    dataset: Any,
    dataset_seqlens: Iterable[int],
    max_tokens: int,
    effective_batch_size: int,
    dataset_filter_ids: Iterable[int] | None = None,
    lr_scaling_method: str | None = "linear",
    min_batch_size: int = 1,
    max_batch_size: int | None = None,
    sequence_picking_order: str = "dataloader",
    dataloader_batch_size: int = 1,
    dataloader_rank: int = 0,
    dataloader_num_replicas: int = 1,
    dataloader_num_workers: int = 0,
    dataloader_collate_fn: Collate | None = None,
    dataloader_pin_memory: bool = False,
    lr_scheduler_or_optimizer: Any = None,
    required_microbatches_of_same_size: bool = False,
    required_microbatches_of_same_seqlen: bool = False,
    sample_padding_fn: Callable[[Any, int], Any] | None = None,
    verbose: bool = False,
    seed: int | None = None,
) -> tuple[DataLoader[Any], VariableBatchSizeLR | None, dict[str, Any]]:
    """Return a loader of packs, its schedule, and the arguments for `deepspeed_io`.

    The schedule is None if neither a schedule nor an optimizer is given.
    """
    numbered, sizes, longest = batch_by_seqlens(
        *(dataset_seqlens, max_tokens, dataset_filter_ids, min_batch_size, max_batch_size),
        *(sequence_picking_order, effective_batch_size, required_microbatches_of_same_size),
        *(verbose, seed),
    )
    loader, arguments = dataloader_for_variable_batch_size(
        *(dataset, numbered, longest, dataloader_rank, dataloader_batch_size),
        *(dataloader_num_replicas, dataloader_collate_fn, dataloader_num_workers),
        *(dataloader_pin_memory, required_microbatches_of_same_seqlen, sample_padding_fn),
    )
    schedule = None
    if lr_scheduler_or_optimizer is not None:
        given, method = lr_scheduler_or_optimizer, lr_scaling_method
        schedule = VariableBatchSizeLR(given, effective_batch_size, sizes, loader, method, verbose)
    return loader, schedule, arguments


class _WithLengths:
    """A data set with lengths that the program knows, and only the samples that it wants."""

    def __init__(self, dataset: Any, lengths: Sequence[int] | None, ids: Any) -> None:
        self._dataset = dataset
        self._ids = range(len(dataset)) if ids is None else [int(one) for one in ids]
        if lengths is not None:
            self.lengths = np.asarray(lengths)[list(self._ids)]

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index: int) -> Any:
        return self._dataset[self._ids[index]]


def get_dataloader_and_lr_scheduler_for_variable_batch_size_deepspeed(
    dataset: Any,
    engine: Engine,
    dataset_seqlens: Sequence[int] | None = None,
    dataset_filter_ids: Iterable[int] | None = None,
    dataloader_collate_fn: Collate | None = None,
    sample_padding_fn: Callable[[Any, int], Any] | None = None,
    batch_seqlens_fn: Callable[[Any], Iterable[int]] | None = None,
) -> tuple[Any, Any, dict[str, Any]]:
    """Return the engine's training loader over `dataset`, its schedule, and arguments.

    The engine packs, weighs and scales by itself, as the configuration says: the arguments make an
    ordinary loader of it, with `engine.deepspeed_io(**arguments)`.

    Args:
        dataset: a data set with a length and items.
        engine: an engine whose configuration switches dynamic batching on.
        dataset_seqlens: the tokens of each sample.
        dataset_filter_ids: the samples to use; None: all.
        dataloader_collate_fn: collates samples into a batch.
        sample_padding_fn: for models in stages, which dynamic batching is not built for yet.
        batch_seqlens_fn: measures a list of samples, if nothing else gives their lengths.

    Raises:
        UsageError: dynamic batching is off, the engine has a training loader already, or lengths
            cannot be found.
    """
    sampling = engine._parts.config.data_efficiency.data_sampling
    if engine.dynamic_batching is None:
        raise UsageError(f"{PATH}.enabled is not true in the configuration; set it")
    if sample_padding_fn is not None:
        raise UsageError(
            "sample_padding_fn is for models in stages, which dynamic batching is not built for"
            " yet; leave it out"
        )
    if engine.training_dataloader is not None:
        raise UsageError(
            "the engine has a training loader; give training_data to initialize, or call this"
            " function, not both"
        )
    folder, lengths = sampling.dynamic_batching.metrics_path, dataset_seqlens
    if lengths is None and folder is not None and is_measured(folder):
        lengths = read_lengths(folder).tolist()
    elif lengths is None and batch_seqlens_fn is not None:
        measure = batch_seqlens_fn
        lengths = measured(dataset, lambda sample: int(next(iter(measure([sample])))))  # type: ignore[assignment]
        if folder is not None and engine.topology.data_parallel.rank == 0:
            write_lengths(folder, np.asarray(lengths))
    wrapped: Any = dataset
    if lengths is not None or dataset_filter_ids is not None:
        wrapped = _WithLengths(dataset, lengths, dataset_filter_ids)
    arguments: dict[str, Any] = {
        "dataset": wrapped,
        "pin_memory": sampling.pin_memory,
        "collate_fn": dataloader_collate_fn,
        "num_local_io_workers": sampling.num_workers,
    }
    return engine.deepspeed_io(**arguments), engine.lr_scheduler, arguments
