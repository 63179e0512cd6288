"""DQN on CartPole-v1 with the classic workers, in a loop of your own instead of a chain.

The commander chooses ε, the collector collects, the buffer keeps, the learner learns, and the
evaluator judges. ``serial_run`` runs the same loop from a config.
"""

from dmiddleware.classic import NaiveReplayBuffer
from dmiddleware.data import load_checkpoint
from dmiddleware.env import EnvSettings, make_env_manager
from dmiddleware.policy import DQNPolicy
from dmiddleware.program import run_program
from dmiddleware.rollout import evaluate_episodes
from dmiddleware.schedule import Schedule
from dmiddleware.seeding import derive_seed
from dmiddleware.settings import Count, Whole
from dmiddleware.worker import (
    BaseLearner,
    BaseSerialCommander,
    InteractionSerialEvaluator,
    SampleSerialCollector,
)

ENV = EnvSettings("CartPole-v1", env_num=8)


def make_policy(seed: int = 0) -> DQNPolicy:
    """Build a DQN policy with 3-step returns."""
    return DQNPolicy.for_env(
        make_env_manager(ENV),
        seed=seed,
        n_step=3,
        model={"encoder_hidden_sizes": [128, 128]},
        learning_rate=1e-3,
        target_update_freq=100,
        eps=Schedule.linear(1.0, 0.05, decay=8_000),
    )


def main(seed: Whole = 0, exp_name: str = "classic_serial", max_env_step: Count = 60_000) -> float:
    """Train DQN on CartPole-v1 with a commander, a collector, a buffer and a learner.

    Args:
        seed: seed of everything random.
        exp_name: folder of the run in runs/.
        max_env_step: maximum number of environment steps.
    """
    policy = make_policy(seed)
    folder = f"runs/{exp_name}"
    collect_env = make_env_manager(ENV, seed=derive_seed(seed, "collector"))
    eval_env = make_env_manager(ENV, env_num=10, seed=derive_seed(seed, "evaluator"))
    evaluator_cfg = {"eval_freq": 480, "n_episode": 50, "stop_value": 495}
    buffer_cfg = {"replay_buffer_size": 50_000, "seed": derive_seed(seed, "buffer")}
    with (
        BaseLearner(policy=policy, exp_name=folder) as learner,
        SampleSerialCollector({}, collect_env, policy, exp_name=folder) as collector,
        InteractionSerialEvaluator(evaluator_cfg, eval_env, policy, exp_name=folder) as evaluator,
        NaiveReplayBuffer(buffer_cfg, exp_name=folder) as buffer,
    ):
        commander = BaseSerialCommander({}, learner, collector, evaluator, buffer, policy)
        learner.call_hook("before_run")
        buffer.push(collector.collect(n_sample=1000, random_collect=True), collector.envstep)
        while collector.envstep < max_env_step:
            if evaluator.should_eval(learner.train_iter):
                stop, _ = evaluator.eval(
                    learner.save_checkpoint, learner.train_iter, collector.envstep
                )
                if stop:
                    break
            eps = commander.step()
            data = collector.collect(96, train_iter=learner.train_iter, policy_kwargs=eps)
            buffer.push(data, collector.envstep)
            for _ in range(32):
                learner.train(buffer.sample(64, learner.train_iter), collector.envstep)
        learner.call_hook("after_run")

    best = learner.ckpt_dir / "ckpt_best.safetensors"
    policy.eval_mode.load_state_dict(load_checkpoint(best))
    with make_env_manager(ENV, env_num=25, seed=derive_seed(seed, "fresh episodes")) as envs:
        returns = evaluate_episodes(policy.eval_mode, envs, 100).get_episode_return()
    mean = sum(returns) / len(returns)
    print(
        f"mean return {mean:.1f} over {len(returns)} fresh episodes of the best policy, "
        f"after {collector.envstep:,} env steps; checkpoint in {best}"
    )
    return mean


if __name__ == "__main__":
    run_program(main, make_policy=make_policy, play_env=ENV)
