"""The tuned settings: whole, readable without torch, and with the results that they gave."""

from __future__ import annotations

import statistics
import subprocess
import sys

import pytest

from dmiddleware.command_line import arguments_of, arguments_with
from dmiddleware.errors import RegistryError
from dmiddleware.policy import POLICY_REGISTRY
from dmiddleware.settings import plain_values
from dmiddleware.zoo import algorithms, tuned, tuned_options
from middleware.programs.train import program_of
from tests.results import (
    agents,
    classic_control,
    continuous,
    offline,
    onpolicy,
    qlearn,
    recurrent,
)
from tests.results.record import load

TRAININGS = {
    entry.name: entry
    for part in (agents, classic_control, continuous, offline, onpolicy, qlearn, recurrent)
    for entry in part.ENTRIES
}
ENTRIES = [
    (algo, env, entry) for algo in algorithms() for env, entry in tuned(algo).entries.items()
]
IDS = [f"{algo}-{env}" for algo, env, _ in ENTRIES]


def test_every_algorithm_has_a_file():
    stock = [
        name for name in POLICY_REGISTRY
        if POLICY_REGISTRY.get(name).__module__.startswith("dmiddleware.policy.")
    ]  # fmt: skip
    assert sorted(stock) == list(algorithms())


@pytest.mark.parametrize("algo", algorithms())
@pytest.mark.parametrize("env", ["Some-v0", "ALE/Some-v5"])
def test_the_defaults_are_options_of_the_program(algo, env):
    arguments = arguments_with(program_of(algo), tuned_options(algo, env), at=algo)
    assert arguments["env"].env_num >= 1


@pytest.mark.parametrize(("algo", "env", "entry"), ENTRIES, ids=IDS)
def test_results_are_those_of_the_records(algo, env, entry):
    if entry.result is None:
        return
    training = TRAININGS[entry.result.record]
    records = [load(training.name, seed) for seed in training.seeds]
    records = [one for one in records if one is not None]
    assert len(records) == entry.result.n_seed
    for name, figures in {
        "best": [one.figure for one in records],
        "last": [one.last for one in records],
        "env_step": [one.env_step for one in records],
    }.items():
        assert getattr(entry.result, name) == pytest.approx(statistics.mean(figures), abs=0.51)


def _settings(arguments):
    left_out = ("seed", "exp_name", "algo", "resume", "experiment", "snapshots", "kind", "env")
    return {name: value for name, value in arguments.items() if name not in left_out}


@pytest.mark.parametrize(("algo", "env", "entry"), ENTRIES, ids=IDS)
def test_examples_have_the_same_settings(algo, env, entry):
    if entry.result is None:
        return
    training = TRAININGS[entry.result.record]
    if training.is_in_zoo:
        assert (training.program, training.options[0]) == (algo, env)
        return
    module = __import__(training.program, fromlist=["main"])
    options = [one for one in training.options if one != "--policy.compile"]
    theirs = _settings(arguments_of(module.main, options))
    ours = _settings(arguments_with(program_of(algo), tuned_options(algo, env), at=algo))
    policy = theirs.get("policy") or module.POLICIES[algo]
    assert plain_values(ours.pop("policy")) == {**plain_values(policy), "cuda": False}
    if algo in ("iql", "bc", "td3_bc", "cql", "decision_transformer"):
        every = theirs["max_train_iter"] // theirs.pop("n_evaluation")
        assert ours["evaluator"].every_train_iter == every
        assert ours.pop("evaluator").n_episode == theirs.pop("n_episode")
    for name in ("max_env_step", "max_train_iter", "collector", "buffer", "learner", "evaluator"):
        if name in theirs and name in ours:
            wanted = theirs[name]
            if wanted is None:
                wanted = {"max_env_step": "MAX_ENV_STEP"}.get(name, f"{name.upper()}S")
                wanted = getattr(module, wanted)
                wanted = wanted[algo] if algo in wanted else wanted[env]
            if name == "buffer" and algo in ("ippo", "mappo"):
                continue
            assert ours[name] == wanted, name
    if "eval_env_num" in theirs:
        assert ours["eval_env_num"] == theirs["eval_env_num"]


def test_an_unknown_algorithm_names_the_nearest():
    with pytest.raises(RegistryError, match="dqn"):
        tuned("DQN1")
    with pytest.raises(RegistryError, match="ppo"):
        tuned("nothing")


@pytest.mark.process
def test_reading_them_imports_neither_torch_nor_gymnasium():
    program = """
import sys
from dmiddleware.settings import plain_values
from dmiddleware.zoo import algorithms, tuned, tuned_options
assert [tuned(one) for one in algorithms()]
assert not {"torch", "gymnasium", "middleware"}.intersection(sys.modules)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=100)
