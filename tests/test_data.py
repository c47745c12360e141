"""Settings, tokenizer, token cache, packing, corpora, preparation."""

import inspect
import itertools
import json
import runpy
import shutil
import sys

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


# ---- Settings ----
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("AUTORESEARCH_PROFILE", "huge"),
        ("AUTORESEARCH_TIME_BUDGET", "five minutes"),
        ("AUTORESEARCH_TIME_BUDGET", "-1"),
        ("AUTORESEARCH_TIME_BUDGET", "0"),
        ("AUTORESEARCH_TIME_BUDGET", "nan"),
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
    assert name in error and repr(value) in error and error.count("\n") == 1


def test_settings_are_checked_without_asserts():
    """Under `python -O`, which drops them."""
    done = run_script("-O", ROOT / "prepare.py", AUTORESEARCH_TIME_BUDGET="nan")
    assert done.returncode == 2 and "AUTORESEARCH_TIME_BUDGET" in done.stderr, done.output
    assert done.output.count("\n") == 1


def test_the_profile_decides_the_settings(monkeypatch):
    monkeypatch.setenv("AUTORESEARCH_PROFILE", "full")
    full = runpy.run_path(str(ROOT / "prepare.py"))
    names = ("MAX_SEQ_LEN", "EVAL_TOKENS", "VOCAB_SIZE")
    assert [full[name] for name in names] == [2048, 20_971_520, 8192]
    assert [getattr(prepare, name) for name in names] == [512, 262_144, 2048]
    assert full["ROOT"] == full["CACHE"] and prepare.ROOT == prepare.CACHE / "small"
    monkeypatch.setenv("AUTORESEARCH_PROFILE", "medium")
    medium = runpy.run_path(str(ROOT / "prepare.py"))
    assert [medium[name] for name in names] == [2048, 2_097_152, 8192]
    assert medium["ROOT"] == full["ROOT"]
    assert medium["PACKED_TOKENS"] == full["EVAL_TOKENS"]
    assert full["RUNS"] == prepare.RUNS == prepare.CACHE / "runs"


# ---- Tokenizer ----
@pytest.fixture(scope="module")
def tokenizer():
    trainer = rustbpe.Tokenizer()
    trainer.train_from_iterator(iter(make_texts(300)), 600, pattern=prepare.SPLIT)
    return prepare.Tokenizer({bytes(token): rank for token, rank in trainer.get_mergeable_ranks()})


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
    assert tokenizer.get_bos_token_id() == size - 4
    assert len(tokenizer.token_bytes) == size and list(tokenizer.token_bytes[-4:]) == [0] * 4
    assert max(tokenizer.encode("<|reserved_0|> and <|reserved_3|>")) < size - 4


def test_prepend(tokenizer):
    bos = tokenizer.get_bos_token_id()
    expected = [bos, *tokenizer.encode("a")]
    assert tokenizer.encode("a", prepend=bos) == expected
    assert tokenizer.encode("a", prepend="<|reserved_0|>") == expected
    assert tokenizer.encode(["a", "b"], prepend=bos) == [[bos, *tokenizer.encode(x)] for x in "ab"]
    for wrong in ("<|nothing|>", -1, 10**6, True, 1.5):
        with pytest.raises(ValueError, match="prepend"):
            tokenizer.encode("a", prepend=wrong)


def test_a_million_blanks_are_encoded(tokenizer):
    text = " " * 1_000_000
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_digits_come_at_most_in_pairs(tokenizer):
    for token in tokenizer.encode("1234567890 31415926"):
        content = tokenizer.encoding.decode_single_token_bytes(token)
        assert sum(byte in b"0123456789" for byte in content) <= 2


def test_the_tokenizer_is_trained_on_the_beginning_of_each_document(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, "TOKENIZER_DOC_CHARS", 10)
    monkeypatch.setattr(prepare, "TOKENIZER_CHARS", 25)
    write_parquet(tmp_path / "a.parquet", ["a" * 12, "b" * 4])
    write_parquet(tmp_path / "b.parquet", ["c" * 9, "d" * 9, "e"])
    texts = prepare.tokenizer_texts([tmp_path / "a.parquet", tmp_path / "b.parquet"])
    assert list(texts) == ["a" * 10, "b" * 4, "c" * 9, "d" * 2]


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


def test_packing_never_holds_more_than_its_buffer():
    taken = []

    def source():
        for document in documents_of([5] * 1000):
            taken.append(document)
            yield document

    rows = prepare.pack_rows(source(), 10, buffer_docs=20)
    next(rows)
    assert len(taken) <= 20 + 2


# ---- Shards ----
@pytest.mark.parametrize(
    "kind",
    [
        pa.string(),
        pa.large_string(),
        pa.string_view(),
        pa.dictionary(pa.int32(), pa.string()),
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


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([1, 2], pa.int64()),
        ([1, 2], pa.dictionary(pa.int32(), pa.int64())),
        ([b"a", b"b"], pa.binary()),
        ([["a"], ["b"]], pa.list_(pa.string())),
    ],
    ids=str,
)
def test_columns_of_anything_else_are_refused(tmp_path, values, kind):
    write_parquet(tmp_path / "shard.parquet", values, kind=kind)
    with pytest.raises(prepare.ShardError, match="shard.parquet has no column `text` of strings"):
        next(prepare.read_shard(tmp_path / "shard.parquet"))


def test_a_shard_is_read_bit_by_bit(tmp_path, monkeypatch):
    """Not whole: 512 rows are in memory at a time."""
    sizes = []
    real = pq.ParquetFile.iter_batches

    def noted(self, **options):
        for batch in real(self, **options):
            sizes.append(len(batch))
            yield batch

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", noted)
    texts = make_texts(1100, words=9)
    write_parquet(tmp_path / "shard.parquet", texts)
    assert list(prepare.read_shard(tmp_path / "shard.parquet")) == texts
    assert sum(sizes) == 1100 and max(sizes) <= 512


# ---- Preparation ----
class Inline:
    """The process pool's interface, in this process: what a worker raises the parent sees."""

    @staticmethod
    def Pool(*_):  # noqa: N802
        return Inline()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    imap = staticmethod(map)


@pytest.fixture
def run_prepare(monkeypatch):
    """Calls prepare.main with arguments, in this process: the start of others takes a second."""
    monkeypatch.setattr(prepare.multiprocessing, "get_context", lambda kind: Inline)

    def call(*args):
        monkeypatch.setattr(sys, "argv", ["prepare.py", *map(str, args)])
        prepare.main()

    return call


def prepared(cache):
    return json.loads((cache / "small" / "manifest.json").read_text())


def times(folder):
    """{file: when it was written} of all but locks."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"]
    return {path: path.stat().st_mtime_ns for path in files}


def test_preparation_lays_out_the_cache(cache):
    manifest = prepared(cache)
    root = cache / "small"
    assert [*manifest["corpus"]] == sorted(manifest["corpus"]) and len(manifest["corpus"]) == 3
    assert not list((root / "tokens").glob("shard_00002*"))  # validation: no training reads it
    flat = np.fromfile(root / "tokens/shard_00000.bin", "<u2")
    offsets = np.load(root / "tokens/shard_00000.npy")
    bos = prepare.Tokenizer.from_directory(root / "tokenizer").get_bos_token_id()
    assert offsets[-1] == len(flat) and len(offsets) == 1501
    assert (flat[offsets[:-1]] == bos).all()
    rows = np.fromfile(root / "val/rows.u16", "<u2").reshape(-1, 513)
    assert len(rows) % 32 == 0 and (rows[:, 0] == bos).all()


def test_the_manifest_says_which_tokens_are_of_which_shard(cache):
    manifest = prepared(cache)
    assert [*manifest["tokens"]] == [*manifest["corpus"]]
    assert [*manifest["tokens"].values()] == [
        "tokens/shard_00000.bin",
        "tokens/shard_00001.bin",
        "val/tokens.u16",
    ]
    assert set(manifest["tokens"].values()) < set(manifest["files"])
    tokenizer = prepare.Tokenizer.from_directory(cache / "small" / "tokenizer")
    for shard, flat in manifest["tokens"].items():
        texts = list(prepare.read_shard(cache / "small" / shard))
        documents = list(prepare.read_tokens(cache / "small" / flat))
        assert len(texts) == len(documents)
        assert tokenizer.decode(documents[-1][1:]) == texts[-1]


def test_validation_rows_are_the_packed_validation_shard(cache):
    flat = cache / "small" / "val" / "tokens.u16"
    rows = np.fromfile(flat.with_name("rows.u16"), "<u2").reshape(-1, 513)
    packed = itertools.islice(prepare.pack_rows(prepare.read_tokens(flat), 513), len(rows))
    assert (np.stack(list(packed)) == rows).all()


def test_a_second_preparation_changes_nothing(own_cache, corpus, run_prepare, capsys):
    before = times(own_cache)
    run_prepare("--data-dir", corpus)
    out = capsys.readouterr().out
    assert out.startswith("profile: small, as AUTORESEARCH_PROFILE says\nready: small profile")
    assert "tokenizer" not in out
    assert times(own_cache) == before


def test_what_is_damaged_is_made_again_and_nothing_else(own_cache, corpus, run_prepare):
    damaged = own_cache / "small/tokens/shard_00001.bin"
    whole = damaged.read_bytes()
    before = times(own_cache)
    damaged.write_bytes(whole[:-100])
    with pytest.raises(SystemExit) as stop:
        prepare.check_cache()
    assert stop.value.code == 2
    run_prepare("--data-dir", corpus)
    assert damaged.read_bytes() == whole
    kept = own_cache / "small/tokens/shard_00000.bin"
    assert times(own_cache)[kept] == before[kept]
    prepare.check_cache()


def test_a_changed_byte_in_what_a_score_rests_on_is_mended(own_cache, corpus, run_prepare):
    """What train.py refuses and sends its user to prepare.py for, prepare.py must see as well."""
    path = own_cache / "small" / "val" / "rows.u16"
    whole = path.read_bytes()
    path.write_bytes(whole[:5] + bytes([whole[5] ^ 1]) + whole[6:])
    with pytest.raises(SystemExit):
        prepare.check_cache()
    run_prepare("--data-dir", corpus)
    prepare.check_cache()
    assert path.read_bytes() == whole


def test_changed_settings_redo_every_stage(own_cache, corpus, tmp_path):
    before = prepared(own_cache)
    source = (ROOT / "prepare.py").read_text()
    assert "small=2048" in source
    (tmp_path / "prepare.py").write_text(source.replace("small=2048", "small=300"))
    assert run_script(tmp_path / "prepare.py", "--data-dir", corpus).returncode == 0
    after = prepared(own_cache)
    assert after["settings"]["vocab_size"] == 300
    assert [*before["corpus"].values()] == [*after["corpus"].values()]
    changed = {name for name in after["files"] if after["files"][name] != before["files"][name]}
    assert {"tokenizer/tokenizer.tiktoken", "tokens/shard_00000.bin", "val/rows.u16"} <= changed
    with pytest.raises(SystemExit):  # and what another prepare.py made is not trained on
        prepare.check_cache()


def test_another_version_of_this_file_redoes_what_it_makes_differently(own_cache, corpus, tmp_path):
    source = (ROOT / "prepare.py").read_text()
    script = tmp_path / "prepare.py"

    def prepare_by(old, new):
        assert old in source
        script.write_text(source.replace(old, new))
        done = run_script(script, "--data-dir", corpus)
        assert done.returncode == 0, done.output
        return [time for path, time in times(own_cache).items() if path.name != "manifest.json"]

    before = prepare_by("", "")
    same = prepare_by("PROBE_MEAN = 1e-3", "PROBE_MEAN = 2e-3")
    assert same == before
    prepare.check_cache()  # both versions can use it
    assert len(prepared(own_cache)["rulers"]) == 2
    packed_otherwise = prepare_by(
        "bisect_left(order, (space + 1,))", "bisect_left(order, (space,))"
    )
    assert not set(packed_otherwise) & set(before)
    with pytest.raises(SystemExit):
        prepare.check_cache()


# What a preparation calls without an influence on what is made.
PLUMBING = """
    parse_arguments load_manifest main prepare choose_corpus own_corpus build recipe find_stale
    find_damaged decides_score derived_files sha256 check_shards is_text save_manifest
    write_manifest fingerprints replacing choose_profile card_names count_rows ignore_interrupts
    environment_number by_profile
""".split()


def test_the_recipe_names_all_code_that_makes_a_file(own_cache, corpus, run_prepare, monkeypatch):
    called = {}

    def note(frame, event, argument):
        code = frame.f_code
        if event == "call" and code.co_filename == prepare.__file__:
            called[code.co_qualname.split(".")[0]] = code

    for path in prepare.derived_files():
        path.unlink()
    sys.setprofile(note)
    try:
        run_prepare("--data-dir", corpus)
        prepare.python_corpus()
    finally:
        sys.setprofile(None)
    recipe = inspect.getsource(prepare.recipe)
    makers = set(called).difference(PLUMBING)
    assert "write_rows" in makers and "cut_at_lines" in makers
    assert [name for name in sorted(makers) if f" {name},\n" not in recipe] == []


def test_another_corpus_replaces_the_first(own_cache, tmp_path, run_prepare):
    other = make_corpus(tmp_path / "other", train=(900,), val=1100)
    run_prepare("--data-dir", other)
    tokens = sorted(path.name for path in (own_cache / "small/tokens").iterdir())
    assert tokens == ["shard_00000.bin", "shard_00000.npy"]
    prepare.check_cache()
    changed = other / "shard_00000.parquet"
    write_parquet(changed, make_texts(500))
    third = make_corpus(tmp_path / "third", train=(400,), val=1100)
    run_prepare("--data-dir", third)
    assert len([*prepare.read_shard(changed)]) == 500  # a user's folder is read, never written


def test_without_a_choice_the_corpus_stays(own_cache, tmp_path, monkeypatch, run_prepare):
    """program.md and many a message say `uv run prepare.py`: that must not replace a corpus of
    one's own."""
    other = make_corpus(tmp_path / "other", train=(900,), val=1100)
    monkeypatch.chdir(tmp_path)
    run_prepare("--data-dir", "other")
    monkeypatch.chdir("/")
    before = prepared(own_cache)
    assert before["choice"]["data_dir"] == str(other)
    (own_cache / "small/val/rows.u16").unlink()
    run_prepare()
    assert prepared(own_cache) == before
    moved = shutil.copytree(other, tmp_path / "moved")
    run_prepare("--data-dir", moved)
    assert prepared(own_cache) != before
    assert prepared(own_cache)["files"] == before["files"]  # what a record's `data` is the hash of


def test_nothing_half_written_is_kept(own_cache, corpus, run_prepare):
    leftover = own_cache / "small/tokens/.shard_00000.bin.99999999.tmp"
    leftover.write_bytes(b"half")
    with pytest.raises(RuntimeError), prepare.replacing(own_cache / "x") as file:
        file.write(b"half")
        raise RuntimeError
    assert not list(own_cache.glob("*x*"))
    run_prepare("--data-dir", corpus)
    assert not leftover.exists()


@pytest.mark.parametrize("garbage", ["", "{", "[]", "null", '{"prepare": null, "stages": {}}'])
def test_an_unreadable_manifest_is_as_good_as_none(own_cache, garbage):
    (own_cache / "small/manifest.json").write_text(garbage)
    assert prepare.load_manifest()["files"] == {}
    with pytest.raises(SystemExit):
        prepare.check_cache()


def test_fewer_validation_rows_than_wanted_are_said_and_scored_once(own_cache, cache, capsys):
    rows = prepare.ROOT / prepare.VAL_ROWS
    rows.unlink()
    prepare.write_rows(rows.with_name("tokens.u16"))
    assert rows.read_bytes() == (cache / "small" / "val" / "rows.u16").read_bytes()
    count = len(rows.read_bytes()) // (2 * 513)
    assert count < prepare.EVAL_TOKENS // prepare.MAX_SEQ_LEN
    assert f"{count} are scored, not 512" in capsys.readouterr().out


def test_medium_and_full_share_all_that_is_prepared(tmp_path):
    corpus = make_corpus(tmp_path / "corpus", train=(400,), val=3000)

    def prepare_for(profile):
        done = run_script(
            ROOT / "prepare.py",
            *("--data-dir", corpus),
            AUTORESEARCH_PROFILE=profile,
            AUTORESEARCH_CACHE=tmp_path / "cache",
        )
        assert done.returncode == 0, done.output
        assert f"ready: {profile} profile, 2 shards" in done.stdout
        return times(tmp_path / "cache")

    assert prepare_for("medium") == prepare_for("full") == prepare_for("medium")
    assert "tokens" in {path.parent.name for path in times(tmp_path / "cache")}


def test_a_profile_may_score_the_first_rows_of_the_file(cache, fresh_run, monkeypatch):
    packed = np.fromfile(prepare.ROOT / prepare.VAL_ROWS, "<u2").reshape(-1, 513)
    assert len(packed) > 32
    monkeypatch.setattr(prepare, "EVAL_TOKENS", 32 * 512)
    scored = []

    def score(model, rows, token_bytes, batch_size):
        scored.append(rows)
        return 1.0, {}

    monkeypatch.setattr(prepare, "score", score)
    next(prepare.make_dataloader(None, 1, 8))
    assert prepare.eval_batch_size(100) == 32
    assert prepare.evaluate_bpb(torch.nn.Linear(1, 1), None, 100) == 1.0
    assert (scored[0] == packed[:32]).all() and len(scored[0]) == 32


# ---- The embedded corpus ----
def test_embedded_corpus_is_deterministic_and_split_by_file(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, "PACKAGES", ["tqdm", "requests"])
    texts = []
    for name in "ab":
        monkeypatch.setattr(prepare, "ROOT", tmp_path / name)
        shards = prepare.python_corpus()
        texts.append([list(prepare.read_shard(shard)) for shard in shards])
    assert texts[0] == texts[1] and len(shards) == 9 and shards[-1].parent.name == "val"
    train = set(itertools.chain(*texts[0][:-1]))
    val = set(texts[0][-1])
    assert 0.01 < len(val) / (len(train) + len(val)) < 0.15
    assert all(0 < len(piece) <= prepare.PYTHON_PIECE + 1 for piece in train | val)
    shards[3].unlink()  # what a kill in the middle leaves to do, and no more
    before = times(tmp_path / "b")
    assert prepare.python_corpus() == shards
    assert [*prepare.read_shard(shards[3])] == texts[0][3]
    assert times(tmp_path / "b").items() > before.items()


def test_no_piece_of_a_source_is_lost():
    text = "a line\n" * 1000 + "x" * 5000 + "\nlast"
    pieces = prepare.cut_at_lines(text)
    assert "".join(pieces) == text and len(pieces) > 5
    assert all(piece.endswith("\n") for piece in pieces[:2])


# ---- Bad input: one sentence, exit code 2, nothing lost ----
def remove_all_but_one(folder):
    (folder / "shard_00000.parquet").unlink()
    (folder / "shard_00001.parquet").unlink()


def empty_all(folder):
    for path in folder.glob("*"):
        write_parquet(path, ["", None], kind=pa.string())


def scribble(path):
    table = pa.table({"text": make_texts(400)})
    pq.write_table(table, path, compression="zstd", write_page_checksum=True)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


BAD_INPUT = {  # name: (what spoils the folder, what the sentence says)
    "no such folder": (shutil.rmtree, "corpus is not a folder"),
    "one shard": (remove_all_but_one, "holds 1 *.parquet files; give a folder of two or more"),
    "no text": (
        lambda folder: write_parquet(folder / "shard_00000.parquet", ["a"], "body"),
        "no column `text`",
    ),
    "numbers": (
        lambda folder: write_parquet(folder / "shard_00000.parquet", [1, 2]),
        "no column `text` of strings",
    ),
    "not parquet": (
        lambda folder: (folder / "shard_00001.parquet").write_text("<html>"),
        "not a whole parquet",
    ),
    "corrupt page": (
        lambda folder: scribble(folder / "shard_00001.parquet"),
        "not a whole parquet",
    ),
    "empty corpus": (empty_all, "hold no text"),
    "too little validation": (
        lambda folder: write_parquet(folder / "shard_00002.parquet", ["short"]),
        "but 32 is the least",
    ),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_corpora_get_one_sentence(case, tmp_path, monkeypatch, capsys, run_prepare):
    spoil, sentence = BAD_INPUT[case]
    monkeypatch.setattr(prepare, "ROOT", tmp_path / "cache")
    spoil(make_corpus(tmp_path / "corpus", train=(40, 40), val=40))
    with pytest.raises(SystemExit) as stop:
        run_prepare("--data-dir", tmp_path / "corpus")
    error = capsys.readouterr().err
    assert stop.value.code == 2 and sentence in error and error.count("\n") == 1, error
    assert not list(tmp_path.rglob("*.tmp")) and prepare.load_manifest()["files"] == {}


def test_a_damaged_shard_in_a_worker_process_is_one_sentence_too(tmp_path):
    make_corpus(tmp_path / "corpus", train=(40, 40), val=40)
    scribble(tmp_path / "corpus" / "shard_00002.parquet")  # validation: only the workers read it
    arguments = ("--data-dir", tmp_path / "corpus")
    done = run_script(ROOT / "prepare.py", *arguments, AUTORESEARCH_CACHE=tmp_path / "cache")
    assert done.returncode == 2 and "not a whole parquet file" in done.stderr
    assert "Traceback" not in done.output


@pytest.mark.parametrize("choice", [("--data-dir", "bad"), ("--corpus", "climbmix")])
def test_a_corpus_that_cannot_be_used_leaves_the_cache_as_it_was(
    choice, own_cache, tmp_path, monkeypatch, run_prepare
):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    write_parquet(tmp_path / "bad/a.parquet", ["a"], "body")
    write_parquet(tmp_path / "bad/b.parquet", ["b"], "body")
    before = times(own_cache)
    with pytest.raises(SystemExit) as stop:
        run_prepare(*choice)
    assert stop.value.code == 2
    assert times(own_cache) == before


def test_an_unusable_cache_gets_one_sentence(tmp_path, corpus):
    (tmp_path / "file").write_text("in the way")
    place = {"AUTORESEARCH_CACHE": tmp_path / "file"}
    done = run_script(ROOT / "prepare.py", "--data-dir", corpus, **place)
    assert done.returncode == 2 and "AUTORESEARCH_CACHE" in done.stderr
    assert "Traceback" not in done.output


def test_an_unprepared_cache_is_named_with_the_command_that_makes_one(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(prepare, "ROOT", tmp_path)
    with pytest.raises(SystemExit) as stop:
        prepare.check_cache()
    error = capsys.readouterr().err
    assert stop.value.code == 2 and str(tmp_path) in error and error.count("\n") == 1
    assert "run `AUTORESEARCH_PROFILE=small uv run prepare.py`" in error
