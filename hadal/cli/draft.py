"""A first ds_config.json for a model on given devices: which stage fits, and why, as comments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hadal.units import shown_nbytes, shown_numel

if TYPE_CHECKING:
    from hadal.engine.memory import Memory, MemoryPlan

PRECISIONS = ("bf16", "fp16", "fp32")
NOTHING, HOST = "nothing", "cpu"
_RATE = 1e-4
_USUAL_BATCH, _USUAL_MICRO = 256, 4
_STAGES = (
    "every device holds all model states",
    "optimizer state is sharded over the ranks",
    "optimizer state and gradients are sharded over the ranks",
    "optimizer state, gradients and weights are sharded over the ranks",
)
_PRECISION_NOTES = {
    "bf16": "Weights and gradients are bf16; masters and moments are fp32.",
    "fp16": "Weights and gradients are fp16, with a loss scale that adjusts itself; masters and"
    " moments are fp32. Prefer bf16 where the devices support it.",
    "fp32": "Everything is fp32.",
}


@dataclass(frozen=True, slots=True)
class Answers:
    """The known facts about the training."""

    numel: int
    """Elements of all parameters."""
    nodes: int
    devices: int
    """The number on each node."""
    memory: int
    """Bytes of one device."""
    precision: str
    batch: int
    """Samples of an update."""
    micro_batch: int
    """Samples of a device at a time."""
    offload: str
    """The target of offloaded model states: nothing, cpu, or a directory on an NVMe disk."""

    @property
    def ranks(self) -> int:
        """One for each device."""
        return self.nodes * self.devices


@dataclass(frozen=True, slots=True)
class Draft:
    """A configuration, and the notes on it."""

    config: dict[str, Any]
    """With comments: keys that begin with `//`, which every reader of such files ignores."""
    summary: str
    fits: bool


def usual_batch(ranks: int) -> tuple[int, int]:
    """Return the usual samples of an update, and of a device at a time."""
    times = max(1, _USUAL_BATCH // (_USUAL_MICRO * ranks))
    return times * _USUAL_MICRO * ranks, _USUAL_MICRO


def draft(answers: Answers) -> Draft:
    """Choose the fastest plan that fits, or the smallest one, and write its configuration."""
    from hadal.engine.memory import best_plan, memory_of_plans
    from hadal.zero.estimate import Model

    found = memory_of_plans(Model(answers.numel), answers.devices, answers.nodes, answers.precision)
    allowed = {plan: found[plan] for plan in _allowed(answers)}
    best = best_plan(allowed, answers.memory)
    plan = best or min(allowed, key=lambda plan: allowed[plan].total.device)
    summary = _summary(answers, plan, found[plan])
    config = {
        "//": f"A first configuration by `hadal init`: {summary} Keys that begin with // are"
        " comments.",
        **_batch(answers),
        "// optimizer": "Leave the section out if the program makes its own optimizer. The"
        " learning rate is a guess: it depends on the model and the batch.",
        "optimizer": {"type": "AdamW", "params": {"lr": _RATE, "weight_decay": 0.01}},
        "// gradient_clipping": "The largest norm of all gradients together.",
        "gradient_clipping": 1.0,
        "// precision": _PRECISION_NOTES[answers.precision],
        **({} if answers.precision == "fp32" else {answers.precision: {"enabled": True}}),
        "// zero_optimization": _stage_note(answers, plan, found),
        "zero_optimization": _zero(plan, answers.offload),
    }
    return Draft(config, summary, best is not None)


def _allowed(answers: Answers) -> list[MemoryPlan]:
    """Return the plans that offload to the allowed storage, the fastest first."""
    from hadal.engine.memory import PLANS
    from hadal.zero.policy import Tier

    tiers = {Tier.DEVICE}
    if answers.offload != NOTHING:
        tiers.add(Tier.HOST if answers.offload == HOST else Tier.DISK)
    # Between several ranks stage 1 sends as much as stage 0, and holds less.
    least = min(1, answers.ranks - 1)
    return [p for p in PLANS if p.stage >= least and {p.optimizer, p.weights} <= tiers]


def _batch(answers: Answers) -> dict[str, Any]:
    count = answers.batch // (answers.micro_batch * answers.ranks)
    times = "once" if count == 1 else f"{count} times"
    return {
        "// batch": f"{answers.batch} samples per update: {answers.micro_batch} on each device at"
        f" a time, {times}, on {answers.ranks} ranks. If memory runs out, halve"
        " train_micro_batch_size_per_gpu: the update stays the same.",
        "train_batch_size": answers.batch,
        "train_micro_batch_size_per_gpu": answers.micro_batch,
    }


def _zero(plan: MemoryPlan, offload: str) -> dict[str, Any]:
    section = plan.section(offload)
    if plan.stage == 3:
        section["stage3_gather_16bit_weights_on_model_save"] = True
    return section


def _summary(answers: Answers, plan: MemoryPlan, memory: Memory) -> str:
    held = memory.total
    where = f"{answers.devices} device{'s' * (answers.devices > 1)}"
    where = where if answers.nodes == 1 else f"{answers.nodes} nodes of {where}"
    on_host = f", {shown_nbytes(held.host * answers.devices)} of a node's host" * (held.host > 0)
    on_disk = f", {shown_nbytes(held.disk * answers.devices)} of its disk" * (held.disk > 0)
    return (
        f"{shown_numel(answers.numel)} parameters on {where}: ZeRO stage {plan.stage} in"
        f" {answers.precision} takes {shown_nbytes(held.device)} of {shown_nbytes(answers.memory)}"
        f" per device for model states and buffers{on_host}{on_disk}; activations come on top."
    )


def _stage_note(answers: Answers, plan: MemoryPlan, found: Mapping[MemoryPlan, Memory]) -> str:
    text = f"Stage {plan.stage}: {_STAGES[plan.stage]}."
    if plan.stage < 3 and answers.ranks > 1:
        more = next(memory.total.device for other, memory in found.items() if other.stage == 3)
        text += f" Stage 3 would take {shown_nbytes(more)} per device, and send more."
    if plan.stage == 3:
        text += (
            " Build the model inside hadal.zero.Init() if it does not fit into the host's memory"
            " once for each process."
        )
    return text
