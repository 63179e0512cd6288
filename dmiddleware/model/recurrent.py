"""Networks with a memory: an LSTM or GRU between an encoder and the head of another network."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, ClassVar, Final, Literal, Protocol, TypeAlias, runtime_checkable

import torch
from torch import nn

from dmiddleware.errors import SpaceError
from dmiddleware.model.actor_critic import ActorCritic
from dmiddleware.model.actor_q import GaussianActor, QEnsemble
from dmiddleware.model.encoders import ConvLayers, make_encoder
from dmiddleware.model.layers import Init, Norm
from dmiddleware.model.model_registry import MODEL_REGISTRY
from dmiddleware.model.network import Network
from dmiddleware.model.q_network import QNetwork
from dmiddleware.model.spaces import (
    ActionKind,
    ActionShape,
    ObsShape,
    action_features,
    as_obs_shape,
    is_image,
    shape_leaves,
)
from dmiddleware.settings import Count, checked
from dmiddleware.tree import Nested

__all__ = [
    "CoreKind",
    "Recurrent",
    "RecurrentActorCritic",
    "RecurrentActorQ",
    "RecurrentCore",
    "RecurrentNetwork",
    "RecurrentQNetwork",
]

CoreKind: TypeAlias = Literal["lstm", "gru"]
"""``"lstm"`` (Hochreiter and Schmidhuber, 1997) or ``"gru"`` (Cho et al., 2014)."""

_CORES: dict[str, type[nn.LSTM] | type[nn.GRU]] = {"lstm": nn.LSTM, "gru": nn.GRU}


_MEMORY: Final = "memory"
_OBS: Final = "obs"


class RecurrentCore(nn.Module):
    """A layer of LSTM or GRU over sequences, time first, which starts again where episodes start.

    The state is one tensor ``[B, state_size]``; that of an LSTM is its hidden state and its cell
    state, one after the other. A sequence within one episode is one call of torch's layer. Where
    episodes start inside a sequence, each piece between two starts (of any lane) is a call; a
    compiled update, and one on a GPU, which reads no flags back, makes a call for each step.

    Args:
        in_features: length of the input's last dimension.
        hidden_size: length of the output's last dimension.
        core: the kind of layer.
        init: ``"orthogonal"`` with biases of 0 (Huang et al., "The 37 Implementation Details of
            PPO", 2022, detail 1 of the LSTM), or None (torch's own).

    Attributes:
        out_features: length of the output's last dimension.
        state_size: length of the state's last dimension.

    Raises:
        ValueError: if an option is invalid.
    """

    def __init__(
        self, in_features: int, hidden_size: int, *, core: CoreKind = "lstm", init: Init = None
    ) -> None:
        super().__init__()
        hidden_size = checked("hidden_size", hidden_size, Count)
        checked("core", core, CoreKind)
        checked("init", init, Init)
        self.layer = _CORES[core](in_features, hidden_size)
        layer: Any = self.layer
        # For the cells: the compiler does not even look at an LSTM's or a GRU's attributes.
        self._weights = (
            layer.weight_ih_l0,
            layer.weight_hh_l0,
            layer.bias_ih_l0,
            layer.bias_hh_l0,
        )
        self._is_lstm = core == "lstm"
        self.out_features = hidden_size
        self.state_size = 2 * hidden_size if self._is_lstm else hidden_size
        if init == "orthogonal":
            for name, parameter in self.layer.named_parameters():
                if name.startswith("weight"):
                    nn.init.orthogonal_(parameter)
                else:
                    nn.init.zeros_(parameter)

    def forward(
        self, x: torch.Tensor, state: torch.Tensor, is_first: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run over sequences.

        Args:
            x: ``[T, B, in_features]``.
            state: ``[B, state_size]``, before the first step.
            is_first: ``[T, B]`` bool, the steps before which the state is set to zeros; None: no
                step.

        Returns:
            Features ``[T, B, hidden_size]``, and the state after the last step. Where sequences
            have more dimensions than B, such as that of agents, all have them.
        """
        lead = state.shape[:-1]
        if len(lead) > 1:
            x, state = x.flatten(1, -2), state.flatten(0, -2)
            is_first = None if is_first is None else is_first.flatten(1)
            features, state = self(x, state, is_first)
            return features.reshape(len(x), *lead, -1), state.reshape(*lead, -1)
        outputs = []
        for start, end in pairwise(_piece_bounds(len(x), is_first)):
            if is_first is not None:
                state = state.masked_fill(is_first[start].unsqueeze(-1), 0.0)
            output, state = self._run(x[start:end], state)
            outputs.append(output)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs), state

    def _run(self, x: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if len(x) == 1:
            hidden, state = self._step(x[0], state)
            return hidden.unsqueeze(0), state
        if not self._is_lstm:
            features, after = self.layer(x, state.unsqueeze(0).contiguous())
            return features, after[0]
        before = tuple(part.unsqueeze(0).contiguous() for part in state.chunk(2, -1))
        features, after = self.layer(x, before)
        return features, torch.cat([part[0] for part in after], -1)

    def _step(self, x: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if not self._is_lstm:
            hidden = torch.gru_cell(x, state, *self._weights)
            return hidden, hidden
        hidden, cell = torch.lstm_cell(x, state.chunk(2, -1), *self._weights)
        return hidden, torch.cat([hidden, cell], -1)


def _piece_bounds(n_steps: int, is_first: torch.Tensor | None) -> Sequence[int]:
    """Return where the pieces begin that are run in one call each, and the end of the last one."""
    if torch.compiler.is_compiling():
        return range(n_steps + 1)  # the compiler traces no LSTM or GRU, but their cells
    if is_first is None or n_steps == 1:
        return (0, n_steps)
    if not is_first.is_cpu:
        return range(n_steps + 1)
    starts = is_first[1:].any(-1).nonzero().squeeze(-1) + 1
    return (0, *starts.tolist(), n_steps)


@runtime_checkable
class Recurrent(Protocol):
    """A network with a memory, of one agent or of several.

    Attributes:
        act_inputs: the keyword arguments of its forward, apart from ``state``, that come from the
            step before.
    """

    act_inputs: tuple[str, ...]

    def initial_state(self, n: int) -> torch.Tensor:
        """Return the state at the start of ``n`` episodes, ``[n, …]``, on the CPU."""

    def __call__(self, obs: Nested, state: torch.Tensor, **inputs: Any) -> dict[str, torch.Tensor]:
        """Return outputs, and ``state``, after the last step; see :class:`RecurrentNetwork`."""


class RecurrentNetwork(Network):
    """Base of networks with a memory: encoder, core, and a head that reads the core's features.

    A subclass sets :attr:`head`.

    Args:
        obs_shape: see :mod:`dmiddleware.model.spaces`.
        action_shape: see :mod:`dmiddleware.model.spaces`; the number of actions if these are
            discrete.
        action_space: the kind of actions.
        core: ``"lstm"`` or ``"gru"``.
        hidden_size: width of the core.
        encoder_hidden_sizes: width of each linear layer before the core; None: 64 for vectors, 512
            for images.
        conv_layers: see :class:`ImageEncoder`.
        prev_action: whether the core sees the previous action (zeros in an episode's first step).
        prev_reward: whether the core sees the previous reward (0 in an episode's first step).
        activation: see :func:`~dmiddleware.model.layers.activation_of`.
        norm: ``"layer"``, ``"batch_renorm"`` or None, in the encoder.
        init: ``"orthogonal"`` or None.
        residual: add the encoder's features to those of the core, which has as many.

    Attributes:
        act_inputs: the keyword arguments of :meth:`forward` that the network needs.
        head: the module that maps the core's features to outputs.

    Raises:
        ValueError: if an option is invalid.
    """

    head: nn.Module

    def __init__(
        self,
        obs_shape: ObsShape,
        action_shape: ActionShape,
        *,
        action_space: ActionKind = "discrete",
        core: CoreKind = "lstm",
        hidden_size: int = 128,
        encoder_hidden_sizes: Sequence[int] | None = None,
        conv_layers: ConvLayers | None = None,
        prev_action: bool = True,
        prev_reward: bool = True,
        activation: str = "relu",
        norm: Norm = None,
        init: Init = None,
        residual: bool = False,
    ) -> None:
        super().__init__(obs_shape, action_shape, action_space=action_space)
        has_image = any(is_image(leaf) for _, leaf in shape_leaves(obs_shape))
        if encoder_hidden_sizes is None and not has_image:
            encoder_hidden_sizes = (64,)
        self.encoder = make_encoder(
            obs_shape,
            encoder_hidden_sizes,
            conv_layers=conv_layers,
            activation=activation,
            norm=norm,
            init=init,
        )
        if residual and hidden_size != self.encoder.out_features:
            raise ValueError(
                f"with residual=True, hidden_size must be {self.encoder.out_features}, as many "
                f"features as the encoder has, got {hidden_size}"
            )
        self.residual = residual
        n_seen = self.encoder.out_features + int(prev_reward)
        if prev_action:
            n_seen += sum(part.n_logits + part.n_means for part in self.action_parts)
        self.core = RecurrentCore(n_seen, hidden_size, core=core, init=init)
        takes = {"is_first": True, "prev_action": prev_action, "prev_reward": prev_reward}
        self.act_inputs = tuple(name for name, is_wanted in takes.items() if is_wanted)

    def initial_state(self, n: int) -> torch.Tensor:
        """Return the state at the start of ``n`` episodes: zeros ``[n, S]``, on the CPU."""
        return torch.zeros(n, self.core.state_size)

    def forward(
        self,
        obs: Nested,
        state: torch.Tensor,
        *,
        is_first: torch.Tensor,
        prev_action: Nested | None = None,
        prev_reward: torch.Tensor | None = None,
        within_episode: bool = False,
        acts_only: bool = False,
    ) -> dict[str, torch.Tensor]:
        """Return the head's outputs, and ``state`` ``[B, S]``, the state after the last step.

        With ``acts_only``, what acting does not need may be left out, such as values. The other
        arguments are those of :meth:`remember`.
        """
        features, state = self.remember(
            obs,
            state,
            is_first=is_first,
            prev_action=prev_action,
            prev_reward=prev_reward,
            within_episode=within_episode,
        )
        output = self.run_head(features, obs, acts_only=acts_only)
        output["state"] = state
        return output

    def remember(
        self,
        obs: Nested,
        state: torch.Tensor,
        *,
        is_first: torch.Tensor,
        prev_action: Nested | None = None,
        prev_reward: torch.Tensor | None = None,
        within_episode: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return features ``[T, B, F]``, and the state ``[B, S]`` after the last step.

        Args:
            obs: sequences ``[T, B, …]``, time first, or a single step ``[B, …]``, of which features
                are ``[B, F]``.
            state: ``[B, S]``, before the first step.
            is_first: ``[T, B]`` (or ``[B]``) bool, the first steps of episodes, before which the
                state is set to zeros.
            prev_action: ``[T, B, …]``, raw (see :class:`~dmiddleware.policy.ActionCodec`).
            prev_reward: ``[T, B]``.
            within_episode: whether each sequence is within one episode, and ``state`` is right, so
                that no state has to be set to zeros. Such sequences run faster.
        """
        parts = [self.encoder(obs)]
        while is_first.dim() < parts[0].dim() - 1:  # it holds for all agents
            is_first = is_first.unsqueeze(-1).expand(parts[0].shape[: is_first.dim() + 1])
        if prev_action is not None:
            numbers = action_features(self.action_parts, prev_action)
            parts.append(numbers.masked_fill(is_first.unsqueeze(-1), 0.0))
        if prev_reward is not None:
            parts.append(prev_reward.unsqueeze(-1))
        x = torch.cat(parts, -1)
        is_step = x.dim() == state.dim()
        if is_step:
            x, is_first = x.unsqueeze(0), is_first.unsqueeze(0)
        features, state = self.core(x, state, None if within_episode else is_first)
        features = features[0] if is_step else features
        if self.residual:
            features = features + parts[0]
        return features, state

    def run_head(
        self, features: torch.Tensor, obs: Nested, *, acts_only: bool
    ) -> dict[str, torch.Tensor]:
        """Return the head's outputs.

        Args:
            features: of the core, ``[…, F]``.
            obs: what the network saw.
            acts_only: whether what acting does not need may be left out.
        """
        output: dict[str, torch.Tensor] = self.head(features)
        return output


@MODEL_REGISTRY.register("recurrent_actor_critic")
class RecurrentActorCritic(RecurrentNetwork):
    """An :class:`ActorCritic` on the features of a memory that both share.

    Args:
        obs_shape: see :mod:`dmiddleware.model.spaces`.
        action_shape: see :mod:`dmiddleware.model.spaces`; the number of actions if these are
            discrete.
        head_hidden_sizes: width of each linear layer after the core, for actor and critic each.
        activation: see :func:`~dmiddleware.model.layers.activation_of`.
        norm: ``"layer"``, ``"batch_renorm"`` or None.
        init: ``"orthogonal"`` (the last layers with gains 0.01 and 1) or None (torch's own).
        log_std_init: logarithm of the first standard deviation of continuous actions.
        critic_obs_shape: what the critic sees beside the features of the memory, if it is not what
            the actor sees; None: these features alone. A value of both is unbiased (Baisero and
            Amato, "Unbiased Asymmetric Reinforcement Learning under Partial Observability", 2022).
        **options: the other options of :class:`RecurrentNetwork`.

    Example:
        >>> network = RecurrentActorCritic(4, 2, prev_reward=False)
        >>> rows = {"prev_action": torch.zeros(10, 3).long(), "is_first": torch.zeros(10, 3) > 0}
        >>> output = network(torch.zeros(10, 3, 4), network.initial_state(3), **rows)
        >>> output["value"].shape, output["state"].shape
        (torch.Size([10, 3]), torch.Size([3, 256]))
    """

    def __init__(
        self,
        obs_shape: ObsShape,
        action_shape: ActionShape,
        *,
        head_hidden_sizes: Sequence[int] = (64,),
        activation: str = "tanh",
        norm: Norm = None,
        init: Init = "orthogonal",
        log_std_init: float = 0.0,
        critic_obs_shape: ObsShape | None = None,
        **options: Any,
    ) -> None:
        shared: dict[str, Any] = {"activation": activation, "norm": norm, "init": init}
        super().__init__(obs_shape, action_shape, **shared, **options)
        head_shape: Any = self.core.out_features
        self.divides = critic_obs_shape is not None
        if self.divides:
            self.critic_obs_shape = as_obs_shape(critic_obs_shape)
            head_shape = {_MEMORY: head_shape}
            shared["critic_obs_shape"] = {**head_shape, _OBS: self.critic_obs_shape}
        self.head: ActorCritic = ActorCritic(
            head_shape,
            action_shape,
            action_space=self.action_space,
            encoder_hidden_sizes=head_hidden_sizes,
            log_std_init=log_std_init,
            **shared,
        )

    def run_head(
        self, features: torch.Tensor, obs: Nested, *, acts_only: bool
    ) -> dict[str, torch.Tensor]:
        """Return the distribution, and the value unless the network ``acts_only``."""
        inputs: Any = {_MEMORY: features, _OBS: obs} if self.divides else features
        return self.head.compute_actor(inputs) if acts_only else self.head(inputs)


@MODEL_REGISTRY.register("recurrent_q_network")
class RecurrentQNetwork(RecurrentNetwork):
    """A :class:`QNetwork` on the features of a memory, for R2D2.

    Kapturowski et al., "Recurrent Experience Replay in Distributed RL" (R2D2, 2019), section 2.3:
    an LSTM and a dueling head, with the previous action and reward as further inputs.

    Args:
        obs_shape: see :mod:`dmiddleware.model.spaces`.
        action_shape: number of actions.
        head_hidden_sizes: width of each linear layer after the core.
        dueling: separate streams for the state's value and the actions' advantages.
        activation: see :func:`~dmiddleware.model.layers.activation_of`.
        norm: ``"layer"``, ``"batch_renorm"`` or None.
        init: ``"orthogonal"`` or None (torch's own).
        **options: the other options of :class:`RecurrentNetwork`; actions are discrete.
    """

    def __init__(
        self,
        obs_shape: ObsShape,
        action_shape: int,
        *,
        head_hidden_sizes: Sequence[int] = (64,),
        dueling: bool = True,
        activation: str = "relu",
        norm: Norm = None,
        init: Init = None,
        **options: Any,
    ) -> None:
        shared: dict[str, Any] = {"activation": activation, "norm": norm, "init": init}
        super().__init__(obs_shape, action_shape, action_space="discrete", **shared, **options)
        self.head = QNetwork(
            self.core.out_features,
            action_shape,
            encoder_hidden_sizes=head_hidden_sizes,
            dueling=dueling,
            **shared,
        )


class _RecurrentActor(RecurrentNetwork):
    """A :class:`GaussianActor` on the features of a memory."""

    def __init__(
        self,
        obs_shape: ObsShape,
        action_shape: ActionShape,
        *,
        hidden_sizes: Sequence[int],
        deterministic: bool,
        activation: str,
        **options: Any,
    ) -> None:
        super().__init__(obs_shape, action_shape, activation=activation, **options)
        self.head = GaussianActor(
            self.core.out_features,
            self.action_parts[0].sizes[0],
            hidden_sizes=hidden_sizes,
            deterministic=deterministic,
            activation=activation,
        )


class _RecurrentCritics(RecurrentNetwork):
    """A :class:`QEnsemble` on the features of a memory."""

    def __init__(
        self,
        obs_shape: ObsShape,
        action_shape: ActionShape,
        *,
        hidden_sizes: Sequence[int],
        n_critics: int,
        activation: str,
        **options: Any,
    ) -> None:
        super().__init__(obs_shape, action_shape, activation=activation, **options)
        self.head = QEnsemble(
            self.core.out_features,
            self.action_parts[0].sizes[0],
            hidden_sizes=hidden_sizes,
            n_critics=n_critics,
            activation=activation,
        )

    def forward(  # type: ignore[override]  # the head takes actions, too
        self, obs: Nested, state: torch.Tensor, *, action: torch.Tensor, **inputs: Any
    ) -> dict[str, torch.Tensor]:
        """Return ``q`` ``[n_critics, T, B]`` of actions ``[T, B, A]``, and the ``state``."""
        features, state = self.remember(obs, state, **inputs)
        q: torch.Tensor = self.head(features.flatten(0, -2), action.flatten(0, -2))
        return {"q": q.reshape(-1, *features.shape[:-1]), "state": state}


@MODEL_REGISTRY.register("recurrent_actor_q")
class RecurrentActorQ(Network):
    """An :class:`ActorQ` whose actor and critics have a memory each.

    Ni et al., "Recurrent Model-Free RL Can Be a Strong Baseline for Many POMDPs" (2022), section
    4.2: memories that actor and critics do not share, and that see the previous action and reward.

    Args:
        obs_shape: see :mod:`dmiddleware.model.spaces`.
        action_shape: see :mod:`dmiddleware.model.spaces`.
        action_space: ``"continuous"``.
        actor_hidden_sizes: width of each hidden layer after the actor's memory.
        critic_hidden_sizes: width of each hidden layer after the critics' memory.
        n_critics: the number of critics, which share a memory.
        activation: see :func:`~dmiddleware.model.layers.activation_of`.
        deterministic: the actor has no standard deviation.
        critic_obs_shape: what the critics see, if it is not what the actor sees; None:
            ``obs_shape``.
        **options: the other options of :class:`RecurrentNetwork`, for both memories.

    Attributes:
        actor: a :class:`RecurrentNetwork` with the outputs of a :class:`GaussianActor`.
        critic: a :class:`RecurrentNetwork` whose forward takes the keyword ``action``
            ``[T, B, A]``, and returns ``q`` ``[n_critics, T, B]`` and the ``state``.

    Raises:
        SpaceError: for actions that are not a Box.

    Example:
        >>> network = RecurrentActorQ(3, 2, prev_reward=False)
        >>> rows = {"prev_action": torch.zeros(10, 4, 2), "is_first": torch.zeros(10, 4) > 0}
        >>> obs, state = torch.zeros(10, 4, 3), network.critic.initial_state(4)
        >>> network.critic(obs, state, action=torch.zeros(10, 4, 2), **rows)["q"].shape
        torch.Size([2, 10, 4])
    """

    options_of: ClassVar[type[nn.Module]] = RecurrentNetwork
    """The parts that take further options."""

    def __init__(
        self,
        obs_shape: ObsShape,
        action_shape: ActionShape,
        *,
        action_space: ActionKind = "continuous",
        actor_hidden_sizes: Sequence[int] = (128,),
        critic_hidden_sizes: Sequence[int] = (128,),
        n_critics: int = 2,
        activation: str = "relu",
        deterministic: bool = False,
        critic_obs_shape: ObsShape | None = None,
        **options: Any,
    ) -> None:
        super().__init__(
            obs_shape, action_shape, action_space=action_space, critic_obs_shape=critic_obs_shape
        )
        (part, *more) = self.action_parts
        if more or part.kind != "continuous":
            raise SpaceError(
                f"RecurrentActorQ needs a Box of actions, got {action_space}; use recurrent PPO or "
                "R2D2 for others"
            )
        shared: dict[str, Any] = {
            **options,
            "action_space": action_space,
            "activation": activation,
        }
        self.actor: RecurrentNetwork = _RecurrentActor(
            obs_shape,
            action_shape,
            hidden_sizes=actor_hidden_sizes,
            deterministic=deterministic,
            **shared,
        )
        self.critic: RecurrentNetwork = _RecurrentCritics(
            self.critic_obs_shape,
            action_shape,
            hidden_sizes=critic_hidden_sizes,
            n_critics=n_critics,
            **shared,
        )

    def forward(self, obs: Nested, state: torch.Tensor, **inputs: Any) -> dict[str, torch.Tensor]:
        """Return what the actor does; see :meth:`RecurrentNetwork.forward`."""
        output: dict[str, torch.Tensor] = self.actor(obs, state, **inputs)
        return output
