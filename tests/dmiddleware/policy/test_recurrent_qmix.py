"""QMIX whose agents have a memory each."""

from __future__ import annotations

import copy
import functools
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from dmiddleware.data import PrioritySampler, TensorBuffer, as_tree
from dmiddleware.env import AgentSpaces, make_env_manager, team_spaces
from dmiddleware.errors import PolicyError, SpaceError, StructureError
from dmiddleware.model import RecurrentQNetwork
from dmiddleware.policy import QMIXPolicy, R2D2Policy, RecurrentQMIXPolicy
from dmiddleware.rl import rescale_value, unscale_value
from dmiddleware.rollout import RolloutCollector, evaluate_episodes
from dmiddleware.zoo.envs import TeamRecall
from tests.dmiddleware.team_envs import CountingTeam
from tests.variants import mostly_slow

SMALL: Any = {
    "hidden_size": 8,
    "encoder_hidden_sizes": [8],
    "head_hidden_sizes": [8],
    "mixing_size": 4,
}
BURN_IN, UNROLL_LEN, DISCOUNT = 3, 6, 0.9


class Shifts(gym.Env[dict[str, Any], Any]):
    """Agents see random numbers, masks forbid some actions, and all but the first may leave.

    An episode has 2 to 12 steps and is terminated or truncated.
    """

    def __init__(self, n_agent: int = 3, has_masks: bool = True) -> None:
        box, state = gym.spaces.Box(-2.0, 2.0, (2,)), gym.spaces.Box(-2.0, 2.0, (4,))
        spaces = AgentSpaces(n_agent, box, gym.spaces.Discrete(3), state)
        self.observation_space, self.action_space = team_spaces(spaces, has_action_masks=has_masks)
        self.n_agent, self.has_masks = n_agent, has_masks

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.t, self.length = 0, int(self.np_random.integers(2, 13))
        self.leaves_at = self.np_random.integers(1, 13, self.n_agent)
        self.leaves_at[0] = 99
        return self._obs(), {}

    def step(self, action: Any) -> Any:
        present = self._present()
        if self.has_masks:
            assert self.allowed[present, action[present]].all()
        self.t += 1
        reward = present * self.np_random.uniform(-1.0, 1.0, self.n_agent)
        is_over, is_truncated = self.t == self.length, self.length % 2 == 0
        return self._obs(), reward, is_over and not is_truncated, is_over and is_truncated, {}

    def _present(self) -> Any:
        return self.t < self.leaves_at

    def _obs(self) -> dict[str, Any]:
        present = self._present()
        agents = self.np_random.uniform(-1.0, 1.0, (self.n_agent, 2)).astype(np.float32)
        obs = {
            "agents": agents * present[:, None],
            "agent_mask": present.astype(np.int8),
            "state": self.np_random.uniform(-1.0, 1.0, 4).astype(np.float32),
        }
        if self.has_masks:
            self.allowed = self.np_random.random((self.n_agent, 3)) < 0.6
            self.allowed[:, 1] |= ~self.allowed.any(-1)
            self.allowed |= ~present[:, None]
            obs["action_mask"] = self.allowed.astype(np.int8)
        return obs


def made(**options: Any) -> RecurrentQMIXPolicy:
    options = {"seed": 0, "model": SMALL, "burn_in": BURN_IN, "discount": DISCOUNT, **options}
    return RecurrentQMIXPolicy.for_env(Shifts(), **options)


def drawn(policy: Any, n: int = 12, env: Any = Shifts, device: str | None = None) -> Any:
    """Return sequences from a buffer of what a policy collected, on the host or on a device."""
    buffer = TensorBuffer(
        600,
        sampler=PrioritySampler(alpha=0.9, beta=0.6),
        unroll_len=UNROLL_LEN,
        stride=3,
        burn_in=policy.burn_in,
        start_columns=("state",),
        store_next_obs=device is not None,
        device=device,
        seed=0,
    )
    with make_env_manager(env, env_num=3, seed=0, max_retry=0) as envs:
        collector = RolloutCollector(policy, envs)
        for _ in range(4):
            buffer.push(collector.collect(60, policy_kwargs={"eps": 0.5}))
    return buffer.sample(n)


def differ(policy: Any) -> None:
    """Make the target network another one than the online network."""
    generator = torch.Generator().manual_seed(1)
    for parameter in policy.components["q"].target.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)


def q_by_hand(network: Any, batch: Any, b: int, length: int) -> torch.Tensor:
    """Return ``[length + 1, A, n]``: the values of one agent after the other, step by step."""
    agents = batch["obs"]["agents"].shape[2]
    values = torch.zeros(length + 1, agents, 3)
    for agent in range(agents):
        state = batch["state"][b, agent].unsqueeze(0)
        for t in range(length + 1):
            if t == 0:
                obs, before = batch["obs"]["agents"][0, b], batch["prev_action"][0, b]
                is_first = batch["is_first"][0, b]
            else:
                obs = batch["next_obs"]["agents"][t - 1, b]
                before, is_first = batch["action"][t - 1, b], torch.tensor(False)
            seen = torch.cat([obs[agent], torch.eye(agents)[agent]]).unsqueeze(0)
            output = network.agent(
                seen,
                state,
                prev_action=before[agent].unsqueeze(0),
                is_first=is_first.unsqueeze(0),
            )
            state = output["state"]
            values[t, agent] = output["logit"][0]
    return values


def mixed_by_hand(network: Any, q: torch.Tensor, obs: Any) -> torch.Tensor:
    """Return the team's value of the agents' values ``[A]`` (Rashid et al., figure 2)."""
    q = torch.where(obs["agent_mask"] != 0, q, 0.0)
    weight = network.weight(obs["state"]).abs().view(len(q), -1)
    hidden = F.elu(q @ weight + network.bias(obs["state"]))
    last = network.last_weight(obs["state"]).abs()
    return hidden @ last + network.last_bias(obs["state"])[0]


def row(columns: Any, t: int, b: int) -> Any:
    return {key: columns[key][t, b] for key in columns}


@torch.no_grad()
def td_errors_by_hand(
    policy: Any, batch: Any, *, n_step: int, double: bool, rescaled: bool
) -> torch.Tensor:
    """Return ``[L, B]``, row for row."""
    part = policy.components["q"]
    h, inverse = (rescale_value, unscale_value) if rescaled else (lambda x: x, lambda x: x)
    errors = torch.zeros(UNROLL_LEN, batch["mask"].shape[1])
    for b in range(batch["mask"].shape[1]):
        length = int(batch["mask"][:, b].sum())
        online, target = (q_by_hand(net, batch, b, length) for net in (part.module, part.target))
        for t in range(BURN_IN, length):
            total, end = torch.tensor(0.0), min(t + n_step, length)
            for k in range(t, end):
                total += DISCOUNT ** (k - t) * batch["reward"][k, b].mean()
            if not batch["terminated"][end - 1, b]:
                after = row(batch["next_obs"], end - 1, b)
                judge = (online if double else target)[end].clone()
                judge[after["action_mask"] == 0] = -torch.inf
                best = target[end].gather(1, judge.argmax(1, keepdim=True)).squeeze(1)
                value = mixed_by_hand(part.target, best, after)
                total += DISCOUNT ** (end - t) * inverse(value)
            q = online[t].gather(1, batch["action"][t, b].unsqueeze(1)).squeeze(1)
            value = mixed_by_hand(part.module, q, row(batch["obs"], t, b))
            errors[t - BURN_IN, b] = h(total) - value
    return errors


@pytest.mark.parametrize(
    ("n_step", "double", "rescaled", "device"),
    mostly_slow(
        [
            (1, True, False, None),
            (3, False, True, "cpu"),
            (3, True, False, None),
            (1, False, False, None),
        ],
        keep=2,
    ),
)
def test_the_loss_and_the_priorities_are_those_of_single_agents_that_remember(
    n_step: int, double: bool, rescaled: bool, device: str | None
) -> None:
    policy = made(n_step=n_step, double=double, value_rescaling=rescaled)
    batch = drawn(policy, device=device)
    differ(policy)
    mask = batch["mask"][BURN_IN:]
    assert not mask.all()
    assert batch["terminated"].any() and (batch["done"] & ~batch["terminated"]).any()
    assert (batch["obs"]["agent_mask"][BURN_IN:][mask] == 0).any()
    errors = td_errors_by_hand(policy, batch, n_step=n_step, double=double, rescaled=rescaled)
    output = policy.learn_mode.forward(batch)
    expected = (errors.square() * mask * batch["weight"]).mean()
    assert output["total_loss"] == pytest.approx(expected.item(), rel=1e-4)
    size = errors.abs()
    priority = 0.9 * size.amax(0) + 0.1 * size.sum(0) / mask.sum(0)
    torch.testing.assert_close(output["priority"], priority, rtol=1e-4, atol=1e-5)


def test_padding_does_not_matter() -> None:
    policy, twin = made(), made()
    batch, same = drawn(policy), drawn(twin)
    padding = ~same["mask"]
    assert padding.any()
    same["action"][padding] = 2 - same["action"][padding]
    same["reward"][padding] = 1e6
    same["obs"]["state"][padding] = 1e3
    outputs = [p.learn_mode.forward(rows) for p, rows in ((policy, batch), (twin, same))]
    assert outputs[0]["total_loss"] == pytest.approx(outputs[1]["total_loss"])


def test_what_an_agent_that_has_left_sees_and_does_is_not_learned_from() -> None:
    policy, twin = made(), made()
    batch, same = drawn(policy), drawn(twin)
    absent = same["obs"]["agent_mask"] == 0
    same["action"][absent] = 2 - same["action"][absent]
    same["obs"]["agents"][absent] = 5.0
    same["next_obs"]["agents"][same["next_obs"]["agent_mask"] == 0] = 5.0
    first, second = (p.learn_mode.forward(rows) for p, rows in ((policy, batch), (twin, same)))
    assert first["total_loss"] == pytest.approx(second["total_loss"], rel=1e-6)


def test_the_burn_in_only_brings_the_states_up_to_date() -> None:
    """An update with burn-in is one without, from the states that the burn-in leads to."""
    policy, twin = made(), made(burn_in=0)
    batch, model = drawn(policy), policy.model
    warm_up = {name: batch[name][:BURN_IN] for name in ("is_first", "prev_action")}
    with torch.no_grad():
        first = {key: column[:BURN_IN] for key, column in batch["obs"].items()}
        state = model(first, batch["state"], **warm_up)["state"]
    assert state.shape == batch["state"].shape == (12, 3, 8)
    whole = ("state", "index", "weight")
    later = {name: batch[name] for name in whole}
    for name in set(batch) - set(whole):
        column = batch[name]
        is_nested = name in ("obs", "next_obs")
        later[name] = (
            {key: part[BURN_IN:] for key, part in column.items()} if is_nested else column[BURN_IN:]
        )
    output = policy.learn_mode.forward(batch)
    same = twin.learn_mode.forward(as_tree({**later, "state": state}))
    assert output["total_loss"] == pytest.approx(same["total_loss"], rel=1e-5)
    for mine, theirs in zip(model.parameters(), twin.model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


class FirstOfTwo(nn.Module):
    """Two agents of one network; the team's value is that of the first."""

    act_inputs = ("is_first", "prev_action")

    def __init__(self) -> None:
        super().__init__()
        options: Any = {"hidden_size": 8, "prev_reward": False}
        self.network = RecurrentQNetwork(2, 3, core="gru", **options)

    def initial_state(self, n: int) -> torch.Tensor:
        return torch.zeros(n, 2, 8)

    def forward(self, obs: Any, state: torch.Tensor, **inputs: Any) -> dict[str, torch.Tensor]:
        output: dict[str, torch.Tensor] = self.network(obs["agents"], state, **inputs)
        return output

    def mix(self, q: torch.Tensor, obs: Any) -> torch.Tensor:
        return q[..., 0]


@pytest.mark.parametrize("burn_in", [0, 2])
def test_a_team_whose_value_is_that_of_one_agent_learns_as_r2d2_does(burn_in: int) -> None:
    def pair() -> Shifts:
        return Shifts(n_agent=2, has_masks=False)

    model = FirstOfTwo()
    settings: Any = {"burn_in": burn_in, "discount": DISCOUNT, "n_step": 2, "grad_clip_norm": 1.0}
    single = R2D2Policy(
        {**settings, "learning_rate": 1e-3, "adam_eps": 1e-8, "value_rescaling": False},
        model=copy.deepcopy(model.network),
    )
    team = RecurrentQMIXPolicy.for_env(pair(), settings, model=model)
    batch = drawn(team, env=pair)
    columns: dict[str, Any] = {name: batch[name] for name in ("terminated", "is_first", "mask")}
    columns |= {name: batch[name]["agents"][..., 0, :] for name in ("obs", "next_obs")}
    columns |= {name: batch[name][..., 0] for name in ("action", "prev_action")}
    columns |= {"reward": batch["reward"].mean(-1), "state": batch["state"][:, 0]}
    columns["weight"] = batch["weight"]
    for _ in range(3):
        ours, theirs = team.learn_mode.forward(batch), single.learn_mode.forward(as_tree(columns))
        torch.testing.assert_close(ours.pop("priority"), theirs.pop("priority"))
        assert ours == pytest.approx(theirs, rel=1e-5)
    for mine, other in zip(model.network.parameters(), single.model.parameters(), strict=True):
        torch.testing.assert_close(mine, other)


@pytest.mark.parametrize("double", [False, True])
def test_masks_hold_for_a_model_that_prefers_what_they_forbid(double: bool) -> None:
    def pair() -> Shifts:
        return Shifts(n_agent=2)

    def tempt(network: nn.Module, args: Any, output: dict[str, torch.Tensor]) -> Any:
        return {**output, "logit": output["logit"] + 1000.0 * (args[0]["action_mask"] == 0)}

    policy = RecurrentQMIXPolicy.for_env(pair(), seed=0, model=FirstOfTwo(), double=double)
    part = policy.components["q"]
    for network in (part.module, part.target):
        network.register_forward_hook(tempt)
    output = policy.learn_mode.forward(drawn(policy, env=pair))
    assert abs(output["target_q_value"]) < 100.0


def test_agents_act_on_their_masks_and_states_and_explore_with_eps() -> None:
    with make_env_manager(Shifts, env_num=4, seed=0, max_retry=0) as envs:
        policy = RecurrentQMIXPolicy.for_env(envs, seed=0, model=SMALL)
        collector = RolloutCollector(policy, envs)
        greedy = collector.collect(80, policy_kwargs={"eps": 0.0})
        collector.collect(80, policy_kwargs={"eps": 1.0})
        evaluate_episodes(policy, envs, 4)
    assert greedy["state"].shape == (20, 4, 3, 8)
    assert greedy["prev_action"].shape == greedy["reward"].shape == (20, 4, 3)
    first = greedy["is_first"]
    assert first.any() and not first.all()
    assert (greedy["state"][first] == 0).all() and (greedy["state"][~first] != 0).any()
    assert not {"action_mask", "prev_reward"}.intersection(greedy)
    seen = {name: greedy[name][9] for name in ("is_first", "prev_action", "state")}
    acted = policy.eval_mode.forward({k: v[9] for k, v in greedy["obs"].items()}, **seen)
    assert torch.equal(acted["action"], greedy["action"][9])


def test_collectors_get_the_agents_network_and_no_mixing_network() -> None:
    policy, collector = made(), made(seed=1)
    state = policy.collect_mode.state_dict()
    assert {name.split(".")[0] for name in state["model"]} == {"agent"}
    collector.collect_mode.load_state_dict(state)
    obs, _ = Shifts().reset(seed=0)
    rows = {name: np.stack([column] * 2) for name, column in obs.items()}
    inputs: Any = {
        "is_first": torch.tensor([True, False]),
        "prev_action": torch.tensor([[0, 1, 2]] * 2),
        "state": torch.ones(2, 3, 8),
    }
    states = [p.collect_mode.forward(rows, **inputs)["state"] for p in (policy, collector)]
    assert torch.equal(*states)


def test_a_batch_without_a_state_of_each_agent_is_refused() -> None:
    policy = made()
    batch = drawn(policy)
    batch["state"] = batch["state"][:, 0]
    with pytest.raises(StructureError, match=r"state \[B, A, S\].*the state 2 dimensions"):
        policy.learn_mode.forward(batch)


def test_what_has_no_memory_or_sees_too_much_is_refused() -> None:
    with pytest.raises(PolicyError, match="prev_reward=False"):
        made(model={**SMALL, "prev_reward": True})
    with pytest.raises(PolicyError, match="recurrent model"):
        RecurrentQMIXPolicy.for_env(Shifts(), model=QMIXPolicy.for_env(Shifts()).model)
    with pytest.raises(SpaceError, match="use DQN or PPO"):
        RecurrentQMIXPolicy.for_env(gym.make("CartPole-v1"))


def test_an_interrupted_run_continues_bit_for_bit() -> None:
    whole, first, second = made(), made(), made(seed=1)
    batch = drawn(whole)
    losses = [whole.learn_mode.forward(batch)["total_loss"] for _ in range(4)]
    for _ in range(2):
        first.learn_mode.forward(batch)
    second.learn_mode.load_state_dict(first.learn_mode.state_dict())
    assert [second.learn_mode.forward(batch)["total_loss"] for _ in range(2)] == losses[2:]


def test_the_returns_of_evaluations_are_means_over_the_agents() -> None:
    with make_env_manager(lambda: CountingTeam(leaves={1: 2}), env_num=2, seed=0) as envs:
        policy = RecurrentQMIXPolicy.for_env(envs, seed=0, model=SMALL)
        monitor = evaluate_episodes(policy, envs, 4)
    assert monitor.get_episode_return() == pytest.approx([(15 + 6 + 45) / 3] * 4)


@pytest.mark.learning
def test_agents_name_the_cues_that_each_of_them_saw_before() -> None:
    """Without memories, the best possible return is 1 / 3; see the environment."""
    make = functools.partial(TeamRecall, n_cues=3, delay=2)
    with make_env_manager(make, env_num=8, seed=0) as envs:
        policy = RecurrentQMIXPolicy.for_env(
            envs,
            seed=0,
            model={"hidden_size": 32},
            discount=0.9,
            learning_rate=5e-3,
            target_update_freq=20,
        )
        buffer = TensorBuffer(
            5000, unroll_len=4, stride=4, burn_in=0, start_columns=("state",), seed=0
        )
        collector = RolloutCollector(policy, envs)
        for step in range(140):
            eps = max(0.1, 1.0 - step / 100)
            buffer.push(collector.collect(32, policy_kwargs={"eps": eps}))
            if step >= 10:
                policy.learn_mode.forward(buffer.sample(32))
        returns = evaluate_episodes(policy, envs, 64).get_episode_return()
    assert np.mean(returns) > 0.8
