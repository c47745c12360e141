"""Downloads ClimbMix from a local HTTP server through HF_ENDPOINT: only whole files are kept."""

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
NUMBERS = ("00000", "00001", "00002", "06542")
ENOUGH = ("--num-shards", 2)


class Hub:
    """Serves shards. `faults`, {shard: function(attempt)}, may return another (status, body,
    Content-Length, or for 429 Retry-After)."""

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
                if status == 429:
                    self.send_header("Retry-After", str(length))
                elif length:
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
    monkeypatch.setattr(prepare, "RETRIES", prepare.RETRIES.new(backoff_factor=0))
    yield hub
    hub.server.shutdown()
    hub.server.server_close()


def whole(shards):
    return {f"data/{name}": body for name, body in shards.items()}


# ---- Downloads ----
def test_shards_are_fetched_once(hub, shards, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    for _ in range(2):
        paths = prepare.climbmix(3)
        assert paths[-1] == tmp_path / "data" / VAL and len(paths) == 4
        assert contents(tmp_path) == whole(shards)
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
    replies = {1: (429, b"", 1), 2: (503, b"", None), 3: (200, half, len(body))}
    hub.faults["shard_00000.parquet"] = replies.get
    hub.faults["shard_00001.parquet"] = {1: (200, half, None)}.get
    begun = time.monotonic()
    prepare.climbmix(3)
    assert time.monotonic() - begun > 1  # the hub asked for that
    assert contents(tmp_path) == whole(shards)
    assert hub.requests == {f"shard_{i}.parquet": n for i, n in zip(NUMBERS, (4, 2, 1, 1))}


@pytest.mark.parametrize(
    ("fault", "words", "attempts"),
    [
        ((404, b"", None), "download: 404 Client Error", 3),
        ((503, b"", None), "too many 503 error responses", 12),
        ((200, b"<html>please log in</html>", None), "download: Parquet", 3),
        ((200, b"PAR1", 1000), "download: ('Connection broken: IncompleteRead", 3),
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
    error = refusal(capsys, run_prepare, *ENOUGH)
    assert words in error and "run the same command to go on, or use --corpus python" in error
    assert hub.requests[name] == attempts
    assert name not in contents(tmp_path / "data")
    hub.faults = {}
    run_prepare(*ENOUGH)
    assert hub.requests == {"shard_00000.parquet": 1, VAL: 1, name: attempts + 1}


@pytest.mark.parametrize(
    ("variable", "value", "cause"),
    [
        ("HF_ENDPOINT", "hub.example", "No scheme supplied"),
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
    assert len(prepare.load_manifest()["first_documents"]) == 2 and set(hub.requests.values()) == {
        1
    }


def test_a_cache_of_the_original_is_used_and_nothing_in_it_touched(hub, shards, tmp_path):
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
    made = {"manifest.json", "val.u16", "train.u16", "train.npy"}
    assert {*after} - {*before} == {f"small/{name}" for name in made}


# ---- Two at once ----
def test_two_preparers_at_once_do_the_work_once(hub, tmp_path):
    script = (ROOT / "prepare.py", *ENOUGH)
    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(run_script, *script, AUTORESEARCH_CACHE=tmp_path) for _ in range(2)]
    results = [job.result() for job in jobs]
    assert [done.returncode for done in results] == [0, 0], [done.output for done in results]
    assert sum("training a tokenizer" in done.stdout for done in results) == 1
    assert set(hub.requests.values()) == {1}
