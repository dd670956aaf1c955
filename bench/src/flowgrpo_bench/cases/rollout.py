"""Candidates of one prompt through the real SGLang server: the whole request, answer included.

12 of Qwen-Image's 60 layers at full width, random weights, 384 x 384, 12 steps, bf16. Rivals: the stock server one
candidate at a time, which is all that it can do on CUDA, and diffusers' own pipeline, which gives pictures alone.
"""

from flowgrpo_bench.case import BenchCase, Workload


def setup(device: str, *, candidates: int, layers: int, heads: int, side: int, stock: bool) -> Workload:
    """Starts what is not running yet: two servers, and the pipeline in this process."""
    from flowgrpo_bench import rollout_servers as servers

    model = (device, layers, heads)
    servers.start_together(*model)
    engine, pipe, asked = servers.our_engine(*model), servers.pipeline(*model), servers.request(candidates, side)

    def ours() -> None:
        engine.generate([asked])

    def diffusers() -> None:
        pipe(
            prompt=servers.PROMPT,
            num_images_per_prompt=candidates,
            height=side,
            width=side,
            num_inference_steps=servers.STEPS,
            true_cfg_scale=1.0,
            output_type="pt",
        )

    def one_at_a_time() -> None:
        for _ in range(candidates):
            answer = servers.stock_server(*model).client.post(
                "/rollout/generate", json=servers.stock_body(device, side)
            )
            assert answer.status_code == 200, answer.text[:500]

    def gate() -> None:
        assert device == "cpu" or engine.info()["fused_rope"], (
            "SGLang fell back to its slow kernels: see the server's log"
        )
        (drawn,) = engine.generate([asked])
        assert drawn.images_NHWC.shape == (candidates, side, side, 3)
        servers.assert_parity(pipe.transformer, drawn)

    (drawn,) = engine.generate([servers.request(1, side)])
    text_tokens = drawn.prompt_embeds_LE.shape[0]
    image_tokens = drawn.latents_NUPC.shape[2]
    return Workload(
        ours=ours,
        rivals={"diffusers": diffusers} | ({"stock, one at a time": one_at_a_time} if stock else {}),
        gate=gate,
        operations=candidates * servers.STEPS * servers.forward_operations(layers, heads, image_tokens, text_tokens),
    )


MID = {"layers": 12, "heads": 24, "side": 384}
CASE = BenchCase(
    name="rollout",
    about="images through the SGLang server, 12 of Qwen-Image's layers, request to answer",
    setup=setup,
    sizes={f"{n} candidates": {"candidates": n, "stock": n in (1, 8), **MID} for n in (1, 8, 16, 32)},
    smoke={"2 candidates, 1 layer": {"candidates": 2, "layers": 1, "heads": 2, "side": 64, "stock": True}},
    devices=("cuda",),
    timers=("wall",),
    samples=5,
    launches=False,
)
