"""What a person sees while a run goes on: where it is, what it does now, how long it will take, how good it is.

On a terminal a display of a few lines that stays at the bottom; elsewhere (a file, CI) one plain line a rollout;
or nothing. No other process can tear it: see `terminal`.
"""

import math
import os
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from types import TracebackType

from rich.ansi import AnsiDecoder
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from flowgrpo_trainer.terminal import TerminalCapture

PHASES = {
    "rollout": "drawing pictures",
    "reward": "scoring them",
    "update": "training the model",
    "sync": "sending the new weights to the engine",
    "evaluate": "testing on held-out prompts",
}
REFRESHES_PER_SECOND = 2
RECENT = 20  # rollouts that the time left is estimated from: old ones ran on a colder machine
_CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class Phase:
    """The sub-progress of one phase; `advance` may be called from any thread."""

    def __init__(self, name: str, total: int | None):
        self.name, self.total = name, total
        self.done = 0
        self.started = time.monotonic()
        self._lock = threading.Lock()

    def advance(self, count: int = 1) -> None:
        """`count` more of `total` are done."""
        with self._lock:
            self.done += count


class RunProgress:
    """The display of one run, as a context manager.

        with RunProgress(total_rollouts=100) as progress:
            with progress.phase("rollout", total=8) as phase:
                phase.advance()
            progress.rollout_done(0, metrics)

    Args:
        total_rollouts: rollouts of the whole run.
        console: where to draw; by default stdout (or, on a terminal, the terminal behind it). A console that is
            given is used as it is, and no other process's output is caught.
        first_rollout: rollouts done before a resume.
        silent: draw nothing. Notes are still printed: they are what a person must know.
    """

    def __init__(
        self, total_rollouts: int, console: Console | None = None, *, first_rollout: int = 0, silent: bool = False
    ):
        self.total = total_rollouts
        self.done = first_rollout
        self._silent = silent
        self._capture: TerminalCapture | None = None
        if console is None and not silent and _on_terminal():
            self._capture = TerminalCapture(self._foreign_lines)
            console = Console(file=self._capture.terminal, force_terminal=True)
        self._console = console or Console()
        self._live: Live | None = None
        self._phase: Phase | None = None
        self._seconds: deque[float] = deque(maxlen=RECENT)
        self._last_done = time.monotonic()
        self._last = self._first = self._eval = ""
        self._closed = threading.Event()
        self._drawing = threading.Lock()  # two threads that draw at once would move the cursor under each other
        self._decode = AnsiDecoder().decode_line

    def __enter__(self) -> "RunProgress":
        self._last_done = time.monotonic()
        if not self._silent and self._console.is_terminal and not self._console.is_dumb_terminal:
            self._live = Live(
                get_renderable=self._render,
                console=self._console,
                auto_refresh=False,  # `_keep_fresh` draws, under our lock
                redirect_stdout=self._capture is None,
                redirect_stderr=self._capture is None,
            )
            self._live.start(refresh=True)
            self._refresher = threading.Thread(target=self._keep_fresh, name="progress", daemon=True)
            self._refresher.start()
            if self._capture is not None:
                self._capture.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed.set()
        if self._live is None:
            return
        if self._capture is not None:
            self._capture.__exit__(kind, error, trace)  # first: what children wrote belongs above the last frame
        self._refresher.join()
        with self._drawing, self._terminal_may_be_gone():
            self._live.stop()
        self._live = None

    def _keep_fresh(self) -> None:
        while not self._closed.wait(1 / REFRESHES_PER_SECOND):
            self._refresh()

    def _refresh(self) -> None:
        with self._drawing, self._terminal_may_be_gone():
            if self._live is not None:
                self._live.refresh()

    def _terminal_may_be_gone(self) -> AbstractContextManager[None]:
        """A run outlives the window that it was started in: what it says is in the run folder too."""
        return nullcontext() if self._capture is None else suppress(OSError)

    @contextmanager
    def phase(self, name: str, total: int | None = None) -> Generator[Phase, None, None]:
        """Show that the run is in phase `name` (a key of PHASES, or words of your own) until the block ends."""
        before, self._phase = self._phase, Phase(name, total)
        try:
            yield self._phase
        finally:
            self._phase = before

    def start_timing(self) -> None:
        """The next rollout starts now: what came before it (loading, starting Ray) is no rollout's time."""
        self._last_done = time.monotonic()

    def rollout_done(self, rollout_id: int, metrics: Mapping[str, float]) -> None:
        """Rollout `rollout_id` (from 0) is finished; shows its reward and, where recorded, its share correct."""
        now = time.monotonic()
        self._seconds.append(now - self._last_done)
        self._last_done = now
        self.done = rollout_id + 1
        self._last = _describe(metrics, "reward/mean", "reward/correct_mean")
        self._first = self._first or self._last
        self._eval = _describe_eval(metrics) or self._eval
        if self._live is None and not self._silent:
            held_out = _describe_eval(metrics)
            parts = [
                f"rollout {self.done}/{self.total}",
                f"reward {self._last}" if self._last else "",
                f"held-out {held_out}" if held_out else "",
            ]
            parts += [f"{self._seconds[-1]:.1f} s", self._time_left()]
            self._print(Text("  ".join(part for part in parts if part)))

    def note(self, text: str) -> None:
        """Print a line above the display. Control characters in it are dropped: it may quote a prompt."""
        self._print(Text(_CONTROL.sub("", text)))

    def _foreign_lines(self, lines: list[str]) -> None:
        self._print(Text("\n").join(self._decode(line) for line in lines))

    def _print(self, text: Text) -> None:
        with self._drawing, self._terminal_may_be_gone():
            self._console.print(text, soft_wrap=True, highlight=False)

    # -- the display -------------------------------------------------------------------------------------------

    def _render(self) -> RenderableType:
        if self._capture is not None:  # rich measures descriptors that now lead into our pipe
            size = os.get_terminal_size(self._capture.terminal.fileno())
            self._console.size = (size.columns or 80, size.lines or 25)
        bar = Table.grid(padding=(0, 2))
        bar.add_row(
            Text(f"Rollout {min(self.done + 1, self.total)} of {self.total}", style="bold"),
            ProgressBar(total=max(self.total, 1), completed=self.done, width=24),
            Text(self._time_left()),
        )
        lines = [] if self._closed.is_set() else [f"now       {self._now()}"]
        if self._last:
            lines.append(f"reward    {self._last}" + (f"   (first: {self._first})" if self.done > 1 else ""))
        if self._eval:
            lines.append(f"held-out  {self._eval}")
        rows: list[RenderableType] = [bar]
        rows += [Text(f"  {line}", no_wrap=True, overflow="ellipsis") for line in lines]
        return Group(*rows)

    def _now(self) -> str:
        phase = self._phase
        if phase is None:
            return "getting ready" if self.done < self.total else "finishing"
        count = f"  {phase.done} of {phase.total}" if phase.total is not None else ""
        return f"{PHASES.get(phase.name, phase.name)}{count}  {_duration(time.monotonic() - phase.started)}"

    def _time_left(self) -> str:
        left = self.total - self.done
        if left <= 0:
            return "done"
        if not self._seconds:
            return "time left: known after this rollout"
        mean = sum(self._seconds) / len(self._seconds)
        return f"about {_duration(mean * left)} left"


def _on_terminal() -> bool:
    """Whether Python's stdout is the terminal itself (pytest and notebooks replace it)."""
    try:
        real = sys.stdout is not None and sys.stdout.fileno() == 1 and os.isatty(1)
        return real and os.environ.get("TERM", "").lower() not in ("dumb", "unknown")
    except (OSError, ValueError):  # a stdout without a descriptor
        return False


def _describe(metrics: Mapping[str, float], reward: str, correct: str) -> str:
    """A mean reward and, where recorded, the share of correct pictures."""
    words = []
    if reward in metrics:
        words.append(f"{metrics[reward]:.3f}")
    if correct in metrics and not math.isnan(metrics[correct]):
        words.append(f"{metrics[correct]:.0%} correct")
    return ", ".join(words)


def _describe_eval(metrics: Mapping[str, float]) -> str:
    """Results of the first held-out prompt set in `metrics`."""
    for name in metrics:
        if name.startswith("eval/") and name.endswith("/reward_mean"):
            return _describe(metrics, name, name.replace("/reward_mean", "/correct_mean"))
    return ""


def _duration(seconds: float) -> str:
    """In the two units that matter: 42 s, 3 min 05 s, 2 h 10 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
