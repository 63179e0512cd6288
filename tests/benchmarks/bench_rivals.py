"""Other libraries.

The same training, and the same collecting, in stable-baselines3 and tianshou: the same
environments, network, batch size, number of updates and target updates, on one thread. Both
libraries get the settings that suit their speed: no logging, no evaluation, no progress bar. Since
stable-baselines3 always clips gradients, its limit is set to infinity. A custom loop drives
tianshou, because its trainer searches the whole buffer for NaN after each collect. Our optimizer is
fused Adam. "As it comes" is a library with its default optimizer, plain Adam; "given fused Adam"
shows how much of the ratio is due to the optimizer alone.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

from tests.benchmarks import rivals
from tests.benchmarks import setting as S
from tests.benchmarks.ours import ChainCollect, ChainDQN
from tests.benchmarks.report import Row, interleaved

STEPS = 40
COLLECT_STEPS = 256
REPEATS = 9
CHAIN = "DQN chain, 8 CartPole envs"
COLLECT = "collecting, 8 CartPole envs"
# The bar is for the libraries as their users get them; the other row tells how much of the ratio
# the optimizer alone makes.
AS_IT_COMES, FUSED = "as it comes", "given fused Adam"
BARS = {AS_IT_COMES: 1.5, FUSED: None}


def rows() -> list[Row]:
    """Measure against each library that is installed."""
    measured = []
    for package, label, measure in _CASES:
        if importlib.util.find_spec(package) is None:
            note = f"{package} is not installed; `make bench` installs it"
            measured.append(Row.missing(label, against=package, note=note))
        else:
            measured += measure()
    return measured


def _stable_baselines3() -> list[Row]:
    found = []
    for variant in BARS:
        rival = rivals.StableBaselines3DQN(fused=variant == FUSED)
        found.append(_training(rival, "stable-baselines3", variant))
    return found


def _tianshou() -> list[Row]:
    found = []
    for variant in BARS:
        rival = rivals.TianshouDQN(fused=variant == FUSED)
        found.append(_training(rival, "tianshou", variant))
    with ChainCollect(steps_per_call=64) as ours:
        pair = interleaved(
            lambda: ours.run(COLLECT_STEPS), lambda: rival.collect(COLLECT_STEPS), repeats=REPEATS
        )
    count = COLLECT_STEPS * S.ENV_NUM
    found.append(
        Row.of_rate(COLLECT, pair, count=count, unit="steps/s", against="tianshou", at_least=3.0)
    )
    return found


def _training(rival: rivals.Rival, library: str, variant: str) -> Row:
    with ChainDQN() as ours:
        before = ours.updates, rival.updates
        pair = interleaved(lambda: ours.run(STEPS), lambda: rival.run(STEPS), repeats=REPEATS)
        if ours.updates - before[0] != rival.updates - before[1]:
            raise RuntimeError(f"not the same work: {ours.updates} and {rival.updates} updates")
    return Row.of_rate(
        CHAIN,
        pair,
        count=STEPS * S.UPDATES_PER_STEP,
        unit="updates/s",
        against=f"{library}, {variant}",
        at_least=BARS[variant],
    )


_CASES: list[tuple[str, str, Callable[[], list[Row]]]] = [
    ("stable_baselines3", CHAIN, _stable_baselines3),
    ("tianshou", CHAIN, _tianshou),
]
