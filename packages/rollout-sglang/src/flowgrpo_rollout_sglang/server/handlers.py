"""The scheduler process's side: one `Server` that owns the sampler, the memory and the weight receiver.

Called by: the patch, once, when SGLang's scheduler has loaded its models; afterwards by SGLang's event loop, one
command at a time. Every method answers (HTTP status, JSON or bytes); what it raises becomes a status here.

An engine over several devices has such a process for each, and each does every command (`ranks`); the first one's
answer is the engine's.
"""

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from safetensors.torch import save_file
from sglang.multimodal_gen.runtime.entrypoints.post_training.io_struct import (
    ReleaseMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
)
from sglang.multimodal_gen.runtime.pipelines_core.schedule_batch import OutputBatch
from torch import Tensor

from flowgrpo_rollout_sglang.patch import insertions
from flowgrpo_rollout_sglang.server.adapter import Adapter, base_parameters, modules_and_rank
from flowgrpo_rollout_sglang.server.contract import GRAPHS_VARIABLE, Command, ContractError, Wave, parse
from flowgrpo_rollout_sglang.server.launch import FOLDER_VARIABLE
from flowgrpo_rollout_sglang.server.memory import Memory, UnknownTagError
from flowgrpo_rollout_sglang.server.ranks import Answer, Ranks, RefusedTogetherError, split_dims, whole_shape
from flowgrpo_rollout_sglang.server.sampler import Drawn, Sampler
from flowgrpo_rollout_sglang.wire import (
    WeightReceiver,
    WeightSender,
    WeightSyncError,
    even_shards,
    sharded,
    sharded_shapes,
    strip_transport_wrappers,
)
from flowgrpo_rollout_sglang.wire.cuda_memory import device_uuid

logger = logging.getLogger(__name__)


class RefusedError(RuntimeError):
    """The server is not in a state to do that, and says what to do first."""


def install(scheduler: Any) -> None:
    """Puts a Server behind SGLang's scheduler. Called by the patch."""
    args, group = scheduler.server_args, scheduler.worker.tp_group
    if args.num_gpus != args.tp_size:
        raise RuntimeError(f"num_gpus {args.num_gpus}, tp_size {args.tp_size}: devices of an engine only divide layers")
    ranks = Ranks(group.rank_in_group, group.world_size, group.cpu_group)
    server = Server(scheduler.worker.pipeline, args, ranks)
    scheduler.worker.flowgrpo_memory = server.memory
    scheduler.worker.pipeline.flowgrpo = server
    scheduler.request_handlers[Command] = server.handle
    # Stock's own messages for the same, should anything inside SGLang send them.
    scheduler.request_handlers[ReleaseMemoryOccupationReqInput] = lambda _: server.handle([Command("release", (None,))])
    scheduler.request_handlers[ResumeMemoryOccupationReqInput] = lambda _: server.handle([Command("resume", (None,))])


class Server:
    """All that one engine can be asked to do."""

    def __init__(self, pipeline: Any, server_args: Any, ranks: Ranks):
        self._args, self._ranks = server_args, ranks
        self._pipeline = pipeline
        self._sampler = Sampler(pipeline, server_args, cuda_graphs=os.environ.get(GRAPHS_VARIABLE) == "1")
        frozen = [pipeline.get_module(name) for name in ("text_encoder", "vae")]
        self.memory = Memory({"weights": [self._sampler.transformer], "frozen": frozen}, self._sampler.drop_graphs)
        self._adapter: Adapter | None = None
        self._name = "sglang" if ranks.size == 1 else str(ranks.rank)
        self._receiver = WeightReceiver(
            lambda: base_parameters(self._sampler.transformer), engine=self._name, mode="full"
        )
        self._unversioned = 0
        self._answers = 0

    def handle(self, requests: Sequence[Command]) -> OutputBatch:
        """SGLang's handler for our commands."""
        try:
            answer = self._ranks.conclude(self._answer(requests[0]))
        except RefusedTogetherError as refused:
            answer = refused.answer
        return OutputBatch(output=answer)

    def _answer(self, command: Command) -> Answer:
        try:
            return getattr(self, command.name)(*command.arguments)
        except RefusedTogetherError:
            raise
        except WeightSyncError as error:
            return 409, {"error": "weights", "detail": error.to_json()}
        except (ContractError, UnknownTagError) as error:
            return 400, {"error": "request", "detail": str(error), "hint": getattr(error, "hint", "")}
        except RefusedError as error:
            return 409, {"error": "refused", "detail": str(error)}
        except Exception as error:  # the boundary of the process: the caller must read what happened
            logger.exception("command %s failed", command.name)
            where = "" if self._ranks.size == 1 else f"on rank {self._ranks.rank}: "
            return 500, {"error": "internal", "detail": f"{where}{type(error).__name__}: {error}"}

    # ------------------------------------------------------------------ rollout

    def generate(self, body: Mapping[str, Any], to_file: bool) -> Answer:
        """Draws one wave. The answer is a safetensors file, everything but tensors in its header.

        With `to_file` it lies in the server's folder under the name that is answered, and the engine removes it;
        else it comes as uint8.
        """
        wave = parse(body)
        if self.memory.asleep:
            raise RefusedError(f"asked to generate while {sorted(self.memory.asleep)} sleep; resume them first")
        with self._receiver.serving() as version:
            self._ranks.agree()  # a rank that drew alone would wait for the others for ever
            begun = time.perf_counter()
            sigmas, drawn, seconds = self._sampler.draw(wave)
            seconds["engine_s"] = time.perf_counter() - begun
        if self._ranks.size > 1:
            self._check_alike(drawn)
            if self._ranks.rank > 0:
                return 200, None
        tensors = {"sigmas": torch.tensor(sigmas, dtype=torch.float32)}
        for g, group in enumerate(drawn):
            tensors |= {f"{g}.{name}": tensor.contiguous() for name, tensor in vars(group).items()}
        header = {"flowgrpo": json.dumps(self._echo(wave, sigmas, version, seconds))}
        if not to_file:
            return 200, np.frombuffer(save_tensors(tensors, metadata=header), dtype=np.uint8)
        self._answers += 1
        name = f"answer-{self._answers}.safetensors"
        save_file(tensors, Path(os.environ[FOLDER_VARIABLE]) / name, metadata=header)
        return 200, {"file": name}

    def _check_alike(self, drawn: Sequence[Drawn]) -> None:
        """Ranks draw the same noise and sum the same products: anything else means that they hold different things."""
        digest = hashlib.sha256(b"".join(group.log_probs_NS.numpy().tobytes() for group in drawn)).hexdigest()
        if len(set(self._ranks.exchange(digest))) > 1:
            raise RuntimeError(f"the {self._ranks.size} ranks drew different log-probs for the same request")

    def _echo(self, wave: Wave, sigmas: Sequence[float], version: int, seconds: Mapping[str, float]) -> dict[str, Any]:
        """What was really used, for the driver to compare with what it asked for."""
        settings = asdict(wave) | {"sigmas": list(sigmas), "guidance_scale": 1.0}
        return {
            **settings,
            "policy_version": version,
            "unversioned_updates": self._unversioned,
            "model_path": self._args.model_path,
            "seconds": dict(seconds),
        }

    def info(self) -> Answer:
        """What this server is: read once after the start, and by whoever debugs."""
        sampler, config = self._sampler, self._args.pipeline_config
        manifest, _ = insertions.load()
        return 200, {
            "pipeline": type(self._pipeline).__name__,
            "model_path": self._args.model_path,
            "sglang": installed_version("sglang"),
            "patch": manifest.digest,
            "device": str(sampler.device),
            "dtype": str(sampler.dtype).removeprefix("torch."),
            "devices": self._ranks.exchange(_identity(sampler.device)),
            "fused_rope": sampler.fused_rope(),
            "attention": sampler.attention,
            "fused_gelu": sampler.fused_gelu,
            "cuda_graphs": None if sampler.graphs is None else sampler.graphs.recorded,
            "vae_dtype": config.vae_precision,
            "vae_scale_factor": sampler.vae_scale_factor,
            "latent_channels": sampler.latent_channels,
            "policy_version": self._receiver.version,
            "asleep": sorted(self.memory.asleep),
            "adapter": None if self._adapter is None else {"rank": self._adapter.rank, "alpha": self._adapter.alpha},
            "unversioned_updates": self._unversioned,
        }

    # ------------------------------------------------------------------ sleep and wake

    def release(self, tags: Sequence[str] | None) -> Answer:
        begun = time.perf_counter()
        freed = self.memory.release(tags)
        return 200, self._slept("released", freed, begun)

    def resume(self, tags: Sequence[str] | None) -> Answer:
        begun = time.perf_counter()
        filled = self.memory.resume(tags)
        return 200, self._slept("resumed", filled, begun)

    def _slept(self, what: str, nbytes: int, begun: float) -> dict[str, Any]:
        asleep = sorted(self.memory.asleep)
        seconds = time.perf_counter() - begun
        return {"success": True, "asleep": asleep, "message": what, "bytes": nbytes, "seconds": seconds}

    # ------------------------------------------------------------------ weights

    def weights_split(self) -> Answer:
        """Which dimension of each tensor of a sync the ranks divide; the others each of them takes whole."""
        names = base_parameters(self._sampler.transformer) if self._adapter is None else self._adapter.targets()
        return 200, {"ranks": self._ranks.size, "dims": {n: d for n, d in self._split_dims().items() if n in names}}

    def weights_begin(self, manifest: str, channel: str, rank: int) -> Answer:
        """Opens the transaction of one rank: each takes its weights from the trainer's rank of its own card."""
        self._ensure_weights_awake()
        if self._is_mine(rank):
            self._receiver.begin(manifest, channel)
            self.memory.touch("weights", self._synced())
        return 200, {}

    def _synced(self) -> Collection[Tensor] | None:
        """The tensors that a sync writes; None: all of the transformer."""
        return None if self._adapter is None else self._adapter.targets().values()

    def weights_verify(self, rank: int) -> Answer:
        mine = self._is_mine(rank)
        return 200, {"report": self._ranks.exchange(self._receiver.verify().to_json() if mine else None)[rank]}

    def weights_commit(self, version: int) -> Answer:
        self._receiver.ensure_verified(version)
        self._ranks.agree()  # all of them commit, or none
        self._receiver.commit(version)
        self._unversioned = 0  # a complete sync: nothing of an earlier write is left
        return 200, {"policy_version": self._receiver.version}

    def weights_abort(self, rank: int | None) -> Answer:
        """Ends the open transaction of one rank (None: of every rank)."""
        if rank is None or self._is_mine(rank):
            self._receiver.abort()
        return 200, {}

    def _is_mine(self, rank: int) -> bool:
        if not 0 <= rank < self._ranks.size:
            raise ContractError((f"rank {rank} of an engine of {self._ranks.size}",))
        return rank == self._ranks.rank

    def _split_dims(self) -> dict[str, int]:
        if self._ranks.size == 1:
            return {}
        return split_dims(self._sampler.transformer) | (self._adapter.split_dims() if self._adapter else {})

    def adapter(self, rank: int, alpha: float, target_modules: Sequence[str]) -> Answer:
        """Gives the transformer an adapter of zeros. From then on it takes adapter syncs alone."""
        self._ensure_weights_awake()
        self._receiver.ensure_serving()
        self._ranks.agree()
        self._sampler.drop_graphs()
        if self._adapter is not None:
            self._adapter.remove()
            self._adapter = None
        try:
            self._adapter = adapter = Adapter(self._sampler.transformer, rank, alpha, target_modules)
        except ValueError as error:
            raise ContractError((str(error),)) from None
        version = self._receiver.version
        self._receiver.close()
        self._receiver = WeightReceiver(adapter.targets, engine=self._name, mode="adapter", version=version)
        self.memory.touch("weights")
        return 200, {"layers": len(adapter.targets()) // 2}

    def lora_from_tensors(self, body: bytes, rank: int, alpha: float, version: int | None) -> Answer:
        """Sets the adapter from a safetensors body: all of it or nothing, and the count that was applied.

        Names may carry `transformer.`, PEFT's prefixes and its adapter name. Another rank, alpha or set of layers
        than before replaces the adapter as a whole.
        """
        sent = load_tensors(body)
        tensors = {strip_transport_wrappers(name).removeprefix("transformer."): t for name, t in sent.items()}
        if len(tensors) != len(sent):
            raise ContractError((f"{len(sent)} tensors with {len(tensors)} different names once prefixes are off",))
        try:
            modules, sent_rank = modules_and_rank({name: t.shape for name, t in tensors.items()})
        except ValueError as error:
            raise ContractError((str(error),)) from None
        if sent_rank != rank:
            raise ContractError((f"rank {rank} was stated, the tensors have rank {sent_rank}",))
        self._check_lora_shapes(tensors, modules)
        if not self._adapter_is(rank, alpha, tensors):
            self.adapter(rank, alpha, modules)
        self._write_lora(tensors, self._receiver.version + 1 if version is None else version)
        return 200, {"success": True, "applied": len(tensors), "policy_version": self._receiver.version}

    def _adapter_is(self, rank: int, alpha: float, tensors: Mapping[str, Tensor]) -> bool:
        adapter = self._adapter
        return adapter is not None and (adapter.rank, adapter.alpha, adapter.targets().keys()) == (
            rank,
            alpha,
            tensors.keys(),
        )

    def _check_lora_shapes(self, tensors: Mapping[str, Tensor], modules: Sequence[str]) -> None:
        """Against the base layers, before anything of the model is changed."""
        base, dims = base_parameters(self._sampler.transformer), self._split_dims()
        if unknown := [m for m in modules if f"{m}.weight" not in base]:
            raise ContractError((f"unknown layers {', '.join(unknown)}; nothing was applied",))
        for module in modules:
            weight = f"{module}.weight"
            out_features, in_features = whole_shape(weight, tuple(base[weight].shape), dims, self._ranks.size)
            A, B = tensors[f"{module}.lora_A.weight"], tensors[f"{module}.lora_B.weight"]
            if A.shape[1] != in_features or B.shape[0] != out_features:
                why = f"{module} is {out_features} x {in_features}; A {list(A.shape)}, B {list(B.shape)} do not fit"
                raise ContractError((why,))

    def _write_lora(self, tensors: Mapping[str, Tensor], version: int) -> None:
        """Through the same transaction as every other sync, with this process at both ends."""
        shapes = [(name, tensor.shape) for name, tensor in tensors.items()]
        shards = even_shards(shapes, self._split_dims(), self._ranks.rank, self._ranks.size)
        sender = WeightSender(wire_dtype="fp32" if self._sampler.dtype == torch.float32 else "bf16")
        try:
            manifest = sender.manifest(sharded_shapes(shapes, shards), version=version, mode="adapter")
            sender.send(sharded(tensors.items(), shards), manifest, self._receiver)
            self.memory.touch("weights", self._synced())
            self._ranks.agree()
            self._receiver.commit(version)
        finally:
            sender.close()

    def _ensure_weights_awake(self) -> None:
        if "weights" in self.memory.asleep:
            raise RefusedError('asked to take weights while they sleep; resume ["weights"] first')

    # ------------------------------------------------------------------ SGLang's own tensor update

    def unversioned_update_refusal(self) -> str | None:
        """Why SGLang's own route may not write now, or None."""
        checks: tuple[Callable[[], None], ...] = (self._ensure_weights_awake, self._receiver.ensure_serving)
        for check in checks:
            try:
                check()
            except (RefusedError, WeightSyncError) as error:
                return str(error)
        if self._ranks.size > 1:
            return f"this engine holds its weights in {self._ranks.size} parts: send them in a weight transaction"
        if self._adapter is not None:
            return "the transformer carries a LoRA adapter: a full-weight update is refused; send adapter tensors"
        return None

    def note_unversioned_update(self) -> None:
        self._unversioned += 1
        self.memory.touch("weights")


def _identity(device: torch.device) -> str:
    """The card, whatever its index in this process; "cpu" on the CPU."""
    return device_uuid(device) if device.type == "cuda" else "cpu"
