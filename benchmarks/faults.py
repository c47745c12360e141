"""
Breaks preparation and training on purpose; prints a row a fault, and exits with 1 where one does not end as it should.

    uv run benchmarks/faults.py               # all of it, about 20 minutes on two cores
    uv run benchmarks/faults.py --kills 3     # fewer kills

The embedded corpus, a cache of its own in a temporary folder, a tiny model that is not compiled, a budget of 3 s. A
full disk takes the right to mount a tmpfs, a clock that jumps takes libfaketime; without them the row says so.
"""

import argparse
import glob
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from sweep import substitute

ROOT, WORK = Path(__file__).resolve().parents[1], Path(tempfile.mkdtemp(prefix="autoresearch-faults-"))
CODE = WORK / "code"  # by itself: --verify looks for large files beside prepare.py
TINY = "DEPTH=2 ASPECT_RATIO=32 HEAD_DIM=32 TOTAL_BATCH_SIZE=2048 DEVICE_BATCH_SIZE=4 COMPILE=False WINDOW_PATTERN='SL'"


# ---- Processes and caches --------------------------------------------------------------------------------------------
def start(script, cache, *args, prefix=(), **environment):
    """A process with stdout and stderr in `log`."""
    log = Path(tempfile.mkstemp(dir=WORK, suffix=".log")[1])
    own = {"AUTORESEARCH_PROFILE": "small", "AUTORESEARCH_CACHE": cache, "AUTORESEARCH_TIME_BUDGET": 3}
    environment = os.environ | {key: str(value) for key, value in (own | environment).items()}
    with open(log, "wb") as file:
        command = [*prefix, sys.executable, CODE / script, *args]
        process = subprocess.Popen(command, env=environment, cwd=CODE, stdout=file, stderr=file)
    process.log = log
    return process


def finish(process):
    """(exit code, output); a traceback is never what a user should read."""
    code = process.wait(timeout=300)
    output = process.log.read_text()
    assert "Traceback" not in output, output
    return code, output


def run(script, cache, *args, **options):
    return finish(start(script, cache, *args, **options))


def until(process, text):
    while text not in process.log.read_text() and process.poll() is None:
        time.sleep(0.05)


def finished(cache):
    """{file: identity} of all that a later preparation has no reason to touch."""
    kept = (path for path in (cache / "small").glob("*/*") if path.is_file() and path.suffix != ".tmp")
    return {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in kept}


def artefacts(cache):
    return json.loads((cache / "small" / "manifest.json").read_text())["files"]


def records(folder):
    """Every record of a run there; raises where one is not whole."""
    found = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    assert all({"val_bpb", "integrity", "train"} <= record.keys() for record in found)
    return found


def copy(name):
    """The whole cache once more, with the times of its files."""
    shutil.copytree(WORK / "whole" / "small", WORK / name / "small")
    return WORK / name


STAGES = {"rows": "rows.bin", "tokens": ".npy", "tokenizer": ".tiktoken", "corpus": ".parquet"}  # the latest first


# ---- Faults: each returns what happened, and whether that is how it should end -----------------------------------------
def killed_preparation(kills):
    begun = time.monotonic()
    assert run("prepare.py", WORK / "whole")[0] == 0
    seconds, stages, good = time.monotonic() - begun, {}, 0
    for i in range(kills):
        cache = WORK / f"kill{i}"
        process = start("prepare.py", cache)
        time.sleep(random.uniform(0.2, seconds))
        process.kill()
        process.wait()
        before = finished(cache)
        names = " ".join(path.name for path in before)
        stage = next((stage for stage, name in STAGES.items() if name in names), "nothing")
        stages[stage] = stages.get(stage, 0) + 1
        refused = run("train.py", cache)[0] in (0, 2)  # 0: it was killed after its last line
        code, _ = run("prepare.py", cache)
        after = finished(cache)
        same = artefacts(cache) == artefacts(WORK / "whole") and not list(cache.rglob("*.tmp"))
        good += refused and code == 0 and same and before.items() <= after.items()
        shutil.rmtree(cache)
    reached = ", ".join(f"{count} at {stage}" for stage, count in stages.items())
    return f"{good} of {kills} completed, same artefacts, nothing done twice (killed: {reached})", good == kills


def killed_training(kills):
    cache, runs, good = WORK / "whole", WORK / "killed", 0
    begun = time.monotonic()
    assert run("train.py", cache, AUTORESEARCH_RUNS=WORK / "timed")[0] == 0
    seconds = time.monotonic() - begun
    for _ in range(kills):
        process = start("train.py", cache, AUTORESEARCH_RUNS=runs)
        time.sleep(random.uniform(0.2, seconds))
        process.kill()
        process.wait()
        before = len(records(runs))
        good += run("train.py", cache, AUTORESEARCH_RUNS=runs)[0] == 0 and len(records(runs)) == before + 1
    code, output = run("prepare.py", cache, "--verify")
    return f"{good} of {kills} second runs completed; {output.splitlines()[-1]}", good == kills and code == 0


def full_disk():
    disk = WORK / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "none", disk], capture_output=True).returncode:
        return "not tried: no right to mount", True
    try:
        code, output = run("prepare.py", disk)
        subprocess.run(["mount", "-o", "remount,size=1g", disk], check=True)
        again, _ = run("prepare.py", disk)
        same = artefacts(disk) == artefacts(WORK / "whole")
        subprocess.run(["mount", "-o", "remount,size=300m", disk], check=True)
        process = start("train.py", disk)
        until(process, "step ")
        with open(disk / "filler", "wb", buffering=0) as file:
            try:
                while file.write(bytes(1 << 12)):
                    pass
            except OSError:
                pass
        late, report = finish(process)
    finally:
        subprocess.run(["umount", disk], check=True)
    good = (code, again, late) == (2, 0, 2) and same and "No space left" in output and "val_bpb: " in report
    return f"preparation: {code}, {output.splitlines()[-1][:90]}...; with space {again}, same artefacts; full during a run: score printed, {late}", good  # fmt: skip


def read_only_cache():
    cache, runs = copy("readonly"), WORK / "readonly-runs"
    modes = [cache, *cache.rglob("*")]
    for path in modes:
        path.chmod(0o555 if path.is_dir() else 0o444)
    prefix = ("setpriv", "--bounding-set=-dac_override") if os.geteuid() == 0 else ()
    trained, _ = run("train.py", cache, prefix=prefix, AUTORESEARCH_RUNS=runs)
    begun = time.monotonic()
    nowhere, sentence = run("train.py", cache, prefix=prefix, AUTORESEARCH_TIME_BUDGET=60)
    seconds, (prepared, ready) = time.monotonic() - begun, run("prepare.py", cache, prefix=prefix)
    for path in modes:
        path.chmod(0o755)
    good = (trained, nowhere, prepared) == (0, 2, 0) and len(records(runs)) == 1 and seconds < 30 and "ready" in ready
    return f"train {trained}, its record in AUTORESEARCH_RUNS; without that {nowhere} after {seconds:.0f} s: {sentence.splitlines()[-1][:60]}...; prepare {prepared}", good  # fmt: skip


def clock_set_back():
    library = next(iter(glob.glob("/usr/lib/*/faketime/libfaketime.so.1")), None)
    if library is None:
        return "not tried: no libfaketime", True
    offset, runs = WORK / "offset", WORK / "clock"
    offset.write_text("+0")
    fake = {"LD_PRELOAD": library, "FAKETIME_TIMESTAMP_FILE": offset, "FAKETIME_NO_CACHE": 1, "DONT_FAKE_MONOTONIC": 1}
    process = start("train.py", WORK / "whole", AUTORESEARCH_RUNS=runs, AUTORESEARCH_TIME_BUDGET=8, **fake)
    until(process, "step ")
    offset.write_text("-3600")
    code, _ = finish(process)
    [record] = records(runs)
    [name] = runs.iterdir()
    behind = time.time() - time.mktime(time.strptime(name.name.split("_")[0], "%Y%m%dT%H%M%S"))
    good = code == 0 and 7 < record["training_seconds"] < 8.2 and abs(behind - 3600) < 60
    return f"clock {behind:.0f} s behind at the end; {record['training_seconds']:.2f} of 8 s trained, exit {code}", good


def many_at_once():
    cache = WORK / "many"
    preparers, trainers = (
        [start(script, cache) for _ in range(n)] for script, n in (("prepare.py", 2), ("train.py", 3))
    )
    codes = [finish(process)[0] for process in (*preparers, *trainers)]
    same = artefacts(cache) == artefacts(WORK / "whole")
    later = [start(script, cache) for script in ("prepare.py", "prepare.py", "train.py", "train.py", "train.py")]
    later = [finish(process)[0] for process in later]
    good = codes[:2] == [0, 0] and set(codes[2:]) <= {0, 2} and same and later == [0] * 5
    good &= len(records(cache / "runs")) == 3 + codes[2:].count(0)
    return f"empty cache: {codes}; prepared cache: {later}, {len(records(cache / 'runs'))} records", good


def truncated_tokens():
    cache = copy("truncated")
    flat = sorted((cache / "small" / "tokens").glob("*.bin"))[0]
    os.truncate(flat, flat.stat().st_size // 2)
    refused, sentence = run("train.py", cache)
    mended, again = run("prepare.py", cache)[0], run("train.py", cache)[0]
    good = (refused, mended, again) == (2, 0, 0) and flat.name in sentence
    return f"train {refused}, naming {flat.name}; prepare {mended}; train {again}", good and artefacts(cache) == artefacts(WORK / "whole")  # fmt: skip


def replaced_shard():
    cache = copy("replaced")
    shards = sorted((cache / "small" / "data").glob("*.parquet"))
    shutil.copy(shards[1], shards[0])
    verified, finding = run("prepare.py", cache, "--verify")
    mended, again = run("prepare.py", cache)[0], run("prepare.py", cache, "--verify")[0]
    good = (verified, mended, again) == (3, 0, 0) and artefacts(cache) == artefacts(WORK / "whole")
    return f"--verify {verified}: {finding.splitlines()[0].rsplit('/')[-1]}; prepare {mended}; --verify {again}", good


def terminated():
    runs = WORK / "terminated"
    process = start("train.py", WORK / "whole", AUTORESEARCH_RUNS=runs, AUTORESEARCH_TIME_BUDGET=60)
    until(process, "step ")
    process.send_signal(signal.SIGTERM)
    begun = time.monotonic()
    code, output = finish(process)
    good = code == 143 and time.monotonic() - begun < 5 and not records(runs) and "---" not in output
    return f"exit {code} after {time.monotonic() - begun:.1f} s, no score, no record", good


def main():
    parser = argparse.ArgumentParser(description=__doc__.strip().split("\n")[0])
    parser.add_argument("--kills", type=int, default=20, help="of each script (20)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments of the kills (0)")
    args = parser.parse_args()
    random.seed(args.seed)
    CODE.mkdir()
    shutil.copy(ROOT / "prepare.py", CODE)
    (CODE / "train.py").write_text(substitute((ROOT / "train.py").read_text(), TINY))
    faults = {
        "kill -9 of prepare.py": lambda: killed_preparation(args.kills),
        "kill -9 of train.py": lambda: killed_training(args.kills),
        "disk full": full_disk,
        "read-only cache": read_only_cache,
        "clock set back an hour": clock_set_back,
        "two preparers, three trainers": many_at_once,
        "truncated token file": truncated_tokens,
        "shard replaced": replaced_shard,
        "SIGTERM": terminated,
    }
    print("| fault | what happened | as it should |\n|---|---|---|", flush=True)
    failed = 0
    for name, fault in faults.items():
        happened, good = fault()
        failed += not good
        print(f"| {name} | {happened} | {'yes' if good else 'NO'} |", flush=True)
    shutil.rmtree(WORK)
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
