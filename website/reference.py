"""The pages of the API reference: which public names are on which, in the order in which they are
read."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ReferencePage:
    title: str
    about: str
    names: tuple[str, ...]


RUN_MEMBERS = (
    *(
        "step",
        "rank",
        "dir",
        "model",
        "optimizers",
        "loss",
        "metrics",
        "is_logging_step",
        "stopping",
        "log",
        "event",
        "evaluate",
    ),
    *("freeze", "unfreeze", "gradient_norms", "full_state_dict", "save", "include", "stop"),
)
STEP_MEMBERS = (
    "index",
    "samples",
    "count",
    "microbatches",
    "backward",
    "compute",
    "commit",
    "skip",
    "log",
)
MEMBERS = {"lockstep.training.run.Run": RUN_MEMBERS, "lockstep.training.step.Step": STEP_MEMBERS}
"""Class -> the members that are public, where it has others that only lockstep uses."""

PAGES = {
    "train": ReferencePage(
        title="Train and evaluate",
        about=(
            "What a script calls. `import lockstep as ls`; every name is loaded when it is first"
            " used."
        ),
        names=(
            *(
                "lockstep.train",
                "lockstep.evaluate",
                "lockstep.Result",
                "lockstep.Saving",
                "lockstep.saving.Best",
                "lockstep.spawn",
            ),
            *(
                "lockstep.rank",
                "lockstep.once",
                "lockstep.fingerprint",
                "lockstep.load",
                "lockstep.export_pretrained",
            ),
        ),
    ),
    "recipe": ReferencePage(
        title="Recipe",
        about="What is learned. The page [the recipe](../recipe.md) explains it with examples.",
        names=(
            *(
                "lockstep.Recipe",
                "lockstep.param",
                "lockstep.Sum",
                "lockstep.Loss",
                "lockstep.Evaluation",
                "lockstep.Mean",
            ),
            *(
                "lockstep.Gathered",
                "lockstep.Weights",
                "lockstep.Sequence",
                "lockstep.Balance",
                "lockstep.Ensemble",
                "lockstep.Stream",
                "lockstep.warmup_cosine",
            ),
            "lockstep.OnMetric",
            "lockstep.pack",
        ),
    ),
    "samplers": ReferencePage(
        title="Samplers",
        about=(
            "Functions for `Recipe.sampler` and `Recipe.batch_sampler`, as in"
            " [sampling](../recipe.md#sampling)."
        ),
        names=tuple(
            f"lockstep.samplers.{name}" for name in ("weighted", "balanced", "mixture", "by_length")
        ),
    ),
    "plan": ReferencePage(
        title="Plan",
        about=(
            "How a recipe is executed. As text: `shard=4,tensor=2,numerics=bitwise`."
            " [Plans](../plans.md) says which to choose."
        ),
        names=("lockstep.Plan",),
    ),
    "session": ReferencePage(
        title="Session",
        about=(
            "For [loops that a recipe cannot express](../session.md), and for [loops that were"
            " written for DDP](../moving-in/ddp.md)."
        ),
        names=("lockstep.Session", "lockstep.training.step.Step"),
    ),
    "hooks": ReferencePage(
        title="Hooks",
        about=(
            "Code of yours that a run calls, as in [hooks](../hooks.md). A hook gets the `Run`; it"
            " does not make one."
        ),
        names=(
            *(
                "lockstep.Hook",
                "lockstep.training.run.Run",
                "lockstep.base.events.Event",
                "lockstep.EarlyStopping",
            ),
            "lockstep.ExponentialMovingAverage",
        ),
    ),
    "loggers": ReferencePage(
        title="Loggers",
        about=(
            "Where else a run's numbers go, besides its [run directory](../run-directory.md):"
            " `ls.train(recipe, loggers=[...])`."
        ),
        names=("lockstep.WandB", "lockstep.MLflow", "lockstep.logging.loggers.Logger"),
    ),
    "errors": ReferencePage(
        title="Errors",
        about=(
            "All exceptions that lockstep raises on purpose are in `ls.errors`. [By"
            " symptom](../symptoms.md) says what to do about each."
        ),
        names=tuple(
            f"lockstep.errors.{name}"
            for name in (
                *(
                    "LockstepError",
                    "UserError",
                    "RecipeError",
                    "PlanError",
                    "DataError",
                    "LossError",
                    "LaunchError",
                    "RunDirectoryError",
                ),
                *(
                    "CheckpointError",
                    "MismatchError",
                    "DivergenceError",
                    "WrongResultError",
                    "HangError",
                    "WorkerError",
                ),
            )
        ),
    ),
    "testing": ReferencePage(
        title="Testing",
        about="For tests of your own on several ranks, as in [testing](../testing.md). On Linux.",
        names=(
            *(
                "lockstep.testing.pool.WorkerPool",
                "lockstep.testing.pool.WorkerFailed",
                "lockstep.testing.leaks.take",
            ),
            *(
                "lockstep.testing.leaks.remaining",
                "lockstep.testing.leaks.compare",
                "lockstep.testing.leaks.Snapshot",
            ),
            *(
                "lockstep.testing.leaks.Exempt",
                "lockstep.testing.audit.audit",
                "lockstep.audit.finding.Audit",
                "lockstep.audit.finding.Finding",
            ),
        ),
    ),
}
"""File in the folder `api` of the site -> page."""


def page_of(name: str) -> str | None:
    """The file of the page that has the public name `ls.{name}`, or its members."""
    return next(
        (
            file
            for file, page in PAGES.items()
            if any(f"{each}.".startswith(f"lockstep.{name}.") for each in page.names)
        ),
        None,
    )


def render(page: ReferencePage) -> str:
    """The page as Markdown, with mkdocstrings' directives."""
    parts = [f"# {page.title}", page.about]
    for name in page.names:
        members = MEMBERS.get(name)
        parts.append(
            f"::: {name}"
            + (f"\n    options: {{members: [{', '.join(members)}]}}" if members else "")
        )
    return "\n\n".join(parts) + "\n"
