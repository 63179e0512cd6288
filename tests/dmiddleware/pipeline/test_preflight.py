"""The check before the first step: the problems that it finds, and its messages."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import pytest

from dmiddleware import ChainError, Context, Task, kept, middleware, produced, renewed
from dmiddleware.pipeline import CurrentNode, running_as
from middleware import OnlineRLContext, Role


def part(name="part", **declared):
    def mw(ctx):
        pass

    mw.__name__ = name
    return middleware(**declared)(mw)


def returning(name="part", **declared):
    def mw(ctx):
        yield

    mw.__name__ = name
    return middleware(**declared)(mw)


collect = part("collect", writes=("trajectories",))
push = part("push", reads=("trajectories",))
fetch = part("fetch", writes=("train_data",))
learn = part("learn", reads=("train_data",), writes=("train_output",))


def problems_of(*mws, ctx=None, roles=()):
    with Task(ctx if ctx is not None else OnlineRLContext(), roles=roles) as task:
        for mw in mws:
            task.use(mw(task) if getattr(mw, "__name__", "") == "<lambda>" else mw)
        try:
            task.check()
        except ChainError as error:
            first, *problems = str(error).splitlines()
            assert first == f"the chain cannot run; {len(problems)} problem(s):"
            return problems
    return []


def test_a_chain_that_writes_every_field_before_it_is_read_passes():
    assert problems_of(collect, push, fetch, learn) == []


def test_the_chain_is_checked_before_the_first_step_and_before_any_set_up():
    class Part:
        def setup(self, task):
            raise AssertionError("never called")

        def __call__(self, ctx):
            raise AssertionError("never called")

    with Task(OnlineRLContext()) as task, pytest.raises(ChainError):
        task.use(Part()).use(learn).run()


def test_all_problems_are_listed_at_once_each_with_its_remedy():
    problems = problems_of(push, learn, part("log", reads=("eval_value",)))
    assert len(problems) == 3
    assert problems[0] == (
        "  1. middleware 1 (push) reads ctx.trajectories, which no middleware before it writes; "
        "add StepCollector(policy, env, n_sample=...) before it"
    )
    assert "middleware 2 (learn) reads ctx.train_data" in problems[1]
    assert "add GAEEstimator(policy), or a middleware that samples a buffer, before" in problems[1]
    assert "InteractionEvaluator" in problems[2]


def test_every_produced_field_of_the_stock_contexts_has_its_own_remedy():
    for kind in (OnlineRLContext,):
        for name, what in kind.field_kinds().items():
            if what == "produced":
                (problem,) = problems_of(part(reads=(name,)))
                assert "a middleware that declares" not in problem, name


def test_kept_and_renewed_fields_may_be_read_without_a_writer():
    assert (
        problems_of(part(reads=("env_step", "last_eval_value", "collect_kwargs", "logged"))) == []
    )


def test_a_field_that_is_only_written_later_is_reported_with_both_remedies():
    (problem,) = problems_of(learn, fetch)
    assert "which only middleware 2 (fetch) writes, after it" in problem
    assert "ctx.keep('train_data')" in problem


def test_a_field_that_is_written_later_may_be_read_if_it_is_kept():
    ctx = OnlineRLContext()
    ctx.keep("train_data")
    assert problems_of(learn, fetch, ctx=ctx) == []
    ctx = OnlineRLContext()
    ctx.keep("train_data")
    (problem,) = problems_of(learn, ctx=ctx)
    assert "no middleware before it writes" in problem


def test_a_kept_field_that_is_already_set_needs_no_writer():
    ctx = OnlineRLContext(train_data=[1])
    ctx.keep("train_data")
    assert problems_of(learn, ctx=ctx) == []


def test_a_field_that_is_set_but_not_kept_is_reported():
    (problem,) = problems_of(learn, ctx=OnlineRLContext(train_data=[1]))
    assert "is set now, but is reset after the first step" in problem
    assert "ctx.keep('train_data')" in problem


def test_a_generator_may_read_fields_that_later_middleware_write():
    assert problems_of(returning("log", reads=("train_output",)), fetch, learn) == []

    class Log:
        reads = ("train_output",)

        def __call__(self, ctx):
            yield

    assert problems_of(Log(), fetch, learn) == []
    (problem,) = problems_of(returning("log", reads=("train_output",)))
    assert "no middleware before it writes" in problem


def test_the_problem_of_an_unknown_field_suggests_similar_names():
    (problem,) = problems_of(part(reads=("train_dat",)))
    assert "is not a field of OnlineRLContext and which no middleware writes" in problem
    assert "did you mean train_data" in problem


def test_custom_fields_may_be_read_if_they_are_declared_or_written():
    @dataclass
    class MyContext(OnlineRLContext):
        visits: int = kept(0)
        novelty: float = renewed(0.0)
        map: list | None = produced()

    assert problems_of(part(reads=("visits", "novelty")), ctx=MyContext()) == []
    (problem,) = problems_of(part(reads=("map",)), ctx=MyContext())
    assert "add a middleware that declares writes=('map',) before it" in problem
    bonus = part("bonus", writes=("bonus",))
    assert problems_of(bonus, part(reads=("bonus",))) == []
    ctx = OnlineRLContext()
    ctx.bonus = 1
    ctx.keep("bonus")
    assert problems_of(part(reads=("bonus",)), ctx=ctx) == []


def test_a_typo_in_a_written_field_is_found_where_the_field_is_read():
    (problem,) = problems_of(part("collect", writes=("trajectorie",)), push)
    assert "middleware 2 (push) reads ctx.trajectories" in problem
    assert "middleware 1 (collect) writes ctx.trajectorie: is that a typo?" in problem


@pytest.mark.parametrize("name", ["novelty_map", "episode", "train_date"])
def test_a_custom_field_may_have_any_name(name):
    assert problems_of(part(writes=(name,))) == []
    assert problems_of(part(writes=(name,)), part(reads=(name,))) == []


def test_the_remedy_for_an_undeclared_collector_is_to_declare_what_it_writes():
    def my_collector(ctx):
        ctx.trajectories = []

    (problem,) = problems_of(my_collector, push)
    assert "middleware 1 (my_collector)" in problem
    assert "@middleware(writes=('trajectories',))" in problem
    declared = middleware(writes=("trajectories",))(my_collector)
    assert problems_of(declared, push) == []


def test_an_object_that_two_middleware_own_is_refused():
    env, run = object(), Path("runs/cartpole")
    collector, evaluator = part("collect", owns=(env,)), part("evaluate", owns=(env,))
    (problem,) = problems_of(collector, evaluator)
    assert "middleware 2 (evaluate) and middleware 1 (collect) both use the same object" in problem
    assert problems_of(collector, part(owns=(object(),)), collector) == []
    (problem,) = problems_of(part(owns=(run,)), part(owns=(str(run.absolute()),)))
    assert "runs/cartpole" in problem


def test_an_object_may_have_one_owner_in_each_role():
    env = object()
    collector = part("collect", roles=(Role.COLLECTOR,), owns=(env,))
    evaluator = part("evaluate", roles=(Role.EVALUATOR,), owns=(env,))
    assert problems_of(collector, evaluator, roles=(Role.COLLECTOR,)) == []


def test_a_buffer_that_is_drawn_from_and_never_filled_is_refused():
    buffer, other = [], []
    sampler = part("sample", draws_from=(buffer,))
    (problem,) = problems_of(sampler, part(fills=(other,)))
    assert "middleware 1 (sample) draws from a list, which is empty" in problem
    assert "DataPusher(buffer)" in problem
    assert "@middleware(fills=(buffer,))" in problem
    assert problems_of(sampler, part(fills=(buffer,))) == []
    assert problems_of(sampler, part(roles=(Role.LEARNER,), fills=(buffer,))) == []


def test_a_buffer_that_holds_data_already_may_be_drawn_from():
    assert problems_of(part(draws_from=([1, 2],))) == []


def test_a_function_can_report_problems():
    seen = []

    def preflight(chain):
        seen.extend(chain.middleware)
        return ["it explores nothing; add EpsGreedyHandler(policy)"]

    @middleware(preflight=preflight)
    def learn(ctx):
        pass

    (problem,) = problems_of(learn)
    assert "middleware 1 (learn): it explores nothing; add EpsGreedyHandler" in problem
    assert seen == [learn]


def test_a_function_can_be_bound_to_its_chain():
    chains = []

    @middleware(bind=lambda chain: chains.append(list(chain.middleware)))
    def learn(ctx):
        pass

    with Task(OnlineRLContext()) as task:
        task.use(learn).run(max_step=1)
    assert chains == [[learn]]


def test_a_middleware_can_report_further_problems():
    class Learner:
        def __init__(self, *problems):
            self.problems = problems
            self.chain = None

        def __call__(self, ctx):
            pass

        def preflight(self, chain):
            self.chain = chain
            return self.problems

    buffer, other, ctx = [1], [], OnlineRLContext()
    learner = Learner("it explores nothing; add EpsGreedyHandler(policy)")
    sampler = part("sample", roles=(Role.LEARNER,), draws_from=(buffer,))
    pusher = part("push", roles=(Role.COLLECTOR,), fills=(buffer,), writes=("bonus",))
    (problem,) = problems_of(sampler, pusher, learner.__call__, ctx=ctx, roles=(Role.LEARNER,))
    assert "middleware 3 (__call__): it explores nothing; add EpsGreedyHandler" in problem
    chain = learner.chain
    assert list(chain.middleware) == [sampler, pusher, learner]
    assert list(chain.active) == [sampler, learner]
    assert chain.context is ctx
    assert (chain.writes("bonus"), chain.writes("obs")) == (True, False)
    assert (chain.fills(buffer), chain.fills(other)) == (True, False)
    inactive = part(roles=(Role.COLLECTOR,))
    inactive.preflight = lambda chain: ["never called"]
    assert problems_of(inactive, part(roles=(Role.LEARNER,)), roles=(Role.LEARNER,)) == []


class Bound:
    """A middleware that records what the task calls, and the chains to which it is bound."""

    def __init__(self, tape, name):
        self.tape, self.__name__ = tape, name
        self.chains = []

    def __call__(self, ctx):
        self.tape.append(f"{self.__name__} runs")

    def preflight(self, chain):
        self.tape.append(f"{self.__name__} is checked")
        return ()

    def bind(self, chain):
        self.tape.append(f"{self.__name__} is bound")
        self.chains.append(list(chain.middleware))

    def setup(self, task):
        self.tape.append(f"{self.__name__} is set up")


def test_middleware_are_bound_to_the_chain_between_its_check_and_their_set_up():
    tape = []
    first, second = Bound(tape, "first"), Bound(tape, "second")
    inactive = Bound(tape, "inactive")
    with Task(OnlineRLContext(), roles=(Role.LEARNER,)) as task:
        task.use(first, roles=(Role.LEARNER,)).use(second).use(inactive, roles=(Role.COLLECTOR,))
        task.check()
        assert tape == ["first is checked", "second is checked"]
        task.run(max_step=1)
    assert tape[2:] == [
        *("first is checked", "second is checked", "first is bound", "second is bound"),
        *("first is set up", "second is set up", "first runs", "second runs"),
    ]
    assert first.chains == second.chains == [[first, second, inactive]]


def test_middleware_are_bound_again_to_a_chain_that_has_changed():
    tape = []
    first, later = Bound(tape, "first"), Bound(tape, "later")
    with Task(OnlineRLContext()) as task:
        task.use(first).run(max_step=1)
        task.run(max_step=1)
        task.use(later).run(max_step=1)
    assert (first.chains, later.chains) == ([[first], [first, later]], [[first, later]])
    assert tape.count("first is set up") == 1


def test_a_middleware_that_is_first_called_in_a_step_is_bound_although_nothing_checks_it():
    tape = []
    inner, grouped = Bound(tape, "inner"), Bound(tape, "grouped")

    def call_inner(ctx):
        ctx.task.wrap(inner)(ctx).back()
        list(ctx.task.serial(grouped)(ctx))

    with Task(OnlineRLContext()) as task:
        task.use(call_inner).run(max_step=2)
    assert tape == [
        *("inner is bound", "inner is set up", "inner runs"),
        *("grouped is bound", "grouped is set up", "grouped runs"),
        *("inner runs", "grouped runs"),
    ]
    assert (inner.chains, grouped.chains) == ([[call_inner, inner]], [[call_inner, grouped]])


def test_an_error_while_a_middleware_is_bound_names_it():
    class Unready(Bound):
        def bind(self, chain):
            raise ValueError("no limits")

    with Task(OnlineRLContext()) as task:
        task.use(Unready([], "unready"))
        with pytest.raises(ValueError, match="no limits") as raised:
            task.run(max_step=1)
    assert "while unready was being bound to the chain" in raised.value.__notes__


def test_what_a_wrapped_middleware_declares_counts_for_the_chain():
    buffer = []
    with Task(OnlineRLContext(), roles=(Role.COLLECTOR,)) as task:
        wrapped = part("collect", roles=(Role.COLLECTOR,), writes=("trajectories",))
        task.wrap(wrapped)
        task.wrap(part(fills=(buffer,)))
        task.use(part(reads=("trajectories",), draws_from=(buffer,))).check()


def test_members_of_a_serial_count_in_their_order():
    assert problems_of(lambda task: task.serial(fetch, task.serial(learn))) == []
    (problem,) = problems_of(lambda task: task.serial(learn, fetch))
    assert "middleware 1.1 (learn)" in problem
    assert "middleware 1.2 (fetch)" in problem


def test_branches_of_a_parallel_do_not_see_what_the_others_write():
    (problem,) = problems_of(lambda task: task.parallel(fetch, learn))
    assert "which only middleware 1.1 (fetch) writes, in another branch" in problem
    assert "task.serial(...)" in problem
    assert problems_of(lambda task: task.parallel(fetch, collect), learn, push) == []
    assert problems_of(fetch, lambda task: task.parallel(learn, collect)) == []
    assert problems_of(lambda task: task.parallel(task.serial(fetch, learn), collect)) == []


def test_an_empty_chain_is_refused():
    (problem,) = problems_of()
    assert "it is empty; add middleware with task.use" in problem


def test_every_role_of_the_task_needs_middleware():
    collector = part("collect", roles=(Role.COLLECTOR,), writes=("trajectories",))
    assert problems_of(collector, roles=("collector",)) == []
    (problem,) = problems_of(collector, roles=("collector", "learner"))
    assert "role 'learner', but the chain has middleware only for collector" in problem


def test_a_chain_without_roles_runs_in_every_role():
    assert problems_of(part(), roles=(Role.LEARNER,)) == []


def test_a_launched_process_may_have_a_further_role_that_the_chain_lacks():
    collect = part("collect", roles=(Role.COLLECTOR,))
    for roles, n_problems in ((("collector", "evaluator"), 0), (("evaluator",), 1)):
        with running_as(CurrentNode(roles=roles, run_roles=("learner", *roles))):
            problems = problems_of(collect)
        assert len(problems) == n_problems
        assert all("--roles collector=1" in problem for problem in problems)


def test_a_chain_with_a_learner_part_needs_a_learner_in_the_run():
    chain = (part("act", roles=(Role.COLLECTOR,)), part("learn", roles=(Role.LEARNER,)))
    for run_roles, n_problems in ((("collector",), 1), (("collector", "learner"), 0), (None, 0)):
        with running_as(CurrentNode(roles=("collector",), run_roles=run_roles)):
            problems = problems_of(*chain)
        assert len(problems) == n_problems
        assert all("--roles learner=1" in problem for problem in problems)


COLLECT, LEARN, EVALUATE = (
    part(role, roles=(role,)) for role in (Role.COLLECTOR, Role.LEARNER, Role.EVALUATOR)
)


@pytest.mark.parametrize(
    ("missing", "part_roles", "run_roles"),
    [
        ("evaluator", ("evaluator",), ("learner", "collector")),
        ("collector", ("collector",), ("learner", "evaluator")),
        ("annotator", ("annotator",), ("learner", "collector", "evaluator")),
        ("annotator' or 'critic", ("critic", "annotator"), ("learner", "collector")),
        ("annotator", ("annotator",), ("learner",)),
    ],
)
def test_a_part_whose_role_no_process_has_is_refused_by_the_learner(missing, part_roles, run_roles):
    chain = (LEARN, part("special", roles=part_roles))
    with running_as(CurrentNode(roles=("learner",), run_roles=run_roles)):
        (problem,) = problems_of(*chain)
    assert f"middleware 2 (special) is for the role '{missing}', but no process" in problem
    names = ["learner", *sorted({*run_roles[1:], sorted(part_roles)[0]})]
    assert "--roles " + ",".join(f"{name}=1" for name in names) in problem
    for role in run_roles[1:]:
        with running_as(CurrentNode(roles=(role,), run_roles=run_roles)):
            assert not [p for p in problems_of(*chain, COLLECT, EVALUATE) if "special" in p]


def test_a_role_that_use_gives_counts_also_in_groups():
    with Task(OnlineRLContext(), roles=["learner"]) as task:
        group = task.serial(task.parallel(EVALUATE, part()), part())
    for roles, entry in ((("annotator",), part()), (None, group)):
        node = CurrentNode(roles=("learner",), run_roles=("learner", "collector"))
        with running_as(node), Task(OnlineRLContext()) as task:
            task.use(LEARN).use(entry, roles=roles)
            with pytest.raises(ChainError, match="but no process of the run has it"):
                task.run(max_step=1)
            assert task.ctx.total_step == 0


def test_a_part_of_several_roles_needs_one_of_them_in_the_run():
    several = part("several", roles=("annotator", "collector"))
    with running_as(CurrentNode(roles=("learner",), run_roles=("learner", "collector"))):
        assert problems_of(LEARN, several) == []


def test_a_role_that_the_learner_s_task_has_itself_is_not_missing():
    node = CurrentNode(roles=("learner",), run_roles=("learner", "collector"))
    with running_as(node), Task(OnlineRLContext()) as task:
        task.add_role("evaluator")
        task.use(LEARN).use(EVALUATE).check()
    with running_as(node):
        assert problems_of(LEARN, EVALUATE, roles=("learner", "evaluator")) == []


def test_a_run_without_learner_parts_needs_its_roles_too():
    chain = (part("work", roles=("worker",)), part("annotate", roles=("annotator",)))
    with running_as(CurrentNode(roles=("worker",), run_roles=("worker",))):
        (problem,) = problems_of(*chain)
    assert "--roles annotator=1,worker=1" in problem


def test_an_unknown_role_is_refused_if_it_is_probably_a_typo():
    (problem,) = problems_of(part("learn", roles=("lerner",)))
    assert "is for the role 'lerner', which is unknown; did you mean 'learner'?" in problem
    assert problems_of(part(roles=("teacher",))) == []
    assert problems_of(part(roles=("elector", "coordinator", "aggregator"))) == []
    (problem,) = problems_of(
        part(roles=("teachers",)), part(roles=("teacher",)), roles=("teacher",)
    )
    assert "did you mean 'teacher'?" in problem


def test_a_role_of_an_enum_is_not_taken_for_a_typo():
    class MyRole(StrEnum):
        LEARNERS = "learners"

    assert problems_of(part(roles=(MyRole.LEARNERS,))) == []


def test_inactive_middleware_is_not_checked_and_its_writes_do_not_count():
    inactive = part("collect", roles=("collector",), writes=("trajectories",))
    reader = part("push", roles=("learner",), reads=("trajectories",))
    assert problems_of(inactive, reader) == []
    (problem,) = problems_of(inactive, reader, roles=("learner",))
    assert (
        "which middleware 1 (collect) writes, but that is inactive in the role learner" in problem
    )
    assert "ContextExchanger" in problem
    unread = part("push", roles=("collector",), reads=("train_data",))
    assert problems_of(unread, part(roles=("learner",)), roles=("learner",)) == []


def test_an_exchange_that_declares_its_writes_satisfies_the_reads():
    inactive = part("collect", roles=("collector",), writes=("trajectories",))
    exchange = part("exchange", writes=("trajectories",))
    reader = part("push", roles=("learner",), reads=("trajectories",))
    assert problems_of(inactive, exchange, reader, roles=("learner",)) == []


def test_a_context_of_any_kind_is_checked():
    (problem,) = problems_of(part(reads=("env_step",)), ctx=Context())
    assert "is not a field of Context" in problem
