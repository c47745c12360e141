"""
prepare.py, the ruler of autoresearch: data, tokenizer, loader, clock, metric, report. Nobody edits
it during a night of research.

    uv run prepare.py                  prepare what this machine's profile needs, or go on with it
    uv run prepare.py --data-dir DIR   a corpus of your own: parquet files with a column `text`, the
                                       last by name is validation
    uv run prepare.py --verify         hash and derive again what a score rests on

Part 1 is what a run uses, part 2 makes the cache. Importing this file does nothing; torch, which
takes seconds, is imported where it is needed.
Exit codes, here and in train.py: 0 good, 1 a bug, 2 set-up or usage, 3 integrity, 4 diverged,
5 out of memory, 130 and 143 interrupted.
"""

import argparse
import base64
import bisect
import contextlib
import hashlib
import importlib.metadata
import itertools
import json
import logging
import math
import multiprocessing
import multiprocessing.pool
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
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

# ==== Part 1: what a run uses ====


# ---- Settings: a change of one of these numbers starts a new results table ----
def stop(sentence, code=2):
    """Ends the process with one sentence on stderr: what is wrong and how to fix it."""
    if sys.stderr.isatty():
        print(file=sys.stderr)  # below a live progress line
    print(f"error: {sentence}", file=sys.stderr, flush=True)
    raise SystemExit(code)


def by_profile(*, full, small):
    """The value for the profile in force."""
    return {"full": full, "small": small}[PROFILE]


def environment_number(name, default, kind, low, high):
    """The variable as a number of `kind` with low <= number < high. Ends the process for others."""
    text = os.environ.get(name) or default
    try:
        number = kind(text)
    except ValueError:
        number = None
    if number is None or not low <= number < high:
        what = "a whole number" if kind is int else "a number of seconds"
        stop(f"{name} is {what} from {low:g} to below {high:g}, not {text!r}; change or unset it.")
    return number


def gpu_present():
    """Whether there is an NVIDIA GPU that may be used, told without torch, which takes seconds."""
    driver = ("/dev/nvidiactl", "/usr/lib/wsl/lib/libcuda.so.1")
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    return any(os.path.exists(path) for path in driver) and not hidden


GPU_PRESENT = gpu_present()
PROFILE = os.environ.get("AUTORESEARCH_PROFILE") or ("full" if GPU_PRESENT else "small")
if PROFILE not in ("full", "small"):
    stop(f"AUTORESEARCH_PROFILE is full or small, not {PROFILE!r}; change or unset it.")
TIME_BUDGET = environment_number("AUTORESEARCH_TIME_BUDGET", 300, float, 0.001, 1e9)  # seconds
SEED = environment_number("SEED", 42, int, 0, 2**63)

MAX_SEQ_LEN = by_profile(full=2048, small=512)  # tokens per row
EVAL_TOKENS = by_profile(full=40 * 524288, small=2**18)  # validation tokens scored
VOCAB_SIZE = by_profile(full=8192, small=2048)  # the four special tokens included
EVAL_BATCH = 32  # rows per batch of evaluation, at most
BUFFER_DOCS = 1000  # documents among which packing chooses

# Where things are. ROOT has data/, val/, tokenizer/, tokens/ and manifest.json.
CACHE = (
    Path(os.environ.get("AUTORESEARCH_CACHE") or "~/.cache/autoresearch").expanduser().absolute()
)
ROOT = by_profile(full=CACHE, small=CACHE / "small")
RUNS = Path(os.environ.get("AUTORESEARCH_RUNS") or CACHE / "runs").expanduser().absolute()

# GPT-4's pattern (cl100k_base), but runs of digits are cut at two, not three: a small vocabulary
# has no room for a thousand numbers.
SPLIT = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}]++[\r\n]*"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)
SPECIAL_TOKENS = [f"<|reserved_{i}|>" for i in range(4)]  # the first is BOS

# Probes. Honest models, bf16 and routed ones included, moved by 0 to 2e-5 nats on average and by
# 0.02 at most.
PROBE_ROWS = 48  # rows that are scored once more
PROBE_MEAN = 1e-3  # nats that their losses may move on average
PROBE_PEAK = 0.1  # nats that one of them may move
NEIGHBOURS = 32  # positions to each side that a position's loss is compared with

STARTUP_LIMIT = 300  # seconds before the first batch; 90 compile everything anew on a CPU
DIVERGED = 100  # nats; a loss above ends the run
PROGRESS_SECONDS = 5  # between two lines of progress, where there is no terminal


# ---- Device ----
# Dense bf16 peaks in TFLOP/s, from the vendors' data sheets; of two names that fit, the first.
PEAK_TFLOPS = {
    "GB200": 2500,
    "B200": 2250,
    "B100": 1800,
    "H200 NVL": 836,
    "H200 PCIe": 836,
    "H200": 989,
    "H100 NVL": 835,
    "H100 PCIe": 756,
    "H100": 989,
    "H800 NVL": 989,
    "H800": 756,
    "A100": 312,
    "A800": 312,
    "A40": 149.7,
    "A30": 165,
    "L40S": 362,
    "L4": 121,
    "MI355": 2500,
    "MI325": 1307,
    "MI300X": 1307,
    "MI300A": 980.6,
    "MI250X": 383,
    "MI250": 362,
    "RTX 5090 Laptop": None,
    "RTX 5090": 209.5,
    "RTX 4090 Laptop": None,
    "RTX 4090": 165.2,
    "RTX 3090": 71,
}


def peak_flops(device_name):
    """FLOP/s of the card; None where the table does not have it: never another card's peak."""
    words = set(device_name.replace("-", " ").split())
    for card, tflops in PEAK_TFLOPS.items():
        if words.issuperset(card.split()):
            return tflops and tflops * 1e12
    return None


def training_device():
    """The torch device of this run. Ends the process where there is a GPU that torch cannot use."""
    import torch

    if torch.cuda.is_available():
        return torch.device("cuda")
    if GPU_PRESENT:
        stop(
            "torch finds no usable GPU; update the driver (580 or newer), or set "
            "CUDA_VISIBLE_DEVICES to a GPU that is there, or to -1 to go without one."
        )
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def device_name(device):
    import torch

    return torch.cuda.get_device_name() if device.type == "cuda" else device.type


def peak_memory_mb(device):
    """(allocated, reserved) on a GPU; elsewhere the process's peak resident memory, twice."""
    import torch

    if device.type == "cuda":
        allocated = torch.cuda.max_memory_allocated()
        reserved = torch.cuda.max_memory_reserved()
        return allocated / 2**20, reserved / 2**20
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    peak /= 2**20 if sys.platform == "darwin" else 2**10  # bytes there, kilobytes here
    return peak, peak


def other_gpu_processes():
    """Ids of the processes besides this one that compute on the GPU in use, as far as the driver
    tells. Exactly one entry of its list is this process, in a container under another id."""
    import torch

    if not torch.cuda.is_available():
        return []
    torch.zeros(1, device="cuda")  # only then does the driver surely list this process
    torch.cuda.synchronize()
    # By its UUID, since nvidia-smi numbers the devices its own way.
    uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
    query = ["nvidia-smi", f"--id=GPU-{uuid}", "--query-compute-apps=pid", "--format=csv,noheader"]
    try:
        output = subprocess.check_output(query, stderr=subprocess.DEVNULL, text=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return []
    listed = [word for word in output.split() if word.isdigit()]
    if len(listed) < 2:
        return []
    return [process for process in listed if process != str(os.getpid())]


# ---- Manifest: what was prepared ----
def sha256(path):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def load_manifest():
    """{"settings", "corpus", "files", "tokens"}: `corpus`, and `files` made from it, are
    {path below ROOT: [bytes, sha256]}, `files` empty while unfinished; `tokens` is
    {shard: its token file}."""
    manifest = {"settings": {}, "corpus": {}, "files": {}, "tokens": {}}
    with contextlib.suppress(
        FileNotFoundError, ValueError, TypeError
    ):  # unreadable: as good as none
        manifest |= json.loads((ROOT / "manifest.json").read_text())
    return manifest


def find_damaged(recorded, hashed=lambda name: True):
    """The recorded files that are missing or have another size or, where `hashed` says yes to the
    name, another sha256."""
    damaged = []
    for name, (size, digest) in recorded.items():
        path = ROOT / name
        whole = path.is_file() and path.stat().st_size == size
        if not whole or (hashed(name) and sha256(path) != digest):
            damaged.append(path)
    return damaged


def decides_score(name):
    """Whether a score depends on every byte of the file: the tokenizer and the validation rows."""
    return name.startswith("tokenizer/") or name == "val/rows.bin"


def check_cache():
    """The manifest of a whole cache that this prepare.py made. Ends the process without one."""
    manifest = load_manifest()
    if not manifest["files"] or manifest["settings"]["prepare"] != sha256(__file__):
        command = f"AUTORESEARCH_PROFILE={PROFILE} uv run prepare.py"
        stop(f"{ROOT} is not prepared by this prepare.py; run `{command}`.")
    for path in find_damaged(manifest["files"], decides_score):
        stop(f"{path} is missing or not as it was prepared; run `uv run prepare.py` to restore it.")
    return manifest


# ---- Tokenizer ----
class Tokenizer:
    """Byte-level BPE over `ranks` {bytes: id}. Four special tokens come right above them; no text
    yields one. `token_bytes`, int32 [V], counts the raw bytes of each token, 0 for special ones.
    (In a decoded string each part of a character would count three.)"""

    def __init__(self, ranks):
        self.special = {name: len(ranks) + i for i, name in enumerate(SPECIAL_TOKENS)}
        self.encoding = tiktoken.Encoding(
            "autoresearch", pat_str=SPLIT, mergeable_ranks=ranks, special_tokens=self.special
        )
        lengths = [len(token) for token in sorted(ranks, key=ranks.get)]
        self.token_bytes = np.array(lengths + [0] * len(SPECIAL_TOKENS), dtype=np.int32)

    @classmethod
    def from_directory(cls, directory=None):
        """Reads tokenizer.tiktoken: a line per token, base64 of its bytes, then its id."""
        path = Path(directory or ROOT / "tokenizer") / "tokenizer.tiktoken"
        ranks = {}
        for line in path.read_bytes().splitlines():
            token, rank = line.split()
            ranks[base64.b64decode(token)] = int(rank)
        return cls(ranks)

    def get_vocab_size(self):
        return self.encoding.n_vocab

    def get_bos_token_id(self):
        return self.special[SPECIAL_TOKENS[0]]

    def encode(self, text, prepend=None):
        """The ids of a str, or of each str in a list, after `prepend`: None, a token id or the name
        of a special token. Raises ValueError for anything else."""
        if not isinstance(text, str):
            return [self.encode(one, prepend) for one in text]
        ids = [] if prepend is None else [self.token_id(prepend)]
        # In pieces: near a million blanks in a row overflow the stack of the split pattern.
        for begin in range(0, len(text), 200_000):
            ids += self.encoding.encode_ordinary(text[begin : begin + 200_000])
        return ids

    def token_id(self, token):
        """The id of a special token's name; an id itself. Raises ValueError for anything else."""
        token = self.special.get(token, token)
        if type(token) is not int or not 0 <= token < self.get_vocab_size():
            raise ValueError(f"prepend is a token id or one of {SPECIAL_TOKENS}, not {token!r}")
        return token

    def decode(self, ids):
        return self.encoding.decode(ids)


# ---- Start ----
@dataclass
class Run:
    """What the ruler knows of the run in this process. Times are those of `_now`."""

    imported: float
    files: dict = field(default_factory=dict)  # of the manifest, when the run began
    commit: str = ""
    train_sha256: str = ""  # of the script that runs
    device: object = None  # torch's
    beside: list = field(default_factory=list)  # processes on the same GPU, at the beginning
    served: list = field(default_factory=list)  # (time, tokens) of every batch
    losses: int = 0  # how many were logged
    loss: float = 0.0  # smoothed
    last_step: float = 0.0  # when log_step was last called
    last_line: float = -math.inf  # when it last printed
    stopped: float | None = None  # when evaluation began
    scored: float | None = None  # when it ended
    val_bpb: float | None = None


_run = Run(imported=_now())


def current_commit():
    """The short commit of this folder, `+dirty` where tracked files differ; AUTORESEARCH_COMMIT
    where there is no git."""
    folder = Path(__file__).parent
    command = ["git", "-C", folder, "describe", "--always", "--exclude=*", "--dirty=+dirty"]
    try:
        return subprocess.check_output(command, stderr=subprocess.DEVNULL, text=True).strip()
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("AUTORESEARCH_COMMIT") or "none"


def begin_run():
    """Checks the cache and that no other process computes on the GPU, and notes what runs on what;
    once per process. Ends the process where a run cannot be trusted or is not prepared."""
    if _run.files:
        return
    files = check_cache()["files"]
    script = getattr(sys.modules["__main__"], "__file__", None)  # none in a notebook or python -c
    _run.train_sha256 = sha256(script) if script else "none"
    _run.commit = current_commit()
    _run.device = training_device()
    _run.beside = other_gpu_processes()
    if _run.beside and os.environ.get("AUTORESEARCH_SHARED_GPU") != "1":
        stop(
            f"another process computes on this GPU (nvidia-smi names {', '.join(_run.beside)}); "
            "let it end, choose another GPU by CUDA_VISIBLE_DEVICES, or set "
            "AUTORESEARCH_SHARED_GPU=1."
        )
    _run.files = files


def start():
    """To be called first by a training script. Does all that no experiment edits: `begin_run`,
    folders, signals, a line that says what runs. Returns the torch device."""
    begin_run()
    try:
        RUNS.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=RUNS).close()  # if no record can be written: better known now
    except OSError as error:
        stop(f"{error}; free space, or set AUTORESEARCH_RUNS to a writable folder.")
    if not os.access(CACHE, os.W_OK):  # somebody else's: nothing is written but in RUNS
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(RUNS / "inductor"))
        os.environ.setdefault("TMPDIR", str(RUNS))
        tempfile.tempdir = os.environ["TMPDIR"]
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(CACHE / "inductor"))
    # Where a compiler of CUDA is but no GPU, torch would warn that there is none.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    signal.signal(signal.SIGINT, interrupted)
    signal.signal(signal.SIGTERM, interrupted)
    name = device_name(_run.device)
    print(f"run: {PROFILE} profile, {TIME_BUDGET:g} s, seed {SEED}, commit {_run.commit}, {name}")
    return _run.device


def interrupted(number, frame):
    name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
    stop(f"{name} after {elapsed():.0f} s of training; no score.", 128 + number)


# ---- Loader and clock ----
def elapsed():
    """Seconds of training: from the first batch served until evaluate_bpb is called; 0.0 before."""
    if not _run.served:
        return 0.0
    first, _ = _run.served[0]
    return (_run.stopped or _now()) - first


def read_tokens(flat):
    """Yields the documents of a token file, uint16."""
    tokens = np.memmap(flat, dtype="<u2", mode="r").view(np.ndarray)
    ends = np.load(flat.with_suffix(".npy")).tolist()
    for begin, end in itertools.pairwise(ends):
        yield tokens[begin:end]


class TrainDocuments:
    """All training documents, for ever; `epoch` counts the rounds. Shards keep their order, rotated
    by SEED."""

    def __init__(self):
        self.epoch = 0
        flats = [ROOT / name for name in _run.files if re.fullmatch(r"tokens/.*\.bin", name)]
        first = SEED % len(flats)
        self.flats = flats[first:] + flats[:first]

    def __iter__(self):
        while True:
            self.epoch += 1
            for flat in self.flats:
                yield from read_tokens(flat)


def pack_rows(documents, row_len, buffer_docs=BUFFER_DOCS):
    """Best-fit packing: yields full rows, uint16 [row_len], of uint16 documents, each of which
    begins with BOS, so that rows do too. A buffer holds `buffer_docs` documents and is topped up
    one at a time. Into what is left of a row goes the longest document that fits whole; where none
    does, the shortest is cut and its tail dropped; of equals, the oldest."""
    source = enumerate(documents)
    held = {}  # age: document
    order = []  # (length, age) of each, sorted; a search in it takes constant time, about
    while True:
        row = np.empty(row_len, dtype=np.uint16)
        filled = 0
        while filled < row_len:
            for age, document in itertools.islice(source, buffer_docs - len(order)):
                held[age] = document
                bisect.insort(order, (len(document), age))
            if not order:
                return
            space = row_len - filled
            fitting = bisect.bisect_left(order, (space + 1,))
            place = 0  # the shortest
            if fitting:
                longest, _ = order[fitting - 1]
                place = bisect.bisect_left(order, (longest,))
            _, age = order.pop(place)
            document = held.pop(age)[:space]
            row[filled : filled + len(document)] = document
            filled += len(document)
        yield row


def make_dataloader(tokenizer, B, T, split="train", buffer_size=BUFFER_DOCS):
    """Yields (inputs, targets, epoch) for ever: int64 [B, T] on the training device, fresh tensors
    that share no memory, targets one token ahead; the rows do not depend on B. The first batch
    starts the clock. Raises ValueError for a split other than "train"."""
    if split != "train":
        raise ValueError(f'split must be "train", not {split!r}: only evaluate_bpb reads "val"')
    begin_run()
    return serve_batches(TrainDocuments(), B, T, buffer_size)


def serve_batches(documents, B, T, buffer_size):
    import torch

    rows = pack_rows(documents, T + 1, buffer_size)
    while True:
        packed = np.stack(list(itertools.islice(rows, B))).astype(np.int64)
        batch = torch.from_numpy(packed)
        if _run.device.type == "cuda":
            batch = batch.pin_memory()  # torch keeps it until the copy is done
        batch = batch.to(_run.device, non_blocking=True)
        # Cloned, since `contiguous` copies nothing of a single row: a change of one tensor would be
        # a change of the other.
        inputs = batch[:, :-1].clone(memory_format=torch.contiguous_format)
        targets = batch[:, 1:].clone(memory_format=torch.contiguous_format)
        _run.served.append((_now(), B * T))
        yield inputs, targets, documents.epoch


# ---- Metric ----
class IntegrityError(Exception):
    """A score that cannot be trusted; the message names the check and the number."""


def largest_divisor(number, at_most):
    """The largest divisor of `number` that is at most max(at_most, 1)."""
    return max(size for size in range(1, max(at_most, 1) + 1) if number % size == 0)


def eval_batch_size(batch_size):
    """Rows per batch of evaluation: the largest divisor of the number of validation rows that is at
    most min(batch_size, EVAL_BATCH), so that nothing is dropped."""
    return largest_divisor(count_rows(_run.files), min(batch_size, EVAL_BATCH))


def count_rows(files):
    """The number of packed validation rows."""
    size, _ = files["val/rows.bin"]
    return size // (2 * (MAX_SEQ_LEN + 1))


def token_losses(model, inputs, targets, vocab_size):
    """Cross-entropy in nats, float32 [B, T], of the logits that `model` gives for the tokens
    `inputs` [B, T], against `targets` [B, T], which it never sees. Raises IntegrityError."""
    import torch

    device = next(model.parameters()).device
    logits = model(torch.from_numpy(inputs.astype(np.int64)).to(device))
    plain = type(logits) is torch.Tensor
    shape = tuple(logits.shape) if plain else type(logits).__name__
    if not plain or shape[:-1] != targets.shape or shape[-1] < vocab_size:
        wanted = (*targets.shape, vocab_size)
        raise IntegrityError(f"shape: model(x) returned {shape}, not a plain tensor {wanted}")
    targets = torch.from_numpy(targets.astype(np.int64)).to(device)
    losses = []
    for row, target in zip(logits, targets, strict=True):  # fp32 of all would be the largest tensor
        # Not logsumexp minus gather, which cancels: 2**28 added to all logits would score 0.
        log_probs = row.float().log_softmax(-1)
        losses.append(-log_probs.gather(-1, target[:, None])[:, 0])
    return torch.stack(losses).cpu().numpy()


def draw_cuts(losses, count, rng):
    """Where `count` rows are cut, int [count] from 1 to T - 1, given the losses of all rows [N, T].
    A quarter each: log-uniform from the front, where a prefix may see itself; log-uniform from the
    end; at odd multiples of 16, 32, ... T / 2, where chunks end; and behind the positions whose
    mean loss is lowest beside the median of their neighbours, as where one sees its target."""
    T = losses.shape[1]
    shares = [len(share) for share in np.array_split(np.arange(count), 4)]
    front = np.exp(rng.uniform(0, np.log(T), shares[0])).astype(int)
    end = T - np.exp(rng.uniform(0, np.log(T), shares[1])).astype(int)
    periods = 2 ** rng.integers(4, max(int(np.log2(T)), 5), shares[2])
    odd = 2 * rng.integers(0, np.maximum(T // (2 * periods), 1)) + 1
    chunks = periods * odd
    mean = losses.mean(axis=0, dtype=np.float64)
    padded = np.pad(mean, NEIGHBOURS, constant_values=np.nan)
    around = np.lib.stride_tricks.sliding_window_view(padded, 2 * NEIGHBOURS + 1)
    below = np.nanmedian(around, axis=1) - mean
    behind = np.argsort(-below, kind="stable")[: shares[3]] + 1
    return np.clip(np.concatenate([front, end, chunks, behind]), 1, T - 1)


def probe(model, rows, losses, size, vocab_size, rng):
    """{probe: changes in nats} of some rows [N, T + 1] that are scored once more, in batches of
    `size`, where every other one has other tokens behind a cut. What is before it must not move
    (causality; the first and the last of those: edges), nor any untouched row (isolation). Where
    one does, the same batches are scored twice again, as they are (repeatability)."""
    count = size * max(1, min(PROBE_ROWS, len(rows)) // size)
    chosen = rng.permutation(len(rows))[:count]
    tokens = rows[chosen]

    def losses_of(inputs):
        found = []
        for begin in range(0, count, size):
            batch = slice(begin, begin + size)
            found.append(token_losses(model, inputs[batch, :-1], tokens[batch, 1:], vocab_size))
        return np.concatenate(found)

    position = np.arange(tokens.shape[1])
    cuts = np.full((count, 1), len(position))  # behind the end: untouched
    cuts[1::2, 0] = rng.permutation(draw_cuts(losses, count // 2, rng))
    altered = np.where(position < cuts, tokens, np.roll(tokens, 1, axis=0))
    moved = np.abs(losses_of(altered) - losses[chosen])

    position = position[:-1]
    before = position < cuts
    edges = before & ((position == 0) | (position == cuts - 1))
    probes = {
        "isolation": moved[::2],
        "causality": moved[1::2][before[1::2]],
        "edges": moved[1::2][edges[1::2]],
    }
    if probes["isolation"].mean() > PROBE_MEAN:  # because of the other rows, or by itself?
        probes = {"repeatability": np.abs(losses_of(tokens) - losses_of(tokens))} | probes
    return probes


def score(model, rows, token_bytes, batch_size, rng=None):
    """(bits per byte, {probe: changes in nats}) of `model` over packed rows, uint16 [N, T + 1]: of
    its logits [B, T, V] for x int64 [B, T], against targets that it never sees, where those stand
    for bytes; sums in fp64. Rows are scored and probed in an order that `rng` (numpy) draws. Raises
    IntegrityError."""
    import torch

    rng = np.random.default_rng(rng)
    vocab_size = len(token_bytes)
    size = largest_divisor(len(rows), min(batch_size, EVAL_BATCH))
    losses = np.empty((len(rows), rows.shape[1] - 1), dtype=np.float32)
    model.eval()
    with torch.no_grad():
        for batch in np.split(rng.permutation(len(rows)), len(rows) // size):
            losses[batch] = token_losses(model, rows[batch, :-1], rows[batch, 1:], vocab_size)
        broken = np.count_nonzero(~np.isfinite(losses))
        if broken:
            raise IntegrityError(f"finite: {broken} losses are NaN or infinite")
        probes = probe(model, rows, losses, size, vocab_size, rng)
    for name, change in probes.items():
        if change.size and not (change.mean() <= PROBE_MEAN and change.max() <= PROBE_PEAK):
            raise IntegrityError(
                f"{name}: losses moved by {change.mean():.2g} nats, one by {change.max():.2g}"
            )
    length = token_bytes[rows[:, 1:]]
    nats = losses.sum(where=length > 0, dtype=np.float64)
    return nats / (math.log(2) * length.sum(dtype=np.int64)), probes


def evaluate_bpb(model, tokenizer, batch_size):
    """Bits per byte of `model` over every packed validation row, by `score`. `batch_size` is an
    upper bound and does not change it. Stops the clock; to be called once. On failure prints
    `val_bpb: nan` and `integrity: FAIL ...` and exits with 3.

    No check inside a process stops determined code, or knows that weights came from an earlier run.
    For that there are --verify and a re-run of the commit in a clean worktree with
    AUTORESEARCH_RUNS, HOME and TMPDIR of its own."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()  # what is still queued is training
    try:
        if _run.stopped is not None:
            raise IntegrityError("once: evaluate_bpb was called before")
        _run.stopped = _now()
        if not _run.served:
            raise IntegrityError("loader: make_dataloader never served a batch")
        for path in find_damaged(_run.files, decides_score):
            raise IntegrityError(f"data: {path.name} changed since training began")
        rows = np.fromfile(ROOT / "val" / "rows.bin", dtype="<u2").reshape(-1, MAX_SEQ_LEN + 1)
        token_bytes = Tokenizer.from_directory().token_bytes
        _run.val_bpb, _ = score(model, rows, token_bytes, batch_size)
    except IntegrityError as error:
        print(f"---\nval_bpb: nan\nintegrity: FAIL {error}", flush=True)
        raise SystemExit(3) from None
    _run.scored = _now()
    return _run.val_bpb


# ---- Progress and report ----
def log_step(step, loss, *, tokens, flops, lr_factor, epoch):
    """Notes the loss of a step, in nats, and prints progress: one live line on a terminal, else a
    line about every five seconds. `tokens` and `flops` are those of a step. Ends the process with 4
    where training has diverged."""
    live = sys.stdout.isatty()
    if not loss <= DIVERGED:  # NaN too: no comparison with it holds
        print(f"\nFAIL: training diverged, loss {loss:g} at step {step}", flush=True)
        raise SystemExit(4)
    _run.losses += 1
    _run.loss += (loss - _run.loss) * max(0.1, 1 / _run.losses)
    now = _now()
    rate = tokens / (now - (_run.last_step or _run.served[0][0]))
    _run.last_step = now
    if not live and now - _run.last_line < PROGRESS_SECONDS:
        return
    _run.last_line = now
    peak = peak_flops(device_name(_run.device))
    mfu = f"{100 * flops / tokens * rate / peak:.1f}%" if peak else "n/a"
    line = (
        f"step {step:5d} {min(100 * elapsed() / TIME_BUDGET, 100):3.0f}% loss {_run.loss:.4f} "
        f"lr x{lr_factor:.2f} {rate:7.0f} tok/s mfu {mfu} epoch {epoch} "
        f"left {TIME_BUDGET - elapsed():3.0f} s"
    )  # in 80 columns
    if live:
        print(f"\r\033[K{line}", end="", flush=True)
    else:
        print(line, flush=True)


KEYS = """
    val_bpb training_seconds total_seconds peak_vram_mb mfu_percent total_tokens_M num_steps
    num_params_M depth train_loss eval_seconds startup_seconds tokens_per_second peak_reserved_mb
    profile time_budget seed device attention torch commit data prepare integrity
""".split()


def flags(total_tokens):
    """What a reader must know before comparing this run's number with another's, or `ok`."""
    found = []
    startup = _run.served[0][0] - _run.imported
    if startup > STARTUP_LIMIT:
        found.append(f"startup: {startup:.0f} s, over {STARTUP_LIMIT}")
    if _run.beside or other_gpu_processes():
        found.append("shared: another process computed on this GPU")
    if elapsed() > 1.02 * TIME_BUDGET + 2:
        found.append(f"overtime: {elapsed():.1f} of {TIME_BUDGET:g} s")
    served = sum(tokens for _, tokens in _run.served)
    if total_tokens > served:
        found.append(f"loader: {total_tokens} tokens trained on, {served} served")
    first, second = speeds(_run.served)
    if abs(second / first - 1) > 0.10:
        found.append(f"unsteady: {first:.0f} tokens/s, then {second:.0f}")
    return "; ".join(found) or "ok"


def speeds(served):
    """Tokens per second in the first and the second half of the batches, without the first tenth;
    (1, 1) where they are too few to tell."""
    served = served[len(served) // 10 :]
    if len(served) < 20:
        return 1, 1
    middle = len(served) // 2
    found = []
    for half in (served[: middle + 1], served[middle:]):
        begin, _ = half[0]
        end, _ = half[-1]
        found.append(sum(tokens for _, tokens in half[:-1]) / (end - begin))
    return found


def report(val_bpb, *, num_steps, total_tokens, flops_per_token, **stats):
    """Prints the final block, `---` and then `key: value` lines, writes it with the sha256 of the
    training script as a JSON record into RUNS, and returns that path. `stats` are further keys.
    Raises ValueError for a score or a key that is not the training script's to give."""
    device = device_name(_run.device)
    allocated, reserved = peak_memory_mb(_run.device)
    peak = peak_flops(device)
    rate = total_tokens / elapsed()
    own = {
        "val_bpb": val_bpb,
        "training_seconds": elapsed(),
        "total_seconds": _now() - _run.imported,
        "peak_vram_mb": allocated,
        "mfu_percent": 100 * flops_per_token * rate / peak if peak else "n/a",
        "total_tokens_M": total_tokens / 1e6,
        "num_steps": num_steps,
        "train_loss": _run.loss,
        "eval_seconds": _run.scored - _run.stopped,
        "startup_seconds": _run.served[0][0] - _run.imported,
        "tokens_per_second": rate,
        "peak_reserved_mb": reserved,
        "profile": PROFILE,
        "time_budget": TIME_BUDGET,
        "seed": SEED,
        "device": device,
        "torch": importlib.metadata.version("torch"),
        "commit": _run.commit,
        "data": hashlib.sha256(json.dumps(_run.files).encode()).hexdigest()[:8],
        "prepare": sha256(__file__)[:8],
        "integrity": flags(total_tokens),
    }
    if val_bpb != _run.val_bpb or own.keys() & stats.keys():
        raise ValueError(
            f"evaluate_bpb returned {_run.val_bpb}; the ruler itself reports {sorted(own)}"
        )
    block = own | stats
    order = [key for key in KEYS if key in block] + [key for key in block if key not in KEYS]
    block = {key: block[key] for key in order}
    if sys.stdout.isatty():
        print()  # below the live line
    print("---")
    for key, value in block.items():
        if isinstance(value, float):
            value = f"{value:.6f}" if key in ("val_bpb", "train_loss") else f"{value:.2f}"
        print(f"{key}: {value}", flush=True)
    return write_record(block)


def write_record(block):
    """Writes the block into RUNS, as a JSON file named by time, commit and seed."""
    moment = time.strftime("%Y%m%dT%H%M%S")
    path = RUNS / f"{moment}_{block['commit']}_{SEED}_{os.getpid()}.json"
    record = block | {"train": _run.train_sha256}
    for key, value in record.items():
        if value != value:
            record[key] = None  # JSON has no NaN
    try:
        with replacing(path) as file:
            file.write(json.dumps(record, indent=1).encode() + b"\n")
    except OSError as error:
        stop(f"{error}; free space: the score above has no record.")
    return path


# ==== Part 2: what makes the cache ====


# ---- Files: each appears whole or not at all, and the manifest says when all are there ----
@contextlib.contextmanager
def replacing(path):
    """Yields a file to write, under a name of this process's own. It takes the place of `path` on
    success only."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            yield file
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def fingerprints(paths):
    """{path below ROOT: [bytes, sha256]}"""
    return {os.path.relpath(path, ROOT): [path.stat().st_size, sha256(path)] for path in paths}


def save_manifest(settings, corpus=(), files=(), tokens=None):
    """Writes the manifest, as load_manifest describes it, of paths; returns it."""
    manifest = {
        "settings": settings,
        "corpus": fingerprints(corpus),
        "files": fingerprints(files),
        "tokens": tokens or {},
    }
    with replacing(ROOT / "manifest.json") as file:
        file.write(json.dumps(manifest, indent=1).encode() + b"\n")
    return manifest


# ---- Shards: parquet files with a column `text`, whatever the corpus; the last is validation ----
class ShardError(Exception):
    """A shard that cannot be had or read; the message is one sentence that names it."""


def is_text(kind):
    """Whether an Arrow type is one of strings."""
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or str(kind) == "string_view"


def read_shard(path):
    """Yields the non-empty documents of a shard, 512 rows at a time. Raises ShardError."""
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as shard:
            schema = shard.schema_arrow
            if "text" not in schema.names or not is_text(schema.field("text").type):
                raise ShardError(f"{path} has no column `text` of strings; rename or convert one.")
            for batch in shard.iter_batches(batch_size=512, columns=["text"]):
                for text in batch["text"].to_pylist():
                    if text:
                        yield text
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        reason = str(error)[-80:]
        raise ShardError(f"{path} is not a whole parquet file; replace it ({reason}).") from None


def check_shards(shards):
    """Reads the beginning of each. Raises ShardError."""
    for shard in shards:
        next(read_shard(shard), None)


# ---- ClimbMix ----
CLIMBMIX = "karpathy/climbmix-400b-shuffle"
CLIMBMIX_VAL = 6542  # the last shard is pinned for validation: nothing trains on it
ATTEMPTS = 5  # tries of a download
BACKOFF = 1.0  # seconds before the second try, doubled before each further one
HOPELESS = (400, 401, 403, 404, 410)  # status codes that another try does not change


def download(url, path, bar):
    """Fetches one shard, unless it is there, going on from what `path`.part holds. A body counts if
    it is as long as announced and opens as a shard: a login page or a cut body never does. Raises
    ShardError with the reason."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        with contextlib.suppress(ShardError):
            return check_shards([path])
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        raise ShardError(f"{path.name} (HF_HUB_OFFLINE is set)")
    part = path.with_name(f"{path.name}.part")
    reason = ""
    for attempt in range(ATTEMPTS):
        if attempt:
            time.sleep(BACKOFF * 2 ** (attempt - 1))
        try:
            fetch(url, part, bar)
            check_shards([part])
            os.replace(part, path)
            return None
        except requests.RequestException as error:
            reason = str(error).rpartition("Caused by ")[2][:160]
            if error.response is not None and error.response.status_code in HOPELESS:
                break
        except ShardError as error:
            reason = str(error).partition(";")[0]
            part.unlink()
    part.unlink(missing_ok=True)
    raise ShardError(f"{path.name} ({reason})")


def fetch(url, part, bar):
    """Appends to the file what it lacks of the body. Raises requests.RequestException, also where
    the body ends early."""
    begin = part.stat().st_size if part.exists() else 0
    headers = {"Accept-Encoding": "identity", "Range": f"bytes={begin}-"}
    with requests.get(url, stream=True, timeout=60, headers=headers) as reply:
        if reply.status_code == 416:  # no byte lies beyond those that are here
            return
        reply.raise_for_status()
        bar.total += int(reply.headers.get("Content-Length", 0))
        with open(part, "ab" if reply.status_code == 206 else "wb") as file:
            for chunk in reply.iter_content(1 << 20):
                bar.update(file.write(chunk))


def climbmix(num_shards, workers):
    """The shards of ClimbMix; downloads those missing. Ends the process where one cannot be had."""
    wanted = [ROOT / "data" / f"shard_{i:05d}.parquet" for i in range(num_shards)]
    wanted.append(ROOT / "val" / f"shard_{CLIMBMIX_VAL:05d}.parquet")
    host = (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")
    bar = tqdm(total=0, unit="B", unit_scale=True, desc="download", disable=None)

    def why_missing(path):
        try:
            download(f"{host}/datasets/{CLIMBMIX}/resolve/main/{path.name}", path, bar)
        except ShardError as error:
            return str(error)
        return None

    with bar, multiprocessing.pool.ThreadPool(max(1, workers)) as pool:
        reasons = pool.map(why_missing, wanted, chunksize=1)
    failed = [reason for reason in reasons if reason]
    if failed:
        stop(
            f"{len(failed)} of {len(wanted)} shards failed, first {failed[0]}; run the same "
            "command when the network is back, or use --corpus python."
        )
    return wanted


# ---- The embedded corpus ----
# Python sources that every installation holds: the standard library's and these packages'.
PACKAGES = """
    filelock kernels matplotlib numpy pandas pyarrow requests tiktoken torch tqdm
""".split()
NOT_TEXT = {"site-packages", "dist-packages", "test", "tests"}  # folders that are passed over
PYTHON_PIECE = 2048  # characters per document at most
PYTHON_HELD_OUT = 0.05  # of the files
PYTHON_SHARDS = [*(f"data/python_{i}.parquet" for i in range(8)), "val/python.parquet"]


def python_sources():
    """{text: name} of the source files, in a fixed order; of equal texts the first."""
    library = Path(os.__file__).parent
    files = [(file.relative_to(library), file) for file in sorted(library.rglob("*.py"))]
    for package in PACKAGES:
        for file in importlib.metadata.files(package):
            files.append((file, Path(file.locate())))
    sources = {}
    for name, file in files:
        if name.suffix == ".py" and not NOT_TEXT.intersection(name.parts):
            with contextlib.suppress(OSError, UnicodeDecodeError):
                sources.setdefault(file.read_bytes().decode(), name.as_posix())
    return sources


def is_held_out(name):
    """Whether a source file is for validation, by the hash of its relative path."""
    return int(hashlib.sha256(name.encode()).hexdigest()[:8], 16) < PYTHON_HELD_OUT * 2**32


def cut_at_lines(text):
    """Pieces of at most PYTHON_PIECE characters and a line end."""
    return re.findall(rf"(?s).{{1,{PYTHON_PIECE}}}\n|.{{1,{PYTHON_PIECE}}}", text)


def python_corpus():
    """The shards of the embedded corpus, those missing written. Files are cut into pieces, since of
    whole files packing would use 2.5 of 38 million tokens, and pieces shuffled by a hash."""
    train = []
    val = []
    for text, name in python_sources().items():
        side = val if is_held_out(name) else train
        for i, piece in enumerate(cut_at_lines(text)):
            key = hashlib.sha256(f"{name}:{i}".encode()).digest()
            side.append((key, piece))
    train = [piece for _, piece in sorted(train)]
    val = [piece for _, piece in sorted(val)]
    count = len(PYTHON_SHARDS) - 1
    contents = [*(train[i::count] for i in range(count)), val]
    for name, pieces in zip(PYTHON_SHARDS, contents, strict=True):
        if not (ROOT / name).exists():
            table = pa.table({"text": pa.array(pieces, pa.string())})
            with replacing(ROOT / name) as file:
                pq.write_table(table, file, compression="zstd")
    return [ROOT / name for name in PYTHON_SHARDS]


# ---- Choice of the corpus ----
@dataclass
class Corpus:
    """What a corpus is and how to come by it."""

    settings: dict  # where they differ from the manifest's, all is made anew
    make_shards: Callable  # returns paths, the last is validation
    is_made: bool = False  # by ourselves, from nothing that could be unreadable


def choose_corpus(args):
    if args.data_dir:
        return own_corpus(Path(args.data_dir))
    if (args.corpus or by_profile(full="climbmix", small="python")) == "climbmix":
        count = args.num_shards
        if not 0 <= count <= CLIMBMIX_VAL:
            count = CLIMBMIX_VAL
        return Corpus({"climbmix": count}, lambda: climbmix(count, args.download_workers))
    versions = {name: importlib.metadata.version(name) for name in PACKAGES}
    return Corpus({"python": sys.version} | versions, python_corpus, is_made=True)


def own_corpus(folder):
    if not folder.is_dir():
        stop(f"{folder} is no folder; give one with two or more *.parquet files.")
    files = sorted(folder.glob("*.parquet"))
    if len(files) < 2:
        stop(f"{folder} holds {len(files)} *.parquet files; give a folder of two or more.")
    described = [[f.name, f.stat().st_size, f.stat().st_mtime_ns] for f in files]
    return Corpus({"files": described}, lambda: files)


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


def train_tokenizer(shards, path):
    """Trains on the shards and writes tokenizer.tiktoken, unless it is there."""
    if path.exists():
        return
    if not any(tokenizer_texts(shards)):
        stop("the training shards hold no text; fill their column `text`, or raise --num-shards.")
    print(f"training a tokenizer of {VOCAB_SIZE} tokens", flush=True)
    trainer = rustbpe.Tokenizer()
    size = VOCAB_SIZE - len(SPECIAL_TOKENS)
    trainer.train_from_iterator(tokenizer_texts(shards), size, pattern=SPLIT)
    with replacing(path) as file:
        for token, rank in trainer.get_mergeable_ranks():
            file.write(base64.b64encode(bytes(token)) + b" %d\n" % rank)


# ---- Token cache: a document is tokenised once, here, not in each of a night's hundred runs ----
@dataclass(frozen=True)
class TokenJob:
    """One shard to tokenise, for a process of its own."""

    tokenizer: Path  # folder
    shard: Path
    flat: Path  # the token file


def write_tokens(job):
    """Writes a shard's documents as flat little-endian uint16 tokens, BOS before each, and in .npy
    their offsets, int64 [documents + 1], unless both are there."""
    offsets = job.flat.with_suffix(".npy")
    if job.flat.exists() and offsets.exists():
        return
    tokenizer = Tokenizer.from_directory(job.tokenizer)
    bos = tokenizer.get_bos_token_id()
    ends = [0]
    with replacing(job.flat) as file:
        for text in read_shard(job.shard):
            ids = tokenizer.encode(text, prepend=bos)
            file.write(np.array(ids, dtype="<u2").tobytes())
            ends.append(ends[-1] + len(ids))
    with replacing(offsets) as file:
        np.save(file, np.array(ends, dtype=np.int64))


def ignore_interrupts():
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its workers


def write_all_tokens(shards, tokenizer):
    """Tokenises the shards in as many processes as there are cores. Returns {shard: token file}."""
    flats = {shard: ROOT / "tokens" / f"{shard.stem}.bin" for shard in shards[:-1]}
    flats[shards[-1]] = ROOT / "val" / "tokens.bin"
    jobs = [TokenJob(tokenizer, shard, flat) for shard, flat in flats.items()]
    processes = min(os.cpu_count() or 1, len(jobs))
    with multiprocessing.get_context("spawn").Pool(processes, ignore_interrupts) as pool:
        done = pool.imap(write_tokens, jobs)
        for _ in tqdm(done, "tokenise", len(jobs), unit="shard", disable=None):
            pass
    return flats


def write_rows(flat):
    """Writes val/rows.bin, the packed validation rows, uint16 [rows, MAX_SEQ_LEN + 1]; returns its
    path."""
    wanted = EVAL_TOKENS // MAX_SEQ_LEN
    rows = list(itertools.islice(pack_rows(read_tokens(flat), MAX_SEQ_LEN + 1), wanted))
    count = len(rows) // EVAL_BATCH * EVAL_BATCH
    if count == 0:
        stop(
            f"validation, the last file, fills {len(rows)} rows of tokens; make it longer: "
            f"{EVAL_BATCH} is the least."
        )
    if count < wanted:
        print(f"validation fills {len(rows)} rows: {count} are scored, not {wanted}", flush=True)
    path = flat.with_name("rows.bin")
    with replacing(path) as file:
        for row in rows[:count]:
            file.write(row.astype("<u2").tobytes())
    return path


# ---- Commands ----
def derived_files():
    """All that is made from a corpus or is the embedded one, whatever the manifest says."""
    patterns = ("tokenizer/*", "tokens/*", "val/*.bin", "val/*.npy", "*/python*.parquet")
    return [path for pattern in patterns for path in ROOT.glob(pattern)]


def find_stale(manifest, settings):
    """What must go before the cache can be completed: what is damaged, left over from a killed
    process or, where the settings differ, all that was derived."""
    recorded = manifest["files"]
    if "files" not in manifest["settings"]:  # a user's own folder is not ours to delete
        recorded = manifest["corpus"] | recorded
    stale = find_damaged(recorded, decides_score)
    stale += ROOT.rglob(".*.tmp")
    if settings != manifest["settings"]:
        stale += derived_files()
    return stale


def prepare(args):
    """Makes what is missing; whatever the settings no longer fit goes first."""
    manifest = load_manifest()
    corpus = choose_corpus(args)
    settings = corpus.settings | {
        "prepare": sha256(__file__),
        "vocab_size": VOCAB_SIZE,
        "split_pattern": SPLIT,
        "choice": {key: vars(args)[key] for key in ("corpus", "data_dir", "num_shards")},
    }
    stale = find_stale(manifest, settings)
    if stale or not manifest["files"]:
        if not corpus.is_made:
            check_shards(corpus.make_shards())  # fails before anything goes
        for path in stale:
            path.unlink(missing_ok=True)
        manifest = build(corpus, settings)
    shards = len(manifest["corpus"])
    rows = count_rows(manifest["files"])
    print(
        f"ready: {PROFILE} profile, {shards} shards, {rows} validation rows; next: uv run train.py"
    )


def build(corpus, settings):
    """Goes through all stages, each of which keeps what is there; returns the manifest."""
    save_manifest(settings)  # no files: unfinished
    shards = corpus.make_shards()
    tokenizer = ROOT / "tokenizer" / "tokenizer.tiktoken"
    train_tokenizer(shards[:-1], tokenizer)
    flats = write_all_tokens(shards, tokenizer.parent)
    rows = write_rows(flats[shards[-1]])
    offsets = [flat.with_suffix(".npy") for flat in flats.values()]
    tokens = {os.path.relpath(k, ROOT): os.path.relpath(v, ROOT) for k, v in flats.items()}
    return save_manifest(settings, shards, [tokenizer, *flats.values(), *offsets, rows], tokens)


VERIFIED_DOCS = 100  # documents per shard whose tokens are derived again
LARGE_FILE = 10**6  # bytes; one beside prepare.py could carry state from run to run


def is_text_of(flat, shard, tokenizer):
    """Whether the first documents of a token file are those of the shard."""
    pairs = zip(read_shard(shard), read_tokens(flat))
    for text, ids in itertools.islice(pairs, VERIFIED_DOCS):
        if tokenizer.token_bytes[ids].sum() != len(text.encode()):
            return False
        if tokenizer.decode(ids[1:]) != text:
            return False
    return True


def verify():
    """Prints what speaks against a score and exits with 3, else with 0: all files are hashed, some
    tokens derived again, prepare.py is compared with git."""
    manifest = check_cache()
    tokenizer = Tokenizer.from_directory()
    here = Path(__file__).parent
    recorded = manifest["corpus"] | manifest["files"]
    found = []
    for path in find_damaged(recorded):
        found.append(f"{path} is not as recorded; restore or delete it, then prepare again")
    if not found:
        for shard, flat in manifest["tokens"].items():
            if not is_text_of(ROOT / flat, ROOT / shard, tokenizer):
                found.append(f"{ROOT / flat} is not the text of {shard}; delete it, prepare again")
    unchanged = compare_with_git(here)
    if unchanged is False:
        found.append("prepare.py differs from the commit; `git restore prepare.py`")
    for path in here.rglob("*"):
        folders = path.relative_to(here).parts
        if ".git" in folders or ".venv" in folders or not path.is_file():
            continue
        if path.stat().st_size > LARGE_FILE:
            found.append(f"{path} could carry state, over 1 MB; move it")
    if not found:
        print(f"verified: {len(recorded)} files" + (", prepare.py" if unchanged else ""))
    for line in found:
        print(line)
    raise SystemExit(3 if found else 0)


def compare_with_git(folder):
    """Whether prepare.py is that of the commit; None where no git tells."""
    command = ["git", "status", "--porcelain", "prepare.py"]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    except OSError:
        return None
    return None if done.returncode else not done.stdout


def parse_arguments():
    parser = argparse.ArgumentParser(
        description="Prepares corpus, tokenizer and validation rows for train.py."
    )
    parser.add_argument(
        "--num-shards",
        type=int,
        default=20,
        help="training shards of ClimbMix, -1 for all (20)",
    )
    parser.add_argument("--download-workers", type=int, default=8, help="downloads at a time (8)")
    parser.add_argument(
        "--corpus",
        choices=("climbmix", "python"),
        help="default: climbmix in the full profile, python in small",
    )
    parser.add_argument(
        "--data-dir",
        type=os.path.abspath,
        metavar="DIR",
        help="parquet files of your own, the last is validation",
    )
    parser.add_argument(
        "--verify", action="store_true", help="check what a score rests on, change nothing"
    )
    choice = {}
    if len(sys.argv) == 1:  # no choice: that of the cache
        choice = load_manifest()["settings"].get("choice", {})
    return parser.parse_args(namespace=argparse.Namespace(**choice))


def main():
    args = parse_arguments()
    try:
        if args.verify:
            verify()
        ROOT.mkdir(parents=True, exist_ok=True)
        writable = os.access(ROOT, os.W_OK)
        lock = filelock.FileLock(ROOT / ".lock") if writable else contextlib.nullcontext()
        with lock:  # one preparer at a time
            prepare(args)
    except ShardError as error:
        stop(str(error))
    except OSError as error:
        stop(f"{error}; free space, or set AUTORESEARCH_CACHE to a writable folder.")
    except KeyboardInterrupt:
        stop("interrupted; what is finished stays, run the same command to go on.", 130)


if __name__ == "__main__":
    main()
