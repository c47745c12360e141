"""Runs analysis.ipynb's cells unchanged on many logs: checks counts, ranks and pictures."""

import json
import shutil
import sys

from tests.common import ROOT

import nbformat
import pytest
from nbclient import NotebookClient

HEADER = "commit\tval_bpb\tmemory_gb\tstatus\tdescription\n"
SHOW = """
texts = [text for axes in figure.axes for text in axes.texts]
print("SHOW" + json.dumps({
    "counts": counts.to_dict(), "pace": pace,
    "running": log.best.tolist(), "gains": ranked.gain.tolist(),
    "curves": [values for _, values in curves],
    "texts": [text.get_text() for text in texts],
    "title": title, "lost": lost, "table": table.round(6).fillna(0).to_dict("list"),
    "hours": [label.get_text() for axes in figure.axes for child in axes.child_axes
              for label in child.get_xticklabels()],
}))
"""


def row(commit, val_bpb, status, description):
    return f"{commit}\t{val_bpb}\t44.0\t{status}\t{description}, 18000 tok/s\n"


NIGHT = HEADER + "".join(
    [
        row("ba5e000", "1.000000", "keep", "baseline"),
        row("b100000", "0.990000", "keep", "wider"),
        row("c200000", "0.995000", "discard", "deeper"),
        row("d300000", "", "crash", "too deep"),
        row("e400000", "0.970000", "keep", "longer warmdown"),
    ]
)
ODD = ["$\\frac{1}{$ and $x^2$", "wide\tand\tdeep", '"unbalanced', "it's <b>100%</b> {0}", "Ω 日"]
AGAIN = NIGHT + row("e400000", "0.980000", "{status}", "the machine is slower")
AGAIN += "".join(row(f"f{i}", 0.976 - 0.01 * i, "keep", ODD[i]) for i in range(5))
AGAIN += row("f900000", "0.940000", "keep", "simpler")

# name: (results.tsv, results derived by hand)
LOGS = {
    "night": (
        NIGHT,
        {
            "title": "4 experiments, 2 kept, a gain of 0.0300 ± 0.0058 at fresh seeds",
            "lost": ["b100000"],
            "counts": {"keep": 2, "discard": 1, "crash": 1, "again": 0},
            "running": [1.0, 0.99, 0.99, 0.99, 0.97],
            "gains": [0.02, 0.01],
            "pace": 4.0,
            "curves": [[4.0, 3.0], [9.0, 9.0], [3.0, 2.0]],
            "hours": ["0 h", "1 h"],
            "table": {
                "val_bpb": [1.0, 0.97],
                "steps": [1000, 1100],
                "parameters, M": [3.5, 3.5],
                "memory, GB": ["44.0", "44.0"],
                "tokens per second": [18000.0, 18000.0],
            },
        },
    ),
    "again": (
        AGAIN.replace("{status}", "again"),
        {
            "counts": {"keep": 8, "discard": 1, "crash": 1, "again": 1},
            "running": [
                1.0,
                0.99,
                0.99,
                0.99,
                0.97,
                0.98,
                0.976,
                0.966,
                0.956,
                0.946,
                0.936,
                0.936,
            ],
            "gains": [0.02, 0.01, 0.01, 0.01, 0.01, 0.01, 0.004, -0.004],
            "title": "10 experiments, 8 kept: 1.0000 to 0.9360, not audited",
        },
    ),
    "kept twice": (AGAIN.replace("{status}", "keep"), {}),
    "a crash first": (
        HEADER + row("a700000", "", "crash", "too large") + NIGHT.removeprefix(HEADER),
        {"title": "4 experiments, 2 kept: 1.0000 to 0.9700, not audited", "gains": [0.02, 0.01]},
    ),
    "crash": (HEADER + row("a", "", "crash", "x"), {"gains": [], "title": ""}),
}


def write_night(folder):
    """Writes the records of NIGHT, an hour from first to last, and its audit with three seeds."""
    runs = [
        ("20260101T200000", "ba5e000", 1.0, [4.0, 3.0]),
        ("20260101T202000", "b100000", 0.99, None),
        ("20260101T204000", "e400000", 0.975, [9.0, 9.0]),  # a first try
        ("20260101T205000", "d300000", 0.98, None),  # judged a crash all the same
        ("20260101T210000", "e400000", 0.97, [3.0, 2.0]),
        ("20260109T210000", "e400000", 0.99, [9.0, 9.0]),  # days later
        ("20260101T203000", "b100000+dirty", 0.99, [9.0, 9.0]),  # is not left out
        ("20260101T203000", "7654321", 0.99, [9.0, 9.0]),  # another night's
    ]
    (folder / "runs").mkdir()
    for time, commit, val_bpb, curve in runs:
        record = {"commit": commit, "val_bpb": val_bpb, "curve": curve, "num_params_M": 3.5}
        record["num_steps"] = 1100 if val_bpb == 0.97 else 1000
        (folder / "runs" / f"{time}_{commit}_42_1.json").write_text(json.dumps(record))
    (folder / "runs/20260101T203500_b100000_42_1.json").touch()  # the disk was full
    lines = []
    for seed, gain in [(200, 0.02), (201, 0.04), (202, 0.03), (300, 0.5)]:
        lines.append({"commit": "ba5e000", "seed": seed, "val_bpb": 1.0, "seconds": 300.0})
        lines.append({"commit": "e400000", "seed": seed, "val_bpb": 1 - gain, "seconds": 300.0})
    lines.append(lines[6] | {"commit": "b100000", "val_bpb": 1.1})  # each keep, with seed 300
    lines[5]["val_bpb"] = float("nan")  # it failed; the next line is its second run
    lines.append(lines[5] | {"val_bpb": 0.97})
    lines.append(lines[5] | {"val_bpb": 2.0, "seconds": 5.0})  # a quick trial
    lines += [line | {"seed": 203, "integrity": "ok"} for line in lines[:2]]
    lines[-1]["integrity"] = "overtime: 9 s"  # does not count
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "audit.jsonl").write_text(text + '{"commit": "ba5e0')  # killed while it wrote


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    """Runs all cells per log in one kernel, this interpreter. Returns {name: (folder, outputs)}."""
    home = tmp_path_factory.mktemp("jupyter")
    (home / "kernels" / "python3").mkdir(parents=True)
    spec = {"argv": [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]}
    spec |= {"display_name": "Python 3", "language": "python"}
    (home / "kernels" / "python3" / "kernel.json").write_text(json.dumps(spec))
    folders = {name: tmp_path_factory.mktemp("log") for name in (*LOGS, "recorded")}
    for name, (log, _) in LOGS.items():
        (folders[name] / "results.tsv").write_text(log, encoding="utf-8")
    write_night(folders["night"])
    for name in ("results.tsv", "audit.jsonl", "records.jsonl"):
        shutil.copy(ROOT / "nights/2026-11-29" / name, folders["recorded"])
    notebook = nbformat.v4.new_notebook()
    for folder in folders.values():
        begin = f"%reset -f\nimport os\nos.chdir({str(folder)!r})"
        cells = [begin, *code_cells(), SHOW]
        notebook.cells += [nbformat.v4.new_code_cell(cell) for cell in cells]
    with pytest.MonkeyPatch.context() as patch:
        for variable in ("JUPYTER_PATH", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "IPYTHONDIR"):
            patch.setenv(variable, str(home))
        patch.delenv("AUTORESEARCH_RESULTS", raising=False)
        patch.delenv("PYTHONPATH")  # a fork's log may lie anywhere
        (home / "matplotlibrc").write_text("text.usetex: true")  # which needs TeX
        patch.setenv("MATPLOTLIBRC", str(home))
        patch.setenv("AUTORESEARCH_RUNS", "runs")
        where = {"metadata": {"path": str(home)}}
        NotebookClient(notebook, timeout=100, allow_errors=True, resources=where).execute()
    results = {}
    for i, (name, folder) in enumerate(folders.items()):
        part = notebook.cells[i * len(cells) : (i + 1) * len(cells)]
        results[name] = (folder, [output for cell in part for output in cell.outputs])
    return results


def code_cells():
    cells = nbformat.read(ROOT / "analysis.ipynb", 4).cells
    return [cell.source for cell in cells if cell.cell_type == "code"]


def read(outputs):
    """Returns what SHOW printed, if nothing failed."""
    for output in outputs:
        assert output.output_type != "error", output.evalue
        assert output.get("name") != "stderr", output.text
    text = "".join(output.get("text", "") for output in outputs)  # may come in pieces
    return json.loads(text.partition("SHOW")[2])


@pytest.mark.parametrize("name", LOGS)
def test_a_log(executed, name):
    folder, outputs = executed[name]
    shown = read(outputs)
    for key, value in LOGS[name][1].items():
        if isinstance(value, (float, list)) and key != "curves":
            value = pytest.approx(value, abs=1e-9)
        assert shown[key] == value, key
    assert (folder / "progress.png").stat().st_size > 5_000


def test_best_kept_twice_is_what_older_nights_call_again(executed):
    old, new = (read(executed[name][1]) for name in ("again", "kept twice"))
    assert old == new


def test_a_description_is_text(executed):
    texts = " ".join(read(executed["again"][1])["texts"])
    assert all(words in texts for words in (*ODD[2:], ODD[0], "wide"))


def test_the_recorded_night(executed):
    """The gain and the counts are those of the night's page. The pace leaves out what came before
    the first run and after the last."""
    outputs = executed["recorded"][1]
    shown = read(outputs)
    assert shown["title"].startswith("44 experiments, 18 kept, a gain of 0.1428 ± 0.0049 at")
    assert len(shown["lost"]) == 4
    assert shown["pace"] == pytest.approx(7.05, abs=0.01) and shown["curves"]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 2  # and the curves
