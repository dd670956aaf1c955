"""What runs inside the patched SGLang server. The patch calls `http.install` and `handlers.install`, nothing else.

Two processes: FastAPI (`http`) takes requests, the scheduler (`handlers`) holds the weights and does the work.
`contract` is what they, and the engine outside, agree on; it imports neither torch nor sglang.
Read in this order: `contract`, `http`, `handlers`, `sampler`, `fused`, `graphs`, `memory`, `adapter`, `tensor_update`,
`launch`.
"""
