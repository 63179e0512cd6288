"""IPPO and MAPPO with a memory of each agent."""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from dmiddleware.data import Batch, as_tree, cat, index_rows, minibatches
from dmiddleware.env import AgentSpaces, make_env_manager, team_spaces
from dmiddleware.errors import ConfigError, PolicyError, StructureError
from dmiddleware.policy import RecurrentIPPOPolicy, RecurrentMAPPOPolicy, RecurrentPPOPolicy
from dmiddleware.rollout import ActingPolicy, RolloutCollector, evaluate_episodes
from dmiddleware.settings import plain_values
from dmiddleware.zoo.envs import TeamRecall
from middleware.advantage import AdvantageEstimator
from tests.dmiddleware.team_envs import CountingTeam

SMALL = {"hidden_size": 8, "encoder_hidden_sizes": [8], "head_hidden_sizes": [8]}
BOTH = pytest.mark.parametrize("cls", [RecurrentIPPOPolicy, RecurrentMAPPOPolicy])


def made(cls: Any, env: Any = None, **options: Any) -> Any:
    return cls.for_env(env or CountingTeam(), **{"seed": 0, "model": SMALL, **options})


def collected(policy: Any, make: Any = CountingTeam, **options: Any) -> Batch:
    """Return lanes ``[14, 2, …]`` of two calls; episodes have five steps."""
    with make_env_manager(partial(make, **options), env_num=2, seed=0) as envs:
        collector = RolloutCollector(policy, envs)
        return cat([collector.collect(14), collector.collect(14)])


def with_targets(rows: Batch) -> Batch:
    """Return the rows with random advantages and returns."""
    adv, ret = torch.randn(2, *rows["value"].shape, generator=torch.Generator().manual_seed(0))
    return as_tree({**dict(rows.items()), "adv": adv, "ret": ret})


def run(policy: Any, rows: Batch) -> dict[str, torch.Tensor]:
    """Run the model over lanes, from the state before their first row."""
    previous = policy.codec.to_raw(rows["prev_action"])
    seen = {"is_first": rows["is_first"], "prev_action": previous}
    output: dict[str, torch.Tensor] = policy.model(rows["obs"], rows["state"][0], **seen)
    return output


@BOTH
@pytest.mark.parametrize("core", ["lstm", "gru"])
def test_running_lanes_again_gives_what_acting_gave_step_by_step(cls: Any, core: Any) -> None:
    policy = made(cls, model={**SMALL, "core": core})
    rows = collected(policy, leaves={1: 2})
    assert rows["state"].shape == (14, 2, 3, 8 * (1 + (core == "lstm")))
    assert rows["prev_action"].shape == (14, 2, 3)
    assert (rows["state"][rows["is_first"]] == 0).all()
    assert rows["done"].sum() == 4
    for first in (0, 7, 8):
        part = index_rows(rows, slice(first, None))
        again = run(policy, part)
        for name in ("logit", "value"):
            torch.testing.assert_close(again[name], part[name], rtol=1e-4, atol=1e-5)


def test_gradients_flow_back_to_the_start_of_the_episode_and_to_no_other_agent() -> None:
    policy = made(RecurrentIPPOPolicy)
    rows = collected(policy)
    agents = rows["obs"]["agents"].requires_grad_()
    logit = run(policy, rows)["logit"]
    # The second episode of the lane has the rows 5 to 9.
    (gradient,) = torch.autograd.grad(logit[8, 0, 1].sum(), agents)
    depends = (gradient != 0).any(-1)
    assert depends[5:9, 0, 1].all()
    assert depends.sum() == 4


class Alone(gym.Env[Any, Any]):
    """The only agent of a team, which sees its number, too."""

    def __init__(self) -> None:
        self.team = CountingTeam(n_agent=1)
        self.observation_space = gym.spaces.Dict({"actor": gym.spaces.Box(0, 100, (3,))})
        self.action_space = gym.spaces.Discrete(3)

    def seen(self, obs: Any) -> Any:
        return {"actor": np.append(obs["agents"][0], np.float32(1.0))}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        obs, info = self.team.reset(seed=seed)
        return self.seen(obs), info

    def step(self, action: Any) -> Any:
        obs, reward, terminated, truncated, _ = self.team.step(np.array([action]))
        return self.seen(obs), float(reward[0]), terminated, truncated, {}


def test_a_team_of_one_agent_learns_as_recurrent_ppo_does() -> None:
    options: Any = {"adv_norm": False, "learning_rate": 0.02, "value_norm": True}
    team = made(RecurrentIPPOPolicy, CountingTeam(n_agent=1), **options)
    alone = made(RecurrentPPOPolicy, Alone(), **options, model={**SMALL, "prev_reward": False})
    alone.load_weights(team.model.agent.state_dict())
    of_team, of_one = collected(team, n_agent=1), collected(alone, Alone)
    for name in ("action", "prev_action", "log_prob", "value", "reward", "state"):
        assert torch.equal(of_team[name].squeeze(2), of_one[name]), name
    for policy, rows in ((team, of_team), (alone, of_one)):
        rows = AdvantageEstimator(policy.learn_mode, user="the test")(rows)
        for _ in range(3):
            policy.learn_mode.forward(rows)
    for name, weight in alone.model.state_dict().items():
        torch.testing.assert_close(team.model.agent.state_dict()[name], weight)


@BOTH
def test_the_loss_is_that_of_lanes_over_all_agents_that_take_part(cls: Any) -> None:
    policy = made(cls, entropy_weight=0.03, learning_rate=0.02, value_norm=False)
    rows = with_targets(index_rows(collected(policy, leaves={1: 2}), slice(3, None)))
    policy.learn_mode.forward(rows)  # so that ratios differ from 1
    here = rows["obs"]["agent_mask"] != 0
    assert 0 < here.sum() < here.numel()
    output = run(policy, rows)
    distribution = torch.distributions.Categorical(logits=output["logit"][here])
    ratio = (distribution.log_prob(rows["action"][here]) - rows["log_prob"][here]).exp()
    adv = rows["adv"][here]
    adv = (adv - adv.mean()) / (adv.std(correction=0) + 1e-8)
    policy_loss = -torch.minimum(ratio * adv, ratio.clamp(0.8, 1.2) * adv).mean()
    value_loss = 0.5 * (output["value"] - rows["ret"])[here].square().mean()
    answer = policy.learn_mode.forward(rows)
    assert answer["policy_loss"] == pytest.approx(policy_loss.item(), abs=1e-5)
    assert answer["value_loss"] == pytest.approx(value_loss.item(), rel=1e-4)
    assert answer["entropy"] == pytest.approx(distribution.entropy().mean().item(), rel=1e-4)


def test_agents_that_do_not_take_part_change_nothing() -> None:
    policies = [made(RecurrentIPPOPolicy) for _ in range(2)]
    rows = with_targets(collected(policies[0], leaves={2: 0}))
    changed = as_tree({name: column.clone() for name, column in rows.items()})
    for name in ("adv", "ret", "log_prob"):
        changed[name][:, :, 2] += 1.0
    first, second = (
        policy.learn_mode.forward(data)
        for policy, data in zip(policies, (rows, changed), strict=True)
    )
    for name, value in first.items():
        assert second[name] == pytest.approx(value, abs=1e-6), name
    states = [policy.learn_mode.state_dict()["model"] for policy in policies]
    for name, tensor in states[0].items():
        torch.testing.assert_close(tensor, states[1][name])


@BOTH
def test_the_value_of_a_successor_continues_from_the_states_of_its_row(cls: Any) -> None:
    policy = made(cls)
    rows = collected(policy)
    lane = index_rows(rows, (slice(None), 0))
    value = policy.value_fn(lane["next_obs"], rows=lane)
    follows = ~lane["done"][:-1]
    torch.testing.assert_close(value[:-1][follows], lane["value"][1:][follows])
    # Where an episode ends, the next row starts another one.
    assert not torch.isclose(value[:-1][~follows], lane["value"][1:][~follows]).any()


@BOTH
def test_acting_remembers_and_needs_no_state_of_the_team(cls: Any) -> None:
    policy = made(cls)
    rows = collected(policy)
    act, memory, previous = ActingPolicy(policy), policy.initial_state(1), torch.zeros(1, 3).long()
    for t in range(5):
        obs = index_rows(rows["obs"], (t, slice(0, 1)))
        inputs = {"is_first": torch.tensor([t == 0]), "prev_action": previous, "state": memory}
        output = policy.eval_mode.forward(obs, **inputs)
        memory, previous = output["state"], output["action"]
        seen = {name: obs[name][0].numpy() for name in ("agents", "agent_mask")}
        assert act(seen).tolist() == previous[0].tolist()


class Boxes(CountingTeam):
    """Agents with continuous actions."""

    def __init__(self) -> None:
        super().__init__()
        high = np.tile(np.array([1.0, 2.0], np.float32), (3, 1))
        self.action_space = gym.spaces.Box(-high, high)


@BOTH
def test_each_agent_sees_its_own_previous_action_raw(cls: Any) -> None:
    policy = made(cls, Boxes(), model={**SMALL, "log_std_init": 0.5})
    with make_env_manager(Boxes, env_num=2, seed=0) as envs:
        rows = RolloutCollector(policy, envs).collect(14)
        assert evaluate_episodes(policy, envs, 2).get_episode_return() == [30.0] * 2
    goes_on = ~rows["done"][:-1]
    before, action = rows["prev_action"], rows["action"]
    assert action.shape == (7, 2, 3, 2)
    assert torch.equal(before[1:][goes_on], action[:-1][goes_on])
    assert (before[rows["is_first"]] == 0).all()
    seen: list[torch.Tensor] = []
    core = policy.model.agent.core
    core.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    row = index_rows(rows, 3)
    inputs = {name: row[name] for name in ("state", *policy.act_inputs)}
    policy.collect_mode.forward(row["obs"], **inputs)
    torch.testing.assert_close(seen[0][0, ..., 8:], row["prev_action"] / torch.tensor([1.0, 2.0]))


class FromSeven(CountingTeam):
    """Agents whose actions are 7, 8 and 9."""

    def __init__(self) -> None:
        super().__init__()
        agent = AgentSpaces(
            3, gym.spaces.Box(0, 100, (2,)), gym.spaces.Discrete(3, start=7), gym.spaces.Box(0, 9)
        )
        self.observation_space["state"] = gym.spaces.Box(0, 100, (1,))
        self.action_space = team_spaces(agent)[1]


def test_actions_that_do_not_count_from_zero_are_remembered() -> None:
    policy = made(RecurrentMAPPOPolicy, FromSeven())
    rows = collected(policy, FromSeven)
    assert rows["prev_action"].min() == 7
    torch.testing.assert_close(run(policy, rows)["logit"], rows["logit"], rtol=1e-4, atol=1e-5)


@BOTH
def test_masks_of_each_agent_are_respected_and_not_stored_twice(cls: Any) -> None:
    policy = made(cls, CountingTeam(masked=True))
    rows = collected(policy, masked=True)
    assert (rows["action"] == torch.arange(3)).all()
    assert "action_mask" in rows["obs"]
    assert "action_mask" not in rows


def test_what_a_team_with_memories_cannot_do_is_refused_at_once() -> None:
    with pytest.raises(PolicyError, match=r"does not see prev_reward.*prev_reward=False"):
        made(RecurrentMAPPOPolicy, model={**SMALL, "prev_reward": True})
    with pytest.raises(ConfigError, match="use value_norm"):
        made(RecurrentMAPPOPolicy, reward_norm=True)
    with pytest.raises(ConfigError, match="recompute_advantage"):
        made(RecurrentMAPPOPolicy, recompute_advantage=True)
    policy = made(RecurrentMAPPOPolicy)
    with pytest.raises(ConfigError, match=r"previous actions.*for_env"):
        ActingPolicy(RecurrentMAPPOPolicy(plain_values(policy.cfg)))
    with pytest.raises(StructureError, match="lanes"):
        policy.learn_mode.forward(index_rows(with_targets(collected(policy)), 0))


@pytest.mark.learning
def test_agents_recall_cues_that_no_team_without_memories_can_recall() -> None:
    make, order = partial(TeamRecall, n_cues=3, delay=1), torch.Generator().manual_seed(0)
    with make_env_manager(make, env_num=16, seed=0) as envs:
        policy = RecurrentMAPPOPolicy.for_env(
            envs,
            seed=0,
            model={"core": "gru", "hidden_size": 32},
            discount=0.9,
            learning_rate=5e-3,
            entropy_weight=0.01,
        )
        collector = RolloutCollector(policy, envs)
        estimate = AdvantageEstimator(policy.learn_mode, user="the test")
        for _ in range(15):
            rows = estimate(collector.collect(16 * 24))
            for _ in range(4):
                for batch in minibatches(rows, 4, unit="lanes", generator=order):
                    policy.learn_mode.forward(batch)
        returns = evaluate_episodes(policy, envs, 64).get_episode_return()
    assert np.mean(returns) > 0.8  # a third without memories
