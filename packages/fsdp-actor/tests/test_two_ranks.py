"""Two ranks, over gloo or NCCL, give what one rank gives: loss, gradients, moved weights, published weights."""

import pickle
from dataclasses import replace

import pytest
import torch
import torch.multiprocessing as mp
from diffusers import QwenImageTransformer2DModel
from flowgrpo_fsdp_actor.adapters.qwen_image import QwenImageAdapter
from flowgrpo_fsdp_actor.checkpoint_files import CheckpointTree
from flowgrpo_fsdp_actor.errors import CheckpointError, PlanError, RankFailed
from flowgrpo_fsdp_actor.testing import SAMPLING as THREE_STEPS
from flowgrpo_fsdp_actor.testing import draw_rollout
from flowgrpo_rollout_sglang.sglang_process import free_ports
from flowgrpo_rollout_sglang.sidecar import write_sidecar

from .two_ranks import BALLAST, PHASES, Case, config_of, failing_rank_main, full_disk_main, rank_main

SAMPLING = replace(THREE_STEPS, sde_indices=(1, 3), num_sde_steps=2)
LORA = {"fsdp_trainable_mode": "lora", "lora_rank": 4, "lora_alpha": 8.0, "lora_merge_mode": True}
ADAPTER = {**LORA, "lora_merge_mode": False, "lora_adapter_mode": True}
CHECKPOINTED = {"fsdp_activation_checkpointing": True}
MIXED = {"fsdp_param_dtype": "bf16", "fsdp_master_dtype": "fp32"}
CASES = [
    Case("full", 4),
    Case("full, groups that the ranks do not divide", 3),
    Case("full, checkpointed, waves", 4, CHECKPOINTED | {"fsdp_load_wave_size": 1}),
    Case("full, checkpointed, groups that the ranks do not divide", 3, CHECKPOINTED),
    Case("full, weights kept gathered", 4, {"fsdp_reshard_after_forward": False}),
    Case("full, one block kept gathered", 4, stay_gathered=1),
    Case("lora, two updates", 4, LORA | {"num_updates_per_batch": 2}),
    Case("lora, groups that the ranks do not divide", 3, LORA | {"num_updates_per_batch": 3, "micro_batch_size": 1}),
    Case("lora adapter, checkpointed", 4, ADAPTER | CHECKPOINTED | {"micro_batch_size": 1}),
    Case("lora adapter, checkpointed, groups that the ranks do not divide", 3, ADAPTER | CHECKPOINTED),
    Case("lora adapter, as many rows and gathered blocks as memory allows", 4, ADAPTER | {"replay_join": None}),
    Case("lora, bf16 with fp32 masters", 4, LORA | MIXED),
]
# Of the largest gradient. Measured on a CPU: 3.5e-7 in fp32, 2.9e-3 with a bf16 forward.
GRADIENT_TOLERANCE = {"fp32": 2e-6, "bf16": 1e-2}
# After two to six AdamW steps of 1e-3, whose divisor blows rounding up where a gradient is near 0: 2.0e-6, 1.8e-3.
WEIGHT_TOLERANCE = {"fp32": 2e-5, "bf16": 8e-3}
START = {"cpu": "fork", "cuda": "forkserver"}
"""How ranks start: a process that has used CUDA cannot be forked."""
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.multigpu)]


@pytest.fixture(scope="module", params=DEVICES)
def outcomes(request, model_folder, tmp_path_factory):
    """{case name: (one rank's Outcome, two ranks' Outcome)}. Ranks are forked: importing torch again is the cost."""
    folder = tmp_path_factory.mktemp("two-ranks")
    sidecars = {size: _sidecars(size, model_folder, folder) for size in {case.group_size for case in CASES}}
    configs = [replace(config_of(case, model_folder, SAMPLING), device=request.param) for case in CASES]
    jobs = [(case, config, sidecars[case.group_size]) for case, config in zip(CASES, configs, strict=True)]
    one, two = folder / "one.pkl", folder / "two.pkl"
    run_ranks(rank_main, 1, (1, 0, jobs, one), START[request.param])
    run_ranks(rank_main, 2, (2, *free_ports(1), jobs, two), START[request.param])
    ones, twos = pickle.loads(one.read_bytes()), pickle.loads(two.read_bytes())
    return {name: (ones[name], twos[name]) for name in ones}


def dtype_of(case):
    return case.settings.get("fsdp_param_dtype", "fp32")


def run_ranks(main, ranks, args, method="fork"):
    """Runs `main(rank, *args)` in forked processes; raises what one of them raised."""
    context = mp.start_processes(main, args=args, nprocs=ranks, start_method=method, join=False)
    try:
        while not context.join():
            pass
    finally:
        for process in context.processes:
            process.kill()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_two_ranks_give_the_gradients_of_one(outcomes, case):
    one, two = outcomes[case.name]
    largest = max(float(g.abs().max()) for g in one.gradients.values())
    assert largest > 0
    assert one.gradients.keys() == two.gradients.keys()
    tolerance = GRADIENT_TOLERANCE[dtype_of(case)] * largest
    for name, gradient in one.gradients.items():
        torch.testing.assert_close(
            two.gradients[name], gradient, atol=tolerance, rtol=0, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_two_ranks_report_the_metrics_of_one(outcomes, case):
    one, two = outcomes[case.name]
    exact = {"train/lr", "train/optimizer_steps", "train/optimizer_skips"}
    tolerance = {"fp32": 1e-3, "bf16": 1e-2}[dtype_of(case)]  # the spread of the ratios is 1e-5, its error 4e-9
    for ours, theirs in zip(one.metrics, two.metrics, strict=True):
        assert {n: ours[n] for n in exact} == {n: theirs[n] for n in exact}
        assert ours.keys() == theirs.keys()
        # Within 3e-4 of 1, so compared in units of float32.
        for name in ("train/ratio_min", "train/ratio_max", "train/ratio_mean"):
            assert theirs[name] == pytest.approx(ours[name], rel=0, abs=2.5e-7), name
        assert theirs["train/approx_kl"] == pytest.approx(ours["train/approx_kl"], rel=tolerance, abs=1e-10)
        assert theirs["train/clip_fraction"] == pytest.approx(ours["train/clip_fraction"], abs=0.05)
        for name in ("train/loss", "train/grad_norm", "train/ratio_std"):
            assert theirs[name] == pytest.approx(ours[name], rel=tolerance, abs=1e-8), name
    assert one.metrics[0]["train/optimizer_steps"] == case.settings.get("num_updates_per_batch", 1)


def test_memory_is_that_of_the_worst_rank(outcomes):
    """Rank 1 of two holds BALLAST bytes more than any other; rank 0 reports it."""
    one, two = outcomes["full"]
    for name in ("perf/mem_allocated_gb", "perf/mem_reserved_gb", "perf/mem_peak_gb"):
        assert two.metrics[0][name] > one.metrics[0][name] + 0.7 * BALLAST / 1e9


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_two_ranks_move_and_publish_the_weights_of_one(outcomes, case):
    one, two = outcomes[case.name]
    for theirs, ours in ((two.weights, one.weights), (two.published, one.published)):
        assert ours.keys() == theirs.keys()
        for name, weight in ours.items():
            torch.testing.assert_close(
                theirs[name].float(), weight.float(), atol=WEIGHT_TOLERANCE[dtype_of(case)], rtol=0
            )


@pytest.fixture(scope="module", params=DEVICES)
def faults(request, model_folder, tmp_path_factory):
    """{phase: ((error, seconds) of the rank that was well, of the rank that failed)}, all in one start of two ranks.

    The processes live on from fault to fault, as a Ray worker does: no connection breaks because one has ended.
    """
    folder = tmp_path_factory.mktemp("faults")
    # Waves: loading, too, waits for the other rank.
    case = Case("full", 4, {"fsdp_load_wave_size": 1, "device": request.param})
    job = (case, config_of(case, model_folder, SAMPLING), _sidecars(4, model_folder, folder))
    run_ranks(failing_rank_main, 2, (free_ports(len(PHASES)), job, folder / "seen"), START[request.param])
    well, failing = (pickle.loads((folder / f"seen.{rank}").read_bytes()) for rank in (0, 1))
    return {phase: (well[phase], failing[phase]) for phase in PHASES}


@pytest.mark.parametrize("phase", PHASES)
def test_a_rank_that_fails_ends_both_ranks_with_its_error_within_seconds(faults, phase):
    (other, waited), (own, _) = faults[phase]
    assert isinstance(own, PlanError if phase == "preparing" else MemoryError)
    assert isinstance(other, RankFailed)
    assert other.rank == 1
    assert type(own).__name__ in other.error
    assert phase == "preparing" or phase in other.error
    assert waited < 30  # the collectives' own limit is 600


def test_a_rank_whose_disk_is_full_fails_the_save_on_both_and_training_goes_on(model_folder, tmp_path):
    case = Case("full", 4)
    job = (case, config_of(case, model_folder, SAMPLING), _sidecars(4, model_folder, tmp_path))
    run_ranks(full_disk_main, 2, (*free_ports(1), job, tmp_path))
    for rank in (0, 1):
        (error,) = pickle.loads((tmp_path / f"errors.{rank}").read_bytes())
        assert isinstance(error, CheckpointError)
        assert "rank 1" in error.why
        assert "No space left" in error.why
    assert CheckpointTree(tmp_path / "saved", "t2i").committed() == [1]


def _sidecars(group_size, model_folder, folder):
    """Four groups, one of them with a longer text, drawn with the untrained policy."""
    adapter = QwenImageAdapter(model_folder)
    policy = QwenImageTransformer2DModel.from_pretrained(model_folder / "transformer")
    texts = (7, 7, 9, 7)
    trajectories = draw_rollout(policy, adapter, group_size=group_size, text_tokens=texts, sampling=SAMPLING)
    paths = [folder / f"{group_size}_{trajectory.request.group_index}.safetensors" for trajectory in trajectories]
    for path, trajectory in zip(paths, trajectories, strict=True):
        write_sidecar(path, trajectory)
    return paths
