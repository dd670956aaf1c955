"""The body of a rollout request: what is taken, and every fault at once. No server, no torch."""

import pickle
import subprocess
import sys

import pytest
from flowgrpo_rollout_sglang.server.contract import GROUP_FIELDS, WAVE_FIELDS, Candidate, ContractError, parse
from flowgrpo_rollout_sglang.sglang_engine import wave_body

BODY = {
    "prompt": "a cat",
    "initial_noise_group_ids": ["a", "b"],
    "initial_noise_seed": 5,
    "height": 64,
    "width": 64,
    "num_inference_steps": 4,
    "rollout_sde_step_indices": [1, 2],
}


def test_a_group_beside_the_wave_is_a_wave_of_one_group():
    wave = parse(BODY)
    group = {name: BODY[name] for name in BODY if name in GROUP_FIELDS}
    rest = {name: BODY[name] for name in BODY if name in WAVE_FIELDS}
    assert parse({"groups": [group], **rest}) == wave
    assert wave.groups[0].candidates == (Candidate("a", 5, 5), Candidate("b", 5, 5))
    assert wave.state_indices == (1, 2, 3)


def test_engine_noise_counts_its_seed_up_by_candidate():
    body = {name: value for name, value in BODY.items() if not name.startswith("initial_noise")}
    wave = parse({**body, "seed": 1234, "num_outputs_per_prompt": 3})
    assert [c.x_T_seed for c in wave.groups[0].candidates] == [1234, 1235, 1236]


def test_every_step_of_a_candidate_may_have_a_seed_of_its_own_candidate():
    wave = parse({**BODY, "denoise_seeds": [7, 8]})
    assert [c.step_seed for c in wave.groups[0].candidates] == [7, 8]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"heigth": 64}, "heigth"),
        ({"rollout_debug_mode": True}, "rollout_debug_mode"),
        ({"guidance_scale": 4.0}, "guidance_scale"),
        ({"seed": 3}, "seed"),
        ({"initial_noise_group_ids": None, "seed": None}, "seed"),
        ({"initial_noise_group_ids": ["a", "a"]}, "initial_noise_group_ids"),
        ({"initial_noise_seed": None}, "initial_noise_seed"),
        ({"num_outputs_per_prompt": 3}, "num_outputs_per_prompt"),
        ({"denoise_seeds": [1]}, "denoise_seeds"),
        ({"sigmas": [1.0, 0.5, 0.0]}, "sigmas"),
        ({"sigmas": [1.0, 0.5, 0.6, 0.2, 0.0]}, "sigmas"),
        ({"rollout_sde_type": "ode"}, "rollout_sde_type"),
        ({"rollout_sde_step_indices": [2, 1]}, "rollout_sde_step_indices"),
        ({"rollout_sde_step_indices": [4]}, "rollout_sde_step_indices"),
        ({"rollout_sde_type": "cps", "rollout_sde_step_indices": [3]}, "rollout_sde_step_indices"),
        ({"rollout_noise_level": 0.0}, "rollout_noise_level"),
        ({"height": None}, "height"),
        ({"prompt": None}, "prompt"),
        ({"initial_noise_latent_shape": [16, 8]}, "initial_noise_latent_shape"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_fault_is_named_by_its_field(change, named):
    with pytest.raises(ContractError) as error:
        parse({**BODY, **change})
    assert any(named in fault for fault in error.value.faults)
    assert pickle.loads(pickle.dumps(error.value)).faults == error.value.faults


def test_all_faults_are_told_at_once():
    with pytest.raises(ContractError) as error:
        parse({"groups": [{"prompt": 3, "seed": 1}, {"prompt": "x", "seed": -1}], "height": 0, "foo": 1})
    assert len(error.value.faults) >= 5


@pytest.mark.parametrize("body", [None, [], {"groups": []}, {"groups": [None]}], ids=str)
def test_a_body_that_is_no_wave_is_refused(body):
    with pytest.raises(ContractError):
        parse(body)


def test_what_the_engine_sends_is_what_the_server_takes(make_request):
    requests = [make_request(group_index=0), make_request("another", ids=("c",), group_index=1)]
    wave = parse(wave_body(requests, candidates_per_forward=4))
    assert [g.prompt for g in wave.groups] == [r.prompt for r in requests]
    assert wave.sigmas == requests[0].sigmas
    assert wave.sde_indices == requests[0].sde_indices
    assert wave.state_indices == requests[0].state_indices
    assert wave.groups[1].candidates == (Candidate("c", 77, 77),)


def test_without_driver_noise_the_seed_counts_over_groups_and_slots(make_request):
    request = make_request(group_index=3, driver_xt=False)
    wave = parse(wave_body([request]))
    assert [c.x_T_seed for c in wave.groups[0].candidates] == [77 + 3 * 2, 77 + 3 * 2 + 1]


def test_the_contract_imports_neither_torch_nor_sglang():
    program = (
        "import sys, flowgrpo_rollout_sglang.server.contract as c; "
        "sys.exit(any(m in sys.modules for m in ('torch', 'sglang')))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
