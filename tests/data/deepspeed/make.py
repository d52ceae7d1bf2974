"""Make the kept checkpoints anew, with a real DeepSpeed.

    pip install torch==2.13.0 deepspeed==0.19.8 ninja safetensors
    DS_ACCELERATOR=cpu python tests/data/deepspeed/make.py [CASE ...]

Run it with the Python of DeepSpeed's environment. Each case becomes `CASE.tar.xz`: the folder that
DeepSpeed's `save_checkpoint` wrote after three updates (without its two scripts), and beside it
`expected.safetensors` and `expected.json`: what DeepSpeed's own functions tell of the state there,
and what its own next update makes of it. Experts and pipelines are trained by `train.py`, which
leaves the losses of six updates instead.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))


class Case(NamedTuple):
    stage: int
    dtype: str
    world_size: int
    kind: str = "stage"

    @property
    def name(self) -> str:
        return f"{self.kind}{self.stage}_{self.dtype}_world{self.world_size}"

    @property
    def moments(self) -> tuple[str, ...]:
        return ("momentum_buffer",) if self.kind == "momentum" else ("exp_avg", "exp_avg_sq")

    @property
    def changes(self) -> dict[str, Any]:
        return CHANGES.get(self.kind, {})


CHANGES: dict[str, dict[str, Any]] = {
    # Another optimizer, with one moment and no count of steps.
    "momentum": {
        "optimizer": {"type": "SGD", "params": {"lr": 0.01, "momentum": 0.9}},
        "zero_allow_untested_optimizer": True,
    },
    # torch's own optimizer is wrapped in another way than DeepSpeed's fused one.
    "torch": {
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 0.01, "betas": [0.9, 0.99], "eps": 1e-6, "torch_adam": True},
        }
    },
    # With gradients added up in fp32, stage 1 in bf16 is a way of its own, too.
    "accumulating": {"data_types": {"grad_accum_dtype": "fp32"}},
    # Parameters lie in another order there than in their groups.
    "robin": {"zero_optimization": {"stage": 2, "round_robin_gradients": True}},
    "offloaded": {
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
    },
    "offloading": {
        "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}},
    },
    "aligned": {"zero_optimization": {"stage": 1, "parameter_alignment": True}},
    "subgroups": {
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": 40,
            "stage3_param_persistence_threshold": 8,
        }
    },
}

CASES = [
    *(Case(stage, dtype, 2) for stage in range(4) for dtype in ("bf16", "fp16", "fp32")),
    *(Case(stage, "bf16", 1) for stage in range(4)),
    Case(0, "fp16", 2, "torch"),
    Case(1, "fp32", 2, "torch"),
    Case(1, "bf16", 2, "accumulating"),
    Case(3, "bf16", 2, "subgroups"),
    Case(2, "bf16", 2, "robin"),
    Case(1, "fp32", 2, "aligned"),
    Case(3, "bf16", 2, "offloaded"),
    Case(2, "bf16", 2, "momentum"),
    Case(3, "fp32", 2, "momentum"),
    Case(1, "bf16", 2, "offloading"),
    Case(2, "bf16", 2, "trained"),
    Case(3, "bf16", 2, "trained"),
    Case(1, "fp16", 2, "universal"),
    Case(2, "bf16", 2, "universal"),
    Case(3, "bf16", 2, "universal"),
    Case(2, "bf16", 2, "experts"),
    Case(1, "bf16", 2, "pipeline"),
]


def make(case: Case) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch, case.name)
        folder.mkdir()
        _start(case, folder)
        for script in ("zero_to_fp32.py", "zero_to_torch.py"):
            (folder / script).unlink(missing_ok=True)
        if case.kind == "universal":
            _convert(folder)
        with tarfile.open(HERE / f"{case.name}.tar.xz", "w:xz") as archive:
            archive.add(folder, arcname=".", filter=_without_traces)


def _start(case: Case, folder: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc_per_node={case.world_size}"]
    if case.kind in ("experts", "pipeline"):
        command += [str(HERE / "train.py"), str(folder), case.kind, str(case.stage), case.dtype]
        command += ["0", "6", "saves"]
    else:
        command += [__file__, "--rank", case.name, str(folder)]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, env=environment)


def _convert(folder: Path) -> None:
    """Let DeepSpeed make its universal form, and keep only that."""
    tag = (folder / "latest").read_text()
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal"]
    command += ["--input_folder", str(folder / tag), "--output_folder"]
    command += [str(folder / f"{tag}_universal"), "--num_extract_workers", "1"]
    command += ["--num_merge_workers", "1", "--inject_missing_state"]
    subprocess.run(command, check=True, env={**os.environ, "DS_ACCELERATOR": "cpu"})
    shutil.rmtree(folder / tag)


def _without_traces(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = member.mtime = 0
    member.uname = member.gname = ""
    return member


# ---- one rank ------------------------------------------------------------------------------------


def run(case: Case, folder: Path) -> None:
    import deepspeed
    import torch
    import toy
    from deepspeed.accelerator import get_accelerator
    from safetensors.torch import save_file

    deepspeed.init_distributed("gloo")
    # On CPUs it refuses fp16 before it tries; the arithmetic is there.
    get_accelerator().is_fp16_supported = lambda: True
    model = toy.Toy()
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=toy.groups_of(model),
        config={**toy.config_of(case.stage, case.dtype), **case.changes},
    )
    rank = engine.global_rank

    def update(step: int) -> float:
        tokens = toy.batch_of(step, rank).to(engine.device)
        loss = toy.loss_of(engine(tokens), tokens)
        engine.backward(loss)
        engine.step()
        return float(loss.detach())

    losses = [update(step) for step in range(toy.TRAINED)]
    excluding = {"exclude_frozen_parameters": True} if case.kind == "trained" else {}
    engine.save_checkpoint(str(folder), client_state=toy.client_state(), **excluding)
    tensors = _masters(engine, case, "")
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        for name, value in engine.module.state_dict().items():
            tensors[f"module.{name}"] = value.detach().cpu().clone()
    # Its converter knows nothing of stage 0, and does not find its way through "accumulating".
    if case.stage > 0 and case.kind != "accumulating" and rank == 0:
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        for name, value in get_fp32_state_dict_from_zero_checkpoint(str(folder)).items():
            tensors[f"to_fp32.{name}"] = value.clone()
    facts = _facts(engine)
    facts["losses"] = losses
    facts["next_loss"] = update(toy.TRAINED)
    facts["next"] = _facts(engine)
    tensors |= _masters(engine, case, "next.")
    if rank == 0:
        save_file(tensors, folder / "expected.safetensors")
        (folder / "expected.json").write_text(json.dumps(facts, indent=1, sort_keys=True))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # threads of its own sometimes abort a plain exit


def _masters(engine: Any, case: Case, prefix: str) -> dict[str, Any]:
    """fp32 values of what is trained, and both moments, by DeepSpeed's own functions."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    def by_parameter(parameter: Any, key: str) -> Any:
        if key == "fp32":
            return safe_get_full_fp32_param(parameter)
        return safe_get_full_optimizer_state(parameter, key)

    if case.kind == "robin":
        return _converted(engine, prefix)
    _link(engine)
    read = _masters_at_stage_0(engine) if case.stage == 0 else by_parameter
    return {
        f"{prefix}{key}.{name}": read(parameter, key).detach().float().cpu().clone()
        for name, parameter in engine.module.named_parameters()
        if parameter.requires_grad
        for key in ("fp32", *case.moments)
    }


def _converted(engine: Any, prefix: str) -> dict[str, Any]:
    """Masters by its converter: its functions for single parameters read other ones' elements."""
    import torch
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    found: dict[str, Any] = {}
    places = [tempfile.mkdtemp() if engine.global_rank == 0 else ""]
    torch.distributed.broadcast_object_list(places)
    engine.save_checkpoint(places[0])
    for name, value in get_fp32_state_dict_from_zero_checkpoint(places[0]).items():
        if name in dict(engine.module.named_parameters()) and name != "fixed.weight":
            found[f"{prefix}fp32.{name}"] = value.clone()
    torch.distributed.barrier()
    if engine.global_rank == 0:
        shutil.rmtree(places[0])
    return found


def _facts(engine: Any) -> dict[str, Any]:
    scale = getattr(engine.optimizer, "cur_scale", None)
    if scale is None:
        scale = getattr(engine.optimizer, "loss_scale", None)
    return {
        "lr": engine.get_lr(),
        "scale": float(scale or 1.0),
        "global_steps": engine.global_steps,
        "global_samples": engine.global_samples,
        "skipped_steps": engine.skipped_steps,
        "norm": float(engine.get_global_grad_norm() or 0.0),
    }


def _masters_at_stage_0(engine: Any) -> Any:
    """Its functions for single parameters know nothing of stage 0: its optimizer's own lists do."""
    import torch

    optimizer = engine.optimizer
    if isinstance(optimizer, torch.optim.Optimizer):
        return lambda p, key: p if key == "fp32" else optimizer.state[p][key]
    inner, places = optimizer.optimizer, {}
    for g, group in enumerate(optimizer.fp16_groups):
        offset = 0
        for i, parameter in enumerate(group):
            places[id(parameter)] = (g, i, offset)
            offset += parameter.numel()

    def plain(parameter: Any, key: str) -> Any:
        g, i, offset = places[id(parameter)]
        flat = hasattr(optimizer, "fp32_groups_flat")
        master = optimizer.fp32_groups_flat[g] if flat else optimizer.fp32_groups[g][i]
        value = master if key == "fp32" else inner.state[master][key]
        return value[offset : offset + parameter.numel()].view_as(parameter) if flat else value

    return plain


def _link(engine: Any) -> None:
    """At stages 1 and 2 it links optimizer state once, when only the first group has any."""
    if hasattr(engine.optimizer, "_hp_optimizer_states_linked"):
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()


if __name__ == "__main__":
    by_name = {case.name: case for case in CASES}
    if sys.argv[1:2] == ["--rank"]:
        run(by_name[sys.argv[2]], Path(sys.argv[3]))
    else:
        for name in sys.argv[1:] or list(by_name):
            make(by_name[name])
