"""Groups of observations: which parts of a Dict observation the actor sees, and which the critic.

A critic is needed for learning alone, so it may see more than what the actor has to act on: the
mass of a robot in a simulator, or the state of a whole team (Pinto et al., "Asymmetric Actor Critic
for Image-Based Robot Learning", 2018).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Annotated, Any, Final, Self, TypeAlias

import gymnasium as gym
from torch import nn

from dmiddleware.env import n_agent_of
from dmiddleware.env.team import ACTION_MASK, AGENT_MASK, AGENTS, STATE
from dmiddleware.errors import SpaceError
from dmiddleware.model.spaces import ObsShape, as_obs_shape, fits_shape
from dmiddleware.policy.policy_settings import PolicySettings
from dmiddleware.registry import nearest
from dmiddleware.settings import AS_TUPLE, Convert, Settings
from dmiddleware.tree import Batch, as_tree, with_columns

__all__ = ["ActorGroup", "ObsGroupSettings", "ObsGroups", "ObsParts", "made_from_names"]

Names: TypeAlias = Annotated[tuple[str, ...], AS_TUPLE]
Selection: TypeAlias = Mapping[str, Any]
"""The names to keep: each with None for the whole part, or a selection of a part's own names."""

_MASKS: Final = (ACTION_MASK, AGENT_MASK)


class _Group(Settings):
    actor: Names | None = None
    """Names of the parts of observations that the actor sees; None: all."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for field in fields(self):
            names = getattr(self, field.name)
            is_set = names is None or 0 < len(names) == len(set(names))
            self.require(is_set, field.name, "at least one name, each once, or None for all")

    @property
    def divides(self) -> bool:
        """Whether a group names its parts."""
        return any(getattr(self, field.name) is not None for field in fields(self))


class ActorGroup(_Group):
    """What a policy without a critic sees of Dict observations."""


class ObsGroups(_Group):
    """What the actor and the critic of a policy see of Dict observations.

    With several agents, the names are those of one agent's observation, and the critic may also
    name ``state``.

    Example:
        >>> ObsGroups(actor=["proprio"], critic=["proprio", "mass"]).critic
        ('proprio', 'mass')
    """

    critic: Names | None = None
    """Names of the parts of observations that the critic sees; None: all."""


@dataclass(frozen=True)
class _FromNames(Convert):
    words: str = "a dictionary of lists of names"


def made_from_names(kind: type[_Group]) -> Convert:
    """Return an annotation with which a setting of this class may be given as a dictionary."""

    def converted(value: Any) -> Any:
        return kind(**value) if isinstance(value, Mapping) else value

    return _FromNames(converted)


class ObsGroupSettings(PolicySettings):
    """The settings of policies with an actor and a critic."""

    obs_groups: Annotated[ObsGroups, made_from_names(ObsGroups)] = ObsGroups()
    """The parts of Dict observations that the actor sees, and those that the critic sees."""


@dataclass(frozen=True)
class ObsParts:
    """The parts of an environment's observations that a policy with groups reads.

    Attributes:
        actor: the names of those that the actor sees.
        critic: the names of those that the critic sees; without a critic, as ``actor``.
        is_team: whether they are names of an agent's observation, among several agents.
        asks_for_state: whether the settings name the state of a team for the critic.
    """

    actor: tuple[str, ...]
    critic: tuple[str, ...]
    is_team: bool
    asks_for_state: bool = False

    @classmethod
    def of(
        cls,
        settings: object,
        observation_space: gym.Space[Any],
        *,
        infos: Collection[str] = (),
        user: str,
    ) -> Self | None:
        """Find the parts in a space.

        Args:
            settings: of the policy; they may have ``obs_groups``.
            observation_space: that of one environment.
            infos: the names of the infos that the policy sees when it acts.
            user: the policy's name, for the messages.

        Returns:
            None: the policy reads all parts for everything.

        Raises:
            SpaceError: if observations have no parts with names or not these, or if the actor would
                see in the infos what the groups give to the critic alone.
        """
        groups = getattr(settings, "obs_groups", None)
        if not isinstance(groups, _Group) or not groups.divides:
            return None
        names, shared = _names_of(observation_space, user=user)
        actor = critic = _chosen(groups.actor, names, group="actor", user=user)
        if isinstance(groups, ObsGroups):
            critic = _chosen(groups.critic, (*names, *shared), group="critic", user=user)
        if not set(critic) & set(names):
            raise SpaceError(
                f"{user}: obs_groups.critic names {', '.join(critic)} alone; add at least one "
                f"part of an agent's observations: {', '.join(names)}"
            )
        if leaked := (set(critic) - set(actor)) & set(infos):
            raise SpaceError(
                f"{user} acts on {', '.join(sorted(leaked))} of the infos (act_inputs), which "
                "obs_groups give to the critic alone; leave it out of act_inputs, or name it in "
                "obs_groups.actor"
            )
        asks_for_state = STATE in shared and STATE in (getattr(groups, "critic", None) or ())
        return cls(actor, critic, n_agent_of(observation_space) is not None, asks_for_state)

    @cached_property
    def private(self) -> frozenset[str]:
        """The names that the critic sees and the actor does not."""
        return frozenset(self.critic) - frozenset(self.actor)

    @cached_property
    def _of_actor(self) -> Selection:
        return _selection(self.actor, self.is_team)

    @cached_property
    def _of_both(self) -> Selection:
        return _selection(dict.fromkeys((*self.actor, *self.critic)), self.is_team)

    def of_actor(self, tree: Any) -> Any:
        """Return what the actor sees of observations, or of their space."""
        return _selected(tree, self._of_actor)

    def rows(self, batch: Batch) -> Batch:
        """Return the rows of a batch without the parts of observations that nothing reads."""
        columns = {name: batch[name] for name in ("obs", "next_obs") if name in batch}
        return with_columns(
            batch, **{name: _selected(column, self._of_both) for name, column in columns.items()}
        )

    def shapes(self, obs_shape: ObsShape) -> dict[str, ObsShape]:
        """Return ``obs_shape``, and ``critic_obs_shape`` if the critic sees something else.

        Args:
            obs_shape: that of whole observations.
        """
        actor = _selected(obs_shape, self._of_actor)
        critic = _selected(obs_shape, _selection(self.critic, self.is_team))
        return {"obs_shape": actor} | ({} if critic == actor else {"critic_obs_shape": critic})

    def in_space(
        self, observation_space: gym.Space[Any], *, acts_only: bool, user: str
    ) -> gym.Space[Any]:
        """Return the space of what is read in an environment.

        Args:
            observation_space: that of one environment.
            acts_only: whether the policy only acts there, so the critic needs nothing.
            user: the policy's name, for the message.

        Raises:
            SpaceError: if a part is missing.
        """
        present = [name for names in _names_of(observation_space, user=user) for name in names]
        needed = self.actor if acts_only else dict.fromkeys((*self.actor, *self.critic))
        if missing := [name for name in needed if name not in present]:
            raise SpaceError(
                f"{user}: {'the actor sees' if acts_only else 'actor and critic see'} "
                f"{', '.join(missing)}, but observations here have {', '.join(present)}; build the "
                "policy for such an environment, or change obs_groups"
            )
        space: gym.Space[Any] = _selected(
            observation_space, self._of_actor if acts_only else self._of_both
        )
        return space

    def check_critic(self, model: nn.Module, obs_shape: ObsShape) -> None:
        """Refuse a network whose critic was built for other parts, or would not see one of them.

        Args:
            model: the network; one that has no ``critic_obs_shape`` or ``sees_state`` is not
                checked for it.
            obs_shape: that of whole observations.

        Raises:
            SpaceError: with both shapes, or with the part.
        """
        if self.asks_for_state and not getattr(model, "sees_state", True):
            raise SpaceError(
                f"obs_groups.critic names {STATE!r}, but the critic of {type(model).__name__} sees "
                "the observation of one agent alone; leave it out, or use MAPPO, whose critic "
                "sees the state"
            )
        built_for = getattr(model, "critic_obs_shape", None)
        shape = as_obs_shape(_selected(obs_shape, _selection(self.critic, self.is_team)))
        if built_for is not None and not fits_shape(built_for, shape):
            raise SpaceError(
                f"the critic of {type(model).__name__} was built for observations of shape "
                f"{built_for}, but obs_groups give it {shape}; build the policy with for_env(env)"
            )


def _names_of(
    observation_space: gym.Space[Any], *, user: str
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of the parts that an actor may see, and those for critics alone."""
    is_team = n_agent_of(observation_space) is not None
    space: Any = observation_space
    shared: tuple[str, ...] = ()
    if is_team:
        shared = (STATE,) if STATE in space.spaces else ()
        space = space[AGENTS]
    if not isinstance(space, gym.spaces.Dict):
        whose = "of each agent" if is_team else "of the environment"
        raise SpaceError(
            f"{user}: obs_groups divide Dict observations by the names of their parts, but those "
            f"{whose} are {space}; leave obs_groups out, or give the parts names"
        )
    return tuple(str(name) for name in space.spaces if name not in _MASKS), shared


def _chosen(
    chosen: tuple[str, ...] | None, names: tuple[str, ...], *, group: str, user: str
) -> tuple[str, ...]:
    if chosen is None:
        return names
    for name in chosen:
        if name not in names:
            near = nearest(name, names, n=1)
            raise SpaceError(
                f"{user}: obs_groups.{group} names {name!r}, but observations have "
                f"{', '.join(names)}{f'; did you mean {near[0]!r}?' if near else ''}"
            )
    return tuple(name for name in names if name in chosen)


def _selection(names: Collection[str], is_team: bool) -> Selection:
    """Return the selection of parts, with the masks that come with them."""
    if not is_team:
        return dict.fromkeys((*names, ACTION_MASK))
    agent = dict.fromkeys(name for name in names if name != STATE)
    state = [STATE] if STATE in names else []
    return {AGENTS: agent, **dict.fromkeys((*state, *_MASKS))}


def _selected(tree: Any, selection: Selection | None) -> Any:
    """Return a tree, a space or a shape with the selected names, those that it has."""
    if selection is None:
        return tree
    is_space = isinstance(tree, gym.spaces.Dict)
    if not is_space and not isinstance(tree, Batch | Mapping):
        return tree
    names = tree.spaces if is_space else tree
    picked = {name: _selected(tree[name], selection[name]) for name in names if name in selection}
    if is_space:
        return gym.spaces.Dict(list(picked.items()))
    return as_tree(picked) if isinstance(tree, Batch) else picked
