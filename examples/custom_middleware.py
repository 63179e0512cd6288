"""Custom middleware: exploration that decreases as the policy gets better.

``explore_by_return`` is a plain function of the context. ``count_solved`` has a ``yield``: the code
after it runs on the way back, when the rest of the chain has done its work.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from dmiddleware import Task, kept, middleware
from dmiddleware.data import TensorBuffer
from dmiddleware.env import make_env_manager
from examples.cartpole_dqn import ENV, make_policy
from examples.common import command
from middleware import (
    DataPusher,
    Experiment,
    ExperimentResult,
    InteractionEvaluator,
    OffPolicyLearner,
    OnlineRLContext,
    Role,
    StepCollector,
    TerminationChecker,
)


@dataclass
class CuriousContext(OnlineRLContext):
    """The context, with two more fields that carry over from step to step."""

    recent_return: float = kept(0.0)
    solved_steps: int = kept(0)


@middleware(roles=(Role.COLLECTOR,), reads=("recent_return",), writes=("collect_kwargs",))
def explore_by_return(ctx: CuriousContext) -> None:
    """Lower the probability of random actions from 1 (mean return 0) to 0.04 (mean return 100)."""
    ctx.collect_kwargs["eps"] = max(0.04, 1.0 - ctx.recent_return / 100)
    ctx.log("collect/eps", ctx.collect_kwargs["eps"])


@middleware(writes=("recent_return", "solved_steps"))
def count_solved(ctx: CuriousContext) -> Iterator[None]:
    """Average the returns of training episodes, and count the steps in which they were high."""
    yield
    newest = ctx.logged.get("collect/return_mean", ctx.recent_return)
    ctx.recent_return += 0.1 * (newest - ctx.recent_return)
    ctx.solved_steps += newest >= 475
    ctx.log("custom/solved_steps", ctx.solved_steps)


def main(
    seed: int = 0, exp_name: str = "custom_middleware", max_env_step: int = 60_000
) -> ExperimentResult:
    """Train DQN on CartPole-v1 with custom middleware."""
    policy = make_policy(seed)
    experiment = Experiment(exp_name, policy)
    with Task(CuriousContext(), seed=seed) as task:
        collect_env = make_env_manager(ENV, env_num=8, seed=task.seed_for("collector"))
        eval_env = make_env_manager(ENV, env_num=30, seed=task.seed_for("evaluator"))
        buffer = TensorBuffer(max_env_step, n_step=policy.n_step, seed=task.seed_for("buffer"))

        task.use(experiment)
        task.use(count_solved)
        task.use(explore_by_return)
        task.use(StepCollector(policy, collect_env, n_sample=128, random_steps=1000))
        task.use(DataPusher(buffer))
        task.use(OffPolicyLearner(policy, buffer, update_per_collect=64))
        task.use(
            InteractionEvaluator(
                policy, eval_env, n_episode=50, every_train_iter=640, stop_value=495
            )
        )
        task.use(TerminationChecker(max_env_step=max_env_step))
        task.run()
    return experiment.result


if __name__ == "__main__":
    command(ENV, make_policy, main)()
