"""
prepare.py, the ruler of autoresearch: data, tokenizer, loader, clock, metric, report. Nobody edits it during a night.

    uv run prepare.py                   prepare what this machine's profile needs; idempotent, resumable
    uv run prepare.py --data-dir DIR    a corpus of your own: parquet files with a column `text`, the last is validation
    uv run prepare.py --verify          hash and re-derive what a score rests on

Exit codes, here and in train.py: 0 good, 1 a bug, 2 set-up or usage, 3 integrity, 4 diverged, 5 out of memory,
130, 142 and 143 interrupted. Importing this file does nothing; torch, which takes seconds, is imported where needed.
"""

import argparse
import base64
import bisect
import contextlib
import hashlib
import importlib.metadata
import itertools
import json
import multiprocessing.pool
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from time import monotonic as _now  # bound here: a later patch of `time` moves nothing

import filelock
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import requests
import rustbpe
import tiktoken
from tqdm import tqdm


# ---- Settings: a change of one of these numbers starts a new results table -------------------------------------------
def stop(sentence, code=2):
    """Ends the process with one sentence on stderr: what is wrong and what mends it."""
    print("\n" * sys.stderr.isatty() + f"error: {sentence}", file=sys.stderr, flush=True)  # below a progress line
    raise SystemExit(code)


def by_profile(*, full, small):
    """The value for the profile in force."""
    return full if PROFILE == "full" else small


def environment_number(name, default, kind, low, high):
    """The variable as a number of `kind` with low <= number < high; ends the process for any other."""
    text = os.environ.get(name) or default
    try:
        number = kind(text)
    except ValueError:
        number = None
    if number is None or not low <= number < high:
        what = "a whole number" if kind is int else "a number of seconds"
        stop(f"{name} is {what} from {low:g} to below {high:g}, not {text!r}; change or unset it.")
    return number


GPU_PRESENT = any(map(os.path.exists, ("/dev/nvidiactl", "/usr/lib/wsl/lib/libcuda.so.1")))  # torch would take seconds
GPU_PRESENT &= os.environ.get("CUDA_VISIBLE_DEVICES") not in ("", "-1")
PROFILE = os.environ.get("AUTORESEARCH_PROFILE") or ("full" if GPU_PRESENT else "small")
if PROFILE not in ("full", "small"):
    stop(f"AUTORESEARCH_PROFILE is full or small, not {PROFILE!r}; change or unset it.")
TIME_BUDGET = environment_number("AUTORESEARCH_TIME_BUDGET", 300, float, 0.001, 1e9)  # seconds
WALL_LIMIT = environment_number("AUTORESEARCH_WALL_LIMIT", 0, float, 0, 1e9)  # seconds until a run is ended; 0: never
SEED = environment_number("SEED", 42, int, 0, 2**63)

MAX_SEQ_LEN = by_profile(full=2048, small=512)  # tokens a row
EVAL_TOKENS = by_profile(full=40 * 524288, small=2**18)  # validation tokens scored
VOCAB_SIZE = by_profile(full=8192, small=2048)  # the four special tokens included
CACHE = Path(os.environ.get("AUTORESEARCH_CACHE") or "~/.cache/autoresearch").expanduser().absolute()
ROOT = by_profile(full=CACHE, small=CACHE / "small")  # data/ val/ tokenizer/ tokens/ manifest.json
RUNS = Path(os.environ.get("AUTORESEARCH_RUNS") or CACHE / "runs").expanduser().absolute()
CLIMBMIX, CLIMBMIX_VAL = "karpathy/climbmix-400b-shuffle", 6542  # the last shard is pinned: nothing trains on it
ATTEMPTS, BACKOFF = 5, 1.0  # a download's tries; seconds before the second, doubled before each further one
PACKAGES = "filelock kernels matplotlib numpy pandas pyarrow requests tiktoken torch tqdm".split()
PYTHON_PIECE, PYTHON_HELD_OUT = 2048, 0.05  # characters; of the files
# GPT-4's (cl100k_base), but runs of digits are cut at two, not three: a small vocabulary has no room for 1000 numbers.
SPLIT = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
SPECIAL_TOKENS = [f"<|reserved_{i}|>" for i in range(4)]  # the first is BOS
TOKENIZER_DOC_CHARS, TOKENIZER_CHARS = 10_000, 1_000_000_000
EVAL_BATCH, PROBE_ROWS, NEIGHBOURS = 32, 48, 32  # rows; positions to both sides
BUFFER_DOCS, STARTUP_LIMIT = 1000, 300  # documents; seconds, where 90 compile all anew on a CPU
# Honest models, bf16 and routed ones included, moved by 0 to 2e-5 nats on average and 0.02 at most.
PROBE_MEAN, PROBE_PEAK = 1e-3, 0.1


# ---- Cache: every file appears whole or not at all, and the manifest says when all are there -------------------------
@contextlib.contextmanager
def replacing(path):
    """Yields a file to write, under a name of this process's own; it takes `path`'s place on success only."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            yield file
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def sha256(path):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def load_manifest():
    """Settings, corpus and files made of it, the latter {path below ROOT: [bytes, sha256]}, empty while unfinished."""
    manifest = {"settings": {}, "corpus": {}, "files": {}}
    with contextlib.suppress(FileNotFoundError, ValueError, TypeError):  # unreadable is as good as none
        manifest |= json.loads((ROOT / "manifest.json").read_text())
    return manifest


def save_manifest(settings, corpus=(), files=()):
    corpus, files = ({os.path.relpath(p, ROOT): [p.stat().st_size, sha256(p)] for p in ps} for ps in (corpus, files))
    manifest = {"settings": settings, "corpus": corpus, "files": files}
    with replacing(ROOT / "manifest.json") as file:
        file.write(json.dumps(manifest, indent=1).encode() + b"\n")
    return manifest


def damaged(recorded, hashed="$^"):
    """The recorded files that are missing or have another size or, where the name matches `hashed`, another sha256."""
    for name, (size, digest) in recorded.items():
        path = ROOT / name
        if not path.is_file() or path.stat().st_size != size or (re.search(hashed, name) and sha256(path) != digest):
            yield path


# ---- Corpora: whatever the source, parquet files with a column `text`, the last of which is validation ---------------
def read_shard(path):
    """Yields the non-empty documents of a shard, 512 rows in memory at a time. Raises pa.ArrowInvalid, a sentence."""
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as shard:
            if str(shard.schema_arrow.field("text").type) not in ("string", "large_string"):
                raise KeyError
            for batch in shard.iter_batches(batch_size=512, columns=["text"]):
                yield from filter(None, batch["text"].to_pylist())
    except KeyError:
        raise pa.ArrowInvalid(f"{path} has no column `text` of strings; rename or convert the column.") from None
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise pa.ArrowInvalid(f"{path} is not a whole parquet file; replace it ({str(error)[-80:]}).") from None


def download(url, path, bar):
    """Fetches one shard, unless it is there, going on from what `path`.part holds; returns None, or why it could not be
    had. A body counts if it is as long as announced and opens as a shard: a login page or a cut body never does."""
    part, why = path.with_name(f"{path.name}.part"), "HF_HUB_OFFLINE is set"
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(pa.ArrowInvalid):
        return next(read_shard(path), None) and None
    for attempt in range(0 if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on") else ATTEMPTS):
        time.sleep(BACKOFF * 2 ** (attempt - 1) if attempt else 0)
        headers = {"Accept-Encoding": "identity", "Range": f"bytes={part.stat().st_size if part.exists() else 0}-"}
        try:
            with requests.get(url, stream=True, timeout=60, headers=headers) as reply:
                if reply.status_code != 416:  # 416: no byte lies beyond those that are here
                    reply.raise_for_status()
                    bar.total += int(reply.headers.get("Content-Length", 0))
                    with open(part, "ab" if reply.status_code == 206 else "wb") as file:
                        for chunk in reply.iter_content(1 << 20):  # raises where the body ends early
                            bar.update(file.write(chunk))
            next(read_shard(part), None)
            os.replace(part, path)
            return None
        except requests.RequestException as error:
            why = str(error).rpartition("Caused by ")[2][:160]
            if error.response is not None and error.response.status_code in (400, 401, 403, 404, 410):
                break
        except pa.ArrowInvalid as error:
            why = str(error).partition(";")[0]
            part.unlink()
    part.unlink(missing_ok=True)
    return f"{path.name} ({why})"


def climbmix(num_shards, workers):
    """Returns the shards of ClimbMix, those missing downloaded. Ends the process where one cannot be had."""
    wanted = [ROOT / "data" / f"shard_{i:05d}.parquet" for i in range(num_shards)]
    wanted.append(ROOT / "val" / f"shard_{CLIMBMIX_VAL:05d}.parquet")
    url = (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/") + f"/datasets/{CLIMBMIX}/resolve/main"
    bar = tqdm(total=0, unit="B", unit_scale=True, desc="download", disable=None)
    with bar, multiprocessing.pool.ThreadPool(max(1, workers)) as pool:
        failed = [*filter(None, pool.map(lambda path: download(f"{url}/{path.name}", path, bar), wanted, chunksize=1))]
    if failed:
        stop(f"{len(failed)} of {len(wanted)} shards failed, first {failed[0]}; mend network or take --corpus python.")
    return wanted


def python_corpus():
    """Writes the embedded corpus, sources of the library and of PACKAGES less tests, and returns its shards. Its path's
    hash holds a file out. They are cut at line ends: of whole files packing would use 2.5 of 38 million tokens."""
    library, texts, sides = Path(os.__file__).parent, {}, ([], [])
    files = [(file.relative_to(library), file) for file in sorted(library.rglob("*.py"))]
    files += [(file, Path(file.locate())) for name in PACKAGES for file in importlib.metadata.files(name)]
    for name, file in files:
        if name.suffix == ".py" and not {"site-packages", "dist-packages", "test", "tests"}.intersection(name.parts):
            with contextlib.suppress(OSError, UnicodeDecodeError):
                texts.setdefault(file.read_bytes().decode(), name.as_posix())  # no vendored copy on the other side
    for text, name in texts.items():
        side = sides[int(hashlib.sha256(name.encode()).hexdigest()[:8], 16) < PYTHON_HELD_OUT * 2**32]
        pieces = re.findall(rf"(?s).{{1,{PYTHON_PIECE}}}\n|.{{1,{PYTHON_PIECE}}}", text)
        side.extend((hashlib.sha256(f"{name}:{i}".encode()).digest(), piece) for i, piece in enumerate(pieces))
    train, val = ([piece for _, piece in sorted(side)] for side in sides)
    shards = {f"data/python_{i}.parquet": train[i::8] for i in range(8)} | {"val/python.parquet": val}
    for name in itertools.filterfalse(lambda name: (ROOT / name).exists(), shards):
        with replacing(ROOT / name) as file:
            pq.write_table(pa.table({"text": pa.array(shards[name], pa.string())}), file, compression="zstd")
    return [ROOT / name for name in shards]


def choose_corpus(args):
    """(settings that decide the corpus, function that returns its shards)."""
    if args.data_dir:
        files = sorted(Path(args.data_dir).glob("*.parquet"))
        if len(files) < 2:
            stop(f"{args.data_dir} holds {len(files)} *.parquet files; give a folder of two or more, or a --corpus.")
        return {"files": [[f.name, f.stat().st_size, f.stat().st_mtime_ns] for f in files]}, lambda: files
    if (args.corpus or by_profile(full="climbmix", small="python")) == "climbmix":
        count = CLIMBMIX_VAL if args.num_shards == -1 else min(args.num_shards, CLIMBMIX_VAL)
        return {"climbmix": count}, lambda: climbmix(count, args.download_workers)
    return {"python": sys.version} | {name: importlib.metadata.version(name) for name in PACKAGES}, python_corpus


# ---- Tokenizer -------------------------------------------------------------------------------------------------------
class Tokenizer:
    """Byte-level BPE over `ranks` {bytes: id}, four special tokens right above, which no text yields. `token_bytes`,
    int32 [vocabulary]: their raw bytes (as a string, a part of a character would count three), 0 for special tokens."""

    def __init__(self, ranks):
        self.special = {name: len(ranks) + i for i, name in enumerate(SPECIAL_TOKENS)}
        self.encoding = tiktoken.Encoding("", pat_str=SPLIT, mergeable_ranks=ranks, special_tokens=self.special)
        self.decode = self.encoding.decode
        self.token_bytes = np.int32([*map(len, sorted(ranks, key=ranks.get)), *[0] * len(SPECIAL_TOKENS)])

    @classmethod
    def from_directory(cls, directory=None):
        """Reads tokenizer.tiktoken, a line a token: base64 of its bytes, its id."""
        lines = (Path(directory or ROOT / "tokenizer") / "tokenizer.tiktoken").read_bytes().splitlines()
        return cls({base64.b64decode(token): int(rank) for token, rank in map(bytes.split, lines)})

    def get_vocab_size(self):
        return self.encoding.n_vocab

    def get_bos_token_id(self):
        return self.special[SPECIAL_TOKENS[0]]

    def encode(self, text, prepend=None):
        """Ids of a str, or of each in a list, behind `prepend`: None, a token id or a special name, else ValueError."""
        if not isinstance(text, str):
            return [self.encode(one, prepend) for one in text]
        first = self.special.get(prepend, prepend)
        if first is not None and not (type(first) is int and 0 <= first < self.get_vocab_size()):
            raise ValueError(f"prepend is a token id or one of {SPECIAL_TOKENS}, not {prepend!r}")
        ids = [] if first is None else [first]
        for i in range(0, len(text), 200_000):  # near a million blanks in a row overflow the split pattern's stack
            ids += self.encoding.encode_ordinary(text[i : i + 200_000])
        return ids


def train_tokenizer(shards, path):
    """Trains on the shards and writes tokenizer.tiktoken, unless it is there."""

    def texts(left=TOKENIZER_CHARS):
        for text in itertools.chain.from_iterable(map(read_shard, shards)):
            yield text[: min(TOKENIZER_DOC_CHARS, left)]
            if (left := left - min(len(text), TOKENIZER_DOC_CHARS)) <= 0:
                return

    if not path.exists():
        if not any(texts()):
            stop("the training shards hold no text; fill their column `text`, or give --num-shards above 0.")
        print(f"training a tokenizer of {VOCAB_SIZE} tokens", flush=True)
        trainer = rustbpe.Tokenizer()
        trainer.train_from_iterator(texts(), VOCAB_SIZE - len(SPECIAL_TOKENS), pattern=SPLIT)
        with replacing(path) as file:
            file.writelines(base64.b64encode(bytes(t)) + b" %d\n" % i for t, i in trainer.get_mergeable_ranks())


# ---- Token cache: a document is tokenised once, here, and not in each of the hundred runs of a night -----------------
def write_tokens(job):
    """Writes a shard's documents as flat little-endian uint16 tokens, BOS in front of each, and in .npy their offsets,
    int64 [documents + 1], unless both are there. `job`: (tokenizer's folder, shard, flat file)."""
    tokenizer, shard, flat = Tokenizer.from_directory(job[0]), *job[1:]
    if not (flat.exists() and flat.with_suffix(".npy").exists()):
        ends = [0]
        with replacing(flat) as file:
            for text in read_shard(shard):
                ids = tokenizer.encode(text, prepend=tokenizer.get_bos_token_id())
                file.write(np.array(ids, dtype="<u2").tobytes())
                ends.append(ends[-1] + len(ids))
        with replacing(flat.with_suffix(".npy")) as file:
            np.save(file, np.array(ends, dtype=np.int64))


def read_tokens(flat):
    """Yields the documents of a token file, uint16."""
    tokens, ends = np.memmap(flat, dtype="<u2", mode="r").view(np.ndarray), np.load(flat.with_suffix(".npy")).tolist()
    yield from (tokens[begin:end] for begin, end in itertools.pairwise(ends))


def pack_rows(documents, row_len, buffer_docs=BUFFER_DOCS):
    """Best-fit packing: yields full uint16 rows [row_len] of uint16 documents that begin with BOS, so that rows do too.
    The buffer holds `buffer_docs` documents, topped up one at a time. Into what is left of a row goes the largest that
    fits whole; where none does, the shortest is cut and its tail dropped; of equals, the oldest."""
    source, held, order = enumerate(documents), {}, []  # order: sorted keys, length above age
    while True:  # binary search among 1000 keys: a bitmask of lengths, constant time, measured no faster
        row, filled = np.empty(row_len, dtype=np.uint16), 0
        while filled < row_len:
            for age, document in itertools.islice(source, buffer_docs - len(order)):
                held[age] = document
                bisect.insort(order, len(document) << 40 | age)
            if not order:
                return
            place = bisect.bisect_left(order, (row_len - filled + 1) << 40)
            place = place and bisect.bisect_left(order, order[place - 1] >> 40 << 40)
            document = held.pop(order.pop(place) & ((1 << 40) - 1))[: row_len - filled]
            row[filled : filled + len(document)] = document
            filled += len(document)
        yield row


def write_rows(flat):
    """Writes val/rows.bin, the packed validation rows, uint16 [rows, MAX_SEQ_LEN + 1], and returns its path."""
    wanted, path = EVAL_TOKENS // MAX_SEQ_LEN, flat.with_name("rows.bin")
    rows = list(itertools.islice(pack_rows(read_tokens(flat), MAX_SEQ_LEN + 1), wanted))
    if (count := len(rows) // EVAL_BATCH * EVAL_BATCH) == 0:
        stop(f"validation, the last file, fills {len(rows)} rows of tokens; make it longer, {EVAL_BATCH} is the least.")
    if count < wanted:
        print(f"validation fills {len(rows)} rows: {count} are scored, not {wanted}", flush=True)
    with replacing(path) as file:
        file.writelines(row.astype("<u2").tobytes() for row in rows[:count])
    return path


# ---- Loader and clock ------------------------------------------------------------------------------------------------
# Times of import, evaluate_bpb entered and left, (time, tokens) of every batch; commit and hash of the code; score.
_run = argparse.Namespace(imported=_now(), stopped=None, scored=None, served=[], code=(), beside=[], val_bpb=None)


def elapsed():
    """Seconds of training: since the first batch was served, until evaluate_bpb was entered; 0.0 before."""
    return (_run.stopped or _now()) - _run.served[0][0] if _run.served else 0.0


def gpu_processes():
    """Ids of the processes besides this one that compute on the GPU in use, as far as the driver tells. Of its list
    exactly one entry is this process, in a container under another id."""
    import torch

    if not torch.cuda.is_available():
        return []
    torch.zeros(1, device="cuda")  # only with a tensor on the card does the driver surely list this process
    torch.cuda.synchronize()
    uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid  # nvidia-smi counts devices its own way
    query = ("nvidia-smi", f"--id=GPU-{uuid}", "--query-compute-apps=pid", "--format=csv,noheader")
    try:
        output = subprocess.check_output(query, stderr=subprocess.DEVNULL, text=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return []
    listed = [word for word in output.split() if word.isdigit()]
    if len(listed) < 2:
        return []
    return [process for process in listed if process != str(os.getpid())]


def check_cache(run=True):
    """Returns the manifest of a whole cache of this prepare.py; else, or for a `run` on a GPU in use, exits with 2."""
    manifest = load_manifest()
    if not manifest["files"] or manifest["settings"]["prepare"] != sha256(__file__):
        stop(f"{ROOT} is not prepared by this prepare.py; run `AUTORESEARCH_PROFILE={PROFILE} uv run prepare.py`.")
    for path in damaged(manifest["files"], hashed="tokenizer|rows"):
        stop(f"{path} is missing or not as it was prepared; run `uv run prepare.py` to mend it.")
    if run and not _run.code:  # the code may change during the run
        _run.code, _run.beside = (commit(), sha256(sys.modules["__main__"].__file__)), gpu_processes()
        if _run.beside and os.environ.get("AUTORESEARCH_SHARED_GPU") != "1":
            stop(f"another process computes on this GPU (nvidia-smi names {', '.join(_run.beside)}); let it end, take "
                 "another GPU by CUDA_VISIBLE_DEVICES, or set AUTORESEARCH_SHARED_GPU=1.")  # fmt: skip
    return manifest


def make_dataloader(tokenizer, B, T, split="train", buffer_size=BUFFER_DOCS):
    """Yields (inputs, targets, epoch) for ever: fresh int64 [B, T] on the training device, targets one token ahead; the
    rows do not depend on B. The first batch starts the clock. Raises ValueError for a split other than "train"."""
    if split != "train":
        raise ValueError(f'split must be "train", not {split!r}: validation rows are read by evaluate_bpb alone')
    import torch

    device = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    _run.files = check_cache()["files"]
    shards = [ROOT / name for name in _run.files if re.fullmatch(r"tokens/.*\.bin", name)]
    shards, epoch = shards[SEED % len(shards) :] + shards[: SEED % len(shards)], [0]
    documents = (document for epoch[0] in itertools.count(1) for shard in shards for document in read_tokens(shard))

    def batches():
        rows = pack_rows(documents, T + 1, buffer_size)
        while True:
            batch = torch.from_numpy(np.stack(list(itertools.islice(rows, B))).astype(np.int64))
            batch = (batch.pin_memory() if device == "cuda" else batch).to(device, non_blocking=True)  # kept while read
            _run.served.append((_now(), B * T))
            # clone, not contiguous, which copies nothing of a single row: a change of one would be one of the other
            inputs = batch[:, :-1].clone(memory_format=torch.contiguous_format)
            targets = batch[:, 1:].clone(memory_format=torch.contiguous_format)
            yield inputs, targets, epoch[0]

    return batches()


# ---- Metric ----------------------------------------------------------------------------------------------------------
class IntegrityError(Exception):
    """A score that cannot be trusted; the message names the check and the number."""


def eval_batch_size(rows, batch_size):
    """The largest divisor of `rows` that is at most min(batch_size, EVAL_BATCH), so that nothing is dropped."""
    return max(size for size in range(1, min(max(batch_size, 1), EVAL_BATCH) + 1) if rows % size == 0)


def token_losses(model, inputs, targets, vocab_size):
    """Cross-entropy in nats, float32 [B, T], of the logits that `model` gives for the tokens `inputs`
    [B, T], against `targets` [B, T], which it never sees. Raises IntegrityError."""
    import torch

    device = next(model.parameters()).device
    logits = model(torch.from_numpy(inputs.astype(np.int64)).to(device))
    shape = tuple(logits.shape) if type(logits) is torch.Tensor else type(logits).__name__
    if type(logits) is not torch.Tensor or shape[:-1] != targets.shape or shape[-1] < vocab_size:
        wanted = (*targets.shape, vocab_size)
        raise IntegrityError(f"shape: model(x) returned {shape}, not a plain tensor of {wanted}")
    targets = torch.from_numpy(targets.astype(np.int64)).to(device)
    losses = []
    for row, target in zip(logits, targets, strict=True):  # an fp32 copy of all would be the largest tensor
        # Not logsumexp minus gather, which cancels: 2**28 added to all logits would score 0.
        log_probs = row.float().log_softmax(-1)
        losses.append(-log_probs.gather(-1, target[:, None])[:, 0])
    return torch.stack(losses).cpu().numpy()


def draw_cuts(losses, count, rng):
    """Positions 1 to T - 1 in front of which `count` rows are cut, int [count], given the losses of
    all rows [N, T]. A quarter each: log-uniform from the front, where a prefix may see itself;
    log-uniform from the end; at odd multiples of 16, 32, ... T / 2, where chunks end; and behind the
    positions whose mean loss is lowest against the median of their neighbours', since a position
    that sees its target stands out."""
    T = losses.shape[1]
    shares = [len(share) for share in np.array_split(np.arange(count), 4)]
    front = np.exp(rng.uniform(0, np.log(T), shares[0])).astype(int)
    end = T - np.exp(rng.uniform(0, np.log(T), shares[1])).astype(int)
    periods = 2 ** rng.integers(4, max(np.log2(T), 5), shares[2])
    chunks = periods * (2 * rng.integers(0, np.maximum(T // (2 * periods), 1)) + 1)
    mean = np.pad(losses.mean(0, dtype=np.float64), NEIGHBOURS, constant_values=np.nan)
    around = np.lib.stride_tricks.sliding_window_view(mean, 2 * NEIGHBOURS + 1)
    suspicion = np.nanmedian(around, axis=1) - losses.mean(0, dtype=np.float64)
    behind = np.argsort(-suspicion, kind="stable")[: shares[3]] + 1
    return np.clip(np.concatenate([front, end, chunks, behind]), 1, T - 1)


def probe(model, rows, losses, size, vocab_size, rng):
    """{probe: changes in nats} of rows [N, T + 1] that are scored once more, in batches of `size`,
    where every other one has other tokens behind a cut: what is before it must not move (causality;
    the first loss and the last one before the cut: edges), nor any untouched row (isolation). Where
    one does, the same batches are scored twice more, as they are (repeatability)."""
    count = size * max(1, min(PROBE_ROWS, len(rows)) // size)
    chosen = rng.permutation(len(rows))[:count]
    before, tokens = losses[chosen], rows[chosen]

    def again(inputs):
        batches = np.split(np.arange(count), count // size)
        found = [token_losses(model, inputs[b, :-1], tokens[b, 1:], vocab_size) for b in batches]
        return np.concatenate(found)

    cut = np.full((count, 1), tokens.shape[1])  # none
    cut[1::2, 0] = rng.permutation(draw_cuts(losses, count // 2, rng))
    altered = np.where(np.arange(tokens.shape[1]) < cut, tokens, np.roll(tokens, 1, axis=0))
    moved = np.abs(again(altered) - before)
    position = np.arange(moved.shape[1])
    edges = (position == cut - 1) | (position == 0)
    probes = {
        "isolation": moved[::2],
        "causality": moved[1::2][(position < cut)[1::2]],
        "edges": moved[1::2][edges[1::2]],
    }
    if probes["isolation"].mean() > PROBE_MEAN:  # because of the other rows, or by itself?
        probes = {"repeatability": np.abs(again(tokens) - again(tokens))} | probes
    return probes


def score(model, rows, token_bytes, batch_size, rng=None):
    """(bits per byte, {probe: changes in nats}) of `model` over packed rows, uint16 [N, T + 1]: its
    logits [B, T, V] for x int64 [B, T], against targets that it never sees, where those stand for
    bytes; summed in fp64. Rows are scored and probed in an order that `rng` (numpy) draws. Raises
    IntegrityError."""
    import torch

    rng = np.random.default_rng(rng)
    size = eval_batch_size(len(rows), batch_size)
    losses = np.empty((len(rows), rows.shape[1] - 1), dtype=np.float32)
    model.eval()
    with torch.no_grad():
        for batch in np.split(rng.permutation(len(rows)), len(rows) // size):
            losses[batch] = token_losses(model, rows[batch, :-1], rows[batch, 1:], len(token_bytes))
        broken = np.count_nonzero(~np.isfinite(losses))
        if broken:
            raise IntegrityError(f"finite: {broken} losses are NaN or infinite")
        probes = probe(model, rows, losses, size, len(token_bytes), rng)
    for name, change in probes.items():
        if change.size and not (change.mean() <= PROBE_MEAN and change.max() <= PROBE_PEAK):
            raise IntegrityError(f"{name}: losses moved by {change.mean():.2g} nats, one by {change.max():.2g}")
    length = token_bytes[rows[:, 1:]]
    nats = losses.sum(where=length > 0, dtype=np.float64)
    return nats / (np.log(2) * length.sum(dtype=np.int64)), probes


def evaluate_bpb(model, tokenizer, batch_size):
    """Bits per byte of `model` over every packed validation row, by `score`; `batch_size`, an upper bound, changes it
    not. Stops the clock; to be called once. On failure prints `val_bpb: nan` and `integrity: FAIL ...`, and exits with
    3. No check inside a process stops determined code, or knows that weights came from an earlier run: for that are
    --verify and a re-run of the commit in a clean worktree with AUTORESEARCH_RUNS, HOME and TMPDIR of its own."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()  # what is still queued is training
    again, _run.stopped = _run.stopped is not None, _run.stopped or _now()
    try:
        if again or not _run.served:
            raise IntegrityError("once: evaluate_bpb was called before" if again else "loader: it never served a batch")
        for path in damaged(_run.files, hashed="tokenizer|rows"):
            raise IntegrityError(f"data: {path.name} changed since training began; run `uv run prepare.py`")
        rows = np.fromfile(ROOT / "val" / "rows.bin", dtype="<u2").reshape(-1, MAX_SEQ_LEN + 1)
        _run.val_bpb, _ = score(model, rows, Tokenizer.from_directory().token_bytes, batch_size)
    except IntegrityError as error:
        print(f"---\nval_bpb: nan\nintegrity: {json.dumps(f'FAIL {error}')}", flush=True)
        raise SystemExit(3) from None
    _run.scored = _now()
    return _run.val_bpb


# ---- Report ----------------------------------------------------------------------------------------------------------
KEYS = """val_bpb training_seconds total_seconds peak_vram_mb mfu_percent total_tokens_M num_steps num_params_M depth
    train_loss eval_seconds startup_seconds tokens_per_second peak_reserved_mb profile time_budget seed device
    attention torch commit data prepare integrity""".split()


def commit():
    """The short commit that runs, `+dirty` where tracked files differ; AUTORESEARCH_COMMIT where there is no git."""
    describe = ("git", "-C", Path(__file__).parent, "describe", "--always", "--exclude=*", "--dirty=+dirty")
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        return subprocess.check_output(describe, stderr=subprocess.DEVNULL, text=True).strip()
    return os.environ.get("AUTORESEARCH_COMMIT") or "none"


def flags(total_tokens):
    """What a reader must know before comparing this run's number with another's, or `ok`."""
    marks, served = _run.served[len(_run.served) // 10 :], sum(tokens for _, tokens in _run.served)
    halves = (marks[: len(marks) // 2 + 1], marks[len(marks) // 2 :]) if len(marks) >= 20 else ()
    first, second = [sum(n for _, n in half[:-1]) / (half[-1][0] - half[0][0]) for half in halves] or (1, 1)
    checks = {
        f"startup: {(late := _run.served[0][0] - _run.imported):.0f} s, over {STARTUP_LIMIT}": late > STARTUP_LIMIT,
        "shared: another process computed on this GPU": _run.beside or gpu_processes(),
        f"overtime: {elapsed():.1f} of {TIME_BUDGET:g} s": elapsed() > 1.02 * TIME_BUDGET + 2,
        f"loader: {total_tokens} tokens trained on, {served} served": total_tokens > served,
        f"unsteady: {first:.0f} tokens/s, then {second:.0f}": abs(second / first - 1) > 0.10,
    }
    return "; ".join(flag for flag, raised in checks.items() if raised) or "ok"


def report(val_bpb, *, total_tokens, **stats):
    """Prints the final block, `---` and `key: value` lines that are also YAML, writes it with the sha256 of train.py as
    JSON into RUNS and returns that path. Raises ValueError for a score or a key that is not train.py's to give."""
    own = {
        "val_bpb": val_bpb, "training_seconds": elapsed(), "total_seconds": _now() - _run.imported,
        "total_tokens_M": total_tokens / 1e6, "eval_seconds": _run.scored - _run.stopped,
        "startup_seconds": _run.served[0][0] - _run.imported, "tokens_per_second": total_tokens / elapsed(),
        "profile": PROFILE, "time_budget": TIME_BUDGET, "seed": SEED, "torch": importlib.metadata.version("torch"),
        "commit": _run.code[0], "data": hashlib.sha256(json.dumps(load_manifest()["files"]).encode()).hexdigest()[:8],
        "prepare": sha256(__file__)[:8], "integrity": flags(total_tokens),
    }  # fmt: skip
    if val_bpb != _run.val_bpb or own.keys() & stats.keys():
        raise ValueError(f"evaluate_bpb returned {_run.val_bpb}; the ruler itself reports {sorted(own)}")
    block = {key: (own | stats)[key] for key in dict.fromkeys([*KEYS, *stats]) if key in own | stats}
    print("---")
    for key, value in block.items():
        if isinstance(value, float):
            value = format(value, ".6f" if key in ("val_bpb", "train_loss") else ".2f")
        elif isinstance(value, str) and not re.fullmatch(r"(?!\d*\.?\d+(e\d+)?$)[\w.][\w .+()/-]*", value):
            value = json.dumps(value)  # what YAML would take for a number or for its own syntax
        print(f"{key}: {value}", flush=True)
    path = RUNS / f"{time.strftime('%Y%m%dT%H%M%S')}_{block['commit']}_{SEED}_{os.getpid()}.json"
    with replacing(path) as file:
        block = {key: value if value == value else None for key, value in block.items()} | {"train": _run.code[1]}
        file.write(json.dumps(block, indent=1).encode() + b"\n")
    return path


# ---- Command ---------------------------------------------------------------------------------------------------------
def prepare(args):
    """Makes what is missing; whatever the settings no longer fit goes first."""
    manifest, (settings, make_shards) = load_manifest(), choose_corpus(args)
    settings |= {"prepare": sha256(__file__), "vocab_size": VOCAB_SIZE, "split_pattern": SPLIT}
    settings["choice"] = {key: vars(args)[key] for key in ("corpus", "data_dir", "num_shards")}
    corpus = {} if "files" in manifest["settings"] else manifest["corpus"]  # not ours to delete: a user's own folder
    stale = [*damaged(corpus | manifest["files"], "tokenizer|rows"), *ROOT.rglob(".*.tmp")]  # .tmp: of killed processes
    if settings != manifest["settings"]:
        stale += [p for glob in ("tok*/*", "val/*.bin", "val/*.npy", "*/python*.parquet") for p in ROOT.glob(glob)]
    if stale or not manifest["files"]:
        list(map(any, map(read_shard, () if "python" in settings else make_shards())))  # fails before anything goes
        for path in stale:
            path.unlink(missing_ok=True)
        save_manifest(settings)
        shards, vocabulary = make_shards(), ROOT / "tokenizer" / "tokenizer.tiktoken"
        train_tokenizer(shards[:-1], vocabulary)
        flats = [*(ROOT / "tokens" / f"{shard.stem}.bin" for shard in shards[:-1]), ROOT / "val" / "tokens.bin"]
        jobs = [(vocabulary.parent, shard, flat) for shard, flat in zip(shards, flats, strict=True)]
        context, ignore = multiprocessing.get_context("spawn"), (signal.SIGINT, signal.SIG_IGN)  # the parent ends them
        with context.Pool(min(os.cpu_count() or 1, len(jobs)), signal.signal, ignore) as pool:
            list(tqdm(pool.imap(write_tokens, jobs), "tokenise", len(jobs), unit="shard", disable=None))
        files = [vocabulary, *flats, *(flat.with_suffix(".npy") for flat in flats), write_rows(flats[-1])]
        manifest = save_manifest(settings, shards, files)
    rows = manifest["files"]["val/rows.bin"][0] // (2 * (MAX_SEQ_LEN + 1))
    print(f"ready: {PROFILE} profile, {len(manifest['corpus'])} shards, {rows} validation rows; next: uv run train.py")


def verify():
    """Lists what speaks against a score, all files hashed and some tokens derived again, and exits with 3, else 0."""
    manifest, bpe, here = check_cache(run=False), Tokenizer.from_directory(), Path(__file__).parent
    recorded = manifest["corpus"] | manifest["files"]
    found = [f"{p} is not as recorded; restore or delete it, then prepare again" for p in damaged(recorded, "")]
    for name, flat in () if found else zip(manifest["corpus"], [*manifest["files"]][1:]):
        pairs = itertools.islice(zip(read_shard(ROOT / name), read_tokens(ROOT / flat)), 100)
        if any(bpe.token_bytes[ids].sum() != len(t.encode()) or bpe.decode(ids[1:]) != t for t, ids in pairs):
            found.append(f"{ROOT / flat} is not the text of {name}; delete it and prepare again")
    git = subprocess.run("env git status --porcelain prepare.py".split(), cwd=here, capture_output=True, text=True)
    found += ["prepare.py differs from the commit; `git restore prepare.py`"] if git.stdout else []
    tree = (path for path in here.rglob("*") if not {".git", ".venv"}.intersection(path.relative_to(here).parts))
    found += [f"{f} could carry state, over 1 MB; move it" for f in tree if f.is_file() and f.stat().st_size > 10**6]
    print(*found or [f"verified: {len(recorded)} files" + ("" if git.returncode else ", prepare.py")], sep="\n")
    raise SystemExit(3 if found else 0)


def main():
    parser = argparse.ArgumentParser(description="Prepares corpus, tokenizer and validation rows for train.py.")
    parser.add_argument("--num-shards", type=int, default=20, help="training shards of ClimbMix, -1 for all (20)")
    parser.add_argument("--download-workers", type=int, default=8, help="downloads at a time (8)")
    parser.add_argument("--corpus", choices=("climbmix", "python"), help="default: climbmix in full, python in small")
    parser.add_argument("--verify", action="store_true", help="check what a score rests on, change nothing")
    parser.add_argument("--data-dir", type=os.path.abspath, metavar="DIR", help="parquet files, the last is validation")
    choice = load_manifest()["settings"].get("choice", {}) if len(sys.argv) == 1 else {}  # none: that of the cache
    args = parser.parse_args(namespace=argparse.Namespace(**choice))
    try:
        if args.verify:
            verify()
        ROOT.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(ROOT / ".lock") if os.access(ROOT, os.W_OK) else contextlib.nullcontext():
            prepare(args)
    except pa.ArrowInvalid as error:
        stop(error)
    except OSError as error:
        stop(f"{error}; make it writable, free space, or set AUTORESEARCH_CACHE to another folder.")
    except KeyboardInterrupt:
        stop("interrupted; what is finished stays, run the same command to go on.", 130)


if __name__ == "__main__":
    main()
