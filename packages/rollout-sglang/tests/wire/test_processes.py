"""Faults between two processes: each is an error that names it, none leaves wrong weights served, all are recovered."""

import json
import os
import signal
import socket
import threading
from pathlib import Path

import pytest
import torch
from flowgrpo_rollout_sglang.wire import WeightReceiver, WeightSender, WeightSyncError
from flowgrpo_rollout_sglang.wire import sender as sender_module
from flowgrpo_rollout_sglang.wire.testing import PipeClient, ReceiverProcess, serve, start_process

SHAPES = [(f"blocks.{i}.weight", (500, 401)) for i in range(8)]  # 401 kB each, so four buckets of 1 MiB


def weights(version):
    """The weights of a version, the same in every process."""
    generator = torch.Generator().manual_seed(version)
    return {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in SHAPES}


TRANSPORTS = ["shm", pytest.param("cuda_ipc", marks=pytest.mark.gpu)]
DEVICE = {"shm": "cpu", "cuda_ipc": "cuda"}


@pytest.fixture(autouse=True, params=TRANSPORTS)
def transport(request):
    """Every rule holds over shared memory and, where there is a GPU, over CUDA IPC."""
    global current
    current = request.param
    return current


current = "shm"


def new_sender(**more):
    return WeightSender(current, bucket_size_mb=1, **{"timeout_s": 20.0, **more})


def engine_process():
    return ReceiverProcess(SHAPES, device=DEVICE[current])


def sync(sender, receiver, version, tensors=None):
    tensors = weights(version) if tensors is None else tensors
    report = sender.send(tensors.items(), sender.manifest(SHAPES, version=version), receiver)
    receiver.commit(version)
    return report


def failure(call, *arguments):
    with pytest.raises(WeightSyncError) as error:
        call(*arguments)
    return error.value


def local_receiver():
    place = {"dtype": torch.bfloat16, "device": DEVICE[current]}
    return WeightReceiver({name: torch.zeros(shape, **place) for name, shape in SHAPES}, "engine")


def holds(receiver, version):
    return all(torch.equal(receiver._targets[name].cpu(), tensor) for name, tensor in weights(version).items())


def send_and_stop_after(connection, transport, tensors_before, version):
    """A sender's process that stands still in the middle of its tensors."""

    def standing_still():
        for count, item in enumerate(weights(version).items()):
            if count == tensors_before:
                connection.send("standing")
                signal.pause()
            yield item

    control = connection.recv()
    sender = WeightSender(transport, bucket_size_mb=1)
    sender.send(standing_still(), sender.manifest(SHAPES, version=version), PipeClient(control, "engine"))


def stuck_sender(receiver, tensors_before, version):
    """That process, with its control calls answered here, once it stands still."""
    process, pipe = start_process(send_and_stop_after, current, tensors_before, version)
    ours, theirs = torch.multiprocessing.Pipe()
    pipe.send(theirs)
    theirs.close()
    answering = threading.Thread(target=serve, args=(receiver, ours), daemon=True)
    answering.start()
    assert pipe.recv() == "standing"
    return process


def test_two_processes_agree_over_several_versions():
    with engine_process() as engine:
        sender = new_sender()
        for version in (1, 2, 3):
            report = sync(sender, engine, version)
            assert report.buckets == 4
        engine.ensure_serving()
        assert engine.version == 3
        for name, tensor in weights(3).items():
            assert torch.equal(engine.values(name), tensor.float().flatten())


def test_a_sender_killed_between_buckets_leaves_an_engine_that_refuses_until_the_version_is_sent_again():
    receiver = local_receiver()
    sync(new_sender(), receiver, 1)
    process = stuck_sender(receiver, 6, 2)  # two of four buckets are written
    process.kill()
    error = failure(receiver.verify)
    assert (error.engine, error.version, error.reason) == ("engine", 2, "peer_lost")
    assert error.sent > 0
    assert failure(receiver.ensure_serving).version == 2
    assert failure(receiver.commit, 2).reason == "unverified"
    assert receiver.version == 1
    sync(new_sender(), receiver, 2)
    receiver.ensure_serving()
    assert holds(receiver, 2)


def test_after_a_killed_sender_the_next_one_need_not_wait_or_ask():
    receiver = local_receiver()
    process = stuck_sender(receiver, 6, 1)
    process.kill()
    process.join()
    sync(new_sender(), receiver, 1)
    assert holds(receiver, 1)


def test_a_sender_killed_before_its_first_bucket_leaves_the_old_version_served():
    receiver = local_receiver()
    sync(new_sender(), receiver, 1)
    process = stuck_sender(receiver, 0, 2)
    process.kill()
    assert failure(receiver.verify).reason == "peer_lost"
    receiver.ensure_serving()
    assert receiver.version == 1
    assert holds(receiver, 1)


def test_a_receiver_killed_in_the_middle_is_an_error_and_a_new_one_gets_the_whole_state():
    sender = new_sender()
    engine = engine_process()
    sync(sender, engine, 1)

    def killing():
        for count, item in enumerate(weights(2).items()):
            if count == 5:
                os.kill(engine.process.pid, signal.SIGKILL)
            yield item

    error = failure(sender.send, killing(), sender.manifest(SHAPES, version=2), engine)
    assert (error.engine, error.version, error.reason) == ("engine", 2, "peer_lost")
    with engine_process() as restarted:
        sync(sender, restarted, 2)
        assert restarted.version == 2
        assert torch.equal(restarted.values("blocks.7.weight"), weights(2)["blocks.7.weight"].float().flatten())


def test_a_receiver_restarted_between_two_syncs_is_reached_again():
    sender = new_sender()
    with engine_process() as engine:
        sync(sender, engine, 1)
    with engine_process() as restarted:
        sync(sender, restarted, 2)
        restarted.ensure_serving()


def test_a_receiver_that_hangs_is_an_error_after_the_deadline():
    sender = new_sender(timeout_s=0.5)
    with engine_process() as engine:
        sync(sender, engine, 1)

        def freezing():
            for count, item in enumerate(weights(2).items()):
                if count == 1:
                    os.kill(engine.process.pid, signal.SIGSTOP)
                yield item

        # What the sender's abort meets is answered only when the process goes on.
        threading.Timer(2.0, os.kill, (engine.process.pid, signal.SIGCONT)).start()
        error = failure(sender.send, freezing(), sender.manifest(SHAPES, version=2), engine)
        assert error.reason == "timeout"
        assert failure(engine.commit, 2).reason == "unverified"
        assert engine.version == 1
        sync(sender, engine, 2)
        engine.ensure_serving()


def test_a_sender_that_hangs_is_an_error_after_the_deadline():
    receiver = local_receiver()
    sender = new_sender(timeout_s=0.3)

    def hanging():
        for count, item in enumerate(weights(1).items()):
            if count == 4:
                assert failure(receiver.verify).reason == "timeout"  # waits for the deadline
            yield item

    error = failure(sender.send, hanging(), sender.manifest(SHAPES, version=1), receiver)
    assert error.reason in ("timeout", "peer_lost")
    assert failure(receiver.ensure_serving).reason == "timeout"
    sync(sender, receiver, 1)
    assert holds(receiver, 1)


def spoilt(slots, fault, at):
    """`slots` that spoil bucket `at` after it was packed."""
    pack, packed = slots.pack, 0

    def pack_and_spoil(slot, bucket, sources):
        nonlocal packed
        view, before = slots.views[slot], slots.views[slot].clone()
        first, second = (*bucket.pieces, bucket.pieces[0])[:2]
        pack(slot, bucket, sources)
        if packed == at and fault == "flipped bit":
            view[first.offset + 77] ^= 16
        elif packed == at and fault == "stale":
            view.copy_(before)
        elif packed == at and fault == "swapped tensors":
            count = min(first.nbytes, second.nbytes)
            a, b = (view[p.offset : p.offset + count].clone() for p in (first, second))
            view[first.offset : first.offset + count] = b
            view[second.offset : second.offset + count] = a
        if view.is_cuda:
            torch.cuda.synchronize()  # as pack does: the receiver must see the spoilt bucket
        packed += 1

    slots.pack = pack_and_spoil
    return slots


@pytest.mark.parametrize("fault", ["flipped bit", "stale", "swapped tensors"])
@pytest.mark.parametrize("at", [0, 2])  # bucket 2 starts within blocks.5
def test_a_bucket_that_was_spoilt_on_the_way_is_never_committed(fault, at, monkeypatch):
    with engine_process() as engine:
        sync(new_sender(), engine, 1)
        sender = new_sender()
        with monkeypatch.context() as patch:
            new_slots = sender_module._new_slots
            patch.setattr(sender_module, "_new_slots", lambda *a: spoilt(new_slots(*a), fault, at))
            error = failure(sync, sender, engine, 2)
        assert (error.engine, error.version, error.reason) == ("engine", 2, "fingerprint")
        assert error.tensors[0] == ("blocks.0.weight" if at == 0 else "blocks.5.weight")
        assert failure(engine.ensure_serving).reason == "fingerprint"
        assert engine.version == 1
        sync(sender, engine, 2)
        engine.ensure_serving()
        assert torch.equal(engine.values("blocks.7.weight"), weights(2)["blocks.7.weight"].float().flatten())


def test_of_two_syncs_at_once_the_second_is_refused_and_the_first_goes_on():
    with engine_process() as engine:
        first, second = new_sender(), new_sender()

        def with_a_rival_in_the_middle():
            for count, item in enumerate(weights(1).items()):
                if count == 5:
                    error = failure(sync, second, engine, 2)
                    assert (error.reason, error.version) == ("busy", 2)
                yield item

        first.send(with_a_rival_in_the_middle(), first.manifest(SHAPES, version=1), engine)
        engine.commit(1)
        engine.ensure_serving()
        assert torch.equal(engine.values("blocks.7.weight"), weights(1)["blocks.7.weight"].float().flatten())


def seen_by(engine):
    """Whether the engine's process still maps a sender's slots."""
    return "flowgrpo-weights" in Path(f"/proc/{engine.process.pid}/maps").read_text()


def test_an_idle_engine_has_let_the_slots_go_when_the_senders_close_returns():
    receiver, sender = local_receiver(), new_sender()
    sync(sender, receiver, 1)
    sender.close()
    assert receiver._slots is None
    receiver.ensure_serving()
    with engine_process() as engine:
        sync(sender, engine, 1)
        assert seen_by(engine) == (current == "shm")
        sender.close()
        assert not seen_by(engine)
        engine.ensure_serving()
        sync(sender, engine, 2)  # over a new link


def test_verified_weights_can_be_committed_after_their_sender_closed():
    receiver, sender = local_receiver(), new_sender()
    sender.send(weights(1).items(), sender.manifest(SHAPES, version=1), receiver)
    sender.close()
    receiver.commit(1)
    receiver.ensure_serving()
    assert holds(receiver, 1)


def test_slots_that_a_frozen_engine_still_maps_are_not_freed_under_it(monkeypatch):
    freed = []
    with engine_process() as engine:
        sender = new_sender(timeout_s=0.3)
        sync(sender, engine, 1)
        slots = sender._bridges["engine"].slots
        monkeypatch.setattr(slots, "close", lambda: freed.append("closed"))
        monkeypatch.setattr(slots, "abandon", lambda: freed.append("kept"))
        os.kill(engine.process.pid, signal.SIGSTOP)
        while Path(f"/proc/{engine.process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            continue  # it stops at its own pace
        sender.close()
        os.kill(engine.process.pid, signal.SIGCONT)
    assert freed == ["kept"]


REFUSED = {
    "an engine behind by a version": ("version", lambda sender: sender.manifest(SHAPES, version=3, base_version=2)),
    "a version that is served": ("version", lambda sender: sender.manifest(SHAPES, version=1)),
    "an unknown name": ("names", lambda sender: sender.manifest([*SHAPES, ("ghost", (2,))], version=2)),
    "a missing name": ("names", lambda sender: sender.manifest(SHAPES[1:], version=2)),
    "another shape": ("shape", lambda sender: sender.manifest([*SHAPES[1:], (SHAPES[0][0], (2,))], version=2)),
    "a dtype the parameters cannot hold": ("dtype", lambda sender: sender.manifest(SHAPES, version=2)),
    "a truncated manifest": ("manifest", lambda sender: sender.manifest(SHAPES, version=2)),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_what_is_refused_before_a_byte_moves_leaves_the_old_version_served(fault, monkeypatch):
    reason, manifest_of = REFUSED[fault]
    with engine_process() as engine:
        sync(new_sender(), engine, 1)
        sender = new_sender(wire_dtype="fp32" if reason == "dtype" else "bf16")
        with monkeypatch.context() as patch:
            if reason == "manifest":
                patch.setattr(engine, "begin", lambda text, channel: PipeClient.begin(engine, text[:-40], channel))
            error = failure(sender.send, weights(2).items(), manifest_of(sender), engine)
        assert (error.engine, error.reason) == ("engine", reason)
        engine.ensure_serving()
        assert engine.version == 1
        assert torch.equal(engine.values("blocks.7.weight"), weights(1)["blocks.7.weight"].float().flatten())
        sync(new_sender(), engine, 2)
        assert engine.version == 2


def test_a_driver_that_died_after_verify_does_not_block_the_next_sync():
    with engine_process() as engine:
        sender = new_sender()
        sender.send(weights(1).items(), sender.manifest(SHAPES, version=1), engine)
        sender.close()  # as the end of its process would
        assert failure(engine.ensure_serving).reason == "busy"
        sync(new_sender(), engine, 1)
        engine.ensure_serving()


def test_a_stranger_on_the_socket_gets_no_slot(monkeypatch):
    receiver = local_receiver()
    begin = receiver.begin

    def begin_after_a_stranger(manifest, channel):
        stranger = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        stranger.connect(json.loads(channel)["address"])
        stranger.sendall(b"x" * 32)
        begin(manifest, channel)

    monkeypatch.setattr(receiver, "begin", begin_after_a_stranger)
    sync(new_sender(), receiver, 1)
    assert holds(receiver, 1)


def test_nothing_is_left_behind_after_many_syncs(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    shared = set(os.listdir("/dev/shm")) if Path("/dev/shm").exists() else set()
    receiver, sender = local_receiver(), new_sender()
    sync(sender, receiver, 1)
    open_files = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0
    for version in range(2, 40):
        sync(sender, receiver, version)
    if open_files:
        assert len(os.listdir("/proc/self/fd")) <= open_files
    assert list(tmp_path.iterdir()) == []
    if shared:
        assert not {name for name in set(os.listdir("/dev/shm")) - shared if "flowgrpo" in name}
