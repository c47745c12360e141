"""Settings, tokenizer, packing, corpora, preparation."""

import errno
import hashlib
import itertools
import json
import os
import random
import re
import runpy
import shutil
import subprocess
import sys
from collections import Counter
from types import SimpleNamespace

import prepare
from tests.common import ROOT, make_corpus, make_texts, write_parquet

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import rustbpe
from hypothesis import given
from hypothesis import strategies as st


# ---- Settings ----
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("AUTORESEARCH_PROFILE", "huge"),
        ("AUTORESEARCH_TIME_BUDGET", "five minutes"),
        ("AUTORESEARCH_TIME_BUDGET", "0"),
        ("AUTORESEARCH_TIME_BUDGET", "inf"),
        ("SEED", "1.5"),
        ("SEED", "-1"),
        ("SEED", str(2**63)),
    ],
)
def test_a_bad_environment_gets_one_sentence(name, value, monkeypatch, capsys):
    monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(ROOT / "prepare.py"))
    error = capsys.readouterr().err
    assert stop.value.code == 2
    assert name in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("profile", "values"),
    [
        ("full", (2048, 20_971_520, 8192)),
        ("medium", (2048, 2_097_152, 8192)),
        ("small", (512, 262_144, 2048)),
    ],
)
def test_the_profile_decides_the_settings(monkeypatch, profile, values):
    monkeypatch.setenv("AUTORESEARCH_PROFILE", profile)
    ruler = SimpleNamespace(**runpy.run_path(str(ROOT / "prepare.py")))
    assert values == (ruler.MAX_SEQ_LEN, ruler.EVAL_TOKENS, ruler.VOCAB_SIZE)
    assert prepare.CACHE / profile == ruler.ROOT and ruler.RUNS == prepare.CACHE / "runs"


# ---- Tokenizer ----
@pytest.fixture(scope="module")
def tokenizer():
    trainer = rustbpe.Tokenizer()
    trainer.train_from_iterator(iter(make_texts(300)), 600, pattern=prepare.SPLIT)
    return prepare.Tokenizer({bytes(token): rank for token, rank in trainer.get_mergeable_ranks()})


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_round_trip_and_bytes(tokenizer, text):
    tokens = tokenizer.encode(text)
    assert tokenizer.decode(tokens) == text
    assert tokenizer.token_bytes[tokens].sum() == len(text.encode())


def test_special_tokens_sit_on_top_and_no_text_yields_them(tokenizer):
    size = tokenizer.get_vocab_size()
    bos = tokenizer.get_bos_token_id()
    assert bos == size - 4
    assert len(tokenizer.token_bytes) == size and list(tokenizer.token_bytes[-4:]) == [0] * 4
    assert max(tokenizer.encode("<|reserved_0|> and <|reserved_3|>")) < size - 4
    assert tokenizer.encode(["a", "b"], prepend=bos)[1] == [bos, *tokenizer.encode("b")]
    document = tokenizer.encode_document("a")
    assert document.dtype == np.uint16 and document.tolist() == tokenizer.encode("a", prepend=bos)


# ---- Packing ----
def brute_force(documents, row_len, buffer_docs):
    """The definition of pack_rows, by a scan of the whole buffer for each document."""
    source = iter(documents)
    buffer = []
    rows = []
    while True:
        row = []
        while len(row) < row_len:
            buffer += itertools.islice(source, buffer_docs - len(buffer))
            if not buffer:
                return rows
            left = row_len - len(row)
            fitting = [document for document in buffer if len(document) <= left]
            # Both take the first, the oldest, of equals.
            chosen = max(fitting, key=len) if fitting else min(buffer, key=len)
            del buffer[next(i for i, document in enumerate(buffer) if document is chosen)]
            row += list(chosen[:left])
        rows.append(row)


def documents_of(lengths):
    ids = itertools.count(1)
    documents = [[0, *itertools.islice(ids, length - 1)] for length in lengths]
    return [np.array(document, dtype=np.uint16) for document in documents]


@given(st.lists(st.integers(1, 40), max_size=60), st.integers(2, 20), st.integers(1, 12))
def test_packing_is_best_fit(lengths, row_len, buffer_docs):
    documents = documents_of(lengths)
    rows = [list(row) for row in prepare.pack_rows(documents, row_len, buffer_docs)]
    assert rows == brute_force(documents, row_len, buffer_docs)
    assert all(len(row) == row_len and row[0] == 0 for row in rows)
    used = [token for row in rows for token in row if token]
    assert len(used) == len(set(used))  # nothing is served twice


# ---- Shards ----
@pytest.mark.parametrize(
    "kind",
    [
        pa.string_view(),
        pa.dictionary(pa.int8(), pa.large_string()),
    ],
    ids=str,
)
def test_columns_of_strings_are_read_however_they_are_encoded(tmp_path, kind):
    path = tmp_path / "shard.parquet"
    write_parquet(path, ["one", None, "", "zwei 日本", "one"], kind=kind)
    written = pq.ParquetFile(path).schema_arrow.field("text").type
    assert pa.types.is_dictionary(written) == pa.types.is_dictionary(kind)  # as was asked for
    assert list(prepare.read_shard(path)) == ["one", "zwei 日本", "one"]


# ---- Preparation ----
def run_prepare(*args):
    """main with arguments, in this process: in a new one torch's import alone takes seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["prepare.py", *map(str, args)])
        patch.setattr(prepare, "lock", lambda folder: True)  # it would last until pytest ends
        prepare.main()


def contents(folder):
    """{file: its bytes} of all in it."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def times(folder):
    """{file: when it was written} of all in it."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path: path.stat().st_mtime_ns for path in files}


def refusal(capsys):
    """The sentence with which a run refuses the cache."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        prepare.check_cache()
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.count("\n") == 1, error
    assert "run `AUTORESEARCH_PROFILE=small uv run prepare.py`" in error
    return error


# The first number of RECIPE, and the sha256 of what it makes. Parquet may differ, this may not.
GOLDEN = (
    1,
    {
        "tokenizer.tiktoken": "9c1e08424b18fbc26637d1ee49b958ff8beff974330fb6f21e9defb32c8da6bd",
        "val.u16": "1da4f92ada361eea087b3d40cada7f7cf57f0741e62f27446bdf00d0ee9f1d38",
        "train.u16": "cba6effe5120e2e70f0f3d154f902eaa4ec569f5c2eb2467b7f4b1855814dae7",
        "train.npy": "dcbe4072652758d6b73c6f68dc3a686e4a8e14191a4fa47e3700d8d5b88c48c6",
        "python corpus": "3da48806fe52adcba075dd8aae95d6259972b300e3bffe54623056d74ba670be",
    },
)


def test_the_derived_files_are_those_of_the_recipe(tmp_path, monkeypatch):
    """By RECIPE a cache that another version of prepare.py made is taken or made anew."""
    monkeypatch.setattr(prepare, "CACHE", tmp_path)
    monkeypatch.setattr(prepare, "ROOT", tmp_path / "small")
    corpus = make_corpus(tmp_path / "corpus", train=(300, 300), val=700)
    rng = random.Random(5)
    long = "".join(rng.choices("aaabcdeé \n.'01", k=250_000))  # the tokenizer learns its beginning
    write_parquet(corpus / "shard_00000b.parquet", [long, "", "last"])
    run_prepare("--data-dir", corpus)
    made = {name: prepare.sha256(prepare.ROOT / name) for name in prepare.FILES}
    monkeypatch.setattr(prepare, "python_sources", made_up_sources)
    embedded = json.dumps(prepare.python_corpus())
    made["python corpus"] = hashlib.sha256(embedded.encode()).hexdigest()
    assert (prepare.RECIPE[0], made) == GOLDEN, (
        "prepare.py makes other tokens, rows or pieces than before; if that is meant, raise the "
        "first number of its RECIPE, and record that and these hashes here"
    )


def test_preparation_lays_out_the_cache(cache, corpus):
    root = cache / "small"
    assert {*contents(root)} == {*prepare.FILES, "manifest.json"}
    manifest = prepare.check_cache()
    assert manifest["recipe"] == prepare.RECIPE and manifest["shards"] == [0, 1500]
    assert manifest["options"]["data_dir"] == str(corpus)
    assert set(manifest["files"]) == set(prepare.FILES)
    flat = np.fromfile(root / "train.u16", "<u2")
    ends = np.load(root / "train.npy")
    assert ends.dtype == np.int64 and len(ends) == 3001 and ends[-1] == len(flat)
    tokenizer = prepare.Tokenizer.from_directory()
    assert (flat[ends[:-1]] == tokenizer.get_bos_token_id()).all()
    for shard, place in (("shard_00000", 0), ("shard_00001", 1500)):
        text = next(prepare.read_shard(corpus / f"{shard}.parquet"))
        assert tokenizer.decode(flat[ends[place] + 1 : ends[place + 1]].tolist()) == text


def test_a_second_preparation_changes_nothing(own_cache, corpus, capsys):
    before = times(own_cache)
    run_prepare("--data-dir", corpus)
    profile, ready = capsys.readouterr().out.splitlines()
    assert profile.startswith("profile: small, ")
    assert ready.startswith("ready: small profile, 2 training shards; ")
    assert times(own_cache) == before


def test_another_recipe_makes_all_anew(own_cache, monkeypatch, capsys):
    recipe = prepare.RECIPE
    before = times(own_cache)
    monkeypatch.setattr(prepare, "RECIPE", [recipe[0] + 1, *recipe[1:]])
    assert "is not prepared" in refusal(capsys)
    run_prepare()
    prepare.check_cache()
    assert not set(times(own_cache).values()) & set(before.values())
    monkeypatch.setattr(prepare, "RECIPE", recipe)
    assert "is not prepared" in refusal(capsys)


def test_another_corpus_replaces_the_first(own_cache, corpus, tmp_path):
    before = contents(corpus)
    other = make_corpus(tmp_path / "other", train=(900,), val=400)
    run_prepare("--data-dir", other)
    assert prepare.check_cache()["shards"] == [0]
    assert len(np.load(prepare.ROOT / "train.npy")) == 901
    write_parquet(other / "shard_00000.parquet", make_texts(500))
    run_prepare()  # notices that
    assert len(np.load(prepare.ROOT / "train.npy")) == 501
    assert contents(corpus) == before  # a user's folder is read, never written


def test_without_a_choice_the_corpus_stays(own_cache, tmp_path, monkeypatch):
    """program.md and many a message say `uv run prepare.py`: that must not replace a corpus of
    one's own."""
    other = make_corpus(tmp_path / "other", train=(300,), val=400)
    monkeypatch.chdir(tmp_path)
    run_prepare("--data-dir", "other")
    monkeypatch.chdir("/")
    before = contents(own_cache / "small")
    assert prepare.load_manifest()["options"]["data_dir"] == str(other)
    (own_cache / "small/val.u16").unlink()
    run_prepare()
    assert contents(own_cache / "small") == before
    moved = shutil.copytree(other, tmp_path / "moved")
    run_prepare("--data-dir", moved)
    assert prepare.load_manifest()["options"]["data_dir"] == str(moved)
    del before["manifest.json"]  # what a record's `data` is the hash of stays
    assert contents(own_cache / "small").items() > before.items()


# ---- Damage ----
def flip(path, place):
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


DAMAGE = {
    "truncated tokens": ("train.u16", lambda path: os.truncate(path, path.stat().st_size // 2)),
    "no ends": ("train.npy", os.unlink),
    "edited rows": ("val.u16", lambda path: flip(path, 5)),
    "edited tokenizer": ("tokenizer.tiktoken", lambda path: flip(path, 1000)),
    "edited tokens": ("train.u16", lambda path: flip(path, 3000)),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_a_damaged_cache_is_refused_and_mended(case, own_cache, capsys):
    name, spoil = DAMAGE[case]
    before = contents(own_cache)
    spoil(own_cache / "small" / name)
    if case == "edited tokens":  # not seen by a run, which would hash gigabytes
        prepare.check_cache()
    else:
        assert f"small/{name} is missing or not as it was prepared" in refusal(capsys)
    run_prepare()
    prepare.check_cache()
    assert contents(own_cache) == before


# ---- Interruptions ----
NO_SPACE = OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("error", "code", "sentence"),
    [
        (NO_SPACE, 2, "No space left on device; free space"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
    ids=["no space", "interrupt"],
)
def test_an_interrupted_build_leaves_the_old_cache(
    error, code, sentence, own_cache, tmp_path, monkeypatch, capsys
):
    other = make_corpus(tmp_path / "other", train=(300,), val=400)
    before = contents(own_cache / "small")

    def interrupted(shards, tokenizer, folder):
        (folder / prepare.TOKENS_FILE).write_bytes(b"half")
        raise error

    with monkeypatch.context() as patch, pytest.raises(SystemExit) as stop:
        patch.setattr(prepare, "write_tokens", interrupted)
        run_prepare("--data-dir", other)
    said = capsys.readouterr().err
    assert stop.value.code == code and sentence in said and said.count("\n") == 1
    assert contents(own_cache / "small") == before
    prepare.check_cache()
    run_prepare("--data-dir", other)
    assert prepare.check_cache()["options"]["data_dir"] == str(other)
    assert [path.name for path in own_cache.iterdir()] == ["small"]


@pytest.mark.parametrize("moved", [0, 2, 4])
def test_a_build_that_dies_between_the_moves_leaves_no_manifest(
    moved, own_cache, tmp_path, monkeypatch, capsys
):
    other = make_corpus(tmp_path / "other", train=(300,), val=400)
    moves = []
    real = os.replace

    def replace(*paths):
        if len(moves) == moved:
            raise KeyboardInterrupt
        moves.append(paths)
        real(*paths)

    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(os, "replace", replace)
        run_prepare("--data-dir", other)
    assert len(moves) == moved and "is not prepared" in refusal(capsys)
    run_prepare("--data-dir", other)
    manifest = prepare.check_cache()
    assert manifest["options"]["data_dir"] == str(other)
    assert not prepare.find_damaged(manifest["files"], prepare.FILES)


# ---- Permissions and locks ----


def test_an_unusable_cache_gets_one_sentence(tmp_path, corpus, monkeypatch, capsys):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setattr(prepare, "ROOT", tmp_path / "file/small")
    with pytest.raises(SystemExit) as stop:
        run_prepare("--data-dir", corpus)
    error = capsys.readouterr().err
    assert stop.value.code == 2 and "AUTORESEARCH_CACHE" in error and error.count("\n") == 1


HOLDER = """
import prepare, sys
print(prepare.lock(sys.argv[1]), flush=True)
sys.stdin.read()
"""


def test_a_folder_is_locked_by_one_process_at_a_time(tmp_path):
    command = [sys.executable, "-c", HOLDER, tmp_path]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as holder:
        assert holder.stdout.readline() == b"True\n"
        assert prepare.lock(tmp_path) is False
        holder.kill()
    assert prepare.lock(tmp_path) is True
    assert not list(tmp_path.iterdir())


# ---- The embedded corpus ----
def made_up_sources():
    """{text: name}: 60 files of lines that begin with its number, and one long line."""
    files = {"x" * 5000 + "\nlast": "long.py"}
    for i in range(60):
        files["".join(f"{i} line {j}\n" for j in range(400))] = f"folder/{i}.py"
    return files


def test_the_embedded_corpus_is_split_by_file_and_nothing_is_lost(monkeypatch):
    monkeypatch.setattr(prepare, "python_sources", made_up_sources)
    shards = prepare.python_corpus()
    pieces = [*itertools.chain(*shards)]
    assert len(shards) == 9 and all(0 < len(piece) <= 2049 for piece in pieces)
    assert Counter("".join(pieces)) == Counter("".join(made_up_sources()))
    train, val = (
        {re.match(r"(\d*) ?", piece)[1] for piece in side}
        for side in (itertools.chain(*shards[:-1]), shards[-1])
    )
    assert val and not train & val and len(train | val) == 61


# ---- Bad input: one sentence, exit code 2, nothing lost ----
def remove_all_but_one(folder):
    (folder / "shard_00000.parquet").unlink()
    (folder / "shard_00001.parquet").unlink()


def empty_all(folder):
    for path in folder.glob("*"):
        write_parquet(path, ["", None], kind=pa.string())


def damage_page(path):
    """In the middle of many."""
    table = pa.table({"text": make_texts(2000)})
    options = {"compression": "zstd", "write_page_checksum": True, "row_group_size": 100}
    pq.write_table(table, path, **options)
    flip(path, path.stat().st_size // 2)


BAD_INPUT = {  # name: (what spoils the folder, what the sentence says)
    "no such folder": (shutil.rmtree, "a folder of at least two *.parquet files"),
    "one shard": (remove_all_but_one, "a folder of at least two *.parquet files"),
    "no text": (
        lambda folder: write_parquet(folder / "shard_00000.parquet", ["a"], "body"),
        "no column `text`",
    ),
    "not parquet": (
        lambda folder: (folder / "shard_00001.parquet").write_text("<html>"),
        "not a whole parquet file",
    ),
    "a damaged page, for the tokenizer": (
        lambda folder: damage_page(folder / "shard_00001.parquet"),
        "not a whole parquet file",
    ),
    "empty corpus": (empty_all, "hold no text"),
    "too little validation": (
        lambda folder: write_parquet(folder / "shard_00002.parquet", ["short"]),
        "fills only 0 rows",
    ),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_corpora_get_one_sentence_and_leave_the_cache_as_it_was(
    case, own_cache, tmp_path, capsys
):
    spoil, sentence = BAD_INPUT[case]
    before = times(own_cache / "small")
    spoil(make_corpus(tmp_path / "corpus", train=(40, 40), val=40))
    with pytest.raises(SystemExit) as stop:
        run_prepare("--data-dir", tmp_path / "corpus")
    error = capsys.readouterr().err
    assert stop.value.code == 2 and sentence in error and error.count("\n") == 1, error
    assert times(own_cache / "small") == before
    prepare.check_cache()
