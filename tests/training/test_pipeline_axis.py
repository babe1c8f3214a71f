"""The pipeline axis under `ls.train`, alone and with the others: what comes out is what one process
gives, to rounding."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from training.subjects import adamw, learned, rows

import lockstep as ls
from lockstep.base.errors import UserError
from lockstep.testing.pool import WorkerPool

PLANS = {
    "pipeline=2,schedule=gpipe": 2,
    "pipeline=2": 2,
    "pipeline=2,schedule=interleaved": 2,
    "pipeline=2,schedule=zero-bubble": 2,
    "pipeline=2,checkpointing=full": 2,
    "pipeline=3": 3,
    "replicate=2,pipeline=2": 4,
    "shard=2,pipeline=2": 4,
    "shard=2,pipeline=2,schedule=interleaved,checkpointing=selective": 4,
    "shard=2,pipeline=2,sharding=gradients": 4,
    "shard=2,pipeline=2,schedule=zero-bubble": 4,
    "tensor=2,pipeline=2": 4,
}
"""And the processes that they need."""
WORDS, WIDTH = 11, 8
STYLES = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
Batch = Sequence[Tensor]


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.dropout = nn.Embedding(WORDS, WIDTH), nn.Dropout(0.2)

    def forward(self, words: Tensor) -> Tensor:
        return self.dropout(self.words(words))  # type: ignore[no-any-return]


class Block(nn.Module):
    """With running statistics; its dropout lies where a tensor axis leaves things whole."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.BatchNorm1d(WIDTH),
            nn.Linear(WIDTH, 2 * WIDTH),
            nn.Linear(2 * WIDTH, WIDTH),
        )
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(torch.relu(self.up(self.norm(x)))))  # type: ignore[no-any-return]


class Head(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight, self.never = weight, nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight)


class Staged(nn.Module):
    """Tied weights, dropout, BatchNorm, and a parameter that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = Embedding()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = Head(self.embedding.words.weight)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embedding(words)
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


def sentences(samples: int) -> TensorDataset:
    """Each sample's word, the next word, and what it counts for: up to a hundredfold."""
    generator = torch.Generator().manual_seed(7)
    words = torch.randint(WORDS, (2, samples), generator=generator)
    return TensorDataset(words[0], words[1], torch.rand(samples, generator=generator) * 10 + 0.1)


def weighted(output: Tensor, batch: Batch) -> dict[str, Any]:
    losses = nn.functional.cross_entropy(output, batch[1], reduction="none")
    return {"words": ls.Sum((batch[2] * losses).sum()), "size": (output**2).mean()}


def of_its_own_weight(output: Tensor, batch: Batch) -> ls.Loss:
    losses = nn.functional.cross_entropy(output, batch[1], reduction="none")
    return ls.Loss((batch[2] * losses).sum(), batch[2].sum())


def right(output: Tensor, batch: Batch) -> Tensor:
    return (output.argmax(1) == batch[1]).double()


def recipe(**changes: Any) -> ls.Recipe:
    """Seven microbatches a step, the last one short, and four steps in two epochs whose last batch
    is short."""
    given: dict[str, Any] = {
        "model": Staged,
        "data": sentences(41),
        "inputs": lambda batch: batch[0],
        "loss": weighted,
        "weight": lambda batch: {"words": batch[2].sum()},
        "optimizer": adamw,
        "global_batch": 27,
        "microbatch": 4,
        "epochs": 2,
        "clip_norm": 0.5,
        "tensor": STYLES,
        "stages": ["embedding", "blocks.*", "head"],
        "evaluation": ls.Evaluation(data=sentences(19), metrics={"right": ls.Mean(right)}, every=2),
    }
    return ls.Recipe(**given | changes)


class WithItsOwnWeight(ls.Hook):
    """Nothing; a hook's `save` has tensors of all ranks."""

    def on_finish(self, run: Any) -> None:
        run.save(
            "mine.safetensors",
            {
                name: value * 2
                for name, value in run.model.state_dict().items()
                if value.is_floating_point()
            },
        )


def train(plan: str, run_dir: str, name: str) -> ls.Result:
    hooks = [WithItsOwnWeight()] if plan.startswith("pipeline") else []
    return ls.train(recipe(**TRAININGS[name]), plan=plan, run_dir=run_dir, hooks=hooks, log_every=1)


def train_in_float64(
    plan: str, run_dir: str, microbatch: int = 4
) -> tuple[float, dict[str, float]]:
    """Where rounding is far from every mistake."""
    given = recipe(model=lambda: Staged().double(), microbatch=microbatch)
    result = ls.train(given, plan=plan, run_dir=run_dir)
    return result.loss, result.metrics


TRAININGS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"precision": "bf16", "epochs": 1},
    "fp16": {"precision": "fp16"},
    "a weight of its own": {"loss": of_its_own_weight, "weight": None, "epochs": 1},
}
"""Changes of the recipe."""


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, ls.Result]]:
    """The folder of the trainings of one process, and what came of them."""
    folder = tmp_path_factory.mktemp("alone")
    return folder, {name: train("replicate=1", str(folder / name), name) for name in TRAININGS}


def train_each(run_dir: str, plans: Sequence[str]) -> dict[str, ls.Result]:
    """By plan and training: all trainings where the plan is pipeline=2 alone."""
    names = [
        (plan, name)
        for plan in plans
        for name in (TRAININGS if plan == "pipeline=2" else list(TRAININGS)[:1])
    ]
    return {f"{plan}/{name}": train(plan, f"{run_dir}/{plan}/{name}", name) for plan, name in names}


@pytest.mark.parametrize(
    "plans",
    [
        ["pipeline=2", "pipeline=2,schedule=interleaved"],
        ["pipeline=3"],
        ["shard=2,pipeline=2"],
        *(
            pytest.param([plan], marks=pytest.mark.slow)
            for plan in PLANS
            if plan
            not in (
                "pipeline=2",
                "pipeline=2,schedule=interleaved",
                "pipeline=3",
                "shard=2,pipeline=2",
            )
        ),
    ],
)
def test_training_gives_the_model_of_one_process(
    pool: WorkerPool, tmp_path: Path, alone: tuple[Path, dict[str, ls.Result]], plans: list[str]
) -> None:
    """Also in a lower precision, to its rounding; and a weight that only the last stage knows is
    told to all."""
    folder, expected = alone
    everyone = pool.run(PLANS[plans[0]], train_each, str(tmp_path), plans)
    for case, result in everyone[0].items():
        plan, name = case.split("/")
        if name in ("bf16", "fp16"):
            assert result.loss == pytest.approx(expected[name].loss, rel=3e-2), case
            own, other = (
                [
                    event
                    for event in each.events[1:-1]
                    if event.name not in ("gradient-reducer", "generators-seeded")
                ]
                for each in (result, expected[name])
            )
            assert own == other, case
            continue
        assert {(each[case].fingerprint, each[case].loss) for each in everyone} == {
            (result.fingerprint, result.loss)
        }, case
        assert result.loss == pytest.approx(expected[name].loss, rel=1e-4), case
        for each in everyone:
            assert each[case].metrics == pytest.approx(expected[name].metrics, rel=1e-4), case
        for found, row in zip(learned(tmp_path / case), learned(folder / name), strict=True):
            assert found == pytest.approx(row, rel=1e-4), case
        state, truth = (
            load_file(path / "model.safetensors") for path in (tmp_path / case, folder / name)
        )
        assert state.keys() == truth.keys(), case
        torch.testing.assert_close(state, truth, rtol=1e-3, atol=1e-4)
        if plan.startswith("pipeline"):
            doubled = load_file(tmp_path / case / "mine.safetensors")
            assert all(
                torch.equal(doubled[part], 2 * value)
                for part, value in state.items()
                if value.is_floating_point()
            ), case


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["replicate=3,pipeline=2", "shard=3,pipeline=2"])
def test_seven_microbatches_are_dealt_to_three_pipelines(tmp_path: Path, plan: str) -> None:
    """And four in the last step of an epoch."""
    with WorkerPool(max_workers=6) as pool:
        (alone,) = pool.run(1, train_in_float64, "replicate=1", str(tmp_path / "alone"))
        found = pool.run(6, train_in_float64, plan, str(tmp_path / "run"))
    state, truth = (load_file(tmp_path / name / "model.safetensors") for name in ("run", "alone"))
    torch.testing.assert_close((found, state), ([alone] * 6, truth), rtol=1e-9, atol=1e-11)


@pytest.mark.slow
def test_sharded_stages_keep_their_gradients_between_the_calls_of_a_step(
    pool: WorkerPool, tmp_path: Path
) -> None:
    """A rank has five microbatches: torch's interleaved schedule takes four in one call."""
    (alone,) = pool.run(1, train_in_float64, "replicate=1", str(tmp_path / "alone"), 3)
    plan = "shard=2,pipeline=2,schedule=interleaved"
    found = pool.run(4, train_in_float64, plan, str(tmp_path / "run"), 3)
    state, truth = (load_file(tmp_path / name / "model.safetensors") for name in ("run", "alone"))
    torch.testing.assert_close((found, state), ([alone] * 4, truth), rtol=1e-9, atol=1e-11)


@pytest.mark.slow
def test_a_weight_that_only_the_last_stage_knows_is_told_to_all_replicas(
    pool: WorkerPool, tmp_path: Path, alone: tuple[Path, dict[str, ls.Result]]
) -> None:
    name = "a weight of its own"
    expected = alone[1][name]
    for result in pool.run(4, train, "replicate=2,pipeline=2", str(tmp_path / "run"), name):
        assert result.loss == pytest.approx(expected.loss, rel=1e-4)
        assert result.metrics == pytest.approx(expected.metrics, rel=1e-4)


class StopsOnOneRank(ls.Hook):
    def after_step(self, run: Any) -> None:
        if run.context.world.rank == 0:
            run.stop("enough")


def stop_on_one_rank(run_dir: str) -> int:
    given = recipe(epochs=None, steps=30, evaluation=None)
    return ls.train(
        given, plan="pipeline=2", run_dir=run_dir, hooks=[StopsOnOneRank()], log_every=2
    ).steps


class Bare(nn.Module):
    """Only its first and last part have vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = Embedding(), nn.LayerNorm(WIDTH)
        self.inner, self.head = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.inner(self.norm(self.embedding(words))))  # type: ignore[no-any-return]


def one_for_matrices_and_one_for_vectors(model: nn.Module) -> list[torch.optim.Optimizer]:
    vectors = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    return [torch.optim.AdamW(matrices, lr=1e-2), torch.optim.SGD(vectors, lr=0.1)]


def train_with_two_optimizers(plan: str, run_dir: str) -> ls.Result:
    schedule = ls.warmup_cosine(warmup=2, total=6)
    stages = ["embedding", "norm", "inner", "head"]
    given = recipe(
        model=Bare,
        stages=stages,
        tensor=None,
        optimizer=one_for_matrices_and_one_for_vectors,
        schedule=schedule,
    )
    return ls.train(given, plan=plan, run_dir=run_dir)


def test_an_optimizer_may_have_nothing_to_do_on_some_stage(
    pool: WorkerPool, tmp_path: Path
) -> None:
    alone = train_with_two_optimizers("replicate=1", str(tmp_path / "alone"))
    for result in pool.run(4, train_with_two_optimizers, "pipeline=4", str(tmp_path / "run")):
        assert result.loss == pytest.approx(alone.loss, rel=1e-4)
        assert result.metrics == pytest.approx(alone.metrics, rel=1e-4)


class AList(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x: Any) -> Any:
        return [self.inner(x[0] if isinstance(x, list) else x)]


def of_lists() -> nn.Module:
    return nn.Sequential(AList(), AList(), AList())


def narrow() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3))


class ReluBetween(Staged):
    def forward(self, words: Tensor) -> Tensor:
        x = self.embedding(words)
        for block in self.blocks:
            x = torch.relu(block(x))
        return self.head(x)  # type: ignore[no-any-return]


class TakesApart(Staged):
    def forward(self, words: Tensor) -> Tensor:
        x = self.embedding(words)
        for block in self.blocks:
            x = block(x)[...]
        return self.head(x)  # type: ignore[no-any-return]


class SkipsABlock(Staged):
    def forward(self, words: Tensor) -> Tensor:
        x = self.embedding(words)
        for block in list(self.blocks)[1:]:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


class Skips(Staged):
    """Past a block."""

    def forward(self, words: Tensor) -> Tensor:
        x = self.embedding(words)
        self.blocks[0](x)
        for block in list(self.blocks)[1:]:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


class ABatchNormTwice(nn.Sequential):
    def __init__(self) -> None:
        norm = nn.BatchNorm1d(6)
        super().__init__(nn.Linear(6, 6), norm, nn.Linear(6, 6), norm, nn.Linear(6, 3))


class InADict(Staged):
    def forward(self, words: Tensor) -> Tensor:
        return {"logits": super().forward(words)}  # type: ignore[return-value]


class WithAWideTable(Staged):
    def __init__(self) -> None:
        super().__init__()
        self.head.register_buffer("table", torch.zeros(2, dtype=torch.complex128))


def of_all_but_the_head(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        [parameter for name, parameter in model.named_parameters() if "never" not in name]
    )


def given_back(output: Tensor, batch: Batch) -> Tensor:
    return output


def second(batch: Batch) -> Tensor:
    return batch[1]


def infinite(output: Tensor, batch: Batch) -> Tensor:
    return (output / 0).mean()


def with_a_backward(output: Tensor, batch: Batch) -> Tensor:
    output.square().mean().backward(retain_graph=True)
    return output.mean()


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "more stages than parts": (
        "pipeline=3",
        {"model": narrow, "stages": None},
        "RecipeError: pipeline=3 makes 3 stages, and the model has trainable parameters for 2"
        " (from 0, 2)",
    ),
    "fewer microbatches than stages": (
        "pipeline=3",
        {"microbatch": 16},
        "RecipeError: 2 microbatches per step in a pipeline of 3 stages; with fewer microbatches"
        " than stages some stages always wait",
    ),
    "a boundary of something other than tensors": (
        "pipeline=3",
        {
            "model": of_lists,
            "stages": None,
            "data": rows(64),
            "inputs": second,
            "loss": infinite,
            "weight": None,
        },
        "RecipeError: the part '0' of the model returns a list, and the next one is on another"
        " rank; a stage of a pipeline passes on",
    ),
    "a pattern that matches nothing": (
        "pipeline=3",
        {"stages": ["embedding", "layers.*", "head"]},
        "RecipeError: the recipe's stages have 'layers.*', which matches no module of the"
        " model; modules are embedding, ",
    ),
    "a model whose parts nobody names": (
        "pipeline=3",
        {"stages": None},
        "RecipeError: pipeline=3 and a model (Staged) that is not an nn.Sequential; a pipeline must"
        " know the model's parts in the order",
    ),
    "parameters outside of the parts": (
        "pipeline=3",
        {"stages": ["embedding", "blocks.*"]},
        "RecipeError: the recipe's stages leave out head.never.weight, head.never.bias;"
        " a pipeline calls only the stages, so they must hold",
    ),
    "a forward that computes something between the parts": (
        "pipeline=3",
        {"model": ReluBetween},
        "RecipeError: the model's forward runs other code after 'blocks.0' (TypeError: "
        "relu(): argument 'input'",
    ),
    "a forward that takes apart what a part returns": (
        "pipeline=3",
        {"model": TakesApart},
        "RecipeError: the model's forward takes the output of 'blocks.0' apart; a pipeline"
        " calls only the recipe's stages",
    ),
    "a forward that leaves out a part": (
        "pipeline=3",
        {"model": SkipsABlock},
        "RecipeError: the model's forward calls another part instead of 'blocks.0', which "
        "comes after 'embedding'; a",
    ),
    "a forward that goes past a part": (
        "pipeline=3",
        {"model": Skips},
        "RecipeError: the model's forward must call 'blocks.1' with exactly one argument, the "
        "output of 'blocks.0'; a pipeline",
    ),
    "a forward that returns more than its last part": (
        "pipeline=3",
        {"model": InADict},
        "RecipeError: the model's forward returns something other than the output of 'head'; a"
        " pipeline calls only the recipe's stages",
    ),
    "a BatchNorm in two stages": (
        "pipeline=3",
        {"model": ABatchNormTwice, "stages": None},
        "RecipeError: the stages '1' and '3' share a BatchNorm1d; its running statistics follow"
        " from all of its calls in their order, but",
    ),
    "an optimizer without the parameters of one stage": (
        "pipeline=3",
        {"optimizer": of_all_but_the_head},
        "RecipeError: the optimizer leaves out head.never.weight, head.never.bias; every"
        " trainable parameter must be in exactly one",
    ),
    "a buffer of one stage that no file can hold": (
        "pipeline=3",
        {"model": WithAWideTable},
        "RecipeError: state dict entry 'head.table' is a tensor of layout torch.strided, type"
        " torch.complex128, on device cpu; model",
    ),
    "a metric that is no number": (
        "pipeline=3",
        {
            "evaluation": ls.Evaluation(
                data=sentences(19), metrics={"all": ls.Gathered(given_back, torch.abs)}
            )
        },
        "DataError: metric 'all' computed an array of shape (19, 11); a metric is one number",
    ),
    "inputs of no form": (
        "pipeline=3",
        {"inputs": list},
        "RecipeError: Recipe.inputs returned a list of 3; the model is called with what it returns",
    ),
    "a loss that calls backward": (
        "pipeline=3",
        {"loss": with_a_backward, "weight": None},
        "LossError: after step 0: the forward or the loss has called backward, and so changed"
        " the model's gradients; they are sums over",
    ),
    "a loss that is not finite": (
        "pipeline=3",
        {"loss": infinite, "weight": None},
        "LossError: after step 0: the loss is nan in microbatch 0, computed by data rank 0 from"
        " samples",
    ),
}


def attempt(run_dir: str) -> dict[str, str]:
    found = {}
    for name, (plan, changes, _) in REFUSED.items():
        try:
            ls.train(recipe(**changes), plan=plan, run_dir=f"{run_dir}/{name}")
            found[name] = "it trained"
        except UserError as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def test_what_a_pipeline_cannot_do_is_refused_on_every_rank(
    pool: WorkerPool, tmp_path: Path
) -> None:
    for found in pool.run(3, attempt, str(tmp_path)):
        for name, (_, _, text) in REFUSED.items():
            assert found[name].startswith(text), name


def own_loop(run_dir: str, twice: bool) -> str:
    try:
        with ls.Session(run_dir=run_dir, plan="pipeline=2") as session:
            session.prepare(narrow, adamw)
            if twice:
                session.prepare(narrow, adamw)
            for step in session.steps(rows(64), global_batch=32, microbatch=8, steps=1):
                list(step.microbatches())
    except UserError as error:
        return str(error)
    return "it trained"


def of_two(run_dir: str) -> tuple[int, list[str]]:
    return stop_on_one_rank(f"{run_dir}/stop"), [
        own_loop(f"{run_dir}/{twice}", twice) for twice in (False, True)
    ]


def test_any_rank_may_stop_the_run_and_a_loop_of_ones_own_is_told_what_to_write(
    pool: WorkerPool, tmp_path: Path
) -> None:
    for steps, (once, twice) in pool.run(2, of_two, str(tmp_path)):
        assert steps == 2
        assert "call step.compute(inputs, loss)" in once
        assert "a second session.prepare with pipeline=2" in twice
