"""The standard preprocessing of Atari games."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt

from dmiddleware.errors import ConfigError
from dmiddleware.settings import Count, Whole, checked

__all__ = ["atari_preprocessing"]

Frame = npt.NDArray[np.uint8]


def atari_preprocessing(
    env: gym.Env[Any, Any],
    *,
    frame_skip: int = 4,
    screen_size: int = 84,
    frame_stack: int = 4,
    noop_max: int = 30,
    life_loss: bool = True,
    clip_reward: bool = True,
) -> gym.Env[Any, Any]:
    """Wrap an Atari env in the preprocessing of DQN.

    The steps are those of Mnih et al. (2015), "Human-level control through deep reinforcement
    learning", Nature 518, Methods ("Preprocessing", "Training details", "Evaluation procedure"):

    1. An action is repeated for ``frame_skip`` frames, and their rewards are summed.
    2. The observation is the pixelwise maximum of the last two frames, because some games draw
       their objects only in every other frame.
    3. It is turned to grey, resized to ``screen_size`` pixels a side, and stacked with the
       ``frame_stack - 1`` observations before it; at the start of an episode the first one is
       repeated.
    4. An episode starts with 1 to ``noop_max`` no-ops, drawn with the env's seed.
    5. For training only, losing a life terminates the episode (the game continues in the next
       one), and each step's reward is clipped to its sign.

    There is one difference: each frame is turned to grey before the maximum is taken, as in most
    implementations.

    The evaluation protocol of Machado et al. (2018), "Revisiting the Arcade Learning Environment",
    JAIR 61, sections 4 and 5, has sticky actions instead of no-ops, and does not use lives. The
    envs ``ALE/…-v5`` have sticky actions (``repeat_action_probability=0.25``), so pass
    ``noop_max=0, life_loss=False`` for it. For the protocol of Mnih et al., make the env with
    ``repeat_action_probability=0``.

    Args:
        env: an env of ale-py, made with ``frameskip=1``.
        frame_skip: frames per action.
        screen_size: side length of an observation, in pixels.
        frame_stack: observations in a stack.
        noop_max: the most no-ops at the start of an episode; 0: none.
        life_loss: end the episode when a life is lost. Turn it off for evaluation.
        clip_reward: replace each reward by its sign. Turn it off for evaluation.

    Returns:
        An env with observations ``[frame_stack, screen_size, screen_size] uint8``.

    Raises:
        ConfigError: if this is not an Atari env, it skips frames itself, or an option is invalid.
    """
    if not hasattr(env.unwrapped, "ale"):
        raise ConfigError(
            f"atari_preprocessing takes an env of ale-py, such as 'ALE/Pong-v5', got {env}"
        )
    skips = getattr(env.unwrapped.spec or env.spec, "kwargs", {}).get("frameskip", 1)
    if skips != 1:
        raise ConfigError(
            f"the env skips frames itself (frameskip={skips}), so it cannot return the maximum of "
            'the last two; make it with env_kwargs={"frameskip": 1}'
        )
    return _AtariPreprocessing(
        env,
        frame_skip=checked("frame_skip", frame_skip, Count),
        screen_size=checked("screen_size", screen_size, Count),
        frame_stack=checked("frame_stack", frame_stack, Count),
        noop_max=checked("noop_max", noop_max, Whole),
        life_loss=life_loss,
        clip_reward=clip_reward,
    )


class _AtariPreprocessing(gym.Wrapper[Frame, Any, Any, Any]):
    def __init__(
        self,
        env: gym.Env[Any, Any],
        *,
        frame_skip: int,
        screen_size: int,
        frame_stack: int,
        noop_max: int,
        life_loss: bool,
        clip_reward: bool,
    ) -> None:
        super().__init__(env)
        self._ale: Any = env.unwrapped.ale  # type: ignore[attr-defined]
        self._frame_skip, self._noop_max = frame_skip, noop_max
        self._life_loss, self._clip_reward = life_loss, clip_reward
        shape = (frame_stack, screen_size, screen_size)
        self.observation_space = gym.spaces.Box(0, 255, shape, np.uint8)
        height, width = self._ale.getScreenDims()
        self._last_two = np.zeros((2, height, width), np.uint8)
        self._rows = _Shares(height, screen_size)
        self._columns = _Shares(width, screen_size)
        self._stack = np.zeros(shape, np.uint8)
        self._lives = 0
        self._continues = False

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Frame, dict[str, Any]]:
        if self._continues and seed is None:
            # A life was lost, but the game is not over: play on.
            _, _, terminated, truncated, info = self.env.step(0)
            if terminated or truncated:
                info = self._start(None, options)
        else:
            info = self._start(seed, options)
        self._continues = False
        self._lives = self._ale.lives()
        self._ale.getScreenGrayscale(self._last_two[1])
        self._last_two[0] = self._last_two[1]
        self._stack[:] = self._observe()
        return self._stack.copy(), info

    def step(self, action: Any) -> tuple[Frame, float, bool, bool, dict[str, Any]]:
        total = 0.0
        if self._frame_skip == 1:  # then one of the last two frames is that of the step before
            self._last_two[0] = self._last_two[1]
        for index in range(self._frame_skip):
            _, reward, terminated, truncated, info = self.env.step(action)
            total += float(reward)
            if terminated or truncated:
                # Then the last two frames may be fewer; what they showed before still counts.
                self._ale.getScreenGrayscale(self._last_two[1])
                break
            if index >= self._frame_skip - 2:
                self._ale.getScreenGrayscale(self._last_two[index - self._frame_skip + 2])
        self._stack[:-1] = self._stack[1:].copy()
        self._stack[-1] = self._observe()
        lives = self._ale.lives()
        if self._life_loss and lives < self._lives and not (terminated or truncated):
            terminated = self._continues = True
        self._lives = lives
        if self._clip_reward:
            total = float(np.sign(total))
        return self._stack.copy(), total, terminated, truncated, info

    def _start(self, seed: int | None, options: dict[str, Any] | None) -> dict[str, Any]:
        _, info = self.env.reset(seed=seed, options=options)
        if self._noop_max:
            for _ in range(int(self.np_random.integers(1, self._noop_max + 1))):
                _, _, terminated, truncated, info = self.env.step(0)
                if terminated or truncated:
                    _, info = self.env.reset(options=options)
        return info

    def _observe(self) -> Frame:
        frame = self._last_two.max(axis=0).astype(np.float32)
        resized: Frame = np.rint(self._columns.means(self._rows.means(frame).T).T).astype(np.uint8)
        return resized


class _Shares:
    """The shares of pixels in larger ones, along one side of a picture.

    No matrix product: numpy would use a thread for each core, which wait actively for each other
    and, on a busy machine, take 200 times as long as the picture needs.

    Args:
        n_in: pixels of the side.
        n_out: larger pixels of the side.
    """

    def __init__(self, n_in: int, n_out: int) -> None:
        edges = np.linspace(0, n_in, n_out + 1)
        n_parts = int(np.max(np.ceil(edges[1:]) - np.floor(edges[:-1])))
        index = np.floor(edges[:-1]).astype(np.int64)[:, None] + np.arange(n_parts)
        starts, ends = np.maximum(edges[:-1, None], index), np.minimum(edges[1:, None], index + 1)
        share = np.maximum(ends - starts, 0.0) * (n_out / n_in)
        self._index = np.minimum(index, n_in - 1).T.copy()
        self._share = share.T[..., None].astype(np.float32)

    def means(self, frame: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Return the mean rows ``[n_out, …]`` of the rows ``[n_in, …]``."""
        total: npt.NDArray[np.float32] = frame[self._index[0]] * self._share[0]
        for index, share in zip(self._index[1:], self._share[1:], strict=True):
            total += frame[index] * share
        return total
