"""Our update of SAC and that of stable-baselines3, from the same weights, batches and noise."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gymnasium as gym
import pytest
import torch
from torch import nn

from dmiddleware.data import Batch, as_tree
from dmiddleware.policy import SACPolicy

N_ROWS, N_UPDATES = 64, 50
# Their log-density adds 1e-6 to the derivative of tanh, which ours does not need.
EPSILON = 1e-12


class SACWithNoise(SACPolicy):
    """SAC that draws noise from a list."""

    noise: list[torch.Tensor]

    def draw(self, batch: Any) -> dict[str, torch.Tensor]:
        return {"noise": self.noise.pop(0), "next_noise": self.noise.pop(0)}


def weights_of(theirs: Any) -> dict[str, torch.Tensor]:
    """Return the weights of stable-baselines3's networks, under the names of ours."""
    actor, critics = theirs.actor, theirs.critic.q_networks
    weights = {f"actor.encoder.{name}": one for name, one in actor.latent_pi.state_dict().items()}
    for name in ("weight", "bias"):
        weights[f"actor.head.{name}"] = torch.cat(
            [getattr(actor.mu, name), getattr(actor.log_std, name)]
        )
    for i, layers in enumerate(zip(*critics, strict=True)):
        if isinstance(layers[0], nn.Linear):
            together = torch.stack([layer.weight.t() for layer in layers])
            weights[f"critic.layers.{i}.weight"] = together
            weights[f"critic.layers.{i}.bias"] = torch.stack([one.bias for one in layers])[:, None]
    return {name: one.detach().clone() for name, one in weights.items()}


def steps(env: gym.Env[Any, Any]) -> Iterator[dict[str, torch.Tensor]]:
    """Yield batches of random steps, some of which end an episode."""
    n_obs, n_actions = (space.shape[0] for space in (env.observation_space, env.action_space))
    highest = float(env.action_space.high[0])
    generator = torch.Generator().manual_seed(0)
    while True:
        yield {
            "obs": torch.randn(N_ROWS, n_obs, generator=generator),
            "action": (torch.rand(N_ROWS, n_actions, generator=generator) * 2 - 1) * highest,
            "reward": torch.randn(N_ROWS, generator=generator),
            "next_obs": torch.randn(N_ROWS, n_obs, generator=generator),
            "terminated": torch.rand(N_ROWS, generator=generator) < 0.2,
        }


@pytest.mark.parametrize(
    ("env_id", "sizes", "compiled"),
    # Pendulum's actions reach from -2 to 2.
    [
        ("Pendulum-v1", [32, 32], False),
        ("Hopper-v5", [256, 256], False),
        ("Hopper-v5", [256, 256], True),
    ],
)
def test_updates_equal_those_of_stable_baselines3(
    env_id: str, sizes: list[int], compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stable_baselines3 = pytest.importorskip("stable_baselines3")
    from stable_baselines3.common.logger import Logger
    from stable_baselines3.common.type_aliases import ReplayBufferSamples

    theirs = stable_baselines3.SAC(
        "MlpPolicy", env_id, seed=0, device="cpu", policy_kwargs={"net_arch": sizes}
    )
    theirs.set_logger(Logger(None, []))
    theirs.actor.action_dist.epsilon = EPSILON
    env = gym.make(env_id)
    widths = {"actor_hidden_sizes": sizes, "critic_hidden_sizes": sizes}
    model = SACPolicy.for_env(env, model=widths).model
    first = weights_of(theirs)
    model.load_state_dict(first)
    policy = SACWithNoise.for_env(env, model=model, modes=["learn"], compile=compiled)
    highest = float(env.action_space.high[0])

    batches: list[dict[str, torch.Tensor]] = []
    noise: list[torch.Tensor] = []
    monkeypatch.setattr(
        "torch.distributions.normal._standard_normal", lambda *args, **kwargs: noise.pop(0)
    )

    def sample(*args: object, **kwargs: object) -> ReplayBufferSamples:
        one = batches.pop()
        return ReplayBufferSamples(
            one["obs"],
            one["action"] / highest,  # its buffer has actions from -1 to 1
            one["next_obs"],
            one["terminated"].float()[:, None],
            one["reward"][:, None],
        )

    monkeypatch.setattr(theirs.replay_buffer, "sample", sample)
    for batch, seed in zip(steps(env), range(N_UPDATES), strict=False):
        shape = (2, *batch["action"].shape)
        drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        policy.noise, noise[:], batches[:] = [*drawn], [*drawn], [batch]
        rows: Batch = as_tree(batch)
        output = policy.learn_mode.forward(rows)
        theirs.train(1, N_ROWS)

    found, expected = model.state_dict(), weights_of(theirs)
    for name, start in first.items():
        # As norms: Adam divides by the gradient's size, so rounding alone moves the few weights
        # whose gradients are almost 0. A compiled update rounds in another order.
        error = (found[name] - expected[name]).norm()
        assert error < 0.0002 * expected[name].norm(), name
        if not compiled:
            assert error < 0.0001 * (expected[name] - start).norm(), name
    # Ours reports the temperature that the update used.
    assert output["alpha"] == pytest.approx(theirs.log_ent_coef.exp().item(), abs=4e-4)
