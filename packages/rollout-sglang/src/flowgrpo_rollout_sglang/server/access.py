"""Who may talk to the server: whoever has the token that the engine put into its environment.

Called by: `http`, around the whole app. Knows neither FastAPI nor SGLang.
"""

import hmac
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

OPEN_ROUTES = ("/health",)
POLICY_VIOLATION = 1008
"""WebSocket close code of RFC 6455; before a connection is accepted the server turns it into HTTP 403."""
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class TokenRequired:
    """ASGI middleware: requests and websockets without the token are refused, whatever route they name.

    FastAPI's own `@app.middleware("http")` sees no websocket, and SGLang has routes of that kind.
    """

    def __init__(self, app: Callable[[Message, Receive, Send], Awaitable[None]], token: str):
        """An empty `token` lets everybody in."""
        self._app, self._token = app, token.encode()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or self._may_pass(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await receive()  # websocket.connect
            await send({"type": "websocket.close", "code": POLICY_VIOLATION, "reason": "no token"})
        else:
            body = json.dumps({"error": "token", "detail": "this engine belongs to another driver"}).encode()
            headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": body})

    def _may_pass(self, scope: Message) -> bool:
        if not self._token or (scope["type"] == "http" and scope["path"] in OPEN_ROUTES):
            return True
        given = dict(scope["headers"]).get(b"authorization", b"").removeprefix(b"Bearer ")
        return hmac.compare_digest(given, self._token)
