"""PPO on a simulator in torch, here and in libraries that are made for such simulators.

The task is the CartPole of :mod:`dmiddleware.zoo.tensor_envs` with a continuous action, whose sign
is the push: rsl_rl has no discrete actions. All sides have the same worlds, networks, batches and
epochs, and the same rates.
"""

from __future__ import annotations

import contextlib
import io
import os
from typing import Any, Self

import numpy as np
import torch
from gymnasium import spaces
from torch import nn

from dmiddleware import Task
from dmiddleware.env import BaseEnvManager, make_env_manager
from dmiddleware.policy import PPOPolicy
from dmiddleware.zoo.tensor_envs import CartPole
from middleware import GAEEstimator, OnPolicyLearner, StepCollector

LANES = 4096
STEPS = 16
EPOCHS = 2
MINIBATCHES = 4
HIDDEN_SIZES = (64, 64)
LEARNING_RATE = 3e-4
DISCOUNT = 0.99
GAE_LAMBDA = 0.95
ENTROPY_WEIGHT = 0.01
VALUE_WEIGHT = 0.5
GRAD_CLIP = 0.5


class PushCartPole(CartPole):
    """A cart that is pushed to the left by negative actions, and to the right by others."""

    single_action_space = spaces.Box(-1.0, 1.0, (1,), np.float32)

    def advance(self, state: torch.Tensor, action: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Push, for 20 ms."""
        return super().advance(state, (action[:, 0] >= 0).float())


class Ours:
    """The chain; each ``run`` continues where the last one ended.

    Args:
        envs: where it acts; None: the worlds of the cart.
        compiled: whether to compile updates.
        learns: whether it learns from what it collects.
    """

    def __init__(
        self, envs: BaseEnvManager | None = None, *, compiled: bool = False, learns: bool = True
    ) -> None:
        if envs is None:
            envs = make_env_manager(PushCartPole, env_num=LANES, mode="vector", seed=0)
        n_sample = envs.env_num * STEPS
        policy = PPOPolicy.for_env(
            envs,
            seed=0,
            compile=compiled,
            batch_size=n_sample // MINIBATCHES,
            epoch_per_collect=EPOCHS,
            learning_rate=LEARNING_RATE,
            discount=DISCOUNT,
            gae_lambda=GAE_LAMBDA,
            entropy_weight=ENTROPY_WEIGHT,
            value_weight=VALUE_WEIGHT,
            value_clip=None,
            grad_clip_norm=GRAD_CLIP,
            model={"encoder_hidden_sizes": HIDDEN_SIZES},
        )
        self._task = Task(seed=0)
        self._task.use(StepCollector(policy, envs, n_sample=n_sample))
        if learns:
            self._task.use(GAEEstimator(policy)).use(OnPolicyLearner(policy))

    def run(self) -> None:
        """Collect, and learn from it if this side learns."""
        self._task.run(max_step=1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._task.close()


class Alone:
    """The network, the draw of actions and the worlds in a loop: what a step cannot do without."""

    def __init__(self) -> None:
        self._worlds = PushCartPole(LANES)
        self._obs, _ = self._worlds.reset(seed=0)
        envs = make_env_manager(PushCartPole, env_num=1, mode="vector")
        self._network = PPOPolicy.for_env(
            envs, seed=0, model={"encoder_hidden_sizes": HIDDEN_SIZES}
        ).model
        self._generator = torch.Generator().manual_seed(0)

    @torch.no_grad()
    def run(self) -> None:
        """Step as often as the others collect, and keep nothing."""
        for _ in range(STEPS):
            output = self._network(self._obs)
            mean, std = output["mu"], output["sigma"]
            action = torch.normal(mean, std, generator=self._generator)
            torch.distributions.Normal(mean, std, validate_args=False).log_prob(action)
            self._obs, *_ = self._worlds.step(action)


class RslRl:
    """rsl_rl's runner, which it trains with itself; it looks for NaN in every step, as we do."""

    def __init__(self, *, compiled: bool = False, learns: bool = True) -> None:
        from rsl_rl.runners import OnPolicyRunner

        network = {
            "class_name": "rsl_rl.models:MLPModel",
            "hidden_dims": list(HIDDEN_SIZES),
            "activation": "tanh",
        }
        noise = {"class_name": "rsl_rl.modules.distribution:GaussianDistribution"}
        settings = {
            "class_name": "rsl_rl.algorithms:PPO",
            "num_learning_epochs": EPOCHS,
            "num_mini_batches": MINIBATCHES,
            "gamma": DISCOUNT,
            "lam": GAE_LAMBDA,
            "learning_rate": LEARNING_RATE,
            "schedule": "fixed",
            "entropy_coef": ENTROPY_WEIGHT,
            "value_loss_coef": VALUE_WEIGHT,
            "use_clipped_value_loss": False,
            "max_grad_norm": GRAD_CLIP,
            "normalize_advantage_per_mini_batch": True,
        }
        config = {
            "num_steps_per_env": STEPS,
            "save_interval": 10**9,
            "obs_groups": {"actor": ["policy"], "critic": ["policy"]},
            "actor": network | {"distribution_cfg": noise},
            "critic": dict(network),
            "algorithm": settings,
            "torch_compile_mode": "default" if compiled else None,
        }
        with contextlib.redirect_stdout(io.StringIO()):
            self._runner = OnPolicyRunner(_rsl_rl_env(), config, None, device="cpu")
        if not learns:
            self._runner.alg.update = _drop(self._runner.alg)

    def run(self) -> None:
        """Collect, and learn from it if this side learns."""
        with contextlib.redirect_stdout(io.StringIO()):
            self._runner.learn(1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        """There is nothing to close."""


def _drop(algorithm: Any) -> Any:
    """Return an update that only forgets what was collected."""

    def update() -> dict[str, float]:
        algorithm.storage.clear()
        return {}

    return update


def _rsl_rl_env() -> Any:
    from rsl_rl.env import VecEnv
    from tensordict import TensorDict

    class Env(VecEnv):
        """The worlds with rsl_rl's interface."""

        num_envs, num_actions, max_episode_length = LANES, 1, CartPole.max_steps
        device, cfg = "cpu", {}

        def __init__(self) -> None:
            self._worlds = PushCartPole(LANES)
            self._obs, _ = self._worlds.reset(seed=0)
            self.episode_length_buf = torch.zeros(LANES, dtype=torch.long)

        def get_observations(self) -> TensorDict:
            return TensorDict({"policy": self._obs}, batch_size=[LANES])

        def step(self, actions: torch.Tensor) -> Any:
            self._obs, reward, terminated, truncated, _ = self._worlds.step(actions)
            extras = {"time_outs": truncated}
            return self.get_observations(), reward, terminated | truncated, extras

    return Env()


class Skrl:
    """skrl's PPO, driven by its sequential trainer without a progress bar, records or files."""

    def __init__(self, *, compiled: bool = False, learns: bool = True) -> None:
        from skrl import logger
        from skrl.agents.torch.ppo import PPO, PPO_CFG
        from skrl.memories.torch import RandomMemory

        logger.setLevel("ERROR")
        self._env = _skrl_env()
        models = _skrl_models(self._env, compiled=compiled)
        cfg = PPO_CFG(
            rollouts=STEPS,
            learning_epochs=EPOCHS,
            mini_batches=MINIBATCHES,
            discount_factor=DISCOUNT,
            gae_lambda=GAE_LAMBDA,
            learning_rate=LEARNING_RATE,
            grad_norm_clip=GRAD_CLIP,
            value_clip=0.0,
            value_loss_scale=VALUE_WEIGHT,
            entropy_loss_scale=ENTROPY_WEIGHT,
            time_limit_bootstrap=True,
        )
        cfg.experiment.write_interval = cfg.experiment.checkpoint_interval = 0
        self._agent = PPO(
            models=models,
            memory=RandomMemory(memory_size=STEPS, num_envs=LANES, device="cpu"),
            cfg=cfg,
            observation_space=self._env.observation_space,
            action_space=self._env.action_space,
            device="cpu",
        )
        if not learns:
            self._agent.update = lambda *, timestep, timesteps: None
        self._trains = False

    def run(self) -> None:
        """Collect, and learn from it if this side learns."""
        from skrl.trainers.torch import SequentialTrainer

        if not self._trains:
            settings = {
                "timesteps": STEPS,
                "headless": True,
                "disable_progressbar": True,
                "close_environment_at_exit": False,
            }
            self._trainer = SequentialTrainer(env=self._env, agents=self._agent, cfg=settings)
            self._trains = True
        self._trainer.train()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        """There is nothing to close."""


def _skrl_env() -> Any:
    from skrl.envs.wrappers.torch.base import Wrapper

    class Env(Wrapper):
        """The worlds with skrl's interface."""

        def __init__(self) -> None:
            worlds = PushCartPole(LANES)
            super().__init__(worlds)
            self._worlds = worlds
            self._obs: torch.Tensor | None = None

        num_envs = property(lambda self: LANES)
        num_agents = property(lambda self: 1)
        observation_space = property(lambda self: PushCartPole.single_observation_space)
        action_space = property(lambda self: PushCartPole.single_action_space)
        state_space = property(lambda self: None)
        device = property(lambda self: torch.device("cpu"))

        def reset(self) -> tuple[torch.Tensor, dict[str, Any]]:
            if self._obs is None:
                self._obs, _ = self._worlds.reset(seed=0)
            return self._obs, {}

        def step(self, actions: torch.Tensor) -> Any:
            self._obs, reward, *flags, _ = self._worlds.step(actions)
            return self._obs, reward.view(-1, 1), *(flag.view(-1, 1) for flag in flags), {}

        def state(self) -> None:
            return None

        def render(self, *args: Any, **kwargs: Any) -> None:
            return None

        def close(self) -> None:
            return None

    return Env()


def _skrl_models(env: Any, *, compiled: bool) -> dict[str, Any]:
    from skrl.models.torch import DeterministicMixin, GaussianMixin, Model

    def layers(n_out: int) -> nn.Module:
        network = nn.Sequential(
            nn.Linear(4, HIDDEN_SIZES[0]),
            nn.Tanh(),
            nn.Linear(*HIDDEN_SIZES),
            nn.Tanh(),
            nn.Linear(HIDDEN_SIZES[1], n_out),
        )
        return torch.compile(network) if compiled else network

    sizes = {
        "observation_space": env.observation_space,
        "action_space": env.action_space,
        "device": "cpu",
    }

    class Actor(GaussianMixin, Model):
        def __init__(self) -> None:
            Model.__init__(self, **sizes)
            GaussianMixin.__init__(self)
            self.net = layers(1)
            self.log_std = nn.Parameter(torch.zeros(1))

        def compute(self, inputs: Any, role: str = "") -> Any:
            return self.net(inputs["observations"]), {"log_std": self.log_std}

    class Critic(DeterministicMixin, Model):
        def __init__(self) -> None:
            Model.__init__(self, **sizes)
            DeterministicMixin.__init__(self)
            self.net = layers(1)

        def compute(self, inputs: Any, role: str = "") -> Any:
            return self.net(inputs["observations"]), {}

    return {"policy": Actor(), "value": Critic()}


# rsl_rl's logger asks git for the state of the program.
os.environ.setdefault("GIT_PYTHON_REFRESH", "quiet")
