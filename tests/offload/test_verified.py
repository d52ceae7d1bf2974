"""Training with checksums of state on the disk: the same bits, and damage is an error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import on_ranks

import hadal
from hadal.errors import OffloadError

from .test_tiers import config_of, model_of, small_blocks, train, trained


def verified(stage: int, dtype: str, path: str) -> dict[str, Any]:
    config = config_of(stage, dtype, "nvme", "nvme" if stage == 3 else None, path)
    return {**config, "aio": {"verify_checksums": True, "block_size": 20_000}}


@on_ranks(1)
def test_a_damaged_page_is_never_trained_with(tmp_path: Path) -> None:
    with small_blocks():
        for dtype in ("bf16", "fp32"):
            plain = trained(config_of(3, dtype, None, None, tmp_path), 3)
            losses, state = trained(verified(3, dtype, tmp_path), 3)
            assert losses == plain[0]
            assert all(map(torch.equal, state, plain[1]))
        engine, *_ = hadal.initialize(model=model_of(), config=verified(2, "fp32", tmp_path))
        train(engine, 1)
        (file,) = Path(tmp_path).rglob("states")
        whole = bytearray(file.read_bytes())
        for place in range(100, len(whole), 4096):
            whole[place] ^= 1
        with open(file, "r+b") as damaged:
            damaged.write(whole)
        with pytest.raises(OffloadError, match=r"states: 'the .*' is damaged at byte"):
            train(engine, 1, first=1)
        engine.destroy()
