"""What a policy sees when it acts: previous action and reward, masks, infos, its own state."""

from __future__ import annotations

import contextlib
import functools
from collections import namedtuple

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import nn

from dmiddleware import classic
from dmiddleware.data import TensorBuffer, as_tree, cat, leaves, load_checkpoint, save_checkpoint
from dmiddleware.env import SyncEnvManager, VectorEnvManager, make_env_manager
from dmiddleware.errors import (
    CheckpointMismatch,
    ConfigError,
    EnvProtocolError,
    PolicyError,
    PolicyOutputError,
)
from dmiddleware.policy import BCPolicy, DQNPolicy, Policy, PPOPolicy, RecurrentPPOPolicy
from dmiddleware.rl import with_nstep_returns
from dmiddleware.rollout import RolloutCollector, evaluate_episodes
from dmiddleware.worker import (
    EpisodeSerialCollector,
    InteractionSerialEvaluator,
    SampleSerialCollector,
)
from tests.dmiddleware.counting_env import CountingEnv
from tests.dmiddleware.policy.drawn_envs import Taking
from tests.dmiddleware.recurrent_policy import GRUPolicy, masked_cartpole

N_ACTIONS = 5


def allowed(t):
    """Return the masks ``[…, 5]`` of the steps ``t``, ``[…]``."""
    t, actions = torch.as_tensor(t).long().unsqueeze(-1), torch.arange(N_ACTIONS)
    return (t % N_ACTIONS == actions) | ((2 * t + 1) % N_ACTIONS == actions)


class MaskedEnv(CountingEnv):
    """Says in its infos what is allowed, and raises where another action is taken."""

    def __init__(self, index=0, lengths=(5,), where="info"):
        super().__init__(index, lengths)
        self.action_space = gym.spaces.Discrete(N_ACTIONS)
        self.where = where
        if where == "obs":
            self.observation_space = gym.spaces.Dict(
                {
                    "observation": self.observation_space,
                    "action_mask": gym.spaces.Box(0, 1, (N_ACTIONS,), np.int8),
                }
            )

    def _masked(self, obs, info):
        mask = allowed(self.t).numpy().astype(np.int8)
        if self.where == "obs":
            return {"observation": obs, "action_mask": mask}, info
        return obs, {"action_mask": mask, "t": self.t, "place": np.array([self.t, self.episode])}

    def reset(self, **kwargs):
        return self._masked(*super().reset(**kwargs))

    def step(self, action):
        assert allowed(self.t)[action], f"{action} is not allowed in step {self.t}"
        obs, *rest, info = super().step(action)
        obs, info = self._masked(obs, info)
        return obs, *rest, info


class Declares(Policy):
    """Acts at random among what is allowed, and returns everything that it saw."""

    def __init__(self, *act_inputs, n_actions=N_ACTIONS):
        self.act_inputs = act_inputs
        self.n_actions = n_actions
        super().__init__({"seed": 0}, nn.Identity())

    def learn(self, batch):
        return {}

    def act_collect(self, obs, env_id, *, action_mask=None, **inputs):
        weight = torch.ones(len(env_id), self.n_actions) if action_mask is None else action_mask
        action = torch.multinomial(weight.float(), 1, generator=self.generator).squeeze(1)
        seen = inputs if action_mask is None else {"action_mask": action_mask, **inputs}
        return {"action": action, **{f"seen_{name}": item for name, item in seen.items()}}

    def act_eval(self, obs, env_id, *, action_mask=None, **inputs):
        return {"action": self.act_collect(obs, env_id, action_mask=action_mask)["action"]}

    def check_spaces(self, observation_space, action_space):
        pass


def masked_envs(lengths, where="info"):
    return SyncEnvManager(
        [functools.partial(MaskedEnv, i, own, where) for i, own in enumerate(lengths)],
        max_retry=0,
    )


def vector_envs(lengths, mode, make=CountingEnv):
    def make_vector():
        return gym.vector.SyncVectorEnv(
            [functools.partial(make, i, own) for i, own in enumerate(lengths)],
            autoreset_mode=gym.vector.AutoresetMode(mode),
        )

    return VectorEnvManager(make_vector, len(lengths), max_retry=0)


LENGTHS = [(5,), (3, 7), (4, 2, 9)]
PREVIOUS = ("prev_action", "prev_reward", "is_first")


def check_previous(lane):
    """Check the columns of the previous step in lanes ``[T, E, …]`` without gaps."""
    first = lane["obs"][..., 2] == 0
    assert torch.equal(lane["is_first"], first)
    for name, column in (("prev_action", "action"), ("prev_reward", "reward")):
        assert (lane[name][first] == 0).all()
        later = ~first[1:]
        assert torch.equal(lane[name][1:][later], lane[column][:-1][later])
    for name in PREVIOUS:
        assert torch.equal(lane[name], lane[f"seen_{name}"])


@pytest.mark.parametrize("n_samples", [[3] * 20, [60], [7, 1, 30, 3]])
def test_a_policy_sees_its_previous_action_and_reward(counting_envs, n_samples):
    collector = RolloutCollector(Declares(*PREVIOUS, n_actions=2), counting_envs(LENGTHS))
    lane = cat([collector.collect(n) for n in n_samples])
    assert lane["prev_reward"].dtype == torch.float32
    check_previous(lane)


def test_the_previous_action_has_the_dtype_of_the_action():
    with make_env_manager(
        lambda: Taking(gym.spaces.MultiBinary(3)), env_num=2, mode="sync", seed=0
    ) as envs:
        policy = RecurrentPPOPolicy.for_env(envs, seed=1)
        batch = RolloutCollector(policy, envs).collect(8)
    assert batch["prev_action"].dtype == batch["action"].dtype


@pytest.mark.parametrize("mode", ["NextStep", "SameStep", "Disabled"])
def test_steps_that_only_reset_an_env_are_not_remembered(mode):
    with vector_envs(LENGTHS, mode) as envs:
        collector = RolloutCollector(Declares(*PREVIOUS, n_actions=2), envs)
        check_previous(cat([collector.collect(n) for n in (3, 60, 3, 3, 90)]))


def test_nothing_is_remembered_of_an_episode_that_a_failure_cut_short(counting_envs):
    envs = counting_envs([(9,), (9,)], crashes={1: [(0, 4)]})
    collector = RolloutCollector(Declares(*PREVIOUS, n_actions=2), envs)
    check_previous(collector.collect(40))


def test_envs_that_pause_keep_what_they_remember(counting_envs):
    collector = RolloutCollector(Declares(*PREVIOUS, n_actions=2), counting_envs(LENGTHS))
    for _ in range(3):
        for episode in collector.collect_episodes(5):
            check_previous(episode)


def test_only_what_is_declared_is_collected(counting_envs):
    collector = RolloutCollector(Declares("prev_reward", n_actions=2), counting_envs(LENGTHS))
    batch = collector.collect(6)
    assert {"prev_reward", "seen_prev_reward"} < set(batch)
    assert not {"prev_action", "is_first", "action_mask", "info", "state"} & set(batch)


def test_a_batch_owns_the_memory_of_its_inputs():
    policy = Declares(*PREVIOUS, "action_mask", "info.t")
    with masked_envs([(50,), (50,)]) as envs:
        collector = RolloutCollector(policy, envs)
        for n_sample in (2, 2, 6, 2):
            batch = collector.collect(n_sample)
            before = batch["action"].clone()
            for _, leaf in leaves(batch):
                leaf.fill_(1)
        batch = collector.collect(2)
        assert torch.equal(batch["prev_action"], before)
        assert torch.equal(batch["action_mask"], allowed(batch["obs"][..., 2]))
        assert not batch["is_first"].any()


class Choices(gym.Env):
    """Takes actions of a nested space, whose first choice is not 0."""

    observation_space = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = gym.spaces.Dict(
        {"move": gym.spaces.Discrete(3, start=4), "force": gym.spaces.Box(-1.0, 1.0, (2,))}
    )

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action):
        return np.zeros(2, np.float32), 1.0, False, False, {}


class Mover(Declares):
    def act_collect(self, obs, env_id, *, prev_action):
        n = len(env_id)
        action = {"move": torch.full((n,), 6), "force": torch.full((n, 2), 0.5)}
        return {"action": as_tree(action)}


def test_previous_actions_may_be_nested():
    with make_env_manager(Choices, env_num=2) as envs:
        batch = RolloutCollector(Mover("prev_action"), envs).collect(4)
    assert batch["prev_action"]["move"].tolist() == [[4, 4], [6, 6]]
    assert batch["prev_action"]["force"][:, 0].tolist() == [[0.0, 0.0], [0.5, 0.5]]


def test_declared_infos_are_those_that_came_with_the_observation():
    with masked_envs(LENGTHS) as envs:
        policy = Declares("action_mask", "info.t", "info.place")
        collector = RolloutCollector(policy, envs)
        batch = cat([collector.collect(n) for n in (3, 60, 3)])
    assert torch.equal(batch["info"]["t"], batch["obs"][..., 2].long())
    assert torch.equal(batch["info"]["place"], batch["obs"][..., [2, 1]].long())
    assert torch.equal(batch["seen_info"]["t"], batch["info"]["t"])
    assert set(batch["info"]) == {"t", "place"}


@pytest.mark.parametrize("where", ["info", "obs"])
def test_masks_are_known_for_every_observation_and_every_successor(where):
    with masked_envs(LENGTHS, where) as envs:
        collector = RolloutCollector(Declares("action_mask"), envs)
        batch = cat([collector.collect(n) for n in (3, 60, 3)])
    obs, successor = batch["obs"], batch["next_obs"]
    if where == "obs":
        obs, successor = obs["observation"], successor["observation"]
    assert torch.equal(batch["action_mask"], allowed(obs[..., 2]))
    assert torch.equal(batch["next_action_mask"], allowed(successor[..., 2]))
    assert batch["done"].any()
    assert torch.equal(batch["seen_action_mask"], batch["action_mask"])


@pytest.mark.parametrize("mode", ["NextStep", "SameStep", "Disabled"])
def test_masks_reach_a_policy_in_lockstep_envs(mode):
    with vector_envs(LENGTHS, mode, MaskedEnv) as envs:
        collector = RolloutCollector(Declares("action_mask"), envs)
        batch = cat([collector.collect(n) for n in (3, 60, 30)])
        evaluate_episodes(Declares("action_mask"), envs, 5)
    assert torch.equal(batch["action_mask"], allowed(batch["obs"][..., 2]))
    assert torch.equal(batch["next_action_mask"], allowed(batch["next_obs"][..., 2]))


def buffered(rows):
    buffer = TensorBuffer(rows["done"].numel(), n_step=3, discount=0.9, seed=0)
    buffer.push(rows)
    return buffer.sample(60)


@pytest.mark.parametrize(
    "n_step", [buffered, lambda rows: with_nstep_returns(rows, n=3, discount=0.9)]
)
def test_an_n_step_return_has_the_mask_of_the_observation_it_bootstraps_from(n_step):
    with masked_envs(LENGTHS) as envs:
        rows = n_step(RolloutCollector(Declares("action_mask"), envs).collect(60))
    assert (rows["next_obs"][..., 2] - rows["obs"][..., 2] == 3).any()
    assert torch.equal(rows["next_action_mask"], allowed(rows["next_obs"][..., 2]))
    assert torch.equal(rows["action_mask"], allowed(rows["obs"][..., 2]))


@pytest.mark.parametrize("declared", [("action_mask",), ()])
def test_random_actions_respect_masks_in_infos(declared):
    with masked_envs(LENGTHS) as envs:
        batch = RolloutCollector(Declares(*declared), envs).collect(90, random=True)
    assert set(batch["action"].flatten().tolist()) == set(range(N_ACTIONS))


def test_a_policy_that_ignores_its_masks_is_rejected():
    class Stubborn(Declares):
        def act_collect(self, obs, env_id, *, action_mask):
            return {"action": (~action_mask).long().argmax(-1)}

    with masked_envs(LENGTHS) as envs, pytest.raises(PolicyOutputError, match="allows only"):
        RolloutCollector(Stubborn("action_mask"), envs).collect(3)


def test_evaluation_respects_masks_in_infos():
    with masked_envs(LENGTHS) as envs:
        monitor = evaluate_episodes(Declares("action_mask", "prev_reward"), envs, 7)
    assert len(monitor.get_episode_return()) == 7


STOCK = [(DQNPolicy, {"eps": 0.5}), (PPOPolicy, {}), (BCPolicy, {})]


@pytest.mark.parametrize(("kind", "kwargs"), STOCK)
@pytest.mark.parametrize("where", ["info", "obs"])
def test_stock_policies_respect_masks_in_infos_and_observations(kind, kwargs, where):
    """The env raises where a forbidden action is taken."""
    with masked_envs(LENGTHS, where) as envs:
        policy = kind.for_env(envs, seed=0)
        batch = RolloutCollector(policy, envs).collect(90, policy_kwargs=kwargs)
        assert batch["action_mask"].gather(-1, batch["action"].unsqueeze(-1)).all()
        assert len(evaluate_episodes(policy, envs, 6).get_episode_return()) == 6


def test_dqn_bootstraps_from_actions_that_the_infos_allow():
    with masked_envs(LENGTHS) as envs:
        policy = DQNPolicy.for_env(envs, seed=0, discount=0.9, n_step=3, double=False)
        collector = RolloutCollector(policy, envs)
        buffer = TensorBuffer(90, n_step=3, discount=0.9, seed=0)
        buffer.push(collector.collect(90, policy_kwargs={"eps": 1.0}))
        sample = buffer.sample(90)
        with torch.no_grad():
            q = policy.model(sample["next_obs"])["logit"]
        best = q.masked_fill(~allowed(sample["next_obs"][..., 2]), -torch.inf).amax(-1)
        target = sample["reward"] + sample["discount"] * best * ~sample["terminated"]
        output = policy.learn_mode.forward(sample)
    assert float(output["target_q_value"]) == pytest.approx(target.mean().item(), rel=1e-5)
    free = sample["reward"] + sample["discount"] * q.amax(-1) * ~sample["terminated"]
    assert free.mean().item() != pytest.approx(target.mean().item(), rel=1e-3)


def test_envs_without_masks_are_played_without_them(counting_envs):
    collector = RolloutCollector(Declares("action_mask", n_actions=2), counting_envs(LENGTHS))
    assert "action_mask" not in collector.collect(6)


class Late(MaskedEnv):
    def reset(self, **kwargs):
        return super().reset(**kwargs)[0], {}


class Sparse(MaskedEnv):
    """Gives masks and numbers at reset only."""

    def step(self, action):
        return *CountingEnv.step(self, action)[:4], {}


def test_masks_that_are_missing_at_reset_are_an_error():
    envs = SyncEnvManager([Late])
    with envs, pytest.raises(EnvProtocolError, match=r"did not return it in those of reset\(\)"):
        RolloutCollector(Declares("action_mask"), envs).collect(1)


def test_envs_that_return_no_mask_allow_everything():
    with SyncEnvManager([functools.partial(Sparse, 0, (3,))] * 2) as envs:
        batch = RolloutCollector(Declares("action_mask", "info.t"), envs).collect(16)
    first = batch["obs"][..., 2] == 0
    assert torch.equal(batch["action_mask"].all(-1), ~first)
    assert batch["next_action_mask"].all()
    assert (batch["info"]["t"] == 0).all()


class Ending(MaskedEnv):
    """Its mask allows nothing at the end of an episode."""

    def step(self, action):
        obs, reward, terminated, truncated, info = super().step(action)
        if terminated or truncated:
            info["action_mask"] = np.zeros(N_ACTIONS, np.int8)
        return obs, reward, terminated, truncated, info


@pytest.mark.parametrize("mode", ["NextStep", "SameStep", "Disabled"])
def test_masks_that_allow_nothing_are_not_masks(mode):
    with vector_envs(LENGTHS, mode, Ending) as envs:
        batch = RolloutCollector(Declares("action_mask"), envs).collect(60)
    done = batch["done"]
    assert batch["next_action_mask"][done].all()
    successors = batch["next_obs"][..., 2][~done]
    assert torch.equal(batch["next_action_mask"][~done], allowed(successors))


def test_only_the_envs_that_return_a_mask_have_one():
    class Free(CountingEnv):
        def __init__(self, index=0, lengths=(5,)):
            super().__init__(index, lengths)
            self.action_space = gym.spaces.Discrete(N_ACTIONS)

    envs = SyncEnvManager([functools.partial(MaskedEnv, 0), functools.partial(Free, 1)])
    with envs:
        batch = RolloutCollector(Declares("action_mask", "info.t"), envs).collect(24)
    for name, obs in (("action_mask", "obs"), ("next_action_mask", "next_obs")):
        assert torch.equal(batch[name][:, 0], allowed(batch[obs][:, 0, 2]))
        assert batch[name][:, 1].all()
    assert torch.equal(batch["info"]["t"][:, 0], batch["obs"][:, 0, 2].long())
    assert (batch["info"]["t"][:, 1] == 0).all()


class Parts(gym.Env):
    """Takes nested actions, of which its infos allow some, as nested masks or joined in a row."""

    observation_space = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = gym.spaces.Dict(
        {
            "pair": gym.spaces.MultiDiscrete([2, 3]),
            "bits": gym.spaces.MultiBinary(2),
            "both": gym.spaces.Tuple((gym.spaces.Discrete(3), gym.spaces.Box(-1.0, 1.0, (1,)))),
        }
    )

    def __init__(self, joined=False):
        self.joined = joined

    def _info(self):
        bits, both = np.array([1, 0]), np.array([0, 1, 1])
        pair = np.array([0, 1]), np.array([1, 0, 1])
        if self.joined:
            return {"action_mask": np.concatenate([bits, both, *pair]).astype(np.int8)}
        return {"action_mask": {"pair": pair, "bits": bits, "both": (both,)}}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(2, np.float32), self._info()

    def step(self, action):
        assert action["pair"][0] == 1
        assert action["pair"][1] in (0, 2)
        assert action["bits"][1] == 0
        assert action["both"][0] in (1, 2)
        return np.zeros(2, np.float32), 1.0, False, False, self._info()


class AllowedParts(Declares):
    def act_collect(self, obs, env_id, *, action_mask):
        n = len(env_id)
        action = {
            "pair": torch.tensor([[1, 2]] * n),
            "bits": torch.tensor([[1, 0]] * n),
            "both": (torch.full((n,), 2), torch.zeros(n, 1)),
        }
        return {"action": as_tree(action)}


@pytest.mark.parametrize("random", [False, True])
@pytest.mark.parametrize("joined", [False, True])
def test_masks_in_infos_may_be_nested_like_the_action(joined, random):
    with SyncEnvManager([functools.partial(Parts, joined)] * 2, seed=0, max_retry=0) as envs:
        collector = RolloutCollector(AllowedParts("action_mask"), envs)
        batch = collector.collect(40, random=random)
    assert batch["action_mask"][3, 1].int().tolist() == [1, 0, 0, 1, 1, 0, 1, 1, 0, 1]
    if random:
        assert set(batch["action"]["pair"][..., 1].flatten().tolist()) == {0, 2}
        assert set(batch["action"]["bits"][..., 0].flatten().tolist()) == {0, 1}
        assert set(batch["action"]["both"]["0"].flatten().tolist()) == {1, 2}


def test_infos_that_the_envs_lack_are_an_error(counting_envs):
    collector = RolloutCollector(Declares("info.fuel"), counting_envs(LENGTHS))
    with pytest.raises(ConfigError, match=r"asks for info\.fuel.*no keys"):
        collector.start()


@pytest.mark.parametrize(("name", "value"), [("info.t", "text"), ("action_mask", (1, 0))])
def test_infos_that_are_not_numbers_are_an_error(name, value):
    class Odd(MaskedEnv):
        def reset(self, **kwargs):
            return super().reset(**kwargs)[0], {name.removeprefix("info."): value}

    with SyncEnvManager([Odd]) as envs, pytest.raises(EnvProtocolError, match="not numbers"):
        RolloutCollector(Declares(name), envs).start()


@pytest.mark.parametrize("wrong", [("prev_obs",), ("info.",), "is_first", ["is_first"], (3,)])
def test_an_input_that_does_not_exist_is_rejected_when_the_policy_is_built(wrong):
    class Wrong(GRUPolicy):
        act_inputs = wrong

    with pytest.raises(PolicyError, match="act_inputs"):
        Wrong()


SPACES = [
    (gym.spaces.Discrete(4), 4),
    (gym.spaces.MultiDiscrete([2, 3]), 5),
    (gym.spaces.MultiBinary(3), 3),
    (gym.spaces.Tuple((gym.spaces.Discrete(2), gym.spaces.Box(-1.0, 1.0, (2,)))), 2),
    (gym.spaces.Dict({"a": gym.spaces.Discrete(2), "b": gym.spaces.Discrete(3)}), 5),
    (gym.spaces.Box(-1.0, 1.0, (2,)), None),
]


@pytest.mark.parametrize(("space", "n_choices"), SPACES)
def test_a_policy_is_tried_with_its_inputs_before_the_first_step(space, n_choices):
    class Seeing(Policy):
        act_inputs = (*PREVIOUS, "action_mask")

        def initial_state(self, n):
            return torch.zeros(n, 3)

        def act_eval(self, obs, env_id, *, action_mask=None, **inputs):
            self.seen = inputs, action_mask
            return {"action": inputs["prev_action"], "state": inputs["state"]}

    policy = Seeing(model=nn.Identity(), modes=["eval"])
    policy.eval_mode.spec.check_spaces(gym.spaces.Box(-1.0, 1.0, (2,)), space)
    inputs, mask = policy.seen
    assert set(inputs) == {*PREVIOUS, "state"}
    assert all(len(leaf) == 1 for column in inputs.values() for _, leaf in leaves(column))
    assert (None if mask is None else tuple(mask.shape)) == (n_choices and (1, n_choices))


# Recurrent state


def test_the_stored_state_is_that_before_the_row():
    policy = GRUPolicy()
    with masked_cartpole(3, seed=0) as envs:
        collector = RolloutCollector(policy, envs)
        batches = [collector.collect(n) for n in (3, 90, 3, 3, 60)]
    lane = cat(batches)
    assert lane["done"].any()
    assert (lane["state"][lane["is_first"]] == 0).all()
    net = policy.model
    with torch.no_grad():
        for rows in (lane, batches[1], batches[-1]):
            replayed = net.unroll(rows, rows["state"][0])
            for name in ("logit", "value"):
                torch.testing.assert_close(replayed[name], rows[name])
    later = ~lane["is_first"][1:]
    assert (lane["state"][1:][later] != 0).any(-1).all()


def test_sequences_of_a_buffer_start_with_the_stored_state():
    policy = GRUPolicy()
    buffer = TensorBuffer(
        240, unroll_len=8, burn_in=4, stride=4, start_columns=("state",), unroll_pad=False, seed=0
    )
    with masked_cartpole(3, seed=0) as envs:
        collector = RolloutCollector(policy, envs)
        for _ in range(8):
            buffer.push(collector.collect(30))
    sample = buffer.sample(20)
    assert sample["state"].shape == (20, 32)
    assert (sample["state"] != 0).any()
    with torch.no_grad():
        replayed = policy.model.unroll(sample, sample["state"])
    torch.testing.assert_close(replayed["logit"], sample["logit"])


def test_one_state_does_not_leak_into_another_collector_or_an_evaluation():
    def rows(*, with_others):
        policy = GRUPolicy()
        with contextlib.ExitStack() as stack:
            envs, other, evaluated = (
                stack.enter_context(masked_cartpole(2, seed=seed)) for seed in (0, 1, 2)
            )
            collector = RolloutCollector(policy, envs)
            batches = []
            for _ in range(4):
                batches.append(collector.collect(20))
                if with_others:
                    generator = policy.generator.get_state()
                    evaluate_episodes(policy, evaluated, 2)
                    RolloutCollector(policy, other).collect(10)
                    policy.generator.set_state(generator)
        lane = cat(batches)
        return {name: lane[name] for name in ("obs", "action", "state", "logit")}

    alone, together = rows(with_others=False), rows(with_others=True)
    assert all(torch.equal(alone[name], together[name]) for name in alone)


@pytest.mark.parametrize("before", [2, 26])
def test_a_restored_collector_continues_with_the_same_state(tmp_path, before):
    def build():
        return GRUPolicy(), masked_cartpole(2, seed=0)

    policy, envs = build()
    with envs:
        collector = RolloutCollector(policy, envs)
        first = collector.collect(before)
        assert not first["done"][-1].all()  # the middle of an episode
        saved = {"collector": collector.state_dict(), "policy": policy.learn_mode.state_dict()}
        save_checkpoint(tmp_path / "saved", saved)
        expected = collector.collect(60)
    policy, envs = build()
    with envs:
        collector = RolloutCollector(policy, envs)
        collector.collect(8)
        saved = load_checkpoint(tmp_path / "saved")
        policy.learn_mode.load_state_dict(saved["policy"])
        collector.load_state_dict(saved["collector"])
        found = collector.collect(60)
    names = dict(leaves(expected))
    assert {"state", "prev_action", "is_first"} <= set(names)
    assert (expected["state"][0] != 0).all()
    assert all(torch.equal(leaf, found[name]) for name, leaf in names.items() if "id" not in name)


def test_the_state_of_a_policy_with_other_inputs_is_rejected(counting_envs):
    envs = counting_envs(LENGTHS)
    collector = RolloutCollector(Declares("prev_action", n_actions=2), envs)
    collector.collect(3)
    other = RolloutCollector(Declares("prev_reward", n_actions=2), counting_envs(LENGTHS))
    with pytest.raises(CheckpointMismatch, match=r"keeps prev_action .* needs prev_reward"):
        other.load_state_dict(collector.state_dict())


def test_envs_that_cannot_be_restored_start_with_a_fresh_state(counting_envs):
    policy = Declares(*PREVIOUS, n_actions=2)
    collector = RolloutCollector(policy, counting_envs(LENGTHS, resumable=False))
    collector.collect(9)
    state = collector.state_dict()
    other = RolloutCollector(policy, counting_envs(LENGTHS, resumable=False))
    other.load_state_dict(state)
    assert other.collect(3)["is_first"].all()


def test_envs_that_others_have_stepped_start_with_a_fresh_state(counting_envs):
    envs = counting_envs([(50,), (50,)])
    collector = RolloutCollector(Declares(*PREVIOUS, n_actions=2), envs)
    collector.collect(6)
    envs.step(np.zeros(2, np.int64))
    assert collector.collect(2)["is_first"].all()


class Nested(Declares):
    """Counts its steps in a nested state."""

    def initial_state(self, n):
        return {
            "count": torch.zeros(n, 1),
            "pair": (torch.ones(n), torch.zeros(n, dtype=torch.int64)),
        }

    def act_collect(self, obs, env_id, *, state):
        pair = state["pair"]
        state = {"count": state["count"] + 1, "pair": (pair["0"] * 2, pair["1"] + 1)}
        return {"action": obs[:, 2].long() % 2, "state": state}


@pytest.mark.parametrize("mode", [None, "NextStep", "SameStep", "Disabled"])
def test_a_state_may_be_nested(counting_envs, mode):
    envs = counting_envs(LENGTHS) if mode is None else vector_envs(LENGTHS, mode)
    with envs:
        collector = RolloutCollector(Nested(), envs)
        lane = cat([collector.collect(n) for n in (3, 30, 3)])
    t = lane["obs"][..., 2]
    assert torch.equal(lane["state"]["count"].squeeze(-1), t)
    assert torch.equal(lane["state"]["pair"]["0"], 2**t)
    assert torch.equal(lane["state"]["pair"]["1"], t.long())
    for episode in RolloutCollector(Nested(), counting_envs(LENGTHS)).collect_episodes(6):
        assert torch.equal(episode["state"]["count"].squeeze(-1), episode["obs"][..., 2])


@pytest.mark.parametrize(
    "wrong", [torch.zeros(()), torch.zeros(1), {"h": 3.0}, {}, "text", (torch.zeros(2, 3), None)]
)
def test_an_initial_state_without_one_row_per_env_is_rejected(counting_envs, wrong):
    class Wrong(Nested):
        def initial_state(self, n):
            return wrong

    collector = RolloutCollector(Wrong(), counting_envs([(5,), (5,)]))
    with pytest.raises(PolicyOutputError, match="initial_state"):
        collector.start()


@pytest.mark.parametrize("wrong", [None, torch.zeros(2, 4), {"h": torch.zeros(2, 3)}])
def test_a_forward_without_the_next_state_is_rejected(counting_envs, wrong):
    class Wrong(Nested):
        def initial_state(self, n):
            return torch.zeros(n, 3)

        def act_collect(self, obs, env_id, *, state):
            output = {"action": obs[:, 2].long() % 2}
            return output if wrong is None else {**output, "state": wrong}

    collector = RolloutCollector(Wrong(), counting_envs([(5,), (5,)]))
    with pytest.raises(PolicyOutputError, match="next state under the key 'state'"):
        collector.collect(2)


# Policies written per env, and workers that take lists


class PerEnv(classic.Policy):
    """Written per env: counts its steps in its state."""

    act_inputs = (*PREVIOUS, "action_mask", "info.t")

    def initial_state(self, n):
        return torch.zeros(n, dtype=torch.int64)

    def _forward_learn(self, batch, **kwargs):
        return {}

    def _forward_collect(
        self, data, *, prev_action, prev_reward, is_first, action_mask, info, state
    ):
        per_env = (prev_action, prev_reward, is_first, action_mask, info, state)
        assert all(list(one) == list(data) for one in per_env)
        assert all(int(info[env_id]["t"]) == int(state[env_id]) for env_id in data)
        return {
            env_id: {
                "action": action_mask[env_id].long().argmax(),
                "seen_prev_action": prev_action[env_id],
                "seen_prev_reward": prev_reward[env_id],
                "seen_is_first": is_first[env_id],
                "state": state[env_id] + 1,
            }
            for env_id in data
        }

    def _forward_eval(self, data, **inputs):
        return self._forward_collect(data, **inputs)

    def check_spaces(self, observation_space, action_space):
        pass


def adopted(policy):
    """Return the collect mode as another library's named tuple, written per env."""
    mode = policy.collect_mode
    names = ("forward", "process_transition", "get_train_sample", "reset", "get_attribute")
    foreign = namedtuple("ForeignMode", names)(*(getattr(mode, name) for name in names))
    return classic.as_collect_mode(foreign, user="the test")


@pytest.mark.parametrize("as_mode", [lambda policy: policy, adopted])
def test_a_policy_written_per_env_gets_its_inputs_and_state_per_env(as_mode):
    with masked_envs(LENGTHS) as envs:
        collector = RolloutCollector(as_mode(PerEnv({}, nn.Identity())), envs)
        lane = cat([collector.collect(n) for n in (3, 60, 3)])
        evaluate_episodes(PerEnv({}, nn.Identity()), envs, 4)
    check_previous(lane)
    assert torch.equal(lane["state"], lane["obs"][..., 2].long())
    assert torch.equal(lane["next_action_mask"], allowed(lane["next_obs"][..., 2]))


def test_a_batched_recurrent_policy_acts_per_env_too():
    policy = GRUPolicy()
    obs, state = torch.randn(2, 2), torch.randn(2, 32)
    inputs = {
        "prev_action": torch.tensor([0, 1]),
        "is_first": torch.tensor([True, False]),
        "state": state,
    }
    batched = policy.eval_mode.forward(obs, **inputs)
    per_env = classic.as_eval_mode(policy, user="the test").forward(
        {7: obs[0], 3: obs[1]}, **{name: {7: c[0], 3: c[1]} for name, c in inputs.items()}
    )
    for row, env_id in enumerate((7, 3)):
        for name in ("action", "state"):
            torch.testing.assert_close(per_env[env_id][name], batched[name][row])


@pytest.mark.parametrize(("kind", "n"), [(SampleSerialCollector, 40), (EpisodeSerialCollector, 5)])
def test_a_recurrent_policy_runs_in_the_serial_collectors(tmp_path, kind, n):
    policy = GRUPolicy()
    with masked_cartpole(2, seed=0) as envs:
        collected = kind({}, envs, policy, exp_name=str(tmp_path)).collect(n)
    trajectories = collected if kind is EpisodeSerialCollector else [collected]
    net = policy.model
    for one in trajectories:
        rows = {
            name: torch.stack([row[name] for row in one])
            for name in ("obs", "prev_action", "is_first", "state", "logit")
        }
        with torch.no_grad():
            logit = net(rows["obs"], rows["prev_action"], rows["is_first"], rows["state"])["logit"]
        torch.testing.assert_close(logit, rows["logit"])
        assert torch.equal((rows["state"] == 0).all(-1), rows["is_first"])


def test_a_recurrent_policy_runs_in_the_serial_evaluator(tmp_path):
    policy = GRUPolicy()
    with masked_cartpole(2, seed=0) as envs:
        evaluator = InteractionSerialEvaluator({}, envs, policy, exp_name=str(tmp_path))
        _, info = evaluator.eval(n_episode=3)
        returns = evaluate_episodes(policy, envs, 3).get_episode_return()
    assert info["episode_count"] == len(returns) == 3


@pytest.mark.slow
def test_a_recurrent_policy_learns_to_balance_without_seeing_velocities():
    policy = GRUPolicy(0)
    with masked_cartpole(8, seed=1) as envs, masked_cartpole(8, seed=2) as evaluated:
        collector = RolloutCollector(policy, envs)
        best = 0.0
        for update in range(1, 81):
            policy.learn_mode.forward(collector.collect(8 * 64))
            if update % 10 == 0:
                returns = evaluate_episodes(policy, evaluated, 8).get_episode_return()
                best = max(best, float(np.mean(returns)))
            if best > 200:
                break
    # Without memory, a policy that sees the positions only averages below 60.
    assert best > 200
