"""What one rank of a tensor-parallel engine holds of each tensor, so that its sender sends no more than that.

Each rank of the engine has a receiver of its own, which gets its slices, whole, from the trainer's rank of its card,
and its own verdict; the driver commits when all have verified. Neither end of a link knows of slices.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor


class Shard(NamedTuple):
    """A run of one dimension: rows of a column-parallel layer (dim 0), columns of a row-parallel one (dim 1)."""

    dim: int
    start: int
    length: int


def even_shard(shape: Sequence[int], dim: int, rank: int, world_size: int) -> Shard:
    """The `rank`-th of `world_size` equal runs of `dim`. Raises ValueError if it does not divide."""
    if shape[dim] % world_size:
        raise ValueError(f"dimension {dim} of {tuple(shape)} does not divide by {world_size}")
    length = shape[dim] // world_size
    return Shard(dim, rank * length, length)


def even_shards(
    shapes: Iterable[tuple[str, Sequence[int]]], dims: Mapping[str, int], rank: int, world_size: int
) -> dict[str, Shard]:
    """The `rank`-th slice of each tensor that `dims` names. Raises ValueError, naming the tensor, if one has none."""
    shards = {}
    for name, shape in shapes:
        if name in dims:
            try:
                shards[name] = even_shard(shape, dims[name], rank, world_size)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
    return shards


def sharded_shapes(
    shapes: Iterable[tuple[str, Sequence[int]]], shards: Mapping[str, Shard]
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """`shapes` as the rank holds them; for its manifest. Tensors without a shard are held whole."""
    for name, shape in shapes:
        held = list(shape)
        if name in shards:
            held[shards[name].dim] = shards[name].length
        yield name, tuple(held)


def sharded(tensors: Iterable[tuple[str, Tensor]], shards: Mapping[str, Shard]) -> Iterator[tuple[str, Tensor]]:
    """`tensors` as the rank holds them: views, nothing is copied here."""
    for name, tensor in tensors:
        yield name, tensor.narrow(*shards[name]) if name in shards else tensor
