"""Every tracker gets every number, at its rollout; a bad number stops before any of them."""

import json
import math
import pickle
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest
from flowgrpo_trainer.checkpoints import NoCheckpoints
from flowgrpo_trainer.loop import Run, train
from flowgrpo_trainer.progress import RunProgress
from flowgrpo_trainer.run_folder import RunFolder
from flowgrpo_trainer.tracking import (
    ClearMLTracker,
    JsonlTracker,
    MetricsServiceTracker,
    NonFiniteMetricError,
    TensorBoardTracker,
    Trackers,
    TrackerUnavailableError,
    open_trackers,
    problems,
)
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


class FakeTracker:
    """Records what it is given."""

    def __init__(self, fails=False):
        self.logged, self.closed, self.fails = [], False, fails

    def log(self, step, metrics):
        self.logged.append((step, dict(metrics)))

    def close(self):
        self.closed = True
        if self.fails:
            raise OSError("disk full")


def read_events(folder):
    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


# -- the check ---------------------------------------------------------------------------------------------------


def test_non_finite_metrics_are_refused_by_name_before_any_tracker_sees_the_step():
    tracker = FakeTracker()
    with pytest.raises(NonFiniteMetricError) as error:
        Trackers([tracker]).log(7, {"reward/mean": math.nan, "train/lr": math.inf, "fine": 1.0})
    assert set(error.value.values) == {"reward/mean", "train/lr"}
    assert "reward/mean" in str(error.value)
    assert pickle.loads(pickle.dumps(error.value)).step == 7
    assert tracker.logged == []


def test_a_nan_loss_passes_only_where_no_optimizer_step_was_taken():
    tracker = FakeTracker()
    Trackers([tracker]).log(0, {"train/loss": math.nan, "train/optimizer_steps": 0.0})
    assert len(tracker.logged) == 1
    for metrics in (
        {"train/loss": math.nan, "train/optimizer_steps": 2.0},
        {"train/loss": math.nan},
        {"train/loss": math.inf, "train/optimizer_steps": 0.0},
    ):
        with pytest.raises(NonFiniteMetricError):
            Trackers([tracker]).log(1, metrics)


def test_what_is_no_number_is_refused_by_name():
    with pytest.raises(TypeError) as error:
        Trackers([]).log(0, {"reward/mean": "high"})
    assert "reward/mean" in str(error.value)


def test_all_trackers_are_closed_also_when_the_first_fails():
    first, second = FakeTracker(fails=True), FakeTracker()
    with pytest.raises(OSError):
        Trackers([first, second]).close()
    assert second.closed


# -- TensorBoard and the run folder ------------------------------------------------------------------------------


def test_tensorboard_and_the_run_folder_hold_every_series_at_its_rollout(tmp_path):
    folder = RunFolder(tmp_path)
    folder.start({}, total_rollouts=3)
    trackers = open_trackers(folder, run_name="test")
    for step in range(3):
        trackers.log(step, {"reward/mean": step / 4, "train/loss": -1.0})
        assert read_events(folder.events_dir)["reward/mean"][-1] == (step, step / 4)  # readable while it runs
    trackers.close()
    assert read_events(folder.events_dir) == {
        "reward/mean": [(0, 0.0), (1, 0.25), (2, 0.5)],
        "train/loss": [(0, -1.0), (1, -1.0), (2, -1.0)],
    }
    assert [(r.step, r.metrics["reward/mean"]) for r in folder.read_metrics()] == [(0, 0.0), (1, 0.25), (2, 0.5)]


def test_the_evaluation_before_training_is_the_first_point_of_its_curves_and_no_line_of_the_run_folder(tmp_path):
    folder, other = RunFolder(tmp_path), FakeTracker()
    folder.start({}, total_rollouts=0)
    trackers = Trackers([JsonlTracker(folder), TensorBoardTracker(folder.events_dir), other])
    run = Run(
        num_rollouts=0,
        group_size=8,
        std_mode="group",
        prompts=None,
        context=None,
        generate=None,
        convert=None,
        parity=SimpleNamespace(check=lambda run, fleet: None),
        evaluator=SimpleNamespace(
            prompts=(), is_due=lambda trained, total: True, run=lambda *_: {"eval/held_out/reward_mean": 0.25}
        ),
        publisher=None,
        checkpoints=NoCheckpoints(),
        tracker=trackers,
        progress=RunProgress(0, silent=True),
    )
    train(run, fleet=None)
    trackers.close()
    assert read_events(folder.events_dir) == {"eval/held_out/reward_mean": [(0, 0.25)]}
    assert other.logged == [(0, {"eval/held_out/reward_mean": 0.25})]
    assert folder.read_metrics() == []
    with pytest.raises(NonFiniteMetricError):
        trackers.log_before_training({"eval/held_out/reward_mean": math.nan})


def test_tensorboard_forgets_after_a_resume_what_the_resume_does_again(tmp_path):
    first = TensorBoardTracker(tmp_path)
    for step in range(4):
        first.log(step, {"a": 1.0})
    first.close()
    second = TensorBoardTracker(tmp_path, resume_step=2)
    second.log(2, {"a": 9.0})
    second.close()
    assert read_events(tmp_path)["a"] == [(0, 1.0), (1, 1.0), (2, 9.0)]


def test_neither_tracking_nor_a_tensorboard_tracker_imports_torch(tmp_path):
    code = (
        "import sys; from pathlib import Path; from flowgrpo_trainer.tracking import TensorBoardTracker\n"
        "assert 'tensorboard' not in sys.modules\n"
        "TensorBoardTracker(Path(sys.argv[1])).close(); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, tmp_path], check=True)


# -- the metrics service -----------------------------------------------------------------------------------------


class Service:
    """A real HTTP server that records requests and answers `status`, or hangs until told."""

    def __init__(self, status=200, hang=False):
        self.bodies, self.headers, self.release = [], [], threading.Event()
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                service.headers.append(dict(self.headers))
                service.bodies.append(json.loads(body))
                if hang:
                    service.release.wait(30)
                self.send_response(status)
                if status == 302:
                    self.send_header("Location", "/elsewhere")
                self.send_header("Content-Length", "0")
                self.end_headers()

            def do_GET(self):  # where a followed redirect would end, and look like a success
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *words):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.host = f"127.0.0.1:{self.server.server_port}"
        self.url = f"http://{self.host}/metrics"

    def __enter__(self):
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self.release.set()
        self.server.shutdown()
        self.server.server_close()


def test_the_metrics_service_gets_one_json_post_a_step():
    said = []
    with Service() as service:
        tracker = MetricsServiceTracker(service.url, "my-run", say=said.append)
        tracker.log(0, {"reward/mean": 0.5, "train/loss": math.nan})
        tracker.log(1, {"reward/mean": 0.6})
        tracker.close()
    first, second = service.bodies
    assert (first["run"], first["step"], first["step_metric"]) == ("my-run", 0, "rollout/step")
    assert first["metrics"] == {"rollout/step": 0, "reward/mean": 0.5, "train/loss": None}
    assert second["metrics"] == {"rollout/step": 1, "reward/mean": 0.6}
    assert (tracker.sent, tracker.failures, said) == (2, 0, [])


@pytest.mark.parametrize("status", [404, 500, 302])
def test_a_refusing_service_is_counted_said_once_and_summed_up_at_the_end(status):
    said = []
    with Service(status) as service:
        tracker = MetricsServiceTracker(service.url, "run", say=said.append)
        for step in range(3):
            tracker.log(step, {"a": 1.0})
        tracker.close()
    assert (tracker.sent, tracker.failures) == (0, 3)
    assert len(said) == 2
    assert all(service.url in words for words in said)


def test_a_service_that_is_not_there_never_stops_a_run():
    with Service() as service:
        url = service.url
    said = []
    tracker = MetricsServiceTracker(url, "run", say=said.append)
    tracker.log(0, {"a": 1.0})
    tracker.close()
    assert tracker.failures == 1
    assert len(said) == 2


def test_a_hanging_service_costs_close_its_deadline_and_log_nothing():
    said = []
    with Service(hang=True) as service:
        tracker = MetricsServiceTracker(service.url, "run", deadline=0.2, say=said.append)
        for step in range(MetricsServiceTracker.QUEUE + 10):
            tracker.log(step, {"a": 1.0})
        tracker.close()
        sent, failures = tracker.sent, tracker.failures
    assert sent == 0
    assert failures >= 8  # at most one or two are on their way while the queue is full
    assert "unsent" in said[-1]


def test_credentials_of_the_url_travel_as_a_header_and_are_never_said():
    said = []
    with Service(500) as service:
        tracker = MetricsServiceTracker(f"http://me:hunter2@{service.host}/m", "run", say=said.append)
        tracker.log(0, {"a": 1.0})
        tracker.close()
    assert service.headers[0]["Authorization"].startswith("Basic ")
    assert said
    assert not any("hunter2" in words for words in said)


@pytest.mark.parametrize("url", ["", "localhost:9000", "ftp://host/x", "http://", "http://host:port/", "http://host:0"])
def test_an_address_that_is_none_is_a_problem_and_an_error(url):
    (problem,) = problems(metrics_service=url)
    assert "--use-metrics-service" in problem.where
    with pytest.raises(TrackerUnavailableError):
        MetricsServiceTracker(url, "run")


# -- ClearML -----------------------------------------------------------------------------------------------------

FAKE_CLEARML = """
calls = []
class Logger:
    def report_scalar(self, **words): calls.append(words)
class Task:
    @classmethod
    def init(cls, **words): calls.append(words); return cls()
    def set_parameters_as_dict(self, values): calls.append(values)
    def get_logger(self): return Logger()
    def close(self): calls.append("closed")
"""


@pytest.fixture
def fake_clearml(tmp_path, monkeypatch):
    (tmp_path / "clearml.py").write_text(FAKE_CLEARML)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "clearml", raising=False)
    import clearml

    yield clearml
    sys.modules.pop("clearml")


def test_clearml_gets_title_series_and_step_and_never_a_nan_that_it_would_show_as_0(fake_clearml):
    tracker = ClearMLTracker("run 1", {"lr": 1e-4})
    tracker.log(3, {"eval/held_out/reward_mean": 0.5, "train/loss": math.nan, "plain": 1.0})
    tracker.close()
    init, settings, first, second, closed = fake_clearml.calls
    assert init["task_name"] == "run 1"
    assert settings == {"settings": {"lr": 1e-4}}
    assert first == {"title": "eval/held_out", "series": "reward_mean", "value": 0.5, "iteration": 3}
    assert (second["title"], second["series"]) == ("plain", "plain")
    assert closed == "closed"


def test_a_missing_clearml_is_said_before_a_run_and_at_its_start(monkeypatch):
    monkeypatch.setattr(sys, "path", [p for p in sys.path if "site-packages" not in p])
    monkeypatch.delitem(sys.modules, "clearml", raising=False)
    (problem,) = problems(use_clearml=True)
    assert problem.where == "--use-clearml"
    with pytest.raises(TrackerUnavailableError) as error:
        ClearMLTracker("run")
    assert error.value.where == "--use-clearml"
