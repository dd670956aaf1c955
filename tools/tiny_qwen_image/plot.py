"""Draws a column of a curve's CSV against the step, with nothing but pillow.

python plot.py log/loss_curve.csv loss log/loss_curve.png
"""

import csv
import sys
from pathlib import Path

from PIL import Image, ImageDraw

WIDTH, HEIGHT, MARGIN = 640, 360, 48


def plot(curve: Path, column: str, picture: Path) -> None:
    """Writes `picture`: linear axes, the smallest and largest value written at their ends."""
    with curve.open() as file:
        points = [(float(row["step"]), float(row[column])) for row in csv.DictReader(file) if row[column]]
    steps, values = zip(*points, strict=True)
    low, high = min(values), max(values)

    def place(step: float, value: float) -> tuple[float, float]:
        across = (step - steps[0]) / max(1e-9, steps[-1] - steps[0])
        up = (value - low) / max(1e-9, high - low)
        return MARGIN + across * (WIDTH - 2 * MARGIN), HEIGHT - MARGIN - up * (HEIGHT - 2 * MARGIN)

    image = Image.new("RGB", (WIDTH, HEIGHT), "white")
    draw = ImageDraw.Draw(image)
    left, right, top, bottom = MARGIN, WIDTH - MARGIN, MARGIN, HEIGHT - MARGIN
    draw.line([(left, top), (left, bottom), (right, bottom)], fill="gray")
    draw.line([place(*point) for point in points], fill=(40, 90, 225), width=2)
    for value, y in ((high, top), (low, bottom)):
        draw.text((4, y - 6), f"{value:.3f}", fill="black")
    for step, x in ((steps[0], left), (steps[-1], right)):
        draw.text((x - 16, bottom + 6), f"{step:.0f}", fill="black")
    draw.text((left, 16), f"{column} against step", fill="black")
    image.save(picture)


if __name__ == "__main__":
    plot(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
