"""Real runs of train.py in fresh processes, with knobs edited by one-line substitution as an agent
would."""

import contextlib
import hashlib
import math
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import prepare
from tests.common import LITTLE, ROOT, edited, run_script, train
from tests.test_docs import REFERENCE, section
from tests.test_report import NINE, OTHERS, parse_block
from tests.test_rerun import commit
from tests.test_security import GUARD

import numpy as np
import pytest

# Lines of train.py that edits begin at.
EVALUATE = "    evaluate_bpb(\n"
EMBED = "        x = norm(self.wte(idx))\n"
BUFFER = '        self.register_buffer("cos", table, persistent=False)\n'


def before(line, text):
    """An edit that puts lines before one of train.py."""
    return line, text + line


# ---- Scenarios: each makes a folder, and returns what came of the run in it ----
def good(folder):
    """Without a network, with a mask that is made with the model, and with an edit of the file
    while it runs."""
    guard = folder.with_name("guard")
    guard.mkdir()
    (guard / "sitecustomize.py").write_text(GUARD)
    later = before(EVALUATE, "    open(__file__, 'a').write('# a later edit')\n")
    mask = "torch.ones(8, 8).tril().bool()"
    made = before(BUFFER, f'        self.register_buffer("mask", {mask})\n')
    used = before(EMBED, f"        assert self.mask.equal({mask})\n")
    return train(edited(folder, [later, made, used]), 2, PYTHONPATH=guard)


def not_a_number(folder):
    return train(edited(folder, EMBEDDING_LR="float('nan')"), seconds=60)  # ends after two seconds


def leak(folder):
    leaking = EMBED + "        x = x + x.roll(-1, 1)\n"
    return train(edited(folder, [(EMBED, leaking)]))


@dataclass
class Elsewhere:
    done: subprocess.CompletedProcess
    untouched: bool  # all files of code and cache


def elsewhere(folder):
    """As an engine starts it: without git or network, in a folder and on a cache that it may not
    write."""
    cache = folder.with_name("theirs")
    shutil.copytree(prepare.ROOT, cache / prepare.ROOT.name)
    script = edited(folder)

    def files():
        paths = [cache, folder, *cache.rglob("*"), *folder.rglob("*")]
        return {path: path.stat().st_mtime_ns for path in paths}

    found = files()
    for path in found:
        path.chmod(0o555 if path.is_dir() else 0o444)
    as_user = ("setpriv", "--bounding-set=-dac_override") if os.geteuid() == 0 else ()
    told = {
        "AUTORESEARCH_CACHE": cache,
        "AUTORESEARCH_RUNS": folder.with_name("mine"),
        "AUTORESEARCH_COMMIT": "abc1234",
        "HF_HUB_OFFLINE": 1,
    }
    done = train(script, prefix=as_user, **told)
    untouched = files() == found
    for path in found:
        path.chmod(0o755)
    return Elsewhere(done, untouched)


@contextlib.contextmanager
def begun(script, **environment):
    """A run that has begun, until it is sent a line."""
    process = subprocess.Popen(
        [sys.executable, script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | environment,
        cwd=script.parent,
        text=True,
    )
    with process:
        while process.stdout.readline() not in ("begun\n", ""):
            pass
        yield process


def little(folder):
    folder.mkdir()
    shutil.copy(ROOT / "prepare.py", folder)
    script = folder / "train.py"
    script.write_text(LITTLE)
    return script


def two_at_once(folder):
    """A run, and one beside it in its folder after a `git reset --hard`."""
    script = little(folder)
    commit(folder)
    with begun(script, AUTORESEARCH_RUNS=str(folder / "runs")) as process:
        script.write_text("nonsense")
        subprocess.run(["git", "reset", "-q", "--hard"], cwd=folder, check=True)
        refused = run_script(script, cwd=folder)
        output, _ = process.communicate("go on\n")
    return refused, process.returncode, output


SCENARIOS = {  # the longest first
    "good": good,
    "nan": not_a_number,
    "leak": leak,
    "elsewhere": elsewhere,
    "two at once": two_at_once,
}


@pytest.fixture(scope="session")
def outcomes(cache, tmp_path_factory):
    """Function that returns what came of a scenario. All run, two at a time: most of each is the
    start of a process."""
    folder = tmp_path_factory.mktemp("runs")
    with ThreadPoolExecutor(2) as pool:
        jobs = {}
        for name, scenario in SCENARIOS.items():
            jobs[name] = pool.submit(scenario, folder / name.replace(" ", "_"))
        yield lambda name: jobs[name].result()


# ---- Runs that end with a score ----
def test_a_run_ends_with_a_block_and_a_record_that_says_the_same(outcomes):
    done = outcomes("good")
    assert done.returncode == 0, done.output
    block = parse_block(done.stdout)
    assert list(block) == [*NINE, *OTHERS, "attention", "tokens_per_second", "integrity"]
    # Two seconds beside other tests may be unsteady.
    assert block["integrity"] == "ok" or block["integrity"].startswith("unsteady: ")
    assert 0 < float(block["training_seconds"]) <= 2.5
    assert (
        block["time_budget"] == "2.00" and block["seed"] == "42" and block["mfu_percent"] == "n/a"
    )
    [record] = done.records
    assert record["total_tokens_M"] == record["num_steps"] * 2048 / 1e6
    source = Path(done.args[1]).read_bytes()
    ran = source.removesuffix(b"# a later edit")
    assert ran != source
    assert record["train"] == hashlib.sha256(ran).hexdigest()  # of the code that ran
    assert list(record) == [*block, "train"]
    for key, text in block.items():
        value = record[key]
        if key == "curve":
            assert [float(word) for word in text.split()] == pytest.approx(value, abs=0.0005)
        else:
            said = "n/a" if value is None else str(value)
            assert text == said or float(text) == pytest.approx(value, abs=0.0051)


def test_every_key_is_documented(outcomes):
    rows = re.findall(r"^\| (`.*?) \|", section("The keys of a run", REFERENCE), re.M)
    keys = re.findall(r"`(\w+)`", " ".join(rows))
    [record] = outcomes("good").records
    assert sorted([*keys, "train"]) == sorted(record)


def test_a_run_learns(outcomes):
    [record] = outcomes("good").records
    rows = np.fromfile(prepare.ROOT / prepare.ROWS_FILE, "<u2")
    table = prepare.Tokenizer.from_directory().token_bytes
    untrained = math.log2(len(table)) * np.count_nonzero(table[rows]) / table[rows].sum()
    assert 0.5 < record["val_bpb"] < 0.95 * untrained
    assert 0 < record["train_loss"] < math.log(len(table))


def test_a_run_on_a_read_only_cache_writes_to_its_runs_folder_alone(outcomes):
    """Without git, too."""
    found = outcomes("elsewhere")
    assert found.done.returncode == 0, found.done.output
    assert found.untouched
    [record] = found.done.records
    assert record["commit"] == "abc1234"


# ---- Runs that end without one ----
def test_nan_fails_fast(outcomes):
    done = outcomes("nan")
    assert done.returncode == 4 and not done.records
    assert re.search(
        r"^FAIL: training diverged, loss nan nats per token at step \d+$", done.stdout, re.M
    )
    assert "---" not in done.output and "Traceback" not in done.output


def test_a_model_that_sees_the_next_token_gets_no_score(outcomes):
    done = outcomes("leak")
    assert done.returncode == 3 and not done.records, done.output
    block = parse_block(done.stdout)
    assert list(block) == ["val_bpb", "integrity"] and block["val_bpb"] == "nan"
    assert block["integrity"].startswith("FAIL causality: ")


def test_a_second_run_of_a_folder_is_refused(outcomes):
    """It does not disturb the first."""
    refused, code, output = outcomes("two at once")
    assert refused.returncode == 2 and not refused.stdout
    assert re.fullmatch(r"error: another run .* in this folder; .*\n", refused.stderr)
    assert code == 0 and parse_block(output)["integrity"] == "ok"
