"""OCR, image statistics, the judge, and several scorers as one."""

import io
import json

import httpx
import numpy as np
import pytest
from flowgrpo_rewards import RewardConfig, load_scorer, post_process
from flowgrpo_rewards.combined import CombinedScorer
from flowgrpo_rewards.images import pixels
from flowgrpo_rewards.judge import JudgeScorer, parse_score, read_settings
from flowgrpo_rewards.ocr import OcrScorer, expected_text, substring_distance, text_match
from flowgrpo_rewards.protocol import (
    GroupRewardError,
    Invalid,
    RewardEndpointError,
    RewardError,
    RewardSample,
    ScorerContractError,
    ScorerLoadError,
    Value,
)
from flowgrpo_rewards.statistics import ImageStatisticsScorer, brightness
from flowgrpo_rewards.testing import FakeScorer, grid_of_samples, natural_pictures, samples_of
from PIL import Image, ImageDraw, ImageFont

GREY = np.full((16, 16, 3), 128, np.uint8)


def drawn(text, size=(384, 384)):
    """Black letters on white, large enough to read."""
    image = Image.new("RGB", size, "white")
    ImageDraw.Draw(image).text((16, 24), text, fill="black", font=ImageFont.load_default(36))
    return np.array(image)


@pytest.fixture(scope="module")
def ocr():
    return OcrScorer()


def test_ocr_reads_a_rendered_text_and_marks_a_wrong_one(ocr):
    pictures = [drawn("OPEN 24"), drawn("OPEN 24"), np.full((384, 384, 3), 255, np.uint8)]
    prompts = ['a sign that says "Open 24"', 'a sign that says "ZEBRA"', 'a sign that says "Open 24"']
    right, wrong, blank = (r["ocr"].value for r in ocr.score(samples_of(pictures, prompts)))
    assert right == 1.0
    assert wrong < 0.5
    assert blank == 0.0


def test_a_prompt_without_quotes_is_invalid_and_never_an_index_error(ocr):
    samples = samples_of([drawn("OPEN"), drawn("OPEN")], ["a plain sign", 'a sign with "" on it'])
    results = [result["ocr"] for result in ocr.score(samples)]
    assert all(isinstance(result, Invalid) for result in results)


def test_metadata_text_wins_over_the_quotes():
    assert expected_text('says "a"', {"text": "b"}) == "b"
    assert expected_text('says \u201cHello\u201d and "you"', {}) == "Hello you"
    assert isinstance(expected_text('says "a"', {"text": " "}), Invalid)


@pytest.mark.parametrize(
    ("expected", "read", "score"),
    [
        ("Open", "OPEN", 1.0),
        ("Open 24", "we are open24h", 1.0),
        ("open", "opem", 0.75),
        ("open", "", 0.0),
        ("ab", "xyz", 0.0),
        ("\N{FULLWIDTH LATIN CAPITAL LETTER A}b", "ab", 1.0),
    ],
)
def test_text_match_is_one_minus_the_share_of_wrong_letters(expected, read, score):
    assert text_match(expected, read) == pytest.approx(score)


def test_substring_distance_equals_the_best_of_all_substrings():
    def levenshtein(a, b):
        row = list(range(len(b) + 1))
        for i, x in enumerate(a, 1):
            before, row = row, [i]
            for j, y in enumerate(b, 1):
                row.append(min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (x != y)))
        return row[-1]

    rng = np.random.default_rng(0)
    for _ in range(60):
        needle, haystack = ("".join(rng.choice(list("abc"), rng.integers(1, 7))) for _ in range(2))
        parts = [haystack[i:j] for i in range(len(haystack) + 1) for j in range(i, len(haystack) + 1)]
        assert substring_distance(needle, haystack) == min(levenshtein(needle, part) for part in parts)


def test_statistics_are_those_of_the_jpeg_and_the_luma():
    picture = natural_pictures(1, 64, 64)[0]
    buffer = io.BytesIO()
    Image.fromarray(picture).save(buffer, format="JPEG", quality=95)
    (result,) = ImageStatisticsScorer().score(samples_of([picture], ["x"]))
    assert result["compressibility"] == Value(-len(buffer.getvalue()) / 1000)
    assert brightness(np.full((2, 2, 3), 255, np.uint8)) == pytest.approx(1.0)
    assert brightness(np.array([[[255, 0, 0]]], np.uint8)) == pytest.approx(0.299)


@pytest.mark.parametrize(
    "image", [np.zeros((4, 4), np.uint8), np.zeros((4, 4, 3), np.float32), np.zeros((0, 4, 3), np.uint8), None]
)
def test_what_is_no_picture_is_refused_in_words(image):
    with pytest.raises(TypeError):
        pixels(image)


def test_transparency_is_laid_over_white(tmp_path):
    Image.new("RGBA", (2, 2), (255, 0, 0, 0)).save(tmp_path / "clear.png")
    assert (pixels(tmp_path / "clear.png") == 255).all()


def test_a_missing_file_is_invalid_by_name():
    (result,) = ImageStatisticsScorer().score(samples_of(["/nowhere/x.png"], ["x"]))
    assert "/nowhere/x.png" in result["brightness"].reason


# --------------------------------------------------------------------------- judge


def settings_file(tmp_path, **settings):
    path = tmp_path / "judge.json"
    path.write_text(json.dumps({"endpoint": "http://judge.test/v1", "model": "vlm"} | settings))
    return str(path)


def answering(*replies):
    """A transport that answers in turn with (status, text of the judge), or bytes, or raises; and its requests."""
    asked = []

    def handle(request):
        asked.append(json.loads(request.content))
        reply = replies[min(len(asked), len(replies)) - 1]
        if isinstance(reply, Exception):
            raise reply
        if isinstance(reply, bytes):
            return httpx.Response(200, content=reply)
        status, text = reply
        return httpx.Response(status, json={"choices": [{"message": {"content": text}}]})

    return httpx.MockTransport(handle), asked


def judge(tmp_path, *replies, **settings):
    transport, asked = answering(*replies)
    pauses = []
    path = settings_file(tmp_path, concurrency=1, **settings)
    return JudgeScorer(model_path=path, transport=transport, pause=pauses.append), asked, pauses


def test_the_judge_sees_picture_and_prompt_and_its_number_becomes_a_share(tmp_path):
    scorer, asked, _ = judge(tmp_path, (200, 'I think {"score": 7.5}'))
    (result,) = scorer.score(samples_of([GREY], ["a {red} panda"]))
    assert result == {"judge": Value(0.75)}
    picture, text = asked[0]["messages"][0]["content"]
    assert picture["image_url"]["url"].startswith("data:image/png;base64,")
    assert "a {red} panda" in text["text"]


@pytest.mark.parametrize(
    "text",
    [
        *("great", '{"score": 11}', '{"score": 1} {"score": 2}', None, "8 of 10, or 9"),
        *('{"score": 1/10}', '{"score": 1,5}', '{"score": 7', '{"score": .7}', '{"score": 7 of 10}', '{"score": "7"}'),
        *('{"score": +7}', '{"score": 1e9}', '{"score": 7.}', '{"score": 1/2} {"score": 7}', "1/10", "1,5"),
    ],
)
def test_an_answer_without_one_number_in_range_is_invalid_and_never_zero(text):
    assert isinstance(parse_score(text, low=0, high=10), Invalid)


@pytest.mark.parametrize(
    ("text", "share"),
    [
        *((" 5. ", 0.5), ("1e-3", 0.0001), ('{"score": 1e-3}', 0.0001), ('{"score":2.5E+0 }', 0.25)),
        *(('{"score": 5, "why": "x"}', 0.5), ('{"score": 5,}', 0.5), ('{"score": 5} or {"score": 5.0}', 0.5)),
        ('as asked, {"score": number}: {"score": 5}', 0.5),
    ],
)
def test_one_whole_number_is_a_score(text, share):
    assert parse_score(text, low=0, high=10) == Value(pytest.approx(share))


def test_a_busy_judge_is_asked_again(tmp_path):
    scorer, asked, pauses = judge(tmp_path, (429, ""), b"<html>", (200, '{"score": 10}'))
    (result,) = scorer.score(samples_of([GREY], ["x"]))
    assert result == {"judge": Value(1.0)}
    assert (len(asked), pauses) == (3, [0.5, 1.0])


@pytest.mark.parametrize(("status", "hint"), [(401, "OPENAI_API_KEY"), (403, "OPENAI_API_KEY"), (404, "/v1")])
def test_a_judge_that_refuses_everybody_ends_the_step_at_once(tmp_path, status, hint):
    scorer, asked, _ = judge(tmp_path, (status, ""))
    with pytest.raises(RewardEndpointError) as error:
        scorer.score(samples_of([GREY], ["x"]))
    assert len(asked) == 1
    assert error.value.samples == ((0, 0),)
    assert hint in error.value.hint


def test_a_judge_that_cannot_be_reached_ends_the_step_after_its_tries(tmp_path):
    scorer, asked, _ = judge(tmp_path, httpx.ConnectError("refused"), retries=2)
    with pytest.raises(RewardEndpointError) as error:
        scorer.score(samples_of([GREY], ["x"]))
    assert len(asked) == 3
    assert "does the judge run?" in error.value.hint


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        ((400, "content_filter"), "400"),
        ((422, "no"), "422"),
        ((503, "overloaded"), "503"),
        (b"<html>gateway</html>", "<html>"),
        (b"[]", "no text"),
        (httpx.ReadTimeout("slow"), "ReadTimeout"),
    ],
)
def test_a_request_that_the_judge_does_not_answer_costs_its_own_sample_alone(tmp_path, reply, said):
    scorer, asked, _ = judge(tmp_path, (200, '{"score": 5}'), reply, (200, '{"score": 5}'), retries=0)
    results = [result["judge"] for result in scorer.score(samples_of([GREY] * 3, ["x"] * 3))]
    assert (results[0], results[2]) == (Value(0.5), Value(0.5))
    assert said in results[1].reason
    assert len(asked) == 3


@pytest.mark.parametrize(
    "settings", [{"temprature": 1}, {"low": 3, "high": 1}, {"question": "{unknown}"}, {"endpoint": "host:1"}]
)
def test_judge_settings_that_are_wrong_are_refused(tmp_path, settings):
    with pytest.raises(ScorerLoadError):
        read_settings(settings_file(tmp_path, **settings))


# --------------------------------------------------------------------------- combined


def test_combined_scorers_offer_all_components_and_respect_routes(tmp_path):
    path = tmp_path / "scorers.json"
    entries = [{"scorer": "statistics"}, {"scorer": "flowgrpo_rewards.testing.FakeScorer"}]
    path.write_text(json.dumps({"scorers": entries}))
    scorer = load_scorer(RewardConfig(reward_scorer_path="combined", reward_model_path=str(path)))
    routed = {"reward": "fake"}
    groups = [
        [RewardSample(image=GREY, prompt="x", group_index=g, slot=n, metadata=m) for n in range(2)]
        for g, m in enumerate([{}, routed])
    ]
    report = post_process(groups, scorer, RewardConfig(reward_scorer_path="combined"))
    assert report.applies == {
        "compressibility": [True, False],
        "brightness": [True, False],
        "fake": [True, True],
    }
    assert report.components["fake"] == [[0.0, 1.0], [10.0, 11.0]]
    assert report.components["brightness"][0] == pytest.approx([128 / 255] * 2)


class Breaking(FakeScorer):
    """Component `breaking`; raises on one sample, or always."""

    trouble = None

    def __init__(self):
        super().__init__(components=("breaking",))

    def score(self, samples):
        if isinstance(self.trouble, RewardError) or any((s.group_index, s.slot) == (1, 2) for s in samples):
            raise self.trouble
        return super().score(samples)


def combined_with_a_breaking_scorer(tmp_path, monkeypatch, trouble):
    monkeypatch.setattr(Breaking, "trouble", trouble)
    monkeypatch.setattr("flowgrpo_rewards.testing.Breaking", Breaking, raising=False)
    path = tmp_path / "scorers.json"
    names = ("flowgrpo_rewards.testing.Breaking", "flowgrpo_rewards.testing.FakeScorer")
    path.write_text(json.dumps({"scorers": [{"scorer": name} for name in names]}))
    return CombinedScorer(model_path=str(path))


@pytest.mark.parametrize("required", [("fake",), ("fake", "breaking")])
@pytest.mark.parametrize(
    ("trouble", "failed"),
    [
        (ValueError("weird"), [(1, 2)]),
        (RewardEndpointError("http://judge", "no connection"), [(g, n) for g in range(2) for n in range(4)]),
    ],
)
def test_a_scorer_that_fails_costs_its_own_components_alone(tmp_path, monkeypatch, required, trouble, failed):
    scorer = combined_with_a_breaking_scorer(tmp_path, monkeypatch, trouble)
    weights = {"fake": 1.0, "breaking": 1.0}
    config = RewardConfig(reward_required_components=required, reward_component_weights=weights)
    if "breaking" in required:
        with pytest.raises(GroupRewardError) as error:
            post_process(grid_of_samples(2, 4), scorer, config)
        failures = error.value.failures
    else:
        report = post_process(grid_of_samples(2, 4), scorer, config)
        failures = report.left_out
        assert report.components["fake"] == [[0.0, 1.0, 2.0, 3.0], [10.0, 11.0, 12.0, 13.0]]
        assert report.applies["fake"] == [True, True]
    assert [(f.group_index, f.slot, f.component) for f in failures] == [(*place, "breaking") for place in failed]
    assert len(scorer._scorers[1].calls) == 1  # nobody is scored twice for another's failure


def test_a_scorer_that_breaks_the_protocol_is_named_and_ends_the_step(tmp_path, monkeypatch):
    scorer = combined_with_a_breaking_scorer(tmp_path, monkeypatch, ScorerContractError("Breaking", "wrong"))
    with pytest.raises(ScorerContractError) as error:
        post_process(grid_of_samples(2, 4), scorer, RewardConfig(reward_required_components=("fake",)))
    assert error.value.scorer == "Breaking"


@pytest.mark.parametrize("text", ["", "{}", '{"scorers": []}', '{"scorers": [{"scorer": "ocr"}, {"scorer": "ocr"}]}'])
def test_a_combination_that_is_wrong_is_refused(tmp_path, text):
    path = tmp_path / "scorers.json"
    path.write_text(text)
    with pytest.raises(ScorerLoadError):
        load_scorer(RewardConfig(reward_scorer_path="combined", reward_model_path=str(path)))
