"""Self-play on tic-tac-toe with the classic workers, until a random opponent never wins.

One DQN policy plays both sides. PettingZoo shows the board from the side of the player to move, so
what one side learns serves the other. The action mask keeps both from taking an occupied cell.
"""

from typing import Any

import numpy as np
import pettingzoo
import torch

from dmiddleware.classic import BattleEnvManager, create_buffer, game_result
from dmiddleware.env import PettingZooAdapter
from dmiddleware.model import action_mask_of
from dmiddleware.policy import DQNPolicy, Policy
from dmiddleware.program import run_program
from dmiddleware.rl import Schedule
from dmiddleware.seeding import derive_seed
from dmiddleware.settings import Count, Whole
from dmiddleware.tree import Value
from dmiddleware.worker import (
    BaseLearner,
    BattleEpisodeSerialCollector,
    BattleInteractionSerialEvaluator,
)

GAMES = 32
UPDATES = 16
BATCH_SIZE = 128
EVAL_EPISODES = 1000


class RandomPlayer(Policy):
    """Takes any free cell."""

    def act_eval(self, obs: Value, env_id: np.ndarray, **kwargs: Any) -> dict[str, Any]:
        """Draw a cell."""
        mask = action_mask_of(obs)
        assert mask is not None
        drawn = torch.multinomial(mask.float(), 1, generator=self.generator)
        return {"action": drawn.squeeze(-1)}


def make_game() -> PettingZooAdapter:
    """Make a game of tic-tac-toe; the board is a vector of 18 numbers."""
    return PettingZooAdapter(pettingzoo.make("aec", "classic/tictactoe-v3"), flatten=True)


def make_policy(seed: int = 0) -> DQNPolicy:
    """Build a DQN policy with two hidden layers; the reward comes at the end, undiscounted."""
    return DQNPolicy.for_env(
        BattleEnvManager([make_game]),
        seed=seed,
        model={"encoder_hidden_sizes": [128, 128]},
        discount=1.0,
        learning_rate=1e-3,
        target_update_freq=1,
        target_tau=0.01,
        loss="mse",
    )


def make_evaluator(
    policy: DQNPolicy, *, seed: int, exp_name: str, instance_name: str = "evaluator"
) -> BattleInteractionSerialEvaluator:
    """Build an evaluator in which the policy plays first, against a random opponent."""
    opponent = RandomPlayer({"seed": seed}, torch.nn.Identity(), modes=["eval"])
    return BattleInteractionSerialEvaluator(
        {},
        BattleEnvManager([make_game] * 50),
        [policy, opponent],
        exp_name=exp_name,
        instance_name=instance_name,
    )


def count_losses(evaluator: BattleInteractionSerialEvaluator, n_episode: int, **at: Any) -> int:
    """Play games and return how many the first player lost."""
    _, infos = evaluator.eval(n_episode=n_episode, **at)
    return sum(game_result(info) == "losses" for info in infos[0])


def train(
    policy: DQNPolicy, *, seed: int, exp_name: str, iterations: int, eval_every: int = 25
) -> None:
    """Play against itself and learn, until the policy loses none of 1000 games."""
    learner = BaseLearner({}, policy.learn_mode, exp_name=exp_name)
    collector = BattleEpisodeSerialCollector(
        {"get_train_sample": True, "collect_print_freq": UPDATES * eval_every},
        BattleEnvManager([make_game] * GAMES),
        [policy, policy],
        exp_name=exp_name,
    )
    evaluator = make_evaluator(policy, seed=derive_seed(seed, "opponent"), exp_name=exp_name)
    buffer = create_buffer(
        {"type": "naive", "replay_buffer_size": 50_000, "seed": seed}, exp_name=exp_name
    )
    eps = Schedule.linear(1.0, 0.2, decay=150)
    with learner, collector, evaluator, buffer:
        learner.call_hook("before_run")
        for iteration in range(1, iterations + 1):
            data, _ = collector.collect(
                GAMES, learner.train_iter, policy_kwargs={"eps": eps(iteration)}
            )
            for samples in data:
                buffer.push(samples, collector.envstep)
            for _ in range(UPDATES):
                learner.train(buffer.sample(BATCH_SIZE, learner.train_iter), collector.envstep)
            if iteration % eval_every == 0:
                at = {"train_iter": learner.train_iter, "envstep": collector.envstep}
                if count_losses(evaluator, EVAL_EPISODES, **at) == 0:
                    break
        learner.save_checkpoint("final")
        learner.call_hook("after_run")


def main(seed: Whole = 0, exp_name: str = "runs/tictactoe", iterations: Count = 400) -> int:
    """Learn tic-tac-toe from self-play; return the games lost of 100 fresh ones as first player.

    Args:
        seed: seed of everything random.
        exp_name: folder of the run.
        iterations: most rounds of self-play.
    """
    policy = make_policy(seed)
    train(policy, seed=seed, exp_name=exp_name, iterations=iterations)
    fresh = derive_seed(seed, "fresh opponent")
    with make_evaluator(policy, seed=fresh, exp_name=exp_name, instance_name="final") as final:
        lost = count_losses(final, 100)
    print(f"lost {lost} of 100 games as first player")
    return lost


if __name__ == "__main__":
    run_program(main)
