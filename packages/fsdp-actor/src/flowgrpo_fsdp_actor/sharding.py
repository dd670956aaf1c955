"""From a model on the meta device to trained shards: dtypes, LoRA, FSDP2, weights, compilation.

No rank ever holds a whole copy: the model is built without storage, sharded, and each rank then reads its own
rows of each tensor from the files. Next on the reading path: `plan`.
"""

from dataclasses import replace

import torch
import torch.distributed as dist
from flowgrpo_rollout_sglang.wire.manifest import strip_transport_wrappers
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from flowgrpo_fsdp_actor.adapters.base import GenerativeModelAdapter, TrainModel
from flowgrpo_fsdp_actor.config import ActorConfig
from flowgrpo_fsdp_actor.distributed import init_lone_process_group
from flowgrpo_fsdp_actor.lora import check_trainable_boundary, initial_lora, inject_lora, is_lora
from flowgrpo_fsdp_actor.recompute import RecomputableForward, make_recomputable, recompute_first

MAX_GRAPHS = 256
"""Eight buckets of text, padded or not, in forwards of seven sizes (`join.few_sizes`) and what those leave over, and of
the parity check's."""
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def build_policy(
    config: ActorConfig, adapter: GenerativeModelAdapter, rank: int, world_size: int
) -> tuple[nn.Module, list[RecomputableForward]]:
    """The policy that `config` describes, sharded over the ranks, its weights loaded, and its blocks. Collective.

    Raises: ModelFolderError, TrainableBoundaryError.
    """
    model = adapter.load_train_model(config)
    _prepare(config, adapter, model)
    units = _shard(config, model, world_size)
    model.module.to_empty(device="cpu" if config.fsdp_cpu_offload else config.device)
    _load_in_waves(config, model, rank, world_size)
    model.module.train()
    if config.compiles:
        _compile(model)
    blocks = make_recomputable(model.module, model.blocks)
    if config.fsdp_activation_checkpointing:
        recompute_first(blocks, len(blocks))
    for unit in units:
        unit.set_reshard_after_backward(True)
    return model.module, blocks


def is_sharded(config: ActorConfig, world_size: int) -> bool:
    """Whether FSDP2 holds the model. One rank needs it only to keep a whole model's masters in another dtype, or on
    the host: adapters are never sharded."""
    lone = config.master_dtype != config.fsdp_param_dtype or config.fsdp_cpu_offload
    return world_size > 1 or (lone and not config.is_lora)


def _prepare(config: ActorConfig, adapter: GenerativeModelAdapter, model: TrainModel) -> None:
    """Dtypes, adapters and the trainable boundary, all on meta."""
    module = model.module.to(DTYPES[config.fsdp_param_dtype])
    if config.is_lora:
        targets = config.lora_target_modules or adapter.lora_target_modules
        inject_lora(module, rank=config.lora_rank, alpha=config.lora_alpha, targets=targets)
    else:
        module.requires_grad_(True)
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(DTYPES[config.master_dtype])
    check_trainable_boundary(module, config.fsdp_trainable_mode)


def _shard(config: ActorConfig, model: TrainModel, world_size: int) -> list[FSDPModule]:
    """`fully_shard` on every block and on the rest. Returns the units, none where nothing is sharded.

    Adapters are left out and whole on every rank, a few per cent of the model with their optimizer: gathering and
    casting them anew for each block is a chain of many small kernels, for which the block has to wait.
    """
    if not is_sharded(config, world_size):
        return []
    if world_size == 1:
        init_lone_process_group(config.device)
    module = model.module
    mixed = config.master_dtype != config.fsdp_param_dtype and not config.is_lora
    policy = MixedPrecisionPolicy(
        param_dtype=DTYPES[config.fsdp_param_dtype] if mixed else None,
        reduce_dtype=DTYPES[config.fsdp_reduce_dtype],
        # What goes from block to block has its dtype already: float32 rotary tables are to stay float32.
        cast_forward_inputs=False,
    )
    options = {
        "mesh": init_device_mesh(config.device, (world_size,)),
        "reshard_after_forward": config.fsdp_reshard_after_forward,
        "offload_policy": CPUOffloadPolicy() if config.fsdp_cpu_offload else OffloadPolicy(),
        "ignored_params": {p for name, p in module.named_parameters() if is_lora(name)},
    }
    units = [fully_shard(module.get_submodule(name), mp_policy=policy, **options) for name in model.blocks]
    return [*units, fully_shard(module, mp_policy=replace(policy, cast_forward_inputs=True), **options)]


def _compile(model: TrainModel) -> None:
    """torch.compile of the repeated blocks' own forward, one graph for each shape and all blocks alike.

    FSDP's hooks stay outside. A block that cannot be one graph is an error, as is a run with more shapes than
    replay's length buckets can make: both would otherwise fall back to slow code without a word.
    """
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MAX_GRAPHS)
    for name in model.blocks:
        block = model.module.get_submodule(name)
        block.forward = torch.compile(block.forward, dynamic=False, fullgraph=True)


def gathered_units(module: nn.Module) -> list[FSDPModule]:
    """The blocks that FSDP2 gathers one by one, in order; none where it does not hold the model."""
    return [unit for unit in module.modules() if isinstance(unit, FSDPModule) and unit is not module]


def keep_gathered(module: nn.Module, count: int) -> None:
    """The last `count` blocks stay gathered from their forward to their backward, which begins with them.

    To be called alike on all ranks: each gather is a collective.
    """
    units = gathered_units(module)
    for index, unit in enumerate(units):
        unit.set_reshard_after_forward(index < len(units) - count, recurse=False)


def reshard(module: nn.Module) -> None:
    """Lets go of what stayed gathered, as after a forward without a backward; all parameters are shards again."""
    for unit in module.modules():
        if isinstance(unit, FSDPModule):
            unit.reshard()


@torch.no_grad()
def _load_in_waves(config: ActorConfig, model: TrainModel, rank: int, world_size: int) -> None:
    """Fills every parameter's local rows; at most `fsdp_load_wave_size` ranks read at a time."""
    wave = config.fsdp_load_wave_size or world_size
    for first in range(0, world_size, wave):
        if first <= rank < first + wave:
            for name, parameter in model.module.named_parameters():
                _fill(config, model, strip_transport_wrappers(name), parameter)
        if world_size > wave:
            dist.barrier()


def _fill(config: ActorConfig, model: TrainModel, name: str, parameter: nn.Parameter) -> None:
    start, local = local_rows(parameter)
    if local.numel() == 0:
        return
    end = start + local.shape[0]
    if config.is_lora and is_lora(f"{name}."):
        rows = initial_lora(name, parameter.shape, config.lora_rank, config.seed)[start:end]
    else:
        rows = model.read_weight(name, start, end)
    local.copy_(rows)


def local_rows(parameter: Tensor) -> tuple[int, Tensor]:
    """The first row of `parameter` that this rank holds, and its local rows."""
    if not isinstance(parameter, DTensor):
        return 0, parameter
    _, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return offset[0], parameter.to_local()
