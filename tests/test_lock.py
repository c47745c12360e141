"""pyproject.toml alone, without a lock file, pins all installed versions, whatever the index."""

import importlib.metadata
import os
import tomllib

import prepare
from tests.common import ROOT

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
UV = PROJECT["tool"]["uv"]
GROUPS = PROJECT["dependency-groups"]
INSTALLED = [*PROJECT["project"]["dependencies"], *GROUPS["dev"]]  # by `uv run`
PINS = [*INSTALLED, *GROUPS["tpe"]]


def applying(lines, extras=()):
    """Returns {name: Requirement} of the lines that apply to this machine and interpreter, with
    one of the extras or without."""
    found = {}
    for line in lines:
        one = Requirement(line)
        if not one.marker or any(one.marker.evaluate({"extra": e}) for e in ["", *extras]):
            found[canonicalize_name(one.name)] = one
    return found


CONSTRAINTS = {
    name: str(one.specifier) for name, one in applying(UV["constraint-dependencies"]).items()
}


def test_the_constraints_repeat_every_pin():
    for name, pin in applying(PINS).items():
        assert str(pin.specifier) == CONSTRAINTS.get(name), name


@pytest.mark.skipif("UV_NO_SYNC" in os.environ, reason="somebody installed other versions by hand")
def test_every_package_is_constrained_and_installed_so():
    """uv accepts a dependency without a constraint, whose version then depends on the day."""
    installed = {}
    waiting = list(applying([*INSTALLED, *prepare.PACKAGES]).items())
    seen = set()
    while waiting:
        name, one = waiting.pop()
        if (name, *one.extras) in seen:
            continue
        seen.add((name, *one.extras))
        package = importlib.metadata.distribution(name)
        installed[name] = f"=={package.version}"
        waiting += applying(package.requires or [], one.extras).items()
    assert installed == {name: CONSTRAINTS.get(name) for name in installed}


def test_uv_is_told_nothing_else():
    """uv is given no index and no cut-off date, which some indexes cannot serve. The list is last,
    because the command that rewrites it deletes all that follows."""
    assert list(UV) == ["package", "constraint-dependencies"]
    assert list(PROJECT["tool"])[-1] == "uv"
