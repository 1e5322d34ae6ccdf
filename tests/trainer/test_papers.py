"""The claims of papers: what is compared, when a claim is shown, and that every arm is a configuration."""

from __future__ import annotations

import math
import statistics
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def papers(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "recipes")
    import papers

    yield papers
    for name in ("papers", "arms"):
        sys.modules.pop(name, None)


def point(first: float, many: float) -> dict[str, float]:
    return {"pass@1": first, "pass@16": many, "length": 9.0, "entropy": 1.0, "tokens": 5}


def test_pass_at_16_where_both_arms_have_one_pass_at_1(papers: Any) -> None:
    """The second arm ends at 0.4: there the first, between 0.2 and 0.6, has 0.7, and the second its own 0.5."""
    curves = [[point(0.2, 0.6), point(0.6, 0.8)], [point(0.1, 0.3), point(0.4, 0.5)]]
    study = papers.STUDIES["maxrl"]
    results = {
        papers.Arm("maxrl", label, seed): {"curve": curve, "last": curve[-1]}
        for label, curve in zip(study.arms, curves)
        for seed in range(2)
    }
    assert papers.pairs("maxrl", results, 2) == [pytest.approx((0.7, 0.5))] * 2


def test_a_claim_is_shown_by_its_sign_and_student_s_t(papers: Any) -> None:
    firsts, seconds = [5.0, 6.5, 5.5, 6.0], [7.0, 7.5, 8.0, 7.0]
    study = papers.STUDIES["dr_grpo"]
    results = {
        papers.Arm("dr_grpo", label, seed): {"last": {"length": values[seed]}, "curve": [], "wall": 60.0}
        for label, values in zip(study.arms, (firsts, seconds))
        for seed in range(4)
    }
    found = papers.judge("dr_grpo", results, 4)
    differences = [first - second for first, second in zip(firsts, seconds)]
    t = abs(statistics.fmean(differences)) / (statistics.stdev(differences) / 2) / math.sqrt(3)
    p = 1 - 2 / math.pi * (t / (1 + t * t) + math.atan(t))  # Student's distribution with three degrees of freedom
    assert (found.difference, found.p) == (pytest.approx(-1.625), pytest.approx(p, rel=1e-6))
    assert found.word == "shown" and p < 0.05, "fewer tokens are what it claims"
    swapped = {
        arm._replace(label=dict(zip(study.arms, reversed(study.arms)))[arm.label]): r for arm, r in results.items()
    }
    assert papers.judge("dr_grpo", swapped, 4).word == "the opposite"
    swapped[papers.Arm("dr_grpo", "dr_grpo", 0)] = {"last": {"length": 1.0}}
    assert papers.judge("dr_grpo", swapped, 4).word == "not shown", "one seed of four is another"
    page = papers.render(papers.MODELS["tiny"], results, ["dr_grpo"], 4)
    assert "| `dr_grpo` 5.75 | `grpo` 7.38 | -1.6 ± " in page and " | shown | 4 min |" in page and "1 of 1 are." in page


@pytest.mark.filterwarnings("error:these settings have no effect")
@pytest.mark.parametrize("model", ["tiny", "real"])
def test_every_arm_is_a_configuration(papers: Any, model: str, tmp_path: Path) -> None:
    for name, study in papers.STUDIES.items():
        assert len(study.arms) == 2
        arms = (papers.Arm(name, label, 0) for label in study.arms)
        first, second = (vars(papers.make_config(model, arm, 4, tmp_path)) for arm in arms)
        assert {key for key in first if first[key] != second[key]} - {"output_dir", "logging_dir"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dppo", "gigpo"])
def test_an_arm_trains(papers: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A noisy sampler, and walks of ten turns."""
    monkeypatch.setattr(papers, "WARM_UP_STEPS", 5)
    monkeypatch.setitem(papers.MODELS, "tiny", papers.MODELS["tiny"]._replace(held_out=4))
    label = next(iter(papers.STUDIES[name].arms))
    result = papers.train("tiny", papers.Arm(name, label, 0), 6_000, tmp_path)
    curve = result["curve"]
    assert len(curve) == 1 and curve[0]["tokens"] >= 6_000  # no curves are compared, so the last evaluation is enough
    assert all(0 <= one["pass@1"] <= one["pass@16"] <= 1 and one["entropy"] > 0 for one in curve)
    if name == "gigpo":
        assert result["last"]["length"] > 1 and any(one["pass@16"] > 0 for one in curve)
    assert result["last"]["range of log-ratios"] >= 0.0
