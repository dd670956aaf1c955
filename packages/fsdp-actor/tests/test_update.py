"""The optimizer steps of one rollout, on one rank: frozen anchors, joining, what is skipped."""

import logging
import math
from dataclasses import replace

import pytest
import torch
from flowgrpo_fsdp_actor import ActorConfig, FsdpActor
from flowgrpo_fsdp_actor.errors import ActorAsleep, PlanError, ReplayMismatch, TrajectoryRefused
from flowgrpo_fsdp_actor.metrics import ReplayStatistics
from flowgrpo_fsdp_actor.plan import join_forwards
from flowgrpo_fsdp_actor.testing import SAMPLING, draw_rollout, waits_for_the_gpu_raise
from flowgrpo_fsdp_actor.update import accumulate_gradients, run_updates
from flowgrpo_rollout_sglang.sidecar import SidecarError, write_sidecar
from torch._dynamo.utils import counters

LORA = {"fsdp_trainable_mode": "lora", "lora_rank": 4, "lora_alpha": 8.0, "lora_merge_mode": True}
ADVANTAGES = torch.tensor(
    [[1.0, -1.0, 0.5, -0.5], [2.0, -2.0, 0.0, 0.0], [0.3, -0.3, 0.1, -0.1], [1.0, 1.0, -1.0, -1.0]]
)


@pytest.fixture(scope="module")
def make_actor(model_folder):
    def make(**settings):
        common = {"fsdp_param_dtype": "fp32", "lr": 1e-3, "eps_clip": 1e-3, "n_samples_per_prompt": 4}
        return FsdpActor(ActorConfig(model_path=str(model_folder), sampling=SAMPLING, **(common | settings)), 0, 1)

    return make


@pytest.fixture(scope="module")
def rollout(make_actor):
    """Four groups of four, one with a longer text, drawn one group and step at a time with the first policy."""
    actor = make_actor()
    return draw_rollout(actor._policy.module, actor._adapter, group_size=4, text_tokens=(7, 7, 9, 7))


def weights(actor):
    return {name: p.detach().clone() for name, p in actor._policy.module.named_parameters()}


def gradients(actor, rollout, join):
    replay = actor._replay(rollout, ADVANTAGES)
    forwards = join_forwards(actor._plan(4, 4, num_updates=1)[0], replay.shapes, join)
    accumulate_gradients(actor._policy, replay, forwards, None, actor.config, ReplayStatistics())
    grads = [p.grad.clone() for p in actor._policy.trainable if p.grad is not None]
    actor._policy.optimizer.zero_grad(set_to_none=True)
    return torch.cat([g.flatten() for g in grads])


@pytest.mark.parametrize("settings", [{}, LORA], ids=["full", "lora"])
def test_replay_in_the_engines_own_batches_gives_the_engines_log_probs_bit_for_bit(make_actor, rollout, settings):
    assert set(make_actor(**settings).replay_parity(rollout, join=4).values()) == {0.0}


@pytest.mark.parametrize("join", [1, 3, 16, 48])
def test_joined_replay_gives_the_log_probs_of_one_at_a_time(make_actor, rollout, join):
    """Padded text included. Measured 1.2e-7; an eps_clip of 1e-4 does not see it."""
    worst = make_actor().replay_parity(rollout, join=join)
    assert set(worst) == {1, 2, 3}
    assert max(worst.values()) < 1e-6


@pytest.mark.parametrize("settings", [{}, LORA], ids=["full", "lora"])
def test_joined_replay_gives_the_gradients_of_one_at_a_time(make_actor, rollout, settings):
    actor = make_actor(**settings)
    alone = gradients(actor, rollout, join=1)
    for join in (4, 10, 48):
        apart = (gradients(actor, rollout, join) - alone).abs().max() / alone.abs().max()
        assert float(apart) < 1e-5  # measured 1e-6


def test_checkpointing_gives_the_gradients_of_plain_backward_bit_for_bit(make_actor, rollout):
    plain = gradients(make_actor(), rollout, 8)
    assert torch.equal(gradients(make_actor(fsdp_activation_checkpointing=True), rollout, 8), plain)


def test_the_first_updates_ratio_is_exactly_one_and_the_seconds_is_not(make_actor, rollout):
    once = make_actor().update(0, rollout, ADVANTAGES).metrics
    assert (once["train/ratio_min"], once["train/ratio_max"], once["train/ratio_std"]) == (1.0, 1.0, 0.0)
    twice = make_actor(num_updates_per_batch=2).update(0, rollout, ADVANTAGES).metrics
    assert twice["train/ratio_min"] < 1.0 < twice["train/ratio_max"]
    assert twice["train/optimizer_steps"] == 2
    assert 0.0 < twice["train/approx_kl"] < 1e-3


def test_anchors_are_frozen_before_the_first_step_so_that_only_weights_move_the_ratio(make_actor, rollout):
    """With a learning rate too small to move a float32 weight, the second update's ratio is 1 to the bit."""
    metrics = make_actor(num_updates_per_batch=2, lr=1e-30, weight_decay=0.0).update(0, rollout, ADVANTAGES).metrics
    assert (metrics["train/ratio_min"], metrics["train/ratio_max"]) == (1.0, 1.0)


def test_the_explicit_anchor_path_trains_the_same_weights_and_logs_its_lines(make_actor, rollout, caplog):
    caplog.set_level(logging.INFO, "flowgrpo_fsdp_actor")
    plain, explicit = (
        make_actor(num_updates_per_batch=2),
        make_actor(num_updates_per_batch=2, fsdp_debug_fingerprint=True),
    )
    plain.update(0, rollout, ADVANTAGES)
    explicit.update(0, rollout, ADVANTAGES)
    ours, theirs = weights(plain), weights(explicit)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    lines = [record.getMessage() for record in caplog.records]
    assert sum(line.startswith("[logp parity] rollout 0") for line in lines) == 1
    prints = [line for line in lines if line.startswith("[fingerprint]")]
    assert len(prints) == 2
    before, after = prints[0].split("sum |w| ")[1].split(", lr")[0].split(" -> ")
    assert float(before) != float(after)
    assert prints[1].split("sum |w| ")[1].startswith(after)


def test_compiled_blocks_are_one_graph_for_all_texts_and_anchors_stay_exact(make_actor, rollout, monkeypatch):
    """Traced and differentiated as on a GPU, without generated code; the explicit anchors raise if a bit differs."""
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda forward, **how: compile_(forward, backend="aot_eager", **how))
    monkeypatch.setattr(ActorConfig, "compiles", property(lambda config: True))
    torch._dynamo.reset()
    counters.clear()
    actor = make_actor(**LORA, fsdp_debug_fingerprint=True, num_updates_per_batch=2, replay_join=12, lr=1e-30)
    metrics = actor.update(0, rollout, ADVANTAGES).metrics
    assert (metrics["train/ratio_min"], metrics["train/ratio_max"]) == (1.0, 1.0)
    assert (
        max(actor.replay_parity(rollout, join=12).values()) < 1e-6
    )  # measured 1.2e-7, texts padded from 7 and 9 to 64
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


def test_replay_that_is_not_deterministic_is_refused_before_a_weight_moves(make_actor, rollout, monkeypatch):
    actor = make_actor(fsdp_debug_fingerprint=True)
    before = weights(actor)
    calls = iter(range(1, 10_000))
    exact = actor._adapter.replay_transition
    monkeypatch.setattr(actor._adapter, "replay_transition", lambda *a: exact(*a) * (1 + 1e-4 * next(calls)))
    with pytest.raises(ReplayMismatch) as error:
        actor.update(0, rollout, ADVANTAGES)
    assert error.value.ratio_max != 1.0
    assert all(torch.equal(p, before[name]) for name, p in weights(actor).items())


SERIES = {
    *("train/loss", "train/ratio_mean", "train/ratio_std", "train/ratio_min", "train/ratio_max"),
    *("train/clip_fraction", "train/approx_kl", "train/grad_norm", "train/lr"),
    *("train/optimizer_steps", "train/optimizer_skips", "train/num_microbatches"),
    *("train/policy_version", "train/weight_sync_failures"),
    *("perf/mem_allocated_gb", "perf/mem_reserved_gb", "perf/mem_peak_gb"),
    *("perf/train_transitions_per_s", "perf/train_samples_per_s"),
}
"""The actor's part of requirements section 12; the sync's and the checkpoints' own are the trainer's."""


def test_an_update_reports_every_series_of_the_actor_and_each_is_what_its_name_says(make_actor, rollout):
    """Against the ratios themselves, of a second update whose policy has moved."""
    actor = make_actor(num_updates_per_batch=2, micro_batch_size=2, eps_clip=1e-6)
    seen = []
    exact = ReplayStatistics.add

    class Spy(ReplayStatistics):
        def add(self, loss):
            seen.append((loss.ratio_BS.flatten().double(), float(loss.loss.detach()), float(loss.clip_fraction)))
            exact(self, loss)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("flowgrpo_fsdp_actor.update.ReplayStatistics", Spy)
        metrics = actor.update(0, rollout, ADVANTAGES).metrics
    assert metrics.keys() == SERIES
    ratio = torch.cat([ratios for ratios, *_ in seen])
    share = [len(ratios) / 48 for ratios, *_ in seen]
    assert len(ratio) == 48  # 16 candidates at 3 steps, each once
    expected = {
        "train/ratio_mean": ratio.mean(),
        "train/ratio_std": ratio.std(unbiased=False),
        "train/ratio_min": ratio.min(),
        "train/ratio_max": ratio.max(),
        "train/clip_fraction": sum(clipped * part for (*_, clipped), part in zip(seen, share, strict=True)),
        "train/approx_kl": (ratio - 1 - ratio.log()).mean(),
        "train/loss": sum(loss * part for (_, loss, _), part in zip(seen, share, strict=True)),
        "train/num_microbatches": 8,  # 4 groups in twos
        "train/optimizer_steps": 2,
        "train/optimizer_skips": 0,
        "train/lr": 1e-3,
        "train/policy_version": 1,
        "train/weight_sync_failures": 0,
    }
    assert 0 < expected["train/clip_fraction"] < 1
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(float(value), rel=1e-6, abs=1e-12), name
    assert metrics["perf/train_transitions_per_s"] == pytest.approx(3 * metrics["perf/train_samples_per_s"])
    assert 0 < metrics["perf/mem_allocated_gb"] <= metrics["perf/mem_peak_gb"]


@pytest.mark.gpu
def test_gradients_are_accumulated_without_waiting_for_the_device(make_actor, rollout):
    actor = make_actor(device="cuda", fsdp_param_dtype="bf16")
    gradients(actor, rollout, 8)  # kernels are compiled and constants moved
    replay = actor._replay(rollout, ADVANTAGES)
    forwards = join_forwards(actor._plan(4, 4, num_updates=1)[0], replay.shapes, 8)
    statistics = ReplayStatistics()
    with waits_for_the_gpu_raise():
        accumulate_gradients(actor._policy, replay, forwards, None, actor.config, statistics)
    assert statistics.reduced()["train/ratio_max"] == 1.0


def test_an_update_raises_the_log_prob_of_good_candidates_over_bad_ones(make_actor, rollout):
    actor = make_actor(lr=1e-4)
    before = mean_logp(actor, rollout)
    for step in range(3):
        actor.update(step, rollout, ADVANTAGES)
    gain = mean_logp(actor, rollout) - before
    assert float((gain * ADVANTAGES).mean()) > 0


def mean_logp(actor, rollout):
    replay = actor._replay(rollout, ADVANTAGES)
    rows = [row for forward in join_forwards(actor._plan(4, 4, num_updates=1)[0], replay.shapes, 64) for row in forward]
    total = torch.zeros(4, 4)
    with torch.no_grad():
        for row, logp in zip(rows, replay.logp(actor._policy.module, replay.batch(rows)), strict=True):
            total[row.group, row.candidate] += logp
    return total / 3


@pytest.mark.parametrize("settings", [{}, LORA], ids=["full", "lora"])
def test_the_same_seed_trains_the_same_weights_bit_for_bit(make_actor, rollout, settings):
    runs = []
    for _ in range(2):
        actor = make_actor(num_updates_per_batch=2, **settings)
        actor.update(0, rollout, ADVANTAGES)
        runs.append(weights(actor))
    assert all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0])


def test_lora_starts_at_the_base_model_and_moves_nothing_of_it(make_actor, rollout):
    actor = make_actor(**LORA)
    base = weights(make_actor())
    start = weights(actor)
    assert all(not start[name].any() for name in start if ".lora_B." in name)
    assert 0.2 < float(torch.cat([start[n].flatten() for n in start if ".lora_A." in n]).std()) < 0.3  # 1 / rank
    for step in range(2):
        actor.update(step, rollout, ADVANTAGES)
    # The last block's text stream leads nowhere: its adapters get no gradient there.
    dead = ("transformer_blocks.1.attn.add_q_proj", "transformer_blocks.1.attn.to_add_out")
    for name, value in weights(actor).items():
        if ".lora_" in name and not name.startswith(dead):
            assert not torch.equal(value, start[name]), name
        elif ".lora_" not in name:
            assert torch.equal(value, base[name.replace(".base_layer", "")]), name


def test_a_degenerate_rollout_takes_no_step_and_says_so(make_actor, rollout, caplog):
    actor = make_actor(num_updates_per_batch=2)
    before = weights(actor)
    report = actor.update(7, rollout, torch.full((4, 4), 1e-4))
    assert all(torch.equal(p, before[name]) for name, p in weights(actor).items())
    assert (report.metrics["train/optimizer_steps"], report.metrics["train/optimizer_skips"]) == (0, 2)
    assert report.policy_version == 1
    assert any("rollout 7" in record.getMessage() for record in caplog.records)


def test_a_gradient_that_is_not_finite_skips_its_step_and_is_counted(make_actor, rollout):
    actor = make_actor(num_updates_per_batch=2)
    before = weights(actor)
    advantages = ADVANTAGES.clone()
    advantages[0, 0] = math.inf
    metrics = run(actor, rollout, advantages)
    assert (metrics["train/optimizer_steps"], metrics["train/optimizer_skips"]) == (1, 1)
    assert actor.lr_scheduler_steps == 1
    assert all(torch.isfinite(p).all() for p in weights(actor).values())
    assert any(not torch.equal(p, before[name]) for name, p in weights(actor).items())


def run(actor, rollout, advantages):
    replay = actor._replay(rollout, advantages)
    plan = actor._plan(4, 4, num_updates=actor.config.num_updates_per_batch)
    return run_updates(actor._policy, replay, plan, 16, actor.config, "test")


def test_gradients_are_clipped_to_the_norm_that_was_asked(make_actor, rollout):
    """AdamW is blind to a constant scale, so this looks at the first moment: (1 - beta1) times the gradient."""
    actor = make_actor(clip_grad=1e-3)
    metrics = actor.update(0, rollout, ADVANTAGES).metrics
    assert metrics["train/grad_norm"] > 1e-3
    moments = [state["exp_avg"].flatten() for state in actor._policy.optimizer.state.values()]
    assert float(torch.cat(moments).norm()) == pytest.approx(0.1 * 1e-3, rel=1e-3)


def test_sidecars_on_disk_train_as_trajectories_in_memory(make_actor, rollout, tmp_path):
    paths = [tmp_path / f"{t.request.group_index}.safetensors" for t in rollout]
    for path, trajectory in zip(paths, rollout, strict=True):
        write_sidecar(path, trajectory)
    one, two, three = make_actor(), make_actor(), make_actor()
    one.update(0, rollout, ADVANTAGES)
    two.update(0, paths, ADVANTAGES)
    three.read_ahead(paths[::-1])
    three.read_ahead(paths)
    three.update(0, paths, ADVANTAGES)
    ours = weights(one)
    for theirs in (weights(two), weights(three)):
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_sidecars_are_read_ahead_of_an_update_and_a_broken_one_is_an_error_of_that_update(
    make_actor, rollout, tmp_path
):
    paths = [tmp_path / f"{t.request.group_index}.safetensors" for t in rollout]
    for path, trajectory in zip(paths, rollout, strict=True):
        write_sidecar(path, trajectory)
    actor = make_actor()
    actor.read_ahead(paths)
    read = [future.result() for future in actor._sidecars._ahead.values()]
    for path in paths:
        path.unlink()
    assert actor._sidecars.read(paths) == read  # the same objects: no file was opened again
    paths[2].write_bytes(b"cut")
    actor.read_ahead(paths[2:3])
    with pytest.raises(SidecarError) as error:
        actor.update(0, paths[2:3], ADVANTAGES[:1])
    assert str(paths[2]) in str(error.value)


def test_advantages_of_another_shape_are_refused(make_actor, rollout):
    with pytest.raises(PlanError) as error:
        make_actor().update(0, rollout, ADVANTAGES[:, :3])
    assert "[4, 3]" in error.value.what


def test_an_answer_that_cannot_be_replayed_is_refused_before_a_weight_moves(make_actor, rollout):
    actor = make_actor()
    before = weights(actor)
    with pytest.raises(TrajectoryRefused):
        actor.update(0, [*rollout[:3], replace(rollout[3], height=16, width=16)], ADVANTAGES)
    assert all(torch.equal(p, before[name]) for name, p in weights(actor).items())


def test_versions_grow_with_a_committed_sync_and_stay_after_a_failed_one(make_actor, rollout):
    actor = make_actor()
    assert actor.update(0, rollout, ADVANTAGES).policy_version == 1
    actor.publish_failed()
    report = actor.update(1, rollout, ADVANTAGES)
    assert (report.policy_version, report.metrics["train/weight_sync_failures"]) == (1, 1.0)
    actor.publish_succeeded(report.policy_version)
    assert actor.update(2, rollout, ADVANTAGES).policy_version == 2


def test_a_sleeping_actor_refuses_to_work(make_actor, rollout):
    actor = make_actor()
    actor.sleep()
    with pytest.raises(ActorAsleep):
        actor.update(0, rollout, ADVANTAGES)
    actor.wake()
    assert actor.update(0, rollout, ADVANTAGES).metrics["train/optimizer_steps"] == 1
