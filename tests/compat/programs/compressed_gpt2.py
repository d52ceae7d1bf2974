"""A GPT-2 as DeepSpeedExamples' run_clm_no_trainer.py quantizes it, without training."""

import argparse

import deepspeed
import torch
from deepspeed.compression.compress import init_compression, redundancy_clean
from deepspeed.compression.helper import convert_conv1d_to_linear
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.pytorch_utils import Conv1D

parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
args = parser.parse_args()
torch.manual_seed(3)
model = GPT2LMHeadModel(GPT2Config(vocab_size=20, n_embd=16, n_layer=2, n_head=2, n_positions=8))
model.eval()
tokens = torch.arange(16).view(2, 8)
with torch.no_grad():
    plain = model(tokens).logits
model = convert_conv1d_to_linear(model, Conv1D)
model.eval()
with torch.no_grad():
    converted = model(tokens).logits
ds_config = {
    "train_batch_size": 2,
    "fp16": {"enabled": False},
    "compression_training": {
        "weight_quantization": {
            "shared_parameters": {
                "enabled": True,
                "quantizer_kernel": False,
                "schedule_offset": 0,
                "quantize_groups": 16,
                "quantize_verbose": False,
                "quantization_type": "symmetric",
                "quantize_weight_in_forward": True,
                "rounding": "nearest",
            },
            "different_groups": {
                "wq1": {
                    "params": {"start_bits": 8, "target_bits": 8, "quantization_period": 0},
                    "modules": ["attn", "mlp"],
                }
            },
        }
    },
}
model = init_compression(model, ds_config)
model = redundancy_clean(model, ds_config)
with torch.no_grad():
    quantized = model(tokens).logits
values = model.transformer.h[0].mlp.c_fc.weight.unique().numel()
tied = model.lm_head.weight is model.transformer.wte.weight
