"""Assembly of an engine, stage by stage, from a configuration and a user's objects."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset

from hadal.comm import Ranks, init_distributed, start_log
from hadal.comm.faults import raised_on_all
from hadal.comm.start import env_elasticity, memory_is_tuned
from hadal.comm.works import expect_in_step
from hadal.config import Config, load_config, log_notes
from hadal.data.loader import ShardedLoader
from hadal.device import current_device, give_back_freed_memory, keep_freed_memory
from hadal.engine import checks, precision
from hadal.engine.apply import LaterGroups, ShardedModel, change_modules, cut_model, plan_for_ranks
from hadal.engine.arguments import (
    Groups,
    InitializeArguments,
    OptimizerMaker,
    ScheduleMaker,
    asks_for_stages,
    choose_config,
    scaled_by_batch,
    seed_of_program,
    with_schedule,
)
from hadal.engine.engine import Engine
from hadal.engine.features import copied_for_plans, listeners_of, opened_monitor, setting_of
from hadal.engine.listeners import GivenArguments
from hadal.engine.policies import batch_sizes_of, disk_steps_of, saving_of, warn_of_one_thread
from hadal.engine.report import hush, log_state, open_log
from hadal.engine.state import Parts, Training
from hadal.engine.topology import (
    RequestedRanks,
    Topology,
    make_topology,
    requested_ranks,
    with_slices,
)
from hadal.errors import OffloadError, UsageError
from hadal.listener import Listener
from hadal.optim.build import build_stepper
from hadal.optim.exchanging import ExchangingStepper
from hadal.plugins.monitor.opening import expect_packages
from hadal.zero import place, sharded_init

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
    world, device = _start(dist_init_required, distributed_port), current_device()

    # Read: where the configuration is, and the model, or this rank's stage of it.
    arguments = InitializeArguments(
        optimizer, model_parameters, lr_scheduler, training_data, collate_fn
    )
    source, is_cut = _read_source(args, config, config_params, arguments, world)
    unchanged = copied_for_plans(model, source, world)
    model, arguments = _split(model, source, arguments) if is_cut else (model, arguments)
    engine_type = type_for(model, engine_type, pipeline_engine_type)
    _end_engine_of(model)

    # Check what this rank can know alone, and find the ranks that share the model.
    with raised_on_all(world, "initialize"):
        requested = requested_ranks(groups_of(model, mpu), mesh_param, world)
        model = checks.check_model(model)
        config = _read_config(model, source, arguments, requested, engine_type)
        _check(model, config, world, device)
    topology = make_topology(with_slices(requested, config), config, world)

    # Plan the modules, then change them, and make an optimizer over their parameters.
    with raised_on_all(world, "initialize"):
        modules = plan_for_ranks(model, config, requested, topology, world)
        change_modules(model, modules)
        optimizer = arguments.make_optimizer(config, model)
        groups = checks.members_of_groups(model, optimizer, world)
        _warn(model, config, groups, arguments, device)

    # Cut layers over ranks, plan units and buckets, and make them.
    with _kept_memory(device):
        cut_model(model, optimizer, modules, config, topology, world)
        checks.check_same(model, groups, arguments.described(optimizer), topology.sharding, world)
        sharded = ShardedModel(model, config, topology, device)
        sharded.make_plan(modules, groups, world)
        setting = setting_of(
            config,
            model,
            world,
            device,
            topology,
            sharded.plan,
            GivenArguments(unchanged, RequestedRanks() if is_cut else requested, optimizer),
        )
        listeners = listeners_of(setting)
        with _among_parts(topology, world):
            sharded.apply_plan(setting.clocks.reducing)

        # Training: the data, and the optimizer's state, unless that is made by the first backward.
        loading = arguments.make_loading(
            config,
            topology.data_parallel,
            seed_of_program(world) if engine_type.seeds_data else 0,
            listeners,
        )
        loader = arguments.make_loader(loading, world, shuffle=not checks.is_in_stages(model))
        make_training = partial(
            _make_training, arguments, optimizer, groups, sharded, loader, listeners
        )
        with raised_on_all(world, "initialize"):
            is_now = arguments.name_an_optimizer(config) and sharded.runtime.gradients
            training = make_training() if is_now else None
        batches = batch_sizes_of(config, topology)
        log_state(config, model, sharded.runtime, batches, topology)
        engine = engine_type(
            Parts(
                model=model,
                topology=topology,
                ranks=topology.sharding,
                sharded=sharded,
                runtime=sharded.runtime,
                hooks=sharded.hooks,
                training=training,
                make_training=make_training,
                casting=precision.casting_of(config, device),
                scale_rule=precision.scale_rule_of(config, device),
                skip_overflow=precision.skips_overflow(config, device),
                batches=batches,
                clocks=setting.clocks,
                monitor=opened_monitor(setting),
                listeners=listeners,
                loader=loader,
                loading=loading,
                device=device,
                world=world,
                saving=saving_of(config, topology, sharded.runtime.buckets),
                config=config,
            )
        )
    if config.checkpoint.resume is not None:
        engine.resume(config.checkpoint.resume)
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


def _start(dist_init_required: bool | None, distributed_port: int) -> Ranks:
    """Connect the ranks, if the caller has not done so, and return them."""
    if dist_init_required is not False:
        init_distributed(distributed_port=distributed_port)
    world = Ranks.world()
    expect_in_step()
    checks.check_same_versions(world)
    hush(world.rank)
    return world


def _read_source(
    args: Any, config: Any, config_params: Any, arguments: InitializeArguments, world: Ranks
) -> tuple[Any, bool]:
    """Return where the configuration is, and whether it asks to cut the model into stages.

    Raises:
        UsageError: the configuration, or a schedule, is missing or named twice.
    """
    with raised_on_all(world, "initialize"):
        source = choose_config(args, config, config_params)
        source = with_schedule(args, source, arguments.schedule is not None)
        return source, asks_for_stages(source)


def _split(
    model: nn.Module | None, source: Any, arguments: InitializeArguments
) -> tuple[nn.Module | None, InitializeArguments]:
    """Return this rank's stage of a model, and the arguments for it."""
    from hadal.engine.stages import cut_by_configuration  # for this alone

    return cut_by_configuration(model, source, arguments)


def type_for(model: Any, whole: type[Engine], staged: type[PipelineEngine] | None) -> type[Engine]:
    """Return the class of a model's engine; another one trains stages."""
    if not checks.is_in_stages(model):
        return whole
    from hadal.engine import pipeline  # for this alone

    return staged or pipeline.PipelineEngine


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


def groups_of(model: Any, mpu: Any) -> Any:
    """Return the groups of ranks that the caller passed, or those of a model in stages."""
    if not checks.is_in_stages(model):
        return mpu
    from hadal.engine.stages import groups_of_stages  # for this alone

    return groups_of_stages(model, mpu)


def _read_config(
    model: nn.Module,
    source: Any,
    arguments: InitializeArguments,
    requested: RequestedRanks,
    engine_type: type[Engine],
) -> Config:
    """Read and check the configuration.

    Raises:
        ConfigError: it has faults, or does not fit a model in stages.
    """
    if isinstance(model, Engine):
        raise UsageError("initialize got an engine; pass the module, engine.module")
    world = Ranks.world()
    checks.check_accelerate(world, current_device())
    tensor = sys.modules.get("hadal.engine.parallel")
    config = load_config(
        source,
        world_size=world.size,
        sequence_parallel_size=requested.sequence_parallel_size,
        data_parallel_size=requested.data_parallel_size,
        tensor_parallel_size=None if tensor is None else tensor.size_asked_for(model),
        client_optimizer=arguments.optimizer is not None,
        client_scheduler=arguments.schedule is not None,
        rounds_early=engine_type.rounds_early,
    )
    if checks.is_in_stages(model):
        from hadal.engine.stages import prepare_stage  # for this alone

        prepare_stage(model, config)
    else:
        checks.check_without_stages(config, world.rank)
    return config


def _check(model: nn.Module, config: Config, world: Ranks, device: torch.device) -> None:
    """Check the configuration's surroundings and the model's parameters, and start the logs.

    Raises:
        ConfigError, ModelError, UsageError: one of them cannot be used for training.
    """
    checks.check_scheduler(config, env_elasticity())
    checks.check_places(config)
    open_log(config, world.rank)
    log_notes(config)
    sharded_init.show_as_given(model.named_parameters())
    checks.check_parameters(model.named_parameters(), device, world)
    log = config.comms_logger
    if log is not None and log.enabled:
        start_log(log.verbose, log.prof_all, log.prof_ops, log.debug)


def _warn(
    model: nn.Module,
    config: Config,
    groups: list[list[nn.Parameter]],
    arguments: InitializeArguments,
    device: torch.device,
) -> None:
    """Warn, on rank 0, of what trains differently than it seems, or slowly.

    Raises:
        MissingPackageError: a monitor's package is missing.
        UsageError: the optimizer lacks parameters that pruning learns.
    """
    checks.check_scores(model, groups)
    if Ranks.world().rank != 0:
        return
    precision.warn_16bit_weights(config, model)
    precision.warn_of_emulation(config, device)
    checks.warn_untrained(model, groups, is_chosen=arguments.name_an_optimizer(config))
    warn_of_one_thread(config, device)
    expect_packages(config)


@contextmanager
def _kept_memory(device: torch.device) -> Iterator[None]:
    """Keep freed memory inside the block, unless the program has tuned it."""
    is_kept = not memory_is_tuned() and keep_freed_memory(device)
    yield
    if is_kept:
        # Whole weights passed through this memory once; updates allocate other sizes.
        give_back_freed_memory()


def _among_parts(topology: Topology, world: Ranks) -> AbstractContextManager[None]:
    """Return a context that spreads a part's failure to all other parts."""
    if topology.model_parallel is None:
        return nullcontext()
    return raised_on_all(world, "initialize", OffloadError)


def _make_training(
    arguments: InitializeArguments,
    optimizer: Optimizer | None,
    groups: list[list[nn.Parameter]],
    sharded: ShardedModel,
    loader: ShardedLoader | None,
    listeners: tuple[Listener, ...],
) -> Training:
    """Make the optimizer's state and the schedule, once there are gradients; all ranks call it."""
    assert optimizer is not None  # there are gradients, so there is something to train
    runtime, config, topology = sharded.runtime, sharded.config, sharded.topology
    with raised_on_all(topology.sharding, "making the optimizer's state", OffloadError):
        # Also if that is in the first backward: state may be offloaded to a disk.
        stepper = build_stepper(
            optimizer, runtime.gradients, groups, disk_steps_of(config), topology.parts
        )
    if isinstance(stepper, ExchangingStepper):
        runtime.exchange = stepper
    schedule = arguments.make_schedule(config, optimizer, loader)
    LaterGroups(sharded, optimizer, stepper)
    return Training(optimizer, scaled_by_batch(schedule, optimizer, listeners), stepper)
