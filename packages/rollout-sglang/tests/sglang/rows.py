"""What stock SGLang 0.5.15.post1 does otherwise than the rollout contract: one function for each point.

Every function holds on the patched server (`test_server`, `test_server_weights`) and fails on the stock one
(`test_stock`). They speak plain HTTP, so that both servers are asked the same. A request that is answered with an
error where the row is not about errors raises `NotServedError`, which no test takes for a failing row.

Shapes: as in `request`; T denoising steps.
"""

import base64
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import torch
from flowgrpo_math.transition import flow_sde_log_prob
from flowgrpo_rollout_sglang.noise import initial_latent
from safetensors.torch import load, save, save_file
from torch import Tensor

T, SIDE = 8, 32
LATENT_SHAPE = (16, SIDE // 4, SIDE // 4)
ATOL = 2e-5
"""fp32 states of a candidate in another batch; 1e-6 was seen on a CPU. Stock's differ by 1, being other noise."""
PREFIXES = ("", "transformer.", "base_model.model.")


class NotServedError(RuntimeError):
    """A request that both servers should serve was answered with an error."""


@dataclass
class Server:
    """One of the two servers, asked over HTTP."""

    client: httpx.Client
    moments: Callable[[dict, int], tuple[Tensor, Tensor]]
    """Mean [1, P, C] and std [1] of step k of an item, by the server's own word or by replay."""
    stock: bool = False
    folder: Path | None = None
    """Where the stock server's LoRA files go."""
    always: dict[str, Any] = field(default_factory=dict)
    """Fields that every request to this server carries."""

    def post(self, path: str, **request: Any) -> httpx.Response:
        # A connection of its own: after an error inside it stock resets the one that is kept.
        return self.client.post(path, headers={"connection": "close"}, **request)

    def ask(self, **fields: Any) -> httpx.Response:
        """One rollout request, with whatever this server needs beside `fields`."""
        body = {"prompt": "a red circle on a blue background", "height": SIDE, "width": SIDE, "num_inference_steps": T}
        body |= {"guidance_scale": 1.0, "rollout_sde_type": "sde", "rollout_noise_level": 0.7}
        body |= {"rollout_sde_step_indices": [1, 3, 5], "rollout_return_step_indices": list(range(T + 1))}
        if "initial_noise_group_ids" not in fields or self.stock:
            body["seed"] = 5
        return self.post("/rollout/generate", json=body | self.always | fields)

    def draw(self, **fields: Any) -> list[dict[str, Any]]:
        """The items of an answer, every tensor decoded."""
        answer = self.ask(**fields)
        if answer.status_code != 200:
            raise NotServedError(answer.text[:2000])
        return _decoded(answer.json())

    def update(self, tensors: Mapping[str, Tensor]) -> httpx.Response:
        """SGLang's own tensor update, in its own format: a pickled list of (name, tensor) in base64."""
        payload = base64.b64encode(pickle.dumps({"transformer": list(tensors.items())})).decode()
        return self.post("/update_weights_from_tensor", json={"serialized_named_tensors": [payload]})

    def set_lora(self, tensors: Mapping[str, Tensor]) -> httpx.Response:
        """From tensors where the server can; from a file, which is all that stock takes."""
        if not self.stock:
            return self.post("/set_lora_from_tensor", params={"rank": 4, "alpha": 8.0}, content=save(dict(tensors)))
        assert self.folder is not None
        path = self.folder / f"lora{len(list(self.folder.iterdir()))}.safetensors"
        save_file(dict(tensors), path)
        return self.post("/v1/set_lora", json={"lora_nickname": path.stem, "lora_path": str(path)})


def _decoded(obj: Any) -> Any:
    if isinstance(obj, dict):
        if obj.get("__tensor__"):
            return load(base64.b64decode(obj["data"]))["t"]
        return {key: _decoded(value) for key, value in obj.items()}
    return [_decoded(value) for value in obj] if isinstance(obj, list) else obj


def latents(item: dict) -> Tensor:
    """[T + 1, P, C] float32."""
    return item["dit_trajectory"]["latents"].float()


def embeds(item: dict) -> Tensor:
    found = item["denoising_env"]["pos_cond_kwargs"]["encoder_hidden_states"]
    return found[0] if isinstance(found, list) else found


# ---------------------------------------------------------------------- rollout request, echo


def unknown_fields_are_refused(server: Server) -> None:
    """Stock ignores them in silence."""
    assert server.ask(rollout_noise=0.7).status_code == 400


def a_null_seed_is_refused_before_anything_is_drawn(server: Server) -> None:
    """Stock draws, then fails to write its answer."""
    assert server.ask(seed=None).status_code == 400


def the_size_is_echoed(server: Server) -> None:
    (item,) = server.draw()
    assert (item.get("height"), item.get("width")) == (SIDE, SIDE)


def a_side_that_does_not_divide_is_refused(server: Server) -> None:
    """Stock rounds it down without a word."""
    assert server.ask(height=SIDE + 1, width=SIDE + 6).status_code == 400


# ---------------------------------------------------------------------- several outputs


def several_outputs_are_drawn(server: Server) -> None:
    """On CUDA stock fails for every request of more than one output."""
    answer = server.ask(num_outputs_per_prompt=2)
    assert answer.status_code == 200
    assert len(answer.json()) == 2


def an_outputs_noise_does_not_depend_on_how_many_there_are(server: Server) -> None:
    """Stock draws a whole batch's noise from each sample's generator and uses the first slice."""
    alone, among = server.draw()[0], server.draw(num_outputs_per_prompt=3)[0]
    assert torch.equal(latents(alone)[0], latents(among)[0])
    assert float((latents(alone) - latents(among)).abs().max()) <= ATOL


def conditions_have_one_shape_for_any_number_of_outputs(server: Server) -> None:
    """Stock: [L, D] for one output, [1, L, D] for two."""
    shapes = {embeds(server.draw(num_outputs_per_prompt=n)[0]).ndim for n in (1, 2)}
    assert len(shapes) == 1


def each_output_tells_its_own_seed(server: Server) -> None:
    """Stock writes the request's seed on every item."""
    assert len({item["seed"] for item in server.draw(num_outputs_per_prompt=3)}) == 3


# ---------------------------------------------------------------------- trajectory, log-prob


def states_are_kept_in_float32(server: Server) -> None:
    """Stock stores them in the model's bf16."""
    (item,) = server.draw()
    assert item["dit_trajectory"]["latents"].dtype == torch.float32


def the_log_prob_is_that_of_the_stored_state(server: Server) -> None:
    """Stock's is that of the drawn noise: off by 6e-5 in the first steps and 5e-3 in the last."""
    (item,) = server.draw(rollout_sde_step_indices=[1, 3, 5, 7])
    logps = item["rollout_log_probs"]
    for position, k in enumerate((1, 3, 5, 7)):
        mean, std = server.moments(item, k)
        logp = flow_sde_log_prob(latents(item)[None, k + 1], mean, std)
        given = logps[k] if len(logps) == T else logps[position]  # stock has one of every step, with noise or without
        assert abs(float(logp) - float(given)) <= 1e-6, (k, float(logp), float(given))


# ---------------------------------------------------------------------- schedule, seeds


def driver_sigmas_are_used_as_they_are(server: Server) -> None:
    sigmas = [1.0, 0.97, 0.9, 0.7, 0.65, 0.4, 0.3, 0.1, 0.0]
    (item,) = server.draw(sigmas=sigmas)
    used = torch.as_tensor(item["dit_trajectory"]["timesteps"]).float() / 1000.0
    assert torch.allclose(used, torch.tensor(sigmas), atol=1e-6)


def the_driver_chooses_the_initial_latent(server: Server) -> None:
    (item,) = server.draw(initial_noise_group_ids=["a"], initial_noise_seed=77)
    assert torch.equal(latents(item)[0], initial_latent(77, "a", LATENT_SHAPE))


def each_candidates_step_noise_has_a_seed_of_its_own(server: Server) -> None:
    """Stock draws x_T and every step from one generator."""
    first, second = (
        server.draw(initial_noise_group_ids=["a"], initial_noise_seed=77, denoise_seeds=[seed])[0] for seed in (1, 2)
    )
    assert torch.equal(latents(first)[:2], latents(second)[:2])  # up to the first step with noise
    assert not torch.allclose(latents(first)[2], latents(second)[2], atol=0.1)


def a_prompt_of_500_tokens_is_kept_whole(server: Server) -> None:
    """Stock counts the template's 34 tokens into the window of 512."""

    def length(words: int) -> int:
        return embeds(server.draw(prompt=" ".join(["red"] * words))[0]).shape[-2]

    short, longer = length(1), length(11)
    words = 1 + (500 - short) * 10 // (longer - short)
    assert length(words) == short + (words - 1) * (longer - short) // 10


# ---------------------------------------------------------------------- kinds of noise


def dance_is_served(server: Server) -> None:
    assert server.ask(rollout_sde_type="dance").status_code == 200


def cps_gives_no_log_prob_that_is_not_a_number(server: Server) -> None:
    """The last step of cps has no noise. Stock answers NaN; ours refuses to train that step."""
    answer = server.ask(rollout_sde_type="cps", rollout_sde_step_indices=[3, T - 1])
    assert answer.status_code == 400 or bool(_decoded(answer.json())[0]["rollout_log_probs"].isfinite().all())


# ---------------------------------------------------------------------- weights


def an_update_with_an_unknown_name_is_refused(server: Server) -> None:
    """Stock: success, and a warning in its log."""
    assert server.update({"bogus.weight": torch.zeros(3)}).status_code == 400


def a_misshapen_tensor_stops_an_update_before_anything_is_written(server: Server) -> None:
    """Stock has written what came before it."""
    before = latents(server.draw()[0])
    assert server.update({"img_in.bias": torch.ones(96), "proj_out.bias": torch.zeros(7)}).status_code == 400
    assert torch.equal(latents(server.draw()[0]), before)


def an_answer_names_the_version_of_its_weights(server: Server) -> None:
    assert isinstance(server.draw()[0].get("policy_version"), int)


def an_update_while_asleep_is_refused(server: Server) -> None:
    if server.post("/release_memory_occupation", json={}).status_code != 200:
        raise NotServedError("release_memory_occupation")
    try:
        assert server.update({"img_in.bias": torch.zeros(96)}).status_code == 400
    finally:
        server.post("/resume_memory_occupation", json={})


def sleep_has_tags(server: Server) -> None:
    """Stock puts everything to sleep."""
    answer = server.post("/release_memory_occupation", json={"tags": ["weights"]}).json()
    server.post("/resume_memory_occupation", json={})
    assert answer.get("asleep") == ["weights"]


# ---------------------------------------------------------------------- LoRA, last: it cannot be undone


def a_lora_takes_effect_whatever_prefix_its_names_have(server: Server) -> None:
    """Stock: keys with `transformer.` or `base_model.model.` give success with 0 layers."""
    drawn = [latents(server.draw()[0])]
    for scale, prefix in enumerate(PREFIXES[1:], start=1):
        tensors = {prefix + name: tensor * scale for name, tensor in _lora().items()}
        if server.set_lora(tensors).status_code != 200:
            raise NotServedError("set_lora")
        drawn.append(latents(server.draw()[0]))
    assert not torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[1], drawn[2])


def after_a_lora_a_full_update_is_refused(server: Server) -> None:
    """Stock skips every layer that the LoRA wraps, and says success."""
    if server.set_lora(_lora()).status_code != 200:
        raise NotServedError("set_lora")
    assert server.update({"transformer_blocks.0.attn.to_q.weight": torch.zeros(96, 96)}).status_code == 400


def _lora() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(4)
    return {
        f"transformer_blocks.0.attn.{layer}.lora_{factor}.weight": 0.3 * torch.randn(shape, generator=generator)
        for layer in ("to_q", "to_v")
        for factor, shape in (("A", (4, 96)), ("B", (96, 4)))
    }


ADAPTER_ROWS = (a_lora_takes_effect_whatever_prefix_its_names_have, after_a_lora_a_full_update_is_refused)
ROWS = (
    unknown_fields_are_refused,
    a_null_seed_is_refused_before_anything_is_drawn,
    the_size_is_echoed,
    a_side_that_does_not_divide_is_refused,
    an_outputs_noise_does_not_depend_on_how_many_there_are,
    conditions_have_one_shape_for_any_number_of_outputs,
    each_output_tells_its_own_seed,
    states_are_kept_in_float32,
    the_log_prob_is_that_of_the_stored_state,
    driver_sigmas_are_used_as_they_are,
    the_driver_chooses_the_initial_latent,
    each_candidates_step_noise_has_a_seed_of_its_own,
    a_prompt_of_500_tokens_is_kept_whole,
    dance_is_served,
    cps_gives_no_log_prob_that_is_not_a_number,
    an_update_with_an_unknown_name_is_refused,
    an_answer_names_the_version_of_its_weights,
    sleep_has_tags,
    an_update_while_asleep_is_refused,
    a_misshapen_tensor_stops_an_update_before_anything_is_written,
)
CUDA_ROWS = (several_outputs_are_drawn,)
