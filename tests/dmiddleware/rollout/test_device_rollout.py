"""Collecting in envs that return tensors, beside collecting in the same envs on the host."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

from dmiddleware.env import AgentSpaces, VectorEnvManager, team_spaces
from dmiddleware.errors import EnvCrashed, EnvProtocolError
from dmiddleware.policy import (
    DDPGPolicy,
    DQNPolicy,
    MAPPOPolicy,
    PPOPolicy,
    QMIXPolicy,
    RecurrentMAPPOPolicy,
    RecurrentPPOPolicy,
)
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


class Team(Counter):
    """Two agents see the count, and the second one earns twice as much; it leaves at 2."""

    single_observation_space, single_action_space = team_spaces(
        AgentSpaces(2, spaces.Box(0.0, np.inf, (1,)), spaces.Discrete(2), None)
    )

    def advance(self, state, action):
        assert action.shape == (self.num_envs, 2)
        following, reward, terminated = super().advance(state, action)
        return following, reward.unsqueeze(1) * torch.tensor([1.0, 2.0]), terminated

    def seen(self, state):
        takes_part = torch.cat([torch.ones_like(state), state < 2], dim=1)
        return {
            "agents": state.unsqueeze(2).repeat(1, 2, 1),
            "agent_mask": takes_part.to(torch.int8),
        }


class TeamNextStep(Team, NextStep):
    """One that spends a step on each reset."""


class TeamDisabled(Team, Disabled):
    """One that is reset by mask."""


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
        (Team, MAPPOPolicy, {"obs_norm": True}, {}),
        (Team, RecurrentMAPPOPolicy, {}, {}),
        (TeamDisabled, QMIXPolicy, {}, {"eps": 0.5}),
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


def test_a_team_that_spends_steps_on_resets_loses_no_row_and_remembers():
    made = collector(TeamNextStep, RecurrentMAPPOPolicy)
    with made.env_manager:
        for n_steps in (7, 20):
            batch = made.collect(n_steps * ENVS)
            agents, following = batch["obs"]["agents"], batch["next_obs"]["agents"]
            assert torch.equal(following, agents + 1)
            expected = 0.5 * following[..., 0] * torch.tensor([1.0, 2.0])
            assert torch.equal(batch["reward"], expected)
            goes_on = ~batch["done"][:-1]
            assert torch.equal(batch["prev_action"][1:][goes_on], batch["action"][:-1][goes_on])
            assert torch.equal(batch["is_first"], agents[:, :, 0, 0] == 0)
        # The mean of both agents' returns.
        assert made.episode_returns == [
            0.75 * length * (length + 1) / 2 for length in made.episode_lengths
        ]


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


@pytest.mark.parametrize(
    ("env", "kind"),
    [
        *itertools.product([CartPole, NextStep], [PPOPolicy, RecurrentPPOPolicy]),
        (TeamNextStep, RecurrentMAPPOPolicy),
    ],
)
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


def test_a_vector_env_that_fails_loses_its_unfinished_episodes_and_goes_on():
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
        # Of its four steps, worlds 0 and 1 have finished episodes of three and four.
        assert made.dropped_steps == 4 * ENVS - 3 - 4
        assert made.env_step == 8 * ENVS
        assert (batch["obs"][0] == 0).all()
        assert len(set(batch["episode_id"][0].tolist())) == ENVS
        assert torch.equal(batch["next_obs"], batch["obs"] + 1)


@pytest.mark.parametrize("base", [Counter, NextStep, Disabled])
@pytest.mark.parametrize("n_steps", [1, 4, 9])
def test_failures_cost_and_count_as_much_as_on_the_host(monkeypatch, base, n_steps):
    class Failing(base):
        steps = 0

        def step(self, actions):
            self.steps += 1
            if self.steps == 10:
                raise RuntimeError("the simulator has failed")
            return super().step(actions)

    device, host = collector(Failing), on_the_host(monkeypatch, collector(Failing))
    costs = []
    for made in (device, host):
        with made.env_manager as envs:
            for _ in range(72 // n_steps):
                batch = made.collect(n_steps * ENVS)
                assert torch.equal(batch["next_obs"], batch["obs"] + 1)
                lengths = 3 + torch.arange(ENVS).expand(n_steps, -1)
                if base is not NextStep:  # no lane is filled from another one
                    assert torch.equal(batch["done"], batch["next_obs"][..., 0] >= lengths)
            costs.append((envs.restarts, envs.dropped_steps))
    assert costs[0] == costs[1]
    assert costs[0][0] > 3


def test_envs_that_get_ahead_fill_the_lanes_of_others_and_keep_few_rows_waiting():
    class Uneven(NextStep):
        """World 0 spends every other step on a reset."""

        n_rows = 0

        def advance(self, state, action):
            lengths = torch.tensor([1.0, *[50.0] * (ENVS - 1)])
            self.n_rows += ENVS - int(self.pending.sum())
            following = state + 1
            return following, 0.5 * following[:, 0], following[:, 0] >= lengths

    made, rows = collector(Uneven), []
    with made.env_manager as envs:
        for n_steps in [7, 2] * 40:
            batch = made.collect(n_steps * ENVS)
            in_lane = [set(ids.tolist()) for ids in batch["episode_id"].unbind(1)]
            assert sum(map(len, in_lane)) == len(set.union(*in_lane))
            names = ("episode_id", "obs", "next_obs", "done", "reward")
            columns_of_rows = [batch[name].flatten().tolist() for name in names]
            rows += zip(*columns_of_rows, strict=True)
            assert made.episode_returns == [
                0.25 * length * (length + 1) for length in made.episode_lengths
            ]
            assert set(made.episode_lengths) <= {1, 50}
        assert made.waiting_steps < ENVS * (2 * 7 + 64 + 14)
        (n_rows,) = envs.get_attr("n_rows")[:1]
        assert len(rows) + made.waiting_steps == n_rows
        assert made.env_step == len(rows)
    episodes = {row[0]: [other[1:] for other in rows if other[0] == row[0]] for row in rows}
    for episode in episodes.values():
        seen = [obs for obs, *_ in episode]
        assert seen == [seen[0] + step for step in range(len(seen))]
        assert not any(done for _, _, done, _ in episode[:-1])
    assert any(episode[0][0] > 0 for episode in episodes.values())  # one was split


def test_steps_on_resets_that_all_envs_make_together_leave_nothing_behind():
    class Even(NextStep):
        def advance(self, state, action):
            following = state + 1
            return following, following[:, 0], following[:, 0] >= 2

    made = collector(Even)
    with made.env_manager:
        for _ in range(5):
            made.collect(3 * ENVS)
        state = made.state_dict()["on_device"]
    assert not state["columns"] and len(state["valid"]) == 0


def test_rows_that_wait_have_the_iteration_in_which_the_policy_acted():
    made = collector(NextStep)
    with made.env_manager:
        made.collect(12 * ENVS, train_iter=1)
        n_waiting = made.waiting_steps
        later = made.collect(12 * ENVS, train_iter=2)
    assert 0 < int((later["collect_iter"] == 1).sum()) == n_waiting


@pytest.mark.parametrize(
    ("dtype", "of_space"),
    [
        (torch.bfloat16, np.float32),
        (torch.float64, np.float32),
        (torch.int64, np.float32),
        (torch.bool, np.float32),
        (torch.float32, np.float16),
        (torch.float32, np.float64),
    ],
)
@pytest.mark.parametrize("base", [Counter, NextStep, Disabled])
def test_numbers_for_a_space_of_floats_get_its_dtype(base, dtype, of_space):
    class Env(base):
        single_observation_space = spaces.Box(0.0, np.inf, (1,), of_space)

        def seen(self, state):
            return super().seen(state).to(dtype)

    made = collector(Env)
    with made.env_manager:
        batch = made.collect(4 * ENVS)
        expected = torch.as_tensor(np.zeros(1, of_space)).dtype
        assert batch["obs"].dtype == batch["next_obs"].dtype == expected
        made.load_state_dict(made.state_dict())
        assert made.collect(ENVS)["obs"].dtype == expected


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


def pair(monkeypatch, env, policy: Any = PPOPolicy, **options: Any) -> list[RolloutCollector]:
    """Return a collector on the device, and one on the host."""
    return [
        collector(env, policy, **options),
        on_the_host(monkeypatch, collector(env, policy, **options)),
    ]


def assert_same_rows(pair: list[RolloutCollector], **options: Any) -> None:
    ours, theirs = (columns(item.collect(11 * ENVS, **options)) for item in pair)
    assert set(ours) == set(theirs)
    for name in set(ours) - {"episode_id"}:
        assert torch.equal(ours[name], theirs[name]), name


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.float32])
@pytest.mark.parametrize("base", [Counter, Disabled])
def test_flags_may_be_numbers(monkeypatch, base, dtype):
    class Flags(base):
        def step(self, actions):
            obs, reward, terminated, truncated, info = super().step(actions)
            return obs, reward, terminated.to(dtype), truncated.to(dtype), info

    assert_same_rows(pair(monkeypatch, Flags, RecurrentPPOPolicy))


@pytest.mark.parametrize(
    ("space", "kind"),
    [
        (spaces.Dict({"x": spaces.Discrete(2), "y": spaces.Box(-1, 1, (2,))}), dict),
        (spaces.Tuple((spaces.Discrete(2), spaces.Box(-1, 1, (2,)))), tuple),
        (spaces.Discrete(3, dtype=np.int32), torch.int32),
        (spaces.Discrete(3, start=5), torch.int64),
    ],
)
def test_an_env_gets_actions_of_the_form_and_dtype_of_its_space(monkeypatch, space, kind):
    kinds = []

    class Env(Counter):
        single_action_space = space

        def step(self, actions):
            is_tensor = isinstance(actions, torch.Tensor)
            kinds.append(actions.dtype if is_tensor else type(actions))
            return super().step(torch.zeros(self.num_envs))

    assert_same_rows(pair(monkeypatch, Env))
    assert set(kinds) == {kind}


@pytest.mark.parametrize("last", [None, "shape", "array"])
def test_final_observations_that_do_not_fit_are_no_crash_of_the_env(monkeypatch, last):
    class Env(Counter):
        def step(self, actions):
            *step, info = super().step(actions)
            final = info["final_obs"]
            wrong = {None: None, "shape": final[:, 0], "array": final.numpy()}
            return *step, {**info, "final_obs": wrong[last]}

    for made in pair(monkeypatch, Env):
        with pytest.raises(EnvProtocolError, match="final_obs"):
            made.collect(11 * ENVS)


def test_final_observations_get_the_dtype_of_the_others(monkeypatch):
    class Env(Counter):
        def step(self, actions):
            *step, info = super().step(actions)
            return *step, {**info, "final_obs": info["final_obs"].double()}

    assert_same_rows(pair(monkeypatch, Env))


class Masked:
    """Allows one of two actions, by the parity of the count."""

    def mask(self, state):
        return torch.nn.functional.one_hot(state[:, 0].long() % 2, 2).bool()

    def reset(self, **options):
        obs, info = super().reset(**options)
        return obs, {**info, "action_mask": self.mask(obs)}

    def step(self, actions):
        obs, *step, info = super().step(actions)
        info = {**info, "action_mask": self.mask(obs)}
        if "final_obs" in info:
            info["final_info"] = {"action_mask": self.mask(info["final_obs"])}
        return obs, *step, info


@pytest.mark.parametrize("base", [Counter, NextStep, Disabled])
def test_masks_in_infos_are_those_of_the_state_acted_on_and_of_its_successor(base):
    class Env(Masked, base):
        pass

    with (made := collector(Env, DQNPolicy)).env_manager:
        for random in (True, False):
            rows = columns(made.collect(22 * ENVS, policy_kwargs={"eps": 0.5}, random=random))
            assert torch.equal(rows["action_mask"], one_hot_parity(rows["obs"]))
            assert torch.equal(rows["next_action_mask"], one_hot_parity(rows["next_obs"]))
            assert rows["action_mask"].gather(-1, rows["action"].unsqueeze(-1)).all()


def one_hot_parity(obs: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.one_hot(obs[..., 0].long() % 2, 2).bool()


def test_masks_that_begin_after_the_reset_are_refused():
    class Env(Masked, Counter):
        def reset(self, **options):
            return super().reset(**options)[0], {}

    with pytest.raises(EnvProtocolError, match="action_mask"):
        collector(Env, DQNPolicy).collect(ENVS, policy_kwargs={"eps": 0.5})


def test_a_return_that_the_env_reports_takes_precedence(monkeypatch):
    class Env(Counter):
        def step(self, actions):
            *step, info = super().step(actions)
            return *step, {**info, "eval_episode_return": 100 + self._n_steps}

    ours, theirs = pair(monkeypatch, Env)
    for made in (ours, theirs):
        made.collect(11 * ENVS)
    assert sorted(ours.episode_returns) == sorted(theirs.episode_returns)
    assert ours.episode_returns[0] >= 100


def test_failures_between_which_episodes_end_are_not_counted_as_a_row_of_them():
    calls = []

    class Env(Counter):
        def step(self, actions):
            calls.append(actions)
            if len(calls) % 30 == 0:
                raise RuntimeError(f"failure {len(calls)}")
            return super().step(actions)

    made = collector(Env)
    for _ in range(20):
        made.collect(10 * ENVS)
    assert made.env_manager.failures.restarts > 3


@pytest.mark.parametrize("env", [Counter, NextStep, Disabled])
@pytest.mark.parametrize("is_old", [False, True])
def test_rows_that_began_on_the_host_are_continued_there(monkeypatch, env, is_old):
    saved, host = (on_the_host(monkeypatch, collector(env, RecurrentPPOPolicy)) for _ in "ab")
    for made in (saved, host):
        made.collect(5 * ENVS)
    state = saved.state_dict()
    if is_old:
        del state["on_device"]
    restored = collector(env, RecurrentPPOPolicy)
    assert restored.load_state_dict(state)
    ours, theirs = (columns(made.collect(9 * ENVS)) for made in (restored, host))
    assert torch.equal(ours["obs"], theirs["obs"])
    assert sorted(restored.episode_returns) == sorted(host.episode_returns)


def test_episodes_collected_one_by_one_are_continued_after_a_restart():
    saved = collector(Counter)
    saved.collect_episodes(3)
    restored = collector(Counter)
    assert restored.load_state_dict(saved.state_dict())
    assert [len(rows["done"]) for rows in restored.collect_episodes(ENVS)] == [
        len(rows["done"]) for rows in saved.collect_episodes(ENVS)
    ]


@pytest.mark.parametrize("policy", [PPOPolicy, RecurrentPPOPolicy])
def test_rows_that_began_on_a_device_are_dropped_where_there_is_none(monkeypatch, policy):
    saved = collector(NextStep, policy)
    saved.collect(5 * ENVS)
    restored = collector(NextStep, policy)
    monkeypatch.setattr(DeviceRollout, "of", lambda *_: None)
    assert not restored.load_state_dict(saved.state_dict())
    assert restored.dropped_steps == saved.waiting_steps > 0
    assert (restored.collect(ENVS)["obs"][0] == 0).all()
    assert restored.episode_lengths == []


@pytest.mark.parametrize("changed", [{}, {"policy": True}])
def test_waiting_rows_are_counted_when_a_reset_drops_them(changed):
    made = collector(NextStep)
    made.collect(5 * ENVS)
    waiting = made.waiting_steps
    made.reset(**{name: PPOPolicy.for_env(made.env_manager) for name in changed})
    assert made.dropped_steps == waiting > 0


class Choices(Counter):
    single_observation_space = spaces.MultiDiscrete([50, 50])

    def seen(self, state):
        return state.long().expand(-1, 2)


def test_observations_may_be_choices(monkeypatch):
    assert_same_rows(pair(monkeypatch, Choices))


@pytest.mark.parametrize(
    "space", [spaces.MultiDiscrete([4, 4]), spaces.Tuple([spaces.Discrete(4)])]
)
def test_a_choice_that_is_not_in_its_space_is_named_with_its_env(space):
    class Env(Choices):
        single_observation_space = space

        def seen(self, state):
            seen = super().seen(state)
            return (seen[:, 0],) if isinstance(space, spaces.Tuple) else seen

    with pytest.raises(EnvProtocolError, match=r"env 2 .*4.*not in"):
        collector(Env).collect(11 * ENVS)


@pytest.mark.parametrize("base", [Counter, Disabled])
def test_masks_in_infos_are_restored(base):
    class Env(Masked, base):
        pass

    saved, restored = collector(Env, DQNPolicy), collector(Env, DQNPolicy)
    saved.collect(7 * ENVS, policy_kwargs={"eps": 0.5})
    assert restored.load_state_dict(saved.state_dict())
    rows = columns(restored.collect(5 * ENVS, policy_kwargs={"eps": 0.5}))
    assert torch.equal(rows["action_mask"], one_hot_parity(rows["obs"]))
