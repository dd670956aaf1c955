import pytest
import torch
from flowgrpo_math.kernels import _rows
from flowgrpo_math.kernels import transition_logp as fused
from flowgrpo_math.testing import INTERPRETED, draw_step
from flowgrpo_math.transition import Transition, transition
from flowgrpo_math.transition import transition_logp as reference

# Nats per element, against the float64 reference; 4e-7 was measured (float32 and bf16 inputs, H200 and interpreter).
# The recipe's eps_clip is 1e-4, so an error near 1e-5 would already move candidates across the clip.
ATOL = 2e-6
# Relative, of a gradient vector: rounding of the gradient's own dtype.
GRADIENT_RTOL = {torch.float32: 2e-6, torch.bfloat16: 6e-3, torch.float16: 2e-3}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Latent elements below, at and past a block and a chunk, and of several chunks.
SIZES = [(1, 1), (_rows.BLOCK // 64, 64), (_rows.CHUNK // 64, 64), (_rows.CHUNK // 64 + 1, 64), (1, _rows.CHUNK + 3)]
SEVERAL = 5 * _rows.CHUNK // 128  # tokens of 64 channels: two chunks and a half
on_gpu_only = pytest.mark.skipif(INTERPRETED, reason="needs real launches")


def double(tensor):
    return tensor.detach().double()


def relative_error(got, expected):
    return ((double(got) - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("P", "C"), SIZES)
@pytest.mark.usefixtures("poisoned")
def test_log_prob_equals_the_float64_reference(P, C, dtype, device):
    x, velocity, _, x_next, t = draw_step(3, P, C, dtype=dtype, device=device)
    expected = reference(double(x), double(velocity), double(x_next), t)
    torch.testing.assert_close(fused(x, velocity, x_next, t).double(), expected, atol=ATOL, rtol=0)


@pytest.mark.parametrize("sde_type", ["sde", "dance", "cps"])
def test_one_kernel_serves_every_kind_of_step(sde_type, device):
    x, velocity, _, x_next, t = draw_step(4, SEVERAL, device=device, sde_type=sde_type)
    expected = reference(double(x), double(velocity), double(x_next), t)
    torch.testing.assert_close(fused(x, velocity, x_next, t).double(), expected, atol=ATOL, rtol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("P", "C"), [(1, 1), (_rows.CHUNK // 64 + 1, 64)])
@pytest.mark.usefixtures("poisoned")
def test_gradients_equal_the_float64_reference(P, C, dtype, device):
    x, velocity, _, x_next, t = draw_step(3, P, C, dtype=dtype, device=device)
    # Large enough that float16 gradients, each divided by D, are no subnormals.
    grad_B = torch.tensor([1.0, -2.0, 3.0], device=device) * P * C
    inputs = [tensor.requires_grad_() for tensor in (x, velocity, x_next)]
    exact = [double(tensor).requires_grad_() for tensor in inputs]
    got = torch.autograd.grad(fused(*inputs, t), inputs, grad_B)
    expected = torch.autograd.grad(reference(*exact, t), exact, grad_B.double())
    for grad, oracle in zip(got, expected, strict=True):
        assert grad.dtype == dtype
        assert relative_error(grad, oracle) < GRADIENT_RTOL[dtype]


def test_only_the_inputs_that_need_a_gradient_get_one(device):
    x, velocity, _, x_next, t = draw_step(2, 5, device=device)
    fused(x, velocity.requires_grad_(), x_next, t).sum().backward()  # sum: a gradient of stride 0
    assert x.grad is None
    assert x_next.grad is None
    exact = double(velocity).requires_grad_()
    reference(double(x), exact, double(x_next), t).sum().backward()
    assert relative_error(velocity.grad, exact.grad) < GRADIENT_RTOL[torch.float32]


def test_no_gradient_is_recorded_under_no_grad(device):
    x, velocity, _, x_next, t = draw_step(2, 5, device=device)
    with torch.no_grad():
        assert not fused(x, velocity.requires_grad_(), x_next, t).requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_candidate_has_the_same_bits_alone_and_in_a_batch(dtype, device):
    x, velocity, _, x_next, t = draw_step(6, SEVERAL, dtype=dtype, device=device)
    velocity.requires_grad_()
    together = fused(x, velocity, x_next, t)
    (grad,) = torch.autograd.grad(together.sum(), velocity)
    for b in (0, 5):
        one = slice(b, b + 1)
        alone = velocity.detach()[one].clone().requires_grad_()
        logp = fused(x[one], alone, x_next[one], Transition(*(c[one] for c in t)))
        assert torch.equal(logp, together[one])
        assert torch.equal(torch.autograd.grad(logp.sum(), alone)[0], grad[one])


def test_repeated_runs_give_the_same_bits(device):
    x, velocity, _, x_next, t = draw_step(3, SEVERAL, device=device)
    first = fused(x, velocity, x_next, t)
    assert all(torch.equal(fused(x, velocity, x_next, t), first) for _ in range(2 if INTERPRETED else 200))


def strided_views(tensor):
    """The same values [B, P, C] with other strides, and whether the kernel may read them where they lie."""
    B, P, C = tensor.shape
    trajectory = torch.full((B, 5, P, C), float("nan"), dtype=tensor.dtype, device=tensor.device)
    trajectory[:, 3] = tensor
    tokens = torch.full((B, P + 7, C), float("nan"), dtype=tensor.dtype, device=tensor.device)
    tokens[:, 7:] = tensor
    channels = torch.full((B, P, 2 * C), float("nan"), dtype=tensor.dtype, device=tensor.device)
    channels[..., :C] = tensor
    misaligned = torch.full((B * P * C + 1,), float("nan"), dtype=tensor.dtype, device=tensor.device)
    misaligned[1:] = tensor.flatten()
    return {
        "a state of a trajectory": trajectory[:, 3],
        "a slice of tokens": tokens[:, 7:],
        "a slice of channels": channels[..., :C],
        "channels before tokens": tensor.transpose(1, 2).contiguous().transpose(1, 2),
        "an odd address": misaligned[1:].view(B, P, C),
    }


def test_strided_inputs_give_the_bits_of_contiguous_ones_without_a_copy(device):
    x, velocity, _, x_next, t = draw_step(2, SEVERAL, dtype=torch.bfloat16, device=device)
    expected = fused(x, velocity, x_next, t)
    for name, view in strided_views(velocity).items():
        assert _rows.as_rows(view).tensor.data_ptr() == view.data_ptr(), name
        assert torch.equal(fused(x, view, x_next, t), expected), name


def test_inputs_of_three_strides_are_copied_and_give_the_same_bits(device):
    x, velocity, _, x_next, t = draw_step(2, 24, device=device)
    grid = velocity.view(2, 4, 6, 64).permute(0, 3, 1, 2)
    assert _rows.as_rows(grid[:, :, :, :5]).tensor.is_contiguous()
    others = (tensor.view(2, 4, 6, 64).permute(0, 3, 1, 2)[..., :5] for tensor in (x, x_next))
    x_grid, x_next_grid = others
    got = fused(x_grid, grid[..., :5], x_next_grid, t)
    assert torch.equal(got, fused(x_grid.contiguous(), grid[..., :5].contiguous(), x_next_grid.contiguous(), t))


def test_latents_in_float32_and_a_velocity_in_bf16_mix(device):
    x, velocity, _, x_next, t = draw_step(3, SEVERAL, device=device)
    velocity = velocity.bfloat16().requires_grad_()
    logp = fused(x, velocity, x_next, t)
    expected = reference(double(x), double(velocity), double(x_next), t)
    torch.testing.assert_close(logp.double(), expected, atol=ATOL, rtol=0)
    assert torch.autograd.grad(logp.sum(), velocity)[0].dtype == torch.bfloat16


def test_one_step_shared_by_all_candidates_equals_a_step_for_each(device):
    x, velocity, _, _, _ = draw_step(3, SEVERAL, device=device)
    shared = transition("dance", 0.6, 0.5, eta=0.7)
    each = transition("dance", torch.full((3,), 0.6), torch.full((3,), 0.5), eta=0.7).to(device)
    x_next = 0.9 * x
    torch.testing.assert_close(
        fused(x, velocity, x_next, shared), fused(x, velocity, x_next, each), atol=1e-6, rtol=1e-6
    )


def test_coefficients_of_different_strides_are_read_right(device):
    x, velocity, _, x_next, t = draw_step(3, SEVERAL, device=device)
    t = t.to(device)
    padded = torch.full((6,), float("nan"), device=device)
    padded[::2] = t.x_scale_B
    assert torch.equal(fused(x, velocity, x_next, t._replace(x_scale_B=padded[::2])), fused(x, velocity, x_next, t))


def test_compiles_into_one_graph_with_the_same_bits_and_gradients(device):
    x, velocity, _, x_next, t = draw_step(3, SEVERAL, device=device)
    t = t.to(device)
    velocity.requires_grad_()

    def loss(x, velocity, x_next, t):
        return (fused(x, velocity, x_next, t) * 2.0).sum()

    backend = "aot_eager" if device == "cpu" else "inductor"
    compiled = torch.compile(loss, fullgraph=True, backend=backend)
    got, expected = compiled(x, velocity, x_next, t), loss(x, velocity, x_next, t)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-6)
    assert torch.equal(torch.autograd.grad(got, velocity)[0], torch.autograd.grad(expected, velocity)[0])


def test_the_operators_pass_torchs_own_checks(device):
    x, velocity, _, x_next, t = draw_step(2, 9, device=device)
    arguments = (x, velocity.requires_grad_(), x_next, *t.to(device))
    torch.library.opcheck(torch.ops.flowgrpo.transition_logp.default, arguments)
    grad_B = torch.ones(2, device=device)
    detached = tuple(argument.detach() for argument in arguments)
    torch.library.opcheck(
        torch.ops.flowgrpo.transition_logp_backward.default,
        (grad_B, *detached, [False, True, False]),
        test_utils=("test_schema", "test_faketensor"),
    )


def test_bad_inputs_are_refused(device):
    x, velocity, _, x_next, t = draw_step(3, 5, device=device)
    with pytest.raises(TypeError):
        fused(x.long(), velocity, x_next, t)
    with pytest.raises(TypeError) as float64:
        fused(x.double(), velocity, x_next, t)
    assert "x has dtype torch.float64" in str(float64.value)
    with pytest.raises(ValueError):
        fused(x, velocity[:, :4], x_next, t)
    with pytest.raises(ValueError):
        fused(x, velocity, x_next, Transition(*(c[:2] for c in t)))
    with pytest.raises(ValueError):
        fused(x, velocity, x_next, transition("ode", 0.5, 0.4, eta=0.7))


@on_gpu_only
def test_cpu_and_mixed_devices_are_refused():
    x, velocity, _, x_next, t = draw_step(3, 5)
    with pytest.raises(ValueError):
        fused(x, velocity, x_next, t)
    with pytest.raises(ValueError):
        fused(x.cuda(), velocity, x_next.cuda(), t)


@on_gpu_only
def test_one_launch_forward_and_one_backward():
    x, velocity, _, x_next, t = draw_step(3, 4096, dtype=torch.bfloat16, device="cuda")
    t = t.to("cuda")
    velocity.requires_grad_()
    grad_B = torch.ones(3, device="cuda")

    def both():
        return torch.autograd.grad(fused(x, velocity, x_next, t), velocity, grad_B)

    both()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        both()
        torch.cuda.synchronize()
    launched = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert len(launched) == 2, launched


@on_gpu_only
def test_a_captured_graph_and_concurrent_streams_give_the_bits_of_a_plain_call():
    x, velocity, _, x_next, t = draw_step(24, 4096, dtype=torch.bfloat16, device="cuda")
    t = t.to("cuda")
    expected = fused(x, velocity, x_next, t)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = fused(x, velocity, x_next, t)
    streams = [torch.cuda.Stream() for _ in range(4)]
    results = []
    for _ in range(25):
        graph.replay()
        for stream in streams:
            with torch.cuda.stream(stream):
                results.append(fused(x, velocity, x_next, t))
    torch.cuda.synchronize()
    assert torch.equal(captured, expected)
    assert all(torch.equal(result, expected) for result in results)
    assert all(not counters.any() for counters in _rows._counters.values())
