"""Tests the values that train.py derives from knobs, and that it refuses arguments."""

import train
from tests.tiny import set_knobs

import pytest
import torch


def test_a_batch_is_divided_into_rows_and_micro_batches(monkeypatch, capsys):
    set_knobs(monkeypatch, TOTAL_BATCH_SIZE=12 * 512)
    rows = [train.rows_at_a_time(at_most) for at_most in (1, 3, 5, 8, 11, 12, 99)]
    assert rows == [1, 3, 4, 6, 6, 12, 12]
    assert [train.accumulation_steps(rows) for rows in (1, 4, 12)] == [12, 3, 1]
    set_knobs(monkeypatch, TOTAL_BATCH_SIZE=1000)
    with pytest.raises(SystemExit, match="2"):
        train.rows_at_a_time(8)
    error = capsys.readouterr().err
    assert error == "error: TOTAL_BATCH_SIZE = 1000 must be a multiple of 512 tokens.\n"


@pytest.mark.parametrize(
    ("batch", "at_most", "rows"), [(256, 96, 64), (251, 8, 1), (256, 64, 64), (4, 8, 4)]
)
def test_rows_are_rounded_aloud(monkeypatch, capsys, batch, at_most, rows):
    """A batch smaller than DEVICE_BATCH_SIZE is no rounding."""
    set_knobs(monkeypatch, TOTAL_BATCH_SIZE=batch * 512)
    assert train.rows_at_a_time(at_most) == rows
    said = f"rows at a time: {at_most} is rounded down to {rows}, which divides {batch} per step\n"
    assert capsys.readouterr().out == (said if rows < min(at_most, batch) else "")


def test_width_is_rounded_aloud(monkeypatch, capsys):
    set_knobs(monkeypatch, DEPTH=9, ASPECT_RATIO=57, HEAD_DIM=128)
    assert train.derive_config(100, torch.float32).n_embd == 640
    assert capsys.readouterr().out == "width: DEPTH * ASPECT_RATIO = 513 is rounded up to 640\n"
    set_knobs(monkeypatch, DEPTH=4, ASPECT_RATIO=64, HEAD_DIM=64)
    for kv_heads, derived in ((0, 4), (1, 1), (2, 2)):
        set_knobs(monkeypatch, KV_HEADS=kv_heads)
        config = train.derive_config(100, torch.float32)
        assert (config.n_head, config.n_kv_head, config.kv_dim) == (4, derived, derived * 64)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("pattern", "short", "depth", "windows"),
    [
        ("SSSL", 7, 6, [7, 7, 7, 512, 7, 512]),
        ("S", 7, 3, [7, 7, 512]),
        ("L", 7, 3, [512, 512, 512]),
        ("SSSSSSL", 7, 2, [7, 512]),
        ("SL", 7, 1, [512]),
        ("SSSL", 0, 6, [512] * 6),
    ],
)
def test_the_windows_follow_the_pattern_and_the_last_layer_sees_everything(
    monkeypatch, pattern, short, depth, windows
):
    set_knobs(monkeypatch, WINDOW_PATTERN=pattern, SHORT_WINDOW=short, DEPTH=depth)
    assert train.derive_config(100, torch.float32).windows == windows


@pytest.mark.parametrize("pattern", ["", "sssl", "SSXL", "S L"])
def test_a_pattern_of_other_letters_is_refused(monkeypatch, capsys, pattern):
    set_knobs(monkeypatch, WINDOW_PATTERN=pattern)
    with pytest.raises(SystemExit, match="2"):
        train.derive_config(100, torch.float32)
    error = capsys.readouterr().err
    assert error == f"error: WINDOW_PATTERN = {pattern!r} must consist of S and L; change it.\n"


@pytest.mark.parametrize(
    ("every", "depth", "layers"), [(0, 6, []), (2, 6, [1, 3, 5]), (2, 5, [0, 2, 4]), (3, 5, [1, 4])]
)
def test_value_embeddings_are_on_every_nth_layer_counted_from_the_last(
    monkeypatch, every, depth, layers
):
    set_knobs(monkeypatch, VE_EVERY=every, DEPTH=depth, ASPECT_RATIO=64, HEAD_DIM=64)
    model = train.GPT(train.derive_config(10, torch.float32), None)
    assert list(model.value_embeddings) == [str(layer) for layer in layers]
    gated = [i for i, block in enumerate(model.blocks) if block.attention.gate is not None]
    assert gated == layers


@pytest.mark.parametrize(
    ("device", "has", "dtype"),
    [
        ("cpu", {"avx512_bf16": False, "amx_bf16": False}, torch.float32),
        ("cpu", {"avx512_bf16": True}, torch.bfloat16),
        ("cpu", {"amx_bf16": True}, torch.bfloat16),
        ("cuda", (7, 5), torch.float16),
        ("cuda", (8, 0), torch.bfloat16),
    ],
)
def test_a_device_computes_in_bf16_where_it_has_it(monkeypatch, device, has, dtype):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: has)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: has)
    assert train.choose_dtype(torch.device(device)) == dtype


def test_an_argument_is_refused(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["train.py", "--help"])
    with pytest.raises(SystemExit, match="2"):
        train.main()
    assert "train.py takes no arguments" in capsys.readouterr().err
