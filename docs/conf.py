"""How Sphinx builds the documentation: ``make docs``."""

import ast
import dataclasses
import inspect
import itertools
import re
import tomllib
from pathlib import Path

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.pycode import ModuleAnalyzer
from sphinx.util.logging import getLogger

import middleware  # noqa: F401 (its settings have tables)
from dmiddleware.settings import Settings, describe

LOGGER = getLogger(__name__)
ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

project = PROJECT["name"]
author = "the dmiddleware developers"
copyright = "the dmiddleware developers; Apache License 2.0"
version = release = PROJECT["version"]

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
templates_path: list[str] = []

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath", "fieldlist"]
myst_heading_anchors = 3

# Public names appear in source order. Types are in the signatures only; docstrings do not repeat
# them.
autodoc_default_options = {"members": True, "show-inheritance": True}
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_custom_sections = [("Reads", "params_style"), ("Writes", "params_style")]
napoleon_use_rtype = False
napoleon_use_ivar = True

html_math_renderer = "mathml"
html_theme = "furo"
html_title = f"{project} {version}"
html_static_path: list[str] = []
html_theme_options = {"navigation_with_keys": True}
html_show_sourcelink = False
html_search_scorer = str(Path(__file__).with_name("search_scorer.js"))

# What people search for, by the page that has the answer. The search shows these pages first.
SEARCHED = {
    "guide/environments": (
        "number of environments", "env_num", "n_sample", "envs_per_process", "async", "vectorized",
        "parallel environments",
    ),
    "guide/learning-outputs": ("log.txt", "warnings", "config.yaml", "result.json"),
    "howto/checkpoints": ("save a policy", "load a policy", "resume", "checkpoint", "snapshot"),
    "howto/custom-env": ("wrappers", "own environment"),
    "howto/environments": ("Atari", "MuJoCo", "frame stack", "atari_preprocessing"),
    "howto/from-stable-baselines3": (
        "stable-baselines3", "SB3", "CleanRL", "VecNormalize", "EvalCallback", "callbacks", "learn",
        "predict", "n_steps", "total_timesteps", "ent_coef", "gamma",
    ),
    "howto/gpu": ("CUDA", "device"),
    "howto/install": ("Windows", "macOS", "pip", "requirements"),
    "howto/logging-and-profiling": (
        "gradients", "gradient norm", "TensorBoard", "custom metric", "metrics", "progress bar",
    ),
    "howto/prioritized-replay": ("PER", "priorities"),
    "howto/schedules": ("learning rate schedule", "anneal"),
    "howto/seeds": ("seed", "reproducible"),
    "howto/settings": ("command line", "options", "--config", "hyperparameters"),
    "howto/speed": ("slow", "throughput", "steps per second", "compile"),
    "howto/sweeps": ("hyperparameter search", "Optuna", "grid search"),
    "howto/train": (
        "early stopping", "stop_value", "stop_evaluations", "stopping", "max_env_step", "train",
    ),
}  # fmt: skip

# Aliases and registries have their docstring below the assignment, in the module that defines them.
# Autodoc only looks in the package that exports them, so we pass the docstrings on.
PACKAGES = ("pipeline", "router", "data", "env", "policy", "model", "rl", "rollout", "worker")


def documented_data(folder: Path) -> dict[str, str]:
    """Return the docstrings of all names that a package's modules assign."""
    found = {}
    for path in sorted(folder.rglob("*.py")):
        body = ast.parse(path.read_text(encoding="utf-8")).body
        for statement, following in itertools.pairwise(body):
            docstring = following.value if isinstance(following, ast.Expr) else None
            if isinstance(docstring, ast.Constant) and isinstance(docstring.value, str):
                for target in getattr(statement, "targets", [getattr(statement, "target", None)]):
                    if isinstance(target, ast.Name):
                        found[target.id] = inspect.cleandoc(docstring.value)
    return found


def add_docstrings_of_data(app):
    for package in PACKAGES:
        analyzer = ModuleAnalyzer.for_module(f"dmiddleware.{package}")
        analyzer.analyze()
        for name, docstring in documented_data(ROOT / "dmiddleware" / package).items():
            analyzer.attr_docs["", name] = [*docstring.splitlines(), ""]


def skip_tuple_fields(app, what, name, obj, skip, options):
    # The docstring of a named tuple describes its fields.
    return True if type(obj).__name__ == "_tuplegetter" else None


def is_settings(obj):
    return inspect.isclass(obj) and issubclass(obj, Settings) and obj is not Settings


def leave_arguments_to_the_table(app, what, name, obj, options, lines):
    """Take the fields out of the docstring of settings, which a table describes."""
    if is_settings(obj):
        lines[:] = inspect.cleandoc(vars(obj)["__doc__"]).splitlines()


def add_table_of_settings(app, what, name, obj, options, lines):
    """Describe the fields of settings by a table, from their declarations."""
    if not is_settings(obj):
        return
    lines += ["", ".. list-table::", "   :header-rows: 1", ""]
    rows = [("name", "default", "values", "meaning")]
    for one in describe(obj):
        required = one.default is dataclasses.MISSING
        default = "must be given" if required else f"``{one.default!r}``"
        rows.append((f"``{one.name}``", default, one.words, one.meaning))
    for first, *others in rows:
        lines += [f"   * - {first}", *(f"     - {cell}" for cell in others)]
    lines.append("")


def all_settings():
    classes = Settings.__subclasses__()
    for cls in classes:
        classes += cls.__subclasses__()
    return classes


def leave_fields_to_the_table(app):
    for cls in all_settings():
        analyzer = ModuleAnalyzer.for_module(cls.__module__)
        analyzer.analyze()
        for one in describe(cls):
            analyzer.attr_docs.pop((cls.__qualname__, one.name), None)


def add_searched_words(app, docname, source):
    """Let the search find a page by more words than its title."""
    words = list(SEARCHED.get(docname, ()))
    if docname == "reference/configuration":
        policies = [
            cls for cls in all_settings() if cls.__module__.startswith("dmiddleware.policy")
        ]
        names = dict.fromkeys(one.name for cls in policies for one in describe(cls))
        words += sorted(names.keys() - itertools.chain(*SEARCHED.values()))
    if words:
        title, end, rest = source[0].partition("\n")
        # The search shows main entries, those with "!", before all else.
        entries = "\n".join(f"   ! single: {word}" for word in words)
        source[0] = f"{title}\n\n```{{eval-rst}}\n.. index::\n{entries}\n```\n{end}{rest}"


# Autodoc resolves type aliases. A batch would be shown as "Tensor", like one of torch's tensors.
ALIASES = {
    r"~?treetensor\.torch\.(?:tensor\.)?Tensor": "Batch",
    r"~?[\w.]+\.Callable\[\[([^\[\]]+)\], ~?[\w.]+\.Iterator\[None\] \| None\]": r"Middleware[\1]",
}


def restore_aliases(app, what, name, obj, options, signature, returns):
    for pattern, alias in ALIASES.items():
        signature, returns = (
            text and re.sub(pattern, alias, text) for text in (signature, returns)
        )
    return signature, returns


_COLON = "\0"


def hide_colons(app, what, name, obj, options, lines):
    """Keep napoleon from taking what precedes a colon in the first line for a type."""
    if what in ("attribute", "data", "property") and lines:
        lines[0] = lines[0].replace(":", _COLON)


def show_colons(app, what, name, obj, options, lines):
    lines[:] = [line.replace(_COLON, ":") for line in lines]
    if what in ("attribute", "data", "property") and any(":type:" in line for line in lines):
        LOGGER.warning("%s: what precedes a colon in its docstring is shown as its type", name)


def add_table_of_names(app, what, name, obj, options, lines):
    """List the names of a page at its top, each with its first sentence."""
    names = getattr(obj, "__all__", ()) if what == "module" else ()
    if not names:
        return
    data = ModuleAnalyzer.for_module(name)
    data.analyze()
    lines += ["", ".. list-table::", "   :widths: auto", ""]
    for one in names:
        docstring = data.attr_docs.get(("", one))
        if docstring is None:
            docstring = (inspect.getdoc(getattr(obj, one)) or "").splitlines()
        first = " ".join(itertools.takewhile(bool, docstring)).partition(". ")[0].rstrip(".:")
        lines += [f"   * - :py:obj:`~{name}.{one}`", f"     - {first}"]
    lines.append("")


def remove_meaningless_bases(app, doctree):
    """Remove "Bases: object", and base classes that are not public."""
    for paragraph in list(doctree.findall(nodes.paragraph)):
        if re.fullmatch(r"Bases: (object|Exchange|_\w+)", paragraph.astext()):
            paragraph.parent.remove(paragraph)


def mathml(text, display):
    """Return a formula as MathML, which browsers draw without a script from the network."""
    if "\\\\" in text:
        text = f"\\begin{{aligned}}{text}\\end{{aligned}}"
    # Browsers put no space around the names of functions.
    space = '<mspace width="0.17em"/>'
    return re.sub(
        r"<mi>(\w\w+)</mi>", rf"{space}<mi>\1</mi>{space}", convert(text, display=display)
    )


def write_inline_math(translator, node):
    translator.body.append(mathml(node.astext(), "inline"))
    raise nodes.SkipNode


def write_math(translator, node):
    translator.body.append(f"<div>{mathml(node.astext(), 'block')}</div>")
    raise nodes.SkipNode


def setup(app):
    app.add_html_math_renderer("mathml", (write_inline_math, None), (write_math, None))
    app.connect("builder-inited", add_docstrings_of_data)
    app.connect("builder-inited", leave_fields_to_the_table)
    app.connect("source-read", add_searched_words)
    app.connect("autodoc-skip-member", skip_tuple_fields)
    app.connect("autodoc-process-docstring", leave_arguments_to_the_table, priority=100)
    app.connect("autodoc-process-docstring", add_table_of_settings)
    app.connect("autodoc-process-docstring", add_table_of_names)
    app.connect("autodoc-process-docstring", hide_colons, priority=400)
    app.connect("autodoc-process-docstring", show_colons, priority=600)
    app.connect("autodoc-process-signature", restore_aliases)
    app.connect("doctree-read", remove_meaningless_bases)
