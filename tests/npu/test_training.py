"""The same training on an accelerator has the same bits as on CPUs.

The device's work is late (see device.cpp): what does not wait for it finds old values, or NaNs.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import RankPools
from torch import Tensor, nn

import hadal
import npu
from hadal.comm import get_rank
from hadal.device import current_device
from hadal.optim.muon import orthogonalized
from hadal.zero.gradients import Copies

from . import runs

CONFIGS: dict[str, dict[str, Any]] = {
    f"{precision} at stage {stage}": runs.config(stage, precision)
    for stage in range(4)
    for precision in ("fp32", "bf16", "fp16")
}
CONFIGS |= {
    name: runs.config(stage, precision, zero)
    for name, stage, precision, zero in (
        ("optimizer on the host", 2, "bf16", {"offload_optimizer": {"device": "cpu"}}),
        ("optimizer on the host, stage 3", 3, "fp16", {"offload_optimizer": {"device": "cpu"}}),
        ("optimizer on the disk", 1, "bf16", {"offload_optimizer": {"device": "nvme"}}),
        (
            "all on the host",
            3,
            "bf16",
            {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
        ),
        (
            "all on the host, pageable",
            3,
            "bf16",
            {
                "offload_optimizer": {"device": "cpu", "pin_memory": False},
                "offload_param": {"device": "cpu", "pin_memory": False},
            },
        ),
        (
            "all on the disk",
            3,
            "fp16",
            {"offload_optimizer": {"device": "nvme"}, "offload_param": {"device": "nvme"}},
        ),
        ("a part on the host", 3, "bf16", {"offload_optimizer": {"device": "cpu", "ratio": 0.4}}),
        (
            "coded weights and gradients",
            3,
            "bf16",
            {"zero_quantized_weights": True, "zero_quantized_gradients": True},
        ),
        ("sanity checks", 3, "bf16", {"enable_sanity_checks": True}),
        ("overlapped", 2, "bf16", {"overlap_comm": True, "contiguous_gradients": True}),
    )
}
CONFIGS |= {
    name: runs.config(0, optimizer={"type": name, "params": params}, gradient_clipping=0.0)
    for name, params in (
        ("OneBitAdam", {"lr": 0.01, "freeze_step": 1}),
        ("ZeroOneAdam", {"lr": 0.01, "var_freeze_step": 1}),
        ("OneBitLamb", {"lr": 0.01, "freeze_step": 1}),
    )
}
CONFIGS |= {
    name: runs.config(2, "bf16", optimizer={"type": name, "params": {"lr": 0.01}})
    for name in ("Lamb", "Lion", "Adagrad", "SGD", "Adam")
}
# The default iterates in bfloat16 on an accelerator.
MUON = {"type": "Muon", "params": {"lr": 0.01, "ns_method": "gram"}}
CONFIGS["Muon"] = runs.config(2, "bf16", optimizer=MUON)
CONFIGS["rows of embeddings"] = runs.config(1, sparse_gradients=True)
CONFIGS["all that is measured"] = runs.config(
    2,
    "bf16",
    comms_logger={"enabled": True},
    wall_clock_breakdown=True,
    memory_breakdown=True,
    steps_per_print=1,
)
# Whatever a backend makes of sums in 16 bits, one addition is not rounded twice.
CONFIGS["16 bits on the wire"] = runs.config(
    2, "bf16", gradient_accumulation_steps=1, communication_data_type="bf16"
)
CONFIGS["sums in fp32"] = runs.config(2, "bf16", data_types={"grad_accum_dtype": "fp32"})


def same(found: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> None:
    """Losses and weights are the same bits; norms are added up in another order."""
    for here, there in zip(found, wanted, strict=True):
        assert here["device"] == "npu" and there["device"] == "cpu"
        assert here["losses"] == there["losses"]
        assert here["norms"] == pytest.approx(there["norms"], rel=1e-7)
        for name, values in there["weights"].items():
            assert torch.equal(here["weights"][name], values), name


class Given(nn.Module):
    """A weight whose gradient is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(64))

    def forward(self, gradient: Tensor) -> Tensor:
        return (self.weight * gradient).sum()


def stepped_once(stage: int, settings: dict[str, Any]) -> list[float]:
    """After one step of SGD from zero: the negative mean of the ranks' gradients."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "zero_optimization": {"stage": stage},
        **settings,
    }
    engine, *_ = hadal.initialize(model=Given(), config=config)
    # 1 and a unit in its last place in two halves: each alone is rounded away. The ranks take
    # turns, so that no order of them keeps all.
    is_mine = torch.arange(64) % 3 == get_rank()
    gradient = torch.where(is_mine, 1.0, 2.0**-8).to(engine.device, torch.bfloat16)
    engine.backward(engine(gradient))
    engine.step()
    found = runs.weights(engine)["weight"].float().tolist()
    engine.destroy()
    return found


@pytest.mark.fast_cells("1", "3")
@pytest.mark.claims("communication_data_type")
@pytest.mark.parametrize("stage", range(4))
def test_sums_of_16_bit_gradients_are_as_exact_as_on_cpus(
    stage: int, npus: RankPools, ranks: RankPools
) -> None:
    bf16 = {"bf16": {"enabled": True}, "gradient_allreduce_op": "sum" if stage < 3 else "mean"}
    exact = -(1 + 2.0**-7)
    expected = [exact if stage < 3 else float(torch.tensor(exact / 3).bfloat16())] * 64
    assert ranks(3).run(stepped_once, stage, bf16) == [expected] * 3
    assert npus(3).run(stepped_once, stage, bf16) == [expected] * 3
    rounded = npus(3).run(stepped_once, stage, {**bf16, "communication_data_type": "bf16"})
    assert all(found != expected for found in rounded)


def on_disk(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The same, with a directory for state on the disk."""
    zero = dict(config["zero_optimization"])
    for key in ("offload_optimizer", "offload_param"):
        if zero.get(key, {}).get("device") == "nvme":
            zero[key] = {**zero[key], "nvme_path": str(folder)}
    return {**config, "zero_optimization": zero}


USUAL = ("fp32 at stage 0", "fp16 at stage 1", "bf16 at stage 2", "bf16 at stage 3")
USUAL += ("optimizer on the host, stage 3", "optimizer on the disk", "all on the disk")
USUAL += ("all on the host", "coded weights and gradients", "overlapped", "OneBitAdam", "Lamb")
USUAL += ("Muon", "rows of embeddings", "16 bits on the wire")


@pytest.mark.fast_cells("rows of embeddings")
@pytest.mark.parametrize("name", CONFIGS)
def test_as_on_cpus(name: str, npus: RankPools, ranks: RankPools, tmp_path: Path) -> None:
    config = on_disk(CONFIGS[name], tmp_path)
    wanted = ranks(2).run(runs.trained, config)
    found = npus(2).run(runs.trained_late, config, 3, 0.02 if name in USUAL else 1.0)
    assert all(one["late"] > 100 for one in found)
    same(found, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_as_on_one_cpu(name: str, npus: RankPools, ranks: RankPools, tmp_path: Path) -> None:
    config = on_disk(CONFIGS[name], tmp_path)
    wanted = ranks(1).run(runs.trained, config)
    same(npus(1).run(runs.trained_late, config, 3, math.inf), wanted)
    same(npus(1).run(runs.trained, config), wanted)


@pytest.mark.slow
@pytest.mark.parametrize(
    "offload",
    [{}, {"offload_param": {"device": "cpu"}}],
)
def test_born_sharded(offload: dict[str, Any], npus: RankPools, ranks: RankPools) -> None:
    config = runs.config(3, "bf16", offload)
    wanted = ranks(2).run(runs.trained_born_sharded, config)
    same(npus(2).run(runs.trained_born_sharded, config), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("offload", [{}, {"offload_param": {"device": "cpu"}}])
def test_frozen_weights_rest_as_int8(
    offload: dict[str, Any], npus: RankPools, ranks: RankPools
) -> None:
    zero = {"zero_quantized_nontrainable_weights": True, **offload}
    config = runs.config(3, "bf16", zero)
    wanted = ranks(2).run(runs.trained_with_frozen, config)
    same(npus(2).run(runs.trained_with_frozen, config), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_recomputed_activations(stage: int, npus: RankPools, ranks: RankPools) -> None:
    config = runs.config(stage, "bf16")
    wanted = ranks(2).run(runs.trained_recomputing, config)
    same(npus(2).run(runs.trained_recomputing, config), wanted)


def test_autocast(npus: RankPools, ranks: RankPools) -> None:
    config = runs.config(2, torch_autocast={"enabled": True, "dtype": "bfloat16"})
    wanted = ranks(1).run(runs.trained, config)
    same(npus(1).run(runs.trained_late, config), wanted)


def _orthogonalized(device: str) -> torch.Tensor:
    matrix = torch.randn(48, 80, generator=torch.Generator().manual_seed(3)).to(device)
    assert not torch.equal(orthogonalized(matrix, None), orthogonalized(matrix, "gram"))
    assert torch.equal(orthogonalized(matrix, None), orthogonalized(matrix, "standard"))
    return orthogonalized(matrix, None).cpu()


def test_muon_iterates_in_bfloat16_on_a_device(npus: RankPools) -> None:
    (found,) = npus(1).run(_orthogonalized, "npu")
    # Five steps bring singular values between 0.7 and 1.2; each rounds to 8 bits.
    values = torch.linalg.svdvals(found)
    assert found.dtype == torch.float32
    assert torch.equal(found, found.bfloat16().float())
    assert values.min() > 0.6 and values.max() < 1.3


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_weights_may_lie_column_by_column(stage: int, npus: RankPools, ranks: RankPools) -> None:
    config = runs.config(stage, "bf16")
    wanted = ranks(2).run(runs.trained_turned, config)
    same(npus(2).run(runs.trained_turned, config), wanted)


def _in_several_streams() -> list[float]:
    """Gradients that were computed in two streams, collected in the second."""
    device = torch.device("npu", 0)
    copies, side = Copies(device), torch.Stream(device)
    with npu.asynchronous():
        place = torch.zeros(4, device=device)
        side.wait_stream(torch.accelerator.current_stream())
        with side:
            copies.add(place[:2], torch.full((2,), 3.0, device=device).mul_(2))
        copies.add(place[2:], torch.full((2,), 5.0, device=device))
        copies.make()
        return list(place.tolist())


def test_gradients_of_several_streams_are_collected_in_turn(npus: RankPools) -> None:
    assert npus(1).run(_in_several_streams) == [[6.0, 6.0, 5.0, 5.0]]


class Beside(nn.Module):
    """Parts that run by turns in the device's own stream and in another one."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Shift() for _ in range(6))
        self.side: torch.Stream | None = None

    def forward(self, values: Tensor) -> Tensor:
        for number, part in enumerate(self.parts):
            if self.side is None or number % 2 == 0:
                values = part(values)
                continue
            here = torch.accelerator.current_stream()
            self.side.wait_stream(here)
            values.record_stream(self.side)
            with self.side:
                values = part(values)
            here.synchronize()  # whatever that stream still uses is not over
            torch.empty(1, device=values.device)
            here.wait_stream(self.side)
            values.record_stream(here)
        return values


class Shift(nn.Module):
    """Its weight is read late, and so is its gradient computed."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.0, 1.0, 256))

    def forward(self, values: Tensor) -> Tensor:
        return values.clone().add_(self.weight).mul_(1.5)


def _beside(stage: int, more: dict[str, Any], aside: bool) -> dict[str, Any]:
    zero = {"stage3_param_persistence_threshold": 0, **more}
    config = runs.config(stage, "fp32", zero, gradient_clipping=0.0)
    device = current_device()
    with npu.asynchronous(longest_delay=1.0), npu.with_float64():
        engine, *_ = hadal.initialize(model=Beside(), config=config)
        if aside:
            engine.module.side = torch.Stream(device)
        told: dict[str, Any] = {"losses": []}
        for step in range(8):
            values = torch.full((2, 256), 0.1 * step + get_rank(), device=device)
            loss = engine(values).square().mean()
            engine.backward(loss)
            engine.step()
            told["losses"].append(float(loss.detach()))
        told["weights"] = runs.weights(engine)
        engine.destroy()
    return told


HOST = {"offload_optimizer": {"device": "cpu"}}


@pytest.mark.fast_cells("3-zero4")
@pytest.mark.parametrize(
    ("stage", "zero"),
    [(0, {}), (1, {}), (2, {}), (2, HOST), (3, {}), (3, HOST)],
)
def test_parts_may_run_in_a_stream_of_their_own(
    stage: int, zero: dict[str, Any], npus: RankPools
) -> None:
    found, wanted = (npus(2).run(_beside, stage, zero, aside) for aside in (True, False))
    for here, there in zip(found, wanted, strict=True):
        assert here["losses"] == there["losses"]
        assert all(here["weights"][name].equal(one) for name, one in there["weights"].items())
