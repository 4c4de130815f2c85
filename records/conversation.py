"""A conversation whose messages carry ratings, or in which a pointer names the rated message.

The messages are a list in their order, an object whose keys are their ids, a tree in which an answer lies inside
the message that it answers, or all records of a file. Each becomes a Node, which knows the message that it answers.
Exports hold every version of a turn: the prompt of a rated answer is not what stands before it, but its ancestors.

Reading order: rated_messages, the whole way of a conversation; rate_message; Node and nodes_of; ancestors.
"""

import re
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from infra.console import BadInput
from records.answers import Rating, fields_beside
from records.dialogues import content_value, message, role_of, role_value
from records.forms import LABELS
from records.layout import Layout
from records.paths import Skipped, elements, is_there, nearest, opened


class Node(NamedTuple):
    """A message of a conversation, and where it stands."""

    id: str
    parent: str | None  # the id of the message that it answers
    raw: object
    where: str


# ---- from a conversation to ratings --------------------------------------------------------------


def rated_messages(
    layout: Layout, where: str, raw: dict | list, places: list[str]
) -> Iterator[Rating | str]:
    """A Rating for each rated message of the assistant, or a text that says why it is left out.

    raw: a record, or a list of messages: those of a whole file. places: file:line of each message of such a file;
    else empty. Raises Skipped, BadInput.
    """
    columns = layout.columns
    label = columns.get("label")
    nodes = nodes_of(layout, where, raw, places)
    by_id = {node.id: node for node in nodes}
    if len(by_id) < len(nodes):
        twice = Counter(node.id for node in nodes).most_common(1)[0][0]
        raise BadInput(f"id: {twice}: two messages have it")
    if label is None:
        raise BadInput("data.columns: label: missing: where is the rating?")
    has_ratings_in_messages = label.inner or isinstance(raw, list)
    rated_nodes = nodes
    ratings = []
    if "rated" in columns:
        ratings = [value for _, value in label.all(raw)]
        # Skipped for a record without a rating: it may have no pointer, either
        layout.labels.of(ratings)
        rated_nodes = [pointed_at(columns["rated"].one(raw), nodes, by_id)]
    fields = {}
    if isinstance(raw, dict):
        fields = {"conversation_id": where, **fields_beside(layout, raw)}
    for node in rated_nodes:
        if has_ratings_in_messages:
            ratings = [value for _, value in label.all(node.raw)]
            if not any(map(is_there, ratings)):
                if role_of(layout, node.raw) == "assistant":
                    yield "not rated"
                continue
        try:
            # where the messages are the records of a file, no path has a leading dot
            layout.refuse_unwanted(node.raw, inner=isinstance(raw, dict))
            meaning = layout.labels.of(ratings)
            turns = turns_up_to(layout, node, by_id)
        except Skipped as e:
            yield str(e)
            continue
        yield rate_message(layout, node, turns, fields, meaning, ratings)


def rate_message(
    layout: Layout, node: Node, turns: list[dict], fields: dict, meaning: str, ratings: list
) -> Rating | str:
    """The Rating of a message. turns: those before it and itself; fields: what the record says beside; meaning: up
    or down, which is what data.labels says of the ratings. Raises BadInput where the message is not the assistant's."""
    role = turns[-1]["role"] if turns else None
    if role != "assistant":
        raise BadInput(f"rated: message {node.id} is not the assistant's, but {role}'s")
    *before, answer = turns
    if not any(turn["role"] == "user" for turn in before):
        return "without a question"
    extra = {}
    for name in layout.extra:
        column = layout.columns.get(name)
        if column is not None and column.inner:
            extra[name] = column.one(node.raw)
    value = ratings[0] if len(ratings) == 1 else meaning
    prompt = {**fields, **extra, "prompt": before}
    return Rating(node.where, prompt, answer, LABELS[meaning], value)


def pointed_at(pointer: object, nodes: list[Node], by_id: dict[str, Node]) -> Node:
    """The message that a record's label is for, by its id or its place. Raises Skipped, BadInput."""
    if not is_there(pointer):
        raise Skipped("not rated")
    if str(pointer) in by_id:
        return by_id[str(pointer)]
    if isinstance(pointer, int) and -len(nodes) <= pointer < len(nodes):
        return nodes[pointer]
    raise BadInput(
        f"rated: {pointer}: no such message; there is {nearest(str(pointer), list(by_id))}"
    )


# ---- from a conversation to nodes ----------------------------------------------------------------


def nodes_of(layout: Layout, where: str, raw: dict | list, places: list[str]) -> list[Node]:
    """The messages of a conversation, in the order of the file. Arguments as in rated_messages.
    Raises Skipped, BadInput."""
    columns = layout.columns
    messages = raw if isinstance(raw, list) else columns["messages"].one(raw)
    if isinstance(messages, str):
        messages = opened(messages)
    if not is_there(messages):
        raise Skipped("without messages")
    if not isinstance(messages, list | dict):
        raise BadInput(f"messages: expected a list, got {messages!r:.50}")
    if "children" in columns:
        return nested_nodes(layout, where, elements(messages, ""), None)
    keys = list(messages) if isinstance(messages, dict) else range(len(messages))
    nodes: list[Node] = []
    for i, (key, raw_message) in enumerate(zip(keys, elements(messages, ""))):
        name = str(columns["id"].one(raw_message) if "id" in columns else key)
        # without pointers to parents each message answers the one before it
        parent = nodes[-1].id if nodes else None
        if "parent" in columns:
            parent = columns["parent"].one(raw_message)
        place = places[i] if places else f"{where}:{name}"
        nodes.append(Node(name, parent_id(parent), raw_message, place))
    return nodes


def nested_nodes(layout: Layout, where: str, messages: list, above: str | None) -> list[Node]:
    """The messages of a tree in which an answer lies inside the message that it answers (`above`: its id)."""
    columns = layout.columns
    nodes = []
    for i, raw_message in enumerate(messages):
        name = f"{above}.{i}" if above else str(i)
        if "id" in columns:
            name = str(columns["id"].one(raw_message))
        parent = above
        if above is None and "parent" in columns:
            parent = columns["parent"].one(raw_message)
        nodes.append(Node(name, parent_id(parent), raw_message, f"{where}:{name}"))
        children = elements(columns["children"].one(raw_message), "")
        nodes += nested_nodes(layout, where, children, name)
    return nodes


def parent_id(parent: object) -> str | None:
    """The id of a message's parent; None where it has none. Some exports write an id of zeros for that."""
    if not is_there(parent) or re.fullmatch("0{8}[-0]*", str(parent)):
        return None
    return str(parent)


# ---- the turns before a message ------------------------------------------------------------------


def turns_up_to(layout: Layout, node: Node, by_id: dict[str, Node]) -> list[dict]:
    """The turns from the first one to this one, in our form. Raises Skipped, BadInput."""
    turns = []
    for ancestor in ancestors(node, by_id):
        # the root of some exports is no message: it has neither role nor text
        content = content_value(layout, ancestor.raw)
        if is_there(content) or is_there(role_value(layout, ancestor.raw)):
            turns.append(message(layout, ancestor.raw))
    return turns


def ancestors(node: Node, by_id: dict[str, Node]) -> list[Node]:
    """The messages from the first one to this one. Raises BadInput for a loop or a lost parent."""
    upwards = [node]
    ids = {node.id}
    while upwards[-1].parent is not None:
        parent = upwards[-1].parent
        if parent in ids:
            raise BadInput(f"parent: {parent}: a loop: the message comes before itself")
        if parent not in by_id:
            raise BadInput(
                f"parent: {parent}: message {upwards[-1].id} answers it, but it is not in the file"
            )
        ids.add(parent)
        upwards.append(by_id[parent])
    return upwards[::-1]
