"""Forward passes that prove an export of Qwen-Image: what was written against base + checkpoint, and the base.

In the adapters, the one place of this package where diffusers is known.
"""

from pathlib import Path
from typing import Literal

import torch
from diffusers import QwenImageTransformer2DModel
from peft import LoraConfig, PeftModel, set_peft_model_state_dict
from torch import Tensor, nn

from flowgrpo_fsdp_actor.export import Checkpoint


@torch.no_grad()
def export_differences(
    form: Literal["merged", "adapter"], checkpoint: Checkpoint, base: Path, exported: Path
) -> tuple[float, float]:
    """Relative output differences in fp32: (export from base + checkpoint, export from base).

    The reference loads the base and puts the checkpoint's tensors into it, independently of the export's code.
    """
    plain = _outputs(_load(base))
    reference = _outputs(_trained(checkpoint, base))
    if form == "merged":
        written = _outputs(_load(exported))
    else:
        written = _outputs(PeftModel.from_pretrained(_load(base), exported).base_model.model)
    scale = reference.norm()
    return float((written - reference).norm() / scale), float((written - plain).norm() / scale)


def _load(folder: Path) -> nn.Module:
    return QwenImageTransformer2DModel.from_pretrained(folder / "transformer", torch_dtype=torch.float32).eval()


def _trained(checkpoint: Checkpoint, base: Path) -> nn.Module:
    model = _load(base)
    tensors = {name: checkpoint.read(name).float() for name in checkpoint.names()}
    if not checkpoint.is_lora:
        model.load_state_dict(tensors)
        return model
    contract = checkpoint.contract
    model.add_adapter(
        LoraConfig(
            r=contract["lora_rank"],
            lora_alpha=contract["lora_alpha"],
            target_modules=contract["lora_target_modules"],
        )
    )
    result = set_peft_model_state_dict(model, tensors)
    assert not result.unexpected_keys
    return model


def _outputs(model: nn.Module) -> Tensor:
    """The model's velocity on fixed random inputs of its own sizes."""
    config = model.config
    generator = torch.Generator().manual_seed(0)
    latents = torch.randn(2, 16, config.in_channels, generator=generator)
    text = torch.randn(2, 7, config.joint_attention_dim, generator=generator)
    return model(
        hidden_states=latents,
        encoder_hidden_states=text,
        encoder_hidden_states_mask=None,
        timestep=torch.tensor([0.3, 0.8]),
        img_shapes=[[(1, 4, 4)]] * 2,
        return_dict=False,
    )[0]
