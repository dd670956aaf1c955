"""Weight transactions and LoRA on the real patched server: full, adapter, refused, and SGLang's own route.

Over shared memory on a CPU; on a GPU over CUDA IPC into the server, as in training.
"""

import base64
import json
import pickle
import runpy
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from flowgrpo_rollout_sglang.diffusers_engine import DiffusersEngine
from flowgrpo_rollout_sglang.engine import EngineError
from flowgrpo_rollout_sglang.wire import WeightSender, WeightSyncError
from safetensors.torch import save
from torch import Tensor

pytestmark = pytest.mark.timeout(900)  # the server's start is in the first test's time

FP32_ATOL = 5e-6
"""fp32 latents, the two engines with the same weights. Seen: 1e-6."""
ROWS = runpy.run_path(str(Path(__file__).parent / "rows.py"))
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TARGETS = ("attn.to_q", "attn.to_out.0", "attn.add_k_proj")


def post(engine, path: str, **request):
    return engine._loaded().client.post(path, **request)


def send(receiver, weights: Mapping[str, Tensor], version: int, mode: str = "full") -> None:
    other_process = not isinstance(receiver, DiffusersEngine)  # CUDA IPC does not lead back into the same process
    sender = WeightSender("cuda_ipc" if DEVICE == "cuda" and other_process else "shm", wire_dtype="fp32")
    try:
        manifest = sender.manifest([(n, t.shape) for n, t in weights.items()], version=version, mode=mode)
        sender.send(iter(weights.items()), manifest, receiver)
        receiver.commit(version)
    finally:
        sender.close()


@pytest.fixture
def weights(oracle) -> dict[str, Tensor]:
    """New weights for every tensor of the base, not far from the loaded ones."""
    generator = torch.Generator().manual_seed(3)
    named = oracle._loaded().transformer.named_parameters()
    return {n: p + 0.02 * torch.randn(p.shape, generator=generator).to(p) for n, p in named}


@pytest.fixture
def adapter(weights, draw_adapter) -> dict[str, Tensor]:
    """Of some attention layers."""
    return draw_adapter(weights, TARGETS)


def latents(engine, request) -> Tensor:
    return engine.generate([request])[0].latents_NUPC


def test_a_full_sync_makes_both_engines_draw_alike_again(engine, oracle, weights, make_request):
    """First of all in this file: later tests give the server an adapter, after which it takes no full sync."""
    request = make_request()
    before = latents(engine, request)
    send(engine, weights, engine.policy_version + 1)
    send(oracle, weights, oracle.policy_version + 1)
    (drawn,) = engine.generate([request])
    assert drawn.policy_version == engine.policy_version == engine.info()["policy_version"]
    assert not torch.allclose(drawn.latents_NUPC, before, atol=1e-3)
    torch.testing.assert_close(drawn.latents_NUPC, latents(oracle, request), atol=FP32_ATOL, rtol=0)


def test_a_faulty_full_sync_is_refused_before_a_byte_and_the_engine_still_serves(engine, weights, make_request):
    request = make_request()
    before, version = latents(engine, request), engine.policy_version
    name = next(iter(weights))
    faults = {
        "names": [weights | {"bogus.weight": weights[name]}, dict(list(weights.items())[1:])],
        "shape": [weights | {name: torch.zeros(3, 3)}],
    }
    for reason, several in faults.items():
        for faulty in several:
            with pytest.raises(WeightSyncError) as error:
                send(engine, faulty, version + 1)
            assert (error.value.reason, error.value.engine) == (reason, engine.name)
            assert error.value.tensors
    assert engine.policy_version == version
    assert torch.equal(latents(engine, request), before)


def test_a_version_that_is_already_served_is_refused(engine, weights):
    send(engine, weights, engine.policy_version + 1)
    with pytest.raises(WeightSyncError) as error:
        send(engine, weights, engine.policy_version)
    assert error.value.reason == "version"


def test_between_begin_and_commit_the_engine_refuses_to_draw(engine, weights, make_request):
    version = engine.policy_version
    sender = WeightSender("cuda_ipc" if DEVICE == "cuda" else "shm", wire_dtype="fp32")
    manifest = sender.manifest([(n, t.shape) for n, t in weights.items()], version=version + 1)
    sender.send(iter(weights.items()), manifest, engine)
    with pytest.raises(WeightSyncError) as error:
        engine.generate([make_request()])
    assert error.value.reason == "busy"
    engine.abort()
    with pytest.raises(WeightSyncError):  # written and not committed: half new for all it knows
        engine.generate([make_request()])
    assert engine.policy_version == version
    sender.close()
    send(engine, weights, version + 1)
    assert engine.generate([make_request()])[0].policy_version == version + 1


def test_asleep_the_engine_takes_no_weights(engine, weights):
    engine.sleep(["weights"])
    try:
        with pytest.raises(EngineError):
            send(engine, weights, engine.policy_version + 1)
        assert stock_update(engine, dict(list(weights.items())[:1])).status_code == 400
    finally:
        engine.wake()


def test_awake_for_weights_alone_it_takes_them(engine, weights, make_request):
    engine.sleep()
    engine.wake(["weights"])
    send(engine, weights, engine.policy_version + 1)
    engine.wake()
    assert engine.generate([make_request()])[0].policy_version == engine.policy_version


# ---------------------------------------------------------------------- SGLang's own tensor route


def stock_update(engine, tensors: Mapping[str, Tensor]):
    """A POST in SGLang's own format: a pickled list of (name, tensor), in base64."""
    named = [(name, tensor.cpu()) for name, tensor in tensors.items()]
    payload = base64.b64encode(pickle.dumps({"transformer": named})).decode()
    return post(engine, "/update_weights_from_tensor", json={"serialized_named_tensors": [payload]})


def test_sglangs_tensor_route_refuses_unknown_and_misshapen_names_and_writes_nothing(engine, weights, make_request):
    request = make_request()
    before = latents(engine, request)
    name, tensor = next(iter(weights.items()))
    for faulty in ({name: tensor + 1, "bogus": tensor}, {name: tensor + 1, "proj_out.bias": torch.zeros(7)}):
        answer = stock_update(engine, faulty)
        assert answer.status_code == 400
        assert list(faulty)[1] in answer.json()["message"]
    assert torch.equal(latents(engine, request), before)


def test_a_write_without_a_version_is_fatal_until_the_next_sync(engine, weights, make_request):
    name, tensor = next(iter(weights.items()))
    assert stock_update(engine, {name: tensor}).status_code == 200
    with pytest.raises(EngineError) as error:
        engine.generate([make_request()])
    assert "unversioned_updates" in error.value.what
    send(engine, weights, engine.policy_version + 1)
    engine.generate([make_request()])


@pytest.mark.parametrize("path", ["/v1/set_lora", "/v1/merge_lora_weights", "/update_weights_from_disk"])
def test_routes_that_write_weights_without_a_version_are_refused(engine, path):
    assert post(engine, path, json={"lora_nickname": "x", "model_path": "/x"}).status_code == 409


# ---------------------------------------------------------------------- LoRA, last: it cannot be undone


def set_lora(engine, tensors: Mapping[str, Tensor], alpha: float = 8.0, rank: int = 4):
    return post(engine, "/set_lora_from_tensor", params={"rank": rank, "alpha": alpha}, content=save(dict(tensors)))


def test_faulty_lora_is_refused_and_changes_nothing(engine, adapter, make_request):
    request = make_request()
    before = latents(engine, request)
    first = next(iter(adapter))
    wrong_layer = {n.replace("attn.to_q", "attn.to_z"): t for n, t in adapter.items()}
    faults = [
        dict(list(adapter.items())[1:]),
        wrong_layer,
        adapter | {first: torch.zeros(4, 3)},
        adapter | {first: torch.zeros(2, adapter[first].shape[1])},
        {"img_in.weight": torch.zeros(64, 64)},
        {f"transformer.{first}": adapter[first], first: adapter[first].clone()},
    ]
    for faulty in faults:
        assert set_lora(engine, faulty).status_code == 400
    assert set_lora(engine, adapter, rank=8).status_code == 400
    assert engine.info()["adapter"] is None
    assert torch.equal(latents(engine, request), before)


def test_lora_from_tensors_matches_the_merged_weights_and_a_second_one_replaces_it(
    engine, oracle, weights, adapter, make_request
):
    request = make_request()
    send(engine, weights, engine.policy_version + 1)
    wrapped = {f"base_model.model.transformer.{n.replace('.weight', '.default.weight')}": t for n, t in adapter.items()}
    halved = {n: t * 0.5 if ".lora_B." in n else t for n, t in adapter.items()}
    for tensors, scale in ((wrapped, 1.0), (halved, 0.5)):
        answer = set_lora(engine, tensors).json()
        assert answer["applied"] == len(adapter)
        engine.policy_version = answer["policy_version"]
        merged = dict(weights)
        for name in (n for n in adapter if ".lora_A." in n):
            module = name.removesuffix(".lora_A.weight")
            delta = adapter[f"{module}.lora_B.weight"] @ adapter[name]
            merged[f"{module}.weight"] = weights[f"{module}.weight"] + scale * 2.0 * delta  # alpha / rank = 2
        send(oracle, merged, oracle.policy_version + 1)
        torch.testing.assert_close(latents(engine, request), latents(oracle, request), atol=2e-5, rtol=0)


def test_an_adapter_sync_goes_through_the_same_transaction(engine, adapter, make_request):
    if engine.info()["adapter"] is None:
        set_lora(engine, adapter)
    engine.policy_version = engine.info()["policy_version"]
    before = latents(engine, make_request())
    send(engine, {n: -t if ".lora_A." in n else t for n, t in adapter.items()}, engine.policy_version + 1, "adapter")
    assert not torch.allclose(latents(engine, make_request()), before, atol=1e-3)
    with pytest.raises(WeightSyncError) as error:
        send(engine, dict(list(adapter.items())[2:]), engine.policy_version + 1, "adapter")
    assert error.value.reason == "names"


def test_what_adapter_syncs_wrote_survives_each_sleep_and_so_does_the_base(engine, adapter, make_request):
    if engine.info()["adapter"] is None:
        set_lora(engine, adapter)
    engine.policy_version = engine.info()["policy_version"]
    for sign in (1.0, -1.0):
        changed = {n: sign * t if ".lora_A." in n else t for n, t in adapter.items()}
        send(engine, changed, engine.policy_version + 1, "adapter")
        before = latents(engine, make_request())
        engine.sleep()
        engine.wake()
        assert torch.equal(latents(engine, make_request()), before)


def test_with_an_adapter_a_full_sync_is_refused_in_words(engine, weights, adapter):
    if engine.info()["adapter"] is None:
        set_lora(engine, adapter)
        engine.policy_version = engine.info()["policy_version"]
    with pytest.raises(WeightSyncError) as error:
        send(engine, weights, engine.policy_version + 1)
    assert "adapter" in error.value.what
    answer = stock_update(engine, dict(list(weights.items())[:1]))
    assert answer.status_code == 400
    assert "LoRA" in answer.json()["message"]


@pytest.mark.parametrize("row", ROWS["ADAPTER_ROWS"], ids=lambda row: row.__name__)
def test_what_stock_does_otherwise_with_a_lora_holds(contract, row):
    """Each fails on the stock server: test_stock."""
    row(contract)


def test_the_answers_are_json_that_others_can_read(engine):
    assert json.loads(post(engine, "/flowgrpo/weights/abort", json={}).content) == {}
    assert post(engine, "/flowgrpo/weights/begin", json={"manifest": "x"}).status_code == 400
    assert post(engine, "/flowgrpo/weights/steal", json={}).status_code == 404
