"""README.md and program.md name things that exist, and the commands that an agent copies work."""

import os
import re
import shutil
import subprocess
import sys

import prepare
from benchmarks import protocol
from tests.common import ROOT
from tests.test_report import KEYS

import pytest

PROGRAM = (ROOT / "program.md").read_text()
BLOCKS = re.findall(r"```bash\n(.*?)```", PROGRAM, re.S)
[STATUS] = re.findall(r"`(git status .*?)` must print nothing", PROGRAM)


def block(words):
    """Returns the block with these words."""
    [found] = [text for text in BLOCKS if words in text]
    return found


# ---- Names ----
def test_every_key_that_the_protocol_reads_is_printed():
    keys = [*KEYS, "num_steps", "integrity"]
    # Besides keys: start, train.py, the shell and fail print these.
    printed = [*keys, *"run attention continuing exit FAIL error".split(), "out of memory"]
    for words in re.findall(r"grep -E '\^\((.*?)\)'", PROGRAM):
        for word in words.split("|"):
            assert any(re.match(word, f"{name}: x") for name in printed), word


@pytest.mark.parametrize(
    "name",
    ["README.md", "docs/reference.md", "program.md", "cluster/README.md", "benchmarks/README.md"],
)
def test_quoted_variables_knobs_and_files_exist(name):
    text = (ROOT / name).read_text()
    scripts = ("prepare.py", "train.py", "analysis.ipynb", "tools/rerun.py", "tools/audit.py")
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
    names = [".ci/run", "train.py", "program.md", "night.png", "nights/2026-11-26/night.bundle"]
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


# ---- The README's sandbox ----
# This fake bwrap prints the writable paths, and last the read-only one. Like the real bwrap, it
# refuses symbolic links.
BWRAP = """
import os, sys
words = sys.argv[1:sys.argv.index("--")]
for option, source, place in zip(words, words[1:], words[2:]):
    if option not in ("--bind", "--bind-try", "--ro-bind") or place == "/":
        continue
    if not os.path.exists(source):
        if option == "--bind-try":
            continue
        sys.exit(f"bwrap: Can't find source path {source}: No such file or directory")
    if os.path.realpath(place) != place:
        sys.exit(f"bwrap: Can't mkdir {place}: No such file or directory")
    print("only read" if option == "--ro-bind" else "write", place)
"""
LINKS = ["none", "home", "clone", ".cache", ".cache/autoresearch", ".claude", ".claude.json"]


@pytest.mark.parametrize("link", LINKS)
def test_the_sandbox_opens_the_same_places_where_one_is_a_symbolic_link(link, tmp_path):
    real, home, clone = tmp_path / "real", tmp_path / "home", tmp_path / "clone"
    folders = [home / ".cache/autoresearch", home / ".claude", home / ".codex", clone]
    for folder in folders:
        folder.mkdir(parents=True)
    for file in (home / ".claude.json", clone / "prepare.py"):
        file.touch()
    if link != "none":
        place = home / link if link.startswith(".") else tmp_path / link
        place.rename(real)
        place.symlink_to(real)
    (tmp_path / "bwrap.py").write_text(BWRAP)
    (tmp_path / "bwrap").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$0.py" "$@"\n')
    (tmp_path / "bwrap").chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"

    shell_blocks = re.findall(r"```bash\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    [sandbox] = [text for text in shell_blocks if "confined()" in text]
    [agents] = [text.splitlines() for text in shell_blocks if text.startswith("confined ")]
    for agent, own in zip(agents, ([".claude", ".claude.json"], [".codex"]), strict=True):
        done = subprocess.run(
            ["bash", "-c", f'cd "{clone}"\n{sandbox}\n{agent}'],
            env=os.environ | {"HOME": str(home), "PATH": path},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0 and not done.stderr, done.stderr
        *opened, last = done.stdout.splitlines()
        names = [clone, *(home / name for name in [*own, ".cache/autoresearch", ".cache/uv"])]
        assert sorted(opened) == sorted(f"write {os.path.realpath(name)}" for name in names)
        assert last == f"only read {os.path.realpath(clone)}/prepare.py"  # no later mount opens it


# ---- The shell blocks of program.md ----
# A train.py that takes no time.
FAKE = """
import os, subprocess
commit = os.environ.get("AUTORESEARCH_COMMIT")
if not commit:
    commit = subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], text=True).strip()
print(f"run: small profile, 300 s, seed 42, commit {commit}, cpu")
print("a line of no use")
print("val_bpb: 0.910000")
print("integrity: ok")
"""


# A human's ~/.gitconfig: each line breaks a command that does not override it.
SETTINGS = """
[commit]
    gpgSign = true
[tag]
    gpgSign = true
[gpg]
    program = false
[core]
    hooksPath = {hooks}
    autocrlf = true
[color]
    ui = always
[diff]
    noprefix = true
    context = 0
[status]
    branch = true
"""


@pytest.fixture
def shell(tmp_path, cache):
    """Returns a function that runs a block and returns its output without colors. The repository's
    path has a space, and git has a human's settings. Like uv, the fake `uv run` writes a lock file,
    which git must not list."""
    repo = tmp_path / "a night"
    tools = tmp_path / "bin"
    for folder in (repo / "tools", tools):
        folder.mkdir(parents=True)
    (tools / "uv").write_text(f'#!/bin/sh\ntouch uv.lock\nshift\nexec "{sys.executable}" "$@"\n')
    (tools / "uv").chmod(0o755)
    for name in ("prepare.py", "tools/rerun.py", ".gitignore", ".gitattributes"):
        (repo / name).write_bytes((ROOT / name).read_bytes())
    (repo / "train.py").write_text(FAKE)
    environment = os.environ | {
        "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
        "AUTORESEARCH_CACHE": str(prepare.CACHE),
        "AUTORESEARCH_RUNS": str(tmp_path / "runs"),
        "TMPDIR": str(tmp_path),
        "GIT_EDITOR": "false",
    }

    def run(text):
        done = subprocess.run(
            ["bash", "-c", text], cwd=repo, env=environment, capture_output=True, text=True
        )
        assert not done.stderr, done.stderr
        return re.sub(r"\x1b\[[\d;]*m", "", done.stdout)

    run("git init -q; git config user.name a; git config user.email a@b")
    run("git add .; git commit -qm baseline")
    hooks = tmp_path / "hooks"
    hooks.mkdir()
    for name in ("pre-commit", "post-checkout"):
        (hooks / name).write_text("#!/bin/sh\necho refused >&2\nexit 1\n")
        (hooks / name).chmod(0o755)
    (tmp_path / "gitconfig").write_text(SETTINGS.format(hooks=hooks))
    environment["GIT_CONFIG_GLOBAL"] = str(tmp_path / "gitconfig")
    assert run(STATUS) == ""
    run(block("git switch"))
    run.repo = repo
    return run


def tip(shell):
    return shell("git rev-parse --short HEAD").strip()


def change(shell, words):
    """Commits as program.md says; returns the hash."""
    [command] = re.findall(r"`(git commit -qm .*?)`", PROGRAM)
    shell(f"echo '# {words}' >> train.py")
    shell(command.replace("short window 16", words))
    return tip(shell)


def test_a_run_outlives_the_shell_and_the_wait_ends_with_it(shell):
    start, *wait = block(": > run.log").splitlines()
    shell(start)
    out = shell("\n".join(wait))
    assert out == (
        f"run: small profile, 300 s, seed 42, commit {tip(shell)}, cpu\n"
        "val_bpb: 0.910000\nintegrity: ok\nexit 0\n"
    )
    assert shell("\n".join(wait)) == out  # after a wait that was cut off
    assert shell(STATUS) == ""


def test_the_best_is_trained_again_in_a_clean_copy(shell):
    best = tip(shell)
    change(shell, "an idea")
    command = block(": > run.log")
    [again] = set(re.findall(r"`(uv run tools/rerun.py .*?)`", PROGRAM.replace("\n", " ")))
    assert f"commit {best}, cpu" in shell(command.replace("uv run train.py", again))
    assert tip(shell) != best and shell(STATUS) == ""


def test_log_keep_and_discard(shell):
    row, reset = block("printf '%s").splitlines()
    keep = re.search(r"after a keep instead: (.*)", reset)[1]
    change(shell, "better")
    shell(row.replace(" discard ", " keep "))
    shell(keep)
    kept = tip(shell)
    assert "+# better" in shell("git diff start best")  # as README says
    (shell.repo / "prepare.py").write_text("a change of the human's")
    for words in ("worse", "also worse"):
        tried = change(shell, words)
        assert shell(f"git show --format= --name-only {tried}") == "train.py\n"
        shell(row)
        shell(reset)
        assert tip(shell) == kept and words not in (shell.repo / "train.py").read_text()
    assert (shell.repo / "prepare.py").read_text() == "a change of the human's"
    lines = (shell.repo / "results.tsv").read_text().splitlines()
    assert lines[0].split("\t") == ["commit", "val_bpb", "memory_gb", "status", "description"]
    assert len(lines) == 4 and all(line.count("\t") == 4 for line in lines)
    assert lines[1].startswith(f"{kept}\t0.914700\t1.2\tkeep\tshort window 16")
    # The discard, applied to best:
    [apply] = re.findall(r"`(git [^`]*COMMIT .*?)`", PROGRAM)
    (shell.repo / "prepare.py").write_bytes((ROOT / "prepare.py").read_bytes())
    shell(apply.replace("COMMIT", tried))
    assert "also worse" in (shell.repo / "train.py").read_text()


def test_resume_prints_what_counts(shell):
    shell(block(": > run.log"))
    best = tip(shell)
    tried = change(shell, "an idea")
    shell(block("printf '%s").splitlines()[0])
    shell("echo human > notes")
    out = shell(block("git status -sb"))
    assert "## autoresearch/" in out and "?? notes" in out
    assert out.index(f"{tried} an idea") < out.rindex(f"{best} baseline")
    assert f"{tried}\t0.914700" in out and out.endswith("run.log:integrity: ok\nrun.log:exit 0\n")
    assert str(shell.repo) not in out  # nothing runs: pgrep does not find itself


def test_the_rule_is_the_one_that_is_simulated():
    rule = protocol.Rule()
    assert (rule.discards, rule.speed, rule.ideas, rule.together) == (10, 0.1, 15, 6)
    for words in (
        "after ten discards in a row",
        "a tenth fewer tokens",
        "After every fifteen ideas",
        "the six that came closest",
    ):
        assert words in " ".join(PROGRAM.split())
