"""Tests prepare.py's settings, tokenizer, packing, corpora, preparation, loader and clock."""

import errno
import fcntl
import hashlib
import importlib.metadata
import itertools
import json
import os
import random
import re
import runpy
import shutil
import sys
import time
import types
from collections import Counter
from pathlib import Path
from unittest.mock import Mock

import prepare
from benchmarks import overhead
from tests.common import ROOT, make_corpus, make_texts, write_parquet
from tools import experiment

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st


def refusal(capsys, function, *arguments):
    """Returns the one sentence with which `function` exits."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        function(*arguments)
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.count("\n") == 1, error
    return error


# ---- Settings ----
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("AUTORESEARCH_PROFILE", "huge"),
        ("AUTORESEARCH_TIME_BUDGET", "5m"),
        ("AUTORESEARCH_TIME_BUDGET", "0"),
        ("AUTORESEARCH_TIME_BUDGET", "nan"),
        ("AUTORESEARCH_TIME_BUDGET", "inf"),
        ("SEED", "1.5"),
        ("SEED", str(2**64)),
    ],
)
def test_a_bad_environment_gets_one_sentence(name, value, monkeypatch, capsys):
    monkeypatch.setenv(name, value)
    assert name in refusal(capsys, runpy.run_path, str(ROOT / "prepare.py"))


@pytest.mark.parametrize(
    ("profile", "values"),
    [
        ("full", (2048, 20_971_520, 8192)),
        ("medium", (2048, 2_097_152, 8192)),
        ("small", (512, 262_144, 2048)),
    ],
)
def test_the_profile_decides_the_settings(profile, values, monkeypatch, tmp_path):
    """The cache may be in the home folder, and a profile's folder a link to another disk: what is
    prepared replaces what the link points to, and not the link."""
    disk = tmp_path / "disk"
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / profile).symlink_to(disk)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AUTORESEARCH_CACHE", "~/cache")
    monkeypatch.setenv("AUTORESEARCH_PROFILE", profile)
    ruler = types.SimpleNamespace(**runpy.run_path(str(ROOT / "prepare.py")))
    assert values == (ruler.MAX_SEQ_LEN, ruler.EVAL_TOKENS, ruler.VOCAB_SIZE)
    assert [disk, tmp_path / "cache" / "runs"] == [ruler.PREPARED, ruler.RUNS]


# ---- Tokenizer ----
@pytest.fixture(scope="module")
def tokenizer():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare, "VOCAB_SIZE", 500)
        return prepare.Tokenizer(prepare.train_tokenizer([make_texts(300)]))


@example("café 日本語")  # tokens of several bytes
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
    """Makes another corpus, with what macOS leaves on foreign disks beside it."""
    folder = make_corpus(tmp_path / "other", train=(300,), val=400)
    (folder / "._shard_00009.parquet").write_bytes(b"no shard")
    return folder


# The first digits of the sha256 of what is made of the corpus below.
GOLDEN = {
    "val.u16": "f27969b59e10d4fc",
    "train.u16": "cba6effe5120e2e7",
    "train.npy": "dcbe4072652758d6",
    "data": "43afe828",
    "vocabulary": "c1d080665f76e9b9",
    "python corpus": "3da48806fe52adcb",
}


def test_the_prepared_files_are_the_same_as_ever(tmp_path, monkeypatch):
    """Scores compare only between runs on the same tokens and rows."""
    monkeypatch.setattr(prepare, "CACHE", tmp_path)
    monkeypatch.setattr(prepare, "PREPARED", tmp_path / "small")
    corpus = make_corpus(tmp_path / "corpus", train=(300, 300), val=700)
    rng = random.Random(5)
    long = "".join(rng.choices("aaabcdeé \n.'01", k=250_000))  # the tokenizer learns its beginning
    texts = pa.array([long, "", None, "last"], pa.large_string())  # strings of any kind will do
    write_parquet(corpus / "shard_00000b.parquet", texts)
    run_prepare("--data-dir", corpus)
    made = contents(prepare.PREPARED)
    manifest = json.loads(made.pop("manifest.json"))
    made["vocabulary"] = " ".join(manifest["vocabulary"]).encode()
    monkeypatch.setattr(prepare, "python_sources", made_up_sources)
    made["python corpus"] = json.dumps(prepare.python_corpus()).encode()
    made = {name: hashlib.sha256(content).hexdigest()[:16] for name, content in made.items()}
    made["data"] = manifest["data"]
    assert made == GOLDEN, "if that is intended, record these hashes here"


def test_whoever_edits_prepare_py_has_to_prepare_anew(own_cache, tmp_path):
    """Even if the edit changes nothing: who could tell?"""
    copy = tmp_path / "prepare.py"
    shutil.copy(ROOT / "prepare.py", copy)
    assert runpy.run_path(str(copy))["load"]() is not None
    copy.write_text(copy.read_text() + "# an edit\n")
    assert runpy.run_path(str(copy))["load"]() is None


def test_a_cache_is_made_anew_only_for_another_recipe(own_cache, fresh_run, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        patch.setattr(prepare, "build", None)
        run_prepare()
    profile, _, ready = capsys.readouterr().out.splitlines()
    assert profile.startswith("profile: small, ")
    pattern = r"ready: small profile, 0\.\d million training tokens \(at most 100% fit rows\), "
    assert re.match(pattern + r"\d+ validation rows of shard_00002.parquet; next", ready)
    monkeypatch.setattr(prepare, "RECIPE", ["another version of prepare.py", "0.1.0", "0.14.0"])
    sentence = refusal(capsys, prepare.start)
    assert " is not prepared, is damaged, or was made by another prepare.py; undo" in sentence
    assert "run `AUTORESEARCH_PROFILE=small uv run prepare.py`" in sentence
    run_prepare()
    assert prepare.load_manifest()["recipe"] == prepare.RECIPE


def test_a_recipe_is_the_file_and_the_packages_that_make_tokens():
    versions = [importlib.metadata.version(name) for name in ("rustbpe", "tiktoken")]
    assert [prepare.file_hash(ROOT / "prepare.py"), *versions] == prepare.RECIPE


def test_the_corpus_chosen_last_stays(own_cache, other, tmp_path, monkeypatch, capsys):
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
    shutil.rmtree(other)
    run_prepare()  # what is whole needs its text no more
    assert "\nready: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("last", "options", "built"),
    [
        (7, (), None),
        (7, ("--num-shards", 7), 7),
        (20, ("--corpus", "python"), "python"),
    ],
)
def test_an_option_builds_and_none_keeps_what_is_there(
    own_cache, monkeypatch, last, options, built
):
    manifest = prepare.load_manifest() | {"corpus": last}
    (prepare.PREPARED / "manifest.json").write_text(json.dumps(manifest))
    calls = []

    def build(corpus, folder):
        calls.append(corpus)
        shutil.copytree(prepare.PREPARED, folder)

    monkeypatch.setattr(prepare, "build", build)
    run_prepare(*options)
    assert calls == ([] if built is None else [built])


@pytest.mark.parametrize("count", [0, -2])
def test_a_number_of_shards_is_above_zero_or_all(own_cache, count, capsys):
    before = contents(own_cache)
    assert "--num-shards must be above 0" in refusal(capsys, run_prepare, "--num-shards", count)
    assert contents(own_cache) == before


@pytest.mark.parametrize("content", ["", '{"options": {"corpus": "python"}}'])  # cut off; older
def test_a_text_that_is_not_known_is_not_replaced_by_another(content, own_cache, capsys):
    (prepare.PREPARED / "manifest.json").write_text(content)
    before = contents(own_cache)
    assert "does not say from what it was made; name it" in refusal(capsys, run_prepare)
    assert contents(own_cache) == before


def test_a_text_in_the_profile_s_own_folder_stays(own_cache, capsys):
    """So does all else that is no prepared file: the folder may be a link to a user's."""
    text = make_corpus(prepare.PREPARED, train=(300,), val=400)
    own = {name: content for name, content in contents(text).items() if "shard" in name}
    run_prepare("--data-dir", text)
    assert own.items() <= contents(text).items() and len(contents(text)) == len(own) + 4
    assert len(prepare.load().ends) == 301


def test_a_text_of_few_rows_is_told(own_cache, tmp_path, monkeypatch, capsys):
    """A document keeps one row, however long. The last file by name is for validation."""
    folder = tmp_path / "long"
    book = " ".join(make_texts(600))
    write_parquet(folder / "train.parquet", make_texts(400))
    monkeypatch.setattr(prepare, "EVAL_TOKENS", 512 * 16)
    for documents, warned in (([book], True), (re.findall("(?s).{1,500}", book), False)):
        write_parquet(folder / "test.parquet", documents)
        run_prepare("--data-dir", folder)
        *_, before, ready = capsys.readouterr().out.splitlines()
        advice = "warning: runs will repeat 513 tokens; add text, or split its documents."
        assert (before == advice) == warned and ready.endswith(
            f" (at most {1 if warned else 100}% fit rows), 16 validation rows of train.parquet; "
            "next: uv run train.py"
        )


def test_few_long_documents_are_in_memory_at_a_time(tmp_path, monkeypatch):
    write_parquet(tmp_path / "long.parquet", ["a" * 2**20] * 64)
    documents = prepare.read_shard(tmp_path / "long.parquet")
    next(documents)
    assert pa.total_allocated_bytes() < 40 * 2**20
    read = []
    monkeypatch.setattr(prepare, "read_shard", lambda shard: (read.append(0) or "a" for _ in shard))
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    next(prepare.read_tokens(range(5000), prepare.Tokenizer(["61"])))
    assert len(read) == 64


# ---- Damage ----
def flip(path, place):
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def change_vocabulary(path):
    manifest = json.loads(path.read_text())
    manifest["vocabulary"][300] = "00"
    path.write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        ("train.u16", lambda path: os.truncate(path, 5000)),
        ("train.npy", os.unlink),
        ("train.npy", lambda path: os.truncate(path, 0)),
        ("val.u16", lambda path: flip(path, 5)),
        ("manifest.json", change_vocabulary),
    ],
)
def test_a_damaged_cache_is_refused_and_mended(name, spoil, own_cache, fresh_run, capsys):
    before = contents(own_cache)
    spoil(prepare.PREPARED / name)
    assert "is damaged, or was made" in refusal(capsys, prepare.start)
    run_prepare()
    assert contents(own_cache) == before


# ---- Interruptions and two at once ----
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
    run_prepare()
    assert [path.name for path in own_cache.iterdir()] == ["small"]


def test_a_preparation_killed_while_it_replaces_files_asks_for_the_text(
    own_cache, other, fresh_run, monkeypatch, capsys
):
    """It prepares no other text than the user's."""
    replace = Path.replace

    def killed(path, target):
        if path.name == prepare.ROWS_FILE:
            raise KeyboardInterrupt
        return replace(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            run_prepare("--data-dir", other)
    assert "run `AUTORESEARCH_PROFILE=small uv" in refusal(capsys, prepare.start)
    assert "does not say from what it was made; name it" in refusal(capsys, run_prepare)
    run_prepare("--data-dir", other)
    assert len(prepare.load().ends) == 301
    assert [path.name for path in own_cache.iterdir()] == ["small"]


def test_a_run_that_starts_while_the_folder_is_replaced_does_not_mix(
    own_cache, other, fresh_run, monkeypatch, capsys
):
    """It has read the old rows and finds new tokens."""
    new = own_cache / "new"
    prepare.build(str(other), new)
    read = np.fromfile

    def read_and_replace(*arguments, **options):
        rows = read(*arguments, **options)
        shutil.rmtree(prepare.PREPARED)
        new.rename(prepare.PREPARED)
        return rows

    monkeypatch.setattr(np, "fromfile", read_and_replace)
    assert "is damaged, or was made" in refusal(capsys, prepare.start)


def test_a_second_preparation_waits_for_the_first(own_cache, monkeypatch, capsys):
    held = os.open(own_cache, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    monkeypatch.setattr(sys, "argv", ["prepare.py"])
    monkeypatch.setattr(time, "sleep", lambda seconds: os.close(held))
    prepare.main()
    said = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in said] == ["waiting", "profile:", "warning:", "ready:"]


@pytest.mark.parametrize("locked", [prepare.lock, experiment.lock])
def test_a_file_system_without_locks_refuses_nobody(tmp_path, monkeypatch, locked):
    place = tmp_path if locked is prepare.lock else os.open(tmp_path, os.O_RDONLY)
    for error, answer in ((OSError(errno.ENOLCK, "no locks"), True), (BlockingIOError(), False)):
        monkeypatch.setattr(fcntl, "flock", Mock(side_effect=error))
        assert locked(place) is answer


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


def test_the_sources_are_those_of_the_library_and_of_packages(tmp_path, monkeypatch):
    """Each text counts once, and only if it is UTF-8."""
    kept = {"a.py": b"a = 1\n", "b/c.py": "c = 'é'\n".encode()}
    left_out = ["test/t.py", "b/tests/t.py", "site-packages/s.py", "dist-packages/d.py", "n.txt"]
    texts = kept | {name: name.encode() for name in left_out}
    for name, text in (texts | {"z.py": kept["a.py"], "latin.py": b"\xe9"}).items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(text)
    monkeypatch.setattr(prepare.os, "__file__", str(tmp_path / "os.py"))
    monkeypatch.setattr(prepare, "PACKAGES", ["tqdm", "not-installed"])
    files = importlib.metadata.files
    monkeypatch.setattr(
        importlib.metadata, "files", lambda package: files(package) if package == "tqdm" else None
    )
    names = [*prepare.python_sources().values()]
    assert names[:2] == ["a.py", "b/c.py"] and "tqdm/std.py" in names
    assert all(name.startswith("tqdm/") and name.endswith(".py") for name in names[2:])


@pytest.mark.parametrize(("profile", "usual"), [("full", 20), ("medium", 20), ("small", "python")])
def test_without_options_each_profile_has_its_text(tmp_path, monkeypatch, profile, usual):
    monkeypatch.setattr(prepare, "PROFILE", profile)
    monkeypatch.setattr(prepare, "PREPARED", tmp_path / "nothing")
    assert prepare.usual_corpus() == usual
    monkeypatch.setattr(prepare, "climbmix", lambda count: f"{count} of ClimbMix")
    monkeypatch.setattr(prepare, "python_corpus", lambda: "sources")
    assert prepare.find_shards(usual) == ("sources" if usual == "python" else "20 of ClimbMix")


# ---- Bad input: one sentence, exit code 2, nothing lost ----
@pytest.mark.parametrize(
    ("name", "spoil", "words"),
    [
        ("shard_00000", os.unlink, "a folder of at least two *.parquet files"),
        ("shard_00000", lambda path: write_parquet(path, ["a"], "body"), "one column `text`"),
        ("shard_00000", lambda path: write_parquet(path, [["a"]]), "one column `text` of strings"),
        ("shard_00000", lambda path: write_parquet(path, [b"\xff"]), "Invalid UTF8"),
        ("shard_00000", lambda path: write_parquet(path, ["", None]), "hold no text"),
        ("shard_00000", lambda path: os.truncate(path, 5000), "is not a whole parquet file"),
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


# ---- Loader ----
@pytest.mark.parametrize("B", [1, 4])
def test_batches_are_shifted_fresh_and_begin_with_bos(cache, fresh_run, B):
    """Inputs and targets share no memory, even with one row."""
    tokenizer = prepare.Tokenizer.from_directory()
    loader = prepare.make_dataloader(tokenizer, B, 64)
    x, y, epoch = next(loader)
    kept = x.clone()
    assert x.shape == y.shape == (B, 64) and x.dtype == y.dtype == torch.int64
    assert x.stride() == y.stride() == (64, 1)  # others would be compiled for again
    assert (x[:, 1:] == y[:, :-1]).all() and epoch == 1
    assert (x[:, 0] == tokenizer.get_bos_token_id()).all()
    y.zero_()
    next(loader)
    assert (x == kept).all()


@pytest.mark.parametrize(("seed", "B"), [(42, 64), (43, 1)])
def test_rows_are_the_documents_of_the_shards_rotated_by_the_seed(
    cache, corpus, fresh_run, monkeypatch, seed, B
):
    """They do not depend on the batch size."""
    monkeypatch.setattr(prepare, "SEED", seed)
    tokenizer = prepare.Tokenizer.from_directory()
    names = [f"shard_0000{(seed + i) % 2}.parquet" for i in range(2)] * 2  # two epochs
    texts = itertools.chain.from_iterable(prepare.read_shard(corpus / name) for name in names)
    rows = prepare.pack_rows(map(tokenizer.encode_document, texts), 513)
    packed = np.stack([row[:-1] for row in itertools.islice(rows, 640)])
    batches = itertools.islice(prepare.make_dataloader(None, B, 512), 640 // B)
    served, epochs = zip(*[(np.asarray(inputs), epoch) for inputs, _, epoch in batches])
    assert (np.concatenate(served) == packed).all()
    assert epochs[0] == 1 and epochs[-1] == 2 and list(epochs) == sorted(epochs)


def test_validation_rows_are_not_served():
    with pytest.raises(ValueError, match="evaluate_bpb"):
        prepare.make_dataloader(None, 1, 64, split="val")


def test_the_first_batch_starts_the_clock_and_everything_after_counts(
    cache, fresh_run, monkeypatch
):
    """In a notebook, too, whose __main__ has no file. Patching `time` stops no clock."""
    monkeypatch.setitem(sys.modules, "__main__", types.ModuleType("__main__"))
    loader = prepare.make_dataloader(None, 1, 64)
    time.sleep(0.05)
    assert prepare.elapsed() == 0.0
    next(loader)
    begun = prepare.elapsed()
    monkeypatch.setattr(time, "monotonic", lambda: 0.0)
    time.sleep(0.05)
    next(prepare.make_dataloader(None, 1, 64))  # a second loader does not start it again
    assert begun + 0.05 <= prepare.elapsed() and fresh_run.served == 128
