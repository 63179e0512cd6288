"""Collecting in envs that return tensors, beside collecting in the same envs on the host."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

from dmiddleware.env import VectorEnvManager
from dmiddleware.errors import EnvCrashed, EnvProtocolError
from dmiddleware.policy import DDPGPolicy, DQNPolicy, PPOPolicy, RecurrentPPOPolicy
from dmiddleware.rollout import RolloutCollector
from dmiddleware.rollout.device_rollout import DeviceRollout
from dmiddleware.tree import leaves
from dmiddleware.zoo.tensor_envs import CartPole, Pendulum, TensorEnv

ENVS = 6


class Counter(TensorEnv):
    """World ``e`` counts to ``3 + e``; every third one then says that it was cut."""

    single_observation_space = spaces.Box(0.0, np.inf, (1,), np.float32)
    single_action_space = spaces.Discrete(2)
    max_steps = 10_000

    def first(self):
        return torch.zeros(self.num_envs, 1)

    def advance(self, state, action):
        following = state + 1
        lengths = 3 + torch.arange(self.num_envs)
        return following, 0.5 * following[:, 0], following[:, 0] >= lengths

    def seen(self, state):
        return state.clone()


class NextStep(Counter):
    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}

    def reset(self, **options):
        self.pending = torch.zeros(self.num_envs, dtype=torch.bool)
        return super().reset(**options)

    def step(self, actions):
        moved, reward, terminated = self.advance(self.state, actions)
        self.state = torch.where(self.pending.unsqueeze(1), self.first(), moved)
        terminated = terminated & ~self.pending
        self.pending = terminated
        return self.seen(self.state), reward, terminated, torch.zeros_like(terminated), {}

    def state_dict(self):
        return {**super().state_dict(), "pending": self.pending.tolist()}

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.pending = torch.tensor(state["pending"])


class Disabled(Counter):
    metadata = {"autoreset_mode": AutoresetMode.DISABLED}

    def reset(self, *, seed=None, options=None):
        mask = (options or {}).get("reset_mask")
        if mask is None:
            return super().reset(seed=seed)
        self.state = torch.where(torch.from_numpy(mask).unsqueeze(1), self.first(), self.state)
        return self.seen(self.state), {}

    def step(self, actions):
        self.state, reward, terminated = self.advance(self.state, actions)
        return self.seen(self.state), reward, terminated, torch.zeros_like(terminated), {}


def collector(env: type[TensorEnv], policy: Any = PPOPolicy, **options: Any) -> RolloutCollector:
    manager = VectorEnvManager(lambda: env(ENVS), ENVS, seed=0)
    return RolloutCollector(policy.for_env(manager, seed=0, **options), manager)


def on_the_host(monkeypatch: pytest.MonkeyPatch, made: RolloutCollector) -> RolloutCollector:
    with monkeypatch.context() as patch:
        patch.setattr(DeviceRollout, "of", lambda *_: None)
        made.start()
    return made


def columns(batch: Any) -> dict[str, torch.Tensor]:
    return dict(leaves(batch))


def relative_ids(ids: torch.Tensor) -> torch.Tensor:
    return ids - ids.min()


@pytest.mark.parametrize(
    ("env", "policy", "options", "kwargs"),
    [
        (CartPole, PPOPolicy, {}, {}),
        (CartPole, PPOPolicy, {"obs_norm": True}, {}),
        (CartPole, DQNPolicy, {}, {"eps": 0.5}),
        (Pendulum, DDPGPolicy, {"noise": "ou"}, {}),
        (Counter, RecurrentPPOPolicy, {}, {}),
        (Disabled, RecurrentPPOPolicy, {}, {}),
    ],
)
def test_the_rows_are_those_of_the_host(monkeypatch, env, policy, options, kwargs):
    device = collector(env, policy, **options)
    host = on_the_host(monkeypatch, collector(env, policy, **options))
    with device.env_manager, host.env_manager:
        for _ in range(3):
            ours = columns(device.collect(40 * ENVS, train_iter=7, policy_kwargs=kwargs))
            theirs = columns(host.collect(40 * ENVS, train_iter=7, policy_kwargs=kwargs))
            assert device.end_rows is not None and host.end_rows is None
            assert set(ours) == set(theirs)
            for name in ours:
                if name != "episode_id":
                    assert ours[name].dtype == theirs[name].dtype, name
                    assert torch.equal(ours[name], theirs[name]), name
            changes = [ids["episode_id"].diff(dim=0) != 0 for ids in (ours, theirs)]
            assert torch.equal(*changes)
            assert sorted(device.episode_lengths) == sorted(host.episode_lengths)
            assert sorted(device.episode_returns) == pytest.approx(sorted(host.episode_returns))
            assert device.end_rows.tolist() == ours["done"].flatten().nonzero()[:, 0].tolist()
        assert (device.env_step, device.env_episode) == (host.env_step, host.env_episode)


def test_steps_on_resets_are_left_out_and_no_row_is_lost():
    made = collector(NextStep)
    seen: list[list[float]] = [[] for _ in range(ENVS)]
    with made.env_manager:
        for n_steps in (1, 7, 2, 30):
            batch = made.collect(n_steps * ENVS)
            assert batch["obs"].shape == (n_steps, ENVS, 1)
            assert torch.equal(batch["next_obs"], batch["obs"] + 1)
            for env in range(ENVS):
                seen[env] += batch["obs"][:, env, 0].tolist()
    for env, values in enumerate(seen):
        assert values == [float(step % (3 + env)) for step in range(40)]


def test_ids_are_those_of_single_episodes_over_several_calls():
    made = collector(Counter)
    lengths: dict[int, int] = {}
    with made.env_manager:
        for n_steps in (1, 2, 1, 20):
            batch = made.collect(n_steps * ENVS)
            for row in batch["episode_id"].flatten().tolist():
                lengths[row] = lengths.get(row, 0) + 1
            assert all(
                episode_return == sum(0.5 * (step + 1) for step in range(length))
                for episode_return, length in zip(
                    made.episode_returns, made.episode_lengths, strict=True
                )
            )
    assert sorted(lengths.values())[-1] == 3 + ENVS - 1
    assert made.env_episode == sum(24 // (3 + env) for env in range(ENVS))


@pytest.mark.parametrize("env", [CartPole, NextStep])
@pytest.mark.parametrize("kind", [PPOPolicy, RecurrentPPOPolicy])
def test_a_collector_continues_exactly_where_it_was_saved(env, kind):
    managers = [VectorEnvManager(lambda: env(ENVS), ENVS, seed=seed) for seed in (0, 1)]
    policies = [kind.for_env(manager, seed=0) for manager in managers]
    first, second = map(RolloutCollector, policies, managers)
    with managers[0], managers[1]:
        first.collect(9 * ENVS)
        policies[1].learn_mode.load_state_dict(policies[0].learn_mode.state_dict())
        assert second.load_state_dict(first.state_dict())
        ours, theirs = (columns(made.collect(30 * ENVS)) for made in (first, second))
    assert set(ours) == set(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert first.episode_returns == second.episode_returns
    assert (first.env_step, first.env_episode) == (second.env_step, second.env_episode)


@pytest.mark.parametrize(("where", "value"), [("obs", torch.nan), ("reward", torch.inf)])
def test_a_value_that_is_not_finite_is_named_with_its_env_and_step(where, value):
    class Broken(Counter):
        def advance(self, state, action):
            following, reward, over = super().advance(state, action)
            bad = (following[:, 0] == 5) & (torch.arange(self.num_envs) == 4)
            if where == "reward":
                return following, reward.masked_fill(bad, value), over
            return following.masked_fill(bad.unsqueeze(1), value), reward, over

    made = collector(Broken)
    with made.env_manager, pytest.raises(EnvProtocolError, match=r"env 4 .* in step 5 of"):
        made.collect(20 * ENVS)


def test_large_finite_values_are_no_error():
    class Large(Counter):
        single_observation_space = spaces.Box(-np.inf, np.inf, (1,), np.float32)

        def seen(self, state):
            return torch.full_like(state, 3e38)

    made = collector(Large)
    with made.env_manager:
        assert made.collect(9 * ENVS)["obs"].isfinite().all()


def test_an_end_without_its_final_observation_is_refused():
    class Bare(Counter):
        def step(self, actions):
            return *super().step(actions)[:4], {}

    made = collector(Bare)
    with made.env_manager, pytest.raises(EnvProtocolError, match="final_obs"):
        made.collect(20 * ENVS)


def test_scalars_of_another_shape_are_refused():
    class Wide(Counter):
        def step(self, actions):
            obs, reward, *rest = super().step(actions)
            return obs, reward.unsqueeze(1), *rest

    made = collector(Wide)
    with made.env_manager, pytest.raises(EnvProtocolError, match="shape"):
        made.collect(ENVS)


def test_a_vector_env_that_fails_loses_its_episodes_and_goes_on():
    class Failing(Counter):
        n_made = 0

        def __init__(self, *args):
            super().__init__(*args)
            type(self).n_made += 1
            self.steps = 0

        def step(self, actions):
            self.steps += 1
            if self.steps == 5 and type(self).n_made <= 3:
                raise RuntimeError("the simulator has failed")
            return super().step(actions)

    made = collector(Failing)
    with made.env_manager:
        made.start()
        Failing.n_made = 3
        batch = made.collect(8 * ENVS)
        assert made.dropped_steps == 4 * ENVS
        assert made.env_step == 8 * ENVS
        assert (batch["obs"][0] == 0).all()
        assert len(set(batch["episode_id"][0].tolist())) == ENVS
        assert torch.equal(batch["next_obs"], batch["obs"] + 1)


def test_a_vector_env_that_always_fails_ends_the_run():
    class Failing(Counter):
        def step(self, actions):
            raise RuntimeError("the simulator has failed")

    made = collector(Failing)
    with made.env_manager, pytest.raises(EnvCrashed, match="the simulator has failed"):
        made.collect(ENVS)


def test_successes_are_counted():
    class Goals(Counter):
        def step(self, actions):
            *step, info = super().step(actions)
            reached = torch.arange(self.num_envs) % 2 == 0
            return *step, {**info, "final_info": {"is_success": reached}}

    made = collector(Goals)
    with made.env_manager:
        made.collect(20 * ENVS)
    assert len(made.episode_successes) == made.env_episode
    assert set(made.episode_successes) == {0.0, 1.0}


def test_masks_and_infos_are_columns():
    class Masked(Counter):
        def marks(self):
            allowed = torch.ones(self.num_envs, 2, dtype=torch.bool)
            allowed[:, 1] = self.state[:, 0] % 2 == 0
            return {"action_mask": allowed, "phase": self.state[:, 0].clone()}

        def reset(self, **options):
            obs, _ = super().reset(**options)
            return obs, self.marks()

        def step(self, actions):
            *step, info = super().step(actions)
            return *step, {**info, **self.marks()}

    class Informed(DQNPolicy):
        act_inputs = ("action_mask", "info.phase")

        def act_collect(self, obs, env_id, *, info=None, **kwargs):
            assert torch.equal(info["phase"], obs[:, 0])
            return super().act_collect(obs, env_id, **kwargs)

        def act_eval(self, obs, env_id, *, info=None, **kwargs):
            return super().act_eval(obs, env_id, **kwargs)

    made = collector(Masked, Informed)
    with made.env_manager:
        batch = made.collect(20 * ENVS, policy_kwargs={"eps": 1.0})
    odd = batch["obs"][..., 0] % 2 == 1
    assert torch.equal(batch["action_mask"][..., 1], ~odd)
    assert (batch["action"][odd] == 0).all()
    assert set(batch["action"][~odd].tolist()) == {0, 1}
    inside = ~batch["done"]
    assert torch.equal(batch["next_action_mask"][..., 1][inside], odd[inside])


def test_random_actions_come_from_the_seeded_space():
    first, second = (collector(CartPole, DQNPolicy) for _ in range(2))
    with first.env_manager, second.env_manager:
        ours, theirs = (made.collect(10 * ENVS, random=True)["action"] for made in (first, second))
    assert torch.equal(ours, theirs)
    assert set(ours.flatten().tolist()) == {0, 1}


def test_episodes_can_be_collected_instead():
    made = collector(Counter)
    with made.env_manager:
        made.collect(4 * ENVS)
        episodes = made.collect_episodes(ENVS)
    assert sorted(len(episode["done"]) for episode in episodes) == [3 + env for env in range(ENVS)]
