"""The commands in benchmarks/ on tiny shapes: their tables are there, and what they compare is the
same thing."""

import gc
import json
import math
import re
import sys
import time

import prepare
import train
from benchmarks import (
    attention,
    common,
    evaluate,
    loader,
    overhead,
    pairs,
    preparation,
    protocol,
    random_search,
    step,
    sweep,
    turns,
)
from tests.common import ROOT, edited

import numpy as np
import pytest
import torch

TINY = {
    "DEPTH": "2",
    "ASPECT_RATIO": "32",
    "HEAD_DIM": "32",
    "TOTAL_BATCH_SIZE": "1024",
    "DEVICE_BATCH_SIZE": "2",
    "WINDOW_PATTERN": "'SL'",
}
SETTING = [f"{name}={value}" for name, value in TINY.items()]


@pytest.fixture
def call(monkeypatch, capsys):
    """Calls a benchmark's main with arguments, without compilation; returns the rows of its tables
    as {first column: the others} and all that it printed."""
    torch.compiler.set_stance("force_eager")

    def call_main(module, *args):
        monkeypatch.setattr(sys, "argv", [module.__name__, *map(str, args)])
        try:
            module.main()
        except SystemExit as end:
            assert end.code == 0, end.code
        output = capsys.readouterr().out
        lines = [line for line in output.splitlines() if line.startswith("| ")]
        rows = [line.strip("| ").split(" | ") for line in lines]
        return {row[0]: row[1:] for row in rows}, output

    yield call_main
    torch.compiler.set_stance("default")


@pytest.fixture(scope="module")
def real_run(cache, tmp_path_factory):
    """What overhead.py finds of a real run with a tiny model, the run's record, all its seconds."""
    folder = tmp_path_factory.mktemp("run")
    script = edited(folder / "code")
    begun = time.perf_counter()
    found = overhead.stages(1, folder / "runs", None, script)
    seconds = time.perf_counter() - begun
    [path] = (folder / "runs").glob("*.json")
    return found, json.loads(path.read_text()), seconds


# ---- Loader, metric, attention, step ----
def test_loader(call, cache, fresh_run):
    table, _ = call(loader, "--rows", 8, "--tokens", 64, "--batches", 2, "--rounds", 1)
    assert {loader.BASELINE, "pack_rows, token cache", "make_dataloader"} < set(table)
    assert table[loader.BASELINE][1] == "1.0"
    assert float(table["pack_rows, token cache"][0]) > 0


def test_the_loaders_baseline_packs_the_same_rows():
    rng = np.random.default_rng(0)
    documents = [np.full(rng.integers(1, 90), i, dtype=np.uint16) for i in range(300)]
    fast = [row.tolist() for row in prepare.pack_rows(documents, 33, 20)]
    assert fast[:40] == [row for row, _ in zip(loader.linear_rows(documents, 33, 20), range(40))]


def test_loader_exits_with_1_where_rows_differ(call, cache, fresh_run, monkeypatch):
    def backwards(documents, row_len, buffer_docs=0):
        for row in prepare.pack_rows(documents, row_len):
            yield row[::-1]

    monkeypatch.setattr(loader, "linear_rows", backwards)
    with pytest.raises(AssertionError, match="1"):
        call(loader, "--rows", 8, "--tokens", 64, "--batches", 2, "--rounds", 1)


def test_evaluate(call, monkeypatch):
    for name, value in {"DEPTH": 1, "ASPECT_RATIO": 32, "HEAD_DIM": 32}.items():
        monkeypatch.setattr(train, name, value)
    table, _ = call(evaluate, "--rows", 8, "--batch", 4, "--rounds", 1)
    assert {"losses of all rows", "probes", "score, which is both"} < set(table)
    assert float(table["bare forward passes"][2]) == 1
    assert float(table["score, which is both"][1]) > 0


def test_attention(call):
    shapes = ("--rows", 1, "--tokens", 128, "--heads", 2, "--head-dim", 16)
    table, output = call(attention, *shapes, "--windows", 32, 128, "--rounds", 1)
    assert {"blocks", "sdpa"} <= set(table)
    assert float(table["blocks"][-1]) < train.ATTENTION_TOLERANCE
    assert "fa3: " in output  # why it does not load without a GPU


def test_attention_shows_the_error_of_a_wrong_window(call, monkeypatch):
    def halved(q, k, v, window):
        return train.attend_sdpa(q, k, v, window // 2)

    monkeypatch.setitem(train.BACKENDS, "halved", lambda: halved)
    shapes = ("--rows", 1, "--tokens", 128, "--heads", 2, "--head-dim", 16)
    table, _ = call(attention, *shapes, "--windows", 128, "--rounds", 1)
    assert float(table["halved"][-1]) > train.ATTENTION_TOLERANCE


def put_back_afterwards(monkeypatch):
    for name in ("COMPILE", "ATTENTION", *TINY):
        monkeypatch.setattr(train, name, getattr(train, name))
    monkeypatch.setattr(prepare, "keep_memory", lambda: None)  # nothing undoes that
    monkeypatch.setattr(gc, "disable", lambda: None)


@pytest.mark.parametrize("variant", ["plain", "as shipped"])
def test_step(variant, cache, fresh_run, monkeypatch):
    put_back_afterwards(monkeypatch)
    levers = step.VARIANTS[variant] - {"compile"}
    found = step.measure(levers, SETTING, steps=2)
    seconds = found["seconds"]
    assert found["tokens"] == 1024
    assert found["width"] == 64
    assert found["tokens_per_second"] == 1024 / seconds["step"]
    assert seconds["step"] > seconds["forward"] > 0
    assert found["attention"] == ("sdpa" if variant == "plain" else "blocks")


def test_where_the_time_of_a_step_goes(call, cache, fresh_run, monkeypatch):
    put_back_afterwards(monkeypatch)
    monkeypatch.setenv("TORCHINDUCTOR_CPP_ENABLE_KERNEL_PROFILE", "")
    measured = []
    where_time_goes = step.where_time_goes

    def noted(*args):
        measured.append(where_time_goes(*args))
        return measured[-1]

    monkeypatch.setattr(step, "where_time_goes", noted)
    rows, out = call(step, "--profile", "--steps", "2", "--set", "COMPILE=False", *SETTING)
    del rows["part of a step"]
    [parts] = measured
    assert rows.keys() == parts.keys()
    for name in ("products", "attention", "update: products", "loader"):
        # Not as printed: a small share is 0.000 while other programs run.
        assert 0 < parts[name] / sum(parts.values()) < 1
    assert sum(float(share) for _, share in rows.values()) == pytest.approx(1, abs=0.01)
    assert re.search(r"[0-9]+ tokens/s: [0-9]+ GFLOP/s by the model's count, 0\.[0-9]+ of", out)


def test_every_edit_finds_its_text():
    source = (ROOT / "train.py").read_text()
    for setting, replacements in overhead.EDITS.values():
        for old in replacements:
            assert source.count(old) == 1, old
        compile(common.substitute(source, setting), "train.py", "exec")


def test_edits_are_timed_one_after_another(call, cache, monkeypatch):
    seen = []

    def stages(seconds, runs, inductor, script, cache):
        seen.append(script.read_text())
        (inductor / "x").mkdir(parents=True, exist_ok=True)
        for i in range(len(seen)):
            (inductor / "x" / f"{i}.so").touch()
        return dict.fromkeys([*overhead.STAGES, overhead.OUTSIDE], float(len(seen)))

    monkeypatch.setattr(overhead, "stages", stages)
    rows, _ = call(overhead, "--edits")
    assert list(rows) == ["edit", *overhead.EDITS]
    assert rows["nothing"] == ["6.0", "2.0", "1", "1.00"]
    assert rows["a module"] == ["15.0", "5.0", "1", "2.50"]
    source = (ROOT / "train.py").read_text()
    assert seen[0] == seen[1] == source and len(set(seen)) == len(overhead.EDITS)


def test_random_search_keeps_what_is_lower_and_goes_on(call, tmp_path, monkeypatch):
    settings = []
    scores = [0.92, 0.90, 0.90, None, 0.89, 0.95, 0.8]

    def run(knobs, seconds):
        settings.append(random_search.as_setting(knobs))
        return {"val_bpb": scores[(len(settings) - 1) % 7], "integrity": "ok", "num_steps": 100}

    monkeypatch.setattr(random_search, "run", run)
    rows, _ = call(random_search, tmp_path, "--ideas", 3)
    assert rows["1"][:3] == ["0.900000", "0.9783", "yes"]
    assert [rows[idea][2] for idea in "23"] == ["", ""]  # equal is not lower, no score is none
    again, out = call(random_search, tmp_path, "--ideas", 6)
    assert len(settings) == 7 and {idea: again[idea] for idea in rows} == rows
    assert [again[idea][2] for idea in "456"] == ["yes", "", "yes"]
    assert out.rstrip().endswith(f"best: {again['6'][-1]}")
    for kept, idea in (("1", "2"), ("1", "3"), ("1", "4"), ("4", "5")):
        changed = set(again[idea][-1].split()) ^ set(again[kept][-1].split())
        knobs = {item.partition("=")[0] for item in changed}
        assert 1 <= len(knobs) <= 3  # with the rows at a time
    del settings[:]
    whole, _ = call(random_search, tmp_path / "other", "--ideas", 6)
    assert whole == again


def test_random_search_draws_from_its_ranges():
    source = (ROOT / "train.py").read_text()
    seen = {knob: set() for knob in random_search.RANGES}
    for number in range(400):
        idea = random_search.next_idea({}, number, 0)
        assert 1 <= len(idea) <= 2
        common.substitute(source, random_search.as_setting(idea))
        for knob, value in idea.items():
            seen[knob].add(value)
    for knob, (kind, *limits) in random_search.RANGES.items():
        if kind == "power":
            assert seen[knob] <= {2**i for i in range(limits[0], limits[1] + 1)}
        elif kind == "of":
            assert seen[knob] <= set(limits)
        else:
            assert min(limits) <= min(seen[knob]) < max(seen[knob]) <= max(limits)
        assert len(seen[knob]) > 1
    batch = random_search.as_setting({"TOTAL_BATCH_SIZE": 1024})
    assert batch == "TOTAL_BATCH_SIZE=1024 DEVICE_BATCH_SIZE=2"


# ---- The simulated nights ----
@pytest.fixture
def quiet():
    """Makes a night without noise, but with these effects and this luck of the baseline's run."""

    def make(effects, luck=0.0, tenth=math.inf):
        lab = protocol.Lab(protocol.Night(runs=len(effects), sigma=0, tenth=tenth), number=0)
        lab.effects = np.array(effects)
        lab.interaction[:] = 0
        lab.run_noise[0] = luck
        return lab

    return make


def true_score(lab, rule):
    with pytest.raises(protocol.NightOver):
        protocol.lower_wins(lab, rule)
    return lab.best.truth


def test_without_noise_lower_wins_keeps_what_the_oracle_keeps():
    lab = protocol.Lab(protocol.Night(runs=60, sigma=0), number=3)
    tried = lab.effects[:-1]  # the baseline takes a run
    kept = tried[tried < 0]
    assert len(kept) > 10
    assert true_score(lab, protocol.REFERENCE) == pytest.approx(kept.sum())


def test_a_lucky_score_is_measured_again_after_ten_discards(quiet):
    effects = [-1.0] * 13  # runs: the baseline, ten discards, the baseline again, an idea
    rule = protocol.Rule(ideas=protocol.NEVER)
    assert true_score(quiet(effects, luck=-5), rule) == -1
    assert true_score(quiet(effects[:12], luck=-5), rule) == 0
    assert true_score(quiet(effects, luck=-5), protocol.REFERENCE) == 0


def test_the_six_best_discards_are_tried_together_after_fifteen_ideas(quiet):
    effects = [-0.1 * i for i in range(15)] + [50.0] * 2
    rule = protocol.Rule(discards=protocol.NEVER)
    gain = 1.4 + 1.3 + 1.2 + 1.1 + 1.0 + 0.9
    assert true_score(quiet(effects, luck=-gain + 0.1), rule) == pytest.approx(-gain)
    assert true_score(quiet(effects, luck=-gain - 0.1), rule) == 0
    assert true_score(quiet(effects, luck=-gain + 0.1), protocol.REFERENCE) == 0


@pytest.mark.parametrize("drift, effect, best", [(5, -1, -1), (-5, 1, 0)])
def test_the_score_to_beat_is_measured_again_for_another_speed(quiet, drift, effect, best):
    """A good change on a machine that became slow; a bad one on a machine that became fast."""
    found = []
    for rule in (protocol.Rule(), protocol.REFERENCE):
        lab = quiet([effect, 50, 50], tenth=2)  # the third run is the second idea's or the best's
        lab.drift = [0, drift, drift]
        found.append(true_score(lab, rule))
    assert found == [best, effect - best]


def test_habits_help_where_the_machine_drifts_and_an_oracle_beats_them():
    night = protocol.NIGHTS["small, shared"]

    def mean(rule):
        return np.mean([protocol.true_gain(rule, night, number) for number in range(100)])

    gains = {name: mean(rule) for name, rule in protocol.RULES.items()}
    assert gains["reference"] < gains["without again for speed"] < gains["program.md"]
    assert max(gains.values()) == gains["oracle"] > 1.5 * gains["program.md"]


def test_protocol_prints_a_row_per_rule_and_the_ratios(call):
    table, output = call(protocol, "--nights", 3)
    assert list(table) == ["rule", *protocol.RULES]
    assert table["rule"] == list(protocol.NIGHTS)
    shown = [re.search(r"\((\S+) ", cell).group(1) for cell in table["program.md"]]
    assert output.splitlines()[-1] == f"program.md / reference: {' '.join(shown)}"
    gains = [float(table[name][2].split()[0]) for name in ("program.md", "reference")]
    assert float(shown[2]) == pytest.approx(gains[0] / gains[1], rel=0.01)
    table, _ = call(protocol, "--nights", 3, "--search")
    assert table["together 6"] == table["discards 10"] == table["program.md"]
    assert table["together 2"] != table["program.md"]


def test_the_simulated_nights_stay_the_same():
    """Numbers in texts were made by them."""
    gains = [protocol.true_gain(protocol.Rule(), n, 7) for n in protocol.NIGHTS.values()]
    assert np.round(gains, 2).tolist() == [29.13, 23.38, 233.41, 33.82, 243.97, 199.45]


def test_of_two_flagged_runs_the_one_with_more_steps_counts():
    for runs, counts in (
        ([("slow", 5), ("slow", 9)], 1),
        ([("slow", 9), ("ok", 5)], 0),
        ([("ok", 1), ("ok", 5)], 0),
    ):
        records = [{"integrity": flag, "num_steps": steps} for flag, steps in runs]
        finished = iter([common.Finished(record, 0) for record in records])
        assert random_search.better_of_two(lambda runs=finished: next(runs)) == records[counts]


def test_preparation(call, corpus, monkeypatch):
    monkeypatch.setattr(preparation.os, "cpu_count", lambda: 1)
    rows, out = call(preparation, corpus, "--rounds", 1)
    assert rows["threads"][1] == "1.00" and float(rows["1 processes"][0]) > 0
    assert "M tokens, 1 cores" in out


def test_threads_and_processes_make_the_same_tokens(cache, corpus, tmp_path):
    [shard, *_] = shards = sorted(corpus.glob("*.parquet"))[:-1]
    (tmp_path / prepare.TOKENIZER_FILE).symlink_to(prepare.ROOT / prepare.TOKENIZER_FILE)
    found = [preparation.encode_shard(shard, tmp_path) for shard in shards]
    assert preparation.by_threads(shards, tmp_path) == sum(found)
    own = (tmp_path / f"{shard.stem}.u16").read_bytes()
    assert own and (tmp_path / prepare.TOKENS_FILE).read_bytes().startswith(own)


@pytest.mark.parametrize("variant", step.VARIANTS)
def test_every_variant_can_be_a_whole_run(variant, tmp_path):
    levers = step.VARIANTS[variant]
    common.copy_scripts(tmp_path, " ".join(step.setting_of(levers)), step.edits_of(levers))
    source = (tmp_path / "train.py").read_text()
    compile(source, "train.py", "exec")
    assert bool(re.search("^COMPILE *= False", source, re.M)) == ("compile" not in levers)
    assert ("dtype = choose_dtype(" in source) == ("bf16" in levers)
    assert ("prepare.keep_memory = lambda: None" in source) == ("memory kept" not in levers)
    assert (source == (ROOT / "train.py").read_text()) == (variant == "as shipped")


def test_step_prints_the_failure_of_a_variant_as_its_row(call, monkeypatch):
    def measure_in_a_process(variant, args):
        if variant == "plain":
            raise common.RunError("error: no luck")
        seconds = {"step": 1, "forward": 0.5, "backward": 0.3, "update": 0.2}
        shape = {"device": "cpu", "depth": 1, "width": 64, "tokens": 1024, "rows": 2}
        speed = 1000 if variant == "without compile" else 1500
        cost = {"tokens_per_second": speed, "mfu": None, "peak_mb": 9, "attention": "sdpa"}
        return {"seconds": seconds} | shape | cost

    monkeypatch.setattr(step, "measure_in_a_process", measure_in_a_process)
    table, _ = call(step, "--variants", "plain", "without compile", "as shipped")
    assert table["plain"][0] == "error: no luck"
    assert [table[name][5] for name in ("without compile", "as shipped")] == ["1.00", "1.50"]


# ---- Whole runs ----
def test_a_real_run_has_what_the_tables_show(real_run):
    _, record, _ = real_run
    assert set(pairs.MEASURES) - set(record) == {"outside_training_seconds"}
    assert set(pairs.SAME) < set(record)
    assert set(sweep.COLUMNS) - set(record) == {"ratio", "setting"}


def test_overhead_names_every_stage(real_run):
    found, record, whole = real_run
    parts = [*overhead.STAGES, overhead.LAST_STAGE]
    assert set(found) == {*parts, "evaluation", overhead.OUTSIDE}
    assert all(seconds >= 0 for seconds in found.values())
    assert math.isclose(sum(found[part] for part in parts), whole, abs_tol=0.1)
    outside = whole - record["training_seconds"]
    assert math.isclose(found[overhead.OUTSIDE], outside, abs_tol=0.1)
    assert outside > found["evaluation"] > 0


def test_sweep(call, real_run, monkeypatch):
    _, record, _ = real_run

    def run(job, seconds, steps, jobs):
        setting, seed = job
        if setting == "DEPTH=0":
            return common.RunError("error: no luck")
        score = 1.0 if setting else 2.0
        return record | {"val_bpb": score, "seed": seed}

    monkeypatch.setattr(sweep, "run", run)
    _, output = call(sweep, "", "DEPTH=3", "DEPTH=0")
    _, best_first = output.split("best first")
    assert "error: no luck" in output
    rows = [line.split(" | ") for line in best_first.splitlines() if line.startswith("| ")][1:]
    assert [row[0] for row in rows] == ["| 1.0000", "| 2.0000"]
    assert [row[1] for row in rows] == ["0.5000", "1.0000"]
    assert [row[-1] for row in rows] == ["`DEPTH=3` |", "none |"]
    with pytest.raises(AssertionError, match="DEPHT=3"):  # before anything runs
        call(sweep, "", "DEPHT=3")
    with pytest.raises(AssertionError, match="@fast"):
        call(sweep, "", "DEPTH=3 @fast")


def test_sweep_by_steps(cache):
    knobs = "DEPTH=1 ASPECT_RATIO=64 TOTAL_BATCH_SIZE=512 DEVICE_BATCH_SIZE=1 COMPILE=False"
    record = sweep.run((f"{knobs} @1.5", 44), seconds=0, steps=2, jobs=2)
    assert (record["num_steps"], record["seed"], record["depth"]) == (3, 44, 1)
    assert 0 < record["val_bpb"] < 20


FAKE = """
import json, os, pathlib, sys, time
seed = os.environ.get("SEED", "none")
with open({log!r}, "a") as log:
    print({name!r}, pathlib.Path(__file__).name, seed, file=log)
if seed == "43" and {name!r} == "after":
    sys.exit("error: no luck")
record = dict(tokens_per_second=1000.0 if {name!r} == "before" else 1250.0, num_steps=10,
              val_bpb=1.0, startup_seconds=3.0, eval_seconds=2.0, training_seconds=0.01,
              peak_vram_mb=500.0, integrity="ok", data={name!r}, profile="small", device="cpu",
              torch="2")
pathlib.Path(os.environ["AUTORESEARCH_RUNS"], "a.json").write_text(json.dumps(record))
"""


@pytest.fixture
def fakes(tmp_path):
    """Two folders whose scripts write into a log that they ran, and how train.py ends."""
    for name in ("before", "after"):
        (tmp_path / name).mkdir()
        source = FAKE.format(name=name, log=str(tmp_path / "log"))
        (tmp_path / name / "train.py").write_text(source)
        (tmp_path / name / "prepare.py").write_text(source.split("if seed")[0])
    return tmp_path


def test_steps_in_turn(call, monkeypatch):
    for name, module in (("prepare", prepare), ("train", train)):
        monkeypatch.setitem(sys.modules, name, module)  # to be put back
    tiny = f"{ROOT}:{','.join(SETTING)}"
    double = tiny.replace("TOTAL_BATCH_SIZE=1024", "TOTAL_BATCH_SIZE=2048")
    table, _ = call(turns, tiny, double, "--steps", 3)
    assert set(table) == {"train.py", tiny, double}
    assert table[tiny][-1] == "1.000"
    for argument, tokens in ((tiny, 1024), (double, 2048)):
        step_ms, forward, backward, update, speed, _ = map(float, table[argument])
        assert step_ms >= max(forward, backward, update)
        assert speed == pytest.approx(1000 * tokens / step_ms, rel=0.2)


def test_pairs_run_in_turn(call, fakes):
    caches = ("--cache", fakes / "one", fakes / "two")
    run = (fakes / "before", fakes / "after", "--seconds", 1, "--pairs", 3)
    table, output = call(pairs, *run, *caches)
    log = (fakes / "log").read_text().splitlines()
    ready = ["before prepare.py none", "before train.py none"]
    assert log[:4] == ready + [line.replace("before", "after") for line in ready]
    seeds = (42, 43, 44)
    assert log[4:] == [f"{side} train.py {seed}" for seed in seeds for side in pairs.SIDES]
    assert "exit 1: error: no luck" in output
    assert "2 pairs of 1 s" in output  # the second is left out
    assert table["tokens_per_second"] == ["1000", "1250", "1.250", "1.250", "1.250"]
    assert "data differs, before and after" in output


def test_pairs_need_a_cache_for_each_ruler(call, fakes, capsys):
    with pytest.raises(AssertionError, match="2"):
        call(pairs, fakes / "before", fakes / "after")
    assert "the two prepare.py differ" in capsys.readouterr().err
    assert not (fakes / "log").exists()


LINES = {
    "new": "run: a|precision: b|model: c|training: d|step     1 e|step     2 f|---",
    "old": "device: a|model: c|run: d|step     1 e|step     2 f|---",
    "cut": "run: a|model: c|training: d",
}


@pytest.fixture
def speakers(tmp_path):
    """{name: a train.py that prints those lines and the end of a block}"""
    scripts = {}
    for name, lines in LINES.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "prepare.py").write_text("")
        scripts[name] = tmp_path / name / "train.py"
        ends = "eval_seconds: 0.25|training_seconds: 0.01"
        scripts[name].write_text(f"for line in {f'{lines}|{ends}'.split('|')}:\n    print(line)\n")
    return scripts


def test_overhead_of_two_versions(call, speakers):
    versions = ("--script", speakers["new"], "--pair", speakers["old"])
    table, _ = call(overhead, *versions, "--rounds", 1)
    assert table["seconds"] == ["script", "pair", "script / pair"]
    assert list(table) == ["seconds", *overhead.SHOWN]
    assert table["evaluation"] == ["0.2", "0.2", "1.00"]


def test_overhead_says_which_line_is_missing(speakers, tmp_path):
    with pytest.raises(common.RunError, match="no line began with step "):
        overhead.stages(1, tmp_path, None, speakers["cut"])


# ---- What they share ----
def test_substitute_changes_one_line_and_keeps_its_comment():
    source = "DEPTH2 = 1\nDEPTH = 8    # layers\nWIDTH = f(1, 2)\n"
    changed = common.substitute(source, "DEPTH=2**3 WIDTH='a\\1'")
    assert changed == "DEPTH2 = 1\nDEPTH = 2**3    # layers\nWIDTH = 'a\\1'\n"
    for setting in ("HEIGHT=1", "DEPTH", "=1", "DEPTH="):
        with pytest.raises(SystemExit, match="a setting is KNOB=value"):
            common.substitute(source, setting)


def test_last_words_are_the_reason():
    assert common.last_words("step 1\nerror: no room\nTraceback\n") == "error: no room"
    assert common.last_words("step 1\nValueError: x\n\n") == "ValueError: x"
    assert common.last_words("") == "it said nothing"


def test_a_script_that_hangs_is_killed(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import time\ntime.sleep(60)\n")
    begun = time.monotonic()
    with pytest.raises(common.RunError, match="had not ended after 1 s"):
        common.run_script(script, {}, limit=1)
    assert time.monotonic() - begun < 10


def test_every_command_of_the_benchmarks_is_documented():
    text = (ROOT / "benchmarks" / "README.md").read_text()
    files = {path.name for path in (ROOT / "benchmarks").glob("*.py")}
    assert files == set(re.findall(r"benchmarks/(\w+\.py)", text))
    for path in (ROOT / "benchmarks" / "results").iterdir():
        assert re.fullmatch(r"\d{4}-\d\d-\d\d-[a-z0-9-]+\.md", path.name), path.name
