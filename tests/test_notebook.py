"""What analysis.ipynb counts, ranks, doubts and draws, over many logs that share a kernel."""

import json
import math
import random
import re
import struct
import sys
from datetime import datetime, timedelta

from tests.common import ROOT

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = ROOT / "analysis.ipynb"
HEADER = "commit\tval_bpb\tmemory_gb\tstatus\tdescription\n"
PROBE = r"""
import itertools

axes = figure.axes[0] if figure.axes else None
texts = axes.texts if axes else []
numbers = [text for text in texts if text.xycoords == "data"]
words = [text for text in texts if text.xycoords != "data"]  # the column: three texts per line
boxes = [word.get_window_extent() for word in words]
title = ""
if figure.texts:
    title = figure.texts[0].get_text()
dots = []  # where the marks of the keeps are, in pixels
marks = []  # where all marks are
ylim = None
if axes:
    title = axes.get_title("left")
    dots = axes.transData.transform(log.loc[log.kept, ["experiment", "height"]])
    marks = [point for group in axes.collections for point in group.get_offsets().tolist()]
    ylim = axes.get_ylim()


def is_inside(box):
    # In the picture, and beside the axes.
    frame = figure.bbox
    in_height = frame.y0 <= box.y0 and box.y1 <= frame.y1
    in_width = axes.get_window_extent().x1 < box.x0 and box.x1 <= frame.x1
    return in_height and in_width


def gap(number):
    # Pixels from the dot to the nearest point of its number. It is zero where they overlap.
    box = number.get_window_extent()
    x, y = axes.transData.transform(number.xy)
    return math.hypot(max(box.x0 - x, 0, x - box.x1), max(box.y0 - y, 0, y - box.y1))


print("PROBE" + json.dumps({
    "rows": len(log),
    "experiments": len(experiments),
    "counts": counts.to_dict(),
    "keep_rate": keep_rate,
    "sigma": sigma,
    "source": sigma_source,
    "start": start,
    "best": best,
    "running": log.best.tolist(),
    "gains": gains.gain.tolist(),
    "below": gains.noise.tolist(),
    "complaints": complaints,
    "pace": float(pace),
    "incumbents": incumbents,
    "claims": claims,
    "curves": curve_lines,
    "descriptions": log.description.tolist(),
    "scores": log.val_bpb.tolist(),
    "unbacked": unbacked.commit.tolist(),
    "why": unbacked.why.tolist(),
    "steps": speed.steps.tolist(),
    "title": title,
    "ylim": ylim,
    "marks": marks,
    "column": [[word.get_text() for word in words[i : i + 3]] for i in range(0, len(words), 3)],
    "labels": [word.get_text() for word in words[5::3]],
    "numbers": {number.get_text(): [float(value) for value in number.xy] for number in numbers},
    "gaps": [gap(number) for number in numbers],
    "sizes": [word.get_fontsize() for word in words],
    "interpreted": sum(bool(text.get_parse_math() or text.get_usetex()) for text in texts),
    "overlaps": sum(bool(a.overlaps(b)) for a, b in itertools.combinations(boxes, 2)),
    "outside": sum(not is_inside(box) for box in boxes),
    "dots_covered": sum(bool(box.contains(*dot)) for box in boxes for dot in dots),
}))
plt.close("all")
"""


def row(commit, val_bpb, status, description, memory="44.0"):
    return f"{commit}\t{val_bpb}\t{memory}\t{status}\t{description}\n"


def many(count, keeps=None):
    """A log of `count` experiments with long descriptions, as a night or a week might look.

    With `keeps`, that many are kept, spread evenly. Otherwise chance decides.
    """
    rng = random.Random(5)
    best = 0.9979
    mean_gain = 1 / 400 if count < 500 else 1 / 1000
    ideas = [
        "halve total batch size to 2**18 tokens",
        "depth 9, aspect 57, width rounds to 640, more memory",
        "RoPE base 10,000 to 200,000, longer context per head",
        "embedding LR 0.6 to 0.8",
        "add 5% warmup",
    ]
    lines = []
    for i in range(4):
        score = best + rng.gauss(0, 6e-4)
        lines.append(row("ba5e000", f"{score:.6f}", "keep", f"baseline, seed {42 + i % 2}"))
    for i in range(count):
        commit = f"{i + 1:07x}"
        idea = f"try {i}: {rng.choice(ideas)}"
        roll = rng.random()
        keep = 0.04 <= roll < 0.04 + 0.2 / (1 + i / 120)
        if keeps is not None:
            keep = i * keeps // count < (i + 1) * keeps // count
        if keep:
            best -= rng.expovariate(1 / mean_gain)
            lines.append(row(commit, f"{best:.6f}", "keep", idea))
        elif roll < 0.04:
            lines.append(row(commit, "", "crash", idea, "0.0"))
        else:
            score = best + abs(rng.gauss(0, 0.004))
            if roll > 0.99:
                score += 3
            lines.append(row(commit, f"{score:.6f}", "discard", idea))
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
ODD = [
    r"$\frac{1}{$",
    "$x^2$",
    "a_b^c_d",
    r"C:\new\table",
    "100% of $x$ & %s {0}",
    '"unbalanced',
    "日本語 Ω naïve 🙂",
]
EMPTY = {
    "rows": 0,
    "experiments": 0,
    "gains": [],
    "sigma": 0.0005,
    "labels": [],
    "unbacked": [],
    "keep_rate": 0,
}
HEADING = ["#", "gain", "kept, largest gain first"]
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
            "title": "6 experiments, 3 kept: 1.0010 to 0.9850",
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
    "one baseline row": (
        HEADER + row("ba5e000", "1.0", "keep", "Baseline"),
        {"sigma": 0.0005, "source": "the floor"},
    ),
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
            "column": [
                HEADING,
                ["3", "0.0046", "shorter window"],
                ["2", "0.0004", "<b>longer</b> warmdown"],
                ["1", "", "wider"],
            ],
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
    "discards only": (
        HEADER + NIGHT[1] * 3,
        {"title": "3 experiments, 0 kept", "running": [math.nan] * 3},
    ),
    "all crashes": (
        HEADER
        + row("1", "", "crash", "a")
        + row("2", "0.000000", "crash", "b")
        + row("3", "0.9", "crash", "c"),
        {
            "title": NO_SCORE.format(3),
            "scores": [math.nan] * 3,
            "keep_rate": 0,
            "complaints": [],
            "gains": [],
        },
    ),
    "crash first": (
        HEADER
        + row("ba5e000", "", "crash", "baseline, out of memory", "")
        + BASELINE
        + "".join(NIGHT),
        KNOWN | {"rows": 11, "running": [1.001] * 5 + [0.99] * 3 + [0.9896] * 2 + [0.985]},
    ),
    "empty val_bpb": (
        NORMAL
        + row("1", "", "keep", "x")
        + row("2", "0.000000", "discard", "y")
        + row("3", "nan", "invalid", "z"),
        {
            "scores": [
                *map(
                    float,
                    "1.0005 1.0015 1.0015 1.0005 .99 .995 nan .9896 .5 .985 nan nan nan".split(),
                )
            ],
            "best": 0.985,
            "complaints": [
                "line 12 has no score: val_bpb ''",
                "line 13 has no score: val_bpb '0.000000'",
            ],
        },
    ),
    "tabs": (
        HEADER + BASELINE + row("b1", "0.99", "keep", "wide\tand\tdeep [0.989 0.991]\t"),
        {
            "descriptions": [f"baseline, seed {seed}" for seed, _ in FOUR]
            + ["wide and deep [0.989 0.991]"],
            "labels": ["wide and deep"],
            "column": [HEADING, ["1", "0.0110", "wide and deep"]],
        },
    ),
    "odd text": (
        HEADER
        + BASELINE
        + "".join(row(f"{i}", f"{0.9 + 0.1 / (i + 2)}", "keep", ODD[i]) for i in range(len(ODD))),
        {"rows": 4 + len(ODD), "labels": ODD, "complaints": []},
    ),
    "control characters": (
        HEADER + BASELINE + row("b1", "0.99", "keep", "a\x0bb\u2028c\x00d\u202ee\x1b[0m"),
        {"labels": ["a b c d e [0m"]},
    ),
    "extra columns": (
        "status\tcommit\tval_bpb\tnote\tmemory_gb\tdescription\tcost\n"
        + "keep\tb1\t1.0\tn\t44\tbaseline\tc\n"
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
        HEADER
        + BASELINE
        + row("b1", "0.99", "keep", "word " * 20_000)
        + row("b2", "0.98", "keep", "x" * 99_999),
        {
            "labels": ["word " * 10 + "wor…", "x" * 53 + "…"],
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
    "worse keeps": (
        NORMAL + row("1", "0.9853", "keep", "simpler") + row("2", "3.0", "keep", "far worse"),
        {
            "column": [
                HEADING,
                ["1", "0.0110", "wider"],
                ["3", "0.0046", "shorter window"],
                ["2", "0.0004", "<b>longer</b> warmdown"],
                ["4", "-0.0003", "simpler"],
                ["5", "-2.0150", "far worse"],
            ],
        },
    ),
    "claimed": (
        NORMAL,
        KNOWN
        | {
            "incumbents": [["e400000", "0.989700"], ["a600000", "0.9862"]],
            "claims": [[0.0181, 0.0012], [0.0210, 0.0009]],
            "sigma": 0.0012,
            "source": "the journal",
            "title": "6 experiments, 3 kept: 1.0010 to 0.9850, "
            "a gain of 0.0210 ± 0.0009 at fresh seeds",
        },
    ),
    "claimed by nonsense": (
        NORMAL,
        KNOWN | {"incumbents": [], "claims": [], "source": "standard deviation of the baseline"},
    ),
    "20": (many(20), {"experiments": 20}),
    "40 keeps": (many(200, keeps=40), {"experiments": 200}),
    "100 keeps": (many(300, keeps=100), {"experiments": 300}),
    "120": (many(120), {"experiments": 120}),
    "1000": (many(1000), {"experiments": 1000}),
}


JOURNALS = {  # beside the log of that name
    "claimed": b"""# Journal of autoresearch/nov22
sigma: 0.0050
sigma: 0.0012
incumbent: e400000 0.989700 weight 1
claim: a600000 seed 200 0.9861
claim: gain 0.0181 +- 0.0012
incumbent: a600000 0.9862 weight 2
 claim: gain 5.0 +- 1.0, said a log
claim: gain 0.0210 +- 0.0009
""",
    "claimed by nonsense": b"sigma: 0.0\nclaim: gain \xff +- 1\nclaim: gain .. +- 0.1\nincumbent:\n",
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
        ("a600000+dirty", 0.985),
        ("0123456", 0.985),
    ]
    when = datetime(2026, 1, 1, 20)
    folder.mkdir()
    for i, (commit, score) in enumerate(scores):
        record = {
            "val_bpb": score,
            "commit": commit,
            "seed": 42,
            "num_steps": 100 + i,
            "tokens_per_second": 1e6,
            "integrity": "ok",
            "curve": [5.0, 4.0, 3.5] if i % 2 else None,
        }
        name = f"{when:%Y%m%dT%H%M%S}_{commit}_42_{i}.json"
        (folder / name).write_text(json.dumps(record))
        when += timedelta(seconds=400)
        if i == 4:
            when += timedelta(hours=10)
    other = {"val_bpb": 0.1, "commit": "b100000", "profile": "medium", "curve": [9.0, 8.0]}
    (folder / "20260301T200000_b100000_42_1.json").write_text(json.dumps(other))
    (folder / "20260101T200000_cut_42_1.json").write_text('{"val_bpb": 0.9')
    (folder / "20260101T200000_list_1.json").write_text("[1]")
    (folder / "notes.json").write_text('{"commit": "a600000", "val_bpb": 0.985}')


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    """Makes `python3` this interpreter, whatever kernels the user has.

    The user's folders stay as they are.
    """
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
    where = {"metadata": {"path": str(folder)}}
    return NotebookClient(notebook, timeout=100, resources=where).execute()


def code_cells():
    return [cell.source for cell in nbformat.read(NOTEBOOK, 4).cells if cell.cell_type == "code"]


def read_probe(outputs):
    """What the probe printed, or a list of what went wrong."""
    errors = [part for part in outputs if part.output_type == "error"]
    if errors:
        return [f"{part.ename}: {part.evalue}" for part in errors]
    text = "".join(part.get("text", "") for part in outputs)
    if "PROBE" not in text:
        return [text]
    return json.loads(text.rpartition("PROBE")[2].splitlines()[0])


@pytest.fixture(scope="module")
def found(kernel, tmp_path_factory):
    """{name of a log: (what the notebook made of it, its folder)}.

    Each log has a namespace of its own.
    """
    root = tmp_path_factory.mktemp("logs")
    write_runs(root / "runs")
    code = "\n".join(code_cells())
    cells = [f"import os\nCODE = {code!r}\nPROBE = {PROBE!r}"]
    folders = {}
    for i, (name, (text, _)) in enumerate(LOGS.items()):
        folder = root / str(i)
        folder.mkdir()
        folders[name] = folder
        if isinstance(text, str):
            text = text.encode()
        if text is not None:
            (folder / "results.tsv").write_bytes(text)
        if name in JOURNALS:
            (folder / "journal.md").write_bytes(JOURNALS[name])
        runs = root / ("runs" if name == "normal" else "no runs")
        cells.append(
            f"os.environ['AUTORESEARCH_RUNS'] = {str(runs)!r}\n"
            f"os.chdir({str(folder)!r})\n"
            "names = {'display': display}\n"
            "exec(CODE, names)\n"
            "exec(PROBE, names)"
        )
    notebook = nbformat.v4.new_notebook()
    for cell in cells:
        metadata = {"tags": ["raises-exception"]}
        notebook.cells.append(nbformat.v4.new_code_cell(cell, metadata=metadata))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MPLBACKEND", "Agg")
        execute(notebook, root)
    results = {}
    for name, cell in zip(LOGS, notebook.cells[1:]):
        results[name] = (read_probe(cell.outputs), folders[name])
    return results


@pytest.mark.parametrize("name", LOGS)
def test_any_log(found, name):
    result, folder = found[name]
    assert isinstance(result, dict), result
    for key, value in LOGS[name][1].items():
        values = value if isinstance(value, list) else [value]
        if all(isinstance(v, float) for v in values):
            value = pytest.approx(value, abs=1e-9, nan_ok=True)
        assert result[key] == value, key
    assert result["overlaps"] == result["outside"] == result["dots_covered"] == 0
    assert result["interpreted"] == 0
    picture = (folder / "progress.png").read_bytes()
    assert picture[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", picture[16:24])
    assert width == 1800
    if len(result["gains"]) < 30:
        assert height == 900
    else:
        assert height > 900
    assert 5_000 < len(picture) < 1_000_000


def read_keeps(text):
    """[(number of the experiment, val_bpb, description)] of a log's keeps, in order."""
    keeps = []
    experiment = 0
    for line in text.splitlines()[1:]:
        _, score, _, status, description = line.split("\t")
        if description.startswith("baseline"):
            continue
        experiment += 1
        if status == "keep":
            keeps.append((experiment, float(score), description))
    return keeps


def is_shown_as(description, shown):
    """Whether the column shows a description whole, or cut as late as there is room."""
    if shown.endswith("…"):
        return description.startswith(shown[:-1]) and 50 <= len(shown) <= 54
    return shown == description


@pytest.mark.parametrize("name, count", [("normal", 3), ("40 keeps", 40), ("100 keeps", 100)])
def test_every_keep_stands_in_the_column(found, name, count):
    """None is left out, the largest gain comes first, and all are large enough to read."""
    result = found[name][0]
    keeps = read_keeps(LOGS[name][0])
    expected = []
    before = result["start"]
    for number, (_, score, description) in enumerate(keeps, 1):
        expected.append((before - score, str(number), description))
        before = score
    expected.sort(key=lambda line: -line[0])
    heading, *lines = result["column"]
    assert heading == HEADING
    assert len(keeps) == len(lines) == count
    for line, (gain, number, description) in zip(lines, expected):
        assert line[:2] == [number, f"{gain:.4f}"]
        assert is_shown_as(description, line[2])
    assert min(result["sizes"]) >= 6.5  # points


@pytest.mark.parametrize("name", ["normal", "worse keeps", "20", "40 keeps", "100 keeps", "1000"])
def test_each_number_is_beside_the_dot_that_its_line_describes(found, name):
    result = found[name][0]
    keeps = read_keeps(LOGS[name][0])
    bottom, top = result["ylim"]
    lines = {number: description for number, _, description in result["column"][1:]}
    assert set(result["numbers"]) == set(lines) == {str(i + 1) for i in range(len(keeps))}
    for number, (experiment, score, description) in enumerate(keeps, 1):
        x, y = result["numbers"][str(number)]
        assert [x, y] in result["marks"]
        assert x == experiment
        if score < top:
            assert y == score
        else:
            assert 0.9 * top + 0.1 * bottom < y < top  # a triangle at the edge
        assert is_shown_as(description, lines[str(number)])
    assert all(0 < gap < 12 for gap in result["gaps"])  # pixels


def test_outliers_do_not_flatten_the_picture(found):
    result = found["outliers"][0]
    assert 0.96 < result["ylim"][0] < 0.985 and 1.001 < result["ylim"][1] < 1.03


def test_rows_that_no_run_backs_up(found):
    """A mean of two runs backs a row up, and so does a longer name of the commit.

    Another score, no record and uncommitted changes do not.
    """
    result = found["normal"][0]
    assert result["unbacked"] == ["e400000", "f500000", "a600000"]
    assert result["why"] == [
        "its runs: [0.9894 0.9899]",
        "no run of this commit",
        "no run of this commit",
    ]


def test_pace_and_steps(found):
    """Seven gaps of 400 s make nine runs per hour.

    Nine runs made four experiments of the log, the crash included.
    """
    result = found["normal"][0]
    assert result["pace"] == pytest.approx(4)
    assert math.isnan(found["no keeps"][0]["pace"])
    assert result["steps"] == pytest.approx([101.5] * 4 + [104.5, 106, 107.5])


def test_curves_of_the_baseline_and_of_keeps(found):
    curve = [5.0, 4.0, 3.5]
    assert found["normal"][0]["curves"] == {
        "baseline": [curve] * 2,
        "kept": [curve] * 2,
        "kept last": [],
    }
    assert found["no keeps"][0]["curves"] == {"baseline": [], "kept": [], "kept last": []}


def test_the_committed_notebook_as_it_is(kernel, tmp_path):
    """It runs as it is and shows its figures. What a log says is text, in tables too."""
    (tmp_path / "results.tsv").write_text(NORMAL)
    kernel.setenv("AUTORESEARCH_RUNS", str(tmp_path / "runs"))
    write_runs(tmp_path / "runs")
    outputs = []
    for cell in execute(nbformat.read(NOTEBOOK, 4), tmp_path).cells:
        outputs += cell.get("outputs", [])
    printed = "".join(part.get("text", "") for part in outputs)
    assert "6 experiments after 4 baseline rows, keep rate 50.0%" in printed
    assert "4.0 experiments per hour" in printed
    assert "left out: 1 runs whose profile, time_budget, data differ" in printed
    assert not [part for part in outputs if part.get("name") == "stderr"]
    shown = [part.data for part in outputs if "data" in part]
    assert sum("image/png" in data for data in shown) == 3
    tables = "".join(data.get("text/html", "") for data in shown)
    assert "&lt;b&gt;longer" in tables
    assert "<b>longer" not in tables
    assert "tex2jax_ignore" in tables
    assert (tmp_path / "progress.png").stat().st_size > 10_000


def test_it_is_committed_without_outputs():
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    cells = notebook["cells"]
    for cell in cells:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            assert cell["execution_count"] is None
    assert len({cell["id"] for cell in cells}) == len(cells)
    nbformat.validate(nbformat.read(NOTEBOOK, 4))


def test_nothing_from_a_log_can_run():
    source = "\n".join(code_cells())
    words = "eval|exec|read_pickle|compile|__import__|system|subprocess|query"
    assert not re.search(rf"\b({words})\(", source)
