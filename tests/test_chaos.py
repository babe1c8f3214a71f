"""A short cut of tests/chaos.py; its hundred runs are for `python tests/chaos.py`."""

from pathlib import Path

import chaos
import chaos_run
import pytest


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_runs_that_are_killed_go_on_to_the_same_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert chaos.main(["--runs", "1", "--folder", str(tmp_path)]) == 0, capsys.readouterr().out


def test_a_sample_learned_from_twice_or_never_is_found(tmp_path: Path) -> None:
    def line(start: str, what: object, value: object) -> str:
        return (
            f'["{start}", {what if isinstance(what, int) else chr(34) + str(what) + chr(34)},'
            f" {value}]\n"
        )

    samples = (list(range(128)) * 14)[: chaos_run.STEPS * 28]
    steps = [samples[at * 28 : at * 28 + 28] for at in range(chaos_run.STEPS)]
    (tmp_path / "a-1.jsonl").write_text(
        line("a", "from", 0) + "".join(line("a", at, steps[at]) for at in range(40))
    )
    (tmp_path / "b-2.jsonl").write_text(
        line("b", "from", 30) + "".join(line("b", at, steps[at]) for at in range(30, 60))
    )
    assert chaos_run.wrongly_seen(tmp_path, []) == []
    (tmp_path / "b-2.jsonl").write_text(
        line("b", "from", 30) + "".join(line("b", at, steps[at]) for at in range(31, 60))
    )
    assert len(chaos_run.wrongly_seen(tmp_path, [])) == 2
    (tmp_path / "b-2.jsonl").write_text(
        line("b", "from", 30) + "".join(line("b", at, steps[59]) for at in range(30, 60))
    )
    assert len(chaos_run.wrongly_seen(tmp_path, [])) == 1
