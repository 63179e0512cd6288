import sys

import pytest
import torch
from easydict import EasyDict
from torch import nn

import dmiddleware.model as model
from dmiddleware.errors import ConfigError, RegistryError
from dmiddleware.model import MODEL_REGISTRY, Actor, ActorCritic, ActorQ, QNetwork, create_model


@pytest.mark.parametrize(
    ("name", "network"),
    [("q_network", QNetwork), ("actor", Actor), ("actor_critic", ActorCritic), ("actor_q", ActorQ)],
)
def test_the_stock_networks_are_registered(name, network):
    assert MODEL_REGISTRY.get(name) is network


def test_a_config_builds_its_network():
    cfg = EasyDict(
        type="q_network", obs_shape={"a": 4, "b": [1, 36, 36]}, action_shape=2, dueling=True
    )
    network = create_model(cfg)
    assert type(network) is QNetwork
    assert network.obs_shape == {"a": (4,), "b": (1, 36, 36)}
    assert network.value_head is not None
    assert cfg.type == "q_network"


def test_an_unknown_name_is_rejected_with_the_nearest():
    with pytest.raises(RegistryError, match=r"'q_netwrk'; did you mean q_network"):
        create_model({"type": "q_netwrk"})


def test_a_config_without_a_type_is_rejected():
    with pytest.raises(ConfigError, match=r"needs the key type, one of: .*q_network"):
        create_model({"obs_shape": 4})


def test_an_unknown_option_is_rejected_with_the_nearest():
    with pytest.raises(ConfigError, match=r"unknown key duelling; did you mean dueling\?"):
        create_model({"type": "q_network", "obs_shape": 4, "action_shape": 2, "duelling": True})


def test_a_missing_option_is_named():
    with pytest.raises(ConfigError, match="model 'q_network' needs action_shape; give it"):
        create_model({"type": "q_network", "obs_shape": 4})


def test_import_names_import_custom_networks(tmp_path, monkeypatch):
    (tmp_path / "networks_of_my_own.py").write_text(
        "from torch import nn\n"
        "from dmiddleware.model import MODEL_REGISTRY\n"
        "@MODEL_REGISTRY.register('my_own_network')\n"
        "class MyOwn(nn.Linear):\n"
        "    def __init__(self, **sizes):\n"
        "        super().__init__(**sizes)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    network = create_model(
        {
            "type": "my_own_network",
            "import_names": ["networks_of_my_own"],
            "in_features": 3,
            "out_features": 2,
        }
    )
    assert isinstance(network, nn.Linear)
    assert network(torch.zeros(1, 3)).shape == (1, 2)
    del sys.modules["networks_of_my_own"]


def test_the_public_names_are_these():
    assert set(model.__all__) == {
        "action_mask_of", "masked_logit", "QNetwork", "Actor", "ActorCritic", "ActorQ",
        "FeatureActor", "PhasicActorCritic", "CategoricalActorQ", "Network",
        "CategoricalQNetwork", "QuantileQNetwork", "GaussianActor", "QEnsemble", "EnsembleLinear",
        "BCQNetwork", "ActionVAE", "Perturbation", "HybridQNetwork", "ParameterActor",
        "DecisionTransformer", "ActorQV", "BoundedGaussianActor", "StateValue",
        "ImplicitQuantileQNetwork", "FractionQuantileQNetwork", "DiscreteActorQ",
        "NoisyLinear", "NoisyMLP",
        "RecurrentNetwork", "RecurrentActorCritic", "RecurrentActorQ",
        "RecurrentQNetwork", "RecurrentCore", "CoreKind", "ConvLayers",
        "Recurrent", "RecurrentAgentActorCritic", "RecurrentCentralizedActorCritic",
        "RecurrentQMIXNetwork",
        "BatchRenorm",
        "MLP", "VectorEncoder", "OneHotEncoder", "ImageEncoder", "NestedEncoder", "make_encoder",
        "ResidualSection",
        "MODEL_REGISTRY", "create_model",
        "ObsShape", "ActionKind",
        "as_obs_shape", "obs_shape_of", "action_shape_of", "action_kind_of",
        "ActionShape", "ActionPart", "action_parts",
        "Init", "Norm", "activation_of", "orthogonal_init",
        "AgentActorCritic",
        "CentralizedActorCritic",
        "QMIXNetwork", "CentralQNetwork", "WQMIXNetwork",
        "TeamNetwork",
        "VDNNetwork",
        "team_shapes",
    }  # fmt: skip
    assert all(hasattr(model, name) for name in model.__all__)
