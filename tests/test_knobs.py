"""What train.py derives from its knobs, the sentence for each value that cannot be, and how a run
is called."""

import math

import prepare
import train
from tests.tiny import set_knobs

import pytest
import torch

NAN = math.nan


# ---- Values that cannot be ----
COUNTS = """
    DEPTH HEAD_DIM VE_GATE_CHANNELS TOTAL_BATCH_SIZE DEVICE_BATCH_SIZE CPU_QUERY_BLOCK
""".split()
POSITIVE = "ASPECT_RATIO MLP_RATIO ROPE_BASE EPS".split()
COUNTS_OR_OFF = "KV_HEADS SHORT_WINDOW VE_EVERY".split()
ZERO_IS_OFF = "WEIGHT_DECAY MOMENTUM_STEPS".split()
SHARES = "WARMUP_RATIO WARMDOWN_RATIO FINAL_LR_FRAC".split()
IMPOSSIBLE = [
    *(
        (knob, value, "it must be a whole number above 0.")
        for knob in COUNTS
        for value in (0, -1, NAN, 2.5, 64.0)
    ),
    *(
        (knob, value, "it must be a whole number, 0 or above.")
        for knob in COUNTS_OR_OFF
        for value in (-1, NAN, 2.5, 64.0)
    ),
    *((knob, value, "it must be above 0.") for knob in POSITIVE for value in (0, -1, NAN)),
    *((knob, value, "it must be 0 or above.") for knob in ZERO_IS_OFF for value in (-1, -0.5, NAN)),
    *(
        (knob, value, "it must be a share, from 0 to 1.")
        for knob in SHARES
        for value in (-0.1, 1.5, NAN)
    ),
    ("HEAD_DIM", 33, "the rotation needs an even number."),
    ("HEAD_DIM", 1, "the rotation needs an even number."),
    ("WINDOW_PATTERN", "", "it is made of the letters S and L."),
    ("WINDOW_PATTERN", "SXL", "it is made of the letters S and L."),
    ("WINDOW_PATTERN", "ssl", "it is made of the letters S and L."),
    ("ATTENTION", "nonsense", "choose auto or one of fa3, varlen, blocks, sdpa."),
    ("ATTENTION", "", "choose auto or one of fa3, varlen, blocks, sdpa."),
    ("ATTENTION", None, "choose auto or one of fa3, varlen, blocks, sdpa."),
]
NAMES = [f"{knob}={value!r}" for knob, value, _ in IMPOSSIBLE]


@pytest.mark.parametrize(("knob", "value", "fix"), IMPOSSIBLE, ids=NAMES)
def test_an_impossible_value_gets_one_sentence(monkeypatch, capsys, knob, value, fix):
    set_knobs(monkeypatch, **{knob: value})
    with pytest.raises(SystemExit) as stop:
        train.check_knobs()
        train.derive_config(61)
    said = capsys.readouterr()
    assert stop.value.code == 2
    assert said.err == f"error: {knob} = {value!r}; {fix}\n"
    assert said.out == ""


def test_the_values_at_the_edge_are_possible(monkeypatch, capsys):
    train.check_knobs()
    set_knobs(monkeypatch, **dict.fromkeys([*COUNTS_OR_OFF, *ZERO_IS_OFF, "LOGIT_SOFTCAP"], 0))
    for edge in (0, 1):
        set_knobs(monkeypatch, **dict.fromkeys(SHARES, edge))
        train.check_knobs()
    for name in ("auto", *train.BACKENDS):
        set_knobs(monkeypatch, ATTENTION=name)
        train.check_knobs()
    said = capsys.readouterr()
    assert said.out == said.err == ""


@pytest.mark.parametrize(("total", "rows"), [(1000, 3), (2**12, 5), (2**12 - 1, 1), (512, 8)])
def test_an_indivisible_batch_names_both_numbers(monkeypatch, capsys, total, rows):
    set_knobs(monkeypatch, TOTAL_BATCH_SIZE=total, DEVICE_BATCH_SIZE=rows)
    for check in (train.check_knobs, lambda: train.accumulation_steps(rows)):
        with pytest.raises(SystemExit) as stop:
            check()
        assert stop.value.code == 2
        assert capsys.readouterr().err == (
            f"error: TOTAL_BATCH_SIZE = {total} is not a multiple of DEVICE_BATCH_SIZE * "
            f"MAX_SEQ_LEN = {rows} * {prepare.MAX_SEQ_LEN} = {rows * prepare.MAX_SEQ_LEN}; "
            "change one of the first two.\n"
        )


def test_a_divisible_batch_is_counted_in_micro_batches(monkeypatch):
    set_knobs(monkeypatch, TOTAL_BATCH_SIZE=12 * prepare.MAX_SEQ_LEN)
    assert [train.accumulation_steps(rows) for rows in (1, 2, 3, 4, 6, 12)] == [12, 6, 4, 3, 2, 1]


@pytest.mark.parametrize(
    ("knobs", "sentence"),
    [
        ({"KV_HEADS": 3}, "KV_HEADS = 3 does not divide the 4 heads; choose a divisor."),
        ({"KV_HEADS": 8}, "KV_HEADS = 8 does not divide the 4 heads; choose a divisor."),
        (
            {"VE_GATE_CHANNELS": 257},
            "VE_GATE_CHANNELS = 257 is more than the width, 256; lower it.",
        ),
    ],
)
def test_a_shape_that_cannot_be_gets_one_sentence(monkeypatch, capsys, knobs, sentence):
    set_knobs(monkeypatch, DEPTH=4, ASPECT_RATIO=64, HEAD_DIM=64)
    set_knobs(monkeypatch, **knobs)
    with pytest.raises(SystemExit) as stop:
        train.derive_config(100)
    assert stop.value.code == 2
    assert capsys.readouterr().err == f"error: {sentence}\n"


def test_a_gate_that_does_not_exist_may_be_wider_than_the_model(monkeypatch):
    set_knobs(monkeypatch, DEPTH=1, ASPECT_RATIO=16, HEAD_DIM=16, VE_EVERY=0)
    assert train.derive_config(100).n_embd == 16 < train.VE_GATE_CHANNELS


# ---- Derived values ----
def test_a_width_of_whole_heads_is_taken_as_it_is(monkeypatch, capsys):
    set_knobs(monkeypatch, DEPTH=4, ASPECT_RATIO=64, HEAD_DIM=64)
    config = train.derive_config(100)
    assert (config.n_embd, config.n_head, config.head_dim) == (256, 4, 64)
    assert (config.vocab_size, config.sequence_len) == (100, prepare.MAX_SEQ_LEN)
    assert len(config.windows) == 4
    assert capsys.readouterr().out == ""


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
        ("SSSL", 7, 6, (7, 7, 7, 512, 7, 512)),
        ("SSSL", 7, 4, (7, 7, 7, 512)),
        ("S", 7, 3, (7, 7, 512)),
        ("L", 7, 3, (512, 512, 512)),
        ("SL", 7, 1, (512,)),
        ("SSSL", 0, 6, (512,) * 6),
        ("SSSL", 512, 6, (512,) * 6),
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
        (0, 6, ()),
        (1, 3, (0, 1, 2)),
        (2, 6, (1, 3, 5)),
        (2, 5, (0, 2, 4)),
        (3, 6, (2, 5)),
        (3, 5, (1, 4)),
        (9, 5, (4,)),
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
    assert tuple(gated) == layers


# ---- Precision ----
@pytest.mark.parametrize(
    ("capabilities", "dtype", "why"),
    [
        ({}, torch.float32, "neither AVX512-BF16 nor AMX"),
        ({"avx512_bf16": False, "amx_bf16": False}, torch.float32, "neither AVX512-BF16 nor AMX"),
        ({"avx2": True}, torch.float32, "neither AVX512-BF16 nor AMX"),
        ({"avx512_bf16": True}, torch.bfloat16, "avx512_bf16"),
        ({"avx512_bf16": True, "amx_bf16": True}, torch.bfloat16, "avx512_bf16, amx_bf16"),
    ],
)
def test_a_cpu_computes_in_bf16_where_it_has_it(monkeypatch, capabilities, dtype, why):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    assert train.choose_dtype(torch.device("cpu")) == (dtype, why)


@pytest.mark.parametrize(
    ("capability", "dtype"),
    [((7, 5), torch.float32), ((8, 0), torch.bfloat16), ((12, 0), torch.bfloat16)],
)
def test_a_gpu_computes_in_bf16_from_ampere_on(monkeypatch, capability, dtype):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    chosen, why = train.choose_dtype(torch.device("cuda"))
    assert chosen == dtype
    assert why == "compute capability {}.{}".format(*capability)


def test_an_apple_chip_computes_in_fp32():
    chosen, _ = train.choose_dtype(torch.device("mps"))
    assert chosen == torch.float32


# ---- How a run is called and how it ends ----
def test_an_argument_is_refused(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["train.py", "--help"])
    with pytest.raises(SystemExit) as stop:
        train.main()
    assert stop.value.code == 2
    assert "train.py takes no arguments" in capsys.readouterr().err


def test_memory_that_runs_out_late_gets_one_sentence(monkeypatch, capsys):
    def run():
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("sys.argv", ["train.py"])
    set_knobs(monkeypatch, run=run)
    with pytest.raises(SystemExit) as stop:
        train.main()
    assert stop.value.code == 5
    sentence = "out of memory; lower DEVICE_BATCH_SIZE, DEPTH or ASPECT_RATIO."
    assert capsys.readouterr().err == f"error: {sentence}\n"


def test_the_knobs_are_checked_before_anything_is_read(monkeypatch, capsys):
    """A cache that is not there, or a model, would be the second thing to say."""

    def too_early(*arguments):
        raise AssertionError("before the knobs were checked")

    set_knobs(monkeypatch, start=lambda: torch.device("cpu"), DEPTH=0)
    set_knobs(monkeypatch, Tokenizer=too_early, GPT=too_early, make_dataloader=too_early)
    with pytest.raises(SystemExit):
        train.run()
    assert capsys.readouterr().err == "error: DEPTH = 0; it must be a whole number above 0.\n"
