"""`reward-server` and its client on loopback: the same answers as in process, and words for everything that breaks."""

import base64
import io
import json
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import numpy as np
import pytest
import uvicorn
from flowgrpo_rewards import RewardConfig, load_scorer, post_process
from flowgrpo_rewards.judge import JudgeScorer
from flowgrpo_rewards.loading import forget_scorers
from flowgrpo_rewards.protocol import Invalid, RewardEndpointError, Value
from flowgrpo_rewards.remote import TOKEN_VARIABLE, RemoteScorer
from flowgrpo_rewards.server import ServerConfig, main, make_app
from flowgrpo_rewards.statistics import ImageStatisticsScorer
from flowgrpo_rewards.testing import FakeScorer, HangingScorer, grid_of_samples, natural_pictures, samples_of
from flowgrpo_rewards.wire import SAFETENSORS_TYPE, TooManySamplesError, WireError, pack_samples, unpack_samples
from PIL import Image


@contextmanager
def serving(scorer, **limits):
    """A real server on a free port of loopback, in a thread; yields its address."""
    server = uvicorn.Server(uvicorn.Config(make_app(scorer, ServerConfig(**limits)), port=0, log_level="critical"))
    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


def dead_address():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"http://127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.parametrize("png", [True, False])
def test_remote_scores_are_those_of_the_scorer_itself(png):
    samples = samples_of(natural_pictures(5, 40, 56), ["a"] * 5)
    with serving(ImageStatisticsScorer(), max_batch=2) as address:
        remote = RemoteScorer(address, png=png)
        assert remote.components == ("compressibility", "brightness")
        assert remote.score(samples) == ImageStatisticsScorer().score(samples)


def test_the_reward_step_runs_through_a_server():
    forget_scorers()
    with serving(FakeScorer()) as address:
        config = RewardConfig(reward_runtime="remote", reward_endpoint=address)
        report = post_process(grid_of_samples(2, 3), load_scorer(config), config)
        assert load_scorer(config) is load_scorer(config)
    forget_scorers()
    assert report.components == {"fake": [[0.0, 1.0, 2.0], [10.0, 11.0, 12.0]]}


def test_metadata_prompt_and_place_reach_the_scorer():
    seen = []

    def answer(sample):
        seen.append((sample.prompt, dict(sample.metadata), sample.group_index, sample.slot))
        return {"fake": Invalid("because")}

    samples = samples_of([np.zeros((2, 2, 3), np.uint8)], ["Zürich"], text="ä", n=[1])
    with serving(FakeScorer(answer=answer)) as address:
        assert RemoteScorer(address).score(samples) == [{"fake": Invalid("because")}]
    assert seen == [("Zürich", {"text": "ä", "n": [1]}, 0, 0)]


def test_a_value_that_is_not_finite_arrives_as_invalid():
    with serving(FakeScorer(answer=lambda sample: {"fake": Value(float("nan"))})) as address:
        (result,) = RemoteScorer(address).score(grid_of_samples(1, 1)[0])
    assert result["fake"] == Invalid("the value is nan")


def test_a_client_in_any_language_sends_json_with_base64_png():
    buffer = io.BytesIO()
    Image.new("RGB", (4, 4), "white").save(buffer, format="PNG")
    whole, cut = (base64.b64encode(data).decode() for data in (buffer.getvalue(), buffer.getvalue()[:40]))
    body = {"samples": [{"prompt": "x", "image": whole}, {"prompt": "x", "image": cut}]}
    with serving(ImageStatisticsScorer()) as address:
        good, bad = httpx.post(f"{address}/score", json=body).json()["results"]
    assert good["brightness"]["value"] == pytest.approx(1.0)
    assert "does not decode" in bad["brightness"]["invalid"]


@pytest.mark.parametrize(
    ("content", "kind", "status"),
    [
        (b"\x80\x04K\x01.", "application/python-pickle", 400),
        (b"\xff" * 64, SAFETENSORS_TYPE, 400),
        (b"", SAFETENSORS_TYPE, 400),
        (b"{", "application/json", 400),
        (b'{"samples": [{"prompt": 1, "image": ""}]}', "application/json", 400),
        (b'{"samples": [{"prompt": "x", "image": "%%"}]}', "application/json", 400),
        (json.dumps({"samples": [{"prompt": "x", "image": ""}] * 9}).encode(), "application/json", 413),
        (b"x" * 1_000_001, "application/json", 413),
    ],
)
def test_a_bad_request_is_refused_and_the_server_lives_on(content, kind, status):
    with serving(FakeScorer(), max_batch=8, max_body_mb=1) as address:
        answer = httpx.post(f"{address}/score", content=content, headers={"Content-Type": kind})
        assert answer.status_code == status
        assert httpx.get(f"{address}/health").json() == {"ok": True, "waiting": 0}


def test_unpacking_refuses_tensors_that_do_not_match_the_samples():
    body = pack_samples(grid_of_samples(1, 2)[0], [np.zeros((2, 2, 3), np.uint8)], png=False)
    with pytest.raises(WireError):
        unpack_samples(body, SAFETENSORS_TYPE)


def test_a_scorer_that_raises_on_one_image_blames_that_image_across_the_wire():
    def answer(sample):
        if sample.slot == 1:
            raise ZeroDivisionError("no pixels")
        return {"fake": Value(1.0)}

    with serving(FakeScorer(answer=answer)) as address:
        results = RemoteScorer(address).score(grid_of_samples(1, 3)[0])
    assert [type(result["fake"]) for result in results] == [Value, Invalid, Value]


def test_the_token_is_asked_for_and_sent(monkeypatch):
    samples = grid_of_samples(1, 1)[0]
    with serving(FakeScorer(), token="secret") as address:
        with pytest.raises(RewardEndpointError) as error:
            RemoteScorer(address).score(samples)
        assert TOKEN_VARIABLE in error.value.hint
        monkeypatch.setenv(TOKEN_VARIABLE, "secret")
        assert RemoteScorer(address).score(samples) == [{"fake": Value(0.0)}]
        assert httpx.get(f"{address}/health").status_code == 200


def test_a_dead_endpoint_fails_in_words_after_a_minute():
    pauses = []
    with pytest.raises(RewardEndpointError) as error:
        RemoteScorer(dead_address(), timeout_s=600.0, pause=pauses.append).score(grid_of_samples(1, 2)[0])
    assert "no connection" in error.value.what
    assert "running?" in error.value.hint
    assert pauses[:5] == [0.5, 1.0, 2.0, 4.0, 8.0]
    assert 45 < sum(pauses) <= 60  # never reached before: perhaps it starts, perhaps the address is wrong


def answering(*answers):
    """A transport whose /info is that of a FakeScorer; /score takes `answers` in turn and repeats the last."""
    left = list(answers)

    def handle(request):
        if request.url.path == "/info":
            return httpx.Response(200, json={"components": ["fake"], "required_tracks": ["image"], "max_batch": 64})
        answer = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    return httpx.MockTransport(handle)


GOOD = httpx.Response(200, json={"results": [{"fake": {"value": 1.0}}]})
BUSY = httpx.Response(503, text="8 requests wait", headers={"Retry-After": "1"})


@pytest.mark.parametrize(
    "down", [httpx.ConnectError("refused"), httpx.ReadError("reset"), httpx.RemoteProtocolError("disconnected"), BUSY]
)
def test_what_the_server_did_not_answer_is_sent_again_for_as_long_as_the_time_limit_lasts(down):
    pauses = []
    scorer = RemoteScorer("http://h:1", timeout_s=600.0, pause=pauses.append, transport=answering(*[down] * 20, GOOD))
    assert scorer.score(grid_of_samples(1, 1)[0]) == [{"fake": Value(1.0)}]
    assert len(pauses) == 20
    assert sum(pauses) > 60


def test_a_line_that_stays_full_has_a_hint_of_its_own_before_the_time_limit_is_over():
    pauses = []
    scorer = RemoteScorer("http://h:1", timeout_s=30.0, pause=pauses.append, transport=answering(BUSY))
    with pytest.raises(RewardEndpointError) as error:
        scorer.score(grid_of_samples(1, 1)[0])
    assert 25 < sum(pauses) <= 30
    assert "8 requests wait" in error.value.what
    assert "--max-waiting" in error.value.hint


@pytest.mark.parametrize("results", [[[]], [{"fake": {"value": True}}], [{"fake": {"value": None}}], [], {}])
def test_an_answer_that_breaks_the_format_is_said_to(results):
    scorer = RemoteScorer("http://h:1", transport=answering(httpx.Response(200, json={"results": results})))
    with pytest.raises(RewardEndpointError) as error:
        scorer.score(grid_of_samples(1, 1)[0])
    assert "breaks the format" in error.value.what


def test_an_idle_connection_is_given_up_before_a_server_closes_it(tmp_path):
    """uvicorn closes it after 5 s, and what is sent just then fails."""
    (tmp_path / "judge.json").write_text(json.dumps({"endpoint": "http://h:1/v1", "model": "vlm"}))
    for scorer in (RemoteScorer("http://h:1"), JudgeScorer(model_path=str(tmp_path / "judge.json"))):
        assert scorer._client._transport._pool._keepalive_expiry == 2.0


def test_a_server_that_comes_back_is_found_again():
    address = dead_address()
    port = int(address.rpartition(":")[2])
    servers = []

    def start(_):
        """The client's first pause: bring the server up, as a restart would."""
        if not servers:
            servers.append(
                uvicorn.Server(uvicorn.Config(make_app(FakeScorer(), ServerConfig()), port=port, log_level="critical"))
            )
            listener = socket.create_server(("127.0.0.1", port))
            threading.Thread(target=servers[0].run, kwargs={"sockets": [listener]}, daemon=True).start()

    assert RemoteScorer(address, pause=start).score(grid_of_samples(1, 1)[0]) == [{"fake": Value(0.0)}]
    servers[0].should_exit = True


def test_a_full_line_is_told_to_come_back_and_does():
    scorer = HangingScorer()
    samples = grid_of_samples(1, 1)[0]
    pauses = []

    def pause(seconds):
        pauses.append(seconds)
        scorer.released.set()  # what a real pause is for: the scorer gets on
        first.result()

    with serving(scorer, max_waiting=1) as address, ThreadPoolExecutor(1) as pool:
        first = pool.submit(RemoteScorer(address).score, samples)
        assert scorer.started.wait(30)
        assert RemoteScorer(address, pause=pause).score(samples) == [{"fake": Value(0.0)}]
    assert pauses == [1.0]  # Retry-After, more than the client's own half second


def test_a_request_takes_its_place_in_line_before_its_body_is_read():
    def slowly():
        yield b"{"
        half_sent.set()
        refused.wait(30)
        yield b"}"

    half_sent, refused = threading.Event(), threading.Event()
    with serving(FakeScorer(), max_waiting=1) as address, ThreadPoolExecutor(1) as pool:
        slow = pool.submit(httpx.post, f"{address}/score", content=slowly(), headers={"Content-Type": "text/plain"})
        assert half_sent.wait(30)
        while httpx.get(f"{address}/health").json()["waiting"] == 0:
            time.sleep(0.001)
        assert httpx.post(f"{address}/score", content=b"{}").status_code == 503
        refused.set()
        assert slow.result().status_code == 400
        assert httpx.get(f"{address}/health").json() == {"ok": True, "waiting": 0}


def test_a_body_that_does_not_arrive_gives_its_place_back():
    def never():
        yield b"{"
        answered.wait(30)

    answered = threading.Event()
    with serving(FakeScorer(), timeout_s=0.1) as address, ThreadPoolExecutor(1) as pool:
        slow = pool.submit(httpx.post, f"{address}/score", content=never())
        deadline = time.monotonic() + 30
        while httpx.get(f"{address}/health").json()["waiting"] == 0 and time.monotonic() < deadline:
            time.sleep(0.001)
        while httpx.get(f"{address}/health").json()["waiting"] and time.monotonic() < deadline:
            time.sleep(0.01)
        answered.set()
        assert slow.result().status_code == 408


@pytest.mark.parametrize("kind", [SAFETENSORS_TYPE, "application/json"])
def test_too_many_samples_are_refused_before_a_picture_is_decoded(kind, monkeypatch):
    samples = grid_of_samples(1, 3)[0]
    if kind == SAFETENSORS_TYPE:
        body = pack_samples(samples, [sample.image for sample in samples], png=True)
    else:
        body = json.dumps({"samples": [{"prompt": "x", "image": "AAAA"}] * 3}).encode()
    monkeypatch.setattr("flowgrpo_rewards.wire._decoded", lambda data: pytest.fail("a picture was decoded"))
    monkeypatch.setattr("flowgrpo_rewards.wire.load", lambda data: pytest.fail("the tensors were copied"))
    with pytest.raises(TooManySamplesError) as error:
        unpack_samples(body, kind, max_samples=2)
    assert "3 samples" in str(error.value)


def test_without_its_extra_the_server_says_what_to_install():
    code = "import sys; sys.modules['fastapi'] = None; import flowgrpo_rewards.server"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert answer.returncode
    assert "pip install flowgrpo-rewards[server]" in answer.stderr.splitlines()[-1]


def test_a_scorer_that_hangs_is_504_then_unhealthy_and_the_client_does_not_try_again():
    scorer = HangingScorer()
    samples = grid_of_samples(1, 2)[0]
    with serving(scorer, timeout_s=0.2) as address:
        client = RemoteScorer(address, timeout_s=20.0, pause=lambda s: pytest.fail("it must not try again"))
        with pytest.raises(RewardEndpointError) as error:
            client.score(samples)
        assert "504" in error.value.what
        assert error.value.samples == ((0, 0), (0, 1))
        assert httpx.get(f"{address}/health").status_code == 503
        with pytest.raises(RewardEndpointError) as error:
            client.score(samples)
        assert "503" in error.value.what
        scorer.released.set()


def test_a_client_that_waits_too_long_says_so_and_does_not_send_twice():
    scorer = HangingScorer()
    with serving(scorer) as address:
        client = RemoteScorer(address, timeout_s=0.3, pause=lambda s: pytest.fail("it must not try again"))
        assert client.components == ("fake",)
        with pytest.raises(RewardEndpointError) as error:
            client.score(grid_of_samples(1, 1)[0])
        scorer.released.set()
    assert "no answer within 0.3 s" in error.value.what


def test_another_kind_of_server_is_recognised():
    transport = httpx.MockTransport(lambda request: httpx.Response(200, text="<html>"))
    with pytest.raises(RewardEndpointError) as error:
        RemoteScorer("http://web.test", transport=transport).score(grid_of_samples(1, 1)[0])
    assert error.value.hint == "is this a reward-server?"


def test_many_clients_at_once_get_their_own_answers_and_none_is_lost():
    """The load test: 8 clients, 200 requests of 16 pictures, a line of 4; refused requests come back."""
    scorer = FakeScorer()
    clients, requests, pictures = 8, 200, 16
    groups = grid_of_samples(requests, pictures)

    with serving(scorer, max_waiting=4) as address, ThreadPoolExecutor(clients) as pool:
        remotes = [RemoteScorer(address, timeout_s=1e6, pause=lambda s: time.sleep(0.002)) for _ in range(clients)]
        started = time.perf_counter()
        answers = list(pool.map(lambda k: remotes[k % clients].score(groups[k]), range(requests)))
        seconds = time.perf_counter() - started
    assert answers == [[{"fake": Value(float(10 * g + n))} for n in range(pictures)] for g in range(requests)]
    assert sorted(call for calls in scorer.calls for call in calls) == [
        (g, n) for g in range(requests) for n in range(pictures)
    ]
    print(f"\n{requests / seconds:.0f} requests/s, {requests * pictures / seconds:.0f} pictures/s of 8 x 8")


def test_other_machines_are_let_in_only_with_a_token(monkeypatch, capsys):
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    assert main(["statistics", "--host", "0.0.0.0"]) == 2
    assert TOKEN_VARIABLE in capsys.readouterr().err


def test_the_command_says_what_a_scorer_lacks(tmp_path, capsys):
    assert main(["pickscore", "--model-path", str(tmp_path)]) == 2
    assert "config.json" in capsys.readouterr().err


def test_the_command_serves(tmp_path):
    address = dead_address()
    port = address.rpartition(":")[2]
    command = [sys.executable, "-m", "flowgrpo_rewards.server", "statistics", "--port", port]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        remote = RemoteScorer(address)
        assert remote.components == ("compressibility", "brightness")
    finally:
        process.terminate()
        assert process.wait(30) in (0, -15)
