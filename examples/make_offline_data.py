"""Offline data: what SAC does before, while and after it learns, as Minari datasets.

``python -m examples.make_offline_data --env-id Pendulum-v1`` writes ``Pendulum-v1/random-v0`` and
others, unless all of them are there.
"""

import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from filelock import FileLock

from dmiddleware import Task
from dmiddleware.data import Batch, TensorBuffer, index_rows, load_minari, save_minari
from dmiddleware.env import make_env_manager
from dmiddleware.errors import DatasetError
from dmiddleware.policy import SACPolicy
from dmiddleware.program import run_program
from dmiddleware.rollout import RolloutCollector
from dmiddleware.seeding import derive_seed
from dmiddleware.settings import Whole
from middleware import (
    DataPusher,
    OffPolicyLearner,
    OnlineRLContext,
    StepCollector,
    TerminationChecker,
)


@dataclass(frozen=True)
class Recipe:
    """How to make the data of an environment.

    Attributes:
        env_steps: steps for which SAC learns.
        random_steps: the first of them, with random actions.
        medium_step: the step whose policy is the medium one.
        n_rows: rows of each dataset, except for replay, which has all that SAC learned from.
        policy: settings of SAC.
    """

    env_steps: int
    random_steps: int
    medium_step: int
    n_rows: int
    policy: dict[str, Any] = field(default_factory=dict)


EnvId = Literal["Pendulum-v1", "HalfCheetah-v5"]
RECIPES: dict[str, Recipe] = {
    "Pendulum-v1": Recipe(
        6_000, 256, 2_600, 20_000, {"learning_rate_q": 1e-3, "learning_rate_policy": 1e-3}
    ),
    "HalfCheetah-v5": Recipe(200_000, 10_000, 50_000, 200_000, {"compile": True}),
}
KINDS = ("random", "medium", "expert", "replay", "mixed")


def dataset_id(env_id: str, kind: str) -> str:
    """Return Minari's id of a dataset."""
    return f"{env_id}/{kind}-v0"


def train_sac(env_id: str, recipe: Recipe, seed: int) -> tuple[SACPolicy, Any, list[Batch]]:
    """Return the expert, the state of the medium policy, and all rows that were collected."""
    medium: list[Any] = []
    replay: list[Batch] = []
    with Task(seed=seed) as task:
        envs = make_env_manager(env_id, env_num=1, seed=task.seed_for("collector"))
        policy = SACPolicy.for_env(envs, seed=seed, **recipe.policy)
        buffer = TensorBuffer(recipe.env_steps, seed=seed)

        def keep(ctx: OnlineRLContext) -> None:
            replay.append(ctx.trajectories)
            if not medium and ctx.env_step >= recipe.medium_step:
                medium.append(policy.collect_mode.state_dict())

        task.use(StepCollector(policy, envs, n_sample=8, random_steps=recipe.random_steps))
        task.use(DataPusher(buffer)).use(keep)
        task.use(OffPolicyLearner(policy, buffer, update_per_collect=8))
        task.use(TerminationChecker(max_env_step=recipe.env_steps))
        task.run()
    return policy, medium[0], replay


def main(env_id: EnvId = "Pendulum-v1", seed: Whole = 0) -> None:
    """Train SAC, and write datasets of random, medium and expert play, mixed and one by one.

    Args:
        env_id: the environment.
        seed: seed of everything random.
    """
    # Of several processes, one makes them and the others wait.
    with FileLock(Path(tempfile.gettempdir()) / f"dmiddleware-{env_id}.lock"):
        if len(existing(env_id)) == len(KINDS):
            print(f"the datasets of {env_id} are there already")
        else:
            write(env_id, seed)


def existing(env_id: str) -> set[str]:
    """Return the ids of the datasets of an environment that exist."""
    import minari  # an extra

    return {dataset_id(env_id, kind) for kind in KINDS} & set(minari.list_local_datasets())


def write(env_id: str, seed: int) -> None:
    """Make and write the datasets, instead of those that an interrupted process has left."""
    import minari  # an extra

    recipe = RECIPES[env_id]
    policy, medium, replay = train_sac(env_id, recipe, seed)

    def play(kind: str) -> Batch:
        seed_of_kind = derive_seed(seed, "offline data", kind)
        with make_env_manager(env_id, env_num=10, seed=seed_of_kind) as envs:
            collector = RolloutCollector(policy, envs)
            return collector.collect(recipe.n_rows, random=kind == "random")

    rows = {"replay": replay, "expert": [play("expert")], "random": [play("random")]}
    policy.collect_mode.load_state_dict(medium)
    rows["medium"] = [play("medium")]
    rows["mixed"] = [
        index_rows(one, slice(0, len(one["done"]) // 3))
        for kind in ("random", "medium", "expert")
        for one in rows[kind]
    ]
    for left_over in existing(env_id):
        minari.delete_dataset(left_over)
    for kind in KINDS:
        path = save_minari(rows[kind], dataset_id(env_id, kind), env=env_id, algorithm="SAC")
        print(f"wrote {path}")


def make(env_id: str) -> None:
    """Make the datasets in a process of its own, because the tasks of this one may join a run."""
    words = ["-m", "examples.make_offline_data", "--env-id", env_id]
    subprocess.run([sys.executable, *words], check=True)


def load(env_id: str, kind: str) -> Batch:
    """Return the rows of a dataset; make all of them first if it does not exist."""
    try:
        return load_minari(dataset_id(env_id, kind))
    except DatasetError:
        make(env_id)
        return load_minari(dataset_id(env_id, kind))


if __name__ == "__main__":
    run_program(main)
