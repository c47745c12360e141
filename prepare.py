"""
The ruler by which every run of autoresearch is measured: data, tokenizer, loader, clock, metric.
Scores compare only if it stays fixed, so nobody edits it during a night of research.

    uv run prepare.py                  prepare what this machine needs
    uv run prepare.py --data-dir DIR   use your own text: parquet files with a column `text`, the
                                       last by name for validation

Exit codes, of train.py too: 0 success, 1 bug, 2 set-up or usage, 3 integrity, 4 diverged, 5 out of
memory.
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
from multiprocessing.pool import ThreadPool
from operator import itemgetter
from pathlib import Path
from time import monotonic as _now  # bound here, so that patching `time` has no effect

_imported = _now()  # total_seconds counts from here
# Set before CUDA starts: without it a run whose batch just fits may run out of memory later.
os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import requests
import rustbpe
import tiktoken
import torch
from tqdm import tqdm


def fail(sentence, code=2):
    """Prints a sentence that says what is wrong and how to fix it, and exits."""
    print(f"error: {sentence}", file=sys.stderr, flush=True)
    raise SystemExit(code)


# ==== Part 1: what a run uses ====


# ---- Device and profile ----
if torch.cuda.is_available():
    DEVICE = torch.device("cuda")
else:
    DEVICE = torch.device("mps" if torch.backends.mps.is_available() else "cpu")
DEVICE_NAME = torch.cuda.get_device_name() if DEVICE.type == "cuda" else DEVICE.type
DRIVERS = ("/dev/nvidiactl", "/usr/lib/wsl/lib/libcuda.so.1")  # NVIDIA's, on Linux and on WSL


def check_device():
    """Exits if there is an NVIDIA GPU that torch cannot use."""
    if DEVICE.type == "cuda":
        usable = torch.cuda.get_device_capability() >= (7, 5)  # Turing, the oldest for this torch
    else:
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
        usable = hidden or not any(os.path.exists(path) for path in DRIVERS)
    if not usable:
        fail(
            "torch cannot use the GPU here; update its driver (to 580 or newer), or set "
            "CUDA_VISIBLE_DEVICES to a GPU from Turing on, or to -1 for none."
        )


PROFILE = os.environ.get("AUTORESEARCH_PROFILE")
if not PROFILE:
    PROFILE = "small"
    if DEVICE.type == "cuda":
        memory = torch.cuda.get_device_properties(DEVICE).total_memory
        PROFILE = "full" if memory >= 40e9 else "medium"
if PROFILE not in ("full", "medium", "small"):
    fail(f"AUTORESEARCH_PROFILE is full, medium or small, not {PROFILE!r}; change or unset it.")


def by_profile(**values):
    return values[PROFILE]


# ---- Settings: scores compare only between runs that share all of them but the seed ----
try:
    TIME_BUDGET = float(os.environ.get("AUTORESEARCH_TIME_BUDGET") or 300)  # seconds
    SEED = int(os.environ.get("SEED") or 42)
    if not (0 < TIME_BUDGET < 1e9 and 0 <= SEED < 2**63):
        raise ValueError("out of range")
except ValueError as error:
    fail(f"AUTORESEARCH_TIME_BUDGET or SEED: {error}; change or unset it.")

MAX_SEQ_LEN = by_profile(full=2048, medium=2048, small=512)  # context length
EVAL_TOKENS = by_profile(full=40 * 2**19, medium=2**21, small=2**18)  # validation tokens to score
VOCAB_SIZE = by_profile(full=8192, medium=8192, small=2048)  # includes the four special tokens
EVAL_BATCH = 32  # rows per evaluation batch, at most
BUFFER_DOCS = 1000  # documents that packing chooses among

# GPT-4's pattern, but it splits digits into pairs: a small vocabulary has no room for triples.
SPLIT_PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}]++[\r\n]*"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)
SPECIAL_TOKENS = [f"<|reserved_{i}|>" for i in range(4)]  # the first is BOS


# ---- Cache ----
def folder_from(variable, default):
    """Returns the folder that an environment variable names; `~` is the home folder."""
    folder = os.environ.get(variable) or default
    try:
        return Path(folder).expanduser().absolute()
    except RuntimeError:
        return fail(f"no home folder is known for {folder}; set {variable} to an absolute path.")


CACHE = folder_from("AUTORESEARCH_CACHE", "~/.cache/autoresearch")
RUNS = folder_from("AUTORESEARCH_RUNS", CACHE / "runs")  # one record per run
SHARDS = CACHE / "data"  # ClimbMix, as downloaded
PREPARED = CACHE / PROFILE  # all that is derived from one corpus; replaced as a whole
TOKENIZER_FILE = "tokenizer.tiktoken"
TOKENS_FILE = "train.u16"  # all training documents, flat, with BOS before each
ENDS_FILE = "train.npy"  # document i is tokens[ends[i] : ends[i + 1]], int64 [documents + 1]
ROWS_FILE = "val.u16"  # packed validation rows, uint16 [rows, MAX_SEQ_LEN + 1]
FILES = (TOKENIZER_FILE, TOKENS_FILE, ENDS_FILE, ROWS_FILE)

# What the derived files depend on besides the corpus.
FORMAT = 1  # bump it when a change to this file alters a derived file
RECIPE = [FORMAT, VOCAB_SIZE, EVAL_TOKENS, MAX_SEQ_LEN, EVAL_BATCH, BUFFER_DOCS]
RECIPE += [importlib.metadata.version(name) for name in ("rustbpe", "tiktoken")]


def load_manifest(folder=None):
    """Returns the manifest, or {} if it is missing or incomplete (it is written last). `shards`
    holds the index of each training shard's first document, `files` {name: [bytes, sha256]}."""
    with contextlib.suppress(OSError, ValueError):
        return json.loads(Path(folder or PREPARED, "manifest.json").read_text())
    return {}


def sha256(path):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def find_damaged(files, hashed=FILES):
    """Returns the first file that is missing, has the wrong size or (if in `hashed`) the wrong
    sha256; None if all are intact."""
    for name, (size, digest) in files.items():
        path = PREPARED / name
        if not path.is_file() or path.stat().st_size != size:
            return path
        if name in hashed and sha256(path) != digest:
            return path
    return None


def lock(folder):
    """Locks a folder until this process exits (the handle is left open on purpose). False if
    another process holds it."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        return False
    except OSError:
        pass  # this file system has no locks
    return True


# ---- Tokenizer ----
class Tokenizer:
    """Byte-level BPE over `ranks` {bytes: id}; special tokens follow. `token_bytes`, int32 [V], is
    the length of each token, 0 for special tokens. It counts raw bytes: a token that is part of a
    character would decode to U+FFFD, which has three."""

    def __init__(self, ranks):
        self.special = {name: len(ranks) + i for i, name in enumerate(SPECIAL_TOKENS)}
        self.encoding = tiktoken.Encoding(
            "autoresearch",
            pat_str=SPLIT_PATTERN,
            mergeable_ranks=ranks,
            special_tokens=self.special,
        )
        lengths = [len(token) for token in sorted(ranks, key=ranks.get)]
        self.token_bytes = np.array(lengths + [0] * len(SPECIAL_TOKENS), dtype=np.int32)

    @classmethod
    def from_directory(cls, directory=None):
        """Reads one line per token: its bytes in base64, and its id."""
        ranks = {}
        for line in Path(directory or PREPARED, TOKENIZER_FILE).read_bytes().splitlines():
            token, rank = line.split()
            ranks[base64.b64decode(token)] = int(rank)
        return cls(ranks)

    def get_vocab_size(self):
        return self.encoding.n_vocab

    def get_bos_token_id(self):
        return self.special[SPECIAL_TOKENS[0]]

    def encode_document(self, text):
        """Returns BOS and the ids of a text, uint16."""
        ids = [[self.get_bos_token_id()]]
        # In pieces, because a million spaces overflow the stack of the regex engine.
        for begin in range(0, len(text), 200_000):
            piece = text[begin : begin + 200_000]
            ids.append(self.encoding.encode_to_numpy(piece, disallowed_special=()))
        return np.concatenate(ids).astype("<u2")

    def encode(self, text):
        return self.encode_document(text)[1:].tolist()

    def decode(self, ids):
        return self.encoding.decode(ids)


# ---- Start of a run ----
class Run:
    """The state of this process's run."""

    def __init__(self):
        # Set by `start`:
        self.manifest = None
        self.rows = None
        self.tokens = None
        self.ends = None
        self.token_bytes = None
        self.commit = None
        self.hashes = None  # of prepare.py and of the running script
        # Changed as the run goes on:
        self.reading = False  # true while `start` opens the prepared files
        self.opened = set()  # prepared files that were opened at other times
        self.began = None  # when the first batch was served
        self.batches = 0
        self.served = [0] * 10  # tokens in each tenth of the budget
        self.losses = [[] for _ in range(10)]  # of every step, by tenths
        self.since_line = []  # losses since the last line of progress
        self.last_line = -math.inf  # when it was printed
        self.eval_began = None
        self.eval_ended = None


_run = Run()


def watch(event, arguments):
    """Audit hook: notes token and row files that are opened outside `start`, since a run could
    train on validation rows. It does not see copies, or files that code other than Python opens."""
    path = str(arguments[0]) if event == "open" else ""
    if path.startswith(str(PREPARED)) and path.endswith((".u16", ".npy")) and not _run.reading:
        _run.opened.add(os.path.basename(path))


sys.addaudithook(watch)


def lock_run(folder):
    """Allows one run at a time in a folder. Exits if there is another."""
    if not lock(folder):
        fail("this folder has a run already; wait for it or stop it (pgrep -af train.py).")


def read_cache():
    """Reads what a run needs and returns the manifest. Exits unless the recipe, all sizes and the
    hashes of tokenizer and rows are right."""
    manifest = load_manifest()
    problem = f"{PREPARED} is not prepared"
    if manifest.get("recipe") == RECIPE:
        damaged = find_damaged(manifest["files"], (TOKENIZER_FILE, ROWS_FILE))
        problem = f"{damaged} is missing or not as it was prepared" if damaged else None
    if problem:
        fail(f"{problem}; run `AUTORESEARCH_PROFILE={PROFILE} uv run prepare.py`.")
    try:
        _run.rows = np.fromfile(PREPARED / ROWS_FILE, dtype="<u2").reshape(-1, MAX_SEQ_LEN + 1)
        _run.tokens = np.memmap(PREPARED / TOKENS_FILE, dtype="<u2", mode="r").view(np.ndarray)
        _run.ends = np.load(PREPARED / ENDS_FILE, mmap_mode="r")
        _run.token_bytes = Tokenizer.from_directory().token_bytes
        changed = load_manifest() != manifest
    except FileNotFoundError:
        changed = True
    if changed:
        fail("the cache was prepared anew while this run was starting; start it again.")
    return manifest


def current_commit():
    """Returns the short hash, with `+dirty` if `git status` lists anything; without a repository,
    AUTORESEARCH_COMMIT."""

    def git(*arguments):
        command = ["git", "-C", Path(__file__).parent, *arguments]
        output = subprocess.check_output(command, stderr=subprocess.DEVNULL)
        return output.decode(errors="replace").strip()

    try:
        dirty = "+dirty" if git("status", "--porcelain") else ""
        return git("rev-parse", "--short", "HEAD") + dirty
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("AUTORESEARCH_COMMIT") or "none"


def keep_memory():
    """Stops glibc from returning freed memory to the kernel, which would have to zero it for the
    next use: that takes a tenth of each CPU step."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt:
        mallopt(-4, 0)  # M_MMAP_MAX
        mallopt(-1, -1)  # M_TRIM_THRESHOLD


CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")  # a container's: microseconds per period


def limit_threads():
    """Limits threads to the CPU quota, which torch ignores."""
    with contextlib.suppress(OSError, ValueError):  # no such file, or "max": no quota
        quota, period = CPU_QUOTA.read_text().split()
        torch.set_num_threads(min(torch.get_num_threads(), max(1, int(quota) // int(period))))


def start():
    """Begins the run and returns the device. A second call does nothing more."""
    if _run.manifest:
        return DEVICE
    check_device()
    _run.reading = True
    manifest = read_cache()
    _run.reading = False
    try:
        RUNS.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=RUNS).close()
    except OSError as error:
        fail(f"{RUNS} cannot be written ({error.strerror}); set AUTORESEARCH_RUNS elsewhere.")
    script = getattr(sys.modules["__main__"], "__file__", "")  # a notebook has none
    if os.path.isfile(script):
        lock_run(os.path.dirname(os.path.abspath(script)))
    _run.commit = current_commit()
    _run.hashes = [sha256(file) if os.path.isfile(file) else None for file in (__file__, script)]
    settings = f"{PROFILE} profile, {TIME_BUDGET:g} s, seed {SEED}, commit {_run.commit}"
    print(f"run: {settings}, {DEVICE_NAME}")
    if DEVICE.type == "cpu":
        keep_memory()
        limit_threads()
        os.environ.setdefault("TORCH_WARM_POOL", "0")  # starts no workers to compile Triton
        logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # "no nvcc"
    _run.manifest = manifest
    return DEVICE


# ---- Loader and clock ----
def elapsed():
    """Returns the seconds of training, from the first batch to evaluation."""
    if _run.began is None:
        return 0.0
    return (_run.eval_began or _now()) - _run.began


def current_tenth():
    """Returns the current tenth of the budget, 0 to 9."""
    return min(int(10 * elapsed() / TIME_BUDGET), 9)


def tokens_per_second():
    return sum(_run.served) / (elapsed() or math.inf)


def pack_rows(documents, row_len, buffer_docs=BUFFER_DOCS):
    """Best-fit packing: yields full rows, uint16 [row_len]. Repeatedly places the longest of
    `buffer_docs` waiting documents that fits; if none fits, crops the shortest to fill the row and
    drops its tail. Ties go to the oldest."""
    source = enumerate(documents)
    waiting = []  # (length, number, document), sorted; numbers tell documents of a length apart
    length_of = itemgetter(0)
    while True:
        row = np.empty(row_len, dtype=np.uint16)
        filled = 0
        while filled < row_len:
            for number, document in itertools.islice(source, buffer_docs - len(waiting)):
                bisect.insort(waiting, (len(document), number, document))
            if not waiting:
                return
            space = row_len - filled
            fitting = bisect.bisect_right(waiting, space, key=length_of)  # how many fit
            best = max(fitting - 1, 0)  # the longest that fits, or the shortest of all
            oldest = bisect.bisect_left(waiting, length_of(waiting[best]), key=length_of)
            document = waiting.pop(oldest)[2][:space]
            row[filled : filled + len(document)] = document
            filled += len(document)
        yield row


def make_dataloader(tokenizer, B, T, split="train", buffer_size=BUFFER_DOCS):
    """Yields (inputs, targets, epoch) forever: new int64 tensors [B, T] on the device, targets one
    token ahead. The rows do not depend on B. The clock starts when the first batch is served.
    `tokenizer` is ignored: tokens are made at preparation. Raises ValueError for another split."""
    if split != "train":
        raise ValueError(f'split must be "train", not {split!r}: only evaluate_bpb reads "val"')
    start()
    epoch = 0

    def read_documents():
        nonlocal epoch
        count = len(_run.ends) - 1
        shards = _run.manifest["shards"]
        first = shards[SEED % len(shards)]  # begins at the shard that the seed picks
        while True:
            epoch += 1
            for k in range(count):
                i = (first + k) % count
                yield _run.tokens[_run.ends[i] : _run.ends[i + 1]]

    def serve_batches():
        rows = pack_rows(read_documents(), T + 1, buffer_size)
        on_gpu = DEVICE.type == "cuda"
        while True:
            # numpy fills the pinned memory: torch's copy into it uses threads, and beside an H200
            # took 5 ms of a step of 18. torch keeps that memory until the GPU has read it.
            batch = torch.empty(B, T + 1, dtype=torch.int64, pin_memory=on_gpu)
            np.stack(list(itertools.islice(rows, B)), out=batch.numpy())
            batch = batch.to(DEVICE, non_blocking=on_gpu)
            # clone() and not contiguous(), which returns two views of the same memory if B is 1.
            inputs = batch[:, :-1].clone()
            targets = batch[:, 1:].clone()
            if _run.began is None:
                _run.began = _now()
            _run.batches += 1
            _run.served[current_tenth()] += B * T
            yield inputs, targets, epoch

    return serve_batches()


# ---- Progress ----
PROGRESS_SECONDS = 5  # between two lines
MAX_LOSS = 100  # nats; a higher loss, or NaN, ends the run


def log_step(step, loss, **shown):
    """Records the mean loss of a step, in nats per token; call it for every step. Prints a line of
    progress every five seconds: the mean loss since the last line, the speed, and `shown`.
    Exits with 4 if training has diverged."""
    loss = float(loss)
    if not loss <= MAX_LOSS:  # also true for NaN
        print(f"FAIL: training diverged, loss {loss:g} nats per token at step {step}", flush=True)
        raise SystemExit(4)
    _run.losses[current_tenth()].append(loss)
    _run.since_line.append(loss)
    if _now() - _run.last_line > PROGRESS_SECONDS:
        _run.last_line = _now()
        percent = min(100 * elapsed() / TIME_BUDGET, 100)
        mean = np.mean(_run.since_line)
        _run.since_line.clear()
        line = f"step {step:5d} {percent:3.0f}% loss {mean:.4f}"
        shown = {"tokens_per_second": round(tokens_per_second())} | shown
        print(line, *(f"{name} {value}" for name, value in shown.items()), flush=True)


# ---- Metric ----
PROBE_ROWS = by_profile(full=288, medium=144, small=224)  # rows that `probe` scores, at most
# How far the losses (nats) may change in a probe: on average, and at one position. Correct models
# stay below 2e-5 and 0.02.
PROBE_MEAN = 1e-3
PROBE_PEAK = 0.1


class IntegrityError(Exception):
    """The score cannot be trusted; the message says why."""


def largest_divisor(number, at_most):
    """Returns the largest divisor of `number` up to `at_most`, at least 1."""
    return max(size for size in range(1, max(at_most, 1) + 1) if number % size == 0)


def eval_batch_size(batch_size):
    """Returns the rows per evaluation batch, at most `batch_size`, so that none is left over."""
    return largest_divisor(len(_run.rows), min(batch_size, EVAL_BATCH))


def token_losses(model, inputs, targets, token_bytes):
    """Returns the cross-entropy in nats, float32 [B, T], of model(inputs) with `targets`; inputs
    and targets are uint16 [B, T]. It is 0 where a target has no bytes. Raises IntegrityError."""
    logits = model(torch.from_numpy(inputs.astype(np.int64)).to(DEVICE))
    shape = tuple(getattr(logits, "shape", ()))
    if shape[:-1] != targets.shape or shape[-1] < len(token_bytes):
        wanted = (*targets.shape, len(token_bytes))
        kind = type(logits).__name__
        raise IntegrityError(f"shape: model(x) returned {kind} {shape}, not logits {wanted}")
    on_device = torch.from_numpy(targets.astype(np.int64)).to(DEVICE)
    losses = []
    # Row by row, since fp32 logits of a whole batch would be the largest tensor. With log_softmax,
    # since logsumexp - gather loses all digits if 2**28 is added to every logit, and scores 0.
    for row, target in zip(torch.unbind(logits), on_device, strict=True):
        log_probs = row.float().log_softmax(-1)
        losses.append(-log_probs.gather(-1, target[:, None])[:, 0])
    losses = torch.stack(losses).cpu().numpy()
    return np.where(token_bytes[targets] > 0, losses, 0)


def draw_cuts(tokens, rng):
    """Returns how many inputs each row of `tokens`, uint16 [N, T + 1], keeps: 1 to T - 1. A model
    that sees one token ahead betrays itself only at the last input that is kept, so cuts fall where
    that is likely. Rows 0, 3, 6 and so on are cut at a multiple of 8, where chunks end; rows 1, 4,
    7 and so on after a token, the most common first; rows 2 and 5 at the two ends; the others
    anywhere."""
    N, T = tokens.shape[0], tokens.shape[1] - 1
    cuts = rng.integers(1, T, N)
    cuts[::3] = np.maximum(cuts[::3] // 8 * 8, 1)
    common = np.argsort(-np.bincount(tokens.ravel()))
    for i, token in zip(range(1, N, 3), itertools.cycle(common), strict=False):
        places = np.flatnonzero(tokens[i, : T - 1] == token)
        if len(places):
            cuts[i] = rng.choice(places) + 1
    cuts[2] = 2
    cuts[5] = T - 1
    return cuts


def probe(model, rows, losses, size, token_bytes, rng):
    """Scores some rows again. In seven of eight, another row's tokens replace all inputs from a cut
    on. Losses before the cut must not change (`causality`; `edges` are the first and the last), nor
    those of the eighth row, which stays (`isolation`). Returns {probe: absolute changes, nats}."""
    count = min(PROBE_ROWS, len(rows)) // size * size
    chosen = rng.permutation(len(rows))[:count]
    inputs = rows[chosen, :-1]
    targets = rows[chosen, 1:]
    cuts = draw_cuts(rows[chosen], rng)[:, None]
    is_cut = np.arange(count)[:, None] % 8 > 0
    position = np.arange(inputs.shape[1])
    before_cut = is_cut & (position < cuts)
    altered = np.where(before_cut | ~is_cut, inputs, np.roll(inputs, 1, axis=0))
    again = []
    for begin in range(0, count, size):
        batch = slice(begin, begin + size)
        again.append(token_losses(model, altered[batch], targets[batch], token_bytes))
    moved = np.abs(np.concatenate(again) - losses[chosen])
    at_edge = (position == 0) | (position == cuts - 1)
    return {
        "isolation": moved[~is_cut[:, 0]],
        "causality": moved[before_cut],
        "edges": moved[before_cut & at_edge],
    }


LIKELY_MISTAKE = {
    "isolation": "does a row depend on others of its batch, on randomness, a cache or an update?",
    "causality": "does a mask, a mean, a filter or a block let a position see later tokens?",
    "edges": "does something wrap around, or does the end of a chunk or row see the next token?",
}


def parameter_bytes(model):
    """Returns copies of the parameters, as bytes, since NaN is not equal to NaN."""
    return [p.detach().flatten().view(torch.uint8).clone() for p in model.parameters()]


def compile_seconds():
    """Returns the seconds that torch.compile has taken in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo.calculate_time_spent()["total_wall_time"] if dynamo else 0.0


@torch.no_grad()
def score(model, rows, token_bytes, size, rng=None):
    """Scores a model, int64 [B, T] to logits [B, T, V], on rows, uint16 [N, T + 1], in batches of
    `size`, which must divide N. Returns (bits per byte, what `probe` returns). The order of the
    rows and the cuts are drawn anew each time, so that no model can foresee them; bits per byte do
    not depend on them. Raises IntegrityError."""
    before = parameter_bytes(model)
    if not before:
        raise IntegrityError("model: it has no parameters; keep its parts in a torch.nn.ModuleList")
    rng = np.random.default_rng(rng)
    losses = np.empty((len(rows), rows.shape[1] - 1), dtype=np.float32)
    for batch in np.split(rng.permutation(len(rows)), len(rows) // size):
        losses[batch] = token_losses(model, rows[batch, :-1], rows[batch, 1:], token_bytes)
    broken = np.count_nonzero(~np.isfinite(losses))
    if broken:
        raise IntegrityError(f"finite: {broken} losses are NaN or infinite")
    probes = probe(model, rows, losses, size, token_bytes, rng)
    after = parameter_bytes(model)
    changed = sum(not torch.equal(*pair) for pair in zip(before, after, strict=True))
    if changed:
        raise IntegrityError(
            f"state: {changed} parameters changed; does the model learn here? (Normalise weights "
            "after the optimizer's step.)"
        )
    for name, change in probes.items():
        if not (change.mean() <= PROBE_MEAN and change.max() <= PROBE_PEAK):
            raise IntegrityError(
                f"{name}: losses moved by {change.mean():.2g} nats, one by {change.max():.2g}; "
                f"{LIKELY_MISTAKE[name]}"
            )
    count = token_bytes[rows[:, 1:]].sum(dtype=np.int64)
    return losses.sum(dtype=np.float64) / (math.log(2) * count), probes


@torch.no_grad()
def evaluate_bpb(model, tokenizer, batch_size, **stats):
    """Ends the run: stops the clock, scores the model on all validation rows, prints the final
    block, with `stats` in it, and records it. Returns bits per byte, which do not depend on the
    batch size. `tokenizer` is ignored. If the score cannot be trusted, prints `val_bpb: nan` and
    `integrity: FAIL ...` and exits with 3. tools/rerun.py shows what a process cannot check from
    inside, such as weights that an earlier run saved."""
    rows = _run.rows
    try:
        if _run.eval_began is not None:
            raise IntegrityError("once: evaluate_bpb was called before")
        if _run.began is None:
            raise IntegrityError("loader: make_dataloader never served a batch in this process")
        print(f"evaluating on {len(rows)} rows", flush=True)
        size = eval_batch_size(batch_size)
        model.eval()
        # Work that was queued or put off until now counts as training, so the clock stops only
        # after a batch has been scored. Compiling it does not count.
        compiling = -compile_seconds()
        token_losses(model, rows[:size, :-1], rows[:size, 1:], _run.token_bytes)
        compiling += compile_seconds()
        _run.eval_began = _now() - compiling
        val_bpb, _ = score(model, rows, _run.token_bytes, size)
    except IntegrityError as error:
        print(f"---\nval_bpb: nan\nintegrity: FAIL {error}", flush=True)
        raise SystemExit(3) from None
    _run.eval_ended = _now()
    report(val_bpb, stats)
    return val_bpb


# ---- Report ----
MAX_WAIT = max(300, TIME_BUDGET)  # seconds before the first batch, and of evaluation
GRACE = 1 + 0.01 * TIME_BUDGET  # seconds beyond the budget
MAX_SPEED_CHANGE = 0.10  # within a run


def find_flags():
    """Returns the reasons not to compare this score with others, or `ok`."""
    limits = [
        ("startup", _run.began - _imported, MAX_WAIT),
        ("overtime", elapsed(), TIME_BUDGET + GRACE),
        ("evaluation", _run.eval_ended - _run.eval_began, MAX_WAIT),
    ]
    flags = [f"{name}: {s:.1f} s, over {limit:g}" for name, s, limit in limits if s > limit]
    if _run.opened:
        flags.append(f"opened: the run itself read {', '.join(sorted(_run.opened))}")
    seconds = 0.4 * TIME_BUDGET
    earlier = sum(_run.served[1:5]) / seconds  # tokens per second from 10 to 50 % of the budget
    later = sum(_run.served[5:9]) / seconds  # from 50 to 90 %
    steps = sum(len(losses) for losses in _run.losses) or _run.batches
    one_step = sum(_run.served) / steps / seconds  # what one step more adds to either
    if abs(later - earlier) > max(MAX_SPEED_CHANGE * earlier, 2 * one_step):
        flags.append(
            f"unsteady: {earlier:.0f} tokens/s, then {later:.0f}; another program was busy or, if "
            "a second run shows the same, train.py itself changes its speed"
        )
    return "; ".join(flags) or "ok"


def loss_curve():
    """Returns the mean training loss in each tenth of the budget, interpolated where no step ended;
    None if no loss was logged."""
    tenths = [i for i in range(10) if _run.losses[i]]
    means = [np.mean(_run.losses[i]) for i in tenths]
    return np.interp(range(10), tenths, means).tolist() if tenths else None


def report(val_bpb, stats):
    """Prints the final block and writes it as JSON. `stats` cannot override what is known here."""
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # resident, the peak
    memory *= 1 if sys.platform == "darwin" else 2**10
    if DEVICE.type == "cuda":
        memory = torch.cuda.max_memory_allocated()
    curve = loss_curve()
    data = hashlib.sha256(json.dumps(_run.manifest["files"]).encode())
    block = {
        "val_bpb": val_bpb,
        "training_seconds": elapsed(),
        "total_seconds": _now() - _imported,
        "peak_vram_mb": memory / 2**20,
        "mfu_percent": stats.get("mfu_percent"),
        "total_tokens_M": sum(_run.served) / 1e6,
        "num_steps": stats.get("num_steps"),
        "num_params_M": stats.get("num_params_M"),
        "depth": stats.get("depth"),
        "tokens_per_second": tokens_per_second(),
        "train_loss": curve[-1] if curve else None,
        "curve": curve,
        "startup_seconds": _run.began - _imported,
        "eval_seconds": _run.eval_ended - _run.eval_began,
        "profile": PROFILE,
        "time_budget": TIME_BUDGET,
        "seed": SEED,
        "device": DEVICE_NAME,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "commit": _run.commit,
        "data": data.hexdigest()[:8],
        "prepare": _run.hashes[0][:8],
    }
    block |= {key: value for key, value in stats.items() if key not in block}
    block["integrity"] = find_flags()
    print("---")
    for key, value in block.items():
        print(f"{key}: {format_value(key, value)}", flush=True)
    block["train"] = _run.hashes[1]
    moment = time.strftime("%Y%m%dT%H%M%S")
    commit = block["commit"].replace("/", "-")  # AUTORESEARCH_COMMIT may be a branch
    record = RUNS / f"{moment}_{commit}_{SEED}_{os.getpid()}.json"
    temporary = record.with_suffix(".tmp")
    try:
        temporary.write_text(json.dumps(block, indent=1, default=str) + "\n")
        temporary.replace(record)
    except OSError as error:
        print(f"warning: {error}; the score above has no record.", file=sys.stderr)


def format_value(key, value):
    if value is None:
        return "n/a"
    if key == "curve":
        return " ".join(f"{loss:.3f}" for loss in value)
    if key in ("val_bpb", "train_loss"):
        return f"{value:.6f}"
    if isinstance(value, float):
        return f"{value:.2f}" if abs(value) >= 1 else f"{value:.3g}"
    return value


# ==== Part 2: preparing the cache ====


# ---- Shards: parquet files, or lists of texts; the last is for validation ----
class ShardError(Exception):
    """A shard that cannot be fetched or read; the message is a sentence."""


def read_shard(shard):
    """Yields the non-empty documents of a shard. Raises ShardError."""
    if isinstance(shard, list):
        yield from shard
        return
    try:
        with pq.ParquetFile(shard, page_checksum_verification=True) as file:
            columns = [file.schema.column(i) for i in range(len(file.schema))]
            types = [column.physical_type for column in columns if column.path == "text"]
            if types != ["BYTE_ARRAY"]:  # none, several, nested or not of strings
                raise ShardError(f"{shard} must have one column `text` of strings; convert it.")
            for batch in file.iter_batches(batch_size=512, columns=["text"]):
                for text in batch["text"].cast(pa.string()).to_pylist():  # checks bytes for UTF-8
                    if text:
                        yield text
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise ShardError(
            f"{shard} cannot be read ({error}); replace it, or delete it to download it again."
        ) from None


# ---- ClimbMix ----
CLIMBMIX = "karpathy/climbmix-400b-shuffle"
CLIMBMIX_VAL = 6542  # the last shard is for validation: nothing trains on it
WAITS = (0, 1, 2, 4, 8)  # seconds before each attempt


def download(path):
    """Downloads a shard, unless a whole one is there. Raises ShardError."""
    with contextlib.suppress(ShardError):
        any(read_shard(path))  # raises unless its end and its first texts can be read
        return
    host = (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")
    url = f"{host}/datasets/{CLIMBMIX}/resolve/main/{path.name}"
    part = path.with_name(f".{path.name}.part")
    for wait in WAITS:
        time.sleep(wait)
        try:
            reply = requests.get(url, timeout=60)
            reply.raise_for_status()
            part.write_bytes(reply.content)
            any(read_shard(part))  # refuses a login page
            part.replace(path)
            return
        except (OSError, ShardError) as error:  # the errors of requests are OSErrors
            reason = f"{type(error).__name__}: {str(error)[-160:]}"  # the end names the cause
    part.unlink(missing_ok=True)
    raise ShardError(
        f"{path.name} did not download ({reason}); run the same command to go on, or use "
        "--corpus python."
    )


def climbmix(count):
    """Returns the first `count` shards of ClimbMix (-1: all) and the validation shard; downloads
    those that are missing."""
    numbers = range(CLIMBMIX_VAL)[: count if count >= 0 else None]
    shards = [SHARDS / f"shard_{i:05d}.parquet" for i in (*numbers, CLIMBMIX_VAL)]
    SHARDS.mkdir(exist_ok=True)
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
PYTHON_SHARDS = 8  # for training


def python_sources():
    """Returns {text: file name}, in a fixed order, without duplicates."""
    library = Path(os.__file__).parent
    files = [(file.relative_to(library), file) for file in sorted(library.rglob("*.py"))]
    for package in PACKAGES:
        installed = importlib.metadata.files(package) or []  # None without a list of its files
        files += [(file, Path(file.locate())) for file in installed]
    sources = {}
    for name, file in files:
        if name.suffix == ".py" and not SKIPPED_FOLDERS.intersection(name.parts):
            with contextlib.suppress(OSError, UnicodeDecodeError):
                sources.setdefault(file.read_bytes().decode(), name.as_posix())
    return sources


def python_corpus():
    """Returns the shards. Files are cut into pieces, since most are longer than a row. The hash of
    a file's name decides whether it is held out, as one in twenty is; sorting the pieces by hash
    shuffles them."""

    def name_hash(name):
        return int(hashlib.sha256(name.encode()).hexdigest(), 16)

    train = []
    val = []
    for text, name in python_sources().items():
        side = val if name_hash(name) < 0.05 * 2**256 else train
        pieces = re.findall(r"(?s).{1,2048}\n|.{1,2048}", text)  # up to the end of a line
        for i, piece in enumerate(pieces):
            side.append((name_hash(f"{name}:{i}"), piece))
    train = [piece for _, piece in sorted(train)]
    val = [piece for _, piece in sorted(val)]
    return [train[i::PYTHON_SHARDS] for i in range(PYTHON_SHARDS)] + [val]


# ---- Choice of the corpus ----
def list_files(folder):
    """Returns the shards in a user's own folder."""
    files = sorted(Path(folder).glob("[!.]*.parquet"))  # macOS puts ._ files beside others
    if len(files) < 2:
        fail(f"{folder} must be a folder of at least two *.parquet files.")
    return files


def find_shards(options):
    """Returns the shards of the corpus that the options name."""
    if options["data_dir"]:
        return list_files(options["data_dir"])
    count = options["num_shards"]
    default = "python" if PROFILE == "small" and count is None else "climbmix"
    if (options["corpus"] or default) == "python":
        return python_corpus()
    return climbmix(20 if count is None else count)


# ---- Tokenizer training ----
TOKENIZER_DOC_CHARS = 10_000  # per document
TOKENIZER_CHARS = 1_000_000_000  # in all


def tokenizer_texts(shards):
    """Yields the texts that the tokenizer is trained on."""
    left = TOKENIZER_CHARS
    for shard in shards:
        for text in read_shard(shard):
            text = text[: min(TOKENIZER_DOC_CHARS, left)]
            yield text
            left -= len(text)
            if left <= 0:
                return


def train_tokenizer(shards, folder):
    """Trains on the shards, writes tokenizer.tiktoken and returns the Tokenizer."""
    if not any(tokenizer_texts(shards)):
        fail("the training shards hold no text; check their column `text`, or raise --num-shards.")
    print(f"training a tokenizer of {VOCAB_SIZE} tokens", flush=True)
    trainer = rustbpe.Tokenizer()
    size = VOCAB_SIZE - len(SPECIAL_TOKENS)
    trainer.train_from_iterator(tokenizer_texts(shards), size, pattern=SPLIT_PATTERN)
    with open(folder / TOKENIZER_FILE, "wb") as file:
        for token, rank in trainer.get_mergeable_ranks():
            file.write(base64.b64encode(bytes(token)) + b" %d\n" % rank)
    return Tokenizer.from_directory(folder)


# ---- Tokens: made once, and not in each of a night's hundred runs ----
def read_tokens(shard, tokenizer):
    """Yields each document's tokens, using threads: tiktoken releases the GIL."""
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
        fail(f"validation, the last file, fills only {len(rows)} of {EVAL_BATCH} rows; add text.")
    np.stack(rows[:count]).astype("<u2").tofile(folder / ROWS_FILE)


def write_tokens(shards, tokenizer, folder):
    """Writes the training tokens. Returns the number of each shard's first document."""
    lengths = [0]
    first_documents = []
    with open(folder / TOKENS_FILE, "wb") as file:
        for shard in tqdm(shards, "tokenise", unit="shard", disable=None):
            first_documents.append(len(lengths) - 1)
            for ids in read_tokens(shard, tokenizer):
                file.write(ids)
                lengths.append(len(ids))
    np.save(folder / ENDS_FILE, np.cumsum(lengths))
    return first_documents


# ---- Commands ----
def build(folder, options):
    """Makes the derived files and, last, their manifest in a new folder."""
    shards = find_shards(options)
    folder.mkdir()
    tokenizer = train_tokenizer(shards[:-1], folder)
    write_rows(shards[-1], tokenizer, folder)
    first_documents = write_tokens(shards[:-1], tokenizer, folder)
    paths = [folder / name for name in FILES]
    manifest = {
        "recipe": RECIPE,
        "options": options,
        "shards": first_documents,
        "files": {path.name: [path.stat().st_size, sha256(path)] for path in paths},
    }
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")


def publish(folder):
    """Replaces the prepared folder with this one. Runs keep what they have opened."""
    shutil.rmtree(PREPARED, ignore_errors=True)
    folder.rename(PREPARED)


def prepare(options):
    """Does nothing if the files are intact and were built with these options, by default those of
    last time. Otherwise builds them in a new folder, so that no run sees a mixture."""
    print(f"profile: {PROFILE}, on {DEVICE_NAME}; AUTORESEARCH_PROFILE sets another", flush=True)
    new = PREPARED.with_name(f"{PROFILE}.new")
    if load_manifest(new):
        publish(new)  # a preparation finished this folder and was then killed
    shutil.rmtree(new, ignore_errors=True)
    manifest = load_manifest()
    intact = manifest.get("recipe") == RECIPE and not find_damaged(manifest["files"])
    bare = all(value is None for value in options.values())
    if bare:
        options = manifest.get("options", options)
    if options["data_dir"] and not (bare and intact):
        files = list_files(options["data_dir"])
        options["files"] = [[f.name, f.stat().st_size, f.stat().st_mtime_ns] for f in files]
    if not intact or options != manifest["options"]:
        build(new, options)
        publish(new)
        manifest = load_manifest()
    tokens = manifest["files"][TOKENS_FILE][0] // 2  # of two bytes each
    rows = manifest["files"][ROWS_FILE][0] // (2 * (MAX_SEQ_LEN + 1))
    print(
        f"ready: {PROFILE} profile, {tokens / 1e6:.1f} million training tokens, {rows} validation "
        "rows; next: uv run train.py"
    )


def absolute_path(path):
    return os.path.abspath(os.path.expanduser(path))


def main():
    parser = argparse.ArgumentParser(
        description="Prepares the cache, by default with the options of last time."
    )
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--num-shards", type=int, help="training shards of ClimbMix (20; -1: all)")
    group.add_argument("--corpus", choices=("climbmix", "python"), help="small: python by default")
    group.add_argument("--data-dir", type=absolute_path, help="parquet files; last: validation")
    options = vars(parser.parse_args())
    check_device()
    try:
        CACHE.mkdir(parents=True, exist_ok=True)
        while not lock(CACHE):
            print("waiting for another preparation to end", flush=True)
            time.sleep(2)
        prepare(options)
    except ShardError as error:
        fail(str(error))
    except OSError as error:
        full = error.errno in (errno.ENOSPC, None)  # numpy's error of a full disk has no number
        remedy = "free space, or set" if full else "set"
        fail(f"{error}; {remedy} AUTORESEARCH_CACHE to another folder.")
    except KeyboardInterrupt:
        fail("interrupted; downloads are kept, run the same command to continue.", 130)


if __name__ == "__main__":
    main()
