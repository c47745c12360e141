"""ClimbMix from a local HTTP server through HF_ENDPOINT: what is whole is kept, what is not never
is."""

import socket
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import prepare
from tests.common import ROOT, make_texts, run_script, write_parquet
from tests.test_data import contents, run_prepare, times

import numpy as np
import pytest

VAL = "shard_06542.parquet"
ENOUGH = ("--corpus", "climbmix", "--num-shards", 2)


class Hub:
    """Serves shards; `faults` {shard: function(handler, body, attempt)} may answer in their
    stead."""

    def __init__(self, shards):
        self.shards = shards
        self.faults = {}
        self.requests = Counter()
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):  # noqa: N802
                name = self.path.rpartition("/")[2]
                hub.requests[name] += 1
                assert self.path == f"/datasets/{prepare.CLIMBMIX}/resolve/main/{name}"
                body = hub.shards.get(name)
                if name in hub.faults and hub.faults[name](self, body, hub.requests[name]):
                    return
                if body is None:
                    self.send_error(404)
                else:
                    answer(self, body, len(body))

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}"


def answer(handler, body, length=None):
    handler.send_response(200)
    if length is not None:
        handler.send_header("Content-Length", str(length))
    handler.end_headers()
    handler.wfile.write(body)
    handler.close_connection = True
    return True


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """Three of training and the one of validation, of enough text for 32 rows of any profile."""
    folder = tmp_path_factory.mktemp("hub")
    for i in range(3):
        write_parquet(folder / f"shard_{i:05d}.parquet", make_texts(60 + i, seed=i))
    write_parquet(folder / VAL, make_texts(1000, seed=9))
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.fixture
def hub(shards, tmp_path, monkeypatch):
    hub = Hub(dict(shards))
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    for name, path in {"CACHE": "", "DATA": "data", "VAL": "val", "ROOT": "small"}.items():
        monkeypatch.setattr(prepare, name, tmp_path / path)
    monkeypatch.setattr(prepare, "WAITS", (0, 0.001, 0.001))
    yield hub
    hub.server.shutdown()
    hub.server.server_close()


def dead_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def whole(shards, *without):
    folders = {name: "val" if name == VAL else "data" for name in shards}
    return {f"{folders[name]}/{name}": shards[name] for name in shards if name not in without}


# ---- Downloads ----
def test_fresh_download_keeps_validation_apart(hub, shards, tmp_path):
    paths = prepare.climbmix(3)
    assert contents(tmp_path) == whole(shards)
    assert paths[-1] == tmp_path / "val" / VAL and len(paths) == 4
    prepare.climbmix(3)
    assert set(hub.requests.values()) == {1}  # what is there is not asked for again


def test_a_shard_that_cannot_be_read_is_fetched_again(hub, shards, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data/shard_00001.parquet").write_bytes(shards["shard_00001.parquet"][:-100])
    prepare.climbmix(3)
    assert contents(tmp_path) == whole(shards)


@pytest.mark.parametrize("count", [-1, 2, 10])
def test_validation_is_never_trained_on(hub, tmp_path, monkeypatch, count):
    monkeypatch.setattr(prepare, "CLIMBMIX_VAL", 2)
    assert [path.name for path in prepare.climbmix(count)] == [*hub.shards][:3]
    assert set(contents(tmp_path / "data")) == {*hub.shards} - {"shard_00002.parquet", VAL}


def cut(announce):
    def fault(handler, body, attempt):
        length = len(body) if announce else None
        return attempt <= 2 and answer(handler, body[: len(body) // 2], length)

    return fault


def too_short(handler, body, attempt):
    return attempt <= 2 and answer(handler, body, len(body) - 10)


def html(handler, body, attempt):
    page = b"<html>please log in</html>" * 100
    return answer(handler, page, len(page))


def unavailable(handler, body, attempt):
    handler.send_error(503)
    return True


def unavailable_twice(handler, body, attempt):
    return attempt <= 2 and unavailable(handler, body, attempt)


FAULTS = {
    "cut": cut(announce=True),
    "cut, of unknown length": cut(announce=False),
    "announced too short": too_short,
    "503 twice": unavailable_twice,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_that_passes_is_overcome(hub, shards, tmp_path, fault):
    hub.faults["shard_00000.parquet"] = FAULTS[fault]
    prepare.climbmix(3)
    assert contents(tmp_path) == whole(shards) and hub.requests["shard_00000.parquet"] == 3


@pytest.mark.parametrize(
    ("fault", "reason"), [(html, "ShardError"), (unavailable, "503"), (None, "404")]
)
def test_a_shard_that_cannot_be_had_is_named_and_the_others_kept(
    hub, shards, tmp_path, capsys, fault, reason
):
    others = whole(shards, "shard_00001.parquet", "shard_00002.parquet")

    def last(handler, body, attempt):
        """Not before the others are there."""
        while contents(tmp_path) != others:
            time.sleep(0.01)
        return fault and fault(handler, body, attempt)

    hub.faults["shard_00001.parquet"] = last
    if not fault:
        del hub.shards["shard_00001.parquet"]
    with pytest.raises(SystemExit) as stop:
        run_prepare(*ENOUGH)
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.count("\n") == 1
    assert "shard_00001.parquet" in error and reason in error
    assert hub.requests["shard_00001.parquet"] == len(prepare.WAITS)
    assert contents(tmp_path) == others  # nothing half-done is left behind
    hub.shards, hub.faults = shards, {}
    run_prepare(*ENOUGH)
    assert sum(hub.requests.values()) == 2 + len(prepare.WAITS) + 1


def test_without_a_server_one_sentence_says_so(hub, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{dead_port()}")
    with pytest.raises(SystemExit) as stop:
        run_prepare(*ENOUGH)
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.count("\n") == 1
    assert "(ConnectionError: " in error and "--corpus python" in error
    assert not contents(tmp_path)


# ---- Choice of shards ----
def prepared_shards():
    return len(prepare.check_cache()["shards"])


def test_the_last_choice_of_shards_holds(hub, tmp_path):
    run_prepare("--num-shards", 3)
    run_prepare("--num-shards", 2)
    assert prepared_shards() == 2
    assert len(np.load(prepare.ROOT / "train.npy")) == 60 + 61 + 1
    before = times(tmp_path)
    run_prepare()
    assert times(tmp_path) == before  # all three shards are there, but two were chosen
    (prepare.ROOT / "val.u16").unlink()
    run_prepare()
    assert prepared_shards() == 2 and set(hub.requests.values()) == {1}


# ---- A cache of the reference ----
@pytest.fixture
def reference(hub, shards, tmp_path):
    """A cache as karpathy/autoresearch leaves it, in use by others."""
    files = {f"data/{name}": body for name, body in shards.items()} | {
        "tokenizer/tokenizer.pkl": b"pickled",
        "tokenizer/token_bytes.pt": b"a tensor",
        "tokenizer/tokenizer.tiktoken": b"of somebody",
        "data/.shard_00007.parquet.7.tmp": b"half of one",
        "manifest.json": b"{}",
    }
    cache = tmp_path / "reference"
    for name, body in files.items():
        (cache / name).parent.mkdir(parents=True, exist_ok=True)
        (cache / name).write_bytes(body)
    return cache


@pytest.mark.parametrize("missing", [None, VAL])
def test_a_cache_of_the_reference_is_used_and_nothing_in_it_touched(
    hub, shards, reference, missing
):
    if missing:
        (reference / "data" / missing).unlink()
    before = contents(reference)
    environment = {"AUTORESEARCH_CACHE": reference, "AUTORESEARCH_PROFILE": "medium"}
    if missing is None:
        environment["HF_ENDPOINT"] = f"http://127.0.0.1:{dead_port()}"
    done = run_script(ROOT / "prepare.py", "--num-shards", 2, **environment)
    assert done.returncode == 0, done.output
    assert "ready: medium profile, 2 training shards; " in done.stdout
    assert hub.requests == Counter([missing] if missing else [])
    after = contents(reference)
    assert after.items() >= before.items()
    new = {name for name in after if name not in before}
    made = {f"medium/{name}" for name in (*prepare.FILES, "manifest.json")}
    assert new == made | ({f"val/{VAL}"} if missing else set())


# ---- Two at once ----
def test_two_preparers_at_once_do_the_work_once(hub, tmp_path):
    environment = {"AUTORESEARCH_CACHE": tmp_path / "cache", "HF_ENDPOINT": hub.url}
    with ThreadPoolExecutor(2) as pool:
        jobs = [
            pool.submit(run_script, ROOT / "prepare.py", *ENOUGH, **environment) for _ in range(2)
        ]
        results = [job.result() for job in jobs]
    assert [done.returncode for done in results] == [0, 0], [done.output for done in results]
    assert sum("training a tokenizer" in result.stdout for result in results) == 1
    assert set(hub.requests.values()) == {1}
