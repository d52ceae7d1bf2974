"""A residual network as DeepSpeedExamples' cifar/train.py prunes its channels."""

import argparse

import deepspeed
import torch
from deepspeed.compression.compress import init_compression, redundancy_clean
from torch import nn

parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
parser.add_argument("--stage", type=int)
args = parser.parse_args()


class BasicBlock(nn.Module):
    def __init__(self, planes):
        super().__init__()
        self.conv1 = nn.Conv2d(planes, planes, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)

    def forward(self, x):
        out = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(x + self.bn2(self.conv2(out)))


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.layer1 = nn.Sequential(BasicBlock(8), BasicBlock(8))
        self.linear = nn.Linear(8, 10)

    def forward(self, x):
        x = self.layer1(torch.relu(self.bn1(self.conv1(x))))
        return self.linear(x.mean((2, 3)))


ds_config = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "Adam", "params": {"lr": 0.01}},
    "zero_optimization": {"stage": args.stage},
    "compression_training": {
        "channel_pruning": {
            "shared_parameters": {"enabled": True, "schedule_offset": 0, "method": "topk"},
            "different_groups": {
                "cp1": {
                    "params": {"dense_ratio": 0.5},
                    "modules": [r"layer1.\d+.conv1"],
                    "related_modules": [[r"layer1.\d+.conv2", r"layer1.\d+.bn1"]],
                }
            },
        }
    },
}
deepspeed.init_distributed()
torch.manual_seed(3)
net = init_compression(ResNet(), ds_config)
engine, *_ = deepspeed.initialize(
    args=args, model=net, model_parameters=net.parameters(), config=ds_config
)
drawn = torch.Generator().manual_seed(deepspeed.comm.get_rank())
losses = []
for _ in range(3):
    images = torch.randn(4, 3, 6, 6, generator=drawn)
    loss = nn.functional.cross_entropy(engine(images), torch.arange(4))
    engine.backward(loss)
    engine.step()
    losses.append(loss.item())
redundancy_clean(engine, ds_config)
shapes = {name: tuple(value.shape) for name, value in net.state_dict().items()}
with torch.no_grad():
    outputs = net.eval()(torch.ones(2, 3, 6, 6))
