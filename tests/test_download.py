"""ClimbMix from a local HTTP server through HF_ENDPOINT: what is whole is kept, what is not never
is."""

import re
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import prepare
from tests.common import ROOT, make_texts, run_script, write_parquet

import pytest

VAL = "shard_06542.parquet"


class Hub:
    """Serves shards; `faults` {shard: function(handler, body, attempt)} may answer in their
    stead."""

    def __init__(self, shards):
        self.shards = shards
        self.faults = {}
        self.requests = Counter()
        self.ranges = []
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
                    return
                begin = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
                begin = int(begin[1]) if begin else 0
                hub.ranges.append((name, begin))
                self.send_response(206 if begin else 200)
                self.send_header("Content-Length", str(len(body) - begin))
                self.end_headers()
                self.wfile.write(body[begin:])

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub")
    for i, name in enumerate([*(f"shard_{i:05d}.parquet" for i in range(3)), VAL]):
        write_parquet(folder / name, make_texts(60, seed=i))
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def hub(shards, tmp_path, monkeypatch):
    hub = Hub(dict(shards))
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setattr(prepare, "ROOT", tmp_path)
    monkeypatch.setattr(prepare, "BACKOFF", 0.001)
    yield hub
    hub.server.shutdown()


def on_disk(root):
    files = [path for path in sorted(root.rglob("*")) if path.is_file()]
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in files}


def whole(shards):
    folders = {name: "val" if name == VAL else "data" for name in shards}
    return {f"{folders[name]}/{name}": body for name, body in shards.items()}


def test_fresh_download_keeps_validation_apart(hub, shards, tmp_path):
    paths = prepare.climbmix(3, workers=8)
    assert on_disk(tmp_path) == whole(shards)
    assert paths[-1] == tmp_path / "val" / VAL and len(paths) == 4
    prepare.climbmix(3, workers=8)
    assert set(hub.requests.values()) == {1}  # what is there is not asked for again


def test_resumes_what_is_partial(hub, shards, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data/shard_00001.parquet.part").write_bytes(shards["shard_00001.parquet"][:1000])
    prepare.climbmix(3, workers=1)
    assert on_disk(tmp_path) == whole(shards) and ("shard_00001.parquet", 1000) in hub.ranges


def test_a_shard_that_cannot_be_read_is_fetched_again(hub, shards, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data/shard_00001.parquet").write_bytes(b"half of one")
    prepare.climbmix(3, workers=1)
    assert on_disk(tmp_path) == whole(shards)


@pytest.mark.parametrize("leftover", [b"x" * 500, b"x" * 10**6])
def test_a_partial_file_of_something_else_is_thrown_away(hub, shards, tmp_path, leftover):
    (tmp_path / "data").mkdir()
    (tmp_path / "data/shard_00001.parquet.part").write_bytes(leftover)
    hub.faults["shard_00001.parquet"] = unsatisfiable
    prepare.climbmix(3, workers=1)
    assert on_disk(tmp_path) == whole(shards)


def unsatisfiable(handler, body, attempt):
    asked = re.fullmatch(r"bytes=(\d+)-", handler.headers.get("Range", ""))
    if asked and int(asked[1]) >= len(body):
        handler.send_error(416)
        return True
    return False


def cut(announce):
    def fault(handler, body, attempt):
        if attempt > 2:
            return False
        handler.send_response(200)
        if announce:
            handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body[: len(body) // 2])
        handler.close_connection = True
        return True

    return fault


@pytest.mark.parametrize("announce", [True, False])
def test_a_body_that_is_cut_short_is_fetched_again(hub, shards, tmp_path, announce):
    hub.faults["shard_00000.parquet"] = cut(announce)
    prepare.climbmix(3, workers=2)
    assert on_disk(tmp_path) == whole(shards) and hub.requests["shard_00000.parquet"] == 3


def html(handler, body, attempt):
    page = b"<html>please log in</html>" * 100
    handler.send_response(200)
    handler.send_header("Content-Length", str(len(page)))
    handler.end_headers()
    handler.wfile.write(page)
    return True


def unavailable(handler, body, attempt):
    handler.send_error(503)
    return True


def unavailable_twice(handler, body, attempt):
    return unavailable(handler, body, attempt) if attempt <= 2 else False


@pytest.mark.parametrize(
    ("fault", "tries", "reason"),
    [(html, 5, "not a whole parquet"), (unavailable, 5, "503"), (None, 1, "404")],
)
def test_a_shard_that_cannot_be_had_is_named_and_the_others_kept(
    hub, shards, tmp_path, capsys, fault, tries, reason
):
    if fault:
        hub.faults["shard_00001.parquet"] = fault
    else:
        del hub.shards["shard_00001.parquet"]
    with pytest.raises(SystemExit) as stop:
        prepare.climbmix(3, workers=2)
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.count("\n") == 1
    assert "shard_00001.parquet" in error and reason in error
    assert hub.requests["shard_00001.parquet"] == tries
    expected = whole(shards)
    del expected["data/shard_00001.parquet"]
    assert on_disk(tmp_path) == expected  # nothing half-done is left behind


def test_503_twice_is_overcome(hub, shards, tmp_path):
    hub.faults[VAL] = unavailable_twice
    prepare.climbmix(1, workers=1)
    assert (tmp_path / "val" / VAL).read_bytes() == shards[VAL]


def test_offline_names_what_is_missing(hub, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(SystemExit):
        prepare.climbmix(3, workers=1)
    assert "HF_HUB_OFFLINE" in capsys.readouterr().err and not hub.requests


def test_two_preparers_at_once_do_the_work_once(hub, tmp_path):
    for i in range(3):
        hub.shards[f"shard_{i:05d}.parquet"] = hub.shards["shard_00000.parquet"]
    write_parquet(tmp_path / "val.parquet", make_texts(600, seed=77))
    hub.shards[VAL] = (tmp_path / "val.parquet").read_bytes()
    environment = {"AUTORESEARCH_CACHE": tmp_path / "cache", "HF_ENDPOINT": hub.url}
    arguments = ("--corpus", "climbmix", "--num-shards", 3)
    with ThreadPoolExecutor(2) as pool:
        jobs = [
            pool.submit(run_script, ROOT / "prepare.py", *arguments, **environment)
            for _ in range(2)
        ]
        results = [job.result() for job in jobs]
    assert [done.returncode for done in results] == [0, 0], [done.output for done in results]
    assert sum("training a tokenizer" in result.stdout for result in results) == 1
    assert set(hub.requests.values()) == {1}
