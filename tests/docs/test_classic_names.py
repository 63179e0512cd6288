"""Every name of the classic API exists, and docs/classic.md mentions it."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

from dmiddleware.errors import ConfigError
from tests.docs.pages import ROOT

POLICY = "dmiddleware.classic"
WORKER = "dmiddleware.worker"
DATA = "dmiddleware.data"
CLASSIC = "dmiddleware.classic"

# By owner: a module, or a class or an object in one.
NAMES = {
    # Policies
    POLICY: "Policy CommandModePolicy create_policy get_policy_cls",
    f"{POLICY}.Policy": """
        default_config default_model learn_mode collect_mode eval_mode get_attribute set_attribute
        sync_gradients learn_function collect_function eval_function total_field fields learn_from
        _init_learn _init_collect _init_eval _forward_learn _forward_collect _forward_eval
        _process_transition _get_train_sample _reset_learn _reset_collect _reset_eval
        _monitor_vars_learn _state_dict_learn _load_state_dict_learn _state_dict_collect
        _load_state_dict_collect _state_dict_eval _load_state_dict_eval _get_n_sample
        _get_n_episode _get_batch_size _get_attribute _set_attribute _create_model
        _init_multi_gpu_setting
    """,
    f"{POLICY}.CommandModePolicy": """
        command_mode command_function _init_command _get_setting_learn _get_setting_collect
        _get_setting_eval
    """,
    f"{POLICY}.LearnMode": """
        forward reset info monitor_vars get_attribute set_attribute state_dict load_state_dict
    """,
    f"{POLICY}.CollectMode": """
        forward process_transition get_train_sample reset get_attribute set_attribute state_dict
        load_state_dict
    """,
    f"{POLICY}.EvalMode": "forward reset get_attribute set_attribute state_dict load_state_dict",
    f"{POLICY}.CommandMode": "get_setting_learn get_setting_collect get_setting_eval",
    # Learner and hooks
    WORKER: """
        BaseLearner create_learner Hook LearnerHook LoadCkptHook SaveCkptHook LogShowHook
        LogReduceHook register_learner_hook build_learner_hook_by_cfg add_learner_hook merge_hooks
        show_hooks
        ISerialCollector SampleSerialCollector EpisodeSerialCollector create_serial_collector
        get_serial_collector_cls to_tensor_transitions BattleEpisodeSerialCollector
        BattleSampleSerialCollector
        ISerialEvaluator InteractionSerialEvaluator BattleInteractionSerialEvaluator
        MetricSerialEvaluator IMetric VectorEvalMonitor create_serial_evaluator
        BaseSerialCommander create_parallel_commander get_parallel_commander_cls OneVsOneLeague
        serial_run compile_config classic_run
        Coordinator
        BaseCommCollector BaseCommLearner create_comm_collector create_comm_learner
        SendPolicyHook SendLearnInfoHook load_data_fn
        FlaskFileSystemCollector FlaskFileSystemLearner NaiveCollector NaiveLearner Slave Master
        BaseParallelCollector ZerglingParallelCollector MarineParallelCollector
        create_parallel_collector get_parallel_collector_cls LearnerAggregator
        get_task_uid EasyTimer dist_init dist_finalize
    """,
    f"{WORKER}.BaseLearner": """
        default_config train start setup_dataloader get_data call_hook register_hook
        save_checkpoint info debug close learn_info collector_envstep priority_info last_iter
        train_iter rank world_size policy monitor log_buffer logger tb_logger ckpt_name exp_name
        instance_name only_monitor_rank0 _setup_hook _setup_wrapper
    """,
    # Collectors and evaluators
    f"{WORKER}.SampleSerialCollector": """
        default_config reset_env reset_policy reset collect envstep close
    """,
    f"{WORKER}.EpisodeSerialCollector": """
        default_config reset_env reset_policy reset collect envstep close
    """,
    f"{WORKER}.InteractionSerialEvaluator": """
        default_config reset reset_env reset_policy close should_eval eval env policy
    """,
    f"{WORKER}.VectorEvalMonitor": """
        is_finished update_info update_reward get_episode_return get_latest_reward
        get_current_episode get_episode_info update_video get_video
    """,
    f"{WORKER}.ISerialCollector": """
        default_config reset_env reset_policy reset collect envstep close
    """,
    f"{WORKER}.ISerialEvaluator": """
        default_config reset reset_env reset_policy close should_eval eval env policy
    """,
    # Battle and metric
    f"{WORKER}.BattleEpisodeSerialCollector": """
        default_config reset_env reset_policy reset collect envstep close state_dict
        load_state_dict
    """,
    f"{WORKER}.BattleSampleSerialCollector": """
        default_config reset_env reset_policy reset collect envstep close state_dict
        load_state_dict
    """,
    f"{WORKER}.BattleInteractionSerialEvaluator": "default_config should_eval eval",
    f"{WORKER}.MetricSerialEvaluator": "default_config should_eval eval",
    f"{WORKER}.IMetric": "eval reduce_mean gt",
    "dmiddleware.env": "BattleEnv PettingZooAdapter",
    # Replay buffers
    DATA: "convert_checkpoint",
    CLASSIC: """
        BattleEnvManager BattleTimestep game_result
        DequeBuffer DequeReplay PriorityExperienceReplay clone_object staleness_check
        use_time_check group_sample padding sample_range_view
        IBuffer NaiveReplayBuffer ElasticReplayBuffer SequenceReplayBuffer EpisodeReplayBuffer
        AdvancedReplayBuffer DequeBufferWrapper create_buffer get_buffer_cls BUFFER_REGISTRY
    """,
    f"{CLASSIC}.IBuffer": """
        default_config push update sample clear count save_data load_data state_dict
        load_state_dict start close
    """,
    f"{CLASSIC}.AdvancedReplayBuffer": """
        default_config push update sample clear count save_data load_data state_dict
        load_state_dict start close beta replay_buffer_size push_count
    """,
    f"{CLASSIC}.EpisodeReplayBuffer": "episode_len sample_steps",
    # Commanders, league and entry points
    f"{WORKER}.BaseSerialCommander": "step policy",
    f"{WORKER}.BaseParallelCommander": """
        get_collector_task get_learner_task judge_collector_finish judge_learner_finish
        finish_collector_task finish_learner_task notify_fail_collector_task
        notify_fail_learner_task update_learner_info increase_collector_task_space
        decrease_collector_task_space state_dict load_state_dict
    """,
    f"{WORKER}.OneVsOneLeague": """
        get_job_info judge_snapshot update_active_player finish_job player_rank state_dict
    """,
    # Coordinator
    f"{WORKER}.Coordinator": """
        start close state_dict load_state_dict deal_with_collector_send_data
        deal_with_collector_judge_finish deal_with_collector_finish_task
        deal_with_learner_get_data deal_with_learner_send_info deal_with_learner_judge_finish
        deal_with_learner_finish_task deal_with_increase_collector deal_with_decrease_collector
        info error system_shutdown_flag
    """,
    # Communicating workers
    f"{WORKER}.BaseCommCollector": """
        get_policy_update_info send_metadata send_stepdata start close collector_uid
        _create_collector deal_with_resource deal_with_collector_start deal_with_collector_data
        deal_with_collector_close
    """,
    f"{WORKER}.BaseCommLearner": """
        send_policy get_data send_learn_info hooks4call start close _create_learner
        deal_with_resource deal_with_learner_start deal_with_get_data deal_with_learner_learn
        deal_with_learner_close
    """,
    # HTTP
    f"{WORKER}.Slave": """
        start shutdown join close ping _process_task _before_connection _before_disconnection
        _before_task _lost_connection
    """,
    f"{WORKER}.Master": "start shutdown join close ping new_connection",
    f"{WORKER}.NaiveCollector": "_get_timestep",
    # Parallel collectors and aggregator
    f"{WORKER}.BaseParallelCollector": """
        start close info debug error get_finish_info policy env_manager _policy_inference _env_step
        _process_timestep _update_policy _setup_timer _setup_logger _start_thread _join_thread
        _finish_task _iter_after_hook
    """,
    f"{WORKER}.LearnerAggregator": "start close merge_info",
    f"{WORKER}.errors": """
        CoordinatorError StepDataLost TaskFail ConnectionRefuse DisconnectionRefuse TaskRefuse
    """,
    "middleware.classic": "RouterLink RouterStore RouterCollector RouterLearner",
    "dmiddleware.policy": "POLICY_REGISTRY",
    # Data-parallel learning
    "dmiddleware.distributed": "data_parallel",
}

# The names under which configs name classes: {factory: names}.
TYPES = {
    f"{POLICY}.get_policy_cls": "dqn ppo bc dqn_command ppo_command bc_command",
    f"{WORKER}.get_serial_collector_cls": """
        sample episode episode_1v1 sample_1v1 battle_episode battle_sample
    """,
    f"{CLASSIC}.get_buffer_cls": "naive elastic sequence episode advanced",
    f"{WORKER}.get_parallel_collector_cls": "zergling marine",
}

OWNED = [(owner, name) for owner, names in NAMES.items() for name in names.split()]
PAGE = (ROOT / "docs" / "classic.md").read_text(encoding="utf-8")
SPANS = " ".join(re.findall(r"`([^`]+)`", re.sub(r"(?ms)^```.*?^```", "", PAGE)))


def find(owner: str) -> Any:
    """Return the module of a dotted name, or what is in it."""
    try:
        return importlib.import_module(owner)
    except ModuleNotFoundError:
        module, _, name = owner.rpartition(".")
        return getattr(find(module), name)


@pytest.mark.parametrize(("owner", "name"), OWNED, ids=lambda text: text)
def test_a_classic_name_exists_and_is_documented(owner: str, name: str) -> None:
    found = find(owner)
    fields = getattr(found, "_fields", ())
    assert hasattr(found, name) or name in fields, f"{owner} has no {name}"
    assert re.search(rf"(?<!\w){re.escape(name)}(?!\w)", SPANS), f"the page does not mention {name}"


@pytest.mark.parametrize(
    ("factory", "name"),
    [(factory, name) for factory, names in TYPES.items() for name in names.split()],
    ids=lambda text: text,
)
def test_a_classic_type_is_registered_and_documented(factory: str, name: str) -> None:
    assert isinstance(find(factory)({"type": name}), type)
    assert re.search(rf"(?<!\w){re.escape(name)}(?!\w)", SPANS), f"the page does not mention {name}"


EXPORTED = [
    getattr(module, name)
    for module in map(importlib.import_module, (CLASSIC, WORKER, "middleware.classic"))
    for name in module.__all__
    if inspect.isclass(getattr(module, name))
]


def methods_of(cls: type) -> set[str]:
    """Return the methods of a class and its bases that the page names."""
    owners = {owner.rpartition(".")[2]: names.split() for owner, names in NAMES.items()}
    named = {name for base in cls.__mro__ for name in owners.get(base.__name__, ())}
    open_ones = getattr(cls, "__abstractmethods__", frozenset())
    words = set(re.findall(r"\w+", SPANS))
    return {
        name
        for name in named | (open_ones & words)
        if inspect.isfunction(inspect.getattr_static(cls, name, None))
    }


def derived_from(cls: type, tape: list[str]) -> type:
    """Return a subclass that writes these methods, each as the base class has it."""

    def method(name: str) -> Any:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            tape.append(name)
            return getattr(super(derived, self), name)(*args, **kwargs)

        return call

    methods = {name: method(name) for name in methods_of(cls)}
    derived: type = type(f"Own{cls.__name__}", (cls,), methods)
    return derived


def needs_arguments(cls: type) -> bool:
    parameters = inspect.signature(cls).parameters.values()
    return any(
        parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        for parameter in parameters
    )


@pytest.mark.parametrize("cls", EXPORTED, ids=lambda cls: cls.__name__)
def test_a_class_is_derived_from_with_the_methods_that_the_page_names(
    cls: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tape: list[str] = []
    derived = derived_from(cls, tape)
    assert not inspect.isabstract(derived), derived.__abstractmethods__
    if cls.__name__ in ("Policy", "CommandModePolicy", "StockPolicy") or needs_arguments(cls):
        return  # they are built in the tests of their own
    try:
        made = derived()
    except ConfigError:
        return  # it needs a config, which says what is missing
    if hasattr(made, "close"):
        made.close()
        assert "close" in tape or "close" not in methods_of(cls)
