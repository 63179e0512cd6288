"""Curricula change envs by a rule, in one process and in many, and continue after a resume."""

from __future__ import annotations

import copy
import json
import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

from dmiddleware import ChainError, Task
from dmiddleware.data import TensorBuffer, as_tree
from dmiddleware.env import BaseEnvManager, SyncEnvManager, make_env_manager
from dmiddleware.errors import ConfigError, EnvCallError, WaitTimeout
from dmiddleware.pipeline import current_node, middleware
from dmiddleware.policy import DQNPolicy, PPOPolicy
from dmiddleware.router.protocol.topology import TopologyName
from dmiddleware.testing import Cluster, assert_resume_exact
from middleware import (
    ContextExchanger,
    Curriculum,
    DataPusher,
    EpsGreedyHandler,
    GAEEstimator,
    InteractionEvaluator,
    OffPolicyLearner,
    OnlineRLContext,
    OnPolicyLearner,
    Role,
    RunFolder,
    SnapshotSaver,
    StepCollector,
)
from tests.dmiddleware.distributed.rank_processes import run_ranks
from tests.middleware.nodes import node
from tests.middleware.test_resume_command import run as run_process
from tests.variants import mostly_slow

CARTPOLE = "CartPole-v1"
TINY = {"encoder_hidden_sizes": [8]}


class Leveled(gym.Env[Any, Any]):
    """Episodes of four steps, whose observations are the level and the option ``goal``."""

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self) -> None:
        self.level, self.t, self.goal = 0.0, 0, -1.0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        low, high = (options or {}).get("goal", (-1.0, -1.0))
        self.t, self.goal = 0, float(low + (high - low) * self.np_random.random())
        return self._obs(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        return self._obs(), self.level, self.t >= 4, False, {}

    def _obs(self) -> Any:
        return np.array([self.level, self.goal], np.float32)


def leveled(env_num: int = 2) -> SyncEnvManager:
    return SyncEnvManager([Leveled] * env_num, seed=0)


def small(envs: BaseEnvManager) -> DQNPolicy:
    return DQNPolicy.for_env(envs, batch_size=8, model=TINY, eps=0.5, seed=0)


def up(ctx: OnlineRLContext, now: dict[str, Any]) -> dict[str, Any]:
    """One level for every 8 env steps."""
    return {"level": float(ctx.env_step // 8)}


@middleware(roles=[Role.LEARNER], writes=["train_output"])
def learn(ctx: OnlineRLContext) -> None:
    ctx.train_iter += 1
    ctx.train_output = []


def levels_of(n_steps: int, *, curriculum_is_first: bool) -> list[list[float]]:
    """Return the levels in the observations of each step."""
    envs, seen = leveled(), list[Any]()

    def see(ctx: OnlineRLContext) -> None:
        assert ctx.trajectories is not None
        rows = ctx.trajectories["next_obs"]
        seen.append(rows[..., 0].unique().tolist())

    chain = [StepCollector(small(envs), envs, n_sample=8), learn, see]
    curriculum = Curriculum(up, envs, start={"level": -1.0})
    with Task(seed=0) as task:
        for one in [curriculum, *chain] if curriculum_is_first else [*chain, curriculum]:
            task.use(one)
        task.run(max_step=n_steps)
        assert task.ctx.logged["curriculum/level"] == n_steps
    return seen


@pytest.mark.parametrize("curriculum_is_first", [True, False])
def test_values_of_the_rule_hold_from_the_next_step_on(curriculum_is_first: bool) -> None:
    seen = levels_of(4, curriculum_is_first=curriculum_is_first)
    assert seen == [[-1.0], [1.0], [2.0], [3.0]]


def test_the_rule_gets_the_present_values_and_may_leave_them() -> None:
    envs, seen = leveled(), list[Any]()

    def rule(ctx: OnlineRLContext, now: dict[str, Any]) -> dict[str, Any] | None:
        seen.append(dict(now))
        now["level"] = 99.0  # a copy
        return {"level": 5.0} if ctx.total_step == 1 else None

    with Task() as task, envs:
        task.use(Curriculum(rule, envs, start={"level": 2.0})).run(max_step=3)
        assert envs.get_attr("level") == [5.0, 5.0]
    assert seen == [{"level": 2.0}, {"level": 2.0}, {"level": 5.0}]


def test_a_rule_sees_the_evaluation_of_its_step_wherever_it_is() -> None:
    envs, tested, seen = leveled(), leveled(), list[Any]()

    def rule(ctx: OnlineRLContext, now: dict[str, Any]) -> dict[str, Any] | None:
        seen.append(ctx.eval_value)
        return {"level": 7.0} if ctx.eval_value is not None else None

    policy = small(envs)
    with Task(seed=0) as task:
        task.use(Curriculum(rule, envs)).use(StepCollector(policy, envs, n_sample=8)).use(learn)
        task.use(InteractionEvaluator(policy, tested, n_episode=2, every_train_iter=3))
        task.run(max_step=3)
        # The envs that evaluate are others.
        assert tested.get_attr("level") == [0.0, 0.0]
        assert envs.get_attr("level") == [7.0, 7.0]
    assert seen == [0.0, None, 0.0]


def test_envs_that_evaluate_change_only_if_they_are_given() -> None:
    envs, tested = leveled(), leveled()
    with Task(seed=0) as task:
        task.use(StepCollector(small(envs), envs, n_sample=8)).use(learn)
        task.use(InteractionEvaluator(small(envs), tested, n_episode=2))
        task.use(Curriculum(up, [envs, tested], start={"level": 1.0})).run(max_step=2)
        assert task.ctx.last_eval_value == 4.0
        assert tested.get_attr("level") == [2.0, 2.0]


def test_reset_options_reach_the_next_episodes() -> None:
    envs, seen = leveled(), list[Any]()

    def see(ctx: OnlineRLContext) -> None:
        assert ctx.trajectories is not None
        seen.append(ctx.trajectories["obs"][..., 1].unique().tolist())

    def farther(ctx: OnlineRLContext, now: dict[str, Any]) -> dict[str, Any]:
        return {"goal": (float(ctx.total_step), float(ctx.total_step))}

    with Task(seed=0) as task:
        task.use(StepCollector(small(envs), envs, n_sample=8)).use(learn).use(see)
        options = {"goal": (9.0, 9.0)}
        task.use(Curriculum(farther, envs, sets="reset_options", start=options)).run(max_step=4)
    # An episode ends with each step, and its next one has begun when the rule decides.
    assert seen == [[9.0], [9.0], [0.0], [1.0]]


def test_a_list_is_one_value_for_all_envs() -> None:
    envs = leveled()
    with Task() as task, envs:
        task.use(Curriculum(lambda *_: {"level": [1, 2]}, envs)).run(max_step=1)
        assert envs.get_attr("level") == [[1, 2], [1, 2]]


class Holding(Leveled):
    """An env with attributes of any kind, which it changes in place in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.thing: Any = None
        self.options: list[Any] = []

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.options.append(copy.deepcopy((options or {}).get("thing")))
        return super().reset(seed=seed)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if isinstance(self.thing, list):
            self.thing.append("changed by the env")
        elif isinstance(self.thing, np.ndarray | torch.Tensor) and self.thing.shape:
            self.thing[...] = 77
        return super().step(action)


def holding() -> SyncEnvManager:
    return SyncEnvManager([Holding] * 2, seed=0)


VALUES: dict[str, tuple[Any, Any]] = {
    "dictionaries of arrays": ({"low": np.zeros(2)}, {"low": np.array([0.0, 1.0])}),
    "nested dictionaries": ({"a": {"b": [np.zeros(2)]}}, {"a": {"b": [np.ones(2)]}}),
    "lists of arrays": ([np.zeros(2), 1], [np.zeros(2), 2]),
    "ragged lists": ([[1], [1, 2]], [[1], [1, 3]]),
    "tuples of tensors": ((torch.zeros(2), "a"), (torch.ones(2), "a")),
    "arrays of other shapes": (np.zeros(2), np.zeros(3)),
    "arrays of other dtypes": (np.zeros(2), np.zeros(2, np.float32)),
    "tensors": (torch.zeros(2, 2), torch.eye(2)),
    "numbers and NaN": (1.0, math.nan),
    "NaN in arrays": (np.array([0.0, np.nan]), np.array([np.nan, 0.0])),
    "NaN in dictionaries": ({"a": math.nan}, {"a": 0.0}),
    "texts": ("easy", "hard"),
    "None": (None, 0),
    "types": (1, True),
    "keys": ({"a": 1}, {"a": 1, "b": 1}),
    "keys that are numbers": ({1: np.zeros(1)}, {2: np.zeros(1)}),
    "sets": ({1, 2}, {1, 3}),
    "scalars": (np.float32(1), np.float64(1)),
    "large integers": (2**70, 2**70 + 1),
}


def counted(envs: BaseEnvManager) -> tuple[list[Any], list[Any]]:
    """Return what is set in envs from now on: attributes, and reset options."""
    attributes, options = list[Any](), list[Any]()
    set_attr, set_options = envs.set_attr, envs.set_reset_options

    def on_attr(name: str, values: Any) -> None:
        attributes.append(values[0])
        set_attr(name, values)

    def on_options(values: Any) -> None:
        options.append(values[0])
        set_options(values)

    envs.set_attr, envs.set_reset_options = on_attr, on_options  # type: ignore[method-assign]
    return attributes, options


@pytest.mark.parametrize("sets", ["attributes", "reset_options"])
@pytest.mark.parametrize("kind", VALUES)
def test_any_value_is_set_when_it_changes_and_only_then(kind: str, sets: Any) -> None:
    first, second = VALUES[kind]
    envs, plan = holding(), [first, first, second, second, second]

    def rule(ctx: OnlineRLContext, now: dict[str, Any]) -> dict[str, Any]:
        return {"thing": copy.deepcopy(plan[ctx.total_step])}

    with Task(seed=0) as task, envs:
        curriculum = Curriculum(rule, envs, sets=sets, start={"thing": copy.deepcopy(first)})
        seen = counted(envs)[sets == "reset_options"]
        task.use(StepCollector(small(envs), envs, n_sample=8)).use(learn).use(curriculum)
        task.run(max_step=len(plan))
    assert len(seen) == 1


@pytest.mark.parametrize("sets", ["attributes", "reset_options"])
def test_a_rule_may_change_what_it_gets_or_what_it_has_returned(sets: Any) -> None:
    mine: dict[str, Any] = {"thing": [0]}

    def in_place(ctx: OnlineRLContext, now: dict[str, Any]) -> dict[str, Any]:
        now["thing"].append(ctx.total_step)
        return now

    def the_same_object(ctx: OnlineRLContext, now: dict[str, Any]) -> dict[str, Any]:
        mine["thing"].append(ctx.total_step)
        return mine

    def not_returned(ctx: OnlineRLContext, now: dict[str, Any]) -> None:
        now["thing"].append("not returned")

    for rule, expected in (
        (in_place, [0, 0, 1, 2]),
        (the_same_object, [0, 0, 1, 2]),
        (not_returned, [0]),
    ):
        envs = holding()
        with Task(seed=0) as task, envs:
            curriculum = Curriculum(rule, envs, sets=sets, start={"thing": [0]})
            task.use(curriculum).run(max_step=3)
            now = curriculum.snapshot_parts["values"].now
            assert now == {"thing": expected}
            if sets == "attributes":
                assert envs.get_attr("thing") == [expected, expected]
            else:
                assert envs.reset_options == [{"thing": expected}] * 2


@pytest.mark.parametrize("value", [[1], np.zeros(2), torch.zeros(2)])
def test_an_env_may_change_its_value_in_place(value: Any) -> None:
    envs, seen = holding(), list[Any]()

    def rule(ctx: OnlineRLContext, now: dict[str, Any]) -> None:
        seen.append(now["thing"])

    with Task(seed=0) as task, envs:
        task.use(StepCollector(small(envs), envs, n_sample=8)).use(learn)
        task.use(Curriculum(rule, envs, start={"thing": value})).run(max_step=2)
    assert str(seen) == str([value, value])


def test_numbers_of_any_name_and_kind_are_logged() -> None:
    values = {
        "goal size": 1,
        "a": np.float32(2),
        "b": torch.tensor(3.0),
        "c": np.array(4),
        "d": True,
        "text": "5",
        "list": [6],
        "none": None,
    }
    envs = holding()
    with Task() as task, envs:
        task.use(Curriculum(lambda *_: values, envs, sets="reset_options", name="my plan"))
        task.run(max_step=1)
        assert task.ctx.logged == {
            "my_plan/goal_size": 1.0,
            "my_plan/a": 2.0,
            "my_plan/b": 3.0,
            "my_plan/c": 4.0,
            "my_plan/d": 1.0,
        }


@pytest.mark.process
def test_dictionaries_of_arrays_resume_exactly() -> None:
    def rule(ctx: OnlineRLContext, now: dict[str, Any]) -> dict[str, Any]:
        now["goal"][0][...] += 0.5
        return now

    def make(envs: BaseEnvManager) -> Curriculum:
        start = {"goal": [np.zeros(()), 9.0], "other": {"a": (np.arange(3), torch.ones(2))}}
        return Curriculum(rule, envs, sets="reset_options", start=start)

    assert_resume_exact(chain_of(Leveled, "sync", make), n_step=5, stop_after=[2])


# Mistakes


ITSELF: list[Any] = []
ITSELF.append(ITSELF)


@pytest.mark.parametrize(
    "value",
    [
        len, threading.Lock(), Leveled(), np.array([None]), as_tree({"a": torch.ones(1)}),
        torch.ones(1, requires_grad=True) * 2, ITSELF,
    ],
)  # fmt: skip
def test_a_value_that_can_be_neither_sent_nor_saved_is_named(value: Any) -> None:
    for nested in (value, {"inside": [value]}):
        envs = holding()
        with Task() as task, envs:
            task.use(Curriculum(lambda *_, nested=nested: {"thing": nested}, envs))
            with pytest.raises(ConfigError, match="value 'thing' of a Curriculum"):
                task.run(max_step=1)


@pytest.mark.parametrize("name", [3, "", None, ("a",)])
def test_a_name_that_is_not_a_text_is_named(name: Any) -> None:
    for sets in ("attributes", "reset_options"):
        envs = holding()
        with Task() as task, envs:
            task.use(Curriculum(lambda *_: {name: 1}, envs, sets=sets))  # type: ignore[arg-type]
            with pytest.raises(ConfigError, match="texts for names, got"):
                task.run(max_step=1)


def test_wrong_arguments_are_refused() -> None:
    envs = leveled()
    with pytest.raises(ConfigError, match="function"):
        Curriculum({"level": 1}, envs)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="env manager"):
        Curriculum(up, [Leveled()])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="reset_options"):
        Curriculum(up, envs, sets="options")  # type: ignore[arg-type]
    pytest.importorskip("envpool")
    pool = make_env_manager(CARTPOLE, env_num=2, backend="envpool")
    with pytest.raises(ConfigError, match="EnvPool"):
        Curriculum(up, pool, start={"length": 1.0})


def test_a_rule_that_returns_something_else_is_refused() -> None:
    envs = leveled()
    with Task() as task:
        task.use(Curriculum(lambda *_: 3, envs))  # type: ignore[arg-type, return-value]
        with pytest.raises(ConfigError, match="returned 3"):
            task.run(max_step=1)


def test_an_attribute_that_the_envs_do_not_have_is_refused() -> None:
    envs = leveled()
    with Task() as task, envs:
        task.use(Curriculum(lambda *_: {"lvel": 3}, envs))
        with pytest.raises(EnvCallError, match="level"):
            task.run(max_step=1)


def test_the_check_finds_envs_that_nothing_steps_and_equal_names() -> None:
    envs = leveled()
    with Task() as task:
        task.use(StepCollector(small(envs), envs, n_sample=8)).use(learn)
        task.use(Curriculum(up, leveled()))
        with pytest.raises(ChainError, match="nothing in the chain steps"):
            task.check()
    with Task() as task:
        task.use(StepCollector(small(envs), envs, n_sample=8)).use(learn)
        task.use(Curriculum(up, envs)).use(Curriculum(up, envs))
        with pytest.raises(ChainError, match="the name 'curriculum'"):
            task.check()
    with Task() as task:
        task.use(StepCollector(small(envs), envs, n_sample=8)).use(learn)
        task.use(Curriculum(up, envs)).use(Curriculum(up, envs, name="other")).check()


# Resume


def chain_of(
    env: str | Callable[[], Any], mode: str, curriculum: Callable[[BaseEnvManager], Curriculum]
) -> Callable[[Path], tuple[Task[Any], SnapshotSaver]]:
    def main(folder: Path) -> tuple[Task[Any], SnapshotSaver]:
        torch.manual_seed(3)
        envs = make_env_manager(env, env_num=2, mode=mode, seed=1)  # type: ignore[arg-type]
        policy, buffer = small(envs), TensorBuffer(500, seed=2)
        snapshots = SnapshotSaver(RunFolder(folder))
        task = Task(seed=0)
        task.use(EpsGreedyHandler(policy)).use(StepCollector(policy, envs, n_sample=10))
        task.use(DataPusher(buffer))
        task.use(OffPolicyLearner(policy, buffer)).use(curriculum(envs)).use(snapshots)
        return task, snapshots

    return main


def longer(ctx: OnlineRLContext, now: dict[str, Any]) -> dict[str, Any] | None:
    """Grow by what was there before, in some steps."""
    return {"length": now["length"] * 1.5} if ctx.total_step % 2 == 0 else None


def farther(ctx: OnlineRLContext, now: dict[str, Any]) -> dict[str, Any]:
    return {"goal": (now["goal"][0] + 0.5, 9.0)}


@pytest.mark.process
@pytest.mark.parametrize("mode", mostly_slow(["sync", "async"], keep=1))
def test_a_curriculum_of_attributes_resumes_exactly(mode: str) -> None:
    make = chain_of(CARTPOLE, mode, lambda envs: Curriculum(longer, envs, start={"length": 0.2}))
    assert_resume_exact(make, n_step=5, stop_after=[1, 3])


@pytest.mark.process
@pytest.mark.parametrize("mode", mostly_slow(["sync", "async"], keep=1))
def test_a_curriculum_of_reset_options_resumes_exactly(mode: str) -> None:
    def make(envs: BaseEnvManager) -> Curriculum:
        return Curriculum(farther, envs, sets="reset_options", start={"goal": (0.0, 9.0)})

    assert_resume_exact(chain_of(Leveled, mode, make), n_step=5, stop_after=[2])


class Unsavable(Leveled):
    """An env whose state no snapshot can hold."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


def test_envs_that_cannot_be_saved_begin_with_the_values_of_the_snapshot(tmp_path: Path) -> None:
    made: list[BaseEnvManager] = []

    def make(envs: BaseEnvManager) -> Curriculum:
        made.append(envs)
        return Curriculum(up, envs)

    main = chain_of(Unsavable, "sync", make)
    task, snapshots = main(RunFolder.create("run", root=tmp_path).path)
    with task:
        task.run(max_step=4)
        snapshots.save(task)
    task, snapshots = main(tmp_path / "run")
    with task:
        assert snapshots.resume(task)
        assert made[1].get_attr("level") == [5.0, 5.0]
        assert made[1].ready_obs[:, 0].tolist() == [5.0, 5.0]  # type: ignore[call-overload]


def test_one_process_continues_with_the_values_of_a_learner_among_several(tmp_path: Path) -> None:
    folder = RunFolder.create("run", root=tmp_path).path

    def main(*roles: str) -> tuple[Task[Any], SnapshotSaver, SyncEnvManager]:
        envs, snapshots = leveled(), SnapshotSaver(RunFolder(folder))
        task = Task(seed=0, roles=roles)
        task.use(StepCollector(small(envs), envs, n_sample=8)).use(learn).use(snapshots)
        task.use(Curriculum(farther, envs, sets="reset_options", start={"goal": (8.0, 9.0)}))
        return task, snapshots, envs

    task, snapshots, _ = main(Role.LEARNER)
    with task:
        task.run(max_step=2)
        snapshots.save(task)
    task, snapshots, envs = main()
    with task:
        assert snapshots.resume(task)
        # The snapshot has no envs, and the new ones begin with its values.
        np.testing.assert_array_equal(envs.ready_obs, [[0, 9], [0, 9]])


# Several processes


class Training:
    """A learner whose level is the number of its updates, and collectors that see their envs.

    Args:
        snapshots: where the learner saves its snapshots; None: it starts from scratch.
    """

    def __init__(self, snapshots: Path | None = None) -> None:
        self.n_updates = 0
        self.snapshots = snapshots
        self.levels: dict[int, list[float]] = {}

    def __call__(self) -> None:
        here = current_node()
        assert here is not None
        envs, nothing = leveled(), threading.Condition()

        @middleware(roles=[Role.COLLECTOR], writes=["trajectories"])
        def collect(ctx: OnlineRLContext) -> None:
            with nothing:
                ctx.task.clock.wait_for(nothing, lambda: False, 0.1)
            assert ctx.task.router is not None
            self.levels.setdefault(ctx.task.router.node_id, []).append(envs.get_attr("level")[0])
            ctx.trajectories = as_tree({"done": torch.zeros(1, 1, dtype=torch.bool)})
            ctx.env_step += 1

        @middleware(roles=[Role.LEARNER])
        def learn(ctx: OnlineRLContext) -> None:
            ctx.train_iter += 1
            self.n_updates = ctx.train_iter

        def level(ctx: OnlineRLContext, now: dict[str, Any]) -> dict[str, Any]:
            return {"level": now["level"] + 1.0}

        with Task(OnlineRLContext()) as task, envs:
            task.use(ContextExchanger()).use(Curriculum(level, envs, start={"level": 100.0}))
            task.use(collect).use(learn)
            if self.snapshots is not None and Role.LEARNER in here.roles:
                saver = SnapshotSaver(self.snapshots, every_train_iter=5)
                task.use(saver)
                saver.resume(task)
            task.run()


@pytest.mark.parametrize("topology", ["mesh", "star"])
def test_collectors_follow_the_learner_also_those_that_start_late(topology: TopologyName) -> None:
    training = Training()
    roles = {"learner": 1, "collector": 2}
    with Cluster(training, roles=roles, topology=topology) as cluster:
        cluster.start()
        assert cluster.wait_until(lambda: training.n_updates >= 40, 60.0)
        for levels in training.levels.values():
            assert levels[0] == 100.0
            assert levels == sorted(levels)
            assert levels[-1] >= 100 + training.n_updates - 8
        cluster.kill(2)
        cluster.run_for(1.0)
        n_steps, n_updates = len(training.levels[2]), training.n_updates
        cluster.start(2)
        cluster.run_for(2.0)
        # The first step of the new process has the newest level, not the first one.
        assert training.levels[2][n_steps] >= 100 + n_updates - 4


@pytest.mark.parametrize("resumes", [True, False])
def test_collectors_follow_a_learner_that_is_restarted(tmp_path: Path, resumes: bool) -> None:
    folder = RunFolder.create("run", root=tmp_path).path
    training = Training(folder if resumes else None)
    with Cluster(training, roles={"learner": 1, "collector": 1}) as cluster:
        cluster.start()
        assert cluster.wait_until(lambda: training.n_updates >= 43, 60.0)
        cluster.kill(0)
        cluster.run_for(2.0)
        n_steps = len(training.levels[1])
        cluster.start(0)
        cluster.run_for(3.0)
        later = training.levels[1][n_steps + 2 :]
        assert later and later[-1] >= 100 + training.n_updates - 8
        # Nothing in between: the first values that are sent are those of the snapshot.
        assert min(later) >= 138 if resumes else max(later) < 140


def test_a_collector_waits_for_the_first_values(tmp_path: Path) -> None:
    with node(tmp_path, 1, Role.COLLECTOR) as task:
        task.use(Curriculum(up, leveled(), timeout_s=0.05))
        with pytest.raises(WaitTimeout, match="first values of the curriculum 'curriculum'"):
            task.run(max_step=1)


def train_rank(rank: int) -> Any:
    """Learn as one of several ranks, each with envs of its own, whose rules differ."""
    envs, seen = leveled(), list[Any]()
    policy = PPOPolicy.for_env(
        envs, model=TINY, seed=3, multi_gpu=True, batch_size=8, epoch_per_collect=1
    )

    def rule(ctx: OnlineRLContext, now: dict[str, Any]) -> dict[str, Any] | None:
        return {"level": 100.0 * rank + ctx.total_step} if ctx.total_step % 2 == 0 else None

    def see(ctx: OnlineRLContext) -> None:
        seen.append(envs.get_attr("level"))

    with Task(seed=5, rank=rank) as task:
        task.use(ContextExchanger()).use(Curriculum(rule, envs, start={"level": -1.0}))
        task.use(StepCollector(policy, envs, n_sample=16)).use(see)
        task.use(GAEEstimator(policy)).use(OnPolicyLearner(policy)).run(max_step=5)
    return seen


@pytest.mark.process
def test_the_rule_of_the_first_rank_decides_for_all() -> None:
    expected = [[-1.0, -1.0], [0.0, 0.0], [0.0, 0.0], [2.0, 2.0], [2.0, 2.0]]
    assert run_ranks(train_rank) == [expected, expected]


@pytest.mark.slow
@pytest.mark.process
def test_a_learner_reaches_the_envs_of_a_collector_in_another_process(tmp_path: Path) -> None:
    program = ("--main", "tests.middleware.curriculum_program.main")
    roles = ("--roles", "learner=1,collector=1")
    done = run_process(tmp_path, "-m", "dmiddleware.launch", *roles, *program)
    lines = (tmp_path / "collector.jsonl").read_text().splitlines()
    seen = [json.loads(line) for line in lines]
    learner = json.loads((tmp_path / "learner.json").read_text())
    assert learner["level"] >= 5, done.stdout
    assert learner["length"] == 0.25 + 0.25 * learner["level"]
    levels = [one["level"][0] for one in seen]
    assert levels[0] == 0 and levels == sorted(levels) and levels[-1] >= 4
    # A process of the envs was killed, and its env got what the others have.
    assert seen[-1]["restarts"] == 1
    for one in seen:
        assert one["level"][0] == one["level"][1]
        assert one["length"] == [0.25 + 0.25 * level for level in one["level"]]
