"""The real patched server on the CPU: every row of what stock SGLang 0.5.15.post1 does against the contract.

One server for the session (see conftest). Shapes: as in `request`.
"""

import os
import runpy
import threading
from dataclasses import replace
from pathlib import Path

import httpx
import psutil
import pytest
import torch
from flowgrpo_rollout_sglang.engine import EngineError
from flowgrpo_rollout_sglang.noise import initial_latent
from flowgrpo_rollout_sglang.patch import insertions
from flowgrpo_rollout_sglang.server.contract import SAFETENSORS, ContractError, parse, read_echo
from flowgrpo_rollout_sglang.sglang_engine import wave_body
from flowgrpo_rollout_sglang.text_window import LONG_PROMPT_HINT
from safetensors.torch import load as load_tensors

pytestmark = pytest.mark.timeout(900)  # the server's start is in the first test's time

ALONE_ATOL = 2e-5
"""fp32 latents of one candidate, alone or among others, here or in the other engine: other sums in another order.
Seen: 1e-6 on a CPU, 6e-6 on an H200."""
FP32_ATOL = 1e-6
"""Nats per element, SGLang's forward against diffusers' in fp32. Seen: 3e-7; eps_clip is 1e-4."""
ROWS = runpy.run_path(str(Path(__file__).parent / "rows.py"))
UPGRADE = {
    "connection": "Upgrade",
    "upgrade": "websocket",
    "sec-websocket-version": "13",
    "sec-websocket-key": "dGhlIHNhbXBsZSBub25jZQ==",
}
STEPS = {"sde": (1, 3, 5, 7), "dance": (0, 1, 3, 5, 7), "cps": (0, 1, 3, 5, 6)}


def post(engine, path: str, **request) -> httpx.Response:
    return engine._loaded().client.post(path, **request)


@pytest.mark.parametrize("row", [*ROWS["ROWS"], *ROWS["CUDA_ROWS"]], ids=lambda row: row.__name__)
def test_what_stock_does_otherwise_holds(contract, row):
    """Each fails on the stock server: test_stock."""
    row(contract)


# ---------------------------------------------------------------------- what the server is


def test_the_server_runs_the_native_pipeline_from_the_patched_copy(engine):
    info = engine.info()
    assert info["pipeline"] == "QwenImagePipeline"
    assert info["patch"] == insertions.load()[0].digest
    assert info["dtype"] == "float32"


def test_the_server_answers_nobody_without_the_token(engine):
    url = f"http://127.0.0.1:{engine._loaded().client.base_url.port}/"
    for path in ("rollout/generate", "flowgrpo/weights/abort", "v1/images/generations"):
        assert httpx.post(url + path, json={}, trust_env=False, timeout=60).status_code == 401
    for path in ("v1/realtime_video/generate", "no/such/route"):  # the first is SGLang's own websocket
        assert httpx.get(url + path, headers=UPGRADE, trust_env=False, timeout=60).status_code == 403
    assert httpx.get(url + "health", trust_env=False, timeout=60).status_code == 200


def test_an_idle_server_leaves_the_processor_alone(engine):
    """Stock spins: its scheduler asks for a message without waiting, for as long as there is none."""
    engine.info()
    processes = [p for p in psutil.process_iter() if os.getpgid(p.pid) == engine._loaded().pid]
    before = sum(sum(p.cpu_times()[:2]) for p in processes)
    threading.Event().wait(2.0)
    assert sum(sum(p.cpu_times()[:2]) for p in processes) - before < 0.5


# ---------------------------------------------------------------------- rollout request and echo


def test_an_unknown_field_a_null_seed_and_a_side_that_does_not_divide_are_refused(engine, make_request):
    good = wave_body([make_request()])
    for fault in ({"rollout_noise": 0.7}, {"height": 33, "width": 36}, {"initial_noise_latent_shape": [16, 4, 4]}):
        answer = post(engine, "/rollout/generate", json={**good, **fault})
        assert answer.status_code == 400
        assert next(iter(fault)).split("_")[0] in answer.json()["detail"]
    single = {name: value for name, value in good.items() if name != "groups"}
    assert post(engine, "/rollout/generate", json={**single, "prompt": "a cat", "seed": None}).status_code == 400


def test_the_answer_echoes_height_and_width_also_where_they_differ(engine, make_request):
    (wide,) = engine.generate([make_request(height=16, width=48)])
    assert (wide.height, wide.width) == (16, 48)
    assert wide.images_NHWC.shape == (2, 16, 48, 3)
    assert wide.latents_NUPC.shape[2:] == (2 * 6, 64)


def test_the_json_answer_has_every_output_in_one_shape(engine, make_request):
    for ids in (("a",), ("a", "b")):
        items = post(engine, "/rollout/generate", json=wave_body([make_request(ids=ids)])).json()
        assert [item["sample_id"] for item in items] == list(ids)
        for item in items:
            assert (item["height"], item["width"]) == (32, 32)
            assert item["sde_indices"] == [1, 3, 5, 7]
            assert item["rollout_log_probs"]["shape"] == [4]
            assert item["dit_trajectory"]["latents"]["shape"] == [8, 16, 64]
            assert len(item["dit_trajectory"]["timesteps"]) == 9
            assert len(item["denoising_env"]["pos_cond_kwargs"]["encoder_hidden_states"]["shape"]) == 2


def test_the_binary_answer_is_what_the_engine_reads_and_no_file_stays(engine, make_request):
    request = make_request()
    answer = post(engine, "/rollout/generate", json=wave_body([request]), headers={"accept": SAFETENSORS})
    (drawn,) = engine.generate([request])
    tensors = load_tensors(answer.content)
    for name in ("latents_NUPC", "log_probs_NS", "prompt_embeds_LE", "images_NHWC"):
        assert torch.equal(tensors[f"0.{name}"], getattr(drawn, name))
    assert not list(Path(engine._loaded().folder).glob("answer*"))


def test_an_echo_that_differs_from_what_was_asked_is_fatal(engine, make_request):
    body = wave_body([make_request()])
    answer = post(engine, "/rollout/generate", json=body, headers={"accept": SAFETENSORS})
    echo = read_echo(answer.content)
    engine._check_echo(body, echo)
    for name, value in (("eta", 0.5), ("sigmas", [1.0, 0.0]), ("policy_version", 99), ("model_path", "/other")):
        with pytest.raises(EngineError) as error:
            engine._check_echo(body, {**echo, name: value})
        assert name in error.value.what


# ---------------------------------------------------------------------- schedule and noise


def test_driver_sigmas_are_used_as_they_are(engine, oracle, make_request, replay):
    """A schedule that no scheduler makes: shifted or stretched once more, replay would be far off."""
    sigmas = (1.0, 0.97, 0.9, 0.7, 0.65, 0.4, 0.3, 0.1, 0.0)
    request = replace(make_request(), sigmas=sigmas)
    (served,), (in_process,) = engine.generate([request]), oracle.generate([request])
    assert torch.equal(served.sigmas, torch.tensor(sigmas))
    assert max(replay(oracle._loaded().transformer, served)) <= FP32_ATOL
    torch.testing.assert_close(served.latents_NUPC, in_process.latents_NUPC, atol=ALONE_ATOL, rtol=0)


def test_without_driver_sigmas_the_models_own_schedule_is_used_and_told(engine, make_request):
    (own,) = engine.generate([make_request(driver_sigmas=False)])
    (driven,) = engine.generate([make_request()])
    torch.testing.assert_close(own.sigmas, driven.sigmas, atol=1e-6, rtol=0)


def test_x_T_follows_the_recipe_bit_for_bit_whatever_the_batch(engine, make_request):
    for ids in (("a",), ("b", "a"), tuple("cdefghia")):
        (drawn,) = engine.generate([make_request(ids=ids, sde_type="dance", steps=(0, 1))])
        expected = torch.stack([initial_latent(77, i, (16, 8, 8)) for i in ids])
        assert torch.equal(drawn.latents_NUPC[:, 0], expected)


def test_a_candidates_step_noise_depends_on_its_id_alone(engine, make_request):
    """In 1, 2 and 8 outputs, and beside another prompt: the same candidate, up to the rounding of other shapes."""
    (alone,) = engine.generate([make_request(ids=("a",))])
    waves = [
        [make_request(ids=("b", "a"))],
        [make_request(ids=tuple("bcdefgha"))],
        [
            make_request(ids=("b", "a")),
            make_request("a blue square on a red background", ids=("a", "x"), group_index=1),
        ],
    ]
    for wave in waves:
        drawn = engine.generate(wave)[0]
        n = wave[0].sample_ids.index("a")
        torch.testing.assert_close(drawn.latents_NUPC[n], alone.latents_NUPC[0], atol=ALONE_ATOL, rtol=0)
        torch.testing.assert_close(drawn.log_probs_NS[n], alone.log_probs_NS[0], atol=FP32_ATOL, rtol=0)


def test_prompts_of_other_lengths_in_one_forward_change_nothing_for_a_candidate(engine, make_request):
    prompts = [
        "a circle",
        "a red circle on a blue background",
        "a yellow triangle on a green background with text on it",
    ]
    wave = [make_request(prompt, ids=("a", "b"), group_index=g) for g, prompt in enumerate(prompts)]
    together = engine.generate(wave)
    for request, drawn in zip(wave, together, strict=True):
        (alone,) = engine.generate([request])
        assert torch.equal(drawn.prompt_embeds_LE, alone.prompt_embeds_LE)
        torch.testing.assert_close(drawn.latents_NUPC, alone.latents_NUPC, atol=ALONE_ATOL, rtol=0)
    assert len({d.prompt_embeds_LE.shape[0] for d in together}) > 1


def test_a_wave_cut_into_several_forwards_is_the_same_wave(engine, make_request):
    wave = [make_request(ids=tuple("abcde")), make_request("a green star", ids=tuple("abc"), group_index=1)]
    whole = engine.generate(wave)
    answer = post(
        engine, "/rollout/generate", json=wave_body(wave, candidates_per_forward=3), headers={"accept": SAFETENSORS}
    )
    tensors = load_tensors(answer.content)
    for g, drawn in enumerate(whole):
        torch.testing.assert_close(tensors[f"{g}.latents_NUPC"], drawn.latents_NUPC, atol=ALONE_ATOL, rtol=0)
        torch.testing.assert_close(tensors[f"{g}.log_probs_NS"], drawn.log_probs_NS, atol=FP32_ATOL, rtol=0)


def test_engine_noise_differs_by_slot_and_repeats_by_seed(engine, make_request):
    request = make_request(driver_xt=False, sde_type="dance", steps=(0, 1))
    (first,), (second,) = engine.generate([request]), engine.generate([request])
    assert torch.equal(first.latents_NUPC, second.latents_NUPC)
    assert not torch.equal(first.latents_NUPC[0], first.latents_NUPC[1])


# ---------------------------------------------------------------------- trajectory and log-prob


@pytest.mark.parametrize("sde_type", STEPS)
def test_the_engines_log_prob_is_that_of_the_stored_state_under_replay(engine, oracle, make_request, replay, sde_type):
    (drawn,) = engine.generate([make_request(ids=tuple("abcd"), sde_type=sde_type, steps=STEPS[sde_type])])
    assert drawn.latents_NUPC.dtype == torch.float32
    assert bool(torch.isfinite(drawn.log_probs_NS).all())
    differences = replay(oracle._loaded().transformer, drawn)
    per_step = dict(zip(STEPS[sde_type], differences, strict=True))
    assert max(differences) <= FP32_ATOL, per_step


@pytest.mark.parametrize("sde_type", STEPS)
def test_both_engines_draw_the_same_candidates(engine, oracle, make_request, sde_type):
    request = make_request(ids=tuple("ab"), sde_type=sde_type, steps=STEPS[sde_type])
    (served,), (in_process,) = engine.generate([request]), oracle.generate([request])
    torch.testing.assert_close(served.latents_NUPC, in_process.latents_NUPC, atol=ALONE_ATOL, rtol=0)
    torch.testing.assert_close(served.log_probs_NS, in_process.log_probs_NS, atol=FP32_ATOL, rtol=0)
    torch.testing.assert_close(served.prompt_embeds_LE, in_process.prompt_embeds_LE, atol=1e-5, rtol=0)
    assert int((served.images_NHWC.int() - in_process.images_NHWC.int()).abs().max()) <= 1


def test_the_last_step_of_cps_has_no_log_prob_and_says_so(engine, make_request):
    body = wave_body([make_request(sde_type="cps", steps=(6,))])
    body["rollout_sde_step_indices"] = [7]
    body["rollout_return_step_indices"] = [7, 8]
    with pytest.raises(ContractError):
        parse(body)
    assert post(engine, "/rollout/generate", json=body).status_code == 400
    (drawn,) = engine.generate([make_request(sde_type="cps", steps=(0, 1, 2, 3, 4, 5, 6))])
    assert bool(torch.isfinite(drawn.log_probs_NS).all())


def test_all_states_come_when_they_are_asked_for(engine, make_request):
    body = wave_body([make_request(ids=("a",), steps=(3,))])
    body["rollout_return_step_indices"] = list(range(9))
    items = post(engine, "/rollout/generate", json=body).json()
    assert items[0]["dit_trajectory"]["latents"]["shape"] == [9, 16, 64]
    assert items[0]["rollout_log_probs"]["shape"] == [1]


# ---------------------------------------------------------------------- text window


def test_a_prompt_of_512_tokens_is_kept_whole_and_a_longer_one_is_refused(engine, make_request):
    def draw(words: int):
        return engine.generate([make_request(" ".join(["red"] * words), ids=("a",))])[0].prompt_embeds_LE.shape[0]

    base = draw(1)
    per_word = draw(11) - base
    words = 1 + (512 - base) * 10 // per_word
    assert 512 - per_word < draw(words) <= 512
    with pytest.raises(EngineError) as error:
        draw(words + 12)
    assert "512" in error.value.what
    assert error.value.hint == LONG_PROMPT_HINT


# ---------------------------------------------------------------------- sleep and wake


def test_asleep_the_engine_refuses_and_awake_it_draws_the_same_bits(engine, make_request):
    request = make_request()
    (before,) = engine.generate([request])
    engine.sleep(["weights"])
    engine.sleep(["weights"])
    assert engine.info()["asleep"] == ["weights"]
    with pytest.raises(EngineError):
        engine.generate([request])
    engine.sleep()
    engine.wake(["weights"])
    assert engine.info()["asleep"] == ["frozen"]
    with pytest.raises(EngineError):
        engine.generate([request])
    engine.wake()
    (after,) = engine.generate([request])
    assert torch.equal(before.latents_NUPC, after.latents_NUPC)
    assert torch.equal(before.images_NHWC, after.images_NHWC)


def test_an_unknown_tag_is_refused(engine):
    for call in (engine.sleep, engine.wake):
        with pytest.raises(EngineError) as error:
            call(["kv_cache"])
        assert "kv_cache" in error.value.what
    assert engine.info()["asleep"] == []


def test_sleep_and_wake_answer_with_the_bytes_they_moved(engine):
    answers = [
        post(engine, path, json={"tags": ["weights"]}).json()
        for path in ("/release_memory_occupation", "/resume_memory_occupation")
    ]
    released, resumed = answers
    assert released["bytes"] == resumed["bytes"] > 0
