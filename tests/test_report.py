"""What the ruler says of a run: its start, progress, flags, final block and record."""

import json
import math
import os
import sys
import time

import prepare
import train
from tests.models import Whole

import numpy as np
import pytest
import torch


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """The folder of records, this test's own."""
    monkeypatch.setattr(prepare, "RUNS", tmp_path / "runs")
    return tmp_path / "runs"


@pytest.fixture
def script(monkeypatch):
    """train.py is the script that runs."""
    monkeypatch.setitem(sys.modules, "__main__", train)


@pytest.fixture
def whole(cache, runs):
    return Whole(prepare.Tokenizer.from_directory().get_vocab_size())


# ---- Start ----
def test_a_run_notes_once_what_runs_on_what(cache, fresh_run, script, monkeypatch):
    prepare.begin_run()
    assert fresh_run.files == prepare.load_manifest()["files"]
    assert fresh_run.train_sha256 == prepare.sha256(train.__file__)
    assert fresh_run.commit == prepare.current_commit()
    assert fresh_run.device == torch.device("cpu") and fresh_run.other_processes == []
    monkeypatch.setattr(prepare, "current_commit", lambda: "a later commit")
    prepare.begin_run()
    assert fresh_run.commit != "a later commit"


def test_a_run_that_can_write_no_record_ends_before_it_begins(
    cache, fresh_run, tmp_path, monkeypatch, capsys
):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setattr(prepare, "RUNS", tmp_path / "file" / "runs")
    with pytest.raises(SystemExit) as stop:
        prepare.start()
    assert stop.value.code == 2 and "set AUTORESEARCH_RUNS" in capsys.readouterr().err


def test_the_commit_is_that_of_git_or_of_the_environment(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, "__file__", str(tmp_path / "prepare.py"))
    monkeypatch.delenv("AUTORESEARCH_COMMIT", raising=False)
    assert prepare.current_commit() == "none"
    monkeypatch.setenv("AUTORESEARCH_COMMIT", "abc1234")
    assert prepare.current_commit() == "abc1234"
    monkeypatch.setenv("PATH", str(tmp_path))  # no git
    assert prepare.current_commit() == "abc1234"


def test_what_git_does_not_track_is_dirty(tmp_path, monkeypatch):
    """A module that train.py imports may be one of these files."""
    monkeypatch.setattr(prepare, "__file__", str(tmp_path / "prepare.py"))
    for command in ("init", "config user.email a@b.c", "config user.name a"):
        prepare.git(*command.split())
    (tmp_path / ".gitignore").write_text("run.log\n")
    prepare.git("add", ".gitignore")
    prepare.git("commit", "-m", "one")
    commit = prepare.git("rev-parse", "--short", "HEAD")
    (tmp_path / "run.log").write_text("")
    assert prepare.current_commit() == commit
    (tmp_path / "mymodel.py").write_text("")
    assert prepare.current_commit() == f"{commit}+dirty"


@pytest.mark.parametrize("chosen", [None, "expandable_segments:False"])
def test_memory_on_a_gpu_is_in_segments_that_can_grow(cache, fresh_run, monkeypatch, chosen):
    """Before torch makes its first tensor there; a user's own choice stays."""
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", chosen or "")
    if chosen is None:
        monkeypatch.delenv("PYTORCH_ALLOC_CONF")
    seen = []

    def training_device():
        seen.append(os.environ["PYTORCH_ALLOC_CONF"])
        return torch.device("cpu")

    monkeypatch.setattr(prepare, "training_device", training_device)
    prepare.begin_run()
    assert seen == [chosen or "expandable_segments:True"]


# ---- A GPU that others use ----
@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """A CUDA device as torch shows it and an nvidia-smi that lists what the test writes, once this
    process has put a tensor on the card."""
    tensors = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch, "zeros", lambda *_, device: tensors.append(device))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: (tmp_path / "used").touch())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    properties = {1: type("properties", (), {"uuid": "f00d-1"})}
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties.get)
    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        "#!/bin/sh\n"
        f'[ -e "{tmp_path}/used" ] || exit 1\n'
        'case "$*" in\n'
        f'"--id=GPU-f00d-1 --query-compute-apps=pid --format=csv,noheader") cat {tmp_path}/listed;;\n'
        '"--id=GPU-f00d-1 --query-gpu=clocks.sm,temperature.gpu,clocks_event_reasons.active '
        '--format=csv,noheader") echo "1755 MHz, 41, 0x0000000000000004";;\n'
        "*) exit 9;;\n"
        "esac\n"
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    def list_processes(*ids):
        (tmp_path / "listed").write_text("".join(f"{i}\n" for i in ids))

    return list_processes


@pytest.mark.parametrize(
    ("listed", "others"),
    [
        ([], []),  # a container that hides them all
        (["me"], []),
        ([4711], []),  # a container in which this process has another id
        (["me", 7], ["7"]),
        ([7, 8], ["7", "8"]),
        (["[Insufficient Permissions]"], []),
    ],
)
def test_a_gpu_on_which_only_this_process_computes_is_its_own(
    cache, fresh_run, monkeypatch, capsys, gpu, listed, others
):
    gpu(*(os.getpid() if i == "me" else i for i in listed))
    assert prepare.other_gpu_processes() == others
    if others:
        with pytest.raises(SystemExit) as stop:
            prepare.begin_run()
        error = capsys.readouterr().err
        assert stop.value.code == 2 and f"names {', '.join(others)})" in error
        assert error.count("\n") == 1
    monkeypatch.setenv("AUTORESEARCH_SHARED_GPU", "1")
    prepare.begin_run()
    evaluated(fresh_run)
    assert ("shared: another process" in prepare.flags()) == bool(others)


def test_the_record_says_how_the_gpu_was(cache, fresh_run, gpu):
    gpu(os.getpid())
    prepare.begin_run()
    assert prepare.gpu_state() == "1755 MHz, 41, 0x0000000000000004"


def test_without_a_gpu_there_is_no_state_of_it():
    assert prepare.gpu_state() is None


def test_another_process_that_came_later_is_flagged(cache, fresh_run, gpu):
    gpu(os.getpid())
    prepare.begin_run()
    evaluated(fresh_run)
    assert prepare.flags() == "ok"
    gpu(os.getpid(), 4711)
    assert prepare.flags().startswith("shared: ")


def test_another_process_that_went_away_is_flagged(cache, fresh_run, monkeypatch, gpu):
    monkeypatch.setenv("AUTORESEARCH_SHARED_GPU", "1")
    gpu(os.getpid(), 4711)
    prepare.begin_run()
    gpu(os.getpid())
    evaluated(fresh_run)
    assert prepare.flags().startswith("shared: ")


# ---- Flags ----
def batches(run, *groups):
    """Serves batches from 100 s on, each of `groups` (count, seconds, rows, tokens per row)."""
    now = run.served[-1].time if run.served else 100.0
    for count, seconds, rows, length in groups:
        for _ in range(count):
            run.served.append(prepare.Batch(now, rows, length))
            now += seconds
    return now


def evaluated(run, seconds=1.0):
    """A run that served one batch, trained for so many seconds and was evaluated for one."""
    run.imported = 90.0
    run.served.append(prepare.Batch(100.0, 1, 1))
    run.eval_began = 100.0 + seconds
    run.eval_ended = 101.0 + seconds


def flags_after(run, now):
    run.imported = 90.0
    run.eval_began = now
    run.eval_ended = now + 1
    return prepare.flags()


@pytest.mark.parametrize("halves", [(1.0, 1.0), (1.0, 1.3), (1.3, 1.0), (1.0, 1.05)])
def test_unsteady_throughput_is_flagged(fresh_run, halves):
    now = batches(fresh_run, *((20, seconds, 4, 25) for seconds in halves))
    found = flags_after(fresh_run, now)
    steady = abs(halves[1] / halves[0] - 1) < 0.1
    assert found == "ok" if steady else found.startswith("unsteady: ")
    assert steady or "a second run has the same two speeds" in found


@pytest.mark.parametrize(
    "groups",
    [
        [(60, 1.0, 16, 128), (40, 1.5, 4, 512)],  # a curriculum of lengths
        [(60, 1.0, 4, 512), (40, 1.8, 8, 512)],  # a ramp of the batch
        [(30, 1.0, 4, 512), (60, 1.5, 8, 512)],
        [(10, 1.0, 4, 512)],  # too few to tell
    ],
)
def test_speeds_are_compared_within_one_shape_of_batch(fresh_run, groups):
    assert flags_after(fresh_run, batches(fresh_run, *groups)) == "ok"


def test_a_machine_that_slows_down_in_a_curriculum_is_flagged(fresh_run):
    now = batches(fresh_run, (60, 1.0, 16, 128), (50, 1.5, 4, 512), (50, 2.0, 4, 512))
    assert flags_after(fresh_run, now).startswith("unsteady: ")


@pytest.mark.parametrize(
    ("steps", "over", "flagged"),
    [
        (0, 7.9, False),  # nobody logged a step: 2 % and 2 s
        (0, 8.1, True),
        (100, 6.9, False),  # a step takes 3 s: 1 s and two of them
        (100, 7.2, True),
        (3, 31.9, False),  # they are very long: a tenth and 2 s
        (3, 32.1, True),
        (3000, 1.15, False),
        (3000, 1.25, True),
    ],
)
def test_overtime_is_flagged_wherever_it_was_spent(fresh_run, steps, over, flagged):
    """Training between timed regions, or after the last one: all of it lies between the first batch
    and evaluation."""
    evaluated(fresh_run, prepare.TIME_BUDGET + over)
    fresh_run.steps = steps
    assert prepare.flags() == (f"overtime: {300 + over:.1f} of 300 s" if flagged else "ok")


def test_steps_that_are_not_logged_count(clock, fresh_run):
    """Otherwise a train.py that logs one in 16 had 16 times the overtime."""
    for step in (16, 32, 48):
        log(step, torch.tensor(3.0))
    assert fresh_run.steps == 48
    assert type(fresh_run.smooth_loss) is float


@pytest.mark.parametrize(("seconds", "flagged"), [(299.0, False), (301.0, True)])
def test_a_long_evaluation_is_flagged(fresh_run, seconds, flagged):
    evaluated(fresh_run)
    fresh_run.eval_ended = fresh_run.eval_began + seconds
    assert prepare.flags() == ("evaluation: 301 s, over 300" if flagged else "ok")


@pytest.mark.parametrize(("seconds", "flagged"), [(299.0, False), (301.0, True)])
def test_a_long_time_before_the_first_batch_is_flagged(fresh_run, seconds, flagged):
    """Training on tokens of one's own before the clock runs takes time too, and is seen where it
    takes much."""
    evaluated(fresh_run)
    fresh_run.imported = 100.0 - seconds
    assert prepare.flags() == ("startup: 301 s, over 300" if flagged else "ok")


def test_all_flags_are_named(fresh_run):
    evaluated(fresh_run, 600)
    fresh_run.imported = -300.0
    fresh_run.eval_ended = 1100.0
    fresh_run.opened = [str(prepare.ROOT / prepare.VAL_ROWS)]
    fresh_run.other_processes = ["4711"]
    assert [flag.split(":")[0] for flag in prepare.flags().split("; ")] == [
        "startup",
        "shared",
        "overtime",
        "evaluation",
        "opened",
    ]


def read_memmap(path):
    return np.memmap(path, dtype="<u2", mode="r")


def read_bytes(path):
    return path.read_bytes()


def read_os(path):
    os.close(os.open(path, os.O_RDONLY))


def read_relative(path):
    with open(os.path.relpath(path), "rb"):
        pass


@pytest.mark.parametrize("read", [np.fromfile, read_memmap, read_bytes, read_os, read_relative])
@pytest.mark.parametrize(
    "name", ["val/rows.u16", "tokens/shard_00000.bin", "tokens/shard_00001.npy"]
)
def test_reading_the_rulers_files_is_flagged(cache, fresh_run, read, name):
    prepare.begin_run()
    assert fresh_run.opened == []
    read(prepare.ROOT / name)
    read(prepare.ROOT / name)
    assert fresh_run.opened == [os.path.realpath(prepare.ROOT / name)]
    evaluated(fresh_run)
    assert prepare.flags() == f"opened: 1 files of the cache by the run itself ({name})"


def test_a_link_does_not_hide_the_rows(cache, fresh_run, tmp_path):
    prepare.begin_run()
    (tmp_path / "elsewhere").symlink_to(prepare.ROOT / prepare.VAL_ROWS)
    (tmp_path / "elsewhere").read_bytes()
    assert fresh_run.opened == [os.path.realpath(prepare.ROOT / prepare.VAL_ROWS)]


def test_the_rulers_own_readers_are_no_door(cache, fresh_run):
    prepare.begin_run()
    next(iter(prepare.TrainDocuments()))
    assert len(fresh_run.opened) == 2  # tokens and offsets
    next(prepare.read_tokens(prepare.ROOT / "val" / "tokens.u16"))
    assert len(fresh_run.opened) == 4


def test_an_honest_run_opens_nothing(cache, fresh_run, whole, runs, tmp_path):
    loader = prepare.make_dataloader(None, 64, 512)
    for _ in range(40):  # more than one pass
        next(loader)
    prepare.Tokenizer.from_directory()
    (tmp_path / "notes").write_text("a file of its own")
    prepare.evaluate_bpb(whole, None, 32)
    assert fresh_run.opened == []


def test_a_glob_of_token_files_does_not_meet_validation(cache):
    found = {path.parent.name for path in prepare.ROOT.rglob("*.bin")}
    assert found == {"tokens"}


@pytest.mark.xfail(
    strict=True, reason="torch opens files below Python; a reader of the diff sees it"
)
def test_miss_a_file_read_by_torch(cache, fresh_run):
    prepare.begin_run()
    torch.from_file(str(prepare.ROOT / prepare.VAL_ROWS), size=10, dtype=torch.uint8)
    assert fresh_run.opened


@pytest.mark.xfail(
    strict=True,
    reason="start-up compiles, which takes long as well; startup_seconds is in the report",
)
def test_miss_a_short_training_before_the_first_batch(fresh_run):
    evaluated(fresh_run)
    fresh_run.imported = 0.0
    assert prepare.flags() != "ok"


# ---- Evaluation as part of a run ----
def refused(capsys, model, words):
    with pytest.raises(SystemExit) as stop:
        prepare.evaluate_bpb(model, None, 32)
    assert stop.value.code == 3
    *_, begin, score, integrity = capsys.readouterr().out.splitlines()
    assert (begin, score) == ("---", "val_bpb: nan")
    assert integrity.startswith(f"integrity: FAIL {words}")


def test_evaluation_stops_the_clock_and_comes_once(cache, fresh_run, whole, capsys):
    next(prepare.make_dataloader(None, 4, 64))
    assert 1 < prepare.evaluate_bpb(whole, None, 32) < 20
    stopped = prepare.elapsed()
    assert prepare.elapsed() == stopped > 0
    refused(capsys, whole, "once: ")


def test_the_clock_stops_after_the_model_is_in_evaluation_mode(cache, fresh_run, whole):
    """What a module does in eval() is training time too."""

    def slow_eval():
        time.sleep(0.3)
        return whole

    whole.eval = slow_eval
    next(prepare.make_dataloader(None, 4, 64))
    prepare.evaluate_bpb(whole, None, 32)
    assert prepare.elapsed() >= 0.3


def test_the_verdict_and_a_record_do_not_wait_for_report(cache, fresh_run, whole, runs, capsys):
    next(prepare.make_dataloader(None, 4, 64))
    score = prepare.evaluate_bpb(whole, None, 32)
    assert capsys.readouterr().out == "integrity: ok\n"
    [path] = runs.glob("*.json")
    record = json.loads(path.read_text())
    assert list(record) == [*prepare.KEYS, "train"]
    assert record["val_bpb"] == score and record["integrity"] == "ok"
    assert record["num_steps"] is None and record["depth"] is None
    assert prepare.report(score, num_steps=1, total_tokens=256, flops_per_token=1, depth=3) == path
    assert json.loads(path.read_text())["depth"] == 3


def test_a_score_whose_record_finds_no_room_is_not_lost(cache, fresh_run, whole, runs, capsys):
    runs.write_text("in the way")
    next(prepare.make_dataloader(None, 4, 64))
    assert prepare.evaluate_bpb(whole, None, 32) > 1
    out, err = capsys.readouterr()
    assert out == "integrity: ok\n" and "the score has no record yet" in err


@pytest.mark.parametrize("missing", ["eval", "parameters"])
def test_a_wrapper_without_a_modules_methods_gets_a_sentence(
    cache, fresh_run, whole, capsys, missing
):
    class Wrapper:
        def __call__(self, idx):
            return whole(idx)

    for name in {"eval", "parameters"} - {missing}:
        setattr(Wrapper, name, lambda self: iter(whole.parameters()))
    next(prepare.make_dataloader(None, 4, 64))
    refused(capsys, Wrapper(), f"model: Wrapper has no .{missing}; pass a torch.nn.Module")


@pytest.mark.parametrize("name", prepare.FROZEN)
def test_a_limit_that_was_assigned_to_is_noticed(
    cache, fresh_run, whole, capsys, monkeypatch, name
):
    next(prepare.make_dataloader(None, 4, 64))
    monkeypatch.setattr(prepare, name, 99)
    refused(capsys, whole, f"settings: prepare.{name} was assigned 99")


def test_a_loader_of_ones_own_is_refused(cache, fresh_run, whole, capsys):
    refused(capsys, whole, "loader: make_dataloader never served a batch")


def test_a_model_that_fails_a_probe_gets_no_score(cache, fresh_run, whole, capsys):
    whole.forward = lambda idx: whole.head(idx).roll(-1, 1)
    next(prepare.make_dataloader(None, 4, 64))
    refused(capsys, whole, "causality: ")
    assert fresh_run.val_bpb is None


@pytest.mark.parametrize("name", ["val/rows.u16", "tokenizer/tokenizer.tiktoken"])
@pytest.mark.parametrize("change", ["cut", "flip"])
def test_altered_validation_files_are_refused(own_cache, fresh_run, whole, capsys, name, change):
    path = prepare.ROOT / name
    content = path.read_bytes()
    next(prepare.make_dataloader(None, 4, 64))
    if change == "cut":
        path.write_bytes(content[:-1026])
    else:
        path.write_bytes(content[:7] + bytes([content[7] ^ 1]) + content[8:])
    refused(capsys, whole, f"data: {path.name}")


def test_a_manifest_that_was_rewritten_does_not_help(own_cache, fresh_run, whole, capsys):
    """What counts is what the run began with."""
    next(prepare.make_dataloader(None, 4, 64))
    path = prepare.ROOT / "val/rows.u16"
    path.write_bytes(path.read_bytes()[:-1026])
    manifest = prepare.load_manifest()
    manifest["files"] |= prepare.fingerprints([path])
    (prepare.ROOT / "manifest.json").write_text(json.dumps(manifest))
    refused(capsys, whole, "data: rows.u16 changed since training began")


def test_the_metric_cannot_be_passed_another_table(cache, fresh_run, whole):
    class Liar:
        token_bytes = np.full(10**4, 1000)

    next(prepare.make_dataloader(Liar(), 4, 64))
    assert prepare.evaluate_bpb(whole, Liar(), 32) > 1


# ---- Progress ----
def log(step, loss, **changed):
    told = {"tokens": 1000, "flops_per_token": 2e6, "lr_factor": 0.5, "epoch": 1} | changed
    prepare.log_step(step, loss, **told)


@pytest.fixture
def clock(monkeypatch, fresh_run):
    """A clock that the test sets; the first batch was served at 100 s."""

    class Clock:
        now = 100.0

    monkeypatch.setattr(prepare, "_now", lambda: Clock.now)
    fresh_run.served.append(prepare.Batch(100.0, 10, 100))
    fresh_run.device = torch.device("cpu")
    return Clock


def test_progress_is_a_line_about_every_five_seconds(clock, capsys):
    for step in range(1, 13):
        clock.now += 1
        log(step, 4.0)
    lines = capsys.readouterr().out.splitlines()
    assert [int(line.split()[1]) for line in lines] == [1, 6, 11]
    assert lines[1] == (
        "step     6   2% loss 4.0000 lr x0.50    1000 tok/s mfu n/a epoch 1 left 294 s"
    )
    assert all(len(line) <= 80 for line in lines)


def test_progress_names_the_share_of_the_cards_peak(clock, capsys, monkeypatch):
    monkeypatch.setattr(prepare, "device_name", lambda device: "NVIDIA H100 80GB HBM3")
    clock.now += 2
    log(1, 4.0, tokens=2**19, flops_per_token=2.4e8)
    share = 2**19 * 2.4e8 / 2 / 989e12
    assert f" 262144 tok/s mfu {100 * share:.1f}% " in capsys.readouterr().out


def test_a_terminal_has_one_live_line(clock, capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    for step in range(1, 4):
        clock.now += 0.1
        log(step, 4.0)
    out = capsys.readouterr().out
    assert out.count("\r\033[K") == 3 and "\n" not in out
    assert all(len(line) <= 80 for line in out.split("\r\033[K"))


def test_the_loss_is_the_mean_at_first_and_then_smoothed(clock, fresh_run):
    losses = [float(i % 7) for i in range(30)]
    expected = None
    for step, loss in enumerate(losses, start=1):
        clock.now += 1
        log(step, loss)
        expected = np.mean(losses[:step]) if step <= 10 else 0.9 * expected + 0.1 * loss
        assert fresh_run.smooth_loss == pytest.approx(expected)


def test_the_curve_is_the_loss_at_every_tenth_of_the_budget(clock, fresh_run):
    for step in range(1, 41):
        clock.now = 100 + 7.5 * step  # 40 steps in 300 s
        log(step, 10 - step / 10)
        assert len(fresh_run.curve) == step // 4
        if step % 4 == 0:
            assert fresh_run.curve[-1] == fresh_run.smooth_loss


def test_a_long_step_fills_the_tenths_that_it_took(clock, fresh_run):
    clock.now = 100 + 95
    log(1, 5.0)
    assert fresh_run.curve == [5.0] * 3


@pytest.mark.parametrize("loss", [math.nan, math.inf, 100.5])
def test_a_run_that_diverged_ends_at_once(clock, capsys, loss):
    with pytest.raises(SystemExit) as stop:
        log(7, loss)
    assert stop.value.code == 4
    assert (
        capsys.readouterr().out
        == f"\nFAIL: training diverged, loss {loss:g} nats per token at step 7\n"
    )


def test_a_step_on_batches_of_ones_own_is_no_crash(cache, fresh_run, whole, capsys):
    """evaluate_bpb says what is wrong with that run."""
    prepare.begin_run()
    log(1, 4.0)
    refused(capsys, whole, "loader: ")


# ---- Final block and record ----
def ended(run, score=1.25):
    """A run that trained for 50 s, from 10 s after its import, and was evaluated for 5 s."""
    now = prepare._now()
    run.imported = now - 70
    run.served.append(prepare.Batch(now - 60, 8, 512))
    run.eval_began = now - 10
    run.eval_ended = now - 5
    run.val_bpb = score
    run.integrity = "ok"
    run.steps = 4
    run.smooth_loss = 3.5
    run.curve = [6.0, 5.0]
    prepare.begin_run()
    return score


def report(score, **stats):
    told = {"num_steps": 4, "total_tokens": 4096, "flops_per_token": 2e9}
    return prepare.report(score, **(told | stats))


def parse_block(text):
    """The lines of the last block as {key: value}."""
    *_, block = text.partition("---\n")
    return dict(line.split(": ", 1) for line in block.splitlines())


def test_the_block_says_what_the_record_says(cache, fresh_run, script, runs, capsys):
    score = ended(fresh_run, score=1.2345678)
    path = report(score, num_params_M=0.5, depth=2, attention="blocks")
    block = parse_block(capsys.readouterr().out)
    record = json.loads(path.read_text())
    assert list(block) == prepare.KEYS
    assert record.pop("train") == prepare.sha256(train.__file__)
    assert list(record) == prepare.KEYS
    assert record.pop("curve") == [6.0, 5.0] + [3.5] * 8
    assert block.pop("curve") == "6.000 5.000" + " 3.500" * 8
    assert block["val_bpb"] == "1.234568" and record["val_bpb"] == score
    assert block["train_loss"] == "3.500000" and record["train_loss"] == 3.5
    for key, text in block.items():
        value = record[key]
        said = "n/a" if value is None else str(value)
        assert text == said or float(text) == pytest.approx(value, abs=0.0051)
    expected = {
        "training_seconds": 50,
        "total_seconds": 70,
        "eval_seconds": 5,
        "startup_seconds": 10,
        "tokens_per_second": 4096 / 50,
        "total_tokens_M": 0.004096,
        "served_tokens_M": 0.004096,
        "num_steps": 4,
        "num_params_M": 0.5,
        "depth": 2,
    }
    assert {key: record[key] for key in expected} == pytest.approx(expected, abs=0.2)
    words = ("profile", "seed", "device", "attention", "mfu_percent", "integrity")
    assert [block[word] for word in words] == ["small", "42", "cpu", "blocks", "n/a", "ok"]
    assert block["commit"] == fresh_run.commit and block["torch"] in torch.__version__
    assert block["prepare"] == prepare.sha256(prepare.__file__)[:8]
    assert float(block["peak_vram_mb"]) > 50
    assert path.parent == runs and path.name.endswith(f"_{block['commit']}_42_{os.getpid()}.json")


def test_text_is_printed_as_it_is(cache, fresh_run, runs, capsys):
    """The block is no YAML: nothing is quoted."""
    report(ended(fresh_run), note='two: words, "quoted" #1', version="1e5")
    out = capsys.readouterr().out
    assert out.endswith('\nnote: two: words, "quoted" #1\nversion: 1e5\n')
    assert "\nintegrity: ok\n" in out


def test_mfu_is_of_the_whole_run(cache, fresh_run, runs, monkeypatch):
    score = ended(fresh_run)
    monkeypatch.setattr(prepare, "device_name", lambda device: "NVIDIA L4")
    record = json.loads(report(score, flops_per_token=1e12).read_text())
    assert record["mfu_percent"] == pytest.approx(100 * 1e12 * 4096 / 50 / 121e12, rel=1e-3)
    assert record["device"] == "NVIDIA L4"


def test_the_data_hash_is_of_what_the_run_began_with(own_cache, fresh_run, runs, monkeypatch):
    score = ended(fresh_run)
    first = json.loads(report(score).read_text())["data"]
    with monkeypatch.context() as patch:  # another profile may score fewer of the same rows
        patch.setattr(prepare, "EVAL_TOKENS", 32 * prepare.MAX_SEQ_LEN)
        assert json.loads(report(score).read_text())["data"] != first
    (prepare.ROOT / "manifest.json").unlink()
    assert json.loads(report(score).read_text())["data"] == first
    name, (size, digest) = next(iter(fresh_run.files.items()))
    fresh_run.files = fresh_run.files | {name: [size, digest[::-1]]}
    assert json.loads(report(score).read_text())["data"] != first


@pytest.mark.parametrize("stats", [{}, {"seed": 1}, {"integrity": "ok"}, {"train_loss": 0.1}])
def test_only_the_rulers_own_score_and_keys_are_reported(cache, fresh_run, runs, capsys, stats):
    score = ended(fresh_run)
    if stats:
        words = f"the ruler itself reports {list(stats)}".replace("[", r"\[").replace("]", r"\]")
    else:
        score -= 0.1
        words = "val_bpb is 1.15, but evaluate_bpb returned 1.25"
    with pytest.raises(ValueError, match=words):
        report(score, **stats)
    assert not runs.exists() and "---" not in capsys.readouterr().out


def test_a_score_without_room_for_its_record_is_said(cache, fresh_run, runs, capsys):
    score = ended(fresh_run)
    runs.write_text("in the way")
    with pytest.raises(SystemExit) as stop:
        report(score)
    out, err = capsys.readouterr()
    assert stop.value.code == 2 and "the score above has no complete record" in err
    assert "val_bpb: 1.250000" in out
