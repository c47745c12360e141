"""night.sh starts an agent again and again, in a sandbox; rerun.py trains a commit in a clean copy;
audit.py measures a night's gain."""

import json
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import prepare
from tests.common import LITTLE, ROOT, processes_in, wait_until
from tools import audit, rerun

import pytest


def git(folder, *args):
    command = ["git", "-c", "user.name=a", "-c", "user.email=a@b.c", *args]
    done = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def commit(folder):
    """Turns a folder into a repository; returns the hash of its only commit."""
    (folder / ".gitignore").write_text("__pycache__/\n")
    git(folder, "init", "-q")
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "one")
    return git(folder, "rev-parse", "--short", "HEAD")


# ---- night.sh ----
# What an agent does that matters to the sandbox: it commits, it compiles, it downloads, and it
# replaces its settings by a rename. It also tries what it must not do.
AGENT = """#!/bin/sh
if [ "$1" = --version ]; then exit; fi
git -c user.name=a -c user.email=a@b.c commit -qm idea --allow-empty
git tag -f best > tagged
touch prepare.py tools/new docs/new "$HOME/.bashrc"
touch "$HOME/.cache/autoresearch/record" "$HOME/.cache/huggingface/kernel" "$HOME/.gemini/state"
mkdir -p "$TORCHINDUCTOR_CACHE_DIR/new" "$TRITON_CACHE_DIR/new"
mktemp /tmp/XXXXXX > temporary; stat -f -c %T /tmp >> temporary
if [ "$CLAUDE_CONFIG_DIR" ]; then
  echo new > "$CLAUDE_CONFIG_DIR/.1" && mv "$CLAUDE_CONFIG_DIR/.1" "$CLAUDE_CONFIG_DIR/.claude.json"
fi
for word; do last=$word; done
echo "$last" >> turns
"""
# Claude Code, which ends what a command has left in the background, by the parent's id.
CLAUDE = """#!/bin/bash
if [ "$1" = --version ]; then exit; fi
(/bin/sleep 0.1; echo 0.9 > score) &
if [ "$CLAUDE_CODE_DISABLE_BACKGROUND_TASKS" = 1 ]; then wait; fi
kill $(ps -o pid= --ppid $$)
"""
# Codex, which runs each command in a login shell.
CODEX = """#!/bin/bash
if [ "$1" = --version ]; then exit; fi
login=-lc
if [[ "$*" = *" -c allow_login_shell=false "* ]]; then login=-c; fi
bash $login "uv > score"
"""
# It fails twice as a client does that is refused for three minutes, and then has a good turn.
REFUSED = """#!/bin/bash
echo >> turns
sleep 180
if [ $(wc -l < turns) -lt 3 ]; then exit 1; fi
"""
# It hangs with all that it has started.
STUBBORN = """#!/bin/bash
trap "" INT TERM HUP
/bin/sleep 60 &
echo begun
/bin/sleep 60
"""
# A clock on which a second takes a thousandth, or less.
CLOCK = {
    "date": "#!/bin/sh\necho $(($(/bin/date +%s%N) / 1000000))\n",
    "sleep": "#!/bin/sh\nexec /bin/sleep $1e-3\n",
}


def can_bwrap():
    command = "bwrap --unshare-pid --ro-bind / / --dev-bind /dev /dev --proc /proc true"
    return shutil.which("bwrap") and subprocess.run(command.split()).returncode == 0


needs_bwrap = pytest.mark.skipif(not can_bwrap(), reason="no bubblewrap, or a container forbids it")


def write_program(path, text):
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def clone():
    """A clone beside a home with agents, not in /tmp, which the sandbox hides."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as place:
        folder = Path(place, "a clone")
        home = Path(place, "home")
        for made in (folder / "tools", folder / "docs", home / "bin", home / ".cache"):
            made.mkdir(parents=True)
        for agent in ("claude", "codex", "gemini"):
            (home / f".{agent}").mkdir()
            write_program(home / "bin" / agent, AGENT)
        (home / ".claude.json").write_text("old\n")
        shutil.copy(ROOT / "tools/night.sh", folder / "tools")
        (folder / "prepare.py").touch()
        commit(folder)
        yield folder


def begin(clone, *args, **more):
    """Starts night.sh with the home beside the clone."""
    home = clone.parent / "home"
    left_out = ("AUTORESEARCH_", "CLAUDE_", "CODEX_", "HF_", "XDG_", "TORCH", "TRITON_")
    own = {key: value for key, value in os.environ.items() if not key.startswith(left_out)}
    own |= {"HOME": str(home), "UV_CACHE_DIR": f"{home}/uv", "TMPDIR": str(clone.parent)}
    own["PATH"] = f"{home}/bin:{own['PATH']}"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    own = {key: value for key, value in (own | more).items() if value is not None}
    return subprocess.Popen(["tools/night.sh", *args], cwd=clone, env=own, **pipes)


def finish(night):
    with night:
        return *night.communicate(timeout=60), night.returncode


def end(clone, night, number=signal.SIGTERM):
    """Ends a night by a signal, and checks that this is quick and leaves nothing."""
    with night:
        try:
            night.send_signal(number)
            assert night.wait(timeout=3) == 130
            wait_until(lambda: not processes_in(clone), 1)
            assert not (clone / ".git/tmp").exists()
        finally:
            for process, _ in processes_in(clone):
                os.kill(process, signal.SIGKILL)


def read_until(pipe, words):
    """Returns the line of a pipe with these words."""
    for line in pipe:
        if words in line:
            return line
    raise AssertionError(f"no line has: {words}")


def check_turn(clone, *agent, **more):
    """Lets an agent have its first turn, and checks what it could write."""
    home = clone.parent / "home"
    for name in ("index", "refs/tags/best"):  # from a git that was killed
        (clone / f".git/{name}.lock").touch()
    night = begin(clone, *agent, **more)
    read_until(night.stderr, "starts in 20 s")
    end(clone, night)
    assert (clone / "turns").read_text().startswith("Have a look at program.md, and go on")
    assert git(clone, "log", "-1", "--format=%s", "best") == "idea"
    assert (home / ".cache/huggingface/kernel").exists()
    for kept in ("record", "inductor/new", "triton/new"):
        assert (home / ".cache/autoresearch" / kept).exists()
    if not more:
        for place in (clone / "tools", clone / "docs"):
            assert not (place / "new").exists()
        assert not (home / ".bashrc").exists()
        assert (home / ".gemini/state").exists() == (agent[0] == "gemini")
        name, kind = (clone / "temporary").read_text().split()
        assert not os.path.exists(name) and kind != "tmpfs"


@needs_bwrap
@pytest.mark.parametrize(
    ("agent", "links"),
    [("claude", False), ("claude", True), ("codex", True), ("gemini --yolo -p", False)],
)
def test_a_turn_in_the_sandbox(clone, agent, links):
    home = clone.parent / "home"
    if links:  # a cache on another disk, and settings kept elsewhere
        for place in (home / ".cache/autoresearch", home / ".claude"):
            real = clone.parent / f"real {place.name}"
            if place.exists():
                place.rename(real)
            real.mkdir(exist_ok=True)
            place.symlink_to(real)
    check_turn(clone, *agent.split())
    if agent == "claude":
        assert (home / ".claude/.claude.json").read_text() == "new\n"
        assert (home / ".claude.json").read_text() == "old\n"


@needs_bwrap
def test_a_command_runs_once_with_its_own_code(clone):
    script = "pwd; touch prepare.py $UV_PROJECT_ENVIRONMENT/lock || exit 7"
    place = clone.parent / "venv"
    night = begin(clone, "--", "sh", "-c", script, UV_PROJECT_ENVIRONMENT=str(place))
    out, _, code = finish(night)
    assert (code, out) == (7, f"{clone}\n") and (place / "lock").exists()


def test_where_no_sandbox_works_it_says_how_to_go_on(clone):
    bwrap = clone.parent / "home/bin/bwrap"
    write_program(bwrap, "#!/bin/sh\necho no user namespaces >&2; exit 1\n")
    _, said, code = finish(begin(clone, "claude"))
    assert code == 2 and not (clone / "turns").exists()
    assert "the sandbox does not work here: no user namespaces" in said
    assert "SANDBOX=none tools/night.sh claude" in said
    check_turn(clone, "claude", SANDBOX="none")


def test_usage(clone):
    programs = clone.parent / "home/bin"
    write_program(programs / "codex", "#!/bin/sh\necho usage; echo node is too old >&2; exit 3\n")
    write_program(programs / "hangs", "#!/bin/sh\nexec /bin/sleep 60\n")
    write_program(programs / "timeout", '#!/bin/sh\nshift 3\nexec /usr/bin/timeout 0.1 "$@"\n')
    (programs / "hangs").rename(programs / "claude")
    for agent, complaint in (
        ("--", "usage: tools/night.sh"),
        ("--help", "usage: tools/night.sh"),
        ("codex", "codex does not start here (on WSL install it in Ubuntu): node is too old"),
        ("claude", "claude does not start here (on WSL install it in Ubuntu): silence"),
        ("cluade", "type: cluade: not found"),
    ):
        _, said, code = finish(begin(clone, agent, SANDBOX="none"))
        assert code == 2 and complaint in said


def test_a_night_begins_with_what_is_committed(clone):
    """Hundreds of names fill a pipe."""
    names = [f"{number} {'x' * 200}" for number in range(400)]
    for name in names:
        (clone / name).touch()
    night = begin(clone, "gemini", SANDBOX="none")
    read_until(night.stderr, "starts in 20 s")
    end(clone, night)
    git(clone, "add", "-A")
    _, said, code = finish(begin(clone, "gemini", SANDBOX="none"))
    assert code == 2 and "commit or undo this first (git status): A" in said


def test_without_a_home(clone):
    places = {name: str(clone / name) for name in ("AUTORESEARCH_CACHE", "HF_HOME")}
    night = begin(clone, "--", "sh", "-c", "echo $HOME", HOME=None, SANDBOX="none", **places)
    assert finish(night) == (f"{pwd.getpwuid(os.getuid()).pw_dir}\n", "", 0)


@pytest.mark.parametrize("agent", ["claude", "codex"])
def test_options_after_an_agent_s_name_join_its_own(clone, agent):
    """Caches of other programs lie where XDG_CACHE_HOME says."""
    home = clone.parent / "home"
    echo = '#!/bin/sh\n[ "$1" = --version ] || echo "$@"\n'
    write_program(home / "bin" / agent, echo)
    places = {"XDG_CACHE_HOME": f"{home}/xdg", "UV_CACHE_DIR": None}
    night = begin(clone, agent, "--model", "a", SANDBOX="none", **places)
    said = night.stdout.readline()
    end(clone, night)
    assert said.startswith(
        "exec --model a --dangerously" if agent == "codex" else "--model a --print"
    )
    assert (home / "xdg/uv").is_dir() and (home / "xdg/huggingface").is_dir()


@pytest.mark.parametrize(("agent", "text"), [("claude", CLAUDE), ("codex", CODEX)])
def test_a_client_keeps_what_it_runs(clone, agent, text):
    home = clone.parent / "home"
    write_program(home / "bin" / agent, text)
    write_program(home / "bin/uv", "#!/bin/sh\necho 0.9\n")
    (home / ".profile").write_text("PATH=/usr/bin:/bin\n")
    night = begin(clone, agent, SANDBOX="none")
    read_until(night.stderr, "starts in 20 s")
    end(clone, night)
    assert (clone / "score").read_text() == "0.9\n"


def test_the_wait_grows_after_each_failure(clone):
    for name, text in (CLOCK | {"refused": REFUSED}).items():
        write_program(clone.parent / "home/bin" / name, text)
    night = begin(clone, "refused", SANDBOX="none")
    for seconds in (20, 40, 10):
        assert f"starts in {seconds} s" in read_until(night.stderr, "starts in")
    end(clone, night)


def test_an_hour_without_a_change_ends_a_turn(clone):
    """It looks every ten minutes, and the second time there is a new line of a run."""
    sleep = "echo $1 >> slept\nif [ $(grep -c 600 slept) = 2 ]; then touch run.log; fi\n"
    write_program(clone.parent / "home/bin/sleep", f"#!/bin/sh\n{sleep}")
    write_program(clone.parent / "home/bin/stubborn", STUBBORN)
    night = begin(clone, "stubborn", SANDBOX="none")
    read_until(night.stderr, "for an hour")
    assert (clone / "slept").read_text().count("600\n") == 8
    assert "exit code 137" in read_until(night.stderr, "starts in")
    end(clone, night)


@pytest.mark.parametrize("sandbox", ["none", pytest.param("", marks=needs_bwrap)])
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_ends_the_night(clone, name, sandbox):
    write_program(clone.parent / "home/bin/sleep", CLOCK["sleep"])
    write_program(clone.parent / "home/bin/stubborn", STUBBORN)
    night = begin(clone, "stubborn", SANDBOX=sandbox)
    read_until(night.stdout, "begun")
    end(clone, night, signal.Signals[name])


# ---- rerun.py ----
# A train.py that notes in which places an earlier run has left a file.
LOOK = """
import json, os
from pathlib import Path
cache = Path(os.environ["AUTORESEARCH_CACHE"])
places = [Path(), cache, cache / "small", Path.home(), Path(os.environ["TMPDIR"])]
names = "SEED AUTORESEARCH_COMMIT AUTORESEARCH_RUNS PYTHONPATH TORCHINDUCTOR_CACHE_DIR".split()
seen = {name: os.environ.get(name) for name in names}
seen["kernel"] = (cache / "flash-attn3-v1-2.15").read_text(), os.environ["HF_HOME"]
seen["found"] = [str(place) for place in places if (place / "kept").exists()]
for place in places:
    (place / "kept").touch()
(cache / "runs").mkdir()
(cache / "runs" / "seen.json").write_text(json.dumps(seen))
"""
# A train.py that sends the signal to tools/rerun.py once that waits.
ENDED = """
import os, signal, time
print("it runs", os.getpid(), flush=True)
time.sleep(0.2)
os.kill(os.getppid(), signal.SIGTERM)
time.sleep(60)
"""


@pytest.fixture
def night(own_cache, tmp_path, monkeypatch):
    """A folder for a commit, with what earlier runs and a shell leave behind."""
    folder = tmp_path / "a night"
    shutil.copytree(ROOT / "tools", folder / "tools")
    shutil.copy(ROOT / "prepare.py", folder)
    home = tmp_path / "home"
    home.mkdir()
    for place in (own_cache, own_cache / "small", home, tmp_path):
        (place / "kept").touch()
    (own_cache / "flash-attn3-v1-2.15").write_text("a kernel")
    monkeypatch.setattr(prepare, "__file__", str(folder / "prepare.py"))
    own = {"AUTORESEARCH_RUNS": tmp_path / "runs", "TMPDIR": tmp_path, "HOME": home, "SEED": 100}
    own["TORCHINDUCTOR_CACHE_DIR"] = tmp_path / "compiled"
    for name, value in own.items():
        monkeypatch.setenv(name, str(value))
    return folder


def files(folder):
    return {path for path in folder.rglob("*") if "__pycache__" not in path.parts}


def test_a_rerun_gets_a_score_of_the_commit(night, tmp_path, monkeypatch, capsys):
    """It finds nothing that an earlier run left, is the only run of its folder, and leaves its
    record with the others and nothing else. The profile's folder may be a link, and the environment
    may name another repository."""
    prepared = night.parent / "own-cache" / "small"
    prepared.rename(tmp_path / "disk")
    prepared.symlink_to(tmp_path / "disk")
    (night / "train.py").write_text(LOOK + LITTLE)
    name = commit(night)
    (night / "kept").touch()
    git(tmp_path, "init", "-q", "--bare", "another")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "another"))
    (night / "train.py").write_text("what is not committed does not count")
    with pytest.raises(SystemExit, match="2"):
        rerun.main("nonsense")
    assert capsys.readouterr().err == "error: bad revision 'nonsense'\n"
    before = files(tmp_path)
    command = [sys.executable, "tools/rerun.py", "HEAD"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=night, **pipes) as process:
        while process.stdout.readline() not in ("begun\n", ""):
            pass
        with pytest.raises(SystemExit, match="2"):
            rerun.main("HEAD")
        out, _ = process.communicate("go on\n")
    assert capsys.readouterr().err.startswith("error: this folder has a run already; ")
    assert process.returncode == 0, out
    runs = sorted((tmp_path / "runs").iterdir())
    assert files(tmp_path) == before | {tmp_path / "runs", *runs}
    record, seen = (json.loads(path.read_text()) for path in runs)
    assert record["commit"] == name and record["seed"] == 100
    assert f"\nval_bpb: {record['val_bpb']:.6f}\n" in out
    assert seen["found"] == []
    assert seen["SEED"] == "100" and seen["AUTORESEARCH_COMMIT"] == name
    assert seen["AUTORESEARCH_RUNS"] is None and seen["PYTHONPATH"] is None
    assert seen["TORCHINDUCTOR_CACHE_DIR"] is None
    assert seen["kernel"] == ["a kernel", f"{tmp_path}/home/.cache/huggingface"]


def test_a_rerun_takes_its_run_along(night, tmp_path, capfd):
    (night / "train.py").write_text(ENDED)
    commit(night)
    numbers = (signal.SIGINT, signal.SIGTERM)
    own = {number: signal.signal(number, lambda *_: None) for number in numbers}
    try:
        with pytest.raises(SystemExit, match=str(128 + signal.SIGTERM)):
            rerun.main("HEAD")
    finally:
        for number, handler in own.items():
            signal.signal(number, handler)
    run = capfd.readouterr().out.split()[-1]
    assert not os.path.exists(f"/proc/{run}")
    assert not list(tmp_path.glob("autoresearch-rerun-*"))


# ---- audit.py ----
# A tools/rerun.py that scores a commit by its name.
SCORES = """
import json, os, sys
[commit] = sys.argv[1:]
seed = int(os.environ['SEED'])
with open('calls', 'a') as file:
    print(commit, seed, file=file)
if commit == 'broken':
    sys.exit('error: it cannot be trained')
gain = {'base': 0, 'worse': -0.01, 'best': 0.03 + 0.01 * (seed - 200), 'mended': 0.02}[commit]
record = {'val_bpb': 0.9 - gain, 'num_steps': 7, 'integrity': os.environ.get('FLAG', 'ok')}
record['data'] = os.environ.get('DATA')
with open(os.environ['AUTORESEARCH_RUNS'] + '/1.json', 'w') as file:
    json.dump(record, file)
"""
LOG = """commit\tval_bpb\tmemory_gb\tstatus\tdescription
base\t0.9\t1.0\tkeep\tbaseline
worse\t0.9\t1.0\tkeep\tan idea
lost\t0.9\t1.0\tdiscard\tan idea
base\t0.9\t1.0\tagain\tbest again
best\t0.9\t1.0\tkeep\tan idea
torn"""


@pytest.fixture
def log(tmp_path):
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools/rerun.py").write_text(SCORES)
    (tmp_path / "results.tsv").write_text(LOG)
    return tmp_path / "results.tsv"


@pytest.fixture
def call(log, monkeypatch, capsys):
    """Returns a function that calls main and returns its output and all runs so far, or the
    sentence with which it exits."""

    def call_main(*args, fails=""):
        monkeypatch.setattr(sys, "argv", ["audit", str(log.parent), *map(str, args)])
        if not fails:
            audit.main()
            return capsys.readouterr().out, (log.parent / "calls").read_text().splitlines()
        with pytest.raises(SystemExit, match=fails):
            audit.main()
        return capsys.readouterr()

    return call_main


def test_baseline_and_last_keep_are_trained_in_turn(call, log, monkeypatch):
    log.with_name("audit.jsonl").write_text('[1]\n{"commit": "base", "val_bpb": 0.9, "sec')
    out, calls = call("--seeds", 200, 201)
    assert out.count("left out of audit.jsonl: ") == 2
    assert calls == ["base 200", "best 200", "best 201", "base 201"]
    assert out.endswith("\ngain of best over base: 0.0350 +- 0.0050\n")  # of 0.03 and 0.04
    assert "| 201 | best | 0.860000 | 7 | ok | 20" in out
    out, calls = call()
    assert len(calls) == 6  # seed 202 was added
    assert "4 runs are from an earlier audit. If the machine may have changed" in out
    assert "gain of best over base: 0.0400 +- 0.0058\n" in out
    monkeypatch.setattr(audit, "SECONDS", 6)
    assert len(call()[1]) == 12  # another budget's runs do not count


def test_each_keep_has_a_gain(call, log):
    out, _ = call("--keeps", "--seeds", 200)
    assert "gain of worse over base: -0.0100\n" in out
    assert "gain of best over worse: 0.0400\n" in out
    assert "1 of 2 are better than the one before" in out
    with open(log, "a") as file:  # `best` broke the rules
        file.write("\nmended\t0.9\t1.0\tagain\twithout the leak\n")
    assert call("--seeds", 200)[0].endswith("\ngain of mended over base: 0.0200\n")


def test_a_run_without_a_score_is_named_and_tried_again(call, log):
    log.write_text(LOG.replace("best", "broken"))
    for runs in (2, 3):
        lost = "^error: 1 of 2 runs have no score that counts; run this again.$"
        out = call("--seeds", 200, fails=lost).out
        assert "| 200 | broken | nan | 0 | exit 1: error: it cannot be trained |" in out
        assert len((log.parent / "calls").read_text().splitlines()) == runs


def test_a_flagged_run_counts_as_none_and_is_tried_again(call, monkeypatch):
    monkeypatch.setenv("FLAG", "overtime: 9 s")
    out = call("--seeds", 200, fails="^error: 2 of 2 runs have no score that counts; ").out
    assert "| 200 | best | 0.870000 | 7 | overtime: 9 s |" in out
    monkeypatch.delenv("FLAG")
    assert call("--seeds", 200)[0].endswith("\ngain of best over base: 0.0300\n")


def test_a_night_without_a_keep_is_refused(call, log):
    log.write_text("".join(LOG.splitlines(keepends=True)[:2]))
    assert "no keep but the baseline" in call(fails="2").err


def test_two_texts_are_not_mixed(call, log, monkeypatch):
    """Another clone has prepared another text in the shared cache since the first run."""
    monkeypatch.setenv("DATA", "aa")
    call("--seeds", 200)
    before = log.with_name("audit.jsonl").read_text()
    monkeypatch.setenv("DATA", "bb")
    assert "holds runs on another text (aa) than bb, which" in call(fails="2").err
    assert log.with_name("audit.jsonl").read_text() == before
