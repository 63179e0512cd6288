"""Proximal policy optimisation on Pendulum-v1: continuous actions."""

from dmiddleware import OnlineRLContext, Task
from dmiddleware.env import make_env_manager
from dmiddleware.policy import PPOPolicy
from examples.common import Result, command, finish, start
from middleware import (
    CkptSaver,
    ContextExchanger,
    ModelExchanger,
    OnPolicyLearner,
    StepCollector,
    final_ctx_saver,
    gae_estimator,
    interaction_evaluator,
    learning_curve,
    online_logger,
    progress_bar,
    termination_checker,
)

ENV = "Pendulum-v1"
DISCOUNT = 0.9


def make_policy(seed: int = 0) -> PPOPolicy:
    """Build the policy: an actor that draws torques from a Gaussian, and a critic."""
    return PPOPolicy(
        {
            "seed": seed,
            "discount_factor": DISCOUNT,
            "obs_norm": True,
            "action_low": [-2.0],
            "action_high": [2.0],
            "model": {"obs_shape": 3, "action_shape": 1, "action_space": "continuous"},
            # Rewards go down to -16: scaled, they suit a value network that starts near zero.
            "reward_norm": True,
            "learn": {"learning_rate": 1e-3},
        }
    )


def main(seed: int = 0, exp_name: str = "pendulum_ppo", max_env_step: int = 300_000) -> Result:
    """Train PPO on Pendulum-v1 until it swings up and stays there."""
    policy = make_policy(seed)
    with start(exp_name, policy.cfg, seed=seed) as run, Task(OnlineRLContext(), seed=seed) as task:
        collect_env = make_env_manager(ENV, env_num=8, seed=task.seed_for("collector"))
        eval_env = make_env_manager(ENV, env_num=50, seed=task.seed_for("evaluator"))

        task.use(ContextExchanger(max_ahead=1)).use(ModelExchanger(policy))
        task.use(StepCollector(policy.collect_mode, collect_env, n_sample=2048))
        task.use(gae_estimator(policy.learn_mode, discount=DISCOUNT, gae_lambda=0.95))
        task.use(OnPolicyLearner(policy.learn_mode, batch_size=128, epochs=10))
        task.use(
            interaction_evaluator(
                policy.eval_mode, eval_env, n_episode=100, every_train_iter=1600, stop_value=-160
            )
        )
        task.use(CkptSaver(policy.learn_mode, run))
        task.use(online_logger(run)).use(progress_bar(max_env_step=max_env_step))
        task.use(learning_curve(run)).use(final_ctx_saver(run))
        task.use(termination_checker(max_env_step=max_env_step))
        task.run()
    return finish(run, task, policy, ENV)


if __name__ == "__main__":
    command(ENV, make_policy, main)()
