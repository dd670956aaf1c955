"""Curves as one small SVG: no script, no library, light and dark, a tooltip (<title>) at each point.

Used for the panels of the report and for the pictures of the README.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Literal
from xml.etree import ElementTree as ET

from flowgrpo_trainer.report.axis import log_ticks, nice_ticks, tick_labels

COLORS = 8  # in curves.css
LETTER = 6.1  # mean width of a letter of the labels, in units of the picture; for margins and the legend
MAX_TOOLTIPS = 150  # per series
_NOT_XML = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One curve. A NaN in `y` breaks the line there."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    """With `high`: a band around a line, error bars at points."""
    high: Sequence[float] | None = None
    kind: Literal["line", "points"] = "line"
    faint: bool = False
    """Drawn thin and pale, without legend and tooltips: raw values behind their mean."""
    legend: bool = True
    """Whether the legend names it; an empty name never shows."""
    color: int | None = None
    """0 to 7; by default the series' place among those that are not faint."""

    def __post_init__(self) -> None:
        lengths = {len(values) for values in (self.x, self.y, self.low, self.high) if values is not None}
        if len(lengths) > 1:
            raise ValueError(f"series {self.name!r}: x, y, low and high must be of one length, got {sorted(lengths)}")


def curves_svg(
    series: Sequence[Series],
    title: str,
    *,
    x_label: str = "rollout",
    y_label: str = "",
    y_lines: Sequence[float] = (),
    y_range: tuple[float, float] | None = None,
    y_log: bool = False,
    width: int = 460,
    height: int = 280,
    standalone: bool = True,
) -> str:
    """The curves as SVG text.

    Args:
        y_label: what the values are, with their unit; it stands under the title, never turned.
        y_lines: values at which a dashed line is drawn, if they lie on the axis.
        y_range: least range of the axis; data outside it widen it.
        y_log: decades on the axis; every value must be above 0.
        standalone: a whole file with its own style and background. Else for a page that has `curves_css()`.

    Raises ValueError when no series has a finite point: there is nothing to draw.
    """
    plot = _Plot(series, y_range=y_range, y_log=y_log, width=width, height=height, legend_top=56 if y_label else 38)
    attributes = {"class": "curves", "viewBox": f"0 0 {width} {height}", "role": "img", "aria-label": _text(title)}
    if standalone:
        attributes |= {"xmlns": "http://www.w3.org/2000/svg", "width": str(width), "height": str(height)}
    svg = ET.Element("svg", attributes)
    if standalone:
        ET.SubElement(svg, "style").text = curves_css()
        _add(svg, "rect", "back", width=width, height=height, rx=6)
    _add(svg, "text", "title", title, x=12, y=22)
    if y_label:
        _add(svg, "text", "label", y_label, x=12, y=37)
    plot.draw_legend(svg)
    plot.draw_axes(svg, x_label)
    for value in y_lines:
        plot.draw_reference(svg, value)
    order = sorted(range(len(series)), key=lambda index: not series[index].faint)  # pale ones lie below
    for index in order:
        plot.draw_series(svg, series[index], plot.colors[index])
    return ET.tostring(svg, encoding="unicode")


def curves_css() -> str:
    """The style that `standalone` pictures carry, for a page with many of them."""
    return files("flowgrpo_trainer.report").joinpath("curves.css").read_text(encoding="utf-8")


class _Plot:
    """The picture's geometry, from data to units of the viewBox, and the pieces that are drawn with it."""

    def __init__(
        self,
        series: Sequence[Series],
        *,
        y_range: tuple[float, float] | None,
        y_log: bool,
        width: int,
        height: int,
        legend_top: int,
    ):
        xs, ys = _extent(series)
        if y_log and min(ys) <= 0:
            raise ValueError(f"a log axis needs values above 0, got {min(ys)}")
        if y_range is not None:
            ys = (min(*ys, *y_range), max(*ys, *y_range))
        self.y_log = y_log
        self.y_ticks = log_ticks(*ys) if y_log else nice_ticks(*ys)
        self.y_labels = [f"{tick:g}" for tick in self.y_ticks] if y_log else tick_labels(self.y_ticks)
        self.y_low, self.y_high = self._y(self.y_ticks[0]), self._y(self.y_ticks[-1])
        self.x_low, self.x_high = xs if xs[0] < xs[1] else (xs[0] - 0.5, xs[1] + 0.5)
        visible = [index for index, one in enumerate(series) if not one.faint]
        places = {index: place for place, index in enumerate(visible)}
        self.colors = [
            (places.get(index, 0) if one.color is None else one.color) % COLORS for index, one in enumerate(series)
        ]
        self.left = 16 + LETTER * max(len(label) for label in self.y_labels)
        self.right = width - 16.0
        named = [(series[i].name, self.colors[i]) for i in visible if series[i].legend and series[i].name]
        self.legend = self._lay_legend(named, legend_top)
        self.top = (self.legend[-1][1] if self.legend else legend_top - 16) + 16.0
        self.bottom = height - 34.0

    def _y(self, value: float) -> float:
        return math.log10(value) if self.y_log else value

    def at(self, x: float, y: float) -> tuple[float, float]:
        across = (x - self.x_low) / (self.x_high - self.x_low)
        up = (self._y(y) - self.y_low) / (self.y_high - self.y_low)
        return self.left + across * (self.right - self.left), self.bottom - up * (self.bottom - self.top)

    def _lay_legend(self, named: Sequence[tuple[str, int]], top: int) -> list[tuple[float, float, str, int]]:
        """Left to right, in as many rows as it takes: x, y, name, colour."""
        placed, x, y = [], 12.0, float(top)
        for name, color in named:
            width = 20 + LETTER * len(name) + 14
            if x > 12 and x + width > self.right:
                x, y = 12.0, y + 16
            placed.append((x, y, name, color))
            x += width
        return placed

    def draw_legend(self, svg: ET.Element) -> None:
        for x, y, name, color in self.legend:
            _add(svg, "rect", f"c{color} swatch", x=x, y=y - 6, width=14, height=4, rx=2)
            _add(svg, "text", "legend", name, x=x + 20, y=y)

    def draw_axes(self, svg: ET.Element, x_label: str) -> None:
        for tick, label in zip(self.y_ticks, self.y_labels, strict=True):
            _, y = self.at(self.x_low, tick)
            _add(svg, "line", "grid", x1=self.left, x2=self.right, y1=y, y2=y)
            _add(svg, "text", "tick end", label, x=self.left - 6, y=y + 4)
        whole = float(self.x_low).is_integer() and float(self.x_high).is_integer()
        ticks = [
            t for t in nice_ticks(self.x_low, self.x_high, target=8, whole=whole) if self.x_low <= t <= self.x_high
        ]
        for tick, label in zip(ticks, tick_labels(ticks) if ticks else [], strict=True):
            x, _ = self.at(tick, self.y_ticks[0])
            _add(svg, "line", "mark", x1=x, x2=x, y1=self.bottom, y2=self.bottom + 4)
            _add(svg, "text", "tick middle", label, x=x, y=self.bottom + 16)
        _add(svg, "text", "label end", x_label, x=self.right, y=self.bottom + 29)

    def draw_reference(self, svg: ET.Element, value: float) -> None:
        if self.y_ticks[0] <= value <= self.y_ticks[-1]:
            _, y = self.at(self.x_low, value)
            line = _add(svg, "line", "reference", x1=self.left, x2=self.right, y1=y, y2=y)
            ET.SubElement(line, "title").text = f"{value:g}"

    def draw_series(self, svg: ET.Element, series: Series, color: int) -> None:
        group = ET.SubElement(svg, "g", {"class": f"c{color}" + (" faint" if series.faint else "")})
        if series.kind == "line":
            for run in _runs(series):
                self._draw_band(group, series, run)
                points = [self.at(series.x[i], series.y[i]) for i in _thinned(series, run, int(self.right - self.left))]
                _add(group, "path", "line", d=_path(points))
        elif series.low is not None and series.high is not None:
            for x, low, high in zip(series.x, series.low, series.high, strict=True):
                if math.isfinite(low) and math.isfinite(high):
                    (at, bottom), (_, top) = self.at(x, low), self.at(x, high)
                    _add(group, "line", "bar", x1=at, x2=at, y1=bottom, y2=top)
        if not series.faint:
            self._draw_points(group, series)

    def _draw_band(self, group: ET.Element, series: Series, run: Sequence[int]) -> None:
        if series.low is None or series.high is None:
            return
        upper = [self.at(series.x[i], series.high[i]) for i in run if math.isfinite(series.high[i])]
        lower = [self.at(series.x[i], series.low[i]) for i in run if math.isfinite(series.low[i])]
        if upper and lower:
            _add(group, "path", "band", d=_path(upper + lower[::-1]) + "Z")

    def _draw_points(self, group: ET.Element, series: Series) -> None:
        finite = [i for i, y in enumerate(series.y) if math.isfinite(y)]
        stride = 1 if series.kind == "points" else max(1, math.ceil(len(finite) / MAX_TOOLTIPS))
        shown = series.kind == "points" or len(finite) == 1
        for i in finite[::stride]:
            x, y = self.at(series.x[i], series.y[i])
            point = _add(group, "circle", "point" if shown else "hit", cx=x, cy=y, r=4 if shown else 5)
            spread = ""
            if series.low is not None and series.high is not None:
                spread = f" ({series.low[i]:.4g} to {series.high[i]:.4g})"
            ET.SubElement(point, "title").text = _text(f"{series.name} at {series.x[i]:g}: {series.y[i]:.5g}{spread}")


def _extent(series: Sequence[Series]) -> tuple[tuple[float, float], tuple[float, float]]:
    """Least and largest x and y over everything that is drawn."""
    xs: list[float] = []
    ys: list[float] = []
    for one in series:
        for values in (one.y, one.low or (), one.high or ()):
            pairs = [(x, y) for x, y in zip(one.x, values, strict=False) if math.isfinite(y)]
            xs += [x for x, _ in pairs]
            ys += [y for _, y in pairs]
    if not ys:
        raise ValueError(f"no finite point to draw in {[one.name for one in series]}")
    return (min(xs), max(xs)), (min(ys), max(ys))


def _runs(series: Series) -> list[list[int]]:
    """Indices between the NaNs."""
    runs: list[list[int]] = [[]]
    for index, y in enumerate(series.y):
        if math.isfinite(y):
            runs[-1].append(index)
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]


def _thinned(series: Series, run: Sequence[int], columns: int) -> list[int]:
    """At most two indices a column, its least and largest value, so that no peak is lost."""
    if len(run) <= 2 * columns:
        return list(run)
    kept: list[int] = []
    for column in range(columns):
        part = run[column * len(run) // columns : (column + 1) * len(run) // columns]
        kept += sorted({min(part, key=lambda i: series.y[i]), max(part, key=lambda i: series.y[i])})
    return kept


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)


def _add(parent: ET.Element, tag: str, css: str, text: str | None = None, **attributes: float | str) -> ET.Element:
    values = {key: value if isinstance(value, str) else f"{value:.5g}" for key, value in attributes.items()}
    element = ET.SubElement(parent, tag, {"class": css} | values)
    if text is not None:
        element.text = _text(text)
    return element


def _text(text: str) -> str:
    """`text` without what XML cannot hold; ElementTree escapes the rest."""
    return _NOT_XML.sub("\ufffd", text)
