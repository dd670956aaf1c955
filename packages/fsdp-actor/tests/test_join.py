"""How many rows share a forward, how many blocks recompute and stay gathered, from what probes measured."""

import pytest
import torch
from flowgrpo_fsdp_actor.join import PROBE_KEPT, PROBE_ROWS, RowMemory, Units
from flowgrpo_fsdp_actor.plan import Join
from flowgrpo_fsdp_actor.recompute import make_recomputable, recompute_first
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
    join = memory.choose(available, 48, 12)
    assert join.rows == 12
    assert 0 < join.recomputed < BLOCKS
    assert FIXED + 12 * memory.row(join.recomputed) <= available < FIXED + 12 * memory.row(join.recomputed - 1)


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
