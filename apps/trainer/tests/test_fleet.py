"""How work is dealt out to engines, what workers log, and what a sync says: with stand-ins for the workers and Ray."""

import logging
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
from flowgrpo_rollout_sglang.engine import EngineLostError
from flowgrpo_rollout_sglang.wire import SyncReport
from flowgrpo_trainer import fleet as fleets
from flowgrpo_trainer import host_memory, sync, worker_logs
from flowgrpo_trainer.cli import parse
from flowgrpo_trainer.fleet import CANDIDATES_PER_CALL, Engines, calls_of
from flowgrpo_trainer.sync import Publisher, sync_lines


@dataclass(frozen=True, eq=False)
class Call:
    """What a stand-in's `remote` returns: a result, or the error that getting it raises."""

    result: Any
    number: int


class FakeRay:
    """Calls end as soon as they are made; `wait` names the newest first."""

    exceptions = SimpleNamespace(RayError=RuntimeError, RayActorError=ConnectionResetError)

    def wait(self, calls, num_returns=1, timeout=None):
        newest = sorted(calls, key=lambda call: -call.number)
        return newest[:num_returns], newest[num_returns:]

    def get(self, call, timeout=None):
        if isinstance(call, list):
            return [self.get(one) for one in call]
        if isinstance(call.result, Exception):
            raise call.result
        return call.result


class FakeWorker:
    """Every method answers what `answers` names; None else. Keeps what was asked."""

    number = 0

    def __init__(self, **answers: Any):
        self._answers = answers
        self.asked: list[tuple[str, tuple[Any, ...]]] = []

    def __getattr__(self, name: str) -> Any:
        def remote(*arguments: Any) -> Call:
            self.asked.append((name, arguments))
            answer = self._answers.get(name)
            FakeWorker.number += 1
            return Call(answer(*arguments) if callable(answer) else answer, FakeWorker.number)

        return SimpleNamespace(remote=remote)


@pytest.fixture(autouse=True)
def fake_ray(monkeypatch):
    for module in (fleets, sync, worker_logs):
        monkeypatch.setattr(module, "ray", FakeRay())


# ---------------------------------------------------------------------- work for the engines


@dataclass(frozen=True)
class Request:
    group: int
    sample_ids: tuple[int, ...]


def requests_of(groups: int, candidates: int) -> list[Request]:
    return [Request(group, tuple(range(candidates))) for group in range(groups)]


@pytest.mark.parametrize(
    ("groups", "candidates", "engines", "sizes"),
    [
        (32, 8, 8, [4] * 8),
        (8, 8, 8, [1] * 8),
        (64, 2, 8, [8] * 8),
        (3, 8, 8, [1] * 3),
        (20, 8, 8, [2, 3, 2, 3, 2, 3, 2, 3]),
        (72, 8, 8, [8] * 8 + [1] * 8),
        (12, 8, 1, [8, 4]),
        (2, 100, 4, [1, 1]),
        (0, 8, 4, []),
    ],
)
def test_groups_go_out_in_waves_over_all_engines(groups, candidates, engines, sizes):
    """T1: the shipped recipes and their evaluation on eight engines, fewer groups than engines, what is left over."""
    requests = requests_of(groups, candidates)
    calls = calls_of(requests, engines)
    assert [len(call) for call in calls] == sizes
    assert [request for call in calls for request in call] == requests
    assert all(len(call) * candidates <= max(CANDIDATES_PER_CALL, candidates) for call in calls)
    most = max((sum(sizes[i::engines]) for i in range(engines)), default=0)
    assert most == -(-groups // engines)


@pytest.mark.parametrize(("groups", "candidates"), [(32, 8), (8, 8), (64, 2), (9, 8)])
def test_every_engine_draws_and_results_keep_the_order_of_the_requests(groups, candidates):
    engines = [FakeWorker(generate=lambda call: [f"drawn {r.group}" for r in call]) for _ in range(8)]
    shown: list[None] = []
    drawn = Engines(engines).generate(requests_of(groups, candidates), lambda: shown.append(None))
    assert drawn == [f"drawn {group}" for group in range(groups)]
    assert len(shown) == groups
    assert [engine for engine in engines if not engine.asked] == []


# ---------------------------------------------------------------------- what workers log


def test_what_our_packages_log_in_a_worker_is_logged_once_by_the_driver(caplog):
    skipped, slow = (logging.WARNING, "[optimizer] skipped a step"), (logging.WARNING, "slots stay")
    workers = {
        "rank 0": FakeWorker(logged=[skipped, skipped, (logging.INFO, "[replay] 8 rows")]),
        "rank 1": FakeWorker(logged=[skipped, skipped, slow]),
        "rank 2": FakeWorker(logged=RuntimeError("this rank is dead")),
    }
    caplog.set_level(logging.INFO, "flowgrpo_trainer")
    worker_logs.relay(workers)
    said = [(record.levelno, record.getMessage()) for record in caplog.records]
    assert said == [skipped, skipped, (logging.INFO, "[replay] 8 rows"), (logging.WARNING, "rank 1: slots stay")]


def test_a_worker_keeps_the_lines_of_our_packages_until_they_are_fetched():
    loggers = [logging.getLogger(name) for name in worker_logs.PACKAGES]
    before = [(logger.level, list(logger.handlers)) for logger in loggers]
    try:
        worker = worker_logs.LogsToDriver()
        logging.getLogger("flowgrpo_fsdp_actor.join").info("[replay] up to %d rows", 8)
        logging.getLogger("diffusers").warning("not ours")
        assert worker.logged() == [(logging.INFO, "[replay] up to 8 rows")]
        assert worker.logged() == []
    finally:
        for logger, (level, handlers) in zip(loggers, before, strict=True):
            logger.setLevel(level)
            logger.handlers[:] = handlers


@pytest.mark.parametrize("quiet", [False, True])
def test_a_run_shows_what_is_logged_for_information_unless_it_is_quiet(quiet, monkeypatch):
    from flowgrpo_trainer import main, session

    logger = logging.getLogger("flowgrpo_trainer")
    monkeypatch.setattr(session, "train_session", lambda *_: 0)
    before = logger.level
    try:
        assert main.run(["--recipe", "quickstart", *(["--quiet"] if quiet else [])]) == 0
        assert worker_logs.log.isEnabledFor(logging.INFO) is not quiet
        assert worker_logs.log.isEnabledFor(logging.WARNING)
    finally:
        logger.setLevel(before)


# ---------------------------------------------------------------------- what a sync says

REPORT = SyncReport(
    engine="engine0",
    version=1,
    mode="full",
    transport="shm",
    tensors=3,
    bytes=10**9,
    buckets=2,
    digest="d",
    changed=True,
    begin_s=0.0,
    gather_s=0.0,
    pack_s=0.0,
    transport_s=0.0,
    scatter_s=0.0,
    verify_s=0.0,
    total_s=1.0,
)


def test_a_sync_has_one_line_and_one_more_for_each_engine_that_differs():
    alike, slow = replace(REPORT, engine="engine1", total_s=1.5), replace(REPORT, engine="engine2", total_s=2.5)
    fewer = replace(REPORT, engine="engine3", tensors=2)
    assert [line.split()[2] for line in sync_lines([REPORT, alike])] == ["engine=engine0"]
    assert [line.split()[2] for line in sync_lines([REPORT, alike, slow, fewer])] == [
        "engine=engine0",
        "engine=engine2",
        "engine=engine3",
    ]


class FakeColocation:
    def engines_take_weights(self):
        return nullcontext()


@dataclass
class FakeFleet:
    """Two ranks and engines; the first syncs of rank 1 end as `failures` say."""

    failures: list[Exception] = field(default_factory=list)
    restarts: int = 0

    def __post_init__(self):
        self.actors = [FakeWorker(send_weights=lambda *_: REPORT), FakeWorker(send_weights=self._send)]
        self.engines = SimpleNamespace(workers=[FakeWorker(), FakeWorker()])
        for index, engine in enumerate(self.engines.workers):
            engine._actor_id = bytes([index])
        self.colocation = FakeColocation()

    def _send(self, *_: Any) -> Any:
        return self.failures.pop(0) if self.failures else replace(REPORT, engine="engine1")

    def restart_engines(self) -> None:
        self.restarts += 1


def test_every_sync_logs_its_wsync_time_line_with_the_commit_in_it(caplog):
    caplog.set_level(logging.INFO, "flowgrpo_trainer")
    Publisher().publish(FakeFleet(), 1, must_change=True)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("[wsync time] engine=engine0 version=1 ")
    assert "commit=-" not in line


class DeadActorError(ConnectionResetError):
    """As Ray's RayActorError: it knows the number of the actor, not the engine's name."""

    actor_id = bytes([1]).hex()


@pytest.mark.parametrize("error", [EngineLostError("engine1", "killed by signal 9"), DeadActorError("killed")])
def test_an_engine_that_is_replaced_is_named_with_its_cause_before_it_is(error, caplog):
    fleet = FakeFleet(failures=[error])
    metrics = Publisher(fault_tolerance=True).publish(fleet, 1, must_change=True)
    assert (fleet.restarts, metrics["train/weight_sync_failures"]) == (1, 1.0)
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert [word for word in ("engine1", "killed") if word not in warning] == []


# ---------------------------------------------------------------------- host memory


def test_a_node_whose_host_memory_is_less_than_what_sleeps_takes_is_warned_of():
    settings, _ = parse(["--recipe", "quickstart", "--offload-train", "--offload-rollout"], {})
    short, enough = [("node-a", 2**20)] * 2, [("node-b", 2**40)] * 2
    (warning,) = host_memory.warnings(settings, [*short, *enough])
    assert [word for word in ("node-a", "2 cards", "0 GiB available") if word not in warning] == []
    awake, _ = parse(["--recipe", "quickstart"], {})
    assert host_memory.warnings(awake, short) == []


def test_a_model_that_has_no_estimate_is_said_and_does_not_end_the_run(tmp_path):
    settings, _ = parse(["--recipe", "quickstart", "--model-path", str(tmp_path)], {})
    (warning,) = host_memory.warnings(settings, [("node-a", 2**40)])
    assert str(tmp_path) in warning


def test_available_memory_is_never_more_than_the_containers_limit(tmp_path, monkeypatch):
    whole = host_memory.available_bytes()
    assert whole > 2**20
    (tmp_path / "memory.max").write_text(f"{2**20}\n")
    monkeypatch.setattr(host_memory, "CGROUP_LIMIT", tmp_path / "memory.max")
    assert host_memory.available_bytes() == 2**20
    (tmp_path / "memory.max").write_text("max\n")
    assert host_memory.available_bytes() > 2**20
