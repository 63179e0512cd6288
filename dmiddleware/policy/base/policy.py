"""The policy base class: three modes, two styles, one model."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Self

import gymnasium as gym
import torch
import torch.distributed as dist
from easydict import EasyDict
from torch import nn

from dmiddleware.config import Configurable, check_value
from dmiddleware.data.batch import leaves, to_device
from dmiddleware.errors import ConfigError, NonFiniteLoss, PolicyError, StructureError
from dmiddleware.model import action_shape_of, create_model, obs_shape_of
from dmiddleware.policy import spaces
from dmiddleware.policy.base import data_parallel as parallel
from dmiddleware.policy.base import state_dict as state
from dmiddleware.policy.base import styles
from dmiddleware.policy.base.modes import CollectMode, EvalMode, LearnMode
from dmiddleware.policy.base.two_styles import TwoStyles
from dmiddleware.registry import nearest
from dmiddleware.seeding import derive_seed

__all__ = ["Policy"]


class Policy(TwoStyles, Configurable):
    """An algorithm: how to act, what to store, how to learn.

    An algorithm overrides ``_forward_learn`` and, for collecting and evaluating, one of two styles;
    the base class derives the other, so every collector runs every policy:

    - per env: ``_forward_collect(data, **kwargs)`` and ``_forward_eval(data, **kwargs)``, where
      ``data`` maps env ids to observations and the answer maps them to dictionaries with at least
      ``action``; ``_process_transition(obs, policy_output, timestep)`` and
      ``_get_train_sample(transitions)``, which have defaults;
    - batched: ``_forward_collect_batch(obs, env_id, **kwargs)`` and ``_forward_eval_batch(…)``,
      where ``obs`` is a tensor or treetensor ``[E, …]``, ``env_id`` an int64 array ``[E]``, and the
      answer a dictionary of tensors ``[E, …]`` with at least ``action``; and
      ``_get_train_batch(batch)``, which has a default.

    If a class and its base are written in different styles, the more derived class decides.
    Workers use a policy through :attr:`learn_mode`, :attr:`collect_mode` and :attr:`eval_mode`.

    Args:
        cfg: what differs from ``default_config()``.
        model: None builds the one that ``cfg.model`` and :meth:`default_model` describe; a module
            is used as it is.
        enable_field: the parts to build, of ``"learn"``, ``"collect"``, ``"eval"``; None: all.

    Raises:
        ConfigError: for an unusable config, an unknown field, or ``cuda=True`` without CUDA.
        PolicyError: if an enabled part is written in neither style, or ``model`` is no module.

    Example:
        >>> class Upright(Policy):
        ...     def _forward_eval(self, data):
        ...         return {env_id: {"action": int(obs[2] > 0)} for env_id, obs in data.items()}
        >>> policy = Upright(model=torch.nn.Identity(), enable_field=["eval"])
        >>> policy.eval_mode.forward({7: torch.ones(4)})
        {7: {'action': 1}}
        >>> policy.eval_mode.forward(torch.ones(2, 4))
        {'action': tensor([1, 1])}
    """

    config: ClassVar[dict[str, Any]] = {
        "on_policy": False,
        "cuda": False,
        "multi_gpu": False,
        "bp_update_sync": True,
        "traj_len_inf": False,
        "seed": None,
        "model": {},
    }
    config_open: ClassVar[tuple[str, ...]] = ("model",)
    fields: ClassVar[tuple[str, ...]] = ("learn", "collect", "eval")
    learn_columns: ClassVar[tuple[str, ...]] = ()
    """Columns without which a batch cannot be learned from."""

    def __init__(
        self,
        cfg: Mapping[str, Any] | None = None,
        model: nn.Module | None = None,
        enable_field: Iterable[str] | None = None,
    ) -> None:
        self._cfg: EasyDict = self.merged_config(cfg)
        self._enabled = self._check_fields(enable_field)
        self._find_styles()
        self._device = self._choose_device()
        self._on_gpu = self._device.type != "cpu"
        seed = torch.initial_seed() if self._cfg.seed is None else self._cfg.seed
        self._generator = torch.Generator().manual_seed(derive_seed(seed, "policy", "act"))
        self._model = self._take_model(model).to(self._device)
        self._optimizer: torch.optim.Optimizer | None = None
        self._train_iter = 0
        self._reducer: parallel.GradientReducer | None = None
        if self._cfg.multi_gpu and "learn" in self._enabled:
            # Before _init_learn, so that target networks copy the common parameters.
            self._join_ranks()
        self._init_common()
        for field in self.fields:
            if field in self._enabled:
                getattr(self, f"_init_{field}")()

    @classmethod
    def from_spaces(
        cls,
        observation_space: gym.Space[Any],
        action_space: gym.Space[Any],
        cfg: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> Self:
        """Build the policy with the model's shapes taken from an environment.

        Args:
            observation_space: that of one environment.
            action_space: that of one environment.
            cfg: what else differs from ``default_config()``; a shape that it gives stays.
            **kwargs: given to the constructor.

        Raises:
            SpaceError: if a space is not supported.
        """
        given = dict(cfg or {})
        shapes = cls._model_options_of(observation_space, action_space)
        given["model"] = {**shapes, **given.get("model", {})}
        policy = cls(given, **kwargs)
        policy._check_spaces(observation_space, action_space)
        return policy

    @classmethod
    def default_config(cls) -> EasyDict:
        """Return a fresh copy of the defaults, merged from the base classes down.

        Raises:
            ConfigError: on ``Policy`` itself, which is no algorithm.
        """
        if cls is Policy:
            raise ConfigError(
                "Policy is the base of all policies and has no config of its own; "
                "ask a subclass, for example DQNPolicy.default_config()"
            )
        return super().default_config()

    @classmethod
    def check_config(cls, cfg: EasyDict) -> None:
        """Refuse impossible values."""
        seed_fits = cfg.seed is None or (isinstance(cfg.seed, int) and cfg.seed >= 0)
        check_value(seed_fits, "seed", cfg.seed, "None (follow torch's seed) or an integer ≥ 0")

    def default_model(self) -> tuple[str, list[str]]:
        """Return the registered name of the model to build and the modules to import for it."""
        raise PolicyError(
            f"{type(self).__name__} has no default model; pass model=, set cfg.model.type, or "
            "override default_model() to return (registered name, [modules to import])"
        )

    @classmethod
    def _model_options_of(
        cls, observation_space: gym.Space[Any], action_space: gym.Space[Any]
    ) -> dict[str, Any]:
        """Return the keys of ``cfg.model`` that follow from an environment's spaces."""
        return {
            "obs_shape": obs_shape_of(observation_space),
            "action_shape": action_shape_of(action_space),
        }

    def _init_common(self) -> None:
        """Build what all parts share, before any of them."""

    def _init_learn(self) -> None:
        """Build what learning needs: the optimiser, target networks."""

    def _init_collect(self) -> None:
        """Build what collecting needs."""

    def _init_eval(self) -> None:
        """Build what evaluating needs."""

    def _forward_learn(self, batch: Any, **kwargs: Any) -> dict[str, Any]:
        """Update the parameters from a batch ``[B, …]``; return native scalars."""
        raise NotImplementedError  # construction refuses a policy that does not override it

    def _reset_learn(self, data_id: Iterable[int] | None = None) -> None:
        """Clear what learning keeps between forwards."""

    def _reset_collect(self, data_id: Iterable[int] | None = None) -> None:
        """Clear the collecting state (hidden states) of the given env ids; None: of all."""

    def _reset_eval(self, data_id: Iterable[int] | None = None) -> None:
        """Clear the evaluating state of the given env ids; None: of all."""

    def _monitor_vars_learn(self) -> list[str]:
        """Return the keys of ``_forward_learn``'s answer that are worth logging."""
        return ["cur_lr", "total_loss"]

    def _state_dict_learn(self) -> dict[str, Any]:
        """Return all that resuming needs: model, optimiser, update count, generator."""
        whole = {
            **self._state_dict_collect(),
            "generator": self._generator.get_state(),
            "train_iter": self._train_iter,
        }
        if self._optimizer is not None:
            whole["optimizer"] = state.optimizer_state(self._optimizer)
        return whole

    def _load_state_dict_learn(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`_state_dict_learn` returned."""
        generator = state.part_of(state_dict, "generator")
        train_iter = state.part_of(state_dict, "train_iter")
        self._load_state_dict_collect(state_dict)
        self._generator.set_state(generator.cpu())
        self._train_iter = int(train_iter)
        if self._optimizer is not None:
            state.load_optimizer_state(self._optimizer, state.part_of(state_dict, "optimizer"))

    def _state_dict_collect(self) -> dict[str, Any]:
        """Return what acting needs: the model."""
        return {"model": state.model_state(self._model)}

    def _load_state_dict_collect(self, state_dict: dict[str, Any]) -> None:
        """Load the model, strictly; a learner's state serves as well."""
        state.load_model_state(self._model, state.part_of(state_dict, "model"))

    def _state_dict_eval(self) -> dict[str, Any]:
        return self._state_dict_collect()

    def _load_state_dict_eval(self, state_dict: dict[str, Any]) -> None:
        self._load_state_dict_collect(state_dict)

    def _check_spaces(self, observation_space: Any, action_space: Any) -> None:
        """Refuse spaces that the model does not fit.

        Raises:
            SpaceError: with both shapes.
        """
        spaces.check_spaces(self._model, self._probe, observation_space, action_space)

    def _probe(self, obs: Any) -> torch.Tensor | None:
        """Return the action for one observation; the generator and hidden states keep no trace."""
        field = next((one for one in ("eval", "collect") if one in self._enabled), None)
        if field is None:
            return None
        before = self._generator.get_state()
        try:
            action: torch.Tensor = self._act(field, obs, None, {})["action"]
        finally:
            self._generator.set_state(before)
            getattr(self, f"_reset_{field}")()
        return action

    def _get_n_sample(self) -> int | None:
        return self._read("n_sample", "collect")

    def _get_n_episode(self) -> int | None:
        return self._read("n_episode", "collect")

    def _get_batch_size(self) -> int | None:
        return self._read("batch_size", "learn")

    @property
    def learn_mode(self) -> LearnMode:
        """What a learner may do with this policy."""
        return LearnMode(
            forward=self._public_learn,
            reset=self._reset_learn,
            info=self.__repr__,
            monitor_vars=self._monitor_vars_learn,
            get_attribute=self.get_attribute,
            set_attribute=self.set_attribute,
            state_dict=self._state_dict_learn,
            load_state_dict=self._load_state_dict_learn,
        )

    @property
    def collect_mode(self) -> CollectMode:
        """What a collector may do with this policy."""
        return CollectMode(
            forward=self._public_collect,
            process_transition=self._public_transition,
            get_train_sample=self._public_train_sample,
            reset=self._reset_collect,
            seed=self.seed,
            get_attribute=self.get_attribute,
            set_attribute=self.set_attribute,
            state_dict=self._state_dict_collect,
            load_state_dict=self._load_state_dict_collect,
        )

    @property
    def eval_mode(self) -> EvalMode:
        """What an evaluator may do with this policy."""
        return EvalMode(
            forward=self._public_eval,
            reset=self._reset_eval,
            seed=self.seed,
            get_attribute=self.get_attribute,
            set_attribute=self.set_attribute,
            state_dict=self._state_dict_eval,
            load_state_dict=self._load_state_dict_eval,
        )

    @property
    def cfg(self) -> EasyDict:
        """The merged config."""
        return self._cfg

    @property
    def discount_factor(self) -> float | None:
        """The discount γ of future rewards; None for an algorithm that has none."""
        value = self._cfg.get("discount_factor")
        return None if value is None else float(value)

    @property
    def nstep(self) -> int:
        """Number of steps that a bootstrapped target sums before it bootstraps."""
        return int(self._cfg.get("nstep", 1))

    def seed(self, seed: int) -> None:
        """Seed the randomness of acting: exploration and sampled actions."""
        self._generator.manual_seed(seed)

    def get_attribute(self, name: str) -> Any:
        """Return what ``_get_<name>()`` gives, else ``_<name>``, else the property ``<name>``.

        Raises:
            AttributeError: if there is none of them; the nearest names are listed.
        """
        getter = getattr(self, f"_get_{name}", None)
        if getter is not None:
            return getter()
        for attribute in (f"_{name}", name):
            if hasattr(self, attribute):
                return getattr(self, attribute)
        known = {own.removeprefix("_get_").removeprefix("_") for own in (*dir(self), *vars(self))}
        near = nearest(name, (own for own in known if not own.startswith("_")))
        raise AttributeError(
            f"{type(self).__name__} has no attribute {name!r} (neither _get_{name}() nor _{name}); "
            f"near misses: {', '.join(near) or 'none'}"
        )

    def set_attribute(self, name: str, value: Any) -> None:
        """Set ``_<name>``."""
        setattr(self, f"_{name}", value)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(device={self._device}, model={self._model})"

    def sync_gradients(self, model: nn.Module) -> None:
        """Average the model's gradients over all ranks, between backward and the step.

        With ``bp_update_sync=False`` the reductions of the policy's own model began during
        backward, and this waits for them. In a single process it does nothing.
        """
        if self._reducer is None:
            return
        if model is self._model:
            self._reducer.reduce()
        else:
            parallel.GradientReducer(model).reduce()

    def _public_learn(self, data: Any, **kwargs: Any) -> dict[str, Any]:
        if "learn" not in self._enabled:
            raise self._not_enabled("learn")
        batch = styles.collate(data) if isinstance(data, list) else data
        missing = [column for column in self.learn_columns if column not in batch]
        if missing:
            raise StructureError(
                f"{type(self).__name__} learns from the columns {', '.join(self.learn_columns)}, "
                f"but the batch lacks {', '.join(missing)}; it has {', '.join(map(str, batch))}"
            )
        if self._on_gpu:
            batch = to_device(batch, self._device)
        if not self._model.training:
            self._model.train()
        return self._forward_learn(batch, **kwargs)

    def _descend(
        self, loss: torch.Tensor, batch: Any, *, clip_norm: float | None = None
    ) -> dict[str, float]:
        """Make one step of ``self._optimizer`` down the gradient of a loss, and count it.

        Gradients are averaged over all ranks.

        Args:
            loss: scalar, known to be finite (:meth:`_check_finite`).
            batch: what it was computed from, named if something is not finite.
            clip_norm: scale the gradient so that its norm does not exceed this (Pascanu et al.,
                "On the difficulty of training recurrent neural networks", 2013).

        Returns:
            ``cur_lr``, and with ``clip_norm`` the ``grad_norm`` before clipping.

        Raises:
            NonFiniteLoss: before the step, if that norm is NaN or infinite.
        """
        optimizer = self._optimizer
        assert optimizer is not None
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        self.sync_gradients(self._model)
        output = {"cur_lr": optimizer.param_groups[0]["lr"]}
        if clip_norm is not None:
            norm = nn.utils.clip_grad_norm_(self._model.parameters(), clip_norm).item()
            self._check_finite(norm, batch, "the norm of the gradient")
            output["grad_norm"] = norm
        optimizer.step()
        self._train_iter += 1
        return output

    def _scalars(self, *tensors: torch.Tensor) -> list[float]:
        """Turn scalar tensors into Python numbers, with one transfer from a GPU."""
        if not self._on_gpu:
            return [float(tensor.item()) for tensor in tensors]
        packed: list[float] = torch.stack([tensor.detach().float() for tensor in tensors]).tolist()
        return packed

    def _check_finite(self, value: float, batch: Any, what: str = "the loss") -> None:
        """Refuse to go on with a loss (or gradient norm) that is NaN or infinite.

        Called before the step, so the parameters are those from before the update. With several
        ranks all of them raise, so none waits for the others' gradients.

        Raises:
            NonFiniteLoss: naming the policy iterations that collected the batch.
            StructureError: if the batch has no rows, of which no loss is a number.
        """
        finite = math.isfinite(value)
        if self._reducer is not None:
            finite = parallel.all_agree(finite, self._device)
        if finite:
            return
        if any(len(leaf) == 0 for _, leaf in leaves(batch)):
            raise StructureError(
                f"{what} is {value}, since the batch has no rows; give {type(self).__name__} at "
                "least one to learn from"
            )
        source = "a batch without a column collect_iter"
        if "collect_iter" in batch:
            column = batch["collect_iter"]
            source = f"a batch collected at train_iter {int(column.min())} to {int(column.max())}"
        raise NonFiniteLoss(
            f"{what} is {value} on {source}; the parameters are those from before this update. "
            "Look for NaN in observations and rewards; lower the learning rate or clip gradients"
        )

    def _check_fields(self, enable_field: Iterable[str] | None) -> frozenset[str]:
        if isinstance(enable_field, str):
            enable_field = (enable_field,)
        enabled = frozenset(self.fields if enable_field is None else enable_field)
        unknown = enabled - set(self.fields)
        if unknown or not enabled:
            raise ConfigError(
                f"enable_field must be a non-empty subset of {', '.join(self.fields)}, "
                f"got {sorted(enabled)}"
            )
        if "learn" in enabled and type(self)._forward_learn is Policy._forward_learn:
            raise PolicyError(
                f"{type(self).__name__} cannot learn: write _forward_learn(self, batch), which "
                "takes a treetensor [B, …] and returns scalars; or leave 'learn' out of "
                "enable_field"
            )
        return enabled

    def _choose_device(self) -> torch.device:
        if not self._cfg.cuda:
            return torch.device("cpu")
        if not torch.cuda.is_available():
            raise ConfigError(
                f"cuda is True, but torch {torch.__version__} finds no CUDA device here; "
                "set cuda=False, or install a CUDA build of torch on a machine with a GPU"
            )
        if self._cfg.multi_gpu:
            parallel.require_process_group()
            return torch.device("cuda", dist.get_rank() % torch.cuda.device_count())
        return torch.device("cuda", torch.cuda.current_device())

    def _take_model(self, model: nn.Module | None) -> nn.Module:
        if isinstance(model, nn.Module):
            return model
        if model is not None:
            raise PolicyError(
                f"model must be None or a torch.nn.Module, got {model!r:.100} of type "
                f"{type(model).__name__}"
            )
        options = dict(self._cfg.model)
        if "type" not in options:
            options["type"], options["import_names"] = self.default_model()
        if self._cfg.seed is None:
            return create_model(options)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive_seed(self._cfg.seed, "policy", "model"))
            return create_model(options)

    def _join_ranks(self) -> None:
        parallel.require_process_group()
        parallel.broadcast_model(self._model)
        self._reducer = parallel.GradientReducer(self._model, overlap=not self._cfg.bp_update_sync)

    def _read(self, key: str, section: str) -> int | None:
        value = self._cfg[key] if key in self._cfg else self._cfg.get(section, {}).get(key)
        return None if value is None else int(value)
