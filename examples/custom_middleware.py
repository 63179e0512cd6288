"""Custom middleware: exploration that decreases as the policy gets better.

``explore_by_return`` is a plain function of the context. ``count_solved`` has a ``yield``: the code
after it runs on the way back, when the rest of the chain has done its work.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from dmiddleware import Task, kept, middleware
from dmiddleware.data import TensorBuffer, TensorBufferSettings
from dmiddleware.env import EnvSettings, make_env_manager
from dmiddleware.policy import DQNSettings
from dmiddleware.program import run_program
from dmiddleware.settings import Count, Whole
from examples.cartpole_dqn import ENV, POLICY, make_policy
from middleware import (
    DataPusher,
    Experiment,
    ExperimentResult,
    ExperimentSettings,
    InteractionEvaluator,
    InteractionEvaluatorSettings,
    OffPolicyLearner,
    OffPolicyLearnerSettings,
    OnlineRLContext,
    Role,
    StepCollector,
    StepCollectorSettings,
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
    seed: Whole = 0,
    exp_name: str = "custom_middleware",
    max_env_step: Count = 60_000,
    env: EnvSettings = ENV,
    eval_env_num: Count = 30,
    policy: DQNSettings = POLICY,
    collector: StepCollectorSettings = StepCollectorSettings(n_sample=128, random_steps=1000),
    buffer: TensorBufferSettings = TensorBufferSettings(60_000),
    learner: OffPolicyLearnerSettings = OffPolicyLearnerSettings(update_per_collect=64),
    evaluator: InteractionEvaluatorSettings = InteractionEvaluatorSettings(
        n_episode=50, every_train_iter=640, stop_value=495
    ),
    experiment: ExperimentSettings = ExperimentSettings(),
) -> ExperimentResult:
    """Train DQN on CartPole-v1 with custom middleware.

    Args:
        seed: seed of everything random.
        exp_name: folder of the run in runs/.
        max_env_step: maximum number of environment steps.
        eval_env_num: number of envs that evaluate.
    """
    agent = make_policy(env, policy, seed)
    record = Experiment.of(experiment, exp_name, agent)
    with Task(CuriousContext(), seed=seed) as task:
        envs = make_env_manager(env, seed=task.seed_for("collector"))
        eval_envs = make_env_manager(env, env_num=eval_env_num, seed=task.seed_for("evaluator"))
        replay = TensorBuffer.of(buffer, seed=task.seed_for("buffer"))

        task.use(record)
        task.use(count_solved)
        task.use(explore_by_return)
        task.use(StepCollector.of(collector, agent, envs))
        task.use(DataPusher(replay))
        task.use(OffPolicyLearner.of(learner, agent, replay))
        task.use(InteractionEvaluator.of(evaluator, agent, eval_envs))
        task.use(TerminationChecker(max_env_step=max_env_step))
        task.run()
    return record.result


if __name__ == "__main__":
    run_program(main)
