"""--compare-llama-cpp: finds the programs, loads the model, measures pairs, reports."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from batching.errors import InvalidParameter
from batching.llama.context import ContextParams
from batching.llama.library import library_folder
from speculation.bench.device import describe_device, describe_model
from speculation.bench.prompt_file import Prompt
from speculation.bench.report import counted, skipped_turns
from speculation.bench.results import Skipped
from speculation.engine import Engine
from speculation.methods import Method, parse_method
from tools.compare.libraries import compare_libraries
from tools.compare.pairs import Comparison, measure, tasks
from tools.compare.programs import PROGRAMS, Settings, find, version
from tools.compare.report import failures, table

DRAFT = "draft"

# Parameters that llama-speculative-simple has too; passed on so that both draft alike.
_DRAFT_FLAGS = {
    "draft_max": "--spec-draft-n-max",
    "depth": "--spec-draft-n-max",
    "draft_min": "--spec-draft-n-min",
    "p_min": "--spec-draft-p-min",
}
# Compared whenever what they need is loaded. As chains, since llama.cpp drafts no trees.
CHAINS = {DRAFT: DRAFT, "mtp": "mtp", "eagle-3": "eagle-3:top_k=1", "dflash": "dflash"}
_GIVEN_BY = {DRAFT: "--draft-model", "mtp": "a model that has layers for it, or --heads"}


@dataclasses.dataclass(frozen=True)
class Request:
    """What to compare; the fields correspond to the benchmark's flags."""

    folder: Path
    model: str
    methods: Sequence[Method]
    prompts: Sequence[Prompt]
    params: ContextParams
    n_predict: int
    repeat: int = 1
    raw: bool = False
    thinking: bool | None = None
    gpu_layers: int | None = None
    draft_model: str | None = None
    heads: Sequence[str] = ()
    json: Path | None = None


def compare(request: Request) -> bool:
    """Measure, print and save. Returns False after Ctrl-C, with the results so far saved.

    Raises InvalidParameter if there is nothing to compare.
    """
    choose(request.methods, request.folder, CHAINS)  # fails early, before the model is loaded
    print(f"loading {request.model}", file=sys.stderr)
    with Engine.load(
        request.model,
        request.params,
        draft_model=request.draft_model,
        heads=request.heads,
        n_gpu_layers=request.gpu_layers,
    ) as engine:
        drafts = _drafts(engine)
        comparisons, left_out = choose(request.methods, request.folder, drafts)
        context = engine.context
        todo, skipped = tasks(
            engine.model,
            request.prompts,
            raw=request.raw,
            thinking=request.thinking,
            n_ctx=context.n_ctx,
            n_predict=request.n_predict,
        )
        if not todo:
            raise InvalidParameter(
                f"none of the {len(request.prompts)} prompts leaves room for {request.n_predict} "
                f"tokens in a context of {context.n_ctx}; raise --ctx or lower --n-predict"
            )
        libraries = compare_libraries(library_folder(), request.folder)
        theirs = version(comparisons[0].file)
        print(_heading(engine, request, theirs, len(todo)))
        print(libraries.text(request.folder))
        for line in left_out:
            print(f"not compared: {line}")
        sys.stdout.flush()
        finished = True
        try:
            _measure(engine, request, todo, comparisons)
        except KeyboardInterrupt:
            print("interrupted; results so far:", file=sys.stderr)
            finished = False
        finally:
            print(f"\n{table(comparisons).text()}")
            for text in (failures(comparisons), skipped_turns(skipped)):
                if text:
                    print(text)
            if request.json is not None:
                head = {
                    "model": describe_model(engine.model),
                    "device": describe_device(engine),
                    "settings": _settings(engine, request),
                    "llama_cpp": {"version": theirs, **dataclasses.asdict(libraries)},
                }
                request.json.write_text(
                    json_text(head, comparisons, skipped, left_out), encoding="utf-8"
                )
                print(f"written to {request.json}")
    return finished


def choose(
    methods: Sequence[Method], folder: Path, drafts: Collection[str] = ()
) -> tuple[list[Comparison], list[str]]:
    """The comparisons that are possible, and the reasons for those that are not, one line each.

    ``drafts`` are the methods in ``CHAINS`` that can run; they are always compared. Raises
    InvalidParameter if nothing can be compared.
    """
    if not folder.is_dir():
        raise InvalidParameter(
            f"--compare-llama-cpp {folder} is not a folder; give the folder with llama.cpp's "
            f"programs, such as build/bin"
        )
    comparisons, left_out = [], []
    methods = list(methods)
    given = {method.name for method in methods}
    methods += [
        parse_method(text) for name, text in CHAINS.items() if name in drafts and name not in given
    ]
    for method in methods:
        program = PROGRAMS.get(method.name)
        if program is None:
            left_out.append(f"{method} (llama.cpp has no program for it)")
        elif method.name in CHAINS and method.name not in drafts:
            left_out.append(f"{method} (give {_GIVEN_BY.get(method.name, '--heads')})")
        elif getattr(method.params, "width", 1) > 1:
            left_out.append(f"{method} (llama.cpp drafts a chain, not a tree)")
        elif (file := find(program, folder)) is None:
            left_out.append(f"{method} ({folder} has no executable {program.name})")
        else:
            comparisons.append(Comparison(method, program, file, draft_flags(method)))
    if not comparisons:
        reasons = "; ".join(left_out) or "no method is given"
        raise InvalidParameter(
            f"nothing can be compared with llama.cpp: {reasons}; see docs/measure.md for what can "
            f"be compared, and how to build its programs"
        )
    return comparisons, left_out


def json_text(
    head: Mapping[str, Any],
    comparisons: Sequence[Comparison],
    skipped: Sequence[Skipped],
    left_out: Sequence[str],
) -> str:
    """The JSON: ``head``, then ``compare_llama_cpp`` with one comparison per line."""
    parts = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in head.items()]
    lines = ",\n".join(json.dumps(comparison.fields()) for comparison in comparisons)
    parts.append(f'"compare_llama_cpp": [\n{lines}\n]')
    parts.append(f'"not_compared": {json.dumps([line.split(" ", 1)[0] for line in left_out])}')
    parts.append(f'"skipped": {json.dumps([dataclasses.asdict(turn) for turn in skipped])}')
    return "{\n" + ",\n".join(parts) + "\n}\n"


def draft_flags(method: Method) -> list[str]:
    """The flags of llama-speculative-simple for the method's draft length."""
    if method.name not in CHAINS:
        return []
    known = {name: getattr(method.params, name, None) for name in _DRAFT_FLAGS}
    return [
        text
        for name, value in known.items()
        if value is not None
        for text in (_DRAFT_FLAGS[name], str(value))
    ]


def _drafts(engine: Engine) -> dict[str, Path | None]:
    """The file that drafts, by method; None if it is the model itself."""
    found: dict[str, Path | None] = {}
    if engine.draft is not None:
        found[DRAFT] = engine.draft.model.path
    for name in ("mtp", "eagle-3", "dflash"):
        head = engine.resources.heads.get(name)
        if head is not None and not getattr(head, "is_dspark", False):  # not a DFlash type there
            found[name] = None if head.model is engine.model else head.model.path
    return found


def _measure(
    engine: Engine, request: Request, todo: Sequence[Any], comparisons: Sequence[Comparison]
) -> None:
    context = engine.context
    settings = Settings(
        model=engine.model.path,
        n_ctx=context.n_ctx,
        n_threads=context.n_threads,
        kv_type=context.params.kv_type,
        flash_attn=context.flash_attn,
        n_gpu_layers=request.gpu_layers,
        drafts={name: path for name, path in _drafts(engine).items() if path is not None},
    )
    total = len(todo) * request.repeat * len(comparisons)
    live = sys.stderr.isatty()
    with tqdm(
        total=total, unit="pair", file=sys.stderr, ascii=not live, mininterval=0.1 if live else 30
    ) as bar:

        def on_pair(comparison: Comparison) -> None:
            shown = [
                f"{one.method.name} {one.ratio:.2f}" for one in comparisons if one.ratio is not None
            ]
            bar.set_postfix_str(", ".join(shown), refresh=False)
            bar.update()

        measure(
            engine,
            todo,
            comparisons,
            settings,
            n_predict=request.n_predict,
            repeat=request.repeat,
            on_pair=on_pair,
        )


def _heading(engine: Engine, request: Request, theirs: str | None, n_prompts: int) -> str:
    context = engine.context
    return (
        f"{engine.model.path.name}: {engine.model.description}, context {context.n_ctx}, "
        f"KV cache {context.params.kv_type}, flash attention "
        f"{'on' if context.flash_attn else 'off'}, threads {context.n_threads}\n"
        f"{counted(n_prompts, 'prompt')}, first turns, up to {request.n_predict} tokens each, "
        f"{request.repeat}x; llama.cpp's programs: {theirs or 'version unknown'}"
    )


def _settings(engine: Engine, request: Request) -> dict[str, Any]:
    context = engine.context
    return {
        "model": engine.model.path.name,
        "draft_model": None if engine.draft is None else engine.draft.model.path.name,
        "heads": [Path(name).name for name in request.heads] or None,
        "methods": [str(method) for method in request.methods],
        "n_predict": request.n_predict,
        "repeat": request.repeat,
        "raw": request.raw,
        "thinking": request.thinking,
        "n_ctx": context.n_ctx,
        "threads": context.n_threads,
        "gpu_layers": request.gpu_layers,
        "kv_type": context.params.kv_type,
        "flash_attn": "on" if context.flash_attn else "off",
    }
