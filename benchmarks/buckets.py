"""The effect of the bucket keys: the memory of one step beyond model states, as they decrease.

A model of equal blocks is trained on CPU ranks at stages 2 and 3 with both bucket keys at several
values. Whenever a gradient arrives and whenever a block begins, each rank counts the bytes of all
tensors that Python reaches. The peak minus the memory between steps is gradients in flight,
gathered weights and a few activations. The table also has the largest message of a refresh. The
figures are counts of bytes: the same on every machine, at any load.
"""

from __future__ import annotations

import argparse
import gc
import os
import socket
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch import Tensor, nn

import hadal
from hadal.comm.local import pairs

_MIB = 2**20


class Block(nn.Module):
    """A feed-forward block of equal matrices, so that buckets can be cut anywhere."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))

    def forward(self, values: Tensor) -> Tensor:
        for layer in self.layers:
            values = values + torch.tanh(layer(values))
        return values


def _held_nbytes() -> int:
    """The bytes of all storages that a Python object reaches."""
    storages: dict[int, int] = {}
    # Hidden from torch-function modes, which watch the operations of a step.
    with torch._C.DisableTorchFunction():
        for found in gc.get_objects():
            if issubclass(type(found), Tensor) and found.layout is torch.strided:
                for tensor in (found, found.grad if found.is_leaf else None):
                    if tensor is not None and tensor.device.type != "meta":
                        storage = tensor.untyped_storage()
                        storages[storage.data_ptr()] = storage.nbytes()
    storages.pop(0, None)
    return sum(storages.values())


def _measure(options: argparse.Namespace, stage: int, key: int) -> dict[str, float]:
    """MiB of one step beyond model states, and of the largest message of its refresh."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(options.width, options.layers) for _ in range(options.blocks)))
    engine, _, _, _ = hadal.initialize(
        model=model,
        model_parameters=model.parameters(),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "zero_optimization": {
                "stage": stage,
                "reduce_bucket_size": key,
                "allgather_bucket_size": key,
                "stage3_param_persistence_threshold": 0,
                "stage3_max_live_parameters": 0,
                "stage3_max_reuse_distance": 0,
            },
        },
    )
    peak = largest = 0

    def count(*_: Any) -> None:
        nonlocal peak
        peak = max(peak, _held_nbytes())

    start = pairs._start

    def note(sends: bool, tensor: Tensor, *args: Any, **rest: Any) -> Any:
        nonlocal largest
        largest = max(largest, tensor.nbytes if sends else 0)
        return start(sends, tensor, *args, **rest)

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(count)
    for block in model:
        block.register_forward_hook(count)
    inputs = torch.ones(1, options.width)
    for _ in range(2):  # in the second step the optimizer's state exists
        gc.collect()
        peak, largest, rests = 0, 0, _held_nbytes()
        engine.backward(engine(inputs).square().mean())
        with patch.object(pairs, "_start", note):
            engine.step()
    engine.destroy()
    # The ranks together send one message.
    world = dist.get_world_size()
    return {"step": (peak - rests) / _MIB, "message": largest * world / _MIB}


def _rank(rank: int, options: argparse.Namespace, port: int, results: Any) -> None:
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(options.processes),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    hadal.init_distributed(dist_backend="gloo")
    gc.freeze()  # existing objects hold no tensor of a step, so the search can skip them
    for stage in (2, 3):
        for key in options.keys:
            found = _measure(options, stage, key)
            if rank == 0:
                results[stage, key] = found
    dist.destroy_process_group()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _table(options: argparse.Namespace, results: dict[tuple[int, int], Any]) -> str:
    lines = [
        "bucket keys | of the model | stage 2: step | its refresh's messages | stage 3: step",
        "   elements |              |           MiB |                    MiB |           MiB",
    ]
    for key in options.keys:
        two, three = results[2, key], results[3, key]
        lines.append(
            f"{key:11,} | {key / options.numel:12.1%} | {two['step']:13.2f} |"
            f" {two['message']:22.2f} | {three['step']:13.2f}"
        )
    return "\n".join(lines)


def _draw(options: argparse.Namespace, results: dict[tuple[int, int], Any], file: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for stage in (2, 3):
        steps = [results[stage, key]["step"] for key in options.keys]
        axes.plot(options.keys, steps, marker="o", label=f"stage {stage}")
    axes.set(
        xscale="log",
        xlabel="reduce_bucket_size = allgather_bucket_size, elements",
        ylabel="MiB of one step beyond model states",
        ylim=(0, None),
    )
    axes.legend()
    figure.savefig(file)


def main(arguments: list[str] | None = None) -> dict[tuple[int, int], Any]:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--blocks", type=int, default=3)
    add("--layers", type=int, default=8, help="matrices of one block")
    add("--width", type=int, default=512, help="rows and columns of a matrix")
    add("--processes", type=int, default=2)
    add("--output", type=Path, metavar="FILE", help="draw the table (PNG)")
    options = parser.parse_args(arguments)
    matrix = options.width**2
    options.numel = matrix * options.blocks * options.layers
    halvings = range(options.layers.bit_length())
    options.keys = [max(1, options.layers >> power) * matrix for power in halvings]
    with processes.Manager() as manager:
        shared = manager.dict()
        processes.start_processes(
            _rank, (options, _free_port(), shared), options.processes, start_method="spawn"
        )
        results = dict(shared)
    print(f"{options.numel:,} parameters in fp32 on {options.processes} ranks\n")
    print(_table(options, results))
    if options.output:
        _draw(options, results, options.output)
    return results


if __name__ == "__main__":
    main()
