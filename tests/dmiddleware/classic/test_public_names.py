import dmiddleware.classic as classic

NAMES = """
CollectMode CommandMode CommandModePolicy EvalMode LearnMode Policy StockPolicy
as_collect_mode as_command_mode as_eval_mode as_learn_mode collate create_policy get_policy_cls
DequeBuffer BufferedData DequeReplay BufferMiddleware ActionMiddleware
PriorityExperienceReplay clone_object staleness_check use_time_check group_sample padding
sample_range_view
IBuffer NaiveReplayBuffer ElasticReplayBuffer SequenceReplayBuffer EpisodeReplayBuffer
AdvancedReplayBuffer PolicyAndValueBuffer DequeBufferWrapper
BUFFER_REGISTRY create_buffer get_buffer_cls
BattleEnvManager BattleTimestep GameResult game_result
"""


def test_the_public_names_are_these():
    assert classic.__all__ == NAMES.split()
    for name in classic.__all__:
        assert getattr(classic, name) is not None
