"""Owns a realistic evaluation report of simulated acceptances, for the tests of the gate, the report and others."""

from dataclasses import replace

import numpy as np

from specdist.metrics import acceptance_result, predicted_speedup
from specdist.schema import (
    AcceptanceResult,
    Certification,
    CheckpointPoint,
    Divergence,
    EvalReport,
    Fidelity,
    PromptCounts,
    Speed,
    SpeedPoint,
    TargetIdentity,
)
from specdist.schema_reload import ExportReading, Reload

# chance that the first drafted token of a step is accepted
DOMAINS = {
    "code": 0.62,
    "dialogue": 0.42,
    "extraction": 0.66,
    "knowledge": 0.45,
    "maths": 0.58,
    "planning": 0.47,
    "rewriting": 0.63,
    "roleplay": 0.36,
    "science": 0.44,
    "summaries": 0.52,
    "translation": 0.40,
    "writing": 0.38,
}
TARGET = TargetIdentity("tiny/target", "a" * 64, "b" * 64, "c" * 64, 49152, [0, 2])


def make_counts(strength: float, gamma: int, prompts_per_domain: int, seed: int, domains: dict) -> list[PromptCounts]:
    """Simulated decoding of 96 tokens per prompt; later positions are accepted less often. Same seed, same prompts."""
    counts = []
    for domain, rate in domains.items():
        for i in range(prompts_per_domain):
            rng = np.random.default_rng([seed, i, *domain.encode()])  # the prompt's own luck, whatever the strength
            level = min(0.97, max(0.0, strength * rate * rng.uniform(0.75, 1.25)))
            draws = rng.random((96, gamma)) < level * 0.88 ** np.arange(gamma)
            runs = np.cumprod(draws, axis=1).sum(axis=1)
            steps = int(np.searchsorted(np.cumsum(1 + runs), 96)) + 1
            accepted = [float((runs[:steps] > k).sum()) for k in range(gamma)]
            counts.append(PromptCounts(f"{domain}-{i:02d}", domain, float(steps), float(steps * gamma), accepted))
    return counts


def make_result(
    strength: float,
    setting: str = "greedy",
    gamma: int = 3,
    *,
    per_domain: int = 17,
    seed: int = 0,
    domains: dict | None = None,
    draws: int = 200,
) -> AcceptanceResult:
    """One setting's acceptance; `strength` scales the chance that a draft is accepted."""
    return acceptance_result(
        make_counts(strength, gamma, per_domain, seed, DOMAINS if domains is None else domains),
        setting=setting,
        temperature=0.0 if setting == "greedy" else 0.8,
        draft_sample_method="greedy" if setting == "greedy" else "probabilistic",
        num_speculative_tokens=gamma,
        texts_sha256=("a" if setting == "greedy" else "b") * 64,
        draws=draws,
    )


def make_speed(lengths: dict[int, float], cost: float = 0.12) -> Speed:
    """Speed that the model of Leviathan et al. would give, a little slower, at each draft length."""
    points = []
    for gamma, length in lengths.items():
        predicted = predicted_speedup(length, gamma, cost, 1.08)
        measured = 0.96 * predicted
        interval = [0.97 * measured, 1.03 * measured]
        points.append(SpeedPoint(gamma, 21.4 * measured, measured, interval, length, predicted))
    return Speed("AMD EPYC 7R13, 2 cores", "cpu", 2, "float32", 1, 24, 5, 21.4, cost, points)


def make_report(
    strength: float = 1.0,
    *,
    gammas: tuple[int, ...] = (1, 2, 3, 4, 5),
    settings: tuple[str, ...] = ("greedy", "t0.8"),
    per_domain: int = 17,
    domains: dict | None = None,
    untrained_strength: float = 0.12,
    **changes: object,
) -> EvalReport:
    """A report that the default policy promotes as a first drafter; `changes` replaces fields."""
    gamma = 3 if 3 in gammas else gammas[-1]
    more = {"per_domain": per_domain, "domains": domains}
    scale = {"greedy": 1.0, "t0.8": 0.9}
    acceptance = [make_result(strength * scale[s], s, g, **more) for s in settings for g in gammas]
    by_key = {(r.setting, r.num_speculative_tokens): r for r in acceptance}
    untrained = make_result(untrained_strength, "greedy", gamma, **more)
    checkpoints = [CheckpointPoint(0, untrained.summary)]
    for step, share in ((200, 0.62), (400, 0.8), (600, 0.9), (800, 0.96), (1000, 1.0)):
        checkpoints.append(CheckpointPoint(step, make_result(strength * share, "greedy", gamma, **more).summary))
    certifications = []
    for setting in settings:
        length = by_key[setting, gamma].summary.mean_accepted_length
        seen = length if setting == "greedy" else length + 0.01
        certifications.append(
            Certification(
                setting,
                gamma,
                24,
                length,
                seen,
                [length, length] if setting == "greedy" else [length - 0.06, length + 0.06],
                [],
                True,
            )
        )
    report = EvalReport(
        drafter_kind="draft_model",
        drafter_sha256="d" * 64,
        num_parameters=28_000_000,
        checkpoint_step=1000,
        lossless=True,
        target=TARGET,
        eval_prompts_sha256="e" * 64,
        num_training_rows=6_000,
        num_training_tokens=620_000,
        primary_setting="greedy",
        num_speculative_tokens=gamma,
        acceptance=acceptance,
        untrained=untrained,
        checkpoints=checkpoints,
        certifications=certifications,
        fidelity=Fidelity("float32", 24, 24, []),
        speed=make_speed({g: by_key["greedy", g].summary.mean_accepted_length for g in gammas}),
        dtype="float32",
        reload=make_reload(),
    )
    return replace(report, **changes)  # type: ignore[arg-type]


def make_reload(drafts: list[list[int]] | None = None, **changes: object) -> Reload:
    """A fresh process that read the same, but for `drafts` and what is changed of its reading."""
    measured = ExportReading(30, "f" * 64, [[1, 2, 3], [4, 5, 6]])
    return Reload(measured, replace(measured, drafts=drafts or measured.drafts, **changes))  # type: ignore[arg-type]


def divergence(*, near_tie: bool, gap: float = 0.01) -> Divergence:
    """An output that differs from the target's own at its 17th token."""
    return Divergence("code-00", 17, gap, near_tie)
