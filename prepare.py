"""
prepare.py, the ruler of autoresearch: data, tokenizer, loader, clock, metric. Nobody edits it
during a night of research.

    uv run prepare.py                  prepare what this machine needs
    uv run prepare.py --data-dir DIR   a corpus of your own: parquet files with a column `text`; the
                                       last by name is validation

Exit codes, also of train.py: 0 success, 1 a bug, 2 set-up or usage, 3 integrity, 4 diverged, 5 out
of memory.
"""

import argparse
import base64
import bisect
import contextlib
import ctypes
import errno
import fcntl
import hashlib
import importlib.metadata
import itertools
import json
import logging
import math
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from multiprocessing.pool import ThreadPool
from pathlib import Path
from time import monotonic as _now  # bound here, so that patching `time` has no effect

_imported = _now()  # total_seconds counts from here
# Before CUDA starts: without it a batch size that just fits may fail later.
os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import requests
import rustbpe
import tiktoken
import torch
from tqdm import tqdm

# ==== Part 1: what a run uses ====


# ---- Device and profile ----
DEVICE = torch.device("mps" if torch.backends.mps.is_available() else "cpu")
if torch.cuda.is_available():
    DEVICE = torch.device("cuda")
DEVICE_NAME = torch.cuda.get_device_name() if DEVICE.type == "cuda" else DEVICE.type
CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")  # microseconds per period, in a container
DRIVERS = ("/dev/nvidiactl", "/usr/lib/wsl/lib/libcuda.so.1")  # NVIDIA's, in Linux and in WSL


def stop(sentence, code=2):
    """Exits with one sentence: what is wrong and how to fix it."""
    print(f"error: {sentence}", file=sys.stderr, flush=True)
    raise SystemExit(code)


def choose_profile():
    """From the environment, else by the memory of the card."""
    chosen = os.environ.get("AUTORESEARCH_PROFILE")
    if chosen or DEVICE.type != "cuda":
        return chosen or "small"
    memory = torch.cuda.get_device_properties(DEVICE).total_memory
    return "full" if memory >= 40e9 else "medium"


def check_device():
    """Exits where there is an NVIDIA GPU that torch cannot use."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    usable = hidden or not any(os.path.exists(path) for path in DRIVERS)
    if DEVICE.type == "cuda":
        usable = torch.cuda.get_device_capability() >= (7, 5)  # Turing, the oldest in this torch
    if not usable:
        stop(
            "torch cannot use the GPU here; update its driver (to 580 or newer), or set "
            "CUDA_VISIBLE_DEVICES to a GPU from Turing on, or to -1 for none."
        )


PROFILE = choose_profile()
if PROFILE not in ("full", "medium", "small"):
    stop(f"AUTORESEARCH_PROFILE is full, medium or small, not {PROFILE!r}; change or unset it.")


# ---- Settings ----
def by_profile(*, full, medium, small):
    """The value for the profile in force."""
    return {"full": full, "medium": medium, "small": small}[PROFILE]


try:
    TIME_BUDGET = float(os.environ.get("AUTORESEARCH_TIME_BUDGET") or 300)  # seconds
    SEED = int(os.environ.get("SEED") or 42)
    if not (0 < TIME_BUDGET < 1e9 and 0 <= SEED < 2**63):
        raise ValueError("out of range")
except ValueError as error:
    stop(f"AUTORESEARCH_TIME_BUDGET or SEED: {error}; change or unset it.")

# Only runs that share these can be compared.
MAX_SEQ_LEN = by_profile(full=2048, medium=2048, small=512)  # tokens per row
EVAL_TOKENS = by_profile(full=40 * 2**19, medium=2**21, small=2**18)  # validation tokens scored
VOCAB_SIZE = by_profile(full=8192, medium=8192, small=2048)  # the four special tokens included
EVAL_BATCH = 32  # rows per batch of evaluation, at most
BUFFER_DOCS = 1000  # documents among which packing chooses

# GPT-4's pattern, but runs of digits are cut at two: a small vocabulary has no room for thousands.
SPLIT = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}]++[\r\n]*"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)
SPECIAL_TOKENS = [f"<|reserved_{i}|>" for i in range(4)]  # the first is BOS

# By how many nats a loss may move in `probe`. Honest models: 2e-5 on average, 0.02 at one position.
PROBE_MEAN = 1e-3
PROBE_PEAK = 0.1
PROBE_ROWS = by_profile(full=288, medium=112, small=56)  # rows scored again, at most
NEIGHBOURS = 32  # positions to each side that the loss at a position is compared with

# Limits of `flags`.
OVERTIME = 1 + 0.01 * TIME_BUDGET  # seconds allowed beyond the budget
PATIENCE = max(300, TIME_BUDGET)  # seconds before the first batch, and of evaluation
UNSTEADY = 0.10  # relative change of speed within a run

DIVERGED = 100  # nats; a higher loss, or NaN, ends the run
PROGRESS_SECONDS = 5  # between two lines of progress

# What a run may not assign to; checked when it is scored.
_frozen = {name: value for name, value in globals().items() if name.isupper()}


# ---- Cache: raw shards are only ever added, derived files are made together ----
def folder_from(variable, default):
    """The folder that an environment variable names; `~` is the home folder."""
    folder = os.environ.get(variable) or default
    try:
        return Path(folder).expanduser().absolute()
    except RuntimeError:
        return stop(f"{folder} has no home folder here; set {variable} to an absolute path.")


def make_folder(folder, variable):
    """Creates the folder that a variable sets. Exits if it cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        stop(f"{folder} cannot be written ({error.strerror}); set {variable} to another folder.")


CACHE = folder_from("AUTORESEARCH_CACHE", "~/.cache/autoresearch")
RUNS = folder_from("AUTORESEARCH_RUNS", CACHE / "runs")  # a record per run
DATA = CACHE / "data"
VAL = CACHE / "val"
ROOT = CACHE / PROFILE  # what is derived
TOKENIZER_FILE = "tokenizer.tiktoken"
TOKENS_FILE = "train.u16"  # all training documents, flat, BOS before each
ENDS_FILE = "train.npy"  # where each begins and ends, int64 [documents + 1]
ROWS_FILE = "val.u16"  # packed validation rows, uint16 [rows, MAX_SEQ_LEN + 1]
FILES = (TOKENIZER_FILE, TOKENS_FILE, ENDS_FILE, ROWS_FILE)

RECIPE = [  # all that the derived files depend on, besides the corpus
    1,  # raised by hand with any change of this file that changes a derived file
    *(VOCAB_SIZE, EVAL_TOKENS, MAX_SEQ_LEN, EVAL_BATCH, BUFFER_DOCS),
    *(importlib.metadata.version(name) for name in ("rustbpe", "tiktoken")),
]


def load_manifest():
    """What was prepared, or {}: among it `shards`, the number of each training shard's first
    document, and `files`, {name: [bytes, sha256]}."""
    with contextlib.suppress(OSError, ValueError):
        return json.loads((ROOT / "manifest.json").read_text())
    return {}


def sha256(path):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def find_damaged(files, hashed):
    """The first file with another size or, if in `hashed`, another sha256."""
    for name, (size, digest) in files.items():
        path = ROOT / name
        if not path.is_file() or path.stat().st_size != size:
            return path
        if name in hashed and sha256(path) != digest:
            return path
    return None


def check_cache():
    """Returns the manifest. Exits unless the cache is complete and of this recipe."""
    manifest = load_manifest()
    problem = f"{ROOT} is not prepared"
    if manifest.get("recipe") == RECIPE:
        damaged = find_damaged(manifest["files"], (TOKENIZER_FILE, ROWS_FILE))
        if not damaged:
            return manifest
        problem = f"{damaged} is missing or not as it was prepared"
    return stop(f"{problem}; run `AUTORESEARCH_PROFILE={PROFILE} uv run prepare.py`.")


def lock(folder):
    """Locks a folder until this process ends, as the handle stays open; False if another has it."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        return False
    except OSError:
        pass  # a file system without locks
    return True


def lock_run(folder):
    """Keeps a second run out of a folder. Exits if one is going on."""
    if not lock(folder):
        stop("another run is going on in this folder; wait for it, or end it (pgrep -af train.py).")


# ---- Tokenizer ----
class Tokenizer:
    """Byte-level BPE over `ranks` {bytes: id}; special tokens come next. `token_bytes`, int32 [V],
    counts raw bytes, 0 for special ones: a part of a character would decode to U+FFFD, of three."""

    def __init__(self, ranks):
        self.special = {name: len(ranks) + i for i, name in enumerate(SPECIAL_TOKENS)}
        self.encoding = tiktoken.Encoding(
            "autoresearch", pat_str=SPLIT, mergeable_ranks=ranks, special_tokens=self.special
        )
        lengths = [len(token) for token in sorted(ranks, key=ranks.get)]
        self.token_bytes = np.array(lengths + [0] * len(SPECIAL_TOKENS), dtype=np.int32)

    @classmethod
    def from_directory(cls, directory=None):
        """From a line per token: base64 of its bytes, then its id."""
        ranks = {}
        for line in Path(directory or ROOT, TOKENIZER_FILE).read_bytes().splitlines():
            token, rank = line.split()
            ranks[base64.b64decode(token)] = int(rank)
        return cls(ranks)

    def get_vocab_size(self):
        return self.encoding.n_vocab

    def get_bos_token_id(self):
        return self.special[SPECIAL_TOKENS[0]]

    def encode_document(self, text):
        """BOS, then the ids of a text, uint16."""
        ids = [[self.get_bos_token_id()]]
        # In pieces: a million spaces overflow the split pattern's stack.
        for begin in range(0, len(text), 200_000):
            piece = text[begin : begin + 200_000]
            ids.append(self.encoding.encode_to_numpy(piece, disallowed_special=()))
        return np.concatenate(ids).astype("<u2")

    def encode(self, text, prepend=None):
        """The ids of a text, or of each in a list, after the token `prepend`."""
        if not isinstance(text, str):
            return [self.encode(one, prepend) for one in text]
        ids = self.encode_document(text)[1:].tolist()
        return ids if prepend is None else [prepend, *ids]

    def decode(self, ids):
        return self.encoding.decode(ids)


# ---- Start of a run ----
class Run:
    """The state of this process's run; `start` adds what it reads. Times are those of `_now`."""

    def __init__(self):
        self.manifest = {}
        self.watched = [os.path.realpath(folder) for folder in (ROOT, DATA, VAL)]  # of text
        self.opened = set()  # files of text that the run itself opened
        self.served = []  # (time, rows, tokens per row) of each batch
        self.losses = 0  # number of losses logged
        self.smooth_loss = 0.0  # mean of the latest
        self.curve = []  # smooth_loss at 10, 20, ... 100 % of the budget
        self.last_line = -math.inf  # when log_step printed one
        self.eval_began = None  # which stops the clock
        self.record = None


_run = Run()
OWNER = "AUTORESEARCH_PROCESS"  # names the process that owns the run


def check_process():
    """Exits in a child process of a run: no clock and no verdict would reach what it does."""
    owner = os.environ.get(OWNER, os.getpid())
    if int(owner) != os.getpid():
        stop(f"this is a child of the run in process {owner}; load, read and score data there.", 3)


def current_commit():
    """The short hash, `+dirty` if git status lists anything; without git AUTORESEARCH_COMMIT."""

    def git(*arguments):
        command = ["git", "-C", Path(__file__).parent, *arguments]
        said = subprocess.check_output(command, stderr=subprocess.DEVNULL)
        return said.decode(errors="replace").strip()

    try:
        dirty = "+dirty" if git("status", "--porcelain") else ""
        return git("rev-parse", "--short", "HEAD") + dirty
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("AUTORESEARCH_COMMIT") or "none"


def watch(event, arguments):
    """An audit hook that notes which corpus files a run opens itself: its own loader may meet
    validation rows. What pyarrow reads, or a copy, is not seen."""
    if event == "open" and not isinstance(arguments[0], int):
        folder, name = os.path.split(os.path.realpath(os.fsdecode(arguments[0])))
        if folder in _run.watched and name.endswith((".parquet", ".u16", ".npy")):
            if _run.manifest:  # after start, which children inherit
                check_process()
            _run.opened.add(name)


sys.addaudithook(watch)


def keep_memory():
    """Makes glibc keep what is freed: zeroing it anew takes a tenth of each step on a CPU."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt:
        mallopt(-4, 0)  # M_MMAP_MAX
        mallopt(-1, -1)  # M_TRIM_THRESHOLD


def obey_quota():
    """Takes as many threads as a container may use cores: of its quota torch knows nothing."""
    with contextlib.suppress(OSError, ValueError):  # no such file; no quota, "max 100000"
        quota, period = CPU_QUOTA.read_text().split()
        torch.set_num_threads(min(torch.get_num_threads(), max(1, int(quota) // int(period))))


def start():
    """Begins the run, once; make_dataloader calls it too. Returns the device."""
    check_process()
    if _run.manifest:
        return DEVICE
    check_device()
    watched, _run.watched = _run.watched, []  # while this function reads
    manifest = check_cache()
    _run.rows = np.fromfile(ROOT / ROWS_FILE, dtype="<u2").reshape(-1, MAX_SEQ_LEN + 1)
    _run.token_bytes = Tokenizer.from_directory().token_bytes
    _run.tokens = np.memmap(ROOT / TOKENS_FILE, dtype="<u2", mode="r").view(np.ndarray)
    _run.ends = np.load(ROOT / ENDS_FILE, mmap_mode="r")
    if load_manifest() != manifest:
        stop("the cache was prepared anew while this run was starting; start it again.")
    make_folder(RUNS, "AUTORESEARCH_RUNS")
    script = getattr(sys.modules["__main__"], "__file__", "")  # none in a notebook, python -c or -
    if os.path.isfile(script):
        lock_run(os.path.dirname(os.path.abspath(script)))
    _run.commit = current_commit()
    _run.hashes = [sha256(file) if os.path.isfile(file) else None for file in (__file__, script)]
    what = f"{PROFILE} profile, {TIME_BUDGET:g} s, seed {SEED}, commit {_run.commit}"
    print(f"run: {what}, {DEVICE_NAME}")
    if DEVICE.type == "cuda":
        free, total = torch.cuda.mem_get_info()
        others = total - free - torch.cuda.memory_reserved()
        if others > 2e9:  # CUDA itself takes up to 1e9
            print(f"note: {others / 1e9:.0f} GB of this GPU are in use by other programs")
    if DEVICE.type == "cpu":
        keep_memory()
        obey_quota()
        os.environ.setdefault("TORCH_WARM_POOL", "0")  # no workers: a CPU needs no Triton
        logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # nvcc without GPU
    _run.watched = [*watched, os.path.realpath(manifest["options"]["data_dir"] or ROOT)]
    _run.manifest = manifest
    os.environ[OWNER] = str(os.getpid())
    return DEVICE


# ---- Loader and clock ----
def elapsed():
    """Seconds of training, from the first batch served until evaluation begins."""
    if not _run.served:
        return 0.0
    return (_run.eval_began or _now()) - _run.served[0][0]


def pack_rows(documents, row_len, buffer_docs=BUFFER_DOCS):
    """Best-fit packing: yields full rows, uint16 [row_len]. Of the next `buffer_docs` documents the
    longest that fits is added to the row; if none fits, the shortest is cut to fill it and its tail
    dropped. Of equals, the oldest."""
    source = enumerate(documents)
    held = {}  # number: document
    order = []  # (length, number) of each, sorted
    while True:
        row = np.empty(row_len, dtype=np.uint16)
        filled = 0
        while filled < row_len:
            for number, document in itertools.islice(source, buffer_docs - len(order)):
                held[number] = document
                bisect.insort(order, (len(document), number))
            if not order:
                return
            space = row_len - filled
            fitting = bisect.bisect_left(order, (space + 1,))  # how many fit
            length, _ = order[max(fitting - 1, 0)]
            _, number = order.pop(bisect.bisect_left(order, (length,)))
            document = held.pop(number)[:space]
            row[filled : filled + len(document)] = document
            filled += len(document)
        yield row


def make_dataloader(tokenizer, B, T, split="train", buffer_size=BUFFER_DOCS):
    """Yields (inputs, targets, epoch) forever: fresh int64 [B, T] on the device, targets one token
    ahead; the rows do not depend on B. The first batch starts the clock. `tokenizer` is ignored:
    tokens were made at preparation. Raises ValueError for another split."""
    if split != "train":
        raise ValueError(f'split must be "train", not {split!r}: only evaluate_bpb reads "val"')
    start()
    epoch = 0

    def read_documents():
        nonlocal epoch
        shards = _run.manifest["shards"]  # in their order, rotated by SEED
        first = shards[SEED % len(shards)]
        while True:
            epoch += 1
            for i in itertools.chain(range(first, len(_run.ends) - 1), range(first)):
                yield _run.tokens[_run.ends[i] : _run.ends[i + 1]]

    def serve_batches():
        rows = pack_rows(read_documents(), T + 1, buffer_size)
        while True:
            check_process()
            packed = np.stack(list(itertools.islice(rows, B)))
            batch = torch.from_numpy(packed.astype(np.int64))
            if DEVICE.type == "cuda":
                batch = batch.pin_memory()  # torch keeps it until the copy is done
            batch = batch.to(DEVICE, non_blocking=True)
            # clone: contiguous does not copy a single row, and the two would share memory.
            inputs = batch[:, :-1].clone(memory_format=torch.contiguous_format)
            targets = batch[:, 1:].clone(memory_format=torch.contiguous_format)
            _run.served.append((_now(), B, T))
            yield inputs, targets, epoch

    return serve_batches()


# ---- Metric ----
class IntegrityError(Exception):
    """A score that cannot be trusted, and why."""


def largest_divisor(number, at_most):
    """The largest divisor of `number` up to `at_most`, at least 1."""
    return max(size for size in range(1, max(at_most, 1) + 1) if number % size == 0)


def eval_batch_size(batch_size):
    """Rows per batch of evaluation, at most `batch_size`, so that no row is dropped."""
    return largest_divisor(len(_run.rows), min(batch_size, EVAL_BATCH))


def token_losses(model, inputs, targets, token_bytes):
    """Cross-entropy in nats, float32 [B, T], of model(inputs) against `targets`, both [B, T]; 0
    where a target has no bytes. Raises IntegrityError."""
    logits = model(torch.from_numpy(inputs.astype(np.int64)).to(DEVICE))
    plain = type(logits) is torch.Tensor
    shape = tuple(logits.shape) if plain else type(logits).__name__
    if not plain or shape[:-1] != targets.shape or shape[-1] < len(token_bytes):
        wanted = (*targets.shape, len(token_bytes))
        raise IntegrityError(f"shape: model(x) returned {shape}, not a plain tensor {wanted}")
    on_device = torch.from_numpy(targets.astype(np.int64)).to(DEVICE)
    losses = []
    # By rows: all logits in fp32 would be the largest tensor. Not logsumexp minus gather, which
    # cancels: 2**28 added to all logits would score 0.
    for row, target in zip(torch.unbind(logits), on_device, strict=True):
        log_probs = row.float().log_softmax(-1)
        losses.append(-log_probs.gather(-1, target[:, None])[:, 0])
    losses = torch.stack(losses).cpu().numpy()
    return np.where(token_bytes[targets] > 0, losses, 0)


def draw_cuts(losses, tokens, own_losses, rng):
    """Where to cut the rows `tokens` [K, T + 1], int [K]. `own_losses` [K, T] are those of these
    rows, infinite where not counted, `losses` [N, T] those of all rows. Each quarter of the cuts
    looks for one kind of leak: bound to an end, to chunks, to a few positions, to contents."""
    K, T = own_losses.shape
    at_ends, at_chunks, at_drops, at_rare = np.array_split(np.arange(K), 4)
    cuts = np.empty(K, dtype=int)

    # Near either end, where a prefix may attend both ways.
    distance = np.exp(rng.uniform(0, np.log(T), len(at_ends))).astype(int)
    cuts[at_ends] = np.where(rng.random(len(at_ends)) < 0.5, distance, T - distance)

    # At multiples of 8, 16, ... T / 2, where chunks end.
    period = 2 ** rng.integers(3, max(int(np.log2(T)), 4), len(at_chunks))
    cuts[at_chunks] = period * rng.integers(1, np.maximum(T // period, 2))

    # After a drop: the positions whose mean loss is lowest beside the median of their neighbours'.
    mean = losses.mean(axis=0, dtype=np.float64)
    padded = np.pad(mean, NEIGHBOURS, constant_values=np.nan)
    around = np.lib.stride_tricks.sliding_window_view(padded, 2 * NEIGHBOURS + 1)
    lowest = np.argsort(mean - np.nanmedian(around, axis=1), kind="stable")
    cuts[at_drops] = lowest[: len(at_drops)] + 1

    # After targets that are rare after their token, but had a low loss: one of each row's three.
    gain = bigram_surprise(tokens)[at_rare] - own_losses[at_rare]
    cuts[at_rare] = rng.permuted(np.argsort(-gain, axis=1)[:, :3], axis=1)[:, 0] + 1
    return np.clip(cuts, 1, T - 1)


def bigram_surprise(tokens):
    """-log P(token | token before it), [K, T], as counted in `tokens` [K, T + 1] themselves."""
    before = tokens[:, :-1].astype(np.int64)
    pairs = before * 2**16 + tokens[:, 1:]
    _, place, pair_count = np.unique(pairs, return_inverse=True, return_counts=True)
    return np.log(np.bincount(before.ravel())[before] / pair_count[place].reshape(before.shape))


def probe(model, rows, losses, size, token_bytes, rng):
    """Scores some rows again, three of four with other tokens after a cut. Returns {probe: absolute
    changes in nats}, all of which should be 0: isolation, of rows left alone; causality, of losses
    before a cut; edges, of the first and the last of those."""
    count = size * max(1, min(PROBE_ROWS, len(rows)) // size)
    chosen = rng.permutation(len(rows))[:count]
    tokens = rows[chosen]
    is_cut = np.arange(count) % 4 > 0
    cuts = np.full((count, 1), tokens.shape[1])  # after the end: not cut
    own = np.where(token_bytes[tokens[:, 1:]] > 0, losses[chosen], np.inf)
    cuts[is_cut, 0] = draw_cuts(losses, tokens[is_cut], own[is_cut], rng)
    position = np.arange(tokens.shape[1])
    altered = np.where(position < cuts, tokens, np.roll(tokens, 1, axis=0))
    again = []
    for begin in range(0, count, size):
        batch = slice(begin, begin + size)
        again.append(token_losses(model, altered[batch, :-1], tokens[batch, 1:], token_bytes))
    moved = np.abs(np.concatenate(again) - losses[chosen])
    position = position[:-1]
    before_cut = is_cut[:, None] & (position < cuts)
    at_edge = before_cut & ((position == 0) | (position == cuts - 1))
    return {
        "isolation": moved[~is_cut],
        "causality": moved[before_cut],
        "edges": moved[at_edge],
    }


LIKELY_MISTAKE = {
    "isolation": "does a row depend on others of its batch, on randomness, a cache or an update?",
    "causality": "does a mask, a mean, a filter or a block let a position see later tokens?",
    "edges": "does something wrap around or depend on the whole row, or a chunk's end look ahead?",
}


def parameter_bits(model):
    """Each parameter as bytes, because NaN is not equal to NaN."""
    return [p.detach().flatten().view(torch.uint8).clone() for p in model.parameters()]


def compile_seconds():
    """Seconds that torch.compile has taken in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo.calculate_time_spent()["total_wall_time"] if dynamo else 0.0


@torch.no_grad()
def score(model, rows, token_bytes, batch_size, rng=None):
    """(bits per byte, {probe: absolute changes in nats}, seconds of each batch but for compilation)
    of a model, int64 [B, T] to logits [B, T, V], over rows, uint16 [N, T + 1]. `rng` shuffles them
    and draws the probes. Raises IntegrityError."""
    moments = [_now() - compile_seconds()]
    before = parameter_bits(model)
    if not before:
        raise IntegrityError("model: it has no parameters; keep its parts in a torch.nn.ModuleList")
    rng = np.random.default_rng(rng)
    size = largest_divisor(len(rows), min(batch_size, EVAL_BATCH))
    losses = np.empty((len(rows), rows.shape[1] - 1), dtype=np.float32)
    for batch in np.split(rng.permutation(len(rows)), len(rows) // size):
        losses[batch] = token_losses(model, rows[batch, :-1], rows[batch, 1:], token_bytes)
        moments.append(_now() - compile_seconds())
    broken = np.count_nonzero(~np.isfinite(losses))
    if broken:
        raise IntegrityError(f"finite: {broken} losses are NaN or infinite")
    probes = probe(model, rows, losses, size, token_bytes, rng)
    after = parameter_bits(model)
    changed = sum(not torch.equal(*pair) for pair in zip(before, after, strict=True))
    if changed:
        raise IntegrityError(
            f"state: {changed} parameters changed; does the model learn here? (Normalise weights "
            "after the optimizer's step.)"
        )
    for name, change in probes.items():
        if change.size and not (change.mean() <= PROBE_MEAN and change.max() <= PROBE_PEAK):
            raise IntegrityError(
                f"{name}: losses moved by {change.mean():.2g} nats, one by {change.max():.2g}; "
                f"{LIKELY_MISTAKE[name]}"
            )
    count = token_bytes[rows[:, 1:]].sum(dtype=np.int64)
    return losses.sum(dtype=np.float64) / (math.log(2) * count), probes, np.diff(moments)


def evaluate_bpb(model, tokenizer, batch_size, **stats):
    """Ends the run, once: stops the clock, scores the model on every validation row, prints the
    final block, with `stats` in it, and writes it as the record. Returns bits per byte, whatever
    the batch size. On failure prints `val_bpb: nan` and `integrity: FAIL ...` and exits with 3.
    What no process knows of itself, such as an earlier run's weights, tools/rerun.py shows."""
    check_process()
    try:
        if _run.eval_began is not None:
            raise IntegrityError("once: evaluate_bpb was called before")
        model.eval()  # only here: some swap averaged weights in, and out at the next call
        if DEVICE.type != "cpu":
            torch.accelerator.synchronize()  # what is still queued is training
        _run.eval_began = _now()
        if not _run.served:
            raise IntegrityError("loader: make_dataloader never served a batch in this process")
        for name, value in _frozen.items():
            if globals()[name] != value:
                raise IntegrityError(f"settings: prepare.{name} was assigned {globals()[name]}")
        print(f"evaluating on {len(_run.rows)} rows", flush=True)
        val_bpb, _, seconds = score(model, _run.rows, _run.token_bytes, batch_size)
    except IntegrityError as error:
        if _run.record is not None:
            _run.record.unlink(missing_ok=True)  # that of an evaluation before this one
        print(f"---\nval_bpb: nan\nintegrity: FAIL {error}", flush=True)
        raise SystemExit(3) from None
    _run.eval_ended = _now()
    # Time that single batches take beyond four medians is work put off until the clock stopped.
    _run.eval_began += np.maximum(seconds - 4 * np.median(seconds), 0).sum()
    report(val_bpb, stats)
    return val_bpb


# ---- Progress and report ----
def log_step(step, loss, **shown):
    """Records the mean loss of a step, in nats per token, and prints a line of progress every five
    seconds, with what is `shown`. Exits with 4 if training has diverged."""
    loss = float(loss)
    if not loss <= DIVERGED:  # NaN too: no comparison with it holds
        print(f"FAIL: training diverged, loss {loss:g} nats per token at step {step}", flush=True)
        raise SystemExit(4)
    _run.losses += 1
    _run.smooth_loss += (loss - _run.smooth_loss) * max(0.1, 1 / _run.losses)
    passed = min(elapsed() / TIME_BUDGET, 1)
    _run.curve += [_run.smooth_loss] * (int(10 * passed) - len(_run.curve))
    if _now() - _run.last_line > PROGRESS_SECONDS:
        _run.last_line = _now()
        more = "".join(f" {name} {value}" for name, value in shown.items())
        print(f"step {step:5d} {100 * passed:3.0f}% loss {_run.smooth_loss:.4f}{more}", flush=True)


def speeds():
    """Tokens per second in both halves of the time that batches of the commonest shape took, less
    its first tenth; (1, 1) where there are too few."""
    [(shape, _)] = Counter(batch[1:] for batch in _run.served).most_common(1)
    pairs = itertools.pairwise([*_run.served, (_run.eval_began,)])
    seconds = np.array([after[0] - batch[0] for batch, after in pairs if batch[1:] == shape])
    if len(seconds) < 20:
        return 1, 1
    begun = np.cumsum(seconds) - seconds
    edges = np.searchsorted(begun, np.array([0.1, 0.55]) * seconds.sum())
    halves = np.split(seconds, edges)[1:]
    return [math.prod(shape) * len(half) / (half.sum() or 1) for half in halves]


def flags():
    """What makes this run's number hard to compare with another's, or `ok`."""
    limits = [
        ("startup", _run.served[0][0] - _imported, PATIENCE),
        ("overtime", elapsed(), TIME_BUDGET + OVERTIME),
        ("evaluation", _run.eval_ended - _run.eval_began, PATIENCE),
    ]
    found = [f"{name}: {took:.1f} s, over {most:g}" for name, took, most in limits if took > most]
    if _run.opened:
        found.append(f"opened: the run itself read {', '.join(sorted(_run.opened)[:3])}")
    first, second = speeds()
    if abs(second - first) > UNSTEADY * first:
        found.append(
            f"unsteady: {first:.0f} tokens/s, then {second:.0f}; other programs, or the change "
            "itself if a second run does the same"
        )
    return "; ".join(found) or "ok"


def report(val_bpb, stats):
    """Prints the final block and writes it as JSON; no stat replaces what the ruler knows."""
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # resident, the peak
    memory *= 1 if sys.platform == "darwin" else 2**10
    if DEVICE.type == "cuda":
        memory = torch.cuda.max_memory_allocated()
    tokens = sum(rows * length for _, rows, length in _run.served)
    data = json.dumps(_run.manifest["files"])
    curve = _run.curve + [_run.smooth_loss] * (10 - len(_run.curve))
    block = {
        "val_bpb": val_bpb,
        "training_seconds": elapsed(),
        "total_seconds": _now() - _imported,
        "peak_vram_mb": memory / 2**20,
        **dict.fromkeys(["mfu_percent", "total_tokens_M", "num_steps", "num_params_M", "depth"]),
        "train_loss": _run.smooth_loss if _run.losses else None,
        "curve": curve if _run.losses else None,
        "served_tokens_M": tokens / 1e6,
        "eval_seconds": _run.eval_ended - _run.eval_began,
        "startup_seconds": _run.served[0][0] - _imported,
        "profile": PROFILE,
        "time_budget": TIME_BUDGET,
        "seed": SEED,
        "device": DEVICE_NAME,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "commit": _run.commit,
        "data": hashlib.sha256(data.encode()).hexdigest()[:8],
        "prepare": _run.hashes[0][:8],
    }
    block |= {key: value for key, value in stats.items() if block.get(key) is None}
    block["integrity"] = flags()
    print("---")
    for key, value in block.items():
        print(f"{key}: {format_value(key, value)}", flush=True)
    block["train"] = _run.hashes[1]
    moment = time.strftime("%Y%m%dT%H%M%S")
    _run.record = RUNS / f"{moment}_{block['commit']}_{SEED}_{os.getpid()}.json"
    temporary = _run.record.with_suffix(".tmp")
    try:
        temporary.write_text(json.dumps(block, indent=1, default=str) + "\n")
        temporary.replace(_run.record)
    except OSError as error:
        print(f"warning: {error}; the score above has no record.", file=sys.stderr)


def format_value(key, value):
    if isinstance(value, float):
        return f"{value:.6f}" if key in ("val_bpb", "train_loss") else f"{value:.2f}"
    if isinstance(value, list):
        return " ".join(f"{item:.3f}" for item in value)
    return "n/a" if value is None else value


# ==== Part 2: what makes the cache ====


# ---- Shards: parquet files with a column `text`, or lists of texts; the last is validation ----
class ShardError(Exception):
    """A shard that cannot be fetched or read; the message is one sentence."""


def read_shard(shard):
    """Yields the non-empty documents of a shard. Raises ShardError."""
    if isinstance(shard, list):
        yield from shard
        return
    try:
        with pq.ParquetFile(shard, page_checksum_verification=True) as file:
            columns = [file.schema.column(i) for i in range(len(file.schema))]
            if [c.physical_type for c in columns if c.path == "text"] != ["BYTE_ARRAY"]:
                raise ShardError(f"{shard} must have one column `text` of strings; convert it.")
            for batch in file.iter_batches(batch_size=512, columns=["text"]):
                for text in batch["text"].cast(pa.string()).to_pylist():  # also binary, if UTF-8
                    if text:
                        yield text
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise ShardError(f"{shard} cannot be read: {error}") from None


# ---- ClimbMix ----
CLIMBMIX = "karpathy/climbmix-400b-shuffle"
CLIMBMIX_VAL = 6542  # the last shard is pinned for validation: nothing trains on it
WAITS = (0, 1, 2, 4, 8)  # seconds before each try of a download


def download(path):
    """Downloads a shard, unless a whole one is there. Raises ShardError."""
    with contextlib.suppress(ShardError):
        any(read_shard(path))  # opens it, reads its first texts
        return
    host = (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    for wait in WAITS:
        time.sleep(wait)
        try:
            url = f"{host}/datasets/{CLIMBMIX}/resolve/main/{path.name}"
            reply = requests.get(url, timeout=60)
            reply.raise_for_status()
            part.write_bytes(reply.content)
            any(read_shard(part))  # refuses a login page
            part.replace(path)
            return
        except (OSError, ShardError) as error:  # those of requests are OSErrors
            reason = f"{type(error).__name__}: {str(error)[-160:]}"  # the cause comes last
        finally:
            part.unlink(missing_ok=True)
    raise ShardError(
        f"{path.name} did not download ({reason}); run the same command to go on, or use "
        "--corpus python."
    )


def climbmix(count):
    """The first `count` shards of ClimbMix (-1: all), then that of validation, which the reference
    harness keeps in the same folder; downloads those missing."""
    numbers = range(CLIMBMIX_VAL)[: count if count >= 0 else None]
    shards = [DATA / f"shard_{i:05d}.parquet" for i in (*numbers, CLIMBMIX_VAL)]
    if not shards[-1].exists():
        shards[-1] = VAL / shards[-1].name
    DATA.mkdir(exist_ok=True)
    VAL.mkdir(exist_ok=True)
    with ThreadPool(8) as pool:
        done = pool.imap_unordered(download, shards)
        for _ in tqdm(done, "download", len(shards), unit="shard", disable=None):
            pass
    return shards


# ---- The embedded corpus: Python sources of the standard library and of these packages ----
PACKAGES = """
    filelock kernels matplotlib numpy pandas pyarrow requests tiktoken torch tqdm
""".split()
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests"}
PYTHON_SHARDS = 8  # of training


def python_sources():
    """{text: name} of the source files, in a fixed order; of equal texts the first."""
    library = Path(os.__file__).parent
    files = [(file.relative_to(library), file) for file in sorted(library.rglob("*.py"))]
    for package in PACKAGES:
        files += [(file, Path(file.locate())) for file in importlib.metadata.files(package)]
    sources = {}
    for name, file in files:
        if name.suffix == ".py" and not SKIPPED_FOLDERS.intersection(name.parts):
            with contextlib.suppress(OSError, UnicodeDecodeError):
                sources.setdefault(file.read_bytes().decode(), name.as_posix())
    return sources


def python_corpus():
    """The shards: files in pieces, as most are longer than a row, and one of twenty held out."""

    def number(name):
        return int(hashlib.sha256(name.encode()).hexdigest(), 16)

    sides = ([], [])  # training, validation
    for text, name in python_sources().items():
        held_out = number(name) < 0.05 * 2**256
        for i, piece in enumerate(re.findall(r"(?s).{1,2048}\n|.{1,2048}", text)):
            sides[held_out].append((number(f"{name}:{i}"), piece))
    train, val = ([piece for _, piece in sorted(side)] for side in sides)  # shuffled
    return [*(train[i::PYTHON_SHARDS] for i in range(PYTHON_SHARDS)), val]


# ---- Choice of the corpus ----
def find_corpus(options):
    """(what identifies the corpus, a function that returns its shards)."""
    folder = options["data_dir"]
    count = options["num_shards"]
    if folder:
        files = sorted(Path(folder).glob("[!.]*.parquet"))  # macOS puts ._ files beside others
        if len(files) < 2:
            stop(f"{folder} must be a folder of at least two *.parquet files.")
        described = [[str(file), file.stat().st_size, file.stat().st_mtime_ns] for file in files]
        return described, lambda: files
    default = "python" if PROFILE == "small" and count is None else "climbmix"
    if (options["corpus"] or default) == "python":
        versions = [importlib.metadata.version(name) for name in PACKAGES]
        return [sys.version, *versions], python_corpus
    count = 20 if count is None else count
    return [CLIMBMIX, count], lambda: climbmix(count)


# ---- Tokenizer training ----
TOKENIZER_DOC_CHARS = 10_000  # of each document
TOKENIZER_CHARS = 1_000_000_000  # in all


def tokenizer_texts(shards):
    """Yields what the tokenizer is trained on."""
    left = TOKENIZER_CHARS
    for shard in shards:
        for text in read_shard(shard):
            text = text[: min(TOKENIZER_DOC_CHARS, left)]
            yield text
            left -= len(text)
            if left <= 0:
                return


def train_tokenizer(shards, folder):
    """Trains on the shards and writes tokenizer.tiktoken. Returns the Tokenizer."""
    if not any(tokenizer_texts(shards)):
        stop("the training shards hold no text; check their column `text`, or raise --num-shards.")
    print(f"training a tokenizer of {VOCAB_SIZE} tokens", flush=True)
    trainer = rustbpe.Tokenizer()
    size = VOCAB_SIZE - len(SPECIAL_TOKENS)
    trainer.train_from_iterator(tokenizer_texts(shards), size, pattern=SPLIT)
    with open(folder / TOKENIZER_FILE, "wb") as file:
        for token, rank in trainer.get_mergeable_ranks():
            file.write(base64.b64encode(bytes(token)) + b" %d\n" % rank)
    return Tokenizer.from_directory(folder)


# ---- Tokens: made once, not in each of a night's hundred runs ----
def read_tokens(shard, tokenizer):
    """Yields each document's tokens, by threads: tiktoken releases the GIL."""
    texts = read_shard(shard)
    with ThreadPool() as pool:
        while batch := list(itertools.islice(texts, 4096)):
            yield from pool.map(tokenizer.encode_document, batch, chunksize=64)


def write_rows(shard, tokenizer, folder):
    """Packs the validation shard into rows."""
    rows = pack_rows(read_tokens(shard, tokenizer), MAX_SEQ_LEN + 1)
    rows = list(itertools.islice(rows, EVAL_TOKENS // MAX_SEQ_LEN))
    count = len(rows) // EVAL_BATCH * EVAL_BATCH
    if count == 0:
        stop(f"validation, the last file, fills only {len(rows)} of {EVAL_BATCH} rows; add text.")
    np.stack(rows[:count]).astype("<u2").tofile(folder / ROWS_FILE)


def write_tokens(shards, tokenizer, folder):
    """Writes the training tokens; returns the number of each shard's first document."""
    lengths = [0]
    first = []
    with open(folder / TOKENS_FILE, "wb") as file:
        for shard in tqdm(shards, "tokenise", unit="shard", disable=None):
            first.append(len(lengths) - 1)
            for ids in read_tokens(shard, tokenizer):
                file.write(ids)
                lengths.append(len(ids))
    np.save(folder / ENDS_FILE, np.cumsum(lengths))
    return first


# ---- Commands ----
def build(wanted, shards, new):
    """Makes the derived files in `new`, a folder beside ROOT, and moves them into place, the
    manifest last: no run sees a mixture of old and new files."""
    new.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(shards[:-1], new)
    write_rows(shards[-1], tokenizer, new)
    first = write_tokens(shards[:-1], tokenizer, new)
    files = {name: [(new / name).stat().st_size, sha256(new / name)] for name in FILES}
    manifest = wanted | {"shards": first, "files": files}
    (new / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    (ROOT / "manifest.json").unlink(missing_ok=True)
    for name in (*FILES, "manifest.json"):
        os.replace(new / name, ROOT / name)
    return manifest


def prepare(options):
    """Makes the derived files, unless they are complete and match the options."""
    print(f"profile: {PROFILE}, on {DEVICE_NAME}; AUTORESEARCH_PROFILE sets another", flush=True)
    manifest = load_manifest()
    if set(options.values()) == {None}:
        options = manifest.get("options", options)  # as the last time
    corpus, get_shards = find_corpus(options)
    wanted = {"recipe": RECIPE, "corpus": corpus}
    found = {key: manifest.get(key) for key in wanted}
    new = ROOT.with_name(f"{ROOT.name}.new")
    if found != wanted or find_damaged(manifest["files"], FILES):
        manifest = build(wanted | {"options": options}, get_shards(), new)
    shutil.rmtree(new, ignore_errors=True)  # an interrupted build's too
    tokens = manifest["files"][TOKENS_FILE][0] / 2e6
    rows = manifest["files"][ROWS_FILE][0] // (2 * MAX_SEQ_LEN + 2)
    print(
        f"ready: {PROFILE} profile, {tokens:.1f} million training tokens, {rows} validation rows; "
        "next: uv run train.py"
    )


def main():
    parser = argparse.ArgumentParser(description="Prepares the cache, by default as the last time.")
    add = parser.add_argument
    add("--num-shards", type=int, help="training shards of ClimbMix, -1 for all (20)")
    add("--corpus", choices=("climbmix", "python"), help="python in the small profile")
    add("--data-dir", type=Path, help="parquet files, column text; last: validation")
    options = vars(parser.parse_args())
    if options["data_dir"]:
        options["data_dir"] = str(options["data_dir"].expanduser().absolute())
    check_device()
    try:
        make_folder(ROOT, "AUTORESEARCH_CACHE")
        while not lock(CACHE):
            print("waiting for another preparation to end", flush=True)
            time.sleep(2)
        prepare(options)
    except ShardError as error:
        stop(str(error))
    except OSError as error:
        if error.errno == errno.ENOSPC:
            stop(f"{error}; free space, or set AUTORESEARCH_CACHE to another folder.")
        stop(f"{error}.")
    except KeyboardInterrupt:
        stop("interrupted; downloads are kept, run the same command to continue.", 130)


if __name__ == "__main__":
    main()
