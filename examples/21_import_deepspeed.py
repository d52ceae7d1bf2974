"""A program written for DeepSpeed, unchanged except for its first two lines.

    hadal run --num_accelerators 2 examples/21_import_deepspeed.py

Without these lines, start it with `hadal run --as-deepspeed`, or install `compat/deepspeed-stub`.
"""

import hadal

hadal.install_as_deepspeed()

import deepspeed  # noqa: E402
import torch  # noqa: E402
from deepspeed.accelerator import get_accelerator  # noqa: E402
from deepspeed.ops.adam import FusedAdam  # noqa: E402
from deepspeed.runtime.lr_schedules import WarmupLR  # noqa: E402
from torch import nn  # noqa: E402

STEPS = 40
CONFIG = {
    "train_micro_batch_size_per_gpu": 16,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}


def main() -> None:
    """Learn a sum."""
    deepspeed.init_distributed()
    torch.manual_seed(0)
    with deepspeed.zero.Init(config_dict_or_path=CONFIG):
        model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = FusedAdam(model.parameters(), lr=0.02)
    engine, optimizer, _, _ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        lr_scheduler=WarmupLR(optimizer, warmup_max_lr=0.02, warmup_num_steps=5),
        config=CONFIG,
    )
    weight = model[0].weight
    if deepspeed.comm.get_rank() == 0:
        print(f"{type(engine).__name__}: {weight.ds_numel} numbers, {weight.ds_status}")

    losses = []
    for _ in range(STEPS):
        x = torch.randn(16, 2, device=get_accelerator().current_device_name())
        loss = nn.functional.mse_loss(engine(x), x.sum(dim=1, keepdim=True))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    if deepspeed.comm.get_rank() == 0:
        print(f"loss {losses[0]:.2f}, now {losses[-1]:.2f} after {engine.global_steps} updates")
    assert sum(losses[-5:]) < sum(losses[:5])
    engine.destroy()


if __name__ == "__main__":
    main()
