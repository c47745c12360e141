"""
prepare.py, the ruler of autoresearch: data, tokenizer, loader, clock, metric, report. Nobody edits
it during a night of research.

    uv run prepare.py                  prepare what this machine needs, or resume
    uv run prepare.py --data-dir DIR   a corpus of your own: parquet files with a column `text`; the
                                       last by name is validation
    uv run prepare.py --verify         check the cache by hashing it and tokenising samples again
    uv run prepare.py --rerun COMMIT   train a commit again, where nothing of earlier runs can help

Three profiles set the sizes: `full` for a GPU, `medium` for a consumer's card, `small` for anything
else. Part 1 is what a run uses, part 2 makes the cache. Importing this file does nothing; torch,
which takes seconds, is imported where it is needed.
Exit codes, here and in train.py: 0 good, 1 a bug, 2 set-up or usage, 3 integrity, 4 diverged,
5 out of memory, 130 and 143 interrupted.
"""

import argparse
import base64
import bisect
import contextlib
import ctypes
import hashlib
import importlib.metadata
import inspect
import io
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
import tarfile
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic as _now  # bound here, so that patching `time` has no effect

import filelock
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import requests
import rustbpe
import tiktoken
from tqdm import tqdm

# ==== Part 1: what a run uses ====


# ---- Settings ----
def stop(sentence, code=2):
    """Ends the process with one sentence on stderr: what is wrong and how to fix it."""
    if sys.stderr.isatty():
        print(file=sys.stderr)  # below a live progress line
    print(f"error: {sentence}", file=sys.stderr, flush=True)
    raise SystemExit(code)


def by_profile(*, full, medium, small):
    """The value for the profile in force."""
    return {"full": full, "medium": medium, "small": small}[PROFILE]


def environment_number(name, default, kind, low, high):
    """The variable as a number of `kind`; ends the process unless low <= number < high."""
    text = os.environ.get(name) or default
    try:
        number = kind(text)
    except ValueError:
        number = None
    if number is None or not low <= number < high:
        what = "a whole number" if kind is int else "a number of seconds"
        stop(f"{name} is {what} from {low:g} to {high:g}, not {text!r}; change or unset it.")
    return number


AMD_DRIVER = "/dev/kfd"


def gpu_present():
    """Whether there is a GPU that may be used, without importing torch to ask: an NVIDIA one or,
    if this torch is built for ROCm, an AMD one."""
    driver = ["/dev/nvidiactl", "/usr/lib/wsl/lib/libcuda.so.1"]
    if "rocm" in importlib.metadata.version("torch"):
        driver = [AMD_DRIVER]
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    return any(os.path.exists(path) for path in driver) and not hidden


NVIDIA_CARDS = "/proc/driver/nvidia/gpus"  # a folder per card; not there in WSL
# By their names: cards of 8 to 32 GB that do about 20 to 200 TFLOP/s, and those of 40 GB and more
# that have names of the same kind.
MEDIUM_CARD = re.compile(r"GeForce|TITAN|RTX|Quadro|\b(T4G?|T\d{3,4}|L4|A2|A10G?|A16)\b")
LARGE_CARD = re.compile(r"RTX (A6000|6000 Ada|5880 Ada|8000|PRO [56]000)(?!.*Laptop)")


def card_names():
    """Names of the NVIDIA cards that a run may get, as the driver's files have them."""
    cards = []
    for path in sorted(Path(NVIDIA_CARDS).glob("*/information")):
        with contextlib.suppress(OSError):
            text = path.read_text(errors="replace")
            cards.append(dict(re.findall(r"^(.+?):[ \t]*(.*?)[ \t]*$", text, re.M)))
    # A card that is chosen by its number is not known here: drivers number them by speed.
    chosen = tuple(re.findall(r"GPU-[-\w]+", os.environ.get("CUDA_VISIBLE_DEVICES", "")))
    if chosen:
        cards = [card for card in cards if card.get("GPU UUID", "").startswith(chosen)]
    return [card.get("Model", "") for card in cards]


def choose_profile():
    """(profile, why), from the environment or the driver's files; no process is started."""
    chosen = os.environ.get("AUTORESEARCH_PROFILE")
    if chosen:
        return chosen, "as AUTORESEARCH_PROFILE says"
    if not GPU_PRESENT:
        return "small", "no GPU that this torch can use"
    names = card_names()
    listed = ", ".join(sorted(set(names)))
    if not listed:
        return "full", "the GPU's name is unknown; AUTORESEARCH_PROFILE=medium suits 8 to 32 GB"
    if all(MEDIUM_CARD.search(name) and not LARGE_CARD.search(name) for name in names):
        return "medium", f"for {listed}"
    return "full", f"for {listed}"


GPU_PRESENT = gpu_present()
PROFILE, WHY_PROFILE = choose_profile()
if PROFILE not in ("full", "medium", "small"):
    stop(f"AUTORESEARCH_PROFILE is full, medium or small, not {PROFILE!r}; change or unset it.")
TIME_BUDGET = environment_number("AUTORESEARCH_TIME_BUDGET", 300, float, 0.001, 1e9)  # seconds
SEED = environment_number("SEED", 42, int, 0, 2**63)

# Scores can be compared only between runs that share these.
MAX_SEQ_LEN = by_profile(full=2048, medium=2048, small=512)  # tokens per row
EVAL_TOKENS = by_profile(full=40 * 524288, medium=2**21, small=2**18)  # validation tokens scored
VOCAB_SIZE = by_profile(full=8192, medium=8192, small=2048)  # the four special tokens included
EVAL_BATCH = 32  # rows per batch of evaluation, at most
BUFFER_DOCS = 1000  # documents among which packing chooses

# Where things are. ROOT has data/, val/, tokenizer/, tokens/ and manifest.json.
CACHE = (
    Path(os.environ.get("AUTORESEARCH_CACHE") or "~/.cache/autoresearch").expanduser().absolute()
)
ROOT = by_profile(full=CACHE, medium=CACHE, small=CACHE / "small")
RUNS = Path(os.environ.get("AUTORESEARCH_RUNS") or CACHE / "runs").expanduser().absolute()
VAL_ROWS = "val/rows.u16"  # packed validation rows, below ROOT; no glob of *.bin meets them
PACKED_TOKENS = by_profile(full=EVAL_TOKENS, medium=40 * 524288, small=EVAL_TOKENS)  # in that file
# Names that other harnesses of this kind import.
CACHE_DIR = str(ROOT)
DATA_DIR = str(ROOT / "data")
TOKENIZER_DIR = str(ROOT / "tokenizer")

# GPT-4's pattern (cl100k_base), but runs of digits are cut at two, not three: a small vocabulary
# has no room for a thousand numbers.
SPLIT = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}]++[\r\n]*"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)
SPECIAL_TOKENS = [f"<|reserved_{i}|>" for i in range(4)]  # the first is BOS

# Limits of `probe`. Honest models, bf16 and mixtures of experts included, moved by at most 2e-5
# nats on average and 0.02 at one position.
PROBE_MEAN = 1e-3
PROBE_PEAK = 0.1
PROBE_ROWS = by_profile(full=288, medium=112, small=56)  # at most so many rows are scored again
NEIGHBOURS = 32  # positions to each side that the loss at a position is compared with

# Limits of `flags`.
STARTUP_LIMIT = 300  # seconds before the first batch; compiling everything on a CPU takes 90
EVALUATION_LIMIT = max(300, TIME_BUDGET)  # seconds
UNSTEADY = 0.10  # relative change of speed within a run

DIVERGED = 100  # nats; a higher loss, or NaN, ends the run
PROGRESS_SECONDS = 5  # between two lines of progress, if there is no terminal

# What a run may not assign to; checked when it is scored.
FROZEN = ("TIME_BUDGET", "EVAL_BATCH", "PROBE_ROWS", "PROBE_MEAN", "PROBE_PEAK", "NEIGHBOURS")
_frozen = {name: globals()[name] for name in FROZEN}


# ---- Device ----
# Dense bf16 peaks in TFLOP/s, from the vendors' data sheets; of two names that fit, the first.
# fmt: off
PEAK_TFLOPS = {
    "GB200": 2500, "B200": 2250, "B100": 1800, "H200 NVL": 836, "H200": 989, "H100 NVL": 835,
    "H100 PCIe": 756, "H100": 989, "A100": 312, "A800": 312, "A40": 149.7, "A30": 165, "L40S": 362,
    "L4": 121, "RTX 5090": 209.5, "RTX 4090": 165.2, "RTX 3090": 71,
}
# fmt: on
OTHER_CARD = {"Ti", "SUPER", "D", "Laptop", "Max"}  # with such a word more it is another card


def peak_flops(device_name):
    """FLOP/s of the card; None where the table does not have it: never another card's peak."""
    words = set(device_name.replace("-", " ").split())
    for card, tflops in PEAK_TFLOPS.items():
        more = words - set(card.split())
        if words.issuperset(card.split()) and not more & OTHER_CARD:
            return tflops * 1e12
    return None


def training_device():
    """The torch device of this run. Ends the process where there is a GPU that torch cannot use."""
    import torch

    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        built_for = [int(name[3:]) for name in torch.cuda.get_arch_list() if name[:3] == "sm_"]
        if 10 * major + minor < min(built_for, default=0):
            stop(
                f"{torch.cuda.get_device_name()} has compute capability {major}.{minor}, too old "
                "for this torch; choose another GPU by CUDA_VISIBLE_DEVICES, or set that to -1."
            )
        return torch.device("cuda")
    if GPU_PRESENT:
        stop(
            "torch finds no usable GPU; update the driver (580 or newer), or set "
            "CUDA_VISIBLE_DEVICES to a GPU that is there, or to -1 to go without one."
        )
    # With nvcc but no GPU, torch would print a warning.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
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
    peak /= 2**20 if sys.platform == "darwin" else 2**10  # bytes on macOS, else KiB
    return peak, peak


def nvidia_smi(query):
    """What nvidia-smi says of the GPU in use; empty where there is none or it cannot tell. By its
    UUID, since nvidia-smi numbers the devices its own way."""
    import torch

    if not torch.cuda.is_available():
        return ""
    uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
    command = ["nvidia-smi", f"--id=GPU-{uuid}", f"--query-{query}", "--format=csv,noheader"]
    try:
        return subprocess.check_output(
            command, stderr=subprocess.DEVNULL, text=True, timeout=20
        ).strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def other_gpu_processes():
    """Ids of the other processes that nvidia-smi lists on the GPU in use. Exactly one entry is this
    process, in a container under an id that it does not know; alone, it is the only one."""
    import torch

    if torch.cuda.is_available():
        torch.zeros(1, device="cuda")  # so that the driver lists this process
        torch.cuda.synchronize()
    listed = [word for word in nvidia_smi("compute-apps=pid").split() if word.isdigit()]
    if len(listed) < 2:
        return []
    return [process for process in listed if process != str(os.getpid())]


def gpu_state():
    """Clock, temperature in degrees Celsius and reasons for a lower clock of the GPU, for whoever
    wonders about `unsteady`; None without nvidia-smi."""
    return nvidia_smi("gpu=clocks.sm,temperature.gpu,clocks_event_reasons.active") or None


def hub_kernel(repository, version):
    """(module, snapshot) of a kernel on the Hugging Face hub. Later runs load it from the folder of
    the first, without the hub: a version is a branch that moves, and it is not found offline even
    when it was downloaded. Raises what loading raises."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    from kernels import get_kernel

    known = CACHE / "kernels" / f"{repository.replace('/', '--')}-v{version}"
    folder = known.read_text() if known.exists() else ""
    if os.path.isdir(folder):
        os.environ.setdefault("LOCAL_KERNELS", f"{repository}={folder}")
    for attempt in range(3):
        try:
            module = get_kernel(repository, version=version)
            break
        except Exception:  # of some class of the hub's client; it may answer when asked again
            if attempt == 2:
                raise
            time.sleep(BACKOFF * 2**attempt)
    for folder in Path(module.__file__).parents:
        if folder.parent.name == "snapshots":
            with contextlib.suppress(OSError), replacing(known) as file:  # if CACHE is read-only
                file.write(str(folder).encode())
            return module, folder.name[:8]
    return module, "local"


# ---- Files and manifest: a file appears complete or not at all ----
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


def sha256(path):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def load_manifest():
    """What was prepared: `settings`; the `choice` of corpus on the command line; `corpus`, and
    `files` made from it, {path below ROOT: [bytes, sha256]}, `files` empty while unfinished;
    `tokens`, {shard: its token file}; `rulers`, the hash of each prepare.py that made or found it
    like this."""
    manifest = dict(settings={}, choice={}, corpus={}, files={}, tokens={}, rulers=[])
    # An unreadable manifest counts as none.
    with contextlib.suppress(FileNotFoundError, ValueError, TypeError):
        manifest |= json.loads((ROOT / "manifest.json").read_text())
    return manifest


def find_damaged(recorded, hash_all=False):
    """The recorded files that are missing or have another size or another sha256; only what decides
    a score is hashed, unless `hash_all`."""
    damaged = []
    for name, (size, digest) in recorded.items():
        path = ROOT / name
        whole = path.is_file() and path.stat().st_size == size
        hashed = hash_all or decides_score(name)
        if not whole or (hashed and sha256(path) != digest):
            damaged.append(path)
    return damaged


def decides_score(name):
    """Whether a score depends on every byte of the file: the tokenizer and the validation rows."""
    return name.startswith("tokenizer/") or name == VAL_ROWS


def check_cache():
    """Returns the manifest. Ends the process if the cache is not complete, or of another ruler."""
    manifest = load_manifest()
    if not manifest["files"] or sha256(__file__) not in manifest["rulers"]:
        problem = f"{ROOT} is not prepared by this prepare.py"
    else:
        damaged = find_damaged(manifest["files"])
        if not damaged:
            return manifest
        problem = f"{damaged[0]} is missing or not as it was prepared"
    return stop(f"{problem}; run `AUTORESEARCH_PROFILE={PROFILE} uv run prepare.py`.")


# ---- Tokenizer ----
class Tokenizer:
    """Byte-level BPE over `ranks` {bytes: id}. Four special tokens come right above them; no text
    yields one. `token_bytes`, int32 [V], counts the raw bytes of each token, 0 for special ones.
    (Of a decoded token they cannot be counted: a part of a character decodes to one of three.)"""

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

    def encode(self, text, prepend=None, num_threads=None):
        """The ids of a str, or of each str in a list, after `prepend`: None, a token id or the name
        of a special token. Raises ValueError for anything else. `num_threads` is ignored."""
        if not isinstance(text, str):
            return [self.encode(one, prepend) for one in text]
        ids = [] if prepend is None else [self.token_id(prepend)]
        # In pieces, since near a million blanks in a row overflow the split pattern's stack.
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


def get_token_bytes(device="cpu"):
    """Tokenizer.token_bytes as a torch tensor, under the name that other harnesses import."""
    import torch

    return torch.from_numpy(Tokenizer.from_directory().token_bytes).to(device)


# ---- Start ----
@dataclass
class Run:
    """The state of the run in this process. Times are those of `_now`."""

    imported: float
    # When it began:
    files: dict = field(default_factory=dict)  # of the manifest
    commit: str = ""
    train_sha256: str = ""  # of the script that runs
    prepare_sha256: str = ""
    device: object = None  # torch's
    other_processes: list = field(default_factory=list)  # on the same GPU
    # As it goes on:
    served: list = field(default_factory=list)  # a Batch each
    steps: int = 0  # the highest that log_step was told
    logged: int = 0  # calls of log_step
    smooth_loss: float = 0.0
    curve: list = field(default_factory=list)  # the same at 10, 20, ... 100 % of the budget
    last_step: float = 0.0  # when log_step was last called
    last_line: float = -math.inf  # when it last printed
    opened: list = field(default_factory=list)  # files of the cache that others than the ruler read
    reading: bool = False  # whether the ruler itself reads them now
    # At its end:
    eval_began: float | None = None  # which stops the clock
    eval_ended: float | None = None
    val_bpb: float | None = None
    integrity: str = ""
    record: Path | None = None


@dataclass(frozen=True)
class Batch:
    """A batch that was served."""

    time: float
    rows: int
    length: int  # tokens per row

    @property
    def tokens(self):
        return self.rows * self.length


_run = Run(imported=_now())


def git(*arguments):
    """What git prints about this folder; None where there is no git or no repository."""
    command = ["git", "-C", Path(__file__).parent, *arguments]
    try:
        return subprocess.check_output(command, stderr=subprocess.DEVNULL, text=True).strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def current_commit():
    """The short commit of this folder, `+dirty` where git status names anything, new files too;
    AUTORESEARCH_COMMIT where there is no git."""
    commit = git("rev-parse", "--short", "HEAD")
    if commit is None:
        return os.environ.get("AUTORESEARCH_COMMIT") or "none"
    return commit + ("+dirty" if git("status", "--porcelain") else "")


@contextlib.contextmanager
def ruler_reads():
    """Around the ruler's own reading of the files that `watch_cache` watches."""
    _run.reading = True
    try:
        yield
    finally:
        _run.reading = False


def watch_cache():
    """From here on notes every file below val/, tokens/ and data/ that is opened by others than the
    ruler: a loader of one's own may well meet the validation rows. What pyarrow, torch.from_file or
    a copy reads is not seen."""
    watched = tuple(os.path.realpath(ROOT / name) + os.sep for name in ("val", "tokens", "data"))

    def hook(event, arguments):
        if event != "open" or _run.reading or not _run.files:
            return
        path = arguments[0]
        if isinstance(path, (str, bytes, os.PathLike)):
            path = os.path.realpath(os.fsdecode(path))
            if path.startswith(watched) and path not in _run.opened:
                _run.opened.append(path)

    sys.addaudithook(hook)


def begin_run():
    """Checks the cache and that no other process computes on the GPU, records commit and hashes,
    and watches who reads the data; once per process. Ends the process if there can be no run."""
    if _run.files:
        return
    manifest = check_cache()
    script = getattr(sys.modules["__main__"], "__file__", "")  # none in a notebook, python -c or -
    _run.train_sha256 = sha256(script) if os.path.isfile(script) else "none"
    _run.prepare_sha256 = sha256(__file__)
    _run.commit = current_commit()
    # Before the first tensor: otherwise a batch size that just fits may fail later.
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    _run.device = training_device()
    _run.other_processes = other_gpu_processes()
    if _run.other_processes and os.environ.get("AUTORESEARCH_SHARED_GPU") != "1":
        stop(
            "another process computes on this GPU (nvidia-smi names "
            f"{', '.join(_run.other_processes)}); let it end, choose another GPU by "
            "CUDA_VISIBLE_DEVICES, or set AUTORESEARCH_SHARED_GPU=1."
        )
    watch_cache()
    _run.files = manifest["files"]


def start():
    """To be called first by a training script. Does what no experiment edits: `begin_run`, folders,
    signals, a line that says what runs. Returns the torch device."""
    begin_run()
    try:
        RUNS.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=RUNS).close()  # fail now rather than after training
    except OSError as error:
        stop(f"{error}; free space, or set AUTORESEARCH_RUNS to a writable folder.")
    shared_cache = not os.access(CACHE, os.W_OK)  # then nothing is written but in RUNS
    if shared_cache:
        tempfile.tempdir = os.environ.setdefault("TMPDIR", str(RUNS))
    inductor = (RUNS if shared_cache else CACHE) / "inductor"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(inductor))
    if _run.device.type == "cpu":
        keep_memory()
        # Processes that would compile Triton's kernels; each imports torch, and a CPU needs none.
        os.environ.setdefault("TORCH_WARM_POOL", "0")
        if os.path.exists(AMD_DRIVER):
            print("note: this torch is not built for the AMD GPU here, so the CPU trains")
    signal.signal(signal.SIGINT, interrupted)
    signal.signal(signal.SIGTERM, interrupted)
    name = device_name(_run.device)
    print(f"run: {PROFILE} profile, {TIME_BUDGET:g} s, seed {SEED}, commit {_run.commit}, {name}")
    return _run.device


def keep_memory():
    """Makes glibc keep the memory that is freed. By default it returns large blocks to the kernel,
    which zeroes them anew: 50,000 page faults, more than a tenth of each step on a CPU."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(-4, 0)  # M_MMAP_MAX
        mallopt(-1, -1)  # M_TRIM_THRESHOLD


def interrupted(number, frame):
    name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
    stop(f"{name} after {elapsed():.0f} s of training; no score.", 128 + number)


# ---- Loader and clock ----
def elapsed():
    """Seconds of training: from the first batch served until evaluation begins; 0.0 before."""
    if not _run.served:
        return 0.0
    return (_run.eval_began or _now()) - _run.served[0].time


def read_tokens(flat):
    """Yields the documents of a token file, uint16."""
    tokens = np.memmap(flat, dtype="<u2", mode="r").view(np.ndarray)  # quicker to slice
    ends = np.load(flat.with_suffix(".npy")).tolist()
    for begin, end in itertools.pairwise(ends):
        yield tokens[begin:end]


class TrainDocuments:
    """All training documents, forever; `epoch` counts the passes. Shards keep their order, rotated
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
            fitting = bisect.bisect_left(order, (space + 1,))
            place = 0  # the shortest
            if fitting:
                longest, _ = order[fitting - 1]
                place = bisect.bisect_left(order, (longest,))
            _, number = order.pop(place)
            document = held.pop(number)[:space]
            row[filled : filled + len(document)] = document
            filled += len(document)
        yield row


def make_dataloader(tokenizer, B, T, split="train", buffer_size=BUFFER_DOCS):
    """Yields (inputs, targets, epoch) forever: int64 [B, T] on the training device, fresh tensors
    that share no memory, targets one token ahead; the rows do not depend on B. The first batch
    starts the clock. `tokenizer` is not used: tokens were made at preparation. Raises ValueError
    for a split other than "train" and for sizes below 1."""
    if split != "train":
        raise ValueError(f'split must be "train", not {split!r}: only evaluate_bpb reads "val"')
    if min(B, T, buffer_size) < 1:
        raise ValueError(f"B, T and buffer_size are above 0, not {B}, {T} and {buffer_size}")
    begin_run()
    import torch

    def serve_batches():
        documents = TrainDocuments()
        rows = pack_rows(documents, T + 1, buffer_size)
        while True:
            with ruler_reads():
                packed = list(itertools.islice(rows, B))
            batch = torch.from_numpy(np.stack(packed).astype(np.int64))
            if _run.device.type == "cuda":
                batch = batch.pin_memory()  # torch keeps it until the copy is done
            batch = batch.to(_run.device, non_blocking=True)
            # clone, not contiguous, which does not copy a single row: they would share memory.
            inputs = batch[:, :-1].clone(memory_format=torch.contiguous_format)
            targets = batch[:, 1:].clone(memory_format=torch.contiguous_format)
            _run.served.append(Batch(_now(), B, T))
            yield inputs, targets, documents.epoch

    return serve_batches()


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
    """The number of validation rows that are scored: those packed, or the first of them."""
    size, _ = files[VAL_ROWS]
    return min(size // (2 * (MAX_SEQ_LEN + 1)), EVAL_TOKENS // MAX_SEQ_LEN)


def model_device(model):
    """The device of a model's parameters. Raises IntegrityError for what is no module."""
    for name in ("eval", "parameters"):
        if not hasattr(model, name):
            raise IntegrityError(
                f"model: {type(model).__name__} has no .{name}; pass a torch.nn.Module, or give "
                "the wrapper that method of the model in it"
            )
    for parameter in model.parameters():
        return parameter.device
    raise IntegrityError("model: it has no parameters; keep its parts in a torch.nn.ModuleList")


def token_losses(model, inputs, targets, token_bytes):
    """Cross-entropy in nats, float32 [B, T], of the logits that `model` gives for the tokens
    `inputs` [B, T], against `targets` [B, T], which it never sees; 0 where a target has no bytes.
    Raises IntegrityError."""
    import torch

    device = model_device(model)
    logits = model(torch.from_numpy(inputs.astype(np.int64)).to(device))
    plain = type(logits) is torch.Tensor
    shape = tuple(logits.shape) if plain else type(logits).__name__
    if not plain or shape[:-1] != targets.shape or shape[-1] < len(token_bytes):
        wanted = (*targets.shape, len(token_bytes))
        raise IntegrityError(f"shape: model(x) returned {shape}, not a plain tensor {wanted}")
    on_device = torch.from_numpy(targets.astype(np.int64)).to(device)
    losses = []
    # Row by row, since all logits in fp32 would be the largest tensor. Not logsumexp minus gather,
    # which cancels: 2**28 added to all logits would score 0.
    for row, target in zip(torch.unbind(logits), on_device, strict=True):
        log_probs = row.float().log_softmax(-1)
        losses.append(-log_probs.gather(-1, target[:, None])[:, 0])
    losses = torch.stack(losses).cpu().numpy()
    return np.where(token_bytes[targets] > 0, losses, 0)


def draw_cuts(losses, tokens, own_losses, rng):
    """Positions from 1 to T - 1 at which to cut the rows `tokens` [K, T + 1], int [K], given their
    losses [K, T] and those of all rows [N, T]. A fifth each are aimed at a kind of leak: near the
    front, where a prefix may attend both ways; near the end; at odd multiples of 16, 32, ... T / 2,
    where chunks end; just after the positions whose mean loss is lowest beside the median of their
    neighbours', which may see their target; and just after targets that are rare after their token,
    but had a low loss."""
    count, T = own_losses.shape
    kinds = np.array_split(np.arange(count), 5)
    front, back, border, drop, surprise = (len(part) for part in kinds)
    front = np.exp(rng.uniform(0, np.log(T), front)).astype(int)
    back = T - np.exp(rng.uniform(0, np.log(T), back)).astype(int)
    period = 2 ** rng.integers(4, max(int(np.log2(T)), 5), border)
    odd = 2 * rng.integers(0, np.maximum(T // (2 * period), 1)) + 1
    mean = losses.mean(axis=0, dtype=np.float64)
    padded = np.pad(mean, NEIGHBOURS, constant_values=np.nan)
    around = np.lib.stride_tricks.sliding_window_view(padded, 2 * NEIGHBOURS + 1)
    after_drop = np.argsort(mean - np.nanmedian(around, axis=1), kind="stable")[:drop] + 1
    gain = bigram_surprise(tokens) - own_losses
    gain[own_losses == 0] = -np.inf  # not counted
    best = np.argsort(-gain[count - surprise :], axis=1)[:, :3]  # of each row
    after_rare = best[np.arange(surprise), rng.integers(0, best.shape[1], surprise)] + 1
    cuts = np.concatenate([front, back, period * odd, after_drop, after_rare])
    return np.clip(cuts, 1, T - 1)


def bigram_surprise(tokens):
    """Minus the logarithm of each token's frequency after the token before it, [K, T], as counted
    in the rows `tokens` [K, T + 1] themselves."""
    before = tokens[:, :-1].astype(np.int64)
    pairs = before * 2**16 + tokens[:, 1:]
    _, place, pair_count = np.unique(pairs, return_inverse=True, return_counts=True)
    return np.log(np.bincount(before.ravel())[before] / pair_count[place].reshape(before.shape))


def probe(model, rows, losses, size, token_bytes, rng):
    """Scores some of the rows [N, T + 1] again, in batches of `size`, three of four with other
    tokens after a cut. Returns {probe: absolute changes in nats}, all of which should be 0:
    causality, of the losses before a cut; edges, of the first and the last of those, where a leak
    would vanish in the mean; isolation, of the rows that were left as they are."""
    count = size * max(1, min(PROBE_ROWS, len(rows)) // size)
    chosen = rng.permutation(len(rows))[:count]
    tokens = rows[chosen]

    def losses_of(inputs):
        found = []
        for begin in range(0, count, size):
            batch = slice(begin, begin + size)
            found.append(token_losses(model, inputs[batch, :-1], tokens[batch, 1:], token_bytes))
        return np.concatenate(found)

    is_cut = np.arange(count) % 4 > 0
    cuts = np.full(count, tokens.shape[1])  # after the end: not cut
    cuts[is_cut] = draw_cuts(losses, tokens[is_cut], losses[chosen[is_cut]], rng)
    before_cut = np.arange(tokens.shape[1]) < cuts[:, None]
    altered = np.where(before_cut, tokens, np.roll(tokens, 1, axis=0))
    moved = np.abs(losses_of(altered) - losses[chosen])
    before_cut = before_cut[:, :-1]
    at_edge = np.zeros_like(before_cut)
    at_edge[:, 0] = True
    at_edge[is_cut, cuts[is_cut] - 1] = True
    probes = {
        "isolation": moved[~is_cut],
        "causality": moved[is_cut][before_cut[is_cut]],
        "edges": moved[is_cut][at_edge[is_cut]],
    }
    if probes["isolation"].mean() > PROBE_MEAN:
        # Because of the other rows, or does the model not even repeat itself?
        probes = {"repeatability": np.abs(losses_of(tokens) - losses_of(tokens))} | probes
    return probes


LIKELY_MISTAKE = {
    "repeatability": "is dropout on in evaluation, or does the model learn or remember there?",
    "isolation": "does a row depend on others of its batch, by a statistic, a scale, a capacity?",
    "causality": "does a mask, a mean, a filter or a block let a position see later tokens?",
    "edges": "does something wrap around (roll), or the end of a chunk look one token ahead?",
}


def score(model, rows, token_bytes, batch_size, rng=None):
    """(bits per byte, {probe: absolute changes in nats}) of `model` over packed rows, uint16
    [N, T + 1]. `model` maps int64 [B, T] to logits [B, T, V] and never sees the targets; those
    without bytes, special tokens, are not counted. `rng` (numpy, by default unpredictable) shuffles
    the rows and draws the probes. Raises IntegrityError."""
    import torch

    rng = np.random.default_rng(rng)
    size = largest_divisor(len(rows), min(batch_size, EVAL_BATCH))
    model_device(model)
    losses = np.empty((len(rows), rows.shape[1] - 1), dtype=np.float32)
    if getattr(model, "training", True):  # a second eval() might swap averaged weights back
        model.eval()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with torch.no_grad():
        for batch in np.split(rng.permutation(len(rows)), len(rows) // size):
            losses[batch] = token_losses(model, rows[batch, :-1], rows[batch, 1:], token_bytes)
        broken = np.count_nonzero(~np.isfinite(losses))
        if broken:
            raise IntegrityError(f"finite: {broken} losses are NaN or infinite")
        probes = probe(model, rows, losses, size, token_bytes, rng)
        after = list(model.parameters())
        changed = sum(not torch.equal(*pair) for pair in zip(before, after, strict=True))
    if changed:
        raise IntegrityError(f"state: {changed} parameters changed; does the model learn here?")
    for name, change in probes.items():
        if change.size and not (change.mean() <= PROBE_MEAN and change.max() <= PROBE_PEAK):
            raise IntegrityError(
                f"{name}: losses moved by {change.mean():.2g} nats, one by {change.max():.2g}; "
                f"{LIKELY_MISTAKE[name]}"
            )
    count = token_bytes[rows[:, 1:]].sum(dtype=np.int64)
    return losses.sum(dtype=np.float64) / (math.log(2) * count), probes


def evaluate_bpb(model, tokenizer, batch_size):
    """Bits per byte of `model` over every packed validation row, by `score`. `batch_size` is an
    upper bound and does not change it. Stops the clock once the model is in evaluation mode and the
    device has finished; to be called once. Prints an `integrity:` line and writes a record, whether
    or not `report` follows. On failure prints `val_bpb: nan` and `integrity: FAIL ...` and exits
    with 3.

    No check inside a process stops determined code, or knows that weights came from an earlier run.
    For that there are --verify and --rerun."""
    try:
        if _run.eval_began is not None:
            raise IntegrityError("once: evaluate_bpb was called before")
        model_device(model)
        model.eval()
        wait_for_device()  # what is still queued is training
        _run.eval_began = _now()
        if not _run.served:
            raise IntegrityError("loader: make_dataloader never served a batch in this process")
        for name, value in _frozen.items():
            if globals()[name] != value:
                raise IntegrityError(f"settings: prepare.{name} was assigned {globals()[name]}")
        with ruler_reads():
            damaged = find_damaged(_run.files)
            if damaged:
                raise IntegrityError(f"data: {damaged[0].name} changed since training began")
            rows = np.fromfile(ROOT / VAL_ROWS, dtype="<u2").reshape(-1, MAX_SEQ_LEN + 1)
        rows = rows[: count_rows(_run.files)]
        token_bytes = Tokenizer.from_directory().token_bytes
        served = len(_run.served)
        _run.val_bpb, _ = score(model, rows, token_bytes, batch_size)
        if len(_run.served) > served:
            raise IntegrityError("loader: make_dataloader served batches during evaluation")
    except IntegrityError as error:
        if _run.record is not None:
            _run.record.unlink(missing_ok=True)  # that of an evaluation before this one
        print(f"---\nval_bpb: nan\nintegrity: FAIL {error}", flush=True)
        raise SystemExit(3) from None
    _run.eval_ended = _now()
    _run.integrity = flags()
    if sys.stdout.isatty():
        print()  # below the live line
    print(f"integrity: {_run.integrity}", flush=True)
    try:
        write_record(known_stats())
    except OSError as error:
        print(f"warning: {error}; free space: the score has no record yet.", file=sys.stderr)
    return _run.val_bpb


def wait_for_device():
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


# ---- Progress and report ----
def log_step(step, loss, *, tokens, flops_per_token, lr_factor, epoch):
    """Records the mean loss of a step, in nats per token, and prints progress: one live line on a
    terminal, else a line about every five seconds. `step` counts from 1, `tokens` are those of the
    step. Exits with 4 if training has diverged."""
    live = sys.stdout.isatty()
    loss = float(loss)  # a tensor would not go into the record
    if not loss <= DIVERGED:  # NaN too: no comparison with it holds
        print(f"\nFAIL: training diverged, loss {loss:g} nats per token at step {step}", flush=True)
        raise SystemExit(4)
    _run.steps = max(_run.steps, step)
    _run.logged += 1
    _run.smooth_loss += (loss - _run.smooth_loss) * max(0.1, 1 / _run.logged)
    tenths = min(int(10 * elapsed() / TIME_BUDGET), 10)
    _run.curve += [_run.smooth_loss] * (tenths - len(_run.curve))
    now = _now()
    seconds = now - _run.last_step if _run.last_step else elapsed()
    rate = tokens / max(seconds, 1e-9)
    _run.last_step = now
    if not live and now - _run.last_line < PROGRESS_SECONDS:
        return
    _run.last_line = now
    peak = peak_flops(device_name(_run.device))
    mfu = f"{100 * flops_per_token * rate / peak:.1f}%" if peak else "n/a"
    line = (
        f"step {step:5d} {min(100 * elapsed() / TIME_BUDGET, 100):3.0f}% "
        f"loss {_run.smooth_loss:.4f} lr x{lr_factor:.2f} {rate:7.0f} tok/s mfu {mfu} "
        f"epoch {epoch} left {TIME_BUDGET - elapsed():3.0f} s"
    )  # fits in 80 columns
    if live:
        print(f"\r\033[K{line}", end="", flush=True)
    else:
        print(line, flush=True)


KEYS = """
    val_bpb training_seconds total_seconds peak_vram_mb mfu_percent total_tokens_M num_steps
    num_params_M depth train_loss curve served_tokens_M eval_seconds startup_seconds
    tokens_per_second peak_reserved_mb profile time_budget seed device gpu attention torch commit
    data prepare integrity
""".split()


def flags():
    """What a reader must know before comparing this run's number with another's, or `ok`."""
    found = []
    startup = _run.served[0].time - _run.imported
    if startup > STARTUP_LIMIT:
        found.append(f"startup: {startup:.0f} s, over {STARTUP_LIMIT}")
    if _run.other_processes or other_gpu_processes():
        found.append("shared: another process computed on this GPU")
    allowed = 2 + 0.02 * TIME_BUDGET
    if _run.steps:  # two may be queued when the budget ends
        allowed = min(1 + 2 * elapsed() / _run.steps, 2 + 0.1 * TIME_BUDGET)
    if elapsed() > TIME_BUDGET + allowed:
        found.append(f"overtime: {elapsed():.1f} of {TIME_BUDGET:g} s")
    evaluation = _run.eval_ended - _run.eval_began
    if evaluation > EVALUATION_LIMIT:
        found.append(f"evaluation: {evaluation:.0f} s, over {EVALUATION_LIMIT:g}")
    if _run.opened:
        names = ", ".join(os.path.relpath(path, ROOT) for path in _run.opened[:3])
        found.append(f"opened: {len(_run.opened)} files of the cache by the run itself ({names})")
    first, second = speeds()
    if abs(second / first - 1) > UNSTEADY:
        found.append(
            f"unsteady: {first:.0f} tokens/s, then {second:.0f}; the machine, or the change itself "
            "if a second run has the same two speeds"
        )
    return "; ".join(found) or "ok"


def speeds():
    """Tokens per second in the first and in the second half of the batches of the commonest shape,
    without the first tenth of them; (1, 1) where those are too few to tell."""
    seconds = {}  # from each batch to the next, by shape
    for batch, after in itertools.pairwise(_run.served):
        seconds.setdefault((batch.rows, batch.length), []).append(after.time - batch.time)
    shape = max(seconds, key=lambda shape: len(seconds[shape]), default=None)
    times = seconds.get(shape, [])
    times = times[len(times) // 10 :]
    if len(times) < 20:
        return 1, 1
    tokens = shape[0] * shape[1]
    middle = len(times) // 2
    return tokens / np.mean(times[:middle]), tokens / np.mean(times[middle:])


def known_stats():
    """What the ruler itself knows of a run that was scored."""
    allocated, reserved = peak_memory_mb(_run.device)
    return {
        "val_bpb": _run.val_bpb,
        "training_seconds": elapsed(),
        "total_seconds": _now() - _run.imported,
        "peak_vram_mb": allocated,
        "num_steps": _run.steps or None,
        "train_loss": _run.smooth_loss if _run.steps else None,
        "curve": _run.curve + [_run.smooth_loss] * (10 - len(_run.curve)) if _run.steps else None,
        "served_tokens_M": sum(batch.tokens for batch in _run.served) / 1e6,
        "eval_seconds": _run.eval_ended - _run.eval_began,
        "startup_seconds": _run.served[0].time - _run.imported,
        "peak_reserved_mb": reserved,
        "profile": PROFILE,
        "time_budget": TIME_BUDGET,
        "seed": SEED,
        "device": device_name(_run.device),
        "gpu": gpu_state(),
        "torch": importlib.metadata.version("torch"),
        "commit": _run.commit,
        "data": data_hash(),
        "prepare": _run.prepare_sha256[:8],
        "integrity": _run.integrity,
    }


def report(val_bpb, *, num_steps, total_tokens, flops_per_token, **stats):
    """Prints the final block, `---` and then `key: value` lines, writes it as the JSON record of
    the run and returns that path. `stats` are further keys. Raises ValueError for a score or a key
    that is not the training script's to give."""
    if _run.val_bpb is None or val_bpb != _run.val_bpb:
        raise ValueError(f"val_bpb is {val_bpb}, but evaluate_bpb returned {_run.val_bpb}")
    known = known_stats()
    if known.keys() & stats.keys():
        raise ValueError(f"the ruler itself reports {sorted(known.keys() & stats.keys())}")
    rate = total_tokens / elapsed()
    peak = peak_flops(known["device"])
    block = known | {
        "mfu_percent": 100 * flops_per_token * rate / peak if peak else "n/a",
        "total_tokens_M": total_tokens / 1e6,
        "num_steps": num_steps,
        "tokens_per_second": rate,
    }
    block |= stats
    ordered = {key: block[key] for key in KEYS if key in block} | block
    print("---")
    for key, value in ordered.items():
        print(f"{key}: {format_value(key, value)}", flush=True)
    try:
        return write_record(block)
    except OSError as error:
        return stop(f"{error}; free space: the score above has no complete record.")


def format_value(key, value):
    if value is None:
        return "n/a"
    if key in ("val_bpb", "train_loss"):
        return f"{value:.6f}"
    if isinstance(value, float):
        return f"{value:.2f}"
    if isinstance(value, list):
        return " ".join(f"{item:.3f}" for item in value)
    return value


def data_hash():
    """Of all prepared files and of the number of rows that are scored."""
    described = json.dumps([_run.files, count_rows(_run.files)])
    return hashlib.sha256(described.encode()).hexdigest()[:8]


def write_record(block):
    """Writes the block, the hash of the training script and, as null, what is not known into RUNS:
    one JSON file per run, named by time, commit and seed."""
    if _run.record is None:
        moment = time.strftime("%Y%m%dT%H%M%S")
        _run.record = RUNS / f"{moment}_{_run.commit}_{SEED}_{os.getpid()}.json"
    record = dict.fromkeys(KEYS) | block | {"train": _run.train_sha256}
    with replacing(_run.record) as file:
        file.write(json.dumps(record, indent=1).encode() + b"\n")
    return _run.record


# ==== Part 2: what makes the cache ====


# ---- Manifest ----
def fingerprints(paths):
    """{path below ROOT: [bytes, sha256]}"""
    return {os.path.relpath(path, ROOT): [path.stat().st_size, sha256(path)] for path in paths}


def save_manifest(settings, choice, corpus=(), files=(), tokens=None):
    """Writes the manifest, as load_manifest describes it, of paths; returns it."""
    manifest = {
        "settings": settings,
        "choice": choice,
        "corpus": fingerprints(corpus),
        "files": fingerprints(files),
        "tokens": tokens or {},
        "rulers": [sha256(__file__)],
    }
    return write_manifest(manifest)


def write_manifest(manifest):
    """Writes the manifest, and returns it."""
    with replacing(ROOT / "manifest.json") as file:
        file.write(json.dumps(manifest, indent=1).encode() + b"\n")
    return manifest


# ---- Shards: parquet files with a column `text`; the last of a corpus is validation ----
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
    """Downloads one shard, unless it is there, resuming from `path`.part. It counts only if it is
    as long as announced and opens as a shard: a login page or a cut body never does. Raises
    ShardError with the reason."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        with contextlib.suppress(ShardError):
            check_shards([path])
            return
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
            return
        except requests.RequestException as error:
            reason = str(error).rpartition("Caused by ")[2][:160]
            if error.response is not None and error.response.status_code in HOPELESS:
                break
        except ShardError as error:
            reason = str(error).partition(";")[0]
            part.unlink(missing_ok=True)
    part.unlink(missing_ok=True)
    raise ShardError(f"{path.name} ({reason})")


def fetch(url, part, bar):
    """Appends to the file what it lacks of the body. Raises requests.RequestException, also if the
    body ends early."""
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
    """The shards of ClimbMix; downloads those missing. Ends the process if one cannot be."""
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


# ---- The embedded corpus: Python sources, which every installation holds ----
# The standard library's and these packages'.
PACKAGES = """
    filelock kernels matplotlib numpy pandas pyarrow requests tiktoken torch tqdm
""".split()
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests"}
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
        if name.suffix == ".py" and not SKIPPED_FOLDERS.intersection(name.parts):
            with contextlib.suppress(OSError, UnicodeDecodeError):
                sources.setdefault(file.read_bytes().decode(), name.as_posix())
    return sources


def is_held_out(name):
    """Whether a source file is for validation, by the hash of its relative path."""
    return int(hashlib.sha256(name.encode()).hexdigest()[:8], 16) < PYTHON_HELD_OUT * 2**32


def cut_at_lines(text):
    """Pieces of at most PYTHON_PIECE characters, cut after a newline if there is one."""
    piece = f".{{1,{PYTHON_PIECE}}}"  # .{1,2048}
    return re.findall(f"(?s){piece}\n|{piece}", text)


def python_corpus():
    """The shards of the embedded corpus; writes those missing. Files are cut into pieces, since
    most are longer than a row and packing would drop 35 of 38 million tokens; a hash shuffles."""
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
    """What a corpus is and how to get it."""

    settings: dict  # if they differ from the manifest's, everything is made again
    make_shards: Callable  # returns paths, the last is validation
    may_be_unreadable: bool = True


def choose_corpus(args):
    if args.data_dir:
        return own_corpus(Path(args.data_dir))
    default = by_profile(full="climbmix", medium="climbmix", small="python")
    if (args.corpus or default) == "climbmix":
        count = args.num_shards
        if not 0 <= count <= CLIMBMIX_VAL:
            count = CLIMBMIX_VAL
        return Corpus({"climbmix": count}, lambda: climbmix(count, args.download_workers))
    versions = {name: importlib.metadata.version(name) for name in PACKAGES}
    return Corpus({"python": sys.version} | versions, python_corpus, may_be_unreadable=False)


def own_corpus(folder):
    if not folder.is_dir():
        stop(f"{folder} is not a folder; give one with two or more *.parquet files.")
    files = sorted(folder.glob("*.parquet"))
    if len(files) < 2:
        stop(f"{folder} holds {len(files)} *.parquet files; give a folder of two or more.")
    described = [[f.name, f.stat().st_size, f.stat().st_mtime_ns] for f in files]
    return Corpus({"own_files": described}, lambda: files)


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


# ---- Token cache: documents are tokenised once, not in each of a night's hundred runs ----
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
    flats[shards[-1]] = ROOT / "val" / "tokens.u16"
    jobs = [TokenJob(tokenizer, shard, flat) for shard, flat in flats.items()]
    processes = min(os.cpu_count() or 1, len(jobs))
    with multiprocessing.get_context("spawn").Pool(processes, ignore_interrupts) as pool:
        done = pool.imap(write_tokens, jobs)
        for _ in tqdm(done, "tokenise", len(jobs), unit="shard", disable=None):
            pass
    return flats


def write_rows(flat):
    """Writes VAL_ROWS, the packed validation rows, uint16 [rows, MAX_SEQ_LEN + 1]."""
    wanted = PACKED_TOKENS // MAX_SEQ_LEN
    rows = list(itertools.islice(pack_rows(read_tokens(flat), MAX_SEQ_LEN + 1), wanted))
    count = len(rows) // EVAL_BATCH * EVAL_BATCH
    if count == 0:
        stop(
            f"the validation file, the last one, fills {len(rows)} rows, but {EVAL_BATCH} is the "
            "least; make it longer."
        )
    scored = EVAL_TOKENS // MAX_SEQ_LEN
    if count < scored:
        print(f"validation fills {len(rows)} rows: {count} are scored, not {scored}", flush=True)
    with replacing(ROOT / VAL_ROWS) as file:
        for row in rows[:count]:
            file.write(row.astype("<u2").tobytes())


# ---- Commands ----
CHOICE = ("corpus", "data_dir", "num_shards")  # options that say which corpus; they are remembered


def recipe():
    """All that what is derived from a corpus depends on, besides the corpus: if it changes, all is
    made again. A change of anything else in this file costs no second preparation."""
    makers = (
        Tokenizer,
        read_tokens,
        pack_rows,
        read_shard,
        python_sources,
        is_held_out,
        cut_at_lines,
        python_corpus,
        tokenizer_texts,
        train_tokenizer,
        write_tokens,
        write_all_tokens,
        write_rows,
    )
    code = "".join(inspect.getsource(maker) for maker in makers)
    return {
        "code": hashlib.sha256(code.encode()).hexdigest(),
        "libraries": {name: importlib.metadata.version(name) for name in ("rustbpe", "tiktoken")},
        "split_pattern": SPLIT,
        "special_tokens": SPECIAL_TOKENS,
        "vocab_size": VOCAB_SIZE,
        "tokenizer_chars": [TOKENIZER_DOC_CHARS, TOKENIZER_CHARS],
        "rows": [PACKED_TOKENS, MAX_SEQ_LEN, EVAL_BATCH, BUFFER_DOCS],
        "python": [PYTHON_PIECE, PYTHON_HELD_OUT, PYTHON_SHARDS, sorted(SKIPPED_FOLDERS)],
    }


def derived_files():
    """All that is made from a corpus or is the embedded one, whatever the manifest says."""
    patterns = (
        "tokenizer/*",
        "tokens/*",
        "val/*.u16",
        "val/*.bin",
        "val/*.npy",
        "*/python*.parquet",
    )
    return [path for pattern in patterns for path in ROOT.glob(pattern)]


def find_stale(manifest, settings):
    """What must go before the cache can be completed: what is damaged, left over from a killed
    process or, if the settings differ, all that was derived."""
    recorded = manifest["files"]
    if "own_files" not in manifest["settings"]:  # a user's own folder is not ours to delete
        recorded = manifest["corpus"] | recorded
    stale = find_damaged(recorded)
    stale += ROOT.rglob(".*.tmp")
    if settings != manifest["settings"]:
        stale += derived_files()
    return stale


def prepare(args):
    """Deletes what no longer fits the settings, then makes what is missing."""
    print(f"profile: {PROFILE}, {WHY_PROFILE}", flush=True)
    manifest = load_manifest()
    corpus = choose_corpus(args)
    settings = corpus.settings | recipe()
    choice = {key: vars(args)[key] for key in CHOICE}
    stale = find_stale(manifest, settings)
    if stale or not manifest["files"] or choice != manifest["choice"]:
        if corpus.may_be_unreadable:
            check_shards(corpus.make_shards())  # fails before anything is deleted
        for path in stale:
            path.unlink(missing_ok=True)
        manifest = build(corpus, settings, choice)
    elif sha256(__file__) not in manifest["rulers"]:
        manifest["rulers"].append(sha256(__file__))
        write_manifest(manifest)
    shards = len(manifest["corpus"])
    rows = count_rows(manifest["files"])
    print(
        f"ready: {PROFILE} profile, {shards} shards, {rows} validation rows; next: uv run train.py"
    )


def build(corpus, settings, choice):
    """Runs all stages, each of which skips what is there; returns the manifest."""
    save_manifest(settings, choice)  # no files: unfinished
    shards = corpus.make_shards()
    tokenizer = ROOT / "tokenizer" / "tokenizer.tiktoken"
    train_tokenizer(shards[:-1], tokenizer)
    flats = write_all_tokens(shards, tokenizer.parent)
    write_rows(flats[shards[-1]])
    offsets = [flat.with_suffix(".npy") for flat in flats.values()]
    tokens = {os.path.relpath(k, ROOT): os.path.relpath(v, ROOT) for k, v in flats.items()}
    files = [tokenizer, *flats.values(), *offsets, ROOT / VAL_ROWS]
    return save_manifest(settings, choice, shards, files, tokens)


VERIFIED_DOCS = 100  # documents per shard whose tokens are derived again


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
    """Prints every reason to distrust a score and exits with 3, or with 0 if there is none: hashes
    all files, tokenises samples again, compares prepare.py with the one that made the cache and
    with git, names files that nothing recorded."""
    manifest = load_manifest()
    if not manifest["files"]:
        stop(f"{ROOT} is not prepared; run `AUTORESEARCH_PROFILE={PROFILE} uv run prepare.py`.")
    recorded = manifest["corpus"] | manifest["files"]
    found = []
    if sha256(__file__) not in manifest["rulers"]:
        found.append("prepare.py is not the one that made this cache; restore it or prepare again")
    changed = git("status", "--porcelain", "prepare.py")  # None: git cannot tell
    if changed:
        found.append("prepare.py differs from the commit; `git restore prepare.py`")
    damaged = find_damaged(recorded, hash_all=True)
    for path in damaged:
        found.append(f"{path} is not as recorded; restore or delete it, then prepare again")
    if not damaged:
        tokenizer = Tokenizer.from_directory()
        for shard, flat in manifest["tokens"].items():
            if not is_text_of(ROOT / flat, ROOT / shard, tokenizer):
                found.append(f"{ROOT / flat} is not the text of {shard}; delete it, prepare again")
    for folder in ("data", "val", "tokens", "tokenizer"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.is_file() and os.path.relpath(path, ROOT) not in recorded:
                found.append(f"{path} is not recorded anywhere; move or delete it")
    if not found:
        print(f"verified: {len(recorded)} files" + (", prepare.py" if changed == "" else ""))
    for line in found:
        print(line)
    raise SystemExit(3 if found else 0)


def rerun(commit):
    """Trains a commit again, at SEED, in a clean copy: home, cache but for what was prepared,
    temporary and compiled files are its own; interpreter and HF_HOME are the caller's. Copies the
    record into RUNS and ends with the exit code of train.py. What train.py reads by an absolute
    path is left to a reader of the diff."""
    name = git("rev-parse", "--verify", "--short", f"{commit}^{{commit}}")
    if name is None:
        stop(f"{commit} is no commit of this folder; `git log --oneline` lists them.")
    check_cache()
    with tempfile.TemporaryDirectory(prefix="autoresearch-rerun-") as clean:
        tree, home, temporary, cache = (
            Path(clean, part) for part in ("tree", "home", "tmp", "cache")
        )
        root = cache / ROOT.relative_to(CACHE)
        for folder in (tree, home, temporary, root):
            folder.mkdir(parents=True)
        for part in ("manifest.json", "data", "val", "tokenizer", "tokens"):
            (root / part).symlink_to(ROOT / part)
        if (CACHE / "kernels").exists():
            (cache / "kernels").symlink_to(CACHE / "kernels")
        archive = ["git", "-C", Path(__file__).parent, "archive", name]
        with tarfile.open(fileobj=io.BytesIO(subprocess.check_output(archive))) as files:
            files.extractall(tree, filter="data")
        own = ("PYTHONPATH", "AUTORESEARCH_RUNS", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
        environment = {key: value for key, value in os.environ.items() if key not in own}
        environment |= {
            "HOME": str(home),
            "TMPDIR": str(temporary),
            "AUTORESEARCH_CACHE": str(cache),
            "AUTORESEARCH_COMMIT": name,
            "GIT_CEILING_DIRECTORIES": clean,  # the copy is in no repository
            "HF_HOME": os.environ.get("HF_HOME") or os.path.expanduser("~/.cache/huggingface"),
        }
        process = subprocess.Popen([sys.executable, "train.py"], cwd=tree, env=environment)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, frame: process.send_signal(number))
        code = process.wait()
        for record in (cache / "runs").glob("*.json"):
            with replacing(RUNS / record.name) as file:
                file.write(record.read_bytes())
    raise SystemExit(code if code >= 0 else 128 - code)


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
        help="default: python in the small profile, else climbmix",
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
    parser.add_argument(
        "--rerun", metavar="COMMIT", help="train it again, at SEED, in a clean copy"
    )
    args = parser.parse_args()
    if all(getattr(args, key) == parser.get_default(key) for key in CHOICE):
        vars(args).update(load_manifest()["choice"])  # none given: that of the cache
    return args


def main():
    args = parse_arguments()
    try:
        if args.verify:
            verify()
        if args.rerun:
            rerun(args.rerun)
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
        stop("interrupted; finished work is kept, run the same command to resume.", 130)


if __name__ == "__main__":
    main()
