import json
import pickle

import pytest
from flowgrpo_rollout_sglang.wire import FullWeightManifest, ManifestError, WeightSyncError, strip_transport_wrappers

SHAPES = [("blocks.0.to_q.weight", (4, 6)), ("blocks.0.to_q.bias", (4,)), ("scale", ())]


def manifest(**changes):
    return FullWeightManifest.build(SHAPES, **{"version": 3, **changes})


@pytest.mark.parametrize(
    ("wrapped", "plain"),
    [
        ("blocks.0._checkpoint_wrapped_module.to_q.weight", "blocks.0.to_q.weight"),
        ("_fsdp_wrapped_module.blocks.0._orig_mod.to_q.weight", "blocks.0.to_q.weight"),
        ("base_model.model.blocks.0.to_q.base_layer.weight", "blocks.0.to_q.weight"),
        (
            "base_model.model.blocks.0._checkpoint_wrapped_module.to_out.0.lora_B.default.weight",
            "blocks.0.to_out.0.lora_B.weight",
        ),
        ("blocks.0.to_q.lora_A.weight", "blocks.0.to_q.lora_A.weight"),
        ("blocks.1.img_mlp.net.0.proj.bias", "blocks.1.img_mlp.net.0.proj.bias"),
    ],
)
def test_wrappers_of_transport_are_no_part_of_a_wire_name(wrapped, plain):
    assert strip_transport_wrappers(wrapped) == plain


def test_a_manifest_counts_tensors_and_wire_bytes():
    assert (manifest().tensor_count, manifest().total_bytes) == (3, 2 * (24 + 4 + 1))
    assert manifest(wire_dtype="fp32").total_bytes == 4 * (24 + 4 + 1)


def test_the_hash_changes_with_order_name_shape_and_dtype():
    variants = [
        SHAPES,
        SHAPES[::-1],
        [("other", (4, 6)), *SHAPES[1:]],
        [(SHAPES[0][0], (6, 4)), *SHAPES[1:]],
    ]
    hashes = [FullWeightManifest.build(v, version=1).ordered_name_shape_hash for v in variants]
    hashes.append(manifest(wire_dtype="fp32").ordered_name_shape_hash)
    assert len(set(hashes)) == 5
    assert hashes[0] == manifest(version=9).ordered_name_shape_hash


def test_a_manifest_comes_back_from_json_as_it_was():
    sealed = manifest(mode="adapter", base_version=2).sealed([1, 2**64 - 1, 3])
    assert FullWeightManifest.from_json(sealed.to_json()) == sealed


def test_a_manifest_that_lost_its_end_is_refused():
    text = manifest().to_json()
    with pytest.raises(ManifestError):
        FullWeightManifest.from_json(text[: len(text) // 2])


def test_a_manifest_that_lost_a_tensor_is_refused():
    fields = json.loads(manifest().to_json())
    fields["tensors"] = "".join(fields["tensors"].splitlines(keepends=True)[:-1])
    with pytest.raises(ManifestError) as error:
        FullWeightManifest.from_json(json.dumps(fields))
    assert "some were lost" in str(error.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"version": "3"},
        {"version": 0},
        {"mode": "delta"},
        {"wire_dtype": "fp16"},
        {"wire_dtype": "fp32"},  # while its tensors are in bf16
        {"tensors": "a bf16 -1"},
        {"tensors": "a bf16 2,0"},
        {"tensors": "a bf16 2.5"},
        {"tensors": "a __import__ 2"},
        {"tensors": "a name with spaces bf16 2"},
        {"tensors": ""},
        {"tensors": [["a", [2], "bf16"]]},
        {"fingerprints": [1]},
    ],
    ids=lambda changes: next(iter(changes.items())).__repr__(),
)
def test_a_manifest_with_a_field_out_of_its_domain_is_refused(changes):
    with pytest.raises(ManifestError):
        FullWeightManifest.from_json(json.dumps(json.loads(manifest().to_json()) | changes))


def test_a_name_with_white_space_is_refused():
    with pytest.raises(ManifestError):
        FullWeightManifest.build([("a b", (2,))], version=1)
    with pytest.raises(ManifestError):
        FullWeightManifest.build([("a\nb", (2,))], version=1)


def test_a_name_that_comes_twice_is_named():
    with pytest.raises(ManifestError) as error:
        FullWeightManifest.build([*SHAPES, SHAPES[1]], version=1)
    assert "blocks.0.to_q.bias" in str(error.value)


def test_a_sync_error_survives_pickle_and_json():
    error = WeightSyncError("gpu1", 7, "names", "the engine does not know them", ("a", "b"), 4, "compare")
    for copy in (pickle.loads(pickle.dumps(error)), WeightSyncError.from_json(error.to_json())):
        assert (copy.engine, copy.version, copy.reason, copy.tensors, copy.sent) == ("gpu1", 7, "names", ("a", "b"), 4)
        assert str(copy) == str(error)
