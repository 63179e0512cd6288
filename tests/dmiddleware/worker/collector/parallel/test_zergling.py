"""Parallel collectors with one policy."""

import json
import threading

import gymnasium as gym
import pytest
import torch

from dmiddleware.errors import ConfigError, RegistryError, WaitTimeout
from dmiddleware.policy import POLICY_REGISTRY, Policy
from dmiddleware.worker import (
    BaseParallelCollector,
    ZerglingParallelCollector,
    create_parallel_collector,
    get_parallel_collector_cls,
)
from tests.dmiddleware.counting_env import CountingEnv
from tests.variants import mostly_slow


def test_a_task_is_done_when_every_env_has_played_its_episodes(run):
    collector, around = run(env={"kwargs": {"lengths": (3, 7)}, "env_num": 3})
    assert [info["collector_done"] for info in around.infos] == [False, True]
    assert around.infos[-1]["cur_episode"] == 6
    assert around.infos[-1]["cur_step"] == 3 * (3 + 7)
    assert collector.env_manager.closed


def test_envs_that_have_played_their_episodes_wait_for_the_others(run):
    class Uneven(CountingEnv):
        made = 0

        def __init__(self):
            Uneven.made += 1
            super().__init__(Uneven.made, (2 * Uneven.made,))

    gym.register("Uneven-v0", Uneven)
    try:
        _, around = run(env={"id": "Uneven-v0", "kwargs": {}, "manager": {"episode_num": 3}})
    finally:
        gym.registry.pop("Uneven-v0")
    lengths = {int(sample["obs"][0]): 0 for sample in around.data.values()}
    for sample in around.data.values():
        lengths[int(sample["obs"][0])] += 1
    assert [lengths[index] for index in sorted(lengths)] == [3 * 2, 3 * 4]


def test_steps_of_finished_envs_in_lockstep_are_not_counted(run):
    collector, _ = run(
        env={"id": "CartPole-v1", "kwargs": {}, "mode": "vector", "env_num": 3, "seed": 1}
    )
    info = collector.get_finish_info()
    assert info["real_episode_count"] == 6
    assert info["step_count"] == info["sample_count"] == sum(info["reward_raw"])


def test_each_sample_is_stored_before_it_is_announced(run):
    _, around = run()
    ids = [one["data_id"] for one in around.metadata]
    assert len(set(ids)) == len(ids) == 2 * 2 * 5
    for data_id in ids:
        stored = around.tape.index(("data", data_id))
        kind, metadata = around.tape[stored + 1]
        assert (kind, metadata["data_id"]) == ("metadata", data_id)
        assert metadata["object_ref"] == f"ref/{data_id}"


def test_metadata_has_the_classic_keys_and_is_plain(run):
    _, around = run(compressor="zlib")
    first = around.metadata[0]
    assert set(first) == {
        "data_id", "env_id", "policy_iter", "unroll_len", "compressor", "get_data_time",
        "priority", "eval_flag", "cur_episode", "cur_sample", "cur_step", "object_ref",
        "collect_iter",
    }  # fmt: skip
    assert first["collect_iter"] == first["policy_iter"] == 1
    assert first["data_id"].startswith(f"env_{first['env_id']}_")
    assert first["priority"] == 1.0
    assert first["compressor"] == "zlib"
    assert [one["cur_sample"] for one in around.metadata] == list(range(1, 21))
    assert json.loads(json.dumps(around.metadata)) == around.metadata


def test_infos_have_the_classic_keys_and_follow_each_episodes_end(run):
    _, around = run(env={"env_num": 1})
    assert [kind for kind, _ in around.tape] == [*["data", "metadata"] * 5, "info"] * 2
    assert set(around.infos[0]) == {
        "collector_done", "cur_episode", "cur_sample", "cur_step", "eval_flag", "get_info_time",
    }  # fmt: skip


def test_transitions_have_the_true_successor_and_the_iteration_of_the_policy(run):
    _, around = run(env={"env_num": 1, "kwargs": {"lengths": (3,)}})
    samples = list(around.data.values())
    assert [one["obs"].tolist() for one in samples[:3]] == [[0, 0, 0], [0, 0, 1], [0, 0, 2]]
    assert samples[2]["next_obs"].tolist() == [0, 0, 3]
    assert samples[3]["obs"].tolist() == [0, 1, 0]
    assert {int(one["collect_iter"]) for one in samples} == {1}
    episodes = [int(one["episode_id"]) for one in samples]
    assert len(set(episodes[:3])) == len(set(episodes[3:])) == 1
    assert episodes[0] != episodes[3]


@pytest.mark.parametrize(
    ("target", "lengths"), [({"n_episode": 1}, [5, 5]), ({"n_sample": 2}, [2, 2, 1, 2, 2, 1])]
)
def test_trajectories_end_with_episodes_or_at_n_sample_steps(surrounded, target, lengths):
    collector, _ = surrounded(env={"env_num": 1}, policy={"type": "recording", "model": target})
    found = []

    def get_train_sample(trajectory):
        found.append(len(trajectory))
        return trajectory

    collector.policy = collector.policy._replace(get_train_sample=get_train_sample)
    collector.start()
    assert found == lengths


def test_a_policy_without_n_sample_and_n_episode_is_refused(surrounded):
    with pytest.raises(ConfigError, match="n_sample"):
        surrounded(policy={"type": "recording", "model": {}})


def test_an_evaluator_needs_neither_and_sends_no_samples(run):
    collector, around = run(policy={"type": "recording", "model": {}}, eval_flag=True)
    assert around.data == {}
    assert around.metadata == []
    assert around.infos[-1]["collector_done"] is True
    assert "collect_setting" not in collector.get_finish_info()
    assert repr(collector) == "ZerglingParallelCollector(EVALUATOR)"


def test_the_policy_has_only_the_field_that_the_task_needs(surrounded):
    collecting, _ = surrounded()
    evaluating, _ = surrounded(eval_flag=True)
    assert collecting.policy.get_attribute("enable_field") == ["collect"]
    assert evaluating.policy.get_attribute("enable_field") == ["eval"]


def test_collecting_passes_the_commanders_setting_and_evaluating_passes_nothing(run):
    collector, _ = run(collect_setting={"eps": 0.3})
    policy = collector.policy.forward.__self__
    assert all(one == {"eps": 0.3} for one in policy.settings)
    assert collector.get_finish_info()["collect_setting"] == {"eps": 0.3}
    collector, _ = run(collect_setting={"eps": 0.3}, eval_flag=True)
    assert set(map(len, collector.policy.forward.__self__.settings)) == {0}


class SteppingClock:
    """Each reading is a tenth of a second after the one before."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        self.now += 0.1
        return self.now


def test_collectors_update_the_policy_at_intervals_and_evaluators_once(surrounded):
    for eval_flag, is_often in ((False, True), (True, False)):
        collector, around = surrounded(
            clock=SteppingClock(), eval_flag=eval_flag, update_policy_second=0.5
        )
        collector.start()
        assert (around.n_fetches > 1) is is_often
        acted = collector.policy.forward.__self__.acted
        assert acted[0] == 1.0
        assert acted == sorted(acted)


def test_the_weights_never_change_while_the_policy_acts(surrounded):
    collector, around = surrounded(update_policy_second=1e-9)
    policy = collector.policy.forward.__self__
    acting = threading.Event()
    during = []
    forward, load = collector.policy.forward, collector.policy.load_state_dict

    def slow_forward(*args, **kwargs):
        before = around.n_fetches
        acting.set()
        around.fetched.clear()
        around.fetched.wait(0.01)  # time for another thread to swap the weights, if there is one
        outputs = forward(*args, **kwargs)
        acting.clear()
        assert policy.acted[-1] == before == around.n_fetches
        return outputs

    def watched_load(state):
        during.append(acting.is_set())
        load(state)

    collector.policy = collector.policy._replace(forward=slow_forward, load_state_dict=watched_load)
    collector.start()
    assert len(during) == len(policy.acted) + 1
    assert not any(during)


def test_a_collector_waits_for_the_first_weights_and_says_so_when_none_come(surrounded):
    collector, around = surrounded(env={"env_num": 1})
    late = iter([None, None])
    fetch = around.get_policy_update_info
    collector.get_policy_update_info = lambda path: next(late, fetch(path))
    collector.start()
    assert collector.policy.forward.__self__.acted[0] > 0

    collector, _ = surrounded(clock=SteppingClock(), policy_timeout_s=0.1)
    collector.get_policy_update_info = lambda path: None
    with pytest.raises(WaitTimeout, match="policy_of_the_test"):
        collector.start()


def test_later_updates_may_bring_nothing_new(surrounded):
    collector, around = surrounded(update_policy_second=1e-9)
    updates = iter([around.get_policy_update_info("")])
    collector.get_policy_update_info = lambda path: next(updates, None)
    collector.start()
    assert collector.get_finish_info()["train_iter"] == 1


def test_an_abnormal_step_drops_the_unfinished_trajectory(surrounded):
    collector, around = surrounded(env={"kwargs": {"crashes": [(1, 3)]}, "env_num": 1})
    # The env fails in its second episode, in the fourth step. A new env then starts from scratch
    # and must not fail again.
    collector.start()
    info = collector.get_finish_info()
    assert info["real_episode_count"] == 2
    assert len(around.data) == 10
    assert info["step_count"] == 10 + 3
    assert [0] in collector.policy.forward.__self__.resets


def test_the_finish_info_has_the_classic_keys_and_is_plain(run):
    collector, _ = run(env={"kwargs": {"lengths": (2, 4)}})
    info = collector.get_finish_info()
    assert set(info) == {
        "eval_flag", "env_num", "duration", "train_iter", "collector_done",
        "predefined_episode_count", "real_episode_count", "step_count", "sample_count",
        "avg_time_per_episode", "avg_time_per_step", "avg_time_per_train_sample",
        "avg_step_per_episode", "avg_sample_per_episode", "reward_mean", "reward_std",
        "reward_raw", "finish_time", "collect_setting",
    }  # fmt: skip
    assert info["predefined_episode_count"] == info["real_episode_count"] == 4
    assert info["avg_step_per_episode"] == info["avg_sample_per_episode"] == 3
    assert info["reward_raw"] == [3.0, 3.0, 10.0, 10.0]
    assert (info["reward_mean"], info["reward_std"]) == (6.5, 3.5)
    assert json.loads(json.dumps(info)) == info
    assert collector.get_finish_info()["duration"] == info["duration"]


def test_a_finish_info_without_steps_divides_by_nothing(surrounded):
    collector, _ = surrounded()
    collector.close()
    info = collector.get_finish_info()
    assert info["avg_step_per_episode"] == info["step_count"] == 0
    assert info["reward_mean"] is info["reward_std"] is None
    assert info["collector_done"] is False


def test_close_ends_the_loop_after_the_step_in_hand(surrounded):
    collector, around = surrounded(env={"manager": {}})
    send, started = around.send_metadata, threading.Event()

    def send_and_tell(metadata):
        send(metadata)
        started.set()

    collector.send_metadata = send_and_tell
    thread = threading.Thread(target=collector.start)
    thread.start()
    assert started.wait(20)
    collector.close()
    n_sent = len(around.tape)
    assert collector.env_manager.closed
    thread.join(20)
    assert not thread.is_alive()
    assert len(around.tape) == n_sent
    assert collector.get_finish_info()["predefined_episode_count"] is None
    collector.close()


def test_a_collector_can_close_itself(surrounded):
    collector, around = surrounded(env={"manager": {"episode_num": float("inf")}})
    send = around.send_metadata

    def close_at_the_end(metadata):
        send(metadata)
        if "collector_done" in metadata:
            collector.close()

    collector.send_metadata = close_at_the_end
    collector.start()
    assert len(around.infos) == 1


def test_a_collector_runs_once(run, surrounded):
    collector, _ = run()
    with pytest.raises(ConfigError, match="run already"):
        collector.start()
    closed, around = surrounded()
    closed.close()
    with pytest.raises(ConfigError, match="run already"):
        closed.start()
    assert around.tape == []


def test_a_collector_without_its_functions_is_refused(surrounded):
    collector, _ = surrounded()
    collector.send_stepdata = None
    with pytest.raises(ConfigError, match="send_stepdata"):
        collector.start()


def test_a_collector_without_policy_or_env_is_refused(surrounded):
    collector, _ = surrounded(policy={})
    with pytest.raises(ConfigError, match="policy"):
        collector.start()
    with pytest.raises(ConfigError, match=r"env\.id"):
        create_parallel_collector({"type": "zergling", "env": {"env_num": 2}})


def test_an_error_while_stepping_reaches_the_caller_and_closes_the_envs(surrounded):
    collector, _ = surrounded(env={"kwargs": {}})

    def fail(metadata):
        raise ArithmeticError("a failure for the test")

    collector.send_metadata = fail
    with pytest.raises(ArithmeticError):
        collector.start()
    assert collector.env_manager.closed


def test_wrappers_may_be_functions_or_their_names(surrounded):
    name = "gymnasium.wrappers:TimeAwareObservation"
    for wrapper in (name, gym.wrappers.TimeAwareObservation):
        collector, _ = surrounded(env={"id": "CartPole-v1", "kwargs": {}, "wrappers": [wrapper]})
        assert collector.env_manager.observation_space.shape == (5,)


def test_the_seed_of_the_envs_determines_what_a_task_plays(run):
    def first_obs(seed):
        env = {"env_id": "CartPole-v1", "id": "CartPole-v1", "kwargs": {}, "env_num": 1}
        _, around = run(env={**env, "seed": seed})
        return next(iter(around.data.values()))["obs"]

    assert torch.equal(first_obs(1), first_obs(1))
    assert not torch.equal(first_obs(1), first_obs(2))


def test_the_log_says_how_many_steps_there_were(run, tmp_path):
    collector, _ = run(exp_name=str(tmp_path / "run"), print_freq=2)
    collector.info("one line")
    collector.error("another line")
    collector.debug("not in the file")
    log = (tmp_path / "run/log/COLLECTOR/COLLECTOR_logger.txt").read_text()
    assert "INFO one line" in log
    assert "ERROR another line" in log
    assert "not in the file" not in log


def test_the_registry_knows_the_collector_by_its_classic_name():
    assert get_parallel_collector_cls({"type": "zergling"}) is ZerglingParallelCollector
    with pytest.raises(RegistryError, match="zergling"):
        create_parallel_collector({"type": "zerglin"})
    with pytest.raises(ConfigError, match="type"):
        get_parallel_collector_cls({})


class Envs:
    ready_obs = {0: 1.0}
    done = False

    def __init__(self, tape):
        self.close = lambda: tape.append("close")


class Own(BaseParallelCollector):
    def __init__(self, cfg):
        super().__init__(cfg)
        self.tape = []
        self._env_manager = Envs(self.tape)
        for name in ("_start_thread", "_join_thread", "_finish_task", "_iter_after_hook"):
            setattr(self, name, lambda name=name: self.tape.append(name))

    def _update_policy(self):
        self.tape.append("update")

    def _policy_inference(self, obs):
        self.tape.append(("infer", obs))
        return {0: 2}

    def _env_step(self, action):
        self.tape.append(("step", action))
        return {0: "timestep"}

    def _process_timestep(self, timestep):
        self.tape.append(("process", timestep))
        self._env_manager.done = True

    def get_finish_info(self):
        return {}

    def __repr__(self):
        return "Own"


def test_an_own_collector_writes_the_abstract_methods_and_may_use_the_hooks():
    own = Own({"log_to_file": False})
    own.send_metadata = own.send_stepdata = own.get_policy_update_info = print
    own.start()
    assert own.tape == [
        "update", "_start_thread", ("infer", {0: 1.0}), ("step", {0: 2}),
        ("process", {0: "timestep"}), "_iter_after_hook", "_finish_task", "_join_thread", "close",
    ]  # fmt: skip


def test_the_defaults_are_the_classic_ones():
    default = ZerglingParallelCollector.default_config()
    assert default.cfg_type == "ZerglingParallelCollectorDict"
    assert (default.print_freq, default.compressor, default.update_policy_second) == (5, "lz4", 3)


@POLICY_REGISTRY.register("remembering")
class RememberingPolicy(Policy):
    """Counts its steps in its recurrent state; acts by their parity."""

    act_inputs = ("prev_action", "prev_reward", "is_first")

    def make_model(self):
        return torch.nn.Linear(1, 1, bias=False)

    def initial_state(self, n):
        return torch.zeros(n, dtype=torch.int64)

    def act_collect(self, obs, env_id, *, state, **inputs):
        assert torch.equal(inputs["is_first"], obs[:, 2] == 0)
        return {"action": state % 2, "state": state + 1}

    act_eval = act_collect

    def check_spaces(self, observation_space, action_space):
        pass


@pytest.mark.parametrize("mode", mostly_slow(["sync", "async"], keep=1))
def test_a_recurrent_policy_keeps_its_state_from_step_to_step(run, mode):
    env = {"kwargs": {"lengths": (3, 7, 4)}, "mode": mode, "manager": {"episode_num": 3}}
    _, around = run(env=env, policy={"type": "remembering", "collect": {"n_episode": 1}})
    samples = list(around.data.values())
    assert len(samples) == 2 * (3 + 7 + 4)
    for sample in samples:
        t = int(sample["obs"][2])
        assert int(sample["state"]) == t
        assert bool(sample["is_first"]) == (t == 0)
        assert float(sample["prev_reward"]) == t
        assert int(sample["prev_action"]) == (max(t - 1, 0) % 2)


def test_a_recurrent_policy_is_evaluated_with_its_state(run):
    _, around = run(eval_flag=True, policy={"type": "remembering", "collect": {"n_episode": 1}})
    assert around.infos[-1]["cur_episode"] == 4
