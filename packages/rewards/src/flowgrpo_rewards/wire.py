"""What travels between `reward-server` and its client: one safetensors body, or JSON with base64 PNGs. Never pickle.

A safetensors body holds one tensor `image.<k>` for each sample: uint8 [H, W, 3] pixels, or uint8 [n] bytes of a PNG
or JPEG file; its metadata entry `samples` is a JSON list of {"prompt", "metadata", "group_index", "slot"}.

The answer is JSON: {"results": [{"<component>": {"value": 0.5} or {"invalid": "why"}}, ...]}.
"""

import base64
import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from PIL import Image
from safetensors import SafetensorError
from safetensors.numpy import load, save

from flowgrpo_rewards.images import pixels
from flowgrpo_rewards.protocol import ComponentResult, Invalid, RewardSample, SampleResult, Value

SAFETENSORS_TYPE = "application/x-safetensors"
JSON_TYPE = "application/json"
MAX_PIXELS = 64 * 1024 * 1024
"""Largest picture that is decoded, in pixels."""


class WireError(ValueError):
    """A body that breaks the format; the server answers 400 with these words."""


class TooManySamplesError(WireError):
    """More samples in one body than may be; said before a picture is decoded. The server answers 413."""


def pack_samples(samples: Sequence[RewardSample], pictures: Sequence[np.ndarray], *, png: bool) -> bytes:
    """The safetensors body. `png`: pictures travel compressed (less network, more CPU), else as raw pixels."""
    tensors = {f"image.{k}": _png(picture) if png else picture for k, picture in enumerate(pictures)}
    described = [
        {"prompt": s.prompt, "metadata": dict(s.metadata), "group_index": s.group_index, "slot": s.slot}
        for s in samples
    ]
    return save(tensors, metadata={"samples": json.dumps(described)})


def unpack_samples(body: bytes, content_type: str, *, max_samples: int | None = None) -> list[RewardSample]:
    """The samples of a request, images as uint8 [H, W, 3].

    A picture that does not decode is not the request's failure but the sample's: its `image` is an `Invalid`.
    Raises TooManySamplesError, and WireError for everything else.
    """
    kind = content_type.partition(";")[0].strip().lower()
    if kind == SAFETENSORS_TYPE:
        described, pictures = _from_safetensors(body, max_samples)
    elif kind == JSON_TYPE:
        described, pictures = _from_json(body, max_samples)
    else:
        raise WireError(f"content type {kind!r}: use {SAFETENSORS_TYPE} or {JSON_TYPE}")
    return [_sample(k, *pair) for k, pair in enumerate(zip(described, pictures, strict=True))]


def _from_safetensors(body: bytes, max_samples: int | None) -> tuple[list[Any], list[np.ndarray]]:
    try:
        described = _counted(json.loads(_metadata(body)["samples"]), max_samples)
        tensors = load(body)
    except TooManySamplesError:
        raise
    except (SafetensorError, AttributeError, KeyError, ValueError, TypeError, RecursionError) as error:
        raise WireError(f"not a safetensors body with a `samples` entry: {type(error).__name__}: {error}") from None
    if not isinstance(described, list) or set(tensors) != {f"image.{k}" for k in range(len(described))}:
        raise WireError(f"`samples` must list one entry for each of image.0, image.1, ...; got {sorted(tensors)[:5]}")
    return described, [tensors[f"image.{k}"] for k in range(len(described))]


def _counted(described: Any, max_samples: int | None) -> Any:
    if max_samples is not None and isinstance(described, list) and len(described) > max_samples:
        raise TooManySamplesError(f"{len(described)} samples in one request, at most {max_samples}")
    return described


def _metadata(body: bytes) -> Mapping[str, str]:
    """`__metadata__` of a safetensors body: 8 bytes of header length, then the header's JSON."""
    length = int.from_bytes(body[:8], "little")
    return json.loads(body[8 : 8 + length]).get("__metadata__") or {}


def _from_json(body: bytes, max_samples: int | None) -> tuple[list[Any], list[np.ndarray]]:
    try:
        described = _counted(json.loads(body)["samples"], max_samples)
        images = [np.frombuffer(base64.b64decode(entry["image"], validate=True), np.uint8) for entry in described]
    except TooManySamplesError:
        raise
    except (KeyError, ValueError, TypeError, RecursionError) as error:
        raise WireError(
            f'not {{"samples": [{{"prompt": ..., "image": base64 of a PNG}}]}}: {type(error).__name__}: {error}'
        ) from None
    return described, images


def _sample(index: int, entry: Any, image: np.ndarray) -> RewardSample:
    if not isinstance(entry, dict) or not isinstance(entry.get("prompt"), str):
        raise WireError(f"sample {index} has no text `prompt`")
    metadata = entry.get("metadata", {})
    numbers = entry.get("group_index", 0), entry.get("slot", index)
    if not isinstance(metadata, dict) or not all(isinstance(n, int) for n in numbers):
        raise WireError(f"sample {index}: `metadata` must be an object, `group_index` and `slot` whole numbers")
    if image.dtype != np.uint8 or image.ndim not in (1, 3):
        raise WireError(
            f"sample {index}: an image is uint8 [H, W, 3] or the bytes of a file, got {image.dtype} {image.shape}"
        )
    return RewardSample(
        image=image if image.ndim == 3 else _decoded(image.tobytes()),
        prompt=entry["prompt"],
        metadata=metadata,
        group_index=numbers[0],
        slot=numbers[1],
    )


def _decoded(data: bytes) -> np.ndarray | Invalid:
    try:
        with Image.open(io.BytesIO(data)) as image:
            if image.width * image.height > MAX_PIXELS:
                return Invalid(f"the image has {image.width} x {image.height} pixels, more than {MAX_PIXELS}")
            return pixels(image)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        return Invalid(f"the image does not decode: {error}")


def _png(picture: np.ndarray) -> np.ndarray:
    buffer = io.BytesIO()
    Image.fromarray(picture).save(buffer, format="PNG", compress_level=1)
    return np.frombuffer(buffer.getvalue(), np.uint8)


def pack_results(results: Sequence[SampleResult]) -> dict[str, Any]:
    """The answer's JSON. A value that is not finite becomes `invalid`: JSON has no word for it."""
    return {"results": [{name: _result_json(result) for name, result in one.items()} for one in results]}


def _result_json(result: ComponentResult) -> dict[str, Any]:
    if isinstance(result, Invalid):
        return {"invalid": result.reason}
    value = float(result.value)
    return {"value": value} if np.isfinite(value) else {"invalid": f"the value is {value}"}


def unpack_results(answer: Any, count: int) -> list[SampleResult]:
    """Raises WireError unless the answer holds `count` results."""
    results = answer.get("results") if isinstance(answer, dict) else None
    if not isinstance(results, list) or len(results) != count:
        got = len(results) if isinstance(results, list) else type(answer).__name__
        raise WireError(f"{got} results for {count} samples")
    if wrong := [one for one in results if not isinstance(one, dict)]:
        raise WireError(f"{wrong[0]!r} is no mapping from component to result")
    return [{name: _component(name, result) for name, result in one.items()} for one in results]


def _component(name: str, result: Any) -> ComponentResult:
    match result:
        case {"invalid": str(reason)}:
            return Invalid(reason)
        case {"value": int(value) | float(value)} if not isinstance(value, bool):
            return Value(float(value))
    raise WireError(f"component {name!r} is {result!r}, neither a value nor invalid")
