"""Variables of a loop over steps whose value of one step goes into the loss of a later one."""

from __future__ import annotations

import ast
import textwrap
from pathlib import Path

import pytest

from lockstep.base.loop_flow import (
    Helper,
    flow_of_loop,
    flow_of_methods,
    loop_at,
    set_anew,
)

CARRIED = {
    "running": """
        returns = []
        for environments in step.microbatches():
            total = 0
            for environment in environments:
                earned = play(environment)
                total = total - (chosen * (earned - running)).sum()
                returns.append(earned)
            step.backward(ls.Loss(total, n))
        step.commit(optimizer)
        running = 0.9 * running + 0.1 * sum(returns) / len(returns)
    """,
    "hidden": """
        for i, (x, y) in enumerate(step.microbatches()):
            output, hidden = model(x, hidden)
            hidden = hidden.detach()
            step.backward(loss(output, y))
    """,
    "self.baseline": """
        for x in step.microbatches():
            step.backward(loss(x) - self.baseline)
        self.baseline *= 0.9
    """,
    "count": """
        count += 1
        for x in step.microbatches():
            with session.autocast() as entered:
                step.backward(loss(x) * min(1, count / 100))
    """,
    "calls": """
        for x in step.microbatches():
            if calls > 14:
                found = one(x)
            else:
                found = other(x)
            calls += 1
            step.backward(found)
    """,
    "before": """
        step.compute(inputs, lambda output, batch: loss(output, batch, before))
        before = look(step)
    """,
    "base": """
        def accumulate():
            for x in step.microbatches():
                step.backward(loss(x) - base)
        step.commit(optimizer, closure=accumulate)
        base = 0.9 * base
    """,
    "history": """
        try:
            for x in step.microbatches():
                step.backward(loss(x) / sum(history))
        finally:
            history.append(session.mean(x))
    """,
    "table": """
        for x in step.microbatches():
            scale = table[0]
            step.backward(loss(x) * scale)
        table[0] = 0.5
    """,
    "drawn": """
        for x in step.microbatches():
            step.backward(loss(x) * drawn)
            log(drawn := 0.9 * drawn)
    """,
    "matched": """
        match next(kinds):
            case "first":
                matched = 0.9 * matched
        step.backward(loss(x) * matched)
    """,
    "state.ema": """
        step.backward(loss(x) * getattr(state, "ema"))
        setattr(state, "ema", 0.9 * state.ema)
    """,
    "temperature": """
        while heating(x):
            temperature += 0.1
        step.compute(inputs, loss_at(temperature))
    """,
}
NOT_CARRIED = {
    "only logged": """
        for x, y in step.microbatches():
            found = loss(model(x), y)
            step.backward(found)
            total += found.item()
        step.commit(optimizer)
        best = min(best, found.item())
        step.log({"total": total, "best": best})
        if best < 0.1:
            break
    """,
    "of the step": """
        beta = min(1, step.index / 100)
        for x in step.microbatches():
            step.backward(beta * loss(x))
    """,
    "set anew": """
        total, self.count = 0, 0
        for x in step.microbatches():
            self.count += 1
            total += loss(x) / self.count
        step.backward(total)
        kept: float = total
    """,
    "of the name of a parameter": """
        def loss_of(output, batch):
            return loss(output, batch)
        step.compute(lambda x: x[0], loss_of)
        step.compute(inputs, lambda y, *rest: sum(loss(z, y) for z in rest))
        output, batch, x, y, z, rest = look(step)
    """,
    "never changed": """
        for x in step.microbatches():
            step.backward(loss(x, self.weights, margin))
        step.commit(optimizer)
    """,
}


def loop(body: str, *, head: str = "for step in session.steps(data):") -> ast.For:
    found = loop_at(f"x = 1\n{head}\n{textwrap.indent(textwrap.dedent(body), '    ')}", 2)
    assert found is not None
    return found


@pytest.mark.parametrize("name", CARRIED)
def test_a_value_that_goes_into_a_later_loss_is_found(name: str) -> None:
    assert flow_of_loop(loop(CARRIED[name])).carried == [name]


@pytest.mark.parametrize("name", NOT_CARRIED)
def test_other_variables_are_not(name: str) -> None:
    assert flow_of_loop(loop(NOT_CARRIED[name])).carried == []


def test_a_match_with_a_wildcard_sets_a_variable_on_every_path() -> None:
    cases = "match step.index:\n    case 1: w = 1\n    case {}: w = 2\nstep.backward(loss(w))"
    assert flow_of_loop(loop(cases.format("_"))).carried == []
    assert flow_of_loop(loop(cases.format("2"))).carried == ["w"]
    assert flow_of_loop(loop(cases.format("_ if x"))).carried == ["w"]


def test_a_function_of_the_script_may_be_named_as_a_builtin() -> None:
    assert flow_of_loop(loop("setattr(step, 'a')\nstep.backward(loss)")).carried == []


def test_the_target_may_be_a_tuple() -> None:
    found = loop(
        "step.backward(loss(number, scale))\nscale *= 2",
        head="for number, step in enumerate(session.steps(data)):",
    )
    assert flow_of_loop(found).carried == ["scale"]


def test_the_loop_is_found_by_its_line() -> None:
    source = "for a in b:\n    for c in (\n        d\n    ):\n        pass\n"
    found = [loop_at(source, line) for line in range(1, 7)]
    assert [each and ast.unparse(each.target) for each in found] == ["a", "c", "c", "c", None, None]
    assert loop_at("for a in", 1) is None
    assert loop_at("for a in b: f(a)", 1) is not None


def test_loops_of_the_examples_are_right() -> None:
    """`rollouts` is a module that the loop includes: the hook does not count those."""
    names = set()
    for file in Path(__file__).parents[2].glob("examples/**/*.py"):
        for each in ast.walk(ast.parse(file.read_text())):
            if isinstance(each, ast.For) and ".steps(" in ast.unparse(each.iter):
                names |= set(flow_of_loop(each).carried)
    assert names == {"rollouts.rows"}


def test_what_each_step_sets_before_it_reads_it_is_set_anew() -> None:
    found = loop("""
        total.zero_()
        buffer[:] = step.index
        seen[0] = 1
        for x in step.microbatches():
            step.backward(loss(x))
            scratch.copy_(x)
            total += scratch.sum() + buffer.sum()
            running.add_(1)
            kept.lerp_(x, 0.1)
        if step.index == 3:
            sometimes.fill_(0)
        print(total, sometimes)
    """)
    assert set_anew(found) == {"total", "buffer", "scratch", "step", "x"}


POOL = """
    class Pool:
        def __init__(self, size):
            self.size, self.images = size, []
            self.images.append(None)

        def query(self, image):
            self.calls += 1
            self.put(image)
            self.shown.append(image)
            if len(self.images) < self.size:
                return image
            chosen = self.images[0]
            return self.blend(chosen)

        def put(self, image):
            self.images.append(image)

        def blend(self, image):
            self.last = image.mean()
            return image * self.factor

        def anneal(self, step):
            self.factor, self.ratio = 1 / step, 0.9 * self.ratio
            self.table = self.table if step else step

        def shown_mean(self):
            return sum(self.shown)
    """
PENALTY = """
    class Penalty:
        @torch.enable_grad()
        def add(self, lengths):
            mean = self.mean.lerp(lengths.mean(), 0.1)
            self.mean.copy_(mean.detach())
            (lengths - mean).square().mean().backward()
    """

FEATURES = """
    class Features:
        def hook(self, name):
            def keep(module, inputs, output):
                self.outputs[name] = output
                self.latest.append(output)
                self.counts[name] += 1
            return keep

        def __call__(self, x):
            self.latest.clear()
            self.model(x)
            return self.outputs, self.latest, self.counts
    """


@pytest.mark.parametrize(
    ("sources", "names", "expected"),
    [
        ([FEATURES], set(), {"outputs": True, "counts": False}),
        ([POOL], {"query"}, {"images": False}),
        ([POOL], {"shown_mean"}, {"shown": False}),
        ([POOL], {"ratio"}, {"ratio": False}),
        ([POOL], {"factor", "last", "size"}, {}),
        ([PENALTY], {"add"}, {"mean": False}),
        (["class Own(Pool):\n    def query(self, x):\n        return x", POOL], {"query"}, {}),
        (
            ["class Loss:\n    def __call__(self, x):\n        self.n += x\n        return self.n"],
            set(),
            {"n": False},
        ),
        (["lambda: 0", "class"], {"query"}, {}),
    ],
)
def test_the_attributes_that_methods_keep_and_return_are_found(
    sources: list[str], names: set[str], expected: dict[str, bool]
) -> None:
    assert flow_of_methods(map(textwrap.dedent, sources), names).kept == expected


def test_what_the_loss_uses_need_not_be_changed_by_the_loop() -> None:
    body = "scale = 1\nstep.backward(pool.query(model(x)) * scale)\nlog(history)"
    assert flow_of_loop(loop(body)).used == ["model", "pool", "pool.query", "x"]


def test_a_method_that_was_called_before_hides_no_other_that_the_loss_uses() -> None:
    body = "statistics.update(x)\nstep.backward(statistics.scaled(y))"
    used = ["statistics", "statistics.scaled", "statistics.update", "x", "y"]
    assert flow_of_loop(loop(body)).used == used


@pytest.mark.parametrize("method", ["clear", "reset"])
def test_what_is_emptied_carries_nothing(method: str) -> None:
    body = f"episodes.{method}()\nepisodes.add(x)\nstep.backward(episodes.mean())"
    assert flow_of_loop(loop(body)).carried == []
    assert flow_of_loop(loop(body)).used == ["x"]
    later = f"if x:\n    episodes.{method}()\nepisodes.add(x)\nstep.backward(episodes.mean())"
    assert flow_of_loop(loop(later)).carried == ["episodes"]
    assert "episodes" not in set_anew(loop(body))


def helper_of(source: str, *, is_method: bool = False) -> Helper:
    code = ast.parse(textwrap.dedent(source)).body[0]
    assert isinstance(code, ast.FunctionDef)
    return Helper(code, is_method)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("n = len(x); buffer[:n] = x; step.backward(model(buffer[:n]))", []),
        ("buffer[:len(x)] = x; step.backward(model(buffer[:len(x)]))", []),
        ("self.buffer[:n] = x; step.backward(model(self.buffer[:n]))", []),
        ("buffer[:n] = x; step.backward(model(buffer))", ["buffer"]),
        ("buffer[:n] = x; n = 2; step.backward(model(buffer[:n]))", ["buffer", "n"]),
        ("buffer[:n] = x; buffer.add_(1); step.backward(buffer[:n])", ["buffer"]),
        ("buffer[:n] += x; step.backward(model(buffer[:n]))", ["buffer"]),
        ("buffer[next(k)] = x; step.backward(buffer[next(k)])", ["buffer"]),
        ("if n: buffer[:n] = x\nstep.backward(buffer[:n])", ["buffer"]),
        ("buffer['x'], buffer['y'] = x, y; step.backward(buffer['x'] + buffer['y'])", []),
        ("buffer[-1], buffer[1] = x, y; step.backward(buffer[-1] + buffer[1])", ["buffer"]),
        ("buffer['x'], buffer[n] = x, y; step.backward(buffer['x'])", ["buffer"]),
    ],
)
def test_a_buffer_that_is_overwritten_before_it_is_read(body: str, expected: list[str]) -> None:
    assert flow_of_loop(loop(body)).carried == expected
    assert ("buffer" in set_anew(loop(body))) == (not expected and "self" not in body)


@pytest.mark.parametrize(
    ("body", "uses"),
    [
        ("env.reset(); step.backward(model(env.step(1)))", False),
        ("x = env.reset(); step.backward(model(x, env.step(1)))", False),
        ("(x, _), done = env.reset(), 0; step.backward(model(x, env.step(1)))", False),
        ("x = env.reset() if done else x; step.backward(model(x, env.step(1)))", False),
        ("x = env.reset() if done else env.x; step.backward(model(x))", True),
        ("x = env.step(0); step.backward(model(x))", True),
        ("if done: x = env.reset()\nstep.backward(model(env.step(1)))", True),
        (
            "done = True\nfor _ in range(3):\n    if done: x = env.reset()\n"
            "    x, done = env.step(x)\nstep.backward(x)",
            False,
        ),
        (
            "done = True\nfor _ in range(3):\n    x, done = env.step(x)\n"
            "    if done: x = env.reset()\nstep.backward(x)",
            True,
        ),
    ],
)
def test_an_environment_that_is_reset_in_an_expression(body: str, *, uses: bool) -> None:
    assert ("env" in flow_of_loop(loop(body)).used) == uses


CRITERION = """
class Criterion:
    def __call__(self, output):
        loss = output.mean() * (1 + self.scale)
        self.running = 0.9 * self.running + 0.1 * output.mean()
        self.scale = 0.9 * self.scale + 0.1 * loss.item()
        return loss, self.running

    def both(self, output):
        loss, running = self(output)
        return loss + running, 0
"""


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("loss, logs = criterion(x); step.backward(loss)", ["scale"]),
        ("logs, loss = criterion(x); step.backward(loss)", ["running"]),
        ("loss, logs = criterion(x); step.backward(loss + logs)", ["running", "scale"]),
        ("loss = criterion(x)[0]; step.backward(loss)", ["running", "scale"]),
        ("loss, *logs = criterion(x); step.backward(loss)", ["running", "scale"]),
        ("loss, logs = criterion.both(x); step.backward(loss)", ["running", "scale"]),
    ],
)
def test_an_item_of_what_an_object_returns(body: str, expected: list[str]) -> None:
    used = flow_of_loop(loop(body)).used
    names = {
        each.removeprefix("criterion").removeprefix(".")
        for each in used
        if each.startswith("criterion")
    }
    assert sorted(flow_of_methods([CRITERION], names).kept) == expected


STATS = """
class Stats:
    def update(self, x):
        self.calls.value = self.calls.value + 1
        self.ema.value = 0.9 * self.ema.value + 0.1 * x
        self.other.update(x)

    def scaled(self, loss):
        return loss * self.ema.value + self.other.mean

    def given(self, loss):
        return product(loss, self.ema)
"""


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("scaled", ["ema.value", "other"]),
        ("given", ["ema.value"]),
        ("ema.value", ["ema.value"]),
        ("calls", ["calls.value"]),
        ("update", []),
    ],
)
def test_an_attribute_of_an_object_of_an_object(name: str, expected: list[str]) -> None:
    assert sorted(flow_of_methods([STATS], {name}).kept) == expected
    assert "other.mean" in flow_of_methods([STATS], {"scaled"}).used


@pytest.mark.parametrize(
    ("body", "helper", "expected"),
    [
        (
            "one(step, state)",
            "def one(s, own): s.backward(own['mean']); own['mean'] = 1",
            ["state"],
        ),
        ("one(step, log)", "def one(s, own): s.backward(f(1)); own.append(1)", []),
        ("mean = one(step, mean)", "def one(s, x):\n    s.backward(x)\n    return x", ["mean"]),
        (
            "one(mean=self.mean, s=step)",
            "def one(s, mean): s.backward(mean.x); mean.x = 1",
            ["self.mean.x"],
        ),
        ("one(step)", "def one(s):\n    global m\n    s.backward(m)\n    m = 1", ["m"]),
        ("m = one(step)", "def one(s):\n    m = 1\n    s.backward(m)\n    return m", []),
        ("one(other); m = 1", "def one(s): s.backward(m)", []),
        ("one(step); m = 1", "def one(s, m=2): s.backward(m)", []),
        ("one(step); m = 1", "def one(s, *m): s.backward(m)", []),
    ],
)
def test_a_helper_that_gets_the_step(body: str, helper: str, expected: list[str]) -> None:
    assert flow_of_loop(loop(body), {"one": helper_of(helper)}).carried == expected


def test_a_method_that_gets_the_step_passes_it_on() -> None:
    one = helper_of("def one(self, s): self.two(s, self.mean)", is_method=True)
    one.helpers["self.two"] = helper_of(
        "def two(self, s, x): s.backward(x); self.mean = 1", is_method=True
    )
    assert flow_of_loop(loop("own.one(step)"), {"own.one": one}).carried == ["own.mean"]
    one.code.name = "__call__"
    assert flow_of_loop(loop("own(step)"), {"own": one}).carried == ["own.mean"]


@pytest.mark.parametrize(
    ("body", "helper", "expected"),
    [
        (
            "step.backward(one(m, x))",
            "def one(m, x):\n    m.x = 0.9 * m.x\n    return m.x",
            ["m.x"],
        ),
        ("one(m, x); step.backward(m.x)", "def one(m, x): m.x = 0.9 * m.x", ["m.x"]),
        ("one(m['x'], 1); step.backward(m['x'])", "def one(m, x): m.append(x)", ["m"]),
        ("m = one(m); step.backward(m)", "def one(x): return x + 1", ["m"]),
        ("step.compute(inputs, one)", "def one(x):\n    global m\n    m += x\n    return m", ["m"]),
        ("step.backward(one(*m)); m += 1", "def one(x, *, y): return y", ["m"]),
        ("step.backward(one(x, m)); m += 1", "def one(x, *y): return y", ["m"]),
        (
            "step.backward(one(3, m)); m += 1",
            "def one(n, x): return one(n - 1, x) if n else x",
            ["m"],
        ),
        ("one(m, x); step.backward(m.x)", "def one(m, x): m.x = x", []),
        ("one(m); step.backward(m.x)", "def one(m): m.reset()", []),
        ("one(m); step.backward(m.x)", "def one(m):\n    m = m.first\n    m.reset()", ["m"]),
        ("step.backward(one(m, x))", "def one(m, x):\n    m.append(x)\n    return x", []),
        ("loss, m.x = one(m, x); step.backward(loss)", "def one(m, x): return x, 0.9 * m.x", []),
        (
            "d = one(m, x); step.backward(d['x'])",
            "def one(m, x): m.n += 1; return {'x': x, 'n': m.n}",
            [],
        ),
        (
            "d = one(m, x); step.backward(d['x'])",
            "def one(m, x):\n    m.n += 1; d = {'x': x}\n    d['n'] = m.n\n    return d",
            [],
        ),
        (
            "d = one(m, x); step.backward(d['n'])",
            "def one(m, x):\n    m.n += 1; d = {'x': x}\n    d['n'] = m.n\n    return d",
            ["m.n"],
        ),
        (
            "d = one(m, x); step.backward(sum(d))",
            "def one(m, x): m.n += 1; return {'x': x, 'n': m.n}",
            ["m.n"],
        ),
        (
            "d = one(m, x); step.backward(d['x'])",
            "def one(m, x):\n    m.n += 1; d = {'x': x}\n    d[x] = m.n\n    return d",
            ["m.n"],
        ),
        ("d = one(m, x); step.backward(d.x)", "def one(m, x): m.n += 1; return Out(x, m.n)", []),
        ("step.backward(one(m))", "def one(m): m.n += 1; return F.mean(m.n)", ["m.n"]),
        ("d = one(m); step.backward(d.x); m += 1", "def one(m): return Out(m)", ["m"]),
        ("m, n = n, m + 1; step.backward(m)", "def one(): pass", ["n"]),
        ("m = one(x); step.backward(m)", "def one(x): return m(x)", []),
        ("m['x'] = x; step.backward(one(m['x']))", "def one(x): return x", []),
        (f"step.backward({'one(' * 30}m{')' * 30})", "def one(x): return x + x.n", []),
        (f"step.backward({'one(' * 30}m{')' * 30})", "def one(x): return x.n + x.m + x", []),
    ],
)
def test_a_function_of_the_script(body: str, helper: str, expected: list[str]) -> None:
    own = {"loss", "m"} if "def one(x): return m(x)" in helper else set[str]()
    assert flow_of_loop(loop(body), {"one": helper_of(helper)}, own).carried == expected
