"""Files as checked blocks: read back bit for bit through any buffer, and not believed once a bit has changed."""

import errno
import os

import pytest
import torch
from flowgrpo_fsdp_actor import checkpoint_blocks
from flowgrpo_fsdp_actor.checkpoint_blocks import CHECKED, CheckedFile, read_checked, staging, write_checked
from flowgrpo_fsdp_actor.errors import CheckpointError

SIZES = (5, CHECKED // 4, 0, 1, CHECKED - 3, 7)  # elements of 4 bytes: 2 MiB and a bit, blocks that end inside tensors


@pytest.fixture
def parts():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(size, generator=generator) for size in SIZES]


def write(path, parts, blocks=1):
    return CheckedFile(path, write_checked(staging(blocks * CHECKED, pinned=False), path, parts))


def starts(parts):
    return [4 * sum(part.numel() for part in parts[:k]) for k in range(len(parts))]


def read(stored, spans, blocks=1):
    read_checked(staging(blocks * CHECKED, pinned=False), stored, spans)


@pytest.mark.parametrize("blocks", [1, 2, 7])
def test_what_was_written_is_read_back_bit_for_bit_in_any_order_and_cast_where_asked(tmp_path, parts, blocks):
    stored = write(tmp_path / "file", parts, blocks)
    assert (tmp_path / "file").stat().st_size == 4 * sum(SIZES)
    same = [torch.full_like(part, torch.nan) for part in parts]
    spans = [(at, torch.float32, into) for at, into in zip(starts(parts), same, strict=True)]
    read(stored, spans[::-1], blocks)
    assert all(map(torch.equal, same, parts))
    half = torch.empty(1000, dtype=torch.bfloat16)
    read(stored, [(starts(parts)[4] + 4 * 500, torch.float32, half)], blocks)
    assert torch.equal(half, parts[4][500:1500].bfloat16())


def test_a_flipped_bit_is_refused_by_file_and_bytes_and_only_where_it_is_read(tmp_path, parts):
    path = tmp_path / "file"
    stored = write(path, parts)
    data = bytearray(path.read_bytes())
    data[CHECKED + 12345] ^= 1
    path.write_bytes(data)
    head, whole = torch.empty(100), torch.empty(sum(SIZES))
    read(stored, [(0, torch.float32, head)])
    with pytest.raises(CheckpointError) as error:
        read(stored, [(0, torch.float32, whole)])
    assert error.value.path == str(path)
    assert f"bytes {CHECKED} to {2 * CHECKED}" in error.value.why


@pytest.mark.parametrize("left", [0, CHECKED - 4, 2 * CHECKED])
def test_a_file_that_was_cut_is_refused(tmp_path, parts, left):
    path = tmp_path / "file"
    stored = write(path, parts)
    os.truncate(path, left)
    with pytest.raises(CheckpointError):
        read(stored, [(0, torch.float32, torch.empty(sum(SIZES)))])


@pytest.mark.parametrize("call", ["open", "write"])
def test_a_file_system_without_direct_writes_gets_the_same_bytes(tmp_path, parts, monkeypatch, call):
    expected = write(tmp_path / "direct", parts)

    def opened(path, flags, *mode, real=os.open):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *mode)

    def written(descriptor, data, real=os.write):
        if checkpoint_blocks.fcntl.fcntl(descriptor, checkpoint_blocks.fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(descriptor, data)

    monkeypatch.setattr(os, call, {"open": opened, "write": written}[call])
    stored = write(tmp_path / "file", parts)
    assert stored.crcs == expected.crcs
    assert (tmp_path / "file").read_bytes() == (tmp_path / "direct").read_bytes()
