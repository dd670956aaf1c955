"""A Ray cluster for the run: one that exists, or a local one of its own.

Environment variables that Ray reads at import are set here, so this module is imported before `ray` is.
"""

import contextlib
import logging
import os
import time

# Under `uv run` Ray would zip the repository and build a second environment for its workers.
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
os.environ.setdefault("TQ_LOGGING_LEVEL", "ERROR")
# Ray would run its workers at niceness 15: behind everything else on the machine.
os.environ.setdefault("RAY_worker_niceness", "0")

import ray

log = logging.getLogger(__name__)
START_TRIES = 3
QUEUE_CPUS = 2
"""TransferQueue's controller and its one storage unit take a logical CPU each, hard coded."""


class ClusterError(RuntimeError):
    """No Ray cluster, or one too small; says what was tried."""

    def __init__(self, what: str, hint: str):
        super().__init__(what, hint)  # pickle rebuilds from these
        self.what, self.hint = what, hint

    def __str__(self) -> str:
        return f"{self.what}\nhint: {self.hint}"


def connect(address: str | None, *, workers: int) -> bool:
    """Joins the cluster at `address`, or starts a local one with a logical CPU for each of `workers`.

    A raylet gives up when its agent is slow to start, as on a loaded machine, so a local start is tried again.
    Returns whether the cluster is ours to stop. Raises ClusterError.
    """
    if ray.is_initialized():
        return False
    if address is not None:
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except ConnectionError as error:
            raise ClusterError(
                f"no Ray cluster at {address}: {error}", "start one, or leave --ray-address out"
            ) from error
        return False
    cpus = max(os.cpu_count() or 1, workers + QUEUE_CPUS)
    for attempt in range(1, START_TRIES + 1):
        try:
            ray.init(num_cpus=cpus, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
            return True
        except Exception as error:
            with contextlib.suppress(Exception):
                ray.shutdown()
            if attempt == START_TRIES:
                raise ClusterError(
                    f"Ray did not start in {attempt} tries: {error}", "is the machine overloaded?"
                ) from error
            log.warning("Ray did not start (%s); trying again", error)
            time.sleep(2.0 * attempt)
    raise AssertionError("unreachable")
