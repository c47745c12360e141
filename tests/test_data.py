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
from pathlib import Path
from types import SimpleNamespace

import prepare
from benchmarks import overhead
from tests.common import ROOT, make_corpus, make_texts, run_script, write_parquet

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
        ("AUTORESEARCH_TIME_BUDGET", "5m"),
        ("SEED", "1.5"),
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
def tokenizer():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare, "VOCAB_SIZE", 500)
        return prepare.Tokenizer(prepare.train_tokenizer([make_texts(300)]))


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


# RECIPE[0], and the sha256 of what that recipe makes. Unlike Parquet files, it may not vary.
GOLDEN = (
    2,
    {
        "val.u16": "f27969b59e10d4fc8af66973e8a7b750a3744182f0f1406de0e447c2cd0ab536",
        "train.u16": "cba6effe5120e2e70f0f3d154f902eaa4ec569f5c2eb2467b7f4b1855814dae7",
        "train.npy": "dcbe4072652758d6b73c6f68dc3a686e4a8e14191a4fa47e3700d8d5b88c48c6",
        "data": "43afe828",
        "vocabulary": "c1d080665f76e9b9b1e74417e45c0193a26a89a3d2758c4133f72c7443948fbc",
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
    made = {name: prepare.file_hash(prepare.PREPARED / name) for name in GOLDEN[1] if "." in name}
    manifest = prepare.load_manifest()
    made["data"] = manifest["data"]
    made["vocabulary"] = hashlib.sha256(" ".join(manifest["vocabulary"]).encode()).hexdigest()
    monkeypatch.setattr(prepare, "python_sources", made_up_sources)
    embedded = json.dumps(prepare.python_corpus())
    made["python corpus"] = hashlib.sha256(embedded.encode()).hexdigest()
    assert (prepare.RECIPE[0], made) == GOLDEN, (
        "prepare.py makes other tokens, rows or pieces than before; if that is intended, raise the "
        "first number of its RECIPE, and record that and these hashes here"
    )


def test_a_cache_is_made_anew_only_for_another_recipe(own_cache, fresh_run, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        patch.setattr(prepare, "build", None)
        run_prepare()
    profile, ready = capsys.readouterr().out.splitlines()
    assert profile.startswith("profile: small, ")
    tokens = np.fromfile(prepare.PREPARED / "train.u16", dtype="<u2").size / 1e6
    rows = np.fromfile(prepare.PREPARED / "val.u16", dtype="<u2").size / (prepare.MAX_SEQ_LEN + 1)
    counts = f"{tokens:.1f} million training tokens, {rows:g} validation rows; "
    assert ready.startswith(f"ready: small profile, {counts}")
    recipe = prepare.RECIPE
    monkeypatch.setattr(prepare, "RECIPE", [recipe[0] + 1, *recipe[1:]])
    sentence = "is not prepared, or not as it was prepared; run `AUTORESEARCH_PROFILE=small uv run"
    assert sentence in refusal(capsys, prepare.start)
    run_prepare()
    assert prepare.load_manifest()["recipe"] == prepare.RECIPE
    monkeypatch.setattr(prepare, "RECIPE", recipe)
    assert sentence in refusal(capsys, prepare.start)


def recipe_of(replace):
    """Returns the RECIPE of a prepare.py in which a text is replaced."""
    source = (ROOT / "prepare.py").read_text()
    old, new = replace
    assert source.count(old) == 1
    namespace = {"__name__": "edited", "__file__": str(ROOT / "prepare.py")}
    exec(compile(source.replace(old, new), "edited", "exec"), namespace)  # noqa: S102
    return namespace["RECIPE"]


@pytest.mark.parametrize(
    "edit",
    [
        (r"\p{N}{1,2}", r"\p{N}{1,3}"),
        ("TOKENIZER_DOC_CHARS = 10_000", "TOKENIZER_DOC_CHARS = 1_000"),
        ("TOKENIZER_CHARS = 1_000_000_000", "TOKENIZER_CHARS = 1_000"),
        ("BUFFER_DOCS = 1000", "BUFFER_DOCS = 100"),
        ("CLIMBMIX_VAL = 6542", "CLIMBMIX_VAL = 6541"),
        ("EVAL_BATCH = 16", "EVAL_BATCH = 8"),
        ("PYTHON_SHARDS = 8", "PYTHON_SHARDS = 4"),
        ("range(4)]  # the first", "range(3)]  # the first"),
        ('torch tqdm\n"', 'torch\n"'),
    ],
)
def test_whoever_edits_what_the_files_depend_on_has_another_recipe(edit):
    """Otherwise prepare.py would say `ready`, and training would go on with the old tokens."""
    assert recipe_of(edit) != prepare.RECIPE
    assert recipe_of(("PROGRESS_SECONDS = 5", "PROGRESS_SECONDS = 9")) == prepare.RECIPE


def test_the_corpus_chosen_last_stays(own_cache, other, tmp_path, monkeypatch):
    """program.md and messages say `uv run prepare.py`: that must not replace a user's corpus."""
    monkeypatch.chdir(tmp_path)
    run_prepare("--data-dir", "other")
    monkeypatch.chdir("/")
    assert prepare.load_manifest()["corpus"] == str(other)
    assert len(np.load(prepare.PREPARED / "train.npy")) == 301
    write_parquet(other / "shard_00000.parquet", make_texts(500))
    own = contents(other)
    run_prepare()  # keeps what was prepared
    assert len(np.load(prepare.PREPARED / "train.npy")) == 301
    run_prepare("--data-dir", other)  # always prepares
    assert len(np.load(prepare.PREPARED / "train.npy")) == 501
    before = contents(own_cache)
    (prepare.PREPARED / "val.u16").unlink()
    (own_cache / "small.new").mkdir()  # an interrupted preparation
    run_prepare()
    assert contents(own_cache) == before
    assert contents(other) == own  # a user's folder is read, never written


@pytest.mark.parametrize(
    ("last", "options", "built"),
    [
        (7, (), None),
        (7, ("--num-shards", 7), None),
        (7, ("--num-shards", -1), -1),
        (7, ("--num-shards", 0), 0),  # zero is not "as last time"
        (20, ("--num-shards", 20), None),  # the default, named, is the default
        (20, ("--corpus", "python"), "python"),
        ("python", ("--corpus", "python"), None),
        ("/text", (), None),
        ("/text", ("--data-dir", "/text"), "/text"),  # whose files may have changed
    ],
)
def test_only_another_corpus_is_built(own_cache, monkeypatch, last, options, built):
    manifest = prepare.load_manifest() | {"corpus": last}
    (prepare.PREPARED / "manifest.json").write_text(json.dumps(manifest))
    calls = []

    def build(corpus, folder):
        calls.append(corpus)
        shutil.copytree(prepare.PREPARED, folder)

    monkeypatch.setattr(prepare, "build", build)
    run_prepare(*options)
    assert calls == ([] if built is None else [built])


@pytest.mark.parametrize("content", ["", '{"options": {"corpus": "python"}}'])  # cut off; older
def test_a_text_that_is_not_known_is_not_replaced_by_another(content, own_cache, other, capsys):
    (prepare.PREPARED / "manifest.json").write_text(content)
    before = contents(own_cache)
    assert "does not say from what it was made; name it" in refusal(capsys, run_prepare)
    assert contents(own_cache) == before
    run_prepare("--data-dir", other)
    assert prepare.load_manifest()["corpus"] == str(other)


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
        ("train.npy", lambda path: os.truncate(path, 0), True),
        ("train.npy", lambda path: os.truncate(path, 500), True),
        ("val.u16", lambda path: flip(path, 5), True),
        ("manifest.json", lambda path: flip_hex(path), True),
        ("train.u16", lambda path: flip(path, 3000), False),  # a run does not hash gigabytes
    ],
)
def test_a_damaged_cache_is_refused_and_mended(name, spoil, seen, own_cache, fresh_run, capsys):
    before = contents(own_cache)
    spoil(prepare.PREPARED / name)
    if seen:
        assert "not as it was prepared; run `" in refusal(capsys, prepare.start)
        run_prepare()
        assert contents(own_cache) == before
    else:
        prepare.start()


def flip_hex(path):
    """Changes a token of the vocabulary."""
    manifest = json.loads(path.read_text())
    manifest["vocabulary"][300] = "00"
    path.write_text(json.dumps(manifest))


# ---- Interruptions ----
def test_a_build_that_fails_leaves_the_old_cache(own_cache, other, monkeypatch, capsys):
    before = contents(prepare.PREPARED)

    def write_tokens(shards, tokenizer, folder):
        (folder / prepare.TOKENS_FILE).write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(prepare, "write_tokens", write_tokens)
        sentence = refusal(capsys, run_prepare, "--data-dir", other)
    assert "No space left on device; free space there, or set AUTORESEARCH_CACHE to" in sentence
    assert contents(prepare.PREPARED) == before
    run_prepare("--data-dir", other)
    assert prepare.load_manifest()["corpus"] == str(other)
    assert [path.name for path in own_cache.iterdir()] == ["small"]


def test_a_cache_that_cannot_be_written_is_named_with_its_variable(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").touch()
    monkeypatch.setattr(prepare, "CACHE", tmp_path / "file" / "cache")
    sentence = refusal(capsys, run_prepare)
    assert "Not a directory" in sentence and "set AUTORESEARCH_CACHE to another" in sentence


def test_a_preparation_killed_between_its_two_renames_loses_nothing(
    own_cache, corpus, other, fresh_run, monkeypatch, capsys
):
    before = contents(prepare.PREPARED)
    rename = Path.rename

    def killed(path, target):
        if path.name == "small.new":
            raise KeyboardInterrupt
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", killed)
        with pytest.raises(KeyboardInterrupt):
            run_prepare("--data-dir", other)
    assert "run `AUTORESEARCH_PROFILE=small uv" in refusal(capsys, prepare.start)
    with monkeypatch.context() as patch:
        patch.setattr(prepare, "build", None)
        run_prepare()  # finds the old cache
    assert contents(prepare.PREPARED) == before
    run_prepare("--data-dir", other)
    assert prepare.load_manifest()["corpus"] == str(other)
    assert [path.name for path in own_cache.iterdir()] == ["small"]


def test_a_profile_s_folder_that_cannot_be_renamed_stays(own_cache, other, monkeypatch, capsys):
    """As a mount point cannot."""
    before = contents(prepare.PREPARED)

    def busy(path, target):
        raise OSError(errno.EBUSY, "Device or resource busy", str(path))

    monkeypatch.setattr(Path, "rename", busy)
    sentence = refusal(capsys, run_prepare, "--data-dir", other)
    assert f"busy: '{prepare.PREPARED}'; " in sentence and "set AUTORESEARCH_CACHE" in sentence
    assert contents(prepare.PREPARED) == before


def test_a_link_in_the_place_of_the_profile_s_folder_stays_a_link(cache, other, tmp_path):
    """What it points to is replaced, on the disk that the user chose."""
    disk = tmp_path / "disk"
    shutil.copytree(cache / "small", disk / "prepared")
    (tmp_path / "cache").mkdir()
    link = tmp_path / "cache" / "small"
    link.symlink_to(disk / "prepared")
    told = {"AUTORESEARCH_CACHE": tmp_path / "cache"}
    done = run_script(ROOT / "prepare.py", "--data-dir", other, **told)
    assert done.returncode == 0, done.output
    assert link.is_symlink() and len(np.load(link / "train.npy")) == 301
    assert [path.name for path in disk.iterdir()] == ["prepared"]


def test_a_run_that_starts_while_the_folder_is_replaced_does_not_mix(
    own_cache, other, fresh_run, monkeypatch, capsys
):
    load = np.load

    def replace_and_load(*args, **options):
        run_script(ROOT / "prepare.py", "--data-dir", other)
        return load(*args, **options)

    monkeypatch.setattr(np, "load", replace_and_load)
    assert "not as it was prepared" in refusal(capsys, prepare.start)


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


@pytest.mark.parametrize("text", [["a"], {"a": "b"}])
def test_a_column_of_anything_else_is_refused(text, tmp_path, capsys):
    write_parquet(tmp_path / "a.parquet", [text])
    sentence = refusal(capsys, list, prepare.read_shard(tmp_path / "a.parquet"))
    assert "is not a whole parquet file with one column `text` of strings (" in sentence


def test_hidden_files_are_no_shards(other):
    (other / "._shard_00009.parquet").write_bytes(b"what macOS leaves on foreign disks")
    assert len(prepare.find_shards(str(other))) == 2


@pytest.mark.parametrize(
    ("name", "spoil", "words"),
    [
        ("shard_00000", os.unlink, "a folder of at least two *.parquet files"),
        ("shard_00000", lambda path: write_parquet(path, ["a"], "body"), "one column `text`"),
        ("shard_00000", two_columns, "one column `text`"),
        ("shard_00000", invalid_utf8, "('utf-8' codec can't decode byte 0xff"),
        ("shard_00000", lambda path: write_parquet(path, [b"\xff"]), "Invalid UTF8"),
        ("shard_00009", os.mkdir, "is a directory"),
        ("shard_00000", lambda path: write_parquet(path, ["", None]), "hold no text"),
        ("shard_00000", damage_page, "(could not verify page integrity"),
        ("shard_00001", lambda path: write_parquet(path, ["short"]), "fills only 0 of 16 rows"),
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
