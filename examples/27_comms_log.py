"""The log of collectives: counts, bytes and bandwidth, and which rank is the straggler.

    hadal run --num_accelerators 2 examples/27_comms_log.py

Rank 1 is late in every step here. Bytes are those on the wire: weights are sent in bf16, gradients
in fp32, as configured.
"""

import time

import torch
from torch import nn

import hadal

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
    "bf16": {"enabled": True},
    "communication_data_type": "fp32",
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    # "debug": true adds a row for each bucket's gather.
    "comms_logger": {"enabled": True},
}


def main() -> None:
    """Train a few steps; print the log of the last ones."""
    hadal.init_distributed()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    engine, _, _, _ = hadal.initialize(
        model=model, model_parameters=model.parameters(), config=CONFIG
    )
    for step in range(6):
        if step == 3:
            hadal.comm.reset_log()  # leave out the first steps
        if hadal.comm.get_rank() == 1:
            time.sleep(0.01)
        x = torch.randn(2, 64, dtype=torch.bfloat16, device=engine.device)
        loss = engine(x).float().square().mean()
        engine.backward(loss)
        engine.step()
    rows = hadal.comm.log_summary(show_straggler=True)
    hadal.comm.stop_log()
    if hadal.comm.get_rank() == 0:
        print(f"rank 0 has sent {sum(row.sent_nbytes for row in rows)} bytes in 3 steps")
    engine.destroy()


if __name__ == "__main__":
    main()
