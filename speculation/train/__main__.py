"""``python -m speculation.train``: trains drafting heads for a model on your texts."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar

import numpy as np

from batching.errors import InvalidParameter, SpeculationError
from batching.gguf.reader import GGUFFile, fingerprint
from batching.llama.context import ContextParams
from batching.llama.model import Model
from batching.llama.private_api import check_layer_inputs
from batching.llama.weights import Weights
from batching.tree import Floats
from speculation.engine import Engine
from speculation.heads.eagle3_file import ARCHITECTURE as EAGLE3
from speculation.heads.eagle_file import write_eagle
from speculation.heads.file import HeadsFile, HeadsInfo, target_output
from speculation.heads.medusa_file import (
    default_tree,
    read_weights,
    write_medusa,
)
from speculation.heads.redrafter_file import write_redrafter
from speculation.heads.tree import (
    MAX_NODES,
    best_tree,
    expected_tokens,
    parse_choices,
    show_choices,
)
from speculation.methods import parameter_docs
from speculation.registry import BUNDLED_MODEL, resolve
from speculation.system.console import replace_unencodable, worded
from speculation.system.files import digest, require_other, require_writable
from speculation.train import TrainError, require_packages, states
from speculation.train.eagle import EagleTraining, default_layers, shape_for, train_eagle
from speculation.train.eagle3_file import write_eagle3
from speculation.train.medusa import MedusaTraining, train
from speculation.train.redrafter import ReDrafterTraining, train_redrafter
from speculation.train.texts import generate_replies, read_texts

OK, FAILED, INTERRUPTED = 0, 2, 130
T = TypeVar("T")

DESCRIPTION = """\
Train drafting heads for a GGUF model, and choose their draft tree. See docs/training.md.

The target reads the data; its hidden states and choices are stored in a folder. Heads are trained
on them and evaluated on held-out texts. Ctrl-C while it reads loses nothing: run the same command
again to resume. The model's own replies are the best data: give prompts and --generate.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand; return the exit code. Errors end with one line on stderr."""
    replace_unencodable()
    args = _parser().parse_args(arguments)
    try:
        args.run(args)
    except (SpeculationError, OSError, UnicodeDecodeError) as error:
        print(f"error: {worded(error)}", file=sys.stderr)
        return FAILED
    except (MemoryError, RuntimeError) as error:  # PyTorch raises RuntimeError when out of memory
        if not isinstance(error, MemoryError) and "memory" not in str(error):
            raise
        print(
            "error: out of memory in a training step; lower --batch or give --vocab; the "
            "collected states are kept",
            file=sys.stderr,
        )
        return FAILED
    except KeyboardInterrupt:
        print("interrupted; run the same command again to resume", file=sys.stderr)
        return INTERRUPTED
    return OK


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m speculation.train",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    medusa = commands.add_parser("medusa", help="train Medusa heads", allow_abbrev=False)
    _add_data(medusa)
    _add_params(medusa, MedusaTraining)
    medusa.set_defaults(run=_medusa)
    redrafter = commands.add_parser("redrafter", help="train a ReDrafter head", allow_abbrev=False)
    _add_data(redrafter)
    _add_params(redrafter, ReDrafterTraining)
    redrafter.set_defaults(run=_redrafter)
    eagle = commands.add_parser("eagle", help="train an EAGLE head", allow_abbrev=False)
    _add_data(eagle)
    eagle.add_argument(
        "--eagle3",
        action="store_true",
        help="train an EAGLE-3 head, which reads three layers (default: for EAGLE-1 and -2)",
    )
    eagle.add_argument(
        "--layers",
        nargs=3,
        type=int,
        help="the three layers for --eagle3, counted from 0 (default: 2, n/2 and n-3 of n)",
    )
    _add_params(eagle, EagleTraining)
    eagle.set_defaults(run=_eagle)
    tree = commands.add_parser("tree", help="choose the draft tree of trained Medusa heads")
    tree.add_argument("--heads", type=Path, required=True, help="file of Medusa heads")
    tree.add_argument("--nodes", type=int, help="draft tokens (default: show a table of sizes)")
    tree.add_argument("--choices", help="your own tree, as paths of ranks")
    tree.add_argument("--out", type=Path, help="output file (default: overwrite --heads)")
    tree.set_defaults(run=_tree)
    return parser


def _add_params(parser: argparse.ArgumentParser, params: type[Any]) -> None:
    docs = parameter_docs(params)
    for field in dataclasses.fields(params):
        parser.add_argument(
            f"--{field.name.replace('_', '-')}",
            type=type(field.default),
            default=field.default,
            help=f"{docs[field.name]} ({field.default})".strip(),
        )


def _params(args: argparse.Namespace, kind: type[T]) -> T:
    """The training parameters from the flags. Checks all it can before a model is loaded."""
    require_packages()
    names = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
    params = kind(**{name: getattr(args, name) for name in names})
    for name, least in (("generate", 0), ("max_tokens", 1)):
        if getattr(args, name) < least:
            raise InvalidParameter(
                f"--{name.replace('_', '-')} is {getattr(args, name)}; give {least} or more"
            )
    require_other(args.out, args.data)
    require_writable(args.out)
    _chosen(args.device)
    return params


def _load(args: argparse.Namespace) -> Engine:
    path = resolve(args.model)
    require_other(args.out, [path])
    return Engine.load(
        path,
        ContextParams(n_ctx=args.ctx, n_threads=args.threads),
        mtp=False,
        n_gpu_layers=args.gpu_layers,
    )


def _device(args: argparse.Namespace) -> str:
    import torch

    if args.threads:
        torch.set_num_threads(args.threads)
    return _chosen(args.device)


def _chosen(device: str | None) -> str:
    """The PyTorch device to train on. Raises InvalidParameter if there is no such device."""
    import torch

    available = ["cpu"]
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if found is not None:
        numbers = range(torch.accelerator.device_count())
        available += [found.type, *(f"{found.type}:{number}" for number in numbers)]
    if device is None:
        return "cuda" if "cuda" in available else "cpu"
    if device not in available:
        raise InvalidParameter(f"--device is {device!r}; PyTorch has {', '.join(available)} here")
    return device


def _add_data(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", default=BUNDLED_MODEL, help="target model: a GGUF or a name in models.txt")
    add("--data", nargs="+", type=Path, required=True, help="files of texts, chats or prompts")
    add("--out", type=Path, required=True, help="file to write the heads to")
    add("--work", type=Path, help="folder for the collected states (default: OUT.states)")
    add(
        "--generate",
        type=int,
        default=0,
        metavar="N",
        help="have the target reply to each prompt with up to N tokens (default: use data as is)",
    )
    add("--max-tokens", type=int, default=1_000_000, help="tokens to read in all (1000000)")
    add("--ctx", type=int, default=512, help="tokens per sequence (512)")
    add("--threads", type=int, help="CPU threads (default: one per physical core)")
    add("--gpu-layers", type=int, help="layers to offload to the GPU, if any (default: all)")
    add("--device", help="PyTorch device, such as cpu or cuda (default: cuda if available)")


def _medusa(args: argparse.Namespace) -> None:
    params = _params(args, MedusaTraining)
    with _load(args) as engine:
        path = engine.model.path
        info = HeadsInfo.of_target("medusa", engine.model)
        output = target_output(path, info.n_vocab, info.n_embd)
        collected = _collect(args, engine, path)
    device = _device(args)
    print(f"training {params.heads} heads on {len(collected):,} states ({device})", flush=True)
    with _Progress("step") as progress:
        trained = train(collected, output, params, device, progress.loss)
    weights = trained.weights
    write_medusa(args.out, info, weights)
    print(f"\nmeasured on {trained.n_held_out:,} held-out states")
    _show_accuracy(weights.accuracy)
    _show_tree(weights.accuracy, weights.tree)
    print(f"simulated on the held-out texts: {trained.tokens_per_step:.2f} tokens per step")
    print(f"\n{args.out}: {args.out.stat().st_size / 1e6:.2f} MB")


def _redrafter(args: argparse.Namespace) -> None:
    params = _params(args, ReDrafterTraining)
    with _load(args) as engine:
        path = engine.model.path
        info = HeadsInfo.of_target("redrafter", engine.model)
        output = target_output(path, info.n_vocab, info.n_embd)
        embeddings = Weights(path).tensor("token_embd.weight")
        collected = _collect(args, engine, path)
    device = _device(args)
    print(f"training a head on {len(collected):,} states ({device})", flush=True)
    with _Progress("step") as progress:
        trained = train_redrafter(collected, embeddings, output, params, device, progress.loss)
    write_redrafter(args.out, info, trained.weights)
    _show_chain(trained.accuracy, trained.n_held_out)
    print(f"\n{args.out}: {args.out.stat().st_size / 1e6:.2f} MB")


def _eagle(args: argparse.Namespace) -> None:
    if args.layers and not args.eagle3:
        raise InvalidParameter("--layers is for EAGLE-3 only; add --eagle3 or leave --layers out")
    params = _params(args, EagleTraining)
    with _load(args) as engine:
        path = engine.model.path
        info = HeadsInfo.of_target("eagle", engine.model)
        shape = shape_for(engine.model, params.ff)
        output = target_output(path, info.n_vocab, info.n_embd)
        target = Weights(path)
        embeddings = target.tensor("token_embd.weight")
        layers: Sequence[int] = ()
        if args.eagle3:
            layers = args.layers or default_layers(engine.model)
            _check_layers(engine.model, layers)
        collected = _collect(args, engine, path, layers)
    device = _device(args)
    print(f"training a head on {len(collected):,} states ({device})", flush=True)
    with _Progress("step") as progress:
        trained = train_eagle(
            collected,
            embeddings,
            output,
            shape,
            params,
            device,
            progress.loss,
            output_norm=target.tensor("output_norm.weight") if layers else None,
        )
    tokens = trained.tokens
    if layers:
        own = None if tokens is None else output[tokens]
        write_eagle3(args.out, info, shape, trained.tensors, layers, path, tokens, own, params.kind)
    else:
        write_eagle(args.out, info, shape, trained.tensors, tokens=tokens, kind=params.kind)
    _show_chain(trained.accuracy, trained.n_held_out)
    print(f"\n{args.out}: {args.out.stat().st_size / 1e6:.2f} MB")


def _check_layers(model: Model, layers: Sequence[int]) -> None:
    """Raise if the layers cannot be read, before the target spends hours on replies."""
    for layer in layers:
        if not 0 <= layer < model.n_layer:
            raise InvalidParameter(
                f"--layers has {layer}, but the model has {model.n_layer} layers; give numbers "
                f"from 0 to {model.n_layer - 1}"
            )
    check_layer_inputs(model, layers)


def _collect(
    args: argparse.Namespace, engine: Engine, path: Path, layers: Sequence[int] = ()
) -> states.States:
    folder: Path = args.work or args.out.with_name(f"{args.out.name}.states")
    run: dict[str, Any] = {
        "target": fingerprint(path),
        "data": [f"{file.name} {digest(file)}" for file in args.data],
        "generate": args.generate,
        "max_tokens": args.max_tokens,
        "ctx": engine.context.n_ctx,
    }
    if layers:
        run["layers"] = list(layers)
    states.begin(folder, run)
    n_before = states.n_samples(folder)
    length = engine.context.n_ctx
    if args.generate:
        samples = generate_replies(engine, args.data, length, args.generate, n_before)
    else:
        samples = read_texts(engine.model, args.data, length, n_before)
    with _Progress("text" if not args.generate else "writing") as progress:
        states.write_samples(folder, samples, args.max_tokens, progress.tokens)
    engine.stop_running()
    engine.cache.truncate(0)
    with _Progress("reading") as progress:
        return states.collect(folder, engine.context, progress.tokens, layers)


def _tree(args: argparse.Namespace) -> None:
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
    _show_accuracy(weights.accuracy)
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
    _show_tree(weights.accuracy, tree)
    write_medusa(out, info, dataclasses.replace(weights, tree=tree))
    print(f"written to {out}")


def _without_tree(heads: Path, method: str) -> TrainError:
    return TrainError(
        f"{heads} has heads for {method}, which build their tree while drafting; give a file of "
        f"Medusa heads"
    )


def _show_accuracy(accuracy: Floats, name: str = "head") -> None:
    print("\naccuracy of each choice, and of the top 3 and top 5 together, in %")
    n_ranks = accuracy.shape[1]
    print(f"{name:6}" + "".join(f"{rank + 1:6}" for rank in range(n_ranks)) + "   top 3  top 5")
    for i, row in enumerate(100 * accuracy):
        print(
            f"{i + 1:{len(name)}}".ljust(6)
            + "".join(f"{value:6.1f}" for value in row)
            + f"  {row[:3].sum():6.1f} {row[:5].sum():6.1f}"
        )


def _show_chain(accuracy: Floats, n_held_out: int) -> None:
    print(f"\nmeasured on {n_held_out:,} held-out states, for each draft token of a chain,")
    print("given that the first choices before it were correct")
    _show_accuracy(accuracy, "token")
    print(
        f"\na chain of {len(accuracy)} gives "
        f"{1 + float(np.cumprod(accuracy[:, 0]).sum()):.2f} tokens per step"
    )


def _show_tree(accuracy: Floats, tree: Sequence[tuple[int, ...]]) -> None:
    print(
        f"\nthe tree has {len(tree)} draft tokens; expected tokens per step: "
        f"{expected_tokens(accuracy, tree):.2f}; paths: {show_choices(tree)}"
    )


class _Progress:
    """A progress line on stderr, updated at most twice a second. Leaving ``with`` ends the line."""

    def __init__(self, phase: str) -> None:
        self._phase = phase
        self._shown = 0.0
        self._any = False

    def tokens(self, done: int, total: int) -> None:
        self._show(f"{self._phase}: {done:,} of {total:,} tokens", last=done >= total)

    def loss(self, step: int, n_steps: int, loss: float) -> None:
        self._show(f"{self._phase} {step:,} of {n_steps:,}: loss {loss:.3f}", last=step == n_steps)

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *error: object) -> None:
        if self._any:
            print(file=sys.stderr)

    def _show(self, text: str, *, last: bool) -> None:
        now = perf_counter()
        if last or now - self._shown > 0.5:
            self._shown, self._any = now, True
            print(f"\r{text}", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
