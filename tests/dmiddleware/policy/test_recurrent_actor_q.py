"""SAC and TD3 with memories."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from dmiddleware.data import PrioritySampler, TensorBuffer, as_tree
from dmiddleware.env import make_env_manager
from dmiddleware.errors import ConfigError, PolicyError, SpaceError, StructureError
from dmiddleware.model import ActorQ, RecurrentActorQ
from dmiddleware.policy import (
    RecurrentSACPolicy,
    RecurrentTD3Policy,
    SACPolicy,
    TD3Policy,
)
from dmiddleware.rl import TanhGaussian
from dmiddleware.rollout import RolloutCollector, evaluate_episodes
from dmiddleware.tree import Batch

BOTH = [RecurrentSACPolicy, RecurrentTD3Policy]
MODEL = {
    "hidden_size": 8,
    "encoder_hidden_sizes": [8],
    "actor_hidden_sizes": [8],
    "critic_hidden_sizes": [8],
}
BURN_IN, UNROLL_LEN = 2, 4


class Walk(gym.Env[Any, Any]):
    """Shows where a point is, which two numbers move; some episodes terminate, others do not."""

    observation_space = gym.spaces.Box(-9.0, 9.0, (1,), np.float32)
    action_space = gym.spaces.Box(-2.0, 2.0, (2,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._n_left = int(self.np_random.integers(3, 9))
        self._place = self.np_random.uniform(-1.0, 1.0, 1).astype(np.float32)
        return self._place, {}

    def step(self, action: Any) -> Any:
        self._n_left -= 1
        self._place = np.clip(self._place + np.float32(action.sum() / 8), -9.0, 9.0)
        is_over = self._n_left == 0
        terminated = is_over and bool(self._place[0] > 0)
        return self._place, float(self._place[0]), terminated, is_over and not terminated, {}


def sampled(cls: Any, n: int = 12, *, start: int = BURN_IN, **options: Any) -> tuple[Any, Batch]:
    """Return a policy, and sequences from a buffer of what it collected."""
    with make_env_manager(Walk, env_num=3, seed=0) as envs:
        policy = cls.for_env(
            envs, **{"seed": 0, "model": MODEL, "burn_in": BURN_IN, "discount": 0.9, **options}
        )
        collector = RolloutCollector(policy, envs)
        buffer = TensorBuffer(
            600,
            burn_in=start,
            unroll_len=UNROLL_LEN + BURN_IN - start,
            stride=2,
            start_columns=("state",),
            sampler=PrioritySampler(alpha=0.9, beta=0.6),
            seed=0,
        )
        buffer.push(collector.collect(300))
    return policy, buffer.sample(n)


def differ(policy: Any) -> None:
    """Make target networks other ones than the networks."""
    generator = torch.Generator().manual_seed(1)
    for component in policy.components.values():
        if component.has_target:
            for parameter in component.target.parameters():
                parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)


def history(batch: Batch, sequence: int, length: int) -> list[dict[str, torch.Tensor]]:
    """Return what a memory sees of one sequence, step for step, with the last successor."""
    steps = []
    for t in range(length + 1):
        name, at = ("obs", t) if t == 0 else ("next_obs", t - 1)
        before = ("prev_action", "prev_reward") if t == 0 else ("action", "reward")
        steps.append(
            {
                "obs": batch[name][at, sequence][None],
                "prev_action": batch[before[0]][at, sequence][None] / 2.0,  # as the networks see it
                "prev_reward": batch[before[1]][at, sequence][None],
                "is_first": batch["is_first"][t, sequence][None]
                if t == 0
                else torch.tensor([False]),
            }
        )
    return steps


@torch.no_grad()
def outputs(
    network: Any, steps: list[Any], state: torch.Tensor, actions: Any = None
) -> list[dict[str, torch.Tensor]]:
    """Return the outputs of a network, one step after the other."""
    answers = []
    for t, step in enumerate(steps):
        inputs = {name: step[name] for name in step if name != "obs"}
        if actions is not None:
            inputs["action"] = actions[t][None]
        output = network(step["obs"], state, **inputs)
        state = output["state"]
        answers.append(output)
    return answers


def test_the_losses_of_recurrent_sac_are_those_of_single_rows_that_remember() -> None:
    policy, batch = sampled(RecurrentSACPolicy)
    differ(policy)
    mask = batch["mask"][BURN_IN:]
    assert not mask.all()
    assert batch["terminated"].any()
    policy.learn_generator.manual_seed(0)
    drawn = policy.draw({name: batch[name] for name in batch})
    policy.learn_generator.manual_seed(0)
    noise = {name: drawn[name].view(UNROLL_LEN, -1, 2) for name in drawn}
    zeros = policy.critic.module.initial_state(1)
    total, n_rows, log_probs = 0.0, int(mask.sum()), []
    for b in range(mask.shape[1]):
        length = int(batch["mask"][:, b].sum())
        steps = history(batch, b, length)
        acted = outputs(policy.actor.module, steps, batch["state"][b : b + 1])
        taken = [*(batch["action"][:length, b] / 2.0), torch.zeros(2)]
        q = outputs(policy.critic.module, steps, zeros, taken)
        for t in range(BURN_IN, length):
            after = TanhGaussian(acted[t + 1]["mu"][0], acted[t + 1]["sigma"][0])
            next_action = after.rsample(noise=noise["next_noise"][t - BURN_IN, b])
            judged = [*taken[: t + 1], next_action]
            next_q = outputs(policy.critic.target, steps[: t + 2], zeros, judged)[-1]["q"].amin()
            value = next_q - after.log_prob(next_action)  # the first temperature is 1
            target = batch["reward"][t, b] + 0.9 * value * ~batch["terminated"][t, b]
            error = (q[t]["q"][:, 0] - target).square().sum()
            total += float(0.5 * error * batch["weight"][b])
            here = TanhGaussian(acted[t]["mu"][0], acted[t]["sigma"][0])
            chosen = here.rsample(noise=noise["noise"][t - BURN_IN, b])
            log_probs.append(float(here.log_prob(chosen)))
    output = policy.learn_mode.forward(batch)
    assert output["critic_loss"] == pytest.approx(total / n_rows, rel=1e-4)
    assert output["entropy"] == pytest.approx(-np.mean(log_probs), rel=1e-4)
    assert output["priority"].shape == (12,)


def test_the_loss_of_recurrent_td3_is_that_of_single_rows_that_remember() -> None:
    policy, batch = sampled(RecurrentTD3Policy, target_noise=0.0)
    differ(policy)
    zeros, total, n_rows = policy.critic.module.initial_state(1), 0.0, 0
    for b in range(batch["mask"].shape[1]):
        length = int(batch["mask"][:, b].sum())
        steps = history(batch, b, length)
        acted = outputs(policy.actor.target, steps, batch["state"][b : b + 1])
        taken = [*(batch["action"][:length, b] / 2.0), torch.zeros(2)]
        q = outputs(policy.critic.module, steps, zeros, taken)
        for t in range(BURN_IN, length):
            judged = [*taken[: t + 1], acted[t + 1]["mu"][0].tanh()]
            next_q = outputs(policy.critic.target, steps[: t + 2], zeros, judged)[-1]["q"].amin()
            target = batch["reward"][t, b] + 0.9 * next_q * ~batch["terminated"][t, b]
            error = (q[t]["q"][:, 0] - target).square().sum()
            total, n_rows = total + float(error * batch["weight"][b]), n_rows + 1
    output = policy.learn_mode.forward(batch)
    assert output["critic_loss"] == pytest.approx(total / n_rows, rel=1e-4)


@pytest.mark.parametrize("cls", BOTH)
def test_padding_does_not_matter(cls: Any) -> None:
    policy, batch = sampled(cls)
    twin, same = sampled(cls)
    padding = ~same["mask"]
    assert padding.any()
    same["action"][padding] = -same["action"][padding]
    same["reward"][padding] = 1e6
    for _ in range(2):  # the actor of TD3 moves in every second update
        output, again = policy.learn_mode.forward(batch), twin.learn_mode.forward(same)
    assert output["critic_loss"] == pytest.approx(again["critic_loss"], rel=1e-5)
    pairs = zip(policy.model.parameters(), twin.model.parameters(), strict=True)
    for mine, theirs in pairs:
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("cls", BOTH)
def test_the_burn_in_is_seen_but_not_learned_from(cls: Any) -> None:
    model = {**MODEL, "prev_reward": False}
    policy, batch = sampled(cls, model=model)
    twin, same = sampled(cls, model=model)
    same["reward"][:BURN_IN] += 100.0
    watcher, changed = sampled(cls, model=model)
    changed["obs"][0] += 1.0
    loss, same_loss, changed_loss = (
        learner.learn_mode.forward(data)["critic_loss"]
        for learner, data in ((policy, batch), (twin, same), (watcher, changed))
    )
    assert loss == same_loss
    assert loss != pytest.approx(changed_loss, rel=1e-6)


@pytest.mark.parametrize("cls", BOTH)
def test_the_stored_state_matters_to_the_actor(cls: Any) -> None:
    policy, batch = sampled(cls, burn_in=0, start=0)
    twin, same = sampled(cls, burn_in=0, start=0)
    assert batch["state"].abs().sum() > 0
    same["state"] = torch.zeros_like(same["state"])
    name = "policy_loss" if cls is RecurrentSACPolicy else "actor_loss"
    for _ in range(2):
        output, again = policy.learn_mode.forward(batch), twin.learn_mode.forward(same)
    assert output[name] != pytest.approx(again[name], rel=1e-6)


def test_recurrent_sac_acts_on_what_it_has_seen() -> None:
    """Evaluating continues from the state; acting on the same observation depends on it."""
    with make_env_manager(Walk, env_num=3, seed=0) as envs:
        policy = RecurrentSACPolicy.for_env(envs, seed=0, model=MODEL)
        rows = RolloutCollector(policy, envs).collect(30)
        evaluate_episodes(policy, envs, 3)
    inputs = {name: rows[name][4] for name in ("is_first", "prev_action", "prev_reward", "state")}
    first, again = (policy.eval_mode.forward(rows["obs"][4], **inputs) for _ in range(2))
    assert torch.equal(first["action"], again["action"])
    draws = policy.eval_mode.forward(rows["obs"][4], deterministic=False, **inputs)
    assert not torch.equal(first["action"], draws["action"])
    inputs["state"] = inputs["state"] + 1.0
    later = policy.eval_mode.forward(rows["obs"][4], **inputs)
    assert not torch.equal(first["action"], later["action"])


def test_recurrent_td3_explores_by_noise() -> None:
    with make_env_manager(Walk, env_num=3, seed=0) as envs:
        quiet = RecurrentTD3Policy.for_env(envs, seed=0, model=MODEL, noise_sigma=0.0)
        rows = RolloutCollector(quiet, envs).collect(30)
        noisy = RecurrentTD3Policy.for_env(envs, seed=0, model=MODEL, noise_sigma=0.1)
    inputs = {name: rows[name][4] for name in ("is_first", "prev_action", "prev_reward", "state")}
    best = noisy.eval_mode.forward(rows["obs"][4], **inputs)["action"]
    torch.testing.assert_close(best, rows["action"][4])
    distance = noisy.collect_mode.forward(rows["obs"][4], **inputs)["action"] - best
    assert 0 < distance.abs().max() < 2.0


@pytest.mark.parametrize("cls", BOTH)
def test_bad_options_and_batches_are_refused(cls: Any) -> None:
    env = Walk()
    with pytest.raises(ConfigError, match="n_step"):
        cls.for_env(env, n_step=3)
    with pytest.raises(ConfigError, match="burn_in"):
        cls.for_env(env, burn_in=-1)
    with pytest.raises(ConfigError, match="hidden_sizes"):
        cls.for_env(env, model={"hidden_sizes": 8})
    with pytest.raises(PolicyError, match="needs a recurrent model"):
        cls.for_env(env, model=ActorQ(1, 2))
    policy, batch = sampled(cls)
    with pytest.raises(StructureError, match="more than burn_in=2 rows"):
        policy.learn_mode.forward(as_tree({**batch, "mask": batch["mask"][:2]}))
    with pytest.raises(SpaceError, match="a Box of actions"):
        RecurrentActorQ(1, 2, action_space="discrete")


def test_recurrent_td3_has_no_correlated_noise() -> None:
    with pytest.raises(ConfigError, match="noise"):
        RecurrentTD3Policy.for_env(Walk(), noise="ou")


@pytest.mark.parametrize(("cls", "plain"), [*zip(BOTH, [SACPolicy, TD3Policy], strict=True)])
def test_the_settings_are_those_of_the_algorithm_and_of_sequences(cls: Any, plain: Any) -> None:
    settings = cls.settings_class()()
    assert issubclass(cls.settings_class(), plain.settings_class())
    assert (settings.batch_size, settings.n_step, settings.burn_in) == (32, 1, 0)


class Echo(gym.Env[Any, Any]):
    """Shows 1 or -1 once, and pays for the action of the third step that is near it.

    Without a memory, the best possible return is -1, for an action of 0.
    """

    observation_space = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = gym.spaces.Box(-2.0, 2.0, (1,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._cue, self._t = 2.0 * float(self.np_random.integers(2)) - 1.0, 0
        return np.array([self._cue, 0.0], np.float32), {}

    def step(self, action: Any) -> Any:
        self._t += 1
        is_over = self._t == 3
        reward = -float((action[0] - self._cue) ** 2) if is_over else 0.0
        return np.array([0.0, self._t == 2], np.float32), reward, is_over, False, {}


@pytest.mark.learning
@pytest.mark.parametrize("cls", BOTH)
def test_it_echoes_what_no_policy_without_a_memory_can_echo(cls: Any) -> None:
    rates = {
        RecurrentSACPolicy: ("learning_rate_q", "learning_rate_policy", "learning_rate_alpha"),
        RecurrentTD3Policy: ("learning_rate_critic", "learning_rate_actor"),
    }[cls]
    options: dict[str, Any] = dict.fromkeys(rates, 3e-3)
    if cls is RecurrentTD3Policy:
        options["noise_sigma"] = 0.5
    with make_env_manager(Echo, env_num=8, seed=0) as envs:
        model = {"hidden_size": 16, "encoder_hidden_sizes": [16]}
        policy = cls.for_env(envs, seed=0, model=model, target_tau=0.05, **options)
        buffer = TensorBuffer(4_000, unroll_len=3, stride=3, start_columns=("state",), seed=0)
        collector = RolloutCollector(policy, envs)
        buffer.push(collector.collect(96))
        for _ in range(100):
            buffer.push(collector.collect(24))
            for _ in range(6):
                policy.learn_mode.forward(buffer.sample(32))
        returns = evaluate_episodes(policy, envs, 64).get_episode_return()
    assert np.mean(returns) > -0.3
