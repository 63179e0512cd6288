"""Tests of observation groups: what the actor sees, and what the critic sees."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import nn

from dmiddleware.data import Batch, TensorBuffer, as_tree, flatten_lead
from dmiddleware.env import make_env_manager
from dmiddleware.errors import ConfigError, SpaceError, StructureError
from dmiddleware.policy import (
    A2CPolicy,
    BCPolicy,
    DatasetNormSettings,
    DiscreteSACPolicy,
    DQNPolicy,
    IPPOPolicy,
    MAPPOPolicy,
    ObsGroups,
    ObsGroupSettings,
    PPOPolicy,
    RecurrentIPPOPolicy,
    RecurrentMAPPOPolicy,
    RecurrentPPOPolicy,
    SACPolicy,
)
from dmiddleware.policy.policy_description import DESCRIPTION, describe_policy, policy_from
from dmiddleware.policy.recurrent_actor_q import RecurrentTDPolicy
from dmiddleware.reward import RND
from dmiddleware.rollout import RolloutCollector, evaluate_episodes
from dmiddleware.rollout.acting_policy import ActingPolicy
from dmiddleware.tree import index_rows, leaves
from tests.dmiddleware.policy.every_policy import (
    CONTINUOUS,
    EVERY,
    N_ENVS,
    buffer_of,
    on_policy_batch,
    others_are_slow,
    to_store,
)
from tests.dmiddleware.policy.grouped_envs import BOX, GROUPS, Parts, PartsTeam

GROUPED: list[Any] = [
    cls
    for cls in EVERY
    if issubclass(cls.settings_class(), ObsGroupSettings) and not cls.several_agents
]
SMALL: dict[str, Any] = {"CrossQPolicy": {"critic_hidden_sizes": [32, 32]}}


def env_of(cls: Any, **options: Any) -> Parts:
    return Parts(BOX if cls in CONTINUOUS else gym.spaces.Discrete(3), **options)


def made(cls: Any, **options: Any) -> Any:
    settings = {"seed": 0, "obs_groups": GROUPS, "model": SMALL.get(cls.__name__), **options}
    policy = cls.for_env(env_of(cls), **settings)
    if issubclass(cls.settings_class(), DatasetNormSettings):
        policy.observe(observations(64))
    return policy


def observations(n: int, seed: int = 0, names: Any = ("clock", "mass", "proprio")) -> Batch:
    """Return random observations; those of another seed differ in what the actor cannot see."""
    sizes = {"clock": 1, "mass": 2, "proprio": 3}
    seeds = {"clock": seed, "mass": seed, "proprio": 7}
    generator = {name: torch.Generator().manual_seed(seeds[name]) for name in sizes}
    drawn = {name: torch.randn(n, sizes[name], generator=generator[name]) for name in sizes}
    return as_tree({name: drawn[name] for name in names})


def inputs_of(policy: Any, n: int) -> dict[str, Any]:
    """Return what a recurrent policy sees in a first step."""
    state = policy.initial_state(n)
    if not isinstance(policy, RecurrentPPOPolicy | RecurrentTDPolicy):
        return {} if state is None else {"state": state}
    is_discrete = isinstance(policy, RecurrentPPOPolicy)
    return {
        "state": state,
        "is_first": torch.ones(n, dtype=torch.bool),
        "prev_action": torch.zeros(n, dtype=torch.int64) if is_discrete else torch.zeros(n, 2),
        "prev_reward": torch.zeros(n),
    }


def values_of(policy: Any, obs: Batch) -> torch.Tensor:
    """Return what the critic says of observations, with gradient."""
    if isinstance(policy, RecurrentPPOPolicy):
        return policy.acting_output(obs, **inputs_of(policy, 4))["value"]
    if isinstance(policy, RecurrentTDPolicy):
        seen = {name: column.unsqueeze(0) for name, column in inputs_of(policy, 4).items()}
        critic, sequence = policy.critic.module, as_tree({k: v[None] for k, v in obs.items()})
        state = torch.zeros(4, critic.core.state_size)
        del seen["state"]
        return critic(sequence, state, action=torch.zeros(1, 4, 2), **seen)["q"]
    if policy.on_policy or hasattr(policy, "critic_output"):
        return policy.critic_output(obs)
    if isinstance(policy, DiscreteSACPolicy):
        return policy.critic.module(obs)
    return policy.critic.module(obs, torch.zeros(4, 2))


@pytest.mark.parametrize("cls", others_are_slow(GROUPED))
class TestEveryAlgorithmWithAnActorAndACritic:
    def test_acts_alike_whatever_the_critic_alone_sees(self, cls: Any) -> None:
        policy = made(cls)
        inputs = inputs_of(policy, 4)
        for mode in (policy.collect_mode, policy.eval_mode):
            actions = []
            for seed in (1, 2):
                mode.seed(0)
                actions.append(mode.forward(observations(4, seed), **inputs)["action"])
            assert torch.equal(*actions)

    def test_acts_without_what_the_critic_alone_sees(self, cls: Any) -> None:
        policy = made(cls)
        inputs = inputs_of(policy, 4)
        whole = policy.eval_mode.forward(observations(4), **inputs)["action"]
        less = policy.eval_mode.forward(observations(4, names=["proprio"]), **inputs)["action"]
        assert torch.equal(whole, less)

    def test_the_critic_s_values_depend_on_it_and_the_actor_s_outputs_do_not(
        self, cls: Any
    ) -> None:
        policy = made(cls)
        obs = {name: part.requires_grad_() for name, part in observations(4).items()}
        value = values_of(policy, as_tree(obs))
        (from_mass,) = torch.autograd.grad(value.sum(), obs["mass"], retain_graph=True)
        assert (from_mass != 0).any()
        if isinstance(policy, RecurrentPPOPolicy):
            output = policy.acting_output(as_tree(obs), **inputs_of(policy, 4))
        elif isinstance(policy, RecurrentTDPolicy):
            inputs = inputs_of(policy, 4)
            output = policy.memory.run(as_tree(obs), inputs, inputs["state"])
        else:
            output = policy.actor_output(as_tree(obs))
        seen = sum(column.sum() for name, column in output.items() if name != "value")
        gradients = torch.autograd.grad(
            seen, [obs["proprio"], obs["mass"], obs["clock"]], allow_unused=True
        )
        assert (gradients[0] != 0).any()
        assert gradients[1:] == (None, None)

    def test_learns_from_rows_without_what_nothing_reads(self, cls: Any) -> None:
        policy = made(cls)
        with make_env_manager(lambda: env_of(cls), env_num=N_ENVS, seed=0) as envs:
            collected = RolloutCollector(policy, envs).collect(N_ENVS * 24)
        rows = to_store(policy, policy.collect_mode.train_batch(collected))
        assert set(rows["obs"].keys()) == set(rows["next_obs"].keys()) == {"mass", "proprio"}
        if policy.on_policy:
            batch = on_policy_batch(policy, rows)
        else:
            batch = buffer_of(policy, rows).sample(16)
        before = {name: tensor.clone() for name, tensor in policy.model.state_dict().items()}
        policy.learn_mode.forward(batch)
        changed = {
            name for name, tensor in policy.model.state_dict().items()
            if not torch.equal(tensor, before[name])
        }  # fmt: skip
        assert changed

    def test_plays_in_an_env_that_has_the_actor_s_parts_alone(self, cls: Any) -> None:
        policy = made(cls)
        with make_env_manager(lambda: env_of(cls, names=("proprio",)), env_num=1, seed=0) as envs:
            assert len(evaluate_episodes(policy, envs, 1).get_episode_return()) == 1

    def test_a_saved_policy_acts_on_the_actor_s_parts_alone(self, cls: Any) -> None:
        policy = made(cls)
        described = {DESCRIPTION: describe_policy(policy.eval_mode.spec)}
        loaded = ActingPolicy(policy_from({**policy.eval_mode.state_dict(), **described}))
        whole = {name: part[0].numpy() for name, part in observations(1).items()}
        less = {"proprio": whole["proprio"]}
        acting = ActingPolicy(policy)
        expected = acting(whole)
        for act, obs in ((acting, less), (loaded, whole), (loaded, less)):
            act.reset()
            assert np.array_equal(act(obs), expected)


@pytest.mark.parametrize("cls", [PPOPolicy, SACPolicy])
class TestStatisticsOfObservations:
    def test_cover_what_both_groups_read(self, cls: Any) -> None:
        policy = made(cls, obs_norm=True)
        obs = observations(100)
        policy.collect_mode.forward(obs)
        assert set(policy.obs_norm.state_dict()["running"]) == {"obs.mass", "obs.proprio"}
        normalized = policy.obs_norm(obs)
        assert normalized["mass"].mean().abs() < 1e-4
        assert torch.equal(normalized["clock"], obs["clock"])

    def test_acting_needs_those_of_the_actor_s_parts_alone(self, cls: Any) -> None:
        policy = made(cls, obs_norm=True)
        policy.collect_mode.forward(observations(100))
        whole = policy.eval_mode.forward(observations(4))["action"]
        less = policy.eval_mode.forward(observations(4, names=["proprio"]))["action"]
        assert torch.equal(whole, less)


@pytest.mark.parametrize("cls", [PPOPolicy, SACPolicy])
def test_a_learner_s_state_is_restored_exactly(cls: Any) -> None:
    policy, other = made(cls, obs_norm=True), made(cls, obs_norm=True, seed=1)
    with make_env_manager(lambda: env_of(cls), env_num=N_ENVS, seed=0) as envs:
        rows = policy.collect_mode.train_batch(RolloutCollector(policy, envs).collect(48))
    batch = on_policy_batch(policy, rows) if policy.on_policy else buffer_of(policy, rows).sample(9)
    policy.learn_mode.forward(batch)
    other.learn_mode.load_state_dict(policy.learn_mode.state_dict())
    for each in (policy, other):
        each.learn_mode.forward(batch)
    state = other.model.state_dict()
    assert all(torch.equal(part, state[name]) for name, part in policy.model.state_dict().items())


class TestRows:
    def test_a_buffer_stores_each_part_once(self) -> None:
        policy = made(SACPolicy)
        with make_env_manager(Parts, env_num=N_ENVS, seed=0) as envs:
            rows = policy.collect_mode.train_batch(RolloutCollector(policy, envs).collect(20))
        buffer = TensorBuffer(100, seed=0)
        buffer.push(rows)
        stored = {name for name, _ in leaves(buffer.sample(4)["obs"])}
        assert stored == {"mass", "proprio"}

    def test_an_intrinsic_reward_sees_what_is_kept(self) -> None:
        policy = made(PPOPolicy, obs_groups={"actor": ["mass"], "critic": ["proprio"]})
        reward = RND.for_env(Parts(), policy)
        with make_env_manager(lambda: env_of(PPOPolicy), env_num=N_ENVS, seed=0) as envs:
            rows = policy.collect_mode.train_batch(RolloutCollector(policy, envs).collect(20))
        reward.update(flatten_lead(rows, 2))
        assert reward.reward(flatten_lead(rows, 2)).shape == (20,)

    def test_statistics_of_another_part_ask_for_it(self) -> None:
        policy = made(SACPolicy)
        reward = RND.for_env(Parts(), SACPolicy.for_env(Parts()))
        with make_env_manager(Parts, env_num=N_ENVS, seed=0) as envs:
            rows = policy.collect_mode.train_batch(RolloutCollector(policy, envs).collect(20))
        with pytest.raises(StructureError, match=r"obs\.clock.*obs_groups"):
            reward.reward(flatten_lead(rows, 2))

    def test_masks_are_kept(self) -> None:
        env = Parts(gym.spaces.Discrete(3), masked=True)
        policy = PPOPolicy.for_env(env, obs_groups=GROUPS, seed=0)
        make = lambda: Parts(gym.spaces.Discrete(3), masked=True)  # noqa: E731
        with make_env_manager(make, env_num=N_ENVS, seed=0) as envs:
            rows = policy.collect_mode.train_batch(RolloutCollector(policy, envs).collect(40))
        assert set(rows["obs"].keys()) == {"mass", "proprio", "action_mask"}
        assert (rows["action"] > 0).all()


class TestDefaults:
    def test_both_groups_see_everything(self) -> None:
        policy = PPOPolicy.for_env(Parts(), seed=0)
        assert policy.parts is None
        assert set(policy.model.obs_shape) == {"clock", "mass", "proprio"}

    def test_equal_groups_make_a_network_of_one_shape(self) -> None:
        groups = ObsGroups(actor=["proprio"], critic=["proprio"])
        policy = PPOPolicy.for_env(Parts(), obs_groups=groups, seed=0)
        assert "critic_obs_shape" not in policy.cfg.model

    def test_algorithms_without_a_critic_of_their_own_have_no_groups(self) -> None:
        with pytest.raises(ConfigError, match="obs_groups"):
            DQNPolicy.for_env(Parts(gym.spaces.Discrete(3)), obs_groups=GROUPS)

    def test_cloning_has_the_actor_s_group_alone(self) -> None:
        policy = BCPolicy.for_env(Parts(), obs_groups={"actor": ["proprio"]}, seed=0)
        assert set(policy.model.obs_shape) == {"proprio"}
        with pytest.raises(ConfigError, match="critic"):
            BCPolicy.for_env(Parts(), obs_groups=GROUPS)


class TestErrors:
    @pytest.mark.parametrize(
        ("groups", "words"),
        [
            ({"actor": ["propio"]}, "did you mean 'proprio'"),
            ({"critic": ["proprio", "height"]}, "clock, mass, proprio"),
            ({"actor": ["action_mask"]}, "action_mask"),
            ({"actor": []}, "at least one name"),
            ({"actor": ["mass", "mass"]}, "each once"),
            ({"critc": ["mass"]}, "critic"),
            ({"actor": "proprio"}, "list"),
            (["proprio"], "obs_groups"),
        ],
    )
    def test_a_group_that_cannot_be_names_what_there_is(self, groups: Any, words: str) -> None:
        with pytest.raises((ConfigError, SpaceError), match=words):
            PPOPolicy.for_env(Parts(), obs_groups=groups)

    @pytest.mark.parametrize("space", [BOX, gym.spaces.Tuple([BOX, BOX])])
    def test_observations_without_names_are_refused(self, space: Any) -> None:
        env = Parts()
        env.observation_space = space
        with pytest.raises(SpaceError, match="Dict observations"):
            PPOPolicy.for_env(env, obs_groups=GROUPS)

    @pytest.mark.parametrize("cls", [PPOPolicy, A2CPolicy])
    def test_a_shared_encoder_is_refused(self, cls: Any) -> None:
        with pytest.raises(ConfigError, match="share_encoder"):
            cls.for_env(Parts(), obs_groups=GROUPS, model={"share_encoder": True})

    def test_an_env_that_lacks_a_part_of_the_critic_s_cannot_be_collected_in(self) -> None:
        policy = made(PPOPolicy)
        make = lambda: env_of(PPOPolicy, names=("proprio",))  # noqa: E731
        with (
            make_env_manager(make, env_num=1, seed=0) as envs,
            pytest.raises(SpaceError, match="mass"),
        ):
            RolloutCollector(policy, envs).collect(4)

    def test_an_env_that_lacks_a_part_of_the_actor_s_cannot_be_played(self) -> None:
        policy = made(SACPolicy, obs_groups={"critic": ["proprio"]})
        make = lambda: Parts(names=("proprio",))  # noqa: E731
        with (
            make_env_manager(make, env_num=1, seed=0) as envs,
            pytest.raises(SpaceError, match="clock, mass"),
        ):
            evaluate_episodes(policy, envs, 1)

    def test_an_info_that_the_critic_alone_may_see_is_refused(self) -> None:
        class Cheating(PPOPolicy):
            act_inputs = ("info.mass",)

            def act_eval(self, obs: Any, env_id: Any, **kwargs: Any) -> Any:
                return super().act_eval(obs, env_id)

        with pytest.raises(SpaceError, match="act_inputs"):
            Cheating.for_env(Parts(), obs_groups=GROUPS)

    def test_a_critic_of_other_parts_is_refused(self) -> None:
        shapes = {"obs_shape": {"proprio": 3}, "critic_obs_shape": {"proprio": 3, "clock": 1}}
        settings = {"obs_groups": GROUPS, "model": {**shapes, "action_shape": 2}}
        with pytest.raises(SpaceError, match="critic of ActorQ"):
            SACPolicy(settings).check_spaces(Parts().observation_space, BOX)


class Judge(nn.Module):
    """A critic that sees the mass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(7, 1)

    def forward(self, obs: Any, action: torch.Tensor) -> torch.Tensor:
        return self.layer(torch.cat([obs["proprio"], obs["mass"], action], -1)).squeeze(-1)


class Player(nn.Module):
    """An actor that reads some parts."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.names = names
        self.layer = nn.Linear(sum({"proprio": 3, "mass": 2}[name] for name in names), 4)

    def forward(self, obs: Any) -> dict[str, torch.Tensor]:
        mu, spread = self.layer(torch.cat([obs[name] for name in self.names], -1)).chunk(2, -1)
        return {"mu": mu, "sigma": spread.exp()}


class Both(nn.Module):
    def __init__(self, *names: str) -> None:
        super().__init__()
        self.actor, self.critic = Player(*names), Judge()


class TestANetworkOfTheUsersOwn:
    def test_may_read_its_own_parts(self) -> None:
        policy = SACPolicy.for_env(Parts(), obs_groups=GROUPS, model=Both("proprio"), obs_norm=True)
        policy.collect_mode.forward(observations(4))
        whole = policy.eval_mode.forward(observations(4))["action"]
        less = policy.eval_mode.forward(observations(4, names=["proprio"]))["action"]
        assert torch.equal(whole, less)

    def test_whose_actor_reads_what_is_for_the_critic_alone_is_refused(self) -> None:
        with pytest.raises(SpaceError, match=r"'mass'.*critic alone"):
            SACPolicy.for_env(Parts(), obs_groups=GROUPS, model=Both("proprio", "mass"))

    def test_whose_forward_runs_both_needs_a_way_to_act_alone(self) -> None:
        class Whole(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.actor, self.value = Player("proprio"), nn.Linear(2, 1)

            def forward(self, obs: Any) -> dict[str, torch.Tensor]:
                return {**self.actor(obs), "value": self.value(obs["mass"]).squeeze(-1)}

        with pytest.raises(SpaceError, match="compute_actor"):
            PPOPolicy.for_env(Parts(), obs_groups=GROUPS, model=Whole())
        whole = Whole()
        whole.compute_actor = whole.actor.forward  # type: ignore[assignment]
        policy = PPOPolicy.for_env(Parts(), obs_groups=GROUPS, model=whole)
        assert policy.eval_mode.forward(observations(4, names=["proprio"]))["action"].shape == (
            4,
            2,
        )


class TestSeveralAgents:
    GROUPS = {"actor": ["proprio"], "critic": ["proprio", "mass", "state"]}

    def rows(self, policy: Any) -> Batch:
        with make_env_manager(PartsTeam, env_num=N_ENVS, seed=0) as envs:
            collected = RolloutCollector(policy, envs).collect(N_ENVS * 12)
        return policy.collect_mode.train_batch(collected)

    def test_actors_see_their_own_parts_and_the_critic_the_state(self) -> None:
        policy = MAPPOPolicy.for_env(PartsTeam(), obs_groups=self.GROUPS, seed=0)
        rows = self.rows(policy)
        assert {name for name, _ in leaves(rows["obs"])} == {
            "agents.mass",
            "agents.proprio",
            "agent_mask",
            "state",
        }
        policy.learn_mode.forward(on_policy_batch(policy, rows))
        obs = flatten_lead(rows, 2)["obs"]
        agents = {"proprio": obs["agents"]["proprio"]}
        less = {"agents": agents, "agent_mask": obs["agent_mask"]}
        assert torch.equal(
            policy.eval_mode.forward(obs)["action"],
            policy.eval_mode.forward(as_tree(less))["action"],
        )
        one = {
            "agents": {"proprio": np.zeros((2, 3), np.float32)},
            "agent_mask": np.ones(2, np.int8),
        }
        assert ActingPolicy(policy)(one).shape == (2,)

    def test_parts_that_nothing_reads_are_not_stored(self) -> None:
        groups = {"actor": ["proprio"], "critic": ["proprio", "state"]}
        rows = self.rows(MAPPOPolicy.for_env(PartsTeam(), obs_groups=groups, seed=0))
        assert set(rows["obs"]["agents"].keys()) == {"proprio"}

    @pytest.mark.parametrize("cls", [RecurrentIPPOPolicy, RecurrentMAPPOPolicy])
    def test_what_the_critic_alone_sees_enters_no_memory(self, cls: Any) -> None:
        named = ["proprio", "mass"] + ["state"] * (cls is RecurrentMAPPOPolicy)
        groups = {"actor": ["proprio"], "critic": named}
        policy = cls.for_env(PartsTeam(), obs_groups=groups, seed=0)
        rows = self.rows(policy)
        policy.learn_mode.forward(on_policy_batch(policy, rows))
        row = index_rows(rows, 3)
        inputs = {name: row[name] for name in ("state", *policy.act_inputs)}
        whole = policy.eval_mode.forward(row["obs"], **inputs)
        less = as_tree(
            {
                "agents": {"proprio": row["obs"]["agents"]["proprio"]},
                "agent_mask": row["obs"]["agent_mask"],
            }
        )
        acted = policy.eval_mode.forward(less, **inputs)
        assert torch.equal(acted["state"], whole["state"])
        assert torch.equal(acted["action"], whole["action"])
        changed = row["obs"].clone()
        changed["agents"]["mass"] += 1.0
        values = [policy.acting_output(obs, **inputs)["value"] for obs in (row["obs"], changed)]
        assert (values[0] != values[1]).all()

    def test_independent_critics_see_an_agent_s_parts(self) -> None:
        groups = {"actor": ["proprio"], "critic": ["proprio", "mass"]}
        policy = IPPOPolicy.for_env(PartsTeam(), obs_groups=groups, seed=0)
        rows = self.rows(policy)
        assert "state" not in rows["obs"]
        policy.learn_mode.forward(on_policy_batch(policy, rows))

    def test_a_state_that_an_independent_critic_would_not_see_is_refused(self) -> None:
        with pytest.raises(SpaceError, match=r"'state'.*use MAPPO"):
            IPPOPolicy.for_env(PartsTeam(), obs_groups=self.GROUPS, seed=0)
        # Without names for the critic, nobody has asked for it.
        IPPOPolicy.for_env(PartsTeam(), obs_groups={"actor": ["proprio"]}, seed=0)

    @pytest.mark.parametrize(
        ("groups", "words"),
        [
            ({"actor": ["proprio", "state"]}, "state"),
            ({"critic": ["state"]}, "at least one"),
            ({"critic": ["wind"]}, "mass, proprio, state"),
        ],
    )
    def test_a_group_that_cannot_be_names_what_there_is(self, groups: Any, words: str) -> None:
        with pytest.raises(SpaceError, match=words):
            MAPPOPolicy.for_env(PartsTeam(), obs_groups=groups)
