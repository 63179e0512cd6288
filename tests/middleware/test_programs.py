"""Training in two lines: an algorithm and an env by name, with the settings of the zoo."""

from __future__ import annotations

import hashlib
import shutil
import signal

import gymnasium as gym
import numpy as np
import pytest

import dmiddleware
from dmiddleware.command_line import arguments_of
from dmiddleware.data import leaves, save_dataset
from dmiddleware.env import EnvSettings, make_env, make_env_manager
from dmiddleware.errors import ConfigError, RegistryError, RunFolderError, SpaceError
from dmiddleware.policy import BCPolicy, DQNPolicy, DQNSettings, SACSettings, get_policy_cls
from dmiddleware.rollout import RolloutCollector
from dmiddleware.seeding import derive_seed
from dmiddleware.zoo import tuned_options
from middleware import OffPolicyLearnerSettings
from middleware.programs import TrainResult, off_policy, train
from tests.variants import mostly_slow

# Enough for each to collect, learn and evaluate.
SHORT = {
    "max_env_step": 700,
    "eval_env_num": 2,
    "evaluator": {"n_episode": 2},
    "experiment": {"n_fresh_episode": 10},
}
OFF = {
    **SHORT,
    "collector": {"n_sample": 64, "random_steps": 300},
    "learner": {"update_per_collect": 4},
}
ON = {**SHORT, "collector": {"n_sample": 128}}
SPREAD = "mpe2.simple_spread_v3:parallel_env"
CASES = {
    "dqn": ("CartPole-v1", OFF),
    "c51": ("CartPole-v1", OFF),
    "rainbow": ("CartPole-v1", OFF),
    "r2d2": ("CartPole-v1", {**OFF, "learner": {"update_per_collect": 2, "learn_start": 400}}),
    "discrete_sac": ("CartPole-v1", OFF),
    "sac": ("Pendulum-v1", {**OFF, "max_env_step": 400}),
    "ddpg": ("Pendulum-v1", {**OFF, "max_env_step": 400}),
    "sac_recurrent": ("Pendulum-v1", {**OFF, "max_env_step": 400}),
    "td3_recurrent": ("Pendulum-v1", {**OFF, "max_env_step": 400}),
    "ppo": ("CartPole-v1", ON),
    "ppg": ("CartPole-v1", ON),
    "a2c": ("CartPole-v1", ON),
    "impala": ("CartPole-v1", ON),
    "pqn": ("CartPole-v1", ON),
    "ppo_offpolicy": ("CartPole-v1", {**OFF, "collector": {"n_sample": 64}}),
    "pg": ("CartPole-v1", {**SHORT, "collector": {"n_episode": 8}}),
    "ppo_recurrent": ("CartPole-v1", ON),
    "mappo_recurrent": ("dmiddleware.zoo.envs:TeamRecall", ON),
    "qmix_recurrent": ("dmiddleware.zoo.envs:TeamRecall", OFF),
}
OFFLINE = {
    "max_train_iter": 30,
    "learner": {"update_per_collect": 10},
    "evaluator": {"n_episode": 10},
}


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def digest(state):
    found = hashlib.sha256()
    for path, leaf in leaves(state["model"]):
        found.update(path.encode())
        found.update(leaf.numpy().tobytes())
    return found.hexdigest()


def run_code(code, seed):
    names = {"__name__": "copied"}
    exec(compile(code, "chain.py", "exec"), names)
    return names["main"](seed=seed)


@pytest.mark.parametrize("algo", mostly_slow(CASES, keep=[0, 7]))
def test_the_chain_is_code_that_trains_the_same_policy(algo):
    env, options = CASES[algo]
    result = train(algo, env, seed=3, **options)
    copied = run_code(result.chain, seed=3)
    assert result.train_iter > 0
    assert copied.path != result.path
    assert digest(copied.load_best()) == digest(result.load_best())
    assert (copied.mean_return, copied.env_step) == (result.mean_return, result.env_step)


@pytest.mark.parametrize("algo", mostly_slow(["qmix", "mappo"], keep=1))
def test_several_agents_learn(algo):
    pytest.importorskip("mpe2")
    options = {**SHORT, "collector": {"n_sample": 100}, "eval_env_num": 4}
    options["evaluator"] = {"n_episode": 4}
    env = EnvSettings(SPREAD, env_num=4)
    result = train(algo, env, **{**options, "experiment": {"n_fresh_episode": 4}})
    copied = run_code(result.chain, seed=0)
    assert digest(copied.load_best()) == digest(result.load_best())
    obs, _ = make_env(env).reset(seed=0)
    assert result.policy(obs).shape == (3,)


def pendulum_rows(path):
    with make_env_manager("Pendulum-v1", env_num=2, seed=0) as envs:
        policy = BCPolicy.for_env(envs, seed=0)
        rows = RolloutCollector(policy, envs).collect(800)
    save_dataset(path, rows)
    return str(path)


@pytest.mark.parametrize(
    "algo",
    mostly_slow(["bc", "td3_bc", "cql", "bcq", "edac", "iql", "decision_transformer"], keep=[1]),
)
def test_offline_algorithms_learn_from_a_file(algo, tmp_path):
    data = pendulum_rows(tmp_path / "rows.safetensors")
    experiment = {"n_fresh_episode": 10}
    policy = {"batch_size": 16}
    if hasattr(get_policy_cls({"type": algo}).settings_class(), "n_step"):
        policy["n_step"] = 3
    result = train(algo, "Pendulum-v1", data=data, policy=policy, experiment=experiment, **OFFLINE)
    copied = run_code(result.chain, seed=0)
    assert result.train_iter == 30
    assert digest(copied.load_best()) == digest(result.load_best())
    assert result.policy(np.zeros(3, np.float32)).shape == (1,)


def test_the_result_has_the_policy_and_the_files():
    result = dmiddleware.train("dqn", "CartPole-v1", seed=1, **OFF)
    assert isinstance(result, TrainResult)
    for name in ("config.yaml", "result.json", "metrics.jsonl", "curve.png", "log.txt"):
        assert (result.path / name).is_file(), name
    assert result.path.as_posix() == "runs/dqn-CartPole-v1"
    assert "policy=" not in repr(result)
    env, returns = gym.make("CartPole-v1"), []
    for episode in range(30):
        obs, _ = env.reset(seed=derive_seed(0, "fresh", episode))
        total, done = 0.0, False
        while not done:
            obs, reward, terminated, truncated, _ = env.step(result.policy(obs))
            total, done = total + float(reward), terminated or truncated
        returns.append(total)
    # The same policy as in the fresh episodes of the result.
    assert np.mean(returns) == pytest.approx(result.mean_return, rel=0.5)


def test_settings_are_replaced_or_changed():
    changed = train("dqn", "CartPole-v1", **{**OFF, "policy": {"learning_rate": 3e-4}})
    assert changed.policy.policy.cfg.learning_rate == 3e-4
    assert changed.policy.policy.cfg.n_step == 3, "tuned"
    settings = DQNSettings(batch_size=16)
    learner = OffPolicyLearnerSettings(update_per_collect=2)
    replaced = train("dqn", "CartPole-v1", **{**OFF, "policy": settings, "learner": learner})
    assert (replaced.policy.policy.cfg.n_step, replaced.policy.policy.cfg.batch_size) == (1, 16)
    assert "update_per_collect=2" in replaced.chain
    pace = {"exchanger": {"samples_per_insert": 4.0}, "weights": {"max_policy_lag": 64}}
    paced = train("dqn", "CartPole-v1", **OFF, **pace, max_time_s=900.0)
    assert "ContextExchanger(samples_per_insert=4.0)" in paced.chain
    assert "ModelExchanger(policy, max_policy_lag=64)" in paced.chain
    assert "TerminationChecker(max_env_step=700, max_time_s=900.0)" in paced.chain


def test_an_env_of_ones_own_has_the_defaults():
    def make():
        return gym.wrappers.TimeLimit(gym.make("CartPole-v1").unwrapped, 20)

    result = train("ppo", make, **ON)
    assert result.policy(np.zeros((5, 4), np.float32)).shape == (5,)


def test_an_interrupted_run_says_how_to_continue(capsys):
    class Interrupting(gym.Wrapper):
        n_steps = 0

        def step(self, action):
            Interrupting.n_steps += 1
            if Interrupting.n_steps == 400:
                signal.raise_signal(signal.SIGINT)
            return super().step(action)

    def make():
        return Interrupting(gym.make("CartPole-v1"))

    options = {**OFF, "exp_name": "mine"}
    for name in ("mine", "mine-2"):  # the second run gets another folder
        Interrupting.n_steps = 0
        with pytest.raises(KeyboardInterrupt):
            train("dqn", EnvSettings(make, env_num=2), **options)
        assert (
            f"to continue this run: ditask resume runs/{name}; in Python: the same with "
            f'exp_name="{name}" and resume=True'
        ) in capsys.readouterr().out
    options |= {"exp_name": "mine-2", "resume": True}
    assert train("dqn", EnvSettings(make, env_num=2), **options).env_step >= 700
    assert "to continue" not in capsys.readouterr().out


def test_a_run_is_rebuilt_from_its_config():
    result = train("dqn", "CartPole-v1", seed=5, **OFF)
    arguments = arguments_of(off_policy, ["--config", str(result.path / "config.yaml")])
    again = off_policy(**arguments)
    assert digest(again.load_best()) == digest(result.load_best())


@pytest.mark.parametrize(
    ("algo", "env", "options", "error", "words"),
    [
        ("dqnn", "CartPole-v1", {}, RegistryError, "dqn"),
        ("dqn", "CartPole-v2", {}, RegistryError, "CartPole-v1"),
        ("sac", "CartPole-v1", {}, SpaceError, "discrete"),
        ("dqn", "CartPole-v1", {"max_env_steps": 3}, ConfigError, "max_env_step"),
        ("dqn", "CartPole-v1", {"policy": {"learning_rat": 3}}, ConfigError, "learning_rate"),
        ("iql", "Pendulum-v1", {}, ConfigError, "Minari"),
    ],
)
def test_slips_are_refused(algo, env, options, error, words):
    with pytest.raises(error, match=words):
        train(algo, env, **options)


GAMES = {
    "ALE/Pong-v5": ("ale_py", {"max_episode_steps": 60}),
    "MiniGrid-Empty-5x5-v0": ("minigrid", {"max_steps": 30}),
    "LunarLander-v3": ("Box2D", {"max_episode_steps": 60}),
    "Hopper-v5": ("mujoco", {"max_episode_steps": 60}),
}


class NoName:
    """An object that is neither the name of an algorithm nor an env."""


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"batch_size": 32}, 'give it as policy={"batch_size": ...}'),
        ({"n_sample": 8}, 'give it as collector={"n_sample": ...}'),
        ({"policy.discount": 0.9}, 'give it as policy={"discount": ...}'),
        ({"gamma": 0.9}, 'did you mean policy={"discount": ...}?'),
        ({"buffer_size": 100}, 'did you mean buffer={"size": ...}?'),
        ({"num_envs": 2}, 'did you mean env={"env_num": ...}?'),
        ({"total_timesteps": 64}, "did you mean max_env_step?"),
        ({"max_env_stp": 64}, "did you mean max_env_step?"),
        ({"nonsense": 64}, "known are: buffer, "),
        ({"policy": {"gamma": 0.9}}, "unknown option gamma; did you mean discount?"),
        ({"policy": 3}, "policy must have options by name, got 3"),
        ({"max_env_step": "many"}, "max_env_step must be an integer"),
        ({"seed": None}, "seed must be an integer ≥ 0, got None"),
        ({"seed": -1}, "seed must be an integer ≥ 0, got -1"),
        ({"resume": "yes"}, "train: resume must be True or False, got 'yes'"),
        ({"exp_name": 3}, "train: exp_name must be a string, got 3"),
        ({"eval_env_num": 0}, "train: eval_env_num must be an integer ≥ 1, got 0"),
        ({"eval_env_kwargs": [1]}, "train: eval_env_kwargs must be a dictionary, got [1]"),
        ({"policy": SACSettings()}, "DQNPolicy takes DQNSettings(...)"),
        ({"collector": None}, "collector must have options by name, got None"),
    ],
)
def test_options_of_settings_say_how_they_are_given(options, words):
    with pytest.raises(ConfigError) as caught:
        train("dqn", "CartPole-v1", **options)
    assert words in str(caught.value)


@pytest.mark.parametrize("data", [3, np.zeros(3), {"obs": [1]}, None])
def test_recorded_data_are_named_by_a_text(data):
    with pytest.raises(ConfigError, match="train: data must be a string, got"):
        train("bc", "CartPole-v1", data=data)


@pytest.mark.parametrize("algo", [None, 3, DQNPolicy, NoName()])
def test_an_algorithm_is_a_name(algo):
    with pytest.raises(ConfigError, match=r"algo must be the name of an algorithm.*own learns"):
        train(algo, "CartPole-v1")


@pytest.mark.parametrize("env", [None, 3, NoName(), gym.make("CartPole-v1"), ["CartPole-v1"]])
def test_an_env_is_an_id_or_a_function(env):
    with pytest.raises(ConfigError, match="id of an env or a function that makes one"):
        train("dqn", env)


@pytest.mark.parametrize("game", GAMES)
def test_envs_of_extras_are_found_by_id(game):
    package, kwargs = GAMES[game]
    pytest.importorskip(package)
    options = {**ON, "max_env_step": 100, "policy": {"epoch_per_collect": 1}}
    env = tuned_options("ppo", game)["env"]
    env["env_kwargs"] = {**env.get("env_kwargs", {}), **kwargs}
    env["env_num"] = 4
    options["experiment"] = {"n_fresh_episode": 2}
    result = train("ppo", EnvSettings(**env), **options)
    assert result.train_iter > 0


def test_envpool_steps_the_envs():
    pytest.importorskip("envpool")
    env = EnvSettings("CartPole-v1", env_num=8, backend="envpool")
    result = train("ppo", env, **ON)
    assert result.train_iter > 0


def test_games_of_atari_are_judged_by_whole_games():
    for algo in ("dqn", "ppo", "a2c"):
        options = tuned_options(algo, "ALE/Breakout-v5")
        assert options["env"]["env_kwargs"] == {"game": "ALE/Breakout-v5"}
        assert options["eval_env_kwargs"] == {"life_loss": False, "clip_reward": False}


@pytest.mark.parametrize("algo", mostly_slow(["ppo", "dqn"], keep=1))
def test_a_run_continues_from_its_newest_snapshot(algo):
    options = OFF if algo == "dqn" else ON
    whole = train(algo, "CartPole-v1", exp_name="whole", **{**options, "max_env_step": 1400})
    train(algo, "CartPole-v1", exp_name="parts", **options)
    further = {**options, "max_env_step": 1400, "resume": True}
    resumed = train(algo, "CartPole-v1", exp_name="parts", **further)
    assert resumed.path.name == "parts"
    assert (resumed.env_step, resumed.train_iter) == (whole.env_step, whole.train_iter)
    assert digest(resumed.load_best()) == digest(whole.load_best())


def files_of(run):
    """Return what a run has left in its folder, but for its text log."""
    return {path: path.read_bytes() for path in run.rglob("*.*") if path.name != "log.txt"}


@pytest.mark.parametrize("algo", mostly_slow(["ppo", "dqn", "bc"], keep=1))
def test_a_run_whose_snapshots_cannot_be_read_is_not_trained_over(algo, tmp_path):
    if algo == "bc":
        arguments = ("bc", "Pendulum-v1")
        options = {**OFFLINE, "data": pendulum_rows(tmp_path / "rows.safetensors")}
    else:
        arguments, options = (algo, "CartPole-v1"), OFF if algo == "dqn" else ON
    result = train(*arguments, **options, exp_name="run")
    for path in (result.path / "snapshots").glob("step_*"):
        path.write_bytes(path.read_bytes()[:-1])
    left = files_of(result.path)
    with pytest.raises(RunFolderError, match="no snapshot that can be read"):
        train(*arguments, **options, exp_name="run", resume=True)
    assert files_of(result.path) == left


def test_a_run_without_any_snapshot_starts_when_it_is_resumed():
    assert train("ppo", "CartPole-v1", **ON, exp_name="new", resume=True).train_iter > 0
    shutil.rmtree("runs/new/snapshots")
    assert train("ppo", "CartPole-v1", **ON, exp_name="new", resume=True).path.name == "new"


@pytest.mark.parametrize("wrappers", [gym.Wrapper, "my_envs:Mirror", None, iter([gym.Wrapper])])
def test_wrappers_that_are_no_list_are_refused(wrappers: object) -> None:
    with pytest.raises(ConfigError, match="train: wrappers must be a list of wrappers, got"):
        train("dqn", "CartPole-v1", wrappers=wrappers, max_env_step=8)  # type: ignore[arg-type]


def test_a_program_for_recorded_data_asks_for_them() -> None:
    with pytest.raises(ConfigError, match="no recorded data are named; give data"):
        train("iql", "Pendulum-v1", max_train_iter=1)
