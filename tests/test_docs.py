"""README.md and program.md say what exists, and the commands that an agent copies do what they are
there for."""

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import prepare
import train
from benchmarks import protocol
from tests.common import ROOT

import pytest

PROGRAM = (ROOT / "program.md").read_text()
README = (ROOT / "README.md").read_text()
REFERENCE = (ROOT / "docs" / "reference.md").read_text()
BLOCKS = re.findall(r"```bash\n(.*?)```", PROGRAM, re.S)


def block(words):
    """The one that begins with the words or, if none does, holds them."""
    beginning = [text for text in BLOCKS if text.startswith(words)]
    [found] = beginning or [text for text in BLOCKS if words in text]
    return found


def section(title, text=README):
    return text.split(f"## {title}\n")[1].split("\n## ")[0]


# ---- Names ----
def test_every_key_that_the_protocol_reads_is_printed():
    keys = re.findall(r"`(\w+)`", section("The keys of a run", REFERENCE))
    # Beside keys: start, train.py, audit.py, the shell, stop.
    printed = [*keys, "run", "note", "out of memory", "continuing", "warning"]
    printed += ["claim", "exit", "FAIL", "error"]
    for word in re.search(r"grep -E '\^\((.*?)\)'", PROGRAM)[1].split("|"):
        assert any(re.match(word, f"{name}: x") for name in printed), word


@pytest.mark.parametrize(
    "name",
    ["README.md", "docs/reference.md", "program.md", "cluster/README.md", "benchmarks/README.md"],
)
def test_quoted_variables_knobs_and_files_exist(name):
    text = (ROOT / name).read_text()
    scripts = ("prepare.py", "train.py", "analysis.ipynb", "tools/rerun.py")
    code = "".join((ROOT / script).read_text() for script in scripts)
    for variable in re.findall(r"AUTORESEARCH_\w+", text):
        assert variable in code, variable
    for word in re.findall(r"`([A-Z][A-Z_]{3,})`", text):
        assert word in os.environ or word in code or word.startswith(("CUDA", "HF_", "OMP")), word
    paths = re.findall(r"(?:uv run |\]\()([\w/.]+\.(?:py|md|sh|ipynb))", text)
    for path in paths + re.findall(r"`([\w/]+\.py)`", text):
        assert (ROOT / path).exists() or (ROOT / name).parent.joinpath(path).exists(), path


def test_exit_codes_agree():
    codes = ["0", "1", "2", "3", "4", "5"]
    sentence = REFERENCE.split("Exit codes: ")[1].split("\n\n")[0]
    assert re.findall(r"\b\d+\b", sentence) == [*codes, "130", "143"]
    assert re.findall(r"\b\d+\b", prepare.__doc__.split("Exit codes")[1]) == codes
    handled = PROGRAM.split("By `exit`:\n")[1].split("\n## ")[0]
    assert {*codes, "124", "130", "143"} <= set(re.findall(r"\b\d+\b", handled))


def test_knobs_named_in_the_texts_are_knobs():
    named = re.findall(r"`([A-Z_]{5,})`", section("Small machines"))
    assert len(named) > 4
    for name in named:
        assert hasattr(train, name) or name.startswith("AUTORESEARCH"), name


def test_markers_named_in_the_texts_exist(pytestconfig):
    registered = {marker.split(":")[0] for marker in pytestconfig.getini("markers")}
    texts = REFERENCE + (ROOT / "benchmarks" / "README.md").read_text()
    named = set(re.findall(r"pytest -m (\w+)", texts))
    assert {"faults", "redteam"} <= named <= registered


# ---- The shell blocks of program.md ----
@pytest.mark.parametrize("index", range(len(BLOCKS)))
def test_blocks_are_valid_shell(index):
    done = subprocess.run(["bash", "-n"], input=BLOCKS[index], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# A train.py that takes no time: a record, and a log with what the blocks look for.
FAKE = """
import json, os, subprocess
from pathlib import Path
seed = os.environ.get('SEED', '42')
git = ['git', 'rev-parse', '--short', 'HEAD']
commit = os.environ.get('AUTORESEARCH_COMMIT') or subprocess.check_output(git, text=True).strip()
record = {'commit': commit, 'home': os.environ['HOME']}
runs = Path(os.environ['AUTORESEARCH_CACHE'], 'runs')
runs.mkdir(parents=True, exist_ok=True)
path = runs / f'20260101T000000_{commit}_{seed}_1.json'
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

    def finished_log(self):
        """The log of a run, once it is complete."""
        log = self.repo / "run.log"
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
    (repo / "tools").mkdir()
    for name in ("prepare.py", "tools/rerun.py", ".gitignore"):
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
    night.shell("git add train.py prepare.py tools .gitignore; git commit -qm baseline")
    night.shell(block("test -f results.tsv"))
    return night


def test_a_run_at_the_prompt(night):
    night.shell(block("timeout -k 30 1800 uv run train.py"))
    assert night.finished_log().endswith("\nexit 0\n")
    found = night.shell(block("grep -E '^(run|note"))
    assert "val_bpb: 0.942000" in found and "exit 0" in found
    assert found.count("fa3") == 2  # once in the tail, which is for a crash


def test_a_run_that_outlives_the_shell(night):
    begun = time.monotonic()
    night.shell(block(": > run.log; setsid"))
    assert night.shell(block("timeout 100 sh -c")) == "exit 0\n"
    assert time.monotonic() - begun < 60  # polling ends with the run
    assert "val_bpb: 0.942000" in night.finished_log()
    [record] = night.records.glob("*.json")
    assert record.name[16:-7] == f"{night.tip()}_42"
    assert night.shell("git status --short") == ""


def test_a_rerun_is_in_a_clean_copy(night, cache):
    night.environment |= {"AUTORESEARCH_CACHE": str(prepare.CACHE)}
    night.environment |= {"AUTORESEARCH_RUNS": str(night.repo.parent / "runs")}
    night.shell(block("tools/rerun.py HEAD"))
    log = (night.repo / "run.log").read_text()
    assert log.endswith("\nexit 0\n") and "val_bpb: 0.9100000" in log
    [record] = (night.repo.parent / "runs").glob("*.json")
    assert record.name[16:-7] == f"{night.tip()}_100"
    home = json.loads(record.read_text())["home"]
    assert home != night.environment["HOME"] and not os.path.exists(home)  # nothing of it is left
    assert night.shell("git status --short") == ""


def test_rows_and_reset(night):
    row = block("'short window 64' >> results.tsv")
    assert "0.909600" in row
    first = night.tip()
    for seed, score in ((42, 0.9100), (43, 0.9140)):
        own = row.replace("0.909600", f"{score:.6f}")
        night.shell(own.replace("'short window 64'", f"'baseline seed {seed}'"))
    reset = block("refs/discarded/$(git rev-parse")
    night.shell(reset)  # nothing to go back from: the incumbent stays
    assert night.tip() == first
    for number in (1, 2):  # an experiment, and its mend as a second commit
        night.shell(f"echo '# {number}' >> train.py; git add train.py; git commit -qm {number}")
    tried = night.tip()
    night.shell(row.replace(" keep ", " discard ").replace("0.909600", "''"))
    night.shell(reset)
    assert night.tip() == first and "# 1" not in (night.repo / "train.py").read_text()
    assert night.shell(f"git rev-parse --short refs/discarded/{tried}").strip() == tried
    lines = (night.repo / "results.tsv").read_text().splitlines()
    assert len(lines) == 4 and all(line.count("\t") == 4 for line in lines)
    assert lines[-1].split("\t")[1] == ""


def test_resume_prints_little_and_finds_what_counts(night):
    night.shell(block("timeout -k 30 1800 uv run train.py"))
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", PROGRAM, re.S | re.M)
    lines = [line for kind, text in blocks if not kind for line in text.splitlines()]
    assert any(line.startswith("incumbent: ") for line in lines)
    lines += ["near: none", "near: d4e5f6a rotary", "nonlinear: x", "near: e5f6a7b wider"]
    lines += ["try 1 a1b2c3d seed 42: 0.9105"]
    (night.repo / "steer.md").write_text("more depth\n")
    with open(night.repo / "journal.md", "a") as journal:
        journal.write("\n".join([*lines, "x" * 300]) + "\n")
    out = night.shell(block("pgrep"))
    assert len(out) < 4000 and "exit 0" in out
    found = ("sigma: 0.0020", "a1b2c3d 0.9110 weight 2", "review 1 gave 0.9112", "try 1 a1b2c3d")
    for words in (*found, "more depth"):
        assert words in out, words
    assert "near: d4e5f6a rotary\nnear: e5f6a7b wider\n" in out
    assert "rotary base" not in out  # it was tried
    assert "pgrep" not in out  # it does not find itself


def test_the_example_is_right():
    """And what the simulation believes of program.md is what it says."""
    rule = protocol.Rule()
    assert (rule.baselines, rule.bar, rule.long_bar) == (2, 0.5, 1.0)
    assert (rule.back, rule.most) == (0.5, 1.0)
    assert (rule.near, rule.together, rule.review, rule.cap) == (0.5, 4, 10, 4)
    assert rule.pair == ("**Another speed.**" in PROGRAM)
    number, score, sigma = 0.9120, 0.9096, 0.0020
    assert f"sigma is {sigma:.4f}, the incumbent's number {number:.4f}" in PROGRAM
    gain = number - score
    assert gain > rule.bar * sigma
    luck = min(rule.back * gain, rule.most * sigma)
    assert f"{score:.4f} + {luck:.4f} = {score + luck:.4f}" in PROGRAM.replace("\n", " ")
    assert f"verdict 7 a1b2c3d: keep, gain {gain:.4f}" in PROGRAM
    assert f"incumbent: a1b2c3d {score + luck:.4f} weight 1" in PROGRAM
    gain = score + luck - 0.9103
    assert -rule.near * sigma < gain < rule.bar * sigma
    assert f"scores 0.9103: gain {gain:.4f}, discard" in PROGRAM
    reviewed = (score + luck + 0.9112) / 2
    assert f"incumbent: a1b2c3d {reviewed:.4f} weight 2" in PROGRAM
