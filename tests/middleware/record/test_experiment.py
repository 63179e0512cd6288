import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from dmiddleware.data import TensorBuffer
from dmiddleware.env import make_env_manager
from dmiddleware.errors import TaskStateError
from dmiddleware.pipeline import Task
from dmiddleware.policy import DQNPolicy, create_policy
from dmiddleware.rl import Schedule
from middleware import (
    Experiment,
    InteractionEvaluator,
    OffPolicyLearner,
    OnlineRLContext,
    ProgressBar,
    RunFolder,
    SnapshotSaver,
    StepCollector,
    data_pusher,
    eps_greedy_handler,
    final_ctx_saver,
    interaction_evaluator,
    termination_checker,
)


def saved(run: RunFolder) -> Any:
    return json.loads((run.path / "final_ctx.json").read_text())


def test_counters_and_the_stop_reason_are_saved(run: RunFolder) -> None:
    def work(ctx: OnlineRLContext) -> None:
        ctx.env_step += 8
        ctx.trajectories = object()
        if ctx.env_step == 24:
            ctx.task.stop("enough")

    with Task(OnlineRLContext()) as task:
        task.use(final_ctx_saver(run)).use(work)
        task.run(max_step=10)
        assert not (run.path / "final_ctx.json").exists()
    assert saved(run) == {
        "total_step": 2,
        "env_step": 24,
        "env_episode": 0,
        "train_iter": 0,
        "trained_env_step": 0,
        "last_eval_iter": -1,
        "last_eval_value": None,
        "stop_reason": "enough",
    }


def test_fields_that_a_user_keeps_are_saved(run: RunFolder, run_steps: Any) -> None:
    def visit(ctx: Any) -> None:
        ctx.visits = 3
        ctx.weights = [1.0]
        ctx.keep("visits", "weights")

    run_steps(visit, final_ctx_saver(run))
    assert saved(run)["visits"] == 3
    assert "weights" not in saved(run)


def test_it_is_saved_after_an_error_too(run: RunFolder, run_steps: Any) -> None:
    def fail(ctx: OnlineRLContext) -> None:
        ctx.env_step += 8
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        run_steps(fail, final_ctx_saver(run))
    assert saved(run)["env_step"] == 8


def test_task_that_never_ran_saves_no_file(run: RunFolder) -> None:
    with Task(OnlineRLContext()) as task:
        task.use(final_ctx_saver(run))
    assert not (run.path / "final_ctx.json").exists()


def cartpole(seed: int = 0) -> Any:
    return make_env_manager("CartPole-v1", env_num=2, seed=seed)


def experiment_chain(
    root: Path, *, resume: bool = False, **policy_options: Any
) -> tuple[Task[Any], Experiment]:
    policy = DQNPolicy.for_env(
        cartpole(),
        seed=0,
        model={"encoder_hidden_sizes": [16]},
        batch_size=16,
        eps=Schedule.linear(0.5, 0.1, decay=100),
        **policy_options,
    )
    buffer = TensorBuffer(1000, seed=0)
    run = RunFolder.create("short", root=root, resume=resume)
    experiment = Experiment(run, policy, n_fresh_episode=4)
    task = Task(seed=0)
    task.use(eps_greedy_handler(policy))
    task.use(StepCollector(policy, cartpole(), n_sample=20)).use(data_pusher(buffer))
    task.use(OffPolicyLearner(policy, buffer, update_per_collect=4))
    task.use(interaction_evaluator(policy, cartpole(1), n_episode=2, every_train_iter=20))
    return task.use(experiment), experiment


def test_an_error_of_a_part_of_an_experiment_names_the_part(tmp_path: Path) -> None:
    task, _ = experiment_chain(tmp_path)

    def evaluate(ctx: Any) -> None:
        ctx.eval_value = "high"

    with pytest.raises(ValueError, match="high") as raised, task:
        task.use(evaluate).run(max_step=1)
    notes = [note for note in raised.value.__notes__ if "way back" in note]
    assert notes == ["in CkptSaver on the way back", "in middleware 6 (Experiment) on the way back"]


def test_one_line_records_the_whole_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    task, experiment = experiment_chain(tmp_path)
    with task:
        task.use(termination_checker(max_env_step=200)).run()
    result = experiment.result
    found = {path.name for path in result.path.iterdir()}
    written = {"config.yaml", "curve.png", "final_ctx.json", "log.txt", "result.json"}
    assert found == written | {"ckpt", "tb", "metrics.jsonl"}
    assert {path.stem for path in (result.path / "ckpt").iterdir()} == {"best", "final"}
    assert result.env_step == 200
    assert result.n_episode == 4
    assert 1 <= result.mean_return <= 500
    output = capsys.readouterr()
    assert output.out == f"{result}\n"
    assert "over 4 fresh episodes" in output.out
    assert "step 200/200" in output.err
    assert "mean return" in (result.path / "log.txt").read_text()


def test_the_result_file_has_the_returns_of_the_best_and_of_the_last_policy(
    tmp_path: Path,
) -> None:
    task, experiment = experiment_chain(tmp_path)
    with task:
        task.use(termination_checker(max_env_step=200)).run()
    result = experiment.result
    fields = json.loads((result.path / "result.json").read_text())
    assert fields["mean_return"] == result.mean_return
    assert fields["last_return"] == result.last_return
    assert 1 <= result.last_return <= 500
    assert [at for at, _ in fields["evaluations"]] == [20, 100, 200]
    assert fields["env_step"] == 200


@pytest.mark.parametrize("stops_at_the_best", [True, False])
def test_the_last_policy_plays_only_if_it_is_not_the_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stops_at_the_best: bool
) -> None:
    played = []
    evaluate_fresh = InteractionEvaluator.evaluate_fresh

    def count(self: Any, state: Any, **options: Any) -> list[float]:
        played.append(state)
        return evaluate_fresh(self, state, **options)

    monkeypatch.setattr(InteractionEvaluator, "evaluate_fresh", count)
    task, experiment = experiment_chain(tmp_path)
    with task:
        if stops_at_the_best:
            task.use(lambda ctx: task.stop("solved") if ctx.eval_value else None)
        task.use(termination_checker(max_env_step=200)).run()
    assert len(played) == (1 if stops_at_the_best else 2)
    result = experiment.result
    assert result.n_episode == 4
    assert (result.mean_return == result.last_return) or not stops_at_the_best


def test_a_resumed_run_has_the_evaluations_and_the_duration_of_both_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ages = {200: 1000.0, 400: 10.0}
    monkeypatch.setattr(RunFolder, "age_s", property(lambda _: ages[limit]))
    results = []
    for limit in (200, 400):
        task, experiment = experiment_chain(tmp_path, resume=True)
        snapshots = SnapshotSaver(experiment.run)
        task.use(snapshots).use(termination_checker(max_env_step=limit))
        with task:
            resumed = snapshots.resume(task)
            ages[limit] += 15.0
            task.run()
        results.append(experiment.result)
        assert resumed is (limit == 400)
    first, second = results
    assert second.path == first.path
    assert second.evaluations[: len(first.evaluations)] == first.evaluations
    assert len(second.evaluations) > len(first.evaluations)
    assert (first.train_s, second.train_s) == (1015.0, 1030.0)


def test_saved_config_has_the_values_that_the_run_used(tmp_path: Path) -> None:
    task, experiment = experiment_chain(tmp_path)
    with task:
        task.run(max_step=1)
    config = yaml.safe_load((experiment.result.path / "config.yaml").read_text())
    assert config["seed"] == 0
    assert config["algorithm"] == "DQNPolicy"
    policy = config["policy"]
    assert (policy["type"], policy["batch_size"]) == ("dqn", 16)
    assert policy["eps"] == {
        "type": "linear", "start": 0.5, "end": 0.1, "decay": 100, "by": "env_step", "points": []
    }  # fmt: skip
    assert create_policy(policy).cfg.batch_size == 16
    chain = {name: settings for one in config["chain"] for name, settings in one.items()}
    assert list(chain)[:2] == ["EpsGreedyHandler", "StepCollector"]
    assert chain["StepCollector"] == {"env_num": 2, "n_sample": 20, "random_steps": 0}
    assert chain["OffPolicyLearner"]["update_per_collect"] == 4
    assert chain["OffPolicyLearner"]["buffer"]["size"] == 1000
    assert chain["OffPolicyLearner"]["buffer"]["sampler"] == {
        "type": "UniformSampler", "replace": True
    }  # fmt: skip
    assert chain["InteractionEvaluator"]["every_train_iter"] == 20
    assert chain["InteractionEvaluator"]["stop_value"] is None
    assert chain["Experiment"]["n_fresh_episode"] == 4


def test_failed_run_is_recorded_without_a_final_evaluation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(ctx: OnlineRLContext) -> None:
        if ctx.total_step == 3:
            raise RuntimeError("no")

    task, experiment = experiment_chain(tmp_path)
    with pytest.raises(RuntimeError, match="no"), task:
        task.use(fail).run()
    assert (experiment.run.ckpt_dir / "final.safetensors").exists()
    assert math.isnan(experiment.result.mean_return)
    assert capsys.readouterr().out == ""


def test_result_before_the_end_is_rejected(tmp_path: Path) -> None:
    task, experiment = experiment_chain(tmp_path)
    with task, pytest.raises(TaskStateError, match="no result yet"):
        _ = experiment.result


def test_a_snapshot_takes_space_that_does_not_grow_with_the_run(tmp_path: Path) -> None:
    policy = DQNPolicy.for_env(cartpole(), seed=0, model={"encoder_hidden_sizes": [8]})
    run = RunFolder.create("long", root=tmp_path)

    def report(ctx: OnlineRLContext) -> None:
        ctx.env_step += 8
        ctx.log("collect/return_mean", 1.0 / ctx.env_step)
        ctx.eval_value = -1.0 - ctx.env_step
        ctx.train_output = [{"loss": 1.0}]

    snapshots = SnapshotSaver(run)
    sizes = []
    with Task() as task:
        task.use(report).use(Experiment(run, policy)).use(snapshots)
        task.use(termination_checker(max_env_step=1e9)).use(ProgressBar())
        for n_steps in (500, 5000):
            task.run(max_step=n_steps)
            sizes.append(snapshots.save(task).stat().st_size)
    assert sizes[1] < sizes[0] + 10_000


def test_the_bar_of_a_resumed_run_shows_the_last_returns_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = []
    for limit in (200, 200):
        task, experiment = experiment_chain(tmp_path, resume=True)
        snapshots = SnapshotSaver(experiment.run)
        task.use(snapshots).use(termination_checker(max_env_step=limit))
        with task:
            snapshots.resume(task)
            task.run()
        shown += re.findall(r"return [0-9.]+ eval", capsys.readouterr().err)
    assert len(shown) == 2
    assert shown[0] == shown[1]
