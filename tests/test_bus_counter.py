"""What crosses the bus in a step of a chain whose envs return tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dmiddleware import Task
from dmiddleware.data import PrioritySampler
from dmiddleware.env import VectorEnvManager
from dmiddleware.policy import (
    A2CPolicy,
    C51Policy,
    CrossQPolicy,
    DDPGPolicy,
    DiscreteSACPolicy,
    DQNPolicy,
    FastTD3Policy,
    IMPALAPolicy,
    IQNPolicy,
    PPOPolicy,
    PQNPolicy,
    QRDQNPolicy,
    R2D2Policy,
    RecurrentPPOPolicy,
    SACPolicy,
    TD3Policy,
    TQCPolicy,
)
from middleware import Experiment, InteractionEvaluator, OnlineRLContext, SnapshotSaver
from middleware.record.run_folder import RunFolder
from tests.bus_counter import DEVICE, Bus, chain, count, env_of, on_device, place
from tests.variants import mostly_slow

SEQUENCES = {"unroll_len": 3, "stride": 2, "sampler": PrioritySampler()}
SMALL_MEMORY = {"encoder_hidden_sizes": [16], "hidden_size": 16}
SMALL_ATOMS = {
    "v_min": -400.0,
    "v_max": 0.0,
    "n_atoms": 11,
    "actor_hidden_sizes": [16],
    "critic_hidden_sizes": [16],
}
_ONCE = {"epoch_per_collect": 1}  # after 100 updates, the policy looks for skipped steps


@pytest.mark.parametrize(
    ("kind", "options"),
    mostly_slow(
        [
            (PPOPolicy, _ONCE),
            (DQNPolicy, {"priority": True, "buffer": {"sampler": PrioritySampler()}}),
            (SACPolicy, {}),
            (PQNPolicy, _ONCE),
            (PQNPolicy, {**_ONCE, "obs_norm": True}),
            (PPOPolicy, {**_ONCE, "obs_norm": True, "value_norm": True, "value_clip": 0.2}),
            (A2CPolicy, {}),
            (RecurrentPPOPolicy, _ONCE),
            (IMPALAPolicy, {}),
            (DQNPolicy, {}),
            (DQNPolicy, {"n_step": 3}),
            (R2D2Policy, {"burn_in": 2, "model": SMALL_MEMORY, "buffer": SEQUENCES}),
            (FastTD3Policy, {"n_step": 3, "model": SMALL_ATOMS}),
            (C51Policy, {"model": {"v_min": 0.0, "v_max": 200.0}}),
            (QRDQNPolicy, {}),
            (IQNPolicy, {}),
            (TD3Policy, {}),
            (DDPGPolicy, {}),
            (TQCPolicy, {}),
            (CrossQPolicy, {"model": {"critic_hidden_sizes": [64]}}),
            (DiscreteSACPolicy, {}),
        ],
        keep=4,
    ),
)
def test_a_step_of_the_chain_waits_once_and_copies_nothing(kind: Any, options: dict[str, Any]):
    bus = count(kind, env_num=16, **options)
    assert bus.waits.total() <= 1, bus.waits
    assert bus.copies.total() == 0, bus.copies


def test_target_kl_waits_once_an_epoch():
    bus = count(PPOPolicy, env_num=16, epoch_per_collect=2, target_kl=1e9)
    assert bus.waits.total() <= 1 + 2 * 2, bus.waits  # the flags, and whether steps were skipped
    assert bus.copies.total() == 0, bus.copies


def test_a_device_ends_the_epochs_and_counts_the_updates_that_it_made():
    """The batch has 8 minibatches, of which the first few move the policy too far."""
    with on_device(), Bus().watched(), Task(OnlineRLContext(), seed=0) as task:
        policy, parts = chain(
            PPOPolicy, env_num=16, epoch_per_collect=3, target_kl=1e-3, learning_rate=1e-2
        )
        place(policy)
        for part in parts:
            task.use(part)
        task.run(1)
        outputs = task.ctx.train_output
        stops = [bool(output["kl_stop"]) for output in outputs]
        assert len(stops) == 8
        assert 0 < stops.count(False) < 8
        assert task.ctx.train_iter == policy.train_iter == stops.count(False)


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


@pytest.mark.parametrize(
    ("kind", "options"),
    mostly_slow(
        [
            (DQNPolicy, {"n_step": 3, "obs_norm": True}),
            (
                PPOPolicy,
                {
                    "obs_norm": True,
                    "reward_norm": True,
                    "recompute_advantage": True,
                    "epoch_per_collect": 2,
                },
            ),
            (RecurrentPPOPolicy, {"epoch_per_collect": 1}),
            (DDPGPolicy, {"noise": "ou"}),
        ],
        keep=1,
    ),
)
def test_a_whole_run_mixes_no_tensors_of_both_sides(
    kind: Any, options: dict[str, Any], tmp_path, monkeypatch
):
    monkeypatch.setattr(env_of(kind), "max_steps", 12)
    for resumes in (False, True):
        bus = Bus()
        with on_device(), bus.watched(), Task(OnlineRLContext(), seed=0) as task:
            policy, parts = chain(kind, env_num=8, **options)
            place(policy)
            for part in parts:
                task.use(part)
            envs = VectorEnvManager(lambda: env_of(kind)(2, DEVICE), 2, seed=1)
            run = RunFolder.create("run", root=tmp_path, resume=resumes)
            saver = SnapshotSaver(run, every_env_step=1)
            task.use(InteractionEvaluator(policy, envs, n_episode=2, every_env_step=1))
            task.use(Experiment(run, policy)).use(saver)
            if resumes:
                assert saver.resume(task)
                place(policy)
            bus.is_strict = True
            task.run(2)
