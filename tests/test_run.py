"""Tests what train.py derives from its knobs, and how a run of it ends."""

import math
import os
import re
import runpy
import shutil
import sys
import timeit

import prepare
import train
from tests import common
from tests.common import GUARD
from tests.test_report import KEYS, parse_block
from tests.tiny import set_knobs
from tools import experiment

import numpy as np
import pytest
import torch


# ---- Knobs ----
def test_sizes_are_rounded_aloud(monkeypatch, capsys):
    set_knobs(monkeypatch, DEPTH=9, ASPECT_RATIO=57, HEAD_DIM=128, KV_HEADS=2)
    config = train.derive_config(100, torch.float32)
    assert (config.n_embd, config.n_head, config.n_kv_head, config.kv_dim) == (640, 5, 2, 256)
    assert capsys.readouterr().out.splitlines() == [
        "width: DEPTH * ASPECT_RATIO = 513 is rounded up to 640",
    ]


@pytest.mark.parametrize(
    ("pattern", "short", "depth", "every", "windows", "values"),
    [
        ("SSSL", 7, 6, 2, [7, 7, 7, 512, 7, 512], [1, 3, 5]),
        ("S", 7, 3, 2, [7, 7, 512], [0, 2]),
        ("NSSL", 7, 6, 2, [0, 7, 7, 512, 0, 512], [1, 3, 5]),
        ("N", 7, 3, 1, [0, 0, 512], [2]),
        ("SSSL", 0, 5, 3, [512] * 5, [1, 4]),
        ("SL", 7, 1, 0, [512], []),
        ("SL", 600, 2, 0, [512, 512], []),
    ],
)
def test_the_last_layer_is_never_short(monkeypatch, pattern, short, depth, every, windows, values):
    """Layers with value embeddings are counted from the last, and have attention."""
    set_knobs(monkeypatch, WINDOW_PATTERN=pattern, SHORT_WINDOW=short, DEPTH=depth, VE_EVERY=every)
    config = train.derive_config(100, torch.float32)
    assert (config.windows, config.value_layers) == (windows, values)


@pytest.mark.parametrize(
    ("knob", "value"),
    [
        ("TOTAL_BATCH_SIZE", 1000),
        ("TOTAL_BATCH_SIZE", 12 * 512),  # of which DEVICE_BATCH_SIZE, 8 rows, is no part
        ("WINDOW_PATTERN", ""),
        ("WINDOW_PATTERN", "S L"),
    ],
)
def test_a_knob_that_does_not_fit_is_refused(monkeypatch, capsys, knob, value):
    set_knobs(monkeypatch, **{knob: value})
    with pytest.raises(SystemExit, match="2"):
        train.derive_config(100, torch.float32)
        train.warm_up(None, None, False)
    assert capsys.readouterr().err.startswith(f"error: {knob} = {value!r} must ")


@pytest.mark.parametrize(
    ("device", "has", "dtype"),
    [
        ("cpu", {torch.float32: 2, torch.bfloat16: 1}, torch.bfloat16),
        ("cpu", {torch.float32: 1, torch.bfloat16: 2}, torch.float32),
        ("cpu", {torch.float32: 1, torch.bfloat16: 0.9}, torch.float32),  # noise may decide
        ("mps", {torch.float32: 2, torch.bfloat16: 1}, torch.float32),  # for the CPU
        ("cuda", (7, 5), torch.float16),
        ("cuda", (8, 0), torch.bfloat16),
    ],
)
def test_a_device_computes_in_bf16_where_that_is_fast(monkeypatch, device, has, dtype):
    """`has` are the seconds of a CPU's product, or a GPU's capability."""
    monkeypatch.setattr(timeit, "repeat", lambda product, number, repeat: [9, has[product().dtype]])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: has)
    set_knobs(monkeypatch, DEVICE=torch.device(device))
    assert train.choose_dtype() == dtype


# ---- A run that ends with a score ----
@pytest.fixture(scope="module")
def good(cache, tmp_path_factory):
    """Runs train.py as under some engines: without git and network, and with a cache and a folder
    that are read-only. `changed` says whether one of them did change."""
    folder = tmp_path_factory.mktemp("good")
    theirs = folder / "theirs"
    shutil.copytree(prepare.PREPARED, theirs / "cache" / prepare.PREPARED.name)
    script = common.edited(theirs / "code")
    (theirs / "sitecustomize.py").write_text(GUARD)
    (folder / "reach.py").write_text("import socket; socket.getaddrinfo('localhost', 80)")
    assert common.run_script(folder / "reach.py", PYTHONPATH=theirs).returncode == 99
    files = [theirs, *theirs.rglob("*")]
    times = [path.stat().st_mtime_ns for path in files]
    for path in files:
        path.chmod(0o555 if path.is_dir() else 0o444)
    as_user = ("setpriv", "--bounding-set=-dac_override") if os.geteuid() == 0 else ()
    told = {"AUTORESEARCH_CACHE": theirs / "cache", "AUTORESEARCH_RUNS": folder / "mine"}
    told |= {"AUTORESEARCH_COMMIT": "abc1234", "PYTHONPATH": theirs}
    done = common.train(script, prefix=as_user, **told)
    done.changed = times != [path.stat().st_mtime_ns for path in files]  # folders change with files
    for path in files:
        path.chmod(0o755)
    return done


def test_a_run_ends_with_a_block_and_a_record_and_leaves_nothing_else(good):
    assert good.returncode == 0 and not good.changed, good.output
    block = parse_block(good.stdout)
    own = "num_steps num_params_M flops_per_token depth attention".split()
    assert list(block) == [*KEYS, *own, "integrity"]
    assert block["integrity"] == "ok"
    assert 0 < float(block["training_seconds"]) <= 2.01
    [record] = good.records
    assert block["val_bpb"] == f"{record['val_bpb']:.6f}"
    assert record["total_tokens_M"] == pytest.approx((record["num_steps"] * 2048 + 2048) / 1e6)
    found = [record[key] for key in ("time_budget", "depth", "attention", "commit")]
    assert found == [1, 2, "blocks", "abc1234"]
    # It has learned:
    rows = np.fromfile(prepare.PREPARED / prepare.ROWS_FILE, "<u2")
    table = prepare.Tokenizer.from_directory().token_bytes
    untrained = math.log2(len(table)) * np.count_nonzero(table[rows]) / table[rows].sum()
    assert 0.5 < record["val_bpb"] < 0.95 * untrained
    assert 0 < record["curve"][-1] < math.log(len(table))


def test_the_nights_tool_reads_what_a_run_prints(good, tmp_path):
    log = tmp_path / "run.log"
    log.write_text(f"commit abc1234, after 0 rows, at 1764360000\n{good.output}\nexit 0\n")
    run = experiment.Log(log)
    assert (run.commit, run.code, run.problem) == ("abc1234", 0, None)
    for key in (*experiment.SHOWN, *experiment.MUST_AGREE):
        assert run.block[key] not in ("", "None"), key
    for key in ("total_tokens_M", "num_steps", "flops_per_token", "peak_vram_mb"):
        assert run.number(key) > 0, key


# ---- Runs that end without one ----
START = "    start()\n"


@pytest.mark.parametrize(
    ("arguments", "begin", "code", "says"),
    [
        (["--help"], "", 2, "train.py takes no arguments; .*"),
        ([], f"{START}    sys.exit('it starts')\n", 2, "this folder has a run already; .*"),
        ([], "    torch.empty(2**50)\n", 5, "RuntimeError: .* allocate memory.*; lower DEPTH, .*"),
    ],
)
def test_a_run_that_cannot_be_ends_with_a_sentence(
    cache, tmp_path, monkeypatch, capsys, arguments, begin, code, says
):
    """Another run has locked the folder, and `git reset` has since replaced train.py. The script
    runs in this process."""
    assert prepare.lock(tmp_path)
    script = tmp_path / "train.py"
    script.write_text((common.ROOT / "train.py").read_text().replace(START, begin))
    prepare.begin_run.cache_clear()
    monkeypatch.setattr(sys, "argv", [str(script), *arguments])
    with pytest.raises(SystemExit, match=str(code)):
        runpy.run_path(str(script), run_name="__main__")
    assert re.fullmatch(f"error: {says}\n", capsys.readouterr().err)
