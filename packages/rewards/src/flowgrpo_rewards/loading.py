"""From settings to a scorer: import by dotted path, check, load once, keep."""

import contextlib
import importlib
import inspect
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

from flowgrpo_rewards.config import RewardConfig
from flowgrpo_rewards.protocol import GenerativeRewardScorer, ScorerLoadError

log = logging.getLogger(__name__)
_CACHE: dict[str, GenerativeRewardScorer] = {}
_PASSED = ("model_path", "device")

SCORERS = {
    "aesthetic": "flowgrpo_rewards.aesthetic.AestheticScorer",
    "clipscore": "flowgrpo_rewards.open_clip_scorers.ClipScoreScorer",
    "combined": "flowgrpo_rewards.combined.CombinedScorer",
    "hpsv2": "flowgrpo_rewards.open_clip_scorers.HpsV2Scorer",
    "judge": "flowgrpo_rewards.judge.JudgeScorer",
    "ocr": "flowgrpo_rewards.ocr.OcrScorer",
    "pickscore": "flowgrpo_rewards.pickscore.PickScoreScorer",
    "shapes": "flowgrpo_rewards.shapes.ShapeScorer",
    "statistics": "flowgrpo_rewards.statistics.ImageStatisticsScorer",
}
"""Short names of the scorers of this package, good wherever a dotted path is."""


def load_scorer(config: RewardConfig, *, device: str | None = None) -> GenerativeRewardScorer:
    """The scorer of these settings, loaded at the first call and kept by path, model, runtime and endpoint.

    `cpu` gives the scorer device "cpu" and hides CUDA while it is imported and built; `colocate` gives it
    `device` (default "cuda:0"); `remote` returns a client of `reward_endpoint` and imports no model code.

    Raises ScorerLoadError, which says the path, what is wrong with it and what to do.
    """
    device = "cpu" if config.reward_runtime == "cpu" else (device or "cuda:0")
    key = json.dumps(
        [
            config.reward_scorer_path,
            config.reward_model_path,
            config.reward_runtime,
            config.reward_endpoint,
            # A client keeps its own time limit; other scorers are limited by the reward step.
            config.reward_timeout_s if config.reward_runtime == "remote" else None,
            device,
        ]
    )
    if key not in _CACHE:
        _CACHE[key] = _load(config, device)
    return _CACHE[key]


def forget_scorers() -> None:
    """Empties the cache, so that the next `load_scorer` loads afresh."""
    _CACHE.clear()


def _load(config: RewardConfig, device: str) -> GenerativeRewardScorer:
    if config.reward_runtime == "remote":
        if not config.reward_endpoint:
            raise ScorerLoadError("remote", "reward_endpoint is not set", "add --reward-endpoint http://HOST:PORT")
        from flowgrpo_rewards.remote import RemoteScorer

        return RemoteScorer(config.reward_endpoint, timeout_s=config.reward_timeout_s)
    if not config.reward_scorer_path:
        raise ScorerLoadError(
            config.reward_runtime, "reward_scorer_path is not set", "add --reward-scorer-path MODULE.CLASS"
        )
    with cuda_hidden() if config.reward_runtime == "cpu" else contextlib.nullcontext():
        return make_scorer(config.reward_scorer_path, model_path=config.reward_model_path, device=device)


def make_scorer(path: str, *, model_path: str | None, device: str) -> GenerativeRewardScorer:
    """Imports `path`, checks its signature, calls it, checks what it returns. Keeps nothing."""
    factory = import_scorer(path)
    available = {"model_path": model_path, "device": device}
    scorer = factory(**{name: available[name] for name in _accepted(path, factory)})
    for name in ("required_tracks", "components"):
        names = getattr(scorer, name, None)
        if not isinstance(names, tuple) or not names or not all(isinstance(n, str) for n in names):
            raise ScorerLoadError(
                path, f"its {name} is {names!r}", f"set {name} to a tuple of names, see GenerativeRewardScorer"
            )
    if not callable(getattr(scorer, "score", None)):
        raise ScorerLoadError(
            path, f"{type(scorer).__name__} has no method score(samples)", "see GenerativeRewardScorer"
        )
    return scorer


def import_scorer(path: str) -> Callable[..., Any]:
    """The class or factory at a dotted path, its signature checked. Preflight calls this and builds nothing."""
    module_name, _, attribute = SCORERS.get(path, path).rpartition(".")
    if not module_name:
        raise ScorerLoadError(path, "it is no dotted path", f"use MODULE.CLASS, or one of {', '.join(SCORERS)}")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ScorerLoadError(
            path, f"importing {module_name} failed: {error}", "check the path and PYTHONPATH"
        ) from error
    factory = getattr(module, attribute, None)
    if not callable(factory):
        found = "is not there" if factory is None else f"is a {type(factory).__name__}, which cannot be called"
        raise ScorerLoadError(path, f"{attribute} of {module_name} {found}", "name a class or a factory")
    _accepted(path, factory)
    return factory


def _accepted(path: str, factory: Callable[..., Any]) -> list[str]:
    """Which of `model_path` and `device` the factory takes by name; the rest must have defaults."""
    parameters = inspect.signature(factory).parameters.values()
    anything = any(p.kind is p.VAR_KEYWORD for p in parameters)
    by_name = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    demanded = [
        p.name
        for p in parameters
        if p.default is p.empty and p.name not in _PASSED and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    if demanded:
        raise ScorerLoadError(
            path,
            f"it demands {', '.join(demanded)}",
            f"a scorer is called with {' and '.join(_PASSED)}; give each other parameter a default",
        )
    return list(_PASSED) if anything else [p.name for p in by_name if p.name in _PASSED]


@contextlib.contextmanager
def cuda_hidden() -> Iterator[None]:
    """No CUDA device is visible inside, so a scorer that asks for one finds none.

    CUDA reads the variable when a process first touches it: a scorer that asks inside makes CUDA invisible
    to the whole process, so load a `cpu` scorer in a process that needs no GPU. Where CUDA is already in use
    it cannot be hidden, and the scorer has only its `device` argument to go by; that is logged.
    """
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        log.warning("reward runtime cpu: CUDA is already in use in this process and cannot be hidden from the scorer")
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    try:
        yield
    finally:
        if before is None:
            del os.environ["CUDA_VISIBLE_DEVICES"]
        else:
            os.environ["CUDA_VISIBLE_DEVICES"] = before
