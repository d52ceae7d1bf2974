"""The suites: where each is from, what of it runs, and the number that must pass."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field


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
    """Tests or programs of one project; without a repository, they are in its package.

    Packages that its version needs in other versions than the environment's are its alone.
    """

    name: str
    version: str
    what: str
    passes: int
    repository: str = ""
    copied: tuple[str, ...] = ()
    itself: tuple[str, ...] = ()
    """Parts of the repository that are the library: it runs the tests too, and those that pass
    there are counted."""
    files: Mapping[str, str] = field(default_factory=dict)
    packages: tuple[str, ...] = ()
    tests: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    """Files of these tests that do not run."""
    options: tuple[str, ...] = ()
    programs: tuple[Program, ...] = ()
    kinds: Mapping[str, str] = field(default_factory=dict)
    """Short reasons for tests that do not pass, by patterns of their names and messages; the first
    that matches counts."""
    compared_with: str = ""
    """Folder of the checkout of DeepSpeed whose losses are compared, in place of its package."""


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
    # DeepSpeed itself counts one rank at stage 3 on CPUs, and refuses the batch size.
    compared = script in ("sft", "dpo") and stage == 2 and not lora
    return Program(
        name=f"{script}, ZeRO-{stage}{', LoRA' if lora else ''}",
        words=words + _TRAINER % stage + lora,
        tolerance=1e-5 if compared else 0.0,
    )


_TRL_PROGRAMS = tuple(
    _of_trl(script, stage, lora) for script in _TRL for stage in (2, 3) for lora in ("", _LORA)
)

# ---- peft ----------------------------------------------------------------------------------------

_SFT = (
    "examples/sft/train.py --model_name_or_path {inputs}/llama --dataset_name {inputs}/sentences"
    " --dataset_text_field text --max_length 32 --use_peft_lora True --lora_target_modules"
    " all-linear --save_steps 2 --logging_steps 1 --deepspeed {inputs}/zero%d.json --use_cpu True"
    " --bf16 False --report_to none --output_dir sft%d --max_steps %d"
)
_PEFT_PROGRAMS = (
    Program("adapters saved, ZeRO-2", _SFT % (2, 2, 2)),
    Program("adapters saved, ZeRO-3", _SFT % (3, 3, 2)),
    Program(
        "adapters loaded, ZeRO-3",
        _SFT % (3, 3, 4) + " --resume_from_checkpoint sft3/checkpoint-2",
    ),
    Program(
        "training.py, ZeRO-3",
        "-m accelerate.commands.launch --config_file tests/training/deepspeed_config.yaml"
        " tests/training/training.py --model_id {inputs}/llama",
        ranks=0,
    ),
)

# ---- transformers --------------------------------------------------------------------------------

_CLM = (
    "examples/pytorch/language-modeling/run_clm.py --model_name_or_path {inputs}/llama --do_train"
    " --train_file {inputs}/lines.txt --block_size 32 --max_steps 4 --save_steps 4 --use_cpu True"
    " --deepspeed {inputs}/zero%d.json --report_to none --output_dir out%d"
)

# ---- DeepSpeedExamples ---------------------------------------------------------------------------

_CHAT = (
    "-m deepspeed.launcher.runner --num_gpus 2 applications/DeepSpeed-Chat/training/%s/main.py"
    " --deepspeed --data_path {inputs}/Dahoas/rm-static --data_output_path data --dtype bf16"
)
_CHAT_MODEL = (
    " --model_name_or_path {inputs}/opt --max_seq_len 32 --per_device_train_batch_size 2"
    " --per_device_eval_batch_size 2"
)
_CHAT_SFT = _CHAT % "step1_supervised_finetuning" + _CHAT_MODEL
_CHAT_DPO = _CHAT % "step2_dpo_finetuning" + _CHAT_MODEL
_CHAT_REWARD = _CHAT % "step2_reward_model_finetuning" + _CHAT_MODEL
_CHAT_RLHF = (
    _CHAT
    % "step3_rlhf_finetuning"
    + " --actor_model_name_or_path sft --critic_model_name_or_path reward --actor_zero_stage 3"
    " --critic_zero_stage 3 --num_padding_at_beginning 0 --max_prompt_seq_len 64"
    " --max_answer_seq_len 8 --per_device_generation_batch_size 2"
    " --per_device_training_batch_size 2"
)
_HELLO = (
    "-m deepspeed.launcher.runner --num_gpus 2 training/HelloDeepSpeed/train_bert_ds.py"
    " --checkpoint_dir hello --tokenizer {inputs}/opt --num_layers 2 --num_heads 4 --h_dim 32"
    " --ff_dim 64 --max_seq_length 64 --num_iterations 6 --checkpoint_every 4"
)
_EXAMPLES_NEED = (
    "transformers==4.57.6 datasets==4.8.4 tensorboard==2.21.0"
    " fire==0.7.1 loguru==0.7.3 pytz==2026.6 sh==1.14.2"
)
_EXAMPLES = {
    "step 1, ZeRO-2, LoRA": _CHAT_SFT + " --zero_stage 2 --lora_dim 4 --output_dir lora",
    "step 1, ZeRO-3": _CHAT_SFT + " --zero_stage 3 --output_dir sft",
    "step 2, ZeRO-3": _CHAT_REWARD
    + " --zero_stage 3 --num_padding_at_beginning 0 --output_dir reward",
    "step 2 (DPO), ZeRO-3": _CHAT_DPO + " --zero_stage 3 --output_dir dpo",
    "step 3, ZeRO-3": _CHAT_RLHF + " --output_dir rlhf",
    "step 3, ZeRO-3, hybrid engine": _CHAT_RLHF + " --enable_hybrid_engine --output_dir hybrid",
    "HelloDeepSpeed, ZeRO-1, offload": _HELLO,
}

# ---- lightning -----------------------------------------------------------------------------------

_LIGHTNING = (
    "tests_pytorch/strategies/test_deepspeed.py",
    "tests_pytorch/plugins/precision/test_deepspeed_precision.py",
    "tests_pytorch/utilities/test_deepspeed_collate_checkpoint.py",
    "tests_pytorch/utilities/test_deepspeed_model_summary.py",
    "tests_fabric/strategies/test_deepspeed.py",
    "tests_fabric/strategies/test_deepspeed_integration.py",
    "tests_fabric/plugins/precision/test_deepspeed.py",
    "tests_fabric/plugins/precision/test_deepspeed_integration.py",
)

# ---- Megatron-DeepSpeed --------------------------------------------------------------------------

_NUMBERS = " --tokenizer-type NullTokenizer --vocab-size 46 --seq-length 16"
_TOKENS = "tools/preprocess_data.py --input numbers.jsonl --output-prefix numbers --workers 1"
# Micro-batches of more than one sample stop in its own attention, on CPUs.
_GPT = (
    "pretrain_gpt.py --num-layers 4 --hidden-size 32 --num-attention-heads 4"
    " --max-position-embeddings 16 --micro-batch-size 1 --global-batch-size 8 --train-iters 4"
    " --lr 1e-3 --lr-decay-style constant --clip-grad 1.0 --data-path numbers_text_document"
    " --split 90,10,0 --log-interval 1"
    " --eval-iters 1 --eval-interval 100 --save out --save-interval 4 --num-workers 0"
    " --no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-dropout-fusion"
    " --no-gradient-accumulation-fusion --no-async-tensor-model-parallel-allreduce"
    " --distributed-backend gloo --deepspeed --deepspeed_config zero%d.json --zero-stage %d"
)
_SPLITS = {
    "pipeline of 2, ZeRO-1": (1, " --pipeline-model-parallel-size 2"),
    "tensors over 2, ZeRO-1": (1, " --no-pipeline-parallel --tensor-model-parallel-size 2"),
    "ZeRO-1": (1, " --no-pipeline-parallel"),
    "ZeRO-3": (3, " --no-pipeline-parallel"),
    "sequences over 2 in chunks, ZeRO-3": (
        3,
        " --no-pipeline-parallel --seq-length 128 --max-position-embeddings 128"
        " --ds-sequence-parallel-size 2 --ds-sequence-parallel-fpdt"
        " --ds-sequence-parallel-fpdt-chunk-size 64 --ds-sequence-parallel-fpdt-offloading"
        " --use-flash-attn-v2 --attention-dropout 0 --hidden-dropout 0",
    ),
}
_MEGATRON_PROGRAMS = (
    Program("its tokens", _TOKENS + " --append-eod" + _NUMBERS, ranks=0),
    *(
        # On CPUs DeepSpeed's own stage 3 is 1e-3 apart from its stage 1.
        Program(
            name, _GPT % (stage, stage) + _NUMBERS + split, tolerance=1e-5 if stage == 1 else 0.0
        )
        for name, (stage, split) in _SPLITS.items()
    ),
)
_MEGATRON_FILES = {
    f"zero{stage}.json": json.dumps(
        {
            "train_batch_size": 8,
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": 1.0,
            "zero_optimization": {"stage": stage},
        }
    )
    for stage in (1, 3)
} | {
    "numbers.jsonl": "".join(
        json.dumps({"text": " ".join(str((line + 3 * place) % 46) for place in range(12))}) + "\n"
        for line in range(32)
    ),
    # It imports torchvision for other models; that package of PyPI needs torch's build for CUDA.
    "torchvision/__init__.py": "",
    "torchvision/transforms.py": "",
    "torchvision/datasets.py": "VisionDataset = object",
}

# ---- Ray Train -----------------------------------------------------------------------------------

_RAY = (
    "doc/source/train/examples/pytorch/deepspeed_finetune/train.py --model_name {inputs}/llama"
    " --dataset_name {inputs}/sentences --cpu_only --seq_length 32 --num_epochs %d"
    " --storage_path {inputs}/../ray/storage --resume_experiment zero%d --zero_stage %d"
)
_RAY_PROGRAMS = tuple(
    Program(f"ZeRO-{stage}{said}", _RAY % (epochs, stage, stage), ranks=0)
    for stage in (2, 3)
    for said, epochs in (("", 1), (", continued", 2))
)

# ---- FunASR --------------------------------------------------------------------------------------

_FUNASR = (
    "-m funasr_on_cpus --config-path {inputs}/../funasr/examples/aishell/transformer/conf"
    " --config-name transformer_12e_6d_2048_256 ++train_data_set_list={inputs}/sounds/sounds.jsonl"
    " ++valid_data_set_list={inputs}/sounds/sounds.jsonl"
    " ++tokenizer_conf.token_list={inputs}/sounds/tokens.txt"
    " ++encoder_conf.num_blocks=2 ++encoder_conf.output_size=64 ++encoder_conf.linear_units=64"
    " ++decoder_conf.num_blocks=1 ++decoder_conf.linear_units=64 ++backend=gloo ++device=cpu"
    " ++dataset_conf.batch_type=example ++dataset_conf.batch_size=4 ++dataset_conf.num_workers=0"
    " ++dataset_conf.preprocessor_speech=null ++train_conf.use_deepspeed=true"
    " ++train_conf.avg_nbest_model=2 ++deepspeed_config=zero%d.json ++output_dir=out%d"
    " ++train_conf.max_epoch=%d"
)
_FUNASR_PROGRAMS = tuple(
    Program(f"ZeRO-{stage}{said}", _FUNASR % (stage, stage, epochs))
    for stage in (1, 2, 3)
    for said, epochs in (("", 2), (", continued", 3))
)
_FUNASR_FILES = {
    f"zero{stage}.json": json.dumps(
        {
            "train_micro_batch_size_per_gpu": 4,
            "gradient_clipping": 5,
            "checkpoint": {"deepspeed_files": True},
            "zero_optimization": {"stage": stage},
        }
    )
    for stage in (1, 2, 3)
}
_FUNASR_NEEDS = "hydra-core==1.3.8 librosa==0.11.0 kaldiio==2.18.1 rapidfuzz==3.14.6"

# ---- DeepSpeed -----------------------------------------------------------------------------------

# Many tests over ranks, which take long on CPUs, are skipped there, or are of the kinds below.
_DEEPSPEED_LEAVES_OUT = """
checkpoint: autotp_uc_checkpoint moe_checkpoint universal_checkpoint
inference/quantization: intX_quantization
model_parallelism: autotp_custom_patterns autotp_training tp_plan_real_models
runtime/half_precision: dynamic_loss_scale
runtime/half_precision/onebit: onebit
ulysses_alst: ulysses_sp_hf
v1/compile: compile_zero
v1/half_precision: bf16 with_autocast
v1/moe: autoep_autotp_checkpoint autoep_autotp_grad_parity autoep_autotp_runtime
  autoep_checkpoint autoep_grad_parity autoep_integration
v1/pin_memory: destroy_unpin
v1/zero: offload_states
"""


def _files_of(folders: str) -> tuple[str, ...]:
    pairs = [line.split(": ") for line in folders.strip().replace("\n  ", " ").split("\n")]
    return tuple(f"tests/unit/{where}/test_{n}.py" for where, names in pairs for n in names.split())


_DEEPSPEED_KINDS = {
    r"\.compile\.": "passes of its compiler",
    r"autoep|autotp|module_inject|fused_expert|tp_plan|moe_tp": "its ways of cutting layers and"
    " experts",
    r"\.ops\.|\.inference\.|pin_memory|nvtx|rotary|rollout": "kernels, inference, generation",
    "NotBuiltYet|AttributeError|cannot be read|unexpected keyword": "functions and attributes"
    " inside DeepSpeed",
    "Regex pattern|must be a number|DID NOT RAISE|pydantic": "the words or the class of an error",
    "hadal.errors|0-sized|ScatterGather": "different or refused on purpose, with a remedy",
    "": "others",
}

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
    Suite(
        name="peft",
        version="0.21.2, examples at 5d602fdb",
        what="its example `sft/train.py` with LoRA at ZeRO-2 and 3; its test `training.py`",
        passes=3,
        repository="huggingface/peft",
        copied=("tests/training", "examples/sft"),
        programs=_PEFT_PROGRAMS,
    ),
    Suite(
        name="transformers",
        version="5.0.0, tests at d6a6c826",
        what="`test_deepspeed.py`, with `checkpoint.deepspeed_files`",
        passes=50,
        repository="huggingface/transformers",
        copied=("tests", "examples", "src", "conftest.py"),
        packages=("transformers==5.0.0",),
        tests=("tests/deepspeed/test_deepspeed.py",),
        options=("-p", "on_cpus", "-p", "with_files"),
    ),
    Suite(
        name="run_clm",
        version="transformers 5.23.0, examples at d6a6c826",
        what="`run_clm.py` at ZeRO-2 and 3",
        passes=2,
        repository="huggingface/transformers",
        copied=("examples/pytorch",),
        programs=tuple(Program(f"ZeRO-{stage}", _CLM % (stage, stage)) for stage in (2, 3)),
    ),
    Suite(
        name="deepspeed-examples",
        version="45b4b715, transformers 4.57.6",
        what="DeepSpeed-Chat: steps 1 to 3 at ZeRO-3, DPO, LoRA, hybrid engine; HelloDeepSpeed",
        passes=7,
        repository="deepspeedai/DeepSpeedExamples",
        copied=(
            "applications/DeepSpeed-Chat/dschat",
            "applications/DeepSpeed-Chat/training",
            "training/HelloDeepSpeed",
        ),
        packages=tuple(_EXAMPLES_NEED.split()),
        programs=tuple(Program(name, words, ranks=0) for name, words in _EXAMPLES.items()),
    ),
    Suite(
        name="lightning",
        version="2.6.6, tests at 2.6.5",
        what=f"its own tests of DeepSpeed, Trainer and Fabric: {len(_LIGHTNING)} files",
        passes=86,
        repository="Lightning-AI/pytorch-lightning",
        copied=("tests",),
        tests=tuple(f"tests/{file}" for file in _LIGHTNING),
    ),
    Suite(
        name="megatron",
        version="Megatron-DeepSpeed 4efb479d",
        what="`pretrain_gpt.py` on two ranks: pipeline, tensors, long sequences, ZeRO-1 and 3",
        passes=6,
        repository="deepspeedai/Megatron-DeepSpeed",
        copied=("megatron", "tools", "pretrain_gpt.py"),
        packages=("nltk", "pybind11", "six", "pillow"),
        files=_MEGATRON_FILES,
        programs=_MEGATRON_PROGRAMS,
        compared_with="DeepSpeed",  # it imports what the last release has no more
    ),
    Suite(
        name="ray",
        version="2.60.0, example at 1774251b",
        what="Ray Train's `deepspeed_finetune/train.py` at ZeRO-2 and 3, each continued",
        passes=4,
        repository="ray-project/ray",
        copied=("doc/source/train/examples/pytorch/deepspeed_finetune",),
        # Later versions of datasets pickle the whole of Ray's worker for num_proc=1.
        packages=("ray==2.60.0", "tensorboardX==2.6.5", "datasets==4.0.0"),
        programs=_RAY_PROGRAMS,
    ),
    Suite(
        name="funasr",
        version="1.4.3 at 3c58cb56",
        what="`train_ds.py` with a small Transformer at ZeRO-1, 2 and 3, each continued",
        passes=4,
        repository="modelscope/FunASR",
        copied=("funasr", "examples/aishell/transformer/conf"),
        files=_FUNASR_FILES,
        packages=tuple(_FUNASR_NEEDS.split()),
        programs=_FUNASR_PROGRAMS,
    ),
    Suite(
        name="dlrover",
        version="0.7.0.dev0 at 7c3e9648",
        what="flash checkpoint: its test that saves and loads, with an engine instead of its mock",
        passes=0,
        repository="intelligent-machine-learning/dlrover",
        copied=("dlrover",),
        packages=("grpcio", "deprecated", "protobuf", "kubernetes", "pytest"),
        tests=("dlrover/trainer/tests/torch/deepspeed_ckpt_test.py",),
        options=("-p", "an_engine", "-k", "save_load"),
    ),
    Suite(
        name="deepspeed",
        version="0.19.6 at edaa7221",
        what="its own unit tests, each once",
        passes=395,
        repository="deepspeedai/DeepSpeed",
        copied=("tests",),
        itself=("deepspeed", "accelerator", "op_builder", "csrc", "version.txt"),
        packages=(
            *("pytest", "pytest-xdist", "pytest-timeout"),
            *("parameterized==0.9.0", "hjson==3.1.0", "py-cpuinfo==9.0.0"),
        ),
        tests=("tests/unit/**/test_*.py",),
        without=_files_of(_DEEPSPEED_LEAVES_OUT),
        options=("-p", "once", "--numprocesses=2", "--dist=loadfile", "--timeout=300"),
        kinds=_DEEPSPEED_KINDS,
    ),
)
