"""The slow tests. A tiny model trains for two seconds without compilation.

    uv run pytest -m faults -n0 -s     kills preparations and runs: what does each leave behind?
    uv run pytest -m redteam -n0 -s    runs honest and mistaken edits of train.py

To try another edit, add an entry to EDITS.
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
from types import SimpleNamespace

import prepare
from tests.common import edited, make_corpus, train
from tests.test_report import parse_block

import pytest

KILLS = 20


# ---- Processes and caches ----
def start(code, script, cache, *args):
    own = {"AUTORESEARCH_CACHE": str(cache), "AUTORESEARCH_TIME_BUDGET": "2"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    command = [sys.executable, script, *args]
    return subprocess.Popen(command, env=os.environ | own, cwd=code, **pipes)


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
    """Returns `data` of what is prepared. Checks all of its hashes."""
    folder = cache / "small"
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
    number = rng.choice((signal.SIGKILL, signal.SIGTERM, signal.SIGINT))
    process.send_signal(number)
    said += process.communicate()[0]
    exit_code = process.returncode
    # 0: it had ended already. SIGINT gives 130 with our message, or Python's own -2 without.
    assert exit_code in (0, -number, 130), said
    print(f"{number.name:7} after {moment:4.1f} s: exit {exit_code:3}", end="")
    return exit_code, said


@pytest.mark.faults
def test_killed_preparations(code, whole, copy):
    """Prepares one corpus and the other in turn: what is left is one of the two."""
    rng = random.Random(time.time_ns())
    expected = {made(cache): i for i, cache in enumerate(whole.caches)}
    print()
    for i in range(KILLS):
        process = start(code, "prepare.py", copy, "--data-dir", whole.corpora[(i + 1) % 2])
        kill(process, whole.preparation, rng)
        print(f", left: {expected[made(copy)]}")
    assert run(code, "prepare.py", copy, "--data-dir", whole.corpora[1])[0] == 0
    assert expected[made(copy)] == 1
    assert run(code, "train.py", copy)[0] == 0
    assert {path.name for path in copy.iterdir()} == {"small", "runs"}


@pytest.mark.faults
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


# ---- Nothing broken ----
@pytest.mark.faults
def test_the_embedded_corpus_is_prepared_and_trained_on(code, tmp_path):
    ended, last, _ = run(code, "prepare.py", tmp_path)
    ready = r"ready: small profile, [1-9]\d\.\d million training tokens .*, 512 validation rows of "
    assert ended == 0 and re.search(ready + "python; ", last)
    assert run(code, "train.py", tmp_path)[0] == 0


# ---- Edits of train.py. test_metric.py has tricks of a model alone, test_report.py all flags ----
LOADER = "    loader = make_dataloader(tokenizer, rows, MAX_SEQ_LEN)\n"
PACK = "        batches = list(itertools.islice(loader, micro_batches))  # while a GPU is busy\n"
EMBED = "        x = norm(look_up(self.wte, idx).to(self.config.dtype))\n"

BY_LENGTH = """\
    short = make_dataloader(tokenizer, 2 * rows, MAX_SEQ_LEN // 2)
    full = make_dataloader(tokenizer, rows, MAX_SEQ_LEN)
    loader = iter(lambda: next(short if elapsed() < TIME_BUDGET / 2 else full), None)
"""
GROWING = PACK.replace("micro_batches)", "micro_batches * (1 + (progress > 0.5)))")
LEAK = EMBED + "        x = x if self.training else x + x.roll(-1, 1)\n"

EDITS = {  # name: (pairs (text of train.py, its replacement), exit code, pattern of `integrity`)
    "none": ([], 0, "ok"),
    "lengths that grow": ([(LOADER, BY_LENGTH)], 0, "ok"),
    "a batch that grows": ([(PACK, GROWING)], 0, "ok"),
    "a leak only in evaluation": ([(EMBED, LEAK)], 3, "FAIL causality: .*"),
}


@pytest.fixture(scope="module")
def honest(cache, tmp_path_factory):
    """Returns the score of a run without an edit."""
    [record] = train(edited(tmp_path_factory.mktemp("honest") / "code"), 2).records
    return record["val_bpb"]


@pytest.mark.redteam
@pytest.mark.parametrize("name", EDITS)
def test_an_edited_run_ends_as_it_must(name, honest, tmp_path):
    replace, code, says = EDITS[name]
    done = train(edited(tmp_path / "code", replace), 2)
    block = parse_block(done.stdout)
    told = block.get("integrity", "")
    print(f"| {name} | {done.returncode} | {block.get('val_bpb')} | {told} |")
    assert done.returncode == code, done.output
    assert re.fullmatch(says, told), told
    scores = [record["val_bpb"] for record in done.records]
    if code == 0:
        assert [f"{score:.6f}" for score in scores] == [block["val_bpb"]]
        assert 0.8 * honest < scores[0] < 1.25 * honest
    else:
        assert not scores and block["val_bpb"] == "nan"
