"""Every error that shearling raises on purpose.

ShearlingError
├── InputError            the caller can fix it; the command line exits with 2
│   ├── ModelError        the model: missing, untrained, damaged, unsupported
│   │   └── UnsupportedArchitecture
│   ├── DataError         the sample or the evaluation data
│   ├── ConstraintError   the constraint: out of range, infeasible, contradictory
│   ├── TableError        a latency table: damaged, or of another model
│   ├── CheckpointError   a pruned checkpoint: damaged or incomplete
│   └── OutputError       the output path
└── CheckFailed           the self-check found a wrong result: nothing was saved

A message says what was asked, what was found, and what to do.
"""


class ShearlingError(Exception):
    """Base class of all errors."""


class InputError(ShearlingError, ValueError):
    """Wrong use or bad input; the message says how to fix it."""


class ModelError(InputError):
    """The model cannot be pruned as it is."""


class UnsupportedArchitecture(ModelError):
    """No row of the architecture table fits the model."""


class DataError(InputError):
    """The data cannot be used as it is."""


class ConstraintError(InputError):
    """The constraint cannot be met or is invalid."""


class TableError(InputError):
    """The latency table cannot be used."""


class CheckpointError(InputError):
    """The directory is not a complete pruned checkpoint."""


class OutputError(InputError):
    """The output path cannot be written."""


class CheckFailed(ShearlingError):
    """The pruned model failed its self-check; nothing was saved."""
