from itertools import pairwise

import pytest
import torch
from flowgrpo_rollout_sglang.wire import fingerprint as module
from flowgrpo_rollout_sglang.wire.fingerprint import digest, piece_fingerprint

DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)


def fingerprint(flat):
    return int(piece_fingerprint(flat)) % 2**64


def by_definition(flat):
    """The docstring's formula in plain Python."""
    raw = bytes(flat.contiguous().view(torch.uint8).tolist())
    raw += b"\0" * (-len(raw) % 4)
    total = 0
    for i in range(len(raw) // 4):
        x = i + 1
        x ^= x >> 16
        x = x * 0x85EBCA6B % 2**32
        x ^= x >> 13
        x = x * 0xC2B2AE35 % 2**32
        x ^= x >> 16
        total += int.from_bytes(raw[4 * i : 4 * i + 4], "little") * x
    return total % 2**64


def noise(numel, dtype, seed=0):
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)).to(dtype)


@DTYPES
@pytest.mark.parametrize("numel", [1, 2, 3, 64, 1001])
def test_the_fingerprint_is_the_sum_of_its_definition(numel, dtype):
    assert fingerprint(noise(numel, dtype)) == by_definition(noise(numel, dtype))


@DTYPES
def test_the_fingerprint_of_several_chunks_is_that_of_the_definition(dtype, monkeypatch):
    monkeypatch.setattr(module, "_CHUNK", {"cpu": 64})
    monkeypatch.setattr(module, "_KEPT_WORDS", 128)
    assert fingerprint(noise(1001, dtype)) == by_definition(noise(1001, dtype))


@DTYPES
def test_pieces_add_up_to_the_whole_in_any_order(dtype):
    flat = noise(10_001, dtype)
    item = flat.element_size()
    cuts = [0, 64, 4096, 4160, 10_001]
    parts = [piece_fingerprint(flat[a:b], a * item) for a, b in pairwise(cuts)]
    assert sum(int(part) for part in parts[::-1]) % 2**64 == fingerprint(flat)


@DTYPES
def test_a_view_that_starts_at_an_odd_element_has_the_fingerprint_of_its_copy(dtype):
    flat = noise(101, dtype)[1:]
    assert fingerprint(flat) == fingerprint(flat.clone())


@DTYPES
def test_each_flipped_bit_is_seen(dtype):
    flat = noise(33, dtype)
    before = fingerprint(flat)
    raw = flat.view(torch.uint8)
    for byte in range(raw.numel()):
        for bit in range(8):
            raw[byte] ^= 1 << bit
            assert fingerprint(flat) != before
            raw[byte] ^= 1 << bit
    assert fingerprint(flat) == before


def test_each_pair_of_words_that_changed_places_is_seen():
    flat = noise(40, torch.float32)
    before = fingerprint(flat)
    for i in range(40):
        for j in range(i):
            swapped = flat.clone()
            swapped[[i, j]] = flat[[j, i]]
            assert fingerprint(swapped) != before


def test_a_shift_by_one_element_is_seen():
    flat = noise(1000, torch.bfloat16)
    assert fingerprint(flat.roll(1)) != fingerprint(flat)


def test_the_digest_changes_with_the_names_and_with_a_value():
    assert len({digest("ab", [1, 2]), digest("ab", [2, 1]), digest("ac", [1, 2])}) == 3
