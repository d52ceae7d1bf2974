"""A BERT as DeepSpeedExamples' run_glue_no_trainer.py compresses it, with a teacher."""

import argparse
import json
from pathlib import Path

import deepspeed
import torch
from deepspeed.compression.compress import init_compression, redundancy_clean
from torch import nn
from transformers import BertConfig, BertForSequenceClassification

parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
parser.add_argument("--folder")
parser.add_argument("--local_rank", type=int, default=-1)
args = parser.parse_args()


def off(**shared):
    return {"shared_parameters": {"enabled": False, **shared}, "different_groups": {}}


def on(params, modules, related=None, **shared):
    group = {"params": params, "modules": modules, "related_modules": related}
    return {
        "shared_parameters": {"enabled": True, "schedule_offset": 1, **shared},
        "different_groups": {"rp1": group},
    }


half = {"dense_ratio": 0.5}
bits = {"start_bits": 8, "target_bits": 8, "quantization_period": 0}
ds_config = {
    "train_micro_batch_size_per_gpu": 4,
    "prescale_gradients": True,
    "gradient_clipping": 1.0,
    "compression_training": {
        "layer_reduction": {
            "enabled": True,
            "keep_number_layer": 2,
            "module_name_prefix": "bert.encoder.layer",
            "teacher_layer": [1, 3],
            "other_module_name": ["bert.pooler", "bert.embeddings", "classifier"],
        },
        "weight_quantization": on(
            bits,
            ["attention.self", "intermediate", "word_embeddings"],
            quantize_weight_in_forward=True,
            quantize_groups=1,
            quantization_type="symmetric",
            fp16_mixed_quantize={"enabled": False, "quantize_change_ratio": 0.001},
        ),
        "activation_quantization": on({"bits": 8}, ["attention.self"], range_calibration="dynamic"),
        "sparse_pruning": off(method="l1"),
        "row_pruning": on(
            half, ["intermediate.dense"], [[r"layer.\w+.output.dense"]], method="topk"
        ),
        "head_pruning": on(
            half,
            ["attention.output.dense"],
            [["self.query", "self.key", "self.value"]],
            method="topk",
            num_heads=4,
        ),
        "channel_pruning": off(method="topk"),
    },
}
args.deepspeed_config = str(Path(args.folder) / "ds_config.json")
deepspeed.init_distributed()
rank = deepspeed.comm.get_rank()
if rank == 0:
    Path(args.deepspeed_config).write_text(json.dumps(ds_config))
deepspeed.comm.barrier()


def bert(layers):
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=20,
            hidden_size=16,
            num_hidden_layers=layers,
            num_attention_heads=4,
            intermediate_size=32,
            max_position_embeddings=8,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


torch.manual_seed(3)
teacher_model = bert(4).eval()
model = init_compression(bert(2), args.deepspeed_config, teacher_model=teacher_model)
no_decay = ["bias", "LayerNorm.weight"]
groups = [[], []]
for name, parameter in model.named_parameters():
    groups[any(part in name for part in no_decay)].append(parameter)
optimizer = torch.optim.AdamW(
    [{"params": groups[0], "weight_decay": 0.01}, {"params": groups[1], "weight_decay": 0.0}],
    lr=1e-3,
)
model, optimizer, _, _ = deepspeed.initialize(
    args=args, model=model, optimizer=optimizer, dist_init_required=True
)
teacher_model, _, _, _ = deepspeed.initialize(args=args, model=teacher_model)
losses = []
drawn = torch.Generator().manual_seed(rank)
for _ in range(4):
    tokens = torch.randint(20, (4, 8), generator=drawn)
    labels = (tokens[:, 0] > 9).long()
    outputs = model(input_ids=tokens, labels=labels, output_hidden_states=True)
    with torch.no_grad():
        known = teacher_model(input_ids=tokens, output_hidden_states=True)
    loss = outputs.loss + nn.functional.mse_loss(outputs.logits, known.logits)
    loss = loss + nn.functional.mse_loss(outputs.hidden_states[-1], known.hidden_states[-1])
    model.backward(loss)
    model.step()
    losses.append(loss.item())
best = {name: value.clone() for name, value in model.module.state_dict().items()}
model.module.load_state_dict(best, strict=False)
model.eval()
fixed = torch.arange(16).view(2, 8)
with torch.no_grad():
    before = model(input_ids=fixed).logits
    model = redundancy_clean(model, args.deepspeed_config)
    after = model.module(input_ids=fixed).logits
shapes = {name: tuple(value.shape) for name, value in model.module.state_dict().items()}
