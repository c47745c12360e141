"""README.md and program.md say what exists, and the commands that an agent copies do what they are
there for."""

import json
import os
import re
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import prepare
import train
from tests.common import ROOT

import pytest

PROGRAM = (ROOT / "program.md").read_text()
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```bash\n(.*?)```", PROGRAM, re.S)


def block(words):
    [found] = [text for text in BLOCKS if words in text]
    return found


def section(title):
    return README.split(f"## {title}\n")[1].split("\n## ")[0]


# ---- Names ----
def test_every_key_is_documented_and_every_quoted_one_exists():
    rows = re.findall(r"^\| (`.*?) \|", section("What a run prints"), re.M)
    assert rows
    assert set(re.findall(r"`(\w+)`", " ".join(rows))) <= set(prepare.KEYS)
    tables = " ".join(re.findall(r"^\|.*\|$", README, re.M))
    assert set(prepare.KEYS) <= set(re.findall(r"`(\w+)`", tables))
    # Beside keys: the block itself, train.py, stop.
    printed = [*prepare.KEYS, "start", "exit", "FAIL", "error"]
    for word in re.search(r"grep -E '\^\((.*?)\)'", PROGRAM)[1].split("|"):
        assert any(re.match(word, f"{name}: x") for name in printed), word


@pytest.mark.parametrize(
    "name", ["README.md", "program.md", "cluster/README.md", "benchmarks/README.md"]
)
def test_quoted_variables_knobs_and_files_exist(name):
    text = (ROOT / name).read_text()
    scripts = ("prepare.py", "train.py", "analysis.ipynb")
    code = "".join((ROOT / script).read_text() for script in scripts)
    for variable in re.findall(r"AUTORESEARCH_\w+", text):
        assert variable in code, variable
    for word in re.findall(r"`([A-Z][A-Z_]{3,})`", text):
        assert word in os.environ or word in code or word.startswith(("CUDA", "OMP")), word
    paths = re.findall(r"(?:uv run |\]\()([\w/.]+\.(?:py|md|sh|ipynb))", text)
    for path in paths + re.findall(r"`([\w/]+\.py)`", text):
        assert (ROOT / path).exists() or (ROOT / name).parent.joinpath(path).exists(), path


def test_exit_codes_agree():
    codes = ["0", "1", "2", "3", "4", "5", "130", "143"]
    sentence = README.split("Exit codes: ")[1].split("\n\n")[0]
    assert re.findall(r"\b\d+\b", sentence) == codes
    assert re.findall(r"\b\d+\b", prepare.__doc__.split("Exit codes")[1]) == codes
    handled = PROGRAM.split("By `exit`:\n")[1].split("\n## ")[0]
    named = " ".join(re.findall(r"(?:^\* |\. )(\d[\d, ]*)", handled, re.M))
    assert set(re.findall(r"\d+", named)) == {*codes, "124", "137"}  # the last two are timeout's


def test_knobs_named_in_the_texts_are_knobs():
    named = re.findall(r"`([A-Z_]{5,})`", section("Small machines"))
    assert len(named) > 4
    for name in named:
        assert hasattr(train, name) or name.startswith("AUTORESEARCH"), name


def test_markers_named_in_the_texts_exist(pytestconfig):
    registered = {marker.split(":")[0] for marker in pytestconfig.getini("markers")}
    texts = README + (ROOT / "benchmarks" / "README.md").read_text()
    named = set(re.findall(r"pytest -m (\w+)", texts))
    assert {"faults", "redteam"} <= named <= registered


# ---- The shell blocks of program.md ----
@pytest.mark.parametrize("index", range(len(BLOCKS)))
def test_blocks_are_valid_shell(index):
    done = subprocess.run(["bash", "-n"], input=BLOCKS[index], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# A train.py that takes no time: a record, and a log with what the blocks look for.
FAKE = """
import json, os, prepare
seed = os.environ['SEED']
commit = prepare.current_commit()
record = {'commit': commit, 'home': os.environ['HOME']}
prepare.RUNS.mkdir(parents=True, exist_ok=True)
path = prepare.RUNS / f'20260101T000000_{commit}_{seed}_1.json'
path.write_text(json.dumps(record))
print('attention: not fa3: no')
print('---')
print(f'val_bpb: 0.9{seed}000')
print('integrity: ok')
print(f'commit: {commit}')
print(f'seed: {seed}')
"""


@dataclass
class Night:
    """A repository with spaces in its path, its interpreter in .venv, and the fake train.py."""

    repo: Path
    environment: dict

    @property
    def records(self):
        return Path(self.environment["AUTORESEARCH_CACHE"]) / "runs"

    def shell(self, text):
        """What a shell block prints."""
        done = subprocess.run(
            ["bash", "-c", text],
            cwd=self.repo,
            env=os.environ | self.environment,
            capture_output=True,
            text=True,
        )
        assert not done.stderr, done.stderr
        return done.stdout

    def tip(self):
        return self.shell("git rev-parse --short HEAD").strip()

    def finished_log(self, seed):
        """The log of a run in the background, once it is complete."""
        log = self.repo / f"run-{seed}.log"
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            text = log.read_text() if log.exists() else ""
            if re.search(r"^exit \d+$", text, re.M):
                return text
            time.sleep(0.05)
        raise AssertionError(f"{log} has no exit code")


@pytest.fixture
def night(tmp_path):
    repo = tmp_path / "a night"
    tools = tmp_path / "tools"
    (repo / ".venv" / "bin").mkdir(parents=True)
    tools.mkdir()
    for path, first in ((repo / ".venv/bin/python", ""), (tools / "uv", "shift\n")):
        path.write_text(f'#!/bin/sh\n{first}exec "{sys.executable}" "$@"\n')
        path.chmod(0o755)
    for name in ("prepare.py", ".gitignore"):
        (repo / name).write_bytes((ROOT / name).read_bytes())
    (repo / "train.py").write_text(FAKE)
    environment = {
        "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "AUTORESEARCH_CACHE": str(tmp_path / "the cache"),
        "PYTHONPATH": "",
        "TMPDIR": str(tmp_path),
    }
    night = Night(repo, environment)
    night.shell("git init -q; git config user.name a; git config user.email a@b")
    night.shell("git add train.py prepare.py .gitignore; git commit -qm baseline")
    night.shell(block("test -f results.tsv"))
    return night


def test_a_run_and_its_confirmation(night):
    tip = night.tip()
    night.shell(block("export SEED=42"))
    begun = time.monotonic()
    assert "exit 0" in night.shell(block("until tail"))
    assert time.monotonic() - begun < 60  # polling ends with the run
    log = night.finished_log(42)
    assert log.startswith(f"start {tip}\n") and log.endswith("\nexit 0\n")
    found = night.shell(block("grep -E '^(start"))
    assert "val_bpb: 0.942000" in found
    assert found.count("fa3") == 1  # in the tail, which is for a crash, alone
    night.shell(block("git archive"))
    log = night.finished_log(43)
    assert log.endswith("\nexit 0\n") and "val_bpb: 0.943000" in log
    records = sorted(night.records.glob("*.json"))
    assert [path.name[16:-7] for path in records] == [f"{tip}_42", f"{tip}_43"]
    first, second = (json.loads(path.read_text())["home"] for path in records)
    assert first != second and not os.path.exists(second)  # its own, and nothing of it is left
    assert night.shell("git status --short") == ""
    assert night.shell("git worktree list").count("\n") == 1


def test_rows_noise_and_reset(night):
    scores = (0.9100, 0.9140, 0.9108, 0.9132)
    row = block("short window 128 to 64")
    description = "'short window 128 to 64 [0.908000 0.911000]'"
    assert description in row and "0.909500" in row
    first = night.tip()
    for seed, score in zip((42, 43, 42, 43), scores, strict=True):
        own = row.replace("0.909500", f"{score:.6f}")
        night.shell(own.replace(description, f"'baseline seed {seed}'"))
    mean = f"{statistics.mean(scores):.6f}"
    sigma = f"{statistics.stdev(scores):.6f}"
    assert night.shell(block("{n++;")).split() == ["mean", mean, "sigma", sigma]
    reset = block("merge-base --is-ancestor")
    night.shell(reset)  # nothing to go back from: the incumbent stays
    assert night.tip() == first
    for number in (1, 2):  # an experiment, and its mend as a second commit
        night.shell(f"echo '# {number}' >> train.py; git add train.py; git commit -qm {number}")
    tried = night.tip()
    night.shell(row.replace(" keep ", " discard ").replace("0.909500", "''"))
    night.shell(reset)
    assert night.tip() == first and "# 1" not in (night.repo / "train.py").read_text()
    assert night.shell(f"git rev-parse --short refs/discarded/{tried}").strip() == tried
    lines = (night.repo / "results.tsv").read_text().splitlines()
    assert len(lines) == 6 and all(line.count("\t") == 4 for line in lines)
    assert lines[-1].split("\t")[1] == ""


def test_resume_prints_little_and_finds_the_records(night):
    night.shell(block("export SEED=42"))
    night.finished_log(42)
    (night.repo / "run-43.log").write_text("x" * 10**5)
    out = night.shell(block("grep -HE"))
    assert len(out) < 4000 and "exit 0" in out
