"""The same training as a chain of stock middleware."""

from __future__ import annotations

from typing import Self

from dmiddleware import Task
from dmiddleware.data import TensorBuffer
from dmiddleware.env import make_env_manager
from dmiddleware.policy import DQNPolicy
from middleware import OffPolicyLearner, StepCollector, data_pusher, eps_greedy_handler
from tests.benchmarks import setting as S


class ChainDQN:
    """The whole DQN chain; each ``run`` continues where the last one ended."""

    def __init__(self, seed: int = 0) -> None:
        self.envs = make_env_manager(S.make_env, env_num=S.ENV_NUM, seed=seed)
        self.policy = DQNPolicy.for_env(
            self.envs,
            seed=seed,
            discount=S.DISCOUNT,
            learning_rate=S.LEARNING_RATE,
            target_update_freq=S.TARGET_UPDATE,
            double=False,
            model={"encoder_hidden_sizes": S.HIDDEN_SIZES},
            eps=S.EPSILON,
            batch_size=S.BATCH_SIZE,
        )
        self.buffer = TensorBuffer(S.BUFFER_SIZE, seed=seed)
        explore = eps_greedy_handler(self.policy)
        collect = StepCollector(
            self.policy,
            self.envs,
            n_sample=S.ENV_NUM,
            random_steps=S.FILL_STEPS * S.ENV_NUM,
        )
        learn = OffPolicyLearner(self.policy, self.buffer, update_per_collect=S.UPDATES_PER_STEP)
        self.task = Task(seed=seed)
        self.task.use(explore).use(collect).use(data_pusher(self.buffer)).use(learn)
        self.run(1)

    @property
    def updates(self) -> int:
        return self.task.ctx.train_iter

    def run(self, steps: int) -> None:
        """Step all environments ``steps`` times, with the updates after each."""
        self.task.run(max_step=steps)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.task.close()


class ChainCollect:
    """Collecting alone, ``steps_per_call`` steps of all environments in each step of the task."""

    def __init__(self, seed: int = 0, *, steps_per_call: int) -> None:
        envs = make_env_manager(S.make_env, env_num=S.ENV_NUM, seed=seed)
        self.policy = DQNPolicy.for_env(
            envs,
            seed=seed,
            model={"encoder_hidden_sizes": S.HIDDEN_SIZES},
            modes=["collect", "eval"],
            eps=S.EPSILON,
        )
        self.steps_per_call = steps_per_call
        n_sample = steps_per_call * S.ENV_NUM
        self.task = Task(seed=seed)
        self.task.use(eps_greedy_handler(self.policy))
        self.task.use(StepCollector(self.policy, envs, n_sample=n_sample))

    def run(self, steps: int) -> None:
        """Step all environments ``steps`` times, a multiple of ``steps_per_call``."""
        self.task.run(max_step=steps // self.steps_per_call)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.task.close()
