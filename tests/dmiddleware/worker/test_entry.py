"""serial_run and compile_config, with real policies and environments."""

import copy
import re
from pathlib import Path

import pytest
import torch
import yaml
from PIL import Image

import dmiddleware.worker
from dmiddleware.classic import CommandModePolicy, Policy, create_policy
from dmiddleware.data import load_checkpoint
from dmiddleware.errors import ConfigError, RegistryError
from dmiddleware.policy import POLICY_REGISTRY, DQNPolicy, PPOPolicy
from dmiddleware.worker import (
    BaseLearner,
    SampleSerialCollector,
    compile_config,
    serial_run,
)
from dmiddleware.worker.evaluator import SERIAL_EVALUATOR_REGISTRY

CREATE = {
    "env": {"type": "CartPole-v1"},
    "env_manager": {"type": "base"},
    "policy": {"type": "dqn"},
    "replay_buffer": {"type": "naive"},
}


def main_config(**policy):
    main = {
        "exp_name": "trial",
        "env": {
            "collector_env_num": 2,
            "evaluator_env_num": 2,
            "n_evaluator_episode": 3,
            "stop_value": 400,
        },
        "policy": {
            "model": {"obs_shape": 4, "action_shape": 2, "encoder_hidden_sizes": [16]},
            "learn": {"update_per_collect": 2, "batch_size": 8},
            "collect": {"n_sample": 16, "collector": {"collect_print_freq": 5}},
            "eval": {"evaluator": {"eval_freq": 4}},
            "other": {"replay_buffer": {"replay_buffer_size": 100}},
        },
    }
    if policy.get("on_policy"):
        del main["policy"]["learn"]["update_per_collect"]
    for key, value in policy.items():
        main["policy"].setdefault(key, {})
        if isinstance(value, dict):
            main["policy"][key] |= value
        else:
            main["policy"][key] = value
    return main


def test_a_compiled_config_has_the_defaults_of_all_classes():
    cfg = compile_config(main_config(), CREATE, seed=3)
    policy = cfg.policy
    assert policy.learn.learner == BaseLearner.default_config() | {"type": "base"}
    collector = SampleSerialCollector.default_config() | {"collect_print_freq": 5, "type": "sample"}
    assert policy.collect.collector == collector
    assert (policy.eval.evaluator.eval_freq, policy.eval.evaluator.type) == (4, "interaction")
    buffer = policy.other.replay_buffer
    assert (buffer.type, buffer.replay_buffer_size, buffer.deepcopy) == ("naive", 100, False)
    assert policy.other.commander.type == "base"
    assert (policy.learn.batch_size, policy.learn.double) == (8, True)
    assert cfg.env.type == "CartPole-v1"
    assert (cfg.env.id, cfg.env.mode, cfg.env.manager.type) == ("CartPole-v1", "sync", "base")


def test_the_evaluator_takes_its_target_from_the_env():
    cfg = compile_config(main_config(), CREATE)
    evaluator = cfg.policy.eval.evaluator
    assert (evaluator.stop_value, evaluator.n_episode) == (400, 3)
    own = main_config(eval={"evaluator": {"stop_value": 7, "n_episode": 5}})
    evaluator = compile_config(own, CREATE).policy.eval.evaluator
    assert (evaluator.stop_value, evaluator.n_episode) == (7, 5)


def test_the_whole_config_is_saved_and_compiles_again():
    cfg = compile_config(main_config(), CREATE, seed=3)
    saved = yaml.safe_load(Path("trial/total_config.yaml").read_text())
    assert saved == cfg
    again = compile_config(saved)
    assert again == cfg


def test_a_config_stays_as_it_was():
    main, create = main_config(), copy.deepcopy(CREATE)
    before = copy.deepcopy(main)
    compile_config(main, create)
    assert (main, create) == (before, CREATE)


def test_everything_random_gets_a_seed():
    cfg = compile_config(main_config(), CREATE, seed=3)
    assert (cfg.env.seed, cfg.policy.seed) == (3, 3)
    assert cfg.policy.other.replay_buffer.seed is not None
    own = main_config(seed=8)
    own["env"]["seed"] = 9
    cfg = compile_config(own, CREATE, seed=3)
    assert (cfg.env.seed, cfg.policy.seed) == (9, 8)


def test_a_compiled_config_builds_its_policy():
    cfg = compile_config(main_config(), CREATE)
    assert isinstance(create_policy(cfg.policy).policy, DQNPolicy)


def test_a_parallel_config_compiles_too():
    main = main_config()
    main["policy"]["collect"]["collector"] = {"print_freq": 7}
    create = CREATE | {"collector": {"type": "zergling"}, "commander": {"type": "naive"}}
    cfg = compile_config(main, create)
    assert cfg.policy.collect.collector.update_policy_second == 3
    assert cfg.policy.other.commander.collector_task_space == 1


@pytest.mark.parametrize(
    ("main", "create", "error", "word"),
    [
        ({"exp_name": "x"}, CREATE, ConfigError, "policy"),
        (main_config(), {"policy": {"type": "dqn"}}, ConfigError, "env.id"),
        (main_config(learn={"batchsize": 3}), CREATE, ConfigError, "learn.batch_size"),
        (main_config(learn={"learner": {"train_iteration": 3}}), CREATE, ConfigError, "iterations"),
        (main_config(learn={"learner": 3}), CREATE, ConfigError, "dictionary"),
        (main_config(), CREATE | {"policies": {}}, ConfigError, "policies"),
        (main_config(), CREATE | {"reward_model": {"type": "rnd"}}, ConfigError, "RewardLearner"),
        (main_config() | {"reward_model": {"type": "rnd"}}, CREATE, ConfigError, "RewardLearner"),
        (main_config(reward_model={"type": "rnd"}), CREATE, ConfigError, "RewardLearner"),
        (main_config(), CREATE | {"env": "CartPole-v1"}, ConfigError, "create.env"),
        (main_config(), CREATE | {"policy": {"type": "dqm"}}, RegistryError, "dqn"),
        (main_config(), CREATE | {"policy": {}}, ConfigError, "type"),
    ],
)
def test_an_unusable_config_is_refused(main, create, error, word):
    with pytest.raises(error, match=word):
        compile_config(main, create)


@pytest.mark.parametrize(
    ("env", "word"),
    [
        ({"type": "CartPole-v1", "manager": {"step_timout": 3}}, "env.manager.step_timout"),
        ({"type": "CartPole-v77"}, "CartPole"),
    ],
)
def test_unusable_envs_are_refused(env, word):
    main = main_config()
    main["env"] |= env
    create = {key: value for key, value in CREATE.items() if not key.startswith("env")}
    with pytest.raises((ConfigError, RegistryError), match=word):
        serial_run(main, create)


def test_a_run_trains_until_a_limit_and_saves_the_policy():
    policy = serial_run(main_config(), CREATE, seed=1, max_train_iter=8)
    assert isinstance(policy.policy, DQNPolicy)
    saved = load_checkpoint("trial/ckpt_learner/iteration_8.safetensors")
    assert saved["last_iter"] == 8
    assert Path("trial/ckpt_learner/ckpt_best.safetensors").is_file()
    assert "envstep_count" in Path("trial/log/collector/collector_logger.txt").read_text()


def test_a_run_stops_after_so_many_env_steps():
    serial_run(main_config(), CREATE, max_env_step=50)
    (checkpoint,) = Path("trial/ckpt_learner").glob("iteration_*")
    assert 50 <= load_checkpoint(checkpoint)["last_step"] <= 70


def test_equal_seeds_give_equal_policies():
    states = []
    for name, seed in (("a", 5), ("b", 5), ("c", 6)):
        main = {**main_config(random_collect_size=20), "exp_name": name}
        states.append(serial_run(main, CREATE, seed=seed, max_train_iter=6).eval_mode.state_dict())
    first, second, other = (torch.cat([p.flatten() for p in _tensors(state)]) for state in states)
    assert torch.equal(first, second)
    assert not torch.equal(first, other)


def _tensors(state):
    for value in state.values():
        if isinstance(value, dict):
            yield from _tensors(value)
        elif isinstance(value, torch.Tensor):
            yield value.float()


def test_a_run_stops_when_the_evaluator_is_content():
    main = main_config()
    main["env"]["stop_value"] = 1
    serial_run(main, CREATE)
    assert Path("trial/ckpt_learner/iteration_4.safetensors").is_file()


def test_a_run_continues_from_a_checkpoint():
    serial_run(main_config(), CREATE, max_train_iter=4)
    first = load_checkpoint("trial/ckpt_learner/iteration_4.safetensors")
    hook = {"load_ckpt_before_run": "trial/ckpt_learner/iteration_4.safetensors"}
    serial_run(main_config(learn={"learner": {"hook": hook}}), CREATE, max_train_iter=6)
    second = load_checkpoint("trial/ckpt_learner/iteration_6.safetensors")
    assert second["last_step"] == first["last_step"] + 16


def test_random_samples_come_first(monkeypatch):
    taken = []
    collect = SampleSerialCollector.collect

    def record(self, n_sample=None, **kwargs):
        data = collect(self, n_sample, **kwargs)
        taken.append((len(data), kwargs.get("random_collect", False)))
        return data

    monkeypatch.setattr(SampleSerialCollector, "collect", record)
    serial_run(main_config(random_collect_size=30), CREATE, max_train_iter=2)
    assert taken == [(30, True), (16, False)]


def test_updates_are_prioritized_by_the_last_errors():
    from dmiddleware.classic import AdvancedReplayBuffer

    updates = []
    update = AdvancedReplayBuffer.update

    def record(self, info):
        updates.append(info)
        update(self, info)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AdvancedReplayBuffer, "update", record)
        create = CREATE | {"replay_buffer": {"type": "advanced"}}
        serial_run(main_config(priority=True), create, max_train_iter=4)
    assert len(updates) == 4
    assert all(len(info["replay_unique_id"]) == len(info["priority"]) == 8 for info in updates)


def test_an_on_policy_algorithm_learns_from_what_was_collected():
    create = {"env": {"type": "CartPole-v1"}, "policy": {"type": "ppo"}}
    main = main_config(on_policy=True, learn={"epoch_per_collect": 3})
    policy = serial_run(main, create, max_env_step=30)
    assert isinstance(policy.policy, PPOPolicy)
    (checkpoint,) = Path("trial/ckpt_learner").glob("iteration_*")
    # Two collections of 16 samples, each learned 3 times in minibatches of 8.
    assert checkpoint.name == "iteration_12.safetensors"


def test_ppg_makes_its_own_minibatches_of_what_was_collected():
    create = {"env": {"type": "CartPole-v1"}, "policy": {"type": "ppg"}}
    main = main_config(on_policy=True, learn={"aux_freq": 2, "critic_epoch_per_collect": 3})
    policy = serial_run(main, create, max_train_iter=2)
    state = load_checkpoint("trial/ckpt_learner/iteration_2.safetensors")
    assert state["last_step"] == 32
    steps = {name: slots["state"]["0"]["step"] for name, slots in state["optimizer"].items()}
    # Two collections of 16 samples in minibatches of 8, and six passes over all of them.
    assert steps == {"actor": 2 * 2 + 6 * 4, "auxiliary": 6 * 4, "critic": 2 * 2 * 3 + 6 * 4}
    assert policy.get_attribute("train_iter") == 2


def test_ppg_learns_from_two_buffers(monkeypatch, caplog):
    batches = []
    train = BaseLearner.train

    def noted(learner, samples, *args, **kwargs):
        batches.append(samples)
        return train(learner, samples, *args, **kwargs)

    monkeypatch.setattr(BaseLearner, "train", noted)
    main = main_config(learn={"aux_freq": 2, "epochs_aux": 6})
    sizes = {"policy": {"replay_buffer_size": 16}, "value": {"replay_buffer_size": 64}}
    main["policy"]["other"] = {"replay_buffer": {"multi_buffer": True, **sizes}}
    create = {**CREATE, "policy": {"type": "ppg_offpolicy"}}
    create["replay_buffer"] = {name: {"type": "advanced"} for name in sizes}
    serial_run(main, create, max_train_iter=8)
    assert len(batches) == 8
    assert all({*row["valued_rows"]} == {"obs", "ret"} for batch in batches for row in batch)
    assert "learn.epochs_aux (learn.aux_train_epoch counts)" in caplog.text
    create["replay_buffer"]["value"]["type"] = "naive"
    with pytest.raises(ConfigError, match="multi_buffer"):
        serial_run(main, create, max_train_iter=8)


def test_learning_waits_until_there_is_a_batch():
    main = main_config(collect={"n_sample": 4}, learn={"batch_size": 8, "update_per_collect": 1})
    serial_run(main, CREATE, max_train_iter=1)
    state = load_checkpoint("trial/ckpt_learner/iteration_1.safetensors")
    assert state["last_step"] == 8


def test_an_on_policy_algorithm_stops_learning_when_it_has_moved_too_far():
    create = {"env": {"type": "CartPole-v1"}, "policy": {"type": "ppo"}}
    main = main_config(
        on_policy=True, target_kl=1e-9, learn={"epoch_per_collect": 9, "learning_rate": 0.1}
    )
    serial_run(main, create, max_env_step=16)
    (checkpoint,) = Path("trial/ckpt_learner").glob("iteration_*")
    assert load_checkpoint(checkpoint)["last_iter"] < 4


class CountingPolicy(Policy):
    """Acts per env, and records how many samples each forward gets."""

    config = {"collect": {"n_sample": 6}, "learn": {"batch_size": 2}, "on_policy": True}

    def default_model(self):
        return "q_network", ["dmiddleware.model"]

    def _init_learn(self):
        self.learned = []

    def _forward_learn(self, data):
        self.learned.append(len(data))
        return {"total_loss": 0.0}

    def _forward_collect(self, data, **kwargs):
        self.settings = kwargs
        return {env_id: {"action": torch.tensor(0)} for env_id in data}

    def _forward_eval(self, data, **kwargs):
        return {env_id: {"action": torch.tensor(0)} for env_id in data}

    def _process_transition(self, obs, policy_output, timestep):
        return {"obs": obs, **policy_output, "reward": timestep.reward, "done": timestep.done}


@pytest.fixture
def counting():
    class CountingCommandPolicy(CountingPolicy, CommandModePolicy):
        def _get_setting_collect(self, command_info):
            return {"eps": command_info["envstep"]}

    POLICY_REGISTRY.register("test_counting")(CountingPolicy)
    yield lambda: POLICY_REGISTRY.register("test_counting_command")(CountingCommandPolicy)
    for name in ("test_counting", "test_counting_command"):
        POLICY_REGISTRY._entries.pop(name, None)


def counting_config():
    main = main_config()
    main["policy"] = {"type": "test_counting", "model": main["policy"]["model"]}
    main["env"]["id"] = "CartPole-v1"
    main["policy"]["eval"] = {"evaluator": {"eval_freq": 100}}
    return main


def test_an_on_policy_algorithm_written_per_env_learns_in_one_forward(counting):
    policy = serial_run(counting_config(), max_train_iter=2)
    assert policy.learned == [6, 6]
    assert policy.settings == {}


def test_the_command_version_of_a_policy_is_taken_where_there_is_one(counting):
    counting()
    policy = serial_run(counting_config(), max_train_iter=2)
    assert policy.settings == {"eps": 6}


def test_entry_points_are_public():
    assert {"serial_run", "compile_config"} <= set(dmiddleware.worker.__all__)


CARTPOLE_DQN = {
    "exp_name": "cartpole_dqn",
    "env": {
        "collector_env_num": 2,
        "evaluator_env_num": 2,
        "n_evaluator_episode": 2,
        "stop_value": 195,
    },
    "policy": {
        "cuda": False,
        "load_path": "cartpole_dqn/ckpt/ckpt_best.pth.tar",
        "model": {
            "obs_shape": 4,
            "action_shape": 2,
            "encoder_hidden_size_list": [16, 8],
            "dueling": True,
        },
        "nstep": 1,
        "discount_factor": 0.97,
        "priority": True,
        "priority_IS_weight": True,
        "learn": {"update_per_collect": 2, "batch_size": 8, "learning_rate": 0.001},
        "collect": {"n_sample": 8, "unroll_len": 1},
        "eval": {"evaluator": {"eval_freq": 4}},
        "other": {
            "eps": {"type": "exp", "start": 0.95, "end": 0.1, "decay": 10000},
            "replay_buffer": {"replay_buffer_size": 200},
        },
    },
}
CREATE_CARTPOLE_DQN = {
    "env": {
        "type": "CartPole-v1",
        "import_names": ["dizoo.classic_control.cartpole.envs.cartpole_env"],
    },
    "env_manager": {"type": "base"},
    "policy": {"type": "dqn"},
    "replay_buffer": {"type": "deque", "import_names": ["ding.data.buffer.deque_buffer_wrapper"]},
}
CONTINUOUS = {"obs_shape": 3, "action_shape": 1, "twin_critic": True}


def changed(config, **values):
    """Return a copy of a config with values at dotted paths, written with two underscores."""
    config = copy.deepcopy(config)
    for path, value in values.items():
        *sections, key = path.split("__")
        section = config
        for name in sections:
            section = section.setdefault(name, {})
        section[key] = value
    return config


@pytest.mark.parametrize("weighted", [True, False])
def test_a_config_of_di_engine_runs_as_it_is(weighted, capsys):
    main = changed(CARTPOLE_DQN, policy__priority_IS_weight=weighted)
    policy = serial_run(main, CREATE_CARTPOLE_DQN, max_train_iter=6)
    assert isinstance(policy.policy, DQNPolicy)
    saved = yaml.safe_load(Path("cartpole_dqn/total_config.yaml").read_text())
    buffer = saved["policy"]["other"]["replay_buffer"]
    assert (buffer["type"], buffer["priority"], buffer["priority_IS_weight"]) == (
        "deque", True, weighted,
    )  # fmt: skip
    assert saved["policy"]["load_path"] == CARTPOLE_DQN["policy"]["load_path"]
    assert compile_config(saved) == saved


@pytest.mark.parametrize(
    ("policy", "model", "learn"),
    [
        (
            "sac",
            {"action_space": "reparameterization", "actor_head_hidden_size": 8},
            {
                "learning_rate_q": 1e-3, "target_theta": 0.005, "discount_factor": 0.99,
                "ignore_done": True, "auto_alpha": True,
            },
        ),
        (
            "td3",
            {"action_space": "regression", "critic_head_hidden_size": 8},
            {
                "learning_rate_actor": 1e-3, "actor_update_freq": 2, "noise": True,
                "noise_sigma": 0.1, "noise_range": {"min": -0.5, "max": 0.5}, "ignore_done": True,
            },
        ),
        ("ddpg", {"action_space": "regression"}, {"noise": False, "ignore_done": True}),
    ],
)  # fmt: skip
def test_configs_of_di_engine_for_continuous_actions_run_too(policy, model, learn):
    main = {
        "exp_name": policy,
        "env": {
            "collector_env_num": 2, "evaluator_env_num": 1, "act_scale": True,
            "n_evaluator_episode": 1, "stop_value": -250,
        },
        "policy": {
            "cuda": False,
            "priority": False,
            "random_collect_size": 30,
            "model": {**CONTINUOUS, **model},
            "learn": {"update_per_collect": 1, "batch_size": 16, **learn},
            "collect": {"n_sample": 16, "collector": {"collect_print_freq": 1000}},
            "eval": {"evaluator": {"eval_freq": 100}},
            "other": {"replay_buffer": {"replay_buffer_size": 1000}},
        },
    }  # fmt: skip
    create = {
        "env": {"type": "Pendulum-v1"},
        "env_manager": {"type": "base"},
        "policy": {"type": policy},
    }
    serial_run(main, create, max_train_iter=2)


@pytest.mark.parametrize(
    ("path", "near"),
    [
        ("env__stop_valu", "env.stop_value"),
        ("env__n_evaluator_episod", "env.n_evaluator_episode"),
        ("env__colector_env_num", "env.collector_env_num"),
        ("env__replay_pth", "env.replay_path"),
        ("env__manager__step_timout", "env.manager.step_timeout"),
        ("env__manager__max_retri", "env.manager.max_retry"),
        ("env__kwarg", "env.kwargs"),
        ("exp_nam", "exp_name"),
        ("polici", "policy"),
        ("policy__learn__batch_siz", "learn.batch_size"),
        ("policy__collect__n_sampl", "collect.n_sample"),
        ("policy__other__eps__strat", "other.eps.start"),
        ("policy__other__replay_bufer", "other.replay_buffer"),
        ("policy__other__replay_buffer__replay_buffer_siz", "replay_buffer_size"),
        ("policy__eval__evaluatr", "eval.evaluator"),
        ("policy__collect__collector__collect_print_frq", "collect_print_freq"),
        ("policy__learn__learner__train_iteration", "train_iterations"),
        ("policy__model__encoder_hidden_size", "encoder_hidden_sizes"),
    ],
)
def test_misspelled_keys_of_every_section_are_refused(path, near):
    with pytest.raises(ConfigError, match=rf"did you mean {near}\?"):
        serial_run(changed(CARTPOLE_DQN, **{path: 1}), CREATE_CARTPOLE_DQN, max_train_iter=1)


def create_of_ours():
    """Return a create config that names no module of DI-engine."""
    return {name: {"type": part["type"]} for name, part in CREATE_CARTPOLE_DQN.items()}


def test_a_misspelled_key_of_an_evaluator_is_left_out_only_of_a_config_of_di_engine(caplog):
    main = changed(CARTPOLE_DQN, policy__eval__evaluator__eval_frq=1)
    with pytest.raises(ConfigError, match=r"did you mean eval_freq\?"):
        compile_config(main, create_of_ours())
    evaluator = compile_config(main, CREATE_CARTPOLE_DQN).policy.eval.evaluator
    assert "eval_frq" not in evaluator
    assert "nothing reads eval_frq, so it is left out; did you mean eval_freq?" in caplog.text


def test_an_evaluator_that_declares_no_options_gets_its_section_as_it_is():
    @SERIAL_EVALUATOR_REGISTRY.register("bare")
    class Bare:
        pass

    main = changed(CARTPOLE_DQN, policy__eval__evaluator={"type": "bare", "of_its_own": 3})
    assert compile_config(main, CREATE_CARTPOLE_DQN).policy.eval.evaluator.of_its_own == 3


def test_an_evaluator_of_di_engine_with_a_negative_frequency_evaluates_before_every_update():
    main = changed(CARTPOLE_DQN, policy__eval__evaluator__eval_freq=-1)
    assert compile_config(main, CREATE_CARTPOLE_DQN).policy.eval.evaluator.eval_freq == 1
    with pytest.raises(ConfigError, match="eval_freq must be an integer ≥ 1"):
        compile_config(main, create_of_ours())


@pytest.mark.parametrize(
    ("path", "near"),
    [
        ("env__import_name", "env.import_names"),
        ("env_manager__shared_memori", "env.manager.shared_memory"),
        ("policy__typ", "unknown key typ"),
        ("replay_buffer__max_us", "max_use"),
    ],
)
def test_misspelled_keys_of_the_create_config_are_refused(path, near):
    with pytest.raises(ConfigError, match=near):
        serial_run(CARTPOLE_DQN, changed(CREATE_CARTPOLE_DQN, **{path: 1}), max_train_iter=1)


@pytest.mark.parametrize(
    ("path", "value", "word"),
    [
        ("env__frame_stack", 4, "wrappers"),
        ("env__norm_reward", {"use_norm": True}, "reward_norm"),
        ("env__rew_clip", True, "env.kwargs"),
        ("env__collector_env_num", 0, "env.collector_env_num"),
        ("env__n_evaluator_episode", "many", "env.n_evaluator_episode"),
    ],
)
def test_keys_of_an_env_say_what_to_write_instead(path, value, word):
    with pytest.raises(ConfigError, match=word):
        compile_config(changed(CARTPOLE_DQN, **{path: value}), CREATE_CARTPOLE_DQN)


def test_keys_that_are_off_are_accepted():
    main = changed(CARTPOLE_DQN, env__norm_obs={"use_norm": False}, env__act_scale=True)
    manager = {"type": "base", "shared_memory": False, "auto_reset": True, "retry_type": "reset"}
    compile_config(main, changed(CREATE_CARTPOLE_DQN, env_manager=manager))


def test_normalization_of_an_env_becomes_that_of_the_policy():
    main = changed(CARTPOLE_DQN, env__norm_obs={"use_norm": True})
    cfg = compile_config(main, CREATE_CARTPOLE_DQN)
    assert cfg.policy.obs_norm is True
    assert "norm_obs" not in cfg.env


def test_an_algorithm_that_learns_from_whole_rollouts_is_refused():
    main = main_config(learn={"batch_size": 4})
    del main["policy"]["learn"]["update_per_collect"]
    create = {**CREATE, "policy": {"type": "ppo_recurrent"}}
    with pytest.raises(ConfigError, match="sequences"):
        serial_run(main, create, max_train_iter=1)


def sequence_config(**policy):
    main = main_config(learn={"batch_size": 4, "update_per_collect": 2})
    main["policy"] |= {"unroll_len": 5, **policy}
    main["policy"]["collect"] = {"n_sample": 4}
    return main


def test_r2d2_learns_from_prioritized_sequences():
    main = sequence_config(priority=True, burnin_step=2, nstep=2)
    policy = serial_run(main, {**CREATE, "policy": {"type": "r2d2"}}, max_train_iter=4)
    assert policy.get_attribute("train_iter") >= 4


def test_impala_drops_lanes_that_it_has_learned_from_often_enough(monkeypatch):
    shapes = []
    train = BaseLearner.train

    def noted(learner, batch, *args, **kwargs):
        shapes.append(tuple(batch["done"].shape))
        return train(learner, batch, *args, **kwargs)

    monkeypatch.setattr(BaseLearner, "train", noted)
    main = sequence_config(other={"replay_buffer": {"max_use": 1}})
    create = {**CREATE, "policy": {"type": "impala"}, "replay_buffer": {"type": "advanced"}}
    serial_run(main, create, max_train_iter=2)
    # Four lanes of five steps come with each collection, and one update uses all of them.
    assert shapes == [(5, 4), (5, 4)]


BITFLIP = {
    "env": {"type": "bitflip", "import_names": ["dizoo.bitflip.envs.bitflip_env"]},
    "policy": {"type": "dqn"},
    "replay_buffer": {"type": "episode"},
    "collector": {"type": "episode"},
}


def bitflip_config(**policy):
    her = {"her_strategy": "future", "episode_size": 3, "sample_per_episode": 4}
    main = main_config(collect={"n_episode": 8}, other={"her": her}, **policy)
    main["env"]["n_bits"] = 6
    main["policy"]["model"] |= {"obs_shape": 12, "action_shape": 6}
    del main["policy"]["collect"]["n_sample"], main["policy"]["collect"]["collector"]
    return main


@pytest.fixture
def learned(monkeypatch):
    """Return the lists of samples that a learner has learned from."""
    batches, train = [], BaseLearner.train

    def watched(learner, data, *args, **kwargs):
        batches.append(data)
        return train(learner, data, *args, **kwargs)

    monkeypatch.setattr(BaseLearner, "train", watched)
    return batches


def test_hindsight_replays_episodes_with_goals_that_they_reached(learned):
    serial_run(bitflip_config(), BITFLIP, max_train_iter=4)
    assert [len(batch) for batch in learned[:4]] == [12] * 4
    for row in learned[0]:
        bits, goal = row["next_obs"].chunk(2)
        assert torch.equal(goal, row["obs"].chunk(2)[1])
        assert float(row["reward"]) == float(torch.equal(bits, goal))
    assert any(float(row["reward"]) for batch in learned for row in batch)


def test_without_hindsight_a_buffer_of_episodes_gives_single_steps(learned):
    main = bitflip_config()
    del main["policy"]["other"]["her"]
    serial_run(main, BITFLIP, max_train_iter=2)
    main["policy"]["collect"]["collector"] = {"get_train_sample": True}
    serial_run(main, BITFLIP, max_train_iter=2)
    assert len(learned) == 4 and all(len(batch) == 8 for batch in learned)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"policy__nstep": 3}, "set it to 1"),
        ({"policy__collect__collector": {"get_train_sample": True}}, "whole episodes"),
    ],
)
def test_hindsight_without_single_steps_of_whole_episodes_is_refused(change, word):
    with pytest.raises(ConfigError, match=word):
        serial_run(changed(bitflip_config(), **change), BITFLIP, max_train_iter=1)


def test_each_evaluation_is_recorded_in_the_replay_path():
    main = changed(CARTPOLE_DQN, env__replay_path="videos", policy__other__replay_buffer={})
    serial_run(main, CREATE_CARTPOLE_DQN, max_train_iter=6)
    names = sorted(path.name for path in Path("videos").iterdir())
    assert names[0] == "iteration_0.gif" and len(names) >= 2
    with Image.open("videos/iteration_0.gif") as video:
        assert video.n_frames >= 8


def test_a_run_shows_its_progress_on_the_screen(capsys):
    serial_run(CARTPOLE_DQN, CREATE_CARTPOLE_DQN, max_train_iter=6, max_env_step=1000)
    shown = capsys.readouterr().err.splitlines()
    assert any("eval" in line and "best" in line for line in shown)
    assert "/1,000" in shown[-1] and "update 6" in shown[-1]
    serial_run(CARTPOLE_DQN, CREATE_CARTPOLE_DQN, max_train_iter=2, show_progress=False)
    assert capsys.readouterr().err == ""


def test_both_configs_in_one_argument_name_the_remedy():
    with pytest.raises(ConfigError, match="serial_run"):
        serial_run((CARTPOLE_DQN, CREATE_CARTPOLE_DQN))


@pytest.mark.parametrize(
    ("path", "value", "word"),
    [
        ("env.n_bits", 4, "env: n_bits, desc"),
        ("policy.other.her", {"her_strategy": "future"}, r"other.her \("),
        ("policy.other.replay_buffer.sliced", True, r"replay_buffer.*sliced \("),
        ("policy.collect.collector.get_train_sample", True, r"collector.*get_train_sample \("),
    ],
)
def test_keys_of_di_engine_that_mean_nothing_here_are_kept_with_one_warning(
    path, value, word, caplog
):
    cfg = main_config()
    *sections, key = path.split(".")
    section = cfg
    for name in sections:
        section = section.setdefault(name, {})
    section[key] = value
    if key == "n_bits":
        section["desc"] = None
    compiled = compile_config(cfg, CREATE)
    kept = compiled
    for name in (*sections, key):
        kept = kept[name]
    assert kept == value
    warnings = [record.getMessage() for record in caplog.records if key in record.getMessage()]
    assert len(warnings) == 1
    assert re.search(word, warnings[0])


def test_a_misspelled_key_of_the_env_is_refused():
    cfg = main_config()
    cfg["env"]["collector_env_nums"] = 3
    with pytest.raises(ConfigError, match="collector_env_num"):
        compile_config(cfg, CREATE)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize("kind", ["dqn", "own"])
def test_cuda_without_a_gpu_falls_back_with_a_warning(kind, caplog):
    class Own(Policy):
        def _forward_eval(self, data):
            return {}

    if kind == "own":
        policy = Own({"cuda": True}, torch.nn.Linear(1, 1), enable_field=["eval"])
    else:
        policy = create_policy(compile_config(main_config(cuda=True), CREATE).policy)
        assert policy.policy.cfg.cuda is False
    assert (policy._device, policy._cuda, policy.cfg.cuda) == ("cpu", False, False)
    assert "cuda=True has no effect" in caplog.text


def test_policy_gradient_learns_from_the_samples_of_whole_episodes():
    main = main_config(on_policy=True)
    main["policy"]["learn"] = {"batch_size": 64, "grad_norm": 5, "entropy_weight": 0.001}
    main["policy"]["collect"] = {"n_episode": 4, "unroll_len": 1, "discount_factor": 0.9}
    create = {**CREATE, "policy": {"type": "pg"}, "collector": {"type": "episode"}}
    del create["replay_buffer"]
    policy = serial_run(main, create, max_train_iter=3, show_progress=False)
    assert policy.policy.cfg.discount == 0.9
    assert policy.policy.cfg.grad_clip_norm == 5
    assert policy.policy.train_iter >= 3
