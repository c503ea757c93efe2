"""The expected time and memory of jobs, compared with recorded measurements."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moepack.methods import METHODS, Auto, create
from moepack.pipeline.costs import Load, job_memory, job_seconds
from moepack.pipeline.estimate import estimate
from places import BENCHES, TINY_MOE

FILES = [BENCHES / "results" / f"costs-{machine}.json" for machine in ("zen5", "xeon")]
RECORDED = [row for file in FILES for row in json.loads(file.read_text())["figures"]]
WITHIN = 1.3


@pytest.mark.parametrize(
    "row", RECORDED, ids=lambda row: f"{row['model']}-{row['load']['method']}-{row['load']['tokens']}"
)
def test_recorded_jobs_took_what_is_expected(row: dict[str, Any]) -> None:
    load = Load.from_json(row["load"])
    load = replace(load, seconds=METHODS[load.method].seconds)
    expected = job_seconds(load)
    assert expected is not None
    measured = sum(row["seconds"].values())
    assert measured / WITHIN < sum(expected.values()) < measured * WITHIN, (expected, row["seconds"])
    peak = row["memory"]["peak"]
    assert peak / WITHIN < job_memory(load) < peak * WITHIN


def test_a_plan_describes_its_job(tmp_path: Path) -> None:
    plan = estimate(TINY_MOE, tmp_path / "out", create("finequant", bits=4, dense_bits=4), threads=2)
    again = Load.from_json(json.loads(json.dumps(plan.load.to_json())))
    assert again == plan.load and again.threads == 2
    assert again.weights == sum(part.weights for part in plan.parts)
    assert plan.memory == job_memory(again) and plan.seconds == sum((job_seconds(again) or {}).values())


def test_the_sensitivity_pass_counts(tmp_path: Path) -> None:
    """The text is measured by `auto` only if it is read, and needs time and memory then."""
    free = estimate(TINY_MOE, tmp_path / "out", Auto(bits_per_weight=4.0, calibration="none")).load
    assert free.measured == free.measuring == free.tokens == 0
    read = replace(free, tokens=4096, length=256, measured=4096, measuring=8 << 30)
    assert job_memory(read) > 8 << 30 > job_memory(free)
    stages = job_seconds(read)
    assert stages is not None and min(stages["sensitivity"], stages["run"], stages["solve"]) > 0


def test_more_threads_take_less_time() -> None:
    load = Load.from_json(RECORDED[0]["load"])
    one, eight = (job_seconds(replace(load, threads=threads)) for threads in (1, 8))
    assert one is not None and eight is not None
    assert eight["pack"] == one["pack"] / 8 and eight["plan"] == one["plan"]
