"""AdamW over sharded parameters: the learning rate of a step, the gradient's norm, clipping, skipped steps.

Units: gradients and their norm are of the mean loss over all samples of an update, on all ranks.
"""

import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from flowgrpo_fsdp_actor.config import ActorConfig
from flowgrpo_fsdp_actor.distributed import all_reduced


def lr_at_step(step: int, config: ActorConfig) -> float:
    """Learning rate of optimizer step `step`, counted from 0 (F3).

    Warm-up: lr (step + 1) / lr_warmup_iters, so that the first step already moves. Then, with
    u = min(1, (step - lr_warmup_iters) / lr_decay_iters): constant lr; linear lr + u (min_lr - lr); cosine
    min_lr + (lr - min_lr) (1 + cos(pi u)) / 2.
    """
    if step < config.lr_warmup_iters:
        return config.lr * (step + 1) / config.lr_warmup_iters
    if config.fsdp_lr_scheduler == "constant":
        return config.lr
    u = min(1.0, (step - config.lr_warmup_iters) / config.lr_decay_iters)
    if config.fsdp_lr_scheduler == "linear":
        return config.lr + u * (config.min_lr - config.lr)
    return config.min_lr + 0.5 * (config.lr - config.min_lr) * (1.0 + math.cos(math.pi * u))


def make_adamw(config: ActorConfig, parameters: Sequence[nn.Parameter]) -> torch.optim.AdamW:
    """AdamW over `parameters`; one fused launch on CUDA."""
    return torch.optim.AdamW(
        parameters,
        lr=config.lr,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_eps,
        weight_decay=config.weight_decay,
        fused=config.device == "cuda" and not config.fsdp_cpu_offload,
    )


def missing_moments(optimizer: torch.optim.Optimizer) -> int:
    """Bytes on the GPU that AdamW's first step will take for its two moments: 0 after one, or after a resume."""
    waiting = (p for group in optimizer.param_groups for p in group["params"] if not optimizer.state.get(p))
    return sum(2 * part.nbytes for part in (local(p.data) for p in waiting) if part.is_cuda)


@torch.no_grad()
def average_whole_gradients(parameters: Iterable[nn.Parameter], dtype: torch.dtype) -> None:
    """Makes the gradients of parameters that every rank holds whole (adapters) their mean over the ranks.

    One all-reduce in `dtype` for all of them; those of sharded parameters FSDP has reduced already. Collective.
    """
    gradients = [p.grad for p in parameters if p.grad is not None and not isinstance(p, DTensor)]
    if not gradients or not dist.is_initialized() or dist.get_world_size() == 1:
        return
    flat = torch.cat([gradient.flatten().to(dtype) for gradient in gradients])
    means = all_reduced(flat, dist.ReduceOp.SUM).div_(dist.get_world_size()).split([g.numel() for g in gradients])
    torch._foreach_copy_([gradient.view(-1) for gradient in gradients], list(means))


@torch.no_grad()
def gradient_norm(parameters: Sequence[nn.Parameter]) -> Tensor:
    """float32 scalar: the 2-norm of the whole gradient; NaN or inf where a part of it is."""
    with_gradient = [p for p in parameters if p.grad is not None]
    norms = torch._foreach_norm([local(p.grad) for p in with_gradient], dtype=torch.float32)
    return _over_ranks(with_gradient, [norm.square() for norm in norms]).sqrt()


@torch.no_grad()
def scale_gradients(parameters: Iterable[nn.Parameter], factor: float) -> None:
    """Multiplies every gradient by `factor`, in place."""
    torch._foreach_mul_([local(p.grad) for p in parameters if p.grad is not None], factor)


@torch.no_grad()
def fingerprint(parameters: Sequence[nn.Parameter]) -> float:
    """Sum of the absolute values of the weights, in float64 (F5)."""
    return float(_over_ranks(parameters, [local(p).double().abs().sum() for p in parameters]))


def _over_ranks(parameters: Sequence[nn.Parameter], parts: Sequence[Tensor]) -> Tensor:
    """Sum of one scalar per parameter: over the ranks where it is sharded, once where every rank holds it whole."""
    sharded = [part for p, part in zip(parameters, parts, strict=True) if isinstance(p, DTensor)]
    whole = [part for p, part in zip(parameters, parts, strict=True) if not isinstance(p, DTensor)]
    total = torch.stack(whole).sum() if whole else 0.0
    return total + all_reduced(torch.stack(sharded).sum(), dist.ReduceOp.SUM) if sharded else total


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor, without its padding."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
