"""What learners and hooks written for DI-engine rely on."""

import logging
import threading

import pytest
import torch
from torch import nn

from dmiddleware.errors import ConfigError, RegistryError
from dmiddleware.policy import Policy
from dmiddleware.worker import EasyTimer, SendPolicyHook
from dmiddleware.worker.learner import (
    BaseLearner,
    LearnerHook,
    LoadCkptHook,
    LogReduceHook,
    LogShowHook,
    SaveCkptHook,
    build_learner_hook_by_cfg,
    merge_hooks,
    register_learner_hook,
)

DEADLINE_S = 30.0


class Counting(Policy):
    """Counts its updates."""

    config = {"learn": {"batch_size": 4}}

    def learn(self, batch):
        self.train_iter += 1
        return {"total_loss": float(self.train_iter)}


def make_learner(cfg=None, **kwargs):
    quiet = {
        "log_show_after_iter": None, "save_ckpt_after_iter": None, "save_ckpt_after_run": False,
    }  # fmt: skip
    policy = Counting({}, model=nn.Linear(1, 1), modes=["learn"])
    return BaseLearner({"hook": quiet, **(cfg or {})}, policy, **kwargs)


def load():
    return {"reward": torch.tensor(1.0)}


class Custom(LearnerHook):
    """Takes what every hook takes."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.kwargs = kwargs

    def __call__(self, engine):
        pass


class Plain(LearnerHook):
    def __init__(self, name, priority, position):
        super().__init__(name, priority, position=position)

    def __call__(self, engine):
        pass


def test_a_custom_hook_is_built_with_or_without_ext_args():
    register_learner_hook("custom", Custom)
    register_learner_hook("plain", Plain)
    hooks = build_learner_hook_by_cfg(
        {
            "a": {"type": "custom", "position": "before_run", "ext_args": {"x": 1}},
            "b": {"type": "plain", "position": "before_run"},
        }
    )["before_run"]
    assert [hook.priority for hook in hooks] == [100, 100]
    assert hooks[0].kwargs["ext_args"] == {"x": 1}
    assert "after_iter" in LearnerHook.positions


def test_a_type_that_is_registered_again_replaces_the_earlier_one(caplog):
    class Later(Custom):
        pass

    register_learner_hook("replaced", Custom)
    register_learner_hook("replaced", Custom)
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        register_learner_hook("replaced", Later)
    assert "replaces" in caplog.text
    cfg = {"x": {"type": "replaced", "position": "after_run"}}
    assert type(build_learner_hook_by_cfg(cfg)["after_run"][0]) is Later


def test_an_unknown_type_names_the_nearest():
    with pytest.raises(RegistryError, match="log_reduce"):
        build_learner_hook_by_cfg({"x": {"type": "log_reducer", "position": "after_run"}})


@pytest.mark.parametrize(("freq", "reduced"), [(1, [1, 2, 3, 4]), (2, [2, 4])])
def test_logs_are_reduced_every_few_iterations(freq, reduced, monkeypatch):
    seen = []
    monkeypatch.setattr(
        "dmiddleware.worker.learner.hooks.mean_over_ranks",
        lambda part: seen.append(dict(part)) or part,
    )
    learner = make_learner()
    learner.register_hook(LogReduceHook("r", 10, position="after_iter", ext_args={"freq": freq}))
    for _ in range(4):
        learner.train([load()])
    assert [part["total_loss"] for part in seen if "total_loss" in part] == reduced


def test_the_short_form_of_reducing_takes_a_frequency():
    hooks = build_learner_hook_by_cfg({"log_reduce_after_iter": 3})["after_iter"]
    assert type(hooks[0]) is LogReduceHook
    with pytest.raises(ConfigError, match="freq"):
        build_learner_hook_by_cfg({"save_ckpt_after_iter": True})


def test_every_rank_of_a_multitask_pipeline_logs_to_its_own_folder(tmp_path):
    for rank in (0, 1):
        cfg = {"is_multitask_pipeline": True, "log_to_file": False}
        with make_learner(cfg, dist_info=(rank, 2), exp_name=str(tmp_path)) as learner:
            assert learner.monitors
            assert not learner.only_monitor_rank0
            learner.tb_logger.add_scalar("x", 1.0, 1)
    assert sorted(path.name for path in (tmp_path / "log").iterdir()) == [
        "learner_rank0",
        "learner_rank1",
    ]


def test_buffers_and_priorities_can_be_replaced():
    learner = make_learner()
    learner.priority_info = {"priority": [1.0]}
    assert learner.learn_info["priority_info"] == {"priority": [1.0]}
    buffer = {"scalar": {"mine": 1.0}, "scalars": {}, "histogram": {}}
    learner.log_buffer = buffer
    assert learner.log_buffer is buffer
    assert learner.only_monitor_rank0


def test_the_constructor_calls_the_overridable_steps_once():
    calls = []

    class Own(BaseLearner):
        def _setup_hook(self):
            calls.append("hook")
            super()._setup_hook()

        def _setup_wrapper(self):
            calls.append("wrapper")
            super()._setup_wrapper()

    policy = Counting({}, model=nn.Linear(1, 1), modes=["learn"])
    learner = Own({}, policy)
    learner.train([load()])
    assert calls == ["hook", "wrapper"]
    assert learner.monitor.val["total_loss"]() == 1.0
    assert learner.monitor.val["train_time"]() >= 0.0


def test_values_are_monitored_in_the_classic_notation():
    monitor = make_learner().monitor
    monitor.total_loss = 1.0
    monitor.total_loss = 2.0
    assert monitor.avg["total_loss"]() == 1.5
    assert monitor.val["total_loss"]() == 2.0
    with pytest.raises(AttributeError, match="total_loss"):
        monitor.total_los = 1.0


@pytest.mark.parametrize("num_workers", [0, 2])
def test_closing_from_another_thread_ends_the_training_in_order(num_workers):
    ended = []

    class Ended(LearnerHook):
        def __call__(self, engine):
            ended.append(engine.train_iter)

    waiting, released = threading.Event(), threading.Event()

    def get_data(batch_size):
        if learner.train_iter + asked.count(1) >= 3:
            waiting.set()
            released.wait(DEADLINE_S)
        asked.append(1)
        return [load] * batch_size

    asked: list[int] = []
    learner = make_learner({"dataloader": {"num_workers": num_workers}})
    learner.register_hook(Ended("ended", 10, position="after_run"))
    learner.get_data = get_data
    learner.setup_dataloader()
    thread = threading.Thread(target=learner.start)
    thread.start()
    assert waiting.wait(DEADLINE_S)
    learner.close()
    thread.join(DEADLINE_S)
    released.set()
    assert not thread.is_alive()
    assert learner.learn_info["learner_done"]
    assert ended == [learner.train_iter]


def test_a_closed_learner_starts_again_only_with_a_new_loader():
    learner = make_learner({"train_iterations": 2})
    learner.get_data = lambda batch_size: [load] * batch_size
    learner.setup_dataloader()
    learner.close()
    with pytest.raises(ConfigError, match="setup_dataloader"):
        learner.start()
    learner.setup_dataloader()
    learner.start()
    learner.close()
    assert learner.train_iter == 2


def test_a_worker_loads_samples_in_chunks():
    second_started = threading.Event()

    def first():
        # Another worker would start the second sample meanwhile.
        assert not second_started.wait(0.2)
        return load()

    def second():
        second_started.set()
        return load()

    batches = iter([[first, second, load, load]])
    cfg = {"train_iterations": 1, "dataloader": {"num_workers": 2, "chunk_size": 2}}
    with make_learner(cfg) as learner:
        learner.get_data = lambda batch_size: next(batches, [load] * batch_size)
        learner.setup_dataloader()
        learner.start()
    assert second_started.is_set()
    learner = make_learner({"dataloader": {"chunk_size": 3}})
    learner.get_data = lambda batch_size: [load] * batch_size
    with pytest.raises(ConfigError, match="chunk_size"):
        learner.setup_dataloader()


class OwnHooks(BaseLearner):
    """Sets its hooks up as DI-engine does."""

    def _setup_hook(self):
        assert set(self._hooks) == set(LearnerHook.positions)
        self._hooks = merge_hooks(self._hooks, build_learner_hook_by_cfg(self._cfg.hook))
        self._hooks = merge_hooks(
            self._hooks,
            {
                **{position: [] for position in LearnerHook.positions},
                "before_run": [Custom("mine", 1, position="before_run")],
            },
        )


class OwnWrapper(BaseLearner):
    """Times its training as DI-engine does."""

    def _setup_wrapper(self):
        self._wrapper_timer = EasyTimer()
        self.train = self._time_wrapper(self.train, "scalar", "whole_time")


class NoWrapper(BaseLearner):
    def _setup_wrapper(self):
        pass


@pytest.mark.parametrize("cls", [OwnHooks, OwnWrapper, NoWrapper, BaseLearner])
@pytest.mark.parametrize("rank_and_size", [(0, 1), (1, 2)])
def test_setups_that_replace_those_of_the_base_class_train(cls, rank_and_size, tmp_path):
    policy = Counting({}, model=nn.Linear(1, 1), modes=["learn"])
    cfg = {"hook": {"log_show_after_iter": None, "log_reduce_after_iter": rank_and_size[1] == 1}}
    with cls(cfg, policy, dist_info=rank_and_size, exp_name=str(tmp_path)) as learner:
        learner.train([load()])
        learner.get_data = lambda size: [load] * size
        learner.setup_dataloader()
        learner.train([load()])
        learner.save_checkpoint()
        assert learner.train_iter == 2
        assert learner.log_buffer["scalar"]["train_time"] >= 0.0
        if cls is OwnHooks:
            assert next(hook.name for hook in learner.hooks["before_run"]) == "mine"
        if cls is OwnWrapper:
            assert learner.log_buffer["scalar"]["whole_time"] >= 0.0


@pytest.mark.parametrize("cls", [BaseLearner, OwnHooks])
def test_several_ranks_average_their_logs_however_hooks_are_set_up(cls, tmp_path):
    with cls({}, dist_info=(0, 2), exp_name=str(tmp_path)) as learner:
        names = [hook.name for hook in learner.hooks["after_iter"]]
    assert names.index("log_reduce_after_iter") < names.index("log_show_after_iter")


@pytest.mark.parametrize(
    "hook", [LoadCkptHook, SaveCkptHook, LogShowHook, LogReduceHook, SendPolicyHook, Custom]
)
def test_every_hook_ignores_further_keywords(hook):
    assert hook("mine", 20, position="after_iter", extra=1).position == "after_iter"


def test_a_loading_hook_ignores_a_frequency():
    cfg = {"type": "load_ckpt", "position": "before_run", "ext_args": {"freq": 1}}
    hook = build_learner_hook_by_cfg({"mine": cfg})["before_run"][0]
    hook(make_learner())
    with pytest.raises(ConfigError, match="load_path"):
        LoadCkptHook("mine", 20, position="before_run", ext_args={"load_pth": "x"})


def test_a_position_is_also_called_by_name():
    learner, seen = make_learner(), []
    hook = Custom("mine", 1, position="before_run")
    hook.__class__ = type("Seen", (Custom,), {"__call__": lambda self, engine: seen.append(1)})
    learner.register_hook(hook)
    learner.call_hook("before_run")
    learner.call_hook(position="before_run")
    learner.call_hook(name="before_run")
    assert len(seen) == 3
    with pytest.raises(TypeError, match="both"):
        learner.call_hook(position="before_run", name="before_run")


def test_the_logger_makes_tables(tmp_path):
    logger = make_learner(exp_name=str(tmp_path)).logger
    values = {"total_loss_avg": 0.25, "cur_lr_avg": 1e-3}
    for text in (logger.get_tabulate_vars_hor(values), logger.get_tabulate_vars(values)):
        assert "total_loss_avg" in text and "0.25" in text
