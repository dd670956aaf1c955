"""Fused `joint_qkv`: reads each projection once and writes q, k and v once, each in one launch; one launch backward.

Reference: `joint_qkv.joint_qkv`; kernels: `joint_qkv_kernels`. The operators `flowgrpo::joint_heads` and
`flowgrpo::joint_heads_backward` carry it through autograd and torch.compile.

Shapes: as in `joint_qkv`.
"""

import os
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flowgrpo_fsdp_actor.adapters.joint_qkv import Projection, Stream, heads
from flowgrpo_fsdp_actor.adapters.joint_qkv_kernels import backward_kernel, forward_kernel, tl

BLOCK = 32
"""Tokens of a program."""
ROWS = 4
WARPS = 4
STAGES = 3
"""Rows that a program has on their way; in float32 one, for a multiprocessor holds no more."""
MAX_RANK = 128
"""Of an adapter added inside the kernel: what fits a multiprocessor's memory beside the rest."""
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def joint_qkv(image: Stream, text: Stream, *, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """As `joint_qkv.joint_qkv` to rounding, on a GPU; gradients of projections, adapters and norms.

    Raises:
        TypeError: another dtype than float32, bfloat16 and float16, or dtypes that differ. ValueError: tensors on the
            CPU without `TRITON_INTERPRET=1` in the environment before Triton is imported.
    """
    D, tables = image.norm_q_D.shape[0], (image.table_2td, text.table_2td)

    def joined(image: Projection, text: Projection, image_norm: Tensor | None, text_norm: Tensor | None) -> Tensor:
        parts = (*_added_inside(image, D), image_norm, *_added_inside(text, D), text_norm)
        return torch.ops.flowgrpo.joint_heads.default(*parts, *tables, D, eps)

    q = joined(image.q, text.q, image.norm_q_D, text.norm_q_D)
    k = joined(image.k, text.k, image.norm_k_D, text.norm_k_D)
    return q, k, joined(image.v, text.v, None, None)


def _added_inside(projection: Projection, D: int) -> Projection:
    """The projection as the kernel takes it: an adapter of a larger rank is added before."""
    if projection.low_BtR is None or projection.low_BtR.shape[-1] <= MAX_RANK:
        return projection
    return Projection(heads(projection, D).flatten(2))


class _Inputs(NamedTuple):
    """The operator's arguments, in its order."""

    image: Tensor
    image_low: Tensor | None
    image_up: Tensor | None
    image_norm: Tensor | None
    text: Tensor
    text_low: Tensor | None
    text_up: Tensor | None
    text_norm: Tensor | None
    image_table: Tensor
    text_table: Tensor
    D: int
    eps: float

    @property
    def joint_shape(self) -> tuple[int, int, int, int]:
        """(B, T, H, D)."""
        B, P, E = self.image.shape
        return B, P + self.text.shape[1], E // self.D, self.D

    @property
    def grid(self) -> tuple[int, int, int]:
        """Programs: heads, next to each other in memory and so in time; tiles; groups of rows."""
        B, _, H, _ = self.joint_shape
        return H, _tiles(self.text) + _tiles(self.image), -(-B // ROWS)

    def pointers(self) -> list[Tensor]:
        """Tensors as both kernels take them; where there is none, one that is never read."""
        return [self.image if tensor is None else tensor for tensor in self[:10]]

    def strides(self) -> list[int]:
        found = []
        for base, low in ((self.image, self.image_low), (self.text, self.text_low)):
            found += [base.shape[1], *base.stride()[:2], *(low if low is not None else base).stride()[:2]]
        return found

    def constants(self) -> dict[str, Any]:
        """Of the compiled kernel."""
        ranks = [0 if low is None else low.shape[-1] for low in (self.image_low, self.text_low)]
        return {
            "IMAGE_R": ranks[0],
            "IMAGE_R_PAD": max(16, _power_of_2(ranks[0])),
            "TEXT_R": ranks[1],
            "TEXT_R_PAD": max(16, _power_of_2(ranks[1])),
            "D": self.D,
            "D_PAD": _power_of_2(self.D),
            # The interpreter has no product of bf16; in float32 the same factors give the same product.
            "DOT": tl.float32 if _INTERPRETED else _DTYPES[self.image.dtype],
            "BLOCK": BLOCK,
            "ROWS": ROWS,
            "STAGES": 1 if self.image.dtype == torch.float32 else STAGES,
            "num_warps": WARPS,
        }


def _tiles(stream_BtE: Tensor) -> int:
    return -(-stream_BtE.shape[1] // BLOCK)


def _power_of_2(number: int) -> int:
    """The least that is not smaller; Triton's own takes ten times as long, at each launch."""
    return 1 << max(0, number - 1).bit_length()


def _checked(inputs: _Inputs) -> _Inputs:
    """The inputs with the strides that the kernels read, which compiled blocks give them anyhow."""
    rows = {"image", "text", "image_low", "text_low"}
    for name, tensor in inputs._asdict().items():
        if not isinstance(tensor, Tensor):
            continue
        if name in rows and (tensor.dtype not in _DTYPES or tensor.dtype != inputs.image.dtype):
            raise TypeError(
                f"{name} has dtype {tensor.dtype} beside an image of {inputs.image.dtype}; joint_qkv's kernels take "
                "float32, bfloat16 or float16, one for all projections: convert it, or set --no-replay-compile"
            )
        if not (tensor.is_cuda or _INTERPRETED):
            raise ValueError(
                f"{name} is on {tensor.device}; joint_qkv's kernels need CUDA tensors: move it, use "
                "joint_qkv.joint_qkv, or set TRITON_INTERPRET=1 before Triton is imported"
            )
    dense = {
        name: tensor if name in rows and tensor.stride(-1) == 1 else tensor.contiguous()
        for name, tensor in inputs._asdict().items()
        if isinstance(tensor, Tensor)
    }
    return inputs._replace(**dense)


def _forward(*arguments: Any) -> Tensor:
    inputs = _checked(_Inputs(*arguments))
    B, _, H, _ = inputs.joint_shape
    out_BTHD = torch.empty(inputs.joint_shape, dtype=inputs.image.dtype, device=inputs.image.device)
    with torch.cuda.device_of(out_BTHD):
        launch: Any = forward_kernel[inputs.grid]
        launch(
            *inputs.pointers(),
            out_BTHD,
            *inputs.strides(),
            B,
            H,
            inputs.eps,
            NORM=inputs.image_norm is not None,
            **inputs.constants(),
        )
    return out_BTHD


def _backward(grad_BTHD: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    inputs, need_norm = _checked(_Inputs(*arguments[:-1])), arguments[-1]
    grad_BTHD = grad_BTHD if grad_BTHD.stride(-1) == 1 else grad_BTHD.contiguous()
    grads = _empty_grads(inputs, need_norm)
    (B, _, H, D), (_, tiles, groups) = inputs.joint_shape, inputs.grid
    sums_shape = (groups, tiles, H, D) if need_norm else (0,)
    norm_sums = torch.empty(sums_shape, dtype=torch.float32, device=grad_BTHD.device)
    with torch.cuda.device_of(grad_BTHD):
        launch: Any = backward_kernel[inputs.grid]
        launch(
            grad_BTHD,
            *inputs.pointers(),
            *grads[:2],
            norm_sums,
            *inputs.strides(),
            *grad_BTHD.stride()[:3],
            B,
            H,
            inputs.eps,
            NEED_NORM=need_norm,
            **inputs.constants(),
        )
    if need_norm:
        text_tiles = _tiles(inputs.text)
        torch.sum(norm_sums[:, text_tiles:].flatten(0, 2), dim=0, dtype=torch.float32, out=grads[2])
        torch.sum(norm_sums[:, :text_tiles].flatten(0, 2), dim=0, dtype=torch.float32, out=grads[3])
    return grads


def _empty_grads(inputs: _Inputs, need_norm: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of image and text, contiguous, and float32 of their norms, empty where not needed."""
    image, text = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (inputs.image, inputs.text))
    norms = (torch.empty(inputs.D if need_norm else 0, dtype=torch.float32, device=image.device) for _ in range(2))
    return image, text, *norms


# ---------------------------------------------------------------------------------------------- autograd


class _JointHeads(torch.autograd.Function):
    """The operator's gradient: to projections, both factors of adapters, and norms."""

    @staticmethod
    def forward(ctx, *arguments: Any) -> Tensor:
        inputs = _Inputs(*arguments)
        ctx.sizes, ctx.D, ctx.eps = [inputs.text.shape[1], inputs.image.shape[1]], inputs.D, inputs.eps
        if inputs.image_norm is None:  # linear: the gradient needs no projection
            inputs = inputs._replace(image=None, text=None)
        ctx.save_for_backward(*inputs[:10])
        with torch._C._AutoDispatchBelowAutograd():
            return torch.ops.flowgrpo.joint_heads.default(*arguments)

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        inputs, need = _Inputs(*ctx.saved_tensors, ctx.D, ctx.eps), ctx.needs_input_grad
        image_norm = text_norm = None
        if inputs.image_norm is None:
            text, image = (part.contiguous() for part in grads[0].flatten(2).split(ctx.sizes, dim=1))
        else:
            need_norm = need[3] or need[7]
            image, text, *norms = torch.ops.flowgrpo.joint_heads_backward.default(grads[0], *inputs, need_norm)
            if need_norm:
                image_norm, text_norm = norms[0].to(inputs.image_norm.dtype), norms[1].to(inputs.text_norm.dtype)
        return (
            image,
            *_adapter_gradients(image, inputs.image_low, inputs.image_up),
            image_norm,
            text,
            *_adapter_gradients(text, inputs.text_low, inputs.text_up),
            text_norm,
            *[None] * 4,
        )


def _adapter_gradients(grad_BtE: Tensor, low_BtR: Tensor | None, up_ER: Tensor | None) -> tuple[Tensor | None, ...]:
    if low_BtR is None:
        return None, None
    grad, low = grad_BtE.flatten(0, 1), low_BtR.flatten(0, 1)
    return (grad @ up_ER.to(grad.dtype)).view(low_BtR.shape), (grad.T @ low).to(up_ER.dtype)


def _autograd(*arguments: Any) -> Tensor:
    if torch.is_grad_enabled() and any(isinstance(a, Tensor) and a.requires_grad for a in arguments):
        return _JointHeads.apply(*arguments)
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.flowgrpo.joint_heads.default(*arguments)


_ARGUMENTS = (
    "Tensor image, Tensor? image_low, Tensor? image_up, Tensor? image_norm, Tensor text, Tensor? text_low, "
    "Tensor? text_up, Tensor? text_norm, Tensor image_table, Tensor text_table, int D, float eps"
)
_library = torch.library.Library("flowgrpo", "FRAGMENT")
_library.define(f"joint_heads({_ARGUMENTS}) -> Tensor")
_library.define(f"joint_heads_backward(Tensor grad, {_ARGUMENTS}, bool need_norm) -> (Tensor, Tensor, Tensor, Tensor)")
for _key in ("CUDA", "CPU"):  # CPU: Triton's interpreter
    _library.impl("joint_heads", _forward, _key)
    _library.impl("joint_heads_backward", _backward, _key)
_library.impl("joint_heads", _autograd, "Autograd")


def _fake_forward(*arguments: Any) -> Tensor:
    inputs = _Inputs(*arguments)
    return inputs.image.new_empty(inputs.joint_shape)


torch.library.register_fake("flowgrpo::joint_heads", _fake_forward, lib=_library)
torch.library.register_fake(
    "flowgrpo::joint_heads_backward",
    lambda grad, *arguments: _empty_grads(_Inputs(*arguments[:-1]), arguments[-1]),
    lib=_library,
)
