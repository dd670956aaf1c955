"""Which denoising steps are sampled with noise and trained. No torch here: preflight reads this file."""

import math
from collections.abc import Sequence


def resolve_sde_indices(
    *,
    num_inference_steps: int,
    rollout_id: int | None = None,
    sde_resample_per_rollout: bool = False,
    num_sde_steps: int = 0,
    sde_pool: Sequence[int] | None = None,
    sde_indices: Sequence[int] | None = None,
    sde_timestep_fraction: tuple[float, float] = (0.0, 1.0),
) -> tuple[int, ...]:
    """The trained steps of one rollout, sorted: the same on every engine and every rank.

    The first rule that applies decides:

    1. `sde_resample_per_rollout` with a `rollout_id`: `num_sde_steps` steps drawn without replacement from
       `sde_pool` (None: the window) by `numpy.random.default_rng(rollout_id)`.
    2. `sde_indices`, sorted and made unique.
    3. `num_sde_steps` above 0: the steps `window[floor(k * len(window) / num_sde_steps)]`.
    4. Nothing set: no step is trained, `()`.

    The window of `sde_timestep_fraction = (lo, hi)` is the steps from `floor(lo * T)` up to but without
    `floor(hi * T)`, T = `num_inference_steps`: (0.0, 0.5) over 12 steps with 3 trained gives (0, 2, 4).

    Args:
        num_inference_steps: T, denoising steps of one image, at least 1.
        rollout_id: seed of the draw, at least 0; None for evaluation, which never draws.

    Raises:
        ValueError: a step outside 0 .. T - 1, more steps wanted than the pool or window holds, a window that is
            no ascending pair in [0, 1], a negative rollout_id, or resampling without `num_sde_steps`.
    """
    window, pool, explicit = _checked(
        num_inference_steps, sde_resample_per_rollout, num_sde_steps, sde_pool, sde_indices, sde_timestep_fraction
    )
    if sde_resample_per_rollout and rollout_id is not None:
        return _draw(rollout_id, pool, num_sde_steps)
    if explicit is not None:
        return explicit
    if num_sde_steps:
        if num_sde_steps > len(window):
            raise ValueError(
                f"num_sde_steps = {num_sde_steps}, but the window of sde_timestep_fraction = "
                f"{list(sde_timestep_fraction)} over {num_inference_steps} steps holds {len(window)} "
                f"({list(window)}); lower num_sde_steps, widen the window or set sde_indices"
            )
        return tuple(window[k * len(window) // num_sde_steps] for k in range(num_sde_steps))
    return ()


def reachable_sde_indices(
    *,
    num_inference_steps: int,
    sde_resample_per_rollout: bool = False,
    num_sde_steps: int = 0,
    sde_pool: Sequence[int] | None = None,
    sde_indices: Sequence[int] | None = None,
    sde_timestep_fraction: tuple[float, float] = (0.0, 1.0),
) -> tuple[int, ...]:
    """Every step that some rollout, or the evaluation, could sample with noise, sorted.

    With resampling that is the whole pool and the steps of the evaluation (rules 2 and 3 of
    `resolve_sde_indices`, whose arguments and errors these are); without it, the evaluation's steps.
    """
    evaluation = resolve_sde_indices(
        num_inference_steps=num_inference_steps,
        sde_resample_per_rollout=sde_resample_per_rollout,
        num_sde_steps=num_sde_steps,
        sde_pool=sde_pool,
        sde_indices=sde_indices,
        sde_timestep_fraction=sde_timestep_fraction,
    )
    if not sde_resample_per_rollout:
        return evaluation
    _, pool, _ = _checked(num_inference_steps, True, num_sde_steps, sde_pool, sde_indices, sde_timestep_fraction)
    return tuple(sorted({*pool, *evaluation}))


def _checked(
    num_inference_steps: int,
    sde_resample_per_rollout: bool,
    num_sde_steps: int,
    sde_pool: Sequence[int] | None,
    sde_indices: Sequence[int] | None,
    sde_timestep_fraction: tuple[float, float],
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...] | None]:
    """The window, the pool and the explicit steps, each sorted and unique; raises ValueError in words."""
    if num_inference_steps < 1:
        raise ValueError(f"num_inference_steps = {num_inference_steps}: an image takes at least 1 step")
    if num_sde_steps < 0:
        raise ValueError(f"num_sde_steps = {num_sde_steps}: use 0 for no trained step, or more")
    window = _window(num_inference_steps, sde_timestep_fraction)
    pool = window if sde_pool is None else _steps("sde_pool", sde_pool, num_inference_steps)
    explicit = None if sde_indices is None else _steps("sde_indices", sde_indices, num_inference_steps)
    if sde_resample_per_rollout:
        if num_sde_steps == 0:
            raise ValueError(
                "sde_resample_per_rollout draws num_sde_steps steps per rollout, and num_sde_steps is 0; "
                "set num_sde_steps, or turn resampling off"
            )
        if num_sde_steps > len(pool):
            raise ValueError(
                f"num_sde_steps = {num_sde_steps}, but the pool holds {len(pool)} steps ({list(pool)}); "
                "lower num_sde_steps or widen sde_pool (without it: sde_timestep_fraction)"
            )
    return window, pool, explicit


def _window(num_inference_steps: int, fraction: tuple[float, float]) -> tuple[int, ...]:
    lo, hi = fraction
    if not 0.0 <= lo < hi <= 1.0:
        raise ValueError(f"sde_timestep_fraction = [{lo}, {hi}]: it must satisfy 0 <= lo < hi <= 1")
    # 0.29 * 100 is 28.999...: the small addend keeps what the user wrote as a whole step whole.
    first, end = (math.floor(bound * num_inference_steps + 1e-9) for bound in (lo, hi))
    return tuple(range(first, end))


def _steps(name: str, steps: Sequence[int], num_inference_steps: int) -> tuple[int, ...]:
    if outside := sorted(k for k in steps if not 0 <= k < num_inference_steps):
        raise ValueError(
            f"{name} = {list(steps)}: steps {outside} do not exist, num_inference_steps is "
            f"{num_inference_steps}; use steps from 0 to {num_inference_steps - 1}"
        )
    return tuple(sorted(set(steps)))


def _draw(rollout_id: int, pool: tuple[int, ...], count: int) -> tuple[int, ...]:
    if rollout_id < 0:
        raise ValueError(f"rollout_id = {rollout_id}: it seeds the draw of the trained steps and must not be negative")
    import numpy as np  # here, because preflight reads this module and never draws

    drawn = np.random.default_rng(rollout_id).choice(np.array(pool), size=count, replace=False)
    return tuple(sorted(int(k) for k in drawn))
