"""What ends in the middle: updates that are interrupted, and places that cannot be written to."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ranks import RankPools
from torch import Tensor, nn

import hadal
from hadal import comm
from hadal.errors import HadalError, OffloadError
from hadal.offload.requests import Region
from hadal.offload.runs import DiskRun
from hadal.offload.store import DiskStore
from hadal.optim import on_disk

from .test_tiers import WIDTH, config_of, model_of, small_blocks, state_of, train, trained


def interrupt(path: str, stage: int, kind: type[BaseException], updates: int) -> None:
    """An update is interrupted behind some of its parts: nothing has changed."""
    weights = "nvme" if stage == 3 else None
    with small_blocks():
        config = config_of(stage, "bf16", "nvme", weights, path)
        engine, *_ = hadal.initialize(model=model_of(), config=config)
        train(engine, updates)
        before = [one.clone() for one in engine.state_dict().values()]
        plain, calls = on_disk._step_part, [0]

        def step_part(*given: object) -> None:
            plain(*given)  # type: ignore[arg-type]
            calls[0] += 1
            if calls[0] == 3:
                raise kind("now")

        on_disk._step_part = step_part  # type: ignore[assignment]
        try:
            with pytest.raises(kind, match="now"):
                train(engine, 1, updates)
        finally:
            on_disk._step_part = plain
        for mine, theirs in zip(engine.state_dict().values(), before, strict=True):
            assert torch.equal(mine, theirs)
        train(engine, 4 - updates, updates)
        found = state_of(engine)
        engine.destroy()
        _, wanted = trained(config_of(stage, "bf16", None, None, path), 4)
        for mine, theirs in zip(found, wanted, strict=True):
            assert torch.equal(mine, theirs)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, RuntimeError])
def test_an_interrupted_update_changes_nothing(
    kind: type[BaseException], ranks: RankPools, tmp_path: Path
) -> None:
    for stage, updates in ((2, 2), (3, 0)):
        ranks(1).run(interrupt, str(tmp_path), stage, kind, updates)


def initialize_where_none_can(path: str) -> str:
    """Rank 1 is given a place that is no folder."""
    place = Path(path) / f"of rank {comm.get_rank()}"
    if comm.get_rank() == 1:
        place.write_text("a file")
    with pytest.raises(HadalError) as found:
        hadal.initialize(model=model_of(), config=config_of(2, "bf16", "nvme", None, str(place)))
    assert isinstance(found.value, OffloadError)
    return str(found.value)


def test_all_ranks_hear_of_a_place_that_cannot_be(ranks: RankPools, tmp_path: Path) -> None:
    others, own = ranks(2).run(initialize_where_none_can, str(tmp_path))
    assert "of rank 1" in own and "nvme_path" in own
    assert "initialize stopped on rank 1" in others and own in others


class OfNothing(nn.Module):
    """What is trained has no elements."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.empty(0))
        self.rest = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.rest(inputs) + self.nothing.sum()
        return result


def train_nothing(path: str) -> None:
    engine, *_ = hadal.initialize(
        model=OfNothing(), config=config_of(2, "bf16", "nvme", None, path)
    )
    train(engine, 2)
    assert engine.global_steps == 2
    engine.destroy()


def test_parameters_without_elements_are_updated(ranks: RankPools, tmp_path: Path) -> None:
    ranks(1).run(train_nothing, str(tmp_path))


def test_a_run_that_finds_half_its_room_keeps_none(tmp_path: Path) -> None:
    store = DiskStore(tmp_path)
    plain, given = store.allocate, []

    def allocate(name: str, nbytes: int) -> Region:
        if given:
            raise OffloadError("no room")
        given.append(plain(name, nbytes))
        return given[0]

    store.allocate = allocate  # type: ignore[method-assign]
    with pytest.raises(OffloadError, match="no room"):
        DiskRun(store, "moments", 4096, torch.float32)
    assert given and not store.nbytes
    store.close()
