"""Runs the suite of the token desk against the desks in memory and in the database."""

import itertools

import pytest

from coordinator.domain.tokens import StoredToken
from coordinator.storage import records
from tests.support.databases import empty_database
from tests.support.token_desk import MemoryTokenDesk, TokenDeskSuite


class TestMemoryTokenDesk(TokenDeskSuite):
    @pytest.fixture
    def desk(self):
        return MemoryTokenDesk()

    @pytest.fixture
    def invite(self, desk):
        numbers = itertools.count()

        def invite(member, secret_hash, expires):
            token_id = f"{next(numbers):024x}"
            desk.add(StoredToken(token_id, member, secret_hash, expires))
            return token_id

        return invite


def test_a_stored_token_does_not_print_its_hash(now):
    assert "hash" not in repr(StoredToken("0" * 24, "north", b"h" * 32, now))


class TestDatabaseTokenDesk(TokenDeskSuite):
    @pytest.fixture
    def database(self, tmp_path):
        database = empty_database(tmp_path)
        yield database
        database.close()

    @pytest.fixture
    def desk(self, database):
        return records.DatabaseTokenDesk(database)

    @pytest.fixture
    def invite(self, database, now):
        numbers = itertools.count()

        def invite(member, secret_hash, expires):
            token_id = f"{next(numbers):024x}"
            ends, made = (int(moment.timestamp() * 1000) for moment in (expires, now))
            database.run_now(lambda s: records.invite(s, member, token_id, secret_hash, ends, made))
            return token_id

        return invite
