import pytest
import torch
from flowgrpo_rollout_sglang.wire import WeightReceiver, WeightSender, even_shard, sharded, sharded_shapes

SHAPES = [("to_q.weight", (8, 6)), ("to_out.weight", (6, 8)), ("norm.weight", (6,))]
DIMS = {"to_q.weight": 0, "to_out.weight": 1}  # column-parallel, row-parallel


def test_each_rank_of_a_tensor_parallel_engine_gets_its_slices_and_no_more():
    weights = {name: torch.randn(shape) for name, shape in SHAPES}
    held, sent = [], 0
    for rank in range(2):
        shards = {name: even_shard(dict(SHAPES)[name], dim, rank, 2) for name, dim in DIMS.items()}
        shapes = list(sharded_shapes(SHAPES, shards))
        fused = torch.zeros(12, 6, dtype=torch.bfloat16)  # the rank's slice of q lies inside its merged q, k, v
        targets = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes}
        targets["to_q.weight"] = fused[:4]
        sender, receiver = WeightSender(), WeightReceiver(targets, f"engine0 rank{rank}")
        report = sender.send(sharded(weights.items(), shards), sender.manifest(shapes, version=1), receiver)
        receiver.commit(1)
        held.append(targets)
        sent += report.bytes
    assert torch.equal(torch.cat([t["to_q.weight"] for t in held]), weights["to_q.weight"].bfloat16())
    assert torch.equal(torch.cat([t["to_out.weight"] for t in held], dim=1), weights["to_out.weight"].bfloat16())
    assert torch.equal(held[1]["norm.weight"], weights["norm.weight"].bfloat16())
    assert sent == 2 * (8 * 6 + 6 * 8 + 2 * 6)


def test_a_dimension_that_does_not_divide_among_ranks_is_refused():
    with pytest.raises(ValueError):
        even_shard((7, 6), 0, 0, 2)
