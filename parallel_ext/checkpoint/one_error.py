"""One class of error for all that can go wrong in a save or load, on every rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from parallel_ext.checkpoint.open_file import CheckpointError
from parallel_ext.ranks import CollectiveTimeout, DisagreementError


class CheckpointTimeout(CheckpointError, CollectiveTimeout):  # noqa: N818 (as the other's name)
    """A rank was killed or stopped, did not come, or left early; names it."""


class CheckpointDisagreement(CheckpointError, DisagreementError):  # noqa: N818
    """The ranks were about to do different things; names who."""


@contextmanager
def one_error(what: str) -> Iterator[None]:
    """Let every error that leaves the block be a :class:`CheckpointError`.

    A rank that handles the error of a save, and goes on, can then be sure that the others do, too:
    they would not if one of them had an ``OSError`` where the others hear of it.

    Args:
        what: what the ranks are doing, where the error does not say so.

    Raises:
        CheckpointError: what was raised inside, if it was one, else with that as its cause.
    """
    try:
        yield
    except CheckpointError:
        raise
    except CollectiveTimeout as error:
        raise CheckpointTimeout(_with(what, error)) from error
    except DisagreementError as error:
        raise CheckpointDisagreement(_with(what, error)) from error
    except RuntimeError as error:  # also that of a rank which tells of another's
        raise CheckpointError(_with(what, error)) from error
    except Exception as error:
        raise CheckpointError(f"{what}: {type(error).__name__}: {error}") from error


def _with(what: str, error: Exception) -> str:
    return str(error) if what in str(error) else f"{what}: {error}"
