"""The paths of files and batches, with what they take and how they answer."""

from __future__ import annotations

from collections.abc import Mapping

from router_svc.api.batches.answers import BatchList, BatchObject
from router_svc.api.batches.batches_api import BatchBody
from router_svc.api.files.answers import DeletedFile, FileList, FileObject
from router_svc.api.reference.operation import BINARY, Answer, Operation
from router_svc.api.reference.parameters import BATCH_PARAMETER, FILE_PAGE, FILE_PARAMETER, PAGE

#: A file and its purpose.
_FORM = {
    "type": "object",
    "required": ["purpose", "file"],
    "properties": {
        "purpose": {"const": "batch", "description": "What the file is for."},
        "file": {"type": "string", "format": "binary", "description": "The requests of a batch, a line for each."},
    },
}

FILE_OPERATIONS: Mapping[tuple[str, str], Operation] = {
    ("POST", "/v1/files"): Operation(
        tag="Files",
        summary="Stores a file",
        form=_FORM,
        answers={200: Answer(text="The file.", schema=FileObject)},
        errors=(404, 413, 415, 429, 503),
    ),
    ("GET", "/v1/files"): Operation(
        tag="Files",
        summary="The files of the caller's tenant",
        answers={200: Answer(text="Files, in pages.", schema=FileList)},
        parameters=FILE_PAGE,
        errors=(404, 503),
    ),
    ("GET", "/v1/files/{id}"): Operation(
        tag="Files",
        summary="A file, without its content",
        answers={200: Answer(text="The file.", schema=FileObject)},
        parameters=(FILE_PARAMETER,),
        errors=(404, 503),
    ),
    ("DELETE", "/v1/files/{id}"): Operation(
        tag="Files",
        summary="Deletes a file",
        answers={200: Answer(text="It is deleted.", schema=DeletedFile)},
        parameters=(FILE_PARAMETER,),
        errors=(404, 503),
    ),
    ("GET", "/v1/files/{id}/content"): Operation(
        tag="Files",
        summary="The content of a file",
        answers={200: Answer(text="The bytes as they were sent.", media=BINARY, schema={"type": "string"})},
        parameters=(FILE_PARAMETER,),
        errors=(404, 503),
    ),
    ("POST", "/v1/batches"): Operation(
        tag="Files",
        summary="Runs the requests of a file with the lowest priority",
        body=BatchBody,
        answers={200: Answer(text="The batch.", schema=BatchObject)},
        errors=(404, 413, 415, 429, 503),
    ),
    ("GET", "/v1/batches"): Operation(
        tag="Files",
        summary="The batches of the caller's tenant, the latest first",
        answers={200: Answer(text="Batches, in pages.", schema=BatchList)},
        parameters=(PAGE[0], PAGE[2]),
        errors=(404, 503),
    ),
    ("GET", "/v1/batches/{id}"): Operation(
        tag="Files",
        summary="A batch as it is now",
        answers={200: Answer(text="The batch.", schema=BatchObject)},
        parameters=(BATCH_PARAMETER,),
        errors=(404, 503),
    ),
    ("POST", "/v1/batches/{id}/cancel"): Operation(
        tag="Files",
        summary="Ends a batch, and keeps the results that it has",
        answers={200: Answer(text="The batch; as it was if it had ended.", schema=BatchObject)},
        parameters=(BATCH_PARAMETER,),
        errors=(404, 415, 503),
    ),
}
