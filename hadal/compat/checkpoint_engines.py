"""Checkpoint engines: objects that write and read one file, which programs call or subclass."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass
class CheckpointCommitInfo:
    """The checkpoint that is being saved."""

    tag: str
    save_dir: str
    save_latest: bool


class CheckpointEngine(ABC):
    """The base of engines: `create`, then `save` for each file, then `commit`."""

    def __init__(self, config_params: Any = None) -> None:
        self.name: str | None = None

    @abstractmethod
    def create(self, info: CheckpointCommitInfo) -> Any:
        """Begin a checkpoint."""

    @abstractmethod
    def save(self, state_dict: Any, path: str) -> Any:
        """Write a state into a file."""

    @abstractmethod
    def load(self, path: str, map_location: Any = None) -> Any:
        """Return the state in a file."""

    @abstractmethod
    def commit(self, info: CheckpointCommitInfo) -> Any:
        """End a checkpoint: all its files are written."""

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Create a folder."""
        Path(path).mkdir(parents=True, exist_ok=exist_ok)

    def is_data_parallel_writer(self, dp_rank: int) -> bool:
        """Return whether a data-parallel rank writes what all of them hold."""
        return dp_rank == 0

    def is_decoupled(self) -> bool:
        """Return whether files are written while training continues."""
        return False

    def set_commit_info(self, info: CheckpointCommitInfo) -> None:  # noqa: B027 - as DeepSpeed's
        """Do nothing: only an engine that is decoupled commits later."""

    def get_commit_info(self) -> CheckpointCommitInfo | None:
        """Return the checkpoint that is to be committed."""
        return None

    def cleanup(self) -> None:  # noqa: B027 - as DeepSpeed's
        """Do nothing: this engine holds no resources."""

    def preserves_storage_sharing(self) -> bool:
        """Return whether tensors that share memory share it in the file."""
        return True


class TorchCheckpointEngine(CheckpointEngine):
    """Files of `torch.save`. `load` unpickles, so it is for files that the program trusts."""

    def __init__(self, config_params: Any = None) -> None:
        super().__init__(config_params)
        self.name = type(self).__name__

    def create(self, info: CheckpointCommitInfo) -> None:
        """Do nothing: there is nothing to prepare."""

    def save(self, state_dict: Any, path: str) -> None:
        """Write a state with `torch.save`."""
        torch.save(state_dict, path)

    def load(self, path: str, map_location: Any = None) -> Any:
        """Return a state that `torch.save` wrote, with objects of any class."""
        return torch.load(path, map_location=map_location, weights_only=False)

    def commit(self, info: CheckpointCommitInfo) -> bool:
        """Return True: files are complete when `save` returns."""
        return True
