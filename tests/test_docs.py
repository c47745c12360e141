"""What program.md and README.md say exists, and the commands that an agent copies do what they are there for."""

import os
import re
import statistics
import subprocess
import sys
import time

import prepare
import train
from tests.common import ROOT

import pytest

PROGRAM, README = ((ROOT / name).read_text() for name in ("program.md", "README.md"))
BLOCKS = re.findall(r"```bash\n(.*?)```", PROGRAM, re.S)


def block(words):
    [found] = [text for text in BLOCKS if words in text]
    return found


# ---- Names -----------------------------------------------------------------------------------------------------------
def test_every_key_is_documented_and_every_quoted_one_exists():
    rows = re.findall(r"^\| (`.*?) \|", README.split("## What a run prints")[1].split("## ")[0], re.M)
    assert set(prepare.KEYS) <= set(re.findall(r"`(\w+)`", " ".join(re.findall(r"^\|.*\|$", README, re.M))))
    assert rows
    pattern = re.search(r"grep -E '\^\((.*?)\)'", PROGRAM)[1].split("|")
    printed = [*prepare.KEYS, "start", "exit", "FAIL", "error"]  # the last four: the block itself, train.py, stop
    assert all(any(re.match(word, f"{name}: x") for name in printed) for word in pattern)


@pytest.mark.parametrize("name", ["README.md", "program.md", "cluster/README.md", "benchmarks/README.md"])
def test_quoted_variables_knobs_and_files_exist(name):
    text = (ROOT / name).read_text()
    code = "".join((ROOT / script).read_text() for script in ("prepare.py", "train.py", "analysis.ipynb"))
    variables = set(re.findall(r"AUTORESEARCH_\w+", text))
    assert all(variable in code for variable in variables), variables
    for word in re.findall(r"`([A-Z][A-Z_]{3,})`", text):
        assert word in os.environ or word in code or word.startswith(("CUDA", "OMP")), word
    for path in re.findall(r"(?:uv run |\]\()([\w/.]+\.(?:py|md|sh|ipynb))", text):
        assert (ROOT / path).exists() or (ROOT / name).parent.joinpath(path).exists(), path


def test_exit_codes_agree():
    codes = re.search(r"Exit codes: (.*?)\n\n", README, re.S)[1]
    assert [int(code) for code in re.findall(r"\b\d+\b", codes)] == [0, 1, 2, 3, 4, 5, 130, 142, 143]


def test_knobs_named_in_the_texts_are_knobs():
    for name in re.findall(r"`([A-Z_]{5,})`", README.split("## Small machines")[1].split("## ")[0]):
        assert hasattr(train, name) or name.startswith("AUTORESEARCH"), name


# ---- The shell blocks of program.md ----------------------------------------------------------------------------------
@pytest.mark.parametrize("index", range(len(BLOCKS)))
def test_blocks_are_valid_shell(index):
    done = subprocess.run(["bash", "-n"], input=BLOCKS[index], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


FAKE = """
import json, os, pathlib, prepare
seed, home = os.environ['SEED'], os.environ['HOME']
commit = prepare.commit()
prepare.RUNS.mkdir(parents=True, exist_ok=True)
(prepare.RUNS / f'20260101T000000_{commit}_{seed}_1.json').write_text(json.dumps({'commit': commit, 'home': home}))
print(f'attention: not fa3: no\\n---\\nval_bpb: 0.9{seed}000\\nintegrity: ok\\ncommit: {commit}\\nseed: {seed}')
"""


@pytest.fixture
def night(tmp_path):
    """A repository with spaces in its path, its interpreter in .venv, and a train.py that takes no time; runs blocks."""
    repo, tools = tmp_path / "a night", tmp_path / "tools"
    (repo / ".venv" / "bin").mkdir(parents=True)
    tools.mkdir()
    for name, before in (("a night/.venv/bin/python", ""), ("tools/uv", "shift\n")):
        (tmp_path / name).write_text(f'#!/bin/sh\n{before}exec "{sys.executable}" "$@"\n')
        (tmp_path / name).chmod(0o755)
    (repo / "prepare.py").write_bytes((ROOT / "prepare.py").read_bytes())
    (repo / "train.py").write_text(FAKE)
    (repo / ".gitignore").write_bytes((ROOT / ".gitignore").read_bytes())
    path = {"PATH": f"{tools}{os.pathsep}{os.environ['PATH']}", "HOME": str(tmp_path)}
    own = {"AUTORESEARCH_CACHE": str(tmp_path / "the cache"), "PYTHONPATH": "", "TMPDIR": str(tmp_path)}

    def shell(text):
        done = subprocess.run(
            ["bash", "-c", text], cwd=repo, env=os.environ | path | own, capture_output=True, text=True
        )
        assert not done.stderr, done.stderr
        return done.stdout

    shell("git init -q; git config user.name a; git config user.email a@b; git add train.py prepare.py .gitignore")
    shell("git commit -qm baseline")
    shell(block("test -f results.tsv"))
    shell.repo, shell.records = repo, tmp_path / "the cache" / "runs"
    return shell


def wait(log):
    deadline = time.monotonic() + 30
    while not re.search(r"^exit \d+$", log.read_text() if log.exists() else "", re.M) and time.monotonic() < deadline:
        time.sleep(0.05)
    return log.read_text()


def test_a_run_and_its_confirmation(night):
    tip = night("git rev-parse --short HEAD").strip()
    night(block("export SEED=42"))
    begun = time.monotonic()
    assert "exit 0" in night(block("until tail")) and time.monotonic() - begun < 60  # polling ends with the run
    log = (night.repo / "run-42.log").read_text()
    assert log.startswith(f"start {tip}\n") and log.endswith("\nexit 0\n")
    found = night(block("grep -E '^(start"))
    assert "val_bpb: 0.942000" in found and found.count("fa3") == 1  # in the tail, which is for a crash, alone
    night(block("git archive"))
    assert (
        wait(night.repo / "run-43.log").endswith("\nexit 0\n")
        and "val_bpb: 0.943000" in (night.repo / "run-43.log").read_text()
    )
    records = sorted(night.records.glob("*.json"))
    assert [path.name[16:-7] for path in records] == [f"{tip}_42", f"{tip}_43"]
    first, second = (prepare.json.loads(path.read_text())["home"] for path in records)
    assert first != second and not os.path.exists(second)  # a home of its own, and nothing of it is left
    assert night("git status --short") == "" and night("git worktree list").count("\n") == 1


def test_rows_noise_and_reset(night):
    scores = (0.9100, 0.9140, 0.9108, 0.9132)
    row = block("short window 128 to 64")
    first = night("git rev-parse --short HEAD").strip()
    for seed, score in zip((42, 43, 42, 43), scores):
        night(
            re.sub(r"0\.909500", f"{score:.6f}", row).replace(
                "'short window 128 to 64 [0.908000 0.911000]'", f"'baseline seed {seed}'"
            )
        )
    assert night(block("{n++;")).split() == [
        "mean",
        f"{statistics.mean(scores):.6f}",
        "sigma",
        f"{statistics.stdev(scores):.6f}",
    ]
    reset = block("merge-base --is-ancestor")
    night(reset)  # nothing to go back from: the incumbent stays
    assert night("git rev-parse --short HEAD").strip() == first
    for number in (1, 2):  # an experiment, and its mend as a second commit
        night(f"echo '# {number}' >> train.py; git add train.py; git commit -qm 'try {number}'")
    tried = night("git rev-parse --short HEAD").strip()
    night(row.replace(" keep ", " discard ").replace("0.909500", "''"))
    night(reset)
    assert night("git rev-parse --short HEAD").strip() == first and "# 1" not in (night.repo / "train.py").read_text()
    assert night(f"git rev-parse --short refs/discarded/{tried}").strip() == tried
    lines = (night.repo / "results.tsv").read_text().splitlines()
    assert len(lines) == 6 and all(line.count("\t") == 4 for line in lines) and lines[-1].split("\t")[1] == ""


def test_resume_prints_little_and_finds_the_records(night):
    night(block("export SEED=42"))
    wait(night.repo / "run-42.log")
    (night.repo / "run-43.log").write_text("x" * 10**5)
    out = night(block("grep -HE"))
    assert len(out) < 4000 and "exit 0" in out
