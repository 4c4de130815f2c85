"""A conversation with ratings on its messages, or with a pointer to the rated message.

The messages are a list in their order, an object of ids and messages, a tree with each answer inside the message that
it answers, or all records of a file. Each becomes a Node, which knows the message that it answers. Exports hold every
version of a turn. The prompt of a rated answer is therefore its ancestors, not the messages before it.

Reading order: rated_messages, the whole way of a conversation; nodes_of; turns_up_to.
"""

import re
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

from convert.answers import Judged, judge
from convert.layout import Layout
from convert.messages import message, role_of
from convert.paths import elements, opened
from convert.values import Skipped, is_there
from infra.console import BadInput


class Node(NamedTuple):
    """A message of a conversation, and where it stands."""

    id: str
    parent: str | None  # the id of the message that it answers
    raw: object
    where: str


# ---- from a conversation to judged answers -------------------------------------------------------


def rated_messages(layout: Layout, where: str, raw: dict) -> Iterator[Judged]:
    """The answers of the assistant in a conversation, which is a record. Raises Skipped, BadInput."""
    messages = opened(layout.columns["messages"].one(raw))
    nodes = nodes_of(layout, [(where, message) for message in elements(messages)])
    if not nodes:
        raise Skipped("without messages")
    return rated_nodes(layout, nodes, layout.fields_beside(raw), raw)


def rated_nodes(
    layout: Layout, nodes: list[Node], fields: dict, raw: dict | None
) -> Iterator[Judged]:
    """The answers of the assistant among these messages. fields: the other fields of the record. raw: the record with
    the messages; None if each message is a record. Raises Skipped, and BadInput for a fault of no single answer."""
    columns = layout.columns
    by_id = {node.id: node for node in nodes}
    if len(by_id) < len(nodes):
        raise BadInput("id: two messages have the same one")
    replies: dict[str | None, object] = {}  # the user's first message after each answer
    for node in nodes:
        if role_of(layout, node.raw) == "user":
            replies.setdefault(node.parent, node.raw)
    if "rated" in columns:
        nodes = [pointed_at(columns["rated"].one(raw), by_id)]
    rating_ids = set()
    for node in nodes:
        has_its_rating = columns["label"].inner or raw is None
        ratings = [x for _, x in columns["label"].all(node.raw if has_its_rating else raw)]
        judged = Judged(node.where, fields)
        try:
            if not any(map(is_there, ratings)):
                if role_of(layout, node.raw) != "assistant":
                    continue
                raise Skipped("not rated")
            rating_id = columns["rating_id"].one(node.raw) if "rating_id" in columns else None
            if is_there(rating_id) and rating_id in rating_ids:
                raise Skipped("a copy, with the rating of another answer")
            rating_ids.add(rating_id)
            # if the messages are the records of a file, no path has a leading dot
            layout.refuse_unwanted(node.raw, inner=raw is not None)
            *before, judged.answer = turns_up_to(layout, node, by_id)
            judged.fields = {**fields, "prompt": before}
            if node.id in replies:
                with suppress(Skipped):  # no text
                    judged.next = message(layout, replies[node.id])["content"]
            judge(layout, judged, ratings)
        except Skipped as e:
            judged.reason = str(e)
        except BadInput as e:
            judged.fault = str(e)
        yield judged


def pointed_at(pointer: object, by_id: dict[str, Node]) -> Node:
    """The message that a record's label is for, by its id, or by its place if messages have no ids. Raises Skipped,
    BadInput."""
    if not is_there(pointer):
        raise Skipped("not rated")
    if str(pointer) not in by_id:
        raise BadInput(f"rated: {pointer}: no such message")
    return by_id[str(pointer)]


# ---- from a conversation to nodes ----------------------------------------------------------------


def nodes_of(
    layout: Layout, messages: list[tuple[str, object]], above: str | None = None
) -> list[Node]:
    """The messages of a conversation, in the order of the file. messages: each with its file:line. above: the id of the
    message that they answer and lie in."""
    columns = layout.columns
    nodes: list[Node] = []
    for i, (where, raw) in enumerate(messages):
        name = f"{above}.{i}" if above else str(i)
        if "id" in columns:
            name = str(columns["id"].one(raw))
        parent = above
        if "parent" in columns and above is None:
            parent = columns["parent"].one(raw)
        elif nodes and "children" not in columns:
            # without pointers to parents each message answers the one before it
            parent = nodes[-1].id
        # some exports write an id of zeros if there is no parent
        has_parent = is_there(parent) and not re.fullmatch("0{8}[-0]*", str(parent))
        nodes.append(Node(name, str(parent) if has_parent else None, raw, where))
        if "children" in columns:
            inner = [(where, child) for child in elements(columns["children"].one(raw))]
            nodes += nodes_of(layout, inner, name)
    return nodes


def turns_up_to(layout: Layout, node: Node, by_id: dict[str, Node]) -> list[dict]:
    """The turns from the first one to this one, which is an answer of the assistant, in our form. Raises Skipped, and
    BadInput for a loop, a lost parent or another role."""
    upwards = [node]
    ids = {node.id}
    while upwards[-1].parent is not None:
        parent = upwards[-1].parent
        if parent in ids or parent not in by_id:
            raise BadInput(
                f"parent: {parent}: message {upwards[-1].id} answers it, but it is not in the file, or comes later"
            )
        ids.add(parent)
        upwards.append(by_id[parent])
    turns = []
    for ancestor in reversed(upwards):
        # the root of some exports is no message: it has neither role nor text
        if is_there(layout.content.one(ancestor.raw)) or is_there(layout.role.one(ancestor.raw)):
            turns.append(message(layout, ancestor.raw))
    role = turns[-1]["role"] if turns else None
    if role != "assistant":
        raise BadInput(f"rated: message {node.id} is not the assistant's, but {role}'s")
    if not any(turn["role"] == "user" for turn in turns):
        raise Skipped("without a question")
    return turns
