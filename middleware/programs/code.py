"""A program's chain as Python code, which can be copied, run and changed."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from dmiddleware.callable_names import described, is_callable_name, name_of
from dmiddleware.env import EnvSettings
from dmiddleware.policy import DecisionTransformerPolicy, Policy
from dmiddleware.schedule import Schedule
from dmiddleware.settings import Settings, describe
from middleware.collect import EpisodeCollectorSettings
from middleware.programs.parts import draws_by_priority, eval_settings, name_of_run
from middleware.termination import TerminationCheckerSettings

__all__ = ["chain_code"]

_WIDTH: Final = 100
_HOMES: Final[Mapping[str, tuple[str, ...]]] = {
    "typing": ("Any",),
    "dmiddleware": ("Task",),
    "dmiddleware.data": ("PrioritySampler", "TensorBuffer", "load_rows"),
    "dmiddleware.env": ("make_env_manager",),
    "dmiddleware.program": ("run_program",),
    "dmiddleware.rl": ("Schedule", "with_returns_to_go"),
    "middleware": (
        "ContextExchanger",
        "DataPusher",
        "EpisodeCollector",
        "EpsGreedyHandler",
        "Experiment",
        "ExperimentResult",
        "GAEEstimator",
        "InteractionEvaluator",
        "ModelExchanger",
        "MonteCarloReturnEstimator",
        "OfflineRLContext",
        "OffPolicyLearner",
        "OnPolicyLearner",
        "SnapshotSaver",
        "StepCollector",
        "TerminationChecker",
    ),
}
"""The modules of the names that code uses, beside the policy."""
_START: Final = ("", "", 'if __name__ == "__main__":', "    run_program(main)")

_PUT_IN: Final = '''def put_in(what: str) -> Any:
    """Replace the calls of this function by what they name, which has no name to import."""
    raise NotImplementedError(f"put in {what}")'''


def chain_code(program: str, arguments: Mapping[str, Any], agent: Policy) -> str:
    """Return a program with its settings as code.

    Its function ``main`` trains as the program does with these arguments. Settings that are
    defaults are left out.

    Args:
        program: ``"off_policy"``, ``"on_policy"`` or ``"offline"``.
        arguments: those of the program, by name.
        agent: the policy that they describe.
    """
    body = "\n".join((*_WRITERS[program](arguments, agent), *_START))
    policy = type(agent)
    helper = (_PUT_IN, "", "") if _uses(body, "put_in") else ()
    code = "\n".join((*helper, body))
    imports = [
        f"from {home} import {', '.join(used)}"
        for home, names in (*_HOMES.items(), (_public_home(policy), (policy.__name__,)))
        if (used := [name for name in names if _uses(code, name)])
    ]
    imports = [_wrapped_import(line) for line in sorted(imports, key=lambda line: line.split()[1])]
    return "\n".join((*imports, "", "", *helper, body, ""))


def _off_policy(arguments: Mapping[str, Any], agent: Policy) -> Iterable[str]:
    yield from _start(arguments, agent)
    extra: dict[str, str] = {}
    if draws_by_priority(agent.cfg):
        extra["sampler"] = _call("PrioritySampler", arguments["sampler"])
    extra["seed"] = 'task.seed_for("buffer")'
    yield _line(2, "buffer = ", "TensorBuffer", arguments["buffer"], **extra)
    yield from _exchange(arguments)
    if not agent.explores:
        yield _line(2, "task.use(", "EpsGreedyHandler", None, "policy")
    yield _line(2, "task.use(", "StepCollector", arguments["collector"], "policy", "envs")
    if agent.spec.gae_lambda is None:
        yield _line(2, "task.use(", "DataPusher", None, "buffer")
    else:
        yield _line(2, "task.use(", "GAEEstimator", None, "policy")
        yield _line(2, "task.use(", "DataPusher", None, "buffer", what='"train_data"')
    yield _line(2, "task.use(", "OffPolicyLearner", arguments["learner"], "policy", "buffer")
    yield from _end(arguments)


def _on_policy(arguments: Mapping[str, Any], agent: Policy) -> Iterable[str]:
    yield from _start(arguments, agent)
    yield from _exchange(arguments)
    collector = arguments["collector"]
    if not agent.explores:
        yield _line(2, "task.use(", "EpsGreedyHandler", None, "policy")
    if isinstance(collector, EpisodeCollectorSettings):
        yield _line(2, "task.use(", "EpisodeCollector", collector, "policy", "envs")
        yield _line(2, "task.use(", "MonteCarloReturnEstimator", None, "policy")
    else:
        yield _line(2, "task.use(", "StepCollector", collector, "policy", "envs")
        if not agent.learns_from_trajectories:
            yield _line(2, "task.use(", "GAEEstimator", None, "policy")
    yield _line(2, "task.use(", "OnPolicyLearner", None, "policy")
    yield from _end(arguments)


def _offline(arguments: Mapping[str, Any], agent: Policy) -> Iterable[str]:
    yield f"def main(seed: int = {arguments['seed']}) -> ExperimentResult:"
    yield f"    rows = load_rows({_text(arguments['data'])})"
    yield from _policy(arguments, agent)
    yield '    policy.observe(rows["obs"])'
    is_sequence = isinstance(agent, DecisionTransformerPolicy)
    if is_sequence:
        yield "    rows = with_returns_to_go(rows)"
    unroll = ", unroll_len=policy.context_length" if is_sequence else ""
    yield f'    buffer = TensorBuffer(len(rows["done"]){unroll}, seed=seed)'
    yield from _experiment(arguments)
    yield "    with Task(OfflineRLContext(), seed=seed) as task:"
    judged = eval_settings(arguments["env"], arguments["eval_env_kwargs"])
    yield _env(2, "eval_envs", judged, seed='task.seed_for("evaluator")')
    yield ""
    yield _line(2, "task.use(", "OffPolicyLearner", arguments["learner"], "policy", "buffer")
    yield "        buffer.push(rows)"
    yield from _end(arguments)


_WRITERS: Final = {"off_policy": _off_policy, "on_policy": _on_policy, "offline": _offline}


def _start(arguments: Mapping[str, Any], agent: Policy) -> Iterable[str]:
    """Yield the policy, the experiment and the envs."""
    yield f"def main(seed: int = {arguments['seed']}) -> ExperimentResult:"
    yield from _policy(arguments, agent)
    yield from _experiment(arguments)
    yield "    with Task(seed=seed) as task:"
    yield _env(2, "envs", arguments["env"], seed='task.seed_for("collector")')
    judged = eval_settings(
        arguments["env"], arguments["eval_env_kwargs"], arguments["eval_env_num"]
    )
    yield _env(2, "eval_envs", judged, seed='task.seed_for("evaluator")')


def _policy(arguments: Mapping[str, Any], agent: Policy) -> Iterable[str]:
    yield _env(1, "env", arguments["env"])
    builder = f"{type(agent).__name__}.for_env"
    yield _line(1, "policy = ", builder, arguments["policy"], "env", seed="seed")


def _experiment(arguments: Mapping[str, Any]) -> Iterable[str]:
    name = arguments["exp_name"] or name_of_run(arguments["algo"], arguments["env"])
    yield _line(1, "experiment = ", "Experiment", arguments["experiment"], _text(name), "policy")
    saved = arguments["snapshots"]
    yield _line(1, "snapshots = ", "SnapshotSaver", saved, "experiment.run")


def _exchange(arguments: Mapping[str, Any]) -> Iterable[str]:
    yield ""
    yield _line(2, "task.use(", "ContextExchanger", arguments["exchanger"])
    yield _line(2, "task.use(", "ModelExchanger", arguments["weights"], "policy")


def _end(arguments: Mapping[str, Any]) -> Iterable[str]:
    """Yield the evaluator, the experiment, the snapshots and the limits."""
    evaluator = arguments["evaluator"]
    yield _line(2, "task.use(", "InteractionEvaluator", evaluator, "policy", "eval_envs")
    yield "        task.use(experiment).use(snapshots)"
    limit_names = [field.name for field in describe(TerminationCheckerSettings)]
    limits = TerminationCheckerSettings(**{k: arguments[k] for k in limit_names if k in arguments})
    yield _line(2, "task.use(", "TerminationChecker", limits)
    yield "        snapshots.resume(task)  # only a run that continues has a snapshot"
    yield "        task.run()"
    yield "    return experiment.result"


def _env(depth: int, name: str, env: EnvSettings, **further: str) -> str:
    return _line(depth, f"{name} = ", "make_env_manager", env, **further)


def _line(
    depth: int, before: str, function: str, settings: Settings | None, *args: str, **further: str
) -> str:
    """Return a statement, on as many lines as it needs."""
    arguments = [*args, *_options(settings), *(f"{name}={text}" for name, text in further.items())]
    indent = "    " * depth
    after = ")" if before.endswith("(") else ""
    short = f"{indent}{before}{function}({', '.join(arguments)}){after}"
    if len(short) <= _WIDTH:
        return short
    inner = [f"{indent}    {argument}," for argument in arguments]
    return "\n".join((f"{indent}{before}{function}(", *inner, f"{indent}){after}"))


def _call(function: str, settings: Settings) -> str:
    return f"{function}({', '.join(_options(settings))})"


def _options(settings: Settings | None) -> list[str]:
    """Return the settings that are not defaults as arguments."""
    if settings is None:
        return []
    return [
        (_text(value) if field.name in ("id", "size") else f"{field.name}={_text(value)}")
        for field in describe(type(settings))
        if not _is_default(value := getattr(settings, field.name), field.default)
        and field.name != "seed"
        if value is not None or field.name not in settings.exclusive
    ]


def _is_default(value: Any, default: Any) -> bool:
    with contextlib.suppress(Exception):  # of an object of the user's
        return type(value) is type(default) and bool(value == default)
    return False


def _text(value: Any) -> str:
    """Return the text of a value that Python reads as the same value, or that asks for it."""
    if isinstance(value, Schedule):
        return _schedule_text(value)
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_text(key)}: {_text(item)}' for key, item in value.items())}}}"
    if isinstance(value, list | tuple):
        items = ", ".join(map(_text, value))
        return f"[{items}]" if isinstance(value, list) else f"({items}{',' * (len(value) == 1)})"
    if isinstance(value, str | Path):
        return _quoted(str(value))
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    if value is None or type(value) in (bool, int, float):
        return repr(value)
    name = name_of(value) if callable(value) else described(value)
    return _quoted(name) if is_callable_name(name) else f"put_in({_quoted(name)})"


def _schedule_text(schedule: Schedule) -> str:
    ends = [schedule.start, schedule.end]
    arguments = [repr(list(schedule.points))] if schedule.points else [*map(repr, ends)]
    if schedule.type == "constant":
        return f"Schedule.constant({schedule.start!r})"
    if not schedule.points and schedule.decay != 1.0:
        arguments.append(f"decay={schedule.decay!r}")
    if schedule.by != "env_step":
        arguments.append(f"by={_text(schedule.by)}")
    return f"Schedule.{schedule.type}({', '.join(arguments)})"


def _quoted(text: str) -> str:
    return repr(text) if '"' in text or "\\" in text or not text.isprintable() else f'"{text}"'


def _uses(code: str, name: str) -> bool:
    return any(f"{name}{after}" in code for after in ("(", ".", ":"))


def _public_home(policy: type) -> str:
    home = policy.__module__
    return "dmiddleware.policy" if home.startswith("dmiddleware.policy.") else home


def _wrapped_import(line: str) -> str:
    if len(line) <= _WIDTH:
        return line
    before, _, names = line.partition(" import ")
    inner = "".join(f"    {name},\n" for name in names.split(", "))
    return f"{before} import (\n{inner})"
