"""Recurrent experience replay."""

import functools
import itertools

import gymnasium as gym
import numpy as np
import pytest
import torch

from dmiddleware.data import PrioritySampler, TensorBuffer, as_tree
from dmiddleware.env import make_env_manager
from dmiddleware.errors import StructureError
from dmiddleware.policy import R2D2Policy
from dmiddleware.rl import rescale_value, unscale_value
from dmiddleware.rollout import RolloutCollector, evaluate_episodes
from dmiddleware.zoo.envs import Recall
from tests.dmiddleware.recurrent_policy import masked_cartpole
from tests.variants import mostly_slow

SMALL = {"hidden_size": 16, "encoder_hidden_sizes": [8], "head_hidden_sizes": [8]}
BURN_IN, UNROLL_LEN = 3, 6


def buffer_for(policy, size=600, **options):
    options = {"unroll_len": UNROLL_LEN, "stride": 3, **options}
    return TensorBuffer(
        size,
        sampler=PrioritySampler(alpha=0.9, beta=0.6),
        burn_in=policy.burn_in,
        start_columns=("state",),
        store_next_obs=False,
        seed=0,
        **options,
    )


def sampled(n=12, **options):
    """Return a policy, and sequences from a buffer of what it collected."""
    options = {"seed": 0, "model": SMALL, "burn_in": BURN_IN, "discount": 0.9, **options}
    with masked_cartpole(3, seed=0) as envs:
        policy = R2D2Policy.for_env(envs, **options)
        buffer = buffer_for(policy)
        collector = RolloutCollector(policy, envs)
        for _ in range(10):
            buffer.push(collector.collect(60, policy_kwargs={"eps": 0.5}))
    return policy, buffer.sample(n)


def q_by_hand(model, batch, sequence, length):
    """Return the values ``[length + 1, A]`` of one sequence, one step after the other."""
    state, values = batch["state"][sequence : sequence + 1], []
    for t in range(length + 1):
        if t == 0:
            obs, *seen = (
                batch[name][0, sequence]
                for name in ("obs", "prev_action", "prev_reward", "is_first")
            )
        else:
            obs, *seen = (batch[name][t - 1, sequence] for name in ("next_obs", "action", "reward"))
            seen.append(torch.tensor(False))
        action, reward, is_first = (one.unsqueeze(0) for one in seen)
        with torch.no_grad():
            output = model(
                obs.unsqueeze(0), state, prev_action=action, prev_reward=reward, is_first=is_first
            )
        state = output["state"]
        values.append(output["logit"][0])
    return torch.stack(values)


def td_errors_by_hand(policy, batch, *, nstep, double, rescaled):
    """Return ``[L, B]``, by equation for equation and row for row."""
    part = policy.components["q"]
    h, inverse = (rescale_value, unscale_value) if rescaled else (lambda x: x, lambda x: x)
    errors = torch.zeros(UNROLL_LEN, batch["mask"].shape[1])
    for b in range(batch["mask"].shape[1]):
        length = int(batch["mask"][:, b].sum())
        online, target = (
            q_by_hand(model, batch, b, length) for model in (part.module, part.target)
        )
        for t in range(BURN_IN, length):
            total, end = 0.0, min(t + nstep, length)
            for k in range(t, end):
                total += 0.9 ** (k - t) * float(batch["reward"][k, b])
            best = (online if double else target)[end].argmax()
            if not batch["terminated"][end - 1, b]:
                total += 0.9 ** (end - t) * float(inverse(target[end, best]))
            errors[t - BURN_IN, b] = h(torch.tensor(total)) - online[t, batch["action"][t, b]]
    return errors


def differ(policy):
    """Make the target network another one than the online network."""
    generator = torch.Generator().manual_seed(1)
    for parameter in policy.components["q"].target.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)


@pytest.mark.parametrize(
    ("nstep", "double", "rescaled"),
    mostly_slow(itertools.product([1, 3], [False, True], [False, True]), keep=[0, 3, 6]),
)
def test_the_loss_and_the_priorities_are_those_of_the_paper(nstep, double, rescaled):
    policy, batch = sampled(n_step=nstep, double=double, value_rescaling=rescaled)
    differ(policy)
    mask = batch["mask"][BURN_IN:]
    assert not mask.all()
    assert batch["terminated"].any()
    errors = td_errors_by_hand(policy, batch, nstep=nstep, double=double, rescaled=rescaled)
    output = policy.learn_mode.forward(batch)
    wanted = (errors.square() * mask * batch["weight"]).mean()
    assert output["total_loss"] == pytest.approx(wanted.item(), rel=1e-4)
    size = errors.abs()
    priority = 0.9 * size.amax(0) + 0.1 * size.sum(0) / mask.sum(0)
    torch.testing.assert_close(output["priority"], priority, rtol=1e-4, atol=1e-5)


def test_padding_does_not_matter():
    policy, batch = sampled()
    twin, same = sampled()
    padding = ~same["mask"]
    assert padding.any()
    same["action"][padding] = 1 - same["action"][padding]
    same["reward"][padding] = 1e6
    assert policy.learn_mode.forward(batch)["total_loss"] == pytest.approx(
        twin.learn_mode.forward(same)["total_loss"]
    )


def test_the_burn_in_only_brings_the_state_up_to_date():
    """An update with burn-in is one without, from the state that the burn-in leads to."""
    policy, batch = sampled()
    twin, _ = sampled(burn_in=0)
    model = policy.model
    warm_up = {name: batch[name][:BURN_IN] for name in model.act_inputs}
    with torch.no_grad():
        state = model(batch["obs"][:BURN_IN], batch["state"], **warm_up)["state"]
    lone = ("state", "index", "weight")
    later = {name: batch[name] if name in lone else batch[name][BURN_IN:] for name in batch}
    output = policy.learn_mode.forward(batch)
    same = twin.learn_mode.forward(as_tree({**later, "state": state}))
    assert output["total_loss"] == pytest.approx(same["total_loss"], rel=1e-5)
    pairs = zip(model.parameters(), twin.model.parameters(), strict=True)
    for mine, theirs in pairs:
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


def test_the_stored_state_matters():
    policy, batch = sampled(burn_in=0)
    twin, same = sampled(burn_in=0)
    same["state"] = torch.zeros_like(same["state"])
    assert policy.learn_mode.forward(batch)["total_loss"] != pytest.approx(
        twin.learn_mode.forward(same)["total_loss"], rel=1e-6
    )


def test_acting_explores_with_eps():
    with masked_cartpole(64, seed=0) as envs:
        policy = R2D2Policy.for_env(envs, seed=0, model=SMALL)
        greedy, random = (
            RolloutCollector(policy, envs).collect(640, policy_kwargs={"eps": eps})
            for eps in (0.0, 1.0)
        )
    evaluated = policy.eval_mode.forward(
        greedy["obs"][4],
        **{n: greedy[n][4] for n in ("is_first", "prev_action", "prev_reward", "state")},
    )
    assert torch.equal(evaluated["action"], greedy["action"][4])
    assert 0.35 < random["action"].float().mean() < 0.65


@pytest.mark.parametrize("double", [False, True])
def test_masks_are_respected_in_actions_and_targets(double):
    class Masked(gym.Env):
        """Only one of three actions is allowed."""

        observation_space = gym.spaces.Box(0.0, 3.0, (1,))
        action_space = gym.spaces.Discrete(3)

        def _seen(self):
            mask = np.zeros(3, np.int8)
            mask[self.t % 3] = 1
            return np.array([self.t % 3], np.float32), {"action_mask": mask}

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            self.t = 0
            return self._seen()

        def step(self, action):
            assert action == self.t % 3
            self.t += 1
            obs, info = self._seen()
            return obs, 0.0, False, self.t == 20, info

    def tempt(network, args, output):
        """Prefer forbidden actions."""
        allowed = torch.nn.functional.one_hot(args[0][..., 0].long(), 3)
        return {**output, "logit": output["logit"] + 1000.0 * (1 - allowed)}

    with make_env_manager(Masked, env_num=2, seed=0, max_retry=0) as envs:
        policy = R2D2Policy.for_env(envs, seed=0, model=SMALL, double=double, value_rescaling=False)
        part = policy.components["q"]
        for network in (part.module, part.target):
            network.register_forward_hook(tempt)
        buffer = buffer_for(policy)
        buffer.push(RolloutCollector(policy, envs).collect(120, policy_kwargs={"eps": 0.5}))
        evaluate_episodes(policy, envs, 2)
    output = policy.learn_mode.forward(buffer.sample(8))
    assert abs(output["target_q_value"]) < 100.0


def test_sequences_that_are_too_short_are_rejected():
    policy, batch = sampled()
    with pytest.raises(StructureError, match="more than burn_in=3 rows"):
        policy.learn_mode.forward(as_tree({**batch, "mask": batch["mask"][:3]}))
    del batch["mask"]
    with pytest.raises(StructureError, match="lacks mask"):
        policy.learn_mode.forward(batch)


@pytest.mark.learning
def test_it_recalls_a_cue_that_no_policy_without_a_memory_can_recall():
    """Without a memory, the best possible return is 1 / 3; see test_memory_envs."""
    make = functools.partial(Recall, n_cues=3, delay=2)
    with make_env_manager(make, env_num=8, seed=0) as envs:
        policy = R2D2Policy.for_env(
            envs,
            seed=0,
            model={"hidden_size": 32},
            discount=0.9,
            learning_rate=5e-3,
            adam_eps=1e-8,
            target_update_freq=20,
        )
        buffer = buffer_for(policy, 5000, unroll_len=4, stride=4)
        collector = RolloutCollector(policy, envs)
        for step in range(200):
            eps = max(0.1, 1.0 - step / 120)
            buffer.push(collector.collect(16, policy_kwargs={"eps": eps}))
            if step >= 20:
                batch = buffer.sample(32)
                output = policy.learn_mode.forward(batch)
                buffer.update_priority(batch["index"], output["priority"])
        returns = evaluate_episodes(policy, envs, 64).get_episode_return()
    assert np.mean(returns) > 0.7
