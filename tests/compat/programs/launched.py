"""A loop of Accelerate's, started by `accelerate launch`: what it trains with, its command says."""

import os
import sys

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DummyOptim, DummyScheduler
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

os.environ.pop("ACCELERATE_USE_CPU", None)
PartialState(cpu=True)  # else Accelerate sees one process where there is no accelerator
accelerator = Accelerator()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
x = torch.randn(32, 4)
loader = DataLoader(TensorDataset(x, x.sum(1)), batch_size=4)
if "optimizer" in accelerator.state.deepspeed_plugin.deepspeed_config:
    optimizer = DummyOptim(model.parameters(), lr=1e-2)
    schedule = DummyScheduler(optimizer, total_num_steps=8)
else:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
losses = []
for inputs, targets in loader:
    with accelerator.accumulate(model):
        loss = nn.functional.mse_loss(model(inputs).squeeze(-1), targets)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    losses.append(accelerator.gather_for_metrics(loss.detach()[None]).mean().item())
if accelerator.is_main_process:
    stage = accelerator.state.deepspeed_plugin.zero_stage
    sys.stdout.write(f"{stage} {accelerator.num_processes} {losses}\n")
