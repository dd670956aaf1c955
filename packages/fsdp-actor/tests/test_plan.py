from itertools import chain

import pytest
from flowgrpo_fsdp_actor.errors import PlanError
from flowgrpo_fsdp_actor.plan import GroupShape, MicroBatch, join_forwards, local_candidates, plan_updates
from hypothesis import assume, given
from hypothesis import strategies as st

sizes = st.integers(1, 6)


def plan(groups, size, **settings):
    return plan_updates(
        groups, size, **({"rank": 0, "world_size": 1, "num_updates": 1, "micro_batch_size": 0} | settings)
    )


def samples(update):
    return [(batch.group, candidate) for batch in update for candidate in batch.candidates]


@given(sizes, sizes, sizes, sizes, st.integers(0, 6))
def test_every_local_sample_takes_part_in_exactly_one_update(groups, size, world, updates, micro):
    for rank in range(world):
        try:
            updates_of_rank = plan(
                groups, size, rank=rank, world_size=world, num_updates=updates, micro_batch_size=micro
            )
        except PlanError:
            assume(False)
        used = sorted(chain.from_iterable(map(samples, updates_of_rank)))
        local = local_candidates(size, rank=rank, world_size=world)
        assert used == [(g, c) for g in range(groups) for c in local]
        assert len({len(samples(update)) for update in updates_of_rank}) == 1


@given(sizes, sizes, sizes, sizes, st.integers(0, 6))
def test_all_ranks_walk_the_same_groups_in_the_same_order(groups, size, world, updates, micro):
    def order(rank):
        try:
            updates_of_rank = plan(
                groups, size, rank=rank, world_size=world, num_updates=updates, micro_batch_size=micro
            )
        except PlanError:
            return None
        return [[batch.group for batch in update] for update in updates_of_rank]

    assert all(order(rank) == order(0) for rank in range(world))


def test_ranks_share_a_group_by_stride_where_the_world_divides_it():
    assert local_candidates(6, rank=1, world_size=3) == (1, 4)


def test_every_rank_replays_a_whole_group_that_the_world_does_not_divide():
    assert [local_candidates(4, rank=r, world_size=3) for r in range(3)] == [(0, 1, 2, 3)] * 3


def test_micro_batch_size_cuts_a_share_that_it_divides_and_leaves_another_whole():
    assert plan(1, 6, micro_batch_size=2) == ((MicroBatch(0, (0, 1)), MicroBatch(0, (2, 3)), MicroBatch(0, (4, 5))),)
    assert plan(1, 6, micro_batch_size=4) == ((MicroBatch(0, (0, 1, 2, 3, 4, 5)),),)


def test_updates_split_groups_where_a_micro_batch_is_a_whole_group():
    assert plan(4, 2, num_updates=2) == (
        (MicroBatch(0, (0, 1)), MicroBatch(1, (0, 1))),
        (MicroBatch(2, (0, 1)), MicroBatch(3, (0, 1))),
    )


def test_an_update_count_that_does_not_divide_the_samples_is_refused():
    with pytest.raises(PlanError) as error:
        plan(2, 4, num_updates=3)
    assert "--num-updates-per-batch 3" in error.value.what


def test_a_micro_batch_across_an_update_boundary_is_refused_and_its_size_named():
    with pytest.raises(PlanError) as error:
        plan(1, 4, num_updates=2)
    assert "--micro-batch-size" in error.value.fix
    assert len(plan(1, 4, num_updates=2, micro_batch_size=2)) == 2


@given(st.lists(st.tuples(st.sampled_from([16, 24]), st.integers(3, 9)), min_size=1, max_size=5), sizes, sizes, sizes)
def test_joining_keeps_every_transition_once_and_never_mixes_image_sizes(groups, size, steps, join):
    shapes = [GroupShape(height, 16, steps, tokens) for height, tokens in groups]
    (update,) = plan(len(groups), size)
    forwards = join_forwards(update, shapes, join)
    rows = list(chain.from_iterable(forwards))
    assert sorted(rows) == sorted((g, c, s) for g in range(len(groups)) for c in range(size) for s in range(steps))
    assert all(len(rows) <= join for rows in forwards)
    assert all(len({shapes[row.group].height for row in rows}) == 1 for rows in forwards)


def test_a_join_of_one_groups_candidates_is_the_engines_own_batch():
    (update,) = plan(2, 4)
    forwards = join_forwards(update, [GroupShape(16, 16, 3, 7)] * 2, 4)
    assert [{(row.group, row.step) for row in rows} for rows in forwards] == [
        {(g, s)} for g in (0, 1) for s in range(3)
    ]
    assert all([row.candidate for row in rows] == [0, 1, 2, 3] for rows in forwards)


def test_groups_with_texts_of_one_length_share_forwards_before_others_do():
    (update,) = plan(3, 2)
    shapes = [GroupShape(16, 16, 1, 7), GroupShape(16, 16, 1, 90), GroupShape(16, 16, 1, 7)]
    assert [{row.group for row in rows} for rows in join_forwards(update, shapes, 4)] == [{0, 2}, {1}]
