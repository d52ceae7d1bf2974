"""Writes what programs load: tiny models of random weights, data sets, and configurations.

`python inputs.py FOLDER` fills FOLDER. Models that a test loads by a name of the hub are put into
FOLDER/hub, as the hub's cache has them, so that the test finds them offline.
"""

from __future__ import annotations

import array
import json
import math
import random
import shutil
import sys
import tempfile
import wave
from pathlib import Path
from typing import Any

WORDS = [f"w{number}" for number in range(40)]
MARKS = ["<unk>", "<s>", "</s>", "<pad>"]


def tokenizer() -> Any:
    """Return a tokenizer of whole words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: place for place, word in enumerate([*MARKS, *WORDS, "yes", "no"])}
    raw = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    names = dict(zip(("unk_token", "bos_token", "eos_token", "pad_token"), MARKS, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=raw, **names)


def write_models(folder: Path) -> None:
    """Write a Llama and an OPT that continue a text, and a Llama that scores it."""
    import torch
    import transformers

    torch.manual_seed(0)
    of_words = tokenizer()
    letters = [*MARKS, "<mask>", "<|endoftext|>", *"Ġ0123456789enosyw"]
    vocabulary = {letter: place for place, letter in enumerate(letters)}
    names = {"unk_token": "<unk>", "pad_token": "<pad>", "mask_token": "<mask>"}
    of_letters = transformers.GPT2Tokenizer(vocab=vocabulary, merges=[], **names)
    sizes = {"vocab_size": 48, "hidden_size": 32, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "max_position_embeddings": 128}
    sizes |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3}
    llama = sizes | {"intermediate_size": 64, "num_key_value_heads": 2}
    models = {
        "llama": ("LlamaForCausalLM", llama),
        "judge": ("LlamaForSequenceClassification", llama | {"num_labels": 1}),
        "opt": ("OPTForCausalLM", sizes | {"ffn_dim": 64, "word_embed_proj_dim": 32}),
    }
    for name, (kind, settings) in models.items():
        model = getattr(transformers, kind)
        model(model.config_class(**settings)).save_pretrained(folder / name)
        tokens = of_letters if name == "opt" else of_words
        tokens.save_pretrained(folder / name)


def write_data(folder: Path) -> None:
    """Write rows of each kind that a trainer of trl takes, and a plain text."""
    from datasets import load_dataset

    drawn = random.Random(0)

    def some(count: int) -> str:
        return " ".join(drawn.choice(WORDS) for _ in range(count))

    rows = {
        "sentences": lambda: {"text": some(12)},
        "pairs": lambda: {"prompt": some(4), "chosen": some(4) + " yes", "rejected": some(4)},
        "scored": lambda: {"chosen": some(6) + " yes", "rejected": some(6) + " no"},
        "prompts": lambda: {"prompt": some(4)},
    }
    for name, row in rows.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        count = 400 if name == "sentences" else 32  # Ray Train's example takes 1 % of them
        for split in ("train", "test"):
            lines = [json.dumps(row()) + "\n" for _ in range(count)]
            (folder / name / f"{split}.jsonl").write_text("".join(lines))
    (folder / "lines.txt").write_text("".join(some(12) + "\n" for _ in range(200)))
    # DeepSpeed-Chat knows the columns by this name.
    load_dataset(str(folder / "pairs")).save_to_disk(folder / "Dahoas/rm-static")


def write_sounds(folder: Path) -> None:
    """Write sequences of three tones, and the letters that name them, as FunASR reads them."""
    place = folder / "sounds"
    place.mkdir()
    drawn, lines = random.Random(0), []
    for number in range(16):
        letters = [drawn.choice("abcd") for _ in range(3)]
        samples = array.array("h")
        for letter in letters:
            pitch = "abcd".index(letter) + 1
            samples.extend(int(8000 * math.sin(0.1 * pitch * moment)) for moment in range(6000))
        with wave.open(str(place / f"{number}.wav"), "wb") as sound:
            sound.setparams((1, 2, 16000, 0, "NONE", ""))
            sound.writeframes(samples.tobytes())
        row = {"key": str(number), "source": str(place / f"{number}.wav"), "source_len": 140}
        lines.append(json.dumps(row | {"target": "".join(letters), "target_len": 3}) + "\n")
    (place / "sounds.jsonl").write_text("".join(lines))
    (place / "tokens.txt").write_text(
        "\n".join(["<blank>", "<s>", "</s>", *"abcd", "<unk>"]) + "\n"
    )


def write_cache(folder: Path) -> None:
    """Write a text into the cache of data sets, where HelloDeepSpeed finds it by name."""
    from datasets import load_dataset

    name = "wikitext-2-v1"
    place = folder / "datasets/wikitext" / name / "0.0.0/0"
    with tempfile.TemporaryDirectory() as cache:
        load_dataset("text", name, data_files=str(folder / "lines.txt"), cache_dir=cache)
        built = next(Path(cache).glob("text/*/*/*/text-train.arrow"))
        shutil.copytree(built.parent, place)
    (place / built.name).rename(place / "wikitext-train.arrow")


def write_configurations(folder: Path) -> None:
    """Write what the Trainer completes: `auto` for all that its arguments say."""
    filled = ("train_micro_batch_size_per_gpu", "train_batch_size", "gradient_accumulation_steps")
    for stage in (2, 3):
        zero = {
            "stage": stage,
            "stage3_gather_16bit_weights_on_model_save": True,
            "stage3_param_persistence_threshold": 0,
        }
        keys = dict.fromkeys((*filled, "gradient_clipping"), "auto")
        config = {**keys, "bf16": {"enabled": "auto"}, "zero_optimization": zero}
        (folder / f"zero{stage}.json").write_text(json.dumps(config, indent=2))


def write_hub(home: Path) -> None:
    """Write the models that tests load by name."""
    import torch
    import transformers

    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    experts = {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
    experts |= {"num_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 4}
    gpt = "GPT2LMHeadModel", {"n_embd": 8, "n_layer": 2, "n_head": 2}
    t5 = {"vocab_size": 128, "d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 2, "num_heads": 4}
    t5 |= {"decoder_start_token_id": 0}
    models: dict[str, tuple[str, dict[str, int]]] = {
        "gpt2": gpt,
        "sshleifer/tiny-gpt2": gpt,
        "hf-internal-testing/tiny-random-gpt2": gpt,
        "hf-internal-testing/tiny-random-gptj": (
            "GPTJForCausalLM",
            {"vocab_size": 64, "n_embd": 16, "n_layer": 2, "n_head": 2, "rotary_dim": 4},
        ),
        "patrickvonplaten/t5-tiny-random": ("T5ForConditionalGeneration", t5),
        "peft-internal-testing/tiny-random-qwen-1.5-MoE": (
            "Qwen2MoeForCausalLM",
            sizes | experts | {"intermediate_size": 32},
        ),
        "apple/mobilevit-xx-small": ("MobileViTModel", {}),
    }
    torch.manual_seed(0)
    for name, (kind, settings) in models.items():
        place = home / "hub" / ("models--" + name.replace("/", "--"))
        (place / "refs").mkdir(parents=True, exist_ok=True)
        (place / "refs" / "main").write_text("0" * 40)
        snapshot = place / "snapshots" / ("0" * 40)
        model = getattr(transformers, kind)
        model(model.config_class(**settings)).save_pretrained(snapshot)
        kind_of_words = transformers.T5Tokenizer if kind.startswith("T5") else tokenizer
        kind_of_words().save_pretrained(snapshot)


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    writers = (write_models, write_data, write_sounds, write_cache, write_configurations, write_hub)
    for write in writers:
        write(folder)


if __name__ == "__main__":
    main()
