"""Train with the settings of another library: ``python -m tests.results.ours --case NAME``.

The settings are those of the same case in ``tests.results.cases``, under our names. The examples
of MuJoCo have these settings already, and need no case here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from dmiddleware import Task
from dmiddleware.data import TensorBuffer
from dmiddleware.env import make_env_manager
from dmiddleware.policy import C51Policy, DDPGPolicy, DQNPolicy, Policy, QRDQNPolicy
from dmiddleware.rl import Schedule
from middleware import (
    Experiment,
    ExperimentResult,
    OffPolicyLearner,
    StepCollector,
    data_pusher,
    eps_greedy_handler,
    interaction_evaluator,
    termination_checker,
)
from tests.results.cases import CASES, Case, parse_arguments

__all__ = ["MAKERS", "steps_of_a_rollout", "train", "updates_between_evaluations"]

STEPS_OF_AN_EPISODE = 200  # of Pendulum-v1, always


def make_dqn(case: Case, seed: int) -> Policy:
    """Build the DQN of stable-baselines3, which is not double and clips gradients to a norm of 10.

    Its target network is copied by env steps, of which there are as many as updates.
    """
    options = {"double": False, "grad_clip_norm": 10.0}
    return _make_q_learning(DQNPolicy, case, seed, **options)


def make_c51(case: Case, seed: int) -> Policy:
    """Build the C51 of Tianshou, which is double, as ours is."""
    returns = {name: case.options[name] for name in ("v_min", "v_max")}
    return _make_q_learning(C51Policy, case, seed, network=returns)


def make_qrdqn(case: Case, seed: int) -> Policy:
    """Build the QR-DQN of sb3-contrib: not double, with the ε of Adam that its paper scales.

    Its target network is copied in every env step, so it is fixed while a rollout is learned from.
    """
    given = case.options
    return _make_q_learning(
        QRDQNPolicy,
        case,
        seed,
        network={"n_quantiles": case.policy_kwargs["n_quantiles"]},
        learning_rate=Schedule.linear(given["learning_rate"], 0.0, by="progress"),
        adam_eps=0.01 / given["batch_size"],
        target_update_freq=given["train_freq"],
        double=False,
    )


def make_ddpg(case: Case, seed: int) -> Policy:
    """Build the DDPG of stable-baselines3; it has our batches of 256 and τ of 0.005, too."""
    given = case.options
    sizes = case.policy_kwargs["net_arch"]
    return DDPGPolicy.for_env(
        make_env_manager(case.env, env_num=1),
        seed=seed,
        model={"actor_hidden_sizes": sizes, "critic_hidden_sizes": sizes},
        learning_rate_actor=given["learning_rate"],
        learning_rate_critic=given["learning_rate"],
        discount=given["gamma"],
        noise_sigma=case.noise,
    )


MAKERS: dict[str, Callable[[Case, int], Policy]] = {
    "dqn_lunarlander": make_dqn,
    "c51_lunarlander": make_c51,
    "qrdqn_lunarlander": make_qrdqn,
    "ddpg_pendulum": make_ddpg,
}
"""The functions that build our policy for a case."""


def train(name: str, case: Case, seed: int, exp_name: str) -> ExperimentResult:
    """Collect from one env; after each rollout, make as many updates as it has steps."""
    policy = MAKERS[name](case, seed)
    n_step = steps_of_a_rollout(case)
    buffer = TensorBuffer(case.options["buffer_size"], seed=seed)
    experiment = Experiment(exp_name, policy)
    with Task(seed=seed) as task:
        collect_env = make_env_manager(case.env, env_num=1, seed=task.seed_for("collector"))
        eval_env = make_env_manager(
            case.env, env_num=case.eval_env_num, seed=task.seed_for("evaluator")
        )

        if case.noise is None:
            task.use(eps_greedy_handler(policy))
        random_steps = case.options["learning_starts"]
        task.use(StepCollector(policy, collect_env, n_sample=n_step, random_steps=random_steps))
        task.use(data_pusher(buffer))
        task.use(OffPolicyLearner(policy, buffer, update_per_collect=n_step))
        task.use(
            interaction_evaluator(
                policy,
                eval_env,
                n_episode=case.n_episode,
                every_train_iter=updates_between_evaluations(case),
            )
        )
        task.use(experiment)
        task.use(termination_checker(max_env_step=case.env_step))
        task.run()
    return experiment.result


def steps_of_a_rollout(case: Case) -> int:
    """Return how many steps are collected between two updates, and how many updates follow."""
    n_step = case.options["train_freq"]
    return STEPS_OF_AN_EPISODE if n_step == (1, "episode") else int(n_step)


def updates_between_evaluations(case: Case) -> int:
    """Return the interval that gives as many evaluations as the other side has while it learns.

    One more evaluates the untrained policy, and the last one is in the last rollouts.
    """
    n_step = steps_of_a_rollout(case)
    before = max(case.options["learning_starts"], case.options.get("batch_size", 0)) + n_step
    n_updates = case.env_step - before
    n_evaluations = math.ceil(case.n_evaluations * n_updates / case.env_step)
    return max(1, n_updates // n_evaluations // n_step) * n_step


def _make_q_learning(
    policy_cls: type[Policy],
    case: Case,
    seed: int,
    *,
    network: Mapping[str, Any] | None = None,
    **options: Any,
) -> Policy:
    """Build a policy with the settings of a case, further ones of its network, and others."""
    given = case.options
    settings = {
        "model": {"encoder_hidden_sizes": case.policy_kwargs["net_arch"], **(network or {})},
        "learning_rate": given["learning_rate"],
        "batch_size": given["batch_size"],
        "discount": given["gamma"],
        "target_update_freq": given["target_update_interval"],
        "eps": Schedule.linear(
            1.0,
            given["exploration_final_eps"],
            decay=given["exploration_fraction"] * case.env_step,
        ),
        "compile": True,
        **options,
    }
    return policy_cls.for_env(make_env_manager(case.env, env_num=1), seed=seed, **settings)


def main() -> None:
    arguments = parse_arguments("ours", __doc__, MAKERS)
    train(arguments.case, CASES[arguments.case], arguments.seed, arguments.exp_name)


if __name__ == "__main__":
    main()
