"""The client of `reward-server`: a scorer that runs elsewhere (`--reward-runtime remote`).

Scoring changes nothing on the server, so a request that the server did not begin (no connection, 503) is sent again
with growing pauses. One that it may be working on (a read that timed out) is not: that would double its load.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import httpx

from flowgrpo_rewards.images import load_pixels
from flowgrpo_rewards.protocol import Invalid, RewardEndpointError, RewardSample, SampleResult
from flowgrpo_rewards.wire import SAFETENSORS_TYPE, WireError, pack_samples, unpack_results

TOKEN_VARIABLE = "REWARD_SERVER_TOKEN"


class RemoteScorer:
    """Sends samples to a `reward-server` and returns what its scorer says."""

    def __init__(
        self,
        endpoint: str,
        *,
        timeout_s: float = 600.0,
        retries: int = 5,
        png: bool | None = None,
        pause: Callable[[float], None] = time.sleep,
        transport: httpx.BaseTransport | None = None,
    ):
        """Connects at the first use. The token is read from the variable REWARD_SERVER_TOKEN.

        `png`: None sends raw pixels to this machine and PNG to others. `pause` waits between tries, in seconds.
        """
        self.endpoint = endpoint.rstrip("/")
        self.name = f"remote {self.endpoint}"
        self._timeout_s, self._retries, self._pause = timeout_s, retries, pause
        token = os.environ.get(TOKEN_VARIABLE)
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        timeout = httpx.Timeout(timeout_s, connect=min(10.0, timeout_s))
        self._client = httpx.Client(headers=headers, timeout=timeout, transport=transport, follow_redirects=False)
        host = httpx.URL(self.endpoint).host
        self._png = host not in ("127.0.0.1", "localhost", "::1") if png is None else png
        self._info: Mapping[str, Any] | None = None

    @property
    def info(self) -> Mapping[str, Any]:
        """What the server says of its scorer, asked once. Raises RewardEndpointError."""
        if self._info is None:
            self._info = self._json(self._send("GET", "/info", (), {}), ())
            if not isinstance(self._info.get("components"), list):
                raise self._error(f"/info answered {self._info!r}", "is this a reward-server?")
        return self._info

    @property
    def components(self) -> tuple[str, ...]:
        return tuple(self.info["components"])

    @property
    def required_tracks(self) -> tuple[str, ...]:
        return tuple(self.info["required_tracks"])

    def score(self, samples: Sequence[RewardSample]) -> list[SampleResult]:
        """Raises RewardEndpointError, naming the samples, where the server cannot be reached or refuses."""
        pictures = load_pixels(samples)
        results: list[SampleResult] = [
            dict.fromkeys(self.components, picture) if isinstance(picture, Invalid) else {} for picture in pictures
        ]
        good = [index for index, picture in enumerate(pictures) if not isinstance(picture, Invalid)]
        size = int(self.info["max_batch"])
        for start in range(0, len(good), size):
            batch = good[start : start + size]
            scored = self._score([samples[index] for index in batch], [pictures[index] for index in batch])
            for index, result in zip(batch, scored, strict=True):
                results[index] = result
        return results

    def _score(self, samples: Sequence[RewardSample], pictures: Sequence[Any]) -> list[SampleResult]:
        body = pack_samples(samples, pictures, png=self._png)
        response = self._send(
            "POST", "/score", samples, {"content": body, "headers": {"Content-Type": SAFETENSORS_TYPE}}
        )
        try:
            return unpack_results(self._json(response, samples), len(samples))
        except WireError as error:
            raise self._error(f"the answer breaks the format: {error}", "", samples) from error

    def _send(self, method: str, path: str, samples: Sequence[RewardSample], content: dict[str, Any]) -> httpx.Response:
        """A successful response. Tries again only what the server cannot have begun."""
        reason = ""
        for attempt in range(self._retries + 1):
            wait = min(0.5 * 2**attempt, 30.0)
            try:
                response = self._client.request(method, self.endpoint + path, **content)
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                reason = f"no connection: {error}"
            except httpx.TimeoutException:
                raise self._error(
                    f"no answer within {self._timeout_s:g} s",
                    "raise --reward-timeout-s, or look at the server's log",
                    samples,
                ) from None
            except httpx.HTTPError as error:
                raise self._error(
                    f"the connection broke: {type(error).__name__}: {error}", "look at the server's log", samples
                ) from error
            else:
                if response.is_success:
                    return response
                if response.status_code != 503:
                    raise self._refused(response, samples)
                reason = f"busy (503): {response.text[:300]}"
                wait = min(max(wait, _retry_after(response)), 30.0)
            if attempt < self._retries:
                self._pause(wait)
        raise self._error(
            f"{reason} (tried {self._retries + 1} times)",
            f"is `reward-server` running? try {self.endpoint}/health",
            samples,
        )

    def _refused(self, response: httpx.Response, samples: Sequence[RewardSample]) -> RewardEndpointError:
        hints = {
            401: f"set {TOKEN_VARIABLE} to the server's token",
            413: "lower --reward-batch-size",
            504: "the scorer hangs or is slow: look at the server's log",
        }
        what = f"it answered {response.status_code}: {response.text[:300]}"
        return self._error(what, hints.get(response.status_code, "look at the server's log"), samples)

    def _json(self, response: httpx.Response, samples: Sequence[RewardSample]) -> Any:
        try:
            return response.json()
        except ValueError as error:
            raise self._error(
                f"the answer is not JSON: {response.text[:300]!r}", "is this a reward-server?", samples
            ) from error

    def _error(self, what: str, hint: str, samples: Sequence[RewardSample] = ()) -> RewardEndpointError:
        return RewardEndpointError(self.endpoint, what, hint, tuple((s.group_index, s.slot) for s in samples))


def _retry_after(response: httpx.Response) -> float:
    try:
        return float(response.headers.get("Retry-After", 0))
    except ValueError:
        return 0.0
