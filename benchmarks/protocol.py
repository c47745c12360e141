"""
What a rule for keeping changes is worth: nights of research, simulated.

    uv run benchmarks/protocol.py                       # the table, under a minute
    uv run benchmarks/protocol.py --search              # program.md's constants and their neighbours
    uv run benchmarks/protocol.py --nights 20000

A night has a number of runs. An idea has a true effect on val_bpb, which nobody sees; a run shows
the truth plus noise. A rule decides what to run next and what to keep. The effects are a fit of the
one long night that the reference has published: 125 scored runs, 22 keeps, a recorded gain of
0.0282. All numbers are in units of 0.001 bits per byte. The same ideas and the same noise meet
every rule. Weak points: one night was fitted, and near misses are taken to add up, give or take 30 %.
"""

import argparse
import itertools
import sys
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the root of the repository
from benchmarks.common import print_header, print_row

import numpy as np


# ---- A night ----
@dataclass(frozen=True)
class Night:
    """Ideas, noise and length of a night. Effects are exponentially distributed with these means,
    but for those that do nothing, which are normal."""

    runs: int
    sigma: float  # standard deviation between runs of the same code
    helpful: float = 0.26  # share of the ideas; the effect falls from `early` to `late` over the
    early: float = 5.7  # first ideas as exp(-ideas / decay)
    late: float = 1.2
    decay: float = 6.0
    null: float = 0.44  # share
    null_sd: float = 0.15
    harmful: float = 0.26  # share; the rest are disasters
    harm: float = 2.1
    disaster: float = 14.0
    drift: float = 0.0  # standard deviation of the machine's own drift, which takes
    drift_runs: float = 15.0  # so many runs to fade
    visible_drift: float = np.inf  # so much of it shows in the speed of a run
    shares: tuple = (0.7, 0.2, 0.1)  # of sigma ** 2: a run's, a seed's with a code, a seed's


H100 = Night(runs=100, sigma=1.0)
SMALL = Night(
    runs=60, sigma=20, early=40, late=12, decay=8, null=0.39, null_sd=3, harmful=0.30, harm=30,
    disaster=150,
)  # fmt: skip
NIGHTS = {
    "H100": H100,
    "3060": Night(
        runs=50, sigma=2, early=20, late=2, decay=8, null_sd=0.3, harm=5, disaster=30
    ),
    "small": SMALL,
    "H100, drift": replace(H100, drift=1.0, visible_drift=2.0),
    "small, drift": replace(SMALL, drift=20, visible_drift=20),
    "small, shared": replace(SMALL, drift=60, visible_drift=50, drift_runs=8),
}  # fmt: skip
LEAST_SIGMA = 0.5
INTERACTION = 0.3  # of near misses tried together: noise, as a share of the root of their squares
LINES = 0.5  # share of the ideas that add more than about five lines


def mix(x):
    """splitmix64, of an array of uint64."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class Nights:
    """Many nights of one kind at once. What chance decides is a function of the night's number and
    of what it decides, so that it is the same under every rule."""

    def __init__(self, night, count):
        self.night = night
        self.number = mix(np.arange(1, count + 1, dtype=np.uint64))
        keep = np.exp(-1 / night.drift_runs)
        self.drift = np.zeros((night.runs, count))
        value = night.drift * self.normal("drift", 0)
        for t in range(night.runs):
            self.drift[t] = value
            step = self.normal("drift", t + 1)
            value = keep * value + night.drift * np.sqrt(1 - keep**2) * step

    def uniform(self, what, *keys):
        state = mix(self.number ^ np.uint64(sum(what.encode()) * 7919))
        for key in keys:
            state = mix(state ^ np.asarray(key).astype(np.uint64))
        return ((state >> np.uint64(11)) + 0.5) / 2**53

    def normal(self, what, *keys):
        radius = np.sqrt(-2 * np.log(self.uniform(what, *keys, 1)))
        return radius * np.cos(2 * np.pi * self.uniform(what, *keys, 2))

    def effect(self, idea):
        """The true effect of each night's next idea; negative is better."""
        night = self.night
        kind = self.uniform("kind", idea)
        size = -np.log(self.uniform("size", idea))
        scale = night.late + (night.early - night.late) * np.exp(-idea / night.decay)
        edges = np.cumsum([night.helpful, night.null, night.harmful])
        nothing = night.null_sd * self.normal("nothing", idea)
        return np.select(
            [kind < edge for edge in edges],
            [-scale * size, nothing, night.harm * size],
            night.disaster * size,
        )

    def run(self, t, code, seed, truth):
        """What the t-th run of the night shows of a code whose true score is `truth`."""
        of_run, of_code, of_seed = np.sqrt(self.night.shares)
        noise = of_run * self.normal("run", t)
        noise += of_code * self.normal("code", code, seed)
        noise += of_seed * self.normal("seed", seed)
        return truth + self.drift[t] + self.night.sigma * noise


class Progress:
    """Where each night stands."""

    def __init__(self, nights):
        count = len(nights.number)
        self.nights = nights
        self.truth = np.zeros(count)  # true score of the incumbent, the baseline's being 0
        self.code = np.zeros(
            count, dtype=np.int64
        )  # its number; an idea's is one more than the idea
        self.ideas = np.zeros(count, dtype=np.int64)
        self.keeps = np.zeros(count)
        self.harmful = np.zeros(count)
        self.debt = np.zeros(count, dtype=np.int64)  # runs to be lost on lines that gave nothing

    def keep(self, which, truth, code, long=False):
        effect = truth - self.truth
        self.keeps += which
        self.harmful += which & (effect > 0)
        self.debt += which & long & (effect > -0.05 * self.nights.night.sigma)
        self.truth = np.where(which, truth, self.truth)
        self.code = np.where(which, code, self.code)


# ---- Rules: each returns Progress and the number that it believes of the last incumbent ----
def oracle(nights):
    """Sees the truth."""
    p = Progress(nights)
    for _ in range(nights.night.runs):
        effect = nights.effect(p.ideas)
        p.keep(effect < 0, p.truth + effect, p.ideas + 1)
        p.ideas += 1
    return p, p.truth


def reference(nights, rerun_every=0):
    """One run per idea at one seed; lower wins. The incumbent is run again after so many ideas, and
    its number is the mean of both."""
    p = Progress(nights)
    number = nights.run(0, p.code, 42, p.truth)
    rerun = np.zeros(len(number), dtype=bool)
    for t in range(1, nights.night.runs):
        truth = np.where(rerun, p.truth, p.truth + nights.effect(p.ideas))
        code = np.where(rerun, p.code, p.ideas + 1)
        seen = nights.run(t, code, 42, truth)
        better = ~rerun & (seen < number)
        p.keep(better, truth, code)
        number = np.where(better, seen, np.where(rerun, (number + seen) / 2, number))
        p.ideas += ~rerun
        rerun = ~rerun & (rerun_every > 0) & (p.ideas % max(rerun_every, 1) == 0)
    return p, number


def first_version(nights):
    """Four baselines at two seeds; a keep needs both seeds and one sigma; the incumbent is run again
    at a seed where the machine has visibly drifted since, and at both in a review."""
    FIRST, AGAIN_FIRST, SECOND, AGAIN_SECOND, REVIEW, REVIEW_SECOND = range(6)
    p = Progress(nights)
    seen = [nights.run(t, p.code, 42 + t % 2, p.truth) for t in range(4)]
    sigma = np.maximum(np.std(seen, axis=0, ddof=1), LEAST_SIGMA)
    number = np.array([(seen[0] + seen[2]) / 2, (seen[1] + seen[3]) / 2])
    drift = np.array([nights.drift[2], nights.drift[3]])  # when the incumbent last ran at the seed
    phase = np.full(len(sigma), FIRST)
    own = np.zeros_like(number)  # the idea's runs
    own_drift = np.zeros_like(number)
    for t in range(4, nights.night.runs):
        of_idea = (phase == FIRST) | (phase == SECOND)
        second = (phase == SECOND) | (phase == AGAIN_SECOND) | (phase == REVIEW_SECOND)
        truth = p.truth + np.where(of_idea, nights.effect(p.ideas), 0)
        shown = nights.run(t, np.where(of_idea, p.ideas + 1, p.code), 42 + second, truth)
        for seed in (0, 1):
            here = second == seed
            own[seed] = np.where(here & of_idea, shown, own[seed])
            own_drift[seed] = np.where(here & of_idea, nights.drift[t], own_drift[seed])
            number[seed] = np.where(here & ~of_idea, shown, number[seed])
            drift[seed] = np.where(here & ~of_idea, nights.drift[t], drift[seed])
        moved = np.abs(own_drift - drift) > nights.night.visible_drift
        again = (phase == FIRST) & moved[0] & (own[0] - number[0] <= 3 * sigma)
        again_second = (phase == SECOND) & moved[1]
        decide = ((phase == FIRST) & ~again) | (phase == AGAIN_FIRST)
        promising = decide & (own[0] < number[0])
        judge = ((phase == SECOND) & ~again_second) | (phase == AGAIN_SECOND)
        good = judge & (own.mean(axis=0) <= number.mean(axis=0) - sigma)
        p.keep(good, p.truth + nights.effect(p.ideas), p.ideas + 1)
        number = np.where(good, own, number)
        drift = np.where(good, own_drift, drift)
        done = judge | (decide & ~promising)
        p.ideas += done
        review = done & (p.ideas % 10 == 0)
        phase = np.select(
            [again, again_second, promising, review, phase == REVIEW],
            [AGAIN_FIRST, AGAIN_SECOND, SECOND, REVIEW, REVIEW_SECOND],
            FIRST,
        )
    return p, number.mean(axis=0)


@dataclass(frozen=True)
class Rule:
    """The constants of program.md's rule."""

    baselines: int = 2
    bar: float = 0.5  # sigmas by which a keep must be better than the number
    back: float = 0.5  # a keep's number is its score and this share of the gain, but no more
    most: float = 1.0  # than so many sigmas
    near: float = 0.5  # sigmas worse than the number that still are a near miss
    together: int = 4  # near misses that are tried as one change
    review: int = 10  # ideas between two re-runs of the incumbent
    cap: float = 4  # runs that the number counts for in a review
    long_bar: float = 1.0  # instead of `bar`, of a change that adds lines
    pair: bool = True  # the incumbent runs again where a visible drift may have made the verdict
    at_42: bool = False  # the number begins as the baseline's run at seed 42, not as the mean
    price: bool = False  # whether a keep that adds lines and gives nothing costs a later run


def program(nights, rule):
    """One run per idea at seed 42, a small bar, a number that is pulled back for luck, near misses
    by fours, one re-run of the incumbent at a fresh seed per review, and one at seed 42 where the
    machine's speed may have made a verdict."""
    p = Progress(nights)
    seen = [nights.run(t, p.code, 42 + t, p.truth) for t in range(rule.baselines)]
    sigma = np.maximum(np.std(seen, axis=0, ddof=1), LEAST_SIGMA)
    number = seen[0] if rule.at_42 else np.mean(seen, axis=0)
    count = len(sigma)
    weight = np.full(count, float(rule.baselines))
    misses = np.zeros((rule.together, count))  # their effects
    missed = np.zeros(count, dtype=np.int64)
    due = np.zeros(count, dtype=bool)
    drift = nights.drift[: rule.baselines].mean(axis=0)  # when the incumbent's number was measured
    held = np.full(count, np.nan)  # the last run's score, where the incumbent runs again beside it
    reviews = 0 * missed
    for t in range(rule.baselines, nights.night.runs):
        again = ~np.isnan(held)
        paying = rule.price & (p.debt > 0) & ~again
        review = due & ~paying & ~again
        batch = (missed == rule.together) & ~review & ~paying
        idea = ~(paying | review | batch)
        long = nights.uniform("lines", p.ideas) < LINES
        effect = np.where(idea, nights.effect(p.ideas), 0)
        spread = INTERACTION * np.sqrt((misses**2).sum(axis=0))
        together = misses.sum(axis=0) + spread * nights.normal("together", p.ideas)
        effect = np.where(batch, together, effect)
        truth = p.truth + effect
        own_code = np.where(batch, 10_000 + p.ideas, p.ideas + 1)
        code = np.where(review | again, p.code, own_code)
        seed = np.where(review, 100 + reviews, 42)
        shown = nights.run(t, code, seed, np.where(again, p.truth, truth))

        number = np.where(again, shown, number)
        weight = np.where(again, 1.0, weight)
        drift = np.where(again, nights.drift[t], drift)
        seen = np.where(again, held, shown)
        own_drift = np.where(again, nights.drift[t - 1], nights.drift[t])
        gain = (number - seen) / sigma
        bar = np.where(idea & long, rule.long_bar, rule.bar)
        good = (idea | batch) & (gain > bar)
        # Slower, and not kept; or faster, and kept: perhaps it was the machine.
        slower = own_drift - drift
        doubtful = np.where(good, -slower, slower) > nights.night.visible_drift
        wait = rule.pair & (idea | batch) & ~again & doubtful
        held = np.where(wait, seen, np.nan)
        idea &= ~wait
        batch &= ~wait
        good &= ~wait
        near = idea & ~good & (gain > -rule.near)
        p.keep(good, truth, own_code, long & ~batch)
        luck = np.minimum(rule.back * (number - seen), rule.most * sigma)
        number = np.where(good, seen + luck, number)
        weight = np.where(good, 1.0, weight)
        drift = np.where(good, own_drift, drift)
        misses = np.where(batch, 0, misses)
        missed = np.where(batch, 0, missed)
        for i in range(rule.together):
            misses[i] = np.where(near & (missed == i), effect, misses[i])
        missed = np.minimum(missed + near, rule.together)

        capped = np.minimum(weight, rule.cap)
        averaged = (number * capped + shown) / (capped + 1)
        number = np.where(review, averaged, number)
        weight = np.where(review, capped + 1, weight)
        reviews += review
        p.ideas += idea
        p.debt -= paying
        due = (due & ~review) | (idea & (p.ideas % rule.review == 0))
    return p, number


# ---- Tables ----
@dataclass
class Outcome:
    gain: float
    error: float  # standard error of the gain
    harmful: float  # share of the keeps
    flattery: float  # truth minus record: how much better the record is
    ideas: float


def outcome(rule, night, count):
    p, number = rule(Nights(night, count))
    harmful = p.harmful.sum() / max(p.keeps.sum(), 1)
    error = p.truth.std() / np.sqrt(count)
    return Outcome(-p.truth.mean(), error, harmful, (p.truth - number).mean(), p.ideas.mean())


RULES = {
    "reference: one run, lower wins": reference,
    "the same, incumbent run again after ten ideas": partial(reference, rerun_every=10),
    "first version: two seeds, one sigma": first_version,
    "program.md": partial(program, rule=Rule()),
    "the same, but the incumbent never for another speed": partial(program, rule=Rule(pair=False)),
    "an oracle": oracle,
}
PROGRAM = "program.md"
REFERENCE = "reference: one run, lower wins"


def print_rules(rules, nights, count):
    """A row per rule. Returns {(rule, night): Outcome}."""
    columns = [f"{name}: gain" for name in nights]
    print_header("rule", *columns, "harmful keeps", "record better than truth", "ideas tried")
    found = {}
    for name, rule in rules.items():
        own = [outcome(rule, night, count) for night in nights.values()]
        found |= {(name, night): one for night, one in zip(nights, own, strict=True)}
        print_row(
            name,
            *(f"{one.gain:.1f} ± {one.error:.1f}" for one in own),
            f"{100 * min(o.harmful for o in own):.0f} to {100 * max(o.harmful for o in own):.0f} %",
            ", ".join(f"{one.flattery:.1f}" for one in own),
            ", ".join(f"{one.ideas:.0f}" for one in own),
        )
    return found


def search(count):
    """Every rule that differs from program.md's in one constant or in two of the first four."""
    choices = {
        "bar": (0.25, 0.5, 0.75, 1.0),
        "back": (0.15, 0.3, 0.5, 0.7),
        "most": (0.5, 1.0, 1.5, np.inf),
        "baselines": (2, 3, 4),
        "near": (0.0, 0.5, 1.0),
        "together": (2, 3, 4, 6),
        "review": (5, 10, 15, 20),
        "cap": (2, 4, 8),
        "long_bar": (0.5, 0.75, 1.0, 1.5),
    }
    settings = [{}]
    settings += [{name: value} for name, values in choices.items() for value in values]
    for (a, some), (b, others) in itertools.combinations(list(choices.items())[:4], 2):
        settings += [{a: x, b: y} for x in some for y in others]
    rules = {}
    for setting in settings:
        rule = replace(Rule(), **setting)
        if rule not in [known.keywords["rule"] for known in rules.values()]:
            name = ", ".join(f"{key} {value}" for key, value in setting.items()) or PROGRAM
            rules[name] = partial(program, rule=rule)
    print_rules({REFERENCE: reference} | rules, NIGHTS, count)


def main():
    parser = argparse.ArgumentParser(description=__doc__.strip().split("\n")[0])
    parser.add_argument("--nights", type=int, default=4000)
    parser.add_argument("--search", action="store_true")
    args = parser.parse_args()
    began = time.perf_counter()
    if args.search:
        search(args.nights)
        return
    found = print_rules(RULES, NIGHTS, args.nights)
    ratios = [found[PROGRAM, night].gain / found[REFERENCE, night].gain for night in NIGHTS]
    print(f"\nprogram.md / reference: {' '.join(f'{ratio:.3f}' for ratio in ratios)}\n")

    print("A keep that adds lines and gives nothing costs a later run:\n")
    priced = {
        "program.md": Rule(price=True),
        "without the rule for long changes": Rule(price=True, long_bar=Rule.bar),
    }
    print_rules({n: partial(program, rule=r) for n, r in priced.items()}, NIGHTS, args.nights)

    print("\nHalf of the noise is common to all runs at a seed:\n")
    common = {name: replace(night, shares=(0.3, 0.2, 0.5)) for name, night in NIGHTS.items()}
    begins = {
        "program.md, the mean of its baselines": Rule(),
        "the baseline's run at seed 42": Rule(at_42=True),
    }
    print_rules({n: partial(program, rule=r) for n, r in begins.items()}, common, args.nights)
    print(f"\n{args.nights} nights of each kind, {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
