"""Pruning at ZeRO stage 3: no rank holds whole masks, and the clean model is that of stage 0."""

from __future__ import annotations

import pytest
import torch
from ranks import RankPools
from torch import Tensor

from compression.test_momentum import LEARNED, SMALLER, seeded_engine
from compression.test_pruning import blocks, sparse
from compression.test_training import train
from compression.toys import TOKENS, Bert, config, weights
from hadal.plugins.compression import redundancy_clean
from hadal.plugins.compression.layers import compressed_modules

FIXED = sparse("l1", 0.3, ["encoder"], schedule_offset=1)
BLOCKS = blocks("4x1", schedule_offset=1, schedule_offset_end=3, excluded_modules=["classifier"])
QUANTIZED = weights(8, 8, modules=["classifier"], quantize_weight_in_forward=True)


def companions(engine) -> list[Tensor]:
    """The masks and scores that are as large as weights."""
    names = ("sparse_pruning_mask", "sparse_mask_scores", "sparse_pruning_scores")
    of_modules = [module._parameters for _, module in compressed_modules(engine.module)]
    return [found[name] for found in of_modules for name in names if found.get(name) is not None]


def held(tensors: list[Tensor]) -> int:
    """The bytes of these tensors that are in memory beyond the shards."""
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage() for each in tensors}
    return sum(storage.nbytes() for storage in storages.values())


def measured(wish: dict, stage: int) -> tuple[int, int, int]:
    """The bytes of whole masks, those in memory between two updates, and the number of masks."""
    engine = seeded_engine(wish, stage)
    masks = companions(engine)
    whole = sum(each.numel() * each.element_size() for each in masks)
    train(engine, range(4))
    at_rest = held(masks)
    engine.destroy()
    return whole, at_rest, len(masks)


@pytest.mark.slow
def test_no_rank_holds_whole_masks_between_their_uses(ranks: RankPools):
    for wish in (FIXED, LEARNED, BLOCKS):
        for whole, at_rest, count in ranks(2).run(measured, wish, 3):
            assert whole > 1000
            assert at_rest <= 4 * count  # one NaN for each that is freed
        for whole, at_rest, _ in ranks(2).run(measured, wish, 0):
            assert at_rest >= whole


def cleaned(wish: dict, stage: int) -> tuple[list[int], Tensor]:
    engine = seeded_engine(wish, stage)
    train(engine, range(4))
    model = redundancy_clean(engine, config(wish)).module.eval()
    assert not list(compressed_modules(model))
    engine.destroy()
    with torch.no_grad():
        return [each.numel() for each in model.parameters()], model(TOKENS)


@pytest.mark.slow
def test_the_clean_model_of_stage_3_is_that_of_stage_0(ranks: RankPools):
    everything = {**SMALLER, **FIXED, **QUANTIZED}
    for wish in (everything, LEARNED, BLOCKS):
        (sizes, expected), *_ = ranks(2).run(cleaned, wish, 0)
        for found, outputs in ranks(2).run(cleaned, wish, 3):
            assert found == sizes
            assert torch.equal(outputs, expected)
    plain = sum(each.numel() for each in Bert().parameters())
    (sizes, _), *_ = ranks(2).run(cleaned, everything, 3)
    assert sum(sizes) < 0.62 * plain
