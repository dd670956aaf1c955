"""Which Ray cluster a run takes, and whether it has room there; Ray is a stand-in that records what it is asked."""

import logging
import socket
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from flowgrpo_trainer import cluster
from flowgrpo_trainer.cluster import QUEUE_CPUS, ClusterError


@dataclass
class FakeRay:
    """Fails `init` with each of `failures` in turn."""

    failures: list[Exception] = field(default_factory=list)
    cpus: float = 4.0
    free: list[float] = field(default_factory=list)
    """CPUs that are free at each look; the last stays."""
    inits: list[dict[str, Any]] = field(default_factory=list)

    util = SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1")

    def is_initialized(self) -> bool:
        return False

    def init(self, **how: Any) -> None:
        self.inits.append(how)
        if self.failures:
            raise self.failures.pop(0)

    def shutdown(self) -> None:
        pass

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": self.cpus}

    def available_resources(self) -> dict[str, float]:
        free = self.free.pop(0) if len(self.free) > 1 else self.free[0]
        return {"CPU": free} if free else {}  # as Ray: what is used up is not named


@pytest.fixture
def fake_ray(monkeypatch):
    ray = FakeRay()
    monkeypatch.setattr(cluster, "ray", ray)
    monkeypatch.setattr(cluster.time, "sleep", lambda seconds: None)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return ray


@pytest.fixture
def listening():
    """An address where somebody answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def test_without_an_address_a_cluster_of_the_runs_own_starts_whatever_else_runs_on_the_host(fake_ray):
    assert cluster.connect(None, workers=100) is True
    (how,) = fake_ray.inits
    assert (how["address"], how["num_cpus"]) == ("local", 100 + QUEUE_CPUS)


@pytest.mark.parametrize("by", ["flag", "environment"])
def test_the_cluster_that_is_named_is_joined_and_not_stopped(fake_ray, listening, monkeypatch, by):
    monkeypatch.setenv("RAY_ADDRESS", listening if by == "environment" else "127.0.0.1:1")
    assert cluster.connect(listening if by == "flag" else None, workers=2) is False
    (how,) = fake_ray.inits
    assert how["address"] == listening
    assert "num_cpus" not in how


def test_an_address_where_nobody_answers_is_refused_at_once_by_its_source(fake_ray, listening, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        gone = f"127.0.0.1:{server.getsockname()[1]}"
    monkeypatch.setenv("RAY_ADDRESS", gone)
    with pytest.raises(ClusterError) as error:
        cluster.connect(None, workers=2)
    assert [word for word in ("RAY_ADDRESS", gone) if word not in error.value.what] == []
    assert fake_ray.inits == []


@pytest.mark.parametrize("failure", [ValueError("Invalid address format"), RuntimeError("Version mismatch")])
def test_a_cluster_that_cannot_be_joined_is_told_in_rays_words(fake_ray, failure):
    fake_ray.failures = [failure]
    with pytest.raises(ClusterError) as error:
        cluster.connect("nonsense", workers=2)
    assert [word for word in ("--ray-address", "nonsense", str(failure)) if word not in error.value.what] == []


def test_what_ray_refuses_is_not_tried_again_and_not_blamed_on_the_machine(fake_ray):
    fake_ray.failures = [ValueError("RAY_foo must be a number")]
    with pytest.raises(ClusterError) as error:
        cluster.connect(None, workers=2)
    assert len(fake_ray.inits) == 1
    assert "RAY_foo must be a number" in error.value.what


def test_a_start_that_a_loaded_machine_lets_fail_is_tried_again(fake_ray, caplog):
    caplog.set_level(logging.WARNING)
    fake_ray.failures = [RuntimeError("the agent was slow")] * 2
    assert cluster.connect(None, workers=2) is True
    assert len(fake_ray.inits) == 3


def test_a_cluster_without_cpus_for_transfer_queue_is_refused_with_the_counts(fake_ray):
    fake_ray.cpus, fake_ray.free = 8.0, [8.0]
    with pytest.raises(ClusterError) as error:
        cluster.wait_for_room(8, timeout_s=60.0)
    assert [count for count in ("10 CPUs", "has 8") if count not in error.value.what] == []
    cluster.wait_for_room(8 - QUEUE_CPUS, timeout_s=60.0)


def test_a_cluster_whose_cpus_others_hold_is_waited_for_and_then_refused(fake_ray):
    fake_ray.cpus, fake_ray.free = 16.0, [0.0, 6.0, 10.0]
    cluster.wait_for_room(8, timeout_s=60.0)
    assert fake_ray.free == [10.0]
    fake_ray.free = [9.0]
    with pytest.raises(ClusterError) as error:
        cluster.wait_for_room(8, timeout_s=0.0)
    assert [count for count in ("10 CPUs", "9 of its 16") if count not in error.value.what] == []
