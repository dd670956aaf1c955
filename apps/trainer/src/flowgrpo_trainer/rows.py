"""The rows of a batch on their way to the training ranks, through TransferQueue.

A row is four numbers: which rollout, group and slot, and the candidate's advantage. Tensors stay in the
sidecars, whose place follows from those numbers. One partition per rollout holds whole groups; every rank
takes all of it, under a task name of its own, so that all ranks build the same list.

Shapes: G prompt groups, N candidates of a group, R = G * N rows.
"""

import time
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

FIELDS = ("rollout_id", "group_index", "slot", "advantage")


class RowsError(RuntimeError):
    """The rows of a rollout are not what was put in; says which rollout and how they differ."""

    def __init__(self, rollout_id: int, what: str):
        super().__init__(rollout_id, what)  # pickle, and so Ray, rebuilds from these
        self.rollout_id, self.what = rollout_id, what

    def __str__(self) -> str:
        return f"rows of rollout {self.rollout_id}: {self.what}"


def make_rows(rollout_id: int, advantages_GN: Tensor) -> TensorDict:
    """[R] rows, group by group."""
    G, N = advantages_GN.shape
    return TensorDict(
        {
            "rollout_id": torch.full((G * N,), rollout_id, dtype=torch.int64),
            "group_index": torch.arange(G).repeat_interleave(N),
            "slot": torch.arange(N).repeat(G),
            "advantage": advantages_GN.reshape(-1).to(torch.float64),
        },
        batch_size=G * N,
    )


class RowQueue:
    """The driver's end: starts TransferQueue on the running Ray cluster, puts rows, clears them."""

    def __init__(self) -> None:
        import transfer_queue
        from omegaconf import OmegaConf

        self._module = transfer_queue
        # One unit: each takes a logical CPU, and rows are four numbers.
        backend = {"SimpleStorage": {"num_data_storage_units": 1}}
        transfer_queue.init(OmegaConf.create({"controller": {"polling_mode": True}, "backend": backend}))
        self._client = transfer_queue.get_client()

    def put(self, rollout_id: int, rows: TensorDict) -> None:
        self._client.put(rows, partition_id=_partition(rollout_id))

    def clear(self, rollout_id: int) -> None:
        self._client.clear_partition(_partition(rollout_id))

    def close(self) -> None:
        self._module.close()


class RowTaker:
    """A training rank's end."""

    def __init__(self, rank: int) -> None:
        import transfer_queue

        transfer_queue.init()
        self._client = transfer_queue.get_client()
        self._task = f"actor_rank{rank}"

    def take(self, rollout_id: int, G: int, N: int, *, timeout_s: float = 60.0) -> Tensor:
        """advantages [G, N] of one rollout. Raises RowsError if rows are missing, doubled or of another rollout."""
        meta = self._wait(rollout_id, G * N, timeout_s)
        data = self._client.get_data(meta)
        columns = {name: torch.stack([value.reshape(()) for value in data[name].unbind()]) for name in FIELDS}
        if not bool((columns["rollout_id"] == rollout_id).all()):
            raise RowsError(rollout_id, f"rows of rollouts {sorted(set(columns['rollout_id'].tolist()))} came")
        place = columns["group_index"] * N + columns["slot"]
        if sorted(place.tolist()) != list(range(G * N)):
            raise RowsError(rollout_id, f"{G} groups of {N} expected, got candidates {sorted(place.tolist())}")
        advantages = torch.empty(G * N, dtype=torch.float64)
        advantages[place] = columns["advantage"]
        return advantages.view(G, N)

    def _wait(self, rollout_id: int, count: int, timeout_s: float) -> Any:
        deadline = time.monotonic() + timeout_s
        while True:
            meta = self._client.get_meta(
                data_fields=list(FIELDS),
                batch_size=count,
                partition_id=_partition(rollout_id),
                mode="fetch",
                task_name=self._task,
            )
            if meta.size == count:
                return meta
            if time.monotonic() > deadline:
                raise RowsError(rollout_id, f"{count} rows did not come within {timeout_s:.0f} s")
            time.sleep(0.02)


def _partition(rollout_id: int) -> str:
    return f"rollout_{rollout_id}"
