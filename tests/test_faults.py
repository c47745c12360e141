"""Breaks preparation and training on purpose, and checks how each ends and what is left behind.

    uv run pytest -m faults -n0 -s     with a line for each fault

The texts are made up, and a tiny model trains for two seconds without compilation.
"""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from types import SimpleNamespace

import prepare
from tests.common import edited, make_corpus

import pytest

pytestmark = pytest.mark.faults
KILLS = 20
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)


# ---- Processes and caches ----
def start(code, script, cache, *args):
    own = {"AUTORESEARCH_CACHE": str(cache), "AUTORESEARCH_TIME_BUDGET": "2"}
    return subprocess.Popen(
        [sys.executable, script, *args],
        env=os.environ | own,
        cwd=code,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run(*command):
    """Returns the exit code, the last line, and the seconds after the first line. Fails on a
    traceback, which no user should read."""
    with start(*command) as process:
        said = process.stdout.readline()
        begun = time.monotonic()
        said += process.communicate()[0]
    assert "Traceback" not in said, said
    return process.returncode, said.splitlines()[-1], time.monotonic() - begun


@pytest.fixture(scope="module")
def code(tmp_path_factory):
    """Makes a folder with both scripts; its train.py has a tiny model."""
    return edited(tmp_path_factory.mktemp("faults") / "code").parent


@pytest.fixture(scope="module")
def whole(code, tmp_path_factory):
    """Makes two corpora, prepares a cache of each, and times both scripts."""
    folder = tmp_path_factory.mktemp("whole")
    found = SimpleNamespace(corpora=[], caches=[])
    for i in range(2):
        corpus = make_corpus(folder / f"corpus{i}", train=[6000 + 1000 * i] * 4, val=1000)
        cache = folder / f"cache{i}"
        found.corpora.append(corpus)
        found.caches.append(cache)
        ended, last, found.preparation = run(code, "prepare.py", cache, "--data-dir", corpus)
        assert ended == 0, last
    ended, last, found.training = run(code, "train.py", found.caches[0])
    assert ended == 0, last
    return found


@pytest.fixture
def copy(whole, tmp_path):
    """Copies the first cache."""
    return shutil.copytree(whole.caches[0], tmp_path / "copy")


def made(cache):
    """Returns `data` of what is prepared or, between two renames, was. Checks all of its hashes."""
    folder = cache / "small"
    if not folder.exists():
        folder = cache / "small.old"
    files = {path.name: prepare.file_hash(path) for path in folder.iterdir()}
    assert len(files) == 4
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["training"] == [files["train.u16"], files["train.npy"]]
    rows = (folder / "val.u16").read_bytes()
    assert manifest["data"] == prepare.data_hash(rows, manifest)
    return manifest["data"]


# ---- Kills ----
def kill(process, seconds, rng):
    """Sends a signal at a random moment, nine times in ten after the first line. Returns the exit
    code and the output."""
    said = process.stdout.readline() if rng.random() < 0.9 else ""
    moment = rng.uniform(0, 1.1 * seconds)
    time.sleep(moment)
    number = rng.choice(SIGNALS)
    process.send_signal(number)
    said += process.communicate()[0]
    exit_code = process.returncode
    # 0: it had ended already. SIGINT gives 130 with our message, or Python's own -2 without.
    assert exit_code in (0, -number, 130), said
    print(f"{number.name:7} after {moment:4.1f} s: exit {exit_code:3}", end="")
    return exit_code, said


def test_killed_preparations(code, whole, copy):
    """Prepares one corpus and the other in turn: what is left is one of the two."""
    rng = random.Random(time.time_ns())
    states = Counter()
    expected = {"first": made(whole.caches[0]), "second": made(whole.caches[1])}
    print()
    for i in range(KILLS):
        process = start(code, "prepare.py", copy, "--data-dir", whole.corpora[(i + 1) % 2])
        kill(process, whole.preparation, rng)
        [state] = [name for name, files in expected.items() if files == made(copy)]
        states[state] += 1
        print(f", left: {state}")
    print(dict(states))
    assert run(code, "prepare.py", copy, "--data-dir", whole.corpora[1])[0] == 0
    assert made(copy) == expected["second"]
    assert run(code, "train.py", copy)[0] == 0
    assert {path.name for path in copy.iterdir()} == {"small", "runs"}


def test_killed_runs(code, whole, copy):
    """No killed run leaves half a record."""
    rng = random.Random(time.time_ns())
    runs = copy / "runs"
    shutil.rmtree(runs, ignore_errors=True)
    count = 0
    print()
    for _ in range(KILLS):
        exit_code, said = kill(start(code, "train.py", copy), whole.training, rng)
        found = [json.loads(path.read_text()) for path in runs.glob("*.json")]
        assert all({"val_bpb", "integrity", "commit"} <= record.keys() for record in found)
        more = len(found) - count
        count = len(found)
        print(f", records: {more}")
        assert (exit_code == 0) <= more <= ("\nval_bpb: " in said)
    assert run(code, "train.py", copy)[0] == 0
    assert len(list(runs.glob("*.json"))) == count + 1
    assert made(copy)


# ---- A full disk ----
def mount(folder, options):
    command = ["mount", "-t", "tmpfs", "-o", options, "none", folder]
    return subprocess.run(command, capture_output=True).returncode == 0


@pytest.fixture
def disk(tmp_path, whole):
    """Mounts a disk that holds the first cache."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if shutil.which("mount") is None or not mount(folder, "size=1g"):
        pytest.skip("no mount, or no right to mount a tmpfs")
    shutil.copytree(whole.caches[0] / "small", folder / "small")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def pages(size):
    return -(-size // 4096)


def test_a_disk_that_fills_at_each_stage_of_a_preparation(code, whole, disk):
    """The old cache stays until the new one is there."""
    corpus = whole.corpora[1]
    old = sum(pages(path.stat().st_size) for path in (disk / "small").iterdir())
    written = old
    print()
    for name in ("val.u16", "train.u16", "train.npy", "manifest.json"):
        size = pages((whole.caches[1] / "small" / name).stat().st_size)
        assert mount(disk, f"remount,size={4096 * (written + size // 2)}")
        ended, last, _ = run(code, "prepare.py", disk, "--data-dir", corpus)
        print(f"no space for {name}: exit {ended}, {last[:90]!r}")
        assert ended == 2 and last.startswith("error: ") and "free space" in last
        assert made(disk) == made(whole.caches[0])
        written += size
    assert mount(disk, f"remount,size={4096 * written}")
    assert run(code, "prepare.py", disk, "--data-dir", corpus)[0] == 0
    assert made(disk) == made(whole.caches[1])
    assert [path.name for path in disk.iterdir()] == ["small"]


# ---- Nothing broken ----
def test_the_embedded_corpus_is_prepared_and_trained_on(code, tmp_path):
    ended, last, _ = run(code, "prepare.py", tmp_path)
    ready = r"ready: small profile, [1-9]\d\.\d million training tokens, 512 validation rows; "
    assert ended == 0 and re.search(ready, last)
    assert run(code, "train.py", tmp_path)[0] == 0
