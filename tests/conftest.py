"""Fixtures of all tests: a prepared cache, a ruler as a new process finds it, made-up rows."""

from tests.common import CACHE, ROOT, make_corpus, run_script  # first: it sets the environment

import prepare

import hypothesis
import numpy as np
import pytest
import torch

torch.set_num_threads(1)
hypothesis.settings.register_profile(
    "suite", deadline=None, derandomize=True, max_examples=60, database=None
)
hypothesis.settings.load_profile("suite")


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="session")
def cache(corpus):
    """The session's cache, prepared by a real run of prepare.py."""
    done = run_script(ROOT / "prepare.py", "--data-dir", corpus)
    assert done.returncode == 0, done.output
    return CACHE


@pytest.fixture
def fresh_run(monkeypatch):
    """The ruler as a new process finds it: no clock started, nothing scored."""
    clean = {"stopped": None, "scored": None, "val_bpb": None, "served": [], "code": (), "beside": []}
    monkeypatch.setattr(prepare, "_run", type(prepare._run)(imported=prepare._now(), **clean))
    return prepare._run


def make_rows():
    """Packed rows of a made-up vocabulary, uint16 [64, 65], and the bytes of its 96 tokens; token
    95 is special."""
    rng = np.random.default_rng(0)
    table = np.append(rng.integers(1, 6, 95), 0).astype(np.int32)
    return rng.integers(0, 96, (64, 65)).astype(np.uint16), table


@pytest.fixture
def rows():
    return make_rows()
