"""One SGLang server process: started in a group of its own, watched, and ended with everything it started.

Called by: `sglang_engine`. Knows nothing of rollouts. Imports neither torch nor sglang.
"""

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path

import httpx

from flowgrpo_rollout_sglang.engine import EngineError
from flowgrpo_rollout_sglang.server.contract import ENDPOINT_VARIABLE, TOKEN_VARIABLE
from flowgrpo_rollout_sglang.server.launch import FOLDER_VARIABLE, PARENT_VARIABLE, how_ended, last_words

LOG_TAIL_LINES, LOG_TAIL_BYTES = 40, 1 << 16
START_MARK = "=== flowgrpo starts the server"
_LOOK_EVERY_S = 0.25
_STOP_WITHIN_S = 10.0
_REUSE_WITHIN_S = 2.0
_ATTEMPTS = 3
_PORT_TAKEN = ("address already in use", "is unavailable and --strict-ports")


class ServerProcess:
    """A running server on a loopback port, with its log and its token.

    Args:
        name: how errors call it.
        patched: folder of the patched SGLang, put first on the server's PYTHONPATH.
        arguments: of `sglang serve`, without host and ports.
        environment: added to this process's own.
        log: file that takes all output, after that of earlier servers; each start begins with a line that says so.
    """

    def __init__(self, name: str, patched: Path, arguments: Sequence[str], environment: Mapping[str, str], log: Path):
        self.name, self.log = name, log
        self.token = secrets.token_hex(16)
        self._patched, self._arguments, self._environment = patched, list(arguments), dict(environment)
        self._log_start = 0
        """Where the log of the present start begins."""
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: int | None = None
        self.folder: str | None = None
        """The server's own: its socket and its answers, for nobody else to open."""
        self.client: httpx.Client | None = None

    @property
    def pid(self) -> int | None:
        """Also the id of the process group. None before the start and after the stop."""
        return self._process.pid if self._process else None

    def start(self, timeout_s: float, port: int | None = None) -> None:
        """Launches and returns when `/health` answers. A port that is taken, also in the meantime, is exchanged.

        Raises EngineError, with the end of the log, when the process ends or the time is over.
        """
        deadline = time.monotonic() + timeout_s
        for attempt in range(_ATTEMPTS):
            chosen = port if port is not None and _is_free(port) and attempt == 0 else free_ports(1)[0]
            try:
                self._launch(chosen)
                self._wait_until_ready(deadline, timeout_s)
                return
            except BaseException as error:
                self.stop()
                taken = isinstance(error, EngineError) and any(text in error.what for text in _PORT_TAKEN)
                if not taken or attempt + 1 == _ATTEMPTS:
                    raise

    def stop(self) -> None:
        """Ends the whole process group: the HTTP side, the scheduler, their helpers. Safe to call twice."""
        if self.client is not None:
            self.client.close()
            self.client = None
        if self._pipe is not None:
            os.close(self._pipe)  # the server's watch sees it and ends the group, reaping as it goes
            self._pipe = None
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_STOP_WITHIN_S)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder = None

    def ended(self, within_s: float = 0.0) -> str | None:
        """How the process ended, in words; None while it runs, and goes on to run for `within_s`.

        A server whose scheduler is gone kills itself: then the reason that it gave, not that signal.
        """
        if self._process is None:
            return "the server was not started"
        try:
            code = self._process.wait(within_s)
        except subprocess.TimeoutExpired:
            return None
        if code == -signal.SIGKILL:
            begins = last_words(self._process.pid)
            for line in reversed(log_tail(self.log)):
                if begins in line:
                    return f"the server ended itself: {line.partition(begins)[2]}"
        return f"the server {how_ended(code)}"

    def error(self, what: str, hint: str = "", kind: type[EngineError] = EngineError) -> EngineError:
        """An error of `kind` that ends with the last lines of this start's log."""
        tail = "\n".join(f"  | {line}" for line in log_tail(self.log, self._log_start))
        return kind(self.name, f"{what}\n  end of {self.log}:\n{tail}", hint)

    def _launch(self, port: int) -> None:
        self.folder = tempfile.mkdtemp(prefix="flowgrpo-sglang-")  # mode 0700: its socket takes pickles
        scheduler_port, master_port = free_ports(2)
        read_end, self._pipe = os.pipe()
        paths = [str(self._patched), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {
            **os.environ,
            **self._environment,
            "PYTHONPATH": os.pathsep.join(paths),
            TOKEN_VARIABLE: self.token,
            ENDPOINT_VARIABLE: f"ipc://{self.folder}/scheduler",
            FOLDER_VARIABLE: self.folder,
            PARENT_VARIABLE: str(read_end),
        }
        command = [sys.executable, "-m", "flowgrpo_rollout_sglang.server.launch", "serve", *self._arguments]
        ports = {"--port": port, "--scheduler-port": scheduler_port, "--master-port": master_port}
        command += ["--host", "127.0.0.1", "--strict-ports", *(str(x) for pair in ports.items() for x in pair)]
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            log.write(f"{START_MARK} {datetime.now().astimezone():%Y-%m-%d %H:%M:%S %z} ===\n".encode())
            self._log_start = log.tell()
            log.flush()
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=self.folder,  # SGLang makes folders for outputs where it runs
                pass_fds=(read_end,),
                start_new_session=True,
            )
        os.close(read_end)
        self.client = httpx.Client(
            base_url=f"http://127.0.0.1:{port}",
            headers={"authorization": f"Bearer {self.token}"},
            timeout=httpx.Timeout(None, connect=10.0),  # a request may take long; a dead server closes the connection
            # uvicorn closes a connection that is idle for 5 s, and httpx would send on one that is that moment closed.
            limits=httpx.Limits(keepalive_expiry=_REUSE_WITHIN_S),
            trust_env=False,
        )

    def _wait_until_ready(self, deadline: float, timeout_s: float) -> None:
        assert self.client is not None
        while True:
            if ended := self.ended():
                raise self.error(f"{ended} before it was ready", "the end of its log says why")
            try:
                if self.client.get("/health", timeout=5.0).status_code == 200:
                    return
            except httpx.TransportError:
                pass  # not listening yet
            if time.monotonic() > deadline:
                hint = "raise --engine-start-timeout-s (EngineConfig.start_timeout_s) if it only needs longer"
                raise self.error(f"not ready within {timeout_s:g} s", hint)
            time.sleep(_LOOK_EVERY_S)


def log_tail(path: Path, start: int = 0) -> list[str]:
    """The last lines of a log that may not exist, none of them from before byte `start`."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            start = start if start <= size else 0  # somebody has emptied it
            file.seek(max(start, size - LOG_TAIL_BYTES))
            return file.read().decode(errors="replace").splitlines()[-LOG_TAIL_LINES:]
    except OSError as error:
        return [f"(no log: {error})"]


def free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago, all different."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
