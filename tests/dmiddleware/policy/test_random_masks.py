"""No stock policy ever takes a forbidden action, or bootstraps from one.

The networks are tempted: forbidden actions get 1000 more than the others. A single choice of one
would show, in an action or in a target or loss of that size.
"""

from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

from dmiddleware.data import as_tree
from dmiddleware.model import (
    ActorCritic,
    CategoricalQNetwork,
    DiscreteActorQ,
    FractionQuantileQNetwork,
    ImplicitQuantileQNetwork,
    QNetwork,
    QuantileQNetwork,
    action_kind_of,
    action_shape_of,
    obs_shape_of,
)
from dmiddleware.policy import (
    BCPolicy,
    C51Policy,
    DiscreteCQLPolicy,
    DiscreteSACPolicy,
    DQNPolicy,
    FQFPolicy,
    IQNPolicy,
    MDQNPolicy,
    PPOPolicy,
    QRDQNPolicy,
    RainbowPolicy,
    SQLPolicy,
)

N_ROWS, N_ACTIONS, N_FEATURES = 10_000, 6, 3
TEMPTATION = 1000.0

SINGLE = spaces.Discrete(N_ACTIONS)
SHIFTED = spaces.Discrete(N_ACTIONS, start=4)
SEVERAL = spaces.MultiDiscrete([2, 4])
BITS = spaces.MultiBinary(N_ACTIONS)


class Case(NamedTuple):
    """An algorithm, what makes its network, a space, and arguments with which it explores."""

    policy: Any
    make_network: Any
    space: gym.Space
    kwargs: dict[str, Any]
    options: dict[str, Any]
    largest_priority: float = TEMPTATION / 10


class Tempted(torch.nn.Module):
    """A network that prefers forbidden actions; the last features say which these are."""

    def __init__(self, network):
        super().__init__()
        self.network = network
        self.action_parts = network.action_parts
        for name in ("support", "n_noise", "n_quantiles", "proposal"):
            if hasattr(network, name):
                setattr(self, name, getattr(network, name))

    def check_spaces(self, observation_space, action_space):
        pass

    def forward(self, obs, **inputs):
        features = obs if isinstance(obs, torch.Tensor) else obs["observation"]
        output = self.network(features, **inputs)
        tempting = TEMPTATION * (1.0 - features[..., -N_ACTIONS:])
        output["logit"] = output["logit"] + tempting
        if "quantiles" in output:
            output["quantiles"] = output["quantiles"] + tempting.unsqueeze(-1)
        if "log_prob" in output:
            best = torch.full_like(self.support, -100.0)
            best[-1] = 0.0
            is_forbidden = (tempting > 0).unsqueeze(-1)
            output["log_prob"] = torch.where(is_forbidden, best, output["log_prob"])
        return output


class TemptedActorQ(DiscreteActorQ):
    """An actor and critics that prefer forbidden actions."""

    def __init__(self, obs_shape, action_shape):
        super().__init__(obs_shape, action_shape)
        self.actor = Tempted(self.actor)
        for index, critic in enumerate(self.critic):
            self.critic[index] = Tempted(critic)

    def check_spaces(self, observation_space, action_space):
        pass


def tempted(network, **options):
    """Return what makes a network, given the spaces of an env, that prefers forbidden actions."""

    def make(observation_space, action_space):
        obs_shape, action_shape = obs_shape_of(observation_space), action_shape_of(action_space)
        actor = issubclass(network, ActorCritic)
        kind = {"action_space": action_kind_of(action_space)} if actor else {}
        return Tempted(network(obs_shape, action_shape, **kind, **options))

    return make


def tempted_actor_q(observation_space, action_space):
    return TemptedActorQ(N_FEATURES + N_ACTIONS, N_ACTIONS)


WIDE = {"v_min": -TEMPTATION, "v_max": TEMPTATION, "n_atoms": 11}
# A forbidden distribution has the divergence log(11) from the uniform one, which is near that of an
# untrained network.
DIVERGENCE = 1.5

CASES = [
    Case(DQNPolicy, tempted(QNetwork), SINGLE, {"eps": 0.5}, {"double": True}),
    Case(DQNPolicy, tempted(QNetwork), SHIFTED, {"eps": 0.5}, {"double": False}),
    Case(SQLPolicy, tempted(QNetwork), SINGLE, {"eps": 0.5}, {}),
    Case(MDQNPolicy, tempted(QNetwork), SINGLE, {"eps": 0.5}, {}),
    *(
        Case(
            C51Policy,
            tempted(CategoricalQNetwork, **WIDE),
            space,
            {"eps": 0.5},
            {"double": is_double},
            DIVERGENCE,
        )
        for space, is_double in ((SINGLE, True), (SHIFTED, False))
    ),
    Case(
        QRDQNPolicy,
        tempted(QuantileQNetwork, n_quantiles=4),
        SINGLE,
        {"eps": 0.5},
        {"double": False},
    ),
    Case(
        DiscreteCQLPolicy,
        tempted(QuantileQNetwork, n_quantiles=4),
        SINGLE,
        {"eps": 0.5},
        {},
    ),
    *(
        Case(
            IQNPolicy,
            tempted(ImplicitQuantileQNetwork, n_quantiles=4),
            space,
            {"eps": 0.5},
            {"double": is_double},
        )
        for space, is_double in ((SINGLE, True), (SHIFTED, False))
    ),
    Case(
        FQFPolicy,
        tempted(FractionQuantileQNetwork, n_quantiles=4),
        SINGLE,
        {"eps": 0.5},
        {"double": False},
    ),
    Case(
        RainbowPolicy,
        tempted(CategoricalQNetwork, noisy=True, **WIDE),
        SINGLE,
        {},
        {"n_step": 1},
        DIVERGENCE,
    ),
    Case(DiscreteSACPolicy, tempted_actor_q, SINGLE, {}, {}),
    Case(DiscreteSACPolicy, tempted_actor_q, SHIFTED, {}, {}),
    Case(PPOPolicy, tempted(ActorCritic), SINGLE, {}, {}),
    Case(PPOPolicy, tempted(ActorCritic), SHIFTED, {}, {}),
    Case(PPOPolicy, tempted(ActorCritic), SEVERAL, {}, {}),
    Case(PPOPolicy, tempted(ActorCritic), BITS, {}, {}),
    Case(BCPolicy, tempted(ActorCritic), SINGLE, {}, {"label_smoothing": 0.1}),
]


class Spaces(NamedTuple):
    observation_space: gym.Space
    action_space: gym.Space


def random_masks(space, seed):
    """Masks ``[10,000, 6]`` bool; every choice keeps an option, bits may all be forbidden."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(N_ROWS, N_ACTIONS, generator=generator) < 0.4
    sizes = [2, 4] if space is SEVERAL else [N_ACTIONS]
    if space is not BITS:
        for part in mask.split(sizes, -1):
            kept = torch.randint(part.shape[-1], (N_ROWS, 1), generator=generator)
            part.scatter_(1, kept, True)
    return mask


def is_allowed(space, mask, action):
    """Whether each action is allowed, by the definition of the masks and not by the codec's."""
    mask, action = mask.numpy(), action.numpy()
    rows = np.arange(N_ROWS)
    if space is BITS:
        return ~((action == 1) & ~mask).any(1)
    if space is SEVERAL:
        return mask[rows, action[:, 0]] & mask[rows, 2 + action[:, 1]]
    return mask[rows, action - space.start]


def seen(mask, way, seed):
    """Observations and keyword arguments with the mask where an env may have it."""
    features = torch.randn(N_ROWS, N_FEATURES, generator=torch.Generator().manual_seed(seed))
    features = torch.cat([features, mask.float()], -1)
    if way == "observation":
        return as_tree({"observation": features, "action_mask": mask.to(torch.int8)}), {}
    return features, {"action_mask": mask}


@pytest.fixture(params=CASES, ids=lambda case: f"{case.policy.__name__}-{case.space}")
def case(request):
    return request.param


@pytest.fixture(params=["observation", "info"])
def way(request):
    return request.param


@pytest.fixture
def policy(case):
    observation_space = spaces.Box(-10.0, 10.0, (N_FEATURES + N_ACTIONS,), np.float32)
    torch.manual_seed(0)
    network = case.make_network(observation_space, case.space)
    env = Spaces(observation_space, case.space)
    # Priorities show a choice in a single row.
    options = {"priority": True} if hasattr(case.policy.settings_class(), "priority") else {}
    return case.policy.for_env(env, model=network, seed=0, **options, **case.options)


def test_acting_never_takes_a_forbidden_action(policy, case, way):
    mask = random_masks(case.space, seed=0)
    obs, given = seen(mask, way, seed=1)
    for kwargs in (case.kwargs, {}):
        action = policy.collect_mode.forward(obs, **kwargs, **given)["action"]
        assert is_allowed(case.space, mask, action).all()


def test_evaluating_never_takes_a_forbidden_action(policy, case, way):
    mask = random_masks(case.space, seed=2)
    obs, given = seen(mask, way, seed=3)
    ways: list[dict[str, bool]] = [{}]
    if policy.is_stochastic:
        ways = [{"deterministic": True}, {"deterministic": False}]
    for kwargs in ways:
        action = policy.eval_mode.forward(obs, **kwargs, **given)["action"]
        assert is_allowed(case.space, mask, action).all()


def test_learning_never_bootstraps_from_a_forbidden_action(policy, case, way):
    mask, next_mask = random_masks(case.space, seed=4), random_masks(case.space, seed=5)
    obs, given = seen(mask, way, seed=6)
    next_obs, next_given = seen(next_mask, way, seed=7)
    adv = torch.randn(N_ROWS, generator=torch.Generator().manual_seed(8))
    batch = {
        **policy.collect_mode.forward(obs, **case.kwargs, **given),
        "obs": obs,
        "next_obs": next_obs,
        "reward": adv,
        "terminated": torch.zeros(N_ROWS, dtype=torch.bool),
        "adv": adv,
        "ret": adv,
        **given,
        **{f"next_{name}": column for name, column in next_given.items()},
    }
    output = policy.learn_mode.forward(as_tree(batch))
    for name, value in output.items():
        limit = case.largest_priority if name == "priority" else TEMPTATION / 10
        assert torch.as_tensor(value).float().abs().max() < limit, name
