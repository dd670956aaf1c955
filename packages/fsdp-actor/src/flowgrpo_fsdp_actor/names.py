"""The names of weights outside this process: on the wire, in checkpoints, on disk. No torch here."""

_WRAPPERS = ("_checkpoint_wrapped_module.", "_fsdp_wrapped_module.", "_orig_mod.", "base_layer.", "base_model.model.")


def strip_transport_wrappers(name: str) -> str:
    """A parameter's name without what activation checkpointing, torch.compile and peft put into it (W3).

    `transformer_blocks.0._checkpoint_wrapped_module.attn.to_q.base_layer.weight` is
    `transformer_blocks.0.attn.to_q.weight`, and `...to_q.lora_A.default.weight` is `...to_q.lora_A.weight`.
    """
    for wrapper in _WRAPPERS:
        if name.startswith(wrapper):
            name = name.removeprefix(wrapper)
        name = name.replace(f".{wrapper}", ".")
    for matrix in ("lora_A", "lora_B"):
        name = name.replace(f".{matrix}.default.", f".{matrix}.")
    return name
