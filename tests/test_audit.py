"""tools/audit.py measures a night's gain."""

import json
import sys

from tools import audit
from tools.experiment import read_results

import pytest

# A tools/rerun.py that scores a commit by its name.
FAKE = """
import json, os, sys
[commit] = sys.argv[1:]
seed = int(os.environ['SEED'])
with open('calls', 'a') as file:
    print(commit, seed, file=file)
if commit == 'broken':
    sys.exit('error: it cannot be trained')
gain = {'base': 0, 'worse': -0.01, 'best': 0.03 + 0.01 * (seed - 200), 'mended': 0.02}[commit]
record = {'val_bpb': 0.9 - gain, 'num_steps': 7, 'integrity': 'ok'}
record['data'] = os.environ.get('DATA')
with open(os.environ['AUTORESEARCH_RUNS'] + '/1.json', 'w') as file:
    json.dump(record, file)
"""
LOG = """commit\tval_bpb\tmemory_gb\tstatus\tdescription
base\t0.9\t1.0\tkeep\tbaseline
worse\t0.9\t1.0\tkeep\tan idea
lost\t0.9\t1.0\tdiscard\tan idea
base\t0.9\t1.0\tagain\tbest again
best\t0.9\t1.0\tkeep\tan idea
leak\t0.1\t1.0\tinvalid\tof an older log
torn"""


# A log as a fork, an editor and Windows may leave it.
ODD_LOG = (
    "\ufeffcommit\tval_bpb\tmemory_gb\tmfu\tsteps\tstatus\tseconds\tdescription\r\n"
    "base\t0.9\t1\t40\t7\tKeep \t300\tbaseline\n"
    "best\t0.9\t1\t40\t7\tKEEP\t300\tan idea\twith a tab, caf\\xe9\n"
)


@pytest.fixture
def night(tmp_path):
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools/rerun.py").write_text(FAKE)
    (tmp_path / "results.tsv").write_text(LOG)
    return tmp_path


@pytest.fixture
def call(night, monkeypatch, capsys):
    """Returns a function that calls main and returns its output and all runs so far."""

    def call_main(*args):
        monkeypatch.setattr(sys, "argv", ["audit", str(night), *map(str, args)])
        audit.main()
        return capsys.readouterr().out, (night / "calls").read_text().splitlines()

    return call_main


def test_baseline_and_last_keep_are_trained_in_turn(call, monkeypatch):
    out, calls = call("--seeds", 200, 201)
    assert calls == [f"{commit} {seed}" for seed in (200, 201) for commit in ("base", "best")]
    assert out.endswith("\ngain of best over base: 0.0350 +- 0.0050\n")  # of 0.03 and 0.04
    assert "| 201 | best | 0.860000 | 7 | ok | 20" in out
    assert "earlier" not in out
    out, calls = call()
    assert len(calls) == 6  # seed 202 was added
    assert "4 runs are from an earlier audit. If the machine may have changed" in out
    assert "gain of best over base: 0.0400 +- 0.0058\n" in out
    monkeypatch.setattr(audit, "SECONDS", 6)
    assert len(call()[1]) == 12  # another budget's runs do not count


def test_a_keep_that_broke_the_rules_is_not_audited(call, night):
    with open(night / "results.tsv", "a") as file:
        file.write("\nmended\t0.9\t1.0\tagain\twithout the leak\n")
    out, _ = call("--seeds", 200)
    assert out.endswith("\ngain of mended over base: 0.0200\n")


def test_each_keep_has_a_gain(call):
    out, _ = call("--keeps", "--seeds", 200)
    assert "gain of worse over base: -0.0100\n" in out
    assert "gain of best over worse: 0.0400\n" in out
    assert "1 of 2 are better than the one before" in out


def test_an_odd_log_is_read_as_the_notebook_reads_it(call, night):
    """The header names the columns; odd bytes, blanks and capitals do no harm."""
    content = ODD_LOG.encode().replace(rb"\xe9", b"\xe9")
    (night / "results.tsv").write_bytes(content)
    rows = read_results(night / "results.tsv")
    assert [row["status"] for row in rows] == ["keep", "keep"]
    assert rows[1]["description"] == "an idea\twith a tab, caf\ufffd"
    assert "gain of best over base: 0.0300\n" in call("--seeds", 200)[0]


def test_a_run_without_a_score_is_named_and_tried_again(call, night, capsys):
    log = night / "results.tsv"
    log.write_text(LOG.replace("best", "broken"))
    for runs in (2, 3):
        with pytest.raises(SystemExit, match="^error: 1 of 2 runs have no score; run this again.$"):
            call("--seeds", 200)
        out = capsys.readouterr().out
        assert "| 200 | broken | nan | 0 | exit 1: error: it cannot be trained |" in out
        assert len((night / "calls").read_text().splitlines()) == runs
    kept = [json.loads(line) for line in (night / "audit.jsonl").read_text().splitlines()]
    assert [run["commit"] for run in kept] == ["base", "broken", "broken"]


def test_a_night_without_a_keep_is_refused(call, night, capsys):
    (night / "results.tsv").write_text("".join(LOG.splitlines(keepends=True)[:2]))
    assert "no keep but the baseline" in refusal(call, capsys)
    (night / "results.tsv").unlink()
    assert "does not exist; give the folder of a night" in refusal(call, capsys)


def refusal(call, capsys, *args):
    """Returns the sentence with which the audit exits."""
    capsys.readouterr()
    with pytest.raises(SystemExit, match="^2$"):
        call(*args)
    return capsys.readouterr().err


def test_lines_that_are_not_runs_are_named_and_left_out(call, night):
    (night / "audit.jsonl").write_text('[1]\n{"commit": "base", "val_bpb": 0.9, "sec')
    out, _ = call("--seeds", 200)
    assert out.count("left out of audit.jsonl: ") == 2
    lines = (night / "audit.jsonl").read_text().splitlines()
    assert [json.loads(line)["commit"] for line in lines[2:]] == ["base", "best"]
    assert len(call("--seeds", 200)[1]) == 2  # nothing is measured again


def test_two_texts_are_not_mixed(call, night, monkeypatch, capsys):
    """Another clone has prepared another text in the shared cache since the first run."""
    monkeypatch.setenv("DATA", "aa")
    call("--seeds", 200)
    before = (night / "audit.jsonl").read_text()
    monkeypatch.setenv("DATA", "bb")
    assert "holds runs on another text (aa) than bb, which" in refusal(call, capsys)
    assert (night / "audit.jsonl").read_text() == before
    monkeypatch.setenv("DATA", "aa")
    call("--seeds", 200, 201)
