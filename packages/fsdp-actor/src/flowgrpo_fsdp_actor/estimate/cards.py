"""The hardware: one table of cards, and how fast an H200 was seen to run this model.

H200 values were measured (2026-11-29, one and two H200 of one host, driver 580, torch 2.11); the other cards'
are their data sheets' times the share of its own data sheet that the H200 reached. Nothing was run on them.
"""

from dataclasses import dataclass, replace

GIB = float(1 << 30)
GB = 1e9


@dataclass(frozen=True, kw_only=True)
class Card:
    """One accelerator. Rates are bytes or operations a second."""

    name: str
    memory: float
    """Bytes that torch sees."""
    matmul: float
    """bf16 with fp32 accumulation, dense."""
    copy: float
    """On the card, counting read and write."""
    host_to_device: float
    """From pinned memory."""
    device_to_host: float
    gather: float
    """Output of an NCCL all-gather over the links of one host."""
    measured: bool
    """False: data sheet times the H200's share."""


H200 = Card(
    name="h200",
    memory=139.8 * GIB,
    matmul=788e12,
    copy=4.25e12,
    host_to_device=52e9,
    device_to_host=50e9,
    gather=544e9,
    measured=True,
)


def _from_data_sheet(
    name: str, *, memory_gib: float, matmul: float, bandwidth: float, link: float, pcie_gen: int
) -> Card:
    """`matmul`, `bandwidth` and `link` (both directions) as NVIDIA states them: H200 989e12, 4.8e12, 900e9, gen 5."""
    return Card(
        name=name,
        memory=memory_gib * GIB,
        matmul=H200.matmul * matmul / 989e12,
        copy=H200.copy * bandwidth / 4.8e12,
        host_to_device=H200.host_to_device / 2 ** (5 - pcie_gen),
        device_to_host=H200.device_to_host / 2 ** (5 - pcie_gen),
        gather=H200.gather * link / 900e9,
        measured=False,
    )


CARDS = {
    card.name: card
    for card in (
        H200,
        # NVIDIA H100 SXM5 80 GB and A100 SXM4 80 GB data sheets; of the 80 GB torch sees 79.1 GiB.
        _from_data_sheet("h100", memory_gib=79.1, matmul=989e12, bandwidth=3.35e12, link=900e9, pcie_gen=5),
        _from_data_sheet("a100", memory_gib=79.1, matmul=312e12, bandwidth=2.039e12, link=600e9, pcie_gen=4),
    )
}


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How fast blocks run: operations a second where the card is full, seconds a block where launching is slower."""

    forward: float
    backward: float
    launch_forward: float
    launch_again: float
    """Of the second forward of a block that recomputes, with torch's checkpoint around it."""
    launch_backward: float
    blend: float
    """How sharp the change from one to the other is: a pass takes (work^blend + launches^blend)^(1 / blend)."""


# Fitted to the full-size transformer (60 blocks, LoRA 64, 576 image and 128 text tokens) on the H200.
# Eager, plain diffusers, 2026-11-29: to batch 1 and 16, forward alone (6.5 and 37.3 a second), with backward (534 and
# 967 ms) and checkpointed (814 ms at 1). Compiled, the actor's own blocks, 2026-11-30: to 16 rows (anchors 298 ms, with
# backward 645 ms), and the launches to 1 to 4 rows, whose times are those of the host: in two runs they differed by up
# to 40 %, and they are fitted to the quieter one (`bench`'s replay_pace). Held out: all else, two cards, the server.
# The blends are choices; compiled work and launches overlap almost wholly (8 rows: 345 ms, where both take 310).
EAGER = Pace(
    forward=402e12, backward=423e12, launch_forward=2.53e-3, launch_again=4.5e-3, launch_backward=6.33e-3, blend=2.0
)
COMPILED = Pace(
    forward=542e12, backward=496e12, launch_forward=2.2e-3, launch_again=3.3e-3, launch_backward=3.1e-3, blend=6.0
)
# The SGLang server's forwards as CUDA graphs, same day: 5.7 ms for one candidate through 12 blocks.
GRAPHED = replace(COMPILED, launch_forward=0.45e-3)

PROCESS_BYTES = 0.83 * GIB
"""Device memory of one process beside its tensors: CUDA context (0.52), kernels, workspaces. H200, 2026-11-30."""
