"""What the two scripts promise about themselves: their order, knobs in one place, imports without
effect."""

import ast
import re
import subprocess
import sys
import tomllib

from tests.common import ROOT

import pytest

SCRIPTS = ("prepare.py", "train.py")
SOURCES = {name: (ROOT / name).read_text() for name in SCRIPTS}
TREES = {name: ast.parse(source) for name, source in SOURCES.items()}
DEFINITIONS = (ast.FunctionDef, ast.ClassDef)


# ---- Both ----
@pytest.mark.parametrize("name", SCRIPTS)
def test_functions_stay_short(name):
    functions = [node for node in ast.walk(TREES[name]) if isinstance(node, ast.FunctionDef)]
    lengths = {f.name: f.end_lineno - f.lineno + 1 for f in functions}
    assert not {function: length for function, length in lengths.items() if length > 60}


@pytest.mark.parametrize("name", SCRIPTS)
def test_lines_end_within_100_columns(name):
    assert not [line for line in SOURCES[name].splitlines() if len(line) > 100]


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_says_what_it_is_and_how_it_is_run(name):
    docstring = ast.get_docstring(TREES[name])
    assert docstring.startswith(f"{name}, the ")
    assert f"\n    uv run {name} " in docstring


# ---- The order of train.py ----
SECTIONS = """
    Knobs
    Model
    Initialisation
    Parameter groups
    Optimizer
    Schedules
    Training loop
    Below this line
    Attention back-ends
    Derived values
    Warm-up
    Main
"""


def test_train_is_in_the_order_in_which_it_is_read():
    titles = re.findall(r"^# ---- (.*) ----$", SOURCES["train.py"], re.M)
    sections = [line.strip() for line in SECTIONS.strip().splitlines()]
    assert len(titles) == len(sections)
    for title, section in zip(titles, sections, strict=True):
        assert re.match(rf"{section}(:| few experiments|$)", title)


def test_train_takes_its_names_from_the_ruler_once():
    """By one `from prepare import (...)` at the top, each name once and as it is called there."""
    found = []
    for node in ast.walk(TREES["train.py"]):
        if isinstance(node, ast.ImportFrom) and node.module == "prepare":
            found.append(node)
        if isinstance(node, ast.Import):
            assert "prepare" not in {alias.name for alias in node.names}
    assert len(found) == 1
    assert found[0] in TREES["train.py"].body
    assert all(alias.asname is None and alias.name != "*" for alias in found[0].names)
    names = [alias.name for alias in found[0].names]
    assert len(names) == len(set(names))


# ---- Knobs ----
def knob_block():
    """Its lines in train.py, [first, last], counted from 1."""
    lines = SOURCES["train.py"].splitlines()
    begin = next(i for i, line in enumerate(lines) if line.startswith("# ---- Knobs"))
    end = next(i for i, line in enumerate(lines) if line.startswith("# ---- Model"))
    return begin + 1, end


def test_knobs_are_one_per_line_with_their_reason():
    """A comment behind each, in one column but where a value is too long; some go on in the next
    line."""
    begin, end = knob_block()
    lines = SOURCES["train.py"].splitlines()[begin:end]
    knobs = [line for line in lines if line and not line.startswith(("#", " "))]
    assert len(knobs) > 35
    names = []
    for line in knobs:
        name, value, comment = re.fullmatch(r"(\w+) *= (\S.*?\S|\S)  +# (\S.*)", line).groups()
        assert name.isupper()
        (statement,) = ast.parse(f"{name} = {value}").body
        (target,) = statement.targets
        assert target.id == name
        assert comment
        names.append(name)
    assert len(names) == len(set(names))
    for line in lines:
        if line.startswith(" "):
            assert re.fullmatch(r" {53}# \S.*", line)


def test_nothing_else_of_train_looks_like_a_knob():
    """Further constants are tables and a tolerance, which no experiment turns."""
    begin, end = knob_block()
    others = set()
    for node in TREES["train.py"].body:
        if isinstance(node, ast.Assign) and not begin <= node.lineno <= end:
            others |= {target.id for target in node.targets}
    tables = {"POLAR_EXPRESS", "PEAK_TFLOPS", "BACKENDS", "LADDER"}
    assert others == tables | {"ATTENTION_TOLERANCE", "MEMORY_SHARE"}


# Numbers in train.py outside its knobs besides 0, 1 and 2: mathematics, published coefficients,
# guards, capabilities, exit codes and formats. None: all that there are.
ALLOWED = {
    "module": None,  # Polar Express's coefficients, peaks of cards, the probe's tolerance
    "GPT.flops_per_token": {6, 12},  # per weight, per channel and position in the window
    "initialise": {3},  # the variance of a uniform distribution
    "parameter_groups": {768},  # the width at which learning rates are as given
    "orthogonalise": {1.02, 1e-6},
    "muon_update": {0.5},
    "mfu_percent": {100, 1e12},
    "reference_attention": {0.5},
    "load_fa3": {8, 9},  # digits of a snapshot's name, a capability
    "load_varlen": {8},
    "by_blocks": {3},  # a dimension, as in the next three
    "by_blocks.with_blocks_before": {3},
    "load_blocks.attend": {0.5, 3},
    "load_sdpa.attend": {3, 64},
    "probe_attention": {4},
    "choose_attention": {160},
    "choose_dtype": {8},
    "first_rows": {14, 22},  # activations per layer and channel
    "warm_up": {5, 64},  # an exit code, and how many shapes are compiled
    "why_not_compiled": {160},
    "run": {1e6},
    "main": {5},
}


def numbers_outside_knobs(source):
    """{(where, number)} of those that stand for themselves, with the function that holds them."""
    begin, end = knob_block()
    found = set()

    def visit(node, where):
        if isinstance(node, DEFINITIONS):
            where = [*where, node.name]
        number = isinstance(node, ast.Constant) and type(node.value) in (int, float)
        if number and not begin <= node.lineno <= end and node.value not in (0, 1, 2):
            found.add((".".join(where) or "module", node.value))
        for child in ast.iter_child_nodes(node):
            visit(child, where)

    visit(ast.parse(source), [])
    return found


def is_allowed(where, number):
    return where in ALLOWED and (ALLOWED[where] is None or number in ALLOWED[where])


def test_no_tunable_number_outside_the_knobs():
    found = numbers_outside_knobs(SOURCES["train.py"])
    assert not {entry for entry in found if not is_allowed(*entry)}
    for where, numbers in ALLOWED.items():  # none is allowed that is not there
        there = {number for place, number in found if place == where}
        assert there
        assert numbers is None or numbers == there


def test_a_number_in_a_function_is_found():
    """The check itself can fail."""
    source = SOURCES["train.py"].replace("F.relu(", "1.7 * F.relu(")
    added = numbers_outside_knobs(source) - numbers_outside_knobs(SOURCES["train.py"])
    assert added == {("MLP.forward", 1.7)}
    assert not is_allowed("MLP.forward", 1.7)


# ---- The project ----
IMPORT = """
import socket, subprocess, torch  # torch itself starts a process

def forbidden(*a, **k):
    raise AssertionError(a)

socket.socket.connect = subprocess.Popen.__init__ = forbidden
import train
"""


def test_importing_does_nothing(tmp_path):
    """Of train.py, and so of prepare.py: no file, no line, no process, no connection."""
    environment = {
        "HOME": str(tmp_path),
        "PYTHONPATH": str(ROOT),
        "PATH": "",
        "AUTORESEARCH_PROFILE": "small",
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [sys.executable, "-B", "-c", IMPORT]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == done.stderr == ""
    assert not list(tmp_path.iterdir())


def test_dependencies_are_pinned():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    names = project["project"]["dependencies"] + project["dependency-groups"]["dev"]
    assert all("==" in name for name in names)
    assert project["tool"]["uv"] == {"package": False, "exclude-newer": "2026-11-20"}


def test_no_lock_file_is_tracked():
    command = ["git", "ls-files", "uv.lock"]
    tracked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert not tracked.stdout
    assert "uv.lock" in (ROOT / ".gitignore").read_text().splitlines()
