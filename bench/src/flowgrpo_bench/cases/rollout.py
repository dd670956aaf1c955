"""Candidates of one prompt through the real SGLang server: the whole request, answer included.

12 of Qwen-Image's 60 layers at full width, random weights, 384 x 384, 12 steps, bf16. Rivals: the stock server, which
on CUDA can do one candidate at a time alone, and diffusers' own pipeline, which gives pictures alone.
"""

from collections.abc import Sequence

from flowgrpo_bench.case import BenchCase, Workload

DIFFUSERS, STOCK = "diffusers", "stock"


def setup(device: str, *, candidates: int, layers: int, heads: int, side: int, rivals: Sequence[str]) -> Workload:
    """Starts what is not running yet, at once: the servers, and the pipeline in this process."""
    from flowgrpo_bench import rollout_servers as servers

    model = (device, layers, heads)
    servers.start_together(*model, stock=STOCK in rivals)
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

    def stock() -> None:
        for _ in range(candidates):
            answer = servers.stock_server(*model).client.post(
                "/rollout/generate", json=servers.stock_body(device, side)
            )
            assert answer.status_code == 200, answer.text[:500]

    def gate() -> None:
        servers.assert_fast(engine.info())
        (drawn,) = engine.generate([asked])
        assert drawn.images_NHWC.shape == (candidates, side, side, 3)
        servers.assert_parity(pipe.transformer, drawn)

    (drawn,) = engine.generate([servers.request(1, side)])
    text_tokens = drawn.prompt_embeds_LE.shape[0]
    image_tokens = drawn.latents_NUPC.shape[2]
    others = {DIFFUSERS: diffusers, STOCK: stock}
    return Workload(
        ours=ours,
        rivals={name: others[name] for name in rivals},
        gate=gate,
        operations=candidates * servers.STEPS * servers.forward_operations(layers, heads, image_tokens, text_tokens),
    )


MID = {"layers": 12, "heads": 24, "side": 384}
CASE = BenchCase(
    name="rollout",
    about="images through the SGLang server, 12 of Qwen-Image's layers, request to answer",
    setup=setup,
    # Stock takes eight times as long for eight, so that it is asked for one.
    sizes={"1 candidate": {"candidates": 1, "rivals": (DIFFUSERS, STOCK), **MID}}
    | {f"{n} candidates": {"candidates": n, "rivals": (DIFFUSERS,), **MID} for n in (8, 16, 32)},
    smoke={
        "2 candidates, 1 layer": {"candidates": 2, "layers": 1, "heads": 2, "side": 64, "rivals": (DIFFUSERS, STOCK)}
    },
    devices=("cuda",),
    timers=("wall",),
    samples=4,
    launches=False,
)
