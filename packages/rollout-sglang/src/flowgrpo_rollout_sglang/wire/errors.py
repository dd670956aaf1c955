"""The one error of a weight sync. What it means for the engine is always the same: no version was committed."""

import json
from typing import Literal, Self, get_args

from flowgrpo_rollout_sglang.engine import EngineError

Reason = Literal[
    "manifest",  # the manifest is cut, contradicts itself, or is of another kind than the engine takes
    "names",  # names that the engine does not know, or that the sender did not name
    "shape",
    "dtype",
    "version",  # not newer than what is served, or not the successor of what is served
    "busy",  # another transaction is open, or a generation is running
    "stream",  # the sender's tensors are not those of its manifest
    "peer_lost",  # the other process ended or closed the link
    "timeout",  # the other process is there and silent
    "fingerprint",  # what was written is not what was sent
    "unchanged",  # the new weights are the old ones, bit for bit
    "unverified",  # commit without a verified transaction
    "aborted",
    "device",  # sender and receiver do not share a GPU
    "control",  # a control call failed for a reason of its own
    "internal",
]


class DeviceMismatchError(RuntimeError):
    """Sender and receiver do not share a GPU, or the parameters are not on it."""


class WeightSyncError(EngineError):
    """An engine does not hold the weights that were meant for it. No version was committed.

    Fields: `engine`, `version` (the one that was to be committed), `reason` (a `Reason`), `what` (one sentence),
    `tensors` (names it is about, all of them), `sent` (tensors that had been written when it failed).
    """

    def __init__(
        self,
        engine: str,
        version: int,
        reason: Reason,
        what: str,
        tensors: tuple[str, ...] = (),
        sent: int = 0,
        hint: str = "",
    ):
        EngineError.__init__(self, engine, what, hint)
        self.args = (engine, version, reason, what, tuple(tensors), sent, hint)  # pickle rebuilds from these
        self.version, self.reason, self.tensors, self.sent = version, reason, tuple(tensors), sent

    def __str__(self) -> str:
        lines = [f"engine {self.engine}, weights of version {self.version} not committed: {self.what}"]
        if self.tensors:
            more = f", ... ({len(self.tensors)} in all)" if len(self.tensors) > 3 else ""
            lines.append(f"  tensors: {', '.join(self.tensors[:3])}{more}")
        if self.hint:
            lines.append(f"hint: {self.hint}")
        return "\n".join(lines)

    def to_json(self) -> str:
        """For a control path that carries text, such as a server's answer."""
        names = ("engine", "version", "reason", "what", "tensors", "sent", "hint")
        return json.dumps(dict(zip(names, self.args, strict=True)))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Raises ValueError if `text` is not what `to_json` wrote."""
        try:
            f = json.loads(text)
            reason = f["reason"] if f["reason"] in get_args(Reason) else "internal"
            names = tuple(str(name) for name in f["tensors"])
            return cls(
                str(f["engine"]), int(f["version"]), reason, str(f["what"]), names, int(f["sent"]), str(f["hint"])
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a weight sync error in JSON: {text[:200]!r}") from error
