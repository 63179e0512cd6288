"""Small simulators in torch, which step thousands of worlds at once on any device.

They are vector envs of Gymnasium whose observations, rewards and flags are tensors::

    make_env_manager("dmiddleware.zoo.tensor_envs:CartPole", env_num=4096, mode="vector")

An episode that ends is followed by the next one in the same step (``AutoresetMode.SAME_STEP``), and
nothing that a step does waits for the device.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar, Final

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space

__all__ = ["CartPole", "Pendulum", "Reacher", "Rover", "TensorEnv"]

Step = tuple[Any, torch.Tensor, torch.Tensor, torch.Tensor, dict[str, Any]]


class TensorEnv(gym.vector.VectorEnv[Any, torch.Tensor, torch.Tensor]):
    """Base of simulators in torch: a state of each world, and the rules by which it changes.

    A subclass sets its spaces and its time limit, and writes :meth:`first`, :meth:`advance` and
    :meth:`seen`, with operations on tensors only.

    Args:
        num_envs: number of worlds, ``E``.
        device: where they are.

    Attributes:
        state: ``[E, …]``, the state of each world.
    """

    metadata: dict[str, Any] = {"autoreset_mode": AutoresetMode.SAME_STEP}
    max_steps: ClassVar[int]

    def __init__(self, num_envs: int = 1, device: str = "cpu") -> None:
        self.num_envs = num_envs
        self.device = torch.device(device)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.generator = torch.Generator(self.device)
        self.state = torch.empty(0)
        self._n_steps = torch.empty(0)

    def first(self) -> torch.Tensor:
        """Draw a state for the start of an episode in each world, ``[E, …]``."""
        raise NotImplementedError

    def advance(self, state: torch.Tensor, action: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the next states ``[E, …]``, the rewards ``[E]``, and which of them are terminal.

        Args:
            state: ``[E, …]``.
            action: ``[E, …]``.
        """
        raise NotImplementedError

    def seen(self, state: torch.Tensor) -> Any:
        """Return what an agent observes of states ``[E, …]``.

        Returns:
            A new tensor ``[E, …]``, or a dictionary of them for a Dict space.
        """
        raise NotImplementedError

    def uniform(self, low: float, high: float, *shape: int) -> torch.Tensor:
        """Draw numbers ``[E, *shape]`` between two bounds."""
        draws = torch.rand((self.num_envs, *shape), generator=self.generator, device=self.device)
        return draws * (high - low) + low

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Start an episode in every world."""
        if seed is not None:
            self.generator.manual_seed(seed if isinstance(seed, int) else int(seed[0] or 0))
        self.state = self.first()
        self._n_steps = torch.zeros(self.num_envs, device=self.device)
        return self.seen(self.state), {}

    def step(self, actions: torch.Tensor) -> Step:
        """Advance all worlds by one step; those whose episode ended begin another one."""
        state, reward, terminated = self.advance(self.state, actions)
        self._n_steps = self._n_steps + 1
        truncated = (self._n_steps >= self.max_steps) & ~terminated
        done = terminated | truncated
        final_obs = self.seen(state)
        is_over = done.view(-1, *(1,) * (state.dim() - 1))
        self.state = torch.where(is_over, self.first(), state)
        self._n_steps = self._n_steps.masked_fill(done, 0.0)
        info = {"final_obs": final_obs, "_final_obs": done}
        return self.seen(self.state), reward, terminated, truncated, info

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all worlds and of the generator, as plain data."""
        return {
            "state": self.state.cpu().numpy().copy(),
            "n_steps": self._n_steps.cpu().numpy().copy(),
            "generator": self.generator.get_state().numpy().copy(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self.state = torch.tensor(state["state"], device=self.device)
        self._n_steps = torch.tensor(state["n_steps"], device=self.device)
        self.generator.set_state(torch.tensor(state["generator"]))


_GRAVITY: Final = 9.8
_CART: Final = 1.0
_POLE: Final = 0.1
_HALF_LENGTH: Final = 0.5
_FORCE: Final = 10.0
_CARTPOLE_STEP_S: Final = 0.02
_MAX_POSITION: Final = 2.4
_MAX_ANGLE: Final = 12 * math.pi / 180


class CartPole(TensorEnv):
    """Balance a pole on a cart: the equations and limits of Gymnasium's CartPole-v1.

    Barto, Sutton and Anderson, "Neuronlike Adaptive Elements That Can Solve Difficult Learning
    Control Problems", 1983. Observations ``[4]``, two actions, at most 500 steps.
    """

    max_steps = 500
    single_observation_space = spaces.Box(-np.inf, np.inf, (4,), np.float32)
    single_action_space = spaces.Discrete(2)

    def first(self) -> torch.Tensor:
        """Draw positions, angles and their velocities near zero."""
        return self.uniform(-0.05, 0.05, 4)

    def advance(self, state: torch.Tensor, action: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Push the cart to the left or to the right, for 20 ms."""
        position, velocity, angle, turn = state.unbind(1)
        force = (2.0 * action - 1.0) * _FORCE
        sine, cosine = angle.sin(), angle.cos()
        total = _CART + _POLE
        shared = (force + _POLE * _HALF_LENGTH * turn.square() * sine) / total
        turn_rate = (_GRAVITY * sine - cosine * shared) / (
            _HALF_LENGTH * (4.0 / 3.0 - _POLE * cosine.square() / total)
        )
        acceleration = shared - _POLE * _HALF_LENGTH * turn_rate * cosine / total
        change = torch.stack((velocity, acceleration, turn, turn_rate), dim=1)
        following = state + _CARTPOLE_STEP_S * change
        terminated = (following[:, 0].abs() > _MAX_POSITION) | (following[:, 2].abs() > _MAX_ANGLE)
        return following, torch.ones_like(position), terminated

    def seen(self, state: torch.Tensor) -> torch.Tensor:
        """Return position and angle, and both velocities."""
        return state.clone()


_PENDULUM_STEP_S: Final = 0.05
_MAX_SPEED: Final = 8.0
_MAX_TORQUE: Final = 2.0


class Pendulum(TensorEnv):
    """Swing a pendulum up: the equations of Gymnasium's Pendulum-v1.

    Observations ``[3]``, torques ``[1]`` in ±2, always 200 steps.
    """

    max_steps = 200
    single_observation_space = spaces.Box(
        np.array([-1, -1, -_MAX_SPEED], np.float32), np.array([1, 1, _MAX_SPEED], np.float32)
    )
    single_action_space = spaces.Box(-_MAX_TORQUE, _MAX_TORQUE, (1,), np.float32)

    def first(self) -> torch.Tensor:
        """Draw angles from the whole circle, and small velocities."""
        return torch.stack((self.uniform(-math.pi, math.pi), self.uniform(-1.0, 1.0)), dim=1)

    def advance(self, state: torch.Tensor, action: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Apply the torque for 50 ms."""
        angle, speed = state.unbind(1)
        torque = action[:, 0].clamp(-_MAX_TORQUE, _MAX_TORQUE)
        from_top = torch.remainder(angle + math.pi, 2 * math.pi) - math.pi
        cost = from_top.square() + 0.1 * speed.square() + 0.001 * torque.square()
        speed = speed + (15.0 * angle.sin() + 3.0 * torque) * _PENDULUM_STEP_S
        speed = speed.clamp(-_MAX_SPEED, _MAX_SPEED)
        following = torch.stack((angle + speed * _PENDULUM_STEP_S, speed), dim=1)
        return following, -cost, torch.zeros_like(cost, dtype=torch.bool)

    def seen(self, state: torch.Tensor) -> torch.Tensor:
        """Return the cosine and the sine of the angle, and the velocity."""
        angle, speed = state.unbind(1)
        return torch.stack((angle.cos(), angle.sin(), speed), dim=1)


_JOINTS: Final = 12
_REACHER_STEP_S: Final = 0.05


class Reacher(TensorEnv):
    """Bring twelve joints to drawn angles and keep them there, as wide as a robot's task.

    Observations ``[48]``: cosine, sine and velocity of each joint, and the difference to its goal.
    Actions ``[12]``: torques in ±1. The reward is 1 where all joints are at their goals, and falls
    with the mean squared difference. Always 200 steps.
    """

    max_steps = 200
    single_observation_space = spaces.Box(-np.inf, np.inf, (4 * _JOINTS,), np.float32)
    single_action_space = spaces.Box(-1.0, 1.0, (_JOINTS,), np.float32)

    def first(self) -> torch.Tensor:
        """Draw angles and goals, ``[E, 3, 12]``: angles, velocities, goals."""
        drawn = self.uniform(-1.0, 1.0, 3, _JOINTS)
        drawn[:, 1] = 0.0
        return drawn

    def advance(self, state: torch.Tensor, action: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Apply the torques, with friction, for 50 ms."""
        angle, speed, goal = state.unbind(1)
        speed = speed + (10.0 * action.clamp(-1.0, 1.0) - speed) * _REACHER_STEP_S
        angle = angle + speed * _REACHER_STEP_S
        reward = (-(angle - goal).square().mean(1)).exp()
        following = torch.stack((angle, speed, goal), dim=1)
        return following, reward, torch.zeros_like(reward, dtype=torch.bool)

    def seen(self, state: torch.Tensor) -> torch.Tensor:
        """Return what each joint does, and how far it is from its goal."""
        angle, speed, goal = state.unbind(1)
        return torch.cat((angle.cos(), angle.sin(), speed, goal - angle), dim=1)


_ROVER_STEP_S: Final = 0.1
_THRUST: Final = 2.0
_ROVER_DRAG: Final = 0.5
_LEAST_CHARGE: Final = 10.0
_MOST_CHARGE: Final = 150.0
_FORCE_COST: Final = 0.5
_RAYS: Final = 8
_SCAN_NOISE: Final = 0.1


class Rover(TensorEnv):
    """Drive to a beacon and stay there until the battery, whose charge is not measured, is empty.

    Observations have parts, of which a robot has the first two, and a simulator all:

    - ``proprio`` ``[4]``: position and velocity in a plane;
    - ``scan`` ``[8]``: how brightly the beacon shines from each of eight directions, with noise;
    - ``beacon`` ``[2]``: the way to it;
    - ``charge`` ``[1]``: the charge, from 0 to 1. It is drawn for each episode, so that 10 to 150
      steps are possible; a force uses more of it.

    Actions ``[2]`` are forces in ±1. The reward of a step is 1 at the beacon and falls with the
    squared distance.
    """

    max_steps = 150
    single_observation_space = spaces.Dict(
        {
            "proprio": spaces.Box(-np.inf, np.inf, (4,), np.float32),
            "scan": spaces.Box(-np.inf, np.inf, (_RAYS,), np.float32),
            "beacon": spaces.Box(-np.inf, np.inf, (2,), np.float32),
            "charge": spaces.Box(0.0, 1.0, (1,), np.float32),
        }
    )
    single_action_space = spaces.Box(-1.0, 1.0, (2,), np.float32)

    def __init__(self, num_envs: int = 1, device: str = "cpu") -> None:
        super().__init__(num_envs, device)
        angle = torch.arange(_RAYS, device=self.device) * (2 * math.pi / _RAYS)
        self._rays = torch.stack((angle.cos(), angle.sin()))

    def first(self) -> torch.Tensor:
        """Draw a state ``[E, 15]``: position, velocity, beacon, charge and scan."""
        position, beacon = self.uniform(-1.0, 1.0, 2), self.uniform(-1.0, 1.0, 2)
        charge = self.uniform(_LEAST_CHARGE, _MOST_CHARGE, 1)
        parts = (position, torch.zeros_like(position), beacon, charge)
        return torch.cat((*parts, self._scan(beacon - position)), dim=1)

    def advance(self, state: torch.Tensor, action: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Apply the force, with drag, for 0.1 s."""
        position, velocity, beacon, charge, _ = _parts(state)
        force = action.clamp(-1.0, 1.0)
        velocity = velocity + (_THRUST * force - _ROVER_DRAG * velocity) * _ROVER_STEP_S
        position = position + velocity * _ROVER_STEP_S
        charge = charge - 1.0 - _FORCE_COST * force.square().sum(1, keepdim=True)
        way = beacon - position
        reward = 1.0 / (1.0 + 4.0 * way.square().sum(1))
        parts = (position, velocity, beacon, charge.clamp(min=0.0), self._scan(way))
        return torch.cat(parts, dim=1), reward, charge[:, 0] <= 0.0

    def seen(self, state: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the parts of observations."""
        position, _, beacon, charge, scan = _parts(state)
        return {
            "proprio": state[:, :4].clone(),
            "scan": scan.clone(),
            "beacon": beacon - position,
            "charge": charge / _MOST_CHARGE,
        }

    def _scan(self, way: torch.Tensor) -> torch.Tensor:
        """Return the brightness ``[E, 8]`` by direction, of a beacon that is ``[E, 2]`` away."""
        bright: torch.Tensor = (way @ self._rays).relu() / (1.0 + way.norm(dim=1, keepdim=True))
        return bright + self.uniform(-_SCAN_NOISE, _SCAN_NOISE, _RAYS)


def _parts(state: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return position, velocity, beacon, charge and scan of a rover's states ``[E, 15]``."""
    return state[:, :2], state[:, 2:4], state[:, 4:6], state[:, 6:7], state[:, 7:]
