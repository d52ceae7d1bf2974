"""`hadal init`: a few questions, and a ds_config.json with the stage that fits, and the reasons."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from hadal.cli.parser import add_command, add_flag, device_memory, expected, numel, positive, size
from hadal.cli.terminal import CommandError, aligned, console, fail, key, note, show, write_file
from hadal.errors import nearest
from hadal.units import shown_nbytes, shown_numel

if TYPE_CHECKING:
    from hadal.engine.foresight import Foresight
    from hadal.zero.estimate import MemoryPlan


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
    from hadal.engine.candidates import best_plan, plan_stages
    from hadal.engine.clusters import cluster_of
    from hadal.engine.foresight import Planner
    from hadal.engine.memory import SizedModel

    cluster = replace(
        cluster_of("h100x8", answers.devices), device_nbytes=answers.memory, host_nbytes=sys.maxsize
    )
    planner = Planner(SizedModel(answers.numel), cluster, answers.nodes)
    found = plan_stages(planner, precision=answers.precision)
    allowed = {plan: found[plan] for plan in _allowed(answers)}
    best = best_plan(allowed)
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
    from hadal.zero.estimate import PLANS
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


def _summary(answers: Answers, plan: MemoryPlan, found: Foresight) -> str:
    held = found.total
    where = f"{answers.devices} device{'s' * (answers.devices > 1)}"
    where = where if answers.nodes == 1 else f"{answers.nodes} nodes of {where}"
    on_host = f", {shown_nbytes(held.host * answers.devices)} of a node's host" * (held.host > 0)
    on_disk = f", {shown_nbytes(held.disk * answers.devices)} of its disk" * (held.disk > 0)
    return (
        f"{shown_numel(answers.numel)} parameters on {where}: ZeRO stage {plan.stage} in"
        f" {answers.precision} takes {shown_nbytes(held.device)} of {shown_nbytes(answers.memory)}"
        f" per device for model states and buffers{on_host}{on_disk}; activations come on top."
    )


def _stage_note(answers: Answers, plan: MemoryPlan, found: Mapping[MemoryPlan, Foresight]) -> str:
    text = f"Stage {plan.stage}: {_STAGES[plan.stage]}."
    if plan.stage < 3 and answers.ranks > 1:
        more = next(one.total.device for other, one in found.items() if other.stage == 3)
        text += f" Stage 3 would take {shown_nbytes(more)} per device, and send more."
    if plan.stage == 3:
        text += (
            " Build the model inside hadal.zero.Init() if it does not fit into the host's memory"
            " once for each process."
        )
    return text


# ---- the command ---------------------------------------------------------------------------------


T = TypeVar("T")
_QUESTIONS = 5
_USUAL_MODEL, _USUAL_DEVICES, _USUAL_MEMORY = "7B", 8, "80GB"
_DEVICES = re.compile(r"(?:(\d+)\s*x\s*)?(\d+)\s*x\s*(\S+)", re.IGNORECASE)
# The size in a model's name: the last number that B or M follows, unless experts multiply it.
_SIZE_IN_NAME = re.compile(r"(?<![\d.x])(\d+(?:\.\d+)?)([BM])(?![a-z])", re.IGNORECASE)
_EXPERTS = re.compile(r"\d+x\d", re.IGNORECASE)


def add_to(group: Any) -> None:
    """Add the subcommand."""
    parser = add_command(
        group,
        "init",
        help="Write a first ds_config.json, after five questions",
        description="Ask for the model's size, the devices, precision, batch and offloading, and"
        " write a commented ds_config.json whose model states fit. Comments are keys that begin"
        " with `//`, which Hadal, DeepSpeed and plain JSON readers accept. A flag answers its"
        " question in advance.",
        examples=("hadal init", "hadal init --yes --model 7B --devices-per-node 8 --memory 80GB"),
    )
    add_flag(parser, "--output FILE", "The file to write", Path, Path("ds_config.json"))
    add_flag(parser, "--force", "Overwrite the file if it exists already")
    add_flag(parser, "-y --yes", "Ask nothing: use defaults for answers without a flag")
    answers = parser.add_argument_group("Answers")
    add_flag(
        answers,
        "--model SIZE",
        "Parameters such as 7B, or a model's name that has them: Qwen2.5-7B",
        _model,
    )
    add_flag(answers, "--nodes N", "Nodes", positive)
    add_flag(answers, "--devices-per-node N", "Devices of each node", positive)
    add_flag(answers, "--memory SIZE", "Memory of one device", device_memory)
    add_flag(answers, "--precision", "dtype of weights and gradients", choices=PRECISIONS)
    add_flag(answers, "--batch N", "Samples per update", positive)
    add_flag(answers, "--micro-batch N", "Samples on a device at a time", positive)
    add_flag(
        answers,
        "--offload WHERE",
        "Storage for states that do not fit: nothing, cpu, or a directory on an NVMe disk",
    )
    parser.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> int:
    """Ask, and write the file.

    Raises:
        CommandError: the file exists, or cannot be written; or answers are missing.
    """
    if parsed.output.exists() and not parsed.force:
        raise CommandError(f"{parsed.output} exists; --force overwrites it, --output names another")
    answers = _answers(parsed)
    made = draft(answers)
    write_file(parsed.output, json.dumps(made.config, indent=2, ensure_ascii=False) + "\n")
    if not made.fits:
        note(
            "model states do not fit; this is the plan that takes the least memory of a device."
            " Use more devices, or allow offloading (--offload)",
            label="warning",
        )
    show(f"{parsed.output}: {made.summary}", "")
    hosts = "" if answers.nodes == 1 else "--hostfile hosts "
    rows = [
        (key("check it"), f"hadal explain {parsed.output} --world-size {answers.ranks}"),
        (key("train"), f"hadal run {hosts}--num_gpus {answers.devices} train.py"),
    ]
    show(aligned(rows))
    return 0


# ---- questions -----------------------------------------------------------------------------------


def _answers(parsed: argparse.Namespace) -> Answers:
    model = parsed.model or _asked(
        parsed, 1, "Model: parameters, or a name that has them", _USUAL_MODEL, _model
    )
    nodes, devices, memory = _devices(parsed)
    precision = parsed.precision or _asked(
        parsed, 3, f"Precision: {', '.join(PRECISIONS)}", PRECISIONS[0], _precision
    )
    batch, micro_batch = _chosen_batch(parsed, nodes * devices)
    offload = parsed.offload or _asked(
        parsed,
        5,
        f"Offload what does not fit to: {NOTHING}, {HOST}, or a directory on an NVMe disk",
        HOST,
        str,
    )
    return Answers(model, nodes, devices, memory, precision, batch, micro_batch, offload)


def _devices(parsed: argparse.Namespace) -> tuple[int, int, int]:
    given = (parsed.nodes, parsed.devices_per_node, parsed.memory)
    count, memory = (0, 0) if all(given) else _found()
    usual = (parsed.nodes or 1, parsed.devices_per_node or count, parsed.memory or memory)
    if any(given):
        return usual
    nodes, devices, nbytes = usual
    machine = f"{nodes} x {devices} x {nbytes / 1e9:.4g}GB"
    return _asked(parsed, 2, "Nodes x devices of each x memory of one", machine, _hardware)


def _found() -> tuple[int, int]:
    """Return the number of devices here and the memory of one; usual values if there is none."""
    from hadal.launcher.choices import devices_here

    count = devices_here()
    if count:
        from hadal.device.inventory import memories

        return count, min(memories(), default=size(_USUAL_MEMORY))
    return _USUAL_DEVICES, size(_USUAL_MEMORY)


def _chosen_batch(parsed: argparse.Namespace, ranks: int) -> tuple[int, int]:
    batch, micro = usual_batch(ranks)
    if parsed.batch or parsed.micro_batch:
        micro = parsed.micro_batch or min(micro, max(1, (parsed.batch or 1) // ranks))
        batch = parsed.batch or micro * ranks * max(1, batch // (micro * ranks))
        try:
            return _samples(ranks)(f"{batch} / {micro}")
        except argparse.ArgumentTypeError as error:
            raise CommandError(f"--batch: {error}") from None
    question = "Samples per update / on a device at a time"
    return _asked(parsed, 4, question, f"{batch} / {micro}", _samples(ranks))


def _asked(
    parsed: argparse.Namespace, number: int, question: str, usual: str, read: Callable[[str], T]
) -> T:
    """Ask until the answer can be parsed; an empty answer selects the default."""
    from rich.text import Text

    if parsed.yes:
        return read(usual)
    while True:
        prompt = Text.assemble((f"{number}/{_QUESTIONS} ", "faint"), question)
        console().print(prompt.append(f" [{usual}]", "hint").append(": "), end="", soft_wrap=True)
        sys.stdout.flush()
        line = sys.stdin.readline()
        if not line:
            print()
            raise CommandError(
                "no more answers on standard input; --yes uses defaults for the others"
            )
        try:
            return read(line.strip() or usual)
        except argparse.ArgumentTypeError as error:
            fail(str(error))


# ---- answers -------------------------------------------------------------------------------------


def _model(text: str) -> int:
    """Read a number of parameters, or find it in a model's name."""
    if _EXPERTS.search(text):
        raise argparse.ArgumentTypeError(f"{text} has experts: pass the number of all parameters")
    found = _SIZE_IN_NAME.findall(text)
    return numel("".join(found[-1])) if found else numel(text)


def _hardware(text: str) -> tuple[int, int, int]:
    """Read "2 x 8 x 80GB", or "8 x 80GB" for one node."""
    found = _DEVICES.fullmatch(text)
    if found is None:
        raise expected("nodes x devices x memory, such as 2 x 8 x 80GB", text)
    nodes, devices, nbytes = found.groups()
    return positive(nodes or "1"), positive(devices), device_memory(nbytes)


def _precision(text: str) -> str:
    if text.lower() not in PRECISIONS:
        near = nearest(text, PRECISIONS)
        hint = f"; did you mean {near}?" if near else ""
        raise argparse.ArgumentTypeError(f'expected {", ".join(PRECISIONS)}, got "{text}"{hint}')
    return text.lower()


def _samples(ranks: int) -> Callable[[str], tuple[int, int]]:
    """Return a reader of "256 / 4", or "256" for the usual number on a device."""

    def read(text: str) -> tuple[int, int]:
        whole, slash, part = text.partition("/")
        batch = positive(whole.strip())
        usual = min(usual_batch(ranks)[1], max(1, batch // ranks))
        micro = positive(part.strip()) if slash else usual
        step = micro * ranks
        if batch % step:
            below = batch // step * step
            near = f"{below} or {below + step}" if below else str(step)
            raise argparse.ArgumentTypeError(
                f"{batch} samples cannot be shared evenly by {ranks} ranks, {micro} at a time;"
                f" take {near}"
            )
        return batch, micro

    return read
