"""The engine as programs see it: Hadal's, with additional methods that they call."""

from __future__ import annotations

import re
import stat
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import wraps
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn, cast
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from hadal import __version__
from hadal.comm import get_local_rank, get_rank, get_world_size
from hadal.comm.collectives import broadcast_
from hadal.compat.accessors import DTYPES, Accessors
from hadal.compat.checkpoint_engines import CheckpointEngine, TorchCheckpointEngine
from hadal.compat.configuration import DeepSpeedConfig
from hadal.compat.groups import expert_groups, remember_groups
from hadal.compat.kinds import also, recognized
from hadal.compat.log import debug_extract_module_and_param_names, log_dist, logger
from hadal.compat.monitors import MonitorMaster
from hadal.compat.optimizer import DeepSpeedOptimizer, ParameterOffload, PlainOptimizer
from hadal.compat.parameters import mark_stage_1_or_2, mark_stage_3, unmark, watch_parameters
from hadal.compat.surface import VERSION
from hadal.compat.timers import (
    PhaseTimers,
    SynchronizedWallClockTimer,
    ThroughputTimer,
)
from hadal.config.reading import read
from hadal.engine.arguments import choose_config
from hadal.engine.assemble import initialize as _initialize
from hadal.engine.policies import leaves_of
from hadal.engine.state import Parts
from hadal.errors import ConfigError, LossError, ModelError, UsageError
from hadal.zero import GatheredParameters
from hadal.zero.grouping import find_tables
from hadal.zero.leaves import mark

_PREFIX = "module."  # prefix of the names in an engine's state dict
_EXPERT = ".deepspeed_experts."
_engines: WeakSet[DeepSpeedEngine] = WeakSet()


class Norm(float):
    """A number with `item()`: DeepSpeed returns tensors at some stages."""

    def item(self) -> float:
        """Return the number."""
        return float(self)


def _counter(counter: str) -> Any:
    """Return one of the engine's counters, which programs also set."""
    return property(
        getattr(Accessors, counter).fget,
        lambda engine, count: setattr(engine._state, counter, count),
        doc=getattr(Accessors, counter).__doc__,
    )


class DeepSpeedEngine(Accessors):
    """An engine with the name and the methods of DeepSpeed's."""

    rounds_early = True
    seeds_data = False  # DeepSpeed shuffles with seed 0, not with the program's seed

    _given_config: Any = None
    _outer: DeepSpeedOptimizer | None = None
    _offload: ParameterOffload | None = None
    _was_applied = False

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self._monitors = MonitorMaster.of(parts.config, parts.monitor)
        self.timers = SynchronizedWallClockTimer()
        """Clocks by name, including the phases of updates if `wall_clock_breakdown` is set."""
        if parts.clocks.lap is not None:
            self.add_listener(PhaseTimers(self.timers))
        self.tput_timer = ThroughputTimer(batch_size=self.train_batch_size())
        """The engine's throughput."""
        self.tput_timer.start()
        self.mpu: Any = None
        """The `mpu` that `initialize` was given, as the next three."""
        self.client_optimizer: Any = None
        self.client_lr_scheduler: Any = None
        self.collate_fn: Any = None
        _engines.add(self)
        self.warn_of_replaced()
        remember_groups(parts.topology)
        if parts.config.activation_checkpointing.model_fields_set:
            from hadal.compat.checkpointing import use_section  # for this alone

            use_section(parts.config.activation_checkpointing)
        debug_extract_module_and_param_names(parts.model)
        parts.runtime.leaves_others_gradients = True
        # Programs read the names of a module's state on one rank only (peft, when it saves).
        parts.runtime.gathering.gives_empty_state = True
        if self.zero_optimization_stage() == 3:
            mark_stage_3(parts.runtime)
            leaves, modules = leaves_of(parts.config), parts.model.named_modules()
            mark([each for name, each in modules if leaves.selects(name, each)], True)
        elif self.zero_optimization():
            mark_stage_1_or_2(parts.runtime)

    micro_steps = _counter("micro_steps")
    global_steps = _counter("global_steps")
    global_samples = _counter("global_samples")
    skipped_steps = _counter("skipped_steps")

    # ---- parts -----------------------------------------------------------------------------------

    @property
    def config(self) -> Any:
        """The configuration as it was given, the same object; a file's content as a dict."""
        return self._given_config

    @property
    def _config(self) -> DeepSpeedConfig:
        """The validated configuration; programs read `_config.zero_config.stage`."""
        given = self._given_config
        return DeepSpeedConfig.of(self._parts.config, given if isinstance(given, dict) else {})

    @property
    def optimizer(self) -> DeepSpeedOptimizer | ParameterOffload | None:  # type: ignore[override]
        """The optimizer that `initialize` returned; its `optimizer` is torch's.

        Without an optimizer it is None or, at stage 3, the object with which programs remove hooks
        while they generate.
        """
        inner = super().optimizer
        if inner is None:
            if self.zero_optimization_partition_weights() and self._offload is None:
                self._offload = ParameterOffload(self.module)
            return self._offload
        if self._outer is None or self._outer.optimizer is not inner:
            stage = self.zero_optimization_stage()
            # Without sharding and rounding, programs attach torch's schedules to it.
            is_plain = not (stage or self.fp16_enabled() or self.bfloat16_enabled())
            kind = PlainOptimizer if is_plain else DeepSpeedOptimizer
            self._outer = kind(inner, self, stage=stage)
        return self._outer

    @property
    def sparse_tensor_module_names(self) -> set[str]:
        """The names of embeddings' weights, if `sparse_gradients` sends their rows only."""
        tables = find_tables(self.module) if self._parts.config.sparse_gradients else frozenset()
        return {name for name, each in self.module.named_parameters() if each in tables}

    @property
    def monitor(self) -> MonitorMaster:  # type: ignore[override]
        """The monitors of the configuration, as `deepspeed.monitor` has them."""
        return self._monitors

    @property
    def basic_optimizer(self) -> Optimizer | None:
        """torch's optimizer."""
        return super().optimizer

    @property
    def lr_scheduler(self) -> Any:
        """The learning-rate schedule; None if the program steps its own."""
        return super().lr_scheduler

    @lr_scheduler.setter
    def lr_scheduler(self, schedule: Any) -> None:
        if self._state.training is not None:
            self._state.training.schedule = schedule

    def _configure_optimizer(self, client_optimizer: Any, model_parameters: Any) -> None:
        """Train with another optimizer from now on: this becomes a new engine of the model."""
        made = initialize(
            model=self.module,
            optimizer=client_optimizer,
            model_parameters=model_parameters,
            mpu=self.mpu,
            config=self._given_config,
        )[0]
        self.__dict__ = made.__dict__
        self.__dict__["_made"] = made  # others refer to it weakly
        _engines.add(self)

    def destroy(self) -> None:
        """Remove the hooks, as `hadal.Engine.destroy`; a second call does nothing."""
        super().destroy()
        _engines.discard(self)
        unmark(self._parts.runtime)

    # ---- training --------------------------------------------------------------------------------

    @also(AssertionError, of=(LossError, ModelError, UsageError))
    def backward(
        self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True
    ) -> Tensor:
        """Do as `hadal.Engine.backward`; return the loss divided by the micro-steps."""
        given = super().backward(loss, retain_graph, scale_wrt_gas)
        return given / self.gradient_accumulation_steps() if scale_wrt_gas else given

    @also(AssertionError, of=(UsageError,))
    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:  # type: ignore[override]
        """Do as `hadal.Engine.step`.

        Args:
            lr_kwargs: arguments for the schedule's step: `{"metrics": value}`, or those of a
                schedule of the program's own, such as Megatron's `{"increment": samples}`.
        """
        given = dict(lr_kwargs or {})
        metric = given.pop("metrics", None)
        before = self.global_steps
        self._was_applied = False
        super().step(metric, given)
        if self.global_steps == before:
            return
        self._was_applied = True
        if self.global_steps % self.steps_per_print() == 0 and self._reports_itself():
            self._report_progress(self.global_steps)
        if isinstance(self._outer, PlainOptimizer):
            self._outer._opt_called = True  # an attached schedule checks it
        self.tput_timer.batch_size = self.train_batch_size()
        self.tput_timer.stop(global_step=True)
        self.tput_timer.start()

    def _report_progress(self, step: int) -> None:
        """Log the step and the learning rates; a program's own is called at `steps_per_print`.

        Hadal's progress lines say more, and are logged in any case.
        """
        lr, momenta = self.get_lr(), self.get_mom()
        log_dist(f"step={step}, skipped={self.skipped_steps}, lr={lr}, mom={momenta}", ranks=[0])

    def _reports_itself(self) -> bool:
        return type(self)._report_progress is not _REPORT_PROGRESS

    @property
    def checkpoint_engine(self) -> TorchCheckpointEngine:
        """An object that writes and reads files of torch; Hadal writes checkpoints itself."""
        return TorchCheckpointEngine()

    @checkpoint_engine.setter
    def checkpoint_engine(self, engine: Any) -> None:
        if type(engine) is not TorchCheckpointEngine:
            _refuse_engine("engine.checkpoint_engine", engine)

    @also(AssertionError, ValueError)
    @wraps(Accessors.save_checkpoint)
    def save_checkpoint(self, *given: Any, **named: Any) -> bool:  # type: ignore[override]
        """Save the training state; refuse a program that would catch DeepSpeed's files."""
        agent = getattr(torch.save, "__self__", None)
        if isinstance(agent, CheckpointEngine):
            _refuse_engine("torch.save", agent)
        return super().save_checkpoint(*given, **named)

    @also(AssertionError)
    @wraps(Accessors.load_checkpoint)
    def load_checkpoint(  # type: ignore[override]
        self, load_dir: str | Path, tag: str | None = None, *given: Any, **named: Any
    ) -> Any:
        """Load the training state; with the tag ".", from the folder of the tag itself."""
        if tag == ".":
            folder = Path(load_dir).resolve()
            load_dir, tag = folder.parent, folder.name
        return super().load_checkpoint(load_dir, tag, *given, **named)

    offload_states = also(ValueError)(Accessors.offload_states)
    scale = also(AssertionError)(Accessors.scale)
    set_gradient_accumulation_boundary = also(AssertionError)(
        Accessors.set_gradient_accumulation_boundary
    )

    @also(ValueError)
    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Do as `hadal.Engine.set_train_batch_size`."""
        super().set_train_batch_size(train_batch_size)

    def was_step_applied(self) -> bool:
        """Return whether the last `step` changed the weights: at a boundary, and not skipped."""
        return self._was_applied and not self.overflow

    def get_global_grad_norm(self) -> Norm | None:
        """Return `hadal.Engine.get_global_grad_norm()`; the number also has `item()`."""
        norm = super().get_global_grad_norm()
        return None if norm is None else Norm(norm)

    # ---- state and weights -----------------------------------------------------------------------

    def state_dict(  # type: ignore[override]
        self,
        *args: Any,
        destination: dict[str, Any] | None = None,
        prefix: str = "",
        keep_vars: bool = False,
    ) -> dict[str, Any]:
        """Return `hadal.Engine.state_dict`, whole at every stage, with "module." before each name.

        `nn.Module` produces these names, and programs remove the prefix.
        """
        if args:
            given = dict(zip(("destination", "prefix", "keep_vars"), args, strict=False))
            return self.state_dict(
                **{"destination": destination, "prefix": prefix, "keep_vars": keep_vars} | given
            )
        state = self._state.whole_state(prefix=prefix + _PREFIX, keep_vars=keep_vars)
        if destination is None:
            return state
        destination.update(state)
        return destination

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Do as `hadal.Engine.load_state_dict`; all names begin with "module.", or none."""
        own = {name for name, _ in self.module.named_parameters(remove_duplicate=False)}
        own |= {name for name, _ in self.module.named_buffers(remove_duplicate=False)}
        if own.isdisjoint(state_dict):
            state_dict = {name.removeprefix(_PREFIX): value for name, value in state_dict.items()}
        return super().load_state_dict(state_dict, strict, assign)

    def load_module_state_dict(
        self,
        checkpoint: Mapping[str, Any],
        strict: bool = True,
        custom_load_fn: Callable[..., Any] | None = None,
        fetch_z3_params: bool = False,
    ) -> None:
        """Load whole weights at any stage; all ranks must call it, with the same values.

        Args:
            checkpoint: a state dict, or a dict that has one as "module".
            strict: whether names must match the model's.
            custom_load_fn: called as `custom_load_fn(src=state_dict, dst=module)` instead.
            fetch_z3_params: ignored: sharded weights are always whole meanwhile.
        """
        inner = checkpoint.get("module")
        state = inner if isinstance(inner, Mapping) else checkpoint
        if custom_load_fn is None:
            self.load_state_dict(state, strict=strict)
            return
        with torch.no_grad(), GatheredParameters(self.module.parameters()):
            custom_load_fn(src=state, dst=self.module)

    def save_16bit_model(
        self,
        save_dir: str | Path,
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
        max_shard_size: str | int = sys.maxsize,
    ) -> bool:
        """Do as `hadal.Engine.save_16bit_model`, in one file that `torch.load` reads."""
        return super().save_16bit_model(
            save_dir, save_filename, exclude_frozen_parameters, max_shard_size
        )

    def _create_checkpoint_file(
        self, save_dir: str | Path, tag: str, zero_checkpoint: bool = False
    ) -> bool:
        """Make the directory of a checkpoint; return True."""
        Path(save_dir, tag).mkdir(parents=True, exist_ok=True)
        return True

    def _save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str,
        client_state: Mapping[str, Any] = MappingProxyType({}),
        exclude_frozen_parameters: bool = False,
    ) -> None:
        """Write DeepSpeed's file of this rank's weights and `client_state`; not a collective.

        Programs with files of their own call it; `load_checkpoint` does not read it.
        """
        from hadal.compat.files import get_model_ckpt_name_for_rank  # for this alone

        weights = self.module_state_dict(exclude_frozen_parameters=exclude_frozen_parameters)
        part = f"{self.get_model_parallel_rank():02d}"
        name = get_model_ckpt_name_for_rank(Path(save_dir, tag), part)
        torch.save({"module": weights, **client_state}, name)

    def _copy_recovery_script(self, save_path: str | Path) -> None:
        """Put `zero_to_fp32.py` into a directory of checkpoints, as each save does."""
        from hadal.checkpoint.saving import place_scripts  # for this alone

        place_scripts(Path(save_path))

    @staticmethod
    def _get_expert_ckpt_name(
        checkpoints_path: str | Path,
        layer_id: int,
        expert_id: int,
        tag: str | None,
        mpu: Any = None,
        checkpoint_mp_rank: int | None = None,
    ) -> str:
        """Return the file in which DeepSpeed stores an expert."""
        part = checkpoint_mp_rank or (0 if mpu is None else mpu.get_model_parallel_rank())
        layer = f"layer_{layer_id}_" if layer_id >= 0 else ""
        name = f"{layer}expert_{expert_id}_mp_rank_{part:02d}_model_states.pt"
        return str(Path(checkpoints_path, tag or "", name))

    def _get_optimizer_ckpt_name(
        self, checkpoints_path: str | Path, tag: str, expp_rank: int
    ) -> str:
        """Return the file in which DeepSpeed stores an optimizer beside sharded experts."""
        part = self.get_model_parallel_rank()
        name = f"expp_rank_{expp_rank}_mp_rank_{part:02d}_optim_states.pt"
        return str(Path(checkpoints_path, tag, name))

    @staticmethod
    def load_moe_state_dict(  # noqa: PLR0913 - the signature is DeepSpeed's
        checkpoint_path: str | Path,
        tag: str,
        state_dict: dict[str, Any],
        old_moe_load: bool,
        model: nn.Module | None = None,
        mpu: Any = None,
        num_experts: Any = 1,
        checkpoint_engine: CheckpointEngine | None = None,
        autoep_layers: Any = None,
        folding_spec: Any = None,
        checkpoint_mp_rank: int | None = None,
    ) -> None:
        """Add this rank's experts, each from its file of DeepSpeed's, to a model's state dict.

        Raises:
            UsageError: the files are of a release that has one number for all layers.
        """
        from hadal.plugins.moe.layer import MoE  # for this alone

        if old_moe_load:
            raise UsageError(
                "load_moe_state_dict(old_moe_load=True): files of experts without their layer's"
                " number are not read; pass a folder with layer_<n>_expert_<m>_*.pt"
            )
        read = (checkpoint_engine or TorchCheckpointEngine()).load
        layers = [each for each in cast(nn.Module, model).modules() if isinstance(each, MoE)]
        for number, layer in enumerate(layers):
            count = layer.num_local_experts
            first = expert_groups(layer.expert_group_name).parallel.rank * count
            for place in range(count):
                file = DeepSpeedEngine._get_expert_ckpt_name(
                    checkpoint_path, number, first + place, tag, mpu, checkpoint_mp_rank
                )
                theirs, here = f"{_EXPERT}{first + place}.", f"{_EXPERT}{place}."
                found = read(file, map_location="cpu").items()
                state_dict.update({name.replace(theirs, here): value for name, value in found})

    def _change_recovery_script_permissions(self, dst: str | Path) -> None:
        """Let the owner run a script, if its folder allows it."""
        with suppress(FileNotFoundError, PermissionError):
            Path(dst).chmod(Path(dst).stat().st_mode | stat.S_IEXEC)

    def _get_zero_param_shapes(self) -> list[dict[str, torch.Size]]:
        """Return the shapes of the trained parameters by name, one dict for each param group."""
        names, found = self.param_names, cast(dict[int, dict[str, torch.Size]], {})
        for bucket in self._parts.runtime.buckets:
            for parameter, slot in zip(bucket.parameters, bucket.layout.slots, strict=True):
                if slot.group >= 0:
                    found.setdefault(slot.group, {})[names[parameter]] = parameter.shape
        return [found[group] for group in sorted(found)]

    def _broadcast_model(self) -> None:
        """Give all ranks rank 0's weights and buffers, as `initialize` did. All ranks must call it.

        Programs call it again after they have loaded weights on rank 0.
        """
        with GatheredParameters(self.module.parameters(), modifier_rank=0):
            pass
        for name, buffer in self.module.named_buffers():
            broadcast_(buffer.data, 0, self._parts.ranks, f"the broadcast of buffer {name}")

    def save_fp16_model(
        self, save_dir: str | Path, save_filename: str = "pytorch_model.bin"
    ) -> bool:
        """Call `save_16bit_model`."""
        return self.save_16bit_model(save_dir, save_filename)

    # ---- configuration ---------------------------------------------------------------------------

    def zero_optimization_stage(self) -> int:
        """Return the ZeRO stage, 0 to 3."""
        return int(self._parts.config.zero_optimization.stage)

    def zero_optimization(self) -> bool:
        """Return whether anything is sharded."""
        return self.zero_optimization_stage() > 0

    def zero_optimization_partition_gradients(self) -> bool:
        """Return whether gradients are sharded."""
        return self.zero_optimization_stage() >= 2

    def zero_optimization_partition_weights(self) -> bool:
        """Return whether weights are sharded."""
        return self.zero_optimization_stage() == 3

    def fp16_enabled(self) -> bool:
        """Return whether the model computes in fp16."""
        return bool(self._parts.config.fp16.enabled)

    def bfloat16_enabled(self) -> bool:
        """Return whether the model computes in bf16."""
        return bool(self._parts.config.bf16.enabled)

    def _mixed_precision_dtypes(self) -> tuple[torch.dtype | None, torch.dtype | None]:
        """Return the dtype of 16-bit weights, and that of buffers, if they have one."""
        is_half, named = self.fp16_enabled(), self._config.buffer_dtype
        weights = torch.half if is_half else torch.bfloat16 if self.bfloat16_enabled() else None
        return weights, DTYPES.get(named)

    def _assert_valid_mixed_precision_config(self) -> None:
        """Raise a ConfigError if `data_types.param_dtype` is another than the sections give."""
        named, found = self._config.param_dtype, DeepSpeedEngine._mixed_precision_dtypes(self)[0]
        if named is not None and DTYPES[named] != (found or torch.float32):
            with also(AssertionError):
                raise ConfigError(
                    f"data_types.param_dtype {named!r} conflicts with the sections fp16 and bf16,"
                    f" which give {found or torch.float32}; remove it"
                )

    def _cast_module_mixed_precision(
        self,
        param_dtype: torch.dtype | None,
        buffer_dtype: torch.dtype | None,
        is_zero_init_model: bool,
        keep_pattern: re.Pattern[str] | None = None,
    ) -> None:
        """Cast a module's weights, unless they are sharded already, and its buffers."""
        weights = () if is_zero_init_model else self.module.parameters()
        wanted = [(each, param_dtype) for each in weights]
        for name, buffer in self.module.named_buffers():
            is_kept = keep_pattern is not None and keep_pattern.search(name)
            wanted.append((buffer, torch.float32 if is_kept else buffer_dtype))  # type: ignore[arg-type]
        for each, dtype in wanted:
            if dtype is not None and each.dtype in DTYPES.values():
                each.data = each.data.to(dtype)

    def gradient_clipping(self) -> float:
        """Return the maximum gradient norm; 0.0 means no limit."""
        return self._parts.config.gradient_clipping

    def steps_per_print(self) -> Any:
        """Return the number of updates between progress lines; infinity if there are none."""
        every = self._parts.config.steps_per_print
        return float("inf") if every is None else every

    def optimizer_name(self) -> str | None:
        """Return the configured optimizer type in lower case."""
        section = self._parts.config.optimizer
        return None if section is None else section.type.lower()

    def scheduler_name(self) -> str | None:
        """Return the configured schedule type."""
        section = self._parts.config.scheduler
        return None if section is None else section.type

    # ---- ranks -----------------------------------------------------------------------------------

    def set_custom_curriculum_learning_schedule(self, schedule_func_dict: Any) -> None:
        """Set the functions of custom schedules, as `set_custom_schedules` does."""
        from hadal.plugins.data_efficiency.ordered import set_custom_schedules  # for this alone

        set_custom_schedules(self, schedule_func_dict)

    def set_data_post_process_func(self, post_process_func: Callable[..., Any]) -> None:
        """Change each training batch, as `training_dataloader.set_post_process` does."""
        if self.training_dataloader is None:
            raise UsageError(
                "set_data_post_process_func: the engine has no training loader; pass training_data"
                " to initialize, or call engine.deepspeed_io first"
            )
        self.training_dataloader.set_post_process(post_process_func)

    local_rank = property(lambda self: get_local_rank())
    """This process's rank on its host."""
    global_rank = property(lambda self: get_rank())
    """This process's rank in the world."""
    dist_backend = property(lambda self: str(dist.get_backend()))
    """The backend of the process group."""

    @property
    def pipeline_parallelism(self) -> bool:
        """False: layers are not distributed over ranks."""
        return False

    has_moe_layers = property(lambda self: bool(self.num_experts))
    """True if the model has layers of experts."""

    def _has_autoep_layers(self) -> bool:
        """Return whether the section `expert_parallel` has distributed experts."""
        from hadal.plugins.moe.blocks import DistributedExperts  # for this alone

        return any(isinstance(each, DistributedExperts) for each in self.module.modules())

    @property
    def num_experts(self) -> list[int]:
        """The number of experts of each layer of experts, on all ranks together."""
        from hadal.plugins.moe.blocks import counts_of_experts  # for this alone

        return counts_of_experts(self.module)

    world_size = property(lambda self: get_world_size())
    """The number of processes."""
    data_parallel_group = property(lambda self: self._parts.topology.data_parallel.group)
    """The ranks that see different samples."""
    seq_data_parallel_group = property(lambda self: self._parts.topology.sharding.group)
    """The ranks that average gradients."""
    dp_world_size = property(lambda self: self._parts.topology.data_parallel.size)
    """The number of ranks that see different samples."""
    seq_dp_world_size = property(lambda self: self._parts.topology.sharding.size)
    """The number of ranks that average gradients."""
    mp_world_size = property(lambda self: self._parts.topology.model_parallel_size)
    """The number of ranks that hold parts of this model."""
    sequence_parallel_size = property(lambda self: self._parts.topology.sequence_parallel_size)
    """The number of ranks that share each sequence."""

    @property
    def param_names(self) -> dict[nn.Parameter, str]:
        """The name of each parameter of the module."""
        return {parameter: name for name, parameter in self.module.named_parameters()}

    @property
    def seq_parallel_group(self) -> dist.ProcessGroup | None:
        """The ranks that share this rank's sequences; None if none do."""
        shared = self._parts.topology.sequence_parallel
        return None if shared is None else shared.group

    def get_sequence_parallel_group(self) -> dist.ProcessGroup | None:
        """Return the ranks that share this rank's sequences; None if none do."""
        return self.seq_parallel_group


def is_autocast_initialized() -> bool:
    """Return whether an engine of this process computes under `torch_autocast`."""
    return any(engine.torch_autocast_enabled() for engine in _engines)


def autocast_if_enabled(engine: DeepSpeedEngine) -> torch.autocast:
    """Return a context that computes as the engine's forward does under `torch_autocast`."""
    enabled = engine.torch_autocast_enabled()
    return torch.autocast(engine.device.type, engine.torch_autocast_dtype(), enabled)


def has_comm_dtype(param: nn.Parameter) -> bool:
    """Return whether `torch_autocast` gives a parameter's gradient a dtype of its own when sent."""
    return get_comm_dtype(param) != param.dtype


def init_autocast_params(
    engine: DeepSpeedEngine,
    dtype: torch.dtype,
    torch_autocast_lower_precision_safe_modules: list[str] | None,
) -> None:
    """Check that `initialize` has set up an engine's autocast so.

    Raises:
        UsageError: it has not.
    """
    section = engine._parts.config.torch_autocast
    given = None if section is None else section.lower_precision_safe_modules
    has = engine.torch_autocast_dtype(), None if given is None else list(given)
    if has != (dtype, torch_autocast_lower_precision_safe_modules):
        raise UsageError(
            f"init_autocast_params: the engine has {has}; set torch_autocast in the configuration"
        )


def get_comm_dtype(param: nn.Parameter) -> torch.dtype:
    """Return the dtype in which `torch_autocast` sends a parameter's gradient."""
    for engine in _engines:
        bucket = engine._parts.runtime.bucket_of.get(param)
        if bucket is not None and engine.torch_autocast_enabled():
            return bucket.precision.reduce
    return param.dtype


def get_allgather_dtype(param: nn.Parameter, param_ds_tensor: Tensor) -> torch.dtype:
    """Return the dtype in which a parameter is gathered: `torch_autocast`'s, or its shard's."""
    return get_comm_dtype(param) if has_comm_dtype(param) else param_ds_tensor.dtype


_REPORT_PROGRESS = DeepSpeedEngine._report_progress


@also(AssertionError)
def initialize(  # noqa: PLR0913 - the signature is DeepSpeed's
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Any = None,
    model_parameters: Any = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Any = None,
    config: Any = None,
    mesh_param: Any = None,
    config_params: Any = None,
) -> tuple[DeepSpeedEngine, DeepSpeedOptimizer | ParameterOffload | None, Any, Any]:
    """Create an engine: see `hadal.initialize` for the arguments.

    An engine that already trains the same parameters is destroyed first, because programs create a
    second one for their model and continue with that.
    """
    from hadal.compat.pipeline import PipelineEngine

    watch_parameters()
    if isinstance(model, nn.Module):
        _destroy_engines_of(model)
    made, _, loader, schedule = _initialize(
        *(args, model, optimizer, model_parameters, training_data, lr_scheduler, distributed_port),
        *(mpu, dist_init_required, collate_fn, config, mesh_param, config_params),
        engine_type=DeepSpeedEngine,
        pipeline_engine_type=PipelineEngine,
    )
    engine = cast(DeepSpeedEngine, made)  # as requested above, or a plan's stand-in
    given = choose_config(args, config, config_params)
    engine._given_config = given if isinstance(given, Mapping) else read(given)[1]
    engine.mpu = engine.grid if isinstance(engine, PipelineEngine) else mpu
    engine.collate_fn = collate_fn
    engine.client_optimizer, engine.client_lr_scheduler = optimizer, lr_scheduler
    logger.info("DeepSpeed info: version=%s, which is Hadal %s here", VERSION, __version__)
    return engine, engine.optimizer, loader, schedule


DeepSpeedHybridEngine = recognized(
    "DeepSpeedHybridEngine",
    "An engine that generates with whole weights: its module's `generate` gathers them once.",
    lambda one: isinstance(one, DeepSpeedEngine) and one._parts.config.hybrid_engine.enabled,
    "deepspeed.initialize returns an engine that is an instance of it if hybrid_engine.enabled is"
    " true",
)


def _refuse_engine(place: str, engine: Any) -> NoReturn:
    raise UsageError(
        f"{place} was set to a method or object of {type(engine).__name__}, which would never be"
        " called: Hadal writes its checkpoints itself. To save in the background set"
        " checkpoint.async_save; to choose where, checkpoint.staging"
    )


def _destroy_engines_of(model: nn.Module) -> None:
    parameters = set(model.parameters())
    for engine in list(_engines):
        if not parameters.isdisjoint(engine._parts.runtime.bucket_of):
            logger.info("destroyed the model's engine, because initialize builds a new one")
            engine.destroy()
