"""Every row of the common sections has a test of its effect, which claims it by name."""

from __future__ import annotations

import ast
import contextlib
import csv
import fnmatch
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
TABLE = Path(__file__).with_name("keys.csv").read_text(encoding="utf-8").splitlines()
ROWS = [row["path"] for row in csv.DictReader(TABLE)]

EVERYDAY = {
    *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"),
    *("managed_gradient_accumulation", "sequence_parallel_size", "data_parallel_size"),
    *("optimizer", "scheduler", "fp16", "bf16", "bfloat16", "amp", "torch_autocast", "data_types"),
    *("communication_data_type", "seq_parallel_communication_data_type", "gradient_allreduce_op"),
    *("prescale_gradients", "gradient_predivide_factor", "sparse_gradients", "disable_allgather"),
    *("gradient_clipping", "zero_optimization", "allgather_size"),
    *("zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer"),
    *("steps_per_print", "wall_clock_breakdown", "memory_breakdown", "dump_state", "log_level"),
    *(
        "flops_profiler",
        "timers",
        "dataloader_drop_last",
        "dataloader_shard_iterable",
        "vocabulary_size",
        "graph_harvesting",
    ),
    *("tensorboard", "csv_monitor", "wandb", "comet"),
    "activation_checkpointing",
    *("comms_logger", "disable_python_gc", "compile", "checkpoint", "datastates_ckpt"),
    "sparse_attention",
    "compression_training",
    *("tensor_parallel", "autotuning"),
    *("data_efficiency", "curriculum_learning", "progressive_layer_drop", "eigenvalue"),
}
# Rows of these sections that belong to a feature of its own, by the feature.
_ZERO = "zero_optimization."
_COMPRESSION = "compression_training."
OF_A_FEATURE = {
    f"{_ZERO}offload_optimizer.super_offload": "offload",
    f"{_ZERO}offload_optimizer.cpuadam_cores_perc": "offload",
    f"{_ZERO}zenflow*": "offload",
    f"{_ZERO}save_muon_momentum_buffer_in_memory": "offload",
}


def is_everyday(row: str) -> bool:
    return row.split(".")[0] in EVERYDAY


def feature_of(row: str) -> str | None:
    for pattern, feature in OF_A_FEATURE.items():
        if fnmatch.fnmatchcase(row, pattern):
            return feature
    return None


@cache
def claimed_rows() -> dict[str, list[str]]:
    """The rows that tests claim, and where. Nothing is imported: claims are read as text."""
    found = defaultdict(list)
    for row, where in _claims():
        found[row].append(where)
    return dict(found)


def _claims() -> Iterator[tuple[str, str]]:
    for path in sorted(TESTS.rglob("test_*.py")):
        text = path.read_text(encoding="utf-8")
        if ".claims(" not in text:
            continue
        module = ast.parse(text)
        constants: dict[str, object] = {}
        for statement in module.body:
            if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
                with contextlib.suppress(ValueError):
                    constants[statement.targets[0].id] = ast.literal_eval(statement.value)
        for node in ast.walk(module):
            is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
            if is_call and node.func.attr == "claims":
                rows = ast.Expression(ast.Tuple(node.args, ast.Load()))
                code = compile(ast.fix_missing_locations(rows), str(path), "eval")
                where = f"{path.relative_to(TESTS)}:{node.lineno}"
                yield from ((row, where) for row in eval(code, constants))


@pytest.mark.parametrize("row", [row for row in ROWS if is_everyday(row) and not feature_of(row)])
def test_the_effect_of_every_everyday_key_is_tested(row):
    assert row in claimed_rows(), f"no test claims {row}"


def test_claims_name_rows_of_the_table():
    assert {row: where for row, where in claimed_rows().items() if row not in ROWS} == {}


def test_the_table_of_features_names_rows():
    everyday = [row for row in ROWS if is_everyday(row)]
    empty = [pattern for pattern in OF_A_FEATURE if not fnmatch.filter(everyday, pattern)]
    assert empty == []
