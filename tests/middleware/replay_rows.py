"""Collected rows, in each form of the context, and a middleware that writes them."""

from typing import Any

import numpy as np
import torch

from dmiddleware.data import as_tree
from middleware import OnlineRLContext


def rows(*lead: int, **more: torch.Tensor) -> Any:
    n = int(torch.tensor(lead).prod())
    return as_tree(
        {
            "obs": torch.arange(float(n)).reshape(*lead, 1),
            "reward": torch.ones(lead),
            "done": torch.zeros(lead, dtype=torch.bool),
            **more,
        }
    )


def write(**fields: Any) -> Any:
    def write(ctx: OnlineRLContext) -> None:
        for name, value in fields.items():
            setattr(ctx, name, value)

    write.writes = tuple(fields)  # type: ignore[attr-defined]
    return write


def transition(number: int) -> dict[str, Any]:
    return {"obs": np.array([number], np.float32), "reward": 1.0, "done": number == 2}


FORMS = {
    "dictionaries": [transition(number) for number in range(3)],
    "batches": tuple(as_tree(transition(number)) for number in range(3)),
    "columns": {
        "obs": torch.arange(3.0)[:, None],
        "reward": torch.ones(3),
        "done": np.arange(3) == 2,
    },
}
