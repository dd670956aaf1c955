"""The FastAPI side: the token, the routes of the rollout contract, and refusals of stock routes that would break it.

Called by: the patch, when SGLang makes its app. The routes stand before SGLang's own, so those of the same path
are never reached. Everything but `/health` needs the token that the engine put into the environment (`access`).
"""

import base64
import json
import os
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from sglang.multimodal_gen.runtime.scheduler_client import async_scheduler_client
from torch import Tensor

from flowgrpo_rollout_sglang.server.access import TokenRequired
from flowgrpo_rollout_sglang.server.contract import (
    ANSWER_FILE,
    SAFETENSORS,
    TOKEN_VARIABLE,
    Command,
    ContractError,
    parse,
    read_echo,
)

REFUSED_ROUTES = ("/update_weights_from_disk", "/v1/set_lora", "/v1/merge_lora_weights", "/v1/unmerge_lora_weights")
WEIGHT_VERBS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "split": ((), {}),
    "begin": (("manifest", "channel"), {"rank": 0}),
    "verify": ((), {"rank": 0}),
    "commit": (("version",), {}),
    "abort": ((), {"rank": None}),
}
"""Of `/flowgrpo/weights/{verb}`: the fields that its body must hold, and those that it may."""


def install(app: FastAPI, server_args: Any) -> None:
    """Called by the patch with the new app, before SGLang adds its own routes."""
    app.add_middleware(TokenRequired, token=os.environ.get(TOKEN_VARIABLE, ""))

    @app.post("/rollout/generate")
    async def generate(request: Request) -> Response:
        body = await _json(request)
        try:
            parse(body)  # here as well: a faulty request must not wait behind a running one
        except ContractError as error:
            return _reply((400, {"error": "request", "detail": str(error)}))
        to_file = request.headers.get("accept") == ANSWER_FILE
        status, answer = await _ask("generate", body, to_file)
        if status != 200 or to_file:
            return _reply((status, answer))
        content = memoryview(answer)
        if request.headers.get("accept") == SAFETENSORS:
            return Response(content=bytes(content), media_type=SAFETENSORS)
        return JSONResponse(_as_items(bytes(content)))

    @app.get("/flowgrpo/info")
    async def info() -> Response:
        return _reply(await _ask("info"))

    @app.post("/release_memory_occupation")
    async def release(request: Request) -> Response:
        return _reply(await _ask("release", (await _json(request, {})).get("tags")))

    @app.post("/resume_memory_occupation")
    async def resume(request: Request) -> Response:
        return _reply(await _ask("resume", (await _json(request, {})).get("tags")))

    @app.post("/flowgrpo/weights/{verb}")
    async def weights(verb: str, request: Request) -> Response:
        if verb not in WEIGHT_VERBS:
            return _reply((404, {"error": "request", "detail": f"unknown verb {verb!r}"}))
        body, (fields, defaults) = await _json(request, {}), WEIGHT_VERBS[verb]
        body = defaults | body if isinstance(body, Mapping) else body
        return await _call(f"weights_{verb}", body, (*fields, *defaults))

    @app.post("/flowgrpo/adapter")
    async def adapter(request: Request) -> Response:
        return await _call("adapter", await _json(request), ("rank", "alpha", "target_modules"))

    @app.post("/set_lora_from_tensor")
    async def set_lora_from_tensor(request: Request, rank: int, alpha: float, version: int | None = None) -> Response:
        return _reply(await _ask("lora_from_tensors", await request.body(), rank, alpha, version))

    for path in REFUSED_ROUTES:
        app.add_api_route(path, _refuse, methods=["POST"])


async def _refuse(request: Request) -> Response:
    detail = f"{request.url.path} writes weights without a version: use /set_lora_from_tensor or a weight transaction"
    return _reply((409, {"error": "refused", "success": False, "detail": detail}))


async def _ask(name: str, *arguments: Any) -> tuple[int, Any]:
    """Sends a command to the scheduler process and waits for its answer."""
    batch = await async_scheduler_client.forward(Command(name, arguments))
    if batch.error:
        return 500, {"error": "internal", "detail": batch.error}
    return batch.output


async def _call(command: str, body: Any, fields: tuple[str, ...]) -> Response:
    """A command whose arguments are exactly these fields of the body."""
    if not isinstance(body, Mapping) or set(body) != set(fields):
        return _reply(
            (400, {"error": "request", "detail": f"the body must hold exactly {', '.join(fields) or 'nothing'}"})
        )
    return _reply(await _ask(command, *(body[name] for name in fields)))


async def _json(request: Request, empty: Any = None) -> Any:
    """The body, or `empty` where there is none and that is allowed."""
    raw = await request.body()
    if not raw and empty is not None:
        return empty
    try:
        return json.loads(raw)
    except ValueError:
        return None


def _reply(answer: tuple[int, Any]) -> Response:
    return JSONResponse(answer[1], status_code=answer[0])


def _as_items(content: bytes) -> list[dict[str, Any]]:
    """The answer as JSON, one item for each output, tensors in base64 safetensors: for people and for other clients."""
    tensors, echo = load_tensors(content), read_echo(content)
    items = []
    for g, group in enumerate(echo["groups"]):
        embeds = tensors[f"{g}.prompt_embeds_LE"]
        for n, candidate in enumerate(group["candidates"]):
            items.append(
                {
                    "prompt": group["prompt"],
                    "sample_id": candidate["sample_id"],
                    "seed": candidate["step_seed"],
                    "height": echo["height"],
                    "width": echo["width"],
                    "policy_version": echo["policy_version"],
                    "sde_indices": echo["sde_indices"],
                    "generated_output": _encoded(tensors[f"{g}.images_NHWC"][n]),
                    "rollout_log_probs": _encoded(tensors[f"{g}.log_probs_NS"][n]),
                    "dit_trajectory": {
                        "latents": _encoded(tensors[f"{g}.latents_NUPC"][n]),
                        "step_indices": echo["state_indices"],
                        "sigmas": echo["sigmas"],
                        "timesteps": [1000.0 * sigma for sigma in echo["sigmas"]],
                    },
                    "denoising_env": {"pos_cond_kwargs": {"encoder_hidden_states": _encoded(embeds)}},
                    "inference_time_s": echo["seconds"]["engine_s"],
                }
            )
    return items


def _encoded(tensor: Tensor) -> dict[str, Any]:
    data = base64.b64encode(save_tensors({"t": tensor.contiguous()})).decode()
    return {"__tensor__": True, "data": data, "shape": list(tensor.shape), "dtype": str(tensor.dtype)}
