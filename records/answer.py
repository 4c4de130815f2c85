"""One record of an answer: generate.py, the page for thumbs and the iterations of spin.py and online.py write it.

It holds all that the model was asked. So kto.py trains on exactly the prompt that was answered, and two prompts are
equal if they are equal in everything that the model was asked.
"""

import json

from records.forms import Record, as_turns
from records.tokenizer import Tokenizer


def asked_record(record: Record, tokenizer: Tokenizer, by_template: bool) -> Record:
    """The record as the model is asked: by the chat template with its settings and its day, or as a plain text."""
    if by_template:
        return tokenizer.chat.asked(record._replace(prompt=as_turns(record.prompt)))
    return record._replace(tools=None, template_kwargs=None, date=None)


def fields_of_prompt(record: Record) -> dict:
    """What a line of a file says of a prompt. A record that is read from this line has the same prompt."""
    asked = {
        "prompt": record.prompt,
        "tools": record.tools,
        "chat_template_kwargs": record.template_kwargs,
        "date": record.date,
    }
    asked = {name: value for name, value in asked.items() if value is not None}
    fields = {"prompt": record.prompt} | record.beside | record.extra | asked
    return json.loads(json.dumps(fields, default=str))  # a table has days, too


def prompt_key(record: Record) -> str:
    """To see which prompts are equal."""
    without_empty = record._replace(template_kwargs=record.template_kwargs or None)
    return json.dumps(fields_of_prompt(without_empty), sort_keys=True)


def answer_fields(completion: str, cut: bool) -> dict:
    """What a line says of the answer, behind fields_of_prompt."""
    return {"completion": completion, "cut": cut}
