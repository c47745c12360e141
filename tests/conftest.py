"""Fixtures for all tests: a prepared cache, and prepare.py as a new process finds it."""

from tests.common import CACHE, ROOT, make_corpus, run_script  # first: it sets the environment

import fcntl
import shutil

import hypothesis
import pytest

hypothesis.settings.register_profile(
    "suite", deadline=None, derandomize=True, max_examples=60, database=None
)
hypothesis.settings.load_profile("suite")


def pytest_sessionfinish():
    shutil.rmtree(CACHE, ignore_errors=True)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="session")
def cache(corpus, tmp_path_factory, worker_id):
    """Prepares the session's cache by a real run of prepare.py; other workers get a copy of it."""
    folder = tmp_path_factory.getbasetemp()
    shared = (folder if worker_id == "master" else folder.parent) / "prepared"
    with open(f"{shared}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if shared.exists():
            shutil.copytree(shared, CACHE, dirs_exist_ok=True)
        else:
            done = run_script(ROOT / "prepare.py", "--data-dir", corpus)
            assert done.returncode == 0, done.output
            shutil.copytree(CACHE, shared)
    return CACHE


@pytest.fixture
def own_cache(cache, tmp_path, monkeypatch):
    """Gives this process, and those it starts, a copy of the cache that a test may spoil."""
    import prepare  # late, since the process that only hands out the tests needs no torch

    folder = tmp_path / "own-cache"
    shutil.copytree(cache / "small", folder / "small")
    monkeypatch.setenv("AUTORESEARCH_CACHE", str(folder))
    monkeypatch.setattr(prepare, "CACHE", folder)
    monkeypatch.setattr(prepare, "PREPARED", folder / "small")
    return folder


@pytest.fixture
def fresh_run(monkeypatch):
    """Resets prepare.py to what a new process finds: nothing started, nothing scored. All tests run
    in one script, pytest, so locking its folder is switched off."""
    import prepare

    monkeypatch.setattr(prepare, "_run", prepare.Run())
    monkeypatch.setattr(prepare, "_opened", set())
    monkeypatch.setattr(prepare, "_imported", prepare._now())
    prepare.begin_run.cache_clear()
    prepare.current_commit.cache_clear()
    monkeypatch.setattr(prepare, "lock", lambda folder: True)
    return prepare._run
