"""tools/night.sh starts an agent again and again, in a sandbox."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.common import ROOT

import pytest

# What an agent does that matters to the sandbox: it commits, and it replaces its settings by a
# rename. It also tries what it must not do.
AGENT = """#!/bin/sh
git commit -qm idea --allow-empty
git tag -f best > tagged
touch prepare.py tools/new "$HOME/.bashrc"
touch "$HOME/.cache/autoresearch/record"
if [ "$CLAUDE_CONFIG_DIR" ]; then
  echo new > "$CLAUDE_CONFIG_DIR/.claude.json.1"
  mv "$CLAUDE_CONFIG_DIR/.claude.json.1" "$CLAUDE_CONFIG_DIR/.claude.json"
fi
for word; do last=$word; done
echo "$last" >> turns
"""


def can_bwrap():
    command = "bwrap --unshare-pid --ro-bind / / --dev-bind /dev /dev --proc /proc true"
    return shutil.which("bwrap") and subprocess.run(command.split()).returncode == 0


needs_bwrap = pytest.mark.skipif(not can_bwrap(), reason="no bubblewrap, or a container forbids it")


@pytest.fixture
def clone():
    """A clone beside a home with an agent, not in /tmp, which the sandbox hides."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as place:
        yield make_clone(Path(place))


def make_clone(tmp_path):
    folder = tmp_path / "a clone"
    home = tmp_path / "home"
    for place in (folder / "tools", home / ".claude", home / ".codex", home / ".cache"):
        place.mkdir(parents=True)
    (home / ".claude.json").write_text("old\n")
    for own, name in ((".claude", "claude"), (".codex", "codex")):
        (home / own / name).write_text(AGENT)
        (home / own / name).chmod(0o755)
    shutil.copy(ROOT / "tools/night.sh", folder / "tools")
    (folder / "prepare.py").touch()
    init(folder)
    return folder


def init(folder, *options):
    git(folder, "init", "-q", *options)
    git(folder, "config", "user.name", "a")
    git(folder, "config", "user.email", "a@b.c")
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "one")


def git(folder, *args):
    done = subprocess.run(["git", *args], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def environment(clone, **more):
    home = clone.parent / "home"
    own = os.environ | {
        "HOME": str(home),
        "PATH": f"{home}/.claude:{home}/.codex:{os.environ['PATH']}",
    }
    for name in ("CLAUDE_CONFIG_DIR", "CODEX_HOME", "AUTORESEARCH_CACHE", "AUTORESEARCH_RUNS"):
        own.pop(name, None)
    return own | {"UV_CACHE_DIR": f"{home}/uv", "TMPDIR": str(clone.parent)} | more


def start(clone, *args, **more):
    return subprocess.run(
        ["tools/night.sh", *args],
        cwd=clone,
        env=environment(clone, **more),
        capture_output=True,
        text=True,
    )


def play(clone, agent, **more):
    """Lets an agent have its first turn."""
    command = ["tools/night.sh", agent]
    night = subprocess.Popen(
        command, cwd=clone, env=environment(clone, **more), stderr=subprocess.PIPE, text=True
    )
    line = ""
    while "it starts again in 20 s" not in line:
        line = night.stderr.readline()
        assert line or night.poll() is None
    night.terminate()
    assert night.wait(10) == 130
    night.stderr.close()


def check_turn(clone):
    home = clone.parent / "home"
    assert (clone / "turns").read_text().startswith("Have a look at program.md, and go on")
    assert git(clone, "log", "-1", "--format=%s", "best") == "idea"
    assert (home / ".cache/autoresearch/record").exists()
    for name in (clone / "tools/new", home / ".bashrc"):
        assert not name.exists()


@needs_bwrap
@pytest.mark.parametrize("agent", ["claude", "codex"])
@pytest.mark.parametrize("links", [False, True])
def test_a_turn_in_the_sandbox(clone, agent, links):
    home = clone.parent / "home"
    if links:  # a cache on another disk, and settings kept elsewhere
        for place in (home / ".cache/autoresearch", home / ".claude"):
            real = clone.parent / f"real {place.name}"
            if place.exists():
                place.rename(real)
            real.mkdir(exist_ok=True)
            place.symlink_to(real)
    play(clone, agent)
    check_turn(clone)
    if agent == "claude":
        assert (home / ".claude/.claude.json").read_text() == "new\n"
        assert (home / ".claude.json").read_text() == "old\n"


@needs_bwrap
def test_an_agent_without_a_folder_of_its_own_yet(clone):
    home = clone.parent / "home"
    (home / "bin").mkdir()
    (home / ".claude/claude").rename(home / "bin/claude")
    (home / ".claude").rmdir()
    play(clone, "claude", PATH=f"{home}/bin:{os.environ['PATH']}")
    check_turn(clone)


@needs_bwrap
def test_a_submodule_whose_git_folder_is_elsewhere(clone):
    shutil.rmtree(clone / ".git")
    init(clone, f"--separate-git-dir={clone.parent / 'elsewhere'}")
    assert (clone / ".git").is_file()
    play(clone, "claude")
    check_turn(clone)


@needs_bwrap
def test_a_command_runs_once_with_its_own_code(clone):
    done = start(clone, "--", "sh", "-c", "pwd; touch prepare.py || exit 7")
    assert (done.returncode, done.stdout) == (7, f"{clone}\n")


# ---- Without bubblewrap ----
def test_where_no_sandbox_works_it_says_how_to_go_on(clone):
    (clone.parent / "home/.claude/bwrap").write_text(
        "#!/bin/sh\necho no user namespaces >&2; exit 1\n"
    )
    (clone.parent / "home/.claude/bwrap").chmod(0o755)
    done = start(clone, "claude")
    assert done.returncode == 2 and not (clone / "turns").exists()
    assert "the sandbox does not work here: no user namespaces" in done.stderr
    assert "SANDBOX=none tools/night.sh claude" in done.stderr
    play(clone, "claude", SANDBOX="none")
    assert git(clone, "log", "-1", "--format=%s", "best") == "idea"


@pytest.mark.parametrize("words", [(), ("gemini",)])
def test_usage(clone, words):
    done = start(clone, *words)
    assert done.returncode == 2 and "usage: tools/night.sh claude, or codex" in done.stderr


def test_an_agent_that_is_not_installed(clone):
    (clone.parent / "home/.codex/codex").unlink()
    done = start(clone, "codex", SANDBOX="none")
    assert done.returncode == 2 and "codex is not installed" in done.stderr


def test_what_the_sandbox_opens(clone):
    """The order of its arguments: no later mount opens what is only read."""
    bwrap = clone.parent / "home/.claude/bwrap"
    bwrap.write_text(f'#!{sys.executable}\nimport sys\nprint("\\n".join(sys.argv[1:]))\n')
    bwrap.chmod(0o755)
    words = start(clone, "--", "true").stdout.splitlines()
    home = clone.parent / "home"
    options = [(word, words[i + 1]) for i, word in enumerate(words) if word.endswith("bind")]
    cache = home / ".cache/autoresearch"
    assert [place for option, place in options if option == "--bind"] == [
        str(place) for place in (clone, clone / ".git", cache, clone, home / "uv")
    ]
    assert options[0] == ("--ro-bind", "/")
    assert options[-2:] == [("--ro-bind", f"{clone}/{name}") for name in ("prepare.py", "tools")]
    assert words.index("--tmpfs") < words.index("--bind")
