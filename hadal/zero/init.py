"""`zero.Init`: modules built inside it are created sharded, one module at a time.

A module's parameters are sharded as soon as it is attached to its parent, so the peak is the shards
plus the largest module; rank 0 keeps up to 32 MiB more until the others have received them. Later
operations on a parameter (an initialisation that the parent runs, a copy) see its real values,
because arguments are checked before they run. A parameter that is about to be filled with new
values is not gathered. `initialize` takes over the values in the dtype they were given in, and lays
them out again: a rank receives the elements of its new shards that it does not hold yet.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.utils.weak import WeakIdKeyDictionary

from hadal.comm import Ranks, init_distributed
from hadal.comm.mpu import sharing_group_of
from hadal.comm.start import memory_is_tuned
from hadal.config import load_config
from hadal.config.offload import Aio
from hadal.config.reading import read
from hadal.device import current_device, keep_freed_memory, unwatched
from hadal.errors import NotBuiltYetError, UsageError
from hadal.offload import DiskStore
from hadal.zero import access
from hadal.zero.hooks import ReadWatcher
from hadal.zero.offload import Offload
from hadal.zero.policy import STAGES, Tier
from hadal.zero.sharded_init import InitBucket, keeper
from hadal.zero.sharing import Sharing


class Init:
    """A context in which modules are created sharded; all ranks must build the same modules in it.

    The values are bit for bit those that rank 0 would get outside of it. Contexts may be nested: a
    module belongs to the innermost one that is enabled. Creating the object starts
    `torch.distributed`, unless it is running.

    Modules built on `meta` stay there until they are given memory; modules materialised inside are
    sharded when the context ends, and `Init(module=block)` shards one block at once. Parameters
    with a single element, of integers, or of a class that replaces methods of tensors stay whole.

    Args:
        module: an existing module, to be sharded at once.
        data_parallel_group: the ranks to shard over, if not all hold the same model; by default
            all ranks. Pass the same group to `initialize(mpu=...)`.
        mem_efficient_linear: accepted for DeepSpeed's signature; no layer keeps extra references.
        remote_device: where shards are stored until `initialize` lays them out again: "none" is the
            device that computes, "cpu" is host memory (the same if a CPU computes), "nvme" is the
            disk at the configuration's `zero_optimization.offload_param.nvme_path`. The default is
            `offload_param.device`, or "none".
        pin_memory: pin that host memory if there is an accelerator.
        config_dict_or_path: a configuration. Its precision gives the default of `dtype`,
            `zero_optimization.override_module_apply` decides if functions passed to `apply` see
            values, and `offload_param` and `aio` say where shards are stored and how the disk is
            used; nothing else is read before `initialize`, which lays out blocks and copies.
        config: as `config_dict_or_path`.
        enabled: False makes it a no-op.
        dtype: the dtype in which floating-point parameters are shown once the context ends; by
            default that of the configuration's fp16 or bf16. Values are also kept as given, until
            `initialize` makes masters from them.
        mpu: the object passed to `initialize`; it gives the ranks that hold the same model.
        zero_param_parallel_group: the consecutive ranks of a node that share a second copy of
            weights from creation on. It must agree with
            `zero_optimization.zero_hpz_partition_size`, which is sufficient by itself.
        zero_quantized_weights: require this key of `zero_optimization` to be enabled in
            `initialize`, where it takes effect; the key is sufficient by itself.
        zero_quantized_nontrainable_weights: likewise.
        sequence_data_parallel_group: a synonym of `data_parallel_group`, the ranks that hold the
            same model.
        param_swapper: not built yet.

    Raises:
        NotBuiltYetError: the feature of an argument is not built yet.
        UsageError: arguments contradict each other.
        ConfigError: the configuration's precision or `zero_optimization` section is invalid.
    """

    _contexts: ClassVar[list[Init]] = []
    _is_paused: ClassVar[bool] = False
    _left_out: ClassVar[WeakIdKeyDictionary] = WeakIdKeyDictionary()
    """Parameters created while sharding was paused."""
    _watching: ClassVar[ExitStack] = ExitStack()

    def __init__(  # noqa: PLR0913 - the signature is DeepSpeed's
        self,
        module: nn.Module | None = None,
        data_parallel_group: Any = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: Any = None,
        config: Any = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
        zero_param_parallel_group: Any = None,
        zero_quantized_weights: bool = False,
        zero_quantized_nontrainable_weights: bool = False,
        sequence_data_parallel_group: Any = None,
        param_swapper: Any = None,
    ) -> None:
        self._enabled = enabled
        if not enabled:
            return
        if param_swapper is not None:
            raise NotBuiltYetError(
                f"zero.Init(param_swapper={param_swapper!r}) is not built yet; leave it out"
            )
        asked = {
            "zero_quantized_weights": zero_quantized_weights,
            "zero_quantized_nontrainable_weights": zero_quantized_nontrainable_weights,
        }
        self._required = tuple(name for name, is_asked in asked.items() if is_asked)
        if mpu is not None and data_parallel_group is None:
            data_parallel_group = sharing_group_of(mpu)
        group = _one_of(
            data_parallel_group=data_parallel_group,
            sequence_data_parallel_group=sequence_data_parallel_group,
        )
        settings = _settings_of(_one_of(config_dict_or_path=config_dict_or_path, config=config))
        self._settings = settings if dtype is None else replace(settings, dtype=dtype)
        self._offload = _offload_of(
            settings, _tier_of(settings, remote_device), pins=pin_memory or settings.pins
        )
        self._buckets: list[InitBucket] = []
        self._begun: list[weakref.ref[nn.Module]] = []
        init_distributed()
        keeper.listener.start()
        if not memory_is_tuned():
            keep_freed_memory(current_device())
        self._sharing = _sharing_of(group, zero_param_parallel_group)
        access.watch_apply()
        nn.Module._apply = _moving  # type: ignore[method-assign]
        if module is not None:
            self._shard(module)
            self._show()

    def __enter__(self) -> Init:
        if self._enabled:
            if not Init._contexts:
                keeper.settle()
                stack = Init._watching
                stack.enter_context(access.attended())
                stack.enter_context(ReadWatcher(keeper.on_read, on_fill=keeper.on_fill))
                for handle in (
                    register_module_module_registration_hook(_on_attach),
                    register_module_parameter_registration_hook(_on_parameter),
                ):
                    stack.callback(handle.remove)
            Init._contexts.append(self)
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if not self._enabled:
            return
        Init._contexts.remove(self)
        if not Init._contexts:
            Init._is_paused = False
            Init._watching.close()
        begun, self._begun = self._begun, []
        if kind is None:
            # Modules that were not attached to a parent: the outermost ones.
            for reference in begun:
                module = reference()
                if module is not None:
                    self._shard(module)
            keeper.gathered.keep(0)
            keeper.sends.wait()
            self._show()

    def _shard(self, module: nn.Module) -> None:
        known = keeper.bucket_of, Init._left_out
        fresh = [p for p in module.parameters() if not any(p in table for table in known)]
        name = type(module).__name__
        with unwatched():
            self._buckets += keeper.shard(fresh, name, self._sharing, self._offload, self._required)
        if not self._settings.gathers_in_apply:
            access.leave_alone(fresh)

    def _show(self) -> None:
        """Show the parameters created here in the chosen dtype, after all initialisations."""
        buckets, self._buckets = self._buckets, []
        if self._settings.dtype is not None:
            with unwatched():
                for bucket in buckets:
                    bucket.shown = self._settings.dtype
                    if all(map(bucket.owns, bucket.parameters)):
                        bucket.hide_values()


def MiCS_Init(  # noqa: PLR0913 - the name and the signature are DeepSpeed's
    module: nn.Module | None = None,
    data_parallel_group: Any = None,
    sequence_data_parallel_group: Any = None,
    mem_efficient_linear: bool = True,
    remote_device: str | None = None,
    pin_memory: bool = False,
    config_dict_or_path: Any = None,
    config: Any = None,
    enabled: bool = True,
    dtype: torch.dtype | None = None,
    mpu: Any = None,
) -> Init:
    """Return an `Init`; an older name. `zero_optimization.mics_shard_size` works with both.

    Until `initialize` lays out the blocks, parameters are sharded over all ranks, which takes the
    least memory.
    """
    return Init(**locals())  # the same names, in another order


def _sharing_of(group: Any, near_group: Any) -> Sharing:
    ranks = Ranks.world() if group is None else Ranks.of(group)
    if near_group is None:
        return Sharing.over(ranks)
    near = Ranks.of(near_group)
    start = ranks.rank // near.size * near.size
    if ranks.size % near.size or near.numbers != ranks.numbers[start : start + near.size]:
        raise UsageError(
            f"zero.Init(zero_param_parallel_group=...): rank {ranks.numbers[ranks.rank]} is in a"
            f" group of ranks {near.numbers}; expected a block of consecutive ranks of"
            f" {ranks.numbers} whose size divides their number"
        )
    return Sharing(ranks, ranks, node=near if 1 < near.size < ranks.size else None)


def _on_attach(parent: nn.Module, name: str, child: nn.Module | None) -> None:
    """Shard a module that has been built and becomes part of another one."""
    if child is not None and not Init._is_paused:
        keeper.gathered.keep(0)
        Init._contexts[-1]._shard(child)


def _on_parameter(module: nn.Module, name: str, parameter: Tensor | None) -> None:
    """Note a module that has been given a parameter of its own."""
    if parameter is None:
        return
    if Init._is_paused:
        Init._left_out[parameter] = True
    else:
        Init._contexts[-1]._begun.append(weakref.ref(module))


def shutdown_init_context() -> None:
    """Create parameters whole from now on, although `Init` is entered."""
    Init._is_paused = bool(Init._contexts)


def restore_init_context() -> None:
    """Create parameters sharded again."""
    Init._is_paused = False


# Stores of parameters that no engine owns yet; they are removed when the program ends.
_disks: dict[str, DiskStore] = {}


def _offload_of(settings: InitSettings, tier: Tier, *, pins: bool) -> Offload:
    """Return where shards, and values as given, are stored until `initialize`."""
    if tier is not Tier.DISK:
        return Offload(tier, tier, pins, pins)
    assert settings.nvme_path is not None  # `_tier_of` has checked it
    if settings.nvme_path not in _disks:
        _disks[settings.nvme_path] = DiskStore(settings.nvme_path, settings.io)
    disk = _disks[settings.nvme_path]
    return Offload(tier, tier, pins, pins, weights_disk=disk, optimizer_disk=disk)


def _one_of(**given: Any) -> Any:
    """Return the one given argument of several synonyms."""
    found = {name: value for name, value in given.items() if value is not None}
    if len(found) > 1:
        raise UsageError(f"zero.Init got {' and '.join(found)}, which are synonyms; pass one")
    return next(iter(found.values()), None)


# ---- the configuration ---------------------------------------------------------------------------

_SECTIONS = ("fp16", "bf16", "bfloat16", "zero_optimization", "aio")


@dataclass(frozen=True, slots=True)
class InitSettings:
    """The settings of parameters that are created sharded, from a configuration."""

    dtype: torch.dtype | None = None
    """The dtype in which they are shown once the context ends; None: as they were given."""
    gathers_in_apply: bool = True
    """True: functions passed to `Module.apply` see their values."""
    tier: Tier | None = None
    """The configured tier of weights; None: not configured."""
    nvme_path: str | None = None
    pins: bool = False
    """True: host memory for them is pinned."""
    io: Aio = field(default_factory=Aio)


def _tier_of(settings: InitSettings, remote_device: str | None) -> Tier:
    """Return the tier of shards for `zero.Init(remote_device=...)` and the configuration.

    Raises:
        UsageError: there is no such device, a path is missing, or the two contradict each other.
    """
    where = f"zero.Init(remote_device={remote_device!r})"
    if remote_device is not None and remote_device not in [tier.value for tier in Tier]:
        raise UsageError(f"{where}: expected None, 'none', 'cpu' or 'nvme'")
    chosen = settings.tier or Tier.DEVICE
    if remote_device is not None:
        if settings.tier is Tier.DISK and remote_device != "nvme":
            raise UsageError(
                f"{where}: the configuration's zero_optimization.offload_param.device is"
                ' "nvme"; pass remote_device="nvme", or leave it out'
            )
        chosen = Tier(remote_device)
    if chosen is Tier.DISK and not settings.nvme_path:
        raise UsageError(
            f"{where}: the disk needs a folder; pass config_dict_or_path with"
            " zero_optimization.offload_param.nvme_path"
        )
    return chosen


def _settings_of(source: Any) -> InitSettings:
    """Read a configuration: a dict, the path of a JSON file, or its text.

    A model may be built long before the configuration is complete, so only the keys needed here are
    read, and `"auto"` counts as missing. `initialize` reads and checks all of it.

    Raises:
        ConfigError: one of the keys that it reads is invalid.
    """
    if source is None:
        return InitSettings()
    _, raw = read(source)
    wanted = {name: _without_autos(raw[name]) for name in _SECTIONS if name in raw}
    config = load_config({**wanted, "train_micro_batch_size_per_gpu": 1}, allow_unbuilt=True)
    dtype = None
    if config.fp16.enabled:
        dtype = torch.float16
    elif config.bf16.enabled:
        dtype = torch.bfloat16
    zero = config.zero_optimization
    offload = zero.offload_param
    # Without a stage, the configuration of a model that is sharded here means stage 3.
    is_cut = STAGES[zero.stage].weights or "stage" not in (raw.get("zero_optimization") or ())
    return InitSettings(
        dtype,
        zero.override_module_apply,
        Tier(offload.device) if offload is not None and is_cut else None,
        None if offload is None else offload.nvme_path,
        offload is not None and offload.pin_memory,
        config.aio,
    )


def _without_autos(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    return {name: _without_autos(inner) for name, inner in value.items() if inner != "auto"}


# ---- moves and casts -----------------------------------------------------------------------------

_M = TypeVar("_M", bound=nn.Module)
_plain_move = nn.Module._apply


def _moving(self: _M, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> _M:
    """Move or cast a placeholder (`.to`, `.half` and similar) without giving it full memory."""

    def move(tensor: Tensor) -> Tensor:
        moved = None
        if isinstance(tensor, nn.Parameter) and tensor in keeper.bucket_of:
            moved = None if any(tensor.stride()) else keeper.moved(tensor, fn)
        return fn(tensor) if moved is None else moved

    moved: _M = _plain_move(self, fn if Init._contexts else move, recurse)  # type: ignore[no-untyped-call]
    return moved
