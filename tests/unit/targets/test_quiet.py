"""What the converter says is swallowed while it is at work, and only then; its errors come through."""

from __future__ import annotations

import logging
import sys
import warnings

import pytest

from needle_export.targets.quiet import quietly


def talk() -> None:
    sys.stdout.write("to stdout\n")
    sys.stderr.write("to stderr\n")
    logging.getLogger("somebody").critical("logged")
    warnings.warn("a warning", UserWarning, stacklevel=2)


def test_nothing_is_heard_of_it(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with quietly():
            talk()
    assert capsys.readouterr() == ("", "")
    assert not caplog.records and not seen


def test_afterwards_everything_is(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    streams = sys.stdout, sys.stderr
    with quietly():
        talk()
    assert (sys.stdout, sys.stderr) == streams
    with pytest.warns(UserWarning, match="a warning"):
        talk()
    assert capsys.readouterr() == ("to stdout\n", "to stderr\n")
    assert [record.message for record in caplog.records] == ["logged"]


def test_an_error_comes_through_and_the_noise_comes_back(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(KeyError, match="found"), quietly():
        raise KeyError("found")
    logging.getLogger("somebody").error("logged")
    assert [record.message for record in caplog.records] == ["logged"]


def test_one_within_another_and_a_level_that_was_set(caplog: pytest.LogCaptureFixture) -> None:
    before = logging.root.manager.disable
    try:
        logging.disable(logging.INFO)
        with quietly():
            with quietly():
                talk()
            logging.getLogger("somebody").critical("logged")
        assert logging.root.manager.disable == logging.INFO
    finally:
        logging.disable(before)
    assert not caplog.records
