from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dmiddleware.data import PrioritySampler, TensorBuffer
from dmiddleware.errors import ConfigError, StructureError
from dmiddleware.files.serialization import pack
from dmiddleware.pipeline import Task
from dmiddleware.rl import q_target, sequence_priority
from middleware import OnlineRLContext, Role, data_pusher, priority_calculator
from middleware.collect import StepCollector
from middleware.learn import OffPolicyLearner
from middleware.record.snapshot import SnapshotSaver
from tests.dmiddleware.recurrent_policy import GRUPolicy, GRUSettings, masked_cartpole
from tests.middleware.replay_rows import FORMS, rows, transition, write


def test_trajectories_are_pushed_as_one_batch(run_steps: Any) -> None:
    buffer = TensorBuffer(100, seed=0)
    run_steps(write(trajectories=rows(3, 2)), data_pusher(buffer), n_steps=2)
    assert buffer.count() == 12
    assert buffer.get(range(12))["obs"].flatten().tolist() == [0, 1, 2, 3, 4, 5] * 2


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("what", ["trajectories", "episodes"])
def test_transitions_are_pushed_in_every_form_of_the_context(
    run_steps: Any, what: Any, form: str
) -> None:
    buffer = TensorBuffer(100, seed=0)
    collected: Any = FORMS[form]
    run_steps(
        write(**{what: collected if what == "trajectories" else [collected]}),
        data_pusher(buffer, what=what),
    )
    held = buffer.get(range(3))
    assert held["obs"].flatten().tolist() == [0.0, 1.0, 2.0]
    assert held["done"].tolist() == [False, False, True]


def test_a_step_that_collected_nothing_pushes_nothing(run_steps: Any) -> None:
    buffer = TensorBuffer(100, seed=0)
    run_steps(write(trajectories=[]), data_pusher(buffer))
    assert buffer.count() == 0


@pytest.mark.parametrize(
    ("collected", "message"),
    [
        (3, "must be a batch or a list of transitions"),
        ([transition(0), "x"], "item 1 of ctx.trajectories is 'x'"),
        ([transition(0), {**transition(1), "more": 1.0}], "more"),
        ([transition(0), {**transition(1), "obs": np.zeros(2, np.float32)}], "cannot be stacked"),
        ([{**transition(0), "info": "text"}], "'info'"),
    ],
)
def test_what_is_not_a_list_of_transitions_is_refused(
    run_steps: Any, collected: Any, message: str
) -> None:
    with pytest.raises(StructureError, match=message):
        run_steps(write(trajectories=collected), data_pusher(TensorBuffer(100)))


def test_other_middleware_take_lists_of_transitions_too(run_steps: Any) -> None:
    buffer = TensorBuffer(100, sampler=PrioritySampler(alpha=1.0, eps=1e-9), seed=0)
    run_steps(
        write(trajectories=FORMS["dictionaries"]),
        priority_calculator(lambda batch: (batch["obs"][..., 0] == 2.0).float()),
        data_pusher(buffer),
    )
    assert buffer.sample(3)["obs"].unique().tolist() == [2.0]


def test_episodes_are_pushed_one_by_one(run_steps: Any) -> None:
    buffer = TensorBuffer(100, seed=0)
    episodes = [rows(3), rows(5)]
    run_steps(write(episodes=episodes), data_pusher(buffer, what="episodes"))
    assert buffer.count() == 8


def test_batch_of_another_structure_is_rejected_and_the_leaf_named(run_steps: Any) -> None:
    buffer = TensorBuffer(100)
    run_steps(write(trajectories=rows(3, 2)), data_pusher(buffer))
    other = rows(3, 2, obs=torch.zeros(3, 2, 7))
    with pytest.raises(StructureError, match="'obs'"):
        run_steps(write(trajectories=other), data_pusher(buffer))
    assert buffer.count() == 6


def test_column_priority_becomes_the_priority_in_the_buffer(run_steps: Any) -> None:
    buffer = TensorBuffer(100, sampler=PrioritySampler(alpha=1.0, eps=1e-9), seed=0)
    run_steps(
        write(trajectories=rows(2, 2)),
        priority_calculator(lambda batch: (batch["obs"][..., 0] == 2.0).float()),
        data_pusher(buffer),
    )
    batch = buffer.sample(4)
    assert "priority" not in batch
    assert batch["obs"].unique().tolist() == [2.0]


def test_priorities_of_rows_that_do_not_fit_are_left_out(run_steps: Any) -> None:
    buffer = TensorBuffer(3, sampler=PrioritySampler(alpha=1.0, eps=1e-9), seed=0)
    run_steps(
        write(trajectories=rows(8)),
        priority_calculator(lambda batch: (batch["obs"][..., 0] == 6.0).float()),
        data_pusher(buffer),
    )
    assert buffer.sample(3)["obs"].unique().tolist() == [6.0]


def test_priorities_of_a_wrong_shape_are_rejected(run_steps: Any) -> None:
    with pytest.raises(StructureError, match=r"shape \(2,\) for rows of shape \(2, 3\)"):
        run_steps(write(trajectories=rows(2, 3)), priority_calculator(lambda batch: torch.ones(2)))


def test_priorities_are_float32_without_gradient(run_steps: Any) -> None:
    scale = torch.tensor(2.0, requires_grad=True, dtype=torch.float64)
    ctx = run_steps(
        write(trajectories=rows(2, 3)), priority_calculator(lambda batch: batch["reward"] * scale)
    )
    priority = ctx.trajectories["priority"]
    assert priority.dtype == torch.float32
    assert not priority.requires_grad
    assert priority.tolist() == [[2.0] * 3] * 2


def test_argument_that_is_not_a_buffer_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"must be a TensorBuffer.* got \[\]"):
        data_pusher([])  # type: ignore[arg-type]


def test_pusher_reads_what_it_pushes() -> None:
    trajectories: Any = data_pusher(TensorBuffer(1))
    episodes: Any = data_pusher(TensorBuffer(1), what="episodes")
    assert trajectories.reads == ("trajectories",)
    assert episodes.reads == ("episodes",)
    estimated: Any = data_pusher(TensorBuffer(1), what="train_data")
    assert estimated.reads == ("train_data",)
    assert trajectories.roles == (Role.LEARNER,)


def test_unknown_field_to_push_is_rejected() -> None:
    with pytest.raises(
        ValueError, match="one of 'trajectories', 'episodes', 'train_data', got 'obs'"
    ):
        data_pusher(TensorBuffer(1), what="obs")  # type: ignore[arg-type]


BURN_IN = 4
PARTS = slice(None, BURN_IN), slice(BURN_IN, None)


class RecurrentQSettings(GRUSettings):
    """The settings of :class:`RecurrentQ`."""

    batch_size = 16


class RecurrentQ(GRUPolicy):
    """Learns Q-values over sequences, from the stored state, with the priorities of R2D2."""

    cfg: RecurrentQSettings

    def learn(self, batch: Any) -> dict[str, Any]:
        assert batch["obs"].shape == (BURN_IN + 8, 16, 2)
        names = ("obs", "prev_action", "is_first")
        burn_in, learned = ({x: batch[x][part] for x in names} for part in PARTS)
        with torch.no_grad():
            state = self.model.unroll(burn_in, batch["state"])["state"][-1]
        q = self.model.unroll(learned, state)["logit"]
        taken = q.gather(-1, batch["action"][BURN_IN:, :, None]).squeeze(-1)[:-1]
        target = q_target(
            q.detach()[1:],
            batch["reward"][BURN_IN:-1],
            batch["terminated"][BURN_IN:-1],
            discount=0.9,
        )
        mask = batch["mask"][BURN_IN + 1 :]
        error = (target - taken) * mask
        loss = (error.square().sum(0) * batch["weight"]).mean()
        self.components["net"].step(loss)
        self.train_iter += 1
        return {"total_loss": loss.item(), "priority": sequence_priority(error, mask)}


def recurrent_chain(envs: Any) -> tuple[TensorBuffer, RecurrentQ, list[Any]]:
    buffer = TensorBuffer(
        600,
        sampler=PrioritySampler(alpha=0.9),
        unroll_len=8,
        burn_in=BURN_IN,
        stride=4,
        start_columns=("state",),
        store_next_obs=False,
        seed=0,
    )
    policy = RecurrentQ()
    learner = OffPolicyLearner(policy, buffer, update_per_collect=2, learn_start=200)
    return buffer, policy, [StepCollector(policy, envs, n_sample=32), data_pusher(buffer), learner]


def test_a_recurrent_policy_learns_from_prioritized_sequences_with_stored_states(
    run_steps: Any,
) -> None:
    ctx = OnlineRLContext()
    ctx.trained_env_step = 0  # type: ignore[attr-defined]
    ctx.keep("trained_env_step")
    with masked_cartpole(4, seed=0) as envs:
        buffer, _, chain = recurrent_chain(envs)
        ctx = run_steps(*chain, n_steps=30, ctx=ctx)
    assert len(buffer) == 600  # it is full, and old rows have been overwritten
    assert ctx.trained_env_step == ctx.train_iter * 16 * 8 > 0
    mass = torch.as_tensor(buffer.state_dict()["sampler"]["mass"])
    starts = mass.nonzero().flatten()
    assert 600 / 4 <= len(starts) < 600 / 2  # every fourth row, and the first of each episode
    assert len(mass[starts].unique()) > 10


def test_recurrent_learning_that_is_resumed_equals_learning_that_was_never_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Otherwise the ids of the episodes of two runs differ, whatever the seeds.
    monkeypatch.setattr("secrets.randbits", lambda n_bits: 7)
    states = []
    for folder, parts in (("whole", (24,)), ("stopped", (15, 9))):
        for part in parts:
            envs = masked_cartpole(4, seed=0)
            buffer, policy, chain = recurrent_chain(envs)
            snapshots = SnapshotSaver(tmp_path / folder)
            with Task(OnlineRLContext(), seed=0) as task:
                for one in (snapshots, *chain):
                    task.use(one)
                snapshots.resume(task)
                task.run(max_step=part)
                snapshots.save(task)
        states.append(pack((buffer.state_dict(), policy.learn_mode.state_dict())))
    (whole, tensors), (stopped, others) = states
    assert whole == stopped
    assert all(torch.equal(tensor, others[name]) for name, tensor in tensors.items())
