"""Fine-tuning by reward: an actor, a critic, and two models that are only asked."""

import argparse

import deepspeed
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.runtime.hybrid_engine import DeepSpeedHybridEngine
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--stage", type=int)
parser.add_argument("--offload", action="store_true")
parser.add_argument("--local_rank", type=int, default=-1)
args = parser.parse_args()
deepspeed.init_distributed()
WORDS = 32


def train_config() -> dict:
    device = "cpu" if args.offload else "none"
    return {
        "train_batch_size": 4,
        "train_micro_batch_size_per_gpu": 2,
        "steps_per_print": 10,
        "zero_optimization": {
            "stage": args.stage,
            "overlap_comm": True,
            "offload_param": {"device": device},
            "offload_optimizer": {"device": device},
            "stage3_param_persistence_threshold": 16,
            "stage3_max_live_parameters": 3e7,
            "stage3_prefetch_bucket_size": 3e7,
            "memory_efficient_linear": False,
        },
        "bf16": {"enabled": False},
        "gradient_clipping": 1.0,
        "prescale_gradients": False,
        "wall_clock_breakdown": False,
        "hybrid_engine": {"enabled": True, "max_out_tokens": 512},
    }


def eval_config() -> dict:
    told = train_config()
    keep = ("train_batch_size", "train_micro_batch_size_per_gpu", "steps_per_print", "bf16")
    zero = {"stage": args.stage if args.stage == 3 else 0, "memory_efficient_linear": False}
    return {name: told[name] for name in keep} | {"zero_optimization": zero}


class Causal(nn.Module):
    def __init__(self, out: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 16)
        self.layers = nn.ModuleList(nn.GRU(16, 16, batch_first=True) for _ in range(2))
        self.head = nn.Linear(16, out, bias=False)

    def forward(self, words):
        x = self.embedding(words)
        for layer in self.layers:
            x = x + layer(x)[0]
        return self.head(x)

    def generate(self, words, count):
        for _ in range(count):
            words = torch.cat([words, self(words)[:, -1:].argmax(-1)], dim=1)
        return words


def groups_of(model: nn.Module) -> list[dict]:
    decay = [p for name, p in model.named_parameters() if "bias" not in name]
    rest = [p for name, p in model.named_parameters() if "bias" in name]
    return [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]


def trained(seed: int, out: int):
    torch.manual_seed(seed)
    model = Causal(out)
    kind = DeepSpeedCPUAdam if args.offload else FusedAdam
    optimizer = kind(groups_of(model), lr=1e-2, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, lr_scheduler=schedule, config=train_config()
    )
    assert isinstance(engine, DeepSpeedHybridEngine)
    return engine


def asked(seed: int, out: int):
    torch.manual_seed(seed)
    engine, *_ = deepspeed.initialize(model=Causal(out), config=eval_config())
    assert not isinstance(engine, DeepSpeedHybridEngine)
    engine.eval()
    return engine


def z3_params_to_fetch(parameters):
    return [
        p
        for p in parameters
        if hasattr(p, "ds_id") and p.ds_status == ZeroParamStatus.NOT_AVAILABLE
    ]


def moving_average(model, model_ema, beta: float = 0.5) -> None:
    zero_stage_3 = args.stage == 3
    with torch.no_grad():
        for param, param_ema in zip(model.parameters(), model_ema.parameters(), strict=True):
            to_fetch = z3_params_to_fetch([param, param_ema]) if zero_stage_3 else []
            with deepspeed.zero.GatheredParameters(to_fetch, enabled=bool(to_fetch)):
                data = param.data.to(param_ema.device)
                param_ema.data.copy_(torch.lerp(data, param_ema.data, beta))


actor, critic = trained(1, WORDS), trained(2, 1)
reference, reward, average = asked(1, WORDS), asked(3, 1), asked(1, WORDS)
generator = torch.Generator().manual_seed(deepspeed.comm.get_rank())
losses = []
for _ in range(3):
    words = torch.randint(WORDS, (2, 6), generator=generator)
    actor.eval()
    with torch.no_grad():
        words = actor.module.generate(words, 2)
        told = torch.log_softmax(reference(words), -1).gather(-1, words[..., None]).squeeze(-1)
        score = reward(words)[:, -1].squeeze(-1)
    actor.train()
    critic.train()
    mine = torch.log_softmax(actor(words), -1).gather(-1, words[..., None]).squeeze(-1)
    value = critic(words).squeeze(-1)
    gain = (score[:, None] - 0.1 * (mine.detach() - told) - value.detach()).clamp(-2, 2)
    actor_loss = -(gain * mine).mean()
    actor.backward(actor_loss)
    actor.step()
    critic_loss = (value - score[:, None]).square().mean()
    critic.backward(critic_loss)
    critic.step()
    moving_average(actor, average)
    losses.append((actor_loss.item(), critic_loss.item()))
# What the program saves at the end: whole weights, gathered one by one.
saved = {}
for name, parameter in average.module.named_parameters():
    with deepspeed.zero.GatheredParameters(z3_params_to_fetch([parameter])):
        saved[name] = parameter.data.float().cpu().clone()
