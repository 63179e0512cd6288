"""The tuned settings: whole, readable without torch, and with the results that they gave."""

from __future__ import annotations

import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from dmiddleware import zoo
from dmiddleware.command_line import arguments_of, arguments_with
from dmiddleware.errors import RegistryError
from dmiddleware.policy import POLICY_REGISTRY
from dmiddleware.settings import plain_values
from dmiddleware.zoo import algorithms, tuned, tuned_options
from middleware.programs.train import program_of, tuned_arguments
from tests.results import (
    agents,
    classic_control,
    continuous,
    offline,
    onpolicy,
    qlearn,
    recurrent,
)
from tests.results.goals import goal_of
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
    # No program takes demonstrations beside the policy's own play, which DQfD learns from.
    assert sorted({*stock} - {"dqfd"}) == list(algorithms())


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
    goal = goal_of(training)
    assert entry.stop_value == (None if goal is None else goal.value)
    if goal is not None:
        steps = [at for one in records if (at := goal.steps(one)) is not None]
        assert entry.result.n_reached == len(steps)
        assert entry.result.steps == ((min(steps), max(steps)) if steps else None)
        returns = (entry.result.best, entry.result.last, entry.result.env_step)
        assert returns == (None, None, None), "they say little more than the stop value"
        return
    assert (entry.result.n_reached, entry.result.steps) == (0, None)
    for name, figures in {
        "best": [one.figure for one in records],
        "last": [one.last for one in records],
        "env_step": [one.env_step for one in records],
    }.items():
        assert getattr(entry.result, name) == pytest.approx(statistics.mean(figures), abs=0.51)


@pytest.mark.parametrize(("algo", "env", "entry"), ENTRIES, ids=IDS)
def test_steps_to_a_goal_are_measured_on_a_fine_grid(algo, env, entry):
    if entry.result is None or entry.stop_value is None:
        return
    training = TRAININGS[entry.result.record]
    coarse = []
    for seed in training.seeds:
        record = load(training.name, seed)
        steps = None if record is None else goal_of(training).steps(record)
        if steps is not None:
            coarse.append(sum(at < steps for at, _ in record.evaluations) < 3)
    assert not any(coarse)


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
    if program_of(algo).__name__ == "offline":
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


EVERY_FOURTH_STEP = 4
"""The steps from one update to the next in all of these papers."""
PAPERS = {
    # Bellemare et al. (2017), section 5, and for what it leaves out, Mnih et al. (2015)
    "c51": {
        "learning_rate": 2.5e-4, "adam_eps": 0.01 / 32, "target_steps": 10_000, "n_step": 1,
        "double": False, "eps_end": 0.01, "model": {"n_atoms": 51, "v_min": -10.0, "v_max": 10.0},
    },
    # Dabney et al., "Distributional RL with Quantile Regression" (2018), section "Experiments"
    "qrdqn": {
        "learning_rate": 5e-5, "adam_eps": 0.01 / 32, "target_steps": 10_000, "n_step": 1,
        "double": False, "eps_end": 0.01, "model": {"n_quantiles": 200},
    },
    # Dabney et al., "Implicit Quantile Networks" (2018), which has the optimizer of QR-DQN
    "iqn": {
        "learning_rate": 5e-5, "adam_eps": 0.01 / 32, "target_steps": 10_000, "n_step": 1,
        "double": False, "eps_end": 0.01, "model": {"n_quantiles": 32},
    },
    # Hessel et al. (2018), table 1
    "rainbow": {
        "learning_rate": 6.25e-5, "adam_eps": 1.5e-4, "target_steps": 8_000, "n_step": 3,
        "double": True, "eps_end": 0.0, "learn_start": 20_000,
        "model": {"n_atoms": 51, "v_min": -10.0, "v_max": 10.0, "head_hidden_sizes": [512]},
    },
}  # fmt: skip


@pytest.mark.parametrize("algo", PAPERS)
def test_games_of_atari_have_the_settings_of_the_paper(algo):
    paper = PAPERS[algo]
    arguments = tuned_arguments(algo, "ALE/Some-v5")
    policy, learner = arguments["policy"], arguments["learner"]
    assert policy.learning_rate == paper["learning_rate"]
    assert policy.adam_eps == pytest.approx(paper["adam_eps"])
    assert (policy.batch_size, policy.discount, policy.n_step) == (32, 0.99, paper["n_step"])
    assert policy.double is paper["double"]
    assert policy.target_update_freq * EVERY_FOURTH_STEP == paper["target_steps"]
    assert policy.target_tau == 1.0
    assert arguments["collector"].n_sample == EVERY_FOURTH_STEP * learner.update_per_collect
    assert paper["model"].items() <= policy.model.items()
    eps = policy.eps if isinstance(policy.eps, float) else policy.eps.end
    assert eps == paper["eps_end"]
    assert learner.learn_start == paper.get("learn_start")
    # What differs for a smaller budget is said at the top of the file.
    text = (Path(zoo.__file__).parent / f"{algo}.yaml").read_text()
    head = text.partition("program:")[0]
    assert f"{arguments['max_env_step']:,} steps instead of 50,000,000" in head
    assert f"{arguments['buffer'].size:,} rows instead of 1,000,000" in head


@pytest.mark.parametrize("env", ["ALE/Some-v5", "Some-v0", "LunarLander-v3", "CartPole-v1"])
def test_rainbow_draws_by_priority_as_in_the_paper(env):
    sampler = tuned_arguments("rainbow", env)["sampler"]
    assert sampler.alpha == 0.5
    assert (sampler.beta.start, sampler.beta.end, sampler.beta.by) == (0.4, 1.0, "progress")


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
