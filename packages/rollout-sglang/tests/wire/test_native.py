"""The native copies against the plain ones: the arithmetic on the host, the compilation with nvcc."""

import ctypes
import shutil
import subprocess

import pytest
import torch
from flowgrpo_rollout_sglang.wire import host, native
from flowgrpo_rollout_sglang.wire.layout import bucket_layout
from flowgrpo_rollout_sglang.wire.manifest import TensorEntry
from flowgrpo_rollout_sglang.wire.pieces import is_native_source, piece_rows
from hypothesis import given, settings
from hypothesis import strategies as st

HERE = __file__.rsplit("/", 1)[0]
BF16, FP32 = torch.bfloat16, torch.float32


@pytest.fixture(scope="module")
def copies(tmp_path_factory):
    """The copies of `csrc`, compiled for this machine's processor."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler: the native index arithmetic was not tested")
    library = tmp_path_factory.mktemp("native") / "wire_copy_host.so"
    flags = ["-O1", "-std=c++17", "-shared", "-fPIC", "-Wall", "-Werror", "-Wno-unknown-pragmas", f"-I{native.SOURCES}"]
    subprocess.run([compiler, *flags, f"{HERE}/wire_copy_host.cpp", "-o", str(library)], check=True)
    function = ctypes.CDLL(str(library)).wire_copy
    function.argtypes = [ctypes.c_void_p, ctypes.c_int64, *[ctypes.c_void_p] * 2, ctypes.c_int64, ctypes.c_int]
    return function


def run(copies, gather, slot, bucket, tensors, entries, sums):
    table, _ = piece_rows(bucket, tensors, entries)
    pieces = torch.tensor(table, dtype=torch.int64)
    item = {"bf16": 2, "fp32": 4}[entries[0].dtype]
    copies(pieces.data_ptr(), len(table), slot.data_ptr(), sums.data_ptr(), item, gather)


def aligned_slot(nbytes):
    """Garbage in, so that a byte which is not written shows."""
    memory = torch.randint(0, 256, (nbytes + 128,), dtype=torch.uint8)
    skip = -memory.data_ptr() % 128
    return memory[skip : skip + nbytes]


def place(shape, dtype, shift):
    """Noise at an address that is `shift` elements off an aligned one, with guards around it."""
    count = torch.Size(shape).numel()
    memory = torch.randn(count + 64 + 16).to(dtype)
    start = 16 - memory.data_ptr() // memory.element_size() % 16 + shift
    return memory, memory[start : start + count].view(shape)


SIZES = st.lists(st.tuples(st.integers(1, 40_000), st.integers(0, 15)), min_size=1, max_size=5)


@settings(max_examples=40, deadline=None)
@given(SIZES, st.sampled_from([(BF16, "bf16"), (FP32, "fp32"), (FP32, "bf16"), (BF16, "fp32")]), st.integers(1, 300))
def test_the_native_gather_packs_the_bytes_and_sums_of_the_plain_one(copies, sizes, dtypes, lines):
    source, wire = dtypes
    tensors = [place((numel,), source, shift)[1] for numel, shift in sizes]
    entries = [TensorEntry(str(i), tuple(t.shape), wire) for i, t in enumerate(tensors)]
    ours, plain = (torch.zeros(len(tensors), dtype=torch.int64) for _ in range(2))
    for bucket in bucket_layout(tuple(entries), 128 * lines * 10):
        mine, theirs = aligned_slot(128 * lines * 10), aligned_slot(128 * lines * 10)
        of_pieces = [tensors[piece.tensor] for piece in bucket.pieces]
        run(copies, True, mine, bucket, of_pieces, entries, ours)
        host.pack(theirs, bucket, of_pieces, entries, plain)
        for piece in bucket.pieces:
            assert torch.equal(mine[piece.offset :][: piece.nbytes], theirs[piece.offset :][: piece.nbytes])
    assert torch.equal(ours, plain)


@settings(max_examples=40, deadline=None)
@given(SIZES, st.sampled_from([(BF16, "bf16"), (FP32, "fp32"), (FP32, "bf16")]), st.integers(1, 300))
def test_the_native_scatter_writes_what_the_plain_one_does_and_nothing_beside_it(copies, sizes, dtypes, lines):
    target, wire = dtypes
    placed = [place((numel,), target, shift) for numel, shift in sizes]
    entries = [TensorEntry(str(i), tuple(t.shape), wire) for i, (_, t) in enumerate(placed)]
    sent = [torch.randn(t.shape).to(host.TORCH_DTYPE[wire]) for _, t in placed]
    expected = [memory.clone() for memory, _ in placed]
    for copy, (memory, t), values in zip(expected, placed, sent, strict=True):
        copy[t.storage_offset() - memory.storage_offset() :][: t.numel()] = values.to(target)
    packed, held = (torch.zeros(len(sent), dtype=torch.int64) for _ in range(2))
    for bucket in bucket_layout(tuple(entries), 128 * lines * 10):
        slot = aligned_slot(128 * lines * 10)
        host.pack(slot, bucket, [sent[p.tensor] for p in bucket.pieces], entries, packed)
        run(copies, False, slot, bucket, [placed[p.tensor][1] for p in bucket.pieces], entries, held)
    assert torch.equal(held, packed)
    for copy, (memory, _) in zip(expected, placed, strict=True):
        assert torch.equal(copy, memory)


@pytest.mark.parametrize(("target", "wire"), [(BF16, "bf16"), (FP32, "fp32"), (FP32, "bf16")], ids=str)
@pytest.mark.parametrize(("first", "width"), [(0, 64), (8, 64), (3, 64), (0, 61), (5, 33)])
def test_the_native_scatter_writes_columns_of_a_fused_parameter(copies, target, wire, first, width):
    fused = torch.randn(37, 4, 128).to(target)
    expected, view = fused.clone(), fused[..., first : first + width]
    sent = torch.randn(view.shape).to(host.TORCH_DTYPE[wire])
    expected[..., first : first + width] = sent.to(target)
    entries = [TensorEntry("w", tuple(view.shape), wire)]
    packed, held = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    for bucket in bucket_layout(tuple(entries), 128 * 50):
        slot = aligned_slot(128 * 50)
        host.pack(slot, bucket, [sent] * len(bucket.pieces), entries, packed)
        run(copies, False, slot, bucket, [view] * len(bucket.pieces), entries, held)
    assert torch.equal(fused, expected)
    assert torch.equal(held, packed)


@pytest.mark.parametrize(("source", "wire"), [(BF16, "bf16"), (FP32, "fp32"), (FP32, "bf16")], ids=str)
@pytest.mark.parametrize(("first", "width"), [(0, 64), (64, 64), (3, 61)])
def test_the_native_gather_packs_the_columns_of_a_rank_as_they_lie(copies, source, wire, first, width):
    view = torch.randn(700, 128).to(source).narrow(1, first, width)
    assert is_native_source(view)
    entries = [TensorEntry("w", tuple(view.shape), wire)]
    ours, plain = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    for bucket in bucket_layout(tuple(entries), 128 * 50):
        mine, theirs = aligned_slot(128 * 50), aligned_slot(128 * 50)
        run(copies, True, mine, bucket, [view] * len(bucket.pieces), entries, ours)
        host.pack(theirs, bucket, [view] * len(bucket.pieces), entries, plain)
        (piece,) = bucket.pieces
        assert torch.equal(mine[: piece.nbytes], theirs[: piece.nbytes])
    assert torch.equal(ours, plain)


def test_a_source_whose_elements_lie_in_another_order_is_copied_first():
    assert not is_native_source(torch.zeros(8, 6).t())
    assert not is_native_source(torch.zeros(8, 6, dtype=torch.float64))


def test_casts_of_rounding_edges_infinities_and_subnormals_are_those_of_torch(copies):
    bits = [0x3F808000, 0x3F818000, 0x7F7FFFFF, 0x7F800000, 0xFF800000, 0x00000001, 0x80000000, 0x3F80FFFF]
    source = torch.tensor(bits, dtype=torch.uint32).view(torch.float32)
    entries = [TensorEntry("w", (len(bits),), "bf16")]
    (bucket,) = bucket_layout(tuple(entries), 128)
    slot, sums = aligned_slot(128), torch.zeros(1, dtype=torch.int64)
    run(copies, True, slot, bucket, [source], entries, sums)
    assert torch.equal(slot[: 2 * len(bits)].view(BF16), source.to(BF16))


def test_rows_that_are_not_evenly_spaced_are_refused():
    with pytest.raises(ValueError):
        piece_rows(
            bucket_layout((TensorEntry("w", (3, 2, 4), "bf16"),), 128)[0],
            [torch.zeros(3, 5, 7, dtype=BF16)[:, :2, :4]],
            [TensorEntry("w", (3, 2, 4), "bf16")],
        )


@pytest.mark.timeout(240)
def test_the_extension_compiles_for_hopper(tmp_path):
    nvcc = native.find_nvcc()
    if nvcc is None:
        pytest.skip("no CUDA toolkit: the native extension was not compiled")
    library = tmp_path / "wire_copy.so"
    native.compile_library(nvcc, "90", library)
    assert b"copy_kernel" in library.read_bytes()
    assert [path.name for path in tmp_path.iterdir()] == ["wire_copy.so"]


def test_sources_that_do_not_compile_are_an_error_with_the_compilers_words(tmp_path, monkeypatch):
    compiler = tmp_path / "nvcc"
    compiler.write_text("#!/bin/sh\necho 'error: no such architecture' >&2\nexit 2\n")
    compiler.chmod(0o755)
    with pytest.raises(native.NativeBuildError) as error:
        native.compile_library(compiler, "90", tmp_path / "out" / "wire_copy.so")
    assert "no such architecture" in error.value.output
    assert list((tmp_path / "out").iterdir()) == []
