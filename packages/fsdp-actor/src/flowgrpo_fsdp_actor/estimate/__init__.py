"""What a run needs before anything loads: peak memory of a card in each phase, and seconds of a rollout.

Read from the model folder's config.json files alone; imports no torch. Reading order: `cards` (the hardware),
`architecture` (parameters, arithmetic and saved activations of a model), `memory` (the phases), `speed` (the
seconds), `run` (both for one recipe, and the verdict).

Four kinds of numbers, told apart where they stand: *derived* from the architecture, *measured* on an H200,
*fitted* to a measurement, and *data sheet* values scaled by what the H200 reaches of its own.
"""

from flowgrpo_fsdp_actor.estimate.architecture import ModelSize
from flowgrpo_fsdp_actor.estimate.cards import CARDS, Card
from flowgrpo_fsdp_actor.estimate.memory import DIFFUSERS, SGLANG, EngineKind, RunShape
from flowgrpo_fsdp_actor.estimate.run import Estimate, estimate_run

__all__ = ["CARDS", "DIFFUSERS", "SGLANG", "Card", "EngineKind", "Estimate", "ModelSize", "RunShape", "estimate_run"]
