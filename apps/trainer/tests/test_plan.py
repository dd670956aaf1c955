"""`trainer plan`: one page before anything loads; what it says is tested with the estimate itself."""

import json
import subprocess
import sys

import pytest
from flowgrpo_trainer.main import main

LAYERS, PARAMETERS = 60, 20_430_401_088


@pytest.fixture
def environment(tmp_path, monkeypatch):
    """The full-size model by its config.json files alone: no weights, no scheduler, no data."""
    vision = {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "out_hidden_size": 3584}
    text = {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28}
    files = {
        "transformer": {"_class_name": "QwenImageTransformer2DModel", "num_layers": LAYERS},
        "text_encoder": {**text, "num_key_value_heads": 4, "vocab_size": 152064, "vision_config": vision},
        "vae": {"_class_name": "AutoencoderKLQwenImage"},
    }
    for part, config in files.items():
        (tmp_path / "Qwen-Image" / part).mkdir(parents=True)
        (tmp_path / "Qwen-Image" / part / "config.json").write_text(json.dumps(config))
    monkeypatch.setenv("EXP_DIR", str(tmp_path / "nothing-here"))
    monkeypatch.setenv("MODEL_DIR", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "120")


def run(capsys, *words):
    with pytest.raises(SystemExit) as ended:
        main(["plan", *words])
    said = capsys.readouterr()
    return ended.value.code, said.out, said.err


@pytest.mark.parametrize("recipe", ["qwen-image-t2i-lora-8xgpu", "qwen-image-t2i-8xgpu"])
def test_the_recipes_fit_their_eight_cards(environment, capsys, recipe):
    code, out, _ = run(capsys, "--recipe", recipe, "--json")
    found = json.loads(out)
    assert (code, found["fits"], found["cards"], found["parameters"]) == (0, True, 8, PARAMETERS)
    assert list(found["peak_gib"]) == ["load", "rollout", "replay", "optimizer step", "sync", "both asleep"]
    assert all(0 < peak < found["card_gib"] for peak in found["peak_gib"].values())
    assert found["seconds"]["total"] > found["seconds"]["replay"] > 0
    eight = found["by_cards"]["8"]
    assert eight["peak_gib"] == max(found["peak_gib"].values())
    assert eight["peak_gib"] < found["by_cards"]["1"]["peak_gib"]
    assert eight["seconds"] == found["seconds"]["total"] < found["by_cards"]["4"]["seconds"]
    # T7: eight candidates cannot be dealt out to sixteen ranks, so each replays them all; said in a note.
    assert found["by_cards"]["16"]["seconds"] > eight["seconds"]
    assert any("--n-samples-per-prompt" in note for note in found["notes"])


def test_the_page_sums_host_memory_up_for_a_node(environment, capsys):
    recipe = ("--recipe", "qwen-image-t2i-8xgpu")
    two_nodes = (*recipe, "--resource", '{"actor": [2, 4], "rollout": [2, 4]}')
    _, numbers, _ = run(capsys, *recipe, "--json")
    found = json.loads(numbers)
    assert found["host_gib_per_node"] == 8 * found["host_gib_per_card"] > 0
    for words, cards in ((recipe, 8), (two_nodes, 4)):
        _, page, _ = run(capsys, *words)
        assert f"{cards * found['host_gib_per_card']:.0f} GiB a node of {cards}." in " ".join(page.split())


ONE_CARD = ("--recipe", "qwen-image-t2i-8xgpu", "--resource", '{"actor": [1, 1], "rollout": [1, 1]}')


def test_what_does_not_fit_ends_with_3_and_says_by_how_much_and_what_would(environment, capsys):
    code, out, _ = run(capsys, *ONE_CARD)
    assert code == 3
    _, numbers, _ = run(capsys, *ONE_CARD, "--json")
    found = json.loads(numbers)
    excess = found["peak_gib"][found["worst_phase"]] - found["card_gib"]
    assert excess > 0
    words = ["does not fit", found["worst_phase"], f"{excess:.1f} too much", *(r["change"] for r in found["remedies"])]
    assert found["remedies"]
    assert [word for word in words if word not in out] == []


def test_a_smaller_card_that_was_not_measured_is_planned_for_and_says_so(environment, capsys):
    recipe = ("--recipe", "qwen-image-t2i-lora-8xgpu", "--json")
    _, h200, _ = run(capsys, *recipe)
    _, a100, _ = run(capsys, *recipe, "--plan-gpu", "a100")
    h200, a100 = json.loads(h200), json.loads(a100)
    assert (h200["card_measured"], a100["card_measured"]) == (True, False)
    assert a100["seconds"]["replay"] > 2 * h200["seconds"]["replay"]
    assert any("a100" in note for note in a100["notes"])


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--recipe", "quickstart", "--model-path", "no-such-folder"), "transformer/config.json"),
        (("--recipe", "quickstart", "--lora-target-modules", "attn.to_qq"), "attn.to_qq"),
        (("--recipe", "quickstart", "--num-updates-per-batch", "7"), "--num-updates-per-batch"),
        (("--lr", "1e-4"), "--model-path"),
    ],
)
def test_what_cannot_be_planned_is_refused_by_name(capsys, words, named):
    code, out, err = run(capsys, *words)
    assert (code, out) == (2, "")
    assert named in err


def test_planning_loads_no_torch():
    code = (
        "import sys; from flowgrpo_trainer.plan import plan\n"
        "code = plan(['--recipe', 'quickstart'])\n"
        "sys.exit(code or int('torch' in sys.modules or 'ray' in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=120, capture_output=True).returncode == 0
