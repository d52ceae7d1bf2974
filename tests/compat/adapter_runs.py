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
    """Train adapters alone, save them and load them again."""
    from peft import LoraConfig, PeftModel, get_peft_model

    t.forget()
    t.save_base(folder, "llama")
    args = t.arguments(folder / "run", config)
    options = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
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


def sft(folder: Path, config: dict[str, Any] | None) -> dict[str, Any]:
    """Train on rows of text."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    t.forget()
    t.save_base(folder, "llama")
    words = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"w{n}": n for n in range(3, 40)}
    split = Tokenizer(models.WordLevel(words, unk_token="<s>"))
    split.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=split, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )
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
        processing_class=tokenizer,
    )
    trainer.train()
    told = {"losses": t.logged(trainer, "loss")}
    trainer.accelerator.free_memory()
    t.forget()
    return told
