"""Items of stored responses that a request names by their ids."""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.base.errors import NotFound, RequestError, TooLarge
from router_svc.api.responses.item_ids import ItemPosition, position_of
from router_svc.api.responses.items import Item, ItemReference, read_items
from router_svc.api.responses.stored import StoredResponses
from router_svc.api.text_threads import INLINE_CHARACTERS, TextThreads
from router_svc.state.response_record import ResponseRecord, record_key

#: Responses to whose items a request may refer: each is read.
MAX_RESPONSES = 16
#: Characters of all items that a request refers to.
MAX_CHARACTERS = 8 * 1024**2


async def resolved(items: Sequence[Item], stored: StoredResponses, tenant: str, threads: TextThreads) -> list[Item]:
    """The items, in which each reference is replaced by the item that it refers to.

    Raises `NotFound` for one that the tenant does not have, `RequestError`, `TooLarge` and `StoreError`.
    """
    positions = _positions([item for item in items if isinstance(item, ItemReference)])
    if not positions:
        return [*items]
    records: dict[str, ResponseRecord | None] = {}
    for position in positions.values():
        if position.response_id not in records:
            records[position.response_id] = await stored.read(record_key(tenant, position.response_id))

    def read() -> list[Item]:
        found = [_found(records[position.response_id], position, each) for each, position in positions.items()]
        by_id = dict(zip(positions, read_items(found), strict=True))
        if sum(len(item.model_dump_json()) for item in by_id.values()) > MAX_CHARACTERS:
            raise TooLarge(
                f"The items that `input` refers to have more than {MAX_CHARACTERS} characters. Refer to fewer.",
                param="input",
            )
        return [by_id[item.id] if isinstance(item, ItemReference) else item for item in items]

    return await threads.run(INLINE_CHARACTERS + 1, read)


def _positions(references: Sequence[ItemReference]) -> dict[str, ItemPosition]:
    positions: dict[str, ItemPosition] = {}
    for reference in references:
        position = position_of(reference.id)
        if position is None:
            raise _not_found(reference.id)
        if reference.id in positions:
            raise RequestError(f"`input` has the item `{reference.id[:200]}` twice. Remove one.", param="input")
        positions[reference.id] = position
    if len({position.response_id for position in positions.values()}) > MAX_RESPONSES:
        raise RequestError(
            f"`input` refers to items of more than {MAX_RESPONSES} responses. Send the items themselves, or "
            "`previous_response_id`.",
            param="input",
        )
    return positions


def _found(record: ResponseRecord | None, position: ItemPosition, given: str) -> object:
    items = () if record is None else record.items if position.is_input else record.response.output
    if position.index >= len(items):
        raise _not_found(given)
    return items[position.index]


def _not_found(given: str) -> NotFound:
    return NotFound(
        f"`input`: there is no item `{given[:200]}`: its response was not stored, was deleted, or is too old.",
        param="input",
    )
