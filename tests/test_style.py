"""What the files promise about themselves: size, knobs in one place, imports without effect."""

import ast
import subprocess
import sys
import tomllib

from tests.common import ROOT

import pytest

CAPS = {"prepare.py": 600, "train.py": 700, "program.md": 180, "README.md": 220}
PYTHON = ("prepare.py", "train.py")

# Numbers in train.py outside its knobs: mathematics, published coefficients, guards, units, print formats.
ALLOWED = {
    "flops_per_token": {6, 12},  # FLOPs a parameter and an attended channel
    "module": None,  # the table of GPU peaks, the probe's tolerance, Polar Express's coefficients
    "peak_flops": {1e12}, "peak_memory_mb": {10, 20}, "choose_device": {8, 4}, "load_fa3": {9}, "load_varlen": {8},
    "reference_attention": {0.5}, "attend": {0.5}, "load_blocks": {8}, "attention": {3, 64}, "choose_attention": {160},
    "initialise": {3}, "parameter_groups": {768}, "orthogonalise": {1.02, 1e-6}, "muon_update": {0.5},
    "warm_up": {5, 160}, "train": {100, 4, 0.1, 5, 13, 1000}, "run": {1e6, 100}, "main": {128, 5},
}  # fmt: skip


@pytest.mark.parametrize("name", CAPS)
def test_line_caps(name):
    path = ROOT / name
    assert not path.exists() or len(path.read_text().splitlines()) <= CAPS[name]


@pytest.mark.parametrize("name", PYTHON)
def test_functions_stay_short(name):
    functions = [n for n in ast.walk(ast.parse((ROOT / name).read_text())) if isinstance(n, ast.FunctionDef)]
    long = {f.name: f.end_lineno - f.lineno + 1 for f in functions if f.end_lineno - f.lineno >= 60}
    assert not long


@pytest.mark.parametrize("name", PYTHON)
def test_public_functions_of_the_ruler_say_what_they_do(name):
    tree = ast.parse((ROOT / name).read_text())
    assert ast.get_docstring(tree)
    if name == "prepare.py":
        for node in tree.body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name not in (
                "main",
                "sha256",
                "save_manifest",
            ):
                assert ast.get_docstring(node), node.name


def knob_block():
    lines = (ROOT / "train.py").read_text().splitlines()
    begin = next(i for i, line in enumerate(lines) if line.startswith("# ---- Knobs"))
    return begin + 1, next(i for i, line in enumerate(lines) if line.startswith("# ---- Derived"))


def literals_outside_knobs(source):
    begin, end = knob_block()
    found = set()

    def visit(node, name):
        name = node.name if isinstance(node, ast.FunctionDef) else name
        number = isinstance(node, ast.Constant) and type(node.value) in (int, float)
        if number and not begin <= node.lineno <= end and node.value not in (0, 1, 2):
            found.add((name, node.value))
        for child in ast.iter_child_nodes(node):
            visit(child, name)

    visit(ast.parse(source), "module")
    return {(name, value) for name, value in found if name not in ALLOWED or value not in (ALLOWED[name] or {value})}


def test_no_tunable_number_outside_the_knobs():
    source = (ROOT / "train.py").read_text()
    assert not literals_outside_knobs(source)
    assert literals_outside_knobs(source.replace("F.relu(", "1.7 * F.relu("))  # the check itself can fail


def test_knobs_are_one_to_a_line_with_their_reason():
    begin, end = knob_block()
    lines = (ROOT / "train.py").read_text().splitlines()[begin:end]
    knobs = [line for line in lines if "=" in line and not line.startswith("#")]
    assert len(knobs) > 35 and all(line.split("=")[0].strip().isupper() for line in knobs)


@pytest.mark.parametrize("name", ["prepare", "train"])
def test_importing_does_nothing(name, tmp_path):
    program = (
        "import socket, subprocess, torch\n"
        "def forbidden(*a, **k): raise AssertionError(a)\n"
        "socket.socket.connect = subprocess.Popen.__init__ = forbidden\n"
        f"import {name}\n"
        "assert not torch.cuda.is_initialized()"
    )
    environment = {"HOME": str(tmp_path), "PYTHONPATH": str(ROOT), "PATH": "", "AUTORESEARCH_PROFILE": "small"}
    command = [sys.executable, "-B", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.returncode == 0 and not done.stdout and not done.stderr, done.stderr
    assert not list(tmp_path.iterdir())


def test_dependencies_are_pinned():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert all("==" in name for name in project["project"]["dependencies"] + project["dependency-groups"]["dev"])
    assert project["tool"]["uv"] == {"package": False, "exclude-newer": "2026-11-20"}


def test_no_lock_file_is_tracked():
    tracked = subprocess.run(["git", "ls-files", "uv.lock"], cwd=ROOT, capture_output=True, text=True)
    assert not tracked.stdout and "uv.lock" in (ROOT / ".gitignore").read_text()
