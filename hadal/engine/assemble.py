"""Assembly of an engine from a configuration and a user's objects; reads the whole config."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset

from hadal.comm import Ranks, init_distributed, start_log
from hadal.comm.faults import raised_on_all
from hadal.comm.interrupts import expect_in_step
from hadal.comm.start import env_elasticity, memory_is_tuned
from hadal.config import Config, load_config, log_notes
from hadal.data.loader import ShardedLoader
from hadal.device import current_device, give_back_freed_memory, keep_freed_memory
from hadal.engine.apply import LaterGroups, ShardedModel
from hadal.engine.arguments import asks_for_stages, choose_config, with_schedule
from hadal.engine.checks import (
    check_accelerate,
    check_model,
    check_parameters,
    check_places,
    check_same,
    check_same_keys,
    check_same_versions,
    check_scheduler,
    check_without_stages,
    is_in_stages,
    members_of_groups,
    warn_untrained,
)
from hadal.engine.compressing import check_scores, prepare_model
from hadal.engine.engine import Engine
from hadal.engine.experts import distribute_experts, make_groups_of_experts
from hadal.engine.features import listeners_of, opened_monitor, setting_of
from hadal.engine.policies import batch_sizes_of, saving_of
from hadal.engine.precision import (
    casting_of,
    scale_rule_of,
    skips_overflow,
    warn_16bit_weights,
    warn_of_emulation,
)
from hadal.engine.recomputed import log_recomputed, recomputed_modules
from hadal.engine.report import hush, log_state, open_log
from hadal.engine.state import Parts, Training
from hadal.engine.tiers import disk_steps_of, warn_of_one_thread
from hadal.engine.topology import (
    Topology,
    TopologyWish,
    make_topology,
    topology_wish_of,
    with_slices,
)
from hadal.engine.wishes import (
    Groups,
    OptimizerMaker,
    ScheduleMaker,
    Wishes,
    count_samples,
    make_loader,
    make_loading,
    make_optimizer,
    make_schedule,
    scaled_by_batch,
    seed_of_program,
)
from hadal.errors import OffloadError, UsageError
from hadal.optim.build import build_stepper
from hadal.optim.exchanging import ExchangingStepper
from hadal.plugins.monitor.opening import expect_packages
from hadal.zero import init, place

if TYPE_CHECKING:
    from hadal.engine.pipeline import PipelineEngine

_log = logging.getLogger(__name__)


def initialize(  # noqa: PLR0913 - the signature is DeepSpeed's
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Optimizer | OptimizerMaker | None = None,
    model_parameters: Iterable[nn.Parameter] | Groups | None = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: LRScheduler | ScheduleMaker | None = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: Any = None,
    mesh_param: Any = None,
    config_params: Any = None,
    *,
    engine_type: type[Engine] = Engine,
    pipeline_engine_type: type[PipelineEngine] | None = None,
) -> tuple[Engine, Optimizer | None, ShardedLoader | None, Any]:
    """Build the engine that trains `model` with this configuration. All ranks must call it.

    Args:
        args: a namespace; its `deepspeed_config` may name the configuration, and its `lr_schedule`
            selects a schedule if nothing else does (see `add_tuning_arguments`).
        model: the module to train; its weights and buffers on rank 0 are sent to all ranks that
            hold them. A `hadal.pipeline.PipelineModule` is trained in stages.
        optimizer: an optimizer over the model's parameters, or a callable that builds one from
            `model_parameters`; it replaces the `optimizer` section.
        model_parameters: parameters, or param groups, to train; by default all that require
            gradients.
        training_data: a data set to shard over the ranks.
        lr_scheduler: a schedule of that optimizer, or a callable that builds one from it.
        distributed_port: rank 0's port, if no launcher sets one.
        mpu: the ranks' groups, if the model is split over several ranks (the methods of
            Megatron's `parallel_state`: `get_data_parallel_group`, `_world_size` and `_rank`, and
            the same of `model_parallel` or `tensor_model_parallel`), or if several ranks share
            a sequence (`get_sequence_parallel_*`).
        dist_init_required: False if the caller has started the process group.
        collate_fn: collates samples into a batch.
        config: the configuration: a dict, the path of a JSON file, or its text (also in base64).
        mesh_param: (data_parallel, sequence_parallel), whose product is the number of ranks; the
            second is the number of consecutive ranks that share each sequence.
        config_params: an older name of `config`.
        engine_type: a subclass of the engine to build, for programs that add methods.
        pipeline_engine_type: the same for a pipelined model.

    Returns:
        The engine, its optimizer, the loader over `training_data` and the schedule; None for each
        that does not exist.

    Raises:
        ConfigError: the configuration has faults; all are listed.
        ModelError, OptimizerError, UsageError: an argument cannot be used for training.
        MismatchError: the ranks were given different models or configurations.
        CommunicationError: the ranks cannot reach each other.
        MonitorError: a monitor's package is missing, or it cannot write.
    """
    if dist_init_required is not False:
        init_distributed(distributed_port=distributed_port)
    world = Ranks.world()
    expect_in_step()
    check_same_versions(world)
    hush(world.rank)
    wishes = Wishes(optimizer, model_parameters, lr_scheduler, training_data, collate_fn)
    with raised_on_all(world, "initialize"):
        source = choose_config(args, config, config_params)
        source = with_schedule(args, source, lr_scheduler is not None)
        is_cut = asks_for_stages(source)
    if is_cut:
        from hadal.engine.auto_stages import cut_by_configuration  # for this alone

        model, wishes = cut_by_configuration(model, source, wishes)
    if is_in_stages(model):
        from hadal.engine import pipeline  # for this alone

        engine_type = pipeline_engine_type or pipeline.PipelineEngine
    _end_engine_of(model)
    with raised_on_all(world, "initialize"):
        if is_in_stages(model):
            from hadal.engine.stages import groups_of_stages  # for this alone

            mpu = groups_of_stages(model, mpu)
        wish = topology_wish_of(mpu, mesh_param, world)
        admitted = _admit(model, wishes, source, wish, world, engine_type)
    _log_collectives(admitted.config)
    topology = make_topology(with_slices(wish, admitted.config), admitted.config, world)
    make_groups_of_experts(admitted.model, admitted.config, topology)
    is_kept = not memory_is_tuned() and keep_freed_memory(current_device())
    engine = _assemble(admitted, wishes, topology, world, engine_type)
    if is_kept:
        # Whole weights passed through this memory once; updates allocate other sizes.
        give_back_freed_memory()
    if admitted.config.checkpoint.resume is not None:
        engine.resume(admitted.config.checkpoint.resume)
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


def _end_engine_of(model: Any) -> None:
    """Destroy the engine that trains this very model: a cell of a notebook has run again."""
    parameters = model.parameters() if isinstance(model, nn.Module) else ()
    for held in filter(None, map(place.place_of, parameters)):
        engine = held.trainer
        if isinstance(engine, Engine) and engine.module is model:
            _log.warning(
                "initialize got the model of another engine. That engine is destroyed, with its"
                " optimizer's state; the weights stay as they are"
            )
            engine.destroy()
        return


def _log_collectives(config: Config) -> None:
    """Start recording collectives if the configuration enables it."""
    log = config.comms_logger
    if log is not None and log.enabled:
        start_log(log.verbose, log.prof_all, log.prof_ops, log.debug)


@dataclass(frozen=True, slots=True)
class _Admitted:
    """Arguments that were checked on this rank alone, before ranks talk to each other."""

    model: nn.Module
    config: Config
    optimizer: Optimizer | None
    """None if nothing can be trained."""
    is_chosen: bool
    """True if the caller or the configuration named the optimizer; else it is the default one."""
    groups: list[list[nn.Parameter]]


def _admit(
    model: nn.Module | None,
    wishes: Wishes,
    source: Any,
    wish: TopologyWish,
    ranks: Ranks,
    engine_type: type[Engine],
) -> _Admitted:
    check_model(model)
    if isinstance(model, Engine):
        raise UsageError("initialize got an engine; pass the module, engine.module")
    assert model is not None
    check_accelerate(ranks, current_device())
    init.show_as_given(model.named_parameters())
    config = load_config(
        source,
        world_size=ranks.size,
        sequence_parallel_size=wish.sequence_parallel_size,
        data_parallel_size=wish.data_parallel_size,
        tensor_parallel_size=_slices_asked_for(model),
        client_optimizer=wishes.optimizer is not None,
        client_scheduler=wishes.schedule is not None,
        rounds_early=engine_type.rounds_early,
    )
    if is_in_stages(model):
        from hadal.engine.stages import prepare_stage  # for this alone

        prepare_stage(model, config)
    else:
        check_without_stages(config, ranks.rank)
    check_scheduler(config, env_elasticity())
    check_places(config)
    open_log(config, ranks.rank)
    log_notes(config)
    check_parameters(model.named_parameters(), current_device(), ranks)
    prepare_model(config, model)
    distribute_experts(model, config, wish, ranks)
    optimizer = make_optimizer(wishes, config, model)
    is_chosen = wishes.optimizer is not None or config.optimizer is not None
    groups = members_of_groups(model, optimizer, ranks)
    check_scores(model, groups)
    if config.sparse_attention is not None:
        from hadal.plugins.sparse_attention import give_pattern  # for this alone

        give_pattern(model, config.sparse_attention)
    recomputed = recomputed_modules(config, model)
    if ranks.rank == 0:
        warn_16bit_weights(config, model)
        warn_of_emulation(config, current_device())
        warn_untrained(model, groups, is_chosen=is_chosen)
        warn_of_one_thread(config, current_device())
        expect_packages(config)
        log_recomputed(config, recomputed)
    return _Admitted(model, config, optimizer, is_chosen, groups)


def _assemble(
    admitted: _Admitted,
    wishes: Wishes,
    topology: Topology,
    world: Ranks,
    engine_type: type[Engine],
) -> Engine:
    model, config, groups = admitted.model, admitted.config, admitted.groups
    optimizer, ranks = admitted.optimizer, topology.sharding
    device = current_device()
    _cut(admitted, topology, world)
    batches = batch_sizes_of(config, topology)
    setting = setting_of(config, model, world, device, topology)
    listeners = listeners_of(setting)
    with raised_on_all(world, "initialize"):
        # Parts of a model may differ; each is compared among its own ranks.
        check_same(model, groups, _described(admitted, wishes), ranks)
    sharded = ShardedModel(model, config, topology, device)
    with raised_on_all(world, "initialize", OffloadError):
        group_of = {p: number for number, members in enumerate(groups) for p in members}
        sharded.make_plan(group_of)
    with _among_parts(topology, world):
        sharded.apply_plan()
    runtime = sharded.runtime
    if setting.clocks.reducing is not None:
        runtime.reducing = setting.clocks.reducing
    readers = topology.data_parallel
    seed = seed_of_program(world) if engine_type.seeds_data else 0
    loading = make_loading(wishes, config, readers, seed, listeners)
    loader = make_loader(wishes, loading, world, shuffle=not is_in_stages(model))

    def make_training() -> Training:
        assert optimizer is not None  # there are gradients, so there is something to train
        parts, steps = topology.parts, disk_steps_of(config)
        with raised_on_all(ranks, "making the optimizer's state", OffloadError):
            # Also if that is in the first backward: state may be offloaded to a disk.
            stepper = build_stepper(optimizer, runtime.gradients, groups, steps, parts)
        if isinstance(stepper, ExchangingStepper):
            runtime.exchange = stepper
        schedule = make_schedule(wishes, config, optimizer, admitted.is_chosen, loader)
        LaterGroups(sharded, optimizer, stepper)
        return Training(optimizer, scaled_by_batch(schedule, optimizer, listeners), stepper)

    training = None
    with raised_on_all(world, "initialize"):
        if admitted.is_chosen and runtime.gradients:
            training = make_training()
    if config.dump_state:
        log_state(config, model, runtime, batches, topology)
    return engine_type(
        Parts(
            model=model,
            topology=topology,
            runtime=runtime,
            hooks=sharded.hooks,
            training=training,
            make_training=make_training,
            casting=casting_of(config, device),
            scale_rule=scale_rule_of(config, device),
            skip_overflow=skips_overflow(config, device),
            gradient_clipping=config.gradient_clipping,
            computes_norm=config.zero_optimization.compute_grad_norm,
            batches=batches,
            clocks=setting.clocks,
            monitor=opened_monitor(setting),
            listeners=listeners,
            loader=loader,
            loading=loading,
            device=device,
            world=world,
            saving=saving_of(config),
            holds_collector=config.disable_python_gc,
            sharded=sharded,
            config=config,
        )
    )


def _cut(admitted: _Admitted, topology: Topology, world: Ranks) -> None:
    """Split the model over its tensor-parallel ranks, if all ranks request the same split."""
    check_same_keys(_common(admitted.config), world)
    if admitted.config.tensor_parallel.is_on:
        from hadal.engine.tensor import cut_over_ranks  # for this alone

        cut_over_ranks(admitted.model, admitted.optimizer, admitted.config, topology, world)


def _slices_asked_for(model: nn.Module) -> int | None:
    """Return the ranks that `tp_model_init` requested; None if it was not called."""
    tensor = sys.modules.get("hadal.engine.tensor")
    return None if tensor is None else tensor.size_asked_for(model)


def _among_parts(topology: Topology, world: Ranks) -> AbstractContextManager[None]:
    """Return a context that spreads a part's failure to all other parts."""
    if topology.model_parallel is None:
        return nullcontext()
    return raised_on_all(world, "initialize", OffloadError)


def _common(config: Config) -> dict[str, Any]:
    """Return the keys that must be the same on all ranks.

    Ranks may have different disks, and different objects for groups of ranks.
    """
    values = config.as_dict()
    degree = {**values["tensor_parallel"]["tp"], "mpu": None, "tp_group": None}
    values["tensor_parallel"] = {**values["tensor_parallel"], "tp": degree}
    zero = values["zero_optimization"]
    for name in ("offload_param", "offload_optimizer"):
        if zero.get(name):
            zero[name] = {**zero[name], "nvme_path": None}
    return values


def _described(admitted: _Admitted, wishes: Wishes) -> dict[str, Any]:
    """Describe everything outside the configuration that must match on all ranks."""
    groups = admitted.optimizer.param_groups if admitted.optimizer else []
    options = [{k: repr(v) for k, v in group.items() if k != "params"} for group in groups]
    return {
        "the optimizer": type(admitted.optimizer).__name__,
        **{f"param group {number}": group for number, group in enumerate(options)},
        "the schedule given": type(wishes.schedule).__name__,
        "training_data": type(wishes.training_data).__name__,
        "the samples of training_data": count_samples(wishes.training_data),
    }
