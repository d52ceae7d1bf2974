"""The speed of codecs, the networks on which they pay off, and their effect on the loss.

    python benchmarks/codecs.py                   # GB/s on one thread, and break-even networks
    python benchmarks/codecs.py --loss 200        # loss curves of the demo GPT, 4 ranks as 2 nodes

A codec pays off if it takes less time than the bytes that it saves. In a gather over many ranks
each rank encodes its shard and decodes everything; in a reduction it encodes everything that it
sends and sums as much. So the network speed at which the plain way is as fast is, in a gather,
(1 - fraction of bytes) x decode, and in a reduction (1 - fraction) / (1/encode + 1/decode_add).
Times are those of the thread on its core, so other work on the machine matters little.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch import Tensor

import hadal
from hadal.comm.codecs import WIRE_BYTES, Blockwise, Codec
from hadal.comm.local import pairs
from hadal.units import rounded_up

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "gpt"))


@dataclass(frozen=True, slots=True)
class Cast(Codec):
    """Rounding to a dtype, for comparison."""

    dtype: torch.dtype

    def wire_bytes(self, numel: int) -> int:
        """Return the number of bytes of `numel` encoded values."""
        return rounded_up(numel * self.dtype.itemsize, WIRE_BYTES)

    def encode(self, values: Tensor, out: Tensor) -> None:
        """Write `values` into `out`."""
        out[: values.numel() * self.dtype.itemsize].view(self.dtype).copy_(values)

    def decoded(self, wire: Tensor, numel: int) -> Iterator[tuple[int, Tensor]]:
        """Yield the values of a wire."""
        yield 0, wire[: numel * self.dtype.itemsize].view(self.dtype)


CODECS: dict[str, Codec] = {
    "cast to bf16 (a copy)": Cast(torch.bfloat16),
    "int8, blocks of 256": Blockwise(8, 256),
    "int4, blocks of 128": Blockwise(4, 128),
}
LOCO = {"zeropp_loco_param": {"err_beta": 0.8, "reset_T": 1024}}
CODED = {
    "plain": {},
    "int8 weights": {"zero_quantized_weights": True},
    "int4 gradients": {"zero_quantized_gradients": True},
    "int4 gradients, LoCo": {"zero_quantized_gradients": True, **LOCO},
    "all, with hpZ": {
        "zero_quantized_weights": True,
        "zero_quantized_gradients": True,
        "zero_hpz_partition_size": 2,
    },
}
NODE = 2


# ---- speed ------------------------------------------------------------------------------------


def _gigabytes_per_second(act: Callable[[], object], nbytes: int) -> float:
    act()
    times = []
    for _ in range(7):
        start = time.thread_time()
        act()
        times.append(time.thread_time() - start)
    return nbytes / min(times) / 1e9


def _naive(values: Tensor, out: Tensor) -> None:
    """The straightforward implementation: whole tensors at each step."""
    rows = values.float().view(-1, 256)
    scales = rows.abs().amax(1, keepdim=True) / 127
    out.view(torch.int8).copy_((rows / scales).round().clamp(-127, 127).view(-1))


def _tell_speed() -> None:
    torch.set_num_threads(1)
    values = torch.randn(1 << 24).to(torch.bfloat16)
    nbytes = values.nbytes
    print("GB/s of bf16 values on one thread; the minimum of 7, 16 M values")
    print(f"{'':24} encode  decode  decode_add   share  pays below Gbit/s: gather  reduction")
    naive = _gigabytes_per_second(
        lambda: _naive(values, torch.empty(values.numel(), dtype=torch.uint8)), nbytes
    )
    print(f"{'int8, whole tensors':24} {naive:6.2f}")
    chunked = _gigabytes_per_second(lambda: _by_torch(values), nbytes)
    print(f"{'torch.quantize_per_ch.':24} {chunked:6.2f}")
    for name, codec in CODECS.items():
        wire = torch.empty(codec.wire_bytes(values.numel()), dtype=torch.uint8)
        out, total = torch.empty_like(values), torch.zeros(values.numel())
        encode = _gigabytes_per_second(lambda c=codec, w=wire: c.encode(values, w), nbytes)
        decode = _gigabytes_per_second(lambda c=codec, w=wire, o=out: c.decode(w, o), nbytes)
        add = _gigabytes_per_second(lambda c=codec, w=wire, o=total: c.decode_add(w, o), nbytes)
        share = wire.nbytes / nbytes
        told = ""
        if share < 1:
            gather, reduction = decode, 1 / (1 / encode + 1 / add)
            told = f"{8 * (1 - share) * gather:26.1f}{8 * (1 - share) * reduction:11.1f}"
        print(f"{name:24} {encode:6.2f}  {decode:6.2f}  {add:10.2f}  {share:6.3f}{told}")


def _by_torch(values: Tensor) -> Tensor:
    """torch's own: one given scale for each row."""
    rows = values.float().view(-1, 256)
    scales = rows.abs().amax(1).double() / 127
    zeros = torch.zeros(len(rows), dtype=torch.int64)
    warnings.simplefilter("ignore", UserWarning)  # torch will remove it
    return torch.quantize_per_channel(rows, scales, zeros, 0, torch.qint8)


# ---- loss -------------------------------------------------------------------------------------


def _train(rank: int, options: argparse.Namespace, name: str, port: int, where: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank % NODE),
        WORLD_SIZE="4",
        LOCAL_WORLD_SIZE=str(NODE),
        MASTER_ADDR="localhost",
        MASTER_PORT=str(port),
    )
    # By their own names, under which every process imports them from the demo's directory.
    from data import batch, read_standard_library
    from model import GPT, Shape

    hadal.init_distributed()
    torch.manual_seed(0)
    shape = Shape(width=options.width, depth=options.depth, heads=4, context=options.context)
    engine, *_ = hadal.initialize(
        model=GPT(shape),
        config={
            "train_micro_batch_size_per_gpu": 4,
            "gradient_clipping": 1.0,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95]}},
            "zero_optimization": {
                "stage": options.stage,
                "stage3_param_persistence_threshold": 1000,
                **CODED[name],
            },
        },
    )
    text = read_standard_library()
    sent = {"inside": 0, "across": 0}
    begun, losses = pairs._begun, []

    def counted(
        sends: bool, tensor: Tensor, other: int, ranks: Any, tag: int, label: str, ended: Any
    ) -> Any:
        if sends and label.startswith(("the gather of", "the reduction of")):
            is_near = ranks.numbers[other] // NODE == rank // NODE
            sent["inside" if is_near else "across"] += tensor.nbytes
        return begun(sends, tensor, other, ranks, tag, label, ended)

    with patch.object(pairs, "_begun", counted):
        for step in range(options.loss):
            loss = engine(*batch(text.train, 4, shape.context, seed=4 * step + rank))
            engine.backward(loss)
            engine.step()
            total = loss.detach().clone()
            dist.all_reduce(total)
            losses.append(float(total) / 4)
    engine.eval()
    with torch.no_grad():
        heard = [
            engine(*batch(text.validation, 8, shape.context, seed=10_000 + 4 * n + rank))
            for n in range(8)
        ]
    validation = torch.stack(heard).mean()
    dist.all_reduce(validation)
    if rank == 0:
        found = {"losses": losses, "validation": float(validation) / 4, **sent}
        Path(where).write_text(json.dumps(found))
    engine.destroy()
    dist.destroy_process_group()


def _tell_losses(options: argparse.Namespace) -> None:
    print(f"stage {options.stage}, {options.loss} steps, width {options.width}; MiB rank 0 sends")
    print(f"{'':22} last tenth  to plain  most apart  validation  inside  across")
    plain: list[float] = []
    for name in CODED:
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        where = Path(options.folder) / "codecs-loss.json"
        processes.spawn(_train, (options, name, port, str(where)), nprocs=4)
        found = json.loads(where.read_text())
        tenth = max(1, options.loss // 10)
        curve = [
            statistics.mean(found["losses"][i : i + tenth]) for i in range(options.loss - tenth)
        ]
        plain = plain or curve
        apart = max(abs(one / other - 1) for one, other in zip(curve, plain, strict=True))
        inside, across = (found[where] / 2**20 for where in ("inside", "across"))
        print(
            f"{name:22} {curve[-1]:10.4f} {curve[-1] / plain[-1] - 1:+9.2%} {apart:11.2%}"
            f" {found['validation']:11.4f} {inside:7.1f} {across:7.1f}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--loss", type=int, default=0, help="steps of each run; 0: only the speed")
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--folder", default=".", help="directory for the figures of runs")
    options = parser.parse_args()
    if options.loss:
        _tell_losses(options)
    else:
        _tell_speed()


if __name__ == "__main__":
    main()
