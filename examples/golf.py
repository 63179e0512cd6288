"""Golf: each stroke is a club and how hard it hits, a hybrid action."""

from typing import Any

import gymnasium as gym
import numpy as np

RANGES = (1.0, 0.4, 0.1)
"""How far each club hits at most."""
HOLE = 0.02
"""How near the ball must come."""
MOST_STROKES = 10


class Golf(gym.Env[Any, Any]):
    """A ball on a straight course, whose strokes miss by a tenth of their length.

    The observation is the distance to the hole. The action is a club, and how hard each of the
    clubs would hit, from 0 to 1; only that of the chosen club counts. Each stroke costs 1.
    """

    observation_space = gym.spaces.Box(0.0, 3.0, (1,), np.float32)
    action_space = gym.spaces.Dict(
        {
            "club": gym.spaces.Discrete(len(RANGES)),
            "force": gym.spaces.Box(0.0, 1.0, (len(RANGES),), np.float32),
        }
    )

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Place the ball far from the hole."""
        super().reset(seed=seed)
        self.distance = self.np_random.uniform(0.5, 2.0)
        self.n_strokes = 0
        return np.float32([self.distance]), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Hit the ball."""
        club = int(action["club"])
        length = RANGES[club] * float(action["force"][club])
        length *= 1.0 + 0.1 * self.np_random.standard_normal()
        self.distance = min(abs(self.distance - length), 3.0)
        self.n_strokes += 1
        is_in = self.distance < HOLE
        is_over = not is_in and self.n_strokes == MOST_STROKES
        return np.float32([self.distance]), -1.0, is_in, is_over, {"is_success": is_in}
