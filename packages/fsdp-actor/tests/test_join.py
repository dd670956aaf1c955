"""How many rows share a forward and how many blocks recompute, from what probes measured; recomputing is exact."""

import pytest
import torch
from flowgrpo_fsdp_actor.join import PROBE_KEPT, PROBE_ROWS, RowMemory
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


@pytest.mark.parametrize("rows", [1, 5, 12])
def test_no_block_recomputes_where_the_rows_fit_without(memory, rows):
    assert memory.choose(FIXED + 12.5 * BLOCKS * ACTIVATIONS, rows) == (12, 0)


def test_as_few_blocks_recompute_as_make_the_rows_fit(memory):
    available = FIXED + 6 * BLOCKS * ACTIVATIONS
    rows, recomputed = memory.choose(available, 12)
    assert rows == 12
    assert 0 < recomputed < BLOCKS
    assert FIXED + 12 * memory.row(recomputed) <= available < FIXED + 12 * memory.row(recomputed - 1)


def test_where_even_recomputing_everything_is_not_enough_as_many_rows_as_fit_are_taken(memory):
    assert memory.choose(FIXED + 3.5 * (BLOCKS * INPUTS + ACTIVATIONS), 12) == (3, BLOCKS)
    assert memory.choose(0.0, 12) == (1, BLOCKS)


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
