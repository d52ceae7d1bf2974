"""The example files in `docs/clusters.md` run, each with a stand-in for its cluster."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from launcher import fakes
from launcher.jobs import LIMIT_S, ROOT, environment, quiet_port, run

CLUSTERS = ROOT / "examples" / "clusters"
CONFIG = CLUSTERS / "ds_config.json"
DONE = re.compile(r"loss [\d.]+ after (\d+) updates")


def program(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def test_every_file_is_linked() -> None:
    page = (ROOT / "docs" / "clusters.md").read_text()
    for path in (*CLUSTERS.iterdir(), ROOT / "examples" / "ray" / "train.py"):
        if path.is_file() and path != CONFIG:
            assert f"](../{path.relative_to(ROOT)})" in page


def checked(program: str, *arguments: str | Path) -> None:
    """Run a checker of files, which is installed beside Python or on the system."""
    places = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    found = shutil.which(program, path=places)
    if found is None:
        pytest.skip(f"{program} is not installed")
    done = subprocess.run([found, *arguments], capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr


def test_scripts_are_sound() -> None:
    checked(
        "shellcheck", CLUSTERS / "slurm.sh", *ROOT.glob("benchmarks/*.sh"), ROOT / ".ci" / "run"
    )


def test_the_dockerfile_is_sound() -> None:
    checked("hadolint", CLUSTERS / "Dockerfile")


def test_the_image_has_the_wheel_the_tested_torch_and_the_example() -> None:
    told = (CLUSTERS / "Dockerfile").read_text()
    copied = re.findall(r"^COPY (\S+) \S+$", told, re.MULTILINE)
    allowed = re.findall(
        r"^!(\S+)$", (CLUSTERS / "Dockerfile.dockerignore").read_text(), re.MULTILINE
    )
    assert copied == ["dist/hadal_train-*.whl", "examples/clusters"]
    assert allowed == ["dist/*.whl", "examples/clusters"]
    torch = re.findall(r"^torch==\S+$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert torch == re.findall(r"torch==\S+", told)
    command = json.loads(re.findall(r"^CMD (.+)$", told, re.MULTILINE)[0])
    assert command[:2] == ["hadal", "run"]
    assert all((ROOT / word).is_file() for word in command if "/" in word)


def test_pods_have_the_form_that_kubernetes_expects() -> None:
    validator = pytest.importorskip("kubernetes_validate")
    yaml = pytest.importorskip("yaml")
    told = yaml.safe_load((CLUSTERS / "pytorchjob.yaml").read_text())
    for replica in told["spec"]["pytorchReplicaSpecs"].values():
        pod = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "pod"}}
        version = validator.latest_version()
        validator.validate({**pod, "template": replica["template"]}, version, strict=True)


@pytest.mark.slow
def test_the_file_for_slurm(tmp_path: Path) -> None:
    program(tmp_path / "bin" / "srun", f"#!{sys.executable}\n{Path(fakes.__file__).read_text()}")
    program(tmp_path / "bin" / "hadal", f'#!/bin/sh\nexec {sys.executable} -m hadal "$@"\n')
    os.symlink(ROOT / "examples", tmp_path / "examples")
    variables = {
        "SLURM_SUBMIT_DIR": str(tmp_path),
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_GPUS_ON_NODE": "1",
        "FAKE_CALLS": str(tmp_path / "calls"),
        "FAKE_NODES": "localhost",
        "PATH": f"{tmp_path}/bin:{os.environ['PATH']}",
    }
    done = subprocess.run(
        ["bash", str(CLUSTERS / "slurm.sh"), "--steps", "5"],
        env=environment(HOME=str(tmp_path), **variables),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    assert "[rank 0] update 0: 2 ranks, 4 micro-batches of 6\n" in done.stdout
    assert (tmp_path / "checkpoints" / "global_step5").is_dir()
    words = [CLUSTERS / "train.py", "--deepspeed_config", CONFIG, "--steps", 6]
    done = run("--num_accelerators", 1, *words, folder=tmp_path)
    assert "update 5: 1 ranks, 8 micro-batches of 6\n" in done.stdout, done.stderr
    told = (CLUSTERS / "slurm.sh").read_text()
    assert {"--nodes", "--gpus-per-node", "--time"} <= set(
        re.findall(r"^#SBATCH (--[a-z-]+)", told, re.MULTILINE)
    )


@pytest.mark.slow
def test_the_file_for_kubernetes(tmp_path: Path) -> None:
    """Each pod's command starts with the variables that the operator sets."""
    yaml = pytest.importorskip("yaml")
    told = yaml.safe_load((CLUSTERS / "pytorchjob.yaml").read_text())
    assert (told["apiVersion"], told["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    replicas = told["spec"]["pytorchReplicaSpecs"]
    assert sorted(replicas) == ["Master", "Worker"]
    containers = [container_of(replicas[role]) for role in ("Master", "Worker")]
    for replica, container in zip(replicas.values(), containers, strict=True):
        assert container["resources"]["limits"]["nvidia.com/gpu"] == int(
            told["spec"]["nprocPerNode"]
        )
        volumes = {each["name"] for each in replica["template"]["spec"]["volumes"]}
        assert volumes == {each["name"] for each in container["volumeMounts"]}
    port = str(quiet_port())
    pods = [
        subprocess.Popen(
            [sys.executable, *container["command"][1:], *local(container["args"], tmp_path)],
            cwd=ROOT,
            env=environment(
                PET_NNODES=str(len(containers)),
                PET_NODE_RANK=str(number),
                PET_NPROC_PER_NODE="1",
                PET_MASTER_ADDR="127.0.0.1",
                PET_MASTER_PORT=port,
            ),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for number, container in enumerate(containers)
    ]
    first, second = (pod.communicate(timeout=LIMIT_S)[0] for pod in pods)
    assert [pod.returncode for pod in pods] == [0, 0], first + second
    assert "update 0: 2 ranks, 4 micro-batches of 6" in first
    found = DONE.search(first)
    assert found is not None and found[1] == "20"


def container_of(replica: dict[str, Any]) -> dict[str, Any]:
    assert replica["replicas"] == 1
    (container,) = replica["template"]["spec"]["containers"]
    assert (container["name"], container["command"][0]) == ("pytorch", "python")
    return dict(container)


def local(arguments: list[str], folder: Path) -> list[str]:
    """Return a path with the pod's folders replaced by local ones."""
    return [word.replace("=/checkpoints", f"={folder}/saved") for word in arguments]


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")
def test_the_file_for_ray() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "ray" / "train.py"],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith(("at one", "with a"))]
    whole, again = (re.findall(r"'loss': ([\d.e-]+)", line) for line in lines)
    assert whole == again != []
