"""Which caption a training picture is shown with: mostly its own, often enough a wrong one.

Shapes: K captions of the world; the last column, K, is the empty caption.
"""

import torch
from flowgrpo_rewards.shapes import all_specs
from torch import Tensor


def caption_odds(*, wrong: float, empty: float) -> Tensor:
    """[K, K + 1] probability of each caption for each picture.

    `wrong` is the share of captions with exactly one wrong attribute: color, shape and background are equally likely
    to be the wrong one, as is each wrong value. `empty` is the share without a caption, for classifier-free guidance.
    """
    specs = all_specs()
    fields = [(spec.color, spec.shape, spec.background) for spec in specs]
    odds = torch.zeros(len(specs), len(specs) + 1)
    for row, true in enumerate(fields):
        for attribute in range(3):
            differs = [
                column
                for column, other in enumerate(fields)
                if [a != b for a, b in zip(true, other, strict=True)] == [k == attribute for k in range(3)]
            ]
            odds[row, differs] = (1 - empty) * wrong / 3 / len(differs)
        odds[row, row] = (1 - empty) * (1 - wrong)
        odds[row, -1] = empty
    return odds
