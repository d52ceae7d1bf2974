"""A generator and a discriminator: two engines in one program, each with a configuration file."""

import argparse

import deepspeed
import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("--backend", default=None)
parser = deepspeed.add_config_arguments(parser)
opt = parser.parse_args()
deepspeed.init_distributed(dist_backend=opt.backend)

torch.manual_seed(5)
netG = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8), nn.Tanh())
netD = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
criterion = nn.BCEWithLogitsLoss()
# Given by the file that the command line names, as both are trained alike.
model_engineD, optimizerD, _, _ = deepspeed.initialize(
    args=opt, model=netD, model_parameters=netD.parameters()
)
model_engineG, optimizerG, _, _ = deepspeed.initialize(
    args=opt, model=netG, model_parameters=netG.parameters()
)
device = model_engineD.device
generator = torch.Generator().manual_seed(deepspeed.comm.get_rank())
real_label, fake_label = 1.0, 0.0
losses = []
for _ in range(4):
    real = torch.randn(4, 8, generator=generator).clamp(-1, 1).to(device)
    noise = torch.randn(4, 4, generator=generator).to(device)
    # The one: it tells what is real. Two backwards, one step.
    netD.zero_grad()
    label = torch.full((4,), real_label, device=device)
    errD_real = criterion(netD(real).flatten(), label)
    model_engineD.backward(errD_real)
    fake = netG(noise)
    label.fill_(fake_label)
    errD_fake = criterion(netD(fake.detach()).flatten(), label)
    model_engineD.backward(errD_fake)
    model_engineD.step()
    # The other: its loss passes through the first network, which is not to learn from it.
    netG.zero_grad()
    label.fill_(real_label)
    errG = criterion(netD(fake).flatten(), label)
    model_engineG.backward(errG)
    model_engineG.step()
    losses.append((errD_real.item(), errD_fake.item(), errG.item()))
