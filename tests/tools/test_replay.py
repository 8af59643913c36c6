"""The replay tool: what is recorded, and that a replay takes the steps of a real run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from speculation.drafting.cost import Cost, CostCurve
from speculation.engine import Engine
from speculation.methods import parse_method
from tests.support.exact import EXACT
from tools.replay import recording
from tools.replay.__main__ import main
from tools.replay.play import Replay


@pytest.fixture(scope="module")
def recorded(tiny_model: Path, tiny_draft: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("replay")
    prompts = [{"prompt": text, "category": "words"} for text in ("abc abc", "hello")]
    file = folder / "prompts.jsonl"
    file.write_text("\n".join(map(json.dumps, prompts)), encoding="utf-8")
    out = folder / "tiny.jsonl.gz"
    models = ["--model", str(tiny_model), "--draft-model", str(tiny_draft), "--ctx", "256"]
    flags = ["--prompts", str(file), "--raw", "--n-predict", "40", "--threads", "1"]
    assert main(["record", *models, *flags, "--out", str(out)]) == 0
    return out


def test_a_recording_has_successors_and_draft_trees_at_every_place(recorded: Path) -> None:
    header, texts = recording.read(recorded)
    assert header.draft_seconds and min(header.draft_seconds) > 0
    assert [text.category for text in texts] == ["words", "words"]
    for text in texts:
        assert len(text.reply) == len(text.successors) == len(text.drafts) == 40
        assert [successors[0][0] for successors in text.successors] == text.reply
        for draft in text.drafts:
            assert draft[0][0] == -1
            assert all(parent < node for node, (parent, _, _) in enumerate(draft))


def test_a_replay_takes_the_steps_of_a_real_run(
    recorded: Path, tiny_model: Path, tiny_draft: Path
) -> None:
    header, texts = recording.read(recorded)
    cost = CostCurve.linear(1.0, 0.016)
    replay = Replay(header, lambda: Cost(cost))
    with Engine.load(tiny_model, EXACT, draft_model=tiny_draft) as engine:
        for method in ("ar", "prompt-lookup", "suffix", "draft", "draft:width=3"):
            engine.resources.kept.objects.clear()
            engine.resources.saved.clear()
            engine.resources.memory.clear()
            engine.resources.kept.cost = Cost(cost)
            steps = []
            for text in texts:
                settings = {"method": parse_method(method), "max_tokens": 40}
                generation = engine.generate(text.prompt, **settings).run()  # type: ignore[arg-type]
                assert generation.token_ids == text.reply
                steps.append(generation.stats.n_steps)
            assert [run.stats.n_steps for run in replay.run(method, texts)[0]] == steps


def test_texts_together_share_decodes_and_cost_what_the_curve_says_without_noise(
    recorded: Path,
) -> None:
    header, texts = recording.read(recorded)
    (first, _), _ = Replay(header, lambda: Cost(CostCurve((1,), (1.0,)))).run("ar", texts)
    assert first.stats.n_tokens == 40
    assert first.stats.decode_seconds == pytest.approx(39 * (1.0 + 12e-6))
    header, texts = recording.read(recorded)
    runs, machine = Replay(header, lambda: Cost(CostCurve.linear(1.0, 0.5))).run("ar", texts, 2)
    assert [len(run.tokens) for run in runs] == [40, 40]
    assert (machine.n_steps, machine.n_rows) == (40, 80)
    assert 40 * 1.5 < machine.now < 40 * 1.5 + 0.1
    header, texts = recording.read(recorded)
    replay = Replay(header, lambda: Cost(CostCurve((1,), (1.0,))), noise=0.2, hiccups=0.1)
    (first, _), machine = replay.run("ar", texts)
    assert first.stats.decode_seconds == pytest.approx(39 * (1.0 + 12e-6))
    assert machine.excess > 1.0


def test_results_are_shown_by_kind_of_text_and_bad_input_is_refused(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["play", str(recorded), "--costs", "10:0.1", "--methods", "auto", "draft"]) == 0
    shown = capsys.readouterr().out
    assert "cost 10:0.1, 2 texts" in shown
    assert [line.split()[0] for line in shown.splitlines()[3:]] == ["words", "all", "lowest"]
    assert main(["play", str(recorded), "--methods", "lookahead"]) == 2
    assert "method lookahead cannot be replayed; give one of" in capsys.readouterr().err
    (tmp_path / "no.gz").write_text("no")
    assert main(["play", str(tmp_path / "no.gz")]) == 2
    assert "no.gz is not a recording" in capsys.readouterr().err
