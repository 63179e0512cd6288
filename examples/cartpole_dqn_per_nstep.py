"""DQN on CartPole-v1 with prioritized replay, 5-step returns and a dueling network.

Against the plain one, three things differ: the buffer's sampler, its ``n_step``, and the model.
"""

from dmiddleware import OnlineRLContext, Task
from dmiddleware.data import PrioritySampler, TensorBuffer
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

ENV = "CartPole-v1"
DISCOUNT = 0.99


def make_policy(seed: int = 0) -> DQNPolicy:
    """Build the policy: a dueling Q-network, and how it learns."""
    model = {"obs_shape": 4, "action_shape": 2, "encoder_hidden_sizes": [128, 128], "dueling": True}
    return DQNPolicy(
        {
            "seed": seed,
            "nstep": 5,
            "discount_factor": DISCOUNT,
            "model": model,
            "learn": {"learning_rate": 2e-3, "target_update_freq": 64},
        }
    )


def main(
    seed: int = 0, exp_name: str = "cartpole_dqn_per_nstep", max_env_step: int = 60_000
) -> Result:
    """Train DQN on CartPole-v1 with prioritized replay and 5-step returns."""
    policy = make_policy(seed)
    with start(exp_name, policy.cfg, seed=seed) as run, Task(OnlineRLContext(), seed=seed) as task:
        collect_env = make_env_manager(ENV, env_num=8, seed=task.seed_for("collector"))
        eval_env = make_env_manager(ENV, env_num=30, seed=task.seed_for("evaluator"))
        buffer = TensorBuffer(
            max_env_step,
            sampler=PrioritySampler(alpha=0.6, beta=0.4, beta_anneal_steps=20_000),
            n_step=5,
            discount=DISCOUNT,
            seed=task.seed_for("buffer"),
        )

        task.use(ContextExchanger()).use(ModelExchanger(policy))
        task.use(eps_greedy_handler(start=1.0, end=0.04, decay_steps=5000))
        task.use(StepCollector(policy.collect_mode, collect_env, n_sample=128, random_steps=1000))
        task.use(data_pusher(buffer))
        task.use(OffPolicyLearner(policy.learn_mode, buffer, batch_size=64, updates_per_collect=64))
        task.use(
            interaction_evaluator(
                policy.eval_mode, eval_env, n_episode=50, every_train_iter=640, stop_value=495
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
