"""One table of errors: the server's, the SDK's and the document's are the same."""

from __future__ import annotations

import capsule_sdk.errors as sdk
from capsule import errors


def test_every_error_is_in_the_table() -> None:
    """Other modules may refine one; what is sent is in this table."""
    declared = [v for v in vars(errors).values() if isinstance(v, type)]
    ours = {cls for cls in declared if issubclass(cls, errors.CapsuleError)}
    assert ours - {errors.CapsuleError} == set(errors.ALL_ERRORS)
    for field in ("code", "rpc_code"):
        assert len({getattr(cls, field) for cls in errors.ALL_ERRORS}) == len(errors.ALL_ERRORS)


def test_the_sdk_has_every_error_under_the_same_name_and_code() -> None:
    ours = {cls.__name__: cls.code for cls in errors.ALL_ERRORS}
    theirs = {cls.__name__: cls.code for cls in sdk.SERVER_ERRORS}
    assert theirs == ours


def test_the_sdk_rebuilds_each_error_from_its_json() -> None:
    for cls in errors.ALL_ERRORS:
        rebuilt = sdk.from_json(cls("it failed", hint="try again", limit=3).to_json())
        assert type(rebuilt).__name__ == cls.__name__
        assert (rebuilt.message, rebuilt.hint) == ("it failed", "try again")
        assert rebuilt.details["limit"] == 3


def test_the_tree_in_the_docstring_is_complete() -> None:
    assert errors.__doc__ is not None
    for cls in errors.ALL_ERRORS:
        assert f"{cls.__name__} " in errors.__doc__
        assert f" {cls.http_status} " in errors.__doc__
