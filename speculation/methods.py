"""The table of methods: name -> parameters and drafters. A new method is one line here."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any

from batching.errors import InvalidParameter
from batching.tree import NO_LIMIT
from speculation.auto.cost_curve import CostModel
from speculation.auto.drafter import Auto, AutoParams, Source
from speculation.drafter import Drafter
from speculation.drafters.dflash import DFlash, DFlashParams
from speculation.drafters.draft_model import PRIORS as DRAFT_PRIORS
from speculation.drafters.draft_model import DraftModel, DraftModelParams
from speculation.drafters.eagle import Eagle, Eagle1Params, Eagle2Params, MtpParams
from speculation.drafters.jacobi import Jacobi, JacobiParams
from speculation.drafters.lookahead import Lookahead, LookaheadParams
from speculation.drafters.medusa import LOSSY, Medusa, MedusaParams
from speculation.drafters.medusa import PRIORS as MEDUSA_PRIORS
from speculation.drafters.prompt_lookup import PRIORS as LOOKUP_PRIORS
from speculation.drafters.prompt_lookup import PromptLookup, PromptLookupParams
from speculation.drafters.recycling import PRIORS as RECYCLING_PRIORS
from speculation.drafters.recycling import Recycling, RecyclingParams, SuccessorTable
from speculation.drafters.redrafter import ReDrafter, ReDrafterParams
from speculation.drafting.confidence import PRIORS as HEAD_PRIORS
from speculation.drafting.estimates import Estimates
from speculation.drafting.head_drafter import GrownParams
from speculation.resources import OR_IN_CHAT, Resources
from speculation.verify import Match, Rejection, Typical, Verifier


@dataclass(frozen=True)
class NoParams:
    """Plain decoding, one token a step: nothing to set."""


@dataclass(frozen=True)
class MethodKind:
    """A line of the table."""

    name: str
    title: str
    params: type[Any]
    drafters: Callable[[Any, Resources], list[Drafter]]
    verifier: Callable[[Any, Resources], Verifier] = lambda p, r: Match()


def _recycling(params: RecyclingParams, resources: Resources) -> Recycling:
    table = resources.successors if params.warm else resources.keep("cold", SuccessorTable)
    return Recycling(params, table, resources.keep("recycled", lambda: Estimates(RECYCLING_PRIORS)))


def _draft_model(params: DraftModelParams, resources: Resources) -> DraftModel:
    make = resources.draft_sampler
    sampler = make() if make is not None and _rejects(params, resources) else None
    return DraftModel(
        params,
        resources.levels,
        estimates=resources.keep("draft", lambda: Estimates(DRAFT_PRIORS)),
        sampler=sampler,
    )


def _draft_verifier(params: DraftModelParams, resources: Resources) -> Verifier:
    if _rejects(params, resources):
        return Rejection(resources.sampling.seed)
    return Match()


def _rejects(params: DraftModelParams, resources: Resources) -> bool:
    """Without chance in the choice, q and p are certain, and rejection is match."""
    return params.verify == "rejection" and resources.sampling.temperature > 0


def _eagle(
    params: Eagle1Params | GrownParams,
    resources: Resources,
    heads: str = "eagle",
    target_seconds: Callable[[], float] | None = None,
) -> Eagle:
    return Eagle(
        params,
        resources.head_levels(heads),
        estimates=resources.keep(heads, lambda: Estimates(HEAD_PRIORS)),
        target_seconds=target_seconds,
    )


def _dflash(params: DFlashParams, resources: Resources) -> DFlash:
    """Whatever its drafts cost: a deeper level of a block takes no further time."""
    estimates = resources.keep("dflash", lambda: Estimates(HEAD_PRIORS))
    return DFlash(params, resources.head_levels("dflash"), estimates=estimates)


def _medusa(params: MedusaParams, resources: Resources) -> Medusa:
    estimates = resources.keep("medusa", lambda: Estimates(MEDUSA_PRIORS))
    return Medusa(params, resources.medusa, estimates)


def _redrafter(
    params: ReDrafterParams,
    resources: Resources,
    target_seconds: Callable[[], float] | None = None,
) -> ReDrafter:
    return ReDrafter(
        params,
        resources.redrafter,
        estimates=resources.keep("redrafter", lambda: Estimates(HEAD_PRIORS)),
        target_seconds=target_seconds,
    )


def _medusa_verifier(params: MedusaParams, resources: Resources) -> Verifier:
    return Typical(params.epsilon, params.delta) if params.verify == LOSSY else Match()


def _window(cost: CostModel) -> LookaheadParams | None:
    """The largest of lookahead's windows whose rows cost a quarter of a step at most, if any."""
    curve = cost.curve(0)
    for window in (15, 10, 7, 5):
        params = LookaheadParams(window=window, ngram=5, guesses=window)
        if curve.at(1 + Lookahead(params).window_rows) <= 1.25 * curve.at(1):
            return params
    return None


def _prompt_lookup(params: PromptLookupParams, resources: Resources) -> list[Drafter]:
    return [PromptLookup(params, resources.keep(params, lambda: Estimates(LOOKUP_PRIORS)))]


def _auto(params: AutoParams, resources: Resources) -> list[Drafter]:
    """The same sources for every text, so that what they learnt is kept; none for a model that
    cannot drop drafts, which is then decoded plainly."""
    if not resources.n_rewind:
        return []

    def make() -> Auto:
        def target_seconds() -> float:
            return resources.cost.curve(0).at(1)

        sources: dict[str, Callable[[], Drafter]] = {
            "prompt-lookup": lambda: PromptLookup(PromptLookupParams(branches=2)),
            "recycling": lambda: _recycling(RecyclingParams(nodes=48), resources),
        }
        if resources.draft is not None:
            sources["draft"] = lambda: DraftModel(
                DraftModelParams(),
                resources.levels,
                estimates=resources.keep("draft", lambda: Estimates(DRAFT_PRIORS)),
                target_seconds=target_seconds,
            )
        for heads, shape in (
            ("eagle", Eagle2Params()),
            ("eagle-3", Eagle2Params()),
            ("mtp", MtpParams(depth=8)),
        ):
            if heads in resources.heads:
                sources[heads] = partial(_eagle, shape, resources, heads, target_seconds)
        if "dflash" in resources.heads:
            sources["dflash"] = lambda: _dflash(DFlashParams(top_k=8, nodes=64), resources)
        if "medusa" in resources.heads:
            sources["medusa"] = lambda: _medusa(MedusaParams(), resources)
        if "redrafter" in resources.heads:
            sources["redrafter"] = lambda: _redrafter(ReDrafterParams(), resources, target_seconds)
        for name in params.named:  # lookahead joins in only where its rows are cheap
            if name not in sources and name != "lookahead":
                raise InvalidParameter(
                    f"auto: sources has {name}, and none was loaded; give one with --draft-model "
                    f"or --heads{OR_IN_CHAT}, or leave it out"
                )
        chosen = [Source(name, make()) for name, make in sources.items() if params.allows(name)]
        window = _window(resources.cost) if resources.n_rewind == NO_LIMIT else None
        if window is not None and params.allows("lookahead"):
            lookahead = Lookahead(window)
            chosen.append(Source("lookahead", lookahead, lookahead))
        return Auto(params, chosen, resources.cost)

    return [resources.keep(params, make)]


METHODS: dict[str, MethodKind] = {
    kind.name: kind
    for kind in (
        MethodKind("auto", "Auto", AutoParams, _auto),
        MethodKind("ar", "Autoregressive", NoParams, lambda p, r: []),
        MethodKind("prompt-lookup", "Prompt lookup", PromptLookupParams, _prompt_lookup),
        MethodKind("jacobi", "Jacobi", JacobiParams, lambda p, r: [Jacobi(p)]),
        MethodKind("lookahead", "Lookahead", LookaheadParams, lambda p, r: [Lookahead(p)]),
        MethodKind(
            "recycling", "Token recycling", RecyclingParams, lambda p, r: [_recycling(p, r)]
        ),
        MethodKind(
            "draft",
            "Draft model",
            DraftModelParams,
            lambda p, r: [_draft_model(p, r)],
            _draft_verifier,
        ),
        MethodKind(
            "medusa", "Medusa", MedusaParams, lambda p, r: [_medusa(p, r)], _medusa_verifier
        ),
        MethodKind("redrafter", "ReDrafter", ReDrafterParams, lambda p, r: [_redrafter(p, r)]),
        MethodKind("eagle-1", "EAGLE-1", Eagle1Params, lambda p, r: [_eagle(p, r)]),
        MethodKind("eagle-2", "EAGLE-2", Eagle2Params, lambda p, r: [_eagle(p, r)]),
        MethodKind("eagle-3", "EAGLE-3", Eagle2Params, lambda p, r: [_eagle(p, r, "eagle-3")]),
        MethodKind("mtp", "Multi-token prediction", MtpParams, lambda p, r: [_eagle(p, r, "mtp")]),
        MethodKind("dflash", "DFlash", DFlashParams, lambda p, r: [_dflash(p, r)]),
    )
}


@dataclass(frozen=True)
class Method:
    """A method with its parameters, ready to run."""

    kind: MethodKind
    params: Any

    @property
    def name(self) -> str:
        return self.kind.name

    def __str__(self) -> str:
        """The method as it is written on the command line, defaults left out."""
        changed = [
            f"{field.name}={_show(getattr(self.params, field.name))}"
            for field in dataclasses.fields(self.params)
            if getattr(self.params, field.name) != field.default
        ]
        return f"{self.name}:{','.join(changed)}" if changed else self.name

    def drafters(self, resources: Resources | None = None) -> list[Drafter]:
        """Drafters for one text; ``resources`` are the engine's, for methods that need them."""
        return self.kind.drafters(self.params, resources or Resources())

    def verifier(self, resources: Resources | None = None) -> Verifier:
        return self.kind.verifier(self.params, resources or Resources())


def parse_method(text: str) -> Method:
    """A method from ``name`` or ``name:parameter=value,parameter=value``.

    Raises InvalidParameter naming the unknown method or parameter, or the value out of range.
    """
    name, _, rest = text.partition(":")
    kind = METHODS.get(name.strip())
    if kind is None:
        raise InvalidParameter(
            f"there is no method {name!r}; {_meant(name, METHODS)}give one of {', '.join(METHODS)}"
        )
    fields = {field.name: field for field in dataclasses.fields(kind.params)}
    values: dict[str, Any] = {}
    for item in filter(None, (part.strip() for part in rest.split(","))):
        key, equals, value = (part.strip() for part in item.partition("="))
        if key not in fields:
            raise InvalidParameter(f"{kind.name} has no parameter {key!r}; {_known(key, fields)}")
        if not equals:
            raise InvalidParameter(f"{kind.name}: {key} has no value; write {key}=value")
        if key in values:
            raise InvalidParameter(f"{kind.name}: {key} is given twice; give it once")
        values[key] = _parse(kind.name, key, value, fields[key].default)
    return Method(kind, kind.params(**values))


def _known(key: str, fields: Collection[str]) -> str:
    """What to write instead of a parameter that a method has not."""
    if not fields:
        return "it has none"
    return f"{_meant(key, fields)}write parameter=value with one of: {', '.join(fields)}"


def _meant(text: str, known: Collection[str]) -> str:
    near = difflib.get_close_matches(text, known, 1)
    return f"did you mean {near[0]}? " if near else ""


def parameter_docs(params: type[Any]) -> dict[str, str]:
    """What the docstring of a parameters dataclass says of each field, on one line.

    The docstring has a line ``name  text`` or ``name: text`` for each, continued on lines that are
    indented further.
    """
    names = [field.name for field in dataclasses.fields(params)]
    docs = dict.fromkeys(names, "")
    current = ""
    for line in (inspect.getdoc(params) or "").splitlines():
        head = re.match(r"(\w+)(?::| {2,}) *(.*)", line)
        if head is not None and head[1] in docs:
            current = head[1]
            docs[current] = head[2].strip()
        elif current and line.startswith("  "):
            docs[current] += " " + line.strip()
        else:
            current = ""
    return {name: text.rstrip(".") for name, text in docs.items()}


def _parse(method: str, name: str, text: str, default: Any) -> Any:
    kind = type(default)
    try:
        if kind is bool:
            return {"on": True, "true": True, "1": True, "off": False, "false": False, "0": False}[
                text.lower()
            ]
        return kind(text)
    except (ValueError, KeyError):
        expected = "on or off" if kind is bool else f"a value like {default!r}"
        raise InvalidParameter(f"{method}: {name} is {text!r}; give {expected}") from None


def _show(value: Any) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)
