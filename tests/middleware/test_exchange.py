"""The exchange of data, evaluations and counters between processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dmiddleware import ChainError, WaitTimeout
from dmiddleware.data import as_tree
from dmiddleware.pipeline import CurrentNode, Task, middleware, running_as
from middleware import ContextExchanger, OnlineRLContext, Role
from middleware.exchange.events import (
    CONSUMED,
    EVALUATED,
    LEARNED,
    UPDATES_WANTED,
    collected_event,
)
from tests.middleware.nodes import node, run_nodes

SHORT_S = 0.05
COLLECTED = collected_event(0, n_ranks=1)


@pytest.fixture
def learner(tmp_path: Path) -> Iterator[Task[Any]]:
    """A learner without peers; the tests emit the events that peers would send."""
    with node(tmp_path, 0, Role.LEARNER) as task:
        yield task


@pytest.fixture
def collector(tmp_path: Path) -> Iterator[Task[Any]]:
    with node(tmp_path, 1, Role.COLLECTOR) as task:
        yield task


@middleware(roles=[Role.LEARNER])
def learn(ctx: OnlineRLContext) -> None:
    ctx.train_iter += 1


@middleware(roles=[Role.COLLECTOR], writes=["trajectories"])
def collect(ctx: OnlineRLContext) -> None:
    """Return four rows."""
    ctx.trajectories = as_tree(
        {"done": torch.zeros(2, 2, dtype=torch.bool), "episode_id": torch.zeros(2, 2).long()}
    )
    ctx.env_step += 4


@middleware(roles=[Role.EVALUATOR], writes=["eval_value"])
def evaluate(ctx: OnlineRLContext) -> None:
    ctx.eval_value = ctx.last_eval_value = float(ctx.train_iter)
    ctx.last_eval_iter = ctx.train_iter
    ctx.eval_output = {"policy_state": {}}


def batch(number: int = 1, *, node_id: int = 1, token: str = "a", env_step: int = 4) -> Any:
    ctx = OnlineRLContext()
    collect(ctx)
    return {
        "node_id": node_id,
        "token": token,
        "number": number,
        "env_step": env_step,
        "env_episode": 1,
        "train_iter": 0,
        "logged": {"collect/eps": 0.5, "exchange/blocked_s": 2.0},
        "trajectories": ctx.trajectories,
        "trajectory_end_idx": None,
        "episodes": None,
    }


def evaluation(value: float) -> dict[str, Any]:
    return {
        "eval_value": value,
        "eval_output": {"node_id": 2},
        "last_eval_iter": 7,
        "last_eval_value": value,
    }


def counters(
    train_iter: int, *, env_step: int = 0, epoch: int = 1, ranks: int = 1
) -> dict[str, Any]:
    return {
        "train_iter": train_iter,
        "env_step": env_step,
        "env_episode": 0,
        "epoch": epoch,
        "ranks": ranks,
    }


class Seen:
    """Records fields of each step, on the way back."""

    last_step = True

    def __init__(self, *fields: str) -> None:
        self.fields = fields
        self.steps: list[tuple[Any, ...]] = []

    def __call__(self, ctx: Any) -> Iterator[None]:
        yield
        self.steps.append(tuple(getattr(ctx, name) for name in self.fields))


def arrive(task: Task[Any], event: Any, *args: Any) -> None:
    """Deliver an event as if a peer had sent it."""
    task.emit(event, *args, only_local=True)
    task.sync()


def set_up(task: Task[Any], *chain: Any) -> None:
    for one in chain:
        task.use(one)
    task.run(max_step=0)


def test_in_one_process_nothing_happens() -> None:
    seen = Seen("trajectories", "env_step", "train_iter")
    with Task(OnlineRLContext()) as task:
        task.use(ContextExchanger()).use(seen).use(collect).use(learn).run(max_step=2)
        assert [step[1:] for step in seen.steps] == [(4, 1), (8, 2)]
        assert task.ctx.logged == {}


@middleware(roles=[Role.LEARNER], reads=["trajectories"])
def push(ctx: OnlineRLContext) -> None: ...


def test_fields_that_an_exchange_receives_may_be_read(learner: Task[Any]) -> None:
    learner.use(ContextExchanger()).use(collect).use(push).check()


def test_a_function_may_receive_fields(learner: Task[Any]) -> None:
    @middleware(receives=["trajectories"])
    def download(ctx: OnlineRLContext) -> None: ...

    learner.use(download).use(collect).use(push).check()


def test_without_an_exchange_the_check_asks_for_one(learner: Task[Any]) -> None:
    with pytest.raises(ChainError, match="ContextExchanger"):
        learner.use(collect).use(push).check()


def test_in_one_process_an_exchange_does_not_provide_data() -> None:
    with Task(OnlineRLContext()) as task, pytest.raises(ChainError, match="trajectories"):
        task.use(ContextExchanger()).use(push).check()


def test_a_learner_takes_and_counts_one_batch_per_step(learner: Task[Any]) -> None:
    seen = Seen("env_step", "env_episode", "train_iter")
    set_up(learner, ContextExchanger(), seen, learn)
    for number in (1, 2, 3):
        arrive(learner, COLLECTED, batch(number, env_step=10 * number))
    learner.run(max_step=2)
    assert seen.steps == [(10, 1, 1), (30, 2, 2)]


def test_a_learner_without_data_reports_it_at_the_deadline(learner: Task[Any]) -> None:
    learner.use(ContextExchanger(timeout_s=SHORT_S)).use(learn)
    with pytest.raises(WaitTimeout, match=r"collected data did not arrive within 0.05 s"):
        learner.run(max_step=1)


def test_waiting_time_is_logged_for_each_node(learner: Task[Any]) -> None:
    set_up(learner, ContextExchanger(), learn)
    arrive(learner, COLLECTED, batch(node_id=3))
    learner.run(max_step=1)
    logged = learner.ctx.logged
    assert logged["exchange/node3_blocked_s"] == 2.0
    assert logged["exchange/blocked_s"] < 2.0
    assert logged["collect/eps"] == 0.5
    assert logged["exchange/policy_lag"] == 0


def test_evaluations_received_before_the_stop_reach_observers_at_any_position(
    learner: Task[Any],
) -> None:
    before, after = Seen("eval_value", "last_eval_iter"), Seen("eval_value", "train_iter")
    set_up(learner, before, ContextExchanger(), learn, after)
    arrive(learner, EVALUATED, evaluation(1.0))
    arrive(learner, EVALUATED, evaluation(2.0))
    learner.stop("enough")
    learner.run()
    assert before.steps == [(1.0, 7), (2.0, 7)]
    assert after.steps == [(1.0, 0), (2.0, 0)]  # nothing was learned


def test_an_evaluation_is_not_shown_in_a_step_that_a_stop_cuts_short(learner: Task[Any]) -> None:
    seen = Seen("eval_value")

    def stop(ctx: OnlineRLContext) -> None:
        ctx.task.stop("now")

    set_up(learner, stop, ContextExchanger(), seen, learn)
    arrive(learner, EVALUATED, evaluation(1.0))
    learner.run()
    assert seen.steps == [(1.0,)]


def test_batches_in_transit_at_the_end_are_not_counted(learner: Task[Any]) -> None:
    set_up(learner, ContextExchanger(), learn)
    for number in (1, 2):
        arrive(learner, COLLECTED, batch(number))
    learner.run(max_step=1)
    learner.stop("enough")
    learner.run()
    assert (learner.ctx.env_step, learner.ctx.train_iter) == (4, 1)


def test_the_last_evaluation_reaches_the_learner_before_its_sender_s_stop(tmp_path: Path) -> None:
    def run_learner(task: Task[Any]) -> Any:
        seen = Seen("eval_value", "last_eval_iter")
        task.use(seen).use(ContextExchanger()).use(collect).use(learn).use(evaluate).run()
        return [step for step in seen.steps if step[0] is not None], task.stop_reason

    def run_follower(task: Task[Any]) -> Any:
        def stop(ctx: OnlineRLContext) -> None:
            if task.has_role(Role.EVALUATOR):
                task.stop("good enough")

        task.use(ContextExchanger()).use(collect).use(learn).use(evaluate).use(stop).run()
        return task.stop_reason, task.stopped_ok

    (evaluations, reason), told, _ = run_nodes(
        tmp_path,
        (Role.LEARNER, run_learner),
        (Role.COLLECTOR, run_follower),
        (Role.EVALUATOR, run_follower),
    )
    assert evaluations == [(0.0, 0)]
    assert reason == "node 2: good enough"
    assert told == ("node 2: good enough", True)


def test_an_evaluation_that_is_only_a_value_is_known_to_come_from_another_node(
    tmp_path: Path,
) -> None:
    """Otherwise the learner would save the policy that it has now as the one that was evaluated."""

    @middleware(roles=[Role.EVALUATOR], writes=["eval_value"])
    def only_value(ctx: OnlineRLContext) -> None:
        ctx.eval_value = 3.0

    def run_learner(task: Task[Any]) -> Any:
        seen = Seen("eval_value", "eval_output")
        task.use(seen).use(ContextExchanger()).use(collect).use(learn).use(only_value).run()
        return [step for step in seen.steps if step[0] is not None]

    def run_follower(task: Task[Any]) -> None:
        def stop(ctx: OnlineRLContext) -> None:
            if task.has_role(Role.EVALUATOR):
                task.stop("good enough")

        task.use(ContextExchanger()).use(collect).use(learn).use(only_value).use(stop).run()

    evaluations, *_ = run_nodes(
        tmp_path,
        (Role.LEARNER, run_learner),
        (Role.COLLECTOR, run_follower),
        (Role.EVALUATOR, run_follower),
    )
    assert evaluations == [(3.0, {"node_id": 2})]


@pytest.mark.parametrize("topology", ["mesh", "star"])
def test_a_failure_stops_all_nodes_as_failed(tmp_path: Path, topology: str) -> None:
    def run(task: Task[Any]) -> Any:
        @middleware(roles=[Role.EVALUATOR])
        def give_up(ctx: OnlineRLContext) -> None:
            task.stop("it diverged", ok=False)

        task.use(ContextExchanger()).use(collect).use(learn).use(give_up).run()
        return task.stop_reason, task.stopped_ok

    ends = run_nodes(
        tmp_path,
        (Role.LEARNER, run),
        (Role.COLLECTOR, run),
        (Role.EVALUATOR, run),
        topology=topology,
    )
    assert ends == [("node 2: it diverged", False)] * 2 + [("it diverged", False)]


def test_a_collector_waits_for_the_first_counters_of_the_learner(collector: Task[Any]) -> None:
    collector.use(ContextExchanger(timeout_s=SHORT_S)).use(collect)
    with pytest.raises(WaitTimeout, match="the first counters of the learner"):
        collector.run(max_step=1)


def test_a_collector_that_joins_later_starts_from_the_learner_s_counters(
    collector: Task[Any],
) -> None:
    set_up(collector, ContextExchanger(), collect)
    arrive(collector, LEARNED, counters(100, env_step=5000))
    collector.run(max_step=1)
    assert collector.ctx.env_step == 5004


def test_a_collector_sends_to_the_rank_of_its_number(tmp_path: Path) -> None:
    def run_learner(task: Task[Any]) -> Any:
        got: list[int] = []
        for rank in range(3):
            task.on(collected_event(rank, n_ranks=3), lambda _, rank=rank: got.append(rank))
        task.on("node.joined", lambda *_, **__: task.emit(LEARNED, counters(0, ranks=3)))
        task.emit(LEARNED, counters(0, ranks=3))
        task.use(lambda ctx: task.stop("enough") if len(got) == 2 else None).run()
        return got

    def run_collector(task: Task[Any]) -> Any:
        task.use(ContextExchanger()).use(collect).run()

    got, _ = run_nodes(tmp_path, (Role.LEARNER, run_learner), (Role.COLLECTOR, run_collector))
    assert got == [1, 1]  # without a launcher, its number is its node id


def test_a_collector_waits_when_it_is_max_ahead(collector: Task[Any]) -> None:
    set_up(collector, ContextExchanger(max_ahead=3, timeout_s=SHORT_S), collect)
    arrive(collector, LEARNED, counters(0))
    collector.run(max_step=3)
    with pytest.raises(WaitTimeout, match=r"has taken 0 of the 3 batches"):
        collector.run(max_step=1)


def test_batches_of_an_earlier_process_of_the_node_are_not_counted_as_room(
    collector: Task[Any],
) -> None:
    set_up(collector, ContextExchanger(max_ahead=1, timeout_s=SHORT_S), collect)
    arrive(collector, LEARNED, counters(0))
    collector.run(max_step=1)
    arrive(collector, CONSUMED, "the token of the process before", 1, counters(0))
    with pytest.raises(WaitTimeout, match="has taken 0 of the 1"):
        collector.run(max_step=1)


def test_a_new_learner_does_not_have_batches_that_the_old_one_left(
    collector: Task[Any],
) -> None:
    set_up(collector, ContextExchanger(max_ahead=1, timeout_s=SHORT_S), collect)
    arrive(collector, LEARNED, counters(0, epoch=1))
    collector.run(max_step=1)
    arrive(collector, LEARNED, counters(0, epoch=2))
    collector.run(max_step=1)
    assert collector.ctx.env_step == 8


def test_late_counters_of_an_earlier_learner_are_ignored(collector: Task[Any]) -> None:
    set_up(collector, ContextExchanger(max_ahead=1, timeout_s=SHORT_S), collect)
    arrive(collector, LEARNED, counters(5, env_step=100, epoch=2))
    collector.run(max_step=1)
    arrive(collector, LEARNED, counters(900, env_step=9000, epoch=1))
    with pytest.raises(WaitTimeout, match="has taken 0 of the 1"):
        collector.run(max_step=1)
    assert collector.ctx.env_step == 104


def test_counters_that_arrive_in_another_order_do_not_decrease(collector: Task[Any]) -> None:
    set_up(collector, ContextExchanger(), collect)
    arrive(collector, CONSUMED, "another", 1, counters(7, env_step=70))
    arrive(collector, LEARNED, counters(5, env_step=50))
    collector.run(max_step=1)
    assert collector.ctx.env_step == 74


def test_a_learner_answers_an_evaluator_after_the_next_update_only(learner: Task[Any]) -> None:
    sent: list[Any] = []
    emit = learner.emit

    def record(event: Any, *args: Any, **kwargs: Any) -> None:
        if event == LEARNED and kwargs.get("to") is not None:
            sent.append((kwargs["to"], args[0]["train_iter"]))
        emit(event, *args, **kwargs)

    learner.emit = record  # type: ignore[method-assign]
    set_up(learner, ContextExchanger(), learn)
    for number in (1, 2, 3):
        arrive(learner, COLLECTED, batch(number))
    arrive(learner, UPDATES_WANTED, 2, 0)
    assert sent == []
    learner.run(max_step=2)
    assert sent == [([2], 1)]
    arrive(learner, UPDATES_WANTED, 2, 1)
    assert sent == [([2], 1), (2, 2)]


def test_an_evaluator_waits_for_further_updates(tmp_path: Path) -> None:
    with node(tmp_path, 2, Role.EVALUATOR) as task:
        set_up(task, ContextExchanger(timeout_s=SHORT_S), evaluate)
        arrive(task, LEARNED, counters(5))
        task.run(max_step=1)
        with pytest.raises(WaitTimeout, match="updates of the learner"):
            task.run(max_step=1)


def test_a_stop_ends_a_wait(collector: Task[Any]) -> None:
    seen = Seen("env_step")
    collector.use(lambda ctx: ctx.task.stop("enough")).use(ContextExchanger()).use(seen)
    collector.use(collect).run()
    assert seen.steps == []


def test_no_node_waits_for_a_learner_that_has_ended(tmp_path: Path) -> None:
    def run_learner(task: Task[Any]) -> Any:
        task.use(ContextExchanger()).use(collect).use(learn).use(evaluate).run(max_step=3)

    def run_follower(task: Task[Any]) -> Any:
        task.use(ContextExchanger()).use(collect).use(learn).use(evaluate).run()
        return task.stop_reason, task.stopped_ok, task.ends_run

    _, *followers = run_nodes(
        tmp_path,
        (Role.LEARNER, run_learner),
        (Role.COLLECTOR, run_follower),
        (Role.EVALUATOR, run_follower),
    )
    assert followers == [("the learner has ended", True, False)] * 2


def test_a_failed_learner_is_waited_for_and_named(tmp_path: Path) -> None:
    def run_learner(task: Task[Any]) -> Any:
        task.use(ContextExchanger()).use(collect).use(learn).run(max_step=3)
        with pytest.raises(RuntimeError), task:
            raise RuntimeError("after the run")

    def run_collector(task: Task[Any]) -> Any:
        with pytest.raises(WaitTimeout) as caught:
            task.use(ContextExchanger(timeout_s=3.0)).use(collect).run()
        return str(caught.value)

    _, message = run_nodes(tmp_path, (Role.LEARNER, run_learner), (Role.COLLECTOR, run_collector))
    assert "it has taken 3 of the 5 batches" in message
    assert "did not arrive within 3 s; disconnected: node 0 (" in message


def test_all_collected_data_is_taken_and_counted_once(tmp_path: Path) -> None:
    made: list[int] = []
    taken: list[int] = []
    most_ahead = []

    def run_learner(task: Task[Any]) -> int:
        @middleware(roles=[Role.LEARNER])
        def count(ctx: OnlineRLContext) -> None:
            taken.append(ctx.trajectories["done"].numel())
            most_ahead.append(len(made) - len(taken))
            if len(taken) == 40:
                task.stop("forty have come")

        task.use(ContextExchanger(max_ahead=2)).use(collect).use(count).run()
        return task.ctx.env_step

    def run_collector(task: Task[Any]) -> None:
        @middleware(roles=[Role.COLLECTOR])
        def count(ctx: OnlineRLContext) -> None:
            made.append(1)

        task.use(ContextExchanger(max_ahead=2)).use(count).use(collect).use(learn).run()

    env_step, *_ = run_nodes(
        tmp_path,
        (Role.LEARNER, run_learner),
        (Role.COLLECTOR, run_collector),
        (Role.COLLECTOR, run_collector),
    )
    assert env_step == sum(taken) == 160
    assert max(most_ahead) <= 4


def test_counting_continues_when_a_collector_dies_and_rejoins(tmp_path: Path) -> None:
    def run_learner(task: Task[Any]) -> Any:
        @middleware(roles=[Role.LEARNER])
        def count(ctx: OnlineRLContext) -> None:
            if ctx.env_step == 40:
                task.stop("ten batches have come")

        task.use(ContextExchanger()).use(collect).use(count).run()
        return task.ctx.env_step

    def run_first(task: Task[Any]) -> None:
        # It ends after five batches without notifying its peers.
        task.use(ContextExchanger()).use(collect).run(max_step=5)

    def life_after_life(task: Task[Any]) -> None:
        run_first(task)
        task.close()
        assert task.router is not None
        task.router.close()  # type: ignore[attr-defined]
        with node(tmp_path, 1, Role.COLLECTOR, n_nodes=2) as again:
            again.use(ContextExchanger()).use(collect).run()

    env_step, _ = run_nodes(
        tmp_path, (Role.LEARNER, run_learner), (Role.COLLECTOR, life_after_life)
    )
    assert env_step == 40


def draw(n_rows: int) -> Any:
    """A learner that draws ``n_rows`` in each step, once there are eight."""

    @middleware(roles=[Role.LEARNER])
    def draw(ctx: OnlineRLContext) -> None:
        if ctx.env_step >= 8 and not ctx.learning_held:
            ctx.trained_env_step += n_rows
            ctx.train_iter += 1

    return draw


@pytest.mark.parametrize(("ratio", "drawn_a_step"), [(1.0, 8), (6.0, 8), (2.0, 8)])
def test_the_pace_is_held_from_the_first_update_on(
    learner: Task[Any], ratio: float, drawn_a_step: int
) -> None:
    seen = Seen("env_step", "trained_env_step")
    set_up(learner, ContextExchanger(samples_per_insert=ratio), seen, draw(drawn_a_step))
    for number in range(1, 41):
        arrive(learner, COLLECTED, batch(number))
    learner.run(max_step=38)
    begin = next(step for step in seen.steps if step[1])
    for env_step, drawn in seen.steps:
        if drawn:
            ahead = drawn - begin[1] - ratio * (env_step - begin[0])
            assert -ratio * 4 <= ahead <= drawn_a_step
    assert seen.steps[-1][1] > begin[1]


def test_a_learner_that_is_ahead_waits_for_data(learner: Task[Any]) -> None:
    exchange = ContextExchanger(samples_per_insert=0.5, timeout_s=SHORT_S)
    set_up(learner, exchange, draw(8))
    for number in (1, 2, 3):
        arrive(learner, COLLECTED, batch(number))
    learner.run(max_step=3)
    with pytest.raises(WaitTimeout, match="collected data"):
        learner.run(max_step=1)


def test_a_learner_that_is_behind_takes_no_data(learner: Task[Any]) -> None:
    seen = Seen("trajectories", "env_step")
    set_up(learner, ContextExchanger(samples_per_insert=100), seen, draw(8))
    for number in range(1, 6):
        arrive(learner, COLLECTED, batch(number))
    learner.run(max_step=6)
    assert [step[1] for step in seen.steps] == [4, 8, 12, 12, 12, 12]
    assert seen.steps[-1][0] is None


def test_a_learner_that_is_behind_and_cannot_learn_takes_data(learner: Task[Any]) -> None:
    """Like a learner whose buffer was cleared."""
    seen = Seen("env_step")

    @middleware(roles=[Role.LEARNER])
    def draw_at_times(ctx: OnlineRLContext) -> None:
        if ctx.total_step < 2 or ctx.env_step >= 16:
            ctx.trained_env_step += 8

    set_up(learner, ContextExchanger(samples_per_insert=100), seen, draw_at_times)
    for number in range(1, 6):
        arrive(learner, COLLECTED, batch(number))
    learner.run(max_step=8)
    assert [env_step for (env_step,) in seen.steps] == [4, 8, 8, 12, 16, 16, 16, 16]


def test_the_pace_continues_from_a_snapshot(learner: Task[Any], tmp_path: Path) -> None:
    set_up(learner, ContextExchanger(samples_per_insert=1), draw(8))
    for number in (1, 2, 3):
        arrive(learner, COLLECTED, batch(number))
    learner.run(max_step=3)
    saved = ContextExchanger(samples_per_insert=1)
    state = learner.state_dict()["middleware"]["ContextExchanger"]
    saved.load_state_dict(state)
    assert saved.state_dict()["pace"] == state["pace"] == {"begin": [8, 8]}


@pytest.mark.parametrize(("before", "after"), [(1.0, 6.0), (6.0, 1.0), (2.0, 0.5), (3.0, 3.0)])
def test_another_pace_after_a_resume_holds_from_there_on(
    learner: Task[Any], tmp_path: Path, before: float, after: float
) -> None:
    set_up(learner, ContextExchanger(samples_per_insert=before), draw(4))
    for number in range(1, 101):
        arrive(learner, COLLECTED, batch(number))
    learner.run(max_step=90)
    state = learner.state_dict()
    resumed_at = learner.ctx.env_step, learner.ctx.trained_env_step
    # The second resume has the pace of the first one.
    for number in (1, 2):
        with node(tmp_path, number, Role.LEARNER) as task:
            seen = Seen("env_step", "trained_env_step")
            task.use(ContextExchanger(samples_per_insert=after)).use(seen).use(draw(4))
            task.load_state_dict(state)
            for batch_number in range(1, 101):
                arrive(task, COLLECTED, batch(batch_number))
            task.run(max_step=50)
            state = task.state_dict()
        for env_step, drawn in seen.steps:
            ahead = drawn - resumed_at[1] - after * (env_step - resumed_at[0])
            # A batch allows as many rows; one step draws four.
            assert -4 * max(before, after) - 4 <= ahead <= 4 * max(before, after) + 4
        assert seen.steps[-1][0] > resumed_at[0] and seen.steps[-1][1] > resumed_at[1]


@pytest.mark.parametrize("ratio", [0.5, 4.0])
def test_what_one_process_has_learned_in_between_does_not_change_the_pace(
    learner: Task[Any], tmp_path: Path, ratio: float
) -> None:
    def use_chain(task: Task[Any]) -> Seen:
        seen = Seen("env_step", "trained_env_step")
        set_up(task, ContextExchanger(samples_per_insert=ratio), seen, collect, draw(4))
        for number in range(1, 51):
            arrive(task, COLLECTED, batch(number))
        return seen

    use_chain(learner)
    learner.run(max_step=20)
    with Task(OnlineRLContext()) as alone:
        use_chain(alone)
        alone.load_state_dict(learner.state_dict())
        alone.run(max_step=500)  # each with four rows collected and four drawn
        state = alone.state_dict()
    with node(tmp_path, 1, Role.LEARNER) as task:
        seen = use_chain(task)
        task.load_state_dict(state)
        task.run(max_step=20)
    begin = seen.steps[0]
    for env_step, drawn in seen.steps:
        ahead = drawn - begin[1] - ratio * (env_step - begin[0])
        assert -4 * ratio - 4 <= ahead <= 4 * ratio + 4


@pytest.mark.parametrize(
    "options", [{"samples_per_insert": 0}, {"max_ahead": 0}, {"timeout_s": -1}]
)
def test_invalid_options_are_rejected(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"must be (a positive number|an integer ≥ 1)"):
        ContextExchanger(**options)


def test_the_waiting_time_is_reported_to_the_launcher(collector: Task[Any]) -> None:
    with running_as(CurrentNode()) as this:
        collector.use(ContextExchanger(timeout_s=SHORT_S)).use(collect)
        with pytest.raises(WaitTimeout):
            collector.run(max_step=1)
        assert this.progress().blocked_s >= SHORT_S
