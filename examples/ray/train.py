"""Ray Train with two workers, each of which trains with `import deepspeed` (Hadal).

    pip install "ray[train]"
    python examples/ray/train.py

It trains three epochs; then two, and continues from the checkpoint that Ray has kept: the last loss
is the same. Hadal has no special support for Ray, and does not need it.
"""

import tempfile

import ray
import torch
from ray import train
from ray.train import Checkpoint, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}


def train_func(config: dict) -> None:
    """Train in each worker."""
    import hadal

    hadal.install_as_deepspeed()  # not needed if the stub is installed
    import deepspeed

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    x = torch.randn(64, 8)
    loader = DataLoader(TensorDataset(x, x[:, 0] * x[:, 1]), batch_size=4)
    loader = train.torch.prepare_data_loader(loader)
    engine, _, _, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=CONFIG
    )
    begin = 0
    if config.get("from") is not None:
        with config["from"].as_directory() as folder:
            _, state = engine.load_checkpoint(folder)
            begin = state["epoch"] + 1
    for epoch in range(begin, config["epochs"]):
        for inputs, targets in loader:
            loss = nn.functional.mse_loss(engine(inputs).squeeze(-1), targets)
            engine.backward(loss)
            engine.step()
        with tempfile.TemporaryDirectory() as folder:
            # Each worker saves into its own directory; Ray collects the files.
            engine.save_checkpoint(folder, client_state={"epoch": epoch})
            torch.distributed.barrier()
            report = {"loss": loss.item(), "epoch": epoch, "ranks": engine.world_size}
            train.report(report, checkpoint=Checkpoint.from_directory(folder))


def fit(storage: str, **config: object) -> train.Result:
    """Run the training on two workers."""
    trainer = TorchTrainer(
        train_func,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=storage),
    )
    return trainer.fit()


def main() -> None:
    """Train without a break, then with one."""
    ray.init(num_cpus=2, include_dashboard=False)
    with tempfile.TemporaryDirectory() as storage:
        whole = fit(storage, epochs=3)
        half = fit(storage, epochs=2)
        again = fit(storage, **{"epochs": 3, "from": half.checkpoint})
    print("in one go:", whole.metrics)
    print("with a break:  ", again.metrics)


if __name__ == "__main__":
    main()
