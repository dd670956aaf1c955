"""The in-process engine on the tiny Qwen-Image that ships with the trainer: real diffusers parts, on the CPU."""

import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from diffusers import QwenImagePipeline
from flowgrpo_math import qwen_image_sigmas, transition_logp
from flowgrpo_math.transition import transition
from flowgrpo_rollout_sglang.config import EngineConfig, SamplingConfig
from flowgrpo_rollout_sglang.diffusers_engine import DiffusersEngine
from flowgrpo_rollout_sglang.engine import EngineError, EngineOutOfMemory
from flowgrpo_rollout_sglang.noise import initial_latent
from flowgrpo_rollout_sglang.request import GroupRequest
from flowgrpo_rollout_sglang.text_window import (
    LONG_PROMPT_HINT,
    MAX_PROMPT_TOKENS,
    MAX_TEXT_TOKENS,
    TEMPLATE,
    TEMPLATE_BEGINS,
    TEMPLATE_ENDS,
    text_tokens,
)
from flowgrpo_rollout_sglang.velocity import qwen_image_velocity
from flowgrpo_rollout_sglang.wire import WeightSender, WeightSyncError

MODEL = Path(__file__).parents[3] / "apps/trainer/src/flowgrpo_trainer/assets/tiny-qwen-image"
TARGETS = ("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0")
SIZE, STEPS, TOKENS = 24, 6, 36
PROMPTS = (
    "a red circle on a blue background",
    "a green square on a white background",
    "a yellow cross on a red background",
)


def request(prompt=PROMPTS[0], *, N=4, group_index=0, sde_indices=(1, 3), sde_type="sde", **sampling):
    config = SamplingConfig(height=SIZE, width=SIZE, num_inference_steps=STEPS, sde_type=sde_type, sde_indices=(1, 3))
    tokens = sampling.pop("tokens", TOKENS)
    return GroupRequest(
        group_index=group_index,
        prompt=prompt,
        sample_ids=tuple(f"prompt:{prompt}:sample:{slot}" for slot in range(N)),
        sampling=replace(config, **sampling),
        sigmas=tuple(qwen_image_sigmas(STEPS, tokens).tolist()),
        sde_indices=sde_indices,
        noise_seed=11,
    )


def make_engine(**config):
    engine = DiffusersEngine(EngineConfig(name="engine0", model_path=str(MODEL), dtype="fp32", **config))
    engine.start()
    return engine


@pytest.fixture(scope="module")
def engine():
    torch.set_num_threads(1)
    return make_engine()


def tokens_of(engine):
    """Packed tokens of a picture: follows the shipped model, whatever its VAE is."""
    side = SIZE // engine._loaded().vae_scale_factor // 2
    return side * side


def test_an_answer_has_every_shape_that_its_request_promises(engine):
    asked = request()
    (drawn,) = engine.generate([asked])
    P, C = tokens_of(engine), engine._loaded().transformer.config.in_channels
    assert drawn.latents_NUPC.shape == (4, 4, P, C)
    assert drawn.log_probs_NS.shape == (4, 2)
    assert drawn.images_NHWC.shape == (4, SIZE, SIZE, 3)
    assert drawn.images_NHWC.dtype == torch.uint8
    assert (drawn.height, drawn.width, drawn.policy_version) == (SIZE, SIZE, 0)
    assert drawn.request is asked


def test_every_candidates_noise_differs_and_so_do_their_pictures(engine):
    (drawn,) = engine.generate([request(N=8)])
    for values in (drawn.latents_NUPC[:, 0], drawn.images_NHWC):
        assert len({row.numpy().tobytes() for row in values}) == 8


def test_the_same_request_gives_the_same_bits(engine):
    first, second = (engine.generate([request()])[0] for _ in range(2))
    assert torch.equal(first.latents_NUPC, second.latents_NUPC)
    assert torch.equal(first.log_probs_NS, second.log_probs_NS)
    assert torch.equal(first.images_NHWC, second.images_NHWC)


def test_neighbours_change_a_candidate_by_rounding_alone(engine):
    """Measured 2e-6 on the CPU, where a matrix product's blocking follows its size; a pixel step is 4e-3."""
    (alone,) = engine.generate([request(N=1)])
    together = engine.generate([request(p, N=8, group_index=g) for g, p in enumerate(PROMPTS)])[0]
    torch.testing.assert_close(alone.latents_NUPC[0], together.latents_NUPC[0], atol=5e-5, rtol=0)
    torch.testing.assert_close(alone.log_probs_NS[0], together.log_probs_NS[0], atol=1e-5, rtol=0)


@pytest.mark.parametrize(("sde_type", "sde_indices"), [("sde", (1, 3)), ("dance", (0, 1, 5)), ("cps", (0, 3))])
def test_the_log_prob_is_that_of_the_stored_states_under_the_engines_own_velocity(engine, sde_type, sde_indices):
    asked = request(sde_type=sde_type, sde_indices=sde_indices)
    (drawn,) = engine.generate([asked])
    place = {k: u for u, k in enumerate(asked.state_indices)}
    embeds = drawn.prompt_embeds_LE.expand(4, -1, -1)
    for s, k in enumerate(sde_indices):
        x, x_next = drawn.latents_NUPC[:, place[k]], drawn.latents_NUPC[:, place[k + 1]]
        step = transition(sde_type, asked.sigmas[k], asked.sigmas[k + 1], eta=0.7, sigma_max=0.99)
        with torch.no_grad():
            velocity = qwen_image_velocity(
                engine._loaded().transformer,
                x,
                torch.full((4,), asked.sigmas[k]),
                embeds,
                None,
                SIZE,
                SIZE,
                engine._loaded().vae_scale_factor,
            )
        assert torch.equal(transition_logp(x, velocity, x_next, step), drawn.log_probs_NS[:, s])


def test_without_noise_it_draws_what_the_stock_pipeline_draws(engine):
    """The same initial latent through diffusers' own loop: uint8 pictures may differ by one step of rounding."""
    asked = request(sde_indices=())
    (drawn,) = engine.generate([asked])
    pipeline = QwenImagePipeline.from_pretrained(MODEL, torch_dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    side = SIZE // pipeline.vae_scale_factor
    shape = (pipeline.transformer.config.in_channels // 4, side, side)
    latents = torch.stack([initial_latent(11, sample_id, shape) for sample_id in asked.sample_ids])
    stock = pipeline(
        prompt=asked.prompt,
        num_images_per_prompt=4,
        latents=latents,
        height=SIZE,
        width=SIZE,
        num_inference_steps=STEPS,
        true_cfg_scale=1.0,
        output_type="np",
    ).images
    expected = torch.from_numpy((stock * 255).round()).to(torch.int16)
    assert int((drawn.images_NHWC.to(torch.int16) - expected).abs().max()) <= 1


def test_groups_come_back_in_the_order_of_their_requests(engine):
    asked = [request(p, N=n, group_index=g) for g, (p, n) in enumerate(zip(PROMPTS, (2, 5, 3), strict=True))]
    drawn = engine.generate(asked)
    assert [d.request.group_index for d in drawn] == [0, 1, 2]
    assert [len(d.images_NHWC) for d in drawn] == [2, 5, 3]


@pytest.mark.parametrize("sampling", [{"driver_xt": False}, {"driver_sigmas": False}], ids=str)
def test_settings_that_ask_for_a_servers_own_noise_or_schedule_are_refused(engine, sampling):
    with pytest.raises(EngineError):
        engine.generate([request(**sampling)])


def test_texts_of_different_length_share_a_forward_and_change_a_candidate_by_rounding_alone(engine):
    short, long = PROMPTS[0], "a purple triangle on a yellow background, drawn large"
    alone = [engine.generate([request(prompt, N=2)])[0] for prompt in (short, long)]
    together = engine.generate([request(p, N=2, group_index=g) for g, p in enumerate((short, long))])
    assert len({d.prompt_embeds_LE.shape[0] for d in together}) == 2
    for one, both in zip(alone, together, strict=True):
        torch.testing.assert_close(one.latents_NUPC, both.latents_NUPC, atol=5e-5, rtol=0)


@pytest.mark.parametrize("sampling", [{"height": 25}, {"width": 30}, {"init_noise_latent_shape": (3, 4, 4)}], ids=str)
def test_a_size_that_does_not_fit_the_model_is_refused(engine, sampling):
    with pytest.raises(EngineError) as error:
        engine.generate([request(**sampling)])
    assert error.value.engine == "engine0"


def test_a_prompt_that_fills_the_text_window_is_kept_whole_and_a_longer_one_is_refused(engine):
    """Of 508 tokens by one, of 1,500 far beyond where the pipeline cuts: both with their true length and the remedy."""
    (drawn,) = engine.generate([request("a" + " red" * (MAX_PROMPT_TOKENS - 1), N=1)])
    assert len(drawn.prompt_embeds_LE) == MAX_TEXT_TOKENS
    for words in (MAX_PROMPT_TOKENS + 1, 1500):
        with pytest.raises(EngineError) as error:
            engine.generate([request("a" + " red" * (words - 1))])
        assert str(words) in error.value.what
        assert error.value.hint == LONG_PROMPT_HINT


def test_the_template_that_prompts_are_counted_with_is_the_pipelines(engine):
    pipeline = engine._loaded()
    assert pipeline.prompt_template_encode == TEMPLATE
    assert pipeline.prompt_template_encode_start_idx == TEMPLATE_BEGINS
    assert text_tokens(pipeline.tokenizer, "") == TEMPLATE_ENDS


def test_it_refuses_to_generate_asleep_and_wakes_with_the_same_weights():
    engine = make_engine()
    before = engine.generate([request()])[0]
    engine.sleep()
    with pytest.raises(EngineError):
        engine.generate([request()])
    engine.wake(["weights"])
    with pytest.raises(EngineError):
        engine.generate([request()])
    engine.wake()
    assert torch.equal(engine.generate([request()])[0].images_NHWC, before.images_NHWC)
    with pytest.raises(EngineError):
        engine.sleep(["everything"])


def test_an_engine_that_was_not_started_or_has_no_model_says_so(tmp_path):
    with pytest.raises(EngineError):
        DiffusersEngine(EngineConfig(name="e", model_path=str(MODEL))).generate([])
    (tmp_path / "vae").mkdir()
    with pytest.raises(EngineError) as error:
        DiffusersEngine(EngineConfig(name="e", model_path=str(tmp_path))).start()
    assert "transformer" in error.value.what
    with pytest.raises(EngineError):  # it runs on one device
        DiffusersEngine(EngineConfig(name="e", model_path=str(MODEL), num_gpus=2)).start()


class Direct:
    """The control half of a transaction, in this process."""

    def __init__(self, engine):
        self.engine, self.name = engine, engine.name

    def begin(self, manifest, channel):
        self.engine.begin(manifest, channel)

    def verify(self):
        return self.engine.verify()

    def commit(self, version):
        self.engine.commit(version)

    def abort(self):
        self.engine.abort()


def send(engine, tensors, version, mode):
    sender = WeightSender(bucket_size_mb=8, wire_dtype="fp32")
    manifest = sender.manifest([(n, t.shape) for n, t in tensors], version=version, mode=mode)
    sender.send(tensors, manifest, Direct(engine))
    return sender


def test_new_weights_serve_only_after_their_commit():
    engine = make_engine()
    before = engine.generate([request()])[0].images_NHWC
    moved = [(name, tensor + 0.05) for name, tensor in engine._targets().items()]
    sender = send(engine, moved, 1, "full")
    with pytest.raises(WeightSyncError):
        engine.generate([request()])
    assert engine.policy_version == 0
    engine.commit(1)
    (drawn,) = engine.generate([request()])
    assert (engine.policy_version, drawn.policy_version) == (1, 1)
    assert not torch.equal(drawn.images_NHWC, before)
    sender.close()


def test_an_adapter_engine_starts_as_the_base_takes_an_adapter_and_no_full_weights():
    base, engine = (
        make_engine(),
        make_engine(weight_sync_mode="adapter", lora_rank=4, lora_alpha=8.0, lora_target_modules=TARGETS),
    )
    asked = request()
    assert torch.equal(engine.generate([asked])[0].images_NHWC, base.generate([asked])[0].images_NHWC)
    targets = engine._targets()
    assert len(targets) == 2 * 4 * len(base._loaded().transformer.transformer_blocks)
    full = [(name, tensor.detach()) for name, tensor in base._targets().items()]
    with pytest.raises(WeightSyncError):
        send(engine, full, 1, "full")
    sender = send(engine, [(n, torch.full_like(t, 0.1)) for n, t in targets.items()], 1, "adapter")
    engine.commit(1)
    assert not torch.equal(engine.generate([asked])[0].images_NHWC, base.generate([asked])[0].images_NHWC)
    sender.close()


@pytest.mark.parametrize(
    ("phase", "module", "remedy"),
    [
        ("encoding a prompt", "text_encoder", "--offload-train"),
        ("denoising 4 candidates", "transformer", "--candidates-per-forward"),
        ("decoding 4 pictures", "vae.decoder", "--candidates-per-forward"),
    ],
)
def test_out_of_memory_says_phase_bytes_and_what_to_lower(engine, phase, module, remedy):
    def fail(*_):
        raise torch.OutOfMemoryError("Tried to allocate 3.00 GiB. GPU 0 has ... of which 128.00 MiB is free.")

    owner, *inner = module.split(".")
    part = getattr(engine._loaded(), owner).get_submodule(".".join(inner))
    hook = part.register_forward_pre_hook(fail)
    try:
        with pytest.raises(EngineOutOfMemory) as caught:
            engine.generate([request(f"a prompt for {module}")])
    finally:
        hook.remove()
    error = pickle.loads(pickle.dumps(caught.value))
    assert (error.engine, error.phase, error.asked, error.free) == ("engine0", phase, 3 << 30, 1 << 27)
    assert remedy in error.lower
    assert all(words in str(error) for words in ("engine0", phase, "3.00 GiB", "0.12 GiB", remedy))
