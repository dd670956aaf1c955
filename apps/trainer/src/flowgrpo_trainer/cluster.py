"""A Ray cluster for the run: one that exists, or a local one of its own.

Environment variables that Ray reads at import are set here, so this module is imported before `ray` is.
"""

import contextlib
import logging
import os
import re
import socket
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
PROBE_TIMEOUT_S = 10.0
LOCAL = "local"
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
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
    """Joins the cluster that `address`, else RAY_ADDRESS, names; without either starts a local one.

    The local one has a logical CPU for each of `workers` and for TransferQueue, and is ours alone: one that `ray start`
    made on this host is joined only by name ("auto"). Returns whether the cluster is ours to stop. Raises ClusterError.
    """
    if ray.is_initialized():
        return False
    source = "--ray-address" if address else "RAY_ADDRESS"
    address = address or os.environ.get("RAY_ADDRESS") or LOCAL
    if address != LOCAL:
        _join(address, source)
        return False
    _start_local(max(os.cpu_count() or 1, workers + QUEUE_CPUS))
    return True


def _join(address: str, source: str) -> None:
    hint = f"start one there, name another by {source}, or leave {source} out for a local one"
    # Ray itself waits for more than nine minutes for an address that nobody answers at.
    if re.fullmatch(r"[^/]+:\d+", address):
        host, _, port = address.rpartition(":")
        host = ray.util.get_node_ip_address() if host in LOOPBACK else host.strip("[]")  # where Ray listens
        try:
            socket.create_connection((host, int(port)), timeout=PROBE_TIMEOUT_S).close()
        except (OSError, OverflowError) as error:
            raise ClusterError(f"no Ray cluster at {source} {address}: {error}", hint) from error
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, ValueError, RuntimeError) as error:  # nobody there; no address; another Ray or Python
        with contextlib.suppress(Exception):
            ray.shutdown()
        raise ClusterError(f"the Ray cluster at {source} {address} cannot be joined: {error}", hint) from error


def _start_local(cpus: int) -> None:
    """A raylet gives up when its agent is slow to start, as on a loaded machine, so a start is tried again."""
    for attempt in range(1, START_TRIES + 1):
        try:
            ray.init(
                address=LOCAL, num_cpus=cpus, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR
            )
            return
        except Exception as error:
            with contextlib.suppress(Exception):
                ray.shutdown()
            if isinstance(error, ValueError):  # the same at every try
                raise ClusterError(
                    f"Ray refuses to start on this machine: {error}",
                    "look at the RAY_... variables of the environment",
                ) from error
            if attempt == START_TRIES:
                raise ClusterError(
                    f"Ray did not start in {attempt} tries: {error}", "is the machine overloaded?"
                ) from error
            log.warning("Ray did not start (%s); trying again", error)
            time.sleep(2.0 * attempt)
    raise AssertionError("unreachable")


def wait_for_room(bundles: int, timeout_s: float) -> None:
    """Returns when the cluster has a free CPU for each of `bundles` and for each of TransferQueue's actors, which are
    placed beside the bundles and would wait for ever.

    Raises ClusterError: at once where the whole cluster is too small, after `timeout_s` where others hold its CPUs.
    """
    needed, deadline = bundles + QUEUE_CPUS, time.monotonic() + timeout_s
    wants = f"the run takes {needed} CPUs ({bundles} for its workers, {QUEUE_CPUS} for TransferQueue)"
    remedy = "give the cluster more (`ray start --num-cpus N`), lower --resource, or let the run start a local cluster"
    have = ray.cluster_resources().get("CPU", 0.0)
    if have < needed:
        raise ClusterError(f"the Ray cluster is too small: {wants}, the cluster has {have:g}", remedy)
    while (free := ray.available_resources().get("CPU", 0.0)) < needed:
        if time.monotonic() > deadline:
            what = f"the Ray cluster has no room: {wants}, {free:g} of its {have:g} were free within {timeout_s:g} s"
            raise ClusterError(what, f"wait for the cluster's other jobs, {remedy}")
        time.sleep(min(0.5, timeout_s))
