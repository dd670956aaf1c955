"""How many rows share a forward, how many blocks recompute and stay gathered, from what probes measured."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from flowgrpo_fsdp_actor import ActorConfig, join
from flowgrpo_fsdp_actor.join import MEMORY_SHARE, PROBE_KEPT, PROBE_ROWS, RowMemory, Units, choose_join, few_sizes
from flowgrpo_fsdp_actor.optimizer import missing_moments
from flowgrpo_fsdp_actor.plan import GroupShape, Join, plan_updates
from flowgrpo_fsdp_actor.recompute import RecomputableForward, make_recomputable, recompute_first, recomputing
from flowgrpo_fsdp_actor.update import Policy
from flowgrpo_rollout_sglang.config import SamplingConfig
from torch import nn

BLOCKS, FIXED, INPUTS, ACTIVATIONS = 60, 2e9, 9e6, 58e6


def peak(rows, kept):
    """What a probe sees: the inputs of the blocks that recompute, and the activations of those that keep, or of one."""
    return FIXED + rows * ((BLOCKS - kept) * INPUTS + max(1, kept) * ACTIVATIONS)


@pytest.fixture
def memory():
    recomputed, kept = ([peak(rows, k) for rows in PROBE_ROWS] for k in (0, PROBE_KEPT))
    return RowMemory.of_peaks(tuple(recomputed), tuple(kept), BLOCKS)


def test_two_pairs_of_probes_give_what_a_block_keeps_of_a_row(memory):
    assert memory.fixed == pytest.approx(FIXED)
    assert memory.inputs == pytest.approx(INPUTS)
    assert memory.activations == pytest.approx(ACTIVATIONS)


@pytest.mark.parametrize("fill", [1, 5, 12])
def test_no_block_recomputes_where_the_rows_fit_without(memory, fill):
    assert memory.choose(FIXED + 12.5 * BLOCKS * ACTIVATIONS, 48, fill) == Join(12, 0)
    assert memory.choose(FIXED + 12.5 * BLOCKS * ACTIVATIONS, 7, fill) == Join(7, 0)


def test_as_few_blocks_recompute_as_make_the_rows_fit(memory):
    available = FIXED + 6 * BLOCKS * ACTIVATIONS
    found = memory.choose(available, 48, 12)
    assert found.rows == 12
    assert 0 < found.recomputed < BLOCKS
    assert FIXED + 12 * memory.row(found.recomputed) <= available < FIXED + 12 * memory.row(found.recomputed - 1)


def test_where_even_recomputing_everything_is_not_enough_as_many_rows_as_fit_are_taken(memory):
    assert memory.choose(FIXED + 3.5 * (BLOCKS * INPUTS + ACTIVATIONS), 48, 12) == Join(3, BLOCKS)
    assert memory.choose(0.0, 48, 12) == Join(1, BLOCKS)


UNITS = Units(BLOCKS, nbytes=7e8)


@pytest.mark.parametrize(("rows", "joined"), [(48, 12), (50, 13), (16, 16), (7, 7)])
def test_under_fsdp2_memory_beyond_the_rows_that_fill_the_gpu_keeps_blocks_gathered(memory, rows, joined):
    """Forwards are of one size: of 50 rows, 4 with 13."""
    taken = FIXED + joined * BLOCKS * ACTIVATIONS
    assert memory.choose(taken + 5.5 * UNITS.nbytes, rows, 12, units=UNITS) == Join(joined, 0, 5)
    assert memory.choose(taken + 1e12, rows, 12, units=UNITS) == Join(joined, 0, BLOCKS)
    assert memory.choose(taken + 1e12, rows, 12, recompute_all=True, units=UNITS) == Join(joined, BLOCKS, BLOCKS)


def test_what_a_forward_leaves_free_because_all_are_of_one_size_keeps_blocks_gathered(memory):
    """15 rows would fit, but 16 make two forwards of 8."""
    chosen = memory.choose(FIXED + 15 * BLOCKS * ACTIVATIONS, 16, 12, units=UNITS)
    assert chosen == Join(15, 0, int(7 * BLOCKS * ACTIVATIONS / UNITS.nbytes))


def test_no_block_stays_gathered_where_memory_is_short(memory):
    short = FIXED + 6 * BLOCKS * ACTIVATIONS
    assert memory.choose(short, 48, 12, units=UNITS) == memory.choose(short, 48, 12)
    assert memory.choose(0.0, 48, 12, units=UNITS) == Join(1, BLOCKS)


# ---------------------------------------------------------------------- rollouts with other texts


class Texts:
    """What is asked of a `Replay`: groups of pictures of 576 tokens with texts of these lengths."""

    def __init__(self, *lengths):
        self.shapes = [GroupShape(384, 384, num_steps=3, text_tokens=length) for length in lengths]

    def tokens(self, group):
        return 576 + self.shapes[group].text_tokens


def planned(replay, candidates=8, updates=1):
    groups = len(replay.shapes)
    return plan_updates(groups, candidates, rank=0, world_size=1, num_updates=updates, micro_batch_size=0)


class Optimizer(torch.optim.AdamW):
    def __init__(self):
        super().__init__([torch.zeros(3)])


def chosen(config, memory, monkeypatch, first, *, candidates=8, updates=1, moments=0):
    """What the first rollout makes of memory for 17 rows on a GPU, or of the CPU, and how many blocks recompute."""
    free = FIXED + 17.5 * BLOCKS * ACTIVATIONS
    monkeypatch.setattr(join, "_probe", lambda *_: memory)
    monkeypatch.setattr(join, "_free_bytes", lambda: free / MEMORY_SHARE)
    monkeypatch.setattr(join, "missing_moments", lambda optimizer: moments)
    blocks = [RecomputableForward(lambda x: x) for _ in range(BLOCKS)]
    plan = planned(first, candidates, updates)
    limit = choose_join(Policy(nn.Module(), [], Optimizer(), blocks), first, plan, config)
    return limit, sum(block.recomputes for block in blocks)


@pytest.fixture
def config():
    sampling = SamplingConfig(height=384, width=384, num_inference_steps=8, sde_indices=(1, 3, 5), num_sde_steps=3)
    return ActorConfig(model_path="", sampling=sampling, device="cuda")


def rows_with(limit, *texts, updates=1):
    return limit.rows_of(Texts(*texts), planned(Texts(*texts), updates=updates))


def test_a_later_rollout_with_longer_texts_has_fewer_rows_in_a_forward_and_one_with_shorter_texts_no_more(
    config, memory, monkeypatch
):
    """17 rows of 704 tokens fit, 11,968 in all: an update of 48 has 3 forwards of 16."""
    limit, recomputing = chosen(config, memory, monkeypatch, Texts(128, 20))
    assert (limit.sizes[0], limit.tokens, recomputing) == (17, 17 * 704, 0)
    rows = {length: rows_with(limit, 9, length) for length in (128, 9, 400, 1000, 20000)}
    assert rows == {128: 16, 9: 16, 400: 12, 1000: 6, 20000: 1}


@pytest.mark.parametrize("texts", [(500, 9), (9, 500)])
def test_the_longest_text_of_any_update_decides(config, memory, monkeypatch, texts):
    """Two updates of 24 rows; 12 rows of 1,076 tokens would be 12,912."""
    limit, _ = chosen(config, memory, monkeypatch, Texts(128, 20), updates=2)
    assert rows_with(limit, *texts, updates=2) == 8
    first, _ = chosen(config, memory, monkeypatch, Texts(*texts), updates=2)
    assert first.tokens == 17 * 1076


def test_forwards_have_few_sizes_however_many_lengths_texts_have(config, memory, monkeypatch):
    """Each is a graph to compile. Texts of 1 to 512 tokens, pictures of 576."""
    limit, _ = chosen(config, memory, monkeypatch, Texts(128, 128))
    assert len({rows_with(limit, 9, length) for length in range(1, 513)}) <= 3
    assert few_sizes(17) == [17, 12, 8, 6, 4, 3, 2, 1]
    assert few_sizes(1) == [1]


def test_a_first_rollout_of_few_rows_does_not_limit_longer_texts_to_less_than_the_memory_holds(
    config, memory, monkeypatch
):
    """12 rows."""
    limit, _ = chosen(config, memory, monkeypatch, Texts(128, 9), candidates=2)
    assert (limit.sizes[0], limit.tokens) == (12, 17 * 704)


def test_room_is_left_for_the_moments_that_adamw_does_not_have_yet(config, memory, monkeypatch):
    limit, _ = chosen(config, memory, monkeypatch, Texts(128, 128), moments=4 * BLOCKS * ACTIVATIONS / MEMORY_SHARE)
    assert limit.tokens == 13 * 704


def test_moments_are_missing_until_the_first_step_and_only_on_a_gpu():
    class OnGpu(torch.Tensor):
        is_cuda = True

    weight, elsewhere = torch.zeros(5).as_subclass(OnGpu), torch.zeros(5)
    waiting = SimpleNamespace(param_groups=[{"params": [weight, elsewhere]}], state={})
    assert missing_moments(waiting) == 2 * 5 * 4
    waiting.state = {weight: {"step": 1}}
    assert missing_moments(waiting) == 0


def test_on_a_cpu_the_rows_of_a_rollout_depend_on_its_own_texts_alone(config, memory, monkeypatch):
    """So a run that was resumed joins as the one that was not, and has its bits."""
    config = replace(config, device="cpu", fsdp_activation_checkpointing=True)
    rollouts = [Texts(20), Texts(900, 3), Texts(128, 128)]
    rows = []
    for first in rollouts:
        limit, recomputing = chosen(config, memory, monkeypatch, first)
        assert recomputing == BLOCKS
        rows.append([limit.rows_of(later, planned(later)) for later in rollouts])
    assert rows[0] == rows[1] == rows[2]
    assert len(set(rows[0])) == 3


# ---------------------------------------------------------------------- recomputing


def test_for_the_parity_check_all_blocks_recompute_and_afterwards_those_that_did_before():
    blocks = [RecomputableForward(lambda x: x) for _ in range(4)]
    recompute_first(blocks, 2)
    with recomputing(blocks):
        assert all(block.recomputes for block in blocks)
    assert [block.recomputes for block in blocks] == [True, True, False, False]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_blocks_that_recompute_run_again_in_the_backward_with_the_same_gradients_bit_for_bit(count):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(3)))
    runs = []
    model[0].register_forward_pre_hook(lambda *_: runs.append("call"))  # of the module, not of its forward
    model[0][0].register_forward_pre_hook(lambda *_: runs.append("forward"))
    x = torch.randn(2, 5)

    def gradients():
        model.zero_grad()
        model(x).square().sum().backward()
        return [p.grad.clone() for p in model.parameters()]

    plain = gradients()
    names = list(model.state_dict())
    recompute_first(make_recomputable(model, ["0", "1", "2"]), count)
    assert list(model.state_dict()) == names
    runs.clear()
    assert all(torch.equal(a, b) for a, b in zip(gradients(), plain, strict=True))
    assert runs == ["call", "forward", "forward"]
