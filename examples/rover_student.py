"""A student that sees a robot's sensors learns from a teacher that sees the whole simulator."""

from pathlib import Path

from dmiddleware import Task, load_policy
from dmiddleware.data import TensorBuffer, TensorBufferSettings
from dmiddleware.env import EnvSettings, make_env_manager
from dmiddleware.policy import ActorGroup, BCPolicy, BCSettings
from dmiddleware.program import run_program
from dmiddleware.settings import Count, Whole
from middleware import (
    DataPusher,
    Experiment,
    ExperimentResult,
    ExperimentSettings,
    InteractionEvaluator,
    InteractionEvaluatorSettings,
    OffPolicyLearner,
    OffPolicyLearnerSettings,
    StepCollector,
    StepCollectorSettings,
    TerminationChecker,
    labeled_by,
)

ENV = EnvSettings("dmiddleware.zoo.tensor_envs:Rover", env_num=32)
POLICY = BCSettings(obs_groups=ActorGroup(actor=("proprio", "scan")))


def make_policy(env: EnvSettings = ENV, policy: BCSettings = POLICY, seed: int = 0) -> BCPolicy:
    """Build the student."""
    return BCPolicy.for_env(make_env_manager(env), policy, seed=seed)


def main(
    teacher: Path = Path("runs/teacher-0"),
    seed: Whole = 0,
    exp_name: str = "rover_student",
    max_env_step: Count = 20_000,
    env: EnvSettings = ENV,
    eval_env_num: Count = 200,
    policy: BCSettings = POLICY,
    collector: StepCollectorSettings = StepCollectorSettings(n_sample=512),
    buffer: TensorBufferSettings = TensorBufferSettings(50_000),
    learner: OffPolicyLearnerSettings = OffPolicyLearnerSettings(update_per_collect=50),
    evaluator: InteractionEvaluatorSettings = InteractionEvaluatorSettings(
        n_episode=200, every_train_iter=200
    ),
    experiment: ExperimentSettings = ExperimentSettings(n_fresh_episode=200),
) -> ExperimentResult:
    """Teach a student what a teacher does, where the student goes.

    Args:
        teacher: folder of the run that trained the teacher.
        seed: seed of everything random.
        exp_name: folder of the run in runs/.
        max_env_step: maximum number of environment steps.
        eval_env_num: number of envs that evaluate.
    """
    student = make_policy(env, policy, seed)
    guide = load_policy(teacher).policy
    record = Experiment.of(experiment, exp_name, student)
    rows = TensorBuffer.of(buffer, seed=seed)
    with Task(seed=seed) as task:
        envs = make_env_manager(env, seed=task.seed_for("collector"))
        eval_envs = make_env_manager(env, env_num=eval_env_num, seed=task.seed_for("evaluator"))

        task.use(StepCollector.of(collector, labeled_by(guide, student), envs))
        task.use(DataPusher(rows))
        task.use(OffPolicyLearner.of(learner, student, rows))
        task.use(InteractionEvaluator.of(evaluator, student, eval_envs))
        task.use(record)
        task.use(TerminationChecker(max_env_step=max_env_step))
        task.run()
    return record.result


if __name__ == "__main__":
    run_program(main)
