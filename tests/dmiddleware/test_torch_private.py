"""Private parts of torch: one file uses them, behind one switch."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dmiddleware
from dmiddleware.torch_private import call, forward_layers, plain_torch
from tests.variants import mostly_slow

_PRIVATE = re.compile(
    r"\btorch(\.\w+)*\._[a-z]|\._(compiled_call_impl|(forward|backward)(_pre)?_hooks)\b"
)
_COUNTS_CALLS = """
import torch
from dmiddleware.torch_private import call

class Counted(torch.nn.Linear):
    n_calls = 0

    def __call__(self, *args):
        self.n_calls += 1
        return super().__call__(*args)

layer = Counted(2, 2)
call(layer, torch.ones(2))
print(layer.n_calls)
"""


def test_networks_and_updates_use_no_private_parts_of_torch() -> None:
    package = Path(dmiddleware.__file__).parent
    files = [
        path
        for folder in ("model", "policy", "reward", "rl", "rollout")
        for path in (package / folder).rglob("*.py")
    ]
    assert files
    assert [path for path in files if _PRIVATE.search(path.read_text(encoding="utf-8"))] == []
    assert _PRIVATE.search((package / "torch_private.py").read_text(encoding="utf-8"))


class Counted(nn.Linear):
    """A layer that counts its calls."""

    n_calls = 0

    def __call__(self, *args: Any) -> Any:
        self.n_calls += 1
        return super().__call__(*args)


def test_plain_torch_calls_every_module_until_its_block_ends() -> None:
    layer = Counted(2, 2)
    with plain_torch(), plain_torch():
        call(layer, torch.ones(2))
    assert layer.n_calls == 1
    call(layer, torch.ones(2))
    assert layer.n_calls == 1


def test_a_module_with_a_hook_is_called_also_with_private_torch() -> None:
    layer = Counted(2, 2)
    layer.register_forward_hook(lambda *_: None)
    call(layer, torch.ones(2))
    forward_layers(nn.Sequential(layer), torch.ones(2))
    assert layer.n_calls == 2


@pytest.mark.process
@pytest.mark.parametrize(
    ("value", "n_calls"), mostly_slow([("0", "1"), (None, "0"), ("1", "0")], keep=1)
)
def test_an_environment_variable_is_the_switch(value: str | None, n_calls: str) -> None:
    environ = {k: v for k, v in os.environ.items() if k != "DMIDDLEWARE_PRIVATE_TORCH"}
    if value is not None:
        environ["DMIDDLEWARE_PRIVATE_TORCH"] = value
    done = subprocess.run(
        [sys.executable, "-c", _COUNTS_CALLS],
        env=environ,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert done.stdout.strip() == n_calls
