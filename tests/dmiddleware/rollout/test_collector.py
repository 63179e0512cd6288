from __future__ import annotations

import functools

import gymnasium as gym
import numpy as np
import pytest
import torch

from dmiddleware.data import TensorBuffer
from dmiddleware.env import AsyncEnvManager, SyncEnvManager, VectorEnvManager, make_env_manager
from dmiddleware.errors import SpaceError
from dmiddleware.rollout import RolloutCollector
from dmiddleware.tree import as_tree, cat, leaves
from tests.variants import mostly_slow

LENGTHS = [(5,), (3, 7), (4, 2, 9)]


def lanes(batches):
    """The (episode number, step) of every row, lane by lane, over consecutive batches."""
    obs = torch.cat([batch["obs"] for batch in batches])
    return [[(int(e), int(t)) for _, e, t in lane] for lane in obs.transpose(0, 1).tolist()]


def expected_lane(lengths, n_rows):
    rows, episode = [], 0
    while len(rows) < n_rows:
        rows += [(episode, t) for t in range(lengths[episode % len(lengths)])]
        episode += 1
    return rows[:n_rows]


def test_a_batch_has_the_standard_columns(counting_envs, batched_policy):
    collector = RolloutCollector(batched_policy, counting_envs(LENGTHS))
    batch = collector.collect(7, train_iter=4)
    shapes = {path: (tuple(leaf.shape), leaf.dtype) for path, leaf in leaves(batch)}
    assert shapes == {
        "obs": ((3, 3, 3), torch.float32),
        "action": ((3, 3), torch.int64),
        "reward": ((3, 3), torch.float32),
        "next_obs": ((3, 3, 3), torch.float32),
        "done": ((3, 3), torch.bool),
        "terminated": ((3, 3), torch.bool),
        "truncated": ((3, 3), torch.bool),
        "episode_id": ((3, 3), torch.int64),
        "collect_iter": ((3, 3), torch.int64),
        "memory": ((3, 3), torch.int64),
    }
    assert (batch["collect_iter"] == 4).all()


@pytest.mark.parametrize("n_samples", [[3] * 20, [60], [7, 1, 30, 3]])
def test_episodes_continue_from_call_to_call_without_a_gap(
    counting_envs, batched_policy, n_samples
):
    collector = RolloutCollector(batched_policy, counting_envs(LENGTHS))
    batches = [collector.collect(n) for n in n_samples]
    found = lanes(batches)
    assert found == [expected_lane(lengths, len(found[0])) for lengths in LENGTHS]


def test_next_obs_is_the_true_successor_also_at_an_end(counting_envs, batched_policy):
    collector = RolloutCollector(batched_policy, counting_envs(LENGTHS))
    batch = collector.collect(90)
    step, episode = batch["obs"][..., 2], batch["obs"][..., 1]
    assert torch.equal(batch["next_obs"][..., 2], step + 1)
    assert torch.equal(batch["next_obs"][..., 1], episode)
    assert torch.equal(batch["reward"], step + 1)
    ends = batch["done"]
    assert torch.equal(ends, batch["terminated"] | batch["truncated"])
    assert torch.equal(batch["terminated"], ends & (episode % 2 == 0))


def test_an_episode_id_names_one_episode_of_one_env(counting_envs, batched_policy):
    collector = RolloutCollector(batched_policy, counting_envs(LENGTHS))
    batches = [collector.collect(3) for _ in range(30)]
    ids = torch.cat([batch["episode_id"] for batch in batches]).flatten().tolist()
    places = [
        (env, episode)
        for batch in batches
        for env, episode in batch["obs"][..., :2].reshape(-1, 2).tolist()
    ]
    named = dict(zip(ids, places, strict=True))
    assert len(set(named.values())) == len(named) == len(set(places))
    assert all(named[one] == place for one, place in zip(ids, places, strict=True))


def test_counters_and_returns_are_exact(counting_envs, batched_policy):
    collector = RolloutCollector(batched_policy, counting_envs([(2,), (3,)]))
    collector.collect(12)
    assert collector.env_step == 12
    assert collector.env_episode == 5
    assert collector.episode_returns == [3.0, 6.0, 3.0, 3.0, 6.0]
    collector.collect(2)
    assert collector.episode_returns == []


def test_the_policy_is_reset_where_episodes_end(counting_envs, batched_policy):
    collector = RolloutCollector(batched_policy, counting_envs([(2,), (3,)]))
    batch = collector.collect(12)
    assert batch["memory"].T.tolist() == [[1, 2, 1, 2, 1, 2], [1, 2, 3, 1, 2, 3]]


def test_a_batch_owns_its_memory(counting_envs, batched_policy):
    collector = RolloutCollector(batched_policy, counting_envs([(50,), (50,)]))
    for n_sample in (2, 2, 6, 2):
        batch = collector.collect(n_sample)
        for _, leaf in leaves(batch):
            leaf.fill_(77)
    assert lanes([collector.collect(2)]) == [[(0, 6)], [(0, 6)]]


def test_keyword_arguments_reach_the_policy(counting_envs, batched_policy):
    collector = RolloutCollector(batched_policy, counting_envs([(50,)]))
    plain = collector.collect(1)
    shifted = collector.collect(1, policy_kwargs={"shift": 1})
    assert (plain["action"].item(), shifted["action"].item()) == (0, 0)


def test_random_actions_are_seeded_and_keep_the_columns(counting_envs, batched_policy):
    def actions(seed):
        envs = counting_envs(LENGTHS, seed=seed)
        collector = RolloutCollector(batched_policy, envs)
        batch = collector.collect(60, random=True)
        assert "memory" in batch
        assert batch["action"].dtype == torch.int64
        return batch["action"].tolist()

    assert actions(1) == actions(1) != actions(2)


def test_a_policy_written_per_env_makes_its_own_transitions(counting_envs, per_env_policy):
    collector = RolloutCollector(per_env_policy, counting_envs(LENGTHS))
    batches = [collector.collect(9) for _ in range(4)]
    found = lanes(batches)
    assert found == [expected_lane(lengths, 12) for lengths in LENGTHS]
    batch = batches[0]
    assert torch.equal(batch["half_reward"], batch["reward"] / 2)
    assert batch["terminated"].dtype == torch.bool
    assert "value" not in batch


def test_a_failed_env_loses_only_its_unfinished_trajectory(counting_envs, batched_policy):
    crashes = {1: [(1, 4)]}  # env 1 plays episode 0 (3 steps), then four steps of episode 1
    collector = RolloutCollector(batched_policy, counting_envs(LENGTHS, crashes))
    batch = collector.collect(3 * 20)
    found = lanes([batch])
    assert found[0] == expected_lane(LENGTHS[0], 20)
    assert found[2] == expected_lane(LENGTHS[2], 20)
    assert found[1][:3] == [(0, 0), (0, 1), (0, 2)]
    assert found[1][3] == (100, 0)
    assert collector.dropped_steps == 4
    # The others waited for it, so nothing is left over.
    assert collector.waiting_steps == 0
    assert collector.env_step == 60 + 4


def test_rows_after_a_failure_have_another_episode_id(counting_envs, batched_policy):
    collector = RolloutCollector(batched_policy, counting_envs([(9,), (9,)], {0: [(0, 2)]}))
    before = collector.collect(4)["episode_id"][:, 0]
    after = collector.collect(4)["episode_id"][:, 0]
    assert before[0] == before[1]
    assert after[0] == after[1]
    assert before[0] != after[0]
    # Rows that were returned already are kept.
    assert collector.dropped_steps == 0
    assert batched_policy.resets == [[0]]


@pytest.mark.parametrize("n_before", [2, 4])
def test_envs_that_were_launched_again_start_new_episodes(counting_envs, batched_policy, n_before):
    envs = counting_envs([(9,), (9,)])
    collector = RolloutCollector(batched_policy, envs)
    before = collector.collect(n_before)
    with pytest.raises(ArithmeticError):
        collector.collect(8, policy_kwargs={"fail_at": 4})
    n_waiting = collector.waiting_steps
    assert n_waiting == 8 - n_before
    envs.close()
    envs.launch()
    after = collector.collect(16)
    assert after["obs"][:, 0, 2].tolist() == list(range(8))
    assert after["memory"][:, 0].tolist() == list(range(1, 9))
    assert not set(before["episode_id"].flatten().tolist()) & set(
        after["episode_id"].flatten().tolist()
    )
    assert collector.dropped_steps == n_waiting


def test_envs_that_do_not_fit_the_policy_are_rejected_before_the_first_step(dqn_policy):
    with make_env_manager("Acrobot-v1", env_num=2) as envs, pytest.raises(SpaceError):
        RolloutCollector(dqn_policy, envs).collect(2)


@pytest.mark.parametrize("n_sample", [0, -1])
def test_a_number_of_samples_that_is_not_positive_is_rejected(
    counting_envs, batched_policy, n_sample
):
    collector = RolloutCollector(batched_policy, counting_envs(LENGTHS))
    with pytest.raises(ValueError, match="n_sample must be positive"):
        collector.collect(n_sample)
    with pytest.raises(ValueError, match="n_episode must be positive"):
        collector.collect_episodes(n_sample)


def test_every_env_contributes_its_share_of_episodes(counting_envs, batched_policy):
    collector = RolloutCollector(batched_policy, counting_envs([(2,), (30,), (3,)]))
    episodes = collector.collect_episodes(7)
    assert len(episodes) == 7
    envs = sorted(int(episode["obs"][0, 0]) for episode in episodes)
    assert envs == [0, 0, 0, 1, 1, 2, 2]
    for episode in episodes:
        assert episode["obs"][:, 2].tolist() == list(range(len(episode["obs"])))
        assert episode["done"].tolist() == [False] * (len(episode["obs"]) - 1) + [True]
        assert len(set(episode["episode_id"].tolist())) == 1


def test_the_remainder_goes_to_other_envs_in_the_next_call(counting_envs, batched_policy):
    collector = RolloutCollector(batched_policy, counting_envs([(2,), (3,), (4,)]))
    found = [
        sorted(int(episode["obs"][0, 0]) for episode in collector.collect_episodes(2))
        for _ in range(3)
    ]
    assert found == [[0, 1], [0, 2], [1, 2]]


def test_envs_that_have_delivered_their_share_pause(counting_envs, batched_policy):
    collector = RolloutCollector(batched_policy, counting_envs([(2,), (30,)]))
    collector.collect_episodes(2)
    assert collector.env_step == 32
    assert collector.env_episode == 2
    assert collector.dropped_steps == 0
    assert sorted(collector.episode_returns) == [3.0, sum(range(31))]


def test_episodes_are_returned_in_order_and_none_is_missing(counting_envs, batched_policy):
    collector = RolloutCollector(batched_policy, counting_envs(LENGTHS))
    numbers = [[], [], []]
    for _ in range(6):
        for episode in collector.collect_episodes(4):
            env, number, _ = episode["obs"][0].tolist()
            numbers[int(env)].append(int(number))
    assert numbers == [list(range(8))] * 3


def test_partly_returned_episodes_are_given_up_for_whole_ones(counting_envs, batched_policy):
    collector = RolloutCollector(batched_policy, counting_envs([(4,), (6,)]))
    batch = collector.collect(2)
    for _ in range(3):
        batch = collector.collect(2)  # until env 0 is between episodes, env 1 within its first one
    batch["episode_id"].fill_(77)
    batch["done"].fill_(True)
    episodes = collector.collect_episodes(2)
    firsts = sorted(tuple(episode["obs"][0].tolist()) for episode in episodes)
    assert firsts == [(0.0, 1.0, 0.0), (1.0, 1.0, 0.0)]


def test_a_failed_env_plays_another_episode(counting_envs, batched_policy):
    collector = RolloutCollector(batched_policy, counting_envs([(3,), (3,)], {1: [(0, 2)]}))
    episodes = collector.collect_episodes(2)
    assert [len(episode["obs"]) for episode in episodes] == [3, 3]
    assert collector.dropped_steps == 2


def test_envs_that_cannot_be_restored_start_new_episodes(counting_envs, batched_policy):
    collector = RolloutCollector(batched_policy, counting_envs(LENGTHS, resumable=False))
    collector.collect(30)
    state = collector.state_dict()
    other = RolloutCollector(batched_policy, counting_envs(LENGTHS, resumable=False))
    other.load_state_dict(state)
    assert (other.env_step, other.env_episode) == (collector.env_step, collector.env_episode)
    old, new = collector.collect(3)["episode_id"], other.collect(3)["episode_id"]
    assert not set(old.flatten().tolist()) & set(new.flatten().tolist())


def test_rows_made_before_an_error_are_returned_later(counting_envs, batched_policy):
    collector = RolloutCollector(batched_policy, counting_envs([(9,), (9,)]))
    with pytest.raises(ArithmeticError):
        collector.collect(8, policy_kwargs={"fail_at": 3})
    assert collector.waiting_steps == 6
    first = collector.collect(2, train_iter=5)
    found = lanes([first])
    for _, leaf in leaves(first):
        leaf.fill_(77)  # a batch's memory is its owner's alone
    second = collector.collect(6, train_iter=5)
    assert [a + b for a, b in zip(found, lanes([second]), strict=True)] == (
        [expected_lane((9,), 4)] * 2
    )
    assert second["collect_iter"].tolist() == [[0, 0], [0, 0], [5, 5]]


def test_waiting_rows_of_an_episode_that_cannot_continue_are_dropped(counting_envs, batched_policy):
    lengths = [(2,), (9,)]
    collector = RolloutCollector(batched_policy, counting_envs(lengths, resumable=False))
    with pytest.raises(ArithmeticError):
        collector.collect(8, policy_kwargs={"fail_at": 3})
    other = RolloutCollector(batched_policy, counting_envs(lengths, resumable=False))
    other.load_state_dict(collector.state_dict())
    # Env 0 has ended an episode of two steps and begun another; env 1 is within its first one.
    assert (collector.waiting_steps, other.waiting_steps) == (6, 2)
    assert other.dropped_steps == 4


def test_reset_starts_new_episodes(counting_envs, batched_policy, per_env_policy):
    collector = RolloutCollector(batched_policy, counting_envs(LENGTHS))
    first = collector.collect(6)
    collector.reset()
    second = collector.collect(6)
    assert lanes([second]) == [[(1, 0), (1, 1)]] * 3
    assert not set(first["episode_id"].flatten().tolist()) & set(
        second["episode_id"].flatten().tolist()
    )
    assert collector.env_step == 12
    collector.reset(policy=per_env_policy, env_manager=counting_envs([(5,)]))
    assert collector.collect(2)["half_reward"].tolist() == [[0.5], [1.0]]


def test_nested_observations_stay_nested(batched_policy):
    class Nested(gym.Env):
        observation_space = gym.spaces.Dict(
            {"image": gym.spaces.Box(0, 255, (2, 2), np.uint8), "age": gym.spaces.Discrete(100)}
        )
        action_space = gym.spaces.Discrete(2)

        def reset(self, *, seed=None, options=None):
            self.age = 0
            return self._obs(), {}

        def step(self, action):
            self.age += 1
            return self._obs(), 1.0, self.age == 3, False, {}

        def _obs(self):
            return {"image": np.full((2, 2), self.age, np.uint8), "age": self.age}

    class Still(type(batched_policy)):
        def act_collect(self, obs, env_id, **kwargs):
            return {"action": torch.zeros(len(env_id), dtype=torch.int64)}

    policy = Still({}, torch.nn.Linear(1, 1))
    with make_env_manager(Nested, env_num=2) as envs:
        batch = RolloutCollector(policy, envs).collect(8)
    assert batch["obs"]["image"].dtype == torch.uint8
    assert batch["obs"]["image"].shape == (4, 2, 2, 2)
    assert batch["obs"]["age"][:, 0].tolist() == [0, 1, 2, 0]
    assert batch["next_obs"]["age"][:, 0].tolist() == [1, 2, 3, 1]


@pytest.mark.parametrize("mode", ["sync", pytest.param("async", marks=pytest.mark.process)])
def test_actions_may_be_tuples(batched_policy, mode):
    class Pair(gym.Env):
        observation_space = gym.spaces.Box(0, 9, (3,), np.float32)
        action_space = gym.spaces.Tuple(
            (gym.spaces.Discrete(3), gym.spaces.Dict(x=gym.spaces.Box(-1, 1, (2,), np.float32)))
        )

        def __init__(self, length):
            self.length = length

        def reset(self, *, seed=None, options=None):
            self.t = 0
            return np.zeros(3, np.float32), {}

        def step(self, action):
            assert self.action_space.contains(action)
            self.t += 1
            reward = float(action[0] + action[1]["x"].sum())
            return np.full(3, self.t, np.float32), reward, self.t == self.length, False, {}

    class Pushing(type(batched_policy)):
        def act_collect(self, obs, env_id, **kwargs):
            n = len(env_id)
            return {"action": as_tree({"0": torch.full((n,), 2), "1": {"x": torch.ones(n, 2)}})}

    policy = Pushing({}, torch.nn.Linear(1, 1))
    manager = SyncEnvManager if mode == "sync" else AsyncEnvManager
    with manager([functools.partial(Pair, 2), functools.partial(Pair, 5)], seed=0) as envs:
        collector = RolloutCollector(policy, envs)
        batch = collector.collect(4)
        assert batch["reward"].tolist() == [[4, 4], [4, 4]]
        assert batch["action"]["1"]["x"].shape == (2, 2, 2)
        # The second env is stepped alone after the first one's share.
        lengths = [len(episode["done"]) for episode in collector.collect_episodes(2)]
        assert lengths == [2, 5]
        assert collector.collect(4, random=True)["reward"].unique().numel() == 4


def cartpole(dqn_policy, **kwargs):
    envs = make_env_manager("CartPole-v1", env_num=3, seed=0, **kwargs)
    return envs, RolloutCollector(dqn_policy, envs)


@pytest.mark.parametrize("episodes", [False, True])
def test_envs_that_can_be_restored_continue_their_episodes(dqn_policy, episodes):
    def go_on(collector):
        if episodes:
            return [row.tolist() for e in collector.collect_episodes(4) for row in e["obs"]]
        return collector.collect(30)["obs"].tolist()

    envs, collector = cartpole(dqn_policy)
    other_envs, other = cartpole(dqn_policy)
    with envs, other_envs:
        collector.collect_episodes(4)
        collector.collect(21)
        state = collector.state_dict()
        expected = go_on(collector)
        other.load_state_dict(state)
        assert go_on(other) == expected
        assert (
            other.state_dict()["stepper"]["episode_id"]
            == (collector.state_dict()["stepper"]["episode_id"])
        )
        assert (other.env_step, other.env_episode) == (collector.env_step, collector.env_episode)


@pytest.mark.parametrize("mode", ["NextStep", "SameStep", "Disabled"])
def test_a_vector_env_yields_consistent_rows_in_every_autoreset_mode(dqn_policy, mode):
    """Rows are missing in steps that reset; rectangles are whole nevertheless."""

    class Vector(gym.vector.SyncVectorEnv):
        pass

    def make():
        return gym.vector.SyncVectorEnv(
            [lambda: gym.make("CartPole-v1")] * 3,
            autoreset_mode=gym.vector.AutoresetMode(mode),
        )

    with VectorEnvManager(make, 3, seed=0) as envs:
        collector = RolloutCollector(dqn_policy, envs)
        batches = [collector.collect(n) for n in (3, 60, 3, 3, 90)]
        n_rows = sum(batch["done"].numel() for batch in batches)
        assert n_rows == 159
        assert collector.env_step == 159 + collector.waiting_steps
        lane = cat(batches)
        same = lane["episode_id"][1:] == lane["episode_id"][:-1]
        assert torch.equal(same, ~lane["done"][:-1])
        assert torch.equal(lane["obs"][1:][same], lane["next_obs"][:-1][same])
        episodes = collector.collect_episodes(4)
    assert len(episodes) == 4
    for episode in episodes:
        assert episode["done"].tolist() == [False] * (len(episode["done"]) - 1) + [True]
        assert torch.equal(episode["obs"][1:], episode["next_obs"][:-1])


LOSE_NO_STEPS = [
    ((1,), (1000,)),
    ((2,), (1,), (300,), (1,)),
    ((1,), (7, 9), (400,), (500,), (600,)),
]


@pytest.mark.parametrize("lengths", LOSE_NO_STEPS)
@pytest.mark.parametrize("n_steps", mostly_slow([1, 40, 8], keep=1))
def test_rows_do_not_pile_up_in_envs_that_lose_no_steps_to_resets(
    lockstep_envs, batched_policy, lengths, n_steps
):
    collector = RolloutCollector(batched_policy, lockstep_envs(lengths))
    batches, waiting = [], []
    for _ in range(1200 // n_steps):
        batches.append(collector.collect(n_steps * len(lengths)))
        waiting.append(collector.waiting_steps)
    assert max(waiting) < len(lengths) * (4 * n_steps + 64)
    assert collector.dropped_steps == 0
    assert collector.env_step == sum(batch["done"].numel() for batch in batches) + waiting[-1]
    # Each transition is there once, and from the first on none is missing.
    made = cat(batches)["obs"].reshape(-1, 3).long()
    for env, own in enumerate(lengths):
        mine = sorted((int(e), int(t)) for _, e, t in made[made[:, 0] == env].tolist())
        assert mine == expected_lane(own, len(mine))
    # In a lane, rows of one id follow each other, and no lane has an id that another has.
    for batch in batches:
        same = batch["episode_id"][1:] == batch["episode_id"][:-1]
        assert torch.equal(batch["obs"][1:][same], batch["next_obs"][:-1][same])
        ids = [set(lane) for lane in batch["episode_id"].T.tolist()]
        assert len(set().union(*ids)) == sum(map(len, ids))


def assert_whole(episodes):
    for episode in episodes:
        assert episode["obs"][:, 2].tolist() == list(range(len(episode["obs"])))
        assert episode["done"].tolist()[-1]


def test_an_episode_whose_first_rows_were_not_kept_is_not_whole(lockstep_envs, batched_policy):
    collector = RolloutCollector(batched_policy, lockstep_envs([(3,), (20,)]))
    for n_calls in range(20):
        for _ in range(n_calls):
            collector.collect(2)
        assert_whole(collector.collect_episodes(2))


@pytest.mark.parametrize("mode", ["NextStep", "SameStep", "Disabled"])
def test_an_episode_from_which_single_steps_were_taken_is_not_whole(
    lockstep_envs, batched_policy, mode
):
    envs = lockstep_envs([(3,), (5,)], mode)
    collector = RolloutCollector(batched_policy, envs)
    for n_calls in range(1, 9):
        for _ in range(n_calls):
            collector.collect_step()
        assert_whole(collector.collect_episodes(2))


def test_an_episode_that_waited_while_its_lane_was_lent_is_not_whole(lockstep_envs, batched_policy):
    envs = lockstep_envs([(5,), (1000,)])
    collector = RolloutCollector(batched_policy, envs)
    for _ in range(4):
        collector.reset()
        waiting = []
        while waiting[-1:] == sorted(waiting)[-1:]:  # until the first lane is lent
            collector.collect(6)
            waiting.append(collector.waiting_steps)
        assert_whole(collector.collect_episodes(2))


def test_rows_lost_in_a_failure_are_not_lent(lockstep_envs, batched_policy):
    for fails_every in range(186, 199, 3):
        envs = lockstep_envs([(1,), (1,), (900,)], fails_every=fails_every)
        collector = RolloutCollector(batched_policy, envs)
        n_rows = sum(collector.collect(60)["done"].numel() for _ in range(8))
        assert collector.env_step == n_rows + collector.waiting_steps + collector.dropped_steps


def test_a_buffer_links_rows_that_were_placed_in_other_lanes(lockstep_envs, batched_policy):
    buffer = TensorBuffer(20_000, n_step=3, discount=0.5, seed=0)
    collector = RolloutCollector(batched_policy, lockstep_envs([(1,), (5,), (1000,)]))
    for _ in range(400):
        buffer.push(collector.collect(12))
    rows = buffer.sample(4000)
    window = -torch.log2(rows["discount"])
    assert torch.equal(rows["next_obs"][:, 2], rows["obs"][:, 2] + window)
    assert torch.equal(rows["next_obs"][:, :2], rows["obs"][:, :2])
    # Windows are shorter only where an episode ends, and where one was split.
    assert ((window == 3) | rows["done"]).float().mean() > 0.8


def test_lockstep_envs_keep_at_most_their_share_of_extra_episodes(lockstep_envs, batched_policy):
    with lockstep_envs([(2,), (21,)], "SameStep") as envs:
        collector = RolloutCollector(batched_policy, envs)
        first = collector.collect_episodes(2)
        assert sorted(len(episode["done"]) for episode in first) == [2, 21]
        # The short env ended 10 episodes meanwhile: one was handed out, one more kept.
        assert collector.waiting_steps == 2
        assert collector.dropped_steps == 21 - 4
        second = collector.collect_episodes(2)
        short = min(second, key=lambda episode: len(episode["done"]))
        assert short["obs"][0].tolist() == [0.0, 1.0, 0.0]
        assert collector.dropped_steps + collector.waiting_steps + 46 == collector.env_step
