"""Networks whose critic sees other observations than the actor."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dmiddleware.model import create_model

SHAPES: dict[str, Any] = {"camera": (3, 36, 36), "state": 5}
OBS = {"camera": torch.zeros(2, 3, 36, 36, dtype=torch.uint8), "state": torch.randn(2, 5)}
CRITICS = {
    "actor_critic": lambda model: model.compute_critic(OBS),
    "phasic_actor_critic": lambda model: model.compute_critic(OBS),
    "actor_q": lambda model: model.critic(OBS, torch.zeros(2, 2)),
    "actor_qv": lambda model: model.critic(OBS, torch.zeros(2, 2)) + model.value(OBS),
    "categorical_actor_q": lambda model: model.critic(OBS, torch.zeros(2, 2)),
    "discrete_actor_q": lambda model: model.critic(OBS),
}


def part_of_obs(name: str) -> Any:
    return {name: OBS[name]}


@pytest.mark.parametrize(("actor", "critic"), [("camera", "state"), ("state", "camera")])
@pytest.mark.parametrize("kind", CRITICS)
def test_one_of_them_may_see_images_alone(kind: str, actor: str, critic: str) -> None:
    continuous = {} if kind == "discrete_actor_q" else {"action_space": "continuous"}
    model: Any = create_model(
        {
            "type": kind,
            "obs_shape": {actor: SHAPES[actor]},
            "critic_obs_shape": {critic: SHAPES[critic]},
            "action_shape": 2,
            "conv_layers": [(8, 4, 4)],
            **continuous,
        }
    )
    act = getattr(model, "compute_actor", getattr(model, "actor", None))
    assert next(iter(act(part_of_obs(actor)).values())).shape == (2, 2)
    value = CRITICS[kind](model)
    assert value.shape[:1] == (2,) or value.shape[1] == 2
    with pytest.raises(KeyError):
        act(part_of_obs(critic))


@pytest.mark.parametrize("kind", CRITICS)
def test_convolutions_where_nobody_sees_an_image_are_refused(kind: str) -> None:
    continuous = {} if kind == "discrete_actor_q" else {"action_space": "continuous"}
    shapes = {"obs_shape": {"state": 5}, "critic_obs_shape": {"state": 5, "mass": 1}}
    with pytest.raises(ValueError, match="conv_layers"):
        create_model(
            {"type": kind, **shapes, "action_shape": 2, "conv_layers": [(8, 4, 4)], **continuous}
        )
