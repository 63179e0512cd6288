"""Policies whose observations are normalized by running statistics, or those of a data set."""

import itertools
from typing import Any

import gymnasium as gym
import pytest
import torch

from dmiddleware.classic import as_collect_mode
from dmiddleware.data import Batch, as_tree, flatten_lead
from dmiddleware.errors import ConfigError
from dmiddleware.policy import (
    A2CPolicy,
    ActorSettings,
    BCPolicy,
    BCQPolicy,
    C51Policy,
    Component,
    CQLPolicy,
    CrossQPolicy,
    D4PGPolicy,
    DDPGPolicy,
    DecisionTransformerPolicy,
    DiscreteCQLPolicy,
    DiscreteSACPolicy,
    DQNPolicy,
    EDACPolicy,
    FastTD3Policy,
    FQFPolicy,
    IMPALAPolicy,
    IPPOPolicy,
    IQLPolicy,
    IQNPolicy,
    MAPPOPolicy,
    MDQNPolicy,
    ObsNormSettings,
    Policy,
    PPGPolicy,
    PPOPolicy,
    QMIXPolicy,
    QRDQNPolicy,
    R2D2Policy,
    RainbowPolicy,
    RecurrentMAPPOPolicy,
    RecurrentPPOPolicy,
    SACPolicy,
    SQLPolicy,
    TD3BCPolicy,
    TD3Policy,
    TDPolicy,
    TDSettings,
    TQCPolicy,
    VDNPolicy,
    adam,
)
from dmiddleware.tree import leaves
from middleware.advantage import AdvantageEstimator
from tests.dmiddleware.policy import every_policy, test_qmix, test_r2d2

PLAIN = [
    DQNPolicy,
    SQLPolicy,
    MDQNPolicy,
    C51Policy,
    QRDQNPolicy,
    IQNPolicy,
    FQFPolicy,
    DiscreteCQLPolicy,
    RainbowPolicy,
    DiscreteSACPolicy,
]
CONTINUOUS = [
    SACPolicy,
    TQCPolicy,
    CrossQPolicy,
    FastTD3Policy,
    DDPGPolicy,
    D4PGPolicy,
    TD3Policy,
]
OFFLINE = [CQLPolicy, TD3BCPolicy, BCQPolicy, EDACPolicy]
TEAMS = [VDNPolicy, QMIXPolicy]


def pair(cls: Any, **options: Any) -> tuple[Any, Any]:
    """Return a policy that normalizes, and one of the same weights that does not."""
    if cls in TEAMS:
        return test_qmix.made(cls, obs_norm=True, **options), test_qmix.made(cls, **options)
    env = gym.make("CartPole-v1" if cls in PLAIN else "Pendulum-v1")
    flags = (True, False)
    return tuple(cls.for_env(env, seed=0, obs_norm=flag, **options) for flag in flags)


def rows(cls: Any, seed: int = 0) -> Batch:
    if cls in TEAMS:
        return test_qmix.batch(seed=seed)
    generator = torch.Generator().manual_seed(seed)
    size = 4 if cls in PLAIN else 3
    choices = torch.randint(2, (16,), generator=generator)
    return as_tree(
        {
            "obs": 5 + 3 * torch.randn(16, size, generator=generator),
            "next_obs": 5 + 3 * torch.randn(16, size, generator=generator),
            "action": choices if cls in PLAIN else choices.float().unsqueeze(-1),
            "reward": torch.randn(16, generator=generator),
            "terminated": torch.arange(16) % 4 == 0,
        }
    )


def normalized(policy: Any, batch: Batch) -> Batch:
    see = policy.obs_norm
    return as_tree({**dict(batch.items()), **{k: see(batch[k]) for k in ("obs", "next_obs")}})


def first_inputs(sequences: Batch) -> dict[str, torch.Tensor]:
    """Return what a recurrent policy takes beside the first observations of sequences."""
    names = ("is_first", "prev_action", "prev_reward")
    return {**{name: sequences[name][0] for name in names}, "state": sequences["state"]}


@pytest.mark.parametrize("cls", [*PLAIN, *CONTINUOUS, *TEAMS])
def test_acting_and_learning_see_normalized_observations(cls: Any) -> None:
    policy, twin = pair(cls)
    for seed in range(3):
        obs = rows(cls, seed)["obs"]
        output = policy.collect_mode.forward(obs)
        wanted = twin.collect_mode.forward(policy.obs_norm(obs))
        for name in output:
            assert torch.equal(output[name], wanted[name])
    batch = rows(cls, 3)
    batch["discount"] = torch.full_like(batch["terminated"], 0.99, dtype=torch.float32)
    for _ in range(2):
        loss = policy.learn_mode.forward(batch)["total_loss"]
        assert loss == twin.learn_mode.forward(normalized(policy, batch))["total_loss"]
    obs = rows(cls, 4)["obs"]
    seen = policy.obs_norm(obs)
    output, wanted = policy.eval_mode.forward(obs), twin.eval_mode.forward(seen)
    assert torch.equal(output["action"], wanted["action"])
    losses = [
        twin.learn_mode.forward(one)["total_loss"] for one in (batch, normalized(policy, batch))
    ]
    assert losses[0] != losses[1]


def test_sequences_are_normalized() -> None:
    policy, batch = test_r2d2.sampled(obs_norm=True)
    twin, _ = test_r2d2.sampled()
    assert policy.obs_norm.has_seen_all
    loss = policy.learn_mode.forward(batch)["total_loss"]
    assert loss == twin.learn_mode.forward(normalized(policy, batch))["total_loss"]
    obs, inputs = batch["obs"][0], first_inputs(batch)
    output = policy.eval_mode.forward(obs, **inputs)
    wanted = twin.eval_mode.forward(policy.obs_norm(obs), **inputs)
    assert torch.equal(output["state"], wanted["state"])


@pytest.mark.parametrize("cls", [DQNPolicy, R2D2Policy, SACPolicy, DDPGPolicy, DiscreteSACPolicy])
def test_only_collecting_changes_the_statistics(cls: Any) -> None:
    if cls is R2D2Policy:
        policy, batch = test_r2d2.sampled(obs_norm=True)
        obs, inputs = batch["obs"][0], first_inputs(batch)
    else:
        (policy, _), batch = pair(cls), rows(cls)
        obs, inputs = batch["obs"], {}
        policy.collect_mode.forward(obs)

    def statistics() -> list[torch.Tensor]:
        state = policy.collect_mode.state_dict()["acting"]["obs_norm"]
        return [torch.as_tensor(leaf) for _, leaf in leaves(as_tree(state["running"]))]

    before = statistics()
    policy.eval_mode.forward(obs, **inputs)
    policy.learn_mode.forward(batch)
    assert all(map(torch.equal, before, statistics()))
    policy.collect_mode.forward(obs, **inputs)
    assert not all(map(torch.equal, before, statistics()))


@pytest.mark.parametrize("cls", [DQNPolicy, SACPolicy])
def test_the_statistics_are_part_of_a_checkpoint_and_of_what_collectors_receive(cls: Any) -> None:
    (policy, _), (other, _) = pair(cls), pair(cls)
    for seed in range(2):
        policy.collect_mode.forward(rows(cls, seed)["obs"])
    obs = rows(cls, 5)["obs"]
    for mode in ("learn_mode", "collect_mode"):
        getattr(other, mode).load_state_dict(getattr(policy, mode).state_dict())
        actions = [one.eval_mode.forward(obs)["action"] for one in (policy, other)]
        assert torch.equal(*actions)
        seen = [one.obs_norm(obs) for one in (policy, other)]
        assert torch.equal(*seen)
        (other, _) = pair(cls)


@pytest.mark.parametrize("cls", OFFLINE)
def test_offline_policies_see_the_observations_of_the_data_set_normalized(cls: Any) -> None:
    (policy, twin), batch = pair(cls), rows(cls)
    with pytest.raises(
        ConfigError, match=r"knows nothing of the data set yet; call policy\.observe"
    ):
        policy.learn_mode.forward(batch)
    policy.observe(batch["obs"])
    seen = normalized(policy, batch)
    torch.testing.assert_close(seen["obs"].mean(0), torch.zeros(3), rtol=0, atol=1e-5)
    policy.collect_mode.forward(batch["obs"] + 100)
    assert torch.equal(normalized(policy, batch)["obs"], seen["obs"])
    assert policy.eval_mode.forward(batch["obs"])["action"].shape == (16, 1)
    loss = policy.learn_mode.forward(batch)["total_loss"]
    assert loss == twin.learn_mode.forward(seen)["total_loss"]


@pytest.mark.parametrize("clip", [0.5, None])
def test_normalized_observations_are_clipped_or_not(clip: float | None) -> None:
    policy = SACPolicy.for_env(gym.make("Pendulum-v1"), seed=0, obs_norm=True, norm_clip=clip)
    obs = rows(SACPolicy)["obs"]
    policy.collect_mode.forward(obs)
    largest = policy.obs_norm(obs).abs().max().item()
    assert largest == 0.5 if clip else largest > 1.0


@pytest.mark.compiled
@pytest.mark.slow
def test_a_compiled_update_follows_the_statistics() -> None:
    env = gym.make("Pendulum-v1")
    flags = (False, True)
    eager, compiled = (SACPolicy.for_env(env, seed=0, obs_norm=True, compile=f) for f in flags)
    counters = torch._dynamo.utils.counters
    torch._dynamo.reset()
    counters.clear()
    for seed in range(4):
        batch = rows(SACPolicy, seed)
        for policy in (eager, compiled):
            policy.collect_mode.forward(batch["obs"] + seed)
        loss = eager.learn_mode.forward(batch)["total_loss"]
        assert compiled.learn_mode.forward(batch)["total_loss"] == pytest.approx(loss, abs=1e-4)
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == 1


class Recording(Policy):
    """Regression of rewards, and actions of an actor; remembers what reaches its methods."""

    model_type = "actor_q"

    def make_components(self) -> dict[str, Component]:
        self.seen: dict[str, Any] = {}
        return {"model": Component(self.model, adam(1e-3), acts=True)}

    def update(self, batch: Any) -> dict[str, torch.Tensor]:
        self.seen = {name: batch[name].detach() for name in ("obs", "next_obs") if name in batch}
        action = self.codec.to_raw(batch["action"])
        loss = (self.model.critic(batch["obs"], action) - batch["reward"]).square().mean()
        self.components["model"].step(loss)
        return {"total_loss": loss.detach()}

    def act_collect(self, obs: Any, env_id: Any, **kwargs: Any) -> dict[str, Any]:
        self.seen["collect"] = obs
        return {"action": self.codec.to_env(self.model.actor(obs)["mu"])}

    def act_eval(self, obs: Any, env_id: Any, **kwargs: Any) -> dict[str, Any]:
        self.seen["eval"] = obs
        return {"action": self.codec.to_env(self.model.actor(obs)["mu"])}


class NormalizingSettings(ActorSettings, TDSettings):
    """Those of a TD policy with continuous actions."""


class Normalizing(Policy):
    """An algorithm whose settings ask for normalized observations."""


ORDERS = list(itertools.permutations((TDPolicy, Normalizing, Recording)))


@pytest.mark.parametrize("bases", ORDERS, ids=lambda bases: ", ".join(b.__name__ for b in bases))
def test_the_order_of_base_classes_does_not_matter(bases: Any) -> None:
    cls: Any = type("Mine", bases, {"__annotations__": {"cfg": NormalizingSettings}})
    policy = cls.for_env(gym.make("Pendulum-v1"), seed=0, obs_norm=True)
    normalizer = policy.obs_norm
    batch = rows(SACPolicy)
    for seed in range(3):
        obs = rows(SACPolicy, seed)["obs"]
        policy.collect_mode.forward(obs)
        assert torch.equal(policy.seen["collect"], normalizer(obs))
        by_env = dict(enumerate(obs))
        as_collect_mode(policy, user="the test").forward(by_env)
        assert torch.equal(policy.seen["collect"], normalizer(obs))
    assert normalizer.has_seen_all
    policy.eval_mode.forward(batch["obs"])
    assert torch.equal(policy.seen["eval"], normalizer(batch["obs"]))
    policy.learn_mode.forward(batch)
    for name in ("obs", "next_obs"):
        assert torch.equal(policy.seen[name], normalizer(batch[name]))
        assert policy.seen[name].abs().mean() < 2 < batch[name].abs().mean()


def test_an_algorithm_of_ones_own_may_act_by_the_methods_of_its_base_classes() -> None:
    class Mine(TDPolicy, Normalizing, Recording):
        def act_collect(self, obs: Any, env_id: Any, **kwargs: Any) -> dict[str, Any]:
            return self.acted(self.actor_output(obs), obs, None, self.generator)

        def act_eval(self, obs: Any, env_id: Any, **kwargs: Any) -> dict[str, Any]:
            return self.acted(self.actor_output(obs), obs, None, None)

    env = gym.make("Pendulum-v1")
    policy, twin = (Mine.for_env(env, seed=0, obs_norm=flag) for flag in (True, False))
    obs = rows(SACPolicy)["obs"]
    for mode in ("collect_mode", "eval_mode"):
        action = getattr(policy, mode).forward(obs)["action"]
        wanted = getattr(twin, mode).forward(policy.obs_norm(obs))
        assert torch.equal(action, wanted["action"])


def added_to(cls: Any) -> Any:
    """Return a class of policies with the setting ``obs_norm``: ``cls`` itself if it has it."""
    if issubclass(cls.settings_class(), ObsNormSettings):
        return cls
    settings = type(cls.__name__, (ObsNormSettings, cls.settings_class()), {})
    return type(cls.__name__, (cls,), {"__annotations__": {"cfg": settings}})


@pytest.mark.parametrize("cls", [BCPolicy, IQLPolicy, IMPALAPolicy])
def test_any_algorithm_can_normalize(cls: Any) -> None:
    env = every_policy.env_for(cls)
    policy = added_to(cls).for_env(env, seed=0, obs_norm=True)
    twin = cls.for_env(env, seed=0)
    collected = every_policy.collected(twin)
    shifted = {name: 5 + 3 * collected[name] for name in ("obs", "next_obs")}
    batch = as_tree({**dict(collected.items()), **shifted})
    if policy.minibatch_unit == "rows":
        batch = flatten_lead(batch, 2)
    policy.observe(batch["obs"])
    seen = normalized(policy, batch)
    for _ in range(2):
        loss = policy.learn_mode.forward(batch)["total_loss"]
        assert loss == twin.learn_mode.forward(seen)["total_loss"]
    for mode in ("collect_mode", "eval_mode"):
        policy.seed(0)
        twin.seed(0)
        obs = batch["obs"].reshape(-1, 3)[:6]
        outputs = getattr(policy, mode).forward(obs)
        wanted = getattr(twin, mode).forward(policy.obs_norm(obs))
        for name in wanted:
            assert torch.equal(outputs[name], wanted[name])


@pytest.mark.parametrize(
    "cls",
    [
        *(PPOPolicy, PPGPolicy, A2CPolicy, RecurrentPPOPolicy),
        *(IPPOPolicy, MAPPOPolicy, RecurrentMAPPOPolicy),
    ],
)
def test_on_policy_algorithms_normalize_once(cls: Any) -> None:
    policy, twin = (every_policy.made(cls, obs_norm=flag) for flag in (True, False))
    rows_of_it = every_policy.collected(policy)
    estimated = AdvantageEstimator(policy.learn_mode, user="the test")(rows_of_it)
    # The twin would have collected these rows if it had seen what the policy saw.
    seen = normalized(policy, estimated)
    again = AdvantageEstimator(twin.learn_mode, user="the test")(normalized(policy, rows_of_it))
    torch.testing.assert_close(again["adv"], estimated["adv"])
    if policy.minibatch_unit != "lanes":
        estimated, seen = flatten_lead(estimated, 2), flatten_lead(seen, 2)
    for _ in range(2):
        loss = policy.learn_mode.forward(estimated)["total_loss"]
        assert loss == twin.learn_mode.forward(seen)["total_loss"]


def test_transformers_normalize_once() -> None:
    flags = (True, False)
    policy, twin = (every_policy.made(DecisionTransformerPolicy, obs_norm=flag) for flag in flags)
    batch = every_policy.batch_for(policy)
    loss = policy.learn_mode.forward(batch)["total_loss"]
    assert loss == twin.learn_mode.forward(normalized(policy, batch))["total_loss"]
