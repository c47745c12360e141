"""Real runs of train.py in fresh processes, with knobs edited by one-line substitution as an agent would."""

import contextlib
import hashlib
import math
import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import prepare
from benchmarks import overhead
from tests.common import edited, train
from tests.test_security import GUARD

import numpy as np
import pytest
import yaml

NINE = "val_bpb training_seconds total_seconds peak_vram_mb mfu_percent total_tokens_M num_steps num_params_M depth".split()


EVALUATE, LATER = "    val_bpb = prepare.evaluate_bpb", "    open(__file__, 'a').write('# a later edit')\n"
SCENARIOS = {
    "good": lambda folder: train(edited(folder, [(EVALUATE, LATER + EVALUATE)], quick=("", "")), 2, PYTHONPATH=without_network(folder)),
    "no data": lambda folder: train(edited(folder), AUTORESEARCH_CACHE=folder / "nothing"),
    "indivisible": lambda folder: train(edited(folder, TOTAL_BATCH_SIZE=1000)),
    "nan": lambda folder: train(edited(folder, EMBEDDING_LR="float('nan')")),
    "no memory": lambda folder: train(edited(folder, [("    x = x0 = norm(", "    raise torch.OutOfMemoryError\n        x = x0 = norm(")])),
    "leak": lambda folder: train(edited(folder, [("x = x0 = norm(self.wte(idx))", "x = x0 = norm(self.wte(idx) + self.wte(idx).roll(-1, 1))")])),
    "smuggled": lambda folder: smuggled(folder),
    "overhead": lambda folder: overhead.stages(1, folder / "runs", None, edited(folder)),
    "elsewhere": lambda folder: elsewhere(folder),
    "wall limit": lambda folder: train(edited(folder), seconds=60, AUTORESEARCH_WALL_LIMIT=3),
    "terminal": lambda folder: at_a_terminal(folder),
    "SIGTERM": lambda folder: terminated(folder),
}  # fmt: skip


def without_network(folder):
    """A PYTHONPATH under which a process ends with 99 as soon as it reaches for the network."""
    guard = folder.with_name("guard")
    guard.mkdir()
    (guard / "sitecustomize.py").write_text(GUARD)
    return guard


def smuggled(folder):
    """Saves its weights outside the cache and loads those of the run before; then the same in a clean HOME and TMPDIR."""
    script = edited(folder, [
        ("    steps, loss = train(", "    from pathlib import Path\n    kept = Path(tempfile.gettempdir(), 'kept.pt')\n"
         "    if kept.exists():\n        model.load_state_dict(torch.load(kept))\n    steps, loss = train("),
        (EVALUATE, "    torch.save(model.state_dict(), kept)\n" + EVALUATE),
    ], EMBEDDING_LR=0.02, UNEMBEDDING_LR=0.0005, MATRIX_LR=0.002)  # fmt: skip
    places = [folder / "night", folder / "night", folder / "clean"]
    for place in places[1:]:
        place.mkdir()
    return [train(script, 2, TMPDIR=place, HOME=place, AUTORESEARCH_RUNS=place / "runs") for place in places]


def elsewhere(folder):
    """As an engine starts it: without git or network, in a folder and on a cache that it may not write."""
    cache, runs = folder.with_name("theirs"), folder.with_name("mine")
    shutil.copytree(prepare.ROOT, cache / prepare.ROOT.name)
    places = "    print('places:', tempfile.gettempdir(), os.environ['TORCHINDUCTOR_CACHE_DIR'])\n"
    script = edited(folder, [(EVALUATE, places + EVALUATE)])

    def files():
        return {path: path.stat().st_mtime_ns for path in (cache, folder, *cache.rglob("*"), *folder.rglob("*"))}

    before = files()
    for path in before:
        path.chmod(0o555 if path.is_dir() else 0o444)
    as_user = ("setpriv", "--bounding-set=-dac_override") if os.geteuid() == 0 else ()  # root may write anything
    told = {"AUTORESEARCH_COMMIT": "abc1234", "HF_HUB_OFFLINE": 1, "TMPDIR": None, "TORCHINDUCTOR_CACHE_DIR": None}
    done = train(script, prefix=as_user, AUTORESEARCH_CACHE=cache, AUTORESEARCH_RUNS=runs, **told)
    done.runs, done.untouched = runs, files() == before
    for path in before:
        path.chmod(0o755)
    return done


def at_a_terminal(folder):
    """(exit code, seconds until it came, all that the screen was sent, runs folder) of a run at whose terminal Ctrl-C is
    pressed in the middle of training."""
    command, pressed, shown = ["setsid", "--ctty", "--wait", sys.executable, edited(folder)], 0.0, b""
    environment = os.environ | {"AUTORESEARCH_TIME_BUDGET": "60", "AUTORESEARCH_RUNS": str(folder / "runs")}
    screen, terminal = os.openpty()
    own = dict.fromkeys(("stdin", "stdout", "stderr"), terminal)
    with subprocess.Popen(command, env=environment, cwd=folder, **own) as process, open(screen, "r+b", 0) as screen:
        os.close(terminal)
        with contextlib.suppress(OSError):  # EIO: the process is gone
            while True:
                shown += screen.read(4096)
                if b"step     9" in shown and not pressed:
                    screen.write(b"\x03")
                    pressed = time.monotonic()
    return process.returncode, time.monotonic() - pressed, shown.decode(), folder / "runs"


def terminated(folder):
    """(exit code, seconds until it came, output, runs folder) of a run that gets SIGTERM in the middle of training."""
    script, log = edited(folder), folder / "log"
    environment = os.environ | {"AUTORESEARCH_TIME_BUDGET": "60", "AUTORESEARCH_RUNS": str(folder / "runs")}
    with open(log, "wb") as file:
        process = subprocess.Popen([sys.executable, script], stdout=file, stderr=file, env=environment, cwd=folder)
        deadline = time.monotonic() + 60
        while b"step" not in log.read_bytes() and time.monotonic() < deadline:
            time.sleep(0.1)
        process.terminate()
        begun = time.monotonic()
        code = process.wait(timeout=20)
    return code, time.monotonic() - begun, log.read_text(), folder / "runs"


@pytest.fixture(scope="session")
def outcomes(cache, tmp_path_factory):
    """All scenarios, two at a time: most of each is the start of a process."""
    folder = tmp_path_factory.mktemp("runs")
    with ThreadPoolExecutor(2) as pool:
        jobs = {name: pool.submit(scenario, folder / name.replace(" ", "_")) for name, scenario in SCENARIOS.items()}
        return {name: job.result() for name, job in jobs.items()}


def test_a_run_ends_with_a_block_that_is_yaml_and_a_record_that_says_the_same(outcomes):
    done = outcomes["good"]
    assert done.returncode == 0, done.output
    head, _, block = done.stdout.partition("\n---\n")
    block = yaml.safe_load(block)
    assert list(block)[:9] == NINE and list(block) == [key for key in prepare.KEYS if key in block]
    assert set(prepare.KEYS) == set(block)
    assert block["integrity"] == "ok" or block["integrity"].startswith("unsteady")  # two seconds beside other tests
    assert 0 < block["training_seconds"] <= 2.5 and block["time_budget"] == 2 and block["seed"] == 42
    assert block["total_tokens_M"] == pytest.approx(block["num_steps"] * 2048 / 1e6, abs=0.005)
    rows, table = np.fromfile(prepare.ROOT / "val/rows.bin", "<u2"), prepare.Tokenizer.from_directory().token_bytes
    untrained = math.log2(len(table)) * np.count_nonzero(table[rows]) / table[rows].sum()
    assert 0.5 < block["val_bpb"] < 0.95 * untrained
    [record] = done.records
    source = Path(done.args[1]).read_bytes().removesuffix(b"# a later edit")  # the record is of the code that ran
    assert record.pop("train") == hashlib.sha256(source).hexdigest() != prepare.sha256(done.args[1])
    assert record["val_bpb"] == pytest.approx(block["val_bpb"], abs=1e-6) and set(record) == set(block)
    assert "width 64" in head and "attention blocks" in head and "\r" not in head
    assert len(done.output) < 20_000 and len("\n".join(done.output.splitlines()[-50:])) < 5_000


def test_no_data(outcomes):
    done = outcomes["no data"]
    assert (
        done.returncode == 2
        and "run `AUTORESEARCH_PROFILE=small uv run prepare.py`" in done.stderr
        and done.output.count("\n") == 1
    )


def test_indivisible_batch(outcomes):
    done = outcomes["indivisible"]
    assert done.returncode == 2 and "TOTAL_BATCH_SIZE = 1000 is not a multiple" in done.stderr and not done.records


def test_nan_fails_fast(outcomes):
    done = outcomes["nan"]
    assert (
        done.returncode == 4
        and re.search(r"^FAIL: training diverged, loss nan", done.stdout, re.M)
        and not done.records
    )


def test_out_of_memory_throughout(outcomes):
    done = outcomes["no memory"]
    assert done.returncode == 5 and "out of memory with one row" in done.stderr and "Traceback" not in done.output
    assert done.stdout.count("DEVICE_BATCH_SIZE") == 2 and not done.records


def test_a_model_that_sees_the_next_token_gets_no_score(outcomes):
    done = outcomes["leak"]
    assert done.returncode == 3 and not done.records, done.output
    block = yaml.safe_load(done.stdout.partition("\n---\n")[2])
    assert math.isnan(float(block["val_bpb"])) and block["integrity"].startswith("FAIL causality: ")


def test_a_clean_worktree_exposes_weights_of_an_earlier_run(outcomes):
    """The run itself cannot tell; the same commit with HOME, TMPDIR and AUTORESEARCH_RUNS of its own can."""
    assert [done.returncode for done in outcomes["smuggled"]] == [0, 0, 0], outcomes["smuggled"][1].output
    first, night, clean = ([record["val_bpb"] for record in done.records] for done in outcomes["smuggled"])
    assert min(night) < min(clean) - 0.02, (first, night, clean)


def test_the_overhead_benchmark_names_every_stage(outcomes):
    found = outcomes["overhead"]
    assert set(found) == {*overhead.STAGES, "evaluation", "outside training"} and all(v >= 0 for v in found.values())
    assert found["outside training"] > found["evaluation"] > 0 and found["training"] < 2


def test_a_run_without_git_on_a_read_only_cache_writes_to_its_runs_folder_alone(outcomes):
    done = outcomes["elsewhere"]
    assert done.returncode == 0 and done.untouched, done.output
    [record] = done.records
    assert record["commit"] == "abc1234" and f"places: {done.runs} {done.runs}/inductor\n" in done.stdout


def test_a_wall_limit_ends_a_run_without_a_score(outcomes):
    done = outcomes["wall limit"]
    assert done.returncode == 142 and "error: AUTORESEARCH_WALL_LIMIT after" in done.stderr and not done.records
    assert "of training; no score" in done.stderr
    assert "Traceback" not in done.output and "---" not in done.output


def test_sigterm_ends_a_run_at_once_without_a_score(outcomes):
    code, seconds, output, runs = outcomes["SIGTERM"]
    assert code == 143 and seconds < 5 and not list(runs.iterdir())
    assert output.splitlines()[-1].startswith("error: SIGTERM after")  # and no word of leaks below it
    assert "no score" in output and "Traceback" not in output and "---" not in output


def test_a_terminal_shows_one_live_line_and_below_it_what_ended_the_run(outcomes):
    code, seconds, shown, runs = outcomes["terminal"]
    assert code == 130 and seconds < 5 and not list(runs.iterdir())
    assert "Traceback" not in shown and "---" not in shown
    *_, live, last, nothing = shown.replace("^C", "").split("\r\n")
    before, *updates = live.split("\r\033[K")
    assert len(updates) >= 9 and not before and not nothing, shown
    assert all(re.fullmatch(r"step +\d+ +\d+% .* left +\d+ s", line) and len(line) <= 80 for line in updates)
    assert re.fullmatch(r"error: Ctrl-C after \d+ s of training; no score\.", last)
