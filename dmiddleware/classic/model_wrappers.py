"""Models that choose actions or follow another model, as DI-engine's policies wrap them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, Literal

import torch

from dmiddleware.errors import ConfigError
from dmiddleware.registry import nearest

__all__ = ["MODEL_WRAPPERS", "TargetModel", "WrappedModel", "model_wrap"]

_FORBIDDEN: Final = float("-inf")


class WrappedModel:
    """A model, or another wrapped one, whose forward does more.

    All other attributes are those of the model, such as ``parameters``, ``train`` and
    ``state_dict``.

    Args:
        model: the model; its forward returns a dictionary with ``logit`` ``[…, A]``, or a list of
            them for several actions, and maybe ``action_mask``.
    """

    def __init__(self, model: Any) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        if name == "_model":
            raise AttributeError(name)  # while a copy is made
        return getattr(self._model, name)

    @property
    def unwrapped(self) -> Any:
        """The model without wrappers."""
        model = self._model
        return model.unwrapped if isinstance(model, WrappedModel) else model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run :meth:`forward`."""
        return self.forward(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model."""
        model: Any = self._model
        return (
            model.forward(*args, **kwargs)
            if isinstance(model, WrappedModel)
            else model(*args, **kwargs)
        )

    def reset(self, *args: Any, **kwargs: Any) -> None:
        """Forget what the wrapper keeps of envs; by default there is nothing."""

    def info(self, attr_name: str) -> str:
        """Return the names of the wrapper and of the model, for logs."""
        return f"{type(self).__name__}({type(self._model).__name__}).{attr_name}"


class ArgmaxModel(WrappedModel):
    """Adds ``action``: those with the largest logit."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's outputs, and ``action``."""
        return _with_actions(super().forward(*args, **kwargs), _largest)


class MultinomialModel(WrappedModel):
    """Adds ``action``, drawn with the probabilities that the logits describe."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's outputs, and ``action``."""
        return _with_actions(super().forward(*args, **kwargs), _drawn)


class EpsGreedyModel(WrappedModel):
    """Adds ``action``: each is random with probability ε, and else the one with the largest logit.

    Actions that the mask forbids are not drawn.
    """

    def forward(self, *args: Any, eps: float | Mapping[int, float] = 0.0, **kwargs: Any) -> Any:
        """Return the model's outputs, and ``action``.

        Args:
            *args: of the model.
            eps: ε; or one for each row, by their ids in order.
            **kwargs: of the model.
        """
        levels = torch.tensor([*eps.values()] if isinstance(eps, Mapping) else [eps])

        def chosen(logit: torch.Tensor) -> torch.Tensor:
            best = _largest(logit)
            explored = _drawn(logit.masked_fill(logit > _FORBIDDEN, 0.0))
            shape = (len(levels), *[1] * (best.dim() - 1)) if best.dim() else ()
            is_random = torch.rand(best.shape) < levels.reshape(shape)
            return torch.where(is_random.to(best.device), explored, best)

        return _with_actions(super().forward(*args, **kwargs), chosen)


class TargetModel(WrappedModel):
    """A copy of a model that follows it by :meth:`update`.

    Args:
        model: the copy; its parameters get no gradients.
        update_type: ``"assign"`` copies every ``freq`` calls, ``"momentum"`` moves by ``theta``.
        update_kwargs: ``{"freq": …}`` or ``{"theta": …}``.

    Raises:
        ConfigError: for another way to update.
    """

    def __init__(
        self,
        model: Any,
        update_type: Literal["assign", "momentum"] = "assign",
        update_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(model)
        options = {"freq": 1} if update_type == "assign" else {"theta": 0.005}
        given = dict(update_kwargs or {})
        if update_type not in ("assign", "momentum") or not given.keys() <= options.keys():
            raise ConfigError(
                f"a target model has update_type='assign' with freq, or 'momentum' with theta, got "
                f"update_type={update_type!r} with {given}"
            )
        self._every = int(given.get("freq", 1))
        self._tau = float({**options, **given}.get("theta", 1.0))
        self._n_calls = 0
        for parameter in model.parameters():
            parameter.requires_grad_(False)

    def update(self, state_dict: Mapping[str, torch.Tensor], direct: bool = False) -> None:
        """Follow the model.

        Args:
            state_dict: of the model.
            direct: copies now.
        """
        self._n_calls += 1
        if not direct and self._n_calls % self._every:
            return
        with torch.no_grad():
            for name, copied in self._model.state_dict().items():
                online = state_dict[name].to(copied.device)
                is_moved = not direct and self._tau < 1 and copied.is_floating_point()
                copied.copy_(torch.lerp(copied, online, self._tau) if is_moved else online)


MODEL_WRAPPERS: Final[Mapping[str, Callable[..., WrappedModel]]] = {
    "base": WrappedModel,
    "argmax_sample": ArgmaxModel,
    "multinomial_sample": MultinomialModel,
    "eps_greedy_sample": EpsGreedyModel,
    "target": TargetModel,
}
"""The wrappers by their names in DI-engine."""


def model_wrap(model: Any, wrapper_name: str, **options: Any) -> WrappedModel:
    """Wrap a model, as policies of DI-engine do.

    Args:
        model: the model, or a wrapped one.
        wrapper_name: a name of :data:`MODEL_WRAPPERS`.
        **options: of the wrapper.

    Raises:
        ConfigError: for an unknown name; the nearest are listed.
    """
    if wrapper_name not in MODEL_WRAPPERS:
        near = nearest(wrapper_name, MODEL_WRAPPERS)
        raise ConfigError(
            f"the model wrapper {wrapper_name!r} is not known here; did you mean: "
            f"{', '.join(near) or ', '.join(MODEL_WRAPPERS)}"
        )
    return MODEL_WRAPPERS[wrapper_name](model, **options)


def _with_actions(
    output: dict[str, Any], choose: Callable[[torch.Tensor], torch.Tensor]
) -> dict[str, Any]:
    logit, mask = output["logit"], output.get("action_mask")
    several = isinstance(logit, list | tuple)
    logits = list(logit) if several else [logit]
    if mask is not None:
        masks = mask if isinstance(mask, list | tuple) else [mask] * len(logits)
        logits = [
            one.masked_fill(~allowed.bool(), _FORBIDDEN)
            for one, allowed in zip(logits, masks, strict=True)
        ]
    actions = [choose(one) for one in logits]
    return {**output, "action": actions if several else actions[0]}


def _largest(logit: torch.Tensor) -> torch.Tensor:
    return logit.argmax(-1)


def _drawn(logit: torch.Tensor) -> torch.Tensor:
    flat = torch.softmax(logit, -1).reshape(-1, logit.shape[-1])
    return torch.multinomial(flat, 1).reshape(logit.shape[:-1])
