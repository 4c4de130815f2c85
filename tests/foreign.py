"""Rows as tools and published data sets have them, all invented: a few for each file of convert/forms and for each
form that needs none.

name of the file in convert/forms: (file name, records, the examples of kto.py, the pairs of dpo.py, what is dropped).
An example is written as `S: system | U: user | A: answer || the rated answer +` (+ up, - down), a pair as
`U: user || chosen >> rejected`. None: dpo.py reads no pairs there."""

import json

from tokens import bot, user


def node(name, parent, role, text, **more) -> dict:
    return {"id": name, "parentId": parent, "role": role, "content": text, **more}


def chat_of(*nodes, **params) -> dict:
    """Open WebUI's snapshot of a chat."""
    messages = {x["id"]: x for x in nodes}
    return {"chat": {"chat": {"params": params, "history": {"messages": messages}}}}


def click(rating, message, snapshot, **data) -> dict:
    meta = {"message_id": message, "message_index": 2}
    return {
        "type": "rating",
        "data": {"rating": rating, **data},
        "meta": meta,
        "snapshot": snapshot,
    }


TEA = [node("u1", None, "user", "Tea?"), node("a1", "u1", "assistant", "Hot.")]
TWICE = [*TEA, node("a2", "u1", "assistant", "Green."), node("u2", "a1", "user", "And?")]
LATER = [*TWICE, node("a3", "u2", "assistant", "Wait.")]
THOUGHT = '<details type="reasoning" done="true">\n<summary>Thought</summary>\n&gt; Hm.\n</details>\nMint.'
CALL = THOUGHT.replace("reasoning", "tool_calls").removesuffix("Mint.")
CALLS = f"I look.\n\n{CALL}\n{THOUGHT}"
RESPONSES = [
    {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]},
    {"type": "function_call", "name": "w", "arguments": "{}"},
    {"type": "function_call_output", "output": [{"type": "input_text", "text": "7"}]},
    {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "Black."}],
    },
]
IMAGE = [{"type": "image", "url": "data:image/png;base64,iVBORw0KGgo="}]


def libre(name, parent, is_user, text, **more) -> dict:
    zeros = "00000000-0000-0000-0000-000000000000"
    flags = {"isCreatedByUser": is_user, "unfinished": False, "error": False}
    return {"messageId": name, "parentMessageId": parent or zeros, "text": text, **flags, **more}


PARTS = [
    {"type": "think", "think": "Hm."},
    {"type": "text", "text": "Two "},
    {"type": "text", "text": "spoons."},
]
COFFEE = [
    libre("m1", None, True, "Coffee?"),
    libre("m2", "m1", False, "Boil it.", feedback={"rating": "thumbsDown"}),
    libre("m3", "m1", False, "Brew it.", feedback={"rating": "thumbsUp", "tag": {"key": "x"}}),
    libre("m4", "m3", True, "How mch?"),
    libre("m5", "m4", False, "Six.", feedback=None),
    libre("m6", "m3", True, "How much?"),
    libre("m7", "m6", False, "", content=PARTS, feedback={"rating": "thumbsUp"}),
    libre("m8", "m6", False, "Tw", feedback={"rating": "thumbsDown"}) | {"unfinished": True},
    libre("m9", None, True, "Tea?"),
    libre("m10", "m9", False, ":::thinking\nHm.\n:::\n\nHot.", feedback={"rating": "thumbsUp"}),
    libre("m11", None, True, "What is it?", files=[{"type": "image/png", "file_id": "x"}]),
    libre("m12", "m11", False, "A cup.", feedback={"rating": "thumbsUp"}),
]


def nested(messages: list[dict], parent: str) -> list[dict]:
    inside = [x for x in messages if x["parentMessageId"] == parent]
    return [x | {"children": nested(messages, x["messageId"])} for x in inside]


COFFEES = [
    "S: Barista. | U: Coffee? || Boil it. -",
    "S: Barista. | U: Coffee? || Brew it. +",
    "S: Barista. | U: Coffee? | A: Brew it. | U: How much? || Two spoons. +",
    "S: Barista. | U: Tea? || Hot. +",
]
DIFY = "message_id,user_query,ai_response,feedback_rating,feedback_rating_raw,feedback_source\n"
DIFY += f'1,Tube?,{"x" * 500}...,👍,like,user\n2,Chain?,"Oil it.\nWipe it.",👍,like,user\n'
THINKING = (
    '<details style=""color:gray;"" open> <summary> Thinking... </summary>\nHm.\n</details>\n\n'
)
DIFY += f'4,Bell?,"{THINKING}Ring.",👍,like,user\n'
DIFY += '2,Chain?,"Oil it.\nWipe it.",👎,dislike,admin\n3,Tyre?,Six bar.,👎,dislike,user\n'


def span(**more) -> dict:
    dialogue = [{"role": "system", "content": "Sew."}, user("Jeans?")]
    return {"type": "GENERATION", "input": dialogue, "output": bot("Denim."), **more}


def run(messages, answer, feedback) -> dict:
    outputs = answer and {
        "choices": [{"message": {"role": "assistant", "content": answer, "refusal": None}}]
    }
    stats = feedback is not None and {"user_score": {"n": 1, "avg": feedback}} or None
    return {"inputs": {"messages": messages}, "outputs": outputs, "feedback_stats": stats}


def task(question, *ratings) -> dict:
    """Label Studio's; a rating of None: the annotator skipped it."""
    names = {"from_name": "quality", "type": "rating"}, {"from_name": "speed", "type": "rating"}
    annotations = []
    for rating in ratings:
        values = [names[1] | {"value": {"rating": 1}}, names[0] | {"value": {"rating": rating}}]
        annotations.append({"result": values if rating else [], "was_cancelled": rating is None})
    return {"annotations": annotations, "data": {"prompt": question, "answer": "Eight."}}


def withdrawn(annotation: dict) -> dict:
    """An annotation that was filled in, and then skipped."""
    return annotation | {"was_cancelled": True}


def hh(*turns: str) -> str:
    names = ("Human", "Assistant")
    return "".join(f"\n\n{names[i % 2]}: {text}" for i, text in enumerate(turns))


def arena(winner, a, b, turn=1) -> dict:
    dialogues = [
        [user("Rain?"), bot(x[0]), *([user("More."), bot(x[1])] if x[1:] else [])] for x in (a, b)
    ]
    return {
        "winner": winner,
        "conversation_a": dialogues[0],
        "conversation_b": dialogues[1],
        "turn": turn,
    }


def lists(prompt, a, b, *votes) -> dict:
    names = ("winner_model_a", "winner_model_b", "winner_tie")
    texts = {"prompt": prompt, "response_a": a, "response_b": b}
    return {name: json.dumps(text) for name, text in texts.items()} | dict(zip(names, votes))


def marked(rating: str, text: str) -> dict:
    return {
        "response": text,
        "annotations": {"helpfulness": {"Rating": rating}, "honesty": {"Rating": "5"}},
    }


def oasst(name, parent, role, text, quality=None, rank=None) -> dict:
    labels = {"name": ["spam", "quality"], "value": [0.0, quality]} if quality is not None else None
    names = {"message_id": name, "parent_id": parent, "role": role, "text": text}
    return {**names, "labels": labels, "rank": rank}


TREE = [
    oasst("q", None, "prompter", "Egg?", 0.9),
    oasst("b", "q", "assistant", "Raw.", 0.1, 1),
    oasst("a", "q", "assistant", "Boil it.", 0.9, 0),
    oasst("r", "a", "prompter", "How long?"),
    oasst("c", "r", "assistant", "Eight minutes.", 0.5, 0),
]


def in_parts(texts: list[str]) -> list[dict]:
    """Turns of a user and an assistant, whose contents are parts in a table."""
    empty = {"image": None, "mimeType": None}
    contents = [[{"type": "text", "text": text, **empty}] for text in texts]
    return [{"role": role, "content": x} for role, x in zip(("user", "assistant"), contents)]


PRIME = {"prompt": "Prime?", "response_0": "Eleven.", "response_1": "Twelve."}
TWO = {"response1": "Rain.", "response2": "It rains."}

PRESETS = {
    "openwebui": (
        "feedback.json",
        [
            click(None, "a1", chat_of(*TEA)),
            click("1", "a4", chat_of(TEA[0], node("a4", "u1", "assistant", THOUGHT))),
            click(1, "a2", chat_of(*TWICE), details={"rating": 2}),
            click(-1, "a1", chat_of(*LATER, system="Brew.")),
            click(1, "a3", chat_of(*LATER)),
            click(-1, "a5", chat_of(TEA[0], node("a5", "u1", "assistant", CALLS))),
            click(1, "a1", chat_of(TEA[0] | {"files": IMAGE}, TEA[1] | {"files": []})),
            click(1, "a6", chat_of(TEA[0], node("a6", "u1", "assistant", "", output=RESPONSES))),
        ],
        [
            "U: Tea? || Mint. +",
            "U: Tea? || Green. +",
            "S: Brew. | U: Tea? || Hot. -",
            "U: Tea? | A: Hot. | U: And? || Wait. +",
            "U: Tea? || I look.\n\nMint. -",
            "U: Tea? || Black. +",
        ],
        None,
        {"dropped: not rated": 1, "dropped: with a file beside a message": 1},
    ),
    "openwebui_chats": (
        "all-chats.json",
        [
            {
                "id": "c1",
                "title": "Tea",
                **chat_of(
                    *TEA,
                    node("a2", "u1", "assistant", THOUGHT, annotation={"rating": 1, "tags": []}),
                    node("u2", "a1", "user", "And?"),
                    node("a3", "u2", "assistant", "Wait.", annotation={"rating": -1}),
                    node("a4", "u2", "assistant", "Milk.", annotation={"rating": 0}),
                )["chat"],
            },
            {"id": "c2", "title": "None", **chat_of(*TEA, system="Brew.")["chat"]},
        ],
        ["U: Tea? || Mint. +", "U: Tea? | A: Hot. | U: And? || Wait. -"],
        None,
        {"dropped: not rated": 2, "dropped by --labels": 1},
    ),
    "librechat": (
        "chat.json",
        {"branches": True, "options": {"promptPrefix": "Barista."}, "messages": COFFEE},
        COFFEES,
        ["S: Barista. | U: Coffee? || Brew it. >> Boil it."],
        {
            "dropped: not rated": 1,
            "dropped by --where": 1,
            "dropped: with a file beside a message": 1,
        },
    ),
    "dify": (
        "feedback.csv",
        DIFY,
        [
            "U: Chain? || Oil it.\nWipe it. +",
            "U: Bell? || Ring. +",
            "U: Tyre? || Six bar. -",
        ],
        None,
        {"dropped by --where": 2},
    ),
    "langfuse": (
        "spans.jsonl",
        [
            span(**{"user-feedback": [1]}),
            span(**{"user-feedback": [0], "output": json.dumps(bot("Wool."))}),
            span(**{"user-feedback": None}),
            span(**{"user-feedback": [0.5]}),
            span(**{"user-feedback": [1, 0]}),
            span(**{"user-feedback": [0], "output": None}),
            {
                "type": "SPAN",
                "input": {"query": "x"},
                "output": "3 documents",
                "user-feedback": [1],
            },
        ],
        ["S: Sew. | U: Jeans? || Denim. +", "S: Sew. | U: Jeans? || Wool. -"],
        None,
        {
            "dropped: not rated": 1,
            "dropped by --labels": 1,
            "dropped by --where": 1,
            "dropped: with an empty answer": 1,
            "dropped: whose raters disagree": 1,
        },
    ),
    "langsmith": (
        "runs.jsonl",
        [
            run([user("Steep?")], "Yes.", 1.0),
            run([user("Steep?"), bot("Yes."), user("Far?")], "No.", 0.0),
            run([user("Water?")], "There.", None),
            run([user("Cows?")], "Rarely.", 0.5),
            run([user("Map?")], None, 0.0),
        ],
        ["U: Steep? || Yes. +", "U: Steep? | A: Yes. | U: Far? || No. -"],
        None,
        {"dropped: not rated": 1, "dropped by --labels": 1, "dropped: with an empty answer": 1},
    ),
    "labelstudio": (
        "tasks.json",
        [
            task("Spider?", 5),
            task("Bee?", 1, None),
            task("Moth?", 5, 2),
            task("Ant?", None),
            task("Snail?", 3),
            task("Crab?", 1)
            | {
                "annotations": [withdrawn(x) for x in task("", 5)["annotations"]]
                + task("", 1)["annotations"]
            },
        ],
        ["U: Spider? || Eight. +", "U: Bee? || Eight. -", "U: Crab? || Eight. -"],
        None,
        {"dropped: whose raters disagree": 1, "dropped: not rated": 1, "dropped by --labels": 1},
    ),
    "hh_rlhf": (
        "hh.jsonl",
        [
            {
                "chosen": hh("Hi", "Hello!", "Rain?", "Drip."),
                "rejected": hh("Hi", "Hello!", "Rain?", "Rain."),
            },
            {"chosen": hh("Hi", "Hello!"), "rejected": hh("Ho", "Hello?")},
            {"chosen": hh("Hi", "Hello!", "Well?"), "rejected": hh("Hi", "Ho!")},
        ],
        ["U: Hi | A: Hello! | U: Rain? || Drip. +", "U: Hi | A: Hello! | U: Rain? || Rain. -"],
        ["U: Hi | A: Hello! | U: Rain? || Drip. >> Rain."],
        {
            "dropped: whose earlier turns differ": 1,
            "dropped: whose last turn is not the assistant's": 1,
        },
    ),
    "full_hh_rlhf": (
        "hh.jsonl",
        [
            {
                "prompt": hh("Rain?") + "\n\nAssistant:",
                "response": " Drip.",
                "chosen": " Drip.",
                "rejected": " Rain.",
            }
        ],
        ["U: Rain? || Drip. +", "U: Rain? || Rain. -"],
        ["U: Rain? || Drip. >> Rain."],
        {},
    ),
    "nectar": (
        "ranks.jsonl",
        [
            {
                "prompt": hh("Rain?") + "\n\nAssistant: ",
                "answers": [
                    {"answer": x, "rank": r} for x, r in (("C.", 3.0), ("A.", 1.0), ("B.", 2.0))
                ],
            }
        ],
        ["U: Rain? || C. -", "U: Rain? || A. +", "U: Rain? || B. +"],
        ["U: Rain? || A. >> C."],
        {},
    ),
    "ultrafeedback": (
        "lists.jsonl",
        [
            {
                "instruction": "Prime?",
                "completions": [marked("4", "A."), marked("5", "B."), marked("N/A", "C.")],
            },
            {
                "instruction": "Egg?",
                "completions": [marked("3", "A."), marked("2", "B."), marked("3", "C.")],
            },
        ],
        [
            "U: Prime? || A. -",
            "U: Prime? || B. +",
            "U: Egg? || A. -",
            "U: Egg? || B. -",
            "U: Egg? || C. -",
        ],
        ["U: Prime? || B. >> A.", "U: Egg? || A. >> B."],
        {"dropped by --labels": 1},
    ),
    "ultrafeedback_scores": (
        "pairs.jsonl",
        [
            {
                "prompt": "Prime?",
                "chosen": [user("Prime?"), bot("A.")],
                "rejected": [user("Prime?"), bot("B.")],
                "messages": [user("Prime?"), bot("A.")],
                "score_chosen": 8.5,
                "score_rejected": 6.0,
            }
        ],
        ["U: Prime? || A. +"],
        ["U: Prime? || A. >> B."],
        {"dropped by --labels": 1},
    ),
    "argilla_ratings": (
        "pairs.jsonl",
        [
            {
                "instruction": "Prime?",
                "chosen_response": "A.",
                "rejected_response": "B.",
                "chosen_avg_rating": 5.0,
                "rejected_avg_rating": 4.75,
            }
        ],
        ["U: Prime? || A. +", "U: Prime? || B. +"],
        ["U: Prime? || A. >> B."],
        {},
    ),
    "argilla_cleaned_kto": (
        "kto.jsonl",
        [
            {"prompt": "Prime?", "completion": "A.", "label": True, "average_rating": r}
            for r in (2, 4.0, 4.75)
        ],
        ["Prime? || A. -", "Prime? || A. +"],
        None,
        {"dropped by --labels": 1},
    ),
    "capybara_ratings": (
        "pairs.jsonl",
        [
            {
                "prompt": "Rain?",
                "chosen": [user("Hi"), bot("Ho"), user("Rain?"), bot("A.")],
                "rejected": [user("Hi"), bot("Ho"), user("Rain?"), bot("B.")],
                "rating_chosen": 5,
                "rating_rejected": 4,
            }
        ],
        ["U: Hi | A: Ho | U: Rain? || A. +", "U: Hi | A: Ho | U: Rain? || B. +"],
        ["U: Hi | A: Ho | U: Rain? || A. >> B."],
        {},
    ),
    "helpsteer2": (
        "rated.jsonl",
        [
            {
                "prompt": f"Hi\n\n<extra_id_1>Assistant\nHo\n\n<extra_id_1>User\n{x}?",
                "response": "A.",
                "helpfulness": x,
            }
            for x in (4, 2, 0)
        ],
        ["U: Hi | A: Ho | U: 4? || A. +", "U: Hi | A: Ho | U: 0? || A. -"],
        None,
        {"dropped by --labels": 1},
    ),
    "helpsteer3": (
        "pairs.jsonl",
        [{"context": [user(f"{x}?")], **TWO, "overall_preference": x} for x in (-3, 0, 1)],
        ["U: -3? || Rain. +", "U: -3? || It rains. -", "U: 1? || Rain. -", "U: 1? || It rains. +"],
        ["U: -3? || Rain. >> It rains.", "U: 1? || It rains. >> Rain."],
        {"dropped by --labels": 1},
    ),
    "pku_saferlhf": (
        "pairs.jsonl",
        [
            PRIME | {"is_response_0_safe": x, "is_response_1_safe": y, "better_response_id": 1}
            for x, y in ((False, False), (True, False))
        ],
        [
            "U: Prime? || Eleven. -",
            "U: Prime? || Twelve. -",
            "U: Prime? || Eleven. +",
            "U: Prime? || Twelve. -",
        ],
        ["U: Prime? || Eleven. >> Twelve."],
        {},
    ),
    "pku_saferlhf_pairs": (
        "pairs.jsonl",
        [PRIME | {"is_response_0_safe": True, "is_response_1_safe": True, "better_response_id": 1}],
        ["U: Prime? || Eleven. -", "U: Prime? || Twelve. +"],
        ["U: Prime? || Twelve. >> Eleven."],
        {},
    ),
    "beavertails": (
        "safe.jsonl",
        [
            {"prompt": "Prime?", "response": "A.", "category": {"x": True}, "is_safe": x}
            for x in (True, False)
        ],
        ["U: Prime? || A. +", "U: Prime? || A. -"],
        None,
        {},
    ),
    "chatbot_arena": (
        "arena.jsonl",
        [
            arena("model_a", ["Drip."], ["Rain."]),
            arena("tie", ["Drip.", "Drop."], ["Rain.", "Fall."], turn=2),
            arena("model_b", ["Drip.", "Drop."], ["Rain.", "Fall."]),
            arena("tie (bothbad)", ["Drip."], ["Rain."]),
        ],
        [
            "U: Rain? || Drip. +",
            "U: Rain? || Rain. -",
            "U: Rain? | A: Drip. | U: More. || Drop. +",
            "U: Rain? | A: Rain. | U: More. || Fall. +",
            "U: Rain? || Drip. -",
            "U: Rain? || Rain. +",
            "U: Rain? || Drip. -",
            "U: Rain? || Rain. -",
        ],
        ["U: Rain? || Drip. >> Rain.", "U: Rain? || Rain. >> Drip."],
        {},
    ),
    "arena_140k": (
        "arena.jsonl",
        [
            {
                "model_a": "x",
                "model_b": "y",
                "winner": winner,
                "evaluation_order": 1,
                "conversation_a": in_parts(["Rain?", "Drip."]),
                "conversation_b": in_parts(["Rain?", "Drop."]),
                "full_conversation": [],
            }
            for winner in ("model_a", "both_bad", "tie")
        ],
        [
            f"U: Rain? || {x}"
            for x in ("Drip. +", "Drop. -", "Drip. -", "Drop. -", "Drip. +", "Drop. +")
        ],
        ["U: Rain? || Drip. >> Drop."],
        {},
    ),
    "openai_preferences": (
        "preferences.jsonl",
        [
            {
                "input": {
                    "messages": [{"role": "user", "content": "Rain?"}],
                    "tools": [],
                    "parallel_tool_calls": True,
                },
                "preferred_output": [{"role": "assistant", "content": "Drip."}],
                "non_preferred_output": [{"role": "assistant", "content": "Drop."}],
            }
        ],
        ["U: Rain? || Drip. +", "U: Rain? || Drop. -"],
        ["U: Rain? || Drip. >> Drop."],
        {},
    ),
    "arena_55k": (
        "arena.jsonl",
        [
            lists(["Hi", "Rain?"], ["Ho", "Drip."], ["Ho", "Rain."], 0, 1, 0),
            lists(["Rain?"], ["Drip."], ["Rain."], 0, 0, 1),
            lists(["Rain?"], [None], ["Rain."], 0, 1, 0),
        ],
        ["U: Hi | A: Ho | U: Rain? || Drip. -", "U: Hi | A: Ho | U: Rain? || Rain. +"],
        ["U: Hi | A: Ho | U: Rain? || Rain. >> Drip."],
        {"dropped by --labels": 1, "dropped: with an empty answer": 1},
    ),
    "stack_exchange": (
        "pairs.jsonl",
        [{"question": "Prime?", "response_j": "A.", "response_k": "B."}],
        ["U: Prime? || A. +", "U: Prime? || B. -"],
        ["U: Prime? || A. >> B."],
        {},
    ),
    "webgpt": (
        "pairs.jsonl",
        [
            {
                "question": {"full_text": "Prime?"},
                "answer_0": "A.",
                "answer_1": "B.",
                "score_0": x,
                "score_1": y,
            }
            for x, y in ((0.5, 0.25), (-0.66, 0.66), (0.0, 0.0))
        ],
        ["U: Prime? || A. +", "U: Prime? || B. +", "U: Prime? || A. -", "U: Prime? || B. +"],
        ["U: Prime? || A. >> B.", "U: Prime? || B. >> A."],
        {"dropped by --labels": 2},
    ),
    "summarize": (
        "pairs.jsonl",
        [
            {
                "info": {"post": "Keys."},
                "summaries": [{"text": "Lost."}, {"text": "Metal."}],
                "choice": x,
            }
            for x in (1, 0)
        ],
        [
            "U: Keys. || Lost. -",
            "U: Keys. || Metal. +",
            "U: Keys. || Lost. +",
            "U: Keys. || Metal. -",
        ],
        ["U: Keys. || Metal. >> Lost.", "U: Keys. || Lost. >> Metal."],
        {},
    ),
    "oasst1": (
        "tree.jsonl",
        TREE,
        ["U: Egg? || Raw. -", "U: Egg? || Boil it. +"],
        ["U: Egg? || Boil it. >> Raw."],
        {"dropped by --labels": 1, "dropped by --where": 1},
    ),
    "oasst1_pairs": (
        "tree.jsonl",
        TREE,
        [
            "U: Egg? || Raw. -",
            "U: Egg? || Boil it. +",
            "U: Egg? | A: Boil it. | U: How long? || Eight minutes. +",
        ],
        ["U: Egg? || Boil it. >> Raw."],
        {},
    ),
    "pandalm": (
        "votes.jsonl",
        [
            {
                "instruction": "Shorter.",
                "input": f"{x}",
                **TWO,
                **{f"annotator{i + 1}": y for i, y in enumerate(x)},
            }
            for x in ([2, 2, 2], [0, 0, 0], [1, 2, 1], [0, 1, 2])
        ],
        [
            "U: Shorter.\n[2, 2, 2] || Rain. -",
            "U: Shorter.\n[2, 2, 2] || It rains. +",
            "U: Shorter.\n[1, 2, 1] || Rain. +",
            "U: Shorter.\n[1, 2, 1] || It rains. -",
        ],
        [
            "U: Shorter.\n[2, 2, 2] || It rains. >> Rain.",
            "U: Shorter.\n[1, 2, 1] || Rain. >> It rains.",
        ],
        {"dropped by --labels": 1, "dropped: whose raters disagree": 1},
    ),
    "truthfulqa": (
        "lists.csv",
        "Question,Best Answer,Correct Answers,Incorrect Answers\nDucks?,No,No; They swim; Onions,Yes; Fly\n",
        [
            "U: Ducks? || No +",
            "U: Ducks? || They swim +",
            "U: Ducks? || Onions +",
            "U: Ducks? || Yes -",
            "U: Ducks? || Fly -",
        ],
        ["U: Ducks? || No >> Yes", "U: Ducks? || They swim >> Fly"],
        {},
    ),
    "feedbackqa": (
        "rated.jsonl",
        [
            {
                "question": "Mask?",
                "passage": {"reference": {"section_content": "Indoors."}},
                "rating": x,
            }
            for x in (
                ["Excellent", "Acceptable"],
                ["Bad", "Could be Improved"],
                ["Bad", "Excellent"],
            )
        ],
        ["U: Mask? || Indoors. +", "U: Mask? || Indoors. -"],
        None,
        {"dropped: whose raters disagree": 1},
    ),
    "none: conversations beside a pair": (
        "pairs.jsonl",
        [
            {
                "conversations": [
                    {"from": "system", "value": "Teach."},
                    {"from": "human", "value": "Prime?"},
                ],
                "chosen": {"from": "gpt", "value": "A."},
                "rejected": {"from": "gpt", "value": "B."},
            }
        ],
        ["S: Teach. | U: Prime? || A. +", "S: Teach. | U: Prime? || B. -"],
        ["S: Teach. | U: Prime? || A. >> B."],
        {},
    ),
    "none: a prompt that is the last question of a dialogue": (
        "pairs.jsonl",
        [
            {
                "prompt": "Rain?",
                "chosen": [user("Hi"), bot("Ho"), user("Rain?"), bot("A.")],
                "rejected": [user("Hi"), bot("Ho"), user("Rain?"), bot("B.")],
            }
        ],
        ["U: Hi | A: Ho | U: Rain? || A. +", "U: Hi | A: Ho | U: Rain? || B. -"],
        ["U: Hi | A: Ho | U: Rain? || A. >> B."],
        {},
    ),
}
MATH = {
    "prompt": "2 + 2?",
    "initial_reason_steps": "Step 1:",
    "chosen": " Add: 4.",
    "rejected": " Add: 5.",
}
