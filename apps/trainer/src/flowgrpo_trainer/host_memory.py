"""Host memory of the cards' sleepers: what a node needs of it, and what it has. It only warns: the need is an estimate.

Called by: `fleet`, before engines are started that will sleep. `plan` prints the same estimate.
"""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from flowgrpo_fsdp_actor.estimate import CARDS
from flowgrpo_fsdp_actor.estimate.cards import GIB

from flowgrpo_trainer.plan import estimate_settings
from flowgrpo_trainer.preflight import ConfigError
from flowgrpo_trainer.settings import Settings

MEMINFO = Path("/proc/meminfo")
CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


def available_bytes() -> int:
    """What processes on this node can still take, in bytes: MemAvailable, or the container's limit if that is less."""
    fields = dict(line.split(":", 1) for line in MEMINFO.read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024
    try:
        return min(available, int(CGROUP_LIMIT.read_text()))
    except (OSError, ValueError):  # no such file, or "max": no limit
        return available


def warnings(settings: Settings, ranks: Iterable[tuple[str, int]]) -> list[str]:
    """One sentence for each node whose memory is less than what its cards' sleepers are estimated to take.

    `ranks` holds for each training rank its node and the bytes available there.
    """
    ranks = list(ranks)
    cards, available = Counter(node for node, _ in ranks), dict(ranks)
    # The card's kind decides nothing here, nor do the lengths of texts: only weights and AdamW's moments sleep.
    try:
        each = estimate_settings(settings, CARDS["h200"], text_tokens=1, cards=len(ranks)).host_bytes
    except ConfigError as error:
        return [f"the host memory that what sleeps takes was not compared with what there is: {error}"]
    return [
        f"what sleeps is estimated to take {each * count / GIB:.0f} GiB of host memory on node {node[:8]} "
        f"({count} cards, {each / GIB:.0f} GiB each), which has {available[node] / GIB:.0f} GiB available: the kernel "
        "may kill the run; more nodes, LoRA, or without --offload-train or --offload-rollout it takes less"
        for node, count in cards.items()
        if each * count > available[node]
    ]
