"""A coordinator whose store has lost files that its database names."""

import asyncio
import shutil

import pytest

from coordinator.storage.errors import StoreUnusable
from tests.support.housed import housed
from tests.support.stored_job import make_job


def test_a_store_without_the_files_of_its_database_is_called_that(tmp_path, monkeypatch):
    async def run():
        async with housed(tmp_path, monkeypatch) as house:
            runtime = house.serving.runtime
            document = make_job("desk", runtime.store)
            await runtime.create_job(document.digest(), document)
            folder, digest = house.folder, document.digest()
        shutil.rmtree(folder.store)
        with pytest.raises(StoreUnusable) as refused:
            async with housed(tmp_path, monkeypatch, again=True):
                pass
        said = str(refused.value)
        assert said.startswith(f"{folder.store.resolve()} has lost files that the database names, such as")
        assert f"the document of desk ({digest.hex()})" in said
        assert "correct store_url, put the store back from a copy, or restore a backup (docs/backup.md)" in said

    asyncio.run(run())
