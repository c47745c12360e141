"""
Trains a commit again, in a clean copy and with the seed of the environment.

    SEED=100 uv run tools/rerun.py COMMIT    the seed is 42 by default

The run has its own home, temporary folder, compiled code, and a cache of links to the prepared
files. Nothing stops it from reading absolute paths; look for those in the diff.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the root of the repository
import prepare

# The first three may name another repository.
LEFT_OUT = """
    GIT_DIR GIT_WORK_TREE GIT_INDEX_FILE
    AUTORESEARCH_RUNS PYTHONPATH PYTHONSAFEPATH TORCHINDUCTOR_CACHE_DIR TRITON_CACHE_DIR
""".split()


def main(commit):
    root = Path(prepare.__file__).parent
    environment = {key: os.environ[key] for key in os.environ if key not in LEFT_OUT}
    git = ["git", "-C", root]
    look_up = [*git, "rev-list", "--max-count=1", "--abbrev-commit", commit, "--"]
    found = subprocess.run(look_up, env=environment, capture_output=True, text=True)
    if found.returncode != 0:
        prepare.fail(found.stderr.strip().removeprefix("fatal: "))  # a bad commit or a wrong owner
    name = found.stdout.strip()
    prepare.lock_run(root)
    with tempfile.TemporaryDirectory(prefix="autoresearch-rerun-") as clean:
        prepared = Path(clean, "cache", prepare.PROFILE)
        for part in (f"{clean}/home", f"{clean}/tmp", f"{clean}/tree", prepared):
            os.makedirs(part)
        for file in (
            prepare.ROWS_FILE,
            prepare.TOKENS_FILE,
            prepare.ENDS_FILE,
            prepare.MANIFEST_FILE,
        ):
            (prepared / file).symlink_to(prepare.PREPARED / file)
        archive = [*git, "archive", f"--output={clean}/tree.tar", name]
        subprocess.run(archive, env=environment, check=True)
        subprocess.run(["tar", "-xf", f"{clean}/tree.tar", "-C", f"{clean}/tree"], check=True)
        for pin in prepare.CACHE.glob("flash-attn3-v1-*"):  # train.load_fa3 wrote it
            shutil.copy(pin, f"{clean}/cache")
        environment.setdefault("HF_HOME", os.path.expanduser("~/.cache/huggingface"))
        environment |= {
            "HOME": f"{clean}/home",
            "TMPDIR": f"{clean}/tmp",
            "AUTORESEARCH_CACHE": f"{clean}/cache",
            "AUTORESEARCH_COMMIT": name,
            "GIT_CEILING_DIRECTORIES": clean,  # the copy is in no repository
        }
        run = subprocess.Popen([sys.executable, "train.py"], cwd=f"{clean}/tree", env=environment)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, frame: run.send_signal(number))
        code = run.wait()
        prepare.RUNS.mkdir(parents=True, exist_ok=True)
        for record in Path(clean, "cache/runs").glob("*.json"):
            shutil.copy(record, prepare.RUNS)
    raise SystemExit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("commit", metavar="COMMIT")
    main(parser.parse_args().commit)
