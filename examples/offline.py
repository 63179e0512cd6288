"""Offline learning from the datasets of examples.make_offline_data, which it makes if needed.

TD3+BC on the mixed data of Pendulum: ``python -m examples.offline --algo td3_bc``. ``--compiled``
compiles the update, which takes a minute and pays in long trainings.
"""

from typing import Any

import click

from dmiddleware import Task
from dmiddleware.data import Batch, TensorBuffer
from dmiddleware.env import make_env_manager
from dmiddleware.policy import (
    BCPolicy,
    CQLPolicy,
    DecisionTransformerPolicy,
    IQLPolicy,
    Policy,
    TD3BCPolicy,
)
from dmiddleware.rl import with_returns_to_go
from examples import make_offline_data
from middleware import (
    Experiment,
    ExperimentResult,
    InteractionEvaluator,
    OfflineRLContext,
    OffPolicyLearner,
    TerminationChecker,
)

POLICIES: dict[str, tuple[type[Policy], dict[str, Any]]] = {
    "bc": (BCPolicy, {"model": {"encoder_hidden_sizes": [256, 256], "activation": "relu"}}),
    "td3_bc": (TD3BCPolicy, {}),
    # Fewer actions than in the paper, which would take twice the time.
    "cql": (CQLPolicy, {"n_actions": 4, "obs_norm": True}),
    "iql": (IQLPolicy, {}),
    "dt": (DecisionTransformerPolicy, {"learning_rate": 1e-3, "model": {"embed_size": 64}}),
}


def make_policy(algo: str, env_id: str, seed: int = 0, compiled: bool = False) -> Policy:
    """Build the policy of an algorithm."""
    cls, options = POLICIES[algo]
    envs = make_env_manager(env_id, env_num=1)
    return cls.for_env(envs, seed=seed, compile=compiled, **options)


def make_buffer(policy: Policy, rows: Batch, seed: int) -> TensorBuffer:
    """Return a buffer of single rows, or of the sequences that a decision transformer needs."""
    length = None
    if isinstance(policy, DecisionTransformerPolicy):
        rows, length = with_returns_to_go(rows), policy.context_length
    buffer = TensorBuffer(len(rows["done"]), unroll_len=length, seed=seed)
    buffer.push(rows)
    return buffer


def main(
    algo: str = "iql",
    env_id: str = "Pendulum-v1",
    kind: str = "mixed",
    seed: int = 0,
    exp_name: str = "offline",
    max_train_iter: int = 20_000,
    compiled: bool = False,
) -> ExperimentResult:
    """Learn from a dataset without playing."""
    rows = make_offline_data.load(env_id, kind)
    policy = make_policy(algo, env_id, seed, compiled)
    policy.observe(rows["obs"])
    buffer = make_buffer(policy, rows, seed)
    experiment = Experiment(exp_name, policy)
    with Task(OfflineRLContext(), seed=seed) as task:
        eval_env = make_env_manager(env_id, env_num=10, seed=task.seed_for("evaluator"))
        task.use(OffPolicyLearner(policy, buffer, update_per_collect=100))
        task.use(
            InteractionEvaluator(
                policy, eval_env, n_episode=20, every_train_iter=max(1, max_train_iter // 10)
            )
        )
        task.use(experiment)
        task.use(TerminationChecker(max_train_iter=max_train_iter))
        task.run()
    return experiment.result


@click.command(help=main.__doc__, context_settings={"show_default": True})
@click.option("--algo", type=click.Choice(list(POLICIES)), default="iql")
@click.option(
    "--env", "env_id", type=click.Choice(list(make_offline_data.RECIPES)), default="Pendulum-v1"
)
@click.option("--kind", type=click.Choice(make_offline_data.KINDS), default="mixed")
@click.option("--seed", type=click.IntRange(min=0), default=0)
@click.option("--exp-name", default="offline", help="Folder of the run in runs/.")
@click.option("--max-train-iter", type=click.IntRange(min=1), default=20_000)
@click.option("--compiled", is_flag=True, help="Compile the update.")
def command(**options: Any) -> None:
    main(**options)


if __name__ == "__main__":
    command()
