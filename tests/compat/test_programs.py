"""Programs written in the manner of DeepSpeed's examples run as they are, at every stage."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from clients import load
from ranks import RankPool
from torch import nn

ROOT = Path(__file__).parents[2]


def _run(name: str, told: tuple[str, ...], *arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = load("programs_runs").run(name, told, *arguments)
    return found


def _stages(clients: RankPool, name: str, told: tuple[str, ...], *arguments: str) -> list[Any]:
    """The results of each rank at each stage; the first one is stage 0."""
    return [clients.run(_run, name, told, f"--stage={s}", *arguments) for s in range(4)]


def test_a_classifier_learns_the_same_at_every_stage(clients: RankPool) -> None:
    plain, *others = _stages(clients, "images", ("losses", "accuracy"))
    first, second = plain[0]["losses"][:4], plain[0]["losses"][4:]
    assert sum(second) < 0.9 * sum(first)
    for ranks in others:
        for found, expected in zip(ranks, plain, strict=True):
            assert found["losses"] == pytest.approx(expected["losses"], abs=1e-5)
            assert found["accuracy"] == expected["accuracy"]


@pytest.mark.fast_cells("bf16")
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_classifier_learns_in_16_bits(clients: RankPool, dtype: str) -> None:
    wanted = clients.run(_run, "images", ("losses",), "--stage=2")
    for found, expected in zip(
        clients.run(_run, "images", ("losses",), "--stage=2", f"--dtype={dtype}"),
        wanted,
        strict=True,
    ):
        assert found["losses"] == pytest.approx(expected["losses"], rel=0.06)


@pytest.mark.fast_cells("1")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_program_resumes_at_its_checkpoint(clients: RankPool, tmp_path: Path, stage: int) -> None:
    told = (f"--folder={tmp_path}", f"--stage={stage}", "--steps=4")
    whole = clients.run(_run, "masked_words", ("losses",), *told)
    again = clients.run(_run, "masked_words", ("losses",), *told, "--resume")
    for found, expected in zip(again, whole, strict=True):
        assert len(expected["losses"]) == 4
        assert found["losses"] == expected["losses"][2:]


def _two_networks() -> list[tuple[float, ...]]:
    """The same two networks by hand, in one process, with the samples of both ranks."""
    torch.manual_seed(5)
    maker = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8), nn.Tanh())
    judge = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
    options: Any = {"lr": 0.01, "betas": (0.5, 0.999), "eps": 1e-8}
    steppers = [torch.optim.AdamW(net.parameters(), **options) for net in (judge, maker)]
    for stepper in steppers:
        stepper.param_groups[0]["weight_decay"] = 0.0
    draws = [torch.Generator().manual_seed(rank) for rank in range(2)]
    losses = []
    for _ in range(4):
        drawn = [(torch.randn(4, 8, generator=g), torch.randn(4, 4, generator=g)) for g in draws]
        real = torch.cat([pair[0] for pair in drawn]).clamp(-1, 1)
        noise = torch.cat([pair[1] for pair in drawn])
        yes, no = torch.ones(8), torch.zeros(8)
        measure = nn.functional.binary_cross_entropy_with_logits
        judge.zero_grad()
        fake = maker(noise)
        told = [measure(judge(real).flatten(), yes), measure(judge(fake.detach()).flatten(), no)]
        (told[0] + told[1]).backward()  # type: ignore[no-untyped-call]
        steppers[0].step()
        maker.zero_grad()
        told.append(measure(judge(fake).flatten(), yes))
        told[2].backward()  # type: ignore[no-untyped-call]
        steppers[1].step()
        losses.append(tuple(loss.item() for loss in told))
    return losses


@pytest.mark.fast_cells("3")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_two_engines_train_against_each_other(
    clients: RankPool, tmp_path: Path, stage: int
) -> None:
    config = tmp_path / "ds_config.json"
    adam = {"type": "Adam", "params": {"lr": 0.01, "betas": [0.5, 0.999], "eps": 1e-8}}
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    keys = {"train_batch_size": 8, "gradient_clipping": 0.0}
    config.write_text(json.dumps({**keys, "optimizer": adam, "zero_optimization": zero}))
    given = ("--deepspeed", "--deepspeed_config", str(config))
    ranks = clients.run(_run, "two_networks", ("losses",), *given)
    for found in zip(*(rank["losses"] for rank in ranks), _two_networks(), strict=True):
        *mine, plain = (torch.tensor(losses) for losses in found)
        torch.testing.assert_close(sum(mine) / 2, plain, atol=1e-5, rtol=0)


@pytest.mark.slow
def test_an_actor_and_a_critic_learn_from_models_that_are_only_asked(clients: RankPool) -> None:
    plain, *others = _stages(clients, "chat", ("losses", "saved"))
    for ranks in others:
        for found, expected in zip(ranks, plain, strict=True):
            for pair, wanted in zip(found["losses"], expected["losses"], strict=True):
                assert pair == pytest.approx(wanted, abs=1e-4)
            for name, value in expected["saved"].items():
                torch.testing.assert_close(found["saved"][name], value, atol=1e-4, rtol=0)


def test_a_program_with_groups_of_its_own_recomputes_and_counts(clients: RankPool) -> None:
    told = ("losses", "boundaries", "told", "norm")
    plain, *others = _stages(clients, "parallel_state", told)
    for ranks in others:
        for found, expected in zip(ranks, plain, strict=True):
            assert found["losses"] == pytest.approx(expected["losses"], abs=1e-5)
            assert found["norm"] == pytest.approx(expected["norm"], abs=1e-4)
            assert found["boundaries"] == [False, True] * 3
            assert found["told"] == (3, 8, [0.03])


@pytest.mark.fast_cells("3")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_program_cuts_its_layers_over_ranks(
    clients: RankPool, tmp_path: Path, stage: int
) -> None:
    told = ("losses", "norms")
    folder = tmp_path / "cut"
    whole = clients.run(_run, "tensor_parallel", told, "--stage=0", "--parts=1")[0]
    cut = ("--stage", str(stage), "--folder", str(folder))
    alone = clients.run(_run, "tensor_parallel", told, *cut)
    rest = clients.run(_run, "tensor_parallel", told, *cut, "--resume")
    for found, later in zip(alone, rest, strict=True):
        assert found["losses"] == pytest.approx(whole["losses"], rel=1e-4)
        assert found["norms"] == pytest.approx(whole["norms"], rel=1e-4)
        assert later["losses"] == found["losses"][3:]
    assert len(whole["losses"]) == 6


@pytest.mark.slow
def test_a_launcher_starts_an_unmodified_program(tmp_path: Path) -> None:
    program = ROOT / "tests/compat/programs/images.py"
    arguments = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    done = subprocess.run(
        [sys.executable, *arguments, "-m", "hadal.compat", str(program), "--epochs=1", "--stage=2"],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr


# ---- compression ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_bert_learns_from_its_teacher_and_gets_smaller(clients: RankPool, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    told = ("losses", "before", "after", "shapes")
    for found in clients.run(_run, "compressed_bert", told, f"--folder={tmp_path}"):
        assert torch.allclose(found["before"], found["after"], atol=1e-5)
        assert len(found["losses"]) == 4
        layer = "bert.encoder.layer.1"
        assert found["shapes"][f"{layer}.attention.self.query.weight"] == (8, 16)
        assert found["shapes"][f"{layer}.attention.output.dense.weight"] == (16, 8)
        assert found["shapes"][f"{layer}.intermediate.dense.weight"] == (16, 16)
        assert not any("layer.2" in name or "scores" in name for name in found["shapes"])


def test_a_gpt2_is_quantized_without_training(clients: RankPool) -> None:
    pytest.importorskip("transformers")
    told = ("plain", "converted", "quantized", "values", "tied")
    for found in clients.run(_run, "compressed_gpt2", told):
        assert torch.allclose(found["converted"], found["plain"], atol=1e-6)
        assert torch.allclose(found["quantized"], found["plain"], atol=0.02)
        assert not torch.equal(found["quantized"], found["plain"])
        assert found["values"] <= 16 * 256
        assert found["tied"]


def test_a_residual_network_loses_channels(clients: RankPool) -> None:
    told = ("losses", "shapes", "outputs")
    plain, *others = (
        clients.run(_run, "compressed_resnet", told, f"--stage={stage}") for stage in (0, 2, 3)
    )
    for ranks in others:
        for found, expected in zip(ranks, plain, strict=True):
            assert found["losses"] == pytest.approx(expected["losses"], abs=1e-5)
            assert found["shapes"] == expected["shapes"]
            assert torch.allclose(found["outputs"], expected["outputs"], atol=1e-4)
    shapes = plain[0]["shapes"]
    assert shapes["layer1.0.conv1.weight"] == (4, 8, 3, 3)
    assert shapes["layer1.0.bn1.running_var"] == (4,)
    assert shapes["layer1.0.conv2.weight"] == (8, 4, 3, 3)
    assert shapes["conv1.weight"] == (8, 3, 3, 3)
