"""The Qwen-Image adapter: the pipeline's own prediction, requests that replay can score, answers it cannot."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, QwenImageTransformer2DModel
from diffusers.pipelines.qwenimage.pipeline_qwenimage import QwenImagePipeline, calculate_shift
from flowgrpo_fsdp_actor import ActorConfig, load_adapter
from flowgrpo_fsdp_actor.adapters.base import ReplayConditions
from flowgrpo_fsdp_actor.adapters.qwen_image import QwenImageAdapter
from flowgrpo_fsdp_actor.errors import ModelFolderError, RequestRefused, TrajectoryRefused
from flowgrpo_fsdp_actor.testing import SAMPLING, draw_trajectory, prompt_embeds
from flowgrpo_rollout_sglang.config import SamplingConfig


@pytest.fixture(scope="module")
def adapter(model_folder):
    return QwenImageAdapter(model_folder)


@pytest.fixture(scope="module")
def transformer(model_folder):
    return QwenImageTransformer2DModel.from_pretrained(model_folder / "transformer")


def request(adapter, sampling=SAMPLING, **changes):
    given = {"prompt": "a prompt", "group_index": 3, "group_size": 4, "rollout_id": 5, "generation_seed": 1234}
    return adapter.build_rollout_request(sampling=sampling, **(given | changes))


@pytest.fixture(scope="module")
def trajectory(adapter, transformer):
    return draw_trajectory(transformer, adapter, request(adapter))


class RecordingTransformer(QwenImageTransformer2DModel):
    """Keeps what the pipeline predicted at each step."""

    def forward(self, *args, **kwargs):
        velocity = super().forward(*args, **kwargs)
        self.__dict__.setdefault("seen", []).append((kwargs["hidden_states"].clone(), velocity[0].clone()))
        return velocity


def test_velocity_is_the_stock_pipelines_own_prediction_at_every_step(adapter, model_folder):
    """Fixes the timestep convention: sigma, not 1000 sigma. Two prompts, so that one of them is padded."""

    recording = RecordingTransformer.from_pretrained(model_folder / "transformer")
    scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(model_folder / "scheduler")
    pipeline = QwenImagePipeline(scheduler, None, None, None, recording)
    pipeline.vae_scale_factor = adapter.vae_scale_factor  # it has no VAE to ask; latents are all we want
    embeds = torch.stack([prompt_embeds("a", 9), torch.cat([prompt_embeds("b", 6), torch.zeros(3, 64)])])
    mask = torch.tensor([[True] * 9, [True] * 6 + [False] * 3])
    pipeline(
        prompt_embeds=embeds,
        prompt_embeds_mask=mask,
        true_cfg_scale=1.0,
        height=24,
        width=16,
        num_inference_steps=5,
        generator=torch.Generator().manual_seed(0),
        output_type="latent",
    )
    sigmas = adapter.sigmas(5, 24)
    conditions = ReplayConditions(embeds, mask, 24, 16)
    assert len(recording.seen) == 5
    for k, (latents, predicted) in enumerate(list(recording.seen)):
        with torch.no_grad():
            ours = adapter.replay_transition(recording, latents, torch.full((2,), sigmas[k]), conditions)
        # The pipeline rounds 1000 sigma to float32 and divides it again: a few units in the last place of sigma.
        torch.testing.assert_close(ours, predicted, atol=2e-5, rtol=0)


def test_a_wrong_timestep_scale_would_be_seen_by_that_test(adapter, transformer):
    conditions = ReplayConditions(prompt_embeds("a", 9)[None], None, 24, 16)
    x, sigma = torch.randn(1, 24, 48, generator=torch.Generator().manual_seed(0)), torch.tensor([0.5])
    with torch.no_grad():
        right = adapter.replay_transition(transformer, x, sigma, conditions)
        wrong = adapter.replay_transition(transformer, x, sigma * 1000, conditions)
    assert float((right - wrong).abs().max()) > 1e-2


def test_padded_text_with_a_mask_changes_nothing_but_rounding(adapter, transformer):
    short = prompt_embeds("short", 5)
    x, sigma = torch.randn(1, 24, 48, generator=torch.Generator().manual_seed(0)), torch.tensor([0.5])
    garbage = torch.full((6, 64), 100.0)
    mask = torch.tensor([[True] * 5 + [False] * 6])
    with torch.no_grad():
        plain = adapter.replay_transition(transformer, x, sigma, ReplayConditions(short[None], None, 24, 16))
        padded = ReplayConditions(torch.cat([short, garbage])[None], mask, 24, 16)
        masked = adapter.replay_transition(transformer, x, sigma, padded)
    # Measured 1e-6; velocities are of order 1.
    torch.testing.assert_close(masked, plain, atol=1e-5, rtol=0)


def test_sigmas_are_those_of_the_folders_scheduler(adapter, model_folder):
    scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(model_folder / "scheduler")
    mu = calculate_shift(576, 256, 8192, 0.5, 0.9)
    scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / 12, 12), mu=mu)
    assert adapter.sigmas(12, 576) == pytest.approx(scheduler.sigmas.tolist(), abs=1e-6)


def test_a_scheduler_that_the_formula_does_not_cover_is_refused(tmp_path):
    (tmp_path / "scheduler").mkdir()
    (tmp_path / "scheduler" / "scheduler_config.json").write_text(json.dumps({"use_dynamic_shifting": False}))
    with pytest.raises(ModelFolderError) as error:
        QwenImageAdapter(tmp_path).sigmas(12, 576)
    assert "use_dynamic_shifting" in error.value.missing


def test_guidance_is_refused(adapter):
    with pytest.raises(RequestRefused) as error:
        request(adapter, replace(SAMPLING, guidance_scale=4.0))
    assert error.value.setting == "guidance_scale"


@pytest.mark.parametrize("size", [{"height": 26}, {"width": 2}, {"width": 0}])
def test_a_size_that_the_vae_would_round_is_refused(adapter, size):
    with pytest.raises(RequestRefused) as error:
        request(adapter, replace(SAMPLING, **size))
    assert "multiples of 4" in error.value.hint


def test_another_latent_shape_than_the_vaes_is_refused_and_its_own_is_filled_in(adapter):
    assert request(adapter).sampling.init_noise_latent_shape == (12, 12, 8)
    with pytest.raises(RequestRefused):
        request(adapter, replace(SAMPLING, init_noise_latent_shape=(16, 12, 8)))


def test_noise_is_fresh_in_each_rollout_and_the_same_in_every_evaluation(adapter):
    assert request(adapter, rollout_id=5).noise_seed == request(adapter, rollout_id=5).noise_seed
    assert request(adapter, rollout_id=5).noise_seed != request(adapter, rollout_id=6).noise_seed
    assert request(adapter, rollout_id=None).noise_seed == 1234


@pytest.mark.parametrize(
    ("mode", "metadata", "prompt_id"),
    [
        ("metadata", {"prompt_id": "p7", "sample_id": "s7"}, "p7"),
        ("metadata", {"sample_id": "s7"}, "s7"),
        ("metadata", {}, "3"),
        ("positional", {"sample_id": "s7"}, "3"),
        ("group_index", {"sample_id": "s7"}, "3"),
    ],
)
def test_sample_ids_follow_the_mode(adapter, mode, metadata, prompt_id):
    made = request(adapter, replace(SAMPLING, sample_id_mode=mode), metadata=metadata)
    assert made.sample_ids == tuple(f"prompt:{prompt_id}:sample:{slot}" for slot in range(4))


def test_trained_steps_are_the_rollouts_own_draw(adapter):
    drawn = SamplingConfig(
        height=24,
        width=16,
        num_inference_steps=9,
        num_sde_steps=2,
        sde_pool=(1, 3, 5, 7),
        sde_resample_per_rollout=True,
    )
    steps = {request(adapter, drawn, rollout_id=r).sde_indices for r in range(8)}
    assert len(steps) > 1
    assert request(adapter, drawn, rollout_id=2).sde_indices == drawn.sde_steps(2)


def test_packing_takes_both_ends_of_every_trained_step(adapter, trajectory):
    packed = adapter.pack_trajectory(trajectory)
    assert packed.step_indices == (1, 2, 3)
    # The steps touch, so the end of one is the start of the next.
    assert torch.equal(packed.x_next_NSPC[:, :-1], packed.x_NSPC[:, 1:])
    assert torch.equal(packed.x_next_NSPC[:, -1], trajectory.latents_NUPC[:, -1])
    assert packed.sigma_S.tolist() == list(trajectory.request.sigmas[1:4])


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda t: {"request": replace(t.request, sde_indices=())}, "sde_indices"),
        (lambda t: {"height": 0}, "height, width"),
        (lambda t: {"height": 16, "width": 16}, "trajectory_latents"),
        (lambda t: {"latents_NUPC": t.latents_NUPC[:, 1:]}, "trajectory_latents"),
        (lambda t: {"latents_NUPC": t.latents_NUPC * float("nan")}, "trajectory_latents"),
        (lambda t: {"log_probs_NS": t.log_probs_NS[:, 1:]}, "log_probs"),
        (lambda t: {"log_probs_NS": t.log_probs_NS / 0.0}, "log_probs"),
        (lambda t: {"sigmas": t.sigmas[1:]}, "timesteps"),
        (lambda t: {"sigmas": t.sigmas + 1e-3}, "timesteps"),
        (lambda t: {"sigmas": t.sigmas * float("nan")}, "timesteps"),
    ],
)
def test_an_answer_that_replay_could_not_score_is_refused(adapter, trajectory, change, field):
    with pytest.raises(TrajectoryRefused) as error:
        adapter.pack_trajectory(replace(trajectory, **change(trajectory)))
    assert (error.value.group_index, error.value.field) == (3, field)


def test_loading_builds_the_model_without_storage_but_with_real_rotary_tables(adapter, model_folder, transformer):
    model = adapter.load_train_model(ActorConfig(model_path=str(model_folder)))
    assert {p.device.type for p in model.module.parameters()} == {"meta"}
    assert torch.equal(model.module.pos_embed.pos_freqs, transformer.pos_embed.pos_freqs)
    name = "transformer_blocks.1.attn.to_q.weight"
    assert torch.equal(model.read_weight(name, 5, 9), transformer.get_parameter(name)[5:9])


def test_a_folder_without_a_transformer_is_refused(tmp_path):
    with pytest.raises(ModelFolderError) as error:
        QwenImageAdapter(tmp_path).load_train_model(ActorConfig(model_path=str(tmp_path)))
    assert "transformer/config.json" in error.value.missing


def test_a_folder_of_another_class_is_refused(tmp_path):
    (tmp_path / "transformer").mkdir()
    (tmp_path / "transformer" / "config.json").write_text(json.dumps({"_class_name": "FluxTransformer2DModel"}))
    with pytest.raises(ModelFolderError) as error:
        QwenImageAdapter(tmp_path).load_train_model(ActorConfig(model_path=str(tmp_path)))
    assert "FluxTransformer2DModel" in error.value.missing


def test_adapters_are_found_by_their_dotted_path(model_folder):
    adapter = load_adapter("flowgrpo_fsdp_actor.adapters.qwen_image.QwenImageAdapter", str(model_folder))
    assert (adapter.family, adapter.vae_scale_factor, adapter.latent_channels) == ("qwen_image", 2, 12)
