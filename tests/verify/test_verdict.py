"""A whole verification. Its runs are engines in this process instead of processes with a user's
script."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from verify import faults
from verify.engine import Engine, Network

from lockstep.base.errors import LaunchError, PlanError
from lockstep.evidence.trace import Trace
from lockstep.plan import Plan
from lockstep.scripts.line import ScriptLine
from lockstep.verify.jobs import (
    Job,
    in_float64,
    microbatch_for_all,
    microbatch_size_jobs,
    parse_plans,
    perturbed_jobs,
    plan_job,
    reference_jobs,
    reference_plan,
)
from lockstep.verify.page import verify_page
from lockstep.verify.runner import JobResult
from lockstep.verify.verdict import Report
from lockstep.verify.verification import Verification, VerifyOptions


class PerSample(Network):
    """A model that treats each sample of a microbatch alone."""

    def forward(self, sample: Tensor, x: Tensor) -> Tensor:
        return self.last(self.odd(self.dropout(torch.tanh(self.norm(self.first(x))))))


class Quiet(Engine):
    """Eval mode, as in the microbatch size check: no dropout, and BatchNorm with its running
    statistics."""

    model = PerSample

    def start(self, model: nn.Module, rank: int) -> nn.Module:
        model.eval()
        model.train = lambda mode=True: model  # type: ignore[method-assign]
        return model


class InProcess:
    """Stands in for `Runner`: each job is an engine that runs when it is started."""

    traced: Callable[..., Trace]

    def __init__(self, kinds: Callable[[Job], type[Engine]] = lambda job: Engine) -> None:
        self.jobs: list[Job] = []
        self.failing: dict[str, tuple[int, str]] = {}
        self.metadata: dict[str, Any] = {
            "microbatch": 4,
            "global_batch": 24,
            "precision": "fp32",
            "gradient_compression": "none",
        }
        self.kinds = kinds

    def start(self, job: Job) -> Future[JobResult]:
        self.jobs.append(job)
        future: Future[JobResult] = Future()
        future.set_result(self.result(job))
        return future

    def queueing_the_rest(self) -> AbstractContextManager[None]:
        return nullcontext()

    def run(self, jobs: Sequence[Job]) -> list[JobResult]:
        return [self.start(job).result() for job in jobs]

    def result(self, job: Job) -> JobResult:
        if job.name in self.failing:
            status, error = self.failing[job.name]
            return JobResult(
                job=job, status=status, traces=[], error=error, seconds=1.0, timed_out=status == 143
            )
        trace = self.traced(
            self.kinds(job),
            job.microbatch or 4,
            ranks=job.processes,
            steps=job.steps,
            noise=job.noise_seed,
            float64=job.float64,
        )
        microbatch = job.microbatch or self.metadata["microbatch"]
        metadata = {**trace.metadata, **self.metadata, "microbatch": microbatch}
        trace = replace(trace, metadata=metadata)
        return JobResult(job=job, status=0, traces=[trace], error="", seconds=1.0)


@pytest.fixture(scope="module", autouse=True)
def shared_traces(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Trace an engine once for all tests that ask for the same run of it."""

    @cache
    def traced(kind: type[Engine], microbatch: int, **given: Any) -> Trace:
        made = type("Made", (kind,), {"microbatch": microbatch})
        return made(tmp_path_factory.mktemp("trace") / "trace", **given).run()

    InProcess.traced = staticmethod(traced)
    yield
    del InProcess.traced


def options(
    *plans: str, steps: int = 3, bitwise: bool = False, float64: bool = True, other: bool = False
) -> VerifyOptions:
    return VerifyOptions(
        plans=parse_plans(plans, bitwise=bitwise),
        steps=steps,
        float64=float64,
        check_microbatch_size=other,
    )


def verify(runner: InProcess, wanted: VerifyOptions) -> Report:
    return Verification(ScriptLine("train.py"), wanted, runner).run()  # type: ignore[arg-type]


def of_plan(kind: type[Engine], part: str = "plan-") -> Callable[[Job], type[Engine]]:
    return lambda job: kind if job.name.startswith(part) else Engine


def test_correct_plans_pass_in_the_recipes_precision_and_in_float64() -> None:
    runner = InProcess()
    report = verify(runner, options("replicate=2", "replicate=3"))
    assert report.passed
    assert [verdict.plan for verdict in report.verdicts] == [
        "replicate=2,numerics=fast",
        "replicate=3,numerics=fast",
    ]
    assert all(
        len(verdict.float64) == 1 and verdict.float64[0].passed for verdict in report.verdicts
    )
    assert {job.name for job in runner.jobs} == {
        *(
            "reference-fast",
            "perturbed-0",
            "perturbed-1",
            "perturbed-2",
            "reference-fast-float64",
            "perturbed-0-float64",
            "perturbed-1-float64",
        ),
        *("plan-replicate2-numericsfast", "plan-replicate3-numericsfast"),
        *("plan-replicate2-numericsfast-float64", "plan-replicate3-numericsfast-float64"),
    }
    assert all(job.steps == (1 if job.float64 else 3) for job in runner.jobs)


class Nudged(Engine):
    """The gradient is off by a thousandth of itself, in the same way on all ranks."""

    def reduce(self, step: int, locals_: list[Any]) -> list[Any]:
        return [
            {name: gradient * 1.001 for name, gradient in each.items()}
            for each in super().reduce(step, locals_)
        ]


def test_the_effect_of_compression_is_reported_and_fails_no_plan() -> None:
    runner = InProcess(lambda job: Engine if job.uncompressed or job.processes == 1 else Nudged)
    runner.metadata["gradient_compression"] = "int8"
    report = verify(runner, options("replicate=2", "replicate=1"))
    assert report.passed
    assert [job.name for job in runner.jobs if job.name.endswith("-compressed")] == [
        "plan-replicate2-numericsfast-compressed",
        "plan-replicate1-numericsfast-compressed",
    ]
    (two,), (one,) = (verdict.compression for verdict in report.verdicts)
    assert two.gradient == pytest.approx(1e-3, rel=1e-2)
    assert 0 < two.loss < 1
    assert 0 < two.parameters < 1
    assert two.text().startswith(
        f"gradient_compression=int8: after 3 steps the loss differs by {two.loss:.2g} of its size"
        " from the uncompressed run, "
    )
    assert (one.gradient, one.parameters, one.loss) == (0.0, 0.0, 0.0)
    assert json.loads(json.dumps(report.as_json()))["plans"][0]["compression"] == [
        {
            "gradient_compression": "int8",
            "steps": 3,
            "gradient": two.gradient,
            "parameters": two.parameters,
            "loss": two.loss,
        }
    ]
    assert two.text() in verify_page(report)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (faults.NothingReduced, "value on another rank"),
        (faults.SampleSeenTwice, "samples on rank 1, microbatch 3: different"),
    ],
)
def test_ranks_that_differ_under_compression_fail(kind: type[Engine], text: str) -> None:
    runner = InProcess(of_plan(kind, "plan-replicate2-numericsfast-compressed"))
    runner.metadata["gradient_compression"] = "int8"
    (verdict,) = verify(runner, options("replicate=2")).verdicts
    assert not verdict.passed
    assert verdict.mismatch is not None
    assert text in verdict.mismatch.text()


def test_a_plan_that_cannot_compress_did_not_run() -> None:
    runner = InProcess()
    runner.metadata["gradient_compression"] = "int8"
    runner.failing["plan-replicate2-numericsbitwise-compressed"] = (
        2,
        "lockstep: RecipeError: gradient_compression='int8' with numerics=bitwise",
    )
    (verdict,) = verify(runner, options("replicate=2", bitwise=True, float64=False)).verdicts
    assert (verdict.ran, verdict.exit_status, verdict.passed) == (False, 2, False)


def test_a_wrong_plan_fails_and_a_correct_one_does_not() -> None:
    runner = InProcess(lambda job: faults.DividedTwice if job.processes == 2 else Engine)
    report = verify(runner, options("replicate=2", "replicate=3"))
    wrong, right = report.verdicts
    assert (wrong.passed, right.passed, report.passed) == (False, True, False)
    assert wrong.mismatch is not None
    assert (
        wrong.mismatch.text()
        == "step 0: gradient 'last.bias': off by 0.5 of its size, 1.05e+06 × rounding"
    )
    assert wrong.row() == (
        wrong.plan,
        "2",
        "fails",
        "10 × rounding",
        "1.05e+06 × rounding",
        "gradient last.bias, step 0",
    )
    assert right.row()[2] == "passes"
    assert (
        report.summary()
        == "1 of 2 plans failed to show that they train the same model as one process"
    )
    assert "divided by the world size once too often" in str(wrong.mismatch.cause)
    found = json.loads(json.dumps(report.as_json(), allow_nan=False))
    assert (
        found["passed"],
        found["plans"][0]["mismatch"]["name"],
        found["plans"][0]["mismatch"]["step"],
    ) == (False, "last.bias", 0)
    assert found["plans"][1]["mismatch"] is None
    assert (
        len(found["rounding_spread"]["gradients"])
        == len(found["plans"][0]["divergence"]["gradients"])
        == 3
    )


def test_a_fault_that_only_float64_shows_fails() -> None:
    class TooSmall(Engine):
        def reduce(self, step: int, locals_: list[Any]) -> list[Any]:
            return [
                {name: g * (1 + 2e-8) for name, g in part.items()}
                for part in super().reduce(step, locals_)
            ]

    (verdict,) = verify(InProcess(of_plan(TooSmall)), options("replicate=2")).verdicts
    assert verdict.mismatch is not None
    assert verdict.mismatch.text().endswith("(in float64)")
    assert verdict.row()[5].endswith("(float64)")
    assert verify(InProcess(of_plan(TooSmall)), options("replicate=2", float64=False)).passed


class DecayOfTheWorld(Engine):
    """Weight decay that grows with the world size. In float32 its first step is within the
    tolerance."""

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.002 * self.size)


def test_a_fault_that_float64_shows_at_an_earlier_step_is_reported() -> None:
    runner = InProcess(lambda job: DecayOfTheWorld)
    (verdict,) = verify(runner, options("replicate=2")).verdicts
    assert verdict.comparisons[0].differences[0].step > 0, "the run's own type sees it later"
    assert verdict.mismatch is not None
    assert (verdict.mismatch.difference.step, verdict.mismatch.float64) == (0, True)
    assert "the gradient and the optimizer's state are right, but the update is not" in str(
        verdict.mismatch.cause
    )


def test_bitwise_plans_are_compared_with_a_bitwise_reference_without_perturbed_runs() -> None:
    runner = InProcess()
    report = verify(runner, options("replicate=3", bitwise=True))
    assert [job.name for job in runner.jobs] == [
        "reference-bitwise",
        "plan-replicate3-numericsbitwise",
    ]
    assert not report.passed  # this engine adds in another order at 3 ranks
    assert report.verdicts[0].bitwise


def test_a_script_that_fails_in_float64_is_verified_without_it() -> None:
    runner = InProcess()
    runner.failing["reference-fast-float64"] = (1, "Traceback\nRuntimeError: expected Float")
    report = verify(runner, options("replicate=2"))
    assert report.passed
    assert report.notes == [
        "the first step was not repeated in float64: the script fails in it (RuntimeError: expected"
        " Float)"
    ]


def test_a_plan_under_which_the_script_fails_did_not_run() -> None:
    runner = InProcess()
    runner.failing["plan-replicate2-numericsfast"] = (2, "lockstep: PlanError: why")
    (verdict,) = verify(runner, options("replicate=2")).verdicts
    assert (verdict.ran, verdict.passed, verdict.exit_status, verdict.error) == (
        False,
        False,
        2,
        "lockstep: PlanError: why",
    )


@pytest.mark.parametrize(
    ("status", "error", "text"),
    [
        (
            1,
            "Traceback\nValueError: boom",
            (
                r"train.py failed before a training step under one process \(exit status 1\);"
                r" .*`lockstep run --nproc 1 train.py`.*\nTraceback\nValueError: boom"
            ),
        ),
        (
            143,
            "",
            (
                r"train.py did not come to its last of 3 training steps under one process in 1 s;"
                r" .*a longer --timeout"
            ),
        ),
        (
            0,
            "",
            (
                r"train.py ended without a training step under one process; verify compares the"
                r" steps of ls.train or ls.Session;"
            ),
        ),
    ],
)
def test_a_script_that_cannot_be_verified_is_a_user_error(
    status: int, error: str, text: str
) -> None:
    runner = InProcess()
    runner.failing["reference-fast"] = (status, error)
    with pytest.raises(LaunchError, match=f"(?s)^{text}"):
        verify(runner, options("replicate=2"))


def test_a_microbatch_that_the_recipe_leaves_open_is_fixed_for_all_plans() -> None:
    runner = InProcess()
    runner.metadata["microbatch"] = None
    report = verify(runner, options("replicate=2", "replicate=3", float64=False))
    assert report.passed
    assert {job.microbatch for job in runner.jobs[1:]} == {8}
    assert len({job.name for job in runner.jobs}) == len(runner.jobs)
    assert report.notes[0].endswith("verified with microbatch=8 under every plan")


class MeanOfWeights(Quiet):
    """Each microbatch is divided by its own weight and counts by its number of samples."""

    def factor(self, step: int, index: int, rank: int) -> float:
        samples = self.samples(step, index)
        return self.weight / float(self.data[2][samples].sum()) * len(samples) / self.global_batch


class MeanOverTokens(MeanOfWeights):
    weighted = False


@pytest.mark.parametrize(
    ("kind", "cause"),
    [
        (Quiet, None),
        (MeanOverTokens, "return ls.Sum(total), and give Recipe.weight"),
        (
            MeanOfWeights,
            "With weights, its total must be a sum over samples: it may be a mean all the same",
        ),
    ],
)
def test_another_microbatch_size_has_the_same_gradient(
    kind: type[Engine], cause: str | None
) -> None:
    runner = InProcess(lambda job: kind if job.name.startswith("microbatch-") else Engine)
    report = verify(runner, options("replicate=2", float64=False, other=True))
    assert report.microbatch_size_checked
    assert [job.name for job in runner.jobs if job.name.startswith("micro")] == [
        "microbatch-4",
        "microbatch-2",
    ]
    assert report.verdicts[0].passed
    assert (report.microbatch_size_mismatch is None) == report.passed == (cause is None)
    said = "every plan trains the same model as one process"
    assert report.summary() == said + (
        "" if cause is None else ", but the loss depends on how a batch is split into microbatches"
    )
    if report.microbatch_size_mismatch is not None:
        assert (
            report.microbatch_size_mismatch.difference.step,
            report.microbatch_size_mismatch.difference.name,
        ) == (0, "last.bias")
        assert (
            "the loss is not a sum over samples: split into microbatches of 2 instead of 4"
            in str(report.microbatch_size_mismatch.cause)
        )
        assert str(cause) in str(report.microbatch_size_mismatch.cause)


def test_a_forward_that_draws_in_eval_mode_is_not_tried_with_another_microbatch_size() -> None:
    runner = InProcess()  # with dropout on
    report = verify(runner, options("replicate=2", float64=False, other=True))
    assert (report.microbatch_size_checked, report.microbatch_size_mismatch) == (False, None)
    assert "draws random numbers even in eval mode" in report.notes[0]


@pytest.mark.parametrize("kind", [Engine, faults.NotReduced])
def test_the_page_needs_no_network(kind: type[Engine]) -> None:
    report = verify(InProcess(of_plan(kind)), options("replicate=2", "replicate=4", float64=False))
    report.script = "<train>.py"
    text = verify_page(report)
    assert text.startswith("<!doctype html>")
    assert "http" not in text.replace("http-equiv", "")
    assert "default-src 'none'" in text
    assert "&lt;train&gt;.py" in text
    assert "prefers-color-scheme: dark" in text
    assert text.count("<svg") == 6
    assert text.count('<path class="band"') == 6
    assert ("was not reduced" in text) == (kind is faults.NotReduced)
    assert "nan" not in text[text.index("</style>") : text.index("<script")]


def test_plans_are_read_with_their_processes() -> None:
    assert parse_plans(["replicate=2", "replicate=3,numerics=bitwise"], bitwise=False) == [
        (Plan.parse("replicate=2"), 2),
        (Plan.parse("replicate=3,numerics=bitwise"), 3),
    ]
    given = ["replicate=2", "replicate=3,numerics=bitwise", "tensor=2,slices=2"]
    assert {plan.numerics for plan, _ in parse_plans(given, bitwise=True)} == {"bitwise"}


@pytest.mark.parametrize(
    ("texts", "bitwise", "message"),
    [
        (
            [],
            False,
            "no plan to verify; --plans takes at least one; give for example --plans replicate=2",
        ),
        (
            ["replicate=2,microbatch_splits=1"],
            False,
            "microbatch_splits=1 in plan 'replicate=2,microbatch_splits=1'; verify compares",
        ),
        (
            ["numerics=bitwise"],
            False,
            (
                "replicate=auto in plan 'numerics=bitwise'; verify starts as many processes as the"
                " axes multiply to"
            ),
        ),
        (
            ["replicate=2", "replicate=2,numerics=fast"],
            False,
            "plan 'replicate=2,numerics=fast' is given twice in --plans; give it once",
        ),
        (
            ["replicate=2,numerics=fast"],
            True,
            (
                "numerics=fast in plan 'replicate=2,numerics=fast' with --bitwise, which requires"
                " the same bits"
            ),
        ),
        (
            ["replicate"],
            False,
            "'replicate' in plan 'replicate'; a plan is made of name=value pairs",
        ),
    ],
)
def test_a_plan_that_cannot_be_verified_is_refused(
    texts: list[str], bitwise: bool, message: str
) -> None:
    with pytest.raises(PlanError) as raised:
        parse_plans(texts, bitwise=bitwise)
    assert str(raised.value).startswith(message)


def test_only_bits_are_compared_with_a_run_that_rounds_as_the_plan_does() -> None:
    """Compiled code and chunked logits round otherwise."""
    plans = parse_plans(
        [
            "replicate=2,compile=yes,logits=chunked",
            "shard=2,numerics=bitwise,logits=chunked",
            "shard=2,numerics=bitwise",
            "shard=2,numerics=bitwise,compile=yes",
        ],
        bitwise=False,
    )
    expected = [
        "replicate=1,numerics=fast",
        "replicate=1,numerics=bitwise,logits=chunked",
        "replicate=1,numerics=bitwise",
        "replicate=1,numerics=bitwise,compile=yes",
    ]
    jobs = list(reference_jobs(plans, 4).values())
    assert sorted(str(job.plan) for job in jobs) == sorted(expected)
    assert len({job.name for job in jobs}) == len(jobs)
    assert [str(reference_plan(plan)) for plan, _ in plans] == expected


def test_jobs_have_folders_of_their_own() -> None:
    plans = parse_plans(
        ["replicate=2", "replicate=2,numerics=bitwise", "replicate=2,workers=1"], bitwise=False
    )
    plans += parse_plans(["replicate=2,numerics=bitwise,compile=yes"], bitwise=False)
    jobs = [
        *reference_jobs(plans, 4).values(),
        *perturbed_jobs(4, None),
        *(plan_job(plan, count, 4, None) for plan, count in plans),
    ]
    jobs += [in_float64(job) for job in jobs if job.noise_seed is None] + microbatch_size_jobs(
        32, 8
    )
    assert len({job.name for job in jobs}) == len(jobs)


@pytest.mark.parametrize(
    ("global_batch", "microbatch", "sizes"),
    [(32, 8, [8, 4]), (32, 7, [7, 4]), (8, 1, [1, 2]), (1, 1, []), (6, 2, [2, 1])],
)
def test_the_other_microbatch_size_is_about_half(
    global_batch: int, microbatch: int, sizes: list[int]
) -> None:
    assert [job.microbatch for job in microbatch_size_jobs(global_batch, microbatch)] == sizes


def test_a_common_size_gives_every_process_a_microbatch() -> None:
    assert (
        microbatch_for_all(10, [(Plan.parse("replicate=2"), 2), (Plan.parse("replicate=4"), 4)])
        == 3
    )
    assert microbatch_for_all(1, [(Plan.parse("replicate=4"), 4)]) == 1


def test_the_default_dtype_is_unchanged() -> None:
    assert torch.get_default_dtype() is torch.float32
