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
import bisect
import contextlib
import hashlib
import importlib.metadata
import itertools
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from operator import itemgetter
from pathlib import Path
from time import monotonic as _now  # bound here, so that patching `time` has no effect
from typing import NamedTuple

_imported = _now()  # total_seconds counts from here
# Read when CUDA starts. Without it, fragmentation can end a run late.
if not os.path.exists("/usr/lib/wsl"):  # whose drivers may fail with it (pytorch's issue 192330)
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
    """Prints a sentence, what is wrong and how to fix it, and exits."""
    print(f"error: {sentence}", file=sys.stderr, flush=True)
    raise SystemExit(code)


try:
    import fcntl
    import resource
except ImportError:
    fail("Windows lacks what this needs; use WSL.")


# ==== Part 1: what a run uses ====


# ---- Profile ----
def usual_profile():
    if not torch.cuda.is_available():
        return "small"
    memory = torch.cuda.get_device_properties("cuda").total_memory
    return "full" if memory >= 40e9 else "medium"


PROFILE = os.environ.get("AUTORESEARCH_PROFILE") or usual_profile()
if PROFILE not in ("full", "medium", "small"):
    fail(f"AUTORESEARCH_PROFILE is full, medium or small, not {PROFILE!r}; change or unset it.")


def by_profile(**values):
    return values[PROFILE]


# ---- Settings: two scores compare only if all of these agree, except the seed ----
try:
    TIME_BUDGET = float(os.environ.get("AUTORESEARCH_TIME_BUDGET") or 300)  # seconds
    SEED = int(os.environ.get("SEED") or 42)
    if not 0 < TIME_BUDGET < math.inf or not 0 <= SEED < 2**63:
        raise ValueError(f"{TIME_BUDGET:g} or {SEED} is out of range")
except ValueError as error:
    fail(f"AUTORESEARCH_TIME_BUDGET or SEED: {error}; change or unset it.")
MAX_SEQ_LEN = by_profile(full=2048, medium=2048, small=512)  # context length
EVAL_TOKENS = by_profile(full=40 * 2**19, medium=2**21, small=2**18)  # validation tokens to score
EVAL_BATCH = 16  # rows per evaluation batch, whatever the batch in training
VOCAB_SIZE = by_profile(full=8192, medium=8192, small=2048)  # includes the four special tokens

# ---- Tokens and rows ----
BUFFER_DOCS = 1000  # documents that packing chooses among
SPECIAL_TOKENS = [f"<|reserved_{i}|>" for i in range(4)]  # the first is BOS
# GPT-4's pattern, but it splits digits into pairs: a small vocabulary has no room for triples.
SPLIT_PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}]++[\r\n]*"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)
ENCODED_CHARS = 200_000  # encoded at a time: a million spaces overflow the regex engine's stack


# ---- Device ----
DRIVER_FILES = ("/dev/nvidiactl", "/usr/lib/wsl/lib/libcuda.so.1")  # NVIDIA's, on Linux and on WSL


def find_device():
    """Returns the device and its model's name. Exits if there is a GPU that torch cannot use, since
    nobody expects a night on the CPU then."""
    # What does not begin like a GPU's number or name hides it: -1, Slurm's NoDevFiles.
    shown = re.match(r"\d|GPU-|MIG-", os.environ.get("CUDA_VISIBLE_DEVICES", "0"))
    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_properties("cuda")
        if (gpu.major, gpu.minor) >= (7, 5):  # Turing, the oldest that this torch supports
            return torch.device("cuda"), gpu.name
    elif not shown or not any(map(os.path.exists, DRIVER_FILES)):
        device = torch.device("mps" if torch.backends.mps.is_available() else "cpu")
        info = Path("/proc/cpuinfo")
        model = info.exists() and re.search("model name.*: (.+)", info.read_text())
        return device, model[1] if model else device.type  # ARM's kernel tells no model
    return fail(
        "torch cannot use the GPU here, which needs Turing or newer and driver 580 or newer (on "
        "WSL that of Windows); see 'Older drivers and GPUs' in docs/manual.md, or set "
        "CUDA_VISIBLE_DEVICES to another GPU, or to -1 for none."
    )


DEVICE, DEVICE_NAME = find_device()


# ---- Cache ----
def folder_from(variable, default):
    return Path(os.environ.get(variable) or default).expanduser().resolve()


CACHE = folder_from("AUTORESEARCH_CACHE", "~/.cache/autoresearch")
RUNS = folder_from("AUTORESEARCH_RUNS", CACHE / "runs")  # one record per run
SHARDS = CACHE / "data"  # ClimbMix, as downloaded
PREPARED = (CACHE / PROFILE).resolve()  # what is made from one corpus
ROWS_FILE = "val.u16"
TOKENS_FILE = "train.u16"
ENDS_FILE = "train.npy"
MANIFEST_FILE = "manifest.json"


def file_hash(path):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# Any edit of this file makes what was prepared unusable.
RECIPE = [file_hash(__file__), *map(importlib.metadata.version, ("rustbpe", "tiktoken"))]


def load_manifest():
    return json.loads((PREPARED / MANIFEST_FILE).read_text())


def data_hash(rows, manifest):
    """Returns 8 hex digits over rows, vocabulary and the hashes in the manifest, since training
    files are too large to hash in each run."""
    parts = [hashlib.sha256(rows).hexdigest(), manifest["vocabulary"], manifest["training"]]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:8]


def lock(folder):
    """Locks a folder until this process exits; its handle stays open. False if another has it."""
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
    """Byte-level BPE over `vocabulary`, a list of bytes in hex; the special tokens follow.
    `token_bytes`, int32 [V], counts raw bytes, 0 for special tokens. Decoded text would miscount:
    a part of a character decodes to U+FFFD, three bytes."""

    def __init__(self, vocabulary):
        ranks = {bytes.fromhex(token): i for i, token in enumerate(vocabulary)}
        special = {name: len(ranks) + i for i, name in enumerate(SPECIAL_TOKENS)}
        self.bos = special[SPECIAL_TOKENS[0]]
        self.encoding = tiktoken.Encoding(
            "autoresearch", pat_str=SPLIT_PATTERN, mergeable_ranks=ranks, special_tokens=special
        )
        lengths = [*map(len, ranks), *(0 for _ in special)]
        self.token_bytes = np.array(lengths, dtype=np.int32)

    @classmethod
    def from_directory(cls, directory=None):
        """Returns the tokenizer of the prepared text. `directory` is ignored."""
        return cls(load_manifest()["vocabulary"])

    def get_vocab_size(self):
        return self.encoding.n_vocab

    def get_bos_token_id(self):
        return self.bos

    def encode_document(self, text):
        """Returns BOS and the ids of a text, uint16."""
        ids = [[self.bos]]
        for begin in range(0, len(text), ENCODED_CHARS):
            piece = text[begin : begin + ENCODED_CHARS]
            ids.append(self.encoding.encode_to_numpy(piece, disallowed_special=()))
        return np.concatenate(ids).astype("<u2")

    def encode(self, text):
        return self.encode_document(text)[1:].tolist()

    def decode(self, ids):
        return self.encoding.decode(ids)


# ---- Start of a run ----
class Data(NamedTuple):
    """What is prepared."""

    rows: np.ndarray  # packed for validation, uint16 [rows, MAX_SEQ_LEN + 1]
    tokens: np.ndarray  # of all training documents, flat, with BOS before each, uint16
    ends: np.ndarray  # document i is tokens[ends[i] : ends[i + 1]], int64 [documents + 1]
    manifest: dict  # all that is small, see `build`


_opened = set()  # prepared files that other code than `load` has opened


def watch(event, arguments):
    """Audit hook: notes prepared files that are opened; a run could train on validation rows."""
    if event != "open":
        return
    folder, name = os.path.split(str(arguments[0]))
    if name in (ROWS_FILE, TOKENS_FILE, ENDS_FILE) and os.path.realpath(folder) == str(PREPARED):
        _opened.add(name)


sys.addaudithook(watch)


def load():
    """Returns Data; None if it is missing, was made by another prepare.py, or has changed, by its
    hash and the number of tokens."""
    opened_before = _opened.copy()
    try:
        rows = np.fromfile(PREPARED / ROWS_FILE, dtype="<u2").reshape(-1, MAX_SEQ_LEN + 1)
        tokens = np.memmap(PREPARED / TOKENS_FILE, dtype="<u2", mode="r").view(np.ndarray)
        ends = np.load(PREPARED / ENDS_FILE, mmap_mode="r")
        # The manifest last: if the folder was replaced meanwhile, it will not fit the rows.
        manifest = load_manifest()
    except (OSError, ValueError, EOFError):
        return None
    finally:
        _opened.intersection_update(opened_before)
    fits = manifest.get("recipe") == RECIPE and ends[-1] == len(tokens)
    fits = fits and manifest["data"] == data_hash(rows, manifest)
    return Data(rows, tokens, ends, manifest) if fits else None


@cache
def current_commit():
    """Returns the short hash, `+dirty` if tracked files differ; without git AUTORESEARCH_COMMIT."""
    command = ["git", "describe", "--always", "--dirty=+dirty", "--exclude=*"]
    commit = ""
    with contextlib.suppress(OSError):  # no git
        shown = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True)
        commit = shown.stdout.decode().strip()
    return commit or os.environ.get("AUTORESEARCH_COMMIT") or "none"


def lock_run(folder):
    """Locks a folder for one run, or exits."""
    if not lock(folder):
        fail("this folder has a run already; wait for it or stop it (pgrep -af train.py).")


@cache
def begin_run():
    """Begins the run and returns its Data, later calls the same. Exits if none is usable."""
    data = load()
    if data is None:
        fail(
            f"{PREPARED} is not prepared, is damaged, or was made by another prepare.py; undo any "
            f"edit of that file, then run `AUTORESEARCH_PROFILE={PROFILE} uv run prepare.py`."
        )
    script = getattr(sys.modules["__main__"], "__file__", "")
    if os.path.isfile(script):  # a notebook has none
        lock_run(os.path.dirname(os.path.abspath(script)))
    settings = f"{PROFILE} profile, {TIME_BUDGET:g} s, seed {SEED}, commit {current_commit()}"
    print(f"run: {settings}, {DEVICE_NAME}", flush=True)
    return data


def start():
    """Begins the run and returns the device."""
    begin_run()
    return DEVICE


# ---- Loader and clock ----
class Run:
    """The clock and the progress of this process's run."""

    def __init__(self):
        self.began = None  # when the first batch was served
        self.served = 0  # tokens
        self.losses = [[] for _ in range(10)]  # of every step, by tenths of the budget
        self.recent_losses = []  # since the last line of progress
        self.printed_at = -math.inf  # when that line was printed
        self.ended = None  # when evaluate_bpb was called
        self.scored = None  # when it had the score


_run = Run()


def elapsed():
    """Returns the seconds of training, which are all from the first batch to evaluation."""
    if _run.began is None:
        return 0.0
    return (_run.ended or _now()) - _run.began


def tokens_per_second():
    return _run.served / (elapsed() or math.inf)


def pack_rows(documents, row_len, buffer_docs=BUFFER_DOCS):
    """Best-fit packing: yields full rows, uint16 [row_len].

    1. Let `buffer_docs` documents wait.
    2. Place the longest that fits into the rest of the row; ties go to the oldest.
    3. If none fits, crop the shortest to fill the row, and drop its tail.

    Each row begins with a document, and none is padded. docs/manual.md tells what is dropped."""
    source = enumerate(documents)
    # (length, number, document), sorted. The number breaks ties, so that arrays are never compared.
    waiting = []
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
    token ahead. The rows do not depend on B. The first batch starts the clock. `tokenizer` only
    keeps the original's signature. Raises ValueError for another split."""
    if split != "train":
        raise ValueError('split must be "train": only evaluate_bpb reads "val"')
    data = begin_run()
    epoch = 0

    def read_documents():
        nonlocal epoch
        count = len(data.ends) - 1
        firsts = data.manifest["first_documents"]
        first = firsts[SEED % len(firsts)]  # begins at the shard that the seed picks
        while True:
            epoch += 1
            for k in range(count):
                i = (first + k) % count
                yield data.tokens[data.ends[i] : data.ends[i + 1]]

    def serve_batches():
        rows = pack_rows(read_documents(), T + 1, buffer_size)
        on_gpu = DEVICE.type == "cuda"
        while True:
            # numpy fills the pinned memory, since torch's copy takes threads, which may cost 5 ms.
            # torch keeps that memory until the GPU has read it.
            batch = torch.empty(B, T + 1, dtype=torch.int64, pin_memory=on_gpu)
            np.stack(list(itertools.islice(rows, B)), out=batch.numpy())
            batch = batch.to(DEVICE, non_blocking=on_gpu)
            # If B is 1, contiguous() returns two views of one memory, and plain clone() strides for
            # which a model would be compiled again.
            inputs = batch[:, :-1].clone(memory_format=torch.contiguous_format)
            targets = batch[:, 1:].clone(memory_format=torch.contiguous_format)
            if _run.began is None:
                _run.began = _now()
            _run.served += B * T
            yield inputs, targets, epoch

    return serve_batches()


# ---- Progress ----
PROGRESS_SECONDS = 5  # between two lines
MAX_LOSS = 100  # nats; a higher loss, or NaN, ends the run


def log_step(step, loss, **shown):
    """Records a step's mean loss in nats per token; call it for every step. Every five seconds it
    prints the mean loss since the last line, the speed, and `shown`. Exits with 4 if training has
    diverged."""
    loss = float(loss)
    if not loss <= MAX_LOSS:  # also true for NaN
        print(f"FAIL: training diverged, loss {loss:g} nats per token at step {step}", flush=True)
        raise SystemExit(4)
    progress = min(elapsed() / TIME_BUDGET, 1)
    tenth = min(int(10 * progress), 9)
    _run.losses[tenth].append(loss)
    _run.recent_losses.append(loss)
    if _now() - _run.printed_at > PROGRESS_SECONDS:
        _run.printed_at = _now()
        mean = np.mean(_run.recent_losses)
        _run.recent_losses.clear()
        line = f"step {step:5d} {progress:4.0%} loss {mean:.4f}"
        shown = {"tokens_per_second": round(tokens_per_second())} | shown
        print(line, *(f"{name} {value}" for name, value in shown.items()), flush=True)


# ---- Metric ----
class IntegrityError(Exception):
    """The score cannot be trusted; the message says why."""


def is_dense(x):
    """Returns whether x is a tensor, and neither sparse, nested nor meta."""
    is_strided = isinstance(x, torch.Tensor) and x.layout == torch.strided
    return is_strided and not x.is_nested and not x.is_meta


def token_losses(model, inputs, targets, token_bytes):
    """Returns the cross-entropy in nats, float32, of model(inputs) with `targets`, uint16 [B, T]; n
    alternative targets are [B, T, n]. It is 0 where a target has no bytes. Raises IntegrityError.
    """
    logits = model(torch.from_numpy(inputs.astype(np.int64)).to(DEVICE))
    shape = tuple(logits.shape) if is_dense(logits) else ()
    if shape[:-1] != inputs.shape or shape[-1] < len(token_bytes):
        wanted = (*inputs.shape, len(token_bytes))
        kind = type(logits).__name__
        raise IntegrityError(f"shape: model(x) returned {kind} {shape}, not dense logits {wanted}")
    logits = logits.as_subclass(torch.Tensor)  # a subclass could answer gather itself
    on_device = torch.from_numpy(targets.astype(np.int64)).to(DEVICE).view(*inputs.shape, -1)
    losses = []
    # Row by row, since fp32 logits of a whole batch would be the largest tensor. log_softmax and
    # not logsumexp - gather: adding 2**28 to every logit would cancel all digits there and score 0.
    for row, target in zip(logits, on_device):
        losses.append(-row.float().log_softmax(-1).gather(-1, target))
    losses = torch.stack(losses).cpu().numpy().reshape(targets.shape)
    return np.where(token_bytes[targets] > 0, losses, 0)


def check_foresight(model, rows, token_bytes, rng):
    """Refuses a model whose forward() notes what comes next in a row and looks it up for that row.
    `probe` misses one that keeps the first answer to a context. So here some tokens are random, in
    each row a share of 1/16 to 1. A model that has not seen a random token cannot prefer it to
    another one: what it gains is 0 but for chance."""
    chosen = rows[rng.choice(len(rows), 2 * EVAL_BATCH)]
    is_random = rng.random(chosen.shape) < 16.0 ** -rng.random((len(chosen), 1))
    is_random[:, 0] = False  # rows begin with BOS
    drawn, other = rng.choice(np.flatnonzero(token_bytes), (2, *chosen.shape))
    tokens = np.where(is_random, drawn, chosen)
    both = np.stack((tokens, other), -1)
    losses = []
    for batch in np.split(np.arange(len(chosen)), 2):
        losses.append(token_losses(model, tokens[batch, :-1], both[batch, 1:], token_bytes))
    losses = np.fmin(np.concatenate(losses), MAX_LOSS)  # for NaN, too
    gains = (losses[..., 1] - losses[..., 0])[is_random[:, 1:]]
    if gains.mean() > 6 * gains.std() / math.sqrt(len(gains)):  # six standard errors
        raise IntegrityError(
            f"foresight: random tokens cost {gains.mean():.2g} nats less than others would; does "
            "forward() remember tokens, or see later ones?"
        )


PROBE_ROWS = by_profile(full=288, medium=144, small=224)  # to score again; multiples of EVAL_BATCH
# How far losses (nats) may move in a probe, on average and at one position. Of correct models, a
# convolution by FFT in bf16 moved most: 2e-4 and 0.035.
PROBE_MEAN = 1e-3
PROBE_PEAK = 0.1


def draw_cuts(tokens, rng):
    """Returns how many inputs `probe` keeps of each row of `tokens`, uint16 [N, T + 1]: all T of
    each eighth. A model that sees one token ahead betrays itself only at the last input kept, so
    cuts fall where such slips happen: one near either end, a third at multiples of 8 (ends of
    chunks), a third after a token (the most common first), and a third anywhere."""
    N, T = tokens.shape[0], tokens.shape[1] - 1
    cuts = rng.integers(1, T, N)
    cuts[::8] = T
    numbers = np.flatnonzero(np.arange(N) % 8)
    cuts[numbers[:2]] = (2, T - 1)
    by_chunk = numbers[2::3]
    cuts[by_chunk] = np.maximum(cuts[by_chunk] // 8 * 8, 1)
    by_token = numbers[3::3]
    common = np.argsort(-np.bincount(tokens.ravel()))
    for i, token in zip(by_token, itertools.cycle(common)):
        places = np.flatnonzero(tokens[i, : T - 1] == token)
        if len(places):
            cuts[i] = rng.choice(places) + 1
    return cuts


def probe(model, rows, losses, token_bytes, rng):
    """Scores PROBE_ROWS rows again, some repeatedly if there are fewer. From a cut on, all inputs
    are another row's. `losses` [N, T] before the cut must not change (`causality`; `edges` are the
    first and the last), nor those of uncut rows (`isolation`). Returns {probe: absolute changes,
    nats}."""
    rounds = math.ceil(PROBE_ROWS / len(rows))
    chosen = np.concatenate([rng.permutation(len(rows)) for _ in range(rounds)])[:PROBE_ROWS]
    inputs = rows[chosen, :-1]
    targets = rows[chosen, 1:]
    T = inputs.shape[1]
    cuts = draw_cuts(rows[chosen], rng)[:, None]
    position = np.arange(T)
    kept = position < cuts
    altered = np.where(kept, inputs, np.roll(inputs, 1, axis=0))
    again = []
    for first in range(0, PROBE_ROWS, EVAL_BATCH):
        batch = slice(first, first + EVAL_BATCH)
        again.append(token_losses(model, altered[batch], targets[batch], token_bytes))
    moved = np.abs(np.concatenate(again) - losses[chosen])
    before_cut = kept & (cuts < T)
    at_edge = (position == 0) | (position == cuts - 1)
    return {
        "isolation": moved[cuts[:, 0] == T],
        "causality": moved[before_cut],
        "edges": moved[before_cut & at_edge],
    }


LIKELY_MISTAKE = {
    "isolation": "does a row depend on its batch, on randomness, a cache or an update?",
    "causality": "does a mask, a mean, a filter or a block see later tokens?",
    "edges": "does something wrap around, or the end of a chunk or row see the next token?",
}


def state_hashes(model):
    """Returns {name: hash} of the parameters and buffers, of their bytes, since NaN is not equal to
    NaN. Raises IntegrityError."""
    hashes = {}
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        if not is_dense(tensor):
            raise IntegrityError(f"state: {name} must be a dense tensor")
        content = tensor.detach().cpu().resolve_conj().contiguous().flatten()
        hashes[name] = hashlib.sha256(content.view(torch.uint8).numpy()).hexdigest()
    if not hashes:
        raise IntegrityError("model: it has no parameters; keep parts in a torch.nn.ModuleList")
    return hashes


@torch.no_grad()
def score(model, rows, token_bytes, rng=None):
    """Scores a model, int64 [B, T] to logits [B, T, V], on rows, uint16 [N, T + 1]; EVAL_BATCH
    divides N. Returns bits per byte, which are all targets' cross-entropy in bits over their raw
    bytes, and what `probe` returns. The order of the rows and the probes are drawn anew each time,
    so that no model can foresee them. Raises IntegrityError."""
    before = state_hashes(model)
    rng = np.random.default_rng(rng)
    losses = np.empty((len(rows), rows.shape[1] - 1), dtype=np.float32)
    batches = np.split(rng.permutation(len(rows)), len(rows) // EVAL_BATCH)
    check_foresight(model, rows, token_bytes, rng)  # while a memory is empty
    for batch in batches:
        losses[batch] = token_losses(model, rows[batch, :-1], rows[batch, 1:], token_bytes)
    if not losses.mean() <= MAX_LOSS:  # also true for NaN
        raise IntegrityError(f"finite: the mean loss is {losses.mean():.3g} nats per token")
    probes = probe(model, rows, losses, token_bytes, rng)
    changed = {name for name, _ in before.items() ^ state_hashes(model).items()}
    if changed:
        raise IntegrityError(
            f"state: {', '.join(sorted(changed))[:200]} changed; in evaluation parameters and "
            "buffers must not (check self.training)"
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
    """Ends the run: stops the clock, scores model(x), which returns logits, on all validation rows,
    prints and records the final block, with `stats` in it, and returns bits per byte. `tokenizer`
    and `batch_size` are ignored. If the score cannot be trusted, prints `val_bpb: nan` and
    `integrity: FAIL ...` and exits with 3."""
    model.eval()
    if DEVICE.type != "cpu":
        torch.accelerator.synchronize()  # queued work counts as training
    try:
        if _run.ended is not None:
            raise IntegrityError("once: evaluate_bpb was called before")
        if _run.began is None:
            raise IntegrityError("loader: make_dataloader never served a batch in this process")
        _run.ended = _now()
        data = begin_run()
        token_bytes = Tokenizer(data.manifest["vocabulary"]).token_bytes
        print(f"evaluating on {len(data.rows)} rows", flush=True)
        val_bpb, _probes = score(model, data.rows, token_bytes)
    except IntegrityError as error:
        print(f"---\nval_bpb: nan\nintegrity: FAIL {error}", flush=True)
        raise SystemExit(3) from None
    _run.scored = _now()
    block = report(val_bpb, stats)
    print_block(block)
    write_record(block)
    return val_bpb


# ---- Report ----
MAX_WAIT = max(300, TIME_BUDGET)  # seconds before the first batch, and of evaluation
GRACE = 1 + 0.01 * TIME_BUDGET  # seconds beyond the budget


def find_flags():
    """Returns the reasons not to compare this score with others, or `ok`."""
    limits = [
        ("startup", _run.began - _imported, MAX_WAIT),
        ("overtime", elapsed(), TIME_BUDGET + GRACE),
        ("evaluation", _run.scored - _run.ended, MAX_WAIT),
    ]
    flags = [f"{name}: {s:.1f} s, over {limit:g}" for name, s, limit in limits if s > limit]
    if _opened:
        flags.append(f"opened: the run itself read {', '.join(sorted(_opened))}")
    return "; ".join(flags) or "ok"


def loss_curve():
    """Returns the mean loss in each tenth of the budget, interpolated where no step ended."""
    tenths = [i for i in range(10) if _run.losses[i]]
    means = [np.mean(_run.losses[i]) for i in tenths]
    return np.interp(range(10), tenths, means).tolist() if tenths else None


def peak_memory():
    """Returns bytes: allocated on a GPU, otherwise resident."""
    if DEVICE.type == "cuda":
        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def report(val_bpb, stats):
    """Returns the final block, a dict. `stats` cannot override what is known here."""
    known = {
        "val_bpb": val_bpb,
        "training_seconds": elapsed(),
        "total_seconds": _now() - _imported,
        "startup_seconds": _run.began - _imported,
        "eval_seconds": _run.scored - _run.ended,
        "peak_vram_mb": peak_memory() / 2**20,
        "total_tokens_M": _run.served / 1e6,
        "tokens_per_second": round(tokens_per_second()),
        "curve": loss_curve(),
        "profile": PROFILE,
        "time_budget": TIME_BUDGET,
        "seed": SEED,
        "device": DEVICE_NAME,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "commit": current_commit(),
        "data": begin_run().manifest["data"],
        "prepare": RECIPE[0][:8],
    }
    own = {key: value for key, value in stats.items() if key not in known}
    return known | own | {"integrity": find_flags()}


def print_block(block):
    print("---")
    for key, value in block.items():
        if key == "curve" and value:
            value = " ".join(f"{loss:.3f}" for loss in value)
        elif isinstance(value, float):
            value = f"{value:.6f}" if key == "val_bpb" else f"{value:.5g}"
        print(f"{key}: {value}", flush=True)


def write_record(block):
    moment = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    record = RUNS / f"{moment}_{SEED}_{os.getpid()}.json"
    temporary = record.with_suffix(".tmp")
    try:
        RUNS.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(block, indent=1, default=str) + "\n")
        temporary.replace(record)
    except OSError as error:
        print(f"warning: {error}; the score above has no record.", file=sys.stderr)


# ==== Part 2: preparing the cache ====


# ---- Shards: parquet files, or lists of texts; the last is for validation ----
def read_shard(shard):
    """Yields the documents of a shard that are not empty. Exits if it cannot be read."""
    if isinstance(shard, list):
        yield from shard
        return
    try:
        with pq.ParquetFile(shard, page_checksum_verification=True) as file:
            for batch in file.iter_batches(batch_size=16, columns=["text"]):
                texts = batch["text"].cast(pa.large_string())  # which checks bytes for UTF-8
                yield from filter(None, texts.to_pylist())
    except (pa.ArrowException, OSError, KeyError, UnicodeDecodeError) as error:
        fail(
            f"{shard} is not a whole parquet file with one column `text` of strings ({error}); "
            "replace it, or delete it to download it again."
        )


# ---- ClimbMix ----
CLIMBMIX = "karpathy/climbmix-400b-shuffle"
CLIMBMIX_VAL = 6542  # the last shard is for validation: nothing trains on it
CLIMBMIX_SHARDS = 20  # for training, by default
RETRY_SECONDS = 6  # times the number of attempts so far


def download(path):
    """Downloads a shard, unless it is there. Raises RequestException or ArrowInvalid."""
    host = (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")
    url = f"{host}/datasets/{CLIMBMIX}/resolve/main/{path.name}"
    token = os.environ.get("HF_TOKEN")
    options = {"stream": True, "timeout": 60}
    if token:
        options["headers"] = {"Authorization": f"Bearer {token}"}
    part = path.with_name(f".{path.name}.part")
    attempts = 0
    while not path.exists():
        attempts += 1
        try:
            with requests.get(url, **options) as reply, open(part, "wb") as file:
                reply.raise_for_status()
                file.writelines(reply.iter_content(2**20))
            pq.read_metadata(part)  # refuses a login page
            part.replace(path)
        except (requests.RequestException, pa.ArrowInvalid):
            if attempts == 4:
                raise
            time.sleep(RETRY_SECONDS * attempts)


def climbmix(count):
    """Returns the first `count` shards (-1: all) and that for validation; downloads what lacks."""
    if count < 1 and count != -1:
        fail("--num-shards must be above 0, or -1 for all.")
    numbers = range(CLIMBMIX_VAL)[: count if count > 0 else None]
    shards = [SHARDS / f"shard_{i:05d}.parquet" for i in (*numbers, CLIMBMIX_VAL)]
    SHARDS.mkdir(exist_ok=True)
    with ThreadPoolExecutor(8) as pool:
        list(tqdm(pool.map(download, shards), "download", len(shards), unit="shard", disable=None))
    return shards


# ---- The embedded corpus: Python sources of the standard library and of these packages ----
PACKAGES = """
    filelock kernels matplotlib numpy pandas pyarrow requests tiktoken torch tqdm
""".split()
SKIPPED_FOLDERS = ["site-packages", "dist-packages", "test", "tests"]
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
        if name.suffix == ".py" and not set(SKIPPED_FOLDERS).intersection(name.parts):
            with contextlib.suppress(OSError, UnicodeDecodeError):
                sources.setdefault(file.read_bytes().decode(), name.as_posix())
    return sources


def python_corpus():
    """Returns the shards. Files are cut into pieces, since most are longer than a row. The hash of
    its name holds one file in twenty out; sorting the pieces by hash shuffles them."""

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
def find_shards(corpus):
    """`corpus` is a number of shards of ClimbMix, "python" or a folder. Returns its shards."""
    if isinstance(corpus, int):
        return climbmix(corpus)
    if corpus == "python":
        return python_corpus()
    files = sorted(Path(corpus).glob("[!.]*.parquet"))  # macOS puts ._ files beside others
    if len(files) < 2:
        fail(f"{corpus} must be a folder of at least two *.parquet files.")
    return files


# ---- Tokenizer training ----
TOKENIZER_DOC_CHARS = 10_000  # that it reads of each document
TOKENIZER_CHARS = 1_000_000_000  # that it reads in all


def tokenizer_texts(shards):
    """Yields the texts that the tokenizer is trained on."""
    left = TOKENIZER_CHARS
    for text in itertools.chain.from_iterable(map(read_shard, shards)):
        text = text[: min(TOKENIZER_DOC_CHARS, left)]
        yield text
        left -= len(text)
        if left <= 0:
            return


def train_tokenizer(shards):
    """Returns the vocabulary, a list of bytes in hex."""
    if not any(tokenizer_texts(shards)):
        fail("the training shards hold no text; check their column `text`.")
    print(f"training a tokenizer of {VOCAB_SIZE} tokens", flush=True)
    trainer = rustbpe.Tokenizer()
    size = VOCAB_SIZE - len(SPECIAL_TOKENS)
    trainer.train_from_iterator(tokenizer_texts(shards), size, pattern=SPLIT_PATTERN)
    ranks = sorted(trainer.get_mergeable_ranks(), key=itemgetter(1))
    return [bytes(token).hex() for token, _ in ranks]


# ---- Tokens: made once for all runs ----
def read_tokens(shard, tokenizer):
    """Yields each document's tokens, by threads, since tiktoken releases the GIL."""
    texts = read_shard(shard)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        while batch := list(itertools.islice(texts, 32 * os.cpu_count())):
            yield from pool.map(tokenizer.encode_document, batch)


def write_rows(shard, tokenizer, folder):
    """Packs the validation shard into rows. Returns them."""
    rows = pack_rows(read_tokens(shard, tokenizer), MAX_SEQ_LEN + 1)
    rows = list(itertools.islice(rows, EVAL_TOKENS // MAX_SEQ_LEN))
    count = len(rows) // EVAL_BATCH * EVAL_BATCH
    if count == 0:
        fail(f"validation, the last file, fills only {len(rows)} of {EVAL_BATCH} rows; add text.")
    rows = np.stack(rows[:count]).astype("<u2")
    rows.tofile(folder / ROWS_FILE)
    return rows


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
def build(corpus, folder):
    """Makes the files of a corpus in a new folder, the manifest last."""
    shards = find_shards(corpus)
    folder.mkdir()
    vocabulary = train_tokenizer(shards[:-1])
    tokenizer = Tokenizer(vocabulary)
    rows = write_rows(shards[-1], tokenizer, folder)
    first_documents = write_tokens(shards[:-1], tokenizer, folder)
    manifest = {
        "recipe": RECIPE,
        "corpus": corpus,
        "validation": getattr(shards[-1], "name", corpus),
        "first_documents": first_documents,  # of each shard
        "training": [file_hash(folder / name) for name in (TOKENS_FILE, ENDS_FILE)],
        "vocabulary": vocabulary,
    }
    manifest["data"] = data_hash(rows, manifest)
    (folder / MANIFEST_FILE).write_text(json.dumps(manifest) + "\n")


def usual_corpus():
    """Returns the corpus of last time, or the profile's if there is none."""
    if not PREPARED.exists():
        return by_profile(full=CLIMBMIX_SHARDS, medium=CLIMBMIX_SHARDS, small="python")
    with contextlib.suppress(OSError, ValueError, KeyError):
        return load_manifest()["corpus"]
    return fail(f"{PREPARED} does not say from what it was made; name it (see --help).")


def prepare(corpus):
    """Prepares a corpus; None keeps what is there, or makes it anew if it is unusable. The new
    files are made beside the old and then replace them; without a manifest nothing is prepared, so
    no run sees a mixture. Other files in the folder stay."""
    print(f"profile: {PROFILE}, on {DEVICE_NAME}; AUTORESEARCH_PROFILE sets another", flush=True)
    new = PREPARED.with_name(f"{PREPARED.name}.new")
    shutil.rmtree(new, ignore_errors=True)  # the last preparation was killed
    data = load() if corpus is None else None
    if data is None:
        build(usual_corpus() if corpus is None else corpus, new)
        PREPARED.mkdir(exist_ok=True)
        (PREPARED / MANIFEST_FILE).unlink(missing_ok=True)
        for name in (TOKENS_FILE, ENDS_FILE, ROWS_FILE, MANIFEST_FILE):
            (new / name).replace(PREPARED / name)
        new.rmdir()
        data = load()
    total = len(data.tokens)
    fitting = np.minimum(np.diff(data.ends), MAX_SEQ_LEN + 1).sum()
    if fitting < max(total / 5, EVAL_TOKENS):  # long documents, or few
        print(f"warning: runs will repeat {fitting} tokens; add text, or split its documents.")
    print(
        f"ready: {PROFILE} profile, {total / 1e6:.1f} million training tokens (at most "
        f"{fitting / total:.0%} fit rows), {len(data.rows)} validation rows of "
        f"{data.manifest['validation']}; next: uv run train.py"
    )


def main():
    parser = argparse.ArgumentParser(
        description="Prepares the cache, by default with the options of last time."
    )
    group = parser.add_mutually_exclusive_group()
    add = partial(group.add_argument, dest="corpus")
    add("--num-shards", type=int, metavar="N", help="training shards of ClimbMix (20; -1: all)")
    add("--corpus", choices=("python",), help="sources of Python and its packages, no download")
    add("--data-dir", type=os.path.abspath, metavar="DIR", help="parquet files; last: validation")
    args = parser.parse_args()
    try:
        CACHE.mkdir(parents=True, exist_ok=True)
        while not lock(CACHE):
            print("waiting for another preparation to end", flush=True)
            time.sleep(5)
        prepare(args.corpus)
    except (requests.RequestException, pa.ArrowInvalid) as error:
        fail(f"download: {error}; run the same command to go on, or use --corpus python.")
    except OSError as error:
        fail(f"{error}; free space there, or set AUTORESEARCH_CACHE to another folder.")


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends the threads, too
    main()
