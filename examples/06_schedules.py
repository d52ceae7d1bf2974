"""A learning-rate schedule from the configuration, or from your script's command line.

    python examples/06_schedules.py
    python examples/06_schedules.py --lr_schedule LRRangeTest --lr_range_test_step_size 5

The schedule is stepped once per update. OneCycle raises the rate and lowers the momentum (Adam's
first beta), then reverses both. `hadal plot-schedule FILE --steps N` draws a schedule.
`--lr_schedule` and its arguments replace a `scheduler` section.
"""

import argparse

import torch
from torch import nn
from torch.nn import functional as F

import hadal

STEPS = 40
ONE_CYCLE = {
    "type": "OneCycle",
    "params": {
        "cycle_min_lr": 0.002,
        "cycle_max_lr": 0.05,
        "cycle_first_step_size": 15,
        "cycle_min_mom": 0.8,
        "cycle_max_mom": 0.95,
        "decay_step_size": 5,
        "decay_lr_rate": 1.0,
    },
}


def main() -> None:
    """Train through one cycle of rate and momentum, and a decay."""
    args = hadal.add_tuning_arguments(argparse.ArgumentParser()).parse_args()
    config = {
        "train_micro_batch_size_per_gpu": 32,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "AdamW", "params": {}},
    }
    if args.lr_schedule is None:
        config["scheduler"] = ONE_CYCLE
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1))
    engine, optimizer, _, scheduler = hadal.initialize(args=args, model=model, config=config)

    losses, rates, momenta = [], [], []
    for _ in range(STEPS):
        (group,) = optimizer.param_groups
        rates.append(group["lr"])
        momenta.append(group["betas"][0])
        x = torch.randn(32, 4, device=engine.device)
        loss = F.mse_loss(engine(x), x.sin().sum(dim=1, keepdim=True))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())

    print(type(scheduler).__name__)
    print("update     loss     rate  momentum")
    for step in range(0, STEPS, 5):
        print(f"{step:6d}  {losses[step]:7.4f}  {rates[step]:7.4f}  {momenta[step]:8.3f}")
    if args.lr_schedule is None:
        assert max(rates) == rates[15] == 0.05
        assert min(momenta) == momenta[15] == 0.8
        assert rates[-1] < rates[0]
        assert losses[-1] < losses[0] / 2
    engine.destroy()


if __name__ == "__main__":
    main()
