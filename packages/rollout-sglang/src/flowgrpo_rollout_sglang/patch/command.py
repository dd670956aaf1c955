"""`rollout-sglang patch apply | revert | check | show`: the patch, for people. Nobody has to run it:
the engine makes the copy on its first start."""

import argparse
import sys
from pathlib import Path

from flowgrpo_rollout_sglang.patch import copy, insertions
from flowgrpo_rollout_sglang.patch.insertions import PatchError


def main(argv: list[str] | None = None) -> int:
    """Entry point of the script `rollout-sglang`. Returns the exit code: 1 where the patch does not stand."""
    parser = argparse.ArgumentParser(prog="rollout-sglang", description="The patched SGLang of the rollout engine.")
    patch = parser.add_subparsers(dest="noun", required=True).add_parser("patch", help="the patch on SGLang")
    patch.add_argument("verb", choices=("apply", "revert", "check", "show", "record"))
    patch.add_argument("--in-place", action="store_true", help="work on the installed package, not on a copy of it")
    patch.add_argument("--from", dest="edited", type=Path, help="record: the edited copy of the package folder")
    arguments = parser.parse_args(argv)
    try:
        print(_run(arguments.verb, arguments.in_place, arguments.edited))
    except PatchError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _run(verb: str, in_place: bool, edited: Path | None) -> str:
    if verb == "apply":
        return f"patched: {copy.apply_in_place() if in_place else copy.apply()}"
    if verb == "revert":
        if in_place:
            return f"stock again: {copy.revert_in_place()}"
        return "copy removed" if copy.revert() else "there was no copy"
    if verb == "check":
        return f"as patched: {copy.check()}"
    if verb == "record":
        return record(edited)
    manifest, diff = insertions.load()
    return f"# SGLang {manifest.sglang_version}, patch {manifest.digest}\n{diff}".rstrip()


def record(edited: Path | None) -> str:
    """Writes the diff and the manifest anew from an edited package folder. For a new SGLang version, or a new hook."""
    import importlib.metadata
    import json

    if edited is None:
        raise PatchError("record", "needs --from FOLDER, an edited copy of the package folder `sglang`")
    version = importlib.metadata.version("sglang")
    manifest = insertions.Manifest(version, {}, {})
    root = copy.installed_root(manifest)
    changed = [
        path.relative_to(edited).as_posix()
        for path in sorted(edited.rglob("*.py"))
        if path.read_bytes() != (root / path.relative_to(edited)).read_bytes()
    ]
    texts = [{name: (base / name).read_text() for name in changed} for base in (root, edited)]
    diff = insertions.diff_of(*texts)
    insertions.parse(diff)  # refuses anything but insertions
    stock, patched = ({name: insertions.sha256(t.encode()) for name, t in side.items()} for side in texts)
    here = Path(__file__).parent
    (here / "sglang.diff").write_text(diff)
    text = json.dumps({"sglang_version": version, "stock": stock, "patched": patched}, indent=2)
    (here / "manifest.json").write_text(text + "\n")
    return f"recorded {len(changed)} files"


if __name__ == "__main__":
    sys.exit(main())
