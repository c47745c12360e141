"""Corpus, tokenizer, token cache, packing, loader: prepare.py up to the metric."""

import itertools
import json
import shutil
import time

import prepare
from tests.common import ROOT, make_corpus, make_texts, run_script, write_parquet

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import rustbpe
import torch
from hypothesis import given
from hypothesis import strategies as st


@pytest.fixture(scope="module")
def tokenizer():
    trainer = rustbpe.Tokenizer()
    trainer.train_from_iterator(iter(make_texts(300)), 600, pattern=prepare.SPLIT)
    return prepare.Tokenizer({bytes(token): rank for token, rank in trainer.get_mergeable_ranks()})


# ---- Tokenizer -------------------------------------------------------------------------------------------------------
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_round_trip(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_bytes_of_tokens_add_up_to_the_bytes_of_the_text(tokenizer):
    for text in make_texts(50, seed=9):
        assert tokenizer.token_bytes[tokenizer.encode(text)].sum() == len(text.encode())


def test_single_bytes_above_0x7f_count_one_byte_each(tokenizer):
    high = [tokenizer.encoding.encode_single_token(bytes([byte])) for byte in range(0x80, 0x100)]
    assert len(high) == 128 and set(tokenizer.token_bytes[high]) == {1}


def test_special_tokens_sit_on_top_and_no_text_yields_them(tokenizer):
    size = tokenizer.get_vocab_size()
    assert tokenizer.get_bos_token_id() == size - 4 and list(tokenizer.token_bytes[-4:]) == [0] * 4
    assert max(tokenizer.encode("<|reserved_0|> and <|reserved_3|>")) < size - 4


def test_prepend(tokenizer):
    bos = tokenizer.get_bos_token_id()
    assert (
        tokenizer.encode("a", prepend=bos)
        == tokenizer.encode("a", prepend="<|reserved_0|>")
        == [bos, *tokenizer.encode("a")]
    )
    assert tokenizer.encode(["a", "b"], prepend=bos) == [[bos, *tokenizer.encode(x)] for x in "ab"]
    for wrong in ("<|nothing|>", -1, 10**6, True, 1.5):
        with pytest.raises(ValueError, match="prepend"):
            tokenizer.encode("a", prepend=wrong)


def test_a_million_blanks_are_encoded(tokenizer):
    text = " " * 1_000_000
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_digits_come_at_most_in_pairs(tokenizer):
    for token in tokenizer.encode("1234567890 31415926"):
        assert sum(byte in b"0123456789" for byte in tokenizer.encoding.decode_single_token_bytes(token)) <= 2


# ---- Packing ---------------------------------------------------------------------------------------------------------
def brute_force(documents, row_len, buffer_docs):
    """The definition of pack_rows, by a scan of the whole buffer for each document."""
    source, buffer, rows = iter(documents), [], []
    while True:
        row = []
        while len(row) < row_len:
            buffer += itertools.islice(source, buffer_docs - len(buffer))
            if not buffer:
                return rows
            left = row_len - len(row)
            fitting = [document for document in buffer if len(document) <= left]
            chosen = (
                max(fitting, key=len) if fitting else min(buffer, key=len)
            )  # both take the first, oldest, of equals
            del buffer[next(i for i, document in enumerate(buffer) if document is chosen)]
            row += list(chosen[:left])
        rows.append(row)


def documents_of(lengths):
    ids = itertools.count(1)
    return [np.array([0, *itertools.islice(ids, length - 1)], dtype=np.uint16) for length in lengths]


@given(st.lists(st.integers(1, 40), max_size=60), st.integers(2, 20), st.integers(1, 12))
def test_packing_is_best_fit(lengths, row_len, buffer_docs):
    documents = documents_of(lengths)
    rows = [list(row) for row in prepare.pack_rows(documents, row_len, buffer_docs)]
    assert rows == brute_force(documents, row_len, buffer_docs)
    assert all(len(row) == row_len and row[0] == 0 for row in rows)
    used = [token for row in rows for token in row if token]
    assert len(used) == len(set(used))  # nothing is served twice


def test_packing_never_holds_more_than_its_buffer():
    taken = 0

    def source():
        nonlocal taken
        for document in documents_of([5] * 1000):
            taken += 1
            yield document

    rows = prepare.pack_rows(source(), 10, buffer_docs=20)
    next(rows)
    assert taken <= 20 + 2


# ---- Loader and clock ------------------------------------------------------------------------------------------------
def first_rows(B, count):
    loader = prepare.make_dataloader(None, B, 64)
    return np.concatenate([np.asarray(next(loader)[0]) for _ in range(count // B)])


def test_rows_do_not_depend_on_the_batch_size(cache, fresh_run):
    assert (first_rows(1, 24) == first_rows(8, 24)).all() and (first_rows(3, 24) == first_rows(24, 24)).all()


def test_batches_are_shifted_fresh_and_begin_with_bos(cache, fresh_run):
    tokenizer = prepare.Tokenizer.from_directory()
    loader = prepare.make_dataloader(tokenizer, 4, 64)
    x, y, epoch = next(loader)
    kept = x.clone()
    assert x.shape == y.shape == (4, 64) and (x[:, 1:] == y[:, :-1]).all() and epoch == 1
    assert (x[:, 0] == tokenizer.get_bos_token_id()).all()
    y.zero_(), next(loader)
    assert (x == kept).all()


@pytest.mark.parametrize("B", [1, 3])
def test_inputs_and_targets_never_share_memory(cache, fresh_run, B):
    x, y, _ = next(prepare.make_dataloader(None, B, 64))
    before = y.clone()
    x.fill_(0)
    assert torch.equal(y, before) and x.is_contiguous() and y.is_contiguous()


def test_the_loader_goes_round(cache, fresh_run):
    epochs = [epoch for _, _, epoch in itertools.islice(prepare.make_dataloader(None, 64, 512), 40)]
    assert epochs[0] == 1 and epochs[-1] > 2 and epochs == sorted(epochs)


def test_seed_rotates_the_shards(cache, fresh_run, monkeypatch):
    before = first_rows(8, 8)
    monkeypatch.setattr(prepare, "SEED", prepare.SEED + 1)
    assert (first_rows(8, 8) != before).any()


def test_validation_rows_are_not_served():
    with pytest.raises(ValueError, match="evaluate_bpb alone"):
        prepare.make_dataloader(None, 1, 64, split="val")


def test_the_first_batch_starts_the_clock_and_everything_after_counts(cache, fresh_run):
    loader = prepare.make_dataloader(None, 1, 64)
    time.sleep(0.05)
    assert prepare.elapsed() == 0.0
    next(loader)
    begun = prepare.elapsed()
    time.sleep(0.05)
    next(prepare.make_dataloader(None, 1, 64))  # a second loader does not start it again
    assert begun < 0.05 <= prepare.elapsed()


def test_the_clock_ignores_a_patched_time(cache, fresh_run, monkeypatch):
    next(prepare.make_dataloader(None, 1, 64))
    monkeypatch.setattr(time, "time", lambda: 0.0)
    monkeypatch.setattr(time, "monotonic", lambda: 0.0)
    time.sleep(0.02)
    assert prepare.elapsed() >= 0.02


# ---- The whole preparation, in fresh processes -----------------------------------------------------------------------
def prepared(cache):
    return json.loads((cache / "small" / "manifest.json").read_text())


def test_preparation_lays_out_the_cache(cache):
    manifest, root = prepared(cache), cache / "small"
    assert [*manifest["corpus"]] == sorted(manifest["corpus"]) and len(manifest["corpus"]) == 3
    assert not list((root / "tokens").glob("shard_00002*"))  # the validation shard is out of training's reach
    flat, offsets = np.fromfile(root / "tokens/shard_00000.bin", "<u2"), np.load(root / "tokens/shard_00000.npy")
    bos = prepare.Tokenizer.from_directory(root / "tokenizer").get_bos_token_id()
    assert offsets[-1] == len(flat) and (flat[offsets[:-1]] == bos).all() and len(offsets) == 1501
    rows = np.fromfile(root / "val/rows.bin", "<u2").reshape(-1, 513)
    assert len(rows) % 32 == 0 and (rows[:, 0] == bos).all()


def test_a_second_preparation_changes_nothing(cache, corpus):
    before = {path: path.stat().st_mtime_ns for path in (cache / "small").rglob("*") if path.is_file()}
    done = run_script(ROOT / "prepare.py", "--data-dir", corpus)
    assert done.returncode == 0 and done.stdout.startswith("ready: small profile") and "tokenizer" not in done.output
    after = {path: path.stat().st_mtime_ns for path in (cache / "small").rglob("*") if path.is_file()}
    assert {k: v for k, v in after.items() if k.name != ".lock"} == {
        k: v for k, v in before.items() if k.name != ".lock"
    }


@pytest.fixture
def own_cache(cache, tmp_path, monkeypatch):
    """A copy of the prepared cache that a test may spoil, for this process and for those it starts."""
    shutil.copytree(cache / "small", tmp_path / "cache" / "small")
    monkeypatch.setenv("AUTORESEARCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(prepare, "ROOT", tmp_path / "cache" / "small")
    return tmp_path / "cache"


def test_what_is_damaged_is_made_again_and_nothing_else(own_cache, corpus):
    root = own_cache / "small"
    whole, kept = (root / "tokens/shard_00001.bin").read_bytes(), (root / "tokens/shard_00000.bin").stat().st_mtime_ns
    (root / "tokens/shard_00001.bin").write_bytes(whole[:-100])
    with pytest.raises(SystemExit) as stop:
        prepare.check_cache()
    assert stop.value.code == 2
    assert run_script(ROOT / "prepare.py", "--data-dir", corpus).returncode == 0
    assert (root / "tokens/shard_00001.bin").read_bytes() == whole
    assert (root / "tokens/shard_00000.bin").stat().st_mtime_ns == kept
    prepare.check_cache()


def test_a_changed_byte_in_what_a_score_rests_on_is_mended(own_cache, corpus):
    """What train.py refuses and sends its user to prepare.py for, prepare.py must see as well."""
    path = own_cache / "small" / "val" / "rows.bin"
    whole = path.read_bytes()
    path.write_bytes(whole[:5] + bytes([whole[5] ^ 1]) + whole[6:])
    with pytest.raises(SystemExit):
        prepare.check_cache()
    assert run_script(ROOT / "prepare.py", "--data-dir", corpus).returncode == 0
    prepare.check_cache()
    assert path.read_bytes() == whole


def test_changed_settings_redo_every_stage(own_cache, corpus, tmp_path):
    before = prepared(own_cache)
    (tmp_path / "prepare.py").write_text((ROOT / "prepare.py").read_text().replace("small=2048", "small=300"))
    assert run_script(tmp_path / "prepare.py", "--data-dir", corpus).returncode == 0
    after = prepared(own_cache)
    assert after["settings"]["vocab_size"] == 300 and [*before["corpus"].values()] == [*after["corpus"].values()]
    changed = [name for name in after["files"] if after["files"][name] != before["files"][name]]
    assert {"tokenizer/tokenizer.tiktoken", "tokens/shard_00000.bin", "val/rows.bin"} <= set(changed)
    with pytest.raises(SystemExit):  # and what another prepare.py made is not trained on
        prepare.check_cache()


def test_another_corpus_replaces_the_first(own_cache, tmp_path):
    other = make_corpus(tmp_path / "other", train=(900,), val=1100)
    assert run_script(ROOT / "prepare.py", "--data-dir", other).returncode == 0
    assert sorted(path.name for path in (own_cache / "small/tokens").iterdir()) == [
        "shard_00000.bin",
        "shard_00000.npy",
    ]
    prepare.check_cache()
    changed = other / "shard_00000.parquet"
    write_parquet(changed, make_texts(500))
    third = make_corpus(tmp_path / "third", train=(400,), val=1100)
    assert run_script(ROOT / "prepare.py", "--data-dir", third).returncode == 0
    assert len([*prepare.read_shard(changed)]) == 500  # a user's folder is read, never written


def test_without_a_choice_the_corpus_stays(own_cache, corpus, tmp_path):
    """program.md and many a message say `uv run prepare.py`: that must not replace a corpus of one's own."""
    other = make_corpus(tmp_path / "other", train=(900,), val=1100)
    assert run_script(ROOT / "prepare.py", "--data-dir", "other", cwd=tmp_path).returncode == 0
    before = prepared(own_cache)
    (own_cache / "small/val/rows.bin").unlink()
    assert run_script(ROOT / "prepare.py").returncode == 0 and prepared(own_cache) == before
    assert before["settings"]["choice"]["data_dir"] == str(other)
    moved = shutil.copytree(other, tmp_path / "moved")
    assert run_script(ROOT / "prepare.py", "--data-dir", moved).returncode == 0 and prepared(own_cache) != before
    assert prepared(own_cache)["files"] == before["files"]  # what a record's `data` is the hash of


def test_nothing_half_written_is_kept(own_cache, corpus):
    leftover = own_cache / "small/tokens/.shard_00000.bin.99999999.tmp"
    leftover.write_bytes(b"half")
    with pytest.raises(RuntimeError), prepare.replacing(own_cache / "x") as file:
        file.write(b"half")
        raise RuntimeError
    assert not list(own_cache.glob("*x*"))
    assert run_script(ROOT / "prepare.py", "--data-dir", corpus).returncode == 0
    assert not leftover.exists()


@pytest.mark.parametrize("garbage", ["", "{", "[]", "null", '{"prepare": null, "stages": {}}'])
def test_an_unreadable_manifest_is_as_good_as_none(own_cache, garbage):
    (own_cache / "small/manifest.json").write_text(garbage)
    assert prepare.load_manifest()["files"] == {}
    with pytest.raises(SystemExit):
        prepare.check_cache()


def test_embedded_corpus_is_deterministic_and_split_by_file(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, "PACKAGES", ["tqdm", "requests"])
    texts = []
    for name in "ab":
        monkeypatch.setattr(prepare, "ROOT", tmp_path / name)
        shards = prepare.python_corpus()
        texts.append([list(prepare.read_shard(shard)) for shard in shards])
    assert texts[0] == texts[1] and len(shards) == 9 and shards[-1].parent.name == "val"
    train, val = set(itertools.chain(*texts[0][:-1])), set(texts[0][-1])
    assert 0.01 < len(val) / (len(train) + len(val)) < 0.15
    assert all(0 < len(piece) <= prepare.PYTHON_PIECE + 1 for piece in train | val)
    shards[3].unlink()  # what a kill in the middle leaves to do, and no more
    before = {shard: shard.stat().st_mtime_ns for shard in shards if shard.exists()}
    assert prepare.python_corpus() == shards and [*prepare.read_shard(shards[3])] == texts[0][3]
    assert {shard: shard.stat().st_mtime_ns for shard in before} == before


# ---- Bad input: one sentence, exit code 2, nothing lost --------------------------------------------------------------
def spoiled(folder, spoil):
    make_corpus(folder, train=(40, 40), val=40)
    spoil(folder)
    return ["--data-dir", folder]


BAD_INPUT = {
    "no such folder": (lambda f: ["--data-dir", f / "none"], "0 *.parquet files"),
    "one shard": (lambda f: spoiled(f, lambda f: [(f / f"shard_0000{i}.parquet").unlink() for i in (0, 1)]), "two or more"),
    "no text": (lambda f: spoiled(f, lambda f: write_parquet(f / "shard_00000.parquet", ["a"], "body")), "no column `text`"),
    "numbers": (lambda f: spoiled(f, lambda f: write_parquet(f / "shard_00000.parquet", [1, 2])), "no column `text` of strings"),
    "not parquet": (lambda f: spoiled(f, lambda f: (f / "shard_00001.parquet").write_text("<html>")), "not a whole parquet"),
    "corrupt page": (lambda f: spoiled(f, lambda f: scribble(f / "shard_00001.parquet")), "not a whole parquet"),
    "empty corpus": (lambda f: spoiled(f, lambda f: [write_parquet(p, ["", None], kind=pa.string()) for p in f.glob("*")]), "hold no text"),
    "too little validation": (lambda f: spoiled(f, lambda f: write_parquet(f / "shard_00002.parquet", ["short"])), "32 is the least"),
}  # fmt: skip


def scribble(path):
    table = pa.table({"text": make_texts(400)})
    pq.write_table(table, path, compression="zstd", write_page_checksum=True)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_corpora_get_one_sentence(case, tmp_path, monkeypatch, capsys):
    arguments, sentence = BAD_INPUT[case]
    monkeypatch.setattr(prepare, "ROOT", tmp_path / "cache")
    monkeypatch.setattr("sys.argv", ["prepare.py", *map(str, arguments(tmp_path / "corpus"))])
    monkeypatch.setattr(prepare.multiprocessing, "get_context", lambda kind: Inline)
    with pytest.raises(SystemExit) as stop:
        prepare.main()
    error = capsys.readouterr().err
    assert stop.value.code == 2 and sentence in error and error.count("\n") == 1, error
    assert not list(tmp_path.rglob("*.tmp")) and prepare.load_manifest()["files"] == {}


class Inline:
    """The process pool's interface, in this process: what a worker raises is what the parent sees."""

    @staticmethod
    def Pool(*_):  # noqa: N802
        return Inline()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    imap = staticmethod(map)


def test_a_damaged_shard_in_a_worker_process_is_one_sentence_too(tmp_path):
    spoiled(tmp_path / "corpus", lambda f: scribble(f / "shard_00002.parquet"))  # validation: only the workers read it
    done = run_script(ROOT / "prepare.py", "--data-dir", tmp_path / "corpus", AUTORESEARCH_CACHE=tmp_path / "cache")
    assert done.returncode == 2 and "not a whole parquet file" in done.stderr and "Traceback" not in done.output


def test_a_corpus_that_cannot_be_used_leaves_the_cache_as_it_was(tmp_path, corpus):
    cache = {"AUTORESEARCH_CACHE": tmp_path / "cache", "HF_HUB_OFFLINE": "1"}
    assert run_script(ROOT / "prepare.py", "--data-dir", corpus, **cache).returncode == 0
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*") if path.is_file()}
    write_parquet(tmp_path / "bad/a.parquet", ["a"], "body")
    write_parquet(tmp_path / "bad/b.parquet", ["b"], "body")
    for choice in (["--data-dir", tmp_path / "bad"], ["--corpus", "climbmix"]):
        assert run_script(ROOT / "prepare.py", *choice, **cache).returncode == 2
        assert {path: path.stat().st_mtime_ns for path in before if path.exists()} == before


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("AUTORESEARCH_PROFILE", "huge"),
        ("AUTORESEARCH_TIME_BUDGET", "five minutes"),
        ("AUTORESEARCH_TIME_BUDGET", "-1"),
        ("AUTORESEARCH_TIME_BUDGET", "nan"),
        ("AUTORESEARCH_WALL_LIMIT", "-1"),
        ("SEED", "1.5"),
    ],
)
def test_a_bad_environment_gets_one_sentence(name, value):
    done = run_script(ROOT / "prepare.py", **{name: value})
    assert done.returncode == 2 and name in done.stderr and done.stderr.count("\n") == 1, done.output


def test_settings_are_checked_without_asserts():
    """Under `python -O`, which drops them."""
    done = run_script("-O", ROOT / "prepare.py", AUTORESEARCH_TIME_BUDGET="nan")
    assert done.returncode == 2 and "AUTORESEARCH_TIME_BUDGET" in done.stderr, done.output


def test_an_unusable_cache_gets_one_sentence(tmp_path, corpus):
    (tmp_path / "file").write_text("in the way")
    done = run_script(ROOT / "prepare.py", "--data-dir", corpus, AUTORESEARCH_CACHE=tmp_path / "file")
    assert done.returncode == 2 and "AUTORESEARCH_CACHE" in done.stderr and "Traceback" not in done.output
