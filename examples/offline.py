"""Offline learning from the datasets of examples.make_offline_data, which it makes if needed.

TD3+BC on the mixed data of Pendulum: ``python -m examples.offline --algo td3_bc``.
``--policy.compile`` compiles the update, which takes a minute and pays in long trainings.
"""

from typing import Annotated, Literal

from dmiddleware import Task
from dmiddleware.command_line import DefaultsBy
from dmiddleware.env import EnvSettings, make_env_manager
from dmiddleware.policy import (
    BCQSettings,
    BCSettings,
    CQLSettings,
    DecisionTransformerSettings,
    EDACSettings,
    IQLSettings,
    Policy,
    PolicySettings,
    TD3BCSettings,
    get_policy_cls,
)
from dmiddleware.program import run_program
from dmiddleware.settings import Count, Whole
from examples import make_offline_data
from middleware import (
    Experiment,
    ExperimentResult,
    ExperimentSettings,
    InteractionEvaluator,
    OfflineRLContext,
    OffPolicyLearner,
    OffPolicyLearnerSettings,
    TerminationChecker,
)
from middleware.programs.offline import make_dataset_buffer

Algo = Literal["bc", "td3_bc", "bcq", "cql", "edac", "iql", "dt"]
SMALL = {"actor_hidden_sizes": [64, 64], "critic_hidden_sizes": [64, 64]}
ENV = EnvSettings("Pendulum-v1", env_num=10)
POLICIES: dict[Algo, PolicySettings] = {
    "bc": BCSettings(model={"encoder_hidden_sizes": [256, 256], "activation": "relu"}),
    "td3_bc": TD3BCSettings(),
    # Smaller networks than in their papers, which would take many times as long.
    "bcq": BCQSettings(model={**SMALL, "vae_hidden_sizes": [128, 128]}),
    # Fewer actions than in the paper, which would take twice the time.
    "cql": CQLSettings(n_actions=4, obs_norm=True),
    "edac": EDACSettings(learning_rate_q=1e-3, learning_rate_policy=1e-3, model=SMALL),
    "iql": IQLSettings(),
    "dt": DecisionTransformerSettings(learning_rate=1e-3, model={"embed_size": 64}),
}


def make_policy(
    env: EnvSettings = ENV,
    policy: PolicySettings | None = None,
    algo: Algo = "iql",
    seed: int = 0,
) -> Policy:
    """Build the policy of an algorithm."""
    settings = policy or POLICIES[algo]
    name = "decision_transformer" if algo == "dt" else algo
    return get_policy_cls({"type": name}).for_env(make_env_manager(env), settings, seed=seed)


def main(
    algo: Algo = "iql",
    env: EnvSettings = ENV,
    kind: Literal["random", "medium", "expert", "replay", "mixed"] = "mixed",
    seed: Whole = 0,
    exp_name: str = "offline",
    max_train_iter: Count = 20_000,
    policy: Annotated[PolicySettings | None, DefaultsBy("algo", POLICIES)] = None,
    learner: OffPolicyLearnerSettings = OffPolicyLearnerSettings(update_per_collect=100),
    n_evaluation: Count = 10,
    n_episode: Count = 20,
    experiment: ExperimentSettings = ExperimentSettings(),
) -> ExperimentResult:
    """Learn from a dataset without playing.

    Args:
        algo: the algorithm.
        kind: the play that the dataset has.
        seed: seed of everything random.
        exp_name: folder of the run in runs/.
        max_train_iter: number of updates.
        n_evaluation: number of evaluations.
        n_episode: episodes of each evaluation.
    """
    rows = make_offline_data.load(str(env.id), kind)
    agent = make_policy(env, policy, algo, seed)
    agent.observe(rows["obs"])
    buffer = make_dataset_buffer(agent, rows, seed)
    record = Experiment.of(experiment, exp_name, agent)
    with Task(OfflineRLContext(), seed=seed) as task:
        eval_envs = make_env_manager(env, seed=task.seed_for("evaluator"))
        every = max(1, max_train_iter // n_evaluation)
        task.use(OffPolicyLearner.of(learner, agent, buffer))
        task.use(
            InteractionEvaluator(agent, eval_envs, n_episode=n_episode, every_train_iter=every)
        )
        task.use(record)
        task.use(TerminationChecker(max_train_iter=max_train_iter))
        task.run()
    return record.result


if __name__ == "__main__":
    run_program(main)
