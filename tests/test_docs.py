"""README.md and program.md name things that exist, and the commands that an agent copies work."""

import os
import re
import shutil
import subprocess

from benchmarks import protocol
from tests.common import ROOT, run_script

import pytest

PROGRAM = (ROOT / "program.md").read_text()
TOOLS = [f"tools/{name}" for name in ("experiment.py", "night.sh", "rerun.py", "audit.py")]


# ---- Names ----
@pytest.mark.parametrize(
    "name",
    """
    README.md docs/manual.md program.md cluster/README.md benchmarks/README.md nights/README.md
    """.split(),
)
def test_quoted_variables_knobs_and_files_exist(name):
    text = (ROOT / name).read_text()
    scripts = ("prepare.py", "train.py", "analysis.ipynb", *TOOLS)
    code = "".join((ROOT / script).read_text() for script in scripts)
    for variable in re.findall(r"AUTORESEARCH_\w+", text):
        assert variable in code, variable
    for word in re.findall(r"`([A-Z][A-Z_]{3,})`", text):
        assert word in os.environ or word in code or word.startswith(("CUDA", "HF_", "OMP")), word
    paths = re.findall(r"(?:uv run |\]\()([\w/.]+\.(?:py|md|sh|ipynb))", text)
    for path in paths + re.findall(r"`([\w/]+\.py)`", text):
        assert (ROOT / path).exists() or (ROOT / name).parent.joinpath(path).exists(), path


# ---- A clone by Windows' git, used in WSL ----
def test_a_clone_that_turns_lines_into_crlf_is_the_same(tmp_path):
    repo, clone = tmp_path / "repo", tmp_path / "clone"
    names = [".ci/run", "train.py", "program.md", "nights/2026-11-26/progress.png"]
    for name in [*names, ".gitattributes"]:
        (repo / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, repo / name)

    def git(*words):
        return subprocess.check_output(["git", *words], text=True, cwd=tmp_path)

    git("init", "-q", repo)
    git("-C", repo, "add", ".")
    git("-C", repo, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "all")
    git("clone", "-q", "-c", "core.autocrlf=true", repo, clone)
    assert git("-C", clone, "-c", "core.autocrlf=false", "status", "--short") == ""
    for name in names:
        assert (clone / name).read_bytes() == (ROOT / name).read_bytes(), name


# ---- program.md ----
def test_its_commands_exist():
    usage = run_script("tools/experiment.py", "--help").stdout
    commands = re.findall(r"tools/experiment\.py\s(\w+)", PROGRAM)
    assert set(commands) == {"begin", "run", "again", "keep", "discard"}
    assert "a `crash`" in PROGRAM
    for command in (*commands, "crash"):
        assert command in re.search(r"\{(.*)\}", usage)[1].split(",")


def test_the_rule_is_the_one_that_is_simulated():
    rule = protocol.Rule()
    assert (rule.discards, rule.speed, rule.ideas, rule.together) == (10, 0.1, 15, 6)
    for words in (
        "after ten discards in a row",
        "that was 10 % slower",
        "After every fifteen ideas",
        "the six discards that came closest",
    ):
        assert words in " ".join(PROGRAM.split())
