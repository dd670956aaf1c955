"""Stock SGLang's own weight update, as its documentation has a trainer call it: the rival of `weight_sync_server`."""

from collections.abc import Iterator, Mapping

import httpx
from torch import Tensor


def stock_update(client: httpx.Client, weights: Mapping[str, Tensor], bucket_mb: int) -> None:
    """Flattened buckets to `/update_weights_from_tensor`: CUDA tensors travel as IPC handles. Raises AssertionError."""
    from sglang.srt.utils import MultiprocessingSerializer
    from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    monkey_patch_torch_reductions()
    for named in _buckets(weights, bucket_mb * 2**20):
        bucket = FlattenedTensorBucket(named_tensors=named)
        flat = {"flattened_tensor": bucket.get_flattened_tensor(), "metadata": bucket.get_metadata()}
        payload = MultiprocessingSerializer.serialize({"transformer": flat}, output_str=True)
        body = {"serialized_named_tensors": [payload], "load_format": "flattened_bucket"}
        answer = client.post("/update_weights_from_tensor", json=body)
        assert answer.status_code == 200, answer.text[:500]


def _buckets(weights: Mapping[str, Tensor], limit: int) -> Iterator[list[tuple[str, Tensor]]]:
    bucket, size = [], 0
    for name, tensor in weights.items():
        if bucket and size + tensor.nbytes > limit:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor.detach()))
        size += tensor.nbytes
    yield bucket
