"""The command that runs the config files of a checkout."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.di_engine.configs import config_files

ROOT = Path(__file__).parents[2]

RUNS = """
main_config = dict(
    exp_name="trial",
    env=dict(collector_env_num=8, evaluator_env_num=5, n_evaluator_episode=5, stop_value=195),
    policy=dict(
        model=dict(obs_shape=4, action_shape=2, encoder_hidden_size_list=[16]),
        learn=dict(update_per_collect=500, batch_size=64),
        collect=dict(n_sample=800),
    ),
)
create_config = dict(
    env=dict(type="cartpole", import_names=["dizoo.classic_control.cartpole.envs.cartpole_env"]),
    env_manager=dict(type="subprocess"),
    policy=dict(type="dqn"),
)
"""
REFUSED = RUNS.replace('"dqn"', '"happo"')
FAILS = (
    RUNS + "\nmain_config['policy']['collect']['n_sample'] = object()\nraise LookupError('lost')\n"
)
SQIL = (
    RUNS.replace('"dqn"', '"sql"')
    + """
if __name__ == "__main__":
    from ding.entry import serial_pipeline_sqil
    expert_config = dict(main_config, exp_name="expert")
    serial_pipeline_sqil((main_config, create_config), [expert_config, create_config], seed=0)
"""
)
TREX = SQIL.replace("sqil", "trex")


@pytest.fixture
def checkout(tmp_path):
    folder = tmp_path / "dizoo" / "config"
    folder.mkdir(parents=True)
    files = {
        "runs": RUNS, "refused": REFUSED, "fails": FAILS, "sqil": SQIL, "trex": TREX,
        "other": "x = 1\n",
    }  # fmt: skip
    for name, text in files.items():
        (folder / f"{name}_config.py").write_text(text)
    return tmp_path


def test_files_that_define_both_configs_are_found(checkout):
    names = [path.stem for path in config_files(checkout)]
    assert names == ["fails_config", "refused_config", "runs_config", "sqil_config", "trex_config"]


@pytest.mark.process
def test_each_config_has_a_row_with_its_outcome_and_the_reason(checkout):
    command = [sys.executable, "-m", "tests.di_engine.configs", str(checkout)]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    *lines, tally = answer.stdout.splitlines()
    rows = {}
    for line in lines:
        outcome, rest = line.split(maxsplit=1)
        name, _, reason = rest.partition(": ")
        rows[name.removeprefix("dizoo/config/").removesuffix("_config.py")] = outcome, reason
    assert rows["runs"] == ("runs", "")
    assert rows["refused"][0] == "refused" and "mappo" in rows["refused"][1]
    assert rows["sqil"] == ("runs", "")
    assert rows["trex"][0] == "refused" and "RewardLearner" in rows["trex"][1]
    assert rows["fails"][0] == "fails" and "LookupError: lost" in rows["fails"][1]
    assert tally == "2 runs, 2 refused, 1 fails"
