"""The FSDP2 actor of FlowGRPO: model adapters, LoRA, replay, clipped updates, checkpoints."""
