"""Several evaluators in one chain: their names, their files, and the one that decides."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import yaml

from dmiddleware.data import load_checkpoint
from dmiddleware.env import SyncEnvManager, make_env_manager
from dmiddleware.errors import ChainError, ConfigError
from dmiddleware.pipeline import Task, middleware
from dmiddleware.policy import DQNPolicy
from dmiddleware.runs.metrics_file import read_metrics
from dmiddleware.runs.report import write_report
from middleware import (
    ContextExchanger,
    Curriculum,
    Experiment,
    InteractionEvaluator,
    InteractionEvaluatorSettings,
    LearningCurve,
    MetricsLogger,
    OnlineRLContext,
    Role,
    RunFolder,
    SnapshotSaver,
)
from tests.middleware.nodes import run_nodes

SMALL = {"obs_shape": 2, "action_shape": 2, "encoder_hidden_sizes": [4]}


class Paying(gym.Env[Any, Any]):
    """An env whose episodes return what ``pay`` says, one after another; the last one repeats."""

    observation_space = gym.spaces.Box(-1.0, 1.0, (2,))
    action_space = gym.spaces.Discrete(2)
    render_mode = "rgb_array"

    def __init__(self, *pay: float) -> None:
        self._pay, self._n = pay, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> Any:
        pay = self._pay[min(self._n, len(self._pay) - 1)]
        self._n += 1
        return np.zeros(2, np.float32), float(pay), True, False, {"is_success": pay > 5}

    def render(self) -> Any:
        return np.zeros((4, 6, 3), np.uint8)


@pytest.fixture
def dqn() -> DQNPolicy:
    return DQNPolicy({"seed": 0, "model": SMALL})


def evaluator(policy: DQNPolicy, *pay: float, **options: Any) -> InteractionEvaluator:
    envs = SyncEnvManager([functools.partial(Paying, *pay)])
    if "every_env_step" not in options:
        options.setdefault("every_train_iter", 10)
    return InteractionEvaluator(policy, envs, n_episode=1, **options)


@middleware(roles=[Role.LEARNER], writes=["train_iter"])
def learn(ctx: OnlineRLContext) -> None:
    ctx.train_iter += 10
    ctx.env_step += 100


def run(*chain: Any, n_steps: int = 1) -> Any:
    with Task(OnlineRLContext(), seed=0) as task:
        task.use(learn)
        for one in chain:
            task.use(one)
        task.run(max_step=n_steps)
        return task.ctx


def columns(folder: Path, name: str) -> list[tuple[int, float]]:
    rows = read_metrics(folder)
    return [(row["env_step"], row[name]) for row in rows if name in row]


def names(folder: Path) -> set[str]:
    return {name for row in read_metrics(folder) for name in row}


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[RunFolder]:
    with RunFolder.create("run", root=tmp_path) as made:
        yield made


@pytest.mark.parametrize("first", ["plain", "windy"])
def test_two_evaluators_keep_apart_what_they_measure(
    first: str, dqn: DQNPolicy, folder: RunFolder
) -> None:
    plain = evaluator(dqn, 1, 2, 3, 4)
    windy = evaluator(dqn, 90, 80, name="windy", every_train_iter=20, video_every=1)
    chain = [plain, windy] if first == "plain" else [windy, plain]
    ctx = run(*chain, MetricsLogger(folder), n_steps=4)
    assert columns(folder.path, "eval/return_mean") == [(100, 1), (200, 2), (300, 3), (400, 4)]
    assert columns(folder.path, "windy/return_mean") == [(100, 90), (200, 80), (400, 80)]
    assert {"windy/length_mean", "windy/return_std", "windy/success_rate"} <= names(folder.path)
    assert (ctx.last_eval_value, ctx.last_eval_iter) == (4.0, 40)
    assert sorted(one.name for one in (folder.path / "videos").iterdir()) == [
        "windy-100.gif", "windy-200.gif", "windy-400.gif",
    ]  # fmt: skip


def test_each_evaluator_has_its_videos(dqn: DQNPolicy, folder: RunFolder) -> None:
    chain = [evaluator(dqn, 1, video_every=1), evaluator(dqn, 2, name="b", video_every=1)]
    run(*chain, MetricsLogger(folder))
    assert sorted(one.name for one in (folder.path / "videos").iterdir()) == [
        "100.gif", "b-100.gif",
    ]  # fmt: skip


def test_results_of_the_others_are_in_the_context_for_one_step(dqn: DQNPolicy) -> None:
    seen = []

    def note(ctx: OnlineRLContext) -> None:
        seen.append({name: one["return_mean"] for name, one in ctx.other_evaluations.items()})

    others = [evaluator(dqn, 5, name="a", every_train_iter=20), evaluator(dqn, 6, 7, name="b")]
    run(evaluator(dqn, 1), *others, note, n_steps=3)
    assert seen == [{"a": 5, "b": 6}, {"a": 5, "b": 7}, {"b": 7}]


def experiment(folder: RunFolder, policy: DQNPolicy, *chain: Any, n_steps: int = 3) -> Any:
    recorded = Experiment(folder, policy, n_fresh_episode=2)
    run(*chain, recorded, n_steps=n_steps)
    return recorded.result


class Windy(gym.Wrapper[Any, Any, Any, Any]):
    """Changes nothing that the test looks at."""


@pytest.mark.parametrize("first", ["plain", "windy"])
def test_the_env_of_every_evaluator_is_recorded(first: str, folder: RunFolder) -> None:
    envs = make_env_manager("CartPole-v1", env_num=1, seed=0)
    policy = DQNPolicy.for_env(envs, seed=0)
    windy = make_env_manager("CartPole-v1", env_num=1, wrappers=[Windy], seed=1)
    plain = make_env_manager("CartPole-v1", env_num=1, seed=1)
    evaluators = [
        InteractionEvaluator(policy, plain, n_episode=1),
        InteractionEvaluator(policy, windy, n_episode=1, name="windy"),
    ]
    chain = evaluators if first == "plain" else evaluators[::-1]
    experiment(folder, policy, *chain, n_steps=1)
    saved = yaml.safe_load((folder.path / "config.yaml").read_text())
    assert saved["env"]["id"] == "CartPole-v1" and not saved["env"].get("wrappers")
    assert "eval_env" not in saved
    assert saved["other_eval_envs"]["windy"]["wrappers"] == [f"{__name__}:Windy"]


@pytest.mark.parametrize("first", ["plain", "windy"])
def test_one_evaluator_decides_on_the_best_policy_and_the_result(
    first: str, dqn: DQNPolicy, folder: RunFolder
) -> None:
    plain, windy = evaluator(dqn, 1, 3, 2, 7), evaluator(dqn, 90, 80, 70, name="windy")
    chain = [plain, windy] if first == "plain" else [windy, plain]
    result = experiment(folder, dqn, *chain)
    assert load_checkpoint(folder.best_ckpt)["last_eval_value"] == 3.0
    assert load_checkpoint(folder.best_ckpt)["last_iter"] == 20
    assert (result.mean_return, result.n_episode) == (7.0, 2)
    assert result.evaluations == ((100, 1.0), (200, 3.0), (300, 2.0))
    assert result.other_evaluations == {"windy": ((100, 90.0), (200, 80.0), (300, 70.0))}
    saved = json.loads(folder.result_path.read_text())
    assert saved["other_evaluations"] == {"windy": [[100, 90.0], [200, 80.0], [300, 70.0]]}
    chained = yaml.safe_load((folder.path / "config.yaml").read_text())["chain"]
    options = [one["InteractionEvaluator"] for one in chained if "InteractionEvaluator" in one]
    assert {one["name"] for one in options} == {None, "windy"}


def test_a_named_evaluator_may_decide(dqn: DQNPolicy, folder: RunFolder) -> None:
    chain = [
        evaluator(dqn, 1, 3, primary=False),
        evaluator(dqn, 9, 8, name="windy", primary=True, stop_value=8.5),
    ]
    result = experiment(folder, dqn, *chain)
    assert result.evaluations == ((100, 9.0),)
    assert result.other_evaluations == {"eval": ((100, 1.0),)}
    assert load_checkpoint(folder.best_ckpt)["last_eval_value"] == 9.0
    assert columns(folder.path, "eval/return_mean") == [(100, 1.0)]


def test_a_lone_evaluator_decides_whatever_its_name(dqn: DQNPolicy, folder: RunFolder) -> None:
    result = experiment(folder, dqn, evaluator(dqn, 1, 5, 4, name="windy"))
    assert result.evaluations == ((100, 1.0), (200, 5.0), (300, 4.0))
    assert (result.mean_return, result.other_evaluations) == (4.0, {})
    assert load_checkpoint(folder.best_ckpt)["last_eval_value"] == 5.0
    assert not any(name.startswith("eval/") for name in names(folder.path))


def test_the_progress_and_the_curve_name_every_evaluator(
    dqn: DQNPolicy, folder: RunFolder, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    shown: dict[str, Any] = {}
    draw = LearningCurve._draw
    monkeypatch.setattr(
        LearningCurve, "_draw", lambda self, found: (shown.update(found), draw(self, found))
    )
    experiment(folder, dqn, evaluator(dqn, 1), evaluator(dqn, 9, name="windy"))
    assert "eval 1.0 windy 9.0" in capsys.readouterr().err
    assert [*shown] == ["eval", "windy"]
    assert folder.curve_path.exists()


def test_a_report_shows_every_evaluator(dqn: DQNPolicy, folder: RunFolder, tmp_path: Path) -> None:
    chain = [evaluator(dqn, 1), evaluator(dqn, 9, name="windy", video_every=1)]
    experiment(folder, dqn, *chain)
    page = tmp_path / "report.html"
    write_report(page, str(folder.path))
    assert "windy/return_mean" in page.read_text()
    assert "windy-100.gif" in page.read_text()


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ([{}, {}], "another evaluator without a name.*name="),
        ([{}, {"primary": False}], "another evaluator without a name"),
        ([{"name": "a"}, {"name": "a"}, {}], "'a' is that of another"),
        ([{}, {"name": "a", "primary": True}], "2 evaluators are primary.*primary=False"),
        ([{"name": "a", "primary": True}, {"name": "b", "primary": True}], "2 evaluators are prim"),
        ([{"name": "a"}, {"name": "b"}], "none of the evaluators a, b is primary.*primary=True"),
        ([{"primary": False}], "none of the evaluators"),
        ([{}, {"name": "a", "stop_value": 1.0}], "stop_value=1.*primary"),
        ([{}, {"name": "a", "patience": 3}], "patience=3.*primary"),
    ],
    ids=repr,
)
def test_evaluators_that_would_mix_are_refused_before_the_first_step(
    options: list[dict[str, Any]], problem: str, dqn: DQNPolicy
) -> None:
    steps: list[int] = []

    def note(ctx: OnlineRLContext) -> None:
        steps.append(ctx.total_step)

    with pytest.raises(ChainError, match=problem):
        run(note, *(evaluator(dqn, 1, **one) for one in options))
    assert steps == []


def test_a_name_that_another_middleware_logs_under_is_refused(dqn: DQNPolicy) -> None:
    windy = evaluator(dqn, 2, name="windy")
    curriculum = Curriculum(lambda ctx, now: None, windy.owns[0], name="windy")
    with pytest.raises(ChainError, match="'windy' is that of another middleware"):
        run(evaluator(dqn, 1), windy, curriculum)


@pytest.mark.parametrize(
    "name",
    ["", " ", "a b", "a/b", "../a", ".a", "a\n", "x" * 65, "eval", "collect", "learn", "speed",
     "time_s", "exchange", "router", "env_step"],
)  # fmt: skip
def test_a_name_is_a_word_that_no_metric_begins_with(name: str, dqn: DQNPolicy) -> None:
    with pytest.raises(ConfigError, match="name must be"):
        InteractionEvaluatorSettings(n_episode=1, name=name)
    with pytest.raises(ConfigError, match="name must be"):
        evaluator(dqn, 1, name=name)


@pytest.mark.parametrize("name", ["windy", "Höhe", "a-b_c.2", "2"])
def test_a_name_may_have_letters_of_any_language(
    name: str, dqn: DQNPolicy, folder: RunFolder
) -> None:
    chain = [evaluator(dqn, 1), evaluator(dqn, 2, name=name, video_every=1)]
    run(*chain, MetricsLogger(folder))
    assert columns(folder.path, f"{name}/return_mean") == [(100, 2.0)]


def test_limits_beside_primary_false_are_refused() -> None:
    with pytest.raises(ConfigError, match="stop_value must be None with primary=False"):
        InteractionEvaluatorSettings(n_episode=1, primary=False, stop_value=1.0)


def test_an_evaluator_beside_one_of_your_own_does_not_decide(
    dqn: DQNPolicy, folder: RunFolder
) -> None:
    @middleware(roles=[Role.EVALUATOR], writes=["eval_value"])
    def judge(ctx: OnlineRLContext) -> None:
        ctx.eval_value = 1.0

    ctx = run(judge, evaluator(dqn, 9, name="windy"), MetricsLogger(folder))
    assert ctx.eval_value == 1.0
    assert columns(folder.path, "windy/return_mean") == [(100, 9.0)]
    assert columns(folder.path, "eval/return_mean") == [(100, 1.0)]


def test_a_resumed_run_continues_every_evaluator(dqn: DQNPolicy, tmp_path: Path) -> None:
    def rows(name: str, *steps: int) -> Any:
        for n_steps in steps:
            folder = RunFolder.create(name, root=tmp_path, resume=True)
            policy = DQNPolicy({"seed": 0, "model": SMALL})
            chain = [
                evaluator(policy, 1, 2, 3, 4, 5, every_train_iter=20),
                evaluator(policy, 9, 8, 7, 6, 5, name="windy", every_train_iter=30),
            ]
            with Task(OnlineRLContext(), seed=0) as task:
                task.use(learn)
                for one in chain:
                    task.use(one)
                task.use(MetricsLogger(folder))
                snapshots = SnapshotSaver(folder, every_train_iter=10)
                task.use(snapshots)
                snapshots.resume(task)
                task.run(max_step=n_steps)
            folder.close()
        at = [columns(folder.path, f"{prefix}/return_mean") for prefix in ("eval", "windy")]
        return [[step for step, _ in of_one] for of_one in at]

    assert rows("cut", 4, 5) == rows("whole", 9) == [
        [100, 200, 400, 600, 800], [100, 300, 600, 900],
    ]  # fmt: skip


def test_evaluations_of_other_processes_reach_the_learner(
    folder: RunFolder, tmp_path: Path
) -> None:
    def chain(task: Task[Any]) -> Any:
        policy = DQNPolicy({"seed": 0, "model": SMALL})

        @middleware(roles=[Role.COLLECTOR], writes=["trajectories"])
        def collect(ctx: OnlineRLContext) -> None:
            ctx.trajectories = {"n": 1}
            ctx.env_step += 100

        @middleware(roles=[Role.LEARNER], writes=["train_iter"])
        def update(ctx: OnlineRLContext) -> None:
            ctx.train_iter += 10

        task.use(ContextExchanger()).use(collect).use(update)
        task.use(evaluator(policy, 1, 2, every_env_step=10**9))
        task.use(evaluator(policy, 9, 8, 7, name="windy", video_every=1, every_env_step=100))
        return task

    def learner(task: Task[Any]) -> Any:
        seen: list[Any] = []

        @middleware(last_step=True)
        def note(ctx: OnlineRLContext) -> Any:
            yield
            if ctx.other_evaluations or ctx.eval_value is not None:
                windy = ctx.other_evaluations.get("windy", {})
                seen.append((ctx.eval_value, windy.get("return_mean"), ctx.last_eval_value))
            if len(seen) == 3:
                task.stop("seen enough")

        chain(task).use(note).use(MetricsLogger(folder)).run()
        return seen[:3]

    def follower(task: Task[Any]) -> None:
        chain(task).run()

    seen, *_ = run_nodes(
        tmp_path, (Role.LEARNER, learner), (Role.COLLECTOR, follower), (Role.EVALUATOR, follower)
    )
    assert seen == [(1.0, 9.0, 1.0), (None, 8.0, 1.0), (None, 7.0, 1.0)]
    assert [value for _, value in columns(folder.path, "windy/return_mean")][:3] == [9, 8, 7]
    assert list(folder.path.glob("videos/windy-*.gif"))
