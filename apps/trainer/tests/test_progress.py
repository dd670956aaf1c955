"""What a person reads during a run, and that no other process can tear it."""

import io
import os
import pty
import re
import select
import subprocess
import sys

import pytest
from flowgrpo_trainer.progress import RunProgress
from rich.console import Console

ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[@-Z\\-_]")
METRICS = {"reward/mean": 0.7421, "reward/correct_mean": 0.58}


def plain_console():
    return Console(file=io.StringIO(), force_terminal=False, width=60)


def live_console():
    return Console(file=io.StringIO(), force_terminal=True, width=100, height=20)


def lines(console):
    return [line for line in ESCAPES.sub("", console.file.getvalue()).replace("\r", "\n").split("\n") if line.strip()]


def test_without_a_terminal_each_rollout_is_one_line():
    console = plain_console()
    with RunProgress(3, console=console) as progress:
        with progress.phase("rollout", total=2) as phase:
            phase.advance()
        progress.rollout_done(0, METRICS)
        progress.rollout_done(1, METRICS | {"eval/held_out/reward_mean": 0.8, "eval/held_out/correct_mean": 0.61})
        progress.rollout_done(2, {})
    first, second, third = lines(console)
    assert first.startswith("rollout 1/3  reward 0.742, 58% correct")
    assert "left" in first
    assert "held-out 0.800, 61% correct" in second
    assert third.startswith("rollout 3/3")
    assert "done" in third


def test_silence_prints_notes_alone():
    console = plain_console()
    with RunProgress(2, console=console, silent=True) as progress:
        progress.rollout_done(0, METRICS)
        progress.note("something went wrong")
    assert lines(console) == ["something went wrong"]


@pytest.mark.parametrize("make", [plain_console, live_console])
def test_a_note_cannot_steer_the_terminal_nor_use_markup(make):
    console = make()
    with RunProgress(1, console=console) as progress:
        progress.note("prompt \x1b[2J\x1b]0;title\x07[bold]x[/bold]\r")
    written = console.file.getvalue()
    assert "\x1b[2J" not in written
    assert "\x07" not in written
    assert any("[bold]x[/bold]" in line for line in lines(console))


def test_the_display_says_rollout_phase_count_and_results():
    console = live_console()
    progress = RunProgress(3, console=console)
    progress.rollout_done(0, METRICS | {"eval/a/reward_mean": 0.9})
    with progress.phase("update", total=6) as phase:
        phase.advance()
        phase.advance(2)
        console.print(progress._render())
    progress.rollout_done(1, {"reward/mean": 0.8})
    console.print(progress._render())
    text = "\n".join(lines(console))
    assert "Rollout 2 of 3" in text
    assert "training the model  3 of 6" in text
    assert "0.742, 58% correct" in text
    assert "(first: 0.742" in text
    assert "held-out  0.900" in text
    assert "Rollout 3 of 3" in text


def test_a_phase_ends_with_its_block_also_when_the_block_raises():
    console = live_console()
    progress = RunProgress(3, console=console)
    with progress.phase("rollout", total=2):
        with pytest.raises(KeyError), progress.phase("evaluate"):
            raise KeyError
        console.print(progress._render())
    console.print(progress._render())
    inside, after = [line for line in lines(console) if "  now  " in line]
    assert "drawing pictures  0 of 2" in inside
    assert "getting ready" in after


def test_a_resumed_run_counts_from_where_it_starts():
    console = live_console()
    progress = RunProgress(10, console=console, first_rollout=7)
    console.print(progress._render())
    assert "Rollout 8 of 10" in lines(console)[0]


CHILD_RUN = """
import subprocess, sys
from flowgrpo_trainer.progress import RunProgress
with RunProgress(4) as progress:
    for k in range(4):
        with progress.phase("rollout", total=2) as phase:
            for where in ("1", "2"):
                words = f"printf 'child-{k}-{where}\\\\nsecond-' >&{where}; printf '{k}-{where}\\\\n' >&{where}"
                subprocess.run(["sh", "-c", words])
            print(f"python-{k}")
            progress._refresh()
            phase.advance()
        progress.rollout_done(k, {"reward/mean": 0.5})
    if len(sys.argv) > 1:
        raise RuntimeError("boom")
print("after", sys.stdout.isatty())
"""


def run_on_a_terminal(*arguments):
    """The run's exit code and all that its terminal was sent."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", CHILD_RUN, *arguments]
    environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24"}
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    written = b""
    while select.select([ours], [], [], 60)[0]:
        try:
            data = os.read(ours, 65536)
        except OSError:  # Linux says the end of a terminal so
            break
        if not data:
            break
        written += data
    os.close(ours)
    return process.wait(), written.decode(errors="replace")


def test_lines_that_child_processes_write_to_the_terminal_stay_whole():
    code, written = run_on_a_terminal()
    assert code == 0
    shown = [line.strip() for line in re.split(r"[\r\n]+", ESCAPES.sub("", written))]
    for k in range(4):
        for line in (f"child-{k}-1", f"second-{k}-1", f"child-{k}-2", f"second-{k}-2", f"python-{k}"):
            assert shown.count(line) == 1, line
    assert any("Rollout 2 of 4" in line for line in shown)
    assert shown[-2:] == ["after True", ""]  # and the terminal is given back


def test_an_error_ends_the_display_and_its_traceback_is_shown_below():
    code, written = run_on_a_terminal("fail")
    assert code == 1
    shown = ESCAPES.sub("", written)
    assert "RuntimeError: boom" in shown
    assert shown.rindex("Rollout") < shown.rindex("Traceback")
    assert written.rstrip().endswith("boom")


CLOSED_WINDOW_RUN = """
import subprocess, sys
from pathlib import Path
from flowgrpo_trainer.progress import RunProgress
with RunProgress(2) as progress:
    progress.note("begun")
    sys.stdin.readline()
    for k in range(2):
        subprocess.run(["head", "-c", "200000", "/dev/zero"], check=True)  # more than a pipe holds
        print("x" * 1000, flush=True)
        progress.note("still here")
        progress._refresh()
        progress.rollout_done(k, {})
Path(sys.argv[1]).write_text("done")
"""


def test_a_run_goes_on_when_its_terminal_is_closed(tmp_path):
    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", CLOSED_WINDOW_RUN, tmp_path / "result"]
    environment = os.environ | {"TERM": "xterm-256color"}
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=theirs, stderr=theirs, env=environment, text=True)
    os.close(theirs)
    written = b""
    while b"begun" not in written:
        written += os.read(ours, 65536)
    os.close(ours)
    process.communicate("go on\n", timeout=60)
    assert (tmp_path / "result").read_text() == "done"
