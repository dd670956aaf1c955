import pytest
import torch
from flowgrpo_rollout_sglang.wire import WeightReceiver, WeightSender, lora_merged
from flowgrpo_rollout_sglang.wire.lora import LoraPair


def layer(dtype=torch.bfloat16):
    torch.manual_seed(0)
    weight = torch.randn(12, 20).to(dtype)
    return weight, LoraPair(a=torch.randn(4, 20).to(dtype), b=torch.randn(12, 4).to(dtype) * 0.01, scale=0.5)


def test_the_update_is_added_in_float32_and_rounded_once_by_the_wire():
    weight, pair = layer()
    held = {"w": torch.zeros(12, 20, dtype=torch.bfloat16), "bias": torch.zeros(12, dtype=torch.bfloat16)}
    bias = torch.randn(12)
    sender = WeightSender()
    manifest = sender.manifest([("w", (12, 20)), ("bias", (12,))], version=1)
    before = weight.clone()
    sender.send(lora_merged([("w", weight), ("bias", bias)], {"w": pair}), manifest, WeightReceiver(held, "engine"))

    exact = weight.double() + 0.5 * pair.b.double() @ pair.a.double()
    assert torch.equal(held["w"], exact.float().to(torch.bfloat16))
    assert torch.equal(held["bias"], bias.to(torch.bfloat16))
    assert torch.equal(weight, before)


def test_an_update_too_small_for_bf16_factors_alone_still_moves_the_merged_weight():
    """Adding in bf16 would lose it: 1 + 2^-9 rounds to 1, and 1 + 2^-8 + 2^-9 does not."""
    weight = torch.full((1, 1), 1.0)
    pair = LoraPair(a=torch.tensor([[2.0**-8, 2.0**-9]]).T, b=torch.ones(1, 2), scale=1.0)
    (_, merged) = next(iter(lora_merged([("w", weight)], {"w": pair})))
    assert merged.item() == 1.0 + 2.0**-8 + 2.0**-9


def test_factors_whose_base_weight_is_not_sent_are_named():
    weight, pair = layer()
    with pytest.raises(ValueError) as error:
        list(lora_merged([("w", weight)], {"w": pair, "blocks.0.to_q.weight": pair}))
    assert "blocks.0.to_q.weight" in str(error.value)


def test_factors_that_do_not_fit_their_weight_are_refused():
    weight, pair = layer()
    with pytest.raises(ValueError):
        list(lora_merged([("w", weight.T)], {"w": pair}))
