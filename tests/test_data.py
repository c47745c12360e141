"""Tests prepare.py's settings, tokenizer, packing, corpora and preparation."""

import errno
import hashlib
import itertools
import json
import os
import random
import re
import runpy
import shutil
import sys
from collections import Counter
from types import SimpleNamespace

import prepare
from benchmarks import overhead
from tests.common import ROOT, make_corpus, make_texts, write_parquet

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st


def refusal(capsys, function, *arguments, code=2):
    """Returns the one sentence with which `function` exits."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        function(*arguments)
    error = capsys.readouterr().err
    assert stop.value.code == code and error.count("\n") == 1, error
    return error


# ---- Settings ----
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("AUTORESEARCH_PROFILE", "huge"),
        ("AUTORESEARCH_TIME_BUDGET", "0"),
        ("AUTORESEARCH_TIME_BUDGET", "inf"),
        ("SEED", "1.5"),
        ("SEED", "-1"),
        ("SEED", str(2**63)),
    ],
)
def test_a_bad_environment_gets_one_sentence(name, value, monkeypatch, capsys):
    monkeypatch.setenv(name, value)
    assert name in refusal(capsys, runpy.run_path, str(ROOT / "prepare.py"))


@pytest.mark.parametrize("variable", ["AUTORESEARCH_CACHE", "AUTORESEARCH_RUNS"])
def test_a_tilde_is_the_home_folder_in_every_variable_that_names_a_folder(
    variable, monkeypatch, tmp_path
):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv(variable, "~/x")
    ruler = runpy.run_path(str(ROOT / "prepare.py"))
    assert ruler[variable.removeprefix("AUTORESEARCH_")] == tmp_path / "x"


def test_a_user_without_a_home_folder_gets_one_sentence(monkeypatch, capsys):
    """As in a container, there is no HOME and no entry in the passwd file."""
    for name in ("HOME", "AUTORESEARCH_CACHE"):
        monkeypatch.delenv(name)
    monkeypatch.setattr(os, "getuid", lambda: 987654)
    sentence = refusal(capsys, runpy.run_path, str(ROOT / "prepare.py"))
    assert "set AUTORESEARCH_CACHE to an absolute path" in sentence


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
    assert prepare.CACHE / profile == ruler.PREPARED and ruler.RUNS == prepare.CACHE / "runs"


# ---- Tokenizer ----
@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare, "VOCAB_SIZE", 500)
        return prepare.train_tokenizer([make_texts(300)], tmp_path_factory.mktemp("tokenizer"))


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_round_trip_and_bytes(tokenizer, text):
    tokens = tokenizer.encode(text)
    assert tokenizer.decode(tokens) == text
    assert tokenizer.token_bytes[tokens].sum() == len(text.encode())


def test_special_tokens_sit_on_top_and_no_text_yields_them(tokenizer):
    size = tokenizer.get_vocab_size()
    bos = tokenizer.get_bos_token_id()
    assert size == 500 and bos == size - 4
    assert len(tokenizer.token_bytes) == size and list(tokenizer.token_bytes[-4:]) == [0] * 4
    assert max(tokenizer.encode("<|reserved_0|> and <|reserved_3|>")) < size - 4
    document = tokenizer.encode_document("a")
    assert document.dtype == np.uint16 and document.tolist() == [bos, *tokenizer.encode("a")]


# ---- Packing ----
@given(st.lists(st.integers(1, 40), max_size=60), st.integers(2, 20), st.integers(1, 12))
def test_packing_is_best_fit(lengths, row_len, buffer_docs):
    tokens = np.arange(sum(lengths), dtype=np.uint16)  # no two are the same
    documents = np.split(tokens, np.cumsum(lengths))[:-1]
    rows = [list(row) for row in prepare.pack_rows(documents, row_len, buffer_docs)]
    assert rows == [*overhead.linear_rows(documents, row_len, buffer_docs)]


# ---- Preparation ----
def run_prepare(*args):
    """Runs main in this process: a new one would take seconds to import torch alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["prepare.py", *map(str, args)])
        patch.setattr(prepare, "lock", lambda folder: True)  # it would last until pytest ends
        prepare.main()


def contents(folder):
    """Returns {path: bytes} of all files in a folder."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


@pytest.fixture
def other(tmp_path):
    return make_corpus(tmp_path / "other", train=(300,), val=400)


# RECIPE[0], and the sha256 of the files of that recipe. Unlike Parquet files, they may not vary.
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
    """RECIPE decides whether a cache that another version of prepare.py made is kept."""
    monkeypatch.setattr(prepare, "CACHE", tmp_path)
    monkeypatch.setattr(prepare, "PREPARED", tmp_path / "small")
    corpus = make_corpus(tmp_path / "corpus", train=(300, 300), val=700)
    rng = random.Random(5)
    long = "".join(rng.choices("aaabcdeé \n.'01", k=250_000))  # the tokenizer learns its beginning
    write_parquet(corpus / "shard_00000b.parquet", [long, "", None, "last"])
    run_prepare("--data-dir", corpus)
    made = {name: prepare.sha256(prepare.PREPARED / name) for name in prepare.FILES}
    monkeypatch.setattr(prepare, "python_sources", made_up_sources)
    embedded = json.dumps(prepare.python_corpus())
    made["python corpus"] = hashlib.sha256(embedded.encode()).hexdigest()
    assert (prepare.RECIPE[0], made) == GOLDEN, (
        "prepare.py makes other tokens, rows or pieces than before; if that is intended, raise the "
        "first number of its RECIPE, and record that and these hashes here"
    )


def test_a_cache_is_made_anew_only_for_another_recipe(own_cache, monkeypatch, capsys):
    interrupted = prepare.PREPARED.with_name("small.new")
    interrupted.mkdir()
    (interrupted / "val.u16").touch()
    with monkeypatch.context() as patch:
        patch.setattr(prepare, "build", None)
        run_prepare()
    assert not interrupted.exists()
    profile, ready = capsys.readouterr().out.splitlines()
    assert profile.startswith("profile: small, ")
    tokens = np.fromfile(prepare.PREPARED / "train.u16", dtype="<u2").size / 1e6
    rows = np.fromfile(prepare.PREPARED / "val.u16", dtype="<u2").size / (prepare.MAX_SEQ_LEN + 1)
    counts = f"{tokens:.1f} million training tokens, {rows:g} validation rows; "
    assert ready.startswith(f"ready: small profile, {counts}")
    recipe = prepare.RECIPE
    monkeypatch.setattr(prepare, "RECIPE", [recipe[0] + 1, *recipe[1:]])
    sentence = "is not prepared; run `AUTORESEARCH_PROFILE=small uv run prepare.py`"
    assert sentence in refusal(capsys, prepare.read_cache)
    run_prepare()
    assert prepare.load_manifest()["recipe"] == prepare.RECIPE
    monkeypatch.setattr(prepare, "RECIPE", recipe)
    assert sentence in refusal(capsys, prepare.read_cache)


def test_the_corpus_chosen_last_stays(own_cache, other, tmp_path, monkeypatch):
    """program.md and messages say `uv run prepare.py`: that must not replace a user's corpus."""
    monkeypatch.chdir(tmp_path)
    run_prepare("--data-dir", "other")
    monkeypatch.chdir("/")
    assert prepare.load_manifest()["options"]["data_dir"] == str(other)
    assert len(np.load(prepare.PREPARED / "train.npy")) == 301
    write_parquet(other / "shard_00000.parquet", make_texts(500))
    own = contents(other)
    run_prepare()  # keeps what was prepared, since all of it is intact
    assert len(np.load(prepare.PREPARED / "train.npy")) == 301
    run_prepare("--data-dir", other)  # notices that the text has changed
    assert len(np.load(prepare.PREPARED / "train.npy")) == 501
    with monkeypatch.context() as patch:
        patch.setattr(prepare, "build", None)
        run_prepare("--data-dir", other)  # the cache has this already
    before = contents(own_cache)
    (prepare.PREPARED / "val.u16").unlink()
    run_prepare()
    assert contents(own_cache) == before
    assert contents(other) == own  # a user's folder is read, never written
    write_parquet(other / "shard_00000.parquet", make_texts(400))
    (prepare.PREPARED / "val.u16").unlink()
    run_prepare()  # mends from the text as it is now, and remembers that
    assert len(np.load(prepare.PREPARED / "train.npy")) == 401
    monkeypatch.setattr(prepare, "build", None)
    run_prepare("--data-dir", other)


# ---- Damage ----
def flip(path, place):
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("name", "spoil", "seen"),
    [
        ("train.u16", lambda path: os.truncate(path, 5000), True),
        ("train.npy", os.unlink, True),
        ("val.u16", lambda path: flip(path, 5), True),
        ("tokenizer.tiktoken", lambda path: flip(path, 1000), True),
        ("train.u16", lambda path: flip(path, 3000), False),  # a run does not hash gigabytes
    ],
)
def test_a_damaged_cache_is_refused_and_mended(name, spoil, seen, own_cache, capsys):
    before = contents(own_cache)
    spoil(prepare.PREPARED / name)
    if seen:
        sentence = refusal(capsys, prepare.read_cache)
        assert f"small/{name} is missing or not as it was prepared; run `" in sentence
    else:
        prepare.read_cache()
    run_prepare()
    assert contents(own_cache) == before


# ---- Interruptions ----
def test_a_build_that_fails_leaves_the_old_cache(own_cache, other, monkeypatch, capsys):
    before = contents(prepare.PREPARED)

    def write_tokens(shards, tokenizer, folder):
        (folder / prepare.TOKENS_FILE).write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(prepare, "write_tokens", write_tokens)
        sentence = refusal(capsys, run_prepare, "--data-dir", other)
    assert "No space left on device; free space, or set AUTORESEARCH_CACHE to another" in sentence
    assert contents(prepare.PREPARED) == before
    run_prepare("--data-dir", other)
    assert prepare.load_manifest()["options"]["data_dir"] == str(other)
    assert [path.name for path in own_cache.iterdir()] == ["small"]


def test_a_cache_that_cannot_be_written_is_named_with_its_variable(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").touch()
    monkeypatch.setattr(prepare, "CACHE", tmp_path / "file" / "cache")
    sentence = refusal(capsys, run_prepare)
    assert "Not a directory" in sentence and "; set AUTORESEARCH_CACHE to another" in sentence
    assert "free space" not in sentence


@pytest.mark.parametrize("moment", ["before", "while the old files go", "before the rename"])
def test_a_preparation_killed_while_it_publishes_loses_neither_cache_nor_options(
    own_cache, corpus, other, monkeypatch, capsys, moment
):
    """Afterwards prepare.py finds the old cache or the new one, and builds neither again."""
    before = contents(prepare.PREPARED)

    def killed(folder):
        if moment == "while the old files go":
            (prepare.PREPARED / "train.u16").unlink()
        if moment == "before the rename":
            shutil.rmtree(prepare.PREPARED)
        if moment == "before":  # the manifest is half written
            manifest = folder / "manifest.json"
            manifest.write_bytes(manifest.read_bytes()[:-5])
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(prepare, "publish", killed)
        assert "interrupted" in refusal(capsys, run_prepare, "--data-dir", other, code=130)
    if moment != "before":
        assert "run `AUTORESEARCH_PROFILE=small uv" in refusal(capsys, prepare.read_cache)
    monkeypatch.setattr(prepare, "build", None)
    run_prepare()
    assert (contents(prepare.PREPARED) == before) == (moment == "before")
    folder = prepare.load_manifest()["options"]["data_dir"]
    assert folder == str(corpus if moment == "before" else other)
    assert [path.name for path in own_cache.iterdir()] == ["small"]


def test_a_run_that_starts_while_the_folder_is_renamed_is_told_so(
    own_cache, fresh_run, monkeypatch, capsys
):
    load = np.load

    def load_after_rename(*args, **options):
        shutil.rmtree(prepare.PREPARED)
        return load(*args, **options)

    monkeypatch.setattr(np, "load", load_after_rename)
    assert "prepared anew while this run was starting" in refusal(capsys, prepare.start)


def test_what_is_whole_is_ready_although_its_text_is_gone(own_cache, other, capsys):
    run_prepare("--data-dir", other)
    shutil.rmtree(other)
    run_prepare()
    assert "\nready: " in capsys.readouterr().out
    assert "at least two" in refusal(capsys, run_prepare, "--data-dir", other)


@pytest.mark.parametrize(
    "options",
    [
        ("--data-dir", "x", "--corpus", "python"),
        ("--data-dir", "x", "--num-shards", "2"),
        ("--corpus", "python", "--num-shards", "2"),
    ],
)
def test_options_of_two_corpora_are_refused(options, capsys):
    with pytest.raises(SystemExit, match="2"):
        run_prepare(*options)
    *_, error = capsys.readouterr().err.splitlines()
    assert f"{options[2]}: not allowed with argument {options[0]}" in error


# ---- The embedded corpus ----
def made_up_sources():
    """Returns {text: name}: 60 files whose lines begin with the file's number, and long.py."""
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
def damage_page(path):
    """Writes a file of many pages and damages one in the middle."""
    table = pa.table({"text": make_texts(2000)})
    options = {"compression": "zstd", "write_page_checksum": True, "row_group_size": 100}
    pq.write_table(table, path, **options)
    flip(path, path.stat().st_size // 2)


def two_columns(path):
    column = pa.array(["a"])
    pq.write_table(pa.Table.from_arrays([column, column], names=["text", "text"]), path)


def invalid_utf8(path):
    """Writes invalid UTF-8 as a column of strings, which pyarrow does not check."""
    raw = pa.array([b"\xff"])
    pq.write_table(pa.table({"text": pa.StringArray.from_buffers(1, *raw.buffers()[1:])}), path)


@pytest.mark.parametrize(
    "texts",
    [[b"binary"], pa.array(["large"], pa.large_string()), pa.array(["a"]).dictionary_encode()],
)
def test_a_column_of_strings_or_of_utf8_is_read(texts, tmp_path):
    write_parquet(tmp_path / "a.parquet", texts)
    [text] = prepare.read_shard(tmp_path / "a.parquet")
    assert text in ("binary", "large", "a")


@pytest.mark.parametrize("text", [["a"], {"a": "b"}, 1, 1.5, None])
def test_a_column_of_anything_else_is_refused(text, tmp_path):
    write_parquet(tmp_path / "a.parquet", [text])
    with pytest.raises(prepare.ShardError, match="must have one column `text` of strings"):
        [*prepare.read_shard(tmp_path / "a.parquet")]


def test_hidden_files_are_no_shards(other):
    (other / "._shard_00009.parquet").write_bytes(b"what macOS leaves on foreign disks")
    options = {"data_dir": other, "corpus": None, "num_shards": None}
    assert len(prepare.find_shards(options)) == 2


@pytest.mark.parametrize(
    ("name", "spoil", "words"),
    [
        ("shard_00000", os.unlink, "a folder of at least two *.parquet files"),
        ("shard_00000", lambda path: write_parquet(path, ["a"], "body"), "one column `text`"),
        ("shard_00000", two_columns, "one column `text`"),
        ("shard_00000", invalid_utf8, "cannot be read ('utf-8' codec can't decode byte 0xff"),
        ("shard_00000", lambda path: write_parquet(path, [b"\xff"]), "Invalid UTF8"),
        ("shard_00009", os.mkdir, "is a directory"),
        ("shard_00000", lambda path: write_parquet(path, ["", None]), "hold no text"),
        ("shard_00000", damage_page, "cannot be read (could not verify page integrity"),
        ("shard_00001", lambda path: write_parquet(path, ["short"]), "fills only 0 of 32 rows"),
    ],
)
def test_bad_corpora_get_one_sentence_and_leave_the_cache_as_it_was(
    name, spoil, words, own_cache, other, capsys
):
    before = contents(prepare.PREPARED)
    spoil(other / f"{name}.parquet")
    assert words in refusal(capsys, run_prepare, "--data-dir", other)
    assert contents(prepare.PREPARED) == before


def test_the_sources_are_those_of_the_library_and_of_packages(monkeypatch):
    monkeypatch.setattr(prepare, "PACKAGES", ["tqdm"])
    names = [*prepare.python_sources().values()]
    assert "argparse.py" in names and "tqdm/std.py" in names and len(names) > 500
    assert not any("/tests/" in name or "site-packages" in name for name in names)


def test_a_package_without_a_list_of_its_files_adds_none(monkeypatch):
    monkeypatch.setattr(prepare.importlib.metadata, "files", lambda package: None)
    assert "argparse.py" in prepare.python_sources().values()
