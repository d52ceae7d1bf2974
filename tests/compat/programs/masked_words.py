"""Masked words, with checkpoints from which a second start resumes."""

import argparse

import deepspeed
import torch
from deepspeed.utils import log_dist, logger
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--folder")
parser.add_argument("--stage", type=int)
parser.add_argument("--steps", type=int)
parser.add_argument("--resume", action="store_true")
parser.add_argument("--local_rank", type=int, default=-1)
args = parser.parse_args()
logger.setLevel("ERROR")

WORDS, MASK = 50, 1


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 16, padding_idx=0)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, WORDS)

    def forward(self, src_tokens, tgt_tokens):
        logits = self.head(self.encoder(self.embedding(src_tokens)))
        return nn.functional.cross_entropy(
            logits.flatten(0, 1).float(), tgt_tokens.flatten(), ignore_index=-100
        )


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    seed = 1000 * step + deepspeed.comm.get_rank()
    words = torch.randint(2, WORDS, (4, 8), generator=torch.Generator().manual_seed(seed))
    targets = torch.full_like(words, -100)
    targets[:, ::3] = words[:, ::3]
    words[:, ::3] = MASK
    return words, targets


deepspeed.init_distributed()
torch.manual_seed(3)
model = Model()
ds_config = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
    "fp16": {"enabled": False},
    "zero_optimization": {"stage": args.stage, "offload_optimizer": {"device": "none"}},
}
model, _, _, _ = deepspeed.initialize(
    model=model, model_parameters=model.parameters(), config=ds_config
)
start = 1
if args.resume:
    _, client_state = model.load_checkpoint(load_dir=args.folder)
    start = client_state["checkpoint_step"] + 1
losses = []
model.train()
for step in range(start, args.steps + 1):
    source, targets = batch(step)
    loss = model(source.to(model.device), targets.to(model.device))
    model.backward(loss)
    model.step()
    losses.append(loss.item())
    log_dist(f"step {step}: {loss.item()}", ranks=[0])
    if step == 2:
        model.save_checkpoint(save_dir=args.folder, client_state={"checkpoint_step": step})
