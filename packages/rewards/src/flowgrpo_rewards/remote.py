"""The client of `reward-server`: a scorer that runs elsewhere (`--reward-runtime remote`).

Scoring changes nothing on the server, so what it did not answer is sent again, with growing pauses, for as long as
--reward-timeout-s lasts: no connection, a broken one (the server restarts), 503 (its line is full). What it may be
working on is not (a read that timed out, 504): that would double its load.
"""

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from flowgrpo_rewards.images import load_pixels
from flowgrpo_rewards.protocol import Invalid, RewardEndpointError, RewardSample, SampleResult
from flowgrpo_rewards.wire import SAFETENSORS_TYPE, WireError, pack_samples, unpack_results

log = logging.getLogger(__name__)
TOKEN_VARIABLE = "REWARD_SERVER_TOKEN"
KEEPALIVE_S = 2.0
"""Idle seconds after which a connection is not used again: uvicorn closes it after 5, perhaps as a request leaves."""
FIRST_CONTACT_S = 60.0
"""Longest wait for a server that was never reached: it may be starting, or the address may be wrong."""
BUSY_PAUSE_S, DEAD_PAUSE_S = 4.0, 10.0
"""Longest pauses between two tries. A long pause before a full line would let everybody else pass."""


@dataclass(frozen=True, slots=True)
class _NoAnswer:
    """Why one try had no answer, in words; pauses in seconds."""

    reason: str
    hint: str
    longest_pause: float = DEAD_PAUSE_S
    asked_pause: float = 0.0


class RemoteScorer:
    """Sends samples to a `reward-server` and returns what its scorer says."""

    def __init__(
        self,
        endpoint: str,
        *,
        timeout_s: float = 600.0,
        png: bool | None = None,
        pause: Callable[[float], None] = time.sleep,
        transport: httpx.BaseTransport | None = None,
    ):
        """Connects at the first use. The token is read from the variable REWARD_SERVER_TOKEN.

        `timeout_s`: of one request, with all its tries. `png`: None sends raw pixels to this machine and PNG to
        others. `pause` waits between tries, in seconds.
        """
        self.endpoint = endpoint.rstrip("/")
        self.name = f"remote {self.endpoint}"
        self._timeout_s, self._pause = timeout_s, pause
        token = os.environ.get(TOKEN_VARIABLE)
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        timeout = httpx.Timeout(timeout_s, connect=min(10.0, timeout_s))
        self._client = httpx.Client(
            headers=headers,
            timeout=timeout,
            transport=transport,
            follow_redirects=False,
            limits=httpx.Limits(keepalive_expiry=KEEPALIVE_S),
        )
        host = httpx.URL(self.endpoint).host
        self._png = host not in ("127.0.0.1", "localhost", "::1") if png is None else png
        self._info: Mapping[str, Any] | None = None

    @property
    def info(self) -> Mapping[str, Any]:
        """What the server says of its scorer, asked once. Raises RewardEndpointError."""
        if self._info is None:
            patience = min(FIRST_CONTACT_S, self._timeout_s)
            self._info = self._json(self._send("GET", "/info", (), {}, patience), ())
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
            "POST", "/score", samples, {"content": body, "headers": {"Content-Type": SAFETENSORS_TYPE}}, self._timeout_s
        )
        try:
            return unpack_results(self._json(response, samples), len(samples))
        except WireError as error:
            raise self._error(f"the answer breaks the format: {error}", "", samples) from error

    def _send(
        self, method: str, path: str, samples: Sequence[RewardSample], content: dict[str, Any], patience_s: float
    ) -> httpx.Response:
        """A successful response. What had no answer is sent again until the next pause would end after `patience_s`."""
        spent, tries, pause = 0.0, 0, 0.5
        while True:
            started = time.monotonic()
            answer = self._try(method, path, samples, content)
            if isinstance(answer, httpx.Response):
                return answer
            tries += 1
            wait = max(min(pause, answer.longest_pause), answer.asked_pause)
            spent += time.monotonic() - started + wait
            if spent > patience_s:
                what = f"{answer.reason} (tried {tries} times within {patience_s:g} s)"
                raise self._error(what, answer.hint, samples)
            if tries == 1:
                log.warning("reward endpoint %s: %s; tried again for %g s", self.endpoint, answer.reason, patience_s)
            self._pause(wait)
            pause *= 2

    def _try(
        self, method: str, path: str, samples: Sequence[RewardSample], content: dict[str, Any]
    ) -> "httpx.Response | _NoAnswer":
        """One request. Raises RewardEndpointError for what must not be sent again."""
        try:
            response = self._client.request(method, self.endpoint + path, **content)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            return _NoAnswer(f"no connection: {error}", f"is `reward-server` running? try {self.endpoint}/health")
        except httpx.TimeoutException:
            raise self._error(
                f"no answer within {self._timeout_s:g} s",
                "raise --reward-timeout-s, or look at the server's log",
                samples,
            ) from None
        except (httpx.NetworkError, httpx.RemoteProtocolError) as error:
            what = f"the connection broke: {type(error).__name__}: {error}"
            return _NoAnswer(what, "look at the server's log: does it stop at one of these pictures?")
        except httpx.HTTPError as error:
            raise self._error(f"{type(error).__name__}: {error}", "check --reward-endpoint", samples) from error
        if response.is_success:
            return response
        if response.status_code != 503:
            raise self._refused(response, samples)
        return _NoAnswer(
            f"busy (503): {response.text[:300]}",
            "it runs but takes no more: look at its log, raise --max-waiting or --reward-timeout-s, or start another",
            longest_pause=BUSY_PAUSE_S,
            asked_pause=min(_retry_after(response), 30.0),
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
