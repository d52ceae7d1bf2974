"""A program with every monitor enabled and services offline, which prints its results.

`all_writers.py FOLDER`: in a process of its own, as services leave threads and hooks behind.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

FOLDER = Path(sys.argv[1])
os.environ |= {
    "WANDB_MODE": "offline",
    "WANDB_DIR": str(FOLDER),
    "WANDB_SILENT": "true",
    "COMET_OFFLINE_DIRECTORY": str(FOLDER / "comet"),
    "COMET_DISABLE_AUTO_LOGGING": "1",
}
sys.path.insert(0, str(Path(__file__).parents[1]))

FILES = {"enabled": True, "output_path": str(FOLDER), "job_name": "job"}
RATES = {"type": "WarmupLR", "params": {"warmup_num_steps": 10, "warmup_type": "linear"}}


def main() -> None:
    from engine.toys import engine_of, train  # the variables are set

    engine = engine_of(
        1,
        gradient_accumulation_steps=2,
        scheduler={**RATES, "params": {**RATES["params"], "warmup_max_lr": 0.01}},
        tensorboard=FILES,
        csv_monitor=FILES,
        jsonl_monitor=FILES,
        wandb={"enabled": True, "project": "deep sea", "group": "trenches", "team": "us"},
        comet={
            "enabled": True,
            "online": False,
            "project": "sea",
            "experiment_name": "first dive",
            "samples_log_interval": 12,
            "api_key": os.environ["API_KEY"],
        },
    )
    losses = [float(loss) for loss in train(engine, range(8))]
    engine.monitor.write_events([("Mine/score", 0.25, engine.global_samples)])
    engine.destroy()
    print(json.dumps({"losses": losses}))


main()
