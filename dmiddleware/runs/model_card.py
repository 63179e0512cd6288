"""Model cards: what a policy is, how well it does, and how to use it, as Markdown."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import gymnasium as gym

from dmiddleware.errors import ConfigError
from dmiddleware.runs.export import ExportedPolicy
from dmiddleware.runs.provenance import versions
from dmiddleware.runs.record import settings_of_part
from dmiddleware.settings import plain_values
from dmiddleware.yaml_text import yaml_text

__all__ = ["check_card", "write_model_card"]

_CARD: Final = "README.md"
_LIBRARY: Final = "library_name: dmiddleware"
_NO_NAME: Final = re.compile(r"\W")

_USE: Final = {
    "onnx": """```python
import numpy as np
import onnxruntime

session = onnxruntime.InferenceSession("{file}")
{call}
```""",
    "torch": """```python
import torch

policy = torch.export.load("{file}").module()
{call}
```""",
}


def check_card(folder: Path) -> Path:
    """Return where the card of an export into a folder goes.

    Raises:
        ConfigError: if another README.md is there.
    """
    path = folder / _CARD
    if path.exists() and _LIBRARY not in path.read_text(encoding="utf-8", errors="replace"):
        raise ConfigError(
            f"{path} exists and is not a model card of this project; export into another folder"
        )
    return path


def write_model_card(
    exported: ExportedPolicy, run: Path | None, *, part: str | None = None
) -> Path:
    """Write ``README.md`` beside an exported policy.

    Its head is that of the Hugging Face Hub.

    Args:
        exported: the policy.
        run: the folder of the run that trained it, for the env, the results and the settings; None:
            unknown.
        part: the part of its chain that learned the policy; None: the whole chain.

    Returns:
        The path of the card.

    Raises:
        ConfigError: if another README.md is there.
        RunFolderError: if the run's ``config.yaml`` is not YAML.
    """
    path = check_card(exported.path.parent)
    config = {} if run is None else settings_of_part(run, part)
    result = {} if run is None else _result_of(run, part)
    path.write_text("\n".join(_lines(exported, config, result)) + "\n", encoding="utf-8")
    return path


def _lines(
    exported: ExportedPolicy, config: Mapping[str, Any], result: Mapping[str, Any]
) -> Iterator[str]:
    algorithm = type(exported.policy).__name__.removesuffix("Policy")
    record = config.get("env") or {}
    env = record.get("id")
    title = f"{algorithm} on {env}" if env else algorithm
    yield from ("---", *_head(title, algorithm, env, result).splitlines(), "---", "")
    yield from (f"# {title}", "")
    yield "A policy that [dmiddleware](https://dmiddleware.readthedocs.io) trained with"
    where = f"in the environment `{env}`" if env else "in an environment without an id"
    wrapped = ", ".join(f"`{port}`" for port in record.get("wrappers") or ())
    yield f"{algorithm} {where}{f', wrapped in {wrapped}' if wrapped else ''}."
    yield from ("", "## Use", "")
    yield _USE[exported.format].format(file=exported.path.name, call=_call(exported))
    yield from ("", "Inputs and outputs have one row for each environment.", "")
    yield from _table(
        ("", "name", "shape", "dtype"),
        [
            (kind, f"`{port.name}`", str(["batch", *port.shape]).replace("'", ""), port.dtype)
            for kind, ports in (("input", exported.inputs), ("output", exported.outputs))
            for port in ports
        ],
    )
    if any(port.name.startswith("next_state") for port in exported.outputs):
        yield from (
            "",
            "The policy has a memory: pass `next_state` as `state` in the next step. At the start "
            "of an episode, `state` is zero, and so are the previous action and reward.",
        )
    yield from ("", "## Results", "")
    yield from _results(result)
    yield from ("", "## Settings", "", "```yaml")
    settings = {
        name: config[name]
        for name in ("program", "seed", "env", "eval_env", "arguments")
        if name in config
    }
    policy = config.get("policy") or plain_values(exported.policy.cfg)
    yield yaml_text({**settings, "policy": policy}).strip()
    yield from ("```", "", "## Versions", "")
    trained = {**(config.get("versions") or {}), **_commit(config)}
    exporting = versions()
    yield from _table(
        ("", "trained with", "exported with"),
        [
            (name, str(trained.get(name, "?")), str(exporting.get(name, "")))
            for name in dict.fromkeys((*trained, *exporting))
        ],
    )


def _head(title: str, algorithm: str, env: str | None, result: Mapping[str, Any]) -> str:
    tags = ["reinforcement-learning", "deep-reinforcement-learning", algorithm.lower()]
    head: dict[str, Any] = {"library_name": "dmiddleware", "tags": [*tags, *([env] if env else [])]}
    value = result.get("mean_return")
    if env and value is not None:
        metric = {"type": "mean_reward", "name": "mean return", "value": round(float(value), 2)}
        entry = {
            "task": {"type": "reinforcement-learning"},
            "dataset": {"name": env, "type": env},
            "metrics": [metric],
        }
        head["model-index"] = [{"name": title, "results": [entry]}]
    return yaml_text(head)


def _results(result: Mapping[str, float]) -> Iterator[str]:
    if "mean_return" not in result:
        yield "The run has recorded no final evaluation."
        return
    episodes = f", {result['n_episode']} fresh episodes" if "n_episode" in result else ""
    lines = (
        ("mean_return", f"mean return of the best policy{episodes}", "{:.1f}"),
        ("last_return", "mean return of the last policy", "{:.1f}"),
        ("env_step", "env steps", "{:,}"),
        ("train_iter", "updates", "{:,}"),
        ("train_s", "duration of the training", "{:,.0f} s"),
    )
    yield from _table(
        ("what", "value"),
        [(text, form.format(result[name])) for name, text, form in lines if name in result],
    )


def _result_of(run: Path, part: str | None) -> dict[str, float]:
    """Return the numbers of a run's result; a file that is cut or damaged may lack some."""
    # A part may have been learned in a process of its own, which has a file of its own.
    files = [run / "result.json", *(sorted(run.glob("result.*.json")) if part is not None else ())]
    for file in files:
        try:
            result = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if part is not None and isinstance(result, dict):
            result = (result.get("parts") or {}).get(part)
        if isinstance(result, dict):
            return {n: value for n, value in result.items() if isinstance(value, (int, float))}
    return {}


def _commit(config: Mapping[str, Any]) -> dict[str, str]:
    git = config.get("git")
    if not isinstance(git, Mapping) or "commit" not in git:
        return {}
    changed = ", with changes" if git.get("dirty") else ""
    return {"git commit": f"{str(git['commit'])[:12]}{changed}"}


def _call(exported: ExportedPolicy) -> str:
    """Return the lines that get actions from the file, as code."""
    names = [port.name for port in exported.inputs]
    if exported.format == "torch":
        roots = dict.fromkeys(name.partition(".")[0] for name in names)
        return f'action = policy({", ".join(f"{name}={name}" for name in roots)})["action"]'
    inputs = ", ".join(f"{json.dumps(name)}: {_NO_NAME.sub('_', name)}" for name in names)
    if any(port.name == "action" for port in exported.outputs):
        return f"(action, *_) = session.run(None, {{{inputs}}})"
    assert exported.policy.spaces is not None
    return (
        "names = [output.name for output in session.get_outputs()]\n"
        f"outputs = dict(zip(names, session.run(None, {{{inputs}}})))\n"
        f"action = {_parts(exported.policy.spaces[1], 'action')}"
    )


def _parts(space: gym.Space[Any], path: str) -> str:
    """Return the action as the env takes it, from the outputs, as code."""
    if isinstance(space, gym.spaces.Dict):
        items = (
            f"{json.dumps(name)}: {_parts(part, f'{path}.{name}')}"
            for name, part in space.spaces.items()
        )
        return f"{{{', '.join(items)}}}"
    if isinstance(space, gym.spaces.Tuple):
        items = (f"{_parts(part, f'{path}.{at}')}," for at, part in enumerate(space.spaces))
        return f"({' '.join(items)})"
    return f"outputs[{json.dumps(path)}]"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"|{' --- |' * len(head)}"
    for row in rows:
        yield f"| {' | '.join(row)} |"
