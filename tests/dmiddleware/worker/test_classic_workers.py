"""What serial collectors and evaluators written for DI-engine rely on."""

from __future__ import annotations

import logging
from collections import namedtuple

import numpy as np
import pytest
import torch

from dmiddleware.classic import Policy, as_collect_mode
from dmiddleware.data import as_tree
from dmiddleware.errors import ConfigError
from dmiddleware.rollout import evaluate_episodes
from dmiddleware.rollout.evaluation import VectorEvalMonitor
from dmiddleware.worker.collector import EpisodeSerialCollector, SampleSerialCollector
from dmiddleware.worker.evaluator import InteractionSerialEvaluator, create_serial_evaluator
from dmiddleware.worker.learner import BaseLearner

LENGTHS = [(2,), (3, 5), (4,)]

Collecting = namedtuple(
    "Collecting", ["forward", "process_transition", "get_train_sample", "reset", "get_attribute"]
)
Evaluating = namedtuple("Evaluating", ["forward", "reset"])


def act(data, **kwargs):
    return {env_id: {"action": torch.tensor(0)} for env_id in data}


def transition(obs, output, timestep):
    return {
        "obs": obs,
        "next_obs": timestep.obs,
        "action": output["action"],
        "reward": timestep.reward,
        "done": timestep.done,
    }


def attribute(name):
    if name == "n_sample":
        return 6
    raise KeyError(name)


def foreign_mode():
    return Collecting(act, transition, list, lambda data_id=None: None, attribute)


@pytest.mark.parametrize("collector", [SampleSerialCollector, EpisodeSerialCollector])
def test_a_collector_takes_a_foreign_named_tuple(collector, counting_envs, tmp_path):
    with collector({}, counting_envs(LENGTHS), foreign_mode(), exp_name=str(tmp_path)) as worker:
        collected = worker.collect() if collector is SampleSerialCollector else worker.collect(3)
    is_flat = collector is SampleSerialCollector
    samples = collected if is_flat else [one for episode in collected for one in episode]
    assert len(samples) >= 6
    # The successor of the last step is the final observation, not that of the reset.
    assert all(not torch.equal(one["obs"], one["next_obs"]) for one in samples)


def test_an_evaluator_takes_a_foreign_named_tuple(counting_envs, tmp_path):
    mode = Evaluating(act, lambda data_id=None: None)
    with InteractionSerialEvaluator(
        {"n_episode": 3}, counting_envs(LENGTHS), mode, exp_name=str(tmp_path)
    ) as evaluator:
        assert evaluator.eval()[1]["episode_count"] == 3


def test_a_named_tuple_with_other_functions_is_refused(counting_envs, tmp_path):
    with counting_envs(LENGTHS) as envs, pytest.raises(ConfigError, match="collect_mode"):
        SampleSerialCollector({}, envs, Evaluating(act, None), exp_name=str(tmp_path))


def test_samples_without_a_seed_never_mix_with_seeded_ones(counting_envs, batched_policy, tmp_path):
    with SampleSerialCollector(
        {}, counting_envs(LENGTHS), batched_policy, exp_name=str(tmp_path)
    ) as sampler:
        first = sampler.collect(4)
        assert sampler.n_extra > 0
        seeded = sampler.collect(9, level_seeds=[1, 2, 3])
        assert all("seed" in sample for sample in seeded)
        assert all("seed" not in sample for sample in first)
        assert sampler.dropped_steps > 0


def test_an_evaluator_without_a_type_interacts(counting_envs, batched_policy, tmp_path):
    with create_serial_evaluator(
        {}, env=counting_envs(LENGTHS), policy=batched_policy, exp_name=str(tmp_path)
    ) as evaluator:
        assert type(evaluator) is InteractionSerialEvaluator


def test_the_infos_of_episodes_are_lists_with_their_means(counting_envs, batched_policy, tmp_path):
    with InteractionSerialEvaluator(
        {"n_episode": 3}, counting_envs(LENGTHS), batched_policy, exp_name=str(tmp_path)
    ) as evaluator:
        _, info = evaluator.eval(train_iter=1, envstep=1)
        text = (tmp_path / "log" / "evaluator" / "evaluator_logger.txt").read_text()
    assert info["eval_episode_length"] == [2.0, 3.0, 4.0]
    assert info["eval_episode_length_mean"] == 3.0
    assert info["eval_episode_return"] == info["episode_return"]
    assert info["eval_episode_return_mean"] == pytest.approx(info["return_mean"])
    for name in ("reward_mean", "envstep_count", "avg_envstep_per_episode", "avg_envstep_per_sec"):
        assert name in text


def test_every_episode_is_filmed():
    monitor = VectorEvalMonitor(1, 4, max_frames=2)
    for episode, value in enumerate([5, 1, 9, 3]):
        for _ in range(3):
            monitor.update_video({0: np.full((2, 2, 3), episode, np.uint8)})
        monitor.update_reward(0, value)
    video = monitor.get_video()
    assert video[:, 0, 0, 0, 0].tolist() == [1, 3, 0, 2]
    assert video.shape[1] == 2
    assert not monitor.is_recorded(0)


def test_a_film_ends_after_its_last_frame(batched_policy, counting_envs):
    rendered = []
    with counting_envs(LENGTHS) as envs:

        def render(env_ids):
            rendered.append(list(env_ids))
            return [np.zeros((2, 2, 3), np.uint8) for _ in env_ids]

        envs.render = render
        monitor = evaluate_episodes(batched_policy, envs, 3, max_frames=2)
    assert rendered == [[0, 1, 2], [0, 1, 2]]
    assert monitor.get_video().shape[1] == 2


def test_an_episode_that_a_failure_cuts_off_is_not_part_of_a_film(batched_policy, counting_envs):
    with counting_envs([(3,)], crashes={0: [(1, 1)]}) as envs:

        def render(env_ids):
            return [np.full((2, 2, 3), envs.ready_obs[env][2], np.uint8) for env in env_ids]

        envs.render = render
        monitor = evaluate_episodes(batched_policy, envs, 1, max_frames=9)
        assert envs.restarts == 1
    assert monitor.get_video()[0, :, 0, 0, 0].tolist() == [0, 1, 2]


@pytest.mark.parametrize("log_to_file", [True, False])
def test_workers_write_a_text_log(log_to_file, counting_envs, batched_policy, tmp_path, caplog):
    cfg = {"log_to_file": log_to_file, "collect_print_freq": 1}
    caplog.set_level(logging.WARNING, logger="dmiddleware")
    with SampleSerialCollector(
        cfg, counting_envs(LENGTHS), batched_policy, exp_name=str(tmp_path)
    ) as collector:
        collector.collect(6, train_iter=5)
    file = tmp_path / "log" / "collector" / "collector_logger.txt"
    assert file.exists() == log_to_file
    if log_to_file:
        assert "total_envstep_count" in file.read_text()
    # The program's own handlers get what their level admits.
    assert not caplog.records


def test_a_learner_writes_a_text_log_on_rank_0_only(tmp_path):
    for rank in (0, 1):
        with BaseLearner({}, dist_info=(rank, 2), exp_name=str(tmp_path / str(rank))) as learner:
            learner.info("hello")
    written = [path.relative_to(tmp_path) for path in tmp_path.rglob("*_logger.txt")]
    assert [str(path) for path in written] == ["0/log/learner/learner_logger.txt"]
    assert "hello" in (tmp_path / written[0]).read_text()


def test_a_tree_of_samples_still_reaches_a_foreign_policy():
    mode = as_collect_mode(foreign_mode(), user="test")
    batch = as_tree({"done": torch.tensor([False, True]), "reward": torch.ones(2)})
    assert mode.get_train_sample(batch)["reward"].tolist() == [1.0, 1.0]
    assert mode.get_attribute("batched") is False
    with pytest.raises(KeyError):
        mode.get_attribute("unknown")


@pytest.mark.parametrize("seeds", [[7, 8, 9], {0: 7, 1: 8, 2: 9}, {2: 9, 1: 8, 0: 7}])
def test_level_seeds_are_a_list_or_a_dictionary(seeds, counting_envs, batched_policy, tmp_path):
    with SampleSerialCollector(
        {}, counting_envs(LENGTHS), batched_policy, exp_name=str(tmp_path)
    ) as sampler:
        samples = sampler.collect(9, level_seeds=seeds)
        assert {int(sample["seed"]) for sample in samples} == {7, 8, 9}
        for wrong in ([7, 8], {0: 7, 1: 8}, {0: 7, 1: 8, 3: 9}, 7):
            with pytest.raises(ConfigError, match="level_seeds"):
                sampler.collect(9, level_seeds=wrong)


class Shaping(Policy):
    """Acts per env, and shapes the rewards of finished episodes."""

    def _forward_collect(self, data, **kwargs):
        return act(data)

    def reward_shaping(self, transitions):
        for transition in transitions:
            transition["reward"] = torch.tensor(float(len(transitions)))


class Replacing(Shaping):
    def reward_shaping(self, transitions):
        return [{**one, "reward": torch.tensor(float(len(transitions)))} for one in transitions]


@pytest.mark.parametrize("cls", [Shaping, Replacing])
@pytest.mark.parametrize("get_train_sample", [True, False])
def test_a_policy_shapes_the_rewards_of_finished_episodes(
    cls, get_train_sample, counting_envs, tmp_path
):
    policy = cls({}, model=torch.nn.Identity(), enable_field=["collect"])
    cfg = {"reward_shaping": True, "get_train_sample": get_train_sample}
    with EpisodeSerialCollector(
        cfg, counting_envs([(2,), (3,), (4,)]), policy, exp_name=str(tmp_path)
    ) as collector:
        collected = collector.collect(3)
    samples = collected if get_train_sample else [one for episode in collected for one in episode]
    assert sorted(float(one["reward"]) for one in samples) == [2.0] * 2 + [3.0] * 3 + [4.0] * 4


def test_reward_shaping_without_a_hook_names_it(counting_envs, batched_policy, tmp_path):
    for policy in (batched_policy, foreign_mode()):
        with (
            EpisodeSerialCollector(
                {"reward_shaping": True}, counting_envs(LENGTHS), policy, exp_name=str(tmp_path)
            ) as collector,
            pytest.raises(ConfigError, match=r"reward_shaping\(transitions\)"),
        ):
            collector.collect(3)


def test_an_evaluation_returns_texts_and_arrays_of_infos(counting_envs, batched_policy, tmp_path):
    with InteractionSerialEvaluator(
        {"n_episode": 3}, counting_envs(LENGTHS), batched_policy, exp_name=str(tmp_path)
    ) as evaluator:
        info = evaluator.eval()[1]
    assert all(isinstance(value, list | float | int) for value in info.values())
