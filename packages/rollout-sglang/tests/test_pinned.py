import pytest
import torch
from flowgrpo_rollout_sglang.pinned import _SLICE, faulted_block, pinned_block


def test_a_block_is_whole_zero_and_writable_up_to_its_last_byte():
    block, _ = faulted_block(_SLICE + 5)
    assert block.shape == (_SLICE + 5,)
    assert not bool(block.any())
    block[-1] = 7
    assert int(block[-1]) == 7


@pytest.mark.gpu
def test_a_pinned_block_is_page_locked_and_copies_round_trip():
    block = pinned_block(_SLICE + 5)
    assert block.is_pinned()
    data = torch.randint(0, 256, block.shape, dtype=torch.uint8, device="cuda")
    block.copy_(data, non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(block, data.cpu())
