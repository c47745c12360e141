"""Preparation and training, broken on purpose: how each ends, and what is left for the next.

    uv run pytest -m faults -n0 -s     with a line for each fault

A corpus of made-up texts, a tiny model that is not compiled, two seconds of training.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import prepare
from tests.common import edited, make_corpus

import pytest

pytestmark = pytest.mark.faults
KILLS = 20
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)


# ---- Processes and caches ----
class Process:
    """One of the scripts in a process, what it says in a file."""

    def __init__(self, code, script, cache, *args, **environment):
        handle, name = tempfile.mkstemp(dir=code.parent)
        self.log = Path(name)
        own = {"AUTORESEARCH_CACHE": cache, "AUTORESEARCH_TIME_BUDGET": 2} | environment
        with open(handle, "wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, code / script, *args],
                env=os.environ | {key: str(value) for key, value in own.items()},
                cwd=code,
                stdout=log,
                stderr=log,
            )

    @property
    def output(self):
        return self.log.read_text()

    @property
    def last(self):
        return (self.output.splitlines() or [""])[-1]

    def wait_for(self, text):
        """Until it is said or the process ends."""
        while text not in self.output and self.process.poll() is None:
            time.sleep(0.02)

    def end(self, number=signal.SIGKILL):
        """The exit code, after a signal."""
        self.process.send_signal(number)
        return self.process.wait(timeout=60)

    def finish(self):
        """The exit code, after all that it does. A traceback is not what a user should read."""
        code = self.process.wait(timeout=300)
        assert "Traceback" not in self.output, self.output
        return code


@pytest.fixture(scope="module")
def code(tmp_path_factory):
    """A folder with both scripts, train.py of a tiny model."""
    return edited(tmp_path_factory.mktemp("faults") / "code").parent


@pytest.fixture
def start(code):
    """Function that starts a script; what still runs at the end of the test is killed."""
    started = []

    def call(script, *args, folder=code, **options):
        process = Process(folder, script, *args, **options)
        started.append(process)
        return process

    yield call
    for process in started:
        process.end()


@pytest.fixture
def run(start):
    """Function that runs a script to its end."""

    def call(*args, **options):
        process = start(*args, **options)
        process.code = process.finish()
        return process

    return call


@pytest.fixture(scope="module")
def whole(code, tmp_path_factory):
    """Two corpora, for each a cache, and how long the scripts take from their first line to what
    they write last."""
    folder = tmp_path_factory.mktemp("whole")
    found = SimpleNamespace(corpora=[], caches=[])

    def seconds(process, first_line, written):
        process.wait_for(first_line)
        begun = time.monotonic()
        while not list(folder.glob(written)) and process.process.poll() is None:
            time.sleep(0.02)
        taken = time.monotonic() - begun
        assert process.finish() == 0, process.output
        return taken

    for i in range(2):
        sizes = [6000 + 1000 * i] * 4
        corpus = make_corpus(folder / f"corpus{i}", train=sizes, val=1000)
        cache = folder / f"cache{i}"
        found.corpora.append(corpus)
        found.caches.append(cache)
        preparation = Process(code, "prepare.py", cache, "--data-dir", corpus)
        written = f"cache{i}/small/manifest.json"
        found.preparation = seconds(preparation, "profile: ", written)
    training = Process(code, "train.py", found.caches[0])
    found.training = seconds(training, "run: ", "cache0/runs/*.json")
    return found


@pytest.fixture
def copy(whole, tmp_path):
    """The first cache once more."""
    return shutil.copytree(whole.caches[0], tmp_path / "copy")


def made(cache):
    """Names, sizes and hashes as the manifest has them; None without one. They are those of the
    files."""
    manifest = cache / "small" / "manifest.json"
    if not manifest.exists():
        return None
    files = json.loads(manifest.read_text())["files"]
    assert len(files) == 4
    for name, (size, digest) in files.items():
        path = manifest.with_name(name)
        assert (path.stat().st_size, prepare.sha256(path)) == (size, digest)
    return files


def records(folder):
    """Every record of a run there; none may be half of one."""
    found = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    assert all({"val_bpb", "integrity", "train"} <= record.keys() for record in found)
    return found


# ---- Kills ----
def kill(process, first_line, seconds, rng):
    """At a random moment, one in ten before the first line. Returns what came of it."""
    if rng.random() < 0.9:
        process.wait_for(first_line)
    moment = rng.uniform(0, 1.1 * seconds)
    time.sleep(moment)
    number = rng.choice(SIGNALS)
    exit_code = process.end(number)
    # 0: it had ended. Python's own way with SIGINT is -2, where no sentence is said.
    assert exit_code in (0, -number, 130), process.output
    print(
        f"{number.name:7} after {moment:4.1f} s: exit {exit_code:3}, {process.last[:60]!r}", end=""
    )
    return exit_code


def test_killed_preparations(whole, copy, start, run):
    """Of one corpus and the other in turn: what is there is one of the two or nothing."""
    rng = random.Random(time.time_ns())
    states = Counter()
    expected = {"first": made(whole.caches[0]), "second": made(whole.caches[1]), "none": None}
    print()
    for i in range(KILLS):
        process = start("prepare.py", copy, "--data-dir", whole.corpora[(i + 1) % 2])
        kill(process, "profile: ", whole.preparation, rng)
        [state] = [name for name, files in expected.items() if files == made(copy)]
        states[state] += 1
        print(f", left: {state}")
    print(dict(states))
    assert run("prepare.py", copy, "--data-dir", whole.corpora[1]).code == 0
    assert made(copy) == expected["second"]
    assert run("train.py", copy).code == 0
    assert {path.name for path in copy.iterdir()} == {"small", "runs"}


def test_killed_runs(whole, tmp_path, start, run):
    rng = random.Random(time.time_ns())
    print()
    for _ in range(KILLS):
        before = len(records(tmp_path))
        process = start("train.py", whole.caches[0], AUTORESEARCH_RUNS=tmp_path)
        exit_code = kill(process, "run: ", whole.training, rng)
        more = len(records(tmp_path)) - before
        print(f", records: {more}")
        assert (exit_code == 0) <= more <= ("\nval_bpb: " in process.output)
    before = len(records(tmp_path))
    assert run("train.py", whole.caches[0], AUTORESEARCH_RUNS=tmp_path).code == 0
    assert len(records(tmp_path)) == before + 1
    assert made(whole.caches[0])


# ---- A full disk ----
def mount(folder, options):
    command = ["mount", "-t", "tmpfs", "-o", options, "none", folder]
    return subprocess.run(command, capture_output=True).returncode == 0


@pytest.fixture
def disk(tmp_path, whole):
    """A disk with the first cache."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if shutil.which("mount") is None or not mount(folder, "size=1g"):
        pytest.skip("no mount, or no right to mount a tmpfs")
    shutil.copytree(whole.caches[0] / "small", folder / "small")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def pages(size):
    return -(-size // 4096)


def test_a_disk_that_fills_at_each_stage_of_a_preparation(whole, disk, run):
    """The old cache stays until the new one is there."""
    corpus = whole.corpora[1]
    old = sum(pages(path.stat().st_size) for path in (disk / "small").iterdir())
    written = old
    print()
    for name in ("tokenizer.tiktoken", "val.u16", "train.u16", "train.npy", "manifest.json"):
        size = pages((whole.caches[1] / "small" / name).stat().st_size)
        assert mount(disk, f"remount,size={4096 * (written + size // 2)}")
        failed = run("prepare.py", disk, "--data-dir", corpus)
        print(f"no space for {name}: exit {failed.code}, {failed.last[:90]!r}")
        assert failed.code == 2 and failed.last.startswith("error: ")
        assert "free space" in failed.last
        assert made(disk) == made(whole.caches[0])
        written += size
    assert mount(disk, f"remount,size={4096 * written}")
    assert run("prepare.py", disk, "--data-dir", corpus).code == 0
    assert made(disk) == made(whole.caches[1])
    assert [path.name for path in disk.iterdir()] == ["small"]


# ---- Nothing broken ----
def test_the_embedded_corpus_is_prepared_and_trained_on(tmp_path, run):
    done = run("prepare.py", tmp_path)
    assert done.code == 0 and "ready: small profile, 8 training shards; " in done.last
    assert run("train.py", tmp_path).code == 0
