"""The report needs nothing but itself, says what happened and no more, and is safe with other people's text."""

import math
import re
from html.parser import HTMLParser
from xml.etree import ElementTree as ET

import pytest
from flowgrpo_trainer.report import Series, curves_svg, write_report
from flowgrpo_trainer.report.axis import log_ticks, nice_ticks, tick_labels
from flowgrpo_trainer.report.page import duration, headlines
from flowgrpo_trainer.report.panels import moving_mean
from flowgrpo_trainer.report.results import RunData, change, correct_of, increases, reward_of, running_seconds
from flowgrpo_trainer.run_folder import EvalSample, Evaluation, RunFolder, RunFolderError
from PIL import Image

SVG = "{http://www.w3.org/2000/svg}"


def sample(prompt, reward, correct=None, image=None):
    return EvalSample(prompt, reward, {"color": reward}, correct, image)


def make_run(path, rollouts=12, evals=(0, 6, 12), size=24, settings=None, prompts=("a red circle", "a blue square")):
    """A run folder as the loop writes it; the second prompt becomes correct after the first evaluation."""
    folder = RunFolder(path)
    folder.start(settings or {"algorithm": {"eps_clip": 1e-3}}, total_rollouts=12)
    for step in range(rollouts):
        folder.append_metrics(
            step,
            {
                "reward/mean": 0.5 + step / 100,
                "reward/color_mean": 0.5 + step / 100,
                "reward/color_group_std_mean": 0.1,
                "reward/degenerate": float(step == 3),
                "train/ratio_mean": 1.0,
                "train/ratio_min": 0.999,
                "train/ratio_max": 1.001,
                "train/clip_fraction": 0.1,
                "train/grad_norm": 0.3,
                "train/optimizer_skips": 2.0 if step == 3 else float(step == 5),
                "train/weight_sync_failures": float(step >= 7),
                "perf/rollout_time": 1.5,
                "perf/train_time": 0.5,
            },
        )
    for step in evals:
        images = []
        for index in range(len(prompts)):
            picture = path / "drawn.png"
            Image.new("RGB", (size, size), (step, 40 * index, 200)).save(picture)
            images.append(folder.keep_image(picture, step=step, set_name="held_out", index=index))
        samples = [sample(p, 0.5 + step / 100 * k, step > 0 or not k, images[k]) for k, p in enumerate(prompts)]
        folder.write_eval(Evaluation(step, {"held_out": samples}))
    return folder


class Page(HTMLParser):
    """What a browser would load and run."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.links, self.handlers, self.images = [], [], [], []
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        for name, value in attributes:
            if name in ("src", "href", "srcset", "data", "action"):
                self.links.append(value)
            if name.startswith("on"):
                self.handlers.append(name)
        if tag == "img":
            self.images.append(dict(attributes))


def page_of(folder):
    html = write_report(folder).read_text()
    return html, Page(html)


# -- the page ----------------------------------------------------------------------------------------------------


def test_the_page_is_one_file_without_script_and_every_picture_is_in_it(tmp_path):
    html, page = page_of(make_run(tmp_path))
    assert page.links
    assert all(link.startswith("data:") for link in page.links)
    assert "script" not in page.tags
    assert page.handlers == []
    assert not re.search(r"url\(|@import|https?://(?!www\.w3\.org/)", html)
    assert len(page.images) == 6  # two prompts before, midway and after
    assert all(image["class"] == "tiny" for image in page.images)
    assert page.tags.count("svg") == 7


def test_the_page_states_the_change_with_its_standard_error_and_what_went_wrong(tmp_path):
    html, _ = page_of(make_run(tmp_path))
    assert "50%" in html
    assert "100%" in html
    assert "standard error 50.0 points" in html  # of the differences 0 and 1
    assert "1 of 12 rollouts were degenerate" in html
    assert "1 optimizer step skipped" in html  # the two of the degenerate rollout are not counted again
    assert "1 failed weight sync" in html
    assert "became correct" in html


def test_a_run_without_training_metrics_says_what_is_left_out(tmp_path):
    html, page = page_of(make_run(tmp_path, rollouts=0))
    assert "Policy ratio: no train/ratio_mean was recorded." in html
    assert "Gradient norm: no train/grad_norm was recorded." in html
    assert page.tags.count("svg") == 3  # the held-out points alone


@pytest.mark.parametrize(("rollouts", "evals"), [(0, ()), (1, ()), (1, (0,)), (5, (0,)), (5, ())])
def test_a_report_can_be_made_of_a_run_that_has_just_begun(tmp_path, rollouts, evals):
    html, _ = page_of(make_run(tmp_path, rollouts, evals))
    assert "no end is recorded" in html
    assert f"{rollouts} of 12 rollouts" in html


@pytest.mark.parametrize("state", ["finished", "interrupted", "failed"])
def test_the_page_says_how_the_run_ended(tmp_path, state):
    folder = make_run(tmp_path)
    folder.mark_ended(state, "RuntimeError: <engine> lost")
    html, _ = page_of(folder)
    assert ("RuntimeError: &lt;engine&gt; lost" in html) == (state != "finished")
    assert "no end is recorded" not in html


def test_a_torn_metrics_line_does_not_stop_the_report(tmp_path):
    folder = make_run(tmp_path)
    with open(folder.metrics_path, "ab") as file:
        file.write(b'{"step": 12, "metr')
    html, _ = page_of(folder)
    assert "12 of 12 rollouts" in html


def test_a_folder_without_settings_still_gives_a_report(tmp_path):
    folder = make_run(tmp_path)
    folder.settings_path.unlink()
    html, _ = page_of(folder)
    assert "No settings were recorded." in html


def test_what_is_no_run_folder_is_an_error_that_names_it_and_writes_nothing(tmp_path):
    with pytest.raises(RunFolderError) as error:
        write_report(tmp_path)
    assert error.value.path == tmp_path
    assert list(tmp_path.iterdir()) == []


EVIL = "</title></style></svg><script>alert(1)</script><img src=x onerror=alert(2)>\"'&{{ 7*7 }}"


def test_prompts_settings_and_names_cannot_inject_html(tmp_path):
    folder = RunFolder(tmp_path / "run <b>&")
    make_run(folder.path, settings={EVIL: {EVIL: EVIL}}, prompts=(EVIL, EVIL + "2"))
    folder.append_metrics(12, {f"reward/{EVIL}_mean": 1.0, f"eval/{EVIL}/reward_mean": 1.0})
    bad = EvalSample(EVIL, 1.0, {EVIL: 1.0}, True, EVIL)
    folder.write_eval(Evaluation(13, {EVIL: [bad]}))
    html, page = page_of(folder)
    assert "script" not in page.tags
    assert page.handlers == []
    assert all(link.startswith("data:") for link in page.links)
    assert "<script" not in html
    assert "{{ 7*7 }}" in html  # shown as the text that it is


def test_a_picture_path_that_leads_out_of_the_folder_is_not_followed(tmp_path):
    Image.new("RGB", (8, 8)).save(tmp_path / "secret.png")
    folder = make_run(tmp_path / "run", evals=())
    folder.write_eval(Evaluation(0, {"a": [sample("p", 1.0, True, "../secret.png")]}))
    folder.write_eval(Evaluation(1, {"a": [sample("p", 1.0, True, str(tmp_path / "secret.png"))]}))
    html, page = page_of(folder)
    assert page.images == []
    assert "2 pictures cannot be shown" in html


@pytest.mark.parametrize("data", [b"", b"not a picture", b"\x89PNG\r\n\x1a\ncut short"], ids=repr)
def test_a_missing_or_damaged_picture_is_said_and_does_not_stop_the_report(tmp_path, data):
    folder = make_run(tmp_path, evals=(0,))
    (folder.path / folder.read_evals()[0].sets["held_out"][0].image).write_bytes(data)
    (folder.path / folder.read_evals()[0].sets["held_out"][1].image).unlink()
    html, page = page_of(folder)
    assert page.images == []
    assert "2 pictures cannot be shown" in html


def test_large_pictures_are_made_smaller_and_not_pixelated(tmp_path):
    _, page = page_of(make_run(tmp_path, size=1024))
    assert all(image["src"].startswith("data:image/jpeg") for image in page.images)
    assert not any("class" in image for image in page.images)


# -- the numbers -------------------------------------------------------------------------------------------------


def test_the_change_on_the_same_prompts_is_paired_and_several_pictures_of_a_prompt_count_once():
    before = [sample("a", 0.0), sample("a", 0.2), sample("b", 1.0), sample("c", 0.5)]
    after = [sample("a", 0.3), sample("a", 0.5), sample("b", 1.1), sample("c", 0.8)]
    moved = change(before, after, reward_of)
    # Per prompt: 0.1 -> 0.4, 1.0 -> 1.1, 0.5 -> 0.8; differences 0.3, 0.1, 0.3
    assert moved.difference.mean == pytest.approx(0.7 / 3)
    assert moved.difference.error == pytest.approx(math.sqrt((2 * (0.2 / 3) ** 2 + (0.4 / 3) ** 2) / 2 / 3))
    assert moved.before.mean == pytest.approx(1.6 / 3)


def test_other_prompts_are_compared_as_two_independent_means():
    before, after = [sample("a", 0.0), sample("b", 1.0)], [sample("c", 1.0), sample("d", 1.0)]
    moved = change(before, after, reward_of)
    assert moved.difference.mean == pytest.approx(0.5)
    assert moved.difference.error == pytest.approx(0.5)


def test_a_change_without_correct_flags_or_with_one_prompt_says_no_more_than_it_knows():
    assert change([sample("a", 1.0)], [sample("a", 1.0)], correct_of) is None
    assert change([sample("a", 0.0)], [sample("a", 1.0)], reward_of).difference.error is None


@pytest.mark.parametrize(
    ("flags", "better", "words"),
    [([1, 1, 1, 1, 0, 1, 1, 1], True, "a rise beyond"), ([1, 0, 0, 0, 0, 0, 0, 0], None, "may be chance")],
)
def test_the_headline_calls_a_rise_a_rise_only_past_two_standard_errors(tmp_path, flags, better, words):
    folder = RunFolder(tmp_path)
    folder.start({}, total_rollouts=2)
    folder.write_eval(Evaluation(0, {"h": [sample(str(k), 0.0, False) for k in range(8)]}))
    folder.write_eval(Evaluation(2, {"h": [sample(str(k), 0.0, bool(f)) for k, f in enumerate(flags)]}))
    correct, reward = headlines(RunData(folder))
    assert correct.better is better
    assert words in correct.sentence
    assert reward.better is None


def test_a_counter_that_starts_again_after_a_resume_is_added_up():
    assert increases([0, 1, 2, 3, 4], [0.0, 2.0, 2.0, 1.0, 1.0]) == (3, [1, 3])


def test_running_time_leaves_out_the_gap_between_a_kill_and_its_resume(tmp_path):
    folder = RunFolder(tmp_path)
    folder.start({}, total_rollouts=4)
    data = RunData(folder)
    data.info = {"starts": [{"time": "2026-01-01T00:00:00+00:00"}, {"time": "2026-01-02T00:00:00+00:00"}]}
    assert running_seconds(data) is None
    for step, time in enumerate(("2026-01-01T00:00:10+00:00", "2026-01-02T00:00:05+00:00")):
        folder.append_metrics(step, {}, time)
    data.records = folder.read_metrics()
    assert running_seconds(data) == 15.0


def test_durations_are_said_in_the_units_that_matter():
    assert [duration(s) for s in (4.21, 42, 185, 7800)] == ["4.2 s", "42 s", "3 min 05 s", "2 h 10 min"]


def test_the_moving_mean_leaves_out_nan_and_is_shorter_at_the_ends():
    assert moving_mean([1.0, 2.0, math.nan, 4.0], 1) == [1.5, 1.5, 3.0, 4.0]


# -- the curves --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("low", "high", "ticks", "labels"),
    [
        (0.0, 1.0, [0, 0.5, 1.0], ["0.0", "0.5", "1.0"]),
        (0.72, 0.81, None, ["0.70", "0.75", "0.80", "0.85"]),
        (0.9999, 1.0001, None, ["0.99990", "0.99995", "1.00000", "1.00005", "1.00010"]),
        (-3.0, 12.0, None, ["-5", "0", "5", "10", "15"]),
        (0.0, 3e-5, None, ["0", "1e-5", "2e-5", "3e-5"]),
        (2.0, 2.0, None, ["1.90", "1.95", "2.00", "2.05", "2.10"]),
    ],
)
def test_ticks_are_round_cover_the_data_and_have_just_the_decimals_they_need(low, high, ticks, labels):
    got = nice_ticks(low, high, target=3 if ticks else 5)
    assert got[0] <= low + 1e-12
    assert got[-1] >= high - 1e-12
    assert tick_labels(got) == labels
    if ticks:
        assert got == pytest.approx(ticks)


def test_log_ticks_are_the_decades_around_the_data():
    assert log_ticks(0.02, 5.0) == pytest.approx([0.01, 0.1, 1.0, 10.0])
    assert log_ticks(1.0, 1.0) == pytest.approx([1.0, 10.0])


def test_a_standalone_picture_is_well_formed_with_labels_tooltips_and_both_colour_schemes():
    svg = curves_svg([Series(name=f"seed {k}", x=[0, 10], y=[0.5, 0.6 + k / 10]) for k in range(3)], "Reward & <b>")
    root = ET.fromstring(svg)
    texts = [element.text for element in root.iter(f"{SVG}text")]
    assert {"Reward & <b>", "seed 0", "seed 1", "seed 2", "rollout", "0", "10"} <= set(texts)
    assert "seed 2 at 10: 0.8" in [element.text for element in root.iter(f"{SVG}title")]
    assert "prefers-color-scheme: dark" in svg
    assert len(list(root.iter(f"{SVG}path"))) == 3


def test_points_lie_where_their_values_are():
    svg = curves_svg([Series(name="a", x=[0, 1, 2], y=[0.0, 0.5, 1.0], kind="points")], "t", y_range=(0, 1))
    points = [(float(c.get("cx")), float(c.get("cy"))) for c in ET.fromstring(svg).iter(f"{SVG}circle")]
    (x0, y0), (x1, y1), (x2, y2) = points
    assert x0 < x1 < x2
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.01)
    assert y0 > y1 > y2  # up is less in SVG
    assert y0 - y1 == pytest.approx(y1 - y2, abs=0.01)


def test_a_nan_breaks_the_line_and_does_not_reach_the_picture():
    svg = curves_svg([Series(name="a", x=[0, 1, 2, 3, 4], y=[1, 2, math.nan, 3, 4])], "t")
    assert len(list(ET.fromstring(svg).iter(f"{SVG}path"))) == 2
    assert "nan" not in svg


def test_a_long_run_stays_small_and_keeps_its_peak():
    y = [0.0] * 50_000
    y[31_234] = 9.0
    svg = curves_svg([Series(name="a", x=range(50_000), y=y)], "t", y_range=(0, 10))
    assert len(svg) < 60_000
    (path,) = [p.get("d") for p in ET.fromstring(svg).iter(f"{SVG}path")]
    heights = [float(pair.split()[1]) for pair in path[1:].split("L")]
    assert min(heights) < 0.3 * max(heights)


def test_control_characters_in_a_name_leave_the_picture_well_formed():
    svg = curves_svg([Series(name="a\x00\x1b\ud800", x=[0], y=[1.0])], "t\x08")
    assert ET.fromstring(svg).tag == f"{SVG}svg"


@pytest.mark.parametrize("y", [[], [math.nan], [math.inf]])
def test_nothing_to_draw_is_an_error(y):
    with pytest.raises(ValueError):
        curves_svg([Series(name="a", x=[0] * len(y), y=y)], "t")


def test_series_of_unequal_lengths_and_a_log_axis_at_zero_are_errors():
    with pytest.raises(ValueError):
        Series(name="a", x=[0, 1], y=[1.0])
    with pytest.raises(ValueError):
        curves_svg([Series(name="a", x=[0, 1], y=[0.0, 1.0])], "t", y_log=True)
