"""Tests loader and clock: which batches training gets, and when its time starts."""

import itertools
import sys
import time
import types

import prepare

import numpy as np
import pytest
import torch


# ---- Loader ----
def first_rows(B, count):
    loader = prepare.make_dataloader(None, B, 64)
    return np.concatenate([np.asarray(next(loader)[0]) for _ in range(count // B)])


def test_rows_do_not_depend_on_the_batch_size(cache, fresh_run):
    assert (first_rows(1, 24) == first_rows(8, 24)).all()


@pytest.mark.parametrize("B", [1, 4])
def test_batches_are_shifted_fresh_and_begin_with_bos(cache, fresh_run, B):
    """Inputs and targets share no memory, even with one row."""
    tokenizer = prepare.Tokenizer.from_directory()
    loader = prepare.make_dataloader(tokenizer, B, 64)
    x, y, epoch = next(loader)
    kept = x.clone()
    assert x.shape == y.shape == (B, 64) and x.dtype == y.dtype == torch.int64
    assert x.is_contiguous() and y.is_contiguous()
    assert (x[:, 1:] == y[:, :-1]).all() and epoch == 1
    assert (x[:, 0] == tokenizer.get_bos_token_id()).all()
    y.zero_()
    next(loader)
    assert (x == kept).all()


@pytest.mark.parametrize("seed", [42, 43])
def test_rows_are_the_documents_of_the_shards_rotated_by_the_seed(
    cache, corpus, fresh_run, monkeypatch, seed
):
    monkeypatch.setattr(prepare, "SEED", seed)
    tokenizer = prepare.Tokenizer.from_directory()
    names = [f"shard_0000{(seed + i) % 2}.parquet" for i in range(2)] * 2  # two epochs
    texts = itertools.chain.from_iterable(prepare.read_shard(corpus / name) for name in names)
    rows = prepare.pack_rows(map(tokenizer.encode_document, texts), 513)
    packed = np.stack([row[:-1] for row in itertools.islice(rows, 640)])
    batches = itertools.islice(prepare.make_dataloader(None, 64, 512), 10)
    served, epochs = zip(*[(np.asarray(inputs), epoch) for inputs, _, epoch in batches])
    assert (np.concatenate(served) == packed).all()
    assert epochs[0] == 1 and epochs[-1] == 2 and list(epochs) == sorted(epochs)


def test_validation_rows_are_not_served():
    with pytest.raises(ValueError, match="evaluate_bpb"):
        prepare.make_dataloader(None, 1, 64, split="val")


@pytest.mark.parametrize("file", [None, "<stdin>"])
def test_the_loader_works_in_a_notebook_and_in_python_on_stdin(cache, fresh_run, monkeypatch, file):
    """Their __main__ has no file."""
    main = types.ModuleType("__main__")
    if file:
        main.__file__ = file
    monkeypatch.setitem(sys.modules, "__main__", main)
    next(prepare.make_dataloader(None, 1, 64))
    assert fresh_run.served == 64


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
