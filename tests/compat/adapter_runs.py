"""LoRA by peft, and trl's SFTTrainer, for the ranks of a pool."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import trainer_runs as t
from transformers import AutoModelForCausalLM, Trainer

from hadal.comm import barrier


def _fresh(folder: Path) -> Any:
    torch.manual_seed(11)
    return AutoModelForCausalLM.from_pretrained(folder / "base_llama")


def lora(folder: Path, config: dict[str, Any] | None) -> dict[str, Any]:
    """Train adapters and a copy of the head alone, save them and load them again."""
    from peft import LoraConfig, PeftModel, get_peft_model

    t.forget()
    t.save_base(folder, "llama")
    args = t.arguments(folder / "run", config)
    options = LoraConfig(
        r=4,
        target_modules=["q_proj", "v_proj"],
        modules_to_save=["lm_head"],
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(_fresh(folder), options)
    data, held_out = t.Sequences(64, 1), t.Sequences(8, 2)
    trainer = Trainer(model=model, args=args, train_dataset=data, eval_dataset=held_out)
    trainer.train()
    told = {
        "losses": t.logged(trainer, "loss"),
        "evaluation": trainer.evaluate()["eval_loss"],
    }
    trainer.save_model(str(folder / "saved"))
    trainer.accelerator.free_memory()
    barrier()
    t.forget()
    loaded = PeftModel.from_pretrained(_fresh(folder), folder / "saved")
    with torch.no_grad():
        told["reloaded"] = float(loaded(input_ids=held_out.rows, labels=held_out.rows).loss)
    return told


def _tokenizer() -> Any:
    """One that knows the words w3 to w39."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"w{n}": n for n in range(3, 40)}
    split = Tokenizer(models.WordLevel(words, unk_token="<s>"))
    split.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=split,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        padding_side="left",
    )


def sft(folder: Path, config: dict[str, Any] | None) -> dict[str, Any]:
    """Train on rows of text."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    t.forget()
    t.save_base(folder, "llama")
    rows = [" ".join(f"w{int(n)}" for n in row) for row in t.Sequences(32, 1).rows]
    args = SFTConfig(
        **t.options(folder / "run", config, save_strategy="no"),
        bf16=False,
        gradient_checkpointing=False,
        dataset_text_field="text",
        max_length=16,
    )
    trainer = SFTTrainer(
        model=_fresh(folder),
        args=args,
        train_dataset=Dataset.from_dict({"text": rows}),
        processing_class=_tokenizer(),
    )
    return _trained(trainer)


def _reward(completions: list[str], **others: Any) -> list[float]:
    return [len(text.split()) % 3 + 0.1 * len(set(text.split())) for text in completions]


def grpo(folder: Path, config: dict[str, Any] | None) -> dict[str, Any]:
    """Train on the model's own generations, with a reference model (a second engine)."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    t.forget()
    t.save_base(folder, "llama")
    args = GRPOConfig(
        **t.options(folder / "run", config, save_strategy="no", max_steps=2),
        bf16=False,
        gradient_checkpointing=False,
        num_generations=2,
        max_completion_length=6,
        beta=0.1,
    )
    prompts = [f"w{n} w{n + 1} w{n + 2}" for n in (3, 6, 9, 12)]
    trainer = GRPOTrainer(
        model=_fresh(folder),
        args=args,
        train_dataset=Dataset.from_dict({"prompt": prompts * 4}),
        processing_class=_tokenizer(),
        reward_funcs=_reward,
    )
    return _trained(trainer)


def _trained(trainer: Any) -> dict[str, Any]:
    trainer.train()
    told = {name: t.logged(trainer, name) for name in ("loss", "grad_norm")}
    trainer.accelerator.free_memory()
    t.forget()
    return told
