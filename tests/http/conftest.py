import pytest

from tests.http.served import serve


@pytest.fixture(scope="session")
def served(tmp_path_factory):
    """Shared by all tests that do not change it."""
    with serve(tmp_path_factory.mktemp("served")) as found:
        yield found
