"""The workload that all contestants share, and the contestants themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

LEARNING_RATE = 1e-4
BETAS = (0.9, 0.999)
EPSILON = 1e-8
WEIGHT_DECAY = 0.01
CLIP = 1.0

LIBRARIES = ("hadal", "deepspeed", "fsdp2", "ddp", "zero_redundancy")
TRAFFIC = ("bf16", "fp32")

# The ZeRO stages to which each torch peer corresponds most closely in memory and traffic.
PEER_STAGES = {"ddp": (0,), "zero_redundancy": (1,), "fsdp2": (2, 3)}


@dataclass(frozen=True)
class Workload:
    """Model, batch and run lengths, the same for every contestant."""

    layers: int = 12
    width: int = 768
    heads: int = 12
    vocabulary: int = 8192
    sequence: int = 64
    micro_batch: int = 1
    accumulation: int = 1
    warmup: int = 2
    steps: int = 5
    world_size: int = 2
    threads: int = 1
    deepspeed_adam: str = "own"
    nvme_path: str = ""


@dataclass(frozen=True)
class Contestant:
    """One library in one setting: a ZeRO stage and the dtype of gradients on the wire.

    ``optimizer`` and ``weights`` are their tiers (``none``, ``cpu``, ``nvme``).
    """

    library: str
    stage: int
    traffic: str
    optimizer: str = "none"
    weights: str = "none"

    @property
    def label(self) -> str:
        return (
            f"{self.library} stage {self.stage} {self.traffic}{self.offload and ', '}{self.offload}"
        )

    @property
    def offload(self) -> str:
        """The offloaded states as text; empty if there are none."""
        places = {"optimizer": self.optimizer, "weights": self.weights}
        return ", ".join(f"{what} on {place}" for what, place in places.items() if place != "none")

    def offloading(self, optimizer: str, weights: str) -> Contestant:
        """The same with these offloaded; weights at stage 3, where they are sharded."""
        return replace(self, optimizer=optimizer, weights=weights if self.stage == 3 else "none")


def is_default(contestant: Contestant) -> bool:
    """True if the traffic dtype is the library's default."""
    engines = contestant.library in ("hadal", "deepspeed")
    return contestant.traffic == ("bf16" if engines else "fp32")


def select_contestants(
    stages: Sequence[int], peers: Sequence[str], traffic: Sequence[str]
) -> list[Contestant]:
    """Contestants in measuring order: those that are compared are adjacent."""
    chosen = []
    for stage in stages:
        for kind in traffic:
            for library in ("hadal", *peers):
                if stage in PEER_STAGES.get(library, (0, 1, 2, 3)):
                    chosen.append(Contestant(library, stage, kind))
    return chosen


def select_offloaded(
    stages: Sequence[int], peers: Sequence[str], optimizer: str, weights: str
) -> list[Contestant]:
    """Hadal without and with offload, and DeepSpeed with it, at each stage."""
    chosen = []
    for stage in stages:
        plain = Contestant("hadal", stage, "bf16")
        offloaded = plain.offloading(optimizer, weights)
        chosen += [plain, offloaded]
        if "deepspeed" in peers:
            chosen.append(replace(offloaded, library="deepspeed"))
    return chosen


def _zero_section(workload: Workload, contestant: Contestant) -> dict[str, object]:
    section: dict[str, object] = {"stage": contestant.stage}
    places = {"offload_optimizer": contestant.optimizer, "offload_param": contestant.weights}
    for name, place in places.items():
        if place != "none":
            path = {"nvme_path": workload.nvme_path} if place == "nvme" else {}
            section[name] = {"device": place, **path}
    return section


def ds_config(workload: Workload, contestant: Contestant) -> dict[str, object]:
    """The configuration of both Hadal and DeepSpeed, except for DeepSpeed's Adam.

    DeepSpeed's own compiled Adam is slower on the CPU than torch's fused one and keeps more
    memory at stage 0, so it uses torch's unless the workload chooses its own.
    """
    torch_adam = contestant.library == "deepspeed" and workload.deepspeed_adam == "torch"
    config: dict[str, object] = {
        "train_micro_batch_size_per_gpu": workload.micro_batch,
        "gradient_accumulation_steps": workload.accumulation,
        "bf16": {"enabled": True},
        "optimizer": {
            "type": "AdamW",
            "params": {
                "lr": LEARNING_RATE,
                "betas": list(BETAS),
                "eps": EPSILON,
                "weight_decay": WEIGHT_DECAY,
                **({"torch_adam": True, "fused": True} if torch_adam else {}),
            },
        },
        "gradient_clipping": CLIP,
        "zero_optimization": _zero_section(workload, contestant),
        "steps_per_print": 1_000_000,
    }
    if contestant.traffic != "bf16":
        config["communication_data_type"] = contestant.traffic
    return config
