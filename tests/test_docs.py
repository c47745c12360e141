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
PAGES = "README docs/manual program cluster/README benchmarks/README nights/README"


@pytest.mark.parametrize("page", PAGES.split())
def test_quoted_variables_knobs_and_files_exist(page):
    page = ROOT / f"{page}.md"
    text = page.read_text()
    scripts = ("prepare.py", "train.py", "analysis.ipynb", *TOOLS)
    code = "".join((ROOT / script).read_text() for script in scripts)
    for variable in re.findall(r"AUTORESEARCH_\w+", text):
        assert variable in code, variable
    for word in re.findall(r"`([A-Z][A-Z_]{3,})`", text):
        assert (
            word in os.environ or word in code or word.startswith(("CUDA", "HF_", "OMP", "ANTH"))
        ), word
    paths = re.findall(r"(?:uv run |\]\()([\w/.]+\.(?:py|md|sh|ipynb))", text)
    for path in paths + re.findall(r"`([\w/]+\.py)`", text):
        assert (ROOT / path).exists() or page.parent.joinpath(path).exists(), path


def test_a_clone_by_windows_git_works_in_wsl(tmp_path):
    """It turns no line end into CRLF, with which no shell script would start."""
    shutil.copy(ROOT / ".gitattributes", tmp_path)
    shutil.copy(ROOT / "tools/night.sh", tmp_path)
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-c", "core.autocrlf=true"]
    for command in ("init -q", "add .", "commit -qm all", "rm -q night.sh", "reset -q --hard"):
        subprocess.run([*git, *command.split()], cwd=tmp_path, check=True)
    assert b"\r" not in (tmp_path / "night.sh").read_bytes()


def test_the_commands_of_program_md_exist():
    usage = run_script("tools/experiment.py", "--help").stdout
    commands = re.findall(r"tools/experiment\.py\s(\w+)", PROGRAM)
    assert set(commands) == {"begin", "run", "again", "keep", "discard"}
    assert "a `crash`" in PROGRAM
    for command in (*commands, "crash"):
        assert command in re.search(r"\{(.*)\}", usage)[1].split(",")


def test_the_rule_of_program_md_is_the_one_that_is_simulated():
    rule = protocol.Rule()
    assert (rule.discards, rule.speed, rule.ideas, rule.together) == (10, 0.1, 15, 6)
    told = "after ten discards in a row", "that was 10 % slower", "After every fifteen ideas"
    for words in (*told, "the six discards that came closest"):
        assert words in " ".join(PROGRAM.split())
