"""Runs of the Hugging Face Trainer on tiny models, for the ranks of a pool.

Nothing is downloaded: models are made of a configuration, data of random numbers.
"""

from __future__ import annotations

import copy
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate.state import AcceleratorState
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from transformers.initialization import no_init_weights
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

import hadal
from hadal.comm import barrier, get_rank

AUTO = "auto"
_COMMON = {
    "train_micro_batch_size_per_gpu": AUTO,
    "train_batch_size": AUTO,
    "gradient_accumulation_steps": AUTO,
    "gradient_clipping": AUTO,
    "communication_data_type": "fp32",
    "bf16": {"enabled": AUTO, "loss_scale": 0, "loss_scale_window": 1000, "hysteresis": 2},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": AUTO, "betas": AUTO, "eps": AUTO, "weight_decay": AUTO},
    },
}
STAGE_2 = {
    **_COMMON,
    "zero_optimization": {
        "stage": 2,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_bucket_size": AUTO,
        "allgather_partitions": True,
        "allgather_bucket_size": 5e8,
    },
}
STAGE_3 = {
    **_COMMON,
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": AUTO,
        "stage3_prefetch_bucket_size": AUTO,
        "stage3_param_persistence_threshold": AUTO,
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
}
SCHEDULE = {
    "type": "WarmupDecayLR",
    "params": {
        "warmup_min_lr": AUTO,
        "warmup_max_lr": AUTO,
        "warmup_num_steps": AUTO,
        "total_num_steps": AUTO,
    },
}

_VOCABULARY, _LENGTH = 40, 12
MODELS: dict[str, transformers.PretrainedConfig] = {
    "llama": transformers.LlamaConfig(
        vocab_size=_VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    ),
    "two heads": transformers.LlamaConfig(
        vocab_size=_VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=32,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    ),
    "gpt2": transformers.GPT2Config(
        vocab_size=_VOCABULARY,
        n_positions=32,
        n_embd=16,
        n_layer=2,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    ),
}


class Sequences(Dataset[dict[str, torch.Tensor]]):
    """Sequences that go up by one or two: something to learn."""

    def __init__(self, count: int, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        start = torch.randint(0, _VOCABULARY, (count, 1), generator=draw)
        stride = torch.randint(1, 3, (count, 1), generator=draw)
        self.rows = (start + stride * torch.arange(_LENGTH)) % (_VOCABULARY - 3) + 3

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def arguments(folder: Path, config: dict[str, Any] | None, **more: Any) -> TrainingArguments:
    """The arguments of one run, as a program makes them: before its model."""
    return TrainingArguments(**options(folder, config, **more))


def options(folder: Path, config: dict[str, Any] | None, **more: Any) -> dict[str, Any]:
    """The settings that all runs share."""
    common: dict[str, Any] = {
        "output_dir": str(folder),
        "deepspeed": copy.deepcopy(config),
        "use_cpu": True,
        "max_steps": 4,
        "save_steps": 2,
        "logging_steps": 1,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 1,
        "max_grad_norm": 0.5,
        "seed": 7,
        "report_to": "none",
        "disable_tqdm": True,
    }
    return {**common, **more}


def forget() -> None:
    """Undo what transformers and accelerate keep for a whole process."""
    AcceleratorState._reset_state(reset_partial_state=True)
    unset_hf_deepspeed_config()
    for name in [name for name in os.environ if name.startswith("ACCELERATE_USE_DEEPSPEED")]:
        del os.environ[name]


def save_base(folder: Path, kind: str) -> Path:
    """Random weights to start from, written by rank 0."""
    base = folder / f"base_{kind}"
    if get_rank() == 0:
        torch.manual_seed(1)
        AutoModelForCausalLM.from_config(MODELS[kind]).save_pretrained(base)
    barrier()
    return base


def logged(trainer: Trainer, key: str, after: int = 0) -> list[float]:
    """The values that the Trainer logged under a key, after a step."""
    history = trainer.state.log_history
    return [entry[key] for entry in history if key in entry and entry["step"] > after]


def bits_of(model: Any) -> list[torch.Tensor]:
    """Copies of all weights, whole, wherever they are."""
    with hadal.zero.GatheredParameters(list(model.parameters())):
        return [parameter.detach().clone() for parameter in model.parameters()]


def run(folder: Path, kind: str, config: dict[str, Any] | None, **more: Any) -> dict[str, Any]:
    """Train, evaluate, generate, save, load what was saved, and resume; tell what was seen."""
    forget()
    base = save_base(folder, kind)
    args = arguments(folder / "run", config, **more)
    model = AutoModelForCausalLM.from_pretrained(base)
    told: dict[str, Any] = {
        "ds": sorted({hasattr(parameter, "ds_id") for parameter in model.parameters()}),
        "start": bits_of(model),
    }
    data, held_out = Sequences(64, 1), Sequences(8, 2)
    trainer = Trainer(model=model, args=args, train_dataset=data, eval_dataset=held_out)
    trainer.train()
    told |= {
        "losses": logged(trainer, "loss"),
        "norms": logged(trainer, "grad_norm"),
        "rates": logged(trainer, "learning_rate"),
        "evaluation": trainer.evaluate()["eval_loss"],
        "engine": type(trainer.model_wrapped).__name__,
    }
    with torch.no_grad():
        # Ranks stop at different lengths: forwards of all continue until the last one has finished.
        length = 3 + 2 * get_rank()
        told["words"] = trainer.model.generate(
            held_out.rows[:2, :4],
            attention_mask=torch.ones(2, 4),
            max_new_tokens=length,
            min_new_tokens=length,
            do_sample=False,
        )
    trainer.save_model(str(folder / "saved"))
    barrier()
    told["weights"] = bits_of(trainer.model)
    told["files"] = sorted(path.name for path in (folder / "run/checkpoint-2").iterdir())
    trainer.accelerator.free_memory()

    again = arguments(folder / "again", config, save_strategy="no", **more)
    resumed = Trainer(
        model=AutoModelForCausalLM.from_pretrained(base), args=again, train_dataset=data
    )
    resumed.train(resume_from_checkpoint=str(folder / "run/checkpoint-2"))
    told["resumed"] = logged(resumed, "loss", after=2)
    resumed.accelerator.free_memory()
    forget()
    saved = AutoModelForCausalLM.from_pretrained(folder / "saved", dtype=torch.float32)
    told["saved"] = [parameter.detach() for parameter in saved.parameters()]
    return told


def first_losses(folder: Path, kind: str) -> list[tuple[float, float]]:
    """The first loss of a model that is created sharded, and of the same born whole.

    Once by `from_pretrained`, once by `from_config`. There transformers leaves out torch's own
    initialisation, and its random draws, at stage 3 alone: so does what is compared with it.
    """
    forget()
    base = save_base(folder, kind)

    def configured() -> Any:
        torch.manual_seed(3)
        return AutoModelForCausalLM.from_config(MODELS[kind])

    def configured_whole() -> Any:
        torch.manual_seed(3)
        with no_init_weights():
            model = AutoModelForCausalLM.from_config(MODELS[kind])
        model.initialize_weights()
        model.tie_weights()
        return model

    def loaded() -> Any:
        return AutoModelForCausalLM.from_pretrained(base)

    whole = [_loss(loaded()), _loss(configured_whole())]
    args = arguments(folder / "run", STAGE_3)
    sharded = [_loss(loaded()), _loss(configured())]
    del args  # stage 3 is on while they live
    forget()
    return list(zip(sharded, whole, strict=True))


def _loss(model: Any) -> float:
    rows = Sequences(4, 1).rows
    with torch.no_grad(), hadal.zero.GatheredParameters(list(model.parameters())):
        return float(model(input_ids=rows, labels=rows).loss)


def best(folder: Path, config: dict[str, Any] | None) -> dict[str, Any]:
    """Train with a look at other data, and go back to the best model; then only evaluate it."""
    forget()
    base = save_base(folder, "llama")
    data, held_out = Sequences(64, 1), Sequences(8, 2)
    args = arguments(
        folder / "run",
        config,
        eval_strategy="steps",
        eval_steps=2,
        max_steps=6,
        load_best_model_at_end=True,
        greater_is_better=True,  # of the loss, so that the first look is the best one
    )
    model = AutoModelForCausalLM.from_pretrained(base)
    trainer = Trainer(model=model, args=args, train_dataset=data, eval_dataset=held_out)
    trainer.train()
    told = {
        "evaluations": logged(trainer, "eval_loss"),
        "after": trainer.evaluate()["eval_loss"],
    }
    trainer.save_model(str(folder / "best"))
    barrier()
    trainer.accelerator.free_memory()
    forget()
    if config is not None:
        auto = dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps"), "auto")
        params = {**auto, "total_num_steps": "auto"}
        config = {**config, "scheduler": {"type": "WarmupDecayLR", "params": params}}
    args = arguments(folder / "only", config)
    saved = AutoModelForCausalLM.from_pretrained(folder / "best")
    only = Trainer(model=saved, args=args, eval_dataset=held_out)
    told["alone"] = only.evaluate()["eval_loss"]
    told["predicted"] = only.predict(held_out).predictions.shape
    only.accelerator.free_memory()
    forget()
    return told


def schedule_free(folder: Path, stage: int | None) -> dict[str, Any]:
    """Train without a schedule, and look at other data on the way; None: without an engine."""
    forget()
    base = save_base(folder, "llama")
    data, held_out = Sequences(64, 1), Sequences(8, 2)
    config = {key: value for key, value in STAGE_2.items() if key != "optimizer"}
    args = arguments(
        folder / "run",
        None if stage is None else {**config, "zero_optimization": {"stage": stage}},
        optim="schedule_free_adamw",
        lr_scheduler_type="constant",
        eval_strategy="steps",
        eval_steps=2,
        max_steps=6,
        save_strategy="no",
    )
    model = AutoModelForCausalLM.from_pretrained(base)
    trainer = Trainer(model=model, args=args, train_dataset=data, eval_dataset=held_out)
    trainer.train()
    trainer.save_model(str(folder / "saved"))
    barrier()
    told = {"losses": logged(trainer, "loss"), "evaluations": logged(trainer, "eval_loss")}
    trainer.accelerator.free_memory()
    forget()
    with torch.no_grad():
        rows = held_out.rows
        saved = AutoModelForCausalLM.from_pretrained(folder / "saved", dtype=torch.float32)
        told["saved"] = [float(saved(input_ids=rows, labels=rows).loss)]
    return told


def run_preempted(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Train, be preempted by a signal to rank 1 alone, resume; and train without a break."""
    from hadal.compat.trainer import SaveOnSignal

    class Signal(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 2 and get_rank() == 1:
                os.kill(os.getpid(), signal.SIGUSR1)
            time.sleep(0.1)  # else it is over before the ranks have agreed

    obeying = {**config, "checkpoint": {"on_signal": {"signals": ["SIGUSR1"]}}}
    base, data, told = save_base(folder, "gpt2"), Sequences(256, 1), {}
    for name, where, resumes in (
        ("preempted", "run", None),
        ("resumed", "run", True),
        ("whole", "whole", None),
    ):
        forget()
        preempts = name == "preempted"
        more = {"max_steps": 40 if preempts else told["step"] + 3, "save_strategy": "no"}
        more["lr_scheduler_type"] = "constant"
        args = arguments(folder / where, obeying if preempts else config, **more)
        model = AutoModelForCausalLM.from_pretrained(base)
        trainer = Trainer(model=model, args=args, train_dataset=data)
        if preempts:
            trainer.add_callback(Signal())
            trainer.add_callback(SaveOnSignal())
        try:
            trainer.train(resume_from_checkpoint=resumes)
        except SystemExit as left:
            told |= {"code": left.code, "step": trainer.state.global_step}
        told[name] = logged(trainer, "loss", told["step"])
        trainer.model_wrapped.destroy()
        barrier()
    return told


def cut(folder: Path, config: dict[str, Any] | None, batch: int) -> dict[str, Any]:
    """Train a model whose key-value heads two ranks can share, save it, load it, and continue."""
    forget()
    base = save_base(folder, "two heads")
    data = Sequences(64, 1)
    more: dict[str, Any] = {"per_device_train_batch_size": batch}
    args = arguments(folder / "run", config, **more)
    model = AutoModelForCausalLM.from_pretrained(base)
    trainer = Trainer(model=model, args=args, train_dataset=data, eval_dataset=Sequences(8, 2))
    trainer.train()
    told: dict[str, Any] = {
        "losses": logged(trainer, "loss"),
        "norms": logged(trainer, "grad_norm"),
        "evaluation": trainer.evaluate()["eval_loss"],
        "width": trainer.model.model.layers[0].self_attn.q_proj.weight.shape[0],
    }
    trainer.save_model(str(folder / "saved"))
    barrier()
    trainer.accelerator.free_memory()
    again = arguments(folder / "again", config, save_strategy="no", **more)
    resumed = Trainer(
        model=AutoModelForCausalLM.from_pretrained(base), args=again, train_dataset=data
    )
    resumed.train(resume_from_checkpoint=str(folder / "run/checkpoint-2"))
    told["resumed"] = logged(resumed, "loss", after=2)
    resumed.accelerator.free_memory()
    forget()
    saved = AutoModelForCausalLM.from_pretrained(folder / "saved", dtype=torch.float32)
    told["saved"] = [parameter.detach() for parameter in saved.parameters()]
    return told
