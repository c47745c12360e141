"""Downloads ClimbMix from a local HTTP server through HF_ENDPOINT: only whole files are kept."""

import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import prepare
from tests.common import make_texts, write_parquet
from tests.test_data import contents, refusal, run_prepare

import pytest

VAL = "shard_06542.parquet"
NUMBERS = ("00000", "00001", "00002", "06542")


class Hub:
    """Serves shards. `faults`, {shard: function(attempt)}, may return another (status, body,
    Content-Length)."""

    def __init__(self, shards):
        self.shards = shards
        self.faults = {}
        self.requests = Counter()
        self.tokens = set()
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):  # noqa: N802
                name = self.path.rpartition("/")[2]
                hub.requests[name] += 1
                hub.tokens.add(self.headers.get("Authorization"))
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
    """Makes three training shards and the validation shard, with enough text for 16 rows."""
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
    monkeypatch.setattr(prepare, "RETRY_SECONDS", 0)
    yield hub
    hub.server.shutdown()
    hub.server.server_close()


def test_shards_are_fetched_once(hub, shards, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    for _ in range(2):
        paths = prepare.climbmix(3)
        assert paths[-1] == tmp_path / "data" / VAL and len(paths) == 4
        assert contents(tmp_path / "data") == shards
        assert set(hub.requests.values()) == {1}
    assert hub.tokens == {"Bearer hf_secret"}


@pytest.mark.parametrize("count", [-1, 10])
def test_validation_is_never_trained_on(hub, tmp_path, monkeypatch, count):
    monkeypatch.setattr(prepare, "CLIMBMIX_VAL", 2)
    assert [path.name for path in prepare.climbmix(count)] == [*hub.shards][:3]
    assert set(contents(tmp_path / "data")) == {*hub.shards} - {VAL}


def test_faults_that_pass_are_overcome(hub, shards, tmp_path):
    """A busy hub, a body that is cut off, and one of no announced length, whose end is missing."""
    body = shards["shard_00000.parquet"]
    half = body[: len(body) // 2]
    replies = {1: (429, b"", None), 2: (503, b"", None), 3: (200, half, len(body))}
    hub.faults["shard_00000.parquet"] = replies.get
    hub.faults["shard_00001.parquet"] = {1: (200, half, None)}.get
    prepare.climbmix(3)
    assert contents(tmp_path / "data") == shards
    assert hub.requests == {f"shard_{i}.parquet": n for i, n in zip(NUMBERS, (4, 2, 1, 1))}


@pytest.mark.parametrize(
    ("fault", "words", "attempts"),
    [
        ((404, b"", None), "download: 404 Client Error", 4),
        ((503, b"", None), "download: 503 Server Error", 4),
        ((200, b"<html>please log in</html>", None), "download: Parquet", 4),
    ],
)
def test_the_others_are_kept_if_one_shard_is_not_to_be_had(
    hub, tmp_path, capsys, fault, words, attempts
):
    name = "shard_00001.parquet"
    others = ("shard_00000.parquet", VAL)

    def reply(attempt):
        while not all((tmp_path / "data" / other).exists() for other in others):
            time.sleep(0.01)
        return fault

    hub.faults[name] = reply
    error = refusal(capsys, run_prepare, "--num-shards", 2)
    assert words in error and "run the same command to go on, or use --corpus python" in error
    assert hub.requests[name] == attempts
    assert name not in contents(tmp_path / "data")
    hub.faults = {}
    run_prepare("--num-shards", 2)
    assert hub.requests == {"shard_00000.parquet": 1, VAL: 1, name: attempts + 1}
