"""The world of captioned shapes: its caption grammar, a renderer, and a scorer that measures pixels.

    caption    = article COLOR SHAPE "on" article COLOR "background"
    example      "a red circle on a blue background"

Numpy and pillow only, so the scorer runs in a light process. Everything is deterministic: the renderer by its
seed, the scorer always.

Shapes: B pictures, H x W pixels, C = 3 colour channels, K kinds of shape. Units: channels in [0, 1]; positions in
half-widths of the picture, so -1 and 1 are its edges; y points down.
"""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from flowgrpo_rewards.protocol import Invalid, RewardSample, SampleResult, Value

COLORS: Mapping[str, tuple[int, int, int]] = {
    "red": (220, 40, 40),
    "yellow": (250, 220, 50),
    "green": (50, 170, 70),
    "blue": (40, 90, 225),
    "purple": (170, 50, 180),
    "white": (245, 245, 245),
}
SHAPES: tuple[str, ...] = ("circle", "square", "triangle", "cross")

_COLOR_NAMES = tuple(COLORS)
_COLOR_VALUES = np.array(list(COLORS.values()), dtype=np.float32) / 255.0
_CAPTION = re.compile(r"an? (\w+) (\w+) on an? (\w+) background")


class CaptionError(ValueError):
    """A caption outside the grammar. Carries the caption and what is wrong with it."""

    def __init__(self, caption: str, why: str) -> None:
        super().__init__(caption, why)
        self.caption = caption
        self.why = why

    def __str__(self) -> str:
        return (
            f"caption {self.caption!r}: {self.why}. Write 'a COLOR SHAPE on a COLOR background' with two different "
            f"colors of {', '.join(COLORS)} and a shape of {', '.join(SHAPES)}"
        )


@dataclass(frozen=True, slots=True)
class ShapeSpec:
    """What a caption asks for: one shape of one colour on a background of another."""

    color: str
    shape: str
    background: str

    @property
    def caption(self) -> str:
        """The caption that `parse_caption` reads back as this spec."""
        return f"a {self.color} {self.shape} on a {self.background} background"


def all_specs() -> tuple[ShapeSpec, ...]:
    """The 120 captioned pictures of this world, in a fixed order."""
    return tuple(ShapeSpec(c, s, b) for c in COLORS for s in SHAPES for b in COLORS if b != c)


def parse_caption(caption: str) -> ShapeSpec:
    """The spec of `caption`; case and outer white space do not matter. Raises CaptionError outside the grammar."""
    found = _CAPTION.fullmatch(" ".join(caption.lower().split()))
    if found is None:
        raise CaptionError(caption, "it does not follow the grammar")
    color, shape, background = found.groups()
    for name in (color, background):
        if name not in COLORS:
            raise CaptionError(caption, f"{name!r} is not a color of this world")
    if shape not in SHAPES:
        raise CaptionError(caption, f"{shape!r} is not a shape of this world")
    if color == background:
        raise CaptionError(caption, f"a {color} shape on a {color} background cannot be seen")
    return ShapeSpec(color, shape, background)


def render(specs: Sequence[ShapeSpec], *, size: int, seed: int | None) -> np.ndarray:
    """Pictures of `specs`: uint8 [B, size, size, 3].

    `seed` fixes the jitter of place (up to 0.15), scale (0.48 to 0.66) and colours (std 0.03 a channel); None draws
    each shape in the middle at scale 0.57 in its exact colours. Edges are anti-aliased over one pixel.
    """
    B = len(specs)
    kind_B = np.array([SHAPES.index(spec.shape) for spec in specs], dtype=np.int64)
    color_BC = _COLOR_VALUES[[_COLOR_NAMES.index(spec.color) for spec in specs]]
    ground_BC = _COLOR_VALUES[[_COLOR_NAMES.index(spec.background) for spec in specs]]
    center_B2, scale_B = np.zeros((B, 2), np.float32), np.full(B, 0.57, np.float32)
    if seed is not None:
        rng = np.random.default_rng(seed)
        center_B2 = rng.uniform(-0.15, 0.15, (B, 2)).astype(np.float32)
        scale_B = rng.uniform(0.48, 0.66, B).astype(np.float32)
        color_BC = color_BC + rng.normal(0.0, 0.03, (B, 3)).astype(np.float32)
        ground_BC = ground_BC + rng.normal(0.0, 0.03, (B, 3)).astype(np.float32)
    cover_BHW = _coverage(kind_B, center_B2, scale_B, (size, size))[..., None]
    picture_BHWC = cover_BHW * color_BC[:, None, None] + (1.0 - cover_BHW) * ground_BC[:, None, None]
    return np.rint(picture_BHWC.clip(0.0, 1.0) * 255.0).astype(np.uint8)


# --------------------------------------------------------------------------- geometry

# Of each shape at scale 1: its area, and how far below the middle of its box its centroid lies.
_AREA_K = np.array([np.pi, 1.76**2, 0.9 * 1.8 * 2.0 / 3**0.5, 4 * 0.66 - 0.66**2], dtype=np.float32)
_DROP_K = np.array([0.0, 0.0, 0.3, 0.0], dtype=np.float32)


def _depth(kind_B: np.ndarray, x_BHW: np.ndarray, y_BHW: np.ndarray) -> np.ndarray:
    """How deep a point lies inside each shape at scale 1, below 0 outside: [B, H, W]."""
    depth_BHW = np.empty_like(x_BHW)
    for kind, name in enumerate(SHAPES):
        rows = kind_B == kind
        x, y = np.abs(x_BHW[rows]), y_BHW[rows]
        if name == "circle":
            depth = 1.0 - np.sqrt(x * x + y * y)
        elif name == "square":
            depth = 0.88 - np.maximum(x, np.abs(y))
        elif name == "triangle":  # equilateral, standing on a side
            below = y - _DROP_K[kind]
            depth = np.minimum(0.6 - below, 0.6 + 0.5 * below - 0.75**0.5 * x)
        else:  # two bars, three times as long as wide
            y = np.abs(y)
            depth = np.minimum(1.0 - np.maximum(x, y), 0.33 - np.minimum(x, y))
        depth_BHW[rows] = depth
    return depth_BHW


def _grid(size: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Pixel centres (x, y), each [H, W], in half-lengths of the shorter side."""
    (H, W), half = size, min(size) / 2.0
    y, x = ((np.arange(n, dtype=np.float32) + 0.5 - n / 2.0) / half for n in (H, W))
    return np.broadcast_to(x, (H, W)), np.broadcast_to(y[:, None], (H, W))


def _coverage(kind_B: np.ndarray, center_B2: np.ndarray, scale_B: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Share of each pixel that the shape covers: [B, H, W]."""
    x_HW, y_HW = _grid(size)
    scale_B11 = scale_B[:, None, None].astype(np.float32)
    x_BHW = (x_HW - center_B2[:, 0, None, None]) / scale_B11
    y_BHW = (y_HW - center_B2[:, 1, None, None]) / scale_B11
    pixels_per_unit = scale_B11 * (min(size) / 2.0)
    return (_depth(kind_B, x_BHW, y_BHW) * pixels_per_unit + 0.5).clip(0.0, 1.0)


# --------------------------------------------------------------------------- scorer

# Distances between colours are Euclidean over RGB in [0, 1]; the closest two colours of the world lie 0.57 apart.
_COLOR_WIDTH = 0.25  # a distance that lowers a colour component to 1/e
_COLOR_CORRECT = 0.28  # the farthest that a strictly correct colour may lie
_GROUND_NOISE = 0.10  # mean deviation inside the border that lowers `background` to 1/e
_OBJECT_NOISE = 0.20  # mean deviation inside the object that lowers `color` to 1/e
_CONTRAST = 0.25  # an object differs from its background at least by this
_FIT_RANGE = (0.55, 0.93)  # explained share of the variance at which the fit counts 0 and 1
_FIT_CORRECT = 0.85
_MARGIN = 0.03  # explained share by which the asked shape must beat another to be e times as likely
_SIZE_RANGE = (0.04, 0.08)  # share of the picture at which an object counts 0 and 1: a dot is no circle


class ShapeScorer:
    """How well a picture shows the caption's shape, its colour and its background.

    The picture is explained as one flat shape on a flat ground: the ground's colour is the median of a two-pixel
    border, the object's the median of what differs from it; place and scale of each candidate shape follow from the
    centroid and the area of what differs. Components, each in [0, 1]:

        background  exp(-(d / 0.25)^2) of the ground's distance d to the asked colour, times evenness of the border
        color       the same of the object's colour, times evenness of the object
        shape       share of the picture's variance that the asked shape explains, times its softmax
                    probability among all shapes by that share, times a ramp that refuses dots
        match       background * color * shape: high only where all three are
        correct     1 if the nearest colours, the best shape and the fit are all right, else 0

    `match` is the one to train on. Once `background` and `color` are nearly solved, normalising each component inside
    its group turns their last differences into full-size advantages, which drown what `shape` still has to say.

    Blurs, dots, textures and extra objects are variance that no shape explains, so they lower `shape`.

    Args:
        model_path, device: accepted for the scorer protocol; this scorer has no weights.
    """

    required_tracks: tuple[str, ...] = ("image",)
    components: tuple[str, ...] = ("background", "color", "shape", "match", "correct")

    def __init__(self, *, model_path: str | None = None, device: str = "cpu") -> None:
        del model_path, device

    def score(self, samples: Sequence[RewardSample]) -> list[SampleResult]:
        """One entry per component and sample; pictures of one call may differ in size.

        A prompt outside the grammar, or a picture with a side under 8 pixels, is `Invalid` in every component.
        """
        results: list[SampleResult] = [{} for _ in samples]
        rows_by_size: dict[tuple[int, ...], list[int]] = {}
        pictures = [_rgb(sample.image) for sample in samples]
        specs: dict[int, ShapeSpec] = {}
        for row, (sample, picture) in enumerate(zip(samples, pictures, strict=True)):
            try:
                specs[row] = parse_caption(sample.prompt)
                _check_size(picture.shape[:2])
                rows_by_size.setdefault(picture.shape, []).append(row)
            except ValueError as error:
                results[row] = dict.fromkeys(self.components, Invalid(str(error)))
        for rows in rows_by_size.values():
            parts = score_pixels(np.stack([pictures[row] for row in rows]), [specs[row] for row in rows])
            for position, row in enumerate(rows):
                results[row] = {name: Value(float(value_B[position])) for name, value_B in parts.items()}
        return results


def _rgb(image: Any) -> np.ndarray:
    """uint8 [H, W, 3] of a picture, its path, or an array or CPU tensor of that form."""
    if isinstance(image, str | os.PathLike):
        with Image.open(image) as opened:
            return np.asarray(opened.convert("RGB"))
    if isinstance(image, Image.Image):
        return np.asarray(image.convert("RGB"))
    array = np.asarray(image)
    if array.dtype != np.uint8 or array.ndim != 3 or array.shape[2] != 3:
        raise TypeError(f"a picture must be uint8 [height, width, 3], got {array.dtype} {list(array.shape)}")
    return array


def _check_size(size: tuple[int, ...]) -> None:
    if min(size) < 8:
        raise ValueError(f"a picture of {size[0]} x {size[1]} pixels cannot be measured: use 8 x 8 or more")


def score_pixels(picture_BHWC: np.ndarray, specs: Sequence[ShapeSpec]) -> dict[str, np.ndarray]:
    """The components of ShapeScorer, each [B] float32, for uint8 pictures of one size, 8 x 8 or more."""
    _check_size(picture_BHWC.shape[1:3])
    picture_BHWC = picture_BHWC.astype(np.float32) / 255.0
    rows = np.arange(len(specs))
    color_B = np.array([_COLOR_NAMES.index(spec.color) for spec in specs])
    ground_B = np.array([_COLOR_NAMES.index(spec.background) for spec in specs])
    kind_B = np.array([SHAPES.index(spec.shape) for spec in specs])

    ground_BC, ground_noise_B = _ground(picture_BHWC)
    object_BC, object_noise_B = _object(picture_BHWC, ground_BC)
    axis_BC = object_BC - ground_BC
    visible_B = np.linalg.norm(axis_BC, axis=1) > _CONTRAST
    fit_BK, size_B = _fits(picture_BHWC, ground_BC, axis_BC)

    to_ground_BK = np.linalg.norm(ground_BC[:, None] - _COLOR_VALUES, axis=2)
    to_color_BK = np.linalg.norm(object_BC[:, None] - _COLOR_VALUES, axis=2)
    d_ground_B, d_color_B = to_ground_BK[rows, ground_B], to_color_BK[rows, color_B]
    background = np.exp(-((d_ground_B / _COLOR_WIDTH) ** 2) - (ground_noise_B / _GROUND_NOISE) ** 2)
    color = visible_B * np.exp(-((d_color_B / _COLOR_WIDTH) ** 2) - (object_noise_B / _OBJECT_NOISE) ** 2)

    fit_B = fit_BK[rows, kind_B]
    odds_BK = np.exp((fit_BK - fit_BK.max(axis=1, keepdims=True)) / _MARGIN)
    likely_B = odds_BK[rows, kind_B] / odds_BK.sum(axis=1)
    shape = visible_B * likely_B * _ramp(fit_B, _FIT_RANGE) * _ramp(size_B, _SIZE_RANGE)

    correct = visible_B & (d_ground_B < _COLOR_CORRECT) & (d_color_B < _COLOR_CORRECT)
    correct &= (to_ground_BK.argmin(axis=1) == ground_B) & (to_color_BK.argmin(axis=1) == color_B)
    correct &= (fit_BK.argmax(axis=1) == kind_B) & (fit_B > _FIT_CORRECT) & (size_B > _SIZE_RANGE[1])
    match = background * color * shape
    parts = {"background": background, "color": color, "shape": shape, "match": match, "correct": correct}
    return {name: value_B.astype(np.float32) for name, value_B in parts.items()}


def _ground(picture_BHWC: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Median colour of the two-pixel border, [B, C], and the mean deviation from it, [B]."""
    border = np.ones(picture_BHWC.shape[1:3], dtype=bool)
    border[2:-2, 2:-2] = False
    pixels_BNC = picture_BHWC[:, border]
    ground_BC = np.median(pixels_BNC, axis=1)
    return ground_BC, np.abs(pixels_BNC - ground_BC[:, None]).mean(axis=(1, 2))


def _object(picture_BHWC: np.ndarray, ground_BC: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Median colour of the pixels far from the ground, [B, C], and the mean deviation from it, [B].

    Far is over half the distance of the 95th percentile, so that a few stray pixels do not set the scale.
    """
    B, H, W, C = picture_BHWC.shape
    distance_BHW = np.linalg.norm(picture_BHWC - ground_BC[:, None, None], axis=3)
    far_B = np.quantile(distance_BHW.reshape(B, -1), 0.95, axis=1)
    inside_BN = (distance_BHW >= 0.5 * far_B[:, None, None]).reshape(B, H * W)
    pixels_BCN = picture_BHWC.reshape(B, H * W, C).transpose(0, 2, 1)
    sorted_BCN = np.sort(np.where(inside_BN[:, None], pixels_BCN, np.inf), axis=2)
    count_B = inside_BN.sum(axis=1)
    object_BC = np.take_along_axis(sorted_BCN, ((count_B - 1) // 2)[:, None, None], axis=2)[:, :, 0]
    deviation_BN = np.abs(pixels_BCN - object_BC[:, :, None]).mean(axis=1)
    return object_BC, (deviation_BN * inside_BN).sum(axis=1) / count_B


def _fits(picture_BHWC: np.ndarray, ground_BC: np.ndarray, axis_BC: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Share of the variance around the ground that each shape explains, [B, K], and the object's size, [B].

    The object's mass is each pixel's place on the line from the ground's to the object's colour, clipped to [0, 1].
    `size` is its share of the picture.
    """
    B, H, W, _ = picture_BHWC.shape
    offset_BHWC = picture_BHWC - ground_BC[:, None, None]
    length2_B = np.maximum((axis_BC**2).sum(axis=1), 1e-6)
    mass_BHW = (np.einsum("bhwc,bc->bhw", offset_BHWC, axis_BC) / length2_B[:, None, None]).clip(0.0, 1.0)
    total_B = np.maximum(mass_BHW.sum(axis=(1, 2)), 1e-3)
    x_HW, y_HW = _grid((H, W))
    center_x_B, center_y_B = ((mass_BHW * place).sum(axis=(1, 2)) / total_B for place in (x_HW, y_HW))
    area_B = total_B * (2.0 / min(H, W)) ** 2
    variance_B = np.maximum((offset_BHWC**2).sum(axis=(1, 2, 3)), 1e-6)
    fit_BK = np.empty((B, len(SHAPES)), dtype=np.float32)
    for kind in range(len(SHAPES)):
        scale_B = np.sqrt(area_B / _AREA_K[kind])
        center_B2 = np.stack([center_x_B, center_y_B - _DROP_K[kind] * scale_B], axis=1)
        cover_BHW = _coverage(np.full(B, kind), center_B2, scale_B, (H, W))
        error_BHWC = offset_BHWC - cover_BHW[..., None] * axis_BC[:, None, None]
        fit_BK[:, kind] = 1.0 - (error_BHWC**2).sum(axis=(1, 2, 3)) / variance_B
    return fit_BK, total_B / (H * W)


def _ramp(value_B: np.ndarray, ends: tuple[float, float]) -> np.ndarray:
    """0 below the first end, 1 above the second, linear between."""
    return ((value_B - ends[0]) / (ends[1] - ends[0])).clip(0.0, 1.0)
