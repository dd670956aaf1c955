"""From words to settings: recipe, then environment, then command line; the later wins.

A recipe is a TOML file of flags, with a reason beside each value. Its `[paths]` table gives defaults of the
variables that its values may name, such as `${MODEL_DIR}`; the environment overrides them. Every flag can
also be set as `FLOWGRPO_<FLAG>`. Next on the reading path: `loop`.
"""

import json
import os
import re
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from importlib import resources
from pathlib import Path
from typing import Any

import tyro

from flowgrpo_trainer.settings import JSON_FLAGS, Settings

DEFAULT_RECIPE = "quickstart"
PREFIX = "FLOWGRPO_"
_NOT_FLAGS = ("FLOWGRPO_SAMPLE_ID_MODE", "FLOWGRPO_CACHE", "FLOWGRPO_WIRE_NATIVE")
"""Variables of the rollout package, which reads them itself."""


class RecipeError(ValueError):
    """A recipe, or a FLOWGRPO_ variable, cannot be used; says which and why."""


def recipe_names() -> list[str]:
    """The recipes that ship with the trainer."""
    folder = resources.files("flowgrpo_trainer") / "recipes"
    return sorted(item.name.removesuffix(".toml") for item in folder.iterdir() if item.name.endswith(".toml"))


def parse(words: Sequence[str], environment: Mapping[str, str] | None = None) -> tuple[Settings, str]:
    """Settings from the command line's words, and the recipe's name.

    Without `--recipe` and without any other flag it is the quickstart; with flags alone there is no recipe.
    Raises RecipeError; ends the process with a message, as command lines do, for a flag that is wrong.
    """
    environment = os.environ if environment is None else environment
    recipe, rest = _take_recipe(list(words))
    if recipe is None and not rest:
        recipe = DEFAULT_RECIPE
    words = recipe_words(recipe, environment) if recipe is not None else []
    words += environment_words(environment) + rest  # of a flag given twice the later counts
    settings = tyro.cli(
        Settings,
        args=words,
        prog="trainer",
        description="FlowGRPO post-training. Without arguments: the quickstart. "
        f"`--recipe NAME_OR_TOML` starts from a recipe ({', '.join(recipe_names())}); every flag below overrides it. "
        "Other commands: `trainer preflight`, `trainer plan`, `trainer report DIR`, `trainer export`.",
    )
    return settings, recipe or "none"


def _take_recipe(words: list[str]) -> tuple[str | None, list[str]]:
    recipe, rest = None, []
    position = 0
    while position < len(words):
        word = words[position]
        if word == "--recipe":
            if position + 1 >= len(words):
                raise RecipeError(f"--recipe needs a name or a TOML file; recipes: {', '.join(recipe_names())}")
            recipe, position = words[position + 1], position + 1
        elif word.startswith("--recipe="):
            recipe = word.removeprefix("--recipe=")
        else:
            rest.append(word)
        position += 1
    return recipe, rest


def recipe_words(name: str, environment: Mapping[str, str]) -> list[str]:
    """A recipe as words of the command line, its variables filled in."""
    table = _load(name)
    paths = {"ASSETS": str(resources.files("flowgrpo_trainer") / "assets"), **table.pop("paths", {})}
    known = _known_flags()
    if unknown := [key for key in table if key.replace("-", "_") not in known]:
        hints = {key: get_close_matches(key.replace("-", "_"), known, n=1) for key in unknown}
        said = [key + (f" (did you mean {hint[0].replace('_', '-')}?)" if hint else "") for key, hint in hints.items()]
        raise RecipeError(f"recipe {name} sets unknown flags: {', '.join(said)}")
    words = []
    for key, value in table.items():
        words += _words(key.replace("-", "_"), _fill(value, paths, environment, name))
    return words


def environment_words(environment: Mapping[str, str]) -> list[str]:
    """`FLOWGRPO_<FLAG>=value` variables as words of the command line."""
    known = _known_flags()
    words = []
    for variable, text in environment.items():
        if not variable.startswith(PREFIX) or variable in _NOT_FLAGS:
            continue
        flag = variable.removeprefix(PREFIX).lower()
        if flag not in known:
            hint = get_close_matches(flag, known, n=1)
            meant = f" (did you mean {PREFIX}{hint[0].upper()}?)" if hint else ""
            raise RecipeError(f"environment variable {variable} names no flag{meant}")
        if text.lower() in ("true", "false"):
            words += _words(flag, text.lower() == "true")
        elif flag in JSON_FLAGS:
            words += [_flag(flag), text]
        else:
            words += [_flag(flag), *shlex.split(text)]
    return words


def _load(name: str) -> dict[str, Any]:
    if name.endswith(".toml"):
        path = Path(name)
        if not path.is_file():
            raise RecipeError(f"recipe file {name} does not exist")
        text = path.read_text()
    elif name in recipe_names():
        text = (resources.files("flowgrpo_trainer") / "recipes" / f"{name}.toml").read_text()
    else:
        raise RecipeError(f"unknown recipe {name!r}; recipes: {', '.join(recipe_names())}, or the path of a .toml file")
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise RecipeError(f"recipe {name} is not TOML: {error}") from None


def _fill(value: Any, paths: Mapping[str, str], environment: Mapping[str, str], name: str) -> Any:
    """Replaces `${NAME}` in every string of `value`."""
    if isinstance(value, list):
        return [_fill(item, paths, environment, name) for item in value]
    if isinstance(value, dict):
        return {key: _fill(item, paths, environment, name) for key, item in value.items()}
    if not isinstance(value, str):
        return value

    def one(match: re.Match[str]) -> str:
        variable = match[1]
        text = environment.get(variable) or paths.get(variable)
        if not text:
            raise RecipeError(f"recipe {name} needs the environment variable {variable}: export {variable}=...")
        return _fill(text, paths, environment, name)

    return re.sub(r"\$\{(\w+)\}", one, value)


def _words(flag: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [_flag(flag) if value else f"--no-{flag.replace('_', '-')}"]
    if flag in JSON_FLAGS:
        return [_flag(flag), json.dumps(value)]
    if isinstance(value, list):
        return [_flag(flag), *map(str, value)]
    return [_flag(flag), str(value)]


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _known_flags() -> set[str]:
    return set(Settings().flat())


def settings_as_json(settings: Settings) -> dict[str, Any]:
    """Resolved settings as plain JSON values, in their groups."""
    from dataclasses import asdict

    return {
        group.name: json.loads(json.dumps(asdict(getattr(settings, group.name)), default=str))
        for group in fields(settings)
    }
