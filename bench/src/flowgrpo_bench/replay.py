"""Replay of a Qwen-Image with random weights, ours and plain diffusers + peft over the same weights.

For the cases `replay`, `replay_fsdp` and `full_update`. Nothing is read from a disk: rows of weights are drawn where
they are trained, and the trajectories by the model itself.
"""

import gc
import tempfile
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from flowgrpo_fsdp_actor import ActorConfig, FsdpActor
from flowgrpo_fsdp_actor.join import choose_join
from flowgrpo_fsdp_actor.metrics import ReplayStatistics
from flowgrpo_fsdp_actor.plan import Transition, join_forwards
from flowgrpo_fsdp_actor.replay import Replay
from flowgrpo_fsdp_actor.sharding import local_rows, reshard
from flowgrpo_fsdp_actor.testing import draw_rollout, random_qwen_image
from flowgrpo_fsdp_actor.update import Policy, accumulate_gradients
from flowgrpo_rollout_sglang.config import SamplingConfig
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

LORA = {"fsdp_trainable_mode": "lora", "lora_rank": 64, "lora_alpha": 128.0, "lora_adapter_mode": True}
CANDIDATES = 8


class ReplayWork:
    """One rank's actor and a rollout for it: for each text length in `texts` 8 candidates at `steps` steps."""

    def __init__(
        self,
        device: str,
        model: Mapping[str, Any],
        texts: Sequence[int],
        *,
        side: int,
        steps: int = 2,
        rank: int = 0,
        world: int = 1,
        **settings: Any,
    ):
        self._folder = tempfile.TemporaryDirectory()
        trained = tuple(range(1, 1 + steps))
        sampling = SamplingConfig(
            height=side, width=side, num_inference_steps=steps + 2, sde_indices=trained, num_sde_steps=steps
        )
        self.config = ActorConfig(
            model_path=str(random_qwen_image(Path(self._folder.name), **model)),
            model_adapter_path="flowgrpo_fsdp_actor.testing.RandomQwenImage",
            sampling=sampling,
            fsdp_param_dtype="bf16",
            fsdp_master_dtype="fp32",
            n_samples_per_prompt=CANDIDATES,
            device=device,
            replay_join=CANDIDATES * steps * len(texts) // world,  # all in one forward
            **settings,
        )
        self.actor = FsdpActor(self.config, rank, world)
        self.policy: Policy = self.actor._policy
        _as_if_trained(self.policy.module)
        width = self.policy.module.config.joint_attention_dim
        with torch.compiler.set_stance("force_eager"):  # the engine's part: other shapes, run once
            self.rollout = draw_rollout(
                self.policy.module,
                self.actor._adapter,
                group_size=CANDIDATES,
                text_tokens=texts,
                text_width=width,
                sampling=sampling,
            )
        generator = torch.Generator().manual_seed(0)
        self.advantages = torch.randn(len(texts), CANDIDATES, generator=generator)
        self.replay: Replay = self.actor._replay(self.rollout, self.advantages)
        self._plan = self.actor._plan(len(texts), CANDIDATES, num_updates=1)

    def choose_join(self) -> int:
        """As the actor does before its first update: sets what its blocks do, too."""
        limit = choose_join(self.policy, self.replay, self._plan, self.config)
        return limit.rows_of(self.replay, self._plan)

    def forwards(self, join: int) -> Sequence[Sequence[Transition]]:
        return join_forwards(self._plan[0], self.replay.shapes, join)

    def train(self, join: int, policy: Policy | None = None, *, keep: bool = False) -> None:
        """Forward and backward of every transition of this rank; gradients are let go unless told to keep them."""
        policy = policy or self.policy
        accumulate_gradients(policy, self.replay, self.forwards(join), None, self.config, ReplayStatistics())
        for parameter in policy.trainable if not keep else ():
            parameter.grad = None

    def anchors(self, join: int) -> Tensor:
        """[R] log-probs of every transition, as an update freezes them."""
        return torch.cat([self.replay.score(self.policy.module, self.replay.batch(r)) for r in self.forwards(join)])

    def log_probs(self, join: int, module: nn.Module | None = None, *, grad: bool = False) -> Tensor:
        """[R] the same from one forward each, of another module too."""
        module = module or self.policy.module
        with torch.set_grad_enabled(grad):
            return torch.cat([self.replay.logp(module, self.replay.batch(r)).detach() for r in self.forwards(join)])

    def parity(self) -> float:
        """Largest |ratio - 1| against the eager model that drew the rollout, all rows in one forward."""
        return max(self.actor.replay_parity(self.rollout).values())


def within(noise: float) -> float:
    """The distance in nats that rounding allows, from what joining rows in one forward changes in diffusers itself.

    A random model of 60 blocks magnifies bf16's rounding far beyond a trained one's, so no fixed number would do.
    """
    return 4.0 * noise + 1e-4


@torch.no_grad()
def _as_if_trained(module: nn.Module) -> None:
    """B of an adapter starts at 0, with which nothing of an adapter could be wrong: draws it, the same on all ranks."""
    for name, parameter in module.named_parameters():
        if ".lora_B." in name:
            generator = torch.Generator(parameter.device).manual_seed(parameter.numel())
            parameter.normal_(0, 0.01, generator=generator)


def plain_policy(work: ReplayWork, *, compiled: bool = False) -> Policy:
    """diffusers' model with peft's adapters, over the storages of `work`'s weights (one rank), nothing of ours.

    Adapters in bf16: the usual form, and the fastest.
    """
    module = _plain_module(work)
    weights = {name: value.to(torch.bfloat16) for name, value in work.policy.module.state_dict().items()}
    module.load_state_dict(weights, assign=True)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(".lora_" in name)
    if compiled:
        module.compile_repeated_blocks(fullgraph=False)
    return _policy_of(module)


@torch.no_grad()
def _sharded_plain_policy(work: ReplayWork, device: str, world: int) -> Policy:
    """The same under FSDP2, as a user would shard it: each block a unit, its adapters in it."""
    module, ours = _plain_module(work), work.policy.module
    options = {
        "mesh": init_device_mesh(device, (world,)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    }
    for block in module.transformer_blocks:
        if device == "cuda":
            block.compile()  # as `compile_repeated_blocks`, which no longer knows the classes once they are sharded
        fully_shard(block, **options)
    fully_shard(module, **options).to_empty(device=device)
    reshard(ours)
    weights = dict(ours.named_parameters())
    for name, parameter in module.named_parameters():
        start, rows = local_rows(parameter)
        whole_or_shard = weights[name]
        if isinstance(whole_or_shard, DTensor):
            rows.copy_(whole_or_shard.to_local())
        else:
            rows.copy_(whole_or_shard[start : start + rows.shape[0]])
    return _policy_of(module)


def _plain_module(work: ReplayWork) -> nn.Module:
    """On meta, but for the rotary tables, which no state dict holds."""
    from diffusers import QwenImageTransformer2DModel
    from peft import LoraConfig

    with torch.device("meta"):
        module = QwenImageTransformer2DModel.from_config(dict(work.policy.module.config)).to(torch.bfloat16)
        module.requires_grad_(False)
        targets = [name.removeprefix("attn.") for name in work.actor._adapter.lora_target_modules]
        module.add_adapter(
            LoraConfig(r=work.config.lora_rank, lora_alpha=work.config.lora_alpha, target_modules=targets)
        )
    module.to(torch.bfloat16)  # peft makes its factors in float32
    rope = module.pos_embed
    module.pos_embed = type(rope)(theta=rope.theta, axes_dim=rope.axes_dim, scale_rope=rope.scale_rope)
    return module


def _policy_of(module: nn.Module) -> Policy:
    module.train()
    trainable = [p for p in module.parameters() if p.requires_grad]
    return Policy(module, trainable, torch.optim.SGD(trainable), [])


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


class FsdpReplay:
    """One rank of `replay_fsdp`: ours, and FSDP2 around plain diffusers + peft with the same weights."""

    def __init__(
        self,
        rank: int,
        world: int,
        device: str,
        model: Mapping[str, Any],
        side: int,
        text: int,
        lora_rank: int,
        gathered: bool,
    ):
        settings = LORA | {"lora_rank": lora_rank, "fsdp_reshard_after_forward": not gathered}
        self._work = ReplayWork(device, model, (text, text), side=side, rank=rank, world=world, **settings)
        self._rows = sum(map(len, self._work.forwards(1)))
        self._device, self._world, self._gathered = device, world, gathered
        if device == "cuda":
            joined = self._work.choose_join()
            assert joined == self._rows, f"{joined} rows would be joined, not {self._rows}"

    @cached_property
    def _plain(self) -> Policy:
        """Made when it is first asked for, so that ours is timed with the memory that a user has."""
        return _sharded_plain_policy(self._work, self._device, self._world)

    def forget_plain(self) -> None:
        self.__dict__.pop("_plain", None)
        gc.collect()
        if self._device == "cuda":
            torch.cuda.empty_cache()

    def train(self) -> None:
        self._work.train(self._rows)
        _synchronize(self._device)

    def plain(self) -> None:
        with torch.compiler.set_stance("force_eager"):
            self.compiled()

    def compiled(self) -> None:
        self._work.train(self._rows, self._plain)
        _synchronize(self._device)

    def check(self) -> tuple[bool, float, float, float]:
        """Whether an anchor is its own forward; nats between ours and plain diffusers one at a time, and between that
        and its own joined forward (0 without it); |ratio - 1| from the eager rollout."""
        work = self._work
        anchors = work.anchors(self._rows)
        same = torch.equal(anchors, work.log_probs(self._rows, grad=True))
        reshard(work.policy.module)  # nothing of ours beside plain diffusers
        if self._gathered:
            return same, 0.0, 0.0, work.parity()
        plain = self._plain.module
        with torch.compiler.set_stance("force_eager"):
            alone, joined = work.log_probs(1, plain), work.log_probs(self._rows, plain)
        apart, noise = (float((other - alone).abs().max()) for other in (anchors, joined))
        return same, apart, noise, work.parity()

    def peak_gb(self, command: str) -> float:
        """Of one more call of that command."""
        if self._device == "cpu":
            getattr(self, command)()
            return 0.0
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        getattr(self, command)()
        return torch.cuda.max_memory_allocated() / 1e9
