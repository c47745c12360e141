"""Helpers for several test files: the suite's environment, made-up corpora, real runs."""

import contextlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# These are set before prepare.py is imported, since it reads them once, at import.
CACHE = Path(tempfile.mkdtemp(prefix="autoresearch-tests-"))
# Without bytecode each of 60 processes takes four seconds more to import torch. In a hook git names
# the user's own repository.
for name in """
    SEED AUTORESEARCH_TIME_BUDGET AUTORESEARCH_RUNS HF_ENDPOINT HF_HUB_OFFLINE
    PYTHONDONTWRITEBYTECODE GIT_DIR GIT_WORK_TREE GIT_INDEX_FILE LANGUAGE
""".split():
    os.environ.pop(name, None)
os.environ |= {
    "AUTORESEARCH_PROFILE": "small",
    "AUTORESEARCH_CACHE": str(CACHE),
    "CUDA_VISIBLE_DEVICES": "",
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "LC_ALL": "C.UTF-8",
    "no_proxy": "127.0.0.1",
    "OMP_NUM_THREADS": "1",  # threads that compete for a core take up to 13 times as long
    "PYTHONPATH": str(ROOT),
}

import pyarrow as pa  # noqa: E402
import pyarrow.parquet as pq  # noqa: E402


# ---- Processes ----
def processes_in(folder):
    """Returns pairs of id and command of all processes that work in a folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or it is not ours
            if os.readlink(process / "cwd") == str(folder):
                command = (process / "cmdline").read_text().split("\0")[0]
                found.append((int(process.name), command))
    return found


def wait_until(condition, seconds):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.02)


# ---- Corpora ----
def make_texts(count, seed=0, words=120):
    """Makes documents that look like English; accents, digits and blanks test the byte counts."""
    rng = random.Random(1234)
    letters = "abcdefghiklmnoprstuvw"
    stems = ["".join(rng.choices(letters, k=rng.randint(2, 9))) for _ in range(60)]
    stems += ["café", "naïve", "Ω", "日本語", "1234567", "\n\n", "🙂"]
    rng = random.Random(seed)
    return [" ".join(rng.choices(stems, k=rng.randint(words // 3, words))) for _ in range(count)]


def write_parquet(path, texts, column="text", kind=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({column: pa.array(texts, kind)}), path)


def make_corpus(folder, train=(1500, 1500), val=600):
    """Fills a folder with shards for --data-dir."""
    for i, count in enumerate((*train, val)):
        write_parquet(folder / f"shard_{i:05d}.parquet", make_texts(count, seed=i))
    return folder


# ---- Processes ----
def run_script(script, *args, cwd=ROOT, prefix=(), stdin=None, **environment):
    """Runs a script in a fresh process, without the variables that are None. The result's `output`
    is all that it printed."""
    command = [*prefix, sys.executable, str(script), *map(str, args)]
    merged = os.environ | environment
    merged = {key: str(value) for key, value in merged.items() if value is not None}
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=cwd, env=merged, input=stdin, timeout=120
    )
    done.output = done.stdout + done.stderr
    return done


# As sitecustomize.py this ends a process with exit code 99 once it reaches for the network.
GUARD = """
import os, socket

def forbidden(*_, **__):
    os.write(2, b"NETWORK")
    os._exit(99)

socket.socket.connect = socket.socket.connect_ex = socket.getaddrinfo = forbidden
"""

# prepare.py takes this for a train.py. Before the evaluation it waits for a line on stdin.
LITTLE = """
import prepare, torch
next(prepare.make_dataloader(None, 4, 64))
print("begun", flush=True)
input()
size = prepare.Tokenizer.from_directory().get_vocab_size()
prepare.evaluate_bpb(torch.nn.Embedding(size, size), None, 32)
"""


def substitute(source, knobs):
    """Returns the source of train.py with each knob's line changed, as an agent does it."""
    for name, value in knobs.items():
        line = re.compile(rf"^({name}\s*=).*?(\s*#.*)?$", re.M)
        source, count = line.subn(rf"\1 {value}\2", source, count=1)
        assert count == 1, f"train.py has no knob {name}"
    return source


TINY = {
    "DEPTH": 2,
    "ASPECT_RATIO": 32,
    "HEAD_DIM": 32,
    "TOTAL_BATCH_SIZE": 2048,
    "DEVICE_BATCH_SIZE": 4,
    "COMPILE": False,
    "WINDOW_PATTERN": '"SL"',
}


def edited(folder, replace=(), **knobs):
    """Copies the scripts into a folder, changes knobs of train.py and then replaces texts in it:
    `replace` holds pairs (old, new). Returns the path of train.py."""
    shutil.copytree(ROOT / "tools", folder / "tools")
    shutil.copy(ROOT / "prepare.py", folder)
    source = substitute((ROOT / "train.py").read_text(), TINY | knobs)
    for old, new in replace:
        assert old in source, old
        source = source.replace(old, new)
    (folder / "train.py").write_text(source)
    return folder / "train.py"


def train(script, seconds=1, prefix=(), **environment):
    """Runs train.py. The result's `records` are what its runs folder then holds."""
    runs = script.parent / "runs"
    own = {"AUTORESEARCH_TIME_BUDGET": seconds, "AUTORESEARCH_RUNS": runs} | environment
    done = run_script(script, cwd=script.parent, prefix=prefix, **own)
    done.records = [
        json.loads(path.read_text()) for path in own["AUTORESEARCH_RUNS"].glob("*.json")
    ]
    return done
