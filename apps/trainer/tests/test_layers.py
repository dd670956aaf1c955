"""The import rules of CONTRIBUTING.md, held by reading every source file."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
MEMBERS = {
    "flowgrpo_math": ("packages/flowgrpo-math", set()),
    "flowgrpo_rollout_sglang": ("packages/rollout-sglang", {"flowgrpo_math"}),
    "flowgrpo_fsdp_actor": ("packages/fsdp-actor", {"flowgrpo_math", "flowgrpo_rollout_sglang"}),
    "flowgrpo_rewards": ("packages/rewards", set()),
    "flowgrpo_dataprep": ("packages/dataprep", set()),
    "flowgrpo_trainer": (
        "apps/trainer",
        {"flowgrpo_math", "flowgrpo_rollout_sglang", "flowgrpo_fsdp_actor", "flowgrpo_rewards", "flowgrpo_dataprep"},
    ),
}
CONFINED = {
    "ray": ("apps/trainer/src/",),
    "transfer_queue": ("apps/trainer/src/",),
    "sglang": ("packages/rollout-sglang/src/flowgrpo_rollout_sglang/server/",),
    "diffusers": (
        "packages/fsdp-actor/src/flowgrpo_fsdp_actor/adapters/",
        "packages/rollout-sglang/src/flowgrpo_rollout_sglang/diffusers_engine.py",
        "packages/rollout-sglang/src/flowgrpo_rollout_sglang/server/",
    ),
}


def imported(path: Path) -> set[str]:
    """Top-level names of every import statement in a file, wherever it stands."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names.add(node.module.split(".")[0])
    return names


@pytest.mark.parametrize("package", MEMBERS)
def test_a_package_imports_only_the_packages_below_it(package):
    folder, below = MEMBERS[package]
    sources = list((ROOT / folder / "src").rglob("*.py"))
    assert sources
    wrong = {
        str(path.relative_to(ROOT)): sorted(extra)
        for path in sources
        if (extra := (imported(path) & MEMBERS.keys()) - below - {package})
    }
    assert wrong == {}


@pytest.mark.parametrize("library", CONFINED)
def test_a_heavy_library_is_imported_only_where_it_belongs(library):
    wrong = [
        where
        for folder, _ in MEMBERS.values()
        for path in (ROOT / folder / "src").rglob("*.py")
        if library in imported(path)
        and path.name != "testing.py"  # makes the models that tests need
        and not (where := str(path.relative_to(ROOT))).startswith(CONFINED[library])
    ]
    assert wrong == []


@pytest.mark.parametrize("module", [*MEMBERS, "flowgrpo_trainer.preflight", "flowgrpo_trainer.settings"])
def test_importing_a_package_or_the_settings_loads_no_torch(module):
    code = f"import sys, {module}; sys.exit(int('torch' in sys.modules or 'ray' in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0
