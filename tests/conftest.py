"""Shared by all tests: the small profile, a cache of the test session's own, one thread, made-up corpora."""

import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

# Before prepare.py is imported: it reads its environment once. Threads that compete for a core cost up to 13 times.
CACHE = tempfile.mkdtemp(prefix="autoresearch-tests-")
for name in (
    "SEED",
    "AUTORESEARCH_TIME_BUDGET",
    "AUTORESEARCH_RUNS",
    "AUTORESEARCH_SHARED_GPU",
    "HF_ENDPOINT",
    "HF_HUB_OFFLINE",
):
    os.environ.pop(name, None)
os.environ |= {
    "AUTORESEARCH_PROFILE": "small",
    "AUTORESEARCH_CACHE": CACHE,
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(Path(__file__).resolve().parents[1]),
}

import prepare

import hypothesis
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
torch.set_num_threads(1)
hypothesis.settings.register_profile("suite", deadline=None, derandomize=True, max_examples=60, database=None)
hypothesis.settings.load_profile("suite")


def make_texts(count, seed=0, words=120):
    """English-looking documents from a small vocabulary, with accents, digits and blanks that try the byte counts."""
    rng = random.Random(1234)
    stems = ["".join(rng.choices("abcdefghiklmnoprstuvw", k=rng.randint(2, 9))) for _ in range(60)]
    stems += ["café", "naïve", "Ω", "日本語", "1234567", "\n\n", "🙂"]
    rng = random.Random(seed)
    return [" ".join(rng.choices(stems, k=rng.randint(words // 3, words))) for _ in range(count)]


def write_parquet(path, texts, column="text", kind=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({column: pa.array(texts, kind)}), path)


def make_corpus(folder, train=(1500, 1500), val=600):
    """A folder of shards as --data-dir takes it."""
    for i, count in enumerate((*train, val)):
        write_parquet(folder / f"shard_{i:05d}.parquet", make_texts(count, seed=i))
    return folder


def run_script(script, *args, cwd=ROOT, prefix=(), **environment):
    """A fresh process, without the variables that are None; returns the finished one, with all it said in `output`."""
    command = [*prefix, sys.executable, str(script), *map(str, args)]
    environment = {key: str(value) for key, value in (os.environ | environment).items() if value is not None}
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment, timeout=120)
    done.output = done.stdout + done.stderr
    return done


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="session")
def cache(corpus):
    """The session's cache, prepared by a real run of prepare.py."""
    done = run_script(ROOT / "prepare.py", "--data-dir", corpus)
    assert done.returncode == 0, done.output
    return Path(CACHE)


@pytest.fixture
def fresh_run(monkeypatch):
    """The ruler as a new process finds it: no clock started, nothing scored."""
    clean = {"stopped": None, "scored": None, "val_bpb": None, "served": [], "code": (), "beside": []}
    monkeypatch.setattr(prepare, "_run", type(prepare._run)(imported=prepare._now(), **clean))
    return prepare._run


def make_rows():
    """Packed rows of a made-up vocabulary, uint16 [64, 65], and the bytes of its 96 tokens; token 95 is special."""
    rng = np.random.default_rng(0)
    table = np.append(rng.integers(1, 6, 95), 0).astype(np.int32)
    return rng.integers(0, 96, (64, 65)).astype(np.uint16), table


@pytest.fixture
def rows():
    return make_rows()
