"""Methods with which DeepSpeed's engines report their configuration: one per key."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from hadal import comm
from hadal.comm import Ranks
from hadal.comm.adjoint import gathered
from hadal.compat.surface import NameKind, data, placeholder
from hadal.config.section import plain
from hadal.engine.engine import Engine
from hadal.errors import UsageError

if TYPE_CHECKING:
    from hadal.compat.efficiency import (
        CurriculumScheduler,
        ProgressiveLayerDrop,
        RandomLTDScheduler,
    )
    from hadal.compat.tools import SparseTensor

_log = logging.getLogger(__name__)
_TABLE = data("accessors.json")
PATHS: dict[str, str] = _TABLE["paths"]
"""The key that each method returns; "attributes" are those of `DeepSpeedConfig` alone."""
_UNBUILT: list[str] = _TABLE["unbuilt"]
"""DeepSpeed's ways of reducing, compiling and saving, which differ here."""
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


class _Ignored:
    """An attribute that DeepSpeed's object has and ours lacks: setting it logs a warning."""

    def __init__(self, thing: str, name: str) -> None:
        self._thing, self._name = thing, name

    def __get__(self, one: Any, kind: type) -> Any:
        """Return what the program has set."""
        if one is None or self._name not in vars(one):
            raise AttributeError(self._name)
        return vars(one)[self._name]

    def __set__(self, one: Any, value: Any) -> None:
        """Store the value; warn the first time."""
        if self._name not in vars(one):
            text = "%s.%s = %.80r has no effect: only DeepSpeed's own code reads it"
            _log.warning(text, self._thing, self._name, value)
        vars(one)[self._name] = value


def warn_of_stores(kind: type, thing: str) -> None:
    """Let a class warn of attributes that programs set and nothing here reads."""
    for name in _TABLE["ignored"][thing].split():
        setattr(kind, name, _Ignored(thing, name))


class Accessors(Engine):
    """An engine with these methods. Those in `accessors.json` return the key's value.

    Sections are plain dicts; keys of an absent section are None.
    """

    @property
    def communication_data_type(self) -> torch.dtype:
        """The dtype of gradients on the wire; programs also set it, on all ranks."""
        trained = (each for each in self._parts.runtime.buckets if each.trainable)
        return next((each.precision.reduce for each in trained), torch.float32)

    @communication_data_type.setter
    def communication_data_type(self, dtype: torch.dtype) -> None:
        if dtype not in DTYPES.values():
            raise UsageError(f"communication_data_type = {dtype!r}: expected one of {DTYPES}")
        for bucket in self._parts.runtime.buckets:
            bucket.precision = bucket.precision._replace(reduce=dtype)

    def torch_autocast_dtype(self) -> torch.dtype | None:
        """Return the dtype of autocast, if the configuration names one."""
        section = self._parts.config.torch_autocast
        return None if section is None else DTYPES.get(section.dtype or "")

    def postscale_gradients(self) -> bool:
        """Return whether gradients are divided after they are summed, not before."""
        return not self._parts.config.prescale_gradients

    def checkpoint_tag_validation_enabled(self) -> bool:
        """Return whether the ranks' tags are compared when saving."""
        return self._parts.config.checkpoint.tag_validation != "Ignore"

    def checkpoint_tag_validation_fail(self) -> bool:
        """Return whether different tags are an error."""
        return self._parts.config.checkpoint.tag_validation == "Fail"

    def checkpoint_writer_enabled(self) -> bool:
        """Return whether the configuration has a checkpoint writer section."""
        return self._parts.config.checkpoint.writer is not None

    def autotuning_profile_model_info(self) -> bool:
        """Return whether this run is an experiment that measures one forward pass."""
        section = self._parts.config.autotuning
        return section.enabled and section.model_info is not None and section.model_info.profile

    def curriculum_params_legacy(self) -> dict[str, Any]:
        """Return the section `curriculum_learning` without its switch."""
        section = plain(self._parts.config.curriculum_learning) or {}
        return {name: value for name, value in section.items() if name != "enabled"}

    @property
    def curriculum_scheduler_legacy(self) -> CurriculumScheduler | None:
        """The schedule of `curriculum_learning`, if it is on."""
        found = self.length_curriculum
        if found is None:
            return None
        from hadal.compat.efficiency import CurriculumScheduler  # for this alone

        return CurriculumScheduler.of(found.pacer, self.curriculum_params_legacy())

    @property
    def progressive_layer_drop(self) -> ProgressiveLayerDrop | None:
        """The keep probability of layers, if `progressive_layer_drop` is on."""
        section, found = self._parts.config.progressive_layer_drop, self.layer_drop
        if section is None or found is None:
            return None
        assert section.theta is not None  # the rules of the configuration check it
        assert section.gamma is not None
        from hadal.compat.efficiency import LayerDropOfEngine  # for this alone

        return LayerDropOfEngine(found, section.theta, section.gamma)

    @property
    def random_ltd_scheduler(self) -> RandomLTDScheduler | None:
        """The schedule of kept tokens, if `random_ltd` is on."""
        if self.token_drop is None:
            return None
        from hadal.compat.efficiency import RandomLTDScheduler  # for this alone

        return RandomLTDScheduler(self.token_drop)

    def random_ltd_initialize(self) -> None:
        """Let the converted layers drop tokens, as `convert_to_random_ltd` does."""
        if self.token_drop is not None:
            self.token_drop.adopt(self.module)

    def get_pld_theta(self) -> float | None:
        """Return the keep probability after the last update; None without layer drop."""
        return None if self.layer_drop is None else self.layer_drop.theta

    def zero_cpu_offload(self) -> bool:
        """Return whether the optimizer's state is in host memory."""
        section = self._parts.config.zero_optimization.offload_optimizer
        return section is not None and section.device == "cpu"

    def zero_use_cpu_optimizer(self) -> bool:
        """Return whether the optimizer's state is offloaded, so that the host updates it."""
        section = self._parts.config.zero_optimization.offload_optimizer
        return section is not None and section.device != "none"

    def get_batch_info(self) -> tuple[int, int, int]:
        """Return the train batch, the micro-batch and the accumulation steps."""
        return (
            self.train_batch_size(),
            self.train_micro_batch_size_per_gpu(),
            self.gradient_accumulation_steps(),
        )

    def get_data_parallel_rank(self) -> int:
        """Return this rank's index among those that see different samples."""
        return self.topology.data_parallel.rank

    def get_model_parallel_rank(self) -> int:
        """Return this rank's index among those that hold the parts of its model."""
        parts = self.topology.model_parallel
        return 0 if parts is None else parts.rank

    def get_tensor_parallel_rank(self) -> int:
        """Return the result of `get_model_parallel_rank`."""
        return self.get_model_parallel_rank()

    def dynamic_loss_scale(self) -> bool:
        """Return whether overflows change the loss scale."""
        return self._parts.scale_rule.dynamic

    def initial_dynamic_scale(self) -> float:
        """Return the loss scale of the first update."""
        return self._parts.scale_rule.initial

    def dynamic_loss_scale_args(self) -> dict[str, Any] | None:
        """Return the keys of a dynamic loss scale, under DeepSpeed's names; None without one."""
        section = self._parts.config.fp16
        if not section.enabled or section.loss_scale:
            return None
        return {
            "init_scale": 2.0**section.initial_scale_power,
            "scale_window": section.loss_scale_window,
            "delayed_shift": section.hysteresis,
            "consecutive_hysteresis": section.consecutive_hysteresis,
            "min_scale": section.min_loss_scale,
        }

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """Return the dtype of the weights, and that in which gradients are added up."""
        config = self._parts.config
        named = "fp16" if config.fp16.enabled else "bf16" if config.bf16.enabled else "fp32"
        return DTYPES[named], DTYPES[config.data_types.grad_accum_dtype or named]

    def get_wall_clock_timers(self) -> dict[str, float]:
        """Return the milliseconds of each phase that was timed (`wall_clock_breakdown`)."""
        timers = getattr(self, "timers", None)
        means: dict[str, float] = (
            {} if timers is None else timers.get_mean(timers.get_timers(), reset=False)
        )
        return means

    def is_first_weights_partition_group(self) -> bool:
        """Return whether this rank is in the first group over which weights are sharded."""
        return self._parts.config.zero_optimization.stage == 3

    def get_compile_time(self) -> list[Any]:
        """Return the times of DeepSpeed's compiler passes: none, as there are none."""
        return []

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Change the samples of one rank's micro-step; the micro-steps of an update stay.

        Raises:
            UsageError: it is no positive number, or this is the middle of an update.
        """
        if not isinstance(micro_batch_size, int) or micro_batch_size < 1:
            raise UsageError(
                f"set_train_micro_batch_size({micro_batch_size!r}): expected a number from 1 on"
            )
        if self._state.is_inside_accumulation or self._state.backwards:
            raise UsageError(
                "set_train_micro_batch_size was called inside an accumulation; step first"
            )
        self._state.batches = self._state.batches._replace(micro=micro_batch_size)

    def zero_partial_offload(self) -> float:
        """Return the fraction of the optimizer's state that is offloaded, if any is."""
        section = self._parts.config.zero_optimization.offload_optimizer
        return 1.0 if section is None else section.ratio

    def zero_nvme_offload_optimizer(self) -> bool:
        """Return whether the optimizer's state is on a disk."""
        section = self._parts.config.zero_optimization.offload_optimizer
        return section is not None and section.device == "nvme"

    def collect_python_gc(self) -> int:
        """Collect Python's garbage now; return the number of objects found."""
        return gc.collect()

    def all_gather_scalar(self, value: Tensor, dp_group: Any) -> list[Tensor]:
        """Return a small tensor of every rank of a group. All of them must call it."""
        found = [torch.empty_like(value) for _ in range(comm.get_world_size(dp_group))]
        comm.all_gather(found, value, group=dp_group)
        return found

    # ---- means over ranks, of a program's own tensors --------------------------------------------

    def allreduce_bucket(
        self, bucket: Sequence[Tensor], dp_group: Any, dp_world_size: int | None = None
    ) -> Tensor:
        """Return the mean of tensors over a group, end to end. All of its ranks must call it."""
        values = torch.cat([each.detach().flatten() for each in bucket])
        mean = values.to(self.communication_data_type)
        mean /= dp_world_size or comm.get_world_size(dp_group)
        comm.all_reduce(mean, group=dp_group)
        return mean.to(values.dtype)

    @torch.no_grad()
    def allreduce_and_copy(
        self, small_bucket: Sequence[Tensor], dp_group: Any, dp_world_size: int | None = None
    ) -> None:
        """Replace tensors by their mean over a group. All of its ranks must call it."""
        means = self.allreduce_bucket(small_bucket, dp_group, dp_world_size)
        parts = means.split([each.numel() for each in small_bucket])
        for each, mean in zip(small_bucket, parts, strict=True):
            each.copy_(mean.view_as(each))

    def allreduce_no_retain(
        self,
        bucket: Sequence[Tensor],
        dp_group: Any,
        numel_per_bucket: int = 500_000_000,
        dp_world_size: int | None = None,
    ) -> None:
        """Do as `allreduce_and_copy`, with about so many elements at a time."""
        total = 0
        places = [(total := total + each.numel()) // numel_per_bucket for each in bucket]
        for _, part in groupby(zip(places, bucket, strict=True), itemgetter(0)):
            self.allreduce_and_copy([each for _, each in part], dp_group, dp_world_size)

    def sparse_all_gather(self, value: Tensor, dp_group: Any) -> list[Tensor]:
        """Return each rank's rows, of which they may have different numbers; all must call it."""
        own = torch.tensor([len(value)], device=value.device)
        sizes = [int(size) for size in self.all_gather_scalar(own, dp_group)]
        whole = gathered(value, 0, sizes, Ranks.of(dp_group), "the rows of a sparse tensor")
        return list(whole.split(sizes))

    def sparse_allreduce(
        self, sparse: SparseTensor, dp_group: Any, dp_world_size: int | None = None
    ) -> SparseTensor:
        """Replace rows by those of all ranks, whose sum is the mean. All ranks must call it."""
        mean = sparse.values.to(self.communication_data_type)
        mean = mean / (dp_world_size or comm.get_world_size(dp_group))
        sparse.indices = torch.cat(self.sparse_all_gather(sparse.indices, dp_group))
        found = torch.cat(self.sparse_all_gather(mean, dp_group))
        sparse.values = found.to(sparse.values.dtype)
        return sparse

    def sparse_allreduce_bucket(
        self, bucket: Sequence[SparseTensor], dp_group: Any, dp_world_size: int | None = None
    ) -> list[SparseTensor]:
        """Do so with several."""
        return [self.sparse_allreduce(each, dp_group, dp_world_size) for each in bucket]

    def sparse_allreduce_no_retain(
        self, bucket: Sequence[SparseTensor], dp_group: Any, dp_world_size: int | None = None
    ) -> None:
        """Do so, and put the mean into the tensors that they were made of."""
        for each in self.sparse_allreduce_bucket(bucket, dp_group, dp_world_size):
            assert each.orig_dense_tensor is not None
            each.orig_dense_tensor.data = each.to_coo_tensor()

    def buffered_allreduce_fallback(
        self, grads: Sequence[Tensor] | None = None, elements_per_buffer: int = 500_000_000
    ) -> None:
        """Replace tensors by their mean over the ranks that average gradients.

        Without tensors do nothing: the engine averages its gradients itself.
        """
        if grads is not None:
            self.allreduce_no_retain(grads, self.topology.sharding.group, elements_per_buffer)

    def coalesce_grad_reduction(self) -> AbstractContextManager[None]:
        """Return `no_sync()`: the reductions of the backwards inside may wait for the step."""
        return self.no_sync()

    # Programs that call these do so before `step`. What replaces them would never be called.

    def allreduce_gradients(self, bucket_size: int = 0) -> None:
        """Do nothing: gradients are averaged in backward, or at the latest in the update."""

    def clip_fp32_gradients(self) -> None:
        """Do nothing: the update clips gradients (`gradient_clipping`)."""

    def warn_of_replaced(self) -> None:
        """Warn if the program has replaced a method that nothing here calls."""
        for name in ("allreduce_gradients", "clip_fp32_gradients"):
            if getattr(type(self), name) is not getattr(Accessors, f"_own_{name}"):
                _log.warning(
                    "the program has replaced DeepSpeedEngine.%s, which is never called: gradients"
                    " are averaged and clipped (gradient_clipping) in backward and in the update",
                    name,
                )

    _own_allreduce_gradients, _own_clip_fp32_gradients = allreduce_gradients, clip_fp32_gradients

    def empty_partition_cache(self) -> None:
        """Free gathered weights, for example between training and generation."""
        self._parts.runtime.reshard_all()

    @staticmethod
    def is_map_style_dataset(obj: object) -> bool:
        """Return whether samples are accessed by index."""
        return hasattr(obj, "__getitem__") and hasattr(obj, "__len__")

    @staticmethod
    def is_iterable_style_dataset(obj: object) -> bool:
        """Return whether samples are accessed by iteration."""
        return isinstance(obj, IterableDataset)


def _accessor(name: str, path: str) -> Callable[[Engine], Any]:
    def read(engine: Engine) -> Any:
        value: Any = engine._parts.config
        for part in path.split("."):
            value = value.get(part) if isinstance(value, dict) else getattr(value, part, None)
        if value is None and name.endswith("_enabled"):
            return False  # a key of an absent section is off
        return plain(value)

    read.__name__ = name
    read.__doc__ = f"What `{path}` is."
    return read


def _constant(name: str, value: Any) -> Callable[[Engine], Any]:
    def read(engine: Engine) -> Any:
        return value

    read.__name__ = name
    read.__doc__ = f"Return {value}: the feature does not exist here."
    return read


warn_of_stores(Accessors, "engine")
for _name, _path in PATHS.items():
    setattr(Accessors, _name, _accessor(_name, _path))
for _name, _value in _TABLE["constants"].items():
    setattr(Accessors, _name, _constant(_name, _value))
for _name in _UNBUILT:
    setattr(Accessors, _name, placeholder(f"deepspeed.DeepSpeedEngine.{_name}", NameKind.FUNCTION))
