"""Fused sampling step: reads x, velocity and noise once, writes x_next and the log-prob of what it wrote.

Reference: `flowgrpo_math.transition.transition_sample`, then `transition_logp` of the stored value. Rollout draws with
this; replay scores with `kernels.transition_logp`, which sums in the same order and so gives the same bits.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from flowgrpo_math.kernels import _rows
from flowgrpo_math.kernels._rows import load_row, standard_score, store_logp_when_last
from flowgrpo_math.transition import HALF_LOG_2PI, Transition, check_density, check_latents


def transition_sample_logp(
    x: Tensor, velocity: Tensor, noise: Tensor, t: Transition, *, out_dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """x_next = mean + std * noise, rounded to `out_dtype`, and the log-prob of that rounded value, in one launch.

    Not differentiable: sampling needs no gradient, replay recomputes the log-prob under the policy it trains.

    Args:
        x, velocity, noise: [B, ...] as in `kernels.transition_logp`; `noise` is standard normal.
        t: fields of [B] or [1], std above 0 (an Euler step has no log-prob: use `transition_sample`).
        out_dtype: float32, bfloat16 or float16: what the trajectory stores.

    Returns:
        x_next [B, ...] contiguous in `out_dtype`; logp [B] float32, nats per element, bit for bit what
        `kernels.transition_logp(x, velocity, x_next, t)` gives.

    Raises:
        As `kernels.transition_logp`; ValueError also for inputs that require gradients while they are recorded.
    """
    check_latents(t, x=x, velocity=velocity, noise=noise)
    _rows.check_device_and_dtype(x=x, velocity=velocity, noise=noise)
    check_density(t.std_B)
    if out_dtype not in _rows.FLOATS:
        raise TypeError(f"out_dtype = {out_dtype}; the kernels write float32, bfloat16 and float16")
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (x, velocity, noise)):
        raise ValueError("transition_sample_logp has no gradient: call it under torch.no_grad()")
    coefficients = _rows.row_coefficients(tuple(t), x.shape[0], x.device)
    return _sample_op(x, velocity, noise, *coefficients, out_dtype)


@triton.jit
def _sample_kernel(
    x_ptr,  # [B, D] by strides, as are velocity and noise
    velocity_ptr,
    noise_ptr,
    x_scale_ptr,  # [B] float32 with one stride, as are v_scale and std
    v_scale_ptr,
    std_ptr,
    x_next_ptr,  # [B, D] contiguous
    chunk_sums_ptr,
    counters_ptr,
    logp_ptr,
    D,
    coefficient_stride,
    x_row, x_outer, x_inner,
    velocity_row, velocity_outer, velocity_inner,
    noise_row, noise_outer, noise_inner,
    X_SIZE: tl.constexpr,
    VELOCITY_SIZE: tl.constexpr,
    NOISE_SIZE: tl.constexpr,
    HALF_LOG_2PI: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    REDUCE: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    row = program // CHUNKS
    chunk = program % CHUNKS
    x_scale = tl.load(x_scale_ptr + row * coefficient_stride)
    v_scale = tl.load(v_scale_ptr + row * coefficient_stride)
    std = tl.load(std_ptr + row * coefficient_stride)
    sum_z2 = tl.zeros([BLOCK], dtype=tl.float32)
    column = chunk.to(tl.int32) * CHUNK + tl.arange(0, BLOCK)
    x = load_row(x_ptr, row, column, D, x_row, x_outer, x_inner, X_SIZE)
    velocity = load_row(velocity_ptr, row, column, D, velocity_row, velocity_outer, velocity_inner, VELOCITY_SIZE)
    noise = load_row(noise_ptr, row, column, D, noise_row, noise_outer, noise_inner, NOISE_SIZE)
    for start in tl.static_range(0, CHUNK, BLOCK):
        at = row * D + column
        inside = column < D
        drawn = tl.fma(std, noise, tl.fma(v_scale, velocity, x_scale * x))
        x_next = drawn.to(x_next_ptr.dtype.element_ty)
        z = standard_score(x, velocity, x_next.to(tl.float32), x_scale, v_scale, 1.0 / std)
        sum_z2 = tl.fma(z, z, sum_z2)
        if start + BLOCK < CHUNK:  # the compiler may not move these loads above the store: so we do
            column += BLOCK
            x = load_row(x_ptr, row, column, D, x_row, x_outer, x_inner, X_SIZE)
            velocity = load_row(
                velocity_ptr, row, column, D, velocity_row, velocity_outer, velocity_inner, VELOCITY_SIZE
            )
            noise = load_row(noise_ptr, row, column, D, noise_row, noise_outer, noise_inner, NOISE_SIZE)
        tl.store(x_next_ptr + at, x_next, mask=inside)
    store_logp_when_last(
        tl.sum(sum_z2), row, chunk, D, std, chunk_sums_ptr, counters_ptr, logp_ptr, HALF_LOG_2PI, CHUNKS, REDUCE
    )


def _sample(
    x: Tensor,
    velocity: Tensor,
    noise: Tensor,
    x_scale: Tensor,
    v_scale: Tensor,
    std: Tensor,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    B, D = x.shape[0], x.numel() // x.shape[0]
    chunks = _rows.num_chunks(D)
    rows = [_rows.as_rows(tensor) for tensor in (x, velocity, noise)]
    x_next, logp_B = _empty_outputs(x, out_dtype)
    chunk_sums = torch.empty(B * chunks, dtype=torch.float32, device=x.device)
    with _rows.on_device(x):
        launch: Any = _sample_kernel[(B * chunks,)]
        launch(
            *(r.tensor for r in rows),
            x_scale,
            v_scale,
            std,
            x_next,
            chunk_sums,
            _rows.row_counters(B, x.device),
            logp_B,
            D,
            std.stride(0),
            *(stride for r in rows for stride in (r.row, r.outer, r.inner)),
            *(r.inner_size for r in rows),
            HALF_LOG_2PI=HALF_LOG_2PI,
            CHUNKS=chunks,
            CHUNK=_rows.CHUNK,
            BLOCK=_rows.BLOCK,
            REDUCE=_rows.reduce_width(chunks),
            num_warps=_rows.WARPS,
        )
    return x_next, logp_B


def _empty_outputs(x: Tensor, out_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    x_next = torch.empty(x.shape, dtype=out_dtype, device=x.device)
    return x_next, torch.empty(x.shape[0], dtype=torch.float32, device=x.device)


_library = torch.library.Library("flowgrpo", "FRAGMENT")
_library.define(
    "transition_sample_logp(Tensor x, Tensor velocity, Tensor noise, Tensor x_scale, Tensor v_scale, Tensor std, "
    "ScalarType out_dtype) -> (Tensor, Tensor)"
)
for _key in ("CUDA", "CPU"):  # CPU: Triton's interpreter
    _library.impl("transition_sample_logp", _sample, _key)
torch.library.register_fake(
    "flowgrpo::transition_sample_logp",
    lambda x, velocity, noise, x_scale, v_scale, std, out_dtype: _empty_outputs(x, out_dtype),
    lib=_library,
)
_sample_op = torch.ops.flowgrpo.transition_sample_logp.default
