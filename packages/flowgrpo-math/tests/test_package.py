import inspect
import re
import subprocess
import sys
from pathlib import Path

import flowgrpo_math
import pytest

README = Path(__file__).parents[1] / "README.md"
PUBLIC = [*flowgrpo_math.__all__]


def test_the_readme_example_runs_as_written():
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    done = subprocess.run([sys.executable, "-c", example], capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert "ratio in [1.000000, 1.000000]" in first
    assert "ratio in [1.000000, 1.000000]" not in second


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_imports_and_stands_in_the_readme(name):
    assert getattr(flowgrpo_math, name) is not None
    assert f"`{name}" in README.read_text() or f"{name}`" in README.read_text()


@pytest.mark.parametrize("name", [n for n in PUBLIC if inspect.isfunction(getattr(flowgrpo_math, n))])
def test_help_of_each_function_states_its_errors(name):
    assert "Raises" in inspect.getdoc(getattr(flowgrpo_math, name)) or "errors" in inspect.getdoc(
        getattr(flowgrpo_math, name)
    )


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError):
        flowgrpo_math.no_such_name  # noqa: B018


def test_importing_the_package_loads_neither_torch_nor_numpy():
    program = "import sys, flowgrpo_math; assert not {'torch', 'numpy', 'triton'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", program], check=True)
