"""The pipeline's code has no word of what the programs do that use it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import dmiddleware.pipeline

FILES = sorted(Path(dmiddleware.pipeline.__file__).parent.glob("*.py"))
WORDS = re.compile(
    "learner|collector|evaluat|policy|policies|reward|episode|trajector|env_step|train|replay|"
    "environment step",
    re.IGNORECASE,
)


@pytest.mark.parametrize("path", FILES, ids=[path.name for path in FILES])
def test_the_pipeline_has_no_word_of_reinforcement_learning(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if WORDS.search(line)] == []
