"""What the training commands share: flags, the target's states, progress and printed results."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple, TypeVar

import numpy as np

from batching.errors import InvalidParameter
from batching.gguf.reader import fingerprint
from batching.llama.context import ContextParams
from batching.tree import Floats
from speculation.engine import Engine
from speculation.methods import parameter_docs
from speculation.parallel import ParallelEngine
from speculation.registry import BUNDLED_MODEL, resolve
from speculation.system.files import digest, require_distinct, require_writable
from speculation.train import require_packages, states
from speculation.train.texts import generate_replies, read_texts

T = TypeVar("T")
_REPLIES_AT_ONCE = 16


class Command(NamedTuple):
    """A subcommand of ``python -m speculation.train``."""

    name: str
    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], None]


def add_data(parser: argparse.ArgumentParser) -> None:
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
    add("--gpu-layers", type=int, help="layers on the GPU, if any (default: all that fit)")
    add("--device", help="PyTorch device, such as cpu or cuda (default: cuda if available)")


def add_params(parser: argparse.ArgumentParser, params: type[Any]) -> None:
    docs = parameter_docs(params)
    for field in dataclasses.fields(params):
        parser.add_argument(
            f"--{field.name.replace('_', '-')}",
            type=type(field.default),
            default=field.default,
            help=f"{docs[field.name]} ({field.default})".strip(),
        )


def params_of(args: argparse.Namespace, kind: type[T]) -> T:
    """The training parameters from the flags. Checks all it can before a model is loaded."""
    require_packages()
    names = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
    params = kind(**{name: getattr(args, name) for name in names})
    for name, least in (("generate", 0), ("max_tokens", 1)):
        if getattr(args, name) < least:
            raise InvalidParameter(
                f"--{name.replace('_', '-')} is {getattr(args, name)}; give {least} or more"
            )
    require_distinct(args.out, args.data)
    require_writable(args.out)
    _checked_device(args.device)
    return params


def load_target(args: argparse.Namespace) -> Engine:
    path = resolve(args.model)
    require_distinct(args.out, [path])
    return Engine.load(
        path,
        ContextParams(n_ctx=args.ctx, n_threads=args.threads),
        mtp=False,
        n_gpu_layers=args.gpu_layers,
    )


def training_device(args: argparse.Namespace) -> str:
    import torch

    if args.threads:
        torch.set_num_threads(args.threads)
    return _checked_device(args.device)


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


def collect_states(
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
    layers = states.begin(folder, run)
    length = engine.context.n_ctx
    if args.generate:
        _write_replies(args, path, folder, length)
    else:
        samples = read_texts(engine.model, args.data, length, states.n_samples(folder))
        with Progress("text") as progress:
            states.write_samples(folder, samples, args.max_tokens, progress.tokens)
    with Progress("reading") as progress:
        return states.collect(folder, engine.context, progress.tokens, layers)


def _write_replies(args: argparse.Namespace, path: Path, folder: Path, length: int) -> None:
    """Have the target reply to the data, several texts at once, in a context of its own."""
    if states.all_written(folder):
        return
    params = ContextParams(n_ctx=length * _REPLIES_AT_ONCE, n_threads=args.threads)
    with (
        ParallelEngine.load(
            path, params, parallel=_REPLIES_AT_ONCE, mtp=False, n_gpu_layers=args.gpu_layers
        ) as engine,
        Progress("writing") as progress,
    ):
        n_before = states.n_samples(folder)
        samples = generate_replies(engine, args.data, length, args.generate, n_before)
        states.write_samples(folder, samples, args.max_tokens, progress.tokens)


def show_accuracy(accuracy: Floats, name: str = "head") -> None:
    print("\naccuracy of each choice, and of the top 3 and top 5 together, in %")
    n_ranks = accuracy.shape[1]
    print(f"{name:6}" + "".join(f"{rank + 1:6}" for rank in range(n_ranks)) + "   top 3  top 5")
    for i, row in enumerate(100 * accuracy):
        print(
            f"{i + 1:{len(name)}}".ljust(6)
            + "".join(f"{value:6.1f}" for value in row)
            + f"  {row[:3].sum():6.1f} {row[:5].sum():6.1f}"
        )


def show_chain(accuracy: Floats, n_held_out: int) -> None:
    print(f"\nmeasured on {n_held_out:,} held-out states, for each draft token of a chain,")
    print("given that the first choices before it were correct")
    show_accuracy(accuracy, "token")
    print(
        f"\na chain of {len(accuracy)} gives "
        f"{1 + float(np.cumprod(accuracy[:, 0]).sum()):.2f} tokens per step"
    )


def show_file(file: Path) -> None:
    print(f"\n{file}: {file.stat().st_size / 1e6:.2f} MB")


class Progress:
    """A progress line on stderr, updated at most twice a second. Leaving ``with`` ends the line."""

    def __init__(self, phase: str) -> None:
        self._phase = phase
        self._shown = 0.0
        self._any = False

    def tokens(self, done: int, total: int) -> None:
        self._show(f"{self._phase}: {done:,} of {total:,} tokens", last=done >= total)

    def loss(self, step: int, n_steps: int, loss: float) -> None:
        self._show(f"{self._phase} {step:,} of {n_steps:,}: loss {loss:.3f}", last=step == n_steps)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error: object) -> None:
        if self._any:
            print(file=sys.stderr)

    def _show(self, text: str, *, last: bool) -> None:
        now = perf_counter()
        if last or now - self._shown > 0.5:
            self._shown, self._any = now, True
            print(f"\r{text}", end="", file=sys.stderr, flush=True)
