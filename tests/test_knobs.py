"""What train.py derives from its knobs, and how a run is called."""

import prepare
import train
from tests.tiny import set_knobs

import pytest
import torch


# ---- Values that cannot be ----
@pytest.mark.parametrize(("total", "rows"), [(1000, 3), (2**12, 5), (2**12 - 1, 1), (512, 8)])
def test_an_indivisible_batch_names_both_numbers(monkeypatch, capsys, total, rows):
    set_knobs(monkeypatch, TOTAL_BATCH_SIZE=total)
    with pytest.raises(SystemExit) as stop:
        train.accumulation_steps(rows)
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert f"TOTAL_BATCH_SIZE = {total} " in error
    assert f"not a multiple of {rows} rows of {prepare.MAX_SEQ_LEN} tokens; change it" in error


def test_a_divisible_batch_is_counted_in_micro_batches(monkeypatch):
    set_knobs(monkeypatch, TOTAL_BATCH_SIZE=12 * prepare.MAX_SEQ_LEN)
    assert [train.accumulation_steps(rows) for rows in (1, 2, 3, 4, 6, 12)] == [12, 6, 4, 3, 2, 1]


# ---- Derived values ----


def test_width_is_rounded_aloud(monkeypatch, capsys):
    set_knobs(monkeypatch, DEPTH=9, ASPECT_RATIO=57, HEAD_DIM=128)
    assert train.derive_config(100).n_embd == 640
    assert capsys.readouterr().out == "width: DEPTH * ASPECT_RATIO = 513 is rounded up to 640\n"


@pytest.mark.parametrize(("kv_heads", "derived"), [(0, 4), (1, 1), (2, 2), (4, 4)])
def test_key_value_heads_are_those_asked_for_or_one_per_query_head(monkeypatch, kv_heads, derived):
    set_knobs(monkeypatch, DEPTH=4, ASPECT_RATIO=64, HEAD_DIM=64, KV_HEADS=kv_heads)
    config = train.derive_config(100)
    assert config.n_kv_head == derived
    assert config.kv_dim == derived * 64


@pytest.mark.parametrize(
    ("pattern", "short", "depth", "windows"),
    [
        ("SSSL", 7, 6, [7, 7, 7, 512, 7, 512]),
        ("SSSL", 7, 4, [7, 7, 7, 512]),
        ("S", 7, 3, [7, 7, 512]),
        ("L", 7, 3, [512, 512, 512]),
        ("SL", 7, 1, [512]),
        ("SSSL", 0, 6, [512] * 6),
        ("SSSL", 512, 6, [512] * 6),
    ],
)
def test_the_windows_follow_the_pattern_and_the_last_layer_sees_everything(
    monkeypatch, pattern, short, depth, windows
):
    set_knobs(monkeypatch, WINDOW_PATTERN=pattern, SHORT_WINDOW=short, DEPTH=depth)
    assert train.derive_config(100).windows == windows


@pytest.mark.parametrize(
    ("every", "depth", "layers"),
    [
        (0, 6, []),
        (1, 3, [0, 1, 2]),
        (2, 6, [1, 3, 5]),
        (2, 5, [0, 2, 4]),
        (3, 6, [2, 5]),
        (3, 5, [1, 4]),
        (9, 5, [4]),
    ],
)
def test_value_embeddings_are_on_every_nth_layer_counted_from_the_last(
    monkeypatch, every, depth, layers
):
    set_knobs(monkeypatch, VE_EVERY=every, DEPTH=depth, ASPECT_RATIO=64, HEAD_DIM=64)
    config = train.derive_config(10)
    assert config.value_layers == layers
    model = train.GPT(config, None)
    assert list(model.value_embeddings) == [str(layer) for layer in layers]
    gated = [i for i, block in enumerate(model.blocks) if block.attention.gate is not None]
    assert gated == layers


# ---- Precision ----
@pytest.mark.parametrize(
    ("capabilities", "dtype"),
    [
        ({}, torch.float32),
        ({"avx2": True, "avx512_bf16": False, "amx_bf16": False}, torch.float32),
        ({"avx512_bf16": True}, torch.bfloat16),
        ({"amx_bf16": True}, torch.bfloat16),
    ],
)
def test_a_cpu_computes_in_bf16_where_it_has_it(monkeypatch, capabilities, dtype):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    assert train.choose_dtype(torch.device("cpu")) == dtype


@pytest.mark.parametrize(
    ("capability", "dtype"), [((7, 5), torch.float16), ((8, 0), torch.bfloat16)]
)
def test_a_gpu_computes_in_bf16_from_ampere_on_and_else_in_fp16(monkeypatch, capability, dtype):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert train.choose_dtype(torch.device("cuda")) == dtype


# ---- How a run is called and how it ends ----
def test_an_argument_is_refused(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["train.py", "--help"])
    with pytest.raises(SystemExit) as stop:
        train.main()
    assert stop.value.code == 2
    assert "train.py takes no arguments" in capsys.readouterr().err
