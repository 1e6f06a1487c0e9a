"""The exceptions of kernelgraft.

KernelgraftError
├── UsageError            bad input: a wrong name, a missing folder, an unknown format (exit code 2)
│   ├── RecordError       a record on disk is missing, corrupt or of another schema
│   └── MissingExtraError an optional dependency is not installed
├── GraftError            a graft cannot be put on this model
│   ├── MismatchError     the model, its source or the versions are not those the graft was made for
│   ├── ConflictError     two patches claim one site
│   └── UnreachedError    a patch was applied but no call went through it
├── RebindError           a method cannot be rebuilt around a replaced global or statement
├── KernelFault           a kernel under the interpreter used memory that it must not, or failed its own assertion
└── NothingToPatch        the model has no site that a kernel could take (exit code 3)

Each message is one line: it names the object in backticks and says the next step.
"""

from __future__ import annotations


class KernelgraftError(Exception):
    """Base of every error that kernelgraft raises on purpose."""

    exit_code = 1


class UsageError(KernelgraftError):
    """The caller gave something that cannot be used."""

    exit_code = 2


class RecordError(UsageError):
    """A record on disk is missing, corrupt or of another schema."""


class MissingExtraError(UsageError):
    """An optional dependency is not installed."""


class GraftError(KernelgraftError):
    """A graft cannot be put on this model."""

    exit_code = 2


class MismatchError(GraftError):
    """The model, its source or the library versions are not those that the graft was made for."""


class ConflictError(GraftError):
    """Two patches claim the same site."""


class UnreachedError(GraftError):
    """A patch was applied but no call went through it."""


class RebindError(KernelgraftError):
    """A method cannot be rebuilt around a replaced global or statement."""


class KernelFault(KernelgraftError):
    """A kernel under the interpreter used memory that it must not, or failed its own assertion."""


class NothingToPatch(KernelgraftError):
    """The model has no site that a kernel could take."""

    exit_code = 3
