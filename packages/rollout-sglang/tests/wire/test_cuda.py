"""What only a GPU shows: the kernels against the plain copies, and two processes over CUDA IPC."""

import json

import pytest
import torch
from flowgrpo_rollout_sglang.wire import WeightReceiver, WeightSender, WeightSyncError, cuda_memory, host, native
from flowgrpo_rollout_sglang.wire.layout import bucket_layout
from flowgrpo_rollout_sglang.wire.manifest import TensorEntry
from flowgrpo_rollout_sglang.wire.pieces import piece_rows
from flowgrpo_rollout_sglang.wire.testing import ReceiverProcess

pytestmark = pytest.mark.gpu
BF16, FP32 = torch.bfloat16, torch.float32
SHAPES = [("a.weight", (300, 401)), ("a.bias", (300,)), ("b.weight", (1500, 1024)), ("scale", (1,))]


def weights(seed=0, dtype=FP32, device="cuda"):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(device, dtype) for name, shape in SHAPES}


def sync(sender, receiver, version, tensors, **more):
    manifest = sender.manifest([(name, t.shape) for name, t in tensors.items()], version=version)
    report = sender.send(tensors.items(), manifest, receiver, **more)
    receiver.commit(version)
    return report


def on_gpu(numel, dtype, shift):
    """Noise at an address `shift` elements off an aligned one."""
    return torch.randn(numel + shift, device="cuda").to(dtype)[shift:]


@pytest.fixture(scope="module")
def operators():
    operators = native.load()
    assert operators is not None, "no CUDA toolkit on a GPU machine: the native copies were not tested"
    return operators


def run(operator, slot, bucket, tensors, entries, sums):
    table, chunks = piece_rows(bucket, tensors, entries)
    item = {"bf16": 2, "fp32": 4}[entries[0].dtype]
    pieces = torch.tensor(table, dtype=torch.int64, device="cuda")
    operator(pieces, sums, slot.data_ptr(), chunks, item, torch.cuda.current_stream().cuda_stream)


@pytest.mark.parametrize(
    ("source", "wire", "target"),
    [(BF16, "bf16", BF16), (FP32, "bf16", BF16), (FP32, "bf16", FP32), (FP32, "fp32", FP32), (BF16, "fp32", FP32)],
    ids=str,
)
@pytest.mark.parametrize("shift", [0, 1, 3, 8])
def test_the_kernels_give_the_bytes_and_fingerprints_of_the_plain_copies(operators, source, wire, target, shift):
    numels = [1, 7, 64, 1001, 65_537, 3_000_001]
    sources = [on_gpu(numel, source, shift) for numel in numels]
    sources[3][5:9] = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0])
    entries = [TensorEntry(str(numel), (numel,), wire) for numel in numels]
    targets = [on_gpu(numel, target, shift) for numel in numels]
    packed, plain, held = (torch.zeros(len(numels), dtype=torch.int64, device="cuda") for _ in range(3))
    for bucket in bucket_layout(tuple(entries), 2**20):
        slot, reference = (torch.randint(0, 256, (2**20,), dtype=torch.uint8, device="cuda") for _ in range(2))
        of_pieces = [sources[piece.tensor] for piece in bucket.pieces]
        run(operators.gather, slot, bucket, of_pieces, entries, packed)
        host.pack(reference, bucket, of_pieces, entries, plain)
        for piece in bucket.pieces:
            assert torch.equal(slot[piece.offset :][: piece.nbytes], reference[piece.offset :][: piece.nbytes])
        run(operators.scatter, slot, bucket, [targets[p.tensor] for p in bucket.pieces], entries, held)
    assert torch.equal(packed, plain)
    assert torch.equal(held, plain)
    for given, got in zip(sources, targets, strict=True):
        expected = given.to(host.TORCH_DTYPE[wire]).to(target)
        assert torch.equal(got.view(torch.uint8), expected.view(torch.uint8))


def test_a_launch_gives_the_same_bits_each_time(operators):
    entries = [TensorEntry("w", (5_000_000,), "bf16")]
    (bucket,) = bucket_layout(tuple(entries), 10_000_000 // 128 * 128 + 128)
    source = on_gpu(5_000_000, BF16, 0)
    slot = torch.empty(bucket.nbytes, dtype=torch.uint8, device="cuda")
    results = []
    for _ in range(5):
        sums = torch.zeros(1, dtype=torch.int64, device="cuda")
        run(operators.gather, slot, bucket, [source], entries, sums)
        results.append(int(sums))
    assert len(set(results)) == 1


def test_wrong_arguments_of_an_operator_are_errors(operators):
    pieces = torch.zeros(1, 8, dtype=torch.int64, device="cuda")
    sums = torch.zeros(1, dtype=torch.int64, device="cuda")
    with pytest.raises(RuntimeError):
        operators.gather(pieces, sums, 0, 1, 2, 0)


@pytest.mark.parametrize("switch", ["1", "0"], ids=["native", "plain"])
@pytest.mark.parametrize("wire", ["bf16", "fp32"])
def test_two_processes_on_one_gpu_agree(wire, switch, monkeypatch):
    monkeypatch.setenv(native.SWITCH, switch)
    native.load.cache_clear()
    dtype = {"bf16": "bfloat16", "fp32": "float32"}[wire]
    with ReceiverProcess(SHAPES, dtype=dtype, device="cuda", environment={native.SWITCH: switch}) as engine:
        sender = WeightSender("cuda_ipc", bucket_size_mb=1, wire_dtype=wire)
        for version in (1, 2, 3):
            report = sync(sender, engine, version, weights(version))
        for name, tensor in weights(3).items():
            assert torch.equal(engine.values(name), tensor.to(getattr(torch, dtype)).float().cpu().flatten())
        assert report.buckets > 2
        sender.close()
    native.load.cache_clear()


def test_an_engine_in_the_senders_process_takes_weights_over_device_memory():
    fused = torch.zeros(600, 401, dtype=BF16, device="cuda")
    targets = {
        "a.weight": fused[300:],
        "a.bias": torch.zeros(300, dtype=BF16, device="cuda"),
        "b.weight": torch.zeros(1500, 2048, dtype=BF16, device="cuda")[:, 7 : 7 + 1024],
        "scale": torch.zeros(1, device="cuda"),
    }
    sync(WeightSender("cuda_ipc", bucket_size_mb=1), WeightReceiver(targets, "engine"), 1, weights())
    for name, tensor in weights().items():
        assert torch.equal(targets[name].float(), tensor.to(BF16).float())
    assert torch.equal(fused[:300], torch.zeros_like(fused[:300]))


def test_a_transposed_or_half_precision_source_and_one_on_the_host_are_cast_on_the_way():
    tensors = weights()
    sources = {
        **tensors,
        "a.weight": tensors["a.weight"].T.contiguous().T,
        "b.weight": tensors["b.weight"].half(),
        "a.bias": tensors["a.bias"].cpu(),
    }
    targets = {name: torch.zeros(shape, dtype=BF16, device="cuda") for name, shape in SHAPES}
    sync(WeightSender("cuda_ipc", bucket_size_mb=1), WeightReceiver(targets, "engine"), 1, sources)
    for name, tensor in sources.items():
        assert torch.equal(targets[name].cpu(), tensor.cpu().to(BF16))


def test_a_thousand_syncs_leak_no_device_memory_and_keep_one_link():
    tensors = {name: tensor for name, tensor in weights(dtype=BF16).items() if name != "b.weight"}
    shapes = [(name, tuple(tensor.shape)) for name, tensor in tensors.items()]
    with ReceiverProcess(shapes, device="cuda") as engine:
        sender = WeightSender("cuda_ipc", bucket_size_mb=1)
        for version in range(1, 11):
            sync(sender, engine, version, tensors)
        free, link = torch.cuda.mem_get_info()[0], sender._bridges["engine"].channel.link
        for version in range(11, 1011):
            sync(sender, engine, version, tensors)
        assert torch.cuda.mem_get_info()[0] == free
        assert sender._bridges["engine"].channel.link == link
        sender.close()


def test_weights_that_slept_on_the_host_are_reached_over_the_same_handles():
    held = {name: torch.zeros(shape, dtype=BF16, device="cuda") for name, shape in SHAPES}
    receiver = WeightReceiver(lambda: held, "engine")
    sender = WeightSender("cuda_ipc", bucket_size_mb=1)
    sync(sender, receiver, 1, weights(1))
    link = receiver._link
    asleep = {name: tensor.cpu() for name, tensor in held.items()}
    held = {name: tensor.cuda() for name, tensor in asleep.items()}
    sync(sender, receiver, 2, weights(2))
    assert receiver._link is link
    assert all(torch.equal(held[name], tensor.to(BF16)) for name, tensor in weights(2).items())


def test_slots_are_shared_also_where_torchs_own_memory_cannot_be():
    torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    try:
        with ReceiverProcess(SHAPES, device="cuda") as engine:
            sync(WeightSender("cuda_ipc"), engine, 1, weights(5))
            assert torch.equal(engine.values("scale"), weights(5)["scale"].to(BF16).float().cpu())
    finally:
        torch.cuda.memory._set_allocator_settings("expandable_segments:False")


def test_an_engine_that_does_not_see_the_senders_gpu_says_so():
    targets = {name: torch.zeros(shape, dtype=BF16, device="cuda") for name, shape in SHAPES}

    class Elsewhere(WeightReceiver):
        def begin(self, manifest, channel):
            super().begin(manifest, json.dumps(json.loads(channel) | {"device_uuid": "GPU-of-another-host"}))

    receiver = Elsewhere(targets, "engine")
    with pytest.raises(WeightSyncError) as error:
        sync(WeightSender("cuda_ipc"), receiver, 1, weights())
    assert error.value.reason == "device"
    receiver.ensure_serving()


def test_parameters_on_the_host_are_no_targets_of_device_slots():
    receiver = WeightReceiver({name: torch.zeros(shape, dtype=BF16) for name, shape in SHAPES}, "engine")
    with pytest.raises(WeightSyncError) as error:
        sync(WeightSender("cuda_ipc"), receiver, 1, weights())
    assert error.value.reason == "device"
    receiver.ensure_serving()


def test_a_failed_call_of_the_runtime_leaves_no_error_for_the_next_one():
    device = torch.device("cuda", 0)
    with pytest.raises(cuda_memory.CudaError) as error:
        cuda_memory.allocate(2**60, device)
    assert error.value.call == "cudaMalloc"
    assert float(torch.ones(3, device=device).sum()) == 3.0
