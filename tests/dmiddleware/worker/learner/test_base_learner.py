from __future__ import annotations

import functools
import logging
import signal
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch
from tensorboardX import SummaryWriter

from dmiddleware.classic import as_learn_mode
from dmiddleware.errors import (
    CheckpointMismatch,
    ConfigError,
    NonFiniteLoss,
    PolicyOutputError,
    RegistryError,
)
from dmiddleware.files.checkpoint import load_checkpoint
from dmiddleware.policy import DQNPolicy
from dmiddleware.process.signals import Terminated
from dmiddleware.tree import as_tree
from dmiddleware.worker.learner import BaseLearner, LearnerHook, create_learner
from tests.tensorboard_events import values_in


def sample(index=0, **extra):
    rng = np.random.default_rng(index)
    return {
        "obs": rng.normal(size=4).astype(np.float32),
        "next_obs": rng.normal(size=4).astype(np.float32),
        "action": index % 2,
        "reward": float(index),
        "done": False,
        "terminated": False,
        "truncated": False,
        "collect_iter": 3,
        **extra,
    }


def samples(n=8, **extra):
    return [sample(index, **extra) for index in range(n)]


class Tape(LearnerHook):
    def __init__(self, tape, position, priority=30):
        super().__init__(f"tape {position}", priority, position=position)
        self.tape = tape

    def __call__(self, engine):
        self.tape.append((self.position, engine.train_iter))


class Stub:
    """A learn mode whose forward returns the given answers in turn."""

    def __new__(cls, answers):
        answers = iter(answers)
        model = {"obs_shape": 4, "action_shape": 2, "encoder_hidden_sizes": [4]}
        mode = as_learn_mode(DQNPolicy({"model": model}), user="test")
        return mode._replace(
            forward=lambda data, **kwargs: next(answers), monitor_vars=lambda: ["total_loss"]
        )


@pytest.fixture
def learner(dqn_policy, tmp_path):
    with BaseLearner({}, dqn_policy.learn_mode, exp_name=str(tmp_path / "run")) as learner:
        yield learner


def scalars(folder):
    """Read a TensorBoard folder: (tag, step) → value."""
    return {(value.tag, step): value.simple_value for step, value in values_in(folder)}


def test_training_updates_the_policy_and_counts(learner, dqn_policy):
    before = [p.clone() for p in dqn_policy.learn_mode.state_dict()["model"].values()]
    output = learner.train(samples(), envstep=40)
    after = dqn_policy.learn_mode.state_dict()["model"].values()
    assert any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert output["total_loss"] > 0
    assert learner.train_iter == learner.last_iter.val == int(learner.last_iter) == 1
    assert learner.collector_envstep == 40
    learner.train(samples())
    assert learner.collector_envstep == 40  # not passed: unchanged


def test_a_schedule_by_env_step_follows_the_steps_that_the_learner_is_told(tmp_path):
    learn = {"learning_rate": {"start": 1e-2, "end": 0.0, "decay": 100}}
    policy = DQNPolicy({"model": {"obs_shape": 4, "action_shape": 2}, **learn})
    with BaseLearner({}, policy, exp_name=str(tmp_path)) as learner:
        with pytest.raises(ConfigError, match="by env_step needs that counter"):
            learner.train(samples())
        rates = [learner.train(samples(), envstep)["cur_lr"] for envstep in (25, 50, -1)]
    assert rates == pytest.approx([7.5e-3, 5e-3, 5e-3])


def test_hooks_run_around_each_iteration_in_order(learner):
    tape = []
    for position in ("after_iter", "before_iter", "before_run", "after_run"):
        learner.register_hook(Tape(tape, position))
    learner.train(samples())
    learner.train(samples())
    assert tape == [("before_iter", 0), ("after_iter", 0), ("before_iter", 1), ("after_iter", 1)]


def test_a_list_of_outputs_counts_one_each(tmp_path):
    outputs = [{"total_loss": 1.0}, {"total_loss": 2.0}, {"total_loss": 6.0}]
    with BaseLearner({}, Stub([outputs]), exp_name=str(tmp_path)) as learner:
        tape = []
        learner.register_hook(Tape(tape, "after_iter"))
        learner.train(samples())
        assert learner.train_iter == 3
        assert [at for _, at in tape] == [0, 1, 2]
        assert learner.monitor.mean("total_loss") == 3.0


def test_keyword_arguments_reach_the_forward(tmp_path):
    got = {}
    mode = Stub([{}])._replace(forward=lambda data, **kwargs: got.update(kwargs) or {})
    with BaseLearner({}, mode, exp_name=str(tmp_path)) as learner:
        learner.train([], policy_kwargs={"beta": 0.5})
    assert got == {"beta": 0.5}


def test_priorities_come_with_the_buffer_positions_of_their_rows(tmp_path):
    priority = torch.ones(2)
    with BaseLearner({}, Stub([{"priority": priority}] * 2), exp_name=str(tmp_path)) as learner:
        learner.train(
            [
                sample(0, replay_buffer_idx=7, replay_unique_id="a"),
                sample(1, replay_buffer_idx=9, replay_unique_id="b"),
            ]
        )
        assert learner.priority_info == {
            "priority": priority,
            "replay_buffer_idx": [7, 9],
            "replay_unique_id": ["a", "b"],
        }
        learner.train(as_tree({"index": torch.tensor([3, 4])}))
        assert learner.priority_info["index"].tolist() == [3, 4]
        assert "priority" not in learner.log_buffer["scalar"]


def test_outputs_are_sorted_into_the_log_buffer(tmp_path):
    output = {
        "total_loss": 1.5,
        "tensor": torch.tensor(2.0),
        "numpy": np.float32(3),
        "count": np.int64(4),
        "array": np.array([5.0]),
        "name": np.str_("no number"),
        "text": "no number",
        "[scalars]q": {"a": 1.0, "b": 2.0},
        "[histogram]weights": np.arange(3),
    }
    cfg = {"hook": {"log_show_after_iter": None}}
    with BaseLearner(cfg, Stub([output]), exp_name=str(tmp_path)) as learner:
        learner.train(samples())
        buffer = learner.log_buffer
        time = buffer["scalar"].pop("train_time")
        assert time > 0
        assert buffer["scalar"] == {
            "total_loss": 1.5, "tensor": 2.0, "numpy": 3.0, "count": 4, "array": 5.0,
        }  # fmt: skip
        assert buffer["scalars"] == {"q": {"a": 1.0, "b": 2.0}}
        assert list(buffer["histogram"]) == ["weights"]


def test_averages_are_logged_and_the_log_buffer_is_cleared(tmp_path, caplog):
    outputs = [
        {"total_loss": float(i), "[scalars]q": {"a": 1.0}, "[histogram]w": np.arange(4.0)}
        for i in range(5)
    ]
    cfg = {"hook": {"log_show_after_iter": 2}, "log_policy": False}
    caplog.set_level(logging.INFO)
    with BaseLearner(cfg, Stub(outputs), exp_name=str(tmp_path)) as learner:
        for step in range(5):
            learner.train(samples(), envstep=10 * step)
            assert learner.log_buffer == {"scalar": {}, "scalars": {}, "histogram": {}}
    found = scalars(tmp_path / "log" / "learner")
    assert found["learner_iter/total_loss_avg", 2] == 0.5
    assert found["learner_iter/total_loss_avg", 4] == 1.5
    assert found["learner_step/total_loss_avg", 30] == 1.5
    assert ("learner_iter/train_time_avg", 2) in found
    assert ("learner/w", 4) in found
    assert found["learner_iter/q", 4] == 1.0
    assert sum("iteration" in record.message for record in caplog.records) == 2
    assert "total_loss" in caplog.records[-1].message


def test_nothing_is_plotted_over_unknown_env_steps(tmp_path):
    cfg = {"hook": {"log_show_after_iter": 1}}
    with BaseLearner(cfg, Stub([{"total_loss": 1.0}]), exp_name=str(tmp_path)) as learner:
        learner.train(samples())
    tags = {tag for tag, _ in scalars(tmp_path / "log" / "learner")}
    assert "learner_iter/total_loss_avg" in tags
    assert not any(tag.startswith("learner_step") for tag in tags)


def test_only_rank_0_writes(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    cfg = {"hook": {"log_show_after_iter": 1, "save_ckpt_after_iter": 1}}
    learner = BaseLearner(
        cfg, Stub([{"total_loss": 1.0}]), dist_info=(1, 2), exp_name=str(tmp_path)
    )
    with learner:
        learner.train(samples())
        assert learner.log_buffer["scalar"] == {}
        assert (learner.rank, learner.world_size) == (1, 2)
    assert list(tmp_path.iterdir()) == []
    assert not caplog.records


def test_values_are_averaged_over_ranks_before_they_are_logged(tmp_path):
    with BaseLearner({}, Stub([]), dist_info=(0, 2), exp_name=str(tmp_path)) as learner:
        names = [hook.name for hook in learner.hooks["after_iter"]]
    assert names == ["log_reduce_after_iter", "log_show_after_iter", "save_ckpt_after_iter"]


def test_checkpoints_carry_policy_iteration_and_step(learner, dqn_policy, tmp_path):
    learner.train(samples(), envstep=64)
    learner.save_checkpoint()
    learner.save_checkpoint("ckpt_best.safetensors")
    learner.save_checkpoint("by_hand")
    folder = tmp_path / "run" / "ckpt_learner"
    assert {file.name for file in folder.iterdir()} == {
        "iteration_1.safetensors",
        "ckpt_best.safetensors",
        "by_hand.safetensors",
    }
    state = load_checkpoint(folder / "ckpt_best.safetensors")
    assert (state["last_iter"], state["last_step"]) == (1, 64)
    assert set(dqn_policy.learn_mode.state_dict()) <= set(state)
    assert learner.ckpt_name is None


def test_checkpoints_are_saved_every_n_iterations(dqn_policy, tmp_path):
    cfg = {"hook": {"save_ckpt_after_iter": 2}}
    with BaseLearner(
        cfg, dqn_policy.learn_mode, exp_name=str(tmp_path), instance_name="second"
    ) as learner:
        for _ in range(5):
            learner.train(samples())
    names = {file.name for file in (tmp_path / "ckpt_second").iterdir()}
    assert names == {"iteration_2.safetensors", "iteration_4.safetensors"}
    assert load_checkpoint(tmp_path / "ckpt_second" / "iteration_4.safetensors")["last_iter"] == 4


def make_policy(width):
    model = {"obs_shape": 4, "action_shape": 2, "encoder_hidden_sizes": [width, 8]}
    return DQNPolicy({"model": model, "seed": 1})


def test_training_from_a_checkpoint_equals_uninterrupted_training(learner, dqn_policy, tmp_path):
    batches = [samples(8 + i) for i in range(4)]
    for batch in batches[:2]:
        learner.train(batch, envstep=10)
    learner.save_checkpoint("half")
    for batch in batches[2:]:
        learner.train(batch, envstep=20)

    other = make_policy(8)
    path = tmp_path / "run" / "ckpt_learner" / "half.safetensors"
    cfg = {"hook": {"load_ckpt_before_run": str(path)}}
    with BaseLearner(cfg, other.learn_mode, exp_name=str(tmp_path / "other")) as resumed:
        resumed.call_hook("before_run")
        assert (resumed.train_iter, resumed.collector_envstep) == (2, 10)
        for batch in batches[2:]:
            resumed.train(batch, envstep=20)
    mine, theirs = (p.learn_mode.state_dict()["model"] for p in (dqn_policy, other))
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_a_checkpoint_of_another_model_is_rejected(learner, tmp_path):
    learner.save_checkpoint("mine")
    path = tmp_path / "run" / "ckpt_learner" / "mine.safetensors"
    cfg = {"hook": {"load_ckpt_before_run": str(path)}}
    with (
        BaseLearner(cfg, make_policy(9).learn_mode, exp_name=str(tmp_path)) as other,
        pytest.raises(CheckpointMismatch),
    ):
        other.call_hook("before_run")


def source(n_batches=100, poison_at=None):
    """Return sample loaders; the rewards of batch ``poison_at`` are NaN."""
    given = []

    def get_data(n):
        given.append(n)
        reward = float("nan") if len(given) - 1 == poison_at else 1.0
        return [functools.partial(sample, i, reward=reward) for i in range(n)]

    return get_data


def test_a_subclass_may_define_where_its_data_come_from(dqn_policy, tmp_path):
    class Feeding(BaseLearner):
        def get_data(self, batch_size):
            self.batch_size = batch_size
            return [functools.partial(sample, i) for i in range(batch_size)]

    cfg = {"train_iterations": 2}
    with Feeding(cfg, dqn_policy.learn_mode, exp_name=str(tmp_path)) as learner:
        learner.setup_dataloader()
        learner.start()
        assert (learner.train_iter, learner.batch_size) == (2, dqn_policy.spec.settings.batch_size)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_start_runs_all_iterations_between_the_run_hooks(dqn_policy, tmp_path, num_workers):
    cfg = {"train_iterations": 3, "dataloader": {"num_workers": num_workers}}
    with BaseLearner(cfg, dqn_policy.learn_mode, exp_name=str(tmp_path)) as learner:
        tape = []
        for position in ("before_run", "after_run"):
            learner.register_hook(Tape(tape, position))
        learner.get_data = source()
        learner.setup_dataloader()
        assert not learner.learn_info["learner_done"]
        learner.start()
        assert tape == [("before_run", 0), ("after_run", 3)]
        info = learner.learn_info
        assert (info["learner_step"], info["learner_done"], info["envstep"]) == (3, True, -1)
        assert learner.monitor.latest("data_time") > 0
    assert (tmp_path / "ckpt_learner" / "iteration_3.safetensors").is_file()


def test_a_checkpoint_is_saved_when_the_loss_is_not_finite(dqn_policy, tmp_path):
    cfg = {"train_iterations": 5}
    with BaseLearner(cfg, dqn_policy.learn_mode, exp_name=str(tmp_path)) as learner:
        learner.get_data = source(poison_at=2)
        learner.setup_dataloader()
        with pytest.raises(NonFiniteLoss, match="3"):
            learner.start()
        assert not learner.learn_info["learner_done"]
    state = load_checkpoint(tmp_path / "ckpt_learner" / "iteration_2.safetensors")
    assert state["last_iter"] == 2
    assert all(torch.isfinite(tensor).all() for tensor in state["model"].values())


def test_a_run_that_fails_to_start_overwrites_no_checkpoint(dqn_policy, tmp_path):
    cfg = {"hook": {"load_ckpt_before_run": str(tmp_path / "missing.safetensors")}}
    with BaseLearner(cfg, dqn_policy.learn_mode, exp_name=str(tmp_path)) as learner:
        learner.last_iter.update(7)
        learner.ckpt_name = "latest"
        learner.save_checkpoint()
        learner.last_iter.update(0)
        learner.get_data = source()
        learner.setup_dataloader()
        with pytest.raises(FileNotFoundError):
            learner.start()
    assert load_checkpoint(tmp_path / "ckpt_learner" / "latest.safetensors")["last_iter"] == 7


def test_a_failed_save_does_not_hide_the_first_error(dqn_policy, tmp_path, monkeypatch):
    (tmp_path / "ckpt_learner").write_text("a file where the folder should be")
    with BaseLearner({}, dqn_policy.learn_mode, exp_name=str(tmp_path)) as learner:
        learner.get_data = source(poison_at=0)
        learner.setup_dataloader()
        with pytest.raises(NonFiniteLoss) as caught:
            learner.start()
    assert "could not be saved" in caught.value.__notes__[-1]


class Send(LearnerHook):
    """Sends this process a signal before the first iteration."""

    def __init__(self, number):
        super().__init__("send", 30, position="before_iter")
        self.number = number

    def __call__(self, engine):
        if engine.train_iter == 0:
            signal.raise_signal(self.number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_waits_for_the_iteration_and_saves(dqn_policy, tmp_path, number, caplog):
    received = []
    before = signal.signal(number, lambda number, frame: received.append(number))
    try:
        with BaseLearner({}, dqn_policy.learn_mode, exp_name=str(tmp_path)) as learner:
            learner.register_hook(Send(number))
            learner.get_data = source()
            learner.setup_dataloader()
            with pytest.raises((KeyboardInterrupt, Terminated)):
                learner.start()
            assert learner.train_iter == 1
    finally:
        signal.signal(number, before)
    # In the end the previous handler receives the signal.
    assert received == [number]
    assert (tmp_path / "ckpt_learner" / "iteration_1.safetensors").is_file()
    assert f"received {number.name}" in caplog.text


def test_ctrl_c_saves_and_raises_keyboard_interrupt_once(dqn_policy, tmp_path):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with BaseLearner({}, dqn_policy.learn_mode, exp_name=str(tmp_path)) as learner:
            learner.register_hook(Send(signal.SIGINT))
            learner.get_data = source()
            learner.setup_dataloader()
            with pytest.raises(KeyboardInterrupt) as caught:
                learner.start()
    finally:
        signal.signal(signal.SIGINT, before)
    assert caught.value.__context__ is None
    assert (tmp_path / "ckpt_learner" / "iteration_1.safetensors").is_file()


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_learner_that_waits_for_data(tmp_path, number):
    script = textwrap.dedent(
        """
        import sys, threading
        from dmiddleware.policy import DQNPolicy
        from dmiddleware.worker.learner import BaseLearner, LearnerHook

        class Started(LearnerHook):
            def __call__(self, engine):
                print("started", flush=True)

        def get_data(n):
            threading.Event().wait(60)

        model = {"obs_shape": 4, "action_shape": 2, "encoder_hidden_sizes": [4]}
        policy = DQNPolicy({"model": model})
        cfg = {"dataloader": {"num_workers": 1}}
        learner = BaseLearner(cfg, policy, exp_name=sys.argv[1])
        learner.get_data = get_data
        learner.setup_dataloader()
        learner.register_hook(Started("started", 1, position="before_run"))
        learner.start()
        """
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout.readline() == "started\n"
        process.send_signal(number)
        assert process.wait(timeout=60) == (143 if number == signal.SIGTERM else -number)
    assert (tmp_path / "ckpt_learner" / "iteration_0.safetensors").is_file()


def test_a_wrong_argument_of_a_method_is_rejected(learner):
    with pytest.raises(ConfigError, match="batch"):
        learner.train(None)
    with pytest.raises(ConfigError, match="after_iter"):
        learner.call_hook("after_itr")
    with pytest.raises(ConfigError, match="get_data"):
        learner.get_data = [1, 2]


def test_samples_must_be_callables_that_load_them(learner):
    learner.get_data = lambda batch_size: [sample()] * batch_size
    learner.setup_dataloader()
    with pytest.raises(ConfigError, match="callables"):
        learner.start()


def test_a_missing_argument_is_named(tmp_path):
    with BaseLearner({}, exp_name=str(tmp_path)) as learner:
        with pytest.raises(ConfigError, match="no policy"):
            learner.train(samples())
        with pytest.raises(ConfigError, match="get_data"):
            learner.setup_dataloader()
        with pytest.raises(ConfigError, match="no data"):
            learner.start()


def test_a_config_with_an_unknown_key_is_rejected():
    with pytest.raises(ConfigError, match="train_iterations"):
        BaseLearner({"train_iteration": 5})
    with pytest.raises(ConfigError, match="train_iterations must be"):
        BaseLearner({"train_iterations": -1})


def test_a_given_writer_is_used_and_not_closed(tmp_path, dqn_policy):
    writer = SummaryWriter(str(tmp_path / "tb"))
    with BaseLearner({}, dqn_policy.learn_mode, writer, exp_name=str(tmp_path)) as learner:
        assert learner.tb_logger is writer
    writer.add_scalar("still", 1.0, 1)
    writer.close()
    assert ("still", 1) in scalars(tmp_path / "tb")


def test_the_policy_is_logged_when_it_is_set(dqn_policy, caplog, tmp_path):
    caplog.set_level(logging.INFO)
    with BaseLearner({}, exp_name=str(tmp_path)) as learner:
        learner.policy = dqn_policy.learn_mode
        assert learner.policy.monitor_vars() == list(learner.monitor.names)[2:]
    assert "DQNPolicy" in caplog.text


def test_a_policy_is_accepted_as_its_learn_mode(dqn_policy, tmp_path):
    with BaseLearner({}, dqn_policy, exp_name=str(tmp_path)) as learner:
        assert learner.policy.spec is dqn_policy.spec
        learner.policy = dqn_policy
        assert learner.policy.spec is dqn_policy.spec


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"policy": "dqn"}, "policy"),
        ({"tb_logger": "runs/x"}, "SummaryWriter"),
        ({"exp_name": None}, "exp_name"),
        ({"dist_info": 1}, "world_size"),
        ({"dist_info": (2, 2)}, "world_size"),
    ],
)
def test_an_argument_of_the_wrong_type_is_rejected(tmp_path, arguments, word):
    with pytest.raises(ConfigError, match=word):
        BaseLearner({}, **{"exp_name": str(tmp_path), **arguments})


def test_the_collect_mode_is_not_a_learn_mode(dqn_policy, tmp_path):
    with pytest.raises(ConfigError, match="learn_mode"):
        BaseLearner({}, dqn_policy.collect_mode, exp_name=str(tmp_path))


def test_learners_are_created_by_name(dqn_policy, tmp_path):
    with create_learner(
        {"type": "base"}, policy=dqn_policy.learn_mode, exp_name=str(tmp_path)
    ) as learner:
        assert type(learner) is BaseLearner
    with pytest.raises(RegistryError, match="base"):
        create_learner({"type": "bas"})
    with pytest.raises(ConfigError, match="no key type"):
        create_learner({})


def test_defaults_are_those_of_the_classic_learner():
    cfg = BaseLearner.default_config()
    assert cfg.train_iterations == 1e9
    assert cfg.dataloader.num_workers == 0
    assert cfg.hook == {
        "load_ckpt_before_run": "",
        "log_show_after_iter": 100,
        "save_ckpt_after_iter": 10000,
        "save_ckpt_after_run": True,
    }
    assert cfg.cfg_type == "BaseLearnerDict"


def test_an_output_with_kl_stop_is_not_an_iteration(tmp_path):
    answers = [{"total_loss": 1.0}, [{"total_loss": 2.0}, {"total_loss": 3.0, "kl_stop": True}]]
    with BaseLearner({}, Stub(answers), exp_name=str(tmp_path)) as learner:
        tape = []
        learner.register_hook(Tape(tape, "after_iter"))
        learner.train(samples())
        learner.train(samples())
        assert learner.train_iter == 2
        assert tape == [("after_iter", 0), ("after_iter", 1)]


def test_priorities_of_several_outputs_come_with_their_rows(tmp_path):
    outputs = [{"priority": torch.tensor([1.0, 2.0])}, {"priority": torch.tensor([3.0, 4.0])}]
    with BaseLearner({}, Stub([outputs, outputs]), exp_name=str(tmp_path)) as learner:
        learner.train([sample(i, replay_buffer_idx=10 + i) for i in range(4)])
        assert learner.priority_info["priority"].tolist() == [1.0, 2.0, 3.0, 4.0]
        assert learner.priority_info["replay_buffer_idx"] == [10, 11, 12, 13]
        learner.train(as_tree({"index": torch.tensor([7, 8, 9, 6])}))
        assert learner.priority_info["priority"].tolist() == [1.0, 2.0, 3.0, 4.0]
        assert learner.priority_info["index"].tolist() == [7, 8, 9, 6]


def test_priorities_of_some_rows_come_with_those_rows_only(tmp_path):
    outputs = [{"priority": torch.tensor([5.0]), "priority_index": torch.tensor([2])}]
    with BaseLearner({}, Stub([outputs, outputs]), exp_name=str(tmp_path)) as learner:
        learner.train([sample(i, replay_unique_id=f"u{i}") for i in range(4)])
        assert learner.priority_info["replay_unique_id"] == ["u2"]
        learner.train(as_tree({"index": torch.tensor([7, 8, 9, 6])}))
        assert learner.priority_info["index"].tolist() == [9]


@pytest.mark.parametrize("answer", [None, 0.5, [None]])
def test_a_forward_that_returns_no_dictionary_is_rejected(tmp_path, answer):
    with (
        BaseLearner({}, Stub([answer]), exp_name=str(tmp_path)) as learner,
        pytest.raises(PolicyOutputError, match="total_loss"),
    ):
        learner.train(samples())
