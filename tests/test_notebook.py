"""analysis.ipynb over many logs: what it counts, ranks, doubts and draws. All logs but one share a kernel."""

import json
import math
import random
import re
import struct
import sys
from datetime import datetime, timedelta

import nbformat
import pytest
from conftest import ROOT
from nbclient import NotebookClient

NOTEBOOK = ROOT / "analysis.ipynb"
HEADER = "commit\tval_bpb\tmemory_gb\tstatus\tdescription\n"
PROBE = r"""
import itertools
axes = figure.axes[0] if figure.axes else None
boxes = [label.get_window_extent() for label in labels]
inside = axes.get_window_extent() if axes else None
print("PROBE" + json.dumps({
    "rows": len(log), "experiments": len(experiments), "counts": counts.to_dict(), "keep_rate": keep_rate,
    "sigma": sigma, "source": sigma_source, "start": start, "best": best, "running": log.best.tolist(),
    "gains": gains.gain.tolist(), "below": gains.noise.tolist(), "complaints": complaints, "pace": float(pace),
    "descriptions": log.description.tolist(), "scores": log.val_bpb.tolist(), "unbacked": unbacked.commit.tolist(),
    "why": unbacked.why.tolist(), "steps": speed.steps.tolist(), "labels": [label.get_text() for label in labels],
    "title": axes.get_title("left") if axes else figure.texts[0].get_text(), "ylim": axes.get_ylim() if axes else None,
    "overlaps": sum(bool(a.overlaps(b)) for a, b in itertools.combinations(boxes, 2)),
    "outside": sum(not (inside.x0 <= b.x0 and b.x1 <= inside.x1 and inside.y0 <= b.y0 and b.y1 <= inside.y1)
                   for b in boxes),
    "dots_covered": sum(bool(b.contains(*dot)) for b in boxes for dot in axes.transData.transform(
        log.loc[log.kept, ["experiment", "val_bpb"]])) if axes else 0,
}))
plt.close("all")
"""


def row(commit, val_bpb, status, description, memory="44.0"):
    return f"{commit}\t{val_bpb}\t{memory}\t{status}\t{description}\n"


def many(count):
    """A log of `count` experiments with long descriptions, as a night or a week of them might look."""
    rng, best = random.Random(5), 0.9979
    ideas = [
        "halve total batch size to 2**18 tokens",
        "depth 9, aspect 57, width rounds to 640, more memory",
        "RoPE base 10,000 to 200,000, longer context per head",
        "embedding LR 0.6 to 0.8",
        "add 5% warmup",
    ]
    lines = [
        row("ba5e000", f"{best + rng.gauss(0, 6e-4):.6f}", "keep", f"baseline, seed {42 + i % 2}") for i in range(4)
    ]
    for i in range(count):
        commit, idea, roll = f"{i + 1:07x}", f"{rng.choice(ideas)} (try {i})", rng.random()
        if roll < 0.04:
            lines.append(row(commit, "", "crash", idea, "0.0"))
        elif roll < 0.04 + 0.2 / (1 + i / 120):
            best -= rng.expovariate(400 if count < 500 else 1000)
            lines.append(row(commit, f"{best:.6f}", "keep", idea))
        else:
            lines.append(row(commit, f"{best + abs(rng.gauss(0, 0.004)) + 3 * (roll > 0.99):.6f}", "discard", idea))
    return HEADER + "".join(lines)


# Each is 0.0005 from their mean, 1.0010: a variance of 4 * 0.0005^2 / 3.
SIGMA = math.sqrt(1e-6 / 3)
FOUR = [(42, "1.000500"), (43, "1.001500"), (42, "1.001500"), (43, "1.000500")]
BASELINE = "".join(row("ba5e000", score, "keep", f"baseline, seed {seed}") for seed, score in FOUR)
NIGHT = [
    row("b100000", "0.990000", "keep", "wider"),
    row("c200000", "0.995000", "discard", "deeper"),
    row("d300000", "0.000000", "crash", "too deep"),
    row("e400000", "0.989600", "keep", "<b>longer</b> warmdown"),
    row("f500000", "0.500000", "invalid", "reads the validation set"),
    row("a600000", "0.985000", "keep", "shorter window"),
]
NORMAL = HEADER + BASELINE + "".join(NIGHT)
ODD = [r"$\frac{1}{$", "a_b^c_d", r"C:\new\table", "100% of $x$ & %s {0}", '"unbalanced', "日本語 Ω naïve 🙂"]
EMPTY = {"rows": 0, "experiments": 0, "gains": [], "sigma": 0.0005, "labels": [], "unbacked": [], "keep_rate": 0}
NO_SCORE = "Nothing to show yet: {} rows, none with a score."
KNOWN = {
    "rows": 10,
    "experiments": 6,
    "counts": {"keep": 3, "discard": 1, "crash": 1, "invalid": 1},
    "keep_rate": 0.5,
    "sigma": SIGMA,
    "start": 1.001,
    "best": 0.985,
    "gains": [0.011, 0.0046, 0.0004],
    "below": [False, False, True],
    "complaints": [],
}

# name: (results.tsv, what the notebook makes of it)
LOGS = {
    "missing": (None, EMPTY | {"title": NO_SCORE.format(0)}),
    "nothing": ("", EMPTY | {"title": NO_SCORE.format(0)}),
    "header only": (HEADER, EMPTY | {"title": NO_SCORE.format(0), "complaints": []}),
    "normal": (
        NORMAL,
        KNOWN
        | {
            "title": "6 experiments, 3 kept: 1.0010 to 0.9850 bits per byte",
            "source": "standard deviation of the baseline",
            "running": [1.001] * 4 + [0.99] * 3 + [0.9896] * 2 + [0.985],
        },
    ),
    "baseline only": (
        HEADER + BASELINE,
        EMPTY
        | {
            "rows": 4,
            "start": 1.001,
            "best": 1.001,
            "sigma": SIGMA,
            "running": [1.001] * 4,
            "title": "0 experiments, 0 kept: the baseline has 1.0010 bits per byte",
        },
    ),
    "one baseline row": (HEADER + row("ba5e000", "1.0", "keep", "Baseline"), {"sigma": 0.0005, "source": "the floor"}),
    "quiet baseline": (
        HEADER + row("ba5e000", "1.0", "keep", "baseline") * 4,
        {"sigma": 0.0005, "source": "the floor"},
    ),
    "two seeds once": (
        HEADER
        + row("ba5e000", "1.000", "keep", "baseline, seed 42")
        + row("ba5e000", "1.002", "keep", "BASELINE seed=43"),
        {"sigma": math.sqrt(2e-6), "start": 1.001},
    ),
    "no baseline": (
        HEADER + "".join(NIGHT),
        {
            "start": 0.99,
            "best": 0.985,
            "sigma": 0.0005,
            "gains": [0.0046, 0.0004, math.nan],
            "below": [False, True, False],
        },
    ),
    "no keeps": (
        HEADER + BASELINE + NIGHT[1] * 3,
        {
            "counts": {"keep": 0, "discard": 3, "crash": 0, "invalid": 0},
            "keep_rate": 0,
            "best": 1.001,
            "gains": [],
        },
    ),
    "discards only": (HEADER + NIGHT[1] * 3, {"title": "3 experiments, 0 kept", "running": [math.nan] * 3}),
    "all crashes": (
        HEADER + row("1", "", "crash", "a") + row("2", "0.000000", "crash", "b") + row("3", "0.9", "crash", "c"),
        {"title": NO_SCORE.format(3), "scores": [math.nan] * 3, "keep_rate": 0, "complaints": [], "gains": []},
    ),
    "crash first": (
        HEADER + row("ba5e000", "", "crash", "baseline, out of memory", "") + BASELINE + "".join(NIGHT),
        KNOWN | {"rows": 11, "running": [1.001] * 5 + [0.99] * 3 + [0.9896] * 2 + [0.985]},
    ),
    "empty val_bpb": (
        NORMAL + row("1", "", "keep", "x") + row("2", "0.000000", "discard", "y") + row("3", "nan", "invalid", "z"),
        {
            "scores": [*map(float, "1.0005 1.0015 1.0015 1.0005 .99 .995 nan .9896 .5 .985 nan nan nan".split())],
            "best": 0.985,
            "complaints": ["line 12 has no score: val_bpb ''", "line 13 has no score: val_bpb '0.000000'"],
        },
    ),
    "tabs": (
        HEADER + BASELINE + row("b1", "0.99", "keep", "wide\tand\tdeep [0.989 0.991]\t"),
        {
            "descriptions": [f"baseline, seed {seed}" for seed, _ in FOUR] + ["wide and deep [0.989 0.991]"],
            "labels": ["wide and deep"],
        },
    ),
    "odd text": (
        HEADER + BASELINE + "".join(row(f"{i}", f"{0.99 - i / 100}", "keep", text) for i, text in enumerate(ODD)),
        {"rows": 10, "labels": ODD, "complaints": []},
    ),
    "extra columns": (
        "status\tcommit\tval_bpb\tnote\tmemory_gb\tdescription\tcost\n" + "keep\tb1\t1.0\tn\t44\tbaseline\tc\n"
        "keep\tb2\t0.99\tn\t44\twide\tand deep\tc\n",
        {"descriptions": ["baseline", "wide and deep"], "gains": [0.01]},
    ),
    "malformed": (
        NORMAL
        + "\n   \nhello\n7777777\t0.98\n8888888\t0.98\t44\tmaybe\twhat\n"
        + row("9999999", "0,98", "keep", "comma")
        + row("9999990", "-1", "discard", "negative")
        + row("9999991", "inf", "discard", "infinite")
        + "9999992\t0.999\t\tdiscard",
        KNOWN
        | {
            "rows": 14,
            "experiments": 10,
            "counts": {"keep": 4, "discard": 4, "crash": 1, "invalid": 1},
            "keep_rate": 0.4,
            "complaints": [
                "line 14 left out: 1 tabbed fields, status ''",
                "line 15 left out: 2 tabbed fields, status ''",
                "line 16 left out: 5 tabbed fields, status 'maybe'",
                "line 17 has no score: val_bpb '0,98'",
                "line 18 has no score: val_bpb '-1'",
                "line 19 has no score: val_bpb 'inf'",
            ],
        },
    ),
    "Windows": ("\ufeff" + NORMAL.replace("\n", "\r\n"), KNOWN),
    "no header": (NORMAL.removeprefix(HEADER), KNOWN),
    "long": (
        HEADER + BASELINE + row("b1", "0.99", "keep", "word " * 20_000) + row("b2", "0.98", "keep", "x" * 99_999),
        {
            "labels": ["word word word word word word word…", "x" * 39 + "…"],
        },
    ),
    "bytes": (bytes(range(256)) * 9, {"rows": 0, "labels": []}),
    "outliers": (
        NORMAL + row("1", "3.0", "discard", "far off") * 3,
        KNOWN
        | {
            "rows": 13,
            "experiments": 9,
            "counts": {"keep": 3, "discard": 4, "crash": 1, "invalid": 1},
            "keep_rate": 1 / 3,
        },
    ),
    "20": (many(20), {"experiments": 20}),
    "120": (many(120), {"experiments": 120}),
    "1000": (many(1000), {"experiments": 1000}),
}


def write_runs(folder):
    """Records for NORMAL, 400 s apart with a night's pause, and files that are none."""
    scores = [("ba5e000", float(score)) for _, score in FOUR]
    scores += [
        ("b100000", 0.989),
        ("b100000", 0.991),
        ("c2000009f", 0.9950004),
        ("e400000", 0.9894),
        ("e400000", 0.9899),
    ]
    scores += [("a600000+dirty", 0.985), ("0123456", 0.985)]
    start = datetime(2026, 1, 1, 20)
    folder.mkdir()
    for i, (commit, score) in enumerate(scores):
        when = start + timedelta(seconds=400 * i, hours=10 * (i > 4))
        record = {"val_bpb": score, "commit": commit, "seed": 42, "num_steps": 100 + i, "tokens_per_second": 1e6}
        (folder / f"{when:%Y%m%dT%H%M%S}_{commit}_42_{i}.json").write_text(json.dumps(record | {"integrity": "ok"}))
    for name, text in ("20260101T200000_cut_42_1.json", '{"val_bpb": 0.9'), ("20260101T200000_list_1.json", "[1]"):
        (folder / name).write_text(text)
    (folder / "notes.json").write_text('{"commit": "a600000", "val_bpb": 0.985}')


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    """Makes `python3` this interpreter, whatever kernels the user has, and keeps the user's folders as they are."""
    home = tmp_path_factory.mktemp("jupyter")
    (home / "kernels" / "python3").mkdir(parents=True)
    spec = {"argv": [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]}
    spec |= {"display_name": "Python 3", "language": "python"}
    (home / "kernels" / "python3" / "kernel.json").write_text(json.dumps(spec))
    with pytest.MonkeyPatch.context() as patch:
        for name in ("JUPYTER_PATH", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "IPYTHONDIR"):
            patch.setenv(name, str(home))
        patch.delenv("AUTORESEARCH_RESULTS", raising=False)
        yield patch


def execute(notebook, folder):
    return NotebookClient(notebook, timeout=100, resources={"metadata": {"path": str(folder)}}).execute()


def code_cells():
    return [cell.source for cell in nbformat.read(NOTEBOOK, 4).cells if cell.cell_type == "code"]


@pytest.fixture(scope="module")
def found(kernel, tmp_path_factory):
    """{name of a log: (what the notebook made of it, its folder)}; each log has a namespace of its own."""
    root, folders = tmp_path_factory.mktemp("logs"), {}
    write_runs(root / "runs")
    cells = [f"import os\nCODE, PROBE = {chr(10).join(code_cells())!r}, {PROBE!r}"]
    for i, (name, (text, _)) in enumerate(LOGS.items()):
        folders[name] = root / str(i)
        folders[name].mkdir()
        if text is not None:
            (folders[name] / "results.tsv").write_bytes(text if isinstance(text, bytes) else text.encode())
        runs = root / ("runs" if name == "normal" else "no runs")
        cells.append(
            f"os.environ['AUTORESEARCH_RUNS'] = {str(runs)!r}\nos.chdir({str(folders[name])!r})\n"
            "names = {'display': display}\nexec(CODE, names)\nexec(PROBE, names)"
        )
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(cell, metadata={"tags": ["raises-exception"]}) for cell in cells]
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MPLBACKEND", "Agg")
        outputs = [cell.outputs for cell in execute(notebook, root).cells[1:]]
    results = {}
    for name, output in zip(LOGS, outputs):
        text = "".join(part.get("text", "") for part in output)
        errors = [f"{part.ename}: {part.evalue}" for part in output if part.output_type == "error"]
        probe = text.rpartition("PROBE")[2]
        results[name] = (
            (errors or [text]) if errors or "PROBE" not in text else json.loads(probe.splitlines()[0]),
            folders[name],
        )
    return results


@pytest.mark.parametrize("name", LOGS)
def test_any_log(found, name):
    result, folder = found[name]
    assert isinstance(result, dict), result
    for key, value in LOGS[name][1].items():
        numbers = isinstance(value, float) or isinstance(value, list) and all(isinstance(v, float) for v in value)
        if key == "labels":
            assert sorted(result[key]) == sorted(value)
        else:
            assert result[key] == (pytest.approx(value, abs=1e-9, nan_ok=True) if numbers else value), key
    assert result["overlaps"] == result["outside"] == result["dots_covered"] == 0
    picture = (folder / "progress.png").read_bytes()
    assert picture[:8] == b"\x89PNG\r\n\x1a\n" and struct.unpack(">II", picture[16:24]) == (1800, 900)
    assert 5_000 < len(picture) < 1_000_000


@pytest.mark.parametrize("name, least", [("20", 6), ("120", 10), ("1000", 8)])
def test_labels_are_many_and_short(found, name, least):
    result = found[name][0]
    assert least <= len(result["labels"]) <= 16 and max(map(len, result["labels"])) <= 40


def test_outliers_do_not_flatten_the_picture(found):
    result = found["outliers"][0]
    assert 0.96 < result["ylim"][0] < 0.985 and 1.001 < result["ylim"][1] < 1.03


def test_rows_that_no_run_backs_up(found):
    """A mean of two runs and a longer name of the commit count; another score, no record and a dirty tree do not."""
    result = found["normal"][0]
    assert result["unbacked"] == ["e400000", "f500000", "a600000"]
    assert result["why"] == ["its runs: [0.9894 0.9899]", "no run of this commit", "no run of this commit"]


def test_pace_and_steps(found):
    """Seven gaps of 400 s are nine runs an hour, and nine runs made four experiments of the log, the crash included."""
    result = found["normal"][0]
    assert result["pace"] == pytest.approx(4) and math.isnan(found["no keeps"][0]["pace"])
    assert result["steps"] == pytest.approx([101.5] * 4 + [104.5, 106, 107.5])


def test_the_committed_notebook_as_it_is(kernel, tmp_path):
    """Executed plainly, with figures shown in it; what a log says is text, in tables too."""
    (tmp_path / "results.tsv").write_text(NORMAL)
    kernel.setenv("AUTORESEARCH_RUNS", str(tmp_path / "runs"))
    write_runs(tmp_path / "runs")
    outputs = [part for cell in execute(nbformat.read(NOTEBOOK, 4), tmp_path).cells for part in cell.get("outputs", [])]
    printed = "".join(part.get("text", "") for part in outputs)
    assert "6 experiments after 4 baseline rows, keep rate 50.0%" in printed and "4.0 experiments an hour" in printed
    assert not [part for part in outputs if part.get("name") == "stderr"]
    shown = [part.data for part in outputs if "data" in part]
    assert sum("image/png" in data for data in shown) == 2
    tables = "".join(data.get("text/html", "") for data in shown)
    assert "&lt;b&gt;longer" in tables and "<b>longer" not in tables and "tex2jax_ignore" in tables
    assert (tmp_path / "progress.png").stat().st_size > 10_000


def test_it_is_committed_without_outputs():
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    cells = notebook["cells"]
    assert all(
        cell["outputs"] == [] and cell["execution_count"] is None for cell in cells if cell["cell_type"] == "code"
    )
    assert len({cell["id"] for cell in cells}) == len(cells)
    nbformat.validate(nbformat.read(NOTEBOOK, 4))


def test_nothing_from_a_log_can_run():
    source = "\n".join(code_cells())
    assert not re.search(r"\b(eval|exec|read_pickle|compile|__import__|system|subprocess|query)\(", source)
