"""Lightning's DeepSpeedStrategy on CPUs, for the ranks of a pool."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import lightning.fabric as fb
import lightning.pytorch as pl
import torch
from lightning.fabric.strategies import (
    DDPStrategy as FabricDDPStrategy,
    DeepSpeedStrategy as FabricDeepSpeedStrategy,
)
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy
from lightning.pytorch.utilities.deepspeed import convert_zero_checkpoint_to_fp32_state_dict
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from hadal.comm import get_rank


class OnCpu(DeepSpeedStrategy):
    """Without the look for CUDA, and in the ranks that run already."""

    def setup_environment(self) -> None:
        super(DeepSpeedStrategy, self).setup_environment()

    def setup_distributed(self) -> None:
        self.set_world_ranks()
        self._init_deepspeed_distributed()

    def _get_process_group_backend(self) -> str:
        return "gloo"


class FabricOnCpu(FabricDeepSpeedStrategy):
    """The same of Fabric."""

    def setup_environment(self) -> None:
        super(FabricDeepSpeedStrategy, self).setup_environment()

    def _setup_distributed(self) -> None:
        self._set_world_ranks()
        self._init_deepspeed_distributed()
        if not self._config_initialized:
            self._format_config()
            self._config_initialized = True

    def _get_process_group_backend(self) -> str:
        return "gloo"


class Started(LightningEnvironment):
    """Ranks that somebody else has started."""

    @property
    def creates_processes_externally(self) -> bool:
        return True


class Task(pl.LightningModule):
    """A few layers, born where the strategy says."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []
        self.layers: nn.Module | None = None

    def configure_model(self) -> None:
        if self.layers is None:
            torch.manual_seed(0)
            self.layers = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))

    def _loss(self, batch: list[Tensor]) -> Tensor:
        assert self.layers is not None
        return nn.functional.mse_loss(self.layers(batch[0]).squeeze(-1), batch[1])

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss = self._loss(batch)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        self.log("value", self._loss(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Manual(Task):
    """Steps its optimizer and schedule by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.batches: list[list[Tensor]] = []

    def training_step(self, batch: list[Tensor], index: int) -> None:
        optimizer, schedule = self.optimizers(), self.lr_schedulers()
        self.batches.append([one.clone() for one in batch])
        loss = self._loss(batch)
        self.losses.append(loss.item())
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        schedule.step()


def run_manual(stage: int) -> tuple[list[float], list[float]]:
    """The losses of a task that steps by itself, and those of plain torch on all ranks' batches."""
    warnings.simplefilter("ignore", UserWarning)
    task = Manual()
    trainer = _trainer(stage, epochs=1, steps_itself=True)
    trainer.fit(task, _data())
    batches: list[Any] = [None, None]
    torch.distributed.all_gather_object(batches, task.batches)
    plain = Task()
    plain.configure_model()
    [optimizer], [schedule] = plain.configure_optimizers()
    expected = []
    for step in zip(*batches, strict=True):
        losses = [plain._loss(batch) for batch in step]
        expected.append(losses[get_rank()].item())
        optimizer.zero_grad()
        (sum(losses) / 2).backward()
        optimizer.step()
        schedule["scheduler"].step()
    return task.losses, expected


def _data() -> DataLoader[Any]:
    x = torch.randn(32, 6, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(x, x[:, 0] * x[:, 1]), batch_size=4)


def _trainer(stage: int | None, epochs: int, *, steps_itself: bool = False) -> pl.Trainer:
    # Lightning leaves these to who steps by itself.
    around: dict[str, Any] = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}
    return pl.Trainer(
        **({} if steps_itself else around),
        accelerator="cpu",
        devices=2,
        plugins=[Started()],
        strategy=DDPStrategy() if stage is None else OnCpu(stage=stage),
        max_epochs=epochs,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )


def run(folder: Path, stage: int | None) -> dict[str, Any]:
    """Fit for an epoch, save, resume for another one, and validate the result."""
    # Advice: more workers, one process to validate with, how to make one file of a checkpoint.
    warnings.simplefilter("ignore", UserWarning)
    task = Task()
    trainer = _trainer(stage, epochs=1)
    trainer.fit(task, _data(), _data())
    told = {"losses": task.losses, "value": trainer.callback_metrics["value"].item()}
    if stage is None:
        return told
    trainer.save_checkpoint(folder / "saved")
    told["of one file"] = _value_of_one_file(folder) if get_rank() == 0 else None
    whole, resumed = Task(), Task()
    longer = _trainer(stage, epochs=2)
    longer.fit(whole, _data(), _data())
    again = _trainer(stage, epochs=2)
    again.fit(resumed, _data(), _data(), ckpt_path=str(folder / "saved"))
    (found,) = again.validate(resumed, _data(), verbose=False)
    return told | {
        "rank": get_rank(),
        "second": whole.losses[len(task.losses) :],
        "resumed": resumed.losses,
        "second value": longer.callback_metrics["value"].item(),
        "validated": found["value"],
    }


def _value_of_one_file(folder: Path) -> float:
    """The loss of all samples, with the weights that Lightning's own tool writes into one file.

    In its file stands what Lightning had given to be saved too.
    """
    convert_zero_checkpoint_to_fp32_state_dict(folder / "saved", folder / "one.ckpt")
    content = torch.load(folder / "one.ckpt", weights_only=False)
    assert (content["epoch"], content["global_step"]) == (1, 2)
    plain = Task()
    plain.configure_model()
    plain.load_state_dict(content["state_dict"])
    return plain._loss(list(_data().dataset[:])).item()


def _fabric(stage: int | None, precision: Any) -> fb.Fabric:
    strategy: Any = FabricDDPStrategy()
    if stage is not None:
        strategy = FabricOnCpu(stage=stage)
        strategy.config["gradient_clipping"] = 0.0  # by default it is 1.0, and plain torch's none
    fabric = fb.Fabric(
        accelerator="cpu", devices=2, plugins=[Started()], strategy=strategy, precision=precision
    )
    fabric.launch()
    return fabric


def run_fabric(folder: Path, stage: int | None, precision: str) -> dict[str, Any]:
    """Train a few updates, save in the middle, and resume from there."""
    warnings.simplefilter("ignore", UserWarning)
    fabric = _fabric(stage, precision)
    torch.manual_seed(0)
    with fabric.init_module():
        layers = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
    model, optimizer = fabric.setup(layers, torch.optim.Adam(layers.parameters(), lr=1e-2))
    state = {"model": model, "optimizer": optimizer, "step": 0}
    losses = []

    def train(steps: range) -> list[float]:
        found = []
        for step in steps:
            rank = 10 * step + fabric.global_rank
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(rank))
            loss = nn.functional.mse_loss(model(x).squeeze(-1), x[:, 0] * x[:, 1])
            optimizer.zero_grad()
            fabric.backward(loss)
            optimizer.step()
            found.append(loss.item())
        return found

    losses = train(range(3))
    if stage is None:
        return {"losses": losses + train(range(3, 5))}
    state["step"] = 3
    fabric.save(folder / "saved", state)
    losses += train(range(3, 5))
    state["step"] = 0
    fabric.load(folder / "saved", state)
    return {"losses": losses, "step": state["step"], "again": train(range(3, 5))}
