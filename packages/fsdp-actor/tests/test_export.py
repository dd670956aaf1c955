"""An export is what was trained, whichever form it has, or it is refused."""

import shutil

import pytest
import torch
from flowgrpo_fsdp_actor.checkpoint_files import COMMITTED
from flowgrpo_fsdp_actor.errors import CheckpointError, ExportError
from flowgrpo_fsdp_actor.export import Checkpoint, changed_tensors, export_adapter, export_merged
from safetensors.torch import load_file

from .saver import ADVANTAGES, LORA, save, weights


@pytest.fixture
def trained(make_actor, rollouts, model_folder, tmp_path):
    actor = make_actor(**LORA)
    actor.update(0, rollouts[0], ADVANTAGES)
    save(actor, model_folder, tmp_path / "save")
    return Checkpoint.open(tmp_path / "save", "t2i", None), actor


def test_a_merged_export_is_base_plus_scaled_product_and_differs_from_the_base(trained, model_folder, tmp_path):
    checkpoint, _ = trained
    export_merged(checkpoint, model_folder, tmp_path / "merged")
    (file,) = (model_folder / "transformer").glob("*.safetensors")
    base, merged = load_file(file), load_file(tmp_path / "merged" / "transformer" / file.name)
    assert base.keys() == merged.keys()
    # Where B is still zero (the last block's text stream leads nowhere) the base must stay as it is.
    moved = [name for name in checkpoint.names() if "lora_B" in name and bool(checkpoint.read(name).any())]
    targets = {name.removesuffix(".lora_B.weight") + ".weight" for name in moved}
    assert targets
    assert set(changed_tensors(tmp_path / "merged", model_folder)) == targets
    for name in targets:
        stem = name.removesuffix(".weight")
        a, b = (checkpoint.read(f"{stem}.lora_{part}.weight").double() for part in "AB")
        torch.testing.assert_close(merged[name].double(), base[name].double() + 2.0 * (b @ a), atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize("form", ["merged", "adapter"])
def test_an_export_computes_what_was_trained(trained, model_folder, tmp_path, form):
    from flowgrpo_fsdp_actor.adapters.verify_qwen_image import export_differences

    checkpoint, _ = trained
    output = tmp_path / form
    if form == "merged":
        export_merged(checkpoint, model_folder, output)
    else:
        export_adapter(checkpoint, output)
    from_trained, from_base = export_differences(form, checkpoint, model_folder, output)
    assert from_trained < 1e-5  # measured 1e-6: fp32 rounding of the merged product
    assert from_base > 10 * from_trained


def test_a_full_checkpoint_exports_to_weights_that_diffusers_loads(make_actor, rollouts, model_folder, tmp_path):
    from diffusers import QwenImageTransformer2DModel

    actor = make_actor()
    actor.update(0, rollouts[0], ADVANTAGES)
    save(actor, model_folder, tmp_path / "save")
    export_merged(Checkpoint.open(tmp_path / "save", "t2i", None), model_folder, tmp_path / "out")
    loaded = QwenImageTransformer2DModel.from_pretrained(tmp_path / "out" / "transformer")
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, weights(actor)[f"model/{name}"])


def test_an_export_that_would_not_be_what_was_trained_is_refused(trained, model_folder, tmp_path):
    checkpoint, _ = trained
    with pytest.raises(ExportError):
        export_merged(checkpoint, None, tmp_path / "a")
    other = tmp_path / "other"
    shutil.copytree(model_folder, other)
    path = next((other / "transformer").glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    with pytest.raises(ExportError):
        export_merged(checkpoint, other, tmp_path / "b")
    (checkpoint.folder / COMMITTED).unlink()
    with pytest.raises(CheckpointError):
        Checkpoint.open(tmp_path / "save", "t2i", 0)
