"""What a reward scorer is: what it gets, what it must return, and how a failure is said.

No torch and no PIL here: preflight, the trainer and a remote client read this file in milliseconds.

A scorer never turns a failure into a number. It returns `Value` or `Invalid(reason)` for each component of each
sample, or raises; the reward step (`post_process`) decides what that means for the group.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from PIL.Image import Image

ROUTING_KEY = "reward"
"""`metadata["reward"]`: the component, or list of components, that judges this prompt."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardSample:
    """One generated picture and the prompt it was drawn for."""

    image: "Image | str | PathLike[str] | Any"
    """A PIL image, the path of one, or a uint8 array or CPU tensor [height, width, 3] (RGB)."""
    prompt: str
    group_index: int
    """Position of the prompt group in its rollout."""
    slot: int
    """Position of the candidate in its group."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """The prompt's own metadata: the expected text, the route, ..."""


@dataclass(frozen=True, slots=True)
class Value:
    """One component of one sample was scored. Non-finite values are caught by the reward step."""

    value: float


@dataclass(frozen=True, slots=True)
class Invalid:
    """One component of one sample could not be scored, and why. It never becomes a number."""

    reason: str


ComponentResult = Value | Invalid
SampleResult = Mapping[str, ComponentResult]
"""Component name to result, for one sample."""


@runtime_checkable
class GenerativeRewardScorer(Protocol):
    """Judges generated samples. `load_scorer` makes one from a dotted path and keeps it.

    A class or factory at the dotted path is called with those of `model_path` (str or None) and `device`
    ("cpu", "cuda:0", ...) that its signature names; each further parameter needs a default.
    """

    required_tracks: tuple[str, ...]
    """The tracks of a sample that it reads: `("image",)` for every scorer of text to image."""
    components: tuple[str, ...]
    """Names of the values that it returns, for instance `("pickscore",)`."""

    def score(self, samples: Sequence[RewardSample]) -> Sequence[SampleResult]:
        """One mapping per sample, in order, with an entry for each of `components`.

        A component may be left out of a mapping only where the sample is not routed to it. An exception
        is taken as the failure of the samples that cause it: the reward step scores them one by one.
        """
        ...


@dataclass(frozen=True, slots=True)
class ComponentFailure:
    """One component of one candidate that has no usable value."""

    group_index: int
    slot: int
    component: str
    reason: str

    def __str__(self) -> str:
        return f"group {self.group_index} slot {self.slot} component {self.component!r}: {self.reason}"


class RewardError(RuntimeError):
    """Base of everything that ends a reward step. Subclasses are picklable and rebuild from their fields."""


class GroupRewardError(RewardError):
    """A required component is missing or not finite, so whole groups have no reward (R2)."""

    SHOWN = 8

    def __init__(self, failures: Sequence[ComponentFailure]):
        self.failures = tuple(failures)
        super().__init__(self.failures)  # pickle, and so Ray, rebuilds from these

    @property
    def groups(self) -> tuple[int, ...]:
        """The groups that failed, sorted."""
        return tuple(sorted({failure.group_index for failure in self.failures}))

    def __str__(self) -> str:
        lines = [f"  {failure}" for failure in self.failures[: self.SHOWN]]
        if more := len(self.failures) - len(lines):
            lines.append(f"  and {more} more")
        return (
            f"{len(self.groups)} prompt group(s) have no reward: a required component is missing or not finite\n"
            + "\n".join(lines)
            + "\nhint: mend the scorer or the sample; a component that may fail must not be in "
            "--reward-required-components"
        )


class ScorerContractError(RewardError):
    """A scorer broke the protocol: wrong number of results, unknown component, wrong type."""

    def __init__(self, scorer: str, what: str, hint: str = ""):
        super().__init__(scorer, what, hint)
        self.scorer, self.what, self.hint = scorer, what, hint

    def __str__(self) -> str:
        return f"reward scorer {self.scorer}: {self.what}" + (f"\nhint: {self.hint}" if self.hint else "")


class ScorerLoadError(RewardError):
    """A scorer cannot be made: bad dotted path, wrong signature, missing file or package."""

    def __init__(self, scorer: str, what: str, hint: str = ""):
        super().__init__(scorer, what, hint)
        self.scorer, self.what, self.hint = scorer, what, hint

    def __str__(self) -> str:
        return f"cannot load reward scorer {self.scorer}: {self.what}" + (f"\nhint: {self.hint}" if self.hint else "")


class RewardTimeoutError(RewardError):
    """A scorer did not answer in time; names the first and the last sample of the batch it was given."""

    def __init__(self, scorer: str, seconds: float, first: tuple[int, int], last: tuple[int, int], components: tuple):
        super().__init__(scorer, seconds, first, last, components)
        self.scorer, self.seconds, self.first, self.last = scorer, seconds, first, last
        self.components = components

    def __str__(self) -> str:
        return (
            f"reward scorer {self.scorer} gave no answer within {self.seconds:g} s for components "
            f"{', '.join(self.components)} of group {self.first[0]} slot {self.first[1]} to group "
            f"{self.last[0]} slot {self.last[1]}\nhint: raise --reward-timeout-s, or lower --reward-batch-size"
        )


class RewardEndpointError(RewardError):
    """A remote scorer (reward server, judge) cannot be reached or refused; says which endpoint, what and for whom."""

    def __init__(self, endpoint: str, what: str, hint: str = "", samples: tuple[tuple[int, int], ...] = ()):
        super().__init__(endpoint, what, hint, samples)
        self.endpoint, self.what, self.hint, self.samples = endpoint, what, hint, samples

    def __str__(self) -> str:
        where = ""
        if self.samples:
            (g0, s0), (g1, s1) = self.samples[0], self.samples[-1]
            where = f" (group {g0} slot {s0} to group {g1} slot {s1})"
        return f"reward endpoint {self.endpoint}{where}: {self.what}" + (f"\nhint: {self.hint}" if self.hint else "")
