"""Fused `transition_logp`: reads three [B, D] tensors once and writes [B]; one launch forward, one backward.

Reference: `flowgrpo_math.transition.transition_logp`, whose coefficients and constants these kernels use. Sums and
products in float32 whatever the inputs' dtype. How rows are cut and summed: `_rows`.

Custom operators `flowgrpo::transition_logp` and `flowgrpo::transition_logp_backward` carry it through autograd and
`torch.compile`.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from flowgrpo_math.kernels import _rows
from flowgrpo_math.kernels._rows import load_row, standard_score, store_logp_when_last
from flowgrpo_math.transition import HALF_LOG_2PI, Transition, check_density, check_latents


def transition_logp(x: Tensor, velocity: Tensor, x_next: Tensor, t: Transition) -> Tensor:
    """Log-density of `x_next` under `t`, averaged over D: [B] float32, nats per element.

    As `flowgrpo_math.transition.transition_logp` to rounding (2e-6 absolute), in one launch; the gradient with respect
    to all three tensors that need one takes one launch more. Deterministic; a candidate's bits do not depend on its
    batch. Compiled once for each D.

    Args:
        x, velocity, x_next: [B, ...] CUDA tensors of one shape, each float32, bfloat16 or float16. Strided views are
            read where they lie if their trailing dimensions merge into two strides or fewer.
        t: fields of [B] or [1]. On the CPU it costs one small copy per call; `t.to(device)` pays it once.

    Raises:
        TypeError: another dtype. ValueError: shapes or devices that differ, tensors on the CPU without
            `TRITON_INTERPRET=1`, or a std of 0 (seen where `t` is on the CPU).
    """
    check_latents(t, x=x, velocity=velocity, x_next=x_next)
    _rows.check_device_and_dtype(x=x, velocity=velocity, x_next=x_next)
    check_density(t.std_B)
    coefficients = _rows.row_coefficients(tuple(t), x.shape[0], x.device)
    if torch.compiler.is_compiling():
        return _forward_op(x, velocity, x_next, *coefficients)
    return _autograd(x, velocity, x_next, *coefficients)  # where the operator would lead, one dispatch earlier


@triton.jit
def _forward_kernel(
    x_ptr,  # [B, D] by strides, as are velocity and x_next
    velocity_ptr,
    x_next_ptr,
    x_scale_ptr,  # [B] float32 with one stride, as are v_scale and std
    v_scale_ptr,
    std_ptr,
    chunk_sums_ptr,
    counters_ptr,
    logp_ptr,
    D,
    coefficient_stride,
    x_row, x_outer, x_inner,
    velocity_row, velocity_outer, velocity_inner,
    x_next_row, x_next_outer, x_next_inner,
    X_SIZE: tl.constexpr,
    VELOCITY_SIZE: tl.constexpr,
    X_NEXT_SIZE: tl.constexpr,
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
    for start in tl.static_range(0, CHUNK, BLOCK):
        column = chunk.to(tl.int32) * CHUNK + start + tl.arange(0, BLOCK)
        x = load_row(x_ptr, row, column, D, x_row, x_outer, x_inner, X_SIZE)
        velocity = load_row(velocity_ptr, row, column, D, velocity_row, velocity_outer, velocity_inner, VELOCITY_SIZE)
        x_next = load_row(x_next_ptr, row, column, D, x_next_row, x_next_outer, x_next_inner, X_NEXT_SIZE)
        z = standard_score(x, velocity, x_next, x_scale, v_scale, 1.0 / std)
        sum_z2 = tl.fma(z, z, sum_z2)  # adds 0 past the row's end, where all three loads gave 0
    store_logp_when_last(
        tl.sum(sum_z2), row, chunk, D, std, chunk_sums_ptr, counters_ptr, logp_ptr, HALF_LOG_2PI, CHUNKS, REDUCE
    )


@triton.jit
def _backward_kernel(
    grad_ptr,  # [B], gradient of logp, with a stride
    x_ptr,
    velocity_ptr,
    x_next_ptr,
    x_scale_ptr,
    v_scale_ptr,
    std_ptr,
    grad_x_ptr,  # [B, D] contiguous, as are the two below; not touched where not needed
    grad_velocity_ptr,
    grad_x_next_ptr,
    D,
    chunks,
    grad_stride,
    coefficient_stride,
    x_row, x_outer, x_inner,
    velocity_row, velocity_outer, velocity_inner,
    x_next_row, x_next_outer, x_next_inner,
    X_SIZE: tl.constexpr,
    VELOCITY_SIZE: tl.constexpr,
    X_NEXT_SIZE: tl.constexpr,
    NEED_X: tl.constexpr,
    NEED_VELOCITY: tl.constexpr,
    NEED_X_NEXT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    row = program // chunks
    column = (program % chunks).to(tl.int32) * BLOCK + tl.arange(0, BLOCK)
    x_scale = tl.load(x_scale_ptr + row * coefficient_stride)
    v_scale = tl.load(v_scale_ptr + row * coefficient_stride)
    inv_std = 1.0 / tl.load(std_ptr + row * coefficient_stride)
    grad = tl.load(grad_ptr + row * grad_stride).to(tl.float32)
    x = load_row(x_ptr, row, column, D, x_row, x_outer, x_inner, X_SIZE)
    velocity = load_row(velocity_ptr, row, column, D, velocity_row, velocity_outer, velocity_inner, VELOCITY_SIZE)
    x_next = load_row(x_next_ptr, row, column, D, x_next_row, x_next_outer, x_next_inner, X_NEXT_SIZE)
    # d logp / d mean = z / (std D), and the mean is linear in x and velocity.
    grad_mean = standard_score(x, velocity, x_next, x_scale, v_scale, inv_std) * (grad * inv_std / D)
    at = row * D + column
    inside = column < D
    if NEED_X:
        tl.store(grad_x_ptr + at, (x_scale * grad_mean).to(grad_x_ptr.dtype.element_ty), mask=inside)
    if NEED_VELOCITY:
        tl.store(grad_velocity_ptr + at, (v_scale * grad_mean).to(grad_velocity_ptr.dtype.element_ty), mask=inside)
    if NEED_X_NEXT:
        tl.store(grad_x_next_ptr + at, (-grad_mean).to(grad_x_next_ptr.dtype.element_ty), mask=inside)


def _forward(x: Tensor, velocity: Tensor, x_next: Tensor, x_scale: Tensor, v_scale: Tensor, std: Tensor) -> Tensor:
    B, D = x.shape[0], x.numel() // x.shape[0]
    chunks = _rows.num_chunks(D)
    rows = [_rows.as_rows(tensor) for tensor in (x, velocity, x_next)]
    logp_B = torch.empty(B, dtype=torch.float32, device=x.device)
    chunk_sums = torch.empty(B * chunks, dtype=torch.float32, device=x.device)
    with _rows.on_device(x):
        launch: Any = _forward_kernel[(B * chunks,)]
        launch(
            *(r.tensor for r in rows),
            x_scale,
            v_scale,
            std,
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
            maxnreg=_rows.MAX_REGISTERS,
        )
    return logp_B


def _backward(
    grad_B: Tensor,
    x: Tensor,
    velocity: Tensor,
    x_next: Tensor,
    x_scale: Tensor,
    v_scale: Tensor,
    std: Tensor,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    B, D = x.shape[0], x.numel() // x.shape[0]
    chunks = -(-D // _rows.BLOCK)
    rows = [_rows.as_rows(tensor) for tensor in (x, velocity, x_next)]
    grads = _empty_grads(x, velocity, x_next, needs)
    with _rows.on_device(x):
        launch: Any = _backward_kernel[(B * chunks,)]
        launch(
            grad_B,
            *(r.tensor for r in rows),
            x_scale,
            v_scale,
            std,
            *grads,
            D,
            chunks,
            grad_B.stride(0),
            std.stride(0),
            *(stride for r in rows for stride in (r.row, r.outer, r.inner)),
            *(r.inner_size for r in rows),
            *needs,
            BLOCK=_rows.BLOCK,
            num_warps=_rows.WARPS,
        )
    return grads


def _empty_grads(x: Tensor, velocity: Tensor, x_next: Tensor, needs: list[bool]) -> tuple[Tensor, Tensor, Tensor]:
    """A contiguous gradient of each tensor that needs one, an empty tensor for the others."""

    def empty(tensor: Tensor, need: bool) -> Tensor:
        return torch.empty(tensor.shape if need else (0,), dtype=tensor.dtype, device=tensor.device)

    return empty(x, needs[0]), empty(velocity, needs[1]), empty(x_next, needs[2])


class _TransitionLogp(torch.autograd.Function):
    """The operator's gradient. The coefficients of a step are constants: they get none."""

    @staticmethod
    def forward(ctx, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        with torch._C._AutoDispatchBelowAutograd():
            return _forward_op(*inputs)

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        needs = [bool(need) for need in ctx.needs_input_grad[:3]]
        results = _backward_op(grads[0], *ctx.saved_tensors, needs)
        return (*(r if need else None for r, need in zip(results, needs, strict=True)), None, None, None)


def _autograd(*inputs: Tensor) -> Tensor:
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs[:3]):
        return _TransitionLogp.apply(*inputs)
    with torch._C._AutoDispatchBelowAutograd():
        return _forward_op(*inputs)


# `define` and `impl` instead of the decorator `custom_op`: a third of its overhead per call, and a small batch
# is bound by exactly that.
_library = torch.library.Library("flowgrpo", "FRAGMENT")
_library.define(
    "transition_logp(Tensor x, Tensor velocity, Tensor x_next, Tensor x_scale, Tensor v_scale, Tensor std) -> Tensor"
)
_library.define(
    "transition_logp_backward(Tensor grad, Tensor x, Tensor velocity, Tensor x_next, Tensor x_scale, Tensor v_scale, "
    "Tensor std, bool[] needs) -> (Tensor, Tensor, Tensor)"
)
for _key in ("CUDA", "CPU"):  # CPU: Triton's interpreter
    _library.impl("transition_logp", _forward, _key)
    _library.impl("transition_logp_backward", _backward, _key)
_library.impl("transition_logp", _autograd, "Autograd")
torch.library.register_fake(
    "flowgrpo::transition_logp",
    lambda x, *_: torch.empty(x.shape[0], dtype=torch.float32, device=x.device),
    lib=_library,
)
torch.library.register_fake(
    "flowgrpo::transition_logp_backward",
    lambda grad, x, velocity, x_next, x_scale, v_scale, std, needs: _empty_grads(x, velocity, x_next, needs),
    lib=_library,
)
_forward_op = torch.ops.flowgrpo.transition_logp.default
_backward_op = torch.ops.flowgrpo.transition_logp_backward.default
