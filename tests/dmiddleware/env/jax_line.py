"""An env in JAX, with the interface of those of Brax and MuJoCo Playground."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class State:
    obs: Any
    reward: Any
    done: Any
    metrics: dict[str, Any]
    info: dict[str, Any]


class Line:
    """Walk along a line, from a drawn place near 0; an episode ends beyond 2."""

    action_size = 1

    def __init__(self, *, in_groups: bool = False):
        self.in_groups = in_groups

    def seen(self, place, n_steps):
        obs = jnp.stack([place, n_steps.astype(place.dtype)])
        if not self.in_groups:
            return obs
        return {"state": obs[:1], "privileged_state": obs}

    def reset(self, rng):
        place = jax.random.uniform(rng, (), minval=-0.5, maxval=0.5)
        info = {"place": place, "n_steps": jnp.zeros((), jnp.int32), "rng": rng}
        return State(
            self.seen(place, info["n_steps"]), 0.0 * place, 0.0 * place, {"far": place}, info
        )

    def step(self, state, action):
        rng, draw = jax.random.split(state.info["rng"])
        noise = 0.1 * jax.random.normal(draw)
        place = state.info["place"] + 0.3 * jnp.clip(action[0], -1, 1) + noise
        n_steps = state.info["n_steps"] + 1
        info = {"place": place, "n_steps": n_steps, "rng": rng}
        done = (place > 2).astype(jnp.float32)
        return State(self.seen(place, n_steps), place, done, {"far": place}, info)


def in_groups() -> Line:
    return Line(in_groups=True)
