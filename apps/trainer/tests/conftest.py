"""One Ray cluster for the whole test session: it takes most of a minute to start on two cores."""

import pytest


@pytest.fixture(scope="session")
def ray_cluster():
    """A local cluster with room for two ranks, their engines, a scorer and TransferQueue."""
    from flowgrpo_trainer import cluster

    ours = cluster.connect(None, workers=4)
    yield
    if ours:
        import ray

        ray.shutdown()
