"""The stock SGLang server, unpatched, beside which the patched one is tested and timed, and the patched one's sampler
without a server around it. For tests and benchmarks."""

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from flowgrpo_rollout_sglang.config import EngineConfig
from flowgrpo_rollout_sglang.patch import copy, insertions
from flowgrpo_rollout_sglang.patch.insertions import PatchError
from flowgrpo_rollout_sglang.sglang_engine import server_arguments, server_environment
from flowgrpo_rollout_sglang.sglang_process import ServerProcess, free_ports

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


def load_sampler(config: EngineConfig) -> Any:
    """The server's `Sampler` in this process, on SGLang's own worker; without graphs unless `config` asks for them.

    Once in a process, which must not have imported sglang before: SGLang keeps its settings in globals.
    """
    os.environ.update(server_environment(config))  # before SGLang looks
    from sglang.multimodal_gen.runtime import server_args as sglang_arguments

    if config.device == "cuda":
        from sglang.multimodal_gen.runtime.managers.gpu_worker import GPUWorker as Worker
    else:
        from sglang.multimodal_gen.runtime.managers.cpu_worker import CPUWorker as Worker
    from flowgrpo_rollout_sglang.server.sampler import Sampler

    words = server_arguments(config, str(Path(config.model_path).resolve()))[2:]  # its parser has no --model-type
    words += ["--host", "127.0.0.1"]
    for option, port in zip(("--port", "--scheduler-port", "--master-port"), free_ports(3), strict=True):
        words += [option, str(port)]
    argv, sys.argv = sys.argv, ["sglang", *words]  # which it reads a second time
    try:
        arguments = sglang_arguments.prepare_server_args(words)
    finally:
        sys.argv = argv
    sglang_arguments.set_global_server_args(arguments)
    worker = Worker(local_rank=0, rank=0, master_port=arguments.master_port, server_args=arguments)
    return Sampler(worker.pipeline, arguments, cuda_graphs=bool(config.cuda_graphs))
