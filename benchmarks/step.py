"""
What a training step costs with all levers, without each, and without any.

    uv run benchmarks/step.py                                    # train.py's own settings
    uv run benchmarks/step.py --set DEPTH=6 TOTAL_BATCH_SIZE=8192
    uv run benchmarks/step.py --variants "as shipped" "without memory kept" --rounds 7
    uv run benchmarks/step.py --profile                          # where the time of a step goes
    uv run benchmarks/step.py --memory-gb 8 12 16 24             # on a GPU: how many rows fit
    uv run benchmarks/step.py --run plain "as shipped"           # whole runs: what that is worth

Random tokens, no loader; medians of a step, its forward and backward passes and its update. Each
measurement is a process of its own, the variants in turn; the ratio is the speed beside the first.
A value after --set is a Python literal.
"""

import argparse
import ast
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the root of the repository
from benchmarks.common import (
    RunError,
    copy_scripts,
    last_words,
    print_header,
    print_row,
    random_tokens,
    run_training,
)

VARIANTS = {  # name: the levers it has
    "plain": set(),
    "plain, but compiled": {"compile"},
    "plain, but bf16": {"bf16"},
    "plain, but attention chosen": {"attention"},
    "plain, but memory kept": {"memory kept"},
    "without compile": {"bf16", "attention", "memory kept"},
    "without bf16": {"compile", "attention", "memory kept"},
    # scaled_dot_product_attention instead
    "without attention chosen": {"compile", "bf16", "memory kept"},
    "without memory kept": {"compile", "bf16", "attention"},  # on a CPU
    "as shipped": {"compile", "bf16", "attention", "memory kept"},
}


# ---- Levers ----
def setting_of(levers):
    """The setting of train.py's knobs by which a variant goes without levers."""
    setting = []
    if "compile" not in levers:
        setting.append("COMPILE=False")
    if "attention" not in levers:
        setting.append("ATTENTION='sdpa'")
    return setting


def edits_of(levers):
    """What no knob of train.py does, as edits of its text."""
    edits = {}
    if "bf16" not in levers:
        edits["dtype = choose_dtype(device)"] = "dtype = torch.float32"
    if "memory kept" not in levers:
        first = "def main():\n"
        edits[first] = f"{first}    import prepare\n    prepare.keep_memory = lambda: None\n"
    return edits


def set_knobs(train, setting):
    for item in setting:
        name, _, value = item.partition("=")
        if not hasattr(train, name):
            raise SystemExit(f"error: train.py has no knob {name}; a setting is KNOB=value.")
        try:
            setattr(train, name, ast.literal_eval(value))
        except (SyntaxError, ValueError):
            raise SystemExit(f"error: {item}: the value is a Python literal.") from None


# ---- One variant, in this process ----
@dataclass
class Subject:
    """What a run has when its training begins."""

    train: object  # the module
    device: object
    model: object
    compiled_model: object
    optimizer: object
    attention: str
    rows: int
    micro_batches: int


def build(levers, setting, memory_gb=None):
    import prepare
    import train

    import torch

    torch.set_float32_matmul_precision("high")
    set_knobs(train, [*setting_of(levers), *setting])
    if "memory kept" not in levers:
        prepare.keep_memory = lambda: None
    device = prepare.start()
    if memory_gb:
        total = torch.cuda.get_device_properties(device).total_memory / 2**30
        torch.cuda.set_per_process_memory_fraction(min(1.0, memory_gb / total))
    dtype = train.choose_dtype(device)
    if "bf16" not in levers:
        dtype = torch.float32
    config = train.derive_config(prepare.VOCAB_SIZE)
    attention, attend = train.choose_attention(device, dtype, config)
    model = train.GPT(config, attend).to(device)
    compiled_model, optimizer, rows = train.warm_up(model, dtype)
    train.set_schedules(optimizer, 0.0, 0)
    return Subject(
        train=train,
        device=device,
        model=model,
        compiled_model=compiled_model,
        optimizer=optimizer,
        attention=attention,
        rows=rows,
        micro_batches=train.accumulation_steps(rows),
    )


def random_batches(subject):
    shape = (2, subject.rows, subject.train.MAX_SEQ_LEN)
    vocab_size = subject.model.config.vocab_size
    inputs, targets = random_tokens(vocab_size, shape, subject.device)
    while True:
        yield inputs, targets, 0


def measure(levers, setting, steps, memory_gb=None):
    """A dictionary of seconds and of what was measured."""
    import prepare

    import torch

    subject = build(levers, setting, memory_gb)
    train = subject.train
    device = subject.device
    inputs, targets, _ = next(random_batches(subject))

    def now():
        if device.type == "cuda":
            torch.cuda.synchronize()
        return perf_counter()

    times = {"forward": [], "backward": [], "update": [], "step": []}
    for _ in range(steps):
        forward = 0.0
        backward = 0.0
        for _ in range(subject.micro_batches):
            begun = now()
            loss = subject.compiled_model(inputs, targets) / subject.micro_batches
            middle = now()
            loss.backward()
            forward += middle - begun
            backward += now() - middle
        begun = now()
        subject.optimizer.step()
        update = now() - begun
        times["forward"].append(forward)
        times["backward"].append(backward)
        times["update"].append(update)
        times["step"].append(forward + backward + update)

    seconds = {part: median(values) for part, values in times.items()}
    tokens_per_second = train.TOTAL_BATCH_SIZE / seconds["step"]
    peak = 1e12 * train.PEAK_TFLOPS.get(prepare.DEVICE_NAME, 0)
    memory = 2**10 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if device.type == "cuda":
        memory = torch.cuda.max_memory_allocated()
    return {
        "seconds": seconds,
        "tokens_per_second": tokens_per_second,
        "mfu": 100 * subject.model.flops_per_token() * tokens_per_second / peak if peak else None,
        "peak_mb": memory / 2**20,
        "attention": subject.attention,
        "device": prepare.DEVICE_NAME,
        "depth": train.DEPTH,
        "width": subject.model.config.n_embd,
        "tokens": train.TOTAL_BATCH_SIZE,
        "rows": subject.rows,
    }


def measure_in_a_process(variant, args, memory_gb=None):
    """What `measure` returns. Raises RunError."""
    command = [sys.executable, __file__, "--variant", variant, "--steps", str(args.steps)]
    if memory_gb:
        command += ["--memory-gb", str(memory_gb)]
    command += ["--set", *args.set]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RunError(last_words(done.stdout + done.stderr))
    return json.loads(done.stdout.splitlines()[-1])


# ---- Tables ----
def print_variants(args):
    """A row per variant: of its rounds the one in the middle."""
    found = {variant: [] for variant in args.variants}
    failed = {}
    for _ in range(args.rounds):
        for variant in args.variants:
            try:
                found[variant].append(measure_in_a_process(variant, args))
            except RunError as failure:
                failed[variant] = failure
    columns = ("ms", "forward", "backward", "update", "tokens/s", "ratio", "MFU %", "peak MB")
    print_header("variant", *columns, "attention")
    base = None
    for variant, results in found.items():
        if variant in failed:
            print_row(variant, failed[variant], *[""] * len(columns))
            continue
        results.sort(key=lambda result: result["tokens_per_second"])
        middle = results[len(results) // 2]
        speed = middle["tokens_per_second"]
        if base is None:
            base = speed
        parts = ("step", "forward", "backward", "update")
        print_row(
            variant,
            *[f"{1000 * middle['seconds'][part]:.0f}" for part in parts],
            f"{speed:.0f}",
            f"{speed / base:.2f}",
            f"{middle['mfu']:.1f}" if middle["mfu"] else "n/a",
            f"{middle['peak_mb']:.0f}",
            middle["attention"],
        )
    if base is None:
        raise SystemExit(1)
    print(
        f"\n{middle['device']}, depth {middle['depth']}, width {middle['width']}, "
        f"{middle['tokens']} tokens per step, {middle['rows']} rows at a time, "
        f"median of {args.steps} steps, of {args.rounds} processes"
    )


def print_memory(args):
    """A row per limit of GPU memory: the rows at a time that train.py's back-off finds."""
    print_header("GB", "rows at a time", "tokens/s", "peak MB", "ratio")
    base = None
    for limit in args.memory_gb:
        try:
            found = measure_in_a_process("as shipped", args, limit)
        except RunError as failure:
            print_row(f"{limit:g}", failure, "", "", "")
            continue
        speed = found["tokens_per_second"]
        if base is None:
            base = speed
        print_row(
            f"{limit:g}",
            found["rows"],
            f"{speed:.0f}",
            f"{found['peak_mb']:.0f}",
            f"{speed / base:.2f}",
        )


def print_runs(args):
    """A row per variant: a whole run of train.py, data, clock and score included."""
    print_header("variant", "val_bpb", "steps", "tokens/s", "ratio", "seconds outside training")
    base = None
    for variant in args.run:
        levers = VARIANTS[variant]
        setting = " ".join([*setting_of(levers), *args.set])
        with tempfile.TemporaryDirectory() as folder:
            copy_scripts(folder, setting, edits_of(levers))
            try:
                finished = run_training(folder, args.seconds)
            except RunError as failure:
                print_row(variant, failure, "", "", "", "")
                continue
        record = finished.record
        speed = record["tokens_per_second"]
        if base is None:
            base = speed
        print_row(
            variant,
            f"{record['val_bpb']:.4f}",
            record["num_steps"],
            f"{speed:.0f}",
            f"{speed / base:.2f}",
            f"{finished.outside:.1f}",
        )


# ---- Where the time goes ----
# Names of kernels and operators, of CPU and GPU. In the two passes every batched product is one of
# attention, and a softmax is too unless it is the loss's log_softmax.
ATTENTION = re.compile("(?<!log)_softmax|bmm|flash|fmha")
PRODUCT = re.compile("mm$|gemm|nvjet|cutlass|xmma")
NO_KERNEL = re.compile("^## Call|Torch-Compiled|CompiledFunction|TorchDynamo|AOTDispatcher|^cuda")


def median_seconds(function, times, device):
    """Of one call, with what it has queued on a GPU."""
    import torch

    seconds = []
    for _ in range(times):
        begun = perf_counter()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(perf_counter() - begun)
    return median(seconds)


def measured_peak(device, dtype):
    """FLOP/s of a large matrix product, here and now."""
    import torch

    size = 8192 if device.type == "cuda" else 2048
    a, b = torch.randn(2, size, size, device=device, dtype=dtype)
    return 2 * size**3 / median_seconds(lambda: a @ b, 9, device)


def where_time_goes(subject, steps):
    """{part of a step: milliseconds}, while the profiler looks on, which itself takes some."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    on_gpu = subject.device.type == "cuda"
    activities = [ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]
    found = defaultdict(float)
    batches = random_batches(subject)

    def two_passes():
        for _ in range(subject.micro_batches):
            inputs, targets, _ = next(batches)
            subject.compiled_model(inputs, targets).backward()

    def profiled(function, name_of_part):
        with profile(activities=activities) as profiler:
            begun = perf_counter()
            function()
            if on_gpu:
                torch.cuda.synchronize()
            rest = 1000 * (perf_counter() - begun)
        for event in profiler.key_averages():
            if not NO_KERNEL.search(event.key):
                time = event.self_device_time_total if on_gpu else event.self_cpu_time_total
                found[name_of_part(event.key)] += time / 1000 / steps
                rest -= time / 1000
        found["no kernel: Python, launching"] += rest / steps

    def part_of_passes(name):
        if ATTENTION.search(name):
            return "attention"
        return "products" if PRODUCT.search(name) else "other kernels: element-wise, norms, loss"

    def part_of_update(name):
        return "update: products" if PRODUCT.search(name) else "update: other kernels"

    for _ in range(steps):
        profiled(two_passes, part_of_passes)
        profiled(subject.optimizer.step, part_of_update)
    return found


def loader_milliseconds(subject):
    """Of the batches of a step, from the prepared text."""
    import prepare

    tokenizer = prepare.Tokenizer.from_directory()
    batches = prepare.make_dataloader(tokenizer, subject.rows, prepare.MAX_SEQ_LEN)
    return 1000 * subject.micro_batches * median_seconds(lambda: next(batches), 50, subject.device)


def print_profile(args):
    # Names the kernels of a CPU; they are compiled anew for it.
    os.environ["TORCHINDUCTOR_CPP_ENABLE_KERNEL_PROFILE"] = "1"
    subject = build(VARIANTS["as shipped"], args.set)
    batches = random_batches(subject)
    batch = next(batches)

    def step():
        subject.train.train_step(
            subject.compiled_model, subject.optimizer, batch, batches, subject.micro_batches
        )

    seconds = median_seconds(step, args.steps, subject.device)
    speed = subject.train.TOTAL_BATCH_SIZE / seconds
    dtype = subject.train.choose_dtype(subject.device)
    peak = measured_peak(subject.device, dtype)
    parts = where_time_goes(subject, args.steps)
    parts["loader"] = loader_milliseconds(subject)
    whole = sum(parts.values())
    print_header("part of a step", "ms", "ratio")
    for name, milliseconds in sorted(parts.items(), key=lambda part: -part[1]):
        print_row(name, f"{milliseconds:.1f}", f"{milliseconds / whole:.3f}")
    used = subject.model.flops_per_token() * speed
    print(
        f"\nwithout the profiler {1000 * seconds:.0f} ms per step, {speed:.0f} tokens/s: "
        f"{used / 1e9:.0f} GFLOP/s by the model's count, {used / peak:.3f} of what a large product "
        f"of {str(dtype).removeprefix('torch.')} does here, {peak / 1e9:.0f} GFLOP/s"
    )


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.strip().split("\n")[0])
    parser.add_argument("--set", nargs="*", default=[], metavar="KNOB=value")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=1, help="processes per variant (1)")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--memory-gb", type=float, nargs="+", help="limits of GPU memory")
    parser.add_argument("--profile", action="store_true", help="where the time of a step goes")
    parser.add_argument("--run", nargs="+", choices=VARIANTS, help="whole runs of these")
    parser.add_argument("--seconds", type=float, default=300, help="budget of a whole run (300)")
    parser.add_argument("--variant", choices=VARIANTS, help="measure one here and print JSON")
    return parser.parse_args()


def main():
    args = parse_arguments()
    if args.variant:
        limit = args.memory_gb[0] if args.memory_gb else None
        print(json.dumps(measure(VARIANTS[args.variant], args.set, args.steps, limit)))
    elif args.profile:
        print_profile(args)
    elif args.memory_gb:
        print_memory(args)
    elif args.run:
        print_runs(args)
    else:
        print_variants(args)


if __name__ == "__main__":
    main()
