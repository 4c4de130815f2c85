"""Dialogues of six kinds, to be tokenised by several programs: {kind: [record, ...]}."""


def user(text):
    return {"role": "user", "content": text}


def bot(text, **more):
    return {"role": "assistant", "content": text, **more}


SYSTEM = {"role": "system", "content": "You answer  briefly."}
CALL = {"name": "weather", "arguments": {"city": "Paris", "days": 2}}
CALLS = [{"id": "abcdefg12", "type": "function", "function": CALL}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = {"name": "weather", "description": "Tells <the> weather.", "parameters": PARAMETERS}
TOOLS = [{"type": "function", "function": WEATHER}]
RESULT = {"role": "tool", "name": "weather", "tool_call_id": "abcdefg12", "content": '{"c": 21}'}
THOUGHT = "<think>\nIs it so? Could be.\n</think>\n\nYes, it is so."
LONG = "naïve  words\n\n\tand 1234567 digits, don't 'tis 日本 \U0001f642"

RECORDS = {
    "plain": [
        {"prompt": "The answer is", "completion": " could, or not"},
        {"prompt": "The answer is:\n", "completion": "Could, or not"},
        {"prompt": "Once", "completion": ""},
        {"prompt": LONG, "completion": LONG},
    ],
    "chat": [
        {"prompt": [user("Hello there")], "completion": [bot("Could, would")]},
        {"prompt": [user(" Hello ")], "completion": [bot(" spaces before and after ")]},
        {"prompt": [user(LONG)], "completion": [bot(LONG)]},
        {"prompt": [user("x")], "completion": [bot("7.")]},
    ],
    "system": [
        {"prompt": [SYSTEM, user("Who?")], "completion": [bot("The model")]},
    ],
    "multi-turn": [
        {
            "prompt": [user("One?"), bot("Two, three."), user("And then?")],
            "completion": [bot("Four - could be five")],
        },
    ],
    "tool results": [
        {
            "prompt": [user("Weather in Paris?")],
            "completion": [bot(None, tool_calls=CALLS)],
            "tools": TOOLS,
        },
        {
            "prompt": [user("Weather in Paris?"), bot(None, tool_calls=CALLS), RESULT],
            "completion": [bot("It would be 21 degrees.")],
            "tools": TOOLS,
        },
    ],
    "thinking": [
        {"prompt": [user("Is it?")], "completion": [bot(THOUGHT)]},
        {"prompt": [user("Is it?"), bot(THOUGHT), user("Sure?")], "completion": [bot(THOUGHT)]},
        {
            "prompt": [user("Is it?")],
            "completion": [bot("Yes.")],
            "chat_template_kwargs": {"enable_thinking": False},
        },
    ],
}
