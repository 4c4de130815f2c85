"""One record of an answer: generate.py, the page for thumbs and the iterations of spin.py and online.py write it.

It holds everything that the model was asked. kto.py therefore trains on exactly the prompt that was answered. Two
prompts are equal if everything that the model was asked is equal.
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
    """The fields of a prompt in a file. A record that is read from these fields has the same prompt."""
    prompt_fields = {
        "prompt": record.prompt,
        "tools": record.tools,
        "chat_template_kwargs": record.template_kwargs,
        "date": record.date,
    }
    prompt_fields = {name: value for name, value in prompt_fields.items() if value is not None}
    fields = {"prompt": record.prompt} | record.beside | record.extra | prompt_fields
    return json.loads(json.dumps(fields, default=str))  # a table has days, too


def prompt_key(record: Record) -> str:
    """A key that is equal for equal prompts."""
    without_empty = record._replace(template_kwargs=record.template_kwargs or None)
    return json.dumps(fields_of_prompt(without_empty), sort_keys=True)


def answer_fields(completion: str, cut: bool) -> dict:
    """The fields of the answer in a file, after fields_of_prompt."""
    return {"completion": completion, "cut": cut}
