"""The suites: where each is from, what of it runs, and the number that must pass."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Program:
    """A command line: words for torch's launcher, or for Python if it takes no ranks.

    With a tolerance, each step's loss is compared with DeepSpeed's.
    """

    name: str
    words: str
    ranks: int = 2
    tolerance: float = 0.0


@dataclass(frozen=True)
class Suite:
    """Tests or programs of one project; without a repository, they are in its package."""

    name: str
    version: str
    what: str
    passes: int
    repository: str = ""
    copied: tuple[str, ...] = ()
    tests: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    programs: tuple[Program, ...] = ()
    why: str = ""


# ---- trl -----------------------------------------------------------------------------------------

_TRAINER = (
    " --deepspeed {inputs}/zero%d.json --use_cpu True --bf16 False --max_steps 4 --save_steps 4"
    " --per_device_train_batch_size 4 --logging_steps 1 --report_to none --learning_rate 1e-3"
    " --gradient_checkpointing False --output_dir out"
)
_LORA = " --use_peft --lora_r 4 --lora_target_modules q_proj v_proj"
_LENGTHS = " --max_length 32"
_SAMPLES = " --num_generations 2 --max_completion_length 6 --beta 0.04"
_SAMPLES += " --reward_funcs rewards.variety"
_TRL = {
    "sft": "--dataset_name {inputs}/sentences" + _LENGTHS,
    "dpo": "--dataset_name {inputs}/pairs" + _LENGTHS,
    "reward": "--dataset_name {inputs}/scored" + _LENGTHS,
    "grpo": "--dataset_name {inputs}/prompts" + _SAMPLES,
    "rloo": "--dataset_name {inputs}/prompts" + _SAMPLES,
}


def _of_trl(script: str, stage: int, lora: str) -> Program:
    model = "judge" if script == "reward" else "llama"
    words = f"-m trl.scripts.{script} --model_name_or_path {{inputs}}/{model} {_TRL[script]}"
    if lora and script == "reward":
        lora += " --lora_task_type SEQ_CLS"
    compared = script in ("sft", "dpo") and not lora
    return Program(
        name=f"{script}, ZeRO-{stage}{', LoRA' if lora else ''}",
        words=words + _TRAINER % stage + lora,
        tolerance=1e-5 if compared else 0.0,
    )


_TRL_PROGRAMS = tuple(
    _of_trl(script, stage, lora) for script in _TRL for stage in (2, 3) for lora in ("", _LORA)
)

SUITES = (
    Suite(
        name="accelerate",
        version="1.15.0, tests at 16cb6eb8",
        what="all its tests of DeepSpeed",
        passes=31,
        repository="huggingface/accelerate",
        copied=("tests",),
        tests=("tests/deepspeed",),
        options=("-p", "on_cpus", "-o", "markers=order: of tests"),
    ),
    Suite(
        name="trl",
        version="1.16.0",
        what="`trl.scripts`: SFT, DPO, reward, GRPO, RLOO at ZeRO-2 and 3, with and without LoRA",
        passes=20,
        programs=_TRL_PROGRAMS,
    ),
)
