from __future__ import annotations

import dataclasses
import itertools
import logging

import pytest
import torch

from dmiddleware.classic import as_collect_mode, collate
from dmiddleware.classic.policy_config import ClassicSettings
from dmiddleware.data import load_checkpoint, save_checkpoint
from dmiddleware.errors import ConfigError, PolicyOutputError, RegistryError
from dmiddleware.rl import RewardNormalizer
from dmiddleware.worker.collector import (
    EpisodeSerialCollector,
    ISerialCollector,
    SampleSerialCollector,
    create_serial_collector,
    get_serial_collector_cls,
    to_tensor_transitions,
)

LENGTHS = [(5,), (3, 7), (4, 2, 9)]


@pytest.fixture
def sampler(counting_envs, batched_policy, tmp_path):
    collector = SampleSerialCollector(
        {}, counting_envs(LENGTHS), batched_policy.collect_mode, exp_name=str(tmp_path)
    )
    with collector:
        yield collector


@pytest.fixture
def episoder(counting_envs, batched_policy, tmp_path):
    collector = EpisodeSerialCollector(
        {}, counting_envs(LENGTHS), batched_policy.collect_mode, exp_name=str(tmp_path)
    )
    with collector:
        yield collector


def place(transition):
    return tuple(int(value) for value in transition["obs"])


def record_trajectories(collector):
    """Record the trajectories that get_train_sample receives, in the returned list."""
    trajectories = []

    def get_train_sample(transitions):
        trajectories.append([place(transition) for transition in transitions])
        return transitions

    collector.reset_policy(collector.policy._replace(get_train_sample=get_train_sample))
    return trajectories


def test_exactly_n_samples_are_returned_and_the_rest_is_kept(sampler):
    first = sampler.collect(10)
    assert len(first) == 10
    kept = sampler.n_extra
    second = sampler.collect(11)
    assert len(second) == 11
    places = [place(sample) for sample in first + second]
    assert kept > 0
    assert len(set(places)) == 21
    for env in range(3):
        mine = [p[1:] for p in places if p[0] == env]
        assert mine == sorted(mine)
        assert mine[0] == (0, 0)


def test_extra_samples_are_returned_without_drop_extra(sampler):
    samples = sampler.collect(10, drop_extra=False)
    assert len(samples) == 11
    assert sampler.n_extra == 0


def test_trajectories_end_with_the_episode_or_at_the_trajectory_length(sampler):
    trajectories = record_trajectories(sampler)
    sampler.collect(12)  # an even share of four each
    assert trajectories == [
        [(1, 0, 0), (1, 0, 1), (1, 0, 2)],
        [(0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 0, 3)],
        [(2, 0, 0), (2, 0, 1), (2, 0, 2), (2, 0, 3)],
        [(0, 0, 4)],
    ]


def test_transitions_are_gathered_across_calls(sampler):
    trajectories = record_trajectories(sampler)
    for _ in range(30):
        sampler.collect(6)  # two per env, but episodes have odd lengths
    for trajectory in trajectories:
        firsts = trajectory[0]
        assert trajectory == [(*firsts[:2], firsts[2] + i) for i in range(len(trajectory))]
        assert len(trajectory) <= 2
    places = [p for trajectory in trajectories for p in trajectory]
    assert len(set(places)) == len(places)
    for env in range(3):
        mine = sorted(p[1:] for p in places if p[0] == env)
        lengths = LENGTHS[env]
        expected = [
            (e, t) for e in range(mine[-1][0] + 1) for t in range(lengths[e % len(lengths)])
        ]
        assert mine == expected[: len(mine)]


def test_samples_collected_before_an_error_are_returned_later(
    counting_envs, batched_policy, tmp_path
):
    mode, envs = batched_policy.collect_mode, counting_envs([(9,), (9,)])
    with SampleSerialCollector({}, envs, mode, exp_name=str(tmp_path)) as collector:
        samples = collector.collect(3)
        assert collector.n_extra == 1
        with pytest.raises(ArithmeticError):
            collector.collect(6, policy_kwargs={"fail_at": 4})
        samples += collector.collect(3)
        samples += collector.collect(collector.n_extra)
    expected = [(env, 0, t) for env in range(2) for t in range(5)]
    assert sorted(place(sample) for sample in samples) == expected


def test_a_policy_may_require_whole_episodes(counting_envs, batched_policy, tmp_path):
    mode = as_collect_mode(batched_policy, user="test")
    whole = dataclasses.replace(mode.spec, settings=ClassicSettings({"traj_len_inf": True}))
    with SampleSerialCollector(
        {}, counting_envs(LENGTHS), mode._replace(spec=whole), exp_name=str(tmp_path)
    ) as collector:
        trajectories = record_trajectories(collector)
        collector.collect(12)
    assert all(trajectory[0][2] == 0 for trajectory in trajectories)
    assert {len(trajectory) for trajectory in trajectories} <= {5, 3, 7, 4, 2, 9}


def test_envs_in_lockstep_keep_their_trajectories_apart(lockstep_envs, batched_policy, tmp_path):
    lengths = [(1,), (5,), (300,)]
    envs = lockstep_envs(lengths)
    mode = batched_policy.collect_mode
    with SampleSerialCollector({}, envs, mode, exp_name=str(tmp_path)) as collector:
        trajectories = record_trajectories(collector)
        for _ in range(100):
            collector.collect(8)
        assert collector.state_dict()["rollout"]["store"]["rows"] == {}
    for env, (length,) in enumerate(lengths):
        mine = [one for one in trajectories if one[0][0] == env]
        rows = [row for one in mine for row in one]
        assert all(row[0] == env for row in rows)
        assert [row[1:] for row in rows] == [divmod(n, length) for n in range(len(rows))]


def test_a_failed_env_loses_its_gathered_transitions(counting_envs, batched_policy, tmp_path):
    with SampleSerialCollector(
        {},
        counting_envs([(9,), (9,)], {0: [(0, 3)]}),
        batched_policy.collect_mode,
        exp_name=str(tmp_path),
    ) as collector:
        trajectories = record_trajectories(collector)
        collector.collect(8)
        assert collector.dropped_steps == 3
    assert trajectories[0] == [(1, 0, 0), (1, 0, 1), (1, 0, 2), (1, 0, 3)]
    assert [p[1:] for p in trajectories[1]][:2] == [(100, 0), (100, 1)]


def test_transitions_are_tensors_with_collect_iter_and_seed(sampler):
    sample = sampler.collect(6, train_iter=7, level_seeds=[11, 12, 13])[0]
    assert sample["collect_iter"].item() == 7
    assert sample["seed"].item() == 11 + place(sample)[0]
    assert {key: value.dtype for key, value in sample.items()} == {
        "obs": torch.float32,
        "next_obs": torch.float32,
        "action": torch.int64,
        "memory": torch.int64,
        "reward": torch.float32,
        "done": torch.bool,
        "terminated": torch.bool,
        "truncated": torch.bool,
        "episode_id": torch.int64,
        "collect_iter": torch.int64,
        "seed": torch.int64,
    }


def test_level_seeds_need_one_seed_per_env(sampler):
    with pytest.raises(ConfigError, match="list of 3 seeds"):
        sampler.collect(6, level_seeds=[1, 2])
    with pytest.raises(ConfigError, match="list of 3 seeds"):
        sampler.collect(6, level_seeds=7)


@pytest.mark.parametrize("deepcopy_obs", [False, True])
def test_consecutive_transitions_share_observations_unless_deepcopy_obs(
    counting_envs, batched_policy, tmp_path, deepcopy_obs
):
    with EpisodeSerialCollector(
        {"deepcopy_obs": deepcopy_obs},
        counting_envs([(4,)]),
        batched_policy.collect_mode,
        exp_name=str(tmp_path),
    ) as collector:
        (episode,) = collector.collect(1)
    for before, after in itertools.pairwise(episode):
        assert torch.equal(before["next_obs"], after["obs"])
        shared = before["next_obs"].data_ptr() == after["obs"].data_ptr()
        assert shared != deepcopy_obs
    assert place({"obs": episode[-1]["next_obs"]}) == (0, 0, 4)


def test_observations_can_be_converted_to_float32(counting_envs, tmp_path):
    import gymnasium as gym
    import numpy as np

    from dmiddleware.env import make_env_manager
    from dmiddleware.policy import Policy

    seen = []

    class Seeing(Policy):
        def learn(self, batch):
            return {}

        def act_collect(self, obs, env_id, **kwargs):
            seen.append(obs.dtype)
            return {"action": torch.zeros(len(env_id), dtype=torch.int64)}

        def act_eval(self, obs, env_id, **kwargs):
            return {}

        def check_spaces(self, observation_space, action_space):
            pass

    class Bytes(gym.Env):
        observation_space = gym.spaces.Box(0, 255, (2,), np.uint8)
        action_space = gym.spaces.Discrete(2)

        def reset(self, *, seed=None, options=None):
            return np.zeros(2, np.uint8), {}

        def step(self, action):
            return np.ones(2, np.uint8), 0.0, False, False, {}

    policy = Seeing({}, torch.nn.Linear(1, 1))
    for transform, dtype in ((False, torch.uint8), (True, torch.float32)):
        with SampleSerialCollector(
            {"transform_obs": transform},
            make_env_manager(Bytes, env_num=1),
            policy.collect_mode,
            exp_name=str(tmp_path),
        ) as collector:
            samples = collector.collect(2)
        assert seen[-1] == dtype
        assert {sample[key].dtype for sample in samples for key in ("obs", "next_obs")} == {dtype}


def test_the_total_env_steps_are_counted_and_can_be_set(sampler):
    mode, n_actions = sampler.policy, []

    def forward(obs, **kwargs):
        n_actions.append(len(obs))
        return mode.forward(obs, **kwargs)

    sampler.reset_policy(mode._replace(forward=forward))
    sampler.collect(12, drop_extra=False)
    assert sampler.envstep == sum(n_actions)
    sampler.envstep = 1000
    sampler.collect(12)
    assert sampler.envstep > 1000


def test_statistics_are_logged_every_collect_print_freq_iterations(
    counting_envs, batched_policy, tmp_path, caplog
):
    caplog.set_level(logging.INFO)
    with SampleSerialCollector(
        {"collect_print_freq": 10},
        counting_envs(LENGTHS),
        batched_policy.collect_mode,
        exp_name=str(tmp_path),
    ) as collector:
        for train_iter in range(0, 31, 3):
            collector.collect(12, train_iter=train_iter)
    logged = [record.message for record in caplog.records]
    assert len(logged) == 2
    assert "iteration 12" in logged[0]
    assert "iteration 24" in logged[1]
    for word in ("reward_mean", "avg_envstep_per_sec", "total_episode_count", "extra_sample"):
        assert word in logged[0]
    assert list((tmp_path / "log" / "collector").glob("events*"))


def test_random_collecting_can_be_left_out_of_the_logs(
    counting_envs, batched_policy, tmp_path, caplog
):
    caplog.set_level(logging.INFO)
    with SampleSerialCollector(
        {"collect_print_freq": 1},
        counting_envs(LENGTHS, seed=0),
        batched_policy.collect_mode,
        exp_name=str(tmp_path),
    ) as collector:
        collector.collect(60, train_iter=5, random_collect=True, record_random_collect=False)
        assert not caplog.records
        steps = collector.envstep
        assert steps >= 60
        collector.collect(12, train_iter=5)
        (record,) = caplog.records
    assert f"{steps}" not in record.message.split("\n")[2].split()


def test_whole_episodes_are_spread_over_the_envs(episoder):
    episodes = episoder.collect(7)
    assert [sum(place(e[0])[0] == env for e in episodes) for env in range(3)] == [3, 2, 2]
    for episode in episodes:
        assert [place(t)[2] for t in episode] == list(range(len(episode)))
        assert bool(episode[-1]["done"])
    assert episoder.envstep == sum(len(episode) for episode in episodes)


def test_episodes_can_be_turned_into_samples(counting_envs, batched_policy, tmp_path):
    with EpisodeSerialCollector(
        {"get_train_sample": True},
        counting_envs(LENGTHS),
        batched_policy.collect_mode,
        exp_name=str(tmp_path),
    ) as collector:
        mode = as_collect_mode(batched_policy, user="test")
        collector.reset_policy(mode._replace(get_train_sample=lambda data: data[:1]))
        samples = collector.collect(3)
    assert [place(sample) for sample in samples] == [(1, 0, 0), (2, 0, 0), (0, 0, 0)]


def test_a_policy_that_never_makes_samples_is_refused(sampler):
    sampler.reset_policy(sampler.policy._replace(get_train_sample=lambda data: []))
    with pytest.raises(PolicyOutputError, match="get_train_sample returned an empty list"):
        sampler.collect(1)


def test_trajectories_without_samples_are_skipped(sampler):
    def get_train_sample(transitions):
        return transitions if place(transitions[0])[0] == 2 else []

    sampler.reset_policy(sampler.policy._replace(get_train_sample=get_train_sample))
    assert {place(sample)[0] for sample in sampler.collect(8)} == {2}


@pytest.mark.parametrize(
    ("cls", "name"), [(SampleSerialCollector, "n_sample"), (EpisodeSerialCollector, "n_episode")]
)
def test_a_missing_target_is_named(counting_envs, batched_policy, tmp_path, cls, name):
    with cls(
        {}, counting_envs(LENGTHS), batched_policy.collect_mode, exp_name=str(tmp_path)
    ) as collector:
        with pytest.raises(ConfigError, match=rf"collect\({name}="):
            collector.collect()
        for target in (0, 2.5, "2", True):
            with pytest.raises(ConfigError, match=f"{name} must be a positive integer"):
                collector.collect(target)


def test_the_target_defaults_to_the_policys(counting_envs, batched_policy, tmp_path):
    mode = as_collect_mode(batched_policy, user="test")
    settings = ClassicSettings({"collect": {"n_sample": 5}})
    spec = dataclasses.replace(mode.spec, settings=settings)
    with SampleSerialCollector(
        {},
        counting_envs(LENGTHS),
        mode._replace(spec=spec),
        exp_name=str(tmp_path),
    ) as collector:
        assert len(collector.collect()) == 5


def test_reset_takes_other_envs_and_launches_them(sampler, counting_envs):
    sampler.collect(7)
    other = counting_envs([(5,)])
    sampler.reset_env(other)
    assert sampler.env is other
    assert not other.closed
    assert sampler.n_extra == 0
    assert [place(sample) for sample in sampler.collect(2)] == [(0, 0, 0), (0, 0, 1)]
    sampler.reset_env()
    assert place(sampler.collect(1)[0]) == (0, 1, 0)


def test_reset_policy_without_a_policy_clears_the_state(sampler, batched_policy):
    sampler.collect(3)
    batched_policy.resets.clear()
    sampler.reset_policy()
    assert batched_policy.resets == [None]


@pytest.mark.parametrize("resumable", [True, False])
def test_collecting_continues_from_a_saved_state(
    counting_envs, batched_policy, tmp_path, resumable
):
    def make():
        return SampleSerialCollector(
            {},
            counting_envs(LENGTHS, resumable=resumable),
            batched_policy.collect_mode,
            exp_name=str(tmp_path / "run"),
        )

    with make() as one, make() as other:
        one.collect(10, train_iter=3)
        assert one.n_extra == 1
        save_checkpoint(tmp_path / "state.safetensors", one.state_dict())
        other.load_state_dict(load_checkpoint(tmp_path / "state.safetensors"))
        assert (other.envstep, other.n_extra) == (one.envstep, one.n_extra)
        mine, theirs = (
            [place(sample) for sample in collector.collect(10)] for collector in (one, other)
        )
        # After the extra sample, envs that cannot be restored start fresh episodes.
        assert mine[0] == theirs[0]
        assert (mine == theirs) == resumable
        assert (other.dropped_steps > one.dropped_steps) == (not resumable)


def test_a_missing_argument_is_named(batched_policy):
    with pytest.raises(ConfigError, match="no policy"):
        SampleSerialCollector().collect(3)
    with pytest.raises(ConfigError, match="no envs"):
        SampleSerialCollector(policy=batched_policy.collect_mode).collect(3)


@pytest.mark.parametrize("cls", [SampleSerialCollector, EpisodeSerialCollector])
def test_a_policy_is_accepted_as_its_collect_mode(counting_envs, batched_policy, tmp_path, cls):
    with cls({}, counting_envs(LENGTHS), batched_policy, exp_name=str(tmp_path)) as collector:
        assert collector.policy.spec is batched_policy.spec
        collector.reset_policy(batched_policy)
        assert collector.policy.spec is batched_policy.spec
        assert collector.collect(3)


def test_an_argument_of_the_wrong_type_is_rejected(batched_policy, sampler):
    with pytest.raises(ConfigError, match="make_env_manager"):
        SampleSerialCollector({}, "CartPole-v1", batched_policy)
    with pytest.raises(ConfigError, match="collect_mode"):
        SampleSerialCollector({}, policy=batched_policy.eval_mode)
    with pytest.raises(ConfigError, match="SummaryWriter"):
        SampleSerialCollector({}, policy=batched_policy, tb_logger="runs/x")
    with pytest.raises(ConfigError, match="make_env_manager"):
        sampler.reset_env("CartPole-v1")
    with pytest.raises(ConfigError, match="collect_mode"):
        sampler.reset_policy("dqn")


@pytest.mark.parametrize("answer", [None, [1.0], torch.zeros(3)])
@pytest.mark.parametrize("method", ["_process_transition", "_get_train_sample"])
def test_a_policy_that_returns_no_transition_or_sample_is_rejected(
    counting_envs, per_env_policy, tmp_path, monkeypatch, method, answer
):
    policy = per_env_policy
    monkeypatch.setattr(type(policy), method, lambda *arguments: answer)
    with (
        SampleSerialCollector({}, counting_envs(LENGTHS), policy, exp_name=str(tmp_path)) as one,
        pytest.raises(PolicyOutputError, match=method),
    ):
        one.collect(3)


def test_reward_norm_follows_the_return_of_each_env(sampler):
    samples = [sample for _ in range(5) for sample in sampler.collect(12)]
    returns, running = [], {}
    for one in samples:
        episode = int(one["episode_id"])
        running[episode] = 0.9 * running.get(episode, 0.0) + float(one["reward"])
        returns.append(running[episode])
    normalizer = RewardNormalizer(discount=0.9)
    # One lane, in the order in which the trajectories were collected.
    columns = (collate(samples)[key][:, None] for key in ("reward", "done", "episode_id"))
    normalizer.update(*columns)
    assert normalizer.std == pytest.approx(torch.tensor(returns).std(correction=0).item(), rel=1e-3)


def test_collectors_are_created_by_name():
    assert get_serial_collector_cls({"type": "episode"}) is EpisodeSerialCollector
    collector = create_serial_collector({"type": "sample", "collect_print_freq": 5})
    assert isinstance(collector, SampleSerialCollector)
    with pytest.raises(RegistryError, match="sample"):
        create_serial_collector({"type": "samples"})
    with pytest.raises(ConfigError, match="collect_print_freq"):
        create_serial_collector({"type": "sample", "collect_print_frequency": 5})
    with pytest.raises(ConfigError, match="collect_print_freq must be"):
        create_serial_collector({"type": "sample", "collect_print_freq": 0})


def test_defaults_are_those_of_the_classic_collectors():
    assert dict(ISerialCollector.default_config()) == {
        "deepcopy_obs": False,
        "transform_obs": False,
        "collect_print_freq": 100,
        "log_to_file": True,
        "cfg_type": "ISerialCollectorDict",
    }
    assert EpisodeSerialCollector.default_config().get_train_sample is False


def test_transitions_become_tensors_and_share_their_observations():
    import numpy as np

    data = [
        {
            "obs": np.full(2, i, np.float64),
            "next_obs": np.full(2, i + 1, np.float64),
            "reward": 1.5,
            "done": i == 1,
            "action": i,
            "level": np.uint8(i),
            "lost": np.bool_(False),
            "extra": {"mask": np.ones(2, bool)},
            "name": "kept",
        }
        for i in range(3)
    ]
    shared = to_tensor_transitions(data)
    assert shared[0]["next_obs"] is shared[1]["obs"]
    assert shared[1]["next_obs"] is not shared[2]["obs"]  # the episode ends between them
    assert shared[2]["next_obs"].tolist() == [3.0, 3.0]
    assert shared[0]["obs"].dtype == torch.float32
    for name in ("reward", "action", "done", "level", "lost"):
        assert type(shared[1][name]) is type(data[1][name])
        assert shared[1][name] == data[1][name]
    assert shared[0]["extra"]["mask"].dtype == torch.bool
    assert shared[0]["name"] == "kept"
    apart = to_tensor_transitions(data, shallow_copy_next_obs=False)
    assert apart[0]["next_obs"] is not apart[1]["obs"]
    assert apart[0]["next_obs"].tolist() == [1.0, 1.0]


class EveryOther(ISerialCollector):
    """Written against the interface only, with the methods that it names."""

    def __init__(self, cfg=None, env=None, policy=None, **kwargs):
        self._given, self._steps_made = (env, policy), 0

    def reset_env(self, _env=None):
        self._given = (_env or self._given[0], self._given[1])

    def reset_policy(self, _policy=None):
        self._given = (self._given[0], _policy or self._given[1])

    def reset(self, _policy=None, _env=None):
        self.reset_env(_env)
        self.reset_policy(_policy)

    def collect(self, target=None, **kwargs):
        self._steps_made += target
        return list(range(0, target, 2))

    @property
    def envstep(self):
        return self._steps_made

    def close(self):
        self._given = (None, None)


def test_a_collector_is_written_with_the_methods_of_the_interface():
    with EveryOther({}, "envs", "policy") as collector:
        assert collector.collect(5) == [0, 2, 4]
        assert collector.envstep == 5
        collector.reset(_env="others")


def test_a_collector_of_ones_own_may_use_what_the_interface_keeps(
    counting_envs, batched_policy, tmp_path
):
    class Peeking(ISerialCollector):
        reset_policy = reset = lambda self, *args, **kwargs: None

        def collect(self, target=None, **kwargs):
            self.env.launch()
            return self.policy.forward(self.env.ready_obs)

    envs = counting_envs(LENGTHS)
    with Peeking({}, envs, batched_policy, exp_name=str(tmp_path)) as collector:
        assert collector.collect()["action"].shape == (3,)
        assert collector.envstep == 0
    assert envs.closed
