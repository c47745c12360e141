"""README.md and program.md name things that exist, and the commands that an agent copies work."""

import json
import math
import os
import re
import shutil
import subprocess
from statistics import mean, stdev

from tests.common import ROOT, run_script
from tools import experiment

import pytest

PROGRAM = (ROOT / "program.md").read_text()
TOOLS = [f"tools/{name}" for name in ("experiment.py", "night.sh", "rerun.py", "audit.py")]
PAGES = "README docs/manual docs/ideas program cluster/README benchmarks/README nights/README"
OWN = {"next.py"}  # an agent's own file, which git ignores


@pytest.mark.parametrize("page", PAGES.split())
def test_quoted_variables_knobs_and_files_exist(page):
    page = ROOT / f"{page}.md"
    text = page.read_text()
    scripts = ("prepare.py", "train.py", "analysis.ipynb", *TOOLS)
    code = "".join((ROOT / script).read_text() for script in scripts)
    for variable in re.findall(r"AUTORESEARCH_\w+", text):
        assert variable in code, variable
    for word in re.findall(r"`([A-Z][A-Z_]{3,})`", text):
        assert (
            word in os.environ
            or word in code
            or word.startswith(("CUDA", "HF_", "HTTPS_", "OMP", "ANTHROPIC_", "CODEX_"))
        ), word
    paths = re.findall(r"(?:uv run |\]\()([\w/.]+\.(?:py|md|sh|ipynb))", text)
    for path in {*paths, *re.findall(r"`([\w/]+\.py)`", text)} - OWN:
        assert (ROOT / path).exists() or page.parent.joinpath(path).exists(), path


@pytest.mark.parametrize("page", [*ROOT.glob("*.md"), *ROOT.glob("[a-z]*/**/*.md")], ids=str)
def test_links_lead_to_files_and_headings(page):
    for target, anchor in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", page.read_text()):
        if "://" not in target:
            path = page.parent / target if target else page
            assert path.exists(), target
            if anchor:
                headings = re.findall(r"^#+ (.*)", path.read_text().lower(), re.M)
                found = [re.sub(r"[^\w -]", "", line).replace(" ", "-") for line in headings]
                assert anchor in found, (target, anchor)


def test_a_clone_by_windows_git_works_in_wsl(tmp_path):
    """It turns no line end into CRLF, with which no shell script would start; and no filter that a
    user has for all notebooks shows analysis.ipynb as changed."""
    shutil.copy(ROOT / ".gitattributes", tmp_path)
    shutil.copy(ROOT / "tools/night.sh", tmp_path)
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-c", "core.autocrlf=true"]
    for command in ("init -q", "add .", "commit -qm all", "rm -q night.sh", "reset -q --hard"):
        subprocess.run([*git, *command.split()], cwd=tmp_path, check=True)
    assert b"\r" not in (tmp_path / "night.sh").read_bytes()
    command = [*git, "check-attr", "filter", "analysis.ipynb"]
    (tmp_path / "global").write_text("*.ipynb filter=nbstripout\n")
    command[1:1] = ["-c", f"core.attributesFile={tmp_path}/global"]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert found.stdout == "analysis.ipynb: filter: unset\n"


def test_the_commands_of_program_md_exist():
    usage = run_script("tools/experiment.py", "--help").stdout
    commands = re.findall(r"tools/experiment\.py\s(\w+)", PROGRAM)
    assert set(commands) == {"begin", "run", "keep", "discard"}
    assert "a `crash`" in PROGRAM
    for command in (*commands, "crash"):
        assert command in re.search(r"\{(.*)\}", usage)[1].split(",")


def test_the_rule_of_program_md_is_the_one_of_the_tool():
    words = " ".join(PROGRAM.split())
    assert experiment.FIRST_CODE == 12 and "The first twelve" in words
    assert experiment.KNOB_SHARE == 4 and "at most one in four" in words
    least, most = (-experiment.loss_per_e(tokens) * math.log(0.9) for tokens in (10, 1))
    assert f"10 % fewer tokens cost {least:.3f} to {most:.3f}." in words
    for name in ("next.py", "ideas.log"):
        command = ["git", "check-ignore", "-q", name]
        assert f"`{name}`" in PROGRAM and subprocess.run(command, cwd=ROOT).returncode == 0


# ---- Figures ----
FIGURE = re.compile(r"(?<![\w.,])\d[\d,]*(?:\.\d+)*(?![\w.]*\d)")


@pytest.mark.parametrize("page", ["README.md", "docs/manual.md"])
def test_each_figure_has_a_source(page):
    """That is a result, a night's page, a constant of the code, or a row of the table in
    benchmarks/README.md. Numbers of one or two digits are left to the reader."""
    sources = [*ROOT.glob("benchmarks/results/*.md"), *ROOT.glob("nights/**/README.md")]
    sources += [ROOT / name for name in ("benchmarks/README.md", "pyproject.toml", *TOOLS)]
    sources += [ROOT / name for name in ("prepare.py", "train.py", "analysis.ipynb")]
    text = "\n".join(path.read_text() for path in sources).replace("_", "")
    known = {figure.replace(",", "") for figure in FIGURE.findall(text)}
    known |= {str(size) for size in (40 * 2**19, 2**21, 2**18)}  # EVAL_TOKENS, by profile
    told = re.sub(r"\]\([^)]*\)|(?<=#)\d+", "", (ROOT / page).read_text())  # without addresses
    figures = {figure.replace(",", "") for figure in FIGURE.findall(told)}
    assert {figure for figure in figures - known if len(figure) > 2} == set()


def audited_gain(night, before, after):
    """Returns the mean gain of the audit's fresh seeds and its standard error."""
    lines = (ROOT / f"nights/{night}/audit.jsonl").read_text().splitlines()
    runs = [json.loads(line) for line in lines]
    scores = {(run["commit"], run["seed"]): run["val_bpb"] for run in runs}
    seeds = {seed for _, seed in scores if seed < 300}
    gains = [scores[before, seed] - scores[after, seed] for seed in seeds]
    return f"{mean(gains):.4f} ± {stdev(gains) / math.sqrt(len(gains)):.4f}"


@pytest.mark.parametrize(
    ("night", "experiments", "kept"),
    [
        ("2026-11-29", 44, 18),
        ("2026-11-27", 42, 9),
        ("2026-11-26", 44, 16),
        ("2026-11-25", 42, 17),
        ("2026-11-22", 30, 14),
    ],
)
def test_what_is_said_of_a_night_is_in_its_files(night, experiments, kept):
    rows = experiment.read_results(ROOT / f"nights/{night}/results.tsv")
    ideas = {row["commit"]: row["status"] for row in rows if row["status"] != "again"}
    ideas.pop(rows[0]["commit"])  # the baseline
    assert (len(ideas), [*ideas.values()].count("keep")) == (experiments, kept)
    [line] = re.findall(rf".*\({night}/README.md\).*", (ROOT / "nights/README.md").read_text())
    assert f"| {experiments} | {kept} |" in line


def test_the_gain_of_the_last_night_is_that_of_its_audit():
    gain = audited_gain("2026-11-29", "3c158a7", "f8421e5")
    for page in ("README.md", "nights/README.md", "nights/2026-11-29/README.md"):
        words = (ROOT / page).read_text().replace(" bits per byte (standard error)", "")
        assert gain in " ".join(words.split()), page
