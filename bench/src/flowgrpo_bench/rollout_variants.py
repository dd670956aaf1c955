"""Other ways to run SGLang's Qwen-Image transformer, to be timed beside the one that the server uses."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel


@contextmanager
def fused(transformer: nn.Module) -> Iterator[None]:
    """Within it, GELU runs inside the product before it, and the bias of the attention's output inside its product.

    SGLang launches both by themselves: the output of attention is a slice, and of a slice torch adds the bias after.
    The values differ by rounding: what comes out of the product is not cut to bf16 before the GELU.
    """
    changed, hooks = [], []
    for block in transformer.transformer_blocks:
        for mlp in (block.img_mlp, block.txt_mlp):
            changed.append(mlp.net[0])
            mlp.net[0].forward = _gelu_inside(mlp.net[0].proj)
        for layer in (block.attn.to_out[0], block.attn.to_add_out):
            hooks.append(layer.register_forward_pre_hook(lambda _, given: (given[0].contiguous(),)))
    try:
        yield
    finally:
        for module in changed:
            del module.forward  # the class's again
        for hook in hooks:
            hook.remove()


def _gelu_inside(proj: nn.Module) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        out = torch._addmm_activation(proj.bias, rows, proj.weight.t(), use_gelu=True)
        return out.view(*x.shape[:-1], -1)

    return forward


@contextmanager
def cudnn_attention(_: nn.Module) -> Iterator[None]:
    """Within it, attention is cuDNN's, where torch would choose FlashAttention 2. A RuntimeError where it has none."""
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        yield


def compile_blocks(transformer: nn.Module) -> None:
    """Compiles the repeated block, once for each shape. Not undone: the last thing to be timed.

    SGLang's `--enable-torch-compile` would compile the whole transformer, once for each number of layers and shape.
    """
    os.environ.pop("TORCHDYNAMO_DISABLE", None)  # as the server's environment has it; read again at each compilation
    import torch._dynamo

    torch._dynamo.config.disable = False
    torch._dynamo.config.recompile_limit = 32
    for block in transformer.transformer_blocks:
        block.compile(dynamic=False)
