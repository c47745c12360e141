"""Loader and clock: what training is served, and what its time counts from."""

import itertools
import sys
import time
import types

import prepare
from tests.common import run_script

import numpy as np
import pytest
import torch


# ---- Loader ----
def first_rows(B, count):
    loader = prepare.make_dataloader(None, B, 64)
    return np.concatenate([np.asarray(next(loader)[0]) for _ in range(count // B)])


def test_rows_do_not_depend_on_the_batch_size(cache, fresh_run):
    assert (first_rows(1, 24) == first_rows(8, 24)).all()
    assert (first_rows(3, 24) == first_rows(24, 24)).all()


def test_batches_are_shifted_fresh_and_begin_with_bos(cache, fresh_run):
    tokenizer = prepare.Tokenizer.from_directory()
    loader = prepare.make_dataloader(tokenizer, 4, 64)
    x, y, epoch = next(loader)
    kept = x.clone()
    assert x.shape == y.shape == (4, 64) and x.dtype == y.dtype == torch.int64
    assert (x[:, 1:] == y[:, :-1]).all() and epoch == 1
    assert (x[:, 0] == tokenizer.get_bos_token_id()).all()
    y.zero_()
    next(loader)
    assert (x == kept).all()


@pytest.mark.parametrize("B", [1, 3])
def test_inputs_and_targets_never_share_memory(cache, fresh_run, B):
    x, y, _ = next(prepare.make_dataloader(None, B, 64))
    before = y.clone()
    x.fill_(0)
    assert torch.equal(y, before) and x.is_contiguous() and y.is_contiguous()


def test_rows_are_those_of_the_token_files(cache, fresh_run):
    flats = [prepare.ROOT / "tokens" / f"shard_0000{i}.bin" for i in (0, 1)]  # SEED is even
    documents = itertools.chain.from_iterable(map(prepare.read_tokens, flats))
    packed = np.stack(list(itertools.islice(prepare.pack_rows(documents, 65), 24)))
    assert (first_rows(8, 24) == packed[:, :-1]).all()


def test_the_loader_goes_round(cache, fresh_run):
    batches = itertools.islice(prepare.make_dataloader(None, 64, 512), 40)
    epochs = [epoch for _, _, epoch in batches]
    assert epochs[0] == 1 and epochs[-1] > 2 and epochs == sorted(epochs)


def test_seed_rotates_the_shards(cache, fresh_run, monkeypatch):
    before = first_rows(8, 8)
    monkeypatch.setattr(prepare, "SEED", prepare.SEED + 1)
    assert (first_rows(8, 8) != before).any()


def test_validation_rows_are_not_served():
    with pytest.raises(ValueError, match="only evaluate_bpb reads"):
        prepare.make_dataloader(None, 1, 64, split="val")


def test_a_spoiled_cache_is_not_served(own_cache, fresh_run, capsys):
    (prepare.ROOT / "tokens/shard_00000.npy").unlink()
    with pytest.raises(SystemExit) as stop:
        prepare.make_dataloader(None, 1, 64)
    assert stop.value.code == 2 and "shard_00000.npy is missing" in capsys.readouterr().err


# Loader, metric and report in a program that is no file.
PROGRAM = """
import prepare
from tests.models import Whole

tokenizer = prepare.Tokenizer.from_directory()
batches = prepare.make_dataloader(tokenizer, 4, 64)
inputs, targets, epoch = next(batches)
val_bpb = prepare.evaluate_bpb(Whole(tokenizer.get_vocab_size()), tokenizer, 32)
path = prepare.report(val_bpb, num_steps=1, total_tokens=inputs.numel(), flops_per_token=1)
print(prepare.json.loads(path.read_text())["train"])
"""


def test_the_ruler_works_under_python_c(cache, tmp_path):
    done = run_script("-c", PROGRAM, AUTORESEARCH_RUNS=tmp_path)
    assert done.returncode == 0, done.output
    assert "\nval_bpb: " in done.stdout and done.stdout.endswith("\nnone\n")
    assert len(list(tmp_path.glob("*.json"))) == 1


@pytest.mark.parametrize("file", [None, "<stdin>"])
def test_the_loader_works_in_a_notebook_and_in_python_on_stdin(cache, fresh_run, monkeypatch, file):
    """Whose __main__ has no file either."""
    main = types.ModuleType("__main__")
    if file:
        main.__file__ = file
    monkeypatch.setitem(sys.modules, "__main__", main)
    next(prepare.make_dataloader(None, 1, 64))
    assert fresh_run.train_sha256 == "none"


# ---- Clock ----
def test_the_first_batch_starts_the_clock_and_everything_after_counts(cache, fresh_run):
    loader = prepare.make_dataloader(None, 1, 64)
    time.sleep(0.05)
    assert prepare.elapsed() == 0.0
    next(loader)
    begun = prepare.elapsed()
    time.sleep(0.05)
    next(prepare.make_dataloader(None, 1, 64))  # a second loader does not start it again
    assert begun < 0.05 <= prepare.elapsed()


def test_the_clock_ignores_a_patched_time(cache, fresh_run, monkeypatch):
    next(prepare.make_dataloader(None, 1, 64))
    monkeypatch.setattr(time, "time", lambda: 0.0)
    monkeypatch.setattr(time, "monotonic", lambda: 0.0)
    time.sleep(0.02)
    assert prepare.elapsed() >= 0.02


@pytest.mark.parametrize("sizes", [(0, 64, 10), (4, 0, 10), (4, 64, 0)])
def test_sizes_below_one_get_a_sentence(cache, fresh_run, sizes):
    B, T, buffer_size = sizes
    with pytest.raises(ValueError, match="above 0, not"):
        prepare.make_dataloader(None, B, T, buffer_size=buffer_size)
