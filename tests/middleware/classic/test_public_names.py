import middleware.classic

NAMES = """
Trainer trainer MultistepTrainer multistep_trainer
OffPolicyDataFetcher offpolicy_data_fetcher OfflineDataFetcher offline_data_fetcher
LearnerRun
RouterLink RouterStore RouterCollector RouterLearner open_coordinator_link role_of_this_process
"""


def test_the_public_names_are_these() -> None:
    assert middleware.classic.__all__ == NAMES.split()
    for name in middleware.classic.__all__:
        assert getattr(middleware.classic, name).__doc__
