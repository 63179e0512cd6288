"""Deep Q-learning on Acrobot-v1: every step costs one until the tip swings above the line."""

from dmiddleware import OnlineRLContext, Task
from dmiddleware.data import TensorBuffer
from dmiddleware.env import make_env_manager
from dmiddleware.policy import DQNPolicy
from examples.common import Result, command, finish, start
from middleware import (
    CkptSaver,
    ContextExchanger,
    ModelExchanger,
    OffPolicyLearner,
    StepCollector,
    data_pusher,
    eps_greedy_handler,
    final_ctx_saver,
    interaction_evaluator,
    learning_curve,
    online_logger,
    progress_bar,
    termination_checker,
)

ENV = "Acrobot-v1"


def make_policy(seed: int = 0) -> DQNPolicy:
    """Build the policy: a Q-network with two hidden layers, and how it learns."""
    return DQNPolicy(
        {
            "seed": seed,
            "nstep": 3,
            "model": {"obs_shape": 6, "action_shape": 3, "encoder_hidden_sizes": [128, 128]},
            "learn": {"learning_rate": 1e-3, "target_update_freq": 64},
        }
    )


def main(seed: int = 0, exp_name: str = "acrobot_dqn", max_env_step: int = 100_000) -> Result:
    """Train DQN on Acrobot-v1 until it swings up in some eighty steps."""
    policy = make_policy(seed)
    with start(exp_name, policy.cfg, seed=seed) as run, Task(OnlineRLContext(), seed=seed) as task:
        collect_env = make_env_manager(ENV, env_num=8, seed=task.seed_for("collector"))
        eval_env = make_env_manager(ENV, env_num=30, seed=task.seed_for("evaluator"))
        buffer = TensorBuffer(max_env_step, n_step=3, discount=0.99, seed=task.seed_for("buffer"))

        task.use(ContextExchanger()).use(ModelExchanger(policy))
        task.use(eps_greedy_handler(start=1.0, end=0.04, decay_steps=10_000))
        task.use(StepCollector(policy.collect_mode, collect_env, n_sample=128, random_steps=1000))
        task.use(data_pusher(buffer))
        task.use(OffPolicyLearner(policy.learn_mode, buffer, batch_size=64, updates_per_collect=64))
        task.use(
            interaction_evaluator(
                policy.eval_mode, eval_env, n_episode=30, every_train_iter=1280, stop_value=-80
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
