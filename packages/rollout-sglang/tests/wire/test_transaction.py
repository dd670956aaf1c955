"""The rules of one transaction, with the engine's end in this process."""

import json

import pytest
import torch
from flowgrpo_rollout_sglang.wire import WeightReceiver, WeightSender, WeightSyncError

SHAPES = {"to_q.weight": (6, 10), "to_q.bias": (6,), "proj.weight": (300, 401), "scale": (1,)}


def weights(seed=0, shapes=SHAPES, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def parameters(shapes=SHAPES, dtype=torch.bfloat16):
    return {name: torch.full(shape, torch.nan, dtype=dtype) for name, shape in shapes.items()}


@pytest.fixture
def sender():
    sender = WeightSender(bucket_size_mb=1)
    yield sender
    sender.close()


def manifest_of(sender, tensors, version, **more):
    return sender.manifest([(name, t.shape) for name, t in tensors.items()], version=version, **more)


def sync(sender, tensors, receiver, version, **more):
    report = sender.send(tensors.items(), manifest_of(sender, tensors, version), receiver, **more)
    receiver.commit(version)
    return report


def failure(call, *arguments, **more):
    with pytest.raises(WeightSyncError) as error:
        call(*arguments, **more)
    return error.value


@pytest.mark.parametrize(
    ("wire", "source", "target"),
    [
        ("bf16", torch.float32, torch.bfloat16),
        ("bf16", torch.bfloat16, torch.bfloat16),
        ("bf16", torch.bfloat16, torch.float32),
        ("fp32", torch.float32, torch.float32),
        ("fp32", torch.bfloat16, torch.float32),
    ],
    ids=str,
)
def test_a_sync_gives_the_engine_the_senders_weights_in_the_wire_dtype(wire, source, target):
    sent, held = weights(dtype=source), parameters(dtype=target)
    receiver = WeightReceiver(held, "engine")
    report = sync(WeightSender(wire_dtype=wire), sent, receiver, 1)
    through = {"bf16": torch.bfloat16, "fp32": torch.float32}[wire]
    for name, tensor in sent.items():
        assert torch.equal(held[name], tensor.to(through).to(target))
    assert (receiver.version, report.tensors, report.bytes) == (1, 4, 120_367 * (2 if wire == "bf16" else 4))


def test_a_tensor_larger_than_a_bucket_arrives_whole(sender):
    shapes = {"a": (7,), "big": (1201, 1031), "b": (3, 3)}
    sent, held = weights(shapes=shapes), parameters(shapes)
    report = sync(sender, sent, WeightReceiver(held, "engine"), 1)
    assert report.buckets == 3
    assert all(torch.equal(held[name], tensor.bfloat16()) for name, tensor in sent.items())


def test_slices_of_a_fused_parameter_are_targets(sender):
    qkv = torch.zeros(18, 10, dtype=torch.bfloat16)
    columns = torch.zeros(4, 3, 14, dtype=torch.bfloat16)
    targets = {"q": qkv[:6], "k": qkv[6:12], "v": qkv[12:], "left": columns[..., :5], "right": columns[..., 5:]}
    sent = weights(shapes={name: tuple(t.shape) for name, t in targets.items()})
    sync(sender, sent, WeightReceiver(targets, "engine"), 1)
    assert torch.equal(qkv, torch.cat([sent["q"], sent["k"], sent["v"]]).bfloat16())
    assert torch.equal(columns, torch.cat([sent["left"], sent["right"]], dim=-1).bfloat16())


def test_sources_may_be_transposed_views_and_parameters(sender):
    source = torch.randn(10, 6)
    held = {"w": torch.nn.Parameter(torch.zeros(6, 10, dtype=torch.bfloat16))}
    sync(sender, {"w": torch.nn.Parameter(source).T}, WeightReceiver(held, "engine"), 1)
    assert torch.equal(held["w"], source.T.bfloat16())


def test_parameters_that_moved_between_two_syncs_are_found_again(sender):
    held = parameters()
    receiver = WeightReceiver(lambda: held, "engine")
    sync(sender, weights(1), receiver, 1)
    held = {name: tensor.clone() for name, tensor in held.items()}  # as after sleep and wake
    sync(sender, weights(2), receiver, 2)
    assert torch.equal(held["proj.weight"], weights(2)["proj.weight"].bfloat16())


def test_the_engine_serves_nothing_and_keeps_its_version_until_the_commit(sender):
    receiver = WeightReceiver(parameters(), "engine", version=4)
    tensors = weights()
    receiver.ensure_serving()
    sender.send(tensors.items(), manifest_of(sender, tensors, 5), receiver)
    assert failure(receiver.ensure_serving).reason == "busy"
    assert receiver.version == 4
    receiver.commit(5)
    receiver.ensure_serving()
    assert receiver.version == 5


def test_an_aborted_sync_leaves_an_engine_that_serves_nothing_until_a_later_one_commits(sender):
    receiver = WeightReceiver(parameters(), "engine")
    sync(sender, weights(1), receiver, 1)
    tensors = weights(2)
    sender.send(tensors.items(), manifest_of(sender, tensors, 2), receiver)
    receiver.abort()
    assert failure(receiver.ensure_serving).reason == "aborted"
    assert failure(receiver.commit, 2).reason == "unverified"
    assert receiver.version == 1
    sync(sender, tensors, receiver, 2)
    receiver.ensure_serving()
    assert receiver.version == 2


@pytest.mark.parametrize(
    ("change", "reason", "named"),
    [
        (lambda t: {**t, "ghost": torch.zeros(2)}, "names", ("ghost",)),
        (lambda t: {name: t[name] for name in list(t)[1:]}, "names", ("to_q.weight",)),
        (lambda t: {**t, "to_q.bias": torch.zeros(7)}, "shape", ("to_q.bias",)),
        (lambda t: {**t, "to_q.weight": torch.zeros(10, 6)}, "shape", ("to_q.weight",)),
    ],
    ids=["unknown", "missing", "misshapen", "transposed"],
)
def test_names_and_shapes_are_refused_before_a_byte_moves(sender, change, reason, named):
    held = parameters()
    receiver = WeightReceiver(held, "engine-3")
    tensors = change(weights())
    error = failure(sync, sender, tensors, receiver, 1)
    assert (error.engine, error.version, error.reason, error.tensors, error.sent) == ("engine-3", 1, reason, named, 0)
    assert all(tensor.isnan().all() for tensor in held.values())
    receiver.ensure_serving()


def test_a_wire_dtype_that_the_parameters_cannot_hold_is_refused_before_a_byte_moves():
    receiver = WeightReceiver(parameters(dtype=torch.bfloat16), "engine")
    error = failure(sync, WeightSender(wire_dtype="fp32"), weights(), receiver, 1)
    assert (error.reason, set(error.tensors)) == ("dtype", set(SHAPES))
    receiver.ensure_serving()


def test_two_names_on_the_same_memory_are_refused_before_a_byte_moves(sender):
    fused = torch.zeros(10, 4, dtype=torch.bfloat16)
    receiver = WeightReceiver({"q": fused[:6], "k": fused[5:]}, "engine")
    error = failure(sync, sender, weights(shapes={"q": (6, 4), "k": (5, 4)}), receiver, 1)
    assert (error.reason, set(error.tensors)) == ("names", {"q", "k"})
    receiver.ensure_serving()


def test_a_manifest_with_a_name_twice_is_refused_by_the_engine(sender):
    receiver = WeightReceiver(parameters(), "engine")
    fields = json.loads(manifest_of(sender, weights(), 1).to_json())
    fields["tensors"] += fields["tensors"].splitlines(keepends=True)[1]
    assert failure(receiver.begin, json.dumps(fields), "{}").reason == "manifest"


def test_a_truncated_manifest_is_refused_and_the_engine_goes_on(sender):
    receiver = WeightReceiver(parameters(), "engine")
    text = manifest_of(sender, weights(), 1).to_json()
    assert failure(receiver.begin, text[:-40], "{}").reason == "manifest"
    receiver.ensure_serving()
    sync(sender, weights(), receiver, 1)


@pytest.mark.parametrize("version", [1, 3, 4])
def test_a_version_that_is_not_newer_is_refused(sender, version):
    receiver = WeightReceiver(parameters(), "engine", version=4)
    assert failure(sync, sender, weights(), receiver, version).reason == "version"
    receiver.ensure_serving()


def test_an_engine_behind_by_a_version_is_found_and_can_be_brought_up(sender):
    receiver = WeightReceiver(parameters(), "engine", version=4)
    tensors = weights()
    expecting_5 = manifest_of(sender, tensors, 6, base_version=5)
    error = failure(sender.send, tensors.items(), expecting_5, receiver)
    assert (error.reason, error.version) == ("version", 6)
    assert "4" in error.what
    receiver.ensure_serving()
    sync(sender, tensors, receiver, 6)
    assert receiver.version == 6


def test_commit_takes_only_the_version_that_was_verified(sender):
    receiver = WeightReceiver(parameters(), "engine")
    tensors = weights()
    sender.send(tensors.items(), manifest_of(sender, tensors, 2), receiver)
    assert failure(receiver.commit, 1).reason == "version"
    assert failure(receiver.commit, 3).reason == "version"
    receiver.commit(2)
    assert failure(receiver.commit, 2).reason == "unverified"


def test_full_and_adapter_syncs_are_never_mixed_on_one_engine(sender):
    receiver = WeightReceiver(parameters(), "engine")
    tensors = weights()
    adapter = manifest_of(sender, tensors, 1, mode="adapter")
    sender.send(tensors.items(), adapter, receiver)
    receiver.commit(1)
    assert failure(sync, sender, tensors, receiver, 2).reason == "manifest"
    receiver.ensure_serving()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda items: items[:-1], ("scale",)),
        (lambda items: [*items, ("more", torch.zeros(1))], ("more",)),
        (lambda items: [items[1], items[0], *items[2:]], ("to_q.weight",)),
        (lambda items: [*items[:-1], ("scale", torch.zeros(2))], ("scale",)),
    ],
    ids=["too few", "too many", "out of order", "another shape"],
)
def test_a_sender_whose_tensors_are_not_those_of_its_manifest_stops(sender, change, named):
    receiver = WeightReceiver(parameters(), "engine")
    tensors = weights()
    error = failure(sender.send, change(list(tensors.items())), manifest_of(sender, tensors, 1), receiver)
    assert (error.reason, error.tensors) == ("stream", named)
    assert receiver.version == 0
    sync(sender, tensors, receiver, 1)
    receiver.ensure_serving()


def test_weights_that_an_optimizer_step_did_not_change_are_a_fault_when_a_change_is_due(sender):
    receiver = WeightReceiver(parameters(), "engine")
    assert sync(sender, weights(1), receiver, 1, must_change=True).changed is None
    assert sync(sender, weights(2), receiver, 2, must_change=True).changed is True
    assert sync(sender, weights(2), receiver, 3).changed is False
    assert failure(sync, sender, weights(2), receiver, 4, must_change=True).reason == "unchanged"
    sync(sender, weights(3), receiver, 4, must_change=True)
    receiver.ensure_serving()


def test_begin_is_refused_while_a_generation_runs(sender):
    receiver = WeightReceiver(parameters(), "engine")
    with receiver.serving() as version:
        assert version == 0
        assert failure(sync, sender, weights(), receiver, 1).reason == "busy"
    sync(sender, weights(), receiver, 1)


def test_a_receiver_that_only_says_yes_is_not_believed(sender):
    class Liar(WeightReceiver):
        def verify(self):
            report = super().verify()
            return type(report).from_json(json.dumps(json.loads(report.to_json()) | {"digest": "0" * 16}))

    assert failure(sync, sender, weights(), Liar(parameters(), "engine"), 1).reason == "fingerprint"


def test_a_link_is_kept_over_syncs_and_its_slots_are_those_of_the_first(sender):
    receiver = WeightReceiver(parameters(), "engine")
    sync(sender, weights(1), receiver, 1)
    link = receiver._link
    for version in range(2, 6):
        sync(sender, weights(version), receiver, version)
    assert receiver._link is link


def test_a_report_gives_one_line_with_every_phase(sender):
    report = sync(sender, weights(), WeightReceiver(parameters(), "engine"), 1).committed(0.5)
    line = report.line()
    assert line.startswith("[wsync time] ")
    assert "\n" not in line
    for word in ("gather=", "pack=", "transport=", "scatter=", "verify=", "commit=0.5", "tensors=4", "GB/s"):
        assert word in line
    assert report.metrics()["commit_s"] == 0.5
