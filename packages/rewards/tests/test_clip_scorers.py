"""Each CLIP-like scorer against the code path of the library it comes from, on random weights of its architecture."""

import numpy as np
import open_clip
import pytest
import torch
from flowgrpo_rewards.aesthetic import AestheticHead, AestheticScorer
from flowgrpo_rewards.clip_features import pooled
from flowgrpo_rewards.open_clip_scorers import ClipScoreScorer, HpsV2Scorer
from flowgrpo_rewards.pickscore import PickScoreScorer
from flowgrpo_rewards.preprocessing import Preprocessing, resize_in_float, resize_uint8
from flowgrpo_rewards.protocol import Invalid, ScorerLoadError
from flowgrpo_rewards.testing import (
    TINY_CLIP,
    TINY_OPEN_CLIP,
    natural_pictures,
    samples_of,
    write_clip_folder,
    write_open_clip_folder,
)
from PIL import Image
from safetensors.torch import save_file
from transformers import AutoModel, AutoTokenizer, CLIPImageProcessor

PROMPTS = ["a red panda in a teacup", "two wine glasses, 8k", "a red panda in a teacup", "Zürich \N{SNOWMAN}"]
# In units of the score (logit_scale 14 here): 1 of 255 grey levels in a few pixels moves it by less.
ATOL = 2e-3


@pytest.fixture(scope="module")
def clip_folder(tmp_path_factory):
    return write_clip_folder(tmp_path_factory.mktemp("clip"), TINY_CLIP)


@pytest.fixture(scope="module")
def open_clip_folder(tmp_path_factory):
    return write_open_clip_folder(tmp_path_factory.mktemp("open_clip"))


@pytest.fixture(scope="module")
def pictures():
    return natural_pictures(3, 96, 96) + natural_pictures(1, 80, 123, seed=1)


def values(results, name):
    return [result[name].value for result in results]


def test_pickscore_equals_the_published_code(clip_folder, pictures):
    """The model card of PickScore_v1: processor, features, unit length, logit_scale, one prompt at a time."""
    model = AutoModel.from_pretrained(clip_folder).eval()
    tokenizer, processor = AutoTokenizer.from_pretrained(clip_folder), CLIPImageProcessor.from_pretrained(clip_folder)
    expected = []
    with torch.no_grad():
        for picture, prompt in zip(pictures, PROMPTS, strict=True):
            text = tokenizer(prompt, padding=True, truncation=True, max_length=77, return_tensors="pt")
            image = processor(images=Image.fromarray(picture), return_tensors="pt")
            image_embs, text_embs = pooled(model.get_image_features(**image)), pooled(model.get_text_features(**text))
            image_embs = image_embs / torch.norm(image_embs, dim=-1, keepdim=True)
            text_embs = text_embs / torch.norm(text_embs, dim=-1, keepdim=True)
            expected.append((model.logit_scale.exp() * (text_embs @ image_embs.T)[0]).item())
    got = values(PickScoreScorer(model_path=str(clip_folder)).score(samples_of(pictures, PROMPTS)), "pickscore")
    assert got == pytest.approx(expected, abs=ATOL)
    assert np.std(expected) > 50 * ATOL  # the pictures and prompts do tell apart


def test_get_image_features_works_as_a_tensor_and_as_an_output_object():
    features = torch.randn(2, 3)

    class Output:
        pooler_output = features

    assert pooled(features) is features
    assert pooled(Output()) is features


def test_a_candidate_scores_the_same_alone_and_among_others(clip_folder, pictures):
    scorer = PickScoreScorer(model_path=str(clip_folder))
    samples = samples_of(pictures, PROMPTS)
    together = values(scorer.score(samples), "pickscore")
    alone = [values(scorer.score([sample]), "pickscore")[0] for sample in samples]
    assert alone == pytest.approx(together, abs=1e-5)


def test_clipscore_equals_open_clips_own_code(open_clip_folder, pictures):
    model, _, transform = open_clip.create_model_and_transforms(f"local-dir:{open_clip_folder}")
    tokens = open_clip.tokenizer.SimpleTokenizer()(PROMPTS)
    batch = torch.stack([transform(Image.fromarray(picture)) for picture in pictures])
    with torch.no_grad():
        image, text = model.encode_image(batch, normalize=True), model.encode_text(tokens, normalize=True)
    expected = 2.5 * (image * text).sum(-1).clamp(min=0)
    got = values(ClipScoreScorer(model_path=str(open_clip_folder)).score(samples_of(pictures, PROMPTS)), "clipscore")
    assert got == pytest.approx(expected.tolist(), abs=ATOL)


def test_hpsv2_equals_open_clips_code_with_the_longest_edge_resized(tmp_path, open_clip_folder, pictures):
    model, _, _ = open_clip.create_model_and_transforms(f"local-dir:{open_clip_folder}")
    (tmp_path / "open_clip_config.json").write_bytes((open_clip_folder / "open_clip_config.json").read_bytes())
    torch.save({"state_dict": model.state_dict()}, tmp_path / "HPS_v2.1_compressed.pt")  # the published layout
    transform = open_clip.image_transform(56, is_train=False, resize_mode="longest", fill_color=0)
    batch = torch.stack([transform(Image.fromarray(picture)) for picture in pictures])
    with torch.no_grad():
        output = model(batch, open_clip.tokenizer.SimpleTokenizer()(PROMPTS))
    expected = torch.diagonal(output[0] @ output[1].T) if isinstance(output, tuple) else None
    assert expected is not None
    got = values(HpsV2Scorer(model_path=str(tmp_path)).score(samples_of(pictures, PROMPTS)), "hpsv2")
    assert got == pytest.approx(expected.tolist(), abs=ATOL)


def test_aesthetic_equals_the_head_on_unit_clip_features(tmp_path, pictures):
    write_clip_folder(tmp_path, TINY_CLIP)
    torch.manual_seed(1)
    head = AestheticHead(32).eval()
    torch.save(head.state_dict(), tmp_path / "sac+logos+ava1-l14-linearMSE.pth")  # the published file
    model, processor = AutoModel.from_pretrained(tmp_path).eval(), CLIPImageProcessor.from_pretrained(tmp_path)
    with torch.no_grad():
        inputs = [processor(images=Image.fromarray(p), return_tensors="pt")["pixel_values"] for p in pictures]
        features = pooled(model.get_image_features(pixel_values=torch.cat(inputs)))
        expected = head(features / features.norm(dim=-1, keepdim=True))
    got = values(AestheticScorer(model_path=str(tmp_path)).score(samples_of(pictures, PROMPTS)), "aesthetic")
    assert got == pytest.approx(expected.tolist(), abs=1e-4)


def test_the_published_head_has_these_parameters():
    shapes = {name: list(value.shape) for name, value in AestheticHead().state_dict().items() if "weight" in name}
    assert shapes == {
        "layers.0.weight": [1024, 768],
        "layers.2.weight": [128, 1024],
        "layers.4.weight": [64, 128],
        "layers.6.weight": [16, 64],
        "layers.7.weight": [1, 16],
    }


def test_an_aesthetic_head_for_another_clip_is_refused(tmp_path):
    write_clip_folder(tmp_path, TINY_CLIP)
    save_file(AestheticHead(768).state_dict(), tmp_path / "aesthetic_head.safetensors")
    with pytest.raises(ScorerLoadError):
        AestheticScorer(model_path=str(tmp_path))


@pytest.mark.parametrize("resize", [resize_uint8, resize_in_float])
@pytest.mark.parametrize("size", [(384, 384), (512, 384), (97, 301), (64, 64), (30, 50)], ids=str)
def test_resizing_gives_pillows_grey_levels(size, resize):
    """One level of 255 apart at most, two where a picture grows (torch rounds its weights less); under 2 % differ."""
    picture = natural_pictures(1, *size)[0]
    to = (224, int(224 * size[1] / size[0]))
    expected = np.asarray(Image.fromarray(picture).resize(to[::-1], Image.Resampling.BICUBIC)).astype(int)
    batch = torch.from_numpy(picture).permute(2, 0, 1)[None]
    got = resize(batch, to)[0].permute(1, 2, 0).numpy().astype(int)
    difference = np.abs(got - expected)
    assert difference.max() <= (1 if min(size) > 224 else 2)
    assert (difference > 0).mean() < 0.02


@pytest.mark.parametrize("size", [(384, 384), (300, 451), (451, 300)], ids=str)
def test_preprocessing_agrees_with_the_official_processor(size, clip_folder):
    """One grey level is 1 / 255 / std = 0.0150 at most."""
    pictures = natural_pictures(2, *size)
    processor = CLIPImageProcessor.from_pretrained(clip_folder)
    expected = processor(images=[Image.fromarray(p) for p in pictures], return_tensors="pt")["pixel_values"]
    got = Preprocessing(size=56)(pictures, torch.device("cpu"), torch.float32)
    assert got.shape == expected.shape
    assert (got - expected).abs().max() < 0.0151
    assert (got - expected).abs().mean() < 1e-3


@pytest.mark.parametrize(
    ("scorer", "lacks"),
    [
        (PickScoreScorer, ["config.json", "model.safetensors", "tokenizer.json"]),
        (ClipScoreScorer, ["open_clip_config.json", "open_clip_model.safetensors"]),
        (HpsV2Scorer, ["HPS_v2.1_compressed.pt"]),
        (AestheticScorer, ["config.json", "sac+logos+ava1-l14-linearMSE.pth"]),
    ],
)
def test_a_folder_that_lacks_files_is_refused_with_their_names(scorer, lacks, tmp_path):
    for path in (None, str(tmp_path / "nowhere"), str(tmp_path)):
        with pytest.raises(ScorerLoadError) as error:
            scorer(model_path=path)
    assert all(name in error.value.what for name in lacks)


def test_weights_of_another_architecture_are_refused(tmp_path, open_clip_folder):
    (tmp_path / "HPS_v2.1_compressed.pt").write_bytes(b"")
    torch.save({"state_dict": {"logit_scale": torch.ones(())}}, tmp_path / "HPS_v2.1_compressed.pt")
    (tmp_path / "open_clip_config.json").write_bytes((open_clip_folder / "open_clip_config.json").read_bytes())
    with pytest.raises(ScorerLoadError) as error:
        HpsV2Scorer(model_path=str(tmp_path))
    assert error.value.scorer == "HpsV2Scorer"


def test_a_truncated_png_is_invalid_by_name_and_its_neighbours_keep_their_values(clip_folder, pictures, tmp_path):
    paths = [tmp_path / f"{k}.png" for k in range(3)]
    for path, picture in zip(paths, pictures, strict=False):
        Image.fromarray(picture).save(path)
    paths[1].write_bytes(paths[1].read_bytes()[:2000])
    scorer = PickScoreScorer(model_path=str(clip_folder))
    results = scorer.score(samples_of(paths, PROMPTS[:3]))
    assert isinstance(results[1]["pickscore"], Invalid)
    expected = values(scorer.score(samples_of(pictures[:3], PROMPTS[:3])), "pickscore")
    assert [results[0]["pickscore"].value, results[2]["pickscore"].value] == pytest.approx([expected[0], expected[2]])


def test_the_tiny_open_clip_has_the_real_vocabulary():
    assert TINY_OPEN_CLIP["text_cfg"]["vocab_size"] == open_clip.tokenizer.SimpleTokenizer().vocab_size


def test_the_written_tokenizer_gives_clips_tokens(clip_folder):
    ours = AutoTokenizer.from_pretrained(clip_folder)(PROMPTS, padding="max_length", max_length=77, truncation=True)
    theirs = open_clip.tokenizer.SimpleTokenizer()(PROMPTS).tolist()
    lengths = [row.index(49407) + 1 for row in theirs]
    got = [row[:length] for row, length in zip(ours["input_ids"], lengths, strict=True)]
    assert got == [row[:length] for row, length in zip(theirs, lengths, strict=True)]
