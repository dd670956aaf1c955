"""One denoising step as a Gaussian: its coefficients, a draw from it, and the log-probability of a draw.

The mean is linear in the latent and the velocity for every kind of step, so a step is three numbers per candidate:

    x_next ~ Normal(x_scale * x + v_scale * velocity, std)

Rollout draws from this Gaussian and replay scores it again; both must call this file and nothing else.

Shapes: B candidates, D latent elements of one candidate (all its trailing dimensions).
Units:  sigma, eta and noise are dimensionless; log-probs are nats per latent element.
"""

import math
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from flowgrpo_math._checks import require_finite, require_floating, require_same_shape_and_device

SdeType = Literal["sde", "dance", "cps", "ode"]
Backend = Literal["torch", "triton"]
HALF_LOG_2PI = 0.5 * math.log(2.0 * math.pi)


class Transition(NamedTuple):
    """The Gaussian of one step, x_next ~ Normal(x_scale * x + v_scale * velocity, std); no part depends on the model.

    Each field is [B], or [1] for one step shared by all candidates: float64 on the CPU as `transition` makes it.
    """

    x_scale_B: Tensor
    v_scale_B: Tensor
    std_B: Tensor

    def to(self, device: torch.device | str, dtype: torch.dtype = torch.float32) -> "Transition":
        """The same numbers on `device`, in one copy. Worth it where one step serves several calls."""
        return Transition(*torch.stack(tuple(self)).to(device=device, dtype=dtype))


def transition(
    sde_type: SdeType,
    sigma_B: Tensor | float,
    sigma_next_B: Tensor | float,
    *,
    eta: float,
    sigma_max: float | None = None,
) -> Transition:
    """The step from `sigma` down to `sigma_next`, computed in float64 on the CPU.

    With dt = sigma_next - sigma, which is negative:

        sde, dance   x_scale = 1 + s^2 dt / (2 sigma)
                     v_scale = dt (1 + s^2 (1 - sigma) / (2 sigma))
                     std     = s sqrt(-dt)
            sde      s = eta sqrt(sigma / (1 - sigma)); Flow-GRPO, https://arxiv.org/abs/2505.05470
            dance    s = eta; DanceGRPO, https://arxiv.org/abs/2505.07818
        cps          std     = sigma_next sin(eta pi / 2),  keep = sigma_next cos(eta pi / 2)
                     x_scale = (1 - sigma_next) + keep
                     v_scale = -sigma (1 - sigma_next) + (1 - sigma) keep
                     coefficients-preserving sampling, https://arxiv.org/abs/2509.05952
        ode          x_scale = 1, v_scale = dt, std = 0: the Euler step

    With eta = 0 all of them are the Euler step.

    Args:
        sde_type: "sde", "dance", "cps" or "ode".
        sigma_B, sigma_next_B: [B] tensors or plain numbers, 0 <= sigma_next < sigma <= 1. A CUDA tensor is
            read back, which waits for the GPU: keep schedules on the CPU.
        eta: noise strength, at least 0; at most 1 for cps; unused by ode.
        sigma_max: what `sde` puts for sigma in 1 - sigma where sigma is exactly 1; None refuses such a step.
            Only `sde` reads it. The engine must have sampled with the same value.

    Raises:
        ValueError: an argument outside its domain, sigma = 1 under `sde` without `sigma_max`, or the last step
            of a schedule (sigma_next = 0) under `cps` with eta > 0, whose std is 0.
    """
    if sde_type not in get_args(SdeType):
        raise ValueError(f"sde_type = {sde_type!r}; it must be one of {', '.join(get_args(SdeType))}")
    sigma, sigma_next = _checked_sigmas(sigma_B, sigma_next_B)
    dt = sigma_next - sigma
    if sde_type == "ode":
        return Transition(torch.ones_like(dt), dt, torch.zeros_like(dt))
    if sde_type == "cps":
        return _cps(sigma, sigma_next, eta)
    if sde_type == "sde":
        s = flow_sde_transition_std_dev_t(sigma, eta=eta, sigma_max=sigma_max)
    else:
        s = dance_sde_transition_std_dev_t(sigma, eta=eta)
    half_s2_over_sigma = s.square() / (2.0 * sigma)
    return Transition(
        x_scale_B=1.0 + half_s2_over_sigma * dt,
        v_scale_B=dt * (1.0 + half_s2_over_sigma * (1.0 - sigma)),
        std_B=s * torch.sqrt(-dt),
    )


def flow_sde_transition_std_dev_t(sigma_B: Tensor | float, *, eta: float, sigma_max: float | None = None) -> Tensor:
    """Flow-GRPO's diffusion coefficient s = eta sqrt(sigma / (1 - sigma)): [B] float64; arXiv 2505.05470.

    Infinite at sigma = 1, hence at step 0 of a schedule. There `sigma_max`, if given, stands for sigma in
    1 - sigma (and only there: the numerator stays 1), so s = eta / sqrt(1 - sigma_max).

    Raises:
        ValueError: sigma outside (0, 1], sigma = 1 without `sigma_max`, `sigma_max` outside (0, 1), eta < 0.
    """
    _check_eta(eta)
    sigma = _on_cpu("sigma", sigma_B)
    _check_all((sigma > 0.0) & (sigma <= 1.0), "sigma", sigma, "every sigma must lie in (0, 1]")
    remaining = 1.0 - sigma
    if sigma_max is not None:
        if not 0.0 < sigma_max < 1.0:
            raise ValueError(f"sigma_max = {sigma_max}: it must lie in (0, 1)")
        remaining = torch.where(sigma == 1.0, 1.0 - sigma_max, remaining)
    _check_all(
        remaining > 0.0,
        "sigma",
        sigma,
        "the noise of `sde` is infinite at sigma = 1: leave step 0 out of the trained steps, "
        "or give sigma_max, the clamp that the sampler used",
    )
    return eta * torch.sqrt(sigma / remaining)


def dance_sde_transition_std_dev_t(sigma_B: Tensor | float, *, eta: float) -> Tensor:
    """DanceGRPO's diffusion coefficient, the constant s = eta: [B] float64; arXiv 2505.07818.

    Equals Flow-GRPO's at sigma = 1/2. Raises ValueError for eta < 0.
    """
    _check_eta(eta)
    return torch.full_like(_on_cpu("sigma", sigma_B), eta)


def flow_sde_transition_std(
    sigma_B: Tensor | float,
    sigma_next_B: Tensor | float,
    *,
    eta: float,
    sde_type: SdeType = "sde",
    sigma_max: float | None = None,
) -> Tensor:
    """Standard deviation of x_next, `transition(...).std_B`: [B] float64 on the CPU. Same domain and errors."""
    return transition(sde_type, sigma_B, sigma_next_B, eta=eta, sigma_max=sigma_max).std_B


def flow_sde_transition_moments(
    x: Tensor,
    velocity: Tensor,
    sigma_B: Tensor | float,
    sigma_next_B: Tensor | float,
    *,
    eta: float,
    sde_type: SdeType = "sde",
    sigma_max: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Mean ([B, ...], as `transition_mean`) and std ([B] or [1], on x's device) of x_next given x.

    Arguments and errors: those of `transition` and `transition_mean`.
    """
    step = transition(sde_type, sigma_B, sigma_next_B, eta=eta, sigma_max=sigma_max)
    mean = transition_mean(x, velocity, step)
    return mean, step.std_B.to(device=mean.device, dtype=mean.dtype)


def transition_mean(x: Tensor, velocity: Tensor, t: Transition) -> Tensor:
    """x_scale * x + v_scale * velocity: [B, ...], float32 (float64 if either input is).

    Args:
        x: [B, ...], latents in any floating dtype.
        velocity: as x, the model's output for x.
        t: fields of [B] or [1]; moved to x's device.

    Raises:
        TypeError: integer tensors. ValueError: shapes or devices that differ, or a `t` for another B.
    """
    check_latents(t, x=x, velocity=velocity)
    dtype = _compute_dtype(x, velocity)
    x_scale, v_scale, _ = _broadcast(t, x, dtype)
    return x_scale * x.to(dtype) + v_scale * velocity.to(dtype)


def transition_sample(x: Tensor, velocity: Tensor, noise: Tensor, t: Transition) -> Tensor:
    """x_next = mean + std * noise, `noise` standard normal: [B, ...], float32 (float64 if an input is).

    Whoever stores the result in fewer bits must take the log-prob of the stored value. With std = 0 this is
    the Euler step. Arguments and errors as `transition_mean`.
    """
    check_latents(t, x=x, velocity=velocity, noise=noise)
    dtype = _compute_dtype(x, velocity, noise)
    x_scale, v_scale, std = _broadcast(t, x, dtype)
    return (x_scale * x.to(dtype) + v_scale * velocity.to(dtype)) + std * noise.to(dtype)


def transition_logp(x: Tensor, velocity: Tensor, x_next: Tensor, t: Transition) -> Tensor:
    """Log-density of `x_next` under `t`, averaged over a candidate's D elements: [B], float32 (float64 if an input is).

        logp = mean over D of -(x_next - mean)^2 / (2 std^2)  -  log(std)  -  log(2 pi) / 2

    All constants are kept, for every kind of step, so it is the true density (some published code leaves them
    out for cps; a ratio does not see them). The mean, not the sum, keeps the PPO ratio near 1 at any resolution.

    A candidate's bits depend on nothing but its own row: not on B, nor on its place in the batch.
    Differentiable in all three tensors. Arguments as `transition_mean`.

    Raises:
        ValueError: also where std is 0 (ode, or eta = 0): such a step has no density. Seen where `t` is on the CPU.
    """
    check_latents(t, x=x, velocity=velocity, x_next=x_next)
    dtype = _compute_dtype(x, velocity, x_next)
    mean = transition_mean(x, velocity, t).to(dtype)
    return flow_sde_log_prob(x_next, mean, t.std_B)


def flow_sde_log_prob(x_next: Tensor, mean: Tensor, std_B: Tensor) -> Tensor:
    """Gaussian log-density of `x_next`, averaged over D: [B]; formula, dtype and errors as `transition_logp`.

    Args:
        x_next, mean: [B, ...].
        std_B: [B] or [1], above 0.
    """
    require_floating(x_next=x_next, mean=mean, std_B=std_B)
    require_same_shape_and_device(mean=mean, x_next=x_next)
    _check_width(std_B, x_next.shape[0])
    check_density(std_B)
    dtype = _compute_dtype(x_next, mean)
    # log(std) in std's own precision, which is float64 for a Transition made by `transition`.
    log_norm_B = (-torch.log(std_B) - HALF_LOG_2PI).to(device=mean.device, dtype=dtype)
    std = std_B.to(device=mean.device, dtype=dtype).view(-1, *[1] * (mean.ndim - 1))
    z = (x_next.to(dtype) - mean.to(dtype)) / std
    return -0.5 * _RowMean.apply(z.square().flatten(1)) + log_norm_B


def replay_transition_logp(
    x: Tensor,
    velocity: Tensor,
    x_next: Tensor,
    sigma_B: Tensor | float,
    sigma_next_B: Tensor | float,
    *,
    sde_type: SdeType,
    eta: float,
    sigma_max: float | None = 0.99,
    backend: Backend = "torch",
    check_finite: bool | None = None,
) -> Tensor:
    """Log-prob of a stored transition under the velocity of the current policy: [B], nats per element.

    `transition` followed by `transition_logp`: their formulas, arguments and errors.

    Args:
        backend: "torch", the reference, on any device; "triton", one fused launch forward and one backward, on
            CUDA. They differ by rounding (some 1e-7), so one run keeps to one of them.
        check_finite: refuse a NaN or infinite log-prob. None looks on the CPU alone, because on a GPU looking
            waits for it; True always looks; False never.

    Raises:
        ValueError: also for a log-prob that is not finite.
    """
    if backend not in get_args(Backend):
        raise ValueError(f"backend = {backend!r}; it must be one of {', '.join(get_args(Backend))}")
    step = transition(sde_type, sigma_B, sigma_next_B, eta=eta, sigma_max=sigma_max)
    if backend == "triton":
        from flowgrpo_math.kernels import transition_logp as fused_transition_logp  # needs triton

        logp_B = fused_transition_logp(x, velocity, x_next, step)
    else:
        logp_B = transition_logp(x, velocity, x_next, step)
    require_finite("logp", logp_B, check_finite, "look for NaN in the stored latents and in the model's output")
    return logp_B


class _RowMean(torch.autograd.Function):
    """Mean of each row of [B, D] whose bits do not depend on B.

    `Tensor.mean` splits the work by the tensor's shape, so that a row's rounding changes with its neighbours;
    adding halves elementwise fixes the order, and its rounding error grows with log D only.
    """

    @staticmethod
    def forward(ctx, values_BD: Tensor) -> Tensor:
        ctx.D = D = values_BD.shape[1]
        sums = values_BD.clone(memory_format=torch.contiguous_format)
        width = 1 << (D.bit_length() - 1)  # the largest power of two that is at most D
        sums[:, : D - width] += sums[:, width:]
        while width > 1:
            width //= 2
            sums[:, :width] += sums[:, width : 2 * width]
        return sums[:, 0] / D

    @staticmethod
    def backward(ctx, *grads: Tensor) -> Tensor:
        (grad_B,) = grads
        return (grad_B / ctx.D)[:, None].expand(-1, ctx.D)


def _cps(sigma: Tensor, sigma_next: Tensor, eta: float) -> Transition:
    _check_eta(eta)
    if eta > 1.0:
        raise ValueError(f"eta = {eta}: cps takes it as a share of a quarter turn, in [0, 1]")
    if eta > 0.0:
        _check_all(sigma_next > 0.0, "sigma_next", sigma_next, "the last step of cps has std 0: sample it with `ode`")
    keep = sigma_next * math.cos(0.5 * math.pi * eta)
    return Transition(
        x_scale_B=(1.0 - sigma_next) + keep,
        v_scale_B=-sigma * (1.0 - sigma_next) + (1.0 - sigma) * keep,
        std_B=sigma_next * math.sin(0.5 * math.pi * eta),
    )


def _checked_sigmas(sigma_B: Tensor | float, sigma_next_B: Tensor | float) -> tuple[Tensor, Tensor]:
    """Both as [B] float64 on the CPU, 0 <= sigma_next < sigma <= 1."""
    sigma, sigma_next = _on_cpu("sigma", sigma_B), _on_cpu("sigma_next", sigma_next_B)
    if sigma.shape != sigma_next.shape and 1 not in (sigma.numel(), sigma_next.numel()):
        raise ValueError(f"sigma has {sigma.numel()} values and sigma_next {sigma_next.numel()}; they must be equal")
    sigma, sigma_next = torch.broadcast_tensors(sigma, sigma_next)
    _check_all((sigma > 0.0) & (sigma <= 1.0), "sigma", sigma, "every sigma must lie in (0, 1]")
    _check_all(sigma_next >= 0.0, "sigma_next", sigma_next, "every sigma_next must be at least 0")
    _check_all(
        sigma_next < sigma,
        "sigma_next",
        sigma_next,
        f"a step goes down: each must be below its sigma, {sigma.tolist()}",
    )
    return sigma, sigma_next


def _on_cpu(name: str, value: Tensor | float) -> Tensor:
    """[B] float64 on the CPU; a number becomes [1]."""
    # A plain number is float64 already; torch's default would round it to float32 on the way.
    tensor = torch.as_tensor(value, dtype=None if isinstance(value, Tensor) else torch.float64)
    if tensor.ndim > 1:
        raise ValueError(
            f"{name} has shape {list(tensor.shape)}; it must be a number or one-dimensional, one per candidate"
        )
    return tensor.detach().to(device="cpu", dtype=torch.float64).reshape(-1)


def _check_all(holds: Tensor, name: str, values: Tensor, rule: str) -> None:
    if not bool(holds.all()):  # NaN holds no comparison, so it fails here too
        raise ValueError(f"{name} = {values.tolist()}: {rule}")


def _check_eta(eta: float) -> None:
    if not (math.isfinite(eta) and eta >= 0.0):
        raise ValueError(f"eta = {eta}: the noise strength must be finite and at least 0")


def check_density(std_B: Tensor) -> None:
    # On a GPU, or inside a compiled graph, the look would cost a wait or break the graph.
    if std_B.device.type == "cpu" and not torch.compiler.is_compiling():
        _check_all(std_B > 0.0, "std", std_B, "a step without noise (ode, or eta = 0) has no log-prob")


def check_latents(t: Transition, **latents: Tensor) -> None:
    require_floating(**latents)
    require_same_shape_and_device(**latents)
    x = latents["x"]
    if x.ndim < 2 or x.numel() == 0:
        raise ValueError(f"x has shape {list(x.shape)}; it must be [B, ...] with at least one latent element each")
    _check_width(t.std_B, x.shape[0])


def _check_width(std_B: Tensor, B: int) -> None:
    if std_B.ndim != 1 or std_B.shape[0] not in (1, B):
        raise ValueError(f"the transition holds {list(std_B.shape)} steps for {B} candidates; give 1 or {B}")


def _compute_dtype(*tensors: Tensor) -> torch.dtype:
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32


def _broadcast(t: Transition, x: Tensor, dtype: torch.dtype) -> Transition:
    shape = (-1, *[1] * (x.ndim - 1))
    return Transition(*(c.view(shape) for c in t.to(x.device, dtype)))
