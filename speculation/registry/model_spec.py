"""Which model to load, and how. Each field is also a flag of the commands that load a model."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection
from dataclasses import Field, dataclass, field, fields
from typing import Any

from batching.llama.context import FLASH_ATTN, KV_TYPES, ContextParams
from batching.llama.context_params import MAX_SLOTS
from batching.llama.model import ALL_LAYERS
from speculation.registry import PAIRED, default_model


def at_least(low: int, high: int | None = None) -> Callable[[str], int]:
    """The type of a flag that is an integer from ``low``, and up to ``high``."""

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < low or (high is not None and int(text) > high):
            end = "" if high is None else f" to {high}"
            raise argparse.ArgumentTypeError(
                f"invalid value {text!r}; give an integer from {low}{end}"
            )
        return int(text)

    return read


def _flag(default: Any, help_: str, /, **options: Any) -> Any:
    """A field with its help, and options of ``add_argument``; ``flag`` if it has another name."""
    return field(default=default, metadata={"options": {**options, "help": help_}})


@dataclass(frozen=True)
class ModelSpec:
    """Which model to load, and how. Models are names from models.txt, paths or ``hf:…``."""

    model: str = field(
        default_factory=default_model,
        metadata={"options": {"help": "name in models.txt, path or hf:… (%(default)s)"}},
    )
    n_ctx: int = _flag(
        0,
        "context in tokens, which requests share; 0 = the model's own, as far as memory allows",
        flag="--ctx",
        type=int,
    )
    draft_model: str | None = _flag(
        None,
        "a smaller model with the same vocabulary, for the methods draft and auto: a name or path; "
        "without a value, the one that models.txt pairs with the model",
        nargs="?",
        const=PAIRED,
    )
    heads: tuple[str, ...] = _flag(
        (),
        "drafting heads trained on the model, one name or path per method (docs/heads.md); without "
        "a value, those that models.txt pairs with the model",
        nargs="*",
        metavar="HEADS",
    )
    mtp: bool = _flag(
        True,
        "do not load the model's multi-token prediction layers",
        flag="--no-mtp",
        action="store_true",
    )
    n_gpu_layers: int | None = _flag(
        None,
        "layers on the GPU, if there is one (all that fit)",
        flag="--gpu-layers",
        type=at_least(0),
    )
    n_cpu_moe: int | None = _flag(
        None,
        "layers, from the first, whose experts stay in main memory (those that do not fit on the "
        "GPU)",
        type=at_least(0),
        metavar="N",
    )
    device: str | None = _flag(
        None,
        "devices for these layers, as `speculation devices` lists them, or none (all GPUs)",
        metavar="NAME,…",
    )
    draft_device: str | None = _flag(None, "those of the draft model (the same)", metavar="NAME,…")
    rpc: str = _flag(
        "",
        "RPC workers that compute layers of the model on other machines (docs/machines.md)",
        metavar="HOST:PORT,…",
    )
    n_threads: int | None = _flag(
        None, "CPU threads (one per physical core)", flag="--threads", type=int
    )
    kv_type: str = _flag("f16", "type of the KV cache (%(default)s)", choices=KV_TYPES)
    flash_attn: str = _flag(
        "auto",
        "flash attention; auto takes what was measured to be faster (%(default)s)",
        choices=tuple(FLASH_ATTN),
    )
    exact: bool = _flag(
        False,
        "write the very same text as plain decoding, at some cost in speed (docs/lossless.md)",
        action="store_true",
    )
    parallel: int | None = _flag(
        None,
        "requests to serve at a time; they share the context (4)",
        type=at_least(1, MAX_SLOTS),
    )
    chat_template: str | None = _flag(
        None, "a Jinja chat template to use instead of the model's", metavar="FILE"
    )
    keep_texts: int = _flag(
        0,
        "keep up to so many MB of idle conversations on disk, in the user's cache folder, so that "
        "their next turn is quick after a restart, too; 0 keeps none (%(default)s)",
        type=at_least(0),
        metavar="MB",
        default=8000,
    )
    embedding_model: str | None = _flag(
        None,
        "a model for embeddings, loaded beside the other: a name or path (the mean of the model's "
        "own states)",
        metavar="MODEL",
    )

    @classmethod
    def of(cls, flags: argparse.Namespace) -> ModelSpec:
        """The model that the command line asks for, of which some fields may be no flags."""
        given = vars(flags)
        names = {_destination(each): each.name for each in fields(cls)}
        found = {name: given[flag] for flag, name in names.items() if flag in given}
        found["heads"] = (PAIRED,) if flags.heads == [] else tuple(flags.heads)
        return cls(**{**found, "mtp": not flags.no_mtp})

    @property
    def context(self) -> ContextParams:
        """The parameters of the context. Raises InvalidParameter."""
        return ContextParams(
            n_ctx=self.n_ctx,
            n_threads=self.n_threads,
            kv_type=self.kv_type,
            flash_attn=self.flash_attn,
            exact=self.exact,
        )

    @property
    def parts(self) -> dict[str, Any]:
        """What drafts beside the model, and where layers are computed: for ``Engine.load``."""
        beside, where = ("draft_model", "heads", "mtp"), ("device", "draft_device", "rpc")
        names = (*beside, *where, "n_gpu_layers", "n_cpu_moe")
        return {name: getattr(self, name) for name in names}


def add_model_flags(parser: argparse._ActionsContainer, names: Collection[str] = ()) -> None:
    """The flags for the fields of ``ModelSpec``, or for those with these ``names``."""
    for each in fields(ModelSpec):
        if not names or each.name in names:
            default = default_model() if each.name == "model" else each.default
            options = {"default": default, **each.metadata["options"]}
            flag = options.pop("flag", f"--{each.name.replace('_', '-')}")
            if "action" in options:  # a switch, which is off
                del options["default"]
            parser.add_argument(flag, **options)
            if each.name == "n_cpu_moe":
                parser.add_argument(
                    "--cpu-moe",
                    help="keep all experts there",
                    action="store_const",
                    const=ALL_LAYERS,
                    dest=each.name,
                )


def _destination(each: Field[Any]) -> str:
    """The name of a field's value on the command line."""
    flag: str = each.metadata["options"].get("flag", each.name)
    return flag.removeprefix("--").replace("-", "_")
