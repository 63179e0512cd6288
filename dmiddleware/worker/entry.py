"""Entry points: compile a config in the classic shape, and run the program that it describes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import Any, Final

import yaml
from easydict import EasyDict
from torch import nn

from dmiddleware.classic import (
    EpisodeReplayBuffer,
    Policy,
    StockPolicy,
    create_buffer,
    create_policy,
    get_buffer_cls,
    get_policy_cls,
)
from dmiddleware.classic.config import Configurable
from dmiddleware.classic.import_names import import_named
from dmiddleware.classic.logs import output_folder
from dmiddleware.env import BaseEnvManager
from dmiddleware.errors import ConfigError
from dmiddleware.policy import POLICY_REGISTRY
from dmiddleware.seeding import derive_seed, seed_libraries
from dmiddleware.settings import plain_values
from dmiddleware.tensorboard import TensorboardWriter
from dmiddleware.worker.collector import (
    create_serial_collector,
    get_serial_collector_cls,
)
from dmiddleware.worker.collector.parallel import (
    PARALLEL_COLLECTOR_REGISTRY,
    get_parallel_collector_cls,
)
from dmiddleware.worker.commander import BaseSerialCommander, get_parallel_commander_cls
from dmiddleware.worker.env_config import (
    check_sections,
    drop_missing_modules,
    make_envs,
    name_env,
    names_di_engine,
    refuse_absent,
    take_normalization,
    take_unread,
    take_unused,
    unused_settings,
)
from dmiddleware.worker.evaluator import create_serial_evaluator, get_serial_evaluator_cls
from dmiddleware.worker.learned_rewards import EnvRewards, learned_rewards, take_reward_model
from dmiddleware.worker.learner import LEARNER_REGISTRY, BaseLearner, create_learner
from dmiddleware.worker.progress import Progress
from dmiddleware.worker.row_learning import DirectLearning, EpisodeReplay, Learning, RowReplay
from dmiddleware.worker.sequence_learning import LaneReplay, SequenceReplay, sequence_length
from dmiddleware.worker.serial_worker import get_worker_cls

__all__ = ["NO_LIMIT", "check_learns_from_rows", "compile_config", "section_of", "serial_run"]

NO_LIMIT: Final = int(1e10)
_PARTS: Final = {
    "learner": ("policy.learn.learner", "base"),
    "collector": ("policy.collect.collector", "sample"),
    "evaluator": ("policy.eval.evaluator", "interaction"),
    "replay_buffer": ("policy.other.replay_buffer", "advanced"),
    "commander": ("policy.other.commander", "base"),
}
"""Where the config of each part is, and its type if none is given."""


_EVALUATOR_KEYS: Final = {
    "stop_value": "stop_value", "n_episode": "n_evaluator_episode", "replay_path": "replay_path",
}  # fmt: skip
"""Options of the evaluator, and the keys of ``env`` that they are copied from."""


def compile_config(
    main: Mapping[str, Any],
    create: Mapping[str, Any] | None = None,
    *,
    seed: int = 0,
    save: bool = True,
) -> EasyDict:
    """Merge a config in the classic shape with the defaults of its classes, and check it.

    Args:
        main: ``exp_name``, ``env`` and ``policy``. The config of each worker is below ``policy``:
            ``learn.learner``, ``collect.collector``, ``eval.evaluator``, ``other.replay_buffer``
            and ``other.commander``.
        create: what to create: for ``env``, ``env_manager``, ``policy``, ``learner``,
            ``collector``, ``evaluator``, ``replay_buffer`` and ``commander`` the ``type``, and the
            ``import_names`` of the modules that register it. None: ``main`` has them.
        seed: the seed of envs, policy and buffer, where they have none of their own.
        save: whether to write the config to its file.

    Returns:
        The whole config, which is also saved to ``<exp_name>/total_config.yaml``. ``stop_value``,
        ``n_evaluator_episode`` and ``replay_path`` of ``env`` are copied to the evaluator, and
        ``priority`` and ``priority_IS_weight`` of the policy to a buffer that has them.

    Raises:
        ConfigError: for an unknown key in any section, a wrong type or a value out of range.
        RegistryError: for an unknown ``type``; the nearest names are listed.
    """
    cfg = _with_types(main, create or {})
    env = cfg["env"]
    take_normalization(cfg)
    name_env(env)
    check_sections(cfg)
    env.setdefault("seed", seed)
    evaluator = cfg["policy"]["eval"]["evaluator"]
    evaluator_cls = _class_of("evaluator", evaluator, cfg)
    for name in _options_of(evaluator_cls, _EVALUATOR_KEYS):
        if env.get(_EVALUATOR_KEYS[name]) is not None:
            evaluator.setdefault(name, env[_EVALUATOR_KEYS[name]])
    if names_di_engine(create or {}) and hasattr(evaluator_cls, "default_config"):
        take_unread(evaluator, evaluator_cls.default_config())
    _share_priorities(cfg)
    _ask_for_samples(cfg)
    for part, (path, _) in _PARTS.items():
        section = _section(cfg, path)
        build = _class_of(part, section, cfg)
        unused = take_unused(part, section, _options_of(build, section))
        section.update({**_merged(build, section, derive_seed(seed, part)), **unused})
    cfg["policy"] = _merged(get_policy_cls(cfg["policy"]), cfg["policy"], seed)
    if save:
        file = output_folder(cfg["exp_name"]) / "total_config.yaml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(yaml.safe_dump(plain_values(cfg), sort_keys=False), encoding="utf-8")
    return EasyDict(cfg)


def check_parts(main: Mapping[str, Any]) -> None:
    """Check the learner of a main config, and the policy and the collector if it names them.

    Raises:
        ConfigError: for an unknown key, with the nearest known one, a wrong type or a value out of
            range.
        RegistryError: for an unknown ``type``; the nearest names are listed.
    """
    cfg: dict[str, Any] = _copied({"policy": {}, **main})
    _section(cfg, _PARTS["learner"][0]).setdefault("type", _PARTS["learner"][1])
    for part in ("learner", "collector"):
        if "type" in _section(cfg, _PARTS[part][0]):
            section = section_of(cfg, part)
            _merged(_class_of(part, section, cfg), _without_name(section), 0)
    policy = cfg["policy"]
    if "type" in policy:
        _merged(get_policy_cls(policy), policy, 0)


def _without_name(section: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in section.items() if key != "exp_name"}


def serial_run(
    main: Mapping[str, Any],
    create: Mapping[str, Any] | None = None,
    seed: int = 0,
    max_train_iter: int = NO_LIMIT,
    max_env_step: int = NO_LIMIT,
    *,
    model: nn.Module | None = None,
    envs: Callable[[EasyDict, str], BaseEnvManager] = make_envs,
    is_direct: bool = False,
    learning: Callable[..., Learning] | None = None,
    show_progress: bool = True,
) -> Policy:
    """Train a policy in this process, as a config in the classic shape describes.

    The commander chooses how to collect. The evaluator plays when it is due, and the learner saves
    the best policy. The collector collects, and its data goes through the replay buffer, from which
    the policy learns ``learn.update_per_collect`` times; an on-policy algorithm learns directly
    from what was collected. This repeats until the evaluator's ``stop_value`` or a limit is
    reached.

    With a ``reward_model`` (:mod:`dmiddleware.worker.learned_rewards`), the model learns from all
    that was collected, and the policy learns from its rewards.

    Args:
        main: see :func:`compile_config`; and ``reward_model``, the options of a reward model.
        create: see :func:`compile_config`; and ``reward_model``, with its ``type``.
        seed: the seed of everything random.
        max_train_iter: most training iterations.
        max_env_step: most env steps.
        model: a module for the policy; None builds the one that ``policy.model`` describes.
        envs: makes the envs of a role, ``"collector"`` or ``"evaluator"``, from the section
            ``env``; by default those that ``env.id`` names.
        is_direct: whether any algorithm learns directly from what was collected, without the
            replay buffer, ``learn.update_per_collect`` times.
        learning: what an off-policy algorithm for single rows learns by; None: samples of the
            replay buffer. See :class:`~dmiddleware.worker.row_learning.RowReplay`.
        show_progress: whether to show steps, updates and returns on the standard error stream.

    Returns:
        The policy as it is at the end. The best one is in
        ``<exp_name>/ckpt_learner/ckpt_best.safetensors``.

    Raises:
        ConfigError: for an unusable config, or an algorithm that learns from sequences.
        RegistryError: for an unknown ``type``.
    """
    main, create, reward_section = take_reward_model(main, create or {})
    cfg = compile_config(main, create, seed=seed)
    seed_libraries(seed)
    policy = create_policy(cfg.policy, model=model)
    check_learns_from_rows(policy)
    exp_name, parts = (
        cfg.exp_name,
        {name: section_of(cfg, name) for name in _PARTS},
    )
    with ExitStack() as stack:
        writer = TensorboardWriter(output_folder(exp_name) / "log" / "serial")
        stack.callback(writer.close)
        common: dict[str, Any] = {"tb_logger": writer, "exp_name": exp_name}
        rewards = learned_rewards(reward_section, policy, writer)
        learner = stack.enter_context(create_learner(parts["learner"], policy=policy, **common))
        collector = stack.enter_context(
            create_serial_collector(
                parts["collector"],
                env=envs(cfg.env, "collector"),
                policy=rewards.as_collected(policy),
                **common,
            )
        )
        evaluator = stack.enter_context(
            create_serial_evaluator(
                parts["evaluator"], env=envs(cfg.env, "evaluator"), policy=policy, **common
            )
        )
        buffer = stack.enter_context(create_buffer(parts["replay_buffer"], **common))
        commander = None
        if hasattr(policy, "command_mode"):
            commander = BaseSerialCommander(
                {}, learner, collector, evaluator, buffer, policy.command_mode
            )
        learn = _learning_from(
            cfg, learner, buffer, rewards, learning,
            is_whole=not policy.get_attribute("batched"), is_direct=is_direct,
        )  # fmt: skip
        n_sample = _n_sample(cfg, learner)

        progress = Progress(max_env_step if max_env_step < NO_LIMIT else None, show=show_progress)
        learner.call_hook("before_run")
        if learner.collector_envstep > 0:
            collector.envstep = learner.collector_envstep
        learn.begin(collector)
        while learner.train_iter < max_train_iter and collector.envstep < max_env_step:
            settings = {} if commander is None else commander.step()
            if evaluator.should_eval(learner.train_iter):
                stop, _ = evaluator.eval(
                    learner.save_checkpoint, learner.train_iter, collector.envstep
                )
                progress.evaluated(collector.envstep, learner.train_iter, evaluator.last_eval)
                if stop:
                    break
            data: list[Any] = []
            while len(data) < rewards.n_new:
                data += collector.collect(
                    n_sample, train_iter=learner.train_iter, policy_kwargs=settings
                )
            rewards.learn_from(data)
            learn.from_collected(data, collector.envstep)
            progress.at(collector.envstep, learner.train_iter)
        progress.ended(collector.envstep, learner.train_iter)
        learner.call_hook("after_run")
    return policy


def check_learns_from_rows(policy: Any) -> None:
    """Refuse an algorithm that cannot learn from single rows.

    Raises:
        ConfigError: saying what to use instead.
    """
    spec = policy.learn_mode.spec
    if spec.minibatch_unit == "lanes" and not spec.learns_from_trajectories:
        raise ConfigError(
            f"{type(policy).__name__} learns from sequences, but serial_run collects single "
            "transitions; train it in a chain, as its page in the documentation shows"
        )


def _learning_from(
    cfg: EasyDict,
    learner: BaseLearner,
    buffer: Any,
    rewards: EnvRewards,
    learning: Callable[..., Learning] | None,
    *,
    is_whole: bool,
    is_direct: bool,
) -> Learning:
    """Return what learns from the data that a collector returns.

    Raises:
        ConfigError: if something else than a replay buffer is to learn, for another algorithm.
    """
    spec, seed = learner.policy.spec, derive_seed(cfg.env.seed, "minibatches")
    is_of_sequences = _is_of_sequences(spec)
    is_of_rows = not (is_of_sequences or spec.minibatch_unit == "lanes" or spec.on_policy)
    if learning is not None and not is_of_rows:
        raise ConfigError(
            f"{spec.kind.__name__} cannot learn from an expert beside its own steps; use an "
            "off-policy algorithm that learns from single rows, such as dqn, sql, dqfd or sac"
        )
    if is_of_sequences or spec.minibatch_unit == "lanes":
        rewards.check_unused("an algorithm that learns from sequences")
        return (SequenceReplay if is_of_sequences else LaneReplay)(cfg, learner, seed)
    if spec.on_policy or is_direct:
        return DirectLearning(cfg, learner, rewards, is_whole=is_whole)
    replay = EpisodeReplay if isinstance(buffer, EpisodeReplayBuffer) else RowReplay
    return (learning or replay)(cfg, learner, buffer, rewards)


def _n_sample(cfg: EasyDict, learner: BaseLearner) -> int | None:
    """Return how many rows to collect, where ``collect.n_sample`` counts sequences."""
    n_sample, spec = cfg.policy.collect.get("n_sample"), learner.policy.spec
    if n_sample is None or not (_is_of_sequences(spec) or spec.minibatch_unit == "lanes"):
        return None
    return int(n_sample) * sequence_length(cfg.policy)


def _is_of_sequences(spec: Any) -> bool:
    return "mask" in spec.learn_columns


def _with_types(main: Mapping[str, Any], create: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of the config in which each part has its type.

    Raises:
        ConfigError: if a part of either config is not a dictionary, or ``create`` has another key.
    """
    if not isinstance(main, Mapping) or not isinstance(main.get("policy"), Mapping):
        raise ConfigError(
            "main must be the main config, with the keys exp_name, env and policy, got "
            f"{main!r:.100}; pass both configs as serial_run(main_config, create_config)"
        )
    cfg: dict[str, Any] = _copied({"exp_name": "default_experiment", "env": {}, **main})
    places = {name: path for name, (path, _) in _PARTS.items()}
    places |= {"policy": "policy", "env": "env", "env_manager": "env.manager"}
    for name, part in create.items():
        refuse_absent({name: part}, "create.")
        if name not in places:
            raise ConfigError(
                f"create has the unknown key {name!r}; known are {', '.join(sorted(places))}"
            )
        if not isinstance(part, Mapping):
            raise ConfigError(f"create.{name} must be a dictionary with type, got {part!r:.100}")
        _section(cfg, places[name]).update(_copied(part))
    _take_two_buffers(_section(cfg, _PARTS["replay_buffer"][0]))
    for path, default in _PARTS.values():
        _section(cfg, path).setdefault("type", default)
    for path in places.values():
        drop_missing_modules(_section(cfg, path), path)
    found = get_policy_cls(cfg["policy"])  # imports the modules that register it
    name = cfg["policy"]["type"]
    with_command = f"{name}_command"
    is_stock = issubclass(found, StockPolicy) and not name.endswith("_command")
    if is_stock or with_command in POLICY_REGISTRY:
        cfg["policy"]["type"] = with_command
    return cfg


def _take_two_buffers(section: dict[str, Any]) -> None:
    """Make DI-engine's sections of two buffers, ``policy`` and ``value``, those of one buffer.

    Raises:
        ConfigError: if one of them has a type that cannot be one of two.
    """
    if not section.pop("multi_buffer", False):
        return
    policy, value = (dict(section.pop(name, {})) for name in ("policy", "value"))
    for part in (policy, value):
        if part.pop("type", "advanced") != "advanced":
            raise ConfigError(
                "replay_buffer with multi_buffer=True has two buffers of type 'advanced'; leave "
                "the type of policy and value out, or use one buffer"
            )
    section.update({**policy, "type": "policy_and_value", "value": value})


def _share_priorities(cfg: dict[str, Any]) -> None:
    """Copy the policy's settings of priorities to a buffer that has them too."""
    buffer = _section(cfg, "policy.other.replay_buffer")
    for name in _options_of(get_buffer_cls(buffer), ("priority", "priority_IS_weight")):
        if name in cfg["policy"]:
            buffer.setdefault(name, cfg["policy"][name])


def _ask_for_samples(cfg: dict[str, Any]) -> None:
    """Let a collector of episodes return samples, from which an on-policy algorithm learns."""
    policy, collector = get_policy_cls(cfg["policy"]), _section(cfg, "policy.collect.collector")
    if issubclass(policy, StockPolicy) and policy.core.on_policy:
        for name in _options_of(_class_of("collector", collector, cfg), ("get_train_sample",)):
            collector.setdefault(name, True)


def section_of(cfg: dict[str, Any], part: str) -> dict[str, Any]:
    """Return what a part of the pipeline, such as ``"learner"``, reads of its section."""
    section, unused = _section(cfg, _PARTS[part][0]), unused_settings(part)
    declared = _options_of(_class_of(part, section, cfg), unused)
    return {key: value for key, value in section.items() if key not in unused or key in declared}


def _section(cfg: dict[str, Any], path: str) -> dict[str, Any]:
    """Return the dictionary at a dotted path, created if it is missing.

    Raises:
        ConfigError: if there is something else on the way.
    """
    section: dict[str, Any] = cfg
    for key in path.split("."):
        section = section.setdefault(key, {})
        if not isinstance(section, dict):
            raise ConfigError(f"{path} must be a dictionary, but {key} is {section!r:.100}")
    return section


def _copied(value: Any) -> Any:
    """Return a copy of dictionaries and lists; what they hold stays."""
    if isinstance(value, Mapping):
        return {key: _copied(entry) for key, entry in value.items()}
    return [*map(_copied, value)] if isinstance(value, list) else value


def _class_of(part: str, section: Mapping[str, Any], cfg: Mapping[str, Any]) -> Any:
    """Return the class that a part's ``type`` names."""
    if part == "learner":
        return get_worker_cls(LEARNER_REGISTRY, section, "a learner")
    if part == "collector":
        import_named(section.get("import_names"))
        is_parallel = section["type"] in PARALLEL_COLLECTOR_REGISTRY
        return (get_parallel_collector_cls if is_parallel else get_serial_collector_cls)(section)
    if part == "evaluator":
        return get_serial_evaluator_cls(section)
    if part == "replay_buffer":
        return get_buffer_cls(section)
    return BaseSerialCommander if section["type"] == "base" else get_parallel_commander_cls(cfg)


def _options_of(cls: Callable[..., Any], names: Iterable[str]) -> list[str]:
    """Return those of the names that are options of a class."""
    if not (inspect.isclass(cls) and issubclass(cls, Configurable)):
        return []
    return [name for name in names if name in cls.options()]


def _merged(cls: Callable[..., Any], given: dict[str, Any], seed: int) -> dict[str, Any]:
    """Return the config of a part with the defaults of its class, and a seed if it takes one."""
    if not (inspect.isclass(cls) and hasattr(cls, "merged_config")):
        return given
    merged: dict[str, Any] = cls.merged_config(given)
    if "seed" in merged and merged["seed"] is None:
        merged["seed"] = seed
    return merged
