"""Several scorers as one, so that a run can weigh components against each other or route prompts to different ones."""

import json
from collections.abc import Sequence
from pathlib import Path

from flowgrpo_rewards.loading import make_scorer
from flowgrpo_rewards.post_process import score_in_batches
from flowgrpo_rewards.protocol import (
    ROUTING_KEY,
    ComponentResult,
    GenerativeRewardScorer,
    Invalid,
    RewardError,
    RewardSample,
    SampleResult,
    ScorerContractError,
    ScorerLoadError,
)


class CombinedScorer:
    """The components of all its scorers. A sample with `metadata.reward` goes only to the scorers that it names.

    `model_path` is a JSON file; a scorer's own `model_path` is relative to it:

        {"scorers": [{"scorer": "pickscore", "model_path": "PickScore_v1"}, {"scorer": "ocr"}]}
    """

    def __init__(self, *, model_path: str | None, device: str = "cpu"):
        self._scorers = _read_scorers(model_path, device)
        self.components = tuple(name for scorer in self._scorers for name in scorer.components)
        self.required_tracks = tuple(dict.fromkeys(track for s in self._scorers for track in s.required_tracks))
        if len(set(self.components)) < len(self.components):
            raise ScorerLoadError(
                "CombinedScorer",
                f"two scorers offer one component: {', '.join(self.components)}",
                "name each scorer once",
            )

    def score(self, samples: Sequence[RewardSample]) -> list[SampleResult]:
        """Each scorer sees, in one call, the samples that are routed to it.

        What goes wrong in one scorer is Invalid in its own components, of the samples concerned, and touches no other
        scorer's. Raises ScorerContractError, by the scorer's own name: a scorer that is written wrongly is no failure
        of a sample.
        """
        merged: list[dict[str, ComponentResult]] = [{} for _ in samples]
        for scorer in self._scorers:
            chosen = [index for index, sample in enumerate(samples) if _wants(sample, scorer)]
            if not chosen:
                continue
            results = _contained(scorer, [samples[index] for index in chosen])
            for index, result in zip(chosen, results, strict=True):
                merged[index].update({name: result[name] for name in scorer.components if name in result})
        return merged


def _contained(scorer: GenerativeRewardScorer, samples: Sequence[RewardSample]) -> list[SampleResult]:
    try:
        return score_in_batches(samples, scorer, batch_size=len(samples), timeout_s=None)
    except ScorerContractError:
        raise
    except RewardError as error:  # a dead endpoint, a hang: nothing of this scorer in this batch
        return [dict.fromkeys(scorer.components, Invalid("; ".join(str(error).splitlines())))] * len(samples)


def _wants(sample: RewardSample, scorer: GenerativeRewardScorer) -> bool:
    route = sample.metadata.get(ROUTING_KEY)
    if route is None:
        return True
    names = [route] if isinstance(route, str) else route
    return any(name in scorer.components for name in names)


def _read_scorers(model_path: str | None, device: str) -> list[GenerativeRewardScorer]:
    name = "CombinedScorer"
    example = 'a JSON file such as {"scorers": [{"scorer": "pickscore", "model_path": "PickScore_v1"}]}'
    if not model_path or not Path(model_path).is_file():
        raise ScorerLoadError(name, f"{model_path!r} is no file", f"set --reward-model-path to {example}")
    path = Path(model_path)
    try:
        entries = json.loads(path.read_text())["scorers"]
        scorers = [
            make_scorer(
                entry["scorer"],
                model_path=str(path.parent / entry["model_path"]) if "model_path" in entry else None,
                device=entry.get("device", device),
            )
            for entry in entries
        ]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ScorerLoadError(name, f"{path}: {type(error).__name__}: {error}", f"write {example}") from error
    if not scorers:
        raise ScorerLoadError(name, f"{path} names no scorer", f"write {example}")
    return scorers
