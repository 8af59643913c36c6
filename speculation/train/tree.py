"""The command that chooses the draft tree of trained Medusa heads. Needs no PyTorch."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from batching.errors import InvalidParameter
from batching.gguf.reader import GGUFFile
from speculation.heads.eagle3_file import ARCHITECTURE as EAGLE3
from speculation.heads.file import HeadsFile
from speculation.heads.medusa_file import default_tree, read_weights, write_medusa
from speculation.heads.tree import MAX_NODES, best_tree, expected_tokens, parse_choices
from speculation.system.files import require_writable
from speculation.train import TrainError
from speculation.train.ranks import accuracy_table, tree_report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--heads", type=Path, required=True, help="file of Medusa heads")
    add("--nodes", type=int, help="draft tokens (default: show a table of sizes)")
    add("--choices", help="your own tree, as paths of ranks")
    add("--out", type=Path, help="output file (default: overwrite --heads)")


def run(args: argparse.Namespace) -> None:
    only_show = args.choices is None and args.nodes is None
    if args.choices is not None and args.nodes is not None:
        raise InvalidParameter("--choices and --nodes both choose a tree; give one of them")
    if args.nodes is not None and not 1 <= args.nodes <= MAX_NODES:
        raise InvalidParameter(f"--nodes is {args.nodes}; give 1 to {MAX_NODES}")
    if only_show and args.out is not None:
        raise InvalidParameter(
            f"without a tree there is nothing to write to {args.out}; give --nodes or --choices"
        )
    out = args.out or args.heads
    if not only_show:
        require_writable(out)
    file = _medusa_file(args.heads)
    info, weights = file.info, read_weights(file)
    del file  # Windows does not replace a mapped file
    accuracy = weights.accuracy
    print(f"\n{accuracy_table(accuracy)}")
    if only_show:
        print("\ndraft tokens, expected tokens per step")
        for n in (1, 3, 7, 15, 23, 31, 47, 63):
            found = best_tree(accuracy, n)
            print(f"{len(found):6}  {expected_tokens(accuracy, found):.2f}")
        return
    if args.nodes is not None:
        tree = default_tree(accuracy, args.nodes)
    else:
        tree = parse_choices(args.choices)
    if len(tree[-1]) > weights.n_heads:
        raise TrainError(f"the tree is deeper than the {weights.n_heads} heads; shorten its paths")
    print(tree_report(accuracy, tree))
    write_medusa(out, info, dataclasses.replace(weights, tree=tree))
    print(f"written to {out}")


def _medusa_file(path: Path) -> HeadsFile:
    """Open the file. Raises HeadsError if it has no heads, TrainError if they are not Medusa's."""
    if GGUFFile(path).metadata.get("general.architecture") == EAGLE3:
        method = "eagle-3"
    else:
        file = HeadsFile(path)
        method = file.info.method
        if method == "medusa":
            return file
    raise TrainError(
        f"{path} has heads for {method}, which build their tree while drafting; give a file of "
        f"Medusa heads"
    )
