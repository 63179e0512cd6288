import contextlib
import sys

import numpy as np
import pytest
from optional import needed, skip_without

from dmiddleware.env import EnvPoolManager, make_env_manager
from dmiddleware.errors import ConfigError, EnvStateError, RegistryError, StructureError
from dmiddleware.policy import DQNPolicy
from dmiddleware.rollout import RolloutCollector, evaluate_episodes
from dmiddleware.seeding import derive_seed

skip_without("envpool")
IDS = ["Pong-v5", "HalfCheetah-v4", "LunarLander-v2", "CheetahRun-v1"]


def managed(env="CartPole-v1", env_num=3, **kwargs):
    kwargs = {"seed": 0, **kwargs}
    return make_env_manager(env, env_num=env_num, backend="envpool", **kwargs)


def lean(obs):
    """Choose actions that keep a pole up for a while."""
    return (obs[:, 2] > 0).astype(np.int64)


def by_env(rows, env_num):
    return [[row for env_id, row in rows if env_id == wanted] for wanted in range(env_num)]


def literal_rows(seeds, n_steps, **options):
    """Step EnvPool itself, and leave out the rows of the steps in which it resets."""
    pool = needed("envpool").make(
        "CartPole-v1", env_type="gymnasium", num_envs=len(seeds), seed=seeds, **options
    )
    obs, _ = pool.reset()
    over = np.zeros(len(seeds), bool)
    for _ in range(n_steps):
        next_obs, reward, terminated, truncated, _ = pool.step(lean(obs))
        for env in np.flatnonzero(~over):
            row = (obs[env], next_obs[env], reward[env], terminated[env], truncated[env])
            yield int(env), [np.asarray(part).tolist() for part in row]
        over, obs = terminated | truncated, next_obs


@pytest.mark.filterwarnings("ignore:.*precision lowered:UserWarning")  # of the bare EnvPool
@pytest.mark.parametrize("limit", [12, 500])
def test_transitions_are_those_of_envpool_without_its_reset_steps(limit):
    options = {"max_episode_steps": limit}
    rows = []
    with managed(env_kwargs=options, env_num=4) as manager:
        for _ in range(150):
            obs = manager.ready_obs
            step = manager.step(lean(obs))
            assert step.is_full
            for row in range(4):
                parts = (obs, step.next_obs, step.reward, step.terminated, step.truncated)
                rows.append((row, [part[row].tolist() for part in parts]))
            assert manager.ready_obs is step.ready_obs
        assert min(manager.episode_counts) > 0
    seeds = [derive_seed(0, env_id) for env_id in range(4)]
    expected = by_env(literal_rows(seeds, 150, **options), 4)
    for own, literal in zip(by_env(rows, 4), expected, strict=True):
        assert own[: len(literal)] == literal


def test_the_last_info_has_the_return_and_length_of_the_episode():
    with managed(env_kwargs={"max_episode_steps": 10}) as manager:
        steps = [manager.step(lean(manager.ready_obs)) for _ in range(10)]
        last = steps[-1]
        assert last.truncated.all()
        assert not last.terminated.any()
        assert last.info["eval_episode_return"].tolist() == [10, 10, 10]
        assert last.info["eval_episode_length"].tolist() == [10, 10, 10]
        assert last.info["elapsed_step"].tolist() == [10, 10, 10]
        assert manager.ready_info["elapsed_step"].tolist() == [0, 0, 0]
        assert "eval_episode_return" not in steps[0].info
        assert "env_id" not in last.info
        assert (last.ready_obs != last.next_obs).any(axis=1).all()
        assert manager.step(lean(manager.ready_obs)).info["elapsed_step"].tolist() == [1, 1, 1]


@pytest.mark.parametrize("env", IDS)
def test_seeded_envs_play_the_same_episodes_again(env):
    def play():
        with managed(env, env_num=2, env_kwargs={"max_episode_steps": 4}) as manager:
            steps = [manager.step(manager.sample_actions()) for _ in range(6)]
            return np.stack([step.reward for step in steps]), manager.ready_obs

    (rewards, obs), (again, obs_again) = play(), play()
    assert rewards.tolist() == again.tolist()
    np.testing.assert_equal(obs, obs_again)


def test_each_env_has_its_own_seed():
    with managed(seed=[5, 6, 7]) as manager:
        first = manager.ready_obs
        manager.seed([7, 5, 6])
        manager.reset()
        np.testing.assert_array_equal(manager.ready_obs, first[[2, 0, 1]])
        manager.reset()
        assert (manager.ready_obs != first[[2, 0, 1]]).any(axis=1).all()


def test_envs_without_a_seed_differ_from_run_to_run():
    firsts = []
    for _ in range(2):
        with managed(seed=None) as manager:
            firsts.append(manager.ready_obs)
    assert (firsts[0] != firsts[1]).all()


def test_some_envs_can_be_stepped_and_reset_without_the_others():
    with managed() as manager, managed() as alone:
        for _ in range(4):
            step = manager.step({2: 1, 0: 1})
            assert step.env_id.tolist() == [2, 0]
            assert not step.is_full
        expected = [alone.step(np.ones(3, int)) for _ in range(4)][-1]
        np.testing.assert_array_equal(step.next_obs, expected.next_obs[[2, 0]])
        np.testing.assert_array_equal(manager.ready_obs[[2, 0]], step.next_obs)
        assert manager.episode_lengths == [4, 0, 4]
        assert manager.ready_info["elapsed_step"].tolist() == [4, 0, 4]
        manager.reset([2])
        assert manager.episode_lengths == [4, 0, 0]
        assert manager.ready_info["elapsed_step"].tolist() == [4, 0, 0]
        assert manager.ready_obs[0].tolist() == step.next_obs[1].tolist()
        assert manager.ready_obs[2].tolist() != step.next_obs[0].tolist()


def test_an_episode_that_ends_in_a_partial_step_starts_again():
    with managed(env_kwargs={"max_episode_steps": 3}) as manager:
        steps = [manager.step({1: 1}) for _ in range(3)]
        assert steps[-1].done.tolist() == [True]
        assert steps[-1].info["eval_episode_length"].tolist() == [3]
        assert manager.ready_info["elapsed_step"].tolist() == [0, 0, 0]
        np.testing.assert_array_equal(manager.ready_obs[[1]], steps[-1].ready_obs)
        assert manager.episode_counts == [0, 1, 0]


def test_unknown_ids_and_bad_options_are_refused_at_once():
    with pytest.raises(RegistryError, match="CartPole-v1"):
        managed("CartPole-v7")
    with pytest.raises(ConfigError, match="speed"):
        managed(env_kwargs={"speed": 3})
    with pytest.raises(ConfigError, match="num_envs"):
        managed(env_kwargs={"num_envs": 3})
    for options in ({"mode": "async"}, {"wrappers": [lambda env: env]}):
        with pytest.raises(ConfigError, match="backend"):
            managed(**options)
    with pytest.raises(ConfigError, match="backend"):
        managed(lambda: None)
    with pytest.raises(ConfigError, match="backend"):
        make_env_manager("CartPole-v1", env_num=1, backend="other")
    with pytest.raises(ConfigError, match="dynamic_seed"):
        managed().seed(0, dynamic_seed=False)


def test_without_envpool_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "envpool", None)
    with pytest.raises(ConfigError, match=r"dmiddleware\[envpool\]"):
        managed()


def test_bad_actions_are_refused_before_any_env_steps():
    with managed() as manager:
        for actions in (np.full(3, 2), np.full(3, -1), np.zeros(2, int), {}, {5: 0}):
            with pytest.raises(StructureError):
                manager.step(actions)
        assert manager.episode_lengths == [0, 0, 0]


def test_spaces_are_known_before_launch_and_have_true_bounds():
    manager = managed("LunarLander-v2")
    assert type(manager) is EnvPoolManager
    assert manager.closed
    assert manager.observation_space.low.tolist() == [-np.inf] * 8
    assert manager.action_space.n == 4
    with pytest.raises(EnvStateError, match="launch"):
        manager.step(np.zeros(3, int))
    assert managed("CheetahRun-v1").observation_space["position"].low.tolist() == [-np.inf] * 8


def test_images_are_rendered_of_the_chosen_envs():
    with managed(env_kwargs={"render_mode": "rgb_array"}) as manager:
        frames = manager.render([2, 0])
        assert [frame.shape for frame in frames] == [(400, 600, 3)] * 2
        assert len(manager.render()) == 3
    with managed() as manager, pytest.raises(EnvStateError, match="render_mode"):
        manager.render()


def test_a_restored_manager_starts_new_episodes():
    with managed() as manager:
        for _ in range(5):
            manager.step(lean(manager.ready_obs))
        assert not manager.resumable
        state = manager.state_dict()
        first = managed()
    with first:
        before = first.ready_obs
        assert first.load_state_dict(state) is False
        assert (first.ready_obs != before).any(axis=1).all()
        assert first.restarts == 0


def test_an_error_in_envpool_closes_the_manager(monkeypatch):
    manager = managed().__enter__()
    with contextlib.closing(manager), pytest.raises(KeyboardInterrupt):

        def interrupt(*args):
            raise KeyboardInterrupt

        pool = needed("envpool").make("CartPole-v1", env_type="gymnasium", num_envs=1)
        monkeypatch.setattr(type(pool), "step", interrupt)
        manager.step(np.zeros(3, int))
    assert manager.closed


def test_a_policy_collects_and_is_evaluated():
    with managed(env_num=8) as manager:
        model = {"encoder_hidden_sizes": [16]}
        policy = DQNPolicy.for_env(manager, seed=0, model=model)
        collector = RolloutCollector(policy, manager)
        batch = collector.collect(512, policy_kwargs={"eps": 0.5})
        assert batch["obs"].shape == (64, 8, 4)
        assert collector.env_episode == sum(manager.episode_counts) > 0
        returns = evaluate_episodes(policy, manager, 10).get_episode_return()
        assert len(returns) == 10
        assert all(one > 0 for one in returns)
