"""Sets up each library, and drives it through one optimiser step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from peers.settings import (
    BETAS,
    CLIP,
    EPSILON,
    LEARNING_RATE,
    WEIGHT_DECAY,
    Contestant,
    Workload,
    ds_config,
)

ADAMW: dict[str, Any] = {
    "lr": LEARNING_RATE,
    "betas": BETAS,
    "eps": EPSILON,
    "weight_decay": WEIGHT_DECAY,
    "fused": True,
}


class Trainer(Protocol):
    """A model under one library, ready to train."""

    def step(self, batches: Sequence[Tensor]) -> float:
        """Run one optimiser step over the micro-batches; return the last one's loss."""

    def close(self) -> None:
        """Release the library's resources."""


class Starter(Protocol):
    """Puts a model under a library; this call is what the initialisation time covers."""

    def __call__(self, model: nn.Module, contestant: Contestant, workload: Workload) -> Trainer: ...


class EngineTrainer:
    """Hadal and DeepSpeed: the engine owns clipping, accumulation and the optimiser."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def step(self, batches: Sequence[Tensor]) -> float:
        loss = torch.zeros(())
        for batch in batches:
            loss = self._engine(batch)
            self._engine.backward(loss)
            self._engine.step()
        return loss.item()

    def close(self) -> None:
        self._engine.destroy()


class TorchTrainer:
    """DDP and FSDP2: accumulation, clipping and the optimiser are in the training loop.

    ``forward`` computes the loss; ``synchronise`` gets, before each micro-batch, whether its
    gradients are to be reduced, and is a context around that micro-batch.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        forward: Callable[[Tensor], Tensor],
        synchronise: Callable[[bool], contextlib.AbstractContextManager[None]],
    ) -> None:
        self._parameters = list(model.parameters())
        self._optimizer = optimizer
        self._forward = forward
        self._synchronise = synchronise

    def step(self, batches: Sequence[Tensor]) -> float:
        loss = torch.zeros(())
        last = len(batches) - 1
        for place, batch in enumerate(batches):
            with self._synchronise(place == last):
                loss = self._forward(batch)
                (loss / len(batches)).backward()
        nn.utils.clip_grad_norm_(self._parameters, CLIP)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return loss.item()

    def close(self) -> None:
        """There is nothing to release except the process group."""


def _import_hadal() -> Starter:
    from hadal import initialize

    def start(model: nn.Module, contestant: Contestant, workload: Workload) -> Trainer:
        engine, *_ = initialize(
            model=model,
            model_parameters=model.parameters(),
            config=ds_config(workload, contestant),
        )
        return EngineTrainer(engine)

    return start


def _import_deepspeed() -> Starter:
    import deepspeed

    def start(model: nn.Module, contestant: Contestant, workload: Workload) -> Trainer:
        engine, *_ = deepspeed.initialize(
            model=model,
            model_parameters=model.parameters(),
            config=ds_config(workload, contestant),
        )
        return EngineTrainer(engine)

    return start


def _import_fsdp2() -> Starter:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    def start(model: nn.Module, contestant: Contestant, workload: Workload) -> Trainer:
        options: dict[str, Any] = {
            "mesh": init_device_mesh("cpu", (workload.world_size,)),
            "mp_policy": MixedPrecisionPolicy(
                param_dtype=torch.bfloat16, reduce_dtype=_dtype(contestant.traffic)
            ),
            "reshard_after_forward": contestant.stage == 3,
        }
        for block in cast(nn.ModuleList, model.blocks):
            fully_shard(block, **options)
        sharded = fully_shard(model, **options)

        @contextlib.contextmanager
        def synchronise(last: bool) -> Iterator[None]:
            sharded.set_is_last_backward(last)
            sharded.set_requires_gradient_sync(last)
            yield

        optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
        return TorchTrainer(model, optimizer, model, synchronise)

    return start


def _import_ddp() -> Starter:
    return _ddp_starter(lambda model: torch.optim.AdamW(model.parameters(), **ADAMW))


def _import_zero_redundancy() -> Starter:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.AdamW, parameters_as_bucket_view=True, **ADAMW
        )

    return _ddp_starter(optimizer)


def _ddp_starter(make_optimizer: Callable[[nn.Module], torch.optim.Optimizer]) -> Starter:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
    from torch.nn.parallel import DistributedDataParallel

    def start(model: nn.Module, contestant: Contestant, workload: Workload) -> Trainer:
        wrapped = DistributedDataParallel(
            model, gradient_as_bucket_view=True, broadcast_buffers=False
        )
        if contestant.traffic == "bf16":
            # DDP refuses the hook of this name on gloo, although gloo reduces bf16.
            wrapped.register_comm_hook(
                None, lambda group, bucket: default_hooks.bf16_compress_hook(group, bucket)
            )

        def forward(batch: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss: Tensor = wrapped(batch)
            return loss

        def synchronise(last: bool) -> contextlib.AbstractContextManager[None]:
            return contextlib.nullcontext() if last else wrapped.no_sync()

        return TorchTrainer(model, make_optimizer(model), forward, synchronise)

    return start


def _dtype(traffic: str) -> torch.dtype:
    return torch.bfloat16 if traffic == "bf16" else torch.float32


_IMPORTS: dict[str, Callable[[], Starter]] = {
    "hadal": _import_hadal,
    "deepspeed": _import_deepspeed,
    "fsdp2": _import_fsdp2,
    "ddp": _import_ddp,
    "zero_redundancy": _import_zero_redundancy,
}


def import_starter(library: str) -> Starter:
    """Import the library and return its starter; raises ``ImportError`` if it is missing."""
    return _IMPORTS[library]()


def join_group(workload: Workload) -> None:
    """Join the process group over gloo, which every contestant uses."""
    torch.set_num_threads(workload.threads)
    dist.init_process_group("gloo")
