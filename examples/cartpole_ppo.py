"""Proximal policy optimisation on CartPole-v1: learning from what the policy just did."""

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

ENV = "CartPole-v1"
DISCOUNT = 0.98


def make_policy(seed: int = 0) -> PPOPolicy:
    """Build the policy: an actor and a critic with two hidden layers each."""
    return PPOPolicy(
        {
            "seed": seed,
            "discount_factor": DISCOUNT,
            "model": {"obs_shape": 4, "action_shape": 2},
            "learn": {"learning_rate": 1e-3},
        }
    )


def main(seed: int = 0, exp_name: str = "cartpole_ppo", max_env_step: int = 120_000) -> Result:
    """Train PPO on CartPole-v1 until it is solved."""
    policy = make_policy(seed)
    with start(exp_name, policy.cfg, seed=seed) as run, Task(OnlineRLContext(), seed=seed) as task:
        collect_env = make_env_manager(ENV, env_num=8, seed=task.seed_for("collector"))
        eval_env = make_env_manager(ENV, env_num=30, seed=task.seed_for("evaluator"))

        task.use(ContextExchanger(max_ahead=1)).use(ModelExchanger(policy))
        task.use(StepCollector(policy.collect_mode, collect_env, n_sample=512))
        task.use(gae_estimator(policy.learn_mode, discount=DISCOUNT, gae_lambda=0.8))
        task.use(OnPolicyLearner(policy.learn_mode, batch_size=256, epochs=15))
        task.use(
            interaction_evaluator(
                policy.eval_mode, eval_env, n_episode=50, every_train_iter=300, stop_value=495
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
