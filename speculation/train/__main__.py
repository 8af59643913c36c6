"""``python -m speculation.train``: trains drafting heads for a model on your texts."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tqdm import tqdm

from batching.errors import InvalidParameter
from batching.gguf.reader import fingerprint
from batching.llama.context import ContextParams
from batching.llama.weights import Weights
from speculation.engine import Engine
from speculation.heads.file import HeadsInfo, target_output
from speculation.methods import parameter_docs
from speculation.registry import BUNDLED_MODEL, resolve
from speculation.system.console import FAILED, run_command
from speculation.system.files import digest, require_distinct, require_writable
from speculation.train import TrainError, states
from speculation.train.params import (
    EagleTraining,
    MedusaTraining,
    ReDrafterTraining,
    TrainingParams,
)
from speculation.train.ranks import report
from speculation.train.texts import REPLIES_AT_ONCE, generate_replies, read_texts, replying

DESCRIPTION = """\
Train drafting heads for a GGUF model, the target. See docs/training.md.

The target reads the data; its hidden states and choices are stored in a folder. Training learns
from them and measures the result on held-out texts. Ctrl-C while the target reads loses nothing:
run the same command again to resume. The target's own replies are the best data: give prompts and
--generate.
"""


# What each command trains, and the class of its flags. The module of its name has the network,
# which imports PyTorch.
KINDS: dict[str, tuple[str, type[TrainingParams]]] = {
    "medusa": ("Medusa heads", MedusaTraining),
    "redrafter": ("a ReDrafter head", ReDrafterTraining),
    "eagle": ("an EAGLE head", EagleTraining),
}


def main(arguments: Sequence[str] | None = None, prog: str = "python -m speculation.train") -> int:
    """Run a command; return the exit code."""
    args = _parser(prog).parse_args(arguments)
    try:
        return run_command(
            lambda: _run(args.command, args), "interrupted; run the same command again to resume"
        )
    except (MemoryError, RuntimeError) as error:  # PyTorch raises RuntimeError when out of memory
        if not isinstance(error, MemoryError) and "memory" not in str(error):
            raise
        print(
            "error: out of memory in a training step; lower --batch or give --vocab; the "
            "collected states are kept",
            file=sys.stderr,
        )
        return FAILED


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog,
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    for name, (what, params) in KINDS.items():
        subparser = subparsers.add_parser(name, help=f"train {what}", allow_abbrev=False)
        _add_arguments(subparser, params)
    return parser


def _add_arguments(parser: argparse.ArgumentParser, params: type[TrainingParams]) -> None:
    """Add the flags of the data, and those of the kind's parameters."""
    add = parser.add_argument
    add("--model", default=BUNDLED_MODEL, help="target model: a GGUF or a name in models.txt")
    add("--data", nargs="+", type=Path, required=True, help="files of texts, chats or prompts")
    add("--out", type=Path, required=True, help="file to write the result to")
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
    add("--gpu-layers", type=int, help="layers on the GPU, if any (default: all that fit)")
    add("--device", help="PyTorch device, such as cpu or cuda (default: cuda if available)")
    docs = parameter_docs(params)
    for field in dataclasses.fields(params):
        flag, text = f"--{field.name.replace('_', '-')}", docs[field.name]
        if isinstance(field.default, bool):
            add(flag, action="store_true", help=text)
        elif isinstance(field.default, tuple):
            add(flag, type=int, nargs=3, default=field.default, help=text, metavar="N")
        else:
            text = f"{text} ({field.default})"
            add(flag, type=type(field.default), default=field.default, help=text)


def _run(name: str, args: argparse.Namespace) -> None:
    """Collect the target's states over the data, train on them, and write the file."""
    what, params_class = KINDS[name]
    params = _checked_params(args, params_class)
    import torch

    from speculation.train.training import Target, Trainer, train

    make = import_module(f"speculation.train.{name}").make
    path = resolve(args.model)
    require_distinct(args.out, [path])
    context = ContextParams(n_ctx=args.ctx, n_threads=args.threads)
    with Engine.load(path, context, mtp=False, n_gpu_layers=args.gpu_layers) as engine:
        path = engine.model.path
        info = HeadsInfo.of_target(name, engine.model)
        output = target_output(path, info.n_vocab, info.n_embd)
        target = Target(info, Weights(path), output, params.layers_read(engine.model))
        collected = _collect(args, engine, path, target.layers)
    device = _checked_device(args.device)
    if args.threads:
        torch.set_num_threads(args.threads)
    print(f"training {what} on {len(collected):,} states ({device})", flush=True)
    trainer = Trainer(make, params, collected, target, device)
    with _progress("training", " steps") as progress:
        ranks = train(trainer, progress)
    trainer.head.write(args.out, trainer)
    print(f"{report(ranks)}\n\n{args.out}: {args.out.stat().st_size / 1e6:.2f} MB")


def _checked_params(args: argparse.Namespace, kind: type[TrainingParams]) -> TrainingParams:
    """The training parameters from the flags. Checks all it can before a model is loaded."""
    if find_spec("torch") is None:
        raise TrainError(
            "training needs torch, which is not installed; install it with: "
            "python -m pip install 'torch>=2.6'"
        )
    params = kind(**{field.name: vars(args)[field.name] for field in dataclasses.fields(kind)})
    for flag, value, least in (
        ("--generate", args.generate, 0),
        ("--max-tokens", args.max_tokens, 1),
    ):
        if value < least:
            raise InvalidParameter(f"{flag} is {value}; give {least} or more")
    require_distinct(args.out, args.data)
    require_writable(args.out)
    _checked_device(args.device)
    return params


def _checked_device(device: str | None) -> str:
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


def _collect(
    args: argparse.Namespace, engine: Engine, path: Path, layers: Sequence[int]
) -> states.States:
    """The target's states over the data, from the work folder as far as they are there."""
    folder: Path = args.work or args.out.with_name(f"{args.out.name}.states")
    length = engine.context.n_ctx
    settings: dict[str, Any] = {
        "target": fingerprint(path),
        "data": [f"{file.name} {digest(file)}" for file in args.data],
        "generate": args.generate,
        "max_tokens": args.max_tokens,
        "ctx": length,
    }
    if layers:
        settings["layers"] = list(layers)
    layers = states.begin(folder, settings)
    if not states.all_written(folder):
        n_before = states.n_samples(folder)
        with _progress("replies" if args.generate else "texts", " tokens") as progress:
            write = partial(states.write_samples, folder, progress=progress)
            if args.generate:
                # Several replies at once, in a context of its own.
                params = ContextParams(n_ctx=length * REPLIES_AT_ONCE, n_threads=args.threads)
                with replying(path, params, args.gpu_layers) as writer:
                    samples = generate_replies(writer, args.data, length, args.generate, n_before)
                    write(samples, args.max_tokens)
            else:
                write(read_texts(engine.model, args.data, length, n_before), args.max_tokens)
    with _progress("states", " tokens") as progress:
        return states.collect(folder, engine.context, progress, layers)


@contextmanager
def _progress(what: str, unit: str) -> Iterator[Callable[..., None]]:
    """A progress bar on stderr. Yields what updates it: ``show(done, total, loss=None)``."""
    with tqdm(desc=what, unit=unit, file=sys.stderr, mininterval=0.5, dynamic_ncols=True) as bar:

        def show(done: int, total: int, loss: float | None = None) -> None:
            bar.total = total
            if loss is not None:
                bar.set_postfix_str(f"loss {loss:.3f}", refresh=False)
            bar.update(done - bar.n)

        yield show


if __name__ == "__main__":
    sys.exit(main())
