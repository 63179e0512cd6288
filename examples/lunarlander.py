"""Value-based algorithms on LunarLander-v3: 200 points are a landing between the flags.

``--algo`` chooses one. Those that do not explore by themselves take ε-greedy actions, and Rainbow
draws rows by their priorities; everything else is the same chain. ``--compiled`` compiles the
update, which takes half a minute at most and pays in long trainings.
"""

from typing import Any, Literal

from dmiddleware import Task
from dmiddleware.data import PrioritySampler, TensorBuffer
from dmiddleware.env import make_env_manager
from dmiddleware.policy import Policy, get_policy_cls
from dmiddleware.rl import Schedule
from examples.common import command
from middleware import (
    ContextExchanger,
    DataPusher,
    EpsGreedyHandler,
    Experiment,
    ExperimentResult,
    InteractionEvaluator,
    ModelExchanger,
    OffPolicyLearner,
    StepCollector,
    TerminationChecker,
)

ENV = "LunarLander-v3"
Algo = Literal["dqn", "c51", "qrdqn", "iqn", "rainbow", "discrete_sac"]

NETWORK = {"encoder_hidden_sizes": [256, 256]}
RETURNS = {"v_min": -200.0, "v_max": 200.0}
DQN = {"learning_rate": 6.3e-4, "batch_size": 128, "target_update_freq": 250}
EPS = {"eps": Schedule.linear(1.0, 0.1, decay=24_000)}
SETTINGS: dict[Algo, dict[str, Any]] = {
    "dqn": {"model": NETWORK, **DQN, **EPS},
    "c51": {"model": {**NETWORK, **RETURNS}, **DQN, **EPS},
    "qrdqn": {
        "model": {**NETWORK, "n_quantiles": 64},
        "learning_rate": Schedule.linear(1.5e-3, 0.0, by="progress"),
        "batch_size": 128,
        "discount": 0.995,
        "target_update_freq": 1,
        "target_tau": 0.02,
        "eps": Schedule.linear(1.0, 0.18, decay=24_000),
    },
    "iqn": {"model": NETWORK, **DQN, "batch_size": 64, **EPS},
    "rainbow": {
        "model": {"encoder_hidden_sizes": [256], "head_hidden_sizes": [128], **RETURNS},
        **DQN,
    },
    "discrete_sac": {
        "model": {"actor_hidden_sizes": [256, 256], "critic_hidden_sizes": [256, 256]},
        "batch_size": 128,
        "learning_rate_q": 6.3e-4,
        "learning_rate_policy": 6.3e-4,
        "learning_rate_alpha": 1e-3,
        "alpha": 0.1,
        "target_entropy_ratio": 0.3,
        "n_step": 3,
    },
}


def make_policy(seed: int = 0, algo: Algo = "dqn", compiled: bool = False) -> Policy:
    """Build the policy of an algorithm."""
    policy_cls = get_policy_cls({"type": algo})
    return policy_cls.for_env(
        make_env_manager(ENV, env_num=1), seed=seed, compile=compiled, **SETTINGS[algo]
    )


def main(
    seed: int = 0,
    exp_name: str = "lunarlander",
    max_env_step: int = 400_000,
    algo: Algo = "dqn",
    stop_value: float = 235.0,
    compiled: bool = False,
) -> ExperimentResult:
    """Train a value-based algorithm on LunarLander-v3 until it lands softly."""
    policy = make_policy(seed, algo, compiled)
    sampler = None
    if policy.cfg.priority:
        beta = Schedule.linear(0.4, 1.0, by="progress")
        sampler = PrioritySampler(alpha=0.5, beta=beta)
    experiment = Experiment(exp_name, policy)
    with Task(seed=seed) as task:
        collect_env = make_env_manager(ENV, env_num=8, seed=task.seed_for("collector"))
        eval_env = make_env_manager(ENV, env_num=25, seed=task.seed_for("evaluator"))
        buffer = TensorBuffer(
            100_000, sampler=sampler, n_step=policy.n_step, seed=task.seed_for("buffer")
        )

        task.use(ContextExchanger()).use(ModelExchanger(policy))
        if not policy.explores:
            task.use(EpsGreedyHandler(policy))
        task.use(StepCollector(policy, collect_env, n_sample=64, random_steps=1000))
        task.use(DataPusher(buffer))
        task.use(OffPolicyLearner(policy, buffer, update_per_collect=32))
        task.use(
            InteractionEvaluator(
                policy, eval_env, n_episode=50, every_train_iter=3200, stop_value=stop_value
            )
        )
        task.use(experiment)
        task.use(TerminationChecker(max_env_step=max_env_step))
        task.run()
    return experiment.result


if __name__ == "__main__":
    command(ENV, make_policy, main)()
