"""Collecting.

Both sides step 8 CartPole environments with an epsilon-greedy Q-network with hidden layers of 128,
128 and 64, on one thread. The reference is a hand-written loop over the environments, with one
forward for all of them and preallocated arrays for the rows (`tests/benchmarks/hand_written.py`).
`RolloutCollector` is measured alone; `StepCollector` runs in the chain of a task, after the
middleware that sets epsilon. With "1 step a call", a batch is returned after every step of all
environments; with "128 steps a call", after 128.

`StepCollector` misses the bar with 1 step a call. There, each step of 8 small environments pays for
a batch of ten columns that the caller owns (the reference writes five columns into arrays that it
reuses), for the sum of each episode's rewards, and for one step of the task. These costs do not
grow with the number of environments or the size of the network. Several steps a call spread them
over more rows: with 128 steps the bar is met. A whole training step, with its updates, is as fast
as the hand-written loop (see "DQN training").
"""

from __future__ import annotations

from collections.abc import Callable

from dmiddleware.env import make_env_manager
from dmiddleware.policy import DQNPolicy
from dmiddleware.rollout import RolloutCollector
from tests.benchmarks import setting as S
from tests.benchmarks.hand_written import HandWrittenDQN
from tests.benchmarks.ours import ChainCollect
from tests.benchmarks.report import Comparison, Row, interleaved

STEPS = 512
REPEATS = 15
AT_LEAST = 0.8


def rows() -> list[Row]:
    """Measure environment steps per second."""
    measured = []
    for steps_per_call in (1, 128):
        calls = "1 step a call" if steps_per_call == 1 else f"{steps_per_call} steps a call"
        for name, measure in (("RolloutCollector", worker), ("StepCollector", chain)):
            measured.append(make_row(f"{name}, {calls}", measure(steps_per_call)))
    return measured


def worker(steps_per_call: int) -> Comparison:
    """Time the collector alone."""
    policy = make_policy()
    with make_env_manager(S.make_env, env_num=S.ENV_NUM, seed=0) as envs:
        collector = RolloutCollector(policy.collect_mode, envs)

        def run() -> None:
            for _ in range(STEPS // steps_per_call):
                collector.collect(steps_per_call * S.ENV_NUM, policy_kwargs={"eps": S.EPSILON})

        return compare(policy, run)


def chain(steps_per_call: int) -> Comparison:
    """Time the middleware in a task."""
    with ChainCollect(steps_per_call=steps_per_call) as ours:
        return compare(ours.policy, lambda: ours.run(STEPS))


def make_policy() -> DQNPolicy:
    model = {
        "obs_shape": S.OBS_SIZE,
        "action_shape": S.ACTION_NUM,
        "encoder_hidden_sizes": S.HIDDEN_SIZES,
    }
    return DQNPolicy({"seed": 0, "model": model}, modes=["collect", "eval"])


def compare(policy: DQNPolicy, ours: Callable[[], None]) -> Comparison:
    with HandWrittenDQN() as loop:
        # The same network on both sides, or one would play longer episodes and reset less often.
        state = policy.collect_mode.state_dict()
        weights = loop.model.state_dict().values()
        state["model"] = dict(zip(state["model"], weights, strict=True))
        policy.collect_mode.load_state_dict(state)

        def reference() -> None:
            for _ in range(STEPS):
                loop.collect()

        return interleaved(ours, reference, repeats=REPEATS)


def make_row(name: str, pair: Comparison) -> Row:
    return Row.of_rate(
        name,
        pair,
        count=STEPS * S.ENV_NUM,
        unit="env steps/s",
        against="hand-written loop",
        at_least=AT_LEAST,
    )
