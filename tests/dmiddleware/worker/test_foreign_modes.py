"""Modes that are not this project's own: every worker and middleware adopts them alike."""

from __future__ import annotations

from collections import namedtuple
from types import SimpleNamespace

import pytest
import torch

from dmiddleware import Task
from dmiddleware.classic import (
    Policy,
    as_collect_mode,
    as_eval_mode,
    as_learn_mode,
    create_policy,
)
from dmiddleware.classic.modes import spec_attribute
from dmiddleware.data import TensorBuffer
from dmiddleware.env import make_env_manager
from dmiddleware.errors import ConfigError
from dmiddleware.rollout import RolloutCollector, evaluate_episodes
from dmiddleware.worker import (
    BaseLearner,
    EpisodeSerialCollector,
    InteractionSerialEvaluator,
    SampleSerialCollector,
    ZerglingParallelCollector,
)
from middleware import (
    CkptSaver,
    OffPolicyLearner,
    OnlineRLContext,
    RunFolder,
    StepCollector,
    data_pusher,
)

LEARN = (
    "forward", "reset", "info", "monitor_vars", "get_attribute", "set_attribute", "state_dict",
    "load_state_dict",
)  # fmt: skip
COLLECT = (
    "forward", "process_transition", "get_train_sample", "reset", "get_attribute", "set_attribute",
    "state_dict", "load_state_dict",
)  # fmt: skip
EVAL = ("forward", "reset", "get_attribute", "set_attribute", "state_dict", "load_state_dict")

SMALL = {"obs_shape": 4, "action_shape": 2, "encoder_hidden_sizes": [8]}


@pytest.fixture
def envs():
    with make_env_manager("CartPole-v1", env_num=2, seed=0) as manager:
        yield manager


class Program:
    """What a program of DI-engine's puts into its modes: functions that know a few names."""

    def __init__(self, missing):
        self.missing = missing
        self.learned = []

    def get_attribute(self, name):
        cfg = {"learn": {"batch_size": 4}}
        known = {"n_sample": 8, "batch_size": 4, "unknown_elsewhere": 7, "cfg": cfg}
        if name in known:
            return known[name]
        if self.missing is None:
            return None
        raise self.missing(name)

    def learn(self, data):
        assert isinstance(data, list)
        self.learned.append(data)
        return {"total_loss": 0.5, "cur_lr": 0.1}

    def act(self, data, **kwargs):
        return {env_id: {"action": torch.tensor(0)} for env_id in data}

    def transition(self, obs, output, timestep):
        return {
            "obs": obs, "next_obs": timestep.obs, "action": output["action"],
            "reward": timestep.reward, "done": timestep.done,
        }  # fmt: skip

    def functions(self):
        return {
            "forward": self.act,
            "process_transition": self.transition,
            "get_train_sample": lambda transitions: transitions,
            "reset": lambda data_id=None: None,
            "info": lambda: "a foreign policy",
            "monitor_vars": lambda: ["cur_lr", "total_loss"],
            "get_attribute": self.get_attribute,
            "set_attribute": lambda name, value: None,
            "state_dict": lambda: {"model": {"w": torch.ones(1)}, "optimizer": {}},
            "load_state_dict": lambda state: None,
        }

    def mode(self, fields, kind=namedtuple):
        functions = {name: self.functions()[name] for name in fields}
        if fields is LEARN:
            functions["forward"] = self.learn
        return kind("Own", fields)(**functions) if kind is namedtuple else kind(**functions)


@pytest.fixture(params=[AttributeError, KeyError, NotImplementedError, None])
def program(request):
    return Program(request.param)


@pytest.mark.parametrize("kind", [namedtuple, SimpleNamespace])
def test_a_learner_adopts_a_foreign_mode(program, kind, tmp_path):
    with BaseLearner({}, program.mode(LEARN, kind), exp_name=str(tmp_path)) as learner:
        samples = [{"obs": torch.zeros(2), "IS": 1.0}]
        assert learner.train(samples, envstep=5)["total_loss"] == 0.5
        assert program.learned == [samples]
        assert learner.monitor.names[-1] == "total_loss"
        learner.get_data = lambda size: [lambda: {"obs": torch.zeros(2)}] * size
        learner.setup_dataloader()
        learner.save_checkpoint("own")
        assert learner.ckpt_dir.joinpath("own.safetensors").exists()


@pytest.mark.parametrize("kind", [namedtuple, SimpleNamespace])
def test_collectors_and_evaluators_adopt_a_foreign_mode(program, kind, envs, tmp_path):
    collect, evaluate = program.mode(COLLECT, kind), program.mode(EVAL, kind)
    with SampleSerialCollector({}, envs, collect, exp_name=str(tmp_path)) as collector:
        assert len(collector.collect()) == 8
    envs.launch()
    with EpisodeSerialCollector({}, envs, collect, exp_name=str(tmp_path)) as collector:
        assert len(collector.collect(2)) == 2
    envs.launch()
    adopted = as_collect_mode(collect, user="test"), as_eval_mode(evaluate, user="test")
    assert RolloutCollector(adopted[0], envs).collect(6)["reward"].numel() == 6
    assert evaluate_episodes(adopted[1], envs, 2).get_current_episode() == 2
    with InteractionSerialEvaluator(
        {"n_episode": 2}, envs, evaluate, exp_name=str(tmp_path)
    ) as evaluator:
        assert evaluator.eval()[1]["episode_count"] == 2


def test_a_parallel_collector_adopts_a_foreign_mode(program):
    env = {"id": "CartPole-v1", "env_num": 2, "manager": {"episode_num": 1}}
    collector = ZerglingParallelCollector({"env": env})
    samples = {}
    collector.policy = program.mode(COLLECT)
    collector.send_stepdata, collector.send_metadata = samples.__setitem__, lambda data: None
    collector.get_policy_update_info = lambda path: {"model": {}, "iter": 0}
    collector.start()
    assert samples


def test_a_chain_adopts_foreign_modes(program, envs):
    buffer = TensorBuffer(100, seed=0)
    learn = as_learn_mode(program.mode(LEARN), user="test")
    collect = as_collect_mode(program.mode(COLLECT), user="test")
    with RunFolder.create("run") as run, Task(OnlineRLContext()) as task:
        task.use(StepCollector(collect, envs, n_sample=8))
        task.use(data_pusher(buffer))
        task.use(OffPolicyLearner(learn, buffer))
        task.use(CkptSaver(learn, run, every_train_iter=1))
        task.run(max_step=2)
    assert [len(data) for data in program.learned] == [4, 4]


def test_a_foreign_learn_mode_may_ask_for_batches():
    program = Program(KeyError)
    functions = {name: program.functions()[name] for name in LEARN}
    functions["get_attribute"] = {"learn_from": "batch", "batch_size": 2}.__getitem__
    functions["forward"] = lambda batch: {"total_loss": float(batch["reward"].sum())}
    mode = as_learn_mode(namedtuple("Own", LEARN)(**functions), user="test")
    assert mode.forward([{"reward": 1.0}, {"reward": 2.0}])["total_loss"] == 3.0


def test_an_unknown_attribute_stays_an_error():
    for missing in (AttributeError, KeyError, NotImplementedError):
        for mode in (
            as_collect_mode(Program(missing).mode(COLLECT), user="test"),
            as_learn_mode(Program(missing).mode(LEARN), user="test"),
        ):
            assert mode.get_attribute("unknown_elsewhere") == 7
            with pytest.raises(missing):
                mode.get_attribute("nonsense")


def test_a_mode_of_another_kind_is_refused(envs, tmp_path):
    program = Program(KeyError)
    learn, collect = program.mode(LEARN), program.mode(COLLECT)
    with pytest.raises(ConfigError, match="learn_mode"):
        BaseLearner({}, collect, exp_name=str(tmp_path))
    with pytest.raises(ConfigError, match="collect_mode"):
        SampleSerialCollector({}, envs, learn, exp_name=str(tmp_path))
    with pytest.raises(ConfigError, match="eval_mode"):
        evaluate_episodes(learn, envs, 2)


class PerEnv(Policy):
    """A policy in DI-engine's style."""

    config = {"learn": {"batch_size": 4}}

    def default_model(self):
        return "q_network", []

    def _init_learn(self):
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.1)

    def _forward_learn(self, data):
        assert isinstance(data, list)
        loss = torch.stack([self._model(one["obs"][None])["logit"].sum() for one in data]).mean()
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        return {"total_loss": loss.item(), "cur_lr": 0.1}

    def _forward_collect(self, data, **kwargs):
        return {env_id: {"action": torch.tensor(0)} for env_id in data}

    def _process_transition(self, obs, policy_output, timestep):
        return {
            "obs": obs, "next_obs": timestep.obs, "action": policy_output["action"],
            "reward": timestep.reward, "done": timestep.done,
        }  # fmt: skip

    def _forward_eval(self, data):
        return {env_id: {"action": 0} for env_id in data}


class ClassicAttributes:
    """Attributes are looked up as DI-engine does it."""

    def _get_attribute(self, name):
        if hasattr(self, f"_get_{name}"):
            return getattr(self, f"_get_{name}")()
        if hasattr(self, f"_{name}"):
            return getattr(self, f"_{name}")
        raise NotImplementedError


class ClassicModes:
    """Modes are built of the methods themselves, by position."""

    @property
    def learn_mode(self):
        return Policy.learn_function(
            self._forward_learn, self._reset_learn, self.__repr__, self._monitor_vars_learn,
            self._get_attribute, self._set_attribute, self._state_dict_learn,
            self._load_state_dict_learn,
        )  # fmt: skip

    @property
    def collect_mode(self):
        return Policy.collect_function(
            self._forward_collect, self._process_transition, self._get_train_sample,
            self._reset_collect, self._get_attribute, self._set_attribute,
            self._state_dict_collect, self._load_state_dict_collect,
        )  # fmt: skip

    @property
    def eval_mode(self):
        return Policy.eval_function(
            self._forward_eval, self._reset_eval, self._get_attribute, self._set_attribute,
            self._state_dict_eval, self._load_state_dict_eval,
        )  # fmt: skip


def modes_by_hand(get_attribute):
    def function(*args, **kwargs):
        return {"total_loss": 0.0}

    for build, names in (
        (Policy.learn_function, LEARN),
        (Policy.collect_function, COLLECT),
        (Policy.eval_function, EVAL),
    ):
        functions = [get_attribute if name == "get_attribute" else function for name in names]
        yield build(*functions)


def test_a_mode_built_by_hand_knows_what_its_attributes_say(tmp_path):
    for mode in modes_by_hand(Program(KeyError).get_attribute):
        assert spec_attribute(mode.spec, "batch_size") == 4
        assert spec_attribute(mode.spec, "n_sample") == 8
    learn, *_ = modes_by_hand({"batch_size": 2}.__getitem__)
    with BaseLearner({"train_iterations": 1}, learn, exp_name=str(tmp_path)) as learner:
        learner.get_data = lambda batch_size: [lambda: {"obs": 0.0}] * batch_size
        learner.setup_dataloader()
        learner.start()
        assert learner.train_iter == 1


class ClassicTuples:
    """The modes are named tuples with the fields that DI-engine's have."""

    learn_function = namedtuple("learn_function", LEARN)
    collect_function = namedtuple("collect_function", COLLECT)
    eval_function = namedtuple("eval_function", EVAL)


def in_style(base, *styles):
    return type(f"{base.__name__}In", (*styles, base), {})


@pytest.mark.parametrize(
    "styles",
    [
        (ClassicAttributes,),
        (ClassicModes,),
        (ClassicTuples,),
        (ClassicModes, ClassicAttributes),
        (ClassicTuples, ClassicAttributes),
    ],
    ids=lambda styles: "+".join(style.__name__ for style in styles),
)
def test_policies_in_the_classic_style_act_and_learn_like_their_base(styles, envs, tmp_path):
    cfg = {"model": SMALL, "seed": 0, "learn": {"batch_size": 4}}

    def run(cls):
        policy, buffer = cls(cfg), TensorBuffer(100, seed=0)
        envs.seed(0)
        envs.launch() if envs.closed else envs.reset()
        collect = as_collect_mode(policy, user="test")
        rows = RolloutCollector(collect, envs).collect(12)
        evaluate = as_eval_mode(policy, user="test")
        episodes = evaluate_episodes(evaluate, envs, 2).get_episode_return()
        samples = SampleSerialCollector({}, envs, policy, exp_name=str(tmp_path)).collect(6)
        with Task(OnlineRLContext(), seed=0) as task:
            task.use(StepCollector(collect, envs, n_sample=8, random_steps=8))
            task.use(data_pusher(buffer))
            learn = as_learn_mode(policy, user="test")
            task.use(OffPolicyLearner(learn, buffer))
            task.run(max_step=1)
            loss = task.ctx.train_output[0]["total_loss"]
        with BaseLearner({}, policy, exp_name=str(tmp_path)) as learner:
            learner.train(samples)
        return rows["obs"], episodes, loss, policy.learn_mode.state_dict()["model"]

    theirs, ours = run(in_style(PerEnv, *styles)), run(PerEnv)
    torch.testing.assert_close(theirs, ours)


def test_the_fields_of_modes_are_those_of_the_classic_interface_and_new_ones_with_a_default():
    policy = create_policy({"type": "ppo", "model": {**SMALL, "action_space": "discrete"}})
    assert policy.learn_mode._fields == LEARN
    for mode, classic in ((policy.collect_mode, COLLECT), (policy.eval_mode, EVAL)):
        assert mode._fields[: len(classic)] == classic
        assert set(mode._fields[len(classic) :]) == set(mode._field_defaults)


class Drawing(PerEnv):
    def _forward_collect(self, data, **kwargs):
        return {
            env_id: {"action": torch.randint(2, (), generator=self._generator)} for env_id in data
        }


@pytest.mark.parametrize("style", [ClassicModes, ClassicTuples])
def test_overridden_modes_are_seeded_like_others(style):
    cls = in_style(Drawing, style)
    mode = as_collect_mode(cls({"model": SMALL, "seed": 0}), user="test")
    drawn = []
    for _ in range(2):
        mode.seed(9)
        drawn.append(mode.forward(torch.zeros(64, 4))["action"])
    assert torch.equal(*drawn)
