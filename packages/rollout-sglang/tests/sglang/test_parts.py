"""The server's parts that need no server: sleep and wake, and the adapter beside a linear layer."""

import pytest
import torch
from flowgrpo_rollout_sglang.server.adapter import Adapter, base_parameters, modules_and_rank
from flowgrpo_rollout_sglang.server.memory import Memory, UnknownTagError
from peft import LoraConfig, inject_adapter_in_model
from torch import nn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class TupleLinear(nn.Linear):
    """Returns (output, bias to add later), as SGLang's linear layers do."""

    def forward(self, x):
        return super().forward(x), None


def two_layers(kind=nn.Linear) -> nn.Module:
    torch.manual_seed(0)
    model = nn.ModuleDict({"to_q": kind(8, 6), "to_k": kind(8, 6)}).to(DEVICE)
    return nn.ModuleDict({"attn": model})


def test_sleep_empties_the_storage_and_wake_fills_it_bit_for_bit():
    model, frozen = two_layers(), two_layers()
    memory = Memory({"weights": [model], "frozen": [frozen]})
    before = [p.clone() for p in (*model.parameters(), *frozen.parameters())]
    held = next(model.parameters())
    nbytes = sum(p.untyped_storage().nbytes() for p in model.parameters())
    assert memory.release(["weights"]) == nbytes
    assert held.untyped_storage().nbytes() == 0
    assert memory.asleep == {"weights"}
    memory.release(None)
    assert memory.release(None) == 0
    memory.resume(None)
    assert memory.asleep == set()
    assert all(torch.equal(a, b) for a, b in zip(before, (*model.parameters(), *frozen.parameters()), strict=True))
    assert held is next(model.parameters())


def test_a_weight_written_between_two_sleeps_survives_the_second():
    model = two_layers()
    memory = Memory({"weights": [model]})
    memory.release(None)
    memory.resume(None)
    memory.touch("weights")
    with torch.no_grad():
        next(model.parameters()).fill_(3.0)
    memory.release(None)
    memory.resume(None)
    assert bool((next(model.parameters()) == 3.0).all())


def test_of_a_sync_that_says_what_it_writes_nothing_else_is_copied_out_again():
    """So the base beside an adapter leaves the card once in a run."""
    model = two_layers()
    written, untouched = model["attn"]["to_q"].weight, model["attn"]["to_k"].weight
    before = untouched.clone()
    memory = Memory({"weights": [model]})
    memory.touch("weights", [written])  # before the first sleep, which copies all of it
    for value in (3.0, 4.0):
        memory.release(None)
        memory.resume(None)
        memory.touch("weights", [written])
        with torch.no_grad():
            written.fill_(value)
            untouched.fill_(value)  # without a word: comes back as it was
    memory.release(None)
    memory.resume(None)
    assert bool((written == 4.0).all())
    assert torch.equal(untouched, before)
    memory.touch("weights", [written])
    memory.touch("weights")
    with torch.no_grad():
        untouched.fill_(5.0)
    memory.release(None)
    memory.resume(None)
    assert bool((untouched == 5.0).all())


def test_tensors_that_were_replaced_while_awake_are_the_ones_that_come_back():
    """SGLang casts a VAE by giving its parameters new storage."""
    model = two_layers()
    memory = Memory({"frozen": [model]})
    memory.release(None)
    memory.resume(None)
    model.to(torch.bfloat16)
    before = [p.clone() for p in model.parameters()]
    memory.release(None)
    memory.resume(None)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_storages_shared_by_two_parameters_are_moved_once():
    model = two_layers()
    model["attn"]["to_k"].weight = model["attn"]["to_q"].weight
    memory = Memory({"weights": [model]})
    before = model["attn"]["to_q"].weight.clone()
    memory.release(None)
    memory.resume(None)
    assert torch.equal(model["attn"]["to_k"].weight, before)


def test_an_unknown_tag_is_refused_before_anything_sleeps():
    memory = Memory({"weights": [two_layers()]})
    with pytest.raises(UnknownTagError):
        memory.release(["weights", "kv_cache"])
    assert memory.asleep == set()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", [nn.Linear, TupleLinear])
def test_the_adapter_gives_the_bits_that_peft_gives(kind, dtype):
    model, reference = two_layers(kind).to(dtype), two_layers().to(dtype)
    adapter = Adapter(model, rank=4, alpha=6.0, target_modules=["attn.to_q"])
    inject_adapter_in_model(LoraConfig(r=4, lora_alpha=6.0, target_modules=["to_q"]), reference)
    theirs = {n.replace(".default.", "."): p for n, p in reference.named_parameters() if ".lora_" in n}
    assert adapter.targets().keys() == theirs.keys()
    torch.manual_seed(1)
    with torch.no_grad():
        for name, ours in adapter.targets().items():
            ours.copy_(theirs[name].copy_(torch.randn(ours.shape).to(dtype)))
    x = torch.randn(3, 8, device=DEVICE).to(dtype)
    ours = model["attn"]["to_q"](x)
    assert torch.equal(ours[0] if kind is TupleLinear else ours, reference["attn"]["to_q"](x))


def test_an_adapter_starts_as_the_base_keeps_its_names_and_leaves_no_trace():
    model = two_layers()
    names = list(base_parameters(model))
    x = torch.randn(3, 8, device=DEVICE)
    before = model["attn"]["to_q"](x)
    adapter = Adapter(model, rank=2, alpha=2.0, target_modules=["to_q", "to_k"])
    assert torch.equal(model["attn"]["to_q"](x), before)
    assert list(base_parameters(model)) == names
    adapter.remove()
    assert [n for n, _ in model.named_parameters()] == names


@pytest.mark.parametrize("targets", [["to_v"], [], ["o_q"]], ids=str)
def test_target_modules_that_name_no_layer_are_refused(targets):
    with pytest.raises(ValueError):
        Adapter(two_layers(), rank=2, alpha=2.0, target_modules=targets)


def test_modules_and_rank_are_read_from_a_complete_adapter_alone():
    whole = {"a.lora_A.weight": (4, 8), "a.lora_B.weight": (6, 4)}
    assert modules_and_rank(whole) == (("a",), 4)
    for fault in (
        {"b.lora_A.weight": (4, 8)},
        {"b.weight": (4, 8)},
        {"b.lora_A.weight": (2, 8), "b.lora_B.weight": (6, 2)},
    ):
        with pytest.raises(ValueError):
            modules_and_rank({**whole, **fault})
