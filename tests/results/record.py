"""The outcome of one training, kept in the repository."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

__all__ = ["RECORDS", "Record", "load", "path_of", "save"]

RECORDS = Path(__file__).parent / "records"


@dataclass(frozen=True)
class Record:
    """What a training reached, and with which code.

    Attributes:
        seed: the seed.
        command: the command line.
        commit: the revision of this repository when the training began, or was resumed.
        torch: the version of torch.
        figure: the figure of the best policy.
        last: the same of the last policy; None if the program does not tell.
        n_episode: the episodes behind each figure.
        env_step: environment steps.
        train_iter: updates.
        train_s: seconds of training, with evaluations.
        evaluations: for each evaluation the env step (offline: the update) and the mean return.
        logged: the mean of the entry's ``logged`` figure; None if it names none.
        resumed: whether the training was interrupted, and continued from a snapshot.
    """

    seed: int
    command: str
    commit: str
    torch: str
    figure: float
    last: float | None
    n_episode: int
    env_step: int
    train_iter: int
    train_s: float
    evaluations: tuple[tuple[int, float], ...]
    logged: float | None = None
    resumed: bool = False


def path_of(name: str, seed: int) -> Path:
    """Return the path of a record."""
    return RECORDS / f"{name}-{seed}.json"


def save(name: str, record: Record) -> None:
    """Write a record, of which a reader never sees a part."""
    path = path_of(name, record.seed)
    path.parent.mkdir(exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(dataclasses.asdict(record)) + "\n", encoding="utf-8")
    partial.replace(path)


def load(name: str, seed: int) -> Record | None:
    """Return a record, or None if that training has not been run."""
    path = path_of(name, seed)
    if not path.exists():
        return None
    fields = json.loads(path.read_text(encoding="utf-8"))
    points = tuple((int(at), float(value)) for at, value in fields.pop("evaluations"))
    return Record(**fields, evaluations=points)
