import json

import pytest
from flowgrpo_bench.cli import main
from flowgrpo_bench.compare import compare, passed
from flowgrpo_bench.results import Report, Row, read_baselines, save_baselines

MACHINE = {"kind": "test-machine", "commit": "abc"}


def report(seconds, *, spread=0.01, variant="ours", tolerance=0.1, failed=None):
    row = Row(case="c", size="s", timer="wall", variant=variant, seconds=seconds, spread=spread, bytes_moved=1000)
    return Report(date="2026-11-29", machine=MACHINE, rows=[row], tolerance={"c": tolerance}, failed=failed or {})


def verdict(now, baseline):
    (comparison,) = compare(now, [baseline])
    return comparison.verdict


def test_a_slowdown_past_the_tolerance_fails_and_one_inside_it_passes():
    assert verdict(report(1.05), report(1.0)) == "ok"
    assert verdict(report(1.15), report(1.0)) == "slower"
    assert verdict(report(0.8), report(1.0)) == "faster"
    assert passed(report(1.05), compare(report(1.05), [report(1.0)]))
    assert not passed(report(1.15), compare(report(1.15), [report(1.0)]))


def test_the_limit_is_never_narrower_than_three_times_the_noise_of_either_run():
    assert verdict(report(1.15, spread=0.06), report(1.0)) == "ok"
    assert verdict(report(1.15), report(1.0, spread=0.06)) == "ok"
    assert verdict(report(1.19, spread=0.06), report(1.0)) == "slower"


def test_a_measurement_without_a_baseline_is_new_and_passes():
    comparisons = compare(report(1.0), [])
    assert [c.verdict for c in comparisons] == ["new"]
    assert passed(report(1.0), comparisons)


def test_rivals_are_not_compared():
    assert compare(report(9.0, variant="eager"), [report(1.0, variant="eager")]) == []


def test_a_failed_gate_fails_the_run_and_makes_no_baseline(tmp_path):
    broken = report(1.0, failed={"c other": "off by 1"})
    assert not passed(broken, compare(broken, [report(1.0)]))
    with pytest.raises(ValueError):
        save_baselines(broken, tmp_path)


def test_baselines_come_back_as_they_were_saved(tmp_path):
    saved = report(1.0)
    (path,) = save_baselines(saved, tmp_path)
    assert path == tmp_path / "test-machine" / "c.json"
    assert read_baselines("test-machine", tmp_path) == [saved]
    assert read_baselines("another", tmp_path) == []


def test_the_command_compare_exits_1_past_the_limit_and_0_inside_it(tmp_path, capsys):
    save_baselines(report(1.0), tmp_path / "baselines")
    for seconds, code, word in ((1.5, 1, "slower"), (1.0, 0, "ok")):
        report(seconds).write(tmp_path / "now.json")
        arguments = ["compare", str(tmp_path / "now.json"), "--baselines", str(tmp_path / "baselines")]
        assert main(arguments) == code
        assert word in capsys.readouterr().out


def test_a_file_that_is_no_report_is_refused_by_name(tmp_path, capsys):
    path = tmp_path / "other.json"
    path.write_text(json.dumps({"rows": [{}]}))
    assert main(["compare", str(path)]) == 2
    assert "other.json" in capsys.readouterr().err
