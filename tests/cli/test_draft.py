"""A first configuration: the plan that fits, in a file that every reader loads."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from hadal.cli.init import Answers, draft, usual_batch
from hadal.config import load_config

ANSWERS = Answers(7 * 10**9, 1, 8, 80 * 10**9, "bf16", 256, 4, "cpu")


def zero(answers: Answers) -> dict[str, Any]:
    section: dict[str, Any] = draft(answers).config["zero_optimization"]
    return section


@pytest.mark.parametrize(
    ("changes", "stage", "offloaded"),
    [
        ({}, 1, ()),
        ({"numel": 10**8}, 1, ()),  # stage 0 would fit too, and costs as much
        ({"numel": 10**8, "devices": 1}, 0, ()),
        ({"memory": 40 * 10**9}, 2, ()),
        ({"memory": 24 * 10**9}, 3, ()),
        ({"memory": 20 * 10**9}, 3, ("offload_optimizer",)),
        ({"memory": 20 * 10**9, "offload": "nothing"}, 3, ()),  # tight
        ({"memory": 10 * 10**9}, 3, ("offload_optimizer",)),
        ({"memory": 10 * 10**9, "offload": "/nvme"}, 3, ("offload_optimizer",)),
        ({"memory": 6 * 10**9}, 3, ("offload_optimizer", "offload_param")),
    ],
)
def test_the_fastest_plan_that_fits_is_chosen(
    changes: dict[str, Any], stage: int, offloaded: tuple[str, ...]
) -> None:
    answers = replace(ANSWERS, **changes)
    section = zero(answers)
    assert section["stage"] == stage
    assert tuple(name for name in section if name.startswith("offload_")) == offloaded
    for name in offloaded:
        assert section[name]["device"] == ("nvme" if answers.offload == "/nvme" else "cpu")
    assert draft(answers).fits


def test_if_nothing_fits_the_smallest_plan_is_chosen() -> None:
    made = draft(replace(ANSWERS, memory=10**9, offload="nothing"))
    assert not made.fits and made.config["zero_optimization"]["stage"] == 3


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("offload", ["nothing", "cpu", "/nvme"])
@pytest.mark.parametrize("memory", [80, 20, 6, 1])
def test_every_draft_loads_as_plain_json_without_a_note(
    precision: str, offload: str, memory: int
) -> None:
    answers = replace(ANSWERS, precision=precision, offload=offload, memory=memory * 10**9)
    made = draft(answers)
    pairs = json.loads(json.dumps(made.config), object_pairs_hook=list)
    names = [name for name, _ in pairs]
    assert len(set(names)) == len(names)  # DeepSpeed refuses a name that comes twice
    comments = [name for name in names if name.startswith("//")]
    # Inside a section a comment would be an unknown key.
    assert not any(
        "//" in name for _, value in pairs if isinstance(value, list) for name, _ in value
    )
    assert all(made.config[name].endswith(".") for name in comments) and len(comments) == 6
    config = load_config(dict(made.config), world_size=8)
    assert config.notes == ()
    assert (config.train_batch_size, config.gradient_accumulation_steps) == (256, 8)
    assert (config.bf16.enabled, config.fp16.enabled) == (precision == "bf16", precision == "fp16")


def test_the_usual_batch_is_shared_evenly() -> None:
    for ranks in (1, 2, 3, 16, 64, 100, 1000):
        batch, micro = usual_batch(ranks)
        assert batch % (micro * ranks) == 0
    assert usual_batch(16) == (256, 4)
