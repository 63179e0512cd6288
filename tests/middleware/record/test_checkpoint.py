import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dmiddleware import load_policy
from dmiddleware.data import load_checkpoint
from dmiddleware.env import make_env_manager
from dmiddleware.errors import ChainError, CheckpointWriteError, ConfigError
from dmiddleware.pipeline import Task
from dmiddleware.policy import DQNPolicy
from dmiddleware.worker import BaseLearner
from middleware import Experiment, OfflineRLContext, OnlineRLContext, Role, SnapshotSaver
from middleware.record.checkpoint import CkptSaver
from middleware.record.run_folder import RunFolder
from tests.middleware.disk import no_room


@pytest.fixture
def dqn() -> DQNPolicy:
    return DQNPolicy(
        {"seed": 0, "model": {"obs_shape": 4, "action_shape": 2, "encoder_hidden_sizes": [8]}}
    )


def learn(policy: DQNPolicy) -> Any:
    """A fake learner: every parameter becomes the number of updates."""

    def learn(ctx: OnlineRLContext) -> None:
        ctx.train_iter += 10
        ctx.env_step += 80
        state = policy.learn_mode.state_dict()
        for value in state["model"].values():
            value.fill_(ctx.train_iter)
        policy.learn_mode.load_state_dict(state)

    return learn


def evaluate(policy: DQNPolicy, *values: float) -> Any:
    """A fake evaluator, with the state of the policy that it evaluated."""
    left = list(values)

    def evaluate(ctx: OnlineRLContext) -> None:
        ctx.eval_value = ctx.last_eval_value = left.pop(0)
        ctx.last_eval_iter = ctx.train_iter
        ctx.eval_output = {"policy_state": policy.eval_mode.state_dict()}

    return evaluate


def saved(run: RunFolder) -> list[str]:
    return sorted(path.name for path in run.ckpt_dir.iterdir())


def load(run: RunFolder, name: str) -> Any:
    return load_checkpoint(run.ckpt_dir / f"{name}.safetensors")


def parameter(state: Any) -> float:
    (value,) = {float(number) for leaf in state["model"].values() for number in leaf.unique()}
    return value


def test_best_is_the_policy_of_the_best_evaluation(
    run: RunFolder, run_steps: Any, dqn: DQNPolicy
) -> None:
    scores = evaluate(dqn, 10.0, 30.0, 20.0, 30.0)
    saver = CkptSaver(dqn.learn_mode, run)
    run_steps(learn(dqn), scores, saver, n_steps=4)
    assert saver.best_value == 30.0
    assert saved(run) == ["best.safetensors", "final.safetensors"]
    assert run.best_ckpt.exists()
    state = load(run, "best")
    assert parameter(state) == state["last_iter"] == 20
    assert state["last_step"] == 160
    assert "optimizer" in state


def test_best_is_the_evaluated_policy_even_after_further_updates(
    run: RunFolder, run_steps: Any, dqn: DQNPolicy
) -> None:
    run_steps(CkptSaver(dqn.learn_mode, run), evaluate(dqn, 1.0, 3.0, 2.0), learn(dqn), n_steps=3)
    state = load(run, "best")
    assert parameter(state) == state["last_iter"] == 10
    dqn.eval_mode.load_state_dict(state)
    assert parameter(load(run, "final")) == 30


def test_value_that_is_nan_is_never_the_best(
    run: RunFolder, run_steps: Any, dqn: DQNPolicy
) -> None:
    scores = evaluate(dqn, float("nan"), -5.0, float("nan"))
    run_steps(learn(dqn), scores, CkptSaver(dqn.learn_mode, run), n_steps=3)
    assert parameter(load(run, "best")) == 20


def test_periodic_checkpoints_are_saved_at_an_interval_and_the_newest_are_kept(
    run: RunFolder, run_steps: Any, dqn: DQNPolicy
) -> None:
    saver = CkptSaver(dqn.learn_mode, run, every_train_iter=15, keep=2)
    run_steps(learn(dqn), saver, n_steps=9)
    assert saved(run) == [
        "final.safetensors",
        "iteration_80.safetensors",
        "iteration_90.safetensors",
    ]
    assert parameter(load(run, "iteration_80")) == 80


def test_checkpoints_by_env_steps_are_one_for_each_state_of_the_policy(
    run: RunFolder, run_steps: Any, dqn: DQNPolicy
) -> None:
    def collect(ctx: OnlineRLContext) -> None:
        ctx.env_step += 8

    run_steps(collect, CkptSaver(dqn.learn_mode, run, every_env_step=8, keep=2), n_steps=4)
    assert saved(run) == ["final.safetensors", "iteration_0.safetensors"]


def test_files_of_a_learner_s_hook_in_the_same_run_are_kept(
    run: RunFolder, run_steps: Any, dqn: DQNPolicy
) -> None:
    cfg = {"hook": {"save_ckpt_after_iter": 1, "save_ckpt_after_run": True}}
    with BaseLearner(cfg, dqn, exp_name=str(run.path)) as learner:
        saver = CkptSaver(dqn.learn_mode, run, every_train_iter=10, keep=1)

        def save_by_hook(ctx: OnlineRLContext) -> None:
            learner.last_iter.update(ctx.train_iter)
            learner.call_hook("after_run")

        run_steps(learn(dqn), save_by_hook, saver, n_steps=2)
    names = ["iteration_10.safetensors", "iteration_20.safetensors"]
    assert sorted(path.name for path in learner.ckpt_dir.iterdir()) == names
    assert saved(run) == ["final.safetensors", "iteration_20.safetensors"]


def test_training_can_continue_from_the_final_state(
    run: RunFolder, run_steps: Any, dqn: DQNPolicy
) -> None:
    run_steps(learn(dqn), CkptSaver(dqn.learn_mode, run), n_steps=2)
    state = load(run, "final")
    assert (state["last_iter"], state["last_step"]) == (20, 160)
    other = DQNPolicy(dataclasses.replace(dqn.cfg, seed=1))
    other.learn_mode.load_state_dict(state)
    assert parameter(other.learn_mode.state_dict()) == 20


def test_final_state_is_saved_after_an_error(
    run: RunFolder, run_steps: Any, dqn: DQNPolicy
) -> None:
    def fail(ctx: OnlineRLContext) -> None:
        if ctx.train_iter == 30:
            raise FloatingPointError("a loss that is NaN")

    with pytest.raises(FloatingPointError):
        run_steps(learn(dqn), fail, CkptSaver(dqn.learn_mode, run), n_steps=9)
    assert parameter(load(run, "final")) == 30


def test_ctrl_c_saves_too(run: RunFolder, run_steps: Any, dqn: DQNPolicy) -> None:
    def interrupt(ctx: OnlineRLContext) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_steps(learn(dqn), CkptSaver(dqn.learn_mode, run), interrupt)
    assert parameter(load(run, "final")) == 10


def test_run_without_updates_keeps_the_final_policy_of_the_run_before(
    run: RunFolder, run_steps: Any, dqn: DQNPolicy
) -> None:
    run_steps(learn(dqn), CkptSaver(dqn.learn_mode, run), n_steps=3)
    other = DQNPolicy(
        {"seed": 1, "model": {"obs_shape": 4, "action_shape": 2, "encoder_hidden_sizes": [8]}}
    )

    class Broken:
        def setup(self, task: Task[Any]) -> None:
            raise OSError("no simulator here")

        def __call__(self, ctx: Any) -> None: ...

    with pytest.raises(OSError, match="simulator"):
        run_steps(CkptSaver(other.learn_mode, run), learn(other), Broken())
    assert parameter(load(run, "final")) == 30
    run_steps(learn(other), CkptSaver(other.learn_mode, run))
    assert parameter(load(run, "final")) == 10


def test_task_that_never_ran_saves_nothing(run: RunFolder, dqn: DQNPolicy) -> None:
    with Task(OnlineRLContext()) as task:
        task.use(CkptSaver(dqn.learn_mode, run))
    assert saved(run) == []


def test_full_disk_ends_the_run_and_leaves_the_old_checkpoint(
    run: RunFolder, run_steps: Any, dqn: DQNPolicy
) -> None:
    limits: list[Any] = []

    def fill_disk(ctx: OnlineRLContext) -> None:
        if ctx.train_iter == 20:
            limit = no_room(500)
            limit.__enter__()
            limits.append(limit)

    try:
        with pytest.raises(CheckpointWriteError) as raised:
            run_steps(
                learn(dqn),
                evaluate(dqn, 1.0, 2.0, 3.0),
                fill_disk,
                CkptSaver(dqn.learn_mode, run),
                n_steps=3,
            )
    finally:
        limits[0].__exit__(None, None, None)
    assert "best.safetensors" in str(raised.value)
    assert saved(run) == ["best.safetensors"]
    assert parameter(load(run, "best")) == 10


def test_full_disk_at_the_end_is_an_error(run: RunFolder, run_steps: Any, dqn: DQNPolicy) -> None:
    with no_room(500), pytest.raises(CheckpointWriteError, match="final"):
        run_steps(learn(dqn), CkptSaver(dqn.learn_mode, run))
    assert saved(run) == []


def test_restored_saver_continues_with_its_best_value_and_files(
    run: RunFolder, run_steps: Any, dqn: DQNPolicy
) -> None:
    first = CkptSaver(dqn.learn_mode, run, every_train_iter=10, keep=2)
    run_steps(learn(dqn), evaluate(dqn, 5.0, 6.0), first, n_steps=2)
    second = CkptSaver(dqn.learn_mode, run, every_train_iter=10, keep=2)
    second.load_state_dict(first.state_dict())
    run_steps(learn(dqn), evaluate(dqn, 5.5), second, ctx=OnlineRLContext(train_iter=20))
    assert second.best_value == 6.0
    assert parameter(load(run, "best")) == 20
    assert [name for name in saved(run) if name.startswith("iteration")] == [
        "iteration_20.safetensors",
        "iteration_30.safetensors",
    ]


def test_it_is_active_in_the_role_learner(run: RunFolder, dqn: DQNPolicy) -> None:
    assert CkptSaver(dqn.learn_mode, run).roles == (Role.LEARNER,)


def test_options_must_be_positive(run: RunFolder, dqn: DQNPolicy) -> None:
    with pytest.raises(ValueError, match="every_train_iter must be an integer ≥ 1 or None, got 0"):
        CkptSaver(dqn.learn_mode, run, every_train_iter=0)
    with pytest.raises(ValueError, match="keep must be an integer ≥ 1, got 0"):
        CkptSaver(dqn.learn_mode, run, keep=0)


def test_best_policy_of_the_folder_is_replaced_only_by_a_better_one(
    run: RunFolder, run_steps: Any, dqn: DQNPolicy
) -> None:
    run_steps(learn(dqn), evaluate(dqn, 30.0), CkptSaver(dqn.learn_mode, run))
    # A restarted learner uses the same folder.
    saver = CkptSaver(dqn.learn_mode, run)
    run_steps(learn(dqn), learn(dqn), evaluate(dqn, 20.0), saver)
    assert saver.best_value == 30.0
    assert load(run, "best")["last_iter"] == 10
    run_steps(learn(dqn), learn(dqn), evaluate(dqn, 40.0), CkptSaver(dqn.learn_mode, run))
    assert load(run, "best")["last_iter"] == 20
    assert load(run, "best")["last_eval_value"] == 40.0


def test_better_policy_in_the_folder_is_kept_when_an_earlier_state_is_resumed(
    run: RunFolder, run_steps: Any, dqn: DQNPolicy
) -> None:
    first = CkptSaver(dqn.learn_mode, run)
    run_steps(learn(dqn), evaluate(dqn, 10.0), first)
    early = first.state_dict()
    run_steps(learn(dqn), evaluate(dqn, 30.0), CkptSaver(dqn.learn_mode, run))
    saver = CkptSaver(dqn.learn_mode, run)
    with Task(OnlineRLContext()) as task:
        task.use(learn(dqn)).use(evaluate(dqn, 20.0)).use(saver).run(max_step=0)
        saver.load_state_dict(early)
        task.run(max_step=1)
    assert load(run, "best")["last_eval_value"] == 30.0


def evaluate_only(values: list[Any]) -> Any:
    """An evaluator that writes nothing but the value; None: no evaluation in this step."""

    def evaluate(ctx: OnlineRLContext) -> None:
        ctx.eval_value = values.pop(0)

    return evaluate


@pytest.mark.parametrize(
    ("values", "best"),
    [
        ([9.4, 1.0], 1),
        ([1.0, 9.4], 2),
        ([-9.0, -5.0, -7.0], 2),
        ([3.0, 3.0], 1),
        ([math.nan, 2.0, math.nan], 2),
        ([-math.inf, -3.0], 2),
        ([math.inf, 2.0], 2),
        ([0.0, None, -1.0, None], 1),
        ([np.float32(2.5), torch.tensor(2.0), np.array([1.0])], 1),
        ([1, True, 3], 3),
    ],
)
def test_an_evaluator_needs_to_write_only_its_value(
    run: RunFolder, run_steps: Any, dqn: DQNPolicy, values: list[Any], best: int
) -> None:
    chain = learn(dqn), evaluate_only(list(values)), CkptSaver(dqn, run)
    run_steps(*chain, n_steps=len(values))
    state = load(run, "best")
    assert parameter(state) == state["last_iter"] == 10 * best
    assert state["last_eval_value"] == float(values[best - 1])
    assert "optimizer" in state


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_an_evaluation_that_is_not_finite_never_counts(
    run: RunFolder, run_steps: Any, dqn: DQNPolicy, value: float
) -> None:
    saver = CkptSaver(dqn, run)
    run_steps(learn(dqn), evaluate_only([value]), saver)
    assert saver.best_value == -math.inf
    assert saved(run) == ["final.safetensors"]


@pytest.mark.parametrize("given", ["value", "parameters", "all"])
def test_the_best_policy_survives_a_resumed_run_and_several_evaluators(
    run: RunFolder, run_steps: Any, dqn: DQNPolicy, given: str
) -> None:
    stock = evaluate(dqn, 5.0, 3.0)
    own = evaluate_only([9.0, 8.0])

    def evaluators(ctx: OnlineRLContext) -> None:
        if ctx.total_step % 2 == 0:
            stock(ctx)
            return
        own(ctx)
        if given != "value":
            ctx.eval_output = {"policy_state": dqn.eval_mode.state_dict()}
        if given == "all":
            ctx.last_eval_iter, ctx.last_eval_value = ctx.train_iter, float(ctx.eval_value)  # type: ignore[arg-type]

    first = CkptSaver(dqn, run)
    ctx = run_steps(learn(dqn), evaluators, first, n_steps=4)
    second = CkptSaver(dqn, run)
    with Task(ctx.renew()) as task:
        task.use(learn(dqn)).use(evaluate_only([8.5])).use(second).run(max_step=0)
        second.load_state_dict(first.state_dict())
        task.run(max_step=1)
    state = load(run, "best")
    assert (parameter(state), state["last_iter"], state["last_eval_value"]) == (20, 20, 9.0)
    assert second.best_value == 9.0


def test_parameters_that_the_evaluator_gives_are_saved_even_if_it_does_not_say_when(
    run: RunFolder, run_steps: Any, dqn: DQNPolicy
) -> None:
    def evaluate_first(ctx: OnlineRLContext) -> None:
        ctx.eval_value = 1.0 - ctx.total_step
        ctx.eval_output = {"policy_state": dqn.eval_mode.state_dict()}

    run_steps(learn(dqn), evaluate_first, learn(dqn), CkptSaver(dqn, run), n_steps=2)
    assert parameter(load(run, "best")) == 10


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("kind", [str, Path])
def test_a_path_gets_the_periodic_checkpoints_beside_an_experiment(
    run: RunFolder, run_steps: Any, dqn: DQNPolicy, tmp_path: Path, kind: Any
) -> None:
    folder = tmp_path / "not" / "there yet"
    periodic = CkptSaver(dqn, kind(folder), every_env_step=160, keep=2)
    chain = (learn(dqn), evaluate(dqn, *range(9)), Experiment(run, dqn), periodic)
    run_steps(*chain, n_steps=8)
    assert names_in(folder) == ["step_480.safetensors", "step_640.safetensors"]
    assert saved(run) == ["best.safetensors", "final.safetensors"]
    state = load_checkpoint(folder / "step_480.safetensors")
    assert (state["last_step"], state["last_iter"]) == (480, 60)
    assert float(next(iter(state["model"].values())).flatten()[0]) == 60.0


def test_a_saved_step_is_a_policy_that_acts(run_steps: Any, tmp_path: Path) -> None:
    dqn = DQNPolicy.for_env(make_env_manager("CartPole-v1", env_num=1), seed=0)
    run_steps(learn(dqn), CkptSaver(dqn, tmp_path / "a", every_train_iter=10), n_steps=1)
    act = load_policy(tmp_path / "a" / "step_80.safetensors")
    assert act(np.zeros(4, np.float32)) in (0, 1)


def test_checkpoints_in_a_path_of_offline_learning_are_named_by_updates(
    run_steps: Any, dqn: DQNPolicy, tmp_path: Path
) -> None:
    def update(ctx: OfflineRLContext) -> None:
        ctx.train_iter += 10

    saver = CkptSaver(dqn, tmp_path / "a", every_train_iter=20)
    run_steps(update, saver, n_steps=5, ctx=OfflineRLContext())
    assert names_in(tmp_path / "a") == ["iteration_20.safetensors", "iteration_40.safetensors"]


def test_a_resumed_run_keeps_as_many_steps_in_a_path(
    run: RunFolder, dqn: DQNPolicy, tmp_path: Path
) -> None:
    for _ in range(2):
        with Task(OnlineRLContext()) as task:
            snapshots = SnapshotSaver(run)
            task.use(learn(dqn)).use(CkptSaver(dqn, tmp_path / "a", every_env_step=80, keep=2))
            task.use(snapshots)
            snapshots.resume(task)
            task.use(stop_after(3))
            task.run()
    assert names_in(tmp_path / "a") == ["step_400.safetensors", "step_480.safetensors"]


def stop_after(n_steps: int) -> Any:
    left = [n_steps]

    def stop(ctx: OnlineRLContext) -> None:
        left[0] -= 1
        if not left[0]:
            ctx.task.stop("enough", final=False)

    return stop


def test_a_path_needs_an_interval(dqn: DQNPolicy, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="add every_env_step"):
        CkptSaver(dqn, tmp_path)
    with pytest.raises(ConfigError, match="takes a RunFolder"):
        CkptSaver(dqn, 3, every_env_step=1)
    with pytest.raises(ConfigError, match="pass its folder, which is its attribute run"):
        SnapshotSaver(Experiment(RunFolder.create("one", root=tmp_path), dqn), every_env_step=1)


def test_two_savers_of_one_path_are_refused(dqn: DQNPolicy, tmp_path: Path) -> None:
    with Task(OnlineRLContext()) as task, pytest.raises(ChainError, match="both use the path"):
        task.use(learn(dqn))
        task.use(CkptSaver(dqn, tmp_path / "a", every_env_step=80))
        task.use(CkptSaver(dqn, str(tmp_path / "a"), every_env_step=160))
        task.run(max_step=1)


@pytest.mark.parametrize("with_experiment", [False, True])
def test_a_program_may_act_on_each_new_best(
    with_experiment: bool, run: RunFolder, dqn: DQNPolicy
) -> None:
    found: list[Any] = []

    def keep(path: Path, value: float) -> None:
        found.append((path.name, value, load_checkpoint(path)["last_eval_value"]))

    with Task(OnlineRLContext()) as task:
        task.on("ckpt.best", keep)
        values = (1.0, 3.0, 2.0, math.nan, 3.0, 4.0)
        task.use(learn(dqn)).use(evaluate(dqn, *values))
        task.use(Experiment(run, dqn) if with_experiment else CkptSaver(dqn, run))
        for _ in values:
            task.run(max_step=1)
            task.sync()
    assert found == [("best.safetensors", value, value) for value in (1.0, 3.0, 4.0)]
