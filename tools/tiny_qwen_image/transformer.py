"""The tiny QwenImageTransformer2DModel: rectified flow from noise to latents, on captions that are sometimes wrong.

Wrong captions are the point: the model learns to draw crisp pictures, and that a caption is only sometimes to be
believed. Reinforcement learning then has something to win, and can win it fast.

Shapes: B pictures, P packed image tokens of C = 64 channels, L text tokens of E channels, h x w latent pixels.
"""

import copy
import itertools
import math
import time
from collections.abc import Callable

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, QwenImageTransformer2DModel
from torch import Tensor


def new_scheduler() -> FlowMatchEulerDiscreteScheduler:
    """Qwen-Image's own settings."""
    return FlowMatchEulerDiscreteScheduler(
        base_image_seq_len=256,
        base_shift=0.5,
        max_image_seq_len=8192,
        max_shift=0.9,
        shift=1.0,
        shift_terminal=0.02,
        time_shift_type="exponential",
        use_dynamic_shifting=True,
    )


def sigma_schedule(steps: int, tokens: int) -> Tensor:
    """[steps + 1] sigmas from 1 down to 0 that QwenImagePipeline uses for this many image tokens."""
    scheduler = new_scheduler()
    slope = (scheduler.config.max_shift - scheduler.config.base_shift) / (8192 - 256)
    mu = scheduler.config.base_shift + slope * (tokens - 256)
    scheduler.set_timesteps(sigmas=torch.linspace(1.0, 1.0 / steps, steps).tolist(), mu=mu)
    return scheduler.sigmas.float()


def new_transformer(*, layers: int = 3, heads: int = 3, text_width: int = 64) -> QwenImageTransformer2DModel:
    """Blocks start as the identity (adaLN-zero) and the output as zero: both speed training up."""
    model = QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=64,
        out_channels=16,
        num_layers=layers,
        attention_head_dim=32,
        num_attention_heads=heads,
        joint_attention_dim=text_width,
        axes_dims_rope=(8, 12, 12),
    )
    zeroed = [model.norm_out.linear, model.proj_out]
    for block in model.transformer_blocks:
        zeroed += [block.img_mod[1], block.txt_mod[1]]
    for linear in zeroed:
        torch.nn.init.zeros_(linear.weight)
        torch.nn.init.zeros_(linear.bias)
    return model


def pack(latent_BChw: Tensor) -> Tensor:
    """2 x 2 latent pixels become one token: [B, P, C]."""
    B, C, h, w = latent_BChw.shape
    return latent_BChw.view(B, C, h // 2, 2, w // 2, 2).permute(0, 2, 4, 1, 3, 5).reshape(B, h * w // 4, C * 4)


def unpack(latent_BPC: Tensor) -> Tensor:
    """The inverse of `pack` for a square picture."""
    B, P, C = latent_BPC.shape
    side = math.isqrt(P)
    return latent_BPC.view(B, side, side, C // 4, 2, 2).permute(0, 3, 1, 4, 2, 5).reshape(B, C // 4, 2 * side, 2 * side)


def velocity(
    model: QwenImageTransformer2DModel, x_BPC: Tensor, text_BLE: Tensor, mask_BL: Tensor, sigma_B: Tensor
) -> Tensor:
    """The model's d x / d sigma, [B, P, C]."""
    side = math.isqrt(x_BPC.shape[1])
    return model(
        hidden_states=x_BPC,
        encoder_hidden_states=text_BLE,
        encoder_hidden_states_mask=mask_BL,
        timestep=sigma_B,
        img_shapes=[[(1, side, side)]] * len(x_BPC),
        return_dict=False,
    )[0]


@torch.no_grad()
def sample(
    model: QwenImageTransformer2DModel, x_BPC: Tensor, text_BLE: Tensor, mask_BL: Tensor, *, steps: int
) -> Tensor:
    """Euler steps from the noise `x_BPC` to packed latents."""
    sigmas = sigma_schedule(steps, x_BPC.shape[1]).to(x_BPC)
    for sigma, sigma_next in itertools.pairwise(sigmas):
        v = velocity(model, x_BPC, text_BLE, mask_BL, sigma.expand(len(x_BPC)))
        x_BPC = x_BPC + (sigma_next - sigma) * v
    return x_BPC


def train_transformer(
    model: QwenImageTransformer2DModel,
    latent_NPC: Tensor,
    text_of_rows: Callable[[Tensor], tuple[Tensor, Tensor]],
    *,
    steps: int,
    batch: int,
    lr: float = 3e-3,
    ema_decay: float = 0.999,
    evaluate: Callable[[QwenImageTransformer2DModel], dict[str, float]] | None = None,
) -> tuple[QwenImageTransformer2DModel, list[dict[str, float]]]:
    """Trains on `latent_NPC` and returns the averaged weights and the loss curve.

    `text_of_rows` gives the (embeddings, mask) for drawn rows, wrong captions included. Muon moves the block matrices,
    AdamW the rest; times are logit-normal, three in ten uniform.
    """
    device = latent_NPC.device
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "transformer_blocks" in name]
    ids = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in ids]
    optimizers = [
        torch.optim.Muon(matrices, lr=lr, momentum=0.95, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr, betas=(0.9, 0.99), weight_decay=0.01),
    ]
    average = copy.deepcopy(model).eval().requires_grad_(False)
    log_every = max(1, steps // 40)
    curve, started, loss_sum = [], time.time(), torch.zeros((), device=device)
    for step in range(1, steps + 1):
        cosine = 0.5 * (1 + math.cos(math.pi * max(0, step - 100) / max(1, steps - 100)))
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group["lr"] = lr * min(1.0, step / 100) * (0.98 * cosine + 0.02)
        rows = torch.randint(len(latent_NPC), (batch,), device=device)
        x0, noise = latent_NPC[rows], torch.randn(batch, *latent_NPC.shape[1:], device=device)
        sigma = torch.sigmoid(torch.randn(batch, device=device))
        sigma = torch.where(torch.rand(batch, device=device) < 0.3, torch.rand(batch, device=device), sigma)
        x = torch.lerp(x0, noise, sigma[:, None, None])
        loss = torch.nn.functional.mse_loss(velocity(model, x, *text_of_rows(rows), sigma), noise - x0)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        decay = min(ema_decay, step / (step + 20))
        torch._foreach_lerp_(list(average.parameters()), [p.detach() for p in model.parameters()], 1 - decay)
        loss_sum += loss.detach()
        if step % log_every == 0:
            row = {"step": step, "loss": loss_sum.item() / log_every, "seconds": time.time() - started}
            if evaluate is not None and step % (8 * log_every) == 0:
                row |= evaluate(average)
            curve.append(row)
            loss_sum.zero_()
            print("transformer", row, flush=True)
    return average, curve
