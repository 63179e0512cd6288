"""``ditask classic``: DI-engine's config files, as they are."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from dmiddleware.classic import create_policy
from dmiddleware.data import (
    load_checkpoint,
    load_rows,
    pack_checkpoint,
    save_dataset,
    to_numpy,
)
from dmiddleware.ding import close_door
from dmiddleware.env import make_env_manager
from dmiddleware.errors import ConfigError, DatasetError, SpaceError
from dmiddleware.launch.cli import ditask
from dmiddleware.policy import DQNPolicy, SACPolicy
from dmiddleware.rollout import RolloutCollector
from dmiddleware.worker import BaseLearner, compile_config, offline_run, read_config
from dmiddleware.worker.commands import checked_mode, run_config
from dmiddleware.worker.config_file import read_config_with_system
from tests.dmiddleware.launch.ditask_process import DITASK
from tests.variants import mostly_slow

CONFIGS = Path(__file__).parent / "configs"


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))


def call(name, *line):
    return CliRunner().invoke(ditask, ["classic", "-c", str(CONFIGS / f"{name}_config.py"), *line])


def rows_of(env_id, policy_cls, n=600):
    with make_env_manager(env_id, env_num=4, seed=0) as envs:
        return RolloutCollector(policy_cls.for_env(envs, seed=0), envs).collect(n)


def write_hdf5(path, rows):
    h5py = pytest.importorskip("h5py")
    with h5py.File(path, "w") as file:
        for name in ("obs", "action", "reward", "next_obs", "done"):
            column = to_numpy(rows[name])
            file.create_dataset(name, data=column.reshape(-1, *column.shape[2:]))


def state_of(exp_name):
    return load_checkpoint(Path(exp_name, "ckpt_learner", "ckpt_best.safetensors"))


@pytest.mark.parametrize(
    ("name", "line"),
    mostly_slow(
        [
            ("cartpole_dqn", ()),
            ("cartpole_dqn", ("-m", "serial")),
            ("cartpole_ppo", ("-m", "serial_onpolicy")),
            ("cartpole_ppo", ()),
        ],
        keep=[0, 2],
    ),
)
def test_a_config_trains_by_play(name, line):
    found = call(name, "-s", "0", "--env-step", "600", *line)
    assert found.exit_code == 0, found.output
    assert f"checkpoints in {name}_seed0/ckpt_learner" in found.output
    assert state_of(f"{name}_seed0")["model"]
    assert Path(f"{name}_seed0", "total_config.yaml").is_file()


@pytest.mark.parametrize("line", [(), ("-m", "serial_offline")])
def test_a_config_trains_from_its_data(line):
    rows = rows_of("Pendulum-v1", SACPolicy)
    rows["action"] /= 2  # the config's env maps actions from [-1, 1] to its bounds itself
    write_hdf5("pendulum.hdf5", rows)
    found = call("pendulum_td3_bc", "-s", "0", *line)
    assert found.exit_code == 0, found.output
    assert "update 10 " in found.output, "two epochs of 600 rows in batches of 128"
    assert state_of("pendulum_td3_bc_seed0")["model"]


def test_a_mode_that_is_not_here_is_refused_with_what_to_use_instead():
    assert checked_mode(None, {"policy": {}}) == "serial"
    assert checked_mode(None, {"policy": {}}, data="rows.safetensors") == "serial_offline"
    assert checked_mode("parallel", {}) == "parallel"
    for mode, word in (("serial_trex", "RewardLearner"), ("serial_dyna", "world models")):
        with pytest.raises(ConfigError, match=word):
            checked_mode(mode, {})
    with pytest.raises(ConfigError, match="the modes are serial"):
        checked_mode("serial_unheard_of", {})


def test_an_expert_is_imitated_with_its_config_from_the_command_line():
    expert = ("--expert", str(CONFIGS / "cartpole_dqn_config.py"), "-s", "0", "--env-step", "200")
    main, create = read_config(CONFIGS / "cartpole_dqn_config.py")
    policy = create_policy(compile_config(main, create, save=False).policy)
    torch.save(policy.collect_mode.state_dict(), "expert.pth.tar")
    answer = call("cartpole_sqil", "-m", "serial_sqil", *expert)
    assert answer.exit_code == 0, answer.output
    assert "checkpoints in cartpole_sqil_seed0/ckpt_learner" in answer.output
    for line in (("-m", "serial_sqil"), ("-m", "serial", *expert)):
        answer = call("cartpole_sqil", *line)
        assert answer.exit_code == 2 and "--expert FILE" in answer.output


@pytest.mark.parametrize("mode", ["bc", "serial_bc"])
def test_behavior_cloning_takes_its_data_from_the_command_line(mode):
    save_dataset("rows.safetensors", rows_of("CartPole-v1", DQNPolicy))
    found = call("cartpole_bc", "-s", "0", "-m", mode, "--data", "rows.safetensors")
    assert found.exit_code == 0, found.output
    assert "update 30 " in found.output, "three epochs of 600 rows in batches of 64"


def test_data_of_single_steps_get_the_returns_of_n_steps(monkeypatch):
    rows = rows_of("CartPole-v1", DQNPolicy)
    save_dataset("rows.safetensors", rows)
    batches = []
    monkeypatch.setattr(BaseLearner, "train", lambda learner, batch: batches.append(batch))
    main = {
        "exp_name": "nstep",
        "env": {"evaluator_env_num": 1, "n_evaluator_episode": 1},
        "policy": {
            "model": {"obs_shape": 4, "action_shape": 2}, "nstep": 3,
            "discount_factor": 0.5, "learn": {"batch_size": 600},
        },
    }  # fmt: skip
    create = {"env": {"type": "cartpole"}, "policy": {"type": "dqn"}}
    offline_run(main, create, data="rows.safetensors", show_progress=False)
    reward, discount = (batches[0][name].tolist() for name in ("reward", "discount"))
    # Every reward of CartPole is 1, so the discount says how many steps a return has.
    sums = {0.5: 1.0, 0.25: 1.5, 0.125: 1.75}
    assert reward == [sums[value] for value in discount]
    assert set(discount) == set(sums)


def test_a_model_of_another_size_than_the_env_is_named_before_its_data():
    save_dataset("rows.safetensors", rows_of("CartPole-v1", DQNPolicy))
    main, create = transformer_config()
    main["policy"]["model"]["state_dim"] = 11
    with pytest.raises(SpaceError, match=r"observations of shape \(11,\)"):
        offline_run(main, create, data="rows.safetensors", show_progress=False)


def transformer_config(**policy):
    main = {
        "exp_name": "dt",
        "env": {"evaluator_env_num": 1, "n_evaluator_episode": 1},
        "dataset": {"rtg_scale": 100, "data_dir_prefix": "rows.safetensors", "context_len": 5},
        "policy": {
            "model": {
                "state_dim": 4, "act_dim": 2, "n_blocks": 1, "h_dim": 8, "context_len": 5,
                "n_heads": 1, "drop_p": 0.1, "continuous": False,
            },
            "batch_size": 100,
            "rtg_target": 100,
            **policy,
        },
    }  # fmt: skip
    return main, {"env": {"type": "cartpole"}, "policy": {"type": "dt"}}


def test_a_decision_transformer_learns_from_the_sequences_of_its_dataset():
    save_dataset("rows.safetensors", rows_of("CartPole-v1", DQNPolicy))
    policy = offline_run(*transformer_config(), show_progress=False)
    assert policy.get_attribute("train_iter") == 6, "as many batches as the rows fill"
    assert policy.cfg.return_scale == 100


def learned_rewards(monkeypatch, **env):
    rewards = []

    def noted(learner, batch, *args, **kwargs):
        rewards.append(batch["reward"])
        return [{}]

    monkeypatch.setattr(BaseLearner, "train", noted)
    main, create = read_config(CONFIGS / "cartpole_bc_config.py")
    main = {**main, "env": {**main["env"], **env}}
    offline_run(main, create, data="rows.safetensors", show_progress=False)
    return torch.cat(rewards)


@pytest.mark.parametrize(
    ("kind", "smallest", "largest"),
    [(None, 1.0, 1.0), ("iql_antmaze", 0.0, 0.0), ("antmaze", 1.5, 1.5)],
)
def test_rewards_of_data_are_scaled_as_the_env_says(kind, smallest, largest, monkeypatch):
    save_dataset("rows.safetensors", rows_of("CartPole-v1", DQNPolicy))
    rewards = learned_rewards(monkeypatch, reward_norm=kind)
    assert (rewards.min(), rewards.max()) == (smallest, largest)


def test_rewards_can_be_divided_by_the_span_of_the_returns(monkeypatch):
    rows = rows_of("CartPole-v1", DQNPolicy)
    save_dataset("rows.safetensors", rows)
    rows = load_rows("rows.safetensors")
    ends = rows["done"].nonzero().flatten() + 1
    lengths = ends.diff(prepend=torch.zeros(1, dtype=ends.dtype))
    rewards = learned_rewards(monkeypatch, reward_norm="iql_locomotion")
    assert rewards.max() == pytest.approx(1000 / float(lengths.max() - lengths.min()))


def test_an_unknown_way_to_scale_rewards_is_refused(monkeypatch):
    save_dataset("rows.safetensors", rows_of("CartPole-v1", DQNPolicy))
    with pytest.raises(ConfigError, match="iql_locomotion"):
        learned_rewards(monkeypatch, reward_norm="by_hand")


def test_the_seed_decides():
    save_dataset("rows.safetensors", rows_of("CartPole-v1", DQNPolicy))
    main, create = read_config(CONFIGS / "cartpole_bc_config.py")
    packed = []
    for seed in (0, 0, 1):
        policy = offline_run(main, create, seed, 5, data="rows.safetensors", show_progress=False)
        packed.append(bytes(pack_checkpoint(policy.eval_mode.state_dict())))
    assert packed[0] == packed[1]
    assert packed[0] != packed[2]


def test_names_beside_the_config_can_be_imported(tmp_path):
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "own_shapes.py").write_text("HIDDEN = [16, 16]\n")
    text = (CONFIGS / "cartpole_dqn_config.py").read_text()
    text = text.replace("[128, 128, 64]", "own_shapes.HIDDEN")
    (tmp_path / "own" / "config.py").write_text(f"import own_shapes\n{text}")
    main, create = read_config(tmp_path / "own" / "config.py")
    assert main["policy"]["model"]["encoder_hidden_size_list"] == [16, 16]
    assert create["policy"]["type"] == "dqn"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("from ding.config import read_config\nmain_config = {}", "ding"),
        ("cartpole_config = {}", "main_config, only cartpole_config"),
        ("main_config = {", "cannot read"),
        ("main_config = {}\ncreate_config = 3", "create_config"),
    ],
)
def test_an_unusable_config_file_is_refused(tmp_path, text, words):
    close_door()  # collecting the tests of the door has opened it
    (tmp_path / "bad.py").write_text(text)
    with pytest.raises(ConfigError, match=words):
        read_config(tmp_path / "bad.py")


def test_slips_on_the_command_line_are_told():
    assert "names no data" in call("cartpole_bc", "-m", "bc").output
    assert "--data needs" in call("cartpole_dqn", "-m", "serial", "--data", "x").output
    assert "there is no file" in call("pendulum_td3_bc").output
    assert "--env-step" in call("pendulum_td3_bc", "--env-step", "3").output
    assert "serial_onpolicy" in call("cartpole_ppo", "-m", "serial_on").output
    text = (CONFIGS / "cartpole_dqn_config.py").read_text()
    Path("typo.py").write_text(text.replace("update_per_collect", "update_per_colect"))
    found = CliRunner().invoke(ditask, ["classic", "-c", "typo.py"])
    assert found.exit_code == 1
    assert "update_per_collect" in found.output


def test_a_config_for_several_processes_has_all_three_parts():
    main, create, system = read_config_with_system(CONFIGS / "parallel_dqn_config.py")
    assert main["exp_name"] == "parallel_dqn" and "comm_learner" in create
    assert system["path_data"] == "./parallel_dqn/data"
    assert read_config_with_system(CONFIGS / "cartpole_dqn_config.py")[2] is None


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("launch", [(), ("--roles", "coordinator=1,learner=1,collector=1")])
def test_a_config_for_several_processes_runs_as_it_is(tmp_path, launch):
    words = ["classic", "-c", str(CONFIGS / "parallel_dqn_config.py"), "-s", "0"]
    done = subprocess.run(
        [*DITASK, *launch, *words],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=110,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        check=False,
    )
    assert done.returncode == 0, done.stdout
    (log,) = Path("parallel_dqn", "log", "commander").glob("*.txt")
    assert "has reached stop_value 5" in log.read_text()
    assert not list(Path("parallel_dqn").glob("data/**/*.safetensors*"))


def test_slips_of_a_run_of_several_processes_are_told():
    assert "--train-iter" in call("parallel_dqn", "--train-iter", "3").output
    found = CliRunner().invoke(ditask, ["--parallel-workers", "2", "classic", "-s", "1"])
    assert "name a config file after classic" in found.output
    with pytest.raises(ConfigError, match="name a config file"):
        run_config()


def test_rows_of_other_files_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="pickle"):
        load_rows(tmp_path / "data.pkl")
    with pytest.raises(ConfigError, match="no recorded data are named"):
        load_rows("")
    with pytest.raises(DatasetError):
        load_rows(tmp_path / "missing.hdf5")
    (tmp_path / "text.hdf5").write_text("not HDF5")
    with pytest.raises(DatasetError, match="cannot read"):
        load_rows(tmp_path / "text.hdf5")
