"""LoRA through peft: injection on the meta device, the same initial weights on every rank, the trainable boundary.

The adapted layer computes W x + (lora_alpha / lora_rank) B A x, with A drawn from Normal(0, 1 / lora_rank) and
B = 0, so that training starts at the base model exactly. Source: https://arxiv.org/abs/2106.09685.
"""

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from flowgrpo_fsdp_actor.errors import TrainableBoundaryError

ADAPTER = "default"


def inject_lora(module: nn.Module, *, rank: int, alpha: float, targets: Sequence[str]) -> None:
    """Gives an adapter to every linear layer whose name ends in one of `targets`, and freezes the rest.

    Raises TrainableBoundaryError for a target that no layer has.
    """
    from peft import LoraConfig, inject_adapter_in_model  # half of the package's import time, and for LoRA alone

    names = [name for name, _ in module.named_modules()]
    if absent := tuple(t for t in targets if not any(name == t or name.endswith(f".{t}") for name in names)):
        raise TrainableBoundaryError("lora", absent, "no layer of the model has the name of these targets")
    module.requires_grad_(False)
    settings = LoraConfig(r=rank, lora_alpha=alpha, target_modules=list(targets), init_lora_weights=False)
    with torch.device("meta"):
        inject_adapter_in_model(settings, module, adapter_name=ADAPTER)
    for layer in module.modules():
        if hasattr(layer, "lora_A"):
            layer.cast_input_dtype_enabled = False  # or peft would compute in the masters' dtype
            layer.lora_A[ADAPTER].__class__ = layer.lora_B[ADAPTER].__class__ = Factor


class Factor(nn.Linear):
    """A or B of an adapter, kept in the master dtype and used in its input's: the policy's compute dtype."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight.to(x.dtype))


def is_lora(name: str) -> bool:
    """Whether a parameter's name is that of an adapter's A or B."""
    return ".lora_A." in name or ".lora_B." in name


def initial_lora(name: str, shape: torch.Size, rank: int, seed: int) -> Tensor:
    """float32 initial value of the adapter tensor `name`: of the name and the seed alone, on any rank."""
    if ".lora_B." in name:
        return torch.zeros(shape)
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)
    return torch.randn(shape, generator=generator) / rank


def check_trainable_boundary(module: nn.Module, mode: str) -> None:
    """F6: `full` has no frozen parameter; `lora` has adapters, all trainable, and a frozen base."""
    trainable = [name for name, p in module.named_parameters() if p.requires_grad]
    frozen = [name for name, p in module.named_parameters() if not p.requires_grad]
    if mode == "full":
        if frozen:
            raise TrainableBoundaryError(mode, tuple(frozen), "these parameters are frozen")
        return
    if not trainable:
        raise TrainableBoundaryError(mode, (), "there is no trainable parameter")
    if moving_base := tuple(name for name in trainable if not is_lora(name)):
        raise TrainableBoundaryError(mode, moving_base, "these parameters of the base are trainable")
    if dead := tuple(name for name in frozen if is_lora(name)):
        raise TrainableBoundaryError(mode, dead, "these adapter parameters are frozen")
