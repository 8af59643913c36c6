"""Finds the programs, loads the model, measures pairs, reports."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from batching.errors import InvalidParameter
from batching.llama.library import library_folder
from speculation.bench.device import describe_context, describe_device, describe_model
from speculation.bench.json_file import write_document
from speculation.bench.options import RunOptions
from speculation.bench.progress import bar
from speculation.bench.report import counted, skipped_turns
from speculation.drafter import Method
from speculation.engine import Engine
from speculation.heads.dflash import DFlashHead
from speculation.methods import parse_method
from tools.compare.pairs import Comparison, Task, measure, tasks
from tools.compare.programs import PROGRAMS, Settings, find, unlike_libraries, version
from tools.compare.report import failures, table

DRAFT = "draft"

# Parameters that llama-speculative-simple has too; passed on so that both draft alike.
_DRAFT_FLAGS = {
    "draft_max": "--spec-draft-n-max",
    "depth": "--spec-draft-n-max",
    "p_min": "--spec-draft-p-min",
}
# Compared whenever what they need is loaded. As chains, since llama.cpp drafts no trees.
CHAINS = {DRAFT: DRAFT, "mtp": "mtp", "eagle-3": "eagle-3:top_k=1", "dflash": "dflash"}
_GIVEN_BY = {DRAFT: "--draft-model", "mtp": "a model that has layers for it, or --heads"}


@dataclasses.dataclass(frozen=True)
class Options(RunOptions):
    """The flags of a comparison, and the folder of llama.cpp's programs."""

    folder: Path


def compare(options: Options) -> bool:
    """Measure, print and save. Returns False after Ctrl-C, with the results so far saved.

    Raises InvalidParameter if there is nothing to compare.
    """
    choose(options.methods, options.folder, CHAINS)  # fails early, before the model is loaded
    prompts = options.read_prompts()
    print(f"loading {options.model}", file=sys.stderr)
    with Engine.load(
        options.model,
        options.context_params(),
        draft_model=options.draft_model,
        heads=options.heads,
        n_gpu_layers=options.gpu_layers,
    ) as engine:
        drafts = _drafts(engine)
        comparisons, left_out = choose(options.methods, options.folder, drafts)
        todo, skipped = tasks(
            engine.model,
            prompts,
            raw=options.raw,
            thinking=options.thinking,
            n_ctx=engine.context.n_ctx,
            n_predict=options.n_predict,
        )
        if not todo:
            raise InvalidParameter(
                f"none of the {len(prompts)} prompts leaves room for {options.n_predict} "
                f"tokens in a context of {engine.context.n_ctx}; raise --ctx or lower --n-predict"
            )
        unlike = unlike_libraries(library_folder(), options.folder)
        theirs = version(comparisons[0].file)
        print(describe_context(engine))
        print(
            f"{counted(len(todo), 'prompt')}, first turns, up to {options.n_predict} tokens each, "
            f"{options.repeat}x; llama.cpp's programs: {theirs or 'version unknown'}"
        )
        print(libraries_line(unlike, options.folder))
        for line in left_out:
            print(f"not compared: {line}")
        sys.stdout.flush()
        finished = True
        try:
            _measure(engine, options, todo, comparisons, drafts)
        except KeyboardInterrupt:
            print("interrupted; results so far:", file=sys.stderr)
            finished = False
        finally:
            print(f"\n{table(comparisons).text()}")
            for text in (failures(comparisons), skipped_turns(skipped)):
                if text:
                    print(text)
            if options.json is not None:
                head = {
                    "model": describe_model(engine),
                    "device": describe_device(engine),
                    "settings": options.settings(engine),
                    "llama_cpp": {"version": theirs, "unlike": unlike},
                    "not_compared": [line.split(" ", 1)[0] for line in left_out],
                }
                lists = {
                    "compare_llama_cpp": [comparison.fields() for comparison in comparisons],
                    "skipped": [dataclasses.asdict(turn) for turn in skipped],
                }
                write_document(options.json, head, lists)
                print(f"written to {options.json}")
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
            f"{folder} is not a folder; give that of llama.cpp's programs, such as build/bin"
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
        elif _drafts_tree(method):
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


def libraries_line(unlike: Sequence[str] | None, folder: Path) -> str:
    """Whether the programs in ``folder`` run the same build of llama.cpp as we do."""
    if unlike is None:
        return (
            f"libraries: none next to the programs in {folder}; llama.cpp is linked statically, so "
            f"its build cannot be compared with ours"
        )
    if unlike:
        return (
            f"libraries: NOT the same build ({', '.join(unlike)} differ), which affects the "
            f"ratios; to use theirs for both sides, set LLAMA_CPP_LIB_PATH={folder}"
        )
    return "libraries: identical on both sides"


def draft_flags(method: Method) -> list[str]:
    """The flags of llama-speculative-simple for the method's draft length."""
    if method.name not in CHAINS:
        return []
    params = dataclasses.asdict(method.params)
    return [
        text
        for name, flag in _DRAFT_FLAGS.items()
        if name in params
        for text in (flag, str(params[name]))
    ]


def _drafts_tree(method: Method) -> bool:
    params = dataclasses.asdict(method.params)
    return any(params.get(name, 1) > 1 for name in ("width", "top_k"))


def _drafts(engine: Engine) -> dict[str, Path | None]:
    """The file that drafts, by method; None if it is the model itself."""
    found: dict[str, Path | None] = {}
    if engine.draft is not None:
        found[DRAFT] = engine.draft.model.path
    for name in ("mtp", "eagle-3", "dflash"):
        head = engine.resources.heads.get(name)
        is_dspark = isinstance(head, DFlashHead) and head.is_dspark  # no DFlash for llama.cpp
        if head is not None and not is_dspark:
            found[name] = None if head.model is engine.model else head.model.path
    return found


def _measure(
    engine: Engine,
    options: Options,
    todo: Sequence[Task],
    comparisons: Sequence[Comparison],
    drafts: Mapping[str, Path | None],
) -> None:
    context = engine.context
    settings = Settings(
        model=engine.model.path,
        n_ctx=context.n_ctx,
        n_threads=context.n_threads,
        kv_type=context.params.kv_type,
        flash_attn=context.flash_attn,
        n_gpu_layers=options.gpu_layers,
        drafts={name: path for name, path in drafts.items() if path is not None},
    )
    with bar(len(todo) * options.repeat * len(comparisons), "pair") as progress:
        for _ in measure(engine, todo, comparisons, settings, options.n_predict, options.repeat):
            shown = [
                f"{one.method.name} {one.ratio:.2f}" for one in comparisons if one.ratio is not None
            ]
            progress.set_postfix_str(", ".join(shown), refresh=False)
            progress.update()
