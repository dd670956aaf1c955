"""The actor's own series of requirements section 12, reduced over the ranks once per rollout.

Nothing is read from the device while it works: rows are kept where they are and summed up at the end.
"""

import resource
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from flowgrpo_math import ClipLoss
from torch import Tensor

from flowgrpo_fsdp_actor.distributed import all_reduced

GB = 1e9


@dataclass
class ReplayStatistics:
    """What the forwards of one rollout say about the policy, over all (sample, step) pairs of all ranks."""

    _ratios: list[Tensor] = field(default_factory=list)
    _sums: list[Tensor] = field(default_factory=list)

    def add(self, loss: ClipLoss) -> None:
        """Keeps one forward's ratios and its means, on the device."""
        rows = loss.ratio_BS.numel()
        self._ratios.append(loss.ratio_BS.flatten())
        means = torch.stack([loss.loss.detach(), loss.clip_fraction, loss.approx_kl])
        self._sums.append(means.double() * rows)

    def reduced(self) -> dict[str, float]:
        """`train/loss`, `train/ratio_*`, `train/clip_fraction`, `train/approx_kl`. Collective; empty without rows."""
        if not self._ratios:
            return {}
        # Ratios lie within 1e-4 of 1: their spread is taken from ratio - 1 in float64, or it would be rounding.
        off = torch.cat(self._ratios).double() - 1.0
        sums = torch.stack([torch.ones_like(off).sum(), off.sum(), off.square().sum()])
        count, off_sum, off_square, loss, clipped, kl = all_reduced(
            torch.cat([sums, torch.stack(self._sums).sum(dim=0)]), dist.ReduceOp.SUM
        ).tolist()
        highest, lowest = all_reduced(torch.stack([off.max(), -off.min()]), dist.ReduceOp.MAX).tolist()
        mean = off_sum / count
        return {
            "train/loss": loss / count,
            "train/ratio_mean": 1.0 + mean,
            "train/ratio_std": max(0.0, off_square / count - mean * mean) ** 0.5,
            "train/ratio_min": 1.0 - lowest,
            "train/ratio_max": 1.0 + highest,
            "train/clip_fraction": clipped / count,
            "train/approx_kl": kl / count,
        }


def memory_metrics(device: torch.device) -> dict[str, float]:
    """`perf/mem_{allocated,reserved,peak}_gb` of the worst rank, in 1e9 bytes. Collective.

    On CUDA torch's own counts; on the CPU the resident memory of the process (now, now, and at most so far).
    """
    if device.type == "cuda":
        names = (torch.cuda.memory_allocated, torch.cuda.memory_reserved, torch.cuda.max_memory_allocated)
        values = [float(read(device)) for read in names]
    else:
        with open("/proc/self/statm") as statm:
            resident = float(statm.read().split()[1]) * resource.getpagesize()
        values = [resident, resident, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0]
    worst = all_reduced(torch.tensor(values, dtype=torch.float64, device=device), dist.ReduceOp.MAX).tolist()
    return {f"perf/mem_{name}_gb": v / GB for name, v in zip(("allocated", "reserved", "peak"), worst, strict=True)}
