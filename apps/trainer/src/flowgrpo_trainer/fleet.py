"""The workers of a run: placed, started, stopped. What a run leaves out is decided here, not in the loop.

One bundle of a placement group per device: the training rank and the engine of a device share its bundle, so
that rank j and engine j meet on the same card. An engine over several devices has its worker in the first one's bundle
and its own processes on the cards of all its ranks.
"""

import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowgrpo_trainer import cluster  # sets Ray's environment before the import below

# isort: split
import ray
from flowgrpo_rewards import RewardReport
from flowgrpo_rollout_sglang.artifacts import ArtifactStore
from flowgrpo_rollout_sglang.request import GroupRequest, GroupTrajectory
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from flowgrpo_trainer import host_memory
from flowgrpo_trainer.colocation import Colocation
from flowgrpo_trainer.rollout import RolloutGroup
from flowgrpo_trainer.rows import RowQueue
from flowgrpo_trainer.settings import Settings
from flowgrpo_trainer.wiring import Device, actor_config, engine_config, reward_config
from flowgrpo_trainer.worker_logs import relay
from flowgrpo_trainer.workers import ActorWorker, RewardWorker, RolloutWorker

log = logging.getLogger(__name__)
SHARE = 0.3
"""Of a device, for each of rank, engine and scorer: they share it and take turns."""
CANDIDATES_PER_CALL = 64
"""Candidates sent to an engine at once, at most: enough to fill a forward, few enough that progress shows."""
PLACE_TIMEOUT_S = 120.0


class Engines:
    """All engines as one: calls go to whichever is free."""

    def __init__(self, workers: Sequence[Any]):
        self.workers = list(workers)

    def generate(
        self, requests: Sequence[GroupRequest], on_group: Callable[[], None] = lambda: None
    ) -> list[GroupTrajectory]:
        """Trajectories in the order of `requests`.

        The groups of a call are fixed by `requests` and the number of engines alone (`calls_of`), so that a forward's
        composition, and with it every bit, does not depend on which engine was free. Raises EngineError, or
        RayActorError for a dead engine.
        """
        calls = calls_of(requests, len(self.workers))
        results: dict[int, list[GroupTrajectory]] = {}
        running: dict[Any, tuple[int, Any]] = {}
        free, waiting = list(self.workers), list(range(len(calls)))
        while waiting or running:
            while waiting and free:
                index, worker = waiting.pop(0), free.pop(0)
                running[worker.generate.remote(calls[index])] = (index, worker)
            (done, *_), _ = ray.wait(list(running), num_returns=1)
            index, worker = running.pop(done)
            results[index] = ray.get(done)
            free.append(worker)
            for _ in results[index]:
                on_group()
        return [trajectory for index in range(len(calls)) for trajectory in results[index]]


def calls_of(requests: Sequence[GroupRequest], engines: int) -> list[list[GroupRequest]]:
    """The calls to the engines: waves over all of them, of whole groups, in the order of `requests`.

    A call of a full wave has CANDIDATES_PER_CALL candidates, or what whole groups make of it; the last wave is divided
    evenly. So no engine draws more than ceil(groups / engines) groups, and each that can has as many or one less.
    """
    most = max(1, CANDIDATES_PER_CALL // max((len(request.sample_ids) for request in requests), default=1))
    calls: list[list[GroupRequest]] = []
    for start in range(0, len(requests), engines * most):
        wave = requests[start : start + engines * most]
        count = min(engines, len(wave))
        calls += [list(wave[i * len(wave) // count : (i + 1) * len(wave) // count]) for i in range(count)]
    return calls


@dataclass
class Fleet:
    """Handles of every worker, and what ties them together."""

    actors: list[Any]
    engines: Engines
    scorer: Any
    rows: RowQueue
    colocation: Colocation
    device: Device
    components: tuple[str, ...]
    """What the scorer measures."""
    restart_engines: Callable[[], None]
    """Starts every engine afresh, with the base weights; for `--use-fault-tolerance`."""

    def relay_logs(self) -> None:
        """Logs here what the workers have logged since the last time (`worker_logs`)."""
        named = {f"rank {rank}": actor for rank, actor in enumerate(self.actors)}
        named |= {f"engine{index}": engine for index, engine in enumerate(self.engines.workers)}
        relay(named | {"scorer": self.scorer})

    def read_ahead(self, rollout_id: int, G: int) -> None:
        """Lets every rank read the rollout's sidecars while the GPUs score, sleep and wake."""
        for actor in self.actors:
            actor.read_ahead.remote(rollout_id, G)

    def score(self, groups: Sequence[RolloutGroup]) -> RewardReport:
        """One reward step. Raises RewardError by name of group and component."""
        return ray.get(self.scorer.score.remote([group.samples() for group in groups]))


@contextmanager
def running(
    settings: Settings, store: ArtifactStore, targets: tuple[str, ...], say: Callable[[str], None]
) -> Iterator[Fleet]:
    """Starts every worker of the run at the same time; stops them all at the end, however it comes.

    Raises: ClusterError (no cluster, too few devices), and each worker's own error: EngineError, ActorError,
    ScorerLoadError.
    """
    world = settings.world_size("actor")
    ours = cluster.connect(settings.run.ray_address, workers=world + 1)
    group, stops = None, []
    try:
        device = _device(settings, world)
        say(f"{world} {'GPU' if device == 'cuda' else 'CPU'} worker{'s' if world > 1 else ''} on Ray {ray.__version__}")
        cluster.wait_for_room(world, PLACE_TIMEOUT_S)
        bundle = {"CPU": 1.0} | ({"GPU": 1.0} if device == "cuda" else {})
        group = placement_group([bundle] * world, strategy="PACK")
        if not group.wait(PLACE_TIMEOUT_S):
            have = {k: v for k, v in ray.cluster_resources().items() if k in ("CPU", "GPU")}
            raise cluster.ClusterError(f"the cluster has no room for {world} x {bundle}: {have}", "lower --resource")
        fleet = _start(settings, store, targets, device, group, stops, say)
        stops.append(fleet.relay_logs)  # the first to be called: what they said before an error belongs above it
        fleet.relay_logs()
        yield fleet
    finally:
        for stop in reversed(stops):
            _quietly(stop)
        if group is not None:
            _quietly(lambda: remove_placement_group(group))
        if ours:
            ray.shutdown()


def _start(
    settings: Settings,
    store: ArtifactStore,
    targets: tuple[str, ...],
    device: Device,
    group: Any,
    stops: list,
    say: Callable[[str], None],
) -> Fleet:
    world = settings.world_size("actor")
    place = _placer(group, device, settings.run.cpu_threads or max(1, (os.cpu_count() or 1) // world))
    actor_settings = actor_config(settings, device=device)
    actors = [place(ActorWorker, rank).remote(actor_settings, store, rank, world) for rank in range(world)]
    stops.append(lambda: _stop_all(actors))
    if device == "cuda":
        for warning in host_memory.warnings(settings, ray.get([actor.host_memory.remote() for actor in actors])):
            say(f"warning: {warning}")
    visible = _visible_devices(settings, device, actors)
    engines = _make_engines(settings, targets, device, place, visible)
    stops.append(lambda: _stop_all(engines))
    scorer = place(RewardWorker, 0).remote(reward_config(settings), settings.reward.custom_reward_post_process_path)
    stops.append(lambda: ray.kill(scorer))

    wire = {
        "transport": "cuda_ipc" if device == "cuda" else "shm",
        "bucket_size_mb": settings.sync.weight_sync_bucket_size_mb,
        "wire_dtype": settings.sync.weight_sync_wire_dtype,
    }
    master = ray.get(actors[0].address.remote())
    starting = [actor.start.remote(master, wire) for actor in actors] + [engine.start.remote() for engine in engines]
    loading = scorer.start.remote()
    rows = RowQueue()  # TransferQueue starts meanwhile
    stops.append(rows.close)
    ray.get(starting)
    ray.get([actor.attach_rows.remote() for actor in actors])
    pool = Engines(engines)

    def restart() -> None:
        _stop_all(pool.workers)
        pool.workers[:] = _make_engines(settings, targets, device, place, visible)
        engines[:] = pool.workers
        ray.get([engine.start.remote() for engine in pool.workers])

    return Fleet(
        actors=actors,
        engines=pool,
        scorer=scorer,
        rows=rows,
        colocation=Colocation(
            sleeping_actors=actors if settings.fsdp.offload_train else [],
            sleeping_engines=pool.workers if settings.rollout.offload_rollout else [],
        ),
        device=device,
        components=ray.get(loading),
        restart_engines=restart,
    )


def _visible_devices(settings: Settings, device: Device, actors: Sequence[Any]) -> list[str | None]:
    """For each engine the cards of its training ranks, in their order. None: the one that its worker sees.

    Raises ClusterError where an engine's ranks are not on one node.
    """
    per_engine = settings.rollout.rollout_num_gpus_per_engine
    engines = len(actors) // per_engine
    if per_engine == 1 or device == "cpu":
        return [None] * engines
    places = ray.get([actor.place.remote() for actor in actors])
    visible: list[str | None] = []
    for index in range(engines):
        of_one = places[index * per_engine : (index + 1) * per_engine]
        if len({node for node, _ in of_one}) > 1:
            raise cluster.ClusterError(
                f"the {per_engine} cards of engine{index} are on different nodes",
                "lower --rollout-num-gpus-per-engine, or use nodes whose number of cards it divides",
            )
        visible.append(",".join(card for _, card in of_one))
    return visible


def _make_engines(
    settings: Settings,
    targets: tuple[str, ...],
    device: Device,
    place: Callable[..., Any],
    visible: Sequence[str | None],
) -> list[Any]:
    per_engine = settings.rollout.rollout_num_gpus_per_engine
    log_folder = str(Path(settings.run.run_dir or ".") / "logs")
    return [
        place(RolloutWorker, index * per_engine).remote(
            settings.rollout.rollout_engine_class_path,
            engine_config(settings, index, device=device, targets=targets, log=log_folder, visible=visible[index]),
        )
        for index in range(settings.world_size("rollout") // per_engine)
    ]


def _placer(group: Any, device: Device, threads: int) -> Callable[..., Any]:
    """How a worker class is bound to a bundle, its share of the device and its threads.

    Ranks work at the same time, but rank, engine and scorer take turns: each may use all of its rank's cores.
    """

    def place(worker: Any, bundle: int) -> Any:
        return worker.options(
            num_cpus=SHARE,
            num_gpus=SHARE if device == "cuda" else 0,
            # Threads that spin while they wait would slow whatever else runs on the machine by far more than they gain.
            runtime_env={
                "env_vars": {
                    "OMP_NUM_THREADS": str(threads),
                    "OMP_WAIT_POLICY": "PASSIVE",
                    "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),  # the driver's own plug-ins
                }
            },
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle),
        )

    return place


def _device(settings: Settings, world: int) -> Device:
    """What `--device` comes to on this cluster. `auto` never falls back from GPUs that are too few."""
    gpus = int(ray.cluster_resources().get("GPU", 0))
    if settings.run.device == "cpu" or (settings.run.device == "auto" and gpus == 0):
        return "cpu"
    if gpus < world:
        raise cluster.ClusterError(
            f"--resource asks for {world} GPUs, the cluster has {gpus}", "lower --resource, or set --device cpu"
        )
    return "cuda"


def _stop_all(workers: Sequence[Any]) -> None:
    """Asks each to end in order, then ends it."""
    asked = [worker.stop.remote() for worker in workers]
    _quietly(lambda: ray.get(asked, timeout=20.0))
    for worker in workers:
        ray.kill(worker)


def _quietly(stop: Callable[[], Any]) -> None:
    """While stopping, an error must not hide the one that led here; it is logged."""
    try:
        stop()
    except Exception as error:
        log.debug("while stopping: %s", error)
