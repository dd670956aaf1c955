"""The rollout engine contract. Two engines keep it: `DiffusersEngine` and `SGLangNativeGenerationEngine`."""

from collections.abc import Sequence
from typing import Any, Protocol

from flowgrpo_rollout_sglang.device_memory import shortage
from flowgrpo_rollout_sglang.request import GroupRequest, GroupTrajectory


class EngineError(RuntimeError):
    """An engine cannot do what was asked; says which engine, what, and what to do."""

    def __init__(self, engine: str, what: str, hint: str = ""):
        super().__init__(engine, what, hint)  # pickle, and so Ray, rebuilds from these
        self.engine, self.what, self.hint = engine, what, hint

    def __str__(self) -> str:
        return f"engine {self.engine}: {self.what}" + (f"\nhint: {self.hint}" if self.hint else "")


class EngineOutOfMemory(EngineError):  # noqa: N818  (it says what happened)
    """The card ran out of memory: in which phase, how much was missing, and what to lower."""

    def __init__(self, engine: str, phase: str, asked: int | None, free: int | None, lower: str, error: str):
        what = f"out of device memory while {phase}: {shortage(asked, free)}\n  {error}"
        super().__init__(engine, what, f"lower {lower}")
        self.args = (engine, phase, asked, free, lower, error)  # pickle, and so Ray, rebuilds from these
        self.phase, self.asked, self.free, self.lower, self.error = phase, asked, free, lower, error


class EngineLostError(EngineError):
    """The engine's own process is gone, or does not answer any more: only a fresh engine helps."""


class RolloutEngine(Protocol):
    """One engine: it owns a copy of the policy, draws images with it, and takes new weights as transactions.

    Tags of sleep and wake: "weights" (the transformer) and "frozen" (VAE, text encoder, caches).

    An engine over several devices has a rank on each, which holds a part of the weights and takes it in a transaction
    of its own; such an engine has `split`, and its begin, verify and abort take the rank as their last argument.
    """

    name: str
    policy_version: int
    """The last committed version. Unchanged while a transaction is open and after one that failed."""

    def start(self) -> None:
        """Loads or launches; returns when ready. Raises EngineError with the reason (log tail included)."""

    def generate(self, requests: Sequence[GroupRequest]) -> list[GroupTrajectory]:
        """One trajectory per request, in order. A candidate's bits do not depend on its neighbours' noise.

        Raises EngineError while asleep, while a weight transaction is open or after one that failed.
        """

    def sleep(self, tags: Sequence[str] | None = None) -> None:
        """Frees the device memory of `tags` (None: all)."""

    def wake(self, tags: Sequence[str] | None = None) -> None:
        """Brings `tags` (None: all) back, bit for bit."""

    def split(self) -> dict[str, int]:
        """Of an engine over several devices: which dimension of each tensor its ranks divide evenly, in their order.

        A tensor that is not in it goes whole to every rank."""

    def begin(self, manifest: Any, channel: Any) -> None:
        """Opens a weight transaction: resolves every name, opens the sender's channel. Moves no byte."""

    def verify(self) -> Any:
        """Waits until every bucket is written, compares count, bytes and fingerprints with the manifest."""

    def commit(self, version: int) -> None:
        """Makes the verified weights serve as `version`: on all ranks, or on none if one has not verified them."""

    def abort(self) -> None:
        """Ends an open transaction, on all ranks if none is named. If a byte was written, the engine refuses to
        generate until a commit."""

    def stop(self) -> None:
        """Ends it and all its processes. Safe to call twice."""


def __getattr__(name: str) -> object:
    # The public dotted path of the server's engine, without its imports for who only needs the contract.
    if name == "SGLangNativeGenerationEngine":
        from flowgrpo_rollout_sglang.sglang_engine import SGLangNativeGenerationEngine

        return SGLangNativeGenerationEngine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
