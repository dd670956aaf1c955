import re
from pathlib import Path

import torch

WIRE_MD = Path(__file__).parents[2] / "docs" / "wire.md"


def test_the_example_of_the_documentation_runs_and_moves_the_weights():
    (example,) = re.findall(r"```python\n(.*?)```", WIRE_MD.read_text(), re.DOTALL)
    names = {}
    exec(example, names)
    assert names["receiver"].version == 1
    assert torch.equal(names["held"]["to_q.weight"], names["weights"]["to_q.weight"].bfloat16())
