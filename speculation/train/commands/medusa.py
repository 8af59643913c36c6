"""The command that trains Medusa heads."""

from __future__ import annotations

import argparse

from speculation.heads.file import HeadsInfo, target_output
from speculation.heads.medusa_file import write_medusa
from speculation.train.commands.shared import (
    Command,
    Progress,
    add_data,
    add_params,
    collect_states,
    load_target,
    params_of,
    show_accuracy,
    show_file,
    training_device,
)
from speculation.train.commands.tree import show_tree
from speculation.train.medusa import MedusaTraining, train


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_data(parser)
    add_params(parser, MedusaTraining)


def _run(args: argparse.Namespace) -> None:
    params = params_of(args, MedusaTraining)
    with load_target(args) as engine:
        path = engine.model.path
        info = HeadsInfo.of_target("medusa", engine.model)
        output = target_output(path, info.n_vocab, info.n_embd)
        collected = collect_states(args, engine, path)
    device = training_device(args)
    print(f"training {params.heads} heads on {len(collected):,} states ({device})", flush=True)
    with Progress("step") as progress:
        trained = train(collected, output, params, device, progress.loss)
    weights = trained.weights
    write_medusa(args.out, info, weights)
    print(f"\nmeasured on {trained.n_held_out:,} held-out states")
    show_accuracy(weights.accuracy)
    show_tree(weights.accuracy, weights.tree)
    print(f"simulated on the held-out texts: {trained.tokens_per_step:.2f} tokens per step")
    show_file(args.out)


command = Command("medusa", "train Medusa heads", _add_arguments, _run)
