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

    An adapter is loaded both ways, by peft and as diffusers' `load_lora_weights` does; the worse of the two counts.
    The reference loads the base and puts the checkpoint's tensors into it, independently of the export's code.
    """
    plain = _outputs(_load(base))
    reference = _outputs(_trained(checkpoint, base))
    loaders = {"merged": (_merged,), "adapter": (_by_peft, _by_diffusers)}[form]
    scale = reference.norm()
    written = [_outputs(load(base, exported)) for load in loaders]
    from_trained = max(float((outputs - reference).norm() / scale) for outputs in written)
    return from_trained, min(float((outputs - plain).norm() / scale) for outputs in written)


def _merged(base: Path, exported: Path) -> nn.Module:
    return _load(exported)


def _by_peft(base: Path, exported: Path) -> nn.Module:
    return PeftModel.from_pretrained(_load(base), exported).base_model.model


def _by_diffusers(base: Path, exported: Path) -> nn.Module:
    """What `load_lora_weights` of the pipeline does, without its text encoder and VAE."""
    from diffusers.loaders import QwenImageLoraLoaderMixin as Loader

    model = _load(base)
    state, metadata = Loader.lora_state_dict(str(exported), return_lora_metadata=True)
    Loader.load_lora_into_transformer(state, transformer=model, metadata=metadata)
    return model


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
