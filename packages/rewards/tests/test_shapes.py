import dataclasses
import pickle
import time

import numpy as np
import pytest
from flowgrpo_rewards.protocol import Invalid, RewardSample, Value
from flowgrpo_rewards.shapes import (
    COLORS,
    SHAPES,
    CaptionError,
    ShapeScorer,
    ShapeSpec,
    all_specs,
    parse_caption,
    render,
)
from PIL import Image, ImageFilter

COMPONENTS = ("background", "color", "shape", "match", "correct")


def pictures(specs, *, size=24, seed=0):
    return [Image.fromarray(array) for array in render(specs, size=size, seed=seed)]


def samples_of(images, prompts):
    pairs = enumerate(zip(images, prompts, strict=True))
    return [RewardSample(image=image, prompt=prompt, group_index=0, slot=slot) for slot, (image, prompt) in pairs]


def mean_scores(images, specs):
    scores = ShapeScorer().score(samples_of(images, [spec.caption for spec in specs]))
    return {name: np.mean([score[name].value for score in scores]) for name in COMPONENTS}


def with_other(specs, field):
    """The specs with one attribute changed to another value that keeps the caption valid."""
    values = SHAPES if field == "shape" else tuple(COLORS)
    changed = []
    for spec in specs:
        taken = {getattr(spec, field)} | (set() if field == "shape" else {spec.color, spec.background})
        other = next(value for value in values if value not in taken)
        changed.append(dataclasses.replace(spec, **{field: other}))
    return changed


def test_every_caption_of_the_world_reads_back_as_its_spec():
    specs = all_specs()
    assert len(set(specs)) == len(specs) == 120
    assert [parse_caption(spec.caption) for spec in specs] == list(specs)
    assert parse_caption("  A Red  circle on a BLUE background ") == ShapeSpec("red", "circle", "blue")


@pytest.mark.parametrize(
    "caption",
    [
        "",
        "a cat",
        "a pink circle on a blue background",
        "a red star on a blue background",
        "a red circle on a red background",
        "a red circle on a blue background, detailed",
    ],
)
def test_a_caption_outside_the_grammar_is_refused_with_the_caption(caption):
    with pytest.raises(CaptionError) as caught:
        parse_caption(caption)
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (copy.caption, copy.why, str(copy)) == (caption, caught.value.why, str(caught.value))


def test_the_same_seed_renders_the_same_bytes_and_another_seed_does_not():
    specs = all_specs()
    assert np.array_equal(render(specs, size=24, seed=3), render(specs, size=24, seed=3))
    assert not np.array_equal(render(specs, size=24, seed=3), render(specs, size=24, seed=4))


@pytest.mark.parametrize("size", [24, 32, 64])
def test_true_renderings_score_near_one_in_every_component(size):
    specs = all_specs()
    mean = mean_scores(pictures(specs, size=size), specs)
    assert mean["correct"] == 1.0
    assert min(mean[name] for name in ("background", "color", "shape")) > 0.9
    assert mean["match"] > 0.85


@pytest.mark.parametrize("component", ["background", "color", "shape"])
def test_a_wrong_attribute_lowers_its_own_component_and_no_other(component):
    specs = all_specs()
    right, wrong = mean_scores(pictures(specs), specs), mean_scores(pictures(with_other(specs, component)), specs)
    assert wrong[component] < 0.1
    assert wrong["match"] < 0.1
    assert wrong["correct"] == 0.0
    for other in {"background", "color", "shape"} - {component}:
        assert abs(wrong[other] - right[other]) < 0.02


def test_a_blank_picture_keeps_only_its_background():
    specs = all_specs()
    blank = [Image.new("RGB", (24, 24), COLORS[spec.background]) for spec in specs]
    mean = mean_scores(blank, specs)
    assert mean["background"] > 0.99
    assert (mean["color"], mean["shape"], mean["match"], mean["correct"]) == (0.0, 0.0, 0.0, 0.0)


def test_noise_scores_nothing():
    specs = all_specs()
    noise = np.random.default_rng(0).integers(0, 256, (len(specs), 24, 24, 3), dtype=np.uint8)
    mean = mean_scores([Image.fromarray(array) for array in noise], specs)
    assert max(mean.values()) < 0.01


def test_a_blur_lowers_the_shape():
    specs = all_specs()
    blurred = [image.filter(ImageFilter.GaussianBlur(2)) for image in pictures(specs)]
    assert mean_scores(blurred, specs)["shape"] < 0.6


def test_dots_of_the_right_colour_are_no_shape():
    specs = all_specs()
    dotted = []
    for spec in specs:
        array = np.full((24, 24, 3), COLORS[spec.background], dtype=np.uint8)
        array[4:20:3, 4:20:3] = COLORS[spec.color]
        dotted.append(Image.fromarray(array))
    assert mean_scores(dotted, specs)["shape"] < 0.01


def test_a_speck_of_the_right_colour_is_no_shape():
    specs = all_specs()
    specks = []
    for spec in specs:
        array = np.full((24, 24, 3), COLORS[spec.background], dtype=np.uint8)
        array[10:13, 10:13] = COLORS[spec.color]
        specks.append(Image.fromarray(array))
    assert mean_scores(specks, specs)["shape"] < 0.01


def test_a_second_object_lowers_the_shape():
    specs = all_specs()
    one = render(specs, size=24, seed=0)
    for array, spec in zip(one, specs, strict=True):
        array[3:8, 2:7] = COLORS[spec.color]
    mean = mean_scores([Image.fromarray(array) for array in one], specs)
    assert mean["shape"] < 0.7


def test_a_slightly_noisy_picture_scores_between_a_clean_and_a_noisier_one():
    """The components must fall step by step: a reward without slope teaches nothing."""
    specs = all_specs()
    clean = render(specs, size=24, seed=0)
    noise = np.random.default_rng(0).normal(0.0, 1.0, clean.shape)
    means = [
        mean_scores([Image.fromarray(array) for array in (clean + std * noise).clip(0, 255).astype(np.uint8)], specs)
        for std in (0.0, 12.0, 24.0, 48.0)
    ]
    for name in ("background", "color", "shape"):
        values = [mean[name] for mean in means]
        assert values == sorted(values, reverse=True)
        assert values[0] > values[1] + 0.02 > values[2] + 0.04 > values[3] + 0.06


def test_a_score_does_not_depend_on_the_other_pictures_of_the_call():
    specs = all_specs()[:10]
    images = pictures(specs[:5]) + pictures(specs[5:], size=32)
    prompts = [spec.caption for spec in specs]
    samples = samples_of(images, prompts)
    together = ShapeScorer().score(samples)
    alone = [ShapeScorer().score([sample])[0] for sample in samples]
    assert together == alone


def test_a_path_and_an_array_score_as_the_picture_does(tmp_path):
    spec = all_specs()[0]
    [image] = pictures([spec])
    image.save(tmp_path / "picture.png")
    forms = [image, tmp_path / "picture.png", str(tmp_path / "picture.png"), np.asarray(image)]
    first, *others = ShapeScorer().score(samples_of(forms, [spec.caption] * len(forms)))
    assert others == [first] * 3


def test_a_foreign_prompt_or_a_tiny_picture_is_invalid_and_spoils_no_neighbour():
    spec = all_specs()[0]
    [image] = pictures([spec])
    images = [image, image, Image.new("RGB", (6, 6))]
    good, foreign, tiny = ShapeScorer().score(samples_of(images, [spec.caption, "a cat", spec.caption]))
    assert good["correct"] == Value(1.0)
    for result in (foreign, tiny):
        assert set(result) == set(COMPONENTS)
        assert all(isinstance(value, Invalid) for value in result.values())
    assert "a cat" in foreign["shape"].reason
    assert "6 x 6" in tiny["shape"].reason


def test_128_pictures_are_scored_well_within_a_rollout():
    """0.02 s measured on one core; the bound leaves room for a loaded machine."""
    specs = [*all_specs(), *all_specs()[:8]]
    samples = samples_of(pictures(specs), [spec.caption for spec in specs])
    started = time.process_time()
    ShapeScorer().score(samples)
    assert time.process_time() - started < 0.3
