"""The command that trains a draft model."""

from __future__ import annotations

import argparse

from batching.llama.weights import Weights
from speculation.heads.file import HeadsInfo, model_name, target_output
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
from speculation.train.draft import DraftTraining, train_draft, write_draft


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_data(parser)
    add_params(parser, DraftTraining)


def _run(args: argparse.Namespace) -> None:
    params = params_of(args, DraftTraining)
    with load_target(args) as engine:
        path, name, n_ctx = engine.model.path, model_name(engine.model), engine.model.n_ctx_train
        info = HeadsInfo.of_target("draft", engine.model)
        output = target_output(path, info.n_vocab, info.n_embd)
        embeddings = Weights(path).tensor("token_embd.weight")
        collected = collect_states(args, engine, path)
    device = training_device(args)
    print(f"training a draft model on {len(collected):,} states ({device})", flush=True)
    with Progress("step") as progress:
        trained = train_draft(collected, embeddings, output, params, device, progress.loss)
    write_draft(args.out, name, params, trained, path, n_ctx)
    n_parameters = sum(tensor.size for tensor in trained.tensors.values())
    show_chain(trained.accuracy, trained.n_held_out)
    print(f"\n{n_parameters / 1e6:.1f} million parameters")
    show_file(args.out)


command = Command("draft", "train a draft model", _add_arguments, _run)
