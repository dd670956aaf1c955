# ruff: noqa: N818  (the names say what happened)
"""What can go wrong in the actor: one class per failure that a caller can act on, each picklable for Ray."""

from flowgrpo_rollout_sglang.device_memory import shortage


class ActorError(RuntimeError):
    """Base of the actor's own errors; its arguments rebuild it when it is unpickled."""


class ConfigRefused(ActorError):
    """The actor does not start with these settings."""

    def __init__(self, problems: tuple[str, ...]):
        super().__init__(problems)
        self.problems = problems

    def __str__(self) -> str:
        return f"{len(self.problems)} problems in the actor's settings\n" + "\n".join(self.problems)


class RequestRefused(ActorError):
    """A rollout request that replay could not score."""

    def __init__(self, setting: str, value: str, why: str, hint: str):
        super().__init__(setting, value, why, hint)
        self.setting, self.value, self.why, self.hint = setting, value, why, hint

    def __str__(self) -> str:
        return f"{self.setting} = {self.value}: {self.why}\nhint: {self.hint}"


class TrajectoryRefused(ActorError):
    """An engine's answer that cannot be replayed."""

    def __init__(self, group_index: int, field: str, why: str):
        super().__init__(group_index, field, why)
        self.group_index, self.field, self.why = group_index, field, why

    def __str__(self) -> str:
        return f"trajectory of group {self.group_index}: {self.field}: {self.why}"


class ModelFolderError(ActorError):
    """The model folder lacks what the actor needs."""

    def __init__(self, folder: str, missing: str, hint: str = "check --model-path"):
        super().__init__(folder, missing, hint)
        self.folder, self.missing, self.hint = folder, missing, hint

    def __str__(self) -> str:
        return f"model folder {self.folder}: {self.missing}\nhint: {self.hint}"


class PlanError(ActorError):
    """The rollout cannot be split into the updates that the settings ask for (T6)."""

    def __init__(self, what: str, fix: str):
        super().__init__(what, fix)
        self.what, self.fix = what, fix

    def __str__(self) -> str:
        return f"{self.what}\nfix: {self.fix}"


class MicroBatchCountMismatch(ActorError):
    """Ranks planned different numbers of forwards: going on would deadlock their collectives (T7)."""

    def __init__(self, rank: int, planned: tuple[int, int], most: tuple[int, int]):
        super().__init__(rank, planned, most)
        self.rank, self.planned, self.most = rank, planned, most

    def __str__(self) -> str:
        return (
            f"rank {self.rank} planned (micro-batches, forwards) = {self.planned}, some rank {self.most}\n"
            "hint: every rank must get the same sidecars, in the same order, and the same settings"
        )


class TrainableBoundaryError(ActorError):
    """The set of trainable parameters is not what the mode demands (F6)."""

    def __init__(self, mode: str, wrong: tuple[str, ...], why: str):
        super().__init__(mode, wrong, why)
        self.mode, self.wrong, self.why = mode, wrong, why

    def __str__(self) -> str:
        more = ", ..." if len(self.wrong) > 3 else ""
        return f"fsdp_trainable_mode {self.mode}: {self.why}: {', '.join(self.wrong[:3])}{more}"


class ReplayMismatch(ActorError):
    """The replayed anchor of the first update is not what its own forward gives: replay is not deterministic."""

    def __init__(self, update: int, ratio_min: float, ratio_max: float):
        super().__init__(update, ratio_min, ratio_max)
        self.update, self.ratio_min, self.ratio_max = update, ratio_min, ratio_max

    def __str__(self) -> str:
        return (
            f"update {self.update} has ratios from {self.ratio_min!r} to {self.ratio_max!r} before any optimizer "
            "step moved a weight; they must be exactly 1\n"
            "hint: replay is not deterministic here, so no clip range would mean anything; look for dropout, "
            "a kernel with atomics, or a compiled and an eager forward of the same transition"
        )


class ActorAsleep(ActorError):
    """The actor's weights are not on its device."""

    def __init__(self, asked: str):
        super().__init__(asked)
        self.asked = asked

    def __str__(self) -> str:
        return f"{self.asked} was asked of a sleeping actor\nhint: call wake() first"


class RankFailed(ActorError):
    """Another rank failed; this rank stopped with it instead of waiting for it."""

    def __init__(self, rank: int, phase: str, error: str):
        super().__init__(rank, phase, error)
        self.rank, self.phase, self.error = rank, phase, error

    def __str__(self) -> str:
        return f"rank {self.rank} failed in {self.phase}: {self.error}"


class OutOfDeviceMemory(ActorError):
    """The card ran out of memory: on which rank, in which phase, how much was missing, and what to lower."""

    def __init__(self, phase: str, rank: int, asked: int | None, free: int | None, lower: str, error: str):
        super().__init__(phase, rank, asked, free, lower, error)
        self.phase, self.rank, self.asked, self.free = phase, rank, asked, free
        self.lower, self.error = lower, error

    def __str__(self) -> str:
        return (
            f"rank {self.rank} ran out of device memory in {self.phase}: {shortage(self.asked, self.free)}\n"
            f"  {self.error}\nhint: lower {self.lower}; `trainer plan` tells the need of each phase beforehand"
        )


class CheckpointMismatch(ActorError):
    """A checkpoint holds other tensors than this actor trains."""

    def __init__(self, names: tuple[str, ...]):
        super().__init__(names)
        self.names = names

    def __str__(self) -> str:
        more = ", ..." if len(self.names) > 3 else ""
        return (
            f"{len(self.names)} tensors of the checkpoint are missing, unknown or of another shape: "
            f"{', '.join(self.names[:3])}{more}\nhint: resume with the mode, LoRA rank and targets of the saved run"
        )


class CheckpointError(ActorError):
    """A checkpoint cannot be written or trusted: which file or folder, why, and what to do."""

    def __init__(self, path: str, why: str, fix: str):
        super().__init__(path, why, fix)
        self.path, self.why, self.fix = path, why, fix

    def __str__(self) -> str:
        return f"checkpoint {self.path}: {self.why}\nfix: {self.fix}"


SETTINGS = {
    "mode": "--fsdp-trainable-mode",
    "task": "--generation-task",
    "base_model_hash": "the base model (--model-path, --model-revision), by the hash of its files",
}
"""Where an entry of the contract comes from, if its name does not say so."""


class NotResumable(ActorError):
    """A checkpoint belongs to another policy than these settings make; names every difference."""

    def __init__(self, path: str, differing: dict[str, tuple[object, object]]):
        super().__init__(path, differing)
        self.path, self.differing = path, differing

    def __str__(self) -> str:
        lines = [
            f"  {SETTINGS.get(key, '--' + key.replace('_', '-'))}: saved {_short(saved)}, now {_short(now)}"
            for key, (saved, now) in self.differing.items()
        ]
        return (
            f"checkpoint {self.path} cannot be resumed with these settings\n" + "\n".join(lines) + "\n"
            "fix: give the settings of the saved run, or leave --load out to start afresh"
        )


class ExportError(ActorError):
    """An export would not be what was trained: which folder, why, and what to do."""

    def __init__(self, path: str, why: str, fix: str):
        super().__init__(path, why, fix)
        self.path, self.why, self.fix = path, why, fix

    def __str__(self) -> str:
        return f"cannot export {self.path}: {self.why}\nfix: {self.fix}"


def _short(value: object) -> str:
    return value[:12] if isinstance(value, str) else str(value)
