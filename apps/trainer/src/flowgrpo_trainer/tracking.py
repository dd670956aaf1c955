"""Where a run's numbers go: the run folder, TensorBoard, ClearML, a metrics service over HTTP.

Every series shares one axis, `rollout/step` (the rollout's id). `Trackers.log` checks a step once and hands it to
all of them: the run folder first, since the report and a resume read it.
"""

import base64
import json
import logging
import math
import queue
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from http.client import HTTPException
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit

from flowgrpo_rollout_sglang.config import Problem

from flowgrpo_trainer.run_folder import RunFolder, now

STEP_AXIS = "rollout/step"

NAN_WITHOUT_STEP = frozenset(
    {
        "train/loss",
        "train/ratio_mean",
        "train/ratio_std",
        "train/ratio_min",
        "train/ratio_max",
        "train/clip_fraction",
        "train/approx_kl",
        "train/grad_norm",
    }
)
"""NaN means "no optimizer step was taken" here, and only beside train/optimizer_steps = 0 in the same rollout."""

_log = logging.getLogger(__name__)


class NonFiniteMetricError(ValueError):
    """A metric is NaN or infinite where that has no documented meaning. Nothing of this step was logged."""

    def __init__(self, step: int, values: Mapping[str, float]):
        super().__init__(step, dict(values))  # pickle, and so Ray, rebuilds from these
        self.step, self.values = step, dict(values)

    def __str__(self) -> str:
        named = ", ".join(f"{name} = {value}" for name, value in self.values.items())
        return (
            f"rollout {self.step}: {named}\n   A metric must be finite; training on would learn from this number.\n"
            "   fix: look at the first of these in the rollout's artifacts (a NaN reward or loss starts there)"
        )


class TrackerUnavailableError(RuntimeError):
    """A tracker that was asked for cannot be used on this machine."""

    def __init__(self, where: str, why: str, fix: str):
        super().__init__(where, why, fix)
        self.where, self.why, self.fix = where, why, fix

    def __str__(self) -> str:
        return f"{self.where}\n   {self.why}\n   fix: {self.fix}"


class Tracker(Protocol):
    """Takes one step's metrics. Steps come in rising order, except after a resume."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record `metrics`, checked and finite (or NaN as documented above), at `step`."""
        ...

    def close(self) -> None:
        """Flush and let go; `log` is not called again."""
        ...


class JsonlTracker:
    """The run folder's metrics.jsonl: on the disk when `log` returns. A failure to write ends the run."""

    def __init__(self, folder: RunFolder):
        self._folder = folder

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._folder.append_metrics(step, metrics)

    def close(self) -> None:
        pass


class TensorBoardTracker:
    """TensorBoard event files, flushed at each step, with tensorboard's own writer (no torch: 0.8 s, not 7 s)."""

    def __init__(self, events_dir: Path, resume_step: int = 0):
        """With `resume_step` above 0, TensorBoard hides what an earlier start logged from that step on."""
        # Generated protobuf modules name their members at run time.
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # ty: ignore[missing-module-member]
        from tensorboard.compat.proto.summary_pb2 import Summary  # ty: ignore[missing-module-member]
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = Event, Summary
        self._writer = EventFileWriter(str(events_dir))
        if resume_step > 0:
            started = SessionLog(status=SessionLog.START)
            self._writer.add_event(Event(step=resume_step, session_log=started, wall_time=time.time()))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        summary = self._summary(value=values)
        self._writer.add_event(self._event(step=step, summary=summary, wall_time=time.time()))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class ClearMLTracker:
    """ClearML scalars (`--use-clearml`): title and series are the parts of the name around its last slash."""

    def __init__(self, run_name: str, settings: Mapping[str, Any] | None = None, project: str = "flowgrpo"):
        if find_spec("clearml") is None:
            raise TrackerUnavailableError(*_clearml_is_missing())
        from clearml import Task  # ty: ignore[import-not-found]

        self._task: Any = Task.init(
            project_name=project,
            task_name=run_name,
            reuse_last_task_id=False,
            auto_connect_arg_parser=False,
            auto_connect_frameworks=False,
            auto_resource_monitoring=False,
            auto_connect_streams=False,  # it would replace stdout under the progress display
        )
        if settings:
            self._task.set_parameters_as_dict({"settings": dict(settings)})

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        logger = self._task.get_logger()
        for name, value in metrics.items():
            if math.isnan(value):
                continue  # ClearML 2.1 would record it as 0
            title, _, series = name.rpartition("/")
            logger.report_scalar(title=title or series, series=series, value=value, iteration=step)

    def close(self) -> None:
        self._task.close()


class MetricsServiceTracker:
    """One HTTP POST a step (`--use-metrics-service URL`), and one more at step 0 with the evaluation before training.
    It never stops or delays a run.

    A thread of its own sends, so training does not wait; each post has `deadline` seconds. A post that fails, is
    answered by anything but 2xx (a redirect too), or finds the queue full is counted in `failures`; the first
    one is said at once, the count at `close`.

        POST URL   {"run": str, "step_metric": "rollout/step", "step": int, "time": ISO 8601,
                    "metrics": {name: number, or null for NaN}}
    """

    QUEUE = 256  # steps kept while the service is slow; then the newest are dropped, and counted

    def __init__(self, url: str, run_name: str, deadline: float = 5.0, say: Callable[[str], None] = _log.warning):
        for problem in _url_problems(url):
            raise TrackerUnavailableError(problem.where, problem.why, problem.fix)
        self._run, self._deadline, self._say = run_name, deadline, say
        self._url, self._headers = _split_credentials(url)
        self.sent = 0
        self.failures = 0
        self._closed = False
        self._lock = threading.Lock()
        self._queue: queue.Queue[bytes | None] = queue.Queue(self.QUEUE)
        self._open = urllib.request.build_opener(_NoRedirect).open
        self._thread = threading.Thread(target=self._send_all, name="metrics-service", daemon=True)
        self._thread.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        values = {STEP_AXIS: step} | {n: None if math.isnan(v) else v for n, v in metrics.items()}
        body = {"run": self._run, "step_metric": STEP_AXIS, "step": step, "time": now(), "metrics": values}
        try:
            self._queue.put_nowait(json.dumps(body, allow_nan=False).encode())
        except queue.Full:
            self._failed(f"{self.QUEUE} steps are waiting already")

    def close(self) -> None:
        """Send what waits, for `deadline` seconds at most."""
        end = time.monotonic() + self._deadline
        try:
            self._queue.put(None, timeout=self._deadline)
            self._thread.join(max(0.0, end - time.monotonic()))
        except queue.Full:
            pass  # the count below says it
        self._closed = True
        with self._lock:
            unsent = self._queue.qsize() if self._thread.is_alive() else 0
            failures, sent = self.failures, self.sent
        if failures or unsent:
            self._say(f"metrics service {self._url}: {sent} steps sent, {failures} failed, {unsent} unsent")

    def _send_all(self) -> None:
        while (body := self._queue.get()) is not None and not self._closed:
            try:
                self._post(body)
            except (OSError, HTTPException) as error:  # URLError, HTTPError and time-outs are OSErrors
                self._failed(f"{type(error).__name__}: {error}")
            else:
                with self._lock:
                    self.sent += 1

    def _post(self, body: bytes) -> None:
        request = urllib.request.Request(self._url, data=body, headers=self._headers, method="POST")
        with self._open(request, timeout=self._deadline):
            pass

    def _failed(self, why: str) -> None:
        with self._lock:
            self.failures += 1
            first = self.failures == 1
        if first:
            self._say(f"metrics service {self._url} took no step ({why}); training goes on, later failures are counted")


class Trackers:
    """Checks a step's metrics once and gives them to every tracker, in order."""

    def __init__(self, trackers: Sequence[Tracker]):
        self._trackers = tuple(trackers)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Raises NonFiniteMetricError, before any tracker saw the step, and what a tracker raises."""
        values = finite_metrics(step, metrics)
        for tracker in self._trackers:
            tracker.log(step, values)

    def log_before_training(self, metrics: Mapping[str, float]) -> None:
        """The evaluation of the untrained policy, at step 0. Raises as `log`.

        Not to the run folder: `evals/` has it already, and metrics.jsonl has one line a rollout.
        """
        values = finite_metrics(0, metrics)
        for tracker in self._trackers:
            if not isinstance(tracker, JsonlTracker):
                tracker.log(0, values)

    def close(self) -> None:
        """Close all, also when one of them fails; the first failure is raised afterwards."""
        errors = []
        for tracker in self._trackers:
            try:
                tracker.close()
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]


def open_trackers(
    folder: RunFolder,
    *,
    run_name: str,
    resume_step: int = 0,
    use_clearml: bool = False,
    metrics_service: str | None = None,
    settings: Mapping[str, Any] | None = None,
    say: Callable[[str], None] = _log.warning,
) -> Trackers:
    """The trackers of a run: its folder and TensorBoard always, the others where asked for.

    `say` gets the metrics service's warnings (`RunProgress.note` shows them without tearing the display).
    Raises TrackerUnavailableError where `problems` would have named one.
    """
    trackers: list[Tracker] = [JsonlTracker(folder), TensorBoardTracker(folder.events_dir, resume_step)]
    if use_clearml:
        trackers.append(ClearMLTracker(run_name, settings))
    if metrics_service is not None:
        trackers.append(MetricsServiceTracker(metrics_service, run_name, say=say))
    return Trackers(trackers)


def problems(*, use_clearml: bool = False, metrics_service: str | None = None) -> Iterator[Problem]:
    """What preflight can know about trackers: a missing package, a URL that is none. Sends nothing."""
    if use_clearml and find_spec("clearml") is None:
        yield Problem(*_clearml_is_missing())
    if metrics_service is not None:
        yield from _url_problems(metrics_service)


def finite_metrics(step: int, metrics: Mapping[str, float]) -> dict[str, float]:
    """`metrics` as floats. Raises NonFiniteMetricError naming every bad one, TypeError for what is no number."""
    values = {}
    for name, value in metrics.items():
        try:
            values[name] = float(value)
        except (TypeError, ValueError) as error:
            raise TypeError(f"rollout {step}: metric {name} is {value!r}, which is not a number") from error
    nan_has_meaning = NAN_WITHOUT_STEP if values.get("train/optimizer_steps") == 0.0 else frozenset()
    bad = {
        name: value
        for name, value in values.items()
        if not (math.isfinite(value) or (math.isnan(value) and name in nan_has_meaning))
    }
    if bad:
        raise NonFiniteMetricError(step, bad)
    return values


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirected POST becomes a GET without its body: count it as the failure that it is."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


def _clearml_is_missing() -> tuple[str, str, str]:
    return ("--use-clearml", "The package clearml is not installed.", "uv pip install clearml, or leave the flag out")


def _url_problems(url: str) -> Iterator[Problem]:
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable:
        yield Problem(
            where=f"--use-metrics-service {url}",
            why="The metrics service is reached by HTTP POST, so this must be an http:// or https:// address.",
            fix="give a whole URL, such as http://localhost:9000/metrics",
        )


def _split_credentials(url: str) -> tuple[str, dict[str, str]]:
    """The URL without `user:password@`, which no message may show, and the headers that carry it instead."""
    parts = urlsplit(url)
    credentials, _, host = parts.netloc.rpartition("@")
    headers = {"Content-Type": "application/json"}
    if credentials:
        headers["Authorization"] = "Basic " + base64.b64encode(unquote(credentials).encode()).decode()
    return parts._replace(netloc=host).geturl(), headers
