"""Preparation and training, broken on purpose: how each ends, and what is left for the next.

    uv run pytest -m faults

The embedded corpus, a tiny model that is not compiled, a few seconds of training.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tests.common import edited

import pytest

pytestmark = pytest.mark.faults


# ---- Processes and caches ----
@pytest.fixture(scope="module")
def code(tmp_path_factory):
    """A folder with both scripts, train.py of a tiny model."""
    return edited(tmp_path_factory.mktemp("faults") / "code").parent


class Process:
    """One of the scripts in a process, what it says in a file."""

    def __init__(self, code, script, cache, *args, prefix=(), **environment):
        handle, name = tempfile.mkstemp(dir=code.parent)
        self.log = Path(name)
        own = {"AUTORESEARCH_CACHE": cache, "AUTORESEARCH_TIME_BUDGET": 3} | environment
        with open(handle, "wb") as log:
            self.process = subprocess.Popen(
                [*prefix, sys.executable, code / script, *args],
                env=os.environ | {key: str(value) for key, value in own.items()},
                cwd=code,
                stdout=log,
                stderr=log,
            )

    @property
    def output(self):
        return self.log.read_text()

    def wait_for(self, text):
        """Until it is said or the process ends."""
        while text not in self.output and self.process.poll() is None:
            time.sleep(0.05)

    def kill(self):
        self.process.kill()
        self.process.wait()

    def finish(self):
        """Its exit code. A traceback is never what a user should read."""
        exit_code = self.process.wait(timeout=300)
        assert "Traceback" not in self.output, self.output
        return exit_code


@pytest.fixture
def start(code):
    """Function that starts a script; what still runs at the end of the test is killed."""
    started = []

    def call(*args, **options):
        process = Process(code, *args, **options)
        started.append(process)
        return process

    yield call
    for process in started:
        process.kill()


@pytest.fixture
def run(start):
    """Function that runs a script to its end."""

    def call(*args, **options):
        process = start(*args, **options)
        process.finish()
        return process

    return call


def code_of(process):
    return process.process.returncode


@dataclass
class Whole:
    """A finished cache, and how long each script takes."""

    cache: Path
    preparation: float
    training: float


@pytest.fixture(scope="module")
def whole(code):
    seconds = []
    with tempfile.TemporaryDirectory() as cache:
        for script in ("prepare.py", "train.py"):
            begun = time.monotonic()
            process = Process(code, script, cache)
            assert process.finish() == 0, process.output
            seconds.append(time.monotonic() - begun)
        yield Whole(Path(cache), *seconds)


@pytest.fixture
def empty():
    """The folder of a cache to be."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@pytest.fixture
def copy(whole, empty):
    """The whole cache once more, with the times of its files."""
    shutil.copytree(whole.cache / "small", empty / "small")
    return empty


def made(cache):
    """What a preparation made, as the manifest has it: names, sizes, hashes."""
    return json.loads((cache / "small" / "manifest.json").read_text())["files"]


def finished(cache):
    """{file: identity} of all that a later preparation has no reason to touch."""
    files = [path for path in (cache / "small").glob("*/*") if path.is_file()]
    kept = [path for path in files if path.suffix != ".tmp"]
    return {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in kept}


def records(folder):
    """Every record of a run there; none may be half of one."""
    found = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    assert all({"val_bpb", "integrity", "train"} <= record.keys() for record in found)
    return found


def without_leftovers(cache):
    """Whether no temporary file stays; a worker of a killed preparer may be at its last."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        if not list(cache.rglob("*.tmp")):
            return True
        time.sleep(0.5)
    return False


# ---- Kills ----
@pytest.mark.parametrize("share", [0.05, 0.2, 0.35, 0.5, 0.65, 0.8, 0.95])
def test_a_killed_preparation_is_gone_on_with(whole, empty, start, run, share):
    """The same files come of it, and nothing is done twice."""
    process = start("prepare.py", empty)
    time.sleep(share * whole.preparation)
    process.kill()
    before = finished(empty)
    assert code_of(run("train.py", empty)) in (0, 2)  # 0: it was killed after its last line
    assert code_of(run("prepare.py", empty)) == 0
    assert made(empty) == made(whole.cache)
    assert finished(empty).items() >= before.items()
    assert without_leftovers(empty)


@pytest.mark.parametrize("share", [0.1, 0.4, 0.7, 0.95])
def test_a_killed_run_leaves_nothing_behind(whole, tmp_path, start, run, share):
    process = start("train.py", whole.cache, AUTORESEARCH_RUNS=tmp_path)
    time.sleep(share * whole.training)
    process.kill()
    before = len(records(tmp_path))
    assert code_of(run("train.py", whole.cache, AUTORESEARCH_RUNS=tmp_path)) == 0
    assert len(records(tmp_path)) == before + 1
    verified = run("prepare.py", whole.cache, "--verify")
    assert code_of(verified) == 0 and verified.output.startswith("verified: ")


# ---- Disks ----
class Disk:
    def __init__(self, folder):
        self.folder = folder

    def mount(self, *options):
        command = ["mount", "-t", "tmpfs", "-o", ",".join(options), "none", self.folder]
        return subprocess.run(command, capture_output=True).returncode == 0

    def resize(self, size):
        assert self.mount("remount", f"size={size}")


@pytest.fixture
def disk(tmp_path):
    """A disk of 16 MB."""
    if shutil.which("mount") is None:
        pytest.skip("there is no mount")
    disk = Disk(tmp_path / "disk")
    disk.folder.mkdir()
    if not disk.mount("size=16m"):
        pytest.skip("no right to mount a tmpfs")
    yield disk
    subprocess.run(["umount", "--lazy", disk.folder], check=True)


@pytest.mark.parametrize("size", ["16m", "40m", "70m"])
def test_a_preparation_that_fills_the_disk_is_gone_on_with(whole, disk, run, size):
    disk.resize(size)
    failed = run("prepare.py", disk.folder)
    assert code_of(failed) == 2 and "No space left" in failed.output
    assert failed.output.splitlines()[-1].startswith("error: ")
    disk.resize("1g")
    assert code_of(run("prepare.py", disk.folder)) == 0
    assert made(disk.folder) == made(whole.cache)
    assert not list(disk.folder.rglob("*.tmp"))


def test_a_run_whose_disk_fills_says_its_score(whole, disk, start):
    disk.resize("300m")
    shutil.copytree(whole.cache / "small", disk.folder / "small")
    process = start("train.py", disk.folder, AUTORESEARCH_TIME_BUDGET=10)
    process.wait_for("\nstep ")
    with pytest.raises(OSError), open(disk.folder / "filler", "wb", buffering=0) as file:
        while file.write(bytes(1 << 12)):
            pass
    assert process.finish() == 2
    assert re.search(r"^val_bpb: \d\.\d{6}$", process.output, re.M)
    last = process.output.splitlines()[-1]
    assert "No space left" in last and last.endswith("the score above has no complete record.")
    assert not list((disk.folder / "runs").iterdir())


@pytest.fixture
def read_only(copy):
    """(a cache that may not be written, the words before a command that make it so for root)"""
    prefix = ()
    if os.geteuid() == 0:
        if shutil.which("setpriv") is None:
            pytest.skip("root may write anything without setpriv")
        prefix = ("setpriv", "--bounding-set=-dac_override")
    paths = [copy, *copy.rglob("*")]
    for path in paths:
        path.chmod(0o555 if path.is_dir() else 0o444)
    yield copy, prefix
    for path in paths:
        path.chmod(0o755)


def test_a_read_only_cache_serves_runs(read_only, tmp_path, run):
    cache, prefix = read_only
    done = run("train.py", cache, prefix=prefix, AUTORESEARCH_RUNS=tmp_path)
    assert code_of(done) == 0 and len(records(tmp_path)) == 1


def test_a_run_without_a_place_for_its_record_ends_at_once(read_only, run):
    cache, prefix = read_only
    begun = time.monotonic()
    done = run("train.py", cache, prefix=prefix, AUTORESEARCH_TIME_BUDGET=300)
    assert time.monotonic() - begun < 120
    assert code_of(done) == 2 and "set AUTORESEARCH_RUNS" in done.output
    assert done.output.count("\n") == 1


def test_a_read_only_cache_is_found_ready(read_only, run):
    cache, prefix = read_only
    done = run("prepare.py", cache, prefix=prefix)
    assert code_of(done) == 0
    assert [line.split(": ")[0] for line in done.output.splitlines()] == ["profile", "ready"]


# ---- Clock ----
def test_a_clock_that_is_set_back_changes_nothing(whole, tmp_path, start):
    library = next(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"), None)
    if library is None:
        pytest.skip("there is no libfaketime")
    offset = tmp_path / "offset"
    offset.write_text("+0")
    fake = {
        "LD_PRELOAD": library,
        "FAKETIME_TIMESTAMP_FILE": offset,
        "FAKETIME_NO_CACHE": 1,
        "DONT_FAKE_MONOTONIC": 1,
    }
    runs = tmp_path / "runs"
    own = {"AUTORESEARCH_RUNS": runs, "AUTORESEARCH_TIME_BUDGET": 8}
    process = start("train.py", whole.cache, **own, **fake)
    process.wait_for("\nstep ")
    offset.write_text("-3600")
    assert process.finish() == 0
    [record] = records(runs)
    assert 7 < record["training_seconds"] < 8.2
    [path] = runs.iterdir()
    named = time.mktime(time.strptime(path.name.split("_")[0], "%Y%m%dT%H%M%S"))
    assert abs(time.time() - named - 3600) < 60


# ---- Many at once ----
def test_preparers_and_trainers_on_an_empty_cache(whole, empty, start, run):
    preparers = [start("prepare.py", empty) for _ in range(2)]
    trainers = [start("train.py", empty) for _ in range(3)]
    assert [process.finish() for process in preparers] == [0, 0]
    codes = [process.finish() for process in trainers]
    assert set(codes) <= {0, 2}
    assert made(empty) == made(whole.cache) and not list(empty.rglob("*.tmp"))
    assert len(records(empty / "runs")) == codes.count(0)


def test_preparers_and_trainers_on_a_whole_cache(copy, start):
    before = finished(copy)
    scripts = ["prepare.py"] * 2 + ["train.py"] * 3
    processes = [start(script, copy) for script in scripts]
    assert [process.finish() for process in processes] == [0] * 5
    assert len(records(copy / "runs")) == 3
    assert finished(copy).items() >= before.items()


# ---- Files ----
def test_a_truncated_token_file_is_refused_and_mended(whole, copy, run):
    flat = min((copy / "small" / "tokens").glob("*.bin"))
    os.truncate(flat, flat.stat().st_size // 2)
    refused = run("train.py", copy)
    assert code_of(refused) == 2 and str(flat) in refused.output
    assert code_of(run("prepare.py", copy)) == 0
    assert made(copy) == made(whole.cache)
    assert code_of(run("train.py", copy)) == 0


def test_a_replaced_shard_is_found_and_mended(whole, copy, run):
    first, second, *_ = sorted((copy / "small" / "data").glob("*.parquet"))
    shutil.copy(second, first)
    found = run("prepare.py", copy, "--verify")
    assert code_of(found) == 3 and f"{first} is not as recorded" in found.output
    assert code_of(run("prepare.py", copy)) == 0
    assert made(copy) == made(whole.cache)
    assert code_of(run("prepare.py", copy, "--verify")) == 0
