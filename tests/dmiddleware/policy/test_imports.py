"""What a process of a training imports: not torch's compiler, which takes longer than torch."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.variants import mostly_slow

PROGRAM = """
import sys
import torch
from dmiddleware.seeding import seed_libraries
from tests.dmiddleware.policy import every_policy
from tests.dmiddleware.policy.every_policy import batch_for, made

torch.set_num_threads(1)
seed_libraries(0)
for cls in getattr(every_policy, sys.argv[1]):
    policy = made(cls)
    policy.learn_mode.forward(batch_for(policy))
    made(cls).learn_mode.load_state_dict(policy.learn_mode.state_dict())
    if "torch._dynamo" in sys.modules:
        sys.exit(f"{cls.__name__} has imported it")
"""


@pytest.mark.process
@pytest.mark.parametrize(
    ("policies", "private", "says"),
    mostly_slow(
        [
            ("ONE_OF_A_KIND", "1", ""),
            ("EVERY", "1", ""),
            ("EVERY", "0", "DQNPolicy has imported it"),
        ],
        keep=1,
    ),
)
def test_no_policy_that_is_not_compiled_imports_the_compiler(
    policies: str, private: str, says: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, policies],
        # Without private parts of torch, its optimizers import it.
        env={**os.environ, "DMIDDLEWARE_PRIVATE_TORCH": private},
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )
    assert done.stderr.strip() == says
