"""Runs the suite on this machine's CPU, in smoke size: every case passes its gate and is timed."""

import os

import pytest
from flowgrpo_bench import case as contract
from flowgrpo_bench.case import BenchCase, Workload, all_cases
from flowgrpo_bench.cli import main
from flowgrpo_bench.results import BASELINES, Report
from flowgrpo_bench.run import run

CASES = {case.name: case for case in all_cases()}
LONG = "FLOWGRPO_TEST_LONG" in os.environ  # a case for several GPUs starts several processes that import torch
ON_CPU = [name for name, case in CASES.items() if "cpu" in case.devices and (case.gpus == 1 or LONG)]


@pytest.mark.parametrize("name", ON_CPU)
def test_case_passes_its_gate_and_is_timed_in_smoke_size(name, tmp_path, monkeypatch):
    monkeypatch.setenv("BENCH_DISK", str(tmp_path))
    report = run([CASES[name]], "cpu", smoke=True)
    assert report.failed == {}
    ours = {(row.size, row.timer) for row in report.rows if row.variant == "ours"}
    assert ours == {(size, timer) for size in CASES[name].smoke for timer in CASES[name].timers_on("cpu")}
    assert all(row.seconds > 0 for row in report.rows)


@pytest.mark.parametrize("name", CASES)
def test_case_says_what_it_is(name):
    assert CASES[name].about
    assert CASES[name].sizes
    assert CASES[name].smoke
    assert set(CASES[name].devices) <= CASES[name].tolerance.keys()


def test_a_wrong_result_is_reported_and_never_timed():
    def gate():
        raise AssertionError("off by 1")

    calls = []
    wrong = BenchCase(
        name="wrong",
        about="a case whose result is wrong",
        setup=lambda device: Workload(ours=lambda: calls.append(1), gate=gate),
        sizes={"one": {}},
        smoke={"one": {}},
    )
    report = run([wrong], "cpu", smoke=True)
    assert report.failed == {"wrong one": "off by 1"}
    assert report.rows == []
    assert calls == []


def test_a_case_whose_name_is_not_its_files_is_refused(monkeypatch):
    class Elsewhere:
        CASE = CASES["clip_loss"]

    real = contract.import_module
    monkeypatch.setattr(
        contract, "import_module", lambda name: Elsewhere if name.endswith(".advantages") else real(name)
    )
    with pytest.raises(ValueError) as error:
        all_cases()
    assert "advantages.py" in str(error.value)


def test_the_command_run_writes_a_report_that_reads_back(tmp_path, capsys):
    out = tmp_path / "smoke.json"
    assert main(["run", "clip_loss", "--smoke", "--device", "cpu", "--out", str(out)]) == 0
    report = Report.read(out)
    assert {row.variant for row in report.rows} == {"ours", "bare"}
    assert {"kind", "processor", "torch", "triton", "commit"} <= report.machine.keys()
    assert "clip_loss" in capsys.readouterr().out


def test_an_unknown_case_is_refused_with_the_known_ones(capsys):
    assert main(["run", "no_such_case"]) == 2
    assert "clip_loss" in capsys.readouterr().err


def test_list_names_every_case(capsys):
    assert main(["list"]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in CASES)


@pytest.mark.parametrize("path", sorted(BASELINES.glob("*/*.json")), ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_every_baseline_belongs_to_a_size_that_its_case_still_has(path):
    report = Report.read(path)
    assert report.machine["kind"] == path.parent.name
    assert report.failed == {}
    if path.stem in CASES:
        case = CASES[path.stem]
        assert {row.size for row in report.rows} <= {*case.sizes, *case.sizes_on("cpu")}
