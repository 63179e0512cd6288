"""Networks: encoders for vectors, images and nested observations, and the heads on top."""

from dmiddleware.model.action_mask import action_mask_of, masked_logit
from dmiddleware.model.actor_critic import Actor, ActorCritic, FeatureActor, PhasicActorCritic
from dmiddleware.model.actor_q import (
    ActorQ,
    CategoricalActorQ,
    EnsembleLinear,
    GaussianActor,
    QEnsemble,
)
from dmiddleware.model.actor_qv import ActorQV, BoundedGaussianActor, StateValue
from dmiddleware.model.bcq import ActionVAE, BCQNetwork, Perturbation
from dmiddleware.model.decision_transformer import DecisionTransformer
from dmiddleware.model.discrete_actor_q import DiscreteActorQ
from dmiddleware.model.encoders import (
    ConvLayers,
    ImageEncoder,
    NestedEncoder,
    OneHotEncoder,
    ResidualSection,
    VectorEncoder,
    make_encoder,
)
from dmiddleware.model.hybrid_q import HybridQNetwork, ParameterActor
from dmiddleware.model.layers import (
    MLP,
    BatchRenorm,
    Init,
    NoisyLinear,
    NoisyMLP,
    Norm,
    activation_of,
    orthogonal_init,
)
from dmiddleware.model.model_registry import MODEL_REGISTRY, create_model
from dmiddleware.model.network import Network
from dmiddleware.model.q_network import (
    CategoricalQNetwork,
    FractionQuantileQNetwork,
    ImplicitQuantileQNetwork,
    QNetwork,
    QuantileQNetwork,
)
from dmiddleware.model.recurrent import (
    CoreKind,
    Recurrent,
    RecurrentActorCritic,
    RecurrentActorQ,
    RecurrentCore,
    RecurrentNetwork,
    RecurrentQNetwork,
)
from dmiddleware.model.recurrent_team import (
    RecurrentAgentActorCritic,
    RecurrentCentralizedActorCritic,
    RecurrentQMIXNetwork,
)
from dmiddleware.model.spaces import (
    ActionKind,
    ActionPart,
    ActionShape,
    ObsShape,
    action_kind_of,
    action_parts,
    action_shape_of,
    as_obs_shape,
    obs_shape_of,
)
from dmiddleware.model.team import (
    AgentActorCritic,
    CentralizedActorCritic,
    CentralQNetwork,
    QMIXNetwork,
    TeamNetwork,
    VDNNetwork,
    WQMIXNetwork,
    team_shapes,
)

__all__ = [
    "QNetwork",
    "CategoricalQNetwork",
    "QuantileQNetwork",
    "ImplicitQuantileQNetwork",
    "FractionQuantileQNetwork",
    "Actor",
    "ActorCritic",
    "FeatureActor",
    "PhasicActorCritic",
    "ActorQ",
    "CategoricalActorQ",
    "DiscreteActorQ",
    "GaussianActor",
    "QEnsemble",
    "EnsembleLinear",
    "ActorQV",
    "BoundedGaussianActor",
    "StateValue",
    "BCQNetwork",
    "ActionVAE",
    "Perturbation",
    "HybridQNetwork",
    "ParameterActor",
    "DecisionTransformer",
    "Network",
    "Recurrent",
    "RecurrentNetwork",
    "RecurrentActorCritic",
    "RecurrentActorQ",
    "RecurrentQNetwork",
    "RecurrentCore",
    "CoreKind",
    "TeamNetwork",
    "VDNNetwork",
    "QMIXNetwork",
    "CentralQNetwork",
    "WQMIXNetwork",
    "AgentActorCritic",
    "CentralizedActorCritic",
    "RecurrentAgentActorCritic",
    "RecurrentCentralizedActorCritic",
    "RecurrentQMIXNetwork",
    "team_shapes",
    "MLP",
    "NoisyLinear",
    "NoisyMLP",
    "VectorEncoder",
    "OneHotEncoder",
    "ImageEncoder",
    "ResidualSection",
    "ConvLayers",
    "NestedEncoder",
    "make_encoder",
    "MODEL_REGISTRY",
    "create_model",
    "ObsShape",
    "ActionKind",
    "ActionShape",
    "ActionPart",
    "action_parts",
    "as_obs_shape",
    "obs_shape_of",
    "action_shape_of",
    "action_kind_of",
    "action_mask_of",
    "masked_logit",
    "Init",
    "Norm",
    "BatchRenorm",
    "activation_of",
    "orthogonal_init",
]
