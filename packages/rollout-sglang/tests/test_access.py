"""The token of a server, asked for on requests and on websockets."""

import asyncio

import pytest
from flowgrpo_rollout_sglang.server.access import POLICY_VIOLATION, TokenRequired

TOKEN = [(b"authorization", b"Bearer secret")]


async def inner(scope, receive, send):
    await send({"type": "passed"})


def answers(kind, path="/x", headers=(), token="secret"):
    """What the server sends for one request or websocket."""
    sent = []

    async def receive():
        return {"type": "websocket.connect"}

    async def send(message):
        sent.append(message)

    asyncio.run(TokenRequired(inner, token)({"type": kind, "path": path, "headers": list(headers)}, receive, send))
    return sent


@pytest.mark.parametrize("headers", [[], [(b"authorization", b"Bearer other")], [(b"authorization", b"\xff")]])
def test_without_the_token_a_request_gets_401_and_a_websocket_is_closed(headers):
    assert answers("http", headers=headers)[0]["status"] == 401
    (closed,) = answers("websocket", headers=headers)
    assert (closed["type"], closed["code"]) == ("websocket.close", POLICY_VIOLATION)


def test_health_is_open_to_requests_alone():
    assert answers("http", "/health") == [{"type": "passed"}]
    assert answers("websocket", "/health")[0]["type"] == "websocket.close"


@pytest.mark.parametrize("kind", ["http", "websocket"])
def test_the_token_opens_everything_and_so_does_a_server_that_has_none(kind):
    assert answers(kind, headers=TOKEN) == [{"type": "passed"}]
    assert answers(kind, token="") == [{"type": "passed"}]


def test_the_start_and_end_of_the_app_need_no_token():
    assert answers("lifespan") == [{"type": "passed"}]
