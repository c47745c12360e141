"""Runs train.py in fresh processes, with knobs edited by one-line substitution as an agent
would."""

import math
import os
import re
import shutil
import subprocess
import sys

import prepare
from tests.common import GUARD, LITTLE, ROOT, edited, run_script, train
from tests.test_report import KEYS, parse_block
from tests.test_rerun import commit
from tools import experiment

import numpy as np
import pytest

# Lines of train.py where edits begin.
EVALUATE = "    evaluate_bpb(\n"
EMBED = "        x = norm(look_up(self.wte, idx).to(self.config.dtype))\n"
BUFFER = '        self.register_buffer("cos", table, persistent=False)\n'


def before(line, text):
    """Returns the edit that puts text before a line of train.py."""
    return line, text + line


# ---- Runs that end with a score ----
@pytest.fixture(scope="module")
def good(cache, tmp_path_factory):
    """Runs train.py without a network. Its model has a mask as a buffer."""
    folder = tmp_path_factory.mktemp("good")
    (folder / "sitecustomize.py").write_text(GUARD)
    mask = "torch.ones(8, 8).tril().bool()"
    made = before(BUFFER, f'        self.register_buffer("mask", {mask})\n')
    used = before(EMBED, f"        assert self.mask.equal({mask})\n")
    return train(edited(folder / "code", [made, used]), 2, PYTHONPATH=folder)


def test_the_nights_tool_reads_what_a_run_prints(good, tmp_path):
    log = tmp_path / "run.log"
    log.write_text(f"commit abc1234, attempt 1, after 0 rows\n{good.output}\nexit 0\n")
    run = experiment.Log(log)
    assert (run.commit, run.code, run.problem) == ("abc1234", 0, None)
    for key in (*experiment.SHOWN, *experiment.MUST_AGREE):
        assert run.block[key] not in ("", "None"), key
    assert run.memory_gb() > 0 and run.speed() > 0


def test_a_run_ends_with_a_block_and_a_record(good):
    assert good.returncode == 0, good.output
    block = parse_block(good.stdout)
    own = "mfu_percent num_steps num_params_M depth attention".split()
    assert list(block) == [*KEYS, *own, "integrity"]
    assert block["integrity"] == "ok" and block["mfu_percent"] == "None"
    assert 0 < float(block["training_seconds"]) <= 2.5
    assert block["time_budget"] == "2" and block["depth"] == "2"
    [record] = good.records
    assert block["val_bpb"] == f"{record['val_bpb']:.6f}"
    assert record["total_tokens_M"] == pytest.approx((record["num_steps"] * 2048 + 2048) / 1e6)
    assert 0.1 < record["num_params_M"] < 1 and record["attention"] == "blocks"


def test_a_run_learns(good):
    [record] = good.records
    rows = np.fromfile(prepare.PREPARED / prepare.ROWS_FILE, "<u2")
    table = prepare.Tokenizer.from_directory().token_bytes
    untrained = math.log2(len(table)) * np.count_nonzero(table[rows]) / table[rows].sum()
    assert 0.5 < record["val_bpb"] < 0.95 * untrained
    assert 0 < record["curve"][-1] < math.log(len(table))


def test_a_run_on_a_read_only_cache_writes_to_its_runs_folder_alone(cache, tmp_path):
    """As under some engines, the run has no git and no network, and its folder is read-only too."""
    theirs = tmp_path / "theirs"
    shutil.copytree(prepare.PREPARED, theirs / "cache" / prepare.PREPARED.name)
    script = edited(theirs / "code")
    before = {path: path.stat().st_mtime_ns for path in [theirs, *theirs.rglob("*")]}
    for path in before:
        path.chmod(0o555 if path.is_dir() else 0o444)
    as_user = ("setpriv", "--bounding-set=-dac_override") if os.geteuid() == 0 else ()
    told = {"AUTORESEARCH_CACHE": theirs / "cache", "AUTORESEARCH_RUNS": tmp_path / "mine"}
    done = train(script, prefix=as_user, AUTORESEARCH_COMMIT="abc1234", HF_HUB_OFFLINE=1, **told)
    after = {path: path.stat().st_mtime_ns for path in [theirs, *theirs.rglob("*")]}
    for path in after:
        path.chmod(0o755)
    assert done.returncode == 0, done.output
    assert after == before
    assert [record["commit"] for record in done.records] == ["abc1234"]


# ---- Runs that end without one ----
def test_a_second_run_of_a_folder_is_refused(cache, tmp_path):
    """A `git reset --hard` does not help, and the first run continues."""
    shutil.copy(ROOT / "prepare.py", tmp_path)
    script = tmp_path / "train.py"
    script.write_text(LITTLE)
    commit(tmp_path)
    environment = os.environ | {"AUTORESEARCH_RUNS": str(tmp_path / "runs")}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, script], env=environment, **pipes) as process:
        while process.stdout.readline() not in ("begun\n", ""):
            pass
        script.write_text("nonsense")
        subprocess.run(["git", "reset", "-q", "--hard"], cwd=tmp_path, check=True)
        refused = run_script(script, cwd=tmp_path)
        output, _ = process.communicate("go on\n")
    assert refused.returncode == 2 and not refused.stdout
    assert re.fullmatch(r"error: this folder has a run already; .*\n", refused.stderr)
    assert process.returncode == 0 and parse_block(output)["integrity"] == "ok"


@pytest.mark.parametrize("line", ["    num_params = sum(", EVALUATE])
def test_a_run_that_needs_too_much_memory_says_so(cache, tmp_path, line):
    """It asks for a petabyte once the model is built, or after training."""
    done = train(edited(tmp_path / "code", [before(line, "    torch.empty(2**50)\n")]))
    assert done.returncode == 5
    *_, last = done.output.splitlines()
    assert last.startswith("error: RuntimeError: ") and "can't allocate memory" in last
    assert last.endswith("; lower DEPTH, ASPECT_RATIO or DEVICE_BATCH_SIZE.")
