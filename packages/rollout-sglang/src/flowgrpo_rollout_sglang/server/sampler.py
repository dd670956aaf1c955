"""The denoising loop of the patched server: SGLang's own transformer, text encoder and VAE, our noise and our step.

The loop is ours because the contract is about the loop: the schedule as it was sent, noise that belongs to a
candidate, fp32 states, the log-prob of the state that is stored. The model's forward, with its kernels, is SGLang's.

Shapes: as in `contract`; B candidates of one forward, P packed tokens, C channels of a token, L text tokens,
E text width, U stored states, Z latent channels, h x w latent grid.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

import torch
from flowgrpo_math.sigmas import qwen_image_sigmas
from flowgrpo_math.transition import Transition, transition, transition_logp, transition_mean, transition_sample
from sglang.multimodal_gen.runtime.managers.forward_context import set_forward_context
from torch import Tensor, nn

from flowgrpo_rollout_sglang.noise import candidate_noise, pack_latents, unpack_latents
from flowgrpo_rollout_sglang.one_frame import fuse_layers, skip_empty_frames
from flowgrpo_rollout_sglang.server.contract import Candidate, ContractError, Wave
from flowgrpo_rollout_sglang.server.fused import fuse_gelu, use_cudnn_attention
from flowgrpo_rollout_sglang.server.graphs import ForwardGraphs
from flowgrpo_rollout_sglang.text_window import LONG_PROMPT_HINT, MAX_TEXT_TOKENS, TEMPLATE_BEGINS, too_long
from flowgrpo_rollout_sglang.velocity import PATCH, latent_grid

DECODE_AT_ONCE = 16
DEFAULT_CANDIDATES = 32


@dataclass(frozen=True)
class Layout:
    """The sizes of a forward."""

    candidates: int
    grid: tuple[int, ...]
    """Tokens of the image, (rows, columns)."""
    text: int
    """Tokens of the longest text."""

    @property
    def img_shapes(self) -> list[list[tuple[int, ...]]]:
        return [[(1, *self.grid)]] * self.candidates

    @property
    def txt_seq_lens(self) -> list[int]:
        return [self.text] * self.candidates


@dataclass(frozen=True)
class Drawn:
    """One group, drawn. All on the CPU."""

    latents_NUPC: Tensor
    log_probs_NS: Tensor
    prompt_embeds_LE: Tensor
    images_NHWC: Tensor


class Sampler:
    """Draws waves with the modules of one SGLang pipeline.

    Args:
        cuda_graphs: replay the transformer's forward as CUDA graphs (`graphs`); on a CUDA device alone.
    """

    def __init__(self, pipeline: Any, server_args: Any, *, cuda_graphs: bool = False):
        self._args = server_args
        self._pipeline = pipeline
        self.transformer: nn.Module = pipeline.get_module("transformer")
        stages = {type(stage).__name__: stage for stage in pipeline.stages}
        self._text_stage, self._decode_stage = stages["TextEncodingStage"], stages["DecodingStage"]
        parameter = next(self.transformer.parameters())
        self.device, self.dtype = parameter.device, parameter.dtype
        skip_empty_frames(pipeline.get_module("vae"))
        if self.device.type == "cuda":
            fuse_layers(pipeline.get_module("vae"))
        self.attention: str | None = None
        """What attention without a mask runs on, and whether GELU is fused (`fused`). None: SGLang's own, as on a CPU
        and in fp32."""
        self.fused_gelu: bool | None = None
        if self.device.type == "cuda" and self.dtype == torch.bfloat16:
            self.attention = use_cudnn_attention(self.transformer)
            self.fused_gelu = fuse_gelu(self.transformer) > 0
        self.vae_scale_factor: int = server_args.pipeline_config.get_vae_scale_factor()
        self.latent_channels: int = server_args.pipeline_config.dit_config.arch_config.in_channels // 4
        self.graphs = ForwardGraphs(self._forward, self._weights) if cuda_graphs else None

    def fused_rope(self) -> bool | None:
        """Whether SGLang's fused norm and rotary kernel loads; where it does not, SGLang falls back in silence.

        None where it is not meant to run: on a CPU, in fp32. Compiles it at the first call, as a first request would.
        """
        if self.device.type != "cuda" or self.dtype != torch.bfloat16:
            return None
        from sglang.jit_kernel.diffusion.qknorm_rope import can_use_fused_inplace_qknorm_rope

        width = self.transformer.transformer_blocks[0].attn.head_dim
        return can_use_fused_inplace_qknorm_rope(width, width, False, self.dtype)

    def drop_graphs(self) -> None:
        """Before the transformer's memory goes, and after its modules or hooks have changed."""
        if self.graphs is not None:
            self.graphs.drop()

    @torch.inference_mode()  # as SGLang itself: its kernels' wrappers then cost the host less
    def draw(self, wave: Wave) -> tuple[tuple[float, ...], list[Drawn], dict[str, float]]:
        """The sigmas that were used, one Drawn for each group, and seconds by part.

        Nothing in between waits for the GPU: results come to the host while it goes on.
        Raises ContractError for a size, latent shape or prompt that the model cannot take.
        """
        if self.graphs is not None:
            self.graphs.check_weights()
        clock = Stopwatch(self.device)
        latent_shape = self._latent_shape(wave)
        encoded_once = {prompt: self._encode(prompt) for prompt in dict.fromkeys(g.prompt for g in wave.groups)}
        embeds = [encoded_once[group.prompt] for group in wave.groups]
        sigmas = wave.sigmas or self._own_sigmas(wave)
        clock.lap("text_s")
        rows = [(g, candidate) for g, group in enumerate(wave.groups) for candidate in group.candidates]
        parts: list[list[tuple[Tensor, Tensor, Tensor]]] = [[] for _ in wave.groups]
        for batch in _batches(rows, [e.shape[0] for e in embeds], wave.candidates_per_forward or DEFAULT_CANDIDATES):
            states, log_probs, x_BPC = self._denoise(wave, sigmas, batch, embeds, latent_shape)
            clock.lap("denoise_s")
            images = self._fetch(self._decode(x_BPC, latent_shape))
            clock.lap("decode_s")
            start = 0
            for g, run in groupby(batch, key=lambda row: row[0]):  # a group's candidates stand together
                stop = start + len(list(run))
                parts[g].append((states[start:stop], log_probs[start:stop], images[start:stop]))
                start = stop
        embeds_LE = [self._fetch(embed) for embed in embeds]
        seconds = clock.seconds()  # waits for the GPU: from here on, what was fetched is there
        drawn = []
        for part, embed_LE in zip(parts, embeds_LE, strict=True):
            states, log_probs, images = part[0] if len(part) == 1 else map(torch.cat, zip(*part, strict=True))
            drawn.append(Drawn(states, log_probs, embed_LE, images))
        return sigmas, drawn, seconds

    def _denoise(
        self,
        wave: Wave,
        sigmas: tuple[float, ...],
        batch: list[tuple[int, Candidate]],
        embeds: list[Tensor],
        latent_shape: tuple[int, int, int],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Of one forward batch: states [B, U, P, C] and log-probs [B, S], fetched, and the last state on the device."""
        candidates = [candidate for _, candidate in batch]
        x_T_BZhw = self._send([candidate_noise(c.x_T_seed, c.sample_id, "x_T", latent_shape) for c in candidates])
        x_BPC = pack_latents(x_T_BZhw)
        layout, conditions = self._conditions(wave, [embeds[g] for g, _ in batch])
        steps, timesteps_TB = self._schedule(wave, sigmas, len(batch))
        keep = set(wave.state_indices)
        states, log_probs = ([x_BPC] if 0 in keep else []), []
        for k, step in enumerate(steps):
            velocity_BPC = self._velocity(layout, {"latents": x_BPC, "timestep": timesteps_TB[k], **conditions})
            if k in wave.sde_indices:
                shape = tuple(x_BPC.shape[1:])
                noise = self._send([candidate_noise(c.step_seed, c.sample_id, k, shape) for c in candidates])
                x_next_BPC = transition_sample(x_BPC, velocity_BPC, noise, step)
                log_probs.append(transition_logp(x_BPC, velocity_BPC, x_next_BPC, step))
            else:
                x_next_BPC = transition_mean(x_BPC, velocity_BPC, step)
            x_BPC = x_next_BPC
            if k + 1 in keep:
                states.append(x_BPC)
        B, P, C = x_BPC.shape
        states_BUPC = torch.stack(states, dim=1) if states else x_BPC.new_empty(B, 0, P, C)
        log_probs_BS = torch.stack(log_probs, dim=1) if log_probs else x_BPC.new_empty(B, 0)
        return self._fetch(states_BUPC), self._fetch(log_probs_BS), x_BPC

    def _schedule(self, wave: Wave, sigmas: tuple[float, ...], B: int) -> tuple[list[Transition], Tensor]:
        """Every step's transition and timesteps [T, B], on the device in one copy each: a copy a step would wait."""
        steps = []
        for k, (sigma, sigma_next) in enumerate(pairwise(sigmas)):
            if k in wave.sde_indices:
                steps.append(transition(wave.sde_type, sigma, sigma_next, eta=wave.eta, sigma_max=wave.sigma_max))
            else:
                steps.append(transition("ode", sigma, sigma_next, eta=0.0))
        # SGLang's transformer divides by 1000. In float64 that gives the float32 sigma back, exactly.
        timesteps_T = torch.tensor(sigmas[:-1], dtype=torch.float32).double() * 1000.0
        timesteps_TB = self._send(list(timesteps_T[:, None].expand(-1, B)))
        if self.device.type == "cpu":
            return steps, timesteps_TB
        return [Transition(*step) for step in self._send([torch.stack(tuple(step)) for step in steps])], timesteps_TB

    def _conditions(self, wave: Wave, embeds: list[Tensor]) -> tuple[Layout, dict[str, Tensor | None]]:
        """What does not change from step to step.

        Texts of one length go without a mask, which is the faster attention; else they are padded behind.
        """
        lengths = [e.shape[0] for e in embeds]
        longest = max(lengths)
        grid = tuple(n // PATCH for n in latent_grid(wave.height, wave.width, self.vae_scale_factor))
        layout = Layout(candidates=len(embeds), grid=grid, text=longest)
        mask = None
        if min(lengths) != longest:
            # As SGLang's attention makes it of a mask of booleans, in each layer, after waiting for the GPU.
            real_BL = torch.arange(longest)[None] < torch.tensor(lengths)[:, None]
            real_BS = torch.cat([real_BL, real_BL.new_ones(len(embeds), grid[0] * grid[1])], dim=1)
            bias_BS = (real_BS.to(self.dtype) - 1.0) * torch.finfo(self.dtype).max
            mask = self._send(list(bias_BS[:, None, None]))
        image_freqs, text_freqs = self._args.pipeline_config.get_freqs_cis(
            layout.img_shapes, layout.txt_seq_lens, self.transformer.rotary_emb, self.device, self.dtype
        )
        return layout, {
            "text": torch.nn.utils.rnn.pad_sequence(embeds, batch_first=True).to(self.dtype),
            "mask": mask,
            "image_freqs": image_freqs,
            "text_freqs": text_freqs,
        }

    def _velocity(self, layout: Layout, inputs: dict[str, Tensor | None]) -> Tensor:
        """[B, P, C] in the model's dtype; good until the next call."""
        return self._forward(layout, **inputs) if self.graphs is None else self.graphs(layout, inputs)

    def _forward(
        self,
        layout: Layout,
        latents: Tensor,
        timestep: Tensor,
        text: Tensor,
        mask: Tensor | None,
        image_freqs: Tensor,
        text_freqs: Tensor,
    ) -> Tensor:
        with set_forward_context(current_timestep=0, attn_metadata=None):  # the step: for other attention backends
            return self.transformer(
                hidden_states=latents.to(self.dtype),
                timestep=timestep,
                encoder_hidden_states=text,
                # Not `encoder_hidden_states_mask`: of that one SGLang counts the tokens, which waits for the GPU.
                attention_kwargs=None if mask is None else {"attn_mask": mask},
                img_shapes=layout.img_shapes,
                txt_seq_lens=layout.txt_seq_lens,
                freqs_cis=(image_freqs, text_freqs),
            )

    def _weights(self) -> Iterator[Tensor]:
        yield from self.transformer.parameters()
        yield from self.transformer.buffers()

    def _encode(self, prompt: str) -> Tensor:
        """[L, E], unpadded, after the template; alone, so that it depends on no other prompt."""
        stage, config = self._text_stage, self._args.pipeline_config
        text = config.preprocess_text_funcs[0](prompt)
        tokens = stage.tokenizers[0]([text], truncation=False, return_tensors="pt").to(self.device)
        length = tokens["input_ids"].shape[1] - TEMPLATE_BEGINS
        if length > MAX_TEXT_TOKENS:
            raise ContractError((too_long(length, prompt),), LONG_PROMPT_HINT)
        kwargs = {"input_ids": tokens["input_ids"], "attention_mask": tokens["attention_mask"]}
        outputs = stage._forward_text_encoder(stage.text_encoders[0], {**kwargs, "output_hidden_states": True})
        return outputs.hidden_states[-1][0, TEMPLATE_BEGINS:]

    def _decode(self, x_BPC: Tensor, latent_shape: tuple[int, int, int]) -> Tensor:
        """Packed latents to uint8 pictures [B, H, W, 3], in slices that bound the VAE's memory."""
        latents = unpack_latents(x_BPC, *latent_shape[1:])[:, :, None]
        if self.device.type == "cuda":
            latents = latents.to(memory_format=torch.channels_last_3d)  # which all of the VAE's maps then have
        images = [
            self._decode_stage.decode(part, self._args, vae_dtype=None)[:, :, 0]
            for part in latents.split(DECODE_AT_ONCE)
        ]
        pixels_BCHW = (torch.cat(images).float() * 255.0).round().to(torch.uint8)
        return pixels_BCHW.permute(0, 2, 3, 1).contiguous()

    def _latent_shape(self, wave: Wave) -> tuple[int, int, int]:
        try:
            shape = (self.latent_channels, *latent_grid(wave.height, wave.width, self.vae_scale_factor))
        except ValueError as error:
            raise ContractError((str(error),)) from None
        if wave.latent_shape not in (None, shape):
            why = f"initial_noise_latent_shape = {list(wave.latent_shape)}, but this model needs {list(shape)}"
            raise ContractError((why,))
        return shape

    def _own_sigmas(self, wave: Wave) -> tuple[float, ...]:
        """The schedule of the model's own scheduler, for a request that brings none."""
        rows, columns = latent_grid(wave.height, wave.width, self.vae_scale_factor)
        names = ("base_shift", "max_shift", "base_image_seq_len", "max_image_seq_len", "shift_terminal")
        config = self._pipeline.get_module("scheduler").config
        settings = {name: config[name] for name in names}
        tokens = (rows // PATCH) * (columns // PATCH)
        return tuple(qwen_image_sigmas(wave.num_inference_steps, tokens, **settings).tolist())

    def _send(self, rows: list[Tensor]) -> Tensor:
        """Stacks CPU rows onto the device; through pinned memory, so that the GPU is not waited for."""
        if self.device.type == "cpu":
            return torch.stack(rows)
        pinned = torch.empty((len(rows), *rows[0].shape), dtype=rows[0].dtype, pin_memory=True)  # from torch's cache
        return torch.stack(rows, out=pinned).to(self.device, non_blocking=True)

    def _fetch(self, tensor: Tensor) -> Tensor:
        """On the CPU, in pinned memory, once the GPU has come so far: `Stopwatch.seconds` waits for it."""
        return tensor.to("cpu", non_blocking=True)


class Stopwatch:
    """Seconds by part of what runs on a device, without waiting for it in between."""

    def __init__(self, device: torch.device):
        self._device = device
        self._laps = [("", self._now())]

    def lap(self, part: str) -> None:
        """Ends a part, which began at the lap before."""
        self._laps.append((part, self._now()))

    def seconds(self) -> dict[str, float]:
        """Of each part, summed over its laps, once the device has done all of them and whatever was asked for since."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        found: dict[str, float] = {}
        for (_, begun), (part, ended) in pairwise(self._laps):
            passed = ended - begun if isinstance(begun, float) else begun.elapsed_time(ended) / 1e3
            found[part] = found.get(part, 0.0) + passed
        return found

    def _now(self) -> Any:
        if self._device.type == "cpu":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _batches(
    rows: list[tuple[int, Candidate]], lengths: list[int], limit: int
) -> Iterator[list[tuple[int, Candidate]]]:
    """Candidates that share a forward: neighbours in text length, at most `limit`, in slices of even size."""
    ordered = sorted(rows, key=lambda row: lengths[row[0]])  # stable: a group's candidates stay in order
    count = -(-len(ordered) // limit)
    for i in range(count):
        yield ordered[i * len(ordered) // count : (i + 1) * len(ordered) // count]
