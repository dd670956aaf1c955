"""How images are sampled: one typed object, read by rollout and by replay, so that they cannot differ.

No torch here: preflight reads this file on a laptop in milliseconds.
"""

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

from flowgrpo_math.sde_steps import reachable_sde_indices, resolve_sde_indices

SdeType = Literal["sde", "dance", "cps"]
SampleIdMode = Literal["metadata", "positional", "group_index"]
SAMPLE_ID_MODE_VARIABLE = "FLOWGRPO_SAMPLE_ID_MODE"


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong with the settings: the value, the rule it breaks, the remedy."""

    where: str
    """The setting and its value, as the user would write it."""
    why: str
    """The rule, in one or two sentences."""
    fix: str
    """What to type instead."""

    def __str__(self) -> str:
        return f"{self.where}\n   {self.why}\n   fix: {self.fix}"


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingConfig:
    """`--sampling-config`: how images are sampled and which of the denoising steps are trained."""

    height: int = 384
    """Pixels."""
    width: int = 384
    """Pixels."""
    num_inference_steps: int = 12
    """Denoising steps per image, all of them run at generation."""
    guidance_scale: float = 1.0
    """Must be 1.0: replay runs one conditional forward (S5)."""
    eta: float = 0.7
    """SDE noise strength: one value for rollout and replay alike."""
    sigma_max: float = 0.99
    """Clamp of sigma where it is 1, used by `sde` alone."""
    sde_type: SdeType = "sde"
    """`sde`: Flow-GRPO's noise, which grows with sigma. `dance`: DanceGRPO's, constant. `cps`: CPS's."""
    driver_sigmas: bool = True
    """Send the driver's own sigma schedule with each request."""
    driver_xt: bool = True
    """The driver fixes each candidate's initial latent and step noise by its sample_id."""
    init_noise_latent_shape: tuple[int, ...] | None = None
    """Shape of x_T, (channels, height, width); None derives it from the model's VAE."""
    sample_id_mode: SampleIdMode = "metadata"
    """How a candidate's stable id is built (E5)."""
    sde_resample_per_rollout: bool = False
    """Draw `num_sde_steps` from `sde_pool` afresh in each rollout."""
    sde_pool: tuple[int, ...] | None = None
    """Steps that a rollout may draw; None is the window of `sde_timestep_fraction`."""
    sde_indices: tuple[int, ...] | None = None
    """Explicit trained steps, used where no rollout draws them (evaluation)."""
    num_sde_steps: int = 0
    """How many steps are trained."""
    sde_timestep_fraction: tuple[float, float] = (0.0, 1.0)
    """Window of the schedule, as fractions of its length."""

    @classmethod
    def from_json(cls, text: str) -> "SamplingConfig":
        """Parses `--sampling-config`. Raises ValueError naming every unknown or mistyped key at once."""
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"--sampling-config is not JSON: {error}") from None
        if not isinstance(data, dict):
            raise ValueError(f"--sampling-config must be a JSON object, got {type(data).__name__}")
        return cls.from_dict(data)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "SamplingConfig":
        """As `from_json`, from a dict. `FLOWGRPO_SAMPLE_ID_MODE` fills `sample_id_mode` where it is absent."""
        known = {f.name: f.default for f in fields(cls)}
        wrong = [f"unknown key {key!r} (known: {', '.join(known)})" for key in data if key not in known]
        values = {key: value for key, value in data.items() if key in known}
        if "sample_id_mode" not in values and (mode := os.environ.get(SAMPLE_ID_MODE_VARIABLE)):
            values["sample_id_mode"] = mode
        for key, value in values.items():
            try:
                values[key] = _typed(key, value, known[key])
            except (TypeError, ValueError) as error:
                wrong.append(f"{key} = {value!r}: {error}")
        if wrong:
            raise ValueError("--sampling-config:\n  " + "\n  ".join(wrong))
        return cls(**values)

    def fingerprint(self) -> str:
        """SHA-256 of every setting: equal fingerprints mean equal sampling."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()

    def sde_steps(self, rollout_id: int | None) -> tuple[int, ...]:
        """The trained steps of one rollout (None: evaluation); the same on every engine and rank (M3)."""
        return resolve_sde_indices(rollout_id=rollout_id, **self._step_settings())

    def reachable_sde_steps(self) -> tuple[int, ...]:
        """Every step that some rollout, or the evaluation, could train."""
        return reachable_sde_indices(**self._step_settings())

    def _step_settings(self) -> dict[str, Any]:
        names = ("num_inference_steps", "sde_resample_per_rollout", "sde_pool", "sde_indices")
        names += ("num_sde_steps", "sde_timestep_fraction")
        return {name: getattr(self, name) for name in names}

    def problems(self) -> Iterator[Problem]:
        """Everything wrong with these settings alone. Never raises, never edits."""
        where = "--sampling-config "
        for name in ("height", "width", "num_inference_steps"):
            if getattr(self, name) < 1:
                yield Problem(f"{where}{name} = {getattr(self, name)}", "It must be at least 1.", f"set {name} above 0")
        if self.guidance_scale != 1.0:
            yield Problem(
                f"{where}guidance_scale = {self.guidance_scale}",
                "Replay runs one conditional forward; a guided rollout would train a policy it never sampled.",
                "set guidance_scale to 1.0",
            )
        if not 0 < self.eta < math.inf:
            yield Problem(
                f"{where}eta = {self.eta}",
                "Without noise there is no density to train on.",
                "set eta above 0",
            )
        elif self.sde_type == "cps" and self.eta > 1:
            yield Problem(
                f"{where}eta = {self.eta} under cps",
                "`cps` takes eta as a share of a quarter turn between signal and noise.",
                "set eta to at most 1",
            )
        if not 0 < self.sigma_max < 1:
            yield Problem(f"{where}sigma_max = {self.sigma_max}", "It must lie in (0, 1).", "use 0.99")
        yield from self._step_problems(where)

    def _step_problems(self, where: str) -> Iterator[Problem]:
        lo, hi = self.sde_timestep_fraction
        if not 0.0 <= lo < hi <= 1.0:
            yield Problem(
                f"{where}sde_timestep_fraction = [{lo}, {hi}]",
                "It must satisfy 0 <= lo < hi <= 1.",
                "use [0.0, 0.5]",
            )
            return
        for name in ("sde_pool", "sde_indices"):
            steps = getattr(self, name) or ()
            if outside := [k for k in steps if not 0 <= k < self.num_inference_steps]:
                yield Problem(
                    f"{where}{name} = {list(steps)}",
                    f"Steps {outside} do not exist: num_inference_steps is {self.num_inference_steps}.",
                    f"use steps from 0 to {self.num_inference_steps - 1}",
                )
        try:
            reachable = self.reachable_sde_steps()
        except ValueError as error:
            yield Problem(
                f"{where}num_sde_steps = {self.num_sde_steps}",
                str(error),
                "lower num_sde_steps or widen sde_pool",
            )
            return
        if not reachable:
            yield Problem(
                f"{where}num_sde_steps = {self.num_sde_steps}",
                "No step is sampled with noise, so there is nothing to train.",
                "set sde_indices, or num_sde_steps with sde_pool",
            )
        if self.sde_type == "sde" and 0 in reachable:
            yield Problem(
                f"{where}trains SDE step 0 (reachable steps {list(reachable)})",
                "Step 0 starts at sigma = 1, where the noise of `sde` is infinite: replay would score a transition "
                "that the engine never sampled.",
                'leave 0 out of sde_indices, sde_pool and the window, or set sde_type to "dance"',
            )
        last = self.num_inference_steps - 1
        if self.sde_type == "cps" and last in reachable:
            yield Problem(
                f"{where}trains SDE step {last} under cps",
                "The last step of `cps` adds no noise, so it has no density to train on.",
                f"leave {last} out of sde_indices, sde_pool and the window",
            )


def _typed(key: str, value: Any, default: Any) -> Any:
    """`value` as the field's type; raises TypeError or ValueError in words."""
    choices = {"sde_type": get_args(SdeType), "sample_id_mode": get_args(SampleIdMode)}
    if key in choices:
        if value not in choices[key]:
            raise ValueError(f"must be one of {', '.join(choices[key])}")
        return value
    if key in ("sde_pool", "sde_indices", "init_noise_latent_shape"):
        if value is None:
            return None
        if not isinstance(value, list | tuple) or not all(
            isinstance(k, int) and not isinstance(k, bool) for k in value
        ):
            raise TypeError("must be a list of integers")
        return tuple(value)
    if key == "sde_timestep_fraction":
        if not isinstance(value, list | tuple) or len(value) != 2:
            raise TypeError("must be two numbers, [lo, hi]")
        return (float(value[0]), float(value[1]))
    if isinstance(default, bool):
        if not isinstance(value, bool):
            raise TypeError("must be true or false")
        return value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError("must be a number")
    if isinstance(default, int) and value != int(value):
        raise TypeError("must be a whole number")
    return type(default)(value)


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """What an engine needs to start. Every engine class is made as `Engine(config)`."""

    name: str
    """How messages call this engine, e.g. "engine0"."""
    model_path: str
    """Folder of the model in diffusers layout."""
    model_revision: str | None = None
    device: Literal["cpu", "cuda"] = "cpu"
    num_gpus: int = 1
    """Devices that hold the engine's model together; on the CPU as many processes do."""
    visible_devices: str | None = None
    """CUDA_VISIBLE_DEVICES of the engine's own processes, in the order of the trainer's ranks; None: as in this one."""
    dtype: Literal["bf16", "fp32"] = "bf16"
    """Number format of the transformer."""
    candidates_per_forward: int | None = None
    """Candidates joined in one forward; None chooses by device."""
    cuda_graphs: bool | None = None
    """Replay the transformer's forward as CUDA graphs, in the server alone; None does where it has one GPU."""
    weight_sync_mode: Literal["full", "adapter"] = "full"
    """`adapter`: the engine keeps the base and takes LoRA tensors only."""
    lora_rank: int = 0
    lora_alpha: float = 0.0
    lora_target_modules: tuple[str, ...] = ()
    """Module-name suffixes that carry the adapter, in adapter mode."""
    log_folder: str | None = None
    """Where a server process writes its log."""
    start_timeout_s: float = 600.0
    """Longest wait until the engine is ready."""

    @property
    def num_ranks(self) -> int:
        """Processes that hold a part of the model each."""
        return max(1, self.num_gpus)
