"""The rollout engine for speed: the real SGLang diffusion server, patched, in a process of its own.

Next on the reading path: `server.contract` (what is said to it), `server.sampler` (what it does).

Shapes: as in `request`.
"""

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
from safetensors import safe_open
from torch import Tensor

from flowgrpo_rollout_sglang.config import EngineConfig, SamplingConfig
from flowgrpo_rollout_sglang.engine import EngineError, EngineLostError
from flowgrpo_rollout_sglang.patch import copy as patched_copy
from flowgrpo_rollout_sglang.patch.insertions import PatchError
from flowgrpo_rollout_sglang.request import GroupRequest, GroupTrajectory
from flowgrpo_rollout_sglang.server.contract import ANSWER_FILE, GRAPHS_VARIABLE
from flowgrpo_rollout_sglang.sglang_process import ServerProcess
from flowgrpo_rollout_sglang.wire import VerifyReport, WeightSyncError

NATIVE_PIPELINE = "QwenImagePipeline"
_GONE_WITHIN_S = 1.0
CPU_ENVIRONMENT = {"SGLANG_DIFFUSION_PLATFORM_OVERRIDE": "cpu"}
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    # SGLang compiles a few norms of models whose width its fused kernels do not take (Qwen-Image's they do), anew
    # for every batch size: seconds of the first requests, and other bits than the request before.
    "TORCHDYNAMO_DISABLE": "1",
}
THREADS = {
    # Threads that spin while they wait for each other stall as soon as another process wants one of their cores:
    # drawing 32 candidates' noise took 0.4 s instead of 0.01 s beside one. These hold unless the user sets them.
    "cpu": {"OMP_WAIT_POLICY": "PASSIVE"},
    "cuda": {"OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": "1"},
}


class SGLangNativeGenerationEngine:
    """A `RolloutEngine` whose model lives in a server process. See `engine.RolloutEngine` for the contract.

    Args:
        config: model, device, number format, LoRA.
        port: HTTP port to try first; None, or one that is taken, lets the system choose.
    """

    def __init__(self, config: EngineConfig, port: int | None = None):
        self.config = config
        self.name = config.name
        self.policy_version = 0
        self._model_path = str(Path(config.model_path).resolve())  # the server runs in a folder of its own
        self._port = port
        self._server: ServerProcess | None = None
        self.seconds: dict[str, float] = {}
        """Engine time of the last `generate`, by part, summed over its waves."""

    # ------------------------------------------------------------------ life

    def start(self) -> None:
        """Checks the patch, launches the server and waits until it serves this model natively.

        Raises EngineError: the patch is missing, damaged or for another SGLang (with the command to run); the server
        ended or was not ready in time (with the end of its log); it fell back to another pipeline.
        """
        try:
            patched = patched_copy.ensure()
        except PatchError as error:
            raise EngineError(self.name, f"SGLang is not patched as it must be: {error}", error.remedy) from error
        if not Path(self._model_path, "model_index.json").is_file():
            raise EngineError(self.name, f"{self._model_path} is no model folder", "check --model-path")
        folder = Path(self.config.log_folder or tempfile.mkdtemp(prefix="flowgrpo-log-"))
        log = folder / f"{self.name}.sglang.log"
        arguments = server_arguments(self.config, self._model_path)
        server = ServerProcess(self.name, patched, arguments, server_environment(self.config), log)
        server.start(self.config.start_timeout_s, self._port)
        self._server = server
        try:
            self._check_identity()
            if self.config.weight_sync_mode == "adapter":
                self._make_adapter()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Ends the server and all its processes. Safe to call twice."""
        if self._server is not None:
            self._server.stop()
            self._server = None
        self.policy_version = 0

    def info(self) -> dict[str, Any]:
        """What the server says it is."""
        return self._call("GET", "/flowgrpo/info").json()

    def _check_identity(self) -> None:
        info = self.info()
        wanted = {
            "pipeline": NATIVE_PIPELINE,
            "model_path": self._model_path,
            "dtype": {"bf16": "bfloat16", "fp32": "float32"}[self.config.dtype],
            "device": self.config.device,
            "ranks": self.config.num_ranks,
        }
        found = {**info, "device": str(info["device"]).split(":")[0], "ranks": len(info["devices"])}
        if differ := [
            f"{key} is {found[key]}, expected {value}" for key, value in wanted.items() if found[key] != value
        ]:
            hint = "a pipeline other than the native one cannot roll out; see the server's log"
            raise self._loaded().error(f"not the server that was asked for: {'; '.join(differ)}", hint)

    def _make_adapter(self) -> None:
        config = self.config
        body = {
            "rank": config.lora_rank,
            "alpha": config.lora_alpha,
            "target_modules": list(config.lora_target_modules),
        }
        self._call("POST", "/flowgrpo/adapter", json=body)

    # ------------------------------------------------------------------ sampling

    def generate(self, requests: Sequence[GroupRequest]) -> list[GroupTrajectory]:
        """Draws every candidate of every request, groups of the same settings together in one request.

        Raises EngineError: while asleep or between weights; a request that the server does not take; an answer whose
        echo is not what was asked; a server that died (with the end of its log).
        """
        waves: dict[tuple, list[GroupRequest]] = {}
        for request in requests:
            waves.setdefault((request.sampling, request.sigmas, request.sde_indices), []).append(request)
        self.seconds = {}
        drawn: dict[int, GroupTrajectory] = {}
        for wave in waves.values():
            for request, trajectory in zip(wave, self._draw(wave), strict=True):
                drawn[id(request)] = trajectory
        return [drawn[id(request)] for request in requests]

    def _draw(self, wave: Sequence[GroupRequest]) -> list[GroupTrajectory]:
        body = wave_body(wave, self.config.candidates_per_forward)
        answer = self._call("POST", "/rollout/generate", json=body, headers={"accept": ANSWER_FILE}).json()
        echo, tensors = self._take(answer["file"])
        self._check_echo(body, echo)
        for part, seconds in echo["seconds"].items():
            self.seconds[part] = self.seconds.get(part, 0.0) + seconds
        return [self._trajectory(request, g, tensors, echo) for g, request in enumerate(wave)]

    def _take(self, name: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Echo and tensors of an answer in the server's folder. The tensors map the file, which loses its name."""
        path = Path(self._loaded().folder or "", Path(name).name)
        with safe_open(path, "pt") as file:
            echo = json.loads(file.metadata()["flowgrpo"])
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (no dict)
        path.unlink()
        return echo, tensors

    def _trajectory(
        self, request: GroupRequest, g: int, tensors: Mapping[str, Tensor], echo: Mapping[str, Any]
    ) -> GroupTrajectory:
        trajectory = GroupTrajectory(
            request=request,
            height=echo["height"],
            width=echo["width"],
            sigmas=tensors["sigmas"],
            latents_NUPC=tensors[f"{g}.latents_NUPC"],
            log_probs_NS=tensors[f"{g}.log_probs_NS"],
            prompt_embeds_LE=tensors[f"{g}.prompt_embeds_LE"],
            images_NHWC=tensors[f"{g}.images_NHWC"],
            policy_version=echo["policy_version"],
        )
        # A sum is finite only if every term is, and takes a twentieth of the time of looking at each.
        if not bool(trajectory.log_probs_NS.sum().isfinite() and trajectory.latents_NUPC.sum().isfinite()):
            raise self._loaded().error(f"drew values that are not finite for group {request.group_index}")
        return trajectory

    def _check_echo(self, body: Mapping[str, Any], echo: Mapping[str, Any]) -> None:
        """What the engine really used against what it was asked for: a difference is fatal."""
        asked = {
            "height": body["height"],
            "width": body["width"],
            "num_inference_steps": body["num_inference_steps"],
            "sde_type": body["rollout_sde_type"],
            "eta": body["rollout_noise_level"],
            "sigma_max": body["sigma_max"],
            "guidance_scale": body["guidance_scale"],
            "sde_indices": body["rollout_sde_step_indices"],
            "state_indices": body["rollout_return_step_indices"],
            "policy_version": self.policy_version,
            "model_path": self._model_path,
            "unversioned_updates": 0,
        }
        if "sigmas" in body:
            asked["sigmas"] = body["sigmas"]
        asked["candidates"] = [_noise_of(group) for group in body["groups"]]
        found = {**echo, "candidates": [[list(c.values()) for c in g["candidates"]] for g in echo["groups"]]}
        if differ := [f"{key}: asked {asked[key]!r}, used {found[key]!r}" for key in asked if asked[key] != found[key]]:
            raise EngineError(self.name, f"drew with other settings than it was asked for: {'; '.join(differ)}")

    # ------------------------------------------------------------------ sleep and wake

    def sleep(self, tags: Sequence[str] | None = None) -> None:
        """Frees the device memory of `tags` (None: all). Raises EngineError, also for an unknown tag."""
        self._call("POST", "/release_memory_occupation", json={"tags": None if tags is None else list(tags)})

    def wake(self, tags: Sequence[str] | None = None) -> None:
        """Brings `tags` (None: all) back, bit for bit. Raises EngineError, also for an unknown tag."""
        self._call("POST", "/resume_memory_occupation", json={"tags": None if tags is None else list(tags)})

    # ------------------------------------------------------------------ weights

    def split(self) -> dict[str, int]:
        """See `RolloutEngine.split`. Raises EngineError."""
        return self._call("POST", "/flowgrpo/weights/split", json={}).json()["dims"]

    def begin(self, manifest: str, channel: str, rank: int = 0) -> None:
        """See `RolloutEngine.begin`: JSON of a manifest and of a channel. Raises WeightSyncError, EngineError."""
        body = {"manifest": manifest, "channel": channel, "rank": rank}
        self._call("POST", "/flowgrpo/weights/begin", json=body)

    def verify(self, rank: int = 0) -> VerifyReport:
        """See `RolloutEngine.verify`. Raises WeightSyncError, EngineError."""
        answer = self._call("POST", "/flowgrpo/weights/verify", json={"rank": rank})
        return VerifyReport.from_json(answer.json()["report"])

    def commit(self, version: int) -> None:
        """See `RolloutEngine.commit`. Raises WeightSyncError, EngineError."""
        answer = self._call("POST", "/flowgrpo/weights/commit", json={"version": version})
        self.policy_version = answer.json()["policy_version"]

    def abort(self, rank: int | None = None) -> None:
        """See `RolloutEngine.abort`. Raises EngineError."""
        self._call("POST", "/flowgrpo/weights/abort", json={"rank": rank})

    # ------------------------------------------------------------------ the wire

    def _call(self, method: str, path: str, **request: Any) -> httpx.Response:
        """One exchange. Raises what the answer says: WeightSyncError, or EngineError with the server's own words."""
        server = self._loaded()
        assert server.client is not None
        try:
            answer = server.client.request(method, path, **request)
        except httpx.TransportError as error:
            # A server that dies closes its connections a moment before it is gone.
            how = server.ended(within_s=_GONE_WITHIN_S) or f"the connection broke ({type(error).__name__})"
            hint = "start a fresh engine, then send it the weights"
            raise server.error(f"{how} during {path}", hint, EngineLostError) from error
        if answer.status_code == 200:
            return answer
        try:
            said = answer.json()
            kind, detail = said["error"], said["detail"]
        except (ValueError, KeyError, TypeError):
            raise server.error(f"{path} answered {answer.status_code}: {answer.text[:500]}") from None
        if kind == "weights":
            raise self._weight_error(detail)
        if kind == "internal":
            raise server.error(f"{path} failed: {detail}")
        raise EngineError(self.name, f"{path} was refused: {detail}", said.get("hint", ""))

    def _weight_error(self, detail: str) -> WeightSyncError:
        """The server's error under this engine's name, and its rank's where it has several."""
        rank, *said = WeightSyncError.from_json(detail).args
        name = self.name if self.config.num_ranks == 1 else f"{self.name}.{rank}"
        return WeightSyncError(name, *said)

    def _loaded(self) -> ServerProcess:
        if self._server is None:
            raise EngineError(self.name, "not started", "call start() first")
        return self._server


def wave_body(wave: Sequence[GroupRequest], candidates_per_forward: int | None = None) -> dict[str, Any]:
    """The body of `POST /rollout/generate` for groups that share their sampling, sigmas and SDE steps."""
    first, sampling = wave[0], wave[0].sampling
    body: dict[str, Any] = {
        "groups": [_group_body(request, sampling) for request in wave],
        "height": sampling.height,
        "width": sampling.width,
        "num_inference_steps": sampling.num_inference_steps,
        "guidance_scale": sampling.guidance_scale,
        "rollout_sde_type": sampling.sde_type,
        "rollout_noise_level": sampling.eta,
        "sigma_max": sampling.sigma_max,
        "rollout_sde_step_indices": list(first.sde_indices),
        "rollout_return_step_indices": list(first.state_indices),
    }
    if sampling.driver_sigmas:
        body["sigmas"] = list(first.sigmas)
    if candidates_per_forward:
        body["candidates_per_forward"] = candidates_per_forward
    if sampling.init_noise_latent_shape:
        body["initial_noise_latent_shape"] = list(sampling.init_noise_latent_shape)
    return body


def _group_body(request: GroupRequest, sampling: SamplingConfig) -> dict[str, Any]:
    N = len(request.sample_ids)
    if not sampling.driver_xt:
        seed = request.noise_seed + request.group_index * N
        return {"prompt": request.prompt, "num_outputs_per_prompt": N, "seed": seed}
    return {
        "prompt": request.prompt,
        "initial_noise_group_ids": list(request.sample_ids),
        "initial_noise_seed": request.noise_seed,
        "denoise_seeds": [request.noise_seed] * N,
    }


def _noise_of(group: Mapping[str, Any]) -> list[list[Any]]:
    """[sample id, x_T seed, step seed] of each candidate that a group's body asks for."""
    if "seed" in group:
        return [["engine", group["seed"] + n, group["seed"] + n] for n in range(group["num_outputs_per_prompt"])]
    seeds = zip(group["initial_noise_group_ids"], group["denoise_seeds"], strict=True)
    return [[sample_id, group["initial_noise_seed"], seed] for sample_id, seed in seeds]


def server_environment(config: EngineConfig) -> dict[str, str]:
    """What the server's process needs beside this one's environment."""
    threads = {name: value for name, value in THREADS[config.device].items() if name not in os.environ}
    visible = {} if config.visible_devices is None else {"CUDA_VISIBLE_DEVICES": config.visible_devices}
    graphs = {GRAPHS_VARIABLE: str(int(uses_cuda_graphs(config)))}
    return ENVIRONMENT | threads | visible | graphs | (CPU_ENVIRONMENT if config.device == "cpu" else {})


def uses_cuda_graphs(config: EngineConfig) -> bool:
    """Raises EngineError where they are asked for and cannot be."""
    possible = config.device == "cuda" and config.num_gpus == 1
    if config.cuda_graphs and not possible:
        what = f"cuda_graphs = True with device = {config.device!r} and num_gpus = {config.num_gpus}"
        raise EngineError(config.name, what, "leave cuda_graphs unset: graphs are for one GPU")
    return possible if config.cuda_graphs is None else config.cuda_graphs


def server_arguments(config: EngineConfig, model_path: str) -> list[str]:
    """Of `sglang serve`. The model id decides the native pipeline, whatever the folder is called."""
    precision = config.dtype
    # Nothing replays the VAE or the text encoder; on a CPU a convolution in bf16 is slow.
    frozen = "fp32" if config.device == "cpu" else precision
    arguments = {
        "--model-type": "diffusion",
        "--backend": "sglang",
        "--model-id": "qwen-image",
        "--model-path": model_path,
        "--num-gpus": str(config.num_ranks),
        "--attention-backend": "torch_sdpa",
        "--warmup-mode": "off",
        "--dit-precision": precision,
        "--vae-precision": frozen,
        "--text-encoder-precisions": frozen,
        "--dit-cpu-offload": "false",
        "--text-encoder-cpu-offload": "false",
        "--vae-cpu-offload": "false",
    }
    if config.num_ranks > 1:
        # Layers are divided, not the candidates or their tokens: a rank then holds a part of the weights, not all.
        # The VAE is whole on each, and so are its pictures.
        arguments |= {"--tp-size": str(config.num_ranks), "--vae-config.use-parallel-decode": "false"}
    return [text for pair in arguments.items() for text in pair]
