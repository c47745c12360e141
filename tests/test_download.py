"""Downloads ClimbMix from a local HTTP server through HF_ENDPOINT: only whole files are kept."""

import contextlib
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import prepare
from tests.common import ROOT, make_texts, run_script, write_parquet
from tests.test_data import contents, refusal, run_prepare

import numpy as np
import pytest

VAL = "shard_06542.parquet"
ENOUGH = ("--num-shards", 2)


class Hub:
    """Serves shards. `faults`, {shard: function(attempt)}, may return another (status, body,
    Content-Length)."""

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
                fault = name in hub.faults and hub.faults[name](hub.requests[name])
                status, body, length = fault or (200, hub.shards[name], len(hub.shards[name]))
                self.send_response(status)
                if length:
                    self.send_header("Content-Length", str(length))
                self.end_headers()
                self.wfile.write(body)
                self.close_connection = True

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """Makes three training shards and the validation shard, with enough text for 32 rows."""
    folder = tmp_path_factory.mktemp("hub")
    for i in range(3):
        write_parquet(folder / f"shard_{i:05d}.parquet", make_texts(60 + i, seed=i))
    write_parquet(folder / VAL, make_texts(1000, seed=9))
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.fixture
def hub(shards, tmp_path, monkeypatch):
    hub = Hub(shards)
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{hub.server.server_port}")
    for name, path in {"CACHE": "", "SHARDS": "data", "PREPARED": "small"}.items():
        monkeypatch.setattr(prepare, name, tmp_path / path)
    monkeypatch.setattr(prepare, "WAITS", (0, 0.001, 0.001))
    yield hub
    hub.server.shutdown()
    hub.server.server_close()


def whole(shards):
    return {f"data/{name}": body for name, body in shards.items()}


# ---- Downloads ----
def test_whole_shards_are_not_fetched_again(hub, shards, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data/shard_00001.parquet").write_bytes(shards["shard_00001.parquet"][:-100])
    for _ in range(2):
        paths = prepare.climbmix(3)
        assert paths[-1] == tmp_path / "data" / VAL and len(paths) == 4
        assert contents(tmp_path) == whole(shards)
        assert set(hub.requests.values()) == {1}


@pytest.mark.parametrize("count", [-1, 10])
def test_validation_is_never_trained_on(hub, tmp_path, monkeypatch, count):
    monkeypatch.setattr(prepare, "CLIMBMIX_VAL", 2)
    assert [path.name for path in prepare.climbmix(count)] == [*hub.shards][:3]
    assert set(contents(tmp_path / "data")) == {*hub.shards} - {VAL}


def test_faults_that_pass_are_overcome(hub, shards, tmp_path):
    half = shards["shard_00000.parquet"][:5000]
    replies = {1: (200, half, 2 * len(half)), 2: (200, half, None)}
    hub.faults["shard_00000.parquet"] = replies.get
    prepare.climbmix(3)
    assert contents(tmp_path) == whole(shards) and hub.requests["shard_00000.parquet"] == 3


def test_an_unavailable_shard_is_named_and_the_others_are_kept(hub, shards, tmp_path, capsys):
    name = "shard_00001.parquet"
    others = whole({other: shards[other] for other in ("shard_00000.parquet", VAL)})

    def fault(attempt):
        """Waits until the others are there."""
        while True:
            with contextlib.suppress(FileNotFoundError):  # renamed while it was read
                if others.items() <= contents(tmp_path).items():
                    break
            time.sleep(0.01)
        return 200 if attempt < 3 else 404, b"<html>please log in</html>", None

    hub.faults[name] = fault
    error = refusal(capsys, run_prepare, *ENOUGH)
    assert name in error and "(HTTPError: 404" in error and "or use --corpus python" in error
    assert "/datasets/" in error  # the end of requests' message
    assert hub.requests[name] == len(prepare.WAITS)
    assert contents(tmp_path) == others  # nothing half-done is left behind
    hub.faults = {}
    run_prepare(*ENOUGH)
    assert hub.requests == {"shard_00000.parquet": 1, VAL: 1, name: len(prepare.WAITS) + 1}


@pytest.mark.parametrize(
    ("variable", "value", "cause"),
    [
        ("HF_ENDPOINT", "hub.example", "No scheme supplied"),
        ("REQUESTS_CA_BUNDLE", "/none.pem", "CA certificate bundle, invalid path: /none.pem"),
        ("HTTPS_PROXY", "http://127.0.0.1:9", "Connection refused"),
        ("HTTPS_PROXY", "socks5://127.0.0.1:9", "Missing dependencies for SOCKS"),
    ],
)
def test_a_failed_download_names_its_cause(hub, monkeypatch, capsys, variable, value, cause):
    monkeypatch.setenv("HF_ENDPOINT", "https://hub.example")
    monkeypatch.setenv(variable, value)
    error = refusal(capsys, run_prepare, *ENOUGH)
    assert cause in error and "run the same command to go on" in error
    assert "network" not in error and "free space" not in error


# ---- Choice of shards ----
def test_the_last_choice_of_shards_holds(hub, monkeypatch):
    run_prepare("--num-shards", 3)
    run_prepare("--num-shards", 2)
    assert len(np.load(prepare.PREPARED / "train.npy")) == 60 + 61 + 1
    with monkeypatch.context() as patch:
        patch.setattr(prepare, "build", None)
        run_prepare()
    (prepare.PREPARED / "val.u16").unlink()
    run_prepare()
    assert len(prepare.load_manifest()["shards"]) == 2 and set(hub.requests.values()) == {1}


def test_a_cache_of_the_reference_is_used_and_nothing_in_it_touched(hub, shards, tmp_path):
    """This is how karpathy/autoresearch leaves it, with validation next to the rest."""
    before = {f"data/{name}": body for name, body in shards.items()} | {
        "tokenizer/tokenizer.tiktoken": b"of somebody",
        "data/.shard_00007.parquet.7.tmp": b"half of one",
        "manifest.json": b"{}",
    }
    for name, body in before.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(body)
    run_prepare(*ENOUGH)
    assert not hub.requests
    after = contents(tmp_path)
    assert after.items() >= before.items()
    assert {*after} - {*before} == {f"small/{name}" for name in (*prepare.FILES, "manifest.json")}


# ---- Two at once ----
def test_two_preparers_at_once_do_the_work_once(hub, tmp_path):
    script = (ROOT / "prepare.py", *ENOUGH)
    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(run_script, *script, AUTORESEARCH_CACHE=tmp_path) for _ in range(2)]
    results = [job.result() for job in jobs]
    assert [done.returncode for done in results] == [0, 0], [done.output for done in results]
    assert sum("training a tokenizer" in done.stdout for done in results) == 1
    assert set(hub.requests.values()) == {1}
