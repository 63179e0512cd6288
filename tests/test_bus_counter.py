"""What crosses the bus in a step of a chain whose envs return tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dmiddleware.data import PrioritySamplerSettings
from dmiddleware.policy import (
    C51Policy,
    CrossQPolicy,
    DDPGPolicy,
    DiscreteSACPolicy,
    DQNPolicy,
    IQNPolicy,
    PPOPolicy,
    PQNPolicy,
    QRDQNPolicy,
    SACPolicy,
    TD3Policy,
    TQCPolicy,
)
from tests.bus_counter import DEVICE, Bus, count


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (PPOPolicy, {}),
        (PQNPolicy, {}),
        (PQNPolicy, {"obs_norm": True}),
        (PPOPolicy, {"obs_norm": True, "value_norm": True, "value_clip": 0.2}),
        (DQNPolicy, {}),
        (DQNPolicy, {"n_step": 3}),
        (DQNPolicy, {"priority": PrioritySamplerSettings()}),
        (C51Policy, {"model": {"v_min": 0.0, "v_max": 200.0}}),
        (QRDQNPolicy, {}),
        (IQNPolicy, {}),
        (SACPolicy, {}),
        (TD3Policy, {}),
        (DDPGPolicy, {}),
        (TQCPolicy, {}),
        (CrossQPolicy, {"model": {"critic_hidden_sizes": [64]}}),
        (DiscreteSACPolicy, {}),
    ],
)
def test_a_step_of_the_chain_waits_once_and_copies_nothing(kind: Any, options: dict[str, Any]):
    bus = count(kind, **options)
    assert bus.waits.total() <= 1, bus.waits
    assert bus.copies.total() == 0, bus.copies


def test_the_counter_sees_reads_and_copies():
    bus = Bus()
    with bus.watched():
        here, there = torch.arange(3.0), torch.arange(3.0, device=DEVICE)
        assert there.device == torch.device(DEVICE)
        assert here.device == torch.device("cpu")
        _ = there + 1.0
        assert bus.waits.total() == bus.copies.total() == 0
        _ = there + here
        _ = here.to(DEVICE)
        assert (bus.copies.total(), bus.copied_bytes) == (2, 24)
        _ = there.sum().item(), there[there > 1], there.cpu(), there.tolist(), bool(there[0])
        assert bus.waits.total() == 5
        torch.empty(3).copy_(there)
        assert bus.waits.total() == 6
