"""The names of torch's classes that are known without torch are those that torch has."""

import inspect
from collections.abc import Iterator
from types import ModuleType

import torch

from hadal.config import load_config
from hadal.config.optimizer import KINDS
from hadal.config.rules import is_class_of
from hadal.config.scheduler import TORCH_SCHEDULES

from .faults import BASE, faults_of


def classes(module: ModuleType, root: type) -> Iterator[str]:
    for name, found in vars(module).items():
        if inspect.isclass(found) and issubclass(found, root) and found is not root:
            yield name


def test_no_class_of_torch_is_missing() -> None:
    optimizers = set(classes(torch.optim, torch.optim.Optimizer))
    assert optimizers <= KINDS.keys()
    schedules = torch.optim.lr_scheduler
    found = {name for name in classes(schedules, schedules.LRScheduler) if name[0] != "_"}
    assert found == set(TORCH_SCHEDULES)


def test_a_newer_torch_may_have_more() -> None:
    assert is_class_of("torch.optim", "SGD")
    assert not is_class_of("torch.optim", "AdmaW")
    assert not is_class_of("a_package_that_nobody_imported", "SGD")


def test_all_faults_of_the_optimizer_and_the_schedule_are_reported_at_once() -> None:
    optimizer = {"type": "AdmaW", "params": {"learning_rate": 0.1}}
    faults = faults_of({**BASE, "optimizer": optimizer, "scheduler": {"type": "WarmupLr"}})
    assert faults == {
        "optimizer.type": '"AdmaW" is neither built in nor a class of torch.optim; did you mean'
        ' "AdamW"?',
        "optimizer.params.learning_rate": 'unknown key of AdamW; did you mean "lr"?',
        "scheduler.type": '"WarmupLr" is neither built in nor a class of'
        ' torch.optim.lr_scheduler; did you mean "WarmupLR"?',
    }


def test_a_type_that_is_not_made_may_have_any_name() -> None:
    section = {"type": "Distributed", "params": {"learning_rate": 0.1}}
    both = {**BASE, "optimizer": section, "scheduler": {"type": "Mine"}}
    config = load_config(both, client_optimizer=True, client_scheduler=True)
    assert config.optimizer is not None
    assert config.optimizer.type == "Distributed"
    assert faults_of(both).keys() == {"optimizer.type", "scheduler.type"}


def test_a_class_that_an_engine_cannot_step_is_refused() -> None:
    keys = {"optimizer": {"type": "LBFGS"}, "scheduler": {"type": "ReduceLROnPlateau"}}
    faults = faults_of({**BASE, **keys})
    assert "calls the loss several times" in faults["optimizer.type"]
    assert faults.keys() == {"optimizer.type"}
