"""The command that chooses the draft tree of trained Medusa heads."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path

from batching.errors import InvalidParameter
from batching.gguf.reader import GGUFFile
from batching.tree import Floats
from speculation.heads.eagle3_file import ARCHITECTURE as EAGLE3
from speculation.heads.file import HeadsFile
from speculation.heads.medusa_file import default_tree, read_weights, write_medusa
from speculation.heads.tree import (
    MAX_NODES,
    best_tree,
    expected_tokens,
    parse_choices,
    show_choices,
)
from speculation.system.files import require_writable
from speculation.train import TrainError
from speculation.train.commands.shared import Command, show_accuracy


def show_tree(accuracy: Floats, tree: Sequence[tuple[int, ...]]) -> None:
    print(
        f"\nthe tree has {len(tree)} draft tokens; expected tokens per step: "
        f"{expected_tokens(accuracy, tree):.2f}; paths: {show_choices(tree)}"
    )


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--heads", type=Path, required=True, help="file of Medusa heads")
    parser.add_argument("--nodes", type=int, help="draft tokens (default: show a table of sizes)")
    parser.add_argument("--choices", help="your own tree, as paths of ranks")
    parser.add_argument("--out", type=Path, help="output file (default: overwrite --heads)")


def _run(args: argparse.Namespace) -> None:
    only_show = args.choices is None and args.nodes is None
    if args.choices is not None and args.nodes is not None:
        raise InvalidParameter("--choices and --nodes both choose a tree; give one of them")
    if args.nodes is not None and not 1 <= args.nodes <= MAX_NODES:
        raise InvalidParameter(f"--nodes is {args.nodes}; give 1 to {MAX_NODES}")
    if only_show and args.out is not None:
        raise InvalidParameter(
            f"without a tree there is nothing to write to {args.out}; give --nodes or --choices"
        )
    if GGUFFile(args.heads).metadata.get("general.architecture") == EAGLE3:
        raise _without_tree(args.heads, "eagle-3")
    file = HeadsFile(args.heads)
    out = args.out or args.heads
    if not only_show:
        require_writable(out)
    if file.info.method != "medusa":
        raise _without_tree(args.heads, file.info.method)
    info, weights = file.info, read_weights(file)
    del file  # Windows does not replace a mapped file
    show_accuracy(weights.accuracy)
    if only_show:
        print("\ndraft tokens, expected tokens per step")
        for n in (1, 3, 7, 15, 23, 31, 47, 63):
            found = best_tree(weights.accuracy, n)
            print(f"{len(found):6}  {expected_tokens(weights.accuracy, found):.2f}")
        return
    tree = (
        default_tree(weights.accuracy, args.nodes)
        if args.choices is None
        else parse_choices(args.choices)
    )
    if len(tree[-1]) > weights.n_heads:
        raise TrainError(f"the tree is deeper than the {weights.n_heads} heads; shorten its paths")
    show_tree(weights.accuracy, tree)
    write_medusa(out, info, dataclasses.replace(weights, tree=tree))
    print(f"written to {out}")


def _without_tree(heads: Path, method: str) -> TrainError:
    return TrainError(
        f"{heads} has heads for {method}, which build their tree while drafting; give a file of "
        f"Medusa heads"
    )


command = Command("tree", "choose the draft tree of trained Medusa heads", _add_arguments, _run)
