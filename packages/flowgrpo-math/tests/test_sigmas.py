import pytest
import torch
from flowgrpo_math import qwen_image_sigmas

# Computed apart from this code, in float64, to five digits.
GOLDEN = {
    (12, 576): [1, 0.94188, 0.87958, 0.81262, 0.74046, 0.66247, 0.57792, 0.48595, 0.38552, 0.27541, 0.15417, 0.02, 0],
    (10, 1024): [1, 0.92897, 0.85148, 0.76662, 0.67328, 0.57012, 0.45550, 0.32740, 0.18330, 0.02, 0],
}


@pytest.mark.parametrize(("num_steps", "tokens"), GOLDEN)
def test_golden_schedules_of_384_and_512_pixels(num_steps, tokens):
    sigmas = qwen_image_sigmas(num_steps, tokens)
    assert sigmas.dtype == torch.float64
    torch.testing.assert_close(sigmas, torch.tensor(GOLDEN[num_steps, tokens], dtype=torch.float64), atol=5e-6, rtol=0)


def test_without_the_terminal_stretch_the_second_sigma_is_larger():
    assert qwen_image_sigmas(12, 576, shift_terminal=None)[1].item() == pytest.approx(0.94854, abs=5e-6)


@pytest.mark.parametrize(("num_steps", "tokens"), [(12, 576), (10, 1024), (50, 4096), (4, 16), (8, 8192)])
def test_equals_diffusers_scheduler_with_the_settings_of_qwen_image(num_steps, tokens):
    diffusers = pytest.importorskip("diffusers")
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(
        base_image_seq_len=256,
        base_shift=0.5,
        max_image_seq_len=8192,
        max_shift=0.9,
        shift_terminal=0.02,
        use_dynamic_shifting=True,
        time_shift_type="exponential",
    )
    mu = 0.5 + (tokens - 256) * (0.9 - 0.5) / (8192 - 256)
    scheduler.set_timesteps(sigmas=torch.linspace(1.0, 1 / num_steps, num_steps).tolist(), mu=mu)
    # The scheduler works in float32, and its stretch divides by a difference: 3e-7 measured.
    torch.testing.assert_close(
        scheduler.sigmas.double(), qwen_image_sigmas(num_steps, tokens), atol=1e-6, rtol=0, check_device=False
    )


def test_goes_down_from_exactly_1_to_the_terminal_and_exactly_0():
    sigmas = qwen_image_sigmas(50, 4096)
    assert sigmas[0] == 1.0
    assert sigmas[-2].item() == pytest.approx(0.02, abs=1e-15)
    assert sigmas[-1] == 0.0
    assert bool((sigmas.diff() < 0).all())


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ((0, 576), {}),
        ((12, 0), {}),
        ((1, 576), {}),
        ((12, 576), {"shift_terminal": 0.0}),
        ((12, 576), {"shift_terminal": 1.0}),
        ((12, 576), {"max_image_seq_len": 256}),
    ],
)
def test_arguments_outside_the_domain_are_refused(arguments, options):
    with pytest.raises(ValueError):
        qwen_image_sigmas(*arguments, **options)


def test_one_step_without_a_stretch_is_1_then_0():
    assert qwen_image_sigmas(1, 576, shift_terminal=None).tolist() == [1.0, 0.0]
