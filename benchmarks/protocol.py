"""
Simulates nights of research, to see what a rule for keeping changes is worth.

    uv run benchmarks/protocol.py    # a minute

A change has a true effect on val_bpb, which nobody sees; a run shows the truth plus noise. The
effects fit the one long night that the original has published: 125 scored runs, 22 keeps, a
recorded gain of 0.0282. All numbers are in units of 0.001 bits per byte. Caveats: one night was
fitted, discards are assumed to add up, give or take 30 %, and the agent is assumed to know whether
its change or the machine made a run slower.
"""

import argparse
import math
import sys
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the root of the repository
from benchmarks.common import print_header, print_row

import numpy as np


# ---- Nights ----
@dataclass(frozen=True)
class Night:
    """Effects are exponential with these means, except that those of null ideas are normal."""

    runs: int
    sigma: float  # standard deviation between runs of the same code
    early: float = 5.7  # mean gain of the helpful ideas; it falls from `early` to `late`
    late: float = 1.2
    decay: float = 6.0  # as exp(-ideas / decay)
    null_sd: float = 0.15
    harm: float = 2.1
    disaster: float = 14.0
    shares: tuple = (0.26, 0.44, 0.26, 0.04)  # helpful, null, harmful, disasters
    drift: float = 0.0  # standard deviation of the effect of the machine's speed on the score
    drift_runs: float = 15.0  # this effect fades over this many runs
    tenth: float = math.inf  # what a tenth less speed adds to the score


H100 = Night(runs=100, sigma=1)
RTX_3060 = Night(runs=50, sigma=2, early=20, late=2, decay=8, null_sd=0.3, harm=5, disaster=30)
SMALL = Night(runs=60, sigma=20, early=40, late=12, decay=8, null_sd=3, harm=30, disaster=150)
SMALL = replace(SMALL, shares=(0.26, 0.39, 0.30, 0.05))
NIGHTS = {
    "H100": H100,
    "3060": RTX_3060,
    "small": SMALL,
    "H100, drift": replace(H100, drift=1, tenth=2),
    "small, drift": replace(SMALL, drift=20, tenth=20),
    "small, shared": replace(SMALL, drift=60, tenth=50, drift_runs=8),
}
# Shares of sigma. The rest is what a seed adds to every code alike, which decides nothing.
RUN_NOISE = math.sqrt(0.7)  # differs from run to run
CODE_NOISE = math.sqrt(0.2)  # what the fixed seed adds to one code, in all its runs
INTERACTION = 0.3  # noise of changes made together, as a share of their root sum of squares


@dataclass
class Code:
    """A commit of train.py."""

    truth: float  # its true score; the baseline's is 0
    noise: float  # what the fixed seed adds to it in every run


@dataclass
class Result:
    """The outcome of a run."""

    score: float
    drift: float  # what the machine's speed added to it


class NightOver(Exception):  # noqa: N818
    """No run is left."""


class Lab:
    """A night as an agent meets it, with the same ideas and the same noise under every rule."""

    def __init__(self, night, number):
        rng = np.random.default_rng(number)
        self.night = night
        self.effects = draw_effects(night, rng)
        self.drift = draw_drift(night, rng.normal(0, night.drift, night.runs))
        self.run_noise = rng.normal(0, RUN_NOISE * night.sigma, night.runs)
        self.code_noise = rng.normal(0, CODE_NOISE * night.sigma, 2 * night.runs)
        self.interaction = rng.normal(0, INTERACTION, night.runs)
        self.runs = 0
        self.ideas = 0
        self.best = Code(0, self.code_noise[-1])

    def run(self, code):
        if self.runs == self.night.runs:
            raise NightOver
        drift = self.drift[self.runs]
        score = code.truth + code.noise + drift + self.run_noise[self.runs]
        self.runs += 1
        return Result(score, drift)

    def next_idea(self):
        effect = self.effects[self.ideas]
        noise = self.code_noise[self.ideas]
        self.ideas += 1
        return Code(self.best.truth + effect, noise)

    def combine(self, effects):
        """Returns the best code with several changes made together."""
        effect = sum(effects) + math.hypot(*effects) * self.interaction[self.ideas]
        noise = self.code_noise[self.night.runs + self.ideas]  # not an idea's
        return Code(self.best.truth + effect, noise)


def draw_effects(night, rng):
    """Draws the true effect of each idea of a night; negative is better."""
    size = rng.exponential(size=night.runs)
    null = rng.normal(0, night.null_sd, night.runs)
    kind = rng.choice(4, night.runs, p=night.shares)
    fading = np.exp(-np.arange(night.runs) / night.decay)
    gain = night.late + (night.early - night.late) * fading
    return np.choose(kind, [-gain * size, null, night.harm * size, night.disaster * size])


def draw_drift(night, steps):
    """Returns what the machine's speed adds to the score of each run: an AR(1) process."""
    keep = math.exp(-1 / night.drift_runs)
    drift = [steps[0]]
    for step in steps[1:]:
        drift.append(keep * drift[-1] + math.sqrt(1 - keep**2) * step)
    return drift


# ---- Rules ----
@dataclass(frozen=True)
class Rule:
    """Holds the constants of program.md; NEVER switches a habit off."""

    discards: float = 10  # after this many in a row the best is measured again
    speed: float = 0.1  # also after a discard this much slower or a keep this much faster
    correction: float = 0.5  # share of the drift that is taken off, since it can only be estimated
    ideas: float = 15  # after this many the best discards are tried together
    together: int = 6  # how many discards


NEVER = math.inf


def lower_wins(lab, rule):
    """Spends a night by `rule`: one run decides; four habits correct for luck and the machine."""

    def loss(result, to_beat):
        return result.score - to_beat.score - rule.correction * (result.drift - to_beat.drift)

    to_beat = lab.run(lab.best)
    in_a_row = 0  # discards
    ideas = 0  # since discards were last tried together
    discards = []  # the loss and the effect of each, among those ideas
    while True:
        if in_a_row >= rule.discards:
            to_beat = lab.run(lab.best)
            in_a_row = 0
        batch = ideas >= rule.ideas and len(discards) >= 2
        if batch:
            nearest = sorted(discards)[: rule.together]
            code = lab.combine([effect for _, effect in nearest])
        else:
            code = lab.next_idea()
        result = lab.run(code)
        slower = 0.1 * (result.drift - to_beat.drift) / lab.night.tenth  # share of the speed
        lost = loss(result, to_beat)
        by_speed = slower < -rule.speed if lost < 0 else slower > rule.speed
        if by_speed:
            to_beat = lab.run(lab.best)
            lost = loss(result, to_beat)
            in_a_row = 0
        if lost < 0:
            lab.best = code
            to_beat = result
            in_a_row = 0
        else:
            in_a_row += 1
        if batch:
            ideas = 0
            discards = []
            continue
        ideas += 1
        if lost >= 0:
            discards.append((lost, code.truth - lab.best.truth))


ORIGINAL = Rule(discards=NEVER, speed=NEVER, correction=0, ideas=NEVER)
RULES = {
    "original": ORIGINAL,
    "program.md": Rule(),
    "without again after discards": Rule(discards=NEVER),
    "without again for speed": Rule(speed=NEVER),
    "without taking off speed": Rule(correction=0),
    "without discards together": Rule(ideas=NEVER),
    "oracle": None,
}


def true_gain(rule, night, number):
    """Returns the true gain of a night's final best over the baseline."""
    lab = Lab(night, number)
    if rule is None:  # the oracle sees the truth, and needs no baseline
        return -lab.effects[lab.effects < 0].sum()
    with suppress(NightOver):
        lower_wins(lab, rule)
    return -lab.best.truth


# ---- Tables ----
def print_rules(rules, count):
    """Prints a row per rule: its gain and the ratio to the first rule's in the same nights, each
    with a standard error. Returns the ratios."""
    print_header("rule", *NIGHTS)
    first = {}
    ratios = {}
    for name, rule in rules.items():
        cells = []
        ratios[name] = []
        for kind, night in NIGHTS.items():
            gains = np.array([true_gain(rule, night, number) for number in range(count)])
            base = first.setdefault(kind, gains)
            ratio = gains.mean() / base.mean()
            ratios[name].append(ratio)
            error = gains.std() / count**0.5
            ratio_error = (gains - ratio * base).std() / count**0.5 / base.mean()
            cells.append(f"{gains.mean():.1f} ± {error:.1f} ({ratio:.3f} ± {ratio_error:.3f})")
        print_row(name, *cells)
    return ratios


def main():
    parser = argparse.ArgumentParser(description=__doc__.strip().split("\n")[0])
    parser.add_argument("--nights", type=int, default=4000, help="nights of each kind (4000)")
    args = parser.parse_args()
    ratios = print_rules(RULES, args.nights)["program.md"]
    print("\nprogram.md / original:", *(f"{ratio:.3f}" for ratio in ratios))


if __name__ == "__main__":
    main()
