"""Queries, keys and values of one full-width block from its projections: adapter added, norm, rotation, text and image
joined. Ours by Triton on CUDA (the torch form on CPU), beside that form eager and compiled, and beside an older one."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from flowgrpo_bench.case import BenchCase, Workload
from flowgrpo_bench.measure import rotation

EPS = 1e-6
# Of the norm of a result: bf16 rounds once in ours (1.7e-3), up to five times in the eager form.
GATE_RTOL = {"ours": 2.5e-3, "rivals": 6e-3}


def setup(device: str, *, B: int, P: int, L: int, H: int, D: int, rank: int, train: bool) -> Workload:
    """bf16 projections over float32 adapters; `train` adds the gradients, of frozen norms where there are adapters."""
    from flowgrpo_fsdp_actor.adapters.joint_qkv import Stream, joint_qkv

    wide = B * (P + L) * H * D * 2
    # Forward: three projections in, three out. Backward: three gradients in, q and k again, three gradients out.
    bytes_moved = wide * (14 if train else 6)
    generator = torch.Generator(device).manual_seed(0)
    inputs = []
    for _ in range(rotation(bytes_moved, device)):
        image, text = (_draw(generator, B, t, H, D, rank) for t in (P, L))
        inputs.append((image, text, torch.randn(3, B, P + L, H, D, generator=generator, device=device).bfloat16()))
    ours, rivals = joint_qkv, {"eager": joint_qkv}
    if device == "cuda":
        from flowgrpo_fsdp_actor.adapters.joint_qkv_fused import joint_qkv as ours

        compiled = {"compiled": joint_qkv, "compiled, by flips": _by_flips}
        rivals |= {name: torch.compile(form, dynamic=False, fullgraph=True) for name, form in compiled.items()}

    def call(form: Callable[..., tuple[Tensor, ...]]) -> Callable[..., Sequence[Tensor]]:
        def forward(image: Stream, text: Stream, _: Tensor) -> Sequence[Tensor]:
            with torch.no_grad():
                return form(image, text, eps=EPS)

        def with_gradients(image: Stream, text: Stream, grads: Tensor) -> Sequence[Tensor]:
            outs = form(image, text, eps=EPS)
            return (*outs, *torch.autograd.grad(outs, _leaves(image, text), list(grads)))

        return with_gradients if train else forward

    calls = {name: call(form) for name, form in rivals.items()}

    def gate() -> None:
        image, text, grads = inputs[0]
        exact = call(_by_flips)(_double(image), _double(text), grads.double())
        for name, function in {"ours": call(ours), **calls}.items():
            for number, (got, expected) in enumerate(zip(function(image, text, grads), exact, strict=True)):
                off = float((got.detach().double() - expected.detach()).norm() / expected.detach().norm())
                limit = GATE_RTOL["ours" if name == "ours" and device == "cuda" and number < 3 else "rivals"]
                assert off < limit, f"result {number} of {name} is off by {off:.1e}"

    return Workload(ours=call(ours), rivals=calls, inputs=inputs, gate=gate, bytes_moved=bytes_moved)


def _draw(generator: torch.Generator, B: int, t: int, H: int, D: int, rank: int) -> Any:
    from flowgrpo_fsdp_actor.adapters.joint_qkv import Projection, Stream

    def draw(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=generator.device)

    lows = draw(B, t, 3, max(rank, 1)).bfloat16().unbind(2)

    def projection(low: Tensor) -> Projection:
        base = draw(B, t, H * D).bfloat16().requires_grad_()
        if rank == 0:
            return Projection(base)
        return Projection(base, low.requires_grad_(), (0.1 * draw(H * D, rank)).requires_grad_())

    norms = [(1.0 + 0.1 * draw(D)).bfloat16().requires_grad_(rank == 0) for _ in range(2)]
    angle = draw(t, D // 2)
    return Stream(*(projection(low) for low in lows), *norms, torch.stack((angle.cos(), angle.sin())))


def _double(stream: Any) -> Any:
    """The same values in float64."""

    def wide(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.detach().double().requires_grad_(tensor.requires_grad)

    projections = (type(part)(*map(wide, part)) for part in stream[:3])
    return type(stream)(*projections, *map(wide, stream[3:]))


def _leaves(*streams: Any) -> list[Tensor]:
    """What the gradients go to."""
    tensors = [t for stream in streams for part in stream for t in (part if isinstance(part, tuple) else (part,))]
    return [tensor for tensor in tensors if tensor is not None and tensor.requires_grad]


def _by_flips(image: Any, text: Any, *, eps: float) -> tuple[Tensor, ...]:
    """How blocks did it before the kernels, in the inputs' precision where that is float64."""
    from flowgrpo_fsdp_actor.adapters.joint_qkv import heads

    D = image.norm_q_D.shape[0]

    def normed(x: Tensor, weight: Tensor) -> Tensor:
        scale = torch.rsqrt(_wide(x).pow(2).mean(-1, keepdim=True) + eps)
        return (x * scale).to(weight.dtype) * weight

    def turned(x: Tensor, table: Tensor) -> Tensor:
        cos, sin = table[:, :, None]
        own = cos.repeat_interleave(2, -1)
        neighbour = torch.stack((-sin, sin), dim=-1).flatten(-2)
        swapped = _wide(x).unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
        return (_wide(x) * own + swapped * neighbour).to(x.dtype)

    q, k = (
        torch.cat([turned(normed(heads(s[i], D), s[3 + i]), s.table_2td) for s in (text, image)], dim=1) for i in (0, 1)
    )
    return q, k, torch.cat([heads(text.v, D), heads(image.v, D)], dim=1)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


BLOCK = {"P": 576, "L": 128, "H": 24, "D": 128}
CASE = BenchCase(
    name="joint_qkv",
    about="q, k and v of one Qwen-Image block from its projections",
    setup=setup,
    sizes={
        "16 rows, 384x384, LoRA 64": {"B": 16, "rank": 64, "train": False, **BLOCK},
        "the same with gradients": {"B": 16, "rank": 64, "train": True, **BLOCK},
        "16 rows, 384x384, full, with gradients": {"B": 16, "rank": 0, "train": True, **BLOCK},
        "1 row, 384x384, LoRA 64": {"B": 1, "rank": 64, "train": False, **BLOCK},
    },
    cpu_sizes={"2 rows, 128x128, LoRA 64": {"B": 2, "P": 64, "L": 64, "H": 24, "D": 128, "rank": 64, "train": True}},
    smoke={"tiny": {"B": 1, "P": 4, "L": 3, "H": 2, "D": 16, "rank": 4, "train": True}},
)
