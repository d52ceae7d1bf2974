"""The report of a model's compression."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from engine.toys import engine_of

from compression.toys import TOKENS, Bert, config, inputs, section, weights
from hadal.plugins.compression import (
    compression_report,
    init_compression,
    pack_weights,
    redundancy_clean,
)

WISHES = (weights(8, 2, 1, ["attention.self"]), inputs(8, ["attention.self"], schedule_offset=2))


def test_each_module_has_its_bits_zeros_and_bytes():
    model, wishes = Bert(), config(*WISHES)
    assert compression_report(model).rows == ()
    init_compression(model, wishes)
    row = compression_report(model).rows[0]
    assert row.name == "bert.encoder.layer.0.attention.self.query"
    assert row.techniques == ("weight_quantization", "activation_quantization")
    assert (row.bits, row.input_bits) == (8, None)
    size = 4 * (16 * 16 + 16)
    assert row.nbytes_before == row.nbytes_after == size
    redundancy_clean(model, wishes)
    pack_weights(model)
    report = compression_report(model)
    packed = report.rows[0]
    assert packed.techniques == ("weight_quantization", "packed", "activation_quantization")
    assert packed.bits == 2
    weight = model.bert.encoder.layer[0].attention.self["query"].weight
    assert packed.sparsity == pytest.approx((weight == 0).float().mean().item())
    assert packed.nbytes_before == size
    assert packed.nbytes_after < size / 4
    assert len(report.rows) == 6
    assert report.nbytes_before == 4 * sum(each.numel() for each in Bert().parameters())
    saved = sum(each.nbytes_before - each.nbytes_after for each in report.rows)
    assert report.nbytes_after == report.nbytes_before - saved
    shown = str(report)
    assert "bert.encoder.layer.0.attention.self.query" in shown
    assert "whole model" in shown
    json.dumps(report.as_dict())


@pytest.mark.parametrize("method", ["l1", "topk"])
def test_masks_and_scores_are_no_savings(method: str):
    shared = {"method": method, "schedule_offset": 0}
    wishes = config(section("sparse_pruning", shared, {"dense_ratio": 0.5}, ["intermediate"]))
    model = init_compression(Bert(), wishes)
    before = compression_report(model)
    redundancy_clean(model, wishes)
    after = compression_report(model)
    dense = sum(each.numel() * each.element_size() for each in Bert().parameters())
    assert before.nbytes_before == before.nbytes_after == dense
    assert (after.nbytes_before, after.nbytes_after) == (dense, dense)
    assert after.rows[0].nbytes_before == after.rows[0].nbytes_after == 4 * (16 * 64 + 64)


def test_a_report_draws_no_random_numbers():
    model = init_compression(
        Bert(), config(weights(8, 4, modules=["attention"], rounding="stochastic"))
    )
    before = torch.get_rng_state()
    compression_report(model)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.slow
def test_the_page_of_a_run_has_the_report(tmp_path: Path):
    pytest.importorskip("plotly")
    from hadal.plugins.monitor.report import write_page

    monitor = {"enabled": True, "output_path": str(tmp_path), "job_name": "job", "report": True}
    engine = engine_of(0, Bert(), **config(*WISHES), jsonl_monitor=monitor)
    for _ in range(3):
        engine.backward(engine(TOKENS).square().mean())
        engine.step()
    assert compression_report(engine).rows[0].input_bits == 8
    engine.destroy()
    text = write_page([tmp_path / "job"], tmp_path / "page.html")[0].read_text("utf-8")
    assert "<h3>Compression</h3>" in text
    assert "attention.self.query" in text
    assert "weight_quantization, activation_quantization" in text
