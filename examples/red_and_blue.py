"""Two teams of different spaces and algorithms: MAPPO's catchers chase SAC's runner.

Each team is evaluated against one that moves at random. The catchers' return rises from about -40
to 3: they catch the runner. The runner's rises from about 40 to 65, since it stays far away.
"""

from dmiddleware import Task
from dmiddleware.data import TensorBuffer, TensorBufferSettings
from dmiddleware.policy import MAPPOPolicy, MAPPOSettings, SACPolicy, SACSettings
from dmiddleware.program import run_program
from dmiddleware.rollout import GameSettings, against, make_game
from dmiddleware.settings import Count, Whole
from middleware import (
    ContextExchanger,
    DataPusher,
    Experiment,
    ExperimentResult,
    ExperimentSettings,
    GAEEstimator,
    InteractionEvaluator,
    ModelExchanger,
    OffPolicyLearner,
    OffPolicyLearnerSettings,
    OnPolicyLearner,
    TeamCollector,
    TeamCollectorSettings,
    TerminationChecker,
)

TEAMS = {"red": ["red_0", "red_1"], "blue": ["blue_*"]}
GAME = GameSettings("dmiddleware.zoo.tag:Tag", teams=TEAMS, env_num=16)
RED = MAPPOSettings(batch_size=512, epoch_per_collect=5, learning_rate=1e-3)
BLUE = SACSettings(batch_size=128)


def main(
    seed: Whole = 0,
    exp_name: str = "red_and_blue",
    max_env_step: Count = 50_000,
    game: GameSettings = GAME,
    red: MAPPOSettings = RED,
    blue: SACSettings = BLUE,
    collector: TeamCollectorSettings = TeamCollectorSettings(n_sample=1024),
    buffer: TensorBufferSettings = TensorBufferSettings(20_000),
    learner: OffPolicyLearnerSettings = OffPolicyLearnerSettings(update_per_collect=64),
    experiment: ExperimentSettings = ExperimentSettings(),
) -> ExperimentResult:
    """Train both teams against each other.

    Args:
        seed: seed of everything random.
        exp_name: folder of the run in runs/.
        max_env_step: maximum number of env steps of each team.
    """
    with Task(seed=seed) as task:
        games = make_game(game, seed=task.seed_for("collector"))
        catchers = MAPPOPolicy.for_env(games["red"], red, seed=seed)
        runner = SACPolicy.for_env(games["blue"], blue, seed=seed)
        replay = TensorBuffer.of(buffer, seed=task.seed_for("buffer"))

        task.use(ContextExchanger(name="red", max_ahead=1)).use(ContextExchanger(name="blue"))
        task.use(ModelExchanger(catchers, name="red")).use(ModelExchanger(runner, name="blue"))
        task.use(TeamCollector.of(collector, games, {"red": catchers, "blue": runner}))
        task.use(GAEEstimator(catchers, name="red")).use(OnPolicyLearner(catchers, name="red"))
        task.use(DataPusher(replay, name="blue"))
        task.use(OffPolicyLearner.of(learner, runner, replay, name="blue"))
        for name, agent, other in (("red", catchers, "blue"), ("blue", runner, "red")):
            eval_games = make_game(game, env_num=10, seed=task.seed_for("evaluator", name))
            envs = against(eval_games, name, {other: "random"})
            envs = envs.joint if agent is catchers else envs
            task.use(
                InteractionEvaluator(agent, envs, n_episode=40, every_env_step=4096, name=name)
            )
        record = Experiment.of(experiment, exp_name, {"red": catchers, "blue": runner})
        task.use(record)
        task.use(TerminationChecker(max_env_step=max_env_step, name="red"))
        task.run()
    return record.result


if __name__ == "__main__":
    run_program(main)
