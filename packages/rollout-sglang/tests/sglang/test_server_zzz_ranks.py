"""One engine of two ranks: the real patched server, which divides the layers of a model of four heads between them.

After `zz_life`, when the session's own server has ended: a small machine holds one at a time.

Two processes on a CPU, over shared memory. On a machine with two GPUs the same tests carry the marker `multigpu`; then
each rank is on a card of its own and takes its weights over CUDA IPC from a trainer's process of that card.
"""

import shutil
from collections.abc import Iterator, Mapping

import pytest
import torch
from diffusers import QwenImageTransformer2DModel
from flowgrpo_rollout_sglang.diffusers_engine import DiffusersEngine
from flowgrpo_rollout_sglang.engine import EngineError, SGLangNativeGenerationEngine
from flowgrpo_rollout_sglang.wire import WeightSyncError
from flowgrpo_rollout_sglang.wire.testing import RankSenders
from safetensors.torch import save
from torch import Tensor

pytestmark = pytest.mark.timeout(900)  # the server's start is in the first test's time

RANKS = 2
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FP32_ATOL = {"cpu": 5e-6, "cuda": 5e-5}[DEVICE]
"""fp32 latents of two ranks against one process, whose sums are in another order. Seen on the CPU: 1e-6."""
TARGETS = ("attn.to_q", "attn.to_out.0", "attn.add_k_proj", "img_mlp.net.2", "img_in")
"""Column-parallel, row-parallel, and a column-parallel layer whose outputs are joined again."""


@pytest.fixture(scope="module")
def folder(model_folder, tmp_path_factory) -> str:
    """The tiny model with a random transformer of four heads: its own has three, which two ranks cannot divide."""
    folder = tmp_path_factory.mktemp("four-heads") / "model"
    shutil.copytree(model_folder, folder)
    config = dict(QwenImageTransformer2DModel.load_config(folder / "transformer"))
    torch.manual_seed(0)
    transformer = QwenImageTransformer2DModel.from_config(config | {"num_attention_heads": 4, "num_layers": 2})
    shutil.rmtree(folder / "transformer")
    transformer.save_pretrained(folder / "transformer")
    return str(folder)


@pytest.fixture(scope="module")
def ranks(folder, make_config, started) -> Iterator[SGLangNativeGenerationEngine]:
    """The engine of two ranks; the session's own server is stopped for it, and started again if it ran."""
    running = [other for other in started if other._server is not None]
    for other in running:
        other.stop()
    engine = SGLangNativeGenerationEngine(make_config("ranks", num_gpus=RANKS, model_path=folder))
    engine.start()
    yield engine
    engine.stop()
    for other in running:
        other.start()


@pytest.fixture(scope="module")
def alone(folder, make_config) -> DiffusersEngine:
    """The in-process engine with the same model."""
    engine = DiffusersEngine(make_config("alone", model_path=folder))
    engine.start()
    return engine


@pytest.fixture(scope="module")
def senders() -> Iterator[RankSenders]:
    """A trainer's process for each rank."""
    with RankSenders(RANKS, DEVICE) as senders:
        yield senders


@pytest.fixture
def weights(alone) -> dict[str, Tensor]:
    return moved(alone, seed=3)


def moved(alone: DiffusersEngine, seed: int) -> dict[str, Tensor]:
    """New weights for every tensor of the base, not far from the loaded ones."""
    generator = torch.Generator().manual_seed(seed)
    named = alone._loaded().transformer.named_parameters()
    return {n: p.cpu() + 0.02 * torch.randn(p.shape, generator=generator) for n, p in named}


def give(alone: DiffusersEngine, weights: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in alone._loaded().transformer.named_parameters():
            parameter.copy_(weights[name])


def latents(engine, request) -> Tensor:
    return engine.generate([request])[0].latents_NUPC


def test_two_ranks_draw_what_one_process_draws(ranks, alone, make_request):
    requests = [make_request(), make_request("a green square on a red background", ids=("c", "d", "e"), group_index=1)]
    for ours, theirs in zip(ranks.generate(requests), alone.generate(requests), strict=True):
        torch.testing.assert_close(ours.latents_NUPC, theirs.latents_NUPC.cpu(), atol=FP32_ATOL, rtol=0)
        torch.testing.assert_close(ours.log_probs_NS, theirs.log_probs_NS.cpu(), atol=FP32_ATOL, rtol=0)
        assert int((ours.images_NHWC.int() - theirs.images_NHWC.int()).abs().max()) <= 1
    assert len(set(ranks.info()["devices"])) == (RANKS if DEVICE == "cuda" else 1)


def test_replay_of_what_two_ranks_drew_agrees(ranks, alone, make_request, replay):
    (drawn,) = ranks.generate([make_request(ids=tuple("abcdefgh"))])
    assert max(replay(alone._loaded().transformer, drawn)) < FP32_ATOL


def test_every_rank_takes_its_slices_from_its_own_sender_and_the_engine_draws_with_all_of_them(
    ranks, alone, senders, weights, make_request
):
    before = latents(ranks, make_request())
    reports = senders.send(ranks, weights, ranks.policy_version + 1)
    whole = sum(tensor.numel() * 4 for tensor in weights.values())
    assert all(whole / RANKS < report.bytes < whole for report in reports)
    ranks.commit(ranks.policy_version + 1)
    give(alone, weights)
    (drawn,) = ranks.generate([make_request()])
    assert drawn.policy_version == ranks.policy_version == ranks.info()["policy_version"]
    assert not torch.allclose(drawn.latents_NUPC, before, atol=1e-3)
    torch.testing.assert_close(drawn.latents_NUPC, latents(alone, make_request()).cpu(), atol=FP32_ATOL, rtol=0)


def test_a_bucket_that_goes_wrong_for_one_rank_is_refused_by_all(ranks, senders, weights, make_request):
    version = ranks.policy_version
    with pytest.raises(WeightSyncError) as error:
        senders.send(ranks, weights, version + 1, corrupt=1)
    assert (error.value.reason, error.value.engine) == ("fingerprint", f"{ranks.name}.1")
    with pytest.raises(WeightSyncError) as refused:  # rank 0 has verified, and is the first to be asked
        ranks.commit(version + 1)
    assert (refused.value.reason, refused.value.engine) == ("unverified", f"{ranks.name}.1")
    with pytest.raises(WeightSyncError):
        ranks.generate([make_request()])
    ranks.abort()
    with pytest.raises(WeightSyncError):  # written and not committed: half new for all it knows
        ranks.generate([make_request()])
    assert ranks.policy_version == ranks.info()["policy_version"] == version
    senders.send(ranks, weights, version + 1)
    ranks.commit(version + 1)
    assert ranks.generate([make_request()])[0].policy_version == version + 1


def test_a_rank_that_was_sent_nothing_keeps_the_others_from_committing(ranks, senders, weights, make_request):
    version, before = ranks.policy_version, latents(ranks, make_request())
    senders.send(ranks, weights, version + 1, only=0)
    with pytest.raises(WeightSyncError) as error:
        ranks.commit(version + 1)
    assert error.value.engine == f"{ranks.name}.1"
    with pytest.raises(EngineError):
        ranks.abort(RANKS)
    ranks.abort()
    senders.send(ranks, weights, version + 1)
    ranks.commit(version + 1)
    assert torch.equal(latents(ranks, make_request()), before)


def test_whole_tensors_are_refused_by_name_before_a_byte(ranks, senders, weights, make_request):
    before = latents(ranks, make_request())
    with pytest.raises(WeightSyncError) as error:
        senders.send(ranks, weights, ranks.policy_version + 1, whole=True)
    assert error.value.reason == "shape"
    assert "img_in.weight" in error.value.tensors
    ranks.abort()
    assert torch.equal(latents(ranks, make_request()), before)


@pytest.mark.multigpu
def test_slices_from_another_card_are_refused_naming_both_cards(ranks, senders, weights, make_request):
    before = latents(ranks, make_request())
    with pytest.raises(WeightSyncError) as error:
        senders.send(ranks, weights, ranks.policy_version + 1, swapped=True)
    assert error.value.reason == "device"
    assert all(card in error.value.what for card in ranks.info()["devices"])
    ranks.abort()
    assert torch.equal(latents(ranks, make_request()), before)


def test_every_rank_sleeps_and_wakes_bit_for_bit(ranks, senders, weights, make_request):
    before = latents(ranks, make_request())
    ranks.sleep()
    with pytest.raises(EngineError):
        ranks.generate([make_request()])
    ranks.wake(["weights"])
    senders.send(ranks, weights, ranks.policy_version + 1)
    ranks.commit(ranks.policy_version + 1)
    ranks.wake()
    assert torch.equal(latents(ranks, make_request()), before)


def test_sglangs_own_tensor_route_is_refused_by_an_engine_of_parts(ranks):
    answer = ranks._loaded().client.post("/update_weights_from_tensor", json={"serialized_named_tensors": []})
    assert answer.status_code == 400


# ---------------------------------------------------------------------- LoRA, last: it cannot be undone


@pytest.fixture
def adapter(weights, draw_adapter) -> dict[str, Tensor]:
    """Of layers of each kind."""
    return draw_adapter(weights, TARGETS)


def merged(weights: Mapping[str, Tensor], adapter: Mapping[str, Tensor], scale: float) -> dict[str, Tensor]:
    found = dict(weights)
    for name in (n for n in adapter if ".lora_A." in n):
        module = name.removesuffix(".lora_A.weight")
        delta = adapter[f"{module}.lora_B.weight"] @ adapter[name]
        found[f"{module}.weight"] = weights[f"{module}.weight"] + scale * delta
    return found


def test_an_adapter_is_divided_as_its_layers_are(ranks, alone, senders, weights, adapter, make_request):
    """From tensors in one request, then in a transaction of each rank: as the merged weights in one process."""
    senders.send(ranks, weights, ranks.policy_version + 1)
    ranks.commit(ranks.policy_version + 1)
    client, body = ranks._loaded().client, save(dict(adapter))
    short = adapter | {"img_in.lora_B.weight": adapter["img_in.lora_B.weight"][:64].clone()}
    settings = {"rank": 4, "alpha": 8.0}
    assert client.post("/set_lora_from_tensor", params=settings, content=save(short)).status_code == 400
    answer = client.post("/set_lora_from_tensor", params=settings, content=body).json()
    assert answer["applied"] == len(adapter) == 2 * (4 * 2 + 1)
    ranks.policy_version = answer["policy_version"]
    give(alone, merged(weights, adapter, 2.0))  # alpha / rank
    torch.testing.assert_close(
        latents(ranks, make_request()), latents(alone, make_request()).cpu(), atol=4 * FP32_ATOL, rtol=0
    )
    halved = {n: t * 0.5 if ".lora_B." in n else t for n, t in adapter.items()}
    senders.send(ranks, halved, ranks.policy_version + 1, mode="adapter")
    ranks.commit(ranks.policy_version + 1)
    give(alone, merged(weights, adapter, 1.0))
    torch.testing.assert_close(
        latents(ranks, make_request()), latents(alone, make_request()).cpu(), atol=4 * FP32_ATOL, rtol=0
    )
