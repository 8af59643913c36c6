"""The methods, one file each, and their table. They do not import each other."""

from speculation.methods.table import (
    BUILT_IN,
    METHODS,
    SAVED,
    MethodTable,
    load_method_file,
    parameter_docs,
    parse_method,
)

__all__ = [
    "BUILT_IN",
    "METHODS",
    "SAVED",
    "MethodTable",
    "load_method_file",
    "parameter_docs",
    "parse_method",
]
