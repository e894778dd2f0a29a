"""The documents name what exists."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from spmd_rl import config
from spmd_rl.engine.registry import EngineRegistry
from spmd_rl.validation import typed

ROOT = Path(__file__).parent.parent.parent


def keys(value, prefix=""):
    for field in dataclasses.fields(value):
        inner = getattr(value, field.name)
        if dataclasses.is_dataclass(inner) and prefix + field.name != "critic.optimizer":
            yield from keys(inner, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, inner


def test_every_key_is_documented_with_its_default_and_no_other():
    whole, problems = typed({})
    assert not problems
    whole = dataclasses.replace(whole, engine=config.EngineConfig(backend=whole.engine.backend))
    check_table((ROOT / "docs/configuration.md").read_text(), dict(keys(whole)))


@pytest.mark.parametrize("backend", EngineRegistry.backends())
def test_every_key_of_an_engine_is_documented(backend):
    text = (ROOT / "docs/engines.md").read_text()
    section = text.partition(f"## engine={backend}\n")[2].partition("\n## ")[0]
    common = {field.name for field in dataclasses.fields(config.EngineConfig)}
    own = keys(EngineRegistry.module(backend).Config(), "engine.")
    check_table(section, {key: default for key, default in own if key.removeprefix("engine.") not in common})


def check_table(text: str, expected: dict) -> None:
    """The rows of the tables of a document name these keys and defaults, and no others."""
    documented = dict(re.findall(r"^\| `([a-z_.]+)` \| (.*?) \|", text, re.M))
    assert documented.keys() == expected.keys()
    for key, default in expected.items():
        shown = "null" if default is None else str(default).lower() if isinstance(default, bool) else str(default)
        assert documented[key].strip("` ") == shown or key == "critic.optimizer", key


@pytest.mark.parametrize(
    "document",
    [
        "README.md",
        "CONTRIBUTING.md",
        "docs/concepts.md",
        "docs/extending.md",
        "docs/clusters.md",
        "docs/rollout.md",
        "docs/placement.md",
        "docs/engines.md",
    ],
)
def test_paths_that_documents_name_exist(document):
    text = (ROOT / document).read_text()
    ours = r"(?:launch|docs|tests|benchmarks|spmd_rl|conf)/[\w./-]+\w"
    for path in {*re.findall(ours, text), *re.findall(r"\]\(([\w./-]+)\)", text)}:
        found = [base / path for base in (ROOT, (ROOT / document).parent) if (base / path).exists()]
        assert found, f"{document} names {path}"


@pytest.mark.parametrize("table", ["ADVANTAGES", "POLICY_LOSSES", "REWARDS", "DATASETS", "ROLLOUTS", "ENVIRONMENTS"])
def test_every_row_of_every_table_leads_somewhere(table):
    rows = vars(config)[table]
    assert all(callable(config.resolve(name, rows)) for name in rows)
