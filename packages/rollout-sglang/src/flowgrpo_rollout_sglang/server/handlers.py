"""The scheduler process's side: one `Server` that owns the sampler, the memory and the weight receiver.

Called by: the patch, once, when SGLang's scheduler has loaded its models; afterwards by SGLang's event loop, one
command at a time. Every method answers (HTTP status, JSON or bytes); what it raises becomes a status here.
"""

import json
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
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
from flowgrpo_rollout_sglang.server.contract import Command, ContractError, Wave, parse
from flowgrpo_rollout_sglang.server.launch import FOLDER_VARIABLE
from flowgrpo_rollout_sglang.server.memory import Memory, UnknownTagError
from flowgrpo_rollout_sglang.server.sampler import Sampler
from flowgrpo_rollout_sglang.wire import WeightReceiver, WeightSender, WeightSyncError, strip_transport_wrappers

logger = logging.getLogger(__name__)
Answer = tuple[int, Any]


class RefusedError(RuntimeError):
    """The server is not in a state to do that, and says what to do first."""


def install(scheduler: Any) -> None:
    """Puts a Server behind SGLang's scheduler. Called by the patch."""
    if scheduler.server_args.num_gpus != 1:
        raise RuntimeError(
            f"num_gpus = {scheduler.server_args.num_gpus}: this engine runs on one device; start several"
        )
    server = Server(scheduler.worker.pipeline, scheduler.server_args)
    scheduler.worker.flowgrpo_memory = server.memory
    scheduler.worker.pipeline.flowgrpo = server
    scheduler.request_handlers[Command] = server.handle
    # Stock's own messages for the same, should anything inside SGLang send them.
    scheduler.request_handlers[ReleaseMemoryOccupationReqInput] = lambda _: server.handle([Command("release", (None,))])
    scheduler.request_handlers[ResumeMemoryOccupationReqInput] = lambda _: server.handle([Command("resume", (None,))])


class Server:
    """All that one engine can be asked to do."""

    def __init__(self, pipeline: Any, server_args: Any):
        self._args = server_args
        self._pipeline = pipeline
        self._sampler = Sampler(pipeline, server_args)
        frozen = [pipeline.get_module(name) for name in ("text_encoder", "vae")]
        self.memory = Memory({"weights": [self._sampler.transformer], "frozen": frozen})
        self._adapter: Adapter | None = None
        self._receiver = WeightReceiver(
            lambda: base_parameters(self._sampler.transformer), engine="sglang", mode="full"
        )
        self._unversioned = 0
        self._answers = 0

    def handle(self, requests: Sequence[Command]) -> OutputBatch:
        """SGLang's handler for our commands."""
        return OutputBatch(output=self._answer(requests[0]))

    def _answer(self, command: Command) -> Answer:
        try:
            return getattr(self, command.name)(*command.arguments)
        except WeightSyncError as error:
            return 409, {"error": "weights", "detail": error.to_json()}
        except (ContractError, UnknownTagError) as error:
            return 400, {"error": "request", "detail": str(error)}
        except RefusedError as error:
            return 409, {"error": "refused", "detail": str(error)}
        except Exception as error:  # the boundary of the process: the caller must read what happened
            logger.exception("command %s failed", command.name)
            return 500, {"error": "internal", "detail": f"{type(error).__name__}: {error}"}

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
            begun = time.perf_counter()
            sigmas, drawn, seconds = self._sampler.draw(wave)
            seconds["engine_s"] = time.perf_counter() - begun
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
            "fused_rope": sampler.fused_rope(),
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

    def weights_begin(self, manifest: str, channel: str) -> Answer:
        self._ensure_weights_awake()
        self._receiver.begin(manifest, channel)
        self.memory.touch("weights")
        return 200, {}

    def weights_verify(self) -> Answer:
        return 200, {"report": self._receiver.verify().to_json()}

    def weights_commit(self, version: int) -> Answer:
        self._receiver.commit(version)
        self._unversioned = 0  # a complete sync: nothing of an earlier write is left
        return 200, {"policy_version": self._receiver.version}

    def weights_abort(self) -> Answer:
        self._receiver.abort()
        return 200, {}

    def adapter(self, rank: int, alpha: float, target_modules: Sequence[str]) -> Answer:
        """Gives the transformer an adapter of zeros. From then on it takes adapter syncs alone."""
        self._ensure_weights_awake()
        self._receiver.ensure_serving()
        if self._adapter is not None:
            self._adapter.remove()
            self._adapter = None
        try:
            self._adapter = adapter = Adapter(self._sampler.transformer, rank, alpha, target_modules)
        except ValueError as error:
            raise ContractError((str(error),)) from None
        version = self._receiver.version
        self._receiver.close()
        self._receiver = WeightReceiver(adapter.targets, engine="sglang", mode="adapter", version=version)
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
        base = base_parameters(self._sampler.transformer)
        if unknown := [m for m in modules if f"{m}.weight" not in base]:
            raise ContractError((f"unknown layers {', '.join(unknown)}; nothing was applied",))
        for module in modules:
            out_features, in_features = base[f"{module}.weight"].shape
            A, B = tensors[f"{module}.lora_A.weight"], tensors[f"{module}.lora_B.weight"]
            if A.shape[1] != in_features or B.shape[0] != out_features:
                why = f"{module} is {out_features} x {in_features}; A {list(A.shape)}, B {list(B.shape)} do not fit"
                raise ContractError((why,))

    def _write_lora(self, tensors: Mapping[str, Tensor], version: int) -> None:
        """Through the same transaction as every other sync, with this process at both ends."""
        sender = WeightSender(wire_dtype="fp32" if self._sampler.dtype == torch.float32 else "bf16")
        try:
            manifest = sender.manifest([(n, t.shape) for n, t in tensors.items()], version=version, mode="adapter")
            sender.send(iter(tensors.items()), manifest, self._receiver)
            self.memory.touch("weights")
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
        if self._adapter is not None:
            return "the transformer carries a LoRA adapter: a full-weight update is refused; send adapter tensors"
        return None

    def note_unversioned_update(self) -> None:
        self._unversioned += 1
        self.memory.touch("weights")
