"""The command that trains a head for EAGLE-1 and -2, or for EAGLE-3."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from batching.errors import InvalidParameter
from batching.llama.model import Model
from batching.llama.private_api import check_layer_inputs
from batching.llama.weights import Weights
from speculation.heads.eagle_file import write_eagle
from speculation.heads.file import HeadsInfo, target_output
from speculation.train.commands.shared import (
    Command,
    Progress,
    add_data,
    add_params,
    collect_states,
    load_target,
    params_of,
    show_chain,
    show_file,
    training_device,
)
from speculation.train.eagle import EagleTraining, default_layers, shape_for, train_eagle
from speculation.train.eagle3_file import write_eagle3


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_data(parser)
    parser.add_argument(
        "--eagle3",
        action="store_true",
        help="train an EAGLE-3 head, which reads three layers (default: for EAGLE-1 and -2)",
    )
    parser.add_argument(
        "--layers",
        nargs=3,
        type=int,
        help="the three layers for --eagle3, counted from 0 (default: 2, n/2 and n-3 of n)",
    )
    add_params(parser, EagleTraining)


def _run(args: argparse.Namespace) -> None:
    if args.layers and not args.eagle3:
        raise InvalidParameter("--layers is for EAGLE-3 only; add --eagle3 or leave --layers out")
    params = params_of(args, EagleTraining)
    with load_target(args) as engine:
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
        collected = collect_states(args, engine, path, layers)
    device = training_device(args)
    print(f"training a head on {len(collected):,} states ({device})", flush=True)
    with Progress("step") as progress:
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
    show_chain(trained.accuracy, trained.n_held_out)
    show_file(args.out)


def _check_layers(model: Model, layers: Sequence[int]) -> None:
    """Raise if the layers cannot be read, before the target spends hours on replies."""
    for layer in layers:
        if not 0 <= layer < model.n_layer:
            raise InvalidParameter(
                f"--layers has {layer}, but the model has {model.n_layer} layers; give numbers "
                f"from 0 to {model.n_layer - 1}"
            )
    check_layer_inputs(model, layers)


command = Command("eagle", "train an EAGLE head", _add_arguments, _run)
