"""`reward-server SCORER`: a scorer behind HTTP, for `--reward-runtime remote` and for anything else that has pictures.

    GET  /health   200 while the scorer answers, 503 when one batch has run past the time limit
    GET  /info     {"scorer", "components", "required_tracks", "max_batch"}
    POST /score    a body of `flowgrpo_rewards.wire` -> {"results": [...]}

One thread scores, one batch at a time: a GPU gains nothing from two. A request takes its place in line before its body
is read; past `max_waiting` it is told to come back (503, Retry-After), so that pictures never pile up in memory.
"""

import argparse
import asyncio
import contextlib
import hmac
import os
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

try:
    from fastapi import FastAPI, HTTPException, Request
    from fastapi.responses import JSONResponse
except ImportError as error:
    raise ImportError(f"reward-server: {error}; hint: pip install flowgrpo-rewards[server]") from None

from flowgrpo_rewards.loading import SCORERS, cuda_hidden, make_scorer
from flowgrpo_rewards.post_process import score_in_batches
from flowgrpo_rewards.protocol import GenerativeRewardScorer, Invalid, RewardError, RewardSample, SampleResult
from flowgrpo_rewards.remote import TOKEN_VARIABLE
from flowgrpo_rewards.wire import TooManySamplesError, WireError, pack_results, unpack_samples


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Limits of one server."""

    max_batch: int = 64
    """Samples of one request; the client asks for this number and cuts its batches to it."""
    max_waiting: int = 8
    """Requests in line, those being read and the one being scored included; the next one is answered 503."""
    max_body_mb: int = 256
    """Megabytes of one request; more is answered 413."""
    timeout_s: float = 300.0
    """Longest time for a request's body to arrive (past it the answer is 408) and, in its turn, to be scored (504)."""
    token: str | None = None
    """Bearer token that each request but /health must carry; None asks for none."""


class ScoringLine:
    """The line of requests in front of one scorer."""

    def __init__(self, scorer: GenerativeRewardScorer, config: ServerConfig):
        self.scorer, self.config = scorer, config
        self.components = tuple(scorer.components)
        self.waiting = 0
        self.busy_since: float | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="scorer")
        self._turn = asyncio.Lock()

    @property
    def stuck(self) -> bool:
        """A batch has run past the time limit: nothing behind it will be scored."""
        return self.busy_since is not None and time.monotonic() - self.busy_since > self.config.timeout_s

    @contextlib.contextmanager
    def place(self) -> Iterator[None]:
        """One place in line, for as long as the block lasts. Raises HTTPException 503 (line full or stuck)."""
        if self.stuck or self.waiting >= self.config.max_waiting:
            why = "the scorer hangs" if self.stuck else f"{self.waiting} requests wait"
            raise HTTPException(503, why, headers={"Retry-After": "30" if self.stuck else "1"})
        self.waiting += 1
        try:
            yield
        finally:
            self.waiting -= 1

    async def score(self, samples: Sequence[RewardSample]) -> list[SampleResult]:
        """Waits for its turn, then scores. Raises HTTPException 503 (stuck) or 504 (too slow)."""
        async with self._turn:
            if self.stuck:
                raise HTTPException(503, "the scorer hangs", headers={"Retry-After": "30"})
            return await self._score_now(samples)

    async def _score_now(self, samples: Sequence[RewardSample]) -> list[SampleResult]:
        self.busy_since = time.monotonic()
        work = asyncio.get_running_loop().run_in_executor(self._thread, self._work, samples)
        try:
            # shield: a thread cannot be stopped, so the batch runs on and `stuck` stays true until it ends.
            return await asyncio.wait_for(asyncio.shield(work), self.config.timeout_s)
        except TimeoutError:
            work.add_done_callback(self._late)
            raise HTTPException(504, f"the scorer gave no answer within {self.config.timeout_s:g} s") from None
        finally:
            if work.done():
                self.busy_since = None

    def _late(self, work: asyncio.Future) -> None:
        """The slow batch ended after all; its answer has no reader."""
        work.exception() if not work.cancelled() else None
        self.busy_since = None

    def _work(self, samples: Sequence[RewardSample]) -> list[SampleResult]:
        good = [k for k, sample in enumerate(samples) if not isinstance(sample.image, Invalid)]
        results = [dict.fromkeys(self.components, sample.image) for sample in samples]
        scored = score_in_batches(
            [samples[k] for k in good], self.scorer, batch_size=self.config.max_batch, timeout_s=None
        )
        for k, result in zip(good, scored, strict=True):
            results[k] = result
        return results

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


def make_app(scorer: GenerativeRewardScorer, config: ServerConfig) -> FastAPI:
    """The ASGI application. The scorer is used from one thread alone."""
    line: ScoringLine

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        nonlocal line
        app.state.line = line = ScoringLine(scorer, config)
        yield
        line.close()

    app = FastAPI(title="reward-server", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)

    def check_token(request: Request) -> None:
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if config.token is not None and not hmac.compare_digest(given.encode(), config.token.encode()):
            raise HTTPException(401, "the bearer token is missing or wrong")

    @app.get("/health")
    async def health() -> JSONResponse:
        state = {"ok": not line.stuck, "waiting": line.waiting}
        return JSONResponse(state, status_code=503 if line.stuck else 200)

    @app.get("/info")
    async def info(request: Request) -> dict:
        check_token(request)
        return {
            "scorer": type(scorer).__name__,
            "components": list(scorer.components),
            "required_tracks": list(scorer.required_tracks),
            "max_batch": config.max_batch,
        }

    @app.post("/score")
    async def score(request: Request) -> dict:
        check_token(request)
        with line.place():  # before the body is read, so that a full line costs no memory
            samples = await _samples(request, config)
            try:
                return pack_results(await line.score(samples))
            except RewardError as error:
                raise HTTPException(500, str(error)) from None

    return app


async def _samples(request: Request, config: ServerConfig) -> list[RewardSample]:
    """The samples of a request. Raises HTTPException 400, 408 (too slow) or 413 (too large, too many)."""
    try:
        body = await asyncio.wait_for(_body(request, config.max_body_mb * 1_000_000), config.timeout_s)
    except TimeoutError:
        raise HTTPException(408, f"the body did not arrive within {config.timeout_s:g} s") from None
    kind = request.headers.get("content-type", "")
    try:
        return await asyncio.to_thread(unpack_samples, body, kind, max_samples=config.max_batch)
    except TooManySamplesError as error:
        raise HTTPException(413, str(error)) from None
    except WireError as error:
        raise HTTPException(400, str(error)) from None


async def _body(request: Request, limit: int) -> bytes:
    """The request's body. Raises HTTPException 413 as soon as it grows past `limit` bytes."""
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise HTTPException(413, f"the body is larger than {limit / 1e6:g} MB")
        parts.append(part)
    return b"".join(parts)


def main(arguments: list[str] | None = None) -> int:
    """The console script. Returns the exit code."""
    flags = _parser().parse_args(arguments)
    token = os.environ.get(TOKEN_VARIABLE) or None
    local = flags.host in ("127.0.0.1", "localhost", "::1")
    if not local and token is None and not flags.no_token:
        print(
            f"reward-server: --host {flags.host} lets other machines in; set {TOKEN_VARIABLE}, or say --no-token",
            file=sys.stderr,
        )
        return 2
    import uvicorn

    try:
        with cuda_hidden() if flags.device == "cpu" else contextlib.nullcontext():
            scorer = make_scorer(flags.scorer, model_path=flags.model_path, device=flags.device)
    except RewardError as error:
        print(f"reward-server: {error}", file=sys.stderr)
        return 2
    config = ServerConfig(
        max_batch=flags.max_batch,
        max_waiting=flags.max_waiting,
        max_body_mb=flags.max_body_mb,
        timeout_s=flags.timeout_s,
        token=token,
    )
    app = make_app(scorer, config)
    uvicorn.run(app, host=flags.host, port=flags.port, log_level=flags.log_level)
    if getattr(app.state, "line", None) is not None and app.state.line.busy_since is not None:
        os._exit(1)  # a scorer that hangs in native code would keep the interpreter from ending
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="reward-server", description="A reward scorer behind HTTP.")
    parser.add_argument("scorer", help=f"dotted path of a scorer, or one of {', '.join(SCORERS)}")
    parser.add_argument("--model-path", help="local folder of the scorer's weights")
    parser.add_argument("--device", default="cpu", help="cpu, cuda:0, ... (default cpu)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1)")
    parser.add_argument("--port", type=int, default=8300)
    parser.add_argument("--no-token", action="store_true", help=f"let other machines in without {TOKEN_VARIABLE}")
    parser.add_argument("--max-batch", type=int, default=ServerConfig.max_batch, help="samples of one request")
    parser.add_argument("--max-waiting", type=int, default=ServerConfig.max_waiting, help="requests in line")
    parser.add_argument("--max-body-mb", type=int, default=ServerConfig.max_body_mb, help="megabytes of one request")
    parser.add_argument("--timeout-s", type=float, default=ServerConfig.timeout_s, help="seconds for one request")
    parser.add_argument("--log-level", default="warning")
    return parser


if __name__ == "__main__":
    sys.exit(main())
