"""The in-process rollout engine: plain diffusers parts, the same request and answer as the server's engine.

It is the default on a laptop and in CI, and the oracle that the SGLang engine is checked against. Every
formula it uses is `flowgrpo_math`'s and every forward is `velocity.qwen_image_velocity`, both shared with
the actor's replay: with the same weights and the same candidates in a forward, replay agrees bit for bit.

Shapes: as in `request`; B candidates of one forward, Z latent channels of the VAE, h x w its latent grid.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

import torch
from diffusers import QwenImagePipeline
from flowgrpo_math.transition import transition, transition_logp, transition_mean, transition_sample
from peft import LoraConfig
from torch import Tensor, nn

from flowgrpo_rollout_sglang.config import EngineConfig
from flowgrpo_rollout_sglang.device_memory import asked_and_free
from flowgrpo_rollout_sglang.engine import EngineError, EngineOutOfMemory
from flowgrpo_rollout_sglang.noise import candidate_noise, initial_latent, unpack_latents
from flowgrpo_rollout_sglang.one_frame import skip_empty_frames
from flowgrpo_rollout_sglang.request import GroupRequest, GroupTrajectory
from flowgrpo_rollout_sglang.text_window import LONG_PROMPT_HINT, MAX_TEXT_TOKENS, text_tokens, too_long
from flowgrpo_rollout_sglang.velocity import qwen_image_velocity
from flowgrpo_rollout_sglang.wire import VerifyReport, WeightReceiver, strip_transport_wrappers

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
TAGS = ("weights", "frozen")
CANDIDATES = {"cpu": 64, "cuda": 16}
"""Joined in one forward where the settings do not say."""
DECODED_AT_ONCE = 32
LOWER_RESIDENT = (
    "what else is on the card: set --offload-train, --reward-runtime cpu or remote, or use cards with more memory"
)
LOWER_DRAWING = f"--candidates-per-forward, or the size of the pictures (--sampling-config), or {LOWER_RESIDENT}"


class DiffusersEngine:
    """A `RolloutEngine` in this process. See `engine.RolloutEngine` for the contract."""

    def __init__(self, config: EngineConfig):
        self.config = config
        self.name = config.name
        self._pipeline: QwenImagePipeline | None = None
        self._receiver: WeightReceiver | None = None
        self._asleep: set[str] = set()

    # ------------------------------------------------------------------ life

    def start(self) -> None:
        """Loads the model folder. Raises EngineError naming the part that is missing."""
        folder = Path(self.config.model_path)
        if missing := [part for part in ("model_index.json", "transformer", "vae") if not (folder / part).exists()]:
            raise EngineError(self.name, f"model folder {folder} lacks {', '.join(missing)}", "check --model-path")
        if self.config.num_gpus > 1:
            what = f"num_gpus = {self.config.num_gpus}: this engine runs on one device"
            raise EngineError(self.name, what, "set --rollout-num-gpus-per-engine 1, or use the SGLang engine")
        with self._memory_for("loading the pipeline", LOWER_RESIDENT):
            pipeline = QwenImagePipeline.from_pretrained(folder, torch_dtype=DTYPES[self.config.dtype])
            pipeline.to(self.config.device)
            pipeline.transformer.requires_grad_(False).eval()
            skip_empty_frames(pipeline.vae)
            if self.config.weight_sync_mode == "adapter":
                self._add_adapter(pipeline.transformer)
        self._pipeline = pipeline
        self._receiver = WeightReceiver(self._targets, self.name, mode=self.config.weight_sync_mode)
        self._encode = lru_cache(maxsize=4096)(self._encode_uncached)

    def stop(self) -> None:
        self._pipeline = self._receiver = None

    @property
    def policy_version(self) -> int:
        return self._loaded_receiver().version

    # ------------------------------------------------------------------ sampling

    @torch.no_grad()
    def generate(self, requests: Sequence[GroupRequest]) -> list[GroupTrajectory]:
        """Draws every candidate of every request. See `RolloutEngine.generate`. Raises also EngineOutOfMemory."""
        if self._asleep:
            raise EngineError(self.name, f"asked to generate while {sorted(self._asleep)} sleep", "call wake() first")
        if any(not (r.sampling.driver_xt and r.sampling.driver_sigmas) for r in requests):
            raise EngineError(
                self.name,
                "driver_xt or driver_sigmas false means a server's own noise or schedule, which this engine lacks",
                "leave both true, or use SGLangNativeGenerationEngine",
            )
        by_request: dict[int, GroupTrajectory] = {}
        with self._loaded_receiver().serving() as version:
            for batch in self._batches(requests):
                count = sum(len(request.sample_ids) for request in batch)
                with self._memory_for(f"denoising {count} candidates", LOWER_DRAWING):
                    drawn = self._sample(batch, version)
                by_request |= {id(request): trajectory for request, trajectory in zip(batch, drawn, strict=True)}
        return [by_request[id(request)] for request in requests]

    def _batches(self, requests: Sequence[GroupRequest]) -> Iterator[list[GroupRequest]]:
        """Whole groups that share a schedule, up to the limit of candidates; their texts may differ in length."""
        limit = self.config.candidates_per_forward or CANDIDATES[self.config.device]
        waiting: dict[tuple, list[GroupRequest]] = {}
        for request in requests:
            key = (request.sampling, request.sigmas, request.sde_indices)
            batch = waiting.setdefault(key, [])
            if batch and sum(len(r.sample_ids) for r in batch) + len(request.sample_ids) > limit:
                yield waiting.pop(key)
                batch = waiting.setdefault(key, [])
            batch.append(request)
        yield from waiting.values()

    def _texts(self, batch: list[GroupRequest]) -> tuple[Tensor, Tensor | None]:
        """[B, L, E] one text per candidate and its mask [B, L]; no mask where no text is padded."""
        texts = [self._encode(request.prompt) for request in batch for _ in request.sample_ids]
        embeds_BLE = nn.utils.rnn.pad_sequence(texts, batch_first=True)
        lengths_B = torch.tensor([len(text) for text in texts], device=embeds_BLE.device)
        mask_BL = torch.arange(embeds_BLE.shape[1], device=embeds_BLE.device)[None] < lengths_B[:, None]
        return embeds_BLE, None if bool(mask_BL.all()) else mask_BL

    def _sample(self, batch: list[GroupRequest], version: int) -> list[GroupTrajectory]:
        """The denoising loop for groups that share a schedule."""
        first = batch[0]
        pipeline, device = self._loaded(), self.config.device
        latent_shape = self._latent_shape(first)
        candidates = [(request, sample_id) for request in batch for sample_id in request.sample_ids]
        x_BPC = torch.stack([initial_latent(r.noise_seed, s, latent_shape) for r, s in candidates]).to(device)
        counts = [len(r.sample_ids) for r in batch]
        embeds_BLE, mask_BL = self._texts(batch)
        sampling, keep = first.sampling, set(first.state_indices)
        states, log_probs = ([x_BPC] if 0 in keep else []), []
        for k, (sigma, sigma_next) in enumerate(zip(first.sigmas[:-1], first.sigmas[1:], strict=True)):
            sigma_B = torch.full((len(candidates),), sigma, dtype=torch.float64)
            next_B = torch.full_like(sigma_B, sigma_next)
            velocity_BPC = qwen_image_velocity(
                pipeline.transformer,
                x_BPC,
                sigma_B.float().to(device),
                embeds_BLE,
                mask_BL,
                height=sampling.height,
                width=sampling.width,
                vae_scale_factor=pipeline.vae_scale_factor,
            )
            if k in first.sde_indices:
                step = transition(sampling.sde_type, sigma_B, next_B, eta=sampling.eta, sigma_max=sampling.sigma_max)
                noise = [candidate_noise(r.noise_seed, s, k, tuple(x_BPC.shape[1:])) for r, s in candidates]
                x_next_BPC = transition_sample(x_BPC, velocity_BPC, torch.stack(noise).to(device), step)
                log_probs.append(transition_logp(x_BPC, velocity_BPC, x_next_BPC, step))
            else:
                x_next_BPC = transition_mean(x_BPC, velocity_BPC, transition("ode", sigma_B, next_B, eta=0.0))
            x_BPC = x_next_BPC
            if k + 1 in keep:
                states.append(x_BPC)
        with self._memory_for(f"decoding {len(candidates)} pictures", LOWER_DRAWING):
            images_BHWC = self._decode(x_BPC, latent_shape)
        empty = torch.empty(len(candidates), 0)
        states_BUPC = torch.stack(states, dim=1) if states else empty
        log_probs_BS = torch.stack(log_probs, dim=1) if log_probs else empty
        parts = [t.cpu().split(counts) for t in (states_BUPC, log_probs_BS, images_BHWC)]
        return [
            GroupTrajectory(
                request=request,
                height=images.shape[1],
                width=images.shape[2],
                sigmas=torch.tensor(request.sigmas, dtype=torch.float32),
                latents_NUPC=latents,
                log_probs_NS=logps,
                prompt_embeds_LE=self._encode(request.prompt).cpu(),
                images_NHWC=images,
                policy_version=version,
            )
            for request, latents, logps, images in zip(batch, *parts, strict=True)
        ]

    def _latent_shape(self, request: GroupRequest) -> tuple[int, int, int]:
        """(Z, h, w) of the VAE's latent grid. Raises EngineError for a size that does not divide."""
        pipeline, sampling = self._loaded(), request.sampling
        multiple = pipeline.vae_scale_factor * 2
        if sampling.height % multiple or sampling.width % multiple:
            size = f"{sampling.height} x {sampling.width}"
            raise EngineError(self.name, f"pictures of {size} pixels: sides must divide by {multiple}")
        grid = (sampling.height // pipeline.vae_scale_factor, sampling.width // pipeline.vae_scale_factor)
        shape = (pipeline.transformer.config.in_channels // 4, *grid)
        asked = sampling.init_noise_latent_shape
        if asked is not None and tuple(asked) != shape:
            raise EngineError(self.name, f"init_noise_latent_shape {list(asked)}, but this model needs {list(shape)}")
        return shape

    def _encode_uncached(self, prompt: str) -> Tensor:
        """[L, E], unpadded. Raises EngineError if the prompt exceeds the text window."""
        pipeline = self._loaded()
        if (tokens := text_tokens(pipeline.tokenizer, prompt)) > MAX_TEXT_TOKENS:  # the pipeline would cut it
            raise EngineError(self.name, too_long(tokens, prompt), LONG_PROMPT_HINT)
        with self._memory_for("encoding a prompt", LOWER_RESIDENT):
            embeds_1LE, _ = pipeline.encode_prompt([prompt], device=self.config.device)
        return embeds_1LE[0]

    def _decode(self, x_BPC: Tensor, latent_shape: tuple[int, int, int]) -> Tensor:
        """Packed latents to uint8 pictures [B, H, W, 3], in slices that bound the VAE's memory."""
        vae = self._loaded().vae
        latents = unpack_latents(x_BPC, *latent_shape[1:])[:, :, None].to(vae.dtype)
        moments = (
            torch.tensor(m).view(1, -1, 1, 1, 1).to(latents) for m in (vae.config.latents_std, vae.config.latents_mean)
        )
        std, mean = moments
        parts = latents.split(DECODED_AT_ONCE)
        images = [vae.decode(part * std + mean, return_dict=False)[0][:, :, 0] for part in parts]
        pixels_BCHW = (torch.cat(images).float() * 127.5 + 127.5).clamp(0, 255).round().to(torch.uint8)
        return pixels_BCHW.permute(0, 2, 3, 1).contiguous()

    # ------------------------------------------------------------------ sleep and wake

    def sleep(self, tags: Sequence[str] | None = None) -> None:
        """Moves the modules of `tags` to the host. Raises EngineError for an unknown tag."""
        for tag in self._known(tags):
            for module in self._modules(tag):
                module.to("cpu")
            self._asleep.add(tag)
        if self.config.device == "cuda":
            self._encode.cache_clear()
            torch.cuda.empty_cache()

    def wake(self, tags: Sequence[str] | None = None) -> None:
        """Moves them back. Parameters keep their identity, so an open weight target stays valid."""
        for tag in self._known(tags):
            with self._memory_for(f"waking {tag}", LOWER_RESIDENT):
                for module in self._modules(tag):
                    module.to(self.config.device)
            self._asleep.discard(tag)

    def _known(self, tags: Sequence[str] | None) -> Sequence[str]:
        if unknown := set(tags or ()) - set(TAGS):
            raise EngineError(self.name, f"unknown tags {sorted(unknown)}", f"use {', '.join(TAGS)}")
        return TAGS if tags is None else tags

    def _modules(self, tag: str) -> tuple[nn.Module, ...]:
        pipeline = self._loaded()
        return (pipeline.transformer,) if tag == "weights" else (pipeline.vae, pipeline.text_encoder)

    # ------------------------------------------------------------------ weights

    def begin(self, manifest: str, channel: str) -> None:
        if "weights" in self._asleep:
            raise EngineError(self.name, "asked to take weights while they sleep", 'call wake(["weights"]) first')
        self._loaded_receiver().begin(manifest, channel)

    def verify(self) -> VerifyReport:
        return self._loaded_receiver().verify()

    def commit(self, version: int) -> None:
        self._loaded_receiver().commit(version)

    def abort(self) -> None:
        self._loaded_receiver().abort()

    def _add_adapter(self, transformer: nn.Module) -> None:
        """LoRA layers as the actor has them, so that one forward gives the same bits on both sides."""
        config = self.config
        transformer.add_adapter(
            LoraConfig(
                r=config.lora_rank, lora_alpha=config.lora_alpha, target_modules=list(config.lora_target_modules)
            )
        )
        transformer.requires_grad_(False)

    def _targets(self) -> Mapping[str, Tensor]:
        """What a transaction may write, by wire name."""
        named = dict(self._loaded().transformer.named_parameters())
        if self.config.weight_sync_mode == "full":
            return named
        return {strip_transport_wrappers(name): p for name, p in named.items() if ".lora_" in name}

    @contextmanager
    def _memory_for(self, phase: str, lower: str) -> Iterator[None]:
        """Says where the card ran out of memory, and what to lower."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            asked, free = asked_and_free(str(error))
            raise EngineOutOfMemory(self.name, phase, asked, free, lower, str(error)) from error

    def _loaded(self) -> QwenImagePipeline:
        if self._pipeline is None:
            raise EngineError(self.name, "not started", "call start() first")
        return self._pipeline

    def _loaded_receiver(self) -> WeightReceiver:
        if self._receiver is None:
            raise EngineError(self.name, "not started", "call start() first")
        return self._receiver
