"""The exception tree. Every error names the cause, the value and the way out.

    SpeculationError
    ├── ModelError              the model cannot be used
    │   ├── ModelFileMissing    no such file
    │   ├── NotGGUF             the file is no GGUF
    │   ├── TruncatedGGUF       the file ends before its tensors do
    │   ├── UnsupportedModel    llama.cpp cannot load it, or it goes on with no text
    │   ├── CannotRewind        recurrent or hybrid: parts of a sequence cannot be removed
    │   ├── VocabularyMismatch  a draft model whose tokens are not the target's
    │   └── HeadsError          drafting heads of another model, or no heads at all
    ├── ContextError            the context cannot hold what was asked for
    │   ├── OutOfMemory         no memory for the model or a context of that size
    │   ├── PromptTooLong       more prompt than context
    │   ├── CacheFull           llama_decode found no room for the rows
    │   └── DecodeFailed        llama_decode refused the rows or failed
    ├── TreeError               a token tree that no batch can hold
    │   ├── TreeTooWide         more branches than sequences
    │   └── TreeTooLarge        more nodes than rows in a batch
    ├── EngineInUse             another thread is generating with it
    ├── InvalidParameter        a parameter outside its range, or of another name
    │   └── MissingResource     a method needs a draft model or heads, and none were loaded
    └── GrammarError            a grammar or JSON schema that does not parse

Return codes of the C library become these in ``batching.llama.context`` and nowhere else.

An error's message names settings in braces, ``raise {n_ctx}``, since a setting has one name in
Python, another on the command line and a third on a page. ``str(error)`` has the Python names;
``error.worded(names)`` has those of a front end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence


class SpeculationError(Exception):
    """Base of every error that this project raises on purpose.

    settings   Python names of the settings that would help; the message has them in braces
    requested  what was asked for, where the error is about an amount
    available  what there is of it
    """

    def __init__(
        self,
        message: str = "",
        *,
        settings: Sequence[str] = (),
        requested: int | None = None,
        available: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.settings = tuple(settings)
        self.requested = requested
        self.available = available

    def __str__(self) -> str:
        return self.worded({})

    def worded(self, names: Mapping[str, str]) -> str:
        """The message with settings called as in ``names``; others keep their Python names."""
        message = self.message
        for setting in self.settings:
            message = message.replace(f"{{{setting}}}", names.get(setting, setting))
        return message


class ModelError(SpeculationError):
    """The model cannot be used."""


class ModelFileMissing(ModelError):
    """There is no file at the path."""


class NotGGUF(ModelError):
    """The file does not start with the bytes ``GGUF``."""


class TruncatedGGUF(ModelError):
    """The file is shorter than the tensors that its header names."""


class UnsupportedModel(ModelError):
    """llama.cpp, as built here, cannot load the model, or the file goes on with no text."""


class CannotRewind(ModelError):
    """The model's memory cannot drop part of a sequence, so drafts cannot be rejected."""


class VocabularyMismatch(ModelError):
    """A draft model whose tokens are not the target's."""


class HeadsError(ModelError):
    """A file that holds no drafting heads, or those of another model."""


class ContextError(SpeculationError):
    """The context cannot hold what was asked for."""


class OutOfMemory(ContextError):
    """No memory for the model, or for a context of the size asked for."""


class PromptTooLong(ContextError):
    """The prompt has more tokens than the context has room for."""


class CacheFull(ContextError):
    """``llama_decode`` found no free cells for the rows (return code 1)."""


class DecodeFailed(ContextError):
    """``llama_decode`` refused the rows or failed (any other return code)."""


class TreeError(SpeculationError):
    """A token tree that no batch can hold."""


class TreeTooWide(TreeError):
    """The tree has more branches than the context has sequences."""


class TreeTooLarge(TreeError):
    """The tree has more nodes than a batch has rows."""


class EngineInUse(SpeculationError):
    """An engine writes one text at a time, and another thread is at it."""


class InvalidParameter(SpeculationError, ValueError):
    """A parameter is unknown or outside its range."""


class MissingResource(InvalidParameter):
    """A method needs something that was not loaded: a draft model, or drafting heads."""


class GrammarError(SpeculationError, ValueError):
    """A GBNF grammar or a JSON schema does not parse."""
