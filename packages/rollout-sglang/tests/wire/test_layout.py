import pytest
from flowgrpo_rollout_sglang.wire.layout import ALIGN, aligned, bucket_layout, slot_bytes_for
from flowgrpo_rollout_sglang.wire.manifest import TensorEntry
from hypothesis import given
from hypothesis import strategies as st

ENTRIES = st.lists(
    st.builds(
        lambda numel, dtype: TensorEntry(f"t{numel}", (numel,), dtype),
        st.integers(1, 2000),
        st.sampled_from(["bf16", "fp32"]),
    ),
    min_size=1,
    max_size=12,
)


@given(ENTRIES, st.integers(1, 20))
def test_every_byte_of_every_tensor_lies_in_one_piece_and_no_two_pieces_share_a_byte(entries, lines):
    buckets = bucket_layout(tuple(entries), lines * ALIGN)
    starts = [0] * len(entries)
    last = -1
    for bucket in buckets:
        end = 0
        for piece in bucket.pieces:
            assert piece.tensor >= last
            assert piece.start == starts[piece.tensor]
            assert piece.start % ALIGN == piece.offset % ALIGN == 0
            assert piece.offset >= end
            starts[piece.tensor] += piece.nbytes
            last, end = piece.tensor, piece.offset + piece.nbytes
        assert end <= bucket.nbytes <= lines * ALIGN
    assert starts == [entry.nbytes for entry in entries]


@given(ENTRIES, st.integers(1, 20))
def test_every_bucket_but_the_last_is_full_to_the_last_line(entries, lines):
    buckets = bucket_layout(tuple(entries), lines * ALIGN)
    assert all(bucket.nbytes == lines * ALIGN for bucket in buckets[:-1])
    assert sum(bucket.nbytes for bucket in buckets) == sum(aligned(entry.nbytes) for entry in entries)


def test_a_tensor_larger_than_a_bucket_is_split():
    (entry,) = [TensorEntry("w", (5 * ALIGN,), "bf16")]
    pieces = [piece for bucket in bucket_layout((entry,), 4 * ALIGN) for piece in bucket.pieces]
    assert [(p.start, p.nbytes) for p in pieces] == [(0, 4 * ALIGN), (4 * ALIGN, 4 * ALIGN), (8 * ALIGN, 2 * ALIGN)]


def test_a_slot_is_no_larger_than_all_tensors_together():
    entries = [TensorEntry("a", (3,), "bf16"), TensorEntry("b", (100,), "fp32")]
    assert slot_bytes_for(tuple(entries), 512) == ALIGN + 4 * ALIGN
    assert slot_bytes_for((TensorEntry("c", (2**21,), "bf16"),), 1) == 2**20


@pytest.mark.parametrize("size", [0, -ALIGN, ALIGN + 1])
def test_a_bucket_size_that_breaks_the_alignment_is_refused(size):
    with pytest.raises(ValueError):
        bucket_layout((TensorEntry("a", (3,), "bf16"),), size)
