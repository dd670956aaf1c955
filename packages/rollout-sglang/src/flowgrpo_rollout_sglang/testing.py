"""The stock SGLang server, unpatched, beside which the patched one is tested and timed. For tests and benchmarks."""

import tempfile
from pathlib import Path

from flowgrpo_rollout_sglang.config import EngineConfig
from flowgrpo_rollout_sglang.patch import copy, insertions
from flowgrpo_rollout_sglang.patch.insertions import PatchError
from flowgrpo_rollout_sglang.sglang_engine import server_arguments, server_environment
from flowgrpo_rollout_sglang.sglang_process import ServerProcess

# Without this line stock cannot sleep on a CPU at all: torch.cpu has no empty_cache.
_GUARD = "import torch\nif not hasattr(torch.cpu, 'empty_cache'): torch.cpu.empty_cache = lambda: None\n"


def start_stock_server(config: EngineConfig) -> ServerProcess:
    """The installed package as it is, serving `config`'s model; talk to it through `.client`, end it with `.stop()`.

    Raises PatchError where the installed package is patched in place; EngineError where the server does not start.
    """
    manifest, _ = insertions.load()
    root = copy.installed_root(manifest)
    if insertions.digests(root, manifest.stock) != dict(manifest.stock):
        raise PatchError(str(root), "not stock", "run `rollout-sglang patch revert --in-place`")
    first = Path(tempfile.mkdtemp(prefix="flowgrpo-stock-"))  # first on its PYTHONPATH, where the patched copy would be
    if config.device == "cpu":
        (first / "sitecustomize.py").write_text(_GUARD)
    # Stock hands the text encoder's output to the transformer as it is: both must have one format.
    one_format = ["--text-encoder-precisions", config.dtype]
    arguments = [*server_arguments(config, str(Path(config.model_path).resolve())), *one_format]
    log = Path(config.log_folder or first) / f"{config.name}.sglang.log"
    server = ServerProcess(config.name, first, arguments, server_environment(config), log)
    server.start(config.start_timeout_s)
    return server
