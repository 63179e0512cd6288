"""Other libraries.

The same training, and the collecting alone, in stable-baselines3 and tianshou: the same
environments, network, batch size, number of updates and target updates, on one thread. Both get
settings that suit their speed: no logging, no evaluation, no progress bar; stable-baselines3 clips
gradients always, so its bound is set to infinity; tianshou is driven by a loop of our own, because
its trainer searches the whole buffer for NaN after each collecting. Our optimiser is fused Adam.
"As it comes" is a library's own default optimiser, plain Adam; "fused Adam" gives it ours.
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
REPEATS = 11
CHAIN = "DQN chain, 8 CartPole envs"
COLLECT = "collecting, 8 CartPole envs"


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
    for fused, against in ((False, "as it comes"), (True, "fused Adam")):
        rival = rivals.StableBaselines3DQN(fused=fused)
        found.append(_training(rival, f"stable-baselines3, {against}"))
    return found


def _tianshou() -> list[Row]:
    found = []
    for fused, against in ((False, "as it comes"), (True, "fused Adam")):
        rival = rivals.TianshouDQN(fused=fused)
        found.append(_training(rival, f"tianshou, {against}"))
    with ChainCollect(steps_per_call=64) as ours:
        pair = interleaved(
            lambda: ours.run(COLLECT_STEPS), lambda: rival.collect(COLLECT_STEPS), repeats=REPEATS
        )
    count = COLLECT_STEPS * S.ENV_NUM
    found.append(
        Row.of_rate(COLLECT, pair, count=count, unit="steps/s", against="tianshou", at_least=3.0)
    )
    return found


def _training(rival: rivals.Rival, against: str) -> Row:
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
        against=against,
        at_least=1.5,
    )


_CASES: list[tuple[str, str, Callable[[], list[Row]]]] = [
    ("stable_baselines3", CHAIN, _stable_baselines3),
    ("tianshou", CHAIN, _tianshou),
]
