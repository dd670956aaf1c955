"""The body of `POST /rollout/generate`: one wave of prompt groups that share a forward, checked field by field.

Used by the engine, which writes it, and by both processes of the server, which read it. No torch, no sglang.

Shapes: G groups of a wave, N candidates of a group, T denoising steps, S of them with noise.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

SDE_TYPES = ("sde", "dance", "cps")
SAFETENSORS = "application/x-safetensors"
"""Media type of the binary answer; with any other `Accept` but the next the answer is JSON."""
ANSWER_FILE = "application/x-flowgrpo-file"
"""The same bytes as a file in the server's folder, for the engine: megabytes a picture need not cross two sockets."""
TOKEN_VARIABLE = "FLOWGRPO_TOKEN"
ENDPOINT_VARIABLE = "FLOWGRPO_ENDPOINT"
GRAPHS_VARIABLE = "FLOWGRPO_CUDA_GRAPHS"
"""1 where the server is to replay forwards as CUDA graphs."""

GROUP_FIELDS = {
    "prompt": "the text",
    "num_outputs_per_prompt": "N; by default one for each of initial_noise_group_ids, else 1",
    "seed": "engine noise: candidate n draws all its noise from seed + n",
    "initial_noise_group_ids": "driver noise: [N] sample ids, all different",
    "initial_noise_seed": "driver noise: seed of x_T, together with a candidate's id",
    "denoise_seeds": "driver noise: [N] seeds of the steps' noise; by default initial_noise_seed",
}
WAVE_FIELDS = {
    "height": "pixels",
    "width": "pixels",
    "num_inference_steps": "T",
    "guidance_scale": "must be 1.0",
    "sigmas": "[T + 1] used as they are; without them the server's own schedule",
    "rollout_sde_type": " | ".join(SDE_TYPES),
    "rollout_noise_level": "eta",
    "sigma_max": "clamp of sigma where it is 1; `sde` alone",
    "rollout_sde_step_indices": "[S] steps sampled with noise",
    "rollout_return_step_indices": "states x_k to return; by default both ends of each SDE step",
    "initial_noise_latent_shape": "[Z, h, w]; by default what the model and the size give",
    "candidates_per_forward": "how many candidates share a forward at most",
}


def read_echo(content: bytes) -> dict[str, Any]:
    """The JSON that a binary answer carries in its header."""
    length = int.from_bytes(content[:8], "little")
    return json.loads(json.loads(content[8 : 8 + length])["__metadata__"]["flowgrpo"])


class ContractError(ValueError):
    """A request that the server does not take: every fault of it, in words, and the remedy where it is known."""

    def __init__(self, faults: tuple[str, ...], hint: str = ""):
        super().__init__(faults, hint)
        self.faults, self.hint = faults, hint

    def __str__(self) -> str:
        return "; ".join(self.faults)


@dataclass(frozen=True)
class Candidate:
    """One picture to draw. Its noise depends on these fields and on nothing else."""

    sample_id: str
    x_T_seed: int
    step_seed: int


@dataclass(frozen=True)
class Group:
    """One prompt and its N candidates."""

    prompt: str
    candidates: tuple[Candidate, ...]


@dataclass(frozen=True)
class Wave:
    """Groups that share every setting: the checked form of a request."""

    groups: tuple[Group, ...]
    height: int
    width: int
    num_inference_steps: int
    sigmas: tuple[float, ...] | None
    sde_type: str
    eta: float
    sigma_max: float
    sde_indices: tuple[int, ...]
    state_indices: tuple[int, ...]
    latent_shape: tuple[int, int, int] | None
    candidates_per_forward: int | None


@dataclass(frozen=True)
class Command:
    """What FastAPI asks of the scheduler process: a method of `handlers.Server` and its arguments."""

    name: str
    arguments: tuple[Any, ...] = ()


def parse(body: Any) -> Wave:
    """The checked wave. A body without `groups` is one group, with the group's fields beside the wave's.

    Raises ContractError with every fault at once. Unknown fields are faults: a misspelt one must not be ignored.
    """
    if not isinstance(body, Mapping):
        raise ContractError(("the body must be a JSON object",))
    faults: list[str] = []
    single = "groups" not in body
    known = [*WAVE_FIELDS, *(GROUP_FIELDS if single else ("groups",))]
    _check_unknown("", body, known, faults)
    fields = {name: body.get(name) for name in WAVE_FIELDS}
    wave = _wave_fields(fields, faults)
    listed = [{name: body[name] for name in GROUP_FIELDS if name in body}] if single else body["groups"]
    if not isinstance(listed, list) or not listed:
        raise ContractError((*faults, "groups must be a list of at least one group"))
    groups = tuple(_group("" if single else f"groups[{i}].", item, faults) for i, item in enumerate(listed))
    if faults:
        raise ContractError(tuple(faults))
    return Wave(groups=groups, **wave)


def _wave_fields(fields: Mapping[str, Any], faults: list[str]) -> dict[str, Any]:
    for name in ("height", "width", "num_inference_steps", "rollout_sde_step_indices"):
        if fields[name] is None:
            faults.append(f"{name} is required ({WAVE_FIELDS[name]})")
    guidance = 1.0 if fields["guidance_scale"] is None else fields["guidance_scale"]
    if guidance != 1.0:
        faults.append(f"guidance_scale = {guidance!r}: replay runs one conditional forward, so it must be 1.0")
    T = _whole(fields, "num_inference_steps", faults, least=1) or 1
    steps = _indices(fields, "rollout_sde_step_indices", T - 1, faults)
    states = _indices(fields, "rollout_return_step_indices", T, faults)
    if fields["rollout_return_step_indices"] is None:
        states = tuple(sorted({k + d for k in steps for d in (0, 1)}))
    sde_type = fields["rollout_sde_type"] or "sde"
    if sde_type not in SDE_TYPES:
        faults.append(f"rollout_sde_type = {sde_type!r}: must be one of {', '.join(SDE_TYPES)}")
    if sde_type == "cps" and T - 1 in steps:
        faults.append(f"rollout_sde_step_indices holds {T - 1}: the last step of cps has no noise, so no log-prob")
    return {
        "height": _whole(fields, "height", faults, least=1),
        "width": _whole(fields, "width", faults, least=1),
        "num_inference_steps": T,
        "sigmas": _sigmas(fields["sigmas"], T, faults),
        "sde_type": sde_type,
        "eta": _number(fields, "rollout_noise_level", 0.7, faults, 0.0, 1.0 if sde_type == "cps" else 1e6),
        "sigma_max": _number(fields, "sigma_max", 0.99, faults, 0.0, 1.0),
        "sde_indices": steps,
        "state_indices": states,
        "latent_shape": _latent_shape(fields["initial_noise_latent_shape"], faults),
        "candidates_per_forward": _whole(fields, "candidates_per_forward", faults, least=1),
    }


def _group(where: str, item: Any, faults: list[str]) -> Group:
    if not isinstance(item, Mapping):
        faults.append(f"{where.rstrip('.')} must be an object")
        return Group("", ())
    _check_unknown(where, item, GROUP_FIELDS, faults)
    prompt, ids, seed = item.get("prompt"), item.get("initial_noise_group_ids"), item.get("seed")
    if not isinstance(prompt, str):
        faults.append(f"{where}prompt must be a string, got {prompt!r}")
    if (ids is None) == (seed is None):
        faults.append(f"{where}needs either seed (engine noise) or initial_noise_group_ids (driver noise), not both")
        return Group(str(prompt), ())
    count = item.get("num_outputs_per_prompt")
    if ids is None:
        first = _whole(item, "seed", faults, least=0) or 0
        n = _whole(item, "num_outputs_per_prompt", faults, least=1) or 1
        return Group(str(prompt), tuple(Candidate("engine", first + i, first + i) for i in range(n)))
    if not isinstance(ids, list) or not ids or not all(isinstance(i, str) for i in ids) or len(set(ids)) != len(ids):
        faults.append(f"{where}initial_noise_group_ids must be a list of different strings, got {ids!r}")
        return Group(str(prompt), ())
    if count not in (None, len(ids)):
        faults.append(f"{where}num_outputs_per_prompt = {count!r}, but there are {len(ids)} initial_noise_group_ids")
    base = _whole(item, "initial_noise_seed", faults, least=0)
    if base is None:
        faults.append(f"{where}initial_noise_seed is required beside initial_noise_group_ids")
        base = 0
    seeds = item.get("denoise_seeds") or [base] * len(ids)
    if not isinstance(seeds, list) or len(seeds) != len(ids) or not all(_is_whole(s) and s >= 0 for s in seeds):
        faults.append(f"{where}denoise_seeds must hold one whole number for each of {len(ids)} candidates")
        seeds = [base] * len(ids)
    return Group(str(prompt), tuple(Candidate(i, base, s) for i, s in zip(ids, seeds, strict=True)))


def _check_unknown(where: str, item: Mapping[str, Any], known: Iterable[str], faults: list[str]) -> None:
    if unknown := sorted(set(item) - set(known)):
        faults.append(f"unknown fields {', '.join(where + name for name in unknown)} (known: {', '.join(known)})")


def _sigmas(value: Any, T: int, faults: list[str]) -> tuple[float, ...] | None:
    if value is None:
        return None
    good = isinstance(value, list) and len(value) == T + 1 and all(isinstance(s, int | float) for s in value)
    if not good or not all(a > b >= 0.0 for a, b in pairwise(value)) or value[0] > 1.0:
        faults.append(f"sigmas must be {T + 1} numbers that fall from at most 1 to at least 0, got {value!r}")
        return None
    return tuple(float(s) for s in value)


def _latent_shape(value: Any, faults: list[str]) -> tuple[int, int, int] | None:
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 3 or not all(_is_whole(n) and n > 0 for n in value):
        faults.append(f"initial_noise_latent_shape must be [channels, height, width], got {value!r}")
        return None
    return (value[0], value[1], value[2])


def _indices(fields: Mapping[str, Any], name: str, last: int, faults: list[str]) -> tuple[int, ...]:
    value = fields[name]
    if value is None:
        return ()
    good = isinstance(value, list) and all(_is_whole(k) and 0 <= k <= last for k in value)
    if not good or sorted(set(value)) != value:
        faults.append(f"{name} must be sorted, without doubles, from 0 to {last}, got {value!r}")
        return ()
    return tuple(value)


def _whole(fields: Mapping[str, Any], name: str, faults: list[str], least: int) -> int | None:
    value = fields.get(name)
    if value is None:
        return None
    if not _is_whole(value) or value < least:
        faults.append(f"{name} = {value!r}: must be a whole number of at least {least}")
        return None
    return value


def _number(
    fields: Mapping[str, Any], name: str, default: float, faults: list[str], above: float, most: float
) -> float:
    value = default if fields[name] is None else fields[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not above < value <= most:
        faults.append(f"{name} = {value!r}: must be a number above {above:g} and at most {most:g}")
        return default
    return float(value)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
