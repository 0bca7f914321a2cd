"""Tells callers to retry while the database or the store fails, or a blob is damaged, and logs why.

The status is UNAVAILABLE, which members wait out as they wait for a restarting coordinator. The failure's own sentence
names hosts and files of this machine, so only the log gets it.
"""

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import structlog

from coordinator.storage.errors import BlobCorrupt, DatabaseUnusable, StoreUnusable
from tacit.reason import Reason
from tacit.status import METADATA_KEY

__all__ = ["come_again"]

log = structlog.get_logger("coordinator")

_SENTENCE = "the coordinator cannot use its {} now, and its log says why; try again in a moment"


@contextlib.asynccontextmanager
async def come_again(context: grpc.aio.ServicerContext[Any, Any], **fields: str) -> AsyncIterator[None]:
    """Ends the call if the database or the store fails inside. The log gets the failure and `fields`."""
    try:
        yield
    except (DatabaseUnusable, StoreUnusable, BlobCorrupt) as error:
        event = "blob_corrupt" if isinstance(error, BlobCorrupt) else "storage_failed"
        log.error(event, detail=error.sentence, **fields)
        what = "database" if isinstance(error, DatabaseUnusable) else "store"
        told = (*(context.trailing_metadata() or ()), (METADATA_KEY, Reason.Name(Reason.REASON_INTERNAL)))
        await context.abort(grpc.StatusCode.UNAVAILABLE, _SENTENCE.format(what), told)
