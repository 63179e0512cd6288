"""The base class of all algorithms: how to act, and how to learn, on batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, ClassVar, Self

import gymnasium as gym
import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from dmiddleware.data.minibatches import MinibatchUnit
from dmiddleware.distributed import (
    GradientReducer,
    broadcast_model,
    rank_and_world_size,
    require_process_group,
)
from dmiddleware.env import agent_spaces
from dmiddleware.errors import (
    ConfigError,
    PolicyError,
    PolicyOutputError,
    SpaceError,
    StructureError,
)
from dmiddleware.model import create_model, obs_shape_of
from dmiddleware.model.layers import check_default_dtype
from dmiddleware.model.spaces import HasSpaces, spaces_of, try_model
from dmiddleware.policy.acting import (
    ACT_KEYWORDS,
    STATE,
    check_act_inputs,
    check_finite,
    info_names,
    probe_inputs,
)
from dmiddleware.policy.action_codec import ActionCodec, ActorSettings, mask_of
from dmiddleware.policy.agents import present_agents, present_observations
from dmiddleware.policy.autocast import compute_in_bfloat16
from dmiddleware.policy.captured import CapturedFunction
from dmiddleware.policy.compiled import CompiledFunction
from dmiddleware.policy.component import Component
from dmiddleware.policy.component_attributes import set_components
from dmiddleware.policy.env_spaces import (
    check_action_kind,
    check_number_of_agents,
    check_observations,
    network_shapes,
)
from dmiddleware.policy.generators import PolicyGenerators
from dmiddleware.policy.hooks import Hook, check_keywords
from dmiddleware.policy.modes import MODES, CollectMode, EvalMode, LearnMode, Mode, PolicySpec
from dmiddleware.policy.obs_groups import ObsParts
from dmiddleware.policy.obs_norm import ObsNorm
from dmiddleware.policy.policy_settings import PolicySettings, annotated_settings, device_for
from dmiddleware.policy.rank_statistics import RankStatistics
from dmiddleware.policy.state import PolicyState, entry_of, load_model_state
from dmiddleware.policy.update import (
    UpdateOutput,
    UpdateRunner,
    check_columns,
    may_be_update,
    standard_columns,
    update_outputs,
)
from dmiddleware.process.memory import keep_freed_memory
from dmiddleware.rl import Distribution, RunningMeanStd
from dmiddleware.schedule import Counters, Schedule, scheduled_in_updates
from dmiddleware.seeding import derive_seed
from dmiddleware.settings import hints_of, takes_options
from dmiddleware.torch_private import call
from dmiddleware.torch_seeding import torch_seeded
from dmiddleware.tree import (
    Batch,
    Columns,
    Nested,
    Value,
    as_tree,
    from_numpy,
    leaf_of,
    leaves,
    map_leaves,
    to_device,
    to_dict,
)

__all__ = ["Policy"]


class Policy:
    """An algorithm: it acts on batches, declares its components once, and updates them.

    A subclass writes

    - :meth:`make_components`, which returns its :class:`Component` objects by name: modules with
      optimizer, target network and clipping, and other objects with a state;
    - :meth:`update`, which makes one update with :meth:`Component.step` and returns what to log;
    - if the update is random, or not every update is alike, :meth:`draw`, which returns the random
      tensors and flags that it takes;
    - if the defaults do not suit it, :meth:`act_collect` and :meth:`act_eval`.

    Placing on the device, checkpoints, what collectors receive, target updates, averaging over
    ranks and the check for values that are not finite follow from the declaration. Workers use a
    policy through :attr:`learn_mode`, :attr:`collect_mode` and :attr:`eval_mode`.

    Args:
        cfg: the settings, of the class that annotates :attr:`cfg`, or a dictionary of those that
            differ from the defaults, by name.
        model: None builds the one that ``cfg.model`` and :attr:`model_type` describe; a module
            is used as it is.
        modes: what the policy is for, of ``"learn"``, ``"collect"``, ``"eval"``.

    Attributes:
        cfg: the settings; a subclass names their class by an annotation, ``cfg: SACSettings``.
        modes: as given.
        model: the network.
        components: what :meth:`make_components` returned, and what every policy has. A component
            that the class declares by an annotation, such as ``critic: Component[QEnsemble]``, is
            also an attribute.
        spaces: of observations and actions of one env, once an env is known.
        parts: of these observations, with the setting ``obs_groups``; None: all of them are read.
        codec: maps between the network's outputs and the environment's actions.
        obs_norm: normalizes observations; without the setting ``obs_norm`` it does nothing.
        device: where the model is.
        draw_device: where random numbers are drawn now: on the device of the observations or of
            the batch, if they came to the policy there, and otherwise on the CPU.
        generator: of the random numbers of collecting, on ``draw_device``.
        eval_generator: of those of evaluating, so that the number of evaluations does not change
            what is collected.
        learn_generator: of those of updates.
        schedules: the settings that may be schedules and that updates read, by name.
        counters: what schedules read; middleware that learn set them before each update.
        train_iter: updates made.

    Raises:
        ConfigError: for an unusable config, an unknown field, ``cuda=True`` without CUDA, or if
            torch's default dtype is not float32.
        PolicyError: if a mode needs a method that is not written, or ``model`` is not a module.

    Example:
        >>> from dmiddleware.policy import Component, adam
        >>> class Regression(Policy):
        ...     net: Component[torch.nn.Linear]
        ...     def make_components(self):
        ...         return {"net": Component(self.model, adam(0.1), acts=True)}
        ...     def update(self, batch):
        ...         loss = (self.model(batch["obs"]) - batch["action"]).square().mean()
        ...         self.net.step(loss)
        ...         return {"total_loss": loss}
        >>> _ = torch.manual_seed(0)
        >>> policy = Regression(model=torch.nn.Linear(2, 1), modes=["learn"])
        >>> batch = {"obs": torch.ones(4, 2), "action": torch.ones(4, 1)}
        >>> losses = [policy.learn_mode.forward(batch)["total_loss"] for _ in range(50)]
        >>> losses[0] > 100 * losses[-1]
        True
    """

    cfg: PolicySettings
    reports: ClassVar[tuple[str, ...]] = ()
    """The scalars that updates may log, by their names in the documented list of metrics."""
    model_type: ClassVar[str] = ""
    """The registered name of the network to build if none is given."""
    model_defaults: ClassVar[Mapping[str, Any]] = {}
    """Arguments of that network that differ from its own defaults."""
    on_policy: bool = False
    """Whether the algorithm learns only from actions that its own distribution drew."""
    learn_columns: ClassVar[tuple[str, ...]] = ()
    """The columns that a batch needs for learning."""
    optional_columns: ClassVar[tuple[str, ...] | None] = None
    """Further columns that learning uses where a batch has them; None: any of them.

    A learner that divides collected data into minibatches leaves out all others, except for
    :attr:`act_inputs` and a recurrent ``state``.
    """
    minibatch_unit: ClassVar[MinibatchUnit] = "rows"
    """What such minibatches consist of.

    ``"rows"`` gives ``[B, …]``; ``"lanes"``, for recurrent networks and V-trace, whole columns of
    envs, time first: ``[T, B, …]``; ``"batch"`` all that was collected ``[N, …]``, for an algorithm
    that makes its own minibatches.
    """
    learns_from_trajectories: ClassVar[bool] = False
    """Whether it learns from collected trajectories as they are, because it computes its targets.

    Otherwise an on-policy algorithm learns from what an estimator of advantages returns.
    """
    several_agents: ClassVar[bool] = False
    """Whether the policy acts for all agents of an env; others refuse envs with several agents.

    Observations are those of :mod:`dmiddleware.env.team`; outputs and rewards have one more
    dimension, that of the agents: ``[E, A, …]``. The action codec is that of one agent. Statistics
    of observations and returns leave out the agents that do not take part.
    """
    action_kinds: ClassVar[tuple[str, ...]] = ()
    """The kinds of actions that the algorithm supports; empty: all."""
    act_inputs: tuple[str, ...] = ("action_mask",)
    """What the policy sees when it acts, in addition to observations and env ids.

    The names are keyword arguments of its forward, with one row per env, and columns of what is
    collected; only these are collected:

    - ``prev_action``: the action before, as the env took it; zeros at the start of an episode (the
      first choice of a Discrete space that does not start at zero);
    - ``prev_reward``: ``[E] float32``, the reward before; 0 at the start of an episode;
    - ``is_first``: ``[E] bool``, whether it is the first step of an episode;
    - ``action_mask``: ``[E, A] bool``, true where an action is allowed, from the key
      ``action_mask`` of a Dict observation or of the env's info. In envs without masks it is
      not passed, so give it the default None; without such a parameter, it is not collected. The
      column ``next_action_mask`` has the mask of each ``next_obs``, also at the end of an episode;
    - ``info.<name>``: the keyword ``info``, a treetensor with ``info[name]`` ``[E, …]``, from the
      info that came with the observation; zeros where an env did not return it.
    """
    explores: bool = True
    """Whether collecting explores without keyword arguments such as ``eps``."""

    @takes_options
    def __init__(
        self,
        cfg: PolicySettings | Mapping[str, Any] | None = None,
        model: nn.Module | None = None,
        modes: Iterable[Mode] = MODES,
    ) -> None:
        check_default_dtype(type(self).__name__)
        self.cfg = self._checked_settings(cfg)
        check_act_inputs(self.act_inputs, owner=type(self).__name__)
        self.modes = self._checked_modes(modes)
        self.device = device_for(self.cfg)
        self.on_gpu = self.device != "cpu"
        seed = torch.initial_seed() if self.cfg.seed is None else self.cfg.seed
        self.spaces: tuple[gym.Space[Any], gym.Space[Any]] | None = None
        self.parts: ObsParts | None = None
        self._has_own_model = model is not None
        self._generators = PolicyGenerators(seed, self.device)
        self._draw_on("cpu")
        self.model = self._build_model(model).to(self.device)
        self._submodules = tuple(self.model.modules())
        self._trains_itself = any(
            type(module).train is not nn.Module.train for module in self._submodules
        )
        self.train_iter = 0
        self.counters = Counters()
        self.schedules = self._schedules()
        self._present: Sequence[tuple[Schedule, float | torch.Tensor]] = ()
        self._captured_acting = CapturedFunction(
            self._act_in_step,
            self.device,
            user=f"{type(self).__name__}.act_collect",
            generators=self._acting_generators,
        )
        replays = self.on_gpu and self.cfg.compile == "graphs"
        self._replay_acting = self._act_captured if replays else None
        self._plain_model = partial(call, self.model)
        self.acting_model: Callable[..., dict[str, Any]] = self._plain_model
        self._hooks = self._declared_hooks()
        if not any("action_mask" in (hook.keywords or ()) for hook in self._hooks.values()):
            # Methods that do not take it need no masks.
            self.act_inputs = tuple(name for name in self.act_inputs if name != "action_mask")
        self.reducer: GradientReducer | None = None
        self._rank_statistics = RankStatistics()
        if "learn" in self.modes:
            keep_freed_memory()
            if self.cfg.multi_gpu:
                self._join_ranks()  # before there are targets, which copy the common parameters
        self.codec = ActionCodec.for_policy(self.cfg, getattr(self.model, "action_parts", ()))
        self.obs_norm = ObsNorm.for_policy(
            self.cfg,
            self.model,
            device=self.device,
            select=present_observations if self.several_agents else None,
            make_statistics=self.make_statistics,
        )
        self.setup()
        self.components = {**self._common_components(), **self.make_components()}
        set_components(self, self.components)
        for component in self.components.values():
            if isinstance(component.module, nn.Module):
                component.module.to(self.device)
        if self.cfg.autocast is not None:
            self._compute_in_bfloat16()
        self._state = PolicyState(
            self.model, self.components, self._generators, type(self).__name__
        )
        if "learn" in self.modes:
            self._prepare_to_learn()

    @classmethod
    def for_env(
        cls,
        env: HasSpaces,
        cfg: PolicySettings | Mapping[str, Any] | None = None,
        *,
        model: nn.Module | Mapping[str, Any] | None = None,
        modes: Iterable[Mode] = MODES,
        **options: Any,
    ) -> Self:
        """Build the policy for an environment.

        Args:
            env: an env manager, a Gymnasium env, a Gymnasium vector env, or a Minari dataset, which
                has the same spaces.
            cfg: as in the class.
            model: a module, or arguments of the algorithm's network that differ from the defaults.
                The shapes of observations and actions are taken from ``env``.
            modes: as in the class.
            **options: settings that differ from ``cfg``, by name, such as ``learning_rate``; see
                :doc:`/reference/configuration`.

        Raises:
            ConfigError: for an unknown setting, with the nearest known one, or an invalid value.
            SpaceError: if the algorithm does not support the environment's spaces.
        """
        observation_space, action_space = spaces_of(env, several_agents=cls.several_agents)
        check_number_of_agents(
            observation_space, several_agents=cls.several_agents, user=cls.__name__
        )
        settings = replace(cls._checked_settings(cfg), **options)
        parts = ObsParts.of(settings, observation_space, user=cls.__name__)
        if isinstance(model, nn.Module):
            shape = obs_shape_of(observation_space)
            network = model
            shapes = {"obs_shape": shape} if parts is None else parts.shapes(shape)
            # A module of the user's own does not have to know the shape of observations.
            shapes = shapes if getattr(settings, "obs_norm", False) else {}
        else:
            network = None
            shapes = network_shapes(
                observation_space, action_space, several_agents=cls.several_agents, parts=parts
            )
            if not isinstance(settings, ActorSettings):
                del shapes["action_space"]  # its networks have one kind of actions
            shapes |= model or {}
        settings = replace(settings, model={**settings.model, **shapes})
        policy = cls(settings, network, modes)
        policy.check_spaces(observation_space, action_space)
        return policy

    @classmethod
    def settings_class(cls) -> type[PolicySettings]:
        """Return the class of the settings: the annotation of ``cfg``.

        Raises:
            PolicyError: if the annotation does not name a class of settings of its module.
        """
        return annotated_settings(cls)

    @classmethod
    def _checked_settings(cls, cfg: PolicySettings | Mapping[str, Any] | None) -> Any:
        """Return the settings that were given, or make them from a dictionary."""
        kind = cls.settings_class()
        if isinstance(cfg, kind):
            return cfg
        if cfg is not None and not isinstance(cfg, Mapping):
            raise ConfigError(
                f"{cls.__name__} takes {kind.__name__}(...), or a dictionary of the settings by "
                f"name, got {cfg!r:.100}"
            )
        return kind(**(cfg or {}))

    def _schedules(self) -> dict[str, Schedule]:
        """Return the settings that may be schedules and that updates read."""
        return {
            name: Schedule.of(getattr(self.cfg, name))
            for name, hint in hints_of(type(self.cfg)).items()
            if scheduled_in_updates(hint)
        }

    # The hooks that an algorithm writes.

    def make_model(self) -> nn.Module:
        """Return the network to build if none is given; by default as ``cfg.model`` says."""
        options = dict(self.cfg.model)
        if "type" not in options:
            if not self.model_type:
                raise PolicyError(
                    f"{type(self).__name__} has no default model; pass model=, set cfg.model.type, "
                    "or name a registered one in the class: model_type = 'q_network'"
                )
            options = {**self.model_defaults, **options, "type": self.model_type}
        return create_model(options)

    def setup(self) -> None:
        """Build what the algorithm needs before its components; called once."""

    def make_components(self) -> dict[str, Component[Any]]:
        """Return the components by name; called once.

        Components that the class declares become attributes.
        """
        return {}

    def draw(self, batch: Columns) -> dict[str, Any]:
        """Return what the next update takes in addition to its batch.

        Returns:
            Random tensors, drawn from ``self.learn_generator``, and flags of type bool, such as
            whether the actor is updated too. A compiled update is compiled once for each
            combination of flags.
        """
        return {}

    def update(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Make one update: ``update(batch, **drawn)``.

        It reads no value back from the device and branches on none, so it can be compiled.

        Args:
            *args: the batch, ``[B, …]`` columns by name; nested observations are nested
                dictionaries. With ``obs_norm``, observations are normalized already.
            **kwargs: what :meth:`draw` returned.

        Returns:
            What to log: scalars; maybe ``priority`` ``[B]``; maybe ``kl_stop``, a bool scalar: True
            if the update was skipped, or False.
        """
        raise NotImplementedError

    def act_collect(
        self,
        obs: Value,
        env_id: npt.NDArray[np.int64],
        *,
        action_mask: Nested | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Act while collecting; by default, draw from the distribution of the actor's output.

        The parameters of an override after ``env_id`` are the keyword arguments that the mode's
        forward takes, such as ``*, eps=0.0``; any other one is refused.

        Args:
            obs: ``[E, *obs_shape]``, normalized with ``obs_norm``.
            env_id: ``[E]``.
            action_mask: ``[E, A]`` bool, true where an action is allowed.
            **kwargs: further inputs that the class declares in :attr:`act_inputs`.

        Returns:
            ``action`` ``[E, …]`` and whatever else is to be stored.
        """
        return self.acted(self.actor_output(obs), obs, action_mask, self.generator)

    def act_eval(
        self,
        obs: Value,
        env_id: npt.NDArray[np.int64],
        *,
        deterministic: bool = True,
        action_mask: Nested | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Act while evaluating; by default, take the most likely action of the actor's output.

        Args:
            obs: as in :meth:`act_collect`.
            env_id: likewise.
            deterministic: False draws actions.
            action_mask: as in :meth:`act_collect`.
            **kwargs: likewise.

        Returns:
            ``action`` ``[E, …]``.
        """
        generator = None if deterministic else self.eval_generator
        return self.acted(self.actor_output(obs), obs, action_mask, generator)

    def initial_state(self, n: int) -> Nested | None:
        """Return the recurrent state at the start of ``n`` episodes; None: not recurrent.

        A recurrent policy overrides it. Its forward takes the keyword ``state`` and returns the
        next state under the key ``"state"``. The component that steps the envs holds the state, and
        starts again from the initial one at each episode. Collected rows have the column ``state``,
        the state before the row.

        Returns:
            A tensor ``[n, …]``, or nested dictionaries or tuples of such tensors (which forward
            receives as a treetensor). It must not depend on earlier calls.
        """
        return None

    def check_outputs(self, obs: Value, **inputs: Any) -> None:
        """Refuse a model whose outputs do not fit the actions; by default, nothing.

        Called where an env becomes known, in addition to acting, with two observations ``[2, …]``
        of zeros: for what only collecting and learning use, such as values and critics.

        Args:
            obs: normalized with ``obs_norm``.
            **inputs: the :attr:`act_inputs`, and ``state``, as at the start of an episode.

        Raises:
            PolicyOutputError: naming the output, and what it must be.
            SpaceError: if it has another length than the action.
        """

    def check_batch(self, batch: Batch) -> Batch:
        """Return the batch to learn from, or refuse it; by default as it is.

        Args:
            batch: on the policy's device, with :attr:`learn_columns`.
        """
        return batch

    def n_learned_rows(self, batch: Columns) -> int:
        """Return over how many rows the loss of a batch is a mean: its weight among the ranks."""
        lead = 2 if self.minibatch_unit == "lanes" else 1
        shape: torch.Size = next(iter(leaves(batch)))[1].shape[:lead]
        return shape.numel()

    def train_batch(self, batch: Batch) -> Batch:
        """Turn a collected batch ``[T, E, …]``, or an episode ``[T, …]``, into training data.

        By default, only the parts of observations that no group reads are dropped.
        """
        return batch if self.parts is None else self.parts.rows(batch)

    # What an algorithm calls.

    def now(self, setting: float | Schedule) -> float | torch.Tensor:
        """Return the present value of a setting that may be a schedule, such as ``self.cfg.alpha``.

        Returns:
            A number, or, of a schedule, a scalar tensor on the device that every update sets,
            because a compiled update would not see a number change.

        Raises:
            PolicyError: for a schedule that is not a setting of a policy that learns.
        """
        if not isinstance(setting, Schedule):
            return setting
        for schedule, value in self._present:
            if schedule is setting:
                return value
        raise PolicyError(
            f"{type(self).__name__}.now knows no present value of {setting}; pass a setting that "
            "updates read, such as self.cfg.alpha, of a policy that learns"
        )

    def make_statistics(self, shape: Sequence[int] = (), **options: Any) -> RunningMeanStd:
        """Return running statistics; with several ranks, of what all of them see.

        Args:
            shape: of one item.
            **options: of :class:`~dmiddleware.rl.RunningMeanStd`.
        """
        if self.reducer is None:
            return RunningMeanStd(shape, **options)
        return self._rank_statistics.make(shape, **options)

    def share_statistics(self) -> None:
        """Add what all ranks have seen to the statistics; every rank must call it.

        Called before each learning, so an algorithm calls it only to use statistics before.
        """
        self._rank_statistics.share()

    def rows_of(self, obs: Any, n_lead: int = 1) -> torch.Size:
        """Return the leading dimensions of the outputs for observations ``[…, *obs_shape]``."""
        if self.several_agents:
            return present_agents(obs).shape
        shape: torch.Size = next(iter(leaves(obs)))[1].shape[:n_lead]
        return shape

    def submodule(self, name: str) -> nn.Module:
        """Return a submodule of the model.

        Raises:
            PolicyError: if the model has no such submodule.
        """
        children = dict(self.model.named_children())
        if name not in children:
            raise PolicyError(
                f"{type(self).__name__} needs a model with the submodule {name}, but "
                f"{type(self.model).__name__} has {', '.join(children) or 'none'}; see "
                'the page "Use a custom model" of the documentation'
            )
        return children[name]

    def actor_output(self, obs: Value) -> dict[str, torch.Tensor]:
        """Return the actor's outputs, without running the critic if possible."""
        compute = getattr(self.model, "compute_actor", None)
        if compute is None:
            # A model that consists of actor and critic needs no forward of its own.
            actor = self.components.get("actor")
            compute = self.model if actor is None else actor.module
        output: dict[str, torch.Tensor] = compute(obs)
        return output

    def acted(
        self,
        output: dict[str, torch.Tensor],
        obs: Value,
        action_mask: Nested | None,
        generator: torch.Generator | None,
    ) -> dict[str, Any]:
        """Return ``{"action"}`` for the actor's output: the most likely ones, or draws.

        Args:
            output: of :meth:`actor_output`.
            obs: what the actor saw.
            action_mask: ``[E, A]`` bool; None: the mask that the observations have.
            generator: draws the actions; None: the most likely ones.
        """
        distribution = self.acting_distribution(output, obs, action_mask)
        raw = distribution.mode() if generator is None else distribution.sample(generator)
        return {"action": self.codec.to_env(raw)}

    def acting_distribution(
        self, output: dict[str, torch.Tensor], obs: Nested, action_mask: Nested | None
    ) -> Distribution:
        """Return the distribution to act from, on the device where actions are drawn.

        The outputs are moved there. For observations of the host it is the CPU, so a run in such
        envs draws the same numbers with and without a GPU.
        """
        mask = mask_of(obs, action_mask)
        if self.on_gpu:
            for name, column in output.items():
                output[name] = column.to(self.draw_device)
            mask = None if mask is None else mask.to(self.draw_device)
        return self.codec.distribution(output, mask)

    def as_obs(self, data: Nested) -> Value:
        """Convert observations to a tensor or treetensor on the policy's device."""
        if type(data) not in (torch.Tensor, Batch) and isinstance(
            data, np.ndarray | Mapping | tuple
        ):
            data = from_numpy(data)
        obs: Value = to_device(data, self.device) if self.on_gpu else data
        return obs

    def draw_near(self, data: Nested) -> None:
        """Draw on the policy's device if the data are there, and otherwise on the CPU."""
        if not self.on_gpu:
            return
        leaf: Any = leaf_of(data)
        place = getattr(leaf, "device", "cpu")  # of an array, whatever it says, the host
        is_there = isinstance(leaf, torch.Tensor) and place == torch.device(self.device)
        self._draw_on(self.device if is_there else "cpu")

    def _draw_on(self, device: str) -> None:
        self.draw_device = torch.device(device)
        # Their values can be checked without waiting for a device.
        self._data_on_host = device == "cpu"
        generators = self._generators
        self.generator, self.eval_generator, self.learn_generator = (
            generators.on_cpu if device == "cpu" else generators.on_device
        )

    def set_training(self, mode: bool) -> None:
        """Set the mode of the network, as ``model.train(mode)`` does in ten times the time."""
        if self._trains_itself:
            self.model.train(mode)
            return
        for module in self._submodules:
            object.__setattr__(module, "training", mode)

    # What others call.

    @property
    def learn_mode(self) -> LearnMode:
        """What a learner may use of the policy."""
        return LearnMode(self._learn, self._learn_state, self._load_learn_state, self.spec)

    @property
    def collect_mode(self) -> CollectMode:
        """What a collector may use of the policy."""
        return CollectMode(
            partial(self._act, "collect"),
            self._state.acting,
            self._load_acting_state,
            self.spec,
            reset=self.reset,
            seed=partial(self._generators.seed, "generator"),
            train_batch=self.train_batch,
            step_together=self._step_together,
        )

    @property
    def eval_mode(self) -> EvalMode:
        """What an evaluator may use of the policy."""
        return EvalMode(
            partial(self._act, "eval"),
            self._state.acting,
            self._load_acting_state,
            self.spec if self.parts is None else self._acting_spec(),
            reset=self.reset,
            seed=partial(self._generators.seed, "eval_generator"),
        )

    @cached_property
    def spec(self) -> PolicySpec:
        """What others read of the policy."""
        return PolicySpec(
            kind=type(self),
            settings=self.cfg,
            device=self.device,
            model=self.model,
            has_own_model=self._has_own_model,
            spaces=self._known_spaces,
            on_policy=self.on_policy,
            discount=self.discount,
            n_step=self.n_step,
            seed=self.cfg.seed,
            uses_ranks=self.cfg.multi_gpu,
            schedules=self.schedules,
            learn_columns=self.learn_columns,
            optional_columns=self.optional_columns,
            minibatch_unit=self.minibatch_unit,
            learns_from_trajectories=self.learns_from_trajectories,
            act_inputs=self.act_inputs,
            explores=self.explores,
            is_stochastic=self.is_stochastic,
            initial_state=self.initial_state,
            check_spaces=self.check_spaces,
            set_counters=self.set_counters,
            acting_state=self._state.acting,
            load_weights=self.load_weights,
        )

    def _acting_spec(self) -> PolicySpec:
        return replace(self.spec, check_spaces=self.check_acting_spaces)

    def _known_spaces(self) -> tuple[gym.Space[Any], gym.Space[Any]] | None:
        return self.spaces

    @property
    def is_stochastic(self) -> bool:
        """Whether evaluating takes the keyword ``deterministic``: False draws actions."""
        return "deterministic" in (self._hooks["eval"].keywords or ())

    @property
    def discount(self) -> float | None:
        """The discount γ of future rewards; None for an algorithm that has none."""
        return getattr(self.cfg, "discount", None)

    @property
    def n_step(self) -> int:
        """Number of rewards that a buffer sums before a target bootstraps."""
        return 1

    def scheduled(self, name: str) -> float:
        """Return the current value of a setting that may be a schedule.

        Args:
            name: the setting, such as ``"learning_rate"``.

        Raises:
            ConfigError: if its schedule reads a counter that nothing has set.
        """
        return self.schedules[name].at(self.counters._replace(update=self.train_iter))

    def set_counters(self, counters: Counters) -> None:
        """Set what schedules read; the policy counts its updates itself."""
        self.counters = counters

    def seed(self, seed: int) -> None:
        """Seed the randomness of acting: exploration and sampled actions."""
        self._generators.seed("generator", seed)
        self._generators.seed("eval_generator", derive_seed(seed, "eval"))

    def reset(self, env_ids: Iterable[int] | None = None) -> None:
        """Forget what acting keeps of these envs; None: of all. By default there is nothing."""

    def observe(self, obs: Nested) -> None:
        """Take observations that another process or a data set supplied, once.

        A policy with ``obs_norm`` adds them to its statistics; without, nothing happens.

        Args:
            obs: ``[…, *obs_shape]``, what another process acted on with one version of the policy,
                or the observations of a data set.

        Raises:
            StructureError: if they are not those of the policy's env.
        """
        if self.spaces is not None:
            check_observations(obs, self.spaces[0])
        if self.obs_norm.is_on:
            if self.on_gpu:  # statistics on a device check nothing
                check_finite(obs, user=type(self).__name__)
            self.obs_norm.update(self.as_obs(obs))

    def load_weights(self, state: Mapping[str, torch.Tensor]) -> None:
        """Load the model's weights, and nothing else; target networks become copies of them.

        Raises:
            CheckpointMismatch: if they belong to another model; nothing was loaded.
        """
        load_model_state(self.model, state)
        self._state.copy_targets()

    def check_spaces(self, observation_space: gym.Space[Any], action_space: gym.Space[Any]) -> None:
        """Refuse spaces that the model does not fit, and take the details of the action space.

        Raises:
            SpaceError: with both shapes.
        """
        self._check_read(observation_space, action_space, acts_only=False)

    def check_acting_spaces(
        self, observation_space: gym.Space[Any], action_space: gym.Space[Any]
    ) -> None:
        """Refuse spaces in which the policy cannot act; the critic's own parts may be missing.

        Raises:
            SpaceError: as :meth:`check_spaces` raises it.
        """
        self._check_read(observation_space, action_space, acts_only=True)

    def _check_read(
        self, observation_space: gym.Space[Any], action_space: gym.Space[Any], *, acts_only: bool
    ) -> None:
        several, user = self.several_agents, type(self).__name__
        check_number_of_agents(observation_space, several_agents=several, user=user)
        observation_space = self._space_read(observation_space, acts_only=acts_only)
        space = action_space
        if several:
            space = agent_spaces(observation_space, action_space).action
        check_action_kind(space, self.action_kinds, several_agents=several, user=user)
        parts, check = self.parts, getattr(self.model, "check_spaces", None)
        if check is not None:
            check(
                observation_space if parts is None else parts.of_actor(observation_space),
                action_space,
            )
        if parts is not None and not acts_only:
            shapes = network_shapes(observation_space, action_space, several_agents=several)
            parts.check_critic(self.model, shapes["obs_shape"])
        # To try the model, the codec has to know what its outputs mean.
        self.codec.set_space(space)

        def act(obs: Value) -> Value | None:
            # A model that knows its shapes need not show its actions.
            acts = check is None or parts is not None
            return self._probe(obs, action_space, acts=acts, acts_only=acts_only)

        try_model(self.model, act, observation_space, action_space)
        self.spaces = self.spaces or (observation_space, action_space)

    def _space_read(self, observation_space: gym.Space[Any], *, acts_only: bool) -> gym.Space[Any]:
        """Return the space of what the policy reads of observations."""
        user = type(self).__name__
        if self.parts is None:
            infos = info_names(self.act_inputs)
            self.parts = ObsParts.of(self.cfg, observation_space, infos=infos, user=user)
        if self.parts is None:
            return observation_space
        return self.parts.in_space(observation_space, acts_only=acts_only, user=user)

    @property
    def acting_space(self) -> gym.Space[Any] | None:
        """The space of the observations that acting needs; None: no env is known yet."""
        if self.spaces is None or self.parts is None:
            return self.spaces and self.spaces[0]
        space: gym.Space[Any] = self.parts.of_actor(self.spaces[0])
        return space

    def __repr__(self) -> str:
        return f"{type(self).__name__}(device={self.device}, model={self.model})"

    # Learning.

    def learn(self, batch: Batch, **kwargs: Any) -> Mapping[str, Any] | list[Mapping[str, Any]]:
        """Make one update from a checked batch on the device, and return what to log.

        An algorithm that makes several updates from a batch overrides it, and may return a list of
        outputs. The parameters of an override after ``batch`` are the keyword arguments that the
        learn mode's forward takes.
        """
        columns = to_dict(batch)
        if self.on_policy:
            self.obs_norm.hold()
        drawn = self.draw(columns)
        if self.obs_norm.is_on:
            columns = self.obs_norm.rows(columns)
        output = self._runner.run(
            columns, drawn, n_made=self.train_iter, counters=self.counters, batch=batch
        )
        if may_be_update(output):
            self.train_iter += 1
        if isinstance(output, UpdateOutput):
            output.on_stop = self._uncount_update
        return output

    def _uncount_update(self) -> None:
        """Take back an update that was counted and, as the GPU told later, not made."""
        self.train_iter -= 1

    def _learn(self, data: Any, **kwargs: Any) -> Mapping[str, Any] | list[Mapping[str, Any]]:
        """Check what a learner passes, and learn from it."""
        self._check_call("learn", kwargs)
        if not isinstance(data, Batch | Mapping):
            raise StructureError(
                f"{type(self).__name__} learns from a batch, columns [B, …] by name, got "
                f"{data!r:.100}"
            )
        batch = data if isinstance(data, Batch) else as_tree(data)
        if any(name not in batch for name in self.learn_columns):
            check_columns(self.learn_columns, batch, user=type(self).__name__)
        if self.on_gpu:
            self.draw_near(batch)
        # Rows that a collector made have actions of an env; those of other data may be anything.
        if "collect_iter" not in batch and "action" in batch and self._data_on_host:
            lead = tuple(batch["reward"].shape) if "reward" in batch else None
            self.codec.check(batch["action"], mask=batch.get("mask"), lead=lead)
            if self.spaces is not None:
                for name in {"obs", "next_obs"}.intersection(self.learn_columns):
                    check_observations(batch[name], self.spaces[0], name=name, lead=lead)
        batch = to_device(batch, self.device) if self.on_gpu else batch
        batch = self.check_batch(standard_columns(batch))
        if self.reducer is not None:
            self._meet_ranks(self.reducer, batch)
        if self.obs_norm.of_dataset and not self.obs_norm.has_seen_all:
            raise ConfigError(
                f"{type(self).__name__} has obs_norm=True, but knows nothing of the data set yet; "
                "call policy.observe(rows['obs']) with its observations before learning, or set "
                "obs_norm=False"
            )
        if not self.model.training:
            self.set_training(True)
        output = self.learn(batch, **kwargs)
        update_outputs(output, user=f"{type(self).__name__}.learn")
        return output

    def _meet_ranks(self, reducer: GradientReducer, batch: Batch) -> None:
        """Exchange with the other ranks what an update needs; every rank calls it for each."""
        self.share_statistics()
        self.obs_norm.follow()
        reducer.begin(self.n_learned_rows(batch))

    def _prepare_to_learn(self) -> None:
        self._runner = UpdateRunner(
            self.update,
            self.components,
            self.schedules,
            device=self.device,
            compiles=self.cfg.compile,
            reducer=self.reducer,
            in_model=self._state.paths,
            user=type(self).__name__,
        )
        self._present = self._runner.present

    def _compute_in_bfloat16(self) -> None:
        """Let the networks compute in bfloat16; targets are copies of them."""
        modules = [self.model, *(component.module for component in self.components.values())]
        for network in {id(module): module for module in modules}.values():
            if isinstance(network, nn.Module):
                compute_in_bfloat16(network)

    def _join_ranks(self) -> None:
        """Give all ranks the same parameters, and average the gradients of the updates."""
        require_process_group()
        overlap = not (self.cfg.bp_update_sync or self.cfg.compile)
        if rank_and_world_size()[1] > 1:
            broadcast_model(self.model)
            self.reducer = GradientReducer(self.model, overlap=overlap)

    # Acting.

    def _act(
        self, mode: Mode, /, obs: Nested, *, env_id: npt.ArrayLike | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """Check what a stepper passes, and act on it."""
        data = obs
        self._check_call(mode, kwargs)
        if env_id is None:  # else, an env manager has checked them
            check_finite(data, user=type(self).__name__)
        if self.model.training:
            self.set_training(False)
        with torch.set_grad_enabled(False):  # no_grad() does the same in twice the time
            if self.on_gpu or type(data) is not torch.Tensor:
                obs = self._observed(data, mode)
            if env_id is None:
                env_id = np.arange(len(next(iter(leaves(obs)))[1]))
            for name in ACT_KEYWORDS.intersection(kwargs):
                if kwargs[name] is not None:
                    kwargs[name] = self.as_obs(kwargs[name])
            if self.obs_norm.is_on:
                obs = self.obs_norm.collected(obs) if mode == "collect" else self.obs_norm(obs)
            collect: Any = self._replay_acting or self.act_collect
            act = collect if mode == "collect" else self.act_eval
            output = act(obs, np.asarray(env_id), **kwargs)
        if not isinstance(output, dict | Mapping) or "action" not in output:
            raise PolicyOutputError(
                f"{type(self).__name__}.act_{mode} returned {output!r:.100}; it must return a "
                'dictionary of tensors [E, …] with the key "action"'
            )
        is_host = self._data_on_host
        acted: dict[str, Any] = _to_cpu(output) if self.on_gpu and is_host else {**output}
        # A check would wait for a device; there, actions that masks forbid are never drawn.
        if is_host and (type(data) is not torch.Tensor or "action_mask" in kwargs):
            mask, user = kwargs.get("action_mask"), f"{type(self).__name__}.act_{mode}"
            self.codec.check_allowed(data, acted, mask=mask, user=user)
        return acted

    def _observed(self, data: Nested, mode: Mode) -> Value:
        """Return observations on the device; an evaluated policy sees the actor's parts alone."""
        if mode == "eval" and self.parts is not None:
            data = self.parts.of_actor(data)
        self.draw_near(data)
        return self.as_obs(data)

    def _step_together(self) -> None:
        """Compile the network for acting; a captured step is replayed without Python anyhow."""
        is_plain = self.acting_model is self._plain_model
        if self.cfg.compile and self._replay_acting is None and is_plain:
            self.acting_model = CompiledFunction(self.model, user=type(self.model).__name__)

    def _act_captured(
        self, obs: Value, env_id: npt.NDArray[np.int64], **kwargs: Any
    ) -> dict[str, Any]:
        """Act as :meth:`act_collect` does; replay it for envs on the device that step together."""
        if self._data_on_host or not np.array_equal(env_id, np.arange(len(env_id))):
            return self.act_collect(obs, env_id, **kwargs)
        return self._captured_acting(obs, len(env_id), kwargs)

    def _act_in_step(self, obs: Value, n: int, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        return self.act_collect(obs, np.arange(n), **kwargs)

    def _acting_generators(self) -> tuple[torch.Generator, ...]:
        return (self._generators.on_device.generator,)

    def _check_call(self, mode: Mode, kwargs: Mapping[str, Any]) -> None:
        """Check what can be wrong with a call of a mode's forward, whatever its data."""
        if mode not in self.modes:
            raise PolicyError(
                f"this {type(self).__name__} was built with modes={sorted(self.modes)} and "
                f"cannot {mode}; add {mode!r}, or leave modes out"
            )
        if torch.get_default_dtype() is not torch.float32:
            check_default_dtype(type(self).__name__)
        keywords = self._hooks[mode].keywords
        if kwargs and keywords is not None and not kwargs.keys() <= keywords:
            inputs: frozenset[str] = frozenset()
            if mode != "learn":
                inputs = frozenset(name.partition(".")[0] for name in self.act_inputs)
                if STATE in kwargs and self.initial_state(1) is not None:
                    inputs |= ACT_KEYWORDS  # the caller that holds its state may pass them all
            user = type(self).__name__
            check_keywords(kwargs, mode, self._hooks, inputs=inputs, user=user)

    @classmethod
    def _declared_hooks(cls) -> dict[Mode, Hook]:
        """Return the methods that an algorithm writes, by mode."""
        return {
            "learn": Hook.of(cls, "learn", n_given=2),
            "collect": Hook.of(cls, "act_collect", n_given=3),
            "eval": Hook.of(cls, "act_eval", n_given=3),
        }

    def _checked_modes(self, modes: Iterable[Mode]) -> frozenset[Mode]:
        chosen: frozenset[str] = frozenset((modes,) if isinstance(modes, str) else modes)
        if not chosen or not chosen <= set(MODES):
            raise ConfigError(
                f"modes must be a non-empty subset of {', '.join(MODES)}, got {sorted(chosen)}"
            )
        kind = type(self)
        is_written = kind.update is not Policy.update or kind.learn is not Policy.learn
        if "learn" in chosen and not is_written:
            raise PolicyError(
                f"{kind.__name__} cannot learn: write update(self, batch), which takes columns "
                "[B, …] and returns tensors to log, or leave 'learn' out of modes"
            )
        return frozenset(mode for mode in MODES if mode in chosen)

    # Building.

    def _build_model(self, model: nn.Module | None) -> nn.Module:
        """Return the given model, or build the one that ``cfg.model`` describes."""
        if isinstance(model, nn.Module):
            return model
        if model is not None:
            raise PolicyError(
                f"model must be None or a torch.nn.Module, got {model!r:.100} of type "
                f"{type(model).__name__}"
            )
        if self.cfg.seed is None:
            return self.make_model()
        with torch_seeded(derive_seed(self.cfg.seed, "policy", "model")):
            return self.make_model()

    def _common_components(self) -> dict[str, Component[Any]]:
        """Return the components that every algorithm has."""
        codec = Component(self.codec, acts=True, optional=True)
        if not self.obs_norm.is_on:
            return {"action_codec": codec}
        return {"action_codec": codec, "obs_norm": Component(self.obs_norm, acts=True)}

    def _probe(
        self,
        obs: Value,
        action_space: gym.Space[Any],
        *,
        acts: bool = True,
        acts_only: bool = False,
    ) -> Value | None:
        """Check the outputs, and return the action for one observation if the policy ``acts``.

        The policy is left as it was. If it ``acts_only``, the outputs for learning are not checked.
        """
        mode: Mode = "eval" if "eval" in self.modes else "collect"
        inputs: dict[str, Any] | None = probe_inputs(
            self.act_inputs, self.initial_state, action_space, 1
        )
        of_two = probe_inputs(self.act_inputs, self.initial_state, action_space, 2)
        if inputs is None or of_two is None:
            return None
        generators, acting = self._state.generators(), self._state.acting()
        # The compiler, which takes long, would specialize on the few rows here.
        acting_model, self.acting_model = self.acting_model, self._plain_model
        try:
            # Of one row, a network may lose a dimension that it keeps of several.
            if not acts_only or self.parts is None:
                self._check_outputs(map_leaves(lambda leaf: torch.cat([leaf, leaf]), obs), of_two)
            if not acts or self.modes.isdisjoint(("eval", "collect")):
                return None
            action: Value = self._act(mode, obs, **inputs)["action"]
        except KeyError as error:
            hidden = frozenset() if self.parts is None else self.parts.private
            if not hidden.intersection(map(str, error.args)):
                raise
            raise SpaceError(
                f"acting with {type(self.model).__name__} reads {error.args[0]!r} of observations, "
                "which obs_groups give to the critic alone; let the actor read its own parts, and "
                "give the model a method compute_actor(obs) if its forward runs the critic too"
            ) from error
        finally:
            self.acting_model = acting_model
            self._state.load_generators(generators)
            self._state.load_acting(acting)
            self.reset()
        return action

    @torch.no_grad()
    def _check_outputs(self, obs: Value, inputs: Mapping[str, Any]) -> None:
        """Call :meth:`check_outputs` on the device, with normalized observations."""
        self.set_training(False)
        on_device = {
            name: self.as_obs(value) if name in ACT_KEYWORDS else value
            for name, value in inputs.items()
        }
        on_device.pop("action_mask", None)
        self.check_outputs(self.obs_norm(self.as_obs(obs)), **on_device)

    # States.

    def _learn_state(self) -> dict[str, Any]:
        """Return everything needed to resume.

        Raises:
            NonFiniteLoss: if a step was skipped since the last look.
        """
        self._runner.check_skipped()
        return {**self._state.learning(), "train_iter": self.train_iter}

    def _load_learn_state(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`_learn_state` returned.

        Raises:
            CheckpointMismatch: if something is missing, or belongs to another model; nothing was
                loaded.
        """
        for name in ("target", "train_iter"):
            entry_of(state, name)
        self._state.load_learning(state)
        self._runner.forget_captured()
        self._captured_acting.forget()
        self.train_iter = int(state["train_iter"])

    def _load_acting_state(self, state: dict[str, Any]) -> None:
        self._state.load_acting(state)
        self._state.copy_targets()
        self._captured_acting.forget()


def _to_cpu(outputs: Mapping[str, Any]) -> dict[str, Any]:
    def moved(leaf: Any) -> Any:
        return leaf.cpu() if hasattr(leaf, "cpu") else leaf  # to_device would not wait

    return {key: map_leaves(moved, value) for key, value in outputs.items()}
