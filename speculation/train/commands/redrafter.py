"""The command that trains a ReDrafter head."""

from __future__ import annotations

import argparse

from batching.llama.weights import Weights
from speculation.heads.file import HeadsInfo, target_output
from speculation.heads.redrafter_file import write_redrafter
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
from speculation.train.redrafter import ReDrafterTraining, train_redrafter


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_data(parser)
    add_params(parser, ReDrafterTraining)


def _run(args: argparse.Namespace) -> None:
    params = params_of(args, ReDrafterTraining)
    with load_target(args) as engine:
        path = engine.model.path
        info = HeadsInfo.of_target("redrafter", engine.model)
        output = target_output(path, info.n_vocab, info.n_embd)
        embeddings = Weights(path).tensor("token_embd.weight")
        collected = collect_states(args, engine, path)
    device = training_device(args)
    print(f"training a head on {len(collected):,} states ({device})", flush=True)
    with Progress("step") as progress:
        trained = train_redrafter(collected, embeddings, output, params, device, progress.loss)
    write_redrafter(args.out, info, trained.weights)
    show_chain(trained.accuracy, trained.n_held_out)
    show_file(args.out)


command = Command("redrafter", "train a ReDrafter head", _add_arguments, _run)
