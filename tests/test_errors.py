"""Errors are picklable and are the exceptions that callers already catch."""

import pickle

import pytest

from dask_redist import errors

FAMILY = {
    errors.RedistError: Exception,
    errors.LayoutError: ValueError,
    errors.AdmissionError: MemoryError,
    errors.RankLostError: RuntimeError,
    errors.RunTimeoutError: TimeoutError,
    errors.ChunkMismatchError: TypeError,
}


def test_every_error_is_listed_here() -> None:
    assert {getattr(errors, name) for name in errors.__all__} == set(FAMILY)


@pytest.mark.parametrize("kind", FAMILY, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_error_survives_pickling(kind: type[errors.RedistError], protocol: int) -> None:
    copy = pickle.loads(pickle.dumps(kind("rank 3 has 7 bytes"), protocol))
    assert type(copy) is kind
    assert str(copy) == "rank 3 has 7 bytes"
    assert isinstance(copy, errors.RedistError)
    assert isinstance(copy, FAMILY[kind])


@pytest.mark.parametrize("kind", FAMILY, ids=lambda kind: kind.__name__)
def test_error_can_be_made_as_tblib_does(kind: type[errors.RedistError]) -> None:
    assert type(kind.__new__(kind)) is kind


class TwoArguments(Exception):
    """Can be pickled, and not be read."""

    def __init__(self, rank: int, what: str) -> None:
        super().__init__(f"rank {rank}: {what}")


def test_an_error_that_cannot_be_read_goes_in_words() -> None:
    found = errors.load(errors.dump(TwoArguments(3, "no luck")))
    assert type(found) is errors.RedistError
    assert "TwoArguments('rank 3: no luck')" in str(found)
    same = errors.load(errors.dump(ValueError("as it is")))
    assert (type(same), str(same)) == (ValueError, "as it is")


def test_an_error_of_a_class_that_is_not_here_is_told_all_the_same() -> None:
    assert "cannot be read here" in str(errors.load(b"no pickle"))
