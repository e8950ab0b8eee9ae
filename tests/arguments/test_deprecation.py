"""Names that will be removed: one warning at the caller's line, and no name that outlives its version."""

import re
import warnings
from pathlib import Path

import pytest

import bayesify
from bayesify.arguments.deprecation import warn_deprecated

SOURCE = Path(bayesify.__file__).parent


def old_function():
    warn_deprecated("old_function()", "new_function()", since="0.2", removed_in="0.4")
    return 1


def test_the_warning_names_the_replacement_and_both_versions():
    message = "old_function() is deprecated since bayesify 0.2 and will be removed in 0.4; use new_function()"
    with pytest.warns(FutureWarning, match=re.escape(message)):
        assert old_function() == 1


def test_the_warning_points_at_the_first_line_outside_of_the_package(tmp_path, monkeypatch):
    """A stand-in for a module of the package that calls the helper two functions deep."""
    monkeypatch.setattr("bayesify.arguments.deprecation.PACKAGE", str(tmp_path))
    scope = {"warn": warn_deprecated}
    inside = 'def inner():\n    warn("a", "b", since="0.2", removed_in="0.4")\n\ndef outer():\n    inner()\n'
    exec(compile(inside, str(tmp_path / "module.py"), "exec"), scope)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        scope["outer"]()
    assert [warning.filename for warning in caught] == [__file__]


def overdue(text, version):
    """Versions of removal in a program that a version has reached."""
    found = re.findall(r"removed_in=\"(\d+)\.(\d+)\"", text)
    return [removal for removal in found if tuple(map(int, removal)) <= tuple(map(int, version.split(".")[:2]))]


def test_what_was_to_be_removed_is_gone():
    programs = [path for path in SOURCE.rglob("*.py") if overdue(path.read_text(), bayesify.__version__)]
    assert programs == []
    assert overdue('warn_deprecated("a", "b", since="0.2", removed_in="0.4")', "0.4.0")
    assert not overdue('warn_deprecated("a", "b", since="0.2", removed_in="0.10")', "0.4.0")
