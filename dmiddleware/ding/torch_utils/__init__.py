"""The face of ``ding.torch_utils``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from dmiddleware.ding.torch_utils.blocks import *  # noqa: F403
from dmiddleware.ding.torch_utils.training import *  # noqa: F403
from dmiddleware.ding.torch_utils.trees import *  # noqa: F403

_RECURRENT: Final = "use torch.nn.LSTM, or dmiddleware.model.RecurrentCore"
_ATTENTION: Final = "use torch.nn.TransformerEncoder, or dmiddleware.model.DecisionTransformer"
_CHECKPOINT: Final = "use torch.save and torch.load, or dmiddleware.data.save_checkpoint"
_VISION: Final = "use torchvision.models"

REFUSED: Final[Mapping[str, str]] = {
    "get_lstm": _RECURRENT,
    "GTrXL": _RECURRENT,
    "GRUGatingUnit": _RECURRENT,
    "Transformer": _ATTENTION,
    "ScaledDotProductAttention": _ATTENTION,
    "resnet18": _VISION,
    "ResNet": _VISION,
    "GumbelSoftmax": "use torch.nn.functional.gumbel_softmax",
    "SoftArgmax": "take the mean of the places, weighted by the softmax",
    "PopArt": "use the option normalize_reward of PPO",
    "LabelSmoothCELoss": "use torch.nn.CrossEntropyLoss(label_smoothing=...)",
    "SoftFocalLoss": "use torch.nn.CrossEntropyLoss",
    "build_ce_criterion": "use torch.nn.CrossEntropyLoss",
    "MultiLogitsLoss": "use torch.nn.CrossEntropyLoss",
    "build_checkpoint_helper": _CHECKPOINT,
    "auto_checkpoint": _CHECKPOINT,
    "CountVar": _CHECKPOINT,
    "CudaFetcher": "batches are moved by the policies; use a pinned torch DataLoader",
    "CategoricalPd": "use torch.distributions.Categorical",
    "CategoricalPdPytorch": "use torch.distributions.Categorical",
}
