"""Play simple_spread with random actions: ``python -m tests.results.random_spread``."""

from __future__ import annotations

import statistics

import click
import numpy as np

from tests.results.cases import N_FRESH

__all__: list[str] = []


def play(n_episode: int, seed: int) -> float:
    """Return the mean over episodes and agents of the undiscounted return."""
    from mpe2 import simple_spread_v3  # an extra, which listing the results does not need

    rng = np.random.default_rng(seed)
    returns = []
    env = simple_spread_v3.parallel_env()
    for _ in range(n_episode):
        env.reset(seed=int(rng.integers(2**31)))
        total = 0.0
        while env.agents:
            actions = {name: rng.integers(env.action_space(name).n) for name in env.agents}
            rewards = env.step(actions)[1]
            total += statistics.mean(rewards.values())
        returns.append(total)
    env.close()
    return statistics.mean(returns)


@click.command(help="Play simple_spread with random actions.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option("--exp-name", default="", help="Unused; the examples have it.")
def main(seed: int, exp_name: str) -> None:
    print(f"mean return {play(N_FRESH, seed):.2f} over {N_FRESH} episodes")


if __name__ == "__main__":
    main()
