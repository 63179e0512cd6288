"""Training on a simulator in JAX.

PPO on 256 worlds of Brax's ant (its `spring` physics), on one core of the CPU, in turns with Brax's
own PPO, which is compiled together with the simulator: the same physics, networks, batches and
epochs; 16 steps of all worlds, and then 8 updates of 1,024 rows. `make bench` does not install
Brax, because its PPO needs a JAX before 0.8: `pip install -e '.[brax,bench]' 'jax<0.8'` in another
environment, and run `python -m tests.benchmarks jax` there.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import queue
import threading
from collections.abc import Iterator
from typing import Any, Self

from dmiddleware.env import JaxEnv, make_env_manager
from tests.benchmarks.report import Row, interleaved
from tests.benchmarks.rivals_on_device import (
    DISCOUNT,
    ENTROPY_WEIGHT,
    EPOCHS,
    GAE_LAMBDA,
    GRAD_CLIP,
    HIDDEN_SIZES,
    LEARNING_RATE,
    MINIBATCHES,
    STEPS,
    VALUE_WEIGHT,
    Ours,
)

LANES = 256
EPISODE_LENGTH = 1000
REPEATS = 7
WARMUP = 2
NAME = f"PPO, Brax's ant, {LANES} worlds"


def rows() -> list[Row]:
    """Measure against Brax, where it is installed."""
    if importlib.util.find_spec("brax") is None:
        note = "brax is not installed here"
        return [Row.missing(NAME, against="Brax's PPO", note=note)]
    with _on_one_core(), Brax() as brax:
        return [_row("eager", brax, compiled=False), _row("compiled", brax, compiled=True)]


def _row(how: str, brax: Brax, *, compiled: bool) -> Row:
    envs = make_env_manager(
        JaxEnv,
        env_num=LANES,
        env_kwargs={"env": _ant, "episode_length": EPISODE_LENGTH},
        seed=0,
    )
    with Ours(envs, compiled=compiled) as ours:
        pair = interleaved(ours.run, brax.run, repeats=REPEATS, warmup=WARMUP)
    return Row.of_rate(
        f"{NAME}, {how}",
        pair,
        count=LANES * STEPS,
        unit="env steps/s",
        against="Brax's PPO, compiled",
    )


@contextlib.contextmanager
def _on_one_core() -> Iterator[None]:
    """Keep all threads that begin on one core, where the system can: JAX has one for each."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


class Brax:
    """Brax's PPO, in a thread that waits after each of its iterations."""

    def __init__(self) -> None:
        self._turns: queue.Queue[bool] = queue.Queue()
        self._ends: queue.Queue[BaseException | None] = queue.Queue()
        self._thread = threading.Thread(target=self._train, daemon=True)
        self._thread.start()
        self._await()

    def run(self) -> None:
        """Let it collect, and learn from it."""
        self._turns.put(True)
        self._await()

    def _await(self) -> None:
        error = self._ends.get()
        if error is not None:
            raise error

    def _train(self) -> None:
        try:
            self._train_until_told()
        except _Over:
            pass
        except BaseException as error:  # noqa: BLE001 - for the thread that waits
            self._ends.put(error)

    def _train_until_told(self) -> None:
        import jax
        from brax.training.agents.ppo import networks, train

        n_iterations = 2 * (REPEATS + WARMUP) + 1
        layers = {
            "policy_hidden_layer_sizes": HIDDEN_SIZES,
            "value_hidden_layer_sizes": HIDDEN_SIZES,
            "activation": jax.numpy.tanh,
            "distribution_type": "normal",
        }
        train.train(
            _ant(),
            num_timesteps=n_iterations * LANES * STEPS,
            num_evals=n_iterations + 1,
            run_evals=False,
            num_envs=LANES,
            episode_length=EPISODE_LENGTH,
            unroll_length=STEPS,
            batch_size=LANES // MINIBATCHES,
            num_minibatches=MINIBATCHES,
            num_updates_per_batch=EPOCHS,
            learning_rate=LEARNING_RATE,
            discounting=DISCOUNT,
            gae_lambda=GAE_LAMBDA,
            entropy_cost=ENTROPY_WEIGHT,
            vf_loss_coefficient=VALUE_WEIGHT,
            clipping_epsilon=0.2,
            max_grad_norm=GRAD_CLIP,
            network_factory=functools.partial(networks.make_ppo_networks, **layers),
            policy_params_fn=self._pause,
        )

    def _pause(self, *args: Any) -> None:
        """Return when the next iteration may begin."""
        self._ends.put(None)
        if not self._turns.get():
            raise _Over

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._turns.put(False)
        self._thread.join()


class _Over(Exception):
    """Ends the training of Brax."""


def _ant() -> Any:
    from brax.envs import get_environment

    return get_environment("ant", backend="spring")
