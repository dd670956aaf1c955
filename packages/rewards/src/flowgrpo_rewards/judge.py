"""A vision-language model as judge, behind any OpenAI-compatible endpoint (vLLM, SGLang, a hosted one)."""

import base64
import contextlib
import io
import json
import math
import os
import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from PIL import Image

from flowgrpo_rewards.image_scorer import ImageScorer
from flowgrpo_rewards.protocol import (
    ComponentResult,
    Invalid,
    RewardEndpointError,
    RewardSample,
    ScorerLoadError,
    Value,
)
from flowgrpo_rewards.remote import KEEPALIVE_S

QUESTION = (
    "You judge pictures made from a prompt. Prompt: {prompt}\n"
    "How well does the picture show what the prompt says, from {low:g} (not at all) to {high:g} (everything)? "
    'Answer with JSON alone: {{"score": number}}'
)


@dataclass(frozen=True, kw_only=True)
class JudgeSettings:
    """The JSON file that `model_path` names."""

    endpoint: str
    """Base URL up to and including /v1."""
    model: str
    """Name of the model at the endpoint."""
    question: str = QUESTION
    """What is asked; {prompt}, {low} and {high} are filled in, other braces are doubled."""
    low: float = 0.0
    high: float = 10.0
    """Range of the judge's number; the component is its place in it, from 0 to 1. Outside is Invalid."""
    api_key_variable: str = "OPENAI_API_KEY"
    """Environment variable that holds the key; unset sends none. The key itself is never in a file."""
    concurrency: int = 16
    """Requests at a time."""
    timeout_s: float = 120.0
    retries: int = 4
    """Further tries of a request that was refused for load (429, 500, 502, 503, 504), whose connection failed or whose
    answer is not JSON (a gateway's page)."""
    max_tokens: int = 256


class JudgeScorer(ImageScorer):
    """Component `judge`, 0 to 1. No answer, or one without a number in range, makes that sample Invalid, never 0.

    What would fail every sample alike ends the step (RewardEndpointError): no connection, a refused key (401, 403), a
    wrong address or model (404). A content filter (400, 422) concerns one sample.
    """

    components = ("judge",)

    def __init__(
        self,
        *,
        model_path: str | None,
        pause: Callable[[float], None] = time.sleep,
        transport: httpx.BaseTransport | None = None,
    ):
        """`model_path`: a JSON file of JudgeSettings. Raises ScorerLoadError."""
        self.settings = read_settings(model_path)
        key = os.environ.get(self.settings.api_key_variable)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._pause = pause
        self._client = httpx.Client(
            headers=headers,
            timeout=self.settings.timeout_s,
            transport=transport,
            limits=httpx.Limits(keepalive_expiry=KEEPALIVE_S),
        )

    def score_pixels(
        self, pictures: Sequence[np.ndarray], samples: Sequence[RewardSample]
    ) -> dict[str, list[ComponentResult]]:
        with ThreadPoolExecutor(self.settings.concurrency) as pool:
            return {"judge": list(pool.map(self._judge, pictures, samples))}

    def _judge(self, picture: np.ndarray, sample: RewardSample) -> ComponentResult:
        settings = self.settings
        question = settings.question.format(prompt=sample.prompt, low=settings.low, high=settings.high)
        content = [
            {"type": "image_url", "image_url": {"url": _data_url(picture)}},
            {"type": "text", "text": question},
        ]
        request = {
            "model": settings.model,
            "messages": [{"role": "user", "content": content}],
            "temperature": 0.0,
            "max_tokens": settings.max_tokens,
        }
        answer = self._ask(request, sample)
        if isinstance(answer, Invalid):
            return answer
        try:
            text = answer["choices"][0]["message"]["content"]
        except (KeyError, IndexError, TypeError):
            return Invalid(f"the judge's answer has no text: {str(answer)[:200]}")
        return parse_score(text, low=settings.low, high=settings.high)

    def _ask(self, request: dict[str, Any], sample: RewardSample) -> Any | Invalid:
        """The JSON of an answer, or why this sample has none. Asking twice changes nothing at the judge."""
        fatal, reason = False, ""
        for attempt in range(self.settings.retries + 1):
            try:
                response = self._client.post(self._url, json=request)
            except httpx.HTTPError as error:
                fatal = isinstance(error, httpx.ConnectError | httpx.ConnectTimeout | httpx.ProxyError)
                reason = f"{type(error).__name__}: {error}"
            else:
                fatal, status, body = False, response.status_code, response.text[:300]
                if response.is_success:
                    with contextlib.suppress(ValueError):
                        return response.json()
                    reason = f"its answer is not JSON: {body!r}"
                elif status in (401, 403, 404):
                    raise self._error(f"it answered {status}: {body}", self._hints[status], sample)
                else:
                    reason = f"it answered {status}: {body}"
                    if status not in (429, 500, 502, 503, 504):
                        break
            if attempt < self.settings.retries:
                self._pause(min(0.5 * 2**attempt, 30.0))
        if fatal:
            raise self._error(reason, "does the judge run? check `endpoint` in the judge's JSON file", sample)
        return Invalid(f"the judge gave no answer: {reason}")

    @property
    def _url(self) -> str:
        return self.settings.endpoint.rstrip("/") + "/chat/completions"

    @property
    def _hints(self) -> dict[int, str]:
        key = f"set {self.settings.api_key_variable} to a key that may use model {self.settings.model!r}"
        address = "`endpoint` is the address up to and including /v1, `model` a name that the endpoint serves"
        return {401: key, 403: key, 404: address}

    def _error(self, reason: str, hint: str, sample: RewardSample) -> RewardEndpointError:
        return RewardEndpointError(self._url, reason, hint, ((sample.group_index, sample.slot),))


_NUMBER = r"-?[0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?"
_SCORE_BEGINS = re.compile(r'"score"\s*:\s*(?=[-+.0-9])')
# It must end where JSON lets it end: 1/10 and 1,5 are no 1, and neither is the 1 of an answer cut off before 15.
_SCORE = re.compile(rf'({_NUMBER})\s*(?:,?\s*\}}|,\s*")')
_LONE_NUMBER = re.compile(rf"\s*({_NUMBER})\s*\.?\s*")


def parse_score(text: Any, *, low: float, high: float) -> ComponentResult:
    """The judge's number as its place in [low, high]. `{"score": n}` anywhere, or a number and nothing else."""
    if not isinstance(text, str):
        return Invalid(f"the judge's answer is {type(text).__name__}, not text")
    found = [_SCORE.match(text, begin.end()) for begin in _SCORE_BEGINS.finditer(text)]
    if not all(found):
        return Invalid(f"the judge's score is no JSON number: {text[:200]!r}")
    if len({float(match.group(1)) for match in found}) > 1:
        return Invalid(f"the judge gave several scores: {text[:200]!r}")
    match = found[0] if found else _LONE_NUMBER.fullmatch(text)
    if match is None:
        return Invalid(f"the judge gave no score: {text[:200]!r}")
    number = float(match.group(1))
    if not low <= number <= high or not math.isfinite(number):
        return Invalid(f"the judge's score {number:g} is outside {low:g} to {high:g}")
    return Value((number - low) / (high - low))


def read_settings(model_path: str | None) -> JudgeSettings:
    """Raises ScorerLoadError for a missing file, an unknown or missing key, or an empty range."""
    example = 'a JSON file such as {"endpoint": "http://127.0.0.1:8000/v1", "model": "qwen-vl"}'
    if not model_path or not Path(model_path).is_file():
        raise ScorerLoadError("JudgeScorer", f"{model_path!r} is no file", f"set --reward-model-path to {example}")
    try:
        data = json.loads(Path(model_path).read_text())
        unknown = set(data) - {field.name for field in fields(JudgeSettings)}
        if unknown:
            raise ValueError(f"unknown key {sorted(unknown)[0]!r}")
        settings = JudgeSettings(**data)
        settings.question.format(prompt="", low=0.0, high=1.0)
        if not settings.endpoint.startswith(("http://", "https://")):
            raise ValueError(f"endpoint {settings.endpoint!r} is no http or https address")
        if not settings.low < settings.high:
            raise ValueError(f"low {settings.low} is not below high {settings.high}")
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise ScorerLoadError("JudgeScorer", f"{model_path}: {error}", f"write {example}") from error
    return settings


def _data_url(picture: np.ndarray) -> str:
    buffer = io.BytesIO()
    Image.fromarray(picture).save(buffer, format="PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
